/* Packing of weights for the GPU kernels small and wide, on the host: kern/cuda/format.cuh says how
 * they lie, format_bits.h what becomes of the bits. A tile of 16 rows does not depend on any other,
 * so that ranges of rows are packed by different threads.
 *
 * What is taken out of a row goes into its factor: scales in f16 are used near the top of their
 * range, whatever the scales of the row are; exponents of FP4 scales count from the largest of the
 * row, and what is 2^30 (16 columns) or 2^120 (32) below it is nothing. */
#include <math.h>
#include <string.h>
#include "kern/cuda/format_read.h"
#include "num/num.h"

#define ROWS  FORMAT_ROWS
#define UNIT  FORMAT_UNIT
#define BLOCK FORMAT_BLOCK
#define INT4  FORMAT_INT4
#define E4M3  FORMAT_E4M3
#define INT8  FORMAT_INT8
#define BF16  FORMAT_BF16
#define FP4   FORMAT_FP4

typedef format_layout layout;

size_t small_packed_bytes(small_format f, int64_t N, int64_t K)
{
    return (size_t)(N / ROWS) * (size_t)(K / UNIT) * format_unit_bytes(&format_layouts[f]);
}

int small_group(small_format f)
{
    return format_layouts[f].group;
}

bool small_has_zeros(small_format f)
{
    return format_layouts[f].zeros;
}

/* ---- codes --------------------------------------------------------------------------------------
 * row: of the block. Lane c of the four of a row; its columns in the order h, s, j. */

static void gather(const uint8_t *row, int c, bool fine, uint8_t out[16])
{
    if (!fine) {
        memcpy(out, row + 16 * c, 16);
        return;
    }
    for (int h = 0; h < 2; h++)
        for (int s = 0; s < 4; s++)
            memcpy(out + 8 * h + 2 * s, row + 16 * s + 4 * c + 2 * h, 2);
}

/* Every second of eight nibbles, each in a byte, side by side. */
static uint32_t squeeze(uint64_t v)
{
    v &= 0x000f000f000f000full;
    v |= v >> 12;
    return (uint32_t)(v & 0xff) | (uint32_t)(v >> 24 & 0xff00);
}
static uint32_t word_int4(const uint8_t c[8])
{
    uint64_t v;
    memcpy(&v, c, 8);
    return squeeze(v) | squeeze(v >> 8) << 16;
}

static uint32_t half_fp4(const uint8_t *c) /* columns j of the steps: every second */
{
    uint32_t s3 = c[6];
    return (c[0] & 8u) << 12 | (c[0] & 7u) << 6 | (c[2] & 8u) << 9 | (c[2] & 7u) << 3 |
           (c[4] & 8u) << 6 | (c[4] & 7u) | (s3 & 8u) << 8 | (s3 & 6u) << 12 | (s3 & 1u) << 10;
}
static uint32_t word_fp4(const uint8_t c[8])
{
    return half_fp4(c) | half_fp4(c + 1) << 16;
}

static uint32_t half_e4m3(uint32_t first, uint32_t second)
{
    return (first & 0x80) << 8 | (first & 0x7f) << 4 | (second & 0x80) << 4 | (second & 0x70) << 8 |
           (second & 0x0f);
}
static uint32_t word_e4m3(const uint8_t *c, int s)
{
    return half_e4m3(c[2 * s], c[8 + 2 * s]) | half_e4m3(c[2 * s + 1], c[9 + 2 * s]) << 16;
}
static uint32_t word_int8(const uint8_t *c, int s)
{
    return (uint32_t)c[2 * s] | (uint32_t)c[8 + 2 * s] << 8 | (uint32_t)c[2 * s + 1] << 16 |
           (uint32_t)c[9 + 2 * s] << 24;
}

static void pack_four_bits(const layout *l, const uint8_t *row[2], int lane, uint8_t *out)
{
    const bool fine = l->group < 64;
    for (int r = 0; r < 2; r++) {
        uint8_t c[16];
        gather(row[r], lane % 4, fine, c);
        for (int h = 0; h < 2; h++) {
            uint32_t w = l->kind == INT4 ? word_int4(c + 8 * h) : word_fp4(c + 8 * h);
            memcpy(out + lane * 16 + r * 8 + h * 4, &w, 4);
        }
    }
}

