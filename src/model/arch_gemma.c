/* Gemma 1, 2, 3: norms stored without their 1, embeddings times sqrt(hidden). Gemma 2 norms before
 * and after both halves, caps scores and logits, and alternates windowed and full layers; Gemma 3
 * has q/k norms, one full layer in six, and a rotary table of its own for windowed layers. */
#include <math.h>
#include "model/arch_families.h"

int arch__gemma(arch_model *m, err *e)
{
    m->norm = ARCH_RMS_ONE;
    m->embed_scale = sqrtf((float)m->hidden);
    if (arch_has(m, "hidden_activation")) return arch__llama(m, e);
    m->act = KERN_GELU_TANH; /* whatever hidden_act of old files says */
    return 0;
}

static int sandwich(arch_model *m, err *e)
{
    float q = (float)m->D;
    int rc = arch__gemma(m, e);
    if (rc < 0) goto out;
    m->name.post_mix = "post_attention_layernorm";
    m->name.norm2 = "pre_feedforward_layernorm";
    m->name.post_ffn = "post_feedforward_layernorm";
    TRY(arch_f32(m, "query_pre_attn_scalar", &q, e));
    TRY(arch_f32(m, "attn_logit_softcapping", &m->attn_softcap, e));
    TRY(arch_f32(m, "final_logit_softcapping", &m->logit_softcap, e));
    if (!(q > 0)) {
        rc = err_set(e, ERR_VALUE, "%s: 'query_pre_attn_scalar' is %g; expected more than 0",
                     m->cfg->where, (double)q);
        goto out;
    }
    m->attn_scale = 1.0f / sqrtf(q);
    rc = 0;
out:
    return rc;
}

int arch__gemma2(arch_model *m, err *e)
{
    arch__windows(m, 2);
    return sandwich(m, e);
}

int arch__gemma3(arch_model *m, err *e)
{
    int every = 6;
    int rc = arch__must(m, "use_bidirectional_attention", false, e); /* an encoder */
    if (rc >= 0) rc = arch_int(m, "sliding_window_pattern", &every, 1 << 16, e);
    if (rc < 0) return rc;
    arch__windows(m, every > 0 ? every : 6);
    m->qk_norm = ARCH_QK_HEAD;
    m->rope[1] = m->cfg->rope_local;
    if (!m->cfg->has_rope_local) m->rope[1].theta = 10000.0;
    m->n_ropes = 2;
    for (int i = 0; i < m->n_layers; i++)
        m->layers[i].rope = m->layers[i].window ? 1 : 0;
    return sandwich(m, e);
}
