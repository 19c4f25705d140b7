/* Plain linears: inputs treated as a checkpoint says, products with panel weights, alone and by
 * experts, rows of a panel weight as vectors, and matrices of heads. All widths of code, all types
 * of scale and zero point, any shape; nothing here is tuned for one of them.
 *
 * A weight is taken eight columns of one row at a time (weights8). In the panel layouts
 * (kern/layout.c) a line of 64 bytes holds one 32-bit word of each of the 16 rows, and so many
 * columns of them: 16 (2 bits), 8 (4), 4 (8), 2 (16), 1 (32); 3 bits take two lines of low bits and
 * one of top bits for 32. Threads r = 0..15 of a half warp read neighbouring words. The value is
 * that of decode_row to the bit: (stored - zero) * (scale * alpha).
 *
 *   narrow  few rows of x: a block has one panel, half warps take turns at its columns
 *   wide    a block has 64 columns of y and 64 rows of x; 32 columns of W at a time are decoded to
 *           shared memory once for all rows
 *
 * Sums are f32, of 8 or 32 terms first and of these then, so that long rows keep their digits.
 * Columns from K to Kp of the treated input are zero, so that what pads W counts for nothing; their
 * group is the last one. */
#include "kern/cuda/plain_num.cuh"

#define PANEL   16
#define THREADS 256
#define WARPS   (THREADS / 32)
#define TILE    64 /* of wide: rows of x, and columns of y */
#define STEP    32 /* of wide: columns of W and x at a time */
#define FEW     16 /* rows of x up to which narrow serves */

struct alignas(16) plain_four {
    float v[4];
};
static __device__ __forceinline__ void load8(const float *p, float *v)
{
    plain_four a = ((const plain_four *)p)[0], b = ((const plain_four *)p)[1];
    for (int i = 0; i < 4; i++) {
        v[i] = a.v[i];
        v[4 + i] = b.v[i];
    }
}

/* ---- weights ------------------------------------------------------------------------------------
 */

/* Columns 8c..8c+7 of row r of a panel, as they are stored. */
static __device__ __forceinline__ void stored8(const gpu_panels &w, const float *lut,
                                               const uint8_t *panel, int r, int64_t c, float *v)
{
    const uint32_t *word = (const uint32_t *)panel + r; /* that of line i: word[i * PANEL] */
    switch (w.bits) {
    case 2:
    case 3: {
        int64_t line = w.bits == 2 ? c / 2 : c / 4 * 3 + c / 2 % 2;
        uint32_t low = word[line * PANEL] >> (c % 2 * 2);
        uint32_t top = w.bits == 2 ? 0 : word[(c / 4 * 3 + 2) * PANEL] >> (c % 4);
        for (int i = 0; i < 8; i++) {
            int shift = i % 4 * 8 + (i & 4);
            v[i] = lut[(low >> shift & 3u) | (top >> shift & 1u) << 2];
        }
        break;
    }
    case 4: {
        uint32_t u = word[c * PANEL];
        for (int i = 0; i < 8; i++)
            v[i] = lut[u >> (i % 4 * 8 + (i & 4)) & 15u];
        break;
    }
    case 8:
        for (int i = 0; i < 8; i++) {
            uint32_t u = word[(2 * c + i / 4) * PANEL] >> (i % 4 * 8) & 255u;
            v[i] = w.bias                  ? (float)((int)u - w.bias)
                   : w.code == NUM_F8_E4M3 ? e4m3_f32(u)
                                           : e5m2_f32(u);
        }
        break;
    case 16:
        for (int i = 0; i < 8; i++) {
            uint32_t u = word[(4 * c + i / 2) * PANEL] >> (i % 2 * 16) & 0xffffu;
            v[i] = w.code == NUM_BF16 ? bf16_f32((uint16_t)u) : f16_f32(u);
        }
        break;
    default:
        for (int i = 0; i < 8; i++)
            v[i] = bits_f32(word[(8 * c + i) * PANEL]);
    }
}

