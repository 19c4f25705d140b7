/* Methods of strings, dictionaries and lists, as Python has them. Methods that would change their
 * object have no function: the immutable sandbox refuses them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/jinja.h"

static int need_str(jrt *r, jv v, const char *what)
{
    if (v.kind == JV_STR) return 0;
    if (v.kind == JV_UNDEF) return jj_fail(r, "%s", v.s ? v.s : "a value is undefined");
    return jj_fail(r, "%s: a str is needed, not '%s'", what, jv_type(v));
}

static int64_t count_arg(const jbound *b, int i)
{
    return b->has[i] && b->a[i].kind == JV_INT ? b->a[i].i : -1;
}

/* ---- strings: cutting ------------------------------------------------------------------------- */

static int strip(jrt *r, const jbound *b, bool left, bool right, jv *out)
{
    if (b->has[0] && b->a[0].kind != JV_NONE) {
        int rc = need_str(r, b->a[0], "strip");
        if (rc < 0) return rc;
    }
    *out = js_strip(b->in, b->has[0] ? b->a[0] : jv_none(), left, right);
    return 0;
}

static int m_strip(jrt *r, const jbound *b, jv *out)
{
    return strip(r, b, true, true, out);
}

static int m_lstrip(jrt *r, const jbound *b, jv *out)
{
    return strip(r, b, true, false, out);
}

static int m_rstrip(jrt *r, const jbound *b, jv *out)
{
    return strip(r, b, false, true, out);
}

static void split_spaces(jrt *r, jv s, int64_t max, jv list)
{
    for (;;) {
        s = js_strip(s, jv_none(), true, false);
        if (!s.n) return;
        if (max-- == 0) {
            jv_push(r, list, js_strip(s, jv_none(), false, true));
            return;
        }
        size_t i = 0;
        while (i < s.n) {
            uint32_t cp;
            int k = utf8_decode(s.s + i, s.n - i, &cp);
            if (k && js_is_space(cp)) break;
            i += k ? (size_t)k : 1;
        }
        jv word = jv_ref(s.s, i);
        word.sub = s.sub;
        jv_push(r, list, word);
        s.s += i;
        s.n -= i;
    }
}

static jv part(jv s, size_t lo, size_t hi)
{
    jv v = jv_ref(s.s + lo, hi - lo);
    v.sub = s.sub;
    return v;
}

static int m_split(jrt *r, const jbound *b, jv *out)
{
    jv s = b->in, sep = b->has[0] ? b->a[0] : jv_none();
    int64_t max = count_arg(b, 1);
    *out = jv_list(r, JL_LIST);
    if (sep.kind == JV_NONE) {
        split_spaces(r, s, max, *out);
        return jj_step(r);
    }
    int rc = need_str(r, sep, "split");
    if (rc < 0) return rc;
    if (!sep.n) return jj_fail(r, "empty separator");
    size_t at = 0;
    const char *p;
    while (max-- != 0 && (p = memmem(s.s + at, s.n - at, sep.s, sep.n))) {
        size_t hit = (size_t)(p - s.s);
        jv_push(r, *out, part(s, at, hit));
        at = hit + sep.n;
    }
    jv_push(r, *out, part(s, at, s.n));
    return jj_step(r);
}

static const char *last_hit(const char *s, size_t n, jv needle)
{
    for (size_t i = n >= needle.n ? n - needle.n + 1 : 0; i-- > 0;)
        if (!memcmp(s + i, needle.s, needle.n)) return s + i;
    return NULL;
}

static void reverse(jlist *l)
{
    for (size_t i = 0; i < l->n / 2; i++) {
        jv t = l->v[i];
        l->v[i] = l->v[l->n - 1 - i];
        l->v[l->n - 1 - i] = t;
    }
}

static void rsplit_spaces(jrt *r, jv s, int64_t max, jv list)
{
    for (;;) {
        s = js_strip(s, jv_none(), false, true);
        if (!s.n) break;
        if (max-- == 0) {
            jv_push(r, list, js_strip(s, jv_none(), true, false));
            break;
        }
        size_t i = s.n;
        while (i > 0) {
            size_t k = i - 1;
            uint32_t cp;
            while (k && ((unsigned char)s.s[k] & 0xC0) == 0x80)
                k--;
            if (utf8_decode(s.s + k, i - k, &cp) && js_is_space(cp)) break;
            i = k;
        }
        jv_push(r, list, part(s, i, s.n));
        s.n = i;
    }
    reverse(list.l);
}

