/* Products of few rows on the GPU (small.cuh), as C calls: y[M,N] = x[M,K] W^T with M <= 8 tokens,
 * weights packed by small_pack. Pointers are device pointers unless said otherwise. */
#ifndef KERN_CUDA_SMALL_H
#define KERN_CUDA_SMALL_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef enum small_format { SMALL_INT4, SMALL_E4M3, SMALL_BF16, SMALL_FORMATS } small_format;

#define SMALL_MAX_M 8
/* N in 16 rows, K in 128 columns. */
size_t small_packed_bytes(small_format f, int64_t N, int64_t K);
/* Host memory to host memory. codes: [N,K] one byte a weight (INT4: 0..15, value code - 8; E4M3:
 * the byte) or two (BF16); scales: [N, K/128] f32 multipliers, rounded to bf16 (INT4: groups of
 * 128; E4M3: one a row, repeated), NULL for BF16. */
void small_pack(small_format f, const void *codes, const float *scales, int64_t N, int64_t K,
                uint8_t *out);

typedef struct small_call {
    small_format format;
    const void *w; /* packed */
    const void *x; /* bf16 [M,K], row stride ldx */
    float *y;      /* [M,N], row stride ldy */
    int64_t ldx, ldy;
    int N, K, M;
    void *stream; /* cudaStream_t */
    int pdl;      /* may start before the kernel in front of it has ended */
} small_call;
/* NULL = launched; else why not ("K = 96 is not a multiple of 128", or CUDA's own words). */
const char *small_run(const small_call *c);
/* The table entry that a shape uses: "16 warps, 4 stages of 2 units, 2 kept". */
const char *small_entry(small_format f, int K, int M);

#ifdef __cplusplus
}
#endif
#endif
