/* Letters, digits and case as Python's str has them.
 *
 * Categories and one-to-one mappings come from utf8proc; jinja_unicode.def adds what Python knows
 * beyond them: mappings to several characters, digits that are no decimals, numerals among the
 * ideographs, letters whose case is a property of their own. Strings are UTF-8, valid.
 *
 * A capital sigma becomes a final sigma when a cased character stands before it and none after it,
 * looking past what is case-ignorable: Python's only rule that looks at the neighbours. */
#include <string.h>
#include <utf8proc.h>
#include "base/utf8.h"
#include "text/jinja_internal.h"

enum { SET_DIGIT, SET_NUMERIC, SET_LOWER, SET_UPPER, SET_IGNORABLE };
enum { MAP_UPPER, MAP_LOWER, MAP_TITLE };

typedef struct range {
    uint8_t set;
    uint32_t first, last;
} range;

typedef struct mapping {
    uint8_t kind;
    uint32_t from, to[3];
} mapping;

#define R(set, first, last)
#define M(kind, from, a, b, c) {MAP_##kind, from, {a, b, c}},
static const mapping mappings[] = {
#include "text/jinja_unicode.def"
};
#undef R
#undef M
#define R(set, first, last) {SET_##set, first, last},
#define M(kind, from, a, b, c)
static const range ranges[] = {
#include "text/jinja_unicode.def"
};
#undef R
#undef M

static bool in_set(int set, uint32_t cp)
{
    size_t lo = 0, hi = sizeof(ranges) / sizeof(ranges[0]);
    while (lo < hi) { /* sorted by set, then by code point */
        size_t mid = (lo + hi) / 2;
        const range *x = &ranges[mid];
        if (x->set < set || (x->set == set && x->last < cp))
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < sizeof(ranges) / sizeof(ranges[0]) && ranges[lo].set == set &&
           ranges[lo].first <= cp;
}

#define CAT(x)  (1u << UTF8PROC_CATEGORY_##x)
#define LETTERS (CAT(LU) | CAT(LL) | CAT(LT) | CAT(LM) | CAT(LO))
#define HIDDEN  (CAT(CC) | CAT(CF) | CAT(CS) | CAT(CO) | CAT(CN) | CAT(ZL) | CAT(ZP) | CAT(ZS))

static bool in_cat(uint32_t cp, uint32_t mask)
{
    return (mask >> utf8proc_category((utf8proc_int32_t)cp)) & 1u;
}

static bool is_lower(uint32_t cp)
{
    return in_cat(cp, CAT(LL)) || in_set(SET_LOWER, cp);
}

static bool is_upper(uint32_t cp)
{
    return in_cat(cp, CAT(LU)) || in_set(SET_UPPER, cp);
}

static bool is_cased(uint32_t cp)
{
    return is_lower(cp) || is_upper(cp) || in_cat(cp, CAT(LT));
}

static bool is_digit(uint32_t cp)
{
    return in_cat(cp, CAT(ND)) || in_set(SET_DIGIT, cp);
}

static bool is_numeric(uint32_t cp)
{
    return in_cat(cp, CAT(ND) | CAT(NL) | CAT(NO)) || in_set(SET_NUMERIC, cp);
}

bool j_space(uint32_t cp)
{
    return (cp >= 9 && cp <= 13) || (cp >= 0x1c && cp <= 0x20) || cp == 0x85 || cp == 0xa0 ||
           cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200a) || cp == 0x2028 || cp == 0x2029 ||
           cp == 0x202f || cp == 0x205f || cp == 0x3000;
}

bool j_is(uint32_t cp, int what)
{
    switch (what) {
    case J_IS_SPACE:
        return j_space(cp);
    case J_IS_ALPHA:
        return in_cat(cp, LETTERS);
    case J_IS_DECIMAL:
        return in_cat(cp, CAT(ND));
    case J_IS_DIGIT:
        return is_digit(cp);
    case J_IS_NUMERIC:
        return is_numeric(cp);
    case J_IS_ALNUM:
        return in_cat(cp, LETTERS) || is_numeric(cp) || is_digit(cp);
    case J_IS_WORD:
        return cp == '_' || j_is(cp, J_IS_ALNUM);
    case J_IS_ASCII:
        return cp < 0x80;
    default: /* J_IS_PRINTABLE */
        return cp == ' ' || !in_cat(cp, HIDDEN);
    }
}

bool j_all(jv s, int what)
{
    for (size_t i = 0; i < s.n;) {
        uint32_t cp;
        int k = utf8_decode(s.s + i, s.n - i, &cp);
        if (k <= 0 || !j_is(cp, what)) return false;
        i += (size_t)k;
    }
    return s.n > 0;
}

/* str.isidentifier, by the categories of XID_Start and XID_Continue. */
bool j_identifier(jv s)
{
    uint32_t start = LETTERS | CAT(NL), rest = start | CAT(MN) | CAT(MC) | CAT(ND) | CAT(PC);
    for (size_t i = 0; i < s.n;) {
        uint32_t cp;
        int k = utf8_decode(s.s + i, s.n - i, &cp);
        if (k <= 0 || !(cp == '_' || in_cat(cp, i ? rest : start))) return false;
        i += (size_t)k;
    }
    return s.n > 0;
}

