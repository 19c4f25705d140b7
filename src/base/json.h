/* JSON: a thin wrapper over cJSON for reading, and a writer into a buf.
 * json_parse refuses invalid UTF-8, nesting deeper than JSON_MAX_DEPTH, trailing bytes, and NUL
 * bytes, BEFORE cJSON sees the text, and names the byte offset. Getters take a dotted path for
 * error messages only through `where` (file or request part). Objects are never looked up by key
 * in a loop over large objects: iterate with child/next. */
#ifndef BASE_JSON_H
#define BASE_JSON_H
#include <cjson/cJSON.h>
#include "base/mem.h"

#define JSON_MAX_DEPTH 200

typedef cJSON json;
int json_parse(json **out, const char *text, size_t len, const char *where, err *e);
/* As json_parse, and numbers that a double or its printed form would change keep their text in
 * valuestring: integers of more than 15 digits, and whole numbers written with a point or exponent
 * (1.0 is no integer to who prints it). Others have valuestring NULL. Copies keep it. */
int json_parse_exact(json **out, const char *text, size_t len, const char *where, err *e);
int json_parse_file(json **out, const char *path, err *e); /* file size limit 1 GiB */
void json_drop(json *j);

const json *json_get(const json *obj, const char *key); /* case-sensitive; NULL if absent */
bool json_is_null_or_absent(const json *obj, const char *key);
/* Typed getters: absent or null leaves *out alone and returns 0; present returns 1; a value of
 * another type, not finite, out of range or not integral is ERR_FORMAT naming where and key. */
int json_get_i64(const json *obj, const char *key, int64_t *out, const char *where, err *e);
int json_get_f64(const json *obj, const char *key, double *out, const char *where, err *e);
int json_get_bool(const json *obj, const char *key, bool *out, const char *where, err *e);
int json_get_str(const json *obj, const char *key, const char **out, const char *where, err *e);

/* Writer: commas are placed by the writer. Doubles: shortest text that reads back equal; inf and
 * NaN become null. Strings must be UTF-8; invalid bytes are written as U+FFFD. */
typedef struct jw {
    buf *b;
    int depth;
    bool first[64];
    bool after_key;
    int indent; /* 0 = one line; else spaces a level */
} jw;
void jw_init(jw *w, buf *b, int indent);
void jw_obj(jw *w);
void jw_end_obj(jw *w);
void jw_arr(jw *w);
void jw_end_arr(jw *w);
void jw_key(jw *w, const char *key);
void jw_str(jw *w, const char *s);
void jw_strn(jw *w, const char *s, size_t n);
void jw_i64(jw *w, int64_t v);
void jw_f64(jw *w, double v);
void jw_bool(jw *w, bool v);
void jw_null(jw *w);
void jw_raw(jw *w, const char *text); /* a complete JSON value */
/* key + value in one call */
void jw_kstr(jw *w, const char *k, const char *v); /* v NULL = null */
void jw_ki64(jw *w, const char *k, int64_t v);
void jw_kf64(jw *w, const char *k, double v);
void jw_kbool(jw *w, const char *k, bool v);
#endif
