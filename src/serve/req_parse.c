/* From a JSON body to a gen_request: what both kinds of generation share, and the prompt of
 * /v1/completions (string, list of strings, list of ids, list of lists of ids).
 *
 * Every id is checked against the model's vocabulary before it is narrowed, every length against
 * the context before anything is queued. Fields that ask for something tare does not do are refused
 * by name; unknown fields are ignored. */
#include "serve/serve_int.h"
#include "text/literal.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define MAX_STOP_IDS              1024
#define MAX_BIAS                  4096
#define DEFAULT_COMPLETION_TOKENS 16

void serve__gen_request_free(gen_request *r)
{
    for (int64_t i = 0; i < r->n_prompts; i++) {
        ids_free(&r->prompts[i].ids);
        buf_free(&r->prompts[i].text);
    }
    free(r->prompts);
    free(r->model);
    free(r->stop_ids);
    free(r->bias_ids);
    free(r->bias);
    json_drop(r->body);
    *r = (gen_request){0};
}

/* ---- model --------------------------------------------------------------------------------------
 */

static void list_names(const struct server *s, buf *out)
{
    for (int i = 0; i < s->n_names; i++)
        buf_printf(out, "%s'%.100s'", i ? ", " : "", s->names[i]);
}

int serve__parse_model(const struct server *s, const json *body, const char **name, fault *f)
{
    const char *want = NULL;
    if (serve__field_str(body, "model", &want, f) < 0) return -1;
    *name = s->names[0];
    if (!want || !*want) return 0;
    for (int i = 0; i < s->n_names; i++)
        if (!strcmp(want, s->names[i])) {
            *name = s->names[i];
            return 0;
        }
    buf list = {0}, shown = {0};
    list_names(s, &list);
    buf_printf(&shown, "%.200s", want);
    serve__fault_set(f, 404, "model", "The model '%s' does not exist; this server has %s.",
                     shown.data, list.data);
    f->code = "model_not_found";
    buf_free(&list);
    buf_free(&shown);
    return -1;
}

/* ---- ids ----------------------------------------------------------------------------------------
 */

static int check_id(const struct server *s, double d, const char *param, fault *f)
{
    if (!isfinite(d) || d != floor(d))
        return serve__fault_set(f, 400, param, "'%s' must hold integer token ids; found %g.", param,
                                d);
    if (d < 0 || d >= (double)s->vocab)
        return serve__fault_set(
            f, 400, param, "'%s' holds token id %.0f; the model's vocabulary has ids 0 to %lld.",
            param, d, (long long)s->vocab - 1);
    return 0;
}

int serve__parse_ids(const struct server *s, const json *arr, const char *param, ids *out, fault *f)
{
    for (const json *v = arr->child; v; v = v->next) {
        if (!cJSON_IsNumber(v))
            return serve__fault_set(f, 400, param, "'%s' must hold integer token ids only.", param);
        if (check_id(s, v->valuedouble, param, f) < 0) return -1;
        ids_push(out, (int32_t)v->valuedouble);
    }
    return 0;
}

/* ---- sampling -----------------------------------------------------------------------------------
 */

static int parse_seed(const buf *body, const json *j, sample_opts *o, fault *f)
{
    const json *v = json_get(j, "seed");
    if (!v || cJSON_IsNull(v)) return 0;
    int64_t seed = 0;
    size_t n = 0;
    const char *raw =
        cJSON_IsNumber(v) ? serve__raw_number(body->data, body->len, "seed", &n) : NULL;
    char text[32];
    if (raw && n < sizeof text && !memchr(raw, '.', n) && !memchr(raw, 'e', n) &&
        !memchr(raw, 'E', n)) {
        memcpy(text, raw, n);
        text[n] = 0;
        errno = 0;
        seed = strtoll(text, NULL, 10);
        if (errno) raw = NULL;
    } else {
        raw = NULL;
    }
    if (!raw && serve__field_int(j, "seed", -(1ll << 53), 1ll << 53, &seed, f) < 0) return -1;
    o->has_seed = true;
    o->seed = seed;
    return 0;
}

