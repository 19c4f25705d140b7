/* Products of few rows with a weight that is read once: y[M,N] = x[M,K] W^T, M <= 8. Decoding is
 * reading weights, so the kernel is a stream. One warp of a block does nothing but ask the copy
 * engine for the next stretch of W, into a ring in shared memory; the multiplying warps take their
 * units of every stretch (unit.cuh), with x from shared memory; one more warp adds up their sums
 * and writes y. Nobody waits for the whole block: stretches and sums pass through barriers of their
 * own.
 *
 * Weights do not depend on the kernel before, so the ring fills before the wait for it. A block has
 * a multiprocessor for itself.
 *
 * Tiles go round the blocks of the grid. Where x is too long, and where there are fewer tiles than
 * multiprocessors, K is cut among the `split` blocks of a cluster, whose first adds up what the
 * others send it. Sums are added in a fixed order: results do not depend on timing. */
#ifndef KERN_CUDA_SMALL_CUH
#define KERN_CUDA_SMALL_CUH
#include "kern/cuda/unit.cuh"

#define SMALL_STAGES 8 /* at most */

struct small_args {
    const uint8_t *w;
    const __nv_bfloat16 *x; /* [M, K], row stride ldx */
    int64_t ldx;
    int N, K, M;
    int split, stages;
    format_out out;
};

/* WARPS multiply, UPW units of each stretch every one. */
template <int WARPS, int UPW> struct small_cfg {
    static constexpr int warps = WARPS, upw = UPW;
    static constexpr int threads = (WARPS + 2) * 32, chunk = WARPS * UPW; /* units of a stretch */
};

/* Bytes of shared memory, in this order; T: tokens there is room for. */
template <class W, class C, int T> struct small_shape {
    static constexpr int sums = T == 1 ? 4 : 2; /* buffers of them */
    static constexpr int stage_bytes = C::chunk * W::unit_bytes;
    static constexpr int tile_floats = SMALL_ROWS * T;
    static constexpr int part_floats = C::warps * tile_floats;
    static constexpr int part_bytes = sums * part_floats * 4;
    static constexpr int bar_bytes = (SMALL_STAGES * 2 + sums * 4) * 8;
    /* What an absent token reads for any unit, beside the banks of token 0. */
    static constexpr int zero_bytes = 384, zero_at = 16;
    static_assert(stage_bytes % 16 == 0 && part_bytes % 16 == 0, "alignment of what follows");
    static __host__ __device__ int ring(int stages)
    {
        return (stages * stage_bytes + 127) / 128 * 128;
    }
    /* From the end of the ring. */
    static __host__ __device__ int far_bytes(int split)
    {
        return sums * (split - 1) * tile_floats * 4;
    }
    static __host__ __device__ int zero(int split)
    {
        return (part_bytes + far_bytes(split) + bar_bytes + 127) / 128 * 128;
    }
    static __host__ __device__ int x(int split) { return zero(split) + zero_bytes; }
    /* Rows of x start 16 bytes apart modulo 128. */
    static __host__ __device__ int x_stride(int units) { return units * SMALL_UNIT_K * 2 + 16; }
    static __host__ __device__ int off(int split, int units)
    {
        return x(split) + T * x_stride(units);
    }
    static __host__ __device__ int end(int split, int units)
    {
        return off(split, units) + (small_sum<W>::used ? units * W::groups * T * 4 : 0);
    }
};

struct small_bars { /* shared-memory addresses; one for each stage or buffer of sums */
    uint32_t full, empty, sum_full, sum_empty, far_full, far_empty;
};

