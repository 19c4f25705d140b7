/* compressed-tensors, part 1: what the config says, held against the tensors that are there.
 *
 * config_groups maps targets to a spec; a module falls to the group of its exact name, else of a
 * regex, else of a class. The tensors decide whether a module is quantized; where the lists say the
 * opposite in a way that would give wrong weights it is an error: packed tensors under an ignored
 * module, packed tensors that no group describes, plain and packed weights side by side, a group
 * that nothing falls to. Refused by name: sparsity, rotations, static token scales, activations
 * other than int8, fp8, nvfp4 and mx. */
#include <stdio.h>
#include <string.h>
#include "quant/quant_int.h"

/* Group keys that are preset names; the value is then the list of targets. */
static const struct {
    const char *name, *spec;
} presets[] = {
    {"W8A16", "w:int8,g128"},
    {"W4A16", "w:int4,g128"},
    {"W2A16", "w:int2,g128"},
    {"W3A16", "w:int3,g128"},
    {"W5A16", "w:int5,g128"},
    {"W6A16", "w:int6,g128"},
    {"W7A16", "w:int7,g128"},
    {"W4A16_ASYM", "w:int4,g128,asym"},
    {"W8A8", "w:int8,channel a:int8,token"},
    {"INT8", "w:int8,channel a:int8,token"},
    {"W4A8", "w:int4,g128 a:int8,token"},
    {"W4AFP8", "w:int4,g128 a:fp8_e4m3,token"},
    {"FP8", "w:fp8_e4m3,tensor a:fp8_e4m3,tensor,static"},
    {"FP8_DYNAMIC", "w:fp8_e4m3,channel a:fp8_e4m3,token"},
    {"FP8_BLOCK", "w:fp8_e4m3,block128x128 a:fp8_e4m3,group128"},
    {"NVFP4A16", "w:nvfp4,g16"},
    {"NVFP4", "w:nvfp4,g16 a:nvfp4,g16"},
    {"MXFP4A16", "w:mxfp4,g32"},
    {"MXFP4", "w:mxfp4,g32 a:mxfp4,group32"},
    {"MXFP8A16", "w:mxfp8,g32"},
    {"MXFP8", "w:mxfp8,g32 a:mxfp8,group32"},
};
static const char *const formats[] = {
    "dense",          "int-quantized",        "float-quantized",      "naive-quantized",
    "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
    "mixed-precision"};

const char *quant__ct_format(const qspec *s)
{
    bool act = s->a.gran != Q_NONE;
    if (s->w.scale == QS_NVFP4) return "nvfp4-pack-quantized";
    if (s->w.type == NUM_F4_E2M1) return "mxfp4-pack-quantized";
    if (s->w.scale == QS_MX) return "mxfp8-quantized";
    if (s->w.type == NUM_F8_E4M3) return "float-quantized";
    if (num_infos[s->w.type].kind != 'I') return "dense";
    return act || s->w.gran == Q_TENSOR || s->w.gran == Q_BLOCK ? "int-quantized"
                                                                : "pack-quantized";
}

/* ---- one QuantizationArgs object ----------------------------------------------------------------
 */

typedef struct args {
    int64_t bits, group;
    bool is_float, symmetric, has_group, dynamic, local, mx;
    const char *strategy, *actorder;
    int64_t block[2];
} args;

static int parse_block(const json *v, args *a, const char *where, err *e)
{
    if (cJSON_IsArray(v) && cJSON_GetArraySize(v) == 2 && cJSON_IsNumber(v->child) &&
        cJSON_IsNumber(v->child->next)) {
        a->block[0] = (int64_t)v->child->valuedouble;
        a->block[1] = (int64_t)v->child->next->valuedouble;
    } else if (cJSON_IsString(v)) {
        long long n = 0, k = 0;
        if (sscanf(v->valuestring, "%7lldx%7lld", &n, &k) == 2) a->block[0] = n, a->block[1] = k;
    }
    for (int i = 0; i < 2; i++)
        if (a->block[i] < 1 || a->block[i] > 1 << 20)
            return err_set(e, ERR_FORMAT,
                           "%s: 'block_structure' must be [rows, columns], both positive", where);
    return 0;
}

