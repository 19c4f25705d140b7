/* Reading a paged cache on the device: every type of kern.h, in both orders of api.h (PLAIN as
 * kern/kv_layout.c addresses it, MMA as kv_place.h does). Values are those of kern__kv_decode.
 *
 *   kv_get    one element
 *   kv_tile   a block of 128 threads: 128 lanes of 32 tokens to shared memory, read in runs of four
 *             lanes side by side (of V in MMA order: eight tokens)
 *
 * Tokens that a tile must not see are neither looked up nor read: their pages may be gone. */
#ifndef KERN_CUDA_PLAIN_KV_CUH
#define KERN_CUDA_PLAIN_KV_CUH
#include "kern/cuda/kv_place.h"
#include "kern/cuda/plain_num.cuh"
extern "C" {
#include "kern/kern.h"
}

#define KV_TILE 32  /* tokens */
#define KV_SPAN 128 /* lanes, and threads of the block */
#define KV_LD   132 /* floats between tokens: rows are aligned and start in different banks */

/* Bits of an element. */
static __host__ __device__ __forceinline__ int kv_bits(int type)
{
    return type == KV_F32 ? 32 : type == KV_BF16 ? 16 : type == KV_FP4 ? 4 : 8;
}
static __host__ __device__ __forceinline__ size_t kv_code_bytes(int type, int D)
{
    return ((size_t)kv_bits(type) * (size_t)D + 7) / 8;
}
static __host__ __device__ __forceinline__ size_t kv_scale_bytes(int type, int D)
{
    return type == KV_INT8 ? 8 : type == KV_FP4 ? ((size_t)D + 15) / 16 : 0;
}
static __host__ __device__ __forceinline__ int kv_v_lanes(const gpu_kv &kv)
{
    return kv.v_in_k ? kv.v_in_k : kv.D;
}
/* NULL, or why no kernel can work on it. */
static inline const char *kv_refuse(const gpu_kv &kv)
{
    if (kv.type < 0 || kv.type >= KV_TYPES) return "cache of an unknown type";
    if (kv.Hk < 1 || kv.D < 1 || kv.page_tokens < 1 || kv.v_in_k < 0 || kv.v_in_k > kv.D)
        return "cache without heads, lanes or tokens";
    if (kv.order == GPU_KV_PLAIN) return NULL;
    if (kv.order != GPU_KV_MMA) return "cache in an unknown order";
    if (kv.type == KV_F32) return "cache in MMA order, made for bf16, fp8, int8 and fp4";
    if (kv.type == KV_FP4 && kv.D % 32)
        return "fp4 cache in MMA order, made for heads of a multiple of 32 lanes";
    if (kv.page_tokens != KV_PLACE_TOKENS) return "cache in MMA order, made for pages of 32 tokens";
    return kv.v_in_k ? "cache in MMA order, made for values of their own" : NULL;
}

/* One token of one head: its codes where they lie side by side, and what they are multiplied by. */
struct kv_token {
    uint8_t *codes, *scales;
};
static __device__ __forceinline__ kv_token kv_at(const gpu_kv &kv, int which, int head,
                                                 int64_t page, int token)
{
    uint8_t *at = kv.base + (size_t)page * kv.page_stride;
    size_t heads = (size_t)kv.Hk * (size_t)kv.page_tokens;
    size_t nth = (size_t)head * (size_t)kv.page_tokens + (size_t)token;
    size_t code = kv_code_bytes(kv.type, kv.D), scale = kv_scale_bytes(kv.type, kv.D);
    if (which) at += heads * (code + scale);
    return kv_token{at + nth * code, at + heads * code + nth * scale};
}
/* The same in MMA order: where a head starts; an element (fp4: its word, shift 4 times the nibble);
 * what it is multiplied by. */
