/* Experts in packed weights of a GPU through the public functions: formats, experts without slots,
 * with few and with many, inputs as they come and as codes, biases, rows chosen by number, against
 * sums in float64 of the checkpoint's numbers. Which experts stay in panels or are refused. The
 * device is the first argument ("cuda:0"), without one the emulation. */
#include "../diff/linear_fixture.h"
#include "gpu_tested.h"
#include "kern/gpu/linear.h"

#define REL_F32  0x1p-24 /* of the magnitudes, for each of the roundings of f32 in a row */
#define REL_BF16 0x1p-8  /* where tiles of many slots multiply by weights rounded to bf16 */
#define POISON   12288.0f
#define WIDTH    1024 /* lanes come in multiples of this */

enum { MOST_SLOTS = 448, MOST_T = 80, MOST_K = 7296, MOST_N = 208, MOST_E = 16 };

static const char *device = "emulated";
static kern_dev *dev;
static float *numbers, *poison;           /* on the device */
static float x_host[MOST_SLOTS * MOST_K]; /* numbers here */

static float outlier(void)
{
    return (float)(normal() * (uniform() < 0.01 ? 20 : 1));
}

static void open_device(void)
{
    err e = {0};
    kern_opts o = {.device = device, .threads = 2, .cpu_features = 0};
    CHECK_OK(kern_open(&dev, &o, &e));
    CHECK_OK(kern_reserve(dev, MOST_SLOTS, MOST_K, MOST_N, &e));
    float *p = xmalloc(sizeof *p * WIDTH);
    for (int i = 0; i < WIDTH; i++)
        p[i] = POISON;
    poison = p;
    numbers = x_host;
    CHECK_OK(kern_constant(dev, &poison, WIDTH, &e));
    CHECK_OK(kern_constant(dev, &numbers, MOST_SLOTS * MOST_K, &e));
    free(p);
}

/* ---- weights ------------------------------------------------------------------------------------
 */

typedef struct crowd { /* experts of two shards, and what they add up to */
    qtensor q[MOST_E][2];
    int E, shards;
    int64_t N, K;
    float *value, *term, *bias; /* [E,N,K], the largest numbers that are added up, [E,N] or NULL */
    kern_experts *experts;
} crowd;

static void know_values(crowd *c)
{
    const bool fast = strcmp(device, "emulated");
    int64_t row = 0;
    c->value = xmalloc(sizeof(float) * (size_t)(c->E * c->N * c->K));
    c->term = xmalloc(sizeof(float) * (size_t)(c->E * c->N * c->K));
    for (int i = 0; i < c->E * c->shards; i++) {
        const qtensor *q = &c->q[i / c->shards][i % c->shards];
        for (int64_t n = 0; n < q->N; n++, row++) {
            float *v = c->value + row * c->K, *t = c->term + row * c->K;
            qtensor_decode_row(q, n, v);
            for (int64_t k = 0; k < c->K; k++) { /* int4 comes with 128 on a GPU */
                t[k] = fabsf(v[k]);
                if (fast && q->code >= NUM_I2 && q->code <= NUM_I4)
                    t[k] += 144 * fabsf(qtensor_scale(q, n, k));
            }
        }
    }
}

static void fill(crowd *c, const scheme *s, int E, int shards, int64_t N, int64_t K, bool bias)
{
    *c = (crowd){.E = E, .shards = shards, .N = N * shards, .K = K};
    for (int i = 0; i < E * shards; i++)
        random_weight(&c->q[i / shards][i % shards], s, N, K);
    know_values(c);
    if (bias) c->bias = xmalloc(sizeof(float) * (size_t)(E * c->N));
    for (int64_t i = 0; bias && i < E * c->N; i++)
        c->bias[i] = outlier();
}

static kern_linear *make_one(const crowd *c, int i, kern_act act)
{
    err e = {0};
    kern_linear *l = NULL;
    kern_linear_desc d = {.name = "tested", .n_shards = c->shards, .act = act, .expert = true};
    for (int s = 0; s < c->shards; s++)
        d.shard[s] = &c->q[i][s];
    if (c->bias) d.bias = c->bias + i * c->N;
    CHECK_OK(kern_linear_make(dev, &d, &l, &e));
    return l;
}

static void make(crowd *c, kern_act act)
{
    err e = {0};
    kern_linear *l[MOST_E];
    for (int i = 0; i < c->E; i++)
        l[i] = make_one(c, i, act);
    CHECK_OK(kern_experts_make(dev, l, c->E, &c->experts, &e));
}

static void drop(crowd *c)
{
    kern_experts_drop(dev, c->experts);
    for (int i = 0; i < c->E * c->shards; i++)
        free_weight(&c->q[i / c->shards][i % c->shards]);
    free(c->value);
    free(c->term);
    free(c->bias);
    *c = (crowd){0};
}

