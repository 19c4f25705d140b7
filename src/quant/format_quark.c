/* Quark: each spec of the config says element type, what a scale covers, and whether it is computed
 * at run time.
 *
 *   global_quant_config   weight and input_tensors of every linear that nothing else names
 *   layer_quant_config    pattern -> the same; a glob where it has *, else part of the name
 *   exclude               names, or "re:" + expression
 *   export.kv_cache_group and the output_tensors of layer_quant_config tell of KV scales, which are
 *   read by name
 *
 *   weight F8_E4M3 or I8 [N,K]; weight_scale one value, [N], or weight_scale_inv by block;
 *   weight_zero_point I8 where symmetric is false; OCP MX: U8 [N,K/2] or F8 [N,K] with weight_scale
 *   U8 [N,K/32]; nvfp4: a list of two specs, weight_scale F8 [N,K/16], weight_scale_2 and
 *   input_scale_2, which multiply.
 *
 * Refused: other types (int4 in its own packing, fp6), static activations other than per tensor. */
#include <stdio.h>
#include <string.h>
#include "quant/scaled.h"

static const quant__scheme schemes[] = {
    {"plain-scale", "w:fp8_e4m3,tensor", "weight_scale", NULL, "input_scale", 0},
    {"block", "w:fp8_e4m3,block128x128", "weight_scale_inv", NULL, "input_scale", 0},
    {"mx", "w:mxfp4,g32", "weight_scale", NULL, "input_scale", 0},
    {"nvfp4", "w:nvfp4,g16", "weight_scale", "weight_scale_2", "input_scale_2", 0},
};
enum { N_SCHEMES = sizeof schemes / sizeof *schemes };

typedef struct tensor_spec {
    const char *dtype, *qscheme, *scale_format;
    int64_t group;
    bool dynamic, symmetric;
    bool fp8_scales; /* the scales are fp8 themselves, with one factor for all */
} tensor_spec;

/* The second stage of a list: how the scales of the first are quantized. */
static int scale_stage(const json *o, bool *fp8, const char *where, err *e)
{
    const char *dtype = "", *scheme = "";
    bool scales = false;
    int rc = 0;
    TRY(json_get_str(o, "dtype", &dtype, where, e));
    TRY(json_get_str(o, "qscheme", &scheme, where, e));
    TRY(json_get_bool(o, "is_scale_quant", &scales, where, e));
    *fp8 = scales && !strcmp(dtype, "fp8_e4m3") && !strcmp(scheme, "per_tensor");
    if (!*fp8)
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: a second stage of %s %s; scales in fp8_e4m3 per tensor are read", where,
                       dtype, scheme);
out:
    return rc < 0 ? rc : 0;
}

static int read_spec(const json *o, tensor_spec *t, const char *where, err *e)
{
    int rc = 0;
    *t = (tensor_spec){.symmetric = true, .dtype = "", .qscheme = "per_tensor", .scale_format = ""};
    const json *first = cJSON_IsArray(o) ? o->child : o,
               *second = first != o && first ? first->next : NULL;
    if (!cJSON_IsObject(first) || (second && second->next))
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: must be an object, or one and the spec of its scales", where);
    if (second) TRY(scale_stage(second, &t->fp8_scales, where, e));
    o = first;
    TRY(json_get_str(o, "dtype", &t->dtype, where, e));
    TRY(json_get_str(o, "qscheme", &t->qscheme, where, e));
    TRY(json_get_str(o, "scale_format", &t->scale_format, where, e));
    TRY(json_get_i64(o, "group_size", &t->group, where, e));
    TRY(json_get_bool(o, "is_dynamic", &t->dynamic, where, e));
    TRY(json_get_bool(o, "symmetric", &t->symmetric, where, e));
out:
    return rc < 0 ? rc : 0;
}

static int unsupported(const tensor_spec *t, const char *where, err *e)
{
    return err_set(e, ERR_UNSUPPORTED,
                   "%s: %s %s%s is not read; expected fp8_e4m3 or int8 per tensor, channel (token) "
                   "or block, fp4 and fp8 in groups of 32 with e8m0 scales, or fp4 in groups of 16 "
                   "with fp8 scales",
                   where, t->dtype, t->qscheme, t->symmetric ? "" : " (asymmetric)");
}

static bool is_mx(const tensor_spec *t)
{
    return !strcmp(t->qscheme, "per_group") && t->group == 32 && !strcmp(t->scale_format, "e8m0");
}

static int element(const tensor_spec *t, qaxis *x, const char *where, err *e)
{
    bool fp8 = !strcmp(t->dtype, "fp8_e4m3");
    *x = (qaxis){.type = fp8                         ? NUM_F8_E4M3
                         : !strcmp(t->dtype, "int8") ? NUM_I8
                         : !strcmp(t->dtype, "fp4")  ? NUM_F4_E2M1
                                                     : NUM_NONE};
    if (is_mx(t) && x->type != NUM_I8) {
        x->scale = QS_MX;
        x->gran = Q_GROUP;
        x->group = 32;
    }
    if (t->fp8_scales && x->type == NUM_F4_E2M1 && !strcmp(t->qscheme, "per_group") &&
        t->group == 16) {
        x->scale = QS_NVFP4;
        x->gran = Q_GROUP;
        x->group = 16;
    }
    x->asym = !t->symmetric && x->type == NUM_I8;
    if (x->type == NUM_NONE || t->fp8_scales != (x->scale == QS_NVFP4) ||
        (x->type == NUM_F4_E2M1 && x->scale == QS_FLOAT))
        return unsupported(t, where, e);
    return 0;
}

