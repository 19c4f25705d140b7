/* Private to kern/gpu: products by cuBLASLt (operator `lt`), for every layout that has a row of
 * them. Algorithms are looked for while linears are made, because nothing may be while a step runs.
 * Weights that the library does not take as they lie become bf16 rows first, piece after piece: a
 * piece stays in room that all linears share. */
#ifndef KERN_GPU_LT_H
#define KERN_GPU_LT_H
#include "kern/gpu/gpu.h"

#define LT_MOST_ROWS 4096 /* of a product that an algorithm is looked for; more use that one */

/* Finds algorithms for the kind, the shape and every M of the call, both types of results, and with
 * a bias where that is asked for. NULL or why there are none, be it that there is no library. */
const char *gpu__lt_plan(gpu_dev *g, const lt_call *c, bool bias);
/* The same for a weight of K columns and N rows that comes in pieces of bf16. */
const char *gpu__lt_plan_pieces(gpu_dev *g, int64_t N, int64_t K, bool bias);
/* The bias as bf16 on the device, which products into bf16 add by themselves; NULL where bf16 does
 * not hold it. */
int gpu__lt_bias(gpu_dev *g, const float *bias, int64_t N, void **out, err *e);
void gpu__lt_push(gpu_dev *g, const lt_call *c);

/* Rows of a piece; only the last has fewer. */
int64_t gpu__lt_piece_rows(const gpu_dev *g, int64_t N, int64_t K);
size_t gpu__lt_piece_bytes(const gpu_dev *g, int64_t N, int64_t K);
/* A linear with such a weight was made; gpu__lt_reserve finds the room once all are. */
void gpu__lt_need_pieces(gpu_dev *g, int64_t N, int64_t K);
int gpu__lt_reserve(gpu_dev *g, err *e);
/* Where pieces lie; NULL: one was made after the room was. */
void *gpu__lt_piece(const gpu_dev *g);
void gpu__lt_close(gpu_dev *g);
#endif
