/* Chat templates: opening, what a template can take, and rendering of OpenAI-style messages.
 *
 * Templates differ in what they expect of a message, and clients send all forms. At open, a few
 * short conversations with marked texts are rendered, and what comes out says what the template
 * can take (what fails to render counts as "cannot"):
 *   parts      content given as a list of text parts renders as the joined text would
 *   only parts content given as a string is lost, as parts it is there
 *   objects    arguments of a tool call come out right when given as an object
 *   null       a tool call is lost beside content "", and is there beside content null
 * chat_render brings a copy of the messages into that form: null or missing content becomes "",
 * parts are joined, arguments parsed, and the role developer becomes system where the template's
 * text does not know it. Parts other than text are refused by name. */
#include <stdlib.h>
#include <string.h>
#include "text/chat.h"
#include "text/jinja_internal.h"

#define PROBE_STEPS 400000
#define PROBE_BYTES ((size_t)16 << 20)

struct chat_template {
    jtmpl t;
    bool parts, only_parts, objects, null_content, developer;
};

/* ---- what the template can take ---- */

static bool probe(const chat_template *c, const char *messages, buf *out)
{
    json *list = NULL, *context = NULL;
    err e = {0};
    buf_clear(out);
    bool ok = json_parse(&list, messages, strlen(messages), "probe", &e) >= 0;
    if (ok) {
        context = cJSON_CreateObject();
        cJSON_AddItemToObject(context, "messages", list);
        cJSON_AddBoolToObject(context, "add_generation_prompt", 0);
        cJSON_AddStringToObject(context, "bos_token", "");
        cJSON_AddStringToObject(context, "eos_token", "");
        cJSON_AddNullToObject(context, "tools");
        ok = jinja_render(&c->t, context, PROBE_STEPS, PROBE_BYTES, out, &e) >= 0;
    }
    json_drop(context);
    return ok;
}

static bool has(const buf *b, const char *text)
{
    return b->len && memmem(b->data, b->len, text, strlen(text)) != NULL;
}

static void probe_content(chat_template *c)
{
    buf s = {0}, l = {0};
    bool as_string = probe(c, "[{\"role\":\"user\",\"content\":\"Qzv7\"}]", &s) && has(&s, "Qzv7");
    bool as_parts =
        probe(c, "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"Qzv7\"}]}]", &l) &&
        has(&l, "Qzv7");
    c->parts = as_string && as_parts && s.len == l.len && !memcmp(s.data, l.data, s.len);
    c->only_parts = as_parts && !as_string && !has(&l, "'type'") && !has(&l, "\"type\"");
    buf_free(&s);
    buf_free(&l);
}

static bool probe_call(const chat_template *c, const char *content, const char *arguments, buf *out)
{
    char *text = xasprintf(
        "[{\"role\":\"user\",\"content\":%s},{\"role\":\"assistant\",\"content\":%s,\"tool_calls\":"
        "[{\"id\":\"call00001\",\"type\":\"function\",\"function\":{\"name\":\"fn_qzv\","
        "\"arguments\":"
        "%s}}]},{\"role\":\"tool\",\"tool_call_id\":\"call00001\",\"name\":\"fn_qzv\",\"content\":%"
        "s}]",
        c->only_parts ? "[{\"type\":\"text\",\"text\":\"a\"}]" : "\"a\"", content, arguments,
        c->only_parts ? "[{\"type\":\"text\",\"text\":\"b\"}]" : "\"b\"");
    bool ok = probe(c, text, out);
    free(text);
    return ok;
}

