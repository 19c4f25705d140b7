/* The step loop, on the engine thread: take what has arrived, drop what was cancelled, admit, build
 * one batch of decodes and prefill chunks, run it, hand out the results.
 *
 * Pages are taken as they are needed. When none is free the radix tree gives up its least recently
 * used ones; then the youngest running request is preempted: it loses its pages, keeps its tokens,
 * and waits at the head of the queue to be computed again. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/log.h"
#include "engine/engine_internal.h"

/* ---- queues -------------------------------------------------------------------------------------
 */

/* Waiting and running change together: submit reckons the room in the queue from both. */
static void queued(engine *en, int64_t by, int64_t running)
{
    pthread_mutex_lock(&en->lock);
    en->n_queued += by;
    en->stats.running = running;
    en->stats.waiting = en->n_queued;
    pthread_mutex_unlock(&en->lock);
}

static void push_front(engine *en, request *r)
{
    r->next = en->waiting;
    en->waiting = r;
    if (!en->waiting_last) en->waiting_last = r;
    queued(en, 1, en->n_running);
}

static request *pop_front(engine *en, bool to_run)
{
    request *r = en->waiting;
    en->waiting = r->next;
    if (!en->waiting) en->waiting_last = NULL;
    r->next = NULL;
    queued(en, -1, en->n_running + to_run);
    return r;
}

static void remove_running(engine *en, int i)
{
    en->free_states[en->n_free_states++] = en->running[i]->state;
    memmove(en->running + i, en->running + i + 1,
            sizeof *en->running * (size_t)(en->n_running - i - 1));
    en->n_running--;
}

/* Frees a finished request; its whole pages stay in the prefix cache. */
static void retire(engine *en, request *r)
{
    engine__pages_share(en, r);
    engine__pages_release(en, r);
    for (int i = 0; i < en->n_running; i++)
        if (en->running[i] == r) remove_running(en, i);
    engine__request_free(r);
}

static void cancel_waiting(engine *en)
{
    request **p = &en->waiting, *last = NULL;
    while (*p) {
        request *r = *p;
        if (!r->cancel) {
            last = r;
            p = &r->next;
            continue;
        }
        *p = r->next;
        queued(en, -1, en->n_running);
        engine__finish(en, r, FINISH_CANCELLED, -1, NULL, NULL);
        engine__request_free(r);
    }
    en->waiting_last = last;
}

static void cancel_running(engine *en)
{
    for (int i = en->n_running - 1; i >= 0; i--) {
        request *r = en->running[i];
        if (!r->cancel) continue;
        engine__finish(en, r, FINISH_CANCELLED, -1, NULL, NULL);
        retire(en, r);
    }
}

/* ---- admission ----------------------------------------------------------------------------------
 */

static void match_prefix(engine *en, request *r)
{
    r->rope_key = model_rope_key(en->m, r->n_ids);
    if (!en->prefix_cache || engine__whole_prompt(r) || r->rope_key) return;
    engine__pages_match(en, r);
    if (!r->started) r->cached = r->computed < r->n_prompt ? r->computed : r->n_prompt;
}

/* A shape's prompt that counts as computed has room, or fails: computing it instead would be
 * another measurement. */
static bool assume(engine *en, request *r)
{
    err e = {0};
    if (!r->p.assume_cached || r->started || engine__pages_assume(en, r)) return true;
    err_set(&e, ERR_NOMEM, "the KV cache has no room for %lld tokens that count as computed",
            (long long)r->n_prompt);
    queued(en, 0, en->n_running);
    engine__finish(en, r, FINISH_ERROR, -1, NULL, &e);
    engine__request_free(r);
    return false;
}

static void admit(engine *en)
{
    while (en->waiting && en->n_running < en->max_running) {
        request *r = en->waiting;
        /* No newcomer shall start only to be preempted at once. Alone, a request always starts:
         * submit saw to it that it fits. */
        if (en->n_running && !engine__pages_room(en, r)) return;
        pop_front(en, true);
        match_prefix(en, r);
        if (!assume(en, r)) continue;
        r->state = en->free_states[--en->n_free_states];
        en->running[en->n_running++] = r;
        if (r->started) continue; /* back after a preemption: counted already */
        r->started = true;
        r->t_start = clock_seconds();
        pthread_mutex_lock(&en->lock);
        en->stats.prompt_tokens += (uint64_t)r->n_prompt;
        en->stats.cached_tokens += (uint64_t)r->cached;
        en->stats.requests++;
        pthread_mutex_unlock(&en->lock);
    }
}

