/* The canonical quantized tensor: allocation, checks, decoding, views.
 *
 * One formula, given in the header, is applied here in one place for rows (qtensor_decode_row) and
 * in one for single elements (qtensor_code, _scale, _zero); tests hold them against each other.
 * Rows are counted over all experts: row = e*N + n, scale row = e*scale_rows + n/block_n, and the
 * global factor belongs to n. Checks refuse what would make a kernel read outside (grid smaller
 * than its shape, g_idx out of range, short rows) or compute nonsense (a scale that is NaN or
 * infinite). Views of rows and experts borrow, cuts of columns copy their codes and their part of
 * the scale grid; either must fall on the borders of what a scale covers.
 */
#include "num/qtensor.h"
#include <stdio.h>
#include <string.h>

/* ---- making and freeing ------------------------------------------------------------------------
 */

void qtensor_free(qtensor *q)
{
    for (int i = 0; i < q->n_owned; i++)
        mem_free(q->owned[i]);
    *q = (qtensor){0};
}

void qtensor_plain(qtensor *q, num_dtype t, int64_t N, int64_t K, const void *data)
{
    *q = (qtensor){0};
    qaxis plain = {.type = t, .gran = Q_NONE}, other = {.type = NUM_BF16, .gran = Q_NONE};
    q->spec = (qspec){plain, other, other};
    q->code = t;
    q->E = 1;
    q->N = N;
    q->K = K;
    q->codes = data;
    q->row_bytes = num_bytes(t, (size_t)K);
    q->scale_type = q->zero_type = NUM_NONE;
    q->block_n = N > 0 ? N : 1;
    q->block_k = K > 0 ? K : 1;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

/* What one scale covers, and from it the grid. */
static void set_grid(qtensor *q, const qaxis *w)
{
    q->block_n = w->gran == Q_TENSOR ? q->N : w->gran == Q_BLOCK ? w->block_n : 1;
    q->block_k = w->gran == Q_BLOCK ? w->block_k : w->gran == Q_GROUP ? w->group : q->K;
    q->scale_rows = ceil_div(q->N, q->block_n);
    q->scale_cols = ceil_div(q->K, q->block_k);
}

/* Zeroed memory of a*b*c*size bytes that q owns. */
static int own(qtensor *q, void **out, int64_t a, int64_t b, int64_t c, size_t size, err *e)
{
    size_t n;
    if (!mem_mul((size_t)a, (size_t)b, &n) || !mem_mul(n, (size_t)c, &n) || !mem_mul(n, size, &n))
        return err_set(e, ERR_NOMEM, "out of memory: a tensor of %lld x %lld x %lld overflows",
                       (long long)a, (long long)b, (long long)c);
    int rc = mem_alloc_huge(out, n, e);
    if (rc < 0) return rc;
    memset(*out, 0, n);
    q->owned[q->n_owned++] = *out;
    return 0;
}

static bool shape_is_sane(int64_t E, int64_t N, int64_t K)
{
    const int64_t max = (int64_t)1 << 40;
    return E >= 1 && N >= 1 && K >= 1 && E <= max && N <= max && K <= max;
}

/* The table of a code type that is an index into one. */
static const float *builtin_table(num_dtype t)
{
    return t == NUM_NF4 ? num_nf4_table : t == NUM_BNB_FP4 ? num_bnb_fp4_table : NULL;
}

int qtensor_alloc(qtensor *q, const qspec *spec, num_dtype scale_type, int64_t E, int64_t N,
                  int64_t K, err *e)
{
    const qaxis *w = &spec->w;
    int rc = 0;
    void *p = NULL;
    *q = (qtensor){0};
    if (!shape_is_sane(E, N, K))
        return err_set(e, ERR_SHAPE, "a quantized tensor cannot have shape [%lld, %lld, %lld]",
                       (long long)E, (long long)N, (long long)K);
    if ((w->gran == Q_GROUP && w->group < 1) ||
        (w->gran == Q_BLOCK && (w->block_n < 1 || w->block_k < 1)))
        return err_set(e, ERR_VALUE, "a weight group or block must have a size of at least 1");
    qtensor_plain(q, w->type, N, K, NULL);
    q->spec = *spec;
    q->E = E;
    TRY(own(q, &p, E, N, (int64_t)q->row_bytes, 1, e));
    q->codes = p;
    if (!qaxis_quantized(w)) return 0;
    set_grid(q, w);
    q->scale_type = w->scale == QS_NVFP4 ? NUM_F8_E4M3
                    : w->scale == QS_MX  ? NUM_F8_E8M0
                                         : scale_type;
    TRY(own(q, &p, E, q->scale_rows, q->scale_cols, num_bytes(q->scale_type, 1), e));
    q->scales = p;
    if (w->asym) {
        q->zero_type = NUM_I8;
        TRY(own(q, &p, E, q->scale_rows, q->scale_cols, 1, e));
        q->zeros = p;
    }
    q->table = builtin_table(w->type);
out:
    if (rc < 0) qtensor_free(q);
    return rc;
}

/* ---- single elements ---------------------------------------------------------------------------
 */

/* Element i of an array of whole-byte elements; NUM_NONE counts as absent. */
static float element_at(num_dtype t, const void *base, int64_t i)
{
    float v;
    num_decode_row(t, (const uint8_t *)base + num_bytes(t, 1) * (size_t)i, 1, &v);
    return v;
}

static int64_t group_of(const qtensor *q, int64_t k)
{
    return q->g_idx ? q->g_idx[k] : k / q->block_k;
}

/* First entry of the scale row that belongs to a row. */
static int64_t grid_row(const qtensor *q, int64_t row)
{
    return (row / q->N * q->scale_rows + row % q->N / q->block_n) * q->scale_cols;
}

static int64_t grid_at(const qtensor *q, int64_t row, int64_t k)
{
    return grid_row(q, row) + (q->flat ? (row % q->N * q->K + k) / q->block_k : group_of(q, k));
}

static float global_of(const qtensor *q, int64_t row)
{
    int64_t n = row % q->N;
    for (int i = 0; i < q->n_global; i++)
        if (n < q->global_row[i + 1]) return q->global[i];
    return 1.0f;
}

int32_t qtensor_code(const qtensor *q, int64_t row, int64_t k)
{
    const uint8_t *p = q->codes + (size_t)row * q->row_bytes;
    const num_info *f = &num_infos[q->code];
    if (f->bits == 32) {
        int32_t v;
        memcpy(&v, p + 4 * (size_t)k, 4);
        return v;
    }
    if (f->bits > 16) return 0;
    uint32_t v = num_get_bits(p, (size_t)k, f->bits), top = 1u << (f->bits - 1);
    return f->kind == 'I' && (v & top) ? (int32_t)v - (int32_t)(2 * top) : (int32_t)v;
}

float qtensor_scale(const qtensor *q, int64_t row, int64_t k)
{
    float s = q->scales ? element_at(q->scale_type, q->scales, grid_at(q, row, k)) : 1;
    return s * global_of(q, row);
}

float qtensor_zero(const qtensor *q, int64_t row, int64_t k)
{
    return q->zeros ? element_at(q->zero_type, q->zeros, grid_at(q, row, k)) : 0;
}

/* ---- rows --------------------------------------------------------------------------------------
 */

/* The values of the codes of one row, not scaled. */
static void decode_codes(const qtensor *q, int64_t row, float *out)
{
    const uint8_t *p = q->codes + (size_t)row * q->row_bytes;
    if (!q->table) {
        num_decode_row(q->code, p, (size_t)q->K, out);
        return;
    }
    int bits = num_infos[q->code].bits;
    for (int64_t k = 0; k < q->K; k++)
        out[k] = q->table[num_get_bits(p, (size_t)k, bits)];
}

void qtensor_decode_row(const qtensor *q, int64_t row, float *out)
{
    qtensor_decode_row_as(q, row, NUM_F32, out);
}

/* Columns [lo,hi), which share scale s and zero z: in f32, in place. */
static void scale_run(float *v, int64_t lo, int64_t hi, float z, float s, float global)
{
    for (int64_t k = lo; k < hi; k++)
        v[k] = (v[k] - z) * s * global;
}

/* The same with every step rounded to t. */
static void scale_run_as(num_dtype t, float *v, int64_t lo, int64_t hi, float z, float s,
                         float global)
{
    for (int64_t k = lo; k < hi; k++)
        v[k] = num_round(t, num_round(t, num_round(t, v[k] - z) * s) * global);
}

void qtensor_decode_row_as(const qtensor *q, int64_t row, num_dtype t, float *out)
{
    decode_codes(q, row, out);
    float global = global_of(q, row);
    bool integer = num_infos[q->code].kind == 'I';
    int64_t skip = q->flat ? row % q->N * q->K % q->block_k : 0; /* of the first block of the row */
    if (!q->scales && !q->zeros && !q->n_global && t == NUM_F32) return;
    for (int64_t lo = 0, hi; lo < q->K; lo = hi) {
        if (q->g_idx)
            for (hi = lo + 1; hi < q->K && q->g_idx[hi] == q->g_idx[lo]; hi++) {
            }
        else
            hi = q->K - lo > q->block_k - skip ? lo + q->block_k - skip : q->K;
        skip = 0;
        int64_t at = grid_at(q, row, lo);
        float s = q->scales ? element_at(q->scale_type, q->scales, at) : 1;
        float z = q->zeros ? element_at(q->zero_type, q->zeros, at) : 0;
        if (t == NUM_F32)
            scale_run(out, lo, hi, z, integer ? s : s * global, integer ? global : 1.0f);
        else
            scale_run_as(t, out, lo, hi, z, s, global);
    }
}

/* ---- checks ------------------------------------------------------------------------------------
 */

static int check_shape(const qtensor *q, const char *name, err *e)
{
    if (!shape_is_sane(q->E, q->N, q->K))
        return err_set(e, ERR_SHAPE, "%s: impossible shape [%lld, %lld, %lld]", name,
                       (long long)q->E, (long long)q->N, (long long)q->K);
    if (q->code < 0 || q->code >= NUM_COUNT || !q->codes)
        return err_set(e, ERR_MISSING, "%s: has no codes", name);
    size_t need = num_bytes(q->code, (size_t)q->K), total;
    if (q->row_bytes < need)
        return err_set(e, ERR_SHAPE, "%s: a row has %zu bytes, %lld codes of %s need %zu", name,
                       q->row_bytes, (long long)q->K, num_infos[q->code].name, need);
    if (!mem_mul((size_t)q->E, (size_t)q->N, &total) || !mem_mul(total, q->row_bytes, &total) ||
        total > PTRDIFF_MAX)
        return err_set(e, ERR_LIMIT, "%s: size overflows", name);
    if (q->table && num_infos[q->code].bits > 8)
        return err_set(e, ERR_DTYPE, "%s: %s codes cannot index a table", name,
                       num_infos[q->code].name);
    return 0;
}

static int check_grid(const qtensor *q, const char *name, err *e)
{
    if (q->block_n < 1 || q->block_k < 1 || q->scale_rows < 1 || q->scale_cols < 1)
        return err_set(e, ERR_SHAPE, "%s: impossible scale grid [%lld, %lld] of %lld x %lld blocks",
                       name, (long long)q->scale_rows, (long long)q->scale_cols,
                       (long long)q->block_n, (long long)q->block_k);
    int64_t rows = ceil_div(q->N, q->block_n), cols = ceil_div(q->K, q->block_k);
    if (q->flat) cols = ceil_div(q->N * q->K, q->block_k);
    if (q->flat && (q->zeros || q->g_idx || q->block_n != q->N))
        return err_set(e, ERR_SHAPE, "%s: blocks that cross rows have no zeros, order or row tiles",
                       name);
    if (q->scale_rows != rows || (!q->g_idx && q->scale_cols != cols))
        return err_set(e, ERR_SHAPE,
                       "%s: scales are [%lld, %lld], a weight of [%lld, %lld] needs [%lld, %lld]",
                       name, (long long)q->scale_rows, (long long)q->scale_cols, (long long)q->N,
                       (long long)q->K, (long long)rows, (long long)cols);
    size_t total;
    if (!mem_mul((size_t)q->E, (size_t)q->scale_rows, &total) ||
        !mem_mul(total, (size_t)q->scale_cols, &total) || total > PTRDIFF_MAX / 8)
        return err_set(e, ERR_LIMIT, "%s: scale grid overflows", name);
    for (int64_t k = 0; q->g_idx && k < q->K; k++)
        if (q->g_idx[k] < 0 || q->g_idx[k] >= q->scale_cols)
            return err_set(e, ERR_VALUE, "%s: g_idx[%lld] is %d, there are %lld groups", name,
                           (long long)k, q->g_idx[k], (long long)q->scale_cols);
    return 0;
}

/* All entries of a grid must be finite numbers. */
static int check_finite(const qtensor *q, const char *name, const char *what, num_dtype t,
                        const void *data, err *e)
{
    if (!data) return 0;
    if (t < 0 || t >= NUM_COUNT || num_infos[t].bits < 8)
        return err_set(e, ERR_DTYPE, "%s: %ss of an unsuitable type", name, what);
    if (num_infos[t].kind == 'I' || num_infos[t].kind == 'U') return 0;
    int64_t n = q->E * q->scale_rows * q->scale_cols;
    float v[256];
    for (int64_t i = 0; i < n; i += 256) {
        int64_t m = n - i < 256 ? n - i : 256;
        num_decode_row(t, (const uint8_t *)data + num_bytes(t, 1) * (size_t)i, (size_t)m, v);
        for (int64_t j = 0; j < m; j++)
            if (!isfinite(v[j]))
                return err_set(e, ERR_VALUE,
                               "%s: %s [%lld, %lld] is %g; the checkpoint is damaged or was "
                               "written from a weight that was not finite",
                               name, what, (long long)((i + j) / q->scale_cols),
                               (long long)((i + j) % q->scale_cols), (double)v[j]);
    }
    return 0;
}

static int check_global(const qtensor *q, const char *name, err *e)
{
    if (q->n_global < 0 || q->n_global > QT_MAX_GLOBAL)
        return err_set(e, ERR_LIMIT, "%s: %d global scales, at most %d fit", name, q->n_global,
                       QT_MAX_GLOBAL);
    for (int i = 0; i < q->n_global; i++) {
        if (!isfinite(q->global[i]))
            return err_set(e, ERR_VALUE, "%s: global scale %d is %g", name, i,
                           (double)q->global[i]);
        if (q->global_row[i + 1] <= q->global_row[i])
            return err_set(e, ERR_SHAPE, "%s: global scale %d covers no rows", name, i);
    }
    if (q->n_global && (q->global_row[0] != 0 || q->global_row[q->n_global] != q->N))
        return err_set(e, ERR_SHAPE, "%s: global scales cover rows %lld to %lld of %lld", name,
                       (long long)q->global_row[0], (long long)q->global_row[q->n_global],
                       (long long)q->N);
    return 0;
}

int qtensor_check(const qtensor *q, const char *name, err *e)
{
    int rc = 0;
    TRY(check_shape(q, name, e));
    if (q->scales || q->zeros || q->g_idx) TRY(check_grid(q, name, e));
    TRY(check_finite(q, name, "scale", q->scale_type, q->scales, e));
    TRY(check_finite(q, name, "zero point", q->zero_type, q->zeros, e));
    TRY(check_global(q, name, e));
    for (int64_t k = 0; q->pre_scale && k < q->K; k++)
        if (!isfinite(q->pre_scale[k]))
            return err_set(e, ERR_VALUE, "%s: pre_scale[%lld] is %g", name, (long long)k,
                           (double)q->pre_scale[k]);
    if (!isfinite(q->input_scale) || !isfinite(q->input_zero) || !isfinite(q->input_global))
        return err_set(e, ERR_VALUE, "%s: the input scale is not a finite number", name);
out:
    return rc;
}

/* ---- views -------------------------------------------------------------------------------------
 */

static int crosses_rows(const qtensor *q, err *e)
{
    return err_set(e, ERR_UNSUPPORTED,
                   "blocks of %lld run over the ends of rows of %lld: such a weight is not taken "
                   "apart",
                   (long long)q->block_k, (long long)q->K);
}

static const void *advance(const void *p, num_dtype t, int64_t elements)
{
    return p ? (const uint8_t *)p + num_bytes(t, 1) * (size_t)elements : NULL;
}

static int slice_rows(qtensor *v, int64_t lo, int64_t hi, err *e)
{
    if (v->flat) return crosses_rows(v, e);
    if (v->E != 1)
        return err_set(e, ERR_UNSUPPORTED, "rows of %lld experts: cut out one expert first",
                       (long long)v->E);
    bool one = v->block_n >= v->N; /* one scale row for all: any cut is fine */
    if ((v->scales || v->zeros) && !one && (lo % v->block_n || (hi % v->block_n && hi != v->N)))
        return err_set(e, ERR_UNSUPPORTED, "rows %lld to %lld: a scale covers %lld rows, cut there",
                       (long long)lo, (long long)hi, (long long)v->block_n);
    v->codes += (size_t)lo * v->row_bytes;
    if (one) {
        v->block_n = hi - lo;
    } else {
        int64_t skip = lo / v->block_n * v->scale_cols;
        v->scales = advance(v->scales, v->scale_type, skip);
        v->zeros = advance(v->zeros, v->zero_type, skip);
        v->scale_rows = ceil_div(hi - lo, v->block_n);
    }
    const qtensor whole = *v;
    v->n_global = 0;
    for (int i = 0; i < whole.n_global; i++) {
        int64_t a = whole.global_row[i] < lo ? lo : whole.global_row[i];
        int64_t b = whole.global_row[i + 1] > hi ? hi : whole.global_row[i + 1];
        if (a >= b) continue;
        v->global[v->n_global] = whole.global[i];
        v->global_row[v->n_global] = a - lo;
        v->global_row[++v->n_global] = b - lo;
    }
    v->N = hi - lo;
    return 0;
}

/* A copy of grid columns [lo,hi) of all scale rows: a grid is dense, so a cut of one cannot borrow.
 */
static int cut_grid(qtensor *v, num_dtype t, const void **data, int64_t lo, int64_t hi, err *e)
{
    if (!*data) return 0;
    void *p;
    size_t one = num_bytes(t, 1), from = (size_t)v->scale_cols * one, to = (size_t)(hi - lo) * one;
    int rc = own(v, &p, v->E, v->scale_rows, hi - lo, one, e);
    if (rc < 0) return rc;
    for (int64_t r = 0; r < v->E * v->scale_rows; r++)
        memcpy((uint8_t *)p + (size_t)r * to,
               (const uint8_t *)*data + (size_t)r * from + (size_t)lo * one, to);
    *data = p;
    return 0;
}

/* A copy of the codes of columns [lo,hi): rows lie close together again, as kernels want them. */
static int copy_codes(qtensor *v, int64_t lo, int64_t hi, err *e)
{
    void *p;
    int bits = num_infos[v->code].bits;
    size_t bytes = num_bytes(v->code, (size_t)(hi - lo));
    bool whole = lo * bits % 8 == 0 && (hi * bits % 8 == 0 || hi == v->K);
    int rc = own(v, &p, v->E, v->N, (int64_t)bytes, 1, e);
    if (rc < 0) return rc;
    for (int64_t r = 0; r < v->E * v->N; r++) {
        const uint8_t *from = v->codes + (size_t)r * v->row_bytes;
        uint8_t *to = (uint8_t *)p + (size_t)r * bytes;
        if (whole) {
            memcpy(to, from + num_bytes(v->code, (size_t)lo), bytes);
            continue;
        }
        for (int64_t k = lo; k < hi; k++)
            num_put_bits(to, (size_t)(k - lo), bits, num_get_bits(from, (size_t)k, bits));
    }
    v->codes = p;
    v->row_bytes = bytes;
    return 0;
}

/* With act-order the grid stays whole: any column may belong to any group. */
static int slice_columns(qtensor *v, int64_t lo, int64_t hi, err *e)
{
    if (v->flat) return crosses_rows(v, e);
    bool grouped = !v->g_idx && (v->scales || v->zeros) && v->block_k < v->K;
    int rc = 0;
    if (grouped && (lo % v->block_k || (hi % v->block_k && hi != v->K)))
        return err_set(e, ERR_UNSUPPORTED,
                       "columns %lld to %lld: a scale covers %lld columns, cut there",
                       (long long)lo, (long long)hi, (long long)v->block_k);
    TRY(copy_codes(v, lo, hi, e));
    if (v->pre_scale) v->pre_scale += lo;
    if (v->g_idx) v->g_idx += lo;
    if (grouped) {
        int64_t a = lo / v->block_k, b = ceil_div(hi, v->block_k);
        TRY(cut_grid(v, v->scale_type, &v->scales, a, b, e));
        TRY(cut_grid(v, v->zero_type, &v->zeros, a, b, e));
        v->scale_cols = b - a;
    } else if (!v->g_idx) {
        v->block_k = hi - lo;
    }
    v->K = hi - lo;
out:
    return rc;
}

int qtensor_slice(const qtensor *q, char axis, int64_t lo, int64_t hi, qtensor *out, err *e)
{
    int64_t size = axis == 'E' ? q->E : axis == 'N' ? q->N : q->K;
    if (lo < 0 || lo >= hi || hi > size)
        return err_set(e, ERR_VALUE, "slice %lld to %lld is outside of 0 to %lld along %c",
                       (long long)lo, (long long)hi, (long long)size, axis);
    qtensor v = *q;
    v.n_owned = 0;
    memset(v.owned, 0, sizeof v.owned);
    int rc = 0;
    if (axis == 'E') {
        v.codes += (size_t)(lo * q->N) * q->row_bytes;
        v.scales = advance(v.scales, v.scale_type, lo * q->scale_rows * q->scale_cols);
        v.zeros = advance(v.zeros, v.zero_type, lo * q->scale_rows * q->scale_cols);
        v.E = hi - lo;
    } else {
        rc = axis == 'N' ? slice_rows(&v, lo, hi, e) : slice_columns(&v, lo, hi, e);
    }
    if (rc < 0)
        qtensor_free(&v);
    else
        *out = v;
    return rc;
}

/* ---- rearranged copies -------------------------------------------------------------------------
 */

static int own_copy(qtensor *q, const void *src, int64_t n, size_t size, const void **out, err *e)
{
    void *p;
    if (!src) return 0;
    int rc = own(q, &p, n, 1, 1, size, e);
    if (rc < 0) return rc;
    memcpy(p, src, (size_t)n * size);
    *out = p;
    return 0;
}

/* Rows of a grid of `rows` rows of `bytes` for each of E experts: row map[i]/per of each. */
static int gather(qtensor *q, const void **data, int64_t src_rows, size_t bytes, const int32_t *map,
                  int64_t n, int64_t per, err *e)
{
    void *p;
    const uint8_t *src = *data;
    if (!src) return 0;
    int rc = own(q, &p, q->E, n, (int64_t)bytes, 1, e);
    if (rc < 0) return rc;
    for (int64_t x = 0; x < q->E; x++)
        for (int64_t i = 0; i < n; i++)
            memcpy((uint8_t *)p + (size_t)(x * n + i) * bytes,
                   src + (size_t)(x * src_rows + (map ? map[i] / per : i)) * bytes, bytes);
    *data = p;
    return 0;
}

/* Ranges of equal factors in the new order. */
static int gather_globals(const qtensor *q, const int32_t *rows, int64_t n, qtensor *v, err *e)
{
    v->n_global = 0;
    for (int64_t i = 0; q->n_global && i < n; i++) {
        float g = global_of(q, rows[i]);
        if (v->n_global && v->global[v->n_global - 1] == g) {
            v->global_row[v->n_global] = i + 1;
            continue;
        }
        if (v->n_global == QT_MAX_GLOBAL)
            return err_set(e, ERR_UNSUPPORTED,
                           "rows in this order would need more than %d ranges of global scales",
                           QT_MAX_GLOBAL);
        v->global_row[v->n_global] = i;
        v->global[v->n_global] = g;
        v->global_row[++v->n_global] = i + 1;
    }
    return 0;
}

/* The scale grid of v (still that of q) for its new rows. */
static int gather_grid(const int32_t *rows, int64_t n, qtensor *v, err *e)
{
    int rc = 0;
    bool one = v->block_n >= v->N; /* one scale row for all */
    const int32_t *map = one ? NULL : rows;
    int64_t to = one ? v->scale_rows : n, from = v->scale_rows, per = v->block_n;
    size_t cols = (size_t)v->scale_cols;
    if (v->scales)
        TRY(gather(v, &v->scales, from, cols * num_bytes(v->scale_type, 1), map, to, per, e));
    if (v->zeros)
        TRY(gather(v, &v->zeros, from, cols * num_bytes(v->zero_type, 1), map, to, per, e));
    v->scale_rows = to;
    v->block_n = one ? n : 1;
    if (v->spec.w.gran == Q_BLOCK && !one) {
        v->spec.w.gran = Q_GROUP;
        v->spec.w.group = (int32_t)v->block_k;
        v->spec.w.block_n = v->spec.w.block_k = 0;
    }
out:
    return rc;
}

int qtensor_rows(const qtensor *q, const int32_t *rows, int64_t n, qtensor *out, err *e)
{
    int rc = 0;
    qtensor v = *q;
    const void *codes = q->codes, *p;
    v.n_owned = 0;
    memset(v.owned, 0, sizeof v.owned);
    if (n < 1) return err_set(e, ERR_VALUE, "%lld rows to gather", (long long)n);
    if (q->flat) return crosses_rows(q, e);
    for (int64_t i = 0; i < n; i++)
        if (rows[i] < 0 || rows[i] >= q->N)
            return err_set(e, ERR_VALUE, "row %d of %lld rows cannot be gathered", rows[i],
                           (long long)q->N);
    TRY(gather(&v, &codes, q->N, q->row_bytes, rows, n, 1, e));
    v.codes = codes;
    TRY(gather_globals(q, rows, n, &v, e));
    if (q->scales || q->zeros) TRY(gather_grid(rows, n, &v, e));
    if (q->table && q->table != builtin_table(q->code)) {
        TRY(own_copy(&v, q->table, 1 << num_infos[q->code].bits, sizeof *q->table, &p, e));
        v.table = p;
    }
    if (q->g_idx) {
        TRY(own_copy(&v, q->g_idx, q->K, sizeof *q->g_idx, &p, e));
        v.g_idx = p;
    }
    if (q->pre_scale) {
        TRY(own_copy(&v, q->pre_scale, q->K, sizeof *q->pre_scale, &p, e));
        v.pre_scale = p;
    }
    v.N = n;
    if (!v.scales && !v.zeros) v.block_n = n;
out:
    if (rc < 0)
        qtensor_free(&v);
    else
        *out = v;
    return rc < 0 ? rc : 0;
}

int qtensor_transpose(const qtensor *q, qtensor *out, err *e)
{
    qtensor v;
    void *p;
    size_t size = num_bytes(q->code, 1);
    if (qaxis_quantized(&q->spec.w) || q->scales || size < 2)
        return err_set(e, ERR_UNSUPPORTED, "only plain float weights can be transposed");
    qtensor_plain(&v, q->code, q->K, q->N, NULL);
    v.spec = q->spec;
    v.E = q->E;
    int rc = own(&v, &p, q->E, q->K, q->N, size, e);
    if (rc < 0) return rc;
    for (int64_t x = 0; x < q->E; x++)
        for (int64_t n = 0; n < q->N; n++) {
            const uint8_t *src = q->codes + (size_t)(x * q->N + n) * q->row_bytes;
            uint8_t *dst = (uint8_t *)p + (size_t)(x * q->K * q->N + n) * size;
            for (int64_t k = 0; k < q->K; k++)
                memcpy(dst + (size_t)(k * q->N) * size, src + (size_t)k * size, size);
        }
    v.codes = p;
    *out = v;
    return 0;
}

/* ---- bytes -------------------------------------------------------------------------------------
 */

void qtensor_bytes(const qtensor *q, qbytes *add)
{
    uint64_t rows = (uint64_t)(q->E * q->N),
             grid = (uint64_t)(q->E * q->scale_rows * q->scale_cols);
    uint64_t bits = (uint64_t)num_infos[q->code].bits * (uint64_t)q->K, all = rows * q->row_bytes;
    uint64_t whole = rows * (bits / 8) + rows * (bits % 8) / 8; /* the codes without row padding */
    uint64_t scales = q->scales ? grid * num_bytes(q->scale_type, 1) : 0;
    uint64_t zeros = q->zeros ? grid * num_bytes(q->zero_type, 1) : 0;
    scales += 4 * (uint64_t)q->n_global;
    if (qaxis_quantized(&q->spec.w)) {
        add->codes += whole;
        add->padding += all - whole;
    } else {
        add->unquantized += all;
    }
    add->scales += scales;
    add->zeros += zeros;
    add->total += all + scales + zeros;
}
