/* Loading: names are bound to slots, stored rows are put in the order of use, linears are fused and
 * prepared, norms become f32. The canonical quantized tensors live only while their linear is
 * prepared. What is read is what the architecture lists, nothing else. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "model/model_internal.h"

/* ---- small tensors ------------------------------------------------------------------------------
 */

/* A vector [cols], or rows of them (maybe one) as [rows, cols] or [rows, 1, cols] (a depthwise
 * convolution), in f32. */
static int read_vector(model *m, const char *name, int64_t rows, int64_t cols, float *out, err *e)
{
    const ckpt_tensor *t;
    if (m->opts.random) {
        model__random_vector(m, name, rows * cols, out);
        return 0;
    }
    int rc = ckpt_need(m->q->c, name, &t, e);
    if (rc < 0) return rc;
    const int64_t *d = t->shape;
    bool fits = t->n_dims == 1 ? rows == 1 && d[0] == cols
                               : (t->n_dims == 2 && d[0] == rows && d[1] == cols) ||
                                     (t->n_dims == 3 && d[0] == rows && d[1] == 1 && d[2] == cols);
    if (!fits) {
        buf have = {0};
        for (int i = 0; i < t->n_dims; i++)
            buf_printf(&have, "%s%lld", i ? ", " : "", (long long)d[i]);
        rc = err_set(e, ERR_SHAPE,
                     "%s: tensor '%s' has the shape [%s], config.json asks for %lld x %lld",
                     t->path, name, have.data ? have.data : "", (long long)rows, (long long)cols);
        buf_free(&have);
        return rc;
    }
    ckpt_tensor flat = *t;
    flat.n_dims = 1;
    flat.shape[0] = rows * cols;
    TRY(ckpt_load_rows(m->q->c, &flat, 0, 1, out, e));
    for (int64_t i = 0; i < rows * cols; i++)
        if (!isfinite(out[i]))
            return err_set(e, ERR_VALUE, "%s: tensor '%s': element %lld is not finite", t->path,
                           name, (long long)i);
    m->bytes.file.unquantized += t->bytes;
    m->bytes.file.total += t->bytes;
out:
    return rc;
}

static int load_vector(model *m, const char *name, int64_t rows, int64_t cols, float **out, err *e)
{
    *out = arena_alloc(m->mem, sizeof **out * (size_t)(rows * cols));
    if (m->n_slots == m->cap_slots) {
        m->cap_slots = m->cap_slots ? 2 * m->cap_slots : 32;
        m->slots = xrealloc(m->slots, sizeof *m->slots * (size_t)m->cap_slots);
    }
    m->slots[m->n_slots++] = (model_vec_slot){out, rows * cols};
    m->bytes.other += sizeof **out * (uint64_t)(rows * cols);
    return read_vector(m, name, rows, cols, *out, e);
}

/* What was read since goes to the device. */
static int settle_vectors(model *m, err *e)
{
    int rc = 0;
    for (int i = 0; i < m->n_slots; i++)
        TRY(kern_constant(m->dev, m->slots[i].at, m->slots[i].n, e));
    m->n_slots = 0;
out:
    return rc;
}

/* layer < 0: a whole name. name NULL: nothing is read. */
static void full_name(const model *m, int layer, const char *name, const char *tail, char out[256])
{
    int n = layer < 0 ? 0 : snprintf(out, 256, m->arch->name.layer, layer);
    snprintf(out + n, 256 - (size_t)n, "%s%s", name, tail);
}

static int layer_matrix(model *m, int layer, const char *name, const char *tail, int64_t rows,
                        int64_t cols, float **out, err *e)
{
    char full[256];
    if (!name) return 0;
    full_name(m, layer, name, tail, full);
    return load_vector(m, full, rows, cols, out, e);
}

static int layer_vector(model *m, int layer, const char *name, const char *tail, int64_t n,
                        float **out, err *e)
{
    return layer_matrix(m, layer, name, tail, 1, n, out, e);
}

static void plus_one(model *m, float *w, int64_t n)
{
    bool lacks = m->arch->norm == ARCH_RMS_ONE || m->arch->norm == ARCH_LAYER_NORM_ONE;
    for (int64_t i = 0; w && lacks && i < n; i++)
        w[i] += 1.0f;
}

