/* Linears in layout "dense" of a GPU (kern/gpu/dense.c) against those of the CPU, which compute in
 * f32 what the checkpoint's scheme says. Inputs are numbers of bf16, with a row of zeros, a row
 * with a NaN, and outliers; outputs are NaN before. A result may be off by SUM of the sum of the
 * magnitudes of its terms (the order of sums), where weights are widened by WIDE of it (each is
 * rounded to bf16 once), and by one rounding of what is stored, two where a bias is added to it.
 * The device is the first argument ("cuda:0"), without one the emulation. */
#include "../diff/linear_fixture.h"
#include "gpu_tested.h"
#include "kern/gpu/linear.h"

#define SUM 4e-6
/* Tensor cores add 32 fp8 products to the sum so far at a time, each of the 33 cut to 13 bits
 * behind the point of the largest (DeepSeek-V3 technical report, 3.3.2), and are emptied to f32
 * every 128. */
#define FP8_STEP 32
#define FP8_CUT  ((FP8_STEP + 1) * 0x1p-13)
#define WIDE     0x1p-8 /* half a unit of the last place of bf16 */

static const char *device = "emulated";
static kern_dev *gpu, *cpu;

static kern_dev *open_gpu(void)
{
    err e = {0};
    kern_dev *d = NULL;
    const kern_opts o = {.device = device, .threads = 1};
    CHECK_OK(kern_open(&d, &o, &e));
    gpu__of(d)->only = &gpu__layout_dense;
    return d;
}

/* ---- numbers ----------------------------------------------------------------------------------
 */

static float rounded(float v)
{
    return num_bf16_to_f32(num_f32_to_bf16(v));
}

/* [M, ld] floats; behind K they are never read. */
static float *make_x(int64_t M, int64_t K, int64_t ld)
{
    float *x = xmalloc(sizeof *x * (size_t)(M * ld));
    for (int64_t i = 0; i < M * ld; i++)
        x[i] = rounded((float)normal() * (uniform() < 0.01 ? 30.0f : 1.0f));
    if (M > 1) memset(x + ld, 0, sizeof *x * (size_t)K);
    if (M > 2) x[2 * ld + K / 2] = NAN;
    return x;
}

static float *handle_of(const float *v, int64_t n)
{
    err e = {0};
    float *p = xmalloc(sizeof *p * (size_t)n), *own = p;
    memcpy(p, v, sizeof *p * (size_t)n);
    CHECK_OK(kern_constant(gpu, &p, n, &e));
    free(own);
    return p;
}

/* ---- one product ------------------------------------------------------------------------------
 */

typedef struct form { /* how x and y lie */
    bool x_f32, y_f32;
    int64_t x_more, y_more, y_at; /* of their row strides; y's first column */
} form;
static const form plain_form = {0};

/* x -> y, all of [M, ldy] as floats. */
static float *run(const kern_linear *l, const float *x, int64_t M, const form *f)
{
    err e = {0};
    const int64_t K = kern_linear_k(l), N = kern_linear_n(l), ldx = K + f->x_more,
                  ldy = N + f->y_more, ny = M * ldy;
    float *from = handle_of(x, M * ldx), *xl = NULL, *y = NULL, *y32 = NULL;
    float *out = xmalloc(sizeof *out * (size_t)ny);
    for (int64_t i = 0; i < ny; i++)
        out[i] = NAN;
    float *nan = handle_of(out, ny);
    CHECK_OK(kern_lanes(gpu, &xl, M * ldx, KERN_FLOW, KERN_ACT_AUTO, &e));
    CHECK_OK(kern_lanes(gpu, &y, ny, f->y_f32 ? KERN_STREAM : KERN_FLOW, KERN_ACT_AUTO, &e));
    CHECK_OK(kern_lanes(gpu, &y32, ny, KERN_STREAM, KERN_ACT_AUTO, &e));
    assert_true(kern_step_begin(gpu, M, 0));
    kern_copy_rows(gpu, from, ldx, xl, ldx, ldx, M);
    kern_copy_rows(gpu, nan, ldy, y, ldy, ldy, M);
    kern_linear_run(gpu, l, f->x_f32 ? from : xl, ldx, M, y + f->y_at, ldy);
    kern_copy_rows(gpu, y, ldy, y32, ldy, ldy, M);
    kern_fetch(gpu, y32, ny, out);
    CHECK_OK(kern_step_end(gpu, &e));
    kern_free(gpu, xl);
    kern_free(gpu, y);
    kern_free(gpu, y32);
    return out;
}

