/* Attention of one new token a sequence over a paged cache on the GPU (decode.cuh), as a C call. */
#ifndef KERN_CUDA_DECODE_H
#define KERN_CUDA_DECODE_H
#include "kern/cuda/api.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Why decode_run does not take this, or NULL. Reads nothing of the device. */
__attribute__((visibility("default"))) const char *decode_refuse(const gpu_attention *a);
/* Why decode_run leaves pages that sequences share to each of them, or NULL. */
__attribute__((visibility("default"))) const char *decode_shared_refuse(const gpu_attention *a);
/* gpu_attention of the sequences that have one row in this step; others are left alone, rows of no
 * sequence become zero. May start before the kernel in front of it has ended. NULL = launched, else
 * why not. */
__attribute__((visibility("default"))) const char *decode_run(const gpu_attention *a, void *stream);

#ifdef __cplusplus
}
#endif
#endif