static int load_norm(model *m, int layer, const char *name, int64_t n, model_vec *out, err *e)
{
    char full[256];
    int rc = layer_vector(m, layer, name, ".weight", n, &out->w, e);
    if (rc < 0 || !name) return rc;
    plus_one(m, out->w, n);
    full_name(m, layer, name, ".bias", full);
    if (m->arch->norm >= ARCH_LAYER_NORM && ckpt_find(m->q->c, full))
        rc = load_vector(m, full, 1, n, &out->b, e);
    return rc;
}

/* ---- shards -------------------------------------------------------------------------------------
 */

/* Quantizes a plain tensor at load, as `tare quantize` would. */
static int quantize_now(model *m, const char *module, qtensor *t, float fused_amax, err *e)
{
    int rc = 0;
    qtensor out = {0};
    void *mem = NULL;
    if (m->opts.random) return model__random_quantize(m, t, e);
    quant_stats st = {.fused_amax = fused_amax, .workers = m->dev->team};
    TRY(mem_alloc(&mem, sizeof(float) * (size_t)(t->N * t->K), e));
    for (int64_t n = 0; n < t->N; n++)
        qtensor_decode_row(t, n, (float *)mem + n * t->K);
    rc = quant_algo_by_name("rtn")->quantize(
        mem, t->N, t->K, &m->online, m->cfg->dtype == NUM_F16 ? NUM_F16 : NUM_BF16, &st, &out, e);
    if (rc < 0) {
        err_wrap(e, "%s", module);
        goto out;
    }
    qtensor_free(t);
    *t = out;
out:
    mem_free(mem);
    return rc;
}

static float amax_of(const qtensor *t)
{
    float *row = xmalloc(sizeof *row * (size_t)t->K), best = 0;
    for (int64_t n = 0; n < t->N; n++) {
        qtensor_decode_row(t, n, row);
        for (int64_t k = 0; k < t->K; k++)
            best = fmaxf(best, fabsf(row[k]));
    }
    free(row);
    return best;
}

/* Replaces *t by what fn made of it. */
static void replace(qtensor *t, qtensor *made)
{
    qtensor_free(t);
    *t = *made;
}

static int load_shard(model *m, const arch_shard *s, qtensor *t, err *e)
{
    qtensor made = {0};
    if (m->opts.random) return model__random_shard(m, s, t, e);
    int rc = quant_load(m->q, s->module, t, e);
    if (rc < 0) return rc;
    if (s->transposed && !quant_has(m->q, s->module)) {
        TRY(qtensor_transpose(t, &made, e));
        replace(t, &made);
    }
    if (t->N != s->N || t->K != s->K || t->E != s->E) {
        rc = err_set(e, ERR_SHAPE,
                     "%s: module '%s' is %lld x %lld x %lld, config.json asks for %lld x %lld x "
                     "%lld",
                     ckpt_path(m->q->c), s->module, (long long)t->E, (long long)t->N,
                     (long long)t->K, (long long)s->E, (long long)s->N, (long long)s->K);
        goto out;
    }
    if (s->n_parts) {
        int32_t *rows = xmalloc(sizeof *rows * (size_t)s->N);
        arch_shard_rows(s, rows);
        rc = qtensor_rows(t, rows, s->N, &made, e);
        free(rows);
        if (rc < 0) goto out;
        replace(t, &made);
    }
    rc = 0;
out:
    if (rc < 0) qtensor_free(t);
    return rc;
}

static int read_bias(model *m, const arch_shard *s, float *out, err *e)
{
    int rc = read_vector(m, s->bias_name, s->E, s->N, out, e);
    if (rc < 0 || !s->n_parts) return rc;
    int32_t *rows = xmalloc(sizeof *rows * (size_t)s->N);
    float *old = xmalloc(sizeof *old * (size_t)s->N);
    arch_shard_rows(s, rows);
    for (int64_t x = 0; x < s->E; x++) {
        memcpy(old, out + x * s->N, sizeof *old * (size_t)s->N);
        for (int64_t i = 0; i < s->N; i++)
            out[x * s->N + i] = old[rows[i]];
    }
    free(old);
    free(rows);
    return 0;
}

