/* Attention of many new tokens over a paged cache on the GPU (prefill.cuh), as a C call. */
#ifndef KERN_CUDA_PREFILL_H
#define KERN_CUDA_PREFILL_H
#include "kern/cuda/api.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Why prefill_run does not take this, or NULL. Reads nothing of the device. */
__attribute__((visibility("default"))) const char *prefill_refuse(const gpu_attention *a);
/* gpu_attention of the sequences that have `least` rows or more in this step; others are left
 * alone, rows of no sequence become zero. work is not used. NULL = launched, else why not. */
__attribute__((visibility("default"))) const char *prefill_run(const gpu_attention *a, int least,
                                                               void *stream);

#ifdef __cplusplus
}
#endif
#endif
