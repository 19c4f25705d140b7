/* Models against what the transformers library computed from the same files (tests/fixtures/arch,
 * models/millet-7m), and against a float64 forward pass for two trained models. */
#include "check.h"
#include "base/json.h"
#include "model_fixture.h"

#define LIMIT 2e-3

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

/* Greedy continuation one token a step from a cache that holds n ids. */
static int greedy(fixture *f, int32_t *ids, int64_t n, int64_t more, float *logits, err *e)
{
    int64_t V = model_vocab(f->m);
    for (int64_t i = 0; i < more; i++) {
        ids[n + i] = fixture_argmax(logits, V);
        int rc = fixture_step(f, ids, n + i, n + i + 1, logits, e);
        if (rc < 0) return rc;
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
    CHECK_OK(fixture_open(&f, &(fixture_opts){.path = path, .features = features, .kv = KV_F32}, &e));
    const st_tensor *in = fixture_tensor(&g, "input_ids"), *lg = fixture_tensor(&g, "logits"),
                    *hid = fixture_tensor(&g, "hidden_first"), *gr = fixture_tensor(&g, "greedy");
    int64_t T = in->shape[0], V = lg->shape[1], more = gr->shape[0];
    assert_int_equal(V, model_vocab(f.m));
    memcpy(ids, in->data, 4 * (size_t)T);
    float *out = malloc(sizeof *out * (size_t)(T * V)), *hidden = malloc(sizeof *hidden * 64 * 64);
    seen s = {.first = hidden};
    model_set_tap(f.m, first_layer, &s);
    for (int64_t at = 0; at < T; at += chunk)
        CHECK_OK(fixture_step(&f, ids, at, at + chunk < T ? at + chunk : T, out + at * V, &e));
    model_set_tap(f.m, NULL, NULL);
    double dl = worst(out, lg->data, T * V), dh = worst(hidden, hid->data, s.rows * s.width);
    print_message("%-18s %-8s chunk %2d: logits %.2e, first layer %.2e\n", name, features, (int)chunk, dl,
                  dh);
    assert_int_equal(s.rows, T);
    assert_true(dl <= LIMIT);
    assert_true(dh <= LIMIT);
    CHECK_OK(greedy(&f, ids, T, more, out + (T - 1) * V, &e));
    assert_memory_equal(ids + T, gr->data, 4 * (size_t)more);
    free(out);
    free(hidden);
    fixture_close(&f);
    st_close(&g);
}

static const char *const cases[] = {"llama",       "llama3_rope", "llama_dynamic",
                                    "llama_linear_rope", "llama_tied",  "llama_yarn",
                                    "mistral_swa", "qwen2",       "qwen3"};

static void golden_whole(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_case(cases[i], "auto", 40);
        check_case(cases[i], "portable", 40);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