typedef struct pair {
    kern_linear *g, *c;
    float *w;    /* what the CPU multiplies, [N,K] */
    float *bias; /* or NULL */
    bool widened;
} pair;

static pair make_pair(const kern_linear_desc *desc, bool widened, int64_t rows)
{
    err e = {0};
    kern_linear_desc d = *desc;
    pair p = {.bias = (float *)(uintptr_t)desc->bias, .widened = widened};
    d.act = KERN_ACT_AUTO;
    CHECK_OK(kern_linear_make(gpu, &d, &p.g, &e));
    d.act = KERN_ACT_SPEC;
    CHECK_OK(kern_linear_make(cpu, &d, &p.c, &e));
    const int64_t K = kern_linear_k(p.c), N = kern_linear_n(p.c);
    CHECK_OK(kern_reserve(gpu, rows, K, N, &e));
    p.w = xmalloc(sizeof *p.w * (size_t)(N * K));
    kern_linear_unpack(p.c, p.w);
    for (int b = 0; b < KERN_BUCKETS; b++)
        assert_string_equal(kern_linear_choice(p.g, b)->layout, "dense");
    return p;
}

static void drop_pair(pair *p)
{
    kern_linear_drop(gpu, p->g);
    kern_linear_drop(cpu, p->c);
    free(p->w);
}

static double fp8_bound(const float *x, const float *w, int64_t K)
{
    double bound = 0, sum = 0;
    for (int64_t k0 = 0; k0 < K; k0 += FP8_STEP) {
        if (k0 % 128 == 0) sum = 0;
        double top = fabs(sum);
        for (int64_t k = k0; k < K && k < k0 + FP8_STEP; k++) {
            const double v = (double)x[k] * (double)w[k];
            top = fmax(top, fabs(v));
            sum += v;
        }
        bound += FP8_CUT * top;
    }
    return bound;
}

static void check_cell(const pair *p, const char *what, const float *x, int64_t m, int64_t n,
                       float got, float want, bool f32, bool by_lt)
{
    const int64_t K = kern_linear_k(p->c);
    double mag = p->bias ? fabs((double)p->bias[n]) : 0;
    for (int64_t k = 0; k < K; k++)
        mag += fabs((double)x[k] * (double)p->w[n * K + k]);
    double tol = SUM * (1.1 * mag);
    if (by_lt && p->widened) tol += WIDE * mag;
    if (by_lt && strcmp(device, "emulated") &&
        strstr(kern_linear_choice(p->g, KERN_BUCKETS - 1)->act, "e4m3"))
        tol += fp8_bound(x, p->w + n * K, K);
    if (!f32) tol += WIDE * 1.01 * (fabs((double)want) + tol);
    if (!f32 && p->bias && by_lt)
        tol += WIDE * 1.01 * (fabs((double)want) + fabs((double)p->bias[n]) + tol);
    if (isnan(want) ? isnan(got) : fabs((double)got - (double)want) <= tol) return;
    fail_msg("%s [%lld,%lld]: got %.9g, expected %.9g, allowed %.3g", what, (long long)m,
             (long long)n, (double)got, (double)want, tol);
}

