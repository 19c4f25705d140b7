/* Element codecs against ml_dtypes (tests/fixtures/num/golden.bin), against an independent float64
 * computation on every border of the 16-bit floats, and on the vectors written in the format notes.
 */
#include "check.h"
#include "base/file.h"
#include "num/num.h"

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

/* ---- ml_dtypes ---------------------------------------------------------------------------------
 */

static void check_decode(num_dtype t, uint32_t code, uint32_t want)
{
    float got = num_decode(t, code);
    if (isnan(float_of(want)) ? !isnan(got) : bits_of(got) != want)
        fail_msg("%s code 0x%02x: %a, ml_dtypes has %a", num_infos[t].name, code, (double)got,
                 (double)float_of(want));
}

static void check_encode(num_dtype t, uint32_t x, uint32_t want)
{
    uint32_t got = num_encode(t, float_of(x));
    bool nan = isnan(float_of(x)) && isnan(num_decode(t, want));
    if (nan ? !isnan(num_decode(t, got)) : got != want)
        fail_msg("%s of %a: 0x%02x, ml_dtypes has 0x%02x", num_infos[t].name, (double)float_of(x),
                 got, want);
}

/* The row functions must agree with the single ones on the same pairs. */
static void check_rows(num_dtype t, uint32_t (*pairs)[2], uint32_t n)
{
    float *x = xcalloc(n, sizeof *x), *back = xcalloc(n, sizeof *back);
    uint8_t *codes = xcalloc(n + 8, 4);
    for (uint32_t i = 0; i < n; i++)
        x[i] = float_of(pairs[i][0]);
    memset(codes, 0xEE, 4 * (n + 8));
    num_encode_row(t, x, n, codes);
    num_decode_row(t, codes, n, back);
    for (uint32_t i = 0; i < n; i++) {
        int b = num_infos[t].bits;
        assert_int_equal(num_get_bits(codes, i, b), num_encode(t, x[i]));
        float v = num_round(t, x[i]);
        assert_true(isnan(v) ? isnan(back[i]) : bits_of(v) == bits_of(back[i]));
    }
    assert_int_equal(codes[num_bytes(t, n)], 0xEE); /* nothing is written behind the row */
    free(x);
    free(back);
    free(codes);
}

static void golden_ml_dtypes(void **state)
{
    (void)state;
    err e = {0};
    buf b = {0};
    CHECK_OK(file_read_all(&b, "tests/fixtures/num/golden.bin", 1 << 20, &e));
    assert_memory_equal(b.data, "TNUM1\0\0\0", 8);
    bool seen[NUM_COUNT] = {false};
    size_t at = 8, n_pairs = 0;
    while (at < b.len) {
        char name[17] = "";
        uint32_t kind, count;
        memcpy(name, b.data + at, 16);
        memcpy(&kind, b.data + at + 16, 4);
        memcpy(&count, b.data + at + 20, 4);
        at += 24;
        assert_true((size_t)count * 8 <= b.len - at);
        num_dtype t = num_by_name(name, strlen(name));
        assert_int_not_equal(t, NUM_NONE);
        uint32_t(*pairs)[2] = xmalloc((size_t)count * 8);
        memcpy(pairs, b.data + at, (size_t)count * 8);
        at += (size_t)count * 8;
        for (uint32_t i = 0; i < count; i++) {
            if (kind)
                check_encode(t, pairs[i][0], pairs[i][1]);
            else
                check_decode(t, pairs[i][0], pairs[i][1]);
        }
        if (kind) check_rows(t, pairs, count);
        if (!kind) assert_int_equal(count, 1 << num_infos[t].bits);
        n_pairs += count;
        seen[t] = true;
        free(pairs);
    }
    print_message("%zu pairs\n", n_pairs);
    assert_true(n_pairs > 10000);
    for (int t = 0; t < NUM_COUNT; t++) /* every quantized type of the table has vectors */
        if (num_infos[t].bits <= 8 && t != NUM_U8 && t != NUM_BOOL) assert_true(seen[t]);
    assert_true(seen[NUM_F16] && seen[NUM_BF16]);
    buf_free(&b);
}

/* ---- 16-bit floats, every code and border, in float64 ------------------------------------------
 */

