/* The public operators: pick the version of this CPU (resolved once at open), split rows over the
 * team when there is enough work, and call it. Small steps run on the calling thread: waking a
 * worker costs more than a norm. */
#include <string.h>
#include "kern/backend.h"
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
#define TAKE(op)                                                                                   \
    if (t->op) out->op = t->op;
        KERN__OP_LIST(TAKE)
#undef TAKE
    }
    out->needs = features;
}

typedef struct row_job {
    void (*fn)(const struct row_job *j, int64_t lo, int64_t hi);
    const kern__ops *ops;
    int64_t T;
    float *x;
    const float *y, *w, *b;
    float eps, s, *out;
    int64_t K, ld, ldy, ldo;
    int H, D, rot_dim;
    const float *cosv, *sinv;
    void (*turn)(float *x, int rot_dim, const float *cosv, const float *sinv);
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
    KERN__ELSEWHERE(d, add_rmsnorm(d, x, y, w, eps, T, K, out))
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
    KERN__ELSEWHERE(d, rmsnorm(d, x, w, eps, T, K, out))
    row_job j = {.fn = norm_only_rows, .T = T, .y = x, .w = w, .eps = eps, .K = K, .out = out};
    split(d, &j, T * K);
}

static void layernorm_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++)
        j->ops->layernorm(j->y + t * j->K, j->w, j->b, j->eps, j->K, j->out + t * j->K);
}

void kern_layernorm(kern_dev *d, const float *x, const float *w, const float *b, float eps,
                    int64_t T, int64_t K, float *out)
{
    KERN__ELSEWHERE(d, layernorm(d, x, w, b, eps, T, K, out))
    row_job j = {
        .fn = layernorm_rows, .T = T, .y = x, .w = w, .b = b, .eps = eps, .K = K, .out = out};
    split(d, &j, T * K);
}

static void gated_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++)
        for (int h = 0; h < j->H; h++) {
            int64_t at = (t * j->H + h) * j->D;
            j->ops->gated_rmsnorm(j->y + at, j->b + t * j->ld + (int64_t)h * j->D, j->w, j->eps,
                                  j->D, j->out + at);
        }
}

void kern_gated_rmsnorm(kern_dev *d, const float *x, const float *gate, int64_t ldg, int H, int D,
                        const float *w, float eps, int64_t T, float *out)
{
    KERN__ELSEWHERE(d, gated_rmsnorm(d, x, gate, ldg, H, D, w, eps, T, out))
    row_job j = {.fn = gated_rows,
                 .T = T,
                 .y = x,
                 .b = gate,
                 .ld = ldg,
                 .H = H,
                 .D = D,
                 .w = w,
                 .eps = eps,
                 .out = out};
    split(d, &j, T * H * D);
}

static void add_rows(const row_job *j, int64_t lo, int64_t hi)
{
    j->ops->add(j->x + lo, j->y + lo, hi - lo);
}

void kern_add(kern_dev *d, float *x, const float *y, int64_t n)
{
    KERN__ELSEWHERE(d, add_scaled(d, x, y, 1.0f, n))
    row_job j = {.fn = add_rows, .T = n, .x = x, .y = y};
    split(d, &j, n);
}

static void add_scaled_rows(const row_job *j, int64_t lo, int64_t hi)
{
    j->ops->add_scaled(j->x + lo, j->y + lo, j->s, hi - lo);
}

void kern_add_scaled(kern_dev *d, float *x, const float *y, float s, int64_t n)
{
    KERN__ELSEWHERE(d, add_scaled(d, x, y, s, n))
    row_job j = {.fn = add_scaled_rows, .T = n, .x = x, .y = y, .s = s};
    split(d, &j, n);
}

static void scale_rows(const row_job *j, int64_t lo, int64_t hi)
{
    j->ops->scale(j->x + lo, j->s, hi - lo);
}

void kern_scale(kern_dev *d, float *x, float s, int64_t n)
{
    KERN__ELSEWHERE(d, scale(d, x, s, n))
    row_job j = {.fn = scale_rows, .T = n, .x = x, .s = s};
    split(d, &j, n);
}

static void softcap_rows(const row_job *j, int64_t lo, int64_t hi)
{
    j->ops->softcap(j->x + lo, j->s, hi - lo);
}

void kern_softcap(kern_dev *d, float *x, float cap, int64_t n)
{
    KERN__ELSEWHERE(d, softcap(d, x, cap, n))
    row_job j = {.fn = softcap_rows, .T = n, .x = x, .s = cap};
    split(d, &j, n);
}

