/* The methods of strings, lists, dictionaries and loops: one registry a type.
 *
 * A native gets the object as `self`. Methods that would change their object are known by name,
 * so that they hide a dictionary's key of that name as in Python, and fail when they are called:
 * the sandbox that transformers uses is immutable. */
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include "base/utf8.h"
#include "text/jinja_internal.h"

static int str_arg(jrun *r, const jcall *c, size_t i, const char *what, jv *out)
{
    *out = j_none();
    if (i >= c->n || c->v[i].t != J_STR) return j_fail(r, "%s takes a string", what);
    *out = c->v[i];
    return 0;
}

static jv pair_of(jrun *r, jv a, jv b)
{
    jv pair = j_list(r, 2);
    pair.t = J_TUPLE;
    j_push(r, pair.list, a);
    j_push(r, pair.list, b);
    return pair;
}

/* ---- strings ---- */

static int strip_sides(jrun *r, jv s, const jcall *c, bool left, bool right, jv *out)
{
    jv set = j_none();
    j_arg(c, 0, "chars", &set);
    if (set.t != J_NONE && set.t != J_STR) return j_fail(r, "strip takes a string");
    *out = j_strip(s, set.t == J_STR ? set.s : NULL, set.n, left, right);
    return 0;
}

static int s_strip(jrun *r, jv s, const jcall *c, jv *out)
{
    return strip_sides(r, s, c, true, true, out);
}

static int s_lstrip(jrun *r, jv s, const jcall *c, jv *out)
{
    return strip_sides(r, s, c, true, false, out);
}

static int s_rstrip(jrun *r, jv s, const jcall *c, jv *out)
{
    return strip_sides(r, s, c, false, true, out);
}

static int s_lower(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    *out = j_case(r, s, J_LOWER);
    return 0;
}

static int s_upper(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    *out = j_case(r, s, J_UPPER);
    return 0;
}

static int s_capitalize(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    *out = j_case(r, s, J_CAPITALIZE);
    return 0;
}

static int s_title(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    *out = j_case(r, s, J_TITLE);
    return 0;
}

static bool has_prefix(jv s, jv x)
{
    return x.n <= s.n && !memcmp(s.s, x.s, x.n);
}

static bool has_suffix(jv s, jv x)
{
    return x.n <= s.n && !memcmp(s.s + s.n - x.n, x.s, x.n);
}

/* The part of s between the optional borders at arguments `at` and behind it; *outside: the first
 * border lies behind the end, where not even an empty string is found. */
static int window(jrun *r, jv s, const jcall *c, size_t at, jv *part, bool *outside)
{
    jv lo = j_none(), hi = j_none();
    int64_t n;
    int rc = j_length(r, s, &n);
    j_arg(c, at, "start", &lo);
    j_arg(c, at + 1, "end", &hi);
    *outside = (lo.t == J_INT && lo.i > n) || (lo.t == J_BIG && lo.s[0] != '-');
    if (rc >= 0) rc = j_slice(r, s, lo, hi, j_none(), part);
    if (part->n == 0 && !*outside && lo.t == J_INT && hi.t == J_INT) { /* 'abc'.find('', 2, 1) */
        int64_t a = lo.i < 0 ? (lo.i + n < 0 ? 0 : lo.i + n) : lo.i;
        int64_t z = hi.i < 0 ? (hi.i + n < 0 ? 0 : hi.i + n) : hi.i > n ? n : hi.i;
        *outside = a > z;
    }
    return rc;
}

static int affix(jrun *r, jv s, const jcall *c, bool (*has)(jv, jv), const char *what, jv *out)
{
    jv x = c->v[0], part;
    bool outside, any = false;
    int rc = window(r, s, c, 1, &part, &outside);
    if (rc < 0) return rc;
    const jv *all = x.t == J_TUPLE ? x.list->v : &x;
    for (size_t i = 0, n = x.t == J_TUPLE ? x.list->n : 1; i < n && !any; i++) {
        if (all[i].t != J_STR) return j_fail(r, "%s takes strings", what);
        any = !outside && has(part, all[i]);
    }
    *out = j_bool(any);
    return 0;
}

static int s_startswith(jrun *r, jv s, const jcall *c, jv *out)
{
    return affix(r, s, c, has_prefix, "startswith", out);
}

