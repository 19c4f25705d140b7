/* Pre-tokenizers: each cuts the words (spans of w->text) finer, and may rewrite the text.
 *
 * A splitter finds matches in one word; gaps and matches alternate in w->seg, and the behaviour
 * says what becomes of the matches: words of their own, dropped, glued to the neighbour, or joined
 * to runs. Empty words vanish. A word is matched by itself: patterns do not look across borders. */
#include <stdlib.h>
#include <string.h>
#include "text/tok_internal.h"

#define IS_MATCH 0x80000000u /* in tok_span.len of w->seg; texts are below 2^31 bytes */

static void seg_push(tok_work *w, size_t lo, size_t hi, bool match)
{
    tok__span_push(&w->seg, lo, hi - lo);
    if (match) w->seg.v[w->seg.n - 1].len |= IS_MATCH;
}

typedef int matcher(const tok_stage *s, tok_work *w, const char *p, size_t n, err *e);

static void keep(tok_work *w, size_t base, size_t lo, size_t hi)
{
    if (hi > lo) tok__span_push(&w->sp_other, base + lo, hi - lo);
}

static size_t seg_end(tok_span v)
{
    return v.off + (v.len & ~IS_MATCH);
}

/* Glues matches to the word before them (step 1) or, read from the end, behind them (step -1). */
static void merge_neighbours(tok_work *w, size_t base, bool next)
{
    tok_spans *g = &w->seg;
    size_t out = 0;
    bool previous = false;
    for (size_t k = 0; k < g->n; k++) {
        tok_span v = g->v[next ? g->n - 1 - k : k];
        bool match = v.len & IS_MATCH;
        v.len &= ~IS_MATCH;
        if (match && !previous && out) {
            tok_span *last = &w->sp_other.v[w->sp_other.n - 1];
            if (next) last->off = (uint32_t)(base + v.off);
            last->len += v.len;
        } else {
            tok__span_push(&w->sp_other, base + v.off, v.len);
            out++;
        }
        previous = match;
    }
    tok_span *a = w->sp_other.v + (w->sp_other.n - out);
    for (size_t i = 0; next && i < out / 2; i++) {
        tok_span t = a[i];
        a[i] = a[out - 1 - i];
        a[out - 1 - i] = t;
    }
    size_t kept = 0;
    for (size_t i = 0; i < out; i++)
        if (a[i].len) a[kept++] = a[i];
    w->sp_other.n -= out - kept;
}

static void apply_behavior(const tok_stage *s, tok_work *w, size_t base)
{
    tok_spans *g = &w->seg;
    if (s->invert)
        for (size_t i = 0; i < g->n; i++)
            g->v[i].len ^= IS_MATCH;
    if (s->behavior == TOK_MERGED_PREVIOUS || s->behavior == TOK_MERGED_NEXT) {
        merge_neighbours(w, base, s->behavior == TOK_MERGED_NEXT);
        return;
    }
    for (size_t i = 0; i < g->n; i++) {
        bool match = g->v[i].len & IS_MATCH;
        size_t lo = g->v[i].off;
        if (s->behavior == TOK_REMOVED && match) continue;
        if (s->behavior == TOK_CONTIGUOUS)
            while (i + 1 < g->n && (bool)(g->v[i + 1].len & IS_MATCH) == match)
                i++;
        keep(w, base, lo, seg_end(g->v[i]));
    }
}

static void take_spans(tok_work *w)
{
    tok_spans t = w->sp;
    w->sp = w->sp_other;
    w->sp_other = t;
    w->sp_other.n = 0;
}

static int split_words(const tok_stage *s, tok_work *w, matcher *find, err *e)
{
    const char *text = w->text.data;
    bool classes = s->re && !tok__regex_is_literal(s->re);
    if (classes && tok__stand_in(text, w->text.len, &w->other)) text = w->other.data;
    w->sp_other.n = 0;
    for (size_t i = 0; i < w->sp.n; i++) {
        tok_span v = w->sp.v[i];
        w->seg.n = 0;
        int rc = find(s, w, text + v.off, v.len, e);
        if (rc < 0) return rc;
        apply_behavior(s, w, v.off);
    }
    take_spans(w);
    return 0;
}

/* ---- Split ---------------------------------------------------------------------------------- */

