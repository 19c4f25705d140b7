/* Products of at most 8 rows with a weight in row-major order: y[M,N] = x[M,K] W[N,K]^T. The kernel
 * is a stream of W. Every multiplying warp brings what it multiplies by itself: in a step 16 rows x
 * 128 bytes, always the same slices of K of every tile, by asynchronous copies into a ring of its
 * own. So no warp waits for another but for the sums of a tile, and those have buffers: one more
 * warp adds them up and writes y.
 *
 * Weights do not depend on the kernel before: the rings fill in front of the wait for it. A block
 * has a multiprocessor for itself (alone.cuh).
 *
 * Places of numbers in shared memory, the order of terms of a sum, and how codes become bf16 are
 * those of rows.cuh: pieces of 16 bytes of row r stand at place number ^ r%8; a slice of x is
 * [64 columns][token][128 bytes]. x stays for all tiles; a K for which it does not fit is cut among
 * the blocks of a cluster, whose first block adds up what the others send. Sums are added in a
 * fixed order: results do not depend on timing. What lies outside of N or K is zero. */
#ifndef KERN_CUDA_SLIM_CUH
#define KERN_CUDA_SLIM_CUH
#include "kern/cuda/rows.cuh"
#include "kern/cuda/slim_plan.h"

struct slim_args {
    const uint8_t *w;
    const uint16_t *x; /* bf16 */
    const float *scale, *bias, *row_scale, *x_scale;
    void *y;
    int64_t row_bytes, ldx, ld_x_scale, ldy; /* the first: from a row of W to the next */
    int N, K, M, y_bf16, k_bytes;
    int scale_step;       /* scale of row n is scale[n * scale_step] */
    int split, step;      /* from a tile of a block to its next */
    int tiles, all, each; /* slices of K; of a block, the last of a cluster may have fewer */
    slim_mem mem;
};

struct slim_at { /* what this block computes */
    int rank, group, tiles, slice0, slices;
};

static __device__ __forceinline__ slim_at slim_block(const slim_args &p)
{
    slim_at at;
    at.rank = (int)blockIdx.x % p.split;
    at.group = (int)blockIdx.x / p.split;
    at.tiles = (p.tiles - at.group + p.step - 1) / p.step;
    at.slice0 = at.rank * p.each;
    at.slices = p.all - at.slice0 < p.each ? p.all - at.slice0 : p.each;
    return at;
}

/* 16 bytes, or n = 0 of them and zeros; weights are read once: they leave the L2 first. */
static __device__ __forceinline__ void slim_copy16(uint32_t to, const void *from, uint32_t n,
                                                   uint64_t policy)
{
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(to),
        "l"(from), "r"(n), "l"(policy)
        : "memory");
}

static __device__ __forceinline__ void slim_sts64(uint32_t at, uint32_t a, uint32_t b)
{
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}
/* d[16x8] += a[16x32] b[32x8] of signed bytes, exact; lane l holds rows l/4 and l/4 + 8, four bytes
 * of k at 4 (l%4) and at 16 + that. */