/* What a block works on: units [unit0, unit0 + units) of n_tiles tiles. */
struct small_task {
    int group, groups, n_tiles, unit0, units, most; /* most: units of any block */
    uint32_t rank;
};
static __device__ __forceinline__ small_task small_find(const small_args &p)
{
    const int units = p.K / SMALL_UNIT_K, tiles = p.N / SMALL_ROWS;
    small_task t;
    t.rank = blockIdx.x % p.split;
    t.group = blockIdx.x / p.split;
    t.groups = gridDim.x / p.split;
    t.n_tiles = (tiles - t.group + t.groups - 1) / t.groups;
    t.unit0 = units * (int)t.rank / p.split;
    t.units = units * ((int)t.rank + 1) / p.split - t.unit0;
    t.most = (units + p.split - 1) / p.split;
    return t;
}

/* Asks for stretch after stretch. */
template <class W, class C>
static __device__ __forceinline__ void small_produce(const small_args &p, const small_task &t,
                                                     uint32_t ring, const small_bars &bar)
{
    const int64_t row = p.K / SMALL_UNIT_K;
    int stage = 0, parity = 1; /* the first round finds every stage empty */
    for (int i = 0; i < t.n_tiles; i++) {
        const uint8_t *tile =
            p.w + ((t.group + (int64_t)i * t.groups) * row + t.unit0) * W::unit_bytes;
        for (int u = 0; u < t.units; u += C::chunk) {
            const int n = t.units - u < C::chunk ? t.units - u : C::chunk;
            ptx_mbar_wait(bar.empty + stage * 8, parity);
            ptx_mbar_expect(bar.full + stage * 8, n * W::unit_bytes);
            ptx_bulk_load_once(ring + stage * C::chunk * W::unit_bytes, tile + u * W::unit_bytes,
                               n * W::unit_bytes, bar.full + stage * 8);
            if (++stage == p.stages) stage = 0, parity ^= 1;
        }
    }
}

/* The sums of a tile that a lane adds up: rows row0 .. row0+count-1 of a token. */
template <class W, class C, int T> struct small_lane {
    static constexpr int count = T == 1 ? 1 : SMALL_ROWS * T / 32;
    static_assert(T == 1 || T == 8, "a token a half of the warp, or four lanes a token");
    int token, row0;
    bool live;
    __device__ __forceinline__ small_lane(int lane)
    {
        token = T == 1 ? 0 : lane / 4;
        row0 = T == 1 ? lane % 16 : lane % 4 * 4;
        live = T > 1 || lane < 16;
    }
    __device__ __forceinline__ int at() const { return token * SMALL_ROWS + row0; }
};

/* Sums of all warps; with one token half of the lanes have half of the warps each. */
template <class W, class C, int T>
static __device__ __forceinline__ void small_add(uint32_t part, const small_lane<W, C, T> &my,
                                                 float sum[small_lane<W, C, T>::count])
{
    constexpr int bytes = SMALL_ROWS * T * 4;
    if constexpr (T == 1) {
        const uint32_t from = part + my.row0 * 4 + (my.live ? 0 : C::warps / 2 * bytes);
        float v[C::warps / 2];
#pragma unroll
        for (int w = 0; w < C::warps / 2; w++)
            v[w] = __uint_as_float(ptx_lds32(from + w * bytes));
        float s = v[0];
#pragma unroll
        for (int w = 1; w < C::warps / 2; w++)
            s += v[w];
        sum[0] = s + __shfl_xor_sync(~0u, s, 16);
    } else {
        const uint32_t from = part + my.at() * 4;
        sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll
        for (int w = 0; w < C::warps; w++) {
            const float4 v = ptx_lds_f32x4(from + w * bytes);
            sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
    }
}

/* Factors of the rows that a lane writes. */
template <int COUNT> struct small_factors {
    float col[COUNT], bias[COUNT];
};
template <int COUNT>
static __device__ __forceinline__ small_factors<COUNT> small_factors_of(const format_out &o, int n)
{
    small_factors<COUNT> f;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        f.col[i] = o.col_scale ? __ldg(o.col_scale + n + i) : 1.0f;
        f.bias[i] = o.bias ? __ldg(o.bias + n + i) : 0.0f;
    }
    return f;
}

