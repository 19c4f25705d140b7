/* Linears of the layout "packed" of a GPU through the public functions: every format, batch sizes,
 * shards and strides against sums in float64 of the checkpoint's numbers, what is packed read back
 * to the bit, and weights that it must leave to another layout. The device is the first argument
 * ("cuda:0"), without one the emulation. */
#include "../diff/linear_fixture.h"
#include "gpu_tested.h"
#include "kern/gpu/linear.h"
#include "kern/gpu/packed.h"
#include "kern/linear.h"

#define REL_F32  8e-6   /* of the magnitudes: 134 roundings of f32 in a row */
#define REL_BF16 0x1p-8 /* where wide multiplies by weights rounded to bf16 */
#define POISON   12288.0f
#define WIDTH    1024 /* lanes come in multiples of this */

enum { MOST_M = 600, LONG_M = 2050, MOST_K = 1024, MOST_N = 256 };

static const char *device = "emulated";
static kern_dev *dev;
static float *numbers, *poison;             /* on the device */
static float x_host[LONG_M * (MOST_K + 8)]; /* numbers here; row stride MOST_K + 8 */

static float outlier(void)
{
    return (float)(normal() * (uniform() < 0.01 ? 20 : 1));
}

static float bf16(float v)
{
    return num_bf16_to_f32(num_f32_to_bf16(v));
}

static void open_device(int64_t rows)
{
    err e = {0};
    kern_opts o = {.device = device, .threads = 2, .cpu_features = 0};
    CHECK_OK(kern_open(&dev, &o, &e));
    gpu__of(dev)->only = &gpu__layout_packed;
    CHECK_OK(kern_reserve(dev, rows, MOST_K, MOST_N, &e));
    float *p = xmalloc(sizeof *p * WIDTH);
    for (int i = 0; i < WIDTH; i++)
        p[i] = POISON;
    poison = p;
    numbers = x_host;
    CHECK_OK(kern_constant(dev, &poison, WIDTH, &e));
    CHECK_OK(kern_constant(dev, &numbers, LONG_M * (MOST_K + 8), &e));
    free(p);
}

/* ---- weights ------------------------------------------------------------------------------------
 */

typedef struct weights { /* shards and what they add up to */
    qtensor q[KERN_MAX_SHARDS];
    int n;
    int64_t N, K;
    float *value, *bias; /* [N,K] as a checkpoint's reader has them; [N] or NULL */
    float *term;         /* [N,K] the largest number that the kernel adds up for it */
} weights;

static void add_shard(weights *w, const scheme *s, int64_t N, int64_t K)
{
    random_weight(&w->q[w->n++], s, N, K);
    w->N += N;
    w->K = K;
}
static void know_values(weights *w, bool bias)
{
    int64_t row = 0;
    const bool fast = strcmp(device, "emulated");
    free(w->value);
    free(w->term);
    w->value = xmalloc(sizeof(float) * (size_t)(w->N * w->K));
    w->term = xmalloc(sizeof(float) * (size_t)(w->N * w->K));
    for (int i = 0; i < w->n; i++)
        for (int64_t n = 0; n < w->q[i].N; n++, row++) {
            const qtensor *q = &w->q[i];
            float *v = w->value + row * w->K, *t = w->term + row * w->K;
            qtensor_decode_row(q, n, v);
            for (int64_t k = 0; k < w->K; k++) { /* int4 comes with 128 on a GPU */
                t[k] = fabsf(v[k]);
                if (fast && q->code >= NUM_I2 && q->code <= NUM_I4)
                    t[k] += 144 * fabsf(qtensor_scale(q, n, k));
            }
        }
    if (bias) {
        w->bias = xmalloc(sizeof(float) * (size_t)w->N);
        for (int64_t n = 0; n < w->N; n++)
            w->bias[n] = w->n % 2 ? bf16(outlier()) : outlier();
    }
}
static void drop_weights(weights *w)
{
    for (int i = 0; i < w->n; i++)
        free_weight(&w->q[i]);
    free(w->value);
    free(w->term);
    free(w->bias);
    *w = (weights){0};
}

static kern_linear *make(const weights *w, kern_act act, bool expert)
{
    err e = {0};
    kern_linear *l = NULL;
    kern_linear_desc d = {
        .name = "tested", .n_shards = w->n, .bias = w->bias, .act = act, .expert = expert};
    for (int i = 0; i < w->n; i++)
        d.shard[i] = &w->q[i];
    CHECK_OK(kern_linear_make(dev, &d, &l, &e));
    return l;
}

