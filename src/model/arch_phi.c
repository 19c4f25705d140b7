/* Phi 1, 1.5 and 2: one layer norm feeds attention and a feed-forward without gate side by side;
 * biases everywhere, the head included. */
#include "model/arch_families.h"

int arch__phi(arch_model *m, err *e)
{
    int rc = arch__must(m, "qk_layernorm", false, e);
    if (rc < 0) return rc;
    m->norm = ARCH_LAYER_NORM;
    m->parallel = true;
    m->qkv_bias = m->o_bias = m->mlp_bias = m->head_bias = true;
    m->name.norm2 = NULL;
    m->name.final_norm = "model.final_layernorm";
    m->name.o = "self_attn.dense";
    m->name.up = "mlp.fc1";
    m->name.down = "mlp.fc2";
    return arch__arcee(m, e);
}
