/* Weights of whole codes with scales beside them: one module into a qtensor.
 *
 *   codes    X.weight [N, K] or [E, N, K], or X itself where X names a stack of experts
 *            F8_E4M3, I8; nvfp4 and mxfp4 U8 [N, K/2], low nibble first; W4A16_AWQ U8 [N/2, K]
 *   scales   X.weight_scale, X.weight_scale_inv, X_scale_inv: one value, [N], [N, K/g] or
 *            [ceil(N/bn), ceil(K/bk)]; with E in front for stacks; all multiply. Dimensions of 1
 *            count for nothing: [], [1], [N, 1] and [N/128, 1, K/128, 1] are what they look like.
 *   second   X.weight_scale_2, one value, multiplies. A tensor that is stored fused (qkv_proj,
 *            gate_up_proj) may have one value for each of its parts: a row range each.
 *   input    X.input_scale, one value; X.pre_quant_scale [K] multiplies the input before it.
 *
 * W4A8_AWQ is read as it is run: w = E4M3(q * weight_scale / weight_scale_2) * weight_scale_2, so
 * its int4 codes become fp8 codes here. E4M3FNUZ bytes are half of E4M3FN; they keep their type
 * only where 0x7f or 0xff (240 there, NaN here) occurs.
 *
 * Refused: a grid that is not the one of the config's block size, NaN codes, scales that are zero
 * or not finite where one covers the whole weight, a missing static input scale. */
#include <stdio.h>
#include <string.h>
#include "quant/scaled.h"

typedef struct job {
    const quant_ckpt *q;
    const char *module;
    const quant__scheme *s;
    qspec spec;
    qtensor *out;
} job;

const quant_part quant__scaled_parts[] = {
    {".weight", QUANT_CODES},           {"", QUANT_CODES},
    {".weight_scale", QUANT_SCALES},    {".weight_scale_inv", QUANT_SCALES},
    {".weight_scale_2", QUANT_SCALES},  {".input_scale", QUANT_SCALES},
    {".input_scale_2", QUANT_SCALES},   {".activation_scale", QUANT_SCALES},
    {".pre_quant_scale", QUANT_SCALES}, {"_scale_inv", QUANT_SCALES},
    {"_scale", QUANT_SCALES},           {"_scale_2", QUANT_SCALES},
    {"_input_scale", QUANT_SCALES},     {".weight_zero_point", QUANT_ZEROS},
    {".input_zero_point", QUANT_ZEROS}, {NULL, QUANT_CODES}};

const quant__scheme *quant__scheme_named(const quant__scheme *list, int n, const char *name)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(list[i].name, name)) return &list[i];
    return NULL;
}

static bool is_fp8(num_dtype t)
{
    return t == NUM_F8_E4M3 || t == NUM_F8_E4M3FNUZ || t == NUM_F8_E5M2;
}

static bool is_float(num_dtype t)
{
    return t == NUM_F32 || t == NUM_BF16 || t == NUM_F16;
}

/* ---- finding ------------------------------------------------------------------------------------
 */

/* A stack of experts has no ".weight": its tensor is called as the module. */
static bool is_stack(const quant_ckpt *q, const char *module)
{
    char name[QUANT_NAME_MAX];
    const char *x = strstr(module, "experts.");
    const ckpt_tensor *t = x && !strstr(x, ".weight") ? ckpt_find(q->c, module) : NULL;
    if (!t || t->n_dims != 3 || (!is_fp8(t->dtype) && t->dtype != NUM_I8 && t->dtype != NUM_U8))
        return false;
    snprintf(name, sizeof name, "%.490s_scale_inv", module);
    if (ckpt_find(q->c, name)) return true;
    snprintf(name, sizeof name, "%.490s_scale", module);
    return ckpt_find(q->c, name) != NULL;
}

bool quant__scaled_has(const quant_ckpt *q, const char *module)
{
    const ckpt_tensor *t;
    if (quant__tensor(q, module, "weight", false, &t, NULL) < 0) return false;
    if (t) return is_fp8(t->dtype) || t->dtype == NUM_I8 || t->dtype == NUM_U8;
    return is_stack(q, module);
}

static int codes_tensor(const quant_ckpt *q, const char *module, const ckpt_tensor **out, err *e)
{
    if (is_stack(q, module)) return ckpt_need(q->c, module, out, e);
    return quant__tensor(q, module, "weight", true, out, e);
}

