/* The registry of checkpoint dialects, and what is common to them: recognition, module lookup.
 *
 * The dialect follows from the quantization object of the config alone, never from stray recipe
 * files. Refused here: a method that no row reads (with the list of those that are read), and a
 * quantized tensor in a checkpoint whose config says nothing about it. */
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "quant/packed.h"
#include "quant/scaled.h"

static const quant_dialect dialect_ct = {
    .name = "compressed-tensors",
    .methods = "compressed-tensors compressed_tensors",
    .detect = quant__ct_detect,
    .has = quant__ct_has,
    .load = quant__ct_load,
    .parts = quant__ct_parts,
    .store = quant__ct_store,
    .emit_config = quant__ct_emit_config,
    .arith = quant__ct_arith,
    .emit_modules = quant__ct_emit_modules,
};
static const quant_dialect dialect_bnb = {
    .name = "bitsandbytes",
    .methods = "bitsandbytes",
    .detect = quant__bnb_detect,
    .has = quant__bnb_has,
    .load = quant__bnb_load,
    .parts = quant__bnb_parts,
    .describe = quant__bnb_describe,
    .store = quant__bnb_store,
    .emit_config = quant__bnb_emit_config,
    .arith = quant__bnb_arith,
};
static const quant_dialect dialect_mxfp4 = {
    .name = "mxfp4",
    .methods = "mxfp4",
    .detect = quant__mxfp4_detect,
    .has = quant__mxfp4_has,
    .load = quant__mxfp4_load,
    .parts = quant__mxfp4_parts,
    .describe = quant__mxfp4_describe,
    .store = quant__mxfp4_store,
    .emit_config = quant__mxfp4_emit_config,
    .plain_transposed = true,
};
static const quant_dialect dialect_gptq = {
    .name = "gptq",
    .methods = "gptq gptq_marlin auto_gptq",
    .detect = quant__gptq_detect,
    .has = quant__packed_has,
    .load = quant__gptq_load,
    .parts = quant__packed_parts,
    .describe = quant__gptq_describe_as,
    .arith = quant__gptq_arith,
    .store = quant__gptq_store,
    .emit_config = quant__gptq_emit_config,
    .emit_modules = quant__gptq_emit_modules,
    .side_config = "quantize_config.json",
    .f16_scales = true,
};
static const quant_dialect dialect_awq = {
    .name = "awq",
    .methods = "awq awq_marlin auto_awq",
    .detect = quant__awq_detect,
    .has = quant__packed_has,
    .load = quant__awq_load,
    .parts = quant__packed_parts,
    .describe = quant__awq_describe,
    .arith = quant__f16_arith,
    .store = quant__awq_store,
    .emit_config = quant__awq_emit_config,
    .f16_scales = true,
};
static const quant_dialect dialect_autoround = {
    .name = "auto-round",
    .methods = "auto-round auto_round intel/auto-round inc",
    .detect = quant__autoround_detect,
    .has = quant__autoround_has,
    .load = quant__autoround_load,
    .parts = quant__autoround_parts,
    .describe = quant__autoround_describe,
    .arith = quant__autoround_arith,
};
static const quant_dialect dialect_plain = {
    .name = "plain",
    .methods = "",
    .detect = quant__plain_detect,
    .load = quant__plain_load,
};
const quant_dialect *const quant_dialects[] = {
    &dialect_ct,      &dialect_gptq, &dialect_awq,       &dialect_autoround,     &dialect_bnb,
    &dialect_mxfp4,   &quant__fp8,   &quant__fbgemm_fp8, &quant__w8a8_fp8,       &quant__mxfp8,
    &quant__modelopt, &quant__quark, &quant__w8a8_int8,  &quant__blockwise_int8, &dialect_plain};
const int quant_n_dialects = sizeof quant_dialects / sizeof *quant_dialects;

int quant__warn(quant_ckpt *q, const char *fmt, ...)
{
    char text[600];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    q->warnings = xrealloc(q->warnings, (size_t)(q->n_warnings + 1) * sizeof *q->warnings);
    q->warnings[q->n_warnings++] = arena_strdup(q->mem, text);
    return 0;
}

/* ---- recognition -------------------------------------------------------------------------------
 */

static bool word_in(const char *words, const char *w)
{
    size_t n = strlen(w);
    for (const char *p = words; n && (p = strstr(p, w)) != NULL; p += n)
        if ((p == words || p[-1] == ' ') && (p[n] == ' ' || !p[n])) return true;
    return false;
}

static bool ends(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && !strcmp(s + n - m, tail);
}

static bool holds_qweight(const quant_ckpt *q)
{
    for (size_t i = 0; i < ckpt_n_tensors(q->c); i++)
        if (ends(ckpt_tensor_at(q->c, i)->name, ".qweight")) return true;
    return false;
}

/* Where writers before quantization_config left it. The files of GPTQ and AWQ tools count only
 * where the tensors are such: a stray one beside plain weights says nothing. */
static int side_config(quant_ckpt *q, err *e)
{
    static const char *const files[] = {"hf_quant_config.json", "quantize_config.json",
                                        "quant_config.json"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        if (i == 1 && !holds_qweight(q)) break;
        char *path = ckpt_side_file(q->c, files[i]);
        if (!path) continue;
        q->where = arena_strdup(q->mem, path);
        int rc = json_parse_file(&q->side, path, e);
        free(path);
        if (rc < 0) return rc;
        if (!cJSON_IsObject(q->side))
            return err_set(e, ERR_FORMAT, "%s: must be a JSON object", q->where);
        q->config = q->side;
        return 0;
    }
    return 0;
}