static void sigmoid_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++)
        j->ops->sigmoid_mul(j->x + t * j->ld, j->y + t * j->ldy, j->K);
}

void kern_sigmoid_mul(kern_dev *d, float *x, int64_t ldx, const float *g, int64_t ldg, int64_t n,
                      int64_t T)
{
    KERN__ELSEWHERE(d, gate(d, x, ldx, g, ldg, n, T, false))
    row_job j = {.fn = sigmoid_rows, .T = T, .x = x, .ld = ldx, .y = g, .ldy = ldg, .K = n};
    split(d, &j, T * n);
}

static void gate_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++)
        j->ops->scale(j->x + t * j->ld, 1.0f / (1.0f + expf(-j->y[t * j->ldy])), j->K);
}

void kern_row_sigmoid(kern_dev *d, float *x, int64_t ldx, const float *g, int64_t ldg, int64_t n,
                      int64_t T)
{
    KERN__ELSEWHERE(d, gate(d, x, ldx, g, ldg, n, T, true))
    row_job j = {.fn = gate_rows, .T = T, .x = x, .ld = ldx, .y = g, .ldy = ldg, .K = n};
    split(d, &j, T * n);
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
    KERN__ELSEWHERE(d, head_rmsnorm(d, x, ld, H, D, w, eps, T))
    row_job j = {.fn = head_rows, .T = T, .x = x, .ld = ld, .H = H, .D = D, .w = w, .eps = eps};
    split(d, &j, T * H * D);
}

static void head_layernorm_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++)
        for (int h = 0; h < j->H; h++) {
            float *x = j->x + t * j->ld + (int64_t)h * j->D;
            j->ops->layernorm(x, j->w + (int64_t)h * j->D, NULL, j->eps, j->D, x);
        }
}

void kern_head_layernorm(kern_dev *d, float *x, int64_t ld, int H, int D, const float *w, float eps,
                         int64_t T)
{
    KERN__ELSEWHERE(d, head_layernorm(d, x, ld, H, D, w, eps, T))
    row_job j = {
        .fn = head_layernorm_rows, .T = T, .x = x, .ld = ld, .H = H, .D = D, .w = w, .eps = eps};
    split(d, &j, T * H * D);
}

static void rope_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++)
        for (int h = 0; h < j->H; h++)
            j->turn(j->x + t * j->ld + (int64_t)h * j->D, j->rot_dim,
                    j->cosv + t * (j->rot_dim / 2), j->sinv + t * (j->rot_dim / 2));
}

static void rope_both(kern_dev *d, row_job *j, float *q, int64_t ldq, int H, float *k, int64_t ldk,
                      int Hk)
{
    j->fn = rope_rows;
    j->x = q;
    j->ld = ldq;
    j->H = H;
    if (q) split(d, j, j->T * H * j->D);
    j->x = k;
    j->ld = ldk;
    j->H = Hk;
    if (k) split(d, j, j->T * Hk * j->D);
}

void kern_rope(kern_dev *d, float *q, int64_t ldq, int H, float *k, int64_t ldk, int Hk, int D,
               int rot_dim, const float *cosv, const float *sinv, int64_t T)
{
    KERN__ELSEWHERE(d, rope(d, q, ldq, H, k, ldk, Hk, D, rot_dim, cosv, sinv, T, false))
    row_job j = {.T = T, .D = D, .rot_dim = rot_dim, .cosv = cosv, .sinv = sinv};
    j.turn = KERN__OPS(d)->rope;
    rope_both(d, &j, q, ldq, H, k, ldk, Hk);
}

void kern_rope_pairs(kern_dev *d, float *q, int64_t ldq, int H, float *k, int64_t ldk, int Hk,
                     int D, int rot_dim, const float *cosv, const float *sinv, int64_t T)
{
    KERN__ELSEWHERE(d, rope(d, q, ldq, H, k, ldk, Hk, D, rot_dim, cosv, sinv, T, true))
    row_job j = {.T = T, .D = D, .rot_dim = rot_dim, .cosv = cosv, .sinv = sinv};
    j.turn = KERN__OPS(d)->rope_pairs;
    rope_both(d, &j, q, ldq, H, k, ldk, Hk);
}

static void glu_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++)
        j->ops->glu(j->act, j->y + t * j->ld, j->y + t * j->ld + j->K, j->K, j->out + t * j->K);
}

