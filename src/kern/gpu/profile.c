/* Times of operators. While it is on, a step's operators are launched one by one with a clock of
 * the stream between each two, also where the step is known as a graph; a stall in front lets the
 * program run ahead, so that no operator waits for its launch. Times are summed by operator and
 * shape. A clock ends what would otherwise overlap: the sum is more than a step takes as a graph.
 *
 * Bytes are those that an operator must move at least: weights as they lie, inputs, outputs, the
 * part of the cache that it reads. 0 = not known here. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kern/gpu/gpu.h"

#define LAUNCH_SECONDS 12e-6 /* of one operator and its clock, by the program */

struct gpu_profile {
    void **event;
    int n_events;
    kern_op_time *lines;
    int n;
    bool pending; /* launched and not yet read */
    bool whole;   /* a step is one line, its operators follow one another as they do in a graph */
};

static const char *const op_names[GPU_N_OPS] = {
#define NAME(name, args) #name,
    GPU_OPS(NAME)
#undef NAME
};

/* ---- what an operator does ----------------------------------------------------------------------
 */

static double lane_bytes(gpu_x x)
{
    return x.p ? x.type == GPU_F32 ? 4 : 2 : 0;
}

static void matrix(kern_op_time *t, int64_t N, int64_t K, int64_t M, double weights, double other)
{
    snprintf(t->shape, sizeof t->shape, "%lld x %lld, M %lld", (long long)N, (long long)K,
             (long long)M);
    t->flops = 2.0 * (double)N * (double)K * (double)M;
    t->bytes = weights + other;
}

static void rows_of(kern_op_time *t, int64_t T, int64_t n, double bytes_a_lane)
{
    snprintf(t->shape, sizeof t->shape, "%lld x %lld", (long long)T, (long long)n);
    t->bytes = (double)T * (double)n * bytes_a_lane;
}

static void of_packed(kern_op_time *t, small_format f, int N, int K, int M, int y_bf16)
{
    matrix(t, N, K, M, (double)small_packed_bytes(f, N, K),
           (double)M * (2.0 * K + (y_bf16 ? 2 : 4) * (double)N));
}

/* Tokens in the cache of all sequences, and pairs of a query and a key that it sees. */
static void cached(const gpu_step *s, const gpu_attention *a, double *keys, double *pairs)
{
    *keys = *pairs = 0;
    for (int i = 0; i < s->n_inputs; i++) {
        const gpu_input *in = &s->inputs[i];
        if (in->kind != GPU_IN_SEQS || in->seqs.kv_len != a->seqs.kv_len) continue;
        const int32_t *n_rows = (const int32_t *)(const void *)in->stage + in->n,
                      *len = n_rows + in->n;
        for (int64_t q = 0; q < in->n; q++) {
            double rows = n_rows[q], seen = len[q] - (rows - 1) / 2, all = len[q];
            if (a->window && seen > a->window) seen = a->window;
            if (a->window && all > a->window + rows) all = a->window + rows;
            if (len[q] > 0) *keys += all;
            if (len[q] > 0) *pairs += rows * seen;
        }
    }
}

static void of_attention(const gpu_step *s, const gpu_attention *a, kern_op_time *t)
{
    double keys, pairs;
    const gpu_kv *kv = &a->kv;
    size_t one = kern_kv_page_bytes((kern_kv_type)kv->type, kv->Hk, kv->D, kv->v_in_k, 1);
    int v = kv->v_in_k ? kv->v_in_k : kv->D;
    cached(s, a, &keys, &pairs);
    snprintf(t->shape, sizeof t->shape, "%d rows, %d heads x %d, up to %d cached", a->seqs.T, a->H,
             kv->D, a->seqs.max_len);
    t->bytes = keys * (double)one + (double)a->seqs.T * a->H * (kv->D + v) * lane_bytes(a->q);
    t->flops = 2.0 * pairs * a->H * (kv->D + v);
}

