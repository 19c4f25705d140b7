/* Attention of one new token a sequence over a paged cache: reading the cache is all there is to
 * it, so it is a stream like small.cuh. A block has a KV head of a sequence and a run of its pages;
 * each warp takes page after page of the run through a ring of its own, filled by bulk copies, and
 * keeps a softmax of its own; the warps are merged in shared memory. Few runs are the blocks of a
 * cluster and are merged through each other's shared memory; many are merged by the block that
 * finishes last. Both add up in the order of the runs: results do not depend on timing.
 *
 * A page holds 32 tokens of a head: K [32 tokens][D] row by row, then V transposed, [D][32 tokens],
 * so that both are the 16-row operand of the tensor cores as they lie (S = K q: rows are tokens;
 * O = V^T p: rows are lanes of the head), with the query heads of the group as the 8 columns.
 *
 *   K  lane l has tokens l/4 and l/4+8 of 16, of them columns 32i + 8(l%4) .. +7 (16 bytes of bf16,
 *      8 of fp8): any order of columns will do, q is taken in the same
 *   V  lane l has row l/4 and of it the eight tokens at 8(l%4), which is where kv_place puts what a
 *      lane multiplies
 *
 * fp8: codes become bf16 by shifting, 2^120 too small; for K the factor is in q's scale, for V in
 * that of the output. */
#ifndef KERN_CUDA_DECODE_CUH
#define KERN_CUDA_DECODE_CUH
#include "kern/cuda/kv_place.h"
#include "kern/cuda/ptx.cuh"

#define DECODE_PAGE KV_PLACE_TOKENS

struct decode_args {
    const uint8_t *cache; /* page p of head h at cache + p*page_stride + h*head_bytes */
    int64_t page_stride, head_bytes;
    const __nv_bfloat16 *q; /* [B, H, D] */
    float *out;             /* [B, H, D] */
    const int *pages;       /* [B, max_pages] */
    const int *lens;        /* [B] tokens in the cache */
    float *part;            /* [B, Hk, runs, G, D + 2] */
    unsigned *done;         /* [B, Hk], zero before and after */
    int B, Hk, G, runs, max_pages;
    float out_scale; /* v_scale */
};

struct kv_bf16 {
    static constexpr int bytes = 2;
    static constexpr float k_up = 1.0f, v_up = 1.0f;
    /* Two k16 steps of A from 8 values of row r and 8 of row r+8. */
    static __device__ __forceinline__ void take(uint32_t r0, uint32_t r8, uint32_t a[2][4])
    {
        uint4 x = ptx_lds128(r0), y = ptx_lds128(r8);
        a[0][0] = x.x, a[0][2] = x.y, a[1][0] = x.z, a[1][2] = x.w;
        a[0][1] = y.x, a[0][3] = y.y, a[1][1] = y.z, a[1][3] = y.w;
    }
};
struct kv_e4m3 {
    static constexpr int bytes = 1;
    static constexpr float k_up = 1.329227995784916e36f, v_up = 1.329227995784916e36f; /* 2^120 */
    static __device__ __forceinline__ uint32_t low(uint32_t w) /* bytes 0, 1 */
    {
        uint32_t p = __byte_perm(w, 0, 0x4140);
        return ((p << 4) & 0x07f007f0u) | ((p << 8) & 0x80008000u);
    }
    static __device__ __forceinline__ uint32_t high(uint32_t w)
    {
        uint32_t p = __byte_perm(w, 0, 0x4342);
        return ((p << 4) & 0x07f007f0u) | ((p << 8) & 0x80008000u);
    }
    static __device__ __forceinline__ void take(uint32_t r0, uint32_t r8, uint32_t a[2][4])
    {
        uint2 x = ptx_lds64(r0), y = ptx_lds64(r8);
        a[0][0] = low(x.x), a[0][2] = high(x.x), a[1][0] = low(x.y), a[1][2] = high(x.y);
        a[0][1] = low(y.x), a[0][3] = high(y.x), a[1][1] = low(y.y), a[1][3] = high(y.y);
    }
};

template <class V, int D, int WARPS, int STAGES> struct decode_shape {
    static constexpr int plane = DECODE_PAGE * D * V::bytes, page = 2 * plane;
    static constexpr int threads = WARPS * 32;
    static constexpr size_t ring = (size_t)WARPS * STAGES * page;
    static constexpr size_t merge = (size_t)(WARPS + 1) * 8 * (D + 6) * 4;
    static constexpr size_t body = ring > merge ? ring : merge;
    static constexpr size_t smem = body + WARPS * STAGES * 8;
};

