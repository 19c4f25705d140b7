/* Where an element of a bf16 or fp8 cache stands in a page of GPU_KV_MMA order, for host and
 * device. A page of 32 tokens holds head after head; a head holds K [32 tokens][D], then V
 * transposed, [D][32 tokens]: both are the 16-row operand of the tensor cores as they lie.
 *
 *   K  the eight lanes number d/8 of token t stand at number d/8 ^ turn(t) of its row, so that the
 *      rows that a warp reads together lie in different banks. A row of D = 64 fp8 lanes is half of
 *      all banks wide and needs a turn for every second row only. The turn is 0 where it would
 * leave the row (D not a multiple of 64) V  token t stands at 8(t%8/2) + 4(t/16) + 2(t/8%2) + t%2:
 * what a lane of a warp multiplies lies side by side */
#ifndef KERN_CUDA_KV_PLACE_H
#define KERN_CUDA_KV_PLACE_H
#include <stddef.h>
#ifdef __CUDACC__
#define KV_PLACE static __host__ __device__ __forceinline__
#else
#define KV_PLACE static inline
#endif
#define KV_PLACE_TOKENS 32

/* bytes: of an element, 1 or 2. Depends on t % 8 alone. */
KV_PLACE int kv_turn(int bytes, int D, int t)
{
    if (D % 64) return 0;
    return 4 * (bytes == 2 ? t & 1 : D % 128 ? t >> 1 & 1 : t & 3);
}

/* Elements from the start of the head to lane d of token t of the page; which 0 = K, 1 = V. */
KV_PLACE size_t kv_place(int bytes, int D, int which, int t, int d)
{
    if (!which) return (size_t)(t * D + ((d / 8) ^ kv_turn(bytes, D, t)) * 8 + d % 8);
    int at = 8 * (t % 8 / 2) + 4 * (t / 16) + 2 * (t / 8 % 2) + t % 2;
    return (size_t)(KV_PLACE_TOKENS * D + d * KV_PLACE_TOKENS + at);
}
#endif
