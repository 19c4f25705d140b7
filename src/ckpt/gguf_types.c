/* GGUF element types: sizes of their blocks and decoding to fp32.
 *
 * A row is a run of blocks; a block holds 32 codes (Q4_0 … Q8_0) or a super-block of 256 (K types)
 * and its scales. Field order inside a block, sizes in bytes:
 *
 *   Q4_0  d:f16 qs:16              w = d*(q-8)       element i < 16 low nibble of qs[i], else high
 *   Q4_1  d:f16 m:f16 qs:16        w = d*q + m                                    nibble of
 * qs[i-16] Q5_0  d:f16 qh:4 qs:16         w = d*(q-16)      fifth bit of element i is bit i of qh
 *   Q5_1  d:f16 m:f16 qh:4 qs:16   w = d*q + m
 *   Q8_0  d:f16 qs:32 (int8)       w = q*d
 *   Q2_K  sc:16 qs:64 d dmin       w = (d*lo(sc))*q - dmin*hi(sc), one sc for 16 elements
 *   Q3_K  hm:32 qs:64 sc:12 d      w = (d*(sc-32))*(q - (hm bit ? 0 : 4)), 16 six-bit sc
 *   Q4_K  d dmin sc:12 qs:128      w = (d*sc)*q - dmin*mn, 8 pairs of six bits, 32 elements each
 *   Q5_K  d dmin sc:12 qh:32 qs:128
 *   Q6_K  ql:128 qh:64 sc:16 (int8) d   w = (d*sc)*(q-32), one sc for 16 elements
 *
 * The order of the fp32 operations above is that of the Python package `gguf`, whose results these
 * decoders reproduce bit for bit. What is not in the table is refused by name when a file is
 * opened. */
#include "ckpt/gguf.h"
#include <string.h>

enum { QK = 256 };

static float half_at(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    return num_f16_to_f32(h);
}

/* Nibble of element i of a 32-element block. */
static int nibble(const uint8_t *qs, int i)
{
    return i < 16 ? qs[i] & 15 : qs[i - 16] >> 4;
}

static int bit(const uint8_t *p, int i)
{
    return p[i / 8] >> (i % 8) & 1;
}

static void decode_f32(const uint8_t *b, size_t n, float *out)
{
    memcpy(out, b, n * sizeof *out);
}

static void decode_f16(const uint8_t *b, size_t n, float *out)
{
    num_decode_row(NUM_F16, b, n, out);
}

static void decode_bf16(const uint8_t *b, size_t n, float *out)
{
    num_decode_row(NUM_BF16, b, n, out);
}

static void decode_q4_0(const uint8_t *b, size_t n, float *out)
{
    for (; n; n -= 32, b += 18, out += 32) {
        float d = half_at(b);
        for (int i = 0; i < 32; i++)
            out[i] = d * (float)(nibble(b + 2, i) - 8);
    }
}

static void decode_q4_1(const uint8_t *b, size_t n, float *out)
{
    for (; n; n -= 32, b += 20, out += 32) {
        float d = half_at(b), m = half_at(b + 2);
        for (int i = 0; i < 32; i++)
            out[i] = d * (float)nibble(b + 4, i) + m;
    }
}

static void decode_q5_0(const uint8_t *b, size_t n, float *out)
{
    for (; n; n -= 32, b += 22, out += 32) {
        float d = half_at(b);
        for (int i = 0; i < 32; i++)
            out[i] = d * (float)((nibble(b + 6, i) | bit(b + 2, i) << 4) - 16);
    }
}

static void decode_q5_1(const uint8_t *b, size_t n, float *out)
{
    for (; n; n -= 32, b += 24, out += 32) {
        float d = half_at(b), m = half_at(b + 2);
        for (int i = 0; i < 32; i++)
            out[i] = d * (float)(nibble(b + 8, i) | bit(b + 4, i) << 4) + m;
    }
}

static void decode_q8_0(const uint8_t *b, size_t n, float *out)
{
    for (; n; n -= 32, b += 34, out += 32) {
        float d = half_at(b);
        for (int i = 0; i < 32; i++)
            out[i] = (float)(int8_t)b[2 + i] * d;
    }
}

