/* compressed-tensors, part 2: the tensors of one module into a qtensor.
 *
 *   pack-quantized    weight_packed I32 [N, ceil(K*b/32)], u = q + 2^(b-1), a dense LSB-first bit
 *                     stream a row. Flipping the top bit of each field gives two's complement, and
 * a little-endian row of words is already the canonical row: one XOR a byte. Before 0.13, b = 3, 5,
 * 6, 7 held floor(32/b) codes a word: told by the column count. weight_shape I64 [2] = [N, K].
 * weight_zero_point I32, packed along N. int-quantized     weight I8 [N,K], one code a byte
 * whatever b. float, mxfp8      weight F8_E4M3 [N,K]. nvfp4, mxfp4      weight_packed U8 [N, K/2],
 * low nibble first. weight_scale      one value, [N] or [N,1], [N, ceil(K/g)], or [ceil(N/bn),
 * ceil(K/bk)]. weight_global_scale F32 [1] divides; the qtensor multiplies: global = 1/it.
 *
 * The grid follows from the config alone and every shape is held against it by name. */
#include <stdio.h>
#include <string.h>
#include "quant/quant_int.h"

typedef struct job {
    const quant_ckpt *q;
    const char *module;
    const quant_group *g;
    qtensor *out;
} job;

static int wrong_shape(const job *j, const ckpt_tensor *t, int64_t a, int64_t b, err *e)
{
    buf spec = {0};
    qaxis_format(&j->g->spec.w, &spec);
    int rc =
        quant__wrong_shape(t, e, "%s of [%lld, %lld] weights needs [%lld, %lld]", spec.data,
                           (long long)j->out->N, (long long)j->out->K, (long long)a, (long long)b);
    buf_free(&spec);
    return rc;
}

/* ---- codes --------------------------------------------------------------------------------------
 */

/* Codes of n fields in words of floor(32/b) fields, or dense, to two's complement. */
static void unpack_row(const uint8_t *src, int bits, bool dense, size_t n, uint8_t *dst,
                       size_t dst_bytes)
{
    if (dense) {
        uint8_t flip[8] = {0};
        for (int i = 0; i < 8; i++)
            num_put_bits(flip, (size_t)i, bits, 1u << (bits - 1));
        for (size_t i = 0, f = 0; i < dst_bytes; i++, f = f + 1 == (size_t)bits ? 0 : f + 1)
            dst[i] = src[i] ^ flip[f];
        return;
    }
    size_t per = 32u / (unsigned)bits;
    for (size_t i = 0; i < n; i++) {
        uint32_t w;
        memcpy(&w, src + i / per * 4, 4);
        uint32_t u = w >> (i % per * (size_t)bits) & ((1u << bits) - 1);
        num_put_bits(dst, i, bits, u ^ 1u << (bits - 1));
    }
}

static int64_t words_dense(int64_t n, int bits)
{
    return (n * bits + 31) / 32;
}

static int64_t words_old(int64_t n, int bits)
{
    int64_t per = 32 / bits;
    return (n + per - 1) / per;
}

/* Versions up to 0.12 filled words with floor(32/b) codes. Where both layouts take as many words
 * the file cannot tell; its version does. */
static bool old_writer(const quant_ckpt *q)
{
    const json *v = json_get(q->config, "version");
    int major = 0, minor = 0;
    if (!cJSON_IsString(v) || sscanf(v->valuestring, "%9d.%9d", &major, &minor) != 2) return false;
    return major == 0 && minor <= 12;
}

/* Whether n codes in this many words are a dense stream; false in *fits = they are neither. */
static bool is_dense(const job *j, int64_t words, int64_t n, int bits, bool *fits)
{
    bool dense = words == words_dense(n, bits), old = words == words_old(n, bits);
    *fits = dense || old;
    return dense && !(old && 32 % bits && old_writer(j->q));
}