static void check(const char *what, const pair *p, int64_t M, const form *f)
{
    const int64_t K = kern_linear_k(p->c), N = kern_linear_n(p->c), ldx = K + f->x_more,
                  ldy = N + f->y_more;
    const kern_choice *c = kern_linear_choice(p->g, kern_bucket(M));
    const bool by_lt = !strcmp(c->row, "cuda-lt") || (!strcmp(c->row, "cuda-rows-lt") && M > 32);
    float *x = make_x(M, K, ldx), *want = xmalloc(sizeof *want * (size_t)(M * N));
    char name[160];
    snprintf(name, sizeof name, "%s, M %lld, N %lld, K %lld, %s", what, (long long)M, (long long)N,
             (long long)K, c->row);
    kern_linear_run(cpu, p->c, x, ldx, M, want, N);
    float *got = run(p->g, x, M, f);
    for (int64_t m = 0; m < M; m++)
        for (int64_t i = 0; i < ldy; i++) {
            const int64_t n = i - f->y_at;
            if (n < 0 || n >= N) {
                if (!isnan(got[m * ldy + i]))
                    fail_msg("%s: [%lld,%lld] written outside", name, (long long)m, (long long)n);
                continue;
            }
            check_cell(p, name, x + m * ldx, m, n, got[m * ldy + i], m == 2 ? NAN : want[m * N + n],
                       f->y_f32, by_lt);
        }
    free(x);
    free(want);
    free(got);
}

/* ---- schemes ----------------------------------------------------------------------------------
 */

typedef struct kind {
    const char *text;
    num_dtype scale;
    float input_scale;
    bool widened;
    const char *act;
} kind;
static const kind kinds[] = {
    {"w:bf16 a:bf16", NUM_NONE, 0, false, "bf16"},
    {"w:fp8_e4m3,channel a:fp8_e4m3,token", NUM_BF16, 0, false, "e4m3 per token"},
    {"w:fp8_e4m3,tensor a:fp8_e4m3,tensor", NUM_F32, 0.04f, false, "e4m3 static"},
    {"w:fp8_e4m3,tensor a:fp8_e4m3,tensor", NUM_F32, 0, false, "e4m3 per token"},
    {"w:fp8_e4m3,block128x128 a:fp8_e4m3,group128", NUM_F32, 0, false, "e4m3 per 128 along K"},
    {"w:fp8_e4m3,block128x128 a:fp8_e4m3,token", NUM_BF16, 0, false, "e4m3 per token"},
    {"w:fp8_e4m3,channel a:bf16", NUM_BF16, 0, true, "bf16"},
    {"w:fp8_e4m3,block128x128 a:bf16", NUM_F32, 0, true, "bf16"},
    {"w:int8,channel a:int8,token", NUM_BF16, 0, false, "int8 per token"},
    {"w:int8,channel a:int8,tensor", NUM_F32, 0.03f, false, "int8 static"},
    {"w:int8,channel a:bf16", NUM_F32, 0, true, "bf16"},
};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

static const int64_t batches[] = {1, 2, 3, 5, 8, 9, 33, 64, 65, 130};
enum { N_BATCHES = sizeof batches / sizeof *batches };

static void weight_of(const kind *k, qtensor *q, int64_t N, int64_t K)
{
    random_weight(q, &(scheme){k->text, k->scale}, N, K);
    for (int64_t n = 0; q->code == NUM_F8_E4M3 && n < N; n++) {
        uint8_t *c = (uint8_t *)(uintptr_t)q->codes + (size_t)n * q->row_bytes;
        for (int64_t i = 0; i < K; i++)
            if ((c[i] & 127) == 127) c[i] ^= 1;
    }
    q->input_scale = k->input_scale;
}

