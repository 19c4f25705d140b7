/* Attention of many new tokens over a paged cache (pages of GPU_KV_MMA order) on wgmma, as
 * FlashAttention-3: tiles of 128 rows, as prefill.cuh makes them, and 128 keys at a time, the last
 * ones first.
 *
 * Four warps carry: they bring q, K and V into shared memory in the order of wgmma's operands, K
 * and V two stages ahead and q a tile ahead. Twice four warps multiply, 64 rows each. While the
 * tensor cores of one half work, the other half computes probabilities (named barriers make them
 * take turns), and within a half S of the next keys is on its way together with P V of those
 * before.
 *
 *   Q  [D/64][128 rows][64 lanes]  rows of 128 bytes, 16-byte pieces at number ^ row%8
 *   K  [D/64][128 keys][64 lanes]  alike; token t of a page is row kv_place_token(t)
 *   V  [2][D][64 keys]             alike, a row is a lane of the head; keys as pages have them
 *
 * So columns of S are keys in the order in which pages have V, and the registers of S are P's
 * operand; a lane's columns of a page are eight tokens in a row.
 *
 * bf16 pages are copied piece by piece, each to its place. Pages of fp8 codes come as they are by
 * bulk copies into a ring of their own; the carrying warps widen them to f16.
 *
 * Blocks stay: each takes the next tile from a counter until there are no more. `done` counts the
 * K's (as many as V's) of a block's tiles before: number i of all is in stage i%2. */
#ifndef KERN_CUDA_PREFILL90_CUH
#define KERN_CUDA_PREFILL90_CUH
#include "kern/cuda/prefill.cuh"
#include "kern/cuda/prefill90_ptx.cuh"

#define PREFILL90_ROWS    128
#define PREFILL90_KEYS    128
#define PREFILL90_PAGES   (PREFILL90_KEYS / KV_PLACE_TOKENS)
#define PREFILL90_PANEL   (128 * 128) /* 128 rows of 128 bytes */
#define PREFILL90_CARRY   128         /* threads that carry; they come first */
#define PREFILL90_THREADS (PREFILL90_CARRY + 256)

template <class V, int D> struct prefill90_shape {
    static constexpr bool codes = V::bytes == 1;
    static constexpr uint32_t part = D / 64 * PREFILL90_PANEL; /* a tile of q, K or V */
    static constexpr uint32_t half = KV_PLACE_TOKENS * D * V::bytes, page = 2 * half;
    static constexpr uint32_t raw_stage = codes ? PREFILL90_PAGES * half : 0;
    static constexpr uint32_t k = 2 * part, v = 4 * part, raw = 6 * part;
    static constexpr uint32_t tiles = raw + 2 * raw_stage;
    static constexpr uint32_t bars = (tiles + 2 * (uint32_t)sizeof(prefill_tile) + 7) / 8 * 8;
    static constexpr size_t smem = bars + 14 * 8;
    /* Of a thread that carries, that multiplies: 128 and 256 of them share 64k. */
    static constexpr int few = 56, many = 224;
};
/* Two barriers of each kind. The tile says what the block works on next; its q is there with it. */
struct prefill90_bars {
    uint32_t tile, tile_left, k, k_left, v, v_left, raw;
};
template <class S> static __device__ __forceinline__ prefill90_bars prefill90_bars_of(uint32_t smem)
{
    const uint32_t b = smem + S::bars;
    return {b, b + 16, b + 32, b + 48, b + 64, b + 80, b + 96};
}
enum { PREFILL90_CARRIERS = 1, PREFILL90_TURN = 2 }; /* named barriers; a turn of each half */

/* Byte of piece number p (of 8 lanes) of a row. */
static __device__ __forceinline__ uint32_t prefill90_at(int row, int p)
{
    return (uint32_t)(p / 8 * PREFILL90_PANEL + row * 128 + (p % 8 ^ row % 8) * 16);
}

/* ---- carrying -----------------------------------------------------------------------------------
 */
/* q of the tile; rows beyond the sequence are zero. Arrives at the tile's barrier when it is there.
 */
