/* Instances of experts_small.cuh: which one a K uses. */
#include <stdio.h>
#include "kern/cuda/experts_small.cuh"
#include "kern/cuda/table.h"

typedef struct entry {
    small_format format;
    int units; /* K/128 at most; 0 = any */
    int threads;
    size_t smem;
    float base;
    void (*kernel)(const experts_args);
} entry;

#define ROW(F, W, UNITS, WARPS, STAGES, UPW, UW)                                                   \
    {                                                                                              \
        F, UNITS, (WARPS + 2) * 32,                                                                \
            (size_t)experts_shape<W, experts_cfg<WARPS, STAGES, UPW, UW>>::list, W::base,          \
            small_experts_kernel<W, experts_cfg<WARPS, STAGES, UPW, UW>>                           \
    }
#define FOUR_BITS(F, W)                                                                            \
    ROW(F, W, 8, 8, 12, 1, 1), ROW(F, W, 16, 16, 6, 1, 1), ROW(F, W, 32, 16, 3, 2, 2),             \
        ROW(F, W, 56, 14, 3, 2, 4), ROW(F, W, 0, 16, 6, 1, 0)
#define EIGHT_BITS(F, W)                                                                           \
    ROW(F, W, 8, 8, 9, 1, 1), ROW(F, W, 16, 16, 4, 1, 1), ROW(F, W, 32, 8, 9, 1, 4),               \
        ROW(F, W, 56, 14, 5, 1, 4), ROW(F, W, 0, 16, 4, 1, 0)
/* First fit. */
static const entry entries[] = {
    FOUR_BITS(SMALL_INT4, w_int4),           FOUR_BITS(SMALL_INT4_128_ZERO, w_int4_zero),
    FOUR_BITS(SMALL_INT4_64, w_int4_64),     FOUR_BITS(SMALL_INT4_64_ZERO, w_int4_64_zero),
    FOUR_BITS(SMALL_INT4_32, w_int4_32),     FOUR_BITS(SMALL_INT4_32_ZERO, w_int4_32_zero),
    FOUR_BITS(SMALL_MXFP4, w_mxfp4),         FOUR_BITS(SMALL_NVFP4, w_nvfp4),
    EIGHT_BITS(SMALL_E4M3, w_e4m3),          EIGHT_BITS(SMALL_E4M3_BLOCK, w_e4m3_block),
    EIGHT_BITS(SMALL_INT8, w_int8),          EIGHT_BITS(SMALL_INT8_GROUP, w_int8_group),
    ROW(SMALL_BF16, w_bf16, 8, 8, 5, 1, 1),  ROW(SMALL_BF16, w_bf16, 16, 8, 5, 1, 2),
    ROW(SMALL_BF16, w_bf16, 32, 8, 5, 1, 4), ROW(SMALL_BF16, w_bf16, 40, 10, 4, 1, 4),
    ROW(SMALL_BF16, w_bf16, 0, 8, 5, 1, 0),
};

static const size_t smem_limit = 227 * 1024;

static const entry *find(small_format f, int K)
{
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (entries[i].format == f && (!entries[i].units || K <= entries[i].units * SMALL_UNIT_K))
            return &entries[i];
    return NULL;
}

static size_t smem_of(const entry *e, int E)
{
    return e->smem + (size_t)(E + 1) * sizeof(experts_active);
}

static const char *refuse(const experts_call *c)
{
    static thread_local char why[128];
    const entry *e = find(c->format, c->K);
    why[0] = 0;
    if (!e)
        snprintf(why, sizeof why, "no packed format has number %d", (int)c->format);
    else if (c->N < SMALL_ROWS || c->N % SMALL_ROWS)
        snprintf(why, sizeof why, "N = %d is not a multiple of %d", c->N, SMALL_ROWS);
    else if (c->K < SMALL_UNIT_K || c->K % SMALL_UNIT_K)
        snprintf(why, sizeof why, "K = %d is not a multiple of %d", c->K, SMALL_UNIT_K);
    else if (c->x_k % 64 || c->x_k > c->K || c->x_k < 64)
        snprintf(why, sizeof why, "rows of %d columns for K = %d", c->x_k, c->K);
    else if (c->ldx % 8 || (uintptr_t)c->x % 16)
        snprintf(why, sizeof why, "x is not aligned to 16 bytes");
    else if (smem_of(e, c->E) > smem_limit)
        snprintf(why, sizeof why, "%d experts do not fit shared memory", c->E);
    return *why ? why : NULL;
}

extern "C" const char *small_experts_run(const experts_call *c)
{
    const char *why = refuse(c);
    if (why || !c->slots || !c->E) return why;
    const entry *e = find(c->format, c->K);
    const size_t smem = smem_of(e, c->E);
    int device = 0, sms = 0;
    cudaError_t rc = cudaGetDevice(&device);
    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (rc == cudaSuccess)
        rc =
            cudaFuncSetAttribute(e->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (rc != cudaSuccess) return cudaGetErrorString(rc);
    cudaLaunchAttribute at[1];
    cudaLaunchConfig_t cfg = {};
    const int64_t most = c->slots * (c->N / SMALL_ROWS); /* items */
    cfg.gridDim = dim3((unsigned)(most < sms ? most : sms));
    cfg.blockDim = dim3((unsigned)e->threads);
    cfg.dynamicSmemBytes = smem;
    cfg.stream = (cudaStream_t)c->stream;
    cfg.attrs = at;
    if (c->pdl) {
        at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        at[0].val.programmaticStreamSerializationAllowed = 1;
        cfg.numAttrs = 1;
    }
    experts_args a = {(const uint8_t *const *)c->w,
                      c->col_scale,
                      c->bias,
                      (const __nv_bfloat16 *)c->x,
                      c->ids,
                      c->first,
                      c->row_scale,
                      c->y,
                      c->ldx,
                      c->ldy,
                      c->N,
                      c->K,
                      c->E,
                      c->x_k / 64,
                      c->y_bf16,
                      e->base};
    rc = cudaLaunchKernelEx(&cfg, e->kernel, a);
    return rc == cudaSuccess ? NULL : cudaGetErrorString(rc);
}

extern "C" const char *cuda_small_experts(const void *args, void *stream)
{
    experts_call c = *(const experts_call *)args;
    c.stream = stream;
    return small_experts_run(&c);
}