static int m_rsplit(jrt *r, const jbound *b, jv *out)
{
    jv s = b->in, sep = b->has[0] ? b->a[0] : jv_none();
    int64_t max = count_arg(b, 1);
    *out = jv_list(r, JL_LIST);
    if (sep.kind == JV_NONE) {
        rsplit_spaces(r, s, max, *out);
        return jj_step(r);
    }
    int rc = need_str(r, sep, "rsplit");
    if (rc < 0) return rc;
    if (!sep.n) return jj_fail(r, "empty separator");
    size_t end = s.n;
    const char *p;
    while (max-- != 0 && (p = last_hit(s.s, end, sep))) {
        size_t hit = (size_t)(p - s.s);
        jv_push(r, *out, part(s, hit + sep.n, end));
        end = hit;
    }
    jv_push(r, *out, part(s, 0, end));
    reverse(out->l);
    return jj_step(r);
}

static int partition(jrt *r, const jbound *b, bool last, jv *out)
{
    jv s = b->in, sep = b->a[0];
    int rc = need_str(r, sep, "partition");
    if (rc < 0) return rc;
    if (!sep.n) return jj_fail(r, "empty separator");
    const char *p = last ? last_hit(s.s, s.n, sep) : memmem(s.s, s.n, sep.s, sep.n);
    *out = jv_list(r, JL_TUPLE);
    size_t hit = p ? (size_t)(p - s.s) : last ? 0 : s.n;
    jv_push(r, *out, part(s, 0, hit));
    jv_push(r, *out, p ? sep : jv_ref("", 0));
    jv_push(r, *out, p ? part(s, hit + sep.n, s.n) : part(s, hit, s.n));
    return 0;
}

static int m_partition(jrt *r, const jbound *b, jv *out)
{
    return partition(r, b, false, out);
}

static int m_rpartition(jrt *r, const jbound *b, jv *out)
{
    return partition(r, b, true, out);
}

static int m_splitlines(jrt *r, const jbound *b, jv *out)
{
    *out = jv_list(r, JL_LIST);
    js_splitlines(r, b->in, b->has[0] && jv_truth(b->a[0]), *out);
    return jj_step(r);
}

static bool affix(jv s, jv x, bool end)
{
    return x.n <= s.n && !memcmp(end ? s.s + s.n - x.n : s.s, x.s, x.n);
}

static int has_affix(jrt *r, const jbound *b, bool end, jv *out)
{
    jv x = b->a[0];
    bool yes = false;
    if (x.kind == JV_LIST && x.sub == JL_TUPLE) {
        for (size_t i = 0; i < x.l->n; i++)
            yes = yes || (x.l->v[i].kind == JV_STR && affix(b->in, x.l->v[i], end));
    } else {
        int rc = need_str(r, x, end ? "endswith" : "startswith");
        if (rc < 0) return rc;
        yes = affix(b->in, x, end);
    }
    *out = jv_bool(yes);
    return 0;
}

static int m_startswith(jrt *r, const jbound *b, jv *out)
{
    return has_affix(r, b, false, out);
}

static int m_endswith(jrt *r, const jbound *b, jv *out)
{
    return has_affix(r, b, true, out);
}

static int m_removeprefix(jrt *r, const jbound *b, jv *out)
{
    int rc = need_str(r, b->a[0], "removeprefix");
    if (rc < 0) return rc;
    *out = affix(b->in, b->a[0], false) ? part(b->in, b->a[0].n, b->in.n) : b->in;
    return 0;
}

static int m_removesuffix(jrt *r, const jbound *b, jv *out)
{
    int rc = need_str(r, b->a[0], "removesuffix");
    if (rc < 0) return rc;
    *out = affix(b->in, b->a[0], true) ? part(b->in, 0, b->in.n - b->a[0].n) : b->in;
    return 0;
}

static int m_replace(jrt *r, const jbound *b, jv *out)
{
    int rc = need_str(r, b->a[0], "replace");
    if (rc == 0) rc = need_str(r, b->a[1], "replace");
    return rc < 0 ? rc : js_replace(r, b->in, b->a[0], b->a[1], count_arg(b, 2), out);
}