/* N and K as weight_shape says; both bounded by what the packed tensor can hold. */
static int read_shape(const job *j, const ckpt_tensor *p, int64_t *N, int64_t *K, err *e)
{
    const ckpt_tensor *t;
    int64_t v[2];
    int rc = quant__tensor(j->q, j->module, "weight_shape", true, &t, e);
    if (rc < 0) return rc;
    bool narrow = t->dtype == NUM_I32;
    if (t->dtype != NUM_I64 && !narrow) return quant__wrong_type(t, "I64", e);
    if (t->n_dims != 1 || t->shape[0] != 2)
        return err_set(e, ERR_SHAPE, "%s: tensor '%s' must hold two numbers", t->path, t->name);
    for (int i = 0; i < 2; i++) {
        int32_t x;
        if (narrow) {
            memcpy(&x, t->data + 4 * i, 4);
            v[i] = x;
        } else {
            memcpy(&v[i], t->data + 8 * i, 8);
        }
    }
    if (v[0] != p->shape[0] || v[1] < 1 || v[1] > p->shape[1] * 32)
        return err_set(e, ERR_SHAPE,
                       "%s: '%s' says [%lld, %lld], but '%s' has %lld rows of %lld words", t->path,
                       t->name, (long long)v[0], (long long)v[1], p->name, (long long)p->shape[0],
                       (long long)p->shape[1]);
    *N = v[0];
    *K = v[1];
    return 0;
}

static int load_packed_int(const job *j, const ckpt_tensor *t, err *e)
{
    int64_t N = 0, K = 0;
    int bits = num_infos[j->g->spec.w.type].bits;
    void *p;
    if (num_infos[j->g->spec.w.type].kind != 'I') return quant__wrong_type(t, "U8 (packed fp4)", e);
    if (t->n_dims != 2 || t->shape[0] < 1 || t->shape[1] < 1)
        return err_set(e, ERR_SHAPE, "%s: tensor '%s' must have 2 dimensions", t->path, t->name);
    int rc = read_shape(j, t, &N, &K, e);
    if (rc < 0) return rc;
    quant__set_grid(j->out, &j->g->spec, N, K);
    bool fits, dense = is_dense(j, t->shape[1], K, bits, &fits);
    if (!fits) return wrong_shape(j, t, N, words_dense(K, bits), e);
    rc = quant__own(j->out, (size_t)N, j->out->row_bytes, &p, e);
    if (rc < 0) return rc;
    memset(p, 0, (size_t)N * j->out->row_bytes);
    for (int64_t r = 0; r < N; r++)
        unpack_row(t->data + (size_t)r * (size_t)t->shape[1] * 4, bits, dense, (size_t)K,
                   (uint8_t *)p + (size_t)r * j->out->row_bytes, j->out->row_bytes);
    j->out->codes = p;
    return 0;
}

/* One code a byte; below 8 bits they are packed, and a code outside the range is an error. */
static int load_int8(const job *j, const ckpt_tensor *t, err *e)
{
    qtensor *o = j->out;
    int bits = num_infos[o->code].bits, lim = 1 << (bits - 1);
    void *p;
    o->codes = t->data;
    if (bits == 8) return 0;
    int rc = quant__own(o, (size_t)o->N, o->row_bytes, &p, e);
    if (rc < 0) return rc;
    memset(p, 0, (size_t)o->N * o->row_bytes);
    for (int64_t r = 0; r < o->N; r++)
        for (int64_t k = 0; k < o->K; k++) {
            int c = (int8_t)t->data[r * o->K + k];
            if (c < -lim || c >= lim)
                return err_set(
                    e, ERR_VALUE,
                    "%s: tensor '%s' holds the code %d at [%lld, %lld]; num_bits %d allows %d "
                    "to %d",
                    t->path, t->name, c, (long long)r, (long long)k, bits, -lim, lim - 1);
            num_put_bits((uint8_t *)p + (size_t)r * o->row_bytes, (size_t)k, bits,
                         (uint32_t)c & ((1u << bits) - 1));
        }
    o->codes = p;
    return 0;
}

static int load_codes(const job *j, err *e)
{
    const ckpt_tensor *t;
    num_dtype w = j->g->spec.w.type;
    int rc = quant__tensor(j->q, j->module, "weight_packed", false, &t, e);
    if (rc < 0) return rc;
    if (t && t->dtype == NUM_I32) return load_packed_int(j, t, e);
    bool fp4 = t != NULL;
    if (!t) {
        rc = quant__tensor(j->q, j->module, "weight", true, &t, e);
        if (rc < 0) return rc;
    }
    if (fp4 && t->dtype != NUM_U8)
        return quant__wrong_type(t, "U8 (packed fp4) or I32 (packed integers)", e);
    if (fp4 != (w == NUM_F4_E2M1))
        return err_set(e, ERR_FORMAT, "%s: tensor '%s' %s, but its config group says %s (%s)",
                       t->path, t->name, fp4 ? "holds packed 4-bit floats" : "is not packed",
                       num_infos[w].name, j->g->format);
    if (!fp4 && w == NUM_F8_E4M3 && t->dtype != NUM_F8_E4M3)
        return quant__wrong_type(t, "F8_E4M3", e);
    if (!fp4 && w != NUM_F8_E4M3 && t->dtype != NUM_I8) return quant__wrong_type(t, "I8", e);
    if (t->n_dims != 2 || t->shape[0] < 1 || t->shape[1] < 1)
        return err_set(e, ERR_SHAPE, "%s: tensor '%s' must have 2 dimensions", t->path, t->name);
    if (w == NUM_F8_E4M3 && (rc = quant__e4m3_finite(t, e)) < 0) return rc;
    quant__set_grid(j->out, &j->g->spec, t->shape[0], t->shape[1] * (fp4 ? 2 : 1));
    j->out->codes = t->data;
    return num_infos[w].kind == 'I' ? load_int8(j, t, e) : 0;
}

