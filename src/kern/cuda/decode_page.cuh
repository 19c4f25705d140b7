/* A page of a head as decode attention works on it: scores of a block's queries, their softmax, and
 * their sums of values, by a warp. What differs from type to type of the cache is here.
 *
 *   bf16, fp8  as attn.cuh has them
 *   int8  codes less 128, exact in f16 (K) and in bf16 (V). Scale and minimum of a token are a
 *         factor and a summand of its score (times the sum of q), and of its probability
 *   fp4   K: a k16 step is a block of 16 lanes, whose sums are multiplied by the block's scale of
 *         their token before they are added. V: 16 rows are a block, so the probabilities are
 *         multiplied by its scales of the tokens, powers of two */
#ifndef KERN_CUDA_DECODE_PAGE_CUH
#define KERN_CUDA_DECODE_PAGE_CUH
#include "kern/cuda/attn.cuh"

#define DECODE_PAGE  KV_PLACE_TOKENS
#define DECODE_HEADS 8 /* query heads of a block */

struct kv_int8 : kv_codes {
    static constexpr bool wide_p = true;
    static __device__ __forceinline__ void take(uint32_t at, uint32_t b[4]) /* K */
    {
        uint2 x = ptx_lds64(at);
        const uint32_t w[2] = {x.x, x.y};
#pragma unroll
        for (int i = 0; i < 4; i++) /* 1024 + code in f16 */
            b[i] = ptx_sub_f16x2(__byte_perm(w[i / 2], 0x64646464, i % 2 ? 0x4342 : 0x4140),
                                 0x64806480);
    }
    static __device__ __forceinline__ void take_v(uint32_t at, uint32_t b[4])
    {
        uint2 x = ptx_lds64(at);
        const uint32_t w[2] = {x.x, x.y};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t two = __byte_perm(w[i / 2], 0, i % 2 ? 0x4342 : 0x4140);
            /* 128 + the lower seven bits, less 256 or 128 */
            b[i] = ptx_sub_bf16x2((two & 0x007f007f) | 0x43004300, (two & 0x00800080) ^ 0x43804380);
        }
    }
};
struct kv_fp4 : kv_codes {
    static constexpr int bits = 4;
    static constexpr bool wide_p = true;
    static constexpr float unit = 0x1p14f; /* what codes of K are multiplied by in the end */
    /* Pair i of a word as subnormal numbers of f16 (value 2^-14), and as values in bf16. */
    static __device__ __forceinline__ uint32_t pair_f16(uint32_t w, int i)
    {
        const uint32_t x = w << (12 - 4 * i);
        return (x & 0x80008000) | (x >> 3 & 0x0e000e00);
    }
    static __device__ __forceinline__ uint32_t pair_bf16(uint32_t w, int i)
    {
        const uint32_t x = w << (12 - 4 * i);
        return ptx_mul_bf16x2((x & 0x80008000) | (x >> 6 & 0x01c001c0), 0x7e807e80);
    }
};
template <class V> struct decode_is {
    static constexpr bool int8 = false, fp4 = false;
};
template <> struct decode_is<kv_int8> {
    static constexpr bool int8 = true, fp4 = false;
};
template <> struct decode_is<kv_fp4> {
    static constexpr bool int8 = false, fp4 = true;
};
/* Bytes of a head of a page. */
template <class V> static constexpr __host__ __device__ int decode_head(int D)
{
    return 2 * DECODE_PAGE *
           (D * V::bits / 8 + (decode_is<V>::int8  ? 8
                               : decode_is<V>::fp4 ? D / 16
                                                   : 0));
}

/* q of the group: query l/4, columns as K has them, and of int8 the sums of queries 2(l%4), +1. */
template <int D> struct decode_q {
    uint32_t q[D / 32][4];
    float sum[2];
};

/* Running softmax of a warp: maximum of the scores and sum of queries 2(l%4), +1; O rows l/4 (+8)
 * of D/16 tiles. */
template <int D> struct decode_state {
    float max[2], sum[2], o[D / 16][4];
    float rest[2]; /* int8: what all lanes of O have besides */
};

template <int D> static __device__ __forceinline__ void decode_start(decode_state<D> &st)
{
    st.max[0] = st.max[1] = -INFINITY;
    st.sum[0] = st.sum[1] = st.rest[0] = st.rest[1] = 0;
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        st.o[i][0] = st.o[i][1] = st.o[i][2] = st.o[i][3] = 0;
}
template <class V>
static __device__ __forceinline__ attn_scale decode_scale(const gpu_attention &a, int hk)
{
    attn_scale scale = attn_scale_of(a, hk);
    if constexpr (decode_is<V>::fp4) scale.by *= V::unit;
    return scale;
}

