/* Whole models on a GPU: every case of tests/fixtures/arch against what the transformers library
 * computed, in f32 (spec) and in bf16 (auto), whole and in chunks; then one token a step, which is
 * the step that is known by name. The device is the first argument ("cuda:0"), without one the
 * emulation of the plain kernels. */
#include <dirent.h>
#include "check.h"
#include "model_fixture.h"

#define LIMIT 2e-3 /* of the CPU's goldens; f32 in another order of summation is far below */

static const char *device = "emulated";

typedef struct golden {
    st_file file;
    const float *logits;
    int32_t ids[128], more[128];
    int64_t T, V, n_more;
} golden;

static void golden_open(golden *g, const char *name)
{
    err e = {0};
    char path[256];
    snprintf(path, sizeof path, "tests/fixtures/arch/%s/golden.safetensors", name);
    *g = (golden){0};
    CHECK_OK(st_open(&g->file, path, &e));
    const st_tensor *in = fixture_tensor(&g->file, "input_ids"),
                    *lg = fixture_tensor(&g->file, "logits"),
                    *gr = fixture_tensor(&g->file, "greedy");
    g->T = in->shape[0];
    g->V = lg->shape[1];
    g->n_more = gr->shape[0];
    assert_true(g->T + g->n_more <= 128);
    memcpy(g->ids, in->data, 4 * (size_t)g->T);
    memcpy(g->more, gr->data, 4 * (size_t)g->n_more);
    g->logits = malloc(4 * (size_t)(g->T * g->V));
    memcpy((void *)(uintptr_t)g->logits, lg->data, 4 * (size_t)(g->T * g->V));
}

static void golden_close(golden *g)
{
    free((void *)(uintptr_t)g->logits);
    st_close(&g->file);
}

/* Largest error, and the largest logit beside it. */
static double worst(const float *a, const float *b, int64_t n, double *size)
{
    double w = 0;
    *size = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= w)) w = d; /* NaN stays */
        *size = fmax(*size, fabs((double)b[i]));
    }
    return w;
}

static fixture open_case(const char *name, kern_act act, kern_kv_type kv, int page_tokens)
{
    err e = {0};
    char path[256];
    fixture f;
    snprintf(path, sizeof path, "tests/fixtures/arch/%s", name);
    CHECK_OK(fixture_open(
        &f,
        &(fixture_opts){
            .path = path, .device = device, .act = act, .kv = kv, .page_tokens = page_tokens},
        &e));
    return f;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x != x || y < x ? 1 : y != y || x < y ? -1 : 0;
}
/* Of the worst errors of the rows, the one that half of the rows do not pass. */
static double median_row(const float *a, const float *b, int64_t T, int64_t V)
{
    double row[128], size;
    for (int64_t t = 0; t < T; t++)
        row[t] = worst(a + t * V, b + t * V, V, &size);
    qsort(row, (size_t)T, sizeof *row, by_size);
    return row[T / 2];
}

typedef struct result { /* in shares of the largest logit */
    double worst, median_row;
} result;
static result run_case(const char *name, kern_act act, kern_kv_type kv, int64_t chunk, bool greedy)
{
    err e = {0};
    golden g;
    double size;
    golden_open(&g, name);
    fixture f = open_case(name, act, kv, 32);
    int64_t V = g.V;
    assert_int_equal(V, model_vocab(f.m));
    float *out = malloc(sizeof *out * (size_t)(g.T * V));
    for (int64_t at = 0; at < g.T; at += chunk)
        CHECK_OK(fixture_step(&f, g.ids, at, at + chunk < g.T ? at + chunk : g.T, g.T, out + at * V,
                              &e));
    double d = worst(out, g.logits, g.T * V, &size);
    result r = {d / size, median_row(out, g.logits, g.T, V) / size};
    print_message("%-20s %-5s chunk %2d: logits %.2e of %.1f, median of rows %.2e\n", name,
                  kern_act_name(act), (int)chunk, d, size, r.median_row * size);
    memmove(out, out + (g.T - 1) * V, sizeof *out * (size_t)V);
    int64_t n = g.T;
    for (int64_t i = 0; greedy && i < g.n_more; i++, n++) {
        g.ids[n] = fixture_argmax(out, V);
        assert_int_equal(g.ids[n], g.more[i]);
        if (model_rope_key(f.m, n + 1) != model_rope_key(f.m, n)) break; /* begun anew elsewhere */
        CHECK_OK(fixture_step(&f, g.ids, n, n + 1, n + 1, out, &e));
    }
    free(out);
    fixture_close(&f);
    golden_close(&g);
    return r;
}

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
    DIR *d = opendir("tests/fixtures/arch");
    assert_non_null(d);
    for (struct dirent *f; (f = readdir(d)) != NULL;)
        if (f->d_name[0] != '.' && !strchr(f->d_name, '.') && n_cases < MAX_CASES)
            snprintf(cases[n_cases++], sizeof cases[0], "%.60s", f->d_name);
    closedir(d);
    qsort(cases, n_cases, sizeof cases[0], by_name);
    return n_cases ? 0 : -1;
}

static void exact(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_cases; i++) {
        assert_true(run_case(cases[i], KERN_ACT_SPEC, KV_F32, 64, true).worst <= LIMIT);
        assert_true(run_case(cases[i], KERN_ACT_SPEC, KV_F32, 7, false).worst <= LIMIT);
    }
}

/* bf16 between the operators and in the cache: what rounding costs a random model of few layers.
 * Where it turns a router's choice round, the row is another one from there on: bounds are on half
 * of the rows, and on the rest of what hardly differs. */
static void rounded(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_cases; i++) {
        result r = run_case(cases[i], KERN_ACT_AUTO, KV_BF16, 64, false);
        assert_true(r.median_row <= 0.03);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1) device = argv[1];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact),
        cmocka_unit_test(rounded),
    };
    return cmocka_run_group_tests(tests, find_cases, NULL);
}