static int s_endswith(jrun *r, jv s, const jcall *c, jv *out)
{
    return affix(r, s, c, has_suffix, "endswith", out);
}

static int s_removeprefix(jrun *r, jv s, const jcall *c, jv *out)
{
    jv x;
    int rc = str_arg(r, c, 0, "removeprefix", &x);
    if (rc >= 0) *out = has_prefix(s, x) ? j_str(s.s + x.n, s.n - x.n) : s;
    return rc;
}

static int s_removesuffix(jrun *r, jv s, const jcall *c, jv *out)
{
    jv x;
    int rc = str_arg(r, c, 0, "removesuffix", &x);
    if (rc >= 0) *out = has_suffix(s, x) ? j_str(s.s, s.n - x.n) : s;
    return rc;
}

static int64_t find_first(jv s, jv x, size_t at)
{
    if (x.n > s.n || at > s.n - x.n) return -1;
    const char *p = x.n ? memmem(s.s + at, s.n - at, x.s, x.n) : s.s + at;
    return p ? p - s.s : -1;
}

/* Byte offset of the last x in s: Knuth, Morris and Pratt from the right, so that no text makes it
 * take longer than its length. fail[k] is how much of the last k bytes of x still fits. */
static int64_t find_last(jrun *r, jv s, jv x)
{
    if (x.n > s.n) return -1;
    uint32_t *fail = j_alloc(r, (x.n + 1) * sizeof(*fail));
    const char *end = x.s + x.n - 1;
    for (size_t i = 1, k = 0; i < x.n; i++) {
        while (k && end[-(ptrdiff_t)i] != end[-(ptrdiff_t)k])
            k = fail[k];
        k += end[-(ptrdiff_t)i] == end[-(ptrdiff_t)k];
        fail[i + 1] = (uint32_t)k;
    }
    for (size_t i = s.n, k = 0; x.n && i-- > 0;) {
        while (k && s.s[i] != end[-(ptrdiff_t)k])
            k = fail[k];
        k += s.s[i] == end[-(ptrdiff_t)k];
        if (k == x.n) return (int64_t)i;
    }
    return x.n ? -1 : (int64_t)s.n;
}

/* Byte offset of x in s from `at` on, or of its last place; -1 = absent. */
static int64_t find_bytes(jrun *r, jv s, jv x, size_t at, bool last)
{
    return last ? find_last(r, s, x) : find_first(s, x, at);
}

static int s_replace(jrun *r, jv s, const jcall *c, jv *out)
{
    jv a, b;
    int64_t limit = -1;
    int rc = 0;
    buf text = {0};
    TRY(str_arg(r, c, 0, "replace", &a));
    TRY(str_arg(r, c, 1, "replace", &b));
    if (s.safe) TRY(j_escape(r, b, &b));
    TRY(j_arg_int(r, c, 2, "count", &limit));
    if (b.n && s.n + 1 > r->max_bytes / (b.n + 1)) TRY(j_room(r, SIZE_MAX));
    rc = 0;
    for (size_t at = 0; at <= s.n;) {
        int64_t hit = limit == 0 ? -1 : find_bytes(r, s, a, at, false);
        if (hit < 0) {
            buf_add(&text, s.s + at, s.n - at);
            break;
        }
        if (limit > 0) limit--;
        j_slow(r, 2);
        buf_add(&text, s.s + at, (size_t)hit - at);
        buf_add(&text, b.s, b.n);
        at = (size_t)hit + a.n;
        if (a.n == 0) { /* between any two characters */
            size_t k = at < s.n ? j_char_at(j_str(s.s + at, s.n - at), 1) : 0;
            buf_add(&text, s.s + at, k);
            if (k == 0) break;
            at += k;
        }
    }
    *out = j_copy(r, text.data, text.len);
out:
    buf_free(&text);
    return rc;
}

