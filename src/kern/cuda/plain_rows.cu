/* Plain kernels on rows: norms. */
#include "kern/cuda/port.cuh"

/* One block a row. */
static __global__ void rmsnorm_kernel(const gpu_norm a)
{
    int64_t at = (int64_t)blockIdx.x * a.K;
    float ss = 0;
    for (int64_t i = threadIdx.x; i < a.K; i += blockDim.x) {
        float v = lane(a.x, at + i);
        ss += v * v;
    }
    ss = block_sum(ss);
    float r = rsqrtf(ss / (float)a.K + a.eps);
    for (int64_t i = threadIdx.x; i < a.K; i += blockDim.x)
        put_lane(a.out, at + i, lane(a.x, at + i) * r * a.w[i]);
}
extern "C" const char *cuda_rmsnorm(const void *args_, void *stream)
{
    const gpu_norm *a = (const gpu_norm *)args_;
    if (!a->T) return NULL;
    return LAUNCH(rmsnorm_kernel, (unsigned)a->T, 256, 0, stream, *a);
}
