/* Filters: a const table of name, parameters and function. Behaviour is that of Jinja2 with tojson as
 * transformers sets it (no HTML escapes, ensure_ascii off). A filter that is not in the table is an
 * error when the template is opened. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "text/jinja.h"

/* The text of the input: str(value), with undefined as "". */
#define TEXT_OF(r, b, v)                                                                           \
    jv v;                                                                                          \
    do {                                                                                           \
        int text_rc = jv_to_str(r, (b)->in, &v);                                                   \
        if (text_rc < 0) return text_rc;                                                           \
    } while (0)

static int64_t int_arg(const jbound *b, int i, int64_t fallback)
{
    jv v = b->a[i];
    if (!b->has[i] || !jv_is_num(v)) return fallback;
    double d = jv_num(v);
    return v.kind == JV_INT ? v.i : d > 1e15 ? (int64_t)1e15 : d < -1e15 ? (int64_t)-1e15 : (int64_t)d;
}

static int by_case(jrt *r, const jbound *b, void (*fn)(const char *, size_t, buf *), jv *out)
{
    TEXT_OF(r, b, s);
    buf x = {0};
    buf_puts(&x, "");
    fn(s.s, s.n, &x);
    *out = jv_from_buf(r, &x);
    out->sub = s.sub;
    return 0;
}

static int f_upper(jrt *r, const jbound *b, jv *out)
{
    return by_case(r, b, js_upper, out);
}

static int f_lower(jrt *r, const jbound *b, jv *out)
{
    return by_case(r, b, js_lower, out);
}

static int f_capitalize(jrt *r, const jbound *b, jv *out)
{
    return by_case(r, b, js_capitalize, out);
}

/* Words begin after white space, '-' and opening brackets; the rest of a word is lowered. */
static void title_words(const char *s, size_t n, buf *out)
{
    size_t i = 0;
    while (i < n) {
        size_t k = i;
        while (k < n && strchr("- \t\n\r\f\v({[<", s[k]) && s[k])
            k++;
        buf_add(out, s + i, k - i);
        for (i = k; k < n && !(strchr("- \t\n\r\f\v({[<", s[k]) && s[k]);)
            k++;
        js_capitalize(s + i, k - i, out);
        i = k;
    }
}

static int f_title(jrt *r, const jbound *b, jv *out)
{
    return by_case(r, b, title_words, out);
}

static int f_trim(jrt *r, const jbound *b, jv *out)
{
    TEXT_OF(r, b, s);
    *out = js_strip(s, b->has[0] ? b->a[0] : jv_none(), true, true);
    return 0;
}

static int f_string(jrt *r, const jbound *b, jv *out)
{
    return jv_to_str(r, b->in, out);
}

static int f_safe(jrt *r, const jbound *b, jv *out)
{
    int rc = jv_to_str(r, b->in, out);
    out->sub = JS_SAFE;
    return rc;
}

static int f_escape(jrt *r, const jbound *b, jv *out)
{
    TEXT_OF(r, b, s);
    buf x = {0};
    *out = s;
    if (s.sub == JS_SAFE) return 0;
    buf_puts(&x, "");
    js_escape(s.s, s.n, &x);
    *out = jv_from_buf(r, &x);
    out->sub = JS_SAFE;
    return 0;
}

static int f_default(jrt *r, const jbound *b, jv *out)
{
    (void)r;
    bool use = b->in.kind == JV_UNDEF || (b->has[1] && jv_truth(b->a[1]) && !jv_truth(b->in));
    *out = !use ? b->in : b->has[0] ? b->a[0] : jv_ref("", 0);
    return 0;
}

static int f_length(jrt *r, const jbound *b, jv *out)
{
    int64_t n = 0;
    int rc = jv_length(r, b->in, &n);
    *out = jv_int(n);
    return rc;
}

static int f_replace(jrt *r, const jbound *b, jv *out)
{
    TEXT_OF(r, b, s);
    jv from, to;
    int rc = jv_to_str(r, b->a[0], &from);
    if (rc == 0) rc = jv_to_str(r, b->a[1], &to);
    if (rc < 0) return rc;
    s.sub = JS_PLAIN;
    return js_replace(r, s, from, to, int_arg(b, 2, -1), out);
}