/* Scale of a group of row n, that of the row in it, and the zero point. */
static __device__ __forceinline__ float scale_of(const gpu_panels &w, int64_t n, int64_t g,
                                                 float *zero)
{
    int64_t cell = (n / PANEL * w.groups + g) * PANEL + n % PANEL;
    const uint8_t *s = w.mem + w.scales_off + cell * w.scale_bytes, *z = w.mem + w.zeros_off;
    float f = 1.0f;
    if (w.scale_bytes == 1)
        f = code_f32(w.scale_type, *s);
    else if (w.scale_bytes == 2)
        f = code_f32(w.scale_type, *(const uint16_t *)s);
    else if (w.scale_bytes == 4)
        f = *(const float *)s;
    *zero = w.zero_type == NUM_NONE  ? 0.0f
            : w.zero_type == NUM_F32 ? ((const float *)z)[cell]
                                     : (float)((const int8_t *)z)[cell];
    return f * ((const float *)(w.mem + w.alpha_off))[n];
}

/* Columns 8c..8c+7 of row n; n below panels * 16, 8c below Kp. lut: w.lut in shared memory. */
static __device__ __forceinline__ void weights8(const gpu_panels &w, const float *lut, int64_t n,
                                                int64_t c, float *v)
{
    const uint8_t *panel = w.mem + w.codes_off + (size_t)(n / PANEL) * w.panel_bytes;
    stored8(w, lut, panel, (int)(n % PANEL), c, v);
    int64_t g = w.groups > 1 ? (uint32_t)(8 * c) / (uint32_t)w.group : 0;
    float zero, s = scale_of(w, n, g < w.groups ? g : w.groups - 1, &zero);
    for (int i = 0; i < 8; i++)
        v[i] = (v[i] - zero) * s;
}

static __device__ __forceinline__ void share_lut(const gpu_panels &w, float *lut)
{
    if (threadIdx.x < 16) lut[threadIdx.x] = w.lut[threadIdx.x];
    __syncthreads();
}

/* ---- inputs -------------------------------------------------------------------------------------
 */

static __device__ __forceinline__ bool act_is_nvfp4(const gpu_act &p)
{
    return p.a_scale != QS_MX && p.a_type == NUM_F4_E2M1;
}
static __device__ __forceinline__ bool act_is_int(const gpu_act &p)
{
    return p.a_type >= NUM_I2 && p.a_type <= NUM_I8;
}

/* amax of elements at, at+step ... of n; NaN counts for nothing, as in the twin. */
static __device__ __forceinline__ float amax_of(const float *v, int64_t n, int at, int step)
{
    float m = 0;
    for (int64_t i = at; i < n; i += step)
        m = fabsf(v[i]) > m ? fabsf(v[i]) : m;
    return m;
}

/* One group whose largest magnitude is amax; all: that of the row (nvfp4). E2M1 has no NaN: it is
 * kept beside it. */
static __device__ __forceinline__ void emulate(const gpu_act &p, float *v, int64_t n, int at,
                                               int step, float amax, float all)
{
    if (p.a_scale == QS_MX) {
        if (!(amax > 0)) return;
        float s = e8m0_f32(mx_scale(amax, p.a_type == NUM_F4_E2M1 ? 2 : 8));
        for (int64_t i = at; i < n; i += step)
            if (v[i] == v[i]) v[i] = round_f32(p.a_type, v[i] / s) * s;
    } else if (p.a_type == NUM_F4_E2M1) {
        float g = p.in_global > 0 ? 1.0f / p.in_global : all > 0 ? 2688.0f / all : 1.0f;
        float s = round_f32(NUM_F8_E4M3, g * amax / 6.0f);
        if (!(s > 0)) s = 0.125f;
        for (int64_t i = at; i < n; i += step)
            if (v[i] == v[i]) v[i] = round_f32(NUM_F4_E2M1, v[i] / (s / g)) * s / g;
    } else if (act_is_int(p)) {
        int bits = p.a_type - NUM_I2 + 2;
        float half = (float)((1 << bits) - 1) / 2, lo = (float)-(1 << (bits - 1)), hi = -lo - 1;
        float s = p.in_scale > 0 ? p.in_scale : amax / half;
        if (!(s > 0)) return;
        for (int64_t i = at; i < n; i += step) {
            float q = rintf(v[i] / s);
            if (p.in_zero != 0) q += p.in_zero; /* -0 stays what it is */
            q = q < lo ? lo : q > hi ? hi : q;
            v[i] = (q - p.in_zero) * s;
        }
    } else {
        float s =
            p.in_scale > 0 ? p.in_scale : amax / (p.a_type == NUM_F8_E4M3 ? 448.0f : 57344.0f);
        if (!(s > 0)) return;
        for (int64_t i = at; i < n; i += step)
            v[i] = round_f32(p.a_type, v[i] / s) * s;
    }
}

