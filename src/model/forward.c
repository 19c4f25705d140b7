/* One step. Rows of all sequences go through the linears together; attention sees each sequence's
 * own pages. x is the residual stream; every add is fused with the norm that follows it, except
 * where a tap wants to see the stream after a layer, and after the last layer, where only the rows
 * with wanted logits go on. */
#include "model/model_internal.h"
#include <string.h>

static void rope_tables(model *m, const batch *b)
{
    for (int s = 0; s < b->n_seqs; s++) {
        const kern_seq *q = &b->seqs[0][s];
        if (m->rope_by_length)
            model__rope_inv(m->cfg, b->rope_len ? b->rope_len[s] : q->kv_len, m->inv);
        for (int32_t r = q->row0; r < q->row0 + q->n_rows; r++)
            model__rope_fill(m->inv, m->rot_half, m->rope_attention, b->pos[r],
                             m->cosv + r * m->rot_half, m->sinv + r * m->rot_half);
    }
}

/* h (normed) -> y = attention output of the layer. */
static void attention(model *m, int i, kv_pool *kv, const batch *b)
{
    const ckpt_config *c = m->cfg;
    const model_layer *l = &m->layers[i];
    const kern_kv_layer *cache = kv_pool_layer(kv, i);
    int H = (int)c->n_heads, Hk = (int)c->n_kv_heads, D = (int)c->head_dim;
    int64_t nq = (int64_t)H * D, nk = (int64_t)Hk * D, ld = nq + 2 * nk;
    float *q = m->qkv, *k = q + nq, *v = k + nk;
    kern_linear_run(m->dev, l->qkv, m->h, c->hidden_size, b->T, m->qkv, ld);
    if (l->q_norm) kern_head_rmsnorm(m->dev, q, ld, H, D, l->q_norm, (float)c->rms_norm_eps, b->T);
    if (l->k_norm) kern_head_rmsnorm(m->dev, k, ld, Hk, D, l->k_norm, (float)c->rms_norm_eps, b->T);
    kern_rope(m->dev, q, ld, H, k, ld, Hk, D, (int)(2 * m->rot_half), m->cosv, m->sinv, b->T);
    m->kv_clipped += kern_kv_store(m->dev, cache, k, ld, v, ld, b->slot[0], b->T);
    kern_attn_args a = {.q = q,
                        .ldq = ld,
                        .out = m->attn,
                        .ldo = nq,
                        .H = H,
                        .scale = 1.0f / sqrtf((float)D),
                        .window = m->kv_shapes[i].window,
                        .kv = cache,
                        .seqs = b->seqs[0],
                        .n_seqs = b->n_seqs};
    kern_attention(m->dev, &a);
    kern_linear_run(m->dev, l->o, m->attn, nq, b->T, m->y, c->hidden_size);
}

static void feed_forward(model *m, int i, int64_t T)
{
    const model_layer *l = &m->layers[i];
    int64_t f = m->cfg->intermediate_size, h = m->cfg->hidden_size;
    kern_linear_run(m->dev, l->gate_up, m->h, h, T, m->gu, 2 * f);
    kern_glu_mul(m->dev, m->glu, m->gu, 2 * f, f, T, m->act);
    kern_linear_run(m->dev, l->down, m->act, f, T, m->y, h);
}

static void logits_of(model *m, const batch *b, float *logits)
{
    int64_t h = m->cfg->hidden_size, V = kern_linear_n(m->lm_head);
    float eps = (float)m->cfg->rms_norm_eps;
    /* logit_x has max_rows rows, and no batch asks for more than it has. */
    for (int64_t i = 0; i < b->n_logits; i++)
        memcpy(m->logit_x + i * h, m->x + b->logit_rows[i] * h, sizeof(float) * (size_t)h);
    kern_rmsnorm(m->dev, m->logit_x, m->final_norm, eps, b->n_logits, h, m->h);
    kern_linear_run(m->dev, m->lm_head, m->h, h, b->n_logits, logits, V);
}

int model_forward(model *m, kv_pool *kv, const batch *b, float *logits, err *e)
{
    int64_t h = m->cfg->hidden_size;
    float eps = (float)m->cfg->rms_norm_eps;
    if (b->T < 1 || b->T > m->opts.max_rows || b->n_logits > b->T)
        return err_set(e, ERR_LIMIT, "step of %lld rows (at most %lld)", (long long)b->T,
                       (long long)m->opts.max_rows);
    kern_embed(m->dev, &m->embed, b->ids, b->T, m->x);
    if (m->tap) m->tap(m->tap_arg, -1, m->x, b->T, h);
    rope_tables(m, b);
    kern_rmsnorm(m->dev, m->x, m->layers[0].norm1, eps, b->T, h, m->h);
    for (int i = 0; i < m->n_layers; i++) {
        attention(m, i, kv, b);
        kern_add_rmsnorm(m->dev, m->x, m->y, m->layers[i].norm2, eps, b->T, h, m->h);
        feed_forward(m, i, b->T);
        bool last = i + 1 == m->n_layers;
        if (!last && !m->tap) {
            kern_add_rmsnorm(m->dev, m->x, m->y, m->layers[i + 1].norm1, eps, b->T, h, m->h);
            continue;
        }
        kern_add(m->dev, m->x, m->y, b->T * h);
        if (m->tap) m->tap(m->tap_arg, i, m->x, b->T, h);
        if (!last) kern_rmsnorm(m->dev, m->x, m->layers[i + 1].norm1, eps, b->T, h, m->h);
    }
    if (b->n_logits) logits_of(m, b, logits);
    return 0;
}
