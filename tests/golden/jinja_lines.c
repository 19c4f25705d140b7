/* Driven by test_chat_templates.py: one JSON object a line in, one out.
 *   {"template": TEXT, "context": {...}}  -> {"text": TEXT} or {"error": TEXT}
 *   {"template": TEXT, "chat": {"messages", "extra"?, "prompt"?, "bos"?, "eos"?}}  -> the same, by
 *   chat_render; "tools_template" may name the text for requests with tools. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/json.h"
#include "text/chat.h"

#define NOW 1721997296 /* 2024-07-26 12:34:56 UTC */

static const char *text_of(const json *q, const char *key)
{
    const json *v = json_get(q, key);
    return cJSON_IsString(v) ? v->valuestring : NULL;
}

static int answer(const json *q, buf *out, err *e)
{
    chat_template *c = NULL;
    const char *text = text_of(q, "template");
    const json *chat = json_get(q, "chat");
    int rc = chat_template_open(&c, text, strlen(text), "t", e);
    if (rc < 0) return rc;
    chat_template_fix_clock(c, NOW);
    if (chat)
        rc = chat_render(c, json_get(chat, "messages"), json_get(chat, "extra"),
                         cJSON_IsTrue(json_get(chat, "prompt")), text_of(chat, "bos"),
                         text_of(chat, "eos"), out, e);
    else
        rc = chat_render_raw(c, json_get(q, "context"), out, e);
    chat_template_close(c);
    return rc;
}

int main(void)
{
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    while ((n = getline(&line, &cap, stdin)) > 0) {
        json *q = NULL;
        err e = {0};
        buf text = {0}, out = {0};
        jw w;
        int rc = json_parse_exact(&q, line, (size_t)n, "line", &e);
        if (rc >= 0) rc = answer(q, &text, &e);
        jw_init(&w, &out, 0);
        jw_obj(&w);
        jw_key(&w, rc < 0 ? "error" : "text");
        if (rc < 0)
            jw_str(&w, e.msg);
        else
            jw_strn(&w, text.data ? text.data : "", text.len);
        jw_end_obj(&w);
        fwrite(out.data, 1, out.len, stdout);
        fputc('\n', stdout);
        fflush(stdout);
        json_drop(q);
        buf_free(&text);
        buf_free(&out);
    }
    free(line);
    return 0;
}
