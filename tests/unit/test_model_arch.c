/* Every architecture row: found by its Hugging Face name, with shapes that add up, and one line
 * that refuses what the recipe cannot do. */
#include "check.h"
#include "model/arch.h"

static void config_for(const char *hf, const char *type, const char *more, ckpt_config *c,
                       json **raw)
{
    err e = {0};
    char text[2048];
    snprintf(text, sizeof text,
             "{\"architectures\":[\"%s\"],\"model_type\":\"%s\",\"vocab_size\":96,\"hidden_size\":"
             "64,\"intermediate_size\":160,"
             "\"num_hidden_layers\":3,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_"
             "dim\":16,"
             "\"max_position_embeddings\":512,\"rms_norm_eps\":1e-5%s}",
             hf, type, more);
    CHECK_OK(json_parse(raw, text, strlen(text), "config.json", &e));
    CHECK_OK(config_parse(c, *raw, NULL, "config.json", &e));
}

/* Keys that families with experts, latent or linear attention ask for. */
#define MORE                                                                                       \
    ",\"num_experts\":4,\"num_experts_per_tok\":2,\"moe_intermediate_size\":32,\"n_shared_"        \
    "experts\":1,"                                                                                 \
    "\"kv_lora_rank\":32,\"qk_nope_head_dim\":16,\"qk_rope_head_dim\":8,\"v_head_dim\":16,"        \
    "\"linear_num_key_heads\":2,\"linear_num_value_heads\":4,\"linear_key_head_dim\":16,"          \
    "\"linear_value_head_dim\":16"

static void count_parameters(void *arg, const char *name, int64_t rows, int64_t cols)
{
    int64_t *n = arg;
    assert_true(*name && rows > 0 && cols > 0);
    *n += rows * cols;
}

/* Every row by each of its names: linears and other tensors have sizes and distinct names, inputs
 * of a layer's first linears are the stream, the head is last. */
static void each_row_is_found_and_adds_up(void **state)
{
    (void)state;
    for (int i = 0; i < arch_n_rows; i++) {
        ckpt_config c;
        json *raw;
        err e = {0};
        arch_model *m;
        int64_t plain = 0;
        char first[64];
        snprintf(first, sizeof first, "%.*s", (int)strcspn(arch_rows[i].hf_names, " "),
                 arch_rows[i].hf_names);
        config_for(first, arch_rows[i].name, MORE, &c, &raw);
        CHECK_OK(arch_open(&m, &c, NULL, &e));
        assert_ptr_equal(m->row, &arch_rows[i]);
        int n = arch_linears(m, NULL, 0);
        arch_linear *l = calloc((size_t)n, sizeof *l);
        assert_int_equal(arch_linears(m, l, n), n);
        assert_true(n >= 4 * 3 + 1);
        for (int k = 0; k < n; k++)
            for (int s = 0; s < l[k].n_shards; s++) {
                const arch_shard *sh = &l[k].shard[s];
                assert_true(*sh->module && sh->N > 0 && sh->K > 0 && sh->E > 0);
                assert_int_equal(sh->K, l[k].shard[0].K);
                for (int o = 0; o < k; o++)
                    assert_string_not_equal(sh->module, l[o].shard[0].module);
            }
        assert_int_equal(l[0].shard[0].K, 64);
        assert_int_equal(l[n - 1].kind, ARCH_LM_HEAD);
        assert_int_equal(l[n - 1].shard[0].N, 96);
        arch_plain_tensors(m, count_parameters, &plain);
        assert_true(plain >= 96 * 64);
        free(l);
        arch_close(m);
        config_free(&c);
        json_drop(raw);
    }
}

static void rows_are_put_in_order(void **state)
{
    (void)state;
    arch_shard s = {.N = 12, .n_parts = 3, .part = {2, 1, 1}};
    static const int32_t want[12] = {0, 1, 4, 5, 8, 9, 2, 6, 10, 3, 7, 11};
    int32_t rows[12];
    assert_true(arch_shard_rows(&s, rows));
    assert_memory_equal(rows, want, sizeof want);
    s.n_parts = 0;
    assert_false(arch_shard_rows(&s, rows));
}

