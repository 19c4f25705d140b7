/* gpt-oss: alternating windows, an attention sink for each head, biases everywhere, all experts of
 * a layer in one tensor with gate and up rows alternating, a clamped gate. */
#include "model/arch_families.h"

int arch__gpt_oss(arch_model *m, err *e)
{
    int rc = arch__llama(m, e);
    if (rc < 0) return rc;
    rc = arch__experts(m, 0, e);
    if (rc < 0) return rc;
    if (!arch_has(m, "layer_types"))
        for (int i = 0; i < m->n_layers; i++)
            m->layers[i].window = i % 2 ? 0 : (int)m->cfg->sliding_window;
    m->name.sinks = "self_attn.sinks";
    m->name.router = "mlp.router";
    m->moe.route = KERN_ROUTE_TOPK_SOFTMAX;
    m->moe.renorm = false;
    m->moe.act = KERN_SWIGLU_OAI;
    m->moe.fused = m->moe.fused_transposed = m->moe.interleaved = m->moe.bias = true;
    return 0;
}
