/* Neighbours of a step's list that one kernel does better. */
#include "kern/gpu/gpu.h"

void gpu__fuse(gpu_dev *g, gpu_step *s)
{
    (void)g, (void)s;
}
