/* Instances of prefill90.cuh. */
#include "kern/cuda/prefill90.h"
#include "kern/cuda/prefill90.cuh"

typedef void kernel_fn(const gpu_attention, int);
typedef struct entry {
    int type, D; /* kern_kv_type */
    size_t smem;
    kernel_fn *kernel;
} entry;
#define ROW(TYPE, V, D)                                                                            \
    {                                                                                              \
        TYPE, D, prefill90_shape<V, D>::smem, prefill90_kernel<V, D>                               \
    }
static const entry entries[] = {
    ROW(KV_BF16, kv_bf16, 64),
    ROW(KV_BF16, kv_bf16, 128),
    ROW(KV_FP8_E4M3, kv_e4m3, 64),
    ROW(KV_FP8_E4M3, kv_e4m3, 128),
};
static_assert(prefill90_shape<kv_e4m3, 128>::smem <= 232448, "what a block may have");

static const entry *find(const gpu_attention *a)
{
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (entries[i].type == a->kv.type && entries[i].D == a->kv.D) return &entries[i];
    return NULL;
}

/* Tiles of all sequences at most, whatever the device's n_rows are. */
static int64_t tiles(const gpu_attention *a)
{
    const int64_t G = a->H / a->kv.Hk, rows = PREFILL90_ROWS;
    const int64_t each = (a->seqs.max_rows * G + rows - 1) / rows * a->seqs.n;
    const int64_t all = a->seqs.T * G / rows + a->seqs.n;
    return (each < all ? each : all) * a->kv.Hk;
}

extern "C" const char *prefill90_refuse(const gpu_attention *a)
{
    const char *why = attn_refuse(a);
    if (why) return why;
    if (!find(a)) return "made for bf16 and fp8_e4m3 caches and heads of 64 and 128 lanes";
    if (a->window > 0) return "made for attention without a window";
    if (a->softcap > 0) return "made for scores without a softcap";
    if (!a->work) return "no work memory to count tiles in";
    return tiles(a) > INT32_MAX / 2 ? "more tiles than can be counted" : NULL;
}

/* Blocks that are there at a time. */
static const char *blocks(int *n)
{
#ifdef TARE_EMULATED
    *n = 4;
    return NULL;
#else
    int device = 0;
    const char *why = cuda_error(cudaGetDevice(&device));
    return why ? why
               : cuda_error(cudaDeviceGetAttribute(n, cudaDevAttrMultiProcessorCount, device));
#endif
}

extern "C" const char *prefill90_run(const gpu_attention *a, int least, void *stream)
{
    const char *why = prefill90_refuse(a);
    if (why || !a->seqs.n || a->seqs.max_rows < 1) return why;
    const entry *e = find(a);
    int n = 0;
    why = blocks(&n);
    if (why) return why;
    if (n > tiles(a)) n = (int)tiles(a);
    why = ALLOW_SMEM(e->kernel, e->smem);
    if (why) return why;
    return LAUNCH_EARLY(e->kernel, (unsigned)n, PREFILL90_THREADS, e->smem, stream, *a, least);
}