static void check_unpack(const char *what, const kern_linear *l, const weights *w)
{
    float *got = xmalloc(sizeof *got * (size_t)(w->N * w->K));
    kern_linear_unpack(l, got);
    for (int64_t i = 0; i < w->N * w->K; i++)
        if (got[i] != w->value[i])
            fail_msg("%s: unpacked [%lld,%lld] is %.9g, expected %.9g", what, (long long)(i / w->K),
                     (long long)(i % w->K), (double)got[i], (double)w->value[i]);
    free(got);
}

/* ---- products -----------------------------------------------------------------------------------
 */

typedef struct shape {
    int64_t M, ldx, ldy;
    kern_lanes_kind x, y;
} shape;

static float *lanes(int64_t n, kern_lanes_kind kind)
{
    err e = {0};
    float *p = NULL;
    CHECK_OK(kern_lanes(dev, &p, (n + WIDTH - 1) / WIDTH * WIDTH, kind, KERN_ACT_AUTO, &e));
    return p;
}

/* y with a row of poison before it, in host memory: [M+2, ldy]. */
static float *multiply(const kern_linear *l, const shape *s, int64_t K)
{
    err e = {0};
    const int64_t all = (s->M + 2) * s->ldy, lines = (all + WIDTH - 1) / WIDTH;
    float *x = lanes((s->M + 1) * s->ldx, s->x), *y = lanes(all, s->y);
    float *seen = lanes(all, KERN_STREAM), *host = xmalloc(sizeof *host * (size_t)all);
    assert_true(kern_step_begin(dev, s->M, 0));
    kern_copy_rows(dev, poison, 0, y, WIDTH, WIDTH, lines);
    kern_copy_rows(dev, numbers, MOST_K + 8, x, s->ldx, K, s->M);
    kern_linear_run(dev, l, x, s->ldx, s->M, y + s->ldy, s->ldy);
    kern_copy_rows(dev, y, WIDTH, seen, WIDTH, WIDTH, lines);
    kern_fetch(dev, seen, all, host);
    CHECK_OK(kern_step_end(dev, &e));
    kern_free(dev, x);
    kern_free(dev, y);
    kern_free(dev, seen);
    return host;
}

static bool agrees(kern_lanes_kind kind, float got, double want, double tol)
{
    if (isnan(want) || isnan(got)) return isnan(want) && isnan(got);
    if (kind == KERN_STREAM) return fabs((double)got - want) <= tol;
    return got >= bf16((float)(want - tol)) && got <= bf16((float)(want + tol));
}

/* Row m as it is multiplied. */
static void input_row(const qtensor *q, const shape *s, int64_t m, float *x)
{
    kern__act_plan p = {.a = q->spec.a,
                        .K = q->K,
                        .Kp = q->K,
                        .in_scale = q->spec.a.gran == Q_TENSOR ? q->input_scale : 0,
                        .in_global = q->input_global};
    for (int64_t k = 0; k < q->K; k++) {
        x[k] = x_host[m * (MOST_K + 8) + k];
        if (s->x == KERN_FLOW) x[k] = bf16(x[k]);
        if (q->pre_scale) x[k] *= q->pre_scale[k];
        if (!qaxis_quantized(&p.a)) x[k] = bf16(x[k]);
    }
    kern__act_emulate(&p, x, q->K);
}

