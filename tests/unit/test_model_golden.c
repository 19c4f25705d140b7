/* Models against what the transformers library computed from the same files (tests/fixtures/arch,
 * models/millet-7m), and against a float64 forward pass for two trained models. */
#include <dirent.h>
#include "check.h"
#include "base/json.h"
#include "model_fixture.h"

#define LIMIT 1e-4 /* what fp32 in another order of summation may cost here */

static double worst(const float *a, const void *golden, int64_t n)
{
    double w = 0;
    for (int64_t i = 0; i < n; i++) {
        float g;
        memcpy(&g, (const char *)golden + 4 * i, 4);
        double d = fabs((double)a[i] - (double)g);
        if (!(d <= w)) w = d; /* NaN stays */
    }
    return w;
}

typedef struct seen {
    float *first;
    int64_t rows, width;
} seen;

static void first_layer(void *arg, int layer, const float *x, int64_t T, int64_t hidden)
{
    seen *s = arg;
    if (layer != 0 || s->rows + T > 64) return;
    memcpy(s->first + s->rows * hidden, x, sizeof(float) * (size_t)(T * hidden));
    s->rows += T;
    s->width = hidden;
}

/* Greedy continuation, a token a step; where the rotary table changes with the length, the cache is
 * computed again. out holds the last logits and room for chunk rows. */
static int greedy(fixture *f, int32_t *ids, int64_t n, int64_t more, float *out, err *e)
{
    int64_t V = model_vocab(f->m), rows = 40;
    for (int64_t i = 0; i < more; i++, n++) {
        ids[n] = fixture_argmax(out, V);
        bool again = model_rope_key(f->m, n + 1) != model_rope_key(f->m, n);
        int64_t from = again ? 0 : n, to = from;
        for (; from <= n; from = to) {
            to = from + rows < n + 1 ? from + rows : n + 1;
            int rc = fixture_step(f, ids, from, to, n + 1, out, e);
            if (rc < 0) return rc;
        }
        int64_t last = again ? n % rows : 0;
        if (last) memmove(out, out + last * V, sizeof *out * (size_t)V);
    }
    return 0;
}

static void check_case(const char *name, const char *features, int64_t chunk)
{
    err e = {0};
    char path[256];
    st_file g = {0};
    fixture f;
    int32_t ids[128];
    snprintf(path, sizeof path, "tests/fixtures/arch/%s/golden.safetensors", name);
    CHECK_OK(st_open(&g, path, &e));
    snprintf(path, sizeof path, "tests/fixtures/arch/%s", name);
    CHECK_OK(
        fixture_open(&f, &(fixture_opts){.path = path, .features = features, .kv = KV_F32}, &e));
    const st_tensor *in = fixture_tensor(&g, "input_ids"), *lg = fixture_tensor(&g, "logits"),
                    *hid = fixture_tensor(&g, "hidden_first"), *gr = fixture_tensor(&g, "greedy");
    int64_t T = in->shape[0], V = lg->shape[1], more = gr->shape[0];
    assert_int_equal(V, model_vocab(f.m));
    memcpy(ids, in->data, 4 * (size_t)T);
    float *out = malloc(sizeof *out * (size_t)(T * V)), *hidden = malloc(sizeof *hidden * 64 * 64);
    seen s = {.first = hidden};
    model_set_tap(f.m, first_layer, &s);
    for (int64_t at = 0; at < T; at += chunk)
        CHECK_OK(fixture_step(&f, ids, at, at + chunk < T ? at + chunk : T, T, out + at * V, &e));
    model_set_tap(f.m, NULL, NULL);
    double dl = worst(out, lg->data, T * V), dh = worst(hidden, hid->data, s.rows * s.width);
    print_message("%-18s %-8s chunk %2d: logits %.2e, first layer %.2e\n", name, features,
                  (int)chunk, dl, dh);
    assert_int_equal(s.rows, T);
    assert_true(dl <= LIMIT);
    assert_true(dh <= LIMIT);
    memmove(out, out + (T - 1) * V, sizeof *out * (size_t)V);
    CHECK_OK(greedy(&f, ids, T, more, out, &e));
    assert_memory_equal(ids + T, gr->data, 4 * (size_t)more);
    free(out);
    free(hidden);
    fixture_close(&f);
    st_close(&g);
}

#define MAX_CASES 128
static char cases[MAX_CASES][64];
static size_t n_cases;

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

/* Every folder of tests/fixtures/arch, and every architecture in at least one of them. */
static int find_cases(void **state)
{
    (void)state;
    bool *covered = calloc((size_t)arch_n_rows, sizeof *covered);
    DIR *d = opendir("tests/fixtures/arch");
    assert_non_null(d);
    for (struct dirent *f; (f = readdir(d)) != NULL;)
        if (f->d_name[0] != '.' && !strchr(f->d_name, '.') && n_cases < MAX_CASES)
            snprintf(cases[n_cases++], sizeof cases[0], "%.60s", f->d_name);
    closedir(d);
    qsort(cases, n_cases, sizeof cases[0], by_name);
    for (size_t i = 0; i < n_cases; i++) {
        char path[256];
        ckpt *c;
        const arch_row *row;
        err e = {0};
        snprintf(path, sizeof path, "tests/fixtures/arch/%s", cases[i]);
        CHECK_OK(ckpt_open(&c, path, &e));
        CHECK_OK(arch_find(ckpt_cfg(c), &row, &e));
        covered[row - arch_rows] = true;
        ckpt_close(c);
    }
    for (int i = 0; i < arch_n_rows; i++)
        if (!covered[i]) fail_msg("no case in tests/fixtures/arch is a %s", arch_rows[i].name);
    free(covered);
    return 0;
}

