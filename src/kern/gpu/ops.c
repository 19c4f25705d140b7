/* The table of a GPU: each op of kern.h becomes a line of the step. */
#include "kern/gpu/gpu.h"

#define PUSH(op, ...) gpu__push(g, GPU_OP_##op, &(__VA_ARGS__), sizeof(__VA_ARGS__))

static void op_rmsnorm(kern_dev *d, const float *x, const float *w, float eps, int64_t T, int64_t K,
                       float *out)
{
    gpu_dev *g = gpu__of(d);
    gpu_norm a = {
        .x = gpu__x(g, x), .out = gpu__x(g, out), .w = gpu__raw(g, w), .eps = eps, .T = T, .K = K};
    PUSH(rmsnorm, a);
}

static void op_layernorm(kern_dev *d, const float *x, const float *w, const float *b, float eps,
                         int64_t T, int64_t K, float *out)
{
    gpu_dev *g = gpu__of(d);
    gpu_norm a = {.x = gpu__x(g, x),
                  .out = gpu__x(g, out),
                  .w = gpu__raw(g, w),
                  .b = gpu__raw(g, b),
                  .eps = eps,
                  .T = T,
                  .K = K};
    PUSH(layernorm, a);
}

static void op_add_rmsnorm(kern_dev *d, float *x, const float *y, const float *w, float eps,
                           int64_t T, int64_t K, float *out)
{
    gpu_dev *g = gpu__of(d);
    gpu_add_norm a = {.x = gpu__x(g, x),
                      .y = gpu__x(g, y),
                      .out = gpu__x(g, out),
                      .w = gpu__raw(g, w),
                      .eps = eps,
                      .T = T,
                      .K = K};
    PUSH(add_rmsnorm, a);
}

static void op_add_scaled(kern_dev *d, float *x, const float *y, float s, int64_t n)
{
    gpu_dev *g = gpu__of(d);
    gpu_add a = {gpu__x(g, x), gpu__x(g, y), s, n};
    PUSH(add, a);
}

static void op_head_rmsnorm(kern_dev *d, float *x, int64_t ld, int H, int D, const float *w,
                            float eps, int64_t T)
{
    gpu_dev *g = gpu__of(d);
    gpu_head_norm a = {gpu__x(g, x), ld, H, D, gpu__raw(g, w), false, eps, T};
    PUSH(head_rmsnorm, a);
}

static void op_head_layernorm(kern_dev *d, float *x, int64_t ld, int H, int D, const float *w,
                              float eps, int64_t T)
{
    gpu_dev *g = gpu__of(d);
    gpu_head_norm a = {gpu__x(g, x), ld, H, D, gpu__raw(g, w), true, eps, T};
    PUSH(head_layernorm, a);
}

static void op_gated_rmsnorm(kern_dev *d, const float *x, const float *gate, int64_t ldg, int H,
                             int D, const float *w, float eps, int64_t T, float *out)
{
    gpu_dev *g = gpu__of(d);
    gpu_gated_norm a = {.x = gpu__x(g, x),
                        .gate = gpu__x(g, gate),
                        .out = gpu__x(g, out),
                        .ldg = ldg,
                        .H = H,
                        .D = D,
                        .w = gpu__raw(g, w),
                        .eps = eps,
                        .T = T};
    PUSH(gated_rmsnorm, a);
}

static void op_rope(kern_dev *d, float *q, int64_t ldq, int H, float *k, int64_t ldk, int Hk, int D,
                    int rot_dim, const float *cosv, const float *sinv, int64_t T, bool pairs)
{
    gpu_dev *g = gpu__of(d);
    gpu_rope a = {.q = gpu__x(g, q),
                  .k = gpu__x(g, k),
                  .ldq = ldq,
                  .ldk = ldk,
                  .H = H,
                  .Hk = Hk,
                  .D = D,
                  .rot_dim = rot_dim,
                  .pairs = pairs,
                  .cosv = gpu__raw(g, cosv),
                  .sinv = gpu__raw(g, sinv),
                  .T = T};
    PUSH(rope, a);
}

static void op_rope_fill(kern_dev *d, const float *inv, int64_t half, double attention,
                         const int32_t *pos, int64_t row0, int64_t T, float *cosv, float *sinv)
{
    gpu_dev *g = gpu__of(d);
    gpu_rope_fill a = {.inv = gpu__input(g, inv, half),
                       .pos = gpu__input(g, pos, g->now ? g->now->T : 0),
                       .attention = attention,
                       .row0 = row0,
                       .T = T,
                       .half = half,
                       .cosv = gpu__raw(g, cosv),
                       .sinv = gpu__raw(g, sinv)};
    PUSH(rope_fill, a);
}

