/* Python's three ways to format: "..." % values, "...".format(values) with its replacement fields,
 * and the small language of format(value, spec).
 *
 *   %[(key)][flags][width][.precision]type      flags "-+ #0", width and precision may be "*"
 *   {field[!conversion][:spec]}                 field: number or name, then .attr and [item]
 *   [[fill]align][sign][z][#][0][width][,_][.precision][type]
 *
 * Attributes in fields are looked up as the template's own are (the sandbox's rule). Digits come
 * from printf, which rounds exact values to even as Python does. Widths and precisions beyond
 * FORMAT_MAX are refused, by the name of that limit; integers beyond 64 bits are written in decimal
 * only. */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/jinja_internal.h"

#define FORMAT_MAX 100000 /* characters of a width or precision */

static int too_wide(jrun *r)
{
    return j_limit(r, "a width or precision above the limit of %d", FORMAT_MAX);
}

static void fill(buf *b, const char *s, size_t n, int64_t times)
{
    for (int64_t i = 0; i < times; i++)
        buf_add(b, s, n);
}

/* ---- numbers to digits ---- */

static int64_t whole(jv v)
{
    return v.t == J_BOOL ? v.b : v.i;
}

/* |v| in base 2, 8, 10 or 16, without sign. */
static int int_digits(jrun *r, buf *b, jv v, unsigned base)
{
    char s[68];
    size_t at = sizeof s;
    if (v.t == J_BIG) {
        if (base != 10) return j_limit(r, "integers beyond 64 bits are written in decimal only");
        buf_add(b, v.s + (v.s[0] == '-'), v.n - (v.s[0] == '-'));
        return 0;
    }
    int64_t i = whole(v);
    uint64_t u = i < 0 ? 0 - (uint64_t)i : (uint64_t)i;
    do {
        s[--at] = "0123456789abcdef"[u % base];
        u /= base;
    } while (u);
    buf_add(b, s + at, sizeof s - at);
    return 0;
}

static bool negative(jv v)
{
    return v.t == J_BIG ? v.s[0] == '-' : whole(v) < 0;
}

/* Exponents have two digits at least in both languages, so printf's form is Python's. */
static void c_float(buf *b, char type, bool alt, int prec, double f)
{
    char fmt[16];
    snprintf(fmt, sizeof fmt, alt ? "%%#.%d%c" : "%%.%d%c", prec, type);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    buf_printf(b, fmt, f);
#pragma GCC diagnostic pop
}

/* A precision without a type: like g, but with at least one digit behind the point. */
static void dotted_general(buf *b, bool alt, int prec, double f)
{
    char s[64];
    if (prec == 0) prec = 1;
    snprintf(s, sizeof s, "%.*e", prec > 40 ? 40 : prec - 1, f);
    int point = (int)strtol(strchr(s, 'e') + 1, NULL, 10) + 1;
    size_t from = b->len;
    if (point > -4 && point <= prec - 1) {
        c_float(b, 'g', alt, prec, f);
        if (!memchr(b->data + from, '.', b->len - from)) buf_puts(b, ".0");
        return;
    }
    buf whole_text = {0};
    c_float(&whole_text, 'e', alt, prec - 1, f);
    char *e = strchr(whole_text.data, 'e');
    size_t n = (size_t)(e - whole_text.data);
    if (!alt && memchr(whole_text.data, '.', n)) {
        while (whole_text.data[n - 1] == '0')
            n--;
        if (whole_text.data[n - 1] == '.') n--;
    }
    buf_add(b, whole_text.data, n);
    buf_puts(b, e);
    buf_free(&whole_text);
}

/* |f| by type (0 = none given), without sign; prec < 0 = none given. */
static void float_digits(buf *b, double f, char type, bool alt, int prec)
{
    char low = (char)tolower(type);
    f = fabs(f);
    if (!isfinite(f)) {
        bool upper = type && isupper((unsigned char)type);
        buf_puts(b, isnan(f) ? (upper ? "NAN" : "nan") : upper ? "INF" : "inf");
        return;
    }
    if (!type && prec < 0)
        j_print_float(b, f);
    else if (!type)
        dotted_general(b, alt, prec, f);
    else
        c_float(b, low == 'n' ? 'g' : type, alt, prec < 0 ? 6 : prec, f);
}

/* ---- format(value, spec) ---- */

