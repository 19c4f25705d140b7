/* ModelOpt: quant_algo names the scheme, in quantization_config of config.json (flat; older writers
 * leave quant_method out) or in hf_quant_config.json (nested under "quantization").
 *
 *   quant_algo                 weight            beside it
 *   FP8                        F8 [N,K]          weight_scale, input_scale
 *   FP8_PER_CHANNEL_PER_TOKEN  F8 [N,K]          weight_scale [N]
 *   FP8_PB_WO                  F8 [N,K]          weight_scale [N/128, 1, K/128, 1]
 *   NVFP4, NVFP4_AWQ           U8 [N,K/2]        weight_scale F8 [N,K/16], weight_scale_2,
 * input_scale W4A16_NVFP4                the same without input_scale W4A8_NVFP4_FP8 the same;
 * activations fp8 MXFP8, MXFP4, W4A8_MXFP4_FP8                 weight_scale U8 [N,K/32] W4A16_AWQ,
 * W4A8_AWQ        U8 [N/2,K]        weight_scale F32 [N,K/g]; W4A8 weight_scale_2, input_scale
 *   W8A16, W8A8_SQ_PER_CHANNEL I8 [N,K]          weight_scale F32 [N]; SQ input_scale
 *   MIXED_PRECISION            quantized_layers says the algo of each module; the rest is plain
 *
 * All scales multiply. pre_quant_scale [K] may stand beside any of them. Excluded modules are whole
 * names or globs. Refused: NVFP4_SVD, whose low-rank parts have no place here, and algos that are
 * not listed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "quant/scaled.h"

#define AWQ (SCHEME_ROW_PAIRS | SCHEME_PRE_SCALE | SCHEME_FREE_GROUP)
static const quant__scheme schemes[] = {
    {"FP8", "w:fp8_e4m3,tensor a:fp8_e4m3,tensor", "weight_scale", NULL, "input_scale",
     SCHEME_PRE_SCALE},
    {"FP8_PER_CHANNEL_PER_TOKEN", "w:fp8_e4m3,channel a:fp8_e4m3,token", "weight_scale", NULL, NULL,
     SCHEME_PRE_SCALE},
    {"FP8_PB_WO", "w:fp8_e4m3,block128x128", "weight_scale", NULL, NULL, SCHEME_PRE_SCALE},
    {"NVFP4", "w:nvfp4,g16 a:nvfp4,g16", "weight_scale", "weight_scale_2", "input_scale",
     SCHEME_PRE_SCALE},
    {"NVFP4_AWQ", "w:nvfp4,g16 a:nvfp4,g16", "weight_scale", "weight_scale_2", "input_scale",
     SCHEME_PRE_SCALE},
    {"W4A16_NVFP4", "w:nvfp4,g16", "weight_scale", "weight_scale_2", NULL, SCHEME_PRE_SCALE},
    {"W4A8_NVFP4_FP8", "w:nvfp4,g16 a:fp8_e4m3,tensor", "weight_scale", "weight_scale_2",
     "input_scale", SCHEME_PRE_SCALE},
    {"MXFP8", "w:mxfp8,g32 a:mxfp8,group32", "weight_scale", NULL, NULL, 0},
    {"MXFP4", "w:mxfp4,g32 a:mxfp4,group32", "weight_scale", NULL, NULL, 0},
    {"W4A8_MXFP4_FP8", "w:mxfp4,g32 a:fp8_e4m3,tensor", "weight_scale", NULL, "input_scale", 0},
    {"W4A16_AWQ", "w:int4,g128", "weight_scale", NULL, NULL, AWQ},
    {"W4A8_AWQ", "w:int4,g128 a:fp8_e4m3,tensor", "weight_scale", "weight_scale_2", "input_scale",
     AWQ | SCHEME_FP8_FRAME},
    {"W8A16", "w:int8,channel", "weight_scale", NULL, NULL, SCHEME_PRE_SCALE},
    {"W8A8_SQ_PER_CHANNEL", "w:int8,channel a:int8,tensor", "weight_scale", NULL, "input_scale",
     SCHEME_PRE_SCALE},
};
enum { N_SCHEMES = sizeof schemes / sizeof *schemes };

static const quant__scheme *find_algo(const char *algo)
{
    for (int i = 0; i < N_SCHEMES; i++)
        if (!strcasecmp(schemes[i].name, algo)) return &schemes[i];
    return NULL;
}

static int unknown_algo(const quant_ckpt *q, const char *algo, err *e)
{
    buf list = {0};
    for (int i = 0; i < N_SCHEMES; i++)
        buf_printf(&list, "%s, ", schemes[i].name);
    int rc = err_set(
        e, ERR_UNSUPPORTED, "%s: quant_algo '%s' is not read%s (it reads: %sMIXED_PRECISION)",
        q->where, algo,
        strcasecmp(algo, "NVFP4_SVD") ? "" : ": its low-rank parts have no place here", list.data);
    buf_free(&list);
    return rc;
}

/* The scheme of an algo with the group size that the config gives. */
static int spec_of(const quant_ckpt *q, const quant__scheme *s, const json *o, qspec *out, err *e)
{
    int64_t group = 0;
    int rc = qspec_parse(s->spec, out, e);
    if (rc >= 0) rc = json_get_i64(o, "group_size", &group, q->where, e);
    if (rc < 0 || out->w.gran != Q_GROUP || group <= 0) return rc < 0 ? rc : 0;
    if (s->flags & SCHEME_FREE_GROUP) {
        if (group <= 1 << 20) out->w.group = (int32_t)group;
    } else if (group != out->w.group) {
        return err_set(e, ERR_UNSUPPORTED, "%s: group_size %lld; %s has groups of %d", q->where,
                       (long long)group, s->name, out->w.group);
    }
    return 0;
}

