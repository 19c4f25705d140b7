/* JSON: checks before cJSON sees the text, typed getters, and the writer.
 *
 * json_parse scans once for what cJSON would accept or choke on: invalid UTF-8, NUL bytes (also
 * \u0000), control characters inside strings, lone surrogate escapes, nesting deeper than
 * JSON_MAX_DEPTH. cJSON then parses with its length given, and nothing but white space may follow.
 */
#include "base/json.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/file.h"
#include "base/utf8.h"

static int hex4(const char *s, size_t n, uint32_t *out)
{
    if (n < 4) return -1;
    uint32_t v = 0;
    for (int i = 0; i < 4; i++) {
        char c = s[i];
        uint32_t d = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                     : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a' + 10)
                     : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A' + 10)
                                            : 16;
        if (d == 16) return -1;
        v = v << 4 | d;
    }
    *out = v;
    return 0;
}

/* Checks the escape at s[i] == '\\'; returns bytes used or a negative error. */
static int check_escape(const char *s, size_t n, size_t i, const char *where, err *e)
{
    uint32_t v, w;
    if (i + 1 >= n)
        return err_set(e, ERR_FORMAT, "%s: invalid JSON at byte %zu: the text ends inside a string",
                       where, i);
    if (s[i + 1] != 'u') return 2;
    if (hex4(s + i + 2, n - i - 2, &v) < 0)
        return err_set(e, ERR_FORMAT,
                       "%s: invalid JSON at byte %zu: \\u needs four hexadecimal digits", where, i);
    if (v == 0)
        return err_set(e, ERR_FORMAT, "%s: invalid JSON at byte %zu: \\u0000 is not allowed", where,
                       i);
    if (v < 0xD800 || v > 0xDFFF) return 6;
    if (v < 0xDC00 && i + 7 < n && s[i + 6] == '\\' && s[i + 7] == 'u' &&
        hex4(s + i + 8, n - i - 8, &w) == 0 && w >= 0xDC00 && w <= 0xDFFF)
        return 12;
    return err_set(e, ERR_FORMAT,
                   "%s: invalid JSON at byte %zu: lone surrogate \\u%04x is not a character", where,
                   i, v);
}

static int prescan(const char *s, size_t n, const char *where, err *e)
{
    size_t ok = utf8_valid_prefix(s, n);
    if (ok != n)
        return err_set(e, ERR_FORMAT, "%s: invalid JSON: byte %zu is not valid UTF-8", where, ok);
    int depth = 0;
    bool in = false;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (in) {
            if (c == '\\') {
                int k = check_escape(s, n, i, where, e);
                if (k < 0) return k;
                i += (size_t)k - 1;
            } else if (c == '"') {
                in = false;
            } else if (c < 0x20) {
                return err_set(e, ERR_FORMAT,
                               "%s: invalid JSON at byte %zu: control character 0x%02x in a string",
                               where, i, c);
            }
            continue;
        }
        if (c == '"')
            in = true;
        else if (c == '{' || c == '[') {
            if (++depth > JSON_MAX_DEPTH)
                return err_set(e, ERR_LIMIT, "%s: JSON nested deeper than %d levels at byte %zu",
                               where, JSON_MAX_DEPTH, i);
        } else if (c == '}' || c == ']')
            depth--;
        else if (c == 0)
            return err_set(e, ERR_FORMAT, "%s: invalid JSON: NUL at byte %zu", where, i);
    }
    return 0;
}

int json_parse(json **out, const char *text, size_t len, const char *where, err *e)
{
    *out = NULL;
    size_t i = 0;
    int rc = prescan(text ? text : "", len, where, e);
    if (rc < 0) return rc;
    while (i < len && strchr(" \t\r\n", text[i]))
        i++;
    if (i == len) return err_set(e, ERR_FORMAT, "%s: invalid JSON: the text is empty", where);
    const char *end = NULL;
    json *j = cJSON_ParseWithLengthOpts(text, len, &end, 0);
    size_t at = end ? (size_t)(end - text) : len;
    if (!j) return err_set(e, ERR_FORMAT, "%s: invalid JSON at byte %zu", where, at);
    while (at < len && strchr(" \t\r\n", text[at]))
        at++;
    if (at != len) {
        cJSON_Delete(j);
        return err_set(e, ERR_FORMAT, "%s: invalid JSON: something follows the value at byte %zu",
                       where, at);
    }
    *out = j;
    return 0;
}

