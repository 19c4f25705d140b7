/* Requests in the air. The calling thread submits and grades; events arrive on the engine thread,
 * which only adds numbers and bytes to the shot and, at the end, links it into the landed list.
 *
 * Invariant: between submit and landing a shot belongs to the engine thread; before and after, to
 * the caller. eval__air_free returns only when nothing flies, so shots may be freed after it.
 *
 * A position is counted once: prompt log-probabilities that are sent again (a request that was
 * preempted and computed anew) are skipped by next_pos, and a gap makes the shot fail instead of
 * being summed over. */
#include "eval/local.h"
#include <math.h>
#include <stdlib.h>

void eval__air_init(air *a, engine *en)
{
    engine_info info;
    engine_get_info(en, &info);
    *a = (air){.en = en};
    /* Twice what runs at once: the scheduler always has a next one. */
    a->most = 2 * (info.max_running > 0 ? info.max_running : 1);
    pthread_mutex_init(&a->lock, NULL);
    pthread_cond_init(&a->landed, NULL);
}

void eval__air_free(air *a)
{
    while (a->flying > 0)
        eval__air_wait(a);
    pthread_cond_destroy(&a->landed);
    pthread_mutex_destroy(&a->lock);
}

void eval__shot_free(shot *s)
{
    ids_free(&s->prompt);
    ids_free(&s->alts);
    free(s->alt_logprob);
    buf_free(&s->text);
}

static void take_logprobs(shot *s, const engine_event *ev)
{
    for (int64_t i = 0; i < ev->n && ev->logprobs; i++) {
        int64_t pos = ev->pos + i;
        if (pos != s->next_pos) continue;
        s->next_pos++;
        if (pos < s->n_context || ev->logprobs[i].none) continue;
        s->logprob += (double)ev->logprobs[i].logprob;
        s->n_scored++;
    }
}

/* The last row of the prompt scores every alternative: ln softmax over the whole vocabulary. */
static void take_logits(shot *s, const engine_event *ev)
{
    int64_t row = (int64_t)s->prompt.n - 1 - ev->pos;
    if (row < 0 || row >= ev->n || s->n_scored) return;
    const float *x = ev->logits + row * ev->vocab;
    double max = -INFINITY, sum = 0;
    for (int64_t i = 0; i < ev->vocab; i++)
        max = (double)x[i] > max ? (double)x[i] : max;
    for (int64_t i = 0; i < ev->vocab; i++)
        sum += exp((double)x[i] - max);
    for (size_t k = 0; k < s->alts.n; k++)
        s->alt_logprob[k] =
            s->alts.v[k] < ev->vocab ? (double)x[s->alts.v[k]] - max - log(sum) : -INFINITY;
    s->n_scored = (int64_t)s->prompt.n - s->n_context;
}

static void land(shot *s, const engine_event *ev)
{
    air *a = s->air;
    s->reason = ev->reason;
    if (ev->reason == FINISH_ERROR) {
        if (ev->error) s->error = *ev->error;
        if (!s->error.code) err_set(&s->error, ERR_FAIL, "the engine failed without a message");
    } else if (ev->reason == FINISH_CANCELLED) {
        err_set(&s->error, ERR_CANCELLED, "the request was cancelled");
    } else if (s->score && s->n_scored != (int64_t)s->prompt.n - s->n_context) {
        err_set(&s->error, ERR_FAIL, "the engine scored %lld of %lld tokens",
                (long long)s->n_scored, (long long)((int64_t)s->prompt.n - s->n_context));
    }
    pthread_mutex_lock(&a->lock);
    s->next = NULL;
    if (a->tail)
        a->tail->next = s;
    else
        a->head = s;
    a->tail = s;
    pthread_cond_signal(&a->landed);
    pthread_mutex_unlock(&a->lock);
}

static void sink(void *arg, const engine_event *ev)
{
    shot *s = arg;
    if (ev->kind == EV_PROMPT) take_logprobs(s, ev);
    if (ev->kind == EV_LOGITS && s->alts.n) take_logits(s, ev);
    if ((ev->kind == EV_TOKEN || ev->kind == EV_DONE) && ev->text && !s->score)
        buf_add(&s->text, ev->text, ev->text_len);
    if (ev->kind == EV_DONE) land(s, ev);
}

int eval__air_submit(air *a, shot *s, err *e)
{
    req_params p;
    uint64_t id;
    if (a->flying >= a->most) return 0;
    req_params_default(&p);
    sample_opts_default(&p.sample);
    p.prompt = s->prompt.v;
    p.n_prompt = (int64_t)s->prompt.n;
    p.sample.temperature = 0;
    p.max_tokens = s->score ? 0 : s->max_tokens;
    p.want = s->alts.n ? WANT_LOGITS : s->score ? WANT_PROMPT_LOGPROBS : WANT_TOKENS;
    p.n_stops = s->n_stops < REQ_MAX_STOPS ? s->n_stops : REQ_MAX_STOPS;
    for (int i = 0; i < p.n_stops; i++)
        p.stops[i] = s->stops[i];
    p.stop_ids = s->stop_ids;
    p.n_stop_ids = s->n_stop_ids;
    p.sink = sink;
    p.sink_arg = s;
    s->air = a;
    err local = {0};
    int rc = engine_submit(a->en, &p, &id, &local);
    if (rc == -ERR_BUSY && a->flying > 0) return 0;
    if (rc < 0) return err_set(e, local.code ? local.code : ERR_FAIL, "%s", local.msg);
    a->flying++;
    return 1;
}

shot *eval__air_wait(air *a)
{
    if (!a->flying) return NULL;
    pthread_mutex_lock(&a->lock);
    while (!a->head)
        pthread_cond_wait(&a->landed, &a->lock);
    shot *s = a->head;
    a->head = s->next;
    if (!a->head) a->tail = NULL;
    pthread_mutex_unlock(&a->lock);
    a->flying--;
    return s;
}