static int f_indent(jrt *r, const jbound *b, jv *out)
{
    TEXT_OF(r, b, s);
    bool first = b->has[1] && jv_truth(b->a[1]), blank = b->has[2] && jv_truth(b->a[2]);
    jv pad = b->has[0] && b->a[0].kind == JV_STR ? b->a[0] : jv_none();
    int64_t width = int_arg(b, 0, 4);
    if (width < 0) width = 0;
    if (width > 1000) return jj_fail(r, "indent of %lld is too wide", (long long)width);
    buf ind = {0}, x = {0}, text = {0};
    if (pad.kind == JV_STR) buf_add(&ind, pad.s, pad.n);
    for (int64_t i = 0; pad.kind != JV_STR && i < width; i++)
        buf_putc(&ind, ' ');
    buf_puts(&ind, "");
    buf_puts(&x, "");
    buf_add(&text, s.s, s.n);
    buf_putc(&text, '\n'); /* as the library does, so that a last empty line counts */
    jv lines = jv_list(r, JL_LIST), whole = jv_strn(r, text.data, text.len);
    buf_free(&text);
    js_splitlines(r, whole, false, lines);
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < lines.l->n; i++) {
        if (i) buf_putc(&x, '\n');
        if (i ? blank || lines.l->v[i].n : first) buf_add(&x, ind.data, ind.len);
        buf_add(&x, lines.l->v[i].s, lines.l->v[i].n);
        rc = jj_room(r, x.len);
    }
    buf_free(&ind);
    *out = jv_from_buf(r, &x);
    return rc;
}

static int f_join(jrt *r, const jbound *b, jv *out)
{
    jlist *l;
    jv sep = jv_ref("", 0);
    buf x = {0};
    int rc = jv_iterate(r, b->in, &l);
    if (rc == 0 && b->has[0]) rc = jv_to_str(r, b->a[0], &sep);
    buf_puts(&x, "");
    for (size_t i = 0; rc == 0 && i < l->n; i++) {
        jv v = l->v[i];
        if (i) buf_add(&x, sep.s, sep.n);
        if (b->has[1]) rc = jj_item(r, v, b->a[1], &v);
        if (rc == 0) rc = jv_str(r, v, &x);
        if (rc == 0) rc = jj_room(r, x.len);
    }
    *out = jv_from_buf(r, &x);
    return rc;
}

static int f_tojson(jrt *r, const jbound *b, jv *out)
{
    buf x = {0}, pad = {0};
    jv item = jv_ref(", ", 2), key = jv_ref(": ", 2);
    int rc = 0;
    bool pretty = b->has[1] && b->a[1].kind != JV_NONE;
    buf_puts(&pad, "");
    if (pretty && b->a[1].kind == JV_STR) buf_add(&pad, b->a[1].s, b->a[1].n);
    else if (pretty)
        for (int64_t i = 0; i < int_arg(b, 1, 0) && i < 100; i++)
            buf_putc(&pad, ' ');
    if (pretty) item = jv_ref(",", 1);
    if (b->has[2] && b->a[2].kind == JV_LIST && b->a[2].l->n == 2 &&
        b->a[2].l->v[0].kind == JV_STR && b->a[2].l->v[1].kind == JV_STR) {
        item = b->a[2].l->v[0];
        key = b->a[2].l->v[1];
    }
    jv i0 = jv_strn(r, item.s, item.n), k0 = jv_strn(r, key.s, key.n);
    buf_puts(&x, "");
    rc = jv_tojson(r, b->in, b->has[0] && jv_truth(b->a[0]), pretty ? pad.data : NULL, pad.len, i0.s,
                   k0.s, b->has[3] && jv_truth(b->a[3]), &x);
    buf_free(&pad);
    *out = jv_from_buf(r, &x);
    return rc;
}

/* ---- numbers ---------------------------------------------------------------------------------- */

static bool parse_number(jv s, double *out, bool *integral)
{
    char text[64], *end;
    s = js_strip(s, jv_none(), true, true);
    if (!s.n || s.n >= sizeof text) return false;
    memcpy(text, s.s, s.n);
    text[s.n] = 0;
    *integral = text[strspn(text, "+-0123456789")] == 0;
    if (strpbrk(text, "xXpP")) return false;
    *out = strtod(text, &end);
    return !*end;
}