/* Bias of all shards in one vector [E, N]; NULL when none has one. A bias that is there is used
 * even where the config does not announce it; one that is announced must be there. */
static int load_bias(model *m, const arch_linear *l, float **out, err *e)
{
    int64_t total = 0, at = 0;
    bool any = false;
    *out = NULL;
    for (int i = 0; i < l->n_shards; i++) {
        any = any || l->shard[i].bias || ckpt_find(m->q->c, l->shard[i].bias_name);
        total += l->shard[i].E * l->shard[i].N;
    }
    if (!any) return 0;
    float *b = xcalloc((size_t)total, sizeof *b);
    for (int i = 0; i < l->n_shards; at += l->shard[i].E * l->shard[i].N, i++) {
        if (!l->shard[i].bias && !ckpt_find(m->q->c, l->shard[i].bias_name)) continue;
        int rc = read_bias(m, &l->shard[i], b + at, e);
        if (rc < 0) {
            free(b);
            return rc;
        }
    }
    *out = b;
    return 0;
}

/* ---- linears ------------------------------------------------------------------------------------
 */

typedef struct loaded { /* the shards of one linear */
    qtensor t[3];
    float *bias;
} loaded;

static void drop_loaded(loaded *s)
{
    for (int i = 0; i < 3; i++)
        qtensor_free(&s->t[i]);
    free(s->bias);
    *s = (loaded){0};
}

/* The model's spec is that of its first quantized linear, else of its first; the head, which is
 * loaded before the layers, counts only where there is no other. */
static void note_spec(model *m, arch_linear_kind kind, const qspec *s)
{
    if (m->spec_known && (qaxis_quantized(&m->spec.w) || !qaxis_quantized(&s->w))) return;
    m->spec = *s;
    m->spec_known = kind != ARCH_LM_HEAD;
}

/* Prepares what lies in s; n shards of one expert (E = 1). */
static int prepare(model *m, const arch_linear *l, loaded *s, kern_linear **out, err *e)
{
    int rc = 0;
    float amax = 0;
    /* Routers and gates decide: they never take a coarser input. */
    kern_linear_desc d = {
        .name = l->shard[0].module,
        .n_shards = l->n_shards,
        .bias = s->bias,
        .act = l->kind == ARCH_ROUTER || l->kind == ARCH_SHARED_GATE ? KERN_ACT_F32 : m->opts.act,
        .strict = m->opts.strict,
        .expert = l->kind == ARCH_EXPERT_UP || l->kind == ARCH_EXPERT_DOWN};
    bool online = m->has_online && arch_quantizable(l->kind);
    for (int i = 0; i < l->n_shards; i++) {
        d.shard[i] = &s->t[i];
        if (online && m->online.w.scale == QS_NVFP4 && !m->opts.random)
            amax = fmaxf(amax, amax_of(&s->t[i]));
    }
    for (int i = 0; online && i < l->n_shards; i++)
        TRY(quantize_now(m, l->shard[i].module, &s->t[i], amax, e));
    TRY(kern_linear_make(m->dev, &d, out, e));
    note_spec(m, l->kind, &s->t[0].spec);
    m->bytes.prepared += kern_linear_bytes(*out);
    model__report_add(m, arch_kind_names[l->kind], &s->t[0].spec, *out);
out:
    return rc;
}

static int load_parts(model *m, const arch_linear *l, loaded *s, err *e)
{
    int rc = 0;
    for (int i = 0; i < l->n_shards; i++) {
        TRY(load_shard(m, &l->shard[i], &s->t[i], e));
        qtensor_bytes(&s->t[i], &m->bytes.file);
    }
    TRY(load_bias(m, l, &s->bias, e));
out:
    return rc;
}

/* The file's pages have served: what is resident while loading stays near what will be. */
static void release(model *m, const arch_linear *l)
{
    for (int i = 0; i < l->n_shards; i++)
        quant_release(m->q, l->shard[i].module);
}

static int make_linear(model *m, const arch_linear *l, kern_linear **out, err *e)
{
    loaded s = {0};
    int rc = load_parts(m, l, &s, e);
    if (rc >= 0) rc = prepare(m, l, &s, out, e);
    drop_loaded(&s);
    release(m, l);
    return rc;
}

