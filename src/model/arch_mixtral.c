/* Mixtral and MiniMax M2: the Llama block with experts named w1 (gate), w3 (up), w2 (down). MiniMax
 * chooses by sigmoid scores with a correction bias, and norms q and k over all heads. */
#include "model/arch_families.h"

int arch__mixtral(arch_model *m, err *e)
{
    int rc = arch__llama(m, e);
    if (rc < 0) return rc;
    rc = arch__experts(m, 0, e);
    if (rc < 0) return rc;
    m->moe.route = KERN_ROUTE_TOPK_SOFTMAX;
    m->moe.renorm = false; /* that is part of it */
    m->name.router = "block_sparse_moe.gate";
    m->name.experts = "block_sparse_moe.experts.";
    m->name.e_gate = "w1";
    m->name.e_up = "w3";
    m->name.e_down = "w2";
    m->name.e_gate_up = NULL;
    return 0;
}

int arch__minimax_m2(arch_model *m, err *e)
{
    int rc = arch__mixtral(m, e);
    if (rc < 0) return rc;
    m->moe.route = KERN_ROUTE_SIGMOID;
    m->moe.renorm = true;
    m->name.route_bias = "block_sparse_moe.e_score_correction_bias";
    m->qk_norm = ARCH_QK_WHOLE;
    rc = arch_i64(m, "rotary_dim", &m->rot, e);
    return rc < 0 ? rc : 0;
}