template <class V, int D>
static __device__ __forceinline__ void prefill90_q(const gpu_attention &a, const prefill_tile &t,
                                                   uint32_t to, uint32_t bar)
{
    constexpr int pieces = D / 8, rounds = pieces * PREFILL90_ROWS / PREFILL90_CARRY;
    constexpr int step = PREFILL90_CARRY / pieces; /* rows */
    const int p = (int)threadIdx.x % pieces, row0 = (int)threadIdx.x / pieces;
    auto from = [&](int r) {
        return (int64_t)(t.row0 + r / t.G) * a.ldq + (int64_t)(t.hk * t.G + r % t.G) * D + 8 * p;
    };
    if (V::bytes == 2 && a.q.type == GPU_BF16) { /* as it is */
#pragma unroll 4
        for (int m = 0; m < rounds; m++) {
            const int row = row0 + m * step, r = t.first_row + row;
            const uint16_t *q = (const uint16_t *)a.q.p;
            ptx_copy16_zero(to + prefill90_at(row, p), r < t.rows ? q + from(r) : q,
                            r < t.rows ? 16 : 0);
        }
        ptx_copy_arrive(bar);
        return;
    }
#pragma unroll 4
    for (int m = 0; m < rounds; m++) {
        const int row = row0 + m * step, r = t.first_row + row;
        uint32_t w[4] = {0, 0, 0, 0};
        if (r < t.rows) attn_q<V>(a.q, from(r), w);
        ptx_sts128(to + prefill90_at(row, p), make_uint4(w[0], w[1], w[2], w[3]));
    }
    ptx_proxy_fence();
    ptx_mbar_arrive(bar);
}

/* Of eight values of V in their order in a row, number i of eight of a page's row: those of tokens
 * from `valid` on, which nobody has stored, become zero: they may be anything, NaN too. */
static __device__ __forceinline__ void prefill90_clear(uint32_t w[4], int i, int valid)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int t = 2 * i + 8 * (k % 2) + 16 * (k / 2);
        w[k] &= t + 1 < valid ? 0xffffffffu : t < valid ? 0xffffu : 0u;
    }
}

/* The pages of a tile of keys, and how many tokens of them are there. */
struct prefill90_keys {
    const uint8_t *page[PREFILL90_PAGES]; /* of the KV head */
    int valid;                            /* of the tile, may be more */
};
static __device__ __forceinline__ prefill90_keys prefill90_look_up(const gpu_attention &a,
                                                                   const prefill_tile &t,
                                                                   uint32_t page, int tile)
{
    const int32_t *table = a.seqs.pages + (int64_t)t.seq * a.seqs.max_pages;
    const uint8_t *base = a.kv.base + (size_t)t.hk * page;
    prefill90_keys k;
    k.valid = t.stored_to - tile * PREFILL90_KEYS;
#pragma unroll
    for (int g = 0; g < PREFILL90_PAGES; g++) {
        const bool there = tile >= 0 && g * KV_PLACE_TOKENS < k.valid;
        const int32_t at = there ? table[tile * PREFILL90_PAGES + g] : 0;
        k.page[g] = base + (size_t)at * a.kv.page_stride;
    }
    return k;
}

