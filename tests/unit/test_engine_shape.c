/* Engines without files: a shape's random weights, prompts that count as computed, the filled cache
 * and what is given back of it, refusals. */
#include <string.h>
#include <unistd.h>
#include "check.h"
#include "engine/engine.h"

#define MILLET "models/millet-7m"
#define HEAD                                                                                       \
    "\"hidden_size\":128,\"intermediate_size\":256,\"num_hidden_layers\":4,"                       \
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":64,\"vocab_size\":256,"      \
    "\"max_position_embeddings\":1024,\"rms_norm_eps\":1e-06,\"rope_theta\":10000.0,"
static const char llama[] = "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
                            "\"hidden_act\":\"silu\"," HEAD "\"tie_word_embeddings\":true}";
static const char gemma[] =
    "{\"architectures\":[\"Gemma3ForCausalLM\"],\"model_type\":\"gemma3_text\"," HEAD
    "\"hidden_activation\":\"gelu_pytorch_tanh\",\"rope_local_base_freq\":10000.0,"
    "\"sliding_window\":32,\"sliding_window_pattern\":2,\"query_pre_attn_scalar\":64,"
    "\"tie_word_embeddings\":true}";

static engine *open_shape(const char *shape, const char *scheme, int64_t total)
{
    engine *en = NULL;
    err e = {0};
    engine_opts o = {.model = "tiny",
                     .shape = shape,
                     .quantization = scheme,
                     .threads = 2,
                     .max_model_len = 400,
                     .max_running = 2,
                     .max_total_tokens = total};
    if (engine_open(&en, &o, &e) < 0) fail_msg("%s", e.msg);
    return en;
}

static int generate(engine *en, int64_t n_prompt, int64_t tokens, bool assume, gen_result *out,
                    err *e)
{
    int32_t ids_[512];
    req_params p;
    for (int64_t i = 0; i < n_prompt; i++)
        ids_[i] = (int32_t)(i * 37 % 256);
    req_params_default(&p);
    p.prompt = ids_;
    p.n_prompt = n_prompt;
    p.max_tokens = tokens;
    p.sample.temperature = 0;
    p.ignore_eos = true;
    p.assume_cached = assume;
    return engine_generate(en, &p, out, e);
}

/* Every step of a prompt that counts as computed is one token; its pages come back. */
static void assumed(void **state)
{
    (void)state;
    static const struct {
        const char *shape, *scheme;
        int64_t prompt;
    } c[] = {{llama, NULL, 300}, {llama, "int4", 1}, {llama, "nvfp4", 257}, {gemma, NULL, 300},
             {gemma, "fp8", 33}, {gemma, NULL, 32},  {gemma, NULL, 1}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        engine *en = open_shape(c[i].shape, c[i].scheme, 0);
        engine_stats s;
        gen_result r;
        err e = {0};
        if (generate(en, c[i].prompt, 20, true, &r, &e) < 0) fail_msg("case %d: %s", (int)i, e.msg);
        assert_int_equal(r.output_tokens, 20);
        engine_close(en, 0);
        en = open_shape(c[i].shape, c[i].scheme, 0);
        gen_result again;
        CHECK_OK(generate(en, c[i].prompt, 20, true, &again, &e));
        assert_memory_equal(again.out.v, r.out.v, 20 * sizeof *r.out.v); /* not by chance */
        gen_result_free(&r);
        gen_result_free(&again);
        CHECK_OK(generate(en, 40, 2, false, &r, &e));
        gen_result_free(&r);
        /* What the last step gave back is told right after its last event. */
        for (int k = 0; k < 2000; k++) {
            engine_get_stats(en, &s);
            if (!s.kv_pages_used) break;
            usleep(1000);
        }
        assert_true(s.forwards >= 22 && s.forwards <= 23);
        assert_true(s.forward_seconds > 0 && s.kv_pages_used == 0 && s.preemptions == 0);
        engine_close(en, 0);
    }
}

static void tight_pool(void **state)
{
    (void)state;
    err e = {0};
    gen_result r;
    engine *en = open_shape(llama, NULL, 416);
    CHECK_OK(generate(en, 380, 8, true, &r, &e));
    gen_result_free(&r);
    engine_close(en, 0);
}

static void refused(void **state)
{
    (void)state;
    engine *en = NULL;
    err e = {0};
    gen_result r;
    engine_opts o = {.model = MILLET, .threads = 2};
    CHECK_OK(engine_open(&en, &o, &e));
    CHECK_ERR(generate(en, 8, 2, true, &r, &e), ERR_USAGE, "shape");
    CHECK_ERR(engine_profile(en, true, &e), ERR_UNSUPPORTED, "GPU");
    engine_close(en, 0);
    o = (engine_opts){.model = "x", .shape = "{\"hidden_size\":"};
    CHECK_ERR(engine_open(&en, &o, &e), ERR_FORMAT, "shape x");
    o.shape = "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
              "\"hidden_act\":\"silu\"," HEAD "\"quantization_config\":{\"quant_method\":\"fp8\"}}";
    CHECK_ERR(engine_open(&en, &o, &e), ERR_USAGE, "quantization_config");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(assumed), cmocka_unit_test(tight_pool),
                                       cmocka_unit_test(refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
