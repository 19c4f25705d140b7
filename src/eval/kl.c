/* KL divergence and top-1 agreement of a candidate against its baseline, token by token.
 *
 * Both engines compute the same window at the same time and hand out their logit rows chunk by
 * chunk. The two sinks meet: each offers its rows and sleeps until the other has offered the same
 * positions; the later one does the arithmetic from both engines' own memory. No row is copied or
 * kept, so the memory is that of the engines whatever the vocabulary. A sink that waits holds back
 * its engine: that is wanted here, the engines have nothing else to do.
 *
 * For each scored position t, over the whole vocabulary, softmax in double:
 *     KL(t) = sum_i p_base(i) (ln p_base(i) - ln p_cand(i))
 *     nll   = -ln p(next token), for both           top1 = same most likely token (lowest id on
 * ties)
 *
 * Windows, BOS and scored positions are those of perplexity.c. Rows beyond the smaller of the two
 * vocabularies (padding) are left out on both sides. */
#include "eval/local.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/file.h"
#include "base/log.h"
#include "base/thread.h"

typedef struct offer {
    const float *rows;
    int64_t pos, end, vocab;
    bool done;
} offer;

typedef struct token_kl {
    double kl, nll_base, nll_cand;
    bool same_top, bad;
} token_kl;

typedef struct meeting {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    offer side[2];
    bool stop;
    err error;
    team *workers;
    /* the window */
    const int32_t *prompt;
    int64_t n_prompt, from, lo, hi;
    token_kl *out; /* [n_prompt]: entry t is about token t */
    int64_t n_out, n_windows;
} meeting;

typedef struct seat {
    meeting *m;
    int who;
} seat;

static double log_sum_exp(const float *x, int64_t n, int64_t *top)
{
    double sum = 0;
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    double max = (double)x[best];
    for (int64_t i = 0; i < n; i++)
        sum += exp((double)x[i] - max);
    *top = best;
    return max + log(sum);
}

static void one_row(const float *b, const float *c, int64_t n, int32_t next, token_kl *out)
{
    int64_t top_b, top_c;
    double lb = log_sum_exp(b, n, &top_b), lc = log_sum_exp(c, n, &top_c), kl = 0;
    for (int64_t i = 0; i < n; i++) {
        double lp = (double)b[i] - lb, p = exp(lp);
        if (p > 0) kl += p * (lp - ((double)c[i] - lc));
    }
    out->kl = kl > 0 || isnan(kl) ? kl : 0; /* rounding may leave -1e-17 */
    out->nll_base = next < n ? lb - (double)b[next] : INFINITY;
    out->nll_cand = next < n ? lc - (double)c[next] : INFINITY;
    out->same_top = top_b == top_c;
    out->bad = isnan(kl);
}

/* Positions [lo, hi) that both sides hold; row t predicts token t + 1. */
static void overlap_rows(void *arg, int index, int n)
{
    meeting *m = arg;
    int64_t a, z, vocab = m->side[0].vocab < m->side[1].vocab ? m->side[0].vocab : m->side[1].vocab;
    thread_split(m->hi - m->lo, 1, index, n, &a, &z);
    for (int64_t t = m->lo + a; t < m->lo + z; t++) {
        const offer *b = &m->side[0], *c = &m->side[1];
        if (t + 1 >= m->n_prompt || t + 1 < m->from) continue;
        one_row(b->rows + (t - b->pos) * b->vocab, c->rows + (t - c->pos) * c->vocab, vocab,
                m->prompt[t + 1], &m->out[t + 1]);
    }
}

static void consume(meeting *m)
{
    offer *b = &m->side[0], *c = &m->side[1];
    m->lo = b->pos > c->pos ? b->pos : c->pos;
    m->hi = b->end < c->end ? b->end : c->end;
    if (b->pos != c->pos) {
        err_set(&m->error, ERR_BADSTATE, "the engines' logits are out of step (%lld and %lld)",
                (long long)b->pos, (long long)c->pos);
        m->stop = true;
        return;
    }
    team_run(m->workers, overlap_rows, m);
    m->n_out += m->hi - m->lo;
    for (int i = 0; i < 2; i++) {
        offer *o = &m->side[i];
        o->rows += (m->hi - o->pos) * o->vocab;
        o->pos = m->hi;
    }
}

