/* Element codecs: everything that knows what the bits of one element mean.
 *
 * All rounding is to nearest, ties to even, done on the bits of the float32 (never with a table of
 * midpoints, except NF4, whose codes have no arithmetic). One routine covers the small floats: with
 * m mantissa bits and smallest normal exponent e,
 *
 *     |x| >= 2^e   code = (bits(x) + half - 1 + odd) >> (23 - m), exponent rebased to e - 1
 *     |x| <  2^e   code = bits(|x| + 2^(e-m+23)) - bits(2^(e-m+23)): the adder rounds the subnormal
 *
 * Narrow types (fp8, fp4, integers) saturate, infinities included; bf16 and f16 overflow to
 * infinity as IEEE does. NaN stays NaN where the type has one and becomes 0 elsewhere. The 64-bit
 * types exist in files only: rows convert them, single codes do not (they do not fit): decode gives
 * NaN. */
#include "num/num.h"
#include <limits.h>
#include <string.h>

const num_info num_infos[NUM_COUNT] = {
#define DTYPE(id, name, tag, bits, kind, max, doc) {name, tag, doc, bits, #kind[0], max},
#include "num/dtypes.def"
#undef DTYPE
};

static const struct {
    const char *name;
    num_dtype type;
} aliases[] = {
    {"fp8", NUM_F8_E4M3},
    {"fp8_e4m3fn", NUM_F8_E4M3},
    {"float8_e4m3fn", NUM_F8_E4M3},
    {"e4m3", NUM_F8_E4M3},
    {"e4m3fn", NUM_F8_E4M3},
    {"float8_e5m2", NUM_F8_E5M2},
    {"e5m2", NUM_F8_E5M2},
    {"float8_e4m3fnuz", NUM_F8_E4M3FNUZ},
    {"float8_e8m0fnu", NUM_F8_E8M0},
    {"f8_e8m0", NUM_F8_E8M0},
    {"fp4_e2m1", NUM_F4_E2M1},
    {"e2m1", NUM_F4_E2M1},
    {"bfloat16", NUM_BF16},
    {"float16", NUM_F16},
    {"half", NUM_F16},
    {"fp16", NUM_F16},
    {"float32", NUM_F32},
    {"fp32", NUM_F32},
    {"float", NUM_F32},
    {"float64", NUM_F64},
    {"double", NUM_F64},
};

const float num_nf4_table[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};
const float num_bnb_fp4_table[16] = {
    0.0f,
    0.0052083334885537624f,
    0.6666666865348816f,
    1.0f,
    0.3333333432674408f,
    0.5f,
    0.1666666716337204f,
    0.25f,
    0.0f,
    -0.0052083334885537624f,
    -0.6666666865348816f,
    -1.0f,
    -0.3333333432674408f,
    -0.5f,
    -0.1666666716337204f,
    -0.25f,
};
/* Midpoints of the table, in the digits of the common writer: fewer digits name other floats. A
 * value equal to one takes the lower code. */
static const float nf4_above[15] = {
    -0.8480964004993439f,  -0.6106329262256622f,  -0.4599952697753906f,   -0.33967943489551544f,
    -0.23460740596055984f, -0.13791173323988914f, -0.045525018125772476f, 0.03979014977812767f,
    0.1202552504837513f,   0.2035212516784668f,   0.2920137718319893f,    0.3893125355243683f,
    0.5016634166240692f,   0.6427869200706482f,   0.8614784181118011f,
};
const float num_fp4_table[16] = {
    0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f,
};

/* Tables of the 8-bit floats, made by the compiler. p2 is 2^k for 0 <= k < 31. */
#define p2(k) ((double)(1u << (k)))
#define E4M3_MAG(c)                                                                                \
    (((c)&0x7F) == 0x7F ? (double)NAN                                                              \
     : ((c)&0x78) == 0  ? ((c)&7) / p2(9)                                                          \
                        : (8 + ((c)&7)) * p2((c) >> 3 & 15) / p2(10))
#define E5M2_MAG(c)                                                                                \
    (((c)&0x7F) > 0x7C    ? (double)NAN                                                            \
     : ((c)&0x7F) == 0x7C ? (double)INFINITY                                                       \
     : ((c)&0x7C) == 0    ? ((c)&3) / p2(16)                                                       \
                          : (4 + ((c)&3)) * p2((c) >> 2 & 31) / p2(17))