/* Keys whose value may be of two types. */
static int parse_loose(const json *o, args *a, const char *where, err *e)
{
    const json *d = json_get(o, "dynamic"), *b = json_get(o, "block_structure"),
               *act = json_get(o, "actorder");
    a->dynamic = cJSON_IsTrue(d) || cJSON_IsString(d);
    a->local = cJSON_IsString(d) && !strcmp(d->valuestring, "local");
    if (cJSON_IsString(act)) a->actorder = act->valuestring;
    if (cJSON_IsTrue(act)) a->actorder = "group";
    return b && !cJSON_IsNull(b) ? parse_block(b, a, where, e) : 0;
}

static int parse_args(const json *o, args *a, const char *where, err *e)
{
    int rc = 0;
    const char *type = "int", *scale = NULL;
    *a = (args){.bits = 8, .symmetric = true};
    if (!cJSON_IsObject(o)) return err_set(e, ERR_FORMAT, "%s: must be an object", where);
    TRY(json_get_i64(o, "num_bits", &a->bits, where, e));
    TRY(json_get_str(o, "type", &type, where, e));
    TRY(json_get_bool(o, "symmetric", &a->symmetric, where, e));
    TRY(json_get_i64(o, "group_size", &a->group, where, e));
    a->has_group = rc == 1;
    TRY(json_get_str(o, "strategy", &a->strategy, where, e));
    TRY(json_get_str(o, "scale_dtype", &scale, where, e));
    TRY(parse_loose(o, a, where, e));
    a->is_float = !strcmp(type, "float");
    a->mx = scale && strstr(scale, "uint8");
    if (!a->is_float && strcmp(type, "int")) {
        rc = err_set(e, ERR_UNSUPPORTED, "%s: type '%s'; expected int or float", where, type);
        goto out;
    }
    if (a->has_group && (a->group < -1 || a->group == 0 || a->group > 1 << 20)) {
        rc = err_set(e, ERR_VALUE, "%s: group_size is %lld; expected -1 or a positive number",
                     where, (long long)a->group);
        goto out;
    }
    if (!a->strategy)
        a->strategy = a->block[0]                                     ? "block"
                      : !a->has_group                                 ? "tensor"
                      : a->group == -1                                ? "channel"
                      : a->is_float && a->bits == 4 && a->group == 16 ? "tensor_group"
                                                                      : "group";
    if (!strcmp(a->strategy, "group") && a->group == -1) a->strategy = "channel";
    if ((!strcmp(a->strategy, "group") || !strcmp(a->strategy, "tensor_group")) && a->group < 1)
        rc = err_set(e, ERR_FORMAT, "%s: strategy '%s' needs a positive group_size", where,
                     a->strategy);
    else if (!strcmp(a->strategy, "block") && !a->block[0])
        rc = err_set(e, ERR_FORMAT, "%s: strategy 'block' needs block_structure", where);
out:
    return rc < 0 ? rc : 0;
}

/* Element type and, for the paired formats, the kind of scale. */
static int element(const args *a, qaxis *x, const char *where, err *e)
{
    bool group = !strcmp(a->strategy, "group");
    if (!a->is_float && a->bits >= 2 && a->bits <= 8) {
        x->type = (num_dtype)(NUM_I2 + (int)a->bits - 2);
        return 0;
    }
    if (a->is_float && a->bits == 8) {
        x->type = NUM_F8_E4M3;
        if (group && a->group == 32 && a->mx) x->scale = QS_MX;
        return 0;
    }
    if (a->is_float && a->bits == 4) {
        x->type = NUM_F4_E2M1;
        if (!strcmp(a->strategy, "tensor_group") && a->group == 16) {
            x->scale = QS_NVFP4;
            return 0;
        }
        if (group && a->group == 32) {
            x->scale = QS_MX;
            return 0;
        }
        return err_set(
            e, ERR_UNSUPPORTED,
            "%s: 4-bit floats come in tensor_group of 16 (nvfp4) or group of 32 (mxfp4), "
            "found %s of %lld",
            where, a->strategy, (long long)a->group);
    }
    return err_set(e, ERR_UNSUPPORTED,
                   "%s: %lld-bit %s; this version reads int 2 to 8 and float 4 and 8", where,
                   (long long)a->bits, a->is_float ? "float" : "int");
}

