/* Packed weights (format.cuh) read one number at a time, for the plain kernels and for whoever
 * looks at them on the host. All numbers are exact in f32 but for scales of MXFP4 2^100 and more
 * below the largest of their row. */
#ifndef KERN_CUDA_FORMAT_READ_H
#define KERN_CUDA_FORMAT_READ_H
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include "kern/cuda/format_bits.h"
#include "kern/cuda/small.h"

#define FORMAT_ROWS  16
#define FORMAT_UNIT  128
#define FORMAT_BLOCK 64

typedef enum format_kind {
    FORMAT_INT4,
    FORMAT_E4M3,
    FORMAT_INT8,
    FORMAT_BF16,
    FORMAT_FP4
} format_kind;
typedef struct format_layout {
    format_kind kind;
    int group; /* columns of a scale of a row; 0 = none */
    bool zeros, unit_scale;
    int block_bytes; /* of 16 x 64 codes */
    int scale_bytes; /* of a row and group */
} format_layout;

/* In the order of small_format. */
static const format_layout format_layouts[] = {
    {FORMAT_INT4, 128, false, false, 512, 2}, {FORMAT_INT4, 128, true, false, 512, 2},
    {FORMAT_INT4, 64, false, false, 512, 2},  {FORMAT_INT4, 64, true, false, 512, 2},
    {FORMAT_INT4, 32, false, false, 512, 2},  {FORMAT_INT4, 32, true, false, 512, 2},
    {FORMAT_E4M3, 0, false, false, 1024, 0},  {FORMAT_E4M3, 128, false, true, 1024, 0},
    {FORMAT_INT8, 0, false, false, 1024, 0},  {FORMAT_INT8, 128, false, false, 1024, 2},
    {FORMAT_BF16, 0, false, false, 2048, 0},  {FORMAT_FP4, 32, false, false, 512, 1},
    {FORMAT_FP4, 16, false, false, 512, 1},
};
#ifdef __cplusplus
static_assert(sizeof format_layouts / sizeof *format_layouts == SMALL_FORMATS, "one row a format");
#else
_Static_assert(sizeof format_layouts / sizeof *format_layouts == SMALL_FORMATS, "one row a format");
#endif

static inline int format_groups(const format_layout *l)
{
    return l->group ? FORMAT_UNIT / l->group : 0;
}
static inline size_t format_unit_bytes(const format_layout *l)
{
    int row = format_groups(l) * (l->scale_bytes + l->zeros);
    return (size_t)(2 * l->block_bytes + FORMAT_ROWS * row + (l->unit_scale ? 16 : 0));
}

/* The weight is code * scale * col_scale[n]; of int4 the zero point is off already. */
typedef struct format_cell {
    float code, scale;
} format_cell;

static inline float format_as_f32(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t format_word(const uint8_t *p)
{
    uint32_t w;
    memcpy(&w, p, 4);
    return w;
}
/* Half j of a pair of bf16. */
static inline float format_half(uint32_t pair, int j)
{
    return format_as_f32(j ? pair & 0xffff0000u : pair << 16);
}
static inline float format_f16(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t sign = (h & 0x8000u) << 16, a = (h & 0x7fffu) << 13;
    if (a >= 0x0f800000u) return format_as_f32(sign | a | 0x7f800000u);
    uint32_t u;
    float f = format_as_f32(a) * 0x1p112f;
    memcpy(&u, &f, 4);
    return format_as_f32(sign | u);
}

/* Row r, column k of a unit. */
static inline float format_code(const format_layout *l, const uint8_t *unit, int r, int k)
{
    const bool fine = l->group && l->group < 64;
    const int b = k / 64, i = k % 64, j = i % 2, low = r / 8;
    const int s = fine ? i / 16 : i / 2 % 4, h = fine ? i / 2 % 2 : i / 8 % 2;
    const int at = (r % 8 * 4 + (fine ? i / 4 % 4 : i / 16)) * 16;
    const uint8_t *block = unit + b * l->block_bytes;
    switch (l->kind) {
    case FORMAT_INT4:
        return format_half(format_int4(format_word(block + at + low * 8 + h * 4), s), j) - 128;
    case FORMAT_FP4:
        return format_half(format_fp4(format_word(block + at + low * 8 + h * 4), s), j) * 0x1p126f;
    case FORMAT_E4M3:
        return format_half(format_e4m3(format_word(block + low * 512 + at + s * 4), h), j) *
               0x1p120f;
    case FORMAT_INT8: {
        uint32_t w = format_word(block + low * 512 + at + s * 4);
        return format_half(format_int8(w, h), j) - format_half(format_int8_off(w, h), j);
    }
    default:
        return format_half(format_word(block + (2 * h + low) * 512 + at + s * 4), j);
    }
}

static inline format_cell format_read(const format_layout *l, const uint8_t *unit, int r, int k)
{
    format_cell v = {format_code(l, unit, r, k), 1};
    const uint8_t *side = unit + 2 * l->block_bytes;
    const int groups = format_groups(l);
    if (l->unit_scale) {
        v.scale = format_as_f32(format_word(side)) * 0x1p-60f;
    } else if (groups) {
        const int at = r * groups + k / l->group;
        if (l->kind == FORMAT_FP4) {
            uint32_t w = l->group == 32 ? format_mx(side[at]) : format_nv(side[at]);
            v.scale = format_half(w, 0) * 0x1p-126f;
        } else {
            v.scale = format_f16(side + 2 * at);
        }
        if (l->kind == FORMAT_INT4)
            v.code -= l->zeros ? (float)side[FORMAT_ROWS * groups * 2 + at] : 8;
    }
    return v;
}
#endif