/* Columns and rows that are and are not multiples of 128 and of 16. */
static void shapes(void **state)
{
    (void)state;
    static const int64_t sizes[][2] = {{160, 256}, {272, 400}, {37, 144}, {16, 16}};
    for (int i = 0; i < N_KINDS; i++)
        for (int j = 0; j < 4; j++) {
            qtensor q;
            weight_of(&kinds[i], &q, sizes[j][0], sizes[j][1]);
            kern_linear_desc d = {.name = "one", .n_shards = 1, .shard = {&q}};
            float bias[272];
            for (int n = 0; n < 272; n++)
                bias[n] = i % 2 ? (float)normal() : rounded((float)normal());
            if (j == 1) d.bias = bias;
            pair p = make_pair(&d, kinds[i].widened, 130);
            const bool by_lt = sizes[j][0] % 16 == 0 && i != 5;
            if (!strcmp(device, "emulated")) /* the library has rules of its own */
                assert_string_equal(kern_linear_choice(p.g, 3)->row,
                                    by_lt ? "cuda-lt" : "cuda-rows-by-64");
            if (!strcmp(device, "emulated"))
                assert_string_equal(kern_linear_choice(p.g, 2)->row,
                                    by_lt && !p.widened ? "cuda-rows-lt" : "cuda-rows");
            assert_string_equal(kern_linear_choice(p.g, 0)->act, kinds[i].act);
            assert_string_equal(kern_linear_choice(p.g, 0)->row, "cuda-slim-rows");
            assert_string_equal(kern_linear_choice(p.g, 1)->row, "cuda-slim-rows");
            for (int b = 0; b < N_BATCHES; b++)
                check(kinds[i].text, &p, batches[b], &plain_form);
            drop_pair(&p);
            free_weight(&q);
        }
}

/* Shards with a bias that is one of bf16, and one that is not; strides and types of lanes. */
static void shards(void **state)
{
    (void)state;
    static const form forms[] = {{0},
                                 {.x_f32 = true, .y_f32 = true},
                                 {.x_more = 3, .y_more = 5, .y_at = 1},
                                 {.x_more = 16, .y_more = 16, .y_at = 8}};
    static const int64_t rows[] = {128, 64, 32};
    for (int i = 0; i < N_KINDS; i++)
        for (int j = 0; j < 4; j++) {
            qtensor q[3];
            float bias[224];
            kern_linear_desc d = {.name = "three", .n_shards = 3, .bias = bias};
            for (int s = 0; s < 3; s++) {
                weight_of(&kinds[i], &q[s], rows[s], 144);
                d.shard[s] = &q[s];
            }
            if (j == 2) q[2].input_scale *= 1.5f; /* another treatment of the input */
            for (int n = 0; n < 224; n++)
                bias[n] = j % 2 ? (float)normal() : rounded((float)normal());
            pair p = make_pair(&d, kinds[i].widened, 70);
            check(kinds[i].text, &p, 1, &forms[j]);
            check(kinds[i].text, &p, 35, &forms[j]);
            check(kinds[i].text, &p, 67, &forms[j]);
            drop_pair(&p);
            for (int s = 0; s < 3; s++)
                free_weight(&q[s]);
        }
}

/* Room for fewer rows than a step has: it is cut. */
static void cut_steps(void **state)
{
    (void)state;
    for (int i = 0; i < N_KINDS; i++) {
        kern_dev *own = gpu;
        qtensor q;
        gpu = open_gpu();
        weight_of(&kinds[i], &q, 48, 160);
        kern_linear_desc d = {.name = "long", .n_shards = 1, .shard = {&q}};
        pair p = make_pair(&d, kinds[i].widened, 66);
        check(kinds[i].text, &p, 215, &(form){.x_f32 = true});
        drop_pair(&p);
        free_weight(&q);
        kern_close(gpu);
        gpu = own;
    }
}