/* ---- pages --------------------------------------------------------------------------------------
 */

static void preempt(engine *en, request *r)
{
    engine__pages_share(en, r);
    engine__pages_release(en, r);
    r->computed = 0;
    for (int i = 0; i < en->n_running; i++)
        if (en->running[i] == r) remove_running(en, i);
    for (int i = 0; i < en->n_step; i++)
        if (en->step[i] == r) en->step[i] = NULL;
    push_front(en, r);
    pthread_mutex_lock(&en->lock);
    en->stats.preemptions++;
    pthread_mutex_unlock(&en->lock);
}

/* Pages for the first `tokens` tokens of r. False: r itself had to give way. */
static bool ensure_pages(engine *en, request *r, int64_t tokens)
{
    while (engine__pages_take(en, r, tokens) > 0) {
        request *young = en->running[en->n_running - 1];
        preempt(en, young);
        if (young == r) return false;
    }
    return true;
}

/* ---- one batch ----------------------------------------------------------------------------------
 */

typedef struct room {
    int64_t rows, logits;
} room;

/* Does r want all logits of its prompt, and has not had them yet? */
static bool wants_rows(const request *r)
{
    return (r->p.want & (WANT_LOGITS | WANT_PROMPT_LOGPROBS)) && r->prompt_seen < r->n_prompt;
}

/* Takes up to what is left of r into the step. */
static void take_rows(engine *en, request *r, room *left)
{
    int64_t n = r->n_ids - r->computed;
    bool all = wants_rows(r);
    if (n > left->rows) n = left->rows;
    if (all && n > left->logits) n = left->logits;
    if (n < 1 || left->logits < 1) return;
    if (!ensure_pages(en, r, r->computed + n)) return;
    r->n_rows = (int32_t)n;
    left->rows -= n;
    bool ends = r->computed + n == r->n_ids;
    r->n_logits = all ? n : ends ? 1 : 0;
    left->logits -= r->n_logits;
    en->step[en->n_step++] = r;
}

/* A table for another length: what is in the cache was rotated by the old one. */
static void renew_rope(engine *en, request *r)
{
    int64_t key = model_rope_key(en->m, r->n_ids);
    if (key == r->rope_key) return;
    engine__pages_release(en, r);
    r->computed = 0;
    r->rope_key = key;
}

static void choose(engine *en)
{
    room left = {en->chunk, en->max_logit_rows};
    en->n_step = 0;
    for (int i = 0; i < en->n_running; i++)
        renew_rope(en, en->running[i]);
    /* Decodes first, then prefills in order of arrival. ensure_pages may remove requests from the
     * end. */
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < en->n_running; i++) {
            request *r = en->running[i];
            bool decode = r->n_ids - r->computed == 1 && r->n_ids > r->n_prompt;
            if (decode == (pass == 0)) take_rows(en, r, &left);
        }
    int n = 0;
    for (int i = 0; i < en->n_step; i++)
        if (en->step[i]) en->step[n++] = en->step[i];
    en->n_step = n;
}

