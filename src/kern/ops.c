/* The public operators: pick the version of this CPU (resolved once at open), split rows over the
 * team when there is enough work, and call it. Small steps run on the calling thread: waking a
 * worker costs more than a norm. */
#include <string.h>
#include "kern/ops.h"

#define SPLIT_CELLS 16384 /* elements from which the team helps */

static const kern__ops *const tables[] = {&kern__ops_avx512, &kern__ops_avx2, &kern__ops_ref};
enum { N_TABLES = 3 };

void kern__ops_resolve(uint32_t features, kern__ops *out)
{
    *out = kern__ops_ref;
    for (int i = N_TABLES - 1; i >= 0; i--) {
        const kern__ops *t = tables[i];
        if (t->needs & ~features) continue;
        out->name = t->name;
        if (t->rmsnorm) out->rmsnorm = t->rmsnorm;
        if (t->add) out->add = t->add;
        if (t->rope) out->rope = t->rope;
        if (t->glu) out->glu = t->glu;
        if (t->round_fp8) out->round_fp8 = t->round_fp8;
        if (t->round_int) out->round_int = t->round_int;
        if (t->amax) out->amax = t->amax;
        if (t->quant_i8) out->quant_i8 = t->quant_i8;
        if (t->split_bf16) out->split_bf16 = t->split_bf16;
        if (t->kv_put) out->kv_put = t->kv_put;
    }
    out->needs = features;
}

typedef struct row_job {
    void (*fn)(const struct row_job *j, int64_t lo, int64_t hi);
    const kern__ops *ops;
    int64_t T;
    float *x;
    const float *y, *w;
    float eps, *out;
    int64_t K, ld;
    int H, D, rot_dim;
    const float *cosv, *sinv;
    kern_glu act;
    const qtensor *table;
    const int32_t *ids;
} row_job;

static void rows_part(void *arg, int index, int n)
{
    row_job *j = arg;
    int64_t lo, hi;
    thread_split(j->T, 1, index, n, &lo, &hi);
    if (lo < hi) j->fn(j, lo, hi);
}

static void split(kern_dev *d, row_job *j, int64_t cells)
{
    j->ops = KERN__OPS(d);
    if (cells < SPLIT_CELLS || j->T < 2)
        j->fn(j, 0, j->T);
    else
        team_run(d->team, rows_part, j);
}

static void rmsnorm_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++) {
        if (j->y) j->ops->add(j->x + t * j->K, j->y + t * j->K, j->K);
        j->ops->rmsnorm(j->x + t * j->K, j->w, j->eps, j->K, j->out + t * j->K);
    }
}

void kern_add_rmsnorm(kern_dev *d, float *x, const float *y, const float *w, float eps, int64_t T,
                      int64_t K, float *out)
{
    row_job j = {
        .fn = rmsnorm_rows, .T = T, .x = x, .y = y, .w = w, .eps = eps, .K = K, .out = out};
    split(d, &j, T * K);
}

static void norm_only_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++)
        j->ops->rmsnorm(j->y + t * j->K, j->w, j->eps, j->K, j->out + t * j->K);
}

void kern_rmsnorm(kern_dev *d, const float *x, const float *w, float eps, int64_t T, int64_t K,
                  float *out)
{
    row_job j = {.fn = norm_only_rows, .T = T, .y = x, .w = w, .eps = eps, .K = K, .out = out};
    split(d, &j, T * K);
}

static void add_rows(const row_job *j, int64_t lo, int64_t hi)
{
    j->ops->add(j->x + lo, j->y + lo, hi - lo);
}

void kern_add(kern_dev *d, float *x, const float *y, int64_t n)
{
    row_job j = {.fn = add_rows, .T = n, .x = x, .y = y};
    split(d, &j, n);
}

static void head_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++)
        for (int h = 0; h < j->H; h++) {
            float *x = j->x + t * j->ld + (int64_t)h * j->D;
            j->ops->rmsnorm(x, j->w, j->eps, j->D, x);
        }
}

void kern_head_rmsnorm(kern_dev *d, float *x, int64_t ld, int H, int D, const float *w, float eps,
                       int64_t T)
{
    row_job j = {.fn = head_rows, .T = T, .x = x, .ld = ld, .H = H, .D = D, .w = w, .eps = eps};
    split(d, &j, T * H * D);
}

