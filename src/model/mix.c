/* The first half of a layer: tokens read one another. Attention with all its variants, latent
 * attention (MLA) in the absorbed form, gated delta net. Each reads m->in and writes m->y. */
#include "model/model_internal.h"

void model__norm(model *m, const float *x, const model_vec *w, int64_t T, float *out)
{
    if (m->arch->norm >= ARCH_LAYER_NORM)
        kern_layernorm(m->dev, x, w->w, w->b, m->arch->eps, T, m->arch->hidden, out);
    else
        kern_rmsnorm(m->dev, x, w->w, m->arch->eps, T, m->arch->hidden, out);
}

static void rotate(model *m, int table, float *q, int64_t ldq, int H, float *k, int64_t ldk, int Hk,
                   int D, int64_t T)
{
    if (table < 0) return;
    void (*fn)(kern_dev *, float *, int64_t, int, float *, int64_t, int, int, int, const float *,
               const float *, int64_t) = m->arch->rope_pairs ? kern_rope_pairs : kern_rope;
    fn(m->dev, q, ldq, H, k, ldk, Hk, D, (int)(2 * m->rot_half), m->cosv[table], m->sinv[table], T);
}

static void norm_heads(model *m, float *x, int64_t ld, int H, const float *w, int64_t T)
{
    int D = m->arch->D;
    if (!w) return;
    if (m->arch->qk_norm == ARCH_QK_HEAD)
        kern_head_rmsnorm(m->dev, x, ld, H, D, w, m->arch->eps, T);
    else if (m->arch->qk_norm == ARCH_QK_WHOLE)
        kern_head_rmsnorm(m->dev, x, ld, 1, H * D, w, m->arch->eps, T);
    else
        kern_head_layernorm(m->dev, x, ld, H, D, w, m->arch->eps, T);
}

/* Scores, softmax and values over the cache of layer i. */
static void attend(model *m, int i, kv_pool *kv, const batch *b, const float *q, int64_t ldq,
                   float *out, int64_t ldo)
{
    kern_attn_args a = {.q = q,
                        .ldq = ldq,
                        .out = out,
                        .ldo = ldo,
                        .H = m->arch->H,
                        .scale = m->arch->attn_scale,
                        .window = m->kv_shapes[i].window,
                        .softcap = m->arch->attn_softcap,
                        .sinks = m->layers[i].sinks,
                        .kv = kv_pool_layer(kv, i),
                        .seqs = b->seqs[kv_pool_group(kv, i)],
                        .n_seqs = b->n_seqs};
    kern_attention(m->dev, &a);
}

static void store(model *m, int i, kv_pool *kv, const batch *b, const float *k, int64_t ldk,
                  const float *v, int64_t ldv)
{
    m->kv_clipped += kern_kv_store(m->dev, kv_pool_layer(kv, i), k, ldk, v, ldv,
                                   b->slot[kv_pool_group(kv, i)], b->T);
}

static void scale_far(model *m, const batch *b, float *q, int64_t ldq, int64_t n)
{
    if (m->arch->far_beta != 0)
        kern_scale_far(m->dev, q, ldq, n, b->pos, m->arch->far_beta, m->arch->far_from, b->T);
}

static void attention(model *m, int i, kv_pool *kv, const batch *b)
{
    const arch_model *a = m->arch;
    const model_layer *l = &m->layers[i];
    int64_t nq = (int64_t)a->H * a->D, nk = (int64_t)a->Hk * a->D;
    int64_t gate = a->attn_gate ? nq : 0, ld = nq + gate + 2 * nk;
    float *q = m->qkv, *k = q + nq + gate, *v = k + nk;
    kern_linear_run(m->dev, l->lin[ARCH_QKV], m->in, a->hidden, b->T, m->qkv, ld);
    if (a->qk_norm_late) rotate(m, a->layers[i].rope, q, ld, a->H, k, ld, a->Hk, a->D, b->T);
    norm_heads(m, q, ld, a->H, l->q_norm, b->T);
    norm_heads(m, k, ld, a->Hk, l->k_norm, b->T);
    if (!a->qk_norm_late) rotate(m, a->layers[i].rope, q, ld, a->H, k, ld, a->Hk, a->D, b->T);
    scale_far(m, b, q, ld, nq);
    store(m, i, kv, b, k, ld, v, ld);
    attend(m, i, kv, b, q, ld, m->attn, nq);
    if (gate) kern_sigmoid_mul(m->dev, m->attn, nq, q + nq, ld, nq, b->T);
    kern_linear_run(m->dev, l->lin[ARCH_O], m->attn, nq, b->T, m->y, a->hidden);
    if (a->heads_cut) kern_all_reduce(m->dev, m->y, b->T * a->hidden);
}

/* q is folded through the key half of kv_b once, so that scores are products with the cached latent
 * itself; the sum of latents is unfolded through the value half. */