static __device__ __forceinline__ void slim_mma_s8(int d[4], const uint32_t a[4], uint32_t b0,
                                                   uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                 "{%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* ---- formats ------------------------------------------------------------------------------------
 * Those of rows.cuh, with x as bf16; where x is codes as well, of e4m3 as f16, which holds them and
 * to which one instruction turns two codes of W, and of int8 as bytes, whose sums are exact. unit:
 * bytes of 64 columns of a token; put: 8 columns of a token, piece number `piece` of its unit,
 * where the lane's part of 64 bytes of W finds them at x_lane; multiply: 16 rows x 64 bytes, which
 * are in raw: pieces of two rows. */
template <class R> struct slim_of : R {
    typedef float sum;
    static constexpr int unit = 128;
    static __device__ __forceinline__ void put(uint32_t to, int m, int piece, uint4 v)
    {
        ptx_sts128(to + (uint32_t)(m * 128 + (piece ^ R::x_turn(m)) * 16), v);
    }
    static __device__ __forceinline__ void multiply(const uint4 raw[2], uint32_t x, bool live,
                                                    float (&acc)[2][4])
    {
#pragma unroll
        for (int h = 0; h < R::halves; h++) {
            uint32_t a[2][4], b[2][2];
            uint4 v = make_uint4(0, 0, 0, 0);
            if (live) v = ptx_lds128(x ^ (uint32_t)h * 16);
            R::template weights<false>(raw, h, a);
            R::template tokens<false>(v, b);
            ptx_mma_bf16(acc[0], a[0], b[0][0], b[0][1]);
            ptx_mma_bf16(acc[1], a[1], b[1][0], b[1][1]);
        }
    }
};
typedef slim_of<rows_bf16> slim_bf16;
typedef slim_of<rows_e4m3> slim_e4m3;
typedef slim_of<rows_int8> slim_int8;

static __device__ __forceinline__ float slim_low(uint32_t w)
{
    return __uint_as_float(w << 16);
}
static __device__ __forceinline__ float slim_high(uint32_t w)
{
    return __uint_as_float(w & 0xffff0000u);
}

struct slim_e4m3_codes : slim_of<rows_e4m3> {
    static __device__ __forceinline__ uint32_t f16(uint32_t w)
    {
        return ptx_pack_f16(slim_low(w), slim_high(w));
    }
    static __device__ __forceinline__ void put(uint32_t to, int m, int piece, uint4 v)
    {
        slim_of<rows_e4m3>::put(to, m, piece, make_uint4(f16(v.x), f16(v.y), f16(v.z), f16(v.w)));
    }
    static __device__ __forceinline__ void multiply(const uint4 raw[2], uint32_t x, bool live,
                                                    float (&acc)[2][4])
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (live) v = ptx_lds128(x ^ (uint32_t)h * 16);
#pragma unroll
            for (int s = 0; s < 2; s++) {
                const uint32_t w0 = h ? s ? raw[0].w : raw[0].z : s ? raw[0].y : raw[0].x;
                const uint32_t w1 = h ? s ? raw[1].w : raw[1].z : s ? raw[1].y : raw[1].x;
                const uint32_t a[4] = {ptx_e4m3_f16(w0), ptx_e4m3_f16(w1), ptx_e4m3_f16(w0 >> 16),
                                       ptx_e4m3_f16(w1 >> 16)};
                ptx_mma_f16(acc[s], a, s ? v.z : v.x, s ? v.w : v.y);
            }
        }
    }
};

struct slim_int8_codes {
    typedef int sum;
    static constexpr int units = 2, unit = 64;
    static __device__ __forceinline__ uint32_t four(uint32_t a, uint32_t b)
    {
        return ((uint32_t)__float2int_rn(slim_low(a)) & 255) |
               ((uint32_t)__float2int_rn(slim_high(a)) & 255) << 8 |
               ((uint32_t)__float2int_rn(slim_low(b)) & 255) << 16 |
               (uint32_t)__float2int_rn(slim_high(b)) << 24;
    }
    static __device__ __forceinline__ int x_lane(int lane, int part, int tokens)
    {
        return part * tokens * unit + lane / 4 * unit + lane % 4 * 16;
    }
    static __device__ __forceinline__ void put(uint32_t to, int m, int piece, uint4 v)
    {
        slim_sts64(to + (uint32_t)(m * unit + piece * 8), four(v.x, v.y), four(v.z, v.w));
    }
    static __device__ __forceinline__ void multiply(const uint4 raw[2], uint32_t x, bool live,
                                                    int (&acc)[2][4])
    {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (live) v = ptx_lds128(x);
        const uint32_t a[2][4] = {{raw[0].x, raw[1].x, raw[0].y, raw[1].y},
                                  {raw[0].z, raw[1].z, raw[0].w, raw[1].w}};
        slim_mma_s8(acc[0], a[0], v.x, v.y);
        slim_mma_s8(acc[1], a[1], v.z, v.w);
    }
};

/* ---- what comes in ------------------------------------------------------------------------------
 * The next step of a warp: slice number warp + 8 i of the block, tile number t. Lane l copies piece
 * l%8 of rows l/8, + 4, + 8, + 12. */
struct slim_next {
    const uint8_t
        *row; /* of W: the lane's first row of the tile, its piece of the block's slice 0 */
    uint64_t policy;
    int i, t, slot;
    int rows; /* of the tile from the lane's first row on, 0 or less = none */
};

