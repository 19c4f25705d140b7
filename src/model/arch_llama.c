/* Llama, Mistral, Qwen 2 and 3: the block of arch.c; biases, q/k norms and windows are in the typed
 * config already. MiMo, Seed-OSS and AFM differ in biases and the gate alone. Also what several
 * families share. */
#include <string.h>
#include "model/arch_families.h"

int arch__llama(arch_model *m, err *e)
{
    return arch_act_of(m->cfg->hidden_act, &m->act, e);
}

/* Ministral 3 and its kin sharpen queries far behind the trained length. */
int arch__mistral(arch_model *m, err *e)
{
    static const char *const keys[] = {"rope_scaling", "rope_parameters"};
    double beta = 0;
    int rc = 0;
    for (size_t i = 0; rc >= 0 && i < sizeof keys / sizeof *keys; i++)
        rc = json_get_f64(json_get(m->cfg->text, keys[i]), "llama_4_scaling_beta", &beta,
                          m->cfg->where, e);
    m->far_beta = (float)beta;
    m->far_from = m->rope[0].original_max_position;
    return rc < 0 ? rc : arch__llama(m, e);
}

int arch__mimo(arch_model *m, err *e)
{
    m->qkv_bias = true;
    m->o_bias = false;
    int rc = arch_bool(m, "attention_bias", &m->qkv_bias, e);
    return rc < 0 ? rc : arch__llama(m, e);
}

int arch__seed_oss(arch_model *m, err *e)
{
    int rc = arch__mimo(m, e);
    if (rc >= 0) rc = arch_bool(m, "attention_out_bias", &m->o_bias, e);
    return rc < 0 ? rc : 0;
}

int arch__arcee(arch_model *m, err *e)
{
    for (int i = 0; i < m->n_layers; i++)
        m->layers[i].ffn = ARCH_MLP;
    return arch__llama(m, e);
}

void arch__windows(arch_model *m, int full_every)
{
    if (arch_has(m, "layer_types")) return; /* the typed config has read them */
    for (int i = 0; i < m->n_layers; i++)
        m->layers[i].window = (i + 1) % full_every ? (int)m->cfg->sliding_window : 0;
}

void arch__expert_names(arch_model *m)
{
    m->name.router = "mlp.gate";
    m->name.experts = "mlp.experts.";
    m->name.e_gate = "gate_proj";
    m->name.e_up = "up_proj";
    m->name.e_down = "down_proj";
    m->name.e_gate_up = "gate_up_proj";
}

int arch__experts(arch_model *m, int first, err *e)
{
    int rc = 0, step = 1;
    m->moe.scale = 1.0f;
    m->moe.renorm = true;
    m->moe.act = m->act;
    m->moe.top_k = 2;
    TRY(arch_int(m, "num_local_experts", &m->moe.E, 65536, e));
    TRY(arch_int(m, "n_routed_experts", &m->moe.E, 65536, e));
    TRY(arch_int(m, "num_experts", &m->moe.E, 65536, e));
    TRY(arch_int(m, "num_experts_per_tok", &m->moe.top_k, 65536, e));
    m->moe.inter = m->cfg->intermediate_size;
    TRY(arch_i64(m, "moe_intermediate_size", &m->moe.inter, e));
    TRY(arch_bool(m, "norm_topk_prob", &m->moe.renorm, e));
    TRY(arch_int(m, "decoder_sparse_step", &step, 1 << 16, e));
    TRY(arch_int(m, "moe_layer_freq", &step, 1 << 16, e));
    for (int i = first; step > 0 && i < m->n_layers; i++)
        if ((arch_has(m, "decoder_sparse_step") ? i + 1 : i) % step == 0)
            m->layers[i].ffn = ARCH_MOE;
    const json *dense = json_get(m->cfg->text, "mlp_only_layers");
    for (const json *v = cJSON_IsArray(dense) ? dense->child : NULL; v; v = v->next)
        if (cJSON_IsNumber(v) && v->valuedouble >= 0 && v->valuedouble < m->n_layers)
            m->layers[(int)v->valuedouble].ffn = ARCH_GLU;
    arch__expert_names(m);
    rc = 0;
out:
    return rc;
}
