/* DeepSeek V2 and V3: latent attention (keys and values from one small vector a token, cached as
 * it is), experts in groups after a few dense layers, shared experts. GLM 4.5 and dots.llm1 have
 * the experts of V3 with usual attention. */
#include <math.h>
#include <string.h>
#include "model/arch_families.h"

/* YaRN of DeepSeek also sharpens the softmax: scale *= mscale(factor, mscale_all_dim)^2. */
static float sharpen(const rope_config *r)
{
    if (r->kind != ROPE_YARN || r->mscale_all_dim == 0 || r->factor <= 1) return 1.0f;
    double s = 0.1 * r->mscale_all_dim * log(r->factor) + 1.0;
    return (float)(s * s);
}

static int latent(arch_model *m, err *e)
{
    int rc = 0;
    m->mla.v = m->D;
    TRY(arch_i64(m, "q_lora_rank", &m->mla.q_lora, e));
    TRY(arch_i64(m, "kv_lora_rank", &m->mla.kv_lora, e));
    TRY(arch_i64(m, "qk_nope_head_dim", &m->mla.nope, e));
    TRY(arch_i64(m, "qk_rope_head_dim", &m->mla.rope, e));
    TRY(arch_i64(m, "v_head_dim", &m->mla.v, e));
    const int64_t sizes[] = {m->mla.q_lora + 1, m->mla.kv_lora, m->mla.nope, m->mla.rope, m->mla.v};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] < 1 || sizes[i] > 1 << 16) {
            rc = err_set(e, ERR_VALUE,
                         "%s: latent attention with q_lora_rank %lld, kv_lora_rank %lld, head dims "
                         "%lld + %lld and %lld cannot be run",
                         m->cfg->where, (long long)m->mla.q_lora, (long long)m->mla.kv_lora,
                         (long long)m->mla.nope, (long long)m->mla.rope, (long long)m->mla.v);
            goto out;
        }
    m->D = (int)(m->mla.nope + m->mla.rope);
    m->Hk = m->H;
    m->rot = m->mla.rope;
    m->rope_pairs = true;
    m->attn_scale = sharpen(&m->rope[0]) / sqrtf((float)m->D);
    m->name.q_a = "self_attn.q_a_proj";
    m->name.q_a_norm = "self_attn.q_a_layernorm";
    m->name.q_b = "self_attn.q_b_proj";
    m->name.kv_a = "self_attn.kv_a_proj_with_mqa";
    m->name.kv_a_norm = "self_attn.kv_a_layernorm";
    m->name.kv_b = "self_attn.kv_b_proj";
    for (int i = 0; i < m->n_layers; i++)
        m->layers[i].mix = ARCH_MLA;
    rc = 0;
out:
    return rc;
}

static int grouped(arch_model *m, err *e)
{
    int rc = 0, first = 0;
    int64_t shared = 0;
    TRY(arch_int(m, "first_k_dense_replace", &first, 1 << 16, e));
    TRY(arch__experts(m, first, e));
    TRY(arch_int(m, "n_group", &m->moe.n_group, 65536, e));
    TRY(arch_int(m, "topk_group", &m->moe.topk_group, 65536, e));
    TRY(arch_f32(m, "routed_scaling_factor", &m->moe.scale, e));
    TRY(arch_i64(m, "n_shared_experts", &shared, e));
    if (shared < 0 || shared > 1024) {
        rc = err_set(e, ERR_VALUE, "%s: 'n_shared_experts' is %lld", m->cfg->where,
                     (long long)shared);
        goto out;
    }
    m->moe.shared_inter = shared * m->moe.inter;
    m->name.shared = "mlp.shared_experts.";
    rc = 0;
out:
    return rc;
}

int arch__deepseek_v2(arch_model *m, err *e)
{
    const char *method = "greedy";
    int rc = arch__llama(m, e);
    if (rc < 0) goto out;
    TRY(latent(m, e));
    TRY(grouped(m, e));
    TRY(json_get_str(m->cfg->text, "topk_method", &method, m->cfg->where, e));
    if (!strcmp(method, "greedy")) {
        m->moe.n_group = 0;
    } else if (strcmp(method, "group_limited_greedy")) {
        rc = err_set(e, ERR_UNSUPPORTED,
                     "%s: 'topk_method' is '%.40s'; known are greedy and group_limited_greedy",
                     m->cfg->where, method);
        goto out;
    }
    m->moe.renorm = false;
    TRY(arch_bool(m, "norm_topk_prob", &m->moe.renorm, e));
    rc = 0;
out:
    return rc;
}

int arch__sigmoid_experts(arch_model *m, err *e)
{
    int rc = grouped(m, e);
    if (rc < 0) return rc;
    m->moe.route = KERN_ROUTE_SIGMOID;
    m->moe.group_top2 = true;
    m->name.route_bias = "mlp.gate.e_score_correction_bias";
    return 0;
}

int arch__deepseek_v3(arch_model *m, err *e)
{
    int rc = arch__llama(m, e);
    if (rc >= 0) rc = latent(m, e);
    if (rc >= 0) rc = arch_bool(m, "rope_interleave", &m->rope_pairs, e);
    return rc < 0 ? rc : arch__sigmoid_experts(m, e);
}

int arch__glm4_moe(arch_model *m, err *e)
{
    bool norm = false;
    int rc = arch__llama(m, e);
    if (rc < 0) return rc;
    rc = arch_bool(m, "use_qk_norm", &norm, e);
    if (rc < 0) return rc;
    if (norm) m->qk_norm = ARCH_QK_HEAD;
    m->o_bias = false;
    return arch__sigmoid_experts(m, e);
}

int arch__dots1(arch_model *m, err *e)
{
    m->qk_norm = ARCH_QK_HEAD;
    int rc = arch__llama(m, e);
    return rc < 0 ? rc : arch__sigmoid_experts(m, e);
}
