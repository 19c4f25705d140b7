/* Further instructions of attention kernels, as mma.cuh has them: products of four warps (wgmma)
 * whose operands are bf16 or f16, of A in shared memory or in registers, named barriers, barriers
 * in shared memory that warps of a block signal to one another.
 *
 * Emulated: a product is computed when it is waited for, from what its operands hold then: operands
 * that are overwritten and sums that are read too early show. Waiting lets other threads run. */
#ifndef KERN_CUDA_PREFILL90_PTX_CUH
#define KERN_CUDA_PREFILL90_PTX_CUH
#include "kern/cuda/attn.cuh"
#ifndef TARE_EMULATED
#include "kern/cuda/ptx_map.cuh"

PTX void ptx_mbar_await(uint32_t bar, uint32_t parity)
{
    ptx_mbar_wait(bar, parity);
}
PTX void ptx_bar_arrive(int which, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(which), "r"(threads) : "memory");
}
/* Registers of each thread of the four warps from here on. */
template <int N> PTX void ptx_more_registers(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> PTX void ptx_fewer_registers(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* What differs between operands as ptx_wg_operand makes them; other operands of the same matrix are
 * so many 16 bytes further on. */
PTX uint32_t ptx_wg_place(uint32_t at)
{
    return (uint32_t)1 << 16 | (at & 0x3ffff) >> 4;
}
#define WG_REST "0x40000040"
#define WG_RS(N, TYPES, NAMES, OPERANDS, A0, A1, A2, A3, B)                                        \
    asm volatile("{\n.reg .b64 b;\nmov.b64 b, {" B ", " WG_REST "};\n"                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" NAMES "}, {" A0      \
                 ", " A1 ", " A2 ", " A3 "}, b, 1, 1, 1, 0;\n}"                                    \
                 : OPERANDS                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
#define WG_SS(N, TYPES, NAMES, OPERANDS, A, B, ADD)                                                \
    asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, " ADD ", 0;\n"                 \
                 "mov.b64 a, {" A ", " WG_REST "};\nmov.b64 b, {" B ", " WG_REST "};\n"            \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" NAMES                \
                 "}, a, b, p, 1, 1, 0, 0;\n}"                                                      \
                 : OPERANDS                                                                        \
                 : "r"(a), "r"(b), "r"(add))
/* d += a b of N columns; a in registers as in ptx_mma_bf16, b a place. */
template <class V, int N> PTX void ptx_wg_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b)
{
    static_assert(N == 64 || N == 128, "widths in use");
    if constexpr (N == 64 && V::bytes == 2)
        WG_RS(64, "bf16.bf16", PTX_N32, PTX_F32(d, 0), "%32", "%33", "%34", "%35", "%36");
    if constexpr (N == 64 && V::bytes == 1)
        WG_RS(64, "f16.f16", PTX_N32, PTX_F32(d, 0), "%32", "%33", "%34", "%35", "%36");
    if constexpr (N == 128 && V::bytes == 2)
        WG_RS(128, "bf16.bf16", PTX_N64, PTX_F64(d, 0), "%64", "%65", "%66", "%67", "%68");
    if constexpr (N == 128 && V::bytes == 1)
        WG_RS(128, "f16.f16", PTX_N64, PTX_F64(d, 0), "%64", "%65", "%66", "%67", "%68");
}
/* d (+)= a b of 128 columns; a lies in shared memory as b does, 64 rows. */
template <class V> PTX void ptx_wg_ss(float (&d)[64], uint32_t a, uint32_t b, int add)
{
    if constexpr (V::bytes == 2)
        WG_SS(128, "bf16.bf16", PTX_N64, PTX_F64(d, 0), "%64", "%65", "%66");
    else
        WG_SS(128, "f16.f16", PTX_N64, PTX_F64(d, 0), "%64", "%65", "%66");
}
#else

PTX void ptx_mbar_await(uint32_t bar, uint32_t parity)
{
    while (emu_at<emu_mbar>(bar)->phase == parity)
        emu_yield();
}
PTX void ptx_mbar_arrive(uint32_t bar)
{
    emu_mbar *b = emu_at<emu_mbar>(bar);
    if (!b->pending) emu_die("more arrivals than the barrier was made for");
    b->pending--;
    emu_mbar_turn(b);
}
PTX void ptx_copy_arrive(uint32_t bar)
{
    ptx_mbar_arrive(bar);
}
PTX void ptx_copy16_zero(uint32_t to, const void *from, uint32_t n)
{
    if (to % 16 || (uintptr_t)from % 16) emu_die("copy of 16 bytes at odd places");
    memset(emu_at<unsigned char>(to), 0, 16);
    memcpy(emu_at<unsigned char>(to), from, n);
}
PTX void ptx_bar_sync(int which, int threads)
{
    emu_named(which, threads, true);
}
PTX void ptx_bar_arrive(int which, int threads)
{
    emu_named(which, threads, false);
}
template <int N> PTX void ptx_more_registers(void) {}
template <int N> PTX void ptx_fewer_registers(void) {}

