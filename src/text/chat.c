/* Chat templates: opening, what a template can take, and rendering of OpenAI-style messages.
 *
 * Templates differ in what they expect of a message, and clients send all forms. At open, a few
 * short conversations with marked texts are rendered, and what comes out says what the template
 * can take (what fails to render counts as "cannot"):
 *   parts      content given as a list of text parts renders as the joined text would
 *   only parts content given as a string is lost, as parts it is there
 *   objects    arguments of a tool call come out right when given as an object
 *   null       a tool call is lost beside content "", and is there beside content null
 * chat_render brings a copy of the messages into that form: keys that are null are dropped, null or
 * missing content becomes "", parts are joined, arguments parsed, and the role developer becomes
 * system where the template's text does not know it. Parts other than text are refused by name,
 * and arguments that are no JSON object where the template needs one.
 *
 * To continue the last message, a mark is put behind its text before rendering, and what the
 * template makes is cut at the mark. */
#include <stdlib.h>
#include <string.h>
#include "text/chat.h"
#include "text/jinja_internal.h"

#define PROBE_STEPS 400000
#define PROBE_BYTES ((size_t)16 << 20)

#define CONTINUE_MARK "CONTINUE_FINAL_MESSAGE_TAG " /* transformers' own */

struct chat_template {
    jtmpl t;
    const char *text;            /* the source, in t's arena */
    struct chat_template *tools; /* for requests with tools, or NULL */
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
    c->text = arena_strndup(c->t.a, text, n);
    c->developer = n && memmem(text, n, "developer", 9) != NULL;
    probe_content(c);
    probe_tools(c);
    *out = c;
    return 0;
}

void chat_template_close(chat_template *c)
{
    if (!c) return;
    chat_template_close(c->tools);
    arena_drop(c->t.a);
    free(c);
}

int chat_template_add_tools(chat_template *c, const char *text, size_t n, const char *where, err *e)
{
    chat_template *tools = NULL;
    int rc = chat_template_open(&tools, text, n, where, e);
    if (rc < 0) return rc;
    chat_template_close(c->tools);
    c->tools = tools;
    return 0;
}

const char *chat_template_text(const chat_template *c)
{
    return c->text;
}

