/* Layout "dense": weights in row-major order as they lie in a checkpoint, bf16, e4m3 or int8, one
 * copy for every M. Up to 8 rows are multiplied by operator `slim`, some more by `rows` (in both
 * the weight streams once), many by cuBLASLt (operator `lt`); where that is not to be had, by
 * `rows`, 64 rows at a time.
 *
 * Neighbouring shards whose inputs are treated alike lie behind one another and are one product (a
 * *part*). The input of a part becomes
 *
 *   16 bits    bf16, as it comes
 *   quantized  codes and their scales (operator `quant`, the rules of kern/act.c): as bf16 numbers
 *              for `slim` and `rows`, as bytes for `lt`
 *
 * 8-bit weights whose input is not quantized are widened to bf16, piece after piece, for `lt`: the
 * one place where numbers are rounded that the CPU does not round. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kern/gpu/linear.h"
#include "kern/gpu/lt.h"

#define MOST_ROWS LT_MOST_ROWS /* of a product by lt; more are cut */
#define FEW_ROWS  32           /* up to which `rows` is the faster one */
#define BLOCK     128          /* rows and columns of a block scale; columns of an input's */
#define UNPACK    ((size_t)16 << 20)

typedef struct dense_act { /* what becomes of the input */
    bool quant;
    gpu_code code;
    int64_t group; /* 0 or BLOCK */
    float fixed;   /* > 0: the scale */
} dense_act;

typedef struct dense_part {
    rows_weight map;
    rows_plan plan[TUNED_ROWS]; /* zeros: the rule of `rows` */
    rows_format format;
    rows_scales scales;
    dense_act act;
    int64_t row0, N;
    void *w;
    float *scale;    /* [N], or [N/128][K/128] rounded up */
    float *lt_scale; /* the same, rows of blocks padded to 4 */
    float *bias;     /* [N] or NULL */
    void *bias_bf16; /* NULL where bf16 does not hold it */
} dense_part;

typedef struct dense {
    int n;
    dense_part part[KERN_MAX_SHARDS];
    bool embeds;
} dense;

struct gpu_dense {  /* of a device */
    uint8_t *codes; /* inputs as codes or as bf16 */
    size_t codes_bytes;
    float *scales;
    int64_t rows, k; /* most of them that there is room for */
};

static struct gpu_dense *room_of(gpu_dev *g)
{
    if (!g->dense) g->dense = xcalloc(1, sizeof *g->dense);
    return g->dense;
}

static int64_t up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}
static int64_t blocks(int64_t n)
{
    return (n + BLOCK - 1) / BLOCK;
}
static size_t element(rows_format f)
{
    return f == ROWS_BF16 ? 2 : 1;
}

/* ---- what is taken ------------------------------------------------------------------------------
 */

static rows_format format_of(const qtensor *q)
{
    return q->code == NUM_BF16      ? ROWS_BF16
           : q->code == NUM_F8_E4M3 ? ROWS_E4M3
           : q->code == NUM_I8      ? ROWS_INT8
                                    : ROWS_FORMATS;
}

static dense_act act_of(const kern_linear_desc *d, const qtensor *q)
{
    const qaxis *a = &q->spec.a;
    dense_act r = {0};
    if (d->act == KERN_ACT_BF16 || !qaxis_quantized(a)) return r;
    r.quant = true;
    r.code = a->type == NUM_I8 ? GPU_INT8 : GPU_E4M3;
    r.group = a->gran == Q_GROUP ? BLOCK : 0;
    r.fixed = a->gran == Q_TENSOR && q->input_scale > 0 ? q->input_scale : 0;
    return r;
}

static const char *refuse_act(const kern_linear_desc *d, const qtensor *q, bool block)
{
    const qaxis *a = &q->spec.a;
    if (!act_of(d, q).quant) return NULL;
    if (format_of(q) == ROWS_BF16) return "a bf16 weight with a quantized input";
    if (a->scale != QS_FLOAT) return "input scales are not floats";
    if (a->type != (format_of(q) == ROWS_INT8 ? NUM_I8 : NUM_F8_E4M3))
        return "input and weight are of different types";
    if (a->asym || q->input_zero != 0) return "an input with a zero point";
    if (a->gran != Q_TENSOR && a->gran != Q_TOKEN && a->gran != Q_GROUP)
        return "input scales of another kind";
    if (a->gran == Q_GROUP && (a->group != BLOCK || !a->dynamic))
        return "input groups other than 128 columns, or of given scales";
    if (a->gran == Q_GROUP && !block) return "input groups without block scales of the weight";
    return NULL;
}