typedef struct spec {
    char fill[4];
    size_t fill_n;
    char align, sign, group, type; /* 0 = not given */
    bool z, alt;
    int64_t width, prec; /* -1 = not given */
} spec;

static bool is_align(const char *p, const char *end)
{
    return p < end && *p && strchr("<>=^", *p);
}

static int take_number(jrun *r, const char **p, const char *end, int64_t *out)
{
    *out = 0;
    for (; *p < end && **p >= '0' && **p <= '9'; (*p)++) {
        *out = *out * 10 + (**p - '0');
        if (*out > FORMAT_MAX) return too_wide(r);
    }
    j_slow(r, (size_t)*out);
    return 0;
}

static int parse_spec(jrun *r, jv text, char default_align, spec *x)
{
    const char *p = text.s, *end = text.s + text.n;
    uint32_t cp;
    int rc = 0, first = text.n ? utf8_decode(p, text.n, &cp) : 0;
    *x = (spec){.fill = " ", .fill_n = 1, .width = -1, .prec = -1};
    bool filled = first > 0 && is_align(p + first, end);
    if (filled) {
        memcpy(x->fill, p, (size_t)first);
        x->fill_n = (size_t)first;
        p += first;
    }
    if (is_align(p, end)) x->align = *p++;
    if (p < end && *p && strchr("+- ", *p)) x->sign = *p++;
    if (p < end && *p == 'z') x->z = *p++;
    if (p < end && *p == '#') x->alt = *p++;
    if (!filled && p < end && *p == '0') {
        p++;
        x->fill[0] = '0';
        if (!x->align && default_align == '>') x->align = '=';
    }
    if (p < end && *p >= '0' && *p <= '9') TRY(take_number(r, &p, end, &x->width));
    if (p < end && (*p == ',' || *p == '_')) x->group = *p++;
    if (p < end && (*p == ',' || *p == '_')) return j_fail(r, "a format with two separators");
    if (p < end && *p == '.') {
        p++;
        if (p == end || *p < '0' || *p > '9') return j_fail(r, "a format without its precision");
        TRY(take_number(r, &p, end, &x->prec));
    }
    if (p < end) x->type = *p++;
    if (p < end) return j_fail(r, "an invalid format '%.*s'", (int)text.n, text.s);
    if (!x->align) x->align = default_align;
out:
    return rc;
}

/* Digits in groups; zeros are put before them until `min` characters are there. */
static void group_digits(buf *b, const char *s, size_t n, char sep, int size, int64_t min)
{
    buf back = {0};
    int64_t used = 0;
    for (int in = 0; used < (int64_t)n || (int64_t)back.len < min; in++) {
        if (sep && in == size) {
            buf_putc(&back, sep);
            in = 0;
        }
        buf_putc(&back, used < (int64_t)n ? s[(int64_t)n - 1 - used] : '0');
        used++;
    }
    for (size_t i = back.len; i-- > 0;)
        buf_putc(b, back.data[i]);
    buf_free(&back);
}

/* Sign, prefix, digits in groups, what follows the digits; padded. */
static void put_number(buf *b, const spec *x, bool minus, const char *prefix, jv text)
{
    size_t n = 0;
    buf num = {0};
    const char *sign = minus ? "-" : x->sign == '+' ? "+" : x->sign == ' ' ? " " : "";
    while (n < text.n && isxdigit((unsigned char)text.s[n]) &&
           !(x->group == ',' && text.s[n] > '9') && !(text.s[n] == 'e' && !prefix))
        n++;
    if (text.n && (text.s[0] == 'i' || text.s[0] == 'n')) n = 0;
    int64_t others = (int64_t)(strlen(sign) + (prefix ? strlen(prefix) : 0) + text.n - n);
    bool zeros = x->fill[0] == '0' && x->align == '=';
    int size = prefix && (x->type == 'b' || x->type == 'o' || (x->type | 32) == 'x') ? 4 : 3;
    if (n) group_digits(&num, text.s, n, x->group, size, zeros ? x->width - others : 0);
    buf_add(&num, text.s + n, text.n - n);
    int64_t used = others + (int64_t)(num.len - (text.n - n));
    int64_t pad = x->width > used ? x->width - used : 0;
    int64_t left = x->align == '>' ? pad : x->align == '^' ? pad / 2 : 0;
    fill(b, x->fill, x->fill_n, left);
    buf_puts(b, sign);
    if (prefix) buf_puts(b, prefix);
    if (x->align == '=') fill(b, x->fill, x->fill_n, pad);
    if (num.len) buf_add(b, num.data, num.len);
    if (x->align != '=') fill(b, x->fill, x->fill_n, pad - left);
    buf_free(&num);
}

