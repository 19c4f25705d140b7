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

static void layernorm(const float *x, const float *w, const float *b, float eps, int64_t K,
                      float *out)
{
    vf s0 = v_zero(), s1 = v_zero();
    int64_t i = 0;
    for (; i + 16 <= K; i += 16)
        s0 = v_add(s0, v_load(x + i));
    if (i < K) s0 = v_add(s0, v_load_n(x + i, (int)(K - i)));
    const float mean = (float)((double)v_sum(s0) / (double)K);
    const vf m = v_set1(mean);
    for (i = 0; i + 16 <= K; i += 16) {
        vf a = v_sub(v_load(x + i), m);
        s1 = v_fma(a, a, s1);
    }
    double ss = (double)v_sum(s1);
    for (; i < K; i++)
        ss += (double)(x[i] - mean) * (x[i] - mean);
    const vf r = v_set1((float)(1.0 / sqrt(ss / (double)K + (double)eps)));
    for (i = 0; i < K; i += 16) {
        int c = K - i < 16 ? (int)(K - i) : 16;
        vf y = v_mul(v_mul(v_sub(v_load_n(x + i, c), m), r), v_load_n(w + i, c));
        v_store_n(out + i, b ? v_add(y, v_load_n(b + i, c)) : y, c);
    }
}

INLINE vf v_sigmoid(vf x)
{
    vf one = v_set1(1.0f);
    return v_div(one, v_add(one, v_exp(v_sub(v_zero(), x))));
}

static void gated_rmsnorm(const float *x, const float *gate, const float *w, float eps, int64_t K,
                          float *out)
{
    rmsnorm(x, w, eps, K, out);
    for (int64_t i = 0; i < K; i += 16) {
        int c = K - i < 16 ? (int)(K - i) : 16;
        vf g = v_load_n(gate + i, c);
        v_store_n(out + i, v_mul(v_load_n(out + i, c), v_mul(g, v_sigmoid(g))), c);
    }
}

static void add_scaled(float *x, const float *y, float s, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) {
        int c = n - i < 16 ? (int)(n - i) : 16;
        v_store_n(x + i, v_fma(v_load_n(y + i, c), v_set1(s), v_load_n(x + i, c)), c);
    }
}

static void scale(float *x, float s, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) {
        int c = n - i < 16 ? (int)(n - i) : 16;
        v_store_n(x + i, v_mul(v_load_n(x + i, c), v_set1(s)), c);
    }
}

static void softcap(float *x, float cap, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) {
        int c = n - i < 16 ? (int)(n - i) : 16;
        vf y = v_tanh(v_div(v_load_n(x + i, c), v_set1(cap)));
        v_store_n(x + i, v_mul(y, v_set1(cap)), c);
    }
}

static void sigmoid_mul(float *x, const float *g, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) {
        int c = n - i < 16 ? (int)(n - i) : 16;
        v_store_n(x + i, v_mul(v_load_n(x + i, c), v_sigmoid(v_load_n(g + i, c))), c);
    }
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

/* Eight pairs at a time: neighbours are swapped, sines have the sign of their lane. */
static void rope_pairs(float *x, int rot_dim, const float *cosv, const float *sinv)
{
    int i = 0;
    for (; i + 8 <= rot_dim / 2; i += 8) {
        vf a = v_load(x + 2 * i);
        v_store(x + 2 * i, v_fma(v_swap_pairs(a), v_twice(sinv + i, true),
                                 v_mul(a, v_twice(cosv + i, false))));
    }
    for (; i < rot_dim / 2; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cosv[i] - b * sinv[i];
        x[2 * i + 1] = b * cosv[i] + a * sinv[i];
    }
}

/* x (1 + erf(x/sqrt 2)) / 2 by erfc of Abramowitz and Stegun 7.1.26, which is 1.5e-7 near: the
 * complement alone, so that the left tail stays small. */