/* Value of a float with m mantissa bits, e exponent bits, by the definition. */
static double value16(uint32_t code, int e, int m)
{
    int bias = (1 << (e - 1)) - 1, exp = (int)(code >> m & ((1u << e) - 1));
    double frac = (double)(code & ((1u << m) - 1)) / (double)(1u << m);
    return exp ? ldexp(1.0 + frac, exp - bias) : ldexp(frac, 1 - bias);
}

static void sweep16(num_dtype t, int e, int m)
{
    uint32_t inf = ((1u << e) - 1) << m;
    for (uint32_t c = 0; c < inf; c++) {
        double v = value16(c, e, m),
               up = c + 1 == inf ? ldexp(1.0, 1 << (e - 1)) : value16(c + 1, e, m);
        for (uint32_t sign = 0; sign <= 0x8000; sign += 0x8000) {
            float s = sign ? -1.0f : 1.0f;
            assert_true((double)num_decode(t, c | sign) == (double)s * v);
            assert_int_equal(num_encode(t, s * (float)v), c | sign);
            double mid = (v + up) / 2; /* exact in f32 for f16 and bf16 */
            float half = (float)mid;
            if ((double)half != mid) fail_msg("midpoint of 0x%04x is not a float", c);
            assert_int_equal(num_encode(t, s * half), (c & 1 ? c + 1 : c) | sign);
            assert_int_equal(num_encode(t, s * nextafterf(half, 0)), c | sign);
            assert_int_equal(num_encode(t, s * nextafterf(half, INFINITY)), (c + 1) | sign);
        }
    }
    assert_int_equal(num_encode(t, INFINITY), inf);
    assert_int_equal(num_encode(t, -INFINITY), inf | 0x8000);
    assert_true(isnan(num_decode(t, num_encode(t, NAN))));
    for (uint32_t c = inf + 1; c < 0x8000; c++)
        assert_true(isnan(num_decode(t, c)) && isnan(num_decode(t, c | 0x8000)));
}

static void f16_every_border(void **state)
{
    (void)state;
    sweep16(NUM_F16, 5, 10);
    /* A NaN whose payload lies in the lost bits must not become infinity. */
    assert_true(isnan(num_f16_to_f32(num_f32_to_f16(float_of(0x7F800001)))));
}

static void bf16_every_border(void **state)
{
    (void)state;
    sweep16(NUM_BF16, 8, 7);
    assert_true(isnan(num_bf16_to_f32(num_f32_to_bf16(float_of(0x7F800001)))));
    assert_true(isnan(num_bf16_to_f32(num_f32_to_bf16(float_of(0xFFFFFFFF)))));
}

/* The nearest code by brute force, ties to the even one: for all types of at most 8 bits. */
static void nearest_by_search(void **state)
{
    (void)state;
    uint64_t s = 7;
    for (int t = 0; t < NUM_COUNT; t++) {
        const num_info *f = &num_infos[t];
        if (f->bits > 8 || f->kind == 'U' || f->kind == 'T') continue;
        for (int i = 0; i < 4000; i++) {
            s = s * 6364136223846793005u + 1442695040888963407u;
            double x = ldexp((double)(s >> 40) / 0x1p24 + 0.5, (int)(s >> 20 & 31) - 16);
            if (f->kind != 'E' && (s & 1 << 12)) x = -x;
            if (x > f->max) x = f->max;
            double best = INFINITY;
            for (uint32_t c = 0; c < 1u << f->bits; c++) {
                double d = fabs((double)num_decode((num_dtype)t, c) - (double)(float)x);
                if (d < best) best = d;
            }
            double got = fabs((double)num_round((num_dtype)t, (float)x) - (double)(float)x);
            if (got != best) fail_msg("%s of %a is off by %a, best is %a", f->name, x, got, best);
        }
    }
}

/* ---- vectors of the format notes ---------------------------------------------------------------
 */