static void rope_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++)
        for (int h = 0; h < j->H; h++)
            j->ops->rope(j->x + t * j->ld + (int64_t)h * j->D, j->rot_dim,
                         j->cosv + t * (j->rot_dim / 2), j->sinv + t * (j->rot_dim / 2));
}

void kern_rope(kern_dev *d, float *q, int64_t ldq, int H, float *k, int64_t ldk, int Hk, int D,
               int rot_dim, const float *cosv, const float *sinv, int64_t T)
{
    row_job j = {.fn = rope_rows,
                 .T = T,
                 .x = q,
                 .ld = ldq,
                 .H = H,
                 .D = D,
                 .rot_dim = rot_dim,
                 .cosv = cosv,
                 .sinv = sinv};
    if (q) split(d, &j, T * H * D);
    j.x = k;
    j.ld = ldk;
    j.H = Hk;
    if (k) split(d, &j, T * Hk * D);
}

static void glu_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++)
        j->ops->glu(j->act, j->y + t * j->ld, j->y + t * j->ld + j->K, j->K, j->out + t * j->K);
}

void kern_glu_mul(kern_dev *d, kern_glu act, const float *gu, int64_t ld, int64_t F, int64_t T,
                  float *out)
{
    row_job j = {.fn = glu_rows, .T = T, .y = gu, .ld = ld, .K = F, .act = act, .out = out};
    split(d, &j, T * F);
}

static void embed_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++)
        qtensor_decode_row(j->table, j->ids[t], j->out + t * j->table->K);
}

void kern_embed(kern_dev *d, const qtensor *table, const int32_t *ids, int64_t T, float *out)
{
    row_job j = {.fn = embed_rows, .T = T, .table = table, .ids = ids, .out = out};
    split(d, &j, T * table->K);
}

/* ---- KV store and attention -------------------------------------------------------------- */

typedef struct store_job {
    const kern__ops *ops;
    const kern_kv_layer *kv;
    const float *k, *v;
    int64_t ldk, ldv, T;
    const int32_t *slot;
    uint64_t clipped;
} store_job;

static void store_part(void *arg, int index, int n)
{
    store_job *j = arg;
    int64_t lo, hi;
    uint64_t clipped = 0;
    thread_split(j->T, 1, index, n, &lo, &hi);
    for (int64_t t = lo; t < hi; t++)
        for (int h = 0; h < j->kv->Hk; h++) {
            int64_t at = (int64_t)h * j->kv->D;
            clipped += j->ops->kv_put(j->kv, 0, h, j->slot[t], j->k + t * j->ldk + at);
            clipped += j->ops->kv_put(j->kv, 1, h, j->slot[t], j->v + t * j->ldv + at);
        }
    __atomic_fetch_add(&j->clipped, clipped, __ATOMIC_RELAXED);
}

uint64_t kern_kv_store(kern_dev *d, const kern_kv_layer *kv, const float *k, int64_t ldk,
                       const float *v, int64_t ldv, const int32_t *slot, int64_t T)
{
    store_job j = {.ops = KERN__OPS(d),
                   .kv = kv,
                   .k = k,
                   .v = v,
                   .ldk = ldk,
                   .ldv = ldv,
                   .T = T,
                   .slot = slot};
    if (T * kv->Hk * kv->D < SPLIT_CELLS / 4)
        store_part(&j, 0, 1);
    else
        team_run(d->team, store_part, &j);
    return j.clipped;
}

void kern_attention(kern_dev *d, const kern_attn_args *a)
{
    for (int i = 0; i < N_TABLES; i++)
        if (!(tables[i]->needs & ~d->features) && tables[i]->attention &&
            tables[i]->attention(d, a))
            return;
}

/* ---- the list, for tests and reports ----------------------------------------------------- */

#define ROWS(table, needs)                                                                         \
    {"rmsnorm", table, needs}, {"add", table, needs}, {"rope", table, needs},                      \
        {"glu", table, needs}, {"attention", table, needs}, {"round_fp8", table, needs},           \
        {"round_int", table, needs}, {"amax", table, needs}, {"quant_i8", table, needs},           \
        {"split_bf16", table, needs},                                                              \
    {                                                                                              \
        "kv_put", table, needs                                                                     \
    }
const kern_op_row kern_op_rows[] = {ROWS("avx512", CPU_AVX512), ROWS("avx2", CPU_AVX2),
                                    ROWS("ref", 0)};
const int kern_n_op_rows = (int)(sizeof kern_op_rows / sizeof *kern_op_rows);