static void put_text(buf *b, const spec *x, jv s)
{
    int64_t n = (int64_t)j_chars(s), pad = x->width > n ? x->width - n : 0;
    int64_t left = x->align == '>' ? pad : x->align == '^' ? pad / 2 : 0;
    fill(b, x->fill, x->fill_n, left);
    buf_add(b, s.s, s.n);
    fill(b, x->fill, x->fill_n, pad - left);
}

static int format_str(jrun *r, buf *b, jv v, jv text)
{
    spec x;
    int rc = parse_spec(r, text, '<', &x);
    if (rc < 0) return rc;
    if (x.sign || x.z || x.alt || x.group || x.align == '=' || (x.type && x.type != 's'))
        return j_fail(r, "the format '%.*s' is not one for strings", (int)text.n, text.s);
    if (x.prec >= 0) v.n = j_char_at(v, (size_t)x.prec);
    put_text(b, &x, v);
    return 0;
}

static int code_point(jrun *r, jv v, char out[4], size_t *n)
{
    if (v.t == J_BIG || whole(v) < 0 || whole(v) > 0x10ffff)
        return j_fail(r, "a number that is no character");
    if (whole(v) >= 0xd800 && whole(v) < 0xe000) return j_fail(r, "a surrogate is no character");
    *n = (size_t)utf8_encode((uint32_t)whole(v), out);
    return 0;
}

static int format_float(jrun *r, buf *b, double f, const spec *x)
{
    if (x->type && !strchr("eEfFgGn%", x->type))
        return j_fail(r, "the format type '%c' is not one for numbers", x->type);
    if (x->group && x->type == 'n') return j_fail(r, "a format with ',' and 'n'");
    buf text = {0};
    bool percent = x->type == '%';
    if (percent) f *= 100;
    float_digits(&text, f, percent ? 'f' : x->type, x->alt, (int)x->prec);
    if (percent) buf_putc(&text, '%');
    bool minus = signbit(f) && !isnan(f);
    if (x->z && minus) { /* a negative number that rounds to nothing loses its sign */
        size_t k = strspn(text.data, "0.");
        minus = text.data[k] && text.data[k] != 'e' && text.data[k] != '%';
    }
    put_number(b, x, minus, NULL, j_str(text.data, text.len));
    buf_free(&text);
    return 0;
}

static int format_int(jrun *r, buf *b, jv v, const spec *x)
{
    char type = x->type ? x->type : 'd', enc[4];
    size_t n = 0;
    if (x->type && strchr("eEfFgG%", x->type)) {
        if (v.t == J_BIG) return j_limit(r, "integers beyond 64 bits are written in decimal only");
        return format_float(r, b, (double)whole(v), x);
    }
    if (!strchr("bcdnoxX", type))
        return j_fail(r, "the format type '%c' is not one for integers", type);
    if (x->prec >= 0 || x->z) return j_fail(r, "a precision is not for integers");
    if (x->group == ',' && type != 'd') return j_fail(r, "a format with ',' and '%c'", type);
    if (x->group && (type == 'c' || type == 'n'))
        return j_fail(r, "a format with '_' and '%c'", type);
    if (type == 'c') {
        if (x->sign || x->alt) return j_fail(r, "a sign is not for the format type 'c'");
        int rc = code_point(r, v, enc, &n);
        if (rc >= 0) put_text(b, x, j_str(enc, n));
        return rc;
    }
    unsigned base = type == 'b' ? 2 : type == 'o' ? 8 : (type | 32) == 'x' ? 16 : 10;
    buf text = {0};
    int rc = int_digits(r, &text, v, base);
    for (size_t i = 0; rc >= 0 && type == 'X' && i < text.len; i++)
        text.data[i] = (char)toupper((unsigned char)text.data[i]);
    char prefix[3] = {'0', type, 0};
    if (rc >= 0)
        put_number(b, x, negative(v), x->alt && base != 10 ? prefix : "",
                   j_str(text.data, text.len));
    buf_free(&text);
    return rc;
}