static void e4m3_and_e5m2_vectors(void **state)
{
    (void)state;
    static const struct {
        float x;
        uint8_t code;
    } a[] = {{0, 0x00},         {-0.0f, 0x80},     {1, 0x38},          {0.1f, 0x1d},
             {-0.3f, 0xaa},     {0x1p-10f, 0x00},  {0x1.8p-10f, 0x01}, {0x3p-10f, 0x02},
             {0x2.8p-9f, 0x02}, {0x3.8p-9f, 0x04}, {0x7.8p-9f, 0x08},  {17, 0x58},
             {17.5f, 0x59},     {19, 0x5a},        {21, 0x5a},         {432, 0x7e},
             {448, 0x7e},       {464, 0x7e},       {465, 0x7e},        {1000, 0x7e},
             {INFINITY, 0x7e},  {-INFINITY, 0xfe}},
      b[] = {{1, 0x3c},          {0.1f, 0x2e},  {-0.3f, 0xb5}, {0x1p-16f, 0x01}, {0x1p-17f, 0x00},
             {0x1.8p-17f, 0x01}, {9, 0x48},     {11, 0x4a},    {13, 0x4a},       {448, 0x5f},
             {57344, 0x7b},      {61439, 0x7b}, {61440, 0x7b}};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        assert_int_equal(num_encode(NUM_F8_E4M3, a[i].x), a[i].code);
    for (size_t i = 0; i < sizeof b / sizeof *b; i++)
        assert_int_equal(num_encode(NUM_F8_E5M2, b[i].x), b[i].code);
    assert_true(num_decode(NUM_F8_E4M3, 0x1d) == .1015625f);
    assert_true(num_decode(NUM_F8_E5M2, 0xb5) == -.3125f);
    const float w[] = {.1f, -.25f, .333f, 1, -2, .004f};
    const uint8_t want[] = {0x5b, 0xe6, 0x69, 0x76, 0xfe, 0x36};
    float s = 2.0f / 448.0f;
    assert_int_equal(bits_of(s), 0x3b924925);
    for (int i = 0; i < 6; i++)
        assert_int_equal(num_encode(NUM_F8_E4M3, w[i] / s), want[i]);
}

static void mx_scales(void **state)
{
    (void)state;
    static const struct {
        float amax;
        uint8_t fp4, fp8;
    } v[] = {{1.0f, 125, 119}, {1.74f, 125, 119}, {1.75f, 126, 120}, {3.0f, 126, 120},
             {3.4f, 126, 120}, {3.5f, 127, 121},  {6.0f, 127, 121},  {6.1f, 127, 121},
             {7.0f, 128, 122}, {448, 134, 128}};
    for (size_t i = 0; i < sizeof v / sizeof *v; i++) {
        assert_int_equal(num_mx_scale(v[i].amax, 2), v[i].fp4);
        assert_int_equal(num_mx_scale(v[i].amax, 8), v[i].fp8);
    }
    assert_int_equal(num_mx_scale(0, 2), 0);
    assert_int_equal(num_mx_scale(1e-45f, 8), 0);
    assert_int_equal(num_mx_scale(NAN, 2), 255);
    assert_true(num_mx_scale(3.4e38f, 2) < 255);
}

/* The block of 32 of the notes: scale 0.5 by the rule with +0.25, bytes low nibble first. */
static void mxfp4_block(void **state)
{
    (void)state;
    float x[32], amax = 0;
    for (int i = 0; i < 32; i++) {
        x[i] = (i & 1 ? 1.0f : -1.0f) * (float)i / 10.0f;
        if (i == 31) x[i] = 3.4f;
        amax = fmaxf(amax, fabsf(x[i]));
    }
    x[0] = 0;
    uint8_t scale = num_mx_scale(amax, 2), got[16];
    static const uint8_t want[16] = {0x00, 0x19, 0x2a, 0x3a, 0x4b, 0x4c, 0x5c, 0x5d,
                                     0x5d, 0x6e, 0x6e, 0x6e, 0x6e, 0x7f, 0x7f, 0x7f};
    assert_int_equal(scale, 0x7e);
    float s = num_decode(NUM_F8_E8M0, scale);
    for (int i = 0; i < 32; i++)
        x[i] /= s;
    num_encode_row(NUM_F4_E2M1, x, 32, got);
    assert_memory_equal(got, want, 16);
    static const uint8_t all[8] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};
    float y[16];
    num_decode_row(NUM_F4_E2M1, all, 16, y);
    for (int i = 0; i < 16; i++)
        assert_int_equal(bits_of(y[i] * 0.25f), bits_of(num_fp4_table[i] * 0.25f));
    assert_true(y[7] * 0.25f == 1.5f && y[15] * 0.25f == -1.5f);
}