static void what_cannot_be_done_is_refused_by_key(void **state)
{
    (void)state;
    static const struct {
        const char *hf, *more, *text;
    } rows[] = {
        {"MambaForCausalLM", "", "MambaForCausalLM"},
        {"LlamaForCausalLM", ",\"hidden_act\":\"snake\"", "hidden_act"},
        {"LlamaForCausalLM", ",\"partial_rotary_factor\":0.3125", "head_dim"},
        {"MixtralForCausalLM", "", "experts"},
        {"MixtralForCausalLM", ",\"num_local_experts\":2,\"num_experts_per_tok\":3", "3 a token"},
        {"DeepseekV3ForCausalLM", ",\"num_experts\":4", "kv_lora_rank"},
        {"SmolLM3ForCausalLM", ",\"no_rope_layers\":[1]", "no_rope_layers"},
        {"StableLmForCausalLM", ",\"qk_layernorm\":true", "qk_layernorm"},
        {"GraniteForCausalLM", ",\"logits_scaling\":0", "logits_scaling"},
        {"GraniteForCausalLM", ",\"residual_multiplier\":0", "residual adds is 0"},
        {"CohereForCausalLM", ",\"logit_scale\":-1", "logits is -1"},
        {"Gemma2ForCausalLM", ",\"final_logit_softcapping\":-1", "final_logit_softcapping"},
        {"Gemma2ForCausalLM", ",\"attn_logit_softcapping\":1e308", "attn_logit_softcapping"},
        {"OlmoeForCausalLM", ",\"num_experts\":4,\"clip_qkv\":8.0", "clip_qkv"},
        {"Gemma3ForCausalLM", ",\"use_bidirectional_attention\":true", "bidirectional"},
        {"PhimoeForCausalLM", ",\"num_experts\":4,\"num_experts_per_tok\":3", "per_tok' is 3"},
        {"PhimoeForCausalLM",
         ",\"num_experts\":4,\"rope_scaling\":{\"short_mscale\":1.2,\"long_mscale\":1.3}",
         "short_mscale"},
        {"Qwen3_5ForCausalLM", MORE ",\"attn_output_gate\":false", "attn_output_gate"},
        {"PhiForCausalLM", ",\"qk_layernorm\":true", "qk_layernorm"},
        {"FalconForCausalLM", ",\"alibi\":true", "alibi"},
        {"FalconForCausalLM", ",\"new_decoder_architecture\":true,\"parallel_attn\":false",
         "parallel_attn"},
        {"FalconForCausalLM", ",\"new_decoder_architecture\":true,\"num_kv_heads\":3",
         "3 key/value heads"},
        {"HunYuanDenseV1ForCausalLM", ",\"use_cla\":true", "use_cla"},
        {"GPT2LMHeadModel", ",\"scale_attn_weights\":false", "'scale_attn_weights' false"},
        {"GPT2LMHeadModel", ",\"scale_attn_by_inverse_layer_idx\":true", "inverse_layer_idx"},
        {"GPT2LMHeadModel", ",\"add_cross_attention\":true", "add_cross_attention"},
        {"Gemma3ForCausalLM", ",\"use_bidirectional_attention\":true", "bidirectional"},
        {"DeepseekV2ForCausalLM", MORE ",\"topk_method\":\"softest\"", "'softest'"},
        {"HunYuanMoEV1ForCausalLM", ",\"num_experts\":8,\"moe_topk\":[2,2,1]", "moe_topk"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ckpt_config c;
        json *raw;
        err e = {0};
        const arch_row *row;
        config_for(rows[i].hf, "llama", rows[i].more, &c, &raw);
        int rc = arch_find(&c, &row, &e);
        assert_true(rc < 0);
        if (!strstr(e.msg, rows[i].text)) fail_msg("message lacks %s: %s", rows[i].text, e.msg);
        config_free(&c);
        json_drop(raw);
    }
}

/* DeepSeek V3 turns neighbours; a config may say that its rows are stored as halves. */
static void rope_interleave_counts(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        static const char *const more[] = {MORE, MORE ",\"rope_interleave\":true",
                                           MORE ",\"rope_interleave\":false"};
        ckpt_config c;
        json *raw;
        arch_model *m;
        err e = {0};
        config_for("DeepseekV3ForCausalLM", "deepseek_v3", more[i], &c, &raw);
        CHECK_OK(arch_open(&m, &c, NULL, &e));
        assert_int_equal(m->rope_pairs, i < 2);
        arch_close(m);
        config_free(&c);
        json_drop(raw);
    }
}