int j_format_value(jrun *r, buf *b, jv v, jv text)
{
    spec x;
    int rc;
    if (text.n == 0) return j_print(r, b, v);
    if (v.t == J_STR) return format_str(r, b, v, text);
    if (!j_is_num(v) && v.t != J_BIG)
        return j_fail(r, "a value of type %s takes no format", j_type_name(v));
    if ((rc = parse_spec(r, text, '>', &x)) < 0) return rc;
    return v.t == J_FLOAT ? format_float(r, b, v.f, &x) : format_int(r, b, v, &x);
}

/* ---- "...".format(...) ---- */

typedef struct fields {
    jrun *r;
    const jcall *c;
    jv mapping;    /* of format_map: J_DICT; else J_NONE */
    int64_t next;  /* number of the next {} */
    bool numbered; /* {0} was seen: {} may not follow */
} fields;

static bool digits_to(jv s, int64_t *out)
{
    *out = 0;
    for (size_t i = 0; i < s.n; i++) {
        if (s.s[i] < '0' || s.s[i] > '9' || i > 9) return false;
        *out = *out * 10 + (s.s[i] - '0');
    }
    return s.n > 0;
}

static int first_value(fields *x, jv name, jv *out)
{
    int64_t i;
    const jcall *c = x->c;
    if (digits_to(name, &i)) {
        if (x->mapping.t == J_DICT || i >= (int64_t)c->n)
            return j_fail(x->r, "format has no argument %lld", (long long)i);
        *out = c->v[i];
        return 0;
    }
    if (x->mapping.t == J_DICT && j_dict_get(x->mapping.dict, name, out)) return 0;
    for (size_t k = 0; k < c->n_kw && x->mapping.t != J_DICT; k++) {
        if (c->kw_names[k].n != name.n || memcmp(c->kw_names[k].s, name.s, name.n) != 0) continue;
        *out = c->kw[k];
        return 0;
    }
    return j_fail(x->r, "format has no argument '%.*s'", (int)(name.n < 60 ? name.n : 60), name.s);
}

/* The value of "name.attr[item]...". */
static int field_value(fields *x, jv field, jv *out)
{
    int rc = 0;
    size_t at = 0;
    while (at < field.n && field.s[at] != '.' && field.s[at] != '[')
        at++;
    TRY(first_value(x, j_str(field.s, at), out));
    while (at < field.n) {
        size_t from = ++at;
        if (field.s[from - 1] == '.') {
            while (at < field.n && field.s[at] != '.' && field.s[at] != '[')
                at++;
            if (at == from) return j_fail(x->r, "an empty attribute in a format");
            jv name = j_copy(x->r, field.s + from, at - from);
            TRY(j_attr(x->r, *out, name.s, name.n, out));
        } else if (field.s[from - 1] == '[') {
            const char *end = memchr(field.s + at, ']', field.n - at);
            if (!end || end == field.s + at) return j_fail(x->r, "a '[' without ']' in a format");
            at = (size_t)(end - field.s);
            jv key = j_str(field.s + from, at++ - from);
            int64_t i;
            TRY(j_item(x->r, *out, digits_to(key, &i) ? j_int(i) : key, out));
        } else {
            return j_fail(x->r, "only '.' or '[' may follow ']' in a format");
        }
    }
out:
    return rc;
}

static int convert(jrun *r, jv v, char how, jv *out)
{
    buf b = {0};
    int rc = 0;
    *out = v;
    if (!how) return 0;
    if (how != 's' && how != 'r' && how != 'a')
        return j_fail(r, "the conversion '!%c' does not exist", how);
    rc = how == 's' ? j_print(r, &b, v) : j_repr(r, &b, v, 0);
    if (rc >= 0) *out = how == 'a' ? j_ascii(r, j_str(b.data, b.len)) : j_copy(r, b.data, b.len);
    buf_free(&b);
    return rc;
}

static int expand(fields *x, jv s, int depth, buf *b);

