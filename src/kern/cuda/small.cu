/* Instances of small.cuh and the table that says which one a shape uses. The table was
 * measured on an H200 (bench/NOTES.md); a long K is cut over a cluster of two, or of four where
 * there are tiles enough for the thirty such clusters that the chip holds at once. */
#include "kern/cuda/small.h"
#include "kern/cuda/small.cuh"
#include <stdio.h>
#include <string.h>

typedef struct entry {
    small_format format;
    int units; /* K/128, 0 = any */
    int max_m;
    int threads, split, shared_x;
    size_t fixed_smem;
    float base;
    void (*kernel)(const small_args);
    const char *text;
} entry;

#define ROW(F, W, UNITS, M, WARPS, STAGES, UPW, UW, SPLIT)                                         \
    {                                                                                              \
        F, UNITS, M, (WARPS + 2) * 32, SPLIT, UW == 0,                                             \
            small_shape<W, small_cfg<WARPS, STAGES, UPW, UW, SPLIT>, M>::smem(0), W::base,         \
            small_kernel<W, small_cfg<WARPS, STAGES, UPW, UW, SPLIT>, M>,                          \
            #WARPS " warps, " #STAGES " stages of " #UPW ", " #UW " kept, cluster of " #SPLIT      \
    }

/* First fit. M instances: sums of the tokens that are there are all that is moved. */
#define BOTH(F, W, UNITS, ...) ROW(F, W, UNITS, 1, __VA_ARGS__), ROW(F, W, UNITS, 8, __VA_ARGS__)
/* Four bits a weight with more than a scale of 128 columns, and eight bits. */
#define FOUR_BITS(F, W)                                                                            \
    BOTH(F, W, 32, 16, 3, 2, 2, 1), ROW(F, W, 64, 8, 16, 3, 2, 2, 2),                              \
        BOTH(F, W, 112, 14, 3, 2, 4, 2), ROW(F, W, 224, 8, 14, 3, 2, 4, 4),                        \
        BOTH(F, W, 0, 16, 4, 1, 0, 1)
#define EIGHT_BITS(F, W)                                                                           \
    BOTH(F, W, 32, 8, 10, 1, 4, 1), BOTH(F, W, 64, 8, 10, 1, 8, 1),                                \
        BOTH(F, W, 112, 14, 5, 1, 4, 2), BOTH(F, W, 224, 14, 5, 1, 4, 4),                          \
        BOTH(F, W, 0, 16, 4, 1, 0, 1)
static const entry entries[] = {
    BOTH(SMALL_INT4, w_int4, 32, 16, 4, 2, 2, 1),
    ROW(SMALL_INT4, w_int4, 64, 1, 8, 5, 4, 8, 1),
    ROW(SMALL_INT4, w_int4, 64, 8, 16, 4, 2, 2, 2),
    BOTH(SMALL_INT4, w_int4, 112, 14, 3, 2, 4, 2),
    BOTH(SMALL_INT4, w_int4, 224, 14, 4, 2, 4, 4),
    BOTH(SMALL_INT4, w_int4, 0, 16, 4, 1, 0, 1),
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
    BOTH(SMALL_BF16, w_bf16, 32, 8, 5, 1, 4, 1),
    BOTH(SMALL_BF16, w_bf16, 64, 8, 5, 1, 4, 2),
    BOTH(SMALL_BF16, w_bf16, 112, 14, 3, 1, 4, 2),
    BOTH(SMALL_BF16, w_bf16, 224, 14, 3, 1, 4, 4),
    BOTH(SMALL_BF16, w_bf16, 0, 8, 3, 1, 0, 1),
};

static const int smem_limit = 227 * 1024;

static size_t smem_of(const entry *e, int K)
{
    size_t x = e->shared_x ? (size_t)e->max_m * (size_t)(K / e->split + 8) * 2 : 0;
    return e->fixed_smem + x;
}

static const entry *find(small_format f, int K, int M)
{
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        const entry *e = &entries[i];
        if (e->format == f && (!e->units || e->units * SMALL_UNIT_K == K) && M <= e->max_m &&
            smem_of(e, K) <= (size_t)smem_limit)
            return e;
    }
    return NULL;
}

extern "C" const char *small_entry(small_format f, int K, int M)
{
    const entry *e = find(f, K, M);
    return e ? e->text : "none";
}

/* ---- launching ----------------------------------------------------------------------------------
 */

static const char *refuse(const small_call *c)
{
    static thread_local char why[128];
    why[0] = 0;
    if (c->M < 1 || c->M > SMALL_MAX_M)
        snprintf(why, sizeof why, "M = %d, made for 1 to %d", c->M, SMALL_MAX_M);
    else if (c->N < SMALL_ROWS || c->N % SMALL_ROWS)
        snprintf(why, sizeof why, "N = %d is not a multiple of %d", c->N, SMALL_ROWS);
    else if (c->K < SMALL_UNIT_K || c->K % SMALL_UNIT_K)
        snprintf(why, sizeof why, "K = %d is not a multiple of %d", c->K, SMALL_UNIT_K);
    else if (c->ldx % 8 || (uintptr_t)c->x % 16)
        snprintf(why, sizeof why, "x is not aligned to 16 bytes");
    else if (!find(c->format, c->K, c->M))
        snprintf(why, sizeof why, "K = %d does not fit shared memory", c->K);
    return *why ? why : NULL;
}

extern "C" const char *small_run(const small_call *c)
{
    const char *why = refuse(c);
    if (why) return why;
    const entry *e = find(c->format, c->K, c->M);
    const size_t smem = smem_of(e, c->K);
    int device = 0, sms = 0, most = 0;
    cudaError_t rc = cudaGetDevice(&device);
    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (rc == cudaSuccess)
        rc =
            cudaFuncSetAttribute(e->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (rc != cudaSuccess) return cudaGetErrorString(rc);

    cudaLaunchAttribute at[2];
    cudaLaunchConfig_t cfg = {};
    cfg.blockDim = dim3((unsigned)e->threads);
    cfg.dynamicSmemBytes = smem;
    cfg.stream = (cudaStream_t)c->stream;
    cfg.attrs = at;
    most = sms;
    if (e->split > 1) {
        at[cfg.numAttrs].id = cudaLaunchAttributeClusterDimension;
        at[cfg.numAttrs].val.clusterDim.x = (unsigned)e->split;
        at[cfg.numAttrs].val.clusterDim.y = at[cfg.numAttrs].val.clusterDim.z = 1;
        cfg.numAttrs++;
        cfg.gridDim = dim3((unsigned)(sms / e->split * e->split));
        rc = cudaOccupancyMaxActiveClusters(&most, e->kernel, &cfg);
        if (rc != cudaSuccess) return cudaGetErrorString(rc);
    }
    if (most < 1) return "no block of this size fits the device";
    int tiles = c->N / SMALL_ROWS, each = (tiles + most - 1) / most;
    cfg.gridDim = dim3((unsigned)((tiles + each - 1) / each * e->split));
    if (c->pdl) {
        at[cfg.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        at[cfg.numAttrs].val.programmaticStreamSerializationAllowed = 1;
        cfg.numAttrs++;
    }
    small_args a = {(const uint8_t *)c->w,
                    (const __nv_bfloat16 *)c->x,
                    c->ldx,
                    c->N,
                    c->K,
                    c->M,
                    {c->y, c->ldy, c->row_scale, c->col_scale, c->bias, e->base, c->y_bf16}};
    rc = cudaLaunchKernelEx(&cfg, e->kernel, a);
    return rc == cudaSuccess ? NULL : cudaGetErrorString(rc);
}
