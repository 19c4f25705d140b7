/* Packed weights (format.cuh) back to rows of bf16, for products that take rows. A warp has a unit
 * of 16 rows x 128 columns: its lanes are the 16 pieces of 8 columns of two rows, r and r + 8,
 * whose codes lie beside one another; eight such pairs make the unit. So a warp writes 256 bytes of
 * a row at once and reads every byte of the unit once. Bound by memory: 2 bytes a weight go out. */
#include "kern/cuda/format_bits.h"
#include "kern/cuda/port.cuh"

#define UNIT_ROWS 16
#define UNIT_K    128
#define PIECE     8 /* columns of a lane */
#define WARPS     8

enum unpack_kind { UNPACK_INT4, UNPACK_E4M3, UNPACK_INT8, UNPACK_BF16, UNPACK_FP4 };

/* GROUP: columns that share a scale of a row, 0 = none. */
template <unpack_kind KIND, int GROUP, bool ZEROS, bool UNIT_SCALE> struct unpack_of {
    static constexpr unpack_kind kind = KIND;
    static constexpr int group = GROUP, groups = GROUP ? UNIT_K / GROUP : 0;
    static constexpr bool zeros = ZEROS, unit_scale = UNIT_SCALE, fine = GROUP && GROUP < 64;
    static constexpr int block_bytes = KIND == UNPACK_BF16                          ? 2048
                                       : KIND == UNPACK_E4M3 || KIND == UNPACK_INT8 ? 1024
                                                                                    : 512;
    static constexpr int scale_bytes = KIND == UNPACK_FP4 ? 1 : 2;
    static constexpr int unit_bytes =
        2 * block_bytes + UNIT_ROWS * groups * (scale_bytes + ZEROS) + (UNIT_SCALE ? 16 : 0);
    static constexpr int words = KIND == UNPACK_INT4 && !fine ? 1 : 4; /* that a lane reads */
};

/* ---- reading ------------------------------------------------------------------------------------
 */
template <class F>
static __device__ __forceinline__ void unpack_load(const uint8_t *unit, int r, int piece,
                                                   uint32_t w[F::words])
{
    const int p = piece % 8, low = r / 8;
    const uint8_t *block = unit + piece / 8 * F::block_bytes;
    if constexpr (F::words == 1) {
        w[0] = *(const uint32_t *)(block + (r % 8 * 4 + p / 2) * 16 + low * 8 + p % 2 * 4);
    } else if constexpr (F::fine) { /* lanes 2(p%2) and the next, both halves of their columns */
        const uint8_t *at = block + (r % 8 * 4 + p % 2 * 2) * 16 + low * 8;
        const uint2 a = *(const uint2 *)at, b = *(const uint2 *)(at + 16);
        w[0] = a.x, w[1] = a.y, w[2] = b.x, w[3] = b.y;
    } else {
        const int part = F::kind == UNPACK_BF16 ? 2 * (p % 2) + low : low;
        const uint4 v = *(const uint4 *)(block + part * 512 + (r % 8 * 4 + p / 2) * 16);
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }
}

/* Columns 2i and 2i+1 of a piece as two bf16, and what is taken off such or multiplied to it. */
template <class F>
static __device__ __forceinline__ uint32_t unpack_pair(const uint32_t w[F::words], int piece, int i)
{
    const int h = piece % 2;
    if constexpr (F::kind == UNPACK_INT4)
        return F::fine ? format_int4(w[i], piece % 8 / 2) : format_int4(w[0], i);
    if constexpr (F::kind == UNPACK_FP4) return format_fp4(w[i], piece % 8 / 2);
    if constexpr (F::kind == UNPACK_E4M3) return format_e4m3(w[i], h);
    if constexpr (F::kind == UNPACK_INT8) return format_int8(w[i], h);
    return w[i];
}

static __device__ __forceinline__ float unpack_half(uint32_t pair, int j)
{
    return bits_f32(j ? pair & 0xffff0000u : pair << 16);
}

template <class F>
static __device__ __forceinline__ float unpack_code(const uint32_t w[F::words], int piece, int i,
                                                    int j, float off)
{
    const float v = unpack_half(unpack_pair<F>(w, piece, i), j);
    if constexpr (F::kind == UNPACK_INT4) return v - 128.0f - off;
    if constexpr (F::kind == UNPACK_FP4) return v * 0x1p126f;
    if constexpr (F::kind == UNPACK_E4M3) return v * 0x1p120f;
    if constexpr (F::kind == UNPACK_INT8)
        return v - unpack_half(format_int8_off(w[i], piece % 2), j);
    return v;
}

static __device__ __forceinline__ float unpack_f16(uint32_t h)
{
    const uint32_t sign = (h & 0x8000u) << 16, a = (h & 0x7fffu) << 13;
    if (a >= 0x0f800000u) return bits_f32(sign | a | 0x7f800000u);
    return bits_f32(sign | __float_as_uint(bits_f32(a) * 0x1p112f));
}

