/* Products of few rows on the GPU (small.cuh), as C calls: y[M,N] = x[M,K] W^T with M <= 8 tokens,
 * weights packed by small_pack. Pointers are device pointers unless said otherwise. */
#ifndef KERN_CUDA_SMALL_H
#define KERN_CUDA_SMALL_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Formats of packed weights: format.cuh. Codes are a byte a weight, but for BF16:
 *
 *   INT4_*             0..15, value (code - zero) * scale, zero 8 or given (_ZERO), scales of that
 *                      many columns
 *   E4M3               value code; _BLOCK: times a scale of 128 x 128, that of the first of 16 rows
 *   INT8               value code; _GROUP: times scales of 128 columns
 *   BF16               two bytes
 *   MXFP4, NVFP4       E2M1 in the lower four bits; scales of 32 (powers of two) or 16 columns
 *                      (numbers of three mantissa bits, not negative) */
typedef enum small_format {
    SMALL_INT4_128,
    SMALL_INT4_128_ZERO,
    SMALL_INT4_64,
    SMALL_INT4_64_ZERO,
    SMALL_INT4_32,
    SMALL_INT4_32_ZERO,
    SMALL_E4M3,
    SMALL_E4M3_BLOCK,
    SMALL_INT8,
    SMALL_INT8_GROUP,
    SMALL_BF16,
    SMALL_MXFP4,
    SMALL_NVFP4,
    SMALL_FORMATS
} small_format;
#define SMALL_INT4 SMALL_INT4_128

#define SMALL_MAX_M 8
/* N in 16 rows, K in 128 columns. */
size_t small_packed_bytes(small_format f, int64_t N, int64_t K);
/* Columns that share a scale of a row; 0 = the format takes none. */
int small_group(small_format f);
bool small_has_zeros(small_format f);
/* The columns of a step share a scale (format.cuh): groups of less than 64. */
static inline int small_fine(small_format f)
{
    return f == SMALL_INT4_32 || f == SMALL_INT4_32_ZERO || f == SMALL_MXFP4 || f == SMALL_NVFP4;
}
/* Host memory to host memory; any range of rows in multiples of 16 may be packed on its own, by any
 * thread. scales: [N, K/group] f32 multipliers, kept to 11 bits of mantissa; zeros: [N, K/group],
 * 0..127; both NULL where the format has none. col_scale: [N], the factor of each row of results
 * (scale of a channel or of the tensor, or 1): it is multiplied by what the packing takes out of
 * the row, and becomes NaN where a code or scale of the row is NaN; BF16 leaves it as it is. */
void small_pack(small_format f, const void *codes, const float *scales, const uint8_t *zeros,
                int64_t N, int64_t K, uint8_t *out, float *col_scale);
/* What the packing keeps of the scales of a row; kept[i] != scales[i]: it has other digits or lies
 * too far below the largest, and whoever wants the numbers as they are packs them otherwise. */
void small_kept(small_format f, const float *scales, int64_t n, float *kept);
/* y[m][n] = (x[m] . W[n]) * row_scale[m] * col_scale[n] + bias[n] */
typedef struct small_call {
    small_format format;
    const void *w; /* packed */
    const void *x; /* bf16 [M,K], row stride ldx */
    void *y;       /* [M,N] of f32 or bf16, row stride ldy */
    int y_bf16;
    const float *row_scale; /* [M] or NULL: of codes of quantized rows, which are exact in bf16 */
    const float *col_scale; /* [N], of small_pack; NULL = 1 */
    const float *bias;      /* [N] or NULL */
    int64_t ldx, ldy;
    int N, K, M;
    void *stream; /* cudaStream_t */
    int pdl;      /* may start before the kernel in front of it has ended */
    int split;    /* blocks that K is cut among: 1, 2, 4, 8; 0 = as small_entry says */
    int stages;   /* stretches of W on their way, 2 to 8; 0 = as small_entry says */
} small_call;
/* NULL = launched; else why not ("K = 96 is not a multiple of 128", or CUDA's own words). */
const char *small_run(const small_call *c);
/* How a product is divided on this device: "6 stages of 16 units, K over 2 blocks"; "none":
 * refused. Good until the next call of the same thread. */
const char *small_entry(small_format f, int N, int K, int M);

#ifdef __cplusplus
}
#endif
#endif
