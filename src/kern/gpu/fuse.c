/* Peephole over the list of a step: neighbours become one operator where there is one that does all
 * of them, with the same numbers to the bit.
 *
 *   rmsnorm or add_rmsnorm, quant of its out    norm_quant
 *   glu, quant of its out                       glu_quant
 *   [head_rmsnorm of q, of k,] rope, kv_store   rope_store
 *
 * Only what is certainly the same is taken: same rows, pointers, strides. What the operators left
 * in memory is left there still: others may read it. */
#include "kern/gpu/gpu.h"
#include <string.h>

typedef struct fused {
    gpu_op op;
    size_t bytes;
    union {
        gpu_norm_quant norm_quant;
        gpu_glu_quant glu_quant;
        gpu_rope_store rope_store;
    } args;
} fused;
/* How many ops from number i on become `out`; 0 = none. */
typedef int rule(const gpu_step *s, int i, fused *out);

/* Arguments of op i if it is one of that kind. */
static const void *is(const gpu_step *s, int i, gpu_op op)
{
    return i < s->n_ops && s->ops[i].op == op ? s->args + s->ops[i].at : NULL;
}

static bool same(gpu_x a, gpu_x b)
{
    return a.p == b.p && a.type == b.type;
}

static int norm_codes(const gpu_step *s, int i, fused *out)
{
    const gpu_norm *n = is(s, i, GPU_OP_rmsnorm);
    const gpu_add_norm *a = is(s, i, GPU_OP_add_rmsnorm);
    const gpu_quant *q = is(s, i + 1, GPU_OP_quant);
    if ((!n && !a) || !q) return 0;
    gpu_norm_quant f = n ? (gpu_norm_quant){.x = n->x,
                                            .out = n->out,
                                            .w = n->w,
                                            .eps = n->eps,
                                            .T = n->T,
                                            .K = n->K}
                         : (gpu_norm_quant){.x = a->x,
                                            .y = a->y,
                                            .out = a->out,
                                            .w = a->w,
                                            .eps = a->eps,
                                            .T = a->T,
                                            .K = a->K};
    if (!same(q->x, f.out) || q->T != f.T || q->K != f.K || q->ld != f.K) return 0;
    f.to = q->to;
    *out = (fused){GPU_OP_norm_quant, sizeof f, {.norm_quant = f}};
    return 2;
}

static int glu_codes(const gpu_step *s, int i, fused *out)
{
    const gpu_glu *g = is(s, i, GPU_OP_glu);
    const gpu_quant *q = is(s, i + 1, GPU_OP_quant);
    if (!g || !q || !g->gated) return 0;
    if (!same(q->x, g->out) || q->T != g->T || q->K != g->F || q->ld != g->ldo) return 0;
    gpu_glu_quant f = {g->act, g->x, g->out, g->ld, g->ldo, g->F, g->T, q->to};
    *out = (fused){GPU_OP_glu_quant, sizeof f, {.glu_quant = f}};
    return 2;
}

static bool norm_of(const gpu_head_norm *n, gpu_x x, int64_t ld, int H, int D, int64_t T)
{
    return same(n->x, x) && n->ld == ld && n->H == H && n->D == D && n->T == T;
}

/* Rotary positions and the store, behind two norms or none. */
static int heads_to_cache(const gpu_step *s, int i, fused *out)
{
    const gpu_head_norm *nq = is(s, i, GPU_OP_head_rmsnorm),
                        *nk = is(s, i + 1, GPU_OP_head_rmsnorm);
    int at = nq && nk ? i + 2 : i;
    const gpu_rope *r = is(s, at, GPU_OP_rope);
    const gpu_kv_store *c = is(s, at + 1, GPU_OP_kv_store);
    if (!r || !c || !r->q.p || !r->k.p) return 0;
    if (!same(r->k, c->k) || r->ldk != c->ldk || r->Hk != c->kv.Hk || r->D != c->kv.D ||
        r->T != c->T || r->D > 2048)
        return 0;
    gpu_rope_store f = {.q = r->q,
                        .k = r->k,
                        .v = c->v,
                        .q_out = r->q,
                        .ldq = r->ldq,
                        .ldk = r->ldk,
                        .ldv = c->ldv,
                        .ldo = r->ldq,
                        .H = r->H,
                        .Hk = r->Hk,
                        .D = r->D,
                        .rot_dim = r->rot_dim,
                        .pairs = r->pairs,
                        .keep_k = true,
                        .cosv = r->cosv,
                        .sinv = r->sinv,
                        .q_factor = 1,
                        .kv = c->kv,
                        .slot = c->slot,
                        .clipped = c->clipped,
                        .T = r->T};
    if (at > i) {
        if (!norm_of(nq, r->q, r->ldq, r->H, r->D, r->T) ||
            !norm_of(nk, r->k, r->ldk, r->Hk, r->D, r->T) || nq->eps != nk->eps ||
            nq->by_head != nk->by_head)
            return 0;
        f.q_norm = nq->w;
        f.k_norm = nk->w;
        f.eps = nq->eps;
        f.norm_by_head = nq->by_head;
    }
    *out = (fused){GPU_OP_rope_store, sizeof f, {.rope_store = f}};
    return at + 2 - i;
}

static rule *const rules[] = {norm_codes, glu_codes, heads_to_cache};

void gpu__fuse(gpu_dev *g, gpu_step *s)
{
    int n = 0;
    for (int i = 0; i < s->n_ops;) {
        fused f;
        int took = 0;
        for (size_t r = 0; r < sizeof rules / sizeof *rules && !took; r++)
            took = rules[r](s, i, &f);
        if (!took) {
            s->ops[n++] = s->ops[i++];
            continue;
        }
        size_t at = gpu__place_args(s, f.bytes);
        memcpy(s->args + at, &f.args, f.bytes);
        s->ops[n++] = (gpu_rec){f.op, at, f.bytes};
        i += took;
        g->fused += took - 1;
    }
    s->n_ops = n;
}