/* ---- wgmma -------------------------------------------------------------------------------------
 * A product as one warp of the four sees it: its own 16 rows. */
struct emu_wg_call {
    float *d;
    const uint32_t *a; /* NULL: in shared memory */
    uint32_t a_at, b_at;
    int n, add;
    bool f16;
};
struct emu_wg_warp { /* products that nobody has waited for */
    emu_wg_call calls[64][32];
    int group[64], n, groups; /* groups: that were committed */
};
static emu_wg_warp emu_wg[32];

PTX uint32_t ptx_wg_place(uint32_t at)
{
    return (uint32_t)1 << 16 | (at & 0x3ffff) >> 4;
}
/* Value k of row r, by the rules of the 128-byte swizzle. */
PTX float emu_wg_value(uint32_t place, int r, int k, bool f16)
{
    uint32_t byte = ((place & 0x3fff) << 4) + (uint32_t)r * 128 + (uint32_t)k * 2;
    byte ^= (byte >> 7 & 7) << 4;
    const uint16_t v = *emu_at<uint16_t>(byte);
    return f16 ? f16_f32(v) : bf16_f32(v);
}
static void emu_wg_run(const emu_wg_call *lanes, int warp)
{
    float a[16][16], b[128][16];
    const emu_wg_call *c = &lanes[0];
    for (int r = 0; r < c->n; r++)
        for (int k = 0; k < 16; k++)
            b[r][k] = emu_wg_value(c->b_at, r, k, c->f16);
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 16; k++)
            if (c->a) { /* as emu_mma_op */
                const uint32_t w = lanes[r % 8 * 4 + k % 8 / 2].a[r / 8 + k / 8 * 2];
                const uint16_t v = (uint16_t)(w >> (k % 2 * 16));
                a[r][k] = c->f16 ? f16_f32(v) : bf16_f32(v);
            } else
                a[r][k] = emu_wg_value(c->a_at, 16 * (warp % 4) + r, k, c->f16);
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < c->n / 2; i++) {
            const float *x = a[l / 4 + (i & 2 ? 8 : 0)], *y = b[i / 4 * 8 + 2 * (l % 4) + i % 2];
            float sum = c->add ? lanes[l].d[i] : 0;
            for (int k = 0; k < 16; k++)
                sum += x[k] * y[k];
            lanes[l].d[i] = sum;
        }
}
static void emu_wg_ask(const emu_lane *lanes, unsigned)
{
    emu_wg_warp *w = &emu_wg[threadIdx.x / 32];
    if (w->n == 64) emu_die("wgmma: 64 products that nobody waits for");
    for (int l = 0; l < 32; l++)
        w->calls[w->n][l] = *(const emu_wg_call *)lanes[l].in;
    w->group[w->n++] = w->groups;
}
static void emu_wg_end(const emu_lane *, unsigned)
{
    emu_wg[threadIdx.x / 32].groups++;
}
static void emu_wg_finish(const emu_lane *lanes, unsigned)
{
    emu_wg_warp *w = &emu_wg[threadIdx.x / 32];
    int done = 0;
    while (done < w->n && w->group[done] < w->groups - (int)lanes[0].arg)
        emu_wg_run(w->calls[done++], (int)threadIdx.x / 32);
    w->n -= done;
    memmove(w->calls, w->calls + done, (size_t)w->n * sizeof *w->calls);
    memmove(w->group, w->group + done, (size_t)w->n * sizeof *w->group);
}
PTX void ptx_wg_fence(void) {}
PTX void ptx_wg_commit(void)
{
    emu_warp(~0u, emu_wg_end, nullptr, nullptr, 0, __FILE__, __LINE__);
}
template <int N> PTX void ptx_wg_wait(void)
{
    emu_warp(~0u, emu_wg_finish, nullptr, nullptr, N, __FILE__, __LINE__);
}
template <class V, int N> PTX void ptx_wg_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b)
{
    const emu_wg_call c = {d, a, 0, b, N, 1, V::bytes == 1};
    emu_warp(~0u, emu_wg_ask, &c, nullptr, 0, __FILE__, __LINE__);
}
template <class V> PTX void ptx_wg_ss(float (&d)[64], uint32_t a, uint32_t b, int add)
{
    const emu_wg_call c = {d, nullptr, a, b, 128, add, V::bytes == 1};
    emu_warp(~0u, emu_wg_ask, &c, nullptr, 0, __FILE__, __LINE__);
}
#endif
#endif
