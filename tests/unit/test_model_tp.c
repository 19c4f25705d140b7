/* Models divided over several devices: every case of tests/fixtures/arch and every weight scheme
 * against one device, on the CPU and on the emulated GPU; what cannot be divided; a rank that
 * fails. The emulated plug-in is that beside the program; an argument names another device
 * ("cuda:0": that GPU and the next).
 *
 * Bounds. Division changes the order of summation, no more: in f32 two partial sums of a row
 * instead of one differ by a few of its 2^-24, which layers and norms amplify as they amplify any
 * other rounding; the golden tests allow 1e-4 for any order of summation, this half of it. Schemes
 * whose activations are quantized by token see other tokens: the largest lane of a rank's share
 * instead of that of the row, and so round differently; that may cost what the scheme itself costs,
 * no more. Rounded caches turn a last bit into a step of their type now and then. */
#include <dirent.h>
#include <pthread.h>
#include <unistd.h>
#include "check.h"
#include "kern/gpu/gpu.h"
#include "model_fixture.h"

#define ROOT      "tests/fixtures/arch/"
#define STORED    "tests/fixtures/quant/"
#define LIMIT     5e-5
#define SMALL     1e-5
#define MAX_CASES 128
#define ROWS      24

static const char *gpu_device = "emulated";
static char cases[MAX_CASES][64];
static size_t n_cases;

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

static int find_cases(void **state)
{
    (void)state;
    alarm(600); /* a rank that waits for ever ends the test */
    DIR *d = opendir(ROOT);
    assert_non_null(d);
    for (struct dirent *f; (f = readdir(d)) != NULL;)
        if (!strchr(f->d_name, '.') && n_cases < MAX_CASES)
            snprintf(cases[n_cases++], sizeof cases[0], "%.60s", f->d_name);
    closedir(d);
    qsort(cases, n_cases, sizeof cases[0], by_name);
    assert_true(n_cases >= 32);
    return 0;
}

typedef struct how {
    const char *device, *quantize, *features;
    int ranks;
    kern_act act; /* 0 = spec */
    kern_kv_type kv;
    bool stored; /* a case of tests/fixtures/quant */
} how;

/* Logits of ROWS fixed ids in two chunks, then one row a step, from one device or several;
 * 0, or the code of the error in *e. */
static int logits(const char *name, const how *h, float **out, int64_t *n, err *e)
{
    char path[256];
    fixture f;
    int32_t ids[ROWS];
    snprintf(path, sizeof path, "%s%.60s", h->stored ? STORED : ROOT, name);
    int rc = fixture_open(&f,
                          &(fixture_opts){.path = path,
                                          .device = h->device,
                                          .features = h->features,
                                          .quantize = h->quantize,
                                          .act = h->act,
                                          .kv = h->kv,
                                          .page_tokens = h->device ? 32 : 16,
                                          .ranks = h->ranks},
                          e);
    *out = NULL;
    if (rc < 0) return rc;
    int64_t V = model_vocab(f.m);
    for (int i = 0; i < ROWS; i++)
        ids[i] = (int32_t)((i * 37 + 11) % V);
    *n = ROWS * V;
    *out = malloc(sizeof **out * (size_t)*n);
    /* Steps that are known by name write to where the first of them wrote. */
    float *step = malloc(sizeof *step * (size_t)*n);
    static const int64_t borders[] = {0, 15, ROWS - 3, ROWS - 2, ROWS - 1, ROWS};
    for (size_t i = 0; i + 1 < sizeof borders / sizeof *borders; i++) {
        int64_t from = borders[i], to = borders[i + 1];
        if (fixture_step(&f, ids, from, to, ROWS, step, e) < 0) fail_msg("%s: %s", name, e->msg);
        memcpy(*out + from * V, step, sizeof *step * (size_t)((to - from) * V));
    }
    free(step);
    fixture_close(&f);
    return 0;
}

static double worst(const float *a, const float *b, int64_t n)
{
    double w = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= w)) w = d; /* NaN stays */
    }
    return w;
}

