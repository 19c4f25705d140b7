/* Attention of many new tokens over a paged cache (pages of GPU_KV_MMA order), as
 * FlashAttention-2: a block has a tile of rows of one KV head and goes over the keys that they see,
 * 64 at a time, with a running softmax in registers.
 *
 * Rows of a tile are the query heads of the KV head, token after token: row i of a sequence is
 * token i/G, head i%G. A tile of 128 rows so has few tokens, which keeps the part of it small where
 * the mask matters, and sequences with few new tokens waste little. Warps share nothing but the
 * ring of keys: a warp has 16*M rows, its q lies in shared memory in the order of the operand, each
 * lane's own (a row r of a 16-row operand is lane r%8*4 .., see ptx_mma_bf16).
 *
 *   S = q K^T  the operand of 8 tokens and 32 lanes of the head is 16 (8) bytes a lane of K's rows
 *   O += P V   S's registers are P's operand; that of 8 lanes of the head and the 32 tokens of a
 *              page is 16 (8) bytes a lane of V's rows, as kv_place has them
 *
 * The maximum that exponents count from follows the true one only when it is left behind by more
 * than 2^8: sums stay in range and O is rarely multiplied. A ring of two stages of two pages, a
 * page of a head (K and V) is one bulk copy. Grid: tiles of all sequences, from the device's own
 * n_rows (blocks beyond them return), a sequence's last and longest tile first, all KV heads of a
 * tile side by side. */
#ifndef KERN_CUDA_PREFILL_CUH
#define KERN_CUDA_PREFILL_CUH
#include "kern/cuda/attn.cuh"

#define PREFILL_KEYS   (2 * KV_PLACE_TOKENS)
#define PREFILL_STAGES 2
#define PREFILL_BEHIND 8.0f /* powers of two */

template <class V, int D, int M, int WARPS> struct prefill_shape {
    static constexpr int rows = 16 * M * WARPS, threads = 32 * WARPS;
    static constexpr uint32_t plane = KV_PLACE_TOKENS * D * V::bytes, page = 2 * plane;
    static constexpr uint32_t q = rows * D * 2, stage = 2 * page;
    static constexpr uint32_t bars = q + PREFILL_STAGES * stage;
    static constexpr uint32_t pages = bars + PREFILL_STAGES * 8; /* two to come */
    static constexpr uint32_t sums = (pages + 8 + 15) / 16 * 16;
    static constexpr size_t smem = sums + threads * M * 16;
};

/* A tile of rows and the keys that it sees. */
struct prefill_tile {
    int seq, hk, G, row0, pos0; /* row and position of the sequence's first token */
    int first_row, rows;        /* of its sequence, in rows of G heads; rows 0 = no tile */
    int first_page, end_page;   /* with keys that some row sees */
    int stored_from, stored_to; /* keys of these pages that somebody has stored */
    int low[8], high[8];        /* positions of the first and last row of each warp */
};
static __device__ __forceinline__ int prefill_pos(const prefill_tile &t, int row)
{
    return t.pos0 + min(t.first_row + row, t.rows - 1) / t.G;
}
/* The first row of this warp; asked for anew wherever it is needed: registers are scarce. */
template <int M> static __device__ __forceinline__ int prefill_warp_row(void)
{
    return (int)ptx_thread() / 32 * 16 * M;
}
/* Where the lane's q lies: q is the start of all. */
template <int D, int M> static __device__ __forceinline__ uint32_t prefill_q_at(uint32_t q)
{
    return q + (uint32_t)(prefill_warp_row<M>() * D * 2) + ptx_thread() % 32 * 16;
}
/* Running softmax of the lane's 2*M rows; row i: 16*(i/2) + lane/4 + 8*(i%2) of the warp's. Where
 * M > 1, maxima and sums lie in shared memory meanwhile, 16*M bytes a lane from `at` on: registers
 * are scarce. */
