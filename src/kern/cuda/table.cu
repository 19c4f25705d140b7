/* The launch table: one entry for each operator of GPU_OPS. */
#include "kern/cuda/table.h"

/* Operators that nobody has written yet are NULL. */
#define WEAK(name, args)                                                                           \
    extern "C" __attribute__((weak)) const char *cuda_##name(const void *args_, void *stream);
GPU_OPS(WEAK)
#undef WEAK

#define ENTRY(name, args) cuda_##name,
extern "C" gpu_launch *const cuda_launches[GPU_N_OPS] = {GPU_OPS(ENTRY)};
#undef ENTRY
