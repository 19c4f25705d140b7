/* config.json as a typed struct.
 *
 * transformers 4 writes rope_theta, rope_scaling and torch_dtype; transformers 5 writes
 * rope_parameters and dtype. Files in the wild hold both. The newer spelling wins; where they
 * differ a warning is kept in the config. Multimodal models keep the language part under
 * text_config: it is read in its place.
 *
 * Families in the table below are run: a key that they need and the file lacks is an error, and
 * what transformers assumes for an absent key is assumed here. Any other config.json parses as far
 * as it can, so that `inspect` works on it: missing sizes stay 0 and unknown rope types become
 * warnings. Sizes that are given are bounded for all, so that no product of them can wrap. */
#include "ckpt/config.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What transformers takes where the key is absent; window: -1 = none, other zeros: the value that
 * most families have. */
typedef struct family {
    const char *model_type;
    int64_t max_position, head_dim, window, full_below;
    bool window_on;
    double theta, partial, eps;
    const char *act;
    int64_t vocab, heads, kv_heads;
} family;

static const family families[] = {
    {.model_type = "llama", .max_position = 2048, .window = -1},
    {.model_type = "mistral", .max_position = 131072, .window = 4096, .window_on = true},
    {.model_type = "qwen2", .max_position = 32768, .window = 4096, .full_below = 28},
    {.model_type = "qwen3",
     .max_position = 32768,
     .head_dim = 128,
     .window = 4096,
     .full_below = 28},
    {.model_type = "qwen2_moe", .max_position = 32768, .window = 4096, .full_below = 28},
    {.model_type = "qwen3_moe", .max_position = 32768, .window = 4096, .full_below = 28},
    {.model_type = "qwen3_next",
     .max_position = 32768,
     .head_dim = 256,
     .window = -1,
     .partial = 0.25},
    {.model_type = "mixtral",
     .max_position = 131072,
     .window = -1,
     .window_on = true,
     .theta = 1e6},
    {.model_type = "gemma", .max_position = 8192, .head_dim = 256, .window = -1},
    {.model_type = "gemma2",
     .max_position = 8192,
     .head_dim = 256,
     .window = 4096,
     .window_on = true},
    {.model_type = "gemma3_text",
     .max_position = 131072,
     .head_dim = 256,
     .window = 4096,
     .window_on = true,
     .theta = 1e6,
     .vocab = 262208,
     .heads = 8,
     .kv_heads = 4},
    {.model_type = "phi3", .max_position = 4096, .window = -1, .window_on = true},
    {.model_type = "olmo2", .max_position = 2048, .window = -1},
    {.model_type = "granite", .max_position = 2048, .window = -1},
    {.model_type = "smollm3", .max_position = 32768, .window = -1},
    {.model_type = "deepseek_v2", .max_position = 2048, .window = -1},
    {.model_type = "deepseek_v3", .max_position = 4096, .window = -1},
    {.model_type = "gpt_oss",
     .max_position = 131072,
     .head_dim = 64,
     .window = 128,
     .window_on = true},
    {.model_type = "glm4", .max_position = 131072, .head_dim = 128, .window = -1, .partial = 0.5},
    {.model_type = "glm4_moe",
     .max_position = 131072,
     .head_dim = 128,
     .window = -1,
     .partial = 0.5},
    {.model_type = "stablelm", .max_position = 4096, .window = -1},
    {.model_type = "gpt_neox", .max_position = 2048, .window = -1},
    {.model_type = "starcoder2", .max_position = 4096, .window = -1, .window_on = true},
    {.model_type = "cohere", .max_position = 8192, .window = -1},
    {.model_type = "gpt2", .max_position = 1024, .window = -1},
    {.model_type = "minimax_m2",
     .max_position = 196608,
     .head_dim = 128,
     .window = -1,
     .theta = 5e6},
    {.model_type = "ministral3",
     .max_position = 262144,
     .head_dim = 128,
     .window = -1,
     .theta = 1e6},
    {.model_type = "mimo", .max_position = 32768, .window = -1},
    {.model_type = "qwen3_vl_text",
     .max_position = 128000,
     .head_dim = 128,
     .window = -1,
     .theta = 5e5},
    {.model_type = "qwen3_vl_moe_text",
     .max_position = 128000,
     .head_dim = 128,
     .window = -1,
     .theta = 5e5},
    {.model_type = "qwen3_5_text",
     .max_position = 32768,
     .head_dim = 256,
     .window = -1,
     .partial = 0.25},
    {.model_type = "qwen3_5_moe_text",
     .max_position = 32768,
     .head_dim = 256,
     .window = -1,
     .partial = 0.25},
    {.model_type = "granitemoe", .max_position = 2048, .window = -1},
    {.model_type = "olmo3",
     .max_position = 2048,
     .window = 4096,
     .window_on = true,
     .theta = 5e5,
     .eps = 1e-5},
    {.model_type = "olmoe", .max_position = 4096, .window = -1, .eps = 1e-5},
    {.model_type = "cohere2", .max_position = 8192, .window = 4096, .window_on = true, .eps = 1e-5},
    {.model_type = "phi",
     .max_position = 2048,
     .window = -1,
     .partial = 0.5,
     .eps = 1e-5,
     .act = "gelu_new"},
    {.model_type = "phimoe",
     .max_position = 131072,
     .window = -1,
     .window_on = true,
     .theta = 1e6,
     .eps = 1e-5},
    {.model_type = "falcon", .max_position = 2048, .window = -1, .eps = 1e-5, .act = "gelu"},
    {.model_type = "seed_oss", .max_position = 524288, .head_dim = 128, .window = -1},
    {.model_type = "exaone4", .max_position = 2048, .window = 4096, .window_on = true, .eps = 1e-5},
    {.model_type = "ernie4_5",
     .max_position = 131072,
     .head_dim = 128,
     .window = -1,
     .theta = 5e5,
     .eps = 1e-5},
    {.model_type = "ernie4_5_moe", .max_position = 131072, .window = -1, .theta = 5e5, .eps = 1e-5},
    {.model_type = "hunyuan_v1_dense", .max_position = 2048, .window = -1, .eps = 1e-5},
    {.model_type = "hunyuan_v1_moe", .max_position = 2048, .window = -1, .eps = 1e-5},
    {.model_type = "nemotron",
     .max_position = 4096,
     .window = -1,
     .partial = 0.5,
     .eps = 1e-5,
     .act = "relu2"},
    {.model_type = "glm",
     .max_position = 131072,
     .head_dim = 128,
     .window = -1,
     .partial = 0.5,
     .eps = 1.5625e-7},
    {.model_type = "arcee", .max_position = 4096, .window = -1, .eps = 1e-5, .act = "relu2"},
    {.model_type = "dots1",
     .max_position = 2048,
     .window = 4096,
     .full_below = 62,
     .window_on = true},
    {.model_type = "kimi_k2", .max_position = 4096, .window = -1},
};

