/* CUDA as plain C++, so that plain kernels run in tests on a CPU (x86-64). Included by port.cuh
 * where TARE_EMULATED is set; emulate.cc has the machinery.
 *
 * The threads of a block are fibers of the calling OS thread; blocks run one after another, so a
 * kernel must not wait for another block. A thread runs until it has to wait: one that never does
 * costs a call. The order in which threads start turns round from block to block, which makes many
 * a missing barrier show. Launches of several OS threads follow one another.
 *
 * Stricter than the device: a launch ends the process with a message where threads of a block end
 * or wait elsewhere while others wait at a barrier, where a warp's operation names lanes that do
 * not come (or that come from another line), where a block has more than 1024 threads, where the
 * grid is empty or too large, and where dynamic shared memory was written past its end. Dynamic
 * shared memory holds NaN when a block starts, __shared__ arrays when a launch does (so a kernel
 * with such arrays must be static: they all lie in one section).
 *
 * Warp operations are made of emu_warp: every lane of the mask leaves `in`, `out` and `arg` and
 * waits; the last one runs `op` once for all. */
#ifndef KERN_CUDA_EMULATE_H
#define KERN_CUDA_EMULATE_H
#ifndef __x86_64__
#error "kern/cuda/emulate.h: the switch between fibers is written for x86-64"
#endif
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__   static thread_local
#define __align__(n) __attribute__((aligned(n)))

typedef struct uint3 {
    unsigned x, y, z;
} uint3;
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
#define EMU_PRIVATE __attribute__((visibility("hidden")))
EMU_PRIVATE extern uint3 threadIdx, blockIdx, blockDim, gridDim;
#define warpSize 32

/* Where a call stands, for messages and to tell barriers apart. */
#define EMU_AT const char *file = __builtin_FILE(), int line = __builtin_LINE()

/* ---- the machinery (emulate.cc) -----------------------------------------------------------------
 */
EMU_PRIVATE void *emu_smem(void);
EMU_PRIVATE void emu_allow_smem(const void *kernel, size_t bytes);
EMU_PRIVATE const char *emu_launch(const char *name, const void *kernel, dim3 grid, dim3 block,
                                   size_t smem, void (*body)(void *ctx), void *ctx);
EMU_PRIVATE void emu_sync_block(const char *file, int line);
typedef struct emu_lane { /* what a lane left; in and out lie on its own stack, say */
    const void *in;
    void *out;
    int64_t arg;
} emu_lane;
/* op gets lanes [32], of which those in mask have come; it may write every out. NULL: nothing. */
typedef void emu_warp_op(const emu_lane *lanes, unsigned mask);
EMU_PRIVATE void emu_warp(unsigned mask, emu_warp_op *op, const void *in, void *out, int64_t arg,
                          const char *file, int line);
EMU_PRIVATE int emu_lane_id(void);
/* Lets the other threads of the block run: of whoever waits for what one of them will write. Ends
 * the process where nothing else happens any more. */
EMU_PRIVATE void emu_yield(void);
/* A named barrier (1 to 15): `threads` come, those with `wait` go on when all have. */
EMU_PRIVATE void emu_named(int which, int threads, bool wait);
[[noreturn]] EMU_PRIVATE void emu_die(const char *format, ...)
    __attribute__((format(printf, 1, 2)));

/* Dynamic shared memory of the block. */
#define SMEM(type, name) type *name = reinterpret_cast<type *>(emu_smem())
/* More than 48 KiB of it: right before the launch. NULL or why not. */
#define ALLOW_SMEM(kernel, bytes)                                                                  \
    (emu_allow_smem(reinterpret_cast<const void *>(kernel), (bytes)), (const char *)nullptr)
#define LAUNCH(kernel, grid, block, smem, stream, ...)                                             \
    ([&]() -> const char * {                                                                       \
        (void)(stream);                                                                            \
        auto emu_body = [&]() { kernel(__VA_ARGS__); };                                            \
        return emu_launch(                                                                         \
            #kernel, reinterpret_cast<const void *>(kernel), dim3(grid), dim3(block), (smem),      \
            [](void *ctx) { (*static_cast<decltype(emu_body) *>(ctx))(); }, &emu_body);            \
    }())

