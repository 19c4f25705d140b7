/* What plain kernels are written with, so that the same source is compiled by nvcc for the GPU and
 * by a C++ compiler for tests on a CPU (TARE_EMULATED; kern/cuda/emulate.h). Plain kernels use no
 * inline assembly without the same in C beside it, and nothing of CUDA beyond: threadIdx, blockIdx,
 * blockDim, gridDim, __shared__ arrays of fixed size, SMEM below, __syncthreads, __syncwarp, the
 * __shfl_*_sync and __any_sync family, atomicAdd, and the math functions of C.
 *
 * Reductions here: warp_sum, warp_max, block_sum, block_max (every thread gets the result; NaN
 * stays NaN). */
#ifndef KERN_CUDA_PORT_CUH
#define KERN_CUDA_PORT_CUH
#ifdef TARE_EMULATED
#include "kern/cuda/emulate.h"
#define LAUNCH_EARLY LAUNCH
#define LAUNCH_CLUSTER(kernel, grid, block, smem, stream, parts, ...)                              \
    LAUNCH(kernel, grid, block, smem, stream, __VA_ARGS__)
static inline bool has_clusters(void)
{
    return false;
}
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
/* Dynamic shared memory of the block. */
#define SMEM(type, name)                                                                           \
    extern __shared__ __align__(1024) unsigned char smem_bytes_[];                                 \
    type *name = reinterpret_cast<type *>(smem_bytes_)
/* More than 48 KiB of it: right before the launch. NULL or why not. */
#define ALLOW_SMEM(kernel, bytes)                                                                  \
    cuda_error(                                                                                    \
        cudaFuncSetAttribute((kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes)))
/* Why it was not launched, or NULL. */
#define LAUNCH(kernel, grid, block, smem, stream, ...)                                             \
    (kernel<<<(grid), (block), (smem), (cudaStream_t)(stream)>>>(__VA_ARGS__), launch_error())
static inline const char *cuda_error(cudaError_t rc)
{
    return rc == cudaSuccess ? NULL : cudaGetErrorString(rc);
}
static inline const char *launch_error(void)
{
    return cuda_error(cudaGetLastError());
}
/* Can kernels of the current device start early? */
static inline bool starts_early(void)
{
    static int major = 0; /* all devices of a machine are alike in this */
    int device;
    if (!major && cudaGetDevice(&device) == cudaSuccess)
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major >= 9;
}
/* Blocks of a kernel can be clusters wherever kernels can start early. */
static inline bool has_clusters(void)
{
    return starts_early();
}
/* parts > 1: so many blocks side by side in x are a cluster. */
template <class... P, class... A>
static inline const char *launch_early(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem,
                                       void *stream, int parts, const A &...args)
{
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute how[2] = {};
    how[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    how[0].val.programmaticStreamSerializationAllowed = 1;
    how[1].id = cudaLaunchAttributeClusterDimension;
    how[1].val.clusterDim.x = (unsigned)parts;
    how[1].val.clusterDim.y = how[1].val.clusterDim.z = 1;
    c.gridDim = grid;
    c.blockDim = block;
    c.dynamicSmemBytes = smem;
    c.stream = (cudaStream_t)stream;
    c.attrs = how;
    c.numAttrs = !starts_early() ? 0 : parts > 1 ? 2 : 1;
    return cuda_error(cudaLaunchKernelEx(&c, kernel, (P)args...));
}
/* LAUNCH of a kernel that may start while the one before it in the stream still runs (programmatic
 * dependent launch). Such a kernel calls pdl_go, then pdl_wait: what others wrote is there after
 * pdl_wait, and before it nothing may be read but constants (weights), nor written. All threads
 * call pdl_wait, also those that have nothing to do: that a kernel has ended then says that those
 * before it have, which the kernel after it relies on. */
#define LAUNCH_EARLY(kernel, grid, block, smem, stream, ...)                                       \
    launch_early(kernel, dim3(grid), dim3(block), (smem), (stream), 1, __VA_ARGS__)
/* The same in clusters of `parts` blocks. */
#define LAUNCH_CLUSTER(kernel, grid, block, smem, stream, parts, ...)                              \
    launch_early(kernel, dim3(grid), dim3(block), (smem), (stream), (parts), __VA_ARGS__)
#endif
#include "kern/cuda/api.h"

/* The next kernel may start once all blocks have come here. */
static __device__ __forceinline__ void pdl_go(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/* Until the kernels before this one have ended and their writes are seen. */
static __device__ __forceinline__ void pdl_wait(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Bit patterns, so that no half or bf16 type is needed where it is emulated. */
static __device__ __forceinline__ float bits_f32(uint32_t u)
{
    return __uint_as_float(u);
}
static __device__ __forceinline__ float bf16_f32(uint16_t h)
{
    return bits_f32((uint32_t)h << 16);
}
static __device__ __forceinline__ uint16_t f32_bf16(float f) /* to nearest even; NaN stays NaN */
{
    uint32_t u = __float_as_uint(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 64);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* Lane i of activations. */
static __device__ __forceinline__ float lane(gpu_x x, int64_t i)
{
    return x.type == GPU_F32 ? ((const float *)x.p)[i] : bf16_f32(((const uint16_t *)x.p)[i]);
}
static __device__ __forceinline__ void put_lane(gpu_x x, int64_t i, float v)
{
    if (x.type == GPU_F32)
        ((float *)x.p)[i] = v;
    else
        ((uint16_t *)x.p)[i] = f32_bf16(v);
}

static __device__ __forceinline__ float max_nan(float a, float b)
{
    return a != a ? a : b != b ? b : a > b ? a : b;
}
static __device__ __forceinline__ float warp_sum(float v)
{
    for (int i = 16; i; i >>= 1)
        v += __shfl_xor_sync(0xffffffffu, v, i);
    return v;
}
static __device__ __forceinline__ float warp_max(float v)
{
    for (int i = 16; i; i >>= 1)
        v = max_nan(v, __shfl_xor_sync(0xffffffffu, v, i));
    return v;
}
/* blockDim.x a multiple of 32, at most 1024; all threads take part. */
static __device__ __forceinline__ float block_reduce(float v, bool max)
{
    __shared__ float part[32];
    int warp = (int)threadIdx.x / 32, n = (int)blockDim.x / 32;
    v = max ? warp_max(v) : warp_sum(v);
    __syncthreads(); /* part may still be read */
    if (threadIdx.x % 32 == 0) part[warp] = v;
    __syncthreads();
    float r = part[0];
    for (int i = 1; i < n; i++)
        r = max ? max_nan(r, part[i]) : r + part[i];
    return r;
}
static __device__ __forceinline__ float block_sum(float v)
{
    return block_reduce(v, false);
}
static __device__ __forceinline__ float block_max(float v)
{
    return block_reduce(v, true);
}
#endif
