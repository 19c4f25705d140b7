/* StableLM 2: layer norms; a quarter of each head is rotated; the halves may run side by side from
 * one norm. */
#include "model/arch_families.h"

int arch__stablelm(arch_model *m, err *e)
{
    bool head_norms = false;
    int rc = arch__llama(m, e);
    if (rc < 0) goto out;
    m->norm = ARCH_LAYER_NORM;
    m->o_bias = false;
    TRY(arch_bool(m, "use_qkv_bias", &m->qkv_bias, e));
    TRY(arch_bool(m, "use_parallel_residual", &m->parallel, e));
    TRY(arch_bool(m, "qk_layernorm", &head_norms, e));
    if (m->parallel) m->name.norm2 = NULL;
    rc = head_norms ? err_set(e, ERR_UNSUPPORTED,
                              "%s: 'qk_layernorm' true (norms stored head by head) cannot be run",
                              m->cfg->where)
                    : 0;
out:
    return rc;
}