static bool waiting(const offer *o)
{
    return o->rows && o->pos < o->end;
}

static void sink(void *arg, const engine_event *ev)
{
    seat *s = arg;
    meeting *m = s->m;
    offer *mine = &m->side[s->who], *other = &m->side[1 - s->who];
    if (ev->kind != EV_LOGITS && ev->kind != EV_DONE) return;
    pthread_mutex_lock(&m->lock);
    if (ev->kind == EV_LOGITS && !m->stop) {
        *mine =
            (offer){.rows = ev->logits, .pos = ev->pos, .end = ev->pos + ev->n, .vocab = ev->vocab};
        while (waiting(mine) && !m->stop) {
            if (waiting(other)) {
                consume(m);
                pthread_cond_broadcast(&m->moved);
            } else if (other->done) {
                break;
            } else {
                pthread_cond_wait(&m->moved, &m->lock);
            }
        }
        mine->rows = NULL;
    }
    if (ev->kind == EV_DONE) {
        mine->done = true;
        if (ev->reason == FINISH_ERROR || ev->reason == FINISH_CANCELLED) {
            m->stop = true;
            if (!m->error.code && ev->error) m->error = *ev->error;
            if (!m->error.code) err_set(&m->error, ERR_FAIL, "an engine gave up on a window");
        }
        pthread_cond_broadcast(&m->moved);
    }
    pthread_mutex_unlock(&m->lock);
}

static int submit(engine *en, seat *s, const ids *prompt, err *e)
{
    req_params p;
    uint64_t id;
    req_params_default(&p);
    p.prompt = prompt->v;
    p.n_prompt = (int64_t)prompt->n;
    p.max_tokens = 0;
    p.want = WANT_LOGITS;
    p.cache_salt =
        (uint64_t)(uintptr_t)s + (uint64_t)++s->m->n_windows; /* every row, none reused */
    p.sink = sink;
    p.sink_arg = s;
    return engine_submit(en, &p, &id, e);
}

/* One window through both engines; returns when both are done. */
static int window(meeting *m, engine *const en[2], const ids *prompt, int64_t from, err *e)
{
    seat seats[2] = {{m, 0}, {m, 1}};
    int rc = 0;
    m->prompt = prompt->v;
    m->n_prompt = (int64_t)prompt->n;
    m->from = from;
    m->n_out = 0;
    memset(m->side, 0, sizeof m->side);
    memset(m->out, 0, (size_t)m->n_prompt * sizeof *m->out);
    for (int i = 0; i < 2; i++) {
        int got = rc < 0 ? rc : submit(en[i], &seats[i], prompt, e);
        pthread_mutex_lock(&m->lock);
        if (got < 0) {
            rc = got;
            m->stop = m->side[i].done = true;
        }
        pthread_cond_broadcast(&m->moved);
        pthread_mutex_unlock(&m->lock);
    }
    pthread_mutex_lock(&m->lock);
    while (!m->side[0].done || !m->side[1].done)
        pthread_cond_wait(&m->moved, &m->lock);
    if (rc == 0 && m->error.code) rc = err_set(e, m->error.code, "%s", m->error.msg);
    if (rc == 0 && m->n_out + 1 < m->n_prompt)
        rc = err_set(e, ERR_FAIL, "the engines gave logits of %lld of %lld positions",
                     (long long)m->n_out, (long long)m->n_prompt);
    pthread_mutex_unlock(&m->lock);
    return rc;
}

typedef struct totals {
    double *kl;
    size_t n, cap, same, bad;
    double sum_kl, nll[2];
} totals;

