/* Products of few rows with a weight in row-major order: y[M,N] = x[M,K] W^T, M <= 64. As in
 * small.cuh the kernel is a stream: one thread of a block asks for W, box after box, into a ring in
 * shared memory; other warps copy x beside it; the multiplying warps take the weight as the 16-row
 * operand and the tokens as the 8 columns. Weights do not depend on the kernel before, so the ring
 * fills before the wait for it.
 *
 * A tile is `groups` x 32 rows. A stage has `chunks` x 128 bytes of each of them (box: 32 rows x
 * 128 bytes, 16-byte pieces of row r at place number ^ r%8, as the copy engine turns them). The
 * 2 chunks x groups multiplying warps have 64 bytes of 32 rows each, always the same of a stage.
 * Lane l = 4g + c reads piece c of rows turn(g) and turn(g) + 8, which lie in other banks than
 * those of its neighbours; the inner product does not care about the order of its terms:
 *
 *   bf16   piece = 8 columns, two k16 steps; step s multiplies columns 8c + 4s + 2h + j as number
 *          8h + 2c + j (h, j = 0, 1); x: one piece a token
 *   8 bit  piece = 16 columns, four steps; columns 16c + 4s + 2h + j (MT > 8), or, as that saves
 *          instructions, 16c + 4s + h + 2j with words of x mixed instead; x: two pieces a token
 *
 * x lies in slots of a stage's columns, [64 columns][token][128 bytes], pieces turned by token. All
 * of it stays where it fits (`resident`), else it comes again with each tile through a ring. What
 * lies outside of M, N or K is zero.
 *
 * Sums of a tile: 8 tokens after the other every warp leaves its own in shared memory, then a
 * thread adds up a row over the warps, and over the blocks of a cluster that share K (each finishes
 * a part of the rows and gets the sums of the others), in a fixed order.
 *
 * Codes become exact bf16: e4m3 by its bits, times 2^120; int8 as 128 + low bits - (128 or 256). */
#ifndef KERN_CUDA_ROWS_CUH
#define KERN_CUDA_ROWS_CUH
#include "kern/cuda/ptx_map.cuh"
#include "kern/cuda/rows_plan.h"

struct rows_map {
    alignas(64) uint64_t v[16]; /* a CUtensorMap */
};

struct rows_args {
    rows_map map;
    const uint16_t *x; /* bf16 */
    const float *scale, *bias, *row_scale, *x_scale;
    void *y;
    int64_t ldx, ld_x_scale, ldy;
    int N, K, M, y_bf16;
    int scale_step; /* scale of row n is scale[n * scale_step] */
    int groups, chunks, split;
    int rows, step; /* of a tile; from a tile of a block to its next */
    int all, each;  /* chunks of K; of a block, the last of a cluster may have fewer */
    int ws, xs;     /* stages of W; slots of x: as many, or all that there is of it */
    int resident;
    rows_mem mem;
};

/* Warps that copy x, and the most that multiply. */
template <int MT> struct rows_shape {
    static constexpr int tokens = MT < 8 ? MT : 8, nt = (MT + 7) / 8;
    static constexpr int x_warps = MT <= 8 ? 3 : 1;
    static constexpr int most_warps = rows_most_warps(MT);
    static constexpr int threads = (most_warps + 1 + x_warps) * 32;
};

/* ---- places -------------------------------------------------------------------------------------
 */
/* Row of a box (modulo 8) of lane group g: neighbours g lie 64 bytes apart modulo 128. */
static __host__ __device__ __forceinline__ int rows_turn(int g)
{
    return g >> 1 | (g & 1) << 2;
}
/* Lane's first piece in a box; the further ones are 8 rows, 1024 bytes, apart. half: of the 128
 * bytes. */
static __host__ __device__ __forceinline__ int rows_w_lane(int lane, int half)
{
    const int r = rows_turn(lane / 4);
    return r * ROWS_CHUNK + ((4 * half + lane % 4) ^ r) * 16;
}

/* ---- formats ------------------------------------------------------------------------------------
 * cols: of a chunk; units of 64 columns of x a chunk has; a warp's 64 bytes are `halves` times two
 * steps of k16. x_turn: what the pieces of token m are turned by; x_lane: lane's first piece of x,
 * that of the second half lies at ^ 16; weights: A of two steps, raw: pieces of rows r and r + 8.
 */
