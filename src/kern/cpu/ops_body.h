/* Small operators with sixteen lanes: included by avx2/ops.c and avx512/ops.c. Rounding to fp8 and
 * int8 divides as the twin does, so that codes are equal bit for bit. */
#include "kern/cpu/simd.h"

static void rmsnorm(const float *x, const float *w, float eps, int64_t K, float *out)
{
    vf s0 = v_zero(), s1 = v_zero();
    int64_t i = 0;
    for (; i + 32 <= K; i += 32) {
        vf a = v_load(x + i), b = v_load(x + i + 16);
        s0 = v_fma(a, a, s0);
        s1 = v_fma(b, b, s1);
    }
    for (; i < K; i += 16) {
        vf a = v_load_n(x + i, (int)(K - i < 16 ? K - i : 16));
        s0 = v_fma(a, a, s0);
    }
    float r = (float)(1.0 / sqrt((double)v_sum(v_add(s0, s1)) / (double)K + (double)eps));
    for (i = 0; i + 16 <= K; i += 16)
        v_store(out + i, v_mul(v_mul(v_load(x + i), v_set1(r)), v_load(w + i)));
    for (; i < K; i++)
        out[i] = x[i] * r * w[i];
}

static void add(float *x, const float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        v_store(x + i, v_add(v_load(x + i), v_load(y + i)));
    for (; i < n; i++)
        x[i] += y[i];
}

static void rope(float *x, int rot_dim, const float *cosv, const float *sinv)
{
    int half = rot_dim / 2, i = 0;
    for (; i + 16 <= half; i += 16) {
        vf a = v_load(x + i), b = v_load(x + i + half), c = v_load(cosv + i), s = v_load(sinv + i);
        v_store(x + i, v_fnma(b, s, v_mul(a, c)));
        v_store(x + i + half, v_fma(a, s, v_mul(b, c)));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosv[i] - b * sinv[i];
        x[i + half] = b * cosv[i] + a * sinv[i];
    }
}

INLINE vf v_activate(const kern_glu act, vf x)
{
    vf one = v_set1(1.0f), t;
    switch (act) {
    case KERN_SILU:
        return v_div(x, v_add(one, v_exp(v_sub(v_zero(), x))));
    case KERN_GELU_TANH: /* 0.5 x (1 + tanh t) = x / (1 + e^-2t) */
        t = v_fma(v_mul(v_mul(x, x), x), v_set1(0.044715f), x);
        return v_div(x, v_add(one, v_exp(v_mul(t, v_set1(-2 * 0.7978845608028654f)))));
    default:
        return v_max(x, v_zero());
    }
}

INLINE void glu_rows(const kern_glu act, const float *g, const float *u, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i += 16) {
        int c = n - i < 16 ? (int)(n - i) : 16;
        v_store_n(out + i, v_mul(v_activate(act, v_load_n(g + i, c)), v_load_n(u + i, c)), c);
    }
}

static void glu(kern_glu act, const float *g, const float *u, int64_t n, float *out)
{
    switch (act) {
    case KERN_SILU:
        glu_rows(KERN_SILU, g, u, n, out);
        break;
    case KERN_GELU_TANH:
        glu_rows(KERN_GELU_TANH, g, u, n, out);
        break;
    case KERN_RELU:
        glu_rows(KERN_RELU, g, u, n, out);
        break;
    default:
        kern__ops_ref.glu(act, g, u, n, out); /* erf: rare, libm */
    }
}

static float amax(const float *v, int64_t n)
{
    vf m = v_zero();
    const vi abs_mask = vi_set1(0x7fffffff);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        m = v_max(v_bits(vi_and(vi_bits(v_load(v + i)), abs_mask)), m);
    if (i < n) m = v_max(v_bits(vi_and(vi_bits(v_load_n(v + i, (int)(n - i))), abs_mask)), m);
    return v_hmax(m);
}

/* |v| below the smallest normal of the type: multiples of its subnormal step, by adding and
 * subtracting a power of two; else the mantissa is cut to 3 (2) bits, ties to even. */