/* The node behind x in the order of the text, below root. */
static json *next_node(json *x, const json *root, json **up, size_t *depth)
{
    if (x->child) {
        up[(*depth)++] = x;
        return x->child;
    }
    while (x != root && !x->next)
        x = up[--*depth];
    return x == root ? NULL : x->next;
}

/* The text of the number at s when its double does not say it all (see json.h), else NULL. */
static char *number_text(const char *s, size_t n)
{
    size_t digits = 0;
    bool plain = true;
    for (size_t i = 0; i < n; i++) {
        plain = plain && s[i] != '.' && s[i] != 'e' && s[i] != 'E';
        digits += s[i] >= '0' && s[i] <= '9';
    }
    if (plain && digits <= 15) return NULL;
    char *text = xstrndup(s, n);
    double f = strtod(text, NULL);
    if (plain || f == floor(f)) return text;
    free(text);
    return NULL;
}

int json_parse_exact(json **out, const char *text, size_t len, const char *where, err *e)
{
    json *up[JSON_MAX_DEPTH + 1];
    size_t depth = 0, at = 0;
    int rc = json_parse(out, text, len, where, e);
    for (json *x = rc < 0 ? NULL : *out; x; x = next_node(x, *out, up, &depth)) {
        if (!cJSON_IsNumber(x)) continue;
        for (; at < len && !strchr("-0123456789", text[at]); at++) /* to the next number */
            if (text[at] == '"')
                while (text[++at] != '"')
                    at += text[at] == '\\';
        size_t n = 0;
        while (at + n < len && strchr("+-.eE0123456789", text[at + n]))
            n++;
        x->valuestring = number_text(text + at, n); /* cJSON_Delete frees it */
        at += n;
    }
    return rc;
}

int json_parse_file(json **out, const char *path, err *e)
{
    buf b = {0};
    *out = NULL;
    int rc = file_read_all(&b, path, (size_t)1 << 30, e);
    if (rc == 0) rc = json_parse(out, b.data, b.len, path, e);
    buf_free(&b);
    return rc;
}

void json_drop(json *j)
{
    cJSON_Delete(j);
}
const json *json_get(const json *obj, const char *key)
{
    return cJSON_IsObject(obj) ? cJSON_GetObjectItemCaseSensitive(obj, key) : NULL;
}

bool json_is_null_or_absent(const json *obj, const char *key)
{
    const json *v = json_get(obj, key);
    return !v || cJSON_IsNull(v);
}

static const char *kind(const json *v)
{
    if (cJSON_IsString(v)) return "a string";
    if (cJSON_IsNumber(v)) return "a number";
    if (cJSON_IsBool(v)) return "a boolean";
    if (cJSON_IsArray(v)) return "an array";
    return cJSON_IsObject(v) ? "an object" : "null";
}

static int wrong(const json *v, const char *key, const char *want, const char *where, err *e)
{
    return err_set(e, ERR_FORMAT, "%s: '%s' must be %s, found %s", where, key, want, kind(v));
}

int json_get_f64(const json *obj, const char *key, double *out, const char *where, err *e)
{
    if (json_is_null_or_absent(obj, key)) return 0;
    const json *v = json_get(obj, key);
    if (!cJSON_IsNumber(v)) return wrong(v, key, "a number", where, e);
    if (!isfinite(v->valuedouble))
        return err_set(e, ERR_FORMAT, "%s: '%s' is not a finite number", where, key);
    *out = v->valuedouble;
    return 1;
}

int json_get_i64(const json *obj, const char *key, int64_t *out, const char *where, err *e)
{
    double d = 0;
    const json *v = json_get(obj, key);
    if (v && !cJSON_IsNull(v) && !cJSON_IsNumber(v)) return wrong(v, key, "an integer", where, e);
    int rc = json_get_f64(obj, key, &d, where, e);
    if (rc <= 0) return rc;
    if (d != floor(d))
        return err_set(e, ERR_FORMAT, "%s: '%s' must be an integer, found %g", where, key, d);
    if (d < -9223372036854774784.0 || d > 9223372036854774784.0)
        return err_set(e, ERR_FORMAT, "%s: '%s' is too large: %g", where, key, d);
    *out = (int64_t)d;
    return 1;
}

int json_get_bool(const json *obj, const char *key, bool *out, const char *where, err *e)
{
    if (json_is_null_or_absent(obj, key)) return 0;
    const json *v = json_get(obj, key);
    if (!cJSON_IsBool(v)) return wrong(v, key, "true or false", where, e);
    *out = cJSON_IsTrue(v);
    return 1;
}

