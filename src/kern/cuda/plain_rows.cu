/* Plain kernels that treat lanes one by one: rotary positions, feed-forward functions, sums, gates,
 * copies. A thread has a lane (rotary: a pair) or eight of a row. */
#include "kern/cuda/plain_rows.cuh"

/* ---- rotary positions ---------------------------------------------------------------------------
 */
/* Heads of q, then those of k. */
static __global__ void __launch_bounds__(ROW_THREADS, 1) rope_kernel(const gpu_rope a, int pairs)
{
    pdl_go();
    pdl_wait();
    int half = a.rot_dim / 2;
    for (int64_t t = blockIdx.y; t < a.T; t += gridDim.y)
        for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < pairs;
             i += (int)(gridDim.x * blockDim.x)) {
            int h = i / half, p = i % half;
            bool is_k = h >= a.H;
            gpu_x x = is_k ? a.k : a.q;
            int64_t at = is_k ? t * a.ldk + (int64_t)(h - a.H) * a.D : t * a.ldq + (int64_t)h * a.D;
            int64_t one = at + (a.pairs ? 2 * p : p), two = a.pairs ? one + 1 : one + half;
            float u = lane(x, one), v = lane(x, two);
            turn(&u, &v, a.cosv[t * half + p], a.sinv[t * half + p]);
            put_lane(x, one, u);
            put_lane(x, two, v);
        }
}
extern "C" const char *cuda_rope(const void *args_, void *stream)
{
    gpu_rope a = *(const gpu_rope *)args_;
    if (!a.q.p) a.H = 0;
    int heads = a.H + (a.k.p ? a.Hk : 0);
    int64_t n = (int64_t)heads * (a.rot_dim / 2);
    if (!a.T || !n) return NULL;
    if (n > INT32_MAX / 2) return "rope: rows of more than 2^30 lanes";
    return LAUNCH_EARLY(rope_kernel, grid_for(n, a.T), ROW_THREADS, 0, stream, a, (int)n);
}

static __global__ void __launch_bounds__(ROW_THREADS, 1) rope_fill_kernel(const gpu_rope_fill a)
{
    FOR_LANES(r, i, a.half, a.T)
    {
        int64_t t = a.row0 + r;
        double c, s;
        sincos((double)(a.inv[i] * (float)a.pos[t]), &s, &c);
        a.cosv[t * a.half + i] = (float)(c * a.attention);
        a.sinv[t * a.half + i] = (float)(s * a.attention);
    }
}
extern "C" const char *cuda_rope_fill(const void *args_, void *stream)
{
    const gpu_rope_fill *a = (const gpu_rope_fill *)args_;
    if (!a->T || !a->half) return NULL;
    return LAUNCH(rope_fill_kernel, grid_for(a->half, a->T), ROW_THREADS, 0, stream, *a);
}

/* ---- feed-forward -------------------------------------------------------------------------------
 */
static __global__ void __launch_bounds__(ROW_THREADS, 1) glu_kernel(const gpu_glu a, bool wide)
{
    pdl_go();
    pdl_wait();
    FOR_UNITS(t, i, n, a.F, a.T)
    {
        float v[8], u[8];
        get8(a.x, t * a.ld + i, n, wide, v);
        if (a.gated) {
            get8(a.x, t * a.ld + a.F + i, n, wide, u);
            gated8(a.act, v, u);
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++)
                v[j] = activate(a.act, v[j]);
        }
        put8(a.out, t * a.ldo + i, n, wide, v);
    }
}
/* Rows of bf16, aligned, with a gate: U units of a row a thread, blockDim.x apart. */
template <int ACT, int U>
static __global__ void __launch_bounds__(ROW_THREADS, 4) glu_units_kernel(const gpu_glu a)
{
    const uint16_t *gate = (const uint16_t *)a.x.p + blockIdx.y * a.ld, *up = gate + a.F;
    uint16_t *out = (uint16_t *)a.out.p + blockIdx.y * a.ldo;
    const int step = (int)blockDim.x * 8, F = (int)a.F;
    const int first = (int)blockIdx.x * U * step + (int)threadIdx.x * 8;
    uint4 g[U], u[U];
    pdl_go();
    pdl_wait();
#pragma unroll
    for (int k = 0; k < U; k++) {
        const int i = first + k * step < F ? first + k * step : 0;
        g[k] = *(const uint4 *)(gate + i);
        u[k] = *(const uint4 *)(up + i);
    }
#pragma unroll
    for (int k = 0; k < U; k++) {
        float v[8], w[8];
        bf16_lanes8(g[k], v);
        bf16_lanes8(u[k], w);
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] = gated(ACT, v[j], w[j]);
        if (first + k * step < F) *(uint4 *)(out + first + k * step) = bf16_raw8(v);
    }
}
extern "C" const char *cuda_glu(const void *args_, void *stream)
{
    const gpu_glu *a = (const gpu_glu *)args_;
    if (!a->T || !a->F) return NULL;
    if (a->act < 0 || a->act >= KERN_GLU_COUNT) return "glu: no such function";
    bool wide = wide_rows(a->x, a->ld, a->F) && wide_rows(a->out, a->ldo, a->F);
    bool bf16 = a->x.type == GPU_BF16 && a->out.type == GPU_BF16;
    bool known = a->gated && (a->act == KERN_SILU || a->act == KERN_GELU_TANH);
    unsigned threads = unit_threads(a->F, a->T);
    if (!wide || !bf16 || !known || a->T > 65535 || a->F > INT32_MAX / 2)
        return LAUNCH_EARLY(glu_kernel, unit_grid(a->F, a->T, threads), threads, 0, stream, *a,
                            wide);
    const int U = threads < ROW_THREADS ? 1 : 2; /* each as long as what one block has */
    const unsigned blocks = blocks_for(a->F / 8, U * (int64_t)threads);
    const bool silu = a->act == KERN_SILU;
    threads = (unsigned)((a->F / 8 + blocks * U - 1) / (blocks * U) + 31) / 32 * 32;
    void (*kernel)(const gpu_glu) =
        U == 1 ? silu ? glu_units_kernel<KERN_SILU, 1> : glu_units_kernel<KERN_GELU_TANH, 1>
        : silu ? glu_units_kernel<KERN_SILU, 2>
               : glu_units_kernel<KERN_GELU_TANH, 2>;
    return LAUNCH_EARLY(kernel, dim3(blocks, (unsigned)a->T), threads, 0, stream, *a);
}

