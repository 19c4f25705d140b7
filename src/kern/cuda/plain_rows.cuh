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
 * Rows are read by vectors of 16 bytes where everything is aligned (`wide`), else lane by lane.
 * What is asked for (load8) and what is made of it (lanes8) are apart, so that a thread has all its
 * loads under way before it waits for the first. */
struct raw8 { /* eight lanes as they lie: bf16 in a alone */
    uint4 a, b;
};
static inline bool wide_rows(gpu_x x, int64_t ld, int64_t n)
{
    return !x.p || (!((uintptr_t)x.p & 15) && ld % 8 == 0 && n % 8 == 0);
}
/* Lanes of the unit that starts at lane i of K. */
static __device__ __forceinline__ int unit_lanes(int64_t i, int64_t K)
{
    return K - i >= 8 ? 8 : K > i ? (int)(K - i) : 0;
}
/* As bf16 lies, a in the low half; NaN stays NaN. */
static __device__ __forceinline__ uint32_t two_bf16(float a, float b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
#else
    return (uint32_t)f32_bf16(a) | (uint32_t)f32_bf16(b) << 16;
#endif
}
/* n lanes from `at` on; those behind them are 0. WIDE: n is 8 or 0. */
template <bool WIDE> static __device__ __forceinline__ raw8 load8(gpu_x x, int64_t at, int n)
{
    raw8 r = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    const bool f32 = x.type == GPU_F32;
    if constexpr (WIDE) {
        const char *p = (const char *)x.p + at * (f32 ? 4 : 2);
        if (n) r.a = *(const uint4 *)p;
        if (n && f32) r.b = *(const uint4 *)(p + 16);
    } else {
        uint32_t w[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            w[j] = j >= n ? 0
                   : f32  ? __float_as_uint(((const float *)x.p)[at + j])
                          : ((const uint16_t *)x.p)[at + j];
        if (!f32)
            r.a = make_uint4(w[0] | w[1] << 16, w[2] | w[3] << 16, w[4] | w[5] << 16,
                             w[6] | w[7] << 16);
        else
            r = raw8{make_uint4(w[0], w[1], w[2], w[3]), make_uint4(w[4], w[5], w[6], w[7])};
    }
    return r;
}
static __device__ __forceinline__ void bf16_lanes8(uint4 a, float v[8])
{
    v[0] = bits_f32(a.x << 16), v[1] = bits_f32(a.x & 0xffff0000u);
    v[2] = bits_f32(a.y << 16), v[3] = bits_f32(a.y & 0xffff0000u);
    v[4] = bits_f32(a.z << 16), v[5] = bits_f32(a.z & 0xffff0000u);
    v[6] = bits_f32(a.w << 16), v[7] = bits_f32(a.w & 0xffff0000u);
}
static __device__ __forceinline__ void lanes8(gpu_type type, const raw8 &r, float v[8])
{
    if (type == GPU_F32) {
        v[0] = bits_f32(r.a.x), v[1] = bits_f32(r.a.y), v[2] = bits_f32(r.a.z);
        v[3] = bits_f32(r.a.w), v[4] = bits_f32(r.b.x), v[5] = bits_f32(r.b.y);
        v[6] = bits_f32(r.b.z), v[7] = bits_f32(r.b.w);
    } else {
        bf16_lanes8(r.a, v);
    }
}
static __device__ __forceinline__ uint4 bf16_raw8(const float v[8])
{
    return make_uint4(two_bf16(v[0], v[1]), two_bf16(v[2], v[3]), two_bf16(v[4], v[5]),
                      two_bf16(v[6], v[7]));
}
/* The lanes as they are stored; v becomes what they then are. */
static __device__ __forceinline__ raw8 raw_of8(gpu_type type, float v[8])
{
    raw8 r = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    if (type == GPU_F32) {
        r.a = make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                         __float_as_uint(v[3]));
        r.b = make_uint4(__float_as_uint(v[4]), __float_as_uint(v[5]), __float_as_uint(v[6]),
                         __float_as_uint(v[7]));
    } else {
        r.a = bf16_raw8(v);
        bf16_lanes8(r.a, v);
    }
    return r;
}
template <bool WIDE>
static __device__ __forceinline__ void store8(gpu_x x, int64_t at, int n, const raw8 &r)
{
    const bool f32 = x.type == GPU_F32;
    if constexpr (WIDE) {
        char *p = (char *)x.p + at * (f32 ? 4 : 2);
        if (n) *(uint4 *)p = r.a;
        if (n && f32) *(uint4 *)(p + 16) = r.b;
    } else {
        const uint32_t w[8] = {r.a.x, r.a.y, r.a.z, r.a.w, r.b.x, r.b.y, r.b.z, r.b.w};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (j < n && f32) ((uint32_t *)x.p)[at + j] = w[j];
            if (j < n && !f32) ((uint16_t *)x.p)[at + j] = (uint16_t)(w[j / 2] >> (16 * (j % 2)));
        }
    }
}
static __device__ __forceinline__ void get8(gpu_x x, int64_t at, int n, bool wide, float v[8])
{
    lanes8(x.type, wide ? load8<true>(x, at, n) : load8<false>(x, at, n), v);
}
/* v becomes what is stored. */
static __device__ __forceinline__ void put8(gpu_x x, int64_t at, int n, bool wide, float v[8])
{
    raw8 r = raw_of8(x.type, v);
    if (wide)
        store8<true>(x, at, n, r);
    else
        store8<false>(x, at, n, r);
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

/* ---- rows in a block ----------------------------------------------------------------------------
 * A row has `parts` blocks, whose threads have P units each, blockDim.x units apart; passes 0: more
 * than eight, in a loop. How a row of one block is dealt out depends on its length alone, so that
 * its sums do not depend on the rows beside it. */
static inline void row_block(int64_t K, int parts, int *passes, unsigned *threads)
{
    int64_t units = ((K + 7) / 8 + parts - 1) / parts, p = 1;
    while (p < 8 && units > p * ROW_THREADS)
        p *= 2;
    int64_t each = (units + p - 1) / p;
    *passes = each > ROW_THREADS ? 0 : (int)p;
    *threads = each > ROW_THREADS ? ROW_THREADS : (unsigned)((each + 31) / 32 * 32);
}
/* Sum over the block, of at most ROW_THREADS threads. `turn` starts at 0 and is the caller's: parts
 * of one sum are not written over before all have read them, with one barrier a sum. */
static __device__ __forceinline__ float row_sum(float v, int *turn)
{
    __shared__ float part[2][ROW_THREADS / 32];
    const float *all = part[*turn];
    const int n = (int)blockDim.x / 32;
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) part[*turn][threadIdx.x / 32] = v;
    *turn ^= 1;
    __syncthreads();
    v = all[0];
#pragma unroll
    for (int i = 1; i < ROW_THREADS / 32; i++)
        if (i < n) v += all[i];
    return v;
}