static void unpacked(void **state)
{
    (void)state;
    for (int i = 0; i < N_KINDS; i++) {
        qtensor q;
        weight_of(&kinds[i], &q, 150, 272);
        kern_linear_desc d = {.name = "one", .n_shards = 1, .shard = {&q}};
        pair p = make_pair(&d, false, 1);
        float *w = xmalloc(sizeof *w * 150 * 272);
        kern_linear_unpack(p.g, w);
        for (int64_t k = 0; k < 150 * 272; k++)
            if (w[k] != p.w[k])
                fail_msg("%s: weight %lld is %.9g, expected %.9g", kinds[i].text, (long long)k,
                         (double)w[k], (double)p.w[k]);
        free(w);
        assert_int_equal(kern_linear_can_embed(p.g), i == 0);
        drop_pair(&p);
        free_weight(&q);
    }
}

static void embeds(void **state)
{
    (void)state;
    enum { N = 90, K = 72, T = 5 };
    static const int32_t ids[T] = {89, 0, 7, 7, 31};
    err e = {0};
    qtensor q;
    float got[T * K], *out = NULL;
    weight_of(&kinds[0], &q, N, K);
    kern_linear_desc d = {.name = "head", .n_shards = 1, .shard = {&q}};
    pair p = make_pair(&d, false, T);
    CHECK_OK(kern_lanes(gpu, &out, T * K, KERN_STREAM, KERN_ACT_AUTO, &e));
    assert_true(kern_step_begin(gpu, T, 0));
    kern_linear_embed(gpu, p.g, ids, T, out);
    kern_fetch(gpu, out, T * K, got);
    CHECK_OK(kern_step_end(gpu, &e));
    for (int t = 0; t < T; t++)
        assert_memory_equal(got + t * K, p.w + (int64_t)ids[t] * K, K * sizeof(float));
    kern_free(gpu, out);
    drop_pair(&p);
    free_weight(&q);
}

/* ---- what is not taken ------------------------------------------------------------------------
 */

static void refused(const char *text, num_dtype scale, kern_act act, int64_t K, const char *why)
{
    err e = {0};
    qtensor q;
    kern_linear *l = NULL;
    weight_of(&(kind){text, scale, 0, false, NULL}, &q, 32, K);
    kern_linear_desc d = {.name = "one", .n_shards = 1, .shard = {&q}, .act = act};
    CHECK_OK(kern_linear_make(gpu, &d, &l, &e));
    const kern_choice *c = kern_linear_choice(l, 0);
    if (!strcmp(c->layout, "dense")) fail_msg("%s is taken", text);
    if (!strstr(c->refused, why)) fail_msg("%s: '%s', expected '%s'", text, c->refused, why);
    kern_linear_drop(gpu, l);
    free_weight(&q);
}

static void refusals(void **state)
{
    (void)state;
    const kern_act any = KERN_ACT_AUTO;
    refused("w:bf16 a:bf16", NUM_NONE, KERN_ACT_SPEC, 64, "activations are f32");
    refused("w:bf16 a:bf16", NUM_NONE, KERN_ACT_F32, 64, "activations are f32");
    refused("w:bf16 a:bf16", NUM_NONE, KERN_ACT_INT8, 64, "int8 in groups");
    refused("w:bf16 a:bf16", NUM_NONE, any, 60, "16 bytes");
    refused("w:fp8_e4m3,channel a:bf16", NUM_F32, any, 40, "16 bytes");
    refused("w:f16 a:f16", NUM_NONE, any, 64, "made for bf16");
    refused("w:int4,g32 a:bf16", NUM_BF16, any, 64, "made for bf16");
    refused("w:int8,g32 a:bf16", NUM_BF16, any, 64, "of the tensor");
    refused("w:int8,channel,asym a:bf16", NUM_BF16, any, 64, "zero points");
    refused("w:mxfp8,g32 a:bf16", NUM_F8_E8M0, any, 64, "not floats");
    refused("w:fp8_e4m3,block64x64 a:bf16", NUM_F32, any, 64, "128x128");
    refused("w:fp8_e4m3,channel a:int8,token", NUM_F32, any, 64, "different types");
    refused("w:fp8_e4m3,channel a:fp8_e4m3,group128", NUM_F32, any, 256, "without block scales");
    refused("w:fp8_e4m3,block128x128 a:fp8_e4m3,group64", NUM_F32, any, 256, "other than 128");
    refused("w:bf16 a:fp8_e4m3,token", NUM_NONE, any, 64, "quantized input");
}

