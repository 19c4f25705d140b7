/* Bits of packed weights (format.cuh), for device code and for the tests of packing: words of codes
 * to two bf16 of a row, those of columns j = 0 and 1, lower half first. */
#ifndef KERN_CUDA_FORMAT_BITS_H
#define KERN_CUDA_FORMAT_BITS_H
#include <stdint.h>
#ifdef __CUDACC__
#include "kern/cuda/ptx.cuh"
#define FORMAT_BITS            static __device__ __forceinline__
#define FORMAT_AND_OR(a, b, c) ptx_and_or(a, b, c)
#else
#define FORMAT_BITS            static inline
#define FORMAT_AND_OR(a, b, c) (((a) & (b)) | (c))
#endif

/* Column of a block of 64 that is number 8h + 2c + j of step s. */
FORMAT_BITS int format_column(int fine, int s, int h, int c, int j)
{
    return fine ? 16 * s + 4 * c + 2 * h + j : 16 * c + 8 * h + 2 * s + j;
}
/* 128 + code */
FORMAT_BITS uint32_t format_int4(uint32_t w, int s)
{
    return FORMAT_AND_OR(w >> (4 * s), 0x000f000fu, 0x43004300u);
}
/* Value times 2^-120. */
FORMAT_BITS uint32_t format_e4m3(uint32_t w, int h)
{
    if (!h) return w & 0x87f087f0u;
    return FORMAT_AND_OR(w << 4, 0x80f080f0u, (w >> 4) & 0x07000700u);
}
/* The value is what is left when the second is taken from the first: 128 + the lower seven bits,
 * and 128 or 256. */
FORMAT_BITS uint32_t format_int8(uint32_t w, int h)
{
    return FORMAT_AND_OR(w >> (8 * h), 0x007f007fu, 0x43004300u);
}
FORMAT_BITS uint32_t format_int8_off(uint32_t w, int h)
{
    return FORMAT_AND_OR(w >> (8 * h), 0x00800080u, 0x43004300u);
}
/* Value times 2^-126. */
FORMAT_BITS uint32_t format_fp4(uint32_t w, int s)
{
    if (s < 3) return (w << (3 * s)) & 0x81c081c0u;
    return FORMAT_AND_OR(w << 4, 0x80008000u,
                         FORMAT_AND_OR(w >> 6, 0x01800180u, (w >> 4) & 0x00400040u));
}
/* Scale bytes of groups of 32 and of 16 columns. */
FORMAT_BITS uint32_t format_mx(uint32_t byte)
{
    return byte * 0x00800080u;
}
FORMAT_BITS uint32_t format_nv(uint32_t byte)
{
    return byte * 0x00100010u + 0x6f006f00u;
}
#endif
