/* Instances of prefill.cuh. Rows of a warp and blocks of a multiprocessor: as many as registers
 * hold; wide heads get fewer rows a warp and more warps. */
#include "kern/cuda/prefill.h"
#include "kern/cuda/prefill.cuh"

typedef void kernel_fn(const gpu_attention, int);
typedef struct entry {
    int type, D, rows, threads; /* kern_kv_type */
    bool cap;
    size_t smem;
    kernel_fn *kernel;
} entry;
#define ROW(TYPE, V, D, M, WARPS, BLOCKS, CAP)                                                     \
    {                                                                                              \
        TYPE, D, prefill_shape<V, D, M, WARPS>::rows, prefill_shape<V, D, M, WARPS>::threads, CAP, \
            prefill_shape<V, D, M, WARPS>::smem, prefill_kernel<V, D, M, WARPS, BLOCKS, CAP>       \
    }
#define BOTH(D, M, WARPS, BLOCKS)                                                                  \
    ROW(KV_BF16, kv_bf16, D, M, WARPS, BLOCKS, false),                                             \
        ROW(KV_BF16, kv_bf16, D, M, WARPS, BLOCKS, true),                                          \
        ROW(KV_FP8_E4M3, kv_e4m3, D, M, WARPS, BLOCKS, false),                                     \
        ROW(KV_FP8_E4M3, kv_e4m3, D, M, WARPS, BLOCKS, true)
static const entry entries[] = {
    BOTH(64, 2, 4, 2),
    BOTH(96, 2, 4, 2),
    BOTH(128, 2, 4, 2),
    BOTH(256, 1, 8, 1),
};

static const entry *find(const gpu_attention *a)
{
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (entries[i].type == a->kv.type && entries[i].D == a->kv.D &&
            entries[i].cap == (a->softcap > 0))
            return &entries[i];
    return NULL;
}

/* Blocks: one more than there are tiles at most, whatever the device's n_rows are. */
static int64_t blocks(const gpu_attention *a, int rows)
{
    const int64_t G = a->H / a->kv.Hk;
    const int64_t each = (a->seqs.max_rows * G + rows - 1) / rows * a->seqs.n;
    const int64_t all = a->seqs.T * G / rows + a->seqs.n;
    return (each < all ? each : all) * a->kv.Hk + 1;
}

extern "C" const char *prefill_refuse(const gpu_attention *a)
{
    const char *why = attn_refuse(a);
    if (why) return why;
    const entry *e = find(a);
    if (!e) return "made for bf16 and fp8_e4m3 caches and heads of 64, 96, 128 and 256 lanes";
    return blocks(a, e->rows) > INT32_MAX ? "more tiles than a grid has blocks" : NULL;
}

extern "C" const char *prefill_run(const gpu_attention *a, int least, void *stream)
{
    const char *why = prefill_refuse(a);
    if (why || !a->seqs.n || a->seqs.max_rows < 1) return why;
    const entry *e = find(a);
    why = ALLOW_SMEM(e->kernel, e->smem);
    if (why) return why;
    return LAUNCH(e->kernel, (unsigned)blocks(a, e->rows), (unsigned)e->threads, e->smem, stream,
                  *a, least);
}