int json_get_str(const json *obj, const char *key, const char **out, const char *where, err *e)
{
    if (json_is_null_or_absent(obj, key)) return 0;
    const json *v = json_get(obj, key);
    if (!cJSON_IsString(v)) return wrong(v, key, "a string", where, e);
    *out = v->valuestring;
    return 1;
}

/* ---- writer -------------------------------------------------------------------------------------
 */

void jw_init(jw *w, buf *b, int indent)
{
    *w = (jw){.b = b, .indent = indent};
    w->first[0] = true;
}

static void line(jw *w)
{
    if (!w->indent) return;
    buf_putc(w->b, '\n');
    for (int i = 0; i < w->depth * w->indent; i++)
        buf_putc(w->b, ' ');
}

/* What goes before a value or a key: comma and line break, unless a key stands just before. */
static void before(jw *w)
{
    if (w->after_key) {
        w->after_key = false;
        return;
    }
    if (!w->first[w->depth]) buf_putc(w->b, ',');
    if (w->depth) line(w);
    w->first[w->depth] = false;
}

static void open_level(jw *w, char c)
{
    before(w);
    buf_putc(w->b, c);
    if (w->depth < (int)(sizeof w->first / sizeof *w->first) - 1) w->depth++;
    w->first[w->depth] = true;
}

static void close_level(jw *w, char c)
{
    bool empty = w->first[w->depth];
    if (w->depth) w->depth--;
    if (!empty) line(w);
    buf_putc(w->b, c);
}

void jw_obj(jw *w)
{
    open_level(w, '{');
}
void jw_end_obj(jw *w)
{
    close_level(w, '}');
}
void jw_arr(jw *w)
{
    open_level(w, '[');
}
void jw_end_arr(jw *w)
{
    close_level(w, ']');
}

static void quoted(buf *b, const char *s, size_t n)
{
    buf clean = {0};
    if (utf8_valid_prefix(s, n) != n) {
        utf8_add_lossy(&clean, s, n);
        s = clean.data;
        n = clean.len;
    }
    buf_putc(b, '"');
    size_t run = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\' && c != 0x7F) continue;
        buf_add(b, s + run, i - run);
        run = i + 1;
        if (c == '"' || c == '\\')
            buf_printf(b, "\\%c", c);
        else if (c == '\n')
            buf_puts(b, "\\n");
        else if (c == '\r')
            buf_puts(b, "\\r");
        else if (c == '\t')
            buf_puts(b, "\\t");
        else
            buf_printf(b, "\\u%04x", c);
    }
    buf_add(b, s + run, n - run);
    buf_putc(b, '"');
    buf_free(&clean);
}

void jw_key(jw *w, const char *key)
{
    before(w);
    quoted(w->b, key, strlen(key));
    buf_puts(w->b, w->indent ? ": " : ":");
    w->after_key = true;
}

void jw_strn(jw *w, const char *s, size_t n)
{
    before(w);
    quoted(w->b, s, n);
}

void jw_str(jw *w, const char *s)
{
    jw_strn(w, s, strlen(s));
}

void jw_i64(jw *w, int64_t v)
{
    before(w);
    buf_printf(w->b, "%lld", (long long)v);
}

void jw_f64(jw *w, double v)
{
    before(w);
    if (!isfinite(v)) {
        buf_puts(w->b, "null");
        return;
    }
    char s[40];
    for (int p = 6; p <= 17; p++) {
        snprintf(s, sizeof s, "%.*g", p, v);
        if (strtod(s, NULL) == v) break;
    }
    buf_puts(w->b, s);
}

void jw_bool(jw *w, bool v)
{
    before(w);
    buf_puts(w->b, v ? "true" : "false");
}

void jw_null(jw *w)
{
    before(w);
    buf_puts(w->b, "null");
}

void jw_raw(jw *w, const char *text)
{
    before(w);
    buf_puts(w->b, text);
}

void jw_kstr(jw *w, const char *k, const char *v)
{
    jw_key(w, k);
    if (v)
        jw_str(w, v);
    else
        jw_null(w);
}

void jw_ki64(jw *w, const char *k, int64_t v)
{
    jw_key(w, k);
    jw_i64(w, v);
}

void jw_kf64(jw *w, const char *k, double v)
{
    jw_key(w, k);
    jw_f64(w, v);
}

void jw_kbool(jw *w, const char *k, bool v)
{
    jw_key(w, k);
    jw_bool(w, v);
}