/* ---- MIXED_PRECISION ----------------------------------------------------------------------------
 */

/* A name of quantized_layers is a module, a module's parent, or a glob. */
static quant_rule_kind layer_kind(const quant_ckpt *q, const char *name)
{
    if (strpbrk(name, "*?[")) return QUANT_RULE_GLOB;
    return quant__scaled_has(q, name) ? QUANT_RULE_NAME : QUANT_RULE_COMPONENT;
}

static quant_group *group_for(quant_ckpt *q, const quant__scheme *s, const qspec *spec, int cap)
{
    for (int i = 0; i < q->n_groups; i++)
        if (!strcmp(q->groups[i].format, s->name) && qaxis_equal(&q->groups[i].spec.w, &spec->w))
            return &q->groups[i];
    if (q->n_groups == N_SCHEMES) return NULL;
    quant_group *g = &q->groups[q->n_groups++];
    *g = (quant_group){.spec = *spec};
    snprintf(g->format, sizeof g->format, "%s", s->name);
    g->targets = arena_alloc(q->mem, (size_t)cap * sizeof *g->targets);
    g->rules = arena_alloc(q->mem, (size_t)cap * sizeof *g->rules);
    return g;
}

static int mixed_layer(quant_ckpt *q, const json *v, int cap, err *e)
{
    const char *algo = NULL;
    char where[400];
    int rc = 0;
    qspec spec;
    snprintf(where, sizeof where, "%.200s: quantized_layers.%.150s", q->where, v->string);
    if (!cJSON_IsObject(v)) return err_set(e, ERR_FORMAT, "%s: must be an object", where);
    TRY(json_get_str(v, "quant_algo", &algo, where, e));
    if (!algo || !*algo) return err_set(e, ERR_MISSING, "%s: 'quant_algo' is missing", where);
    const quant__scheme *s = find_algo(algo);
    if (!s) return unknown_algo(q, algo, e);
    TRY(spec_of(q, s, v, &spec, e));
    quant_group *g = group_for(q, s, &spec, cap);
    if (!g) return err_set(e, ERR_LIMIT, "%s: more than %d different schemes", q->where, N_SCHEMES);
    TRY(quant_rule_make_as(&g->rules[g->n_targets], layer_kind(q, v->string), v->string, e));
    g->targets[g->n_targets++] = arena_strdup(q->mem, v->string);
out:
    return rc < 0 ? rc : 0;
}