/* A block is a row; groups that are not the whole row belong to warps. */
static __global__ void __launch_bounds__(THREADS, 2) act_kernel(gpu_act_run g)
{
    const gpu_act &p = g.plan;
    const int tid = (int)threadIdx.x, warp = tid / 32, at = tid % 32;
    const int64_t m = blockIdx.x, row = g.ids ? g.ids[m] : m;
    float *v = g.out + m * p.Kp;
    for (int64_t k = tid; k < p.Kp; k += THREADS) {
        float x = 0;
        if (k < p.K) {
            int64_t from = p.perm ? p.perm[k] : k;
            x = lane(g.x, row * g.ldx + from);
            if (p.pre_scale) x *= p.pre_scale[from];
            if (p.round_bf16) x = bf16_f32(f32_bf16(x));
        }
        v[k] = x;
    }
    if (p.a_type == NUM_NONE) return;
    __syncthreads();
    bool nvfp4 = act_is_nvfp4(p), blocks = nvfp4 || p.a_scale == QS_MX;
    bool dynamic = nvfp4 ? !(p.in_global > 0) : !(p.in_scale > 0);
    int64_t group = nvfp4                                  ? 16
                    : blocks                               ? 32
                    : p.a_gran == Q_GROUP && p.a_group > 0 ? p.a_group
                                                           : p.K;
    bool whole = !blocks && group >= p.K;
    float all = dynamic && (nvfp4 || whole) ? block_max(amax_of(v, p.K, tid, THREADS)) : 0.0f;
    if (whole) {
        emulate(p, v, p.K, tid, THREADS, all, all);
        return;
    }
    for (int64_t k = warp * group; k < p.K; k += WARPS * group) {
        int64_t n = p.K - k < group ? p.K - k : group;
        float amax = blocks || dynamic ? warp_max(amax_of(v + k, n, at, 32)) : 0.0f;
        emulate(p, v + k, n, at, 32, amax, all);
    }
}

extern "C" const char *cuda_act_run(const void *args_, void *stream)
{
    const gpu_act_run *g = (const gpu_act_run *)args_;
    if (g->M < 1) return NULL;
    return LAUNCH(act_kernel, dim3((unsigned)g->M), dim3(THREADS), 0, stream, *g);
}

/* ---- products -----------------------------------------------------------------------------------
 */

/* What a block multiplies: rows [m0, m1) of a by a weight. */
struct plain_work {
    const float *a;
    int64_t Kp, m0, m1;
    const float *bias;
    gpu_x y;
    int64_t ldy;
};

static __device__ __forceinline__ void put_sum(const plain_work &k, int64_t m, int64_t n, float sum)
{
    put_lane(k.y, m * k.ldy + n, k.bias ? sum + k.bias[n] : sum);
}

/* MB rows of x from m0 on times one panel. Ends in step. */
template <int MB>
static __device__ void narrow(const gpu_panels &w, const float *lut, const plain_work &k,
                              int64_t panel)
{
    __shared__ float part[WARPS][MB][PANEL];
    const int tid = (int)threadIdx.x, r = tid % PANEL;
    float acc[MB];
    for (int m = 0; m < MB; m++)
        acc[m] = 0;
    for (int64_t c = tid / PANEL; c < k.Kp / 8; c += THREADS / PANEL) {
        float v[8], a[8];
        weights8(w, lut, panel * PANEL + r, c, v);
        for (int m = 0; m < MB; m++) {
            if (k.m0 + m >= k.m1) break;
            load8(k.a + (k.m0 + m) * k.Kp + 8 * c, a);
            float s = 0;
            for (int i = 0; i < 8; i++)
                s += v[i] * a[i];
            acc[m] += s;
        }
    }
    for (int m = 0; m < MB; m++) {
        acc[m] += __shfl_xor_sync(0xffffffffu, acc[m], 16);
        if (tid % 32 < PANEL) part[tid / 32][m][r] = acc[m];
    }
    __syncthreads();
    if (tid < MB * PANEL) {
        int64_t m = k.m0 + tid / PANEL, n = panel * PANEL + r;
        float sum = 0;
        for (int i = 0; i < WARPS; i++)
            sum += part[i][tid / PANEL][r];
        if (m < k.m1 && n < w.N) put_sum(k, m, n, sum);
    }
    __syncthreads();
}