/* Models that wrap one of these: its keys lie in text_config, and its own model_type with them. */
static const char *const wrappers[] = {"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
                                       "gemma3",   "mistral3",     "kimi_k25"};

typedef struct parse {
    ckpt_config *c;
    const family *fam; /* NULL = not a family that is run */
    const json *root;  /* whole file */
    const json *j;     /* text_config or root */
    char type[64];     /* model_type of what j describes */
    const char *where;
    err *e;
} parse;

static void warn(parse *p, const char *fmt, ...) PRINTF(2, 3);
static void warn(parse *p, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    ckpt_config *c = p->c;
    char **grown = arena_alloc(c->mem, sizeof *grown * (size_t)(c->n_warnings + 1));
    if (c->n_warnings) memcpy(grown, c->warnings, sizeof *grown * (size_t)c->n_warnings);
    grown[c->n_warnings++] = arena_printf(c->mem, "%s: %s", p->where, text);
    c->warnings = grown;
}

/* First of several spellings that is there. */
static int int_of(parse *p, const char *const *keys, int64_t *out)
{
    for (; *keys; keys++) {
        int rc = json_get_i64(p->j, *keys, out, p->where, p->e);
        if (rc) return rc;
    }
    return 0;
}

#define KEYS(...) ((const char *const[]){__VA_ARGS__, NULL})

