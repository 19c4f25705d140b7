/* Instances of decode.cuh and the choice of runs; up to sixteen runs are a cluster where so many
 * clusters fit. */
#include "kern/cuda/decode.h"
#include "kern/cuda/decode.cuh"
#include "kern/cuda/decode_shared.cuh"
#include "kern/cuda/plain_attention.h"

typedef void kernel_fn(const decode_args);
typedef struct entry {
    int type, D, cluster, warps; /* kern_kv_type */
    size_t (*smem)(int pages);
    kernel_fn *kernel, *shared; /* over pages that sequences share */
    size_t shared_smem;
} entry;
#define ROW(TYPE, V, D, WARPS, STAGES, BLOCKS, CLUSTER)                                            \
    {                                                                                              \
        TYPE, D, CLUSTER, WARPS, decode_shape<V, D, WARPS, STAGES>::smem,                          \
            decode_kernel<V, D, WARPS, STAGES, BLOCKS, CLUSTER>, shared_kernel<V, D>,              \
            shared_smem<V>(D)                                                                      \
    }
#ifdef TARE_EMULATED
#define ALL(...) ROW(__VA_ARGS__, 1)
#else
#define ALL(...)                                                                                   \
    ROW(__VA_ARGS__, 1), ROW(__VA_ARGS__, 2), ROW(__VA_ARGS__, 4), ROW(__VA_ARGS__, 8),            \
        ROW(__VA_ARGS__, 16)
#endif
/* Warps, stages and blocks of a multiprocessor: as many as its shared memory and registers hold. */
static const entry entries[] = {
    ALL(KV_BF16, kv_bf16, 64, 8, 2, 1),      ALL(KV_BF16, kv_bf16, 96, 8, 2, 1),
    ALL(KV_BF16, kv_bf16, 128, 8, 1, 1),     ALL(KV_BF16, kv_bf16, 256, 4, 1, 1),
    ALL(KV_FP8_E4M3, kv_e4m3, 64, 8, 2, 2),  ALL(KV_FP8_E4M3, kv_e4m3, 96, 8, 2, 2),
    ALL(KV_FP8_E4M3, kv_e4m3, 128, 8, 1, 2), ALL(KV_FP8_E4M3, kv_e4m3, 256, 4, 1, 2),
    ALL(KV_FP8_E5M2, kv_e5m2, 64, 8, 2, 2),  ALL(KV_FP8_E5M2, kv_e5m2, 96, 8, 2, 2),
    ALL(KV_FP8_E5M2, kv_e5m2, 128, 6, 2, 2), ALL(KV_FP8_E5M2, kv_e5m2, 256, 4, 1, 2),
    ALL(KV_INT8, kv_int8, 64, 8, 2, 2),      ALL(KV_INT8, kv_int8, 96, 8, 2, 2),
    ALL(KV_INT8, kv_int8, 128, 6, 2, 2),     ALL(KV_INT8, kv_int8, 256, 4, 1, 2),
    ALL(KV_FP4, kv_fp4, 64, 8, 2, 2),        ALL(KV_FP4, kv_fp4, 96, 8, 2, 2),
    ALL(KV_FP4, kv_fp4, 128, 6, 2, 2),       ALL(KV_FP4, kv_fp4, 256, 4, 2, 2),
};

static const entry *find(int type, int D, int cluster)
{
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (entries[i].type == type && entries[i].D == D && entries[i].cluster == cluster)
            return &entries[i];
    return NULL;
}

/* How the work is divided. */
typedef struct division {
    int sets, heads; /* of the query heads of a KV head */
    int64_t tasks;   /* sequences times KV heads times sets: runs are blocks of a task */
    int pages;       /* of the longest sequence, as far as it is seen */
    int most;        /* runs that the work memory holds */
} division;

static int over(int64_t x, int64_t by)
{
    return (int)((x + by - 1) / by);
}

static division divide(const gpu_attention *a)
{
    division d;
    const int G = a->H / a->kv.Hk;
    int64_t keys = a->seqs.max_len;
    if (a->window > 0 && keys > a->window) keys = (int64_t)a->window + DECODE_PAGE - 1;
    d.sets = over(G, DECODE_HEADS);
    d.heads = over(G, d.sets);
    d.tasks = (int64_t)a->seqs.n * a->kv.Hk * d.sets;
    d.pages = over(keys, DECODE_PAGE);
    const int64_t places = (int64_t)a->seqs.T * a->kv.Hk * d.sets;
    int64_t rows = (int64_t)a->seqs.T * a->H * ATTENTION_PARTS;
    if (rows > ATTENTION_PART_ROWS) rows = ATTENTION_PART_ROWS;
    rows /= places * d.heads > 0 ? places * d.heads : 1;
    d.most = !a->work || places > ATTENTION_COUNTERS || rows < 1 ? 1
             : rows > ATTENTION_PARTS                            ? ATTENTION_PARTS
                                                                 : (int)rows;
    return d;
}

