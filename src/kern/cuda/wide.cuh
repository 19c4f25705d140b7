/* Products of many rows with a packed weight: y[M,N] = x[M,K] W^T, M > 8. The weight is the 64-row
 * operand of wgmma and comes from registers, where its codes become bf16; the tokens are the
 * columns and come from shared memory.
 *
 * A block has up to 64 rows of W a group of four warps (16-row tiles, one a warp) and TOKENS
 * tokens. Each multiplying warp streams the units of its own tile through a ring of its own, which
 * no other warp looks at; the first thread asks the copy engine for x, which all of them share.
 * Codes of the next 64 columns are widened while the tensor cores work on those before.
 *
 * Scales of 128 columns: up to 64 tokens the sums of a unit have registers of their own and go into
 * the total times the scale, so that codes enter the product exactly. More tokens leave no room for
 * that, and smaller groups would have to wait too often: there the weight is scaled and rounded to
 * bf16 (FP4 stays exact). Scales of rows are for the end.
 *
 * x lies ordered (wide_order): [tile of TOKENS][K/64][TOKENS][64], the columns of a block of 64 in
 * the order of format.cuh, 16-byte pieces at place number ^ token%8: it goes to shared memory as it
 * is. K may be cut over the blocks of a cluster; each block then adds up and writes the tokens
 * rank, rank + split, ... in the order of the ranks: results do not depend on timing. Or the blocks
 * of a cluster have the same tokens and other rows: each asks for a share of x and all get it. */
#ifndef KERN_CUDA_WIDE_CUH
#define KERN_CUDA_WIDE_CUH
#include "kern/cuda/format.cuh"

struct wide_args {
    const uint8_t *w, *x; /* packed, ordered */
    format_out out;
    int N, K, M;
    int tiles; /* 16-row tiles of a block */
    int token_tiles, split;
};

/* XB blocks of 64 columns of x a stage, XS stages; WS units of W on their way or in use a warp,
 * CHUNK of them asked for at once; SHARE blocks of a cluster have the same x. */
template <int TOKENS, int GROUPS, int XB, int XS, int WS, int CHUNK, int SHARE> struct wide_cfg {
    static constexpr int tokens = TOKENS, groups = GROUPS, xb = XB, xs = XS, ws = WS;
    static constexpr int chunk = CHUNK, share = SHARE;
    static constexpr int warps = GROUPS * 4, threads = warps * 32;
    /* Two blocks of 128 tokens on a multiprocessor: one begins or ends while the other multiplies.
     */
    static constexpr int per_sm = TOKENS == 128 && GROUPS == 2 ? 2 : 1;
    static constexpr int block_bytes = TOKENS * 128, stage_bytes = XB * block_bytes;
    static constexpr int part_stride = GROUPS * 64 + 4; /* floats of a token's sums */
    static_assert(WS % CHUNK == 0 && WS >= 2 * CHUNK, "one chunk is used, one is on its way");
    /* Whether the places of blocks in their stages are the same for every chunk. */
    static constexpr bool fixed = XB <= 2 * CHUNK;
    static_assert((XB & (XB - 1)) == 0 && (CHUNK & (CHUNK - 1)) == 0, "powers of two");
};

template <class W, class C> struct wide_shape {
    static constexpr bool scaled = W::sums == SUMS_ROW || W::sums == SUMS_UNIT;
    /* Sums of a unit in registers of their own. */
    static constexpr bool apart = scaled && W::groups == 1 && C::tokens <= 64;
    static constexpr bool in_weights = scaled && !apart;
    static constexpr int x_bytes = C::xs * C::stage_bytes;
    static constexpr int w_bytes = C::warps * C::ws * W::unit_bytes;
    static constexpr int ring = x_bytes + w_bytes, parts = C::tokens * C::part_stride * 4;
    static constexpr int body = ring > parts ? ring : parts;
    static constexpr size_t smem = (size_t)body + C::xs * 16;
    static_assert((smem + 1024) * C::per_sm <= 228 * 1024, "more shared memory than there is");
};

struct wide_at { /* what this block computes */
    int tile0, tiles, token_tile, unit0, units;
    uint32_t rank;
};