template <int DEPTH>
static __device__ __forceinline__ void slim_ask(const slim_args &p, const slim_at &at, int warp,
                                                int lane, int n_mine, uint32_t ring, slim_next &s)
{
    if (s.t < at.tiles && n_mine > 0) {
        const int slice = s.i * SLIM_WARPS + warp;
        const bool in_k = (at.slice0 + slice) * SLIM_SLICE + lane % 8 * 16 < p.k_bytes;
        const uint8_t *from = s.row + slice * SLIM_SLICE;
        const uint32_t to = ring + (uint32_t)(s.slot * SLIM_STEP + lane / 8 * SLIM_SLICE +
                                              ((lane % 8) ^ (lane / 8)) * 16);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const bool there = in_k && 4 * j < s.rows;
            slim_copy16((to ^ (uint32_t)(j % 2 * 64)) + (uint32_t)(j * 4 * SLIM_SLICE),
                        there ? from + 4 * j * p.row_bytes : p.w, there ? 16 : 0, s.policy);
        }
        if (++s.i == n_mine) {
            s.i = 0, s.t++;
            s.row += (int64_t)p.step * SLIM_ROWS * p.row_bytes;
            s.rows -= p.step * SLIM_ROWS;
        }
        if (++s.slot == DEPTH) s.slot = 0;
    }
    ptx_copy_commit(); /* an empty group where there is nothing more: they are counted */
}

/* The warp's slices of x. Four eighths of a warp take four tokens of 64 columns at a time, or fewer
 * of more columns. */
template <class W>
static __device__ __forceinline__ void slim_take_x(const slim_args &p, const slim_at &at, int warp,
                                                   int lane, int n_mine, uint32_t x)
{
    const int side = p.M >= 3 ? 4 : p.M, beside = 4 / side; /* tokens, units of 64 columns */
    const int m0 = lane / 8 % side, piece = lane % 8, units = n_mine * W::units;
#pragma unroll 1
    for (int j = lane / 8 / side; j < units; j += 4 * beside) {
        uint4 v[4][2];
        uint32_t to[4];
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const int unit = j + b * beside, slice = unit / W::units * SLIM_WARPS + warp;
            const int inside = slice * W::units + unit % W::units;
            const int col = (at.slice0 * W::units + inside) * 64 + piece * 8;
            to[b] = x + (uint32_t)(inside * p.M * W::unit);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int m = m0 + h * 4;
                v[b][h] = make_uint4(0, 0, 0, 0);
                if (unit < units && m < p.M && col < p.K)
                    v[b][h] = *(const uint4 *)(p.x + m * p.ldx + col);
            }
        }
#pragma unroll
        for (int b = 0; b < 4; b++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int m = m0 + h * 4;
                if (j + b * beside < units && m < p.M) W::put(to[b], m, piece, v[b][h]);
            }
    }
}

/* ---- products -----------------------------------------------------------------------------------
 */
/* What the products of a slice are multiplied by, for the lane's two tokens: block scales. */
static __device__ __forceinline__ float slim_block_scale(const slim_args &p, const slim_at &at,
                                                         int t, int slice)
{
    if (t >= at.tiles || slice >= at.slices) return 0;
    const int row = (at.group + t * p.step) * SLIM_ROWS;
    return p.scale[(int64_t)(row / 128) * p.all + at.slice0 + slice];
}

struct slim_bars { /* shared-memory addresses; one for each buffer of sums */
    uint32_t full, empty, far_full, far_empty;
};