static int f_int(jrt *r, const jbound *b, jv *out)
{
    (void)r;
    double d;
    bool whole;
    *out = b->has[0] ? b->a[0] : jv_int(0);
    if (b->in.kind == JV_INT) *out = b->in;
    else if (b->in.kind == JV_BOOL) *out = jv_int(b->in.b);
    else if (b->in.kind == JV_FLOAT && fabs(b->in.f) < 9e18) *out = jv_int((int64_t)b->in.f);
    else if (b->in.kind == JV_STR && int_arg(b, 1, 10) != 10) {
        char text[72], *end;
        jv s = js_strip(b->in, jv_none(), true, true);
        if (!s.n || s.n >= sizeof text) return 0;
        memcpy(text, s.s, s.n);
        text[s.n] = 0;
        int64_t base = int_arg(b, 1, 10);
        if (base < 0 || base == 1 || base > 36) return 0;
        long long v = strtoll(text, &end, (int)base);
        if (!*end) *out = jv_int(v);
    } else if (b->in.kind == JV_STR && parse_number(b->in, &d, &whole) && fabs(d) < 9e18)
        *out = jv_int((int64_t)d);
    return 0;
}

static int f_float(jrt *r, const jbound *b, jv *out)
{
    (void)r;
    double d;
    bool whole;
    *out = b->has[0] ? b->a[0] : jv_float(0);
    if (jv_is_num(b->in)) *out = jv_float(jv_num(b->in));
    else if (b->in.kind == JV_STR && parse_number(b->in, &d, &whole)) *out = jv_float(d);
    return 0;
}

static int need_number(jrt *r, jv v)
{
    if (jv_is_num(v)) return 0;
    return jj_fail(r, "a number is needed, not '%s'", jv_type(v));
}

static int f_abs(jrt *r, const jbound *b, jv *out)
{
    int rc = need_number(r, b->in);
    if (rc < 0) return rc;
    if (b->in.kind == JV_FLOAT) *out = jv_float(fabs(b->in.f));
    else {
        int64_t i = b->in.kind == JV_BOOL ? b->in.b : b->in.i;
        *out = jv_int(i < 0 && i != INT64_MIN ? -i : i);
    }
    return 0;
}

static int f_round(jrt *r, const jbound *b, jv *out)
{
    int rc = need_number(r, b->in);
    if (rc < 0) return rc;
    int64_t digits = int_arg(b, 0, 0);
    if (digits > 15 || digits < -15) return jj_fail(r, "round to %lld digits", (long long)digits);
    double x = jv_num(b->in), scale = pow(10, (double)digits);
    if (b->has[1] && jv_is(b->a[1], "ceil")) x = ceil(x * scale) / scale;
    else if (b->has[1] && jv_is(b->a[1], "floor")) x = floor(x * scale) / scale;
    else if (digits > 0) {
        char text[400]; /* printf rounds the exact binary value half to even, as round() does */
        snprintf(text, sizeof text, "%.*f", (int)digits, x);
        x = strtod(text, NULL);
    } else {
        x = nearbyint(x * scale) / scale;
    }
    *out = jv_float(x);
    return 0;
}

/* ---- sequences -------------------------------------------------------------------------------- */

static int f_list(jrt *r, const jbound *b, jv *out)
{
    jlist *l;
    int rc = jv_iterate(r, b->in, &l);
    if (rc < 0) return rc;
    *out = jv_list(r, JL_LIST);
    out->l->v = l->v; /* lists never change: the items are shared */
    out->l->n = out->l->cap = l->n;
    return 0;
}

static int f_first(jrt *r, const jbound *b, jv *out)
{
    if (b->in.kind == JV_LIST && b->in.sub == JL_GEN) {
        jlist *g = b->in.l;
        *out = g->pos < g->n ? g->v[g->pos++] : jv_undef("no first item, sequence was empty");
        return 0;
    }
    jlist *l;
    int rc = jv_iterate(r, b->in, &l);
    if (rc == 0) *out = l->n ? l->v[0] : jv_undef("no first item, sequence was empty");
    return rc;
}

static int f_last(jrt *r, const jbound *b, jv *out)
{
    if (b->in.kind == JV_LIST && b->in.sub == JL_GEN)
        return jj_fail(r, "'generator' object is not reversible");
    jlist *l;
    int rc = jv_iterate(r, b->in, &l);
    if (rc == 0) *out = l->n ? l->v[l->n - 1] : jv_undef("no last item, sequence was empty");
    return rc;
}