static int parse_sampling(const buf *body, const json *j, gen_request *r, fault *f)
{
    sample_opts *o = &r->p.sample;
    if (serve__field_num(j, "temperature", 0, 100, &o->temperature, f) < 0 ||
        serve__field_num(j, "top_p", 0, 1, &o->top_p, f) < 0 ||
        serve__field_num(j, "min_p", 0, 1, &o->min_p, f) < 0 ||
        serve__field_num(j, "repetition_penalty", 0.001, 100, &o->repetition_penalty, f) < 0 ||
        serve__field_num(j, "presence_penalty", -2, 2, &o->presence_penalty, f) < 0 ||
        serve__field_num(j, "frequency_penalty", -2, 2, &o->frequency_penalty, f) < 0 ||
        serve__field_int(j, "top_k", -1, 1ll << 53, &o->top_k, f) < 0)
        return -1;
    if (o->top_p <= 0) o->top_p = 1e-9; /* 0 keeps the one best token */
    return parse_seed(body, j, o, f);
}

static int parse_bias(const struct server *s, const json *j, gen_request *r, fault *f)
{
    const json *m = json_get(j, "logit_bias");
    if (!m || cJSON_IsNull(m)) return 0;
    if (!cJSON_IsObject(m))
        return serve__fault_set(f, 400, "logit_bias",
                                "'logit_bias' must be an object {id: number}.");
    int n = cJSON_GetArraySize(m);
    if (n > MAX_BIAS)
        return serve__fault_set(f, 400, "logit_bias", "'logit_bias' has %d entries; at most %d.", n,
                                MAX_BIAS);
    r->bias_ids = xcalloc((size_t)n + 1, sizeof *r->bias_ids);
    r->bias = xcalloc((size_t)n + 1, sizeof *r->bias);
    n = 0;
    for (const json *v = m->child; v; v = v->next) {
        char *end;
        errno = 0;
        long long id = strtoll(v->string, &end, 10);
        if (!v->string[0] || strchr(" \t\n+", v->string[0]) || *end || errno)
            return serve__fault_set(f, 400, "logit_bias",
                                    "'logit_bias' has the key '%.40s'; keys are token ids.",
                                    v->string);
        if (check_id(s, (double)id, "logit_bias", f) < 0) return -1;
        if (!cJSON_IsNumber(v) || !(v->valuedouble >= -100 && v->valuedouble <= 100))
            return serve__fault_set(f, 400, "logit_bias",
                                    "'logit_bias' of token %lld must be a number from -100 to 100.",
                                    id);
        r->bias_ids[n] = (int32_t)id;
        r->bias[n++] = (float)v->valuedouble;
    }
    r->p.sample.bias_ids = r->bias_ids;
    r->p.sample.bias = r->bias;
    r->p.sample.n_bias = n;
    return 0;
}

/* ---- stopping -----------------------------------------------------------------------------------
 */

static int add_stop(gen_request *r, const json *v, fault *f)
{
    if (!cJSON_IsString(v))
        return serve__fault_set(f, 400, "stop", "'stop' must be a string or a list of strings.");
    if (!v->valuestring[0])
        return serve__fault_set(f, 400, "stop", "'stop' must not hold an empty string.");
    if (r->p.n_stops == REQ_MAX_STOPS)
        return serve__fault_set(f, 400, "stop", "'stop' holds more than %d strings.",
                                REQ_MAX_STOPS);
    r->p.stops[r->p.n_stops++] = v->valuestring;
    return 0;
}

static int parse_stops(const struct server *s, const json *j, gen_request *r, fault *f)
{
    const json *v = json_get(j, "stop");
    if (v && cJSON_IsArray(v)) {
        for (const json *i = v->child; i; i = i->next)
            if (add_stop(r, i, f) < 0) return -1;
    } else if (v && !cJSON_IsNull(v) && add_stop(r, v, f) < 0) {
        return -1;
    }
    v = json_get(j, "stop_token_ids");
    if (!v || cJSON_IsNull(v)) return 0;
    if (!cJSON_IsArray(v))
        return serve__fault_set(f, 400, "stop_token_ids",
                                "'stop_token_ids' must be a list of token ids.");
    ids list = {0};
    int rc = serve__parse_ids(s, v, "stop_token_ids", &list, f);
    r->stop_ids = list.v;
    r->p.stop_ids = list.v;
    r->p.n_stop_ids = list.n <= MAX_STOP_IDS ? (int)list.n : MAX_STOP_IDS;
    if (rc == 0 && list.n > MAX_STOP_IDS)
        return serve__fault_set(f, 400, "stop_token_ids",
                                "'stop_token_ids' holds more than %d ids.", MAX_STOP_IDS);
    return rc;
}

