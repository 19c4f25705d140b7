/* The canonical quantized tensor: allocation, checks, element access, decoding, slices, byte
 * counts. */
#include "num/qtensor.h"
#include <stdlib.h>
#include <string.h>

void qtensor_free(qtensor *q)
{
    for (int i = 0; i < q->n_owned; i++)
        mem_free(q->owned[i]);
    *q = (qtensor){0};
}

void qtensor_plain(qtensor *q, num_dtype t, int64_t N, int64_t K, const void *data)
{
    *q = (qtensor){.spec = {{.type = t}, {.type = NUM_BF16}, {.type = NUM_BF16}},
                   .code = t,
                   .E = 1,
                   .N = N,
                   .K = K,
                   .codes = data,
                   .row_bytes = num_bytes(t, (size_t)K),
                   .block_n = N,
                   .block_k = K,
                   .zero_type = NUM_NONE,
                   .scale_type = NUM_NONE};
}

static int own(qtensor *q, void **out, size_t a, size_t b, err *e)
{
    size_t n;
    if (!mem_mul(a, b, &n))
        return err_set(e, ERR_LIMIT, "quantized tensor: %zu x %zu bytes is too large", a, b);
    if (q->n_owned == QT_MAX_OWNED) return err_set(e, ERR_FAIL, "quantized tensor: too many parts");
    int rc = mem_alloc(out, n, e);
    if (rc < 0) return rc;
    memset(*out, 0, n);
    q->owned[q->n_owned++] = *out;
    return 0;
}

/* Rows and columns that one scale covers. */
static void grid_of(const qaxis *w, int64_t N, int64_t K, int64_t *bn, int64_t *bk)
{
    *bn = w->gran == Q_TENSOR ? N : w->gran == Q_BLOCK ? w->block_n : 1;
    *bk = w->gran == Q_GROUP ? w->group : w->gran == Q_BLOCK ? w->block_k : K;
    if (*bn < 1) *bn = 1;
    if (*bk < 1) *bk = 1;
}

int qtensor_alloc(qtensor *q, const qspec *spec, num_dtype scale_type, int64_t E, int64_t N,
                  int64_t K, err *e)
{
    int rc = 0;
    void *p = NULL;
    *q = (qtensor){
        .spec = *spec, .code = spec->w.type, .E = E, .N = N, .K = K, .zero_type = NUM_NONE};
    q->scale_type = NUM_NONE;
    if (E < 1 || N < 1 || K < 1)
        return err_set(e, ERR_SHAPE, "quantized tensor: shape %lld x %lld x %lld", (long long)E,
                       (long long)N, (long long)K);
    grid_of(&spec->w, N, K, &q->block_n, &q->block_k);
    q->row_bytes = num_bytes(q->code, (size_t)K);
    TRY(own(q, &p, (size_t)(E * N), q->row_bytes, e));
    q->codes = p;
    if (qaxis_quantized(&spec->w)) {
        q->scale_type = spec->w.scale == QS_NVFP4 ? NUM_F8_E4M3
                        : spec->w.scale == QS_MX  ? NUM_F8_E8M0
                                                  : scale_type;
        q->scale_rows = (N + q->block_n - 1) / q->block_n;
        q->scale_cols = (K + q->block_k - 1) / q->block_k;
        size_t grid = (size_t)(E * q->scale_rows * q->scale_cols);
        TRY(own(q, &p, grid, (size_t)num_infos[q->scale_type].bits / 8, e));
        q->scales = p;
        if (spec->w.asym) {
            TRY(own(q, &p, grid, 1, e));
            q->zeros = p;
            q->zero_type = NUM_I8;
        }
    }
out:
    if (rc < 0) qtensor_free(q);
    return rc;
}

static int64_t grid_index(const qtensor *q, int64_t row, int64_t k)
{
    int64_t ex = row / q->N, n = row % q->N;
    int64_t g = q->g_idx ? q->g_idx[k] : k / q->block_k;
    return (ex * q->scale_rows + n / q->block_n) * q->scale_cols + g;
}

static float grid_value(num_dtype t, const void *p, int64_t i)
{
    float v;
    size_t b = (size_t)num_infos[t].bits / 8;
    num_decode_row(t, (const uint8_t *)p + (size_t)i * b, 1, &v);
    return v;
}

static float global_of(const qtensor *q, int64_t row)
{
    int64_t n = row % q->N;
    for (int i = 0; i < q->n_global; i++)
        if (n < q->global_row[i + 1] || i == q->n_global - 1) return q->global[i];
    return 1.0f;
}

int32_t qtensor_code(const qtensor *q, int64_t row, int64_t k)
{
    int bits = num_infos[q->code].bits;
    uint32_t c = num_get_bits(q->codes + (size_t)row * q->row_bytes, (size_t)k, bits);
    if (num_infos[q->code].kind != 'I') return (int32_t)c;
    uint32_t s = 1u << (bits - 1);
    return (int32_t)(c ^ s) - (int32_t)s;
}