static int f_reverse(jrt *r, const jbound *b, jv *out)
{
    jlist *l;
    int rc = jv_iterate(r, b->in, &l);
    if (rc < 0) return rc;
    jv list = jv_list(r, JL_GEN);
    for (size_t i = l->n; i-- > 0;)
        jv_push(r, list, l->v[i]);
    *out = list;
    if (b->in.kind != JV_STR) return 0;
    buf x = {0};
    buf_puts(&x, "");
    for (size_t i = 0; i < list.l->n; i++)
        buf_add(&x, list.l->v[i].s, list.l->v[i].n);
    *out = jv_from_buf(r, &x);
    return 0;
}

static int f_items(jrt *r, const jbound *b, jv *out)
{
    *out = jv_list(r, JL_GEN);
    if (b->in.kind == JV_UNDEF) return 0;
    if (b->in.kind != JV_DICT) return jj_fail(r, "Can only get item pairs from a mapping.");
    for (size_t i = 0; i < b->in.d->n; i++) {
        jv pair = jv_list(r, JL_TUPLE);
        jv_push(r, pair, b->in.d->k[i]);
        jv_push(r, pair, b->in.d->v[i]);
        jv_push(r, *out, pair);
    }
    return jj_step(r);
}

/* A value by a path such as "a.b.0". */
static int by_path(jrt *r, jv v, jv path, jv fallback, jv *out)
{
    int rc = 0;
    if (path.kind == JV_INT) return jj_item(r, v, path, out);
    for (size_t i = 0; rc == 0 && path.kind == JV_STR && i <= path.n;) {
        size_t k = i;
        while (k < path.n && path.s[k] != '.')
            k++;
        jv key = jv_ref(path.s + i, k - i);
        bool digits = key.n > 0 && key.n < 10;
        int64_t index = 0;
        for (size_t m = 0; m < key.n; m++) {
            digits = digits && key.s[m] >= '0' && key.s[m] <= '9';
            index = index * 10 + (digits ? key.s[m] - '0' : 0);
        }
        rc = jj_item(r, v, digits ? jv_int(index) : key, &v);
        if (rc == 0 && v.kind == JV_UNDEF && fallback.kind != JV_UNDEF) v = fallback;
        i = k + 1;
    }
    *out = v;
    return rc;
}

static int lowered(jrt *r, jv *v)
{
    if (v->kind != JV_STR) return 0;
    buf x = {0};
    buf_puts(&x, "");
    js_lower(v->s, v->n, &x);
    *v = jv_from_buf(r, &x);
    return jj_step(r);
}

/* Stable merge sort of index by keys; r->e tells of a failed comparison. */
static int merge_sort(jrt *r, size_t *v, size_t *tmp, size_t n, const jv *key, bool reverse)
{
    if (n < 2) return 0;
    size_t m = n / 2, i = 0, k = m, o = 0;
    int rc = merge_sort(r, v, tmp, m, key, reverse);
    if (rc == 0) rc = merge_sort(r, v + m, tmp, n - m, key, reverse);
    while (rc == 0 && i < m && k < n) {
        int c;
        if ((rc = jv_compare(r, key[v[k]], key[v[i]], "<", &c)) < 0) break;
        tmp[o++] = (reverse ? c > 0 : c < 0) ? v[k++] : v[i++];
        rc = jj_step(r);
    }
    if (rc < 0) return rc;
    while (i < m)
        tmp[o++] = v[i++];
    memcpy(v, tmp, o * sizeof *v);
    return 0;
}

static int sort_by(jrt *r, const jlist *l, jv path, bool fold, bool reverse, jv *out)
{
    jv *key = jj_alloc(r, (l->n + 1) * sizeof *key);
    size_t *order = jj_alloc(r, (2 * l->n + 1) * sizeof *order);
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < l->n; i++) {
        key[i] = l->v[i];
        order[i] = i;
        if (path.kind == JV_STR || path.kind == JV_INT)
            rc = by_path(r, key[i], path, jv_undef(NULL), &key[i]);
        if (rc == 0 && fold) rc = lowered(r, &key[i]);
    }
    if (rc == 0) rc = merge_sort(r, order, order + l->n, l->n, key, reverse);
    *out = jv_list(r, JL_LIST);
    for (size_t i = 0; rc == 0 && i < l->n; i++)
        jv_push(r, *out, l->v[order[i]]);
    return rc;
}

