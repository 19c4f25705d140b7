/* The face that other threads see: submit, cancel, questions about the engine, and the blocking
 * generate. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "engine/engine_internal.h"

static int bad_id(const char *what, int64_t at, int64_t id, int64_t vocab, err *e)
{
    return err_set(e, ERR_VALUE, "%s[%lld]: token id %lld is outside the vocabulary (0 to %lld)",
                   what, (long long)at, (long long)id, (long long)vocab - 1);
}

static int check_sampling(const engine *en, const sample_opts *s, err *e)
{
    if (!(s->temperature >= 0 && s->temperature <= 100))
        return err_set(e, ERR_VALUE, "temperature: %g is not between 0 and 100", s->temperature);
    if (!(s->top_p > 0 && s->top_p <= 1))
        return err_set(e, ERR_VALUE, "top_p: %g is not above 0 and at most 1", s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return err_set(e, ERR_VALUE, "min_p: %g is not between 0 and 1", s->min_p);
    if (!(s->repetition_penalty > 0 && s->repetition_penalty <= 100))
        return err_set(e, ERR_VALUE, "repetition_penalty: %g is not above 0",
                       s->repetition_penalty);
    if (!(fabs(s->presence_penalty) <= 100))
        return err_set(e, ERR_VALUE, "presence_penalty: %g is out of range", s->presence_penalty);
    if (!(fabs(s->frequency_penalty) <= 100))
        return err_set(e, ERR_VALUE, "frequency_penalty: %g is out of range", s->frequency_penalty);
    for (int i = 0; i < s->n_bias; i++) {
        if (s->bias_ids[i] < 0 || s->bias_ids[i] >= en->vocab)
            return bad_id("logit_bias", i, s->bias_ids[i], en->vocab, e);
        if (!isfinite(s->bias[i]))
            return err_set(e, ERR_VALUE, "logit_bias: the bias of token %d is not finite",
                           s->bias_ids[i]);
    }
    return 0;
}

static int check_params(const engine *en, const req_params *p, err *e)
{
    if (p->n_prompt < 1)
        return err_set(e, ERR_VALUE, "prompt: is empty; at least one token is needed");
    for (int64_t i = 0; i < p->n_prompt; i++)
        if (p->prompt[i] < 0 || p->prompt[i] >= en->vocab)
            return bad_id("prompt", i, p->prompt[i], en->vocab, e);
    if (p->max_tokens < 0)
        return err_set(e, ERR_VALUE, "max_tokens: %lld is negative", (long long)p->max_tokens);
    if (p->assume_cached && !en->o.shape)
        return err_set(e, ERR_USAGE, "only the prompts of a shape may count as computed");
    if (p->n_prompt > en->max_len || p->max_tokens > en->max_len - p->n_prompt) {
        int64_t total =
            p->max_tokens < INT64_MAX - p->n_prompt ? p->n_prompt + p->max_tokens : INT64_MAX;
        return err_set(e, ERR_TOOLONG,
                       "This model's maximum context length is %lld tokens, but %lld were "
                       "requested (%lld in the prompt, %lld to generate); shorten either",
                       (long long)en->max_len, (long long)total, (long long)p->n_prompt,
                       (long long)p->max_tokens);
    }
    if (p->n_stops < 0 || p->n_stops > REQ_MAX_STOPS)
        return err_set(e, ERR_VALUE, "stop: at most %d strings", REQ_MAX_STOPS);
    if (p->top_logprobs < 0 || p->top_logprobs > REQ_MAX_TOP)
        return err_set(e, ERR_VALUE, "top_logprobs: %d is not between 0 and %d", p->top_logprobs,
                       REQ_MAX_TOP);
    for (int i = 0; i < p->n_stop_ids; i++)
        if (p->stop_ids[i] < 0 || p->stop_ids[i] >= en->vocab)
            return bad_id("stop_token_ids", i, p->stop_ids[i], en->vocab, e);
    return check_sampling(en, &p->sample, e);
}

int engine_submit(engine *en, const req_params *p, uint64_t *id, err *e)
{
    int rc = check_params(en, p, e);
    if (rc < 0) return rc;
    request *r = engine__request_make(en, p);
    pthread_mutex_lock(&en->lock);
    if (en->refuse)
        rc = err_set(e, ERR_BADSTATE, "the server is stopping; no new request is taken");
    else if (en->n_queued >= en->o.max_queued + en->max_running - en->stats.running)
        rc = err_set(e, ERR_BUSY, "The request queue is full (%lld waiting); try again later",
                     (long long)en->n_queued);
    if (rc == 0) {
        r->id = *id = ++en->next_id;
        if (en->inbox_last)
            en->inbox_last->next = r;
        else
            en->inbox = r;
        en->inbox_last = r;
        en->n_queued++;
        en->stats.waiting = en->n_queued;
        pthread_cond_signal(&en->wake);
    }
    pthread_mutex_unlock(&en->lock);
    if (rc < 0) engine__request_free(r);
    return rc;
}

void engine_cancel(engine *en, uint64_t id)
{
    pthread_mutex_lock(&en->lock);
    if (en->n_cancels == en->cap_cancels)
        en->cancels = xrealloc(en->cancels,
                               sizeof *en->cancels *
                                   (en->cap_cancels = en->cap_cancels ? 2 * en->cap_cancels : 16));
    en->cancels[en->n_cancels++] = id;
    pthread_cond_signal(&en->wake);
    pthread_mutex_unlock(&en->lock);
}

void engine_get_stats(engine *en, engine_stats *out)
{
    pthread_mutex_lock(&en->lock);
    *out = en->stats;
    pthread_mutex_unlock(&en->lock);
}

const tokenizer *engine_tokenizer(const engine *en)
{
    return en->tok;
}
const chat_template *engine_chat(const engine *en)
{
    return en->chat;
}
int64_t engine_vocab(const engine *en)
{
    return en->vocab;
}
int64_t engine_max_len(const engine *en)
{
    return en->max_len;
}
void engine_get_info(const engine *en, engine_info *out)
{
    *out = en->info;
}

const int32_t *engine_eos(const engine *en, int *n)
{
    *n = en->n_eos;
    return en->eos;
}

int engine_chat_ids(const engine *en, const json *messages, const json *extra,
                    bool generation_prompt, ids *out, err *e)
{
    buf text = {0};
    if (!en->chat)
        return err_set(
            e, ERR_UNSUPPORTED,
            "this model has no chat template; use /v1/completions, or give one by --chat-template");
    if (!en->tok)
        return err_set(e, ERR_UNSUPPORTED,
                       "this model has no tokenizer; send token ids to /v1/completions");
    int rc = chat_render(en->chat, messages, extra, generation_prompt, tokenizer_bos_text(en->tok),
                         tokenizer_eos_text(en->tok), &text, e);
    /* The template writes its own BOS, so none is added: as transformers' apply_chat_template does.
     */
    if (rc == 0)
        rc = tokenizer_encode(en->tok, text.data ? text.data : "", text.len, false, out, e);
    buf_free(&text);
    return rc;
}