/* RMS of the difference over that of b. */
static double share(const float *a, const float *b, int64_t n)
{
    double d = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        d += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        s += (double)b[i] * (double)b[i];
    }
    return sqrt(d / s);
}

/* Runs a case on 2 and 4 devices; where it cannot be divided, the error says by what number it can.
 */
static void divide(const char *name, const char *device, int most)
{
    float *one, *some;
    int64_t n, m;
    err e = {0};
    how h = {.device = device, .kv = KV_F32};
    CHECK_OK(logits(name, &h, &one, &n, &e));
    for (h.ranks = 2; h.ranks <= most; h.ranks *= 2) {
        int rc = logits(name, &h, &some, &m, &e);
        if (rc < 0) {
            print_message("%-20s %s x%d: %s\n", name, device ? device : "cpu", h.ranks, e.msg);
            assert_int_equal(rc, -ERR_UNSUPPORTED);
            assert_non_null(strstr(e.msg, "numbers of devices that"));
            assert_true(h.ranks > 2);
            e = (err){0};
            continue;
        }
        assert_int_equal(n, m);
        double d = worst(some, one, n);
        print_message("%-20s %s x%d: %.2e\n", name, device ? device : "cpu", h.ranks, d);
        assert_true(d <= LIMIT);
        free(some);
    }
    free(one);
}

static void every_architecture_on_the_cpu(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_cases; i++)
        divide(cases[i], NULL, 4);
}

static void every_architecture_on_a_gpu(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_cases; i++)
        divide(cases[i], gpu_device, 2);
}

/* Runs a quantized model on one device and on two. */
static double change(const char *name, const how *how_one, const float *plain, double *loss)
{
    float *one, *two;
    int64_t n;
    err e = {0};
    how h = *how_one;
    CHECK_OK(logits(name, &h, &one, &n, &e));
    h.ranks = 2;
    CHECK_OK(logits(name, &h, &two, &n, &e));
    double d = share(two, one, n);
    *loss = plain ? share(one, plain, n) : 0;
    free(one);
    free(two);
    return d;
}

static void check_scheme(const char *scheme, const char *device)
{
    float *plain;
    int64_t n;
    double loss;
    err e = {0};
    qspec s;
    how h = {.device = device, .kv = KV_F32};
    CHECK_OK(qspec_parse(scheme, &s, &e));
    CHECK_OK(logits("llama", &h, &plain, &n, &e));
    h.quantize = scheme;
    double d = change("llama", &h, plain, &loss);
    print_message("%-22s %s: loses %.4f, divided %.2e\n", scheme, device ? device : "cpu", loss, d);
    assert_true(d <= (qaxis_quantized(&s.a) ? loss : SMALL));
    free(plain);
}

static void every_scheme(void **state)
{
    (void)state;
    static const char *const more[] = {
        "w:int4,g16,asym",       "w:int3,g16", "w:int2,g8", "w:int4,g32",
        "w:fp8_e4m3,block16x16", "w:int8,g16"};
    const char *const devices[] = {NULL, gpu_device};
    for (int d = 0; d < 2; d++) {
        for (int i = 0; i < qspec_n_presets; i++)
            check_scheme(qspec_presets[i].name, devices[d]);
        for (size_t i = 0; i < sizeof more / sizeof *more; i++)
            check_scheme(more[i], devices[d]);
    }
}

/* Checkpoints of every dialect; where the size of a group is no divisor of a rank's columns or
 * rows, the error names the tensor and the numbers that do. */
