/* Sixteen lanes of f32 or i32, as one AVX-512 register or two AVX2 registers, so that the kernels
 * in the *_body.h files are written once. Included only from cpu/avx2 and cpu/avx512. */
#ifndef KERN_CPU_SIMD_H
#define KERN_CPU_SIMD_H
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include "kern/ops.h"

#define INLINE static inline __attribute__((always_inline, unused))
#define UNROLL _Pragma("GCC unroll 16")

#ifdef __AVX512F__
#define KERN_ISA(name) name##_avx512
typedef __m512 vf;
typedef __m512i vi;
typedef __m512 vlut;
INLINE vf v_zero(void)
{
    return _mm512_setzero_ps();
}
INLINE vf v_set1(float x)
{
    return _mm512_set1_ps(x);
}
INLINE vf v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
INLINE void v_store(float *p, vf a)
{
    _mm512_storeu_ps(p, a);
}
INLINE vf v_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
INLINE vf v_fnma(vf a, vf b, vf c)
{
    return _mm512_fnmadd_ps(a, b, c);
}
INLINE vf v_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}
INLINE vf v_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}
INLINE vf v_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}
INLINE vf v_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}
INLINE vf v_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
INLINE vf v_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}
INLINE vi vi_load(const void *p)
{
    return _mm512_loadu_si512(p);
}
INLINE void vi_store(void *p, vi a)
{
    _mm512_storeu_si512(p, a);
}
INLINE vi vi_set1(int32_t x)
{
    return _mm512_set1_epi32(x);
}
#define vi_slli(a, n) _mm512_slli_epi32(a, n)
#define vi_srli(a, n) _mm512_srli_epi32(a, n)
#define vi_srai(a, n) _mm512_srai_epi32(a, n)
INLINE vi vi_srl(vi a, int n)
{
    return _mm512_srlv_epi32(a, _mm512_set1_epi32(n));
}
/* Low two bits of each nibble of `low`, above them bit i of the nibble of `top`, above that any. */
INLINE vi vi_join(vi low, vi top, int i)
{
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(0x33333333), low,
                                     _mm512_rorv_epi32(top, _mm512_set1_epi32(i - 2)), 0xca);
}
INLINE vi vi_and(vi a, vi b)
{
    return _mm512_and_si512(a, b);
}
INLINE vi vi_or(vi a, vi b)
{
    return _mm512_or_si512(a, b);
}
INLINE vi vi_add(vi a, vi b)
{
    return _mm512_add_epi32(a, b);
}
INLINE vi vi_max(vi a, vi b)
{
    return _mm512_max_epi32(a, b);
}
INLINE vi vi_min(vi a, vi b)
{
    return _mm512_min_epi32(a, b);
}
INLINE vf v_bits(vi a)
{
    return _mm512_castsi512_ps(a);
}
INLINE vi vi_bits(vf a)
{
    return _mm512_castps_si512(a);
}
INLINE vf v_cvt(vi a)
{
    return _mm512_cvtepi32_ps(a);
}
INLINE vi vi_round(vf a)
{
    return _mm512_cvtps_epi32(a);
}
INLINE vf v_from_u16(const void *p) /* sixteen f16 */
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(p));
}
INLINE vi vi_from_u16(const void *p)
{
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
}
INLINE vi vi_from_u8(const void *p)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(p));
}
INLINE vi vi_from_i8(const void *p)
{
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(p));
}
INLINE void vi_store_i8(void *p, vi a)
{
    _mm_storeu_si128(p, _mm512_cvtepi32_epi8(a));
}
INLINE void vi_store_u16(void *p, vi a)
{
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(a));
}
INLINE float v_sum(vf a)
{
    return _mm512_reduce_add_ps(a);
}
INLINE float v_hmax(vf a)
{
    return _mm512_reduce_max_ps(a);
}
INLINE int32_t vi_sum(vi a)
{
    return _mm512_reduce_add_epi32(a);
}
INLINE vlut v_lut(const float *t)
{
    return _mm512_loadu_ps(t);
}
INLINE vf v_lookup(vlut t, vi i)
{
    return _mm512_permutexvar_ps(i, t);
} /* low four bits of i */
INLINE vf v_select(vf a, vf b, vf x, vf y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
/* x * 2^n, n integral */
INLINE vf v_scalef(vf x, vf n)
{
    return _mm512_scalef_ps(x, n);
}
INLINE vf v_rint(vf x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE __mmask16 first_lanes(int n)
{
    return (__mmask16)(n >= 16 ? 0xffffu : (1u << n) - 1u);
}
/* Neighbouring lanes change places. */
INLINE vf v_swap_pairs(vf a)
{
    return _mm512_permute_ps(a, 0xb1);
}
/* Each of eight numbers twice; alternate: the first of the two negated. */
INLINE vf v_twice(const float *p, bool alternate)
{
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    vf a = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(p)));
    return alternate ? _mm512_mask_sub_ps(a, 0x5555, _mm512_setzero_ps(), a) : a;
}
INLINE void v_store_n(float *p, vf a, int n)
{
    _mm512_mask_storeu_ps(p, first_lanes(n), a);
}
INLINE vf v_load_n(const float *p, int n)
{
    return _mm512_maskz_loadu_ps(first_lanes(n), p);
}
#else
#define KERN_ISA(name) name##_avx2
typedef struct vf {
    __m256 a, b;
} vf;
typedef struct vi {
    __m256i a, b;
} vi;
typedef struct vlut {
    __m256 lo, hi;
} vlut;
#define V2(e1, e2)     ((vf){e1, e2})
#define I2(e1, e2)     ((vi){e1, e2})
INLINE vf v_zero(void)
{
    return V2(_mm256_setzero_ps(), _mm256_setzero_ps());
}
INLINE vf v_set1(float x)
{
    return V2(_mm256_set1_ps(x), _mm256_set1_ps(x));
}
INLINE vf v_load(const float *p)
{
    return V2(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8));
}
INLINE void v_store(float *p, vf v)
{
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
INLINE vf v_fma(vf x, vf y, vf z)
{
    return V2(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
INLINE vf v_fnma(vf x, vf y, vf z)
{
    return V2(_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b));
}
INLINE vf v_mul(vf x, vf y)
{
    return V2(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b));
}
INLINE vf v_div(vf x, vf y)
{
    return V2(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b));
}
INLINE vf v_add(vf x, vf y)
{
    return V2(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b));
}
INLINE vf v_sub(vf x, vf y)
{
    return V2(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b));
}
INLINE vf v_max(vf x, vf y)
{
    return V2(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b));
}
INLINE vf v_min(vf x, vf y)
{
    return V2(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b));
}
INLINE vi vi_load(const void *p)
{
    return I2(_mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1));
}
INLINE void vi_store(void *p, vi v)
{
    _mm256_storeu_si256(p, v.a);
    _mm256_storeu_si256((__m256i *)p + 1, v.b);
}
INLINE vi vi_set1(int32_t x)
{
    return I2(_mm256_set1_epi32(x), _mm256_set1_epi32(x));
}
#define vi_slli(v, n)  I2(_mm256_slli_epi32((v).a, n), _mm256_slli_epi32((v).b, n))
#define vi_srli(v, n)  I2(_mm256_srli_epi32((v).a, n), _mm256_srli_epi32((v).b, n))
#define vi_srai(v, n)  I2(_mm256_srai_epi32((v).a, n), _mm256_srai_epi32((v).b, n))
INLINE vi vi_srl(vi v, int n)
{
    __m256i c = _mm256_set1_epi32(n);
    return I2(_mm256_srlv_epi32(v.a, c), _mm256_srlv_epi32(v.b, c));
}
INLINE vi vi_and(vi x, vi y)
{
    return I2(_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b));
}
INLINE vi vi_or(vi x, vi y)
{
    return I2(_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b));
}
INLINE vi vi_add(vi x, vi y)
{
    return I2(_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b));
}
INLINE vi vi_join(vi low, vi top, int i)
{
    vi t = vi_slli(vi_and(vi_srl(top, i), vi_set1(0x11111111)), 2);
    return vi_or(vi_and(low, vi_set1(0x33333333)), t);
}
INLINE vi vi_max(vi x, vi y)
{
    return I2(_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b));
}
INLINE vi vi_min(vi x, vi y)
{
    return I2(_mm256_min_epi32(x.a, y.a), _mm256_min_epi32(x.b, y.b));
}
INLINE vf v_bits(vi v)
{
    return V2(_mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b));
}
INLINE vi vi_bits(vf v)
{
    return I2(_mm256_castps_si256(v.a), _mm256_castps_si256(v.b));
}
INLINE vf v_cvt(vi v)
{
    return V2(_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b));
}
INLINE vi vi_round(vf v)
{
    return I2(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b));
}
INLINE vf v_from_u16(const void *p)
{
    return V2(_mm256_cvtph_ps(_mm_loadu_si128(p)),
              _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1)));
}
INLINE vi vi_from_u16(const void *p)
{
    return I2(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)),
              _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p + 1)));
}
INLINE vi vi_from_u8(const void *p)
{
    __m128i v = _mm_loadu_si128(p);
    return I2(_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)));
}
INLINE vi vi_from_i8(const void *p)
{
    __m128i v = _mm_loadu_si128(p);
    return I2(_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)));
}
INLINE __m128i halves_16(__m256i v) /* eight i32 to i16, saturated signed (values fit) */
{
    return _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}
