/* Products of experts with many slots: wide.cuh over tiles of tokens that belong to one expert
 * each. A first kernel deals the slots out to tiles, in the order of the experts, and lays their
 * rows of x down as wide_order does; a tile that its expert does not fill is filled with zeros. The
 * second is wide_kernel with arguments that each block makes for its tile. The grid has room for
 * the most tiles that so many slots can become; blocks of tiles that are not there end at once.
 *
 * work: x [tiles][TOKENS][K] of bf16, the factors of its rows [tiles][TOKENS], tiles [tiles]. */
#ifndef KERN_CUDA_EXPERTS_WIDE_CUH
#define KERN_CUDA_EXPERTS_WIDE_CUH
#include "kern/cuda/wide.cuh"

struct experts_tile { /* count 0: no such tile */
    int expert, slot0, count, unused;
};
struct wide_experts_args {
    wide_args tile; /* of which w, M and out are those of an expert */
    const uint8_t *const *w;
    const float *const *col_scale, *const *bias;
    const experts_tile *tiles;
};
struct experts_order_args {
    const __nv_bfloat16 *x;
    const int32_t *ids, *first;
    const float *row_scale;
    uint4 *to;
    float *factor;
    experts_tile *tiles;
    int64_t ldx;
    int E, K, x_blocks, tokens, fine;
};

/* A warp finds tile number t. */
static __device__ __forceinline__ experts_tile experts_find(const int32_t *first, int E, int tokens,
                                                            int t, int lane)
{
    const int per = (E + 31) / 32;
    const int lo = lane * per < E ? lane * per : E, hi = lo + per < E ? lo + per : E;
    int mine = 0;
#pragma unroll 4
    for (int e = lo; e < hi; e++)
        mine += (first[e + 1] - first[e] + tokens - 1) / tokens;
    int at = mine;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(~0u, at, by);
        if (lane >= by) at += other;
    }
    at -= mine;
    const bool here = at <= t && t < at + mine;
    experts_tile v = {0, 0, 0, 0};
    for (int e = lo; here && e < hi; e++) {
        const int slot0 = first[e], n = first[e + 1] - slot0, more = (n + tokens - 1) / tokens;
        if (t >= at && t < at + more) {
            const int skip = (t - at) * tokens;
            v = {e, slot0 + skip, n - skip < tokens ? n - skip : tokens, 0};
        }
        at += more;
    }
    const unsigned who = __ballot_sync(~0u, here);
    const int from = who ? __ffs((int)who) - 1 : 0;
    v.expert = __shfl_sync(~0u, v.expert, from);
    v.slot0 = __shfl_sync(~0u, v.slot0, from);
    v.count = __shfl_sync(~0u, v.count, from);
    return v;
}

/* Block (tile, share of its columns); a thread has 16-byte pieces, as in wide_order_kernel. */
static __global__ void __launch_bounds__(256)
    experts_order_kernel(const __grid_constant__ experts_order_args p)
{
    const int tile = (int)blockIdx.x, lane = threadIdx.x % 32;
    ptx_pdl_wait();
    ptx_pdl_go();
    const experts_tile at = experts_find(p.first, p.E, p.tokens, tile, lane);
    if (blockIdx.y == 0) {
        if (threadIdx.x == 0) p.tiles[tile] = at;
        for (int n = threadIdx.x; p.row_scale && n < at.count; n += 256) {
            const int slot = at.slot0 + n;
            p.factor[tile * p.tokens + n] = p.row_scale[p.ids ? p.ids[slot] : slot];
        }
    }
    if (!at.count) return;
    const int pieces = p.K / 64 * p.tokens * 8;
    uint4 *to = p.to + (int64_t)tile * pieces;
    for (int i = blockIdx.y * 256 + threadIdx.x; i < pieces; i += gridDim.y * 256) {
        const int n = i / 8 % p.tokens, block = i / 8 / p.tokens, number = i % 8 ^ (n % 8);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (n < at.count && block < p.x_blocks) {
            const int slot = at.slot0 + n, m = p.ids ? p.ids[slot] : slot, c = p.fine ? 2 : 8;
            const uint32_t *row = (const uint32_t *)(p.x + m * p.ldx + block * 64) +
                                  format_column(p.fine, number / 2, number % 2, 0, 0) / 2;
            v = make_uint4(row[0], row[c], row[2 * c], row[3 * c]);
        }
        to[i] = v;
    }
}

template <class W, class C> struct wide_experts_shape {
    static constexpr size_t args = (wide_shape<W, C>::smem + 15) / 16 * 16;
    static constexpr size_t smem = args + sizeof(wide_args);
    static_assert((smem + 1024) * C::per_sm <= 228 * 1024, "more shared memory than there is");
};

/* The arguments of a product of this expert's tile; rows of y count from the first of all tiles. */
static __device__ __forceinline__ void experts_own(const wide_experts_args &p, int tokens,
                                                   const experts_tile &t, int token_tile,
                                                   wide_args *own)
{
    const int64_t skip = ((int64_t)t.slot0 - (int64_t)token_tile * tokens) * p.tile.out.ldy;
    *own = p.tile;
    own->w = p.w[t.expert];
    own->M = token_tile * tokens + t.count;
    own->out.y = (uint8_t *)p.tile.out.y + skip * (p.tile.out.y_bf16 ? 2 : 4);
    own->out.col_scale = p.col_scale[t.expert];
    own->out.bias = p.bias ? p.bias[t.expert] : NULL;
}

template <class W, class C>
__global__ void __launch_bounds__(C::threads, C::per_sm)
    wide_experts_kernel(const __grid_constant__ wide_experts_args p)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    typedef wide_shape<W, C> S;
    static_assert(C::share == 1, "blocks of a cluster would have several experts");
    const uint32_t ring = ptx_smem(smem), b0 = ptx_smem(smem + S::body);
    const wide_bars bar = {b0, b0 + C::xs * 8};
    wide_args *own = (wide_args *)(smem + wide_experts_shape<W, C>::args);
    const int token_tile = (int)blockIdx.x % p.tile.token_tiles;
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::xs; i++) {
            ptx_mbar_init(bar.full + i * 8, 1);
            ptx_mbar_init(bar.empty + i * 8, C::warps);
        }
        ptx_mbar_fence();
    }
    ptx_pdl_wait();
    const experts_tile t = p.tiles[token_tile];
    if (!t.count) return;
    if (threadIdx.x == 32) experts_own(p, C::tokens, t, token_tile, own);
    __syncthreads();
    float tot[C::tokens / 2] = {};
    const int warp = threadIdx.x / 32;
    wide_multiply<W, C>(*own, wide_block<1>(*own), ring,
                        ring + S::x_bytes + (uint32_t)(warp * C::ws * W::unit_bytes), bar,
                        wide_tile<C>(warp), threadIdx.x % 32, tot);
    __syncthreads(); /* the rings become the place of the sums */
    const int thread = (int)ptx_thread(), lane = thread % 32;
    float *to = (float *)smem + wide_tile<C>(thread / 32) * SMALL_ROWS + lane / 4;
#pragma unroll
    for (int i = 0; i < C::tokens / 2; i++)
        to[(i / 4 * 8 + lane % 4 * 2 + i % 2) * C::part_stride + (i & 2 ? 8 : 0)] = tot[i];
    wide_finish<C>(*own, wide_block<1>(*own), (const float *)smem);
}
#endif