static void fill(engine *en, batch *b)
{
    *b = (batch){.ids = en->ids,
                 .pos = en->pos,
                 .slot = {en->slot[KV_FULL], en->slot[KV_WINDOW]},
                 .seqs = {en->seqs[KV_FULL], en->seqs[KV_WINDOW]},
                 .state = en->kv.state_bytes ? en->state : NULL,
                 .rope_len = en->rope_len,
                 .logit_rows = en->logit_rows};
    for (int s = 0; s < en->n_step; s++) {
        request *r = en->step[s];
        r->row0 = (int32_t)b->T;
        r->logit0 = b->n_logits;
        for (int32_t i = 0; i < r->n_rows; i++) {
            int64_t at = r->computed + i;
            en->ids[b->T] = r->ids[at];
            en->pos[b->T] = (int32_t)at;
            for (int g = 0; g < KV_GROUPS; g++)
                if (kv_pool_total(en->pool, g))
                    en->slot[g][b->T] = r->pages[g][at / en->page_tokens] * en->page_tokens +
                                        (int32_t)(at % en->page_tokens);
            if (r->n_rows - i <= r->n_logits) en->logit_rows[b->n_logits++] = (int32_t)b->T;
            b->T++;
        }
        en->rope_len[s] = (int32_t)r->n_ids;
        en->state[s] = r->state;
        for (int g = 0; g < KV_GROUPS; g++)
            en->seqs[g][s] =
                (kern_seq){r->row0, r->n_rows, (int32_t)(r->computed + r->n_rows), r->pages[g]};
    }
    b->n_seqs = en->n_step;
    en->by_tops = en->tops != NULL;
    for (int k = 0; k < en->n_step && en->by_tops; k++)
        en->by_tops = !wants_rows(en->step[k]) && engine__best_suffices(en, en->step[k]);
    b->tops = en->by_tops ? en->tops : NULL;
}

/* Hidden states of the step, cut into the requests that asked for them. */
static void hidden_tap(void *arg, int layer, const float *x, int64_t T, int64_t hidden)
{
    engine *en = arg;
    (void)T;
    for (int s = 0; s < en->n_step; s++) {
        request *r = en->step[s];
        if (!(r->p.want & WANT_HIDDEN) || !r->p.sink) continue;
        /* Rows that were reported before a preemption are computed again, not reported again. */
        int64_t skip = r->prompt_seen > r->computed ? r->prompt_seen - r->computed : 0,
                n = r->n_rows;
        if (r->computed + n > r->n_prompt) n = r->n_prompt - r->computed;
        if ((n -= skip) <= 0) continue;
        engine_event ev = {.kind = EV_HIDDEN,
                           .id = r->id,
                           .pos = r->computed + skip,
                           .n = n,
                           .layer = layer,
                           .hidden = x + ((int64_t)r->row0 + skip) * hidden,
                           .width = hidden,
                           .text = ""};
        r->p.sink(r->p.sink_arg, &ev);
    }
}

/* The next token of r, from the last of its rows; lp: where it is wanted. */
static int sample(engine *en, request *r, int32_t *token, token_logprob *lp, err *e)
{
    int64_t row = r->logit0 + r->n_logits - 1;
    int rc;
    if (en->by_tops) {
        rc = engine__sample_best(r, &en->tops[row], token, e);
        if (rc == 0 && lp) engine__logprob_best(&en->tops[row], *token, r->p.top_logprobs, lp);
        return rc;
    }
    const float *logits = en->logits + row * en->vocab;
    rc = engine__sample(en, r, logits, token, e);
    if (rc < 0 || !lp) return rc;
    double lse = engine__lse(logits, en->vocab, e, &rc);
    if (rc == 0) engine__logprob(logits, en->vocab, lse, *token, r->p.top_logprobs, lp);
    return rc;
}

/* Results of one request of the step; true when it ended. */
static bool deliver(engine *en, request *r)
{
    err e = {0};
    engine__emit_prompt(en, r, en->logits + r->logit0 * en->vocab);
    r->computed += r->n_rows;
    engine__pages_pass(en, r);
    if (r->computed < r->n_ids) return false;
    if (!r->inserted) {
        /* The prompt is complete: others may share it while this one still runs. */
        engine__pages_share_early(en, r);
        r->inserted = true;
    }
    if (r->p.max_tokens == 0) {
        engine__finish(en, r, FINISH_LENGTH, -1, NULL, NULL);
        return true;
    }
    int32_t token = 0;
    token_logprob lp, *wanted = r->p.want & WANT_LOGPROBS ? &lp : NULL;
    if (sample(en, r, &token, wanted, &e) < 0) {
        engine__finish(en, r, FINISH_ERROR, -1, NULL, &e);
        return true;
    }
    return engine__take_token(en, r, token, wanted);
}

static void fail_step(engine *en, const err *e)
{
    for (int s = 0; s < en->n_step; s++) {
        engine__finish(en, en->step[s], FINISH_ERROR, -1, NULL, e);
        retire(en, en->step[s]);
    }
}