void kern_glu_mul(kern_dev *d, kern_glu act, const float *gu, int64_t ld, int64_t F, int64_t T,
                  float *out)
{
    KERN__ELSEWHERE(d, glu(d, act, true, gu, ld, F, T, out, F))
    row_job j = {.fn = glu_rows, .T = T, .y = gu, .ld = ld, .K = F, .act = act, .out = out};
    split(d, &j, T * F);
}

static void act_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++)
        j->ops->act(j->act, j->y + t * j->ld, j->K, j->out + t * j->ldo);
}

void kern_act_apply(kern_dev *d, kern_glu act, const float *x, int64_t ld, int64_t F, int64_t T,
                    float *out, int64_t ldo)
{
    KERN__ELSEWHERE(d, glu(d, act, false, x, ld, F, T, out, ldo))
    row_job j = {
        .fn = act_rows, .T = T, .y = x, .ld = ld, .K = F, .act = act, .out = out, .ldo = ldo};
    split(d, &j, T * F);
}

static void embed_rows(const row_job *j, int64_t lo, int64_t hi)
{
    for (int64_t t = lo; t < hi; t++)
        qtensor_decode_row(j->table, j->ids[t], j->out + t * j->table->K);
}

void kern_embed(kern_dev *d, const qtensor *table, const int32_t *ids, int64_t T, float *out)
{
    KERN__ELSEWHERE(d, embed(d, table, ids, T, out))
    row_job j = {.fn = embed_rows, .T = T, .table = table, .ids = ids, .out = out};
    split(d, &j, T * table->K);
}

/* ---- matrices of heads ---------------------------------------------------------------------- */

#define HEAD_ROWS 16 /* rows of w in a work item */

typedef struct head_job {
    kern_dev *d;
    const qtensor *w;
    const float *x;
    int64_t ldx, ldh, T;
    float *out;
    int64_t ldo, ldoh;
} head_job;

static void head_part(void *arg, int index, int n)
{
    const head_job *j = arg;
    int64_t blocks = (j->w->N + HEAD_ROWS - 1) / HEAD_ROWS, lo, hi;
    thread_split(j->w->E * blocks, 1, index, n, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        int64_t h = i / blocks, n0 = i % blocks * HEAD_ROWS;
        int64_t rows = j->w->N - n0 < HEAD_ROWS ? j->w->N - n0 : HEAD_ROWS;
        KERN__OPS(j->d)->head_rows(j->w, h * j->w->N + n0, rows, j->x + h * j->ldh, j->ldx, j->T,
                                   j->out + h * j->ldoh + n0, j->ldo,
                                   kern__thread_buffer(j->d, index));
    }
}

void kern_head_matmul(kern_dev *d, const qtensor *w, const float *x, int64_t ldx, int64_t ldh,
                      int64_t T, float *out, int64_t ldo, int64_t ldoh)
{
    KERN__ELSEWHERE(d, head_matmul(d, w, x, ldx, ldh, T, out, ldo, ldoh))
    head_job j = {d, w, x, ldx, ldh, T, out, ldo, ldoh};
    if (w->E * w->N * w->K * T < SPLIT_CELLS)
        head_part(&j, 0, 1);
    else
        team_run(d->team, head_part, &j);
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
            if (j->v) clipped += j->ops->kv_put(j->kv, 1, h, j->slot[t], j->v + t * j->ldv + at);
        }
    __atomic_fetch_add(&j->clipped, clipped, __ATOMIC_RELAXED);
}

uint64_t kern_kv_store(kern_dev *d, const kern_kv_layer *kv, const float *k, int64_t ldk,
                       const float *v, int64_t ldv, const int32_t *slot, int64_t T)
{
    if (d->be) {
        d->be->kv_store(d, kv, k, ldk, v, ldv, slot, T);
        return 0;
    }
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
    KERN__ELSEWHERE(d, attention(d, a))
    for (int i = 0; i < N_TABLES; i++)
        if (!(tables[i]->needs & ~d->features) && tables[i]->attention &&
            tables[i]->attention(d, a))
            return;
}

/* ---- the list, for tests and reports ----------------------------------------------------- */

/* clang-format off */
#define AVX512(op) {#op, "avx512", CPU_AVX512},
#define AVX2(op)   {#op, "avx2", CPU_AVX2},
#define REF(op)    {#op, "ref", 0},
const kern_op_row kern_op_rows[] = {
    KERN__VECTOR_OPS(AVX512) AVX512(attention)
    KERN__VECTOR_OPS(AVX2) AVX2(attention)
    KERN__OP_LIST(REF) REF(attention)
};
/* clang-format on */
const int kern_n_op_rows = (int)(sizeof kern_op_rows / sizeof *kern_op_rows);