/* Where the tensors of a wrapped language model lie, before there are files to tell. */
static void wrapped_models_are_found(void **state)
{
    (void)state;
    static const struct {
        const char *hf, *wrapper, *text, *more, *embed, *head;
    } rows[] = {{"Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text", "",
                 "model.language_model.embed_tokens", "lm_head"},
                {"Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "qwen3_5_moe_text", MORE,
                 "model.language_model.embed_tokens", "lm_head"},
                {"Gemma3ForConditionalGeneration", "gemma3", "gemma3_text", "",
                 "language_model.model.embed_tokens", "language_model.lm_head"},
                {"Mistral3ForConditionalGeneration", "mistral3", "mistral", "",
                 "language_model.model.embed_tokens", "language_model.lm_head"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char text[2048];
        ckpt_config c;
        json *raw;
        err e = {0};
        arch_model *m;
        snprintf(text, sizeof text,
                 "{\"architectures\":[\"%s\"],\"model_type\":\"%s\",\"text_config\":{"
                 "\"model_type\":\"%s\",\"hidden_size\":64,\"intermediate_size\":96,"
                 "\"vocab_size\":96,\"num_attention_heads\":4,\"num_hidden_layers\":2%s}}",
                 rows[i].hf, rows[i].wrapper, rows[i].text, rows[i].more);
        CHECK_OK(json_parse(&raw, text, strlen(text), "config.json", &e));
        CHECK_OK(config_parse(&c, raw, NULL, "config.json", &e));
        CHECK_OK(arch_open(&m, &c, NULL, &e));
        assert_string_equal(m->name.embed, rows[i].embed);
        assert_string_equal(m->name.head, rows[i].head);
        arch_close(m);
        config_free(&c);
        json_drop(raw);
    }
}

/* The text_config of Gemma 3 4B as it is published: the rest is what transformers assumes. */
static void a_sparse_text_config_is_filled(void **state)
{
    (void)state;
    static const char text[] =
        "{\"architectures\":[\"Gemma3ForConditionalGeneration\"],\"model_type\":\"gemma3\","
        "\"text_config\":{\"hidden_size\":2560,\"intermediate_size\":10240,\"model_type\":"
        "\"gemma3_text\",\"num_hidden_layers\":34,\"rope_scaling\":{\"factor\":8.0,\"rope_type\":"
        "\"linear\"},\"sliding_window\":1024}}";
    ckpt_config c;
    json *raw;
    err e = {0};
    arch_model *m;
    CHECK_OK(json_parse(&raw, text, strlen(text), "config.json", &e));
    CHECK_OK(config_parse(&c, raw, NULL, "config.json", &e));
    CHECK_OK(arch_open(&m, &c, NULL, &e));
    assert_int_equal(m->vocab, 262208);
    assert_int_equal(m->H, 8);
    assert_int_equal(m->Hk, 4);
    assert_int_equal(m->D, 256);
    assert_true(m->rope[0].theta == 1e6 && m->rope[0].factor == 8);
    assert_true(m->rope[1].theta == 1e4 && m->rope[1].factor == 1);
    assert_int_equal(m->layers[4].window, 1024);
    assert_int_equal(m->layers[5].window, 0);
    arch_close(m);
    config_free(&c);
    json_drop(raw);
}

/* What lies beside a wrapped language model is counted, and nothing else is. */
static void tensors_beside_are_counted(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int64_t n;
    } rows[] = {
        {"qwen3_5_vl", 21}, {"gemma3_vl", 34}, {"gemma3_vl_new", 34}, {"mimo", 0}, {"llama", 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char path[128];
        err e = {0};
        ckpt *c;
        arch_model *m;
        snprintf(path, sizeof path, "tests/fixtures/arch/%s", rows[i].name);
        CHECK_OK(ckpt_open(&c, path, &e));
        CHECK_OK(arch_open(&m, ckpt_cfg(c), c, &e));
        assert_int_equal(arch_beside(m, c), rows[i].n);
        arch_close(m);
        ckpt_close(c);
    }
}

/* More layers in the files than the config says are counted; layers that only look ahead are not.
 */
static void layers_behind_are_counted(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int fewer;
        int64_t n;
    } rows[] = {{"llama", 0, 0},
                {"llama", 1, 9},
                {"gpt2", 1, 12},
                {"mimo", 0, 0},
                {"gemma3_vl", 0, 0},
                {"glm4_moe", 0, 0},
                {"glm4_moe", 1, 0} /* one is allowed */,
                {"deepseek_v3", 0, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char path[128];
        err e = {0};
        ckpt *c;
        arch_model *m;
        snprintf(path, sizeof path, "tests/fixtures/arch/%s", rows[i].name);
        CHECK_OK(ckpt_open(&c, path, &e));
        CHECK_OK(arch_open(&m, ckpt_cfg(c), c, &e));
        m->n_layers -= rows[i].fewer;
        if (arch_behind(m, c) != rows[i].n)
            fail_msg("%s: %lld", rows[i].name, (long long)arch_behind(m, c));
        m->n_layers += rows[i].fewer;
        arch_close(m);
        ckpt_close(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_row_is_found_and_adds_up),
        cmocka_unit_test(wrapped_models_are_found),
        cmocka_unit_test(a_sparse_text_config_is_filled),
        cmocka_unit_test(tensors_beside_are_counted),
        cmocka_unit_test(layers_behind_are_counted),
        cmocka_unit_test(rows_are_put_in_order),
        cmocka_unit_test(what_cannot_be_done_is_refused_by_key),
        cmocka_unit_test(rope_interleave_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