/* ---- scales, zero points, order -----------------------------------------------------------------
 */

static int load_g_idx(const job *j, err *e)
{
    const ckpt_tensor *t;
    int rc = quant__tensor(j->q, j->module, "weight_g_idx", false, &t, e);
    if (rc < 0 || !t) return rc;
    if (t->dtype != NUM_I32) return quant__wrong_type(t, "I32", e);
    if (!quant__has_shape(t, j->out->K, 1)) return wrong_shape(j, t, j->out->K, 1, e);
    const void *p;
    rc = quant__borrow(j->out, t, &p, e);
    if (rc < 0) return rc;
    /* Written before it was set: -1 everywhere means the natural order. */
    const int32_t *g = p;
    int64_t unset = 0;
    while (unset < j->out->K && g[unset] == -1)
        unset++;
    if (unset < j->out->K) j->out->g_idx = g;
    return 0;
}

static int load_scales(const job *j, err *e)
{
    const ckpt_tensor *t;
    qtensor *o = j->out;
    qscale kind = j->g->spec.w.scale;
    int rc = quant__tensor(j->q, j->module, "weight_scale", true, &t, e);
    if (rc < 0) return rc;
    if (!quant__has_shape(t, o->scale_rows, o->scale_cols))
        return wrong_shape(j, t, o->scale_rows, o->scale_cols, e);
    o->scale_type = t->dtype;
    if (kind == QS_MX) {
        if (t->dtype != NUM_U8 && t->dtype != NUM_F8_E8M0)
            return quant__wrong_type(t, "U8 (E8M0)", e);
        o->scale_type = NUM_F8_E8M0;
    } else if (kind == QS_NVFP4) {
        if (t->dtype != NUM_F8_E4M3) return quant__wrong_type(t, "F8_E4M3", e);
    } else if (t->dtype != NUM_F32 && t->dtype != NUM_BF16 && t->dtype != NUM_F16) {
        return quant__wrong_type(t, "BF16, F16 or F32", e);
    }
    return quant__borrow(o, t, &o->scales, e);
}

/* One float by name; 0 stays when it is absent and not needed. */
static int scalar(const job *j, const char *suffix, bool need, float *out, err *e)
{
    const ckpt_tensor *t;
    int rc = quant__tensor(j->q, j->module, suffix, need, &t, e);
    if (rc < 0 || !t) return rc;
    if (t->dtype != NUM_F32 && t->dtype != NUM_BF16 && t->dtype != NUM_F16 && t->dtype != NUM_I8)
        return quant__wrong_type(t, "a float", e);
    if (!quant__has_shape(t, 1, 1))
        return err_set(e, ERR_SHAPE, "%s: tensor '%s' must hold one value", t->path, t->name);
    num_decode_row(t->dtype, t->data, 1, out);
    if (!isfinite(*out) || (*out <= 0 && t->dtype != NUM_I8))
        return err_set(e, ERR_VALUE, "%s: '%s' is %g; it must be finite and positive", t->path,
                       t->name, (double)*out);
    return 0;
}

static int load_global(const job *j, err *e)
{
    float g = 0;
    int rc = scalar(j, "weight_global_scale", true, &g, e);
    if (rc < 0) return rc;
    j->out->n_global = 1;
    j->out->global_row[1] = j->out->N;
    j->out->global[0] = 1.0f / g;
    return 0;
}