static bool is_type(const parse *p, const char *name)
{
    return !strcmp(p->type, name);
}

static int text_of(parse *p, const json *j, const char *key, char *out, size_t cap)
{
    const char *s = NULL;
    int rc = json_get_str(j, key, &s, p->where, p->e);
    if (rc > 0) snprintf(out, cap, "%s", s);
    return rc;
}

static int positive(parse *p, int64_t v, const char *key, int64_t max)
{
    if (v >= 1 && v <= max) return 0;
    if (v == 0 && !p->fam) {
        warn(p, "'%s' is not there", key);
        return 0;
    }
    if (v == 0 && json_is_null_or_absent(p->j, key))
        return err_set(p->e, ERR_MISSING,
                       "%s: key '%s' is missing; a %s model cannot be read "
                       "without it",
                       p->where, key, p->fam->model_type);
    return err_set(p->e, ERR_VALUE, "%s: '%s' is %lld; expected 1 to %lld", p->where, key,
                   (long long)v, (long long)max);
}

/* ---- shapes -------------------------------------------------------------------------------------
 */

static int parse_shapes(parse *p)
{
    ckpt_config *c = p->c;
    int rc = 0;
    if (p->fam) {
        c->vocab_size = p->fam->vocab;
        c->n_heads = p->fam->heads;
    }
    TRY(int_of(p, KEYS("vocab_size"), &c->vocab_size));
    TRY(int_of(p, KEYS("hidden_size", "n_embd", "d_model"), &c->hidden_size));
    TRY(int_of(p, KEYS("intermediate_size", "n_inner", "ffn_hidden_size"), &c->intermediate_size));
    TRY(int_of(p, KEYS("num_hidden_layers", "n_layer", "num_layers"), &c->n_layers));
    TRY(int_of(p, KEYS("num_attention_heads", "n_head"), &c->n_heads));
    c->n_kv_heads = p->fam && p->fam->kv_heads ? p->fam->kv_heads : c->n_heads;
    TRY(int_of(p, KEYS("num_key_value_heads"), &c->n_kv_heads));
    if (c->n_heads > 0) c->head_dim = c->hidden_size / c->n_heads;
    if (p->fam && p->fam->head_dim) c->head_dim = p->fam->head_dim;
    TRY(int_of(p, KEYS("head_dim"), &c->head_dim));
    c->max_position = p->fam ? p->fam->max_position : 2048;
    TRY(int_of(p, KEYS("max_position_embeddings", "n_positions", "max_sequence_length"),
               &c->max_position));
    if ((is_type(p, "gpt2") || is_type(p, "falcon")) && !c->intermediate_size)
        c->intermediate_size = 4 * c->hidden_size;
    static const char *const eps[] = {"layer_norm_eps", "layer_norm_epsilon", "norm_epsilon",
                                      "norm_eps", "rms_norm_eps"};
    c->rms_norm_eps = p->fam && p->fam->eps > 0 ? p->fam->eps : 1e-6;
    for (size_t i = 0; i < sizeof eps / sizeof *eps; i++)
        TRY(json_get_f64(p->j, eps[i], &c->rms_norm_eps, p->where, p->e));
    if (c->rms_norm_eps < 0 || c->rms_norm_eps > 1) {
        rc = err_set(p->e, ERR_VALUE, "%s: 'rms_norm_eps' is %g; expected 0 to 1", p->where,
                     c->rms_norm_eps);
        goto out;
    }
    TRY(text_of(p, p->j, "activation", c->hidden_act, sizeof c->hidden_act));
    TRY(text_of(p, p->j, "activation_function", c->hidden_act, sizeof c->hidden_act));
    TRY(text_of(p, p->j, "hidden_activation", c->hidden_act, sizeof c->hidden_act));
    TRY(text_of(p, p->j, "hidden_act", c->hidden_act, sizeof c->hidden_act));
    if (!*c->hidden_act)
        snprintf(c->hidden_act, sizeof c->hidden_act, "%s",
                 p->fam && p->fam->act ? p->fam->act : "silu");
    rc = 0;
out:
    return rc;
}

