/* RMS norm of rows, with what goes with it: the add before, the codes of a quantized linear after.
 * One kernel for all, so that each number is the same whatever goes along. A block has a row; a
 * thread keeps its one or two units of eight lanes (P), or of longer rows (P 0) reads again what it
 * wrote. Sums are in f32. */
#ifndef KERN_CUDA_PLAIN_NORM_CUH
#define KERN_CUDA_PLAIN_NORM_CUH
#include "kern/cuda/plain_codes.cuh"

/* Lanes of x as they are stored, y added. */
static __device__ __forceinline__ void norm_in(const gpu_norm_quant &a, int64_t at, int n,
                                               bool wide, float v[8])
{
    float y[8];
    get8(a.x, at, n, wide, v);
    if (!a.y.p) return;
    get8(a.y, at, n, wide, y);
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] = as_lane(a.x.type, v[j] + y[j]);
    put8(a.x, at, n, wide, v);
}

static __device__ __forceinline__ void norm_weights(const gpu_norm_quant &a, int64_t i, int n,
                                                    bool wide, float w[8])
{
    gpu_x all = {(void *)(uintptr_t)a.w, GPU_F32};
    get8(all, i, n, wide, w);
}
/* v becomes the norm as it is stored. */
static __device__ __forceinline__ void norm_out(const gpu_norm_quant &a, float r, const float w[8],
                                                float v[8])
{
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] = as_lane(a.out.type, v[j] * r * w[j]);
}

template <int P, bool CODES>
static __global__ void __launch_bounds__(1024, 1) norm_kernel(const gpu_norm_quant a, bool wide)
{
    pdl_go();
    pdl_wait();
    const int passes = P ? P : (int)((a.K + 8191) / 8192);
    const int step = (int)blockDim.x * 8, first = (int)threadIdx.x * 8;
    float kept[P ? P : 1][8], weights[P ? P : 1][8];
    for (int64_t t = blockIdx.x; t < a.T; t += gridDim.x) {
        int64_t at = t * a.K;
        float ss = 0, top = 0;
#pragma unroll
        for (int p = 0; p < passes; p++) {
            int i = first + p * step;
            float *v = kept[P ? p : 0];
            norm_in(a, at + i, unit_lanes(i, a.K), wide, v);
            if (P) norm_weights(a, i, unit_lanes(i, a.K), wide, weights[p]); /* ahead of use */
#pragma unroll
            for (int j = 0; j < 8; j++)
                ss += v[j] * v[j];
        }
        float r = norm_factor(block_sum(ss), a.K, a.eps);
#pragma unroll
        for (int p = 0; p < passes; p++) {
            int i = first + p * step, n = unit_lanes(i, a.K);
            float *v = kept[P ? p : 0], *w = weights[P ? p : 0];
            if (!P) get8(a.x, at + i, n, wide, v);
            if (!P) norm_weights(a, i, n, wide, w);
            norm_out(a, r, w, v);
            if (a.out.p) put8(a.out, at + i, n, wide, v);
            if (CODES && a.to.group)
                put_group_codes(a.to, t, i, n, v);
            else if (CODES)
                top = unit_amax(top, v);
        }
        if (!CODES || a.to.group) continue;
        float scale = row_scale(a.to, t, top);
#pragma unroll
        for (int p = 0; p < passes; p++) {
            int i = first + p * step, n = unit_lanes(i, a.K);
            float *v = kept[P ? p : 0], *w = weights[P ? p : 0];
            if (!P && a.out.p) {
                get8(a.out, at + i, n, wide, v);
            } else if (!P) {
                get8(a.x, at + i, n, wide, v);
                norm_weights(a, i, n, wide, w);
                norm_out(a, r, w, v);
            }
            put_codes(a.to, t, i, n, scale, v);
        }
    }
}

template <bool CODES> static const char *launch_norm(const gpu_norm_quant &a, void *stream)
{
    int passes;
    unsigned threads;
    gpu_x w = {(void *)(uintptr_t)a.w, GPU_F32};
    bool wide = wide_rows(a.x, a.K, a.K) && wide_rows(a.y, a.K, a.K) &&
                wide_rows(a.out, a.K, a.K) && wide_rows(w, a.K, a.K);
    if (!a.T || !a.K) return NULL;
    if (a.K > INT32_MAX / 2) return "norm: rows of more than 2^30 lanes";
    row_block(a.K, &passes, &threads);
    void (*kernel)(const gpu_norm_quant, bool) = passes == 1   ? norm_kernel<1, CODES>
                                                 : passes == 2 ? norm_kernel<2, CODES>
                                                               : norm_kernel<0, CODES>;
    return LAUNCH_EARLY(kernel, blocks_for(a.T, 1), threads, 0, stream, a, wide);
}
#endif
