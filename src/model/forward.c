/* One step. Rows of all sequences go through the linears together; attention sees each sequence's
 * own pages. x is the residual stream; where nothing but a plain RMS norm follows an add, the two
 * are one pass, except where a tap wants to see the stream after a layer. After the last layer only
 * the rows with wanted logits go on. */
#include "model/model_internal.h"

static void rope_tables(model *m, const batch *b)
{
    const arch_model *a = m->arch;
    int64_t max = m->cfg->max_position;
    for (int t = 0; t < a->n_ropes; t++) {
        const rope_config *r = &a->rope[t];
        double attention = model__rope_attention(r, max);
        if (!m->rope_by_length) {
            float *inv = m->inv + t * m->rot_half;
            model__rope_inv(r, a->rot, max, 0, inv);
            kern_rope_fill(m->dev, inv, m->rot_half, attention, b->pos, 0, b->T, m->cosv[t],
                           m->sinv[t]);
            continue;
        }
        for (int s = 0; s < b->n_seqs; s++) {
            const kern_seq *q = &b->seqs[0][s];
            model__rope_inv(r, a->rot, max, b->rope_len ? b->rope_len[s] : q->kv_len, m->inv);
            kern_rope_fill(m->dev, m->inv, m->rot_half, attention, b->pos, q->row0, q->n_rows,
                           m->cosv[t], m->sinv[t]);
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

/* Each of several ranks has some rows of the head, and so some columns of the logits: the rest of
 * them is zero, and the sum over all ranks is whole. */
static void logits_of(model *m, const batch *b, float *logits)
{
    int64_t h = m->arch->hidden, V = m->arch->vocab, n = b->n_logits * V;
    float *host = logits;
    if (m->logits) logits = m->logits;
    /* logit_x has max_rows rows, and no batch asks for more than it has. */
    kern_gather_rows(m->dev, m->x, b->logit_rows, h, b->n_logits, m->logit_x);
    model__norm(m, m->logit_x, &m->final_norm, b->n_logits, m->h);
    if (m->zeros) kern_copy_rows(m->dev, m->zeros, 0, logits, V, V, b->n_logits);
    kern_linear_run(m->dev, m->lm_head, m->h, h, b->n_logits, logits + m->head_row0, V);
    kern_all_reduce(m->dev, logits, n);
    if (m->arch->rank) return;
    if (m->arch->logit_scale != 1.0f) kern_scale(m->dev, logits, m->arch->logit_scale, n);
    if (m->arch->logit_softcap > 0) kern_softcap(m->dev, logits, m->arch->logit_softcap, n);
    if (b->tops)
        kern_top_rows(m->dev, logits, V, b->n_logits, b->tops);
    else
        kern_fetch(m->dev, logits, n, host);
}

/* What a tap sees lies in host memory. */
static int tap(model *m, int layer_index, int64_t T, err *e)
{
    int64_t n = T * m->arch->hidden;
    int rc = 0;
    if (!m->tap) return 0;
    float *x = m->dev->be ? m->tap_host : m->x;
    kern_fetch(m->dev, m->x, n, x);
    rc = kern_step_flush(m->dev, e);
    if (rc == 0) m->tap(m->tap_arg, layer_index, x, T, m->arch->hidden);
    return rc;
}

static int run(model *m, kv_pool *kv, const batch *b, float *logits, err *e)
{
    int rc = 0;
    embed(m, b);
    TRY(tap(m, -1, b->T, e));
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
        TRY(tap(m, i, b->T, e));
        if (!last) enter(m, &m->layers[i + 1].norm1, b->T);
    }
    if (b->n_logits) logits_of(m, b, logits);
out:
    return rc;
}

int model_forward(model *m, kv_pool *kv, const batch *b, float *logits, err *e)
{
    return m->ranks ? model__step_ranks(m, kv, b, logits, e) : model__step(m, kv, b, logits, e);
}

int model__step(model *m, kv_pool *kv, const batch *b, float *logits, err *e)
{
    if (b->T < 1 || b->T > m->opts.max_rows || b->n_logits > b->T ||
        b->n_logits > m->opts.max_logit_rows)
        return err_set(e, ERR_LIMIT,
                       "step of %lld rows, %lld of them with logits (at most %lld and "
                       "%lld)",
                       (long long)b->T, (long long)b->n_logits, (long long)m->opts.max_rows,
                       (long long)m->opts.max_logit_rows);
    batch sized;
    uint64_t key = model__bucket(m, b, &sized);
    int rc = kern_step_begin(m->dev, sized.T, key) ? run(m, kv, &sized, logits, e) : 0;
    return rc < 0 ? rc : kern_step_end(m->dev, e);
}