const char *chat_template_tools_text(const chat_template *c)
{
    return c->tools ? c->tools->text : NULL;
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
static int fix_arguments(json *m, int i, err *e)
{
    json *calls = cJSON_GetObjectItemCaseSensitive(m, "tool_calls"), *call;
    int k = -1;
    cJSON_ArrayForEach(call, calls)
    {
        json *fn = cJSON_GetObjectItemCaseSensitive(call, "function");
        json *args = cJSON_GetObjectItemCaseSensitive(fn ? fn : call, "arguments"), *parsed = NULL;
        err why = {0};
        k++;
        if (!cJSON_IsString(args)) continue;
        const char *text =
            args->valuestring[strspn(args->valuestring, " \t\r\n")] ? args->valuestring : "{}";
        if (json_parse_exact(&parsed, text, strlen(text), "arguments", &why) < 0)
            return err_set(e, ERR_VALUE,
                           "messages[%d].tool_calls[%d].function.arguments must be the text of a "
                           "JSON object: %.200s",
                           i, k, why.msg);
        if (!cJSON_IsObject(parsed)) {
            json_drop(parsed);
            return err_set(e, ERR_VALUE,
                           "messages[%d].tool_calls[%d].function.arguments must be the text of a "
                           "JSON object",
                           i, k);
        }
        set_item(fn ? fn : call, "arguments", parsed);
    }
    return 0;
}

/* Keys that are null are as good as missing; content has a rule of its own. */
static void drop_nulls(json *m)
{
    for (json *k = m->child, *next; k; k = next) {
        next = k->next;
        if (cJSON_IsNull(k) && strcmp(k->string, "content") != 0)
            json_drop(cJSON_DetachItemViaPointer(m, k));
    }
}

/* Reasoning comes under any of three names; templates read the first or the second. */
static void fix_reasoning(json *m)
{
    static const char *const names[] = {"reasoning_content", "thinking", "reasoning"};
    const json *found = NULL;
    for (int i = 0; i < 3 && !found; i++)
        found = json_get(m, names[i]);
    for (int i = 0; i < 2 && found; i++)
        if (!json_get(m, names[i])) set_item(m, names[i], cJSON_Duplicate(found, 1));
}

static int fix_message(const chat_template *c, json *m, int i, err *e)
{
    if (!cJSON_IsObject(m)) return err_set(e, ERR_VALUE, "messages[%d] must be an object", i);
    const json *role = json_get(m, "role");
    if (!cJSON_IsString(role))
        return err_set(e, ERR_VALUE, "messages[%d].role must be a string", i);
    if (!c->developer && !strcmp(role->valuestring, "developer"))
        set_item(m, "role", cJSON_CreateString("system"));
    drop_nulls(m);
    fix_reasoning(m);
    const json *calls = json_get(m, "tool_calls");
    if (cJSON_IsArray(calls) && !calls->child)
        cJSON_DeleteItemFromObjectCaseSensitive(m, "tool_calls");
    int rc = c->objects ? fix_arguments(m, i, e) : 0;
    return rc < 0 ? rc : fix_content(c, m, i, e);
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

/* Puts the mark behind the text of the last message; *text is a copy of what was marked. */
static int mark_last(json *messages, char **text, err *e)
{
    json *last = NULL, *m, *content, *part;
    cJSON_ArrayForEach(m, messages) last = m;
    content = cJSON_GetObjectItemCaseSensitive(last, "content");
    if (cJSON_IsArray(content)) {
        json *parts = content;
        content = NULL;
        cJSON_ArrayForEach(part, parts)
        {
            json *t = cJSON_GetObjectItemCaseSensitive(part, "text");
            if (cJSON_IsString(t)) content = t;
        }
    }
    const char *s = cJSON_IsString(content) ? content->valuestring : "";
    if (!s[strspn(s, " \t\r\n")])
        return err_set(e, ERR_VALUE,
                       "'continue_final_message' needs text in the last message's content");
    *text = xasprintf("%s" CONTINUE_MARK, s);
    if (!cJSON_SetValuestring(content, *text))
        return err_set(e, ERR_NOMEM, "no memory for the last message");
    return 0;
}

static bool blank(char c)
{
    return c == ' ' || (c >= 9 && c <= 13);
}

/* Cuts out (from its byte `from` on) at the last mark. text: what was marked. */
static int cut_at_mark(buf *out, size_t from, const char *text, err *e)
{
    size_t k = strlen(CONTINUE_MARK), n = strlen(text) - k, lead = 0;
    const char *begin = out->data ? out->data + from : "", *hit = NULL;
    size_t len = out->len - from;
    for (const char *p = begin; (p = memmem(p, len - (size_t)(p - begin), CONTINUE_MARK, k - 1));
         p++)
        hit = p;
    while (n && blank(text[n - 1]))
        n--;
    while (lead < n && blank(text[lead]))
        lead++;
    if (!hit || !memmem(begin, len, text + lead, n - lead))
        return err_set(e, ERR_VALUE,
                       "the chat template does not repeat the last message as it is, so "
                       "'continue_final_message' cannot continue it");
    size_t at = (size_t)(hit - begin);
    bool kept = len - at >= k && hit[k - 1] == ' '; /* the mark's own space is still there */
    while (!kept && at && blank(begin[at - 1]))
        at--;
    out->len = from + at;
    out->data[out->len] = 0;
    return 0;
}

static int render(const chat_template *c, const json *messages, const json *extra, bool prompt,
                  bool go_on, const char *bos, const char *eos, buf *out, err *e)
{
    int rc = 0, i = 0;
    size_t from = out->len;
    char *marked = NULL;
    json *copy = NULL, *context = cJSON_CreateObject(), *m;
    if (!cJSON_IsArray(messages)) TRY(err_set(e, ERR_VALUE, "messages must be a list"));
    if (is_deep(messages, 0) || is_deep(extra, 0))
        TRY(err_set(e, ERR_VALUE, "messages or tools are nested deeper than the limit of %d",
                    JSON_MAX_DEPTH));
    const json *tools = json_get(extra, "tools");
    if (c->tools && tools && !cJSON_IsNull(tools)) c = c->tools;
    copy = cJSON_Duplicate(messages, 1);
    if (!copy) TRY(err_set(e, ERR_NOMEM, "no memory for a copy of the messages"));
    if (go_on) TRY(mark_last(copy, &marked, e));
    cJSON_ArrayForEach(m, copy) TRY(fix_message(c, m, i++, e));
    cJSON_AddNullToObject(context, "tools");
    cJSON_AddNullToObject(context, "documents");
    if (bos) cJSON_AddStringToObject(context, "bos_token", bos);
    if (eos) cJSON_AddStringToObject(context, "eos_token", eos);
    for (const json *k = extra ? extra->child : NULL; k; k = k->next)
        if (k->string) cJSON_AddItemReferenceToObject(context, k->string, (json *)(uintptr_t)k);
    cJSON_AddItemReferenceToObject(context, "messages", copy);
    cJSON_AddBoolToObject(context, "add_generation_prompt", prompt);
    TRY(jinja_render(&c->t, context, J_MAX_STEPS, J_MAX_BYTES, out, e));
    if (go_on) TRY(cut_at_mark(out, from, marked, e));
out:
    if (rc < 0) out->len = from;
    free(marked);
    json_drop(context);
    json_drop(copy);
    return rc;
}

int chat_render(const chat_template *c, const json *messages, const json *extra,
                bool add_generation_prompt, const char *bos, const char *eos, buf *out, err *e)
{
    return render(c, messages, extra, add_generation_prompt, false, bos, eos, out, e);
}

int chat_render_continued(const chat_template *c, const json *messages, const json *extra,
                          const char *bos, const char *eos, buf *out, err *e)
{
    return render(c, messages, extra, false, true, bos, eos, out, e);
}
