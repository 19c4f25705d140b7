/* Unicode as the Hugging Face library has it: every crate in it brings a version of its own, from
 * Unicode 8 (punctuation) to 17 (lower case), and models were trained with those. The tables in
 * tok_unicode.def are what the library answers for each code point, asked by
 * tests/golden/make_unicode.py; docs/UNICODE.md lists where they differ from PCRE2 and utf8proc.
 *
 * A table is a sorted list of pairs lo, hi. Regular expressions run on PCRE2, whose classes cannot
 * be exchanged: a text with characters that it would take for something else is matched in a copy
 * where each of them is replaced by an old character of the same category and length. */
#include <string.h>
#include <utf8proc.h>
#include "base/utf8.h"
#include "text/tok_internal.h"

typedef struct shift { /* lower case of lo + i is to + i * step, and `second` behind it if not 0 */
    uint32_t lo, hi, to, step, second;
} shift;
typedef struct script_range {
    uint32_t lo, hi;
    int script;
} script_range;
typedef struct category_range {
    uint32_t lo, hi;
    int category;
    bool han;
} category_range;

#include "text/tok_unicode.def"

#define COUNT(a) (sizeof(a) / sizeof *(a))

static bool in_pairs(const uint32_t *v, size_t n, uint32_t cp)
{
    size_t lo = 0, hi = n / 2;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (cp > v[2 * mid + 1])
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < n / 2 && cp >= v[2 * lo];
}

/* The first 128 code points of the tables, a bit each: most text. */
static const uint64_t ascii[TOK_CLASSES][2] = {
    [TOK_WORD] = {0x3FF000000000000u, 0x7FFFFFE87FFFFFEu},
    [TOK_NUMERIC] = {0x3FF000000000000u, 0x0u},
    [TOK_PUNCT] = {0xFC00FFFE00000000u, 0x78000001F8000001u},
    [TOK_OTHER] = {0xFFFFD9FEu, 0x8000000000000000u},
};

bool tok__is(tok_class c, uint32_t cp)
{
    if (cp < 0x80) return ascii[c][cp / 64] >> cp % 64 & 1;
    static const struct {
        const uint32_t *v;
        size_t n;
    } tables[TOK_CLASSES] = {
        [TOK_WORD] = {word_pairs, COUNT(word_pairs)},
        [TOK_NUMERIC] = {numeric_pairs, COUNT(numeric_pairs)},
        [TOK_PUNCT] = {punct_pairs, COUNT(punct_pairs)},
        [TOK_OTHER] = {other_pairs, COUNT(other_pairs)},
        [TOK_NONSPACING] = {nonspacing_pairs, COUNT(nonspacing_pairs)},
        [TOK_COMBINING] = {combining_pairs, COUNT(combining_pairs)},
    };
    return in_pairs(tables[c].v, tables[c].n, cp);
}

bool tok__is_foreign(uint32_t cp)
{
    return in_pairs(foreign_pairs, COUNT(foreign_pairs), cp);
}

int tok__lower(uint32_t cp, uint32_t to[2])
{
    if (cp < 0x80) {
        to[0] = cp >= 'A' && cp <= 'Z' ? cp + 32 : cp;
        return 1;
    }
    for (size_t i = 0; i < COUNT(lower_shifts) && cp >= lower_shifts[i].lo; i++) {
        const shift *s = &lower_shifts[i];
        if (cp > s->hi) continue;
        to[0] = s->to + (cp - s->lo) * s->step;
        to[1] = s->second;
        return s->second ? 2 : 1;
    }
    to[0] = (uint32_t)utf8proc_tolower((utf8proc_int32_t)cp);
    return 1;
}

int tok__script(uint32_t cp)
{
    size_t lo = 0, hi = COUNT(script_ranges);
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (cp > script_ranges[mid].hi)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < COUNT(script_ranges) && cp >= script_ranges[lo].lo ? script_ranges[lo].script
                                                                   : SCRIPT_OF_THE_REST;
}

/* ---- categories of regular expressions --------------------------------------------------------
 */

static const category_range *newer(uint32_t cp)
{
    size_t lo = 0, hi = COUNT(category_ranges);
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (cp > category_ranges[mid].hi)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < COUNT(category_ranges) && cp >= category_ranges[lo].lo ? &category_ranges[lo]
                                                                       : NULL;
}

int tok__category(uint32_t cp)
{
    const category_range *r = newer(cp);
    return r ? r->category : (int)utf8proc_category((utf8proc_int32_t)cp);
}

/* First character from `from` on that stands in the table; n if none. Most text is told by the
 * first byte: the table has nothing below U+0800 nor among the CJK ideographs of three bytes. */
static size_t next_newer(const char *s, size_t n, size_t from, const category_range **r)
{
    for (size_t i = from; i < n;) {
        unsigned char b = (unsigned char)s[i];
        if (b < 0xE0 || (b >= 0xE4 && b <= 0xE9)) {
            i += b < 0x80 ? 1 : b < 0xE0 ? 2 : 3;
            continue;
        }
        uint32_t cp;
        size_t k = (size_t)tok__cp(s + i, n - i, &cp);
        if ((*r = newer(cp))) return i;
        i += k;
    }
    return n;
}

bool tok__stand_in(const char *s, size_t n, buf *out)
{
    const category_range *r = NULL;
    size_t i = next_newer(s, n, 0, &r);
    if (i >= n) return false;
    buf_clear(out);
    buf_add(out, s, n);
    while (i < n) {
        size_t k = (unsigned char)s[i] < 0xF0 ? 3 : 4;
        char u[4];
        uint32_t cp = r->han ? (k == 3 ? 0x4E00 : 0x20000) : stand_ins[k - 3][r->category];
        if (cp && (size_t)utf8_encode(cp, u) == k) memcpy(out->data + i, u, k);
        i = next_newer(s, n, i + k, &r);
    }
    return true;
}

/* ---- grapheme clusters ------------------------------------------------------------------------
 */

size_t tok__grapheme(const char *s, size_t n)
{
    uint32_t cp = 0, before;
    utf8proc_int32_t state = 0;
    size_t i = (size_t)tok__cp(s, n, &cp);
    while (i < n) {
        before = cp;
        size_t k = (size_t)tok__cp(s + i, n - i, &cp);
        if (utf8proc_grapheme_break_stateful((utf8proc_int32_t)before, (utf8proc_int32_t)cp,
                                             &state))
            break;
        i += k;
    }
    return i;
}
