/* config.json in both spellings, what families assume, and what is refused. */
#include "check.h"
#include "ckpt/config.h"

#define SHAPES                                                                                     \
    "\"vocab_size\":100,\"hidden_size\":64,\"intermediate_size\":128,\"num_hidden_layers\":4,"     \
    "\"num_attention_heads\":4"
#define LLAMA(more)                                                                                \
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\"," SHAPES more "}"
#define OF(type, more) "{\"model_type\":\"" type "\"," SHAPES more "}"

typedef struct parsed {
    json *raw, *gen;
    ckpt_config c;
} parsed;

static int parse(parsed *p, const char *text, const char *gen, err *e)
{
    *p = (parsed){0};
    int rc = json_parse(&p->raw, text, strlen(text), "config.json", e);
    if (rc == 0 && gen) rc = json_parse(&p->gen, gen, strlen(gen), "generation_config.json", e);
    return rc < 0 ? rc : config_parse(&p->c, p->raw, p->gen, "config.json", e);
}

static void drop(parsed *p)
{
    config_free(&p->c);
    json_drop(p->raw);
    json_drop(p->gen);
}

static void plain_llama(void **state)
{
    (void)state;
    err e = {0};
    parsed p;
    CHECK_OK(parse(&p, LLAMA(",\"torch_dtype\":\"float16\",\"rope_theta\":500000.0"), NULL, &e));
    assert_string_equal(p.c.architecture, "LlamaForCausalLM");
    assert_int_equal(p.c.head_dim, 16);
    assert_int_equal(p.c.n_kv_heads, 4);
    assert_int_equal(p.c.max_position, 2048);
    assert_int_equal(p.c.dtype, NUM_F16);
    assert_true(p.c.rope.theta == 500000 && p.c.rope.kind == ROPE_DEFAULT);
    assert_false(p.c.attention_bias || p.c.mlp_bias || p.c.qk_norm || p.c.tie_embeddings ||
                 p.c.tie_embeddings_present);
    assert_int_equal(p.c.sliding_window, 0);
    assert_int_equal(p.c.n_warnings, 0);
    drop(&p);
    CHECK_OK(parse(&p,
                   LLAMA(",\"head_dim\":32,\"num_key_value_heads\":2,\"attention_bias\":true,"
                         "\"tie_word_embeddings\":true"),
                   NULL, &e));
    assert_int_equal(p.c.head_dim, 32);
    assert_int_equal(p.c.n_kv_heads, 2);
    assert_true(p.c.attention_bias && p.c.attention_out_bias && p.c.tie_embeddings &&
                p.c.tie_embeddings_present);
    drop(&p);
}

static void rope_spellings(void **state)
{
    (void)state;
    err e = {0};
    parsed p;
    static const char *const same[] = {
        LLAMA(",\"rope_theta\":1e6,\"rope_scaling\":{\"type\":\"linear\",\"factor\":4}"),
        LLAMA(",\"rope_theta\":1e6,\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":4}"),
        LLAMA(",\"rope_parameters\":{\"rope_theta\":1e6,\"rope_type\":\"linear\",\"factor\":4}"),
        LLAMA(
            ",\"rope_parameters\":{\"full_attention\":{\"rope_theta\":1e6,\"rope_type\":\"linear\","
            "\"factor\":4},\"sliding_attention\":{\"rope_theta\":1e4}}"),
        LLAMA(",\"rope_theta\":1e6,\"rope_scaling\":{\"type\":\"linear\",\"factor\":4},"
              "\"rope_parameters\":{\"rope_theta\":1e6,\"rope_type\":\"linear\",\"factor\":4}"),
    };
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        CHECK_OK(parse(&p, same[i], NULL, &e));
        assert_true(p.c.rope.theta == 1e6 && p.c.rope.kind == ROPE_LINEAR && p.c.rope.factor == 4);
        assert_int_equal(p.c.n_warnings, 0);
        drop(&p);
    }
    CHECK_OK(parse(&p,
                   LLAMA(",\"rope_theta\":1e4,\"rope_parameters\":{\"rope_theta\":1e6,"
                         "\"rope_type\":\"default\"},\"dtype\":\"bfloat16\","
                         "\"torch_dtype\":\"float16\""),
                   NULL, &e));
    assert_true(p.c.rope.theta == 1e6); /* the newer spelling wins … */
    assert_int_equal(p.c.dtype, NUM_BF16);
    assert_int_equal(p.c.n_warnings, 2); /* … and both conflicts are told */
    drop(&p);
    CHECK_OK(parse(&p,
                   LLAMA(",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,"
                         "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
                         "\"original_max_position_embeddings\":8192}"),
                   NULL, &e));
    assert_true(p.c.rope.kind == ROPE_LLAMA3 && p.c.rope.factor == 8 &&
                p.c.rope.original_max_position == 8192);
    drop(&p);
    CHECK_OK(parse(&p,
                   LLAMA(",\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1,2],"
                         "\"long_factor\":[3,4.5]}"),
                   NULL, &e));
    assert_true(p.c.rope.n_long == 2 && p.c.rope.long_factor[1] == 4.5);
    drop(&p);
    CHECK_ERR(parse(&p, LLAMA(",\"rope_scaling\":{\"type\":\"spiral\"}"), NULL, &e),
              ERR_UNSUPPORTED, "spiral");
    json_drop(p.raw);
    CHECK_OK(parse(&p, OF("novel", ",\"rope_scaling\":{\"type\":\"spiral\"}"), NULL, &e));
    assert_true(p.c.n_warnings >= 1);
    drop(&p);
}

