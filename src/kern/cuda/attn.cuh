/* What the attention kernels over pages of GPU_KV_MMA order share (decode.cuh, prefill.cuh): the
 * element types of the cache as operands of 16-bit products, queries as the other operand, scores
 * in powers of two, sinks.
 *
 * Eight elements that lie side by side are two k16 steps of a lane's operand, b0 and b1 of each:
 * K of eight lanes of the head (any order of lanes will do, q is taken in the same), V of the eight
 * tokens that kv_place puts there.
 *
 * fp8 codes become f16, which holds every one of them exactly, NaN too; then q and the
 * probabilities are f16. The scales of the cache are factors of the scores and of the output. */
#ifndef KERN_CUDA_ATTN_CUH
#define KERN_CUDA_ATTN_CUH
#include "kern/cuda/kv_place.h"
#include "kern/cuda/mma.cuh"
#include "kern/cuda/port.cuh"
extern "C" {
#include "kern/kern.h"
}

#define ATTN_LOG2E 1.4426950408889634f

/* pack, mma: of q and K. Where scales differ from token to token, probabilities times scales are
 * bf16, whose range is wide enough (wide_p). */
struct kv_bf16 {
    static constexpr int bytes = 2, bits = 16;
    static constexpr bool wide_p = true;
    static __device__ __forceinline__ void take(uint32_t at, uint32_t b[4])
    {
        uint4 x = ptx_lds128(at);
        b[0] = x.x, b[1] = x.y, b[2] = x.z, b[3] = x.w;
    }
    static __device__ __forceinline__ uint32_t pack(float lo, float hi)
    {
        return ptx_pack_bf16(lo, hi);
    }
    static __device__ __forceinline__ void mma(float d[4], const uint32_t a[4], uint32_t b0,
                                               uint32_t b1)
    {
        ptx_mma_bf16(d, a, b0, b1);
    }
};
struct kv_codes { /* types that become f16 */
    static constexpr int bytes = 1, bits = 8;
    static __device__ __forceinline__ uint32_t pack(float lo, float hi)
    {
        return ptx_pack_f16(lo, hi);
    }
    static __device__ __forceinline__ void mma(float d[4], const uint32_t a[4], uint32_t b0,
                                               uint32_t b1)
    {
        ptx_mma_f16(d, a, b0, b1);
    }
};

struct kv_e4m3 : kv_codes {
    static constexpr bool wide_p = false;
    static __device__ __forceinline__ void take(uint32_t at, uint32_t b[4])
    {
        uint2 x = ptx_lds64(at);
        b[0] = ptx_e4m3_f16(x.x), b[1] = ptx_e4m3_f16(x.x >> 16);
        b[2] = ptx_e4m3_f16(x.y), b[3] = ptx_e4m3_f16(x.y >> 16);
    }
};
struct kv_e5m2 : kv_codes { /* the upper byte of an f16 */
    static constexpr bool wide_p = false;
    static __device__ __forceinline__ void take(uint32_t at, uint32_t b[4])
    {
        uint2 x = ptx_lds64(at);
        b[0] = __byte_perm(x.x, 0, 0x1404), b[1] = __byte_perm(x.x, 0, 0x3424);
        b[2] = __byte_perm(x.y, 0, 0x1404), b[3] = __byte_perm(x.y, 0, 0x3424);
    }
};

/* Eight lanes of q from element i on (a multiple of 8) as V's numbers. */
template <class V> static __device__ __forceinline__ void attn_q(gpu_x q, int64_t i, uint32_t to[4])
{
    if (q.type == GPU_F32) {
        const float4 *p = (const float4 *)((const float *)q.p + i);
        const float4 x = p[0], y = p[1];
        to[0] = V::pack(x.x, x.y), to[1] = V::pack(x.z, x.w);
        to[2] = V::pack(y.x, y.y), to[3] = V::pack(y.z, y.w);
        return;
    }
    const uint4 x = *(const uint4 *)((const uint16_t *)q.p + i);
    const uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int k = 0; k < 4; k++)
        to[k] = V::bytes == 2 ? w[k]
                              : V::pack(bf16_f32((uint16_t)w[k]), bf16_f32((uint16_t)(w[k] >> 16)));
}

/* Four lanes from a multiple of four. */
template <class V>
static __device__ __forceinline__ void attn_q4(gpu_x q, int64_t i, uint32_t to[2])
{
    if (q.type == GPU_F32) {
        const float4 x = *(const float4 *)((const float *)q.p + i);
        to[0] = V::pack(x.x, x.y), to[1] = V::pack(x.z, x.w);
        return;
    }
    const uint2 x = *(const uint2 *)((const uint16_t *)q.p + i);
    to[0] = V::pack(bf16_f32((uint16_t)x.x), bf16_f32((uint16_t)(x.x >> 16)));
    to[1] = V::pack(bf16_f32((uint16_t)x.y), bf16_f32((uint16_t)(x.y >> 16)));
}

/* Scores s = q.k of a KV head become powers of two: s * by, or with a softcap cap * tanh(s * by).
 */
struct attn_scale {
    float by, cap; /* cap 0 = none */
};
static __device__ __forceinline__ attn_scale attn_scale_of(const gpu_attention &a, int hk)
{
    const float s = a.scale * (a.kv.k_scale ? a.kv.k_scale[hk] : 1.0f);
    if (a.softcap > 0) return attn_scale{s / a.softcap, a.softcap * ATTN_LOG2E};
    return attn_scale{s * ATTN_LOG2E, 0};
}
static __device__ __forceinline__ float attn_capped(float s, attn_scale c)
{
    return c.cap - 2 * c.cap * ptx_rcp(ptx_exp2(s * c.by * (2 * ATTN_LOG2E)) + 1);
}

/* What O is multiplied by in the end: max is that of the scores in powers of two, sum and O count
 * from it. A sink is one more score without a value. */
static __device__ __forceinline__ float attn_finish(const gpu_attention &a, int head, float max,
                                                    float sum, float v_scale)
{
    if (!a.sinks) return v_scale / sum;
    const float sink = a.sinks[head] * ATTN_LOG2E, m = fmaxf(max, sink), f = exp2f(max - m);
    return v_scale * f / (sum * f + exp2f(sink - m));
}

/* Why neither kernel takes this, or NULL. */
static inline const char *attn_refuse(const gpu_attention *a)
{
    const gpu_kv *kv = &a->kv;
    const size_t fine = (size_t)a->q.p | (size_t)a->out.p | (size_t)kv->base | kv->page_stride;
    if (kv->order != GPU_KV_MMA) return "the cache is not in the order of the tensor cores";
    if (kv->v_in_k) return "V is part of K";
    if (kv->page_tokens != KV_PLACE_TOKENS) return "made for pages of 32 tokens";
    if (kv->Hk < 1 || a->H % kv->Hk) return "query heads are no multiple of KV heads";
    if (!(a->scale > 0)) return "made for positive scales";
    if (fine % 16 || a->ldq % 8 || a->ldo % 8) return "rows do not start at multiples of 16 bytes";
    return NULL;
}
#endif
