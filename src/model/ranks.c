/* One model on several devices. The model that callers have is that of rank 0; it holds the others.
 * Each rank is loaded and driven by a thread of its own, rank 0 by the caller's: what taps and
 * logits see happens there. A step is handed to all; the first rank that fails makes the others
 * fail too, and the next step begins with all of them ready again.
 *
 * While loading, a stored linear is read (and quantized) once, by the rank that comes first, and
 * lent to all; it goes when the last has cut its part out. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include "model/model_internal.h"

/* ---- whole linears while loading ----------------------------------------------------------------
 */

typedef struct lent {
    model_loaded s; /* first */
    struct lent *next;
    char module[128];
    int left; /* ranks that have yet to give it back */
} lent;

struct model_share {
    pthread_mutex_t lock;
    lent *first;
    bool failed;
};

void model__share_lock(model *m)
{
    if (m->share) pthread_mutex_lock(&m->share->lock);
}

void model__share_unlock(model *m)
{
    if (m->share) pthread_mutex_unlock(&m->share->lock);
}

static lent *find(model *m, const char *module)
{
    for (lent *x = m->share ? m->share->first : NULL; x; x = x->next)
        if (!strcmp(x->module, module)) return x;
    return NULL;
}

/* Random weights are lent by each model itself. */
static bool shared(const model *m)
{
    return m->share && !m->opts.random;
}

static int read_whole(model *m, const arch_linear *l, lent **out, err *e)
{
    lent *x = xcalloc(1, sizeof *x);
    int rc = model__load_whole(m, l, &x->s, e);
    if (rc < 0) {
        free(x);
        return rc;
    }
    x->left = 1;
    *out = x;
    if (!shared(m)) return 0;
    memcpy(x->module, l->shard[0].module, sizeof x->module);
    x->left = m->arch->n_ranks;
    x->next = m->share->first;
    m->share->first = x;
    return 0;
}

int model__share_take(model *m, const arch_linear *l, model_loaded **out, err *e)
{
    lent *x = NULL;
    int rc = 0;
    model__share_lock(m);
    if (m->share && m->share->failed)
        rc = err_set(e, ERR_CANCELLED, "another device could not load its part");
    else if (!(x = find(m, l->shard[0].module)))
        rc = read_whole(m, l, &x, e);
    model__share_unlock(m);
    *out = x ? &x->s : NULL;
    return rc;
}

bool model__share_give(model *m, model_loaded *s)
{
    lent *x = (lent *)(void *)s;
    model__share_lock(m);
    bool last = --x->left == 0;
    if (last && *x->module) {
        lent **p = &m->share->first;
        while (*p != x)
            p = &(*p)->next;
        *p = x->next;
    }
    model__share_unlock(m);
    if (!last) return false;
    model__loaded_drop(&x->s);
    free(x);
    return true;
}

static struct model_share *share_open(void)
{
    struct model_share *s = xcalloc(1, sizeof *s);
    pthread_mutex_init(&s->lock, NULL);
    return s;
}

