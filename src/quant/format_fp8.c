/* quant_method fp8 and its kin.
 *
 *   fp8          per tensor: weight F8_E4M3 [N,K], weight_scale; activation_scheme static (one
 *                input_scale) or dynamic (per token). weight_block_size [bn, bk]: weight_scale_inv
 *                [ceil(N/bn), ceil(K/bk)], which multiplies; activations in groups of bk along K.
 *                The block size comes from the config alone, never from shapes.
 *   fbgemm_fp8   one scale a row, activations per token (its upper bound is not applied: said)
 *   w8a8_fp8     the same, of another engine
 *   mxfp8        weight_scale_inv U8 (E8M0) [N, K/32]
 *
 * moe_quant_algo NVFP4 puts ModelOpt's tensors into the experts. Refused: E5M2, static activations
 * with blocks, experts in the fp4 of expert_dtype. */
#include <stdio.h>
#include <string.h>
#include "quant/scaled.h"

static const quant__scheme schemes[] = {
    {"tensor", "w:fp8_e4m3,tensor a:fp8_e4m3,token", "weight_scale", NULL, NULL, 0},
    {"tensor-static", "w:fp8_e4m3,tensor a:fp8_e4m3,tensor", "weight_scale", NULL, "input_scale",
     0},
    {"channel", "w:fp8_e4m3,channel a:fp8_e4m3,token", "weight_scale", NULL, NULL, 0},
    {"block", "w:fp8_e4m3,block128x128 a:fp8_e4m3,group128", "weight_scale_inv", NULL, NULL,
     SCHEME_FREE_BLOCK},
    {"mxfp8", "w:mxfp8,g32 a:mxfp8,group32", "weight_scale_inv", NULL, NULL, 0},
    {"nvfp4", "w:nvfp4,g16 a:nvfp4,g16", "weight_scale", "weight_scale_2", "input_scale",
     SCHEME_PRE_SCALE},
};
enum { N_SCHEMES = sizeof schemes / sizeof *schemes };

static int add_group(quant_ckpt *q, const char *name, const qspec *spec, err *e)
{
    const quant__scheme *s = quant__scheme_named(schemes, N_SCHEMES, name);
    qspec own;
    int rc = spec ? 0 : qspec_parse(s->spec, &own, e);
    return rc < 0 ? rc : quant__scaled_group(q, s, spec ? spec : &own, e);
}

static int block_group(quant_ckpt *q, int32_t bn, int32_t bk, err *e)
{
    qspec s;
    char text[120];
    snprintf(text, sizeof text, "w:fp8_e4m3,block%dx%d a:fp8_e4m3,group%d", (int)bn, (int)bk,
             (int)bk);
    int rc = qspec_parse(text, &s, e);
    return rc < 0 ? err_wrap(e, "%s", q->where) : add_group(q, "block", &s, e);
}

/* Keys that say which fp8 this is. */
static int read_element(quant_ckpt *q, quant__scaled *own, err *e)
{
    const char *fmt = NULL, *scale = NULL;
    int rc = 0;
    TRY(json_get_str(q->config, "fmt", &fmt, q->where, e));
    TRY(json_get_str(q->config, "scale_fmt", &scale, q->where, e));
    own->u8_scales = scale && !strcasecmp(scale, "ue8m0");
    own->fnuz = fmt && strstr(fmt, "fnuz");
    if (fmt && !strstr(fmt, "e4m3"))
        rc = err_set(e, ERR_UNSUPPORTED, "%s: fmt '%s'; weights in e4m3 are read", q->where, fmt);
out:
    return rc < 0 ? rc : 0;
}

/* Experts of another format than the rest. */
static int read_experts(quant_ckpt *q, err *e)
{
    const char *algo = NULL, *dtype = NULL;
    int rc = 0;
    qspec s;
    TRY(json_get_str(q->config, "moe_quant_algo", &algo, q->where, e));
    TRY(json_get_str(ckpt_cfg(q->c)->raw, "expert_dtype", &dtype, "config.json", e));
    if (algo && !strcasecmp(algo, "NVFP4")) {
        TRY(qspec_parse(quant__scheme_named(schemes, N_SCHEMES, "nvfp4")->spec, &s, e));
        if (!quant__group(q, &s, "nvfp4", QUANT_RULE_REGEX, ".*\\.experts\\.", e)) rc = -ERR_FORMAT;
    } else if (algo || (dtype && !strcasecmp(dtype, "fp4"))) {
        rc = err_set(e, ERR_UNSUPPORTED,
                     "%s: experts of another format (%s '%s') beside fp8 layers are not read",
                     q->where, algo ? "moe_quant_algo" : "expert_dtype", algo ? algo : dtype);
    }
out:
    return rc < 0 ? rc : 0;
}

static int read_lists(quant_ckpt *q, err *e)
{
    const json *list = json_get(q->config, "ignored_layers");
    const char *key = "ignored_layers";
    char where[320];
    if (!list || cJSON_IsNull(list)) {
        key = "modules_to_not_convert";
        list = json_get(q->config, key);
    }
    snprintf(where, sizeof where, "%.250s: %s", q->where, key);
    int rc = quant__excludes(q, list, where, QUANT_RULE_COMPONENT, e);
    if (rc < 0) return rc;
    return quant__kv_word(q, json_get(q->config, "kv_cache_scheme"), e);
}