INLINE void vi_store_i8(void *p, vi v)
{
    _mm_storeu_si128(p, _mm_packs_epi16(halves_16(v.a), halves_16(v.b)));
}
INLINE void vi_store_u16(void *p, vi v)
{
    _mm_storeu_si128(
        p, _mm_packus_epi32(_mm256_castsi256_si128(v.a), _mm256_extracti128_si256(v.a, 1)));
    _mm_storeu_si128((__m128i *)p + 1, _mm_packus_epi32(_mm256_castsi256_si128(v.b),
                                                        _mm256_extracti128_si256(v.b, 1)));
}
INLINE float v_sum(vf v)
{
    __m256 s = _mm256_add_ps(v.a, v.b);
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
}
INLINE float v_hmax(vf v)
{
    __m256 s = _mm256_max_ps(v.a, v.b);
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}
INLINE int32_t vi_sum(vi v)
{
    __m256i s = _mm256_add_epi32(v.a, v.b);
    __m128i h = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    h = _mm_add_epi32(h, _mm_srli_si128(h, 8));
    return _mm_cvtsi128_si32(_mm_add_epi32(h, _mm_srli_si128(h, 4)));
}
INLINE vlut v_lut(const float *t)
{
    return (vlut){_mm256_loadu_ps(t), _mm256_loadu_ps(t + 8)};
}
INLINE __m256 lookup8(vlut t, __m256i i)
{
    __m256 lo = _mm256_permutevar8x32_ps(t.lo, i), hi = _mm256_permutevar8x32_ps(t.hi, i);
    return _mm256_blendv_ps(lo, hi, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
}
INLINE vf v_lookup(vlut t, vi i)
{
    return V2(lookup8(t, i.a), lookup8(t, i.b));
}
INLINE vf v_select(vf a, vf b, vf x, vf y)
{
    return V2(_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
              _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ)));
}
INLINE vf v_rint(vf x)
{
    return V2(_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
              _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
/* x * 2^n for n in [-252, 254], in two steps so that results near the smallest normal survive. */
INLINE vf v_scalef(vf x, vf n)
{
    vi i = vi_round(n), h = vi_srai(i, 1);
    vi r = I2(_mm256_sub_epi32(i.a, h.a), _mm256_sub_epi32(i.b, h.b));
    vi bias = vi_set1(127);
    vf p = v_bits(vi_slli(vi_add(h, bias), 23)), q = v_bits(vi_slli(vi_add(r, bias), 23));
    return v_mul(v_mul(x, p), q);
}
INLINE vf v_swap_pairs(vf v)
{
    return V2(_mm256_permute_ps(v.a, 0xb1), _mm256_permute_ps(v.b, 0xb1));
}
INLINE vf v_twice(const float *p, bool alternate)
{
    __m256 a = _mm256_loadu_ps(p);
    const __m256i lo = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3),
                  hi = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
    const __m256 neg = _mm256_setr_ps(-0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f, 0);
    vf v = V2(_mm256_permutevar8x32_ps(a, lo), _mm256_permutevar8x32_ps(a, hi));
    return alternate ? V2(_mm256_xor_ps(v.a, neg), _mm256_xor_ps(v.b, neg)) : v;
}
INLINE vf v_load_n(const float *p, int n)
{
    if (n >= 16) return v_load(p);
    float t[16] = {0};
    memcpy(t, p, (size_t)n * sizeof *p);
    return v_load(t);
}
INLINE void v_store_n(float *p, vf v, int n)
{
    float t[16];
    if (n >= 16) {
        v_store(p, v);
        return;
    }
    v_store(t, v);
    memcpy(p, t, (size_t)n * sizeof *p);
}
#endif

/* e^x: x = n ln2 + r, |r| <= ln2/2, polynomial of degree 6 on r. Relative error below 2e-7 from -87
 * to 88; below -87.3 the result is 0, above 88.7 it is the largest power in range. */
INLINE vf v_exp(vf x)
{
    vf hi = v_set1(88.7f), lo = v_set1(-87.3f);
    vf c = v_max(lo, v_min(hi, x)); /* the second operand wins where one is NaN: it stays */
    vf n = v_rint(v_mul(c, v_set1(1.44269504088896341f)));
    vf r = v_fnma(n, v_set1(0.693359375f), c);
    r = v_fnma(n, v_set1(-2.12194440e-4f), r);
    vf p = v_set1(1.9875691500e-4f);
    p = v_fma(p, r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_fma(p, v_mul(r, r), v_add(r, v_set1(1.0f)));
    vf y = v_scalef(p, n);
    return v_select(x, lo, v_zero(), y);
}

/* tanh: below 0.625 an odd polynomial (Cephes), else 1 - 2/(e^2x + 1). Relative error below 3e-7.
 */
INLINE vf v_tanh(vf x)
{
    const vi mask = vi_set1(0x7fffffff), sign = vi_set1((int32_t)0x80000000u);
    vf a = v_bits(vi_and(vi_bits(x), mask)), one = v_set1(1.0f), z = v_mul(x, x);
    vf p = v_set1(-5.70498872745e-3f);
    p = v_fma(p, z, v_set1(2.06390887954e-2f));
    p = v_fma(p, z, v_set1(-5.37397155531e-2f));
    p = v_fma(p, z, v_set1(1.33314422036e-1f));
    p = v_fma(p, z, v_set1(-3.33332819422e-1f));
    vf small = v_fma(v_mul(p, z), x, x);
    vf e = v_exp(v_add(a, a));
    vf big = v_sub(one, v_div(v_set1(2.0f), v_add(e, one)));
    big = v_bits(vi_or(vi_bits(big), vi_and(vi_bits(x), sign)));
    return v_select(a, v_set1(0.625f), small, big);
}

/* ---- weights to f32 ---------------------------------------------------------------------- */

enum { FMT_W2, FMT_W3, FMT_W4, FMT_I8, FMT_E4M3, FMT_E5M2, FMT_BF16, FMT_F16, FMT_F32 };
#define FMT_STEP(f) ((f) <= FMT_W4 ? 8 : (f) == FMT_F32 ? 1 : (f) >= FMT_BF16 ? 2 : 4)
#define FMT_BITS(f) ((f) == FMT_W2 ? 2 : (f) == FMT_W3 ? 3 : 32 / FMT_STEP(f))
#define FP8_POST    0x1p8f /* E4M3 codes come out of a block times 2^-8 */

INLINE int fmt_of(const kern__prep *p)
{
    switch (p->code) {
    case NUM_F8_E4M3:
        return FMT_E4M3;
    case NUM_F8_E5M2:
        return FMT_E5M2;
    case NUM_BF16:
        return FMT_BF16;
    case NUM_F16:
        return FMT_F16;
    case NUM_F32:
        return FMT_F32;
    default:
        return p->bits == 2 ? FMT_W2 : p->bits == 3 ? FMT_W3 : p->bits == 4 ? FMT_W4 : FMT_I8;
    }
}

/* fp8 becomes f16 by moving bits (E5M2 is its upper byte; E4M3 has another bias: times 2^-8),
 * because the conversion of f16 takes subnormals at full speed, which arithmetic on f32 subnormals
 * does not. Low and high bytes of the 16-bit words are converted apart, then even and odd lanes are
 * parted: k, k+2 | k+1, k+3. */
#ifdef __AVX512F__
INLINE void split_f16(__m512i h, vf *even, vf *odd)
{
    vf a = _mm512_cvtph_ps(_mm512_castsi512_si256(h));
    vf b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1));
    const __m512i ev = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    *even = _mm512_permutex2var_ps(a, ev, b);
    *odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(ev, _mm512_set1_epi32(1)), b);
}
INLINE void v_block_fp8(const bool e4m3, vi w, vf *o)
{
    const __m512i m = _mm512_set1_epi16((short)(e4m3 ? 0xbf80 : 0xff00));
    __m512i lo = _mm512_slli_epi16(w, 8), hi = w;
    if (e4m3) {
        lo = _mm512_srai_epi16(lo, 1);
        hi = _mm512_srai_epi16(hi, 1);
    }
    split_f16(_mm512_and_si512(lo, m), &o[0], &o[2]);
    split_f16(_mm512_and_si512(hi, m), &o[1], &o[3]);
}
INLINE vf v_f16_lanes(vi bits) /* f16 in the low half of each lane */
{
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits));
}
#else
INLINE void split_f16(__m256i h, __m256 *even, __m256 *odd)
{
    __m256 a = _mm256_cvtph_ps(_mm256_castsi256_si128(h));
    __m256 b = _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1));
    __m256d e = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88));
    __m256d d = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xdd));
    *even = _mm256_castpd_ps(_mm256_permute4x64_pd(e, 0xd8));
    *odd = _mm256_castpd_ps(_mm256_permute4x64_pd(d, 0xd8));
}
INLINE void half_fp8(const bool e4m3, __m256i w, __m256 *o)
{
    const __m256i m = _mm256_set1_epi16((short)(e4m3 ? 0xbf80 : 0xff00));
    __m256i lo = _mm256_slli_epi16(w, 8), hi = w;
    if (e4m3) {
        lo = _mm256_srai_epi16(lo, 1);
        hi = _mm256_srai_epi16(hi, 1);
    }
    split_f16(_mm256_and_si256(lo, m), &o[0], &o[2]);
    split_f16(_mm256_and_si256(hi, m), &o[1], &o[3]);
}
INLINE void v_block_fp8(const bool e4m3, vi w, vf *o)
{
    __m256 a[4], b[4];
    half_fp8(e4m3, w.a, a);
    half_fp8(e4m3, w.b, b);
    UNROLL
    for (int i = 0; i < 4; i++)
        o[i] = V2(a[i], b[i]);
}
INLINE vf v_f16_lanes(vi bits)
{
    uint16_t h[16];
    vi_store_u16(h, bits);
    return v_from_u16(h);
}
#endif

