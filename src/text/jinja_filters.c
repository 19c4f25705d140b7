/* What `x | filter` can be: a registry, one row per filter.
 *
 * A native gets the filtered value as `self`. Where Jinja gives a generator, so do these (J_GEN):
 * it is true even when empty, can be visited once, and has no length. It is made at once here, so
 * what goes wrong on the way is kept and goes wrong for who visits it (`later`); limits excepted.
 * Sorting is stable. tojson is transformers' own: no HTML escapes, key order kept, ASCII escapes
 * only when asked for. The filters over text are in jinja_filters_text.c. */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/jinja_internal.h"

bool j_flag(const jcall *c, size_t pos, const char *name, bool otherwise)
{
    jv v;
    return j_arg(c, pos, name, &v) ? j_truth(v) : otherwise;
}

/* ---- tojson ---- */

typedef struct dump {
    jrun *r;
    buf *b;
    bool ascii, sort, pretty;
    jv indent, item_sep, key_sep;
} dump;

static void dump_str(dump *d, jv s)
{
    j_slow(d->r, s.n);
    buf_putc(d->b, '"');
    for (size_t i = 0; i < s.n;) {
        uint32_t cp = (uint8_t)s.s[i];
        int k = utf8_decode(s.s + i, s.n - i, &cp);
        static const char from[] = "\"\\\n\r\t\b\f", to[] = "\"\\nrtbf";
        const char *hit = cp && cp < 0x80 ? strchr(from, (int)cp) : NULL;
        if (k < 1) k = 1;
        if (hit)
            buf_printf(d->b, "\\%c", to[hit - from]);
        else if (cp < 0x20 || (d->ascii && cp >= 0x7f && cp < 0x10000 && cp != 0x7f))
            buf_printf(d->b, "\\u%04x", cp);
        else if (d->ascii && cp >= 0x10000)
            buf_printf(d->b, "\\u%04x\\u%04x", 0xd800 + ((cp - 0x10000) >> 10),
                       0xdc00 + ((cp - 0x10000) & 0x3ff));
        else
            buf_add(d->b, s.s + i, (size_t)k);
        i += (size_t)k;
    }
    buf_putc(d->b, '"');
}

static void dump_line(dump *d, int depth)
{
    if (!d->pretty) return;
    buf_putc(d->b, '\n');
    for (int i = 0; i < depth; i++)
        buf_add(d->b, d->indent.s, d->indent.n);
}

static int dump_value(dump *d, jv v, int depth);

static int dump_key(dump *d, jv k)
{
    if (k.t == J_STR) {
        dump_str(d, k);
        return 0;
    }
    if (!j_is_num(k) && k.t != J_NONE && k.t != J_BIG)
        return j_fail(d->r, "a JSON key cannot be a %s", j_type_name(k));
    buf_putc(d->b, '"');
    int rc = dump_value(d, k, 0);
    buf_putc(d->b, '"');
    return rc;
}

static int dump_items(dump *d, jv v, int depth)
{
    bool dict = v.t == J_DICT;
    size_t n = dict ? v.dict->n : v.list->n;
    int rc = 0;
    buf_putc(d->b, dict ? '{' : '[');
    size_t *order = NULL;
    if (dict && d->sort && n) TRY(j_sort_order(d->r, v.dict->keys, false, n, &order));
    for (size_t i = 0; i < n; i++) {
        size_t k = order ? order[i] : i;
        if (i) buf_add(d->b, d->item_sep.s, d->item_sep.n);
        dump_line(d, depth + 1);
        if (dict) {
            TRY(dump_key(d, v.dict->keys[k]));
            buf_add(d->b, d->key_sep.s, d->key_sep.n);
        }
        TRY(dump_value(d, dict ? v.dict->vals[k] : v.list->v[k], depth + 1));
    }
    if (n) dump_line(d, depth);
    buf_putc(d->b, dict ? '}' : ']');
out:
    return rc;
}

static int dump_value(dump *d, jv v, int depth)
{
    int rc = j_step(d->r);
    if (rc < 0) return rc;
    if (depth > J_MAX_NEST)
        return j_limit(d->r, "values nested deeper than the limit of %d", J_MAX_NEST);
    TRY(j_room(d->r, d->b->len));
    switch (v.t) {
    case J_NONE:
        buf_puts(d->b, "null");
        return 0;
    case J_BOOL:
        buf_puts(d->b, v.b ? "true" : "false");
        return 0;
    case J_INT:
        buf_printf(d->b, "%lld", (long long)v.i);
        return 0;
    case J_FLOAT:
        if (isfinite(v.f))
            j_print_float(d->b, v.f);
        else
            buf_puts(d->b, isnan(v.f) ? "NaN" : v.f < 0 ? "-Infinity" : "Infinity");
        return 0;
    case J_STR:
        dump_str(d, v);
        return 0;
    case J_BIG:
        buf_add(d->b, v.s, v.n);
        return 0;
    case J_LIST:
    case J_TUPLE:
    case J_DICT:
        return dump_items(d, v, depth);
    default:
        return j_fail(d->r, "tojson cannot write a value of type %s", j_type_name(v));
    }
out:
    return rc;
}

