/* What the plain kernels on rows share: grids, and the functions of feed-forwards as the plain C
 * twin has them (ref/ops.c). */
#ifndef KERN_CUDA_PLAIN_ROWS_CUH
#define KERN_CUDA_PLAIN_ROWS_CUH
#include "kern/cuda/port.cuh"
extern "C" {
#include "kern/kern.h"
}

#define ROW_THREADS 256
#define MAX_BLOCKS  (1 << 20) /* kernels step on by the whole grid */

/* Blocks for n pieces of work, `each` in a block. */
static inline unsigned blocks_for(int64_t n, int64_t each)
{
    int64_t b = (n + each - 1) / each;
    return (unsigned)(b < MAX_BLOCKS ? b : MAX_BLOCKS);
}
/* n lanes of T rows: x along the lanes, y along the rows. */
static inline dim3 grid_for(int64_t n, int64_t T)
{
    return dim3(blocks_for(n, ROW_THREADS), (unsigned)(T < 65535 ? T : 65535));
}
/* This thread's lanes i of its rows t. */
#define FOR_LANES(t, i, n, T)                                                                      \
    for (int64_t t = blockIdx.y; t < (T); t += gridDim.y)                                          \
        for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (n);                  \
             i += (int64_t)gridDim.x * blockDim.x)

static __device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}
static __device__ __forceinline__ float activate(int act, float x)
{
    switch (act) {
    case KERN_SILU:
        return x / (1.0f + expf(-x));
    case KERN_GELU_TANH:
        return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case KERN_GELU:
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case KERN_RELU:
        return x < 0 ? 0 : x;
    case KERN_RELU2:
        return x < 0 ? 0 : x * x;
    case KERN_QUICK_GELU:
        return x / (1.0f + expf(-1.702f * x));
    default: /* KERN_SWIGLU_OAI */
        x = x > 7.0f ? 7.0f : x;
        return x / (1.0f + expf(-1.702f * x));
    }
}
static __device__ __forceinline__ float gated(int act, float g, float u)
{
    if (act == KERN_SWIGLU_OAI) u = (u < -7.0f ? -7.0f : u > 7.0f ? 7.0f : u) + 1.0f;
    return activate(act, g) * u;
}
#endif