struct rows_bf16 {
    static constexpr int bytes = 2, cols = 64, units = 1, halves = 1;
    static __host__ __device__ __forceinline__ int x_turn(int m) { return rows_turn(m % 8); }
    static __host__ __device__ __forceinline__ int x_lane(int lane, int part, int tokens)
    {
        const int g = lane / 4;
        return part / 2 * tokens * 128 + g * 128 + ((4 * (part % 2) + lane % 4) ^ x_turn(g)) * 16;
    }
    template <bool IN_ORDER>
    static __device__ __forceinline__ void weights(const uint4 raw[2], int, uint32_t a[2][4])
    {
        a[0][0] = raw[0].x, a[0][1] = raw[1].x, a[0][2] = raw[0].y, a[0][3] = raw[1].y;
        a[1][0] = raw[0].z, a[1][1] = raw[1].z, a[1][2] = raw[0].w, a[1][3] = raw[1].w;
    }
    template <bool IN_ORDER>
    static __device__ __forceinline__ void tokens(uint4 v, uint32_t b[2][2])
    {
        b[0][0] = v.x, b[0][1] = v.y, b[1][0] = v.z, b[1][1] = v.w;
    }
};

struct rows_code_e4m3 {
    static constexpr uint32_t spread = 0x3424u << 16 | 0x1404u; /* a pair to bytes 1 and 3 */
    static __device__ __forceinline__ uint32_t even(uint32_t w) /* bytes 0 and 2 */
    {
        return exact(((w << 4) & 0x07f007f0u) | ((w << 8) & 0x80008000u));
    }
    static __device__ __forceinline__ uint32_t odd(uint32_t w) /* bytes 1 and 3 */
    {
        return exact(((w >> 4) & 0x07f007f0u) | (w & 0x80008000u));
    }
    static __device__ __forceinline__ uint32_t pair(uint32_t w) { return odd(w); }
    /* The exponent of e4m3 in that of bf16 is 2^120 too small. */
    static __device__ __forceinline__ uint32_t exact(uint32_t w)
    {
        return ptx_mul_bf16x2(w, 0x7b807b80u);
    }
};
struct rows_code_int8 {
    static constexpr uint32_t spread = 0x4342u << 16 | 0x4140u; /* a pair to bytes 0 and 2 */
    static __device__ __forceinline__ uint32_t even(uint32_t w)
    {
        return ptx_sub_bf16x2((w & 0x007f007fu) | 0x43004300u, (w & 0x00800080u) | 0x43004300u);
    }
    static __device__ __forceinline__ uint32_t odd(uint32_t w) { return even(w >> 8); }
    static __device__ __forceinline__ uint32_t pair(uint32_t w) { return even(w); }
};

template <class CODE> struct rows_8bit {
    static constexpr int bytes = 1, cols = 128, units = 2, halves = 2;
    static __host__ __device__ __forceinline__ int x_turn(int m) { return m % 8; }
    static __host__ __device__ __forceinline__ int x_lane(int lane, int part, int tokens)
    {
        const int g = lane / 4;
        return part * tokens * 128 + g * 128 + ((2 * (lane % 4)) ^ x_turn(g)) * 16;
    }
    template <bool IN_ORDER>
    static __device__ __forceinline__ void two(uint32_t w, uint32_t &lo, uint32_t &hi)
    {
        if (IN_ORDER) {
            lo = CODE::pair(__byte_perm(w, 0, CODE::spread & 0xffff));
            hi = CODE::pair(__byte_perm(w, 0, CODE::spread >> 16));
        } else
            lo = CODE::even(w), hi = CODE::odd(w);
    }
    template <bool IN_ORDER>
    static __device__ __forceinline__ void weights(const uint4 raw[2], int half, uint32_t a[2][4])
    {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            two<IN_ORDER>(half ? raw[r].z : raw[r].x, a[0][r], a[0][r + 2]);
            two<IN_ORDER>(half ? raw[r].w : raw[r].y, a[1][r], a[1][r + 2]);
        }
    }
    template <bool IN_ORDER>
    static __device__ __forceinline__ void tokens(uint4 v, uint32_t b[2][2])
    {
        const uint32_t x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int s = 0; s < 2; s++) {
            b[s][0] = IN_ORDER ? x[2 * s] : __byte_perm(x[2 * s], x[2 * s + 1], 0x5410);
            b[s][1] = IN_ORDER ? x[2 * s + 1] : __byte_perm(x[2 * s], x[2 * s + 1], 0x7632);
        }
    }
};
typedef rows_8bit<rows_code_e4m3> rows_e4m3;
typedef rows_8bit<rows_code_int8> rows_int8;

