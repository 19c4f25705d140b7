/* Rows that become codes of a quantized linear, in the pass that makes them, and keys that go to
 * the cache in the pass that turns them.
 *
 *   quant, glu_quant   scales of rows: a block has a row, or where rows are few the blocks of a
 *                      cluster have it, which tell one another their largest lanes; lanes of bf16
 *                      are read once and stay in registers. Scales of groups: blocks share a row
 *   rope_store         eight lanes of a head of q, k or v are a thread's (plain_heads.cuh), or a
 *                      warp has a head in shared memory */
#include "kern/cuda/plain_heads.cuh"
#include "kern/cuda/plain_norm.cuh"
#include "kern/cuda/plain_store.cuh"

/* ---- where lanes come from ----------------------------------------------------------------------
 * row_lanes: of a row. ask: the loads of eight lanes, all of bf16 and aligned; answer: those lanes
 * as bf16. get_lanes: n lanes of row t from lane i on, whatever they are like; lanes_again: what it
 * gave before. act: kern_glu. */
static __host__ __device__ __forceinline__ int64_t row_lanes(const gpu_quant &a)
{
    return a.K;
}
static __host__ __device__ __forceinline__ int64_t row_lanes(const gpu_glu_quant &a)
{
    return a.F;
}
struct asked {
    uint4 x, up;
};
template <class A> constexpr bool one_operand = false; /* x alone */
template <> constexpr bool one_operand<gpu_quant> = true;
static __device__ __forceinline__ const uint4 *lanes_at(gpu_x x, int64_t at)
{
    return (const uint4 *)((const uint16_t *)x.p + at);
}
static __device__ __forceinline__ asked ask(const gpu_quant &a, int64_t t, int i, int n)
{
    asked r = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    if (n) r.x = *lanes_at(a.x, t * a.ld + i);
    return r;
}
static __device__ __forceinline__ asked ask(const gpu_glu_quant &a, int64_t t, int i, int n)
{
    asked r = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    if (n) r.x = *lanes_at(a.x, t * a.ld + i);
    if (n) r.up = *lanes_at(a.x, t * a.ld + a.F + i);
    return r;
}
template <int ACT>
static __device__ __forceinline__ uint4 answer(const gpu_quant &, int64_t, int, int, const asked &r)
{
    return r.x;
}
template <int ACT>
static __device__ __forceinline__ uint4 answer(const gpu_glu_quant &a, int64_t t, int i, int n,
                                               const asked &r)
{
    float v[8], u[8];
    bf16_lanes8(r.x, v);
    bf16_lanes8(r.up, u);
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] = gated(ACT, v[j], u[j]);
    uint4 out = bf16_raw8(v);
    if (n && a.out.p) *(uint4 *)((uint16_t *)a.out.p + t * a.ldo + i) = out;
    return out;
}

static __device__ __forceinline__ void get_lanes(const gpu_quant &a, int64_t t, int i, int n,
                                                 bool wide, float v[8])
{
    get8(a.x, t * a.ld + i, n, wide, v);
}
static __device__ __forceinline__ void lanes_again(const gpu_quant &a, int64_t t, int i, int n,
                                                   bool wide, float v[8])
{
    get8(a.x, t * a.ld + i, n, wide, v);
}
static __device__ __forceinline__ void get_lanes(const gpu_glu_quant &a, int64_t t, int i, int n,
                                                 bool wide, float v[8])
{
    float u[8];
    get8(a.x, t * a.ld + i, n, wide, v);
    get8(a.x, t * a.ld + a.F + i, n, wide, u);
    gated8(a.act, v, u);
    if (a.out.p)
        put8(a.out, t * a.ldo + i, n, wide, v);
    else
        raw_of8(a.out.type, v);
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] = j < n ? v[j] : 0.0f;
}
static __device__ __forceinline__ void lanes_again(const gpu_glu_quant &a, int64_t t, int i, int n,
                                                   bool wide, float v[8])
{
    if (a.out.p)
        get8(a.out, t * a.ldo + i, n, wide, v);
    else
        get_lanes(a, t, i, n, wide, v);
}