static void op_glu(kern_dev *d, kern_glu act, bool gated, const float *x, int64_t ld, int64_t F,
                   int64_t T, float *out, int64_t ldo)
{
    gpu_dev *g = gpu__of(d);
    gpu_glu a = {(int)act, gated, gpu__x(g, x), gpu__x(g, out), ld, ldo, F, T};
    PUSH(glu, a);
}

static void op_copy_rows(kern_dev *d, const float *from, int64_t ldf, const int32_t *ids, float *to,
                         int64_t ldt, int64_t n, int64_t rows)
{
    gpu_dev *g = gpu__of(d);
    gpu_copy a = {gpu__x(g, from), gpu__x(g, to), gpu__ints(g, ids, rows), ldf, ldt, n, rows};
    PUSH(copy, a);
}

static void op_scale(kern_dev *d, float *x, float s, int64_t n)
{
    gpu_dev *g = gpu__of(d);
    gpu_scale a = {gpu__x(g, x), s, n};
    PUSH(scale, a);
}

static void op_softcap(kern_dev *d, float *x, float cap, int64_t n)
{
    gpu_dev *g = gpu__of(d);
    gpu_scale a = {gpu__x(g, x), cap, n};
    PUSH(softcap, a);
}

static void op_gate(kern_dev *d, float *x, int64_t ldx, const float *gate, int64_t ldg, int64_t n,
                    int64_t T, bool by_row)
{
    gpu_dev *g = gpu__of(d);
    gpu_gate a = {gpu__x(g, x), gpu__x(g, gate), ldx, ldg, n, T, by_row};
    PUSH(gate, a);
}

static void op_scale_far(kern_dev *d, float *x, int64_t ld, int64_t n, const int32_t *pos,
                         float beta, int64_t from, int64_t T)
{
    gpu_dev *g = gpu__of(d);
    gpu_far a = {gpu__x(g, x), ld, n, T, from, gpu__input(g, pos, T), beta};
    PUSH(far, a);
}

static void op_head_matmul(kern_dev *d, const qtensor *w, const float *x, int64_t ldx, int64_t ldh,
                           int64_t T, float *out, int64_t ldo, int64_t ldoh)
{
    gpu_dev *g = gpu__of(d);
    gpu_head_matmul a = {.w = gpu__raw(g, w->codes),
                         .w_type = (int)w->code,
                         .x = gpu__x(g, x),
                         .out = gpu__x(g, out),
                         .ldx = ldx,
                         .ldh = ldh,
                         .ldo = ldo,
                         .ldoh = ldoh,
                         .H = w->E,
                         .N = w->N,
                         .K = w->K,
                         .T = T};
    PUSH(head_matmul, a);
}

/* Tables are plain (gpu__table): f16 rows count as a matrix of heads with one head. */
static void op_embed(kern_dev *d, const qtensor *t, const int32_t *ids, int64_t T, float *out)
{
    gpu_dev *g = gpu__of(d);
    gpu_type type = t->code == NUM_BF16 ? GPU_BF16 : GPU_F32;
    if (t->code != NUM_BF16 && t->code != NUM_F32) gpu__fail(g, "an embedding of f16 rows");
    gpu_copy a = {
        {gpu__raw(g, t->codes), type}, gpu__x(g, out), gpu__ints(g, ids, T), t->K, t->K, t->K, T};
    PUSH(copy, a);
}

/* ---- experts ------------------------------------------------------------------------------------
 */

static void op_route(kern_dev *d, const kern_route_args *r, int64_t T)
{
    gpu_dev *g = gpu__of(d);
    gpu_route a = {.logits = gpu__x(g, r->logits),
                   .E = r->E,
                   .top_k = r->top_k,
                   .kind = (int)r->kind,
                   .bias = gpu__raw(g, r->bias),
                   .n_group = r->n_group,
                   .topk_group = r->topk_group,
                   .group_top2 = r->group_top2,
                   .renorm = r->renorm,
                   .jitter = r->jitter,
                   .scale = r->scale,
                   .expert = gpu__raw(g, r->expert),
                   .weight = gpu__raw(g, r->weight),
                   .T = T};
    PUSH(route, a);
}

static void op_route_sort(kern_dev *d, const int32_t *expert, int64_t T, int top_k, int E,
                          int32_t *row, int32_t *first, int32_t *slot)
{
    gpu_dev *g = gpu__of(d);
    gpu_route_sort a = {gpu__raw(g, expert), T, top_k, E, gpu__raw(g, row), gpu__raw(g, first),
                        gpu__raw(g, slot)};
    PUSH(route_sort, a);
}

