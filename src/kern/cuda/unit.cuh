/* A unit of packed weights times eight tokens on the tensor cores: the weight is the 16-row
 * operand, the tokens are the 8 columns. format.cuh says how a unit is stored and which columns of
 * x a lane has. For the kernels of few rows (small.cuh, experts_small.cuh). */
#ifndef KERN_CUDA_UNIT_CUH
#define KERN_CUDA_UNIT_CUH
#include "kern/cuda/format.cuh"

/* The first column of x that a lane has in a unit. */
template <class W> static __device__ __forceinline__ int small_first(int lane)
{
    return lane % 4 * (W::fine ? 4 : 16);
}

struct small_x { /* what a lane needs of x for one unit: [block][h], word s of it for step s */
    uint4 v[2][2];
};

/* Sums of x over a group, of tokens 2(l%4) and +1; times the bias where that is the same for all.
 */
template <class W> struct small_sum {
    static constexpr bool used = W::biased && !W::fine;
    float t[used ? W::groups : 1][2];
};

template <class W> static __device__ __forceinline__ small_sum<W> small_off(const small_x &x)
{
    small_sum<W> r = {};
    if constexpr (!small_sum<W>::used) return r;
    const int c = threadIdx.x % 4; /* token n lies in lanes 4n .. 4n+3 */
#pragma unroll
    for (int g = 0; g < W::groups; g++) {
        float s = 0;
#pragma unroll
        for (int i = 4 / W::groups * g; i < 4 / W::groups * (g + 1); i++) {
            const uint32_t w[4] = {x.v[i / 2][i % 2].x, x.v[i / 2][i % 2].y, x.v[i / 2][i % 2].z,
                                   x.v[i / 2][i % 2].w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                s += ptx_bf16_f32(w[j] & 0xffff) + __uint_as_float(w[j] & 0xffff0000u);
        }
        s += __shfl_xor_sync(~0u, s, 1); /* the four lanes of a token */
        s += __shfl_xor_sync(~0u, s, 2);
        if (!W::zeros) s *= 136.0f;
        r.t[g][0] = __shfl_sync(~0u, s, 8 * c);
        r.t[g][1] = __shfl_sync(~0u, s, 8 * c + 4);
    }
    return r;
}

/* The bias of a fine block taken off, where steps 2i and 2i+1 share a group. */
template <class W>
static __device__ __forceinline__ void small_center(uint32_t zero, int b, uint32_t a[4][4])
{
#pragma unroll
    for (int s = 0; s < 4; s++) {
        uint32_t z[2];
        format_zeros<W>(zero, 2 * b + s / 2, z);
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[s][i] = ptx_sub_bf16x2(a[s][i], z[i % 2]);
    }
}

/* What a warp has of a tile. Products one after the other on the same sums wait for each other:
 * each step of a block has sums of its own. Where nothing happens between units, they last. */
template <class W> struct small_total {
    static constexpr bool plain = W::sums == SUMS_PLAIN || W::sums == SUMS_VALUES;
    float v[plain ? 4 : 1][4];
    __device__ __forceinline__ float at(int i) const
    {
        return plain ? (v[0][i] + v[plain ? 1 : 0][i]) + (v[plain ? 2 : 0][i] + v[plain ? 3 : 0][i])
                     : v[0][i];
    }
};

/* Sums apart, each times the scale of its row and group, less what the bias made of it. */
template <class W>
static __device__ __forceinline__ void small_scale(uint32_t side, uint32_t zero,
                                                   const float (&acc)[4][4],
                                                   const small_sum<W> &off, float tot[4])
{
    float s[2][W::groups];
    format_scales<W>(side, s);
#pragma unroll
    for (int g = 0; g < W::groups; g++) {
        float o[2] = {1, 1};
        if (W::zeros && !W::fine) {
            o[0] = __uint_as_float(ptx_lds8(zero + (uint32_t)g) << 16 | 0x43000000u);
            o[1] = __uint_as_float(ptx_lds8(zero + (uint32_t)(8 * W::zero_bytes + g)) << 16 |
                                   0x43000000u);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float v = acc[g][i];
            if (W::groups == 1) v = (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
            if (W::groups == 2) v = acc[2 * g][i] + acc[2 * g + 1][i];
            if (small_sum<W>::used)
                v = W::zeros ? fmaf(-o[i / 2], off.t[g][i % 2], v) : v - off.t[g][i % 2];
            tot[i] = fmaf(s[i / 2][g], v, tot[i]);
        }
    }
}

/* Which sums step s of block b belongs to. */
template <class W> static __device__ __forceinline__ constexpr int small_chain(int b, int s)
{
    return W::sums == SUMS_ROW && W::groups == 4   ? 2 * b + s / 2
           : W::sums == SUMS_ROW && W::groups == 2 ? 2 * b + s % 2
                                                   : s;
}

template <class W>
static __device__ __forceinline__ void
small_unit(uint32_t unit, const small_x &x, const small_sum<W> &off, int lane, small_total<W> &tot)
{
    constexpr bool quarters = W::fine && W::sums == SUMS_ROW;
    const uint32_t side = unit + 2 * W::block_bytes + (uint32_t)(lane / 4 * W::row_bytes);
    const uint32_t zero = unit + 2 * W::block_bytes + SMALL_ROWS * W::row_bytes +
                          (uint32_t)(lane / 4 * W::zero_bytes);
    float acc[4][4] = {};
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const uint32_t at = unit + b * W::block_bytes + (uint32_t)lane * 16;
        uint32_t a[4][4];
        if constexpr (W::sums == SUMS_VALUES)
            W::values(at, side, b, a);
        else
            W::block(at, a);
        if constexpr (quarters) small_center<W>(zero, b, a);
        const uint32_t b0[4] = {x.v[b][0].x, x.v[b][0].y, x.v[b][0].z, x.v[b][0].w};
        const uint32_t b1[4] = {x.v[b][1].x, x.v[b][1].y, x.v[b][1].z, x.v[b][1].w};
#pragma unroll
        for (int s = 0; s < 4; s++) {
            if constexpr (small_total<W>::plain)
                ptx_mma_bf16(tot.v[s], a[s], b0[s], b1[s]);
            else
                ptx_mma_bf16(acc[small_chain<W>(b, s)], a[s], b0[s], b1[s]);
        }
    }
    if constexpr (W::sums == SUMS_ROW)
        small_scale<W>(side, zero, acc, off, tot.v[0]);
    else if constexpr (W::sums == SUMS_UNIT) {
        const float s = __uint_as_float(ptx_lds32(side));
#pragma unroll
        for (int i = 0; i < 4; i++)
            tot.v[0][i] = fmaf(s, (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]), tot.v[0][i]);
    }
}
#endif
