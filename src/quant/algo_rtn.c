/* Round to nearest. The scales are, bit for bit, those that llm-compressor stores: it computes them
 * in the model's float type, so R below rounds to that type after each operation.
 *
 *   int sym    s = R(amax / ((2^b - 1) / 2))            7.5 for int4: the range is -8..7
 *   int asym   s = R(R(max - min) / (2^b - 1)), 0 in the range; z = RNE(clamp(R(qmin - R(min /
 * s)))) fp8        s = R(amax / 448) nvfp4      g = R(2688 * R(1 / amax of the fused set)), local =
 * E4M3(g * R(amax / 6)), 0 -> 1/8 mx         E8M0 code by num_mx_scale nf4        s = amax, F32
 *
 * A scale of 0 becomes the machine epsilon of its type. Codes are the nearest ones for the stored
 * scale, divided in fp32: llm-compressor divides in the model's type too, which is a loss that is
 * not copied. Three passes over the rows (range, scale, codes), each shared out among the workers.
 * The source must be finite: the caller has checked that. Act-order is refused: it needs
 * statistics. */
#include <float.h>
#include <string.h>
#include "quant/quant_int.h"

typedef struct job {
    const float *w;
    qtensor *q;
    num_dtype type; /* of the model: R */
    float *lo, *hi; /* per scale, of its values and 0 */
    float *part;    /* lo, hi per scale column and worker when all rows share a scale row */
    float g;        /* nvfp4 divisor */
    float *tmp;     /* [workers][K] */
} job;

static float *cells(const job *j, float *base, int64_t row)
{
    return base + row / j->q->block_n * j->q->scale_cols;
}

static void widen(const float *w, int64_t K, int64_t block_k, float *lo, float *hi)
{
    for (int64_t k = 0, c = 0; k < K; c++) {
        int64_t end = K - k < block_k ? K : k + block_k;
        float a = lo[c], b = hi[c];
        for (; k < end; k++) {
            a = w[k] < a ? w[k] : a;
            b = w[k] > b ? w[k] : b;
        }
        lo[c] = a;
        hi[c] = b;
    }
}

static void range_rows(void *arg, int index, int n)
{
    job *j = arg;
    const qtensor *q = j->q;
    int64_t r0, r1, G = q->scale_cols;
    thread_split(q->N, j->part ? 1 : q->block_n, index, n, &r0, &r1);
    for (int64_t r = r0; r < r1; r++) {
        float *lo = j->part ? j->part + 2 * index * G : cells(j, j->lo, r);
        float *hi = j->part ? j->part + (2 * index + 1) * G : cells(j, j->hi, r);
        widen(j->w + r * q->K, q->K, q->block_k, lo, hi);
    }
}

static float eps_of(num_dtype t)
{
    return t == NUM_BF16 ? 0x1p-7f : t == NUM_F16 ? 0x1p-10f : FLT_EPSILON;
}

/* Zero point of an asymmetric cell whose stored scale is s. */
static int8_t zero_of(const job *j, float lo, float s)
{
    int bits = num_infos[j->q->code].bits;
    float qmin = -(float)(1 << (bits - 1)), qmax = -qmin - 1;
    if (s == 0) return 0;
    float z = num_round(j->type, qmin - num_round(j->type, lo / s));
    return (int8_t)rintf(z < qmin ? qmin : z > qmax ? qmax : z);
}

static void scale_cell(const job *j, int64_t i)
{
    qtensor *q = j->q;
    const qaxis *w = &q->spec.w;
    float lo = j->lo[i], hi = j->hi[i], amax = -lo > hi ? -lo : hi, s;
    uint8_t *at = (uint8_t *)(uintptr_t)q->scales + (size_t)i * num_bytes(q->scale_type, 1);
    if (w->scale == QS_MX) {
        *at = num_mx_scale(amax, q->code == NUM_F8_E4M3 ? 8 : 2);
        return;
    }
    if (w->scale == QS_NVFP4) {
        *at = (uint8_t)num_encode(NUM_F8_E4M3, j->g * num_round(j->type, amax / 6));
        if (!(*at & 0x7F)) *at = 0x20; /* 0.125 */
        return;
    }
    float steps = (float)((1 << num_infos[q->code].bits) - 1);
    if (w->asym) {
        s = num_round(j->type, num_round(j->type, hi - lo) / steps);
        ((int8_t *)(uintptr_t)q->zeros)[i] = zero_of(j, lo, s);
    } else {
        float span = q->code == NUM_F8_E4M3 ? 448 : num_infos[q->code].kind == 'T' ? 1 : steps / 2;
        s = num_round(j->type, amax / span);
    }
    if (s == 0) s = eps_of(j->type);
    num_encode_row(q->scale_type, &s, 1, at);
}

static void scale_cells(void *arg, int index, int n)
{
    job *j = arg;
    int64_t i0, i1;
    thread_split(j->q->scale_rows * j->q->scale_cols, 64, index, n, &i0, &i1);
    for (int64_t i = i0; i < i1; i++)
        scale_cell(j, i);
}

/* The stored scale of a cell; with NVFP4 local / g, as the library divides. */
static float step_of(const job *j, int64_t row, int64_t k)
{
    const qtensor *q = j->q;
    if (q->spec.w.scale != QS_NVFP4) return qtensor_scale(q, row, k);
    const uint8_t *local = q->scales;
    return num_decode(NUM_F8_E4M3, local[row * q->scale_cols + k / q->block_k]) / j->g;
}

