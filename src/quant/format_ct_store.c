/* compressed-tensors, part 3: writing one module, and the quantization_config that describes it.
 *
 * The mirror of format_ct_load.c, in the layout of compressed-tensors 0.19: dense bit streams with
 * zero padding bits, scales in the model's float type, NVFP4's factor as a divisor. What the format
 * cannot hold (nf4, float zero points, experts in one tensor, e5m2) is refused here. */
#include <stdio.h>
#include <string.h>
#include "quant/quant_int.h"

#define CT_VERSION "0.19.0"

typedef struct sink {
    ckpt_writer *w;
    const char *module;
    const qtensor *t;
} sink;

static int put(const sink *s, const char *suffix, num_dtype type, int n_dims, int64_t a, int64_t b,
               const void *data, err *e)
{
    const int64_t shape[2] = {a, b};
    return quant__put(s->w, s->module, suffix, type, n_dims, shape, data, e);
}

static int put_rows(const sink *s, const char *suffix, num_dtype type, int64_t cols,
                    quant__row_fn *fn, size_t bytes, err *e)
{
    const int64_t shape[2] = {s->t->N, cols};
    int rc = quant__begin(s->w, s->module, suffix, type, 2, shape, e);
    return rc < 0 ? rc : quant__put_rows(s->w, s->t, s->t->N, fn, bytes, e);
}

/* Canonical codes of n fields to a zero-padded stream of unsigned ones. */
static void offset_row(const uint8_t *src, int bits, size_t n, uint8_t *dst, size_t dst_bytes)
{
    uint8_t flip[8] = {0};
    size_t used = (n * (size_t)bits + 7) / 8, tail = n * (size_t)bits % 8;
    for (int i = 0; i < 8; i++)
        num_put_bits(flip, (size_t)i, bits, 1u << (bits - 1));
    memset(dst + used, 0, dst_bytes - used);
    for (size_t i = 0, f = 0; i < used; i++, f = f + 1 == (size_t)bits ? 0 : f + 1)
        dst[i] = src[i] ^ flip[f];
    if (tail) dst[used - 1] &= (uint8_t)((1u << tail) - 1);
}

static void row_packed(const qtensor *t, int64_t row, uint8_t *dst, size_t dst_bytes)
{
    offset_row(t->codes + (size_t)row * t->row_bytes, num_infos[t->code].bits, (size_t)t->K, dst,
               dst_bytes);
}

static int store_codes(const sink *s, const char *format, err *e)
{
    const qtensor *t = s->t;
    int bits = num_infos[t->code].bits;
    if (!strcmp(format, "pack-quantized")) {
        int64_t words = (t->K * bits + 31) / 32, shape[2] = {t->N, t->K};
        int rc = put_rows(s, ".weight_packed", NUM_I32, words, row_packed, (size_t)words * 4, e);
        return rc < 0 ? rc : put(s, ".weight_shape", NUM_I64, 1, 2, 0, shape, e);
    }
    if (t->code == NUM_F4_E2M1)
        return put_rows(s, ".weight_packed", NUM_U8, t->K / 2, quant__row_copy, (size_t)t->K / 2,
                        e);
    return put_rows(s, ".weight", t->code == NUM_F8_E4M3 ? NUM_F8_E4M3 : NUM_I8, t->K,
                    bits == 8 ? quant__row_copy : quant__row_bytes, (size_t)t->K, e);
}

static int store_scales(const sink *s, err *e)
{
    const qtensor *t = s->t;
    num_dtype type = t->scale_type == NUM_F8_E8M0 ? NUM_U8 : t->scale_type;
    bool one = t->spec.w.gran == Q_TENSOR;
    return put(s, ".weight_scale", type, one ? 1 : 2, one ? 1 : t->scale_rows, t->scale_cols,
               t->scales, e);
}

