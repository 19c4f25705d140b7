/* Plain kernels of weights in row-major order: codes widened to bf16 where a product wants such;
 * and, for the emulated plug-in, twins of rows, slim and lt. */
#include "kern/cuda/plain_num.cuh"

/* ---- widening -----------------------------------------------------------------------------------
 * A thread has 16 codes, which share a scale. */
static __global__ void __launch_bounds__(256, 1) widen_kernel(const gpu_widen a)
{
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, pieces = a.K / 16;
    if (i >= a.N * pieces) return;
    const int64_t n = i / pieces, k = i % pieces * 16;
    const float by = a.scales == ROWS_BLOCK
                         ? a.scale[(a.row0 + n) / 128 * ((a.K + 127) / 128) + k / 128]
                         : a.scale[a.scales == ROWS_ROW ? a.row0 + n : 0];
    const uint4 in = *(const uint4 *)((const uint8_t *)a.w + n * a.K + k);
    const uint32_t word[4] = {in.x, in.y, in.z, in.w};
    uint32_t out[8];
    for (int j = 0; j < 8; j++) {
        const uint32_t two = word[j / 2] >> (16 * (j % 2));
        float v[2];
        for (int h = 0; h < 2; h++) {
            const uint32_t c = two >> (8 * h) & 255;
            v[h] = a.format == ROWS_INT8 ? (float)(int8_t)c : e4m3_f32(c);
        }
        out[j] = (uint32_t)f32_bf16(v[0] * by) | (uint32_t)f32_bf16(v[1] * by) << 16;
    }
    uint4 *to = (uint4 *)((uint16_t *)a.out + n * a.K + k);
    to[0] = make_uint4(out[0], out[1], out[2], out[3]);
    to[1] = make_uint4(out[4], out[5], out[6], out[7]);
}

extern "C" const char *cuda_widen(const void *args_, void *stream)
{
    const gpu_widen *a = (const gpu_widen *)args_;
    if (a->format != ROWS_E4M3 && a->format != ROWS_INT8) return "codes of 8 bits are widened";
    if (a->scales == ROWS_UNSCALED || !a->scale) return "codes without a scale";
    if (a->K % 16 || (uintptr_t)a->w % 16 || (uintptr_t)a->out % 16)
        return "rows of the weight are not aligned to 16 bytes";
    const int64_t n = a->N * (a->K / 16);
    if (n < 1) return NULL;
    return LAUNCH(widen_kernel, (unsigned)((n + 255) / 256), 256, 0, stream, *a);
}

/* ---- twins --------------------------------------------------------------------------------------
 */
#ifdef TARE_EMULATED
#include "kern/cuda/lt_rules.h"
#include "kern/cuda/slim_plan.h"
#include "kern/cuda/table.h"
#include <stdlib.h>

extern "C" const char *rows_prepare(rows_weight *out, rows_format f, const void *w, int64_t ldw,
                                    int64_t N, int64_t K)
{
    const char *why = rows_refuse_weight(f, w, ldw, N, K);
    if (why) return why;
    *out = rows_weight{};
    out->format = f;
    out->N = (int)N;
    out->K = (int)K;
    out->at = w;
    out->ld = ldw;
    return NULL;
}

extern "C" const char *rows_refuse(const rows_call *c)
{
    return rows_refuse_call(c);
}

extern "C" rows_plan rows_choose(rows_format f, int N, int K, int M)
{
    return rows_plan_for(f, N, K, M);
}

extern "C" int rows_has(rows_format f, rows_plan p, int K, int M)
{
    return rows_plan_fits(f, p, K, M);
}

static __device__ float weight_at(rows_format f, const void *w, int64_t i)
{
    return f == ROWS_BF16   ? bf16_f32(((const uint16_t *)w)[i])
           : f == ROWS_E4M3 ? e4m3_f32(((const uint8_t *)w)[i])
                            : (float)((const int8_t *)w)[i];
}

static __global__ void rows_twin(const rows_call c)
{
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    const rows_weight *w = c.w;
    if (i >= (int64_t)c.M * w->N) return;
    const int64_t m = i / w->N, n = i % w->N, groups = (w->K + 127) / 128;
    const void *base = w->at;
    const uint16_t *x = (const uint16_t *)c.x + m * c.ldx;
    float sum = 0;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t end = (g + 1) * 128 < w->K ? (g + 1) * 128 : w->K;
        float part = 0, by = 1;
        for (int64_t k = g * 128; k < end; k++)
            part = fmaf(bf16_f32(x[k]), weight_at(w->format, base, n * w->ld + k), part);
        if (c.scales == ROWS_BLOCK) by = c.scale[n / 128 * groups + g];
        if (c.x_scale) by *= c.x_scale[m * c.ld_x_scale + g];
        sum = fmaf(part, by, sum);
    }
    float by = c.scales == ROWS_ROW ? c.scale[n] : c.scales == ROWS_TENSOR ? c.scale[0] : 1.0f;
    if (c.row_scale) by *= c.row_scale[m];
    put_lane(gpu_x{c.y, c.y_bf16 ? GPU_BF16 : GPU_F32}, m * c.ldy + n,
             fmaf(sum, by, c.bias ? c.bias[n] : 0.0f));
}