template <int D, int M> struct prefill_state {
    float max[2 * M], sum[2 * M], o[M][D / 8][4];
};
template <int D, int M>
static __device__ __forceinline__ void prefill_take(prefill_state<D, M> &st, uint32_t at)
{
#pragma unroll
    for (int m = 0; M > 1 && m < M; m++) {
        const uint4 x = ptx_lds128(at + (ptx_thread() * M + m) * 16);
        st.max[2 * m] = __uint_as_float(x.x), st.max[2 * m + 1] = __uint_as_float(x.y);
        st.sum[2 * m] = __uint_as_float(x.z), st.sum[2 * m + 1] = __uint_as_float(x.w);
    }
}
template <int D, int M>
static __device__ __forceinline__ void prefill_leave(const prefill_state<D, M> &st, uint32_t at)
{
#pragma unroll
    for (int m = 0; M > 1 && m < M; m++)
        ptx_sts128(at + (ptx_thread() * M + m) * 16,
                   make_uint4(__float_as_uint(st.max[2 * m]), __float_as_uint(st.max[2 * m + 1]),
                              __float_as_uint(st.sum[2 * m]), __float_as_uint(st.sum[2 * m + 1])));
}

/* Tile number `tile` of sequences with `least` rows or more; rows 0 where there are fewer. A whole
 * warp. */
static __device__ __forceinline__ void prefill_find(const gpu_attention &a, int least,
                                                    int tile_rows, int tile, prefill_tile *t)
{
    const int lane_id = (int)threadIdx.x % 32, G = a.H / a.kv.Hk;
    int index = tile / a.kv.Hk;
    t->rows = 0;
    for (int s0 = 0; s0 < a.seqs.n; s0 += 32) {
        const int s = s0 + lane_id, len = s < a.seqs.n ? a.seqs.kv_len[s] : 0;
        const int new_rows = len > 0 ? a.seqs.n_rows[s] : 0;
        const int rows = new_rows >= least ? new_rows * G : 0;
        const int n = (rows + tile_rows - 1) / tile_rows;
        int end = n;
        for (int i = 1; i < 32; i *= 2) {
            const int before = __shfl_up_sync(~0u, end, i);
            if (lane_id >= i) end += before;
        }
        if (index >= end - n && index < end) {
            t->seq = s, t->G = G, t->hk = tile % a.kv.Hk;
            t->row0 = a.seqs.row0[s], t->pos0 = len - rows / G;
            t->first_row = (end - 1 - index) * tile_rows; /* last tile first */
            t->rows = rows;
            const int lo = a.window > 0 ? max(0, prefill_pos(*t, 0) - a.window + 1) : 0;
            t->first_page = lo / KV_PLACE_TOKENS;
            t->end_page = prefill_pos(*t, tile_rows - 1) / KV_PLACE_TOKENS + 1;
            t->stored_from = t->first_page * KV_PLACE_TOKENS;
            t->stored_to = min(len, t->end_page * KV_PLACE_TOKENS);
        }
        const int all = __shfl_sync(~0u, end, 31);
        if (index < all) return;
        index -= all;
    }
}

/* q of the lane's rows into its places; rows beyond the sequence are zero. */
template <class V, int D, int M>
static __device__ __forceinline__ void prefill_q(const gpu_attention &a, const prefill_tile &t,
                                                 uint32_t q)
{
    const int lane_id = (int)threadIdx.x % 32, c = lane_id % 4, warp_row = prefill_warp_row<M>();
    const uint32_t at = prefill_q_at<D, M>(q);
#pragma unroll
    for (int m = 0; m < M; m++) {
        int64_t from[2];
        bool live[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = t.first_row + warp_row + 16 * m + lane_id / 4 + 8 * h;
            live[h] = row < t.rows;
            from[h] = (int64_t)(t.row0 + row / t.G) * a.ldq + (int64_t)(t.hk * t.G + row % t.G) * D;
        }
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            uint32_t x[2][4] = {};
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (live[h]) attn_q<V>(a.q, from[h] + 32 * i + 8 * c, x[h]);
            const uint32_t to = at + (uint32_t)((m * (D / 32) + i) * 2 * 512);
            ptx_sts128(to, make_uint4(x[0][0], x[1][0], x[0][1], x[1][1]));
            ptx_sts128(to + 512, make_uint4(x[0][2], x[1][2], x[0][3], x[1][3]));
        }
    }
}

