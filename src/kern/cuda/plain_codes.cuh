/* Lanes become the codes of a quantized linear (gpu_codes), by the rules of kern/act.c. Threads of
 * a block have units of eight lanes side by side; all of them take part in what is found together:
 * the largest lane of a row or of a group of 128. NaN is the largest of all. */
#ifndef KERN_CUDA_PLAIN_CODES_CUH
#define KERN_CUDA_PLAIN_CODES_CUH
#include "kern/cuda/plain_num.cuh"
#include "kern/cuda/plain_rows.cuh"

#define CODES_GROUP 128

static inline const char *codes_refuse(const gpu_codes &c)
{
    int64_t bytes = c.as_bf16 ? 2 : 1;
    if (c.code != GPU_E4M3 && c.code != GPU_INT8) return "codes of an unknown type";
    if (c.group != 0 && c.group != CODES_GROUP) return "codes in groups of other than 128";
    if (((uintptr_t)c.p & 15) || c.ld * bytes % 16) return "rows of codes are not aligned";
    return NULL;
}

/* Of a number that is not negative or NaN, and one that may be anything. */
static __device__ __forceinline__ float max_abs(float top, float v)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(top), "f"(fabsf(v)));
    return r;
#else
    return max_nan(top, fabsf(v));
#endif
}
static __device__ __forceinline__ float unit_amax(float top, const float v[8])
{
#pragma unroll
    for (int j = 0; j < 8; j++)
        top = max_abs(top, v[j]);
    return top;
}
/* As bits, in whose order NaN is the largest. */
static __device__ __forceinline__ uint32_t warp_top(float top)
{
    uint32_t u = __float_as_uint(top) & 0x7fffffffu;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL, u);
#else
    for (int by = 16; by; by >>= 1) {
        uint32_t o = __shfl_xor_sync(FULL, u, by);
        u = o > u ? o : u;
    }
    return u;
#endif
}

/* ---- a row of one block, or of a cluster --------------------------------------------------------
 */
static __device__ __forceinline__ void cluster_come(int parts)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (parts > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
    (void)parts;
#endif
}
static __device__ __forceinline__ void cluster_meet(int parts)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (parts > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    (void)parts;
#endif
}
/* *at of the block of that rank in the cluster becomes u. */
static __device__ __forceinline__ void cluster_put(uint32_t *at, int rank, uint32_t u)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t to = (uint32_t)__cvta_generic_to_shared(at);
    asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\n"
                 "st.shared::cluster.u32 [r], %2;\n}" ::"r"(to),
                 "r"(rank), "r"(u)
                 : "memory");
#else
    (void)rank;
    *at = u;
#endif
}
#define CODES_PARTS 8 /* blocks of a row at most */

/* The largest lane of a row, of what each thread found. A row of several blocks: parts of them,
 * this one the number `part`, and cluster_come was called at the start. Every warp leaves what it
 * has in all blocks of the row, so that one barrier does. Once in the life of a block; else `turn`,
 * as in row_sum, goes on. */
static __device__ __forceinline__ float row_top(float top, int parts, int part, int *turn)
{
    __shared__ uint32_t tops[2][CODES_PARTS * ROW_THREADS / 32];
    uint32_t *all = tops[*turn], u = warp_top(top);
    const int n = (int)blockDim.x / 32, warp = (int)threadIdx.x / 32, me = (int)threadIdx.x % 32;
    cluster_meet(parts); /* all blocks have started */
    if (parts > 1 && me < parts) cluster_put(&all[part * n + warp], me, u);
    if (parts == 1 && me == 0) all[warp] = u;
    *turn ^= 1;
    cluster_come(parts);
    cluster_meet(parts);
    if (parts == 1) __syncthreads();
    u = 0;
    for (int i = 0; i < n * parts; i++)
        u = all[i] > u ? all[i] : u;
    return bits_f32(u);
}

/* ---- scales and codes ---------------------------------------------------------------------------
 * A quotient v / by, rounded as the division rounds it, from a reciprocal that is the same for
 * many: v * inv and one correction. (Where inv is rounded correctly and nothing leaves the range of
 * f32. The remainder is taken the other way round, so that -0 stays -0.) For scales and rows where
 * that may not hold (not `near`), scale and lanes are first brought near 1 by a power of two, and
 * quotients from `limit` on, beyond all codes, are not corrected. */