/* Adds up the warps' sums of each tile. The first block of a cluster adds those of the others and
 * writes y; the others send theirs to it. The factors of a tile are asked for a tile ahead. */
template <class W, class C, int T>
static __device__ __forceinline__ void small_finish(const small_args &p, const small_task &t,
                                                    uint32_t parts, uint32_t far_sums,
                                                    const small_bars &bar, int lane)
{
    typedef small_shape<W, C, T> S;
    constexpr int count = small_lane<W, C, T>::count;
    const small_lane<W, C, T> my(lane);
    const int others = p.split - 1;
    const bool writes = t.rank == 0 && my.live && my.token < p.M;
    const float by =
        p.out.row_scale && writes ? p.out.base * p.out.row_scale[my.token] : p.out.base;
    int n = t.group * SMALL_ROWS + my.row0;
    small_factors<count> next = small_factors_of<count>(p.out, n);
    for (int i = 0; i < t.n_tiles; i++, n += t.groups * SMALL_ROWS) {
        const int d = i % S::sums, parity = i / S::sums & 1;
        const small_factors<count> now = next;
        if (i + 1 < t.n_tiles) next = small_factors_of<count>(p.out, n + t.groups * SMALL_ROWS);
        if (others && t.rank == 0 && lane == 0)
            ptx_mbar_expect(bar.far_full + d * 8, others * S::tile_floats * 4);
        float sum[count];
        ptx_mbar_wait(bar.sum_full + d * 8, parity);
        small_add<W, C, T>(parts + d * S::part_floats * 4, my, sum);
        ptx_mbar_arrive(bar.sum_empty + d * 8);
        const uint32_t far_at = far_sums + (d * others * S::tile_floats + my.at()) * 4;
        if (t.rank != 0) {
            ptx_mbar_wait(bar.far_empty + d * 8, parity ^ 1);
#pragma unroll
            for (int k = 0; k < count; k++)
                if (my.live)
                    ptx_send_f32(far_at + ((int)(t.rank - 1) * S::tile_floats + k) * 4,
                                 bar.far_full + d * 8, 0, sum[k]);
            continue;
        }
        if (others) {
            ptx_mbar_wait(bar.far_full + d * 8, parity);
            for (int r = 0; r < others; r++)
#pragma unroll
                for (int k = 0; k < count; k++)
                    sum[k] += __uint_as_float(ptx_lds32(far_at + (r * S::tile_floats + k) * 4));
            __syncwarp();
            if (lane > 0 && lane <= others) ptx_mbar_arrive_at(bar.far_empty + d * 8, lane);
        }
        if (!writes) continue;
#pragma unroll
        for (int k = 0; k < count; k++) {
            const float v = fmaf(sum[k] * by, now.col[k], now.bias[k]);
            if (p.out.y_bf16)
                ((__nv_bfloat16 *)p.out.y)[my.token * p.out.ldy + n + k] = __float2bfloat16(v);
            else
                ((float *)p.out.y)[my.token * p.out.ldy + n + k] = v;
        }
    }
}

static __device__ __forceinline__ float small_add8(uint4 v)
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    float s = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        s += ptx_bf16_f32(w[i] & 0xffff) + __uint_as_float(w[i] & 0xffff0000u);
    return s;
}

/* x of this block into shared memory by the multiplying warps, with the sums of its groups; a
 * thread has 16 columns at a time, the threads of a unit lie side by side in a warp. */
