/* Products of few rows with a weight that is read once: y[M,N] = x[M,K] W^T, M <= 8. Decoding is
 * reading weights, so the kernel is a stream. One warp of a block does nothing but ask the copy
 * engine for the next stretch of W, into a ring in shared memory; the multiplying warps take a unit
 * each of every stretch, on the tensor cores, with the weight as the 16-row operand and the tokens
 * as the 8 columns; one more warp adds up their sums and writes y. Nobody waits for the whole
 * block: stretches and sums pass through barriers of their own.
 *
 * W is stored as format.cuh says, which also says which columns of x a lane has.
 *
 * Tiles go round the blocks of the grid. A warp always has the same columns, so with a short K its
 * part of x stays in registers (UW units); a long K is cut among the SPLIT blocks of a cluster,
 * whose first block adds up what the others send it. Sums are added in a fixed order: results do
 * not depend on timing. Weights do not depend on the kernel before, so the ring fills before the
 * wait for it. */
#ifndef KERN_CUDA_SMALL_CUH
#define KERN_CUDA_SMALL_CUH
#include "kern/cuda/format.cuh"

struct small_args {
    const uint8_t *w;
    const __nv_bfloat16 *x; /* [M, K], row stride ldx */
    int64_t ldx;
    int N, K, M;
    format_out out;
};

/* WARPS multiply, UPW units of each stretch every one; STAGES stretches are on their way. UW > 0:
 * the units a warp has of a tile, whose x it keeps in registers; 0: x lies in shared memory. */
template <int WARPS, int STAGES, int UPW, int UW, int SPLIT> struct small_cfg {
    static constexpr int warps = WARPS, stages = STAGES, upw = UPW, uw = UW, split = SPLIT;
    static constexpr int threads = (WARPS + 2) * 32, sums = 4;
    static constexpr int chunk = WARPS * UPW; /* units of a stretch */
};

template <class W, class C, int M> struct small_shape {
    static constexpr int x_pad = 8; /* elements: rows of x start 16 bytes apart modulo 128 */
    static constexpr int stage_bytes = C::chunk * W::unit_bytes;
    static constexpr int ring_bytes = C::stages * stage_bytes;
    static constexpr int part_floats = C::warps * SMALL_ROWS * M;
    static constexpr int part_bytes = C::sums * part_floats * 4;
    static constexpr int tile_floats = SMALL_ROWS * M;
    static constexpr int far_bytes = C::split > 1 ? C::sums *(C::split - 1) * tile_floats * 4 : 0;
    static constexpr int bar_bytes = ((C::stages + 2 * C::sums) * 2 * 8 + 15) / 16 * 16;
    static __host__ __device__ int x_stride(int K) { return K + x_pad; }
    static size_t smem(int K)
    {
        return (size_t)ring_bytes + part_bytes + far_bytes + bar_bytes + 128 +
               (C::uw ? 0 : (size_t)M * (size_t)x_stride(K / C::split) * 2);
    }
};

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

/* Sums apart, each times the scale of its row and group, less what the bias made of it. */
template <class W, int SUMS>
static __device__ __forceinline__ void small_scale(uint32_t side, uint32_t zero,
                                                   const float (&acc)[SUMS][4],
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
            float v = W::groups == 1 ? acc[0][i] + acc[SUMS - 1][i] : acc[g][i];
            if (small_sum<W>::used)
                v = W::zeros ? fmaf(-o[i / 2], off.t[g][i % 2], v) : v - off.t[g][i % 2];
            tot[i] = fmaf(s[i / 2][g], v, tot[i]);
        }
    }
}

template <class W>
static __device__ __forceinline__ void small_unit(uint32_t unit, const small_x &x,
                                                  const small_sum<W> &off, int lane, float tot[4])
{
    constexpr bool quarters = W::fine && W::sums == SUMS_ROW;
    constexpr int sums = quarters ? 4 : 2;
    const uint32_t side = unit + 2 * W::block_bytes + (uint32_t)(lane / 4 * W::row_bytes);
    const uint32_t zero = unit + 2 * W::block_bytes + SMALL_ROWS * W::row_bytes +
                          (uint32_t)(lane / 4 * W::zero_bytes);
    float acc[sums][4] = {};
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
        for (int s = 0; s < 4; s++)
            ptx_mma_bf16(acc[quarters ? 2 * b + s / 2 : b], a[s], b0[s], b1[s]);
    }
    if constexpr (W::sums == SUMS_ROW) {
        small_scale<W, sums>(side, zero, acc, off, tot);
    } else {
        float s = 1;
        if (W::sums == SUMS_UNIT) s = __uint_as_float(ptx_lds32(side));
#pragma unroll
        for (int i = 0; i < 4; i++)
            tot[i] = W::sums == SUMS_UNIT ? fmaf(s, acc[0][i] + acc[1][i], tot[i])
                                          : tot[i] + (acc[0][i] + acc[1][i]);
    }
}