float qtensor_scale(const qtensor *q, int64_t row, int64_t k)
{
    float s = q->scales ? grid_value(q->scale_type, q->scales, grid_index(q, row, k)) : 1.0f;
    return q->n_global ? s * global_of(q, row) : s;
}

float qtensor_zero(const qtensor *q, int64_t row, int64_t k)
{
    return q->zeros ? grid_value(q->zero_type, q->zeros, grid_index(q, row, k)) : 0.0f;
}

/* Codes of one row as values: table entries, integers or floats, before zero and scale. */
static void raw_row(const qtensor *q, int64_t row, float *out)
{
    const uint8_t *c = q->codes + (size_t)row * q->row_bytes;
    if (!q->table) {
        num_decode_row(q->code, c, (size_t)q->K, out);
        return;
    }
    int bits = num_infos[q->code].bits;
    for (int64_t k = 0; k < q->K; k++)
        out[k] = q->table[num_get_bits(c, (size_t)k, bits)];
}

void qtensor_decode_row_as(const qtensor *q, int64_t row, num_dtype t, float *out)
{
    raw_row(q, row, out);
    if (!q->scales) return;
    bool round = t != NUM_F32;
    float global = global_of(q, row);
    int64_t k = 0;
    while (k < q->K) {
        /* Run of columns with one scale. */
        int64_t at = grid_index(q, row, k), end = k + 1;
        if (q->g_idx)
            while (end < q->K && q->g_idx[end] == q->g_idx[k])
                end++;
        else
            end =
                (k / q->block_k + 1) * q->block_k < q->K ? (k / q->block_k + 1) * q->block_k : q->K;
        float s = grid_value(q->scale_type, q->scales, at);
        float z = q->zeros ? grid_value(q->zero_type, q->zeros, at) : 0.0f;
        if (q->n_global) s *= global;
        for (; k < end; k++) {
            float v = out[k] - z;
            out[k] = round ? num_round(t, num_round(t, v) * s) : v * s;
        }
    }
}

void qtensor_decode_row(const qtensor *q, int64_t row, float *out)
{
    qtensor_decode_row_as(q, row, NUM_F32, out);
}

/* ---- checks -------------------------------------------------------------------------------------
 */

static int check_scales(const qtensor *q, const char *name, err *e)
{
    int64_t n = q->E * q->scale_rows * q->scale_cols;
    size_t b = (size_t)num_infos[q->scale_type].bits / 8;
    float v[256];
    for (int64_t i = 0; i < n; i += 256) {
        size_t m = (size_t)(n - i < 256 ? n - i : 256);
        num_decode_row(q->scale_type, (const uint8_t *)q->scales + (size_t)i * b, m, v);
        for (size_t j = 0; j < m; j++)
            if (!isfinite(v[j]))
                return err_set(e, ERR_VALUE,
                               "%s: scale %lld (row %lld, column %lld) is %s; the checkpoint is "
                               "damaged or was written by a failed quantization",
                               name, (long long)(i + (int64_t)j),
                               (long long)((i + (int64_t)j) / q->scale_cols),
                               (long long)((i + (int64_t)j) % q->scale_cols),
                               isnan(v[j]) ? "NaN" : "infinite");
    }
    for (int i = 0; i < q->n_global; i++)
        if (!isfinite(q->global[i]) || q->global[i] == 0)
            return err_set(e, ERR_VALUE,
                           "%s: second-level scale is %g; it must be finite and not zero", name,
                           (double)q->global[i]);
    return 0;
}

int qtensor_check(const qtensor *q, const char *name, err *e)
{
    if (q->E < 1 || q->N < 1 || q->K < 1)
        return err_set(e, ERR_SHAPE, "%s: shape %lld x %lld is empty", name, (long long)q->N,
                       (long long)q->K);
    if (q->row_bytes < num_bytes(q->code, (size_t)q->K))
        return err_set(e, ERR_SHAPE, "%s: rows of %zu bytes cannot hold %lld codes", name,
                       q->row_bytes, (long long)q->K);
    if (!q->scales) return 0;
    if (q->block_n < 1 || q->block_k < 1 || q->scale_rows != (q->N + q->block_n - 1) / q->block_n)
        return err_set(e, ERR_SHAPE, "%s: %lld scale rows for %lld rows in blocks of %lld", name,
                       (long long)q->scale_rows, (long long)q->N, (long long)q->block_n);
    if (!q->g_idx && q->scale_cols != (q->K + q->block_k - 1) / q->block_k)
        return err_set(e, ERR_SHAPE, "%s: %lld scales along K for %lld columns in groups of %lld",
                       name, (long long)q->scale_cols, (long long)q->K, (long long)q->block_k);
    for (int64_t k = 0; q->g_idx && k < q->K; k++)
        if (q->g_idx[k] < 0 || q->g_idx[k] >= q->scale_cols)
            return err_set(e, ERR_VALUE, "%s: g_idx[%lld] is %d, but there are %lld groups", name,
                           (long long)k, q->g_idx[k], (long long)q->scale_cols);
    return check_scales(q, name, e);
}