static void check_product(const char *what, const kern_linear *l, const weights *w, const shape *s)
{
    const int64_t before = gpu__of(dev)->launched[GPU_OP_unpack];
    static float x[MOST_K];
    float *got = multiply(l, s, w->K);
    /* Weights that were unpacked are rounded here too; what wide rounds differs by format. */
    const bool unpacked = gpu__of(dev)->launched[GPU_OP_unpack] > before;
    const bool rounded = strcmp(device, "emulated") && s->M > 8 && !unpacked;
    const double rel = rounded ? REL_BF16 : REL_F32;
    for (int64_t i = 0; i < (s->M + 2) * s->ldy; i++) {
        const int64_t m = i / s->ldy - 1, n = i % s->ldy;
        if (m < 0 || m >= s->M || n >= w->N) {
            if (got[i] != POISON)
                fail_msg("%s: [%lld,%lld] was written to", what, (long long)m, (long long)n);
            continue;
        }
        if (n == 0) input_row(&w->q[0], s, m, x);
        double want = w->bias ? (double)w->bias[n] : 0, mag = fabs(want);
        for (int64_t k = 0; k < w->K; k++) {
            const float v = w->value[n * w->K + k];
            const double t = (double)x[k] * (double)(unpacked ? bf16(v) : v);
            want += t;
            mag += fabs((double)x[k] * (double)w->term[n * w->K + k]);
        }
        if (!agrees(s->y, got[i], want, rel * mag))
            fail_msg("%s, M %lld, ldx %lld, ldy %lld: [%lld,%lld] is %.9g, expected %.9g, off %.3g "
                     "of the magnitude",
                     what, (long long)s->M, (long long)s->ldx, (long long)s->ldy, (long long)m,
                     (long long)n, (double)got[i], want, fabs((double)got[i] - want) / mag);
    }
    free(got);
}

/* Batches, strides that the kernels take and such that they do not, both types of lane. */
static void check_products(const char *what, const kern_linear *l, const weights *w)
{
    const int64_t K = w->K, N = w->N;
    const shape shapes[] = {
        {1, K, N, KERN_FLOW, KERN_FLOW},           {1, K + 3, N + 5, KERN_FLOW, KERN_STREAM},
        {2, K + 8, N + 8, KERN_FLOW, KERN_FLOW},   {7, K, N + 1, KERN_FLOW, KERN_STREAM},
        {8, K + 5, N, KERN_FLOW, KERN_FLOW},       {8, K, N, KERN_STREAM, KERN_STREAM},
        {9, K, N, KERN_FLOW, KERN_FLOW},           {16, K + 8, N + 4, KERN_FLOW, KERN_STREAM},
        {16, K, N + 3, KERN_FLOW, KERN_STREAM},    {33, K + 1, N + 8, KERN_FLOW, KERN_FLOW},
        {64, K, N, KERN_STREAM, KERN_STREAM},      {65, K + 8, N, KERN_FLOW, KERN_STREAM},
        {66, K + 16, N + 8, KERN_FLOW, KERN_FLOW},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check_product(what, l, w, &shapes[i]);
}

static void check_choice(const char *what, const kern_linear *l, const char *layout,
                         const char *act)
{
    static const char *const rows[] = {"cuda-small", "cuda-small", "cuda-wide",
                                       "cuda-wide-unpack-lt"};
    for (int b = 0; b < KERN_BUCKETS; b++) {
        const kern_choice *c = kern_linear_choice(l, b);
        if (strcmp(c->layout, layout) || strcmp(c->row, rows[b]))
            fail_msg("%s, bucket %d: %s from '%s', expected %s from '%s'; refused: %s", what, b,
                     c->row, c->layout, rows[b], layout, c->refused);
        assert_string_equal(c->act, act);
        assert_false(c->reference);
    }
}

/* ---- formats ------------------------------------------------------------------------------------
 */

typedef struct held {
    scheme s;
    const char *layout;
} held;
static const held formats[] = {
    {{"w:bf16 a:bf16", NUM_NONE}, "packed bf16"},
    {{"w:int4,g128 a:bf16", NUM_BF16}, "packed int4 g128"},
    {{"w:int4,g128 a:bf16", NUM_F16}, "packed int4 g128"},
    {{"w:int4,g256 a:bf16", NUM_F16}, "packed int4 g128"},
    {{"w:int4,channel a:bf16", NUM_F32}, "packed int4 g128"},
    {{"w:int4,g128,asym a:bf16", NUM_BF16}, "packed int4 g128 with zeros"},
    {{"w:int4,channel,asym a:bf16", NUM_F32}, "packed int4 g128 with zeros"},
    {{"w:int4,g64 a:bf16", NUM_F16}, "packed int4 g64"},
    {{"w:int4,g192 a:bf16", NUM_F16}, "packed int4 g64"},
    {{"w:int4,g64,asym a:bf16", NUM_F16}, "packed int4 g64 with zeros"},
    {{"w:int4,g32 a:bf16", NUM_BF16}, "packed int4 g32"},
    {{"w:int4,g32,asym a:bf16", NUM_F16}, "packed int4 g32 with zeros"},
    {{"w:int3,g128 a:bf16", NUM_BF16}, "packed int4 g128"},
    {{"w:int2,g64,asym a:bf16", NUM_BF16}, "packed int4 g64 with zeros"},
    {{"w:int8,channel a:bf16", NUM_F32}, "packed int8"},
    {{"w:int8,g128 a:bf16", NUM_F16}, "packed int8 g128"},
    {{"w:int5,g128 a:bf16", NUM_BF16}, "packed int8 g128"},
    {{"w:fp8_e4m3,channel a:bf16", NUM_F32}, "packed fp8"},
    {{"w:fp8_e4m3,tensor a:bf16", NUM_F32}, "packed fp8"},
    {{"w:fp8_e4m3,block128x128 a:bf16", NUM_F32}, "packed fp8 in blocks"},
    {{"w:nvfp4,g16 a:bf16", NUM_F8_E4M3}, "packed nvfp4"},
    {{"w:mxfp4,g32 a:bf16", NUM_F8_E8M0}, "packed mxfp4"},
};

static void test_formats(void **state)
{
    (void)state;
    static const int64_t sizes[][2] = {{16, 256}, {48, 384}, {144, 768}};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++) {
            weights w = {0};
            add_shard(&w, &formats[i].s, sizes[j][0], sizes[j][1]);
            know_values(&w, j != 1);
            kern_linear *l = make(&w, j == 2 ? KERN_ACT_BF16 : KERN_ACT_AUTO, false);
            check_choice(formats[i].s.text, l, formats[i].layout, "bf16");
            check_unpack(formats[i].s.text, l, &w);
            check_products(formats[i].s.text, l, &w);
            kern_linear_drop(dev, l);
            drop_weights(&w);
        }
}