/* One field; inner is what stands between the braces. */
static int put_field(fields *x, jv inner, int depth, buf *b)
{
    int rc = 0;
    size_t at = 0;
    char how = 0;
    jv v, text;
    buf spec_text = {0};
    for (; at < inner.n && inner.s[at] != ':' && inner.s[at] != '!'; at++) {
        if (inner.s[at] == '{') return j_fail(x->r, "a '{' in the name of a field");
        if (inner.s[at] != '[') continue;
        const char *end = memchr(inner.s + at, ']', inner.n - at);
        at = end ? (size_t)(end - inner.s) : inner.n - 1;
    }
    jv field = j_str(inner.s, at);
    if (at < inner.n && inner.s[at] == '!') {
        if (at + 1 >= inner.n || (at + 2 < inner.n && inner.s[at + 2] != ':'))
            return j_fail(x->r, "a conversion in a format that is not closed");
        how = inner.s[at + 1];
        at += 2;
    }
    text = at < inner.n ? j_str(inner.s + at + 1, inner.n - at - 1) : j_strz("");
    int64_t number;
    if (field.n == 0) {
        if (x->numbered) return j_fail(x->r, "a format with both {} and {0}");
        char s[24];
        snprintf(s, sizeof s, "%lld", (long long)x->next++);
        field = j_copy(x->r, s, strlen(s));
    } else if (digits_to(field, &number)) {
        if (x->next > 0) return j_fail(x->r, "a format with both {} and {0}");
        x->numbered = true;
    }
    TRY(field_value(x, field, &v));
    TRY(convert(x->r, v, how, &v));
    TRY(expand(x, text, depth - 1, &spec_text));
    TRY(j_format_value(x->r, b, v, j_str(spec_text.data, spec_text.len)));
out:
    buf_free(&spec_text);
    return rc;
}

/* Length of the field behind "{", up to its "}"; SIZE_MAX when there is none. Braces count from
 * the first ':' or '!' on. */
static size_t field_length(jv s)
{
    int open = 1;
    bool in_name = true;
    for (size_t i = 0; i < s.n; i++) {
        char c = s.s[i];
        if (in_name && c == '[') {
            const char *end = memchr(s.s + i, ']', s.n - i);
            if (!end) return SIZE_MAX;
            i = (size_t)(end - s.s);
        } else if (in_name && (c == ':' || c == '!')) {
            in_name = false;
        } else if (c == '{') {
            open++;
        } else if (c == '}' && --open == 0) {
            return i;
        }
    }
    return SIZE_MAX;
}

static int expand(fields *x, jv s, int depth, buf *b)
{
    int rc = 0;
    if (depth < 0) return j_fail(x->r, "formats nested too deep");
    TRY(j_step(x->r));
    for (size_t i = 0; i < s.n; i++) {
        char c = s.s[i];
        if ((c == '{' || c == '}') && i + 1 < s.n && s.s[i + 1] == c) {
            buf_putc(b, c);
            i++;
        } else if (c == '}') {
            return j_fail(x->r, "a '}' in a format that closes nothing");
        } else if (c == '{') {
            size_t n = field_length(j_str(s.s + i + 1, s.n - i - 1));
            if (n == SIZE_MAX) return j_fail(x->r, "a '{' in a format that is not closed");
            TRY(put_field(x, j_str(s.s + i + 1, n), depth, b));
            TRY(j_room(x->r, b->len));
            i += n + 1;
        } else {
            buf_putc(b, c);
        }
    }
out:
    return rc;
}

static int format_fields(jrun *r, jv s, const jcall *c, jv mapping, jv *out)
{
    fields x = {.r = r, .c = c, .mapping = mapping};
    buf b = {0};
    int rc = expand(&x, s, 2, &b);
    if (rc >= 0) *out = j_copy(r, b.data, b.len);
    buf_free(&b);
    return rc;
}

int j_str_format(jrun *r, jv s, const jcall *c, jv *out)
{
    return format_fields(r, s, c, j_none(), out);
}

int j_str_format_map(jrun *r, jv s, const jcall *c, jv *out)
{
    if (c->v[0].t != J_DICT) return j_fail(r, "format_map takes a dictionary");
    return format_fields(r, s, c, c->v[0], out);
}

/* ---- "..." % values ---- */

typedef struct percent {
    jrun *r;
    const jv *args;
    size_t n, used;
    jv mapping; /* what %(key)s looks into, else J_NONE */
    bool left, plus, space, alt, zero;
    int64_t width, prec;
    char type;
} percent;

static int next_arg(percent *x, jv *out)
{
    if (x->used >= x->n) return j_fail(x->r, "a format with too few values");
    *out = x->args[x->used++];
    return 0;
}