static int find_regex(const tok_stage *s, tok_work *w, const char *p, size_t n, err *e)
{
    size_t at = 0, from = 0, lo, hi;
    int rc = 0;
    while (from <= n && (rc = tok__regex_next(s->re, w->match, p, n, from, &lo, &hi, e)) > 0) {
        if (lo > at) seg_push(w, at, lo, false);
        seg_push(w, lo, hi, true);
        at = from = hi;
        if (lo == hi) {
            uint32_t cp;
            from += hi < n ? (size_t)tok__cp(p + hi, n - hi, &cp) : 1;
        }
    }
    if (rc < 0) return rc;
    if (at < n) seg_push(w, at, n, false);
    return 0;
}

static const char *const behaviors[] = {"Isolated", "Removed", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};

static int load_behavior(tok_stage *s, const json *j, const char *where, err *e)
{
    const char *b = NULL;
    int rc = json_get_str(j, "behavior", &b, where, e);
    if (rc <= 0) return rc;
    for (int i = 0; i < 5; i++)
        if (!strcmp(behaviors[i], b)) {
            s->behavior = i;
            return 0;
        }
    return err_set(e, ERR_UNSUPPORTED,
                   "%s: split behavior '%.40s' is not supported; supported are Isolated, Removed, "
                   "MergedWithPrevious, MergedWithNext, Contiguous",
                   where, b);
}

static int load_split(tok_stage *s, const json *j, const char *where, err *e)
{
    int rc = tok__load_pattern(s, j, where, e);
    if (rc >= 0) rc = load_behavior(s, j, where, e);
    if (rc >= 0) rc = json_get_bool(j, "invert", &s->invert, where, e);
    return rc < 0 ? rc : 0;
}

static int run_regex(const tok_stage *s, tok_work *w, err *e)
{
    return split_words(s, w, find_regex, e);
}

/* ---- splits by a class of characters ----------------------------------------------------------
 */

static int find_class(tok_work *w, const char *p, size_t n, bool (*in)(uint32_t))
{
    size_t at = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        size_t k = (size_t)tok__cp(p + i, n - i, &cp);
        if (in(cp)) {
            if (i > at) seg_push(w, at, i, false);
            seg_push(w, i, i + k, true);
            at = i + k;
        }
        i += k;
    }
    if (at < n) seg_push(w, at, n, false);
    return 0;
}

static int find_digits(const tok_stage *s, tok_work *w, const char *p, size_t n, err *e)
{
    (void)s, (void)e;
    return find_class(w, p, n, tok__is_numeric);
}

static int find_punct(const tok_stage *s, tok_work *w, const char *p, size_t n, err *e)
{
    (void)s, (void)e;
    return find_class(w, p, n, tok__is_punct);
}

static int find_space(const tok_stage *s, tok_work *w, const char *p, size_t n, err *e)
{
    (void)s, (void)e;
    return find_class(w, p, n, tok__is_space);
}

static int load_digits(tok_stage *s, const json *j, const char *where, err *e)
{
    int rc = json_get_bool(j, "individual_digits", &s->individual, where, e);
    s->behavior = s->individual ? TOK_ISOLATED : TOK_CONTIGUOUS;
    return rc < 0 ? rc : 0;
}

static int run_digits(const tok_stage *s, tok_work *w, err *e)
{
    return split_words(s, w, find_digits, e);
}

static int run_punct(const tok_stage *s, tok_work *w, err *e)
{
    return split_words(s, w, find_punct, e);
}

static int load_whitespace_split(tok_stage *s, const json *j, const char *where, err *e)
{
    (void)j, (void)where, (void)e;
    s->behavior = TOK_REMOVED;
    return 0;
}

static int run_whitespace_split(const tok_stage *s, tok_work *w, err *e)
{
    return split_words(s, w, find_space, e);
}

/* \w+ | [^\w\s]+ ; white space is dropped */
static int find_words(const tok_stage *s, tok_work *w, const char *p, size_t n, err *e)
{
    (void)s, (void)e;
    int run = -1; /* class of the run that begins at `at`: 0 space, 1 word, 2 other */
    size_t at = 0, i = 0;
    while (i < n) {
        uint32_t cp;
        size_t k = (size_t)tok__cp(p + i, n - i, &cp);
        int c = tok__is_word(cp) ? 1 : tok__is_space(cp) ? 0 : 2;
        if (c != run) {
            if (i > at) seg_push(w, at, i, run == 0);
            at = i;
            run = c;
        }
        i += k;
    }
    if (n > at) seg_push(w, at, n, run == 0);
    return 0;
}

static int run_whitespace(const tok_stage *s, tok_work *w, err *e)
{
    return split_words(s, w, find_words, e);
}

static int load_delimiter(tok_stage *s, const json *j, const char *where, err *e)
{
    int rc = tok__load_text(&s->text, j, "delimiter", NULL, where, e);
    s->behavior = TOK_REMOVED;
    return rc < 0 ? rc : tok__regex_literal(&s->re, s->text, strlen(s->text), where, e);
}