/* 32 columns of 64 rows of W and of x, columns first. */
struct plain_tiles {
    float w[STEP][TILE + 1], x[STEP][TILE + 1];
};

/* Thread (i, j) of 16 x 16 has rows i, i+16 ... of x and rows j, j+16 ... of W. */
static __device__ __forceinline__ void multiply(const plain_tiles &t, float acc[4][4])
{
    const int j = (int)threadIdx.x % 16, i = (int)threadIdx.x / 16;
    float s[4][4] = {{0}};
    for (int k = 0; k < STEP; k++)
        for (int a = 0; a < 4; a++)
            for (int b = 0; b < 4; b++)
                s[a][b] += t.x[k][i + 16 * a] * t.w[k][j + 16 * b];
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++)
            acc[a][b] += s[a][b];
}

/* 64 rows of x from m0 on times four panels. Ends in step. */
static __device__ void wide(const gpu_panels &w, const float *lut, const plain_work &k,
                            int64_t panel0)
{
    __shared__ plain_tiles t;
    const int tid = (int)threadIdx.x, r = tid % 16, c = tid / 16 % 4, row = tid / 64 * PANEL + r;
    float acc[4][4] = {{0}};
    for (int64_t k0 = 0; k0 < k.Kp; k0 += STEP) {
        float v[8] = {0};
        if (panel0 + tid / 64 < w.panels) weights8(w, lut, panel0 * PANEL + row, k0 / 8 + c, v);
        for (int i = 0; i < 8; i++)
            t.w[8 * c + i][row] = v[i];
        for (int i = tid; i < STEP * TILE; i += THREADS) {
            int64_t m = k.m0 + i / STEP;
            t.x[i % STEP][i / STEP] = m < k.m1 ? k.a[m * k.Kp + k0 + i % STEP] : 0.0f;
        }
        __syncthreads();
        multiply(t, acc);
        __syncthreads();
    }
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++) {
            int64_t m = k.m0 + tid / 16 + 16 * a, n = panel0 * PANEL + tid % 16 + 16 * b;
            if (m < k.m1 && n < w.N) put_sum(k, m, n, acc[a][b]);
        }
}

template <int MB> static __global__ void __launch_bounds__(THREADS) narrow_kernel(gpu_product p)
{
    __shared__ float lut[16];
    share_lut(p.w, lut);
    plain_work k = {p.a, p.w.Kp, (int64_t)blockIdx.y * MB, p.M, p.bias, p.y, p.ldy};
    narrow<MB>(p.w, lut, k, blockIdx.x);
}
static __global__ void __launch_bounds__(THREADS, 2) wide_kernel(gpu_product p)
{
    __shared__ float lut[16];
    share_lut(p.w, lut);
    plain_work k = {p.a, p.w.Kp, (int64_t)blockIdx.y * TILE, p.M, p.bias, p.y, p.ldy};
    wide(p.w, lut, k, (int64_t)blockIdx.x * (TILE / PANEL));
}

static unsigned tiles_of(int64_t n, int64_t tile)
{
    return (unsigned)((n + tile - 1) / tile);
}
static const char *refuse(const float *a, int64_t rows)
{
    if ((uintptr_t)a % 16) return "product: the input is not aligned to 16 bytes";
    if (rows > (int64_t)65535 * TILE) return "product: more than 4194240 rows";
    return NULL;
}