struct code_factor {
    float scale, by, inv, bring, limit;
    bool near;
};
static __device__ __forceinline__ code_factor factor_of(const gpu_codes &c, float top)
{
    code_factor f;
    f.scale = top != top    ? top
              : c.fixed > 0 ? c.fixed
                            : top / (c.code == GPU_E4M3 ? 448.0f : 127.5f);
    f.by = f.scale > 0 ? f.scale : 1.0f;
    f.near = f.by > 0x1p-60f && f.by < 0x1p60f && top < f.by * 0x1p30f;
    f.bring = 1;
    if (!f.near) { /* 2^-exponent; of an infinite scale nothing is left but signs and NaN */
        uint32_t e = __float_as_uint(f.by) >> 23;
        f.bring = bits_f32((254 - (e < 253 ? e : 253)) << 23);
        f.by *= f.bring;
    }
    f.limit = f.by < INFINITY ? 0x1p30f : 0;
    f.inv = 1.0f / f.by;
    return f;
}
static __device__ __forceinline__ float quotient(const code_factor &f, float v)
{
    float q = v * f.inv;
    return __fmaf_rn(__fmaf_rn(f.by, q, -v), -f.inv, q);
}
static __device__ __forceinline__ float far_quotient(const code_factor &f, float v)
{
    v *= f.bring;
    return fabsf(v * f.inv) < f.limit ? quotient(f, v) : v * f.inv;
}
/* Of the row t, kept. */
static __device__ __forceinline__ void keep_row_scale(const gpu_codes &c, int64_t t, float scale)
{
    if (threadIdx.x == 0) c.scale[t * c.scale_row] = scale;
}

static __device__ __forceinline__ uint32_t four_e4m3(const float q[4])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t lo, hi;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(q[1]), "f"(q[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(q[3]), "f"(q[2]));
    return (uint32_t)lo | (uint32_t)hi << 16;
#else
    return f32_e4m3(q[0]) | f32_e4m3(q[1]) << 8 | f32_e4m3(q[2]) << 16 | f32_e4m3(q[3]) << 24;
#endif
}
/* Nearest integer of -128..127; NaN becomes 0. */
static __device__ __forceinline__ float int8_of(float q)
{
    q = q < -128.0f ? -128.0f : q > 127.0f ? 127.0f : q == q ? q : 0.0f;
    return rintf(q); /* of what is below 0 and rounds to it, -0 */
}
static __device__ __forceinline__ uint32_t four_int8(const float q[4])
{
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float v = q[j] < -128.0f ? -128.0f : q[j] > 127.0f ? 127.0f : q[j] == q[j] ? q[j] : 0.0f;
        w[j] = __float_as_uint(__fadd_rn(v, 12582912.0f)); /* 1.5 * 2^23: ends in the integer */
    }
    return __byte_perm(__byte_perm(w[0], w[1], 0x0040), __byte_perm(w[2], w[3], 0x0040), 0x5410);
}

/* n lanes of row t from lane i on. */
static __device__ __forceinline__ void put_codes(const gpu_codes &c, int64_t t, int i, int n,
                                                 const code_factor &f, const float v[8])
{
    const int64_t at = t * c.ld + i;
    float q[8];
    if (f.near) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            q[j] = quotient(f, v[j]);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++)
            q[j] = far_quotient(f, v[j]);
    }
    if (c.as_bf16) {
        uint16_t *p = (uint16_t *)c.p + at;
#pragma unroll
        for (int j = 0; j < 8; j++)
            q[j] = c.code == GPU_E4M3 ? e4m3_f32(f32_e4m3(q[j])) : int8_of(q[j]);
        if (n == 8) {
            *(uint4 *)p = bf16_raw8(q);
            return;
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (j < n) p[j] = f32_bf16(q[j]);
        return;
    }
    const bool e4m3 = c.code == GPU_E4M3;
    const uint2 w =
        make_uint2(e4m3 ? four_e4m3(q) : four_int8(q), e4m3 ? four_e4m3(q + 4) : four_int8(q + 4));
    uint8_t *p = (uint8_t *)c.p + at;
    if (n == 8) {
        *(uint2 *)p = w;
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (j < n) p[j] = (uint8_t)((j < 4 ? w.x : w.y) >> (8 * (j % 4)));
}

/* The same with the scale of their group, which 16 threads have. All of the warp come here. */
static __device__ __forceinline__ void put_group_codes(const gpu_codes &c, int64_t t, int i, int n,
                                                       const float v[8])
{
    float top = unit_amax(0, v);
    for (int by = 8; by; by >>= 1)
        top = max_abs(top, __shfl_xor_sync(FULL, top, by));
    const code_factor f = factor_of(c, top);
    if (n && i % CODES_GROUP == 0)
        c.scale[t * c.scale_row + i / CODES_GROUP * c.scale_group] = f.scale;
    put_codes(c, t, i, n, f, v);
}
#endif