/* ---- products -----------------------------------------------------------------------------------
 */

typedef struct load { /* slots of each expert */
    int E, slots[MOST_E];
    int T; /* rows that they choose among; 0: slot i reads row i */
    int64_t ldx_more, ldy_more;
    kern_lanes_kind y;
} load;

static float *lanes(int64_t n, kern_lanes_kind kind)
{
    err e = {0};
    float *p = NULL;
    CHECK_OK(kern_lanes(dev, &p, (n + WIDTH - 1) / WIDTH * WIDTH, kind, KERN_ACT_AUTO, &e));
    return p;
}

/* Integers on the device: constants of the same bits. */
static const int32_t *integers(const int32_t *v, int n)
{
    err e = {0};
    float *p = xmalloc(sizeof *p * (size_t)n), *at = p;
    memcpy(p, v, sizeof *p * (size_t)n);
    CHECK_OK(kern_constant(dev, &at, n, &e));
    free(p);
    return (const int32_t *)(const void *)at;
}

/* y with a row of poison before and after it, in host memory: [slots+2, ldy]. */
static float *multiply(const crowd *c, const load *s, int slots, const int32_t *ids,
                       const int32_t *first)
{
    err e = {0};
    const int64_t ldx = c->K + s->ldx_more, ldy = c->N + s->ldy_more;
    const int64_t all = (slots + 2) * ldy, lines = (all + WIDTH - 1) / WIDTH;
    const int64_t rows = s->T ? s->T : slots;
    float *x = lanes((rows + 1) * ldx, KERN_FLOW), *y = lanes(all, s->y);
    float *seen = lanes(all, KERN_STREAM), *host = xmalloc(sizeof *host * (size_t)all);
    const int32_t *row = s->T ? integers(ids, slots) : NULL;
    const int32_t *begin = integers(first, c->E + 1);
    assert_true(kern_step_begin(dev, rows, 0));
    kern_copy_rows(dev, poison, 0, y, WIDTH, WIDTH, lines);
    kern_copy_rows(dev, numbers, MOST_K, x, ldx, c->K, rows);
    kern_experts_run(dev, c->experts, x, ldx, row, begin, slots, y + ldy, ldy);
    kern_copy_rows(dev, y, WIDTH, seen, WIDTH, WIDTH, lines);
    kern_fetch(dev, seen, all, host);
    CHECK_OK(kern_step_end(dev, &e));
    kern_free(dev, x);
    kern_free(dev, y);
    kern_free(dev, seen);
    return host;
}

static float bf16(float v)
{
    return num_bf16_to_f32(num_f32_to_bf16(v));
}

static bool agrees(kern_lanes_kind kind, float got, double want, double tol)
{
    if (kind == KERN_STREAM) return fabs((double)got - want) <= tol;
    return got >= bf16((float)(want - tol)) && got <= bf16((float)(want + tol));
}

/* Row m as it is multiplied. */
static void input_row(const qtensor *q, int64_t m, float *x)
{
    kern__act_plan p = {.a = q->spec.a,
                        .K = q->K,
                        .Kp = q->K,
                        .in_scale = q->spec.a.gran == Q_TENSOR ? q->input_scale : 0};
    for (int64_t k = 0; k < q->K; k++)
        x[k] = bf16(x_host[m * MOST_K + k]);
    kern__act_emulate(&p, x, q->K);
    for (int64_t k = 0; k < q->K && q->spec.a.gran == Q_GROUP; k++)
        x[k] = bf16(x[k]);
}

static void check_slot(const char *what, const crowd *c, const load *s, int e, int slot,
                       const float *x, const float *got, double rel)
{
    for (int64_t n = 0; n < c->N; n++) {
        const float *v = c->value + (e * c->N + n) * c->K, *t = c->term + (e * c->N + n) * c->K;
        double want = c->bias ? (double)c->bias[e * c->N + n] : 0, mag = fabs(want);
        for (int64_t k = 0; k < c->K; k++) {
            want += (double)x[k] * (double)v[k];
            mag += fabs((double)x[k] * (double)t[k]);
        }
        if (!agrees(s->y, got[n], want, rel * mag))
            fail_msg("%s [%lld,%lld], %d experts: slot %d, expert %d, row %lld is %.9g, expected "
                     "%.9g, off %.3g of the magnitude",
                     what, (long long)c->N, (long long)c->K, c->E, slot, e, (long long)n,
                     (double)got[n], want, fabs((double)got[n] - want) / mag);
    }
}