static void latent_attention(model *m, int i, kv_pool *kv, const batch *b)
{
    const arch_model *a = m->arch;
    const model_layer *l = &m->layers[i];
    int64_t R = a->mla.kv_lora, rope = a->mla.rope, nope = a->mla.nope, D = nope + rope,
            nq = a->H * D, nl = R + rope, V = a->mla.v, T = b->T;
    const float *in = m->in;
    int64_t ldin = a->hidden;
    float *q = m->qkv, *c = m->attn, *folded = m->latent, *sums = m->latent + T * a->H * nl;
    if (l->lin[ARCH_Q_A]) {
        kern_linear_run(m->dev, l->lin[ARCH_Q_A], in, ldin, T, m->attn, a->mla.q_lora);
        kern_rmsnorm(m->dev, m->attn, l->q_a_norm, a->eps, T, a->mla.q_lora, m->attn);
        in = m->attn;
        ldin = a->mla.q_lora;
    }
    kern_linear_run(m->dev, l->lin[ARCH_Q_B], in, ldin, T, q, nq);
    kern_linear_run(m->dev, l->lin[ARCH_KV_A], m->in, a->hidden, T, c, nl);
    kern_head_rmsnorm(m->dev, c, nl, 1, (int)R, l->kv_a_norm, a->eps, T);
    rotate(m, a->layers[i].rope, q + nope, nq, a->H, c + R, nl, 1, (int)D, T);
    store(m, i, kv, b, c, nl, NULL, 0);
    kern_head_matmul(m->dev, &l->k_up, q, nq, D, T, folded, a->H * nl, nl);
    kern_copy_rows(m->dev, q + nope, D, folded + R, nl, rope, T * a->H);
    attend(m, i, kv, b, folded, a->H * nl, sums, a->H * R);
    kern_head_matmul(m->dev, &l->v_up, sums, a->H * R, R, T, m->attn, a->H * V, V);
    kern_linear_run(m->dev, l->lin[ARCH_O], m->attn, a->H * V, T, m->y, a->hidden);
    if (a->heads_cut) kern_all_reduce(m->dev, m->y, T * a->hidden);
}

static void delta_net(model *m, int i, kv_pool *kv, const batch *b)
{
    const arch_model *a = m->arch;
    const model_layer *l = &m->layers[i];
    int Hv = a->delta.Hv, Dv = a->delta.Dv;
    int64_t k = (int64_t)a->delta.Hk * a->delta.Dk, v = (int64_t)Hv * Dv, C = 2 * k + v, ld = C + v,
            T = b->T;
    float *ba = m->gates, *g = ba + T * 2 * Hv, *beta = g + T * Hv;
    float *base = kv_pool_state(kv, i, 0);
    int64_t taps = C * (a->delta.conv - 1);
    kern_states conv = {base, m->kv_shapes[i].state_floats, b->state},
                memory = {base + taps, conv.stride, b->state};
    kern_linear_run(m->dev, l->lin[ARCH_DELTA_IN], m->in, a->hidden, T, m->qkv, ld);
    kern_linear_run(m->dev, l->lin[ARCH_DELTA_BA], m->in, a->hidden, T, ba, 2 * Hv);
    kern_delta_gates(m->dev, ba, 2 * Hv, Hv, l->a_log, l->dt_bias, T, g, beta);
    kern_conv_silu(m->dev, m->qkv, ld, C, a->delta.conv, l->conv, b->seqs[0], b->n_seqs, &conv);
    kern_delta_args d = {.q = m->qkv,
                         .k = m->qkv + k,
                         .v = m->qkv + 2 * k,
                         .ldq = ld,
                         .ldk = ld,
                         .ldv = ld,
                         .g = g,
                         .beta = beta,
                         .Hk = a->delta.Hk,
                         .Hv = Hv,
                         .Dk = a->delta.Dk,
                         .Dv = Dv,
                         .seqs = b->seqs[0],
                         .n_seqs = b->n_seqs,
                         .state = &memory,
                         .out = m->attn};
    kern_gated_delta(m->dev, &d);
    kern_gated_rmsnorm(m->dev, m->attn, m->qkv + C, ld, Hv, Dv, l->delta_norm, a->eps, T, m->attn);
    kern_linear_run(m->dev, l->lin[ARCH_DELTA_OUT], m->attn, v, T, m->y, a->hidden);
}

void model__mix(model *m, int layer, kv_pool *kv, const batch *b)
{
    switch (m->arch->layers[layer].mix) {
    case ARCH_MLA:
        latent_attention(m, layer, kv, b);
        break;
    case ARCH_DELTA:
        delta_net(m, layer, kv, b);
        break;
    case ARCH_ATTENTION:
        attention(m, layer, kv, b);
        break;
    }
}
