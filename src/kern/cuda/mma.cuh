/* The instructions that attention kernels are made of. On the device they are those of ptx.cuh;
 * where kernels are emulated (TARE_EMULATED) the same names do what the instructions mean, so that
 * a kernel with pipelines and tensor cores is tested on a CPU as it stands.
 *
 * Emulated: shared-memory addresses count from the start of the dynamic shared memory; a copy is
 * done when it is asked for; a barrier in shared memory holds what it still waits for. A wait for a
 * copy that nobody has asked for yet ends the process: on the device it may be a hang, so kernels
 * order asking before waiting by a barrier of the warp or the block. */
#ifndef KERN_CUDA_MMA_CUH
#define KERN_CUDA_MMA_CUH
#ifndef TARE_EMULATED
#include "kern/cuda/ptx.cuh"
#else
#include "kern/cuda/plain_num.cuh"

#define PTX static inline

PTX uint32_t ptx_smem(const void *p)
{
    return (uint32_t)((const unsigned char *)p - (const unsigned char *)emu_smem());
}
PTX uint32_t ptx_thread(void)
{
    return threadIdx.x;
}
template <class T> PTX T *emu_at(uint32_t at)
{
    if (at % sizeof(T)) emu_die("shared address %u is no multiple of %zu", at, sizeof(T));
    return (T *)((unsigned char *)emu_smem() + at);
}

/* ---- mbarriers and bulk copies ----------------------------------------------------------------
 */
struct emu_mbar {
    int32_t bytes; /* still to come; negative: came before they were announced */
    uint8_t phase, count, pending, unused;
};
PTX void emu_mbar_turn(emu_mbar *b)
{
    if (b->pending || b->bytes) return;
    b->phase ^= 1;
    b->pending = b->count;
}
PTX void ptx_mbar_init(uint32_t bar, uint32_t count)
{
    *emu_at<emu_mbar>(bar & ~4u) = emu_mbar{0, 0, (uint8_t)count, (uint8_t)count, 0};
}
PTX void ptx_mbar_fence(void) {}
PTX void ptx_proxy_fence(void) {}
PTX void ptx_mbar_expect(uint32_t bar, uint32_t bytes)
{
    emu_mbar *b = emu_at<emu_mbar>(bar);
    b->bytes += (int32_t)bytes;
    b->pending--;
    emu_mbar_turn(b);
}
PTX void ptx_mbar_wait(uint32_t bar, uint32_t parity)
{
    __syncwarp();
    if (emu_at<emu_mbar>(bar)->phase == parity) emu_die("wait for a copy that is not on its way");
}
PTX void ptx_bulk_load(uint32_t to, const void *from, uint32_t n, uint32_t bar)
{
    if (to % 16 || n % 16 || (uintptr_t)from % 16) emu_die("bulk copy of odd bytes or places");
    memcpy(emu_at<unsigned char>(to), from, n);
    emu_mbar *b = emu_at<emu_mbar>(bar);
    b->bytes -= (int32_t)n;
    emu_mbar_turn(b);
}
PTX void ptx_copy4(uint32_t to, const void *from)
{
    memcpy(emu_at<uint32_t>(to), from, 4);
}
PTX void ptx_copy_wait_all(void) {}
PTX void ptx_pdl_wait(void) {}
PTX void ptx_pdl_go(void) {}

/* ---- loads and numbers --------------------------------------------------------------------------
 */