/* "X.weight_scale" or, of a stack, "X_scale". */
static int companion(const job *j, const char *suffix, bool need, const ckpt_tensor **out, err *e)
{
    char name[QUANT_NAME_MAX];
    if (!is_stack(j->q, j->module)) return quant__tensor(j->q, j->module, suffix, need, out, e);
    const char *tail = strncmp(suffix, "weight_", 7) ? suffix : suffix + 7;
    int n = snprintf(name, sizeof name, "%s_%s", j->module, tail);
    *out = NULL;
    if (n < 0 || (size_t)n >= sizeof name)
        return err_set(e, ERR_LIMIT, "module name of %zu bytes is too long", strlen(j->module));
    if (need) return ckpt_need(j->q->c, name, out, e);
    *out = ckpt_find(j->q->c, name);
    return 0;
}

static uint64_t count(const ckpt_tensor *t)
{
    uint64_t n = 1;
    for (int i = 0; i < t->n_dims; i++)
        n *= (uint64_t)t->shape[i];
    return n;
}

/* Equal shapes once the dimensions of 1 are left out. */
static bool squeezed(const ckpt_tensor *t, int64_t a, int64_t b, int64_t c)
{
    const int64_t want[3] = {a, b, c};
    int i = 0;
    for (int k = 0; k < 3; k++) {
        if (want[k] == 1) continue;
        while (i < t->n_dims && t->shape[i] == 1)
            i++;
        if (i == t->n_dims || t->shape[i++] != want[k]) return false;
    }
    while (i < t->n_dims && t->shape[i] == 1)
        i++;
    return i == t->n_dims;
}

/* Rows of the parts of a tensor that is stored fused, by its name and the config; 0 = not fused. */
static int fused_rows(const job *j, int64_t rows[3])
{
    const ckpt_config *c = ckpt_cfg(j->q->c);
    const char *dot = strrchr(j->module, '.'), *tail = dot ? dot + 1 : j->module;
    int64_t N = j->out->N;
    if (!strcmp(tail, "gate_up_proj") && N % 2 == 0) {
        rows[0] = rows[1] = N / 2;
        return 2;
    }
    if (strcmp(tail, "qkv_proj") && strcmp(tail, "Wqkv")) return 0;
    rows[0] = c->n_heads * c->head_dim;
    rows[1] = rows[2] = c->n_kv_heads * c->head_dim;
    return rows[0] > 0 && rows[1] > 0 && rows[0] + 2 * rows[1] == N ? 3 : 0;
}

/* ---- codes --------------------------------------------------------------------------------------
 */

/* Index of the first byte that is NaN in E4M3FN, or n. Eight at a time: with the sign masked off,
 * adding 1 carries into bit 7 only from 0x7f. */
static size_t find_7f(const uint8_t *p, size_t n)
{
    const uint64_t low = 0x7F7F7F7F7F7F7F7Fu, one = 0x0101010101010101u, top = ~low;
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        uint64_t any = 0, w;
        for (size_t k = 0; k < 64; k += 8) {
            memcpy(&w, p + i + k, 8);
            any |= (w & low) + one;
        }
        if (any & top) break;
    }
    while (i < n && (p[i] & 0x7F) != 0x7F)
        i++;
    return i;
}

static int nan_code(const ckpt_tensor *t, size_t at, int code, err *e)
{
    int64_t K = t->shape[t->n_dims - 1];
    return err_set(e, ERR_VALUE,
                   "%s: tensor '%s' holds the code 0x%02x at row %lld, column %lld, which is not a "
                   "number; the checkpoint is damaged or was written from weights that were not "
                   "finite",
                   t->path, t->name, code, (long long)at / K, (long long)at % K);
}

int quant__e4m3_finite(const ckpt_tensor *t, err *e)
{
    size_t n = (size_t)t->bytes, at = find_7f(t->data, n);
    return at < n ? nan_code(t, at, t->data[at], e) : 0;
}

/* FNUZ codes: kept as they are where 240 occurs, else the same bits as E4M3FN of half the scale. */
static int check_fp8(const job *j, const ckpt_tensor *t, bool *half, err *e)
{
    const quant__scaled *own = j->q->own;
    bool fnuz = t->dtype == NUM_F8_E4M3FNUZ || own->fnuz;
    *half = false;
    if (!fnuz) return quant__e4m3_finite(t, e);
    size_t n = (size_t)t->bytes, at = find_7f(t->data, n);
    const uint8_t *bad = memchr(t->data, 0x80, n);
    if (bad) return nan_code(t, (size_t)(bad - t->data), 0x80, e);
    if (at < n)
        j->out->code = NUM_F8_E4M3FNUZ;
    else
        *half = true;
    return 0;
}