extern "C" const char *decode_refuse(const gpu_attention *a)
{
    const char *why = attn_refuse(a);
    if (why) return why;
    if (!find(a->kv.type, a->kv.D, 1))
        return "made for bf16, fp8, int8 and fp4 caches and heads of 64, 96, 128 and 256 lanes";
    const division d = divide(a);
    if (a->seqs.n > 65535 || (int64_t)a->kv.Hk * d.sets > 65535)
        return "more sequences or heads than a grid has blocks";
    return a->seqs.max_len < 1 ? "no keys" : NULL;
}

/* Time with so many runs, in halves of the time that a block's warps need for a page each: blocks
 * take turns on the multiprocessors, those that lie on one together share the reading; each turn
 * begins and ends with half a page's time. */
static int64_t cost(const division *d, int runs, int warps, int sms, int together)
{
    const int64_t blocks = d->tasks * runs;
    return 2 * (int64_t)over(blocks, sms) * over(d->pages, (int64_t)runs * warps) +
           over(blocks, (int64_t)sms * together);
}

/* Runs of a task: the cheapest, but no warp without a page. Of equal ones more runs where blocks
 * lie on a multiprocessor together, so that one reads while another computes. */
static int runs_for(const division *d, int warps, int sms, int together)
{
    int best = 1, most = over(d->pages, warps);
    if (most > d->most) most = d->most;
    for (int runs = 2; runs <= most; runs++) {
        const int64_t now = cost(d, runs, warps, sms, together),
                      was = cost(d, best, warps, sms, together);
        if (now < was || (now == was && d->tasks * runs > sms && together > 1)) best = runs;
    }
    return best;
}

static decode_args args_of(const gpu_attention *a, const division *d, int runs)
{
    decode_args p;
    p.a = *a;
    p.done = (unsigned *)a->work;
    p.part = a->work ? (float *)((unsigned *)a->work + ATTENTION_COUNTERS) : NULL;
    p.runs = runs, p.sets = d->sets, p.heads = d->heads;
    p.shared_runs = 0, p.shared = NULL;
    return p;
}

/* Why pages that sequences share are read by each of them, or NULL. */
extern "C" const char *decode_shared_refuse(const gpu_attention *a)
{
    const gpu_seqs *s = &a->seqs;
    if (!s->n_groups || !s->groups || !s->shared) return "no sequences share pages";
    if (a->window > 0 && a->window < s->max_len) return "a window is narrower than the context";
    if (!a->work) return "no work memory";
    if (s->n > s->T || (int64_t)s->n * a->H > ATTENTION_SHARED_ROWS)
        return "more sequences and heads than the work memory holds";
    if ((int64_t)a->H * 2 > 65535) return "more heads than a grid has blocks";
    return s->n_groups > 65535 ? "more groups than a grid has blocks" : NULL;
}

/* The kernel over shared pages, and in *p what the one after it has to know. As many runs as fill
 * the chip where groups are full. */
static const char *run_shared(const entry *e, const gpu_attention *a, const division *d, int sms,
                              decode_args *p, void *stream)
{
    if (decode_shared_refuse(a)) return NULL;
    const int all = shared_warps(d->heads), warps = all < SHARED_WARPS ? all : SHARED_WARPS;
    const int64_t tasks = (int64_t)a->kv.Hk * d->sets * over(all, warps);
    const int64_t room = ATTENTION_SHARED_ROWS / ((int64_t)a->seqs.n * a->H);
    const int64_t parts = (int64_t)a->seqs.T * a->H * ATTENTION_PARTS;
    int64_t runs = over(2 * sms, tasks * over(a->seqs.n, GPU_GROUP_SEQS));
    if (runs > ATTENTION_SHARED_RUNS) runs = ATTENTION_SHARED_RUNS;
    if (runs > over(d->pages, 4)) runs = over(d->pages, 4);
    if (runs > room) runs = room;
    p->shared_runs = (int)runs;
    p->shared = p->part + (parts < ATTENTION_PART_ROWS ? parts : ATTENTION_PART_ROWS) *
                              (int64_t)(a->kv.D + 2);
    const char *why = ALLOW_SMEM(e->shared, e->shared_smem);
    if (why) return why;
    return LAUNCH_EARLY(e->shared,
                        dim3((unsigned)runs, (unsigned)tasks, (unsigned)a->seqs.n_groups),
                        dim3((unsigned)warps * 32), e->shared_smem, stream, *p);
}

