/* How weights lie in device memory, for every kernel that multiplies by them, and how they become
 * operands of the tensor cores.
 *
 * W is stored in units of 16 rows x 128 columns, units of one 16-row tile in order of K, tiles in
 * order of N. A unit holds the codes of two blocks of 64 columns and then the scales of its rows.
 * In a block lane l has row l/4 and row l/4+8, columns 16(l%4) .. +15 of each; the inner product
 * does not care about the order of its terms, so x is read as it lies, 32 bytes a lane.
 *
 *   int4  block 512 bytes: lane's word j of a row holds columns 8j..8j+7, nibbles in the order
 *         0 2 4 6 1 3 5 7, so that one mask takes out a pair as bf16 128 + code; the sum of x times
 *         128 + zero is taken off once a unit
 *   e4m3  block 1024 bytes: lane's 32 bytes, row by row
 *   bf16  block 2048 bytes
 *
 * Step s of a block multiplies columns 16c + 8h + 2s + j as number 8h + 2c + j (c = l%4; h, j = 0,
 * 1): inside a block of 64 the order of the columns is the exchange of c and s. */
#ifndef KERN_CUDA_FORMAT_CUH
#define KERN_CUDA_FORMAT_CUH
#include "kern/cuda/ptx.cuh"

#define SMALL_UNIT_K 128
#define SMALL_ROWS   16

/* ---- formats: bytes of a unit, A fragments of one 64-column block, scale of a row --------------
 */
struct w_int4 {
    static constexpr int block_bytes = 512, unit_bytes = 1024 + 32;
    static constexpr bool scaled = true, grouped = true;
    static constexpr float offset = 136.0f; /* 128 of the trick and the zero, 8 */
    /* Four k16 steps of A; at: of the block, plus 16 a lane. */
    static __device__ __forceinline__ void block(uint32_t at, uint32_t a[4][4])
    {
        uint4 v = ptx_lds128(at);
        const uint32_t w[4] = {v.x, v.z, v.y, v.w}; /* rows r, r+8 of columns 0-7, then of 8-15 */
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[s][i] = ptx_and_or(w[i] >> (4 * s), 0x000f000fu, 0x43004300u);
    }
};
struct w_e4m3 { /* per-row scale, the same in every unit; 2^120 of the exponents is in the scale */
    static constexpr int block_bytes = 1024, unit_bytes = 2048 + 32;
    static constexpr bool scaled = true, grouped = false;
    static constexpr float offset = 0;
    static __device__ __forceinline__ void block(uint32_t at, uint32_t a[4][4])
    {
        uint4 lo = ptx_lds128(at), hi = ptx_lds128(at + 512);
        const uint32_t r0[4] = {lo.x, lo.y, lo.z, lo.w}, r1[4] = {hi.x, hi.y, hi.z, hi.w};
#pragma unroll
        for (int s = 0; s < 4; s++) {
            a[s][0] = pair(r0[s]);
            a[s][2] = pair(r0[s] >> 8);
            a[s][1] = pair(r1[s]);
            a[s][3] = pair(r1[s] >> 8);
        }
    }
    /* Bytes 0 and 2 as bf16 with the exponent of e4m3: value times 2^-120. */
    static __device__ __forceinline__ uint32_t pair(uint32_t w)
    {
        return ((w << 4) & 0x07f007f0u) | ((w << 8) & 0x80008000u);
    }
};
struct w_bf16 {
    static constexpr int block_bytes = 2048, unit_bytes = 4096;
    static constexpr bool scaled = false, grouped = false;
    static constexpr float offset = 0;
    static __device__ __forceinline__ void block(uint32_t at, uint32_t a[4][4])
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 v = ptx_lds128(at + (uint32_t)(i * 512));
            a[0][i] = v.x, a[1][i] = v.y, a[2][i] = v.z, a[3][i] = v.w;
        }
    }
};
#endif