/* Two rows a byte to one row of nibbles each. */
static int unpack_pairs(const job *j, const ckpt_tensor *t, err *e)
{
    qtensor *o = j->out;
    void *p;
    int rc = quant__own(o, (size_t)(o->E * o->N), o->row_bytes, &p, e);
    if (rc < 0) return rc;
    for (int64_t i = 0; i < o->E * o->N / 2; i++) {
        const uint8_t *src = t->data + (size_t)(i * o->K);
        uint8_t *lo = (uint8_t *)p + (size_t)(2 * i) * o->row_bytes, *hi = lo + o->row_bytes;
        for (int64_t k = 0; k < o->K; k += 2) {
            int a = src[k], b = k + 1 < o->K ? src[k + 1] : 0;
            lo[k / 2] = (uint8_t)((a & 15) | (b & 15) << 4);
            hi[k / 2] = (uint8_t)(a >> 4 | (b & 0xF0));
        }
    }
    o->codes = p;
    return 0;
}

static const char *wanted_type(num_dtype w)
{
    return w == NUM_F8_E4M3 ? "F8_E4M3" : w == NUM_I8 ? "I8" : "U8 (two 4-bit codes a byte)";
}

static bool type_fits(num_dtype w, num_dtype t)
{
    if (w == NUM_F8_E4M3) return t == NUM_F8_E4M3 || t == NUM_F8_E4M3FNUZ;
    return t == (w == NUM_I8 ? NUM_I8 : NUM_U8);
}

static void shape_of(const quant__scheme *s, num_dtype w, const ckpt_tensor *t, int64_t *E,
                     int64_t *N, int64_t *K)
{
    *E = t->n_dims == 3 ? t->shape[0] : 1;
    *N = t->shape[t->n_dims - 2] * (s->flags & SCHEME_ROW_PAIRS ? 2 : 1);
    *K = t->shape[t->n_dims - 1] * (w == NUM_F4_E2M1 ? 2 : 1);
}

/* The group size that the columns of the scales imply. */
static int free_group(job *j, int64_t E, int64_t N, int64_t K, err *e)
{
    const ckpt_tensor *t;
    int rc = companion(j, j->s->scale, true, &t, e);
    if (rc < 0) return rc;
    int64_t cols = t->n_dims ? t->shape[t->n_dims - 1] : 1;
    if (cols < 1 || K % cols || !squeezed(t, E, N, cols))
        return quant__wrong_shape(t, e,
                                  "a weight of [%lld, %lld] needs one row of scales a row, and as "
                                  "many columns as divide %lld",
                                  (long long)N, (long long)K, (long long)K);
    j->spec.w.group = (int32_t)(K / cols);
    return 0;
}

static int load_codes(job *j, bool *half, err *e)
{
    const ckpt_tensor *t;
    num_dtype w = j->spec.w.type;
    int64_t E, N, K;
    int rc = codes_tensor(j->q, j->module, &t, e);
    if (rc < 0) return rc;
    if (t->dtype == NUM_F8_E5M2)
        return err_set(e, ERR_DTYPE,
                       "%s: tensor '%s' is F8_E5M2; weights of that type are not read, expected %s",
                       t->path, t->name, wanted_type(w));
    if (!type_fits(w, t->dtype)) return quant__wrong_type(t, wanted_type(w), e);
    if ((t->n_dims != 2 && t->n_dims != 3) || !count(t))
        return quant__wrong_shape(t, e, "a weight has 2 dimensions, a stack of experts 3");
    shape_of(j->s, w, t, &E, &N, &K);
    if (K > INT32_MAX || N > INT32_MAX)
        return quant__wrong_shape(t, e, "at most %d rows and columns are read", INT32_MAX);
    if (j->s->flags & SCHEME_FREE_GROUP) rc = free_group(j, E, N, K, e);
    if (rc < 0) return rc;
    quant__set_grid(j->out, &j->spec, N, K);
    j->out->E = E;
    j->out->codes = t->data;
    if (j->s->flags & SCHEME_ROW_PAIRS) return unpack_pairs(j, t, e);
    return w == NUM_F8_E4M3 ? check_fp8(j, t, half, e) : 0;
}

