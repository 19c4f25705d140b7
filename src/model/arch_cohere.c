/* Command R: one layer norm feeds attention and feed-forward side by side, neighbouring lanes are
 * rotated, logits are scaled. Command R7B and A alternate windowed layers and full ones; only the
 * windowed are rotated. */
#include "model/arch_families.h"

int arch__cohere(arch_model *m, err *e)
{
    bool norm = false;
    int rc = arch__llama(m, e);
    if (rc < 0) goto out;
    m->norm = ARCH_LAYER_NORM;
    m->name.norm2 = NULL;
    m->parallel = m->rope_pairs = true;
    m->logit_scale = 0.0625f;
    TRY(arch_f32(m, "logit_scale", &m->logit_scale, e));
    TRY(arch_bool(m, "use_qk_norm", &norm, e));
    if (norm) m->qk_norm = ARCH_QK_HEAD_LAYER;
    rc = 0;
out:
    return rc;
}

int arch__cohere2(arch_model *m, err *e)
{
    int every = 4;
    int rc = arch__cohere(m, e);
    if (rc >= 0) rc = arch_int(m, "sliding_window_pattern", &every, 1 << 16, e);
    if (rc < 0) return rc;
    m->qk_norm = ARCH_QK_NONE;
    arch__windows(m, every > 0 ? every : 4);
    for (int i = 0; i < m->n_layers; i++)
        m->layers[i].rope = m->layers[i].window ? 0 : -1;
    return 0;
}