static const char *refuse_shard(const kern_linear_desc *d, const qtensor *q)
{
    const qaxis *w = &q->spec.w;
    const rows_format f = format_of(q);
    const bool block = w->gran == Q_BLOCK;
    if (f == ROWS_FORMATS) return "made for bf16, e4m3 and int8";
    if (q->E > 1 || q->flat || q->g_idx || q->pre_scale || q->zeros || q->table)
        return "experts, zero points, tables, reordered or scaled columns";
    if (f != ROWS_BF16 &&
        (!q->scales || w->scale != QS_FLOAT || num_infos[q->scale_type].bits < 16))
        return "scales are not floats";
    if (f != ROWS_BF16 && w->gran != Q_TENSOR && w->gran != Q_CHANNEL && !block)
        return "made for scales of the tensor, of rows, of blocks";
    if (block && (f != ROWS_E4M3 || w->block_n != BLOCK || w->block_k != BLOCK))
        return "blocks other than e4m3 128x128";
    if (f == ROWS_BF16 && q->scales) return "a bf16 weight with scales";
    if (q->K * (int64_t)element(f) % 16) return "rows are not a multiple of 16 bytes";
    return refuse_act(d, q, block);
}

static const char *dense_refuse(const gpu_dev *g, const kern_linear_desc *d)
{
    if (!g->facts.emulated && g->facts.sm != 90) return "made for sm_90";
    if (d->expert) return "experts";
    if (d->act == KERN_ACT_SPEC || d->act == KERN_ACT_F32) return "activations are f32";
    if (d->act == KERN_ACT_INT8) return "inputs are made int8 in groups";
    for (int i = 0; i < d->n_shards; i++) {
        const char *why = refuse_shard(d, d->shard[i]);
        if (why) return why;
    }
    return NULL;
}

/* ---- parts --------------------------------------------------------------------------------------
 */

static bool same_act(const dense_act *a, const dense_act *b)
{
    return a->quant == b->quant && a->code == b->code && a->group == b->group &&
           a->fixed == b->fixed;
}

/* Shapes and types only; of[i] = part of shard i. */
static void cut(const kern_linear_desc *d, dense *o, int of[KERN_MAX_SHARDS])
{
    int64_t row0 = 0;
    o->n = 0;
    for (int i = 0; i < d->n_shards; i++) {
        const qtensor *q = d->shard[i];
        const dense_part one = {.format = format_of(q),
                                .scales = format_of(q) == ROWS_BF16   ? ROWS_UNSCALED
                                          : q->spec.w.gran == Q_BLOCK ? ROWS_BLOCK
                                                                      : ROWS_ROW,
                                .act = act_of(d, q),
                                .row0 = row0,
                                .N = q->N};
        dense_part *last = o->n ? &o->part[o->n - 1] : NULL;
        if (last && last->format == one.format && last->scales == one.scales &&
            same_act(&last->act, &one.act) && (one.scales != ROWS_BLOCK || last->N % BLOCK == 0))
            last->N += q->N;
        else
            o->part[o->n++] = one;
        of[i] = o->n - 1;
        row0 += q->N;
    }
}

/* ---- cuBLASLt -----------------------------------------------------------------------------------
 */

static bool widens(const dense_part *p)
{
    return p->format != ROWS_BF16 && !p->act.quant;
}

static bool widens_some(const dense *o)
{
    for (int i = 0; i < o->n; i++)
        if (widens(&o->part[i])) return true;
    return false;
}

static lt_call call_of(const dense_part *p, int64_t K)
{
    lt_call c = {.kind = widens(p)                 ? LT_BF16
                         : p->format == ROWS_BF16  ? LT_BF16
                         : p->format == ROWS_INT8  ? LT_INT8
                         : p->scales == ROWS_BLOCK ? LT_FP8_BLOCK
                                                   : LT_FP8_ROWS,
                 .N = p->N,
                 .K = K,
                 .ldx = K,
                 .ldy = p->N};
    return c;
}