static int indent_arg(jrun *r, const jcall *c, dump *d)
{
    jv v = j_none();
    char spaces[64];
    j_arg(c, 1, "indent", &v);
    if (v.t == J_NONE) return 0;
    d->pretty = true;
    if (v.t == J_STR) {
        if (v.n > sizeof(spaces)) return j_limit(r, "tojson's indent is above the limit of 64");
        d->indent = v;
        return 0;
    }
    if (!j_is_int(v)) return j_fail(r, "tojson's indent must be a number or a string");
    int64_t n = v.t == J_INT ? v.i : v.b;
    if (n > (int64_t)sizeof(spaces)) return j_limit(r, "tojson's indent is above the limit of 64");
    memset(spaces, ' ', sizeof(spaces));
    d->indent = j_copy(r, spaces, n < 0 ? 0 : (size_t)n);
    return 0;
}

static int separators_arg(jrun *r, const jcall *c, dump *d)
{
    jlist *l;
    jv v = j_none();
    int rc = 0;
    j_arg(c, 2, "separators", &v);
    d->item_sep = j_strz(d->pretty ? "," : ", ");
    d->key_sep = j_strz(": ");
    if (v.t == J_NONE) return 0;
    if ((rc = j_iter(r, v, &l)) < 0) return rc;
    if (l->n != 2 || l->v[0].t != J_STR || l->v[1].t != J_STR)
        return j_fail(r, "tojson's separators must be two strings");
    d->item_sep = l->v[0];
    d->key_sep = l->v[1];
    return 0;
}

int j_tojson(jrun *r, jv self, const jcall *c, jv *out)
{
    int rc = 0;
    buf b = {0};
    dump d = {.r = r, .b = &b};
    d.ascii = j_flag(c, 0, "ensure_ascii", false);
    d.sort = j_flag(c, 3, "sort_keys", false);
    TRY(indent_arg(r, c, &d));
    TRY(separators_arg(r, c, &d));
    TRY(dump_value(&d, self, 0));
    *out = j_copy(r, b.data, b.len);
out:
    buf_free(&b);
    return rc;
}

/* ---- numbers ---- */

/* The text of a number without the white space around it and the underscores between its digits,
 * digits of other scripts as ASCII; false when it cannot be one. */
static bool number_text(jv s, char *out, size_t cap)
{
    size_t k = 0;
    s = j_strip(s, NULL, 0, true, true);
    for (size_t i = 0; i < s.n;) {
        uint32_t cp = 0;
        int used = utf8_decode(s.s + i, s.n - i, &cp);
        if (used <= 0 || k + 1 >= cap) return false;
        if (cp == '_') {
            bool between = k && isalnum((unsigned char)out[k - 1]) && i + 1 < s.n &&
                           (isalnum((unsigned char)s.s[i + 1]) || (uint8_t)s.s[i + 1] >= 0x80);
            if (!between) return false;
        } else if (cp < 0x80) {
            out[k++] = (char)cp;
        } else if (j_is(cp, J_IS_DECIMAL)) { /* ten of them always stand in a row */
            uint32_t zero = cp;
            while (zero > cp - 9 && j_is(zero - 1, J_IS_DECIMAL) && (cp < 0x1d7ce || cp > 0x1d7ff))
                zero--;
            if (cp >= 0x1d7ce && cp <= 0x1d7ff) zero = cp - (cp - 0x1d7ce) % 10;
            out[k++] = (char)('0' + (cp - zero));
        } else {
            return false;
        }
        i += (size_t)used;
    }
    out[k] = 0;
    return k > 0;
}

/* Python's int(text, base): 1 = a number, 0 = none, negative = an error. */
static int int_of_text(jrun *r, jv s, int64_t base, jv *out)
{
    char t[400], *end, *p = t;
    if (base != 0 && (base < 2 || base > 36)) return 0;
    if (!number_text(s, t, sizeof(t))) return 0;
    bool minus = *p == '-';
    if (*p == '-' || *p == '+') p++;
    char kind = *p == '0' ? (char)(p[1] | 32) : 0;
    int64_t prefix = kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 0;
    if (prefix && (base == 0 || base == prefix)) {
        p += 2;
        base = prefix;
    } else if (base == 0) {
        base = 10;
        if (*p == '0' && strspn(p, "0") != strlen(p)) return 0;
    }
    if (!isalnum((unsigned char)*p)) return 0;
    if (base == 10) {
        if (strspn(p, "0123456789") != strlen(p)) return 0;
        *out = j_int_text(r, t, strlen(t));
        return 1;
    }
    errno = 0;
    unsigned long long u = strtoull(p, &end, (int)base);
    if (*end || (base == 16 && (p[1] | 32) == 'x')) return 0;
    if (errno || u > INT64_MAX) return j_limit(r, "an integer above the limit of 64 bits");
    *out = j_int(minus ? -(int64_t)u : (int64_t)u);
    return 1;
}

/* Python's float(text). */
static bool float_of_text(jv s, double *out)
{
    char t[400], *end;
    if (!number_text(s, t, sizeof(t)) || strpbrk(t, "xXpP(")) return false;
    *out = strtod(t, &end);
    return !*end;
}