/* ---- everything else ----------------------------------------------------------------------------
 */

static int parse_stream(const json *j, gen_request *r, fault *f)
{
    if (serve__field_bool(j, "stream", &r->stream, f) < 0) return -1;
    const json *o = json_get(j, "stream_options");
    if (!o || cJSON_IsNull(o)) return 0;
    if (!cJSON_IsObject(o))
        return serve__fault_set(f, 400, "stream_options", "'stream_options' must be an object.");
    if (!r->stream)
        return serve__fault_set(f, 400, "stream_options", "'stream_options' needs 'stream': true.");
    if (serve__field_bool(o, "include_usage", &r->include_usage, f) < 0) return -1;
    return serve__field_bool(o, "continuous_usage_stats", &r->continuous_usage, f) < 0 ? -1 : 0;
}

static int parse_format(const json *j, fault *f)
{
    const json *o = json_get(j, "response_format");
    if (!o || cJSON_IsNull(o)) return 0;
    const char *type = "";
    if (!cJSON_IsObject(o))
        return serve__fault_set(f, 400, "response_format", "'response_format' must be an object.");
    if (serve__field_str(o, "type", &type, f) < 0) return -1;
    if (!strcmp(type, "text")) return 0;
    return serve__fault_set(f, 400, "response_format",
                            "'response_format' of type '%.40s' is not supported; only 'text' is.",
                            type);
}

/* Fields that change what the answer means: ignoring them would be a silent lie. */
static int refuse_unsupported(const json *j, fault *f)
{
    static const char *const names[] = {"prompt_logprobs", "guided_json",    "guided_regex",
                                        "guided_choice",   "guided_grammar", "structured_outputs",
                                        "chat_template",   "prompt_embeds"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const json *v = json_get(j, names[i]);
        if (v && !cJSON_IsNull(v) && !cJSON_IsFalse(v))
            return serve__fault_set(f, 400, names[i], "'%s' is not supported by this server.",
                                    names[i]);
    }
    const char *suffix = NULL;
    if (serve__field_str(j, "suffix", &suffix, f) < 0) return -1;
    if (suffix && *suffix)
        return serve__fault_set(f, 400, "suffix", "'suffix' is not supported by this server.");
    const json *beam = json_get(j, "use_beam_search");
    if (beam && cJSON_IsTrue(beam))
        return serve__fault_set(f, 400, "use_beam_search", "'use_beam_search' is not supported.");
    return 0;
}

static int parse_counts(const json *j, gen_request *r, fault *f)
{
    int64_t best = 1, newer = -1;
    r->n = 1;
    r->max_tokens = -1;
    if (serve__field_int(j, "n", 1, SERVE_MAX_N, &r->n, f) < 0 ||
        serve__field_int(j, "max_tokens", 0, 1ll << 40, &r->max_tokens, f) < 0 ||
        serve__field_int(j, "max_completion_tokens", 0, 1ll << 40, &newer, f) < 0 ||
        serve__field_int(j, "min_tokens", 0, 1ll << 40, &r->p.min_tokens, f) < 0)
        return -1;
    if (newer >= 0) r->max_tokens = newer;
    int has = serve__field_int(j, "best_of", 1, SERVE_MAX_N, &best, f);
    if (has < 0) return -1;
    if (has && best != r->n)
        return serve__fault_set(f, 400, "best_of",
                                "'best_of' is supported only when it equals 'n'.");
    if (r->max_tokens >= 0 && r->p.min_tokens > r->max_tokens)
        return serve__fault_set(f, 400, "min_tokens", "'min_tokens' is larger than 'max_tokens'.");
    return 0;
}

static int parse_flags(const json *j, gen_request *r, fault *f)
{
    bool skip = true;
    if (serve__field_bool(j, "ignore_eos", &r->p.ignore_eos, f) < 0 ||
        serve__field_bool(j, "include_stop_str_in_output", &r->p.include_stop, f) < 0 ||
        serve__field_bool(j, "skip_special_tokens", &skip, f) < 0 ||
        serve__field_bool(j, "return_tokens_as_token_ids", &r->token_ids_as_text, f) < 0 ||
        serve__field_bool(j, "return_token_ids", &r->return_token_ids, f) < 0)
        return -1;
    r->p.keep_special = !skip;
    r->p.continues = !r->chat;
    const char *salt = NULL;
    if (serve__field_str(j, "cache_salt", &salt, f) < 0) return -1;
    if (salt && *salt) r->p.cache_salt = XXH3_64bits(salt, strlen(salt));
    return 0;
}

