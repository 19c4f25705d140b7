/* Chat requests: messages are checked field by field, then rendered by the model's template and
 * encoded. What a template can take (parts or strings, role developer, arguments as objects) is the
 * template's business: chat_render brings messages into its form.
 *
 * continue_final_message renders without a generation prompt and ends right after the last
 * message's text (chat_render_continued), so that the model goes on writing it. */
#include "serve/serve_int.h"
#include "text/literal.h"
#include <string.h>

/* ---- messages -----------------------------------------------------------------------------------
 */

static int check_parts(const json *content, const char *param, fault *f)
{
    int i = 0;
    for (const json *p = content->child; p; p = p->next, i++) {
        const json *type = json_get(p, "type"), *t = json_get(p, "text");
        if (!cJSON_IsObject(p) || !cJSON_IsString(type))
            return serve__fault_set(f, 400, param,
                                    "'%s.content[%d]' must be an object with a 'type'.", param, i);
        if (strcmp(type->valuestring, "text") != 0 && strcmp(type->valuestring, "input_text") != 0)
            return serve__fault_set(
                f, 400, param, "'%s.content[%d]' is of type '%.40s'; this model takes text only.",
                param, i, type->valuestring);
        if (!cJSON_IsString(t))
            return serve__fault_set(f, 400, param, "'%s.content[%d].text' must be a string.", param,
                                    i);
    }
    return 0;
}

static int check_tool_calls(const json *message, const char *param, fault *f)
{
    const json *calls = json_get(message, "tool_calls");
    if (!calls || cJSON_IsNull(calls)) return 0;
    if (!cJSON_IsArray(calls))
        return serve__fault_set(f, 400, param, "'%s.tool_calls' must be a list.", param);
    for (const json *c = calls->child; c; c = c->next)
        if (!cJSON_IsString(json_get(json_get(c, "function"), "name")))
            return serve__fault_set(f, 400, param,
                                    "'%s.tool_calls' must hold functions with a name.", param);
    return 0;
}

static int check_message(const json *m, int i, fault *f)
{
    static const char *const roles[] = {"system", "user",      "assistant",
                                        "tool",   "developer", "function"};
    char param[48];
    snprintf(param, sizeof param, "messages[%d]", i);
    const json *role = json_get(m, "role"), *content = json_get(m, "content");
    if (!cJSON_IsObject(m))
        return serve__fault_set(f, 400, param, "'%s' must be an object.", param);
    if (!cJSON_IsString(role))
        return serve__fault_set(f, 400, param, "'%s.role' must be a string.", param);
    bool known = false;
    for (size_t k = 0; k < sizeof roles / sizeof *roles; k++)
        known = known || !strcmp(role->valuestring, roles[k]);
    if (!known)
        return serve__fault_set(
            f, 400, param,
            "'%s.role' is '%.40s'; it must be system, developer, user, assistant or "
            "tool.",
            param, role->valuestring);
    bool textless = !strcmp(role->valuestring, "assistant"); /* tool calls only */
    if (content && cJSON_IsArray(content)) {
        if (check_parts(content, param, f) < 0) return -1;
    } else if (content && !cJSON_IsString(content) && !cJSON_IsNull(content)) {
        return serve__fault_set(f, 400, param, "'%s.content' must be a string or a list of parts.",
                                param);
    } else if (!content && !textless) {
        return serve__fault_set(f, 400, param, "'%s.content' is missing.", param);
    }
    return check_tool_calls(m, param, f);
}

static int check_messages(const json *messages, fault *f)
{
    if (!messages || !cJSON_IsArray(messages))
        return serve__fault_set(f, 400, "messages", "'messages' must be a list of messages.");
    if (!messages->child) return serve__fault_set(f, 400, "messages", "'messages' is empty.");
    int i = 0;
    for (const json *m = messages->child; m; m = m->next, i++)
        if (check_message(m, i, f) < 0) return -1;
    return 0;
}

/* ---- what the template sees besides messages
 * ----------------------------------------------------- */

static int add_tools(const json *body, json *extra, fault *f)
{
    const json *tools = json_get(body, "tools"), *choice = json_get(body, "tool_choice");
    if (choice && cJSON_IsObject(choice))
        return serve__fault_set(
            f, 400, "tool_choice",
            "'tool_choice' cannot force a function here; use 'auto' or 'none'.");
    if (choice && cJSON_IsString(choice)) {
        if (!strcmp(choice->valuestring, "none")) return 0;
        if (strcmp(choice->valuestring, "auto") != 0)
            return serve__fault_set(f, 400, "tool_choice",
                                    "'tool_choice' '%.40s' is not supported; use 'auto' or 'none'.",
                                    choice->valuestring);
    }
    if (!tools || cJSON_IsNull(tools)) return 0;
    if (!cJSON_IsArray(tools)) return serve__fault_set(f, 400, "tools", "'tools' must be a list.");
    for (const json *t = tools->child; t; t = t->next)
        if (!cJSON_IsObject(t))
            return serve__fault_set(f, 400, "tools", "'tools' must hold objects.");
    if (tools->child) cJSON_AddItemToObject(extra, "tools", cJSON_Duplicate(tools, true));
    return 0;
}