/* ---- codes --------------------------------------------------------------------------------------
 */
/* Rows of bf16, aligned: `parts` blocks of P units a thread have one. */
template <int P, int ACT, class A>
static __global__ void __launch_bounds__(ROW_THREADS, P == 8   ? 2
                                                      : P == 4 ? 3
                                                               : 4)
    row_codes_kernel(const A a, int parts)
{
    constexpr int AHEAD = P < 2 || one_operand<A> ? P : 2; /* units whose lanes are asked for */
    const int64_t t = parts > 1 ? blockIdx.x / (unsigned)parts : blockIdx.x;
    const int part = parts > 1 ? (int)(blockIdx.x % (unsigned)parts) : 0;
    const int K = (int)row_lanes(a), step = (int)blockDim.x * 8;
    const int first = part * P * step + (int)threadIdx.x * 8;
    uint4 kept[P];
    float top = 0, v[8];
    int turn = 0;
    pdl_go();
    cluster_come(parts);
    pdl_wait();
#pragma unroll
    for (int p0 = 0; p0 < P; p0 += AHEAD) {
        asked r[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            r[k] = ask(a, t, first + (p0 + k) * step, unit_lanes(first + (p0 + k) * step, K));
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            int i = first + (p0 + k) * step;
            kept[p0 + k] = answer<ACT>(a, t, i, unit_lanes(i, K), r[k]);
            bf16_lanes8(kept[p0 + k], v);
            top = unit_amax(top, v);
        }
    }
    const code_factor f = factor_of(a.to, row_top(top, parts, part, &turn));
    if (part == 0) keep_row_scale(a.to, t, f.scale);
#pragma unroll
    for (int p = 0; p < P; p++) {
        int i = first + p * step;
        bf16_lanes8(kept[p], v);
        put_codes(a.to, t, i, unit_lanes(i, K), f, v);
    }
}

/* Any rows: what a thread does not keep it reads again. */
template <class A>
static __global__ void __launch_bounds__(ROW_THREADS) any_codes_kernel(const A a, bool wide)
{
    const int K = (int)row_lanes(a), step = (int)blockDim.x * 8, first = (int)threadIdx.x * 8;
    const int passes = (K + step - 1) / step;
    float v[8];
    int turn = 0;
    pdl_go();
    pdl_wait();
    for (int64_t t = blockIdx.x; t < a.T; t += gridDim.x) {
        float top = 0;
        for (int p = 0; p < passes; p++) {
            int i = first + p * step;
            get_lanes(a, t, i, unit_lanes(i, K), wide, v);
            top = unit_amax(top, v);
        }
        const code_factor f = factor_of(a.to, row_top(top, 1, 0, &turn));
        keep_row_scale(a.to, t, f.scale);
        for (int p = 0; p < passes; p++) {
            int i = first + p * step, n = unit_lanes(i, K);
            if (passes > 1) lanes_again(a, t, i, n, wide, v);
            put_codes(a.to, t, i, n, f, v);
        }
    }
}

template <class A>
static __global__ void __launch_bounds__(ROW_THREADS, 1) group_codes_kernel(const A a, bool wide)
{
    pdl_go();
    pdl_wait();
    const int K = (int)row_lanes(a);
    for (int64_t t = blockIdx.y; t < a.T; t += gridDim.y)
        for (int b = (int)blockIdx.x; b * (int)blockDim.x * 8 < K; b += (int)gridDim.x) {
            int i = 8 * (b * (int)blockDim.x + (int)threadIdx.x);
            float v[8];
            get_lanes(a, t, i, unit_lanes(i, K), wide, v);
            put_group_codes(a.to, t, i, unit_lanes(i, K), v);
        }
}