/* Packed along N, or a byte each for the formats of one code a byte. */
static int store_zeros(const sink *s, const char *format, err *e)
{
    const qtensor *t = s->t;
    int bits = num_infos[t->code].bits;
    int64_t G = t->scale_cols, N = t->scale_rows, R = (N * bits + 31) / 32;
    const int8_t *z = t->zeros;
    if (strcmp(format, "pack-quantized"))
        return put(s, ".weight_zero_point", NUM_I8, 2, N, G, t->zeros, e);
    uint8_t *words = NULL, *col = NULL, *out = NULL;
    size_t n = (size_t)R * 4;
    int rc = 0;
    TRY(mem_alloc((void **)&words, n, e));
    TRY(mem_alloc((void **)&col, n, e));
    TRY(mem_alloc((void **)&out, n * (size_t)G, e));
    for (int64_t c = 0; c < G; c++) {
        memset(col, 0, n);
        for (int64_t r = 0; r < N; r++)
            num_put_bits(col, (size_t)r, bits, (uint32_t)z[r * G + c] & ((1u << bits) - 1));
        offset_row(col, bits, (size_t)N, words, n);
        for (int64_t r = 0; r < R; r++)
            memcpy(out + 4 * (size_t)(r * G + c), words + 4 * r, 4);
    }
    TRY(put(s, ".weight_zero_point", NUM_I32, 2, R, G, out, e));
out:
    mem_free(words);
    mem_free(col);
    mem_free(out);
    return rc;
}

/* The divisor whose reciprocal is this factor: in the model's type where one is, as its writer
 * makes it. Not every float is a reciprocal; then the format cannot hold the factor. */
static int divisor(const sink *s, const char *what, float multiplier, num_dtype model_dtype,
                   float *out, err *e)
{
    float g = 1.0f / multiplier, r = num_round(model_dtype, g);
    const float near[] = {r, g, nextafterf(g, 0), nextafterf(g, INFINITY)};
    for (size_t i = 0; i < sizeof near / sizeof *near; i++)
        if (1.0f / near[i] == multiplier) {
            *out = near[i];
            return 0;
        }
    return err_set(e, ERR_UNSUPPORTED,
                   "module '%s': compressed-tensors divides by %s, and no float has %.9g as its "
                   "reciprocal: the factor would be changed",
                   s->module, what, (double)multiplier);
}

static int check(const sink *s, const char *format, err *e)
{
    const qtensor *t = s->t;
    const qaxis *w = &t->spec.w;
    bool nvfp4 = w->scale == QS_NVFP4;
    unsigned can = QUANT_CAN_ZEROS | QUANT_CAN_ACT; /* g_idx was taken out of its library by 0.19 */
    if (!quant__ordered(t)) can |= QUANT_CAN_ORDER;
    int rc = quant__storable(t, s->module, "compressed-tensors",
                             can | (nvfp4 ? QUANT_CAN_GLOBAL : 0), e);
    if (rc < 0) return rc;
    const char *why = t->code == NUM_F8_E5M2                           ? "fp8_e5m2 weights"
                      : t->code == NUM_F4_E2M1 && w->scale == QS_FLOAT ? "fp4 with float scales"
                      : nvfp4 && !t->n_global                          ? "nvfp4 without its factor"
                      : num_infos[t->code].kind == 'I' && w->scale != QS_FLOAT
                          ? "integers with scales of 8 bits"
                          : NULL;
    int lim = 1 << (num_infos[t->code].bits - 1);
    const int8_t *z = t->zeros;
    for (int64_t i = 0; z && !why && i < t->scale_rows * t->scale_cols; i++)
        if (strcmp(format, "pack-quantized") == 0 && (z[i] < -lim || z[i] >= lim))
            why = "a zero point outside of the range of the codes";
    if (why)
        return err_set(e, ERR_UNSUPPORTED, "module '%s': compressed-tensors cannot hold %s",
                       s->module, why);
    return 0;
}

