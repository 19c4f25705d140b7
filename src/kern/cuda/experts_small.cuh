/* Products of experts with few slots each: a stream as small.cuh, over a list of work that is made
 * on the device. Experts that have slots come one after the other; their slots are cut into pieces
 * of up to eight, and an item is a piece and a tile of 16 rows. Every block has its share of the
 * items, those of a piece side by side, so that x stays in registers from tile to tile. Pieces of
 * one expert take turns after a bunch of tiles, whose weights the L2 still has. Weights of an
 * expert without slots are not read.
 *
 * All roles of a block (copies, products, sums) walk through the same items, each for itself. */
#ifndef KERN_CUDA_EXPERTS_SMALL_CUH
#define KERN_CUDA_EXPERTS_SMALL_CUH
#include "kern/cuda/unit.cuh"

#define EXPERTS_PIECE 8 /* slots */
#define EXPERTS_BUNCH 8 /* tiles */

/* WARPS multiply, UPW units of each stretch every one; STAGES stretches are on their way. UW > 0:
 * the units a warp has of a tile, whose x it keeps in registers. */
template <int WARPS, int STAGES, int UPW, int UW> struct experts_cfg {
    static constexpr int warps = WARPS, stages = STAGES, upw = UPW, uw = UW;
    static constexpr int threads = (WARPS + 2) * 32, sums = 4;
    static constexpr int chunk = WARPS * UPW; /* units of a stretch */
};

struct experts_bars { /* shared-memory addresses; one for each stage or buffer of sums */
    uint32_t full, empty, sum_full, sum_empty;
};

struct experts_args {
    const uint8_t *const *w;
    const float *const *col_scale, *const *bias;
    const __nv_bfloat16 *x;
    const int32_t *ids, *first;
    const float *row_scale;
    void *y;
    int64_t ldx, ldy;
    int N, K, E;
    int x_blocks; /* of 64 columns that x has */
    int y_bf16;
    float base;
};

struct experts_active { /* an expert that has slots; they end where those of the next begin */
    const uint8_t *w;
    int expert, slot0;
};
struct experts_share {       /* of a block */
    int active, item, items; /* its first: expert in the list, item of that expert */
};

/* Shared memory. */
template <class W, class C> struct experts_shape {
    static_assert(C::uw || C::upw == 1, "one unit from the L2");
    static constexpr int stage_bytes = C::chunk * W::unit_bytes;
    static constexpr int ring_bytes = C::stages * stage_bytes;
    static constexpr int tile_floats = SMALL_ROWS * EXPERTS_PIECE;
    static constexpr int part_floats = C::warps * tile_floats;
    static constexpr int bars = ring_bytes + C::sums * part_floats * 4;
    static constexpr int share = bars + (C::stages + C::sums) * 16;
    static constexpr int list = share + 16; /* [E+1] */
    static_assert(share % 16 == 0, "alignment of the list");
};

static __device__ __forceinline__ int experts_before(int v, int lane)
{
    int sum = v;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(~0u, sum, by);
        if (lane >= by) sum += other;
    }
    return sum - v;
}

/* One warp makes the list and finds the share of the block. */
static __device__ __forceinline__ void experts_list(const experts_args &p, experts_active *list,
                                                    experts_share *share, int lane)
{
    const int per = (p.E + 31) / 32, tiles = p.N / SMALL_ROWS;
    const int lo = lane * per < p.E ? lane * per : p.E, hi = lo + per < p.E ? lo + per : p.E;
    int active = 0, pieces = 0;
#pragma unroll 4
    for (int e = lo; e < hi; e++) {
        const int n = p.first[e + 1] - p.first[e];
        active += n > 0;
        pieces += (n + EXPERTS_PIECE - 1) / EXPERTS_PIECE;
    }
    int at = experts_before(active, lane), piece = experts_before(pieces, lane);
    const int64_t all = (int64_t)__shfl_sync(~0u, piece + pieces, 31) * tiles;
    const int64_t from = all * blockIdx.x / gridDim.x, to = all * (blockIdx.x + 1) / gridDim.x;
    for (int e = lo; e < hi; e++) {
        const int slot0 = p.first[e], n = p.first[e + 1] - slot0;
        if (n <= 0) continue;
        list[at] = {p.w[e], e, slot0};
        const int more = (n + EXPERTS_PIECE - 1) / EXPERTS_PIECE;
        const int64_t begin = (int64_t)piece * tiles, end = (int64_t)(piece + more) * tiles;
        if (begin <= from && from < end) *share = {at, (int)(from - begin), (int)(to - from)};
        piece += more, at++;
    }
    if (lane == 31) list[at].slot0 = p.first[p.E];
    if (lane == 31 && from == to) *share = {0, 0, 0};
}