static void pack_eight_bits(const layout *l, const uint8_t *row[2], int lane, uint8_t *out)
{
    for (int r = 0; r < 2; r++)
        for (int s = 0; s < 4; s++) {
            const uint8_t *c = row[r] + lane % 4 * 16;
            uint32_t w = l->kind == E4M3 ? word_e4m3(c, s) : word_int8(c, s);
            memcpy(out + r * 512 + lane * 16 + s * 4, &w, 4);
        }
}

/* at: of the first row, first column; ld: bytes of a row. */
static void pack_block(const layout *l, const uint8_t *at, size_t ld, uint8_t *out)
{
    for (int lane = 0; lane < 32; lane++) {
        const uint8_t *row[2] = {at + (size_t)(lane / 4) * ld, at + (size_t)(lane / 4 + 8) * ld};
        if (l->kind == INT4 || l->kind == FP4) pack_four_bits(l, row, lane, out);
        if (l->kind == E4M3 || l->kind == INT8) pack_eight_bits(l, row, lane, out);
        if (l->kind == BF16) /* rows l/4 and l/4+8 of h = 0, then of h = 1 */
            for (int i = 0; i < 4; i++)
                memcpy(out + i * 512 + lane * 16, row[i % 2] + lane % 4 * 32 + i / 2 * 16, 16);
    }
}

/* ---- scales -------------------------------------------------------------------------------------
 */

/* Of positive numbers, NaN if there is one. */
static float largest(const float *v, int64_t n)
{
    float m = 0;
    for (int64_t i = 0; i < n; i++) {
        if (v[i] != v[i]) return v[i];
        m = fabsf(v[i]) > m ? fabsf(v[i]) : m;
    }
    return m;
}

/* What scales of a row are divided by before they are kept: a power of two. */
static float taken_out(const layout *l, const float *scales, int64_t n)
{
    int top = l->kind == FP4 ? 0 : 14, e = 0;
    float m = largest(scales, n);
    if (!(m > 0) || isinf(m)) return 1;
    frexpf(m, &e); /* m < 2^e */
    return ldexpf(1, e - 1 - top < -126 ? -126 : e - 1 - top);
}

/* Bytes of FP4 scales at most 2 (kept as they are divided): exponents that end at 31 or 254. */
static uint8_t fp4_scale(const layout *l, float s)
{
    int e = 0;
    if (!(s > 0)) return 0;
    float m = frexpf(s, &e); /* in [1/2, 1) */
    if (l->group == 32) return (uint8_t)(254 + e - 1 < 0 ? 0 : 254 + e - 1);
    int man = (int)lrintf(m * 16) - 8; /* 0..8 */
    int c = (31 + e - 1) * 8 + man;
    return (uint8_t)(c < 0 ? 0 : c > 255 ? 255 : c);
}
/* What a byte of a scale of 1 times a code stands for on the device is this much too large: 2^-126
 * of the code, exponents 254 - 127 and 222 + 31 - 127 of the scale. */
static float fp4_excess(const layout *l)
{
    return l->group == 32 ? 2.0f : 1.0f;
}

/* The number that is read back, times what was taken out. */
static float kept_scale(const layout *l, float s)
{
    if (l->unit_scale) return s * 0x1p60f * 0x1p-60f;
    if (l->kind != FP4) return num_f16_to_f32(num_f32_to_f16(s));
    uint8_t c = fp4_scale(l, s);
    if (l->group == 32) return c < 154 ? 0 : ldexpf(1, c - 254); /* below: not exact in bf16 */
    return c ? ldexpf((float)(8 + c % 8), c / 8 - 34) : 0;
}
void small_kept(small_format f, const float *scales, int64_t n, float *kept)
{
    const layout *l = &format_layouts[f];
    const float out_of = l->unit_scale ? 1 : taken_out(l, scales, n);
    for (int64_t i = 0; i < n; i++)
        kept[i] = kept_scale(l, scales[i] / out_of) * out_of;
}

static void keep_scale(const layout *l, float s, uint8_t *out)
{
    if (l->kind == FP4) {
        *out = fp4_scale(l, s);
    } else {
        uint16_t h = num_f32_to_f16(s);
        memcpy(out, &h, 2);
    }
}