static int star_or_number(percent *x, const char **p, const char *end, int64_t *out)
{
    jv v;
    int rc;
    if (*p == end || **p != '*') return take_number(x->r, p, end, out);
    (*p)++;
    if ((rc = next_arg(x, &v)) < 0) return rc;
    if (v.t != J_INT && v.t != J_BOOL) return j_fail(x->r, "'*' in a format wants an integer");
    *out = whole(v);
    if (*out > FORMAT_MAX || *out < -FORMAT_MAX) return too_wide(x->r);
    j_slow(x->r, (size_t)llabs(*out));
    return 0;
}

/* Flags, width, precision and type behind "%" and a key. */
static int parse_percent(percent *x, const char **p, const char *end)
{
    int rc = 0;
    x->left = x->plus = x->space = x->alt = x->zero = false;
    x->width = x->prec = -1;
    for (; *p < end && **p && strchr("-+ #0", **p); (*p)++) {
        x->left = x->left || **p == '-';
        x->plus = x->plus || **p == '+';
        x->space = x->space || **p == ' ';
        x->alt = x->alt || **p == '#';
        x->zero = x->zero || **p == '0';
    }
    if (*p < end && (**p == '*' || isdigit((unsigned char)**p)))
        TRY(star_or_number(x, p, end, &x->width));
    if (x->width < -1) {
        x->left = true;
        x->width = -x->width;
    }
    if (*p < end && **p == '.') {
        (*p)++;
        TRY(star_or_number(x, p, end, &x->prec));
        if (x->prec < 0) x->prec = 0;
    }
    if (*p < end && (**p == 'h' || **p == 'l' || **p == 'L')) (*p)++;
    if (*p == end) return j_fail(x->r, "a format that ends in its middle");
    x->type = *(*p)++;
out:
    return rc;
}

static int percent_int(percent *x, jv v, buf *text)
{
    if (!j_is_num(v) && v.t != J_BIG)
        return j_fail(x->r, "'%%%c' needs a number, found %s", x->type, j_type_name(v));
    if (v.t == J_FLOAT) {
        if (strchr("oxX", x->type)) return j_fail(x->r, "'%%%c' needs an integer", x->type);
        if (!isfinite(v.f)) return j_fail(x->r, "%s is no integer", isnan(v.f) ? "nan" : "inf");
        if (fabs(v.f) >= 9e18) return j_limit(x->r, "an integer above the limit of 64 bits");
        v = j_int((int64_t)v.f);
    }
    unsigned base = x->type == 'o' ? 8 : (x->type | 32) == 'x' ? 16 : 10;
    buf d = {0};
    int rc = int_digits(x->r, &d, v, base);
    if (rc >= 0) {
        if (negative(v)) buf_putc(text, '-');
        if (x->alt && base != 10) buf_printf(text, "0%c", x->type == 'o' ? 'o' : 'x');
        fill(text, "0", 1, x->prec - (int64_t)d.len);
        buf_add(text, d.data, d.len);
        for (size_t i = 0; x->type == 'X' && i < text->len; i++)
            text->data[i] = (char)toupper((unsigned char)text->data[i]);
    }
    buf_free(&d);
    return rc;
}

/* One conversion as bare text; *numeric says that sign and zeros have a meaning. */
static int percent_text(percent *x, jv v, buf *text, bool *numeric)
{
    char enc[4];
    size_t n = 0;
    int rc = 0;
    jv s;
    *numeric = true;
    switch (x->type) {
    case 's':
    case 'r':
    case 'a':
        *numeric = false;
        TRY(convert(x->r, v, x->type, &s));
        if (x->prec >= 0) s.n = j_char_at(s, (size_t)x->prec);
        buf_add(text, s.s, s.n);
        break;
    case 'c':
        *numeric = false;
        if (v.t == J_STR && j_chars(v) == 1) {
            buf_add(text, v.s, v.n);
        } else if (v.t == J_INT || v.t == J_BOOL) {
            TRY(code_point(x->r, v, enc, &n));
            buf_add(text, enc, n);
        } else {
            return j_fail(x->r, "'%%c' needs a character");
        }
        break;
    case 'd':
    case 'i':
    case 'u':
    case 'o':
    case 'x':
    case 'X':
        return percent_int(x, v, text);
    default:
        if (v.t == J_BIG) return j_limit(x->r, "an integer above the limit of 64 bits");
        if (!strchr("eEfFgG", x->type)) return j_fail(x->r, "an unknown format type");
        if (!j_is_num(v))
            return j_fail(x->r, "'%%%c' needs a number, found %s", x->type, j_type_name(v));
        double f = v.t == J_FLOAT ? v.f : (double)whole(v);
        if (signbit(f) && !isnan(f)) buf_putc(text, '-');
        float_digits(text, f, x->type, x->alt, (int)x->prec);
    }
out:
    return rc;
}

