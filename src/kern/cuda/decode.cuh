/* Attention of one new token a sequence over a paged cache: reading the cache is all there is to
 * it, so it is a stream like small.cuh. A block has a KV head of a sequence (eight of its query
 * heads at most) and a run of its pages; each warp takes page after page of the run through a ring
 * of its own, filled by bulk copies, and keeps a softmax of its own; the warps are merged in shared
 * memory. Few runs are the blocks of a cluster and are merged through each other's shared memory;
 * many are merged by the block that finishes last. Both add up in the order of the runs: results do
 * not depend on timing.
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
 * Lengths, rows and pages are read on the device. Sequences of another number of rows than one are
 * left alone, rows of no sequence become zero. */
#ifndef KERN_CUDA_DECODE_CUH
#define KERN_CUDA_DECODE_CUH
#include "kern/cuda/decode_page.cuh"

struct decode_args {
    gpu_attention a;
    float *part;           /* [T, Hk, sets, runs, heads, D + 2]: sums, maximum, total */
    unsigned *done;        /* [T, Hk, sets], zero before and after */
    float *shared;         /* [n, H, shared_runs, D + 2] of pages that sequences share */
    int runs, shared_runs; /* 0: all pages are a sequence's own */
    int sets, heads;       /* blocks that share a KV head; query heads of each but the last */
};

template <class V, int D, int WARPS, int STAGES> struct decode_shape {
    static constexpr int page = decode_head<V>(D);
    static constexpr int threads = WARPS * 32;
    static constexpr int ring_at = 128; /* behind the barriers */
    static_assert(WARPS * STAGES * 8 <= ring_at, "barriers");
    static constexpr size_t merge = (size_t)(WARPS + 1) * DECODE_HEADS * (D + 6) * 4;
    /* Shared memory of blocks of at most so many pages: warps without a page need no ring. What is
     * not taken is there for the ring of the product that follows. */
    static size_t smem(int pages)
    {
        const size_t ring = (size_t)(pages < WARPS ? pages : WARPS) * STAGES * page;
        return ring_at + (ring > merge ? ring : merge);
    }
};

/* What a block works on. */
struct decode_task {
    int hk, head0, heads;      /* KV head; query heads */
    int64_t row, place;        /* row of the step; of [T, Hk, sets] */
    int lo, len;               /* keys [lo, len) are seen */
    int first, end, last_page; /* pages of the run; the sequence's last */
    float v_scale;
    int64_t shared; /* row of p.shared of head 0; -1: all pages are read here */
    bool nobody;    /* there may be rows of no sequence for this block */
};

/* Lane d of query head g of the block: o counts from max (in powers of two), as sum does. */
template <int D>
static __device__ __forceinline__ void decode_put(const decode_args &p, const decode_task &k, int g,
                                                  int d, float max, float sum, float o)
{
    if (k.shared >= 0) { /* what the pages before have, in their order */
        const float *part = p.shared + (k.shared + k.head0 + g) * p.shared_runs * (int64_t)(D + 2);
        float most = max;
        for (int i = 0; i < p.shared_runs; i++)
            most = fmaxf(most, __ldcg(part + i * (D + 2) + D));
        const float own = ptx_exp2(max - most);
        sum *= own, o *= own, max = most;
        for (int i = 0; i < p.shared_runs; i++, part += D + 2) {
            const float f = ptx_exp2(__ldcg(part + D) - most);
            sum += f * __ldcg(part + D + 1);
            o += f * __ldcg(part + d);
        }
    }
    const float f = attn_finish(p.a, k.head0 + g, max, sum, k.v_scale);
    put_lane(p.a.out, k.row * p.a.ldo + (int64_t)(k.head0 + g) * D + d, o * f);
}

/* Merges the warps of a block into to[heads][D + 2] (sums, then maximum and total), or, when there
 * is nothing else to add (to NULL), into the output. by: of the maxima. */