struct small_bars { /* shared-memory addresses; one for each stage or buffer of sums */
    uint32_t full, empty, sum_full, sum_empty, far_full, far_empty;
};

/* Asks for stretch after stretch. */
template <class W, class C>
static __device__ __forceinline__ void small_produce(const small_args &p, uint32_t ring,
                                                     small_bars bar, int n_tiles, int units,
                                                     int group, int groups, int unit0)
{
    const int row = p.K / SMALL_UNIT_K;
    int stage = 0, parity = 1; /* the first round finds every stage empty */
    for (int t = 0; t < n_tiles; t++)
        for (int u = 0; u < units; u += C::chunk) {
            int n = units - u < C::chunk ? units - u : C::chunk;
            ptx_mbar_wait(bar.empty + stage * 8, parity);
            ptx_mbar_expect(bar.full + stage * 8, n * W::unit_bytes);
            ptx_bulk_load_once(ring + stage * C::chunk * W::unit_bytes,
                               p.w + ((int64_t)(group + t * groups) * row + unit0 + u) *
                                         W::unit_bytes,
                               n * W::unit_bytes, bar.full + stage * 8);
            if (++stage == C::stages) stage = 0, parity ^= 1;
        }
}

/* Adds up the warps' sums of each tile. The first block of a cluster adds those of the others and
 * writes y; the others send theirs to it. */
template <class W, class C, int M>
static __device__ __forceinline__ void
small_finish(const small_args &p, const float *parts, const float *far_sums, small_bars bar,
             int n_tiles, int lane, int group, int groups, uint32_t rank)
{
    typedef small_shape<W, C, M> S;
    constexpr int per = (S::tile_floats + 31) / 32;
    float by[per]; /* factors of the tokens that this lane writes */
#pragma unroll
    for (int k = 0; k < per; k++) {
        const int m = (k * 32 + lane) / SMALL_ROWS;
        by[k] = p.out.row_scale && m < p.M ? p.out.base * p.out.row_scale[m] : p.out.base;
    }
    for (int t = 0; t < n_tiles; t++) {
        const int d = t % C::sums, parity = t / C::sums & 1;
        const float *part = parts + d * S::part_floats;
        const int n = (group + t * groups) * SMALL_ROWS + lane % SMALL_ROWS;
        const float col = p.out.col_scale ? __ldg(p.out.col_scale + n) : 1.0f;
        const float bias = p.out.bias ? __ldg(p.out.bias + n) : 0.0f;
        float sum[per];
        if (C::split > 1 && rank == 0 && lane == 0)
            ptx_mbar_expect(bar.far_full + d * 8, (C::split - 1) * S::tile_floats * 4);
        ptx_mbar_wait(bar.sum_full + d * 8, parity);
#pragma unroll
        for (int k = 0; k < per; k++) {
            int i = k * 32 + lane;
            sum[k] = 0;
#pragma unroll
            for (int w = 0; w < C::warps; w++)
                if (i < S::tile_floats) sum[k] += part[w * S::tile_floats + i];
        }
        ptx_mbar_arrive(bar.sum_empty + d * 8);
        if (C::split > 1 && rank != 0) {
            ptx_mbar_wait(bar.far_empty + d * 8, parity ^ 1);
#pragma unroll
            for (int k = 0; k < per; k++) {
                int i = k * 32 + lane;
                if (i < S::tile_floats)
                    ptx_send_f32(
                        ptx_smem(far_sums + (d * (C::split - 1) + rank - 1) * S::tile_floats + i),
                        bar.far_full + d * 8, 0, sum[k]);
            }
            continue;
        }
        if (C::split > 1) {
            ptx_mbar_wait(bar.far_full + d * 8, parity);
#pragma unroll
            for (int k = 0; k < per; k++)
#pragma unroll
                for (int r = 0; r < C::split - 1; r++)
                    if (k * 32 + lane < S::tile_floats)
                        sum[k] +=
                            far_sums[(d * (C::split - 1) + r) * S::tile_floats + k * 32 + lane];
            __syncwarp();
            if (lane > 0 && lane < C::split) ptx_mbar_arrive_at(bar.far_empty + d * 8, lane);
        }
#pragma unroll
        for (int k = 0; k < per; k++) {
            int i = k * 32 + lane, m = i / SMALL_ROWS;
            if (i >= S::tile_floats || m >= p.M) continue;
            const float v = fmaf(sum[k] * by[k], col, bias);
            if (p.out.y_bf16)
                ((__nv_bfloat16 *)p.out.y)[m * p.out.ldy + n] = __float2bfloat16(v);
            else
                ((float *)p.out.y)[m * p.out.ldy + n] = v;
        }
    }
}