static const char *plan_part(gpu_dev *g, const dense_part *p, int64_t K, bool bias)
{
    const lt_call c = call_of(p, K);
    if (c.kind == LT_FP8_BLOCK && p->act.group != BLOCK)
        return "block scales and an input with a scale a row";
    return widens(p) ? gpu__lt_plan_pieces(g, p->N, K, bias) : gpu__lt_plan(g, &c, bias);
}

/* ---- rows of the list ---------------------------------------------------------------------------
 */

static const char *slim_refuse(const gpu_dev *g, const kern_linear_desc *d, int bucket)
{
    dense o = {0};
    int of[KERN_MAX_SHARDS];
    const int64_t K = d->shard[0]->K;
    if (bucket > kern_bucket(SLIM_MAX_M)) return "more than 8 rows";
    if (!g->api->slim_choose || !g->api->launch[GPU_OP_slim]) return "not in the plug-in";
    cut(d, &o, of);
    for (int i = 0; i < o.n; i++) {
        const dense_part *p = &o.part[i];
        const slim_plan most =
            g->api->slim_choose(p->format, p->scales == ROWS_BLOCK ? SLIM_BLOCKS : 0, (int)p->N,
                                (int)K, bucket ? SLIM_MAX_M : 1);
        if (!most.split) return "K does not fit shared memory";
    }
    return NULL;
}

static const char *few_refuse(const gpu_dev *g, const kern_linear_desc *d, int bucket)
{
    (void)g, (void)d;
    return bucket == KERN_BUCKETS - 1 ? "M is above 64" : NULL;
}

static const char *lt_can(const gpu_dev *dev, const kern_linear_desc *d)
{
    gpu_dev *g = gpu__of(&dev->pub);
    dense o = {0};
    int of[KERN_MAX_SHARDS];
    const char *why = NULL;
    cut(d, &o, of);
    for (int i = 0; i < o.n && !why; i++)
        why = plan_part(g, &o.part[i], d->shard[0]->K, d->bias != NULL);
    return why;
}

static const char *lt_refuse(const gpu_dev *dev, const kern_linear_desc *d, int bucket)
{
    return bucket < kern_bucket(FEW_ROWS) ? "M is 8 or less" : lt_can(dev, d);
}

/* The bucket in which both have their part. Weights that would be widened first stay with `rows`.
 */
static const char *middle_refuse(const gpu_dev *dev, const kern_linear_desc *d, int bucket)
{
    dense o = {0};
    int of[KERN_MAX_SHARDS];
    if (bucket != kern_bucket(FEW_ROWS + 1)) return "not its M";
    cut(d, &o, of);
    for (int i = 0; i < o.n; i++)
        if (widens(&o.part[i])) return "weights are wider than their inputs";
    return lt_can(dev, d);
}

static const char *pieces_refuse(const gpu_dev *g, const kern_linear_desc *d, int bucket)
{
    (void)g, (void)d, (void)bucket;
    return NULL;
}

/* Weights that are widened, or multiplied by `rows` alone however many rows there are, are better
 * off packed. */
static bool dense_late(const gpu_dev *g, const kern_linear_desc *d)
{
    dense o = {0};
    int of[KERN_MAX_SHARDS];
    cut(d, &o, of);
    return widens_some(&o) || lt_can(g, d) != NULL;
}

/* ---- making -------------------------------------------------------------------------------------
 */

static int upload(gpu_dev *g, void *to, const void *from, size_t n, err *e)
{
    int rc = gpu__check(g, "upload", g->api->upload(to, from, n, g->stream), e);
    return rc < 0 ? rc : gpu__check(g, "upload", g->api->sync(g->stream), e);
}

/* `rows` reads a NaN code of e4m3 as a number. */
static bool has_nan(const qtensor *q)
{
    for (int64_t n = 0; q->code == NUM_F8_E4M3 && n < q->N; n++) {
        const uint8_t *c = q->codes + (size_t)n * q->row_bytes;
        unsigned found = 0;
        for (int64_t k = 0; k < q->K; k++)
            found |= (c[k] & 127) == 127;
        if (found) return true;
    }
    return false;
}