/* Asked for anew, as ptx_thread is, after the products: kept nowhere meanwhile. */
template <int SHARE> static __device__ __forceinline__ wide_at wide_block(const wide_args &p)
{
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    const int split = p.split, i = block / (split * SHARE), share = block % SHARE;
    const int tile0 = (i / p.token_tiles * SHARE + share) * p.tiles;
    const int left = p.N / SMALL_ROWS - tile0, units = p.K / SMALL_UNIT_K / split;
    const uint32_t rank = (uint32_t)(block % split);
    return {tile0, left < p.tiles ? left : p.tiles, i % p.token_tiles, (int)rank * units, units,
            rank};
}

struct wide_bars {
    uint32_t full, empty;
};

/* Asks for stage number i of x; its place has been left i / xs times. */
template <class C>
static __device__ __forceinline__ void wide_ask(const wide_args &p, const wide_at &at,
                                                uint32_t ring, wide_bars bar, int i)
{
    const int first = i * C::xb, place = i % C::xs, blocks = at.units * 2;
    if (first >= blocks) return;
    const uint32_t bytes =
        (uint32_t)((blocks - first < C::xb ? blocks - first : C::xb) * C::block_bytes);
    const uint8_t *from =
        p.x + ((int64_t)at.token_tile * (p.K / 64) + at.unit0 * 2 + first) * C::block_bytes;
    const uint32_t to = ring + (uint32_t)(place * C::stage_bytes), full = bar.full + place * 8;
    if (i >= C::xs) ptx_mbar_wait(bar.empty + place * 8, i / C::xs - 1 & 1);
    ptx_mbar_expect(full, bytes);
    if (C::share == 1)
        ptx_bulk_load(to, from, bytes, full);
    else {
        const uint32_t part = bytes / C::share, skip = blockIdx.x % C::share * part;
        ptx_bulk_load_all(to + skip, from + skip, part, full, (1 << C::share) - 1);
    }
}
/* This warp has read a place of x. */
template <class C>
static __device__ __forceinline__ void wide_leave(wide_bars bar, int place, int lane)
{
    if (C::share == 1) {
        if (lane == 0) ptx_mbar_arrive(bar.empty + place * 8);
    } else if (lane < C::share)
        ptx_mbar_leave_at(bar.empty + place * 8, lane);
}

template <class W> static __device__ __forceinline__ float wide_factor(uint32_t bits)
{
    return W::sums == SUMS_UNIT ? __uint_as_float(bits) : ptx_f16_f32(bits);
}
template <class W> static __device__ __forceinline__ uint32_t wide_twice(uint32_t bits)
{
    const float f = wide_factor<W>(bits);
    return ptx_pack_bf16(f, f);
}

/* One warp's stream of its tile's units: they come by copies that each lane asks for itself and are
 * read one after the other. Addresses have 16 a lane added and stay in registers: recomputing them
 * for every unit cost a third of all instructions. */
