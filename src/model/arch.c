/* Architectures: the registry, the Llama block that every family starts from, and what follows from
 * a filled arch_model: its linears, its other tensors, its cache. Nothing here knows a family. */
#include "model/arch_families.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const arch_row arch_rows[] = {
    {"llama", "LlamaForCausalLM", "Llama 2 and 3 and all that took their block", arch__llama},
    {"mistral", "MistralForCausalLM Ministral3ForCausalLM Mistral3ForConditionalGeneration",
     "Mistral, with sliding window; text of Mistral Small 3.1 and later", arch__mistral},
    {"qwen2", "Qwen2ForCausalLM", "Qwen 2 and 2.5: biases on q, k, v", arch__llama},
    {"qwen3", "Qwen3ForCausalLM", "Qwen 3: norms on q and k", arch__llama},
    {"qwen3_vl", "Qwen3VLForConditionalGeneration", "Qwen 3 VL: its text", arch__qwen3_vl},
    {"mimo", "MiMoForCausalLM", "MiMo: biases on q, k, v", arch__mimo},
    {"seed_oss", "SeedOssForCausalLM", "Seed-OSS: biases on q, k, v", arch__seed_oss},
    {"arcee", "ArceeForCausalLM", "AFM: a feed-forward without gate", arch__arcee},
    {"smollm3", "SmolLM3ForCausalLM", "SmolLM3: layers without rotary positions", arch__smollm3},
    {"granite", "GraniteForCausalLM", "Granite 3: multipliers on every stream", arch__granite},
    {"olmo2", "Olmo2ForCausalLM", "OLMo 2: norms after the blocks", arch__olmo2},
    {"olmo3", "Olmo3ForCausalLM", "OLMo 3: windows with a rotary table of their own", arch__olmo3},
    {"exaone4", "Exaone4ForCausalLM", "EXAONE 4: norms after the blocks, full layers unrotated",
     arch__exaone4},
    {"phi3", "Phi3ForCausalLM", "Phi 3 and 4: fused linears, longrope", arch__phi3},
    {"gemma", "GemmaForCausalLM", "Gemma 1", arch__gemma},
    {"gemma2", "Gemma2ForCausalLM", "Gemma 2: soft caps, alternating windows", arch__gemma2},
    {"gemma3", "Gemma3ForCausalLM Gemma3ForConditionalGeneration",
     "Gemma 3: five windowed layers to one full; text of the larger ones", arch__gemma3},
    {"cohere", "CohereForCausalLM", "Command R: parallel blocks, layer norm", arch__cohere},
    {"cohere2", "Cohere2ForCausalLM", "Command R7B and A: windowed layers, full ones unrotated",
     arch__cohere2},
    {"glm", "GlmForCausalLM", "GLM 4 of 2024", arch__glm},
    {"ernie4_5", "Ernie4_5ForCausalLM", "ERNIE 4.5", arch__ernie},
    {"hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "Hunyuan: norms on rotated q and k",
     arch__hunyuan},
    {"nemotron", "NemotronForCausalLM", "Nemotron 4, Minitron: squared ReLU", arch__nemotron},
    {"phi", "PhiForCausalLM", "Phi 1 and 2: parallel blocks, layer norm", arch__phi},
    {"falcon", "FalconForCausalLM", "Falcon: q, k, v stored group by group", arch__falcon},
    {"glm4", "Glm4ForCausalLM", "GLM 4: norms before and after", arch__glm4},
    {"stablelm", "StableLmForCausalLM", "StableLM 2", arch__stablelm},
    {"starcoder2", "Starcoder2ForCausalLM", "StarCoder 2", arch__starcoder2},
    {"gpt_neox", "GPTNeoXForCausalLM", "GPT-NeoX, Pythia", arch__gpt_neox},
    {"gpt2", "GPT2LMHeadModel", "GPT-2: learned positions", arch__gpt2},
    {"mixtral", "MixtralForCausalLM", "Mixtral: 2 of 8 experts", arch__mixtral},
    {"phimoe", "PhiMoEForCausalLM PhimoeForCausalLM", "Phi 3.5 MoE: layer norms, sparse mixing",
     arch__phimoe},
    {"minimax_m2", "MiniMaxM2ForCausalLM", "MiniMax M2: sigmoid routing", arch__minimax_m2},
    {"granitemoe", "GraniteMoeForCausalLM", "Granite 3 MoE: experts in one tensor",
     arch__granitemoe},
    {"olmoe", "OlmoeForCausalLM", "OLMoE: q and k normed over all heads", arch__olmoe},
    {"ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "ERNIE 4.5 MoE: choice by corrected scores",
     arch__ernie_moe},
    {"hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", "Hunyuan MoE: a shared expert",
     arch__hunyuan_moe},
    {"qwen2_moe", "Qwen2MoeForCausalLM", "Qwen 1.5 and 2 MoE: gated shared expert",
     arch__qwen2_moe},
    {"qwen3_moe", "Qwen3MoeForCausalLM", "Qwen 3 MoE", arch__qwen3_moe},
    {"qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "Qwen 3 VL MoE: its text",
     arch__qwen3_vl_moe},
    {"qwen3_5", "Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration",
     "Qwen 3.5: as Qwen 3 Next, without experts", arch__qwen3_5},
    {"qwen3_5_moe", "Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration", "Qwen 3.5 MoE",
     arch__qwen3_5_moe},
    {"qwen3_next", "Qwen3NextForCausalLM", "Qwen 3 Next: gated delta net, gated attention",
     arch__qwen3_next},
    {"deepseek_v2", "DeepseekV2ForCausalLM", "DeepSeek V2: latent attention, group-limited experts",
     arch__deepseek_v2},
    {"deepseek_v3",
     "DeepseekV3ForCausalLM KimiK25ForConditionalGeneration Kimi_K25ForConditionalGeneration",
     "DeepSeek V3 and R1, Kimi K2; text of Kimi K2.5 and later", arch__deepseek_v3},
    {"glm4_moe", "Glm4MoeForCausalLM", "GLM 4.5 and later: routing as DeepSeek V3", arch__glm4_moe},
    {"dots1", "Dots1ForCausalLM", "dots.llm1: routing as DeepSeek V3", arch__dots1},
    {"gpt_oss", "GptOssForCausalLM", "gpt-oss: attention sinks, experts in one tensor",
     arch__gpt_oss},
};
const int arch_n_rows = sizeof arch_rows / sizeof *arch_rows;

