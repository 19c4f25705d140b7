/* Loading a model: names are bound to slots, linears are fused and prepared, norms become f32, one
 * step's activations are allocated. The canonical quantized tensors live only while their linear is
 * prepared. */
#include "model/model_internal.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"

/* ---- small tensors ------------------------------------------------------------------------------
 */

static int read_vector(model *m, const char *name, int64_t n, float *out, err *e)
{
    const ckpt_tensor *t;
    int rc = ckpt_need(m->q->c, name, &t, e);
    if (rc < 0) return rc;
    if (t->n_dims != 1 || t->shape[0] != n)
        return err_set(
            e, ERR_SHAPE,
            "%s: tensor '%s' has %lld elements in %d dimensions, config.json asks for %lld",
            t->path, name, t->n_dims ? (long long)t->shape[0] : 1LL, t->n_dims, (long long)n);
    TRY(ckpt_load_rows(m->q->c, t, 0, 1, out, e));
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(out[i]))
            return err_set(e, ERR_VALUE, "%s: tensor '%s': element %lld is not finite", t->path,
                           name, (long long)i);
    m->bytes.file.unquantized += t->bytes;
    m->bytes.file.total += t->bytes;
out:
    return rc;
}

static int load_vector(model *m, const char *name, int64_t n, float **out, err *e)
{
    *out = arena_alloc(m->mem, sizeof **out * (size_t)n);
    m->bytes.other += sizeof **out * (uint64_t)n;
    return read_vector(m, name, n, *out, e);
}

/* ---- linears ------------------------------------------------------------------------------------
 */

