/* What `x | filter` can be: a registry, one row per filter.
 *
 * A native gets the filtered value as `self`. Where Jinja gives a generator, so do these (J_GEN):
 * it is true even when empty, can be visited once, and has no length. Sorting is stable. tojson is
 * transformers' own: no HTML escapes, key order kept, ASCII escapes only when asked for. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/jinja_internal.h"

static int text_of(jrun *r, jv v, jv *out)
{
    return j_to_str(r, v, out);
}

static bool flag_arg(const jcall *c, size_t pos, const char *name, bool otherwise)
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
    if (!j_is_num(k) && k.t != J_NONE)
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
    if (dict && d->sort && n) {
        order = j_alloc(d->r, n * sizeof(size_t));
        for (size_t i = 0; i < n; i++) {
            size_t at = i;
            bool less = true;
            while (at > 0) {
                TRY(j_less(d->r, v.dict->keys[i], v.dict->keys[order[at - 1]], &less));
                if (!less) break;
                order[at] = order[at - 1];
                at--;
            }
            order[at] = i;
        }
    }
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
    if (depth > J_MAX_NEST) return j_fail(d->r, "values nested too deep for tojson");
    if (d->b->len > J_MAX_BYTES)
        return j_fail(d->r, "tojson makes more than %zu bytes", J_MAX_BYTES);
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
    case J_LIST:
    case J_TUPLE:
    case J_DICT:
        return dump_items(d, v, depth);
    default:
        return j_fail(d->r, "tojson cannot write a value of type %s", j_type_name(v));
    }
}

int j_tojson(jrun *r, jv self, const jcall *c, jv *out)
{
    buf b = {0};
    dump d = {.r = r, .b = &b};
    jv v = j_none();
    d.ascii = flag_arg(c, 0, "ensure_ascii", false);
    d.sort = flag_arg(c, 3, "sort_keys", false);
    j_arg(c, 1, "indent", &v);
    if (v.t == J_INT || v.t == J_BOOL) {
        int64_t n = v.t == J_INT ? v.i : v.b;
        char spaces[64];
        if (n > 64) return j_fail(r, "tojson's indent is larger than 64");
        memset(spaces, ' ', sizeof(spaces));
        d.pretty = true;
        d.indent = j_copy(r, spaces, n < 0 ? 0 : (size_t)n);
    } else if (v.t == J_STR) {
        if (v.n > 64) return j_fail(r, "tojson's indent is longer than 64");
        d.pretty = true;
        d.indent = v;
    }
    d.item_sep = j_strz(d.pretty ? "," : ", ");
    d.key_sep = j_strz(": ");
    v = j_none();
    j_arg(c, 2, "separators", &v);
    if (v.t == J_LIST || v.t == J_TUPLE) {
        if (v.list->n != 2 || v.list->v[0].t != J_STR || v.list->v[1].t != J_STR)
            return j_fail(r, "tojson's separators must be two strings");
        d.item_sep = v.list->v[0];
        d.key_sep = v.list->v[1];
    }
    int rc = dump_value(&d, self, 0);
    if (rc >= 0)
        *out = j_take(r, &b);
    else
        buf_free(&b);
    return rc;
}

/* ---- strings ---- */

static int f_case(jrun *r, jv v, int how, jv *out)
{
    jv s;
    int rc = text_of(r, v, &s);
    if (rc >= 0) *out = j_case(r, s, how);
    return rc;
}

static int f_lower(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    return f_case(r, v, 0, out);
}

static int f_upper(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    return f_case(r, v, 1, out);
}

static int f_capitalize(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    return f_case(r, v, 2, out);
}

static int f_title(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    return f_case(r, v, 4, out);
}

static int f_trim(jrun *r, jv v, const jcall *c, jv *out)
{
    jv s, set = j_none();
    int rc = text_of(r, v, &s);
    if (rc < 0) return rc;
    j_arg(c, 0, "chars", &set);
    *out = j_strip(s, set.t == J_STR ? set.s : NULL, set.t == J_STR ? set.n : 0, true, true);
    return 0;
}

static int f_string(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    return text_of(r, v, out);
}

