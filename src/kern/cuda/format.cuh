/* How weights lie in device memory, for every kernel that multiplies by them, and how they become
 * operands of the tensor cores.
 *
 * W is stored in units of 16 rows x 128 columns, units of one 16-row tile in order of K, tiles in
 * order of N. A unit holds the codes of two blocks of 64 columns, then what is kept of its rows:
 * scales [16][groups], zeros [16][groups] of a byte. In a block lane l has rows l/4 and l/4+8. The
 * inner product does not care about the order of its terms; step s of a block (s < 4) multiplies as
 * number 8h + 2c + j (c = l%4; h, j < 2)
 *
 *   coarse  columns 16c + 8h + 2s + j: x is read as it lies, 32 bytes a lane
 *   fine    columns 16s + 4c + 2h + j: the columns of a step share a scale
 *
 *   int4   block 512 bytes: lane's word h of a row has the columns of its h, nibbles s and 4+s
 * those of step s, so that one mask takes out a pair as bf16 128 + code. Groups of 128 and 64
 *          columns are coarse, of 32 fine. Scales are f16, next to a power of two of each row that
 *          is in the factor of the row
 *   e4m3   block 1024 bytes: lane's 16 bytes of row l/4, then of l/4+8; word s has the pairs h = 0
 *          (first number: sign at bit 15, the rest at 10..4) and h = 1 (sign at 11, the rest at
 *          14..12 and 3..0), j in the other half of the word. As bf16 it is 2^-120 of its value.
 *          Blocks of 128 x 128: one f32 scale a unit, times 2^60
 *   int8   the same places, bytes: h = 0 in the lower one; f16 scales of 128 columns or none
 *   bf16   block 2048 bytes
 *   fp4    E2M1 with scales of 32 or 16 columns, fine: lane's words as of int4, each half with four
 *          codes: sign 15 and the rest at 8..6; 12 and 5..3; 9 and 2..0; 11 and 14, 13, 10. As bf16
 *          it is 2^-126 of its value. A scale is a byte that becomes bf16 by one product: the
 *          exponent (32), or five bits of exponent and three of mantissa (16). Code times scale is
 *          exact in bf16 */
#ifndef KERN_CUDA_FORMAT_CUH
#define KERN_CUDA_FORMAT_CUH
#include "kern/cuda/format_bits.h"

#define SMALL_UNIT_K 128
#define SMALL_ROWS   16

enum small_sums {
    SUMS_PLAIN,  /* the sum of a unit is added as it is */
    SUMS_ROW,    /* times a scale of its row and group */
    SUMS_UNIT,   /* times a scale of the unit */
    SUMS_VALUES, /* scales are in the operands */
};

/* ---- formats: bytes, A fragments of one 64-column block -----------------------------------------
 * base: what is left to multiply results with. at: of the block, plus 16 a lane. */
template <int GROUP, bool ZEROS> struct w_int4_of {
    static constexpr int groups = SMALL_UNIT_K / GROUP, block_bytes = 512;
    static constexpr int row_bytes = 2 * groups, zero_bytes = ZEROS ? groups : 0;
    static constexpr int unit_bytes = 2 * block_bytes + SMALL_ROWS * (row_bytes + zero_bytes);
    static constexpr small_sums sums = SUMS_ROW;
    static constexpr bool fine = GROUP < 64, zeros = ZEROS;
    static constexpr bool biased = true; /* codes come with 128 and the zero point, 8 by default */
    static constexpr float base = 1;
    static __device__ __forceinline__ void block(uint32_t at, uint32_t a[4][4])
    {
        uint4 v = ptx_lds128(at);
        const uint32_t w[4] = {v.x, v.z, v.y, v.w}; /* rows r, r+8 of h = 0, then of h = 1 */
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[s][i] = format_int4(w[i], s);
    }
};
typedef w_int4_of<128, false> w_int4;
typedef w_int4_of<128, true> w_int4_zero;
typedef w_int4_of<64, false> w_int4_64;
typedef w_int4_of<64, true> w_int4_64_zero;
typedef w_int4_of<32, false> w_int4_32;
typedef w_int4_of<32, true> w_int4_32_zero;

template <small_sums SUMS> struct w_e4m3_of {
    static constexpr int groups = 1, block_bytes = 1024, row_bytes = 0, zero_bytes = 0;
    static constexpr int unit_bytes = 2 * block_bytes + (SUMS == SUMS_UNIT ? 16 : 0);
    static constexpr small_sums sums = SUMS;
    static constexpr bool fine = false, zeros = false, biased = false;
    static constexpr float base = SUMS == SUMS_UNIT ? 0x1p60f : 0x1p120f;
    static __device__ __forceinline__ void block(uint32_t at, uint32_t a[4][4])
    {
        uint4 lo = ptx_lds128(at), hi = ptx_lds128(at + 512);
        const uint32_t r0[4] = {lo.x, lo.y, lo.z, lo.w}, r1[4] = {hi.x, hi.y, hi.z, hi.w};
#pragma unroll
        for (int s = 0; s < 4; s++) {
            a[s][0] = format_e4m3(r0[s], 0);
            a[s][2] = format_e4m3(r0[s], 1);
            a[s][1] = format_e4m3(r1[s], 0);
            a[s][3] = format_e4m3(r1[s], 1);
        }
    }
};
typedef w_e4m3_of<SUMS_PLAIN> w_e4m3;
typedef w_e4m3_of<SUMS_UNIT> w_e4m3_block;

