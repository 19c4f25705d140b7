/* An engine on a fixture model and requests run through it, one or many at once, with everything
 * that came back kept for comparison. */
#ifndef TESTS_ENGINE_FIXTURE_H
#define TESTS_ENGINE_FIXTURE_H
#include <pthread.h>
#include <time.h>
#include "ckpt/safetensors.h"
#include "engine/engine.h"

#define ARCH   "tests/fixtures/arch/"
#define MILLET "models/millet-7m"

typedef struct answer {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t id;
    ids out;
    buf text;
    token_logprob *lp, *plp;
    int64_t n_lp, n_plp;
    float *logits; /* [n_logits, vocab] */
    int64_t n_logits, vocab;
    int64_t hidden_rows[64], hidden_width; /* by layer + 1 */
    float *hidden0;                        /* rows of layer 0 */
    finish_reason reason;
    int32_t stop_id;
    char stop_text[64];
    int64_t prompt_tokens, cached, output_tokens, events, done;
    err e;
} answer;

static inline void answer_free(answer *a)
{
    ids_free(&a->out);
    buf_free(&a->text);
    free(a->lp);
    free(a->plp);
    free(a->logits);
    free(a->hidden0);
    pthread_mutex_destroy(&a->lock);
    pthread_cond_destroy(&a->changed);
    memset(a, 0, sizeof *a);
}

static inline void answer_add(token_logprob **list, int64_t *n, const token_logprob *v, int64_t k)
{
    *list = realloc(*list, sizeof **list * (size_t)(*n + k));
    memcpy(*list + *n, v, sizeof *v * (size_t)k);
    *n += k;
}

static inline void answer_sink(void *arg, const engine_event *ev)
{
    answer *a = arg;
    pthread_mutex_lock(&a->lock);
    a->events++;
    if (ev->kind == EV_PROMPT) {
        if (ev->pos != a->n_plp) a->e = (err){1, "prompt logprobs out of order"};
        answer_add(&a->plp, &a->n_plp, ev->logprobs, ev->n);
    } else if (ev->kind == EV_TOKEN) {
        ids_push(&a->out, ev->token);
        if (ev->logprobs) answer_add(&a->lp, &a->n_lp, ev->logprobs, 1);
    } else if (ev->kind == EV_LOGITS) {
        if (ev->pos != a->n_logits) a->e = (err){1, "logits out of order"};
        size_t row = sizeof(float) * (size_t)ev->vocab;
        a->vocab = ev->vocab;
        a->logits = realloc(a->logits, row * (size_t)(a->n_logits + ev->n));
        memcpy((char *)a->logits + row * (size_t)a->n_logits, ev->logits, row * (size_t)ev->n);
        a->n_logits += ev->n;
    } else if (ev->kind == EV_HIDDEN) {
        int64_t *n = &a->hidden_rows[ev->layer + 1];
        if (ev->pos != *n) a->e = (err){1, "hidden states out of order"};
        size_t row = sizeof(float) * (size_t)ev->width;
        a->hidden_width = ev->width;
        if (ev->layer == 0) {
            a->hidden0 = realloc(a->hidden0, row * (size_t)(*n + ev->n));
            memcpy((char *)a->hidden0 + row * (size_t)*n, ev->hidden, row * (size_t)ev->n);
        }
        *n += ev->n;
    }
    if (ev->kind == EV_TOKEN || ev->kind == EV_DONE) buf_add(&a->text, ev->text, ev->text_len);
    if (ev->kind == EV_DONE) {
        a->reason = ev->reason;
        a->stop_id = ev->stop_id;
        snprintf(a->stop_text, sizeof a->stop_text, "%s", ev->stop_text ? ev->stop_text : "");
        a->prompt_tokens = ev->prompt_tokens;
        a->cached = ev->cached_tokens;
        a->output_tokens = ev->output_tokens;
        if (ev->error) a->e = *ev->error;
        a->done++;
    }
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->lock);
}

