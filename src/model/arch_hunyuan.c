/* Hunyuan: the Llama block whose q and k are normed after the rotation, with a base frequency that
 * `alpha` raises once and for all (theta * alpha^(d/(d-2))). The MoE models have a shared expert;
 * their files say each layer's numbers, which must be the same. */
#include <math.h>
#include "model/arch_families.h"

/* One number, or a list of the same for every layer. Absent: *out stays. */
static int same(const arch_model *m, const char *key, int *out, err *e)
{
    const json *v = json_get(m->cfg->text, key);
    if (!cJSON_IsArray(v)) return arch_int(m, key, out, 1 << 26, e);
    for (const json *x = v->child; x; x = x->next)
        if (!cJSON_IsNumber(x) || x->valuedouble != v->child->valuedouble || x->valuedouble < 1 ||
            x->valuedouble > 65536)
            return err_set(e, ERR_UNSUPPORTED,
                           "%s: '%s' differs from layer to layer; expected one number for all",
                           m->cfg->where, key);
    if (v->child) *out = (int)v->child->valuedouble;
    return 0;
}

int arch__hunyuan(arch_model *m, err *e)
{
    double alpha = 0;
    static const char *const keys[] = {"rope_scaling", "rope_parameters"};
    int rc = arch__must(m, "use_cla", false, e); /* layers that share keys and values */
    for (size_t i = 0; rc >= 0 && i < sizeof keys / sizeof *keys; i++)
        rc = json_get_f64(json_get(m->cfg->text, keys[i]), "alpha", &alpha, m->cfg->where, e);
    if (rc < 0) return rc;
    if (m->rope[0].kind == ROPE_DYNAMIC && alpha > 0) {
        m->rope[0].kind = ROPE_DEFAULT;
        m->rope[0].theta *= pow(alpha, (double)m->rot / (double)(m->rot - 2));
    }
    m->qk_norm = ARCH_QK_HEAD;
    m->qk_norm_late = true;
    m->name.q_norm = "self_attn.query_layernorm";
    m->name.k_norm = "self_attn.key_layernorm";
    return arch__llama(m, e);
}

int arch__hunyuan_moe(arch_model *m, err *e)
{
    int rc = arch__hunyuan(m, e);
    if (rc < 0) goto out;
    arch__expert_names(m);
    m->moe.E = m->moe.top_k = 1;
    m->moe.renorm = true;
    m->moe.scale = 1.0f;
    m->moe.act = m->act;
    TRY(same(m, "num_experts", &m->moe.E, e));
    TRY(same(m, "moe_topk", &m->moe.top_k, e));
    m->moe.inter = m->moe.shared_inter = m->cfg->intermediate_size;
    m->name.router = "mlp.gate.wg";
    m->name.shared = "mlp.shared_mlp.";
    for (int i = 0; i < m->n_layers; i++)
        m->layers[i].ffn = ARCH_MOE;
    rc = 0;
out:
    return rc;
}