/* A weight with a NaN is held by others. */
static void nan_weight(void **state)
{
    (void)state;
    err e = {0};
    qtensor q;
    kern_linear *l = NULL;
    weight_of(&kinds[1], &q, 32, 64);
    ((uint8_t *)(uintptr_t)q.codes)[777] = 0xff;
    kern_linear_desc d = {.name = "one", .n_shards = 1, .shard = {&q}, .act = KERN_ACT_AUTO};
    CHECK_OK(kern_linear_make(gpu, &d, &l, &e));
    assert_non_null(strstr(kern_linear_choice(l, 0)->refused, "code of shard 0 is NaN"));
    kern_linear_drop(gpu, l);
    free_weight(&q);
}

/* Which layout is the first: rows, where these are multiplied as they lie however many there are.
 */
static void order(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        num_dtype scale;
        int64_t N;
        const char *layout;
    } cases[] = {
        {"w:bf16 a:bf16", NUM_NONE, 160, "dense"},
        {"w:fp8_e4m3,channel a:fp8_e4m3,token", NUM_BF16, 160, "dense"},
        {"w:int8,channel a:int8,token", NUM_BF16, 160, "dense"},
        {"w:fp8_e4m3,channel a:bf16", NUM_BF16, 160, "packed"},
        {"w:fp8_e4m3,channel a:bf16", NUM_BF16, 40, "dense"}, /* none is packed of such N */
        {"w:int4,g128 a:bf16", NUM_BF16, 160, "packed"},
        {"w:f32 a:f32", NUM_NONE, 160, "w32p16"},
    };
    gpu__of(gpu)->only = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        err e = {0};
        qtensor q;
        kern_linear *l = NULL;
        weight_of(&(kind){cases[i].text, cases[i].scale, 0, false, NULL}, &q, cases[i].N, 256);
        kern_linear_desc d = {.name = "one", .n_shards = 1, .shard = {&q}, .act = KERN_ACT_AUTO};
        CHECK_OK(kern_linear_make(gpu, &d, &l, &e));
        for (int b = 0; b < KERN_BUCKETS; b++)
            if (strncmp(kern_linear_choice(l, b)->layout, cases[i].layout, strlen(cases[i].layout)))
                fail_msg("%s, N %lld, bucket %d: '%s', expected '%s'", cases[i].text,
                         (long long)cases[i].N, b, kern_linear_choice(l, b)->layout,
                         cases[i].layout);
        kern_linear_drop(gpu, l);
        free_weight(&q);
    }
    gpu__of(gpu)->only = &gpu__layout_dense;
}

static void launched(void **state)
{
    (void)state;
    static const gpu_op tested[] = {GPU_OP_slim, GPU_OP_rows, GPU_OP_lt, GPU_OP_widen};
    GPU_TESTED(gpu, tested);
}

static int open_devices(void **state)
{
    (void)state;
    err e = {0};
    const kern_opts c = {.threads = 2};
    gpu = open_gpu();
    CHECK_OK(kern_open(&cpu, &c, &e));
    return 0;
}
static int close_devices(void **state)
{
    (void)state;
    kern_close(gpu);
    kern_close(cpu);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1) device = argv[1];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes),     cmocka_unit_test(shards), cmocka_unit_test(cut_steps),
        cmocka_unit_test(unpacked),   cmocka_unit_test(embeds), cmocka_unit_test(refusals),
        cmocka_unit_test(nan_weight), cmocka_unit_test(order),  cmocka_unit_test(launched)};
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
