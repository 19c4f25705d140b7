/* Measuring: requests go through the engine as those of a server. A step of decoding is timed from
 * token to token of the sequence that started last, while all of the batch are running; the median
 * is told. Prompts of a shape are measured apart from decoding, by requests that end at their first
 * token; decoding then starts from a cache that counts as filled. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include "base/thread.h"
#include "cli/bench.h"

typedef struct seq { /* written by the engine's thread until the run is over */
    double *at;      /* of each token */
    double *model;   /* of the first sequence: seconds in the model until then, of all steps */
    int64_t n, cap;
    struct run *run;
} seq;

typedef struct run {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    int64_t left, batch;
    bool hold; /* the engine, until all are submitted: what starts early is not in full steps */
    double start, ttft;
    engine *en;
    seq *seqs;
    err e;
} run;

static void sink(void *arg, const engine_event *ev)
{
    seq *s = arg;
    run *r = s->run;
    if (ev->kind == EV_TOKEN && s->n < s->cap) {
        engine_stats st;
        pthread_mutex_lock(&r->lock);
        while (r->hold)
            pthread_cond_wait(&r->cond, &r->lock);
        pthread_mutex_unlock(&r->lock);
        if (s->model) {
            engine_get_stats(r->en, &st);
            s->model[s->n] = st.forward_seconds;
        }
        s->at[s->n++] = clock_seconds();
    }
    if (ev->kind != EV_DONE) return;
    pthread_mutex_lock(&r->lock);
    r->ttft += ev->ttft_s;
    if (ev->error) r->e = *ev->error;
    if (--r->left == 0) pthread_cond_broadcast(&r->cond);
    pthread_mutex_unlock(&r->lock);
}

typedef struct ask { /* a run */
    int64_t batch, context, tokens;
    bool assume;
    unsigned salt; /* other ids in every run, so that no prefix is found in the cache */
} ask;

static int submit(engine *en, const ask *a, int64_t i, seq *s, err *e)
{
    uint64_t id, x = a->salt * 1000003u + (uint64_t)i * 7919u + 17;
    int32_t *ids_ = xmalloc(sizeof *ids_ * (size_t)a->context);
    req_params p;
    for (int64_t k = 0; k < a->context; k++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        ids_[k] = (int32_t)((x >> 33) % (uint64_t)engine_vocab(en));
    }
    req_params_default(&p);
    p.prompt = ids_;
    p.n_prompt = a->context;
    p.max_tokens = a->tokens;
    p.sample.temperature = 0;
    p.ignore_eos = true;
    p.want = WANT_TOKENS;
    p.assume_cached = a->assume;
    p.sink = sink;
    p.sink_arg = s;
    int rc = engine_submit(en, &p, &id, e);
    free(ids_);
    return rc;
}

static void run_free(run *r)
{
    for (int64_t i = 0; r->seqs && i < r->batch; i++)
        free(r->seqs[i].at);
    if (r->seqs) free(r->seqs[0].model);
    free(r->seqs);
    *r = (run){0};
}