/* str.split() without a separator: runs of white space. */
static jv split_spaces(jrun *r, jv s, int64_t limit)
{
    jv l = j_list(r, 0);
    s = j_strip(s, NULL, 0, true, false);
    while (s.n) {
        size_t at = 0;
        uint32_t cp;
        if (limit == 0) {
            j_push(r, l.list, s);
            break;
        }
        while (at < s.n) {
            int k = utf8_decode(s.s + at, s.n - at, &cp);
            if (k > 0 && j_space(cp)) break;
            at += (size_t)(k > 0 ? k : 1);
        }
        j_push(r, l.list, j_str(s.s, at));
        s = j_strip(j_str(s.s + at, s.n - at), NULL, 0, true, false);
        if (limit > 0) limit--;
    }
    return l;
}

static jv reversed(jrun *r, jv l)
{
    jv back = j_list(r, l.list->n);
    for (size_t i = l.list->n; i-- > 0;)
        j_push(r, back.list, l.list->v[i]);
    return back;
}

/* str.rsplit() without a separator: from the right, at most `limit` cuts. */
static jv rsplit_spaces(jrun *r, jv s, int64_t limit)
{
    jv all = split_spaces(r, s, -1);
    if (limit < 0 || (int64_t)all.list->n <= limit + 1) return all;
    jv l = j_list(r, 0);
    size_t keep = all.list->n - (size_t)limit;
    jv head = all.list->v[keep - 1];
    j_push(r, l.list, j_str(s.s, (size_t)(head.s + head.n - s.s)));
    for (size_t i = keep; i < all.list->n; i++)
        j_push(r, l.list, all.list->v[i]);
    return l;
}

static int split(jrun *r, jv s, const jcall *c, bool right, jv *out)
{
    jv sep = j_none(), l;
    int64_t limit = -1;
    int rc = j_arg_int(r, c, 1, "maxsplit", &limit);
    if (rc < 0) return rc;
    j_arg(c, 0, "sep", &sep);
    if (sep.t == J_NONE) {
        *out = right ? rsplit_spaces(r, s, limit) : split_spaces(r, s, limit);
        return 0;
    }
    if (sep.t != J_STR || sep.n == 0) return j_fail(r, "split takes a string that is not empty");
    l = j_list(r, 0);
    for (;;) {
        int64_t hit = limit == 0 ? -1 : find_bytes(r, s, sep, 0, right);
        if (limit > 0) limit--;
        if (hit < 0) {
            j_push(r, l.list, s);
            break;
        }
        size_t h = (size_t)hit, end = h + sep.n;
        j_push(r, l.list, right ? j_str(s.s + end, s.n - end) : j_str(s.s, h));
        s = right ? j_str(s.s, h) : j_str(s.s + end, s.n - end);
    }
    *out = right ? reversed(r, l) : l;
    return 0;
}

static int s_split(jrun *r, jv s, const jcall *c, jv *out)
{
    return split(r, s, c, false, out);
}

static int s_rsplit(jrun *r, jv s, const jcall *c, jv *out)
{
    return split(r, s, c, true, out);
}

/* Bytes of the line end at p; Python's list of them. */
static size_t line_end(const char *p, size_t n)
{
    uint32_t cp;
    int k = utf8_decode(p, n, &cp);
    if (k <= 0) return 0;
    if (cp == '\r') return n > 1 && p[1] == '\n' ? 2 : 1;
    bool ends = (cp >= 10 && cp <= 12) || (cp >= 0x1c && cp <= 0x1e) || cp == 0x85 ||
                cp == 0x2028 || cp == 0x2029;
    return ends ? (size_t)k : 0;
}

static int s_splitlines(jrun *r, jv s, const jcall *c, jv *out)
{
    jv keep = j_bool(false);
    j_arg(c, 0, "keepends", &keep);
    if (!j_is_int(keep)) return j_fail(r, "splitlines takes an integer");
    jv l = j_list(r, 0);
    for (size_t at = 0; at < s.n;) {
        size_t p = at, k = 0;
        while (p < s.n && (k = line_end(s.s + p, s.n - p)) == 0)
            p++;
        j_push(r, l.list, j_str(s.s + at, p - at + (j_truth(keep) ? k : 0)));
        at = p + k;
    }
    *out = l;
    return 0;
}