template <class W, class C, int T>
static __device__ __forceinline__ void small_fetch(const small_args &p, const small_task &t,
                                                   uint32_t xs, uint32_t offs)
{
    constexpr int across = SMALL_UNIT_K / 16 / W::groups; /* threads of a group */
    const int row = t.units * (SMALL_UNIT_K / 16), stride = small_shape<W, C, T>::x_stride(t.most);
    const int all = T == 1 ? row : p.M * row;
#pragma unroll 4
    for (int i = threadIdx.x; i < all; i += C::warps * 32) {
        const int m = T == 1 ? 0 : i / row, k = T == 1 ? i : i % row;
        const uint4 *from = (const uint4 *)(p.x + m * p.ldx + t.unit0 * SMALL_UNIT_K + k * 16);
        const uint4 a = from[0], b = from[1];
        const uint32_t to = xs + m * stride + k * 32;
        ptx_sts128(to, a);
        ptx_sts128(to + 16, b);
        if constexpr (small_sum<W>::used) {
            float s = small_add8(a) + small_add8(b);
#pragma unroll
            for (int by = 1; by < across; by *= 2)
                s += __shfl_xor_sync(0xffu << (threadIdx.x & 24), s, by);
            if (k % across == 0)
                ptx_sts_f32(offs + (k / across * T + m) * 4, W::zeros ? s : s * 136.0f);
        }
    }
}

/* What a lane needs of x for a unit. at: its row at small_first, at that unit. */
template <class W> static __device__ __forceinline__ small_x small_take(uint32_t at)
{
    small_x x;
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const uint32_t from = at + b * 128;
        if constexpr (W::fine) {
            const uint2 s0 = ptx_lds64(from), s1 = ptx_lds64(from + 32);
            const uint2 s2 = ptx_lds64(from + 64), s3 = ptx_lds64(from + 96);
            x.v[b][0] = make_uint4(s0.x, s1.x, s2.x, s3.x);
            x.v[b][1] = make_uint4(s0.y, s1.y, s2.y, s3.y);
        } else {
            x.v[b][0] = ptx_lds128(from);
            x.v[b][1] = ptx_lds128(from + 16);
        }
    }
    return x;
}

template <class W, int T>
static __device__ __forceinline__ small_sum<W> small_off_at(uint32_t offs, int u, int lane)
{
    small_sum<W> r = {};
    if constexpr (small_sum<W>::used) {
#pragma unroll
        for (int g = 0; g < W::groups; g++) {
            const uint32_t at = offs + (u * W::groups + g) * T * 4;
            if constexpr (T == 1) {
                r.t[g][0] = r.t[g][1] = __uint_as_float(ptx_lds32(at)); /* one counts */
            } else {
                const uint2 v = ptx_lds64(at + lane % 4 * 8);
                r.t[g][0] = __uint_as_float(v.x), r.t[g][1] = __uint_as_float(v.y);
            }
        }
    }
    return r;
}

/* The multiplying warps, when x is in shared memory. zero: 256 bytes of zeros. */
template <class W, class C, int T>
static __device__ __forceinline__ void
small_multiply(const small_args &p, const small_task &t, float *parts, uint32_t ring, uint32_t xs,
               uint32_t offs, uint32_t zero, const small_bars &bar, int warp, int lane)
{
    typedef small_shape<W, C, T> S;
    const bool live = lane / 4 < (T == 1 ? 1 : p.M);
    const uint32_t step = live ? SMALL_UNIT_K * 2 : 0; /* from unit to unit */
    const uint32_t row =
        live ? xs + lane / 4 * S::x_stride(t.most) + small_first<W>(lane) * 2 : zero;
    const int r = lane / 4, k = lane % 4 * 2;
    int stage = 0, parity = 0;
    for (int i = 0; i < t.n_tiles; i++) {
        small_total<W> tot = {};
        for (int c = 0; c < t.units; c += C::chunk) {
            ptx_mbar_wait(bar.full + stage * 8, parity);
#pragma unroll
            for (int j = 0; j < C::upw; j++) {
                const int at = warp * C::upw + j, u = c + at;
                if (u >= t.units) break;
                const small_x x = small_take<W>(row + u * step);
                const small_sum<W> off = small_off_at<W, T>(offs, u, lane);
                small_unit<W>(ring + stage * S::stage_bytes + at * W::unit_bytes, x, off, lane,
                              tot);
            }
            __syncwarp();
            if (lane == 0) ptx_mbar_arrive(bar.empty + stage * 8);
            if (++stage == p.stages) stage = 0, parity ^= 1;
        }
        const int d = i % S::sums;
        float *my = parts + d * S::part_floats + warp * S::tile_floats;
        ptx_mbar_wait(bar.sum_empty + d * 8, (i / S::sums & 1) ^ 1);
        if (k < T) my[k * SMALL_ROWS + r] = tot.at(0), my[k * SMALL_ROWS + r + 8] = tot.at(2);
        if (k + 1 < T)
            my[(k + 1) * SMALL_ROWS + r] = tot.at(1), my[(k + 1) * SMALL_ROWS + r + 8] = tot.at(3);
        ptx_mbar_arrive(bar.sum_full + d * 8);
    }
}