/* Codes of k..k+7 of a panel at b of `bits` (2, 3) a code as a block of w4p16, but for the bits of
 * each nibble above the code, which are any. */
INLINE vi v_narrow(const int bits, const uint8_t *b, int64_t k)
{
    const uint8_t *at = b + (k >> 5) * 64 * bits;
    vi low = vi_srl(vi_load(at + ((k >> 4) & 1) * 64), (int)(k >> 2) & 2);
    if (bits == 2) return low;
    return vi_join(low, vi_load(at + 128), (int)(k >> 3) & 3);
}

/* FMT_STEP(f) vectors of 16 rows from k on of a panel at b. E4M3 comes out times 2^-8. */
INLINE void v_block(const int f, const uint8_t *b, int64_t k, const vlut lut, vf *o)
{
    vi w = f == FMT_W2   ? v_narrow(2, b, k)
           : f == FMT_W3 ? v_narrow(3, b, k)
                         : vi_load(b + k * (64 / FMT_STEP(f)));
    if (f <= FMT_W4) {
        o[0] = v_lookup(lut, w);
        o[1] = v_lookup(lut, vi_srli(w, 8));
        o[2] = v_lookup(lut, vi_srli(w, 16));
        o[3] = v_lookup(lut, vi_srli(w, 24));
        o[4] = v_lookup(lut, vi_srli(w, 4));
        o[5] = v_lookup(lut, vi_srli(w, 12));
        o[6] = v_lookup(lut, vi_srli(w, 20));
        o[7] = v_lookup(lut, vi_srli(w, 28));
    } else if (f == FMT_I8) { /* u = q + 128 */
        vi m = vi_set1(255);
        vf bias = v_set1(128.0f);
        o[0] = v_sub(v_cvt(vi_and(w, m)), bias);
        o[1] = v_sub(v_cvt(vi_and(vi_srli(w, 8), m)), bias);
        o[2] = v_sub(v_cvt(vi_and(vi_srli(w, 16), m)), bias);
        o[3] = v_sub(v_cvt(vi_srli(w, 24)), bias);
    } else if (f == FMT_E4M3 || f == FMT_E5M2) {
        v_block_fp8(f == FMT_E4M3, w, o);
    } else if (f == FMT_BF16) {
        o[0] = v_bits(vi_slli(w, 16));
        o[1] = v_bits(vi_and(w, vi_set1((int32_t)0xffff0000u)));
    } else if (f == FMT_F16) {
        uint16_t even[16], odd[16];
        vi_store_u16(even, vi_and(w, vi_set1(0xffff)));
        vi_store_u16(odd, vi_srli(w, 16));
        o[0] = v_from_u16(even);
        o[1] = v_from_u16(odd);
    } else {
        o[0] = v_bits(w);
    }
}

