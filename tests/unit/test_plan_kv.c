/* The KV cache as it is planned against what loading allocates: every architecture fixture, shapes
 * of the field reckoned by hand, and GGUF files whose keys differ between layers. */
#include "check.h"
#include <unistd.h>
#include "base/file.h"
#include "ckpt/gguf.h"
#include "engine/engine.h"
#include "plan/plan.h"

/* ---- fixtures -----------------------------------------------------------------------------------
 */

static void check_fixture(const char *name, const kv_format *f, int64_t context)
{
    err e = {0};
    engine *en;
    engine_info info;
    ckpt *c;
    plan_out p;
    char path[160];
    snprintf(path, sizeof path, "tests/fixtures/arch/%s", name);
    CHECK_OK(engine_open(&en,
                         &(engine_opts){.model = path,
                                        .threads = 1,
                                        .kv_cache_dtype = f->name,
                                        .max_running = 3,
                                        .max_model_len = context},
                         &e));
    engine_get_info(en, &info);
    engine_close(en, 0);
    CHECK_OK(ckpt_open(&c, path, &e));
    plan_in in = {.cfg = ckpt_cfg(c),
                  .kv = f->type,
                  .threads = 1,
                  .context = context,
                  .concurrency = 3,
                  .chunk_tokens = 512,
                  .page_tokens = 16};
    CHECK_OK(plan_compute(&in, &p, &e));
    if (p.kv_total != info.kv_pool_bytes || p.kv_token != info.kv_bytes_per_token)
        fail_msg("%s, %s, context %lld: %llu bytes planned, %llu taken", name, f->name,
                 (long long)context, (unsigned long long)p.kv_total,
                 (unsigned long long)info.kv_pool_bytes);
    ckpt_close(c);
}

static void fixtures(void **state)
{
    (void)state;
    static const int64_t contexts[] = {16, 32, 512, 4096};
    err e = {0};
    char **names;
    size_t n, models = 0;
    CHECK_OK(file_list("tests/fixtures/arch", &names, &n, &e));
    for (size_t i = 0; i < n; i++) {
        if (strchr(names[i], '.')) continue; /* README.md */
        models++;
        for (int c = 0; c < 4; c++)
            check_fixture(names[i], &kv_formats[((int)i + c) % kv_n_formats], contexts[c]);
    }
    assert_true(models >= 32);
    file_list_free(names, n);
}

/* ---- by hand ------------------------------------------------------------------------------------
 */

#define CONFIG(arch, type, more)                                                                   \
    "{\"architectures\":[\"" arch "\"],\"model_type\":\"" type                                     \
    "\",\"vocab_size\":64,\"intermediate_size\":64,\"max_position_embeddings\":8192,"              \
    "\"rms_norm_eps\":1e-5," more "}"

static const struct {
    const char *name, *config;
    uint64_t full_lanes, window_lanes; /* of a token, all layers */
    int64_t window;
} shapes[] = {
    {"5 of 6 layers slide",
     CONFIG("Gemma3ForCausalLM", "gemma3_text",
            "\"hidden_size\":256,\"num_hidden_layers\":6,\"num_attention_heads\":8,"
            "\"num_key_value_heads\":4,\"head_dim\":64,\"sliding_window\":32,"
            "\"sliding_window_pattern\":6,\"query_pre_attn_scalar\":64"),
     2 * 4 * 64, 5 * 2 * 4 * 64, 32},
    {"latent of 512 and 64",
     CONFIG("DeepseekV3ForCausalLM", "deepseek_v3",
            "\"hidden_size\":256,\"num_hidden_layers\":3,\"num_attention_heads\":16,"
            "\"num_key_value_heads\":16,\"q_lora_rank\":96,\"kv_lora_rank\":512,"
            "\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"v_head_dim\":128,"
            "\"first_k_dense_replace\":1,\"n_routed_experts\":4,\"num_experts_per_tok\":2,"
            "\"moe_intermediate_size\":32,\"n_shared_experts\":1,\"n_group\":1,\"topk_group\":1"),
     3 * (512 + 64), 0, 0},
    {"head_dim is not hidden / heads",
     CONFIG("Qwen3ForCausalLM", "qwen3",
            "\"hidden_size\":1024,\"num_hidden_layers\":2,\"num_attention_heads\":16,"
            "\"num_key_value_heads\":8,\"head_dim\":128"),
     2 * 2 * 8 * 128, 0, 0},
    {"every layer slides",
     CONFIG("MistralForCausalLM", "mistral",
            "\"hidden_size\":256,\"num_hidden_layers\":2,\"num_attention_heads\":4,"
            "\"num_key_value_heads\":2,\"head_dim\":64,\"sliding_window\":1000"),
     0, 2 * 2 * 2 * 64, 1000},
};