static void probe_tools(chat_template *c)
{
    static const char object[] = "{\"arg_qzv\":\"v\"}",
                      string[] = "\"{\\\"arg_qzv\\\": \\\"v\\\"}\"";
    buf b = {0};
    c->objects = probe_call(c, "\"\"", object, &b) && has(&b, "arg_qzv") && !has(&b, "'arg_qzv'");
    if (!has(&b, "fn_qzv")) {
        bool found = probe_call(c, "null", object, &b) && has(&b, "fn_qzv") && !has(&b, "None");
        if (found) c->objects = has(&b, "arg_qzv") && !has(&b, "'arg_qzv'");
        if (!found)
            found = probe_call(c, "null", string, &b) && has(&b, "fn_qzv") && !has(&b, "None");
        bool plain = found && probe_call(c, "\"\"", string, &b) && has(&b, "fn_qzv");
        c->null_content = found && !plain;
    }
    buf_free(&b);
}

/* ---- opening ---- */

int chat_template_open(chat_template **out, const char *text, size_t n, const char *where, err *e)
{
    chat_template *c = xcalloc(1, sizeof(*c));
    c->t.a = arena_make();
    c->t.where = arena_strdup(c->t.a, where ? where : "chat template");
    int rc = j_parse(&c->t, text, n, e);
    if (rc < 0) {
        chat_template_close(c);
        return rc;
    }
    c->developer = n && memmem(text, n, "developer", 9) != NULL;
    probe_content(c);
    probe_tools(c);
    *out = c;
    return 0;
}

void chat_template_close(chat_template *c)
{
    if (!c) return;
    arena_drop(c->t.a);
    free(c);
}

void chat_template_fix_clock(chat_template *c, int64_t unix_seconds)
{
    c->t.clock_fixed = true;
    c->t.clock = unix_seconds;
}

/* ---- messages ---- */

static void set_item(json *object, const char *key, json *v)
{
    if (cJSON_GetObjectItemCaseSensitive(object, key))
        cJSON_ReplaceItemInObjectCaseSensitive(object, key, v);
    else
        cJSON_AddItemToObject(object, key, v);
}

/* Appends a part's text; a part that is not text is refused. */
static int part_text(const json *part, int i, buf *text, err *e)
{
    const json *type = json_get(part, "type");
    const char *kind = cJSON_IsString(type) ? type->valuestring : "text";
    bool refusal = !strcmp(kind, "refusal");
    const json *t = json_get(part, refusal ? "refusal" : "text");
    if (cJSON_IsString(part)) t = part;
    if (strcmp(kind, "text") != 0 && strcmp(kind, "input_text") != 0 && !refusal)
        return err_set(
            e, ERR_VALUE,
            "messages[%d].content: parts of type '%.60s' are not supported; send text parts", i,
            kind);
    if (!cJSON_IsString(t))
        return err_set(e, ERR_VALUE, "messages[%d].content: a text part without text", i);
    buf_puts(text, t->valuestring);
    return 0;
}

static json *one_part(const char *text)
{
    json *list = cJSON_CreateArray(), *part = cJSON_CreateObject();
    cJSON_AddStringToObject(part, "type", "text");
    cJSON_AddStringToObject(part, "text", text);
    cJSON_AddItemToArray(list, part);
    return list;
}

static int fix_content(const chat_template *c, json *m, int i, err *e)
{
    const json *content = json_get(m, "content"), *part;
    const json *calls = json_get(m, "tool_calls");
    bool has_calls = cJSON_IsArray(calls) && calls->child;
    int rc = 0;
    buf text = {0};
    if (cJSON_IsArray(content)) {
        cJSON_ArrayForEach(part, content) TRY(part_text(part, i, &text, e));
        if ((c->parts || c->only_parts) && content->child) goto out;
    } else if (cJSON_IsString(content)) {
        if (c->only_parts) set_item(m, "content", one_part(content->valuestring));
        if (c->only_parts || content->valuestring[0]) goto out;
    } else if (content && !cJSON_IsNull(content)) {
        TRY(err_set(e, ERR_VALUE, "messages[%d].content must be a string, null or a list of parts",
                    i));
    }
    if (text.len)
        set_item(m, "content", cJSON_CreateString(text.data));
    else if (c->null_content && has_calls)
        set_item(m, "content", cJSON_CreateNull());
    else
        set_item(m, "content", cJSON_CreateString(""));
out:
    buf_free(&text);
    return rc;
}

