/* Private to kern: the small operators as one table per instruction set. Entries work on one row or
 * head on the calling thread; ops.c splits rows over the team. A NULL entry means that the table
 * has no version of its own and the next one is asked; the plain C twin has all. */
#ifndef KERN_OPS_H
#define KERN_OPS_H
#include "kern/linear.h"

typedef struct kern__ops {
    const char *name;
    uint32_t needs;
    void (*rmsnorm)(const float *x, const float *w, float eps, int64_t K, float *out);
    void (*add)(float *x, const float *y, int64_t n);
    void (*rope)(float *x, int rot_dim, const float *cosv, const float *sinv);
    void (*glu)(kern_glu act, const float *g, const float *u, int64_t n, float *out);
    /* Whole operator, on the team. False = not for these arguments: the next table is asked. */
    bool (*attention)(kern_dev *d, const kern_attn_args *a);
    /* v := mul times the value of the fp8 code of v/scale (E4M3 when max is 448, else E5M2). */
    void (*round_fp8)(float *v, int64_t n, float scale, float max, float mul);
    /* v := mul * clamp(RNE(v/scale), lo, hi) */
    void (*round_int)(float *v, int64_t n, float scale, float lo, float hi, float mul);
    float (*amax)(const float *v, int64_t n);
    /* codes = clamp(RNE(v/scale), lo, hi); returns the sum. */
    int32_t (*quant_i8)(const float *v, int64_t n, float scale, int lo, int hi, int8_t *codes);
    /* hi = bf16(v), lo = bf16(v - hi); lo may be NULL. */
    void (*split_bf16)(const float *v, int64_t n, uint16_t *hi, uint16_t *lo);
    /* One token of one head into its page; returns clipped elements. */
    uint64_t (*kv_put)(const kern_kv_layer *kv, int which, int head, int32_t slot, const float *x);
} kern__ops;
extern const kern__ops kern__ops_ref, kern__ops_avx2, kern__ops_avx512;

/* The table a device uses: each entry from the first of avx512, avx2, ref that has it. */
void kern__ops_resolve(uint32_t features, kern__ops *out);
#define KERN__OPS(d) (((const kern__dev *)(const void *)(d))->ops)

/* Address of code and scale of one token of one head. */
uint8_t *kern__kv_code(const kern_kv_layer *kv, int which, int head, int64_t slot);
uint8_t *kern__kv_scale(const kern_kv_layer *kv, int which, int head, int64_t slot);
void kern__kv_decode(const kern_kv_layer *kv, int which, int head, int64_t slot, float *out);
bool kern__attention_avx2(kern_dev *d, const kern_attn_args *a);
bool kern__attention_avx512(kern_dev *d, const kern_attn_args *a);
#endif
