/* Decoders: a list of token strings becomes a list of byte strings, whose concatenation is the
 * text.
 *
 * The rows work on whole lists, as the library does. Streaming calls them with short lists and says
 * so by raw_bytes; a row tells by `neighbours` what it needs to see around a token. */
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/tok_internal.h"

static void begin(tok_strings *out)
{
    *out = (tok_strings){0};
    buf_puts(&out->bytes, "");
}

static void take(tok_strings *l, tok_strings *out)
{
    out->raw_bytes = l->raw_bytes;
    buf_free(&l->bytes);
    free(l->sp.v);
    *l = *out;
}

static void push(tok_strings *out, const char *s, size_t n)
{
    tok__span_push(&out->sp, out->bytes.len, n);
    buf_add(&out->bytes, s, n);
}

/* A token of characters that all stand for bytes becomes those bytes; any other stays. What comes
 * out is one string, in which broken UTF-8 is replaced before another decoder sees it. */
static void run_bytelevel(const tok_stage *s, tok_strings *l)
{
    (void)s;
    tok_strings out;
    begin(&out);
    for (size_t i = 0; i < l->sp.n; i++) {
        const char *p = l->bytes.data + l->sp.v[i].off;
        size_t n = l->sp.v[i].len, at = out.bytes.len, k = 0;
        while (k < n) {
            uint32_t cp;
            size_t m = (size_t)tok__cp(p + k, n - k, &cp);
            int b = tok__char_byte(cp);
            if (b < 0) break;
            buf_putc(&out.bytes, (char)b);
            k += m;
        }
        if (k < n) {
            out.bytes.len = at;
            buf_add(&out.bytes, p, n);
        }
        if (l->raw_bytes) tok__span_push(&out.sp, at, out.bytes.len - at);
    }
    if (!l->raw_bytes) {
        buf whole = out.bytes;
        begin(&out);
        utf8_add_lossy(&out.bytes, whole.data, whole.len);
        tok__span_push(&out.sp, 0, out.bytes.len);
        buf_free(&whole);
    }
    take(l, &out);
}

static int load_bytelevel(tok_stage *s, const json *j, const char *where, err *e)
{
    (void)s, (void)j, (void)where, (void)e;
    tok__bytelevel_init();
    return 0;
}

static int load_replace(tok_stage *s, const json *j, const char *where, err *e)
{
    int rc = tok__load_pattern(s, j, where, e);
    return rc < 0 ? rc : tok__load_text(&s->content, j, "content", NULL, where, e);
}

static void run_replace(const tok_stage *s, tok_strings *l)
{
    tok_strings out;
    begin(&out);
    tok_match *m = tok__match_make();
    for (size_t i = 0; i < l->sp.n; i++) {
        const char *p = l->bytes.data + l->sp.v[i].off;
        size_t n = l->sp.v[i].len, start = out.bytes.len, at = 0, lo, hi;
        bool valid = utf8_valid_prefix(p, n) == n;
        while (valid && at < n && tok__regex_next(s->re, m, p, n, at, &lo, &hi, NULL) > 0) {
            if (lo == hi) break;
            buf_add(&out.bytes, p + at, lo - at);
            buf_puts(&out.bytes, s->content);
            at = hi;
        }
        buf_add(&out.bytes, p + at, n - at);
        tok__span_push(&out.sp, start, out.bytes.len - start);
    }
    tok__match_drop(m);
    take(l, &out);
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
}

/* "<0x41>" -> 0x41, else -1 */
int tok__byte_token(const char *p, size_t n)
{
    if (n != 6 || memcmp(p, "<0x", 3) != 0 || p[5] != '>') return -1;
    int hi = hex_digit(p[3]), lo = hex_digit(p[4]);
    return hi < 0 || lo < 0 ? -1 : hi << 4 | lo;
}

/* A run of byte tokens is one string if it is UTF-8, else one U+FFFD a byte. Streaming, which
 * passes tokens one by one, gets the raw bytes and puts the characters together itself. */
static void run_byte_fallback(const tok_stage *s, tok_strings *l)
{
    (void)s;
    tok_strings out;
    begin(&out);
    for (size_t i = 0; i < l->sp.n;) {
        buf run = {0};
        int b;
        size_t k = i;
        while (k < l->sp.n &&
               (b = tok__byte_token(l->bytes.data + l->sp.v[k].off, l->sp.v[k].len)) >= 0) {
            buf_putc(&run, (char)b);
            k++;
        }
        if (k == i) {
            push(&out, l->bytes.data + l->sp.v[i].off, l->sp.v[i].len);
            k++;
        } else if (l->raw_bytes || utf8_valid_prefix(run.data, run.len) == run.len) {
            push(&out, run.data, run.len);
        } else {
            for (size_t m = 0; m < run.len; m++)
                push(&out, "\xEF\xBF\xBD", 3);
        }
        buf_free(&run);
        i = k;
    }
    take(l, &out);
}