static const struct {
    const char *name;
    double most;         /* of the change; activations that are quantized by token: see above */
    const char *refused; /* part of the error */
} checkpoints[] = {
    {"auto_round_mixed", 0, "down_proj: --tp 2 cannot take it apart (columns"},
    {"auto_round_mxfp4", SMALL, NULL},
    {"auto_round_w4_g64_asym", SMALL, NULL},
    {"awq_gemm_g64", SMALL, NULL},
    {"awq_gemv_fast_g128", 0,
     "a scale covers 128 columns, cut there); numbers of devices that can: none"},
    {"awq_gemv_g128", 0, "model.layers.0.mlp.down_proj: --tp 2"},
    {"bnb_fp4", SMALL, NULL},
    {"bnb_int8", SMALL, NULL},
    {"bnb_nf4_double", SMALL, NULL},
    {"ct_fp8_kv_head", 0.05, NULL},
    {"ct_mixed_w4_fp8", 0.05, NULL},
    {"ct_nvfp4", SMALL, NULL},
    {"ct_w3a16", 0, "down_proj: --tp 2"},
    {"ct_w4a16_asym_g128", 0, "down_proj: --tp 2"},
    {"ct_w4a8", 0, "down_proj: --tp 2"},
    {"deepseek_fp8_block", 0, "mlp.gate_proj: --tp 2 cannot take it apart (rows"},
    {"gpt_oss_mxfp4", SMALL, NULL},
    {"gptq_dynamic_rules", SMALL, NULL},
    {"gptq_moe_w4_g128", SMALL, NULL},
    {"gptq_v2_w4_g64_asym_desc_act", SMALL, NULL},
    {"gptq_w3_g64", SMALL, NULL},
    {"modelopt_fp8_kv", SMALL, NULL},
    {"modelopt_int8_sq", SMALL, NULL},
    {"modelopt_nvfp4", SMALL, NULL},
    {"modelopt_w4a8_awq", SMALL, NULL},
    {"quark_int8_asym", SMALL, NULL},
    {"quark_mxfp4_fp8", SMALL, NULL},
    {"quark_nvfp4", SMALL, NULL},
};

static void every_dialect(void **state)
{
    (void)state;
    const char *const devices[] = {NULL, gpu_device};
    for (size_t i = 0; i < 2 * sizeof checkpoints / sizeof *checkpoints; i++) {
        const char *name = checkpoints[i / 2].name, *why = checkpoints[i / 2].refused;
        how h = {.device = devices[i % 2], .kv = KV_F32, .stored = true};
        if (why) {
            float *out;
            int64_t n;
            err e = {0};
            h.ranks = 2;
            CHECK_ERR(logits(name, &h, &out, &n, &e), ERR_UNSUPPORTED, why);
            continue;
        }
        double loss, d = change(name, &h, NULL, &loss);
        print_message("%-30s %s: %.2e\n", name, h.device ? h.device : "cpu", d);
        assert_true(d <= checkpoints[i / 2].most);
    }
}

/* Every type of cache, with scales of single heads too: each rank stores its heads as one device
 * does. */
static void every_cache(void **state)
{
    (void)state;
    for (int t = 0; t < KV_TYPES; t++) {
        double loss;
        how h = {.kv = (kern_kv_type)t};
        /* A key that rounds the other way is worth one step of the type: 2^-9 for bf16. */
        double most = t == KV_F32 ? SMALL : t == KV_BF16 ? 5e-3 : 0.1;
        assert_true(change("llama", &h, NULL, &loss) <= most);
        assert_true(change("gemma2", &h, NULL, &loss) <= most);
        h.device = gpu_device;
        assert_true(change("llama", &h, NULL, &loss) <= most);
    }
    double loss;
    how h = {.kv = KV_FP8_E4M3, .stored = true};
    assert_true(change("modelopt_fp8_kv", &h, NULL, &loss) <= 0.1);
    assert_true(change("ct_fp8_kv_head", &h, NULL, &loss) <= 0.1);
}

