/* A model on a device: opened from a checkpoint (load.c reads the weights), one step's activations
 * allocated, questions about it answered. */
#include "model/model_internal.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"

static int buffer(model *m, float **out, kern_lanes_kind kind, int64_t rows, int64_t cols, err *e)
{
    size_t n;
    if (!mem_mul((size_t)rows, (size_t)cols, &n) || !mem_mul(n, sizeof(float), &n))
        return err_set(e, ERR_LIMIT, "activations of %lld rows are too large", (long long)rows);
    int rc = kern_lanes(m->dev, out, rows * cols, kind, m->opts.act, e);
    if (rc == 0)
        m->bytes.workspace += n / sizeof(float) * kern_lane_bytes(m->dev, kind, m->opts.act);
    return rc;
}

static int route_buffers(model *m, int64_t T, err *e)
{
    const arch_moe *x = &m->arch->moe;
    float *p = NULL;
    int64_t k = x->top_k;
    int rc = 0;
    if (!x->E) return 0;
    TRY(buffer(m, &m->route_logits, KERN_STREAM, T, x->E, e));
    TRY(buffer(m, &m->route_weight, KERN_STREAM, T, k, e));
    /* expert, row and slot of each choice; the experts' first slots */
    TRY(buffer(m, &p, KERN_STREAM, 1, 3 * T * k + x->E + 1, e));
    m->route_expert = (int32_t *)(void *)p;
    m->route_row = m->route_expert + T * k;
    m->route_slot = m->route_row + T * k;
    m->route_first = m->route_slot + T * k;
out:
    return rc;
}