static void check(const char *what, const crowd *c, const load *s)
{
    int32_t first[MOST_E + 1] = {0}, ids[MOST_SLOTS];
    static float x[MOST_K];
    for (int e = 0; e < c->E; e++)
        first[e + 1] = first[e] + s->slots[e];
    const int slots = first[c->E];
    assert_true(slots <= MOST_SLOTS);
    for (int i = 0; i < slots; i++)
        ids[i] = s->T ? (int32_t)(uniform() * s->T) : i;
    const bool rounded = strcmp(device, "emulated") && slots >= 8 * c->E;
    const double rel = REL_F32 * (double)(126 + c->K / 128);
    const int64_t ldy = c->N + s->ldy_more;
    float *got = multiply(c, s, slots, ids, first);
    for (int64_t i = 0; i < (slots + 2) * ldy; i++)
        if ((i < ldy || i >= (slots + 1) * ldy || i % ldy >= c->N) && got[i] != POISON)
            fail_msg("%s: [%lld,%lld] was written to", what, (long long)(i / ldy - 1),
                     (long long)(i % ldy));
    for (int e = 0; e < c->E; e++)
        for (int i = first[e]; i < first[e + 1]; i++) {
            input_row(&c->q[0][0], ids[i], x);
            check_slot(what, c, s, e, i, x, got + (i + 1) * ldy, rounded ? REL_BF16 : rel);
        }
    free(got);
}

static const load loads[] = {
    {16, {0, 1, 8, 9, 40, 0, 0, 3, 0, 0, 17, 0, 2, 0, 1, 0}, 33, 0, 0, KERN_FLOW},
    {16, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0}, 1, 0, 5, KERN_STREAM},
    {16, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, 0, 8, 0, KERN_FLOW},
    {4, {0, 1, 9, 24}, 29, 8, 8, KERN_STREAM},
    {4, {8, 0, 0, 7}, 8, 0, 0, KERN_FLOW},
    {4, {30, 70, 0, 5}, 0, 0, 4, KERN_FLOW},
    {4, {0, 9, 0, 100}, 80, 0, 3, KERN_STREAM}, /* wide tiles do not write such rows */
    {4, {190, 200, 3, 0}, 80, 0, 0, KERN_FLOW},
    {5, {0, 0, 0, 0, 0}, 4, 0, 0, KERN_FLOW},
};

static const load wider = {4, {0, 1, 9, 40}, 29, 8, 8, KERN_STREAM};

static void check_loads(const char *what, const crowd *c)
{
    for (size_t i = 0; i < sizeof loads / sizeof *loads; i++)
        if (loads[i].E == c->E) check(what, c, &loads[i]);
}

/* ---- formats ------------------------------------------------------------------------------------
 */

static const scheme formats[] = {
    {"w:int4,g128 a:bf16", NUM_BF16},
    {"w:int4,g128,asym a:bf16", NUM_BF16},
    {"w:int4,g64 a:bf16", NUM_F16},
    {"w:int4,g64,asym a:bf16", NUM_F16},
    {"w:int4,g32 a:bf16", NUM_BF16},
    {"w:int4,g32,asym a:bf16", NUM_F16},
    {"w:fp8_e4m3,channel a:bf16", NUM_F32},
    {"w:fp8_e4m3,block128x128 a:bf16", NUM_F32},
    {"w:int8,channel a:bf16", NUM_F32},
    {"w:int8,g128 a:bf16", NUM_F16},
    {"w:bf16 a:bf16", NUM_NONE},
    {"w:mxfp4,g32 a:bf16", NUM_F8_E8M0},
    {"w:nvfp4,g16 a:bf16", NUM_F8_E4M3},
};

static void check_packed(const char *what, const crowd *c)
{
    const kern_choice *o = kern_linear_choice(kern_experts_at(c->experts, 0), 0);
    if (strncmp(o->layout, "packed", 6) || strcmp(o->row, "cuda-experts"))
        fail_msg("%s: in layout '%s', refused: %s", what, o->layout, o->refused);
}

static void check_unpack(const char *what, const crowd *c)
{
    float *got = xmalloc(sizeof *got * (size_t)(c->N * c->K));
    kern_linear_unpack(kern_experts_at(c->experts, c->E - 1), got);
    const float *want = c->value + (c->E - 1) * c->N * c->K;
    for (int64_t i = 0; i < c->N * c->K; i++)
        if (got[i] != want[i])
            fail_msg("%s: unpacked [%lld,%lld] is %.9g, expected %.9g", what, (long long)(i / c->K),
                     (long long)(i % c->K), (double)got[i], (double)want[i]);
    free(got);
}

static void test_formats(void **state)
{
    (void)state;
    static const struct {
        int E, shards;
        int64_t N, K;
        bool bias;
    } sizes[] = {{16, 2, 48, 256, false},
                 {4, 1, 208, 640, true},
                 {5, 1, 16, 128, false},
                 {4, 2, 32, 320, true},
                 {16, 1, 32, 64, false}};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++) {
            crowd c;
            fill(&c, &formats[i], sizes[j].E, sizes[j].shards, sizes[j].N, sizes[j].K,
                 sizes[j].bias);
            make(&c, KERN_ACT_AUTO);
            check_packed(formats[i].text, &c);
            check_unpack(formats[i].text, &c);
            check_loads(formats[i].text, &c);
            drop(&c);
        }
}