/* ---- BERT: white space goes, each punctuation mark is a word -----------------------------------
 */

static int load_bert(tok_stage *s, const json *j, const char *where, err *e)
{
    (void)j, (void)where, (void)e;
    s->child = xcalloc(2, sizeof *s->child);
    s->n_child = 2;
    s->child[0].behavior = TOK_REMOVED;
    s->child[1].behavior = TOK_ISOLATED;
    return 0;
}

static int run_bert(const tok_stage *s, tok_work *w, err *e)
{
    int rc = split_words(&s->child[0], w, find_space, e);
    return rc < 0 ? rc : split_words(&s->child[1], w, find_punct, e);
}

/* ---- UnicodeScripts ----------------------------------------------------------------------------
 */

/* A word begins where the script changes; a space belongs to any script, and as in the library the
 * spaces in front of the first word are lost. */
static int find_scripts(const tok_stage *s, tok_work *w, const char *p, size_t n, err *e)
{
    (void)s, (void)e;
    int last = -1;
    size_t at = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        size_t k = (size_t)tok__cp(p + i, n - i, &cp);
        int script = tok__script(cp);
        if (script >= 0 && script != last) {
            if (last >= 0) seg_push(w, at, i, false);
            at = i;
            last = script;
        }
        i += k;
    }
    if (last >= 0) seg_push(w, at, n, false);
    return 0;
}

static int run_scripts(const tok_stage *s, tok_work *w, err *e)
{
    return split_words(s, w, find_scripts, e);
}

/* ---- FixedLength ------------------------------------------------------------------------------
 */

static int load_fixed(tok_stage *s, const json *j, const char *where, err *e)
{
    int64_t n = 5;
    int rc = json_get_i64(j, "length", &n, where, e);
    if (rc < 0) return rc;
    if (n < 1)
        return err_set(e, ERR_FORMAT,
                       "%s: pre-tokenizer FixedLength has length %lld; expected 1 or more", where,
                       (long long)n);
    s->length = (size_t)n;
    return 0;
}

static int find_fixed(const tok_stage *s, tok_work *w, const char *p, size_t n, err *e)
{
    (void)e;
    size_t at = 0, chars = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        i += (size_t)tok__cp(p + i, n - i, &cp);
        if (++chars < s->length && i < n) continue;
        seg_push(w, at, i, false);
        at = i;
        chars = 0;
    }
    return 0;
}

static int run_fixed(const tok_stage *s, tok_work *w, err *e)
{
    return split_words(s, w, find_fixed, e);
}

/* ---- ByteLevel ------------------------------------------------------------------------------ */

static int load_bytelevel(tok_stage *s, const json *j, const char *where, err *e)
{
    s->prefix_space = s->use_regex = true;
    int rc = json_get_bool(j, "add_prefix_space", &s->prefix_space, where, e);
    if (rc >= 0) rc = json_get_bool(j, "use_regex", &s->use_regex, where, e);
    if (rc < 0) return rc;
    tok__bytelevel_init();
    return s->use_regex
               ? tok__regex_open(&s->re, tok__gpt2_pattern, strlen(tok__gpt2_pattern), where, e)
               : 0;
}

/* Writes every word anew with `prefix` before those that do not begin with it. */
static void prefix_words(tok_work *w, const char *prefix, size_t only_first)
{
    size_t m = strlen(prefix);
    buf_clear(&w->other);
    w->sp_other.n = 0;
    for (size_t i = 0; i < w->sp.n; i++) {
        const char *p = w->text.data + w->sp.v[i].off;
        size_t n = w->sp.v[i].len, at = w->other.len;
        if (i < only_first && (n < m || memcmp(p, prefix, m) != 0)) buf_add(&w->other, prefix, m);
        buf_add(&w->other, p, n);
        tok__span_push(&w->sp_other, at, w->other.len - at);
    }
    buf b = w->text;
    w->text = w->other;
    w->other = b;
    take_spans(w);
}

static void map_bytes(tok_work *w)
{
    buf_clear(&w->other);
    size_t total = 0;
    for (size_t i = 0; i < w->sp.n; i++)
        total += w->sp.v[i].len;
    buf_reserve(&w->other, 2 * total + 1);
    char *o = w->other.data;
    size_t at = 0;
    for (size_t i = 0; i < w->sp.n; i++) {
        const unsigned char *p = (const unsigned char *)w->text.data + w->sp.v[i].off;
        size_t n = w->sp.v[i].len, start = at;
        for (size_t k = 0; k < n; k++) {
            memcpy(o + at, tok__byte_char[p[k]], 2);
            at += tok__byte_char_len[p[k]];
        }
        w->sp.v[i] = (tok_span){(uint32_t)start, (uint32_t)(at - start)};
    }
    o[at] = 0;
    w->other.len = at;
    buf b = w->text;
    w->text = w->other;
    w->other = b;
}