/* Pages of bf16. */
template <int D> struct prefill90_copy {
    static constexpr int pieces = D / 8, rounds = D / 32;
    uint32_t k_to, v_to, v_from;

    __device__ __forceinline__ prefill90_copy(void)
    {
        const int i = (int)threadIdx.x, t = i / pieces, x = i / 4;
        k_to = prefill90_at(kv_place_token(t), i % pieces ^ kv_turn(2, D, t));
        /* Eight lanes side by side write to all banks. */
        const int d = x % 2 * 4 + x / 2 % 4 + x / 8 * 8;
        v_to = prefill90_at(d, i % 4);
        v_from = (uint32_t)(d * 64 + i % 4 * 16);
    }
    __device__ __forceinline__ void keys(const prefill90_keys &k, uint32_t to, uint32_t bar) const
    {
        const uint32_t from = threadIdx.x * 16;
#pragma unroll
        for (int g = 0; g < PREFILL90_PAGES; g++)
#pragma unroll
            for (int m = 0; m < rounds; m++) {
                const uint32_t rows = (uint32_t)(8 / rounds * m); /* of eight, further down */
                ptx_copy16_zero(
                    to + (uint32_t)(g * KV_PLACE_TOKENS * 128) + (k_to ^ rows * 16) + rows * 128,
                    k.page[g] + from + m * 2048, g * KV_PLACE_TOKENS < k.valid ? 16 : 0);
            }
        ptx_copy_arrive(bar);
    }
    __device__ __forceinline__ uint32_t value_at(int g, int m) const
    {
        return (uint32_t)(g / 2 * D * 128 + m * 4096) + (v_to ^ (uint32_t)(g % 2 * 64));
    }
    __device__ __forceinline__ void values(const prefill90_keys &k, uint32_t to, uint32_t bar) const
    {
#pragma unroll
        for (int g = 0; g < PREFILL90_PAGES; g++)
#pragma unroll
            for (int m = 0; m < rounds; m++)
                ptx_copy16_zero(to + value_at(g, m),
                                k.page[g] + KV_PLACE_TOKENS * D * 2 + v_from + m * 2048,
                                g * KV_PLACE_TOKENS < k.valid ? 16 : 0);
        if (k.valid >= PREFILL90_KEYS || k.valid % KV_PLACE_TOKENS == 0) {
            ptx_copy_arrive(bar);
            return;
        }
        ptx_copy_wait_all();
        const int g = k.valid / KV_PLACE_TOKENS;
#pragma unroll 1
        for (int m = 0; m < rounds; m++) {
            const uint32_t at = to + value_at(g, m);
            const uint4 x = ptx_lds128(at);
            uint32_t w[4] = {x.x, x.y, x.z, x.w};
            prefill90_clear(w, (int)threadIdx.x % 4, k.valid % KV_PLACE_TOKENS);
            ptx_sts128(at, make_uint4(w[0], w[1], w[2], w[3]));
        }
        ptx_proxy_fence();
        ptx_mbar_arrive(bar);
    }
};

/* Pages of codes: one half (K or V) of the pages of a tile of keys lies at `raw`. */
template <int D> struct prefill90_widen {
    static constexpr int pieces = D / 16, rounds = D / 64;
    uint32_t k_to, v_to, v_from;

    __device__ __forceinline__ prefill90_widen(void)
    {
        const int i = (int)threadIdx.x, t = i / pieces, y = i / 2;
        k_to = prefill90_at(kv_place_token(t), 2 * (i % pieces) ^ kv_turn(1, D, t));
        /* Eight lanes side by side write to all banks. */
        const int d = y % 2 + y / 2 % 2 * 4 + y / 4 % 2 * 2 + y / 8 * 8;
        v_to = prefill90_at(d, 2 * (i % 2));
        v_from = (uint32_t)(d * 32 + i % 2 * 16);
    }
    static __device__ __forceinline__ void wide(uint32_t lo, uint32_t hi, uint32_t w[4])
    {
        w[0] = ptx_e4m3_f16(lo), w[1] = ptx_e4m3_f16(lo >> 16);
        w[2] = ptx_e4m3_f16(hi), w[3] = ptx_e4m3_f16(hi >> 16);
    }
    /* Sixteen values are two pieces, the second one where bit 4 differs. */
    static __device__ __forceinline__ void put(uint32_t to, const uint32_t w[2][4], bool second)
    {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const bool b = (k == 1) != second;
            ptx_sts128(to ^ (b ? 16 : 0), make_uint4(b ? w[1][0] : w[0][0], b ? w[1][1] : w[0][1],
                                                     b ? w[1][2] : w[0][2], b ? w[1][3] : w[0][3]));
        }
    }
    __device__ __forceinline__ void keys(int valid, uint32_t raw, uint32_t to) const
    {
        const bool second = D == 128 && threadIdx.x / 4 % 2; /* the other panel, the same banks */
#pragma unroll
        for (int g = 0; g < PREFILL90_PAGES; g++)
#pragma unroll
            for (int m = 0; m < rounds; m++) {
                uint32_t w[2][4] = {};
                if (g * KV_PLACE_TOKENS < valid) {
                    const uint4 x = ptx_lds128(raw + (uint32_t)(g * KV_PLACE_TOKENS * D) +
                                               threadIdx.x * 16 + m * 2048);
                    wide(x.x, x.y, w[0]), wide(x.z, x.w, w[1]);
                }
                const uint32_t rows = 4 * m; /* of eight, further down */
                put(to + (uint32_t)(g * KV_PLACE_TOKENS * 128) + (k_to ^ rows * 16) + rows * 128, w,
                    second);
            }
    }
    __device__ __forceinline__ void values(int valid, uint32_t raw, uint32_t to) const
    {
#pragma unroll
        for (int g = 0; g < PREFILL90_PAGES; g++)
#pragma unroll
            for (int m = 0; m < rounds; m++) {
                const int here = valid - g * KV_PLACE_TOKENS;
                uint32_t w[2][4] = {};
                if (here > 0) {
                    const uint4 x =
                        ptx_lds128(raw + (uint32_t)(g * KV_PLACE_TOKENS * D) + v_from + m * 2048);
                    wide(x.x, x.y, w[0]), wide(x.z, x.w, w[1]);
                    if (here < KV_PLACE_TOKENS) {
                        prefill90_clear(w[0], (int)threadIdx.x % 2 * 2, here);
                        prefill90_clear(w[1], (int)threadIdx.x % 2 * 2 + 1, here);
                    }
                }
                put(to + (uint32_t)(g / 2 * D * 128 + m * 8192) + (v_to ^ (uint32_t)(g % 2 * 64)),
                    w, false);
            }
    }
};