int serve__parse_common(const struct server *s, const buf *body, gen_request *r, fault *f)
{
    const char *name;
    req_params_default(&r->p);
    sample_opts_default(&r->p.sample);
    r->logprobs = -1;
    r->p.want = WANT_TOKENS;
    if (serve__parse_body(body, &r->body, f) < 0) return -1;
    if (serve__parse_model(s, r->body, &name, f) < 0) return -1;
    r->model = xstrdup(name);
    if (refuse_unsupported(r->body, f) < 0 || parse_format(r->body, f) < 0 ||
        parse_stream(r->body, r, f) < 0 || parse_counts(r->body, r, f) < 0 ||
        parse_sampling(body, r->body, r, f) < 0 || parse_bias(s, r->body, r, f) < 0 ||
        parse_stops(s, r->body, r, f) < 0)
        return -1;
    return parse_flags(r->body, r, f);
}

static int too_long(const struct server *s, int64_t prompt, int64_t more, const char *param,
                    fault *f)
{
    serve__fault_set(
        f, 400, param,
        "This model's maximum context length is %lld tokens, but %lld were requested (%lld "
        "in the prompt, %lld to generate); shorten the prompt or ask for fewer tokens.",
        (long long)s->max_len, (long long)(prompt + more), (long long)prompt, (long long)more);
    f->code = "context_length_exceeded";
    return -1;
}

int serve__parse_lengths(const struct server *s, gen_request *r, int64_t default_tokens, fault *f)
{
    const char *param = r->chat ? "messages" : "prompt";
    bool given = r->max_tokens >= 0;
    if (!given) r->max_tokens = default_tokens;
    for (int64_t i = 0; i < r->n_prompts; i++) {
        int64_t n = (int64_t)r->prompts[i].ids.n;
        int64_t room = s->max_len - n;
        if (n == 0)
            return serve__fault_set(f, 400, param,
                                    "'%s' has no tokens (entry %lld); it must hold at least one.",
                                    param, (long long)i);
        int64_t want = given ? r->max_tokens : r->p.min_tokens > 1 ? r->p.min_tokens : 1;
        if (r->max_tokens == 0) want = 0;
        if (want > room)
            return too_long(s, n, want, given && n < s->max_len ? "max_tokens" : param, f);
        if (!given && r->max_tokens > room) r->max_tokens = room;
    }
    return 0;
}

/* ---- text ---------------------------------------------------------------------------------------
 */

int serve__parse_literal(const struct server *s, const json *body, bool *literal, fault *f)
{
    const char *how = NULL;
    err e = {0};
    *literal = s->o.literal;
    int has = serve__field_str(body, "control_tokens_in_text", &how, f);
    if (has <= 0) return has;
    return literal_parse(how, literal, &e) < 0 ? serve__fault_err(f, "control_tokens_in_text", &e)
                                               : 0;
}

int serve__encode_text(const struct server *s, const char *text, size_t n, bool special,
                       bool literal, const char *param, ids *out, fault *f)
{
    const tokenizer *t = engine_tokenizer(s->en);
    if (!t)
        return serve__fault_set(f, 400, param,
                                "This model has no tokenizer: send token ids in 'prompt'.");
    /* Normalizers shrink text at most about threefold; beyond four times the longest token for each
     * position, no tokenizing is needed to know that the text is too long. */
    size_t limit;
    if (mem_mul((size_t)s->max_len, s->max_token_bytes * 4, &limit) && n > limit) {
        serve__fault_set(
            f, 400, param,
            "'%s' has %zu bytes; this model's maximum context length of %lld tokens cannot "
            "hold more than %zu.",
            param, n, (long long)s->max_len, limit);
        f->code = "context_length_exceeded";
        return -1;
    }
    err e = {0};
    if ((literal ? tokenizer_encode_literal : tokenizer_encode)(t, text, n, special, out, &e) < 0)
        return serve__fault_err(f, param, &e);
    return 0;
}

/* ---- completions --------------------------------------------------------------------------------
 */