/* Quantizes a plain tensor at load, as `tare quantize` would. */
static int quantize_now(model *m, const char *module, qtensor *t, float fused_amax, err *e)
{
    int rc = 0;
    qtensor out = {0};
    void *mem = NULL;
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

static int load_shard(model *m, const arch_shard *s, qtensor *t, err *e)
{
    int rc = quant_load(m->q, s->module, t, e);
    if (rc < 0) return rc;
    if (t->N != s->N || t->K != s->K || t->E != 1)
        return err_set(e, ERR_SHAPE,
                       "%s: module '%s' is %lld x %lld, config.json asks for %lld x %lld",
                       ckpt_path(m->q->c), s->module, (long long)t->N, (long long)t->K,
                       (long long)s->N, (long long)s->K);
    return 0;
}

/* Bias of all shards in one vector; NULL when none has one. A bias that is there is used even where
 * the config does not announce it; one that is announced must be there. */
static int load_bias(model *m, const arch_linear *l, float **out, err *e)
{
    char name[160];
    int64_t total = 0, at = 0;
    bool any = false;
    *out = NULL;
    for (int i = 0; i < l->n_shards; i++) {
        snprintf(name, sizeof name, "%s.bias", l->shard[i].module);
        any = any || l->shard[i].bias || ckpt_find(m->q->c, name);
        total += l->shard[i].N;
    }
    if (!any) return 0;
    float *b = xcalloc((size_t)total, sizeof *b);
    for (int i = 0; i < l->n_shards; at += l->shard[i++].N) {
        snprintf(name, sizeof name, "%s.bias", l->shard[i].module);
        if (!l->shard[i].bias && !ckpt_find(m->q->c, name)) continue;
        int rc = read_vector(m, name, l->shard[i].N, b + at, e);
        if (rc < 0) {
            free(b);
            return rc;
        }
    }
    *out = b;
    return 0;
}

static int make_linear(model *m, const arch_linear *l, kern_linear **out, err *e)
{
    static const char *const names[] = {"q/k/v", "o", "gate/up", "down", "lm_head"};
    int rc = 0;
    qtensor t[3];
    float *bias = NULL, amax = 0;
    kern_linear_desc d = {.name = l->shard[0].module,
                          .n_shards = l->n_shards,
                          .act = m->opts.act,
                          .strict = m->opts.strict};
    bool online = m->has_online && l->kind != ARCH_LM_HEAD;
    memset(t, 0, sizeof t);
    for (int i = 0; i < l->n_shards; i++) {
        TRY(load_shard(m, &l->shard[i], &t[i], e));
        d.shard[i] = &t[i];
        qtensor_bytes(&t[i], &m->bytes.file);
        if (online && m->online.w.scale == QS_NVFP4) amax = fmaxf(amax, amax_of(&t[i]));
    }
    for (int i = 0; online && i < l->n_shards; i++)
        TRY(quantize_now(m, l->shard[i].module, &t[i], amax, e));
    TRY(load_bias(m, l, &bias, e));
    d.bias = bias;
    TRY(kern_linear_make(m->dev, &d, out, e));
    m->bytes.prepared += kern_linear_bytes(*out);
    if (l->kind == ARCH_QKV && l->layer == 0) m->spec = t[0].spec;
    model__report_add(m, names[l->kind], &t[0].spec, *out);
out:
    for (int i = 0; i < l->n_shards; i++)
        qtensor_free(&t[i]);
    free(bias);
    return rc;
}

/* ---- embedding and head -------------------------------------------------------------------------
 */

static int load_ends(model *m, err *e)
{
    int rc = 0;
    const ckpt_config *c = m->cfg;
    arch_linear l = {.kind = ARCH_LM_HEAD, .layer = -1, .n_shards = 1};
    arch_ends ends;
    TRY(arch_find_ends(m->q, &ends, e));
    if (*ends.warning) log_warn("%s: %s", ckpt_path(m->q->c), ends.warning);
    arch_shard s = {.N = c->vocab_size, .K = c->hidden_size};
    snprintf(s.module, sizeof s.module, "%s", ends.embed);
    TRY(load_shard(m, &s, &m->embed, e));
    qtensor_bytes(&m->embed, &m->bytes.file);
    m->bytes.other += (uint64_t)m->embed.N * m->embed.row_bytes;
    qbytes before = m->bytes.file;
    l.shard[0] = s;
    snprintf(l.shard[0].module, sizeof l.shard[0].module, "%s", ends.head);
    TRY(make_linear(m, &l, &m->lm_head, e));
    if (ends.shared) m->bytes.file = before; /* one stored copy is counted once */
out:
    return rc;
}

/* ---- whole model --------------------------------------------------------------------------------
 */

static int load_layer(model *m, int i, const arch_linear four[4], err *e)
{
    model_layer *l = &m->layers[i];
    const ckpt_config *c = m->cfg;
    kern_linear **slot[4] = {&l->qkv, &l->o, &l->gate_up, &l->down};
    char name[128];
    int rc = 0;
    snprintf(name, sizeof name, "model.layers.%d.input_layernorm.weight", i);
    TRY(load_vector(m, name, c->hidden_size, &l->norm1, e));
    snprintf(name, sizeof name, "model.layers.%d.post_attention_layernorm.weight", i);
    TRY(load_vector(m, name, c->hidden_size, &l->norm2, e));
    if (c->qk_norm) {
        snprintf(name, sizeof name, "model.layers.%d.self_attn.q_norm.weight", i);
        TRY(load_vector(m, name, c->head_dim, &l->q_norm, e));
        snprintf(name, sizeof name, "model.layers.%d.self_attn.k_norm.weight", i);
        TRY(load_vector(m, name, c->head_dim, &l->k_norm, e));
    }
    for (int k = 0; k < 4; k++)
        TRY(make_linear(m, &four[k], slot[k], e));
    m->kv_shapes[i] = (kv_layer_shape){
        .Hk = (int)c->n_kv_heads, .D = (int)c->head_dim, .window = arch_layer_window(c, i)};
    TRY(quant_kv_scales(m->q, i, (int)c->n_kv_heads, &m->k_scales[i], &m->v_scales[i], e));
out:
    return rc;
}

static int load_all(model *m, err *e)
{
    const ckpt_config *c = m->cfg;
    int n = arch_linears(c, NULL, 0), rc = 0;
    arch_linear *all = xcalloc((size_t)n, sizeof *all);
    progress p;
    arch_linears(c, all, n);
    progress_start(&p, "load", (uint64_t)c->n_layers);
    for (int i = 0; i < m->n_layers; i++) {
        TRY(load_layer(m, i, &all[4 * i], e));
        progress_step(&p, (uint64_t)i + 1, NULL);
    }
    progress_end(&p);
    TRY(load_vector(m, "model.norm.weight", c->hidden_size, &m->final_norm, e));
    TRY(load_ends(m, e));
out:
    free(all);
    return rc;
}

static int buffer(model *m, float **out, int64_t rows, int64_t cols, err *e)
{
    void *p = NULL;
    size_t n;
    if (!mem_mul((size_t)rows, (size_t)cols, &n) || !mem_mul(n, sizeof(float), &n))
        return err_set(e, ERR_LIMIT, "activations of %lld rows are too large", (long long)rows);
    int rc = kern_alloc(m->dev, &p, n, e);
    if (rc < 0) return rc;
    *out = p;
    m->bytes.workspace += n;
    return 0;
}

static int64_t max3(int64_t a, int64_t b, int64_t c)
{
    return a > b ? (a > c ? a : c) : b > c ? b : c;
}

static int make_buffers(model *m, err *e)
{
    const ckpt_config *c = m->cfg;
    int64_t T = m->opts.max_rows, h = c->hidden_size, q = c->n_heads * c->head_dim,
            kv = c->n_kv_heads * c->head_dim, f = c->intermediate_size;
    int rc = 0;
    m->rot_half = model__rot_dim(c) / 2;
    m->rope_attention = model__rope_attention(c);
    m->rope_by_length = c->rope.kind == ROPE_DYNAMIC || c->rope.kind == ROPE_LONGROPE;
    m->inv = arena_alloc(m->mem, sizeof *m->inv * (size_t)m->rot_half);
    model__rope_inv(c, 0, m->inv);
    TRY(buffer(m, &m->x, T, h, e));
    TRY(buffer(m, &m->h, T, h, e));
    TRY(buffer(m, &m->qkv, T, q + 2 * kv, e));
    TRY(buffer(m, &m->attn, T, q, e));
    TRY(buffer(m, &m->y, T, h, e));
    TRY(buffer(m, &m->gu, T, 2 * f, e));
    TRY(buffer(m, &m->act, T, f, e));
    TRY(buffer(m, &m->cosv, T, m->rot_half, e));
    TRY(buffer(m, &m->sinv, T, m->rot_half, e));
    TRY(buffer(m, &m->logit_x, T, h, e));
    int64_t max_k = max3(h, q, f), max_n = max3(q + 2 * kv, 2 * f, c->vocab_size);
    TRY(kern_reserve(m->dev, T, max_k, max_n, e));
    m->bytes.workspace += kern_reserve_bytes(T, max_k, max_n, team_size(m->dev->team));
out:
    return rc;
}

/* --quantization on an unquantized model quantizes; on a quantized one it is an assertion. */
static int resolve_online(model *m, err *e)
{
    if (!m->opts.quantize || !*m->opts.quantize) return 0;
    int rc = qspec_parse(m->opts.quantize, &m->online, e);
    if (rc < 0) return rc;
    if (!strcmp(m->q->dialect->name, "plain")) {
        m->has_online = qaxis_quantized(&m->online.w);
        return 0;
    }
    const quant_group *g = m->q->n_groups ? &m->q->groups[0] : NULL;
    if (m->q->n_groups == 1 && qaxis_equal(&g->spec.w, &m->online.w) &&
        qaxis_equal(&g->spec.a, &m->online.a))
        return 0;
    buf have = {0};
    if (g) qspec_format(&g->spec, &have);
    rc = err_set(e, ERR_USAGE,
                 "--quantization %s: %s is quantized already (%s, %s); leave the option out, or "
                 "start from the unquantized model",
                 m->opts.quantize, ckpt_path(m->q->c), m->q->dialect->name,
                 have.data ? have.data : "?");
    buf_free(&have);
    return rc;
}

static kern_glu glu_of(const char *act)
{
    if (!strcmp(act, "gelu")) return KERN_GELU;
    if (!strncmp(act, "gelu", 4)) return KERN_GELU_TANH;
    return !strcmp(act, "relu") ? KERN_RELU : KERN_SILU;
}

int model_open(model **out, quant_ckpt *q, kern_dev *d, const model_opts *o, err *e)
{
    int rc = 0;
    const arch_row *arch;
    model *m = xcalloc(1, sizeof *m);
    *out = NULL;
    m->cfg = ckpt_cfg(q->c);
    m->q = q;
    m->dev = d;
    m->opts = *o;
    m->mem = arena_make();
    if (m->opts.max_rows < 1) m->opts.max_rows = 512;
    TRY(arch_find(m->cfg, &arch, e));
    TRY(resolve_online(m, e));
    m->glu = glu_of(m->cfg->hidden_act);
    m->n_layers = (int)m->cfg->n_layers;
    m->layers = arena_alloc(m->mem, sizeof *m->layers * (size_t)m->n_layers);
    m->kv_shapes = arena_alloc(m->mem, sizeof *m->kv_shapes * (size_t)m->n_layers);
    m->k_scales = arena_alloc(m->mem, sizeof *m->k_scales * (size_t)m->n_layers);
    m->v_scales = arena_alloc(m->mem, sizeof *m->v_scales * (size_t)m->n_layers);
    m->spec = (qspec){{.type = NUM_BF16}, {.type = NUM_BF16}, {.type = NUM_BF16}};
    TRY(load_all(m, e));
    m->spec.kv = q->kv;
    TRY(make_buffers(m, e));
    *out = m;
    m = NULL;
out:
    model_close(m);
    return rc;
}

void model_close(model *m)
{
    if (!m) return;
    for (int i = 0; m->layers && i < m->n_layers; i++) {
        kern_linear *l[4] = {m->layers[i].qkv, m->layers[i].o, m->layers[i].gate_up,
                             m->layers[i].down};
        for (int k = 0; k < 4; k++)
            if (l[k]) kern_linear_drop(m->dev, l[k]);
    }
    if (m->lm_head) kern_linear_drop(m->dev, m->lm_head);
    qtensor_free(&m->embed);
    float *bufs[] = {m->x,  m->h,   m->qkv,  m->attn, m->y,
                     m->gu, m->act, m->cosv, m->sinv, m->logit_x};
    for (size_t i = 0; i < sizeof bufs / sizeof *bufs; i++)
        if (bufs[i]) kern_free(m->dev, bufs[i]);
    arena_drop(m->mem);
    free(m->report);
    free(m);
}

const ckpt_config *model_cfg(const model *m)
{
    return m->cfg;
}

int model_kv_shapes(const model *m, const kv_layer_shape **out)
{
    *out = m->kv_shapes;
    return m->n_layers;
}

const float *const *model_k_scales(const model *m)
{
    return m->k_scales;
}
const float *const *model_v_scales(const model *m)
{
    return m->v_scales;
}
int64_t model_vocab(const model *m)
{
    return kern_linear_n(m->lm_head);
}
uint64_t model_kv_clipped(const model *m)
{
    return m->kv_clipped;
}
void model_memory(const model *m, model_bytes *out)
{
    *out = m->bytes;
}
qspec model_spec(const model *m)
{
    return m->spec;
}

void model_set_tap(model *m, model_tap_fn *fn, void *arg)
{
    m->tap = fn;
    m->tap_arg = arg;
}

int model_report(const model *m, const model_report_line **out)
{
    *out = m->report;
    return m->n_report;
}

void model__report_add(model *m, const char *what, const qspec *s, const kern_linear *l)
{
    model_report_line line = {0};
    buf spec = {0};
    qaxis_format(&s->w, &spec);
    buf_puts(&spec, " a:");
    qaxis_format(&s->a, &spec);
    snprintf(line.what, sizeof line.what, "%s", what);
    snprintf(line.spec, sizeof line.spec, "w:%.90s", spec.data);
    buf_free(&spec);
    for (int b = 0; b < KERN_BUCKETS; b++)
        line.choice[b] = *kern_linear_choice(l, b);
    for (int i = 0; i < m->n_report; i++) {
        model_report_line *r = &m->report[i];
        bool same = !strncmp(r->what, what, strlen(what)) && strchr(" ", r->what[strlen(what)]) &&
                    !strcmp(r->spec, line.spec);
        for (int b = 0; b < KERN_BUCKETS; b++)
            same = same && !strcmp(r->choice[b].row, line.choice[b].row);
        if (!same) continue;
        const char *x = strrchr(r->what, 'x');
        int count = x && x > r->what && x[-1] == ' ' ? (int)strtol(x + 1, NULL, 10) : 1;
        snprintf(r->what, sizeof r->what, "%s x%d", what, count + 1);
        return;
    }
    m->report = xrealloc(m->report, sizeof *m->report * (size_t)(m->n_report + 1));
    m->report[m->n_report++] = line;
}
