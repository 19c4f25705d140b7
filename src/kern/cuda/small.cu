/* Instances of small.cuh and how a product is divided among blocks. */
#include "kern/cuda/small.h"
#include "kern/cuda/small.cuh"
#include "kern/cuda/alone.cuh"
#include <stdio.h>
#include <string.h>

typedef struct entry {
    small_format format;
    int tokens; /* room for */
    int threads, chunk, stage_bytes, smem;
    float base;
    void (*kernel)(const small_args);
    int (*ring)(int stages);
    int (*end)(int split, int units);
} entry;

#define SHAPE(W, WARPS, UPW, T) small_shape<W, small_cfg<WARPS, UPW>, T>
#define ROW(F, W, WARPS, UPW, T, SMEM)                                                             \
    {                                                                                              \
        F, T, small_cfg<WARPS, UPW>::threads, small_cfg<WARPS, UPW>::chunk,                        \
            SHAPE(W, WARPS, UPW, T)::stage_bytes, (SMEM)*1024, W::base,                            \
            small_kernel<W, small_cfg<WARPS, UPW>, T>, SHAPE(W, WARPS, UPW, T)::ring,              \
            SHAPE(W, WARPS, UPW, T)::end                                                           \
    }
/* First fit, as measured on an H200 (bench/NOTES.md): stretches that tiles are made of; sums of the
 * tokens that are there are all that is moved. More than 100 KB on their way do not help one token
 * times four bits. */
#define FOUR_BITS(F, W)                                                                            \
    ROW(F, W, 16, 2, 1, 120), ROW(F, W, 16, 2, 8, 200), ROW(F, W, 16, 1, 1, 120),                  \
        ROW(F, W, 16, 1, 8, 200)
#define EIGHT_BITS(F, W) ROW(F, W, 16, 1, 1, 200), ROW(F, W, 16, 1, 8, 200)
static const entry entries[] = {
    FOUR_BITS(SMALL_INT4, w_int4),         FOUR_BITS(SMALL_INT4_128_ZERO, w_int4_zero),
    FOUR_BITS(SMALL_INT4_64, w_int4_64),   FOUR_BITS(SMALL_INT4_64_ZERO, w_int4_64_zero),
    FOUR_BITS(SMALL_INT4_32, w_int4_32),   FOUR_BITS(SMALL_INT4_32_ZERO, w_int4_32_zero),
    FOUR_BITS(SMALL_MXFP4, w_mxfp4),       FOUR_BITS(SMALL_NVFP4, w_nvfp4),
    EIGHT_BITS(SMALL_E4M3, w_e4m3),        EIGHT_BITS(SMALL_E4M3_BLOCK, w_e4m3_block),
    EIGHT_BITS(SMALL_INT8, w_int8),        EIGHT_BITS(SMALL_INT8_GROUP, w_int8_group),
    ROW(SMALL_BF16, w_bf16, 8, 1, 1, 200), ROW(SMALL_BF16, w_bf16, 8, 1, 8, 200),
};

static const int most_smem = 227 * 1024;

typedef struct division {
    const entry *e;
    int split, stages, smem;
} division;

static int units_of(int K, int split)
{
    return (K / SMALL_UNIT_K + split - 1) / split;
}
static int room_for(const entry *e, int K, int split, int smem)
{
    int n = SMALL_STAGES;
    while (n > 0 && e->ring(n) + e->end(split, units_of(K, split)) > smem)
        n--;
    return n;
}

/* At least 48 KB of weights on their way where shared memory has room for that, x cut in as few
 * pieces as that takes; more pieces where tiles alone leave multiprocessors idle. */
static division divide(const entry *e, int N, int K, int sms)
{
    division d = {e, 0, 0, 0};
    const int tiles = N / SMALL_ROWS;
    for (int split = 1; split <= 8 && split <= K / SMALL_UNIT_K; split *= 2) {
        const int n = room_for(e, K, split, e->smem);
        if (n > d.stages) d.split = split, d.stages = n;
        if (n * e->stage_bytes >= 48 * 1024) break;
    }
    if (d.stages < 2) {
        for (int split = 8; split && d.stages < 2; split /= 2)
            if (split <= K / SMALL_UNIT_K)
                d.split = split, d.stages = room_for(e, K, split, most_smem);
        if (d.stages < 2) d.stages = 0;
    }
    while (d.stages && d.split < 8 && tiles * d.split * 2 <= sms &&
           units_of(K, d.split * 2) >= e->chunk)
        d.split *= 2;
    return d;
}

