/* Instances of wide.cuh, the plan of a shape, and launching. Plans were measured on an H200
 * (bench/NOTES.md). */
#include "kern/cuda/wide.h"
#include "kern/cuda/wide.cuh"
#include <stdio.h>
#include <string.h>

typedef struct entry {
    small_format format;
    int tokens, groups, share, per_sm;
    size_t smem;
    float base;
    void (*kernel)(const wide_args);
} entry;

#define ROW(F, W, TOKENS, GROUPS, XB, XS, WS, CHUNK, SHARE)                                        \
    {                                                                                              \
        F, TOKENS, GROUPS, SHARE, wide_cfg<TOKENS, GROUPS, XB, XS, WS, CHUNK, SHARE>::per_sm,      \
            wide_shape<W, wide_cfg<TOKENS, GROUPS, XB, XS, WS, CHUNK, SHARE>>::smem, W::base,      \
            wide_kernel<W, wide_cfg<TOKENS, GROUPS, XB, XS, WS, CHUNK, SHARE>>                     \
    }
#define FOUR_BITS(F, W)                                                                            \
    ROW(F, W, 16, 4, 8, 4, 6, 2, 1), ROW(F, W, 64, 4, 2, 5, 6, 2, 1),                              \
        ROW(F, W, 128, 4, 2, 4, 4, 2, 1)
#define EIGHT_BITS(F, W) ROW(F, W, 16, 4, 8, 4, 5, 1, 1), ROW(F, W, 64, 3, 2, 4, 5, 1, 1)
static const entry entries[] = {
    ROW(SMALL_INT4, w_int4, 16, 2, 8, 4, 12, 2, 1),
    ROW(SMALL_INT4, w_int4, 16, 3, 8, 4, 10, 2, 1),
    ROW(SMALL_INT4, w_int4, 16, 4, 8, 4, 8, 2, 1),
    ROW(SMALL_INT4, w_int4, 32, 2, 4, 4, 12, 2, 1),
    ROW(SMALL_INT4, w_int4, 32, 3, 4, 4, 10, 2, 1),
    ROW(SMALL_INT4, w_int4, 32, 4, 4, 4, 8, 2, 1),
    ROW(SMALL_INT4, w_int4, 64, 2, 2, 6, 12, 2, 1),
    ROW(SMALL_INT4, w_int4, 64, 3, 2, 6, 10, 2, 1),
    ROW(SMALL_INT4, w_int4, 64, 4, 2, 5, 8, 2, 1),
    ROW(SMALL_INT4, w_int4, 128, 4, 2, 4, 4, 2, 1),
    ROW(SMALL_INT4, w_int4, 128, 4, 2, 4, 4, 2, 2),
    ROW(SMALL_INT4, w_int4, 128, 2, 1, 4, 4, 2, 1),
    ROW(SMALL_INT4, w_int4, 128, 2, 1, 4, 4, 2, 2),
    ROW(SMALL_INT4, w_int4, 256, 2, 1, 6, 4, 2, 1),
    ROW(SMALL_INT4, w_int4, 256, 2, 1, 6, 4, 2, 2),
    ROW(SMALL_INT4_128_ZERO, w_int4_zero, 16, 3, 8, 4, 10, 2, 1),
    ROW(SMALL_INT4_128_ZERO, w_int4_zero, 16, 4, 8, 4, 8, 2, 1),
    ROW(SMALL_INT4_128_ZERO, w_int4_zero, 32, 4, 4, 4, 8, 2, 1),
    ROW(SMALL_INT4_128_ZERO, w_int4_zero, 64, 3, 2, 6, 10, 2, 1),
    ROW(SMALL_INT4_128_ZERO, w_int4_zero, 64, 4, 2, 5, 8, 2, 1),
    ROW(SMALL_INT4_128_ZERO, w_int4_zero, 128, 4, 2, 4, 4, 2, 1),
    FOUR_BITS(SMALL_INT4_64, w_int4_64),
    FOUR_BITS(SMALL_INT4_64_ZERO, w_int4_64_zero),
    FOUR_BITS(SMALL_INT4_32, w_int4_32),
    FOUR_BITS(SMALL_INT4_32_ZERO, w_int4_32_zero),
    EIGHT_BITS(SMALL_E4M3, w_e4m3),
    ROW(SMALL_E4M3, w_e4m3, 128, 4, 2, 3, 3, 1, 1),
    EIGHT_BITS(SMALL_E4M3_BLOCK, w_e4m3_block),
    ROW(SMALL_E4M3_BLOCK, w_e4m3_block, 128, 4, 2, 3, 3, 1, 1),
    EIGHT_BITS(SMALL_INT8, w_int8),
    ROW(SMALL_INT8, w_int8, 128, 4, 2, 3, 3, 1, 1),
    EIGHT_BITS(SMALL_INT8_GROUP, w_int8_group),
    ROW(SMALL_INT8_GROUP, w_int8_group, 128, 4, 2, 3, 3, 1, 1),
    ROW(SMALL_BF16, w_bf16, 16, 3, 8, 4, 3, 1, 1),
    ROW(SMALL_BF16, w_bf16, 64, 3, 2, 4, 3, 1, 1),
    FOUR_BITS(SMALL_MXFP4, w_mxfp4),
    FOUR_BITS(SMALL_NVFP4, w_nvfp4),
};