/* side: of the unit; scales and zeros: of the first row at the unit's first group. */
static void pack_side(const layout *l, const float *scales, const uint8_t *zeros, int64_t ld,
                      const float out_of[ROWS], uint8_t *side)
{
    const int groups = format_groups(l);
    if (l->unit_scale) {
        float s[4] = {scales[0] * 0x1p60f, 0, 0, 0};
        memcpy(side, s, 16);
        return;
    }
    for (int r = 0; r < ROWS; r++)
        for (int g = 0; g < groups; g++) {
            keep_scale(l, scales[r * ld + g] / out_of[r], side + (r * groups + g) * l->scale_bytes);
            if (l->zeros) side[ROWS * groups * l->scale_bytes + r * groups + g] = zeros[r * ld + g];
        }
}

/* Groups of FP4 whose scale is nothing have no codes either. */
static void clear_codes(const layout *l, const uint8_t *side, uint8_t *block)
{
    const int groups = format_groups(l);
    for (int r = 0; r < ROWS; r++)
        for (int g = 0; g < groups; g++) {
            if (side[r * groups + g]) continue;
            for (int s = g * l->group / 16; s < (g + 1) * l->group / 16; s++) /* step of the unit */
                for (int lane = r % 8 * 4; lane < r % 8 * 4 + 4; lane++)
                    for (int h = 0; h < 2; h++) {
                        static const uint32_t of_step[4] = {0x81c081c0u, 0x10381038u, 0x02070207u,
                                                            0x6c006c00u};
                        uint8_t *at = block + s / 4 * 512 + lane * 16 + r / 8 * 8 + h * 4;
                        uint32_t w;
                        memcpy(&w, at, 4);
                        w &= ~of_step[s % 4];
                        memcpy(at, &w, 4);
                    }
        }
}

static bool row_is_nan(const layout *l, const uint8_t *codes, const float *scales, int64_t K,
                       int64_t groups)
{
    if (groups && largest(scales, groups) != largest(scales, groups)) return true;
    for (int64_t k = 0; l->kind == E4M3 && k < K; k++)
        if ((codes[k] & 0x7f) == 0x7f) return true;
    return false;
}

static void pack_tile(const layout *l, const uint8_t *codes, const float *scales,
                      const uint8_t *zeros, int64_t K, uint8_t *out, float *col_scale)
{
    const size_t width = l->kind == BF16 ? 2 : 1, size = format_unit_bytes(l);
    const int64_t groups = l->group ? K / l->group : 0;
    float out_of[ROWS];
    for (int r = 0; r < ROWS; r++) {
        const float *row = groups ? scales + r * groups : NULL;
        out_of[r] = groups && !l->unit_scale ? taken_out(l, row, groups) : 1;
        if (col_scale && l->kind != BF16) {
            float f = l->kind == FP4 ? out_of[r] / fp4_excess(l) : out_of[r];
            col_scale[r] *= row_is_nan(l, codes + r * K, row, K, groups) ? NAN : f;
        }
    }
    for (int64_t u = 0; u < K / UNIT; u++, out += size) {
        uint8_t *side = out + 2 * l->block_bytes;
        for (int b = 0; b < 2; b++)
            pack_block(l, codes + width * (size_t)(u * UNIT + b * BLOCK), width * (size_t)K,
                       out + b * l->block_bytes);
        if (!groups) continue;
        pack_side(l, scales + u * format_groups(l), zeros ? zeros + u * format_groups(l) : NULL,
                  groups, out_of, side);
        if (l->kind == FP4) clear_codes(l, side, out);
    }
}

void small_pack(small_format f, const void *codes, const float *scales, const uint8_t *zeros,
                int64_t N, int64_t K, uint8_t *out, float *col_scale)
{
    const layout *l = &format_layouts[f];
    const size_t width = l->kind == BF16 ? 2 : 1;
    const int64_t groups = l->group ? K / l->group : 0;
    for (int64_t n = 0; n + ROWS <= N; n += ROWS)
        pack_tile(l, (const uint8_t *)codes + width * (size_t)(n * K),
                  groups ? scales + n * groups : NULL, l->zeros ? zeros + n * groups : NULL, K,
                  out + (size_t)(n / ROWS) * (size_t)(K / UNIT) * format_unit_bytes(l),
                  col_scale ? col_scale + n : NULL);
}