template <class W, class C> struct wide_stream {
    const uint8_t *from;    /* the next chunk to ask for */
    uint32_t start, to, at; /* the ring; where it goes; the chunk that is read */
    uint32_t scale, zero;   /* of row l/4, counted from at */
    int left;               /* units to ask for */
    bool tail;              /* this lane copies a last piece of a chunk too */

    static constexpr uint32_t step = (uint32_t)(C::chunk * W::unit_bytes);
    static constexpr uint32_t ring = (uint32_t)(C::ws * W::unit_bytes);

    __device__ __forceinline__ wide_stream(const uint8_t *src, uint32_t place, int units, int l)
    {
        from = src + l * 16;
        start = place + (uint32_t)l * 16;
        scale = (uint32_t)(2 * W::block_bytes + l / 4 * W::row_bytes - l * 16);
        zero = (uint32_t)(2 * W::block_bytes + SMALL_ROWS * W::row_bytes + l / 4 * W::zero_bytes -
                          l * 16);
        int last = l < C::chunk * W::unit_bytes / 16 % 32;
        asm volatile("" : "+r"(start), "+r"(scale), "+r"(last)); /* keep, do not recompute */
        tail = last;
        if (W::zeros) asm volatile("" : "+r"(zero));
        to = at = start;
        left = units;
    }
    static __device__ __forceinline__ uint32_t after(uint32_t place, uint32_t first)
    {
        place += step;
        return place == first + ring ? first : place;
    }
    template <int UNITS> __device__ __forceinline__ void copy() const
    {
        constexpr int pieces = UNITS * W::unit_bytes / 16;
#pragma unroll
        for (int i = 0; i < pieces / 32; i++)
            ptx_copy16(to + i * 512, from + i * 512);
        if (pieces % 32 && (UNITS == C::chunk ? tail : (int)threadIdx.x % 32 < pieces % 32))
            ptx_copy16(to + pieces / 32 * 512, from + pieces / 32 * 512);
    }
    __device__ __forceinline__ void ask()
    {
        if (left > 0) {
            if (left >= C::chunk)
                copy<C::chunk>();
            else
                copy<1>();
            from += step;
            to = after(to, start);
            left -= C::chunk;
        }
        ptx_copy_commit();
    }
    /* The oldest chunk that was asked for is there. */
    __device__ __forceinline__ void wait() const
    {
        ptx_copy_wait<C::ws / C::chunk - 2>();
        __syncwarp();
    }
    __device__ __forceinline__ void next()
    {
        at = after(at, start);
    }
    /* Scales of rows l/4, l/4+8 where the unit is a group: as they are stored, or TWICE as bf16. */
    template <bool TWICE> __device__ __forceinline__ void scales(int unit, uint32_t s[2]) const
    {
        const uint32_t side = at + scale + (uint32_t)(unit * W::unit_bytes);
        if (W::sums == SUMS_UNIT) s[0] = s[1] = ptx_lds32(side);
        if (W::sums == SUMS_ROW && W::groups == 1)
            s[0] = ptx_lds16(side), s[1] = ptx_lds16(side + 8 * W::row_bytes);
        if (TWICE) s[0] = wide_twice<W>(s[0]), s[1] = wide_twice<W>(s[1]);
    }
};

/* A of 64 columns as bf16: block b of a unit of the chunk. s: of in.scales. */
template <class W, class C, bool SCALE>
static __device__ __forceinline__ void wide_widen(const wide_stream<W, C> &in, int unit, int b,
                                                  const uint32_t s[2], uint32_t a[4][4])
{
    const uint32_t skip = (uint32_t)(unit * W::unit_bytes);
    const uint32_t block = in.at + skip + (uint32_t)(b * W::block_bytes);
    const uint32_t side = in.at + in.scale + skip, zero = in.at + in.zero + skip;
    if constexpr (W::sums == SUMS_VALUES) {
        W::values(block, side, b, a);
        return;
    } else
        W::block(block, a);
    constexpr int groups = W::groups == 4 ? 2 : 1; /* of the block */
    uint32_t by[2][groups];
    if (SCALE)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t w = s[r];
            if (W::groups == 2) w = ptx_lds16(side + (uint32_t)(r * 8 * W::row_bytes + 2 * b));
            if (W::groups == 4) w = ptx_lds32(side + (uint32_t)(r * 8 * W::row_bytes + 4 * b));
#pragma unroll
            for (int g = 0; g < groups; g++) {
                by[r][g] = W::groups == 1 ? w : wide_twice<W>(g ? w >> 16 : w);
            }
        }
#pragma unroll
    for (int g = 0; g < groups; g++) {
        uint32_t z[2];
        format_zeros<W>(zero, W::groups == 4 ? 2 * b + g : W::groups == 2 ? b : 0, z);
#pragma unroll
        for (int k = 4 / groups * g; k < 4 / groups * (g + 1); k++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (W::biased) a[k][i] = ptx_sub_bf16x2(a[k][i], z[i % 2]);
                if (SCALE) a[k][i] = ptx_mul_bf16x2(a[k][i], by[i % 2][g]);
            }
    }
}