/* What operator unpack makes is what the host unpacks, rounded to bf16 once, and nothing else is
 * written. */
static void check_unpack_op(const char *what, const kern_linear *l, const weights *w)
{
    gpu_dev *g = gpu__of(dev);
    const struct gpu_linear *own = l->own;
    const part *p = &((const packed *)own->own)->part[0];
    const size_t n = (size_t)(w->N * w->K), guard = 64;
    uint16_t *host = xmalloc((n + 2 * guard) * sizeof *host);
    void *out = NULL;
    err e = {0};
    memset(host, 0xff, (n + 2 * guard) * sizeof *host);
    CHECK_OK(gpu__keep(g, &out, host, (n + 2 * guard) * sizeof *host, &e));
    gpu_unpack a = {.format = p->format,
                    .w = p->w,
                    .col_scale = p->col,
                    .N = w->N,
                    .K = w->K,
                    .out = (uint16_t *)out + guard};
    CHECK_OK(gpu__check(g, "unpack", g->api->launch[GPU_OP_unpack](&a, g->stream), &e));
    CHECK_OK(gpu__check(g, "sync", g->api->sync(g->stream), &e));
    g->api->download(host, out, (n + 2 * guard) * sizeof *host, g->stream);
    CHECK_OK(gpu__check(g, "download", g->api->sync(g->stream), &e));
    for (size_t i = 0; i < n + 2 * guard; i++) {
        const bool inside = i >= guard && i < n + guard;
        const uint16_t want = inside ? num_f32_to_bf16(w->value[i - guard]) : 0xffff;
        if (host[i] == want) continue;
        fail_msg("%s: number %lld is %#x, expected %#x", what, (long long)i - (long long)guard,
                 host[i], want);
    }
    a.out = (uint16_t *)out + 1;
    assert_non_null(strstr(g->api->launch[GPU_OP_unpack](&a, g->stream), "aligned"));
    a.N = 24;
    assert_non_null(strstr(g->api->launch[GPU_OP_unpack](&a, g->stream), "multiple of 16"));
    free(host);
}

static void test_unpack_op(void **state)
{
    (void)state;
    static const int64_t sizes[][2] = {{16, 128}, {48, 384}, {112, 640}};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++) {
            if (strstr(formats[i].s.text, "g192") && j == 0) continue;
            weights w = {0};
            add_shard(&w, &formats[i].s, sizes[j][0], sizes[j][1]);
            know_values(&w, false);
            kern_linear *l = make(&w, KERN_ACT_AUTO, false);
            check_unpack_op(formats[i].s.text, l, &w);
            kern_linear_drop(dev, l);
            drop_weights(&w);
        }
}

