/* Head sizes that no KV block divides (80, 96, 100) in a whole model of one layer whose keys all
 * lie near 5.5: every cache format runs, every instruction set agrees with the plain C twin, and
 * the loss against an f32 cache is that of the format, not of padding lanes. */
#include "check.h"
#include <unistd.h>
#include "base/file.h"
#include "model_fixture.h"
#include "num/num.h"

enum { HIDDEN = 64, HEADS = 2, FFN = 32, V = 128, T = 40 };

static uint64_t rng = 7;
static float uniform(void)
{
    rng = rng * 6364136223846793005u + 1442695040888963407u;
    return (float)(rng >> 40) / 16777216.0f - 0.5f;
}

typedef struct spec {
    char name[96];
    int64_t rows, cols; /* cols 0 = a vector */
    float base, spread;
} spec;

static void write_model(const char *dir, int D)
{
    err e = {0};
    char text[1024], *path = file_join(dir, "config.json"),
                     *weights = file_join(dir, "model.safetensors");
    const char *L = "model.layers.0.";
    spec s[16];
    int n = 0;
    st_writer *w;
    snprintf(
        text, sizeof text,
        "{\"architectures\":[\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\",\"hidden_size\":%d,"
        "\"intermediate_size\":%d,\"num_hidden_layers\":1,\"num_attention_heads\":%d,\"num_key_"
        "value_heads\":1,"
        "\"head_dim\":%d,\"vocab_size\":%d,\"max_position_embeddings\":256,\"rms_norm_eps\":1e-6,"
        "\"rope_theta\":1e30,\"hidden_act\":\"silu\",\"tie_word_embeddings\":true,\"torch_dtype\":"
        "\"float32\"}",
        HIDDEN, FFN, HEADS, D, V);
    CHECK_OK(file_write_atomic(path, text, strlen(text), &e));
#define ADD(r, c, b, sp, ...)                                                                      \
    do {                                                                                           \
        s[n] = (spec){.rows = (r), .cols = (c), .base = (b), .spread = (sp)};                      \
        snprintf(s[n++].name, sizeof s[0].name, __VA_ARGS__);                                      \
    } while (0)
    ADD(V, HIDDEN, 0, 2, "model.embed_tokens.weight");
    ADD(HIDDEN, 0, 1, 0.1f, "%sinput_layernorm.weight", L);
    ADD(HIDDEN, 0, 1, 0.1f, "%spost_attention_layernorm.weight", L);
    ADD(HEADS * D, HIDDEN, 0, 0.3f, "%sself_attn.q_proj.weight", L);
    ADD(HEADS * D, 0, 0, 0.3f, "%sself_attn.q_proj.bias", L);
    ADD(D, HIDDEN, 0, 0.05f, "%sself_attn.k_proj.weight", L);
    ADD(D, 0, 5.5f, 0.5f, "%sself_attn.k_proj.bias", L);
    ADD(D, HIDDEN, 0, 0.05f, "%sself_attn.v_proj.weight", L);
    ADD(D, 0, 5.5f, 0.5f, "%sself_attn.v_proj.bias", L);
    ADD(HIDDEN, HEADS * D, 0, 0.1f, "%sself_attn.o_proj.weight", L);
    ADD(FFN, HIDDEN, 0, 0.2f, "%smlp.gate_proj.weight", L);
    ADD(FFN, HIDDEN, 0, 0.2f, "%smlp.up_proj.weight", L);
    ADD(HIDDEN, FFN, 0, 0.2f, "%smlp.down_proj.weight", L);
    ADD(HIDDEN, 0, 1, 0.1f, "model.norm.weight");
    CHECK_OK(st_writer_open(&w, weights, &e));
    for (int i = 0; i < n; i++) {
        int64_t shape[2] = {s[i].rows, s[i].cols};
        CHECK_OK(st_writer_declare(w, s[i].name, NUM_F32, s[i].cols ? 2 : 1, shape, &e));
    }
    CHECK_OK(st_writer_begin(w, &e));
    for (int i = 0; i < n; i++)
        for (int64_t k = 0; k < s[i].rows * (s[i].cols ? s[i].cols : 1); k++) {
            float x = s[i].base + 2 * s[i].spread * uniform();
            CHECK_OK(st_writer_data(w, &x, sizeof x, &e));
        }
    CHECK_OK(st_writer_commit(&w, &e));
    free(path);
    free(weights);
}

static double run(const char *dir, const char *features, kern_kv_type kv, const float *ref,
                  float *out)
{
    err e = {0};
    fixture f;
    int32_t ids[T];
    double sum = 0, all = 0;
    for (int i = 0; i < T; i++)
        ids[i] = (i * 37 + 11) % V;
    CHECK_OK(fixture_open(
        &f, &(fixture_opts){.path = dir, .features = features, .kv = kv, .threads = 2}, &e));
    /* In two chunks and a single token, so that cached tokens are read in all ways. */
    CHECK_OK(fixture_step(&f, ids, 0, 21, T, out, &e));
    CHECK_OK(fixture_step(&f, ids, 21, T - 1, T, out + 21 * V, &e));
    CHECK_OK(fixture_step(&f, ids, T - 1, T, T, out + (T - 1) * V, &e));
    assert_int_equal(model_kv_clipped(f.m), 0);
    fixture_close(&f);
    for (int i = 0; i < T * V; i++) {
        assert_true(isfinite(out[i]));
        if (!ref) continue;
        sum += pow((double)out[i] - (double)ref[i], 2);
        all += pow((double)ref[i], 2);
    }
    return ref ? sqrt(sum / all) : 0;
}

static void odd_head_sizes(void **state)
{
    (void)state;
    static const int dims[] = {80, 96, 100};
    /* share of the logits' size that each format may cost here */
    static const double limit[KV_TYPES] = {
        [KV_BF16] = 0.002, [KV_FP8_E4M3] = 0.025, [KV_FP8_E5M2] = 0.05,
        [KV_INT8] = 0.001, [KV_FP4] = 0.1,        [KV_F32] = 1e-5};
    static float ref[T * V], out[T * V], twin[T * V];
    for (int d = 0; d < 3; d++) {
        err e = {0};
        char dir[] = "/tmp/tare_dims_XXXXXX";
        assert_non_null(mkdtemp(dir));
        write_model(dir, dims[d]);
        run(dir, "portable", KV_F32, NULL, ref);
        for (int t = 0; t < KV_TYPES; t++) {
            run(dir, "portable", (kern_kv_type)t, NULL, twin);
            double loss = run(dir, "auto", (kern_kv_type)t, ref, out), apart = 0;
            for (int i = 0; i < T * V; i++)
                apart = fmax(apart, fabs((double)out[i] - (double)twin[i]));
            print_message("head size %3d, cache %-9s loss %.5f, from the twin %.1e\n", dims[d],
                          kv_formats[t].name, loss, apart);
            assert_int_equal(kv_formats[t].type, t);
            assert_true(loss <= limit[t]);
            assert_true(apart <= 1e-3);
        }
        CHECK_OK(file_remove_tree(dir, &e));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(odd_head_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