#define E4M3(c)     (float)((c)&0x80 ? -E4M3_MAG(c) : E4M3_MAG(c))
#define E5M2(c)     (float)((c)&0x80 ? -E5M2_MAG(c) : E5M2_MAG(c))
#define ROW4(f, c)  f(c), f((c) + 1), f((c) + 2), f((c) + 3)
#define ROW16(f, c) ROW4(f, c), ROW4(f, (c) + 4), ROW4(f, (c) + 8), ROW4(f, (c) + 12)
#define ROW64(f, c) ROW16(f, c), ROW16(f, (c) + 16), ROW16(f, (c) + 32), ROW16(f, (c) + 48)
#define ROW256(f)                                                                                  \
    {                                                                                              \
        ROW64(f, 0), ROW64(f, 64), ROW64(f, 128), ROW64(f, 192)                                    \
    }
static const float e4m3_table[256] = ROW256(E4M3);
static const float e5m2_table[256] = ROW256(E5M2);

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* ---- names and sizes ---------------------------------------------------------------------------
 */

static bool same(const char *a, const char *s, size_t n)
{
    return strlen(a) == n && !memcmp(a, s, n);
}

num_dtype num_by_name(const char *name, size_t len)
{
    for (int i = 0; i < NUM_COUNT; i++)
        if (same(num_infos[i].name, name, len)) return (num_dtype)i;
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++)
        if (same(aliases[i].name, name, len)) return aliases[i].type;
    return NUM_NONE;
}

num_dtype num_by_tag(const char *tag, size_t len)
{
    if (!len) return NUM_NONE;
    for (int i = 0; i < NUM_COUNT; i++)
        if (same(num_infos[i].tag, tag, len)) return (num_dtype)i;
    return NUM_NONE;
}

size_t num_bytes(num_dtype t, size_t n)
{
    size_t bits = (size_t)num_infos[t].bits;
    return n / 8 * bits +
           (n % 8 * bits + 7) / 8; /* 8 elements are `bits` bytes: no overflow of n*bits */
}

/* ---- 16-bit floats -----------------------------------------------------------------------------
 */