static __device__ __forceinline__ uint8_t *kv_mma_head(const gpu_kv &kv, int head, int64_t page)
{
    const int scale = (int)kv_scale_bytes(kv.type, kv.D);
    return kv.base + (size_t)page * kv.page_stride +
           (size_t)head * kv_place_head(kv_bits(kv.type), scale, kv.D);
}
static __device__ __forceinline__ uint8_t *kv_mma_at(const gpu_kv &kv, int which, int head,
                                                     int64_t page, int token, int d)
{
    const int bytes = kv_bits(kv.type) / 8;
    return kv_mma_head(kv, head, page) + kv_place(bytes, kv.D, which, token, d) * (size_t)bytes;
}
static __device__ __forceinline__ uint32_t *kv_mma_word(const gpu_kv &kv, int which, int head,
                                                        int64_t page, int token, int d, int *shift)
{
    const size_t at = kv_fp4_place(kv.D, which, token, d);
    *shift = (int)(at % 8) * 4;
    return (uint32_t *)(void *)kv_mma_head(kv, head, page) + at / 8;
}
static __device__ __forceinline__ uint8_t *kv_mma_scale(const gpu_kv &kv, int which, int head,
                                                        int64_t page, int token, int block)
{
    return kv_mma_head(kv, head, page) +
           kv_place_scale(kv_bits(kv.type), kv.D, which, token, block);
}

/* ---- values -------------------------------------------------------------------------------------
 */

