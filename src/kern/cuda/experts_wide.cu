/* Instances of experts_wide.cuh, which one a number of slots uses, and launching. */
#include <stdio.h>
#include "kern/cuda/experts_wide.cuh"
#include "kern/cuda/table.h"

typedef struct entry {
    small_format format;
    int tokens, groups;
    size_t smem;
    float base;
    void (*kernel)(const wide_experts_args);
} entry;

#define ROW(F, W, TOKENS, GROUPS, XB, XS, WS, CHUNK)                                               \
    {                                                                                              \
        F, TOKENS, GROUPS,                                                                         \
            wide_experts_shape<W, wide_cfg<TOKENS, GROUPS, XB, XS, WS, CHUNK, 1>>::smem, W::base,  \
            wide_experts_kernel<W, wide_cfg<TOKENS, GROUPS, XB, XS, WS, CHUNK, 1>>                 \
    }
#define FOUR_BITS(F, W)                                                                            \
    ROW(F, W, 16, 4, 8, 4, 6, 2), ROW(F, W, 64, 4, 2, 5, 6, 2), ROW(F, W, 128, 4, 2, 4, 4, 2)
#define EIGHT_BITS(F, W)                                                                           \
    ROW(F, W, 16, 4, 8, 4, 5, 1), ROW(F, W, 64, 3, 2, 4, 5, 1), ROW(F, W, 128, 4, 2, 3, 3, 1)
/* Tokens of a format rise. */
static const entry entries[] = {
    FOUR_BITS(SMALL_INT4, w_int4),
    FOUR_BITS(SMALL_INT4_128_ZERO, w_int4_zero),
    FOUR_BITS(SMALL_INT4_64, w_int4_64),
    FOUR_BITS(SMALL_INT4_64_ZERO, w_int4_64_zero),
    FOUR_BITS(SMALL_INT4_32, w_int4_32),
    FOUR_BITS(SMALL_INT4_32_ZERO, w_int4_32_zero),
    FOUR_BITS(SMALL_MXFP4, w_mxfp4),
    FOUR_BITS(SMALL_NVFP4, w_nvfp4),
    EIGHT_BITS(SMALL_E4M3, w_e4m3),
    EIGHT_BITS(SMALL_E4M3_BLOCK, w_e4m3_block),
    EIGHT_BITS(SMALL_INT8, w_int8),
    EIGHT_BITS(SMALL_INT8_GROUP, w_int8_group),
    ROW(SMALL_BF16, w_bf16, 16, 3, 8, 4, 3, 1),
    ROW(SMALL_BF16, w_bf16, 64, 3, 2, 4, 3, 1),
};

/* Slots of an expert, on average, from which tiles of so many tokens pay: fewer passes over the
 * weights against columns that nobody wants. */
static int pays_from(int tokens)
{
    return tokens <= 16 ? 0 : tokens <= 64 ? 16 : 96;
}

static const entry *find(small_format f, int64_t slots, int E)
{
    const entry *found = NULL;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (entries[i].format == f && slots >= (int64_t)pays_from(entries[i].tokens) * E)
            found = &entries[i];
    return found;
}

/* Each expert with slots has at most one tile that is not full. */
static int64_t most_tiles(int tokens, int E, int64_t slots)
{
    return slots / tokens + (slots < E ? slots : E);
}
static size_t whole(size_t n)
{
    return (n + 255) / 256 * 256;
}
static size_t work_of(int tokens, int K, int E, int64_t slots, size_t *factors, size_t *tiles)
{
    const size_t n = (size_t)most_tiles(tokens, E, slots), rows = n * (size_t)tokens;
    *factors = whole(rows * (size_t)K * 2);
    *tiles = *factors + whole(rows * sizeof(float));
    return *tiles + whole(n * sizeof(experts_tile));
}

/* Enough for fewer experts too. */
extern "C" size_t wide_experts_work_bytes(int K, int E, int64_t slots)
{
    size_t most = 0, factors, tiles;
    for (int tokens = 16; tokens <= 128; tokens *= 2) {
        const int from = pays_from(tokens);
        const int experts = from && slots / from < E ? (int)(slots / from) : E;
        const size_t n = work_of(tokens, K, experts, slots, &factors, &tiles);
        if (n > most) most = n;
    }
    return most;
}

