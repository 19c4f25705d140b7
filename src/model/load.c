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

/* Of a small tensor that was just read, n numbers from `from` on stay: those of this rank. */
static void keep_part(model *m, float **at, int64_t from, int64_t n)
{
    model_vec_slot *s = m->n_slots ? &m->slots[m->n_slots - 1] : NULL;
    if (!*at || !s || s->at != at || s->n == n) return;
    m->bytes.other -= sizeof **at * (uint64_t)(s->n - n);
    s->n = n;
    *at += from;
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

void model__loaded_drop(model_loaded *s)
{
    for (int i = 0; i < KERN_MAX_SHARDS; i++)
        qtensor_free(&s->t[i]);
    free(s->bias);
    *s = (model_loaded){0};
}

/* The model's spec is that of its first quantized linear, else of its first; the head, which is
 * loaded before the layers, counts only where there is no other. */
static void note_spec(model *m, arch_linear_kind kind, const qspec *s)
{
    if (m->spec_known && (qaxis_quantized(&m->spec.w) || !qaxis_quantized(&s->w))) return;
    m->spec = *s;
    m->spec_known = kind != ARCH_LM_HEAD;
}

/* Which numbers of ranks would not cut through a scale, after the words that say it would. */
static int cannot_cut(const model *m, const arch_linear *l, int shard, const arch_cut *c,
                      const qtensor *t, const err *why, err *e)
{
    const arch_shard *s = &l->shard[shard];
    buf fit = {0};
    int64_t size = c->by_cols ? s->K : c->rows[0].hi - c->rows[0].lo,
            unit = c->by_cols ? t->block_k : t->block_n;
    if (!c->by_cols) size *= m->arch->n_ranks;
    if (unit >= (c->by_cols ? t->K : t->N)) unit = 1;
    arch_ranks_that_fit(m->whole, size, unit, &fit);
    int rc = err_set(e, why->code,
                     "%s: --tp %d cannot take it apart (%s); numbers of devices that can: %s",
                     s->module, m->arch->n_ranks, why->msg, t->flat ? "none" : fit.data);
    buf_free(&fit);
    return rc;
}

static void cut_bias(const arch_linear *l, int shard, const arch_cut *c, const float *whole,
                     float *part, int64_t *at)
{
    for (int i = 0; i < shard; i++)
        whole += l->shard[i].N;
    for (int i = 0; i < c->n; i++) {
        int64_t n = c->rows[i].hi - c->rows[i].lo;
        memcpy(part + *at, whole + c->rows[i].lo, sizeof *part * (size_t)n);
        *at += n;
    }
}

/* This rank's part of whole shards, lent from them. Of a cut by columns, whose products are summed
 * over all ranks, the bias is that of rank 0. */
static int cut_loaded(model *m, const arch_linear *l, const model_loaded *s, model_loaded *part,
                      int *n, err *e)
{
    int rc = 0;
    int64_t at = 0, rows = 0;
    err why = {0};
    arch_cut c = {0};
    *n = 0;
    for (int i = 0; i < l->n_shards; i++)
        rows += l->shard[i].N;
    if (s->bias) part->bias = xmalloc(sizeof *part->bias * (size_t)rows);
    for (int i = 0; i < l->n_shards; i++) {
        arch_cut_of(m->arch, l, i, &c);
        if (c.by_cols) {
            rc = qtensor_slice(&s->t[i], 'K', c.cols.lo, c.cols.hi, &part->t[(*n)++], &why);
        } else {
            for (int k = 0; k < c.n && rc >= 0; k++)
                rc = qtensor_slice(&s->t[i], 'N', c.rows[k].lo, c.rows[k].hi, &part->t[(*n)++],
                                   &why);
        }
        if (rc < 0) return cannot_cut(m, l, i, &c, &s->t[i], &why, e);
        if (s->bias) cut_bias(l, i, &c, s->bias, part->bias, &at);
    }
    if (c.by_cols && m->arch->rank > 0) {
        free(part->bias);
        part->bias = NULL;
    }
    return 0;
}

static bool online(const model *m, const arch_linear *l)
{
    return m->has_online && arch_quantizable(l->kind);
}

static int quantize_all(model *m, const arch_linear *l, model_loaded *s, err *e)
{
    int rc = 0;
    float amax = 0;
    bool scaled = m->online.w.scale == QS_NVFP4 && !m->opts.random;
    for (int i = 0; i < l->n_shards && scaled; i++)
        amax = fmaxf(amax, amax_of(&s->t[i]));
    for (int i = 0; i < l->n_shards; i++)
        TRY(quantize_now(m, l->shard[i].module, &s->t[i], amax, e));
out:
    return rc;
}

/* Prepares what lies in s; n shards of one expert (E = 1). */
static int prepare(model *m, const arch_linear *l, const model_loaded *s, kern_linear **out, err *e)
{
    int rc = 0;
    model_loaded part = {0};
    /* Routers and gates decide: they never take a coarser input. */
    kern_linear_desc d = {
        .name = l->shard[0].module,
        .n_shards = l->n_shards,
        .bias = s->bias,
        .act = l->kind == ARCH_ROUTER || l->kind == ARCH_SHARED_GATE ? KERN_ACT_F32 : m->opts.act,
        .strict = m->opts.strict,
        .expert = l->kind == ARCH_EXPERT_UP || l->kind == ARCH_EXPERT_DOWN};
    if (m->arch->n_ranks > 1) {
        TRY(cut_loaded(m, l, s, &part, &d.n_shards, e));
        d.bias = part.bias;
        s = &part;
    }
    for (int i = 0; i < d.n_shards; i++)
        d.shard[i] = &s->t[i];
    TRY(kern_linear_make(m->dev, &d, out, e));
    note_spec(m, l->kind, &s->t[0].spec);
    m->bytes.prepared += kern_linear_bytes(*out);
    model__report_add(m, arch_kind_names[l->kind], &s->t[0].spec, *out);
out:
    model__loaded_drop(&part);
    return rc;
}

/* Reads the whole of a linear, and quantizes it where that is asked for and it has no experts
 * inside: these are quantized one by one. */
int model__load_whole(model *m, const arch_linear *l, model_loaded *s, err *e)
{
    int rc = 0;
    qbytes before = m->bytes.file;
    m->bytes.file = (qbytes){0};
    for (int i = 0; i < l->n_shards; i++) {
        TRY(load_shard(m, &l->shard[i], &s->t[i], e));
        qtensor_bytes(&s->t[i], &m->bytes.file);
    }
    TRY(load_bias(m, l, &s->bias, e));
    if (online(m, l) && l->shard[0].E == 1) TRY(quantize_all(m, l, s, e));
out:
    s->file = m->bytes.file;
    m->bytes.file = before;
    if (rc < 0) model__loaded_drop(s);
    return rc;
}

/* The file's pages have served: what is resident while loading stays near what will be. */
static void release(model *m, const arch_linear *l)
{
    for (int i = 0; i < l->n_shards; i++)
        quant_release(m->q, l->shard[i].module);
}

/* The linear is lent: to be given back by give_back. */
static int borrow(model *m, const arch_linear *l, model_loaded **out, err *e)
{
    int rc = model__share_take(m, l, out, e);
    if (rc < 0) return rc;
    const qbytes *f = &(*out)->file;
    qbytes *b = &m->bytes.file;
    b->codes += f->codes;
    b->scales += f->scales;
    b->zeros += f->zeros;
    b->unquantized += f->unquantized;
    b->padding += f->padding;
    b->total += f->total;
    return 0;
}

static void give_back(model *m, const arch_linear *l, model_loaded *s)
{
    if (model__share_give(m, s)) release(m, l);
}

static int make_linear(model *m, const arch_linear *l, kern_linear **out, err *e)
{
    model_loaded *s;
    int rc = borrow(m, l, &s, e);
    if (rc < 0) return rc;
    rc = prepare(m, l, s, out, e);
    give_back(m, l, s);
    return rc;
}

/* All experts from one tensor: slices of it, one by one. */
static int make_fused(model *m, const arch_linear *l, kern_linear **out, err *e)
{
    model_loaded *all;
    int rc = borrow(m, l, &all, e);
    if (rc < 0) return rc;
    int64_t N = l->shard[0].N;
    for (int64_t x = 0; rc >= 0 && x < l->shard[0].E; x++) {
        model_loaded s = {0};
        arch_linear one = *l;
        one.expert = (int)x;
        rc = qtensor_slice(&all->t[0], 'E', x, x + 1, &s.t[0], e);
        if (rc >= 0 && all->bias) {
            s.bias = xmalloc(sizeof *s.bias * (size_t)N);
            memcpy(s.bias, all->bias + x * N, sizeof *s.bias * (size_t)N);
        }
        if (rc >= 0 && online(m, l)) rc = quantize_all(m, &one, &s, e);
        if (rc >= 0) rc = prepare(m, &one, &s, &out[x], e);
        model__loaded_drop(&s);
    }
    give_back(m, l, all);
    return rc;
}

/* kv_b of latent attention, taken apart: scores use q·k = (k_up^T q)·c, outputs v_up·(sum p c). */
static int make_absorbed(model *m, const arch_linear *l, model_layer *out, err *e)
{
    const arch_model *a = m->arch;
    int64_t H = a->H, R = a->mla.kv_lora, nope = a->mla.nope, V = a->mla.v;
    int64_t first = a->heads_cut ? a->rank * H : 0;
    model_loaded *s;
    int rc = borrow(m, l, &s, e);
    if (rc < 0) return rc;
    float *row = xmalloc(sizeof *row * (size_t)R);
    const qtensor *t = &s->t[0];
    bool plain = !t->scales && (t->code == NUM_BF16 || t->code == NUM_F16);
    num_dtype to = plain ? t->code : NUM_F32;
    qspec spec = {{.type = to}, {.type = NUM_BF16}, {.type = NUM_BF16}};
    TRY(qtensor_alloc(&out->k_up, &spec, NUM_NONE, H, R, nope, e));
    TRY(qtensor_alloc(&out->v_up, &spec, NUM_NONE, H, V, R, e));
    uint8_t *k = (uint8_t *)(uintptr_t)out->k_up.codes, *v = (uint8_t *)(uintptr_t)out->v_up.codes;
    size_t one = num_bytes(to, 1);
    for (int64_t h = 0; h < H; h++)
        for (int64_t i = 0; i < nope + V; i++) {
            qtensor_decode_row(t, (first + h) * (nope + V) + i, row);
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
    give_back(m, l, s);
    return rc;
}

/* ---- embedding and head -------------------------------------------------------------------------
 */

/* One stored tensor for both ends: counted once, and kept once where its prepared rows can be read.
 */
static void share_ends(model *m, const qbytes *before)
{
    m->bytes.file = *before;
    if (m->arch->n_ranks > 1 || !kern_linear_can_embed(m->lm_head)) return;
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
    if (*ends.warning && !a->rank) log_warn("%s: %s", ckpt_path(m->q->c), ends.warning);
    arch_shard s = {.N = a->vocab, .K = a->hidden, .E = 1};
    snprintf(s.module, sizeof s.module, "%s", ends.embed);
    model__share_lock(m);
    rc = load_shard(m, &s, &m->embed, e);
    model__share_unlock(m);
    if (rc < 0) goto out;
    qtensor_bytes(&m->embed, &m->bytes.file);
    m->bytes.other += (uint64_t)m->embed.N * m->embed.row_bytes;
    if (a->name.pos) {
        s.N = m->cfg->max_position;
        snprintf(s.module, sizeof s.module, "%s", a->name.pos);
        model__share_lock(m);
        rc = load_shard(m, &s, &m->pos, e);
        model__share_unlock(m);
        if (rc < 0) goto out;
        qtensor_bytes(&m->pos, &m->bytes.file);
        m->bytes.other += (uint64_t)m->pos.N * m->pos.row_bytes;
    }
    qbytes before = m->bytes.file;
    snprintf(l.shard[0].module, sizeof l.shard[0].module, "%s", ends.head);
    TRY(make_linear(m, &l, &m->lm_head, e));
    if (ends.shared) share_ends(m, &before);
    if (a->n_ranks > 1) {
        arch_cut c;
        arch_cut_of(a, &l, 0, &c);
        m->head_row0 = c.rows[0].lo;
        size_t bytes = sizeof *m->zeros * (size_t)a->vocab;
        m->zeros = memset(arena_alloc(m->mem, bytes), 0, bytes);
        m->bytes.other += bytes;
        TRY(kern_constant(m->dev, &m->zeros, a->vocab, e));
    }
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
        int64_t first = a->heads_cut ? a->rank * a->H : 0, D = a->D;
        int64_t q = head ? a->D : (int64_t)a->H * a->D, k = head ? a->D : (int64_t)a->Hk * a->D;
        if (a->qk_norm) {
            TRY(layer_matrix(m, i, n->q_norm ? n->q_norm : "self_attn.q_norm", ".weight",
                             rows ? a->H_all : 1, rows ? a->D : q, &l->q_norm, e));
            if (rows) keep_part(m, &l->q_norm, first * D, a->H * D);
            TRY(layer_matrix(m, i, n->k_norm ? n->k_norm : "self_attn.k_norm", ".weight",
                             rows ? a->Hk_all : 1, rows ? a->D : k, &l->k_norm, e));
            if (rows) keep_part(m, &l->k_norm, arch_first_kv_head(a) * D, a->Hk * D);
            plus_one(m, l->q_norm, q);
            plus_one(m, l->k_norm, k);
        }
        TRY(layer_vector(m, i, n->sinks, "", a->H_all, &l->sinks, e));
        keep_part(m, &l->sinks, first, a->H);
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
    if (a->layers[i].mix != ARCH_DELTA) {
        bool heads = a->layers[i].mix == ARCH_ATTENTION;
        model__share_lock(m);
        rc = quant_kv_scales(m->q, i, heads ? a->Hk_all : 1, &m->k_scales[i], &m->v_scales[i], e);
        model__share_unlock(m);
        if (rc < 0) goto out;
        int64_t first = heads ? arch_first_kv_head(a) : 0;
        if (m->k_scales[i]) m->k_scales[i] += first;
        if (m->v_scales[i]) m->v_scales[i] += first;
    }
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
    int n = arch_linears(m->whole, NULL, 0), rc = 0, at = 0;
    arch_linear *all = xcalloc((size_t)n, sizeof *all);
    progress p;
    arch_linears(m->whole, all, n);
    /* Ends first: while one tensor serves as both, it is resident in the file and prepared. */
    TRY(load_ends(m, &all[n - 1], e));
    if (!m->arch->rank) progress_start(&p, "load", (uint64_t)m->n_layers);
    for (int i = 0; i < m->n_layers; i++) {
        int from = at;
        while (at < n && all[at].layer == i)
            at++;
        TRY(load_layer(m, i, all + from, at - from, e));
        if (!m->arch->rank) progress_step(&p, (uint64_t)i + 1, NULL);
    }
    if (!m->arch->rank) progress_end(&p);
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
