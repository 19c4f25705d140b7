/* One step. Rows of all sequences go through the linears together; attention sees each sequence's
 * own pages. x is the residual stream; where nothing but a plain RMS norm follows an add, the two
 * are one pass, except where a tap wants to see the stream after a layer. After the last layer only
 * the rows with wanted logits go on. */
#include "model/model_internal.h"
#include <string.h>

static void rope_tables(model *m, const batch *b)
{
    const arch_model *a = m->arch;
    int64_t max = m->cfg->max_position;
    for (int t = 0; t < a->n_ropes; t++) {
        const rope_config *r = &a->rope[t];
        double attention = model__rope_attention(r, max);
        if (!m->rope_by_length) model__rope_inv(r, a->rot, max, 0, m->inv);
        for (int s = 0; s < b->n_seqs; s++) {
            const kern_seq *q = &b->seqs[0][s];
            if (m->rope_by_length)
                model__rope_inv(r, a->rot, max, b->rope_len ? b->rope_len[s] : q->kv_len, m->inv);
            for (int32_t i = q->row0; i < q->row0 + q->n_rows; i++)
                model__rope_fill(m->inv, m->rot_half, attention, b->pos[i],
                                 m->cosv[t] + i * m->rot_half, m->sinv[t] + i * m->rot_half);
        }
    }
}

static void embed(model *m, const batch *b)
{
    int64_t n = b->T * m->arch->hidden;
    if (m->embed.codes)
        kern_embed(m->dev, &m->embed, b->ids, b->T, m->x);
    else
        kern_linear_embed(m->dev, m->lm_head, b->ids, b->T, m->x);
    if (m->arch->embed_scale != 1.0f) kern_scale(m->dev, m->x, m->arch->embed_scale, n);
    if (!m->pos.codes) return;
    kern_embed(m->dev, &m->pos, b->pos, b->T, m->h);
    kern_add(m->dev, m->x, m->h, n);
}

/* m->in = norm(x), or x itself where there is none. */
static void enter(model *m, const model_vec *norm, int64_t T)
{
    m->in = norm->w ? m->h : m->x;
    if (norm->w) model__norm(m, m->x, norm, T, m->h);
}

static void add(model *m, const float *y, int64_t T)
{
    int64_t n = T * m->arch->hidden;
    if (m->arch->residual_scale == 1.0f)
        kern_add(m->dev, m->x, y, n);
    else
        kern_add_scaled(m->dev, m->x, y, m->arch->residual_scale, n);
}

static void add_enter(model *m, const float *y, const model_vec *norm, int64_t T)
{
    if (m->arch->norm < ARCH_LAYER_NORM && norm->w && m->arch->residual_scale == 1.0f) {
        kern_add_rmsnorm(m->dev, m->x, y, norm->w, m->arch->eps, T, m->arch->hidden, m->h);
        m->in = m->h;
        return;
    }
    add(m, y, T);
    enter(m, norm, T);
}

/* What a layer adds to the stream at its end lies in m->y; the rest has been added. */
static void layer(model *m, int i, kv_pool *kv, const batch *b)
{
    const model_layer *l = &m->layers[i];
    model__mix(m, i, kv, b);
    if (l->post_mix.w) model__norm(m, m->y, &l->post_mix, b->T, m->y);
    if (m->arch->parallel) {
        if (l->norm2.w) enter(m, &l->norm2, b->T);
        add(m, m->y, b->T);
        model__ffn(m, i, b->T, m->y);
    } else {
        add_enter(m, m->y, &l->norm2, b->T);
        model__ffn(m, i, b->T, m->y);
    }
    if (l->post_ffn.w) model__norm(m, m->y, &l->post_ffn, b->T, m->y);
}

static void logits_of(model *m, const batch *b, float *logits)
{
    int64_t h = m->arch->hidden, V = kern_linear_n(m->lm_head), n = b->n_logits * V;
    /* logit_x has max_rows rows, and no batch asks for more than it has. */
    for (int64_t i = 0; i < b->n_logits; i++)
        memcpy(m->logit_x + i * h, m->x + b->logit_rows[i] * h, sizeof(float) * (size_t)h);
    model__norm(m, m->logit_x, &m->final_norm, b->n_logits, m->h);
    kern_linear_run(m->dev, m->lm_head, m->h, h, b->n_logits, logits, V);
    if (m->arch->logit_scale != 1.0f) kern_scale(m->dev, logits, m->arch->logit_scale, n);
    if (m->arch->logit_softcap > 0) kern_softcap(m->dev, logits, m->arch->logit_softcap, n);
}

int model_forward(model *m, kv_pool *kv, const batch *b, float *logits, err *e)
{
    if (b->T < 1 || b->T > m->opts.max_rows || b->n_logits > b->T)
        return err_set(e, ERR_LIMIT, "step of %lld rows (at most %lld)", (long long)b->T,
                       (long long)m->opts.max_rows);
    embed(m, b);
    if (m->tap) m->tap(m->tap_arg, -1, m->x, b->T, m->arch->hidden);
    rope_tables(m, b);
    enter(m, &m->layers[0].norm1, b->T);
    for (int i = 0; i < m->n_layers; i++) {
        layer(m, i, kv, b);
        bool last = i + 1 == m->n_layers;
        if (!last && !m->tap) {
            add_enter(m, m->y, &m->layers[i + 1].norm1, b->T);
            continue;
        }
        add(m, m->y, b->T);
        if (m->tap) m->tap(m->tap_arg, i, m->x, b->T, m->arch->hidden);
        if (!last) enter(m, &m->layers[i + 1].norm1, b->T);
    }
    if (b->n_logits) logits_of(m, b, logits);
    return 0;
}