struct experts_walk {
    const experts_active *list;
    int tiles, active, piece, tile; /* where it is */
    int begin, end;                 /* tiles of the bunch */
    int slot0, slots;               /* of the expert */
    bool fresh;                     /* a piece that the item before had not */

    __device__ __forceinline__ experts_walk(const experts_active *l, const experts_share &s,
                                            int tiles_)
    {
        list = l;
        tiles = tiles_;
        active = s.active;
        enter();
        const int pieces = (slots + EXPERTS_PIECE - 1) / EXPERTS_PIECE;
        begin = s.item / (pieces * EXPERTS_BUNCH) * EXPERTS_BUNCH;
        bunch();
        const int in_it = s.item - pieces * begin;
        piece = in_it / (end - begin);
        tile = begin + in_it % (end - begin);
        fresh = true;
    }
    __device__ __forceinline__ void enter()
    {
        slot0 = list[active].slot0;
        slots = list[active + 1].slot0 - slot0;
    }
    __device__ __forceinline__ void bunch()
    {
        end = begin + EXPERTS_BUNCH < tiles ? begin + EXPERTS_BUNCH : tiles;
    }
    /* Not behind the last item. */
    __device__ __forceinline__ void next()
    {
        fresh = false;
        if (++tile < end) return;
        fresh = slots > EXPERTS_PIECE;
        if (++piece * EXPERTS_PIECE < slots) {
            tile = begin;
            return;
        }
        piece = 0;
        begin = end;
        if (begin == tiles) {
            active++;
            enter();
            begin = 0;
            fresh = true;
        }
        bunch();
        tile = begin;
    }
    __device__ __forceinline__ int first_slot() const { return slot0 + piece * EXPERTS_PIECE; }
    __device__ __forceinline__ int count() const
    {
        const int left = slots - piece * EXPERTS_PIECE;
        return left < EXPERTS_PIECE ? left : EXPERTS_PIECE;
    }
};

/* Weights that another piece wants soon stay in the L2. */
template <class W, class C>
static __device__ __forceinline__ void experts_produce(const experts_args &p, experts_walk at,
                                                       int items, uint32_t ring, experts_bars bar)
{
    const int units = p.K / SMALL_UNIT_K;
    int stage = 0, parity = 1; /* the first round finds every stage empty */
    for (int i = 0; i < items; i++) {
        const uint8_t *tile = at.list[at.active].w + (int64_t)at.tile * units * W::unit_bytes;
        const bool once = at.slots <= EXPERTS_PIECE;
        for (int u = 0; u < units; u += C::chunk) {
            const int n = units - u < C::chunk ? units - u : C::chunk;
            const uint32_t to = ring + stage * C::chunk * W::unit_bytes,
                           full = bar.full + stage * 8;
            ptx_mbar_wait(bar.empty + stage * 8, parity);
            ptx_mbar_expect(full, n * W::unit_bytes);
            if (once)
                ptx_bulk_load_once(to, tile + u * W::unit_bytes, n * W::unit_bytes, full);
            else
                ptx_bulk_load(to, tile + u * W::unit_bytes, n * W::unit_bytes, full);
            if (++stage == C::stages) stage = 0, parity ^= 1;
        }
        if (i + 1 < items) at.next();
    }
}

/* Factors of the row that a lane writes. */
struct experts_row {
    float col, bias;
};
static __device__ __forceinline__ experts_row experts_factors(const experts_args &p,
                                                              const experts_walk &at, int lane)
{
    const int e = at.list[at.active].expert, n = at.tile * SMALL_ROWS + lane % SMALL_ROWS;
    return {__ldg(p.col_scale[e] + n), p.bias ? __ldg(p.bias[e] + n) : 0.0f};
}