struct rows_at { /* what this block computes: tiles group, group + step, ...; its chunks of K */
    int group, tiles, rank, chunk0, chunks, stages;
};

static __device__ __forceinline__ rows_at rows_block(const rows_args &p)
{
    rows_at at;
    at.rank = (int)blockIdx.x % p.split;
    at.group = (int)blockIdx.x / p.split;
    at.tiles = ((p.N + p.rows - 1) / p.rows - at.group + p.step - 1) / p.step;
    at.chunk0 = at.rank * p.each;
    at.chunks = p.all - at.chunk0 < p.each ? p.all - at.chunk0 : p.each;
    at.stages = (at.chunks + p.chunks - 1) / p.chunks;
    return at;
}

struct rows_ring { /* a place, and the parity of its round */
    int at, parity;
    __device__ __forceinline__ void next(int size)
    {
        if (++at == size) at = 0, parity ^= 1;
    }
};

/* ---- what comes in ------------------------------------------------------------------------------
 */
/* One thread. */
template <class W>
static __device__ __forceinline__ void rows_bring_w(const rows_args &p, const rows_at &at,
                                                    uint32_t smem)
{
    const uint64_t policy = ptx_policy_once();
    rows_ring ring = {0, 1}; /* the first round finds every stage empty */
    for (int t = 0; t < at.tiles; t++) {
        const int row0 = (at.group + t * p.step) * p.rows;
        for (int i = 0; i < at.stages; i++) {
            const int first = i * p.chunks;
            const int n = at.chunks - first < p.chunks ? at.chunks - first : p.chunks;
            const uint32_t bar = smem + p.mem.w_full + (uint32_t)ring.at * 8;
            uint32_t to = smem + p.mem.w + (uint32_t)ring.at * p.mem.w_stage;
            ptx_mbar_wait(smem + p.mem.w_empty + (uint32_t)ring.at * 8, (uint32_t)ring.parity);
            ptx_mbar_expect(bar, (uint32_t)(n * p.groups * ROWS_BOX_BYTES));
            for (int j = 0; j < n; j++)
                for (int b = 0; b < p.groups; b++, to += ROWS_BOX_BYTES)
                    ptx_map_load(to, &p.map, (at.chunk0 + first + j) * W::cols, row0 + b * ROWS_BOX,
                                 bar, policy);
            ring.next(p.ws);
        }
    }
}

/* x_warps warps; thread: of them. */
template <class W, int MT, bool BLOCK>
static __device__ __forceinline__ void rows_bring_x(const rows_args &p, const rows_at &at,
                                                    uint32_t smem, int thread)
{
    constexpr int threads = rows_shape<MT>::x_warps * 32;
    const int rounds = p.resident ? 1 : at.tiles;
    rows_ring ring = {0, 1};
    ptx_pdl_wait();
    ptx_pdl_go();
    for (int t = 0; t < rounds; t++)
        for (int i = 0; i < at.stages; i++) {
            const int first = i * p.chunks, col0 = (at.chunk0 + first) * W::cols;
            const int n = at.chunks - first < p.chunks ? at.chunks - first : p.chunks;
            const uint32_t slot = smem + p.mem.x + (uint32_t)ring.at * p.mem.x_slot;
            ptx_mbar_wait(smem + p.mem.x_empty + (uint32_t)ring.at * 8, (uint32_t)ring.parity);
            for (int q = thread; q < n * W::units * MT * 8; q += threads) {
                const int piece = q % 8, m = q / 8 % MT, col = col0 + q / (8 * MT) * 64 + piece * 8;
                const bool there = m < p.M && col < p.K;
                ptx_copy16_zero(slot + (uint32_t)(q / 8 * 128 + (piece ^ W::x_turn(m)) * 16),
                                p.x + (there ? m * p.ldx + col : 0), there ? 16 : 0);
            }
            if (BLOCK && p.x_scale)
                for (int q = thread; q < n * MT; q += threads) {
                    const int m = q % MT, j = at.chunk0 + first + q / MT;
                    ptx_copy4_zero(slot + p.mem.x_scales + (uint32_t)q * 4,
                                   p.x_scale + (m < p.M ? m * p.ld_x_scale + j : 0),
                                   m < p.M ? 4 : 0);
                }
            ptx_copy_arrive(smem + p.mem.x_full + (uint32_t)ring.at * 8);
            ring.next(p.xs);
        }
    ptx_copy_commit();
    ptx_copy_wait<0>();
}

