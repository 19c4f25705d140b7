/* Products of many rows on the GPU (wide.cuh), as C calls: y[M,N] = x[M,K] W^T for M > 8, weights
 * packed by small_pack. Pointers are device pointers. */
#ifndef KERN_CUDA_WIDE_H
#define KERN_CUDA_WIDE_H
#include "kern/cuda/small.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct wide_plan { /* what a shape is computed by */
    int tokens;            /* of a tile: 16, 32, 64, 128, 256 */
    int groups;            /* of four multiplying warps a block, 64 rows each */
    int split;             /* blocks of a cluster that share K: 1, 2, 4, 8 */
    int share;             /* blocks of a cluster that get x together: 1, 2; 0 is 1 */
} wide_plan;

typedef struct wide_call {
    small_format format;
    const void *w; /* packed */
    const void *x; /* bf16 [M,K], row stride ldx; NULL: work holds it, put there by wide_order */
    void *work;    /* wide_work_bytes, aligned to 128 */
    void *y;       /* [M,N] of f32 or bf16, row stride ldy, a multiple of 4, aligned to 16; as
                    * small_call says what it becomes */
    int y_bf16;
    const float *row_scale; /* as of small_call; those of rows of W aligned to 16 */
    const float *col_scale, *bias;
    int64_t ldx, ldy;
    int N, K, M;
    void *stream;   /* cudaStream_t */
    int pdl;        /* may start before the kernel in front of it has ended */
    wide_plan plan; /* zeros: wide_choose */
} wide_call;

/* The plan of the table. */
wide_plan wide_choose(small_format f, int N, int K, int M);
/* Whether there is a kernel for it. */
int wide_has(small_format f, wide_plan p, int K);
size_t wide_work_bytes(int K, int M);
/* Where element (m, k) of x stands in work, in elements, with tiles of so many tokens. */
size_t wide_place(small_format f, int tokens, int K, int m, int k);
/* x into work. */
const char *wide_order(const wide_call *c);
/* NULL = launched; else why not. Orders x first unless it is NULL. */
const char *wide_run(const wide_call *c);

#ifdef __cplusplus
}
#endif
#endif