/* ---- strings: looking ------------------------------------------------------------------------- */

static int find(jrt *r, const jbound *b, bool last, bool must, jv *out)
{
    jv s = b->in, x = b->a[0];
    int rc = need_str(r, x, "find");
    if (rc < 0) return rc;
    const char *p = last ? last_hit(s.s, s.n, x) : memmem(s.s, s.n, x.s, x.n);
    if (!p && must) return jj_fail(r, "substring not found");
    *out = jv_int(p ? (int64_t)js_count(s.s, (size_t)(p - s.s)) : -1);
    return 0;
}

static int m_find(jrt *r, const jbound *b, jv *out)
{
    return find(r, b, false, false, out);
}

static int m_rfind(jrt *r, const jbound *b, jv *out)
{
    return find(r, b, true, false, out);
}

static int m_index(jrt *r, const jbound *b, jv *out)
{
    return find(r, b, false, true, out);
}

static int m_count(jrt *r, const jbound *b, jv *out)
{
    jv s = b->in, x = b->a[0];
    int rc = need_str(r, x, "count");
    if (rc < 0) return rc;
    int64_t n = x.n ? 0 : (int64_t)js_count(s.s, s.n) + 1;
    size_t at = 0;
    const char *p;
    while (x.n && (p = memmem(s.s + at, s.n - at, x.s, x.n))) {
        at = (size_t)(p - s.s) + x.n;
        n++;
    }
    *out = jv_int(n);
    return 0;
}

static bool all_ascii(jv s, const char *set)
{
    for (size_t i = 0; i < s.n; i++)
        if (!s.s[i] || !strchr(set, s.s[i])) return false;
    return s.n > 0;
}

#define DIGITS  "0123456789"
#define LETTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

static int m_isdigit(jrt *r, const jbound *b, jv *out)
{
    (void)r;
    *out = jv_bool(all_ascii(b->in, DIGITS));
    return 0;
}

static int m_isalpha(jrt *r, const jbound *b, jv *out)
{
    (void)r;
    *out = jv_bool(all_ascii(b->in, LETTERS));
    return 0;
}

static int m_isalnum(jrt *r, const jbound *b, jv *out)
{
    (void)r;
    *out = jv_bool(all_ascii(b->in, LETTERS DIGITS));
    return 0;
}

static int m_isspace(jrt *r, const jbound *b, jv *out)
{
    (void)r;
    *out = jv_bool(b->in.n && !js_strip(b->in, jv_none(), true, false).n);
    return 0;
}

static int via_test(jrt *r, const jbound *b, const char *test, jv *out)
{
    return jj_test_find(test)->fn(r, b, out);
}

static int m_isupper(jrt *r, const jbound *b, jv *out)
{
    return via_test(r, b, "upper", out);
}

static int m_islower(jrt *r, const jbound *b, jv *out)
{
    return via_test(r, b, "lower", out);
}

/* ---- strings: making -------------------------------------------------------------------------- */

static int by_case(jrt *r, const jbound *b, void (*fn)(const char *, size_t, buf *), jv *out)
{
    buf x = {0};
    buf_puts(&x, "");
    fn(b->in.s, b->in.n, &x);
    *out = jv_from_buf(r, &x);
    out->sub = b->in.sub;
    return 0;
}

static int m_upper(jrt *r, const jbound *b, jv *out)
{
    return by_case(r, b, js_upper, out);
}

static int m_lower(jrt *r, const jbound *b, jv *out)
{
    return by_case(r, b, js_lower, out);
}

static int m_title(jrt *r, const jbound *b, jv *out)
{
    return by_case(r, b, js_title, out);
}

static int m_capitalize(jrt *r, const jbound *b, jv *out)
{
    return by_case(r, b, js_capitalize, out);
}

static int m_join(jrt *r, const jbound *b, jv *out)
{
    jlist *l;
    buf x = {0};
    int rc = jv_iterate(r, b->a[0], &l);
    buf_puts(&x, "");
    for (size_t i = 0; rc == 0 && i < l->n; i++) {
        if (l->v[i].kind != JV_STR) {
            rc = jj_fail(r, "sequence item %zu: expected str instance, %s found", i,
                         jv_type(l->v[i]));
            break;
        }
        if (i) buf_add(&x, b->in.s, b->in.n);
        buf_add(&x, l->v[i].s, l->v[i].n);
        rc = jj_room(r, x.len);
    }
    *out = jv_from_buf(r, &x);
    return rc;
}