template <class V, int D, int WARPS>
static __device__ __forceinline__ void decode_merge(const decode_args &p, const decode_task &k,
                                                    decode_state<D> &st, float by, float *smem,
                                                    float *to)
{
    const int warp = (int)threadIdx.x / 32, r = (int)threadIdx.x % 32 / 4, c = (int)threadIdx.x % 4;
    float *maxs = smem, *sums = smem + WARPS * 8, *os = sums + WARPS * 8; /* [WARPS][8][D + 4] */
#pragma unroll
    for (int h = 0; h < 2; h++) {
        st.sum[h] += __shfl_xor_sync(~0u, st.sum[h], 4);
        st.sum[h] += __shfl_xor_sync(~0u, st.sum[h], 8);
        st.sum[h] += __shfl_xor_sync(~0u, st.sum[h], 16);
        if constexpr (decode_is<V>::int8) {
            st.rest[h] += __shfl_xor_sync(~0u, st.rest[h], 4);
            st.rest[h] += __shfl_xor_sync(~0u, st.rest[h], 8);
            st.rest[h] += __shfl_xor_sync(~0u, st.rest[h], 16);
        }
        if (r == 0) {
            maxs[warp * 8 + 2 * c + h] = st.max[h] * by;
            sums[warp * 8 + 2 * c + h] = st.sum[h];
        }
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            float *o = os + (warp * 8 + 2 * c + h) * (D + 4) + i * 16 + r;
            const float rest = decode_is<V>::int8 ? st.rest[h] : 0.0f;
            o[0] = st.o[i][h] + rest;
            o[8] = st.o[i][h + 2] + rest;
        }
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < k.heads * D; i += WARPS * 32) {
        const int g = i / D, d = i % D;
        float m = -INFINITY, sum = 0, o = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            m = fmaxf(m, maxs[w * 8 + g]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float f = m == -INFINITY ? 0.0f : ptx_exp2(maxs[w * 8 + g] - m);
            sum += f * sums[w * 8 + g];
            o += f * os[(w * 8 + g) * (D + 4) + d];
        }
        if (!to) {
            decode_put<D>(p, k, g, d, m, sum, o);
            continue;
        }
        float *row = to + g * (D + 2);
        row[d] = o;
        if (d == 0) row[D] = m, row[D + 1] = sum;
    }
}

/* The runs of a head, added up in their order. Every load that a thread needs is on its way before
 * the first is used: the block is alone and has nothing to do but wait. */
template <int D, int WARPS>
static __device__ __forceinline__ void decode_runs(const decode_args &p, const decode_task &k,
                                                   float *smem)
{
    constexpr int ahead = 16;
    const int rows = p.runs * p.heads, n = k.heads * D;
    const float *all = p.part + k.place * rows * (D + 2);
    float *maxs = smem, *sums = smem + rows, o[ahead]; /* [runs][heads] */
    auto take = [&](int i,
                    int first) { /* output i of the next runs */
#pragma unroll
                                 for (int j = 0; j < ahead; j++)
                                     if (i < n && first + j < p.runs)
                                         o[j] = __ldcg(all +
                                                       ((int64_t)(first + j) * p.heads + i / D) *
                                                           (D + 2) +
                                                       i % D);
    };
    take((int)threadIdx.x, 0);
    for (int i = (int)threadIdx.x; i < rows; i += WARPS * 32) {
        if (i % p.heads >= k.heads) continue; /* nobody has written there */
        maxs[i] = __ldcg(all + (int64_t)i * (D + 2) + D);
        sums[i] = __ldcg(all + (int64_t)i * (D + 2) + D + 1);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < n; i += WARPS * 32) {
        float m = -INFINITY, sum = 0, total = 0;
        for (int j = 0; j < p.runs; j++)
            m = fmaxf(m, maxs[j * p.heads + i / D]);
        for (int first = 0; first < p.runs; first += ahead) {
#pragma unroll
            for (int j = 0; j < ahead; j++) {
                if (first + j >= p.runs) break;
                const int row = (first + j) * p.heads + i / D;
                const float f = ptx_exp2(maxs[row] - m);
                sum += f * sums[row];
                total += f * o[j];
            }
            take(i, first + ahead);
        }
        decode_put<D>(p, k, i / D, i % D, m, sum, total);
        take(i + WARPS * 32, 0);
    }
}