const char *const arch_kind_names[ARCH_LINEAR_KINDS] = {
    "q/k/v",     "o",           "gate/up",     "down",      "q_a",    "q_b",        "kv_a",
    "kv_b",      "delta in",    "delta b/a",   "delta out", "router", "experts up", "experts down",
    "shared up", "shared down", "shared gate", "lm_head"};

bool arch_quantizable(arch_linear_kind k)
{
    return k != ARCH_LM_HEAD && k != ARCH_ROUTER && k != ARCH_SHARED_GATE && k != ARCH_DELTA_BA;
}

/* ---- config keys --------------------------------------------------------------------------------
 */

int arch_i64(const arch_model *m, const char *key, int64_t *out, err *e)
{
    return json_get_i64(m->cfg->text, key, out, m->cfg->where, e);
}

int arch_int(const arch_model *m, const char *key, int *out, int max, err *e)
{
    int64_t v = *out;
    int rc = arch_i64(m, key, &v, e);
    if (rc <= 0) return rc;
    if (v < 0 || v > max)
        return err_set(e, ERR_VALUE, "%s: '%s' is %lld; expected 0 to %d", m->cfg->where, key,
                       (long long)v, max);
    *out = (int)v;
    return 1;
}

int arch_f32(const arch_model *m, const char *key, float *out, err *e)
{
    double v = (double)*out;
    int rc = json_get_f64(m->cfg->text, key, &v, m->cfg->where, e);
    *out = (float)v;
    return rc;
}

int arch_bool(const arch_model *m, const char *key, bool *out, err *e)
{
    return json_get_bool(m->cfg->text, key, out, m->cfg->where, e);
}

int arch__must(const arch_model *m, const char *key, bool want, err *e)
{
    bool v = want;
    int rc = arch_bool(m, key, &v, e);
    if (rc < 0 || v == want) return rc < 0 ? rc : 0;
    return err_set(e, ERR_UNSUPPORTED, "%s: '%s' %s cannot be run", m->cfg->where, key,
                   v ? "true" : "false");
}

bool arch_has(const arch_model *m, const char *key)
{
    return !json_is_null_or_absent(m->cfg->text, key);
}

int arch_act_of(const char *name, kern_glu *out, err *e)
{
    static const struct {
        const char *name;
        kern_glu act;
    } acts[] = {{"silu", KERN_SILU},
                {"swish", KERN_SILU},
                {"gelu", KERN_GELU},
                {"gelu_pytorch_tanh", KERN_GELU_TANH},
                {"gelu_new", KERN_GELU_TANH},
                {"gelu_fast", KERN_GELU_TANH},
                {"quick_gelu", KERN_QUICK_GELU},
                {"relu2", KERN_RELU2},
                {"relu", KERN_RELU}};
    for (size_t i = 0; i < sizeof acts / sizeof *acts; i++)
        if (!strcmp(acts[i].name, name)) {
            *out = acts[i].act;
            return 0;
        }
    return err_set(e, ERR_UNSUPPORTED,
                   "config.json: 'hidden_act' is '%s'; supported are silu, gelu, "
                   "gelu_pytorch_tanh, gelu_new, quick_gelu, relu and relu2",
                   name);
}

/* ---- opening ------------------------------------------------------------------------------------
 */

static bool word_in(const char *words, const char *w)
{
    size_t n = strlen(w);
    for (const char *p = words; n && (p = strstr(p, w)) != NULL; p += n)
        if ((p == words || p[-1] == ' ') && (p[n] == ' ' || !p[n])) return true;
    return false;
}