static inline int answer_start(engine *en, const req_params *p, answer *a, err *e)
{
    req_params q = *p;
    memset(a, 0, sizeof *a);
    pthread_mutex_init(&a->lock, NULL);
    pthread_cond_init(&a->changed, NULL);
    q.sink = answer_sink;
    q.sink_arg = a;
    return engine_submit(en, &q, &a->id, e);
}

static inline void answer_wait(answer *a)
{
    pthread_mutex_lock(&a->lock);
    while (!a->done)
        pthread_cond_wait(&a->changed, &a->lock);
    pthread_mutex_unlock(&a->lock);
}

/* Until n tokens have arrived or it is done. */
static inline void answer_wait_tokens(answer *a, size_t n)
{
    pthread_mutex_lock(&a->lock);
    while (!a->done && a->out.n < n)
        pthread_cond_wait(&a->changed, &a->lock);
    pthread_mutex_unlock(&a->lock);
}

static inline void ask(engine *en, const req_params *p, answer *a)
{
    err e = {0};
    CHECK_OK(answer_start(en, p, a, &e));
    answer_wait(a);
    assert_int_equal(a->done, 1);
}

/* Greedy, n tokens whatever they are. */
static inline req_params greedy_params(const int32_t *prompt, int64_t n, int64_t more)
{
    req_params p;
    req_params_default(&p);
    p.prompt = prompt;
    p.n_prompt = n;
    p.max_tokens = more;
    p.sample.temperature = 0;
    p.ignore_eos = true;
    return p;
}

/* Holds the engine thread inside a sink until it is opened, so that what is submitted meanwhile is
 * certain to meet in one batch. */
typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool entered, open, done;
} gate;

static inline void gate_sink(void *arg, const engine_event *ev)
{
    gate *g = arg;
    pthread_mutex_lock(&g->lock);
    g->entered = true;
    pthread_cond_broadcast(&g->changed);
    while (!g->open)
        pthread_cond_wait(&g->changed, &g->lock);
    g->done = g->done || ev->kind == EV_DONE;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static inline void gate_shut(engine *en, gate *g)
{
    err e = {0};
    uint64_t id;
    int32_t one = 3;
    req_params p = greedy_params(&one, 1, 1);
    memset(g, 0, sizeof *g);
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->changed, NULL);
    p.sink = gate_sink;
    p.sink_arg = g;
    CHECK_OK(engine_submit(en, &p, &id, &e));
    pthread_mutex_lock(&g->lock);
    while (!g->entered)
        pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

static inline void gate_open(gate *g)
{
    pthread_mutex_lock(&g->lock);
    g->open = true;
    pthread_cond_broadcast(&g->changed);
    while (!g->done)
        pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
    pthread_mutex_destroy(&g->lock);
    pthread_cond_destroy(&g->changed);
}

static inline void assert_same_ids(const answer *a, const answer *b)
{
    assert_int_equal(a->out.n, b->out.n);
    assert_memory_equal(a->out.v, b->out.v, sizeof(int32_t) * a->out.n);
}

static inline double max_diff(const float *a, const float *b, int64_t n)
{
    double w = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= w)) w = d;
    }
    return w;
}

/* Waits until nothing runs and no page is used; the engine's counters lag a step behind. */
static inline void assert_idle(engine *en)
{
    engine_stats s;
    for (int i = 0; i < 400; i++) {
        engine_get_stats(en, &s);
        if (!s.running && !s.waiting && !s.kv_pages_used) return;
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    fail_msg("running %d, waiting %d, pages used %d", (int)s.running, (int)s.waiting,
             (int)s.kv_pages_used);
}

static inline void random_ids(int32_t *out, int64_t n, int32_t vocab, uint64_t seed)
{
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        out[i] = (int32_t)((seed >> 33) % (uint64_t)vocab);
    }
}
#endif