/* find, index and their mirrors, in code points; borders are optional. */
static int find(jrun *r, jv s, const jcall *c, bool last, bool must, jv *out)
{
    jv x, part;
    bool outside;
    int rc = 0;
    TRY(str_arg(r, c, 0, "find", &x));
    TRY(window(r, s, c, 1, &part, &outside));
    int64_t hit = outside ? -1 : find_bytes(r, part, x, 0, last);
    if (hit < 0 && must) return j_fail(r, "substring not found");
    *out = j_int(-1);
    if (hit >= 0) {
        jv lo = j_none();
        j_arg(c, 1, "start", &lo);
        int64_t from = 0, n = (int64_t)j_chars(s);
        if (lo.t == J_INT) from = lo.i < 0 ? (lo.i + n < 0 ? 0 : lo.i + n) : lo.i;
        if (lo.t == J_BOOL) from = lo.b;
        *out = j_int(from + (int64_t)j_chars(j_str(part.s, (size_t)hit)));
    }
out:
    return rc;
}

static int s_find(jrun *r, jv s, const jcall *c, jv *out)
{
    return find(r, s, c, false, false, out);
}

static int s_rfind(jrun *r, jv s, const jcall *c, jv *out)
{
    return find(r, s, c, true, false, out);
}

static int s_index(jrun *r, jv s, const jcall *c, jv *out)
{
    return find(r, s, c, false, true, out);
}

static int s_rindex(jrun *r, jv s, const jcall *c, jv *out)
{
    return find(r, s, c, true, true, out);
}

static int s_count(jrun *r, jv s, const jcall *c, jv *out)
{
    jv x, part;
    int64_t n = 0;
    bool outside;
    int rc = str_arg(r, c, 0, "count", &x);
    if (rc >= 0) rc = window(r, s, c, 1, &part, &outside);
    if (rc < 0) return rc;
    if (x.n == 0) n = outside ? 0 : (int64_t)j_chars(part) + 1;
    for (int64_t at = 0; x.n && (at = find_first(part, x, (size_t)at)) >= 0; at += (int64_t)x.n)
        n++;
    *out = j_int(n);
    return 0;
}

static int s_join(jrun *r, jv s, const jcall *c, jv *out)
{
    jlist *l;
    buf b = {0};
    int rc = 0;
    TRY(j_iter(r, c->v[0], &l));
    for (size_t i = 0; i < l->n; i++) {
        jv x = l->v[i];
        if (x.t != J_STR && !s.safe)
            TRY(j_fail(r, "join needs strings, item %zu is %s", i, j_type_name(x)));
        if (s.safe) TRY(j_escape(r, x, &x));
        if (i) TRY(j_print(r, &b, s));
        TRY(j_print(r, &b, x));
        TRY(j_step(r));
        TRY(j_room(r, b.len));
    }
    *out = j_copy(r, b.data, b.len);
out:
    buf_free(&b);
    return rc;
}

static int all_are(jrun *r, jv s, int what, jv *out)
{
    j_slow(r, s.n);
    *out = j_bool(j_all(s, what));
    return 0;
}

#define ALL(name, what)                                                                            \
    static int name(jrun *r, jv s, const jcall *c, jv *out)                                        \
    {                                                                                              \
        (void)c;                                                                                   \
        return all_are(r, s, what, out);                                                           \
    }

ALL(s_isdecimal, J_IS_DECIMAL)
ALL(s_isdigit, J_IS_DIGIT)
ALL(s_isnumeric, J_IS_NUMERIC)
ALL(s_isalpha, J_IS_ALPHA)
ALL(s_isalnum, J_IS_ALNUM)
ALL(s_isspace, J_IS_SPACE)

static int s_isascii(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    j_slow(r, s.n);
    *out = j_bool(s.n == 0 || j_all(s, J_IS_ASCII));
    return 0;
}

static int s_isprintable(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    j_slow(r, s.n);
    *out = j_bool(s.n == 0 || j_all(s, J_IS_PRINTABLE));
    return 0;
}

static int s_isidentifier(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    j_slow(r, s.n);
    *out = j_bool(j_identifier(s));
    return 0;
}

static int s_islower(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    j_slow(r, s.n);
    *out = j_bool(j_cased_as(s, J_LOWER));
    return 0;
}

static int s_isupper(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    j_slow(r, s.n);
    *out = j_bool(j_cased_as(s, J_UPPER));
    return 0;
}