static int whole_part(jrun *r, double f, jv *out)
{
    if (isnan(f) || isinf(f)) return j_fail(r, "no integer is %s", isnan(f) ? "nan" : "infinite");
    if (fabs(f) >= 9.2e18) return j_limit(r, "an integer above the limit of 64 bits");
    *out = j_int((int64_t)f);
    return 0;
}

static int f_int(jrun *r, jv v, const jcall *c, jv *out)
{
    jv otherwise = j_int(0), base_arg = j_int(10);
    double f;
    int rc;
    j_arg(c, 0, "default", &otherwise);
    j_arg(c, 1, "base", &base_arg);
    *out = otherwise;
    switch (v.t) {
    case J_UNDEF:
        return j_fail(r, "'%s' is undefined", v.s ? v.s : "value");
    case J_INT:
    case J_BOOL:
        *out = j_int(v.t == J_INT ? v.i : v.b);
        return 0;
    case J_BIG:
        *out = v;
        return 0;
    case J_FLOAT:
        return isnan(v.f) ? 0 : whole_part(r, v.f, out);
    case J_STR:
        rc = j_is_int(base_arg)
                 ? int_of_text(r, v, base_arg.t == J_INT ? base_arg.i : base_arg.b, out)
                 : 0;
        if (rc != 0) return rc < 0 ? rc : 0;
        *out = otherwise;
        return float_of_text(v, &f) && isfinite(f) ? whole_part(r, f, out) : 0;
    default:
        return 0;
    }
}

static int f_float(jrun *r, jv v, const jcall *c, jv *out)
{
    jv otherwise = j_float(0);
    double f;
    j_arg(c, 0, "default", &otherwise);
    *out = otherwise;
    if (v.t == J_UNDEF) return j_fail(r, "'%s' is undefined", v.s ? v.s : "value");
    if (v.t == J_FLOAT)
        *out = v;
    else if (j_is_int(v))
        *out = j_float(v.t == J_INT ? (double)v.i : (double)v.b);
    else if (v.t == J_BIG)
        *out = j_float(strtod(v.s, NULL));
    else if (v.t == J_STR && float_of_text(v, &f))
        *out = j_float(f);
    return 0;
}

static int f_abs(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    if (v.t == J_BIG) {
        *out = v;
        if (v.s[0] == '-') *out = j_int_text(r, v.s + 1, v.n - 1);
        return 0;
    }
    if (!j_is_num(v)) return j_fail(r, "filter 'abs' needs a number, found %s", j_type_name(v));
    if (v.t == J_FLOAT) {
        *out = j_float(fabs(v.f));
        return 0;
    }
    return j_binary(r, JT_MUL, v, j_int(v.t == J_INT && v.i < 0 ? -1 : 1), out);
}

/* 1234 to hundreds and so on, half to even. */
static int round_int(jrun *r, jv v, int64_t places, jv *out)
{
    int64_t i = v.t == J_BOOL ? v.b : v.i, unit = 1;
    if (places < -18) {
        *out = j_int(0);
        return 0;
    }
    for (; places < 0; places++)
        unit *= 10;
    int64_t rest = i % unit, low = i - rest;
    if (rest < 0) {
        rest += unit;
        low -= unit;
    }
    bool up = rest > unit - rest || (unit > 1 && rest == unit - rest && (low / unit) % 2 != 0);
    return up ? j_binary(r, JT_ADD, j_int(low), j_int(unit), out) : (*out = j_int(low), 0);
}

static int round_float(jrun *r, double f, int64_t places, jv *out)
{
    buf b = {0};
    double scale = pow(10, (double)(places < 0 ? -places : places));
    *out = j_float(f);
    if (!isfinite(f) || places > 320) return 0;
    if (places < -308) {
        *out = j_float(copysign(0, f));
    } else if (places < 0) {
        double y = round(f / scale);
        if (fabs(f / scale - y) == 0.5) y = 2.0 * round(f / scale / 2.0);
        *out = j_float(y * scale);
        if (isinf(out->f)) return j_fail(r, "a result out of range");
    } else { /* printf rounds the exact value, half to even */
        buf_printf(&b, "%.*f", (int)places, f);
        *out = j_float(strtod(b.data, NULL));
        buf_free(&b);
    }
    return 0;
}

/* ceil and floor: the value times 10 ** places, as an integer, over the same. */
static int round_to_side(jrun *r, jv v, int64_t places, bool up, jv *out)
{
    int rc = 0;
    jv scale, x;
    TRY(j_binary(r, JT_POW, j_int(10), j_int(places), &scale));
    TRY(j_binary(r, JT_MUL, v, scale, &x));
    if (x.t == J_FLOAT) {
        if (!isfinite(x.f)) return j_fail(r, "a number that is not finite");
        double f = up ? ceil(x.f) : floor(x.f);
        if (fabs(f) < 9e18)
            x = j_int((int64_t)f);
        else
            x = j_float(f);
    }
    TRY(j_binary(r, JT_DIV, x, scale, out));
out:
    return rc;
}