/* ---- barriers and warps -------------------------------------------------------------------------
 */
static inline void __syncthreads(EMU_AT)
{
    emu_sync_block(file, line);
}
static inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_AT)
{
    emu_warp(mask, nullptr, nullptr, nullptr, 0, file, line);
}
static inline void __threadfence(void) {}
static inline void __threadfence_block(void) {}

/* Every lane leaves N bytes and gets all 32 deposits, out [32][N]; those of lanes outside the mask
 * are NaN bytes. */
template <size_t N> static void emu_exchange_op(const emu_lane *lanes, unsigned mask)
{
    unsigned char all[32 * N];
    memset(all, 0xff, sizeof all);
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) memcpy(all + i * N, lanes[i].in, N);
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) memcpy(lanes[i].out, all, sizeof all);
}
template <size_t N>
static inline void emu_warp_exchange(unsigned mask, const void *in, void *out, EMU_AT)
{
    emu_warp(mask, emu_exchange_op<N>, in, out, 0, file, line);
}

/* arg = the lane to read; one outside the mask gives NaN bytes. */
template <class T> static void emu_shuffle_op(const emu_lane *lanes, unsigned mask)
{
    T from[32];
    memset(from, 0xff, sizeof from);
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) memcpy(&from[i], lanes[i].in, sizeof(T));
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) memcpy(lanes[i].out, &from[lanes[i].arg], sizeof(T));
}
template <class T>
static inline T emu_shuffle(unsigned mask, T v, int from, const char *file, int line)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    T r;
    emu_warp(mask, emu_shuffle_op<T>, &v, &r, from, file, line);
    return r;
}
template <class T> static inline T __shfl_sync(unsigned mask, T v, int from, int width = 32, EMU_AT)
{
    int me = emu_lane_id();
    return emu_shuffle(mask, v, (me & ~(width - 1)) | (from & (width - 1)), file, line);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T v, int with, int width = 32, EMU_AT)
{
    int me = emu_lane_id(), from = me ^ with;
    return emu_shuffle(mask, v, from >= (me & ~(width - 1)) + width ? me : from, file, line);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32, EMU_AT)
{
    int me = emu_lane_id(), from = me + (int)by;
    return emu_shuffle(mask, v, from >= (me & ~(width - 1)) + width ? me : from, file, line);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32, EMU_AT)
{
    int me = emu_lane_id(), from = me - (int)by;
    return emu_shuffle(mask, v, from < (me & ~(width - 1)) ? me : from, file, line);
}
static inline void emu_ballot_op(const emu_lane *lanes, unsigned mask)
{
    unsigned r = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) r |= (unsigned)(lanes[i].arg != 0) << i;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) memcpy(lanes[i].out, &r, sizeof r);
}
static inline unsigned __ballot_sync(unsigned mask, int v, EMU_AT)
{
    unsigned r;
    emu_warp(mask, emu_ballot_op, nullptr, &r, v, file, line);
    return r;
}
static inline int __any_sync(unsigned mask, int v, EMU_AT)
{
    return __ballot_sync(mask, v, file, line) != 0;
}
static inline int __all_sync(unsigned mask, int v, EMU_AT)
{
    return __ballot_sync(mask, v, file, line) == mask;
}

/* ---- atomics: one thread runs at a time ---------------------------------------------------------
 */
template <class T> static inline T emu_swap(T *p, T v)
{
    T old = *p;
    *p = v;
    return old;
}
#define EMU_ATOMICS(T)                                                                             \
    static inline T atomicAdd(T *p, T v)                                                           \
    {                                                                                              \
        return emu_swap(p, (T)(*p + v));                                                           \
    }                                                                                              \
    static inline T atomicExch(T *p, T v)                                                          \
    {                                                                                              \
        return emu_swap(p, v);                                                                     \
    }