static void families(void **state)
{
    (void)state;
    err e = {0};
    parsed p;
    CHECK_OK(parse(&p, OF("mistral", ",\"sliding_window\":32"), NULL, &e));
    assert_int_equal(p.c.sliding_window, 32);
    assert_true(p.c.layer_sliding[0] && p.c.layer_sliding[3]);
    drop(&p);
    CHECK_OK(parse(&p, OF("mistral", ",\"sliding_window\":null"), NULL, &e));
    assert_int_equal(p.c.sliding_window, 0);
    assert_false(p.c.layer_sliding[0]);
    drop(&p);
    CHECK_OK(parse(&p, OF("mistral", ""), NULL, &e)); /* transformers' own default */
    assert_int_equal(p.c.sliding_window, 4096);
    drop(&p);
    CHECK_OK(parse(&p, OF("qwen2", ",\"sliding_window\":32,\"max_window_layers\":2"), NULL, &e));
    assert_true(p.c.attention_bias && !p.c.attention_out_bias && !p.c.qk_norm);
    assert_int_equal(p.c.sliding_window, 0); /* use_sliding_window is off */
    drop(&p);
    CHECK_OK(parse(&p,
                   OF("qwen2", ",\"sliding_window\":32,\"max_window_layers\":2,"
                               "\"use_sliding_window\":true"),
                   NULL, &e));
    assert_int_equal(p.c.sliding_window, 32);
    assert_false(p.c.layer_sliding[1]);
    assert_true(p.c.layer_sliding[2]);
    drop(&p);
    CHECK_OK(parse(&p,
                   OF("qwen2", ",\"sliding_window\":32,\"use_sliding_window\":true,"
                               "\"layer_types\":[\"sliding_attention\",\"full_attention\","
                               "\"sliding_attention\",\"full_attention\"]"),
                   NULL, &e));
    assert_true(p.c.layer_sliding[0] && !p.c.layer_sliding[1] && p.c.layer_sliding[2]);
    drop(&p);
    CHECK_OK(parse(&p, OF("qwen3", ""), NULL, &e));
    assert_true(p.c.qk_norm && !p.c.attention_bias);
    assert_int_equal(p.c.head_dim, 128);
    drop(&p);
    CHECK_ERR(parse(&p, OF("qwen2", ",\"layer_types\":[\"full_attention\"]"), NULL, &e), ERR_SHAPE,
              "layer_types");
    json_drop(p.raw);
}

/* The union of both files; id 0 counts, -1 does not. */
static void eos_ids(void **state)
{
    (void)state;
    err e = {0};
    parsed p;
    CHECK_OK(parse(&p, LLAMA(",\"eos_token_id\":5,\"bos_token_id\":0"),
                   "{\"eos_token_id\":[5,7,0],\"bos_token_id\":1}", &e));
    assert_int_equal(p.c.n_eos, 3);
    assert_int_equal(p.c.eos[0], 5);
    assert_int_equal(p.c.eos[1], 7);
    assert_int_equal(p.c.eos[2], 0);
    assert_int_equal(p.c.n_bos, 2);
    assert_int_equal(p.c.bos[0], 0);
    drop(&p);
    CHECK_OK(parse(&p, LLAMA(",\"eos_token_id\":null,\"bos_token_id\":-1"), NULL, &e));
    assert_int_equal(p.c.n_eos + p.c.n_bos, 0);
    drop(&p);
    CHECK_ERR(parse(&p, LLAMA(",\"eos_token_id\":\"</s>\""), NULL, &e), ERR_FORMAT, "eos_token_id");
    json_drop(p.raw);
}

