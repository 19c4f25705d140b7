/* Every architecture row: found by its Hugging Face name, with shapes that add up, and one line
 * that refuses what the recipe cannot do. */
#include "check.h"
#include "model/arch.h"

static void config_for(const char *hf, const char *type, const char *more, ckpt_config *c,
                       json **raw)
{
    err e = {0};
    char text[1024];
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

static void each_row_is_found_and_adds_up(void **state)
{
    (void)state;
    for (int i = 0; i < arch_n_rows; i++) {
        ckpt_config c;
        json *raw;
        err e = {0};
        const arch_row *row;
        arch_linear l[16];
        config_for(arch_rows[i].hf_names, arch_rows[i].name, "", &c, &raw);
        CHECK_OK(arch_find(&c, &row, &e));
        assert_ptr_equal(row, &arch_rows[i]);
        int n = arch_linears(&c, l, 16);
        assert_int_equal(n, 4 * 3 + 1);
        assert_int_equal(l[0].n_shards, 3);
        assert_string_equal(l[0].shard[1].module, "model.layers.0.self_attn.k_proj");
        assert_int_equal(l[0].shard[0].N, 64);
        assert_int_equal(l[0].shard[1].N, 32);
        assert_int_equal(l[2].shard[1].N, 160);
        assert_int_equal(l[3].shard[0].K, 160);
        assert_int_equal(l[12].kind, ARCH_LM_HEAD);
        assert_int_equal(l[12].shard[0].N, 96);
        config_free(&c);
        json_drop(raw);
    }
}

static void what_cannot_be_done_is_refused_by_key(void **state)
{
    (void)state;
    static const struct {
        const char *hf, *more, *text;
    } rows[] = {{"MambaForCausalLM", "", "MambaForCausalLM"},
                {"LlamaForCausalLM", ",\"hidden_act\":\"snake\"", "hidden_act"},
                {"LlamaForCausalLM", ",\"partial_rotary_factor\":0.3125", "head_dim"}};
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_row_is_found_and_adds_up),
        cmocka_unit_test(what_cannot_be_done_is_refused_by_key),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
