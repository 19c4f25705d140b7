/* Memory arithmetic. Nothing is loaded: sizes come from config.json, from the headers of the
 * checkpoint, and from what the kernels say their layouts take. "weights" is what lies on disk,
 * split by kind; "resident" is what loading allocates. The formulas of the stored forms are those
 * of the compressed-tensors writer. */
#include "plan/plan.h"
#include <stdio.h>
#include <string.h>

static bool weight_only(const qspec *s)
{
    return !qaxis_quantized(&s->a);
}

static void add(qbytes *b, uint64_t tight, uint64_t stored, uint64_t scales, uint64_t zeros)
{
    b->codes += tight;
    b->padding += stored - tight;
    b->scales += scales;
    b->zeros += zeros;
    b->total += stored + scales + zeros;
}

/* One linear [N,K] as the compressed-tensors dialect stores it. Float scales take the model's
 * 2-byte type. */
static void stored_bytes(const qspec *s, int64_t n, int64_t k, qbytes *b)
{
    const qaxis *w = &s->w;
    uint64_t N = (uint64_t)n, K = (uint64_t)k, bits = (uint64_t)num_infos[w->type].bits;
    uint64_t G = w->gran == Q_GROUP ? (K + (uint64_t)w->group - 1) / (uint64_t)w->group : 1;
    if (w->scale == QS_NVFP4) {
        add(b, N * K / 2, N * K / 2, N * G + 4, 0);
    } else if (w->scale == QS_MX) {
        add(b, N * K * bits / 8, N * K * bits / 8, N * G, 0);
    } else if (w->type == NUM_F8_E4M3) {
        uint64_t grid = w->gran == Q_TENSOR ? 1
                        : w->gran == Q_BLOCK
                            ? ((N + (uint64_t)w->block_n - 1) / (uint64_t)w->block_n) *
                                  ((K + (uint64_t)w->block_k - 1) / (uint64_t)w->block_k)
                            : N * G;
        add(b, N * K, N * K, 2 * grid, 0);
    } else if (bits == 8 && !weight_only(s)) {
        add(b, N * K, N * K, 2 * N * G, w->asym ? N * G : 0);
    } else {
        /* packed words, and weight_shape, two 64-bit numbers */
        uint64_t stored = N * ((K * bits + 31) / 32) * 4 + 16;
        add(b, (N * K * bits + 7) / 8, stored, 2 * N * G,
            w->asym ? (N * bits + 31) / 32 * 4 * G : 0);
    }
}

/* Linears whose input the groups of the scheme do not divide: the first by name, and how many. */
typedef struct refusals {
    char first[128];
    int64_t k, fits; /* its columns; the largest power-of-two group that would do, for all */
    int n;
} refusals;

static void refuse(refusals *r, const qspec *s, const arch_shard *l)
{
    if (s->w.gran != Q_GROUP || l->K % s->w.group == 0) return;
    if (!r->n++) {
        snprintf(r->first, sizeof r->first, "%s", l->module);
        r->k = l->K;
        r->fits = s->w.group;
    }
    while (r->fits > 1 && l->K % r->fits)
        r->fits /= 2;
}

static void say_refused(const refusals *r, const qspec *s, plan_out *out)
{
    const char *tail = strrchr(r->first, '.');
    buf b = {0};
    if (!r->n) return;
    buf_puts(&b, r->first);
    if (r->n > 1) buf_printf(&b, " and %d more", r->n - 1);
    buf_printf(&b, ": %lld input columns are not a multiple of %d; ", (long long)r->k, s->w.group);
    if (s->w.scale == QS_FLOAT && r->fits >= 8)
        buf_printf(&b, "use g%lld, or ", (long long)r->fits);
    buf_printf(&b, "--ignore 're:.*%s$'", tail ? tail + 1 : r->first);
    size_t n = b.len < sizeof out->refused ? b.len : sizeof out->refused - 1;
    memcpy(out->refused, b.data, n);
    out->refused[n] = 0;
    buf_free(&b);
}

/* Spec by which a module is stored in the checkpoint; false when plain. */
static bool stored_spec(const plan_in *in, const char *module, qspec *out)
{
    quant_module m;
    if (!in->q || !quant_has(in->q, module) || quant_describe(in->q, module, &m, NULL) < 0)
        return false;
    *out = m.spec;
    return true;
}

/* A plain module's tensor: with ".weight", or the bare name of experts in one tensor. */
static const ckpt_tensor *plain_tensor(const plan_in *in, const char *module)
{
    char name[160];
    snprintf(name, sizeof name, "%s.weight", module);
    const ckpt_tensor *t = in->q ? ckpt_find(in->q->c, name) : NULL;
    return t || !in->q ? t : ckpt_find(in->q->c, module);
}