/* Running softmax of a warp: maximum and sum of queries 2(l%4), +1; O rows l/4 (+8) of D/16 tiles.
 */
template <int D> struct decode_state {
    float max[2], sum[2], o[D / 16][4];
};

template <class V, int D>
static __device__ __forceinline__ void decode_page(uint32_t at, int lane, int valid,
                                                   const uint32_t q[D / 32][4], decode_state<D> &st)
{
    const int r = lane / 4, c = lane % 4;
    float s[2][4];
#pragma unroll
    for (int t = 0; t < 2; t++) { /* 16 tokens each */
        s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0;
        uint32_t row = at + (uint32_t)((t * 16 + r) * D) * V::bytes;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            uint32_t a[2][4],
                k = row + (uint32_t)(((4 * i + c) ^ kv_turn(V::bytes, D, r)) * 8) * V::bytes;
            V::take(k, k + 8 * D * V::bytes, a);
            ptx_mma_bf16(s[t], a[0], q[i][0], q[i][1]);
            ptx_mma_bf16(s[t], a[1], q[i][2], q[i][3]);
        }
        if (t * 16 + r >= valid) s[t][0] = s[t][1] = -INFINITY;
        if (t * 16 + r + 8 >= valid) s[t][2] = s[t][3] = -INFINITY;
    }
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float m = fmaxf(fmaxf(s[0][h], s[0][h + 2]), fmaxf(s[1][h], s[1][h + 2]));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
        m = fmaxf(m, st.max[h]);
        scale[h] = exp2f(st.max[h] - m);
        st.max[h] = m;
        float sum = 0;
#pragma unroll
        for (int t = 0; t < 2; t++) {
            s[t][h] = exp2f(s[t][h] - m);
            s[t][h + 2] = exp2f(s[t][h + 2] - m);
            sum += s[t][h] + s[t][h + 2];
        }
        st.sum[h] = st.sum[h] * scale[h] + sum; /* of this lane's tokens */
    }
    uint32_t p[2][2]; /* tokens in pairs, queries in rows: what B needs */
#pragma unroll
    for (int t = 0; t < 2; t++) {
        p[t][0] = ptx_transpose(ptx_pack_bf16(s[t][0], s[t][1]));
        p[t][1] = ptx_transpose(ptx_pack_bf16(s[t][2], s[t][3]));
    }
    const bool grew = scale[0] != 1.0f || scale[1] != 1.0f;
    uint32_t row = at + (uint32_t)(DECODE_PAGE * D + r * DECODE_PAGE + c * 8) * V::bytes;
    const bool any = __any_sync(~0u, grew);
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        uint32_t a[2][4];
        if (any) {
            st.o[i][0] *= scale[0], st.o[i][1] *= scale[1];
            st.o[i][2] *= scale[0], st.o[i][3] *= scale[1];
        }
        V::take(row + i * 16 * DECODE_PAGE * V::bytes, row + (i * 16 + 8) * DECODE_PAGE * V::bytes,
                a);
        ptx_mma_bf16(st.o[i], a[0], p[0][0], p[0][1]);
        ptx_mma_bf16(st.o[i], a[1], p[1][0], p[1][1]);
    }
}

/* Merges the warps of a block into to[G][D + 2]: sums not yet divided, then maximum and sum; or,
 * when there is nothing else to add (last), into the output [G][D]. */
