/* A kernel that streams weights has one block a multiprocessor and must not get two: it starts
 * while the one before it still holds some multiprocessors, and two blocks on one that is free,
 * none on another, take half as long again (a whole step measured on an H200: 5.8 against 4.15 ms).
 * So it asks for more than half of the shared memory. */
#ifndef KERN_CUDA_ALONE_CUH
#define KERN_CUDA_ALONE_CUH
#include <cuda_runtime.h>

/* A multiprocessor has 228 KB, of which a block takes one more than it asks for. */
#define ALONE_SMEM ((size_t)114 * 1024)

template <class... A> static cudaError_t stream_alone(void (*kernel)(A...), cudaLaunchConfig_t *cfg)
{
    if (cfg->dynamicSmemBytes < ALONE_SMEM) cfg->dynamicSmemBytes = ALONE_SMEM;
    cudaError_t rc = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)cfg->dynamicSmemBytes);
    if (rc == cudaSuccess) /* a multiprocessor set to less would have to be empty first */
        rc = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);
    return rc;
}
#endif