/* Blocks that share a row of so many units: as many as let all rows run at once, where a device has
 * clusters. */
static inline int row_parts(int64_t units, int64_t T)
{
    int parts = 1;
    while (
        parts < CODES_PARTS && has_clusters() &&
        (units > parts * 8 * ROW_THREADS || (units > parts * ROW_THREADS && T * parts * 2 <= 1056)))
        parts *= 2;
    return parts;
}
/* `fast`: rows of bf16, aligned, with the function ACT. */
template <int ACT, class A>
static const char *launch_codes(const A &a, int64_t K, bool wide, bool fast, void *stream)
{
    const char *why = codes_refuse(a.to);
    int passes, parts;
    unsigned threads;
    if (why) return why;
    if (!a.T || !K) return NULL;
    if (K > INT32_MAX / 2) return "codes: rows of more than 2^30 lanes";
    if (a.to.group) {
        threads = unit_threads(K, a.T);
        return LAUNCH_EARLY(group_codes_kernel<A>, unit_grid(K, a.T, threads), threads, 0, stream,
                            a, wide);
    }
    parts = row_parts((K + 7) / 8, a.T);
    row_block(K, parts, &passes, &threads);
    if (!fast || !passes || a.T * parts > INT32_MAX) {
        row_block(K, 1, &passes, &threads);
        return LAUNCH_EARLY(any_codes_kernel<A>, blocks_for(a.T, 1), threads, 0, stream, a, wide);
    }
    void (*kernel)(const A, int) = passes == 1   ? row_codes_kernel<1, ACT, A>
                                   : passes == 2 ? row_codes_kernel<2, ACT, A>
                                   : passes == 4 ? row_codes_kernel<4, ACT, A>
                                                 : row_codes_kernel<8, ACT, A>;
    return LAUNCH_CLUSTER(kernel, (unsigned)(a.T * parts), threads, 0, stream, parts, a, parts);
}

extern "C" const char *cuda_quant(const void *args_, void *stream)
{
    const gpu_quant *a = (const gpu_quant *)args_;
    bool wide = wide_rows(a->x, a->ld, a->K);
    return launch_codes<0>(*a, a->K, wide, wide && a->x.type == GPU_BF16, stream);
}

extern "C" const char *cuda_norm_quant(const void *args_, void *stream)
{
    const gpu_norm_quant *a = (const gpu_norm_quant *)args_;
    const char *why = codes_refuse(a->to);
    return why ? why : launch_norm<true>(*a, stream);
}

extern "C" const char *cuda_glu_quant(const void *args_, void *stream)
{
    const gpu_glu_quant *a = (const gpu_glu_quant *)args_;
    bool wide = wide_rows(a->x, a->ld, a->F) && wide_rows(a->out, a->ldo, a->F);
    bool fast = wide && a->x.type == GPU_BF16 && a->out.type == GPU_BF16;
    if (a->act < 0 || a->act >= KERN_GLU_COUNT) return "glu_quant: no such function";
    if (a->act == KERN_GELU_TANH) return launch_codes<KERN_GELU_TANH>(*a, a->F, wide, fast, stream);
    return launch_codes<KERN_SILU>(*a, a->F, wide, fast && a->act == KERN_SILU, stream);
}

/* ---- heads of a step ----------------------------------------------------------------------------
 */
#define HEAD_WARPS 4

/* The head in `row` as head_rmsnorm leaves it. A lane has the numbers k, k + 32, ... */
static __device__ void norm_head(float *row, int D, const float *w, float eps, gpu_type type,
                                 int k0)
{
    __syncwarp();
    float r = norm_factor(head_squares([&](int k) { return row[k]; }, D, k0), D, eps);
    __syncwarp();
    for (int k = k0; k < D; k += 32)
        row[k] = as_lane(type, row[k] * r * w[k]);
}
static __device__ void turn_head(float *row, const gpu_rope_store &a, int64_t t, gpu_type type,
                                 int p0)
{
    int half = a.rot_dim / 2;
    for (int p = p0; p < half; p += 32) {
        float *u = row + (a.pairs ? 2 * p : p), *v = a.pairs ? u + 1 : u + half;
        turn(u, v, a.cosv[t * half + p], a.sinv[t * half + p]);
        *u = as_lane(type, *u);
        *v = as_lane(type, *v);
    }
}

