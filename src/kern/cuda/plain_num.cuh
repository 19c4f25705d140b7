/* Element codecs of num/num.c on the device, to the bit: 8-bit and smaller floats saturate, f16
 * overflows to infinity, ties go to even, NaN stays NaN where the type has one (E2M1 has none and
 * gives 0). Types are num_dtype, as in the structures of api.h.
 *
 * An 8-bit float moved to the place of f32's exponent and mantissa is its value but for the bias of
 * the exponent, which a product with a power of two puts right, subnormals included:
 *     |x| = f32(code << (23 - m)) * 2^(127 - bias)
 * Rounding as num.c: the adder rounds what falls below the smallest normal number. Both need f32
 * subnormals, so this is never compiled with them flushed to zero. */
#ifndef KERN_CUDA_PLAIN_NUM_CUH
#define KERN_CUDA_PLAIN_NUM_CUH
#include "kern/cuda/port.cuh"
extern "C" {
#include "num/qspec.h"
}

/* ---- codes to values ----------------------------------------------------------------------------
 */
static __device__ __forceinline__ float e4m3_f32(uint32_t c)
{
    uint32_t sign = (c & 0x80u) << 24, a = c & 0x7fu;
    if (a == 0x7fu) return bits_f32(sign | 0x7fc00000u);
    float f = bits_f32(a << 20) * 0x1p120f;
    return bits_f32(sign | __float_as_uint(f));
}
static __device__ __forceinline__ float e5m2_f32(uint32_t c)
{
    uint32_t sign = (c & 0x80u) << 24, a = c & 0x7fu;
    if (a > 0x7cu) return bits_f32(sign | 0x7fc00000u);
    if (a == 0x7cu) return bits_f32(sign | 0x7f800000u);
    float f = bits_f32(a << 21) * 0x1p112f;
    return bits_f32(sign | __float_as_uint(f));
}
static __device__ __forceinline__ float e8m0_f32(uint32_t c)
{
    c &= 0xffu;
    return bits_f32(c == 255 ? 0x7fc00000u : c ? c << 23 : 0x00400000u);
}
static __device__ __forceinline__ float e2m1_f32(uint32_t c)
{
    float f = bits_f32((c & 7u) << 22) * 0x1p126f;
    return bits_f32((c & 8u) << 28 | __float_as_uint(f));
}
static __device__ __forceinline__ float f16_f32(uint32_t h)
{
    uint32_t sign = (h & 0x8000u) << 16, a = (h & 0x7fffu) << 13;
    if (a >= 0x0f800000u) return bits_f32(sign | a | 0x7f800000u);
    float f = bits_f32(a) * 0x1p112f;
    return bits_f32(sign | __float_as_uint(f));
}
/* The floats that scales and values come in; NaN for other types. */
static __device__ __forceinline__ float code_f32(int type, uint32_t c)
{
    switch (type) {
    case NUM_F32:
        return bits_f32(c);
    case NUM_F16:
        return f16_f32(c);
    case NUM_BF16:
        return bf16_f32((uint16_t)c);
    case NUM_F8_E4M3:
        return e4m3_f32(c);
    case NUM_F8_E5M2:
        return e5m2_f32(c);
    case NUM_F8_E8M0:
        return e8m0_f32(c);
    case NUM_F4_E2M1:
        return e2m1_f32(c);
    default:
        return bits_f32(0x7fc00000u);
    }
}

/* ---- values to codes ----------------------------------------------------------------------------
 */

/* Code of the magnitude with these bits (not NaN) in a float of m mantissa bits and smallest normal
 * exponent e; may exceed the largest finite code. */
static __device__ __forceinline__ uint32_t small_float(uint32_t a, int m, int e)
{
    int shift = 23 - m;
    if (a >= (uint32_t)(127 + e) << 23) {
        uint32_t r = a + (1u << (shift - 1)) - 1 + (a >> shift & 1);
        return (r >> shift) - ((uint32_t)(127 + e - 1) << m);
    }
    uint32_t magic = (uint32_t)(127 + e - m + 23) << 23;
    return __float_as_uint(bits_f32(a) + bits_f32(magic)) - magic;
}
static __device__ __forceinline__ uint32_t f32_small(float x, int m, int e, uint32_t max,
                                                     uint32_t nan, int sign_bit)
{
    uint32_t u = __float_as_uint(x), a = u & 0x7fffffffu, sign = (u >> 31) << sign_bit;
    if (a > 0x7f800000u) return nan | (nan ? sign : 0);
    uint32_t c = small_float(a, m, e);
    return sign | (c > max ? max : c);
}
static __device__ __forceinline__ uint32_t f32_e4m3(float x)
{
    return f32_small(x, 3, -6, 0x7e, 0x7f, 7);
}
static __device__ __forceinline__ uint32_t f32_e5m2(float x)
{
    return f32_small(x, 2, -14, 0x7b, 0x7e, 7);
}
static __device__ __forceinline__ uint32_t f32_e2m1(float x)
{
    return f32_small(x, 1, 0, 7, 0, 3);
}
static __device__ __forceinline__ uint32_t f32_f16(float x)
{
    uint32_t u = __float_as_uint(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return sign | 0x7e00u | (a >> 13 & 0x3ffu);
    return sign | (a >= 0x47800000u ? 0x7c00u : small_float(a, 10, -14));
}
/* Nearest power of two, its middle upwards; NaN and negative values have no code. */
static __device__ __forceinline__ uint32_t f32_e8m0(float x)
{
    uint32_t u = x == 0.0f ? 0 : __float_as_uint(x);
    if (u > 0x7f800000u) return 255;
    if (u >= 0x7f400000u) return 254;
    if (u < 0x00800000u) return u >= 0x00600000u;
    return (u + 0x400000u) >> 23;
}
/* Value of the nearest number of a type; NaN for types that code_f32 does not know. */
static __device__ __forceinline__ float round_f32(int type, float x)
{
    switch (type) {
    case NUM_F32:
        return x;
    case NUM_F16:
        return f16_f32(f32_f16(x));
    case NUM_BF16:
        return bf16_f32(f32_bf16(x));
    case NUM_F8_E4M3:
        return e4m3_f32(f32_e4m3(x));
    case NUM_F8_E5M2:
        return e5m2_f32(f32_e5m2(x));
    case NUM_F8_E8M0:
        return e8m0_f32(f32_e8m0(x));
    case NUM_F4_E2M1:
        return e2m1_f32(f32_e2m1(x));
    default:
        return bits_f32(0x7fc00000u);
    }
}
/* Scale code of an MX block: off = 2 for fp4, 8 for fp8. */
static __device__ __forceinline__ uint32_t mx_scale(float amax, int off)
{
    uint32_t u = __float_as_uint(amax) & 0x7fffffffu;
    if (u > 0x7f800000u) return 255;
    int e = (int)((u + 0x200000u) >> 23) - off;
    return e < 0 ? 0u : (uint32_t)e & 0xffu;
}
#endif