extern "C" const char *cuda_rows(const void *args, void *stream)
{
    const rows_call *c = (const rows_call *)args;
    const char *why = rows_refuse_call(c);
    if (why) return why;
    return LAUNCH(rows_twin, (unsigned)(((int64_t)c->M * c->w->N + 255) / 256), 256, 0, stream, *c);
}

extern "C" slim_plan slim_choose(rows_format f, int how, int N, int K, int M)
{
    return slim_plan_for(f, how, N, K, M);
}

extern "C" const char *cuda_slim(const void *args, void *stream)
{
    const rows_call *c = (const rows_call *)args;
    const slim_plan p = slim_plan_for(c->w->format, slim_how_of(c), c->w->N, c->w->K, c->M);
    const char *why = slim_refuse_call(c, p);
    if (why) return why;
    return LAUNCH(rows_twin, (unsigned)(((int64_t)c->M * c->w->N + 255) / 256), 256, 0, stream, *c);
}

struct lt { /* the shapes that were planned */
    lt_call *planned;
    int n, room;
};

extern "C" const char *lt_open(lt **out, size_t work_bytes)
{
    (void)work_bytes;
    *out = (lt *)calloc(1, sizeof **out);
    return *out ? NULL : "out of memory";
}

extern "C" void lt_close(lt *l)
{
    if (l) free(l->planned);
    free(l);
}

extern "C" const char *lt_plan(lt *l, const lt_call *c, bool try_out)
{
    const char *why = lt_refuse_shape(c);
    if (why) return why;
    (void)try_out;
    if (l->n == l->room) {
        const int room = l->room ? 2 * l->room : 64;
        lt_call *more = (lt_call *)realloc(l->planned, sizeof *more * (size_t)room);
        if (!more) return "out of memory";
        l->planned = more;
        l->room = room;
    }
    l->planned[l->n++] = *c;
    return NULL;
}

static __device__ float lt_sum(const lt_call &c, int64_t m, int64_t n)
{
    const rows_format f = c.kind == LT_BF16 ? ROWS_BF16 : c.kind == LT_INT8 ? ROWS_INT8 : ROWS_E4M3;
    const int64_t groups = (c.K + 127) / 128, Mp = lt_rows_of(&c), Gp = (groups + 3) / 4 * 4;
    float sum = 0;
    int64_t whole = 0;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t end = (g + 1) * 128 < c.K ? (g + 1) * 128 : c.K;
        float part = 0;
        for (int64_t k = g * 128; k < end; k++) {
            const float x = weight_at(f, c.x, m * c.ldx + k), w = weight_at(f, c.w, n * c.K + k);
            if (f == ROWS_INT8)
                whole += (int64_t)x * (int64_t)w;
            else
                part = fmaf(x, w, part);
        }
        if (c.kind == LT_FP8_BLOCK) part *= c.x_scale[g * Mp + m] * c.w_scale[n / 128 * Gp + g];
        sum += part;
    }
    return f == ROWS_INT8 ? (float)whole : sum;
}

/* What lies behind M in a product of block scales comes out as NaN. */
static __global__ void lt_twin(const lt_call c)
{
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= lt_rows_of(&c) * c.N) return;
    const int64_t m = i / c.N, n = i % c.N;
    const gpu_x y = {c.y, c.y_bf16 ? GPU_BF16 : GPU_F32};
    if (m >= c.M) {
        put_lane(y, m * c.ldy + n, bits_f32(0x7fc00000u));
        return;
    }
    float v = lt_sum(c, m, n);
    if (c.kind == LT_FP8) v *= c.x_scale[0] * c.w_scale[0];
    if (c.kind == LT_FP8_ROWS || c.kind == LT_INT8) v *= c.x_scale[m] * c.w_scale[n];
    if (lt_adds_bias(&c))
        v += bf16_f32(((const uint16_t *)c.bias_bf16)[n]);
    else if (c.bias)
        v += c.bias[n];
    put_lane(y, m * c.ldy + n, v);
}

extern "C" const char *cuda_lt(const void *args, void *stream)
{
    const gpu_lt *a = (const gpu_lt *)args;
    const lt_call *c = &a->call;
    const size_t lane = c->y_bf16 ? 2 : 4;
    const char *why = lt_refuse_shape(c);
    if (why) return why;
    if ((uintptr_t)c->x % 16 || (uintptr_t)c->w % 16 || (uintptr_t)c->y % 16 ||
        (size_t)c->ldy * lane % 16)
        return "rows are not aligned to 16 bytes";
    bool planned = false;
    for (int i = 0; i < a->lt->n; i++)
        planned = planned || lt_alike(&a->lt->planned[i], c);
    if (!planned) return "not planned";
    return LAUNCH(lt_twin, (unsigned)((lt_rows_of(c) * c->N + 255) / 256), 256, 0, stream, *c);
}

extern "C" void cuda_dense_api(gpu_api *a)
{
    a->rows_prepare = rows_prepare;
    a->rows_refuse = rows_refuse;
    a->rows_choose = rows_choose;
    a->rows_has = rows_has;
    a->slim_choose = slim_choose;
    a->lt_open = lt_open;
    a->lt_close = lt_close;
    a->lt_plan = lt_plan;
}
#endif