static int weight_axis(const json *o, qaxis *x, const char *where, err *e)
{
    args a;
    int rc = 0;
    TRY(parse_args(o, &a, where, e));
    *x = (qaxis){.type = NUM_BF16};
    TRY(element(&a, x, where, e));
    const char *s = a.strategy;
    if (!strcmp(s, "tensor")) {
        x->gran = Q_TENSOR;
    } else if (!strcmp(s, "channel")) {
        x->gran = Q_CHANNEL;
    } else if (!strcmp(s, "group") || !strcmp(s, "tensor_group")) {
        x->gran = Q_GROUP;
        x->group = (int32_t)a.group;
    } else if (!strcmp(s, "block")) {
        x->gran = Q_BLOCK;
        x->block_n = (int32_t)a.block[0];
        x->block_k = (int32_t)a.block[1];
    } else {
        rc = err_set(
            e, ERR_UNSUPPORTED,
            "%s: strategy '%s' for weights; expected tensor, channel, group, tensor_group or "
            "block",
            where, s);
        goto out;
    }
    x->asym = !a.symmetric;
    x->actorder = a.actorder && (!strcmp(a.actorder, "group") || !strcmp(a.actorder, "dynamic"));
    if (x->asym && num_infos[x->type].kind != 'I')
        rc = err_set(e, ERR_UNSUPPORTED, "%s: asymmetric float weights", where);
out:
    return rc < 0 ? rc : 0;
}

static int act_axis(const json *o, qaxis *x, const char *where, err *e)
{
    args a;
    int rc = 0;
    TRY(parse_args(o, &a, where, e));
    *x = (qaxis){.type = NUM_BF16};
    TRY(element(&a, x, where, e));
    x->asym = !a.symmetric;
    x->dynamic = a.dynamic;
    const char *s = a.strategy;
    if (!strcmp(s, "tensor")) {
        x->gran = Q_TENSOR;
    } else if (!strcmp(s, "token") && a.dynamic) {
        x->gran = Q_TOKEN;
    } else if ((!strcmp(s, "group") && a.dynamic) || !strcmp(s, "tensor_group")) {
        x->gran = Q_GROUP;
        x->group = (int32_t)a.group;
    } else {
        rc = err_set(e, ERR_UNSUPPORTED, "%s: %s activations of strategy '%s'", where,
                     a.dynamic ? "dynamic" : "static", s);
        goto out;
    }
    if (num_infos[x->type].kind == 'I' && x->type != NUM_I8)
        rc = err_set(e, ERR_UNSUPPORTED, "%s: %lld-bit integer activations; expected 8", where,
                     (long long)a.bits);
out:
    return rc < 0 ? rc : 0;
}

static int kv_axis(const json *o, qaxis *x, const char *where, err *e)
{
    args a;
    int rc = parse_args(o, &a, where, e);
    if (rc < 0) return rc;
    if (!a.is_float || a.bits != 8)
        return err_set(
            e, ERR_UNSUPPORTED,
            "%s: a KV cache of %lld-bit %s; compressed-tensors has num_bits 8, type float", where,
            (long long)a.bits, a.is_float ? "float" : "int");
    if (!a.symmetric)
        return err_set(e, ERR_UNSUPPORTED, "%s: an asymmetric KV cache; expected symmetric true",
                       where);
    bool head = !strcmp(a.strategy, "attn_head");
    if (!head && strcmp(a.strategy, "tensor"))
        return err_set(e, ERR_UNSUPPORTED, "%s: KV strategy '%s'; expected tensor or attn_head",
                       where, a.strategy);
    *x = (qaxis){.type = NUM_F8_E4M3, .gran = head ? Q_HEAD : Q_TENSOR};
    return 0;
}

/* ---- groups and lists ---------------------------------------------------------------------------
 */

static int known_format(const char *f, const char *where, err *e)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (!strcmp(f, formats[i])) return 0;
    return err_set(e, ERR_UNSUPPORTED, "%s: format '%s' is not read%s", where, f,
                   strstr(f, "24") || strstr(f, "sparse")
                       ? "; sparse formats were retired, use a model without sparsity"
                       : "; expected pack-quantized, int-quantized, float-quantized, "
                         "nvfp4-pack-quantized, mxfp4-pack-quantized or mxfp8-quantized");
}