/* Scales of 16 rows, group g of a panel. */
INLINE vf v_scale(const kern__prep *p, int64_t panel, int64_t g)
{
    size_t at = (size_t)(panel * p->groups + g) * KERN_PANEL;
    const uint8_t *s = (const uint8_t *)p + p->scales_off + at * (size_t)p->scale_bytes;
    switch (p->scale_type) {
    case NUM_BF16:
        return v_bits(vi_slli(vi_from_u16(s), 16));
    case NUM_F16:
        return v_from_u16(s);
    case NUM_F8_E8M0:
        return v_bits(vi_max(vi_slli(vi_from_u8(s), 23), vi_set1(0x400000)));
    case NUM_F8_E4M3: {
        vi c = vi_from_u8(s), sign = vi_slli(vi_and(c, vi_set1(128)), 8);
        return v_mul(v_f16_lanes(vi_or(sign, vi_slli(vi_and(c, vi_set1(127)), 7))),
                     v_set1(FP8_POST));
    }
    case NUM_F32:
        return v_load((const float *)(const void *)s);
    default:
        return v_set1(1.0f);
    }
}

INLINE vf v_zeros(const kern__prep *p, int64_t panel, int64_t g)
{
    size_t at = (size_t)(panel * p->groups + g) * KERN_PANEL;
    const uint8_t *z = (const uint8_t *)p + p->zeros_off + at * (size_t)p->zero_bytes;
    if (p->zero_type == NUM_F32) return v_load((const float *)(const void *)z);
    return v_cvt(vi_from_i8(z));
}

INLINE const float *prep_alpha(const kern__prep *p, int64_t panel)
{
    return (const float *)(const void *)((const char *)p + p->alpha_off) + panel * KERN_PANEL;
}
INLINE const uint8_t *prep_panel(const kern__prep *p, int64_t panel)
{
    return (const uint8_t *)p + p->codes_off + (size_t)panel * p->panel_bytes;
}
INLINE int rows_left(const kern__prep *p, int64_t panel)
{
    int64_t n = p->N - panel * KERN_PANEL;
    return n < KERN_PANEL ? (int)n : KERN_PANEL;
}
#endif
