/* Products of few rows with a weight as it lies in a checkpoint, as C calls (rows.cuh):
 * y[M,N] = x[M,K] W[N,K]^T for M of 1 to 64. Pointers are device pointers unless said otherwise.
 *
 *   y[m][n] = (sum over k of x[m][k] w[n][k]) * scale * row_scale[m] + bias[n]
 *
 * sums in f32; W is bf16, e4m3 or int8. A block-scaled e4m3 weight has a scale of every 128 rows x
 * 128 columns, [N/128 rounded up][K/128 rounded up], and may meet an x with a scale of its own for
 * every 128 columns: both multiply the sum of those columns before it is added up. An x that was
 * quantized comes as bf16 that hold its codes. Results do not depend on timing. */
#ifndef KERN_CUDA_ROWS_H
#define KERN_CUDA_ROWS_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define ROWS_MAX_M       64
#define ROWS_MAX_BLOCK_M 32 /* with block scales */

typedef enum rows_format { ROWS_BF16, ROWS_E4M3, ROWS_INT8, ROWS_FORMATS } rows_format;
typedef enum rows_scales {
    ROWS_UNSCALED,
    ROWS_TENSOR, /* scale[0] */
    ROWS_ROW,    /* scale[n] */
    ROWS_BLOCK   /* e4m3 only */
} rows_scales;

typedef struct rows_weight { /* made once a weight, by rows_prepare */
    uint64_t map[16];        /* the tensor map */
    rows_format format;
    int N, K;
    const void *at; /* where it lies */
    int64_t ld;     /* elements from a row to the next */
} rows_weight;

typedef struct rows_plan { /* what a shape is computed by */
    int groups;            /* of 32 rows a block has at a time */
    int chunks;            /* of 128 bytes of every row a stage has; 2 chunks x groups warps */
    int split;             /* blocks of a cluster that share K: 1, 2, 4, 8 */
} rows_plan;

typedef struct rows_call {
    const rows_weight *w;
    rows_scales scales;
    const float *scale;     /* as `scales` says */
    const float *bias;      /* [N] or NULL */
    const void *x;          /* bf16 [M,K], row stride ldx, a multiple of 8, aligned to 16 bytes */
    const float *row_scale; /* [M] or NULL */
    const float *x_scale;   /* [M, K/128 rounded up], row stride ld_x_scale; ROWS_BLOCK only */
    int x_codes;            /* x holds codes of the weight's 8-bit type, as bf16 */
    void *y;                /* [M,N] of f32 or bf16, row stride ldy */
    int y_bf16;
    int64_t ldx, ld_x_scale, ldy;
    int M;
    void *stream;   /* cudaStream_t */
    int pdl;        /* may start before the kernel in front of it has ended */
    rows_plan plan; /* zeros: rows_choose */
} rows_call;

/* W: [N,K], row stride ldw elements; base and row stride are multiples of 16 bytes, K of 8
 * elements (bf16) or 16. Launches nothing. NULL or why not. */
const char *rows_prepare(rows_weight *out, rows_format f, const void *w, int64_t ldw, int64_t N,
                         int64_t K);
/* Why there is no kernel for the call; NULL = there is one. */
const char *rows_refuse(const rows_call *c);
/* NULL = launched (or captured); else why not: rows_refuse, or CUDA's own words. */
const char *rows_run(const rows_call *c);
rows_plan rows_choose(rows_format f, int N, int K, int M);
/* Whether the plan fits the chip. */
int rows_has(rows_format f, rows_plan p, int K, int M);

#ifdef __cplusplus
}
#endif
#endif