static int f_sort(jrt *r, const jbound *b, jv *out)
{
    jlist *l;
    int rc = jv_iterate(r, b->in, &l);
    if (rc < 0) return rc;
    return sort_by(r, l, b->has[2] ? b->a[2] : jv_none(), !(b->has[1] && jv_truth(b->a[1])),
                   b->has[0] && jv_truth(b->a[0]), out);
}

static int f_dictsort(jrt *r, const jbound *b, jv *out)
{
    jbound items = {.in = b->in};
    jv pairs;
    int rc;
    if (b->in.kind != JV_DICT) return jj_fail(r, "dictsort needs a mapping, not '%s'", jv_type(b->in));
    if ((rc = f_items(r, &items, &pairs)) < 0) return rc;
    bool by_value = b->has[1] && jv_is(b->a[1], "value");
    return sort_by(r, pairs.l, jv_int(by_value), !(b->has[0] && jv_truth(b->a[0])),
                   b->has[2] && jv_truth(b->a[2]), out);
}

static int f_unique(jrt *r, const jbound *b, jv *out)
{
    jlist *l;
    int rc = jv_iterate(r, b->in, &l);
    jv seen = jv_dict(r);
    *out = jv_list(r, JL_GEN);
    for (size_t i = 0; rc == 0 && i < l->n; i++) {
        jv key = l->v[i], old;
        if (b->has[1]) rc = by_path(r, key, b->a[1], jv_undef(NULL), &key);
        if (rc == 0 && !(b->has[0] && jv_truth(b->a[0]))) rc = lowered(r, &key);
        if (rc < 0 || jv_get(seen.d, key, &old)) continue;
        jv_put(r, seen, key, jv_none());
        jv_push(r, *out, l->v[i]);
    }
    return rc;
}

static int extreme(jrt *r, const jbound *b, int want, jv *out)
{
    jlist *l;
    int rc = jv_iterate(r, b->in, &l);
    jv best = jv_none();
    *out = jv_undef("no item, sequence was empty");
    for (size_t i = 0; rc == 0 && i < l->n; i++) {
        jv key = l->v[i];
        int c = want;
        if (b->has[1]) rc = by_path(r, key, b->a[1], jv_undef(NULL), &key);
        if (rc == 0 && !(b->has[0] && jv_truth(b->a[0]))) rc = lowered(r, &key);
        if (rc == 0 && i) rc = jv_compare(r, key, best, "<", &c);
        if (rc < 0 || (i && (want < 0 ? c >= 0 : c <= 0))) continue;
        best = key;
        *out = l->v[i];
    }
    return rc;
}

static int f_min(jrt *r, const jbound *b, jv *out)
{
    return extreme(r, b, -1, out);
}

static int f_max(jrt *r, const jbound *b, jv *out)
{
    return extreme(r, b, 1, out);
}

static int f_sum(jrt *r, const jbound *b, jv *out)
{
    jlist *l;
    int rc = jv_iterate(r, b->in, &l);
    *out = b->has[1] ? b->a[1] : jv_int(0);
    for (size_t i = 0; rc == 0 && i < l->n; i++) {
        jv v = l->v[i];
        if (b->has[0] && b->a[0].kind != JV_NONE)
            rc = by_path(r, v, b->a[0], jv_undef(NULL), &v);
        if (rc == 0) rc = jj_binary(r, '+', *out, v, out);
    }
    return rc;
}

static int f_batch(jrt *r, const jbound *b, jv *out)
{
    jlist *l;
    int64_t size = int_arg(b, 0, 0);
    int rc = jv_iterate(r, b->in, &l);
    if (rc < 0) return rc;
    if (size < 1) return jj_fail(r, "batch needs a positive size");
    *out = jv_list(r, JL_GEN);
    jv row = jv_none();
    for (size_t i = 0; i < l->n; i++) {
        if (i % (size_t)size == 0) {
            row = jv_list(r, JL_LIST);
            jv_push(r, *out, row);
        }
        jv_push(r, row, l->v[i]);
    }
    while (b->has[1] && b->a[1].kind != JV_NONE && row.kind == JV_LIST && size < JJ_MAX_RANGE &&
           row.l->n < (size_t)size)
        jv_push(r, row, b->a[1]);
    return jj_step(r);
}