/* What is carried: K and V of a tile's keys in the order K0 K1 V0 K2 V1 ..., the last keys first;
 * `done`: how many of either were carried for the tiles before. */
struct prefill90_stream {
    int n, done; /* tiles of keys */
    __device__ __forceinline__ bool is_key(int i) const
    {
        return i == 0 || (i % 2 && i < 2 * n - 1);
    }
    __device__ __forceinline__ int number(int i) const /* of the K's or of the V's */
    {
        return is_key(i) ? (i + 1) / 2 : i == 2 * n - 1 ? n - 1 : i / 2 - 1;
    }
    __device__ __forceinline__ int tile(int i) const { return n - 1 - number(i); }
};
template <class S>
static __device__ __forceinline__ void prefill90_enter(const prefill90_bars &bar, bool key, int use,
                                                       uint32_t smem, uint32_t *to, uint32_t *full)
{
    const uint32_t stage = (uint32_t)use % 2;
    *to = smem + (key ? S::k : S::v) + stage * S::part;
    *full = (key ? bar.k : bar.v) + stage * 8;
    ptx_mbar_await((key ? bar.k_left : bar.v_left) + stage * 8, ((uint32_t)use / 2 & 1) ^ 1);
}

template <int D>
static __device__ __forceinline__ void
prefill90_carry(const gpu_attention &a, const prefill_tile &t, const prefill90_stream &s,
                const prefill90_copy<D> &copy, const prefill90_bars &bar, uint32_t smem)
{
    typedef prefill90_shape<kv_bf16, D> S;
    uint32_t to, full;
    prefill90_keys now = prefill90_look_up(a, t, S::page, s.n - 1);
    prefill90_keys next = prefill90_look_up(a, t, S::page, s.n - 2);
    prefill90_enter<S>(bar, true, s.done, smem, &to, &full);
    copy.keys(now, to, full);
#pragma unroll 1
    for (int j = 1; j <= s.n; j++) {
        if (j < s.n) {
            prefill90_enter<S>(bar, true, s.done + j, smem, &to, &full);
            copy.keys(next, to, full);
        }
        const prefill90_keys then = prefill90_look_up(a, t, S::page, s.n - 2 - j);
        prefill90_enter<S>(bar, false, s.done + j - 1, smem, &to, &full);
        copy.values(now, to, full);
        now = next, next = then;
    }
}

