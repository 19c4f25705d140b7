/* A kernel that streams weights has one block a multiprocessor and must not get two: it starts
 * while the one before it still holds some multiprocessors, and two blocks on one that is free,
 * none on another, take half as long again (a whole step measured on an H200: 5.8 against 4.15 ms).
 * So it asks for more than half of the shared memory. */
#ifndef KERN_CUDA_ALONE_CUH
#define KERN_CUDA_ALONE_CUH
#include <cuda_runtime.h>

/* A multiprocessor has 228 KB, of which a block takes one more than it asks for. */
#define ALONE_SMEM ((size_t)114 * 1024)

static inline cudaError_t alone_sms(int *sms)
{
    int device = 0;
    cudaError_t rc = cudaGetDevice(&device);
    return rc == cudaSuccess ? cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device)
                             : rc;
}

/* Sets the shared memory of *cfg, and its first attribute where `split` > 1 blocks are a cluster.
 * most: blocks, or clusters, that work side by side; there are fewer of these than multiprocessors
 * would make, as a cluster lies in one group of them. */
template <class... A>
static cudaError_t alone_take(void (*kernel)(A...), int split, cudaLaunchConfig_t *cfg, int *most)
{
    int sms = 0;
    cudaError_t rc = alone_sms(&sms);
    if (cfg->dynamicSmemBytes < ALONE_SMEM) cfg->dynamicSmemBytes = ALONE_SMEM;
    if (rc == cudaSuccess)
        rc = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)cfg->dynamicSmemBytes);
    if (rc == cudaSuccess) /* a multiprocessor set to less would have to be empty first */
        rc = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);
    *most = sms / split;
    if (rc != cudaSuccess || split == 1) return rc;
    int held = 0;
    cfg->attrs[0].id = cudaLaunchAttributeClusterDimension;
    cfg->attrs[0].val.clusterDim.x = (unsigned)split;
    cfg->attrs[0].val.clusterDim.y = cfg->attrs[0].val.clusterDim.z = 1;
    cfg->numAttrs = 1;
    cfg->gridDim = dim3((unsigned)(*most * split));
    rc = cudaOccupancyMaxActiveClusters(&held, kernel, cfg);
    if (held < *most) *most = held;
    return rc;
}
#endif
