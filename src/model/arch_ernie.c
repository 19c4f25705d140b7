/* ERNIE 4.5: the Llama block, neighbouring lanes rotated. The MoE models choose experts by softmax
 * scores plus a correction, in the layers from moe_layer_start_index to moe_layer_end_index. */
#include "model/arch_families.h"

int arch__ernie(arch_model *m, err *e)
{
    bool bias = false;
    int rc = arch_bool(m, "use_bias", &bias, e);
    if (rc < 0) return rc;
    m->rope_pairs = true;
    m->qkv_bias = m->o_bias = m->mlp_bias = bias;
    return arch__llama(m, e);
}

int arch__ernie_moe(arch_model *m, err *e)
{
    int shared = 2, first = 1, last = m->n_layers - 1, step = 1;
    int64_t end = -1;
    int rc = arch__ernie(m, e);
    if (rc < 0) goto out;
    TRY(arch__experts(m, m->n_layers, e));
    m->moe.top_k = 6;
    TRY(arch_int(m, "num_experts_per_tok", &m->moe.top_k, 65536, e));
    TRY(arch_int(m, "moe_k", &m->moe.top_k, 65536, e));
    TRY(arch_int(m, "moe_num_experts", &m->moe.E, 65536, e));
    TRY(arch_int(m, "moe_num_shared_experts", &shared, 1024, e));
    TRY(arch_int(m, "moe_layer_start_index", &first, 1 << 16, e));
    TRY(arch_i64(m, "moe_layer_end_index", &end, e));
    TRY(arch_int(m, "moe_layer_interval", &step, 1 << 16, e));
    if (end >= 0 && end < last) last = (int)end;
    for (int i = first; step > 0 && i <= last; i++)
        if ((i + 1) % step == 0) m->layers[i].ffn = ARCH_MOE;
    m->moe.renorm = true;
    m->moe.shared_inter = shared * m->moe.inter;
    m->name.shared = "mlp.shared_experts.";
    m->name.route_bias = "mlp.moe_statics.e_score_correction_bias";
    rc = 0;
out:
    return rc;
}