/* bf16 between operators: sums of ranks are rounded to it too, 2^-9 of each lane. */
static void rounded_lanes(void **state)
{
    (void)state;
    static const char *const dense[] = {"llama",  "gemma2", "qwen3", "phi3",     "gpt2",
                                        "falcon", "cohere", "olmo2", "qwen3_vl", "starcoder2"};
    for (size_t i = 0; i < sizeof dense / sizeof *dense; i++) {
        double loss;
        how h = {.device = gpu_device, .act = KERN_ACT_AUTO, .kv = KV_BF16};
        double d = change(dense[i], &h, NULL, &loss);
        print_message("%-20s %s, bf16: %.2e\n", dense[i], gpu_device, d);
        assert_true(d <= 0.02);
        h.device = NULL; /* may take int8 in groups along K: a cut at their borders changes none */
        d = change(dense[i], &h, NULL, &loss);
        print_message("%-20s cpu, auto: %.2e\n", dense[i], d);
        assert_true(d <= 0.02);
    }
}

/* ---- refusals -----------------------------------------------------------------------------------
 */

static void refused(void **state)
{
    (void)state;
    float *out;
    int64_t n;
    err e = {0};
    how h = {.kv = KV_F32, .ranks = 3};
    CHECK_ERR(logits("llama", &h, &out, &n, &e), ERR_UNSUPPORTED,
              "--tp 3: 4 attention heads with 2 key/value heads are not divisible; numbers of "
              "devices that divide it: 2, 4");
    h.ranks = 8;
    CHECK_ERR(logits("llama", &h, &out, &n, &e), ERR_UNSUPPORTED, "--tp 8");
    h.ranks = 65;
    CHECK_ERR(logits("llama", &h, &out, &n, &e), ERR_USAGE, "65 devices for one model");
    h.ranks = -1;
    CHECK_ERR(logits("llama", &h, &out, &n, &e), ERR_USAGE, "-1 devices");
    h.ranks = 2;
    h.device = "cuda:x";
    CHECK_ERR(logits("llama", &h, &out, &n, &e), ERR_USAGE, "cuda:x");
}

/* ---- failures -----------------------------------------------------------------------------------
 */

static void *sum_of_two(void *arg)
{
    kern_dev *d = arg;
    float x[3] = {1, 2, (float)d->rank};
    err e = {0};
    kern_step_begin(d, 1, 0);
    kern_all_reduce(d, x, 3);
    int rc = kern_step_end(d, &e);
    if (rc == 0 && (x[0] != 2 || x[1] != 4 || x[2] != 1)) rc = 1;
    return (void *)(intptr_t)rc;
}

static void *fail_soon(void *arg)
{
    usleep(100000);
    kern_ranks_fail(arg);
    return NULL;
}

static intptr_t both(kern_dev *d, void *(*second)(void *))
{
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, second, kern_rank(d, 1)), 0);
    intptr_t rc = (intptr_t)sum_of_two(d);
    pthread_join(t, NULL);
    return rc;
}

static void a_rank_that_does_not_come(void **state)
{
    (void)state;
    kern_dev *d;
    err e = {0};
    CHECK_OK(kern_open(&d, &(kern_opts){.ranks = 2, .threads = 2}, &e));
    assert_int_equal(kern_n_ranks(d), 2);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(both(d, sum_of_two), 0);
        assert_int_equal(both(d, fail_soon), -ERR_DEVICE);
        CHECK_OK(kern_ranks_mend(d, &e));
    }
    assert_int_equal(both(d, sum_of_two), 0);
    kern_close(d);
}

static const struct kern_backend *whole_backend;

static int end_fails(kern_dev *d, err *e)
{
    d->be = whole_backend;
    return err_set(e, ERR_NOMEM, "made to fail");
}

static const char *launch_fails(const void *args, void *stream)
{
    (void)args, (void)stream;
    return "made to fail";
}

/* One rank of an emulated model fails, when its step is to run or in the middle of it, while the
 * other waits for its sum: the error is its own, nobody waits for ever, and the next step is as if
 * nothing had been. */