PTX uint4 ptx_lds128(uint32_t at)
{
    return *emu_at<uint4>(at);
}
PTX uint2 ptx_lds64(uint32_t at)
{
    return *emu_at<uint2>(at);
}
PTX uint32_t ptx_lds32(uint32_t at)
{
    return *emu_at<uint32_t>(at);
}
PTX uint32_t ptx_lds16(uint32_t at)
{
    return *emu_at<uint16_t>(at);
}
PTX void ptx_sts128(uint32_t at, uint4 v)
{
    *emu_at<uint4>(at) = v;
}
template <class T> PTX T __ldcg(const T *p)
{
    return *p;
}
PTX uint32_t ptx_pack_bf16(float lo, float hi)
{
    return (uint32_t)f32_bf16(lo) | (uint32_t)f32_bf16(hi) << 16;
}
PTX uint32_t ptx_pack_f16(float lo, float hi)
{
    return f32_f16(lo) | f32_f16(hi) << 16;
}
PTX uint32_t ptx_e4m3_f16(uint32_t two) /* every code is a number of f16, or NaN */
{
    return ptx_pack_f16(e4m3_f32(two & 255), e4m3_f32(two >> 8 & 255));
}
PTX uint32_t ptx_sub_f16x2(uint32_t a, uint32_t b)
{
    return ptx_pack_f16(f16_f32(a & 0xffff) - f16_f32(b & 0xffff),
                        f16_f32(a >> 16) - f16_f32(b >> 16));
}
PTX uint32_t ptx_sub_bf16x2(uint32_t a, uint32_t b)
{
    return ptx_pack_bf16(bf16_f32((uint16_t)a) - bf16_f32((uint16_t)b),
                         bf16_f32((uint16_t)(a >> 16)) - bf16_f32((uint16_t)(b >> 16)));
}
PTX uint32_t ptx_mul_bf16x2(uint32_t a, uint32_t b)
{
    return ptx_pack_bf16(bf16_f32((uint16_t)a) * bf16_f32((uint16_t)b),
                         bf16_f32((uint16_t)(a >> 16)) * bf16_f32((uint16_t)(b >> 16)));
}
PTX float ptx_exp2(float x)
{
    return exp2f(x);
}
PTX float ptx_rcp(float x)
{
    return 1.0f / x;
}

/* ---- products ----------------------------------------------------------------------------------
 */
struct emu_mma {
    uint32_t a[4], b[2];
};
template <bool F16> static void emu_mma_op(const emu_lane *lanes, unsigned)
{
    float a[16][16], b[16][8];
    auto two = [](uint32_t w, float *to, int step) {
        to[0] = F16 ? f16_f32(w & 0xffff) : bf16_f32((uint16_t)w);
        to[step] = F16 ? f16_f32(w >> 16) : bf16_f32((uint16_t)(w >> 16));
    };
    for (int l = 0; l < 32; l++) {
        const emu_mma *m = (const emu_mma *)lanes[l].in;
        for (int i = 0; i < 4; i++)
            two(m->a[i], &a[l / 4 + 8 * (i & 1)][2 * (l % 4) + 8 * (i >> 1)], 1);
        for (int i = 0; i < 2; i++)
            two(m->b[i], &b[2 * (l % 4) + 8 * i][l / 4], 8);
    }
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) {
            float *d = (float *)lanes[l].out + i, sum = *d;
            for (int k = 0; k < 16; k++)
                sum += a[l / 4 + 8 * (i >> 1)][k] * b[k][2 * (l % 4) + (i & 1)];
            *d = sum;
        }
}
PTX void ptx_mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    emu_mma m = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    emu_warp(~0u, emu_mma_op<false>, &m, d, 0, __FILE__, __LINE__);
}
PTX void ptx_mma_f16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    emu_mma m = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    emu_warp(~0u, emu_mma_op<true>, &m, d, 0, __FILE__, __LINE__);
}
PTX void emu_transpose_op(const emu_lane *lanes, unsigned)
{
    uint16_t m[8][8];
    for (int l = 0; l < 32; l++)
        memcpy(&m[l / 4][2 * (l % 4)], lanes[l].in, 4);
    for (int l = 0; l < 32; l++) {
        uint32_t v = m[2 * (l % 4)][l / 4] | (uint32_t)m[2 * (l % 4) + 1][l / 4] << 16;
        memcpy(lanes[l].out, &v, 4);
    }
}
PTX uint32_t ptx_transpose(uint32_t a)
{
    uint32_t d;
    emu_warp(~0u, emu_transpose_op, &a, &d, 0, __FILE__, __LINE__);
    return d;
}
#endif
#endif