#define EMU_INT_ATOMICS(T)                                                                         \
    EMU_ATOMICS(T)                                                                                 \
    static inline T atomicXor(T *p, T v)                                                           \
    {                                                                                              \
        return emu_swap(p, (T)(*p ^ v));                                                           \
    }                                                                                              \
    static inline T atomicMax(T *p, T v)                                                           \
    {                                                                                              \
        return emu_swap(p, *p > v ? *p : v);                                                       \
    }                                                                                              \
    static inline T atomicMin(T *p, T v)                                                           \
    {                                                                                              \
        return emu_swap(p, *p < v ? *p : v);                                                       \
    }                                                                                              \
    static inline T atomicOr(T *p, T v)                                                            \
    {                                                                                              \
        return emu_swap(p, *p | v);                                                                \
    }                                                                                              \
    static inline T atomicAnd(T *p, T v)                                                           \
    {                                                                                              \
        return emu_swap(p, *p & v);                                                                \
    }                                                                                              \
    static inline T atomicCAS(T *p, T want, T v)                                                   \
    {                                                                                              \
        return emu_swap(p, *p == want ? v : *p);                                                   \
    }
EMU_ATOMICS(float)
EMU_ATOMICS(double)
EMU_INT_ATOMICS(int)
EMU_INT_ATOMICS(unsigned)
EMU_INT_ATOMICS(unsigned long long)
#undef EMU_INT_ATOMICS
#undef EMU_ATOMICS

/* ---- numbers ------------------------------------------------------------------------------------
 */
template <class To, class From> static inline To emu_bits(From v)
{
    static_assert(sizeof(To) == sizeof(From), "same size");
    To r;
    memcpy(&r, &v, sizeof r);
    return r;
}
#define EMU_BITS(name, To, From)                                                                   \
    static inline To name(From v)                                                                  \
    {                                                                                              \
        return emu_bits<To>(v);                                                                    \
    }
EMU_BITS(__float_as_uint, unsigned, float)
EMU_BITS(__uint_as_float, float, unsigned)
EMU_BITS(__float_as_int, int, float)
EMU_BITS(__int_as_float, float, int)
EMU_BITS(__double_as_longlong, long long, double)
EMU_BITS(__longlong_as_double, double, long long)
#undef EMU_BITS

/* The fast functions of the device are exact ones here. By macros: the C library declares some of
 * these names. */
#define __expf   emu_expf
#define __exp10f emu_exp10f
#define __logf   emu_logf
#define __log2f  emu_log2f
#define __sinf   emu_sinf
#define __cosf   emu_cosf
#define __powf   emu_powf
#define EMU_MATH(name, expr)                                                                       \
    static inline float name(float x)                                                              \
    {                                                                                              \
        return expr;                                                                               \
    }
EMU_MATH(emu_expf, expf(x))
EMU_MATH(emu_exp10f, powf(10.0f, x))
EMU_MATH(emu_logf, logf(x))
EMU_MATH(emu_log2f, log2f(x))
EMU_MATH(emu_sinf, sinf(x))
EMU_MATH(emu_cosf, cosf(x))
EMU_MATH(rsqrtf, 1.0f / sqrtf(x))
EMU_MATH(__frcp_rn, 1.0f / x)
EMU_MATH(__fsqrt_rn, sqrtf(x))
EMU_MATH(__saturatef, x > 0 ? x < 1 ? x : 1 : 0)
#undef EMU_MATH
#define EMU_MATH2(name, expr)                                                                      \
    static inline float name(float a, float b)                                                     \
    {                                                                                              \
        return expr;                                                                               \
    }