static int weight_axis(const json *o, qaxis *x, const char *where, err *e)
{
    tensor_spec t;
    int rc = read_spec(o, &t, where, e);
    if (rc >= 0) rc = element(&t, x, where, e);
    if (rc < 0 || x->scale != QS_FLOAT) return rc;
    const json *block = json_get(o, "block_size");
    if (!strcmp(t.qscheme, "per_tensor")) {
        x->gran = Q_TENSOR;
    } else if (!strcmp(t.qscheme, "per_channel")) {
        x->gran = Q_CHANNEL;
    } else if (!strcmp(t.qscheme, "per_block") && cJSON_IsArray(block) &&
               cJSON_GetArraySize(block) == 2) {
        double n = cJSON_GetNumberValue(block->child), k = cJSON_GetNumberValue(block->child->next);
        if (!(n >= 1 && n <= 1 << 20 && k >= 1 && k <= 1 << 20))
            return err_set(e, ERR_VALUE, "%s: block_size must hold two positive numbers", where);
        x->gran = Q_BLOCK;
        x->block_n = (int32_t)n;
        x->block_k = (int32_t)k;
    } else {
        return unsupported(&t, where, e);
    }
    return 0;
}

static int act_axis(const json *o, qaxis *x, const char *where, err *e)
{
    tensor_spec t;
    *x = (qaxis){.type = NUM_BF16};
    if (!o || cJSON_IsNull(o)) return 0;
    int rc = read_spec(o, &t, where, e);
    if (rc >= 0) rc = element(&t, x, where, e);
    if (rc < 0) return rc;
    x->dynamic = t.dynamic;
    if (x->scale != QS_FLOAT) {
        x->dynamic = true;
        return 0;
    }
    if (!strcmp(t.qscheme, "per_tensor")) {
        x->gran = Q_TENSOR;
    } else if (t.dynamic &&
               (!strcmp(t.qscheme, "per_channel") || !strcmp(t.qscheme, "per_token"))) {
        x->gran = Q_TOKEN;
    } else if (t.dynamic && !strcmp(t.qscheme, "per_group") && t.group > 0 && t.group <= 1 << 20) {
        x->gran = Q_GROUP;
        x->group = (int32_t)t.group;
    } else {
        return unsupported(&t, where, e);
    }
    return 0;
}

/* One config object; no weight means that its modules stay plain. */
static int read_config(quant_ckpt *q, const json *o, quant_rule_kind kind, const char *target,
                       const char *where, err *e)
{
    qspec s = {{.type = NUM_BF16}, {.type = NUM_BF16}, q->kv};
    char place[400];
    int rc = 0;
    const json *w = json_get(o, "weight");
    const char *name = "dense";
    if (w && !cJSON_IsNull(w)) {
        snprintf(place, sizeof place, "%.350s.weight", where);
        TRY(weight_axis(w, &s.w, place, e));
        snprintf(place, sizeof place, "%.350s.input_tensors", where);
        TRY(act_axis(json_get(o, "input_tensors"), &s.a, place, e));
        name = s.w.scale == QS_MX      ? "mx"
               : s.w.scale == QS_NVFP4 ? "nvfp4"
               : s.w.gran == Q_BLOCK   ? "block"
                                       : "plain-scale";
    }
    if (!quant__group(q, &s, name, kind, target, e)) rc = -ERR_FORMAT;
out:
    return rc < 0 ? rc : 0;
}

static int detect(quant_ckpt *q, err *e)
{
    int rc = 0;
    char where[320];
    const json *global = json_get(q->config, "global_quant_config"),
               *layers = json_get(q->config, "layer_quant_config");
    quant__scaled_init(q, schemes, N_SCHEMES);
    if (!cJSON_IsObject(global))
        return err_set(e, ERR_MISSING, "%s: 'global_quant_config' is missing or no object",
                       q->where);
    for (const json *v = cJSON_IsObject(layers) ? layers->child : NULL; v; v = v->next) {
        TRY(quant__kv_word(q, json_get(json_get(v, "output_tensors"), "dtype"), e));
        snprintf(where, sizeof where, "%.150s: layer_quant_config.%.100s", q->where, v->string);
        TRY(read_config(q, v, strpbrk(v->string, "*?[") ? QUANT_RULE_GLOB : QUANT_RULE_SUBSTRING,
                        v->string, where, e));
    }
    snprintf(where, sizeof where, "%.150s: global_quant_config", q->where);
    TRY(read_config(q, global, QUANT_RULE_CLASS, "Linear", where, e));
    snprintf(where, sizeof where, "%.150s: exclude", q->where);
    TRY(quant__excludes(q, json_get(q->config, "exclude"), where, QUANT_RULE_NAME, e));
    rc = quant__scaled_finish(q, e);
out:
    return rc;
}

const quant_dialect quant__quark = {
    .name = "quark", .methods = "quark", .detect = detect, SCALED_DIALECT};