static const arch_row *row_of(const ckpt_config *c)
{
    for (int i = 0; i < arch_n_rows; i++)
        if (word_in(arch_rows[i].hf_names, c->architecture) ||
            (!*c->architecture && !strcmp(arch_rows[i].name, c->model_type)))
            return &arch_rows[i];
    return NULL;
}

static int unknown(const ckpt_config *c, err *e)
{
    buf names = {0}, why = {0};
    for (int i = 0; i < arch_n_rows; i++)
        buf_printf(&names, "%s%s", i ? " " : "", arch_rows[i].hf_names);
    arch_obstacles(c, &why);
    int rc = err_set(
        e, ERR_UNSUPPORTED,
        "config.json: architecture '%s' (model_type '%s') cannot be run%s%s; supported are %s",
        c->architecture, c->model_type, why.len ? ": " : "", why.len ? why.data : "", names.data);
    buf_free(&names);
    buf_free(&why);
    return rc;
}

void arch_obstacles(const ckpt_config *c, buf *out)
{
    static const struct {
        const char *key, *what;
    } parts[] = {
        {"index_topk", "sparse attention, whose tokens an indexer picks (index_topk)"},
        {"compress_ratios", "attention over a compressed cache (compress_ratios)"},
        {"hc_mult", "several residual streams (hc_mult)"},
        {"mamba_num_heads", "Mamba layers (mamba_num_heads)"},
        {"block_configs", "layers of different shapes (block_configs)"},
        {"linear_attn_config", "linear attention of another kind (linear_attn_config)"},
    };
    const json *inner = json_get(c->raw, "text_config");
    if (cJSON_IsObject(inner)) {
        const json *names = json_get(inner, "architectures"), *type = json_get(inner, "model_type");
        const json *name = cJSON_IsArray(names) ? names->child : NULL;
        buf_printf(out, "a language model ('%s') inside a wrapper for images or sound",
                   cJSON_IsString(name)   ? name->valuestring
                   : cJSON_IsString(type) ? type->valuestring
                                          : "unnamed");
    }
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!json_is_null_or_absent(c->text, parts[i].key))
            buf_printf(out, "%s%s", out->len ? ", " : "", parts[i].what);
}

/* The Llama block: what a family's function finds and changes. */
static void llama_block(arch_model *m)
{
    const ckpt_config *c = m->cfg;
    m->name = (arch_names){.embed = "model.embed_tokens",
                           .final_norm = "model.norm",
                           .head = "lm_head",
                           .layer = "model.layers.%d.",
                           .norm1 = "input_layernorm",
                           .norm2 = "post_attention_layernorm",
                           .q = "self_attn.q_proj",
                           .k = "self_attn.k_proj",
                           .v = "self_attn.v_proj",
                           .o = "self_attn.o_proj",
                           .gate = "mlp.gate_proj",
                           .up = "mlp.up_proj",
                           .down = "mlp.down_proj"};
    m->n_layers = (int)c->n_layers;
    m->layers = arena_alloc(m->mem, sizeof *m->layers * (size_t)m->n_layers);
    for (int i = 0; i < m->n_layers; i++)
        m->layers[i] = (arch_layer){
            .mix = ARCH_ATTENTION,
            .ffn = ARCH_GLU,
            .window = c->layer_sliding && c->layer_sliding[i] ? (int)c->sliding_window : 0,
            .inter = c->intermediate_size};
    m->hidden = c->hidden_size;
    m->vocab = c->vocab_size;
    m->H = (int)c->n_heads;
    m->Hk = (int)c->n_kv_heads;
    m->D = (int)c->head_dim;
    m->eps = (float)c->rms_norm_eps;
    m->qkv_bias = c->attention_bias;
    m->o_bias = c->attention_out_bias;
    m->mlp_bias = c->mlp_bias;
    m->qk_norm = c->qk_norm ? ARCH_QK_HEAD : ARCH_QK_NONE;
    m->rope[0] = c->rope;
    m->n_ropes = 1;
    m->rot = (int64_t)((double)c->head_dim * c->rope.partial_rotary_factor);
    m->logit_scale = m->embed_scale = m->residual_scale = 1.0f;
}