static void round_fp8(float *v, int64_t n, float scale, float max, float mul)
{
    const bool e4m3 = max == 448.0f;
    const vf s = v_set1(scale), top = v_set1(max), tiny = v_set1(e4m3 ? 0x1p-6f : 0x1p-14f);
    const vf magic = v_set1(e4m3 ? 0x1p14f : 0x1p7f); /* ulp 2^-9, 2^-16 */
    const vi sign = vi_set1((int32_t)0x80000000u), abs_mask = vi_set1(0x7fffffff), one = vi_set1(1);
    const vi half = vi_set1(e4m3 ? 0x7ffff : 0xfffff),
             keep = vi_set1((int32_t)(e4m3 ? 0xfff00000u : 0xffe00000u));
    for (int64_t i = 0; i < n; i += 16) {
        int c = n - i < 16 ? (int)(n - i) : 16;
        vf q = v_div(v_load_n(v + i, c), s);
        vi sg = vi_and(vi_bits(q), sign);
        vf a = v_min(v_bits(vi_and(vi_bits(q), abs_mask)), top);
        vi b = vi_bits(a);
        vi odd = vi_and(e4m3 ? vi_srli(b, 20) : vi_srli(b, 21), one);
        vf big = v_bits(vi_and(vi_add(vi_add(b, half), odd), keep));
        vf small = v_sub(v_add(a, magic), magic);
        vf r = v_select(a, tiny, small, big);
        v_store_n(v + i, v_mul(v_bits(vi_or(vi_bits(r), sg)), v_set1(mul)), c);
    }
}

static void round_int(float *v, int64_t n, float scale, float lo, float hi, float mul)
{
    const vf s = v_set1(scale), vlo = v_set1(lo), vhi = v_set1(hi), m = v_set1(mul);
    for (int64_t i = 0; i < n; i += 16) {
        int c = n - i < 16 ? (int)(n - i) : 16;
        vf q = v_rint(v_div(v_load_n(v + i, c), s));
        v_store_n(v + i, v_mul(v_min(v_max(q, vlo), vhi), m), c);
    }
}

static int32_t quant_i8(const float *v, int64_t n, float scale, int lo, int hi, int8_t *codes)
{
    const vf s = v_set1(scale);
    const vi vlo = vi_set1(lo), vhi = vi_set1(hi);
    vi sum = vi_set1(0);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        vi c = vi_min(vi_max(vi_round(v_div(v_load(v + i), s)), vlo), vhi);
        sum = vi_add(sum, c);
        vi_store_i8(codes + i, c);
    }
    int32_t total = vi_sum(sum);
    return i < n ? total + kern__ops_ref.quant_i8(v + i, n - i, scale, lo, hi, codes + i) : total;
}

static void split_bf16(const float *v, int64_t n, uint16_t *hi, uint16_t *lo)
{
    const vi half = vi_set1(0x7fff), one = vi_set1(1);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        vf x = v_load(v + i);
        vi u = vi_bits(x);
        u = vi_srli(vi_add(u, vi_add(half, vi_and(vi_srli(u, 16), one))), 16);
        vi_store_u16(hi + i, u);
        if (!lo) continue;
        vi r = vi_bits(v_sub(x, v_bits(vi_slli(u, 16))));
        vi_store_u16(lo + i, vi_srli(vi_add(r, vi_add(half, vi_and(vi_srli(r, 16), one))), 16));
    }
    if (i < n) kern__ops_ref.split_bf16(v + i, n - i, hi + i, lo ? lo + i : NULL);
}

static uint64_t kv_put(const kern_kv_layer *kv, int which, int head, int32_t slot, const float *x)
{
    if (kv->type != KV_BF16) return kern__ops_ref.kv_put(kv, which, head, slot, x);
    split_bf16(x, kv->D, (uint16_t *)(void *)kern__kv_code(kv, which, head, slot), NULL);
    return 0;
}

#define OPS_TABLE                                                                                  \
    .rmsnorm = rmsnorm, .add = add, .rope = rope, .glu = glu, .round_fp8 = round_fp8,              \
    .round_int = round_int, .amax = amax, .quant_i8 = quant_i8, .split_bf16 = split_bf16,          \
    .kv_put = kv_put
