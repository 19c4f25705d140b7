/* Qwen 3.5 and the texts of Qwen 3 VL. Qwen 3.5 is Qwen 3 Next with q, k, v apart from z and b
 * apart from a, with or without experts, whose weights always add up to one. The VL models are Qwen
 * 3 and Qwen 3 MoE for text: three equal position ids make the sections of their rotary table one.
 */
#include "model/arch_families.h"

static const char *const published = "model.language_model."; /* where their tensors lie */

int arch__qwen3_vl(arch_model *m, err *e)
{
    m->prefix = published;
    m->qk_norm = ARCH_QK_HEAD;
    return arch__llama(m, e);
}

int arch__qwen3_vl_moe(arch_model *m, err *e)
{
    int rc = arch__qwen3_moe(m, e);
    m->prefix = published;
    m->moe.renorm = true;
    m->moe.fused = m->moe.fused_transposed = true;
    return rc;
}

static void split_delta(arch_model *m)
{
    m->prefix = published;
    m->name.delta_in = "linear_attn.in_proj_qkv";
    m->name.delta_z = "linear_attn.in_proj_z";
    m->name.delta_ba = "linear_attn.in_proj_b";
    m->name.delta_a = "linear_attn.in_proj_a";
}

int arch__qwen3_5(arch_model *m, err *e)
{
    m->qk_norm = ARCH_QK_HEAD;
    int rc = arch__llama(m, e);
    if (rc >= 0) rc = arch__gated_delta(m, e);
    split_delta(m);
    return rc < 0 ? rc : arch__must(m, "attn_output_gate", true, e);
}

int arch__qwen3_5_moe(arch_model *m, err *e)
{
    int rc = arch__qwen3_next(m, e);
    split_delta(m);
    m->moe.renorm = m->moe.fused = true;
    return rc < 0 ? rc : arch__must(m, "attn_output_gate", true, e);
}