bool j_cased_as(jv s, int how)
{
    bool any = false, after_cased = false;
    for (size_t i = 0; i < s.n;) {
        uint32_t cp;
        int k = utf8_decode(s.s + i, s.n - i, &cp);
        bool low = is_lower(cp), up = is_upper(cp), title = in_cat(cp, CAT(LT));
        if (how == J_LOWER && (up || title)) return false;
        if (how == J_UPPER && (low || title)) return false;
        if (how == J_TITLE && (after_cased ? up || title : low)) return false;
        any = any || (how == J_LOWER ? low : how == J_UPPER ? up : up || title || low);
        after_cased = low || up || title;
        i += (size_t)(k > 0 ? k : 1);
    }
    return any;
}

static void put(buf *b, uint32_t cp)
{
    char enc[4];
    buf_add(b, enc, (size_t)utf8_encode(cp, enc));
}

static void put_mapped(buf *b, uint32_t cp, int kind)
{
    utf8proc_int32_t c = (utf8proc_int32_t)cp;
    size_t lo = 0, hi = sizeof(mappings) / sizeof(mappings[0]);
    while (lo < hi && cp >= 0x80) { /* UPPER, then LOWER, then TITLE; each by code point */
        size_t mid = (lo + hi) / 2;
        const mapping *m = &mappings[mid];
        if (m->kind < kind || (m->kind == kind && m->from < cp))
            lo = mid + 1;
        else
            hi = mid;
    }
    if (cp >= 0x80 && lo < sizeof(mappings) / sizeof(mappings[0]) && mappings[lo].kind == kind &&
        mappings[lo].from == cp) {
        for (int i = 0; i < 3 && mappings[lo].to[i]; i++)
            put(b, mappings[lo].to[i]);
        return;
    }
    put(b, (uint32_t)(kind == MAP_UPPER   ? utf8proc_toupper(c)
                      : kind == MAP_LOWER ? utf8proc_tolower(c)
                                          : utf8proc_totitle(c)));
}

static bool ignorable(uint32_t cp)
{
    return in_cat(cp, CAT(MN) | CAT(ME) | CAT(CF) | CAT(LM) | CAT(SK)) != in_set(SET_IGNORABLE, cp);
}

/* Is the sigma at s[at] the last letter of its word? */
static bool final_sigma(jv s, size_t at)
{
    uint32_t cp = 0;
    size_t i = at;
    bool before = false;
    while (i > 0) {
        do
            i--;
        while (i > 0 && ((uint8_t)s.s[i] & 0xc0) == 0x80);
        utf8_decode(s.s + i, s.n - i, &cp);
        if (ignorable(cp)) continue;
        before = is_cased(cp);
        break;
    }
    for (i = at + 2; before && i < s.n;) {
        int k = utf8_decode(s.s + i, s.n - i, &cp);
        if (k <= 0) break;
        if (!ignorable(cp)) return !is_cased(cp);
        i += (size_t)k;
    }
    return before;
}

static void put_lower(buf *b, jv s, size_t at, uint32_t cp)
{
    if (cp == 0x3a3)
        put(b, final_sigma(s, at) ? 0x3c2 : 0x3c3);
    else
        put_mapped(b, cp, MAP_LOWER);
}

static void put_folded(buf *b, uint32_t cp)
{
    utf8proc_int32_t to[8];
    int last = 0;
    utf8proc_ssize_t n =
        utf8proc_decompose_char((utf8proc_int32_t)cp, to, 8, UTF8PROC_CASEFOLD, &last);
    for (utf8proc_ssize_t i = 0; i < n && i < 8; i++)
        put(b, (uint32_t)to[i]);
}

jv j_case(jrun *r, jv s, int how)
{
    buf b = {0};
    bool after_cased = false;
    j_slow(r, s.n);
    for (size_t i = 0; i < s.n;) {
        uint32_t cp = 0;
        int k = utf8_decode(s.s + i, s.n - i, &cp);
        if (k <= 0) { /* never in a valid string */
            buf_putc(&b, s.s[i++]);
            continue;
        }
        if (how == J_UPPER)
            put_mapped(&b, cp, MAP_UPPER);
        else if (how == J_FOLD)
            put_folded(&b, cp);
        else if (how == J_SWAP && is_upper(cp))
            put_lower(&b, s, i, cp);
        else if (how == J_SWAP && is_lower(cp))
            put_mapped(&b, cp, MAP_UPPER);
        else if (how == J_SWAP)
            put(&b, cp);
        else if ((how == J_CAPITALIZE && i == 0) || (how == J_TITLE && !after_cased))
            put_mapped(&b, cp, MAP_TITLE);
        else
            put_lower(&b, s, i, cp);
        if (how == J_TITLE) after_cased = is_cased(cp);
        i += (size_t)k;
    }
    jv out = j_take(r, &b);
    out.safe = s.safe;
    return out;
}