#ifndef TARE_EMULATED
/* The blocks of a cluster, each with a share of the lanes; mine: this block's merged
 * [heads][D + 2]. */
template <int D, int WARPS, int CLUSTER>
static __device__ __forceinline__ void decode_cluster(const decode_args &p, const decode_task &t,
                                                      const float *mine, int rank)
{
    ptx_cluster_arrive();
    ptx_cluster_wait();
    const int n = t.heads * D, share = (n + CLUSTER - 1) / CLUSTER, first = rank * share;
    const int end = first + share < n ? first + share : n;
    for (int i = first + (int)threadIdx.x; i < end; i += WARPS * 32) {
        const uint32_t row = ptx_smem(mine + i / D * (D + 2));
        float max[CLUSTER], m = -INFINITY, sum = 0, o = 0;
#pragma unroll
        for (int k = 0; k < CLUSTER; k++) {
            max[k] = ptx_get_f32(row + D * 4, (uint32_t)k);
            m = fmaxf(m, max[k]);
        }
#pragma unroll
        for (int k = 0; k < CLUSTER; k++) {
            const float f = ptx_exp2(max[k] - m);
            sum += f * ptx_get_f32(row + (D + 1) * 4, (uint32_t)k);
            o += f * ptx_get_f32(row + i % D * 4, (uint32_t)k);
        }
        decode_put<D>(p, t, i / D, i % D, m, sum, o);
    }
    ptx_cluster_arrive(); /* nobody leaves while others read */
    ptx_cluster_wait();
}
#endif

/* The heads of this block in the rows of no sequence. */
template <int D>
static __device__ __forceinline__ void decode_nobody(const decode_args &p, const decode_task &k)
{
    for (int64_t t = blockIdx.z; t < p.a.seqs.T; t += gridDim.z)
        for (int i = (int)threadIdx.x; p.a.seqs.row_seq[t] < 0 && i < k.heads * D;
             i += (int)blockDim.x)
            put_lane(p.a.out, t * p.a.ldo + (int64_t)k.head0 * D + i, 0.0f);
}

/* The task of this block. */
static __device__ __forceinline__ decode_task decode_find(const decode_args &p)
{
    const gpu_seqs &s = p.a.seqs;
    const int b = (int)blockIdx.z, set = (int)blockIdx.y % p.sets, G = p.a.H / p.a.kv.Hk;
    decode_task k;
    k.hk = (int)blockIdx.y / p.sets;
    k.head0 = k.hk * G + set * p.heads;
    k.heads = min(p.heads, G - set * p.heads);
    k.row = s.row0[b];
    k.place = k.row * (int)gridDim.y + (int)blockIdx.y;
    k.len = s.n_rows[b] == 1 ? s.kv_len[b] : 0;
    k.lo = p.a.window > 0 ? max(0, k.len - p.a.window) : 0;
    const int shared = p.shared_runs && k.len > 0 ? s.shared[b] : 0;
    k.shared = shared ? (int64_t)b * p.a.H : -1;
    const int page = shared ? shared : k.lo / DECODE_PAGE,
              pages = (k.len + DECODE_PAGE - 1) / DECODE_PAGE;
    const int each = (pages - page + p.runs - 1) / p.runs;
    k.first = page + (int)blockIdx.x * each;
    k.end = min(k.first + each, pages);
    k.last_page = pages - 1;
    k.v_scale = p.a.kv.v_scale ? p.a.kv.v_scale[k.hk] : 1.0f;
    k.nobody = blockIdx.x == 0 && b < s.T && (s.T > (int)gridDim.z || s.row_seq[b] < 0);
    return k;
}