static void publish(engine *en, double busy)
{
    pthread_mutex_lock(&en->lock);
    engine_stats *s = &en->stats;
    s->steps++;
    s->busy_seconds += busy;
    s->running = en->n_running;
    s->kv_pages_total = s->kv_pages_used = 0;
    for (int g = 0; g < KV_GROUPS; g++) {
        int64_t n = kv_pool_total(en->pool, g);
        s->kv_pages_total += n;
        /* Pages that only the prefix cache holds can be had at once: they do not count as used. */
        s->kv_pages_used += n - kv_pool_free_pages(en->pool, g) - kv_pool_cached_pages(en->pool, g);
    }
    pthread_mutex_unlock(&en->lock);
}

/* Before a step's events go out: who waits for the last one reads a count that holds the step. */
static void publish_forward(engine *en, double seconds)
{
    pthread_mutex_lock(&en->lock);
    en->stats.forward_seconds += seconds;
    en->stats.forwards++;
    en->stats.kv_clipped = model_kv_clipped(en->m);
    pthread_mutex_unlock(&en->lock);
}

static void step(engine *en)
{
    batch b;
    err e = {0};
    double t0 = clock_seconds();
    choose(en);
    if (!en->n_step) {
        /* Everything running was preempted: it is admitted again in the next round. */
        publish(en, 0);
        return;
    }
    fill(en, &b);
    bool tap = false;
    for (int s = 0; s < en->n_step; s++)
        tap = tap || (en->step[s]->p.want & WANT_HIDDEN);
    model_set_tap(en->m, tap ? hidden_tap : NULL, en);
    double before = clock_seconds();
    int rc = model_forward(en->m, en->pool, &b, en->logits, &e);
    double forward = clock_seconds() - before;
    publish_forward(en, forward);
    if (rc < 0) {
        fail_step(en, &e);
    } else {
        for (int s = 0; s < en->n_step; s++)
            if (deliver(en, en->step[s])) retire(en, en->step[s]);
    }
    publish(en, clock_seconds() - t0);
}

/* ---- loop ---------------------------------------------------------------------------------------
 */

/* Marks what is to be cancelled; ids that are unknown or done already are forgotten. Called with
 * the lock. */
static void mark_cancelled(engine *en)
{
    for (size_t k = 0; k < en->n_cancels; k++) {
        for (request *r = en->waiting; r; r = r->next)
            if (r->id == en->cancels[k]) r->cancel = true;
        for (int i = 0; i < en->n_running; i++)
            if (en->running[i]->id == en->cancels[k]) en->running[i]->cancel = true;
    }
    en->n_cancels = 0;
}

/* Waits for work; returns false when the engine is to stop. */
static bool collect(engine *en)
{
    pthread_mutex_lock(&en->lock);
    while (!en->inbox && !en->n_running && !en->waiting && !en->stop && !en->n_cancels)
        pthread_cond_wait(&en->wake, &en->lock);
    if (en->inbox) {
        if (en->waiting_last)
            en->waiting_last->next = en->inbox;
        else
            en->waiting = en->inbox;
        en->waiting_last = en->inbox_last;
        en->inbox = en->inbox_last = NULL;
    }
    mark_cancelled(en);
    bool go = !en->stop || ((en->n_running || en->waiting) && clock_seconds() < en->drain_until);
    pthread_mutex_unlock(&en->lock);
    return go;
}

static void abandon(engine *en)
{
    while (en->n_running) {
        engine__finish(en, en->running[0], FINISH_CANCELLED, -1, NULL, NULL);
        retire(en, en->running[0]);
    }
    while (en->waiting) {
        request *r = pop_front(en, false);
        engine__finish(en, r, FINISH_CANCELLED, -1, NULL, NULL);
        engine__request_free(r);
    }
}

void *engine__loop(void *arg)
{
    engine *en = arg;
    while (collect(en)) {
        cancel_waiting(en);
        cancel_running(en);
        admit(en);
        if (en->n_running)
            step(en);
        else
            publish(en, 0);
    }
    abandon(en);
    publish(en, 0);
    return NULL;
}