INLINE vf v_gelu(vf x)
{
    const vi mask = vi_set1(0x7fffffff);
    vf z = v_mul(v_bits(vi_and(vi_bits(x), mask)), v_set1(0.70710678f));
    vf t = v_div(v_set1(1.0f), v_fma(z, v_set1(0.3275911f), v_set1(1.0f)));
    vf p = v_set1(1.061405429f);
    p = v_fma(p, t, v_set1(-1.453152027f));
    p = v_fma(p, t, v_set1(1.421413741f));
    p = v_fma(p, t, v_set1(-0.284496736f));
    p = v_fma(p, t, v_set1(0.254829592f));
    vf half =
        v_mul(v_mul(v_mul(p, t), v_exp(v_sub(v_zero(), v_mul(z, z)))), v_mul(x, v_set1(0.5f)));
    return v_select(x, v_zero(), half, v_sub(x, half));
}

INLINE vf v_activate(const kern_glu a, vf x)
{
    vf one = v_set1(1.0f), t;
    switch (a) {
    case KERN_SILU:
        return v_div(x, v_add(one, v_exp(v_sub(v_zero(), x))));
    case KERN_GELU_TANH: /* 0.5 x (1 + tanh t) = x / (1 + e^-2t) */
        t = v_fma(v_mul(v_mul(x, x), x), v_set1(0.044715f), x);
        return v_div(x, v_add(one, v_exp(v_mul(t, v_set1(-2 * 0.7978845608028654f)))));
    case KERN_RELU2:
        t = v_max(v_zero(), x);
        return v_mul(t, t);
    case KERN_SWIGLU_OAI:
        x = v_min(v_set1(7.0f), x);
        return v_mul(x, v_sigmoid(v_mul(x, v_set1(1.702f))));
    case KERN_QUICK_GELU:
        return v_mul(x, v_sigmoid(v_mul(x, v_set1(1.702f))));
    case KERN_GELU:
        return v_gelu(x);
    default:
        return v_max(v_zero(), x);
    }
}

INLINE void glu_rows(const kern_glu a, const float *g, const float *u, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i += 16) {
        int c = n - i < 16 ? (int)(n - i) : 16;
        vf y = v_activate(a, v_load_n(g + i, c)), up = u ? v_load_n(u + i, c) : v_set1(1.0f);
        if (u && a == KERN_SWIGLU_OAI)
            up = v_add(v_max(v_set1(-7.0f), v_min(v_set1(7.0f), up)), v_set1(1.0f));
        v_store_n(out + i, v_mul(y, up), c);
    }
}

INLINE void glu_any(kern_glu a, const float *g, const float *u, int64_t n, float *out)
{
#define CASE(k)                                                                                    \
    case k:                                                                                        \
        glu_rows(k, g, u, n, out);                                                                 \
        break;
    switch (a) {
        CASE(KERN_SILU)
        CASE(KERN_GELU_TANH)
        CASE(KERN_GELU)
        CASE(KERN_RELU)
        CASE(KERN_RELU2)
        CASE(KERN_QUICK_GELU)
        CASE(KERN_SWIGLU_OAI)
    case KERN_GLU_COUNT:
        break;
    }
#undef CASE
}

static void glu(kern_glu a, const float *g, const float *u, int64_t n, float *out)
{
    glu_any(a, g, u, n, out);
}

static void act(kern_glu a, const float *x, int64_t n, float *out)
{
    glu_any(a, x, NULL, n, out);
}

/* Four rows of w against every token; lanes along K. */
INLINE void dots_4(const float *w, int64_t K, const int R, const float *x, float *out)
{
    vf acc[4];
    UNROLL
    for (int r = 0; r < R; r++)
        acc[r] = v_zero();
    int64_t k = 0;
    for (; k + 16 <= K; k += 16) {
        vf a = v_load(x + k);
        UNROLL
        for (int r = 0; r < R; r++)
            acc[r] = v_fma(a, v_load(w + r * K + k), acc[r]);
    }
    if (k < K) {
        vf a = v_load_n(x + k, (int)(K - k));
        UNROLL
        for (int r = 0; r < R; r++)
            acc[r] = v_fma(a, v_load_n(w + r * K + k, (int)(K - k)), acc[r]);
    }
    UNROLL
    for (int r = 0; r < R; r++)
        out[r] = v_sum(acc[r]);
}

