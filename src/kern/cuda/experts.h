/* Products of experts with packed weights, as C calls: slot i of expert e, first[e] <= i <
 * first[e+1], reads row ids[i] of x and becomes row i of y. small_experts_run is for a few slots an
 * expert (experts_small.cuh), wide_experts_run for many (experts_wide.cuh); both take any number.
 * `first` and `ids` are read on the device: a graph may be replayed with others. Pointers are
 * device pointers. */
#ifndef KERN_CUDA_EXPERTS_H
#define KERN_CUDA_EXPERTS_H
#include "kern/cuda/small.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct experts_call {
    small_format format;
    const void *const *w;          /* [E] packed by small_pack, aligned to 16 */
    const float *const *col_scale; /* [E], each [N], aligned to 16 */
    const float *const *bias;      /* the same, or NULL */
    const void *x;                 /* bf16, row stride ldx, aligned to 16 bytes */
    const int32_t *ids;            /* [slots] rows of x; NULL: slot i reads row i */
    const int32_t *first;          /* [E+1] */
    const float *row_scale;        /* of the rows of x, or NULL */
    void *y;                       /* [slots, N] of f32 or bf16, row stride ldy */
    int y_bf16;
    int64_t ldx, ldy;
    int64_t slots; /* first[E] is not more */
    int N, K, E;   /* K: of w */
    int x_k;       /* columns that x has, a multiple of 64; those of w behind them count nothing */
    void *work;    /* wide only: wide_experts_work_bytes, aligned to 128 */
    void *stream;  /* cudaStream_t */
    int pdl;       /* may start before the kernel in front of it has ended */
} experts_call;

/* NULL = launched; else why not. */
const char *small_experts_run(const experts_call *c);
/* ldy a multiple of 4, y aligned to 16 bytes. */
const char *wide_experts_run(const experts_call *c);
size_t wide_experts_work_bytes(int K, int E, int64_t slots);

#ifdef __cplusplus
}
#endif
#endif
