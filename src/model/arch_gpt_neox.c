/* GPT-NeoX and Pythia: layer norms, biases, q/k/v stored head by head, both halves read the stream
 * through norms of their own. */
#include "model/arch_families.h"

int arch__gpt_neox(arch_model *m, err *e)
{
    bool bias = true;
    int rc = arch__llama(m, e);
    if (rc < 0) goto out;
    m->norm = ARCH_LAYER_NORM;
    m->parallel = true;
    TRY(arch_bool(m, "use_parallel_residual", &m->parallel, e));
    TRY(arch_bool(m, "attention_bias", &bias, e));
    m->qkv_bias = m->o_bias = bias;
    m->mlp_bias = true;
    m->qkv_by_head = true;
    m->Hk = m->H; /* whatever num_key_value_heads says */
    m->name.embed = "gpt_neox.embed_in";
    m->name.final_norm = "gpt_neox.final_layer_norm";
    m->name.head = "embed_out";
    m->name.layer = "gpt_neox.layers.%d.";
    m->name.qkv = "attention.query_key_value";
    m->name.o = "attention.dense";
    m->name.up = "mlp.dense_h_to_4h";
    m->name.down = "mlp.dense_4h_to_h";
    for (int i = 0; i < m->n_layers; i++)
        m->layers[i].ffn = ARCH_MLP;
    rc = 0;
out:
    return rc;
}