/* Rows enough for cuBLASLt on every device; shards, a bias, y in a wider matrix. */
static void test_long(void **state)
{
    (void)state;
    const size_t some[] = {0, 1, 3, 9, 15, 19, 20, 21};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
        weights w = {0};
        add_shard(&w, &formats[some[i]].s, 32, 256);
        add_shard(&w, &formats[some[(i + 1) % 2]].s, 16, 256);
        know_values(&w, i % 2);
        kern_linear *l = make(&w, KERN_ACT_AUTO, false);
        const shape s = {LONG_M, 256 + 16 * (int)(i % 2), 48 + 8 * (int)(i % 3), KERN_FLOW,
                         i % 2 ? KERN_STREAM : KERN_FLOW};
        const int64_t before = gpu__of(dev)->launched[GPU_OP_unpack];
        check_product(formats[some[i]].s.text, l, &w, &s);
        if (!strcmp(device, "emulated") || strstr(kern_linear_choice(l, 3)->row, "lt"))
            assert_true(gpu__of(dev)->launched[GPU_OP_unpack] > before);
        kern_linear_drop(dev, l);
        drop_weights(&w);
    }
}

/* Many rows, more than are rearranged at once. */
static void test_many(void **state)
{
    (void)state;
    weights w = {0};
    add_shard(&w, &formats[1].s, 32, 256);
    know_values(&w, true);
    kern_linear *l = make(&w, KERN_ACT_AUTO, false);
    const shape straight = {MOST_M, 256, 32, KERN_FLOW, KERN_FLOW};
    const shape copied = {MOST_M, 259, 32, KERN_FLOW, KERN_STREAM};
    check_product("many", l, &w, &straight);
    check_product("many", l, &w, &copied);
    kern_linear_drop(dev, l);
    drop_weights(&w);
}

/* Fewer rows were reserved than the product has: it goes in pieces. */
static void test_pieces(void **state)
{
    (void)state;
    kern_dev *other = dev;
    float *n = numbers, *p = poison;
    weights w = {0};
    open_device(40);
    add_shard(&w, &formats[11].s, 32, 256);
    know_values(&w, true);
    kern_linear *l = make(&w, KERN_ACT_AUTO, false);
    check_products("pieces", l, &w);
    kern_linear_drop(dev, l);
    drop_weights(&w);
    kern_close(dev);
    dev = other;
    numbers = n;
    poison = p;
}

/* ---- shards -------------------------------------------------------------------------------------
 */

static void test_shards(void **state)
{
    (void)state;
    static const int64_t rows[] = {64, 16, 32};
    const scheme int4 = {"w:int4,g128 a:bf16", NUM_BF16},
                 fp8 = {"w:fp8_e4m3,channel a:bf16", NUM_F32};
    const scheme nv = {"w:nvfp4,g16 a:bf16", NUM_F8_E4M3};
    const scheme *sets[][3] = {{&int4, &int4, &int4}, {&int4, &fp8, &int4}, {&nv, &nv, &nv}};
    for (int i = 0; i < 3; i++) {
        weights w = {0};
        for (int j = 0; j < 3; j++)
            add_shard(&w, sets[i][j], rows[j], 384);
        for (int j = 0; i == 2 && j < 3; j++)
            w.q[j].global[0] = 0.1f * (float)(j + 1);
        know_values(&w, true);
        kern_linear *l = make(&w, KERN_ACT_AUTO, false);
        check_choice("shards", l, i == 2 ? "packed nvfp4" : "packed int4 g128", "bf16");
        check_unpack("shards", l, &w);
        check_products("shards", l, &w);
        kern_linear_drop(dev, l);
        drop_weights(&w);
    }
}

/* Columns by group, and inputs that the checkpoint scales; a shard with another order is a product
 * of its own. */
static void test_arranged(void **state)
{
    (void)state;
    const scheme order = {"w:int4,g128,actorder a:bf16", NUM_F16};
    int32_t idx[3][384];
    float pre[384];
    for (int k = 0; k < 384; k++) {
        idx[0][k] = idx[1][k] = k * 7 % 3;
        idx[2][k] = 2 - k / 128;
        pre[k] = (float)(0.5 + uniform());
    }
    for (int i = 0; i < 3; i++) {
        weights w = {0};
        for (int j = 0; j < 3; j++) {
            add_shard(&w, i == 1 ? &formats[2].s : &order, 32, 384);
            if (i != 1) w.q[j].g_idx = idx[j];
            if (i != 0) w.q[j].pre_scale = pre;
        }
        know_values(&w, false);
        kern_linear *l = make(&w, KERN_ACT_AUTO, false);
        check_choice("arranged", l, "packed int4 g128", "bf16");
        check_unpack("arranged", l, &w);
        check_products("arranged", l, &w);
        kern_linear_drop(dev, l);
        for (int j = 0; j < 3; j++)
            w.q[j].g_idx = NULL, w.q[j].pre_scale = NULL;
        drop_weights(&w);
    }
}