static int pad(jrt *r, const jbound *b, int where, jv *out)
{
    int64_t n = (int64_t)js_count(b->in.s, b->in.n), width = count_arg(b, 0);
    if (width > JJ_MAX_RANGE) return jj_fail(r, "a width of %lld is too large", (long long)width);
    int64_t fill = width > n ? width - n : 0, left = where < 0 ? 0 : fill;
    if (where == 0) left = fill / 2 + (fill & width & 1);
    jv c = b->has[1] && b->a[1].kind == JV_STR ? b->a[1] : jv_ref(where == 2 ? "0" : " ", 1);
    buf x = {0};
    size_t sign = where == 2 && b->in.n && (b->in.s[0] == '-' || b->in.s[0] == '+');
    buf_add(&x, b->in.s, sign);
    for (int64_t i = 0; i < left; i++)
        buf_add(&x, c.s, c.n);
    buf_add(&x, b->in.s + sign, b->in.n - sign);
    for (int64_t i = left; i < fill; i++)
        buf_add(&x, c.s, c.n);
    buf_puts(&x, "");
    *out = jv_from_buf(r, &x);
    return 0;
}

static int m_ljust(jrt *r, const jbound *b, jv *out)
{
    return pad(r, b, -1, out);
}

static int m_center(jrt *r, const jbound *b, jv *out)
{
    return pad(r, b, 0, out);
}

static int m_rjust(jrt *r, const jbound *b, jv *out)
{
    return pad(r, b, 1, out);
}

static int m_zfill(jrt *r, const jbound *b, jv *out)
{
    return pad(r, b, 2, out);
}

/* "{} {0} {name}": fields without conversion or format. */
static int m_format(jrt *r, const jbound *b, jv *out)
{
    buf x = {0};
    size_t next = 0;
    jv s = b->in;
    int rc = 0;
    buf_puts(&x, "");
    for (size_t i = 0; rc == 0 && i < s.n; i++) {
        char c = s.s[i];
        if ((c == '{' || c == '}') && i + 1 < s.n && s.s[i + 1] == c) {
            buf_putc(&x, c);
            i++;
            continue;
        }
        if (c != '{') {
            buf_putc(&x, c);
            continue;
        }
        const char *end = memchr(s.s + i, '}', s.n - i);
        size_t n = end ? (size_t)(end - s.s) - i - 1 : 0, index = next;
        jv v = jv_undef("format field is missing"), name = jv_ref(s.s + i + 1, n);
        if (!end) rc = jj_fail(r, "expected '}' before end of string");
        if (!n) next++;
        else if (all_ascii(name, DIGITS) && n < 9) index = (size_t)strtol(name.s, NULL, 10);
        else index = SIZE_MAX;
        if (index < b->call->n) v = b->call->v[index];
        for (size_t k = 0; index == SIZE_MAX && k < b->call->nk; k++)
            if (jv_is(name, b->call->kname[k])) v = b->call->kv[k];
        if (rc == 0 && v.kind == JV_UNDEF && v.s) rc = jj_fail(r, "%s", v.s);
        if (rc == 0) rc = jv_str(r, v, &x);
        i += n + 1;
    }
    *out = jv_from_buf(r, &x);
    return rc;
}

static int percent_field(jrt *r, char c, const char *spec, jv v, buf *out)
{
    if (c == 's') return jv_str(r, v, out);
    if (c == 'r') return jv_repr(r, v, out);
    if (!jv_is_num(v)) return jj_fail(r, "%%%c format: a number is required, not %s", c, jv_type(v));
    char text[400], format[32];
    if (strchr("dixX", c)) {
        snprintf(format, sizeof format, "%%%.20sll%c", spec, c == 'i' ? 'd' : c);
        double d = jv_num(v);
        long long i = v.kind == JV_INT ? v.i : fabs(d) < 9e18 ? (long long)d : 0;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(text, sizeof text, format, i);
    } else {
        snprintf(format, sizeof format, "%%%.20s%c", spec, c);
        snprintf(text, sizeof text, format, jv_num(v));
#pragma GCC diagnostic pop
    }
    buf_puts(out, text);
    return 0;
}