/* ---- sums and factors ---------------------------------------------------------------------------
 */
static __global__ void __launch_bounds__(ROW_THREADS, 1) add_kernel(const gpu_add a, bool wide)
{
    pdl_go();
    pdl_wait();
    FOR_UNITS(t, i, n, a.n, 1)
    {
        const bool whole = wide && n == 8;
        float v[8], y[8];
        get8(a.x, i, n, whole, v);
        get8(a.y, i, n, whole, y);
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] = __fadd_rn(v[j], __fmul_rn(a.s, y[j]));
        put8(a.x, i, n, whole, v);
    }
}
extern "C" const char *cuda_add(const void *args_, void *stream)
{
    const gpu_add *a = (const gpu_add *)args_;
    if (!a->n) return NULL;
    bool wide = wide_rows(a->x, 8, 8) && wide_rows(a->y, 8, 8);
    unsigned threads = unit_threads(a->n, 1);
    return LAUNCH_EARLY(add_kernel, unit_grid(a->n, 1, threads), threads, 0, stream, *a, wide);
}

static __global__ void __launch_bounds__(ROW_THREADS, 1) scale_kernel(const gpu_scale a)
{
    FOR_LANES(t, i, a.n, 1)
    put_lane(a.x, i, lane(a.x, i) * a.s);
}
extern "C" const char *cuda_scale(const void *args_, void *stream)
{
    const gpu_scale *a = (const gpu_scale *)args_;
    return a->n ? LAUNCH(scale_kernel, grid_for(a->n, 1), ROW_THREADS, 0, stream, *a) : NULL;
}

static __global__ void __launch_bounds__(ROW_THREADS, 1) softcap_kernel(const gpu_scale a)
{
    FOR_LANES(t, i, a.n, 1)
    put_lane(a.x, i, a.s * tanhf(lane(a.x, i) / a.s));
}
extern "C" const char *cuda_softcap(const void *args_, void *stream)
{
    const gpu_scale *a = (const gpu_scale *)args_;
    return a->n ? LAUNCH(softcap_kernel, grid_for(a->n, 1), ROW_THREADS, 0, stream, *a) : NULL;
}

static __global__ void __launch_bounds__(ROW_THREADS, 1) gate_kernel(const gpu_gate a)
{
    FOR_LANES(t, i, a.n, a.T)
    {
        float g = lane(a.g, t * a.ldg + (a.by_row ? 0 : i));
        put_lane(a.x, t * a.ldx + i, lane(a.x, t * a.ldx + i) * sigmoid(g));
    }
}
extern "C" const char *cuda_gate(const void *args_, void *stream)
{
    const gpu_gate *a = (const gpu_gate *)args_;
    if (!a->T || !a->n) return NULL;
    return LAUNCH(gate_kernel, grid_for(a->n, a->T), ROW_THREADS, 0, stream, *a);
}

static __global__ void __launch_bounds__(ROW_THREADS, 1) far_kernel(const gpu_far a)
{
    FOR_LANES(t, i, a.n, a.T)
    {
        float steps = (float)(a.pos[t] / a.from);
        if (steps > 0)
            put_lane(a.x, t * a.ld + i,
                     lane(a.x, t * a.ld + i) * (1.0f + a.beta * logf(1.0f + steps)));
    }
}
extern "C" const char *cuda_far(const void *args_, void *stream)
{
    const gpu_far *a = (const gpu_far *)args_;
    if (!a->T || !a->n) return NULL;
    if (a->from <= 0) return "far: the length that it counts from is not positive";
    return LAUNCH(far_kernel, grid_for(a->n, a->T), ROW_THREADS, 0, stream, *a);
}

/* ---- copies -------------------------------------------------------------------------------------
 */
static __global__ void __launch_bounds__(ROW_THREADS, 1) copy_kernel(const gpu_copy a, bool wide)
{
    pdl_go();
    pdl_wait();
    FOR_UNITS(r, i, n, a.n, a.rows)
    {
        float v[8];
        int64_t from = a.ids ? a.ids[r] : r;
        get8(a.from, from * a.ldf + i, n, wide, v);
        put8(a.to, r * a.ldt + i, n, wide, v);
    }
}
extern "C" const char *cuda_copy(const void *args_, void *stream)
{
    const gpu_copy *a = (const gpu_copy *)args_;
    if (!a->rows || !a->n) return NULL;
    bool wide = wide_rows(a->from, a->ldf, a->n) && wide_rows(a->to, a->ldt, a->n);
    unsigned threads = unit_threads(a->n, a->rows);
    return LAUNCH_EARLY(copy_kernel, unit_grid(a->n, a->rows, threads), threads, 0, stream, *a,
                        wide);
}
