/* The small routes: models, tokenizer, health, version, server_info. */
#include "serve/serve_int.h"
#include "base/thread.h"
#include "base/utf8.h"
#include <string.h>

/* ---- models -------------------------------------------------------------------------------------
 */

static void write_model(const struct server *s, jw *w, const char *name)
{
    jw_obj(w);
    jw_kstr(w, "id", name);
    jw_kstr(w, "object", "model");
    jw_ki64(w, "created", s->created);
    jw_kstr(w, "owned_by", "tare");
    jw_kstr(w, "root", s->model_path);
    jw_kstr(w, "parent", NULL);
    jw_ki64(w, "max_model_len", s->max_len);
    jw_key(w, "permission");
    jw_arr(w);
    jw_end_arr(w);
    jw_end_obj(w);
}

enum MHD_Result serve__models(exchange *x)
{
    buf out = {0};
    jw w;
    jw_init(&w, &out, 0);
    jw_obj(&w);
    jw_kstr(&w, "object", "list");
    jw_key(&w, "data");
    jw_arr(&w);
    for (int i = 0; i < x->s->n_names; i++)
        write_model(x->s, &w, x->s->names[i]);
    jw_end_arr(&w);
    jw_end_obj(&w);
    return serve__reply_json(x, 200, &out);
}

enum MHD_Result serve__model(exchange *x)
{
    const struct server *s = x->s;
    for (int i = 0; i < s->n_names; i++)
        if (!strcmp(x->rest, s->names[i])) {
            buf out = {0};
            jw w;
            jw_init(&w, &out, 0);
            write_model(s, &w, s->names[i]);
            return serve__reply_json(x, 200, &out);
        }
    fault f = {0};
    json *j = cJSON_CreateObject();
    const char *name;
    cJSON_AddStringToObject(j, "model", x->rest);
    if (serve__parse_model(s, j, &name, &f) == 0)
        serve__fault_set(&f, 404, "model", "There is no such model.");
    json_drop(j);
    return serve__reply_fault(x, &f);
}

/* ---- tokenizer ----------------------------------------------------------------------------------
 */

static int tokenize_ids(const struct server *s, const json *body, ids *out, fault *f)
{
    const char *text = NULL, *name;
    bool special = true, literal;
    if (serve__parse_model(s, body, &name, f) < 0) return -1;
    if (json_get(body, "messages")) return serve__chat_ids(s, body, out, f);
    if (serve__field_bool(body, "add_special_tokens", &special, f) < 0) return -1;
    if (serve__parse_literal(s, body, &literal, f) < 0) return -1;
    int has = serve__field_str(body, "prompt", &text, f);
    if (has == 0) has = serve__field_str(body, "content", &text, f);
    if (has < 0) return -1;
    if (!has)
        return serve__fault_set(f, 400, "prompt", "'prompt' (a string) or 'messages' is missing.");
    return serve__encode_text(s, text, strlen(text), special, literal, "prompt", out, f);
}

static void write_token_strs(const struct server *s, jw *w, const ids *l)
{
    jw_key(w, "token_strs");
    jw_arr(w);
    for (size_t i = 0; i < l->n; i++) {
        const char *name = tokenizer_token_name(engine_tokenizer(s->en), l->v[i]);
        jw_str(w, name ? name : "");
    }
    jw_end_arr(w);
}

enum MHD_Result serve__tokenize(exchange *x)
{
    json *body = NULL;
    fault f = {0};
    ids l = {0};
    buf out = {0};
    bool strs = false;
    jw w;
    int rc = serve__parse_body(&x->body, &body, &f);
    if (rc == 0 && serve__field_bool(body, "return_token_strs", &strs, &f) < 0) rc = -1;
    if (rc == 0) rc = tokenize_ids(x->s, body, &l, &f);
    if (rc == 0) {
        jw_init(&w, &out, 0);
        jw_obj(&w);
        jw_ki64(&w, "count", (int64_t)l.n);
        jw_ki64(&w, "max_model_len", x->s->max_len);
        jw_key(&w, "tokens");
        jw_arr(&w);
        for (size_t i = 0; i < l.n; i++)
            jw_i64(&w, l.v[i]);
        jw_end_arr(&w);
        if (strs)
            write_token_strs(x->s, &w, &l);
        else
            jw_kstr(&w, "token_strs", NULL);
        jw_end_obj(&w);
    }
    json_drop(body);
    ids_free(&l);
    return rc < 0 ? serve__reply_fault(x, &f) : serve__reply_json(x, 200, &out);
}