/* After a failure some linears were not given back by all. */
static void share_close(struct model_share *s)
{
    while (s->first) {
        lent *x = s->first;
        s->first = x->next;
        model__loaded_drop(&x->s);
        free(x);
    }
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* ---- all ranks at once --------------------------------------------------------------------------
 */

typedef struct job {
    model *m; /* rank 0 */
    int (*run)(struct job *j, model *rank, err *e);
    int *rc;
    err *e;
    atomic_int failed; /* the first that did, -1 = none */
    quant_ckpt *q;
    const model_opts *opts;
    kv_pool *kv;
    const batch *b;
    float *logits;
} job;

static void run_rank(void *arg, int i, int n)
{
    job *j = arg;
    (void)n;
    j->rc[i] = j->run(j, j->m->ranks[i], &j->e[i]);
}

/* Said before others are made to fail too. */
static void note_failure(job *j, const model *m)
{
    int none = -1;
    atomic_compare_exchange_strong(&j->failed, &none, m->dev->rank);
}

static int run_all(job *j, err *e)
{
    model *m = j->m;
    j->rc = xcalloc((size_t)m->n_ranks, sizeof *j->rc);
    j->e = xcalloc((size_t)m->n_ranks, sizeof *j->e);
    atomic_store(&j->failed, -1);
    team_run(m->owners, run_rank, j);
    int bad = atomic_load(&j->failed);
    int rc = bad < 0 ? 0 : err_set(e, j->e[bad].code, "%s", j->e[bad].msg);
    free(j->rc);
    free(j->e);
    return rc;
}

/* ---- opening ------------------------------------------------------------------------------------
 */

static int load_rank(job *j, model *m, err *e)
{
    int rc = model__fill(m, e);
    if (rc < 0) {
        note_failure(j, m);
        model__share_lock(m);
        m->share->failed = true;
        model__share_unlock(m);
    }
    return rc;
}

int model__open_ranks(model *m, err *e)
{
    int n = kern_n_ranks(m->dev), rc = 0;
    m->ranks = xcalloc((size_t)n, sizeof *m->ranks);
    struct model_share *share = m->share = share_open();
    m->ranks[0] = m;
    for (m->n_ranks = 1; m->n_ranks < n; m->n_ranks++) {
        model *r = m->ranks[m->n_ranks] =
            model__make(m->q, kern_rank(m->dev, m->n_ranks), &m->opts);
        r->share = share;
    }
    TRY(team_open(&m->owners, n, e));
    job j = {.m = m, .run = load_rank};
    rc = run_all(&j, e);
out:
    for (int i = 0; i < m->n_ranks; i++)
        m->ranks[i]->share = NULL;
    share_close(share);
    return rc;
}

void model__close_ranks(model *m)
{
    if (m->owners) team_close(m->owners);
    for (int i = 1; i < m->n_ranks; i++)
        model_close(m->ranks[i]);
    free(m->ranks);
}

int model_pool_open(model *m, kv_pool **out, const kv_pool_opts *o, err *e)
{
    int rc = 0;
    *out = NULL;
    for (int i = 0; i < (m->n_ranks ? m->n_ranks : 1); i++) {
        model *r = m->n_ranks ? m->ranks[i] : m;
        kv_pool *p = NULL;
        kv_pool_opts mine = *o;
        mine.n_layers = r->n_layers;
        mine.layers = r->kv_shapes;
        mine.k_scale = r->k_scales;
        mine.v_scale = r->v_scales;
        TRY(kv_pool_open(&p, r->dev, &mine, e));
        if (i)
            kv_pool_attach(*out, p);
        else
            *out = p;
    }
out:
    if (rc < 0) {
        kv_pool_close(*out);
        *out = NULL;
    }
    return rc;
}

/* ---- a step -------------------------------------------------------------------------------------
 */

static int step_rank(job *j, model *m, err *e)
{
    int rc = model__step(m, kv_pool_rank(j->kv, m->arch->rank), j->b, j->logits, e);
    if (rc < 0) {
        note_failure(j, m);
        kern_ranks_fail(m->dev);
    }
    return rc;
}

int model__step_ranks(model *m, kv_pool *kv, const batch *b, float *logits, err *e)
{
    int rc = kern_ranks_mend(m->dev, e);
    if (rc < 0) return rc;
    job j = {.m = m, .run = step_rank, .kv = kv, .b = b, .logits = logits};
    return run_all(&j, e);
}

/* What every rank does at a tap, so that steps of all are cut alike. */
static void blind(void *arg, int layer, const float *x, int64_t T, int64_t hidden)
{
    (void)arg, (void)layer, (void)x, (void)T, (void)hidden;
}

void model__tap_ranks(model *m, bool on)
{
    for (int i = 1; i < m->n_ranks; i++)
        model_set_tap(m->ranks[i], on ? blind : NULL, NULL);
}

/* Keys and values that several ranks keep are counted once. */
uint64_t model__clipped_ranks(const model *m)
{
    const arch_model *a = m->arch;
    uint64_t n = 0;
    int copies = a->heads_cut && a->n_ranks <= a->Hk_all ? 1 : a->n_ranks;
    if (a->heads_cut && a->n_ranks > a->Hk_all) copies = a->n_ranks / a->Hk_all;
    for (int i = 0; i < m->n_ranks; i++)
        n += m->ranks[i]->kv_clipped + kern_clipped(m->ranks[i]->dev);
    return n / (uint64_t)copies;
}