static int make_extra(const json *body, json **out, fault *f)
{
    static const char *const own[] = {"messages", "add_generation_prompt", "tools"};
    const json *kw = json_get(body, "chat_template_kwargs"), *docs = json_get(body, "documents");
    if (kw && !cJSON_IsNull(kw) && !cJSON_IsObject(kw))
        return serve__fault_set(f, 400, "chat_template_kwargs",
                                "'chat_template_kwargs' must be an object.");
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (json_get(kw, own[i]))
            return serve__fault_set(
                f, 400, "chat_template_kwargs",
                "'chat_template_kwargs' must not set '%s'; it is a field of its own.", own[i]);
    const char *effort = NULL;
    if (serve__field_str(body, "reasoning_effort", &effort, f) < 0) return -1;
    json *extra = *out =
        kw && cJSON_IsObject(kw) ? cJSON_Duplicate(kw, true) : cJSON_CreateObject();
    if (effort && !json_get(extra, "reasoning_effort"))
        cJSON_AddStringToObject(extra, "reasoning_effort", effort);
    if (docs && cJSON_IsArray(docs) && !json_get(extra, "documents"))
        cJSON_AddItemToObject(extra, "documents", cJSON_Duplicate(docs, true));
    return add_tools(body, extra, f);
}

/* ---- rendering ----------------------------------------------------------------------------------
 */

static void content_text(const json *message, buf *out)
{
    const json *c = json_get(message, "content");
    if (cJSON_IsString(c)) buf_puts(out, c->valuestring);
    for (const json *p = cJSON_IsArray(c) ? c->child : NULL; p; p = p->next)
        buf_puts(out, json_get(p, "text")->valuestring);
}

static int render_continued(const struct server *s, const json *messages, const json *extra,
                            ids *out, fault *f)
{
    const tokenizer *t = engine_tokenizer(s->en);
    buf text = {0};
    err e = {0};
    int rc = chat_render_continued(engine_chat(s->en), messages, extra, tokenizer_bos_text(t),
                                   tokenizer_eos_text(t), &text, &e);
    if (rc < 0)
        serve__fault_err(f, "messages", &e);
    else
        rc = serve__encode_text(s, text.data, text.len, false, false, "messages", out, f);
    buf_free(&text);
    return rc < 0 ? -1 : 0;
}

static size_t text_bytes(const json *messages)
{
    size_t n = 0;
    buf text = {0};
    for (const json *m = messages->child; m; m = m->next) {
        buf_clear(&text);
        content_text(m, &text);
        n += text.len;
    }
    buf_free(&text);
    return n;
}

/* As in serve__encode_text: what cannot fit is refused before it is rendered and tokenized. */
static int check_bytes(const struct server *s, const json *messages, fault *f)
{
    size_t limit, n = text_bytes(messages);
    if (!mem_mul((size_t)s->max_len, s->max_token_bytes * 4, &limit) || n <= limit) return 0;
    serve__fault_set(
        f, 400, "messages",
        "'messages' hold %zu bytes; this model's maximum context length of %lld tokens cannot "
        "hold more than %zu.",
        n, (long long)s->max_len, limit);
    f->code = "context_length_exceeded";
    return -1;
}

int serve__chat_ids(const struct server *s, const json *body, ids *out, fault *f)
{
    bool prompt_after = true, go_on = false, literal;
    const json *messages = json_get(body, "messages");
    json *extra = NULL;
    err e = {0};
    if (!engine_chat(s->en) || !engine_tokenizer(s->en))
        return serve__fault_set(
            f, 400, "messages",
            "This model has no chat template; use /v1/completions, or start the "
            "server with --chat-template.");
    if (check_messages(messages, f) < 0 || check_bytes(s, messages, f) < 0) return -1;
    int given = serve__field_bool(body, "add_generation_prompt", &prompt_after, f);
    if (given < 0 || serve__field_bool(body, "continue_final_message", &go_on, f) < 0) return -1;
    if (serve__parse_literal(s, body, &literal, f) < 0) return -1;
    if (go_on && given && prompt_after)
        return serve__fault_set(
            f, 400, "continue_final_message",
            "'continue_final_message' and 'add_generation_prompt' exclude each other.");
    int rc = make_extra(body, &extra, f);
    if (rc == 0 && go_on && !literal)
        rc = render_continued(s, messages, extra, out, f);
    else if (rc == 0 &&
             (literal ? literal_chat_ids(engine_chat(s->en), engine_tokenizer(s->en), messages,
                                         extra, prompt_after, go_on, out, &e)
                      : engine_chat_ids(s->en, messages, extra, prompt_after, out, &e)) < 0)
        rc = serve__fault_err(f, "messages", &e);
    json_drop(extra);
    return rc;
}

static int parse_logprobs(gen_request *r, fault *f)
{
    bool on = false;
    int64_t top = 0;
    if (serve__field_bool(r->body, "logprobs", &on, f) < 0) return -1;
    int has = serve__field_int(r->body, "top_logprobs", 0, REQ_MAX_TOP, &top, f);
    if (has < 0) return -1;
    if (has && top > 0 && !on)
        return serve__fault_set(f, 400, "top_logprobs", "'top_logprobs' needs 'logprobs': true.");
    if (!on) return 0;
    r->logprobs = top;
    r->p.top_logprobs = (int)top;
    r->p.want |= WANT_LOGPROBS;
    return 0;
}

int serve__parse_chat(const struct server *s, const buf *body, gen_request *r, fault *f)
{
    r->chat = true;
    if (serve__parse_common(s, body, r, f) < 0 || parse_logprobs(r, f) < 0) return -1;
    r->prompts = xcalloc(1, sizeof *r->prompts);
    r->n_prompts = 1;
    if (serve__chat_ids(s, r->body, &r->prompts[0].ids, f) < 0 ||
        serve__parse_lengths(s, r, -1, f) < 0)
        return -1;
    cJSON_DeleteItemFromObjectCaseSensitive(r->body, "messages");
    cJSON_DeleteItemFromObjectCaseSensitive(r->body, "tools");
    return 0;
}