static int detokenize(const struct server *s, const json *body, buf *text, fault *f)
{
    const json *v = json_get(body, "tokens");
    const tokenizer *t = engine_tokenizer(s->en);
    const char *name;
    ids l = {0};
    bool skip = false;
    if (serve__parse_model(s, body, &name, f) < 0) return -1;
    if (!t) return serve__fault_set(f, 400, "tokens", "This model has no tokenizer.");
    if (!v || !cJSON_IsArray(v))
        return serve__fault_set(f, 400, "tokens", "'tokens' must be a list of token ids.");
    if (serve__field_bool(body, "skip_special_tokens", &skip, f) < 0) return -1;
    int rc = serve__parse_ids(s, v, "tokens", &l, f);
    if (rc == 0) tokenizer_decode(t, l.v, l.n, skip, text);
    ids_free(&l);
    return rc;
}

enum MHD_Result serve__detokenize(exchange *x)
{
    json *body = NULL;
    fault f = {0};
    buf text = {0}, out = {0};
    jw w;
    int rc = serve__parse_body(&x->body, &body, &f);
    if (rc == 0) rc = detokenize(x->s, body, &text, &f);
    if (rc == 0) {
        jw_init(&w, &out, 0);
        jw_obj(&w);
        jw_key(&w, "prompt");
        jw_strn(&w, text.data ? text.data : "", text.len);
        jw_end_obj(&w);
    }
    json_drop(body);
    buf_free(&text);
    return rc < 0 ? serve__reply_fault(x, &f) : serve__reply_json(x, 200, &out);
}

/* As tokenizer_config.json has it: a text, or with a second one for tools a list of both. */
static void write_chat_template(jw *w, const chat_template *c)
{
    const char *tools = c ? chat_template_tools_text(c) : NULL;
    if (!tools) {
        jw_kstr(w, "chat_template", c ? chat_template_text(c) : NULL);
        return;
    }
    const char *const names[] = {"default", "tool_use"};
    const char *const texts[] = {chat_template_text(c), tools};
    jw_key(w, "chat_template");
    jw_arr(w);
    for (int i = 0; i < 2; i++) {
        jw_obj(w);
        jw_kstr(w, "name", names[i]);
        jw_kstr(w, "template", texts[i]);
        jw_end_obj(w);
    }
    jw_end_arr(w);
}

/* What evaluation harnesses ask of a remote tokenizer. */
enum MHD_Result serve__tokenizer_info(exchange *x)
{
    const tokenizer *t = engine_tokenizer(x->s->en);
    fault f = {0};
    if (!t) {
        serve__fault_set(&f, 404, "", "This model has no tokenizer.");
        return serve__reply_fault(x, &f);
    }
    buf out = {0};
    jw w;
    const char *eos = tokenizer_eos_text(t), *bos = tokenizer_bos_text(t);
    jw_init(&w, &out, 0);
    jw_obj(&w);
    jw_kstr(&w, "tokenizer_class", "TareTokenizer");
    jw_kstr(&w, "eos_token", *eos ? eos : NULL);
    jw_kstr(&w, "bos_token", *bos ? bos : NULL);
    jw_kstr(&w, "pad_token", *eos ? eos : NULL);
    jw_ki64(&w, "vocab_size", tokenizer_size(t));
    jw_ki64(&w, "model_max_length", x->s->max_len);
    jw_kbool(&w, "add_bos_token", tokenizer_adds_bos(t));
    write_chat_template(&w, engine_chat(x->s->en));
    jw_end_obj(&w);
    return serve__reply_json(x, 200, &out);
}

