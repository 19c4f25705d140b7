/* Plain kernels: norms. A block has a row of x (RMS norms: plain_norm.cuh), a warp has a head. Each
 * thread writes only what it read itself, after all have read: x and out may be the same.
 * Sums are in f32; variance is that of the distances from the mean, as in the plain C twin. */
#include "kern/cuda/plain_heads.cuh"
#include "kern/cuda/plain_norm.cuh"

extern "C" const char *cuda_rmsnorm(const void *args_, void *stream)
{
    const gpu_norm *a = (const gpu_norm *)args_;
    gpu_norm_quant n = {};
    n.x = a->x, n.out = a->out, n.w = a->w, n.eps = a->eps, n.T = a->T, n.K = a->K;
    return launch_norm<false>(n, stream);
}

extern "C" const char *cuda_add_rmsnorm(const void *args_, void *stream)
{
    const gpu_add_norm *a = (const gpu_add_norm *)args_;
    gpu_norm_quant n = {};
    n.x = a->x, n.y = a->y, n.out = a->out, n.w = a->w, n.eps = a->eps, n.T = a->T, n.K = a->K;
    return launch_norm<false>(n, stream);
}

static __global__ void __launch_bounds__(ROW_THREADS, 1) layernorm_kernel(const gpu_norm a)
{
    for (int64_t t = blockIdx.x; t < a.T; t += gridDim.x) {
        int64_t at = t * a.K;
        float sum = 0, ss = 0;
        for (int64_t i = threadIdx.x; i < a.K; i += blockDim.x)
            sum += lane(a.x, at + i);
        float mean = block_sum(sum) / (float)a.K;
        for (int64_t i = threadIdx.x; i < a.K; i += blockDim.x) {
            float v = lane(a.x, at + i) - mean;
            ss += v * v;
        }
        float r = norm_factor(block_sum(ss), a.K, a.eps);
        for (int64_t i = threadIdx.x; i < a.K; i += blockDim.x)
            put_lane(a.out, at + i,
                     (lane(a.x, at + i) - mean) * r * a.w[i] + (a.b ? a.b[i] : 0.0f));
    }
}
extern "C" const char *cuda_layernorm(const void *args_, void *stream)
{
    const gpu_norm *a = (const gpu_norm *)args_;
    if (!a->T || !a->K) return NULL;
    return LAUNCH(layernorm_kernel, blocks_for(a->T, 1), ROW_THREADS, 0, stream, *a);
}

/* ---- heads: warp after warp ---------------------------------------------------------------------
 */
/* Heads i of T*H that this warp has: t, h. */
#define FOR_HEADS(i, t, h, T, H)                                                                   \
    for (int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32, t = i / (H),           \
                 h = i % (H);                                                                      \
         i < (T) * (H); i += (int64_t)gridDim.x * (blockDim.x / 32), t = i / (H), h = i % (H))

static __global__ void __launch_bounds__(ROW_THREADS)
    head_norm_kernel(const gpu_head_norm a, bool centred)
{
    pdl_go();
    pdl_wait();
    FOR_HEADS(i, t, h, a.T, a.H)
    {
        int64_t at = t * a.ld + h * a.D;
        const float *w = a.by_head ? a.w + h * a.D : a.w;
        float sum = 0, ss = 0, mean = 0;
        if (centred) {
            for (int k = threadIdx.x % 32; k < a.D; k += 32)
                sum += lane(a.x, at + k);
            mean = warp_sum(sum) / (float)a.D;
        }
        ss = head_squares([&](int k) { return lane(a.x, at + k) - mean; }, a.D,
                          (int)threadIdx.x % 32);
        float r = norm_factor(ss, a.D, a.eps);
        __syncwarp(); /* all have read what others now write */
        for (int k = threadIdx.x % 32; k < a.D; k += 32)
            put_lane(a.x, at + k, (lane(a.x, at + k) - mean) * r * w[k]);
    }
}
/* RMS norms of aligned heads of U units. */
template <int U>
static __global__ void __launch_bounds__(ROW_THREADS)
    head_units_kernel(const gpu_head_norm a, unsigned heads)
{
    unsigned i = (blockIdx.x * blockDim.x + threadIdx.x) / U;
    const bool on = i < heads;
    if (!on) i = heads - 1;
    const unsigned t = i / (unsigned)a.H, h = i % (unsigned)a.H;
    const int d = (int)threadIdx.x % U * 8;
    const int64_t at = (int64_t)t * a.ld + (int)h * a.D + d;
    float v[8], w[8];
    pdl_go();
    floats8(a.w + (a.by_head ? (int)h * a.D : 0) + d, w);
    pdl_wait();
    lanes8(a.x.type, load8<true>(a.x, at, 8), v);
    norm8(v, U, w, a.eps, a.x.type);
    store8<true>(a.x, at, on ? 8 : 0, raw_of8(a.x.type, v));
}
static const char *head_norm(const gpu_head_norm *a, bool centred, void *stream)
{
    if (!a->T || !a->H || !a->D) return NULL;
    int64_t heads = a->T * a->H, warps = heads < 2048 ? 2 : ROW_THREADS / 32;
    const int U = head_threads(a->D);
    if (!centred && U && heads < INT32_MAX / 64 && wide_rows(a->x, a->ld, a->D) &&
        !((uintptr_t)a->w & 15)) {
        void (*kernel)(const gpu_head_norm, unsigned) = U == 8    ? head_units_kernel<8>
                                                        : U == 16 ? head_units_kernel<16>
                                                                  : head_units_kernel<32>;
        return LAUNCH_EARLY(kernel, blocks_for(heads * U, 32 * warps), (unsigned)(32 * warps), 0,
                            stream, *a, (unsigned)heads);
    }
    return LAUNCH_EARLY(head_norm_kernel, blocks_for(heads, warps), (unsigned)(32 * warps), 0,
                        stream, *a, centred);
}
extern "C" const char *cuda_head_rmsnorm(const void *args_, void *stream)
{
    return head_norm((const gpu_head_norm *)args_, false, stream);
}
extern "C" const char *cuda_head_layernorm(const void *args_, void *stream)
{
    return head_norm((const gpu_head_norm *)args_, true, stream);
}

static __global__ void __launch_bounds__(ROW_THREADS, 1) gated_norm_kernel(const gpu_gated_norm a)
{
    FOR_HEADS(i, t, h, a.T, a.H)
    {
        int64_t at = i * a.D, gate = t * a.ldg + h * a.D;
        float ss = 0;
        for (int k = threadIdx.x % 32; k < a.D; k += 32) {
            float v = lane(a.x, at + k);
            ss += v * v;
        }
        float r = norm_factor(warp_sum(ss), a.D, a.eps);
        for (int k = threadIdx.x % 32; k < a.D; k += 32)
            put_lane(a.out, at + k,
                     lane(a.x, at + k) * r * a.w[k] * activate(KERN_SILU, lane(a.gate, gate + k)));
    }
}
extern "C" const char *cuda_gated_rmsnorm(const void *args_, void *stream)
{
    const gpu_gated_norm *a = (const gpu_gated_norm *)args_;
    if (!a->T || !a->H || !a->D) return NULL;
    return LAUNCH(gated_norm_kernel, blocks_for(a->T * a->H, ROW_THREADS / 32), ROW_THREADS, 0,
                  stream, *a);
}
