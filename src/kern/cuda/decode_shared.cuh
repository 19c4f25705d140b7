/* The pages that sequences of a decode step share (gpu_group), once for all of a group: a block has
 * a KV head and a run of the pages, which come through one ring for all of its warps; the eight
 * columns of each warp are query heads of as many sequences as fit. What a run gives, sums, maximum
 * and total of each query head, is added by decode.cuh to what the sequence's own pages give, in
 * the order of the runs.
 *
 * Groups are read on the device: blocks of those that a step does not have return. */
#ifndef KERN_CUDA_DECODE_SHARED_CUH
#define KERN_CUDA_DECODE_SHARED_CUH
#include "kern/cuda/decode.cuh"

#define SHARED_STAGES 4
#define SHARED_WARPS  8 /* at most */
#define SHARED_RING   128

template <class V> static constexpr size_t shared_smem(int D)
{
    return SHARED_RING + (size_t)SHARED_STAGES * (size_t)decode_head<V>(D);
}

/* Sequences in a warp's columns; warps that a group of GPU_GROUP_SEQS needs. */
static __host__ __device__ __forceinline__ int shared_seqs(int heads)
{
    return DECODE_HEADS / heads;
}
static __host__ __device__ __forceinline__ int shared_warps(int heads)
{
    return (GPU_GROUP_SEQS + shared_seqs(heads) - 1) / shared_seqs(heads);
}

/* Where the columns of a warp lie in the step. */
struct shared_columns {
    int first, seqs; /* of the group: sequence of column 0; how many it has */
    int per, heads;  /* query heads of a sequence here: columns; those that exist */
    int head0;       /* of the step */
};
/* Sequence of a column, -1 = none; its query head. */
static __device__ __forceinline__ int shared_seq(const shared_columns &k, const gpu_group &g,
                                                 int column, int *head)
{
    const int nth = column / k.per;
    *head = k.head0 + column % k.per;
    const bool any = nth < shared_seqs(k.per) && k.first + nth < k.seqs && column % k.per < k.heads;
    return any ? g.seq[k.first + nth] : -1;
}

/* Columns 2(l%4), +1 of a warp to their places. */
template <class V, int D>
static __device__ __forceinline__ void shared_put(const decode_args &p, const shared_columns &k,
                                                  const gpu_group &g, int lane_id, float by,
                                                  decode_state<D> &st)
{
    const int r = lane_id / 4, c = lane_id % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        for (int i = 4; i < 32; i *= 2)
            st.sum[h] += __shfl_xor_sync(~0u, st.sum[h], i);
        float rest = 0;
        if constexpr (decode_is<V>::int8) {
            for (int i = 4; i < 32; i *= 2)
                st.rest[h] += __shfl_xor_sync(~0u, st.rest[h], i);
            rest = st.rest[h];
        }
        int head;
        const int seq = shared_seq(k, g, 2 * c + h, &head);
        if (seq < 0) continue;
        float *to = p.shared + (((int64_t)seq * p.a.H + head) * p.shared_runs + (int)blockIdx.x) *
                                   (int64_t)(D + 2);
        if (r == 0) to[D] = st.max[h] * by, to[D + 1] = st.sum[h];
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            to[i * 16 + r] = st.o[i][h] + rest;
            to[i * 16 + r + 8] = st.o[i][h + 2] + rest;
        }
    }
}

/* Grid: runs; KV heads, their sets of query heads, and parts of a group's sequences; groups. */
template <class V, int D>
__global__ void __launch_bounds__(SHARED_WARPS * 32, 1) shared_kernel(const decode_args p)
{
    constexpr int page = decode_head<V>(D);
    SMEM(unsigned char, smem);
    const int warp = (int)threadIdx.x / 32, lane_id = (int)threadIdx.x % 32;
    const int warps = (int)blockDim.x / 32, parts = (int)gridDim.y / (p.a.kv.Hk * p.sets);
    const int y = (int)blockIdx.y / parts, hk = y / p.sets, set = y % p.sets;
    const int G = p.a.H / p.a.kv.Hk;
    const uint32_t bar = ptx_smem(smem), ring = bar + SHARED_RING;
    const gpu_group &g = p.a.seqs.groups[blockIdx.z];
    shared_columns k;
    k.per = p.heads, k.heads = min(p.heads, G - set * p.heads);
    k.head0 = hk * G + set * p.heads;
    k.seqs = g.n;
    k.first = (int)blockIdx.y % parts * warps * shared_seqs(k.per);
    const bool busy = k.first < k.seqs; /* is the block? */
    k.first += warp * shared_seqs(k.per);
    const bool live = k.first < k.seqs; /* is the warp? */
    if (threadIdx.x == 0) {
        for (int i = 0; i < SHARED_STAGES; i++)
            ptx_mbar_init(bar + i * 8, 1);
        ptx_mbar_fence();
    }
    ptx_pdl_wait();
    ptx_pdl_go();
    if (!busy) return;
    const int each = (g.pages + p.shared_runs - 1) / p.shared_runs;
    const int first = (int)blockIdx.x * each, end = min(first + each, g.pages);
    const int32_t *table = p.a.seqs.pages + (int64_t)g.seq[0] * p.a.seqs.max_pages;
    const uint8_t *from = p.a.kv.base + (size_t)hk * page;
    auto ask = [&](int nth, int stage) {
        if (nth >= end || threadIdx.x) return;
        ptx_mbar_expect(bar + stage * 8, page);
        ptx_bulk_load(ring + stage * page, from + (size_t)table[nth] * p.a.kv.page_stride, page,
                      bar + stage * 8);
    };
    for (int i = 0; i < SHARED_STAGES; i++)
        ask(first + i, i);
    decode_q<D> q;
    int head;
    const int seq = shared_seq(k, g, lane_id / 4, &head);
    decode_queries<V, D>(p.a.q, seq < 0 ? -1 : p.a.seqs.row0[seq] * p.a.ldq + (int64_t)head * D,
                         lane_id, q);
    decode_state<D> st;
    decode_start<D>(st);
    const attn_scale scale = decode_scale<V>(p.a, hk);
    __syncthreads(); /* barriers are there, pages are on their way */
    int stage = 0, parity = 0;
    for (int nth = first; nth < end; nth++) {
        ptx_mbar_wait(bar + stage * 8, parity);
        if (live)
            decode_page<V, D, false>(ring + stage * page, lane_id, 0, DECODE_PAGE, q, scale, st);
        __syncthreads();
        ask(nth + SHARED_STAGES, stage);
        if (++stage == SHARED_STAGES) stage = 0, parity ^= 1;
    }
    if (live) shared_put<V, D>(p, k, g, lane_id, scale.cap > 0 ? 1.0f : scale.by, st);
}
#endif