static const entry *find(small_format f, int tokens, int groups, int share)
{
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        const entry *e = &entries[i];
        if (e->format == f && e->tokens == tokens && e->groups == groups &&
            e->share == (share ? share : 1))
            return e;
    }
    return NULL;
}

static const entry *find_groups(small_format f, int tokens, int rows)
{
    for (int g = 1; g <= 4; g++) {
        const entry *e = find(f, tokens, g, 1);
        if (e && g * 4 >= rows) return e;
    }
    return NULL;
}

/* Cutting K pays as long as every block still gets its rows in one round: a cluster reads x once,
 * the chip holds 132 blocks of 1, 66 clusters of 2, 30 of 4. Of tiles of 64 tokens or less only
 * one is cut. */
static wide_plan choose_split(small_format f, int tokens, int tiles, int units, int token_tiles)
{
    static const int fit[][2] = {{4, 30}, {2, 66}, {1, 132}};
    for (auto &s : fit) {
        const int most = s[1] / token_tiles;
        if (units % s[0] || most < 1) continue;
        if (tokens < 128 && s[0] > 1 && token_tiles > 1) continue;
        const int rows = (tiles + most - 1) / most;
        const entry *e = find_groups(f, tokens, tokens < 128 || rows > 16 ? rows : 16);
        if (e) return {tokens, e->groups, s[0], 1};
    }
    for (int g = 4; g > 0; g--)
        if (find(f, tokens, g, 1)) return {tokens, g, 1, 1};
    return {0, 0, 0, 0};
}

extern "C" wide_plan wide_choose(small_format f, int N, int K, int M)
{
    const int tiles = N / SMALL_ROWS, units = K / SMALL_UNIT_K;
    if (M > 64 && find(f, 128, 4, 1)) return choose_split(f, 128, tiles, units, (M + 127) / 128);
    for (int tokens = 16; tokens <= 64; tokens *= 2)
        if ((M <= tokens || tokens == 64) && find_groups(f, tokens, 1))
            return choose_split(f, tokens, tiles, units, (M + tokens - 1) / tokens);
    return {0, 0, 0, 0};
}

extern "C" int wide_has(small_format f, wide_plan p, int K)
{
    return find(f, p.tokens, p.groups, p.share) && p.split >= 1 && p.split <= 8 &&
           (p.split == 1 || p.share <= 1) && K / SMALL_UNIT_K % p.split == 0;
}

static int round_up(int n, int to)
{
    return (n + to - 1) / to * to;
}

extern "C" size_t wide_work_bytes(int K, int M)
{
    return (size_t)round_up(M, 256) * (size_t)K * 2;
}

static int is_fine(small_format f)
{
    return small_fine(f);
}

extern "C" size_t wide_place(small_format f, int tokens, int K, int m, int k)
{
    const size_t row =
        ((size_t)(m / tokens) * (size_t)(K / 64) + (size_t)(k / 64)) * (size_t)tokens +
        (size_t)(m % tokens);
    int c = k % 64 / 16, h = k / 8 % 2, s = k / 2 % 4;
    if (is_fine(f)) c = k / 4 % 4, h = k / 2 % 2, s = k % 64 / 16;
    return row * 64 + (size_t)(((2 * s + h) ^ (m % tokens % 8)) * 8 + 2 * c + k % 2);
}

/* ---- launching ----------------------------------------------------------------------------------
 */