static int f_round(jrun *r, jv v, const jcall *c, jv *out)
{
    int64_t places = 0;
    jv method = j_strz("common");
    int rc = j_arg_int(r, c, 0, "precision", &places);
    if (rc < 0) return rc;
    j_arg(c, 1, "method", &method);
    bool up = j_is_str(method, "ceil");
    if (!up && !j_is_str(method, "floor") && !j_is_str(method, "common"))
        return j_fail(r, "filter 'round': the method must be common, ceil or floor");
    if (v.t == J_BIG) return j_limit(r, "an integer above the limit of 64 bits");
    if (!j_is_num(v)) return j_fail(r, "filter 'round' needs a number, found %s", j_type_name(v));
    if (places > 300 || places < -300)
        return j_limit(r, "'round' to more places than the limit of 300");
    if (!j_is_str(method, "common")) return round_to_side(r, v, places, up, out);
    if (places > 20 || places < -20) j_slow(r, 2000); /* digits beyond a double's own are slow */
    if (v.t == J_FLOAT) return round_float(r, v.f, places, out);
    return round_int(r, v, places, out);
}

/* ---- collections ---- */

static int f_length(jrun *r, jv v, const jcall *c, jv *out)
{
    int64_t n;
    int rc = j_length(r, v, &n);
    (void)c;
    if (rc >= 0) *out = j_int(n);
    return rc;
}

static int f_default(jrun *r, jv v, const jcall *c, jv *out)
{
    jv otherwise = j_strz("");
    (void)r;
    j_arg(c, 0, "default_value", &otherwise);
    bool by_truth = j_flag(c, 1, "boolean", false);
    *out = v.t == J_UNDEF || (by_truth && !j_truth(v)) ? otherwise : v;
    return 0;
}

static int f_list(jrun *r, jv v, const jcall *c, jv *out)
{
    jlist *l;
    int rc = j_iter(r, v, &l);
    (void)c;
    if (rc < 0) return rc;
    if ((rc = j_room(r, l->n * sizeof(jv))) < 0) return rc;
    *out = j_list(r, l->n);
    for (size_t i = 0; i < l->n; i++)
        j_push(r, out->list, l->v[i]);
    return 0;
}

static int f_first(jrun *r, jv v, const jcall *c, jv *out)
{
    jlist *l;
    if (v.t == J_GEN && v.list->at < v.list->n) {
        *out = v.list->v[v.list->at++];
        return 0;
    }
    int rc = j_iter(r, v, &l);
    (void)c;
    if (rc >= 0) *out = l->n ? l->v[0] : j_undef("first item");
    return rc;
}

static int f_last(jrun *r, jv v, const jcall *c, jv *out)
{
    jlist *l;
    if (v.t == J_GEN || v.t == J_LOOP) return j_fail(r, "a generator has no last item");
    int rc = j_iter(r, v, &l);
    (void)c;
    if (rc >= 0) *out = l->n ? l->v[l->n - 1] : j_undef("last item");
    return rc;
}

static int f_reverse(jrun *r, jv v, const jcall *c, jv *out)
{
    jlist *l;
    int rc = j_iter(r, v, &l);
    (void)c;
    if (rc < 0) return rc;
    if (v.t == J_STR) {
        buf b = {0};
        for (size_t i = l->n; i-- > 0;)
            buf_add(&b, l->v[i].s, l->v[i].n);
        *out = j_take(r, &b);
        out->safe = v.safe;
        return 0;
    }
    *out = j_list(r, l->n);
    for (size_t i = l->n; i-- > 0;)
        j_push(r, out->list, l->v[i]);
    out->t = v.t == J_GEN ? J_LIST : J_GEN; /* reversed() refuses generators; then it is a list */
    return 0;
}

/* Makes *out a generator, also after an error that no limit gave: that comes behind its items. */
static int later(jrun *r, int rc, jv *out)
{
    if (rc < 0 && r->over) return rc;
    if (rc < 0) out->list->fail = j_copy(r, r->e->msg, strlen(r->e->msg)).s;
    out->t = J_GEN;
    return 0;
}

static int f_items(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    *out = j_list(r, 0);
    if (v.t != J_DICT && v.t != J_UNDEF)
        return later(r, j_fail(r, "filter 'items' needs a mapping, found %s", j_type_name(v)), out);
    for (size_t i = 0; v.t == J_DICT && i < v.dict->n; i++) {
        jv pair = j_list(r, 2);
        pair.t = J_TUPLE;
        j_push(r, pair.list, v.dict->keys[i]);
        j_push(r, pair.list, v.dict->vals[i]);
        j_push(r, out->list, pair);
    }
    out->t = J_GEN;
    return 0;
}

