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

/* Whose layout is written. */
#define MODELOPT_VERSION "0.47.0"

#define AWQ (SCHEME_ROW_PAIRS | SCHEME_PRE_SCALE | SCHEME_WRITE_PRE | SCHEME_FREE_GROUP)
static const quant__scheme schemes[] = {
    {"FP8", "w:fp8_e4m3,tensor a:fp8_e4m3,tensor", "weight_scale", NULL, "input_scale",
     SCHEME_PRE_SCALE},
    {"FP8_PER_CHANNEL_PER_TOKEN", "w:fp8_e4m3,channel a:fp8_e4m3,token", "weight_scale", NULL, NULL,
     SCHEME_PRE_SCALE},
    {"FP8_PB_WO", "w:fp8_e4m3,block128x128", "weight_scale", NULL, NULL, SCHEME_PRE_SCALE},
    {"NVFP4", "w:nvfp4,g16 a:nvfp4,g16", "weight_scale", "weight_scale_2", "input_scale",
     SCHEME_PRE_SCALE},
    {"NVFP4_AWQ", "w:nvfp4,g16 a:nvfp4,g16", "weight_scale", "weight_scale_2", "input_scale",
     SCHEME_PRE_SCALE | SCHEME_READ_ONLY},
    {"W4A16_NVFP4", "w:nvfp4,g16", "weight_scale", "weight_scale_2", NULL, SCHEME_PRE_SCALE},
    {"W4A8_NVFP4_FP8", "w:nvfp4,g16 a:fp8_e4m3,tensor", "weight_scale", "weight_scale_2",
     "input_scale", SCHEME_PRE_SCALE},
    {"MXFP8", "w:mxfp8,g32 a:mxfp8,group32", "weight_scale", NULL, NULL, 0},
    {"MXFP4", "w:mxfp4,g32 a:mxfp4,group32", "weight_scale", NULL, NULL, 0},
    {"W4A8_MXFP4_FP8", "w:mxfp4,g32 a:fp8_e4m3,tensor", "weight_scale", NULL, "input_scale", 0},
    {"W4A16_AWQ", "w:int4,g128", "weight_scale", NULL, NULL, AWQ},
    {"W4A8_AWQ", "w:int4,g128 a:fp8_e4m3,tensor", "weight_scale", "weight_scale_2", "input_scale",
     AWQ | SCHEME_FP8_FRAME | SCHEME_READ_ONLY},
    {"W8A16", "w:int8,channel", "weight_scale", NULL, NULL, SCHEME_PRE_SCALE},
    {"W8A8_SQ_PER_CHANNEL", "w:int8,channel a:int8,tensor", "weight_scale", NULL, "input_scale",
     SCHEME_PRE_SCALE | SCHEME_WRITE_PRE},
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
    const char *other = NULL, *kv = NULL;
    err ignored = {0};
    if (path && json_parse_file(&side, path, &ignored) >= 0)
        json_get_str(json_get(side, "quantization"), "quant_algo", &other, path, &ignored);
    json_get_str(json_get(side, "quantization"), "kv_cache_quant_algo", &kv, path, &ignored);
    if (kv && !strcasecmp(kv, "FP8") && !qaxis_quantized(&q->kv))
        quant__warn(
            q,
            "%s says kv_cache_quant_algo %s, %s says nothing of the cache; the latter counts, "
            "--kv-cache-dtype chooses another",
            path, kv, q->where);
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

/* ---- writing ------------------------------------------------------------------------------------
 */

#define HOLDS                                                                                      \
    "fp8 per tensor (static inputs), per channel (inputs per token) or weight-only in blocks of "  \
    "128, nvfp4, mxfp8, mxfp4, int4 groups, int8 by channel"

static int store(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                 err *e)
{
    const quant__scheme *s = quant__scheme_for(schemes, N_SCHEMES, &t->spec);
    if (!s) return quant__no_scheme("modelopt", module, &t->spec, HOLDS, e);
    return quant__scaled_store(w, module, "modelopt", s, t, model_dtype, e);
}

static void emit_axis(jw *j, const char *key, const qaxis *a)
{
    jw_key(j, key);
    jw_obj(j);
    jw_kbool(j, "dynamic", false);
    jw_ki64(j, "num_bits", num_infos[a->type].bits);
    jw_kstr(j, "type", "float");
    if (a->gran == Q_GROUP) jw_ki64(j, "group_size", a->group);
    jw_end_obj(j);
}

/* Only these two have groups in the writer's own files. */
static void emit_groups(jw *j, const quant__scheme *s, const qspec *spec)
{
    if (strcmp(s->name, "FP8") && strcmp(s->name, "NVFP4")) return;
    jw_key(j, "config_groups");
    jw_obj(j);
    jw_key(j, "group_0");
    jw_obj(j);
    emit_axis(j, "input_activations", &spec->a);
    emit_axis(j, "weights", &spec->w);
    jw_key(j, "targets");
    jw_arr(j);
    jw_str(j, "Linear");
    jw_end_arr(j);
    jw_end_obj(j);
    jw_end_obj(j);
}

static void emit_list(jw *j, const char *key, char *const *list, int n)
{
    jw_key(j, key);
    jw_arr(j);
    for (int i = 0; i < n; i++)
        jw_str(j, list[i]);
    jw_end_arr(j);
}

static void emit_algo(jw *j, const quant__scheme *s, const qspec *spec)
{
    jw_kstr(j, "quant_algo", s->name);
    if (spec->w.gran == Q_GROUP) jw_ki64(j, "group_size", spec->w.group);
    if (s->flags & SCHEME_ROW_PAIRS) {
        jw_kbool(j, "has_zero_point", false);
        jw_kbool(j, "pre_quant_scale", true);
    }
}

/* The schemes of all modules, one or several. */
static int emit_layers(jw *j, const quant_written *m, int n, err *e)
{
    jw_kstr(j, "quant_algo", "MIXED_PRECISION");
    jw_key(j, "quantized_layers");
    jw_obj(j);
    for (int i = 0; i < n; i++) {
        const quant__scheme *s = quant__scheme_for(schemes, N_SCHEMES, &m[i].spec);
        if (!s) return quant__no_scheme("modelopt", m[i].module, &m[i].spec, HOLDS, e);
        jw_key(j, m[i].module);
        jw_obj(j);
        emit_algo(j, s, &m[i].spec);
        jw_end_obj(j);
    }
    jw_end_obj(j);
    return 0;
}

/* One object for both files: flat as config.json has it, and "quantization" as
 * hf_quant_config.json has it. */
static int emit(jw *j, const quant_written *m, int n, const qspec *one, const qaxis *kv,
                char *const *ignore, int n_ignore, err *e)
{
    int rc = 0;
    bool fp8_kv = kv->type == NUM_F8_E4M3 && kv->gran == Q_TENSOR;
    const quant__scheme *s = one ? quant__scheme_for(schemes, N_SCHEMES, one) : NULL;
    if (one && !s) return quant__no_scheme("modelopt", NULL, one, HOLDS, e);
    if (qaxis_quantized(kv) && !fp8_kv)
        return err_set(e, ERR_UNSUPPORTED,
                       "modelopt holds a KV cache in fp8_e4m3 with one scale a tensor only");
    jw_obj(j);
    if (one) emit_groups(j, s, one);
    emit_list(j, "ignore", ignore, n_ignore);
    if (one)
        jw_kstr(j, "quant_algo", s->name);
    else
        TRY(emit_layers(j, m, n, e));
    if (fp8_kv) emit_axis(j, "kv_cache_scheme", kv);
    jw_key(j, "producer");
    jw_obj(j);
    jw_kstr(j, "name", "modelopt");
    jw_kstr(j, "version", MODELOPT_VERSION);
    jw_end_obj(j);
    jw_kstr(j, "quant_method", "modelopt");
    jw_key(j, "quantization");
    jw_obj(j);
    if (one)
        emit_algo(j, s, one);
    else
        TRY(emit_layers(j, m, n, e));
    jw_kstr(j, "kv_cache_quant_algo", fp8_kv ? "FP8" : NULL);
    emit_list(j, "exclude_modules", ignore, n_ignore);
    jw_end_obj(j);
    jw_end_obj(j);
    rc = 0;
out:
    return rc;
}

static int emit_config(jw *j, const qspec *s, char *const *ignore, int n_ignore, err *e)
{
    return emit(j, NULL, 0, s, &s->kv, ignore, n_ignore, e);
}

static int emit_modules(jw *j, const quant_written *m, int n, const qaxis *kv, char *const *ignore,
                        int n_ignore, err *e)
{
    return emit(j, m, n, NULL, kv, ignore, n_ignore, e);
}

const quant_dialect quant__modelopt = {
    .name = "modelopt",
    .methods = "modelopt modelopt_fp8 modelopt_fp4 modelopt_mxfp8 modelopt_mixed",
    .detect = detect,
    .store = store,
    .emit_config = emit_config,
    .emit_modules = emit_modules,
    .side_config = "hf_quant_config.json",
    SCALED_DIALECT};