/* S = q K^T of 64 keys. */
template <class V, int D, int M>
static __device__ __forceinline__ void prefill_scores(uint32_t q, uint32_t keys,
                                                      float s[M][PREFILL_KEYS / 8][4])
{
    constexpr uint32_t page = 2 * KV_PLACE_TOKENS * D * V::bytes;
    const int r = (int)ptx_thread() % 32 / 4, c = (int)ptx_thread() % 4;
    q = prefill_q_at<D, M>(q);
    const uint32_t first = keys + (uint32_t)(r * D + (c ^ kv_turn(V::bytes, D, r)) * 8) * V::bytes;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int j = 0; j < PREFILL_KEYS / 8; j++)
            s[m][j][0] = s[m][j][1] = s[m][j][2] = s[m][j][3] = 0;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        if (i) __syncwarp(); /* loads ahead of here would cost registers that there are not */
        uint32_t qa[M][2][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint4 x = ptx_lds128(q + (uint32_t)((m * (D / 32) + i) * 2 + h) * 512);
                qa[m][h][0] = x.x, qa[m][h][1] = x.y, qa[m][h][2] = x.z, qa[m][h][3] = x.w;
            }
        /* Rows start at multiples of their size where they are turned: ^ is what kv_turn says. */
        const uint32_t row = D % 64 ? first + 32 * i * V::bytes : first ^ 32 * i * V::bytes;
#pragma unroll
        for (int j = 0; j < PREFILL_KEYS / 8; j++) {
            uint32_t b[4];
            V::take(row + j / 4 * page + (uint32_t)(j % 4 * 8 * D * V::bytes), b);
#pragma unroll
            for (int m = 0; m < M; m++)
                V::mma(s[m][j], qa[m][0], b[0], b[1]);
#pragma unroll
            for (int m = 0; m < M; m++)
                V::mma(s[m][j], qa[m][1], b[2], b[3]);
        }
    }
}

/* Scores of keys that a row does not see become -inf; key0: the first of the stage. */
template <int M>
static __device__ __forceinline__ void prefill_mask(const prefill_tile &t, int key0, int window,
                                                    float s[M][PREFILL_KEYS / 8][4])
{
    const int warp_row = prefill_warp_row<M>(), first = key0 + (int)ptx_thread() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        const int row = warp_row + 16 * (i / 2) + (int)ptx_thread() % 32 / 4 + 8 * (i % 2);
        const int pos = prefill_pos(t, row), from = window > 0 ? pos - window : -1;
#pragma unroll
        for (int j = 0; j < PREFILL_KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int key = first + 8 * j + e;
                if (key > pos || key <= from) s[i / 2][j][i % 2 * 2 + e] = -INFINITY;
            }
    }
}

/* Scores become probabilities, summed up; O follows the maximum. */
template <int D, int M>
static __device__ __forceinline__ void prefill_softmax(prefill_state<D, M> &st, float by,
                                                       float s[M][PREFILL_KEYS / 8][4])
{
    float max[2 * M];
    bool behind = false;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        float v = -INFINITY;
#pragma unroll
        for (int j = 0; j < PREFILL_KEYS / 8; j++)
            v = fmaxf(v, fmaxf(s[i / 2][j][i % 2 * 2], s[i / 2][j][i % 2 * 2 + 1]));
        v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
        v = fmaxf(v, __shfl_xor_sync(~0u, v, 2));
        const bool far = (v - st.max[i]) * by > PREFILL_BEHIND;
        max[i] = far ? v : st.max[i];
        behind |= far;
    }
    if (__any_sync(~0u, behind)) {
#pragma unroll
        for (int i = 0; i < 2 * M; i++) {
            const float f = max[i] == st.max[i] ? 1.0f : ptx_exp2((st.max[i] - max[i]) * by);
            st.max[i] = max[i];
            st.sum[i] *= f;
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                st.o[i / 2][n][i % 2 * 2] *= f, st.o[i / 2][n][i % 2 * 2 + 1] *= f;
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        const float from = st.max[i] == -INFINITY ? 0.0f : -st.max[i] * by;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < PREFILL_KEYS / 8; j++)
#pragma unroll
            for (int e = i % 2 * 2; e < i % 2 * 2 + 2; e++) {
                s[i / 2][j][e] = ptx_exp2(fmaf(s[i / 2][j][e], by, from));
                sum += s[i / 2][j][e];
            }
        st.sum[i] += sum; /* of this lane's keys */
    }
}

/* O += P V. */
template <class V, int D, int M>
static __device__ __forceinline__ void prefill_values(prefill_state<D, M> &st, uint32_t keys,
                                                      const float s[M][PREFILL_KEYS / 8][4])
{
    constexpr uint32_t page = 2 * KV_PLACE_TOKENS * D * V::bytes;
    const uint32_t row = keys + page / 2 + (uint32_t)(ptx_thread() % 32 * 8) * V::bytes;
    uint32_t p[M][PREFILL_KEYS / 16][4];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int k = 0; k < PREFILL_KEYS / 16; k++) {
            p[m][k][0] = V::pack(s[m][2 * k][0], s[m][2 * k][1]);
            p[m][k][1] = V::pack(s[m][2 * k][2], s[m][2 * k][3]);
            p[m][k][2] = V::pack(s[m][2 * k + 1][0], s[m][2 * k + 1][1]);
            p[m][k][3] = V::pack(s[m][2 * k + 1][2], s[m][2 * k + 1][3]);
        }
