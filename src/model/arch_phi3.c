/* Phi 3 and 4: the Llama block with q/k/v and gate/up stored as one linear each. */
#include "model/arch_families.h"

int arch__phi3(arch_model *m, err *e)
{
    m->name.qkv = "self_attn.qkv_proj";
    m->name.gate_up = "mlp.gate_up_proj";
    return arch__llama(m, e);
}
