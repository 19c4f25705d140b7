/* Element types and their codecs. Rounding is to nearest, ties to even; conversion to a type of 8
 * bits or less saturates at the largest finite value (infinity too, also in E5M2), f16 and bf16
 * overflow to infinity as IEEE does, NaN stays NaN where the type has one. E4M3 is the OCP
 * "FN" form. Golden vectors: ml_dtypes on all codes. */
#ifndef NUM_NUM_H
#define NUM_NUM_H
#include <math.h>
#include "base/mem.h"

typedef enum num_dtype {
    NUM_NONE = -1,
#define DTYPE(id, name, tag, bits, kind, max, doc) NUM_##id,
#include "num/dtypes.def"
#undef DTYPE
    NUM_COUNT
} num_dtype;

typedef struct num_info {
    const char *name, *tag, *doc;
    int bits;
    char kind; /* 'F' 'I' 'U' 'E' 'T' */
    double max;
} num_info;
extern const num_info num_infos[NUM_COUNT];
num_dtype num_by_name(const char *name, size_t len); /* NUM_NONE if unknown; aliases accepted */
num_dtype num_by_tag(const char *tag, size_t len);   /* safetensors tag */
/* Bytes of n elements packed densely (bits*n rounded up to bytes). */
size_t num_bytes(num_dtype t, size_t n);

/* Single values. decode: code in the low bits. encode: value to code (RNE).
 * F64 and I64 exist in rows only (a code has 32 bits): decode gives NaN, encode 0. */
float num_decode(num_dtype t, uint32_t code);
uint32_t num_encode(num_dtype t, float x);

/* Rows: n elements packed LSB-first (element i at bit bits*i; F16, BF16, F32 … little endian). */
void num_decode_row(num_dtype t, const void *codes, size_t n, float *out);
void num_encode_row(num_dtype t, const float *x, size_t n, void *codes);
/* Get and put one element of an LSB-first packed row, bits in {1..8,16}. */
uint32_t num_get_bits(const uint8_t *row, size_t i, int bits);
void num_put_bits(uint8_t *row, size_t i, int bits, uint32_t v);

uint16_t num_f32_to_bf16(float x);
float num_bf16_to_f32(uint16_t x);
uint16_t num_f32_to_f16(float x);
float num_f16_to_f32(uint16_t x);
float num_round(num_dtype t, float x); /* decode(encode(x)) */

/* Scale code of an MX block by the compressed-tensors rule: 127 + floor(log2(P(amax))) - off,
 * off = 2 for fp4 and 8 for fp8 (formats: mantissa >= 1.75 rounds the exponent up). */
uint8_t num_mx_scale(float amax, int off);

extern const float num_nf4_table[16];
extern const float num_bnb_fp4_table[16]; /* by code, sign in bit 3; code 8 is +0 */
extern const float num_fp4_table[16];     /* E2M1 by code, sign in bit 3 */
#endif
