/* Instances of rows.cuh, the plan of a shape, tensor maps, and launching. */
#include "kern/cuda/rows.cuh"
#include <cuda.h>
#include <string.h>

typedef void rows_fn(const rows_args);
typedef struct entry {
    int m; /* up to */
    int threads_beside;
    rows_fn *kernel[ROWS_FORMATS], *block; /* the last: e4m3 */
} entry;

#define ROW(MT, BLOCK_MT)                                                                          \
    {                                                                                              \
        MT, (1 + rows_shape<MT>::x_warps) * 32,                                                    \
            {rows_kernel<rows_bf16, MT, false>, rows_kernel<rows_e4m3, MT, false>,                 \
             rows_kernel<rows_int8, MT, false>},                                                   \
            rows_kernel<rows_e4m3, BLOCK_MT, true>                                                 \
    }
static const entry entries[] = {ROW(1, 1), ROW(8, 8), ROW(16, 16), ROW(32, 32),
                                ROW(64, 32)}; /* the last block: refused */

static const entry *find(int M)
{
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (M <= entries[i].m) return &entries[i];
    return NULL;
}

extern "C" int rows_has(rows_format f, rows_plan p, int K, int M)
{
    return rows_plan_fits(f, p, K, M);
}

extern "C" rows_plan rows_choose(rows_format f, int N, int K, int M)
{
    return rows_plan_for(f, N, K, M);
}

/* ---- weights ------------------------------------------------------------------------------------
 */

static const char *words(cudaError_t rc)
{
    return rc == cudaSuccess ? NULL : cudaGetErrorString(rc);
}

typedef CUresult encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                           const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                           const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

extern "C" const char *rows_prepare(rows_weight *out, rows_format f, const void *w, int64_t ldw,
                                    int64_t N, int64_t K)
{
    const char *why = rows_refuse_weight(f, w, ldw, N, K);
    if (why) return why;
    void *fn = NULL;
    cudaDriverEntryPointQueryResult found;
    cudaError_t rc = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000,
                                                      cudaEnableDefault, &found);
    if (rc != cudaSuccess) return cudaGetErrorString(rc);
    if (found != cudaDriverEntryPointSuccess || !fn) return "the driver has no tensor maps";
    CUtensorMap map;
    const cuuint64_t size[2] = {(cuuint64_t)K, (cuuint64_t)N};
    const cuuint64_t stride[1] = {(cuuint64_t)(ldw * rows_element(f))};
    const cuuint32_t box[2] = {(cuuint32_t)(ROWS_CHUNK / rows_element(f)), ROWS_BOX},
                     each[2] = {1, 1};
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
    out->at = w;
    out->ld = ldw;
    return NULL;
}

/* ---- launching ----------------------------------------------------------------------------------
 */

extern "C" const char *rows_refuse(const rows_call *c)
{
    return rows_refuse_call(c);
}

static rows_args args_of(const rows_call *c, rows_plan p, rows_fit f, int step)
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
    a.all = rows_over(c->w->K, ROWS_CHUNK / rows_element(c->w->format));
    a.each = rows_over(a.all, p.split);
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
    const rows_plan p = rows_plan_of(c);
    const rows_fit f = rows_fit_of(c->w->format, p, c->w->K, c->M);
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
    const int tiles = rows_over(c->w->N, p.groups * ROWS_BOX), each = rows_over(tiles, most);
    const int step = rows_over(tiles, each);
    cfg.gridDim = dim3((unsigned)(step * p.split));
    if (c->pdl) {
        at[cfg.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        at[cfg.numAttrs].val.programmaticStreamSerializationAllowed = 1;
        cfg.numAttrs++;
    }
    return words(cudaLaunchKernelEx(&cfg, kernel, args_of(c, p, f, step)));
}
