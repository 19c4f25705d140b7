/* Instances of rows.cuh, the plan of a shape, tensor maps, and launching. */
#include "kern/cuda/rows.h"
#include "kern/cuda/rows.cuh"
#include <cuda.h>
#include <stdio.h>
#include <string.h>

typedef void rows_fn(const rows_args);
typedef struct entry {
    int m; /* up to */
    int threads_beside, most_warps;
    rows_fn *kernel[ROWS_FORMATS], *block; /* the last: e4m3 */
} entry;

#define ROW(MT)                                                                                    \
    {                                                                                              \
        MT, (1 + rows_shape<MT>::x_warps) * 32, rows_shape<MT>::most_warps,                        \
            {rows_kernel<rows_bf16, MT, false>, rows_kernel<rows_e4m3, MT, false>,                 \
             rows_kernel<rows_int8, MT, false>},                                                   \
            rows_kernel<rows_e4m3, MT, true>                                                       \
    }
static const entry entries[] = {ROW(1), ROW(8), ROW(16), ROW(32), ROW(64)};

static const int bytes_of[ROWS_FORMATS] = {2, 1, 1};
static const int smem_limit = 227 * 1024;

static const entry *find(int M)
{
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (M <= entries[i].m) return &entries[i];
    return NULL;
}

static int over(int n, int by)
{
    return (n + by - 1) / by;
}

typedef struct fit { /* what a plan's shared memory holds; ws 0: it does not fit */
    int ws, xs, resident;
    rows_mem mem;
} fit;

/* x stays where that leaves enough room for the stream of W. */
static fit fit_of(rows_format f, rows_plan p, int K, int M)
{
    const int cols = ROWS_CHUNK / bytes_of[f] * p.chunks, mt = find(M)->m;
    const int each = over(over(K, ROWS_CHUNK / bytes_of[f]), p.split),
              stages = over(each, p.chunks);
    rows_mem m = rows_layout(mt, cols, f == ROWS_E4M3, p.groups, p.chunks, p.split, 0, 0);
    const int w = (int)m.w_stage + 16, x = (int)m.x_slot + 16, room = smem_limit - (int)m.end;
    fit r = {0, 0, 0, m};
    const int64_t kept = (int64_t)stages * x;
    r.resident = kept <= room - (w * 3 > 80 * 1024 ? w * 3 : 80 * 1024);
    r.ws = r.resident ? (room - (int)kept) / w : room / (w + x);
    if (r.ws > 16) r.ws = 16;
    r.xs = r.resident ? stages : r.ws;
    r.mem = rows_layout(mt, cols, f == ROWS_E4M3, p.groups, p.chunks, p.split, r.ws, r.xs);
    return r;
}

extern "C" int rows_has(rows_format f, rows_plan p, int K, int M)
{
    if (M < 1 || M > ROWS_MAX_M || p.groups < 1 || p.chunks < 1 || p.groups > 16 || p.chunks > 16)
        return 0;
    if (p.split != 1 && p.split != 2 && p.split != 4 && p.split != 8) return 0;
    const int all = over(K, ROWS_CHUNK / bytes_of[f]);
    if ((p.split - 1) * over(all, p.split) >= all) return 0; /* a block without work */
    return 2 * p.chunks * p.groups <= find(M)->most_warps && fit_of(f, p, K, M).ws >= 2;
}

/* Bytes that the busiest multiprocessor takes in, x from the L2 counted half; with a charge for
 * clusters and for rows read in pieces of 128 bytes. The chip holds 132 blocks of 1, 66 clusters of
 * 2, 30 of 4, 15 of 8. */
static double cost(rows_format f, rows_plan p, int N, int K, int M)
{
    static const int slots[] = {0, 132, 66, 0, 30, 0, 0, 0, 15};
    static const double charge[] = {0, 1.0, 1.1, 0, 1.2, 0, 0, 0, 1.4};
    const int tiles = over(N, p.groups * ROWS_BOX), rounds = over(tiles, slots[p.split]);
    const int each = over(over(K, ROWS_CHUNK / bytes_of[f]), p.split);
    const double w = (double)rounds * p.groups * ROWS_BOX * each * ROWS_CHUNK;
    const double x = (double)M * each * (ROWS_CHUNK / bytes_of[f]) * 2;
    return (w + 0.5 * x * (fit_of(f, p, K, M).resident ? 1 : rounds)) * charge[p.split] *
           (p.chunks > 1 ? 1.0 : 1.03);
}