int j_escape(jrun *r, jv v, jv *out)
{
    jv s;
    buf b = {0};
    int rc = text_of(r, v, &s);
    if (rc < 0) return rc;
    for (size_t i = 0; i < s.n; i++) {
        switch (s.s[i]) {
        case '&':
            buf_puts(&b, "&amp;");
            break;
        case '<':
            buf_puts(&b, "&lt;");
            break;
        case '>':
            buf_puts(&b, "&gt;");
            break;
        case '"':
            buf_puts(&b, "&#34;");
            break;
        case '\'':
            buf_puts(&b, "&#39;");
            break;
        default:
            buf_putc(&b, s.s[i]);
        }
    }
    *out = j_take(r, &b);
    out->safe = true;
    return 0;
}

static int f_escape(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    *out = v;
    return v.t == J_STR && v.safe ? 0 : j_escape(r, v, out);
}

static int f_replace(jrun *r, jv v, const jcall *c, jv *out)
{
    jv s, a, b;
    int rc = 0;
    TRY(text_of(r, v, &s));
    if (!j_arg(c, 0, "old", &a) || !j_arg(c, 1, "new", &b))
        return j_fail(r, "filter 'replace' takes what to replace and the new text");
    TRY(text_of(r, a, &a));
    TRY(text_of(r, b, &b));
    jv args[3] = {a, b, j_none()};
    jcall call = {.n = j_arg(c, 2, "count", &args[2]) && args[2].t != J_NONE ? 3 : 2, .v = args};
    TRY(j_find_method(s, "replace", 7, &(bool){false})->fn(r, s, &call, out));
out:
    return rc;
}

/* Lines after the first get the indent, empty ones only with `blank`. */
static int f_indent(jrun *r, jv v, const jcall *c, jv *out)
{
    jv s, width = j_int(4), pad;
    int rc = 0;
    buf b = {0};
    TRY(text_of(r, v, &s));
    j_arg(c, 0, "width", &width);
    bool first = flag_arg(c, 1, "first", false), blank = flag_arg(c, 2, "blank", false);
    if (width.t == J_STR)
        pad = width;
    else
        TRY(j_binary(r, JT_MUL, j_strz(" "), width, &pad));
    if (pad.n && s.n > J_MAX_BYTES / 2 / (pad.n + 1)) TRY(j_room(r, J_MAX_BYTES));
    if (first) buf_add(&b, pad.s, pad.n);
    for (size_t at = 0, line = 0;; line++) {
        const char *nl = at < s.n ? memchr(s.s + at, '\n', s.n - at) : NULL;
        size_t end = nl ? (size_t)(nl - s.s) : s.n;
        if (line && (blank || end > at)) buf_add(&b, pad.s, pad.n);
        buf_add(&b, s.s + at, end - at);
        if (!nl) break;
        buf_putc(&b, '\n');
        at = end + 1;
    }
    *out = j_copy(r, b.data, b.len);
out:
    buf_free(&b);
    return rc;
}

static int f_wordcount(jrun *r, jv v, const jcall *c, jv *out)
{
    jv s;
    int64_t n = 0;
    bool in_word = false;
    int rc = text_of(r, v, &s);
    (void)c;
    if (rc < 0) return rc;
    for (size_t i = 0; i < s.n; i++) {
        bool w = (uint8_t)s.s[i] >= 0x80 || s.s[i] == '_' || (s.s[i] >= '0' && s.s[i] <= '9') ||
                 ((s.s[i] | 32) >= 'a' && (s.s[i] | 32) <= 'z');
        n += w && !in_word;
        in_word = w;
    }
    *out = j_int(n);
    return 0;
}

static int f_center(jrun *r, jv v, const jcall *c, jv *out)
{
    jv s;
    int64_t width = 80;
    int rc = 0;
    TRY(text_of(r, v, &s));
    TRY(j_arg_int(r, c, 0, "width", &width));
    jv args[1] = {j_int(width)};
    jcall call = {.n = 1, .v = args};
    TRY(j_find_method(s, "center", 6, &(bool){false})->fn(r, s, &call, out));
out:
    return rc;
}