template <int D, int WARPS>
static __device__ __forceinline__ void decode_merge(decode_state<D> &st, float *smem, int warp,
                                                    int lane, int G, float *to, bool last, float up)
{
    const int r = lane / 4, c = lane % 4;
    float *maxs = smem, *sums = smem + WARPS * 8, *os = sums + WARPS * 8; /* [WARPS][8][D + 4] */
#pragma unroll
    for (int h = 0; h < 2; h++) {
        st.sum[h] += __shfl_xor_sync(~0u, st.sum[h], 4);
        st.sum[h] += __shfl_xor_sync(~0u, st.sum[h], 8);
        st.sum[h] += __shfl_xor_sync(~0u, st.sum[h], 16);
        if (r == 0) maxs[warp * 8 + 2 * c + h] = st.max[h], sums[warp * 8 + 2 * c + h] = st.sum[h];
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            float *o = os + (warp * 8 + 2 * c + h) * (D + 4) + i * 16 + r;
            o[0] = st.o[i][h];
            o[8] = st.o[i][h + 2];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < G * D; i += WARPS * 32) {
        int g = i / D, d = i % D;
        float m = -INFINITY, sum = 0, o = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            m = fmaxf(m, maxs[w * 8 + g]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float f = m == -INFINITY ? 0 : exp2f(maxs[w * 8 + g] - m);
            sum += f * sums[w * 8 + g];
            o += f * os[(w * 8 + g) * (D + 4) + d];
        }
        if (last) {
            to[(int64_t)g * D + d] = sum > 0 ? o * up / sum : 0;
        } else {
            float *p = to + g * (D + 2);
            p[d] = o;
            if (d == 0) p[D] = m, p[D + 1] = sum;
        }
    }
}

/* The runs of a head, added up in their order. Every load that a thread needs is on its way before
 * the first is used: the block is alone and has nothing to do but wait. */
