/* Normalizers: each rewrites the text of one piece (what lies between two added tokens).
 *
 * The four Unicode forms come from utf8proc. Text that is in all forms already, told by its bytes
 * (ASCII) or for NFC by code points that take no part in any composition, is passed through. */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>
#include "base/utf8.h"
#include "text/tok_internal.h"

static void take_other(tok_work *w)
{
    buf b = w->text;
    w->text = w->other;
    w->other = b;
}

static size_t ascii_prefix(const char *s, size_t n)
{
    size_t i = 0;
    uint64_t word;
    for (; i + 8 <= n; i += 8) {
        memcpy(&word, s + i, 8);
        if (word & 0x8080808080808080u) break;
    }
    while (i < n && !((unsigned char)s[i] & 0x80))
        i++;
    return i;
}

/* Code points that NFC leaves alone whatever stands beside them. */
static bool nfc_inert(uint32_t c)
{
    return c < 0x300 || (c >= 0x400 && c <= 0x482) || (c >= 0x2010 && c <= 0x2027) ||
           (c >= 0x2030 && c <= 0x205E) || (c >= 0x3000 && c <= 0x3029) ||
           (c >= 0x3041 && c <= 0x3096) || (c >= 0x30A1 && c <= 0x30FE) ||
           (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0xAC00 && c <= 0xD7A3) ||
           (c >= 0xFF01 && c <= 0xFFEE) || (c >= 0x1F300 && c <= 0x1FAFF);
}

static bool is_nfc(const char *s, size_t n)
{
    for (size_t i = ascii_prefix(s, n); i < n;) {
        uint32_t cp;
        i += (size_t)tok__cp(s + i, n - i, &cp);
        if (!nfc_inert(cp)) return false;
    }
    return true;
}

/* The library's tables are of an older Unicode: a character that they lack has no decomposition and
 * orders nothing, so that it parts the text. */
static size_t foreign_at(const char *s, size_t n, size_t from)
{
    for (size_t i = from; i < n;) {
        uint32_t cp;
        size_t k = (size_t)tok__cp(s + i, n - i, &cp);
        if (cp >= 0x80 && tok__is_foreign(cp)) return i;
        i += k;
    }
    return n;
}

static int map_part(const char *s, size_t n, int options, buf *out, err *e)
{
    utf8proc_uint8_t *to = NULL;
    utf8proc_ssize_t k = utf8proc_map((const utf8proc_uint8_t *)s, (utf8proc_ssize_t)n, &to,
                                      (utf8proc_option_t)(UTF8PROC_STABLE | options));
    if (k < 0)
        return err_set(e, ERR_FAIL, "tokenizer: Unicode normalization failed: %s",
                       utf8proc_errmsg(k));
    buf_add(out, to, (size_t)k);
    free(to);
    return 0;
}

static int unicode_form(tok_work *w, int options, err *e)
{
    const char *s = w->text.data;
    size_t n = w->text.len, i = 0;
    if (ascii_prefix(s, n) == n) return 0;
    if (options == UTF8PROC_COMPOSE && is_nfc(s, n)) return 0;
    buf_clear(&w->other);
    buf_puts(&w->other, "");
    while (i < n) {
        size_t at = foreign_at(s, n, i);
        if (at > i) {
            int rc = map_part(s + i, at - i, options, &w->other, e);
            if (rc < 0) return rc;
        }
        uint32_t cp;
        size_t k = at < n ? (size_t)tok__cp(s + at, n - at, &cp) : 0;
        buf_add(&w->other, s + at, k);
        i = at + k;
    }
    take_other(w);
    return 0;
}

static int run_nfc(const tok_stage *s, tok_work *w, err *e)
{
    (void)s;
    return unicode_form(w, UTF8PROC_COMPOSE, e);
}

static int run_nfd(const tok_stage *s, tok_work *w, err *e)
{
    (void)s;
    return unicode_form(w, UTF8PROC_DECOMPOSE, e);
}

static int run_nfkc(const tok_stage *s, tok_work *w, err *e)
{
    (void)s;
    return unicode_form(w, UTF8PROC_COMPOSE | UTF8PROC_COMPAT, e);
}

static int run_nfkd(const tok_stage *s, tok_work *w, err *e)
{
    (void)s;
    return unicode_form(w, UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT, e);
}

/* ---- character by character ------------------------------------------------------------------
 */

static void add_cp(buf *out, uint32_t cp)
{
    char u[4];
    buf_add(out, u, (size_t)utf8_encode(cp, u));
}

/* Writes w->text anew through fn, which appends what a character becomes. */
static void each_char(tok_work *w, void (*fn)(uint32_t cp, buf *out))
{
    buf_clear(&w->other);
    buf_puts(&w->other, "");
    for (size_t i = 0; i < w->text.len;) {
        uint32_t cp;
        i += (size_t)tok__cp(w->text.data + i, w->text.len - i, &cp);
        fn(cp, &w->other);
    }
    take_other(w);
}

