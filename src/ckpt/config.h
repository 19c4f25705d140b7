/* config.json (and generation_config.json, tokenizer_config.json) as a typed struct, in the
 * transformers 4 and 5 spellings: rope_theta + rope_scaling + torch_dtype, or rope_parameters +
 * dtype. Where both are present and differ the newer spelling wins and a warning is recorded.
 * Values a model needs and the file lacks are errors that name the key. */
#ifndef CKPT_CONFIG_H
#define CKPT_CONFIG_H
#include "base/json.h"
#include "num/num.h"

typedef enum rope_kind {
    ROPE_DEFAULT,
    ROPE_LINEAR,
    ROPE_DYNAMIC,
    ROPE_LLAMA3,
    ROPE_YARN,
    ROPE_LONGROPE,
    ROPE_NONE
} rope_kind;

typedef struct rope_config {
    rope_kind kind;
    double theta;
    double factor;
    double partial_rotary_factor;                  /* 1 = whole head */
    double low_freq_factor, high_freq_factor;      /* llama3 */
    int64_t original_max_position;                 /* llama3, yarn, longrope, dynamic */
    double beta_fast, beta_slow, attention_factor; /* yarn; attention_factor 0 = derive */
    double mscale, mscale_all_dim;                 /* yarn, deepseek form; 0 = absent */
    bool truncate;                                 /* yarn: round the correction range (true) */
    int n_short, n_long;
    double *short_factor, *long_factor; /* longrope */
} rope_config;

#define CFG_MAX_EOS 16

typedef struct ckpt_config {
    char architecture[64]; /* architectures[0], e.g. "LlamaForCausalLM" */
    char model_type[64];
    num_dtype dtype; /* as the file says; the tensors' own tags decide */
    int64_t vocab_size, hidden_size, intermediate_size;
    int64_t n_layers, n_heads, n_kv_heads, head_dim;
    int64_t max_position;
    double rms_norm_eps;
    char hidden_act[32];
    bool tie_embeddings, tie_embeddings_present;
    bool attention_bias, attention_out_bias, mlp_bias; /* qwen2: q/k/v yes, o no */
    bool qk_norm;                                      /* qwen3 */
    int64_t sliding_window;                            /* 0 = none */
    uint8_t *layer_sliding; /* [n_layers] 1 = this layer uses the window */
    rope_config rope;
    rope_config rope_local; /* of windowed layers, where they have a table of their own (gemma 3) */
    bool has_rope_local;
    int n_bos, n_eos;
    int64_t bos[CFG_MAX_EOS], eos[CFG_MAX_EOS]; /* eos: union of config.json, generation_config.json
                                                   and the tokenizer's eos token (added by text) */
    const json *raw;         /* whole config.json, for dialects; owned by the checkpoint */
    const json *text;        /* the object with the language model's keys: raw or its text_config */
    const char *where;       /* path, for messages */
    const json *quant;       /* quantization_config / compression_config object or NULL */
    const char *quant_where; /* file and key where it was found */
    char **warnings;
    int n_warnings;
    arena *mem;
} ckpt_config;

/* `raw` must outlive cfg. gen may be NULL. where = path for messages. */
int config_parse(ckpt_config *cfg, const json *raw, const json *gen, const char *where, err *e);
void config_free(ckpt_config *cfg);
#endif
