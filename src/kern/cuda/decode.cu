/* Instances of decode.cuh and the choice of runs: enough blocks to fill the chip, none with less
 * than a page a warp; up to sixteen runs are a cluster where so many clusters fit. */
#include "kern/cuda/decode.h"
#include "kern/cuda/decode.cuh"
#include <math.h>
#include <stdio.h>

#define MAX_RUNS 64

typedef void kernel_fn(const decode_args);
typedef struct entry {
    decode_kv kv;
    int D, cluster, warps;
    size_t smem;
    kernel_fn *kernel;
} entry;
#define ROW(KV, V, D, WARPS, STAGES, CLUSTER)                                                      \
    {                                                                                              \
        KV, D, CLUSTER, WARPS, decode_shape<V, D, WARPS, STAGES>::smem,                            \
            decode_kernel<V, D, WARPS, STAGES, CLUSTER>                                            \
    }
#define ALL(KV, V, D, WARPS, STAGES)                                                               \
    ROW(KV, V, D, WARPS, STAGES, 1), ROW(KV, V, D, WARPS, STAGES, 2),                              \
        ROW(KV, V, D, WARPS, STAGES, 4), ROW(KV, V, D, WARPS, STAGES, 8),                          \
        ROW(KV, V, D, WARPS, STAGES, 16)
static const entry entries[] = {
    ALL(DECODE_BF16, kv_bf16, 64, 8, 2),
    ALL(DECODE_BF16, kv_bf16, 128, 8, 1),
    ALL(DECODE_E4M3, kv_e4m3, 64, 8, 2),
    ALL(DECODE_E4M3, kv_e4m3, 128, 8, 1),
};

static const entry *find(decode_kv kv, int D, int cluster)
{
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (entries[i].kv == kv && entries[i].D == D && entries[i].cluster == cluster)
            return &entries[i];
    return NULL;
}

extern "C" size_t decode_head_bytes(decode_kv kv, int D)
{
    return (size_t)2 * DECODE_PAGE * (size_t)D * (kv == DECODE_BF16 ? 2 : 1);
}

extern "C" size_t decode_place(decode_kv kv, int D, int which, int t, int d)
{
    return kv_place(kv == DECODE_BF16 ? 2 : 1, D, which, t, d);
}

extern "C" float decode_q_scale(decode_kv kv, float softmax_scale, float k_scale)
{
    return softmax_scale * k_scale * 1.4426950408889634f *
           (kv == DECODE_BF16 ? kv_bf16::k_up : kv_e4m3::k_up);
}

static size_t done_bytes(int B, int Hk)
{
    return ((size_t)B * (size_t)Hk * sizeof(unsigned) + 255) / 256 * 256;
}

extern "C" size_t decode_work_bytes(int B, int Hk, int G, int D)
{
    return done_bytes(B, Hk) + (size_t)B * Hk * MAX_RUNS * G * (D + 2) * sizeof(float);
}

/* Runs a head: to fill the chip, but no warp without a page. */
static int runs_for(const decode_call *c, int sms, int warps)
{
    int pages = (c->max_len + DECODE_PAGE - 1) / DECODE_PAGE, heads = c->B * c->Hk;
    int fill = (sms + heads - 1) / heads, most = (pages + warps - 1) / warps;
    int runs = fill < most ? fill : most;
    return runs < 1 ? 1 : runs > MAX_RUNS ? MAX_RUNS : runs;
}

static const char *refuse(const decode_call *c)
{
    static thread_local char why[128];
    why[0] = 0;
    if (!find(c->kv, c->D, 1))
        snprintf(why, sizeof why, "head dim %d, made for 64 and 128", c->D);
    else if (c->G < 1 || c->G > 8)
        snprintf(why, sizeof why, "%d query heads a KV head, made for 1 to 8", c->G);
    else if (c->B < 1 || c->B > 65535 || c->Hk < 1 || c->Hk > 65535 || c->max_len < 1)
        snprintf(why, sizeof why, "batch %d, %d heads, length %d", c->B, c->Hk, c->max_len);
    return *why ? why : NULL;
}

extern "C" const char *decode_run(const decode_call *c)
{
    const char *why = refuse(c);
    int device = 0, sms = 0, fit = 0;
    if (why) return why;
    cudaError_t rc = cudaGetDevice(&device);
    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (rc != cudaSuccess) return cudaGetErrorString(rc);
    const entry *e = find(c->kv, c->D, 1);
    int runs = runs_for(c, sms, e->warps);
    cudaLaunchAttribute at[2];
    cudaLaunchConfig_t cfg = {};
    cfg.stream = (cudaStream_t)c->stream;
    cfg.blockDim = dim3((unsigned)e->warps * 32);
    cfg.dynamicSmemBytes = e->smem;
    cfg.attrs = at;
    for (int cluster = 16; cluster > 1; cluster /= 2) {
        if (runs < cluster || runs >= 2 * cluster) continue;
        const entry *x = find(c->kv, c->D, cluster);
        at[0].id = cudaLaunchAttributeClusterDimension;
        at[0].val.clusterDim.x = (unsigned)cluster;
        at[0].val.clusterDim.y = at[0].val.clusterDim.z = 1;
        cfg.numAttrs = 1;
        cfg.gridDim = dim3((unsigned)cluster, (unsigned)c->Hk, (unsigned)c->B);
        rc = cudaFuncSetAttribute(x->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)x->smem);
        if (rc == cudaSuccess && cluster > 8) /* more than every device promises */
            rc = cudaFuncSetAttribute(x->kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (rc == cudaSuccess) rc = cudaOccupancyMaxActiveClusters(&fit, x->kernel, &cfg);
        if (rc != cudaSuccess) return cudaGetErrorString(rc);
        if (fit < c->B * c->Hk) cfg.numAttrs = 0; /* a second wave costs more than it gives */
        if (cfg.numAttrs) e = x, runs = cluster;
    }
    rc = cudaFuncSetAttribute(e->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)e->smem);
    if (rc != cudaSuccess) return cudaGetErrorString(rc);
    cfg.gridDim = dim3((unsigned)runs, (unsigned)c->Hk, (unsigned)c->B);
    if (c->pdl) {
        at[cfg.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        at[cfg.numAttrs].val.programmaticStreamSerializationAllowed = 1;
        cfg.numAttrs++;
    }
    decode_args a = {(const uint8_t *)c->cache,
                     c->page_stride,
                     c->head_bytes,
                     (const __nv_bfloat16 *)c->q,
                     c->out,
                     c->pages,
                     c->lens,
                     (float *)((char *)c->work + done_bytes(c->B, c->Hk)),
                     (unsigned *)c->work,
                     c->B,
                     c->Hk,
                     c->G,
                     runs,
                     c->max_pages,
                     c->v_scale};
    rc = cudaLaunchKernelEx(&cfg, e->kernel, a);
    return rc == cudaSuccess ? NULL : cudaGetErrorString(rc);
}