static num_dtype plain_type(const plan_in *in, const char *module)
{
    const ckpt_tensor *t = plain_tensor(in, module);
    if (t && !t->gguf && (t->dtype == NUM_F32 || t->dtype == NUM_F16)) return t->dtype;
    return NUM_BF16;
}

static void plain_add(qbytes *b, uint64_t bytes)
{
    b->unquantized += bytes;
    b->total += bytes;
}

typedef struct plan_sum {
    const plan_in *in;
    plan_out *out;
    const arch_model *arch, *part; /* the whole; what a device has */
    bool loaded;                   /* count what is resident, not what is stored */
    arch_ends ends;
    refusals refused;
    bool head_embeds; /* the prepared head serves as embedding too */
} plan_sum;

static kern_dev *gpu_of(const plan_in *in)
{
    return in->dev && in->dev->be ? in->dev : NULL;
}

static bool is_weight_of(const char *name, const char *module)
{
    size_t n = module ? strlen(module) : 0;
    return n && !strncmp(name, module, n) && !strcmp(name + n, ".weight");
}

static void count_plain(void *arg, const char *name, int64_t rows, int64_t cols)
{
    plan_sum *p = arg;
    char embed[160];
    if (is_weight_of(name, p->arch->name.embed)) {
        snprintf(embed, sizeof embed, "%s.weight", p->ends.embed);
        name = embed;
    }
    const ckpt_tensor *t = p->in->q ? ckpt_find(p->in->q->c, name) : NULL;
    size_t len = strlen(name);
    bool norm_bias = len > 5 && !strcmp(name + len - 5, ".bias"); /* used where it is stored */
    if (!t && norm_bias && p->in->q && ckpt_has_weights(p->in->q->c)) return;
    uint64_t n = (uint64_t)(rows * cols), bytes = t ? t->bytes : 2 * n;
    /* Embeddings stay in their file's type (gguf blocks become bf16), all else becomes f32. */
    bool table = name == embed || is_weight_of(name, p->arch->name.pos);
    uint64_t resident = !table ? 4 * n : t && !t->gguf ? t->bytes : 2 * n;
    if (!p->loaded) plain_add(&p->out->weights, bytes);
    /* An embedding that is the head as well is resident as the head alone, if that is whole. */
    bool head = p->ends.shared && p->head_embeds && is_weight_of(name, p->ends.embed) &&
                p->part->n_ranks < 2;
    if (!head && p->loaded) p->out->resident_weights += resident;
}

static void count_stored(const plan_in *in, const arch_shard *s, bool quantized, plan_out *out)
{
    const ckpt_tensor *t = plain_tensor(in, s->module);
    if (quantized)
        quant_module_bytes(in->q, s->module, &out->weights, NULL);
    else
        plain_add(&out->weights, t ? t->bytes : 2 * (uint64_t)(s->E * s->N * s->K));
}

/* part: the rows of it that a device has. */
static void count_bias(const plan_in *in, const arch_shard *s, int64_t part, plan_out *out)
{
    const ckpt_tensor *t = in->q ? ckpt_find(in->q->c, s->bias_name) : NULL;
    if (!t && !(s->bias && !in->q)) return;
    plain_add(&out->weights, t ? t->bytes : 2 * (uint64_t)(s->E * s->N));
    out->resident_weights += 4 * (uint64_t)(s->E * part);
}

/* What loading makes of a shard: kv_b of latent attention becomes plain matrices, the rest is what
 * the kernels prepare. Routers and gates keep f32 inputs. */
static uint64_t resident(const plan_in *in, const arch_linear *l, const arch_shard *s,
                         const qspec *use, num_dtype plain)
{
    bool exact = l->kind == ARCH_ROUTER || l->kind == ARCH_SHARED_GATE;
    if (l->kind == ARCH_KV_B)
        return (uint64_t)(s->N * s->K) * (qaxis_quantized(&use->w) ? 4 : num_bytes(plain, 1));
    return (uint64_t)s->E * kern_linear_predict_bytes(in->features, use, plain,
                                                      exact ? KERN_ACT_F32 : in->act, s->N, s->K);
}