static int s_istitle(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    j_slow(r, s.n);
    *out = j_bool(j_cased_as(s, J_TITLE));
    return 0;
}

static int s_expandtabs(jrun *r, jv s, const jcall *c, jv *out)
{
    int64_t size = 8, column = 0;
    buf b = {0};
    int rc = 0;
    TRY(j_arg_int(r, c, 0, "tabsize", &size));
    for (size_t i = 0; i < s.n; i++) {
        char ch = s.s[i];
        if (ch == '\t') {
            int64_t k = size > 0 ? size - column % size : 0;
            TRY(j_room(r, k > (1 << 24) ? SIZE_MAX : b.len + (size_t)k));
            for (column += k; k > 0; k--)
                buf_putc(&b, ' ');
            continue;
        }
        buf_putc(&b, ch);
        column = ch == '\n' || ch == '\r' ? 0 : column + (((uint8_t)ch & 0xc0) != 0x80);
    }
    *out = j_copy(r, b.data, b.len);
    rc = 0;
out:
    buf_free(&b);
    return rc;
}

static int refused(jrun *r, jv self, const jcall *c, jv *out)
{
    (void)self;
    (void)c;
    (void)out;
    return j_fail(r, "the methods encode, translate, maketrans and fromkeys are not supported");
}

/* Fills up to `width` code points: side 0 left-justified, 1 right-justified, 2 centred. */
static int justify(jrun *r, jv s, const jcall *c, int side, const char *fill_default, jv *out)
{
    int64_t width = 0, n = (int64_t)j_chars(s);
    jv fill = j_strz(fill_default);
    buf b = {0};
    int rc = 0;
    TRY(j_arg_int(r, c, 0, "width", &width));
    j_arg(c, 1, "fillchar", &fill);
    if (fill.t != J_STR || j_chars(fill) != 1) return j_fail(r, "the fill must be one character");
    if (width > (int64_t)r->max_bytes / 8) TRY(j_room(r, SIZE_MAX));
    int64_t pad = width > n ? width - n : 0;
    int64_t left = side == 0 ? 0 : side == 1 ? pad : pad / 2 + (pad & width & 1);
    for (int64_t i = 0; i < left; i++)
        buf_add(&b, fill.s, fill.n);
    buf_add(&b, s.s, s.n);
    for (int64_t i = left; i < pad; i++)
        buf_add(&b, fill.s, fill.n);
    *out = j_copy(r, b.data, b.len);
    rc = 0;
out:
    buf_free(&b);
    return rc;
}

static int s_ljust(jrun *r, jv s, const jcall *c, jv *out)
{
    return justify(r, s, c, 0, " ", out);
}

static int s_rjust(jrun *r, jv s, const jcall *c, jv *out)
{
    return justify(r, s, c, 1, " ", out);
}

static int s_center(jrun *r, jv s, const jcall *c, jv *out)
{
    return justify(r, s, c, 2, " ", out);
}

static int s_zfill(jrun *r, jv s, const jcall *c, jv *out)
{
    bool sign = s.n && (s.s[0] == '-' || s.s[0] == '+');
    jv width = c->n ? c->v[0] : j_none();
    if (!j_is_int(width)) return j_fail(r, "zfill takes an integer");
    if (width.t == J_BOOL) width = j_int(width.b);
    if (!sign) return justify(r, s, c, 1, "0", out);
    jv args[1] = {j_int(width.i > INT64_MIN ? width.i - 1 : width.i)};
    jcall call = {.n = 1, .v = args};
    int rc = justify(r, j_str(s.s + 1, s.n - 1), &call, 1, "0", out);
    return rc < 0 ? rc : j_binary(r, JT_ADD, j_str(s.s, 1), *out, out);
}

static int partition(jrun *r, jv s, const jcall *c, bool last, jv *out)
{
    jv x;
    int rc = str_arg(r, c, 0, "partition", &x);
    if (rc < 0) return rc;
    if (x.n == 0) return j_fail(r, "partition takes a string that is not empty");
    int64_t hit = find_bytes(r, s, x, 0, last);
    jv empty = j_strz(""), three = j_list(r, 3);
    size_t h = (size_t)hit;
    three.t = J_TUPLE;
    if (hit < 0) {
        j_push(r, three.list, last ? empty : s);
        j_push(r, three.list, empty);
        j_push(r, three.list, last ? s : empty);
    } else {
        j_push(r, three.list, j_str(s.s, h));
        j_push(r, three.list, x);
        j_push(r, three.list, j_str(s.s + h + x.n, s.n - h - x.n));
    }
    *out = three;
    return 0;
}

