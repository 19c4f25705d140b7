/* Heads of 64, 128 or 256 lanes, eight lanes a thread: so many threads of a warp, side by side,
 * have one (head_threads). How squares are summed depends on the length of a head alone, whichever
 * kernel does it and however heads are aligned: their norms are the same. */
#ifndef KERN_CUDA_PLAIN_HEADS_CUH
#define KERN_CUDA_PLAIN_HEADS_CUH
#include "kern/cuda/plain_rows.cuh"

/* 0: heads of another length. */
static __host__ __device__ __forceinline__ int head_threads(int D)
{
    return D == 64 || D == 128 || D == 256 ? D / 8 : 0;
}
/* Sum over the U threads of a head. All of the warp come here. */
static __device__ __forceinline__ float head_sum(float v, int U)
{
    for (int by = U / 2; by; by /= 2)
        v += __shfl_xor_sync(FULL, v, by);
    return v;
}
/* v, eight lanes of a head, becomes its norm as it is stored. */
static __device__ __forceinline__ void norm8(float v[8], int U, const float w[8], float eps,
                                             gpu_type type)
{
    float ss = 0;
#pragma unroll
    for (int j = 0; j < 8; j++)
        ss += v[j] * v[j];
    float r = norm_factor(head_sum(ss, U), 8 * U, eps);
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] = v[j] * r * w[j];
    raw_of8(type, v);
}
/* Eight weights or entries of a table, aligned to 16 bytes. */
static __device__ __forceinline__ void floats8(const float *p, float v[8])
{
    float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
/* Sum of the squares of a head, of a warp that has it in `get` (lane by lane), in the same order.
 */
template <class G> static __device__ __forceinline__ float head_squares(const G &get, int D, int me)
{
    float ss = 0;
    if (!head_threads(D)) {
        for (int k = me; k < D; k += 32) {
            float v = get(k);
            ss += v * v;
        }
        return warp_sum(ss);
    }
    for (int j = 0; j < 8 && 8 * me < D; j++) {
        float v = get(8 * me + j);
        ss += v * v;
    }
    return warp_sum(ss); /* lanes that have none add 0 first */
}
#endif
