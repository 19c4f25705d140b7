/* The methods of strings, lists, dictionaries and loops: one registry a type.
 *
 * A native gets the object as `self`. Methods that would change their object are known by name,
 * so that they hide a dictionary's key of that name as in Python, and fail when they are called:
 * the sandbox that transformers uses is immutable. */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>
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
    *out = j_case(r, s, 0);
    return 0;
}

static int s_upper(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    *out = j_case(r, s, 1);
    return 0;
}

static int s_capitalize(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    *out = j_case(r, s, 2);
    return 0;
}

static int s_title(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    *out = j_case(r, s, 3);
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

static int affix(jrun *r, jv s, const jcall *c, bool (*has)(jv, jv), const char *what, jv *out)
{
    jv x;
    if (c->n && c->v[0].t == J_TUPLE) {
        bool any = false;
        for (size_t i = 0; i < c->v[0].list->n; i++) {
            x = c->v[0].list->v[i];
            if (x.t != J_STR) return j_fail(r, "%s takes strings", what);
            any = any || has(s, x);
        }
        *out = j_bool(any);
        return 0;
    }
    int rc = str_arg(r, c, 0, what, &x);
    if (rc >= 0) *out = j_bool(has(s, x));
    return rc;
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

/* Byte offset of x in s from `at` on, or of its last place; -1 = absent. */
static int64_t find_bytes(jv s, jv x, size_t at, bool last)
{
    if (x.n > s.n || at > s.n - x.n) return -1;
    if (!last) {
        const char *p = x.n ? memmem(s.s + at, s.n - at, x.s, x.n) : s.s + at;
        return p ? p - s.s : -1;
    }
    for (size_t i = s.n - x.n + 1; i-- > at;)
        if (!memcmp(s.s + i, x.s, x.n)) return (int64_t)i;
    return -1;
}

static int s_replace(jrun *r, jv s, const jcall *c, jv *out)
{
    jv a, b;
    int64_t limit = -1;
    int rc = 0;
    buf text = {0};
    TRY(str_arg(r, c, 0, "replace", &a));
    TRY(str_arg(r, c, 1, "replace", &b));
    TRY(j_arg_int(r, c, 2, "count", &limit));
    if (b.n && s.n + 1 > J_MAX_BYTES / (b.n + 1)) TRY(j_room(r, SIZE_MAX));
    rc = 0;
    for (size_t at = 0; at <= s.n;) {
        int64_t hit = limit == 0 ? -1 : find_bytes(s, a, at, false);
        if (hit < 0) {
            buf_add(&text, s.s + at, s.n - at);
            break;
        }
        if (limit > 0) limit--;
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
        int64_t hit = limit == 0 ? -1 : find_bytes(s, sep, 0, right);
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
    jv x, lo = j_none(), hi = j_none(), part;
    int rc = 0;
    TRY(str_arg(r, c, 0, "find", &x));
    j_arg(c, 1, "start", &lo);
    j_arg(c, 2, "end", &hi);
    TRY(j_slice(r, s, lo, hi, j_none(), &part));
    int64_t hit = find_bytes(part, x, 0, last);
    if (hit < 0 && must) return j_fail(r, "substring not found");
    *out = j_int(-1);
    if (hit >= 0) {
        size_t at = part.n ? (size_t)(part.s - s.s) + (size_t)hit : (size_t)hit;
        *out = j_int((int64_t)j_chars(j_str(s.s, at)));
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
    jv x;
    int64_t n = 0;
    int rc = str_arg(r, c, 0, "count", &x);
    if (rc < 0) return rc;
    if (x.n == 0) {
        *out = j_int((int64_t)j_chars(s) + 1);
        return 0;
    }
    for (int64_t at = 0; (at = find_bytes(s, x, (size_t)at, false)) >= 0; at += (int64_t)x.n)
        n++;
    *out = j_int(n);
    return 0;
}

static int s_join(jrun *r, jv s, const jcall *c, jv *out)
{
    jlist *l;
    buf b = {0};
    int rc = 0;
    if (c->n != 1) return j_fail(r, "join takes one sequence");
    TRY(j_iter(r, c->v[0], &l));
    for (size_t i = 0; i < l->n; i++) {
        if (l->v[i].t != J_STR)
            TRY(j_fail(r, "join needs strings, item %zu is %s", i, j_type_name(l->v[i])));
        if (i) TRY(j_print(r, &b, s));
        TRY(j_print(r, &b, l->v[i]));
    }
    *out = j_copy(r, b.data, b.len);
out:
    buf_free(&b);
    return rc;
}

/* Every character in one of the general categories of the mask, and at least one of them. */
static int all_in(jv s, uint32_t mask, bool spaces, jv *out)
{
    bool all = s.n > 0;
    for (size_t i = 0; i < s.n && all;) {
        uint32_t cp;
        int k = utf8_decode(s.s + i, s.n - i, &cp);
        if (k <= 0) {
            all = false;
            break;
        }
        all = spaces ? j_space(cp) : (mask >> utf8proc_category((utf8proc_int32_t)cp)) & 1u;
        i += (size_t)k;
    }
    *out = j_bool(all);
    return 0;
}

#define CAT(x)  (1u << UTF8PROC_CATEGORY_##x)
#define LETTERS (CAT(LU) | CAT(LL) | CAT(LT) | CAT(LM) | CAT(LO))

static int s_isdigit(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)r;
    (void)c;
    return all_in(s, CAT(ND), false, out);
}

static int s_isnumeric(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)r;
    (void)c;
    return all_in(s, CAT(ND) | CAT(NL) | CAT(NO), false, out);
}

static int s_isalpha(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)r;
    (void)c;
    return all_in(s, LETTERS, false, out);
}

static int s_isalnum(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)r;
    (void)c;
    return all_in(s, LETTERS | CAT(ND) | CAT(NL) | CAT(NO), false, out);
}