template <int D>
static __device__ __forceinline__ void prefill90_ask(const gpu_attention &a, const prefill_tile &t,
                                                     const prefill90_stream &s, int i,
                                                     const prefill90_bars &bar, uint32_t smem)
{
    typedef prefill90_shape<kv_e4m3, D> S;
    if (i >= 2 * s.n) return;
    const prefill90_keys k = prefill90_look_up(a, t, S::page, s.tile(i));
    const uint32_t full = bar.raw + (uint32_t)i % 2 * 8;
    const uint32_t to = smem + S::raw + (uint32_t)i % 2 * S::raw_stage;
    const int pages = min(PREFILL90_PAGES, (k.valid + KV_PLACE_TOKENS - 1) / KV_PLACE_TOKENS);
    ptx_mbar_expect(full, (uint32_t)pages * S::half);
#pragma unroll
    for (int g = 0; g < PREFILL90_PAGES; g++)
        if (g < pages)
            ptx_bulk_load(to + g * S::half, k.page[g] + (s.is_key(i) ? 0 : S::half), S::half, full);
}
template <int D>
static __device__ __forceinline__ void
prefill90_carry(const gpu_attention &a, const prefill_tile &t, const prefill90_stream &s,
                const prefill90_widen<D> &widen, const prefill90_bars &bar, uint32_t smem)
{
    typedef prefill90_shape<kv_e4m3, D> S;
#pragma unroll 1
    for (int i = 0; i < 2 * s.n; i++) {
        const bool key = s.is_key(i);
        const uint32_t stage = (uint32_t)i % 2, raw = smem + S::raw + stage * S::raw_stage;
        const int valid = t.stored_to - s.tile(i) * PREFILL90_KEYS;
        uint32_t to, full;
        ptx_mbar_await(bar.raw + stage * 8, (uint32_t)(s.done + i / 2) & 1);
        prefill90_enter<S>(bar, key, s.done + s.number(i), smem, &to, &full);
        if (key)
            widen.keys(valid, raw, to);
        else
            widen.values(valid, raw, to);
        ptx_proxy_fence();
        ptx_mbar_arrive(full);
        ptx_bar_sync(PREFILL90_CARRIERS, PREFILL90_CARRY); /* everybody is done with the codes */
        if (threadIdx.x == 0) prefill90_ask<D>(a, t, s, i + 2, bar, smem);
    }
}

/* Rows of no sequence become zero: each warp looks at 32 rows at a time. */
template <int D> static __device__ __forceinline__ void prefill90_nobody(const gpu_attention &a)
{
    const int lane_id = (int)threadIdx.x % 32, warps = PREFILL90_CARRY / 32;
    const int64_t step = (int64_t)gridDim.x * warps * 32;
    int64_t first = ((int64_t)blockIdx.x * warps + threadIdx.x / 32) * 32;
    for (; first < a.seqs.T; first += step) {
        const int64_t t = first + lane_id;
        unsigned who = __ballot_sync(~0u, t < a.seqs.T && a.seqs.row_seq[t] < 0);
        for (; who; who &= who - 1)
            for (int i = lane_id; i < a.H * D; i += 32)
                put_lane(a.out, (first + __ffs((int)who) - 1) * a.ldo + i, 0.0f);
    }
}

/* The next tile of all; the counter is back at zero when every block has found that there are no
 * more. */
static __device__ __forceinline__ int prefill90_next(const gpu_attention &a)
{
    return (int)atomicAdd((unsigned *)a.work, 1u);
}
static __device__ __forceinline__ void prefill90_last(const gpu_attention &a)
{
    unsigned *count = (unsigned *)a.work;
    if (atomicAdd(count + 1, 1u) + 1 < gridDim.x) return;
    atomicExch(count, 0u);
    atomicExch(count + 1, 0u);
}

template <class V, int D> struct prefill90_carrier {
    typedef prefill90_copy<D> type;
};
template <int D> struct prefill90_carrier<kv_e4m3, D> {
    typedef prefill90_widen<D> type;
};
static __device__ __forceinline__ int prefill90_tiles(const prefill_tile &t)
{
    return (t.end_page + PREFILL90_PAGES - 1) / PREFILL90_PAGES;
}