/* Which head of a row: q [H], k [Hk], v [Hk or none] one after the other. */
struct head_of {
    int64_t t, at; /* its row, its first lane in x */
    int what, h;   /* 0 q, 1 k, 2 v */
    gpu_x x;
};
static __device__ __forceinline__ head_of find_head(const gpu_rope_store &a, unsigned item,
                                                    unsigned heads)
{
    head_of r;
    const unsigned t = item / heads;
    const int h = (int)(item - t * heads);
    r.what = h < a.H ? 0 : h < a.H + a.Hk ? 1 : 2;
    r.h = h - (r.what == 0 ? 0 : r.what == 1 ? a.H : a.H + a.Hk);
    r.x = r.what == 0 ? a.q : r.what == 1 ? a.k : a.v;
    r.t = t;
    r.at = r.t * (r.what == 0 ? a.ldq : r.what == 1 ? a.ldk : a.ldv) + r.h * a.D;
    return r;
}
/* Any heads. */
static __global__ void __launch_bounds__(HEAD_WARPS * 32)
    rope_store_kernel(const gpu_rope_store a, unsigned items, unsigned heads)
{
    pdl_go();
    pdl_wait();
    SMEM(float, rows);
    unsigned item = blockIdx.x * HEAD_WARPS + threadIdx.x / 32;
    if (item >= items) return;
    const head_of head = find_head(a, item, heads);
    const int64_t t = head.t, at = head.at;
    const gpu_x x = head.x;
    const int what = head.what, h = head.h, lane_ = (int)threadIdx.x % 32;
    int slot = a.slot[t];
    float *row = rows + threadIdx.x / 32 * a.D;
    if (what < 2) {
        const float *w = what == 0 ? a.q_norm : a.k_norm;
        for (int k = lane_; k < a.D; k += 32)
            row[k] = lane(x, at + k);
        if (w) norm_head(row, a.D, a.norm_by_head ? w + (int64_t)h * a.D : w, a.eps, x.type, lane_);
        __syncwarp();
        turn_head(row, a, t, x.type, lane_);
        __syncwarp();
    }
    if (what == 0) {
        for (int k = lane_; k < a.D; k += 32)
            put_lane(a.q_out, t * a.ldo + (int64_t)h * a.D + k, row[k] * a.q_factor);
        return;
    }
    if (what == 1 && a.keep_k)
        for (int k = lane_; k < a.D; k += 32)
            put_lane(a.k, at + k, row[k]);
    if (slot < 0) return;
    gpu_x turned = {row, GPU_F32};
    store_row r = {what == 1 ? turned : x, what == 1 ? 0 : at, a.D};
    float clipped = warp_sum((float)store_token(a.kv, what == 2, h, slot, r, lane_));
    if (clipped > 0 && lane_ == 0 && a.clipped) atomicAdd(a.clipped, (unsigned long long)clipped);
}

