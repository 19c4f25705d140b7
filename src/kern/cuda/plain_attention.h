/* Attention for what no tuned kernel takes (plain_attention.cu), and the memory in which attention
 * kernels add up parts of long caches: gpu_attention.work. Its first bytes are counters of kernels
 * whose last block merges, zero between launches; parts of rows and heads follow. */
#ifndef KERN_CUDA_PLAIN_ATTENTION_H
#define KERN_CUDA_PLAIN_ATTENTION_H
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif

#define ATTENTION_COUNTERS  65536 /* of 4 bytes each */
#define ATTENTION_PARTS     64    /* of a row and head at most */
#define ATTENTION_PART_ROWS 4096  /* rows x heads x parts at most, of Dv + 2 floats each */

/* Behind them, parts of pages that sequences share: sequences x heads x runs at most, and runs. */
#define ATTENTION_SHARED_ROWS 32768
#define ATTENTION_SHARED_RUNS 16

/* Bytes for steps of at most `rows` rows: H query heads, values of Dv lanes. */
size_t cuda_attention_work(int rows, int H, int Dv);
/* gpu_attention of every type, order and option. NULL = launched, else why not. */
const char *plain_attention(const void *args, void *stream);

#ifdef __cplusplus
}
#endif
#endif