template <small_sums SUMS> struct w_int8_of {
    static constexpr int groups = 1, block_bytes = 1024, row_bytes = SUMS == SUMS_ROW ? 2 : 0;
    static constexpr int zero_bytes = 0, unit_bytes = 2 * block_bytes + SMALL_ROWS * row_bytes;
    static constexpr small_sums sums = SUMS;
    static constexpr bool fine = false, zeros = false, biased = false;
    static constexpr float base = 1;
    static __device__ __forceinline__ void block(uint32_t at, uint32_t a[4][4])
    {
        uint4 lo = ptx_lds128(at), hi = ptx_lds128(at + 512);
        const uint32_t r0[4] = {lo.x, lo.y, lo.z, lo.w}, r1[4] = {hi.x, hi.y, hi.z, hi.w};
#pragma unroll
        for (int s = 0; s < 4; s++) {
            a[s][0] = pair(r0[s], 0);
            a[s][2] = pair(r0[s], 1);
            a[s][1] = pair(r1[s], 0);
            a[s][3] = pair(r1[s], 1);
        }
    }
    static __device__ __forceinline__ uint32_t pair(uint32_t w, int h)
    {
        return ptx_sub_bf16x2(format_int8(w, h), format_int8_off(w, h));
    }
};
typedef w_int8_of<SUMS_PLAIN> w_int8;
typedef w_int8_of<SUMS_ROW> w_int8_group;

struct w_bf16 {
    static constexpr int groups = 1, block_bytes = 2048, row_bytes = 0, zero_bytes = 0;
    static constexpr int unit_bytes = 4096;
    static constexpr small_sums sums = SUMS_PLAIN;
    static constexpr bool fine = false, zeros = false, biased = false;
    static constexpr float base = 1;
    static __device__ __forceinline__ void block(uint32_t at, uint32_t a[4][4])
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 v = ptx_lds128(at + (uint32_t)(i * 512));
            a[0][i] = v.x, a[1][i] = v.y, a[2][i] = v.z, a[3][i] = v.w;
        }
    }
};

template <int GROUP> struct w_fp4_of {
    static constexpr int groups = SMALL_UNIT_K / GROUP, block_bytes = 512;
    static constexpr int row_bytes = groups, zero_bytes = 0;
    static constexpr int unit_bytes = 2 * block_bytes + SMALL_ROWS * row_bytes;
    static constexpr small_sums sums = SUMS_VALUES;
    static constexpr bool fine = true, zeros = false, biased = false;
    static constexpr float base = 1;
    /* side: of the scales of row l/4. */
    static __device__ __forceinline__ void values(uint32_t at, uint32_t side, int b,
                                                  uint32_t a[4][4])
    {
        uint4 v = ptx_lds128(at);
        const uint32_t w[4] = {v.x, v.z, v.y, v.w};
        uint32_t by[2];
#pragma unroll
        for (int r = 0; r < 2; r++)
            by[r] = GROUP == 16 ? ptx_lds32(side + (uint32_t)(r * 8 * row_bytes + 4 * b))
                                : ptx_lds16(side + (uint32_t)(r * 8 * row_bytes + 2 * b));
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[s][i] = ptx_mul_bf16x2(format_fp4(w[i], s), scale(by[i % 2], s));
    }
    static __device__ __forceinline__ uint32_t scale(uint32_t word, int s)
    {
        return GROUP == 16 ? format_nv(word >> (8 * s) & 0xff)
                           : format_mx(word >> (8 * (s / 2)) & 0xff);
    }
};
typedef w_fp4_of<32> w_mxfp4;
typedef w_fp4_of<16> w_nvfp4;

/* ---- what is kept of rows -----------------------------------------------------------------------
 * Rows l/4 and l/4+8 of the lane; addresses are those of row l/4. */
template <class W>
static __device__ __forceinline__ void format_scales(uint32_t side, float s[2][W::groups])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t at = side + (uint32_t)(r * 8 * W::row_bytes);
        uint32_t w[2] = {0, 0};
        if (W::groups == 1) w[0] = ptx_lds16(at);
        if (W::groups == 2) w[0] = ptx_lds32(at);
        if (W::groups == 4) {
            uint2 v = ptx_lds64(at);
            w[0] = v.x, w[1] = v.y;
        }
#pragma unroll
        for (int g = 0; g < W::groups; g++)
            s[r][g] = ptx_f16_f32(w[g / 2] >> (16 * (g % 2)));
    }
}
/* 128 + zero of group g as two bf16. */
template <class W>
static __device__ __forceinline__ void format_zeros(uint32_t zero, int g, uint32_t z[2])
{
    z[0] = z[1] = 0x43084308u;
    if (W::zeros) {
        z[0] = ptx_lds8(zero + (uint32_t)g) * 0x10001u + 0x43004300u;
        z[1] = ptx_lds8(zero + (uint32_t)(8 * W::zero_bytes + g)) * 0x10001u + 0x43004300u;
    }
}

/* What becomes of a sum: y = sum * base * col_scale[n] * row_scale[m] + bias[n]. */
struct format_out {
    void *y; /* [M, N], row stride ldy */
    int64_t ldy;
    const float *row_scale, *col_scale, *bias; /* NULL: 1, 1, 0 */
    float base;
    int y_bf16;
};
#endif
