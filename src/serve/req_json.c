/* Reading a request body: bounds before cJSON builds anything, then typed fields whose faults name
 * the field. null counts as absent everywhere, as in the OpenAI API; fields nobody asks for are
 * never looked at.
 *
 * cJSON holds numbers as doubles. Integers up to 2^53 are exact there; a seed may be any int64, so
 * its digits are found again in the body's text (serve__raw_number), which was validated before. */
#include "serve/serve_int.h"
#include <math.h>
#include <string.h>

#define MAX_TOP_KEYS 1000

size_t serve__count_values(const char *text, size_t n)
{
    size_t values = 1;
    bool in = false;
    for (size_t i = 0; i < n; i++) {
        char ch = text[i];
        if (in) {
            if (ch == '\\')
                i++;
            else if (ch == '"')
                in = false;
        } else if (ch == '"') {
            in = true;
        } else if (ch == ',' || ch == '[' || ch == '{') {
            values++;
        }
    }
    return values;
}

int serve__parse_body(const buf *body, json **out, fault *f)
{
    err e = {0};
    *out = NULL;
    if (!body->len)
        return serve__fault_set(f, 400, "", "The request has no body; send a JSON object.");
    if (serve__count_values(body->data, body->len) > SERVE_MAX_VALUES)
        return serve__fault_set(f, 400, "", "The request body holds more than %d JSON values.",
                                SERVE_MAX_VALUES);
    if (json_parse_exact(out, body->data, body->len, "request body", &e) < 0)
        return serve__fault_set(f, 400, "", "%s", e.msg);
    if (!cJSON_IsObject(*out)) {
        json_drop(*out);
        *out = NULL;
        return serve__fault_set(f, 400, "", "The request body must be a JSON object.");
    }
    int keys = cJSON_GetArraySize(*out);
    if (keys > MAX_TOP_KEYS) {
        json_drop(*out);
        *out = NULL;
        return serve__fault_set(f, 400, "", "The request body has %d fields; at most %d are read.",
                                keys, MAX_TOP_KEYS);
    }
    return 0;
}

/* ---- exact numbers ------------------------------------------------------------------------------
 */

static size_t skip_space(const char *t, size_t n, size_t i)
{
    while (i < n && (t[i] == ' ' || t[i] == '\t' || t[i] == '\r' || t[i] == '\n'))
        i++;
    return i;
}

static size_t skip_string(const char *t, size_t n, size_t i) /* t[i] == '"' */
{
    for (i++; i < n && t[i] != '"'; i++)
        if (t[i] == '\\') i++;
    return i < n ? i + 1 : n;
}

/* Ends at the comma or brace that follows the value at depth 1. */
static size_t skip_value(const char *t, size_t n, size_t i)
{
    int depth = 0;
    while (i < n) {
        if (t[i] == '"') {
            i = skip_string(t, n, i);
            continue;
        }
        if (depth == 0 && (t[i] == ',' || t[i] == '}')) break;
        if (t[i] == '{' || t[i] == '[') depth++;
        if (t[i] == '}' || t[i] == ']') depth--;
        i++;
    }
    return i;
}

const char *serve__raw_number(const char *text, size_t n, const char *key, size_t *len)
{
    size_t klen = strlen(key), i = skip_space(text, n, 0);
    if (i >= n || text[i] != '{') return NULL;
    for (i++; i < n;) {
        i = skip_space(text, n, i);
        if (i >= n || text[i] != '"') return NULL;
        size_t k = i + 1;
        i = skip_string(text, n, i);
        bool mine = i - k == klen + 1 && !memcmp(text + k, key, klen);
        i = skip_space(text, n, i);
        if (i >= n || text[i] != ':') return NULL;
        size_t v = skip_space(text, n, i + 1);
        i = skip_value(text, n, v);
        if (mine) {
            size_t end = v;
            while (end < i &&
                   (strchr("+-.eE", text[end]) || (text[end] >= '0' && text[end] <= '9')))
                end++;
            *len = end - v;
            return *len ? text + v : NULL;
        }
        if (i >= n || text[i] != ',') return NULL;
        i++;
    }
    return NULL;
}

/* ---- typed fields -------------------------------------------------------------------------------
 */

static const char *kind_name(const json *v)
{
    if (cJSON_IsString(v)) return "a string";
    if (cJSON_IsNumber(v)) return "a number";
    if (cJSON_IsBool(v)) return "a boolean";
    if (cJSON_IsArray(v)) return "an array";
    return cJSON_IsObject(v) ? "an object" : "null";
}

static int wrong_kind(const json *v, const char *key, const char *want, fault *f)
{
    return serve__fault_set(f, 400, key, "'%s' must be %s; found %s.", key, want, kind_name(v));
}

int serve__field_num(const json *obj, const char *key, double lo, double hi, double *out, fault *f)
{
    const json *v = json_get(obj, key);
    if (!v || cJSON_IsNull(v)) return 0;
    if (!cJSON_IsNumber(v)) return wrong_kind(v, key, "a number", f);
    double d = v->valuedouble;
    if (!isfinite(d) || d < lo || d > hi)
        return serve__fault_set(f, 400, key, "'%s' must be between %g and %g; found %g.", key, lo,
                                hi, d);
    *out = d;
    return 1;
}

int serve__field_int(const json *obj, const char *key, int64_t lo, int64_t hi, int64_t *out,
                     fault *f)
{
    const json *v = json_get(obj, key);
    if (!v || cJSON_IsNull(v)) return 0;
    if (!cJSON_IsNumber(v)) return wrong_kind(v, key, "an integer", f);
    double d = v->valuedouble;
    if (!isfinite(d) || d != floor(d))
        return serve__fault_set(f, 400, key, "'%s' must be an integer; found %g.", key, d);
    if (d < (double)lo || d > (double)hi)
        return serve__fault_set(f, 400, key, "'%s' must be between %lld and %lld; found %.0f.", key,
                                (long long)lo, (long long)hi, d);
    *out = (int64_t)d;
    return 1;
}

int serve__field_bool(const json *obj, const char *key, bool *out, fault *f)
{
    const json *v = json_get(obj, key);
    if (!v || cJSON_IsNull(v)) return 0;
    if (!cJSON_IsBool(v)) return wrong_kind(v, key, "true or false", f);
    *out = cJSON_IsTrue(v);
    return 1;
}

int serve__field_str(const json *obj, const char *key, const char **out, fault *f)
{
    const json *v = json_get(obj, key);
    if (!v || cJSON_IsNull(v)) return 0;
    if (!cJSON_IsString(v)) return wrong_kind(v, key, "a string", f);
    *out = v->valuestring;
    return 1;
}