static int go(engine *en, const ask *a, run *r, err *e)
{
    int rc = 0;
    int64_t sent = 0;
    *r = (run){.left = a->batch, .batch = a->batch, .hold = a->assume, .en = en};
    r->seqs = xcalloc((size_t)a->batch, sizeof *r->seqs);
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->cond, NULL);
    for (int64_t i = 0; i < a->batch; i++) {
        r->seqs[i] = (seq){.cap = a->tokens, .run = r};
        r->seqs[i].at = xcalloc((size_t)a->tokens, sizeof(double));
    }
    r->seqs[0].model = xcalloc((size_t)a->tokens, sizeof(double));
    r->start = clock_seconds();
    for (; sent < a->batch && rc >= 0; sent += rc >= 0)
        rc = submit(en, a, sent, &r->seqs[sent], e);
    pthread_mutex_lock(&r->lock);
    r->hold = false;
    pthread_cond_broadcast(&r->cond);
    r->left -= a->batch - sent;
    while (r->left > 0)
        pthread_cond_wait(&r->cond, &r->lock);
    pthread_mutex_unlock(&r->lock);
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->cond);
    if (rc >= 0 && r->e.code) {
        *e = r->e;
        rc = -r->e.code;
    }
    return rc < 0 ? rc : 0;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v, int64_t n)
{
    if (n < 1) return 0;
    qsort(v, (size_t)n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

/* When the last sequence had its first token. */
static double last_first(const run *r, int64_t *which)
{
    double t = 0;
    for (int64_t i = 0; i < r->batch; i++)
        if (r->seqs[i].n && r->seqs[i].at[0] > t) {
            t = r->seqs[i].at[0];
            *which = i;
        }
    return t;
}

/* Median step while all sequences are running. */
static double step_of(const run *r)
{
    int64_t w = 0, n = 0;
    double end = 1e300;
    last_first(r, &w);
    for (int64_t i = 0; i < r->batch; i++)
        if (i != w && r->seqs[i].n && r->seqs[i].at[r->seqs[i].n - 1] < end)
            end = r->seqs[i].at[r->seqs[i].n - 1];
    const seq *s = &r->seqs[w];
    double *d = xmalloc(sizeof *d * (size_t)(s->n + 1));
    for (int64_t k = 1; k < s->n && s->at[k - 1] <= end; k++)
        d[n++] = s->at[k] - s->at[k - 1];
    double m = median(d, n);
    free(d);
    return m;
}

/* Median part of the model in a step, from the token that follows the last sequence's first one. */
static double model_of(const run *r)
{
    int64_t w = 0, n = 0;
    double from = last_first(r, &w);
    const seq *s = &r->seqs[0];
    double *d = xmalloc(sizeof *d * (size_t)(s->n + 1));
    for (int64_t k = 1; k < s->n; k++)
        if (s->at[k - 1] >= from || r->batch == 1) d[n++] = s->model[k] - s->model[k - 1];
    double m = median(d, n);
    free(d);
    return m;
}

/* Steps that a real model's prompts take, during which early sequences decode already. */
static int64_t tokens_of(engine *en, const bench_plan *p, bool shape, const bench_row *row)
{
    engine_info info;
    engine_get_info(en, &info);
    int64_t rows = row->batch * row->context;
    return shape ? p->output : p->output + (rows + info.chunk - 1) / info.chunk + row->batch;
}

static int prompts(engine *en, const bench_plan *p, bench_row *row, err *e)
{
    double mean[BENCH_REPEAT], last[BENCH_REPEAT];
    int rc = 0;
    int64_t w = 0;
    run r = {0};
    for (int i = -1; i < p->repeat; i++) { /* -1: warm-up, for which two will do */
        ask a = {row->batch, row->context, 1, false, (unsigned)(i + 2)};
        if (i < 0 && a.batch > 2) a.batch = 2;
        TRY(go(en, &a, &r, e));
        if (i >= 0) {
            mean[i] = r.ttft / (double)row->batch;
            last[i] = last_first(&r, &w) - r.start;
        }
        run_free(&r);
    }
    row->prefilled = true;
    row->ttft_ms = median(mean, p->repeat) * 1e3;
    row->first_all_ms = median(last, p->repeat) * 1e3;
out:
    run_free(&r);
    return rc;
}

static int decode(engine *en, const bench_plan *p, bool shape, bench_row *row, err *e)
{
    double mean[BENCH_REPEAT], last[BENCH_REPEAT], step[BENCH_REPEAT], model[BENCH_REPEAT];
    int rc = 0;
    int64_t w = 0;
    run r = {0};
    for (int i = -1; i < p->repeat; i++) {
        ask a = {row->batch, row->context, tokens_of(en, p, shape, row), shape,
                 (unsigned)(i + 1002)};
        TRY(go(en, &a, &r, e));
        if (i >= 0) {
            mean[i] = r.ttft / (double)row->batch;
            last[i] = last_first(&r, &w) - r.start;
            step[i] = step_of(&r);
            model[i] = model_of(&r);
        }
        run_free(&r);
    }
    row->tpot_ms = median(step, p->repeat) * 1e3;
    row->forward_ms = median(model, p->repeat) * 1e3;
    if (shape) return 0;
    row->prefilled = true;
    row->ttft_ms = median(mean, p->repeat) * 1e3;
    row->first_all_ms = median(last, p->repeat) * 1e3;
out:
    run_free(&r);
    return rc;
}

/* Once more with every operator between two clocks; a warm-up has been. */
static int profile(engine *en, const ask *a, bench_ops *out, err *e)
{
    run r = {0};
    engine_stats was, is;
    engine_get_stats(en, &was);
    int rc = engine_profile(en, true, e);
    if (rc < 0) return rc;
    rc = go(en, a, &r, e);
    run_free(&r);
    engine_get_stats(en, &is);
    out->steps = (int64_t)(is.forwards - was.forwards);
    out->n = engine_profile_lines(en, &out->v);
    int off = engine_profile(en, false, rc < 0 ? NULL : e);
    return rc < 0 ? rc : off;
}

/* Of a shape decoding and prompts apart; of a model a run as it is. */
static int profiles(engine *en, const bench_plan *p, bool shape, bench_row *row, err *e)
{
    ask a = {row->batch, row->context, 8, shape, 5002}, prompt = a;
    int rc = profile(en, &a, &row->ops[0], e);
    if (rc < 0 || !shape || !p->prefill) return rc;
    prompt.assume = false;
    prompt.tokens = 1;
    prompt.salt++;
    return profile(en, &prompt, &row->ops[1], e);
}

int bench_measure(engine *en, const bench_plan *p, bool shape, bench_row *row, err *e)
{
    int rc = 0;
    engine_info info;
    if (shape && p->prefill) TRY(prompts(en, p, row, e));
    TRY(decode(en, p, shape, row, e));
    if (p->profile) TRY(profiles(en, p, shape, row, e));
    engine_get_info(en, &info);
    double step = row->tpot_ms / 1e3,
           kv = (double)(row->batch * row->context) * (double)info.kv_bytes_per_token;
    row->decode = (double)row->batch / step;
    if (row->prefilled)
        row->prefill = (double)(row->batch * row->context) / (row->first_all_ms / 1e3);
    if (!info.experts) {
        row->weights_gbs = (double)info.linear_bytes / step / 1e9;
        if (!info.windows) row->step_gbs = ((double)info.linear_bytes + kv) / step / 1e9;
    }
out:
    return rc;
}