extern "C" rows_plan rows_choose(rows_format f, int N, int K, int M)
{
    rows_plan best = {0, 0, 0};
    double least = 0;
    for (int split = 1; split <= 8; split *= 2)
        for (int groups = 1; groups <= 7; groups++)
            for (int chunks = 4; chunks >= 1; chunks /= 2) {
                const rows_plan p = {groups, chunks, split};
                if (!rows_has(f, p, K, M)) continue;
                const double c = cost(f, p, N, K, M);
                if (best.groups == 0 || c < least) best = p, least = c;
                break; /* longer pieces of a row are better */
            }
    return best;
}

/* ---- weights ------------------------------------------------------------------------------------
 */

static const char *words(cudaError_t rc)
{
    return rc == cudaSuccess ? NULL : cudaGetErrorString(rc);
}

static const char *refuse_weight(rows_format f, const void *w, int64_t ldw, int64_t N, int64_t K)
{
    static thread_local char why[128];
    why[0] = 0;
    if (f < 0 || f >= ROWS_FORMATS)
        snprintf(why, sizeof why, "no weight format %d", (int)f);
    else if (N < 1 || K < 1 || N > 1 << 30 || K > 1 << 24)
        snprintf(why, sizeof why, "a weight of %lld x %lld", (long long)N, (long long)K);
    else if (K * bytes_of[f] % 16)
        snprintf(why, sizeof why, "K = %lld is not a multiple of %d", (long long)K,
                 16 / bytes_of[f]);
    else if (ldw < K || ldw * bytes_of[f] % 16 || (uintptr_t)w % 16)
        snprintf(why, sizeof why, "rows of the weight are not aligned to 16 bytes");
    return *why ? why : NULL;
}

typedef CUresult encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                           const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                           const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

extern "C" const char *rows_prepare(rows_weight *out, rows_format f, const void *w, int64_t ldw,
                                    int64_t N, int64_t K)
{
    const char *why = refuse_weight(f, w, ldw, N, K);
    if (why) return why;
    void *fn = NULL;
    cudaDriverEntryPointQueryResult found;
    cudaError_t rc = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000,
                                                      cudaEnableDefault, &found);
    if (rc != cudaSuccess) return cudaGetErrorString(rc);
    if (found != cudaDriverEntryPointSuccess || !fn) return "the driver has no tensor maps";
    CUtensorMap map;
    const cuuint64_t size[2] = {(cuuint64_t)K, (cuuint64_t)N};
    const cuuint64_t stride[1] = {(cuuint64_t)(ldw * bytes_of[f])};
    const cuuint32_t box[2] = {(cuuint32_t)(ROWS_CHUNK / bytes_of[f]), ROWS_BOX}, each[2] = {1, 1};
    CUresult got = ((encode_fn *)fn)(
        &map, f == ROWS_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 2,
        (void *)(uintptr_t)w, size, stride, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (got != CUDA_SUCCESS) return "the driver refuses a tensor map of the weight";
    static_assert(sizeof map == sizeof out->map, "a tensor map has 128 bytes");
    memcpy(out->map, &map, sizeof map);
    out->format = f;
    out->N = (int)N;
    out->K = (int)K;
    return NULL;
}

/* ---- launching ----------------------------------------------------------------------------------
 */

static rows_plan plan_of(const rows_call *c)
{
    return c->plan.groups ? c->plan : rows_choose(c->w->format, c->w->N, c->w->K, c->M);
}