/* x followed along "a.b.0"; `path` may be an integer too. */
static int follow(jrun *r, jv x, jv path, jv otherwise, jv *out)
{
    int rc;
    *out = x;
    if (path.t == J_NONE) return 0;
    if (path.t != J_STR) {
        rc = j_item(r, x, path, out);
        if (rc >= 0 && out->t == J_UNDEF && otherwise.t != J_UNDEF) *out = otherwise;
        return rc;
    }
    for (size_t at = 0; at <= path.n;) {
        if ((rc = j_step(r)) < 0) return rc;
        const char *dot = memchr(path.s + at, '.', path.n - at);
        size_t end = dot ? (size_t)(dot - path.s) : path.n;
        jv part = j_str(path.s + at, end - at);
        bool digits = part.n > 0 && part.n < 10;
        int64_t i = 0;
        for (size_t k = 0; k < part.n && digits; k++) {
            digits = part.s[k] >= '0' && part.s[k] <= '9';
            i = i * 10 + (part.s[k] - '0');
        }
        if ((rc = j_item(r, *out, digits ? j_int(i) : part, out)) < 0) return rc;
        if (out->t == J_UNDEF && otherwise.t != J_UNDEF) *out = otherwise;
        at = end + 1;
    }
    return 0;
}

static int f_attr(jrun *r, jv v, const jcall *c, jv *out)
{
    jv name = j_none(), own = v;
    j_arg(c, 0, "name", &name);
    if (name.t != J_STR) return j_fail(r, "filter 'attr' takes a name");
    name = j_copy(r, name.s, name.n);
    if (v.t == J_DICT) own = j_dict(r); /* methods only, no keys */
    int rc = j_attr(r, own, name.s, name.n, out);
    if (rc >= 0 && out->t == J_FUNC && !out->fn->macro) out->fn->self = v;
    return rc;
}

int j_join(jrun *r, jv sep, jlist *l, jv *out)
{
    int rc = 0;
    buf b = {0};
    for (size_t i = 0; i < l->n; i++) {
        if (i) TRY(j_print(r, &b, sep));
        TRY(j_print(r, &b, l->v[i]));
        TRY(j_step(r));
        TRY(j_room(r, b.len));
    }
    *out = j_copy(r, b.data, b.len);
out:
    buf_free(&b);
    return rc;
}

/* In autoescape, one safe item makes the result safe and escapes the others. */
static int join_escaped(jrun *r, jv sep, jlist *l, jv *out)
{
    int rc = 0;
    bool safe = sep.t == J_STR && sep.safe;
    for (size_t i = 0; i < l->n; i++)
        safe = safe || (l->v[i].t == J_STR && l->v[i].safe);
    jv all = j_list(r, l->n);
    for (size_t i = 0; i < l->n; i++) {
        jv x = l->v[i];
        if (safe) TRY(j_escape(r, x, &x));
        j_push(r, all.list, x);
    }
    if (safe) TRY(j_escape(r, sep, &sep));
    TRY(j_join(r, sep, all.list, out));
    out->safe = safe;
out:
    return rc;
}

static int f_join(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    jlist *l;
    jv sep = j_strz(""), path = j_none(), parts;
    TRY(j_iter(r, v, &l));
    j_arg(c, 0, "d", &sep);
    j_arg(c, 1, "attribute", &path);
    parts = j_list(r, l->n);
    for (size_t i = 0; i < l->n; i++) {
        jv x;
        TRY(follow(r, l->v[i], path, j_undef(NULL), &x));
        j_push(r, parts.list, x);
    }
    if (r->autoescape) return join_escaped(r, sep, parts.list, out);
    TRY(j_to_str(r, sep, &sep));
    TRY(j_join(r, sep, parts.list, out));
out:
    return rc;
}

/* The call's arguments without the first k. */
static jcall rest_of(const jcall *c, size_t k)
{
    jcall rest = *c;
    if (k > c->n) k = c->n;
    rest.n -= k;
    rest.v = c->v ? c->v + k : NULL;
    return rest;
}

/* map and select take anything false, None too, as empty. */
static int visit_if_true(jrun *r, jv v, jlist **out)
{
    return j_iter(r, j_truth(v) ? v : j_undef(NULL), out);
}

static int map_items(jrun *r, const jlist *l, const jcall *c, jlist *result)
{
    int rc = 0;
    jv path = j_none(), otherwise = j_undef(NULL);
    bool by_attr = c->n == 0 && j_arg(c, 9, "attribute", &path);
    if (by_attr && j_arg(c, 9, "default", &otherwise) && otherwise.t == J_NONE)
        otherwise = j_undef(NULL);
    if (by_attr && c->n_kw != (otherwise.t != J_UNDEF || c->n_kw == 2 ? 2u : 1u))
        return j_fail(r, "filter 'map' takes attribute and default only");
    if (!by_attr && (c->n == 0 || c->v[0].t != J_STR))
        return j_fail(r, "filter 'map' takes a filter's name or attribute=");
    jcall rest = rest_of(c, 1);
    for (size_t i = 0; i < l->n; i++) {
        jv x;
        TRY(j_step(r));
        if (by_attr)
            TRY(follow(r, l->v[i], path, otherwise, &x));
        else
            TRY(j_filter(r, c->v[0].s, c->v[0].n, l->v[i], &rest, &x));
        j_push(r, result, x);
    }
out:
    return rc;
}