static void code_rows(void *arg, int index, int n)
{
    job *j = arg;
    qtensor *q = j->q;
    int64_t r0, r1, K = q->K;
    float *t = j->tmp + index * K;
    bool table = num_infos[q->code].kind == 'T';
    thread_split(q->N, 1, index, n, &r0, &r1);
    for (int64_t r = r0; r < r1; r++) {
        const float *w = j->w + r * K;
        for (int64_t k = 0; k < K;) {
            int64_t end = K - k < q->block_k ? K : k + q->block_k;
            float s = step_of(j, r, k), z = qtensor_zero(q, r, k);
            if (q->zeros)
                for (; k < end; k++)
                    t[k] = rintf(w[k] / s) + z;
            else if (table)
                for (; k < end; k++)
                    t[k] = w[k] * (1 / s); /* in the order of bitsandbytes */
            else
                for (; k < end; k++)
                    t[k] = w[k] / s;
        }
        num_encode_row(q->code, t, (size_t)K,
                       (uint8_t *)(uintptr_t)q->codes + (size_t)r * q->row_bytes);
    }
}

static void spread(const quant_stats *st, team_fn *fn, job *j)
{
    if (st && st->workers)
        team_run(st->workers, fn, j);
    else
        fn(j, 0, 1);
}

/* The second-level divisor of NVFP4 in the arithmetic of the model's type. */
static void set_global(job *j, float amax)
{
    num_dtype t = j->type;
    float tiny = t == NUM_F16 ? 0x1p-14f : FLT_MIN;
    float g = num_round(t, 2688 * num_round(t, 1 / (amax < tiny ? tiny : amax)));
    j->g = isfinite(g) ? g : 1;
    j->q->n_global = 1;
    j->q->global_row[1] = j->q->N;
    j->q->global[0] = 1 / j->g;
}

static int range(job *j, const quant_stats *st, int workers, err *e)
{
    const qtensor *q = j->q;
    size_t n = (size_t)(q->scale_rows * q->scale_cols), G = (size_t)q->scale_cols;
    int rc = mem_alloc((void **)&j->lo, 2 * n * sizeof(float), e);
    if (rc < 0) return rc;
    memset(j->lo, 0, 2 * n * sizeof(float));
    j->hi = j->lo + n;
    if (q->scale_rows == 1) {
        rc = mem_alloc((void **)&j->part, 2 * G * (size_t)workers * sizeof(float), e);
        if (rc < 0) return rc;
        memset(j->part, 0, 2 * G * (size_t)workers * sizeof(float));
    }
    spread(st, range_rows, j);
    for (int i = 0; j->part && i < workers; i++)
        for (size_t c = 0; c < G; c++) {
            float lo = j->part[2 * (size_t)i * G + c], hi = j->part[(2 * (size_t)i + 1) * G + c];
            j->lo[c] = lo < j->lo[c] ? lo : j->lo[c];
            j->hi[c] = hi > j->hi[c] ? hi : j->hi[c];
        }
    return 0;
}

static float amax_of(const job *j)
{
    float m = 0;
    for (int64_t i = 0; i < j->q->scale_rows * j->q->scale_cols; i++) {
        float a = -j->lo[i] > j->hi[i] ? -j->lo[i] : j->hi[i];
        m = a > m ? a : m;
    }
    return m;
}

int quant__rtn(const float *w, int64_t N, int64_t K, const qspec *s, num_dtype model_dtype,
               const quant_stats *st, qtensor *out, err *e)
{
    int rc = 0, workers = st && st->workers ? team_size(st->workers) : 1;
    bool table = num_infos[s->w.type].kind == 'T'; /* their scales are F32 in every model */
    if (table) model_dtype = NUM_F32;
    job j = {.w = w, .q = out, .type = model_dtype};
    *out = (qtensor){.scale_type = NUM_NONE, .zero_type = NUM_NONE};
    if (!qaxis_quantized(&s->w))
        return err_set(e, ERR_USAGE,
                       "rtn: the scheme leaves the weights in %s, there is nothing to do",
                       num_infos[s->w.type].name);
    if (s->w.actorder)
        return err_set(e, ERR_UNSUPPORTED, "rtn: actorder needs calibration data; leave it out");
    if (model_dtype != NUM_BF16 && model_dtype != NUM_F16 && model_dtype != NUM_F32)
        return err_set(e, ERR_DTYPE, "rtn: scales are stored as bf16, f16 or f32");
    TRY(qtensor_alloc(out, s, model_dtype, 1, N, K, e));
    TRY(range(&j, st, workers, e));
    TRY(mem_alloc((void **)&j.tmp, (size_t)workers * (size_t)K * sizeof(float), e));
    if (s->w.scale == QS_NVFP4)
        set_global(&j, st && st->fused_amax > 0 ? st->fused_amax : amax_of(&j));
    spread(st, scale_cells, &j);
    spread(st, code_rows, &j);
    rc = 0;
out:
    mem_free(j.lo);
    mem_free(j.part);
    mem_free(j.tmp);
    if (rc < 0) qtensor_free(out);
    return rc;
}