#ifdef TARE_EMULATED
/* Of a chip with 132 multiprocessors; runs merge through memory. */
extern "C" const char *decode_run(const gpu_attention *a, void *stream)
{
    const char *why = decode_refuse(a);
    if (why || a->seqs.n < 1) return why;
    const entry *e = find(a->kv.type, a->kv.D, 1);
    const division d = divide(a);
    const int runs = runs_for(&d, e->warps, 132, 1);
    const size_t smem = e->smem(over(d.pages, runs));
    decode_args p = args_of(a, &d, runs);
    why = run_shared(e, a, &d, 132, &p, stream);
    if (!why) why = ALLOW_SMEM(e->kernel, smem);
    if (why) return why;
    return LAUNCH(e->kernel,
                  dim3((unsigned)runs, (unsigned)(a->kv.Hk * d.sets), (unsigned)a->seqs.n),
                  dim3((unsigned)e->warps * 32), smem, stream, p);
}
#else
/* Runs as a cluster where as many clusters fit as there are tasks (a second wave costs more than it
 * gives) and the runs that a smaller power of two lacks are not worth more than merging in memory:
 * *e and *runs become those of the cluster. */
static const char *cluster_for(const division *d, const entry **e, int *runs, int sms, int together,
                               cudaLaunchConfig_t *cfg, cudaLaunchAttribute *at)
{
    int cluster = 1, fit = 0;
    while (cluster < 16 && 2 * cluster <= *runs)
        cluster *= 2;
    if (cluster == 1 || cost(d, cluster, (*e)->warps, sms, together) >
                            cost(d, *runs, (*e)->warps, sms, together) + 1)
        return NULL;
    const entry *x = find((*e)->type, (*e)->D, cluster);
    at->id = cudaLaunchAttributeClusterDimension;
    at->val.clusterDim.x = (unsigned)cluster;
    at->val.clusterDim.y = at->val.clusterDim.z = 1;
    cfg->attrs = at, cfg->numAttrs = 1;
    cfg->gridDim.x = (unsigned)cluster;
    cudaError_t rc = cudaFuncSetAttribute(x->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)cfg->dynamicSmemBytes);
    if (rc == cudaSuccess && cluster > 8) /* more than every device promises */
        rc = cudaFuncSetAttribute(x->kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (rc == cudaSuccess) rc = cudaOccupancyMaxActiveClusters(&fit, x->kernel, cfg);
    if (rc == cudaSuccess && fit >= d->tasks)
        *e = x, *runs = cluster;
    else
        cfg->numAttrs = 0;
    return cuda_error(rc);
}

extern "C" const char *decode_run(const gpu_attention *a, void *stream)
{
    const char *why = decode_refuse(a);
    int device = 0, sms = 0, together = 1;
    if (why || a->seqs.n < 1) return why;
    const entry *e = find(a->kv.type, a->kv.D, 1);
    const division d = divide(a);
    const size_t most = e->smem(e->warps);
    cudaError_t rc = cudaGetDevice(&device);
    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (rc == cudaSuccess)
        rc =
            cudaFuncSetAttribute(e->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)most);
    if (rc == cudaSuccess)
        rc = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&together, e->kernel, e->warps * 32,
                                                           most);
    if (rc != cudaSuccess) return cudaGetErrorString(rc);
    if (together < 1) return "decode: a block does not fit on a multiprocessor";
    int runs = runs_for(&d, e->warps, sms, together);
    cudaLaunchAttribute at[2];
    cudaLaunchConfig_t cfg = {};
    cfg.stream = (cudaStream_t)stream;
    cfg.blockDim = dim3((unsigned)e->warps * 32);
    cfg.dynamicSmemBytes = most;
    cfg.gridDim = dim3((unsigned)runs, (unsigned)(a->kv.Hk * d.sets), (unsigned)a->seqs.n);
    why = cluster_for(&d, &e, &runs, sms, together, &cfg, at);
    if (why) return why;
    cfg.attrs = at;
    cfg.gridDim.x = (unsigned)runs;
    cfg.dynamicSmemBytes = e->smem(over(d.pages, runs));
    at[cfg.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    at[cfg.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    cfg.numAttrs++;
    decode_args p = args_of(a, &d, runs);
    why = run_shared(e, a, &d, sms, &p, stream);
    return why ? why : cuda_error(cudaLaunchKernelEx(&cfg, e->kernel, p));
}
#endif