static int fp8_detect(quant_ckpt *q, err *e)
{
    int rc = 0;
    int32_t bn, bk;
    const char *act = NULL;
    quant__scaled *own = quant__scaled_init(q, schemes, N_SCHEMES);
    TRY(read_element(q, own, e));
    TRY(json_get_str(q->config, "activation_scheme", &act, q->where, e));
    if (act && strcmp(act, "static") && strcmp(act, "dynamic"))
        return err_set(e, ERR_UNSUPPORTED, "%s: activation_scheme '%s'; expected static or dynamic",
                       q->where, act);
    bool fixed = act && !strcmp(act, "static");
    TRY(quant__block_size(q, &bn, &bk, e));
    if (bn && fixed)
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: blocks of weights with static activations; expected activation_scheme "
                       "dynamic",
                       q->where);
    TRY(bn ? block_group(q, bn, bk, e) : add_group(q, fixed ? "tensor-static" : "tensor", NULL, e));
    TRY(read_experts(q, e));
    TRY(read_lists(q, e));
    rc = quant__scaled_finish(q, e);
out:
    return rc;
}

/* Methods of one scheme: fbgemm_fp8, w8a8_fp8. */
static int fp8_rows_detect(quant_ckpt *q, err *e)
{
    int rc = 0;
    double bound = 0;
    quant__scaled_init(q, schemes, N_SCHEMES);
    TRY(json_get_f64(q->config, "activation_scale_ub", &bound, q->where, e));
    if (bound > 0)
        quant__warn(q,
                    "activation_scale_ub %g is not applied: inputs above it are scaled, not "
                    "clipped",
                    bound);
    TRY(add_group(q, "channel", NULL, e));
    TRY(read_lists(q, e));
    rc = quant__scaled_finish(q, e);
out:
    return rc;
}

static int mxfp8_detect(quant_ckpt *q, err *e)
{
    int rc = 0;
    quant__scaled_init(q, schemes, N_SCHEMES);
    TRY(add_group(q, "mxfp8", NULL, e));
    TRY(read_lists(q, e));
    rc = quant__scaled_finish(q, e);
out:
    return rc;
}

/* ---- writing ------------------------------------------------------------------------------------
 */

#define HOLDS                                                                                      \
    "fp8 blocks with activations in groups of the same width, or fp8 per tensor with activations " \
    "per token or one static scale"

/* tensor, tensor-static and block are what quant_method fp8 says. */
static const quant__scheme *writable(const qspec *s)
{
    const quant__scheme *x = quant__scheme_for(schemes, N_SCHEMES, s);
    return x && (!strncmp(x->name, "tensor", 6) || !strcmp(x->name, "block")) ? x : NULL;
}

static int store(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                 err *e)
{
    const quant__scheme *s = writable(&t->spec);
    if (!s) return quant__no_scheme("fp8", module, &t->spec, HOLDS, e);
    return quant__scaled_store(w, module, "fp8", s, t, model_dtype, e);
}

static int emit_config(jw *j, const qspec *spec, char *const *ignore, int n_ignore, err *e)
{
    const quant__scheme *s = writable(spec);
    if (!s) return quant__no_scheme("fp8", NULL, spec, HOLDS, e);
    if (qaxis_quantized(&spec->kv))
        return err_set(e, ERR_UNSUPPORTED,
                       "fp8 has no words for a quantized KV cache; choose it when serving: "
                       "--kv-cache-dtype");
    jw_obj(j);
    jw_kstr(j, "activation_scheme", s->input ? "static" : "dynamic");
    jw_kstr(j, "fmt", "e4m3");
    jw_key(j, "modules_to_not_convert");
    jw_arr(j);
    for (int i = 0; i < n_ignore; i++)
        jw_str(j, ignore[i]);
    jw_end_arr(j);
    jw_kstr(j, "quant_method", "fp8");
    jw_key(j, "weight_block_size");
    if (spec->w.gran == Q_BLOCK) {
        jw_arr(j);
        jw_i64(j, spec->w.block_n);
        jw_i64(j, spec->w.block_k);
        jw_end_arr(j);
    } else {
        jw_null(j);
    }
    jw_end_obj(j);
    return 0;
}

const quant_dialect quant__fp8 = {.name = "fp8",
                                  .methods = "fp8",
                                  .detect = fp8_detect,
                                  .store = store,
                                  .emit_config = emit_config,
                                  SCALED_DIALECT};
const quant_dialect quant__fbgemm_fp8 = {
    .name = "fbgemm_fp8", .methods = "fbgemm_fp8", .detect = fp8_rows_detect, SCALED_DIALECT};
const quant_dialect quant__w8a8_fp8 = {
    .name = "w8a8_fp8", .methods = "w8a8_fp8", .detect = fp8_rows_detect, SCALED_DIALECT};
const quant_dialect quant__mxfp8 = {
    .name = "mxfp8", .methods = "mxfp8", .detect = mxfp8_detect, SCALED_DIALECT};