template <class V, int D>
static __device__ __forceinline__ void prefill90_carry_all(const gpu_attention &a, int least,
                                                           prefill_tile *tiles, uint32_t smem)
{
    typedef prefill90_shape<V, D> S;
    const prefill90_bars bar = prefill90_bars_of<S>(smem);
    const typename prefill90_carrier<V, D>::type carrier;
    int index = 0, done = 0;
    if (threadIdx.x == 0) index = prefill90_next(a);
#pragma unroll 1
    for (uint32_t k = 0;; k++) {
        prefill_tile *t = tiles + k % 2;
        ptx_mbar_await(bar.tile_left + k % 2 * 8, (k / 2 & 1) ^ 1);
        if (threadIdx.x < 32) {
            const int tile = __shfl_sync(~0u, index, 0);
            prefill_find(a, least, PREFILL90_ROWS, tile, t);
        }
        ptx_bar_sync(PREFILL90_CARRIERS, PREFILL90_CARRY);
        if (threadIdx.x == 0) ptx_mbar_arrive(bar.tile + k % 2 * 8); /* for what the tile is */
        if (!t->rows) {
            ptx_mbar_arrive(bar.tile + k % 2 * 8);
            break;
        }
        const prefill90_stream s = {prefill90_tiles(*t), done};
        if (threadIdx.x == 0) {
            index = prefill90_next(a);
            for (int i = 0; S::codes && i < 2; i++)
                prefill90_ask<D>(a, *t, s, i, bar, smem);
        }
        prefill90_q<V, D>(a, *t, smem + k % 2 * S::part, bar.tile + k % 2 * 8);
        prefill90_carry<D>(a, *t, s, carrier, bar, smem);
        done += s.n;
    }
    if (threadIdx.x == 0) prefill90_last(a);
    prefill90_nobody<D>(a);
    ptx_copy_wait_all(); /* nobody leaves before his copies are there */
}

/* ---- multiplying --------------------------------------------------------------------------------
 */
template <int D> struct prefill90_state {
    float o[D / 2], max[2], sum[2]; /* of rows lane/4 and + 8 of the warp's 16 */
};

/* S = q K^T; operands are places, each panel 1024 further. */
template <class V, int D>
static __device__ __forceinline__ void prefill90_scores(float (&s)[64], uint32_t q, uint32_t k)
{
    ptx_wg_fence();
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const uint32_t at = (uint32_t)(i / 4 * (PREFILL90_PANEL / 16) + i % 4 * 2);
        ptx_wg_ss<V>(s, q + at, k + at, i > 0);
    }
    ptx_wg_commit();
}
/* O += P V. */
template <class V, int D>
static __device__ __forceinline__ void prefill90_values(float (&o)[D / 2],
                                                        const uint32_t (&p)[8][4], uint32_t v)
{
    ptx_wg_fence();
#pragma unroll
    for (int i = 0; i < PREFILL90_KEYS / 16; i++)
        ptx_wg_rs<V, D>(o, p[i], v + (uint32_t)(i / 4 * (D * 128 / 16) + i % 4 * 2));
    ptx_wg_commit();
}

/* Scores of keys behind a row's position become -inf. left: what the position is ahead of the first
 * key of the lane in the tile. */
static __device__ __forceinline__ void prefill90_mask(float (&s)[64], const int left[2])
{
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const int n = i / 4, key = n / 4 * KV_PLACE_TOKENS + n % 4 * 2 + i % 2;
        if (key > left[i / 2 % 2]) s[i] = -INFINITY;
    }
}

/* Scores become probabilities, summed up. What O has to be multiplied by goes to f; false: by 1. */
static __device__ __forceinline__ bool prefill90_softmax(float (&s)[64], float max[2], float sum[2],
                                                         float by, float f[2])
{
    float m[2];
    bool behind = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float v = s[2 * h], w = s[2 * h + 1];
#pragma unroll
        for (int n = 1; n < 16; n++)
            v = fmaxf(v, s[4 * n + 2 * h]), w = fmaxf(w, s[4 * n + 2 * h + 1]);
        v = fmaxf(v, w);
        v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
        v = fmaxf(v, __shfl_xor_sync(~0u, v, 2));
        const bool far = (v - max[h]) * by > PREFILL_BEHIND;
        m[h] = far ? v : max[h];
        behind |= far;
    }
    behind = __any_sync(~0u, behind);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        f[h] = m[h] == max[h] ? 1.0f : ptx_exp2((max[h] - m[h]) * by);
        max[h] = m[h];
        const float from = m[h] == -INFINITY ? 0.0f : -m[h] * by;
        float part[2] = {0, 0};
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = s[4 * n + 2 * h + e];
                x = ptx_exp2(fmaf(x, by, from));
                part[e] += x;
            }
        sum[h] = fmaf(sum[h], f[h], part[0] + part[1]); /* of this lane's keys */
    }
    return behind;
}
template <class V>
static __device__ __forceinline__ void prefill90_pack(const float (&s)[64], uint32_t (&p)[8][4])
{
#pragma unroll
    for (int i = 0; i < 32; i++)
        p[i / 4][i % 4] = V::pack(s[2 * i], s[2 * i + 1]);
}