static void wide_row(const qtensor *w, int64_t row, float *out)
{
    const uint8_t *c = w->codes + (size_t)row * w->row_bytes;
    int64_t k = 0;
    if (w->code == NUM_BF16)
        for (; k + 16 <= w->K; k += 16)
            v_store(out + k, v_bits(vi_slli(vi_from_u16(c + 2 * k), 16)));
    else if (w->code == NUM_F16)
        for (; k + 16 <= w->K; k += 16)
            v_store(out + k, v_from_u16(c + 2 * k));
    size_t each = (size_t)num_infos[w->code].bits / 8;
    if (k < w->K) num_decode_row(w->code, c + (size_t)k * each, (size_t)(w->K - k), out + k);
}

static void head_rows(const qtensor *w, int64_t row0, int64_t rows, const float *x, int64_t ldx,
                      int64_t T, float *out, int64_t ldo, float *tmp)
{
    if (qaxis_quantized(&w->spec.w)) { /* scales and zeros: the twin's */
        kern__ops_ref.head_rows(w, row0, rows, x, ldx, T, out, ldo, tmp);
        return;
    }
    for (int64_t n = 0; n < rows; n += 4) {
        int64_t r = rows - n < 4 ? rows - n : 4;
        for (int64_t i = 0; i < r; i++)
            wide_row(w, row0 + n + i, tmp + i * w->K);
        for (int64_t t = 0; t < T; t++) {
            if (r == 4)
                dots_4(tmp, w->K, 4, x + t * ldx, out + t * ldo + n);
            else
                for (int64_t i = 0; i < r; i++)
                    dots_4(tmp + i * w->K, w->K, 1, x + t * ldx, out + t * ldo + n + i);
        }
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

/* ---- linear attention --------------------------------------------------------------------- */

/* Sixteen channels: their weights and their past inputs are parted into vectors of one lag. */
INLINE void conv_16(float *x, int64_t ld, const int W, int lanes, const float *w, int64_t rows,
                    float *state)
{
    vf weight[4], past[4];
    float t[4][16] = {{0}}, p[4][16] = {{0}};
    for (int c = 0; c < lanes; c++)
        for (int j = 0; j < W; j++) {
            t[j][c] = w[c * W + j];
            if (j < W - 1) p[j][c] = state[c * (W - 1) + j];
        }
    UNROLL
    for (int j = 0; j < W; j++) {
        weight[j] = v_load(t[j]);
        past[j] = v_load(p[j]);
    }
    for (int64_t r = 0; r < rows; r++) {
        past[W - 1] = v_load_n(x + r * ld, lanes);
        vf sum = v_mul(weight[0], past[0]);
        UNROLL
        for (int j = 1; j < W; j++)
            sum = v_fma(weight[j], past[j], sum);
        v_store_n(x + r * ld, v_mul(sum, v_sigmoid(sum)), lanes);
        UNROLL
        for (int j = 0; j < W - 1; j++)
            past[j] = past[j + 1];
    }
    for (int j = 0; j < W - 1; j++) {
        v_store(p[j], past[j]);
        for (int c = 0; c < lanes; c++)
            state[c * (W - 1) + j] = p[j][c];
    }
}

static void conv_silu(float *x, int64_t ld, int64_t c0, int64_t c1, int W, const float *w,
                      int64_t rows, float *state)
{
    if (W < 2 || W > 4) {
        kern__ref_conv_silu(x, ld, c0, c1, W, w, rows, state);
        return;
    }
    for (int64_t c = c0; c < c1; c += 16) {
        int lanes = c1 - c < 16 ? (int)(c1 - c) : 16;
        float *s = state + (c - c0) * (W - 1);
        if (W == 4)
            conv_16(x + c, ld, 4, lanes, w + c * W, rows, s);
        else if (W == 3)
            conv_16(x + c, ld, 3, lanes, w + c * W, rows, s);
        else
            conv_16(x + c, ld, 2, lanes, w + c * W, rows, s);
    }
}

/* out = x / sqrt(sum of squares + 1e-6) * scale */
INLINE void unit(const float *x, int n, float s, float *out)
{
    vf ss = v_zero();
    for (int i = 0; i < n; i += 16) {
        vf a = v_load_n(x + i, n - i < 16 ? n - i : 16);
        ss = v_fma(a, a, ss);
    }
    const vf r = v_set1((float)(1.0 / sqrt((double)v_sum(ss) + 1e-6)) * s);
    for (int i = 0; i < n; i += 16) {
        int c = n - i < 16 ? n - i : 16;
        v_store_n(out + i, v_mul(v_load_n(x + i, c), r), c);
    }
}

/* One token on V vectors of lanes, the state read and written once:
 *   S' = e^g S;  d = beta (v - S'^T k);  S'' = S' + k d^T;  out = S''^T q
 * needs d before S'': the first walk sums S'^T k and S'^T q, then out = S'^T q + (k.q) d, and the
 * second walk writes S''. */
INLINE void delta_token(float *S, int64_t ld, int Dk, const int V, int last, const float *q,
                        const float *k, float kq, float decay, float beta, const float *v,
                        float *out)
{
    vf sk[4], sq[4], d[4];
    const vf g = v_set1(decay);
    UNROLL
    for (int i = 0; i < V; i++)
        sk[i] = sq[i] = v_zero();
    for (int r = 0; r < Dk; r++) {
        vf a = v_set1(k[r]), b = v_set1(q[r]);
        UNROLL
        for (int i = 0; i < V; i++) {
            vf s = v_mul(v_load_n(S + r * ld + 16 * i, i == V - 1 ? last : 16), g);
            sk[i] = v_fma(s, a, sk[i]);
            sq[i] = v_fma(s, b, sq[i]);
        }
    }
    UNROLL
    for (int i = 0; i < V; i++) {
        int c = i == V - 1 ? last : 16;
        d[i] = v_mul(v_sub(v_load_n(v + 16 * i, c), sk[i]), v_set1(beta));
        v_store_n(out + 16 * i, v_fma(d[i], v_set1(kq), sq[i]), c);
    }
    for (int r = 0; r < Dk; r++) {
        vf a = v_set1(k[r]);
        UNROLL
        for (int i = 0; i < V; i++) {
            int c = i == V - 1 ? last : 16;
            float *at = S + r * ld + 16 * i;
            v_store_n(at, v_fma(a, d[i], v_mul(v_load_n(at, c), g)), c);
        }
    }
}

static void delta(const kern_delta_args *a, const kern_seq *s, int h, int v0, int v1, float *state,
                  float *tmp)
{
    int hk = h / (a->Hv / a->Hk), Dk = a->Dk, Dv = a->Dv;
    float *q = tmp, *k = q + Dk;
    for (int64_t t = s->row0; t < s->row0 + s->n_rows; t++) {
        const float *v = a->v + t * a->ldv + (int64_t)h * Dv;
        float *out = a->out + (t * a->Hv + h) * Dv, kq = 0;
        float decay = expf(a->g[t * a->Hv + h]), beta = a->beta[t * a->Hv + h];
        unit(a->q + t * a->ldq + (int64_t)hk * Dk, Dk, 1.0f / sqrtf((float)Dk), q);
        unit(a->k + t * a->ldk + (int64_t)hk * Dk, Dk, 1.0f, k);
        dots_4(q, Dk, 1, k, &kq);
        int j = v0;
        for (; j + 64 <= v1; j += 64)
            delta_token(state + j, Dv, Dk, 4, 16, q, k, kq, decay, beta, v + j, out + j);
        for (; j < v1; j += 16)
            delta_token(state + j, Dv, Dk, 1, v1 - j < 16 ? v1 - j : 16, q, k, kq, decay, beta,
                        v + j, out + j);
    }
}

#define OPS_TABLE                                                                                  \
    .rmsnorm = rmsnorm, .layernorm = layernorm, .gated_rmsnorm = gated_rmsnorm, .add = add,        \
    .add_scaled = add_scaled, .scale = scale, .softcap = softcap, .sigmoid_mul = sigmoid_mul,      \
    .rope = rope, .rope_pairs = rope_pairs, .act = act, .glu = glu, .head_rows = head_rows,        \
    .conv_silu = conv_silu, .delta = delta, .round_fp8 = round_fp8, .round_int = round_int,        \
    .amax = amax, .quant_i8 = quant_i8, .split_bf16 = split_bf16, .kv_put = kv_put