/* format % args with %s %r %d %i %x %X %f %e %g and their widths. */
int jj__format_percent(jrt *r, jv format, jv args, jv *out);
int jj__format_percent(jrt *r, jv format, jv args, jv *out)
{
    buf x = {0};
    size_t used = 0;
    bool tuple = args.kind == JV_LIST && args.sub == JL_TUPLE;
    int rc = 0;
    buf_puts(&x, "");
    for (size_t i = 0; rc == 0 && i < format.n; i++) {
        char c = format.s[i], spec[16];
        size_t n = 0, given = tuple ? args.l->n : 1;
        if (c != '%') {
            buf_putc(&x, c);
            continue;
        }
        for (i++; i < format.n && strchr("0123456789.+- ", format.s[i]) && n < 6; i++)
            spec[n++] = format.s[i];
        spec[n] = 0;
        c = i < format.n ? format.s[i] : 0;
        if (c == '%') buf_putc(&x, '%');
        else if (!c || !strchr("srdixXfeg", c)) rc = jj_fail(r, "unsupported format character");
        else if (used >= given) rc = jj_fail(r, "not enough arguments for format string");
        else rc = percent_field(r, c, spec, tuple ? args.l->v[used] : args, &x);
        if (c != '%') used++;
    }
    if (rc == 0 && tuple && used < args.l->n)
        rc = jj_fail(r, "not all arguments converted during string formatting");
    if (rc == 0 && !tuple && !used && args.kind != JV_DICT)
        rc = jj_fail(r, "not all arguments converted during string formatting");
    *out = jv_from_buf(r, &x);
    return rc;
}

/* ---- dictionaries and lists ------------------------------------------------------------------- */

static int view(jrt *r, const jbound *b, const char *what, int part_of, jv *out)
{
    const jdict *d = b->in.d;
    *out = jv_list(r, JL_VIEW);
    out->l->what = what;
    for (size_t i = 0; i < d->n; i++) {
        jv pair = part_of == 0 ? d->k[i] : d->v[i];
        if (part_of == 2) {
            pair = jv_list(r, JL_TUPLE);
            jv_push(r, pair, d->k[i]);
            jv_push(r, pair, d->v[i]);
        }
        jv_push(r, *out, pair);
    }
    return jj_step(r);
}

static int m_keys(jrt *r, const jbound *b, jv *out)
{
    return view(r, b, "dict_keys", 0, out);
}

static int m_values(jrt *r, const jbound *b, jv *out)
{
    return view(r, b, "dict_values", 1, out);
}

static int m_items(jrt *r, const jbound *b, jv *out)
{
    return view(r, b, "dict_items", 2, out);
}

static int m_get(jrt *r, const jbound *b, jv *out)
{
    (void)r;
    if (!jv_get(b->in.d, b->a[0], out)) *out = b->has[1] ? b->a[1] : jv_none();
    return 0;
}

static int m_copy(jrt *r, const jbound *b, jv *out)
{
    (void)r;
    *out = b->in;
    return 0;
}

static int m_list_index(jrt *r, const jbound *b, jv *out)
{
    for (size_t i = 0; i < b->in.l->n; i++)
        if (jv_equal(b->in.l->v[i], b->a[0])) {
            *out = jv_int((int64_t)i);
            return 0;
        }
    return jj_fail(r, "the value is not in the list");
}

static int m_list_count(jrt *r, const jbound *b, jv *out)
{
    (void)r;
    int64_t n = 0;
    for (size_t i = 0; i < b->in.l->n; i++)
        n += jv_equal(b->in.l->v[i], b->a[0]);
    *out = jv_int(n);
    return 0;
}

/* loop.cycle(a, b, …) and loop.changed(x) */
static int m_cycle(jrt *r, const jbound *b, jv *out)
{
    if (!b->call->n) return jj_fail(r, "no items for cycling given");
    *out = b->call->v[b->in.loop->i % b->call->n];
    return 0;
}