template <int TOKENS>
static __device__ __forceinline__ void wide_four(float (&acc)[TOKENS / 2], const uint32_t a[4][4],
                                                 uint64_t x, int add)
{
    asm("" : "+l"(x)); /* places of the steps are one addition each */
    ptx_wg_fence();
#pragma unroll
    for (int s = 0; s < 4; s++)
        ptx_wgmma<TOKENS>(acc, a[s], x + 2 * s, s ? 1 : add);
    ptx_wg_commit();
}

/* The stages of x as a warp goes through them, one chunk after the other; blocks count in the
 * chunk.
 */
template <class C> struct wide_stages {
    const wide_args &p;
    const wide_at &at;
    uint32_t ring;
    wide_bars bar;
    int lane;
    bool asks;                               /* this thread */
    int stage = 0, parity = 0, in_stage = 0; /* in_stage: of the chunk, unless always the same */

    __device__ __forceinline__ bool begins(int block) const
    {
        return C::fixed ? block % C::xb == 0 : block == 0 && in_stage == 0;
    }
    __device__ __forceinline__ bool ends(int block) const
    {
        if (C::fixed) return (block + 1) % C::xb == 0;
        return block + 1 == 2 * C::chunk && in_stage + 2 * C::chunk == C::xb;
    }
    /* Waits for the stage that begins with this block of all. */
    __device__ __forceinline__ void enter(int block) const
    {
        /* Two stages back, so that nobody waits for the last warp. */
        if (asks && block >= 2 * C::xb) wide_ask<C>(p, at, ring, bar, block / C::xb - 2 + C::xs);
        __syncwarp();
        ptx_mbar_wait(bar.full + stage * 8, parity);
    }
    __device__ __forceinline__ uint64_t operand(int block) const
    {
        const int in_it = C::fixed ? block % C::xb : in_stage + block;
        return ptx_wg_operand(ring + (uint32_t)(stage * C::stage_bytes + in_it * C::block_bytes));
    }
    /* Goes on behind the block. */
    __device__ __forceinline__ void pass(int block)
    {
        const bool end = ends(block);
        if (!C::fixed && block + 1 == 2 * C::chunk) in_stage = end ? 0 : in_stage + 2 * C::chunk;
        if (end && ++stage == C::xs) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void leave() const { wide_leave<C>(bar, stage, lane); }
    __device__ __forceinline__ void leave_last() const
    {
        wide_leave<C>(bar, stage ? stage - 1 : C::xs - 1, lane);
    }
};

/* What a warp multiplies by, and its sums: of the unit where they are kept apart, of all. */
template <class W, class C> struct wide_sums {
    uint32_t a0[4][4], a1[4][4], scale[2] = {0, 0};
    float group[wide_shape<W, C>::apart ? C::tokens / 2 : 1];
};

/* Unit u, number h of its chunk; its first block is in a0, and then that of the unit behind it. */
template <class W, class C>
static __device__ __forceinline__ void wide_unit(int u, int h, wide_stream<W, C> &in,
                                                 wide_stages<C> &x, wide_sums<W, C> &s,
                                                 float (&tot)[C::tokens / 2])
{
    constexpr bool apart = wide_shape<W, C>::apart, in_weights = wide_shape<W, C>::in_weights;
    /* Always so, which the compiler does not know: what this guards stays between the products in
     * front of it and those behind. */
    int some = x.p.M;
    asm volatile("" : "+r"(some));
    const bool begun = x.begins(2 * h);
    if (begun) x.enter(2 * u);
    if constexpr (apart) {
        wide_four<C::tokens>(s.group, s.a0, x.operand(2 * h), 0);
    } else {
        wide_four<C::tokens>(tot, s.a0, x.operand(2 * h), 1);
        ptx_wg_wait<1>(); /* the unit before is done */
        if (u > 0 && begun) x.leave_last();
    }
    if (some > 0) wide_widen<W, C, in_weights>(in, h, 1, s.scale, s.a1);
    x.pass(2 * h);
    if (C::xb == 1) x.enter(2 * u + 1);
    if constexpr (apart)
        wide_four<C::tokens>(s.group, s.a1, x.operand(2 * h + 1), 1);
    else
        wide_four<C::tokens>(tot, s.a1, x.operand(2 * h + 1), 1);
    const float s0 = wide_factor<W>(s.scale[0]), s8 = wide_factor<W>(s.scale[1]);
    if (h == 0) in.ask(); /* into the place of the chunk before */
    if (h == C::chunk - 1) in.wait(), in.next();
    ptx_wg_wait<1>();
    if (C::xb == 1) x.leave_last();
    if (some > 0) {
        const int then = h == C::chunk - 1 ? 0 : h + 1;
        in.template scales<in_weights>(then, s.scale);
        wide_widen<W, C, in_weights>(in, then, 0, s.scale, s.a0);
    }
    if constexpr (apart) {
        ptx_wg_wait<0>();
        if (x.ends(2 * h + 1)) x.leave();
#pragma unroll
        for (int i = 0; i < C::tokens / 2; i++)
            tot[i] = fmaf(i & 2 ? s8 : s0, s.group[i], tot[i]);
    }
    x.pass(2 * h + 1);
}

/* Sums of this warp's tile, as wgmma leaves them. Warps without a tile multiply what lies in their
 * ring: nobody looks at it. */
template <class W, class C>
static __device__ __forceinline__ void
wide_multiply(const wide_args &p, const wide_at &at, uint32_t xring, uint32_t wring, wide_bars bar,
              int tile, int lane, float (&tot)[C::tokens / 2])
{
    typedef wide_shape<W, C> S;
    static_assert(C::xb > 1 || !S::apart, "a stage of one block is left in the middle of a unit");
    const bool live = tile < at.tiles;
    wide_stream<W, C> in(
        p.w + ((int64_t)(at.tile0 + (live ? tile : 0)) * (p.K / SMALL_UNIT_K) + at.unit0) *
                  W::unit_bytes,
        wring, live ? at.units : 0, lane);
    for (int i = 0; i < C::ws / C::chunk - 1; i++)
        in.ask();
    /* x may have been made by the kernel before. */
    wide_stages<C> x = {p, at, xring, bar, lane, threadIdx.x == 0};
    ptx_pdl_wait();
    ptx_pdl_go();
    for (int i = 0; x.asks && i < C::xs; i++)
        wide_ask<C>(p, at, xring, bar, i);
    wide_sums<W, C> s;
    in.wait();
    in.template scales<S::in_weights>(0, s.scale);
    wide_widen<W, C, S::in_weights>(in, 0, 0, s.scale, s.a0);
    for (int u = 0; u < at.units; u += C::chunk) {
        wide_unit(u, 0, in, x, s, tot);
        if (C::chunk > 1) {
            if (u + 1 >= at.units) break;
            wide_unit(u + 1, 1, in, x, s, tot);
        }
    }
    ptx_wg_wait<0>();
}

/* Four rows of a token, added up over the blocks of the cluster. */
static __device__ __forceinline__ float4 wide_sum(uint32_t at, int split)
{
    float4 s = {0, 0, 0, 0};
    for (int r = 0; r < split; r++) {
        float4 v = split > 1 ? ptx_get_f32x4(at, (uint32_t)r) : ptx_lds_f32x4(at);
        s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
    }
    return s;
}

/* Of four rows from n on: their sums v of token m. */
static __device__ __forceinline__ void wide_store(const format_out &o, int m, int n, float4 v)
{
    const float by = o.row_scale ? o.base * __ldg(o.row_scale + m) : o.base;
    float4 col = {1, 1, 1, 1}, bias = {0, 0, 0, 0};
    if (o.col_scale) col = __ldg((const float4 *)(o.col_scale + n));
    if (o.bias) bias = __ldg((const float4 *)(o.bias + n));
    v.x = fmaf(v.x * by, col.x, bias.x), v.y = fmaf(v.y * by, col.y, bias.y);
    v.z = fmaf(v.z * by, col.z, bias.z), v.w = fmaf(v.w * by, col.w, bias.w);
    const int64_t at = m * o.ldy + n;
    if (o.y_bf16)
        *(uint2 *)((__nv_bfloat16 *)o.y + at) = {ptx_pack_bf16(v.x, v.y), ptx_pack_bf16(v.z, v.w)};
    else
        *(float4 *)((float *)o.y + at) = v;
}

/* parts: [TOKENS][part_stride], the sums of this block. All warps. */
template <class C>
static __device__ __forceinline__ void wide_finish(const wide_args &p, const wide_at &at,
                                                   const float *parts)
{
    if (p.split > 1) {
        ptx_cluster_arrive();
        ptx_cluster_wait();
    } else
        __syncthreads();
    const int wide = at.tiles * (SMALL_ROWS / 4), token0 = at.token_tile * C::tokens;
    const int left = p.M - token0, tokens = left < C::tokens ? left : C::tokens;
    const int mine = (tokens - (int)at.rank + p.split - 1) / p.split;
    for (int i = threadIdx.x; i < mine * wide; i += C::threads) {
        const int m = i / wide * p.split + (int)at.rank, n = i % wide * 4;
        wide_store(p.out, token0 + m, at.tile0 * SMALL_ROWS + n,
                   wide_sum(ptx_smem(parts + m * C::part_stride + n), p.split));
    }
    if (p.split > 1) { /* nobody leaves while others read */
        ptx_cluster_arrive();
        ptx_cluster_wait();
    }
}

/* Tiles go round the groups, so that each has its share. */
template <class C> static __device__ __forceinline__ int wide_tile(int warp)
{
    return warp % 4 * C::groups + warp / 4;
}

template <class W, class C>
__global__ void __launch_bounds__(C::threads, C::per_sm)
    wide_kernel(const __grid_constant__ wide_args p)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    typedef wide_shape<W, C> S;
    const uint32_t ring = ptx_smem(smem), b0 = ptx_smem(smem + S::body);
    const wide_bars bar = {b0, b0 + C::xs * 8};
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::xs; i++) {
            ptx_mbar_init(bar.full + i * 8, 1);
            ptx_mbar_init(bar.empty + i * 8, C::warps * C::share);
        }
        ptx_mbar_fence();
    }
    if (C::share > 1) { /* barriers of all blocks are made */
        ptx_cluster_arrive();
        ptx_cluster_wait();
    } else
        __syncthreads();
    float tot[C::tokens / 2] = {};
    const int warp = threadIdx.x / 32;
    wide_multiply<W, C>(p, wide_block<C::share>(p), ring,
                        ring + S::x_bytes + (uint32_t)(warp * C::ws * W::unit_bytes), bar,
                        wide_tile<C>(warp), threadIdx.x % 32, tot);
    if (C::share > 1) ptx_cluster_arrive(); /* at no barrier of another block any more */
    __syncthreads();                        /* the rings become the place of the sums */
    const int thread = (int)ptx_thread(), lane = thread % 32;
    float *to = (float *)smem + wide_tile<C>(thread / 32) * SMALL_ROWS + lane / 4;