static void describe(const gpu_step *s, const gpu_rec *r, kern_op_time *t)
{
    const void *args = s->args + r->at;
    snprintf(t->op, sizeof t->op, "%s", op_names[r->op]);
    switch (r->op) {
    case GPU_OP_product: {
        const gpu_product *a = args;
        matrix(t, a->w.N, a->w.K, a->M, (double)a->w.alpha_off + (double)a->w.panels * 64,
               (double)a->M * (4.0 * (double)a->w.Kp + lane_bytes(a->y) * (double)a->w.N));
        break;
    }
    case GPU_OP_experts: {
        const gpu_experts *a = args;
        matrix(t, a->N, a->K, a->slots, 0, 0);
        break;
    }
    case GPU_OP_small: {
        const small_call *a = args;
        of_packed(t, a->format, a->N, a->K, a->M, a->y_bf16);
        break;
    }
    case GPU_OP_wide: {
        const wide_call *a = args;
        of_packed(t, a->format, a->N, a->K, a->M, a->y_bf16);
        break;
    }
    case GPU_OP_small_experts:
    case GPU_OP_wide_experts: { /* weights of as many experts as may have slots */
        const experts_call *a = args;
        const double some = a->slots < a->E ? (double)a->slots : a->E;
        matrix(t, a->N, a->K, a->slots, some * (double)small_packed_bytes(a->format, a->N, a->K),
               (double)a->slots * (2.0 * a->K + (a->y_bf16 ? 2 : 4) * (double)a->N));
        break;
    }
    case GPU_OP_slim:
    case GPU_OP_rows: {
        const rows_call *a = args;
        double bytes = a->w->format == ROWS_BF16 ? 2 : 1;
        matrix(t, a->w->N, a->w->K, a->M, (double)a->w->N * a->w->K * bytes,
               (double)a->M * (2.0 * a->w->K + (a->y_bf16 ? 2 : 4) * (double)a->w->N));
        break;
    }
    case GPU_OP_lt: {
        const lt_call *a = &((const gpu_lt *)args)->call;
        double bytes = a->kind == LT_BF16 ? 2 : 1;
        matrix(t, a->N, a->K, a->M, (double)a->N * (double)a->K * bytes,
               (double)a->M * (bytes * (double)a->K + (a->y_bf16 ? 2 : 4) * (double)a->N));
        break;
    }
    case GPU_OP_attention:
        of_attention(s, args, t);
        break;
    case GPU_OP_rmsnorm:
    case GPU_OP_layernorm: {
        const gpu_norm *a = args;
        rows_of(t, a->T, a->K, lane_bytes(a->x) + lane_bytes(a->out));
        break;
    }
    case GPU_OP_add_rmsnorm: {
        const gpu_add_norm *a = args;
        rows_of(t, a->T, a->K, 2 * lane_bytes(a->x) + lane_bytes(a->y) + lane_bytes(a->out));
        break;
    }
    case GPU_OP_all_reduce: {
        const gpu_all_reduce *a = args;
        rows_of(t, 1, a->n, 2 * lane_bytes(a->x));
        break;
    }
    case GPU_OP_glu: {
        const gpu_glu *a = args;
        rows_of(t, a->T, a->F, (a->gated ? 2 : 1) * lane_bytes(a->x) + lane_bytes(a->out));
        break;
    }
    case GPU_OP_act_run: {
        const gpu_act_run *a = args;
        rows_of(t, a->M, a->plan.K, lane_bytes(a->x) + 4);
        break;
    }
    case GPU_OP_quant: {
        const gpu_quant *a = args;
        rows_of(t, a->T, a->K, lane_bytes(a->x) + (a->to.as_bf16 ? 2 : 1));
        break;
    }
    case GPU_OP_norm_quant: {
        const gpu_norm_quant *a = args;
        rows_of(t, a->T, a->K,
                (a->y.p ? 2 : 1) * lane_bytes(a->x) + lane_bytes(a->y) + lane_bytes(a->out) +
                    (a->to.as_bf16 ? 2 : 1));
        break;
    }
    case GPU_OP_glu_quant: {
        const gpu_glu_quant *a = args;
        rows_of(t, a->T, a->F, 2 * lane_bytes(a->x) + lane_bytes(a->out) + (a->to.as_bf16 ? 2 : 1));
        break;
    }
    case GPU_OP_widen: {
        const gpu_widen *a = args;
        rows_of(t, a->N, a->K, 3);
        break;
    }
    case GPU_OP_unpack: {
        const gpu_unpack *a = args;
        const double cells = (double)a->N * (double)a->K;
        rows_of(t, a->N, a->K, 2 + (double)small_packed_bytes(a->format, a->N, a->K) / cells);
        break;
    }
    default:
        break;
    }
}