/* Lanes d .. d+8 of a head to their place in the cache, of bf16 or fp8; how many were clipped. */
static __device__ __forceinline__ int store_lanes8(const gpu_kv &kv, int which, int head, int slot,
                                                   int d, gpu_type type, const raw8 &raw,
                                                   float v[8])
{
    const int64_t page = slot / kv.page_tokens;
    const int token = slot % kv.page_tokens;
    const bool mma = kv.order == GPU_KV_MMA, wide = kv.type == KV_BF16;
    uint8_t *to = mma ? kv_mma_at(kv, which, head, page, token, d)
                      : kv_at(kv, which, head, page, token).codes + d * (wide ? 2 : 1);
    if (wide) {
        const uint4 codes = type == GPU_BF16 ? raw.a : bf16_raw8(v);
        const uint32_t w[4] = {codes.x, codes.y, codes.z, codes.w};
        if (!mma || !which) {
            *(uint4 *)to = codes;
            return 0;
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
            ((uint16_t *)to)[j * KV_PLACE_TOKENS] = (uint16_t)(w[j / 2] >> (16 * (j % 2)));
        return 0;
    }
    const float *scales = which ? kv.v_scale : kv.k_scale;
    const float scale = scales ? scales[head] : 1.0f;
    const float max = kv.type == KV_FP8_E4M3 ? 448.0f : 57344.0f;
    uint32_t w[8];
    int clipped = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float s = scales ? v[j] / scale : v[j];
        w[j] = kv.type == KV_FP8_E4M3 ? f32_e4m3(s) : f32_e5m2(s);
        clipped += fabsf(s) > max;
    }
    if (!mma || !which) {
        *(uint2 *)to = make_uint2(w[0] | w[1] << 8 | w[2] << 16 | w[3] << 24,
                                  w[4] | w[5] << 8 | w[6] << 16 | w[7] << 24);
        return clipped;
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
        to[j * KV_PLACE_TOKENS] = (uint8_t)w[j];
    return clipped;
}
/* Of eight lanes from d on, those that are turned. The lanes they are turned with are the same
 * thread's (pairs) or those of another one. All of the warp come here. */
static __device__ __forceinline__ void turn8(const gpu_rope_store &a, int d, bool turned,
                                             const float c[8], const float s[8], float v[8])
{
    if (a.pairs) {
#pragma unroll
        for (int p = 0; p < 4; p++)
            if (turned) turn(&v[2 * p], &v[2 * p + 1], c[p], s[p]);
        return;
    }
    const int half = a.rot_dim / 2, me = (int)threadIdx.x % 32;
    const bool first = d < half;
    const int with = !turned ? me : first ? me + half / 8 : me - half / 8;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float u = v[j], o = __shfl_sync(FULL, u, with);
        if (!turned) continue;
        if (first)
            turn(&u, &o, c[j], s[j]);
        else
            turn(&o, &u, c[j], s[j]);
        v[j] = u;
    }
}
/* Aligned heads of U units, into a cache of bf16 or fp8. */
template <int U>
static __global__ void __launch_bounds__(ROW_THREADS)
    rope_store_units_kernel(const gpu_rope_store a, unsigned items, unsigned heads)
{
    unsigned item = (blockIdx.x * blockDim.x + threadIdx.x) / U;
    const bool on = item < items;
    if (!on) item = items - 1;
    const head_of head = find_head(a, item, heads);
    const int d = (int)threadIdx.x % U * 8, half = a.rot_dim / 2;
    const bool turned = head.what < 2 && d < a.rot_dim;
    const float *norm = head.what == 0 ? a.q_norm : a.k_norm;
    const gpu_type type = head.x.type;
    float v[8], w[8] = {}, c[8] = {}, s[8] = {};
    pdl_go();
    if (norm && head.what < 2) floats8(norm + (a.norm_by_head ? head.h * a.D : 0) + d, w);
    pdl_wait();
    raw8 raw = load8<true>(head.x, head.at + d, 8);
    const int slot = a.slot[head.t];
    if (turned) {
        const int64_t p = head.t * half + (a.pairs ? d / 2 : d < half ? d : d - half);
        if (a.pairs) {
            float4 c4 = *(const float4 *)(a.cosv + p), s4 = *(const float4 *)(a.sinv + p);
            c[0] = c4.x, c[1] = c4.y, c[2] = c4.z, c[3] = c4.w;
            s[0] = s4.x, s[1] = s4.y, s[2] = s4.z, s[3] = s4.w;
        } else {
            floats8(a.cosv + p, c);
            floats8(a.sinv + p, s);
        }
    }
    lanes8(type, raw, v);
    if (a.q_norm || a.k_norm) { /* one without the other: the sum is of no use to the other */
        float n[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            n[j] = v[j];
        norm8(n, U, w, a.eps, type);
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] = norm && head.what < 2 ? n[j] : v[j];
    }
    turn8(a, d, turned, c, s, v);
    if (head.what < 2) raw = raw_of8(type, v);
    int clipped = 0;
    if (head.what == 0) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] *= a.q_factor;
        const int64_t to = head.t * a.ldo + head.h * a.D + d;
        store8<true>(a.q_out, to, on ? 8 : 0, raw_of8(a.q_out.type, v));
    } else {
        if (head.what == 1 && a.keep_k) store8<true>(a.k, head.at + d, on ? 8 : 0, raw);
        if (on && slot >= 0)
            clipped = store_lanes8(a.kv, head.what == 2, head.h, slot, d, type, raw, v);
    }
    if (a.kv.type == KV_BF16 || !a.clipped) return;
    float all = warp_sum((float)clipped);
    if (all > 0 && threadIdx.x % 32 == 0) atomicAdd(a.clipped, (unsigned long long)all);
}
static bool units_fit(const gpu_rope_store *a)
{
    const uintptr_t together = (uintptr_t)a->cosv | (uintptr_t)a->sinv | (uintptr_t)a->q_norm |
                               (uintptr_t)a->k_norm | (uintptr_t)a->kv.base | a->kv.page_stride;
    const int type = a->kv.type;
    return head_threads(a->D) && a->rot_dim % (a->pairs ? 8 : 16) == 0 && !(together & 15) &&
           (type == KV_BF16 || type == KV_FP8_E4M3 || type == KV_FP8_E5M2) &&
           a->q.type == a->k.type && (!a->v.p || a->v.type == a->q.type) &&
           wide_rows(a->q, a->ldq, a->D) && wide_rows(a->k, a->ldk, a->D) &&
           wide_rows(a->v, a->ldv, a->D) && wide_rows(a->q_out, a->ldo, a->D);
}