/* All experts from one tensor: slices of it, one by one. */
static int make_fused(model *m, const arch_linear *l, kern_linear **out, err *e)
{
    loaded all = {0};
    int rc = load_parts(m, l, &all, e);
    int64_t N = l->shard[0].N;
    for (int64_t x = 0; rc >= 0 && x < l->shard[0].E; x++) {
        loaded s = {0};
        arch_linear one = *l;
        one.expert = (int)x;
        rc = qtensor_slice(&all.t[0], 'E', x, x + 1, &s.t[0], e);
        if (rc >= 0 && all.bias) {
            s.bias = xmalloc(sizeof *s.bias * (size_t)N);
            memcpy(s.bias, all.bias + x * N, sizeof *s.bias * (size_t)N);
        }
        if (rc >= 0) rc = prepare(m, &one, &s, &out[x], e);
        drop_loaded(&s);
    }
    drop_loaded(&all);
    release(m, l);
    return rc;
}

/* kv_b of latent attention, taken apart: scores use q·k = (k_up^T q)·c, outputs v_up·(sum p c). */
static int make_absorbed(model *m, const arch_linear *l, model_layer *out, err *e)
{
    const arch_model *a = m->arch;
    int64_t H = a->H, R = a->mla.kv_lora, nope = a->mla.nope, V = a->mla.v;
    loaded s = {0};
    float *row = xmalloc(sizeof *row * (size_t)R);
    int rc = load_parts(m, l, &s, e);
    if (rc >= 0 && m->has_online)
        rc = quantize_now(m, l->shard[0].module, &s.t[0],
                          m->online.w.scale == QS_NVFP4 ? amax_of(&s.t[0]) : 0, e);
    if (rc < 0) goto out;
    const qtensor *t = &s.t[0];
    bool plain = !t->scales && (t->code == NUM_BF16 || t->code == NUM_F16);
    num_dtype to = plain ? t->code : NUM_F32;
    qspec spec = {{.type = to}, {.type = NUM_BF16}, {.type = NUM_BF16}};
    TRY(qtensor_alloc(&out->k_up, &spec, NUM_NONE, H, R, nope, e));
    TRY(qtensor_alloc(&out->v_up, &spec, NUM_NONE, H, V, R, e));
    uint8_t *k = (uint8_t *)(uintptr_t)out->k_up.codes, *v = (uint8_t *)(uintptr_t)out->v_up.codes;
    size_t one = num_bytes(to, 1);
    for (int64_t h = 0; h < H; h++)
        for (int64_t i = 0; i < nope + V; i++) {
            qtensor_decode_row(t, h * (nope + V) + i, row);
            if (i >= nope)
                num_encode_row(to, row, (size_t)R,
                               v + (size_t)(h * V + i - nope) * out->v_up.row_bytes);
            for (int64_t r = 0; i < nope && r < R; r++)
                num_encode_row(to, row + r, 1,
                               k + (size_t)(h * R + r) * out->k_up.row_bytes + (size_t)i * one);
        }
    m->bytes.other +=
        (uint64_t)(H * R) * out->k_up.row_bytes + (uint64_t)(H * V) * out->v_up.row_bytes;
    TRY(kern_table(m->dev, &out->k_up, e));
    TRY(kern_table(m->dev, &out->v_up, e));
out:
    free(row);
    drop_loaded(&s);
    release(m, l);
    return rc;
}

/* ---- embedding and head -------------------------------------------------------------------------
 */

/* One stored tensor for both ends: counted once, and kept once where its prepared rows can be read.
 */
static void share_ends(model *m, const qbytes *before)
{
    m->bytes.file = *before;
    if (!kern_linear_can_embed(m->lm_head)) return;
    m->bytes.other -= (uint64_t)m->embed.N * m->embed.row_bytes;
    qtensor_free(&m->embed);
    m->embed = (qtensor){0};
}