/* ---- functions ----------------------------------------------------------------------------------
 */
/* n / d of d >= 1, within two units of the last place; d may be infinite. */
static __device__ __forceinline__ float near_quotient(float n, float d)
{
#if defined(__CUDA_ARCH__)
    float r; /* of d / 4: of a d near the largest number, 1 / d would be 0 */
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(0.25f * d));
    return 0.25f * n * r;
#else
    return n / d;
#endif
}
static __device__ __forceinline__ float sigmoid(float x)
{
    return near_quotient(1.0f, 1.0f + expf(-x));
}
static __device__ __forceinline__ float activate(int act, float x)
{
    switch (act) {
    case KERN_SILU:
        return near_quotient(x, 1.0f + expf(-x));
    case KERN_GELU_TANH:
        return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case KERN_GELU:
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case KERN_RELU:
        return x < 0 ? 0 : x;
    case KERN_RELU2:
        return x < 0 ? 0 : x * x;
    case KERN_QUICK_GELU:
        return near_quotient(x, 1.0f + expf(-1.702f * x));
    default: /* KERN_SWIGLU_OAI */
        x = x > 7.0f ? 7.0f : x;
        return near_quotient(x, 1.0f + expf(-1.702f * x));
    }
}
static __device__ __forceinline__ float gated(int act, float g, float u)
{
    if (act == KERN_SWIGLU_OAI) u = (u < -7.0f ? -7.0f : u > 7.0f ? 7.0f : u) + 1.0f;
    return activate(act, g) * u;
}
/* v becomes the function of v, times u. One branch for all eight. */
static __device__ __forceinline__ void gated8(int act, float v[8], const float u[8])
{
    if (act == KERN_SILU) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] = gated(KERN_SILU, v[j], u[j]);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] = gated(act, v[j], u[j]);
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
    return rsqrtf(ss / (float)n + eps);
}
#endif