static int f_urlencode(jrun *r, jv v, const jcall *c, jv *out)
{
    jv s;
    buf b = {0};
    int rc = text_of(r, v, &s);
    (void)c;
    if (rc < 0) return rc;
    for (size_t i = 0; i < s.n; i++) {
        char ch = s.s[i];
        if ((ch >= '0' && ch <= '9') || ((ch | 32) >= 'a' && (ch | 32) <= 'z') ||
            (ch && strchr("_.-~/", ch)))
            buf_putc(&b, ch);
        else
            buf_printf(&b, "%%%02X", (uint8_t)ch);
    }
    *out = j_take(r, &b);
    return 0;
}

/* One conversion of a printf-style format: "%5.2f" with its argument. */
static int format_one(jrun *r, buf *b, const char *spec, char kind, jv v)
{
    jv s;
    int rc = 0;
    buf text = {0};
    char wide[24];
    size_t n = strlen(spec);
    if (n > 12) return j_fail(r, "a format that is too long");
    if (kind == 's' || kind == 'r') {
        if (kind == 's')
            rc = j_print(r, &text, v);
        else
            rc = j_repr(r, &text, v, 0);
        s = rc < 0 ? j_none() : j_take(r, &text);
        if (rc < 0) {
            buf_free(&text);
            return rc;
        }
        long width = strtol(spec[0] == '-' ? spec + 1 : spec, NULL, 10);
        long pad = width - (long)j_chars(s);
        for (long i = 0; spec[0] != '-' && i < pad && i < 10000; i++)
            buf_putc(b, ' ');
        buf_add(b, s.s, s.n);
        for (long i = 0; spec[0] == '-' && i < pad && i < 10000; i++)
            buf_putc(b, ' ');
        return 0;
    }
    if (!j_is_num(v)) return j_fail(r, "'%%%c' needs a number, found %s", kind, j_type_name(v));
    for (const char *p = spec; *p; p++)
        if (strtol(p, NULL, 10) > 1000) return j_fail(r, "a format that is too wide");
    double f = v.t == J_FLOAT ? v.f : v.t == J_BOOL ? (double)v.b : (double)v.i;
    bool whole = kind == 'd' || kind == 'i' || kind == 'x' || kind == 'X' || kind == 'o';
    if (whole && v.t == J_FLOAT && !(fabs(f) < 9e18)) return j_fail(r, "a number beyond 64 bits");
    wide[0] = '%';
    memcpy(wide + 1, spec, n);
    memcpy(wide + 1 + n, whole ? "ll" : "", whole ? 2 : 0);
    wide[1 + n + (whole ? 2 : 0)] = kind;
    wide[2 + n + (whole ? 2 : 0)] = 0;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    if (whole)
        buf_printf(b, wide,
                   v.t == J_FLOAT  ? (long long)f
                   : v.t == J_BOOL ? (long long)v.b
                                   : (long long)v.i);
    else
        buf_printf(b, wide, f);
#pragma GCC diagnostic pop
    return 0;
}

/* "..." % args and the filter format. */
static int f_format(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    size_t next = 0;
    buf b = {0};
    jv s;
    const jv *args = c->v;
    size_t n_args = c->n;
    TRY(text_of(r, v, &s));
    if (n_args == 1 && args[0].t == J_TUPLE) {
        n_args = args[0].list->n;
        args = args[0].list->v;
    }
    for (size_t i = 0; i < s.n; i++) {
        char spec[16] = {0};
        size_t k = 0;
        jv arg;
        if (s.s[i] != '%') {
            buf_putc(&b, s.s[i]);
            continue;
        }
        if (++i < s.n && s.s[i] == '%') {
            buf_putc(&b, '%');
            continue;
        }
        bool named = i < s.n && s.s[i] == '(';
        if (named) {
            const char *end = memchr(s.s + i, ')', s.n - i);
            jv box = c->n && c->v[0].t == J_DICT ? c->v[0] : j_none();
            if (!end || box.t != J_DICT ||
                !j_dict_gets(box.dict, s.s + i + 1, (size_t)(end - s.s) - i - 1, &arg))
                TRY(j_fail(r, "a format's name has no value"));
            i = (size_t)(end - s.s) + 1;
        }
        while (i < s.n && k < 12 && s.s[i] && strchr("-+ 0123456789.", s.s[i]))
            spec[k++] = s.s[i++];
        char kind = i < s.n ? s.s[i] : 0;
        if (!kind || !strchr("srdixXofFeEgG", kind))
            TRY(j_fail(r, "a format that is not supported"));
        if (!named) {
            if (next >= n_args) TRY(j_fail(r, "a format with too few values"));
            arg = args[next++];
        }
        TRY(format_one(r, &b, spec, kind, arg));
    }
    *out = j_copy(r, b.data, b.len);
out:
    buf_free(&b);
    return rc;
}

