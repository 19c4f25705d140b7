/* Private to kern: the small operators as one table per instruction set. Entries work on one row or
 * head on the calling thread; ops.c splits rows over the team. A NULL entry means that the table
 * has no version of its own and the next one is asked; the plain C twin has all. */
#ifndef KERN_OPS_H
#define KERN_OPS_H
#include "kern/linear.h"

/* Entries of a table besides attention; routing is a few numbers a token and has the twin alone. */
/* clang-format off */
#define KERN__VECTOR_OPS(X) \
    X(rmsnorm) X(layernorm) X(gated_rmsnorm) X(add) X(add_scaled) X(scale) X(softcap) \
    X(sigmoid_mul) X(rope) X(rope_pairs) X(act) X(glu) X(head_rows) X(conv_silu) X(delta) \
    X(round_fp8) X(round_int) X(amax) X(quant_i8) X(split_bf16) X(kv_put)
#define KERN__OP_LIST(X) KERN__VECTOR_OPS(X) X(route)
/* clang-format on */

typedef struct kern__ops {
    const char *name;
    uint32_t needs;
    void (*rmsnorm)(const float *x, const float *w, float eps, int64_t K, float *out);
    void (*layernorm)(const float *x, const float *w, const float *b, float eps, int64_t K,
                      float *out);
    void (*gated_rmsnorm)(const float *x, const float *gate, const float *w, float eps, int64_t K,
                          float *out);
    void (*add)(float *x, const float *y, int64_t n);
    void (*add_scaled)(float *x, const float *y, float s, int64_t n);
    void (*scale)(float *x, float s, int64_t n);
    void (*softcap)(float *x, float cap, int64_t n);
    void (*sigmoid_mul)(float *x, const float *g, int64_t n);
    void (*rope)(float *x, int rot_dim, const float *cosv, const float *sinv);
    void (*rope_pairs)(float *x, int rot_dim, const float *cosv, const float *sinv);
    void (*act)(kern_glu act, const float *x, int64_t n, float *out);
    void (*glu)(kern_glu act, const float *g, const float *u, int64_t n, float *out);
    /* out[t*ldo + i] = x[t*ldx ...] times row (row0 + i) of w, i < rows; tmp holds four rows. */
    void (*head_rows)(const qtensor *w, int64_t row0, int64_t rows, const float *x, int64_t ldx,
                      int64_t T, float *out, int64_t ldo, float *tmp);
    /* Channels [c0,c1) of one sequence of `rows` tokens; state is that of channel c0. */
    void (*conv_silu)(float *x, int64_t ld, int64_t c0, int64_t c1, int W, const float *w,
                      int64_t rows, float *state);
    /* Lanes [v0,v1) of value head h of one sequence; state [Dk, Dv] of the head; tmp 2 Dk + Dv. */
    void (*delta)(const kern_delta_args *a, const kern_seq *q, int h, int v0, int v1, float *state,
                  float *tmp);
    /* One token; tmp holds 2 E + n_group floats. */
    void (*route)(const kern_route_args *a, int64_t t, float *tmp);
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
/* Lanes of V: D, or those of the latent that are V. */
int kern__v_lanes(const kern_kv_layer *kv);
/* One token to f32: D lanes of K, or kern__v_lanes of V. */
void kern__kv_decode(const kern_kv_layer *kv, int which, int head, int64_t slot, float *out);

/* Eight partial sums. */
float kern__ref_dot(const float *a, const float *b, int64_t n);
/* Twins that live outside ref/ops.c. */
void kern__ref_route(const kern_route_args *a, int64_t t, float *tmp);
void kern__ref_conv_silu(float *x, int64_t ld, int64_t c0, int64_t c1, int W, const float *w,
                         int64_t rows, float *state);
void kern__ref_delta(const kern_delta_args *a, const kern_seq *q, int h, int v0, int v1,
                     float *state, float *tmp);
bool kern__ref_attention(kern_dev *d, const kern_attn_args *a);
bool kern__attention_avx2(kern_dev *d, const kern_attn_args *a);
bool kern__attention_avx512(kern_dev *d, const kern_attn_args *a);
#endif