/* ---- slices -------------------------------------------------------------------------------------
 */

static int slice_rows(const qtensor *q, int64_t lo, int64_t hi, qtensor *out, err *e)
{
    if (q->E != 1) return err_set(e, ERR_UNSUPPORTED, "slice: take one expert before rows");
    int64_t bn = q->scales ? q->block_n : 1;
    if (q->scales && q->scale_rows > 1 && (lo % bn || (hi % bn && hi != q->N)))
        return err_set(e, ERR_SHAPE, "slice: rows %lld to %lld do not fall on blocks of %lld",
                       (long long)lo, (long long)hi, (long long)bn);
    out->codes = q->codes + (size_t)lo * q->row_bytes;
    out->N = hi - lo;
    if (q->scales && q->scale_rows > 1) {
        size_t at = (size_t)(lo / bn * q->scale_cols);
        out->scales = (const uint8_t *)q->scales + at * (size_t)(num_infos[q->scale_type].bits / 8);
        if (q->zeros)
            out->zeros =
                (const uint8_t *)q->zeros + at * (size_t)(num_infos[q->zero_type].bits / 8);
        out->scale_rows = (out->N + bn - 1) / bn;
    } else if (q->scales) {
        out->block_n = out->N;
    }
    for (int i = 0; i <= q->n_global && q->n_global; i++) {
        int64_t r = q->global_row[i] - lo;
        out->global_row[i] = r < 0 ? 0 : r > out->N ? out->N : r;
    }
    return 0;
}

int qtensor_slice(const qtensor *q, char axis, int64_t lo, int64_t hi, qtensor *out, err *e)
{
    int64_t size = axis == 'N' ? q->N : axis == 'K' ? q->K : q->E;
    *out = *q;
    out->n_owned = 0;
    if (lo < 0 || hi > size || lo >= hi)
        return err_set(e, ERR_SHAPE, "slice: %lld to %lld of %lld along %c", (long long)lo,
                       (long long)hi, (long long)size, axis);
    if (axis == 'N') return slice_rows(q, lo, hi, out, e);
    if (axis == 'E') {
        if (hi - lo != 1 && q->n_global)
            return err_set(e, ERR_UNSUPPORTED, "slice: one expert at a time");
        size_t at = (size_t)(lo * q->scale_rows * q->scale_cols);
        out->E = hi - lo;
        out->codes = q->codes + (size_t)(lo * q->N) * q->row_bytes;
        if (q->scales)
            out->scales =
                (const uint8_t *)q->scales + at * (size_t)(num_infos[q->scale_type].bits / 8);
        if (q->zeros)
            out->zeros =
                (const uint8_t *)q->zeros + at * (size_t)(num_infos[q->zero_type].bits / 8);
        return 0;
    }
    int bits = num_infos[q->code].bits;
    if (lo * bits % 8)
        return err_set(e, ERR_SHAPE, "slice: column %lld does not begin on a byte", (long long)lo);
    if (q->scales && q->scale_cols > 1)
        return err_set(
            e, ERR_UNSUPPORTED,
            "slice: columns of a tensor with several scales along K need a copy of the scales");
    out->codes = q->codes + (size_t)(lo * bits / 8);
    out->K = hi - lo;
    if (q->g_idx) out->g_idx = q->g_idx + lo;
    if (q->pre_scale) out->pre_scale = q->pre_scale + lo;
    if (q->scales) out->block_k = out->K;
    return 0;
}

void qtensor_bytes(const qtensor *q, qbytes *add)
{
    uint64_t rows = (uint64_t)(q->E * q->N), codes = rows * q->row_bytes;
    uint64_t tight = (rows * (uint64_t)q->K * (uint64_t)num_infos[q->code].bits + 7) / 8;
    uint64_t grid = (uint64_t)(q->E * q->scale_rows * q->scale_cols), before = add->total;
    if (!q->scales) {
        add->unquantized += codes;
        add->total += codes;
        return;
    }
    add->codes += tight;
    add->padding += codes - tight;
    add->scales += grid * (uint64_t)num_infos[q->scale_type].bits / 8 + 4 * (uint64_t)q->n_global;
    if (q->zeros) add->zeros += grid * (uint64_t)num_infos[q->zero_type].bits / 8;
    add->total = before + codes + grid * (uint64_t)num_infos[q->scale_type].bits / 8 +
                 4 * (uint64_t)q->n_global +
                 (q->zeros ? grid * (uint64_t)num_infos[q->zero_type].bits / 8 : 0);
}