/* The method by its own key, or by the keys that only one family writes. */
static int method_of(const quant_ckpt *q, char out[64], err *e)
{
    const json *o = q->config;
    const char *m = NULL;
    out[0] = 0;
    if (!o) return 0;
    int rc = json_get_str(o, "quant_method", &m, q->where, e);
    if (rc < 0) return rc;
    /* ModelOpt writes config_groups as well; compressed-tensors never writes quant_algo. */
    if (!m && (json_get(o, "quant_algo") || json_get(o, "quantization"))) m = "modelopt";
    if (!m && json_get(o, "config_groups")) m = "compressed-tensors";
    /* The files of their own that GPTQ and AWQ tools write name no method. */
    if (!m && q->side && (json_get(o, "zero_point") || json_get(o, "w_bit"))) m = "awq";
    if (!m && q->side && json_get(o, "bits")) m = "gptq";
    if (!m && json_get(o, "bits") && json_get(o, "group_size"))
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: 'bits' and 'group_size' without quant_method, as MLX writes them; "
                       "its packing is not read: start from the unquantized model instead",
                       q->where);
    if (!m)
        return err_set(e, ERR_FORMAT,
                       "%s: no quant_method, and neither config_groups nor quant_algo from which "
                       "it could be told",
                       q->where);
    snprintf(out, 64, "%s", m);
    for (char *p = out; *p; p++)
        *p = (char)tolower((unsigned char)*p);
    return 0;
}

static int unknown_method(const quant_ckpt *q, const char *method, err *e)
{
    buf names = {0};
    for (int i = 0; i < quant_n_dialects; i++)
        if (*quant_dialects[i]->methods)
            buf_printf(&names, "%s%s", names.len ? ", " : "", quant_dialects[i]->name);
    int rc = err_set(e, ERR_UNSUPPORTED,
                     "%s: quant_method '%s' is not read by this version (it reads: %s, gguf and "
                     "unquantized checkpoints); start from the unquantized model instead",
                     q->where, method, names.data);
    buf_free(&names);
    return rc;
}

static int detect(quant_ckpt *q, err *e)
{
    char method[64];
    q->config = ckpt_cfg(q->c)->quant;
    q->where = ckpt_cfg(q->c)->quant_where;
    int rc = q->config ? 0 : side_config(q, e);
    if (rc >= 0) rc = method_of(q, method, e);
    if (rc < 0) return rc;
    for (int i = 0; i < quant_n_dialects; i++) {
        const quant_dialect *d = quant_dialects[i];
        if (*method ? !word_in(d->methods, method) : *d->methods != 0) continue;
        q->dialect = d;
        return d->detect(q, e);
    }
    return unknown_method(q, method, e);
}

int quant_open_as(quant_ckpt **out, ckpt *c, const quant_opts *o, err *e)
{
    quant_ckpt *q = xcalloc(1, sizeof *q);
    q->c = c;
    if (o) q->opts = *o;
    q->mem = arena_make();
    q->kv = (qaxis){.type = NUM_BF16};
    int rc = detect(q, e);
    if (rc >= 0) rc = quant__strays(q, e);
    if (rc >= 0 && q->opts.kv_scales) rc = quant__kv_file(q, q->opts.kv_scales, e);
    if (rc < 0) {
        quant_close(q);
        return rc;
    }
    *out = q;
    return 0;
}

int quant_open(quant_ckpt **out, ckpt *c, err *e)
{
    return quant_open_as(out, c, NULL, e);
}

void quant_close(quant_ckpt *q)
{
    if (!q) return;
    for (int i = 0; i < q->n_groups; i++)
        for (int j = 0; j < q->groups[i].n_targets && q->groups[i].rules; j++)
            quant_rule_drop(q->groups[i].rules[j]);
    for (int i = 0; i < q->n_ignore && q->ignore_rules; i++)
        quant_rule_drop(q->ignore_rules[i]);
    free(q->warnings);
    json_drop(q->side);
    arena_drop(q->mem);
    free(q);
}

/* ---- modules -----------------------------------------------------------------------------------
 */

const quant_group *quant_group_of(const quant_ckpt *q, const char *module)
{
    for (int kind = QUANT_RULE_NAME; kind <= QUANT_RULE_CLASS; kind++)
        for (int i = 0; i < q->n_groups; i++)
            for (int j = 0; j < q->groups[i].n_targets; j++)
                if ((int)quant_rule_kind_of(q->groups[i].rules[j]) == kind &&
                    quant_rule_match(q->groups[i].rules[j], module))
                    return &q->groups[i];
    return NULL;
}

bool quant_ignored(const quant_ckpt *q, const char *module)
{
    for (int i = 0; i < q->n_ignore; i++)
        if (quant_rule_kind_of(q->ignore_rules[i]) != QUANT_RULE_CLASS &&
            quant_rule_match(q->ignore_rules[i], module))
            return true;
    return false;
}

bool quant_has(const quant_ckpt *q, const char *module)
{
    return q->dialect->has && q->dialect->has(q, module);
}

int quant_load(const quant_ckpt *q, const char *module, qtensor *out, err *e)
{
    *out = (qtensor){.scale_type = NUM_NONE, .zero_type = NUM_NONE};
    int rc = quant_has(q, module) ? q->dialect->load(q, module, out, e)
                                  : quant__plain_load(q, module, out, e);
    if (rc >= 0) rc = qtensor_check(out, module, e);
    if (rc >= 0 && q->opts.dequantize && qaxis_quantized(&out->spec.w))
        rc = quant__expand(q, out, e);
    if (rc < 0) qtensor_free(out);
    return rc < 0 ? rc : 0;
}
