/* What lt.cu and its plain twin share, on the host: which calls are taken. */
#ifndef KERN_CUDA_LT_RULES_H
#define KERN_CUDA_LT_RULES_H
#include "kern/cuda/lt.h"

/* Rows that the product has: of block scales a multiple of 4. */
static inline int64_t lt_rows_of(const lt_call *c)
{
    return c->kind == LT_FP8_BLOCK ? (c->M + 3) / 4 * 4 : c->M;
}

static inline const char *lt_refuse_shape(const lt_call *c)
{
    if (c->M < 1 || c->N < 1 || c->K < 1) return "no rows or columns";
    if (c->K % 16 || c->ldx % 16) return "K or a row stride is not a multiple of 16";
    if (c->kind == LT_BF16 && c->N % 8) return "N is not a multiple of 8";
    if (c->kind != LT_BF16 && c->N % 16) return "N is not a multiple of 16";
    return NULL;
}

/* Whether the product itself adds the bias. */
static inline bool lt_adds_bias(const lt_call *c)
{
    return c->bias_bf16 && c->y_bf16 && c->kind != LT_INT8;
}

/* Whether an algorithm found for one call computes the other, of whatever M. */
static inline bool lt_alike(const lt_call *a, const lt_call *b)
{
    return a->kind == b->kind && a->y_bf16 == b->y_bf16 && a->fast == b->fast && a->N == b->N &&
           a->K == b->K && lt_adds_bias(a) == lt_adds_bias(b);
}
#endif
