/* StarCoder 2: layer norms, biases everywhere, a feed-forward without gate. */
#include "model/arch_families.h"

int arch__starcoder2(arch_model *m, err *e)
{
    int rc = arch__llama(m, e);
    if (rc < 0) goto out;
    bool bias = true;
    m->norm = ARCH_LAYER_NORM;
    TRY(arch_bool(m, "use_bias", &bias, e));
    m->qkv_bias = m->o_bias = m->mlp_bias = bias;
    m->name.up = "mlp.c_fc";
    m->name.down = "mlp.c_proj";
    for (int i = 0; i < m->n_layers; i++)
        m->layers[i].ffn = ARCH_MLP;
    rc = 0;
out:
    return rc;
}