/* row: of x at the columns of this block and small_first of the lane. */
template <class W> static __device__ __forceinline__ int small_first(int lane)
{
    return lane % 4 * (W::fine ? 4 : 16);
}
template <class W>
static __device__ __forceinline__ small_x small_take(const __nv_bfloat16 *row, int u, bool live)
{
    small_x x;
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const __nv_bfloat16 *from = row + u * SMALL_UNIT_K + b * 64;
        x.v[b][0] = x.v[b][1] = make_uint4(0, 0, 0, 0);
        if (live && !W::fine) {
            x.v[b][0] = *(const uint4 *)from;
            x.v[b][1] = *(const uint4 *)(from + 8);
        }
        if (live && W::fine) {
            const uint2 s0 = *(const uint2 *)from, s1 = *(const uint2 *)(from + 16);
            const uint2 s2 = *(const uint2 *)(from + 32), s3 = *(const uint2 *)(from + 48);
            x.v[b][0] = make_uint4(s0.x, s1.x, s2.x, s3.x);
            x.v[b][1] = make_uint4(s0.y, s1.y, s2.y, s3.y);
        }
    }
    return x;
}

/* The multiplying warps. */
template <class W, class C, int M>
static __device__ __forceinline__ void
small_multiply(const small_args &p, float *parts, __nv_bfloat16 *xs, uint32_t ring, small_bars bar,
               int n_tiles, int units, int unit0, int warp, int lane)
{
    typedef small_shape<W, C, M> S;
    const bool live = lane / 4 < M && lane / 4 < p.M;
    const __nv_bfloat16 *row =
        p.x + (live ? lane / 4 : 0) * p.ldx + unit0 * SMALL_UNIT_K + small_first<W>(lane);
    small_x keep[C::uw ? C::uw : 1];
    small_sum<W> koff[C::uw ? C::uw : 1];
    if (C::uw) {
#pragma unroll
        for (int i = 0; i < C::uw; i++) {
            int u = (i / C::upw * C::warps + warp) * C::upw + i % C::upw;
            keep[i] = small_take<W>(row, u < units ? u : 0, live && u < units);
        }
#pragma unroll
        for (int i = 0; i < C::uw; i++)
            if (small_sum<W>::used) koff[i] = small_off<W>(keep[i]);
    } else {
        const int K = units * SMALL_UNIT_K, stride = S::x_stride(K);
        for (int i = threadIdx.x; i < M * (K / 8); i += C::warps * 32) {
            int m = i / (K / 8), k = i % (K / 8) * 8;
            uint4 v = {0, 0, 0, 0};
            if (m < p.M) v = *(const uint4 *)(p.x + m * p.ldx + unit0 * SMALL_UNIT_K + k);
            *(uint4 *)(xs + m * stride + k) = v;
        }
        asm volatile("bar.sync 1, %0;" ::"n"(C::warps * 32) : "memory");
        row = xs + (live ? lane / 4 : 0) * stride + small_first<W>(lane);
    }

    int stage = 0, parity = 0;
    for (int t = 0; t < n_tiles; t++) {
        float tot[4] = {0, 0, 0, 0};
        int chunks = (units + C::chunk - 1) / C::chunk;
        if (C::uw) {
#pragma unroll
            for (int c = 0; c < C::uw / C::upw; c++) {
                if (c >= chunks) break;
                ptx_mbar_wait(bar.full + stage * 8, parity);
#pragma unroll
                for (int j = 0; j < C::upw; j++)
                    if ((c * C::warps + warp) * C::upw + j < units)
                        small_unit<W>(ring + stage * S::stage_bytes +
                                          (warp * C::upw + j) * W::unit_bytes,
                                      keep[c * C::upw + j], koff[c * C::upw + j], lane, tot);
                ptx_mbar_arrive(bar.empty + stage * 8);
                if (++stage == C::stages) stage = 0, parity ^= 1;
            }
        } else {
            for (int c = 0; c < chunks; c++) {
                ptx_mbar_wait(bar.full + stage * 8, parity);
#pragma unroll
                for (int j = 0; j < C::upw; j++) {
                    int u = (c * C::warps + warp) * C::upw + j;
                    if (u < units) {
                        small_x x = small_take<W>(row, u, live);
                        small_sum<W> off;
                        if (small_sum<W>::used) off = small_off<W>(x);
                        small_unit<W>(ring + stage * S::stage_bytes +
                                          (warp * C::upw + j) * W::unit_bytes,
                                      x, off, lane, tot);
                    }
                }
                ptx_mbar_arrive(bar.empty + stage * 8);
                if (++stage == C::stages) stage = 0, parity ^= 1;
            }
        }
        const int d = t % C::sums;
        float *my = parts + d * S::part_floats + warp * SMALL_ROWS * M;
        int r = lane / 4, k = lane % 4 * 2;
        ptx_mbar_wait(bar.sum_empty + d * 8, (t / C::sums & 1) ^ 1);
        if (k < M) my[k * SMALL_ROWS + r] = tot[0], my[k * SMALL_ROWS + r + 8] = tot[2];
        if (k + 1 < M)
            my[(k + 1) * SMALL_ROWS + r] = tot[1], my[(k + 1) * SMALL_ROWS + r + 8] = tot[3];
        ptx_mbar_arrive(bar.sum_full + d * 8);
    }
}