static int make_buffers(model *m, err *e)
{
    const arch_model *a = m->arch;
    arch_widths w;
    int64_t T = m->opts.max_rows, h = a->hidden;
    int rc = 0;
    arch_widths_of(a, &w);
    m->rot_half = a->rot / 2;
    m->rope_by_length = a->rope[0].kind == ROPE_DYNAMIC || a->rope[0].kind == ROPE_LONGROPE;
    m->inv = arena_alloc(m->mem, sizeof *m->inv * (size_t)(a->n_ropes * m->rot_half));
    TRY(buffer(m, &m->x, KERN_STREAM, T, h, e));
    TRY(buffer(m, &m->h, KERN_FLOW, T, h, e));
    TRY(buffer(m, &m->y, KERN_FLOW, T, h, e));
    if (a->moe.shared_inter) TRY(buffer(m, &m->y2, KERN_FLOW, T, h, e));
    TRY(buffer(m, &m->qkv, KERN_FLOW, T, w.mix, e));
    TRY(buffer(m, &m->attn, KERN_FLOW, T, w.attn, e));
    if (w.latent) TRY(buffer(m, &m->latent, KERN_FLOW, T, 2 * w.latent, e));
    if (a->delta.Hv) TRY(buffer(m, &m->gates, KERN_STREAM, T, 4 * a->delta.Hv, e));
    TRY(buffer(m, &m->gu, KERN_FLOW, T, w.gate_up, e));
    TRY(buffer(m, &m->act, KERN_FLOW, T, w.act, e));
    for (int i = 0; i < a->n_ropes; i++) {
        TRY(buffer(m, &m->cosv[i], KERN_STREAM, T, m->rot_half, e));
        TRY(buffer(m, &m->sinv[i], KERN_STREAM, T, m->rot_half, e));
    }
    TRY(buffer(m, &m->logit_x, KERN_STREAM, T, h, e));
    if (m->dev->be || a->rank)
        TRY(buffer(m, &m->logits, KERN_STREAM, m->opts.max_logit_rows, model_vocab(m), e));
    if (m->dev->be && !a->rank) {
        TRY(kern_reserve_top(m->dev, m->opts.max_logit_rows, model_vocab(m), e));
    }
    TRY(route_buffers(m, T, e));
    TRY(kern_reserve_attention(m->dev, T, a->H, (int)(a->mla.kv_lora ? a->mla.kv_lora : a->D), e));
    TRY(kern_reserve(m->dev, T * w.slots, w.in, w.out, e));
    m->bytes.workspace +=
        m->dev->be ? m->dev->scratch_bytes
                   : kern_reserve_bytes(T * w.slots, w.in, w.out, team_size(m->dev->team));
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

model *model__make(quant_ckpt *q, kern_dev *d, const model_opts *o)
{
    model *m = xcalloc(1, sizeof *m);
    m->cfg = ckpt_cfg(q->c);
    m->q = q;
    m->dev = d;
    m->opts = *o;
    m->mem = arena_make();
    if (m->opts.max_rows < 1) m->opts.max_rows = 512;
    if (m->opts.max_logit_rows < 1) m->opts.max_logit_rows = m->opts.max_rows;
    return m;
}

static void warn_of_files(const model *m)
{
    int64_t beside = arch_beside(m->whole, m->q->c), behind = arch_behind(m->whole, m->q->c);
    if (beside)
        log_warn("%s: text only: %lld vision tensors are not used", ckpt_path(m->q->c),
                 (long long)beside);
    if (behind)
        log_warn("%s: 'num_hidden_layers' is %d, but %lld tensors of further layers are stored; "
                 "they are not used",
                 m->cfg->where, m->whole->n_layers, (long long)behind);
}

int model__fill(model *m, err *e)
{
    int rc = 0, n = kern_n_ranks(m->dev);
    TRY(arch_open(&m->arch, m->cfg, m->q->c, e));
    m->whole = m->arch;
    if (n > 1) TRY(arch_open(&m->whole, m->cfg, m->q->c, e));
    TRY(arch_take_share(m->arch, m->dev->rank, n, e));
    if (!m->dev->rank) warn_of_files(m);
    TRY(resolve_online(m, e));
    m->n_layers = m->arch->n_layers;
    m->layers = arena_alloc(m->mem, sizeof *m->layers * (size_t)m->n_layers);
    m->kv_shapes = arena_alloc(m->mem, sizeof *m->kv_shapes * (size_t)m->n_layers);
    m->k_scales = arena_alloc(m->mem, sizeof *m->k_scales * (size_t)m->n_layers);
    m->v_scales = arena_alloc(m->mem, sizeof *m->v_scales * (size_t)m->n_layers);
    m->spec = (qspec){{.type = NUM_BF16}, {.type = NUM_BF16}, {.type = NUM_BF16}};
    arch_kv_shapes(m->arch, m->kv_shapes);
    TRY(model__load(m, e));
    m->spec.kv = m->q->kv;
    TRY(make_buffers(m, e));
out:
    return rc;
}

int model_open(model **out, quant_ckpt *q, kern_dev *d, const model_opts *o, err *e)
{
    model *m = model__make(q, d, o);
    int rc = kern_n_ranks(d) > 1 ? model__open_ranks(m, e) : model__fill(m, e);
    *out = rc < 0 ? NULL : m;
    if (rc < 0) model_close(m);
    return rc;
}

void model_close(model *m)
{
    if (!m) return;
    if (m->ranks) model__close_ranks(m);
    model__unload(m);
    float *bufs[] = {m->x,
                     m->h,
                     m->y,
                     m->y2,
                     m->qkv,
                     m->attn,
                     m->latent,
                     m->gates,
                     m->gu,
                     m->act,
                     m->cosv[0],
                     m->cosv[1],
                     m->sinv[0],
                     m->sinv[1],
                     m->logit_x,
                     m->logits,
                     m->route_logits,
                     m->route_weight,
                     (float *)(void *)m->route_expert};
    for (size_t i = 0; i < sizeof bufs / sizeof *bufs; i++)
        if (bufs[i]) kern_free(m->dev, bufs[i]);
    model__pad_free(&m->pad);
    free(m->tap_host);
    free(m->slots);
    if (m->whole != m->arch) arch_close(m->whole);
    arch_close(m->arch);
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
    return m->arch->vocab;
}
uint64_t model_kv_clipped(const model *m)
{
    return m->ranks ? model__clipped_ranks(m) : m->kv_clipped + kern_clipped(m->dev);
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
    if (m->ranks) model__tap_ranks(m, fn != NULL);
    m->tap = fn;
    m->tap_arg = arg;
    if (fn && m->dev->be && !m->tap_host)
        m->tap_host = xmalloc(sizeof(float) * (size_t)m->opts.max_rows * (size_t)m->arch->hidden);
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