/* Sizes that any model needs, and that code multiplies: bounded so that no product can wrap. */
static int check_shapes(parse *p)
{
    ckpt_config *c = p->c;
    int rc = 0;
    static const int64_t big = (int64_t)1 << 31;
    TRY(positive(p, c->vocab_size, "vocab_size", big - 1));
    TRY(positive(p, c->hidden_size, "hidden_size", 1 << 24));
    TRY(positive(p, c->n_layers, "num_hidden_layers", 1 << 16));
    TRY(positive(p, c->n_heads, "num_attention_heads", 1 << 16));
    TRY(positive(p, c->n_kv_heads, "num_key_value_heads", 1 << 16));
    TRY(positive(p, c->head_dim, "head_dim", 1 << 16));
    TRY(positive(p, c->max_position, "max_position_embeddings", big));
    if (c->intermediate_size < 0 || c->intermediate_size > 1 << 26)
        rc = err_set(p->e, ERR_VALUE, "%s: 'intermediate_size' is %lld", p->where,
                     (long long)c->intermediate_size);
out:
    return rc;
}

/* ---- rope ---------------------------------------------------------------------------------------
 */

static int rope_kind_of(parse *p, const char *s, rope_kind *out)
{
    static const struct {
        const char *name;
        rope_kind kind;
    } names[] = {{"default", ROPE_DEFAULT}, {"linear", ROPE_LINEAR}, {"dynamic", ROPE_DYNAMIC},
                 {"llama3", ROPE_LLAMA3},   {"yarn", ROPE_YARN},     {"longrope", ROPE_LONGROPE},
                 {"su", ROPE_LONGROPE},     {"none", ROPE_NONE}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(names[i].name, s)) {
            *out = names[i].kind;
            return 0;
        }
    if (!p->fam) {
        warn(p, "rope type '%.40s' is not known", s);
        return 0;
    }
    return err_set(p->e, ERR_UNSUPPORTED,
                   "%s: rope type '%.40s' is not known; known are default, linear, dynamic, "
                   "llama3, yarn, longrope",
                   p->where, s);
}

static int factor_list(parse *p, const json *o, const char *key, double **out, int *n)
{
    const json *a = json_get(o, key);
    if (!a || cJSON_IsNull(a)) return 0;
    if (!cJSON_IsArray(a))
        return err_set(p->e, ERR_FORMAT, "%s: rope '%s' must be a list", p->where, key);
    *out = arena_alloc(p->c->mem, sizeof **out * (size_t)(cJSON_GetArraySize(a) + 1));
    *n = 0;
    for (const json *v = a->child; v; v = v->next) {
        if (!cJSON_IsNumber(v))
            return err_set(p->e, ERR_FORMAT, "%s: rope '%s' must hold numbers", p->where, key);
        if (!(v->valuedouble > 0) || !isfinite(v->valuedouble))
            return err_set(p->e, ERR_VALUE, "%s: rope '%s' holds %g; each factor must be above 0",
                           p->where, key, v->valuedouble);
        (*out)[(*n)++] = v->valuedouble;
    }
    return 0;
}

/* A value of another type would be passed over in silence. */
static int object_or_none(parse *p, const json *o, const char *key)
{
    const json *v = json_get(o, key);
    if (!v || cJSON_IsNull(v) || cJSON_IsObject(v)) return 0;
    return err_set(p->e, ERR_FORMAT, "%s: '%s' must be an object or null", p->where, key);
}

