/* Products of many rows by NVIDIA's cuBLASLt, which is looked for at run time: y[M,N] = x[M,K] W^T
 * with W as it lies in a checkpoint, [N,K]. Without the library lt_open says why, and nothing else
 * may be called. Pointers are device pointers unless said otherwise.
 *
 *   kind       x and w   y =
 *   BF16       bf16      x w
 *   FP8        e4m3      x w * x_scale[0] * w_scale[0]
 *   FP8_ROWS   e4m3      x w * x_scale[m] * w_scale[n]
 *   FP8_BLOCK  e4m3      sum over g of (x w over columns 128g ..) * x_scale[g*Mp + m] *
 *                        w_scale[n/128*Gp + g], Mp = M and Gp = K/128 rounded up to 4; x, x_scale
 *                        and y have Mp rows, those behind M hold anything afterwards
 *   INT8       int8      x w * x_scale[m] * w_scale[n]
 *
 * Algorithms are asked for by lt_plan, outside of steps; lt_run only launches (and may be
 * captured). All launches of one handle share its work memory: one stream at a time. */
#ifndef KERN_CUDA_LT_H
#define KERN_CUDA_LT_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef enum lt_kind { LT_BF16, LT_FP8, LT_FP8_ROWS, LT_FP8_BLOCK, LT_INT8, LT_KINDS } lt_kind;

typedef struct lt_call {
    lt_kind kind;
    bool y_bf16; /* else f32 */
    bool fast;   /* FP8: sums are not taken to f32 every 128 columns */
    int64_t M, N, K;
    const void *w, *x; /* row strides K and ldx; bases and rows aligned to 16 bytes */
    const float *w_scale, *x_scale;
    const float *bias;     /* [N] or NULL */
    const void *bias_bf16; /* the same numbers in bf16 or NULL: added by the product where it can */
    void *y;               /* row stride ldy */
    int64_t ldx, ldy;      /* elements */
    void *stream;          /* cudaStream_t */
} lt_call;

typedef struct lt lt;
/* For the device that is bound; allocates the work memory (work_bytes, 0 = 64 MiB). */
const char *lt_open(lt **out, size_t work_bytes);
void lt_close(lt *l);        /* NULL is fine */
int lt_version(const lt *l); /* 130100 = 13.1.0 */
/* Finds and keeps an algorithm for the kind, types, shape and M of the call; addresses are not
 * looked at unless try_out: then the candidates run on the call's data, and the fastest is kept.
 * Not while a graph is captured. Planning again replaces. */
const char *lt_plan(lt *l, const lt_call *c, bool try_out);
/* The algorithm planned for this M, or for the next larger one, or else for the largest. NULL =
 * launched; else why not. */
const char *lt_run(lt *l, const lt_call *c);

#ifdef __cplusplus
}
#endif
#endif
