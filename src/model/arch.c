/* Architectures: pure shapes. One recipe, the Llama block, covers four families through flags that
 * config.c has read (biases, q/k norms, sliding layers). */
#include "model/arch.h"
#include <stdio.h>
#include <string.h>

/* What the recipe cannot do is refused by the key that asks for it. */
static int check_llama(const ckpt_config *c, err *e)
{
    if (c->intermediate_size < 1)
        return err_set(e, ERR_VALUE,
                       "config.json: 'intermediate_size' is %lld; expected at least 1",
                       (long long)c->intermediate_size);
    if (c->n_heads % c->n_kv_heads)
        return err_set(e, ERR_VALUE,
                       "config.json: %lld attention heads cannot share %lld key/value heads evenly",
                       (long long)c->n_heads, (long long)c->n_kv_heads);
    static const char *const acts[] = {"silu",     "swish", "gelu", "gelu_pytorch_tanh",
                                       "gelu_new", "relu"};
    bool known = false;
    for (size_t i = 0; i < sizeof acts / sizeof *acts; i++)
        known = known || !strcmp(acts[i], c->hidden_act);
    if (!known)
        return err_set(e, ERR_UNSUPPORTED,
                       "config.json: 'hidden_act' is '%s'; supported are silu, gelu, "
                       "gelu_pytorch_tanh and relu",
                       c->hidden_act);
    int64_t rot = (int64_t)((double)c->head_dim * c->rope.partial_rotary_factor);
    if (c->head_dim % 2 || rot % 2 || rot < 2)
        return err_set(
            e, ERR_UNSUPPORTED,
            "config.json: 'head_dim' %lld with %g of it rotated; an even number is needed",
            (long long)c->head_dim, c->rope.partial_rotary_factor);
    if (c->rope.kind == ROPE_LONGROPE && (c->rope.n_short != rot / 2 || c->rope.n_long != rot / 2))
        return err_set(e, ERR_SHAPE,
                       "config.json: longrope needs %lld short and long factors, found %d and %d",
                       (long long)rot / 2, c->rope.n_short, c->rope.n_long);
    return 0;
}

const arch_row arch_rows[] = {
    {"llama", "LlamaForCausalLM", check_llama},
    {"mistral", "MistralForCausalLM", check_llama},
    {"qwen2", "Qwen2ForCausalLM", check_llama},
    {"qwen3", "Qwen3ForCausalLM", check_llama},
};
const int arch_n_rows = sizeof arch_rows / sizeof *arch_rows;

int arch_find(const ckpt_config *c, const arch_row **out, err *e)
{
    *out = NULL;
    for (int i = 0; i < arch_n_rows; i++)
        if (!strcmp(arch_rows[i].hf_names, c->architecture) ||
            (!*c->architecture && !strcmp(arch_rows[i].name, c->model_type))) {
            *out = &arch_rows[i];
            return arch_rows[i].check(c, e);
        }
    buf names = {0};
    for (int i = 0; i < arch_n_rows; i++)
        buf_printf(&names, "%s%s", i ? ", " : "", arch_rows[i].hf_names);
    int rc =
        err_set(e, ERR_UNSUPPORTED,
                "config.json: architecture '%s' (model_type '%s') cannot be run; supported are %s",
                c->architecture, c->model_type, names.data);
    buf_free(&names);
    return rc;
}

static void shard(arch_linear *l, int layer, const char *name, int64_t N, int64_t K, bool bias)
{
    arch_shard *s = &l->shard[l->n_shards++];
    if (layer < 0)
        snprintf(s->module, sizeof s->module, "%s", name);
    else
        snprintf(s->module, sizeof s->module, "model.layers.%d.%s", layer, name);
    s->N = N;
    s->K = K;
    s->bias = bias;
}

static void layer_linears(const ckpt_config *c, int i, arch_linear out[4])
{
    int64_t h = c->hidden_size, q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim,
            f = c->intermediate_size;
    for (int k = 0; k < 4; k++)
        out[k] = (arch_linear){.kind = (arch_linear_kind)k, .layer = i};
    shard(&out[0], i, "self_attn.q_proj", q, h, c->attention_bias);
    shard(&out[0], i, "self_attn.k_proj", kv, h, c->attention_bias);
    shard(&out[0], i, "self_attn.v_proj", kv, h, c->attention_bias);
    shard(&out[1], i, "self_attn.o_proj", h, q, c->attention_out_bias);
    shard(&out[2], i, "mlp.gate_proj", f, h, c->mlp_bias);
    shard(&out[2], i, "mlp.up_proj", f, h, c->mlp_bias);
    shard(&out[3], i, "mlp.down_proj", h, f, c->mlp_bias);
}

int arch_linears(const ckpt_config *c, arch_linear *out, int cap)
{
    int n = 0;
    for (int i = 0; i < c->n_layers; i++) {
        arch_linear four[4];
        layer_linears(c, i, four);
        for (int k = 0; k < 4; k++, n++)
            if (out && n < cap) out[n] = four[k];
    }
    if (out && n < cap) {
        out[n] = (arch_linear){.kind = ARCH_LM_HEAD, .layer = -1};
        shard(&out[n], -1, "lm_head", c->vocab_size, c->hidden_size, false);
    }
    return n + 1;
}

void arch_plain_tensors(const ckpt_config *c, arch_tensor_fn *fn, void *arg)
{
    char name[128];
    fn(arg, "model.embed_tokens.weight", c->vocab_size, c->hidden_size);
    for (int i = 0; i < c->n_layers; i++) {
        snprintf(name, sizeof name, "model.layers.%d.input_layernorm.weight", i);
        fn(arg, name, 1, c->hidden_size);
        snprintf(name, sizeof name, "model.layers.%d.post_attention_layernorm.weight", i);
        fn(arg, name, 1, c->hidden_size);
        if (!c->qk_norm) continue;
        snprintf(name, sizeof name, "model.layers.%d.self_attn.q_norm.weight", i);
        fn(arg, name, 1, c->head_dim);
        snprintf(name, sizeof name, "model.layers.%d.self_attn.k_norm.weight", i);
        fn(arg, name, 1, c->head_dim);
    }
    fn(arg, "model.norm.weight", 1, c->hidden_size);
}

int arch_layer_window(const ckpt_config *c, int layer)
{
    return c->layer_sliding && c->layer_sliding[layer] ? (int)c->sliding_window : 0;
}
