/* Plain twins of small and wide, for the emulated plug-in: the same weights bit by bit, refused
 * where the fast kernels refuse, sums of a group before its scale as these take them. A thread has
 * a row of W and up to eight tokens. */
#ifdef TARE_EMULATED
#include <stdio.h>
#include "kern/cuda/format_read.h"
#include "kern/cuda/port.cuh"
#include "kern/cuda/table.h"

#define TOKENS 8

struct packed_args {
    format_layout l;
    const uint8_t *w;
    const uint16_t *x; /* [M, K], row stride ldx */
    int64_t ldx;
    int K, M;
    gpu_x y;
    int64_t ldy;
    const float *row_scale, *col_scale, *bias;
};

/* Block (tile, tokens), thread = row of the tile. */
static __global__ void __launch_bounds__(FORMAT_ROWS) packed_kernel(packed_args p)
{
    const int r = (int)threadIdx.x, n = (int)blockIdx.x * FORMAT_ROWS + r;
    const int m0 = (int)blockIdx.y * TOKENS, tokens = p.M - m0 < TOKENS ? p.M - m0 : TOKENS;
    const size_t size = format_unit_bytes(&p.l);
    const uint8_t *unit = p.w + (size_t)blockIdx.x * (size_t)(p.K / FORMAT_UNIT) * size;
    const int step = p.l.group && p.l.group < FORMAT_UNIT ? p.l.group : FORMAT_UNIT;
    float sum[TOKENS] = {0};
    for (int k0 = 0; k0 < p.K; k0 += step) {
        float part[TOKENS] = {0}, scale = 1;
        const uint8_t *at = unit + (size_t)(k0 / FORMAT_UNIT) * size;
        for (int k = k0; k < k0 + step; k++) {
            const format_cell v = format_read(&p.l, at, r, k % FORMAT_UNIT);
            scale = v.scale;
            for (int m = 0; m < tokens; m++)
                part[m] += v.code * bf16_f32(p.x[(m0 + m) * p.ldx + k]);
        }
        for (int m = 0; m < tokens; m++)
            sum[m] += scale * part[m];
    }
    for (int m = 0; m < tokens; m++) {
        float by = p.row_scale ? p.row_scale[m0 + m] : 1;
        float v = fmaf(sum[m] * by, p.col_scale ? p.col_scale[n] : 1, p.bias ? p.bias[n] : 0);
        put_lane(p.y, (m0 + m) * p.ldy + n, v);
    }
}

/* The rows of x side by side: wide_order of the plain kernel. */
static __global__ void __launch_bounds__(32)
    packed_order(const uint16_t *x, int64_t ldx, uint16_t *to, int K)
{
    for (int k = (int)threadIdx.x; k < K; k += 32)
        to[(int64_t)blockIdx.x * K + k] = x[(int64_t)blockIdx.x * ldx + k];
}

static const char *multiply(const packed_args &a, int N, void *stream)
{
    return LAUNCH(packed_kernel,
                  dim3((unsigned)(N / FORMAT_ROWS), (unsigned)((a.M + TOKENS - 1) / TOKENS)),
                  dim3(FORMAT_ROWS), 0, stream, a);
}

static thread_local char why[128];
static const char *refuse_shape(small_format f, int N, int K)
{
    if (f < 0 || f >= SMALL_FORMATS)
        snprintf(why, sizeof why, "no format %d", (int)f);
    else if (N < FORMAT_ROWS || N % FORMAT_ROWS)
        snprintf(why, sizeof why, "N = %d is not a multiple of %d", N, FORMAT_ROWS);
    else if (K < FORMAT_UNIT || K % FORMAT_UNIT)
        snprintf(why, sizeof why, "K = %d is not a multiple of %d", K, FORMAT_UNIT);
    else
        return NULL;
    return why;
}

/* Plans change nothing here; some are told apart so that choosing can be tested. */
static int plain_has(small_format f, wide_plan p, int K)
{
    return !refuse_shape(f, FORMAT_ROWS, K) && (p.tokens == 16 || p.tokens == 32) &&
           p.groups >= 1 && p.groups <= 2 && p.split == 1 && p.share <= 1;
}

extern "C" const char *cuda_small(const void *args, void *stream)
{
    const small_call *c = (const small_call *)args;
    if (c->M < 1 || c->M > SMALL_MAX_M) {
        snprintf(why, sizeof why, "M = %d, made for 1 to %d", c->M, SMALL_MAX_M);
        return why;
    }
    if (c->ldx % 8 || (uintptr_t)c->x % 16) return "x is not aligned to 16 bytes";
    const char *bad = refuse_shape(c->format, c->N, c->K);
    if (bad) return bad;
    packed_args a = {format_layouts[c->format],
                     (const uint8_t *)c->w,
                     (const uint16_t *)c->x,
                     c->ldx,
                     c->K,
                     c->M,
                     {c->y, c->y_bf16 ? GPU_BF16 : GPU_F32},
                     c->ldy,
                     c->row_scale,
                     c->col_scale,
                     c->bias};
    return multiply(a, c->N, stream);
}

extern "C" const char *cuda_wide(const void *args, void *stream)
{
    const wide_call *c = (const wide_call *)args;
    const char *bad = refuse_shape(c->format, c->N, c->K);
    if (bad) return bad;
    if (c->M < 1) return "no rows";
    if (c->x && (c->ldx % 2 || (uintptr_t)c->x % 4)) return "x is not aligned to 4 bytes";
    if (c->plan.tokens && !plain_has(c->format, c->plan, c->K)) return "no kernel of this plan";
    if (!c->work || c->ldy % 4 || (uintptr_t)c->y % 16 || (uintptr_t)c->work % 128)
        return "y is not aligned to 16 bytes or work not to 128";
    if (((uintptr_t)c->col_scale | (uintptr_t)c->bias) % 16)
        return "factors or bias of rows are not aligned to 16 bytes";
    if (c->x)
        bad = LAUNCH(packed_order, dim3((unsigned)c->M), dim3(32), 0, stream,
                     (const uint16_t *)c->x, c->ldx, (uint16_t *)c->work, c->K);
    if (bad) return bad;
    packed_args a = {format_layouts[c->format],
                     (const uint8_t *)c->w,
                     (const uint16_t *)c->work,
                     c->K,
                     c->K,
                     c->M,
                     {c->y, c->y_bf16 ? GPU_BF16 : GPU_F32},
                     c->ldy,
                     c->row_scale,
                     c->col_scale,
                     c->bias};
    return multiply(a, c->N, stream);
}

static const char *plain_entry(small_format f, int N, int K, int M)
{
    return refuse_shape(f, N, K) || M < 1 || M > SMALL_MAX_M ? "none" : "plain";
}
static wide_plan plain_plan(small_format f, int N, int K, int M)
{
    if (refuse_shape(f, N, K) || M < 1) return wide_plan{0, 0, 0, 0};
    return wide_plan{16, 1, 1, 1};
}
static size_t plain_work_bytes(int K, int M)
{
    return (size_t)M * (size_t)K * 2;
}

static size_t plain_experts_work(int K, int E, int64_t slots)
{
    (void)K, (void)E, (void)slots;
    return 128;
}

extern "C" void cuda_packed_api(gpu_api *a)
{
    a->small_entry = plain_entry;
    a->wide_choose = plain_plan;
    a->wide_has = plain_has;
    a->wide_work_bytes = plain_work_bytes;
    a->experts_work_bytes = plain_experts_work;
}
#endif