template <class C, class S>
static __device__ __forceinline__ small_bars small_set_bars(uint32_t at, bool one)
{
    const small_bars bar = {at,
                            at + SMALL_STAGES * 8,
                            at + SMALL_STAGES * 16,
                            at + SMALL_STAGES * 16 + S::sums * 8,
                            at + SMALL_STAGES * 16 + S::sums * 16,
                            at + SMALL_STAGES * 16 + S::sums * 24};
    if (!one) return bar;
#pragma unroll
    for (int i = 0; i < SMALL_STAGES; i++) {
        ptx_mbar_init(bar.full + i * 8, 1);
        ptx_mbar_init(bar.empty + i * 8, C::warps);
    }
#pragma unroll
    for (int i = 0; i < S::sums; i++) {
        ptx_mbar_init(bar.sum_full + i * 8, C::warps * 32);
        ptx_mbar_init(bar.sum_empty + i * 8, 32);
        ptx_mbar_init(bar.far_full + i * 8, 1);
        ptx_mbar_init(bar.far_empty + i * 8, 1);
    }
    ptx_mbar_fence();
    return bar;
}

template <class W, class C, int T>
__global__ void __launch_bounds__(C::threads, 1) small_kernel(const small_args p)
{
    extern __shared__ __align__(128) uint8_t smem[];
    typedef small_shape<W, C, T> S;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const small_task t = small_find(p);
    uint8_t *behind = smem + S::ring(p.stages);
    float *parts = (float *)behind;
    const uint32_t ring = ptx_smem(smem), at = ptx_smem(behind);
    const small_bars bar = small_set_bars<C, S>(at + S::part_bytes + S::far_bytes(p.split),
                                                threadIdx.x == C::warps * 32);
    const uint32_t zero = at + S::zero(p.split), xs = at + S::x(p.split),
                   offs = at + S::off(p.split, t.most);
    if (threadIdx.x < S::zero_bytes / 16)
        ptx_sts128(zero + threadIdx.x * 16, make_uint4(0, 0, 0, 0));
    __syncthreads();
    if (p.split > 1) ptx_cluster_arrive();
    if (warp == C::warps) {
        if (lane == 0) small_produce<W, C>(p, t, ring, bar);
        __syncwarp();
    } else if (warp == C::warps + 1) {
        ptx_pdl_wait();
        ptx_pdl_go();
        if (p.split > 1) ptx_cluster_wait();
        small_finish<W, C, T>(p, t, at, at + S::part_bytes, bar, lane);
    } else {
        ptx_pdl_wait();
        small_fetch<W, C, T>(p, t, xs, offs);
        asm volatile("bar.sync 1, %0;" ::"n"(C::warps * 32) : "memory");
        small_multiply<W, C, T>(p, t, parts, ring, xs, offs, zero + S::zero_at, bar, warp, lane);
    }
    /* No block leaves while another may still write to it. */
    if (p.split > 1) {
        if (warp != C::warps + 1) ptx_cluster_wait();
        ptx_cluster_arrive();
        ptx_cluster_wait();
    }
}
#endif