/* Scales that reach over the border between two devices; kv_b is taken apart number by number. */
static void refuse_cut(plan_sum *sum, const arch_linear *l, int shard, const qspec *use)
{
    const arch_shard *s = &l->shard[shard];
    const qaxis *w = &use->w;
    int64_t unit = 1, size = s->K, piece;
    arch_cut c;
    arch_cut_of(sum->part, l, shard, &c);
    if (l->kind == ARCH_KV_B || *sum->out->refused || !qaxis_quantized(w)) return;
    piece = c.by_cols ? c.cols.hi - c.cols.lo : c.rows[0].hi - c.rows[0].lo;
    if (c.by_cols) {
        unit = w->gran == Q_GROUP ? w->group : w->gran == Q_BLOCK ? w->block_k : 1;
    } else if (c.by_rows && w->gran == Q_BLOCK) {
        unit = w->block_n;
        size = piece * sum->part->n_ranks;
    }
    if (unit < 2 || unit >= (c.by_cols ? s->K : s->N) || piece % unit == 0) return;
    buf fit = {0};
    arch_ranks_that_fit(sum->arch, size, unit, &fit);
    snprintf(sum->out->refused, sizeof sum->out->refused,
             "%s: --tp %d would cut through scales of %lld %s; numbers of devices that do not: %s",
             s->module, sum->part->n_ranks, (long long)unit, c.by_cols ? "columns" : "rows",
             fit.data);
    buf_free(&fit);
}

/* Pieces of rows of a device are prepared each by itself, on a GPU all shards together. */
static uint64_t resident_part(plan_sum *sum, const arch_linear *l, int shard, const qspec *use,
                              num_dtype plain, int64_t *rows, int64_t *cols)
{
    const bool later = gpu_of(sum->in) && l->kind != ARCH_KV_B;
    arch_cut c;
    uint64_t bytes = 0;
    arch_cut_of(sum->part, l, shard, &c);
    *rows = 0;
    *cols = c.cols.hi - c.cols.lo;
    for (int i = 0; i < c.n; i++) {
        arch_shard s = l->shard[shard];
        s.N = c.rows[i].hi - c.rows[i].lo;
        s.K = *cols;
        if (!later) bytes += resident(sum->in, l, &s, use, plain);
        *rows += s.N;
    }
    return bytes;
}

/* Experts are counted at the first of their layer. */
static int on_gpu(plan_sum *sum, const arch_linear *l, const kern_forecast_shard *s, int64_t K,
                  err *e)
{
    const bool exact = l->kind == ARCH_ROUTER || l->kind == ARCH_SHARED_GATE;
    const bool expert = l->kind == ARCH_EXPERT_UP || l->kind == ARCH_EXPERT_DOWN;
    const char *layout = NULL;
    if (!gpu_of(sum->in) || l->kind == ARCH_KV_B || l->expert > 0) return 0;
    int rc = kern_forecast_linear(sum->in->dev, &sum->out->gpu, s, l->n_shards, K,
                                  exact ? KERN_ACT_F32 : sum->in->act,
                                  expert ? (int)sum->part->moe.E : 0, &layout, e);
    if (rc == 0 && l->kind == ARCH_LM_HEAD) sum->head_embeds = strcmp(layout, "packed") != 0;
    return rc;
}

static int count_linear(plan_sum *sum, const arch_linear *l, err *e)
{
    const plan_in *in = sum->in;
    plan_out *out = sum->out;
    bool quantize = in->scheme && qaxis_quantized(&in->scheme->w) && arch_quantizable(l->kind);
    kern_forecast_shard forecast[KERN_MAX_SHARDS];
    int64_t rows, cols = 0;
    for (int i = 0; i < l->n_shards; i++) {
        arch_shard s = l->shard[i];
        bool copy = l->kind == ARCH_LM_HEAD && sum->ends.shared; /* on disk once, prepared anew */
        if (l->kind == ARCH_LM_HEAD) snprintf(s.module, sizeof s.module, "%s", sum->ends.head);
        num_dtype t = plain_type(in, s.module);
        qspec use = {{.type = t}, {.type = NUM_BF16}, {.type = NUM_BF16}};
        bool stored = stored_spec(in, s.module, &use);
        if (quantize) {
            use = *in->scheme;
            refuse(&sum->refused, in->scheme, &s);
            for (int64_t x = 0; x < s.E; x++)
                stored_bytes(in->scheme, s.N, s.K, &out->weights);
        } else if (!copy) {
            count_stored(in, &s, stored, out);
        }
        refuse_cut(sum, l, i, &use);
        out->resident_weights += resident_part(sum, l, i, &use, t, &rows, &cols);
        forecast[i] = (kern_forecast_shard){.spec = use, .plain = t, .N = rows};
        count_bias(in, &s, rows, out);
    }
    return on_gpu(sum, l, forecast, cols, e);
}

int64_t plan_logit_rows(int64_t vocab, int64_t chunk_tokens, int64_t concurrency)
{
    int64_t rows = PLAN_LOGIT_BYTES / ((int64_t)sizeof(float) * vocab);
    if (rows > chunk_tokens) rows = chunk_tokens;
    return rows > concurrency ? rows : concurrency;
}

