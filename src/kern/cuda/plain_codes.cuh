/* Lanes become the codes of a quantized linear (gpu_codes), by the rules of kern/act.c. Threads of
 * a block have units of eight lanes side by side; all of them take part in what is found together:
 * the largest lane of a row or of a group of 128. NaN is the largest of all. */
#ifndef KERN_CUDA_PLAIN_CODES_CUH
#define KERN_CUDA_PLAIN_CODES_CUH
#include "kern/cuda/plain_num.cuh"
#include "kern/cuda/plain_rows.cuh"

#define CODES_GROUP 128

static inline const char *codes_refuse(const gpu_codes &c)
{
    int64_t bytes = c.as_bf16 ? 2 : 1;
    if (c.code != GPU_E4M3 && c.code != GPU_INT8) return "codes of an unknown type";
    if (c.group != 0 && c.group != CODES_GROUP) return "codes in groups of other than 128";
    if (((uintptr_t)c.p & 15) || c.ld * bytes % 16) return "rows of codes are not aligned";
    return NULL;
}

static __device__ __forceinline__ float unit_amax(float top, const float v[8])
{
#pragma unroll
    for (int j = 0; j < 8; j++)
        top = max_nan(top, fabsf(v[j]));
    return top;
}
static __device__ __forceinline__ float scale_of(const gpu_codes &c, float top)
{
    if (top != top) return top;
    return c.fixed > 0 ? c.fixed : top / (c.code == GPU_E4M3 ? 448.0f : 127.5f);
}
/* Of the row t, kept. */
static __device__ __forceinline__ float row_scale(const gpu_codes &c, int64_t t, float top)
{
    float scale = scale_of(c, block_max(top));
    if (threadIdx.x == 0) c.scale[t * c.scale_row] = scale;
    return scale;
}

/* n lanes of row t from lane i on. */
static __device__ __forceinline__ void put_codes(const gpu_codes &c, int64_t t, int64_t i, int n,
                                                 float scale, const float v[8])
{
    float by = scale > 0 ? scale : 1.0f;
    uint32_t w[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float q = v[j] / by;
        if (c.code == GPU_E4M3) {
            w[j] = f32_e4m3(q);
            if (c.as_bf16) w[j] = f32_bf16(e4m3_f32(w[j]));
        } else {
            q = rintf(q);
            q = q < -128.0f ? -128.0f : q > 127.0f ? 127.0f : q == q ? q : 0.0f;
            w[j] = c.as_bf16 ? f32_bf16(q) : (uint32_t)(int)q & 255u;
        }
    }
    int64_t at = t * c.ld + i;
    if (c.as_bf16) {
        uint16_t *p = (uint16_t *)c.p + at;
        if (n == 8)
            *(uint4 *)p = make_uint4(w[0] | w[1] << 16, w[2] | w[3] << 16, w[4] | w[5] << 16,
                                     w[6] | w[7] << 16);
        else
            for (int j = 0; j < n; j++)
                p[j] = (uint16_t)w[j];
    } else {
        uint8_t *p = (uint8_t *)c.p + at;
        if (n == 8)
            *(uint2 *)p = make_uint2(w[0] | w[1] << 8 | w[2] << 16 | w[3] << 24,
                                     w[4] | w[5] << 8 | w[6] << 16 | w[7] << 24);
        else
            for (int j = 0; j < n; j++)
                p[j] = (uint8_t)w[j];
    }
}

/* The same with the scale of their group, which 16 threads have. All of the warp come here. */
static __device__ __forceinline__ void put_group_codes(const gpu_codes &c, int64_t t, int64_t i,
                                                       int n, const float v[8])
{
    float top = unit_amax(0, v);
    for (int by = 8; by; by >>= 1)
        top = max_nan(top, __shfl_xor_sync(FULL, top, by));
    float scale = scale_of(c, top);
    if (n && i % CODES_GROUP == 0)
        c.scale[t * c.scale_row + i / CODES_GROUP * c.scale_group] = scale;
    put_codes(c, t, i, n, scale, v);
}
#endif