/* CLUSTER: runs that are the blocks of a cluster, all of them; 1 = runs merge through p.part. */
template <class V, int D, int WARPS, int STAGES, int BLOCKS, int CLUSTER>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS) decode_kernel(const decode_args p)
{
    typedef decode_shape<V, D, WARPS, STAGES> S;
    SMEM(unsigned char, smem);
    const int warp = (int)threadIdx.x / 32, lane_id = (int)threadIdx.x % 32;
    const uint32_t ring = ptx_smem(smem) + (uint32_t)(S::ring_at + warp * STAGES * S::page),
                   bar = ptx_smem(smem) + (uint32_t)(warp * STAGES * 8);
    const decode_task k = decode_find(p);
    if (k.len < 1) {
        ptx_pdl_wait();
        ptx_pdl_go();
        if (k.nobody) decode_nobody<D>(p, k);
        return;
    }
    const int32_t *table = p.a.seqs.pages + (int64_t)blockIdx.z * p.a.seqs.max_pages;
    const uint8_t *head = p.a.kv.base + (size_t)k.hk * S::page;
    if (lane_id == 0) {
        for (int i = 0; i < STAGES; i++)
            ptx_mbar_init(bar + i * 8, 1);
        ptx_mbar_fence();
    }
    __syncwarp();
    auto ask = [&](int page, int stage) {
        if (page >= k.end || lane_id) return;
        ptx_mbar_expect(bar + stage * 8, S::page);
        ptx_bulk_load(ring + stage * S::page, head + (size_t)table[page] * p.a.kv.page_stride,
                      S::page, bar + stage * 8);
    };
    /* The kernel before has stored the new token: only its page, the last, has to wait for it. */
    const int mine = k.first + warp;
    for (int i = 0; i < STAGES; i++)
        if (mine + i * WARPS != k.last_page) ask(mine + i * WARPS, i);
    const attn_scale scale = decode_scale<V>(p.a, k.hk);
    ptx_pdl_wait();
    ptx_pdl_go();
    for (int i = 0; i < STAGES; i++)
        if (mine + i * WARPS == k.last_page) ask(mine + i * WARPS, i);

    decode_q<D> q;
    decode_queries<V, D>(
        p.a.q, lane_id / 4 < k.heads ? k.row * p.a.ldq + (int64_t)(k.head0 + lane_id / 4) * D : -1,
        lane_id, q);
    decode_state<D> st;
    decode_start<D>(st);

    int stage = 0, parity = 0;
    for (int page = mine; page < k.end; page += WARPS) {
        const uint32_t at = ring + stage * S::page;
        const int lo = k.lo - page * DECODE_PAGE, hi = k.len - page * DECODE_PAGE;
        ptx_mbar_wait(bar + stage * 8, parity);
        if (lo > 0 || hi < DECODE_PAGE)
            decode_page<V, D, true>(at, lane_id, lo, hi, q, scale, st);
        else
            decode_page<V, D, false>(at, lane_id, lo, hi, q, scale, st);
        __syncwarp();
        ask(page + STAGES * WARPS, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __syncthreads(); /* the ring becomes the place of the merge */
    if (k.nobody) decode_nobody<D>(p, k);
    const float by = scale.cap > 0 ? 1.0f : scale.by;
    float *place = (float *)(smem + S::ring_at);
#ifndef TARE_EMULATED
    if (CLUSTER > 1) {
        float *merged = place + WARPS * 8 * (D + 6);
        decode_merge<V, D, WARPS>(p, k, st, by, place, merged);
        decode_cluster<D, WARPS, CLUSTER>(p, k, merged, (int)blockIdx.x);
        return;
    }
#endif
    if (p.runs == 1) {
        decode_merge<V, D, WARPS>(p, k, st, by, place, NULL);
        return;
    }
    decode_merge<V, D, WARPS>(p, k, st, by, place,
                              p.part + (k.place * p.runs + (int)blockIdx.x) * p.heads *
                                           (int64_t)(D + 2));
    /* The last block of the head adds up the runs. */
    __shared__ unsigned ticket;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        ticket = atomicAdd(p.done + k.place, 1u);
        if (ticket == (unsigned)p.runs - 1) p.done[k.place] = 0;
    }
    __syncthreads();
    if (ticket != (unsigned)p.runs - 1) return;
    __threadfence();
    decode_runs<D, WARPS>(p, k, place);
}
#endif
