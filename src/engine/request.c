/* One request: copies of its parameters, text and stop strings, events. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include "engine/engine_internal.h"

void req_params_default(req_params *p)
{
    *p = (req_params){.max_tokens = 16, .want = WANT_TOKENS};
    sample_opts_default(&p->sample);
}

static void *copy(const void *p, size_t n)
{
    if (!n) return NULL;
    void *out = xmalloc(n);
    memcpy(out, p, n);
    return out;
}

request *engine__request_make(engine *en, const req_params *p)
{
    request *r = xcalloc(1, sizeof *r);
    r->p = *p;
    r->n_prompt = r->n_ids = p->n_prompt;
    r->cap_ids = p->n_prompt + p->max_tokens + 1;
    r->ids = xmalloc(sizeof *r->ids * (size_t)r->cap_ids);
    memcpy(r->ids, p->prompt, sizeof *r->ids * (size_t)p->n_prompt);
    r->p.prompt = r->ids;
    r->p.sample.bias_ids = copy(p->sample.bias_ids, sizeof(int32_t) * (size_t)p->sample.n_bias);
    r->p.sample.bias = copy(p->sample.bias, sizeof(float) * (size_t)p->sample.n_bias);
    r->p.stop_ids = copy(p->stop_ids, sizeof(int32_t) * (size_t)p->n_stop_ids);
    for (int i = 0; i < p->n_stops; i++)
        r->p.stops[i] = xstrdup(p->stops[i]);
    r->cap_pages = (int)((r->cap_ids + en->page_tokens - 1) / en->page_tokens) + 1;
    for (int g = 0; g < KV_GROUPS; g++)
        r->pages[g] = xmalloc(sizeof(int32_t) * (size_t)r->cap_pages);
    if (p->sample.frequency_penalty != 0 || p->sample.presence_penalty != 0)
        r->counts = xcalloc((size_t)en->vocab, sizeof *r->counts);
    if (p->sample.repetition_penalty != 1) {
        r->seen = xcalloc((size_t)en->vocab, 1);
        for (int64_t i = 0; i < p->n_prompt; i++)
            r->seen[p->prompt[i]] = 1;
    }
    r->seed = (uint64_t)p->sample.seed;
    if (!p->sample.has_seed && getrandom(&r->seed, sizeof r->seed, 0) != (ssize_t)sizeof r->seed)
        r->seed = (uint64_t)(clock_seconds() * 1e9);
    if (en->tok) detok_init(&r->d, en->tok, !p->keep_special);
    if (p->continues && p->n_prompt) r->d.first = false;
    r->t_submit = clock_seconds();
    return r;
}

void engine__request_free(request *r)
{
    if (!r) return;
    free((void *)(uintptr_t)r->p.sample.bias_ids);
    free((void *)(uintptr_t)r->p.sample.bias);
    free((void *)(uintptr_t)r->p.stop_ids);
    for (int i = 0; i < r->p.n_stops; i++)
        free((void *)(uintptr_t)r->p.stops[i]);
    free(r->ids);
    for (int g = 0; g < KV_GROUPS; g++)
        free(r->pages[g]);
    free(r->counts);
    free(r->seen);
    if (r->d.t) detok_free(&r->d);
    buf_free(&r->text);
    free(r);
}

bool engine__is_eos(const engine *en, int32_t id)
{
    for (int i = 0; i < en->n_eos; i++)
        if (en->eos[i] == id) return true;
    return false;
}

static void emit(const request *r, engine_event *ev)
{
    ev->id = r->id;
    ev->prompt_tokens = r->n_prompt;
    ev->cached_tokens = r->cached;
    ev->output_tokens = r->n_ids - r->n_prompt;
    if (r->p.sink) r->p.sink(r->p.sink_arg, ev);
}

/* Cumulative: bucket i counts what is at most bounds[i], the last one all. */
static void count(uint64_t *hist, const double *bounds, double v)
{
    for (int i = 0; i < 23; i++)
        hist[i] += v <= bounds[i];
    hist[23]++;
}

void engine__finish(engine *en, request *r, finish_reason why, int32_t stop_id,
                    const char *stop_text, const err *e)
{
    buf rest = {0};
    if (r->d.t && why != FINISH_ERROR && !stop_text) {
        detok_flush(&r->d, &r->text);
        buf_add(&rest, r->text.data + r->sent, r->text.len - r->sent);
    }
    double now = clock_seconds();
    engine_event ev = {.kind = EV_DONE,
                       .reason = why,
                       .stop_id = stop_id,
                       .stop_text = stop_text,
                       .error = e,
                       .text = rest.data ? rest.data : "",
                       .text_len = rest.len,
                       .queue_s = (r->started ? r->t_start : now) - r->t_submit,
                       .ttft_s = (r->t_first > 0 ? r->t_first : now) - r->t_submit,
                       .total_s = now - r->t_submit};
    pthread_mutex_lock(&en->lock);
    engine_stats *s = &en->stats;
    s->finished_stop += why == FINISH_STOP;
    s->finished_length += why == FINISH_LENGTH;
    s->cancelled += why == FINISH_CANCELLED;
    s->failed += why == FINISH_ERROR;
    if (why == FINISH_STOP || why == FINISH_LENGTH) {
        count(s->e2e, engine_e2e_bounds, ev.total_s);
        s->e2e_sum += ev.total_s;
    }
    pthread_mutex_unlock(&en->lock);
    emit(r, &ev);
    buf_free(&rest);
}