/* Zero points packed along N: word [r, c] holds the rows from r*32/b on of column c. */
static int unpack_zeros(const job *j, const ckpt_tensor *t, int8_t *z, err *e)
{
    qtensor *o = j->out;
    int bits = num_infos[o->code].bits;
    int64_t G = o->scale_cols, N = o->scale_rows, R = words_dense(N, bits);
    bool fits, dense = is_dense(j, t->n_dims ? t->shape[0] : 0, N, bits, &fits);
    if (!fits || !quant__has_shape(t, t->shape[0], G)) return wrong_shape(j, t, R, G, e);
    R = t->shape[0];
    uint8_t *col = NULL, *codes = NULL;
    int rc = 0;
    TRY(mem_alloc((void **)&col, (size_t)R * 4, e));
    TRY(mem_alloc((void **)&codes, (size_t)N + 8, e));
    for (int64_t c = 0; c < G; c++) {
        for (int64_t r = 0; r < R; r++)
            memcpy(col + 4 * r, t->data + 4 * (size_t)(r * G + c), 4);
        unpack_row(col, bits, dense, (size_t)N, codes, num_bytes(o->code, (size_t)N));
        for (int64_t r = 0; r < N; r++) {
            int u = (int)num_get_bits(codes, (size_t)r, bits);
            z[r * G + c] = (int8_t)(u >= 1 << (bits - 1) ? u - (1 << bits) : u);
        }
    }
    rc = 0;
out:
    mem_free(col);
    mem_free(codes);
    return rc;
}

static int load_zeros(const job *j, err *e)
{
    const ckpt_tensor *t;
    qtensor *o = j->out;
    bool asym = j->g->spec.w.asym;
    int rc = quant__tensor(j->q, j->module, "weight_zero_point", asym, &t, e);
    if (rc < 0 || !t) return rc;
    if (t->dtype != NUM_I32 && t->dtype != NUM_I8) {
        if (!asym) return 0;
        return quant__wrong_type(t, "I32 (packed) or I8", e);
    }
    size_t n = (size_t)(o->scale_rows * o->scale_cols);
    void *p;
    rc = quant__own(o, n, 1, &p, e);
    if (rc < 0) return rc;
    if (t->dtype == NUM_I32) {
        rc = unpack_zeros(j, t, p, e);
    } else if (!quant__has_shape(t, o->scale_rows, o->scale_cols)) {
        rc = wrong_shape(j, t, o->scale_rows, o->scale_cols, e);
    } else {
        memcpy(p, t->data, n);
    }
    if (rc < 0) return rc;
    for (size_t i = 0; !asym && i < n; i++)
        if (((const int8_t *)p)[i])
            return err_set(e, ERR_FORMAT,
                           "%s: tensor '%s' holds zero points, but the config says symmetric",
                           t->path, t->name);
    if (asym) {
        o->zeros = p;
        o->zero_type = NUM_I8;
    }
    return 0;
}

static int load_act(const job *j, err *e)
{
    const qaxis *a = &j->g->spec.a;
    float g = 0;
    int rc = 0;
    if (a->gran == Q_TENSOR && !a->dynamic) {
        TRY(scalar(j, "input_scale", true, &j->out->input_scale, e));
        TRY(scalar(j, "input_zero_point", a->asym, &j->out->input_zero, e));
    }
    if (a->scale == QS_NVFP4) {
        TRY(scalar(j, "input_global_scale", true, &g, e));
        j->out->input_global = 1.0f / g;
    }
    rc = 0;
out:
    return rc;
}

/* Its nvfp4 is expanded in bf16; the rest in the type in which the model is loaded. */
void quant__ct_arith(const quant_ckpt *q, const qtensor *t, quant_arith *out)
{
    (void)q;
    if (t->spec.w.scale == QS_NVFP4) *out = (quant_arith){.type = NUM_BF16, .once = true};
}

int quant__ct_load(const quant_ckpt *q, const char *module, qtensor *out, err *e)
{
    int rc = 0;
    job j = {q, module, quant_group_of(q, module), out};
    if (!j.g || !strcmp(j.g->format, "dense"))
        return err_set(e, ERR_FORMAT,
                       "%s: module '%s' is quantized, but no config group describes it",
                       ckpt_path(q->c), module);
    TRY(load_codes(&j, e));
    TRY(load_g_idx(&j, e));
    TRY(load_scales(&j, e));
    if (j.g->spec.w.scale == QS_NVFP4) TRY(load_global(&j, e));
    if (num_infos[out->code].kind == 'I') TRY(load_zeros(&j, e));
    TRY(load_act(&j, e));
    rc = 0;
out:
    return rc;
}
