/* Pure shapes: what a model of this config consists of, without tensors or devices. plan reads only
 * this header. One row per architecture family; the Llama recipe covers llama, mistral, qwen2,
 * qwen3 by flags. */
#ifndef MODEL_ARCH_H
#define MODEL_ARCH_H
#include "ckpt/config.h"

typedef enum arch_linear_kind {
    ARCH_QKV,
    ARCH_O,
    ARCH_GATE_UP,
    ARCH_DOWN,
    ARCH_LM_HEAD
} arch_linear_kind;

typedef struct arch_shard { /* one stored linear */
    char module[128];       /* "model.layers.3.self_attn.q_proj" */
    int64_t N, K;
    bool bias;
} arch_shard;

typedef struct arch_linear { /* one fused linear = list of shards */
    arch_linear_kind kind;
    int layer; /* -1 outside layers */
    int n_shards;
    arch_shard shard[3];
} arch_linear;

typedef struct arch_row {
    const char *name;                           /* "llama" */
    const char *hf_names;                       /* "LlamaForCausalLM MistralForCausalLM …" */
    int (*check)(const ckpt_config *c, err *e); /* refuses what the recipe cannot do, by key */
} arch_row;
extern const arch_row arch_rows[];
extern const int arch_n_rows;
/* ERR_UNSUPPORTED lists the supported names. */
int arch_find(const ckpt_config *c, const arch_row **out, err *e);

/* All linears in order of use (per layer qkv, o, gate_up, down; then lm_head). Returns count; out
 * may be NULL to count. */
int arch_linears(const ckpt_config *c, arch_linear *out, int cap);
/* All other tensors (embedding, norms): name, elements. Callback per tensor. */
typedef void arch_tensor_fn(void *arg, const char *name, int64_t rows, int64_t cols);
void arch_plain_tensors(const ckpt_config *c, arch_tensor_fn *fn, void *arg);

/* Which stored tensors are embedding and head, whatever tie_word_embeddings claims (ends.c). */
typedef struct arch_ends {
    const char *embed, *head; /* modules: "model.embed_tokens", "lm_head" */
    bool shared;              /* one tensor serves as both */
    char warning[160];        /* "" = config and tensors agree */
} arch_ends;
struct quant_ckpt;
int arch_find_ends(const struct quant_ckpt *q, arch_ends *out, err *e);
int arch_layer_window(const ckpt_config *c, int layer); /* 0 = full attention */
#endif
