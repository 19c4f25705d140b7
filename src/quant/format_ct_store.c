/* compressed-tensors, part 3: writing one module, and the quantization_config that describes it.
 *
 * The mirror of format_ct_load.c, in the layout of compressed-tensors 0.19: dense bit streams with
 * zero padding bits, scales in the model's float type, NVFP4's factor as a divisor. What the format
 * cannot hold (nf4, float zero points, experts in one tensor, e5m2) is refused here. */
#include <stdio.h>
#include <string.h>
#include "quant/quant_int.h"

#define CT_VERSION "0.19.0"
#define ROW_BUFFER ((size_t)1 << 20)

typedef struct sink {
    ckpt_writer *w;
    const char *module;
    const qtensor *t;
} sink;

static int begin(const sink *s, const char *suffix, num_dtype type, int n_dims, int64_t a,
                 int64_t b, err *e)
{
    char name[QUANT_NAME_MAX];
    int64_t shape[2] = {a, b};
    int n = snprintf(name, sizeof name, "%s.%s", s->module, suffix);
    if (n < 0 || (size_t)n >= sizeof name)
        return err_set(e, ERR_LIMIT, "module name of %zu bytes is too long", strlen(s->module));
    return ckpt_writer_begin(s->w, name, type, n_dims, shape, e);
}