static void lower_char(uint32_t cp, buf *out)
{
    uint32_t to[2];
    int n = tok__lower(cp, to);
    for (int i = 0; i < n; i++)
        add_cp(out, to[i]);
}

static int run_lowercase(const tok_stage *s, tok_work *w, err *e)
{
    (void)s, (void)e;
    each_char(w, lower_char);
    return 0;
}

static void strip_accent(uint32_t cp, buf *out)
{
    if (!tok__is(TOK_COMBINING, cp)) add_cp(out, cp);
}

static int run_strip_accents(const tok_stage *s, tok_work *w, err *e)
{
    (void)s, (void)e;
    each_char(w, strip_accent);
    return 0;
}

/* Rules of the Google NMT models. */
static void nmt_char(uint32_t cp, buf *out)
{
    bool drop = (cp >= 1 && cp <= 8) || cp == 0xB || (cp >= 0xE && cp <= 0x1F) || cp == 0x7F ||
                cp == 0x8F || cp == 0x9F;
    bool space = cp == 9 || cp == 0xA || cp == 0xC || cp == 0xD || cp == 0x1680 ||
                 (cp >= 0x200B && cp <= 0x200F) || cp == 0x2028 || cp == 0x2029 || cp == 0x2581 ||
                 cp == 0xFEFF || cp == 0xFFFD;
    if (!drop) add_cp(out, space ? ' ' : cp);
}

static int run_nmt(const tok_stage *s, tok_work *w, err *e)
{
    (void)s, (void)e;
    each_char(w, nmt_char);
    return 0;
}

static int run_bytelevel(const tok_stage *s, tok_work *w, err *e)
{
    (void)s, (void)e;
    buf_clear(&w->other);
    buf_puts(&w->other, "");
    for (size_t i = 0; i < w->text.len; i++) {
        unsigned char b = (unsigned char)w->text.data[i];
        buf_add(&w->other, tok__byte_char[b], tok__byte_char_len[b]);
    }
    take_other(w);
    return 0;
}

/* ---- BERT ------------------------------------------------------------------------------------ */

static void clean_char(uint32_t cp, buf *out)
{
    bool space = tok__is_space(cp); /* a tab is a space before it is a control character */
    if (space && (cp == 9 || cp == 10 || cp == 13 || !tok__is(TOK_OTHER, cp)))
        buf_putc(out, ' ');
    else if (cp && cp != 0xFFFD && !tok__is(TOK_OTHER, cp))
        add_cp(out, cp);
}

/* Ideographs get spaces around them. The gap between the extensions D and E is the library's. */
static void part_ideograph(uint32_t cp, buf *out)
{
    bool yes = (cp >= 0x4E00 && cp <= 0x9FFF) || (cp >= 0x3400 && cp <= 0x4DBF) ||
               (cp >= 0x20000 && cp <= 0x2A6DF) || (cp >= 0x2A700 && cp <= 0x2B73F) ||
               (cp >= 0x2B740 && cp <= 0x2B81F) || (cp >= 0x2B920 && cp <= 0x2CEAF) ||
               (cp >= 0xF900 && cp <= 0xFAFF) || (cp >= 0x2F800 && cp <= 0x2FA1F);
    if (yes) buf_putc(out, ' ');
    add_cp(out, cp);
    if (yes) buf_putc(out, ' ');
}

static void strip_nonspacing(uint32_t cp, buf *out)
{
    if (!tok__is(TOK_NONSPACING, cp)) add_cp(out, cp);
}

static int load_bert(tok_stage *s, const json *j, const char *where, err *e)
{
    s->clean = s->chinese = s->lower = true;
    int rc = json_get_bool(j, "clean_text", &s->clean, where, e);
    if (rc >= 0) rc = json_get_bool(j, "handle_chinese_chars", &s->chinese, where, e);
    if (rc >= 0) rc = json_get_bool(j, "lowercase", &s->lower, where, e);
    s->accents = s->lower; /* unless it is said */
    if (rc >= 0) rc = json_get_bool(j, "strip_accents", &s->accents, where, e);
    return rc < 0 ? rc : 0;
}

static int run_bert(const tok_stage *s, tok_work *w, err *e)
{
    int rc = 0;
    if (s->clean) each_char(w, clean_char);
    if (s->chinese) each_char(w, part_ideograph);
    if (s->accents) rc = unicode_form(w, UTF8PROC_DECOMPOSE, e);
    if (rc < 0) return rc;
    if (s->accents) each_char(w, strip_nonspacing);
    if (s->lower) each_char(w, lower_char);
    return 0;
}

/* ---- precompiled map -------------------------------------------------------------------------
 */

