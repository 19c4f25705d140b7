/* Any bytes as a chat template and its context: the input is the template, then a line "%%", then
 * a JSON object. What parses must render or be refused with a reason, within small budgets; what
 * renders must be UTF-8. The same context's messages then go the way that requests go. */
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/chat.h"
#include "text/jinja_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char context_default[] =
    "{\"messages\":[{\"role\":\"user\",\"content\":\"h\xC3\xA9 <b>\"},{\"role\":\"assistant\","
    "\"content\":null,\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]}],"
    "\"l\":[3,1.0,\"b\",null,true],\"d\":{\"a\":{\"b\":[1]},\"items\":2},\"s\":\"Hello World\","
    "\"n\":-7,\"f\":2.5,\"bos_token\":\"<s>\"}";

static void check(int rc, const err *e, const buf *out)
{
    if (rc < 0 && (!e->msg[0] || out->len)) abort();
    if (utf8_valid_prefix(out->data, out->len) != out->len) abort();
}

static int bare(const char *text, size_t n, const json *context)
{
    jtmpl t = {.a = arena_make(), .where = "fuzz"};
    buf out = {0};
    err e = {0};
    int rc = j_parse(&t, text, n, &e);
    if (rc >= 0) rc = jinja_render(&t, context, 20000, (size_t)1 << 20, &out, &e);
    check(rc, &e, &out);
    buf_free(&out);
    arena_drop(t.a);
    return rc;
}

static void by_chat(const char *text, size_t n, const json *context)
{
    chat_template *c = NULL;
    buf out = {0};
    err e = {0};
    int rc = chat_template_open(&c, text, n, "fuzz", &e);
    if (rc >= 0)
        rc = chat_render(c, json_get(context, "messages"), context, true, "<s>", "</s>", &out, &e);
    check(rc, &e, &out);
    buf_free(&out);
    chat_template_close(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char split[] = "\n%%\n";
    const char *s = (const char *)data, *p = size ? memmem(data, size, split, 4) : NULL;
    size_t n = p ? (size_t)(p - s) : size;
    json *context = NULL;
    err e = {0};
    const char *text = p ? p + 4 : context_default;
    if (json_parse_exact(&context, text, p ? size - n - 4 : strlen(text), "context", &e) < 0)
        return 0;
    /* Only what is small here goes through the way of requests, whose limits are large. */
    if (bare(s, n, context) >= 0 && n < 400) by_chat(s, n, context);
    json_drop(context);
    return 0;
}
