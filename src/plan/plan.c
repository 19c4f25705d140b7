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

static num_dtype plain_type(const plan_in *in, const char *module)
{
    char name[160];
    snprintf(name, sizeof name, "%s.weight", module);
    const ckpt_tensor *t = in->q ? ckpt_find(in->q->c, name) : NULL;
    if (t && !t->gguf && (t->dtype == NUM_F32 || t->dtype == NUM_F16)) return t->dtype;
    return NUM_BF16;
}

/* Spec by which a module is stored in the checkpoint, NULL when plain. */
static const qspec *stored_spec(const plan_in *in, const char *module)
{
    if (!in->q || !quant_has(in->q, module)) return NULL;
    const quant_group *g = quant_group_of(in->q, module);
    return g ? &g->spec : NULL;
}

static void plain_add(qbytes *b, uint64_t bytes)
{
    b->unquantized += bytes;
    b->total += bytes;
}

typedef struct plan_sum {
    const plan_in *in;
    plan_out *out;
    arch_ends ends;
    refusals refused;
} plan_sum;

static void count_plain(void *arg, const char *name, int64_t rows, int64_t cols)
{
    plan_sum *p = arg;
    char embed[160];
    if (!strcmp(name, "model.embed_tokens.weight")) {
        snprintf(embed, sizeof embed, "%s.weight", p->ends.embed);
        name = embed;
    }
    const ckpt_tensor *t = p->in->q ? ckpt_find(p->in->q->c, name) : NULL;
    uint64_t n = (uint64_t)(rows * cols), bytes = t ? t->bytes : 2 * n;
    /* Vectors become f32 in memory; the embedding stays in its file's type (gguf blocks become
     * bf16). */
    uint64_t resident = rows == 1 ? 4 * n : t && !t->gguf ? t->bytes : 2 * n;
    plain_add(&p->out->weights, bytes);
    p->out->resident_weights += resident;
}

static void count_stored(const plan_in *in, const arch_shard *s, plan_out *out)
{
    const qspec *spec = stored_spec(in, s->module);
    char name[160];
    snprintf(name, sizeof name, "%s.weight", s->module);
    const ckpt_tensor *t = in->q ? ckpt_find(in->q->c, name) : NULL;
    if (spec)
        stored_bytes(spec, s->N, s->K, &out->weights);
    else
        plain_add(&out->weights, t ? t->bytes : 2 * (uint64_t)(s->N * s->K));
}

static void count_bias(const plan_in *in, const arch_shard *s, plan_out *out)
{
    char name[160];
    snprintf(name, sizeof name, "%s.bias", s->module);
    const ckpt_tensor *t = in->q ? ckpt_find(in->q->c, name) : NULL;
    if (!t && !(s->bias && !in->q)) return;
    plain_add(&out->weights, t ? t->bytes : 2 * (uint64_t)s->N);
    out->resident_weights += 4 * (uint64_t)s->N;
}

static void count_linear(plan_sum *sum, const arch_linear *l)
{
    const plan_in *in = sum->in;
    plan_out *out = sum->out;
    static const qspec plain = {{.type = NUM_BF16}, {.type = NUM_BF16}, {.type = NUM_BF16}};
    bool quantize = in->scheme && qaxis_quantized(&in->scheme->w) && l->kind != ARCH_LM_HEAD;
    for (int i = 0; i < l->n_shards; i++) {
        arch_shard s = l->shard[i];
        bool copy = l->kind == ARCH_LM_HEAD && sum->ends.shared; /* on disk once, prepared anew */
        if (l->kind == ARCH_LM_HEAD) snprintf(s.module, sizeof s.module, "%s", sum->ends.head);
        const qspec *have = stored_spec(in, s.module), *use = quantize ? in->scheme
                                                              : have   ? have
                                                                       : &plain;
        num_dtype t = plain_type(in, s.module);
        qspec as_plain = plain;
        as_plain.w.type = t;
        if (quantize) refuse(&sum->refused, in->scheme, &s);
        if (quantize)
            stored_bytes(in->scheme, s.N, s.K, &out->weights);
        else if (!copy)
            count_stored(in, &s, out);
        out->resident_weights += kern_linear_predict_bytes(
            in->features, use == &plain ? &as_plain : use, t, in->act, s.N, s.K);
        count_bias(in, &s, out);
    }
}