static int put_codes(gpu_dev *g, const qtensor *q, size_t row, char *to, err *e)
{
    if (q->row_bytes == row) return upload(g, to, q->codes, row * (size_t)q->N, e);
    char *host = xmalloc(row * (size_t)q->N);
    for (int64_t n = 0; n < q->N; n++)
        memcpy(host + (size_t)n * row, q->codes + (size_t)n * q->row_bytes, row);
    int rc = upload(g, to, host, row * (size_t)q->N, e);
    free(host);
    return rc;
}

/* Scales of a shard from its row of the part on; ld of blocks. */
static void put_scales(const dense_part *p, const qtensor *q, int64_t row, int64_t ld, float *out)
{
    if (p->scales == ROWS_ROW)
        for (int64_t n = 0; n < q->N; n++)
            out[row + n] = qtensor_scale(q, n, 0);
    else
        for (int64_t n = 0; n < q->N; n += BLOCK)
            for (int64_t k = 0; k < q->K; k += BLOCK)
                out[(row + n) / BLOCK * ld + k / BLOCK] = qtensor_scale(q, n, k);
}

static int make_scales(gpu_dev *g, dense_part *p, const kern_linear_desc *d, const int *of,
                       int part, gpu_linear *l, err *e)
{
    int rc = 0;
    void *mem[2] = {NULL, NULL};
    if (p->scales == ROWS_UNSCALED) return 0;
    const bool block = p->scales == ROWS_BLOCK;
    for (int form = 0; form < (block ? 2 : 1); form++) {
        const int64_t ld = form ? up(blocks(l->K), 4) : blocks(l->K);
        const size_t n = (size_t)(block ? blocks(p->N) * ld : p->N);
        float *host = xcalloc(n, sizeof *host);
        int64_t row = 0;
        for (int i = 0; i < d->n_shards; i++) {
            if (of[i] != part) continue;
            put_scales(p, d->shard[i], row, ld, host);
            row += d->shard[i]->N;
        }
        rc = gpu__keep(g, &mem[form], host, n * sizeof *host, e);
        free(host);
        if (rc < 0) return rc;
        l->bytes += n * sizeof *host;
    }
    p->scale = mem[0];
    p->lt_scale = block ? mem[1] : mem[0];
    return 0;
}

static int make_bias(gpu_dev *g, dense_part *p, const float *bias, err *e)
{
    void *mem = NULL;
    int rc = gpu__keep(g, &mem, bias, (size_t)p->N * sizeof *bias, e);
    p->bias = mem;
    return rc < 0 ? rc : gpu__lt_bias(g, bias, p->N, &p->bias_bf16, e);
}

static int make_part(gpu_dev *g, dense_part *p, const kern_linear_desc *d, const int *of, int part,
                     gpu_linear *l, err *e)
{
    int rc = 0;
    const size_t row = (size_t)l->K * element(p->format);
    room_of(g); /* tells gpu__dense_reserve that there are such linears */
    TRY(gpu__device_alloc(g, &p->w, row * (size_t)p->N + 64, e));
    char *at = p->w;
    for (int i = 0; i < d->n_shards; i++) {
        const qtensor *q = d->shard[i];
        if (of[i] != part) continue;
        if (has_nan(q)) {
            rc = err_set(e, ERR_UNSUPPORTED, "a code of shard %d is NaN", i);
            goto out;
        }
        TRY(put_codes(g, q, row, at, e));
        at += row * (size_t)q->N;
    }
    l->bytes += row * (size_t)p->N;
    TRY(gpu__check(g, "weight", g->api->rows_prepare(&p->map, p->format, p->w, l->K, p->N, l->K),
                   e));
    TRY(make_scales(g, p, d, of, part, l, e));
    tuned_plans_of_rows(&g->tuned, g->api, p->format, p->scales == ROWS_BLOCK, p->N, l->K, p->plan);
    if (d->bias) TRY(make_bias(g, p, d->bias + p->row0, e));
    if (widens(p)) gpu__lt_need_pieces(g, p->N, l->K);
out:
    return rc;
}