static void add_window(totals *s, const meeting *m)
{
    for (int64_t t = m->from; t < m->n_prompt; t++) {
        const token_kl *k = &m->out[t];
        if (s->n == s->cap) {
            s->cap = s->cap ? 2 * s->cap : 4096;
            s->kl = xrealloc(s->kl, s->cap * sizeof *s->kl);
        }
        s->kl[s->n++] = k->bad ? INFINITY : k->kl;
        s->sum_kl += k->bad ? INFINITY : k->kl;
        s->nll[0] += k->nll_base;
        s->nll[1] += k->nll_cand;
        s->same += k->same_top;
        s->bad += k->bad;
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Linear interpolation between order statistics, as numpy.percentile. */
static double percentile(const double *sorted, size_t n, double q)
{
    double at = q * (double)(n - 1);
    size_t i = (size_t)at;
    if (i + 1 >= n || sorted[i] == sorted[i + 1]) return sorted[i];
    return sorted[i] + (at - (double)i) * (sorted[i + 1] - sorted[i]);
}

static void finish(totals *s, const ppl_text *t, int64_t windows, compare_result *r)
{
    eval_ppl *p[2] = {&r->ppl_base, &r->ppl_cand};
    double n = (double)s->n;
    qsort(s->kl, s->n, sizeof *s->kl, by_value);
    r->kl_tokens = (int64_t)s->n;
    r->kl_mean = s->sum_kl / n;
    r->kl_p50 = percentile(s->kl, s->n, 0.5);
    r->kl_p90 = percentile(s->kl, s->n, 0.9);
    r->kl_p99 = percentile(s->kl, s->n, 0.99);
    r->kl_max = s->kl[s->n - 1];
    r->top1 = (double)s->same / n;
    for (int i = 0; i < 2; i++) {
        eval__ppl_head(t, p[i]);
        p[i]->n_tokens = (int64_t)s->n;
        p[i]->n_windows = windows;
        p[i]->nll = s->nll[i] / n;
        p[i]->perplexity = exp(p[i]->nll);
    }
    r->has_ppl = true;
    if (s->bad) log_warn("KL: %zu of %zu positions have logits that are not numbers", s->bad, s->n);
}

int eval__kl(engine *base, engine *cand, const char *file, const eval_opts *o, compare_result *r,
             err *e)
{
    int rc;
    int64_t shorter =
        engine_max_len(base) < engine_max_len(cand) ? engine_max_len(base) : engine_max_len(cand);
    engine *const both[2] = {base, cand};
    ppl_text t = {0};
    ids prompt = {0};
    ppl_window w = {0};
    totals s = {0};
    int64_t windows = 0;
    progress p;
    meeting m = {0};
    pthread_mutex_init(&m.lock, NULL);
    pthread_cond_init(&m.moved, NULL);
    progress_start(&p, "perplexity and KL", 0);
    TRY(team_open(&m.workers, 0, e));
    TRY(eval__ppl_open(&t, engine_tokenizer(base), shorter, file, o, e));
    p.total = (uint64_t)t.text.n;
    m.out = xcalloc((size_t)t.window + 1, sizeof *m.out);
    while (eval__ppl_next(&t, &w)) {
        prompt.n = 0;
        eval__ppl_prompt(&t, &w, &prompt);
        if ((int64_t)prompt.n <= w.from) continue;
        rc = window(&m, both, &prompt, w.from, e);
        if (rc < 0) {
            err_wrap(e, "%s: window %lld", file, (long long)windows);
            goto out;
        }
        add_window(&s, &m);
        windows++;
        progress_step(&p, (uint64_t)w.end, NULL);
    }
    if (s.n) finish(&s, &t, windows, r);
    rc = 0;
out:
    progress_end(&p);
    team_close(m.workers);
    pthread_cond_destroy(&m.moved);
    pthread_mutex_destroy(&m.lock);
    free(m.out);
    free(s.kl);
    ids_free(&prompt);
    eval__ppl_free(&t);
    return rc;
}