static int load_precompiled(tok_stage *s, const json *j, const char *where, err *e)
{
    const char *text = NULL;
    int rc = json_get_str(j, "precompiled_charsmap", &text, where, e);
    if (rc < 0) return rc;
    if (!text)
        return err_set(e, ERR_FORMAT, "%s: normalizer Precompiled lacks its precompiled_charsmap",
                       where);
    return tok__charsmap_base64(&s->map, text, where, e);
}

static int run_precompiled(const tok_stage *s, tok_work *w, err *e)
{
    (void)e;
    buf_clear(&w->other);
    buf_puts(&w->other, "");
    tok__charsmap_graphemes(s->map, w->text.data, w->text.len, &w->other);
    take_other(w);
    return 0;
}

/* ---- parts of the text ------------------------------------------------------------------------
 */

static int load_prepend(tok_stage *s, const json *j, const char *where, err *e)
{
    return tok__load_text(&s->content, j, "prepend", NULL, where, e);
}

static int run_prepend(const tok_stage *s, tok_work *w, err *e)
{
    (void)e;
    if (!w->text.len) return 0;
    buf_clear(&w->other);
    buf_puts(&w->other, s->content);
    buf_add(&w->other, w->text.data, w->text.len);
    take_other(w);
    return 0;
}

static int load_replace(tok_stage *s, const json *j, const char *where, err *e)
{
    int rc = tok__load_pattern(s, j, where, e);
    return rc < 0 ? rc : tok__load_text(&s->content, j, "content", NULL, where, e);
}

static int run_replace(const tok_stage *s, tok_work *w, err *e)
{
    size_t at = 0, from = 0, lo, hi, n = w->text.len;
    int rc;
    buf_clear(&w->other);
    buf_puts(&w->other, "");
    while (from <= n &&
           (rc = tok__regex_next(s->re, w->match, w->text.data, n, from, &lo, &hi, e))) {
        if (rc < 0) return rc;
        buf_add(&w->other, w->text.data + at, lo - at);
        buf_puts(&w->other, s->content);
        at = from = hi;
        if (lo == hi) { /* an empty match: go on behind the next character */
            uint32_t cp;
            from += hi < n ? (size_t)tok__cp(w->text.data + hi, n - hi, &cp) : 1;
        }
    }
    buf_add(&w->other, w->text.data + at, n - at);
    take_other(w);
    return 0;
}

static int load_strip(tok_stage *s, const json *j, const char *where, err *e)
{
    s->left = s->right = true;
    int rc = json_get_bool(j, "strip_left", &s->left, where, e);
    if (rc >= 0) rc = json_get_bool(j, "strip_right", &s->right, where, e);
    return rc < 0 ? rc : 0;
}

static int run_strip(const tok_stage *s, tok_work *w, err *e)
{
    (void)e;
    size_t lo = 0, hi = w->text.len;
    uint32_t cp;
    while (s->left && lo < hi) {
        int k = tok__cp(w->text.data + lo, hi - lo, &cp);
        if (!tok__is_space(cp)) break;
        lo += (size_t)k;
    }
    while (s->right && hi > lo) {
        int k = tok__cp_before(w->text.data, hi, &cp);
        if (!tok__is_space(cp)) break;
        hi -= (size_t)k;
    }
    memmove(w->text.data, w->text.data + lo, hi - lo);
    w->text.len = hi - lo;
    w->text.data[w->text.len] = 0;
    return 0;
}

static int load_sequence(tok_stage *s, const json *j, const char *where, err *e)
{
    return tok__load_children(s, j, &tok__normalizers, where, e);
}

static int run_sequence(const tok_stage *s, tok_work *w, err *e)
{
    for (size_t i = 0; i < s->n_child; i++) {
        int rc = s->child[i].kind->normalize(&s->child[i], w, e);
        if (rc < 0) return rc;
    }
    return 0;
}

static const tok_stage_kind kinds[] = {
    {.type = "NFC", .normalize = run_nfc},
    {.type = "NFD", .normalize = run_nfd},
    {.type = "NFKC", .normalize = run_nfkc},
    {.type = "NFKD", .normalize = run_nfkd},
    {.type = "Lowercase", .normalize = run_lowercase},
    {.type = "StripAccents", .normalize = run_strip_accents},
    {.type = "Nmt", .normalize = run_nmt},
    {.type = "ByteLevel", .normalize = run_bytelevel},
    {.type = "BertNormalizer", .load = load_bert, .normalize = run_bert},
    {.type = "Precompiled", .load = load_precompiled, .normalize = run_precompiled},
    {.type = "Prepend", .load = load_prepend, .normalize = run_prepend},
    {.type = "Replace", .load = load_replace, .normalize = run_replace},
    {.type = "Strip", .load = load_strip, .normalize = run_strip},
    {.type = "Sequence", .load = load_sequence, .normalize = run_sequence},
};
const tok_family tok__normalizers = {"normalizer", "normalizers", kinds,
                                     sizeof kinds / sizeof *kinds};