/* Inputs that the checkpoint wants quantized, with columns scaled before and not. */
static void test_rules(void **state)
{
    (void)state;
    static const held rules[] = {
        {{"w:nvfp4,g16 a:nvfp4,g16", NUM_F8_E4M3}, "packed nvfp4"},
        {{"w:mxfp4,g32 a:mxfp4,g32", NUM_F8_E8M0}, "packed mxfp4"},
        {{"w:int4,g128 a:mxfp8,g32", NUM_BF16}, "packed int4 g128"},
        {{"w:int4,g128 a:fp8_e4m3,token", NUM_BF16}, "packed int4 g128"},
        {{"w:int4,channel a:int8,token", NUM_F32}, "packed int4 g128"},
        {{"w:nvfp4,g16 a:fp8_e4m3,tensor", NUM_F8_E4M3}, "packed nvfp4"},
    };
    float pre[384];
    for (int k = 0; k < 384; k++)
        pre[k] = (float)(0.5 + uniform());
    for (size_t i = 0; i < 2 * sizeof rules / sizeof *rules; i++) {
        const held *h = &rules[i / 2];
        weights w = {0};
        buf text = {0};
        add_shard(&w, &h->s, 32, 384);
        add_shard(&w, &h->s, 16, 384);
        for (int j = 0; j < 2; j++) {
            w.q[j].pre_scale = i % 2 ? pre : NULL;
            if (strstr(h->s.text, "a:nvfp4")) w.q[j].input_global = 0.0123f;
            if (strstr(h->s.text, "tensor")) w.q[j].input_scale = 0.05f;
        }
        know_values(&w, true);
        qaxis_format(&w.q[0].spec.a, &text);
        kern_linear *l = make(&w, KERN_ACT_AUTO, false);
        check_choice(h->s.text, l, h->layout, text.data);
        check_unpack(h->s.text, l, &w);
        check_products(h->s.text, l, &w);
        kern_linear_drop(dev, l);
        buf_free(&text);
        w.q[0].pre_scale = w.q[1].pre_scale = NULL;
        drop_weights(&w);
    }
}

/* ---- what stays out -----------------------------------------------------------------------------
 */

static void left_out(const char *what, const weights *w, kern_act act, bool expert, const char *why)
{
    kern_linear *l = make(w, act, expert);
    for (int b = 0; b < KERN_BUCKETS; b++) {
        const kern_choice *c = kern_linear_choice(l, b);
        if (!strncmp(c->layout, "packed", 6) || !strstr(c->refused, why))
            fail_msg("%s: in '%s', refused: %s; expected '%s'", what, c->layout, c->refused, why);
    }
    kern_linear_drop(dev, l);
}