static int f_map(jrun *r, jv v, const jcall *c, jv *out)
{
    jlist *l;
    *out = j_list(r, 0);
    int rc = visit_if_true(r, v, &l);
    if (rc >= 0 && j_truth(v)) rc = map_items(r, l, c, out->list);
    return later(r, rc, out);
}

static int sift_items(jrun *r, const jlist *l, const jcall *c, bool by_attr, bool want,
                      jlist *result)
{
    int rc = 0;
    size_t k = by_attr ? 1 : 0;
    if (c->n < k || (c->n > k && c->v[k].t != J_STR))
        return j_fail(r, "select and reject take the name of a test");
    jcall rest = rest_of(c, k + 1);
    for (size_t i = 0; i < l->n; i++) {
        jv x = l->v[i];
        TRY(j_step(r));
        if (by_attr) TRY(follow(r, l->v[i], c->v[0], j_undef(NULL), &x));
        bool holds = j_truth(x);
        if (c->n > k) TRY(j_test(r, c->v[k].s, c->v[k].n, x, &rest, &holds));
        if (holds == want) j_push(r, result, l->v[i]);
    }
out:
    return rc;
}

static int sift(jrun *r, jv v, const jcall *c, bool by_attr, bool want, jv *out)
{
    jlist *l;
    *out = j_list(r, 0);
    int rc = visit_if_true(r, v, &l);
    if (rc >= 0 && j_truth(v)) rc = sift_items(r, l, c, by_attr, want, out->list);
    return later(r, rc, out);
}

static int f_select(jrun *r, jv v, const jcall *c, jv *out)
{
    return sift(r, v, c, false, true, out);
}

static int f_reject(jrun *r, jv v, const jcall *c, jv *out)
{
    return sift(r, v, c, false, false, out);
}

static int f_selectattr(jrun *r, jv v, const jcall *c, jv *out)
{
    return sift(r, v, c, true, true, out);
}

static int f_rejectattr(jrun *r, jv v, const jcall *c, jv *out)
{
    return sift(r, v, c, true, false, out);
}

/* ---- order ---- */

/* Sort keys of the items, strings folded unless case counts. */
static int sort_keys(jrun *r, jlist *l, jv path, bool cased, jv otherwise, jv **out)
{
    int rc = 0;
    jv *keys = j_alloc(r, (l->n + 1) * sizeof(jv));
    for (size_t i = 0; i < l->n; i++) {
        TRY(j_step(r));
        TRY(follow(r, l->v[i], path, otherwise, &keys[i]));
        if (keys[i].t == J_STR && !cased) keys[i] = j_case(r, keys[i], 0);
    }
    *out = keys;
out:
    return rc;
}

/* Stable merge sort of positions by keys; b is room for as many. */
static int merge_sort(jrun *r, const jv *keys, bool down, size_t *a, size_t *b, size_t n)
{
    int rc = 0;
    if (n < 2) return 0;
    size_t half = n / 2, i = 0, k = half, to = 0;
    TRY(merge_sort(r, keys, down, a, b, half));
    TRY(merge_sort(r, keys, down, a + half, b, n - half));
    while (i < half && k < n) {
        bool second;
        if (down)
            TRY(j_less(r, keys[a[i]], keys[a[k]], &second));
        else
            TRY(j_less(r, keys[a[k]], keys[a[i]], &second));
        b[to++] = second ? a[k++] : a[i++];
    }
    while (i < half)
        b[to++] = a[i++];
    memcpy(a, b, to * sizeof(size_t));
out:
    return rc;
}

/* Positions in the order of their keys. */
int j_sort_order(jrun *r, const jv *keys, bool down, size_t n, size_t **out)
{
    size_t *a = j_alloc(r, (n + 1) * 2 * sizeof(size_t));
    for (size_t i = 0; i < n; i++)
        a[i] = i;
    *out = a;
    return merge_sort(r, keys, down, a, a + n + 1, n);
}

static int sorted(jrun *r, jlist *l, const jv *keys, bool down, jv *out)
{
    size_t *a;
    int rc = j_sort_order(r, keys, down, l->n, &a);
    if (rc < 0) return rc;
    *out = j_list(r, l->n);
    for (size_t i = 0; i < l->n; i++)
        j_push(r, out->list, l->v[a[i]]);
    return 0;
}

/* "age,name": each item's key is the list of what its paths lead to; a list also for one path, so
 * that keys that are equal need no order. */
static int many_keys(jrun *r, jlist *l, jv path, bool cased, jv **out)
{
    int rc = 0;
    jv *keys = j_alloc(r, (l->n + 1) * sizeof(jv)), *one;
    for (size_t i = 0; i < l->n; i++)
        keys[i] = j_list(r, 2);
    size_t n = path.t == J_STR ? path.n : 0;
    for (size_t at = 0; at <= n;) {
        const char *comma = n > at ? memchr(path.s + at, ',', n - at) : NULL;
        size_t end = comma ? (size_t)(comma - path.s) : n;
        jv part = path.t == J_STR ? j_str(path.s + at, end - at) : path;
        TRY(sort_keys(r, l, part, cased, j_undef(NULL), &one));
        for (size_t i = 0; i < l->n; i++)
            j_push(r, keys[i].list, one[i]);
        at = end + 1;
    }
    *out = keys;
out:
    return rc;
}

