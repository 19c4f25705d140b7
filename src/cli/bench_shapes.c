/* Shapes that `tare bench --shape` knows, from the config.json of the published models: sizes,
 * rotary tables and experts; what has no bearing on speed is left out. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/file.h"
#include "cli/bench.h"

#define LLAMA3(hidden, inter, layers, heads, kv, dim, tie, factor)                                 \
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_act\":\"silu\","  \
    "\"hidden_size\":" #hidden ",\"intermediate_size\":" #inter ",\"num_hidden_layers\":" #layers  \
    ",\"num_attention_heads\":" #heads ",\"num_key_value_heads\":" #kv ",\"head_dim\":" #dim       \
    ",\"vocab_size\":128256,\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-05,"            \
    "\"rope_theta\":500000.0,\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":" #factor       \
    ",\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"                                           \
    "\"original_max_position_embeddings\":8192},\"tie_word_embeddings\":" #tie                     \
    ",\"torch_dtype\":\"bfloat16\"}"

const bench_shape bench_shapes[] = {
    {"llama-3.2-1b", LLAMA3(2048, 8192, 16, 32, 8, 64, true, 32.0)},
    {"llama-3.1-8b", LLAMA3(4096, 14336, 32, 32, 8, 128, false, 8.0)},
    {"llama-3.1-70b", LLAMA3(8192, 28672, 80, 64, 8, 128, false, 8.0)},
    {"qwen3-30b-a3b",
     "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"model_type\":\"qwen3_moe\","
     "\"hidden_act\":\"silu\",\"hidden_size\":2048,\"intermediate_size\":6144,"
     "\"moe_intermediate_size\":768,\"num_hidden_layers\":48,\"num_attention_heads\":32,"
     "\"num_key_value_heads\":4,\"head_dim\":128,\"num_experts\":128,\"num_experts_per_tok\":8,"
     "\"norm_topk_prob\":true,\"decoder_sparse_step\":1,\"mlp_only_layers\":[],"
     "\"vocab_size\":151936,\"max_position_embeddings\":40960,\"rms_norm_eps\":1e-06,"
     "\"rope_theta\":1000000.0,\"tie_word_embeddings\":false,\"torch_dtype\":\"bfloat16\"}"},
};
const int bench_n_shapes = sizeof bench_shapes / sizeof *bench_shapes;

int bench_shape_text(const char *name, char **out, err *e)
{
    size_t n = strlen(name);
    buf text = {0};
    for (int i = 0; i < bench_n_shapes; i++)
        if (!strcmp(bench_shapes[i].name, name)) {
            *out = xstrdup(bench_shapes[i].config);
            return 0;
        }
    if (n > 5 && !strcmp(name + n - 5, ".json")) {
        int rc = file_read_all(&text, name, (size_t)16 << 20, e);
        if (rc < 0) return rc;
        *out = xstrdup(text.data ? text.data : "");
        buf_free(&text);
        return 0;
    }
    for (int i = 0; i < bench_n_shapes; i++)
        buf_printf(&text, "%s%s", i ? ", " : "", bench_shapes[i].name);
    int rc =
        err_set(e, ERR_USAGE, "--shape: '%s' is not known; use %s, or FILE.json", name, text.data);
    buf_free(&text);
    return rc;
}