/* Adds up the warps' sums of each item and writes y. */
template <class W, class C>
static __device__ __forceinline__ void experts_finish(const experts_args &p, experts_walk at,
                                                      int items, const float *parts,
                                                      experts_bars bar, int lane)
{
    typedef experts_shape<W, C> S;
    constexpr int per = S::tile_floats / 32;
    float by[per];
    experts_row row = experts_factors(p, at, lane);
    for (int t = 0; t < items; t++) {
        const int d = t % C::sums, slot0 = at.first_slot(), count = at.count();
        const int n = at.tile * SMALL_ROWS + lane % SMALL_ROWS;
        if (at.fresh)
#pragma unroll
            for (int k = 0; k < per; k++) {
                const int m = (k * 32 + lane) / SMALL_ROWS;
                by[k] = p.base;
                if (p.row_scale && m < count)
                    by[k] *= p.row_scale[p.ids ? p.ids[slot0 + m] : slot0 + m];
            }
        const experts_row now = row;
        if (t + 1 < items) { /* the next ones are on their way while this one is added up */
            at.next();
            row = experts_factors(p, at, lane);
        }
        const float *part = parts + d * S::part_floats;
        ptx_mbar_wait(bar.sum_full + d * 8, t / C::sums & 1);
        float sum[per];
#pragma unroll
        for (int k = 0; k < per; k++) {
            const int i = k * 32 + lane;
            sum[k] = 0;
            if (i < count * SMALL_ROWS)
#pragma unroll
                for (int w = 0; w < C::warps; w++)
                    sum[k] += part[w * S::tile_floats + i];
        }
        ptx_mbar_arrive(bar.sum_empty + d * 8);
#pragma unroll
        for (int k = 0; k < per; k++) {
            const int m = (k * 32 + lane) / SMALL_ROWS;
            if (m >= count) continue;
            const float v = fmaf(sum[k] * by[k], now.col, now.bias);
            const int64_t to = (int64_t)(slot0 + m) * p.ldy + n;
            if (p.y_bf16)
                ((__nv_bfloat16 *)p.y)[to] = __float2bfloat16(v);
            else
                ((float *)p.y)[to] = v;
        }
    }
}

/* x of a unit from a row at small_first, as far as it has columns; blocks 0: zeros. */
template <class W>
static __device__ __forceinline__ small_x experts_take(const __nv_bfloat16 *row, int u, int blocks)
{
    small_x x;
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const __nv_bfloat16 *from = row + u * SMALL_UNIT_K + b * 64;
        const bool there = 2 * u + b < blocks;
        x.v[b][0] = x.v[b][1] = make_uint4(0, 0, 0, 0);
        if (there && !W::fine) {
            x.v[b][0] = *(const uint4 *)from;
            x.v[b][1] = *(const uint4 *)(from + 8);
        }
        if (there && W::fine) {
            const uint2 s0 = *(const uint2 *)from, s1 = *(const uint2 *)(from + 16);
            const uint2 s2 = *(const uint2 *)(from + 32), s3 = *(const uint2 *)(from + 48);
            x.v[b][0] = make_uint4(s0.x, s1.x, s2.x, s3.x);
            x.v[b][1] = make_uint4(s0.y, s1.y, s2.y, s3.y);
        }
    }
    return x;
}

/* The multiplying warps. UW 0: x of a unit comes from the L2 each time, asked for before the wait
 * for the weights. */