/* ---- numbers ---- */

static int f_int(jrun *r, jv v, const jcall *c, jv *out)
{
    jv otherwise = j_int(0), s;
    int64_t base = 10;
    int rc = j_arg_int(r, c, 1, "base", &base);
    if (rc < 0) return rc;
    j_arg(c, 0, "default", &otherwise);
    *out = otherwise;
    if (v.t == J_INT || v.t == J_BOOL) {
        *out = j_int(v.t == J_INT ? v.i : v.b);
    } else if (v.t == J_FLOAT && fabs(v.f) < 9.2e18) {
        *out = j_int((int64_t)v.f);
    } else if (v.t == J_STR && v.n && v.n < 400 && base >= 2 && base <= 36) {
        char *end;
        s = j_strip(v, NULL, 0, true, true);
        s = j_copy(r, s.s, s.n);
        long long i = strtoll(s.s, &end, (int)base);
        if (s.n && !*end)
            *out = j_int(i);
        else if (s.n) {
            double f = strtod(s.s, &end);
            if (!*end && fabs(f) < 9.2e18) *out = j_int((int64_t)f);
        }
    }
    return 0;
}

static int f_float(jrun *r, jv v, const jcall *c, jv *out)
{
    jv otherwise = j_float(0), s;
    j_arg(c, 0, "default", &otherwise);
    *out = otherwise;
    if (v.t == J_FLOAT) {
        *out = v;
    } else if (v.t == J_INT || v.t == J_BOOL) {
        *out = j_float(v.t == J_INT ? (double)v.i : (double)v.b);
    } else if (v.t == J_STR && v.n && v.n < 400) {
        char *end;
        s = j_strip(v, NULL, 0, true, true);
        s = j_copy(r, s.s, s.n);
        double f = strtod(s.s, &end);
        if (s.n && !*end) *out = j_float(f);
    }
    return 0;
}

static int f_abs(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    if (!j_is_num(v)) return j_fail(r, "filter 'abs' needs a number, found %s", j_type_name(v));
    if (v.t == J_INT && v.i == INT64_MIN) return j_fail(r, "an integer larger than 64 bits");
    *out = v.t == J_FLOAT ? j_float(fabs(v.f)) : j_int(v.t == J_BOOL ? v.b : v.i < 0 ? -v.i : v.i);
    return 0;
}

static int f_round(jrun *r, jv v, const jcall *c, jv *out)
{
    int64_t places = 0;
    jv method = j_strz("common");
    int rc = j_arg_int(r, c, 0, "precision", &places);
    if (rc < 0) return rc;
    j_arg(c, 1, "method", &method);
    if (!j_is_num(v)) return j_fail(r, "filter 'round' needs a number, found %s", j_type_name(v));
    if (places > 300 || places < -300) return j_fail(r, "filter 'round': too many places");
    double f = v.t == J_FLOAT ? v.f : v.t == J_BOOL ? (double)v.b : (double)v.i;
    double scale = pow(10, (double)places);
    if (j_is_str(method, "ceil")) {
        *out = j_float(ceil(f * scale) / scale);
    } else if (j_is_str(method, "floor")) {
        *out = j_float(floor(f * scale) / scale);
    } else if (v.t != J_FLOAT && places >= 0) {
        *out = v.t == J_BOOL ? j_int(v.b) : v;
    } else if (places >= 0 && places < 40) { /* printf rounds the exact value, half to even */
        buf b = {0};
        buf_printf(&b, "%.*f", (int)places, f);
        *out = j_float(strtod(b.data, NULL));
        buf_free(&b);
    } else {
        *out = j_float(nearbyint(f * scale) / scale);
    }
    return 0;
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
    bool by_truth = flag_arg(c, 1, "boolean", false);
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
    int rc = j_iter(r, v, &l);
    (void)c;
    if (rc >= 0) *out = l->n ? l->v[0] : j_undef("first item");
    return rc;
}