static int add_text_prompt(const struct server *s, gen_request *r, const json *v, bool special,
                           fault *f)
{
    bool literal;
    if (serve__parse_literal(s, r->body, &literal, f) < 0) return -1;
    if (!cJSON_IsString(v))
        return serve__fault_set(
            f, 400, "prompt",
            "'prompt' must be a string, a list of strings, a list of token ids, or a "
            "list of lists of token ids.");
    gen_prompt *p = &r->prompts[r->n_prompts++];
    size_t n = strlen(v->valuestring);
    if (serve__encode_text(s, v->valuestring, n, special, literal, "prompt", &p->ids, f) < 0)
        return -1;
    if (!r->echo) return 0;
    const tokenizer *t = engine_tokenizer(s->en);
    const char *bos = tokenizer_bos_text(t);
    size_t nb = strlen(bos);
    buf_add(&p->text, v->valuestring, n);
    if (p->ids.n && p->ids.v[0] == tokenizer_bos(t) && (!nb || strncmp(v->valuestring, bos, nb)))
        p->n_lead = 1;
    return 0;
}

static int add_id_prompt(const struct server *s, gen_request *r, const json *arr, fault *f)
{
    gen_prompt *p = &r->prompts[r->n_prompts++];
    if (serve__parse_ids(s, arr, "prompt", &p->ids, f) < 0) return -1;
    const tokenizer *t = engine_tokenizer(s->en);
    if (r->echo && t) tokenizer_decode(t, p->ids.v, p->ids.n, false, &p->text);
    return 0;
}

static int parse_prompts(const struct server *s, gen_request *r, fault *f)
{
    const json *v = json_get(r->body, "prompt");
    bool special = true;
    if (serve__field_bool(r->body, "add_special_tokens", &special, f) < 0) return -1;
    if (!v || cJSON_IsNull(v)) return serve__fault_set(f, 400, "prompt", "'prompt' is missing.");
    const json *first = cJSON_IsArray(v) ? v->child : NULL;
    int64_t count = first && !cJSON_IsNumber(first) ? cJSON_GetArraySize(v) : 1;
    if (count * r->n > SERVE_MAX_CHOICES)
        return serve__fault_set(f, 400, "prompt",
                                "%lld prompts times n = %lld is more than %d choices.",
                                (long long)count, (long long)r->n, SERVE_MAX_CHOICES);
    r->prompts = xcalloc((size_t)count, sizeof *r->prompts);
    if (!cJSON_IsArray(v)) return add_text_prompt(s, r, v, special, f);
    if (!first) return serve__fault_set(f, 400, "prompt", "'prompt' is an empty list.");
    if (cJSON_IsNumber(first)) return add_id_prompt(s, r, v, f);
    for (const json *i = first; i; i = i->next)
        if ((cJSON_IsArray(i) ? add_id_prompt(s, r, i, f) : add_text_prompt(s, r, i, special, f)) <
            0)
            return -1;
    return 0;
}

static int truncate_prompts(gen_request *r, fault *f)
{
    int64_t keep = 0;
    int has = serve__field_int(r->body, "truncate_prompt_tokens", 1, 1ll << 40, &keep, f);
    if (has <= 0) return has;
    if (r->echo)
        return serve__fault_set(f, 400, "truncate_prompt_tokens",
                                "'truncate_prompt_tokens' cannot be combined with 'echo'.");
    for (int64_t i = 0; i < r->n_prompts; i++) {
        ids *l = &r->prompts[i].ids;
        size_t k = (size_t)keep;
        if (l->n <= k) continue;
        memmove(l->v, l->v + (l->n - k), k * sizeof *l->v);
        l->n = k;
    }
    return 0;
}

int serve__parse_completion(const struct server *s, const buf *body, gen_request *r, fault *f)
{
    if (serve__parse_common(s, body, r, f) < 0 ||
        serve__field_bool(r->body, "echo", &r->echo, f) < 0 ||
        serve__field_int(r->body, "logprobs", 0, REQ_MAX_TOP, &r->logprobs, f) < 0 ||
        parse_prompts(s, r, f) < 0 || truncate_prompts(r, f) < 0 ||
        serve__parse_lengths(s, r, DEFAULT_COMPLETION_TOKENS, f) < 0)
        return -1;
    if (r->logprobs >= 0) {
        r->p.want |= WANT_LOGPROBS | (r->echo ? (unsigned)WANT_PROMPT_LOGPROBS : 0u);
        r->p.top_logprobs = (int)r->logprobs;
    }
    cJSON_DeleteItemFromObjectCaseSensitive(r->body, "prompt");
    return 0;
}