/* Scale and zero point of a lane's piece. */
template <class F>
static __device__ __forceinline__ float unpack_scale(const uint8_t *unit, int r, int piece,
                                                     float *off)
{
    const uint8_t *side = unit + 2 * F::block_bytes;
    *off = 8;
    if constexpr (F::unit_scale) return *(const float *)side * 0x1p-60f;
    if constexpr (F::group != 0) {
        const int at = r * F::groups + piece * PIECE / F::group;
        if constexpr (F::zeros) *off = side[UNIT_ROWS * F::groups * F::scale_bytes + at];
        if constexpr (F::kind == UNPACK_FP4)
            return unpack_half(F::group == 32 ? format_mx(side[at]) : format_nv(side[at]), 0) *
                   0x1p-126f;
        return unpack_f16(((const uint16_t *)side)[at]);
    }
    return 1;
}

static __device__ __forceinline__ uint32_t unpack_round(float lo, float hi)
{
#ifdef TARE_EMULATED
    return (uint32_t)f32_bf16(lo) | (uint32_t)f32_bf16(hi) << 16;
#else
    const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return *(const uint32_t *)&v;
#endif
}

/* ---- the kernel ---------------------------------------------------------------------------------
 * What was read may be read before the kernels in front have ended, as nothing changes weights;
 * what is written they may still read. */
template <class F>
static __global__ void __launch_bounds__(WARPS * 32) unpack_kernel(const gpu_unpack a)
{
    constexpr int pairs = UNIT_ROWS / 2;
    const int lane = (int)threadIdx.x % 32, piece = lane % 16, low = lane / 16 * 8;
    const int64_t i = blockIdx.x * (int64_t)WARPS + threadIdx.x / 32, per_row = a.K / UNIT_K;
    const bool live = i < a.N / UNIT_ROWS * per_row;
    const uint8_t *unit = (const uint8_t *)a.w + (live ? i : 0) * F::unit_bytes;
    const int64_t row0 = (live ? i / per_row : 0) * UNIT_ROWS;
    uint32_t w[pairs][F::words];
    float by[pairs], off[pairs];
    pdl_go();
#pragma unroll
    for (int r = 0; r < pairs; r++)
        unpack_load<F>(unit, r + low, piece, w[r]);
#pragma unroll
    for (int r = 0; r < pairs; r++) {
        by[r] = unpack_scale<F>(unit, r + low, piece, &off[r]);
        if (a.col_scale) by[r] *= a.col_scale[row0 + r + low];
    }
    pdl_wait();
    if (!live) return;
    uint16_t *to = (uint16_t *)a.out + (row0 + low) * a.K + i % per_row * UNIT_K + piece * PIECE;
#pragma unroll
    for (int r = 0; r < pairs; r++) {
        uint32_t v[4];
#pragma unroll
        for (int p = 0; p < 4; p++)
            v[p] = unpack_round(unpack_code<F>(w[r], piece, p, 0, off[r]) * by[r],
                                unpack_code<F>(w[r], piece, p, 1, off[r]) * by[r]);
        *(uint4 *)(to + r * a.K) = make_uint4(v[0], v[1], v[2], v[3]);
    }
}

template <unpack_kind KIND, int GROUP, bool ZEROS, bool UNIT_SCALE>
static const char *launch(const gpu_unpack &a, void *stream)
{
    typedef unpack_of<KIND, GROUP, ZEROS, UNIT_SCALE> F;
    const int64_t units = a.N / UNIT_ROWS * (a.K / UNIT_K);
    return LAUNCH_EARLY(unpack_kernel<F>, (unsigned)((units + WARPS - 1) / WARPS), WARPS * 32, 0,
                        stream, a);
}

typedef const char *launch_fn(const gpu_unpack &a, void *stream);
/* In the order of small_format. */
static launch_fn *const launches[] = {
    launch<UNPACK_INT4, 128, false, false>, launch<UNPACK_INT4, 128, true, false>,
    launch<UNPACK_INT4, 64, false, false>,  launch<UNPACK_INT4, 64, true, false>,
    launch<UNPACK_INT4, 32, false, false>,  launch<UNPACK_INT4, 32, true, false>,
    launch<UNPACK_E4M3, 0, false, false>,   launch<UNPACK_E4M3, 0, false, true>,
    launch<UNPACK_INT8, 0, false, false>,   launch<UNPACK_INT8, 128, false, false>,
    launch<UNPACK_BF16, 0, false, false>,   launch<UNPACK_FP4, 32, false, false>,
    launch<UNPACK_FP4, 16, false, false>,
};
static_assert(sizeof launches / sizeof *launches == SMALL_FORMATS, "one a format");

extern "C" const char *cuda_unpack(const void *args, void *stream)
{
    const gpu_unpack *a = (const gpu_unpack *)args;
    if ((int)a->format < 0 || a->format >= SMALL_FORMATS) return "no such format of packed weights";
    if (a->N < 1 || a->N % UNIT_ROWS) return "N is not a multiple of 16";
    if (a->K < 1 || a->K % UNIT_K) return "K is not a multiple of 128";
    if ((uintptr_t)a->w % 16 || (uintptr_t)a->out % 16)
        return "weights are not aligned to 16 bytes";
    return launches[a->format](*a, stream);
}
