/* Storing keys and values into pages: the bytes that kern_kv_store writes, but for the payload of a
 * NaN among int8's minimum and scale. A warp has one token of one head, of K or of V; in int8 and
 * fp4 its lanes find the range of their block together. */
#ifndef KERN_CUDA_PLAIN_STORE_CUH
#define KERN_CUDA_PLAIN_STORE_CUH
#include "kern/cuda/plain_kv.cuh"

/* The input of a warp: lanes of one head of one token. */
struct store_row {
    gpu_x x;
    int64_t at;
    int D;
};
static __device__ __forceinline__ float row_lane(const store_row &r, int d)
{
    return lane(r.x, r.at + d);
}

/* Elements that lie alone: f32, bf16, fp8. Returns how many of this thread's were clipped. */
static __device__ int store_element(const gpu_kv &kv, uint8_t *to, float v, float scale)
{
    if (kv.type == KV_F32) {
        *(float *)to = v;
        return 0;
    }
    if (kv.type == KV_BF16) {
        *(uint16_t *)to = f32_bf16(v);
        return 0;
    }
    float s = v / scale;
    bool e4m3 = kv.type == KV_FP8_E4M3;
    *to = (uint8_t)(e4m3 ? f32_e4m3(s) : f32_e5m2(s));
    return fabsf(s) > (e4m3 ? 448.0f : 57344.0f);
}

/* Smallest and largest lane as a loop over the lanes finds them: NaN counts in lane 0 alone, and of
 * zeros the first one. */
static __device__ void row_range(const store_row &r, int lane_, float *lo, float *hi)
{
    float first = row_lane(r, 0), least = first, most = first;
    int at = r.D;
    for (int d = lane_; d < r.D; d += 32) {
        float v = row_lane(r, d);
        least = v < least ? v : least;
        most = v > most ? v : most;
    }
    for (int i = 16; i; i >>= 1) {
        float l = __shfl_xor_sync(0xffffffffu, least, i), m = __shfl_xor_sync(0xffffffffu, most, i);
        least = l < least ? l : least;
        most = m > most ? m : most;
    }
    for (int d = lane_; d < r.D && at == r.D; d += 32)
        if (row_lane(r, d) == least) at = d;
    for (int i = 16; i; i >>= 1) {
        int o = __shfl_xor_sync(0xffffffffu, at, i);
        at = o < at ? o : at;
    }
    *lo = at < r.D ? row_lane(r, at) : first;
    *hi = most;
}

/* A token of a head where it goes. */
struct store_place {
    int which, head, token;
    int64_t page;
    kv_token plain; /* in plain order */
};

static __device__ void store_int8(const gpu_kv &kv, const store_row &r, const store_place &to,
                                  int lane_)
{
    const bool mma = kv.order == GPU_KV_MMA;
    float lo, hi;
    row_range(r, lane_, &lo, &hi);
    float scale = (hi - lo) / 255.0f;
    for (int d = lane_; d < r.D; d += 32) {
        float q = scale > 0 ? rintf((row_lane(r, d) - lo) / scale) : 0.0f;
        uint8_t *p =
            mma ? kv_mma_at(kv, to.which, to.head, to.page, to.token, d) : to.plain.codes + d;
        *p = (uint8_t)(q > 255 ? 255 : q > 0 ? q : 0); /* NaN becomes 0 */
    }
    if (lane_ < 8) { /* of any alignment */
        uint32_t u = __float_as_uint(lane_ < 4 ? scale : lo);
        uint8_t *p =
            mma ? kv_mma_scale(kv, to.which, to.head, to.page, to.token, 0) : to.plain.scales;
        p[lane_] = (uint8_t)(u >> (8 * (lane_ % 4)));
    }
}

/* E8M0 code of 2^ceil(log2(amax/6)). What has no such power (zero after the division, infinity)
 * gets 2^0. */
static __device__ uint32_t fp4_scale(float amax)
{
    if (!(amax > 0)) return 0;
    uint32_t u = __float_as_uint(amax / 6.0f);
    if (u == 0 || u >= 0x7f800000u) return 127;
    uint32_t c = (u >> 23) + ((u & 0x7fffffu) != 0);
    return c < 1 ? 1 : c > 254 ? 254 : c;
}

/* The 32 lanes of a warp in MMA order. A word of K has eight of them; tokens of a step share words
 * of V: each turns the bits of its own nibble that differ. */
static __device__ void store_nibbles(const gpu_kv &kv, const store_place &to, int d, uint32_t code)
{
    int shift;
    uint32_t *word = kv_mma_word(kv, to.which, to.head, to.page, to.token, d, &shift);
    if (to.which) {
        const uint32_t turn = ((*(volatile uint32_t *)word >> shift & 15) ^ code) << shift;
        if (turn) atomicXor(word, turn);
        return;
    }
    uint32_t all = code << shift;
    all |= __shfl_xor_sync(0xffffffffu, all, 1);
    all |= __shfl_xor_sync(0xffffffffu, all, 2);
    all |= __shfl_xor_sync(0xffffffffu, all, 16);
    if (d % 4 == 0 && d / 16 % 2 == 0) *word = all;
}

static __device__ void store_fp4(const gpu_kv &kv, const store_row &r, const store_place &to,
                                 int lane_)
{
    const bool mma = kv.order == GPU_KV_MMA;
    for (int d0 = 0; d0 < r.D; d0 += 32) { /* two blocks of 16 */
        int d = d0 + lane_;
        float v = d < r.D ? row_lane(r, d) : 0.0f, amax = fabsf(v) > 0 ? fabsf(v) : 0.0f;
        for (int i = 8; i; i >>= 1) {
            float o = __shfl_xor_sync(0xffffffffu, amax, i);
            amax = o > amax ? o : amax;
        }
        uint32_t e = fp4_scale(amax), code = f32_e2m1(v / (e ? e8m0_f32(e) : 1.0f));
        if (d >= r.D) code = 0;
        uint32_t next = __shfl_xor_sync(0xffffffffu, code, 1);
        if (mma)
            store_nibbles(kv, to, d, code);
        else if (d < r.D && lane_ % 2 == 0)
            to.plain.codes[d / 2] = (uint8_t)(code | next << 4);
        if (d >= r.D || lane_ % 16) continue;
        uint8_t *p = mma ? kv_mma_scale(kv, to.which, to.head, to.page, to.token, d / 16)
                         : to.plain.scales + d / 16;
        *p = (uint8_t)e;
    }
}

/* One warp: returns how many elements were clipped. */
static __device__ int store_token(const gpu_kv &kv, int which, int head, int slot,
                                  const store_row &r, int lane_)
{
    int64_t page = slot / kv.page_tokens;
    int token = slot % kv.page_tokens, clipped = 0, bytes = kv_bits(kv.type) / 8;
    const store_place to = {which, head, token, page, kv_at(kv, which, head, page, token)};
    const float *scales = which ? kv.v_scale : kv.k_scale;
    float scale = scales ? scales[head] : 1.0f;
    if (kv.type == KV_INT8)
        store_int8(kv, r, to, lane_);
    else if (kv.type == KV_FP4)
        store_fp4(kv, r, to, lane_);
    else
        for (int d = lane_; d < r.D; d += 32) {
            uint8_t *p = kv.order == GPU_KV_MMA ? kv_mma_at(kv, which, head, page, token, d)
                                                : to.plain.codes + (size_t)d * (size_t)bytes;
            clipped += store_element(kv, p, row_lane(r, d), scale);
        }
    return clipped;
}
#endif