static int f_groupby(jrt *r, const jbound *b, jv *out)
{
    jlist *l;
    jv sorted, group = jv_none(), last = jv_none();
    int rc = jv_iterate(r, b->in, &l);
    if (rc == 0) rc = sort_by(r, l, b->a[0], !(b->has[2] && jv_truth(b->a[2])), false, &sorted);
    *out = jv_list(r, JL_LIST);
    for (size_t i = 0; rc == 0 && i < sorted.l->n; i++) {
        jv key;
        if ((rc = by_path(r, sorted.l->v[i], b->a[0], b->has[1] ? b->a[1] : jv_undef(NULL), &key)) < 0)
            break;
        if (!i || !jv_equal(key, last)) {
            jv pair = jv_list(r, JL_TUPLE);
            group = jv_list(r, JL_LIST);
            jv_push(r, pair, key);
            jv_push(r, pair, group);
            jv_push(r, *out, pair);
            last = key;
        }
        jv_push(r, group, sorted.l->v[i]);
    }
    return rc;
}

/* ---- map, select, reject ---------------------------------------------------------------------- */

static jcall tail_of(const jcall *c, size_t skip)
{
    return (jcall){c->v + skip, c->n - skip, c->kname, c->kv, c->nk};
}

static int f_map(jrt *r, const jbound *b, jv *out)
{
    const jcall *c = b->call;
    jlist *l;
    jv path = jv_none(), fallback = jv_undef(NULL);
    const jj_row *row = NULL;
    for (size_t i = 0; i < c->nk && !c->n; i++) {
        if (!strcmp(c->kname[i], "attribute")) path = c->kv[i];
        else if (!strcmp(c->kname[i], "default")) fallback = c->kv[i];
        else return jj_fail(r, "filter 'map' got an unexpected argument '%.40s'", c->kname[i]);
    }
    if (path.kind == JV_NONE) {
        if (!c->n || c->v[0].kind != JV_STR) return jj_fail(r, "map requires a filter argument");
        jv name = jv_strn(r, c->v[0].s, c->v[0].n);
        row = jj_filter_find(name.s);
        if (!row) return jj_fail(r, "No filter named '%.60s'.", name.s);
    }
    int rc = jv_iterate(r, b->in, &l);
    *out = jv_list(r, JL_GEN);
    for (size_t i = 0; rc == 0 && i < l->n; i++) {
        jv v;
        if (row) {
            jcall rest = tail_of(c, 1);
            rc = jj_call_row(r, row, "filter", l->v[i], &rest, b->scope, &v);
        } else {
            rc = by_path(r, l->v[i], path, fallback, &v);
        }
        jv_push(r, *out, v);
        if (rc == 0) rc = jj_step(r);
    }
    return rc;
}

static int pick(jrt *r, const jbound *b, bool by_attribute, bool want, jv *out)
{
    const jcall *c = b->call;
    size_t skip = by_attribute ? 1 : 0;
    const jj_row *row = NULL;
    jlist *l;
    if (by_attribute && !c->n) return jj_fail(r, "Missing parameter for attribute name");
    if (c->n > skip) {
        if (c->v[skip].kind != JV_STR) return jj_fail(r, "the name of a test must be a string");
        jv name = jv_strn(r, c->v[skip].s, c->v[skip].n);
        row = jj_test_find(name.s);
        if (!row) return jj_fail(r, "No test named '%.60s'.", name.s);
        skip++;
    }
    int rc = jv_iterate(r, b->in, &l);
    *out = jv_list(r, JL_GEN);
    for (size_t i = 0; rc == 0 && i < l->n; i++) {
        jv v = l->v[i], yes;
        if (by_attribute && (rc = by_path(r, v, c->v[0], jv_undef(NULL), &v)) < 0) break;
        yes = v;
        if (row) {
            jcall rest = tail_of(c, skip);
            rc = jj_call_row(r, row, "test", v, &rest, b->scope, &yes);
        }
        if (rc == 0 && jv_truth(yes) == want) jv_push(r, *out, l->v[i]);
        if (rc == 0) rc = jj_step(r);
    }
    return rc;
}

static int f_select(jrt *r, const jbound *b, jv *out)
{
    return pick(r, b, false, true, out);
}

static int f_reject(jrt *r, const jbound *b, jv *out)
{
    return pick(r, b, false, false, out);
}

