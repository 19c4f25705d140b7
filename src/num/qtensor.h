/* The canonical quantized tensor: what every dialect loads into and every kernel prepares from.
 *
 *   W[e][n][k] = (code(e,n,k) - zero(e,s)) * scale(e,s) * global(n) [* 1/pre_scale[k] is NOT
 * applied]
 *
 * codes      [E*N] rows of row_bytes bytes; each row is an LSB-first bit stream of K codes of
 *            num_infos[code].bits bits (element k at bit bits*k), rows padded to whole bytes.
 * Integer codes are two's complement of that width (int4 q=-8..7). F32/F16/BF16 rows are plain.
 * scales     grid [E*scale_rows, scale_cols] of scale_type, row major; scale index of (n,k) is
 *            (n / block_n, group(k)) with group(k) = g_idx ? g_idx[k] : k / block_k.
 *            NULL = all ones (plain float tensor). Multipliers, always.
 * zeros      same grid, zero_type NUM_I8.. (signed integer in the domain of the codes), or F16/F32
 *            (float zero points); NULL = 0. Subtracted before scaling.
 * global     second-level multiplier (NVFP4: 1/weight_global_scale), one per row range:
 *            n_global entries, entry i covers rows [global_row[i], global_row[i+1]) of each expert.
 * table      16 (or 256) values when the code is a table index (NF4, BNB_FP4); else NULL.
 * flat       blocks of block_k run over all N*K elements of an expert and cross rows (bitsandbytes
 *            with K % block != 0): scale_rows 1, scale_cols ceil(N*K / block_k), and the scale of
 *            (n,k) is entry (n*K + k) / block_k. No zeros, no g_idx.
 * g_idx      [K] group of column k (act-order); NULL = k / block_k.
 * pre_scale  [K] the activation is multiplied by this before use (AWQ/SmoothQuant exports); NULL =
 * none. input_scale/input_zero/input_global: static activation quantization; 0 = none.
 *
 * Pointers may borrow (mapped file) or be owned: `owned` lists heap blocks freed by qtensor_free.
 */
#ifndef NUM_QTENSOR_H
#define NUM_QTENSOR_H
#include "num/qspec.h"

#define QT_MAX_GLOBAL 4
#define QT_MAX_OWNED  8

typedef struct qtensor {
    qspec spec;
    num_dtype code;
    int64_t E, N, K;
    const uint8_t *codes;
    size_t row_bytes;
    num_dtype scale_type;
    const void *scales;
    int64_t scale_rows, scale_cols;
    int64_t block_n, block_k;
    bool flat;
    num_dtype zero_type;
    const void *zeros;
    int n_global;
    int64_t global_row[QT_MAX_GLOBAL + 1];
    float global[QT_MAX_GLOBAL];
    const float *table;
    const int32_t *g_idx;
    const float *pre_scale;
    float input_scale, input_zero, input_global;
    void *owned[QT_MAX_OWNED];
    int n_owned;
} qtensor;

void qtensor_free(qtensor *q);
/* A plain float tensor [N,K] that borrows `data`. */
void qtensor_plain(qtensor *q, num_dtype t, int64_t N, int64_t K, const void *data);
/* Allocates codes (zeroed), scales and zeros for spec.w and shape [E,N,K]; sets every grid field.
 * NVFP4 and MX specs have their own scale type (E4M3, E8M0); the argument is then ignored. n_global
 * stays 0 and is set by whoever computes the factor.
 * Q_GROUP with K % group != 0: the last group is short (scale_cols = ceil). */
int qtensor_alloc(qtensor *q, const qspec *spec, num_dtype scale_type, int64_t E, int64_t N,
                  int64_t K, err *e);
/* Checks every invariant above (sizes, ranges of g_idx, finite non-NaN scales); names `name`. */
int qtensor_check(const qtensor *q, const char *name, err *e);

int32_t qtensor_code(const qtensor *q, int64_t row, int64_t k); /* integer code, sign extended */
float qtensor_scale(const qtensor *q, int64_t row, int64_t k);  /* scale*global */
float qtensor_zero(const qtensor *q, int64_t row, int64_t k);
/* out[K] = dequantized row (0 <= row < E*N), all in fp32: (code - zero) * (scale * global), the
 * order of ModelOpt's reader; integers (code - zero) * scale * global, that of LLM.int8's. */
void qtensor_decode_row(const qtensor *q, int64_t row, float *out);
/* Same, rounded after each step to `t` as the checkpoint library does ((q - zp) cast to t, times
 * the stored scale, cast to t): for comparison with dequantizers that work in bf16/f16. t = NUM_F32
 * is decode_row. */
void qtensor_decode_row_as(const qtensor *q, int64_t row, num_dtype t, float *out);

/* Rows [n0,n1) (axis 'N') or an expert (axis 'E') as a view that borrows; columns [k0,k1) (axis
 * 'K', at group borders) as a copy of codes and scales that borrows the rest: qtensor_free the
 * result, it is always allowed. Errors say which alignment is needed. With g_idx all scales stay,
 * and g_idx of these columns with them. */
int qtensor_slice(const qtensor *q, char axis, int64_t lo, int64_t hi, qtensor *out, err *e);

typedef struct qbytes {
    uint64_t codes, scales, zeros, unquantized, padding, total;
} qbytes;
void qtensor_bytes(const qtensor *q, qbytes *add); /* adds into *add */

/* A new tensor that owns everything, with rows[0..n) of each expert in this order (a row may come
 * twice): row i of expert e is row rows[i] of expert e of q. Scales of single rows are gathered,
 * one scale for all rows stays one, scales of blocks of rows become scales of single rows. Global
 * factors keep as many ranges as the new order needs; more than QT_MAX_GLOBAL are an error. */
int qtensor_rows(const qtensor *q, const int32_t *rows, int64_t n, qtensor *out, err *e);
/* A new tensor that owns its rows: plain floats [E, N, K] turned into [E, K, N]. */
int qtensor_transpose(const qtensor *q, qtensor *out, err *e);
#endif