/* One rope object, either spelling. */
static int rope_object(parse *p, const json *o, rope_config *r)
{
    const char *type = NULL;
    int rc = 0;
    err *e = p->e;
    TRY(json_get_str(o, "type", &type, p->where, e));
    TRY(json_get_str(o, "rope_type", &type, p->where, e));
    if (type) TRY(rope_kind_of(p, type, &r->kind));
    TRY(json_get_f64(o, "rope_theta", &r->theta, p->where, e));
    TRY(json_get_f64(o, "factor", &r->factor, p->where, e));
    TRY(json_get_f64(o, "partial_rotary_factor", &r->partial_rotary_factor, p->where, e));
    TRY(json_get_f64(o, "low_freq_factor", &r->low_freq_factor, p->where, e));
    TRY(json_get_f64(o, "high_freq_factor", &r->high_freq_factor, p->where, e));
    TRY(json_get_i64(o, "original_max_position_embeddings", &r->original_max_position, p->where,
                     e));
    TRY(json_get_f64(o, "beta_fast", &r->beta_fast, p->where, e));
    TRY(json_get_f64(o, "beta_slow", &r->beta_slow, p->where, e));
    TRY(json_get_f64(o, "attention_factor", &r->attention_factor, p->where, e));
    TRY(json_get_f64(o, "mscale", &r->mscale, p->where, e));
    TRY(json_get_f64(o, "mscale_all_dim", &r->mscale_all_dim, p->where, e));
    TRY(json_get_bool(o, "truncate", &r->truncate, p->where, e));
    TRY(factor_list(p, o, "short_factor", &r->short_factor, &r->n_short));
    TRY(factor_list(p, o, "long_factor", &r->long_factor, &r->n_long));
    rc = 0;
out:
    return rc;
}

/* rope_parameters may be keyed by layer type (gemma 3): full attention's entry is taken. */
static const json *rope_of_full_attention(const json *o)
{
    const json *full = json_get(o, "full_attention");
    return cJSON_IsObject(full) ? full : o;
}

/* The table of windowed layers: an entry of its own, or a base frequency of its own. */
static int parse_rope_local(parse *p)
{
    ckpt_config *c = p->c;
    const json *o = json_get(json_get(p->j, "rope_parameters"), "sliding_attention");
    int rc = 0;
    c->rope_local = c->rope;
    c->rope_local.kind = ROPE_DEFAULT;
    c->rope_local.factor = 1.0;
    c->rope_local.attention_factor = 0;
    if (cJSON_IsObject(o)) {
        TRY(rope_object(p, o, &c->rope_local));
        c->has_rope_local = true;
    } else {
        TRY(json_get_f64(p->j, "rope_local_base_freq", &c->rope_local.theta, p->where, p->e));
        c->has_rope_local = rc > 0;
    }
    if (!(c->rope_local.theta > 0) || !(c->rope_local.factor > 0)) {
        rc = err_set(p->e, ERR_VALUE, "%s: rope of sliding layers: theta %g, factor %g", p->where,
                     c->rope_local.theta, c->rope_local.factor);
        goto out;
    }
    rc = 0;
out:
    return rc;
}