template <class W, class C, int M>
__global__ void __launch_bounds__(C::threads, 1) small_kernel(const small_args p)
{
    extern __shared__ __align__(128) uint8_t smem[];
    typedef small_shape<W, C, M> S;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    /* This block's units of each tile, and its tiles. */
    const int units = p.K / SMALL_UNIT_K / C::split, tiles = p.N / SMALL_ROWS;
    const uint32_t rank = C::split > 1 ? blockIdx.x % C::split : 0;
    const int group = blockIdx.x / C::split, groups = gridDim.x / C::split;
    const int unit0 = units * (int)rank, n_tiles = (tiles - group + groups - 1) / groups;
    float *parts = (float *)(smem + S::ring_bytes), *far_sums = parts + S::part_bytes / 4;
    uint8_t *bars = smem + S::ring_bytes + S::part_bytes + S::far_bytes;
    __nv_bfloat16 *xs = (__nv_bfloat16 *)(bars + S::bar_bytes);
    const uint32_t ring = ptx_smem(smem), b0 = ptx_smem(bars);
    const small_bars bar = {b0,
                            b0 + C::stages * 8,
                            b0 + C::stages * 16,
                            b0 + C::stages * 16 + C::sums * 8,
                            b0 + C::stages * 16 + C::sums * 16,
                            b0 + C::stages * 16 + C::sums * 24};

    if (threadIdx.x == 0) {
        for (int i = 0; i < C::stages; i++) {
            ptx_mbar_init(bar.full + i * 8, 1);
            ptx_mbar_init(bar.empty + i * 8, C::warps * 32);
        }
        for (int i = 0; i < C::sums; i++) {
            ptx_mbar_init(bar.sum_full + i * 8, C::warps * 32);
            ptx_mbar_init(bar.sum_empty + i * 8, 32);
            ptx_mbar_init(bar.far_full + i * 8, 1);
            ptx_mbar_init(bar.far_empty + i * 8, 1);
        }
        ptx_mbar_fence();
    }
    __syncthreads();
    if (C::split > 1) ptx_cluster_arrive();
    if (warp == C::warps) {
        if (lane == 0) small_produce<W, C>(p, ring, bar, n_tiles, units, group, groups, unit0);
        __syncwarp();
    } else if (warp == C::warps + 1) {
        ptx_pdl_wait();
        ptx_pdl_go();
        if (C::split > 1) ptx_cluster_wait();
        small_finish<W, C, M>(p, parts, far_sums, bar, n_tiles, lane, group, groups, rank);
    } else {
        ptx_pdl_wait();
        small_multiply<W, C, M>(p, parts, xs, ring, bar, n_tiles, units, unit0, warp, lane);
    }
    /* No block leaves while another may still write to it. */
    if (C::split > 1) {
        if (warp != C::warps + 1) ptx_cluster_wait();
        ptx_cluster_arrive();
        ptx_cluster_wait();
    }
}
#endif