static void run_fuse(const tok_stage *s, tok_strings *l)
{
    (void)s;
    tok_strings out;
    begin(&out);
    size_t at = out.bytes.len;
    for (size_t i = 0; i < l->sp.n; i++)
        buf_add(&out.bytes, l->bytes.data + l->sp.v[i].off, l->sp.v[i].len);
    tok__span_push(&out.sp, at, out.bytes.len - at);
    take(l, &out);
}

static int load_strip(tok_stage *s, const json *j, const char *where, err *e)
{
    int rc = tok__load_text(&s->content, j, "content", " ", where, e);
    if (rc >= 0) rc = json_get_i64(j, "start", &s->start, where, e);
    if (rc >= 0) rc = json_get_i64(j, "stop", &s->stop, where, e);
    if (rc < 0) return rc;
    if (!*s->content)
        return err_set(e, ERR_FORMAT, "%s: decoder Strip has an empty 'content'", where);
    return 0;
}

static void run_strip(const tok_stage *s, tok_strings *l)
{
    size_t m = strlen(s->content);
    for (size_t i = 0; i < l->sp.n; i++) {
        tok_span *v = &l->sp.v[i];
        for (int64_t k = 0; k < s->start && v->len >= m; k++) {
            if (memcmp(l->bytes.data + v->off, s->content, m) != 0) break;
            v->off += (uint32_t)m;
            v->len -= (uint32_t)m;
        }
        for (int64_t k = 0; k < s->stop && v->len >= m; k++) {
            if (memcmp(l->bytes.data + v->off + v->len - m, s->content, m) != 0) break;
            v->len -= (uint32_t)m;
        }
    }
}

static int load_metaspace(tok_stage *s, const json *j, const char *where, err *e)
{
    bool legacy = true;
    const char *scheme = NULL;
    int rc = tok__load_text(&s->content, j, "replacement", "\xE2\x96\x81", where, e);
    if (rc >= 0) rc = json_get_bool(j, "add_prefix_space", &legacy, where, e);
    if (rc >= 0) rc = json_get_str(j, "prepend_scheme", &scheme, where, e);
    if (rc < 0) return rc;
    s->prefix_space = scheme ? strcmp(scheme, "never") != 0 : legacy;
    return *s->content
               ? 0
               : err_set(e, ERR_FORMAT, "%s: decoder Metaspace has an empty 'replacement'", where);
}

static void run_metaspace(const tok_stage *s, tok_strings *l)
{
    size_t m = strlen(s->content);
    tok_strings out;
    begin(&out);
    for (size_t i = 0; i < l->sp.n; i++) {
        const char *p = l->bytes.data + l->sp.v[i].off;
        size_t n = l->sp.v[i].len, at = out.bytes.len;
        for (size_t k = 0; k < n;) {
            if (n - k >= m && !memcmp(p + k, s->content, m)) {
                if (i > 0 || !s->prefix_space) buf_putc(&out.bytes, ' ');
                k += m;
            } else {
                buf_putc(&out.bytes, p[k++]);
            }
        }
        tok__span_push(&out.sp, at, out.bytes.len - at);
    }
    take(l, &out);
}

/* ---- WordPiece and CTC ------------------------------------------------------------------------
 */

/* Every `from` in *b becomes `to`; spare is its other half. */
static void replace_all(buf *b, buf *spare, const char *from, const char *to)
{
    size_t m = strlen(from);
    const char *p = b->data, *hit;
    if (!m || !memmem(b->data, b->len, from, m)) return;
    buf_clear(spare);
    buf_puts(spare, "");
    while ((hit = memmem(p, b->len - (size_t)(p - b->data), from, m))) {
        buf_add(spare, p, (size_t)(hit - p));
        buf_puts(spare, to);
        p = hit + m;
    }
    buf_add(spare, p, b->len - (size_t)(p - b->data));
    buf t = *b;
    *b = *spare;
    *spare = t;
}

