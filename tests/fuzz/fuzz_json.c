/* Any bytes as JSON: no crash, and what parses is written and parsed again without change of kind.
 */
#include <stdlib.h>
#include "base/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void write_value(jw *w, const json *j)
{
    if (cJSON_IsObject(j) || cJSON_IsArray(j)) {
        bool object = cJSON_IsObject(j);
        object ? jw_obj(w) : jw_arr(w);
        for (const json *c = j->child; c; c = c->next) {
            if (object) jw_key(w, c->string);
            write_value(w, c);
        }
        object ? jw_end_obj(w) : jw_end_arr(w);
    } else if (cJSON_IsString(j)) {
        jw_str(w, j->valuestring);
    } else if (cJSON_IsNumber(j)) {
        jw_f64(w, j->valuedouble);
    } else if (cJSON_IsBool(j)) {
        jw_bool(w, cJSON_IsTrue(j));
    } else {
        jw_null(w);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    err e = {0};
    json *j, *again;
    if (json_parse(&j, (const char *)data, size, "fuzz", &e) < 0) {
        if (!e.msg[0] || j) abort();
        return 0;
    }
    int depth = 0; /* the writer has 64 levels; deeper texts are only parsed */
    for (size_t i = 0; i < size; i++)
        depth += data[i] == '[' || data[i] == '{';
    if (depth < 60) {
        buf b = {0};
        jw w;
        jw_init(&w, &b, (int)(size % 3));
        write_value(&w, j);
        if (json_parse(&again, b.data, b.len, "again", &e) < 0) abort();
        if ((again->type & 0xFF) != (j->type & 0xFF) && !cJSON_IsNull(again))
            abort(); /* 1e999: null */
        json_drop(again);
        buf_free(&b);
    }
    json_drop(j);
    return 0;
}