extern "C" const char *cuda_product(const void *args_, void *stream)
{
    const gpu_product *p = (const gpu_product *)args_;
    if (p->M < 1 || p->w.N < 1) return NULL;
    const char *why = refuse(p->a, p->M);
    if (why) return why;
    unsigned panels = (unsigned)p->w.panels;
    if (p->M == 1) return LAUNCH(narrow_kernel<1>, dim3(panels), dim3(THREADS), 0, stream, *p);
    if (p->M <= FEW)
        return LAUNCH(narrow_kernel<8>, dim3(panels, tiles_of(p->M, 8)), dim3(THREADS), 0, stream,
                      *p);
    return LAUNCH(wide_kernel, dim3(tiles_of(panels, TILE / PANEL), tiles_of(p->M, TILE)),
                  dim3(THREADS), 0, stream, *p);
}

/* ---- experts ------------------------------------------------------------------------------------
 * Block (panels, expert, z) takes tiles z, z + gridDim.z ... of the rows of its expert, whose
 * number only the device knows; none = done. */

static __device__ __forceinline__ plain_work work_of(const gpu_experts &p, int e)
{
    const float *bias = p.bias ? p.bias[e] : NULL;
    return plain_work{p.a, p.Kp, p.first[e], p.first[e + 1], bias, p.y, p.ldy};
}

static __global__ void __launch_bounds__(THREADS) experts_narrow(gpu_experts p)
{
    __shared__ float lut[16];
    const int e = (int)blockIdx.y;
    plain_work k = work_of(p, e);
    k.m0 += (int64_t)blockIdx.z * 8;
    if (k.m0 >= k.m1) return;
    const gpu_panels &w = p.w[e];
    share_lut(w, lut);
    for (; k.m0 < k.m1; k.m0 += (int64_t)gridDim.z * 8)
        if (k.m1 - k.m0 == 1)
            narrow<1>(w, lut, k, blockIdx.x);
        else
            narrow<8>(w, lut, k, blockIdx.x);
}
static __global__ void __launch_bounds__(THREADS, 2) experts_wide(gpu_experts p)
{
    __shared__ float lut[16];
    const int e = (int)blockIdx.y;
    plain_work k = work_of(p, e);
    k.m0 += (int64_t)blockIdx.z * TILE;
    if (k.m0 >= k.m1) return;
    const gpu_panels &w = p.w[e];
    share_lut(w, lut);
    for (; k.m0 < k.m1; k.m0 += (int64_t)gridDim.z * TILE)
        wide(w, lut, k, (int64_t)blockIdx.x * (TILE / PANEL));
}

/* Tiles in flight for each expert: twice what they have when all have the same. */
static unsigned depth_of(const gpu_experts *p, int64_t tile)
{
    int64_t even = 2 * p->slots / ((int64_t)p->E * tile) + 1, most = tiles_of(p->slots, tile);
    int64_t z = even < most ? even : most;
    return (unsigned)(z < 65535 ? z : 65535);
}

extern "C" const char *cuda_experts(const void *args_, void *stream)
{
    const gpu_experts *p = (const gpu_experts *)args_;
    if (p->slots < 1 || p->E < 1 || p->N < 1) return NULL;
    const char *why = refuse(p->a, 0);
    if (why) return why;
    if (p->E > 65535) return "experts: more than 65535";
    unsigned E = (unsigned)p->E;
    if (p->slots <= FEW * (int64_t)E)
        return LAUNCH(experts_narrow, dim3(tiles_of(p->N, PANEL), E, depth_of(p, 8)), dim3(THREADS),
                      0, stream, *p);
    return LAUNCH(experts_wide, dim3(tiles_of(p->N, TILE), E, depth_of(p, TILE)), dim3(THREADS), 0,
                  stream, *p);
}

/* ---- rows ---------------------------------------------------------------------------------------
 */

static __global__ void __launch_bounds__(THREADS) embed_kernel(gpu_embed p)
{
    __shared__ float lut[16];
    share_lut(p.w, lut);
    int64_t t = blockIdx.x, c = (int64_t)blockIdx.y * THREADS + threadIdx.x;
    if (8 * c >= p.w.K) return;
    float v[8];
    weights8(p.w, lut, p.ids[t], c, v);
    for (int i = 0; i < 8 && 8 * c + i < p.w.K; i++)
        put_lane(p.out, t * p.w.K + 8 * c + i, v[i]);
}