static int s_partition(jrun *r, jv s, const jcall *c, jv *out)
{
    return partition(r, s, c, false, out);
}

static int s_rpartition(jrun *r, jv s, const jcall *c, jv *out)
{
    return partition(r, s, c, true, out);
}

static int s_swapcase(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    *out = j_case(r, s, J_SWAP);
    return 0;
}

static int s_casefold(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    *out = j_case(r, s, J_FOLD);
    return 0;
}

static const j_row str_methods[] = {{"strip", s_strip, 0, 1, NULL},
                                    {"lstrip", s_lstrip, 0, 1, NULL},
                                    {"rstrip", s_rstrip, 0, 1, NULL},
                                    {"lower", s_lower, 0, 0, NULL},
                                    {"casefold", s_casefold, 0, 0, NULL},
                                    {"upper", s_upper, 0, 0, NULL},
                                    {"capitalize", s_capitalize, 0, 0, NULL},
                                    {"title", s_title, 0, 0, NULL},
                                    {"swapcase", s_swapcase, 0, 0, NULL},
                                    {"startswith", s_startswith, 1, 3, NULL},
                                    {"endswith", s_endswith, 1, 3, NULL},
                                    {"removeprefix", s_removeprefix, 1, 1, NULL},
                                    {"removesuffix", s_removesuffix, 1, 1, NULL},
                                    {"replace", s_replace, 2, 3, NULL},
                                    {"split", s_split, 0, 2, "sep,maxsplit"},
                                    {"rsplit", s_rsplit, 0, 2, "sep,maxsplit"},
                                    {"splitlines", s_splitlines, 0, 1, "keepends"},
                                    {"find", s_find, 1, 3, NULL},
                                    {"rfind", s_rfind, 1, 3, NULL},
                                    {"index", s_index, 1, 3, NULL},
                                    {"rindex", s_rindex, 1, 3, NULL},
                                    {"count", s_count, 1, 3, NULL},
                                    {"join", s_join, 1, 1, NULL},
                                    {"isdigit", s_isdigit, 0, 0, NULL},
                                    {"isdecimal", s_isdecimal, 0, 0, NULL},
                                    {"isnumeric", s_isnumeric, 0, 0, NULL},
                                    {"isalpha", s_isalpha, 0, 0, NULL},
                                    {"isalnum", s_isalnum, 0, 0, NULL},
                                    {"isspace", s_isspace, 0, 0, NULL},
                                    {"islower", s_islower, 0, 0, NULL},
                                    {"isupper", s_isupper, 0, 0, NULL},
                                    {"ljust", s_ljust, 1, 2, NULL},
                                    {"rjust", s_rjust, 1, 2, NULL},
                                    {"center", s_center, 1, 2, NULL},
                                    {"zfill", s_zfill, 1, 1, NULL},
                                    {"partition", s_partition, 1, 1, NULL},
                                    {"rpartition", s_rpartition, 1, 1, NULL},
                                    {"istitle", s_istitle, 0, 0, NULL},
                                    {"isascii", s_isascii, 0, 0, NULL},
                                    {"isprintable", s_isprintable, 0, 0, NULL},
                                    {"isidentifier", s_isidentifier, 0, 0, NULL},
                                    {"expandtabs", s_expandtabs, 0, 1, "tabsize"},
                                    {"encode", refused, 0, 2, NULL},
                                    {"translate", refused, 1, 1, NULL},
                                    {"maketrans", refused, 1, 3, NULL},
                                    {"format_map", j_str_format_map, 1, 1, NULL},
                                    {"format", j_str_format, 0, J_MAX_ARGS, "*"},
                                    {NULL, NULL, 0, 0, NULL}};

/* ---- lists ---- */