static int run_bytelevel(const tok_stage *s, tok_work *w, err *e)
{
    if (s->prefix_space) prefix_words(w, " ", w->sp.n);
    if (s->use_regex) {
        int rc = split_words(s, w, find_regex, e);
        if (rc < 0) return rc;
    }
    map_bytes(w);
    return 0;
}

/* ---- Metaspace ------------------------------------------------------------------------------ */

static int load_metaspace(tok_stage *s, const json *j, const char *where, err *e)
{
    bool legacy = true;
    const char *scheme = NULL;
    s->split = true;
    int rc = tok__load_text(&s->content, j, "replacement", "\xE2\x96\x81", where, e);
    if (rc >= 0) rc = json_get_bool(j, "split", &s->split, where, e);
    if (rc >= 0) rc = json_get_bool(j, "add_prefix_space", &legacy, where, e);
    if (rc >= 0) rc = json_get_str(j, "prepend_scheme", &scheme, where, e);
    if (rc < 0) return rc;
    s->prepend = legacy ? 2 : 0;
    if (scheme) {
        static const char *const names[] = {"never", "first", "always"};
        for (s->prepend = 0; s->prepend < 3 && strcmp(names[s->prepend], scheme) != 0;)
            s->prepend++;
        if (s->prepend == 3)
            return err_set(e, ERR_FORMAT,
                           "%s: prepend_scheme '%.40s' is none of never, first, always", where,
                           scheme);
    }
    s->behavior = TOK_MERGED_NEXT;
    return tok__regex_literal(&s->re, s->content, strlen(s->content), where, e);
}

static int run_metaspace(const tok_stage *s, tok_work *w, err *e)
{
    buf_clear(&w->other);
    for (size_t i = 0; i < w->sp.n; i++) {
        size_t at = w->other.len;
        for (size_t k = 0; k < w->sp.v[i].len; k++) {
            char c = w->text.data[w->sp.v[i].off + k];
            if (c == ' ')
                buf_puts(&w->other, s->content);
            else
                buf_putc(&w->other, c);
        }
        w->sp.v[i] = (tok_span){(uint32_t)at, (uint32_t)(w->other.len - at)};
    }
    buf b = w->text;
    w->text = w->other;
    w->other = b;
    if (s->prepend == 2 || (s->prepend == 1 && w->at_start))
        prefix_words(w, s->content, s->prepend == 2 ? w->sp.n : 1);
    return s->split ? split_words(s, w, find_regex, e) : 0;
}

/* ---- Sequence ------------------------------------------------------------------------------- */

static int load_sequence(tok_stage *s, const json *j, const char *where, err *e)
{
    return tok__load_children(s, j, &tok__pretokenizers, where, e);
}

static int run_sequence(const tok_stage *s, tok_work *w, err *e)
{
    for (size_t i = 0; i < s->n_child; i++) {
        int rc = s->child[i].kind->split(&s->child[i], w, e);
        if (rc < 0) return rc;
    }
    return 0;
}

static const tok_stage_kind kinds[] = {
    {.type = "ByteLevel", .load = load_bytelevel, .split = run_bytelevel},
    {.type = "Split", .load = load_split, .split = run_regex},
    {.type = "Digits", .load = load_digits, .split = run_digits},
    {.type = "Metaspace", .load = load_metaspace, .split = run_metaspace},
    {.type = "Punctuation", .load = load_behavior, .split = run_punct},
    {.type = "Whitespace", .load = load_whitespace_split, .split = run_whitespace},
    {.type = "WhitespaceSplit", .load = load_whitespace_split, .split = run_whitespace_split},
    {.type = "BertPreTokenizer", .load = load_bert, .split = run_bert},
    {.type = "UnicodeScripts", .split = run_scripts},
    {.type = "FixedLength", .load = load_fixed, .split = run_fixed},
    {.type = "CharDelimiterSplit", .load = load_delimiter, .split = run_regex},
    {.type = "Sequence", .load = load_sequence, .split = run_sequence},
};
const tok_family tok__pretokenizers = {"pre-tokenizer", "pretokenizers", kinds,
                                       sizeof kinds / sizeof *kinds};