static int dense_make(gpu_dev *g, const kern_linear_desc *d, gpu_linear *l, err *e)
{
    int rc = 0, of[KERN_MAX_SHARDS];
    dense *o = xcalloc(1, sizeof *o);
    l->own = o;
    cut(d, o, of);
    for (int i = 0; i < o->n; i++)
        TRY(make_part(g, &o->part[i], d, of, i, l, e));
    o->embeds = d->n_shards == 1 && o->part[0].format == ROWS_BF16;
out:
    return rc;
}

static void dense_drop(gpu_dev *g, void *own)
{
    dense *o = own;
    for (int i = 0; i < o->n; i++)
        if (o->part[i].w) g->api->free(o->part[i].w);
    free(o);
}

static void dense_unpack(gpu_dev *g, const gpu_linear *l, float *out)
{
    const dense *o = l->own;
    const int64_t groups = blocks(l->K);
    g->api->bind(g->index);
    for (int i = 0; i < o->n; i++) {
        const dense_part *p = &o->part[i];
        const size_t row = (size_t)l->K * element(p->format);
        const int64_t some = row < UNPACK ? (int64_t)(UNPACK / row) : 1;
        const size_t n_scales = (size_t)(p->scales == ROWS_BLOCK ? blocks(p->N) * groups : p->N);
        char *host = xmalloc((size_t)some * row);
        float *scale = xmalloc(n_scales * sizeof *scale);
        if (p->scale) g->api->download(scale, p->scale, n_scales * sizeof *scale, g->stream);
        for (int64_t n = 0; n < p->N; n++) {
            float *to = out + (p->row0 + n) * l->K;
            const int64_t rows = p->N - n < some ? p->N - n : some;
            if (n % some == 0) {
                g->api->download(host, (char *)p->w + (size_t)n * row, (size_t)rows * row,
                                 g->stream);
                g->api->sync(g->stream);
            }
            num_decode_row(p->format == ROWS_BF16   ? NUM_BF16
                           : p->format == ROWS_E4M3 ? NUM_F8_E4M3
                                                    : NUM_I8,
                           host + (size_t)(n % some) * row, (size_t)l->K, to);
            for (int64_t k = 0; p->scale && k < l->K; k++)
                to[k] *= p->scales == ROWS_BLOCK ? scale[n / BLOCK * groups + k / BLOCK] : scale[n];
        }
        free(host);
        free(scale);
    }
}

static bool dense_can_embed(const gpu_linear *l)
{
    return ((const dense *)l->own)->embeds;
}

static void dense_embed(gpu_dev *g, const gpu_linear *l, const int32_t *ids, int64_t T, gpu_x out)
{
    const dense *o = l->own;
    gpu_copy a = {.from = {o->part[0].w, GPU_BF16},
                  .to = out,
                  .ids = gpu__ints(g, ids, T),
                  .ldf = l->K,
                  .ldt = l->K,
                  .n = l->K,
                  .rows = T};
    gpu__push(g, GPU_OP_copy, &a, sizeof a);
}

/* ---- running ------------------------------------------------------------------------------------
 */

typedef struct dense_in { /* the input of a part, for some rows */
    const void *x;
    int64_t ldx;
    const float *scale; /* NULL, of rows, or of rows and groups: */
    int64_t row, group; /* scale[m * row + g * group] */
} dense_in;

static bool is_aligned(const gpu_x *x, int64_t ld, int64_t lanes)
{
    const int64_t size = x->type == GPU_BF16 ? 2 : 4;
    return (uintptr_t)x->p % 16 == 0 && ld * size % 16 == 0 && ld % lanes == 0;
}

/* As bf16: where it lies if it does already, with rows of a multiple of `lanes`. */
static dense_in in_bf16(gpu_dev *g, const gpu_linear *l, gpu_x x, int64_t ldx, int64_t M,
                        int64_t lanes)
{
    dense_in r = {.x = x.p, .ldx = ldx};
    if (x.type == GPU_BF16 && is_aligned(&x, ldx, lanes)) return r;
    gpu_copy a = {.from = x,
                  .to = {g->dense->codes, GPU_BF16},
                  .ldf = ldx,
                  .ldt = l->K,
                  .n = l->K,
                  .rows = M};
    gpu__push(g, GPU_OP_copy, &a, sizeof a);
    r.x = g->dense->codes;
    r.ldx = l->K;
    return r;
}

