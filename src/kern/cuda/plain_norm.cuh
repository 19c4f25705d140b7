/* RMS norm of rows, with what goes with it: the add before, the codes of a quantized linear after.
 * One kernel for all, so that each number is the same whatever goes along. A block has a row; a
 * thread keeps its P units of eight lanes, or of longer rows and rows that are not aligned (P 0)
 * reads again what it wrote. Weights are constants: what a thread needs of them is read before the
 * kernels before this one have ended. Sums are in f32. */
#ifndef KERN_CUDA_PLAIN_NORM_CUH
#define KERN_CUDA_PLAIN_NORM_CUH
#include "kern/cuda/plain_codes.cuh"

/* Lanes of x as they are stored, y added. */
template <bool WIDE>
static __device__ __forceinline__ void norm_in(const gpu_norm_quant &a, int64_t at, int n,
                                               const raw8 &x, const raw8 &y, float v[8])
{
    float add[8];
    lanes8(a.x.type, x, v);
    if (!a.y.p) return;
    lanes8(a.y.type, y, add);
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] += add[j];
    store8<WIDE>(a.x, at, n, raw_of8(a.x.type, v));
}
template <bool WIDE>
static __device__ __forceinline__ raw8 norm_weights(const gpu_norm_quant &a, int i, int n)
{
    gpu_x all = {(void *)(uintptr_t)a.w, GPU_F32};
    return load8<WIDE>(all, i, n);
}
/* v becomes the norm as it is stored. */
static __device__ __forceinline__ raw8 norm_out(const gpu_norm_quant &a, float r,
                                                const raw8 &weights, float v[8])
{
    float w[8];
    lanes8(GPU_F32, weights, w);
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] = v[j] * r * w[j];
    return raw_of8(a.out.type, v);
}

template <int P, bool CODES, bool WIDE>
static __global__ void __launch_bounds__(ROW_THREADS, P == 1   ? 4
                                                      : P == 2 ? 3
                                                      : P == 4 ? 2
                                                               : 1)
    norm_kernel(const gpu_norm_quant a)
{
    constexpr int KEPT = P ? P : 1, AHEAD = P < 2 ? 1 : 2; /* units whose lanes are asked for */
    constexpr bool HELD = P == 1, NEAR = P == 2 || P == 4; /* weights: in registers, or shared */
    const int K = (int)a.K, step = (int)blockDim.x * 8, first = (int)threadIdx.x * 8;
    const int passes = P ? P : (K + step - 1) / step;
    float kept[KEPT][8];
    raw8 held;
    __shared__ uint4 near_a[NEAR ? P * ROW_THREADS : 1], near_b[NEAR ? P * ROW_THREADS : 1];
    int turn = 0, turn_top = 0;
    pdl_go();
    if (HELD) held = norm_weights<WIDE>(a, first, unit_lanes(first, K));
#pragma unroll
    for (int p = 0; p < P && NEAR; p++) { /* each thread reads its own again: no barrier */
        raw8 w = norm_weights<WIDE>(a, first + p * step, unit_lanes(first + p * step, K));
        near_a[NEAR ? p * ROW_THREADS + threadIdx.x : 0] = w.a;
        near_b[NEAR ? p * ROW_THREADS + threadIdx.x : 0] = w.b;
    }
    pdl_wait();
    for (int64_t t = blockIdx.x; t < a.T; t += gridDim.x) {
        const int64_t at = t * a.K;
        float ss = 0, top = 0;
#pragma unroll
        for (int p0 = 0; p0 < passes; p0 += AHEAD) {
            raw8 x[AHEAD], y[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                int i = first + (p0 + k) * step, n = unit_lanes(i, K);
                x[k] = load8<WIDE>(a.x, at + i, n);
                if (a.y.p) y[k] = load8<WIDE>(a.y, at + i, n);
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                int i = first + (p0 + k) * step;
                float *v = kept[P ? p0 + k : 0];
                norm_in<WIDE>(a, at + i, unit_lanes(i, K), x[k], y[k], v);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    ss += v[j] * v[j];
            }
        }
        const float r = norm_factor(row_sum(ss, &turn), a.K, a.eps);
#pragma unroll
        for (int p = 0; p < passes; p++) {
            int i = first + p * step, n = unit_lanes(i, K);
            float *v = kept[P ? p : 0];
            if (!P) lanes8(a.x.type, load8<WIDE>(a.x, at + i, n), v);
            raw8 w;
            if (HELD)
                w = held;
            else if (NEAR)
                w = {near_a[NEAR ? p * ROW_THREADS + threadIdx.x : 0],
                     near_b[NEAR ? p * ROW_THREADS + threadIdx.x : 0]};
            else
                w = norm_weights<WIDE>(a, i, n);
            raw8 out = norm_out(a, r, w, v);
            if (a.out.p) store8<WIDE>(a.out, at + i, n, out);
            if (CODES && a.to.group)
                put_group_codes(a.to, t, i, n, v);
            else if (CODES)
                top = unit_amax(top, v);
        }
        if (!CODES || a.to.group) continue;
        const code_factor f = factor_of(a.to, row_top(top, 1, 0, &turn_top));
        keep_row_scale(a.to, t, f.scale);
#pragma unroll
        for (int p = 0; p < passes; p++) {
            int i = first + p * step, n = unit_lanes(i, K);
            float *v = kept[P ? p : 0];
            if (!P && a.out.p) {
                lanes8(a.out.type, load8<WIDE>(a.out, at + i, n), v);
            } else if (!P) {
                lanes8(a.x.type, load8<WIDE>(a.x, at + i, n), v);
                norm_out(a, r, norm_weights<WIDE>(a, i, n), v);
            }
            put_codes(a.to, t, i, n, f, v);
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
    row_block(a.K, 1, &passes, &threads);
    void (*kernel)(const gpu_norm_quant) = !wide         ? norm_kernel<0, CODES, false>
                                           : passes == 1 ? norm_kernel<1, CODES, true>
                                           : passes == 2 ? norm_kernel<2, CODES, true>
                                           : passes == 4 ? norm_kernel<4, CODES, true>
                                           : passes == 8 ? norm_kernel<8, CODES, true>
                                                         : norm_kernel<0, CODES, true>;
    return LAUNCH_EARLY(kernel, blocks_for(a.T, 1), threads, 0, stream, a);
}
#endif