/* ---- scales -------------------------------------------------------------------------------------
 */

static int check_type(const job *j, const ckpt_tensor *t, err *e)
{
    const quant__scaled *own = j->q->own;
    const qaxis *w = &j->spec.w;
    qtensor *o = j->out;
    o->scale_type = t->dtype;
    bool block = w->gran == Q_BLOCK, e8m0 = t->dtype == NUM_F8_E8M0;
    if (w->scale == QS_MX || (block && t->dtype == NUM_U8 && own->u8_scales)) {
        o->scale_type = NUM_F8_E8M0;
        return t->dtype == NUM_U8 || e8m0 ? 0 : quant__wrong_type(t, "U8 (E8M0)", e);
    }
    if (w->scale == QS_NVFP4)
        return t->dtype == NUM_F8_E4M3 ? 0 : quant__wrong_type(t, "F8_E4M3", e);
    if (is_float(t->dtype) || (block && e8m0)) return 0;
    return quant__wrong_type(t, block ? "F32, BF16, F16 or F8_E8M0" : "F32, BF16 or F16", e);
}

/* One value for all, one for each row, or one for each part of a fused tensor: the last two become
 * a scale a row, which loses nothing. */
static int tensor_scales(job *j, const ckpt_tensor *t, err *e)
{
    qtensor *o = j->out;
    int64_t rows[3];
    int parts = fused_rows(j, rows), rc = 0;
    float v[3];
    void *p;
    bool by_row = squeezed(t, o->E, o->N, 1);
    if (squeezed(t, o->E, 1, 1)) return quant__borrow(o, t, &o->scales, e);
    if (by_row) {
        TRY(quant__borrow(o, t, &o->scales, e));
    } else if (parts && squeezed(t, o->E, parts, 1)) {
        TRY(quant__own(o, (size_t)(o->E * o->N), sizeof(float), &p, e));
        float *at = p;
        for (int64_t x = 0; x < o->E; x++) {
            num_decode_row(t->dtype, t->data + num_bytes(t->dtype, (size_t)(x * parts)),
                           (size_t)parts, v);
            for (int i = 0; i < parts; i++)
                for (int64_t r = 0; r < rows[i]; r++)
                    *at++ = v[i];
        }
        o->scales = p;
        o->scale_type = NUM_F32;
    } else {
        return quant__wrong_shape(t, e,
                                  "one value covers the weight of [%lld, %lld]; one a row would do",
                                  (long long)o->N, (long long)o->K);
    }
    o->spec.w.gran = Q_CHANNEL;
    o->block_n = 1;
    o->scale_rows = o->N;
    rc = 0;
out:
    return rc;
}

/* All values of a float tensor are finite and positive. */
static int check_positive(const ckpt_tensor *t, err *e)
{
    size_t n = (size_t)count(t), size = num_bytes(t->dtype, 1);
    for (size_t i = 0; i < n; i++) {
        float v;
        num_decode_row(t->dtype, t->data + i * size, 1, &v);
        if (!isfinite(v) || v <= 0)
            return err_set(e, ERR_VALUE, "%s: '%s' is %g; it must be finite and positive", t->path,
                           t->name, (double)v);
    }
    return 0;
}

static int load_scales(job *j, err *e)
{
    const ckpt_tensor *t;
    qtensor *o = j->out;
    const qaxis *w = &j->spec.w;
    int rc = companion(j, j->s->scale, true, &t, e);
    if (rc < 0) return rc;
    rc = check_type(j, t, e);
    if (rc < 0) return rc;
    if (w->gran == Q_TENSOR) {
        rc = check_positive(t, e);
        return rc < 0 ? rc : tensor_scales(j, t, e);
    }
    if (!squeezed(t, o->E, o->scale_rows, o->scale_cols)) {
        buf spec = {0};
        qaxis_format(w, &spec);
        rc = quant__wrong_shape(t, e, "%s of [%lld, %lld] weights needs [%lld, %lld]", spec.data,
                                (long long)o->N, (long long)o->K, (long long)o->scale_rows,
                                (long long)o->scale_cols);
        buf_free(&spec);
        return rc;
    }
    return quant__borrow(o, t, &o->scales, e);
}