template <class W, int DEPTH, bool BLOCK>
static __device__ __forceinline__ void slim_warp(const slim_args &p, const slim_at &at,
                                                 uint32_t smem, slim_bars bar, int warp, int lane,
                                                 int n_mine, slim_next &next)
{
    const uint32_t ring = smem + (uint32_t)(warp * DEPTH * SLIM_STEP);
    const uint32_t w_lane = ring + (uint32_t)rows_w_lane(lane, 0);
    const bool live = lane / 4 < p.M;
    const uint32_t x_lane[2] = {smem + p.mem.x + (uint32_t)W::x_lane(lane, 0, p.M),
                                smem + p.mem.x +
                                    (uint32_t)W::x_lane(lane, 1, p.M)}; /* of 64 bytes each */
    const int r = rows_turn(lane / 4), m = lane % 4 * 2;
    int slot = 0;
    float scale = BLOCK ? slim_block_scale(p, at, 0, warp) : 0;
    for (int t = 0; t < at.tiles; t++) {
        float tot[4] = {0, 0, 0, 0};
        typename W::sum acc[2][4] = {};
#pragma unroll 1
        for (int i = 0; i < n_mine; i++) {
            const int slice = i * SLIM_WARPS + warp;
            const uint32_t from = w_lane + (uint32_t)(slot * SLIM_STEP);
            uint4 raw[2][2];
            ptx_copy_wait<DEPTH - 1>();
            __syncwarp(); /* the copies of all lanes are there */
#pragma unroll
            for (int q = 0; q < 2; q++) {
                raw[q][0] = ptx_lds128(from ^ (uint32_t)(q * 64));
                raw[q][1] = ptx_lds128((from ^ (uint32_t)(q * 64)) + 8 * SLIM_SLICE);
            }
            __syncwarp(); /* and all have read: the place is free */
            slim_ask<DEPTH>(p, at, warp, lane, n_mine, ring, next);
            if (++slot == DEPTH) slot = 0;
            const float by = scale;
            if (BLOCK)
                scale = i + 1 < n_mine ? slim_block_scale(p, at, t, slice + SLIM_WARPS)
                                       : slim_block_scale(p, at, t + 1, warp);
#pragma unroll
            for (int q = 0; q < 2; q++)
                W::multiply(raw[q], x_lane[q] + (uint32_t)slice * p.mem.x_slice, live, acc);
            if (!BLOCK) continue;
            const uint32_t xs = smem + p.mem.x_scales + (uint32_t)((slice * p.M + m) * 4);
            float f[2] = {by, by};
            if (p.x_scale && m < p.M) f[0] *= ptx_lds_f32(xs);
            if (p.x_scale && m + 1 < p.M) f[1] *= ptx_lds_f32(xs + 4);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                tot[k] = fmaf(f[k % 2], (float)(acc[0][k] + acc[1][k]), tot[k]);
                acc[0][k] = acc[1][k] = 0;
            }
        }
        const int d = t % SLIM_SUMS;
        const uint32_t my =
            smem + p.mem.parts + (uint32_t)(((d * SLIM_WARPS + warp) * p.M * SLIM_ROWS + r) * 4);
        ptx_mbar_wait(bar.empty + (uint32_t)d * 8, (uint32_t)(t / SLIM_SUMS & 1) ^ 1);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (m + k % 2 < p.M)
                ptx_sts_f32(my + (uint32_t)(((m + k % 2) * SLIM_ROWS + k / 2 * 8) * 4),
                            BLOCK ? tot[k] : (float)(acc[0][k] + acc[1][k]));
        ptx_mbar_arrive(bar.full + (uint32_t)d * 8);
    }
}

/* ---- sums ---------------------------------------------------------------------------------------
 * One warp: adds up those of each tile. The first block of a cluster adds those of the others and
 * writes y; the others send theirs to it. Lane l has cells l, l + 32, .. of [token][row]. */
template <bool BLOCK>
static __device__ __forceinline__ void slim_finish(const slim_args &p, const slim_at &at,
                                                   uint32_t smem, slim_bars bar, int lane)
{
    const int cells = SLIM_ROWS * p.M;
    for (int t = 0; t < at.tiles; t++) {
        const int d = t % SLIM_SUMS, n = (at.group + t * p.step) * SLIM_ROWS + lane % SLIM_ROWS;
        const uint32_t parity = (uint32_t)(t / SLIM_SUMS & 1), b = (uint32_t)d * 8;
        const uint32_t parts = smem + p.mem.parts + (uint32_t)(d * SLIM_WARPS * cells * 4);
        const uint32_t far_sums = smem + p.mem.far_sums + (uint32_t)(d * (p.split - 1) * cells * 4);
        float col = 1, bias = 0, sum[4];
        if (n < p.N && at.rank == 0) {
            if (!BLOCK && p.scale) col = p.scale[(int64_t)n * p.scale_step];
            if (p.bias) bias = p.bias[n];
        }
        if (p.split > 1 && at.rank == 0 && lane == 0)
            ptx_mbar_expect(bar.far_full + b, (uint32_t)((p.split - 1) * cells * 4));
        ptx_mbar_wait(bar.full + b, parity);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int i = k * 32 + lane;
            sum[k] = 0;
            if (i >= cells) continue;
#pragma unroll
            for (int w = 0; w < SLIM_WARPS; w++)
                sum[k] += ptx_lds_f32(parts + (uint32_t)((w * cells + i) * 4));
        }
        ptx_mbar_arrive(bar.empty + b);
        if (p.split > 1 && at.rank != 0) {
            ptx_mbar_wait(bar.far_empty + b, parity ^ 1);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int i = k * 32 + lane;
                if (i < cells)
                    ptx_send_f32(far_sums + (uint32_t)(((at.rank - 1) * cells + i) * 4),
                                 bar.far_full + b, 0, sum[k]);
            }
            continue;
        }
        if (p.split > 1) {
            ptx_mbar_wait(bar.far_full + b, parity);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int i = k * 32 + lane;
                for (int o = 0; o < p.split - 1 && i < cells; o++)
                    sum[k] += ptx_lds_f32(far_sums + (uint32_t)((o * cells + i) * 4));
            }
            __syncwarp();
            if (lane > 0 && lane < p.split) ptx_mbar_arrive_at(bar.far_empty + b, (uint32_t)lane);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int i = k * 32 + lane, m = i / SLIM_ROWS;
            if (i >= cells || n >= p.N) continue;
            const float by = p.row_scale ? col * p.row_scale[m] : col;
            const float v = fmaf(sum[k], by, bias);
            if (p.y_bf16)
                ((uint16_t *)p.y)[m * p.ldy + n] = (uint16_t)ptx_pack_bf16(v, 0);
            else
                ((float *)p.y)[m * p.ldy + n] = v;
        }
    }
}

