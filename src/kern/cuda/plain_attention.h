/* Memory that attention needs to add up parts of long caches. Kernels that let the last block of a
 * sequence merge count in the first bytes of it; these are zero between launches, and others leave
 * them alone. */
#ifndef KERN_CUDA_PLAIN_ATTENTION_H
#define KERN_CUDA_PLAIN_ATTENTION_H
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif

#define ATTENTION_COUNTERS 65536 /* of 4 bytes each */

/* Bytes for steps of at most `rows` rows: H query heads, values of Dv lanes. */
size_t cuda_attention_work(int rows, int H, int Dv);

#ifdef __cplusplus
}
#endif
#endif
