/* Granite 3: the Llama block with a multiplier on embedding, scores, residual adds and logits. */
#include "model/arch_families.h"

int arch__granite(arch_model *m, err *e)
{
    float logits = 1.0f;
    int rc = arch__llama(m, e);
    if (rc < 0) goto out;
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
