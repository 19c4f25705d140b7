/* What the plain kernels on rows share: grids, lanes by eights, and the functions of feed-forwards,
 * norms and rotary positions as the plain C twin has them (ref/ops.c). */
#ifndef KERN_CUDA_PLAIN_ROWS_CUH
#define KERN_CUDA_PLAIN_ROWS_CUH
#include "kern/cuda/port.cuh"
extern "C" {
#include "kern/kern.h"
}

#define ROW_THREADS 256
#define FULL        0xffffffffu /* all lanes of a warp */
#define MAX_BLOCKS  (1 << 20)   /* kernels step on by the whole grid */

/* Blocks for n pieces of work, `each` in a block. */
static inline unsigned blocks_for(int64_t n, int64_t each)
{
    int64_t b = (n + each - 1) / each;
    return (unsigned)(b < MAX_BLOCKS ? b : MAX_BLOCKS);
}
/* n lanes of T rows: x along the lanes, y along the rows. */
static inline dim3 grid_for(int64_t n, int64_t T)
{
    return dim3(blocks_for(n, ROW_THREADS), (unsigned)(T < 65535 ? T : 65535));
}
/* This thread's lanes i of its rows t. */
#define FOR_LANES(t, i, n, T)                                                                      \
    for (int64_t t = blockIdx.y; t < (T); t += gridDim.y)                                          \
        for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (n);                  \
             i += (int64_t)gridDim.x * blockDim.x)

/* ---- units of eight lanes -----------------------------------------------------------------------
 * Rows are read by vectors of 16 bytes where everything is aligned (`wide`), else lane by lane. */
static inline bool wide_rows(gpu_x x, int64_t ld, int64_t n)
{
    return !x.p || (!((uintptr_t)x.p & 15) && ld % 8 == 0 && n % 8 == 0);
}
/* Lanes of the unit that starts at lane i of K. */
static __device__ __forceinline__ int unit_lanes(int64_t i, int64_t K)
{
    return K - i >= 8 ? 8 : K > i ? (int)(K - i) : 0;
}
/* n lanes from `at` on; those behind them are 0. */
static __device__ __forceinline__ void get8(gpu_x x, int64_t at, int n, bool wide, float v[8])
{
    if (wide && n == 8) {
        if (x.type == GPU_F32) {
            const float4 *p = (const float4 *)((const float *)x.p + at);
            float4 a = p[0], b = p[1];
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
            v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        } else {
            uint4 a = *(const uint4 *)((const uint16_t *)x.p + at);
            v[0] = bits_f32(a.x << 16), v[1] = bits_f32(a.x & 0xffff0000u);
            v[2] = bits_f32(a.y << 16), v[3] = bits_f32(a.y & 0xffff0000u);
            v[4] = bits_f32(a.z << 16), v[5] = bits_f32(a.z & 0xffff0000u);
            v[6] = bits_f32(a.w << 16), v[7] = bits_f32(a.w & 0xffff0000u);
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] = j < n ? lane(x, at + j) : 0.0f;
}
static __device__ __forceinline__ uint32_t two_bf16(float a, float b)
{
    return (uint32_t)f32_bf16(a) | (uint32_t)f32_bf16(b) << 16;
}
static __device__ __forceinline__ void put8(gpu_x x, int64_t at, int n, bool wide, const float v[8])
{
    if (wide && n == 8) {
        if (x.type == GPU_F32) {
            float4 *p = (float4 *)((float *)x.p + at);
            p[0] = make_float4(v[0], v[1], v[2], v[3]);
            p[1] = make_float4(v[4], v[5], v[6], v[7]);
        } else {
            *(uint4 *)((uint16_t *)x.p + at) =
                make_uint4(two_bf16(v[0], v[1]), two_bf16(v[2], v[3]), two_bf16(v[4], v[5]),
                           two_bf16(v[6], v[7]));
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (j < n) put_lane(x, at + j, v[j]);
}
/* This thread's units of rows t: n lanes from i on. */
#define FOR_UNITS(t, i, n, K, T)                                                                   \
    for (int64_t t = blockIdx.y; t < (T); t += gridDim.y)                                          \
        for (int64_t i = 8 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x),                     \
                     n = unit_lanes(i, (K));                                                       \
             i < (K); i += 8 * (int64_t)gridDim.x * blockDim.x, n = unit_lanes(i, (K)))
/* Blocks are small where there is little to do, so that many share it. */
static inline unsigned unit_threads(int64_t K, int64_t T)
{
    return (K + 7) / 8 * T < 65536 ? 64 : ROW_THREADS;
}
static inline dim3 unit_grid(int64_t K, int64_t T, unsigned threads)
{
    return dim3(blocks_for((K + 7) / 8, threads), (unsigned)(T < 65535 ? T : 65535));
}
/* A value as a lane of x holds it. */
static __device__ __forceinline__ float as_lane(gpu_type type, float v)
{
    return type == GPU_F32 ? v : bf16_f32(f32_bf16(v));
}
/* Units of a row of K lanes that each thread of a block has, and threads; passes 0: more than two,
 * in a loop. */
static inline void row_block(int64_t K, int *passes, unsigned *threads)
{
    int64_t units = (K + 7) / 8;
    *passes = units <= 1024 ? 1 : units <= 2048 ? 2 : 0;
    int64_t each = *passes ? (units + *passes - 1) / *passes : 1024;
    *threads = (unsigned)((each + 31) / 32 * 32);
}

static __device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}
static __device__ __forceinline__ float activate(int act, float x)
{
    switch (act) {
    case KERN_SILU:
        return x / (1.0f + expf(-x));
    case KERN_GELU_TANH:
        return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case KERN_GELU:
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case KERN_RELU:
        return x < 0 ? 0 : x;
    case KERN_RELU2:
        return x < 0 ? 0 : x * x;
    case KERN_QUICK_GELU:
        return x / (1.0f + expf(-1.702f * x));
    default: /* KERN_SWIGLU_OAI */
        x = x > 7.0f ? 7.0f : x;
        return x / (1.0f + expf(-1.702f * x));
    }
}
static __device__ __forceinline__ float gated(int act, float g, float u)
{
    if (act == KERN_SWIGLU_OAI) u = (u < -7.0f ? -7.0f : u > 7.0f ? 7.0f : u) + 1.0f;
    return activate(act, g) * u;
}
/* A pair of lanes turned. Each product is rounded, as in the plain C twin. */
static __device__ __forceinline__ void turn(float *u, float *v, float c, float s)
{
    float a = __fsub_rn(__fmul_rn(*u, c), __fmul_rn(*v, s));
    *v = __fadd_rn(__fmul_rn(*v, c), __fmul_rn(*u, s));
    *u = a;
}
/* 1 / rms, of the sum of squares of n lanes. */
static __device__ __forceinline__ float norm_factor(float ss, int64_t n, float eps)
{
    return 1.0f / sqrtf(ss / (float)n + eps);
}
#endif