static void golden_whole(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_cases; i++) {
        static const char *const sets[] = {"auto", "amx", "avx512", "avx2", "portable"};
        for (size_t k = 0; k < sizeof sets / sizeof *sets; k++) {
            uint32_t bits;
            if (cpu_parse(sets[k], &bits, NULL) == 0) check_case(cases[i], sets[k], 40);
        }
    }
}

/* A prompt cut into chunks gives the same numbers as one that is not. */
static void golden_chunks(void **state)
{
    (void)state;
    static const int64_t chunks[] = {1, 7, 16, 33};
    for (size_t i = 0; i < n_cases; i++)
        for (size_t k = 0; k < sizeof chunks / sizeof *chunks; k++)
            check_case(cases[i], "auto", chunks[k]);
}

static const char *const millet = "models/millet-7m";

static void millet_golden(void **state)
{
    (void)state;
    err e = {0};
    st_file g = {0};
    json *j = NULL;
    fixture f;
    CHECK_OK(st_open(&g, "models/millet-7m/millet_golden.safetensors", &e));
    CHECK_OK(json_parse_file(&j, "models/millet-7m/millet_golden.json", &e));
    CHECK_OK(fixture_open(
        &f,
        &(fixture_opts){
            .path = millet, .features = "auto", .kv = KV_F32, .max_rows = 512, .tokens = 1024},
        &e));
    int64_t V = model_vocab(f.m);
    float *out = malloc(sizeof *out * (size_t)(512 * V));
    int n = 0;
    for (const json *c = j->child; c; c = c->next, n++) {
        char name[32];
        int32_t ids[1024];
        snprintf(name, sizeof name, "ids.%d", n);
        const st_tensor *in = fixture_tensor(&g, name);
        snprintf(name, sizeof name, "logits.%d", n);
        const st_tensor *lg = fixture_tensor(&g, name);
        int64_t T = in->shape[0], rows = lg->shape[0];
        memcpy(ids, in->data, 4 * (size_t)T);
        CHECK_OK(fixture_step(&f, ids, 0, T, T, out, &e));
        double d = worst(out + (T - rows) * V, lg->data, rows * V);
        print_message("millet-7m prompt %d (%d ids): logits %.2e\n", n, (int)T, d);
        assert_true(d <= LIMIT);
        memmove(out, out + (T - 1) * V, sizeof *out * (size_t)V);
        const json *want = json_get(c, "greedy_ids");
        int more = cJSON_GetArraySize(want), k = 0;
        CHECK_OK(greedy(&f, ids, T, more, out, &e));
        for (const json *w = want->child; w; w = w->next, k++)
            assert_int_equal(ids[T + k], w->valueint);
    }
    assert_int_equal(n, 8);
    free(out);
    json_drop(j);
    fixture_close(&f);
    st_close(&g);
}

/* Greedy ids of a float64 forward pass, as far as its margin is above the noise of fp32. */
static void check_trained(const char *name)
{
    err e = {0};
    char path[256];
    json *j = NULL;
    fixture f;
    int runs = 0, ids_seen = 0;
    snprintf(path, sizeof path, "tests/fixtures/tiny/%s/reference.json", name);
    CHECK_OK(json_parse_file(&j, path, &e));
    snprintf(path, sizeof path, "tests/fixtures/tiny/%s", name);
    CHECK_OK(fixture_open(&f, &(fixture_opts){.path = path, .features = "auto", .kv = KV_F32}, &e));
    int64_t V = model_vocab(f.m);
    float *out = malloc(sizeof *out * (size_t)(64 * V));
    for (const json *c = json_get(j, "greedy")->child; c; c = c->next, runs++) {
        int32_t ids[256];
        int n = 0;
        for (const json *w = json_get(c, "prompt_ids")->child; w; w = w->next)
            ids[n++] = w->valueint;
        CHECK_OK(fixture_step(&f, ids, 0, n, n, out, &e));
        memmove(out, out + (n - 1) * V, sizeof *out * (size_t)V);
        const json *margin = json_get(c, "top1_minus_top2_logit")->child;
        for (const json *w = json_get(c, "new_ids")->child; w; w = w->next, margin = margin->next) {
            int32_t best = fixture_argmax(out, V);
            if (margin->valuedouble < 1e-3) break;
            assert_int_equal(best, w->valueint);
            ids[n++] = best;
            ids_seen++;
            CHECK_OK(fixture_step(&f, ids, n - 1, n, n, out, &e));
        }
    }
    print_message("%s: %d ids of %d runs equal\n", name, ids_seen, runs);
    assert_int_equal(runs, 8);
    assert_true(ids_seen > 300);
    free(out);
    json_drop(j);
    fixture_close(&f);
}

static void trained_models(void **state)
{
    (void)state;
    check_trained("stories260K");
    check_trained("tinystories-656k");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_whole),
        cmocka_unit_test(golden_chunks),
        cmocka_unit_test(millet_golden),
        cmocka_unit_test(trained_models),
    };
    return cmocka_run_group_tests(tests, find_cases, NULL);
}