static int f_sort(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    jlist *l;
    jv *keys, path = j_none();
    bool cased = j_flag(c, 1, "case_sensitive", false);
    TRY(j_iter(r, v, &l));
    j_arg(c, 2, "attribute", &path);
    TRY(many_keys(r, l, path, cased, &keys));
    TRY(sorted(r, l, keys, j_flag(c, 0, "reverse", false), out));
out:
    return rc;
}

static int f_dictsort(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    jv pairs, by = j_strz("key"), *keys;
    if (v.t != J_DICT) return j_fail(r, "filter 'dictsort' needs a mapping");
    TRY(f_items(r, v, c, &pairs));
    j_arg(c, 1, "by", &by);
    if (!j_is_str(by, "key") && !j_is_str(by, "value"))
        return j_fail(r, "filter 'dictsort' sorts by 'key' or 'value'");
    TRY(sort_keys(r, pairs.list, j_int(j_is_str(by, "value")),
                  j_flag(c, 0, "case_sensitive", false), j_undef(NULL), &keys));
    TRY(sorted(r, pairs.list, keys, j_flag(c, 2, "reverse", false), out));
out:
    return rc;
}

static int unique_items(jrun *r, const jlist *l, const jv *keys, jlist *result)
{
    jv seen = j_dict(r), ignored;
    for (size_t i = 0; i < l->n; i++) {
        if (!j_hashable(keys[i])) return j_fail(r, "filter 'unique' over %s", j_type_name(keys[i]));
        if (j_dict_get(seen.dict, keys[i], &ignored)) continue;
        j_dict_set(r, seen.dict, keys[i], j_none());
        j_push(r, result, l->v[i]);
    }
    return 0;
}

static int f_unique(jrun *r, jv v, const jcall *c, jv *out)
{
    jlist *l;
    jv *keys, path = j_none();
    *out = j_list(r, 0);
    j_arg(c, 1, "attribute", &path);
    int rc = j_iter(r, v, &l);
    if (rc >= 0)
        rc = sort_keys(r, l, path, j_flag(c, 0, "case_sensitive", false), j_undef(NULL), &keys);
    if (rc >= 0) rc = unique_items(r, l, keys, out->list);
    return later(r, rc, out);
}

static int extreme(jrun *r, jv v, const jcall *c, bool largest, jv *out)
{
    int rc = 0;
    jlist *l;
    jv *keys, path = j_none();
    size_t best = 0;
    TRY(j_iter(r, v, &l));
    j_arg(c, 1, "attribute", &path);
    TRY(sort_keys(r, l, path, j_flag(c, 0, "case_sensitive", false), j_undef(NULL), &keys));
    for (size_t i = 1; i < l->n; i++) {
        bool better;
        TRY(largest ? j_less(r, keys[best], keys[i], &better)
                    : j_less(r, keys[i], keys[best], &better));
        if (better) best = i;
    }
    *out = l->n ? l->v[best] : j_undef("item of an empty sequence");
out:
    return rc;
}

static int f_min(jrun *r, jv v, const jcall *c, jv *out)
{
    return extreme(r, v, c, false, out);
}

static int f_max(jrun *r, jv v, const jcall *c, jv *out)
{
    return extreme(r, v, c, true, out);
}

static int f_sum(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    jlist *l;
    jv path = j_none(), total = j_int(0), x;
    TRY(j_iter(r, v, &l));
    j_arg(c, 0, "attribute", &path);
    j_arg(c, 1, "start", &total);
    for (size_t i = 0; i < l->n; i++) {
        TRY(j_step(r));
        TRY(follow(r, l->v[i], path, j_undef(NULL), &x));
        if (i == 0 && total.t == J_STR) return j_fail(r, "filter 'sum' cannot add strings");
        TRY(j_binary(r, JT_ADD, total, x, &total));
    }
    *out = total;
out:
    return rc;
}

/* Pairs (grouper, list), sorted by key; each is called what its first item has. */
static int f_groupby(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    jlist *l;
    jv *keys, path = j_none(), result = j_list(r, 0), otherwise = j_none(), items = j_list(r, 0);
    size_t *order;
    bool same = false;
    TRY(j_iter(r, v, &l));
    j_arg(c, 0, "attribute", &path);
    j_arg(c, 1, "default", &otherwise);
    if (otherwise.t == J_NONE) otherwise = j_undef(NULL);
    TRY(sort_keys(r, l, path, j_flag(c, 2, "case_sensitive", false), otherwise, &keys));
    TRY(j_sort_order(r, keys, false, l->n, &order));
    for (size_t i = 0; i < l->n; i++) {
        if (i) TRY(j_equal(r, keys[order[i - 1]], keys[order[i]], &same));
        if (!i || !same) {
            jv pair = j_list(r, 2), name;
            TRY(follow(r, l->v[order[i]], path, otherwise, &name));
            pair.t = J_TUPLE;
            pair.list->kind = J_GROUP;
            items = j_list(r, 0);
            j_push(r, pair.list, name);
            j_push(r, pair.list, items);
            j_push(r, result.list, pair);
        }
        j_push(r, items.list, l->v[order[i]]);
    }
    *out = result;
out:
    return rc;
}