/* Factors of streams and scores: none that wipes out or turns round what it scales. */
static int check_factors(const arch_model *m, err *e)
{
    const struct {
        const char *what;
        float value;
        bool may_be_0;
    } rows[] = {
        {"the factor of attention scores", m->attn_scale, false},
        {"the factor of embeddings", m->embed_scale, false},
        {"the factor of residual adds", m->residual_scale, false},
        {"the factor of logits", m->logit_scale, false},
        {"the factor of experts (routed_scaling_factor)", m->moe.E ? m->moe.scale : 1.0f, false},
        {"the cap of attention scores (attn_logit_softcapping)", m->attn_softcap, true},
        {"the cap of logits (final_logit_softcapping)", m->logit_softcap, true}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (!(rows[i].value >= 0 && rows[i].value < 1e9f) ||
            (!rows[i].may_be_0 && rows[i].value == 0))
            return err_set(e, ERR_VALUE, "%s: %s is %g; expected a number above 0%s and below 1e9",
                           m->cfg->where, rows[i].what, (double)rows[i].value,
                           rows[i].may_be_0 ? ", or 0 for none," : "");
    return 0;
}

/* Sizes that must fit one another whatever the family. */
static int check_common(const arch_model *m, err *e)
{
    const ckpt_config *c = m->cfg;
    const rope_config *r = &m->rope[0];
    bool dense = false, moe = false;
    if (m->H < 1 || m->Hk < 1 || m->H % m->Hk)
        return err_set(e, ERR_VALUE,
                       "config.json: %d attention heads cannot share %d key/value heads evenly",
                       m->H, m->Hk);
    for (int i = 0; i < m->n_layers; i++) {
        dense = dense || m->layers[i].ffn != ARCH_MOE;
        moe = moe || m->layers[i].ffn == ARCH_MOE;
    }
    if (dense && c->intermediate_size < 1)
        return err_set(e, ERR_VALUE,
                       "config.json: 'intermediate_size' is %lld; expected at least 1",
                       (long long)c->intermediate_size);
    if (moe && (m->moe.E < 1 || m->moe.E > 65536 || m->moe.top_k < 1 || m->moe.top_k > m->moe.E ||
                m->moe.inter < 1 || m->moe.inter > 1 << 26))
        return err_set(e, ERR_VALUE,
                       "config.json: %d experts of %lld, %d a token; expected at least 1 of each "
                       "and no more a token than there are",
                       m->moe.E, (long long)m->moe.inter, m->moe.top_k);
    if (moe && m->moe.n_group > 1 &&
        (m->moe.E % m->moe.n_group || m->moe.topk_group < 1 || m->moe.topk_group > m->moe.n_group))
        return err_set(e, ERR_VALUE, "config.json: %d experts in %d groups, %d groups a token",
                       m->moe.E, m->moe.n_group, m->moe.topk_group);
    if (m->rot % 2 || m->rot < 2 || m->rot > m->D || m->D % 2)
        return err_set(e, ERR_UNSUPPORTED,
                       "config.json: 'head_dim' %d with %lld of it rotated; an even number is "
                       "needed",
                       m->D, (long long)m->rot);
    if (r->kind == ROPE_LONGROPE && (r->n_short != m->rot / 2 || r->n_long != m->rot / 2))
        return err_set(e, ERR_SHAPE,
                       "config.json: longrope needs %lld short and long factors, found %d and %d",
                       (long long)m->rot / 2, r->n_short, r->n_long);
    return 0;
}

/* Plain experts in one tensor lie as [E, N, K] or turned round, whatever wrote them; where one of
 * the two tensors is square, the other tells. */
static void look_at_turn(arch_model *m, const ckpt_tensor *t, int64_t N, int64_t K)
{
    if (!t || t->n_dims != 3 || N == K) return;
    if (t->shape[1] == N && t->shape[2] == K) m->moe.fused_transposed = false;
    if (t->shape[1] == K && t->shape[2] == N) m->moe.fused_transposed = true;
}

/* Are the experts of a layer one tensor? The files decide; the family's word is for their absence.
 */
static void look_at_files(arch_model *m, const ckpt *files)
{
    char name[256];
    if (!files || !m->name.experts || !m->name.e_gate_up) return;
    int i = 0;
    while (i < m->n_layers && m->layers[i].ffn != ARCH_MOE)
        i++;
    if (i == m->n_layers) return;
    int n = snprintf(name, sizeof name, m->name.layer, i);
    static const char *const tails[] = {"", ".weight", "_blocks", ".weight_packed", "_weight"};
    m->moe.fused = false;
    for (size_t k = 0; k < sizeof tails / sizeof *tails; k++) {
        snprintf(name + n, sizeof name - (size_t)n, "%s%s%s", m->name.experts, m->name.e_gate_up,
                 tails[k]);
        const ckpt_tensor *up = ckpt_find(files, name);
        m->moe.fused = m->moe.fused || up;
        if (k > 1) continue;
        look_at_turn(m, up, 2 * m->moe.inter, m->hidden);
        snprintf(name + n, sizeof name - (size_t)n, "%s%s%s", m->name.experts, m->name.e_down,
                 tails[k]);
        look_at_turn(m, ckpt_find(files, name), m->hidden, m->moe.inter);
    }
}

/* A model inside a wrapper has its tensors under one of these in place of "model."; the files say
 * under which, also where the config is that of the language model alone. Without files it is the
 * second if the family has set m->prefix, else the third. */
static const char *const inner[] = {"model.", "model.language_model.", "language_model.model."};

static bool starts(const char *s, const char *with)
{
    return !strncmp(s, with, strlen(with));
}

static const char *moved(arch_model *m, const char *name, const char *to)
{
    return arena_printf(m->mem, "%s%s", to, name + strlen(inner[0]));
}

static void look_for_prefix(arch_model *m, const ckpt *files)
{
    char name[256];
    size_t at = m->cfg->text == m->cfg->raw ? 0 : m->prefix ? 1 : 2;
    arch_names *n = &m->name;
    if (!starts(n->final_norm, inner[0])) return;
    for (size_t i = 0; files && i < sizeof inner / sizeof *inner; i++) {
        snprintf(name, sizeof name, "%s.weight", moved(m, n->final_norm, inner[i]));
        if (ckpt_find(files, name)) at = i;
    }
    m->prefix = at ? inner[at] : NULL;
    if (!at) return;
    n->embed = moved(m, n->embed, m->prefix);
    n->final_norm = moved(m, n->final_norm, m->prefix);
    n->layer = moved(m, n->layer, m->prefix);
    if (starts(m->prefix, "language_model."))
        n->head = arena_printf(m->mem, "language_model.%s", n->head);
}

int64_t arch_beside(const arch_model *m, const ckpt *files)
{
    int64_t n = 0;
    for (size_t i = 0; m->prefix && i < ckpt_n_tensors(files); i++) {
        const char *name = ckpt_tensor_at(files, i)->name;
        n += !starts(name, m->prefix) && !starts(name, m->name.head) && !starts(name, "mtp.");
    }
    return n;
}

int64_t arch_behind(const arch_model *m, const ckpt *files)
{
    const json *ahead = json_get(m->cfg->text, "num_nextn_predict_layers");
    double first = m->n_layers + (cJSON_IsNumber(ahead) ? ahead->valuedouble : 0);
    size_t stem = strcspn(m->name.layer, "%");
    int64_t n = 0;
    for (size_t i = 0; i < ckpt_n_tensors(files); i++) {
        const char *name = ckpt_tensor_at(files, i)->name;
        char *end;
        if (strncmp(name, m->name.layer, stem)) continue;
        unsigned long layer = strtoul(name + stem, &end, 10);
        n += *end == '.' && end > name + stem && (double)layer >= first;
    }
    return n;
}

int arch_open(arch_model **out, const ckpt_config *c, const ckpt *files, err *e)
{
    int rc = 0;
    arch_model *m = xcalloc(1, sizeof *m);
    *out = NULL;
    m->mem = arena_make();
    m->cfg = c;
    m->row = row_of(c);
    if (!m->row) {
        rc = unknown(c, e);
        goto out;
    }
    if (c->n_layers < 1 || c->hidden_size < 1 || c->n_heads < 1 || c->vocab_size < 1) {
        rc = err_set(e, ERR_MISSING, "%s: sizes of the model are missing", c->where);
        goto out;
    }
    llama_block(m);
    TRY(m->row->describe(m, e));
    if (m->attn_scale <= 0) m->attn_scale = 1.0f / sqrtf((float)m->D);
    TRY(check_common(m, e));
    TRY(check_factors(m, e));
    look_for_prefix(m, files);
    look_at_files(m, files);
    *out = m;
    m = NULL;
    rc = 0;
out:
    arch_close(m);
    return rc;
}

void arch_close(arch_model *m)
{
    if (!m) return;
    arena_drop(m->mem);
    mem_free(m);
}

int arch_find(const ckpt_config *c, const arch_row **out, err *e)
{
    arch_model *m;
    *out = row_of(c);
    int rc = arch_open(&m, c, NULL, e);
    arch_close(m);
    return rc;
}

/* ---- linears ------------------------------------------------------------------------------------
 */

typedef struct lister {
    const arch_model *m;
    arch_linear *out;
    int cap, n;
    arch_linear now;
} lister;

static void begin(lister *l, arch_linear_kind kind, int layer, int expert)
{
    l->now = (arch_linear){.kind = kind, .layer = layer, .expert = expert};
}

static void bias_name(arch_shard *s, const char *tail)
{
    size_t n = strlen(s->module), room = sizeof s->bias_name - strlen(tail) - 1;
    if (n > room) n = room;
    memcpy(s->bias_name, s->module, n);
    memcpy(s->bias_name + n, tail, strlen(tail) + 1);
}

/* Name parts follow the layer's prefix. */
static arch_shard *shard(lister *l, const char *a, const char *b, int64_t N, int64_t K, bool bias)
{
    arch_shard *s = &l->now.shard[l->now.n_shards++];
    int n = l->now.layer < 0
                ? 0
                : snprintf(s->module, sizeof s->module, l->m->name.layer, l->now.layer);
    snprintf(s->module + n, sizeof s->module - (size_t)n, "%s%s", a, b);
    bias_name(s, ".bias");
    s->N = N;
    s->K = K;
    s->E = 1;
    s->bias = bias;
    s->transposed = l->m->linear_transposed && l->now.layer >= 0;
    return s;
}

static void parts(arch_shard *s, int n, int64_t a, int64_t b, int64_t c, int64_t d)
{
    s->n_parts = n;
    int64_t v[ARCH_PARTS] = {a, b, c, d};
    memcpy(s->part, v, sizeof v);
}

static void end(lister *l)
{
    if (l->out && l->n < l->cap) l->out[l->n] = l->now;
    l->n++;
}

static void one(lister *l, arch_linear_kind kind, int layer, const char *a, const char *b,
                int64_t N, int64_t K, bool bias)
{
    begin(l, kind, layer, -1);
    shard(l, a, b, N, K, bias);
    end(l);
}

static void list_attention(lister *l, int i)
{
    const arch_model *m = l->m;
    int64_t D = m->D, q = m->H * D, kv = m->Hk * D, h = m->hidden;
    begin(l, ARCH_QKV, i, -1);
    if (m->name.qkv) {
        arch_shard *s = shard(l, m->name.qkv, "", q + 2 * kv, h, m->qkv_bias);
        if (m->qkv_by_head) parts(s, 3, m->H / m->Hk * D, D, D, 0);
    } else {
        arch_shard *s = shard(l, m->name.q, "", m->attn_gate ? 2 * q : q, h, m->qkv_bias);
        if (m->attn_gate) parts(s, 2, D, D, 0, 0);
        shard(l, m->name.k, "", kv, h, m->qkv_bias);
        shard(l, m->name.v, "", kv, h, m->qkv_bias);
    }
    end(l);
    one(l, ARCH_O, i, m->name.o, "", h, q, m->o_bias);
}

static void list_mla(lister *l, int i)
{
    const arch_model *m = l->m;
    int64_t h = m->hidden, q = m->H * (m->mla.nope + m->mla.rope);
    if (m->mla.q_lora) {
        one(l, ARCH_Q_A, i, m->name.q_a, "", m->mla.q_lora, h, m->qkv_bias);
        one(l, ARCH_Q_B, i, m->name.q_b, "", q, m->mla.q_lora, false);
    } else {
        one(l, ARCH_Q_B, i, m->name.q, "", q, h, false);
    }
    one(l, ARCH_KV_A, i, m->name.kv_a, "", m->mla.kv_lora + m->mla.rope, h, m->qkv_bias);
    one(l, ARCH_KV_B, i, m->name.kv_b, "", m->H * (m->mla.nope + m->mla.v), m->mla.kv_lora, false);
    one(l, ARCH_O, i, m->name.o, "", h, m->H * m->mla.v, m->o_bias);
}

static void list_delta(lister *l, int i)
{
    const arch_model *m = l->m;
    int64_t r = m->delta.Hv / m->delta.Hk, k = (int64_t)m->delta.Hk * m->delta.Dk,
            v = (int64_t)m->delta.Hv * m->delta.Dv, h = m->hidden;
    if (m->name.delta_z) {
        begin(l, ARCH_DELTA_IN, i, -1);
        shard(l, m->name.delta_in, "", 2 * k + v, h, false);
        shard(l, m->name.delta_z, "", v, h, false);
        end(l);
        begin(l, ARCH_DELTA_BA, i, -1);
        shard(l, m->name.delta_ba, "", m->delta.Hv, h, false);
        shard(l, m->name.delta_a, "", m->delta.Hv, h, false);
        end(l);
        one(l, ARCH_DELTA_OUT, i, m->name.delta_out, "", h, v, false);
        return;
    }
    begin(l, ARCH_DELTA_IN, i, -1);
    parts(shard(l, m->name.delta_in, "", 2 * k + 2 * v, h, false), 4, m->delta.Dk, m->delta.Dk,
          r * m->delta.Dv, r * m->delta.Dv);
    end(l);
    begin(l, ARCH_DELTA_BA, i, -1);
    parts(shard(l, m->name.delta_ba, "", 2 * m->delta.Hv, h, false), 2, r, r, 0, 0);
    end(l);
    one(l, ARCH_DELTA_OUT, i, m->name.delta_out, "", h, v, false);
}

static void list_dense(lister *l, int i)
{
    const arch_model *m = l->m;
    int64_t h = m->hidden, f = m->layers[i].inter;
    begin(l, ARCH_GATE_UP, i, -1);
    if (m->layers[i].ffn == ARCH_GLU && m->name.gate_up) {
        shard(l, m->name.gate_up, "", 2 * f, h, m->mlp_bias);
    } else {
        if (m->layers[i].ffn == ARCH_GLU) shard(l, m->name.gate, "", f, h, m->mlp_bias);
        shard(l, m->name.up, "", f, h, m->mlp_bias);
    }
    end(l);
    one(l, ARCH_DOWN, i, m->name.down, "", h, f, m->mlp_bias);
}

static void fused_expert(arch_shard *s, const arch_model *m)
{
    s->E = m->moe.E;
    s->transposed = m->moe.fused_transposed;
    bias_name(s, "_bias");
}

static void list_experts(lister *l, int i)
{
    const arch_model *m = l->m;
    int64_t h = m->hidden, f = m->moe.inter;
    if (m->moe.fused) {
        begin(l, ARCH_EXPERT_UP, i, -1);
        arch_shard *s = shard(l, m->name.experts, m->name.e_gate_up, 2 * f, h, m->moe.bias);
        fused_expert(s, m);
        if (m->moe.interleaved) parts(s, 2, 1, 1, 0, 0);
        end(l);
        begin(l, ARCH_EXPERT_DOWN, i, -1);
        fused_expert(shard(l, m->name.experts, m->name.e_down, h, f, m->moe.bias), m);
        end(l);
        return;
    }
    for (int x = 0; x < m->moe.E; x++) {
        char at[128];
        snprintf(at, sizeof at, "%.100s%d.", m->name.experts, x);
        begin(l, ARCH_EXPERT_UP, i, x);
        shard(l, at, m->name.e_gate, f, h, m->moe.bias);
        shard(l, at, m->name.e_up, f, h, m->moe.bias);
        end(l);
        begin(l, ARCH_EXPERT_DOWN, i, x);
        shard(l, at, m->name.e_down, h, f, m->moe.bias);
        end(l);
    }
}

static void list_moe(lister *l, int i)
{
    const arch_model *m = l->m;
    int64_t h = m->hidden, f = m->moe.shared_inter;
    one(l, ARCH_ROUTER, i, m->name.router, "", m->moe.E, h, false);
    list_experts(l, i);
    if (!f) return;
    begin(l, ARCH_SHARED_UP, i, -1);
    shard(l, m->name.shared, "gate_proj", f, h, false);
    shard(l, m->name.shared, "up_proj", f, h, false);
    end(l);
    one(l, ARCH_SHARED_DOWN, i, m->name.shared, "down_proj", h, f, false);
    if (m->name.shared_gate) one(l, ARCH_SHARED_GATE, i, m->name.shared_gate, "", 1, h, false);
}

int arch_linears(const arch_model *m, arch_linear *out, int cap)
{
    lister l = {.m = m, .out = out, .cap = cap};
    for (int i = 0; i < m->n_layers; i++) {
        if (m->layers[i].mix == ARCH_MLA)
            list_mla(&l, i);
        else if (m->layers[i].mix == ARCH_DELTA)
            list_delta(&l, i);
        else
            list_attention(&l, i);
        if (m->layers[i].ffn == ARCH_MOE)
            list_moe(&l, i);
        else
            list_dense(&l, i);
    }
    one(&l, ARCH_LM_HEAD, -1, m->name.head, "", m->vocab, m->hidden, m->head_bias);
    return l.n;
}

bool arch_shard_rows(const arch_shard *s, int32_t *rows)
{
    int64_t group = 0, n = 0, start = 0;
    for (int p = 0; p < s->n_parts; p++)
        group += s->part[p];
    if (!group) return false;
    for (int p = 0; p < s->n_parts; start += s->part[p++])
        for (int64_t g = 0; g < s->N / group; g++)
            for (int64_t i = 0; i < s->part[p]; i++)
                rows[n++] = (int32_t)(g * group + start + i);
    return true;
}

/* ---- other tensors ------------------------------------------------------------------------------
 */

typedef struct plain_lister {
    const arch_model *m;
    arch_tensor_fn *fn;
    void *arg;
    int layer;
} plain_lister;

static void plain(const plain_lister *l, const char *name, const char *tail, int64_t rows,
                  int64_t cols)
{
    char full[256];
    if (!name) return;
    int n = l->layer < 0 ? 0 : snprintf(full, sizeof full, l->m->name.layer, l->layer);
    snprintf(full + n, sizeof full - (size_t)n, "%s%s", name, tail);
    l->fn(l->arg, full, rows, cols);
}

static void plain_mix(const plain_lister *l, arch_mix mix)
{
    const arch_model *m = l->m;
    const arch_names *n = &m->name;
    int64_t v = (int64_t)m->delta.Hv * m->delta.Dv, k = (int64_t)m->delta.Hk * m->delta.Dk;
    if (mix == ARCH_ATTENTION) {
        int64_t q_n = m->qk_norm == ARCH_QK_HEAD ? m->D : (int64_t)m->H * m->D,
                k_n = m->qk_norm == ARCH_QK_HEAD ? m->D : (int64_t)m->Hk * m->D;
        if (m->qk_norm) plain(l, n->q_norm ? n->q_norm : "self_attn.q_norm", ".weight", 1, q_n);
        if (m->qk_norm) plain(l, n->k_norm ? n->k_norm : "self_attn.k_norm", ".weight", 1, k_n);
        plain(l, n->sinks, "", 1, m->H);
    } else if (mix == ARCH_MLA) {
        if (m->mla.q_lora) plain(l, n->q_a_norm, ".weight", 1, m->mla.q_lora);
        plain(l, n->kv_a_norm, ".weight", 1, m->mla.kv_lora);
    } else {
        plain(l, n->conv, ".weight", 2 * k + v, m->delta.conv);
        plain(l, n->a_log, "", 1, m->delta.Hv);
        plain(l, n->dt_bias, "", 1, m->delta.Hv);
        plain(l, n->delta_norm, ".weight", 1, m->delta.Dv);
    }
}

void arch_plain_tensors(const arch_model *m, arch_tensor_fn *fn, void *arg)
{
    plain_lister l = {m, fn, arg, -1};
    plain(&l, m->name.embed, ".weight", m->vocab, m->hidden);
    plain(&l, m->name.pos, ".weight", m->cfg->max_position, m->hidden);
    for (int i = 0; i < m->n_layers; i++) {
        const char *norms[] = {m->name.norm1, m->name.post_mix, m->name.norm2, m->name.post_ffn};
        l.layer = i;
        for (size_t k = 0; k < sizeof norms / sizeof *norms; k++) {
            plain(&l, norms[k], ".weight", 1, m->hidden);
            if (m->norm >= ARCH_LAYER_NORM) plain(&l, norms[k], ".bias", 1, m->hidden);
        }
        plain_mix(&l, m->layers[i].mix);
        if (m->layers[i].ffn == ARCH_MOE) plain(&l, m->name.route_bias, "", 1, m->moe.E);
    }
    l.layer = -1;
    plain(&l, m->name.final_norm, ".weight", 1, m->hidden);
    if (m->norm >= ARCH_LAYER_NORM) plain(&l, m->name.final_norm, ".bias", 1, m->hidden);
}

/* ---- cache and widths ---------------------------------------------------------------------------
 */

void arch_kv_shapes(const arch_model *m, kv_layer_shape *out)
{
    for (int i = 0; i < m->n_layers; i++) {
        const arch_layer *l = &m->layers[i];
        int64_t conv = 2 * (int64_t)m->delta.Hk * m->delta.Dk + (int64_t)m->delta.Hv * m->delta.Dv;
        out[i] = (kv_layer_shape){.Hk = m->Hk, .D = m->D, .window = l->window};
        if (l->mix == ARCH_MLA)
            out[i] = (kv_layer_shape){.Hk = 1,
                                      .D = (int)(m->mla.kv_lora + m->mla.rope),
                                      .window = l->window,
                                      .v_in_k = (int)m->mla.kv_lora};
        if (l->mix == ARCH_DELTA)
            out[i] =
                (kv_layer_shape){.state_floats = conv * (m->delta.conv - 1) +
                                                 (int64_t)m->delta.Hv * m->delta.Dk * m->delta.Dv};
    }
}

static void widen(int64_t *w, int64_t v)
{
    if (v > *w) *w = v;
}

void arch_widths_of(const arch_model *m, arch_widths *out)
{
    int n = arch_linears(m, NULL, 0);
    arch_linear *all = xcalloc((size_t)n, sizeof *all);
    arch_linears(m, all, n);
    *out = (arch_widths){.slots = 1};
    for (int i = 0; i < n; i++) {
        int64_t N = 0, slots = all[i].kind == ARCH_EXPERT_UP ? m->moe.top_k : 1;
        for (int k = 0; k < all[i].n_shards; k++)
            N += all[i].shard[k].N;
        widen(&out->in, all[i].shard[0].K);
        widen(&out->out, N);
        bool up = all[i].kind == ARCH_GATE_UP || all[i].kind == ARCH_EXPERT_UP ||
                  all[i].kind == ARCH_SHARED_UP;
        if (up) {
            bool gated = all[i].kind != ARCH_GATE_UP || m->layers[all[i].layer].ffn == ARCH_GLU;
            widen(&out->gate_up, N * slots);
            widen(&out->act, (gated ? N / 2 : N) * slots);
            widen(&out->slots, slots);
        } else if (all[i].kind == ARCH_EXPERT_DOWN) {
            widen(&out->gate_up, N * m->moe.top_k);
        } else if (all[i].kind <= ARCH_DELTA_OUT) {
            widen(&out->mix, N);
            widen(&out->attn, all[i].shard[0].K);
        }
    }
    if (m->mla.kv_lora) {
        out->latent = m->H * (m->mla.kv_lora + m->mla.rope);
        widen(&out->attn, m->H * m->mla.v);
        widen(&out->attn, m->mla.q_lora);
        widen(&out->attn, m->mla.kv_lora + m->mla.rope);
    }
    mem_free(all);
    out->flow = (m->moe.shared_inter ? 3 : 2) * m->hidden + out->mix + out->attn + 2 * out->latent +
                out->gate_up + out->act;
    out->row = out->flow + 2 * m->hidden + 4 * m->delta.Hv + m->n_ropes * m->rot + m->moe.E +
               4 * (m->moe.E ? m->moe.top_k : 0);
    out->fixed = m->moe.E ? m->moe.E + 1 : 0;
}