static void a_step_that_fails(void **state)
{
    (void)state;
    if (strcmp(gpu_device, "emulated") != 0) skip();
    err e = {0};
    fixture f;
    int32_t ids[ROWS];
    CHECK_OK(fixture_open(&f,
                          &(fixture_opts){.path = ROOT "llama",
                                          .device = gpu_device,
                                          .kv = KV_F32,
                                          .page_tokens = 32,
                                          .ranks = 2},
                          &e));
    int64_t V = model_vocab(f.m), n = ROWS * V;
    float *good = malloc(sizeof *good * (size_t)n), *again = malloc(sizeof *again * (size_t)n);
    for (int i = 0; i < ROWS; i++)
        ids[i] = (int32_t)((i * 37 + 11) % V);
    CHECK_OK(fixture_step(&f, ids, 0, ROWS, ROWS, good, &e));
    for (int bad = 0; bad < 2; bad++) {
        kern_dev *d = kern_rank(f.dev, bad);
        whole_backend = d->be;
        struct kern_backend broken = *whole_backend;
        broken.step_end = end_fails;
        d->be = &broken;
        CHECK_ERR(fixture_step(&f, ids, 0, ROWS, ROWS, again, &e), ERR_NOMEM, "made to fail");
        e = (err){0};
        memset(again, 0xff, sizeof *again * (size_t)n);
        CHECK_OK(fixture_step(&f, ids, 0, ROWS, ROWS, again, &e));
        assert_memory_equal(again, good, sizeof *good * (size_t)n);
    }
    for (int bad = 0; bad < 2; bad++) {
        gpu_dev *g = gpu__of(kern_rank(f.dev, bad));
        const gpu_api *api = g->api;
        gpu_api broken = *api;
        gpu_launch *table[GPU_N_OPS];
        memcpy(table, api->launch, sizeof table);
        table[GPU_OP_all_reduce] = launch_fails;
        broken.launch = table;
        g->api = &broken;
        CHECK_ERR(fixture_step(&f, ids, 0, ROWS, ROWS, again, &e), ERR_DEVICE,
                  "all_reduce: made to fail");
        g->api = api;
        e = (err){0};
        memset(again, 0xff, sizeof *again * (size_t)n);
        CHECK_OK(fixture_step(&f, ids, 0, ROWS, ROWS, again, &e));
        assert_memory_equal(again, good, sizeof *good * (size_t)n);
    }
    free(good);
    free(again);
    fixture_close(&f);
}

/* A tap sees the stream of rank 0, which is that of all. */
static void sum_up(void *arg, int layer, const float *x, int64_t T, int64_t hidden)
{
    double *sums = arg;
    for (int64_t i = 0; i < T * hidden; i++)
        sums[layer + 1] += fabs((double)x[i]);
}

static void taps(void **state)
{
    (void)state;
    const char *const devices[] = {NULL, gpu_device};
    for (int d = 0; d < 2; d++) {
        double sums[2][3] = {{0}};
        for (int ranks = 1; ranks <= 2; ranks++) {
            err e = {0};
            fixture f;
            int32_t ids[ROWS] = {1, 2, 3, 4, 5, 6, 7};
            CHECK_OK(fixture_open(&f,
                                  &(fixture_opts){.path = ROOT "llama",
                                                  .device = devices[d],
                                                  .kv = KV_F32,
                                                  .page_tokens = devices[d] ? 32 : 16,
                                                  .ranks = ranks},
                                  &e));
            model_set_tap(f.m, sum_up, sums[ranks - 1]);
            CHECK_OK(fixture_step(&f, ids, 0, ROWS, ROWS, NULL, &e));
            fixture_close(&f);
        }
        for (int i = 0; i < 3; i++)
            assert_true(fabs(sums[0][i] - sums[1][i]) <= 1e-5 * sums[0][i] && sums[0][i] > 0);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1) gpu_device = argv[1];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_architecture_on_the_cpu),
        cmocka_unit_test(every_scheme),
        cmocka_unit_test(every_dialect),
        cmocka_unit_test(every_cache),
        cmocka_unit_test(rounded_lanes),
        cmocka_unit_test(refused),
        cmocka_unit_test(a_rank_that_does_not_come),
        cmocka_unit_test(a_step_that_fails),
        cmocka_unit_test(taps),
        cmocka_unit_test(every_architecture_on_a_gpu),
    };
    return cmocka_run_group_tests(tests, find_cases, NULL);
}
