/* Rows that become codes of a quantized linear, in the pass that makes them, and keys that go to
 * the cache in the pass that turns them.
 *
 *   quant, glu_quant   scales of rows: a block has a row, as in plain_norm.cuh; of groups: blocks
 *                      share a row
 *   rope_store         a warp has a head of q, k or v, in shared memory */
#include "kern/cuda/plain_norm.cuh"
#include "kern/cuda/plain_store.cuh"

/* ---- where lanes come from ----------------------------------------------------------------------
 * get_lanes gives n lanes of row t from lane i on, lanes_again what it gave before. */
static __device__ __forceinline__ int64_t row_lanes(const gpu_quant &a)
{
    return a.K;
}
static __device__ __forceinline__ void get_lanes(const gpu_quant &a, int64_t t, int64_t i, int n,
                                                 bool wide, float v[8])
{
    get8(a.x, t * a.ld + i, n, wide, v);
}
static __device__ __forceinline__ void lanes_again(const gpu_quant &a, int64_t t, int64_t i, int n,
                                                   bool wide, float v[8])
{
    get8(a.x, t * a.ld + i, n, wide, v);
}

static __device__ __forceinline__ int64_t row_lanes(const gpu_glu_quant &a)
{
    return a.F;
}
static __device__ __forceinline__ void make_lanes(const gpu_glu_quant &a, int64_t t, int64_t i,
                                                  int n, bool wide, float v[8])
{
    float u[8];
    get8(a.x, t * a.ld + i, n, wide, v);
    get8(a.x, t * a.ld + a.F + i, n, wide, u);
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] = j < n ? as_lane(a.out.type, gated(a.act, v[j], u[j])) : 0.0f;
}
static __device__ __forceinline__ void get_lanes(const gpu_glu_quant &a, int64_t t, int64_t i,
                                                 int n, bool wide, float v[8])
{
    make_lanes(a, t, i, n, wide, v);
    if (a.out.p) put8(a.out, t * a.ldo + i, n, wide, v);
}
static __device__ __forceinline__ void lanes_again(const gpu_glu_quant &a, int64_t t, int64_t i,
                                                   int n, bool wide, float v[8])
{
    if (a.out.p)
        get8(a.out, t * a.ldo + i, n, wide, v);
    else
        make_lanes(a, t, i, n, wide, v);
}

/* ---- codes --------------------------------------------------------------------------------------
 */
template <int P, class A>
static __global__ void __launch_bounds__(1024, 1) row_codes_kernel(const A a, bool wide)
{
    pdl_go();
    pdl_wait();
    const int64_t K = row_lanes(a);
    const int passes = P ? P : (int)((K + 8191) / 8192);
    const int step = (int)blockDim.x * 8, first = (int)threadIdx.x * 8;
    float kept[P ? P : 1][8];
    for (int64_t t = blockIdx.x; t < a.T; t += gridDim.x) {
        float top = 0;
#pragma unroll
        for (int p = 0; p < passes; p++) {
            int i = first + p * step;
            get_lanes(a, t, i, unit_lanes(i, K), wide, kept[P ? p : 0]);
            top = unit_amax(top, kept[P ? p : 0]);
        }
        float scale = row_scale(a.to, t, top);
#pragma unroll
        for (int p = 0; p < passes; p++) {
            int i = first + p * step, n = unit_lanes(i, K);
            if (!P) lanes_again(a, t, i, n, wide, kept[0]);
            put_codes(a.to, t, i, n, scale, kept[P ? p : 0]);
        }
    }
}

template <class A>
static __global__ void __launch_bounds__(ROW_THREADS, 1) group_codes_kernel(const A a, bool wide)
{
    pdl_go();
    pdl_wait();
    const int64_t K = row_lanes(a);
    for (int64_t t = blockIdx.y; t < a.T; t += gridDim.y)
        for (int64_t b = blockIdx.x; b * blockDim.x * 8 < K; b += gridDim.x) {
            int64_t i = 8 * (b * blockDim.x + threadIdx.x);
            float v[8];
            get_lanes(a, t, i, unit_lanes(i, K), wide, v);
            put_group_codes(a.to, t, i, unit_lanes(i, K), v);
        }
}

template <class A> static const char *launch_codes(const A &a, int64_t K, bool wide, void *stream)
{
    const char *why = codes_refuse(a.to);
    int passes;
    unsigned threads;
    if (why) return why;
    if (!a.T || !K) return NULL;
    if (K > INT32_MAX / 2) return "codes: rows of more than 2^30 lanes";
    if (a.to.group) {
        threads = unit_threads(K, a.T);
        return LAUNCH_EARLY(group_codes_kernel<A>, unit_grid(K, a.T, threads), threads, 0, stream,
                            a, wide);
    }
    row_block(K, &passes, &threads);
    void (*kernel)(const A, bool) = passes == 1   ? row_codes_kernel<1, A>
                                    : passes == 2 ? row_codes_kernel<2, A>
                                                  : row_codes_kernel<0, A>;
    return LAUNCH_EARLY(kernel, blocks_for(a.T, 1), threads, 0, stream, a, wide);
}

extern "C" const char *cuda_quant(const void *args_, void *stream)
{
    const gpu_quant *a = (const gpu_quant *)args_;
    return launch_codes(*a, a->K, wide_rows(a->x, a->ld, a->K), stream);
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
    if (a->act < 0 || a->act >= KERN_GLU_COUNT) return "glu_quant: no such function";
    return launch_codes(*a, a->F, wide, stream);
}

/* ---- heads of a step ----------------------------------------------------------------------------
 */
#define HEAD_WARPS 4

/* The head in `row` as head_rmsnorm leaves it. A lane has the numbers k, k + 32, ... */
static __device__ void norm_head(float *row, int D, const float *w, float eps, gpu_type type,
                                 int k0)
{
    float ss = 0;
    for (int k = k0; k < D; k += 32)
        ss += row[k] * row[k];
    float r = norm_factor(warp_sum(ss), D, eps);
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

/* Heads of a row: q [H], k [Hk], v [Hk or none]. */
static __global__ void __launch_bounds__(HEAD_WARPS * 32)
    rope_store_kernel(const gpu_rope_store a, int64_t items, int heads)
{
    pdl_go();
    pdl_wait();
    SMEM(float, rows);
    int64_t item = (int64_t)blockIdx.x * HEAD_WARPS + threadIdx.x / 32;
    if (item >= items) return;
    int64_t t = item / heads;
    int h = (int)(item % heads), lane_ = (int)threadIdx.x % 32;
    int what = h < a.H ? 0 : h < a.H + a.Hk ? 1 : 2; /* q, k, v */
    h -= what == 0 ? 0 : what == 1 ? a.H : a.H + a.Hk;
    gpu_x x = what == 0 ? a.q : what == 1 ? a.k : a.v;
    int64_t at = t * (what == 0 ? a.ldq : what == 1 ? a.ldk : a.ldv) + (int64_t)h * a.D;
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
    if (blocks > INT32_MAX) return "rope_store: more rows and heads than a grid holds";
    if (smem > 49152) return "rope_store: heads of so many lanes do not fit in shared memory";
    return LAUNCH_EARLY(rope_store_kernel, (unsigned)blocks, HEAD_WARPS * 32, smem, stream, *a,
                        items, heads);
}