/* A border of index(value, start, stop). */
static int l_border(jrun *r, const jcall *c, size_t at, int64_t n, int64_t *out)
{
    int rc = j_arg_int(r, c, at, "index", out);
    if (*out < 0) *out = *out + n < 0 ? 0 : *out + n;
    if (*out > n) *out = n;
    return rc;
}

static int l_index(jrun *r, jv l, const jcall *c, jv *out)
{
    int64_t lo = 0, hi = INT64_MAX, n = (int64_t)l.list->n;
    int brc = l_border(r, c, 1, n, &lo);
    if (brc >= 0) brc = l_border(r, c, 2, n, &hi);
    if (brc < 0) return brc;
    for (size_t i = (size_t)lo; i < (size_t)hi; i++) {
        bool same;
        int rc = j_equal(r, l.list->v[i], c->v[0], &same);
        if (rc < 0) return rc;
        if (same) {
            *out = j_int((int64_t)i);
            return 0;
        }
    }
    return j_fail(r, "the value is not in the list");
}

static int l_count(jrun *r, jv l, const jcall *c, jv *out)
{
    int64_t n = 0;
    if (c->n != 1) return j_fail(r, "count takes one value");
    for (size_t i = 0; i < l.list->n; i++) {
        bool same;
        int rc = j_equal(r, l.list->v[i], c->v[0], &same);
        if (rc < 0) return rc;
        n += same;
    }
    *out = j_int(n);
    return 0;
}

static int copy_self(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)r;
    (void)c;
    *out = v; /* nothing can change it */
    return 0;
}

static const j_row list_methods[] = {{"index", l_index, 1, 3, NULL},
                                     {"count", l_count, 1, 1, NULL},
                                     {"copy", copy_self, 0, 0, NULL},
                                     {NULL, NULL, 0, 0, NULL}};
static const j_row tuple_methods[] = {
    {"index", l_index, 1, 3, NULL}, {"count", l_count, 1, 1, NULL}, {NULL, NULL, 0, 0, NULL}};

/* ---- dictionaries ---- */

static int d_get(jrun *r, jv d, const jcall *c, jv *out)
{
    jv otherwise = j_none();
    if (!j_hashable(c->v[0])) return j_fail(r, "%s cannot be a key", j_type_name(c->v[0]));
    j_arg(c, 1, "default", &otherwise);
    *out = otherwise;
    j_dict_get(d.dict, c->v[0], out);
    return 0;
}

static int d_list(jrun *r, jv d, int what, jv *out)
{
    *out = j_list(r, d.dict->n);
    out->t = J_SEQ;
    out->list->kind = what == 0 ? J_KEYS : what == 1 ? J_VALUES : J_ITEMS;
    for (size_t i = 0; i < d.dict->n; i++)
        j_push(r, out->list,
               what == 0   ? d.dict->keys[i]
               : what == 1 ? d.dict->vals[i]
                           : pair_of(r, d.dict->keys[i], d.dict->vals[i]));
    return 0;
}

static int d_keys(jrun *r, jv d, const jcall *c, jv *out)
{
    (void)c;
    return d_list(r, d, 0, out);
}

static int d_values(jrun *r, jv d, const jcall *c, jv *out)
{
    (void)c;
    return d_list(r, d, 1, out);
}

static int d_items(jrun *r, jv d, const jcall *c, jv *out)
{
    (void)c;
    return d_list(r, d, 2, out);
}

static const j_row dict_methods[] = {
    {"get", d_get, 1, 2, NULL},       {"keys", d_keys, 0, 0, NULL},
    {"values", d_values, 0, 0, NULL}, {"items", d_items, 0, 0, NULL},
    {"copy", copy_self, 0, 0, NULL},  {"fromkeys", refused, 1, 2, NULL},
    {NULL, NULL, 0, 0, NULL}};

/* ---- loops ---- */

static int loop_cycle(jrun *r, jv l, const jcall *c, jv *out)
{
    if (c->n == 0) return j_fail(r, "loop.cycle takes values");
    *out = c->v[l.loop->index % c->n];
    return 0;
}

/* ---- cyclers and numbers ---- */

static int cycler_next(jrun *r, jv self, const jcall *c, jv *out)
{
    (void)r;
    (void)c;
    *out = self.list->v[self.list->at];
    self.list->at = (self.list->at + 1) % self.list->n;
    return 0;
}