/* Static activation scales, in the model's type where that changes nothing. */
static int store_act(const sink *s, num_dtype model_dtype, err *e)
{
    const qtensor *t = s->t;
    int rc = 0;
    if (t->spec.a.gran == Q_TENSOR && !t->spec.a.dynamic) {
        uint8_t raw[4];
        bool fits = num_round(model_dtype, t->input_scale) == t->input_scale;
        num_dtype as = fits ? model_dtype : NUM_F32;
        num_encode_row(as, &t->input_scale, 1, raw);
        TRY(put(s, ".input_scale", as, 1, 1, 0, raw, e));
        const int8_t z = (int8_t)t->input_zero;
        if (t->spec.a.asym) TRY(put(s, ".input_zero_point", NUM_I8, 1, 1, 0, &z, e));
    }
    if (t->spec.a.scale == QS_NVFP4) {
        float g = 0;
        TRY(divisor(s, "input_global_scale", t->input_global, model_dtype, &g, e));
        TRY(put(s, ".input_global_scale", NUM_F32, 1, 1, 0, &g, e));
    }
out:
    return rc;
}

int quant__ct_store(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                    err *e)
{
    int rc = 0;
    float g = 0;
    sink s = {w, module, t};
    const char *format = quant__ct_format(&t->spec);
    TRY(check(&s, format, e));
    if (t->n_global) TRY(divisor(&s, "weight_global_scale", t->global[0], model_dtype, &g, e));
    TRY(store_codes(&s, format, e));
    TRY(store_scales(&s, e));
    if (t->n_global) TRY(put(&s, ".weight_global_scale", NUM_F32, 1, 1, 0, &g, e));
    if (t->zeros) TRY(store_zeros(&s, format, e));
    TRY(store_act(&s, model_dtype, e));
out:
    return rc;
}

/* ---- quantization_config ------------------------------------------------------------------------
 */

static const char *strategy_name(const qaxis *a)
{
    switch (a->gran) {
    case Q_TENSOR:
        return "tensor";
    case Q_CHANNEL:
        return "channel";
    case Q_GROUP:
        return a->scale == QS_NVFP4 ? "tensor_group" : "group";
    case Q_BLOCK:
        return "block";
    case Q_TOKEN:
        return "token";
    case Q_HEAD:
        return "attn_head";
    case Q_TOKEN_HEAD:
    case Q_NONE:
        break;
    }
    return NULL;
}

static void emit_args(jw *j, const qaxis *a, bool weight)
{
    jw_obj(j);
    jw_kstr(j, "actorder", NULL);
    jw_key(j, "block_structure");
    if (a->gran == Q_BLOCK) {
        jw_arr(j);
        jw_i64(j, a->block_n);
        jw_i64(j, a->block_k);
        jw_end_arr(j);
    } else {
        jw_null(j);
    }
    jw_kbool(j, "dynamic", a->dynamic);
    jw_key(j, "group_size");
    if (a->gran == Q_GROUP)
        jw_i64(j, a->group);
    else
        jw_null(j);
    jw_ki64(j, "num_bits", num_infos[a->type].bits);
    jw_kstr(j, "observer", weight ? "memoryless_minmax" : NULL);
    jw_key(j, "observer_kwargs");
    jw_obj(j);
    jw_end_obj(j);
    jw_kstr(j, "scale_dtype",
            a->scale == QS_NVFP4 ? "torch.float8_e4m3fn"
            : a->scale == QS_MX  ? "torch.uint8"
                                 : NULL);
    jw_kstr(j, "strategy", strategy_name(a));
    jw_kbool(j, "symmetric", !a->asym);
    jw_kstr(j, "type", num_infos[a->type].kind == 'I' ? "int" : "float");
    jw_kstr(j, "zp_dtype", a->asym ? "torch.int8" : NULL);
    jw_end_obj(j);
}

static int check_spec(const qspec *s, err *e)
{
    buf t = {0};
    const char *what = NULL;
    qspec_format(s, &t);
    if (num_infos[s->w.type].kind == 'T' || s->w.type == NUM_F8_E5M2 || !strategy_name(&s->w))
        what = "these weights";
    else if (s->w.actorder)
        what = "an order of columns (its library reads none since 0.19); write gptq";
    else if (s->a.gran != Q_NONE && !strategy_name(&s->a))
        what = "these activations";
    else if (qaxis_quantized(&s->kv) &&
             (s->kv.type != NUM_F8_E4M3 || (s->kv.gran != Q_TENSOR && s->kv.gran != Q_HEAD)))
        what = "this KV cache (choose it when serving: --kv-cache-dtype)";
    int rc = what ? err_set(e, ERR_UNSUPPORTED,
                            "scheme '%s': compressed-tensors has no words for %s", t.data, what)
                  : 0;
    buf_free(&t);
    return rc;
}

