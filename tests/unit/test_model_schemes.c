/* Every architecture in every weight scheme: quantized while it is loaded, and quantized to a
 * checkpoint that is loaded again. The loss is printed for each; weights here are random, so it is
 * the arithmetic that is judged, not a trained model's tolerance. */
#include <dirent.h>
#include <math.h>
#include "check.h"
#include "bake/bake.h"
#include "model_fixture.h"

#define ROOT      "tests/fixtures/arch/"
#define MAX_CASES 128
static char cases[MAX_CASES][64];
static size_t n_cases;

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

static int find_cases(void **state)
{
    (void)state;
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

typedef struct traits {
    bool chaotic; /* in any layer: a choice of experts, which may flip, or a recurrent state, in
                     which errors gather: either costs more than any rounding */
    bool written_whole; /* all that is quantized at load can be written: no linears stored [K, N],
                           no experts in one tensor */
} traits;

static traits traits_of(const char *path)
{
    err e = {0};
    ckpt *c;
    arch_model *m;
    CHECK_OK(ckpt_open(&c, path, &e));
    CHECK_OK(arch_open(&m, ckpt_cfg(c), c, &e));
    traits t = {.written_whole = !m->linear_transposed};
    for (int i = 0; i < m->n_layers; i++)
        t.chaotic = t.chaotic || m->layers[i].ffn == ARCH_MOE || m->layers[i].mix == ARCH_DELTA;
    if (m->moe.fused) t.written_whole = false;
    arch_close(m);
    ckpt_close(c);
    return t;
}

/* Logits of 40 fixed ids; returns how many numbers. */
static int64_t logits(const char *path, const char *quantize, float **out)
{
    err e = {0};
    fixture f;
    int32_t ids[40];
    CHECK_OK(
        fixture_open(&f, &(fixture_opts){.path = path, .quantize = quantize, .kv = KV_F32}, &e));
    int64_t V = model_vocab(f.m);
    for (int i = 0; i < 40; i++)
        ids[i] = (int32_t)((i * 37 + 11) % V);
    *out = malloc(sizeof **out * (size_t)(40 * V));
    CHECK_OK(fixture_step(&f, ids, 0, 40, 40, *out, &e));
    fixture_close(&f);
    return 40 * V;
}

/* RMS of the difference over the RMS of the plain logits. */
static double loss(const float *a, const float *plain, int64_t n)
{
    double d = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        d += ((double)a[i] - (double)plain[i]) * ((double)a[i] - (double)plain[i]);
        s += (double)plain[i] * (double)plain[i];
    }
    return sqrt(d / s);
}

static const struct {
    const char *spec;
    double most; /* of any case here, with a third of room */
} schemes[] = {{"fp8", 0.15}, {"int8", 0.10}, {"w:int4,g32", 0.60}, {"w:mxfp4,g32", 0.90}};
#define N_SCHEMES (sizeof schemes / sizeof *schemes)

static void each_is_quantized_while_loading(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_cases; i++) {
        char path[256], line[256] = "";
        float *plain, *q;
        size_t at = 0;
        snprintf(path, sizeof path, ROOT "%.60s", cases[i]);
        bool chaotic = traits_of(path).chaotic;
        int64_t n = logits(path, NULL, &plain);
        for (size_t s = 0; s < N_SCHEMES; s++) {
            logits(path, schemes[s].spec, &q);
            double l = loss(q, plain, n);
            at += (size_t)snprintf(line + at, sizeof line - at, "  %s %.4f", schemes[s].spec, l);
            free(q);
            double most = chaotic ? 1.0 : schemes[s].most;
            if (!(l > 1e-4 && l < most))
                fail_msg("%s: %s loses %.4f of the logits", cases[i], schemes[s].spec, l);
        }
        print_message("%-18s%s\n", cases[i], line);
        free(plain);
    }
}

/* The written checkpoint gives the very logits of quantizing at load, where all that is quantized
 * at load can be written. */
static void each_is_written_and_read_again(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_cases; i++) {
        char path[256], dir[] = "/tmp/tare_arch_XXXXXX", out[64];
        float *online, *again;
        err e = {0};
        bake_report r = {0};
        snprintf(path, sizeof path, ROOT "%.60s", cases[i]);
        if (!traits_of(path).written_whole) continue;
        assert_non_null(mkdtemp(dir));
        snprintf(out, sizeof out, "%s/q", dir);
        bake_opts o = {.model = path, .out = out, .scheme = "w:int4,g32", .algo = "rtn"};
        CHECK_OK(bake_quantize(&o, &r, &e));
        bake_report_free(&r);
        int64_t n = logits(path, o.scheme, &online);
        assert_int_equal(logits(out, NULL, &again), n);
        double l = loss(again, online, n);
        if (l > 1e-6) fail_msg("%s: written and loaded differ by %.2e", cases[i], l);
        free(online);
        free(again);
        char *rm = xasprintf("rm -rf %s", dir);
        assert_int_equal(system(rm), 0);
        free(rm);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_is_quantized_while_loading),
        cmocka_unit_test(each_is_written_and_read_again),
    };
    return cmocka_run_group_tests(tests, find_cases, NULL);
}