/* ---- products -----------------------------------------------------------------------------------
 */
/* 32 rows x 64 bytes with all tokens. scale, x_scales (address of the chunk's, 0 = none): BLOCK. */
template <class W, int MT, bool BLOCK>
static __device__ __forceinline__ void rows_slot(uint32_t w, uint32_t x, bool live, float scale,
                                                 uint32_t x_scales,
                                                 float (&tot)[2][rows_shape<MT>::nt][4])
{
    constexpr bool in_order = MT > 8;
    constexpr int nt = rows_shape<MT>::nt;
    uint4 raw[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++)
        raw[i / 2][i % 2] = ptx_lds128(w + (uint32_t)i * 8 * ROWS_CHUNK);
    float acc[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll(BLOCK &&nt >= 4 ? 1 : W::halves) /* registers */
    for (int h = 0; h < W::halves; h++) {
        if (h) /* its codes are widened now, not before: registers */
            ptx_keep(raw[0][0]), ptx_keep(raw[0][1]), ptx_keep(raw[1][0]), ptx_keep(raw[1][1]);
        uint32_t a[2][2][4];
        W::template weights<in_order>(raw[0], h, a[0]);
        W::template weights<in_order>(raw[1], h, a[1]);
#pragma unroll
        for (int n = 0; n < nt; n++) {
            uint32_t b[2][2];
            uint4 v = make_uint4(0, 0, 0, 0);
            if (live) v = ptx_lds128((x ^ (uint32_t)h * 16) + (uint32_t)n * 1024);
            W::template tokens<in_order>(v, b);
#pragma unroll
            for (int i = 0; i < 4; i++)
                ptx_mma_bf16(BLOCK ? acc[i % 2] : tot[i % 2][n], a[i % 2][i / 2], b[i / 2][0],
                             b[i / 2][1]);
            if (!BLOCK || (nt == 1 && h + 1 < W::halves)) continue;
            float by[2] = {scale, scale};
            if (x_scales && MT == 1) by[0] *= ptx_lds_f32(x_scales);
            if (x_scales && MT > 1) {
                const uint2 s = ptx_lds64(x_scales + (uint32_t)n * 32);
                by[0] *= __uint_as_float(s.x), by[1] *= __uint_as_float(s.y);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                tot[i / 4][n][i % 4] = fmaf(by[i % 2], acc[i / 4][i % 4], tot[i / 4][n][i % 4]);
                acc[i / 4][i % 4] = 0;
            }
            if (nt >= 4) __syncwarp(); /* x of the next tokens is not loaded yet: registers */
        }
    }
}

/* A block-scaled weight's scale of chunk number i of this block. */
static __device__ __forceinline__ float rows_block_scale(const rows_args &p, const rows_at &at,
                                                         int row, int i)
{
    if (i >= at.chunks || row >= p.N) return 0;
    return p.scale[(int64_t)(row / 128) * ((p.K + 127) / 128) + at.chunk0 + i];
}

struct rows_end { /* the row that a thread finishes */
    int row;      /* of the tile */
    int n;
    float scale, bias;
};

/* Eight tokens from token m0 on of a tile: sum of the warps, of the cluster, y. d: this warp's sums
 * as the products leave them; step counts calls. All multiplying warps. */
template <int MT>
static __device__ __forceinline__ void
rows_finish(const rows_args &p, const rows_at &at, uint32_t smem, const rows_end &end, int m0,
            int step, const float (&d0)[4], const float (&d1)[4])
{
    constexpr int tokens = rows_shape<MT>::tokens, part = tokens * ROWS_PART_ROW;
    const int warp = (int)threadIdx.x / 32, g = (int)threadIdx.x % 32 / 4;
    const int c2 = (int)threadIdx.x % 4 * 2, parts = 2 * p.chunks, warps = parts * p.groups;
    const uint32_t sums = smem + p.mem.parts + (uint32_t)((step & 1) * warps * part * 4);
    const uint32_t mine = sums + (uint32_t)((warp * part + rows_turn(g)) * 4);
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (c2 + i % 2 < tokens) {
            const uint32_t to = mine + (uint32_t)(((c2 + i % 2) * ROWS_PART_ROW + i / 2 * 8) * 4);
            ptx_sts_f32(to, d0[i]);
            ptx_sts_f32(to + 16 * 4, d1[i]);
        }
    ptx_bar_sync(1, warps * 32);

    const int share = p.rows / p.split, owner = end.row / share, first = (int)threadIdx.x / p.rows;
    const uint32_t row = sums + (uint32_t)((end.row / ROWS_BOX * part + end.row % ROWS_BOX) * 4);
    auto local = [&](int m) {
        float s = 0;
#pragma unroll 2
        for (int k = 0; k < parts; k++)
            s += ptx_lds_f32(row + (uint32_t)((k * p.groups * part + m * ROWS_PART_ROW) * 4));
        return s;
    };
    const uint32_t far_full = smem + p.mem.far_full + (uint32_t)(step & 1) * 8;
    /* Place of a rank's sums in the block that finishes them. */
    auto far_at = [&](int from, int to, int m) {
        const int slot = (step & 1) * (p.split - 1) + (from < to ? from : from - 1);
        return smem + p.mem.far_sums +
               (uint32_t)(((slot * tokens + m) * share + end.row % share) * 4);
    };
    if (p.split > 1) {
        if (step == 0) ptx_cluster_wait(); /* the others' barriers are made */
        if (threadIdx.x == 0)
            ptx_mbar_expect(far_full, (uint32_t)((p.split - 1) * share * tokens * 4));
        if (owner != at.rank)
#pragma unroll 1
            for (int m = first; m < tokens; m += parts)
                ptx_send_f32(far_at(at.rank, owner, m), far_full, (uint32_t)owner, local(m));
        ptx_mbar_wait(far_full, (uint32_t)(step >> 1 & 1));
        if (owner != at.rank) return;
    }
#pragma unroll 1
    for (int m = first; m < tokens && m0 + m < p.M; m += parts) {
        float v = 0;
#pragma unroll 1
        for (int r = 0; r < p.split; r++)
            v += r == at.rank ? local(m) : ptx_lds_f32(far_at(r, at.rank, m));
        if (end.n >= p.N) continue;
        float by = end.scale;
        if (p.row_scale) by *= p.row_scale[m0 + m];
        v = fmaf(v, by, end.bias);
        const int64_t i = (m0 + m) * p.ldy + end.n;
        if (p.y_bf16)
            ((uint16_t *)p.y)[i] = (uint16_t)ptx_pack_bf16(v, 0);
        else
            ((float *)p.y)[i] = v;
    }
}

static __device__ __forceinline__ rows_end rows_end_of(const rows_args &p, int row0, bool scaled)
{
    rows_end end = {(int)threadIdx.x % p.rows, 0, 1.0f, 0};
    end.n = row0 + end.row;
    if (end.n < p.N) {
        if (scaled && p.scale) end.scale = p.scale[(int64_t)end.n * p.scale_step];
        if (p.bias) end.bias = p.bias[end.n];
    }
    return end;
}

/* The multiplying warps. */
template <class W, int MT, bool BLOCK>
static __device__ __forceinline__ void rows_multiply(const rows_args &p, const rows_at &at,
                                                     uint32_t smem, int warp, int lane)
{
    constexpr int nt = rows_shape<MT>::nt;
    const int part = warp / p.groups, box = warp % p.groups, j = part / 2;
    const uint32_t w_lane =
        smem + p.mem.w +
        (uint32_t)((j * p.groups + box) * ROWS_BOX_BYTES + rows_w_lane(lane, part % 2));
    const uint32_t x_lane = smem + p.mem.x + (uint32_t)W::x_lane(lane, part, MT);
    const bool live = MT >= 8 || lane / 4 < MT;
    rows_ring ring = {0, 0};
    int step = 0;
    ptx_pdl_wait(); /* row_scale; y may be what the kernel before reads */
    for (int t = 0; t < at.tiles; t++) {
        const int row0 = (at.group + t * p.step) * p.rows;
        rows_end end;
        if (nt < 4) end = rows_end_of(p, row0, !BLOCK); /* long before it is used */
        float tot[2][nt][4] = {};
        float next = BLOCK && nt < 4 ? rows_block_scale(p, at, row0 + box * ROWS_BOX, j) : 0;
#pragma unroll 1
        for (int i = 0; i < at.stages; i++) {
            float scale = next;
            if (BLOCK && nt < 4)
                next = rows_block_scale(p, at, row0 + box * ROWS_BOX, (i + 1) * p.chunks + j);
            if (BLOCK && nt >= 4) /* one stage ahead costs a register */
                scale = rows_block_scale(p, at, row0 + box * ROWS_BOX, i * p.chunks + j);
            const int slot = p.resident ? i : ring.at; /* as many slots as stages, or all kept */
            ptx_mbar_wait(smem + p.mem.w_full + (uint32_t)ring.at * 8, (uint32_t)ring.parity);
            ptx_mbar_wait(smem + p.mem.x_full + (uint32_t)slot * 8,
                          p.resident ? 0 : (uint32_t)ring.parity);
            if (i * p.chunks + j < at.chunks) {
                const uint32_t in_slot = (uint32_t)slot * p.mem.x_slot;
                const uint32_t lane2 = MT > 1 ? ptx_thread() % 4 * 2 : 0; /* not kept: registers */
                rows_slot<W, MT, BLOCK>(
                    w_lane + (uint32_t)ring.at * p.mem.w_stage, x_lane + in_slot, live, scale,
                    BLOCK && p.x_scale ? smem + p.mem.x + p.mem.x_scales + in_slot +
                                             ((uint32_t)(j * MT) + lane2) * 4
                                       : 0,
                    tot);
            }
            ptx_mbar_arrive(smem + p.mem.w_empty + (uint32_t)ring.at * 8);
            if (!p.resident) ptx_mbar_arrive(smem + p.mem.x_empty + (uint32_t)ring.at * 8);
            ring.next(p.ws);
        }
        if (nt >= 4) end = rows_end_of(p, row0, !BLOCK);
#pragma unroll 1
        for (int n = 0; n < nt && n * 8 < p.M; n++) {
            rows_finish<MT>(p, at, smem, end, n * 8, step++, tot[0][0], tot[1][0]);
#pragma unroll
            for (int k = 0; k + 1 < nt; k++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    tot[0][k][i] = tot[0][k + 1][i], tot[1][k][i] = tot[1][k + 1][i];
        }
    }
}

template <class W, int MT, bool BLOCK>
__global__ void __launch_bounds__(rows_shape<MT>::threads, 1)
    rows_kernel(const __grid_constant__ rows_args p)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int warps = 2 * p.chunks * p.groups;
    const rows_at at = rows_block(p);
    const uint32_t base = ptx_smem(smem);
    if (threadIdx.x == 0) {
        ptx_map_prefetch(&p.map);
        for (int i = 0; i < p.ws; i++) {
            ptx_mbar_init(base + p.mem.w_full + (uint32_t)i * 8, 1);
            ptx_mbar_init(base + p.mem.w_empty + (uint32_t)i * 8, (uint32_t)warps * 32);
        }
        for (int i = 0; i < p.xs; i++) {
            ptx_mbar_init(base + p.mem.x_full + (uint32_t)i * 8, rows_shape<MT>::x_warps * 32);
            ptx_mbar_init(base + p.mem.x_empty + (uint32_t)i * 8, (uint32_t)warps * 32);
        }
        ptx_mbar_init(base + p.mem.far_full, 1);
        ptx_mbar_init(base + p.mem.far_full + 8, 1);
        ptx_mbar_fence();
    }
    __syncthreads();
    if (p.split > 1) ptx_cluster_arrive();
    if (warp == warps) {
        if (lane == 0) rows_bring_w<W>(p, at, base);
        __syncwarp();
    } else if (warp > warps)
        rows_bring_x<W, MT, BLOCK>(p, at, base, (int)threadIdx.x - (warps + 1) * 32);
    else
        rows_multiply<W, MT, BLOCK>(p, at, base, warp, lane);
    /* No block leaves while another may still write to it. */
    if (p.split > 1) {
        if (warp >= warps) ptx_cluster_wait();
        ptx_cluster_arrive();
        ptx_cluster_wait();
    }
}
#endif