static int m_changed(jrt *r, const jbound *b, jv *out)
{
    jloop *l = b->in.loop;
    jv now = jv_list(r, JL_TUPLE);
    for (size_t i = 0; i < b->call->n; i++)
        jv_push(r, now, b->call->v[i]);
    *out = jv_bool(!l->has_changed || !jv_equal(l->last_changed, now));
    l->last_changed = now;
    l->has_changed = true;
    return 0;
}

static const jj_row methods[] = {
    {"capitalize", "", 0, m_capitalize, JV_STR},
    {"center", "width fillchar", 1, m_center, JV_STR},
    {"count", "sub", 1, m_count, JV_STR},
    {"endswith", "suffix", 1, m_endswith, JV_STR},
    {"find", "sub", 1, m_find, JV_STR},
    {"format", "*", 0, m_format, JV_STR},
    {"index", "sub", 1, m_index, JV_STR},
    {"isalnum", "", 0, m_isalnum, JV_STR},
    {"isalpha", "", 0, m_isalpha, JV_STR},
    {"isdigit", "", 0, m_isdigit, JV_STR},
    {"isdecimal", "", 0, m_isdigit, JV_STR},
    {"isnumeric", "", 0, m_isdigit, JV_STR},
    {"islower", "", 0, m_islower, JV_STR},
    {"isspace", "", 0, m_isspace, JV_STR},
    {"isupper", "", 0, m_isupper, JV_STR},
    {"join", "iterable", 1, m_join, JV_STR},
    {"ljust", "width fillchar", 1, m_ljust, JV_STR},
    {"lower", "", 0, m_lower, JV_STR},
    {"lstrip", "chars", 0, m_lstrip, JV_STR},
    {"partition", "sep", 1, m_partition, JV_STR},
    {"removeprefix", "prefix", 1, m_removeprefix, JV_STR},
    {"removesuffix", "suffix", 1, m_removesuffix, JV_STR},
    {"replace", "old new count", 2, m_replace, JV_STR},
    {"rfind", "sub", 1, m_rfind, JV_STR},
    {"rjust", "width fillchar", 1, m_rjust, JV_STR},
    {"rpartition", "sep", 1, m_rpartition, JV_STR},
    {"rsplit", "sep maxsplit", 0, m_rsplit, JV_STR},
    {"rstrip", "chars", 0, m_rstrip, JV_STR},
    {"split", "sep maxsplit", 0, m_split, JV_STR},
    {"splitlines", "keepends", 0, m_splitlines, JV_STR},
    {"startswith", "prefix", 1, m_startswith, JV_STR},
    {"strip", "chars", 0, m_strip, JV_STR},
    {"title", "", 0, m_title, JV_STR},
    {"upper", "", 0, m_upper, JV_STR},
    {"zfill", "width", 1, m_zfill, JV_STR},
    {"copy", "", 0, m_copy, JV_DICT},
    {"get", "key default", 1, m_get, JV_DICT},
    {"items", "", 0, m_items, JV_DICT},
    {"keys", "", 0, m_keys, JV_DICT},
    {"values", "", 0, m_values, JV_DICT},
    {"clear", "", 0, NULL, JV_DICT},
    {"pop", "", 0, NULL, JV_DICT},
    {"popitem", "", 0, NULL, JV_DICT},
    {"setdefault", "", 0, NULL, JV_DICT},
    {"update", "", 0, NULL, JV_DICT},
    {"copy", "", 0, m_copy, JV_LIST},
    {"count", "value", 1, m_list_count, JV_LIST},
    {"index", "value", 1, m_list_index, JV_LIST},
    {"append", "", 0, NULL, JV_LIST},
    {"clear", "", 0, NULL, JV_LIST},
    {"extend", "", 0, NULL, JV_LIST},
    {"insert", "", 0, NULL, JV_LIST},
    {"pop", "", 0, NULL, JV_LIST},
    {"remove", "", 0, NULL, JV_LIST},
    {"reverse", "", 0, NULL, JV_LIST},
    {"sort", "", 0, NULL, JV_LIST},
    {"changed", "*", 0, m_changed, JV_LOOP},
    {"cycle", "*", 0, m_cycle, JV_LOOP},
};

const jj_row *jj_method_find(int kind, const char *name, size_t n)
{
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (methods[i].kind == kind && strlen(methods[i].name) == n &&
            !memcmp(methods[i].name, name, n))
            return &methods[i];
    return NULL;
}