static void quant_places(void **state)
{
    (void)state;
    err e = {0};
    static const struct {
        const char *more, *where;
    } rows[] = {
        {",\"quantization_config\":{\"quant_method\":\"a\"},\"compression_config\":{}",
         "config.json: quantization_config"},
        {",\"compression_config\":{\"quant_method\":\"a\"}", "config.json: compression_config"},
        {",\"quantization_config\":null,\"text_config\":{\"quantization_config\":{\"quant_method\":"
         "\"a\"}}",
         "config.json: text_config.quantization_config"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        parsed p;
        buf b = {0};
        buf_printf(&b, "{\"model_type\":\"llama\"," SHAPES "%s}", rows[i].more);
        CHECK_OK(parse(&p, b.data, NULL, &e));
        assert_non_null(p.c.quant);
        assert_non_null(json_get(p.c.quant, "quant_method"));
        assert_string_equal(p.c.quant_where, rows[i].where);
        drop(&p);
        buf_free(&b);
    }
}

static void refused(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int code;
        const char *says;
    } rows[] = {
        {"[]", ERR_FORMAT, "not a JSON object"},
        {"{\"model_type\":\"llama\"}", ERR_MISSING, "'vocab_size' is missing"},
        {"{\"model_type\":\"llama\",\"vocab_size\":9}", ERR_MISSING, "'hidden_size' is missing"},
        {"{\"model_type\":\"qwen2\",\"vocab_size\":9,\"hidden_size\":8,\"num_hidden_layers\":1}",
         ERR_MISSING, "num_attention_heads"},
        {OF("llama", ",\"vocab_size\":1"), 0, ""}, /* a repeated key: the first counts */
        {"{\"vocab_size\":-1}", ERR_VALUE, "vocab_size"},
        {"{\"vocab_size\":1e12}", ERR_VALUE, "vocab_size"},
        {"{\"vocab_size\":1.5}", ERR_FORMAT, "vocab_size"},
        {"{\"vocab_size\":\"9\"}", ERR_FORMAT, "vocab_size"},
        {"{\"num_hidden_layers\":99999999}", ERR_VALUE, "num_hidden_layers"},
        {"{\"num_attention_heads\":-4,\"hidden_size\":8}", ERR_VALUE, "num_attention_heads"},
        {LLAMA(",\"head_dim\":-8"), ERR_VALUE, "head_dim"},
        {LLAMA(",\"num_key_value_heads\":0"), ERR_VALUE, "num_key_value_heads"},
        {LLAMA(",\"rope_theta\":\"big\""), ERR_FORMAT, "rope_theta"},
        {LLAMA(",\"rope_scaling\":{\"type\":\"linear\",\"factor\":0}"), ERR_VALUE, "factor"},
        {LLAMA(",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8}"), ERR_MISSING,
         "original_max_position"},
        {LLAMA(",\"partial_rotary_factor\":1.5"), ERR_VALUE, "partial_rotary_factor"},
        {LLAMA(",\"rope_scaling\":{\"type\":\"longrope\",\"long_factor\":[\"a\"]}"), ERR_FORMAT,
         "long_factor"},
        {LLAMA(",\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1,0]}"), ERR_VALUE,
         "short_factor"},
        {LLAMA(",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"beta_slow\":0}"), ERR_VALUE,
         "beta_slow 0"},
        {LLAMA(",\"original_max_position_embeddings\":-4096"), ERR_VALUE, "is -4096"},
        {LLAMA(",\"layer_types\":\"full_attention\""), ERR_FORMAT, "must be a list"},
        {LLAMA(",\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\","
               "\"chunked\"]"),
         ERR_UNSUPPORTED, "'chunked'"},
        {LLAMA(",\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\",7]"),
         ERR_UNSUPPORTED, "not a name"},
        {LLAMA(",\"sliding_window\":0,\"layer_types\":[\"full_attention\",\"full_attention\","
               "\"full_attention\",\"sliding_attention\"]"),
         ERR_VALUE, "'sliding_window' is 0"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        err e = {0};
        parsed p;
        int rc = parse(&p, rows[i].text, NULL, &e);
        if (rc != -rows[i].code || !strstr(e.msg, rows[i].says))
            fail_msg("%s: %d: %s", rows[i].text, rc, e.msg);
        drop(&p);
    }
}

/* Not a family that is run: what is there is read, what is not stays 0. */
static void unknown_architecture(void **state)
{
    (void)state;
    err e = {0};
    parsed p;
    CHECK_OK(parse(&p,
                   "{\"architectures\":[\"NovelForCausalLM\"],\"model_type\":\"novel\","
                   "\"text_config\":{\"hidden_size\":64,\"num_hidden_layers\":2}}",
                   NULL, &e));
    assert_string_equal(p.c.architecture, "NovelForCausalLM");
    assert_int_equal(p.c.hidden_size, 64);
    assert_int_equal(p.c.n_layers, 2);
    assert_int_equal(p.c.vocab_size, 0);
    assert_true(p.c.n_warnings > 0);
    drop(&p);
    CHECK_OK(parse(&p, "{}", NULL, &e));
    drop(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_llama),
        cmocka_unit_test(rope_spellings),
        cmocka_unit_test(families),
        cmocka_unit_test(eos_ids),
        cmocka_unit_test(quant_places),
        cmocka_unit_test(refused),
        cmocka_unit_test(unknown_architecture),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