static void by_hand(void **state)
{
    (void)state;
    static const int64_t contexts[] = {16, 32, 4096};
    err e = {0};
    kern_dev *dev;
    CHECK_OK(kern_open(&dev, &(kern_opts){.threads = 1}, &e));
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int k = 0; k < 3; k++) {
            json *raw;
            ckpt_config c;
            arch_model *m;
            plan_out p;
            kv_pool *pool;
            kv_layer_shape layers[8];
            CHECK_OK(json_parse(&raw, shapes[i].config, strlen(shapes[i].config), "x", &e));
            CHECK_OK(config_parse(&c, raw, NULL, "config.json", &e));
            int64_t n = contexts[k], chunk = 512;
            plan_in in = {.cfg = &c,
                          .kv = KV_BF16,
                          .threads = 1,
                          .context = n,
                          .concurrency = 2,
                          .chunk_tokens = chunk,
                          .page_tokens = 16};
            CHECK_OK(plan_compute(&in, &p, &e));
            /* Window layers: the context, or the pages that window - 1 + chunk tokens touch
             * wherever they begin: less than two pages more than window + chunk. */
            int64_t slide = ((shapes[i].window - 1 + chunk + 14) / 16 + 1) * 16;
            assert_true(slide < shapes[i].window + chunk + 32);
            slide = slide < n ? slide : n;
            assert_int_equal(p.kv_token, 2 * (shapes[i].full_lanes + shapes[i].window_lanes));
            uint64_t want =
                2 * 2 *
                ((uint64_t)n * shapes[i].full_lanes + (uint64_t)slide * shapes[i].window_lanes);
            print_message("%-32s context %4d: %9llu bytes, all layers in full %9llu\n",
                          shapes[i].name, (int)n, (unsigned long long)p.kv_total,
                          (unsigned long long)((uint64_t)n * p.kv_token * 2));
            assert_int_equal(p.kv_total, want);
            /* And the pool itself. */
            CHECK_OK(arch_open(&m, &c, NULL, &e));
            arch_kv_shapes(m, layers);
            kv_pool_opts o = {.type = KV_BF16,
                              .n_layers = m->n_layers,
                              .layers = layers,
                              .page_tokens = 16,
                              .n_pages = {2 * n / 16, 2 * slide / 16}};
            CHECK_OK(kv_pool_open(&pool, dev, &o, &e));
            assert_int_equal(kv_pool_bytes(pool), want);
            kv_pool_close(pool);
            arch_close(m);
            config_free(&c);
            json_drop(raw);
        }
    kern_close(dev);
}

/* ---- gguf ---------------------------------------------------------------------------------------
 */

static void word(buf *b, uint32_t v)
{
    buf_add(b, &v, 4);
}
static void name(buf *b, const char *s)
{
    buf_add(b, &(uint64_t){strlen(s)}, 8);
    buf_puts(b, s);
}

/* A header with head_count_kv as an array of 4 layers, and one tensor. */
static void gguf_with(const uint32_t heads[4], const char *path)
{
    static const struct {
        const char *key;
        uint32_t v;
    } keys[] = {{"llama.block_count", 4},          {"llama.embedding_length", 64},
                {"llama.feed_forward_length", 64}, {"llama.context_length", 128},
                {"llama.attention.head_count", 8}, {"llama.attention.key_length", 8}};
    err e = {0};
    buf b = {0};
    buf_puts(&b, "GGUF");
    word(&b, 3);
    buf_add(&b, (uint64_t[]){1, 9}, 16); /* tensors, keys */
    name(&b, "general.architecture");
    word(&b, GGUF_STR);
    name(&b, "llama");
    for (int i = 0; i < 6; i++) {
        name(&b, keys[i].key);
        word(&b, GGUF_U32);
        word(&b, keys[i].v);
    }
    name(&b, "llama.attention.layer_norm_rms_epsilon");
    word(&b, GGUF_F32);
    buf_add(&b, &(float){1e-5f}, 4);
    name(&b, "llama.attention.head_count_kv");
    word(&b, GGUF_ARR);
    word(&b, GGUF_U32);
    buf_add(&b, &(uint64_t){4}, 8);
    buf_add(&b, heads, 16);
    name(&b, "token_embd.weight");
    word(&b, 2);
    buf_add(&b, (uint64_t[]){64, 2}, 16);
    word(&b, 0); /* F32 */
    buf_add(&b, &(uint64_t){0}, 8);
    while (b.len % 32)
        buf_putc(&b, 0);
    for (int i = 0; i < 128; i++)
        buf_add(&b, &(float){1}, 4);
    CHECK_OK(file_write_atomic(path, b.data, b.len, &e));
    buf_free(&b);
}

/* Heads that differ between layers are never read as those of layer 0. */
static void heads_of_each_layer(void **state)
{
    (void)state;
    static const uint32_t same[] = {2, 2, 2, 2}, differ[] = {0, 0, 8, 0}, last[] = {8, 8, 8, 0};
    char dir[] = "/tmp/tare_plan_kv_XXXXXX";
    err e = {0};
    ckpt *c;
    plan_out p;
    assert_non_null(mkdtemp(dir));
    char *path = file_join(dir, "x.gguf");
    gguf_with(same, path);
    CHECK_OK(ckpt_open(&c, path, &e));
    plan_in in = {.cfg = ckpt_cfg(c),
                  .kv = KV_BF16,
                  .threads = 1,
                  .context = 64,
                  .concurrency = 1,
                  .chunk_tokens = 512,
                  .page_tokens = 16};
    CHECK_OK(plan_compute(&in, &p, &e));
    assert_int_equal(p.kv_total, 64 * 4 * 2 * 2 * 8 * 2);
    ckpt_close(c);
    gguf_with(differ, path);
    CHECK_ERR(ckpt_open(&c, path, &e), ERR_UNSUPPORTED,
              "'llama.attention.head_count_kv' differs between layers (0, 8)");
    gguf_with(last, path);
    CHECK_ERR(ckpt_open(&c, path, &e), ERR_UNSUPPORTED,
              "'llama.attention.head_count_kv' differs between layers (8, 0)");
    free(path);
    CHECK_OK(file_remove_tree(dir, &e));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fixtures),
        cmocka_unit_test(by_hand),
        cmocka_unit_test(heads_of_each_layer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