uint16_t num_f32_to_bf16(float x)
{
    uint32_t u = bits_of(x);
    if ((u & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(u >> 16 | 0x40); /* quiet, payload kept */
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

float num_bf16_to_f32(uint16_t x)
{
    return float_of((uint32_t)x << 16);
}

/* Magnitude code of |x| (bits a, not NaN) in a small float; may exceed the largest finite code. */
static uint32_t small_float(uint32_t a, int m, int e)
{
    int shift = 23 - m;
    if (a >= (uint32_t)(127 + e) << 23) {
        uint32_t r = a + (1u << (shift - 1)) - 1 + (a >> shift & 1);
        return (r >> shift) - ((uint32_t)(127 + e - 1) << m);
    }
    uint32_t magic = (uint32_t)(127 + e - m + 23) << 23;
    return bits_of(float_of(a) + float_of(magic)) - magic;
}

uint16_t num_f32_to_f16(float x)
{
    uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, a = u & 0x7FFFFFFF;
    if (a > 0x7F800000) return (uint16_t)(sign | 0x7E00 | (a >> 13 & 0x3FF));
    uint32_t c = a >= 0x47800000 ? 0x7C00 : small_float(a, 10, -14); /* 2^16 and above: infinity */
    return (uint16_t)(sign | c);
}

float num_f16_to_f32(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, a = (uint32_t)(x & 0x7FFF) << 13;
    if (a >= 0x0F800000) return float_of(sign | a | 0x7F800000);
    if (a >= 0x00800000) return float_of(sign | (a + 0x38000000));
    float f = float_of(a + 0x38800000) - float_of(0x38800000); /* subnormal: exact difference */
    return float_of(sign | bits_of(f));
}

/* ---- single codes ------------------------------------------------------------------------------
 */

static int32_t sign_extend(uint32_t v, int bits)
{
    uint32_t top = 1u << (bits - 1), mask = top | (top - 1);
    return (int32_t)(((v & mask) ^ top) - top);
}

static float e8m0_value(uint32_t u)
{
    u &= 0xFF;
    return u == 255 ? NAN : float_of(u ? u << 23 : 0x00400000);
}

/* Half of E4M3FN, whose NaN codes are the largest numbers here, and whose -0 is the only NaN. */
static float e4m3fnuz_value(uint32_t u)
{
    if (u == 0x80) return NAN;
    return (u & 0x7F) != 0x7F ? e4m3_table[u] * 0.5f : u & 0x80 ? -240.0f : 240.0f;
}

float num_decode(num_dtype t, uint32_t code)
{
    const num_info *f = &num_infos[t];
    switch (t) {
    case NUM_F32:
        return float_of(code);
    case NUM_F16:
        return num_f16_to_f32((uint16_t)code);
    case NUM_BF16:
        return num_bf16_to_f32((uint16_t)code);
    case NUM_F8_E4M3:
        return e4m3_table[code & 0xFF];
    case NUM_F8_E5M2:
        return e5m2_table[code & 0xFF];
    case NUM_F8_E4M3FNUZ:
        return e4m3fnuz_value(code & 0xFF);
    case NUM_F8_E8M0:
        return e8m0_value(code);
    case NUM_F4_E2M1:
        return num_fp4_table[code & 15];
    case NUM_NF4:
        return num_nf4_table[code & 15];
    case NUM_BNB_FP4:
        return num_bnb_fp4_table[code & 15];
    case NUM_U8:
    case NUM_BOOL:
        return (float)(code & 0xFF);
    case NUM_F64:
    case NUM_I64:
        return NAN;
    default:
        return (float)sign_extend(code, f->bits);
    }
}

/* Saturating small float; nan is the code of NaN. */
static uint32_t encode_small(float x, int m, int e, uint32_t max, uint32_t nan, int sign_bit)
{
    uint32_t u = bits_of(x), a = u & 0x7FFFFFFF, sign = (u >> 31) << sign_bit;
    if (a > 0x7F800000) return nan | (nan ? sign : 0);
    uint32_t c = small_float(a, m, e);
    return sign | (c > max ? max : c);
}

static uint32_t encode_e4m3fnuz(float x)
{
    if (isnan(x)) return 0x80;
    uint32_t c = encode_small(x, 3, -7, 0x7F, 0, 7);
    return c == 0x80 ? 0 : c;
}

/* Nearest power of two; the middle (1.5 * 2^k) goes up, 2^(k+1) being the even multiple of 2^k. */
static uint32_t encode_e8m0(float x)
{
    uint32_t u = x == 0.0f ? 0 : bits_of(x);
    if (u > 0x7F800000) return 255; /* NaN and negative values have no code */
    if (u >= 0x7F400000) return 254;
    if (u < 0x00800000) return u >= 0x00600000; /* 2^-127 is the smallest, also for 0 */
    return (u + 0x400000) >> 23;
}

static uint32_t encode_nf4(float x)
{
    if (isnan(x)) return 7;
    uint32_t c = 0;
    for (int i = 0; i < 15; i++)
        c += x > nf4_above[i];
    return c;
}

/* Borders in the writer's digits; the sign bit is set for negative values that become 0, too. */
static uint32_t encode_bnb_fp4(float x)
{
    static const float above[7] = {0.00260417f, 0.0859375f, 0.20833333f, 0.29166667f,
                                   0.4166667f,  0.583333f,  0.8333333f};
    static const uint8_t code[8] = {0, 1, 6, 7, 4, 5, 2, 3};
    int i = 0;
    while (i < 7 && fabsf(x) > above[i])
        i++;
    return (x < 0 ? 8u : 0u) | code[i];
}

static int64_t clamp_int(double x, double lo, double hi)
{
    if (isnan(x)) return 0;
    return (int64_t)nearbyint(x < lo ? lo : x > hi ? hi : x);
}

uint32_t num_encode(num_dtype t, float x)
{
    const num_info *f = &num_infos[t];
    switch (t) {
    case NUM_F32:
        return bits_of(x);
    case NUM_F16:
        return num_f32_to_f16(x);
    case NUM_BF16:
        return num_f32_to_bf16(x);
    case NUM_F8_E4M3:
        return encode_small(x, 3, -6, 0x7E, 0x7F, 7);
    case NUM_F8_E5M2:
        return encode_small(x, 2, -14, 0x7B, 0x7E, 7);
    case NUM_F8_E4M3FNUZ:
        return encode_e4m3fnuz(x);
    case NUM_F8_E8M0:
        return encode_e8m0(x);
    case NUM_F4_E2M1:
        return encode_small(x, 1, 0, 7, 0, 3);
    case NUM_NF4:
        return encode_nf4(x);
    case NUM_BNB_FP4:
        return encode_bnb_fp4(x);
    case NUM_BOOL:
        return x != 0.0f;
    case NUM_U8:
        return (uint32_t)clamp_int(x, 0, 255);
    case NUM_F64:
    case NUM_I64:
        return 0;
    default: {
        uint32_t mask = f->bits == 32 ? UINT32_MAX : (1u << f->bits) - 1;
        return (uint32_t)clamp_int(x, -f->max - 1, f->max) & mask;
    }
    }
}

float num_round(num_dtype t, float x)
{
    return num_decode(t, num_encode(t, x));
}

uint8_t num_mx_scale(float amax, int off)
{
    uint32_t u = bits_of(amax) & 0x7FFFFFFF;
    if (u > 0x7F800000) return 255;
    int e = (int)((u + 0x200000) >> 23) - off;
    return (uint8_t)(e < 0 ? 0 : e);
}

/* ---- packed rows -------------------------------------------------------------------------------
 */

uint32_t num_get_bits(const uint8_t *row, size_t i, int bits)
{
    if (bits == 8) return row[i];
    if (bits == 16) return (uint32_t)row[2 * i] | (uint32_t)row[2 * i + 1] << 8;
    size_t at = i / 8 * (size_t)bits + i % 8 * (size_t)bits / 8;
    unsigned shift = (unsigned)(i % 8 * (size_t)bits % 8);
    uint32_t v = (uint32_t)row[at] >> shift;
    if (shift + (unsigned)bits > 8) v |= (uint32_t)row[at + 1] << (8 - shift);
    return v & ((1u << bits) - 1);
}

void num_put_bits(uint8_t *row, size_t i, int bits, uint32_t v)
{
    if (bits == 8) {
        row[i] = (uint8_t)v;
        return;
    }
    if (bits == 16) {
        row[2 * i] = (uint8_t)v;
        row[2 * i + 1] = (uint8_t)(v >> 8);
        return;
    }
    size_t at = i / 8 * (size_t)bits + i % 8 * (size_t)bits / 8;
    unsigned shift = (unsigned)(i % 8 * (size_t)bits % 8);
    uint32_t mask = (1u << bits) - 1;
    v &= mask;
    row[at] = (uint8_t)((row[at] & ~(mask << shift)) | v << shift);
    if (shift + (unsigned)bits > 8)
        row[at + 1] = (uint8_t)((row[at + 1] & ~(mask >> (8 - shift))) | v >> (8 - shift));
}

/* Codes of less than 8 bits through a table of their values. */
static void decode_table_row(const uint8_t *p, size_t n, int bits, const float *table, float *out)
{
    if (bits == 4) {
        for (size_t i = 0; i + 1 < n; i += 2) {
            out[i] = table[p[i / 2] & 15];
            out[i + 1] = table[p[i / 2] >> 4];
        }
        if (n & 1) out[n - 1] = table[p[n / 2] & 15];
        return;
    }
    uint32_t acc = 0, mask = (1u << bits) - 1;
    int have = 0;
    for (size_t i = 0; i < n; i++) {
        if (have < bits) {
            acc |= (uint32_t)*p++ << have;
            have += 8;
        }
        out[i] = table[acc & mask];
        acc >>= bits;
        have -= bits;
    }
}

/* Elements of whole bytes, little endian, that need no table. */
static void decode_plain_row(num_dtype t, const uint8_t *p, size_t n, float *out)
{
    size_t width = (size_t)num_infos[t].bits / 8;
    for (size_t i = 0; i < n; i++, p += width) {
        union {
            double f64;
            int64_t i64;
            uint32_t u32;
            uint16_t u16;
        } v;
        memcpy(&v, p, width);
        switch (t) {
        case NUM_F64:
            out[i] = (float)v.f64;
            break;
        case NUM_I64:
            out[i] = (float)v.i64;
            break;
        case NUM_I32:
            out[i] = (float)(int32_t)v.u32;
            break;
        case NUM_I16:
            out[i] = (float)(int16_t)v.u16;
            break;
        default:
            out[i] = num_decode(t, *p);
        }
    }
}

void num_decode_row(num_dtype t, const void *codes, size_t n, float *out)
{
    const uint8_t *p = codes;
    int bits = num_infos[t].bits;
    float table[128];
    switch (t) {
    case NUM_F32:
        if (n) memcpy(out, codes, 4 * n);
        return;
    case NUM_BF16:
        for (size_t i = 0; i < n; i++) {
            uint16_t h;
            memcpy(&h, p + 2 * i, 2);
            out[i] = num_bf16_to_f32(h);
        }
        return;
    case NUM_F16:
        for (size_t i = 0; i < n; i++) {
            uint16_t h;
            memcpy(&h, p + 2 * i, 2);
            out[i] = num_f16_to_f32(h);
        }
        return;
    case NUM_F8_E4M3:
    case NUM_F8_E5M2: {
        const float *lut = t == NUM_F8_E4M3 ? e4m3_table : e5m2_table;
        for (size_t i = 0; i < n; i++)
            out[i] = lut[p[i]];
        return;
    }
    case NUM_I8:
        for (size_t i = 0; i < n; i++)
            out[i] = (float)(int8_t)p[i];
        return;
    case NUM_F4_E2M1:
    case NUM_NF4:
    case NUM_BNB_FP4:
        decode_table_row(p, n, 4,
                         t == NUM_NF4       ? num_nf4_table
                         : t == NUM_BNB_FP4 ? num_bnb_fp4_table
                                            : num_fp4_table,
                         out);
        return;
    default:
        if (bits >= 8) {
            decode_plain_row(t, p, n, out);
            return;
        }
        for (uint32_t c = 0; c < 1u << bits; c++)
            table[c] = num_decode(t, c);
        decode_table_row(p, n, bits, table, out);
    }
}

/* Largest and smallest value of a 64-bit integer as doubles that convert without overflow. */
static int64_t encode_i64(float x)
{
    if (isnan(x)) return 0;
    if (x >= 9223372036854775808.0f) return INT64_MAX;
    return x <= -9223372036854775808.0f ? INT64_MIN : (int64_t)nearbyintf(x);
}

static void encode_wide_row(num_dtype t, const float *x, size_t n, uint8_t *p)
{
    for (size_t i = 0; i < n; i++) {
        if (t == NUM_F64) {
            double d = (double)x[i];
            memcpy(p + 8 * i, &d, 8);
        } else if (t == NUM_I64) {
            int64_t v = encode_i64(x[i]);
            memcpy(p + 8 * i, &v, 8);
        } else { /* 16 and 32 bits */
            size_t width = (size_t)num_infos[t].bits / 8;
            uint32_t v = num_encode(t, x[i]);
            memcpy(p + width * i, &v, width);
        }
    }
}

void num_encode_row(num_dtype t, const float *x, size_t n, void *codes)
{
    uint8_t *p = codes;
    int bits = num_infos[t].bits;
    if (t == NUM_F32) {
        if (n) memcpy(codes, x, 4 * n);
        return;
    }
    if (t == NUM_BF16) {
        for (size_t i = 0; i < n; i++) {
            uint16_t h = num_f32_to_bf16(x[i]);
            memcpy(p + 2 * i, &h, 2);
        }
        return;
    }
    if (bits > 8) {
        encode_wide_row(t, x, n, p);
        return;
    }
    uint32_t acc = 0;
    int have = 0;
    for (size_t i = 0; i < n; i++) {
        acc |= num_encode(t, x[i]) << have;
        for (have += bits; have >= 8; have -= 8, acc >>= 8)
            *p++ = (uint8_t)acc;
    }
    if (have) *p = (uint8_t)acc; /* padding bits of the last byte are zero */
}
