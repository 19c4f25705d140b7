/* Attention of many new tokens over a paged cache on GPUs with wgmma (prefill90.cuh), as a C call.
 */
#ifndef KERN_CUDA_PREFILL90_H
#define KERN_CUDA_PREFILL90_H
#include "kern/cuda/api.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Why prefill90_run does not take this, or NULL. Reads nothing of the device. */
__attribute__((visibility("default"))) const char *prefill90_refuse(const gpu_attention *a);
/* As prefill_run (prefill.h); counts tiles in the first two words of work, which it leaves zero.
 * May start before the kernel in front of it has ended. */
__attribute__((visibility("default"))) const char *prefill90_run(const gpu_attention *a, int least,
                                                                 void *stream);

#ifdef __cplusplus
}
#endif
#endif