static int load_ends(model *m, const arch_linear *head, err *e)
{
    int rc = 0;
    const arch_model *a = m->arch;
    arch_linear l = *head;
    arch_ends ends;
    char name[256];
    TRY(arch_find_ends(a, m->q, &ends, e));
    if (*ends.warning) log_warn("%s: %s", ckpt_path(m->q->c), ends.warning);
    arch_shard s = {.N = a->vocab, .K = a->hidden, .E = 1};
    snprintf(s.module, sizeof s.module, "%s", ends.embed);
    TRY(load_shard(m, &s, &m->embed, e));
    qtensor_bytes(&m->embed, &m->bytes.file);
    m->bytes.other += (uint64_t)m->embed.N * m->embed.row_bytes;
    if (a->name.pos) {
        s.N = m->cfg->max_position;
        snprintf(s.module, sizeof s.module, "%s", a->name.pos);
        TRY(load_shard(m, &s, &m->pos, e));
        qtensor_bytes(&m->pos, &m->bytes.file);
        m->bytes.other += (uint64_t)m->pos.N * m->pos.row_bytes;
    }
    qbytes before = m->bytes.file;
    snprintf(l.shard[0].module, sizeof l.shard[0].module, "%s", ends.head);
    TRY(make_linear(m, &l, &m->lm_head, e));
    if (ends.shared) share_ends(m, &before);
    snprintf(name, sizeof name, "%s", a->name.final_norm);
    TRY(load_norm(m, -1, name, a->hidden, &m->final_norm, e));
    TRY(kern_table(m->dev, &m->embed, e));
    TRY(kern_table(m->dev, &m->pos, e));
    TRY(settle_vectors(m, e));
out:
    return rc;
}

/* ---- layers -------------------------------------------------------------------------------------
 */

static int load_mix_vectors(model *m, int i, model_layer *l, err *e)
{
    const arch_model *a = m->arch;
    const arch_names *n = &a->name;
    int rc = 0;
    if (a->layers[i].mix == ARCH_ATTENTION) {
        bool head = a->qk_norm == ARCH_QK_HEAD;
        bool rows = a->qk_norm == ARCH_QK_HEAD_LAYER;
        int64_t q = head ? a->D : (int64_t)a->H * a->D, k = head ? a->D : (int64_t)a->Hk * a->D;
        if (a->qk_norm) {
            TRY(layer_matrix(m, i, n->q_norm ? n->q_norm : "self_attn.q_norm", ".weight",
                             rows ? a->H : 1, rows ? a->D : q, &l->q_norm, e));
            TRY(layer_matrix(m, i, n->k_norm ? n->k_norm : "self_attn.k_norm", ".weight",
                             rows ? a->Hk : 1, rows ? a->D : k, &l->k_norm, e));
            plus_one(m, l->q_norm, q);
            plus_one(m, l->k_norm, k);
        }
        TRY(layer_vector(m, i, n->sinks, "", a->H, &l->sinks, e));
    } else if (a->layers[i].mix == ARCH_MLA) {
        if (a->mla.q_lora)
            TRY(layer_vector(m, i, n->q_a_norm, ".weight", a->mla.q_lora, &l->q_a_norm, e));
        TRY(layer_vector(m, i, n->kv_a_norm, ".weight", a->mla.kv_lora, &l->kv_a_norm, e));
    } else {
        int64_t c = 2 * (int64_t)a->delta.Hk * a->delta.Dk + (int64_t)a->delta.Hv * a->delta.Dv;
        TRY(layer_matrix(m, i, n->conv, ".weight", c, a->delta.conv, &l->conv, e));
        TRY(layer_vector(m, i, n->a_log, "", a->delta.Hv, &l->a_log, e));
        TRY(layer_vector(m, i, n->dt_bias, "", a->delta.Hv, &l->dt_bias, e));
        TRY(layer_vector(m, i, n->delta_norm, ".weight", a->delta.Dv, &l->delta_norm, e));
    }
    rc = 0;
out:
    return rc;
}

static int load_vectors(model *m, int i, model_layer *l, err *e)
{
    const arch_model *a = m->arch;
    int rc = 0;
    TRY(load_norm(m, i, a->name.norm1, a->hidden, &l->norm1, e));
    TRY(load_norm(m, i, a->name.post_mix, a->hidden, &l->post_mix, e));
    TRY(load_norm(m, i, a->name.norm2, a->hidden, &l->norm2, e));
    TRY(load_norm(m, i, a->name.post_ffn, a->hidden, &l->post_ffn, e));
    TRY(load_mix_vectors(m, i, l, e));
    if (a->layers[i].ffn == ARCH_MOE)
        TRY(layer_vector(m, i, a->name.route_bias, "", a->moe.E, &l->route_bias, e));
    if (a->layers[i].mix != ARCH_DELTA)
        TRY(quant_kv_scales(m->q, i, m->kv_shapes[i].Hk, &m->k_scales[i], &m->v_scales[i], e));
    rc = 0;
out:
    return rc;
}