/* ---- the kernel ---------------------------------------------------------------------------------
 */
template <class W, int DEPTH, bool BLOCK>
__global__ void __launch_bounds__((SLIM_WARPS + 1) * 32, 1)
    slim_kernel(const __grid_constant__ slim_args p)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const slim_at at = slim_block(p);
    const uint32_t base = ptx_smem(smem), bars = base + p.mem.bars;
    const slim_bars bar = {bars, bars + SLIM_SUMS * 8, bars + SLIM_SUMS * 16,
                           bars + SLIM_SUMS * 24};
    const int n_mine = (at.slices - warp + SLIM_WARPS - 1) / SLIM_WARPS;
    const int row = at.group * SLIM_ROWS + lane / 8;
    slim_next next = {p.w + row * p.row_bytes + at.slice0 * SLIM_SLICE + lane % 8 * 16,
                      ptx_policy_once(),
                      0,
                      0,
                      0,
                      p.N - row};
    if (threadIdx.x == SLIM_WARPS * 32) {
        for (int i = 0; i < SLIM_SUMS; i++) {
            ptx_mbar_init(bar.full + (uint32_t)i * 8, SLIM_WARPS * 32);
            ptx_mbar_init(bar.empty + (uint32_t)i * 8, 32);
            ptx_mbar_init(bar.far_full + (uint32_t)i * 8, 1);
            ptx_mbar_init(bar.far_empty + (uint32_t)i * 8, 1);
        }
        ptx_mbar_fence();
    }
    if (warp < SLIM_WARPS)
        for (int i = 0; i < DEPTH; i++)
            slim_ask<DEPTH>(p, at, warp, lane, n_mine, base + (uint32_t)(warp * DEPTH * SLIM_STEP),
                            next);
    __syncthreads();
    if (p.split > 1) ptx_cluster_arrive();
    ptx_pdl_wait();
    if (warp == SLIM_WARPS) {
        ptx_pdl_go();
        if (p.split > 1) ptx_cluster_wait(); /* the others' barriers are made */
        slim_finish<BLOCK>(p, at, base, bar, lane);
    } else {
        slim_take_x<W>(p, at, warp, lane, n_mine, base + p.mem.x);
        for (int i = lane; BLOCK && p.x_scale && i < n_mine * p.M; i += 32) {
            const int slice = i / p.M * SLIM_WARPS + warp, m = i % p.M;
            ptx_sts_f32(base + p.mem.x_scales + (uint32_t)((slice * p.M + m) * 4),
                        p.x_scale[m * p.ld_x_scale + at.slice0 + slice]);
        }
        __syncwarp(); /* only this warp reads its slices */
        slim_warp<W, DEPTH, BLOCK>(p, at, base, bar, warp, lane, n_mine, next);
        ptx_copy_wait<0>();
    }
    /* No block leaves while another may still write to it. */
    if (p.split > 1) {
        if (warp != SLIM_WARPS) ptx_cluster_wait();
        ptx_cluster_arrive();
        ptx_cluster_wait();
    }
}
#endif