#pragma unroll
    for (int i = 0; i < C::tokens / 2; i++)
        to[(i / 4 * 8 + lane % 4 * 2 + i % 2) * C::part_stride + (i & 2 ? 8 : 0)] = tot[i];
    wide_finish<C>(p, wide_block<C::share>(p), (const float *)smem);
    if (C::share > 1) ptx_cluster_wait();
}

/* x in the order that the kernel reads; a thread has one 16-byte piece of it. */
static __global__ void wide_order_kernel(const __nv_bfloat16 *x, int64_t ldx, uint4 *to, int tokens,
                                         int K, int M, int padded, int fine)
{
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    ptx_pdl_wait();
    ptx_pdl_go();
    if (i >= (int64_t)padded * (K / 8)) return;
    const int piece = (int)(i % 8), n = (int)(i / 8 % tokens);
    const int64_t block = i / 8 / tokens; /* [tile][K/64] */
    const int m = (int)(block / (K / 64)) * tokens + n;
    const int number = piece ^ (n % 8); /* 2s + h */
    const uint32_t *row = (const uint32_t *)(x + (m < M ? m : 0) * ldx + block % (K / 64) * 64) +
                          format_column(fine, number / 2, number % 2, 0, 0) / 2;
    const int c = fine ? 2 : 8;
    to[i] = m < M ? make_uint4(row[0], row[c], row[2 * c], row[3 * c]) : make_uint4(0, 0, 0, 0);
}
#endif
