/* Element codecs. Floats are rounded to nearest, ties to even, on the integer pattern of the f32
 * value: small formats (E4M3, E5M2, E2M1, F16) share one routine that knows exponent bits, mantissa
 * bits and bias; decoding of formats of at most 8 bits goes through tables made once from the same
 * definition. */
#include "num/num.h"
#include <pthread.h>
#include <string.h>

const num_info num_infos[NUM_COUNT] = {
#define DTYPE(id, name, tag, bits, kind, max, doc) {name, tag, doc, bits, #kind[0], max},
#include "num/dtypes.def"
#undef DTYPE
};

const float num_nf4_table[16] = {-1.0f,
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
                                 1.0f};
const float num_fp4_table[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
/* NF4 decision borders: float32 midpoints of the table, as the CUDA writer of bitsandbytes has
 * them. */
static const float nf4_border[15] = {-0.8480964f,  -0.61063292f, -0.45999527f, -0.33967943f,
                                     -0.23460741f, -0.13791173f, -0.04552502f, 0.03979015f,
                                     0.12025525f,  0.20352125f,  0.29201377f,  0.38931254f,
                                     0.50166342f,  0.64278692f,  0.86147842f};

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static float of_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* ---- names --------------------------------------------------------------------------------------
 */

static const struct {
    const char *alias;
    num_dtype type;
} aliases[] = {{"fp8", NUM_F8_E4M3},
               {"fp8_e4m3fn", NUM_F8_E4M3},
               {"float8_e4m3fn", NUM_F8_E4M3},
               {"float8_e5m2", NUM_F8_E5M2},
               {"bfloat16", NUM_BF16},
               {"float16", NUM_F16},
               {"half", NUM_F16},
               {"fp16", NUM_F16},
               {"float32", NUM_F32},
               {"float", NUM_F32},
               {"fp32", NUM_F32},
               {"float64", NUM_F64},
               {"fp4_e2m1", NUM_F4_E2M1},
               {"e2m1", NUM_F4_E2M1},
               {"e4m3", NUM_F8_E4M3},
               {"e5m2", NUM_F8_E5M2}};

num_dtype num_by_name(const char *name, size_t len)
{
    for (int i = 0; i < NUM_COUNT; i++)
        if (strlen(num_infos[i].name) == len && !memcmp(num_infos[i].name, name, len))
            return (num_dtype)i;
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++)
        if (strlen(aliases[i].alias) == len && !memcmp(aliases[i].alias, name, len))
            return aliases[i].type;
    return NUM_NONE;
}

num_dtype num_by_tag(const char *tag, size_t len)
{
    for (int i = 0; len && i < NUM_COUNT; i++)
        if (strlen(num_infos[i].tag) == len && !memcmp(num_infos[i].tag, tag, len))
            return (num_dtype)i;
    return NUM_NONE;
}

size_t num_bytes(num_dtype t, size_t n)
{
    size_t bits = (size_t)num_infos[t].bits;
    if (bits >= 8) return n * (bits / 8);
    return n / 8 * bits + (n % 8 * bits + 7) / 8;
}

/* ---- 16-bit floats ------------------------------------------------------------------------------
 */

