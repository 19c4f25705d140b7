/* GPT-2: learned positions, layer norms, biases, linears stored [in, out]. */
#include "model/arch_families.h"

int arch__gpt2(arch_model *m, err *e)
{
    m->norm = ARCH_LAYER_NORM;
    m->linear_transposed = true;
    m->Hk = m->H;
    m->qkv_bias = m->o_bias = m->mlp_bias = true;
    m->name.embed = "transformer.wte";
    m->name.pos = "transformer.wpe";
    m->name.final_norm = "transformer.ln_f";
    m->name.layer = "transformer.h.%d.";
    m->name.norm1 = "ln_1";
    m->name.norm2 = "ln_2";
    m->name.qkv = "attn.c_attn";
    m->name.o = "attn.c_proj";
    m->name.up = "mlp.c_fc";
    m->name.down = "mlp.c_proj";
    for (int i = 0; i < m->n_layers; i++) {
        m->layers[i].ffn = ARCH_MLP;
        m->layers[i].rope = -1;
    }
    int rc = arch__must(m, "scale_attn_weights", true, e);
    if (rc >= 0) rc = arch__must(m, "scale_attn_by_inverse_layer_idx", false, e);
    if (rc >= 0) rc = arch__must(m, "add_cross_attention", false, e);
    return rc < 0 ? rc : arch__llama(m, e);
}