template <class W, class C>
static __device__ __forceinline__ void experts_multiply(const experts_args &p, experts_walk at,
                                                        int items, float *parts, uint32_t ring,
                                                        experts_bars bar, int warp, int lane)
{
    typedef experts_shape<W, C> S;
    const int units = p.K / SMALL_UNIT_K, chunks = (units + C::chunk - 1) / C::chunk;
    const __nv_bfloat16 *row = p.x;
    int blocks = 0;
    small_x keep[C::uw ? C::uw : 1];
    small_sum<W> koff[C::uw ? C::uw : 1];
    int stage = 0, parity = 0;
    for (int t = 0; t < items; t++) {
        if (at.fresh) {
            const int m = lane / 4, slot = at.first_slot() + m;
            blocks = 0;
            if (m < at.count()) {
                row = p.x + (p.ids ? p.ids[slot] : slot) * p.ldx + small_first<W>(lane);
                blocks = p.x_blocks;
            }
            if (C::uw) {
#pragma unroll
                for (int i = 0; i < C::uw; i++)
                    keep[i] = experts_take<W>(
                        row, (i / C::upw * C::warps + warp) * C::upw + i % C::upw, blocks);
#pragma unroll
                for (int i = 0; i < C::uw; i++)
                    if (small_sum<W>::used) koff[i] = small_off<W>(keep[i]);
            }
        }
        small_total<W> tot = {};
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
                const int u = c * C::warps + warp;
                const small_x x = experts_take<W>(row, u, u < units ? blocks : 0);
                ptx_mbar_wait(bar.full + stage * 8, parity);
                if (u < units) {
                    small_sum<W> off;
                    if (small_sum<W>::used) off = small_off<W>(x);
                    small_unit<W>(ring + stage * S::stage_bytes + warp * W::unit_bytes, x, off,
                                  lane, tot);
                }
                ptx_mbar_arrive(bar.empty + stage * 8);
                if (++stage == C::stages) stage = 0, parity ^= 1;
            }
        }
        const int d = t % C::sums, count = at.count(), k = lane % 4 * 2;
        float *my = parts + d * S::part_floats + warp * S::tile_floats + k * SMALL_ROWS + lane / 4;
        ptx_mbar_wait(bar.sum_empty + d * 8, (t / C::sums & 1) ^ 1);
        if (k < count) my[0] = tot.at(0), my[8] = tot.at(2);
        if (k + 1 < count) my[SMALL_ROWS] = tot.at(1), my[SMALL_ROWS + 8] = tot.at(3);
        ptx_mbar_arrive(bar.sum_full + d * 8);
        if (t + 1 < items) at.next();
    }
}

template <class W, class C>
__global__ void __launch_bounds__(C::threads, 1)
    small_experts_kernel(const __grid_constant__ experts_args p)
{
    extern __shared__ __align__(128) uint8_t smem[];
    typedef experts_shape<W, C> S;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *parts = (float *)(smem + S::ring_bytes);
    const uint32_t ring = ptx_smem(smem), b0 = ptx_smem(smem + S::bars);
    const experts_bars bar = {b0, b0 + C::stages * 8, b0 + C::stages * 16,
                              b0 + C::stages * 16 + C::sums * 8};
    experts_share *share = (experts_share *)(smem + S::share);
    experts_active *list = (experts_active *)(smem + S::list);
    if (threadIdx.x == 32) {
        for (int i = 0; i < C::stages; i++) {
            ptx_mbar_init(bar.full + i * 8, 1);
            ptx_mbar_init(bar.empty + i * 8, C::warps * 32);
        }
        for (int i = 0; i < C::sums; i++) {
            ptx_mbar_init(bar.sum_full + i * 8, C::warps * 32);
            ptx_mbar_init(bar.sum_empty + i * 8, 32);
        }
        ptx_mbar_fence();
    }
    /* Which weights are read is not known before the kernel in front has ended, where all of them
     * lie is. */
    for (int e = threadIdx.x * 16; e < p.E; e += C::threads * 16) {
        ptx_prefetch(p.w + e);
        ptx_prefetch(p.col_scale + e);
        if (p.bias) ptx_prefetch(p.bias + e);
    }
    ptx_pdl_wait();
    ptx_pdl_go();
    if (warp == 0) experts_list(p, list, share, lane);
    __syncthreads();
    const experts_share mine = *share;
    if (!mine.items) return;
    const experts_walk at(list, mine, p.N / SMALL_ROWS);
    if (warp == C::warps) {
        if (lane == 0) experts_produce<W, C>(p, at, mine.items, ring, bar);
        __syncwarp();
    } else if (warp == C::warps + 1)
        experts_finish<W, C>(p, at, mine.items, parts, bar, lane);
    else
        experts_multiply<W, C>(p, at, mine.items, parts, ring, bar, warp, lane);
}
#endif
