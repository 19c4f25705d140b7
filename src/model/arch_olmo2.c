/* OLMo 2 and 3: attention and feed-forward read the stream as it is, their outputs are normed; q
 * and k are normed over all heads together. OLMo 3 adds windows, whose layers keep the plain rotary
 * table where that of full layers is stretched. OLMoE is the Llama block with these norms. */
#include "model/arch_families.h"

int arch__olmo2(arch_model *m, err *e)
{
    m->name.norm1 = m->name.norm2 = NULL;
    m->name.post_mix = "post_attention_layernorm";
    m->name.post_ffn = "post_feedforward_layernorm";
    m->qk_norm = ARCH_QK_WHOLE;
    return arch__llama(m, e);
}

int arch__olmo3(arch_model *m, err *e)
{
    arch__windows(m, 4);
    m->rope[1] = m->cfg->rope_local;
    m->n_ropes = 2;
    for (int i = 0; i < m->n_layers; i++)
        m->layers[i].rope = m->layers[i].window ? 1 : 0;
    return arch__olmo2(m, e);
}

int arch__olmoe(arch_model *m, err *e)
{
    int rc = arch__llama(m, e);
    if (rc < 0) goto out;
    TRY(arch__experts(m, 0, e));
    m->qk_norm = ARCH_QK_WHOLE;
    m->moe.renorm = false;
    TRY(arch_bool(m, "norm_topk_prob", &m->moe.renorm, e));
    rc = arch_has(m, "clip_qkv")
             ? err_set(e, ERR_UNSUPPORTED, "%s: 'clip_qkv' cannot be run; expected null",
                       m->cfg->where)
             : 0;
out:
    return rc;
}