/* What a warp that multiplies knows of its tile. */
struct prefill90_rows {
    int row[2], pos[2]; /* of the sequence, in rows of G heads; positions */
    int low;            /* the lowest position of the half */
    int end;            /* rows of the sequence */
};

template <class V, int D>
static __device__ __forceinline__ void prefill90_out(const gpu_attention &a, const prefill_tile &t,
                                                     const prefill90_rows &r, float by,
                                                     const prefill90_state<D> &st)
{
    const float v_scale = a.kv.v_scale ? a.kv.v_scale[t.hk] : 1.0f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = st.sum[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (r.row[h] >= r.end) continue;
        const int head = t.hk * t.G + r.row[h] % t.G;
        const float f = attn_finish(a, head, st.max[h] * by, sum, v_scale);
        const int64_t to = (int64_t)(t.row0 + r.row[h] / t.G) * a.ldo + (int64_t)head * D +
                           (int)ptx_thread() % 4 * 2;
        if (a.out.type == GPU_F32) {
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                *(float2 *)((float *)a.out.p + to + 8 * n) =
                    make_float2(st.o[4 * n + 2 * h] * f, st.o[4 * n + 2 * h + 1] * f);
        } else {
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                *(uint32_t *)((uint16_t *)a.out.p + to + 8 * n) =
                    ptx_pack_bf16(st.o[4 * n + 2 * h] * f, st.o[4 * n + 2 * h + 1] * f);
        }
    }
}

/* Waits for number `use` of K or V, which lies at the place that is returned. Copies of threads are
 * ordinary writes: products see them after a fence. */
template <class S>
static __device__ __forceinline__ uint32_t prefill90_take(uint32_t bar, int use, uint32_t at)
{
    const uint32_t stage = (uint32_t)use % 2;
    ptx_mbar_await(bar + stage * 8, (uint32_t)use / 2 & 1);
    return ptx_wg_place(at + stage * S::part);
}
template <class S> static __device__ __forceinline__ void prefill90_fence(void)
{
    if (!S::codes) ptx_proxy_fence();
}
static __device__ __forceinline__ void prefill90_leave(uint32_t bar, int use)
{
    if (ptx_thread() % 32 == 0) ptx_mbar_arrive(bar + (uint32_t)use % 2 * 8);
}

/* S of the next keys with P V of those before; the other half has its turn when both are asked for.
 * use: of the K. */
template <class V, int D, bool MASK>
static __device__ __forceinline__ void
prefill90_step(prefill90_state<D> &st, uint32_t (&p)[8][4], uint32_t q, int use, int half,
               const int left[2], float by, int some, const prefill90_bars &bar, uint32_t smem)
{
    typedef prefill90_shape<V, D> S;
    float s[64], f[2] = {1, 1};
    const uint32_t k = prefill90_take<S>(bar.k, use, smem + S::k);
    const uint32_t v = prefill90_take<S>(bar.v, use - 1, smem + S::v);
    prefill90_fence<S>();
    ptx_bar_sync(PREFILL90_TURN + half, 256);
    prefill90_scores<V, D>(s, q, k);
    prefill90_values<V, D>(st.o, p, v);
    ptx_bar_arrive(PREFILL90_TURN + 1 - half, 256);
    ptx_wg_wait<1>();
    prefill90_leave(bar.k_left, use);
    bool behind = false;
    if (some > 0) { /* always: what is in here is not put off until the products are done */
        if (MASK) prefill90_mask(s, left);
        behind = prefill90_softmax(s, st.max, st.sum, by, f);
    }
    ptx_wg_wait<0>();
    prefill90_leave(bar.v_left, use - 1);
    if (behind) {
#pragma unroll
        for (int i = 0; i < D / 2; i++)
            st.o[i] *= f[i / 2 % 2];
    }
    prefill90_pack<V>(s, p);
}