/* As codes; scales of groups lie group after group where the product wants them so. */
static dense_in in_codes(gpu_dev *g, const gpu_linear *l, const dense_act *act, gpu_x x,
                         int64_t ldx, int64_t M, bool as_bf16)
{
    dense_in r = {.x = g->dense->codes, .ldx = l->K, .scale = g->dense->scales, .row = 1};
    if (act->group && as_bf16)
        r.row = blocks(l->K), r.group = 1;
    else if (act->group)
        r.group = up(M, 4);
    gpu_quant a = {.x = x,
                   .ld = ldx,
                   .T = M,
                   .K = l->K,
                   .to = {.code = act->code,
                          .as_bf16 = as_bf16,
                          .p = g->dense->codes,
                          .ld = l->K,
                          .group = act->group,
                          .fixed = act->fixed,
                          .scale = g->dense->scales,
                          .scale_row = r.row,
                          .scale_group = r.group}};
    gpu__push(g, GPU_OP_quant, &a, sizeof a);
    return r;
}

/* By operator rows, or slim. */
static void rows_part(gpu_dev *g, gpu_op op, const dense_part *p, const dense_in *in, int64_t M,
                      gpu_x y, int64_t ldy)
{
    rows_call c = {.w = &p->map,
                   .scales = p->scales,
                   .scale = p->scale,
                   .bias = p->bias,
                   .x = in->x,
                   .x_codes = p->act.quant,
                   .ldx = in->ldx,
                   .y = y.p,
                   .y_bf16 = y.type == GPU_BF16,
                   .ldy = ldy,
                   .M = (int)M,
                   .pdl = !g->facts.emulated,
                   .plan = g->trial.rows.groups ? g->trial.rows : p->plan[tuned_at(M)]};
    if (p->act.group) {
        c.x_scale = in->scale;
        c.ld_x_scale = in->row;
    } else
        c.row_scale = in->scale;
    gpu__push(g, op, &c, sizeof c);
}

static bool has_room(gpu_dev *g, const gpu_linear *l)
{
    const struct gpu_dense *r = g->dense;
    if (r->codes && r->k >= l->K && (!widens_some(l->own) || gpu__lt_piece(g))) return true;
    gpu__fail(g, "no room was reserved for inputs of %lld columns (kern_reserve)", (long long)l->K);
    return false;
}

/* At most 64 rows. */
static void run_rows(gpu_dev *g, gpu_op op, const gpu_linear *l, const float *x, int64_t ldx,
                     int64_t M, float *y, int64_t ldy)
{
    const dense *o = l->own;
    dense_in in = {0};
    for (int i = 0; i < o->n; i++) {
        const dense_part *p = &o->part[i];
        if (i == 0 || !same_act(&p->act, &o->part[i - 1].act))
            in = p->act.quant ? in_codes(g, l, &p->act, gpu__x(g, x), ldx, M, true)
                              : in_bf16(g, l, gpu__x(g, x), ldx, M, 8);
        const int64_t most = p->scales == ROWS_BLOCK ? ROWS_MAX_BLOCK_M : ROWS_MAX_M;
        for (int64_t m = 0; m < M; m += most) {
            dense_in some = in;
            some.x = (const uint16_t *)in.x + m * in.ldx;
            if (in.scale) some.scale = in.scale + m * in.row;
            rows_part(g, op, p, &some, M - m < most ? M - m : most,
                      gpu__x(g, y + m * ldy + p->row0), ldy);
        }
    }
}

static void dense_rows(gpu_dev *g, const gpu_linear *l, int bucket, const float *x, int64_t ldx,
                       int64_t M, float *y, int64_t ldy)
{
    (void)bucket;
    if (!has_room(g, l)) return;
    for (int64_t m = 0; m < M; m += ROWS_MAX_M)
        run_rows(g, GPU_OP_rows, l, x + m * ldx, ldx, M - m < ROWS_MAX_M ? M - m : ROWS_MAX_M,
                 y + m * ldy, ldy);
}