static const char *refuse(const experts_call *c)
{
    static thread_local char why[128];
    why[0] = 0;
    if (!find(c->format, c->slots, c->E))
        snprintf(why, sizeof why, "no packed format has number %d", (int)c->format);
    else if (c->N < SMALL_ROWS || c->N % SMALL_ROWS)
        snprintf(why, sizeof why, "N = %d is not a multiple of %d", c->N, SMALL_ROWS);
    else if (c->K < SMALL_UNIT_K || c->K % SMALL_UNIT_K)
        snprintf(why, sizeof why, "K = %d is not a multiple of %d", c->K, SMALL_UNIT_K);
    else if (c->x_k % 64 || c->x_k > c->K || c->x_k < 64)
        snprintf(why, sizeof why, "rows of %d columns for K = %d", c->x_k, c->K);
    else if (c->ldx % 2 || (uintptr_t)c->x % 4)
        snprintf(why, sizeof why, "x is not aligned to 4 bytes");
    else if (!c->work || c->ldy % 4 || (uintptr_t)c->y % 16 || (uintptr_t)c->work % 128)
        snprintf(why, sizeof why, "y is not aligned to 16 bytes or work not to 128");
    return *why ? why : NULL;
}

static const char *words(cudaError_t rc)
{
    return rc == cudaSuccess ? NULL : cudaGetErrorString(rc);
}

static cudaError_t order(const experts_call *c, const experts_order_args &a, int tiles)
{
    cudaLaunchAttribute at[1];
    cudaLaunchConfig_t cfg = {};
    const int pieces = c->K / 64 * a.tokens * 8, shares = (pieces + 2047) / 2048;
    cfg.gridDim = dim3((unsigned)tiles, (unsigned)shares);
    cfg.blockDim = dim3(256);
    cfg.stream = (cudaStream_t)c->stream;
    cfg.attrs = at;
    if (c->pdl) {
        at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        at[0].val.programmaticStreamSerializationAllowed = 1;
        cfg.numAttrs = 1;
    }
    return cudaLaunchKernelEx(&cfg, experts_order_kernel, a);
}

/* 16-row tiles of a block: fewer where whole blocks do not fill the device. */
static int rows_of(const entry *e, const experts_call *c, int sms)
{
    const int block = e->groups * 4, tiles = c->N / SMALL_ROWS;
    const int64_t some = c->slots / e->tokens + (c->slots < c->E ? c->slots : c->E) / 2 + 1;
    const int64_t blocks = (sms + some - 1) / some; /* of each tile of tokens */
    const int64_t each = (tiles + blocks - 1) / blocks;
    return (int)(each < block ? each : block);
}

extern "C" const char *wide_experts_run(const experts_call *c)
{
    if (!c->slots || !c->E) return NULL;
    const char *why = refuse(c);
    if (why) return why;
    const entry *e = find(c->format, c->slots, c->E);
    const int tiles = (int)most_tiles(e->tokens, c->E, c->slots);
    size_t factors, list;
    work_of(e->tokens, c->K, c->E, c->slots, &factors, &list);
    uint8_t *work = (uint8_t *)c->work;
    const int fine = small_fine(c->format);
    const experts_order_args o = {(const __nv_bfloat16 *)c->x,
                                  c->ids,
                                  c->first,
                                  c->row_scale,
                                  (uint4 *)work,
                                  (float *)(work + factors),
                                  (experts_tile *)(work + list),
                                  c->ldx,
                                  c->E,
                                  c->K,
                                  c->x_k / 64,
                                  e->tokens,
                                  fine};
    int device = 0, sms = 0;
    cudaError_t rc = cudaGetDevice(&device);
    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (rc == cudaSuccess)
        rc = cudaFuncSetAttribute(e->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)e->smem);
    if (rc == cudaSuccess) rc = order(c, o, tiles);
    if (rc != cudaSuccess) return cudaGetErrorString(rc);
    const int each = rows_of(e, c, sms), rows = (c->N / SMALL_ROWS + each - 1) / each;
    const float *factor = c->row_scale ? o.factor : NULL;
    const wide_experts_args a = {{NULL,
                                  work,
                                  {c->y, c->ldy, factor, NULL, NULL, e->base, c->y_bf16},
                                  c->N,
                                  c->K,
                                  0,
                                  each,
                                  tiles,
                                  1},
                                 (const uint8_t *const *)c->w,
                                 c->col_scale,
                                 c->bias,
                                 o.tiles};
    cudaLaunchAttribute at[1];
    cudaLaunchConfig_t cfg = {};
    cfg.gridDim = dim3((unsigned)(rows * tiles));
    cfg.blockDim = dim3((unsigned)e->groups * 128);
    cfg.dynamicSmemBytes = e->smem;
    cfg.stream = (cudaStream_t)c->stream;
    cfg.attrs = at;
    at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    at[0].val.programmaticStreamSerializationAllowed = 1;
    cfg.numAttrs = 1;
    return words(cudaLaunchKernelEx(&cfg, e->kernel, a));
}

extern "C" const char *cuda_wide_experts(const void *args, void *stream)
{
    experts_call c = *(const experts_call *)args;
    c.stream = stream;
    return wide_experts_run(&c);
}