static int s_isspace(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)r;
    (void)c;
    return all_in(s, 0, true, out);
}

static int case_test(jrun *r, jv s, int how, jv *out)
{
    jv same = j_case(r, s, how), other = j_case(r, s, !how);
    bool letters = same.n != other.n || (same.n && memcmp(same.s, other.s, same.n) != 0);
    *out = j_bool(letters && same.n == s.n && !memcmp(same.s, s.s, s.n));
    return 0;
}

static int s_islower(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    return case_test(r, s, 0, out);
}

static int s_isupper(jrun *r, jv s, const jcall *c, jv *out)
{
    (void)c;
    return case_test(r, s, 1, out);
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
    if (width > (int64_t)J_MAX_BYTES / 8) TRY(j_room(r, SIZE_MAX));
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
    if (width.t != J_INT) return j_fail(r, "zfill takes an integer");
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
    int64_t hit = find_bytes(s, x, 0, last);
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

/* One field of str.format, "0", "name" or "" with an optional printf-like ":.2f". */
static int format_field(jrun *r, buf *b, jv field, const jcall *c, size_t *next)
{
    const char *colon = memchr(field.s, ':', field.n);
    jv name = j_str(field.s, colon ? (size_t)(colon - field.s) : field.n), v;
    jv spec = colon ? j_str(colon + 1, field.n - name.n - 1) : j_strz("");
    bool digits = name.n > 0 && name.n < 4;
    size_t i = 0;
    for (size_t k = 0; k < name.n && digits; k++) {
        digits = name.s[k] >= '0' && name.s[k] <= '9';
        i = i * 10 + (size_t)(name.s[k] - '0');
    }
    if (name.n == 0) i = (*next)++;
    if (name.n == 0 || digits) {
        if (i >= c->n) return j_fail(r, "format has too few arguments");
        v = c->v[i];
    } else {
        bool found = false;
        for (size_t k = 0; k < c->n_kw && !found; k++) {
            found = c->kw_names[k].n == name.n && !memcmp(c->kw_names[k].s, name.s, name.n);
            if (found) v = c->kw[k];
        }
        if (!found)
            return j_fail(r, "format has no argument '%.*s'", (int)(name.n < 60 ? name.n : 60),
                          name.s);
    }
    if (spec.n == 0) return j_print(r, b, v);
    if (spec.n > 12) return j_fail(r, "a format that is not supported");
    buf f = {0};
    buf_putc(&f, '%');
    buf_add(&f, spec.s, spec.n);
    if (!strchr("sdxXfeEgG", spec.s[spec.n - 1]))
        buf_putc(&f, v.t == J_FLOAT ? 'g' : v.t == J_STR ? 's' : 'd');
    jv fmt = j_take(r, &f), text;
    jcall call = {.n = 1, .v = &v};
    int rc = j_filter(r, "format", 6, fmt, &call, &text);
    return rc < 0 ? rc : j_print(r, b, text);
}

static int s_format(jrun *r, jv s, const jcall *c, jv *out)
{
    buf b = {0};
    int rc = 0;
    size_t next = 0;
    for (size_t i = 0; i < s.n; i++) {
        char ch = s.s[i];
        if ((ch == '{' || ch == '}') && i + 1 < s.n && s.s[i + 1] == ch) {
            buf_putc(&b, ch);
            i++;
        } else if (ch == '{') {
            const char *end = memchr(s.s + i, '}', s.n - i);
            if (!end) TRY(j_fail(r, "a '{' in a format that is not closed"));
            size_t k = (size_t)(end - s.s) - i - 1;
            TRY(format_field(r, &b, j_str(s.s + i + 1, k), c, &next));
            i += k + 1;
        } else if (ch == '}') {
            TRY(j_fail(r, "a '}' in a format that closes nothing"));
        } else {
            buf_putc(&b, ch);
        }
    }
    *out = j_copy(r, b.data, b.len);
out:
    buf_free(&b);
    return rc;
}

static int s_swapcase(jrun *r, jv s, const jcall *c, jv *out)
{
    buf b = {0};
    (void)c;
    for (size_t i = 0; i < s.n;) {
        uint32_t cp;
        char enc[4];
        int k = utf8_decode(s.s + i, s.n - i, &cp);
        if (k <= 0) break;
        utf8proc_int32_t x = (utf8proc_int32_t)cp, low = utf8proc_tolower(x);
        buf_add(&b, enc,
                (size_t)utf8_encode((uint32_t)(low != x ? low : utf8proc_toupper(x)), enc));
        i += (size_t)k;
    }
    *out = j_take(r, &b);
    return 0;
}

static const j_row str_methods[] = {{"strip", s_strip, 0, 1},
                                    {"lstrip", s_lstrip, 0, 1},
                                    {"rstrip", s_rstrip, 0, 1},
                                    {"lower", s_lower, 0, 0},
                                    {"casefold", s_lower, 0, 0},
                                    {"upper", s_upper, 0, 0},
                                    {"capitalize", s_capitalize, 0, 0},
                                    {"title", s_title, 0, 0},
                                    {"swapcase", s_swapcase, 0, 0},
                                    {"startswith", s_startswith, 1, 3},
                                    {"endswith", s_endswith, 1, 3},
                                    {"removeprefix", s_removeprefix, 1, 1},
                                    {"removesuffix", s_removesuffix, 1, 1},
                                    {"replace", s_replace, 2, 3},
                                    {"split", s_split, 0, 2},
                                    {"rsplit", s_rsplit, 0, 2},
                                    {"splitlines", s_splitlines, 0, 1},
                                    {"find", s_find, 1, 3},
                                    {"rfind", s_rfind, 1, 3},
                                    {"index", s_index, 1, 3},
                                    {"rindex", s_rindex, 1, 3},
                                    {"count", s_count, 1, 3},
                                    {"join", s_join, 1, 1},
                                    {"isdigit", s_isdigit, 0, 0},
                                    {"isdecimal", s_isdigit, 0, 0},
                                    {"isnumeric", s_isnumeric, 0, 0},
                                    {"isalpha", s_isalpha, 0, 0},
                                    {"isalnum", s_isalnum, 0, 0},
                                    {"isspace", s_isspace, 0, 0},
                                    {"islower", s_islower, 0, 0},
                                    {"isupper", s_isupper, 0, 0},
                                    {"ljust", s_ljust, 1, 2},
                                    {"rjust", s_rjust, 1, 2},
                                    {"center", s_center, 1, 2},
                                    {"zfill", s_zfill, 1, 1},
                                    {"partition", s_partition, 1, 1},
                                    {"rpartition", s_rpartition, 1, 1},
                                    {"format", s_format, 0, J_MAX_ARGS},
                                    {NULL, NULL, 0, 0}};

/* ---- lists ---- */

static int l_index(jrun *r, jv l, const jcall *c, jv *out)
{
    if (c->n != 1) return j_fail(r, "index takes one value");
    for (size_t i = 0; i < l.list->n; i++) {
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

static const j_row list_methods[] = {{"index", l_index, 1, 1},
                                     {"count", l_count, 1, 1},
                                     {"copy", copy_self, 0, 0},
                                     {NULL, NULL, 0, 0}};

/* ---- dictionaries ---- */

static int d_get(jrun *r, jv d, const jcall *c, jv *out)
{
    jv otherwise = j_none();
    if (c->n < 1 || c->n > 2) return j_fail(r, "get takes a key and a default");
    if (!j_hashable(c->v[0]) && c->v[0].t != J_UNDEF)
        return j_fail(r, "%s cannot be a key", j_type_name(c->v[0]));
    j_arg(c, 1, "default", &otherwise);
    *out = otherwise;
    j_dict_get(d.dict, c->v[0], out);
    return 0;
}

static int d_list(jrun *r, jv d, int what, jv *out)
{
    *out = j_list(r, d.dict->n);
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

static const j_row dict_methods[] = {{"get", d_get, 1, 2},       {"keys", d_keys, 0, 0},
                                     {"values", d_values, 0, 0}, {"items", d_items, 0, 0},
                                     {"copy", copy_self, 0, 0},  {NULL, NULL, 0, 0}};

/* ---- loops ---- */

static int loop_cycle(jrun *r, jv l, const jcall *c, jv *out)
{
    if (c->n == 0) return j_fail(r, "loop.cycle takes values");
    *out = c->v[l.loop->index % c->n];
    return 0;
}

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

static const j_row loop_methods[] = {{"cycle", loop_cycle, 1, J_MAX_ARGS},
                                     {"changed", loop_changed, 0, J_MAX_ARGS},
                                     {NULL, NULL, 0, 0}};

static const j_row list_blocked[] = {
    {"append", copy_self, 0, 0}, {"extend", copy_self, 0, 0},  {"insert", copy_self, 0, 0},
    {"pop", copy_self, 0, 0},    {"remove", copy_self, 0, 0},  {"clear", copy_self, 0, 0},
    {"sort", copy_self, 0, 0},   {"reverse", copy_self, 0, 0}, {NULL, NULL, 0, 0}};
static const j_row dict_blocked[] = {{"update", copy_self, 0, 0},     {"pop", copy_self, 0, 0},
                                     {"popitem", copy_self, 0, 0},    {"clear", copy_self, 0, 0},
                                     {"setdefault", copy_self, 0, 0}, {NULL, NULL, 0, 0}};

static const j_row *find_in(const j_row *rows, const char *name, size_t n)
{
    for (; rows && rows->name; rows++)
        if (strlen(rows->name) == n && !memcmp(rows->name, name, n)) return rows;
    return NULL;
}

const j_row *j_find_method(jv v, const char *name, size_t n, bool *blocked)
{
    const j_row *row = find_in(v.t == J_STR                      ? str_methods
                               : v.t == J_LIST || v.t == J_TUPLE ? list_methods
                               : v.t == J_DICT                   ? dict_methods
                               : v.t == J_LOOP                   ? loop_methods
                                                                 : NULL,
                               name, n);
    *blocked = false;
    if (row) return row;
    row = find_in(v.t == J_LIST ? list_blocked : v.t == J_DICT ? dict_blocked : NULL, name, n);
    *blocked = row != NULL;
    return row;
}