/* Two-bit code of element i of a super-block: 128 elements share 32 bytes, 32 elements a shift. */
static int two_bits(const uint8_t *qs, int i)
{
    return qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

static void decode_q2_k(const uint8_t *b, size_t n, float *out)
{
    for (; n; n -= QK, b += 84, out += QK) {
        float d = half_at(b + 80), dmin = half_at(b + 82);
        for (int i = 0; i < QK; i++) {
            uint8_t s = b[i / 16];
            float dl = d * (float)(s & 15), ml = dmin * (float)(s >> 4);
            out[i] = dl * (float)two_bits(b + 16, i) - ml;
        }
    }
}

/* Six-bit scale g of Q3_K: low nibbles in bytes 0..7, two high bits each in bytes 8..11. */
static int scale3(const uint8_t *sc, int g)
{
    int low = g < 8 ? sc[g] & 15 : sc[g - 8] >> 4;
    return (low | (sc[8 + g % 4] >> (g / 4 * 2) & 3) << 4) - 32;
}

static void decode_q3_k(const uint8_t *b, size_t n, float *out)
{
    for (; n; n -= QK, b += 110, out += QK) {
        float d = half_at(b + 108);
        for (int g = 0; g < 16; g++) {
            float dl = d * (float)scale3(b + 96, g);
            for (int i = g * 16; i < g * 16 + 16; i++) {
                int high = b[i % 32] >> (i / 32) & 1;
                out[i] = dl * (float)(two_bits(b + 32, i) - (high ? 0 : 4));
            }
        }
    }
}

/* Six-bit scale and minimum g (0..7) of Q4_K and Q5_K. */
static void scale_min(const uint8_t *s, int g, int *scale, int *min)
{
    if (g < 4) {
        *scale = s[g] & 63;
        *min = s[4 + g] & 63;
    } else {
        *scale = (s[4 + g] & 15) | (s[g - 4] >> 2 & 0x30);
        *min = s[4 + g] >> 4 | (s[g] >> 2 & 0x30);
    }
}

static void decode_q4_k(const uint8_t *b, size_t n, float *out)
{
    for (; n; n -= QK, b += 144, out += QK) {
        float d = half_at(b), dmin = half_at(b + 2);
        for (int g = 0; g < 8; g++) {
            int s, m;
            scale_min(b + 4, g, &s, &m);
            float dl = d * (float)s, ml = dmin * (float)m;
            const uint8_t *q = b + 16 + g / 2 * 32;
            for (int i = 0; i < 32; i++)
                out[g * 32 + i] = dl * (float)(q[i] >> (g % 2 * 4) & 15) - ml;
        }
    }
}

static void decode_q5_k(const uint8_t *b, size_t n, float *out)
{
    for (; n; n -= QK, b += 176, out += QK) {
        float d = half_at(b), dmin = half_at(b + 2);
        for (int g = 0; g < 8; g++) {
            int s, m;
            scale_min(b + 4, g, &s, &m);
            float dl = d * (float)s, ml = dmin * (float)m;
            const uint8_t *q = b + 48 + g / 2 * 32;
            for (int i = 0; i < 32; i++) {
                int code = (q[i] >> (g % 2 * 4) & 15) | (b[16 + i] >> g & 1) << 4;
                out[g * 32 + i] = dl * (float)code - ml;
            }
        }
    }
}

static void decode_q6_k(const uint8_t *b, size_t n, float *out)
{
    for (; n; n -= QK, b += 210, out += QK) {
        float d = half_at(b + 208);
        for (int i = 0; i < QK; i++) {
            float dl = d * (float)(int8_t)b[192 + i / 16];
            int half = i / 128, in = i % 128;
            int low = b[half * 64 + in % 64] >> (in / 64 * 4) & 15;
            int high = b[128 + half * 32 + in % 32] >> (in / 32 * 2) & 3;
            out[i] = dl * (float)((low | high << 4) - 32);
        }
    }
}

const gguf_type gguf_types[] = {
    {0, "F32", 1, 4, NUM_F32, decode_f32},         {1, "F16", 1, 2, NUM_F16, decode_f16},
    {30, "BF16", 1, 2, NUM_BF16, decode_bf16},     {2, "Q4_0", 32, 18, NUM_NONE, decode_q4_0},
    {3, "Q4_1", 32, 20, NUM_NONE, decode_q4_1},    {6, "Q5_0", 32, 22, NUM_NONE, decode_q5_0},
    {7, "Q5_1", 32, 24, NUM_NONE, decode_q5_1},    {8, "Q8_0", 32, 34, NUM_NONE, decode_q8_0},
    {10, "Q2_K", 256, 84, NUM_NONE, decode_q2_k},  {11, "Q3_K", 256, 110, NUM_NONE, decode_q3_k},
    {12, "Q4_K", 256, 144, NUM_NONE, decode_q4_k}, {13, "Q5_K", 256, 176, NUM_NONE, decode_q5_k},
    {14, "Q6_K", 256, 210, NUM_NONE, decode_q6_k},
};
const int gguf_n_types = (int)(sizeof gguf_types / sizeof *gguf_types);

const gguf_type *gguf_type_by_id(uint32_t id)
{
    for (int i = 0; i < gguf_n_types; i++)
        if (gguf_types[i].id == id) return &gguf_types[i];
    return NULL;
}