static int parse_rope(parse *p)
{
    ckpt_config *c = p->c;
    rope_config *r = &c->rope;
    *r = (rope_config){.kind = ROPE_DEFAULT,
                       .theta = 10000.0,
                       .factor = 1.0,
                       .partial_rotary_factor = 1.0,
                       .low_freq_factor = 1.0,
                       .high_freq_factor = 4.0,
                       .beta_fast = 32,
                       .beta_slow = 1,
                       .truncate = true};
    if (p->fam && p->fam->theta > 0) r->theta = p->fam->theta;
    if (p->fam && p->fam->partial > 0) r->partial_rotary_factor = p->fam->partial;
    double old_theta = -1;
    const json *old = json_get(p->j, "rope_scaling"),
               *neu = rope_of_full_attention(json_get(p->j, "rope_parameters"));
    int rc = 0;
    TRY(object_or_none(p, p->j, "rope_scaling"));
    TRY(object_or_none(p, p->j, "rope_parameters"));
    TRY(json_get_f64(p->j, "rotary_pct", &r->partial_rotary_factor, p->where, p->e));
    TRY(json_get_f64(p->j, "partial_rotary_factor", &r->partial_rotary_factor, p->where, p->e));
    TRY(json_get_f64(p->j, "rotary_emb_base", &old_theta, p->where, p->e));
    TRY(json_get_f64(p->j, "rope_theta", &old_theta, p->where, p->e));
    if (old_theta > 0) r->theta = old_theta;
    TRY(json_get_i64(p->j, "original_max_position_embeddings", &r->original_max_position, p->where,
                     p->e));
    rope_config before = *r;
    if (cJSON_IsObject(old)) TRY(rope_object(p, old, r));
    if (cJSON_IsObject(neu)) {
        rope_config was = *r;
        bool had = cJSON_IsObject(old) || old_theta > 0;
        *r = before;
        TRY(rope_object(p, neu, r));
        if (had && (was.theta != r->theta ||
                    (cJSON_IsObject(old) && (was.kind != r->kind || was.factor != r->factor))))
            warn(p,
                 "rope_parameters (theta %g, factor %g) and rope_theta/rope_scaling (theta %g, "
                 "factor %g) differ; rope_parameters is used",
                 r->theta, r->factor, was.theta, was.factor);
    }
    if (!(r->theta > 0) || !(r->factor > 0) ||
        !(r->partial_rotary_factor > 0 && r->partial_rotary_factor <= 1))
        rc = err_set(p->e, ERR_VALUE,
                     "%s: rope theta %g, factor %g, partial_rotary_factor %g: all must be "
                     "positive, the last at most 1",
                     p->where, r->theta, r->factor, r->partial_rotary_factor);
    else if (p->fam && r->kind == ROPE_LLAMA3 && r->original_max_position < 1)
        rc = err_set(p->e, ERR_MISSING,
                     "%s: rope type llama3 needs the key 'original_max_position_embeddings'",
                     p->where);
    else if (r->original_max_position < 0)
        rc = err_set(p->e, ERR_VALUE,
                     "%s: 'original_max_position_embeddings' is %lld; expected at least 1",
                     p->where, (long long)r->original_max_position);
    else if (r->kind == ROPE_YARN && !(r->beta_slow > 0 && r->beta_fast >= r->beta_slow))
        rc = err_set(p->e, ERR_VALUE,
                     "%s: rope beta_fast %g, beta_slow %g: expected beta_fast >= beta_slow > 0",
                     p->where, r->beta_fast, r->beta_slow);
    else
        rc = 0;
    if (!r->original_max_position) r->original_max_position = c->max_position;
out:
    return rc;
}

/* ---- the rest -----------------------------------------------------------------------------------
 */

static int parse_dtype(parse *p)
{
    const char *old = NULL, *neu = NULL;
    int rc = json_get_str(p->j, "torch_dtype", &old, p->where, p->e);
    if (rc >= 0) rc = json_get_str(p->j, "dtype", &neu, p->where, p->e);
    if (rc < 0) return rc;
    if (!old && !neu && p->j != p->root) {
        json_get_str(p->root, "torch_dtype", &old, p->where, NULL);
        json_get_str(p->root, "dtype", &neu, p->where, NULL);
    }
    const char *s = neu ? neu : old ? old : "bfloat16";
    if (!strncmp(s, "torch.", 6)) s += 6;
    num_dtype t = num_by_name(s, strlen(s));
    if (old && neu && strcmp(old, neu))
        warn(p, "dtype '%s' and torch_dtype '%s' differ; dtype is used", neu, old);
    if (t == NUM_NONE) {
        warn(p, "dtype '%.40s' is not known; the tensors' own types decide", s);
        t = NUM_BF16;
    }
    p->c->dtype = t;
    return 0;
}

static int add_ids(parse *p, const json *obj, const char *key, int64_t *list, int *n)
{
    const json *v = json_get(obj, key);
    if (!v || cJSON_IsNull(v)) return 0;
    for (const json *x = cJSON_IsArray(v) ? v->child : v; x;
         x = cJSON_IsArray(v) ? x->next : NULL) {
        if (cJSON_IsNumber(x) && x->valuedouble == -1) continue; /* "none" in some files */
        if (!cJSON_IsNumber(x) || x->valuedouble < 0 || x->valuedouble > 2147483647.0 ||
            x->valuedouble != floor(x->valuedouble))
            return err_set(p->e, ERR_FORMAT, "%s: '%s' must be a token id or a list of them",
                           p->where, key);
        int64_t id = (int64_t)x->valuedouble;
        bool have = false;
        for (int i = 0; i < *n; i++)
            have = have || list[i] == id;
        if (!have && *n == CFG_MAX_EOS)
            warn(p, "'%s' lists more than %d ids; %lld is left out", key, CFG_MAX_EOS,
                 (long long)id);
        else if (!have)
            list[(*n)++] = id;
    }
    return 0;
}