/* Two k16 steps of A from 8 values of row r and 8 of row r+8. */
template <class V, bool VALUES>
static __device__ __forceinline__ void decode_take(uint32_t r0, uint32_t r8, uint32_t a[2][4])
{
    uint32_t x[4], y[4];
    if constexpr (VALUES && decode_is<V>::int8)
        V::take_v(r0, x), V::take_v(r8, y);
    else
        V::take(r0, x), V::take(r8, y);
    a[0][0] = x[0], a[0][2] = x[1], a[1][0] = x[2], a[1][2] = x[3];
    a[0][1] = y[0], a[0][3] = y[1], a[1][1] = y[2], a[1][3] = y[3];
}
/* Probabilities: a pair, and a product with values. */
template <class V> static __device__ __forceinline__ uint32_t decode_pack(float lo, float hi)
{
    return V::wide_p ? ptx_pack_bf16(lo, hi) : ptx_pack_f16(lo, hi);
}
template <class V>
static __device__ __forceinline__ void decode_mma(float d[4], const uint32_t a[4], uint32_t b0,
                                                  uint32_t b1)
{
    if constexpr (V::wide_p)
        ptx_mma_bf16(d, a, b0, b1);
    else
        ptx_mma_f16(d, a, b0, b1);
}

/* Bits of tokens t and t+1 of a page, of which [lo, hi) count. */
static __device__ __forceinline__ uint32_t decode_pair(int t, int lo, int hi)
{
    return (t >= lo && t < hi ? 0xffffu : 0u) | (t + 1 >= lo && t + 1 < hi ? 0xffff0000u : 0u);
}

/* Factor and summand of a token of int8. */
static __device__ __forceinline__ float2 decode_factor(uint32_t at)
{
    const uint2 x = ptx_lds64(at);
    const float by = __uint_as_float(x.x);
    return make_float2(by, fmaf(128.0f, by, __uint_as_float(x.y)));
}
/* Scales of a token of K in fp4. */
template <int D>
static __device__ __forceinline__ void decode_scales(uint32_t at, uint32_t w[(D + 63) / 64])
{
#pragma unroll
    for (int i = 0; i < (D + 63) / 64; i++)
        if constexpr (D % 64)
            w[i] = ptx_lds16(at + 4 * i) | (64 * i + 32 < D ? ptx_lds16(at + 4 * i + 2) << 16 : 0);
        else
            w[i] = ptx_lds32(at + 4 * i);
}
static __device__ __forceinline__ float decode_power(uint32_t w, int i) /* byte i of w */
{
    return __uint_as_float(i < 3 ? w << (23 - 8 * i) & 0x7f800000u : w >> 1 & 0x7f800000u);
}

/* Words i0 .. of a lane of a row of K in fp4: kv_fp4_words(D) of them. */
template <int D> static __device__ __forceinline__ void decode_words(uint32_t at, uint32_t w[4])
{
    if constexpr (D % 128 == 0) {
        const uint4 x = ptx_lds128(at);
        w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
    } else if constexpr (D % 64 == 0) {
        const uint2 x = ptx_lds64(at);
        w[0] = x.x, w[1] = x.y;
    } else {
        w[0] = ptx_lds32(at);
    }
}

/* Scores of 16 tokens, t the first. */
template <int D>
static __device__ __forceinline__ void decode_fp4_scores(uint32_t at, int lane_id, int t,
                                                         const uint32_t q[D / 32][4], float s[4])
{
    constexpr int n = D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 1; /* kv_fp4_words */
    const int r = lane_id / 4, c = lane_id % 4;
    uint32_t by[2][(D + 63) / 64];
#pragma unroll
    for (int j = 0; j < 2; j++)
        decode_scales<D>(at + DECODE_PAGE * D + (uint32_t)((t + r + 8 * j) * (D / 16)), by[j]);
#pragma unroll
    for (int g = 0; g < D / 32 / n; g++) {
        uint32_t w[2][4];
#pragma unroll
        for (int j = 0; j < 2; j++)
            decode_words<D>(at + 4 * (uint32_t)kv_fp4_k(D, t + r + 8 * j, g * n, c), w[j]);
#pragma unroll
        for (int k = 0; k < 2 * n; k++) { /* blocks of 16 lanes */
            const int i = g * n + k / 2, b = 2 * i + k % 2, first = k % 2 * 2;
            uint32_t a[4];
            float x[4] = {0, 0, 0, 0};
#pragma unroll
            for (int j = 0; j < 2; j++) {
                a[j] = kv_fp4::pair_f16(w[j][k / 2], first);
                a[j + 2] = kv_fp4::pair_f16(w[j][k / 2], first + 1);
            }
            ptx_mma_f16(x, a, q[i][first], q[i][first + 1]);
#pragma unroll
            for (int j = 0; j < 4; j++)
                s[j] = fmaf(decode_power(by[j / 2][b / 4], b % 4), x[j], s[j]);
        }
    }
}

