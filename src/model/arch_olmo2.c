/* OLMo 2 and 3: attention and feed-forward read the stream as it is, their outputs are normed; q
 * and k are normed over all heads together. OLMo 3 adds windows (layer_types). */
#include "model/arch_families.h"

int arch__olmo2(arch_model *m, err *e)
{
    m->name.norm1 = m->name.norm2 = NULL;
    m->name.post_mix = "post_attention_layernorm";
    m->name.post_ffn = "post_feedforward_layernorm";
    m->qk_norm = ARCH_QK_WHOLE;
    return arch__llama(m, e);
}