static int parse_ids(parse *p, const json *gen)
{
    ckpt_config *c = p->c;
    int rc = 0;
    const json *const from[] = {p->j, p->root != p->j ? p->root : NULL, gen};
    for (size_t i = 0; i < 3; i++) {
        if (!from[i]) continue;
        TRY(add_ids(p, from[i], "bos_token_id", c->bos, &c->n_bos));
        TRY(add_ids(p, from[i], "eos_token_id", c->eos, &c->n_eos));
    }
out:
    return rc;
}

/* What a family fixes without saying it in the file. */
static int parse_family(parse *p)
{
    ckpt_config *c = p->c;
    int rc = 0;
    bool bias = false, mlp = false;
    TRY(json_get_bool(p->j, "attention_bias", &bias, p->where, p->e));
    TRY(json_get_bool(p->j, "mlp_bias", &mlp, p->where, p->e));
    c->attention_bias = c->attention_out_bias = bias;
    c->mlp_bias = mlp;
    if (is_type(p, "qwen2")) {
        c->attention_bias = true;
        c->attention_out_bias = false;
    }
    c->qk_norm = is_type(p, "qwen3") || is_type(p, "qwen3_moe");
    const json *root = p->j;
    rc = json_get_bool(root, "tie_word_embeddings", &c->tie_embeddings, p->where, p->e);
    if (rc == 0 && p->j != p->root)
        rc = json_get_bool(p->root, "tie_word_embeddings", &c->tie_embeddings, p->where, p->e);
    if (rc < 0) goto out;
    c->tie_embeddings_present = rc > 0;
    rc = 0;
out:
    return rc;
}

/* One entry of layer_types. */
static int layer_type(parse *p, const json *t, bool windows, uint8_t *sliding)
{
    static const char *const known[] = {"full_attention", "sliding_attention", "linear_attention"};
    bool ok = false, window = cJSON_IsString(t) && !strcmp(t->valuestring, known[1]);
    for (size_t i = 0; cJSON_IsString(t) && i < sizeof known / sizeof *known; i++)
        ok = ok || !strcmp(t->valuestring, known[i]);
    if (p->fam && !ok)
        return err_set(p->e, ERR_UNSUPPORTED,
                       "%s: 'layer_types' holds %s%.40s%s; known are full_attention, "
                       "sliding_attention and linear_attention",
                       p->where, cJSON_IsString(t) ? "'" : "",
                       cJSON_IsString(t) ? t->valuestring : "something that is not a name",
                       cJSON_IsString(t) ? "'" : "");
    if (p->fam && window && windows && p->c->sliding_window < 1)
        return err_set(p->e, ERR_VALUE,
                       "%s: 'layer_types' has sliding_attention, but 'sliding_window' is %lld; "
                       "expected at least 1",
                       p->where, (long long)p->c->sliding_window);
    *sliding = window && p->c->sliding_window > 0;
    return 0;
}

static int parse_window(parse *p)
{
    ckpt_config *c = p->c;
    const family *f = p->fam;
    int rc = 0;
    bool use = !f || f->window_on || f->window < 0; /* Qwen switches it on explicitly */
    int64_t full_below = f ? f->full_below : 0;
    if (f && f->window > 0 && !json_get(p->j, "sliding_window")) c->sliding_window = f->window;
    TRY(json_get_i64(p->j, "sliding_window", &c->sliding_window, p->where, p->e));
    TRY(json_get_bool(p->j, "use_sliding_window", &use, p->where, p->e));
    TRY(json_get_i64(p->j, "max_window_layers", &full_below, p->where, p->e));
    if (!use || c->sliding_window < 0) c->sliding_window = 0;
    c->layer_sliding = arena_alloc(c->mem, (size_t)c->n_layers);
    const json *types = json_get(p->j, "layer_types");
    bool by_type = cJSON_IsArray(types);
    int n_types = by_type ? cJSON_GetArraySize(types) : 0;
    if (by_type && n_types != c->n_layers) {
        if (f)
            return err_set(p->e, ERR_SHAPE,
                           "%s: 'layer_types' has %d entries, 'num_hidden_layers' is %lld",
                           p->where, n_types, (long long)c->n_layers);
        by_type = false;
    }
    if (f && types && !by_type && !cJSON_IsNull(types))
        return err_set(p->e, ERR_FORMAT, "%s: 'layer_types' must be a list of names", p->where);
    const json *t = by_type ? types->child : NULL;
    for (int64_t i = 0; i < c->n_layers; i++, t = t ? t->next : NULL) {
        if (by_type) TRY(layer_type(p, t, use, &c->layer_sliding[i]));
        if (!by_type) c->layer_sliding[i] = c->sliding_window && i >= full_below;
    }
    rc = 0;
out:
    return rc;
}