/* Steps that become graphs: a name for each batch size (model/bucket.c) and each doubling of the
 * context from 256 on; no more than 256. */
static int64_t names_of(const plan_in *in)
{
    int64_t sizes = 0, lengths = 1;
    for (int64_t n = 1; n <= 256; n += n < 2 ? 1 : n < 4 ? 2 : n < 8 ? 4 : n < 64 ? 8 : 32) {
        sizes++;
        if (n >= in->concurrency) break;
    }
    for (int64_t n = 256; n < in->context; n *= 2)
        lengths++;
    return sizes * lengths < 256 ? sizes * lengths : 256;
}

static void workspace(const plan_in *in, const arch_model *a, plan_out *out)
{
    arch_widths w;
    kern_dev *gpu = gpu_of(in);
    const int64_t T = in->chunk_tokens, logits = plan_logit_rows(a->vocab, T, in->concurrency);
    const size_t flow = kern_lane_bytes(in->dev, KERN_FLOW, in->act);
    arch_widths_of(a, &w);
    out->workspace = (uint64_t)(T * (w.row - w.flow) + w.fixed) * sizeof(float) +
                     (uint64_t)(T * w.flow) * flow + (uint64_t)(logits * a->vocab) * sizeof(float);
    if (!gpu) {
        out->workspace += kern_reserve_bytes(T * w.slots, w.in, w.out, in->threads);
        return;
    }
    out->workspace +=
        kern_forecast_room(gpu, &out->gpu, T * w.slots, w.in) +
        kern_forecast_top(logits, a->vocab) +
        kern_forecast_attention(gpu, T, a->H, (int)(a->mla.kv_lora ? a->mla.kv_lora : a->D));
    out->pinned = (uint64_t)logits * ((uint64_t)a->vocab * sizeof(float) + sizeof(kern_top));
    const int64_t graphs = names_of(in);
    out->graphs = (uint64_t)graphs * kern_forecast_graph((int64_t)a->n_layers * 12 + 8);
}

static void count_kv(const plan_in *in, const arch_model *a, plan_out *out)
{
    kv_layer_shape *shapes = xcalloc((size_t)a->n_layers, sizeof *shapes);
    kv_sizes all;
    arch_kv_shapes(a, shapes);
    kv_sizes_of(in->kv, shapes, a->n_layers, in->page_tokens, &all);
    mem_free(shapes);
    out->kv_token = all.token_bytes;
    out->kv_scales_token = all.scale_bytes;
    out->kv_states = all.state_bytes * (uint64_t)in->concurrency;
    out->kv_total = kv_bytes_for(&all, in->context, in->concurrency, in->chunk_tokens);
}

int plan_compute(const plan_in *in, plan_out *out, err *e)
{
    arch_model *a = NULL, *part = NULL;
    const ckpt *files = in->q ? in->q->c : NULL;
    arch_linear *all = NULL;
    int rc = 0;
    *out = (plan_out){0};
    TRY(arch_open(&a, in->cfg, files, e));
    TRY(arch_open(&part, in->cfg, files, e));
    TRY(arch_take_share(part, 0, in->ranks > 1 ? in->ranks : 1, e));
    plan_sum sum = {.in = in, .out = out, .arch = a, .part = part, .head_embeds = true};
    bool tie = in->cfg->tie_embeddings;
    sum.ends = (arch_ends){
        .embed = a->name.embed, .head = tie ? a->name.embed : a->name.head, .shared = tie};
    if (in->q) TRY(arch_find_ends(a, in->q, &sum.ends, e));
    int n = arch_linears(a, NULL, 0);
    all = xcalloc((size_t)n, sizeof *all);
    arch_linears(a, all, n);
    for (int i = 0; i < n; i++)
        TRY(count_linear(&sum, &all[i], e));
    for (int i = 0; i < KERN_FORECAST_LAYOUTS; i++)
        out->resident_weights += out->gpu.layout[i].bytes;
    arch_plain_tensors(a, count_plain, &sum);
    sum.loaded = true;
    arch_plain_tensors(part, count_plain, &sum);
    if (part->n_ranks > 1) out->resident_weights += sizeof(float) * (uint64_t)part->vocab;
    if (in->scheme) say_refused(&sum.refused, in->scheme, out);
    workspace(in, part, out);
    count_kv(in, part, out);
    out->total = out->resident_weights + out->workspace + out->kv_total;
    rc = 0;
out:
    mem_free(all);
    arch_close(a);
    arch_close(part);
    return rc;
}
