/* Qwen with experts: Qwen 2 MoE (a shared expert behind a gate), Qwen 3 MoE (none), Qwen 3 Next
 * (three gated delta nets to one gated attention, norms stored without their 1). */
#include <string.h>
#include "model/arch_families.h"

static int shared_expert(arch_model *m, err *e)
{
    m->name.shared = "mlp.shared_expert.";
    m->name.shared_gate = "mlp.shared_expert_gate";
    int rc = arch_i64(m, "shared_expert_intermediate_size", &m->moe.shared_inter, e);
    return rc < 0 ? rc : 0;
}

int arch__qwen2_moe(arch_model *m, err *e)
{
    int rc = arch__llama(m, e);
    if (rc < 0) goto out;
    TRY(arch__experts(m, 0, e));
    m->moe.renorm = false;
    TRY(arch_bool(m, "norm_topk_prob", &m->moe.renorm, e));
    m->qkv_bias = true;
    TRY(arch_bool(m, "qkv_bias", &m->qkv_bias, e));
    m->o_bias = false;
    TRY(shared_expert(m, e));
    rc = 0;
out:
    return rc;
}

int arch__qwen3_moe(arch_model *m, err *e)
{
    int rc = arch__llama(m, e);
    if (rc < 0) goto out;
    m->qk_norm = ARCH_QK_HEAD;
    TRY(arch__experts(m, 0, e));
    m->moe.renorm = false;
    TRY(arch_bool(m, "norm_topk_prob", &m->moe.renorm, e));
    rc = 0;
out:
    return rc;
}

static int linear_layers(arch_model *m, err *e)
{
    int rc = 0, every = 4, i = 0;
    const json *types = json_get(m->cfg->text, "layer_types");
    TRY(arch_int(m, "full_attention_interval", &every, 1 << 16, e));
    for (i = 0; i < m->n_layers; i++)
        m->layers[i].mix = every > 0 && (i + 1) % every ? ARCH_DELTA : ARCH_ATTENTION;
    i = 0;
    for (const json *t = cJSON_IsArray(types) ? types->child : NULL; t && i < m->n_layers;
         t = t->next)
        m->layers[i++].mix = cJSON_IsString(t) && !strcmp(t->valuestring, "linear_attention")
                                 ? ARCH_DELTA
                                 : ARCH_ATTENTION;
    m->delta.conv = 4;
    TRY(arch_int(m, "linear_num_key_heads", &m->delta.Hk, 65536, e));
    TRY(arch_int(m, "linear_num_value_heads", &m->delta.Hv, 65536, e));
    TRY(arch_int(m, "linear_key_head_dim", &m->delta.Dk, 65536, e));
    TRY(arch_int(m, "linear_value_head_dim", &m->delta.Dv, 65536, e));
    TRY(arch_int(m, "linear_conv_kernel_dim", &m->delta.conv, 64, e));
    rc = m->delta.Hk < 1 || m->delta.Hv < 1 || m->delta.Hv % m->delta.Hk || m->delta.Dk < 1 ||
                 m->delta.Dv < 1 || m->delta.conv < 2
             ? err_set(e, ERR_VALUE,
                       "%s: linear attention of %d key and %d value heads of %d and %d lanes, "
                       "convolution over %d: cannot be run",
                       m->cfg->where, m->delta.Hk, m->delta.Hv, m->delta.Dk, m->delta.Dv,
                       m->delta.conv)
             : 0;
out:
    return rc;
}

int arch__gated_delta(arch_model *m, err *e)
{
    m->norm = ARCH_RMS_ONE;
    m->attn_gate = true;
    m->name.delta_in = "linear_attn.in_proj_qkvz";
    m->name.delta_ba = "linear_attn.in_proj_ba";
    m->name.delta_out = "linear_attn.out_proj";
    m->name.conv = "linear_attn.conv1d";
    m->name.a_log = "linear_attn.A_log";
    m->name.dt_bias = "linear_attn.dt_bias";
    m->name.delta_norm = "linear_attn.norm";
    return linear_layers(m, e);
}

int arch__qwen3_next(arch_model *m, err *e)
{
    int rc = arch__qwen3_moe(m, e);
    if (rc >= 0) rc = arch__gated_delta(m, e);
    return rc < 0 ? rc : shared_expert(m, e);
}
