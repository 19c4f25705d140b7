/* gpt-oss MXFP4: the experts of a layer in one tensor, everything else unquantized.
 *
 *   M_blocks  U8 [E, N, K/32, 16]   low nibble first: a row is K/2 bytes, as the canonical row is
 *   M_scales  U8 [E, N, K/32]       E8M0: value = e2m1(code) * 2^(scale - 127)
 *   M_bias    BF16 [E, N]           not a part of the weight
 *
 * M is "….mlp.experts.gate_up_proj" (rows interleaved: gate, up, gate, up, …) or "….down_proj".
 * Rows are outputs; unquantized checkpoints of the same model hold the transpose [E, K, N]. Both
 * tensors are borrowed. Refused: blocks without scales and the reverse, other block sizes, on
 * writing all but power-of-two scales of 32 over stacked experts. */
#include <string.h>
#include "quant/quant_int.h"

const quant_part quant__mxfp4_parts[] = {
    {"_blocks", QUANT_CODES}, {"_scales", QUANT_SCALES}, {NULL, QUANT_CODES}};

bool quant__mxfp4_has(const quant_ckpt *q, const char *module)
{
    const ckpt_tensor *t;
    return quant__named(q, module, "_blocks", false, &t, NULL) == 0 && t;
}

int quant__mxfp4_detect(quant_ckpt *q, err *e)
{
    qspec spec;
    int rc = 0;
    TRY(qspec_parse("w:mxfp4,g32", &spec, e));
    if (!quant__group(q, &spec, "mxfp4", QUANT_RULE_GLOB, "*.experts.*", e)) return -ERR_FORMAT;
    /* The library takes each entry as an expression that a name begins with. */
    TRY(quant__ignore(q, json_get(q->config, "modules_to_not_convert"), q->where, QUANT_RULE_REGEX,
                      e));
    TRY(quant__sweep(q, e));
    rc = 1;
out:
    return rc;
}

static int check_blocks(const ckpt_tensor *t, err *e)
{
    if (t->dtype != NUM_U8) return quant__wrong_type(t, "U8", e);
    bool sizes = t->n_dims == 4 && t->shape[3] == 16;
    for (int i = 0; sizes && i < 3; i++)
        sizes = t->shape[i] >= 1;
    return sizes ? 0 : quant__wrong_shape(t, e, "blocks are [experts, rows, columns / 32, 16]");
}

int quant__mxfp4_describe(const quant_ckpt *q, const char *module, quant_module *out, err *e)
{
    const ckpt_tensor *t;
    int rc = quant__named(q, module, "_blocks", true, &t, e);
    if (rc >= 0) rc = check_blocks(t, e);
    if (rc < 0) return rc;
    *out = (quant_module){.spec = q->groups[0].spec,
                          .format = q->groups[0].format,
                          .E = t->shape[0],
                          .N = t->shape[1],
                          .K = t->shape[2] * 32};
    return 0;
}

int quant__mxfp4_load(const quant_ckpt *q, const char *module, qtensor *out, err *e)
{
    const ckpt_tensor *blocks, *scales;
    int rc = 0;
    TRY(quant__named(q, module, "_blocks", true, &blocks, e));
    TRY(quant__named(q, module, "_scales", true, &scales, e));
    TRY(check_blocks(blocks, e));
    if (scales->dtype != NUM_U8 && scales->dtype != NUM_F8_E8M0)
        return quant__wrong_type(scales, "U8 (E8M0)", e);
    for (int i = 0; i < 3; i++)
        if (scales->n_dims != 3 || scales->shape[i] != blocks->shape[i])
            return quant__wrong_shape(scales, e, "its blocks are [%lld, %lld, %lld, 16]",
                                      (long long)blocks->shape[0], (long long)blocks->shape[1],
                                      (long long)blocks->shape[2]);
    quant__set_grid(out, &q->groups[0].spec, blocks->shape[1], blocks->shape[2] * 32);
    out->E = blocks->shape[0];
    out->codes = blocks->data;
    out->scales = scales->data;
    out->scale_type = NUM_F8_E8M0;
out:
    return rc;
}

int quant__mxfp4_store(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                       err *e)
{
    int rc = 0;
    const int64_t shape[4] = {t->E, t->N, t->K / 32, 16};
    size_t n = strlen(module);
    bool experts = (n > 13 && !strcmp(module + n - 13, ".gate_up_proj")) ||
                   (n > 10 && !strcmp(module + n - 10, ".down_proj"));
    (void)model_dtype;
    TRY(quant__storable(t, module, "mxfp4", QUANT_CAN_EXPERTS, e));
    if (t->code != NUM_F4_E2M1 || t->spec.w.scale != QS_MX || t->block_k != 32 || t->block_n != 1 ||
        t->K % 32 || !experts || !strstr(module, ".experts.") || strstr(module, ".experts.0")) {
        buf b = {0};
        qaxis_format(&t->spec.w, &b);
        rc = err_set(e, ERR_UNSUPPORTED,
                     "module '%s' (%s): mxfp4 of gpt-oss holds only gate_up_proj and down_proj of "
                     "all experts of a layer in one tensor, as fp4 with power-of-two scales of 32",
                     module, b.data);
        buf_free(&b);
        goto out;
    }
    TRY(quant__begin(w, module, "_blocks", NUM_U8, 4, shape, e));
    TRY(quant__put_rows(w, t, t->E * t->N, quant__row_copy, (size_t)t->K / 2, e));
    TRY(quant__put(w, module, "_scales", NUM_U8, 3, shape, t->scales, e));
out:
    return rc < 0 ? rc : 0;
}

int quant__mxfp4_emit_config(jw *j, const qspec *s, char *const *ignore, int n_ignore, err *e)
{
    if (s->w.type != NUM_F4_E2M1 || s->w.scale != QS_MX || s->a.gran != Q_NONE ||
        qaxis_quantized(&s->kv))
        return err_set(e, ERR_UNSUPPORTED,
                       "mxfp4 of gpt-oss holds w:mxfp4,g32 a:bf16 kv:bf16 only");
    jw_obj(j);
    jw_key(j, "modules_to_not_convert");
    jw_arr(j);
    for (int i = 0; i < n_ignore; i++)
        jw_str(j, ignore[i]);
    jw_end_arr(j);
    jw_kstr(j, "quant_method", "mxfp4");
    jw_end_obj(j);
    return 0;
}
