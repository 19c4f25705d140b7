/* tare run: one answer for -p, or a conversation on the terminal (or from a pipe, a line a turn).
 * Text is printed as it is generated; statistics go to standard error. */
#include "cli/options.h"
#include "base/log.h"
#include "text/literal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void sampling(const opts *o, req_params *p)
{
    const opt_val *v = o->v;
    req_params_default(p);
    p->want = WANT_TOKENS;
    p->max_tokens = v[OPT_max_tokens].i;
    p->sample.temperature = v[OPT_temperature].f;
    p->sample.top_p = v[OPT_top_p].f;
    p->sample.top_k = v[OPT_top_k].i;
    p->sample.min_p = v[OPT_min_p].f;
    p->sample.repetition_penalty = v[OPT_repetition_penalty].f;
    p->sample.has_seed = v[OPT_seed].given;
    p->sample.seed = v[OPT_seed].i;
    p->n_stops = v[OPT_stop].n_list < REQ_MAX_STOPS ? v[OPT_stop].n_list : REQ_MAX_STOPS;
    for (int i = 0; i < p->n_stops; i++)
        p->stops[i] = v[OPT_stop].list[i];
}

/* Messages array for one turn: history is kept as JSON so that the template sees what the API
 * would. */
static void add_message(json *messages, const char *role, const char *content)
{
    cJSON *m = cJSON_CreateObject();
    cJSON_AddStringToObject(m, "role", role);
    cJSON_AddStringToObject(m, "content", content);
    cJSON_AddItemToArray(messages, m);
}

static const char *reason_text(finish_reason r)
{
    return r == FINISH_STOP ? "stop" : r == FINISH_LENGTH ? "length" : "error";
}

/* Prints pieces as they come. The sink runs on the engine thread; stdio locks the stream. */
static void print_sink(void *arg, const engine_event *ev)
{
    (void)arg;
    if ((ev->kind == EV_TOKEN || ev->kind == EV_DONE) && ev->text_len) {
        fwrite(ev->text, 1, ev->text_len, stdout);
        fflush(stdout);
    }
}

static int answer(const opts *o, engine *en, const ids *prompt, gen_result *r, err *e)
{
    req_params p;
    sampling(o, &p);
    p.prompt = prompt->v;
    p.n_prompt = (int64_t)prompt->n;
    p.continues = o->v[OPT_raw].given || !engine_chat(en);
    int64_t room = engine_max_len(en) - p.n_prompt;
    if (p.max_tokens > room && room > 0) p.max_tokens = room;
    if (!o->v[OPT_json].given) p.sink = print_sink;
    return engine_generate(en, &p, r, e);
}

static int encode_turn(const opts *o, engine *en, const json *messages, const char *text, ids *out,
                       err *e)
{
    const tokenizer *t = engine_tokenizer(en);
    bool literal;
    int rc = literal_parse(o->v[OPT_control_tokens].s, &literal, e);
    if (rc < 0) return rc;
    if (o->v[OPT_raw].given || !engine_chat(en)) {
        if (!t)
            return err_set(e, ERR_UNSUPPORTED,
                           "this model has no tokenizer: use `tare dump` with token ids");
        return (literal ? tokenizer_encode_literal : tokenizer_encode)(t, text, strlen(text), true,
                                                                       out, e);
    }
    if (literal) return literal_chat_ids(engine_chat(en), t, messages, NULL, true, false, out, e);
    return engine_chat_ids(en, messages, NULL, true, out, e);
}

static void answer_json(const gen_result *r, jw *w)
{
    jw_obj(w);
    jw_key(w, "text");
    jw_strn(w, r->text.data ? r->text.data : "", r->text.len);
    jw_kstr(w, "finish_reason", reason_text(r->reason));
    jw_ki64(w, "prompt_tokens", r->prompt_tokens);
    jw_ki64(w, "cached_tokens", r->cached_tokens);
    jw_ki64(w, "output_tokens", r->output_tokens);
    jw_kf64(w, "ttft_ms", r->ttft_s * 1e3);
    jw_kf64(w, "tpot_ms",
            r->output_tokens > 1 ? (r->total_s - r->ttft_s) * 1e3 / (double)(r->output_tokens - 1)
                                 : 0);
    jw_end_obj(w);
}

static int one_turn(const opts *o, engine *en, json *messages, const char *text, jw *w, err *e)
{
    int rc = 0;
    ids prompt = {0};
    gen_result r = {0};
    add_message(messages, "user", text);
    TRY(encode_turn(o, en, messages, text, &prompt, e));
    TRY(answer(o, en, &prompt, &r, e));
    add_message(messages, "assistant", r.text.data ? r.text.data : "");
    if (o->v[OPT_json].given) {
        answer_json(&r, w);
    } else {
        putchar('\n');
        fflush(stdout); /* before the line on standard error, where both go to one place */
        double tpot =
            r.output_tokens > 1 ? (r.total_s - r.ttft_s) / (double)(r.output_tokens - 1) : 0;
        log_info("%lld prompt tokens (%lld cached), %lld generated, TTFT %.1f ms, TPOT %.2f ms, "
                 "finish: %s",
                 (long long)r.prompt_tokens, (long long)r.cached_tokens, (long long)r.output_tokens,
                 r.ttft_s * 1e3, tpot * 1e3, reason_text(r.reason));
    }
    rc = 0;
out:
    ids_free(&prompt);
    gen_result_free(&r);
    return rc;
}

static int converse(const opts *o, engine *en, json *messages, jw *w, err *e)
{
    int rc = 0;
    char *line = NULL;
    size_t cap = 0;
    bool tty = isatty(0);
    if (tty) fprintf(stderr, "Type a message; an empty line or Ctrl-D ends.\n");
    for (;;) {
        if (tty) fprintf(stderr, "> ");
        ssize_t n = getline(&line, &cap, stdin);
        if (n <= 0) break;
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r'))
            line[--n] = 0;
        if (n == 0) break;
        TRY(one_turn(o, en, messages, line, w, e));
    }
    rc = 0;
out:
    free(line);
    return rc;
}

int cmd_run(const opts *o, err *e)
{
    int rc = 0;
    engine *en = NULL;
    engine_opts eo;
    const char *model;
    buf out = {0}; /* --json: printed when all is well, one object */
    jw w;
    json *messages = cJSON_CreateArray();
    TRY(opts_model(o, &model, e));
    opts_engine(o, o->v, model, &eo);
    eo.max_running = 1;
    TRY(engine_open(&en, &eo, e));
    if (o->v[OPT_system].given) add_message(messages, "system", o->v[OPT_system].s);
    jw_init(&w, &out, 0);
    if (o->v[OPT_prompt].given) {
        TRY(one_turn(o, en, messages, o->v[OPT_prompt].s, &w, e));
    } else {
        jw_obj(&w);
        jw_key(&w, "turns");
        jw_arr(&w);
        TRY(converse(o, en, messages, &w, e));
        jw_end_arr(&w);
        jw_end_obj(&w);
    }
    if (o->v[OPT_json].given) {
        buf_putc(&out, '\n');
        cli_print(&out);
    }
    rc = 0;
out:
    buf_free(&out);
    json_drop(messages);
    engine_close(en, 0);
    return rc;
}