#pragma unroll
    for (int g = 0; g < PREFILL_KEYS / KV_PLACE_TOKENS; g++)
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            uint32_t b[4];
            V::take(row + g * page + (uint32_t)(n * 8 * KV_PLACE_TOKENS * V::bytes), b);
#pragma unroll
            for (int m = 0; m < M; m++)
                V::mma(st.o[m][n], p[m][2 * g], b[0], b[1]);
#pragma unroll
            for (int m = 0; m < M; m++)
                V::mma(st.o[m][n], p[m][2 * g + 1], b[2], b[3]);
        }
}

/* Values of keys outside [from, to), which nobody has stored, may be anything, NaN too: zero.
 * first: the first key of the stage. Whole blocks. */
template <class V, int D>
static __device__ __forceinline__ void prefill_clear(unsigned char *stage, int first, int from,
                                                     int to)
{
    constexpr int page = 2 * KV_PLACE_TOKENS * D * V::bytes;
#pragma unroll 1 /* rare */
    for (int i = (int)ptx_thread(); i < D * PREFILL_KEYS; i += (int)blockDim.x) {
        const int t = i % PREFILL_KEYS, d = i / PREFILL_KEYS;
        if (first + t >= from && first + t < to) continue;
        unsigned char *at = stage + t / KV_PLACE_TOKENS * page +
                            kv_place(V::bytes, D, 1, t % KV_PLACE_TOKENS, d) * (size_t)V::bytes;
        for (int b = 0; b < V::bytes; b++)
            at[b] = 0;
    }
    ptx_proxy_fence();
}

template <class V, int D, int M>
static __device__ __forceinline__ void prefill_out(const gpu_attention &a, const prefill_tile &t,
                                                   float by, prefill_state<D, M> &st)
{
    const int lane_id = (int)ptx_thread() % 32, warp_row = prefill_warp_row<M>();
    const float v_scale = a.kv.v_scale ? a.kv.v_scale[t.hk] : 1.0f;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        float sum = st.sum[i];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int row = t.first_row + warp_row + 16 * (i / 2) + lane_id / 4 + 8 * (i % 2);
        if (row >= t.rows) continue;
        const int head = t.hk * t.G + row % t.G;
        const float f = attn_finish(a, head, st.max[i] * by, sum, v_scale);
        const int64_t to =
            (int64_t)(t.row0 + row / t.G) * a.ldo + (int64_t)head * D + lane_id % 4 * 2;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            const float x = st.o[i / 2][n][i % 2 * 2] * f, y = st.o[i / 2][n][i % 2 * 2 + 1] * f;
            if (a.out.type == GPU_F32)
                *(float2 *)((float *)a.out.p + to + 8 * n) = make_float2(x, y);
            else
                *(uint32_t *)((uint16_t *)a.out.p + to + 8 * n) = ptx_pack_bf16(x, y);
        }
    }
}

/* Rows of no sequence: the last block of the grid, which has no tile. */
template <int D> static __device__ __forceinline__ void prefill_nobody(const gpu_attention &a)
{
    if (blockIdx.x + 1 < gridDim.x) return;
    for (int64_t t = 0; t < a.seqs.T; t++)
        for (int i = (int)threadIdx.x; a.seqs.row_seq[t] < 0 && i < a.H * D; i += (int)blockDim.x)
            put_lane(a.out, t * a.ldo + i, 0.0f);
}