/* Spaces before marks and inside English short forms go: the library's list, in its order. */
static void tidy(buf *b, buf *spare)
{
    static const char *const rules[][2] = {
        {" .", "."},   {" ?", "?"},     {" !", "!"},     {" ,", ","},
        {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},   {" do not", " don't"},
        {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        replace_all(b, spare, rules[i][0], rules[i][1]);
}

static int load_wordpiece(tok_stage *s, const json *j, const char *where, err *e)
{
    s->clean = true;
    int rc = tok__load_text(&s->content, j, "prefix", "##", where, e);
    if (rc >= 0) rc = json_get_bool(j, "cleanup", &s->clean, where, e);
    return rc < 0 ? rc : 0;
}

static void run_wordpiece(const tok_stage *s, tok_strings *l)
{
    size_t m = strlen(s->content);
    tok_strings out;
    buf b = {0}, spare = {0};
    begin(&out);
    for (size_t i = 0; i < l->sp.n; i++) {
        const char *p = l->bytes.data + l->sp.v[i].off;
        size_t n = l->sp.v[i].len;
        bool goes_on = n >= m && !memcmp(p, s->content, m);
        buf_clear(&b);
        buf_puts(&b, i && !goes_on ? " " : "");
        buf_add(&b, i && goes_on ? p + m : p, i && goes_on ? n - m : n);
        if (s->clean) tidy(&b, &spare);
        push(&out, b.data, b.len);
    }
    buf_free(&b);
    buf_free(&spare);
    take(l, &out);
}

static int load_ctc(tok_stage *s, const json *j, const char *where, err *e)
{
    s->clean = true;
    int rc = tok__load_text(&s->text, j, "pad_token", "<pad>", where, e);
    if (rc >= 0) rc = tok__load_text(&s->content, j, "word_delimiter_token", "|", where, e);
    if (rc >= 0) rc = json_get_bool(j, "cleanup", &s->clean, where, e);
    return rc < 0 ? rc : 0;
}

/* Equal neighbours count once; padding goes; the delimiter is a space only under cleanup. */
static void run_ctc(const tok_stage *s, tok_strings *l)
{
    tok_strings out;
    buf b = {0}, spare = {0};
    begin(&out);
    for (size_t i = 0; i < l->sp.n; i++) {
        tok_span v = l->sp.v[i], last = i ? l->sp.v[i - 1] : v;
        const char *p = l->bytes.data + v.off;
        if (i && v.len == last.len && !memcmp(p, l->bytes.data + last.off, v.len)) continue;
        buf_clear(&b);
        buf_puts(&b, "");
        buf_add(&b, p, v.len);
        replace_all(&b, &spare, s->text, "");
        if (s->clean) tidy(&b, &spare);
        if (s->clean) replace_all(&b, &spare, s->content, " ");
        if (b.len) push(&out, b.data, b.len);
    }
    buf_free(&b);
    buf_free(&spare);
    take(l, &out);
}

/* ---- BPEDecoder: the mark of a word's end is a space, but not at the end of the text --------- */

static int load_bpe(tok_stage *s, const json *j, const char *where, err *e)
{
    return tok__load_text(&s->content, j, "suffix", "</w>", where, e);
}

static void run_bpe(const tok_stage *s, tok_strings *l)
{
    tok_strings out;
    buf b = {0}, spare = {0};
    begin(&out);
    for (size_t i = 0; i < l->sp.n; i++) {
        buf_clear(&b);
        buf_puts(&b, "");
        buf_add(&b, l->bytes.data + l->sp.v[i].off, l->sp.v[i].len);
        replace_all(&b, &spare, s->content, i + 1 < l->sp.n ? " " : "");
        push(&out, b.data, b.len);
    }
    buf_free(&b);
    buf_free(&spare);
    take(l, &out);
}

static int load_sequence(tok_stage *s, const json *j, const char *where, err *e)
{
    return tok__load_children(s, j, &tok__decoders, where, e);
}

static void run_sequence(const tok_stage *s, tok_strings *l)
{
    for (size_t i = 0; i < s->n_child; i++)
        s->child[i].kind->decode(&s->child[i], l);
}

static const tok_stage_kind kinds[] = {
    {.type = "ByteLevel", .load = load_bytelevel, .decode = run_bytelevel},
    {.type = "Replace", .load = load_replace, .decode = run_replace},
    {.type = "ByteFallback", .decode = run_byte_fallback},
    {.type = "Fuse", .decode = run_fuse},
    {.type = "Strip", .load = load_strip, .decode = run_strip},
    {.type = "Metaspace", .load = load_metaspace, .decode = run_metaspace},
    {.type = "WordPiece", .load = load_wordpiece, .decode = run_wordpiece},
    {.type = "CTC", .load = load_ctc, .decode = run_ctc, .neighbours = TOK_COMPARES},
    {.type = "BPEDecoder", .load = load_bpe, .decode = run_bpe, .neighbours = TOK_LOOKS_AHEAD},
    {.type = "Sequence", .load = load_sequence, .decode = run_sequence},
};
const tok_family tok__decoders = {"decoder", "decoders", kinds, sizeof kinds / sizeof *kinds};