int64_t plan_logit_rows(int64_t vocab, int64_t chunk_tokens, int64_t concurrency)
{
    int64_t rows = PLAN_LOGIT_BYTES / ((int64_t)sizeof(float) * vocab);
    if (rows > chunk_tokens) rows = chunk_tokens;
    return rows > concurrency ? rows : concurrency;
}

static uint64_t workspace(const plan_in *in)
{
    const ckpt_config *c = in->cfg;
    int64_t T = in->chunk_tokens, h = c->hidden_size, q = c->n_heads * c->head_dim,
            kv = c->n_kv_heads * c->head_dim, f = c->intermediate_size;
    int64_t rot = (int64_t)((double)c->head_dim * c->rope.partial_rotary_factor) / 2;
    uint64_t lanes = (uint64_t)(4 * h + 2 * q + 2 * kv + 3 * f + 2 * rot);
    int64_t max_k = h > q ? h : q, max_n = q + 2 * kv > 2 * f ? q + 2 * kv : 2 * f;
    if (f > max_k) max_k = f;
    if (c->vocab_size > max_n) max_n = c->vocab_size;
    return (uint64_t)T * lanes * sizeof(float) + kern_reserve_bytes(T, max_k, max_n, in->threads) +
           (uint64_t)plan_logit_rows(c->vocab_size, T, in->concurrency) * (uint64_t)c->vocab_size *
               sizeof(float);
}

static void count_kv(const plan_in *in, plan_out *out)
{
    const ckpt_config *c = in->cfg;
    kv_layer_shape shape = {.Hk = (int)c->n_kv_heads, .D = (int)c->head_dim};
    kv_sizes one;
    kv_sizes_of(in->kv, &shape, 1, in->page_tokens, &one);
    uint64_t L = (uint64_t)c->n_layers, pt = (uint64_t)in->page_tokens;
    out->kv_token = L * one.token_bytes;
    out->kv_scales_token = L * one.scale_bytes;
    out->kv_total =
        L * one.page_bytes * (((uint64_t)in->context + pt - 1) / pt) * (uint64_t)in->concurrency;
}

int plan_compute(const plan_in *in, plan_out *out, err *e)
{
    const arch_row *arch;
    *out = (plan_out){0};
    int rc = arch_find(in->cfg, &arch, e);
    if (rc < 0) return rc;
    plan_sum sum = {.in = in, .out = out};
    sum.ends = (arch_ends){.embed = "model.embed_tokens",
                           .head = in->cfg->tie_embeddings ? "model.embed_tokens" : "lm_head",
                           .shared = in->cfg->tie_embeddings};
    if (in->q && (rc = arch_find_ends(in->q, &sum.ends, e)) < 0) return rc;
    int n = arch_linears(in->cfg, NULL, 0);
    arch_linear *all = xcalloc((size_t)n, sizeof *all);
    arch_linears(in->cfg, all, n);
    for (int i = 0; i < n; i++)
        count_linear(&sum, &all[i]);
    arch_plain_tensors(in->cfg, count_plain, &sum);
    mem_free(all);
    if (in->scheme) say_refused(&sum.refused, in->scheme, out);
    out->workspace = workspace(in);
    count_kv(in, out);
    out->total = out->resident_weights + out->workspace + out->kv_total;
    return 0;
}

int64_t plan_kv_pages(uint64_t budget, uint64_t fixed, uint64_t page_bytes, int64_t want_pages)
{
    if (fixed >= budget || !page_bytes) return 0;
    uint64_t fit = (budget - fixed) / page_bytes;
    return fit < (uint64_t)want_pages ? (int64_t)fit : want_pages;
}
