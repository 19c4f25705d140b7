/* Private to model: the families' functions, one file each (arch_NAME.c); see arch.h. */
#ifndef MODEL_ARCH_FAMILIES_H
#define MODEL_ARCH_FAMILIES_H
#include "model/arch.h"

int arch__llama(arch_model *m, err *e);
int arch__mistral(arch_model *m, err *e);
int arch__smollm3(arch_model *m, err *e);
int arch__granite(arch_model *m, err *e);
int arch__olmo2(arch_model *m, err *e);
int arch__phi3(arch_model *m, err *e);
int arch__gemma(arch_model *m, err *e);
int arch__gemma2(arch_model *m, err *e);
int arch__gemma3(arch_model *m, err *e);
int arch__cohere(arch_model *m, err *e);
int arch__glm4(arch_model *m, err *e);
int arch__stablelm(arch_model *m, err *e);
int arch__starcoder2(arch_model *m, err *e);
int arch__gpt_neox(arch_model *m, err *e);
int arch__gpt2(arch_model *m, err *e);
int arch__mixtral(arch_model *m, err *e);
int arch__minimax_m2(arch_model *m, err *e);
int arch__qwen2_moe(arch_model *m, err *e);
int arch__qwen3_moe(arch_model *m, err *e);
int arch__qwen3_next(arch_model *m, err *e);
int arch__deepseek_v2(arch_model *m, err *e);
int arch__deepseek_v3(arch_model *m, err *e);
int arch__glm4_moe(arch_model *m, err *e);
int arch__gpt_oss(arch_model *m, err *e);
int arch__qwen3_vl(arch_model *m, err *e);
int arch__qwen3_vl_moe(arch_model *m, err *e);
int arch__qwen3_5(arch_model *m, err *e);
int arch__qwen3_5_moe(arch_model *m, err *e);
int arch__mimo(arch_model *m, err *e);
int arch__seed_oss(arch_model *m, err *e);
int arch__arcee(arch_model *m, err *e);
int arch__olmo3(arch_model *m, err *e);
int arch__exaone4(arch_model *m, err *e);
int arch__cohere2(arch_model *m, err *e);
int arch__glm(arch_model *m, err *e);
int arch__ernie(arch_model *m, err *e);
int arch__ernie_moe(arch_model *m, err *e);
int arch__hunyuan(arch_model *m, err *e);
int arch__hunyuan_moe(arch_model *m, err *e);
int arch__nemotron(arch_model *m, err *e);
int arch__phi(arch_model *m, err *e);
int arch__phimoe(arch_model *m, err *e);
int arch__falcon(arch_model *m, err *e);
int arch__granitemoe(arch_model *m, err *e);
int arch__olmoe(arch_model *m, err *e);
int arch__dots1(arch_model *m, err *e);

/* Shared by families. */
/* A flag whose other value is not computed; absent is fine. */
int arch__must(const arch_model *m, const char *key, bool want, err *e);
/* Layers by layer_types where the config has them; else every n-th is full and the rest windowed.
 */
void arch__windows(arch_model *m, int full_every);
/* Experts in layers from `first` on: number, a token, width, renormalisation by the usual keys. */
int arch__experts(arch_model *m, int first, err *e);
void arch__expert_names(arch_model *m); /* mlp.gate, mlp.experts.0.gate_proj, … */
/* Qwen 3 Next's gated delta nets and gated attention, norms without their 1. */
int arch__gated_delta(arch_model *m, err *e);
/* Routing of DeepSeek V3: sigmoid scores, correction bias, groups, shared experts. */
int arch__sigmoid_experts(arch_model *m, err *e);
#endif
