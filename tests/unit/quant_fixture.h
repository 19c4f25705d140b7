/* Small checkpoints written on the spot: a config text and a list of tensors. */
#ifndef TESTS_QUANT_FIXTURE_H
#define TESTS_QUANT_FIXTURE_H
#include "check.h"
#include "bake/bake.h"
#include "quant/quant.h"
#include <unistd.h>

static char fx_dir[64];

typedef struct fx_tensor {
    const char *name;
    num_dtype type;
    int n_dims;
    int64_t shape[3];
    const void *data; /* NULL = zeros */
} fx_tensor;

static inline int fx_setup(void **state)
{
    (void)state;
    strcpy(fx_dir, "/tmp/tare_quant_XXXXXX");
    return mkdtemp(fx_dir) ? 0 : -1;
}

static inline int fx_teardown(void **state)
{
    (void)state;
    return file_remove_tree(fx_dir, NULL);
}

static inline char *fx_path(const char *name)
{
    return file_join(fx_dir, name);
}

/* Config of a one-layer Llama of the given sizes with `extra` ("" or ", \"key\": …") at the end. */
static inline char *fx_config(int hidden, int ffn, int layers, const char *extra)
{
    return xasprintf(
        "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", "
        "\"vocab_size\": 32, \"hidden_size\": %d, \"intermediate_size\": %d, "
        "\"num_hidden_layers\": %d, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, "
        "\"head_dim\": %d, \"max_position_embeddings\": 64, \"rms_norm_eps\": 1e-5, "
        "\"rope_theta\": 10000.0, \"hidden_act\": \"silu\", \"dtype\": \"bfloat16\", "
        "\"tie_word_embeddings\": false, \"keep_me\": \"as it is\"%s}",
        hidden, ffn, layers, hidden / 2, extra);
}

/* Replaces dir. */
static inline void fx_write(const char *dir, const char *config, const fx_tensor *t, size_t n)
{
    err e = {0};
    ckpt_writer *w;
    file_remove_tree(dir, NULL);
    CHECK_OK(ckpt_writer_open(&w, dir, 0, true, &e));
    for (size_t i = 0; i < n; i++) {
        size_t count = 1;
        for (int d = 0; d < t[i].n_dims; d++)
            count *= (size_t)t[i].shape[d];
        void *zeros = xcalloc(count * (size_t)num_infos[t[i].type].bits / 8 + 1, 1);
        CHECK_OK(ckpt_writer_tensor(w, t[i].name, t[i].type, t[i].n_dims, t[i].shape,
                                    t[i].data ? t[i].data : zeros, &e));
        free(zeros);
    }
    CHECK_OK(ckpt_writer_finish(w, config, &e));
    CHECK_OK(ckpt_writer_publish(&w, &e));
}

/* Repeatable noise in (-1, 1), heavier near 0. */
static inline float fx_noise(uint64_t *s)
{
    *s = *s * 6364136223846793005u + 1442695040888963407u;
    float x = (float)(int32_t)(*s >> 32) / 2147483648.0f;
    return x * x * x;
}

static inline uint16_t *fx_bf16(size_t n, uint64_t seed)
{
    uint16_t *v = xmalloc(n * sizeof *v + 1);
    for (size_t i = 0; i < n; i++)
        v[i] = num_f32_to_bf16(fx_noise(&seed) * 0.1f);
    return v;
}

/* A whole unquantized Llama with random weights. */
static inline void fx_llama(const char *dir, int hidden, int ffn, int layers, const char *extra)
{
    static const char *const names[] = {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
        "self_attn.o_proj", "mlp.gate_proj",    "mlp.up_proj",
        "mlp.down_proj",    "input_layernorm",  "post_attention_layernorm"};
    int64_t h = hidden, f = ffn, kv = hidden / 2;
    const int64_t shapes[][2] = {{h, h}, {kv, h}, {kv, h}, {h, h}, {f, h},
                                 {f, h}, {h, f},  {h, 0},  {h, 0}};
    size_t n = 0;
    fx_tensor *t = xcalloc((size_t)layers * 9 + 3, sizeof *t);
    t[n++] = (fx_tensor){
        "model.embed_tokens.weight", NUM_BF16, 2, {32, h}, fx_bf16((size_t)(32 * h), 1)};
    for (int l = 0; l < layers; l++)
        for (int i = 0; i < 9; i++)
            t[n++] = (fx_tensor){xasprintf("model.layers.%d.%s.weight", l, names[i]),
                                 NUM_BF16,
                                 shapes[i][1] ? 2 : 1,
                                 {shapes[i][0], shapes[i][1]},
                                 fx_bf16((size_t)(shapes[i][0] * (shapes[i][1] ? shapes[i][1] : 1)),
                                         (uint64_t)(l * 16 + i + 2))};
    t[n++] = (fx_tensor){"model.norm.weight", NUM_BF16, 1, {h}, fx_bf16((size_t)h, 3)};
    t[n++] = (fx_tensor){"lm_head.weight", NUM_BF16, 2, {32, h}, fx_bf16((size_t)(32 * h), 4)};
    char *config = fx_config(hidden, ffn, layers, extra);
    fx_write(dir, config, t, n);
    for (size_t i = 0; i < n; i++) {
        free((void *)(uintptr_t)t[i].data);
        if (i && i < n - 2) free((void *)(uintptr_t)t[i].name);
    }
    free(config);
    free(t);
}
#endif