static void dense_slim(gpu_dev *g, const gpu_linear *l, int bucket, const float *x, int64_t ldx,
                       int64_t M, float *y, int64_t ldy)
{
    (void)bucket;
    if (has_room(g, l)) run_rows(g, GPU_OP_slim, l, x, ldx, M, y, ldy);
}

/* A weight that is not in bf16, some rows of it after the other. */
static void lt_widened(gpu_dev *g, const dense_part *p, int64_t K, lt_call c)
{
    const int64_t step = gpu__lt_piece_rows(g, p->N, K), size = c.y_bf16 ? 2 : 4;
    char *y = c.y;
    for (int64_t n = 0; n < p->N; n += step) {
        gpu_widen a = {.w = (const uint8_t *)p->w + n * K,
                       .format = p->format,
                       .scales = p->scales,
                       .scale = p->scale,
                       .row0 = n,
                       .N = p->N - n < step ? p->N - n : step,
                       .K = K,
                       .out = gpu__lt_piece(g)};
        gpu__push(g, GPU_OP_widen, &a, sizeof a);
        c.N = a.N;
        c.w = a.out;
        c.y = y + n * size;
        c.bias = p->bias ? p->bias + n : NULL;
        c.bias_bf16 = p->bias_bf16 ? (const uint16_t *)p->bias_bf16 + n : NULL;
        gpu__lt_push(g, &c);
    }
}

static void lt_part(gpu_dev *g, const gpu_linear *l, const dense_part *p, const dense_in *in,
                    int64_t M, gpu_x y, int64_t ldy)
{
    lt_call c = call_of(p, l->K);
    c.M = M;
    c.x = in->x;
    c.ldx = in->ldx;
    c.x_scale = in->scale;
    c.y = y.p;
    c.y_bf16 = y.type == GPU_BF16;
    c.ldy = ldy;
    c.bias = p->bias;
    c.bias_bf16 = p->bias_bf16;
    if (widens(p)) {
        lt_widened(g, p, l->K, c);
        return;
    }
    c.w = p->w;
    c.w_scale = p->lt_scale;
    gpu__lt_push(g, &c);
}

/* Whether the rows of every part of y are aligned. */
static bool y_aligned(gpu_dev *g, const dense *o, float *y, int64_t ldy)
{
    for (int i = 0; i < o->n; i++) {
        const gpu_x at = gpu__x(g, y + o->part[i].row0);
        if (!is_aligned(&at, ldy, 1)) return false;
    }
    return true;
}

static void run_lt(gpu_dev *g, const gpu_linear *l, const float *x, int64_t ldx, int64_t M,
                   float *y, int64_t ldy)
{
    const dense *o = l->own;
    dense_in in = {0};
    for (int i = 0; i < o->n; i++) {
        const dense_part *p = &o->part[i];
        if (i == 0 || !same_act(&p->act, &o->part[i - 1].act))
            in = p->act.quant ? in_codes(g, l, &p->act, gpu__x(g, x), ldx, M, false)
                              : in_bf16(g, l, gpu__x(g, x), ldx, M, 16);
        lt_part(g, l, p, &in, M, gpu__x(g, y + p->row0), ldy);
    }
}

/* Products of block scales write rows up to a multiple of 4, so what is over such is left to
 * `rows`. */
static void dense_lt(gpu_dev *g, const gpu_linear *l, int bucket, const float *x, int64_t ldx,
                     int64_t M, float *y, int64_t ldy)
{
    const dense *o = l->own;
    int64_t done = 0, whole = M;
    if (!has_room(g, l)) return;
    int64_t most = (int64_t)(g->dense->codes_bytes / ((size_t)l->K * 2)) / 4 * 4;
    if (most > g->dense->rows) most = g->dense->rows;
    for (int i = 0; i < o->n; i++)
        if (o->part[i].scales == ROWS_BLOCK && o->part[i].act.quant) whole = M / 4 * 4;
    if (!y_aligned(g, o, y, ldy)) whole = 0;
    for (; done < whole; done += most < whole - done ? most : whole - done)
        run_lt(g, l, x + done * ldx, ldx, most < whole - done ? most : whole - done, y + done * ldy,
               ldy);
    if (done < M) dense_rows(g, l, bucket, x + done * ldx, ldx, M - done, y + done * ldy, ldy);
}