static void test_left_out(void **state)
{
    (void)state;
    static const struct {
        scheme s;
        int64_t N, K;
        kern_act act;
        const char *why;
    } cases[] = {
        {{"w:int4,g128 a:bf16", NUM_F32}, 32, 256, KERN_ACT_AUTO, "digits"},
        {{"w:int8,g128 a:bf16", NUM_F32}, 32, 256, KERN_ACT_AUTO, "digits"},
        {{"w:int4,g128 a:bf16", NUM_BF16}, 40, 256, KERN_ACT_AUTO, "multiple of 16"},
        {{"w:int4,g128 a:bf16", NUM_BF16}, 32, 192, KERN_ACT_AUTO, "multiple of 128"},
        {{"w:int4,g48 a:bf16", NUM_BF16}, 32, 384, KERN_ACT_AUTO, "multiple of 32"},
        {{"w:int4,g128 a:bf16", NUM_BF16}, 32, 256, KERN_ACT_SPEC, "f32"},
        {{"w:int4,g128 a:bf16", NUM_BF16}, 32, 256, KERN_ACT_F32, "f32"},
        {{"w:int4,g128 a:bf16", NUM_BF16}, 32, 256, KERN_ACT_INT8, "int8"},
        {{"w:int4,g128 a:fp8_e4m3,group128", NUM_BF16}, 32, 256, KERN_ACT_AUTO, "groups"},
        {{"w:fp8_e4m3,channel a:fp8_e4m3,token", NUM_F32}, 32, 256, KERN_ACT_AUTO, "same"},
        {{"w:int8,channel a:int8,token", NUM_F32}, 32, 256, KERN_ACT_AUTO, "same"},
        {{"w:nvfp4,g16 a:nvfp4,g16", NUM_F8_E4M3}, 32, 256, KERN_ACT_AUTO, "not given"},
        {{"w:int8,g32 a:bf16", NUM_BF16}, 32, 256, KERN_ACT_AUTO, "multiple of 128"},
        {{"w:int8,channel,asym a:bf16", NUM_BF16}, 32, 256, KERN_ACT_AUTO, "zero points"},
        {{"w:mxfp8,g32 a:bf16", NUM_F8_E8M0}, 32, 256, KERN_ACT_AUTO, "blocks"},
        {{"w:nf4,g64 a:bf16", NUM_F32}, 32, 256, KERN_ACT_AUTO, "table"},
        {{"w:f16 a:f16", NUM_NONE}, 32, 256, KERN_ACT_AUTO, "does not hold"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        weights w = {0};
        add_shard(&w, &cases[i].s, cases[i].N, cases[i].K);
        left_out(cases[i].s.text, &w, cases[i].act, false, cases[i].why);
        drop_weights(&w);
    }
    weights w = {0};
    add_shard(&w, &formats[5].s, 32, 256);
    ((int8_t *)(uintptr_t)w.q[0].zeros)[3] = -9;
    left_out("zero point", &w, KERN_ACT_AUTO, false, "zero points");
    drop_weights(&w);
}

/* Groups of unequal size cannot be sorted into groups of the format. */
static void test_unequal_groups(void **state)
{
    (void)state;
    const scheme order = {"w:int4,g128,actorder a:bf16", NUM_F16};
    int32_t idx[256] = {0};
    weights w = {0};
    add_shard(&w, &order, 32, 256);
    for (int k = 0; k < 100; k++)
        idx[k] = 1;
    w.q[0].g_idx = idx;
    left_out("unequal groups", &w, KERN_ACT_AUTO, false, "more than 128 columns");
    w.q[0].g_idx = NULL;
    drop_weights(&w);
}

/* A fallen-back weight is what it would have been at once, and gives the same products. */
static void test_fallen_back(void **state)
{
    (void)state;
    weights w = {0};
    const scheme s = {"w:int4,g128 a:bf16", NUM_F32};
    add_shard(&w, &s, 32, 256);
    know_values(&w, true);
    kern_linear *l = make(&w, KERN_ACT_AUTO, false);
    assert_true(kern_linear_choice(l, 0)->reference);
    check_unpack("fallen back", l, &w);
    const shape one = {2, 256, 32, KERN_FLOW, KERN_STREAM};
    check_product("fallen back", l, &w, &one);
    kern_linear_drop(dev, l);
    drop_weights(&w);
}

/* ---- odd numbers --------------------------------------------------------------------------------
 */

static void test_odd_numbers(void **state)
{
    (void)state;
    weights w = {0};
    const scheme long_scale = {"w:int4,g128 a:bf16", NUM_F32};
    add_shard(&w, &long_scale, 32, 256); /* f32 that hold bf16, over many powers of two; one zero */
    float *scales = (float *)(uintptr_t)w.q[0].scales;
    for (int i = 0; i < 64; i++)
        scales[i] = ldexpf(bf16(scales[i]), i % 2 ? -30 - i / 2 : -20 - i / 2);
    scales[9] = 0;
    scales[11] = -scales[11];
    know_values(&w, false);
    kern_linear *l = make(&w, KERN_ACT_AUTO, false);
    check_choice("f32 scales", l, "packed int4 g128", "bf16");
    check_unpack("f32 scales", l, &w);
    check_products("f32 scales", l, &w);
    kern_linear_drop(dev, l);
    drop_weights(&w);

    const scheme mx = {"w:mxfp4,g32 a:bf16", NUM_F8_E8M0};
    add_shard(&w, &mx, 32, 256); /* an empty block has the smallest scale there is */
    uint8_t *e8 = (uint8_t *)(uintptr_t)w.q[0].scales, *codes = (uint8_t *)(uintptr_t)w.q[0].codes;
    e8[3 * 8 + 5] = 0;
    memset(codes + 3 * 128 + 5 * 16, 0, 16);
    know_values(&w, false);
    l = make(&w, KERN_ACT_AUTO, false);
    check_choice("empty block", l, "packed mxfp4", "bf16");
    check_unpack("empty block", l, &w);
    check_products("empty block", l, &w);
    kern_linear_drop(dev, l);
    codes[3 * 128 + 5 * 16] = 1; /* not empty: nothing that is packed holds it */
    left_out("tiny block", &w, KERN_ACT_AUTO, false, "digits");
    drop_weights(&w);
}

/* f16 and f32 that were bf16 once are bf16 again. */
static void test_once_bf16(void **state)
{
    (void)state;
    const scheme types[] = {{"w:f16 a:f16", NUM_NONE}, {"w:f32 a:bf16", NUM_NONE}};
    for (int i = 0; i < 2; i++) {
        weights w = {0};
        add_shard(&w, &types[i], 32, 256);
        uint8_t *codes = (uint8_t *)(uintptr_t)w.q[0].codes;
        for (size_t j = 0; j < 32 * 256; j++) {
            float v;
            num_decode_row(w.q[0].code, codes + j * (i ? 4 : 2), 1, &v);
            v = j % 97 ? bf16(v) : ldexpf(bf16(v), -12); /* also what f16 has few digits for */
            num_encode_row(w.q[0].code, &v, 1, codes + j * (i ? 4 : 2));
        }
        know_values(&w, true);
        kern_linear *l = make(&w, KERN_ACT_AUTO, false);
        check_choice(types[i].text, l, "packed bf16", "bf16");
        check_unpack(types[i].text, l, &w);
        check_products(types[i].text, l, &w);
        kern_linear_drop(dev, l);
        drop_weights(&w);
    }
}

/* Results of a row with NaN are NaN, as on the CPU; others are what they were. */
static void test_nan(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        const scheme s[] = {{"w:int4,g128 a:bf16", NUM_BF16},
                            {"w:fp8_e4m3,channel a:bf16", NUM_F32},
                            {"w:int8,channel a:bf16", NUM_F32}};
        weights w = {0};
        add_shard(&w, &s[i], 32, 256);
        uint16_t *half = (uint16_t *)(uintptr_t)w.q[0].scales;
        if (i == 0) half[2 * 5 + 1] = 0x7fc0;
        if (i == 1) ((uint8_t *)(uintptr_t)w.q[0].codes)[7 * 256 + 100] = 0xff;
        if (i == 2) ((float *)(uintptr_t)w.q[0].scales)[9] = NAN;
        know_values(&w, true);
        kern_linear *l = make(&w, KERN_ACT_AUTO, false);
        assert_false(kern_linear_choice(l, 0)->reference);
        check_products("nan", l, &w);
        kern_linear_drop(dev, l);
        drop_weights(&w);
    }
}

static void test_launched(void **state)
{
    (void)state;
    static const gpu_op tested[] = {GPU_OP_small, GPU_OP_wide, GPU_OP_unpack};
    GPU_TESTED(dev, tested);
}

static int close_all(void **state)
{
    (void)state;
    kern_close(dev);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats),     cmocka_unit_test(test_many),
        cmocka_unit_test(test_unpack_op),   cmocka_unit_test(test_long),
        cmocka_unit_test(test_pieces),      cmocka_unit_test(test_shards),
        cmocka_unit_test(test_arranged),    cmocka_unit_test(test_rules),
        cmocka_unit_test(test_left_out),    cmocka_unit_test(test_unequal_groups),
        cmocka_unit_test(test_fallen_back), cmocka_unit_test(test_odd_numbers),
        cmocka_unit_test(test_once_bf16),   cmocka_unit_test(test_nan),
        cmocka_unit_test(test_launched), /* last */
    };
    if (argc > 1) device = argv[1];
    for (int i = 0; i < LONG_M * (MOST_K + 8); i++)
        x_host[i] = outlier();
    open_device(LONG_M);
    return cmocka_run_group_tests(tests, NULL, close_all);
}