extern "C" const char *cuda_rope_store(const void *args_, void *stream)
{
    const gpu_rope_store *a = (const gpu_rope_store *)args_;
    const char *why = kv_refuse(a->kv);
    int heads = a->H + a->Hk + (a->v.p && !a->kv.v_in_k ? a->Hk : 0);
    int64_t items = a->T * heads, blocks = (items + HEAD_WARPS - 1) / HEAD_WARPS;
    size_t smem = sizeof(float) * HEAD_WARPS * (size_t)a->D;
    if (why) return why;
    if (a->Hk != a->kv.Hk || a->D != a->kv.D) return "rope_store: heads that are not the cache's";
    if (a->rot_dim > a->D) return "rope_store: more lanes are turned than a head has";
    if (items < 1) return NULL;
    if (items > INT32_MAX / 64) return "rope_store: more rows and heads than a grid holds";
    if (units_fit(a)) {
        const int U = head_threads(a->D), threads = items * U < 65536 ? 64 : ROW_THREADS;
        void (*kernel)(const gpu_rope_store, unsigned, unsigned) =
            U == 8    ? rope_store_units_kernel<8>
            : U == 16 ? rope_store_units_kernel<16>
                      : rope_store_units_kernel<32>;
        return LAUNCH_EARLY(kernel, blocks_for(items * U, threads), (unsigned)threads, 0, stream,
                            *a, (unsigned)items, (unsigned)heads);
    }
    if (smem > 49152) return "rope_store: heads of so many lanes do not fit in shared memory";
    return LAUNCH_EARLY(rope_store_kernel, (unsigned)blocks, HEAD_WARPS * 32, smem, stream, *a,
                        (unsigned)items, (unsigned)heads);
}