uint16_t num_f32_to_bf16(float x)
{
    uint32_t u = bits_of(x);
    if ((u & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

float num_bf16_to_f32(uint16_t x)
{
    return of_bits((uint32_t)x << 16);
}

/* Rounds the magnitude u (f32 pattern without sign) to a float of mbits mantissa bits and the given
 * bias; returns exponent and mantissa as one integer, which may exceed the format's largest code.
 */
static uint32_t round_small(uint32_t u, int mbits, int bias)
{
    int exp = (int)(u >> 23) - 127 + bias; /* target exponent field if normal */
    int drop = 23 - mbits;
    uint32_t man = (u & 0x7FFFFF) | (u >> 23 ? 0x800000 : 0);
    if (exp <= 0) drop += 1 - exp; /* subnormal in the target */
    if (drop > 25) return 0;
    uint32_t half = 1u << (drop - 1), rest = man & ((half << 1) - 1), q = man >> drop;
    if (rest > half || (rest == half && (q & 1))) q++;
    if (exp <= 0) return q;                    /* a carry into the first normal is the right code */
    return q + ((uint32_t)(exp - 1) << mbits); /* q holds the implicit bit */
}

uint16_t num_f32_to_f16(float x)
{
    uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, a = u & 0x7FFFFFFF;
    if (a > 0x7F800000) return (uint16_t)(sign | 0x7E00);
    if (a >= 0x477FF000) return (uint16_t)(sign | 0x7C00); /* 65520 and more: infinity, as IEEE */
    return (uint16_t)(sign | round_small(a, 10, 15));
}

float num_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3FF;
    if (e == 31) return of_bits(sign | 0x7F800000 | m << 13);
    if (e) return of_bits(sign | (e + 112) << 23 | m << 13);
    float v = (float)m * 0x1p-24f;
    return sign ? -v : v;
}

/* ---- 8 bits and less ----------------------------------------------------------------------------
 */

static uint32_t encode_fp8(float x, int mbits, int bias, uint32_t max_code, uint32_t nan_code)
{
    uint32_t u = bits_of(x), sign = u >> 24 & 0x80, a = u & 0x7FFFFFFF;
    if (a > 0x7F800000) return sign | nan_code;
    if (a == 0x7F800000) return sign | max_code;
    uint32_t c = round_small(a, mbits, bias);
    return sign | (c > max_code ? max_code : c);
}

static float decode_small(uint32_t code, int ebits, int mbits, int bias)
{
    uint32_t m = code & ((1u << mbits) - 1), e = code >> mbits & ((1u << ebits) - 1);
    float v = e ? ldexpf((float)(m + (1u << mbits)), (int)e - bias - mbits)
                : ldexpf((float)m, 1 - bias - mbits);
    return code >> (ebits + mbits) & 1 ? -v : v;
}

static float decode_e4m3(uint32_t c)
{
    return (c & 0x7F) == 0x7F ? NAN : decode_small(c, 4, 3, 7);
}

static float decode_e5m2(uint32_t c)
{
    if ((c & 0x7F) > 0x7C) return NAN;
    if ((c & 0x7F) == 0x7C) return c & 0x80 ? -INFINITY : INFINITY;
    return decode_small(c, 5, 2, 15);
}

static uint32_t encode_e2m1(float x)
{
    uint32_t u = bits_of(x), sign = u >> 28 & 8, a = u & 0x7FFFFFFF;
    if (a >= 0x7F800000) return sign | 7; /* no NaN in this type: callers refuse NaN before */
    uint32_t c = round_small(a, 1, 1);
    return sign | (c > 7 ? 7 : c);
}

static uint32_t encode_nf4(float x)
{
    uint32_t c = 0;
    for (int i = 0; i < 15; i++)
        c += x > nf4_border[i];
    return c;
}

/* Nearest power of two at or below... E8M0 holds exponents only: value rounded in the log domain.
 */
static uint32_t encode_e8m0(float x)
{
    if (!(x > 0)) return x == 0 ? 0 : 255;
    if (isinf(x)) return 254;
    int e;
    float m = frexpf(x, &e); /* m in [.5,1) */
    int code = e - 1 + 127 + (m > 0.75f || (m == 0.75f && ((e - 1 + 127) & 1)));
    return (uint32_t)(code < 0 ? 0 : code > 254 ? 254 : code);
}

static uint32_t encode_int(float x, int bits)
{
    float lo = -(float)(1u << (bits - 1)), hi = -lo - 1.0f;
    if (isnan(x)) return 0;
    float r = nearbyintf(x < lo ? lo : x > hi ? hi : x);
    return (uint32_t)(int32_t)r & ((1u << bits) - 1);
}

static float decode_int(uint32_t code, int bits)
{
    uint32_t sign = 1u << (bits - 1), mask = (sign << 1) - 1;
    return (float)((int32_t)((code & mask) ^ sign) - (int32_t)sign);
}

float num_decode(num_dtype t, uint32_t c)
{
    switch (t) {
    case NUM_F32:
        return of_bits(c);
    case NUM_F16:
        return num_f16_to_f32((uint16_t)c);
    case NUM_BF16:
        return num_bf16_to_f32((uint16_t)c);
    case NUM_F8_E4M3:
        return decode_e4m3(c & 0xFF);
    case NUM_F8_E5M2:
        return decode_e5m2(c & 0xFF);
    case NUM_F8_E8M0:
        return (c & 0xFF) == 255 ? NAN : ldexpf(1.0f, (int)(c & 0xFF) - 127);
    case NUM_F4_E2M1:
        return num_fp4_table[c & 15];
    case NUM_NF4:
        return num_nf4_table[c & 15];
    case NUM_I16:
        return (float)(int16_t)c;
    case NUM_I32:
        return (float)(int32_t)c;
    case NUM_U8:
        return (float)(c & 0xFF);
    case NUM_BOOL:
        return (float)(c & 1);
    default:
        return num_infos[t].kind == 'I' && num_infos[t].bits <= 8 ? decode_int(c, num_infos[t].bits)
                                                                  : NAN;
    }
}

uint32_t num_encode(num_dtype t, float x)
{
    switch (t) {
    case NUM_F32:
        return bits_of(x);
    case NUM_F16: {
        /* Saturating, as every conversion here; the IEEE conversion is num_f32_to_f16. */
        uint16_t h = num_f32_to_f16(x);
        return (h & 0x7FFF) == 0x7C00 ? (h & 0x8000u) | 0x7BFFu : h;
    }
    case NUM_BF16: {
        uint16_t h = num_f32_to_bf16(x);
        return (h & 0x7FFF) == 0x7F80 ? (h & 0x8000u) | 0x7F7Fu : h;
    }
    case NUM_F8_E4M3:
        return encode_fp8(x, 3, 7, 0x7E, 0x7F);
    case NUM_F8_E5M2:
        return encode_fp8(x, 2, 15, 0x7B, 0x7F);
    case NUM_F8_E8M0:
        return encode_e8m0(x);
    case NUM_F4_E2M1:
        return encode_e2m1(x);
    case NUM_NF4:
        return encode_nf4(x);
    case NUM_U8:
        return x > 0 ? (uint32_t)nearbyintf(x > 255 ? 255 : x) : 0;
    case NUM_BOOL:
        return x != 0;
    case NUM_I16:
        return (uint16_t)(int16_t)nearbyintf(x < -32768  ? -32768
                                             : x > 32767 ? 32767
                                             : x == x    ? x
                                                         : 0);
    default:
        return num_infos[t].kind == 'I' && num_infos[t].bits <= 8 ? encode_int(x, num_infos[t].bits)
                                                                  : 0;
    }
}

float num_round(num_dtype t, float x)
{
    return num_decode(t, num_encode(t, x));
}

/* ---- rows ---------------------------------------------------------------------------------------
 */

uint32_t num_get_bits(const uint8_t *row, size_t i, int bits)
{
    size_t at = i * (size_t)bits, byte = at >> 3;
    unsigned off = (unsigned)(at & 7);
    uint32_t v = row[byte];
    if (off + (unsigned)bits > 8) v |= (uint32_t)row[byte + 1] << 8;
    if (off + (unsigned)bits > 16) v |= (uint32_t)row[byte + 2] << 16;
    return v >> off & ((1u << bits) - 1);
}

void num_put_bits(uint8_t *row, size_t i, int bits, uint32_t v)
{
    size_t at = i * (size_t)bits, byte = at >> 3;
    unsigned off = (unsigned)(at & 7), width = off + (unsigned)bits;
    uint32_t mask = (1u << bits) - 1, word = (v & mask) << off, m = mask << off;
    for (unsigned k = 0; k * 8 < width; k++)
        row[byte + k] = (uint8_t)((row[byte + k] & ~(m >> 8 * k)) | (word >> 8 * k & 0xFF));
}

static float table8[NUM_COUNT][256];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void make_tables(void)
{
    for (int t = 0; t < NUM_COUNT; t++)
        for (uint32_t c = 0; num_infos[t].bits <= 8 && c < 1u << num_infos[t].bits; c++)
            table8[t][c] = num_decode((num_dtype)t, c);
}

void num_decode_row(num_dtype t, const void *codes, size_t n, float *out)
{
    const uint8_t *b = codes;
    int bits = num_infos[t].bits;
    if (bits <= 8) {
        pthread_once(&tables_once, make_tables);
        const float *tab = table8[t];
        if (bits == 8)
            for (size_t i = 0; i < n; i++)
                out[i] = tab[b[i]];
        else
            for (size_t i = 0; i < n; i++)
                out[i] = tab[num_get_bits(b, i, bits)];
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        uint32_t w;
        int64_t q;
        double d;
        if (bits == 16) {
            memcpy(&h, b + 2 * i, 2);
            out[i] = num_decode(t, h);
        } else if (bits == 32) {
            memcpy(&w, b + 4 * i, 4);
            out[i] = num_decode(t, w);
        } else if (t == NUM_I64) {
            memcpy(&q, b + 8 * i, 8);
            out[i] = (float)q;
        } else {
            memcpy(&d, b + 8 * i, 8);
            out[i] = (float)d;
        }
    }
}

void num_encode_row(num_dtype t, const float *x, size_t n, void *codes)
{
    uint8_t *b = codes;
    int bits = num_infos[t].bits;
    if (bits < 8) memset(b, 0, num_bytes(t, n));
    for (size_t i = 0; i < n; i++) {
        if (bits < 8) {
            num_put_bits(b, i, bits, num_encode(t, x[i]));
        } else if (bits == 64) {
            double d = x[i];
            int64_t q = t == NUM_I64 ? (int64_t)x[i] : 0;
            memcpy(b + 8 * i, t == NUM_I64 ? (const void *)&q : (const void *)&d, 8);
        } else {
            uint32_t w = num_encode(t, x[i]);
            memcpy(b + (size_t)bits / 8 * i, &w, (size_t)bits / 8);
        }
    }
}

uint8_t num_mx_scale(float amax, int off)
{
    uint32_t u = (bits_of(amax) & 0x7FFFFFFF) + 0x200000;
    int code = (int)(u >> 23) - off;
    return (uint8_t)(code < 0 ? 0 : code > 254 ? 254 : code);
}