/* The scale grid as F32 of half the value. */
static int halve(qtensor *o, err *e)
{
    size_t n = (size_t)(o->E * o->scale_rows * o->scale_cols);
    void *p;
    int rc = quant__own(o, n, sizeof(float), &p, e);
    if (rc < 0) return rc;
    float *v = p;
    num_decode_row(o->scale_type, o->scales, n, v);
    for (size_t i = 0; i < n; i++)
        v[i] *= 0.5f;
    o->scales = v;
    o->scale_type = NUM_F32;
    return 0;
}

/* One value that all entries share: of experts, of the parts of a fused tensor. */
static int shared_value(const ckpt_tensor *t, const char *what, float *out, err *e)
{
    size_t n = (size_t)count(t), size = is_float(t->dtype) ? num_bytes(t->dtype, 1) : 0;
    if (!size) return quant__wrong_type(t, "F32, BF16 or F16", e);
    if (!n) return quant__wrong_shape(t, e, "expected one value");
    int rc = check_positive(t, e);
    if (rc < 0) return rc;
    num_decode_row(t->dtype, t->data, 1, out);
    for (size_t i = 1; i < n; i++)
        if (memcmp(t->data, t->data + i * size, size))
            return err_set(e, ERR_UNSUPPORTED,
                           "%s: '%s' holds %zu values that differ; one %s serves all rows here, "
                           "store the parts apart",
                           t->path, t->name, n, what);
    return 0;
}

static int load_global(const job *j, err *e)
{
    const ckpt_tensor *t;
    qtensor *o = j->out;
    int64_t rows[3];
    int rc = companion(j, j->s->global, true, &t, e), parts = fused_rows(j, rows);
    if (rc < 0) return rc;
    if (!is_float(t->dtype)) return quant__wrong_type(t, "F32, BF16 or F16", e);
    if (parts && o->E == 1 && squeezed(t, parts, 1, 1)) {
        rc = check_positive(t, e);
        num_decode_row(t->dtype, t->data, (size_t)parts, o->global);
        for (int i = 0; i < parts; i++)
            o->global_row[i + 1] = o->global_row[i] + rows[i];
        o->n_global = parts;
        return rc;
    }
    if (!squeezed(t, 1, 1, 1) && !squeezed(t, o->E, 1, 1))
        return quant__wrong_shape(t, e, "one value covers the weight");
    o->n_global = 1;
    o->global_row[1] = o->N;
    return shared_value(t, "second-level scale", &o->global[0], e);
}

/* int4 codes times their scales, rounded to fp8 in units of the second-level scale. */
static int frame_fp8(job *j, err *e)
{
    qtensor *o = j->out, in = *o;
    const float frame = o->global[0];
    void *p, *s;
    int rc = quant__own(o, (size_t)(o->E * o->N), (size_t)o->K, &p, e);
    if (rc >= 0) rc = quant__own(o, (size_t)o->E, sizeof frame, &s, e);
    if (rc < 0) return rc;
    if (in.n_global != 1)
        return err_set(e, ERR_UNSUPPORTED, "%s: %s with several second-level scales", j->module,
                       j->s->name);
    in.n_global = 0;
    for (int64_t r = 0; r < o->E * o->N; r++) {
        uint8_t *dst = (uint8_t *)p + (size_t)(r * o->K), code[16];
        for (int64_t k = 0; k < o->K; k++) {
            if (k % in.block_k == 0) {
                float scale = qtensor_scale(&in, r, k);
                for (int c = 0; c < 16; c++)
                    code[c] = (uint8_t)num_encode(NUM_F8_E4M3,
                                                  num_decode(NUM_I4, (uint32_t)c) * scale / frame);
            }
            dst[k] = code[num_get_bits(in.codes + (size_t)r * in.row_bytes, (size_t)k, 4)];
        }
    }
    qspec spec = o->spec;
    spec.w = (qaxis){.type = NUM_F8_E4M3, .gran = Q_TENSOR};
    quant__set_grid(o, &spec, in.N, in.K);
    o->E = in.E;
    o->codes = p;
    for (int64_t x = 0; x < o->E; x++)
        ((float *)s)[x] = frame;
    o->scales = s;
    o->scale_type = NUM_F32;
    o->n_global = 0;
    return 0;
}

/* ---- zero points and inputs ---------------------------------------------------------------------
 */