/* Scores of 16 tokens, t the first: rows l/4 and l/4 + 8, queries 2(l%4), +1. */
template <class V, int D>
static __device__ __forceinline__ void decode_scores(uint32_t at, int lane_id, int t,
                                                     const decode_q<D> &q, float s[4])
{
    [[maybe_unused]] const int r = lane_id / 4, c = lane_id % 4;
    s[0] = s[1] = s[2] = s[3] = 0;
    if constexpr (decode_is<V>::fp4) {
        decode_fp4_scores<D>(at, lane_id, t, q.q, s);
    } else {
        const uint32_t row = at + (uint32_t)((t + r) * D) * V::bytes;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            uint32_t a[2][4],
                k = row + (uint32_t)(((4 * i + c) ^ kv_turn(V::bytes, D, r)) * 8) * V::bytes;
            decode_take<V, false>(k, k + 8 * D * V::bytes, a);
            V::mma(s, a[0], q.q[i][0], q.q[i][1]);
            V::mma(s, a[1], q.q[i][2], q.q[i][3]);
        }
    }
    if constexpr (decode_is<V>::int8) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float2 f =
                decode_factor(at + 2 * DECODE_PAGE * D + (uint32_t)(t + r + 8 * j) * 8);
            s[2 * j] = fmaf(s[2 * j], f.x, f.y * q.sum[0]);
            s[2 * j + 1] = fmaf(s[2 * j + 1], f.x, f.y * q.sum[1]);
        }
    }
}

/* The running softmax takes scores s of a page, which become probabilities. */
template <int D>
static __device__ __forceinline__ void decode_softmax(float s[2][4], float by, decode_state<D> &st,
                                                      float shrink[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float m = fmaxf(fmaxf(s[0][h], s[0][h + 2]), fmaxf(s[1][h], s[1][h + 2]));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
        m = fmaxf(m, st.max[h]);
        shrink[h] = ptx_exp2((st.max[h] - m) * by);
        st.max[h] = m;
        const float from = -m * by;
        float sum = 0;
#pragma unroll
        for (int t = 0; t < 2; t++) {
            s[t][h] = ptx_exp2(fmaf(s[t][h], by, from));
            s[t][h + 2] = ptx_exp2(fmaf(s[t][h + 2], by, from));
            sum += s[t][h] + s[t][h + 2];
        }
        st.sum[h] = st.sum[h] * shrink[h] + sum; /* of this lane's tokens */
    }
}

/* int8: probabilities times the factors of their tokens, and what these add to all lanes. */
template <int D, bool EDGE>
static __device__ __forceinline__ void decode_int8_values(uint32_t at, int r, int lo, int hi,
                                                          const float shrink[2], float s[2][4],
                                                          decode_state<D> &st)
{
    st.rest[0] *= shrink[0], st.rest[1] *= shrink[1];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int t = r + 8 * j;
        float2 f = decode_factor(at + 2 * DECODE_PAGE * D + (uint32_t)(DECODE_PAGE + t) * 8);
        if (EDGE && (t < lo || t >= hi)) f = make_float2(0, 0);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float &p = s[j / 2][j % 2 * 2 + h];
            st.rest[h] = fmaf(p, f.y, st.rest[h]);
            p *= f.x;
        }
    }
}

/* fp4: 32 lanes of the values. p: of tokens at places 8c.. in pairs. */
template <int D, bool EDGE>
static __device__ __forceinline__ void decode_fp4_values(uint32_t at, int lane_id, int i,
                                                         const uint32_t p[4],
                                                         const uint32_t live[4], float o[2][4])
{
    const uint4 x = ptx_lds128(at + DECODE_PAGE * D / 2 + (uint32_t)(i * 512 + lane_id * 16));
    const uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint2 scales = ptx_lds64(at + DECODE_PAGE * D + 2 * D +
                                       (uint32_t)((2 * i + half) * DECODE_PAGE + lane_id % 4 * 8));
        const uint32_t by[2] = {scales.x, scales.y};
        uint32_t b[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            /* codes of powers of two are exponents of bf16 */
            uint32_t f = __byte_perm(by[k / 2], 0, k % 2 ? 0x4342 : 0x4140) << 7;
            if (EDGE) f &= live[k];
            b[k] = ptx_mul_bf16x2(p[k], f);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) { /* 16 tokens */
            uint32_t a[4];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                a[j] = kv_fp4::pair_bf16(w[2 * half + j], 2 * k);
                a[j + 2] = kv_fp4::pair_bf16(w[2 * half + j], 2 * k + 1);
            }
            ptx_mma_bf16(o[half], a, b[2 * k], b[2 * k + 1]);
        }
    }
}