template <class V, int D, int WARPS>
static __device__ __forceinline__ void decode_runs(const decode_args &p, float *smem, int64_t head)
{
    constexpr int ahead = 16;
    const float *all = p.part + head * p.runs * p.G * (D + 2);
    const int rows = p.runs * p.G;
    float *maxs = smem, *sums = smem + rows, o[ahead]; /* [runs][G] */
    auto take = [&](int i, int first) {                /* output i of the next runs */
#pragma unroll
                                        for (int k = 0; k < ahead; k++)
                                            if (i < p.G * D && first + k < p.runs)
                                                o[k] = __ldcg(all +
                                                              ((int64_t)(first + k) * p.G + i / D) *
                                                                  (D + 2) +
                                                              i % D);
    };
    take(threadIdx.x, 0);
    for (int i = threadIdx.x; i < rows; i += WARPS * 32) {
        maxs[i] = __ldcg(all + (int64_t)i * (D + 2) + D);
        sums[i] = __ldcg(all + (int64_t)i * (D + 2) + D + 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.G * D; i += WARPS * 32) {
        float m = -INFINITY, sum = 0, total = 0;
        for (int k = 0; k < p.runs; k++)
            m = fmaxf(m, maxs[k * p.G + i / D]);
        for (int first = 0; first < p.runs; first += ahead) {
#pragma unroll
            for (int k = 0; k < ahead; k++) {
                if (first + k >= p.runs) break;
                const int row = (first + k) * p.G + i / D;
                const float f = exp2f(maxs[row] - m);
                sum += f * sums[row];
                total += f * o[k];
            }
            take(i, first + ahead);
        }
        p.out[head * p.G * D + i] = sum > 0 ? total * p.out_scale * V::v_up / sum : 0;
        take(i + WARPS * 32, 0);
    }
}

/* The blocks of a cluster, each with a share of the lanes; mine: this block's merged [G][D + 2]. */
template <class V, int D, int WARPS, int CLUSTER>
static __device__ __forceinline__ void decode_cluster(const decode_args &p, const float *mine,
                                                      uint32_t rank, int64_t head)
{
    ptx_cluster_arrive();
    ptx_cluster_wait();
    const int share = (p.G * D + CLUSTER - 1) / CLUSTER, first = (int)rank * share;
    const int end = first + share < p.G * D ? first + share : p.G * D;
    for (int i = first + threadIdx.x; i < end; i += WARPS * 32) {
        const uint32_t row = ptx_smem(mine + i / D * (D + 2));
        float max[CLUSTER], m = -INFINITY, sum = 0, o = 0;
#pragma unroll
        for (int k = 0; k < CLUSTER; k++) {
            max[k] = ptx_get_f32(row + D * 4, k);
            m = fmaxf(m, max[k]);
        }
#pragma unroll
        for (int k = 0; k < CLUSTER; k++) {
            float f = exp2f(max[k] - m);
            sum += f * ptx_get_f32(row + (D + 1) * 4, k);
            o += f * ptx_get_f32(row + i % D * 4, k);
        }
        p.out[head * p.G * D + i] = sum > 0 ? o * p.out_scale * V::v_up / sum : 0;
    }
    ptx_cluster_arrive(); /* nobody leaves while others read */
    ptx_cluster_wait();
}

/* CLUSTER: runs that are the blocks of a cluster, all of them; 1 = runs merge through p.part. */
template <class V, int D, int WARPS, int STAGES, int CLUSTER>
__global__ void __launch_bounds__(WARPS * 32) decode_kernel(const decode_args p)
{
    extern __shared__ __align__(128) uint8_t smem[];
    typedef decode_shape<V, D, WARPS, STAGES> S;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int run = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const uint32_t ring = ptx_smem(smem) + (uint32_t)(warp * STAGES * S::page),
                   bar = ptx_smem(smem + S::body) + (uint32_t)(warp * STAGES * 8);
    const int len = p.lens[b], n_pages = (len + DECODE_PAGE - 1) / DECODE_PAGE;
    const int per = (n_pages + p.runs - 1) / p.runs, first = run * per;
    const int end = first + per < n_pages ? first + per : n_pages;
    const int *table = p.pages + (int64_t)b * p.max_pages;
    if (lane == 0) {
        for (int i = 0; i < STAGES; i++)
            ptx_mbar_init(bar + i * 8, 1);
        ptx_mbar_fence();
    }
    __syncwarp();
    auto ask = [&](int page, int stage) {
        if (page >= end || lane) return;
        ptx_mbar_expect(bar + stage * 8, S::page);
        ptx_bulk_load(ring + stage * S::page,
                      p.cache + table[page] * p.page_stride + h * p.head_bytes, S::page,
                      bar + stage * 8);
    };
    /* The kernel before has stored the new token: only its page, the last, has to wait for it. */
    const int mine = first + warp;
    for (int i = 0; i < STAGES; i++)
        if (mine + i * WARPS != n_pages - 1) ask(mine + i * WARPS, i);
    ptx_pdl_wait();
    ptx_pdl_go();
    for (int i = 0; i < STAGES; i++)
        if (mine + i * WARPS == n_pages - 1) ask(mine + i * WARPS, i);

    /* q of the group, scaled: query l/4, columns as K has them. */
    uint32_t q[D / 32][4];
    const bool live = lane / 4 < p.G;
    const __nv_bfloat16 *row =
        p.q + (((int64_t)b * p.Hk + h) * p.G + (live ? lane / 4 : 0)) * D + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        uint4 v = live ? *(const uint4 *)(row + i * 32) : make_uint4(0, 0, 0, 0);
        q[i][0] = v.x, q[i][1] = v.y, q[i][2] = v.z, q[i][3] = v.w;
    }
    decode_state<D> st;
    st.max[0] = st.max[1] = -INFINITY;
    st.sum[0] = st.sum[1] = 0;
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        st.o[i][0] = st.o[i][1] = st.o[i][2] = st.o[i][3] = 0;

    int stage = 0, parity = 0;
    for (int page = mine; page < end; page += WARPS) {
        ptx_mbar_wait(bar + stage * 8, parity);
        decode_page<V, D>(ring + stage * S::page, lane, len - page * DECODE_PAGE, q, st);
        __syncwarp();
        ask(page + STAGES * WARPS, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __syncthreads(); /* the ring becomes the place of the merge */
    const int64_t head = (int64_t)b * p.Hk + h;
    const float up = p.out_scale * V::v_up;
    float *place = (float *)smem, *merged = place + WARPS * 8 * (D + 6);
    if (CLUSTER > 1) {
        decode_merge<D, WARPS>(st, place, warp, lane, p.G, merged, false, up);
        decode_cluster<V, D, WARPS, CLUSTER>(p, merged, (uint32_t)run, head);
        return;
    }
    if (p.runs == 1) {
        decode_merge<D, WARPS>(st, place, warp, lane, p.G, p.out + head * p.G * D, true, up);
        return;
    }
    decode_merge<D, WARPS>(st, place, warp, lane, p.G,
                           p.part + (head * p.runs + run) * p.G * (D + 2), false, up);
    /* The last block of the head adds up the runs. */
    __shared__ unsigned ticket;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        ticket = atomicAdd(p.done + head, 1u);
        if (ticket == (unsigned)p.runs - 1) p.done[head] = 0;
    }
    __syncthreads();
    if (ticket != (unsigned)p.runs - 1) return;
    __threadfence();
    decode_runs<V, D, WARPS>(p, place, head);
}
#endif