static int whole(const sink *s, const char *suffix, num_dtype type, int n_dims, int64_t a,
                 int64_t b, const void *data, err *e)
{
    int rc = begin(s, suffix, type, n_dims, a, b, e);
    size_t n = (size_t)(a * (n_dims == 2 ? b : 1)) * (size_t)num_infos[type].bits / 8;
    return rc < 0 ? rc : ckpt_writer_data(s->w, data, n, e);
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

typedef void row_fn(const qtensor *t, int64_t row, uint8_t *dst, size_t dst_bytes);

static void row_packed(const qtensor *t, int64_t row, uint8_t *dst, size_t dst_bytes)
{
    offset_row(t->codes + (size_t)row * t->row_bytes, num_infos[t->code].bits, (size_t)t->K, dst,
               dst_bytes);
}

static void row_bytes(const qtensor *t, int64_t row, uint8_t *dst, size_t dst_bytes)
{
    (void)dst_bytes;
    for (int64_t k = 0; k < t->K; k++)
        dst[k] = (uint8_t)qtensor_code(t, row, k);
}

static void row_copy(const qtensor *t, int64_t row, uint8_t *dst, size_t dst_bytes)
{
    memcpy(dst, t->codes + (size_t)row * t->row_bytes, dst_bytes);
}

/* Rows through a bounded buffer. */
static int rows(const sink *s, row_fn *fn, size_t bytes, err *e)
{
    size_t step = ROW_BUFFER / bytes ? ROW_BUFFER / bytes : 1;
    uint8_t *b = NULL;
    int rc = mem_alloc((void **)&b, step * bytes, e);
    for (int64_t r = 0; rc >= 0 && r < s->t->N; r += (int64_t)step) {
        int64_t end = r + (int64_t)step < s->t->N ? r + (int64_t)step : s->t->N;
        for (int64_t i = r; i < end; i++)
            fn(s->t, i, b + (size_t)(i - r) * bytes, bytes);
        rc = ckpt_writer_data(s->w, b, (size_t)(end - r) * bytes, e);
    }
    mem_free(b);
    return rc;
}

static int store_codes(const sink *s, const char *format, err *e)
{
    const qtensor *t = s->t;
    int bits = num_infos[t->code].bits, rc;
    if (!strcmp(format, "pack-quantized")) {
        int64_t words = (t->K * bits + 31) / 32, shape[2] = {t->N, t->K};
        rc = begin(s, "weight_packed", NUM_I32, 2, t->N, words, e);
        if (rc >= 0) rc = rows(s, row_packed, (size_t)words * 4, e);
        if (rc >= 0) rc = whole(s, "weight_shape", NUM_I64, 1, 2, 0, shape, e);
        return rc;
    }
    if (t->code == NUM_F4_E2M1) {
        rc = begin(s, "weight_packed", NUM_U8, 2, t->N, t->K / 2, e);
        return rc < 0 ? rc : rows(s, row_copy, (size_t)t->K / 2, e);
    }
    rc = begin(s, "weight", t->code == NUM_F8_E4M3 ? NUM_F8_E4M3 : NUM_I8, 2, t->N, t->K, e);
    return rc < 0 ? rc : rows(s, bits == 8 ? row_copy : row_bytes, (size_t)t->K, e);
}

static int store_scales(const sink *s, err *e)
{
    const qtensor *t = s->t;
    num_dtype type = t->scale_type == NUM_F8_E8M0 ? NUM_U8 : t->scale_type;
    bool one = t->spec.w.gran == Q_TENSOR;
    return whole(s, "weight_scale", type, one ? 1 : 2, one ? 1 : t->scale_rows, t->scale_cols,
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
        return whole(s, "weight_zero_point", NUM_I8, 2, N, G, t->zeros, e);
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
    TRY(whole(s, "weight_zero_point", NUM_I32, 2, R, G, out, e));
out:
    mem_free(words);
    mem_free(col);
    mem_free(out);
    return rc;
}

/* The divisor whose reciprocal the qtensor holds; the factor was made in the model's type. */
static float divisor(float multiplier, num_dtype model_dtype)
{
    float g = 1.0f / multiplier, r = num_round(model_dtype, g);
    return 1.0f / r == multiplier ? r : g;
}

static int check(const sink *s, err *e)
{
    const qtensor *t = s->t;
    const qaxis *w = &t->spec.w;
    const char *why = t->E != 1                                        ? "an expert axis"
                      : t->table || t->code == NUM_NF4                 ? "a code table (nf4)"
                      : t->zeros && t->zero_type != NUM_I8             ? "float zero points"
                      : t->pre_scale                                   ? "an input scale vector"
                      : t->n_global > 1                                ? "several global scales"
                      : t->code == NUM_F8_E5M2                         ? "fp8_e5m2 weights"
                      : t->code == NUM_F4_E2M1 && w->scale == QS_FLOAT ? "fp4 with float scales"
                                                                       : NULL;
    if (why)
        return err_set(e, ERR_UNSUPPORTED, "%s: compressed-tensors cannot store %s", s->module,
                       why);
    if (!t->scales)
        return err_set(e, ERR_UNSUPPORTED, "%s: is not quantized; store its weight as it is",
                       s->module);
    return 0;
}

int quant__ct_store(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                    err *e)
{
    int rc = 0;
    sink s = {w, module, t};
    TRY(check(&s, e));
    const char *format = quant__ct_format(&t->spec);
    TRY(store_codes(&s, format, e));
    TRY(store_scales(&s, e));
    if (t->n_global) {
        float g = divisor(t->global[0], model_dtype);
        TRY(whole(&s, "weight_global_scale", NUM_F32, 1, 1, 0, &g, e));
    }
    if (t->zeros) TRY(store_zeros(&s, format, e));
    if (t->g_idx) TRY(whole(&s, "weight_g_idx", NUM_I32, 1, t->K, 0, t->g_idx, e));
    rc = 0;
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
    jw_kstr(j, "actorder", a->actorder ? "group" : NULL);
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
    if (s->w.type == NUM_NF4 || s->w.type == NUM_F8_E5M2 || !strategy_name(&s->w))
        what = "these weights";
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

int quant__ct_emit_config(jw *j, const qspec *s, char *const *ignore, int n_ignore, err *e)
{
    int rc = check_spec(s, e);
    if (rc < 0) return rc;
    const char *format = quant__ct_format(s);
    jw_obj(j);
    jw_key(j, "config_groups");
    jw_obj(j);
    jw_key(j, "group_0");
    jw_obj(j);
    jw_kstr(j, "format", format);
    jw_key(j, "input_activations");
    if (s->a.gran != Q_NONE)
        emit_args(j, &s->a, false);
    else
        jw_null(j);
    jw_kstr(j, "output_activations", NULL);
    jw_key(j, "targets");
    jw_arr(j);
    jw_str(j, "Linear");
    jw_end_arr(j);
    jw_key(j, "weights");
    emit_args(j, &s->w, true);
    jw_end_obj(j);
    jw_end_obj(j);
    jw_kstr(j, "format", format);
    jw_kstr(j, "global_compression_ratio", NULL);
    jw_key(j, "ignore");
    jw_arr(j);
    for (int i = 0; i < n_ignore; i++)
        jw_str(j, ignore[i]);
    jw_end_arr(j);
    jw_key(j, "kv_cache_scheme");
    if (qaxis_quantized(&s->kv))
        emit_args(j, &s->kv, false);
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
    return 0;
}