/* Longest suffix of text that could still grow into a stop string. */
static size_t held_back(const request *r)
{
    size_t best = 0;
    for (int i = 0; i < r->p.n_stops; i++) {
        size_t n = strlen(r->p.stops[i]), room = r->text.len - r->sent;
        for (size_t k = n - 1 < room ? n - 1 : room; n && k > best; k--)
            if (!memcmp(r->text.data + r->text.len - k, r->p.stops[i], k)) {
                best = k;
                break;
            }
    }
    return best;
}

/* First stop string in what has not been handed out; earliest start wins. */
static const char *find_stop(const request *r, size_t *at)
{
    const char *best = NULL;
    for (int i = 0; i < r->p.n_stops; i++) {
        size_t n = strlen(r->p.stops[i]);
        const char *hit =
            n && r->text.len > r->sent
                ? memmem(r->text.data + r->sent, r->text.len - r->sent, r->p.stops[i], n)
                : NULL;
        if (!hit) continue;
        size_t pos = (size_t)(hit - r->text.data);
        if (!best || pos < *at) best = r->p.stops[i], *at = pos;
    }
    return best;
}

static void emit_token(request *r, int32_t token, const token_logprob *lp, size_t upto)
{
    engine_event ev = {.kind = EV_TOKEN,
                       .pos = r->n_ids - 1,
                       .n = 1,
                       .logprobs = lp,
                       .token = token,
                       .text = "",
                       .stop_id = -1};
    if (upto > r->sent) {
        ev.text = r->text.data + r->sent;
        ev.text_len = upto - r->sent;
        r->sent = upto;
    }
    emit(r, &ev);
}

static void note_times(engine *en, request *r)
{
    double now = clock_seconds();
    pthread_mutex_lock(&en->lock);
    engine_stats *s = &en->stats;
    s->output_tokens++;
    if (r->t_first > 0) {
        count(s->itl, engine_itl_bounds, now - r->t_last);
        s->itl_sum += now - r->t_last;
    } else {
        r->t_first = now;
        count(s->ttft, engine_ttft_bounds, now - r->t_submit);
        s->ttft_sum += now - r->t_submit;
    }
    pthread_mutex_unlock(&en->lock);
    r->t_last = now;
}

bool engine__take_token(engine *en, request *r, int32_t token, const token_logprob *lp)
{
    bool stop_id = !r->p.ignore_eos && engine__is_eos(en, token);
    for (int i = 0; i < r->p.n_stop_ids; i++)
        stop_id = stop_id || r->p.stop_ids[i] == token;
    r->ids[r->n_ids++] = token;
    if (r->counts) r->counts[token]++;
    if (r->seen) r->seen[token] = 1;
    note_times(en, r);
    if (r->d.t && !stop_id) detok_push(&r->d, token, &r->text);
    size_t at = 0;
    bool early = r->p.min_tokens > 0 && r->n_ids - r->n_prompt <= r->p.min_tokens;
    const char *hit = early ? NULL : find_stop(r, &at);
    if (hit) {
        emit_token(r, token, lp, r->p.include_stop ? at + strlen(hit) : at);
        engine__finish(en, r, FINISH_STOP, -1, hit, NULL);
        return true;
    }
    emit_token(r, token, lp, r->text.len - (early ? 0 : held_back(r)));
    if (stop_id) {
        engine__finish(en, r, FINISH_STOP, token, NULL, NULL);
        return true;
    }
    if (r->n_ids - r->n_prompt >= r->p.max_tokens) {
        engine__finish(en, r, FINISH_LENGTH, -1, NULL, NULL);
        return true;
    }
    return false;
}

/* Reports the prompt rows of this step: logits, and logprobs of the tokens that follow them. */
void engine__emit_prompt(engine *en, request *r, const float *logits)
{
    int64_t first = r->computed, n = r->n_rows, V = en->vocab;
    if (n > r->n_prompt - first) n = r->n_prompt - first;
    /* Rows reported before a preemption are computed again, not reported again. */
    int64_t skip = r->prompt_seen > first ? r->prompt_seen - first : 0;
    if ((n -= skip) <= 0) return;
    if (skip) logits += skip * V;
    first += skip;
    r->prompt_seen = first + n;
    if (r->p.want & WANT_LOGITS) {
        engine_event ev = {
            .kind = EV_LOGITS, .pos = first, .n = n, .logits = logits, .vocab = V, .text = ""};
        emit(r, &ev);
    }
    if (!(r->p.want & WANT_PROMPT_LOGPROBS)) return;
    if (first == 0) {
        token_logprob none = {.id = r->ids[0], .none = true};
        engine_event ev = {.kind = EV_PROMPT, .n = 1, .logprobs = &none, .text = ""};
        emit(r, &ev);
    }
    int64_t k = 0;
    for (; k < n && first + k + 1 < r->n_prompt; k++) {
        int rc;
        double lse = engine__lse(logits + k * V, V, NULL, &rc);
        if (rc < 0) {
            /* Reported as NaN; the request ends with an error when its last row is sampled or
             * scored. */
            en->lp[k] = (token_logprob){.id = r->ids[first + k + 1], .logprob = NAN};
            continue;
        }
        engine__logprob(logits + k * V, V, lse, r->ids[first + k + 1], r->p.top_logprobs,
                        &en->lp[k]);
    }
    if (!k) return;
    engine_event ev = {.kind = EV_PROMPT, .pos = first + 1, .n = k, .logprobs = en->lp, .text = ""};
    emit(r, &ev);
}