static int load_zeros(const job *j, err *e)
{
    const ckpt_tensor *t;
    qtensor *o = j->out;
    int rc = companion(j, "weight_zero_point", true, &t, e);
    if (rc < 0) return rc;
    if (t->dtype != NUM_I8) return quant__wrong_type(t, "I8", e);
    if (!squeezed(t, o->E, o->scale_rows, o->scale_cols))
        return quant__wrong_shape(t, e, "needs [%lld, %lld]", (long long)o->scale_rows,
                                  (long long)o->scale_cols);
    o->zeros = t->data;
    o->zero_type = NUM_I8;
    return 0;
}

static int load_pre_scale(const job *j, err *e)
{
    const ckpt_tensor *t;
    qtensor *o = j->out;
    void *p;
    int rc = companion(j, "pre_quant_scale", false, &t, e);
    if (rc < 0 || !t) return rc;
    if (!is_float(t->dtype)) return quant__wrong_type(t, "BF16, F16 or F32", e);
    if (!squeezed(t, o->K, 1, 1))
        return quant__wrong_shape(t, e, "needs one value for each of %lld columns",
                                  (long long)o->K);
    rc = quant__own(o, (size_t)o->K, sizeof(float), &p, e);
    if (rc < 0) return rc;
    num_decode_row(t->dtype, t->data, (size_t)o->K, p);
    o->pre_scale = p;
    return 0;
}

static int load_input(const job *j, err *e)
{
    const ckpt_tensor *t = NULL;
    const qaxis *a = &j->spec.a;
    bool fp4 = a->scale == QS_NVFP4;
    float v = 0;
    int rc = 0;
    if (!j->s->input || !qaxis_quantized(a) || (!fp4 && (a->dynamic || a->gran != Q_TENSOR)))
        return 0;
    TRY(companion(j, "activation_scale", false, &t, e));
    if (!t) TRY(companion(j, j->s->input, true, &t, e));
    TRY(shared_value(t, "input scale", &v, e));
    if (fp4)
        j->out->input_global = v;
    else
        j->out->input_scale = v;
    if (a->asym) {
        TRY(companion(j, "input_zero_point", true, &t, e));
        if (t->dtype != NUM_I8 || count(t) != 1) return quant__wrong_type(t, "one I8", e);
        num_decode_row(t->dtype, t->data, 1, &j->out->input_zero);
    }
    rc = 0;
out:
    return rc;
}

/* ---- one module ---------------------------------------------------------------------------------
 */

static int start(const quant_ckpt *q, const char *module, job *j, err *e)
{
    const quant__scaled *own = q->own;
    const quant_group *g = quant_group_of(q, module);
    const quant__scheme *s = g ? quant__scheme_named(own->schemes, own->n, g->format) : NULL;
    if (!s)
        return err_set(e, ERR_FORMAT, "%s: module '%s' is quantized, but %s does not describe it",
                       ckpt_path(q->c), module, q->where);
    *j = (job){.q = q, .module = module, .s = s, .spec = g->spec};
    return 0;
}

int quant__scaled_load(const quant_ckpt *q, const char *module, qtensor *out, err *e)
{
    int rc = 0;
    job j;
    bool half = false;
    TRY(start(q, module, &j, e));
    j.out = out;
    TRY(load_codes(&j, &half, e));
    TRY(load_scales(&j, e));
    if (half) TRY(halve(out, e));
    if (j.s->global) TRY(load_global(&j, e));
    if (j.spec.w.asym) TRY(load_zeros(&j, e));
    if (j.s->flags & SCHEME_FP8_FRAME) TRY(frame_fp8(&j, e));
    if (j.s->flags & SCHEME_PRE_SCALE) TRY(load_pre_scale(&j, e));
    TRY(load_input(&j, e));
    rc = 0;
out:
    return rc;
}

int quant__scaled_describe(const quant_ckpt *q, const char *module, quant_module *out, err *e)
{
    const ckpt_tensor *t;
    job j;
    int rc = start(q, module, &j, e);
    if (rc >= 0) rc = codes_tensor(q, module, &t, e);
    if (rc < 0) return rc;
    if ((t->n_dims != 2 && t->n_dims != 3) || !count(t))
        return quant__wrong_shape(t, e, "a weight has 2 dimensions, a stack of experts 3");
    shape_of(j.s, out->spec.w.type, t, &out->E, &out->N, &out->K);
    return 0;
}