static void emit_group(jw *j, int index, const qspec *s, const quant_written *m, int n)
{
    char key[32];
    snprintf(key, sizeof key, "group_%d", index);
    jw_key(j, key);
    jw_obj(j);
    jw_kstr(j, "format", quant__ct_format(s));
    jw_key(j, "input_activations");
    if (s->a.gran != Q_NONE)
        emit_args(j, &s->a, false);
    else
        jw_null(j);
    jw_kstr(j, "output_activations", NULL);
    jw_key(j, "targets");
    jw_arr(j);
    if (!n) jw_str(j, "Linear");
    for (int i = 0; i < n; i++)
        if (qaxis_equal(&m[i].spec.w, &s->w) && qaxis_equal(&m[i].spec.a, &s->a))
            jw_str(j, m[i].module);
    jw_end_arr(j);
    jw_key(j, "weights");
    emit_args(j, &s->w, true);
    jw_end_obj(j);
}

static void emit_rest(jw *j, const char *format, const qaxis *kv, char *const *ignore, int n_ignore)
{
    jw_kstr(j, "format", format);
    jw_kstr(j, "global_compression_ratio", NULL);
    jw_key(j, "ignore");
    jw_arr(j);
    for (int i = 0; i < n_ignore; i++)
        jw_str(j, ignore[i]);
    jw_end_arr(j);
    jw_key(j, "kv_cache_scheme");
    if (qaxis_quantized(kv))
        emit_args(j, kv, false);
    else
        jw_null(j);
    jw_kstr(j, "quant_method", "compressed-tensors");
    jw_kstr(j, "quantization_status", "compressed");
    jw_key(j, "sparsity_config");
    jw_obj(j);
    jw_end_obj(j);
    jw_key(j, "transform_config");
    jw_obj(j);
    jw_end_obj(j);
    jw_kstr(j, "version", CT_VERSION);
    jw_end_obj(j);
}

int quant__ct_emit_config(jw *j, const qspec *s, char *const *ignore, int n_ignore, err *e)
{
    int rc = check_spec(s, e);
    if (rc < 0) return rc;
    jw_obj(j);
    jw_key(j, "config_groups");
    jw_obj(j);
    emit_group(j, 0, s, NULL, 0);
    jw_end_obj(j);
    emit_rest(j, quant__ct_format(s), &s->kv, ignore, n_ignore);
    return 0;
}

/* One group a scheme, its modules named one by one. */
int quant__ct_emit_modules(jw *j, const quant_written *m, int n, const qaxis *kv,
                           char *const *ignore, int n_ignore, err *e)
{
    int rc = 0, groups = 0;
    bool mixed = false;
    for (int i = 0; i < n && rc >= 0; i++) {
        qspec s = m[i].spec;
        s.kv = *kv;
        rc = check_spec(&s, e);
        mixed |= strcmp(quant__ct_format(&s), quant__ct_format(&m[0].spec)) != 0;
    }
    if (rc < 0) return rc;
    jw_obj(j);
    jw_key(j, "config_groups");
    jw_obj(j);
    for (int i = 0; i < n; i++) {
        bool seen = false;
        for (int k = 0; k < i && !seen; k++)
            seen =
                qaxis_equal(&m[i].spec.w, &m[k].spec.w) && qaxis_equal(&m[i].spec.a, &m[k].spec.a);
        if (!seen) emit_group(j, groups++, &m[i].spec, m, n);
    }
    jw_end_obj(j);
    emit_rest(j, mixed ? "mixed-precision" : quant__ct_format(&m[0].spec), kv, ignore, n_ignore);
    return 0;
}