char *engine_report(const engine *en)
{
    static const char *const bucket[KERN_BUCKETS] = {"1", "2-8", "9-64", "more"};
    buf b = {0};
    const model_report_line *l;
    int n = model_report(en->m, &l);
    buf_puts(
        &b,
        "kernels (layers, spec, rows of input: kernel, input as; why faster ones were refused)");
    for (int i = 0; i < n; i++) {
        buf_printf(&b, "\n  %-14s %s", l[i].what, l[i].spec);
        for (int k = 0; k < KERN_BUCKETS; k++) {
            const kern_choice *c = &l[i].choice[k];
            if (k && !strcmp(c->row, l[i].choice[k - 1].row) &&
                !strcmp(c->act, l[i].choice[k - 1].act) &&
                !strcmp(c->plan, l[i].choice[k - 1].plan))
                continue;
            buf_printf(&b, "\n      %-5s %s, %s%s%s%s%s%s", bucket[k], c->row, c->act,
                       *c->plan ? ", " : "", c->plan, c->reference ? " [reference]" : "",
                       *c->refused ? "; " : "", c->refused);
        }
    }
    return b.data;
}

/* ---- blocking generate --------------------------------------------------------------------------
 */

typedef struct waiter {
    gen_result *out;
    engine_sink *also;
    void *also_arg;
    pthread_mutex_t lock;
    pthread_cond_t done;
    bool over;
    err e;
} waiter;

static void add_logprobs(token_logprob **list, size_t *n, const token_logprob *v, size_t k)
{
    *list = xrealloc(*list, sizeof *v * (*n + k));
    memcpy(*list + *n, v, sizeof *v * k);
    *n += k;
}

static void collect(void *arg, const engine_event *ev)
{
    waiter *w = arg;
    gen_result *o = w->out;
    if (ev->kind == EV_PROMPT && ev->logprobs)
        add_logprobs(&o->prompt_logprobs, &o->n_prompt_logprobs, ev->logprobs, (size_t)ev->n);
    if (ev->kind == EV_TOKEN) {
        ids_push(&o->out, ev->token);
        if (ev->logprobs) add_logprobs(&o->logprobs, &o->n_logprobs, ev->logprobs, 1);
    }
    if (ev->kind == EV_TOKEN || ev->kind == EV_DONE) buf_add(&o->text, ev->text, ev->text_len);
    if (w->also) w->also(w->also_arg, ev);
    if (ev->kind != EV_DONE) return;
    pthread_mutex_lock(&w->lock);
    o->reason = ev->reason;
    o->prompt_tokens = ev->prompt_tokens;
    o->cached_tokens = ev->cached_tokens;
    o->output_tokens = ev->output_tokens;
    o->ttft_s = ev->ttft_s;
    o->total_s = ev->total_s;
    if (ev->error) w->e = *ev->error;
    w->over = true;
    pthread_cond_signal(&w->done);
    pthread_mutex_unlock(&w->lock);
}

int engine_generate(engine *en, const req_params *p, gen_result *out, err *e)
{
    waiter w = {.out = out, .also = p->sink, .also_arg = p->sink_arg};
    req_params q = *p;
    uint64_t id;
    *out = (gen_result){0};
    pthread_mutex_init(&w.lock, NULL);
    pthread_cond_init(&w.done, NULL);
    q.sink = collect;
    q.sink_arg = &w;
    int rc = engine_submit(en, &q, &id, e);
    if (rc == 0) {
        pthread_mutex_lock(&w.lock);
        while (!w.over)
            pthread_cond_wait(&w.done, &w.lock);
        pthread_mutex_unlock(&w.lock);
        if (w.e.code) {
            if (e) *e = w.e;
            rc = -w.e.code;
        }
    }
    pthread_mutex_destroy(&w.lock);
    pthread_cond_destroy(&w.done);
    return rc;
}

void gen_result_free(gen_result *r)
{
    ids_free(&r->out);
    buf_free(&r->text);
    free(r->logprobs);
    free(r->prompt_logprobs);
    *r = (gen_result){0};
}
