/* Checkpoints of every quantizing library on a GPU: the models of tests/fixtures/quant with the
 * layouts that the GPU chooses, against the same with plain kernels alone and against f32 on the
 * CPU; inputs that become codes make much of a last digit, so that models which have them are held
 * against the first alone. The device is the first argument ("cuda:0"), without one the emulation.
 */
#include <dirent.h>
#include "check.h"
#include "kern/gpu/linear.h"
#include "model_fixture.h"

enum { T = 24, MAX_CASES = 128 };

static const char *device = "emulated";
static char cases[MAX_CASES][64];
static size_t n_cases;
static long packed_lines;

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

static int find_cases(void **state)
{
    (void)state;
    DIR *d = opendir("tests/fixtures/quant");
    assert_non_null(d);
    for (struct dirent *f; (f = readdir(d)) != NULL;)
        if (!strchr(f->d_name, '.') && n_cases < MAX_CASES)
            snprintf(cases[n_cases++], sizeof cases[0], "%.60s", f->d_name);
    closedir(d);
    qsort(cases, n_cases, sizeof cases[0], by_name);
    return n_cases ? 0 : -1;
}

static void print_choices(const model *m)
{
    const model_report_line *line;
    int n = model_report(m, &line);
    for (int i = 0; i < n; i++) {
        const kern_choice *c = &line[i].choice[0];
        packed_lines += !strncmp(c->layout, "packed", 6);
        print_message("    %-16s %-12s %-28s %s%s%s\n", line[i].what, c->row, c->layout, c->act,
                      *c->refused ? "; " : "", c->refused);
    }
}

static const gpu_layout none; /* none of the list but the last */
static void plain_only(kern_dev *d)
{
    gpu__of(d)->only = &none;
}

/* Logits of T tokens, chunk at a time; returns the size of the vocabulary, 0: not taken. */
static int64_t logits(const char *name, const char *dev, kern_act act, int64_t chunk, bool plain,
                      bool *coarse, float **out)
{
    err e = {0};
    fixture f;
    char path[256];
    int32_t ids[T];
    snprintf(path, sizeof path, "tests/fixtures/quant/%s", name);
    int rc = fixture_open(&f,
                          &(fixture_opts){.path = path,
                                          .device = dev,
                                          .act = act,
                                          .kv = KV_F32,
                                          .page_tokens = 32,
                                          .opened = plain ? plain_only : NULL},
                          &e);
    if (rc < 0) {
        print_message("%s: %s\n", name, e.msg);
        assert_int_equal(e.code, ERR_UNSUPPORTED);
        return 0;
    }
    const int64_t V = model_vocab(f.m);
    *out = malloc(sizeof **out * (size_t)(T * V));
    for (int i = 0; i < T; i++)
        ids[i] = (int32_t)((i * 7919 + 3) % V);
    for (int64_t at = 0; at < T; at += chunk)
        CHECK_OK(fixture_step(&f, ids, at, at + chunk < T ? at + chunk : T, T, *out + at * V, &e));
    const qspec spec = model_spec(f.m);
    *coarse = qaxis_quantized(&spec.a);
    if (dev && chunk == T && !plain) print_choices(f.m);
    fixture_close(&f);
    return V;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x != x || y < x ? 1 : y != y || x < y ? -1 : 0;
}

/* The row in the middle of those sorted by their largest difference, as a share of the largest
 * logit. */
static double median_row(const float *a, const float *b, int64_t V)
{
    double row[T], size = 0;
    for (int64_t t = 0; t < T; t++) {
        row[t] = 0;
        for (int64_t v = 0; v < V; v++) {
            double d = fabs((double)a[t * V + v] - (double)b[t * V + v]);
            if (!(d <= row[t])) row[t] = d; /* NaN stays */
            size = fmax(size, fabs((double)b[t * V + v]));
        }
    }
    qsort(row, T, sizeof *row, by_size);
    return row[T / 2] / size;
}

static void compare(const char *what, const char *name, const float *got, const float *want,
                    int64_t V, double most)
{
    const double off = median_row(got, want, V);
    print_message("  %s: median of rows %.2e\n", what, off);
    if (!(off <= most)) fail_msg("%s, %s: off by %.3g", name, what, off);
}

static void test_dialects(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_cases; i++) {
        float *f32 = NULL, *plain = NULL, *whole = NULL, *parts = NULL;
        bool coarse = false;
        print_message("%s\n", cases[i]);
        const int64_t V = logits(cases[i], NULL, KERN_ACT_SPEC, T, false, &coarse, &f32);
        if (!V) continue;
        logits(cases[i], device, KERN_ACT_AUTO, T, true, &coarse, &plain);
        logits(cases[i], device, KERN_ACT_AUTO, T, false, &coarse, &whole);
        logits(cases[i], device, KERN_ACT_AUTO, 5, false, &coarse, &parts);
        compare("plain kernels", cases[i], whole, plain, V, 0.01);
        compare("five at a time", cases[i], parts, plain, V, 0.01);
        if (!coarse) compare("f32", cases[i], whole, f32, V, 0.03);
        free(f32);
        free(plain);
        free(whole);
        free(parts);
    }
    assert_true(packed_lines > 0);
}

int main(int argc, char **argv)
{
    if (argc > 1) device = argv[1];
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_dialects)};
    return cmocka_run_group_tests(tests, find_cases, NULL);
}