/* CAP: with a softcap. */
template <class V, int D, int M, int WARPS, int BLOCKS, bool CAP>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    prefill_kernel(const gpu_attention a, int least)
{
    typedef prefill_shape<V, D, M, WARPS> S;
    SMEM(unsigned char, smem);
    __shared__ prefill_tile t; /* looked up there in each round: registers are scarce */
    if (threadIdx.x < 32) prefill_find(a, least, S::rows, (int)blockIdx.x, &t);
    __syncthreads();
    if (!t.rows) {
        prefill_nobody<D>(a);
        return;
    }
    const uint32_t ring = ptx_smem(smem) + S::q, bars = ptx_smem(smem) + S::bars,
                   pages = ptx_smem(smem) + S::pages;
    volatile int32_t *page = (volatile int32_t *)(smem + S::pages);
    /* Thread 0 keeps the ring filled; it looks up the pages of a copy one round before. */
    auto look_up = [&](int tile) {
        const int32_t *table = a.seqs.pages + (int64_t)t.seq * a.seqs.max_pages;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (2 * tile + i >= t.first_page && 2 * tile + i < t.end_page)
                ptx_copy4(pages + i * 4, table + 2 * tile + i);
            else
                page[i] = -1;
    };
    auto ask = [&](int stage) {
        const uint32_t bar = bars + stage * 8;
        const uint8_t *head = a.kv.base + (size_t)t.hk * S::page;
        ptx_copy_wait_all();
        ptx_mbar_expect(bar, (uint32_t)((page[0] >= 0) + (page[1] >= 0)) * S::page);
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (page[i] >= 0)
                ptx_bulk_load(ring + stage * S::stage + i * S::page,
                              head + (size_t)page[i] * a.kv.page_stride, S::page, bar);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < PREFILL_STAGES; i++)
            ptx_mbar_init(bars + i * 8, 1);
        ptx_mbar_fence();
        for (int i = 0; i < PREFILL_STAGES; i++) {
            look_up(t.first_page / 2 + i);
            ask(i);
        }
        look_up(t.first_page / 2 + PREFILL_STAGES);
    }
    prefill_q<V, D, M>(a, t, ptx_smem(smem));
    prefill_state<D, M> st;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        st.max[i] = -INFINITY, st.sum[i] = 0;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            st.o[i / 2][n][i % 2 * 2] = st.o[i / 2][n][i % 2 * 2 + 1] = 0;
    }
    prefill_leave<D, M>(st, ptx_smem(smem) + S::sums);
    const attn_scale scale = attn_scale_of(a, t.hk);
    const float by = CAP ? 1.0f : scale.by;
    if (threadIdx.x % 32 == 0) {
        t.low[threadIdx.x / 32] = prefill_pos(t, prefill_warp_row<M>());
        t.high[threadIdx.x / 32] = prefill_pos(t, prefill_warp_row<M>() + 16 * M - 1);
    }
    __syncthreads();

    for (int k = 0; 2 * (k + t.first_page / 2) < t.end_page; k++) {
        const int key = (k + t.first_page / 2) * PREFILL_KEYS, stage = k % PREFILL_STAGES;
        const uint32_t keys = ring + stage * S::stage;
        ptx_mbar_wait(bars + stage * 8, k / PREFILL_STAGES % 2);
        if (key < t.stored_from || key + PREFILL_KEYS > t.stored_to) {
            prefill_clear<V, D>(smem + S::q + stage * S::stage, key, t.stored_from, t.stored_to);
            __syncthreads();
        }
        const int low = t.low[ptx_thread() / 32], high = t.high[ptx_thread() / 32];
        if (key <= high && (a.window <= 0 || key + PREFILL_KEYS - 1 > low - a.window)) {
            float s[M][PREFILL_KEYS / 8][4];
            prefill_scores<V, D, M>(ptx_smem(smem), keys, s);
            if (CAP) {
#pragma unroll
                for (int i = 0; i < M * PREFILL_KEYS / 2; i++) {
                    float *x = &s[i / (PREFILL_KEYS / 2)][i / 4 % (PREFILL_KEYS / 8)][i % 4];
                    *x = attn_capped(*x, scale);
                }
            }
            if (key + PREFILL_KEYS - 1 > low || (a.window > 0 && key <= high - a.window))
                prefill_mask<M>(t, key, a.window, s);
            prefill_take<D, M>(st, ptx_smem(smem) + S::sums);
            prefill_softmax<D, M>(st, by, s);
            prefill_leave<D, M>(st, ptx_smem(smem) + S::sums);
            prefill_values<V, D, M>(st, keys, s);
        }
        __syncthreads(); /* everybody is done with the stage */
        if (threadIdx.x == 0) {
            ask(stage);
            look_up(k + t.first_page / 2 + PREFILL_STAGES + 1);
        }
    }
    prefill_take<D, M>(st, ptx_smem(smem) + S::sums);
    prefill_out<V, D, M>(a, t, by, st);
}
#endif