static int preset_group(const json *g, quant_group *out, const char *where, err *e)
{
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++)
        if (!strcmp(g->string, presets[i].name)) return qspec_parse(presets[i].spec, &out->spec, e);
    return err_set(e, ERR_FORMAT, "%s: must be an object, or the key a preset name", where);
}

static int parse_group(quant_ckpt *q, const json *g, const char *global, const char *where, err *e)
{
    int rc = 0;
    quant_group *out = &q->groups[q->n_groups];
    const json *targets = g, *w = json_get(g, "weights"), *a = json_get(g, "input_activations"),
               *o = json_get(g, "output_activations");
    const char *format = strcmp(global, "mixed-precision") ? global : "";
    out->spec = (qspec){{.type = NUM_BF16}, {.type = NUM_BF16}, q->kv};
    char place[400];
    if (cJSON_IsArray(g)) {
        TRY(preset_group(g, out, where, e));
    } else if (!cJSON_IsObject(g)) {
        return err_set(e, ERR_FORMAT, "%s: must be an object", where);
    } else {
        targets = json_get(g, "targets");
        TRY(json_get_str(g, "format", &format, where, e));
        if (!w || cJSON_IsNull(w)) {
            quant__warn(q, "%s has no weights (attention or activations only): not applied", where);
            return 0;
        }
        snprintf(place, sizeof place, "%s.weights", where);
        TRY(weight_axis(w, &out->spec.w, place, e));
        snprintf(place, sizeof place, "%s.input_activations", where);
        if (a && !cJSON_IsNull(a)) TRY(act_axis(a, &out->spec.a, place, e));
        if (o && !cJSON_IsNull(o)) quant__warn(q, "%s.output_activations is not applied", where);
    }
    if (!*format) format = quant__ct_format(&out->spec);
    TRY(known_format(format, where, e));
    snprintf(out->format, sizeof out->format, "%s", format);
    q->n_groups++;
    snprintf(place, sizeof place, "%s.targets", where);
    TRY(quant__strings(q, targets, place, -1, &out->targets, &out->n_targets, &out->rules, e));
    if (!out->n_targets) rc = err_set(e, ERR_FORMAT, "%s: no targets", where);
out:
    return rc < 0 ? rc : 0;
}

static bool empty(const json *v)
{
    return !v || cJSON_IsNull(v) || (cJSON_IsObject(v) && !v->child);
}

static int parse_config(quant_ckpt *q, const json *o, const char *where, err *e)
{
    int rc = 0;
    const char *format = "", *sparse = NULL;
    char place[320];
    const json *groups = json_get(o, "config_groups"), *kv = json_get(o, "kv_cache_scheme"),
               *sp = json_get(o, "sparsity_config");
    if (!empty(json_get(o, "transform_config")))
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: transform_config (rotations) is not supported; without it the weights "
                       "would be wrong",
                       where);
    if (cJSON_IsObject(sp)) TRY(json_get_str(sp, "format", &sparse, where, e));
    if (sparse && strcmp(sparse, "dense"))
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: sparsity_config '%s' is not supported; use a model without sparsity",
                       where, sparse);
    TRY(json_get_str(o, "format", &format, where, e));
    if (*format) TRY(known_format(format, where, e));
    snprintf(place, sizeof place, "%.250s: kv_cache_scheme", where);
    if (!empty(kv)) TRY(kv_axis(kv, &q->kv, place, e));
    snprintf(place, sizeof place, "%.250s: ignore", where);
    TRY(quant__ignore(q, json_get(o, "ignore"), place, -1, e));
    if (groups && !cJSON_IsNull(groups) && !cJSON_IsObject(groups))
        return err_set(e, ERR_FORMAT, "%s: 'config_groups' must be an object", where);
    size_t n = groups ? (size_t)cJSON_GetArraySize(groups) : 0;
    q->groups = arena_alloc(q->mem, (n + 1) * sizeof *q->groups);
    for (const json *g = groups ? groups->child : NULL; g; g = g->next) {
        snprintf(place, sizeof place, "%.200s: config_groups.%.80s", where, g->string);
        TRY(parse_group(q, g, format, place, e));
    }
    if (!n && empty(kv))
        quant__warn(q,
                    "%s: names compressed-tensors but has no config_groups: nothing is quantized",
                    where);
    rc = 0;
out:
    return rc < 0 ? rc : 0;
}

/* ---- config against tensors ---------------------------------------------------------------------
 */