static void op_route_combine(kern_dev *d, const float *y, int64_t ldy, const float *weight,
                             const int32_t *slot, int top_k, int64_t T, int64_t N, bool add,
                             float *out)
{
    gpu_dev *g = gpu__of(d);
    gpu_combine a = {
        gpu__x(g, y), gpu__x(g, out), gpu__raw(g, weight), gpu__raw(g, slot), top_k, ldy, T, N,
        add};
    PUSH(combine, a);
}

/* ---- cache --------------------------------------------------------------------------------------
 */

static gpu_kv cache(gpu_dev *g, const kern_kv_layer *kv)
{
    return (gpu_kv){.type = (int)kv->type,
                    .order = kv->mma ? GPU_KV_MMA : GPU_KV_PLAIN,
                    .Hk = kv->Hk,
                    .D = kv->D,
                    .page_tokens = kv->page_tokens,
                    .v_in_k = kv->v_in_k,
                    .base = gpu__raw(g, kv->base),
                    .page_stride = kv->page_stride,
                    .k_scale = gpu__raw(g, kv->k_scale),
                    .v_scale = gpu__raw(g, kv->v_scale)};
}

static void op_kv_store(kern_dev *d, const kern_kv_layer *kv, const float *k, int64_t ldk,
                        const float *v, int64_t ldv, const int32_t *slot, int64_t T)
{
    gpu_dev *g = gpu__of(d);
    gpu_kv_store a = {.kv = cache(g, kv),
                      .k = gpu__x(g, k),
                      .v = gpu__x(g, v),
                      .ldk = ldk,
                      .ldv = ldv,
                      .T = T,
                      .slot = gpu__input(g, slot, T),
                      .clipped = g->clipped};
    PUSH(kv_store, a);
}

static void op_attention(kern_dev *d, const kern_attn_args *r)
{
    gpu_dev *g = gpu__of(d);
    gpu_attention a = {.kv = cache(g, r->kv),
                       .q = gpu__x(g, r->q),
                       .out = gpu__x(g, r->out),
                       .ldq = r->ldq,
                       .ldo = r->ldo,
                       .H = r->H,
                       .window = r->window,
                       .scale = r->scale,
                       .softcap = r->softcap,
                       .sinks = gpu__raw(g, r->sinks),
                       .seqs = gpu__seqs(g, r->seqs, r->n_seqs, r->kv->page_tokens),
                       .work = g->attention_work};
    PUSH(attention, a);
}

/* ---- states -------------------------------------------------------------------------------------
 */

static gpu_state states(gpu_dev *g, const kern_states *s, int n_seqs)
{
    return (gpu_state){gpu__raw(g, s->base), s->stride, gpu__input(g, s->slot, n_seqs)};
}

static void op_conv_silu(kern_dev *d, float *x, int64_t ld, int64_t C, int W, const float *w,
                         const kern_seq *seqs, int n_seqs, const kern_states *state)
{
    gpu_dev *g = gpu__of(d);
    gpu_conv a = {.x = gpu__x(g, x),
                  .ld = ld,
                  .C = C,
                  .W = W,
                  .w = gpu__raw(g, w),
                  .seqs = gpu__seqs(g, seqs, n_seqs, 0),
                  .state = states(g, state, n_seqs)};
    PUSH(conv_silu, a);
}

static void op_gated_delta(kern_dev *d, const kern_delta_args *r)
{
    gpu_dev *g = gpu__of(d);
    gpu_delta a = {.q = gpu__x(g, r->q),
                   .k = gpu__x(g, r->k),
                   .v = gpu__x(g, r->v),
                   .out = gpu__x(g, r->out),
                   .ldq = r->ldq,
                   .ldk = r->ldk,
                   .ldv = r->ldv,
                   .g = gpu__raw(g, r->g),
                   .beta = gpu__raw(g, r->beta),
                   .Hk = r->Hk,
                   .Hv = r->Hv,
                   .Dk = r->Dk,
                   .Dv = r->Dv,
                   .seqs = gpu__seqs(g, r->seqs, r->n_seqs, 0),
                   .state = states(g, r->state, r->n_seqs)};
    PUSH(gated_delta, a);
}