static int f_last(jrun *r, jv v, const jcall *c, jv *out)
{
    jlist *l;
    if (v.t == J_GEN) return j_fail(r, "a generator has no last item");
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
        return 0;
    }
    *out = j_list(r, l->n);
    for (size_t i = l->n; i-- > 0;)
        j_push(r, out->list, l->v[i]);
    out->t = J_GEN;
    return 0;
}

static int f_items(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    if (v.t != J_DICT && v.t != J_UNDEF)
        return j_fail(r, "filter 'items' needs a mapping, found %s", j_type_name(v));
    *out = j_list(r, 0);
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
    if (path.t != J_STR) return j_item(r, x, path, out);
    for (size_t at = 0; at <= path.n;) {
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
    if (c->n != 1 || c->v[0].t != J_STR) return j_fail(r, "filter 'attr' takes a name");
    jv name = j_copy(r, c->v[0].s, c->v[0].n);
    bool ns = v.t == J_NS;
    *out = j_undef(name.s);
    return ns ? j_attr(r, v, name.s, name.n, out) : 0;
}

static int f_join(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    jlist *l;
    jv sep = j_strz(""), path = j_none();
    buf b = {0};
    TRY(j_iter(r, v, &l));
    j_arg(c, 0, "d", &sep);
    j_arg(c, 1, "attribute", &path);
    TRY(text_of(r, sep, &sep));
    for (size_t i = 0; i < l->n; i++) {
        jv x;
        if (i) TRY(j_print(r, &b, sep));
        TRY(follow(r, l->v[i], path, j_undef(NULL), &x));
        TRY(j_print(r, &b, x));
    }
    *out = j_copy(r, b.data, b.len);
out:
    buf_free(&b);
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

static int f_map(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    jlist *l;
    jv path = j_none(), otherwise = j_undef(NULL), result;
    TRY(visit_if_true(r, v, &l));
    result = j_list(r, l->n);
    bool by_attr = c->n == 0 && j_arg(c, 9, "attribute", &path);
    j_arg(c, 9, "default", &otherwise);
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
        j_push(r, result.list, x);
    }
    result.t = J_GEN;
    *out = result;
out:
    return rc;
}

static int sift(jrun *r, jv v, const jcall *c, bool by_attr, bool want, jv *out)
{
    int rc = 0;
    jlist *l;
    size_t k = by_attr ? 1 : 0;
    TRY(visit_if_true(r, v, &l));
    jv result = j_list(r, 0);
    if (c->n < k || (c->n > k && c->v[k].t != J_STR))
        return j_fail(r, "select and reject take the name of a test");
    jcall rest = rest_of(c, k + 1);
    for (size_t i = 0; i < l->n; i++) {
        jv x = l->v[i];
        TRY(j_step(r));
        if (by_attr) TRY(follow(r, l->v[i], c->v[0], j_undef(NULL), &x));
        bool holds = j_truth(x);
        if (c->n > k) TRY(j_test(r, c->v[k].s, c->v[k].n, x, &rest, &holds));
        if (holds == want) j_push(r, result.list, l->v[i]);
    }
    result.t = J_GEN;
    *out = result;
out:
    return rc;
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
static int sort_keys(jrun *r, jlist *l, jv path, bool cased, jv **out)
{
    int rc = 0;
    jv *keys = j_alloc(r, (l->n + 1) * sizeof(jv));
    for (size_t i = 0; i < l->n; i++) {
        TRY(j_step(r));
        TRY(follow(r, l->v[i], path, j_undef(NULL), &keys[i]));
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

static int sorted(jrun *r, jlist *l, const jv *keys, bool down, jv *out)
{
    size_t *a = j_alloc(r, (l->n + 1) * 2 * sizeof(size_t));
    for (size_t i = 0; i < l->n; i++)
        a[i] = i;
    int rc = merge_sort(r, keys, down, a, a + l->n + 1, l->n);
    if (rc < 0) return rc;
    *out = j_list(r, l->n);
    for (size_t i = 0; i < l->n; i++)
        j_push(r, out->list, l->v[a[i]]);
    return 0;
}

static int f_sort(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    jlist *l;
    jv *keys, path = j_none();
    TRY(j_iter(r, v, &l));
    j_arg(c, 2, "attribute", &path);
    TRY(sort_keys(r, l, path, flag_arg(c, 1, "case_sensitive", false), &keys));
    TRY(sorted(r, l, keys, flag_arg(c, 0, "reverse", false), out));
out:
    return rc;
}

static int f_dictsort(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    jv pairs, by = j_strz("key"), *keys;
    TRY(f_items(r, v, c, &pairs));
    j_arg(c, 1, "by", &by);
    TRY(sort_keys(r, pairs.list, j_int(j_is_str(by, "value")),
                  flag_arg(c, 0, "case_sensitive", false), &keys));
    TRY(sorted(r, pairs.list, keys, flag_arg(c, 2, "reverse", false), out));
out:
    return rc;
}

static int f_unique(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    jlist *l;
    jv *keys, path = j_none(), seen = j_dict(r), ignored, result;
    TRY(j_iter(r, v, &l));
    j_arg(c, 1, "attribute", &path);
    TRY(sort_keys(r, l, path, flag_arg(c, 0, "case_sensitive", false), &keys));
    result = j_list(r, 0);
    for (size_t i = 0; i < l->n; i++) {
        if (!j_hashable(keys[i])) return j_fail(r, "filter 'unique' over %s", j_type_name(keys[i]));
        if (j_dict_get(seen.dict, keys[i], &ignored)) continue;
        j_dict_set(r, seen.dict, keys[i], j_none());
        j_push(r, result.list, l->v[i]);
    }
    result.t = J_GEN;
    *out = result;
out:
    return rc;
}

static int extreme(jrun *r, jv v, const jcall *c, bool largest, jv *out)
{
    int rc = 0;
    jlist *l;
    jv *keys, path = j_none();
    size_t best = 0;
    TRY(j_iter(r, v, &l));
    j_arg(c, 1, "attribute", &path);
    TRY(sort_keys(r, l, path, flag_arg(c, 0, "case_sensitive", false), &keys));
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
        if (total.t == J_STR) return j_fail(r, "filter 'sum' cannot add strings");
        TRY(j_binary(r, JT_ADD, total, x, &total));
    }
    *out = total;
out:
    return rc;
}

/* Pairs (key, items), sorted by key. */
static int f_groupby(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    jlist *l;
    jv *keys, path = j_none(), all, result = j_list(r, 0), otherwise = j_undef(NULL);
    TRY(j_iter(r, v, &l));
    if (!j_arg(c, 0, "attribute", &path)) return j_fail(r, "filter 'groupby' takes an attribute");
    j_arg(c, 1, "default", &otherwise);
    TRY(sort_keys(r, l, path, true, &keys));
    TRY(sorted(r, l, keys, false, &all));
    jv last = j_undef(NULL), items = j_list(r, 0);
    for (size_t i = 0; i < all.list->n; i++) {
        jv key;
        bool same = false;
        TRY(follow(r, all.list->v[i], path, otherwise, &key));
        if (i) TRY(j_equal(r, last, key, &same));
        if (!same) {
            jv pair = j_list(r, 2);
            pair.t = J_TUPLE;
            items = j_list(r, 0);
            j_push(r, pair.list, key);
            j_push(r, pair.list, items);
            j_push(r, result.list, pair);
        }
        j_push(r, items.list, all.list->v[i]);
        last = key;
    }
    *out = result;
out:
    return rc;
}

static int f_batch(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    jlist *l;
    int64_t n = 1;
    jv fill = j_none(), result = j_list(r, 0), row = j_none();
    TRY(j_iter(r, v, &l));
    TRY(j_arg_int(r, c, 0, "linecount", &n));
    j_arg(c, 1, "fill_with", &fill);
    if (n < 1) return j_fail(r, "filter 'batch' needs a positive number");
    if (fill.t != J_NONE) TRY(j_room(r, n > (1 << 22) ? SIZE_MAX : (size_t)n * sizeof(jv)));
    for (size_t i = 0; i < l->n; i++) {
        if (row.t == J_NONE || row.list->n == (size_t)n) {
            row = j_list(r, 0);
            j_push(r, result.list, row);
        }
        j_push(r, row.list, l->v[i]);
    }
    while (fill.t != J_NONE && row.t != J_NONE && row.list->n < (size_t)n)
        j_push(r, row.list, fill);
    result.t = J_GEN;
    *out = result;
out:
    return rc < 0 ? rc : 0;
}

static int f_slice(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    jlist *l;
    int64_t n = 1;
    jv fill = j_none(), result = j_list(r, 0);
    TRY(j_iter(r, v, &l));
    TRY(j_arg_int(r, c, 0, "slices", &n));
    j_arg(c, 1, "fill_with", &fill);
    if (n < 1 || n > 100000) return j_fail(r, "filter 'slice' needs a positive number");
    size_t per = l->n / (size_t)n, extra = l->n % (size_t)n, at = 0;
    for (size_t i = 0; i < (size_t)n; i++) {
        size_t k = per + (i < extra);
        jv row = j_list(r, k + 1);
        for (size_t m = 0; m < k; m++)
            j_push(r, row.list, l->v[at++]);
        if (fill.t != J_NONE && i >= extra) j_push(r, row.list, fill);
        j_push(r, result.list, row);
    }
    result.t = J_GEN;
    *out = result;
out:
    return rc < 0 ? rc : 0;
}

static int f_safe(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = text_of(r, v, out);
    (void)c;
    if (rc >= 0) out->safe = true;
    return rc;
}

static const j_row filters[] = {
    {"abs", f_abs, 0, 0},
    {"attr", f_attr, 1, 1},
    {"batch", f_batch, 1, 2},
    {"capitalize", f_capitalize, 0, 0},
    {"center", f_center, 0, 1},
    {"count", f_length, 0, 0},
    {"d", f_default, 0, 2},
    {"default", f_default, 0, 2},
    {"dictsort", f_dictsort, 0, 3},
    {"e", f_escape, 0, 0},
    {"escape", f_escape, 0, 0},
    {"first", f_first, 0, 0},
    {"float", f_float, 0, 1},
    {"forceescape", f_escape, 0, 0},
    {"format", f_format, 0, J_MAX_ARGS},
    {"groupby", f_groupby, 1, 3},
    {"indent", f_indent, 0, 3},
    {"int", f_int, 0, 2},
    {"items", f_items, 0, 0},
    {"join", f_join, 0, 2},
    {"last", f_last, 0, 0},
    {"length", f_length, 0, 0},
    {"list", f_list, 0, 0},
    {"lower", f_lower, 0, 0},
    {"map", f_map, 0, J_MAX_ARGS},
    {"max", f_max, 0, 2},
    {"min", f_min, 0, 2},
    {"reject", f_reject, 0, J_MAX_ARGS},
    {"rejectattr", f_rejectattr, 1, J_MAX_ARGS},
    {"replace", f_replace, 2, 3},
    {"reverse", f_reverse, 0, 0},
    {"round", f_round, 0, 2},
    {"safe", f_safe, 0, 0},
    {"select", f_select, 0, J_MAX_ARGS},
    {"selectattr", f_selectattr, 1, J_MAX_ARGS},
    {"slice", f_slice, 1, 2},
    {"sort", f_sort, 0, 3},
    {"string", f_string, 0, 0},
    {"sum", f_sum, 0, 2},
    {"title", f_title, 0, 0},
    {"tojson", j_tojson, 0, 4},
    {"trim", f_trim, 0, 1},
    {"unique", f_unique, 0, 2},
    {"upper", f_upper, 0, 0},
    {"urlencode", f_urlencode, 0, 0},
    {"wordcount", f_wordcount, 0, 0},
};

const j_row *j_find_filter(const char *name, size_t n)
{
    for (size_t i = 0; i < sizeof(filters) / sizeof(filters[0]); i++)
        if (strlen(filters[i].name) == n && !memcmp(filters[i].name, name, n)) return &filters[i];
    return NULL;
}