/* "X" of "X.weight" or "X.weight_packed". */
static bool module_name(const char *tensor, char out[QUANT_NAME_MAX])
{
    size_t n = strlen(tensor);
    size_t cut = n > 14 && !strcmp(tensor + n - 14, ".weight_packed") ? 14
                 : n > 7 && !strcmp(tensor + n - 7, ".weight")        ? 7
                                                                      : 0;
    if (!cut || n - cut >= QUANT_NAME_MAX) return false;
    memcpy(out, tensor, n - cut);
    out[n - cut] = 0;
    return true;
}

static bool coded(num_dtype t)
{
    return t == NUM_I8 || t == NUM_U8 || t == NUM_F8_E4M3 || t == NUM_F8_E5M2 || t == NUM_I32;
}

const quant_part quant__ct_parts[] = {
    {".weight_packed", QUANT_CODES},       {".weight", QUANT_CODES},
    {".weight_scale", QUANT_SCALES},       {".weight_global_scale", QUANT_SCALES},
    {".weight_zero_point", QUANT_ZEROS},   {".weight_shape", QUANT_LAYOUT},
    {".weight_g_idx", QUANT_LAYOUT},       {".input_scale", QUANT_SCALES},
    {".input_global_scale", QUANT_SCALES}, {".input_zero_point", QUANT_ZEROS},
    {".output_scale", QUANT_SCALES},       {NULL, QUANT_CODES}};

bool quant__ct_has(const quant_ckpt *q, const char *module)
{
    const ckpt_tensor *t;
    if (quant__tensor(q, module, "weight_packed", false, &t, NULL) == 0 && t) return true;
    return quant__tensor(q, module, "weight", false, &t, NULL) == 0 && t && coded(t->dtype);
}

static int check_module(quant_ckpt *q, const ckpt_tensor *t, const char *module, err *e)
{
    bool packed = strcmp(t->name + strlen(module), ".weight") != 0;
    bool quantized = packed || coded(t->dtype), ignored = quant_ignored(q, module);
    const ckpt_tensor *twin = NULL;
    quant__count_ignore(q, module);
    if (packed && (quant__tensor(q, module, "weight", false, &twin, NULL) < 0 || twin))
        return err_set(
            e, ERR_FORMAT,
            "%s: module '%s' has a weight and a weight_packed; which one counts is not told",
            t->path, module);
    if (quantized && ignored)
        return err_set(
            e, ERR_FORMAT,
            "%s: '%s' is quantized, but the ignore list of quantization_config says that "
            "module '%s' is not; config and tensors are of different runs",
            t->path, t->name, module);
    if (ignored || (!quantized && t->n_dims != 2)) return 0;
    quant_group *g = (quant_group *)quant_group_of(q, module);
    if (quantized && !g)
        return err_set(e, ERR_FORMAT,
                       "%s: '%s' is quantized, but no config group targets module '%s'", t->path,
                       t->name, module);
    if (quantized) g->hits++;
    if (!quantized && g && strcmp(g->format, "dense"))
        for (int i = 0; i < g->n_targets; i++)
            if (quant_rule_kind_of(g->rules[i]) != QUANT_RULE_CLASS &&
                quant_rule_match(g->rules[i], module))
                return quant__warn(q,
                                   "module %s is a target of '%s', but its weight is stored plain",
                                   module, g->targets[i]);
    return 0;
}

int quant__ct_detect(quant_ckpt *q, err *e)
{
    char module[QUANT_NAME_MAX];
    int rc = parse_config(q, q->config, q->where, e);
    for (size_t i = 0; rc >= 0 && i < ckpt_n_tensors(q->c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(q->c, i);
        if (module_name(t->name, module)) rc = check_module(q, t, module, e);
    }
    for (int i = 0; rc >= 0 && i < q->n_groups && ckpt_has_weights(q->c); i++)
        if (!q->groups[i].hits && strcmp(q->groups[i].format, "dense"))
            rc = err_set(
                e, ERR_FORMAT,
                "%s: config group %d (target '%s'%s) matches no quantized module; the weights "
                "in %s are not the ones that this config describes",
                q->where, i, q->groups[i].targets[0], q->groups[i].n_targets > 1 ? " and more" : "",
                ckpt_path(q->c));
    return rc < 0 ? rc : 1;
}