static void nvfp4_block(void **state)
{
    (void)state;
    static const float x[16] = {.05f, -.1f,   .2f,  -.3f,   .4f, -.55f, .7f,  -.85f,
                                1,    -1.25f, 1.5f, -1.75f, 2,   -2.4f, 2.7f, -3};
    static const uint8_t want[8] = {0x80, 0x91, 0xa2, 0xb3, 0xc4, 0xe5, 0xe6, 0xf7};
    float g = 2688.0f / 6.0f, y[16];
    uint32_t local = num_encode(NUM_F8_E4M3, g * 3.0f / 6.0f);
    uint8_t got[8];
    assert_int_equal(local, 0x76);
    for (int i = 0; i < 16; i++)
        y[i] = x[i] / (num_decode(NUM_F8_E4M3, local) / g);
    num_encode_row(NUM_F4_E2M1, y, 16, got);
    assert_memory_equal(got, want, 8);
}

static void nf4_vectors(void **state)
{
    (void)state;
    static const float x[8] = {1, -.5f, .25f, -.125f, 0, .75f, -1, .1f};
    static const uint8_t want[8] = {15, 2, 10, 6, 7, 14, 0, 8};
    for (int i = 0; i < 8; i++)
        assert_int_equal(num_encode(NUM_NF4, x[i]), want[i]);
    for (uint32_t c = 0; c < 16; c++)
        assert_int_equal(num_encode(NUM_NF4, num_nf4_table[c]), c);
}

/* ---- packing -----------------------------------------------------------------------------------
 */

static void pack(int bits, const int *v, int n, uint32_t *words, int n_words)
{
    uint8_t row[64];
    memset(row, 0xA5, sizeof row); /* put must replace what was there */
    for (int i = 0; i < n; i++)
        num_put_bits(row, (size_t)i, bits, (uint32_t)v[i]);
    for (int i = 0; i < n; i++)
        assert_int_equal(num_get_bits(row, (size_t)i, bits), (uint32_t)v[i] & ((1u << bits) - 1));
    memcpy(words, row, 4 * (size_t)n_words);
}

static void packing_vectors(void **state)
{
    (void)state;
    int seq[32];
    uint32_t w[8];
    for (int i = 0; i < 32; i++)
        seq[i] = i;
    pack(4, seq, 8, w, 1);
    assert_int_equal(w[0], 0x76543210);
    pack(4, seq + 1, 8, w, 1);
    assert_int_equal(w[0], 0x87654321);
    pack(4, (const int[]){15, 0, 8, 7, 1, 14, 9, 2}, 8, w, 1);
    assert_int_equal(w[0], 0x29e1780f);
    pack(2, seq, 16, w, 1);
    assert_int_equal(w[0], 0xe4e4e4e4);
    pack(8, (const int[]){1, 2, 3, 255}, 4, w, 1);
    assert_int_equal(w[0], 0xff030201);
    pack(3, seq, 32, w, 3);
    assert_int_equal(w[0], 0x88fac688);
    assert_int_equal(w[1], 0xc688fac6);
    assert_int_equal(w[2], 0xfac688fa);
    static const uint32_t five[5] = {0x8a418820, 0xc5a92839, 0xca307b9a, 0x38bdab49, 0xffbbcdeb};
    pack(5, seq, 32, w, 5);
    assert_memory_equal(w, five, sizeof five);
}

/* All widths, all lengths up to 70: rows by the stream functions equal single puts. */
static void rows_all_widths(void **state)
{
    (void)state;
    uint64_t s = 3;
    for (int t = 0; t < NUM_COUNT; t++) {
        if (num_infos[t].bits > 8) continue;
        for (size_t n = 0; n <= 70; n++) {
            float x[70], y[70];
            uint8_t a[80], b[80] = {0};
            memset(a, 0xEE, sizeof a);
            for (size_t i = 0; i < n; i++) {
                s = s * 6364136223846793005u + 1442695040888963407u;
                x[i] =
                    (float)(int32_t)(s >> 32) / 0x1p31f * (float)fmin(num_infos[t].max, 200) * 1.2f;
                num_put_bits(b, i, num_infos[t].bits, num_encode((num_dtype)t, x[i]));
            }
            num_encode_row((num_dtype)t, x, n, a);
            assert_memory_equal(a, b, num_bytes((num_dtype)t, n));
            assert_int_equal(a[num_bytes((num_dtype)t, n)], 0xEE);
            num_decode_row((num_dtype)t, a, n, y);
            for (size_t i = 0; i < n; i++) {
                float v = num_round((num_dtype)t, x[i]);
                assert_true(isnan(v) ? isnan(y[i]) : bits_of(v) == bits_of(y[i]));
            }
        }
    }
}