/* ---- the server itself
 * --------------------------------------------------------------------------- */

enum MHD_Result serve__health(exchange *x)
{
    bool draining = atomic_load(&x->s->draining);
    buf out = {0};
    buf_puts(&out, draining ? "{\"status\":\"draining\"}" : "{\"status\":\"ok\"}");
    return serve__reply_json(x, draining ? 503 : 200, &out);
}

enum MHD_Result serve__version(exchange *x)
{
    buf out = {0};
    buf_puts(&out, "{\"version\":\"" SERVE_VERSION "\"}");
    return serve__reply_json(x, 200, &out);
}

enum MHD_Result serve__index(exchange *x)
{
    buf out = {0};
    for (int i = 0; i < serve__n_routes; i++) {
        const route *r = &serve__routes[i];
        buf_printf(&out, "%-5s%s%s  %s\n", r->method, r->path, r->prefix ? "{id}" : "", r->help);
    }
    return serve__reply(x, 200, "text/plain; charset=utf-8", &out);
}

static void write_info(jw *w, const engine_info *i)
{
    jw_kstr(w, "model_path", i->model);
    jw_kstr(w, "architecture", i->architecture);
    jw_kstr(w, "scheme", i->spec);
    jw_kstr(w, "activation", i->activation);
    jw_kstr(w, "kv_cache_dtype", i->kv_dtype);
    jw_kstr(w, "device", i->device);
    jw_kstr(w, "cpu_features", i->cpu_features);
    jw_kstr(w, "origin", i->origin[0] ? i->origin : NULL);
    jw_ki64(w, "threads", i->threads);
    jw_ki64(w, "weight_bytes", (int64_t)i->weight_bytes);
    jw_ki64(w, "kv_bytes_per_token", (int64_t)i->kv_bytes_per_token);
    jw_ki64(w, "kv_pool_bytes", (int64_t)i->kv_pool_bytes);
    jw_ki64(w, "workspace_bytes", (int64_t)i->workspace_bytes);
    jw_ki64(w, "predicted_bytes", (int64_t)i->predicted_bytes);
    jw_ki64(w, "actual_bytes", (int64_t)i->actual_bytes);
    jw_ki64(w, "max_total_num_tokens", i->kv_tokens);
    jw_kbool(w, "prefix_cache", i->prefix_cache);
    jw_ki64(w, "max_model_len", i->max_len);
    jw_ki64(w, "max_running_requests", i->max_running);
    jw_ki64(w, "vocab_size", i->vocab);
    jw_kf64(w, "load_seconds", i->load_seconds);
}

enum MHD_Result serve__server_info(exchange *x)
{
    engine_info info;
    engine_stats st;
    buf out = {0};
    jw w;
    engine_get_info(x->s->en, &info);
    engine_get_stats(x->s->en, &st);
    jw_init(&w, &out, 0);
    jw_obj(&w);
    jw_kstr(&w, "version", SERVE_VERSION);
    jw_kstr(&w, "served_model_name", x->s->names[0]);
    jw_kstr(&w, "system_fingerprint", x->s->fingerprint);
    jw_kstr(&w, "status", atomic_load(&x->s->draining) ? "draining" : "ready");
    write_info(&w, &info);
    jw_key(&w, "internal_states");
    jw_arr(&w);
    jw_obj(&w);
    jw_ki64(&w, "running", st.running);
    jw_ki64(&w, "waiting", st.waiting);
    jw_ki64(&w, "kv_pages_used", st.kv_pages_used);
    jw_ki64(&w, "kv_pages_total", st.kv_pages_total);
    jw_ki64(&w, "prompt_tokens", (int64_t)st.prompt_tokens);
    jw_ki64(&w, "cached_tokens", (int64_t)st.cached_tokens);
    jw_ki64(&w, "output_tokens", (int64_t)st.output_tokens);
    jw_kf64(&w, "avg_spec_accept_length", 1.0);
    jw_end_obj(&w);
    jw_end_arr(&w);
    jw_end_obj(&w);
    return serve__reply_json(x, 200, &out);
}