static int find_quant(parse *p)
{
    int rc = 0;
    ckpt_config *c = p->c;
    static const char *const keys[] = {"quantization_config", "compression_config"};
    for (size_t i = 0; i < 2 && !c->quant; i++) {
        TRY(object_or_none(p, p->root, keys[i]));
        TRY(object_or_none(p, json_get(p->root, "text_config"), keys[i]));
        const json *v = json_get(p->root, keys[i]);
        const char *form = "%s: %s";
        if (!cJSON_IsObject(v)) {
            v = json_get(json_get(p->root, "text_config"), keys[i]);
            form = "%s: text_config.%s";
        }
        if (!cJSON_IsObject(v)) continue;
        c->quant = v;
        c->quant_where = form[4] == 't'
                             ? arena_printf(c->mem, "%s: text_config.%s", p->where, keys[i])
                             : arena_printf(c->mem, "%s: %s", p->where, keys[i]);
    }
out:
    return rc;
}

/* A wrapper's text_config may lack its model_type: it is the wrapper's with "_text". */
static int find_family(parse *p)
{
    bool known = p->j == p->root;
    int rc = 0;
    snprintf(p->type, sizeof p->type, "%.50s%s", p->c->model_type, known ? "" : "_text");
    if (!known) rc = text_of(p, p->j, "model_type", p->type, sizeof p->type);
    for (size_t i = 0; i < sizeof wrappers / sizeof *wrappers; i++)
        known = known || !strcmp(wrappers[i], p->c->model_type);
    for (size_t i = 0; known && i < sizeof families / sizeof *families; i++)
        if (is_type(p, families[i].model_type)) p->fam = &families[i];
    return rc < 0 ? rc : 0;
}

int config_parse(ckpt_config *cfg, const json *raw, const json *gen, const char *where, err *e)
{
    int rc = 0;
    *cfg = (ckpt_config){.mem = arena_make(), .raw = raw};
    const json *text = json_get(raw, "text_config");
    parse p = {.c = cfg,
               .root = raw,
               .j = cJSON_IsObject(text) && json_get(text, "hidden_size") ? text : raw,
               .where = where,
               .e = e};
    if (!cJSON_IsObject(raw)) {
        rc = err_set(e, ERR_FORMAT, "%s: not a JSON object", where);
        goto out;
    }
    const json *arch = json_get(raw, "architectures");
    if (cJSON_IsArray(arch) && cJSON_IsString(arch->child))
        snprintf(cfg->architecture, sizeof cfg->architecture, "%s", arch->child->valuestring);
    TRY(text_of(&p, raw, "model_type", cfg->model_type, sizeof cfg->model_type));
    TRY(find_family(&p));
    cfg->text = p.j;
    cfg->where = arena_strdup(cfg->mem, where);
    TRY(find_quant(&p));
    TRY(parse_shapes(&p));
    TRY(check_shapes(&p));
    TRY(parse_dtype(&p));
    TRY(parse_rope(&p));
    TRY(parse_rope_local(&p));
    TRY(parse_ids(&p, gen));
    TRY(parse_family(&p));
    TRY(parse_window(&p));
out:
    if (rc < 0) config_free(cfg);
    return rc < 0 ? rc : 0;
}

void config_free(ckpt_config *cfg)
{
    arena_drop(cfg->mem);
    *cfg = (ckpt_config){0};
}