static void allow_early(cudaLaunchConfig_t *cfg, int pdl)
{
    if (!pdl) return;
    cfg->attrs[cfg->numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    cfg->attrs[cfg->numAttrs].val.programmaticStreamSerializationAllowed = 1;
    cfg->numAttrs++;
}

static const char *words(cudaError_t rc)
{
    return rc == cudaSuccess ? NULL : cudaGetErrorString(rc);
}

static wide_plan plan_of(const wide_call *c)
{
    return c->plan.tokens ? c->plan : wide_choose(c->format, c->N, c->K, c->M);
}

static const char *refuse(const wide_call *c)
{
    static thread_local char why[160];
    const wide_plan p = plan_of(c);
    why[0] = 0;
    if (c->format < 0 || c->format >= SMALL_FORMATS)
        snprintf(why, sizeof why, "no packed format has number %d", (int)c->format);
    else if (c->M < 1)
        snprintf(why, sizeof why, "M = %d", c->M);
    else if (c->N < SMALL_ROWS || c->N % SMALL_ROWS)
        snprintf(why, sizeof why, "N = %d is not a multiple of %d", c->N, SMALL_ROWS);
    else if (c->K < SMALL_UNIT_K || c->K % SMALL_UNIT_K)
        snprintf(why, sizeof why, "K = %d is not a multiple of %d", c->K, SMALL_UNIT_K);
    else if (c->x && (c->ldx % 2 || (uintptr_t)c->x % 4))
        snprintf(why, sizeof why, "x is not aligned to 4 bytes");
    else if (c->ldy % 4 || (uintptr_t)c->y % 16 || (uintptr_t)c->work % 128)
        snprintf(why, sizeof why, "y is not aligned to 16 bytes or work not to 128");
    else if ((uintptr_t)c->col_scale % 16 || (uintptr_t)c->bias % 16)
        snprintf(why, sizeof why, "col_scale or bias is not aligned to 16 bytes");
    else if (!wide_has(c->format, p, c->K))
        snprintf(
            why, sizeof why,
            "format %d has no kernel of %d tokens, %d groups, K = %d cut in %d, x shared by %d",
            (int)c->format, p.tokens, p.groups, c->K, p.split, p.share);
    return *why ? why : NULL;
}

extern "C" const char *wide_order(const wide_call *c)
{
    const char *why = refuse(c);
    if (why) return why;
    const wide_plan p = plan_of(c);
    const int padded = round_up(c->M, p.tokens);
    cudaLaunchAttribute at[1];
    cudaLaunchConfig_t cfg = {};
    cfg.blockDim = dim3(256);
    cfg.gridDim = dim3((unsigned)(((int64_t)padded * (c->K / 8) + 255) / 256));
    cfg.stream = (cudaStream_t)c->stream;
    cfg.attrs = at;
    allow_early(&cfg, c->pdl);
    return words(cudaLaunchKernelEx(&cfg, wide_order_kernel, (const __nv_bfloat16 *)c->x, c->ldx,
                                    (uint4 *)c->work, p.tokens, c->K, c->M, padded,
                                    is_fine(c->format)));
}

/* How many clusters of so many blocks the device holds at once. */
static cudaError_t room(const entry *e, cudaLaunchConfig_t *cfg, int cluster, int *most)
{
    int device = 0;
    cudaError_t rc = cudaGetDevice(&device);
    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(most, cudaDevAttrMultiProcessorCount, device);
    if (rc == cudaSuccess)
        rc = cudaFuncSetAttribute(e->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)e->smem);
    if (rc == cudaSuccess)
        rc = cudaFuncSetAttribute(e->kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);
    *most *= e->per_sm;
    if (rc != cudaSuccess || cluster == 1) return rc;
    cfg->attrs[0].id = cudaLaunchAttributeClusterDimension;
    cfg->attrs[0].val.clusterDim.x = (unsigned)cluster;
    cfg->attrs[0].val.clusterDim.y = cfg->attrs[0].val.clusterDim.z = 1;
    cfg->numAttrs = 1;
    cfg->gridDim = dim3((unsigned)(*most / cluster * cluster));
    return cudaOccupancyMaxActiveClusters(most, e->kernel, cfg);
}

extern "C" const char *wide_run(const wide_call *c)
{
    const char *why = c->x ? wide_order(c) : refuse(c);
    if (why) return why;
    const wide_plan p = plan_of(c);
    const entry *e = find(c->format, p.tokens, p.groups, p.share);
    const int cluster = p.split * e->share;
    cudaLaunchAttribute at[2];
    cudaLaunchConfig_t cfg = {};
    int most = 0;
    cfg.blockDim = dim3((unsigned)e->groups * 128);
    cfg.dynamicSmemBytes = e->smem;
    cfg.stream = (cudaStream_t)c->stream;
    cfg.attrs = at;
    cudaError_t rc = room(e, &cfg, cluster, &most);
    if (rc != cudaSuccess) return cudaGetErrorString(rc);
    if (most < 1) return "no block of this size fits the device";
    /* Rows are dealt out so that every round of blocks fills the device. */
    const int tiles = c->N / SMALL_ROWS, token_tiles = round_up(c->M, p.tokens) / p.tokens;
    const int block = e->groups * 4, cut = block * e->share; /* tiles of a block, of a cluster */
    const int64_t work = (int64_t)tiles * token_tiles, full = (int64_t)most * cut;
    const int64_t clusters = (work + full - 1) / full * most / token_tiles;
    int each = block;
    if (clusters) each = (int)((tiles + clusters * e->share - 1) / (clusters * e->share));
    if (each > block) each = block;
    const int rows = (tiles + each * e->share - 1) / (each * e->share);
    wide_args a = {(const uint8_t *)c->w,
                   (const uint8_t *)c->work,
                   {c->y, c->ldy, c->row_scale, c->col_scale, c->bias, e->base, c->y_bf16},
                   c->N,
                   c->K,
                   c->M,
                   each,
                   token_tiles,
                   p.split};
    cfg.gridDim = dim3((unsigned)(rows * token_tiles * cluster));
    allow_early(&cfg, c->pdl || c->x);
    return words(cudaLaunchKernelEx(&cfg, e->kernel, a));
}
