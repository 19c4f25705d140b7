/* Products of at most 8 rows with a weight as it lies in a checkpoint, as C calls (slim.cuh): the
 * calls of rows.h, for which the weight was made ready by rows_prepare; `plan` is not looked at. */
#ifndef KERN_CUDA_SLIM_H
#define KERN_CUDA_SLIM_H
#include "kern/cuda/rows.h"
#ifdef __cplusplus
extern "C" {
#endif

#define SLIM_MAX_M 8

enum slim_how { SLIM_CODES = 1, SLIM_BLOCKS = 2 }; /* x is codes; scales of blocks */
#define SLIM_DEPTH 10                              /* even */
typedef struct slim_plan {                         /* what a shape is computed by */
    int split; /* blocks of a cluster that share K: 1, 2, 4, 8 */
    int depth; /* steps of every warp that are on their way: 2, 4 .. SLIM_DEPTH */
} slim_plan;

/* Zeros where x does not fit shared memory. */
slim_plan slim_choose(rows_format f, int how, int N, int K, int M);
int slim_has(rows_format f, int how, slim_plan p, int K, int M);
/* NULL = launched (or captured); else why not. */
const char *slim_run(const rows_call *c);
/* The same by a plan of choice. */
const char *slim_run_as(const rows_call *c, slim_plan p);

#ifdef __cplusplus
}
#endif
#endif
