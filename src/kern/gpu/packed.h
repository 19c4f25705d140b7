/* Private to the layout "packed": what is kept of a linear; products of it alone are in packed.c,
 * those of experts in experts.c. */
#ifndef KERN_GPU_PACKED_H
#define KERN_GPU_PACKED_H
#include "kern/cuda/format_read.h"
#include "kern/gpu/linear.h"

/* What becomes of an input first; all end as bf16, which holds what the rules of checkpoints leave.
 */
typedef enum becomes {
    AS_IT_IS,
    VALUES, /* what op act_run makes of it: in another order, scaled, MX */
    SHARED, /* the same, less a factor that all rows have: NVFP4 with a given scale */
    CODES   /* of op quant, less a factor of each row: FP8, int8 */
} becomes;

typedef struct part { /* one product */
    small_format format;
    int shard0, shards;
    int64_t row0, N;
    wide_plan plan[TUNED_ROWS]; /* zeros: the rule of wide */
    uint8_t *w;                 /* on the device, col behind it */
    float *col;                 /* NULL = ones */
    size_t w_bytes;
    int32_t *perm; /* host */
    becomes input;
    gpu_act act;      /* for op act_run */
    gpu_codes codes;  /* CODES: its code and given scale */
    float over;       /* SHARED: 1 / the factor */
    float *row_scale; /* [COPY_ROWS] of the factor */
    char text[48];    /* what becomes of the input, for reports */
} part;
typedef struct packed {
    int n;
    bool expert; /* its weights are the device's for good */
    part part[KERN_MAX_SHARDS];
    float *bias;
    void *bias_bf16; /* NULL where bf16 does not hold it */
} packed;

/* Columns as they are packed: those of experts may be half a unit more, which count nothing. */
static inline int64_t gpu__packed_k(int64_t K)
{
    return (K + FORMAT_UNIT - 1) / FORMAT_UNIT * FORMAT_UNIT;
}
/* Can rows be multiplied where they lie? */
static inline bool gpu__packed_fits(gpu_x x, int64_t ldx)
{
    return x.type == GPU_BF16 && ldx % 8 == 0 && (uintptr_t)x.p % 16 == 0;
}
/* May a product start before the kernel in front of it has ended? */
static inline int gpu__packed_early(const gpu_dev *g)
{
    return !g->facts.emulated;
}
#endif