/* Every width of K that the kernels tell apart. */
static void test_widths(void **state)
{
    (void)state;
    static const int64_t widths[] = {1152, 2880, 4864, 6976, MOST_K};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        for (size_t j = 0; j < sizeof widths / sizeof *widths; j++)
            for (int E = 4; E <= 16; E += 12) {
                crowd c;
                fill(&c, &formats[i], E, 1, E == 4 ? 48 : 16, widths[j], j % 2);
                make(&c, KERN_ACT_AUTO);
                check_packed(formats[i].text, &c);
                check(formats[i].text, &c, E == 4 ? &wider : &loads[0]);
                drop(&c);
            }
}

/* Inputs that become codes: of tokens, of a given scale, of groups, MX. */
static void test_rules(void **state)
{
    (void)state;
    static const scheme rules[] = {
        {"w:fp8_e4m3,channel a:fp8_e4m3,token", NUM_F32},
        {"w:fp8_e4m3,block128x128 a:fp8_e4m3,group128", NUM_F32},
        {"w:fp8_e4m3,tensor a:fp8_e4m3,tensor", NUM_F32},
        {"w:int8,channel a:int8,token", NUM_F32},
        {"w:int4,g128 a:int8,token", NUM_BF16},
        {"w:int4,g128 a:fp8_e4m3,token", NUM_BF16},
        {"w:mxfp4,g32 a:mxfp4,g32", NUM_F8_E8M0},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        for (int E = 4; E <= 16; E += 12) {
            crowd c;
            fill(&c, &rules[i], E, 1, 48, 256, E == 4);
            for (int e = 0; e < E && strstr(rules[i].text, "3,tensor a:"); e++)
                c.q[e][0].input_scale = 0.031f;
            make(&c, KERN_ACT_AUTO);
            check_packed(rules[i].text, &c);
            check_loads(rules[i].text, &c);
            drop(&c);
        }
}

/* Exact rules stay in panels; so do columns in an order of each expert. */
static void test_left_out(void **state)
{
    (void)state;
    crowd c;
    fill(&c, &formats[0], 4, 1, 32, 256, true);
    make(&c, KERN_ACT_F32);
    const kern_choice *o = kern_linear_choice(kern_experts_at(c.experts, 0), 0);
    assert_string_equal(o->row, "cuda-plain");
    assert_non_null(strstr(o->refused, "f32"));
    check_loads("in panels", &c);
    drop(&c);
}

static void refused(crowd *c, const char *why)
{
    err e = {0};
    kern_linear *l[MOST_E];
    for (int i = 0; i < c->E; i++)
        l[i] = make_one(c, i, KERN_ACT_AUTO);
    assert_int_equal(kern_experts_make(dev, l, c->E, &c->experts, &e), -ERR_UNSUPPORTED);
    if (!strstr(e.msg, why)) fail_msg("'%s', expected '%s'", e.msg, why);
    c->experts = NULL;
    drop(c);
}

static void test_unlike(void **state)
{
    (void)state;
    static const scheme given = {"w:fp8_e4m3,tensor a:fp8_e4m3,tensor", NUM_F32};
    crowd c;
    fill(&c, &formats[0], 4, 1, 32, 256, false);
    ((uint16_t *)(uintptr_t)c.q[2][0].scales)[0] = 1; /* bf16 far below the others of its row */
    refused(&c, "scales have digits");
    fill(&c, &formats[0], 4, 1, 32, 256, false);
    free_weight(&c.q[1][0]);
    random_weight(&c.q[1][0], &formats[2], 32, 256);
    refused(&c, "shape or format");
    fill(&c, &given, 4, 1, 32, 256, false);
    for (int i = 0; i < 4; i++)
        c.q[i][0].input_scale = i == 3 ? 0.5f : 0.25f;
    refused(&c, "--activation-dtype bf16");
}

static void test_launched(void **state)
{
    (void)state;
    static const gpu_op tested[] = {GPU_OP_small_experts, GPU_OP_wide_experts};
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
        cmocka_unit_test(test_formats), cmocka_unit_test(test_widths),
        cmocka_unit_test(test_rules),   cmocka_unit_test(test_left_out),
        cmocka_unit_test(test_unlike),  cmocka_unit_test(test_launched),
    };
    if (argc > 1) device = argv[1];
    for (int i = 0; i < MOST_SLOTS * MOST_K; i++)
        x_host[i] = outlier();
    open_device();
    return cmocka_run_group_tests(tests, NULL, close_all);
}