extern "C" const char *rows_refuse(const rows_call *c)
{
    static thread_local char why[128];
    why[0] = 0;
    if (c->M < 1 || c->M > ROWS_MAX_M)
        snprintf(why, sizeof why, "M = %d, made for 1 to %d", c->M, ROWS_MAX_M);
    else if (c->ldx % 8 || (uintptr_t)c->x % 16)
        snprintf(why, sizeof why, "x is not aligned to 16 bytes");
    else if (c->scales == ROWS_BLOCK && c->w->format != ROWS_E4M3)
        snprintf(why, sizeof why, "block scales are made for e4m3");
    else if ((c->scales == ROWS_UNSCALED) != !c->scale)
        snprintf(why, sizeof why, "%s", c->scale ? "scales of no kind" : "no scales");
    else if (c->x_scale && c->scales != ROWS_BLOCK)
        snprintf(why, sizeof why, "x has scales of 128 columns, the weight has none");
    else if (!rows_has(c->w->format, plan_of(c), c->w->K, c->M)) {
        const rows_plan p = plan_of(c);
        snprintf(why, sizeof why, "no kernel of %d groups, %d chunks, K = %d cut in %d, M = %d",
                 p.groups, p.chunks, c->w->K, p.split, c->M);
    }
    return *why ? why : NULL;
}

static rows_args args_of(const rows_call *c, rows_plan p, fit f, int step)
{
    rows_args a;
    memcpy(a.map.v, c->w->map, sizeof a.map.v);
    a.x = (const uint16_t *)c->x;
    a.scale = c->scale;
    a.bias = c->bias;
    a.row_scale = c->row_scale;
    a.x_scale = c->x_scale;
    a.y = c->y;
    a.ldx = c->ldx, a.ld_x_scale = c->ld_x_scale, a.ldy = c->ldy;
    a.N = c->w->N, a.K = c->w->K, a.M = c->M, a.y_bf16 = c->y_bf16;
    a.scale_step = c->scales == ROWS_ROW;
    a.groups = p.groups, a.chunks = p.chunks, a.split = p.split;
    a.step = step;
    a.rows = p.groups * ROWS_BOX;
    a.all = over(c->w->K, ROWS_CHUNK / bytes_of[c->w->format]);
    a.each = over(a.all, p.split);
    a.ws = f.ws, a.xs = f.xs, a.resident = f.resident;
    a.mem = f.mem;
    return a;
}

/* Blocks, or clusters, that the device holds at once; takes the attribute of clusters in. */
static cudaError_t room(rows_fn *kernel, cudaLaunchConfig_t *cfg, int split, int *most)
{
    int device = 0;
    cudaError_t rc = cudaGetDevice(&device);
    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(most, cudaDevAttrMultiProcessorCount, device);
    if (rc == cudaSuccess)
        rc = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)cfg->dynamicSmemBytes);
    if (rc != cudaSuccess || split == 1) return rc;
    cfg->attrs[0].id = cudaLaunchAttributeClusterDimension;
    cfg->attrs[0].val.clusterDim.x = (unsigned)split;
    cfg->attrs[0].val.clusterDim.y = cfg->attrs[0].val.clusterDim.z = 1;
    cfg->numAttrs = 1;
    cfg->gridDim = dim3((unsigned)(*most / split * split));
    return cudaOccupancyMaxActiveClusters(most, kernel, cfg);
}

extern "C" const char *rows_run(const rows_call *c)
{
    const char *why = rows_refuse(c);
    if (why) return why;
    const rows_plan p = plan_of(c);
    const fit f = fit_of(c->w->format, p, c->w->K, c->M);
    const entry *e = find(c->M);
    rows_fn *kernel = c->scales == ROWS_BLOCK ? e->block : e->kernel[c->w->format];
    cudaLaunchAttribute at[2];
    cudaLaunchConfig_t cfg = {};
    int most = 0;
    cfg.blockDim = dim3((unsigned)(2 * p.chunks * p.groups * 32 + e->threads_beside));
    cfg.dynamicSmemBytes = f.mem.end;
    cfg.stream = (cudaStream_t)c->stream;
    cfg.attrs = at;
    cudaError_t rc = room(kernel, &cfg, p.split, &most);
    if (rc != cudaSuccess) return cudaGetErrorString(rc);
    if (most < 1) return "no block of this size fits the device";
    /* The same number of tiles for every block, as far as it goes. */
    const int tiles = over(c->w->N, p.groups * ROWS_BOX), each = over(tiles, most);
    const int step = over(tiles, each);
    cfg.gridDim = dim3((unsigned)(step * p.split));
    if (c->pdl) {
        at[cfg.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        at[cfg.numAttrs].val.programmaticStreamSerializationAllowed = 1;
        cfg.numAttrs++;
    }
    return words(cudaLaunchKernelEx(&cfg, kernel, args_of(c, p, f, step)));
}