static const entry *find(small_format f, int K, int M)
{
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        const entry *e = &entries[i];
        if (e->format == f && M <= e->tokens &&
            (K / SMALL_UNIT_K % e->chunk == 0 || e->chunk <= 16))
            return e;
    }
    return NULL;
}

extern "C" const char *small_entry(small_format f, int N, int K, int M)
{
    static thread_local char text[96];
    const entry *e = find(f, K, M);
    int sms = 0;
    if (!e || alone_sms(&sms) != cudaSuccess) return "none";
    const division d = divide(e, N, K, sms);
    if (!d.stages) return "none";
    snprintf(text, sizeof text, "%d stages of %d units, K over %d block%s", d.stages, e->chunk,
             d.split, d.split > 1 ? "s" : "");
    return text;
}

/* ---- launching ----------------------------------------------------------------------------------
 */

static thread_local char why[160];
static const char *refuse(const small_call *c, int sms, division *d)
{
    const entry *e = find(c->format, c->K, c->M);
    why[0] = 0;
    if (c->M < 1 || c->M > SMALL_MAX_M || !e)
        snprintf(why, sizeof why, "M = %d, made for 1 to %d", c->M, SMALL_MAX_M);
    else if (c->N < SMALL_ROWS || c->N % SMALL_ROWS)
        snprintf(why, sizeof why, "N = %d is not a multiple of %d", c->N, SMALL_ROWS);
    else if (c->K < SMALL_UNIT_K || c->K % SMALL_UNIT_K)
        snprintf(why, sizeof why, "K = %d is not a multiple of %d", c->K, SMALL_UNIT_K);
    else if (c->ldx % 8 || (uintptr_t)c->x % 16)
        snprintf(why, sizeof why, "x is not aligned to 16 bytes");
    if (*why) return why;
    *d = divide(e, c->N, c->K, sms);
    if (c->split) d->split = c->split;
    if (c->split || c->stages) d->stages = room_for(e, c->K, d->split, most_smem);
    if (c->stages && c->stages < d->stages) d->stages = c->stages;
    if (d->split < 1 || d->split > 8 || d->split & (d->split - 1) || d->split > c->K / SMALL_UNIT_K)
        snprintf(why, sizeof why, "K = %d does not go over %d blocks", c->K, d->split);
    else if (d->stages < 2 || d->stages < c->stages)
        snprintf(why, sizeof why, "K = %d over %d blocks, %d stages: more than shared memory", c->K,
                 d->split, c->stages);
    d->smem = e->ring(d->stages) + e->end(d->split, units_of(c->K, d->split));
    return *why ? why : NULL;
}

extern "C" const char *small_run(const small_call *c)
{
    int sms = 0;
    cudaError_t rc = alone_sms(&sms);
    if (rc != cudaSuccess) return cudaGetErrorString(rc);
    division d = {};
    if (refuse(c, sms, &d)) return why;

    cudaLaunchAttribute at[2];
    cudaLaunchConfig_t cfg = {};
    cfg.blockDim = dim3((unsigned)d.e->threads);
    cfg.dynamicSmemBytes = (size_t)d.smem;
    cfg.stream = (cudaStream_t)c->stream;
    cfg.attrs = at;
    int most = 0;
    rc = alone_take(d.e->kernel, d.split, &cfg, &most);
    if (rc != cudaSuccess) return cudaGetErrorString(rc);
    if (most < 1) return "no block of this size fits the device";
    const int tiles = c->N / SMALL_ROWS, each = (tiles + most - 1) / most;
    cfg.gridDim = dim3((unsigned)((tiles + each - 1) / each * d.split));
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
                    d.split,
                    d.stages,
                    {c->y, c->ldy, c->row_scale, c->col_scale, c->bias, d.e->base, c->y_bf16}};
    rc = cudaLaunchKernelEx(&cfg, d.e->kernel, a);
    return rc == cudaSuccess ? NULL : cudaGetErrorString(rc);
}
