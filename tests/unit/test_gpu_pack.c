/* Packed weights of the GPU (kern/gpu/pack.c): every format, decoded bit by bit as device code does
 * it (format_bits.h), against the codes and scales that went in. Ranges of rows are packed as the
 * whole is. */
#include <math.h>
#include "check.h"
#include "kern/cuda/format_bits.h"
#include "kern/cuda/small.h"
#include "num/num.h"

enum { N = 48, K = 512 };

typedef struct source {
    small_format f;
    uint8_t codes[N * K * 2], zeros[N * K];
    float scales[N * K], col[N];
    double value[N * K];
} source;

static uint32_t state = 12345;
static uint32_t rnd(void)
{
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static bool four_bit(small_format f)
{
    return f == SMALL_MXFP4 || f == SMALL_NVFP4;
}

/* A scale that the format keeps as it is; some are nothing. */
static float some_scale(small_format f, int row)
{
    if (rnd() % 23 == 0) return 0;
    if (f == SMALL_MXFP4) return ldexpf(1, (int)(rnd() % 40) - 20 + row);
    if (f == SMALL_NVFP4) return num_round(NUM_F8_E4M3, (float)(1 + rnd() % 400));
    return num_f16_to_f32(num_f32_to_f16((float)(1 + rnd() % 1000) / 30000.0f));
}

static double code_value(small_format f, const source *s, int n, int k, double zero)
{
    uint8_t c = s->codes[n * K + k];
    switch (f) {
    case SMALL_E4M3:
    case SMALL_E4M3_BLOCK:
        return (double)num_decode(NUM_F8_E4M3, c);
    case SMALL_INT8:
    case SMALL_INT8_GROUP:
        return (int8_t)c;
    case SMALL_BF16: {
        uint16_t h;
        memcpy(&h, s->codes + 2 * (n * K + k), 2);
        return (double)num_bf16_to_f32(h);
    }
    case SMALL_MXFP4:
    case SMALL_NVFP4:
        return (double)num_decode(NUM_F4_E2M1, c);
    default:
        return c - zero;
    }
}

static void fill(source *s, small_format f)
{
    const int group = small_group(f), groups = group ? K / group : 0;
    memset(s, 0, sizeof *s);
    s->f = f;
    for (int i = 0; i < N * K * 2; i++) {
        uint8_t c = (uint8_t)rnd();
        if (f <= SMALL_INT4_32_ZERO || four_bit(f)) c &= 15;
        if ((f == SMALL_E4M3 || f == SMALL_E4M3_BLOCK) && (c & 127) == 127) c ^= 1;
        if (f == SMALL_BF16 && i % 2) c = (uint8_t)(0x3f + 4 * (c & 1)); /* no NaN */
        s->codes[i] = c;
    }
    for (int n = 0; n < N; n++) {
        s->col[n] = f == SMALL_BF16 ? 1 : 0.5f + (float)(rnd() % 100) / 100;
        for (int g = 0; g < groups; g++) {
            bool repeat = f == SMALL_E4M3_BLOCK && n % 16;
            s->scales[n * groups + g] = repeat ? s->scales[(n - 1) * groups + g] : some_scale(f, n);
            s->zeros[n * groups + g] = (uint8_t)(rnd() % 17);
        }
        for (int k = 0; k < K; k++) {
            int at = groups ? n * groups + k / group : 0;
            double zero = small_has_zeros(f) ? s->zeros[at] : 8;
            s->value[n * K + k] = code_value(f, s, n, k, zero) *
                                  (groups ? (double)s->scales[at] : 1) * (double)s->col[n];
        }
    }
}

/* ---- as device code sees it ---------------------------------------------------------------------
 */

static double half(uint32_t w, int j)
{
    return (double)num_bf16_to_f32((uint16_t)(w >> (16 * j)));
}
static uint32_t word(const uint8_t *p)
{
    uint32_t w;
    memcpy(&w, p, 4);
    return w;
}

typedef struct place {
    int b, s, h, c, j, r; /* block, step, half, lane of a row, column of two, row */
} place;

/* What enters the product, but for scales: bytes of codes of the unit. */
static double operand(small_format f, const uint8_t *unit, place p)
{
    const int lane = p.r % 8 * 4 + p.c, low = p.r / 8;
    const uint8_t *four = unit + p.b * 512 + lane * 16 + low * 8 + p.h * 4;
    const uint8_t *eight = unit + p.b * 1024 + low * 512 + lane * 16 + p.s * 4;
    const uint8_t *full = unit + p.b * 2048 + (2 * p.h + low) * 512 + lane * 16 + p.s * 4;
    if (f <= SMALL_INT4_32_ZERO) return half(format_int4(word(four), p.s), p.j) - 128;
    if (four_bit(f)) return half(format_fp4(word(four), p.s), p.j);
    if (f == SMALL_E4M3 || f == SMALL_E4M3_BLOCK) return half(format_e4m3(word(eight), p.h), p.j);
    if (f == SMALL_BF16) return half(word(full), p.j);
    return half(format_int8(word(eight), p.h), p.j) - half(format_int8_off(word(eight), p.h), p.j);
}

/* side: of the unit, behind the codes. */
static double scaled(small_format f, const uint8_t *side, place p, double v)
{
    const int group = small_group(f), groups = group ? 128 / group : 0;
    const int at = groups ? p.r * groups + (p.b * 64 + 16 * p.s) / group : 0;
    uint16_t h;
    float unit;
    if (f == SMALL_E4M3) return v * 0x1p120;
    if (f == SMALL_E4M3_BLOCK) {
        memcpy(&unit, side, 4);
        return v * 0x1p60 * (double)unit;
    }
    if (!groups) return v;
    if (four_bit(f)) {
        uint32_t w = f == SMALL_MXFP4 ? format_mx(side[at]) : format_nv(side[at]);
        double exact = v * half(w, p.j);
        assert_true(exact == (double)num_bf16_to_f32(num_f32_to_bf16((float)exact)));
        return exact;
    }
    const int coarse = groups == 2 ? p.r * 2 + p.b : groups == 1 ? p.r : at;
    memcpy(&h, side + 2 * coarse, 2);
    if (f <= SMALL_INT4_32_ZERO) v -= small_has_zeros(f) ? side[16 * groups * 2 + coarse] : 8;
    return v * (double)num_f16_to_f32(h);
}

static void check_format(source *s, small_format f)
{
    static uint8_t packed[N * K * 4];
    const size_t tile = small_packed_bytes(f, 16, K), unit = small_packed_bytes(f, 16, 128);
    const int fine = f == SMALL_INT4_32 || f == SMALL_INT4_32_ZERO || four_bit(f);
    const int codes = f <= SMALL_INT4_32_ZERO || four_bit(f) ? 1024 : f == SMALL_BF16 ? 4096 : 2048;
    fill(s, f);
    assert_true(small_packed_bytes(f, N, K) <= sizeof packed);
    small_pack(f, s->codes, s->scales, s->zeros, N, K, packed, s->col);
    for (int n = 0; n < N; n++)
        for (int i = 0; i < K; i++) {
            place p = {i / 64 % 2, i / 16 % 4, i / 8 % 2, i / 2 % 4, i % 2, n % 16};
            const uint8_t *at = packed + (size_t)(n / 16) * tile + (size_t)(i / 128) * unit;
            int k = i / 64 * 64 + format_column(fine, p.s, p.h, p.c, p.j);
            double got = scaled(f, at + codes, p, operand(f, at, p)) * (double)s->col[n];
            double want = s->value[n * K + k];
            if (fabs(got - want) > 1e-6 * fabs(want))
                fail_msg("format %d row %d column %d: %g, not %g", (int)f, n, k, got, want);
        }
}

static void test_formats(void **unused)
{
    (void)unused;
    static source s;
    for (int f = 0; f < SMALL_FORMATS; f++)
        check_format(&s, (small_format)f);
}

static void test_ranges(void **unused)
{
    (void)unused;
    static source s;
    static uint8_t whole[N * K * 4], part[N * K * 4];
    for (int f = 0; f < SMALL_FORMATS; f++) {
        fill(&s, (small_format)f);
        const int groups = small_group(s.f) ? K / small_group(s.f) : 0, width = f == SMALL_BF16;
        float col[N];
        memcpy(col, s.col, sizeof col);
        small_pack(s.f, s.codes, s.scales, s.zeros, N, K, whole, s.col);
        for (int n = 32; n >= 0; n -= 16)
            small_pack(s.f, s.codes + (n * K << width), s.scales + n * groups, s.zeros + n * groups,
                       16, K, part + small_packed_bytes(s.f, n, K), col + n);
        assert_memory_equal(whole, part, small_packed_bytes(s.f, N, K));
        assert_memory_equal(s.col, col, sizeof col);
    }
}

static void test_nan(void **unused)
{
    (void)unused;
    static source s;
    static uint8_t packed[N * K * 4];
    for (int f = 0; f < SMALL_FORMATS; f++) {
        const int groups = small_group((small_format)f) ? K / small_group((small_format)f) : 0;
        const bool fp8 = f == SMALL_E4M3 || f == SMALL_E4M3_BLOCK;
        if (!groups && !fp8) continue;
        fill(&s, (small_format)f);
        if (groups) s.scales[5 * groups + 1] = NAN;
        if (fp8) s.codes[6 * K + 100] = 0xff;
        small_pack(s.f, s.codes, s.scales, s.zeros, N, K, packed, s.col);
        for (int n = 0; n < N; n++)
            assert_int_equal(isnan(s.col[n]) != 0, (groups && n == 5) || (fp8 && n == 6));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