static int batch_items(jrun *r, const jlist *l, const jcall *c, jlist *result)
{
    int rc = 0;
    int64_t n = 0;
    jv fill = j_none(), row = j_none();
    j_arg(c, 1, "fill_with", &fill);
    TRY(j_arg_int(r, c, 0, "linecount", &n));
    rc = 0;
    if (fill.t != J_NONE && n > 0)
        TRY(j_room(r, n > (1 << 22) ? SIZE_MAX : (size_t)n * sizeof(jv)));
    for (size_t i = 0; i < l->n; i++) {
        if (row.t == J_NONE || (int64_t)row.list->n == n) {
            if (row.t == J_NONE && n == 0) j_push(r, result, j_list(r, 0));
            row = j_list(r, 0);
            j_push(r, result, row);
        }
        j_push(r, row.list, l->v[i]);
    }
    while (fill.t != J_NONE && row.t != J_NONE && (int64_t)row.list->n < n)
        j_push(r, row.list, fill);
out:
    return rc;
}

static int f_batch(jrun *r, jv v, const jcall *c, jv *out)
{
    jlist *l;
    *out = j_list(r, 0);
    int rc = j_iter(r, v, &l);
    if (rc >= 0) rc = batch_items(r, l, c, out->list);
    return later(r, rc, out);
}

static int slice_items(jrun *r, const jlist *l, const jcall *c, jlist *result)
{
    int64_t n = 0;
    jv fill = j_none();
    int rc = j_arg_int(r, c, 0, "slices", &n);
    if (rc < 0) return rc;
    j_arg(c, 1, "fill_with", &fill);
    if (n == 0) return j_fail(r, "filter 'slice' into no parts");
    if (n < 0) return 0;
    if (n > 100000) return j_limit(r, "filter 'slice': more parts than the limit of 100000");
    size_t per = l->n / (size_t)n, extra = l->n % (size_t)n, at = 0;
    for (size_t i = 0; i < (size_t)n; i++) {
        size_t k = per + (i < extra);
        jv row = j_list(r, k + 1);
        for (size_t m = 0; m < k; m++)
            j_push(r, row.list, l->v[at++]);
        if (fill.t != J_NONE && i >= extra) j_push(r, row.list, fill);
        j_push(r, result, row);
    }
    return 0;
}

static int f_slice(jrun *r, jv v, const jcall *c, jv *out)
{
    jlist *l;
    *out = j_list(r, 0);
    int rc = j_iter(r, v, &l);
    if (rc >= 0) rc = slice_items(r, l, c, out->list);
    return later(r, rc, out);
}

static const j_row filters[] = {{"abs", f_abs, 0, 0, NULL},
                                {"attr", f_attr, 1, 1, "name"},
                                {"batch", f_batch, 1, 2, "linecount,fill_with"},
                                {"count", f_length, 0, 0, NULL},
                                {"d", f_default, 0, 2, "default_value,boolean"},
                                {"default", f_default, 0, 2, "default_value,boolean"},
                                {"dictsort", f_dictsort, 0, 3, "case_sensitive,by,reverse"},
                                {"first", f_first, 0, 0, NULL},
                                {"float", f_float, 0, 1, "default"},
                                {"groupby", f_groupby, 1, 3, "attribute,default,case_sensitive"},
                                {"int", f_int, 0, 2, "default,base"},
                                {"items", f_items, 0, 0, NULL},
                                {"join", f_join, 0, 2, "d,attribute"},
                                {"last", f_last, 0, 0, NULL},
                                {"length", f_length, 0, 0, NULL},
                                {"list", f_list, 0, 0, NULL},
                                {"map", f_map, 0, J_MAX_ARGS, "*"},
                                {"max", f_max, 0, 2, "case_sensitive,attribute"},
                                {"min", f_min, 0, 2, "case_sensitive,attribute"},
                                {"reject", f_reject, 0, J_MAX_ARGS, "*"},
                                {"rejectattr", f_rejectattr, 0, J_MAX_ARGS, "*"},
                                {"reverse", f_reverse, 0, 0, NULL},
                                {"round", f_round, 0, 2, "precision,method"},
                                {"select", f_select, 0, J_MAX_ARGS, "*"},
                                {"selectattr", f_selectattr, 0, J_MAX_ARGS, "*"},
                                {"slice", f_slice, 1, 2, "slices,fill_with"},
                                {"sort", f_sort, 0, 3, "reverse,case_sensitive,attribute"},
                                {"sum", f_sum, 0, 2, "attribute,start"},
                                {"unique", f_unique, 0, 2, "case_sensitive,attribute"},
                                {NULL, NULL, 0, 0, NULL}};

const j_row *j_find_filter(const char *name, size_t n)
{
    const j_row *const tables[] = {filters, j_filters_text};
    for (size_t t = 0; t < 2; t++)
        for (const j_row *row = tables[t]; row->name; row++)
            if (strlen(row->name) == n && !memcmp(row->name, name, n)) return row;
    return NULL;
}
