/* Plain twin of the products of experts with packed weights, for the emulated plug-in: the same
 * weights bit by bit, refused where the fast kernels refuse. A thread has a row of W and up to
 * eight slots. */
#ifdef TARE_EMULATED
#include <stdio.h>
#include "kern/cuda/format_read.h"
#include "kern/cuda/port.cuh"
#include "kern/cuda/table.h"

#define SLOTS 8

struct expert_args {
    experts_call c;
    format_layout l;
};

static __device__ void expert_rows(const expert_args &a, int e, int tile, int r, int slot0,
                                   int count)
{
    const experts_call &c = a.c;
    const size_t size = format_unit_bytes(&a.l);
    const uint8_t *unit =
        (const uint8_t *)c.w[e] + (size_t)tile * (size_t)(c.K / FORMAT_UNIT) * size;
    const int step = a.l.group && a.l.group < FORMAT_UNIT ? a.l.group : FORMAT_UNIT;
    const int n = tile * FORMAT_ROWS + r;
    float sum[SLOTS] = {0};
    for (int k0 = 0; k0 < c.K; k0 += step) {
        float part[SLOTS] = {0}, scale = 1;
        const uint8_t *at = unit + (size_t)(k0 / FORMAT_UNIT) * size;
        for (int k = k0; k < k0 + step; k++) {
            const format_cell v = format_read(&a.l, at, r, k % FORMAT_UNIT);
            scale = v.scale;
            for (int m = 0; m < count && k < c.x_k; m++) {
                const int64_t row = c.ids ? c.ids[slot0 + m] : slot0 + m;
                part[m] += v.code * bf16_f32(((const uint16_t *)c.x)[row * c.ldx + k]);
            }
        }
        for (int m = 0; m < count; m++)
            sum[m] += scale * part[m];
    }
    const gpu_x y = {c.y, c.y_bf16 ? GPU_BF16 : GPU_F32};
    for (int m = 0; m < count; m++) {
        const int64_t slot = slot0 + m, row = c.ids ? c.ids[slot] : slot;
        const float by = c.row_scale ? c.row_scale[row] : 1;
        put_lane(y, slot * c.ldy + n,
                 fmaf(sum[m] * by, c.col_scale[e][n], c.bias ? c.bias[e][n] : 0));
    }
}

/* Block (tile, expert), thread = row of the tile. */
static __global__ void __launch_bounds__(FORMAT_ROWS) experts_kernel(expert_args a)
{
    const int e = (int)blockIdx.y, end = a.c.first[e + 1];
    for (int slot = a.c.first[e]; slot < end; slot += SLOTS)
        expert_rows(a, e, (int)blockIdx.x, (int)threadIdx.x, slot,
                    end - slot < SLOTS ? end - slot : SLOTS);
}

static const char *run(const experts_call *c, void *stream)
{
    static thread_local char why[128];
    why[0] = 0;
    if (c->format < 0 || c->format >= SMALL_FORMATS)
        snprintf(why, sizeof why, "no packed format has number %d", (int)c->format);
    else if (c->N < FORMAT_ROWS || c->N % FORMAT_ROWS)
        snprintf(why, sizeof why, "N = %d is not a multiple of %d", c->N, FORMAT_ROWS);
    else if (c->K < FORMAT_UNIT || c->K % FORMAT_UNIT)
        snprintf(why, sizeof why, "K = %d is not a multiple of %d", c->K, FORMAT_UNIT);
    else if (c->x_k % 64 || c->x_k > c->K || c->x_k < 64)
        snprintf(why, sizeof why, "rows of %d columns for K = %d", c->x_k, c->K);
    if (*why) return why;
    if (!c->slots || !c->E) return NULL;
    const expert_args a = {*c, format_layouts[c->format]};
    return LAUNCH(experts_kernel, dim3((unsigned)(c->N / FORMAT_ROWS), (unsigned)c->E),
                  dim3(FORMAT_ROWS), 0, stream, a);
}

extern "C" const char *cuda_small_experts(const void *args, void *stream)
{
    const experts_call *c = (const experts_call *)args;
    if (c->ldx % 8 || (uintptr_t)c->x % 16) return "x is not aligned to 16 bytes";
    return run(c, stream);
}

extern "C" const char *cuda_wide_experts(const void *args, void *stream)
{
    const experts_call *c = (const experts_call *)args;
    if (c->slots && c->E) {
        if (c->ldx % 2 || (uintptr_t)c->x % 4) return "x is not aligned to 4 bytes";
        if (!c->work || c->ldy % 4 || (uintptr_t)c->y % 16 || (uintptr_t)c->work % 128)
            return "y is not aligned to 16 bytes or work not to 128";
    }
    return run(c, stream);
}
#endif
