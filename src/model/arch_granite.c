/* Granite 3: the Llama block with a multiplier on embedding, scores, residual adds and logits; the
 * MoE models keep all experts of a layer in one tensor. */
#include "model/arch_families.h"

int arch__granite(arch_model *m, err *e)
{
    float logits = 1.0f;
    int rc = arch__llama(m, e);
    if (rc < 0) goto out;
    m->attn_scale = 1.0f;
    TRY(arch_f32(m, "embedding_multiplier", &m->embed_scale, e));
    TRY(arch_f32(m, "attention_multiplier", &m->attn_scale, e));
    TRY(arch_f32(m, "residual_multiplier", &m->residual_scale, e));
    TRY(arch_f32(m, "logits_scaling", &logits, e));
    if (!(logits > 0)) {
        rc = err_set(e, ERR_VALUE, "%s: 'logits_scaling' is %g; expected more than 0",
                     m->cfg->where, (double)logits);
        goto out;
    }
    m->logit_scale = 1.0f / logits;
    rc = 0;
out:
    return rc;
}

int arch__granitemoe(arch_model *m, err *e)
{
    int rc = arch__granite(m, e);
    if (rc >= 0) rc = arch__experts(m, 0, e);
    if (rc < 0) return rc;
    m->moe.route = KERN_ROUTE_TOPK_SOFTMAX;
    m->moe.renorm = false; /* that is part of it */
    m->moe.fused = true;
    m->name.router = "block_sparse_moe.router.layer";
    m->name.experts = "block_sparse_moe.";
    m->name.e_gate_up = "input_linear";
    m->name.e_down = "output_linear";
    return 0;
}
