/* Phi 3.5 MoE: Mixtral's block with layer norms and biases, its experts weighed by the sparse
 * mixer. Its longrope names the factor of cos and sin; one for short and long sequences alike is
 * run. */
#include "model/arch_families.h"

static int mscale(arch_model *m, err *e)
{
    static const char *const keys[] = {"rope_scaling", "rope_parameters"};
    double s = 0, l = 0;
    int rc = 0;
    for (size_t i = 0; rc >= 0 && i < sizeof keys / sizeof *keys; i++) {
        const json *o = json_get(m->cfg->text, keys[i]);
        rc = json_get_f64(o, "short_mscale", &s, m->cfg->where, e);
        if (rc >= 0) rc = json_get_f64(o, "long_mscale", &l, m->cfg->where, e);
    }
    if (rc < 0) return rc;
    if (s != l)
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: 'short_mscale' %g and 'long_mscale' %g differ, which cannot be run",
                       m->cfg->where, s, l);
    if (m->rope[0].kind == ROPE_LONGROPE && s > 0) m->rope[0].attention_factor = s;
    return 0;
}

int arch__phimoe(arch_model *m, err *e)
{
    int rc = arch__mixtral(m, e);
    if (rc >= 0) rc = mscale(m, e);
    if (rc < 0) goto out;
    m->norm = ARCH_LAYER_NORM;
    m->moe.route = KERN_ROUTE_SPARSE_MIX;
    m->moe.jitter = 0.01f;
    TRY(arch_f32(m, "router_jitter_noise", &m->moe.jitter, e));
    TRY(arch_bool(m, "lm_head_bias", &m->head_bias, e));
    rc = m->moe.top_k == 2 ? 0
                           : err_set(e, ERR_UNSUPPORTED,
                                     "%s: 'num_experts_per_tok' is %d; the sparse mixer takes 2",
                                     m->cfg->where, m->moe.top_k);
out:
    return rc;
}