template <class V, int D>
static __device__ __forceinline__ void
prefill90_multiply(const gpu_attention &a, const prefill_tile &t, int half, int done, uint32_t q_at,
                   const prefill90_bars &bar, uint32_t smem)
{
    typedef prefill90_shape<V, D> S;
    const int n = prefill90_tiles(t), lane_id = (int)ptx_thread() % 32;
    const int first = 64 * half + (int)ptx_thread() % 128 / 32 * 16 + lane_id / 4;
    const attn_scale scale = attn_scale_of(a, t.hk);
    const uint32_t q = ptx_wg_place(q_at + (uint32_t)(half * 64 * 128));
    prefill90_state<D> st;
    prefill90_rows r;
    uint32_t p[8][4];
    int left[2];
    r.low = prefill_pos(t, 64 * half);
    r.end = t.rows;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.row[h] = t.first_row + first + 8 * h;
        r.pos[h] = prefill_pos(t, first + 8 * h);
        left[h] = r.pos[h] - (n - 1) * PREFILL90_KEYS - lane_id % 4 * 8;
        st.max[h] = -INFINITY, st.sum[h] = 0;
    }
#pragma unroll
    for (int i = 0; i < D / 2; i++)
        st.o[i] = 0;
    {
        float s[64], f[2];
        const uint32_t k = prefill90_take<S>(bar.k, done, smem + S::k);
        ptx_proxy_fence(); /* q was copied by threads too */
        prefill90_scores<V, D>(s, q, k);
        ptx_wg_wait<0>();
        prefill90_leave(bar.k_left, done);
        prefill90_mask(s, left);
        prefill90_softmax(s, st.max, st.sum, scale.by, f);
        prefill90_pack<V>(s, p);
    }
    int j = 1;
#pragma unroll 1
    for (; j < n && (n - j) * PREFILL90_KEYS > r.low + 1; j++) {
        left[0] += PREFILL90_KEYS, left[1] += PREFILL90_KEYS;
        prefill90_step<V, D, true>(st, p, q, done + j, half, left, scale.by, a.H, bar, smem);
    }
#pragma unroll 1
    for (; j < n; j++)
        prefill90_step<V, D, false>(st, p, q, done + j, half, left, scale.by, a.H, bar, smem);
    const uint32_t v = prefill90_take<S>(bar.v, done + n - 1, smem + S::v);
    prefill90_fence<S>();
    prefill90_values<V, D>(st.o, p, v);
    ptx_wg_wait<0>();
    prefill90_leave(bar.v_left, done + n - 1);
    prefill90_out<V, D>(a, t, r, scale.by, st);
}

template <class V, int D>
__global__ void __launch_bounds__(PREFILL90_THREADS, 1)
    prefill90_kernel(const gpu_attention a, int least)
{
    typedef prefill90_shape<V, D> S;
    SMEM(unsigned char, bytes);
    const uint32_t smem = ptx_smem(bytes);
    prefill_tile *tiles = (prefill_tile *)(bytes + S::tiles);
    const prefill90_bars bar = prefill90_bars_of<S>(smem);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < 16; i += 8) {
            ptx_mbar_init(bar.tile + i, PREFILL90_CARRY + 1);
            ptx_mbar_init(bar.k + i, PREFILL90_CARRY);
            ptx_mbar_init(bar.v + i, PREFILL90_CARRY);
            ptx_mbar_init(bar.tile_left + i, 8); /* warps */
            ptx_mbar_init(bar.k_left + i, 8);
            ptx_mbar_init(bar.v_left + i, 8);
            ptx_mbar_init(bar.raw + i, 1);
        }
        ptx_mbar_fence();
    }
    __syncthreads();
    /* In this order: decode, which may follow, begins with keys that earlier kernels have stored.
     */
    ptx_pdl_wait();
    ptx_pdl_go();
    if (threadIdx.x < PREFILL90_CARRY) {
        ptx_fewer_registers<S::few>();
        prefill90_carry_all<V, D>(a, least, tiles, smem);
        return;
    }
    ptx_more_registers<S::many>();
    const int half = (int)threadIdx.x / 128 - 1;
    int done = 0;
    if (half == 0) ptx_bar_arrive(PREFILL90_TURN, 256); /* has the first turn */
#pragma unroll 1
    for (uint32_t k = 0;; k++) {
        const prefill_tile &t = tiles[k % 2];
        ptx_mbar_await(bar.tile + k % 2 * 8, k / 2 & 1);
        if (!t.rows) break;
        prefill90_multiply<V, D>(a, t, half, done, smem + k % 2 * S::part, bar, smem);
        done += prefill90_tiles(t);
        __syncwarp(); /* lanes still read the tile */
        prefill90_leave(bar.tile_left, (int)k);
    }
}
#endif