/* An element is v(code) * mul + add. */
struct kv_factor {
    float mul, add;
};
static __device__ __forceinline__ float kv_f32_at(const uint8_t *p) /* of any alignment */
{
    if (!((uintptr_t)p & 3)) return *(const float *)p;
    return bits_f32((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
                    (uint32_t)p[3] << 24);
}
/* Lanes [d/16*16, +16) of a token; scales as kv_at gives them, in MMA order the one of d. */
static __device__ __forceinline__ kv_factor kv_factor_of(const gpu_kv &kv, int which, int head,
                                                         const uint8_t *scales, int d)
{
    if (kv.type == KV_INT8) return kv_factor{kv_f32_at(scales), kv_f32_at(scales + 4)};
    if (kv.type == KV_FP4) {
        uint32_t e = scales[kv.order == GPU_KV_MMA ? 0 : d / 16]; /* 0 marks a block of zeros */
        return kv_factor{e ? e8m0_f32(e) : 0.0f, 0.0f};
    }
    const float *all = which ? kv.v_scale : kv.k_scale;
    bool fp8 = kv.type == KV_FP8_E4M3 || kv.type == KV_FP8_E5M2;
    return kv_factor{fp8 && all ? all[head] : 1.0f, 0.0f};
}
static __device__ __forceinline__ float kv_value(int type, uint32_t code, kv_factor f)
{
    switch (type) {
    case KV_F32:
        return bits_f32(code);
    case KV_FP8_E4M3:
        return e4m3_f32(code) * f.mul;
    case KV_FP8_E5M2:
        return e5m2_f32(code) * f.mul;
    case KV_INT8:
        return (float)code * f.mul + f.add;
    case KV_FP4:
        return e2m1_f32(code) * f.mul;
    default:
        return bf16_f32((uint16_t)code);
    }
}

/* `bytes` codes bytes (2, 4, 8 or 16), of which the first `have` exist; the others are 0. */
static __device__ __forceinline__ uint4 kv_load(const uint8_t *p, int bytes, int have)
{
    uint4 w = make_uint4(0, 0, 0, 0);
    if (have == bytes && !((uintptr_t)p & (uintptr_t)(bytes - 1))) {
        if (bytes == 16) return *(const uint4 *)p;
        if (bytes == 8) {
            uint2 h = *(const uint2 *)p;
            w.x = h.x, w.y = h.y;
        } else {
            w.x = bytes == 4 ? *(const uint32_t *)p : *(const uint16_t *)p;
        }
        return w;
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        uint32_t b = i < have ? (uint32_t)p[i] << (8 * (i % 4)) : 0;
        if (i < 4)
            w.x |= b;
        else if (i < 8)
            w.y |= b;
        else if (i < 12)
            w.z |= b;
        else
            w.w |= b;
    }
    return w;
}
/* Code i of those loaded. */
static __device__ __forceinline__ uint32_t kv_code(uint4 w, int bits, int i)
{
    int at = i * bits, word = at / 32;
    uint32_t u = word == 0 ? w.x : word == 1 ? w.y : word == 2 ? w.z : w.w;
    u >>= at % 32;
    return bits == 32 ? u : u & ((1u << bits) - 1);
}

/* Codes and factor of lane d of a token; four codes of K in MMA order (d a multiple of 4). */
static __device__ __forceinline__ kv_factor kv_mma_factor(const gpu_kv &kv, int which, int head,
                                                          int64_t page, int token, int d)
{
    const bool own = kv.type == KV_INT8 || kv.type == KV_FP4;
    return kv_factor_of(kv, which, head,
                        own ? kv_mma_scale(kv, which, head, page, token, d / 16) : NULL, d);
}
static __device__ __forceinline__ uint4 kv_mma_fp4x4(const gpu_kv &kv, int head, int64_t page,
                                                     int token, int d)
{
    int shift; /* of the first; the others 16, 4 and 20 above it */
    const uint32_t w = *kv_mma_word(kv, 0, head, page, token, d, &shift) >> shift;
    return make_uint4((w & 15) | (w >> 16 & 15) << 4 | (w >> 4 & 15) << 8 | (w >> 20 & 15) << 12, 0,
                      0, 0);
}

/* Lane d of one token; which 0 = K, 1 = V. */
static __device__ __forceinline__ float kv_get(const gpu_kv &kv, int which, int head, int64_t page,
                                               int token, int d)
{
    int bits = kv_bits(kv.type), bytes = bits < 8 ? 1 : bits / 8;
    if (kv.v_in_k) which = 0; /* the values are lanes of the keys */
    kv_token t = kv_at(kv, which, head, page, token);
    const bool mma = kv.order == GPU_KV_MMA;
    kv_factor f = mma ? kv_mma_factor(kv, which, head, page, token, d)
                      : kv_factor_of(kv, which, head, t.scales, d);
    if (mma && bits == 4) {
        int shift;
        const uint32_t w = *kv_mma_word(kv, which, head, page, token, d, &shift);
        return kv_value(kv.type, w >> shift & 15, f);
    }
    const uint8_t *p =
        mma ? kv_mma_at(kv, which, head, page, token, d) : t.codes + (size_t)d * (size_t)bits / 8;
    uint32_t c = 0;
    for (int i = 0; i < bytes; i++)
        c |= (uint32_t)p[i] << (8 * i);
    if (bits == 4) c = c >> (4 * (d & 1)) & 15;
    return kv_value(kv.type, c, f);
}

/* ---- tiles --------------------------------------------------------------------------------------
 */

/* Keys of a block's work: those of a sequence that a tile may touch. */
struct kv_keys {
    const int32_t *pages; /* of the sequence */
    int lo, hi;           /* tokens [lo, hi) are seen */
};

static __device__ __forceinline__ void kv_tile_rows(const gpu_kv &kv, int which, int head,
                                                    const kv_keys &k, int t0, int d, int n,
                                                    float *out)
{
    const int ahead = 4, warp = (int)threadIdx.x / 32, lane_ = (int)threadIdx.x % 32;
    const int bits = kv_bits(kv.type), bytes = bits * 4 / 8;
    const int lanes = n - d < 0 ? 0 : n - d > 4 ? 4 : n - d, have = (lanes * bits + 7) / 8;
#pragma unroll 1
    for (int t1 = warp * 8; t1 < warp * 8 + 8; t1 += ahead) {
        uint4 w[ahead];
        kv_factor f[ahead];
#pragma unroll
        for (int i = 0; i < ahead; i++) {
            int t = t0 + t1 + i;
            w[i] = make_uint4(0, 0, 0, 0);
            f[i] = kv_factor{0, 0};
            if (t < k.lo || t >= k.hi || !lanes) continue;
            int nth = t / kv.page_tokens, token = t - nth * kv.page_tokens;
            int64_t page = k.pages[nth];
            if (kv.order == GPU_KV_MMA) {
                w[i] = bits == 4 ? kv_mma_fp4x4(kv, head, page, token, d)
                                 : kv_load(kv_mma_at(kv, which, head, page, token, d), bytes, have);
                f[i] = kv_mma_factor(kv, which, head, page, token, d);
                continue;
            }
            kv_token at = kv_at(kv, which, head, page, token);
            w[i] = kv_load(at.codes + d * bits / 8, bytes, have);
            f[i] = kv_factor_of(kv, which, head, at.scales, d);
        }
#pragma unroll
        for (int i = 0; i < ahead; i++) {
            int t = t1 + i;
            bool seen = t0 + t >= k.lo && t0 + t < k.hi;
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                v[j] = seen && j < lanes ? kv_value(kv.type, kv_code(w[i], bits, j), f[i]) : 0.0f;
            *(float4 *)(out + t * KV_LD + lane_ * 4) = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
}

/* V in MMA order: eight tokens of a lane lie side by side. t0 is the start of a page. */
static __device__ __forceinline__ void kv_tile_turned(const gpu_kv &kv, int head, const kv_keys &k,
                                                      int t0, int d0, int n, float *out)
{
    const int bits = kv_bits(kv.type), bytes = bits / 8;
    const bool own = kv.type == KV_INT8 || kv.type == KV_FP4; /* a factor of each token */
    const kv_factor all = own ? kv_factor{0, 0} : kv_factor_of(kv, 1, head, NULL, 0);
    const int64_t page = k.pages[t0 / KV_PLACE_TOKENS];
#pragma unroll
    for (int i = 0; i < KV_SPAN * 4 / KV_SPAN; i++) {
        int item = (int)threadIdx.x + i * KV_SPAN, d = item / 4, quad = item % 4;
        uint4 w = make_uint4(0, 0, 0, 0);
        int shift;
        if (d0 + d < n && bits == 4)
            w.x = *kv_mma_word(kv, 1, head, page, 2 * quad, d0 + d, &shift);
        else if (d0 + d < n)
            w = kv_load(kv_mma_at(kv, 1, head, page, 2 * quad, d0 + d), 8 * bytes, 8 * bytes);
#pragma unroll
        for (int j = 0; j < 8; j++) { /* place 8*quad + j holds token t */
            int t = 2 * quad + j % 2 + 8 * (j / 2 % 2) + 16 * (j / 4);
            float v = 0;
            if (t0 + t >= k.lo && t0 + t < k.hi && d0 + d < n) {
                const int at = bits == 4 ? j / 2 + 4 * (j % 2) : j;
                v = kv_value(kv.type, kv_code(w, bits, at),
                             own ? kv_mma_factor(kv, 1, head, page, t, d0 + d) : all);
            }
            out[t * KV_LD + d] = v;
        }
    }
}

/* Lanes [d0, d0 + 128) of tokens [t0, t0 + 32), t0 a multiple of 32, to out [32][KV_LD]. Lanes from
 * n on and tokens outside [lo, hi) are 0; one token at least is seen. One function of its own, for
 * kernels that keep much in registers: kv lies in shared memory. */
static __device__ __attribute__((noinline, unused)) void
kv_tile(const gpu_kv &kv, int which, int head, kv_keys k, int t0, int d0, int n, float *out)
{
    if (which && kv.order == GPU_KV_MMA)
        kv_tile_turned(kv, head, k, t0, d0, n, out);
    else
        kv_tile_rows(kv, which && !kv.v_in_k, head, k, t0, d0 + (int)threadIdx.x % 32 * 4, n, out);
}
#endif
