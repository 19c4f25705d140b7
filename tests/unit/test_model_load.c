/* Loading what does not fit together: heads and embeddings that contradict the config, tensors that
 * are missing or misshapen, architectures that are not known, values that are not numbers. */
#include "check.h"
#include "bake/bake.h"
#include "derive.h"
#include "model_fixture.h"
#include "num/num.h"
#include "plan/plan.h"

#define ARCH "tests/fixtures/arch/"

/* Twice the value, in bf16: the exponent goes up by one. */
static void double_head(const char *name, uint8_t *data, uint64_t bytes, void *arg)
{
    (void)arg;
    if (strcmp(name, "lm_head.weight")) return;
    for (uint64_t i = 0; i < bytes; i += 2) {
        uint16_t v;
        memcpy(&v, data + i, 2);
        if (v & 0x7f80) v = (uint16_t)(v + 0x80);
        memcpy(data + i, &v, 2);
    }
}

static void run_ids(const char *dir, float *out)
{
    err e = {0};
    fixture f;
    int32_t ids[8] = {3, 1, 4, 1, 5, 9, 2, 6};
    CHECK_OK(fixture_open(&f, &(fixture_opts){.path = dir, .kv = KV_F32}, &e));
    CHECK_OK(fixture_step(&f, ids, 0, 8, 8, out, &e));
    fixture_close(&f);
}

static uint64_t planned(const char *dir)
{
    err e = {0};
    ckpt *c;
    quant_ckpt *q;
    plan_out p;
    CHECK_OK(ckpt_open(&c, dir, &e));
    CHECK_OK(quant_open(&q, c, &e));
    plan_in in = {.cfg = ckpt_cfg(c),
                  .q = q,
                  .threads = 1,
                  .context = 1,
                  .concurrency = 1,
                  .chunk_tokens = 8,
                  .page_tokens = 16};
    CHECK_OK(plan_compute(&in, &p, &e));
    quant_close(q);
    ckpt_close(c);
    return p.weights.total;
}

static void heads_against_the_config(void **state)
{
    (void)state;
    err e = {0};
    fixture f;
    static float tied[8 * 256], other[8 * 256], copy[8 * 256];
    run_ids(ARCH "llama_tied", tied);

    /* true, and another head is stored: the stored one counts, here twice the logits. */
    char a[] = "/tmp/tare_load_XXXXXX";
    derive(a, ARCH "llama_tied");
    derive_tensors(a, double_head, NULL, NULL, "lm_head.weight", "model.embed_tokens.weight");
    run_ids(a, other);
    for (int i = 0; i < 8 * 256; i++)
        assert_true(fabsf(other[i] - 2 * tied[i]) <= 1e-5f * fabsf(tied[i]) + 1e-5f);
    assert_int_equal(planned(a), planned(ARCH "llama_tied") + 2 * 256 * 64);

    /* true, and an equal head is stored: one copy, counted once. */
    char b[] = "/tmp/tare_load_XXXXXX";
    derive(b, ARCH "llama_tied");
    derive_tensors(b, NULL, NULL, NULL, "lm_head.weight", "model.embed_tokens.weight");
    run_ids(b, copy);
    assert_memory_equal(copy, tied, sizeof tied);
    assert_int_equal(planned(b), planned(ARCH "llama_tied"));

    /* false, and none is stored: weights are missing. */
    derive_edit(b, "config.json", "\"tie_word_embeddings\": true",
                "\"tie_word_embeddings\": false");
    derive_tensors(b, NULL, NULL, "lm_head.weight", NULL, NULL);
    CHECK_ERR(fixture_open(&f, &(fixture_opts){.path = b}, &e), ERR_MISSING, "lm_head.weight");
    assert_non_null(strstr(e.msg, "tie_word_embeddings"));

    /* true, and only the head is stored. */
    derive_edit(a, "config.json", "\"tie_word_embeddings\": true",
                "\"tie_word_embeddings\":  true");
    derive_tensors(a, NULL, NULL, "model.embed_tokens.weight", NULL, NULL);
    CHECK_OK(fixture_open(&f, &(fixture_opts){.path = a}, &e));
    fixture_close(&f);
    derive_remove(a);
    derive_remove(b);
}

static void not_a_number(const char *name, uint8_t *data, uint64_t bytes, void *arg)
{
    (void)bytes;
    if (strcmp(name, arg)) return;
    data[10] = 0xC0;
    data[11] = 0x7F; /* element 5 of a bf16 tensor */
}