/* EDGE: only tokens [lo, hi) of the page count; others may hold anything, NaN too. */
template <class V, int D, bool EDGE>
static __device__ __forceinline__ void decode_page(uint32_t at, int lane_id, int lo, int hi,
                                                   const decode_q<D> &q, attn_scale scale,
                                                   decode_state<D> &st)
{
    const int r = lane_id / 4, c = lane_id % 4;
    float s[2][4], shrink[2];
#pragma unroll
    for (int t = 0; t < 2; t++) { /* 16 tokens each */
        decode_scores<V, D>(at, lane_id, t * 16, q, s[t]);
        if (scale.cap > 0) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[t][i] = attn_capped(s[t][i], scale);
        }
        if (EDGE) {
            const int k = t * 16 + r;
            if (k < lo || k >= hi) s[t][0] = s[t][1] = -INFINITY;
            if (k + 8 < lo || k + 8 >= hi) s[t][2] = s[t][3] = -INFINITY;
        }
    }
    decode_softmax<D>(s, scale.cap > 0 ? 1.0f : scale.by, st, shrink);
    if constexpr (decode_is<V>::int8) decode_int8_values<D, EDGE>(at, r, lo, hi, shrink, s, st);
    uint32_t p[4]; /* tokens in pairs, queries in rows: what B needs */
#pragma unroll
    for (int t = 0; t < 2; t++) {
        p[2 * t] = ptx_transpose(decode_pack<V>(s[t][0], s[t][1]));
        p[2 * t + 1] = ptx_transpose(decode_pack<V>(s[t][2], s[t][3]));
    }
    uint32_t live[4];
#pragma unroll
    for (int i = 0; EDGE && i < 4; i++)
        live[i] = decode_pair(8 * i + 2 * c, lo, hi);
    const bool any = __any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f);
    auto shrunk = [&](float o[4]) {
        if (any) o[0] *= shrink[0], o[1] *= shrink[1], o[2] *= shrink[0], o[3] *= shrink[1];
    };
    if constexpr (decode_is<V>::fp4) {
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            shrunk(st.o[2 * i]);
            shrunk(st.o[2 * i + 1]);
            decode_fp4_values<D, EDGE>(at, lane_id, i, p, live, &st.o[2 * i]);
        }
    } else {
        const uint32_t row = at + (uint32_t)(DECODE_PAGE * D + r * DECODE_PAGE + c * 8) * V::bytes;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t a[2][4];
            shrunk(st.o[i]);
            decode_take<V, true>(row + i * 16 * DECODE_PAGE * V::bytes,
                                 row + (i * 16 + 8) * DECODE_PAGE * V::bytes, a);
#pragma unroll
            for (int k = 0; EDGE && k < 8; k++)
                a[k / 4][k % 4] &= live[k / 4 * 2 + k % 4 / 2];
            decode_mma<V>(st.o[i], a[0], p[0], p[1]);
            decode_mma<V>(st.o[i], a[1], p[2], p[3]);
        }
    }
}

/* Query l/4 of those whose lanes start at element `from` of the step's q; none where it is
 * negative. */
template <class V, int D>
static __device__ __forceinline__ void decode_queries(gpu_x x, int64_t from, int lane_id,
                                                      decode_q<D> &q)
{
    const int c = lane_id % 4;
    const bool live = from >= 0;
    q.sum[0] = q.sum[1] = 0;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        uint32_t *to = q.q[i];
        to[0] = to[1] = to[2] = to[3] = 0;
        if (!live) continue;
        if constexpr (decode_is<V>::fp4) { /* four lanes of two blocks */
            attn_q4<V>(x, from + i * 32 + c * 4, to);
            attn_q4<V>(x, from + i * 32 + 16 + c * 4, to + 2);
        } else {
            attn_q<V>(x, from + i * 32 + c * 8, to);
        }
    }
    if constexpr (decode_is<V>::int8) {
        /* As products with ones: of the rounded lanes. */
        const uint32_t ones[4] = {0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00};
        float d[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            ptx_mma_f16(d, ones, q.q[i][0], q.q[i][1]);
            ptx_mma_f16(d, ones, q.q[i][2], q.q[i][3]);
        }
        q.sum[0] = d[0], q.sum[1] = d[1];
    }
}
#endif