static int mixed(quant_ckpt *q, const json *o, err *e)
{
    const json *layers = json_get(o, "quantized_layers");
    if (!cJSON_IsObject(layers) || !layers->child)
        return err_set(e, ERR_MISSING,
                       "%s: MIXED_PRECISION needs 'quantized_layers', which says the algo of each "
                       "module",
                       q->where);
    int rc = 0, n = cJSON_GetArraySize(layers);
    q->groups = arena_alloc(q->mem, (size_t)N_SCHEMES * sizeof *q->groups);
    for (const json *v = layers->child; v && rc >= 0; v = v->next)
        rc = mixed_layer(q, v, n, e);
    return rc;
}

/* ---- recognition --------------------------------------------------------------------------------
 */

/* Both files may be there; a stray one of another run is told, config.json counts. */
static void compare_side(quant_ckpt *q, const char *algo)
{
    char *path = q->side ? NULL : ckpt_side_file(q->c, "hf_quant_config.json");
    json *side = NULL;
    const char *other = NULL;
    err ignored = {0};
    if (path && json_parse_file(&side, path, &ignored) >= 0)
        json_get_str(json_get(side, "quantization"), "quant_algo", &other, path, &ignored);
    if (other && strcasecmp(other, algo))
        quant__warn(q, "%s says quant_algo %s, %s says %s; the latter counts", path, other,
                    q->where, algo);
    json_drop(side);
    free(path);
}

static int first_list(quant_ckpt *q, const json *o, err *e)
{
    const json *list = json_get(o, "exclude_modules");
    if (!list || cJSON_IsNull(list)) list = json_get(o, "ignore");
    if (!list || cJSON_IsNull(list)) list = json_get(q->config, "ignore");
    char where[300];
    snprintf(where, sizeof where, "%.200s: excluded modules", q->where);
    return quant__excludes(q, list, where, QUANT_RULE_NAME, e);
}

static int detect(quant_ckpt *q, err *e)
{
    int rc = 0;
    qspec spec;
    const char *algo = NULL;
    const json *o = json_get(q->config, "quantization"), *kv;
    if (!cJSON_IsObject(o)) o = q->config;
    quant__scaled_init(q, schemes, N_SCHEMES);
    TRY(json_get_str(o, "quant_algo", &algo, q->where, e));
    kv = json_get(o, "kv_cache_quant_algo");
    TRY(quant__kv_word(q, kv ? kv : json_get(o, "kv_cache_scheme"), e));
    if (!algo && qaxis_quantized(&q->kv)) return 1; /* only the cache is quantized */
    if (!algo || !*algo)
        return err_set(e, ERR_MISSING,
                       "%s: 'quant_algo' is missing or null; ModelOpt names the "
                       "scheme there (FP8, NVFP4, …)",
                       q->where);
    if (!strcasecmp(algo, "MIXED_PRECISION")) {
        TRY(mixed(q, o, e));
    } else {
        const quant__scheme *s = find_algo(algo);
        if (!s) return unknown_algo(q, algo, e);
        TRY(spec_of(q, s, o, &spec, e));
        TRY(quant__scaled_group(q, s, &spec, e));
    }
    TRY(first_list(q, o, e));
    compare_side(q, algo);
    rc = quant__scaled_finish(q, e);
out:
    return rc;
}

const quant_dialect quant__modelopt = {
    .name = "modelopt",
    .methods = "modelopt modelopt_fp8 modelopt_fp4 modelopt_mxfp8 modelopt_mixed",
    .detect = detect,
    SCALED_DIALECT};