static void op_delta_gates(kern_dev *d, const float *ba, int64_t ld, int Hv, const float *a_log,
                           const float *dt_bias, int64_t T, float *decay, float *beta)
{
    gpu_dev *g = gpu__of(d);
    gpu_delta_gates a = {.ba = gpu__x(g, ba),
                         .ld = ld,
                         .T = T,
                         .Hv = Hv,
                         .a_log = gpu__raw(g, a_log),
                         .dt_bias = gpu__raw(g, dt_bias),
                         .g = gpu__raw(g, decay),
                         .beta = gpu__raw(g, beta)};
    PUSH(delta_gates, a);
}

/* ---- choosing tokens ----------------------------------------------------------------------------
 */

int gpu__reserve_top(kern_dev *d, int64_t max_rows, int64_t V, err *e)
{
    gpu_dev *g = gpu__of(d);
    size_t work = gpu_top_work(max_rows, V), out = sizeof(kern_top) * (size_t)max_rows;
    int rc = 0;
    TRY(gpu__keep(g, &g->top.work, NULL, work, e));
    TRY(gpu__keep(g, &g->top.out, NULL, out, e));
    g->top.rows = max_rows;
    g->top.lanes = V;
    g->pub.scratch_bytes += work + out;
out:
    return rc;
}

static void op_top_rows(kern_dev *d, const float *x, int64_t V, int64_t T, kern_top *out)
{
    gpu_dev *g = gpu__of(d);
    gpu_top a = {.x = gpu__x(g, x), .V = V, .T = T, .out = g->top.out, .work = g->top.work};
    if (T > g->top.rows || V > g->top.lanes)
        gpu__fail(g, "the best of %lld rows of %lld lanes, with room for %lld of %lld",
                  (long long)T, (long long)V, (long long)g->top.rows, (long long)g->top.lanes);
    PUSH(top, a);
    gpu__output(g, a.out, sizeof(kern_top) * (size_t)T, out);
}

const struct kern_backend gpu__backend = {
    .name = "cuda",
    .close = gpu__close,
    .memory = gpu__memory,
    .alloc = gpu__alloc,
    .lanes = gpu__lanes,
    .free = gpu__free,
    .host_alloc = gpu__host_alloc,
    .host_free = gpu__host_free,
    .zero = gpu__zero,
    .constant = gpu__constant,
    .table = gpu__table,
    .reserve = gpu__reserve,
    .reserve_attention = gpu__reserve_attention,
    .step_begin = gpu__step_begin,
    .step_flush = gpu__step_flush,
    .step_end = gpu__step_end,
    .fetch = gpu__fetch,
    .reserve_top = gpu__reserve_top,
    .top_rows = op_top_rows,
    .clipped = gpu__clipped,
    .profile = gpu__profile,
    .profile_lines = gpu__profile_lines,
    .measure_roof = gpu__measure_roof,
    .linear_make = gpu__linear_make,
    .linear_drop = gpu__linear_drop,
    .linear_run = gpu__linear_run,
    .linear_unpack = gpu__linear_unpack,
    .linear_can_embed = gpu__linear_can_embed,
    .linear_embed = gpu__linear_embed,
    .candidates = gpu__candidates,
    .candidate_name = gpu__candidate_name,
    .candidate_of = gpu__candidate_of,
    .linear_make_as = gpu__linear_make_as,
    .tune = gpu__tune,
    .tuned_lines = gpu__tuned_lines,
    .tune_save = gpu__tune_save,
    .plans_used = gpu__plans_used,
    .experts_make = gpu__experts_make,
    .experts_drop = gpu__experts_drop,
    .experts_run = gpu__experts_run,
    .kv_store = op_kv_store,
    .attention = op_attention,
    .rmsnorm = op_rmsnorm,
    .add_rmsnorm = op_add_rmsnorm,
    .add_scaled = op_add_scaled,
    .head_rmsnorm = op_head_rmsnorm,
    .rope = op_rope,
    .rope_fill = op_rope_fill,
    .glu = op_glu,
    .layernorm = op_layernorm,
    .head_layernorm = op_head_layernorm,
    .copy_rows = op_copy_rows,
    .scale = op_scale,
    .softcap = op_softcap,
    .gate = op_gate,
    .scale_far = op_scale_far,
    .gated_rmsnorm = op_gated_rmsnorm,
    .head_matmul = op_head_matmul,
    .route = op_route,
    .route_sort = op_route_sort,
    .route_combine = op_route_combine,
    .conv_silu = op_conv_silu,
    .gated_delta = op_gated_delta,
    .delta_gates = op_delta_gates,
    .embed = op_embed,
    .join = gpu__join,
    .leave = gpu__leave,
    .all_reduce = gpu__all_reduce,
};