extern "C" const char *cuda_embed(const void *args_, void *stream)
{
    const gpu_embed *p = (const gpu_embed *)args_;
    if (p->T < 1) return NULL;
    return LAUNCH(embed_kernel, dim3((unsigned)p->T, tiles_of(p->w.K, 8 * THREADS)), dim3(THREADS),
                  0, stream, *p);
}

/* ---- matrices of heads --------------------------------------------------------------------------
 */

static __device__ __forceinline__ float plain_at(const void *w, int type, int64_t i)
{
    if (type == NUM_F32) return ((const float *)w)[i];
    uint16_t h = ((const uint16_t *)w)[i];
    return type == NUM_BF16 ? bf16_f32(h) : f16_f32(h);
}

/* A warp is a row of W, for up to 8 tokens. */
static __global__ void __launch_bounds__(THREADS) head_narrow(gpu_head_matmul p)
{
    const int at = (int)threadIdx.x % 32;
    int64_t h = blockIdx.y, n = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (n >= p.N) return;
    float acc[8] = {0};
    for (int64_t k = at; k < p.K; k += 32) {
        float w = plain_at(p.w, p.w_type, (h * p.N + n) * p.K + k);
        for (int t = 0; t < 8; t++)
            if (t < p.T) acc[t] += w * lane(p.x, t * p.ldx + h * p.ldh + k);
    }
    for (int t = 0; t < 8; t++) {
        float sum = warp_sum(acc[t]);
        if (at == 0 && t < p.T) put_lane(p.out, t * p.ldo + h * p.ldoh + n, sum);
    }
}

static __global__ void __launch_bounds__(THREADS, 2) head_wide(gpu_head_matmul p)
{
    __shared__ plain_tiles s;
    const int tid = (int)threadIdx.x;
    int64_t h = blockIdx.y, n0 = (int64_t)blockIdx.x * TILE, t0 = (int64_t)blockIdx.z * TILE;
    float acc[4][4] = {{0}};
    for (int64_t k0 = 0; k0 < p.K; k0 += STEP) {
        for (int i = tid; i < STEP * TILE; i += THREADS) {
            int64_t k = k0 + i % STEP, n = n0 + i / STEP, t = t0 + i / STEP;
            s.w[i % STEP][i / STEP] =
                k < p.K && n < p.N ? plain_at(p.w, p.w_type, (h * p.N + n) * p.K + k) : 0.0f;
            s.x[i % STEP][i / STEP] =
                k < p.K && t < p.T ? lane(p.x, t * p.ldx + h * p.ldh + k) : 0.0f;
        }
        __syncthreads();
        multiply(s, acc);
        __syncthreads();
    }
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++) {
            int64_t t = t0 + tid / 16 + 16 * a, n = n0 + tid % 16 + 16 * b;
            if (t < p.T && n < p.N) put_lane(p.out, t * p.ldo + h * p.ldoh + n, acc[a][b]);
        }
}

extern "C" const char *cuda_head_matmul(const void *args_, void *stream)
{
    const gpu_head_matmul *p = (const gpu_head_matmul *)args_;
    if (p->T < 1 || p->H < 1 || p->N < 1) return NULL;
    if (p->w_type != NUM_F32 && p->w_type != NUM_F16 && p->w_type != NUM_BF16)
        return "head_matmul: weights are neither f32 nor f16 nor bf16";
    if (p->H > 65535 || p->T > (int64_t)65535 * TILE) return "head_matmul: too many heads or rows";
    unsigned H = (unsigned)p->H;
    if (p->T <= 8)
        return LAUNCH(head_narrow, dim3(tiles_of(p->N, WARPS), H), dim3(THREADS), 0, stream, *p);
    return LAUNCH(head_wide, dim3(tiles_of(p->N, TILE), H, tiles_of(p->T, TILE)), dim3(THREADS), 0,
                  stream, *p);
}