static void dense_middle(gpu_dev *g, const gpu_linear *l, int bucket, const float *x, int64_t ldx,
                         int64_t M, float *y, int64_t ldy)
{
    (M > FEW_ROWS ? dense_lt : dense_rows)(g, l, bucket, x, ldx, M, y, ldy);
}

static bool dense_tuned(const gpu_linear *l, gpu_tuned_key *out)
{
    const dense *o = l->own;
    const char *format = tuned_format_of_rows(o->part[0].format, o->part[0].scales == ROWS_BLOCK);
    *out = (gpu_tuned_key){.row = TUNED_OP_dense, .plan = TUNED_OP_rows};
    snprintf(out->plan_format, sizeof out->plan_format, "%s", format);
    snprintf(out->row_format, sizeof out->row_format, "%s%s", format,
             o->part[0].act.quant ? "-a8" : "");
    return o->n == 1;
}

static void dense_choice(const gpu_linear *l, int bucket, kern_choice *out)
{
    const dense_part *p = &((const dense *)l->own)->part[0];
    const char *code = p->act.code == GPU_INT8 ? "int8" : "e4m3";
    if (!p->act.quant)
        snprintf(out->act, sizeof out->act, "bf16%s",
                 widens(p) && bucket == KERN_BUCKETS - 1 &&
                         strcmp(l->row[bucket]->name, "cuda-lt") == 0
                     ? ", weights widened to bf16"
                     : "");
    else
        snprintf(out->act, sizeof out->act, "%s %s", code,
                 p->act.fixed > 0 ? "static"
                 : p->act.group   ? "per 128 along K"
                                  : "per token");
}

static const gpu_linear_row row_slim = {"cuda-slim-rows", slim_refuse, dense_slim};
static const gpu_linear_row row_few = {"cuda-rows", few_refuse, dense_rows};
static const gpu_linear_row row_middle = {"cuda-rows-lt", middle_refuse, dense_middle};
static const gpu_linear_row row_lt = {"cuda-lt", lt_refuse, dense_lt};
static const gpu_linear_row row_pieces = {"cuda-rows-by-64", pieces_refuse, dense_rows};
static const gpu_linear_row *const dense_list[] = {&row_slim, &row_middle, &row_few,
                                                   &row_lt,   &row_pieces, NULL};
const gpu_layout gpu__layout_dense = {.name = "dense",
                                      .rows = dense_list,
                                      .refuse = dense_refuse,
                                      .late = dense_late,
                                      .make = dense_make,
                                      .drop = dense_drop,
                                      .unpack = dense_unpack,
                                      .can_embed = dense_can_embed,
                                      .embed = dense_embed,
                                      .tuned = dense_tuned,
                                      .choice = dense_choice};

/* ---- room ---------------------------------------------------------------------------------------
 */

int gpu__dense_reserve(gpu_dev *g, int64_t max_rows, int64_t max_k, err *e)
{
    struct gpu_dense *r = g->dense;
    int rc = 0;
    void *mem = NULL;
    if (!r) return 0; /* no such linear */
    const int64_t rows = max_rows < ROWS_MAX_M  ? ROWS_MAX_M
                         : max_rows < MOST_ROWS ? up(max_rows, 4)
                                                : MOST_ROWS,
                  k = up(max_k, BLOCK);
    if (rows > r->rows || k > r->k) {
        /* half of the rows as bf16: a longer step is cut */
        const size_t codes = (size_t)(k * (rows + 2 * ROWS_MAX_M)),
                     scales = (size_t)(rows * (k / BLOCK)) * sizeof(float);
        TRY(gpu__keep(g, &mem, NULL, codes, e));
        r->codes = mem;
        r->codes_bytes = codes;
        TRY(gpu__keep(g, &mem, NULL, scales, e));
        r->scales = mem;
        r->rows = rows;
        r->k = k;
        g->pub.scratch_bytes += codes + scales;
    }
out:
    return rc;
}

void gpu__dense_close(gpu_dev *g)
{
    free(g->dense);
    g->dense = NULL;
}