static int cycler_reset(jrun *r, jv self, const jcall *c, jv *out)
{
    (void)r;
    (void)c;
    self.list->at = 0;
    *out = j_none();
    return 0;
}

static const j_row cycler_methods[] = {{"next", cycler_next, 0, 0, NULL},
                                       {"reset", cycler_reset, 0, 0, NULL},
                                       {NULL, NULL, 0, 0, NULL}};

static int n_bit_length(jrun *r, jv self, const jcall *c, jv *out)
{
    int64_t i = self.t == J_BOOL ? self.b : self.i, n = 0;
    (void)r;
    (void)c;
    for (uint64_t u = i < 0 ? 0 - (uint64_t)i : (uint64_t)i; u; u >>= 1)
        n++;
    *out = j_int(n);
    return 0;
}

static int n_is_integer(jrun *r, jv self, const jcall *c, jv *out)
{
    (void)r;
    (void)c;
    *out = j_bool(self.f - self.f == 0 && self.f == floor(self.f));
    return 0;
}

static const j_row int_methods[] = {{"bit_length", n_bit_length, 0, 0, NULL},
                                    {NULL, NULL, 0, 0, NULL}};
static const j_row float_methods[] = {{"is_integer", n_is_integer, 0, 0, NULL},
                                      {NULL, NULL, 0, 0, NULL}};

/* ---- loops ---- */

static int loop_changed(jrun *r, jv l, const jcall *c, jv *out)
{
    bool same = false;
    int rc = 0;
    jv now = j_list(r, c->n);
    for (size_t i = 0; i < c->n; i++)
        j_push(r, now.list, c->v[i]);
    if (l.loop->has_changed) rc = j_equal(r, l.loop->last_changed, now, &same);
    l.loop->last_changed = now;
    l.loop->has_changed = true;
    *out = j_bool(!same);
    return rc;
}

static const j_row loop_methods[] = {{"cycle", loop_cycle, 1, J_MAX_ARGS, NULL},
                                     {"changed", loop_changed, 0, J_MAX_ARGS, NULL},
                                     {NULL, NULL, 0, 0, NULL}};

static const j_row list_blocked[] = {
    {"append", copy_self, 0, 0, NULL}, {"extend", copy_self, 0, 0, NULL},
    {"insert", copy_self, 0, 0, NULL}, {"pop", copy_self, 0, 0, NULL},
    {"remove", copy_self, 0, 0, NULL}, {"clear", copy_self, 0, 0, NULL},
    {"sort", copy_self, 0, 0, NULL},   {"reverse", copy_self, 0, 0, NULL},
    {NULL, NULL, 0, 0, NULL}};
static const j_row dict_blocked[] = {
    {"update", copy_self, 0, 0, NULL},     {"pop", copy_self, 0, 0, NULL},
    {"popitem", copy_self, 0, 0, NULL},    {"clear", copy_self, 0, 0, NULL},
    {"setdefault", copy_self, 0, 0, NULL}, {NULL, NULL, 0, 0, NULL}};

static const j_row *find_in(const j_row *rows, const char *name, size_t n)
{
    for (; rows && rows->name; rows++)
        if (strlen(rows->name) == n && !memcmp(rows->name, name, n)) return rows;
    return NULL;
}

static const j_row *table_of(jv v)
{
    switch (v.t) {
    case J_STR:
        return str_methods;
    case J_LIST:
        return list_methods;
    case J_TUPLE:
        return tuple_methods;
    case J_SEQ:
        return v.list->kind == J_RANGE ? tuple_methods : NULL;
    case J_DICT:
        return dict_methods;
    case J_LOOP:
        return loop_methods;
    case J_CYCLER:
        return cycler_methods;
    case J_INT:
    case J_BOOL:
        return int_methods;
    case J_FLOAT:
        return float_methods;
    default:
        return NULL;
    }
}

const j_row *j_find_method(jv v, const char *name, size_t n, bool *blocked)
{
    const j_row *row = find_in(table_of(v), name, n);
    *blocked = false;
    if (row) return row;
    row = find_in(v.t == J_LIST ? list_blocked : v.t == J_DICT ? dict_blocked : NULL, name, n);
    *blocked = row != NULL;
    return row;
}
