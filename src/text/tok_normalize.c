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

static int unicode_form(tok_work *w, int options, err *e)
{
    if (ascii_prefix(w->text.data, w->text.len) == w->text.len) return 0;
    if (options == UTF8PROC_COMPOSE && is_nfc(w->text.data, w->text.len)) return 0;
    utf8proc_uint8_t *out = NULL;
    utf8proc_ssize_t n =
        utf8proc_map((const utf8proc_uint8_t *)w->text.data, (utf8proc_ssize_t)w->text.len, &out,
                     (utf8proc_option_t)(UTF8PROC_STABLE | options));
    if (n < 0)
        return err_set(e, ERR_FAIL, "tokenizer: Unicode normalization failed: %s",
                       utf8proc_errmsg(n));
    buf_clear(&w->text);
    buf_add(&w->text, out, (size_t)n);
    free(out);
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

static int run_lowercase(const tok_stage *s, tok_work *w, err *e)
{
    (void)s, (void)e;
    buf_clear(&w->other);
    for (size_t i = 0; i < w->text.len;) {
        uint32_t cp;
        int k = tok__cp(w->text.data + i, w->text.len - i, &cp);
        if (cp < 0x80) {
            buf_putc(&w->other, (char)(cp >= 'A' && cp <= 'Z' ? cp + 32 : cp));
        } else if (cp == 0x130) { /* the only one whose full lower case is two code points */
            buf_puts(&w->other, "i\xCC\x87");
        } else {
            char u[4];
            int m = utf8_encode((uint32_t)utf8proc_tolower((utf8proc_int32_t)cp), u);
            buf_add(&w->other, u, (size_t)m);
        }
        i += (size_t)k;
    }
    buf_puts(&w->other, "");
    take_other(w);
    return 0;
}

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
    {.type = "Prepend", .load = load_prepend, .normalize = run_prepend},
    {.type = "Replace", .load = load_replace, .normalize = run_replace},
    {.type = "Strip", .load = load_strip, .normalize = run_strip},
    {.type = "Sequence", .load = load_sequence, .normalize = run_sequence},
};
const tok_family tok__normalizers = {"normalizer", "normalizers", kinds,
                                     sizeof kinds / sizeof *kinds};