EMU_MATH2(emu_powf, powf(a, b))
EMU_MATH2(__fdividef, a / b)
EMU_MATH2(fdividef, a / b)
EMU_MATH2(__fdiv_rn, a / b)
EMU_MATH2(__fmul_rn, a *b)
EMU_MATH2(__fadd_rn, a + b)
EMU_MATH2(__fsub_rn, a - b)
#undef EMU_MATH2
static inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
/* Saturating; NaN gives 0. */
static inline int emu_int(float x)
{
    return !(x > -2147483648.0f) ? x == x ? INT32_MIN : 0 : x >= 2147483648.0f ? INT32_MAX : (int)x;
}
static inline unsigned emu_uint(float x)
{
    return !(x > 0) ? 0 : x >= 4294967296.0f ? UINT32_MAX : (unsigned)x;
}
static inline int __float2int_rn(float x)
{
    return emu_int(nearbyintf(x));
}
static inline int __float2int_rz(float x)
{
    return emu_int(x);
}
static inline int __float2int_rd(float x)
{
    return emu_int(floorf(x));
}
static inline int __float2int_ru(float x)
{
    return emu_int(ceilf(x));
}
static inline unsigned __float2uint_rn(float x)
{
    return emu_uint(nearbyintf(x));
}
static inline float __int2float_rn(int x)
{
    return (float)x;
}
static inline float __uint2float_rn(unsigned x)
{
    return (float)x;
}
static inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
static inline int __popcll(unsigned long long x)
{
    return __builtin_popcountll(x);
}
static inline int __clz(int x)
{
    return x ? __builtin_clz((unsigned)x) : 32;
}
static inline int __clzll(long long x)
{
    return x ? __builtin_clzll((unsigned long long)x) : 64;
}
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
static inline unsigned __brev(unsigned x)
{
    unsigned r = 0;
    for (int i = 0; i < 32; i++)
        r |= (x >> i & 1) << (31 - i);
    return r;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s)
{
    uint64_t both = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned pick = s >> (4 * i) & 15, v = (unsigned)(both >> (8 * (pick & 7))) & 255;
        if (pick & 8) v = v & 128 ? 255 : 0; /* its sign */
        r |= v << (8 * i);
    }
    return r;
}
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned by)
{
    return (unsigned)(((uint64_t)hi << 32 | lo) << (by & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned by)
{
    return (unsigned)(((uint64_t)hi << 32 | lo) >> (by & 31));
}
static inline int __dp4a(int a, int b, int c)
{
    for (int i = 0; i < 4; i++)
        c += (int)(int8_t)(a >> (8 * i)) * (int8_t)(b >> (8 * i));
    return c;
}
template <class T> static inline T __ldg(const T *p)
{
    return *p;
}
template <class T> static inline T __ldcs(const T *p)
{
    return *p;
}

#define EMU_MINMAX(T, A, B)                                                                        \
    static inline T min(A a, B b)                                                                  \
    {                                                                                              \
        return (T)a < (T)b ? (T)a : (T)b;                                                          \
    }                                                                                              \
    static inline T max(A a, B b)                                                                  \
    {                                                                                              \
        return (T)a > (T)b ? (T)a : (T)b;                                                          \
    }
EMU_MINMAX(int, int, int)
EMU_MINMAX(unsigned, unsigned, unsigned)
EMU_MINMAX(unsigned, unsigned, int)
EMU_MINMAX(unsigned, int, unsigned)
EMU_MINMAX(long, long, long)
EMU_MINMAX(unsigned long, unsigned long, unsigned long)
EMU_MINMAX(long long, long long, long long)
EMU_MINMAX(unsigned long long, unsigned long long, unsigned long long)
#undef EMU_MINMAX
static inline float min(float a, float b) /* the one that is no NaN, as the device */
{
    return fminf(a, b);
}
static inline float max(float a, float b)
{
    return fmaxf(a, b);
}
static inline double min(double a, double b)
{
    return fmin(a, b);
}
static inline double max(double a, double b)
{
    return fmax(a, b);
}

#define EMU_VECTOR(T, V, align)                                                                    \
    typedef struct __align__(2 * align) V##2                                                       \
    {                                                                                              \
        T x, y;                                                                                    \
    }                                                                                              \
    V##2;                                                                                          \
    static inline V##2 make_##V##2(T x, T y)                                                       \
    {                                                                                              \
        return V##2 {x, y};                                                                        \
    }                                                                                              \
    typedef struct __align__(4 * align) V##4                                                       \
    {                                                                                              \
        T x, y, z, w;                                                                              \
    }                                                                                              \
    V##4;                                                                                          \
    static inline V##4 make_##V##4(T x, T y, T z, T w)                                             \
    {                                                                                              \
        return V##4 {x, y, z, w};                                                                  \
    }
EMU_VECTOR(float, float, 4)
EMU_VECTOR(int, int, 4)
EMU_VECTOR(unsigned, uint, 4)
EMU_VECTOR(unsigned short, ushort, 2)
EMU_VECTOR(unsigned char, uchar, 1)
#undef EMU_VECTOR
#endif