/* Arguments that are the text of a JSON object become that object. */
static void fix_arguments(json *m)
{
    json *calls = cJSON_GetObjectItemCaseSensitive(m, "tool_calls"), *call;
    cJSON_ArrayForEach(call, calls)
    {
        json *fn = cJSON_GetObjectItemCaseSensitive(call, "function");
        json *args = cJSON_GetObjectItemCaseSensitive(fn ? fn : call, "arguments"), *parsed = NULL;
        err ignored = {0};
        if (!cJSON_IsString(args)) continue;
        const char *text = args->valuestring[0] ? args->valuestring : "{}";
        if (json_parse(&parsed, text, strlen(text), "arguments", &ignored) < 0) continue;
        if (cJSON_IsObject(parsed))
            set_item(fn ? fn : call, "arguments", parsed);
        else
            json_drop(parsed);
    }
}

static int fix_message(const chat_template *c, json *m, int i, err *e)
{
    if (!cJSON_IsObject(m)) return err_set(e, ERR_VALUE, "messages[%d] must be an object", i);
    const json *role = json_get(m, "role");
    if (!cJSON_IsString(role))
        return err_set(e, ERR_VALUE, "messages[%d].role must be a string", i);
    if (!c->developer && !strcmp(role->valuestring, "developer"))
        set_item(m, "role", cJSON_CreateString("system"));
    const json *calls = json_get(m, "tool_calls");
    if (calls && (cJSON_IsNull(calls) || (cJSON_IsArray(calls) && !calls->child)))
        cJSON_DeleteItemFromObjectCaseSensitive(m, "tool_calls");
    if (c->objects) fix_arguments(m);
    return fix_content(c, m, i, e);
}

/* ---- rendering ---- */

static int is_deep(const json *x, int depth)
{
    if (depth > JSON_MAX_DEPTH) return 1;
    for (const json *k = x ? x->child : NULL; k; k = k->next)
        if (is_deep(k, depth + 1)) return 1;
    return 0;
}

int chat_render_raw(const chat_template *c, const json *context, buf *out, err *e)
{
    return jinja_render(&c->t, context, J_MAX_STEPS, J_MAX_BYTES, out, e);
}

int chat_render(const chat_template *c, const json *messages, const json *extra,
                bool add_generation_prompt, const char *bos, const char *eos, buf *out, err *e)
{
    int rc = 0, i = 0;
    json *copy = NULL, *context = cJSON_CreateObject(), *m;
    if (!cJSON_IsArray(messages)) TRY(err_set(e, ERR_VALUE, "messages must be a list"));
    if (is_deep(messages, 0) || is_deep(extra, 0))
        TRY(err_set(e, ERR_VALUE, "messages or tools are nested too deep"));
    copy = cJSON_Duplicate(messages, 1);
    if (!copy) TRY(err_set(e, ERR_NOMEM, "no memory for a copy of the messages"));
    cJSON_ArrayForEach(m, copy) TRY(fix_message(c, m, i++, e));
    cJSON_AddNullToObject(context, "tools");
    cJSON_AddNullToObject(context, "documents");
    for (const json *k = extra ? extra->child : NULL; k; k = k->next)
        if (k->string) cJSON_AddItemReferenceToObject(context, k->string, (json *)(uintptr_t)k);
    cJSON_AddItemReferenceToObject(context, "messages", copy);
    cJSON_AddBoolToObject(context, "add_generation_prompt", add_generation_prompt);
    if (bos) cJSON_AddStringToObject(context, "bos_token", bos);
    if (eos) cJSON_AddStringToObject(context, "eos_token", eos);
    TRY(jinja_render(&c->t, context, J_MAX_STEPS, J_MAX_BYTES, out, e));
out:
    json_drop(context);
    json_drop(copy);
    return rc;
}