static void hostile(void **state)
{
    (void)state;
    static const struct {
        const char *from, *to; /* edit of config.json */
        const char *drop, *nan;
        int code;
        const char *says;
    } c[] = {
        {"\"LlamaForCausalLM\"", "\"MambaForCausalLM\"", NULL, NULL, ERR_UNSUPPORTED,
         "Qwen3ForCausalLM"},
        {NULL, NULL, "model.layers.1.mlp.up_proj.weight", NULL, ERR_MISSING,
         "model.layers.1.mlp.up_proj"},
        {NULL, NULL, "model.norm.weight", NULL, ERR_MISSING, "model.norm.weight"},
        {NULL, NULL, "model.embed_tokens.weight", NULL, ERR_MISSING, "model.embed_tokens.weight"},
        {"\"intermediate_size\": 128", "\"intermediate_size\": 120", NULL, NULL, ERR_SHAPE,
         "mlp.gate_proj"},
        {"\"vocab_size\": 256", "\"vocab_size\": 300", NULL, NULL, ERR_SHAPE, "300"},
        {"\"hidden_act\": \"silu\"", "\"hidden_act\": \"swoosh\"", NULL, NULL, ERR_UNSUPPORTED,
         "swoosh"},
        {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3", NULL, NULL, ERR_VALUE, "3"},
        {NULL, NULL, NULL, "model.layers.0.input_layernorm.weight", ERR_VALUE, "element 5"},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        err e = {0};
        fixture f;
        char dir[] = "/tmp/tare_load_XXXXXX";
        derive(dir, ARCH "llama");
        if (c[i].from) derive_edit(dir, "config.json", c[i].from, c[i].to);
        if (c[i].drop) derive_tensors(dir, NULL, NULL, c[i].drop, NULL, NULL);
        if (c[i].nan)
            derive_tensors(dir, not_a_number, (void *)(uintptr_t)c[i].nan, NULL, NULL, NULL);
        int rc = fixture_open(&f, &(fixture_opts){.path = dir}, &e);
        if (rc != -c[i].code || !strstr(e.msg, c[i].says))
            fail_msg("case %d: %d %s", (int)i, rc, e.msg);
        derive_remove(dir);
    }
}

/* --quantization is a wish on an unquantized model and an assertion on a quantized one. */
static void quantization_option(void **state)
{
    (void)state;
    err e = {0};
    fixture f;
    CHECK_OK(fixture_open(
        &f, &(fixture_opts){.path = ARCH "llama", .quantize = "w:int8,channel a:int8,token"}, &e));
    qspec want, s = model_spec(f.m);
    CHECK_OK(qspec_parse("w:int8,channel a:int8,token", &want, &e));
    assert_true(qaxis_equal(&s.w, &want.w) && qaxis_equal(&s.a, &want.a));
    fixture_close(&f);
    CHECK_ERR(fixture_open(&f, &(fixture_opts){.path = ARCH "llama", .quantize = "w:int9"}, &e),
              ERR_USAGE, "int9");
    char dir[] = "/tmp/tare_load_XXXXXX";
    bake_report r = {0};
    assert_non_null(mkdtemp(dir));
    char *out = file_join(dir, "int8");
    CHECK_OK(bake_quantize(
        &(bake_opts){.model = ARCH "llama", .out = out, .scheme = "int8", .algo = "rtn"}, &r, &e));
    bake_report_free(&r);
    CHECK_OK(fixture_open(&f, &(fixture_opts){.path = out, .quantize = "int8"}, &e));
    s = model_spec(f.m);
    assert_true(qaxis_equal(&s.w, &want.w) && qaxis_equal(&s.a, &want.a));
    fixture_close(&f);
    CHECK_ERR(fixture_open(&f, &(fixture_opts){.path = out, .quantize = "fp8"}, &e), ERR_USAGE,
              "leave the option out");
    free(out);
    derive_remove(dir);
}

/* A window narrower than the prompt changes the logits only where it is configured. */
static void windows(void **state)
{
    (void)state;
    err e = {0};
    const kv_layer_shape *shape;
    fixture f;
    CHECK_OK(fixture_open(&f, &(fixture_opts){.path = ARCH "mistral_swa"}, &e));
    assert_int_equal(model_kv_shapes(f.m, &shape), 2);
    assert_int_equal(shape[0].window, 8);
    fixture_close(&f);
    CHECK_OK(fixture_open(&f, &(fixture_opts){.path = ARCH "qwen2"}, &e));
    model_kv_shapes(f.m, &shape);
    assert_int_equal(shape[0].window, 0);
    assert_int_equal(shape[0].D, 16);
    fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_against_the_config),
        cmocka_unit_test(hostile),
        cmocka_unit_test(quantization_option),
        cmocka_unit_test(windows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