static void wide_integers(void **state)
{
    (void)state;
    const int64_t i64[3] = {-5, 1 << 20, INT64_MAX};
    const int32_t i32[3] = {-5, INT32_MAX, INT32_MIN};
    const int16_t i16[3] = {-5, INT16_MAX, INT16_MIN};
    const double f64[3] = {-0.5, 1e300, 3};
    float y[3];
    num_decode_row(NUM_I64, i64, 3, y);
    assert_true(y[0] == -5 && y[1] == 1048576 && y[2] == 0x1p63f);
    num_decode_row(NUM_I32, i32, 3, y);
    assert_true(y[0] == -5 && y[1] == 0x1p31f && y[2] == -0x1p31f);
    num_decode_row(NUM_I16, i16, 3, y);
    assert_true(y[0] == -5 && y[1] == 32767 && y[2] == -32768);
    num_decode_row(NUM_F64, f64, 3, y);
    assert_true(y[0] == -0.5f && isinf(y[1]) && y[2] == 3);
    const float x[4] = {-1e30f, 1e30f, NAN, 2.5f};
    int64_t o64[4];
    int32_t o32[4];
    int16_t o16[4];
    num_encode_row(NUM_I64, x, 4, o64);
    assert_true(o64[0] == INT64_MIN && o64[1] == INT64_MAX && o64[2] == 0 && o64[3] == 2);
    num_encode_row(NUM_I32, x, 4, o32);
    assert_true(o32[0] == INT32_MIN && o32[1] == INT32_MAX && o32[2] == 0 && o32[3] == 2);
    num_encode_row(NUM_I16, x, 4, o16);
    assert_true(o16[0] == INT16_MIN && o16[1] == INT16_MAX && o16[2] == 0 && o16[3] == 2);
}

static void names_and_sizes(void **state)
{
    (void)state;
    for (int t = 0; t < NUM_COUNT; t++) {
        const num_info *f = &num_infos[t];
        assert_int_equal(num_by_name(f->name, strlen(f->name)), t);
        if (*f->tag) assert_int_equal(num_by_tag(f->tag, strlen(f->tag)), t);
        for (size_t n = 0; n < 40; n++)
            assert_int_equal(num_bytes((num_dtype)t, n), (n * (size_t)f->bits + 7) / 8);
        if (f->bits <= 8 && f->kind != 'U' &&
            f->kind != 'E') /* the table's max is the largest code */
            assert_true((double)num_round((num_dtype)t, 1e9f) == f->max);
    }
    assert_int_equal(num_by_name("fp8", 3), NUM_F8_E4M3);
    assert_int_equal(num_by_name("half", 4), NUM_F16);
    assert_int_equal(num_by_name("bfloat16", 8), NUM_BF16);
    assert_int_equal(num_by_name("float16", 7), NUM_F16);
    assert_int_equal(num_by_name("int9", 4), NUM_NONE);
    assert_int_equal(num_by_name("", 0), NUM_NONE);
    assert_int_equal(num_by_tag("", 0), NUM_NONE);
    assert_int_equal(num_by_tag("F8_E4M", 6), NUM_NONE);
    assert_true(num_bytes(NUM_I3, SIZE_MAX / 2) > SIZE_MAX / 8); /* no wrap */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_ml_dtypes),      cmocka_unit_test(f16_every_border),
        cmocka_unit_test(bf16_every_border),     cmocka_unit_test(nearest_by_search),
        cmocka_unit_test(e4m3_and_e5m2_vectors), cmocka_unit_test(mx_scales),
        cmocka_unit_test(mxfp4_block),           cmocka_unit_test(nvfp4_block),
        cmocka_unit_test(nf4_vectors),           cmocka_unit_test(packing_vectors),
        cmocka_unit_test(rows_all_widths),       cmocka_unit_test(wide_integers),
        cmocka_unit_test(names_and_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