static void put_padded(const percent *x, buf *b, jv s, bool numeric)
{
    bool zero = x->zero && numeric;
    char sign = 0;
    int64_t n, width = x->width;
    if (numeric && s.n && (s.s[0] == '-' || s.s[0] == '+')) {
        sign = s.s[0];
        s = j_str(s.s + 1, s.n - 1);
    } else if (numeric && (x->plus || x->space)) {
        sign = x->plus ? '+' : ' ';
    }
    jv prefix = j_strz("");
    n = (int64_t)j_chars(s);
    if (sign && width > n) width--;
    if (x->alt && numeric && strchr("oxX", x->type)) {
        prefix = j_str(s.s, 2);
        s = j_str(s.s + 2, s.n - 2);
        n -= 2;
        width -= 2;
    }
    int64_t pad = width > n ? width - n : 0;
    if (!zero && !x->left) fill(b, " ", 1, pad);
    if (sign) buf_putc(b, sign);
    buf_add(b, prefix.s, prefix.n);
    if (zero && !x->left) fill(b, "0", 1, pad);
    buf_add(b, s.s, s.n);
    if (x->left) fill(b, " ", 1, pad);
}

/* Behind "%(": the key, which may hold brackets; its value becomes the only argument. */
static int take_key(percent *x, const char **p, const char *end, jv *keyed)
{
    int open = 1;
    const char *from = *p;
    if (x->mapping.t == J_NONE) return j_fail(x->r, "the format needs a mapping");
    for (; *p < end; (*p)++) {
        open += **p == '(' ? 1 : **p == ')' ? -1 : 0;
        if (open == 0) break;
    }
    if (*p == end) return j_fail(x->r, "a key in a format that is not closed");
    jv key = j_copy(x->r, from, (size_t)(*p - from));
    (*p)++;
    if (x->mapping.t != J_DICT || !j_dict_get(x->mapping.dict, key, keyed))
        return j_fail(x->r, "the format's key '%.60s' has no value", key.s);
    x->args = keyed;
    x->n = 1;
    x->used = 0;
    return 0;
}

static int one_percent(percent *x, const char **p, const char *end, jv *keyed, buf *b)
{
    int rc = 0;
    bool numeric;
    jv v;
    buf text = {0};
    if (*p < end && **p == '%') {
        (*p)++;
        buf_putc(b, '%');
        return 0;
    }
    if (*p < end && **p == '(') {
        (*p)++;
        TRY(take_key(x, p, end, keyed));
    }
    TRY(parse_percent(x, p, end));
    TRY(next_arg(x, &v));
    TRY(percent_text(x, v, &text, &numeric));
    put_padded(x, b, j_str(text.data, text.len), numeric);
    TRY(j_room(x->r, b->len));
out:
    buf_free(&text);
    return rc;
}

int j_percent(jrun *r, jv s, jv value, jv *out)
{
    int rc = 0;
    buf b = {0};
    jv keyed;
    bool tuple = value.t == J_TUPLE;
    bool maps = value.t == J_DICT || value.t == J_LIST || value.t == J_UNDEF ||
                (value.t == J_SEQ && value.list->kind == J_RANGE);
    percent x = {.r = r, .args = tuple ? value.list->v : &value, .n = tuple ? value.list->n : 1};
    x.mapping = maps ? value : j_none();
    for (const char *p = s.s, *end = s.s + s.n; p < end;) {
        const char *next = memchr(p, '%', (size_t)(end - p));
        if (!next) next = end;
        buf_add(&b, p, (size_t)(next - p));
        p = next + (next < end);
        if (next < end) TRY(one_percent(&x, &p, end, &keyed, &b));
        TRY(j_step(r));
    }
    if (x.used < x.n && !maps) TRY(j_fail(r, "a format with too many values"));
    *out = j_copy(r, b.data, b.len);
out:
    buf_free(&b);
    return rc;
}
