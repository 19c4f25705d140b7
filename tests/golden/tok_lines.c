/* Driven by test_tokenizers.py: one JSON object a line in, one out.
 *   {"open": PATH, "config": PATH?}  -> {"error": TEXT or null}
 *   {"hex": BYTES, "special": BOOL, "literal": BOOL?, "only_ids"?}
 *                                    -> {"ids", "decoded", "skipped", "streamed"} or {"error"}
 *   {"ids": [...]}                   -> {"decoded", "skipped", "streamed"} */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/file.h"
#include "base/json.h"
#include "text/tokenizer.h"

static void unhex(const char *s, buf *out)
{
    buf_clear(out);
    for (; s[0] && s[1]; s += 2) {
        char two[3] = {s[0], s[1], 0};
        buf_putc(out, (char)strtol(two, NULL, 16));
    }
}

static int open_one(tokenizer **t, const json *q, err *e)
{
    buf text = {0}, config = {0};
    const char *path = json_get(q, "open")->valuestring;
    const json *c = json_get(q, "config");
    tokenizer_close(*t);
    *t = NULL;
    int rc = file_read_all(&text, path, (size_t)1 << 30, e);
    if (rc >= 0 && cJSON_IsString(c)) rc = file_read_all(&config, c->valuestring, 1 << 20, e);
    if (rc >= 0)
        rc = tokenizer_open(t, text.data, text.len, config.data ? config.data : "", config.len,
                            path, e);
    buf_free(&text);
    buf_free(&config);
    return rc;
}

static void write_text(jw *w, const char *key, const buf *b)
{
    jw_key(w, key);
    jw_strn(w, b->data ? b->data : "", b->len);
}

static void write_texts(jw *w, const tokenizer *t, const ids *l)
{
    buf text = {0};
    detok d;
    tokenizer_decode(t, l->v, l->n, false, &text);
    write_text(w, "decoded", &text);
    buf_clear(&text);
    tokenizer_decode(t, l->v, l->n, true, &text);
    write_text(w, "skipped", &text);
    buf_clear(&text);
    detok_init(&d, t, false);
    for (size_t i = 0; i < l->n; i++)
        detok_push(&d, l->v[i], &text);
    detok_flush(&d, &text);
    detok_free(&d);
    write_text(w, "streamed", &text);
    buf_free(&text);
}

static void answer(tokenizer **t, const json *q, jw *w)
{
    err e = {0};
    ids l = {0};
    buf text = {0};
    int rc = 0;
    jw_obj(w);
    if (json_get(q, "open")) {
        rc = open_one(t, q, &e);
    } else if (!*t) {
        rc = err_set(&e, ERR_BADSTATE, "no tokenizer is open");
    } else if (json_get(q, "hex")) {
        unhex(json_get(q, "hex")->valuestring, &text);
        bool literal = cJSON_IsTrue(json_get(q, "literal"));
        rc = (literal ? tokenizer_encode_literal : tokenizer_encode)(
            *t, text.data ? text.data : "", text.len, cJSON_IsTrue(json_get(q, "special")), &l, &e);
    } else {
        for (const json *c = json_get(q, "ids")->child; c; c = c->next)
            ids_push(&l, (int32_t)c->valuedouble);
    }
    jw_kstr(w, "error", rc < 0 ? e.msg : NULL);
    if (rc >= 0 && !json_get(q, "open")) {
        jw_key(w, "ids");
        jw_arr(w);
        for (size_t i = 0; i < l.n; i++)
            jw_i64(w, l.v[i]);
        jw_end_arr(w);
        if (!json_get(q, "only_ids")) write_texts(w, *t, &l);
    }
    jw_end_obj(w);
    buf_free(&text);
    ids_free(&l);
}

int main(void)
{
    tokenizer *t = NULL;
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    while ((n = getline(&line, &cap, stdin)) > 0) {
        json *q = NULL;
        err e = {0};
        buf out = {0};
        jw w;
        jw_init(&w, &out, 0);
        if (json_parse(&q, line, (size_t)n, "input", &e) < 0) return 2;
        answer(&t, q, &w);
        puts(out.data);
        fflush(stdout);
        buf_free(&out);
        json_drop(q);
    }
    free(line);
    tokenizer_close(t);
    return 0;
}