typedef struct expert_set { /* prepared experts of one layer, not yet grouped */
    kern_linear **up, **down;
} expert_set;

/* One listed linear into its slot. */
static int place(model *m, const arch_linear *a, model_layer *l, expert_set *x, err *e)
{
    if (a->kind == ARCH_KV_B) return make_absorbed(m, a, l, e);
    if (a->kind != ARCH_EXPERT_UP && a->kind != ARCH_EXPERT_DOWN)
        return make_linear(m, a, &l->lin[a->kind], e);
    kern_linear **set = a->kind == ARCH_EXPERT_UP ? x->up : x->down;
    return a->expert < 0 ? make_fused(m, a, set, e) : make_linear(m, a, &set[a->expert], e);
}

static int group_experts(model *m, model_layer *l, expert_set *x, err *e)
{
    int E = m->arch->moe.E;
    kern_linear **up = x->up, **down = x->down;
    x->up = NULL; /* taken over, also on error */
    int rc = kern_experts_make(m->dev, up, E, &l->e_up, e);
    free(up);
    if (rc < 0) return rc;
    x->down = NULL;
    rc = kern_experts_make(m->dev, down, E, &l->e_down, e);
    free(down);
    return rc;
}

static void drop_set(model *m, kern_linear **set)
{
    for (int i = 0; set && i < m->arch->moe.E; i++)
        if (set[i]) kern_linear_drop(m->dev, set[i]);
    free(set);
}

/* The n linears of layer i. */
static int load_layer(model *m, int i, const arch_linear *all, int n, err *e)
{
    model_layer *l = &m->layers[i];
    expert_set x = {0};
    bool moe = m->arch->layers[i].ffn == ARCH_MOE;
    int rc = load_vectors(m, i, l, e);
    if (rc < 0) return rc;
    if (moe) {
        x.up = xcalloc((size_t)m->arch->moe.E, sizeof *x.up);
        x.down = xcalloc((size_t)m->arch->moe.E, sizeof *x.down);
    }
    for (int k = 0; k < n; k++)
        TRY(place(m, &all[k], l, &x, e));
    if (moe) TRY(group_experts(m, l, &x, e));
    TRY(settle_vectors(m, e));
out:
    drop_set(m, x.up);
    drop_set(m, x.down);
    return rc;
}

int model__load(model *m, err *e)
{
    int n = arch_linears(m->arch, NULL, 0), rc = 0, at = 0;
    arch_linear *all = xcalloc((size_t)n, sizeof *all);
    progress p;
    arch_linears(m->arch, all, n);
    /* Ends first: while one tensor serves as both, it is resident in the file and prepared. */
    TRY(load_ends(m, &all[n - 1], e));
    progress_start(&p, "load", (uint64_t)m->n_layers);
    for (int i = 0; i < m->n_layers; i++) {
        int from = at;
        while (at < n && all[at].layer == i)
            at++;
        TRY(load_layer(m, i, all + from, at - from, e));
        progress_step(&p, (uint64_t)i + 1, NULL);
    }
    progress_end(&p);
    model__random_drop(m, false);
out:
    free(all);
    return rc;
}

void model__unload(model *m)
{
    model__random_drop(m, true);
    for (int i = 0; m->layers && i < m->n_layers; i++) {
        model_layer *l = &m->layers[i];
        for (int k = 0; k < ARCH_LINEAR_KINDS; k++)
            if (l->lin[k]) kern_linear_drop(m->dev, l->lin[k]);
        if (l->e_up) kern_experts_drop(m->dev, l->e_up);
        if (l->e_down) kern_experts_drop(m->dev, l->e_down);
        qtensor_free(&l->k_up);
        qtensor_free(&l->v_up);
    }
    if (m->lm_head) kern_linear_drop(m->dev, m->lm_head);
    qtensor_free(&m->embed);
    qtensor_free(&m->pos);
}