static void add(struct gpu_profile *p, const kern_op_time *t)
{
    kern_op_time *at = NULL;
    for (int i = 0; i < p->n && !at; i++)
        if (!strcmp(p->lines[i].op, t->op) && !strcmp(p->lines[i].shape, t->shape))
            at = &p->lines[i];
    if (!at) {
        p->lines = xrealloc(p->lines, sizeof *p->lines * (size_t)(p->n + 1));
        at = &p->lines[p->n++];
        *at = *t;
        at->seconds = at->bytes = at->flops = 0;
        at->calls = 0;
    }
    at->calls++;
    at->seconds += t->seconds;
    at->bytes += t->bytes;
    at->flops += t->flops;
}

/* ---- launching ----------------------------------------------------------------------------------
 */

static int events(gpu_dev *g, int n, err *e)
{
    struct gpu_profile *p = g->profile;
    int rc = 0;
    if (n > p->n_events) p->event = xrealloc(p->event, sizeof *p->event * (size_t)n);
    for (; p->n_events < n; p->n_events++)
        TRY(gpu__check(g, "event", g->api->event_open(&p->event[p->n_events]), e));
out:
    return rc;
}

int gpu__profile_launch(gpu_dev *g, const gpu_step *s, err *e)
{
    struct gpu_profile *p = g->profile;
    int rc = 0;
    TRY(events(g, s->n_ops + 1, e));
    TRY(gpu__check(g, "stall", g->api->stall(1e-3 + s->n_ops * LAUNCH_SECONDS, g->stream), e));
    TRY(gpu__check(g, "event", g->api->event_record(p->event[0], g->stream), e));
    for (int i = 0; i < s->n_ops; i++) {
        const gpu_rec *r = &s->ops[i];
        TRY(gpu__check(g, op_names[r->op], g->api->launch[r->op](s->args + r->at, g->stream), e));
        if (!p->whole || i == s->n_ops - 1)
            TRY(gpu__check(g, "event", g->api->event_record(p->event[i + 1], g->stream), e));
    }
    p->pending = true;
out:
    return rc;
}

int gpu__profile_read(gpu_dev *g, const gpu_step *s, err *e)
{
    struct gpu_profile *p = g->profile;
    int rc = 0;
    if (p->pending && p->whole && s->n_ops) {
        kern_op_time t = {.op = "step", .calls = 1};
        TRY(gpu__check(g, "event",
                       g->api->event_seconds(p->event[0], p->event[s->n_ops], &t.seconds), e));
        add(p, &t);
    }
    for (int i = 0; p->pending && !p->whole && i < s->n_ops; i++) {
        kern_op_time t = {.calls = 1};
        TRY(gpu__check(g, "event", g->api->event_seconds(p->event[i], p->event[i + 1], &t.seconds),
                       e));
        describe(s, &s->ops[i], &t);
        add(p, &t);
    }
out:
    p->pending = false;
    return rc;
}

int gpu__profile(kern_dev *d, bool on, err *e)
{
    gpu_dev *g = gpu__of(d);
    struct gpu_profile *p = g->profile;
    int rc = gpu__check(g, "bind", g->api->bind(g->index), e);
    if (rc < 0) return rc;
    for (int i = 0; p && i < p->n_events; i++)
        g->api->event_close(p->event[i]);
    if (p) {
        free(p->event);
        free(p->lines);
        free(p);
    }
    g->profile = on ? xcalloc(1, sizeof *g->profile) : NULL;
    return 0;
}

int gpu__profile_whole(gpu_dev *g, err *e)
{
    int rc = gpu__profile(&g->pub, true, e);
    if (rc == 0) g->profile->whole = true;
    return rc;
}

int gpu__profile_lines(const kern_dev *d, const kern_op_time **out)
{
    const struct gpu_profile *p = gpu__of(d)->profile;
    *out = p ? p->lines : NULL;
    return p ? p->n : 0;
}
