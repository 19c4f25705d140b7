/* GLM 4: gate and up in one linear, neighbouring lanes of half a head are rotated; the models of
 * 2025 norm before and after both halves. */
#include "model/arch_families.h"

int arch__glm(arch_model *m, err *e)
{
    m->name.gate_up = "mlp.gate_up_proj";
    m->rope_pairs = true;
    m->o_bias = false;
    return arch__llama(m, e);
}

int arch__glm4(arch_model *m, err *e)
{
    m->name.post_mix = "post_self_attn_layernorm";
    m->name.post_ffn = "post_mlp_layernorm";
    return arch__glm(m, e);
}