static int f_selectattr(jrt *r, const jbound *b, jv *out)
{
    return pick(r, b, true, true, out);
}

static int f_rejectattr(jrt *r, const jbound *b, jv *out)
{
    return pick(r, b, true, false, out);
}

static int f_attr(jrt *r, const jbound *b, jv *out)
{
    jv name = b->a[0];
    if (name.kind != JV_STR) return jj_fail(r, "attr needs a name");
    if (b->in.kind == JV_DICT) { /* attributes only, never keys */
        const jj_row *row = jj_method_find(JV_DICT, name.s, name.n);
        if (!row) {
            *out = jv_undef("dict object has no such attribute");
            return 0;
        }
    }
    return jj_attr(r, b->in, name.s, name.n, out);
}

int jj__format_percent(jrt *r, jv format, jv args, jv *out);

static int f_format(jrt *r, const jbound *b, jv *out)
{
    TEXT_OF(r, b, s);
    jv args = jv_list(r, JL_TUPLE);
    for (size_t i = 0; i < b->call->n; i++)
        jv_push(r, args, b->call->v[i]);
    return jj__format_percent(r, s, args, out);
}

static int f_wordcount(jrt *r, const jbound *b, jv *out)
{
    TEXT_OF(r, b, s);
    int64_t n = 0;
    for (size_t i = 0; i < s.n; i++) {
        bool in = !strchr(" \t\n\r\f\v", s.s[i]) || !s.s[i];
        bool before = i && (!strchr(" \t\n\r\f\v", s.s[i - 1]) || !s.s[i - 1]);
        n += in && !before;
    }
    *out = jv_int(n);
    return 0;
}

static const jj_row filters[] = {
    {"abs", "", 0, f_abs, 0},
    {"attr", "name", 1, f_attr, 0},
    {"batch", "linecount fill_with", 1, f_batch, 0},
    {"capitalize", "", 0, f_capitalize, 0},
    {"count", "", 0, f_length, 0},
    {"d", "default_value boolean", 0, f_default, 0},
    {"default", "default_value boolean", 0, f_default, 0},
    {"dictsort", "case_sensitive by reverse", 0, f_dictsort, 0},
    {"e", "", 0, f_escape, 0},
    {"escape", "", 0, f_escape, 0},
    {"first", "", 0, f_first, 0},
    {"float", "default", 0, f_float, 0},
    {"format", "*", 0, f_format, 0},
    {"groupby", "attribute default case_sensitive", 1, f_groupby, 0},
    {"indent", "width first blank", 0, f_indent, 0},
    {"int", "default base", 0, f_int, 0},
    {"items", "", 0, f_items, 0},
    {"join", "d attribute", 0, f_join, 0},
    {"last", "", 0, f_last, 0},
    {"length", "", 0, f_length, 0},
    {"list", "", 0, f_list, 0},
    {"lower", "", 0, f_lower, 0},
    {"map", "*", 0, f_map, 0},
    {"max", "case_sensitive attribute", 0, f_max, 0},
    {"min", "case_sensitive attribute", 0, f_min, 0},
    {"reject", "*", 0, f_reject, 0},
    {"rejectattr", "*", 0, f_rejectattr, 0},
    {"replace", "old new count", 2, f_replace, 0},
    {"reverse", "", 0, f_reverse, 0},
    {"round", "precision method", 0, f_round, 0},
    {"safe", "", 0, f_safe, 0},
    {"select", "*", 0, f_select, 0},
    {"selectattr", "*", 0, f_selectattr, 0},
    {"sort", "reverse case_sensitive attribute", 0, f_sort, 0},
    {"string", "", 0, f_string, 0},
    {"sum", "attribute start", 0, f_sum, 0},
    {"title", "", 0, f_title, 0},
    {"tojson", "ensure_ascii indent separators sort_keys", 0, f_tojson, 0},
    {"trim", "chars", 0, f_trim, 0},
    {"unique", "case_sensitive attribute", 0, f_unique, 0},
    {"upper", "", 0, f_upper, 0},
    {"wordcount", "", 0, f_wordcount, 0},
};

const jj_row *jj_filter_find(const char *name)
{
    for (size_t i = 0; i < sizeof filters / sizeof *filters; i++)
        if (!strcmp(filters[i].name, name)) return &filters[i];
    return NULL;
}
