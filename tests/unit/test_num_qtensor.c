/* The canonical tensor: rows against the formula element by element, views against rows of the
 * whole, checks against damaged tensors, byte counts against arithmetic. */
#include "check.h"
#include "num/qtensor.h"

static uint64_t seed = 1;
static uint32_t rnd(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}

/* Random codes, positive random scales, small random zeros. */
static void fill(qtensor *q)
{
    uint8_t *codes = (uint8_t *)(uintptr_t)q->codes;
    int bits = num_infos[q->code].bits;
    for (int64_t r = 0; r < q->E * q->N; r++)
        for (int64_t k = 0; k < q->K; k++)
            num_put_bits(codes + (size_t)r * q->row_bytes, (size_t)k, bits,
                         q->code == NUM_F8_E4M3 ? rnd() % 0x7F : rnd());
    int64_t n = q->E * q->scale_rows * q->scale_cols;
    size_t one = num_bytes(q->scale_type, 1);
    for (int64_t i = 0; i < n; i++) {
        float s = 0.01f + (float)(rnd() & 0xFFFF) / 65536.0f;
        num_encode_row(q->scale_type, &s, 1, (uint8_t *)(uintptr_t)q->scales + one * (size_t)i);
        if (q->zeros) ((int8_t *)(uintptr_t)q->zeros)[i] = (int8_t)(rnd() % 16 - 8);
    }
}

static void make(qtensor *q, const char *scheme, num_dtype scale, int64_t E, int64_t N, int64_t K)
{
    err e = {0};
    qspec s;
    CHECK_OK(qspec_parse(scheme, &s, &e));
    CHECK_OK(qtensor_alloc(q, &s, scale, E, N, K, &e));
    fill(q);
    if (s.w.scale == QS_NVFP4) {
        q->n_global = 2;
        q->global_row[1] = N / 2;
        q->global_row[2] = N;
        q->global[0] = 0.25f;
        q->global[1] = 3.0f / 448;
    }
    CHECK_OK(qtensor_check(q, scheme, &e));
}

static const struct {
    const char *scheme;
    num_dtype scale;
} cases[] = {
    {"w:int4,g32", NUM_BF16},
    {"w:int4,g32,asym", NUM_F16},
    {"w:int8,channel", NUM_F32},
    {"w:int3,g32", NUM_F32},
    {"w:int2,g64", NUM_BF16},
    {"w:int5,g32,asym", NUM_F32},
    {"w:int6,tensor", NUM_F32},
    {"w:fp8_e4m3,tensor", NUM_F32},
    {"w:fp8_e4m3,block16x32", NUM_F32},
    {"w:fp8_e4m3,channel", NUM_BF16},
    {"w:nvfp4,g16", NUM_F32},
    {"w:mxfp4,g32", NUM_F32},
    {"w:mxfp8", NUM_F32},
    {"w:nf4,b64", NUM_F32},
    {"w:bnb_fp4,b32", NUM_F32},
    {"w:int7,channel,asym", NUM_F16},
};
enum { N_CASES = sizeof cases / sizeof *cases };

/* The formula of the header, one element, in double. */
static double element(const qtensor *q, int64_t row, int64_t k)
{
    uint32_t raw =
        num_get_bits(q->codes + (size_t)row * q->row_bytes, (size_t)k, num_infos[q->code].bits);
    double code = (double)(q->table ? q->table[raw] : num_decode(q->code, raw));
    return (code - (double)qtensor_zero(q, row, k)) * (double)qtensor_scale(q, row, k);
}

static void check_rows(const qtensor *q, const char *name)
{
    float *row = xcalloc((size_t)q->K, sizeof *row);
    for (int64_t r = 0; r < q->E * q->N; r++) {
        qtensor_decode_row(q, r, row);
        for (int64_t k = 0; k < q->K; k++) {
            double want = element(q, r, k);
            if (fabs((double)row[k] - want) > 2.5e-7 * fabs(want))
                fail_msg("%s [%lld, %lld] is %g, formula %g", name, (long long)r, (long long)k,
                         (double)row[k], want);
        }
    }
    free(row);
}

static void rows_follow_the_formula(void **state)
{
    (void)state;
    for (int i = 0; i < N_CASES; i++)
        for (int64_t E = 1; E <= 2; E++) {
            qtensor q;
            make(&q, cases[i].scheme, cases[i].scale, E, 32, 200); /* a short last group */
            check_rows(&q, cases[i].scheme);
            qtensor_free(&q);
        }
}

/* Known numbers: the CT int4 group of the notes. */
static void int4_by_hand(void **state)
{
    (void)state;
    err e = {0};
    qspec s;
    qtensor q;
    CHECK_OK(qspec_parse("w:int4,g8", &s, &e));
    CHECK_OK(qtensor_alloc(&q, &s, NUM_BF16, 1, 1, 8, &e));
    uint32_t word;
    static const int8_t codes[8] = {7, -8, 0, 2, -2, 4, 2, -4};
    for (int i = 0; i < 8; i++)
        num_put_bits((uint8_t *)(uintptr_t)q.codes, (size_t)i, 4, (uint32_t)codes[i] & 15);
    memcpy(&word, q.codes, 4);
    assert_int_equal(word ^ 0x88888888, 0x4ac6a80f); /* CT stores q + 8 */
    *(uint16_t *)(uintptr_t)q.scales = num_f32_to_bf16(.125f);
    float w[8];
    qtensor_decode_row(&q, 0, w);
    for (int i = 0; i < 8; i++) {
        assert_true(w[i] == (float)codes[i] * .125f);
        assert_int_equal(qtensor_code(&q, 0, i), codes[i]);
    }
    qtensor_free(&q);
}

/* (q - zp) cast, times scale, cast: against the same in two explicit steps. */
static void rows_in_the_stored_type(void **state)
{
    (void)state;
    qtensor q;
    make(&q, "w:int8,g32,asym", NUM_BF16, 1, 16, 64);
    float row[64];
    int differs = 0;
    for (int64_t r = 0; r < 16; r++) {
        qtensor_decode_row_as(&q, r, NUM_BF16, row);
        for (int64_t k = 0; k < 64; k++) {
            float d = num_round(NUM_BF16, (float)qtensor_code(&q, r, k) - qtensor_zero(&q, r, k));
            float v = num_round(NUM_BF16, d * qtensor_scale(&q, r, k));
            assert_true(row[k] == v);
            differs += (double)v != element(&q, r, k);
        }
    }
    assert_true(differs > 0);
    qtensor_free(&q);
}

static void act_order_and_float_zeros(void **state)
{
    (void)state;
    err e = {0};
    qtensor q;
    make(&q, "w:int4,g16", NUM_F32, 1, 4, 64);
    int32_t idx[64];
    float zeros[16];
    for (int k = 0; k < 64; k++)
        idx[k] = (k * 7 + 3) % 4;
    for (int i = 0; i < 16; i++)
        zeros[i] = (float)i * 0.25f;
    q.g_idx = idx;
    q.zeros = zeros;
    q.zero_type = NUM_F32;
    CHECK_OK(qtensor_check(&q, "t", &e));
    check_rows(&q, "act-order");
    assert_true(qtensor_zero(&q, 2, 5) == zeros[2 * 4 + idx[5]]);
    idx[9] = 4;
    CHECK_ERR(qtensor_check(&q, "layer.q_proj", &e), ERR_VALUE, "layer.q_proj: g_idx[9] is 4");
    idx[9] = -1;
    CHECK_ERR(qtensor_check(&q, "layer.q_proj", &e), ERR_VALUE, "g_idx[9] is -1");
    idx[9] = 0;
    qtensor v;
    CHECK_OK(qtensor_slice(&q, 'K', 16, 40, &v, &e));
    float whole[64], part[24];
    for (int64_t r = 0; r < 4; r++) {
        qtensor_decode_row(&q, r, whole);
        qtensor_decode_row(&v, r, part);
        assert_memory_equal(part, whole + 16, sizeof part);
    }
    qtensor_free(&v);
    qtensor_free(&q);
}

/* Every row of every view equals the part of the row of the whole. */
static void check_slice(const qtensor *q, char axis, int64_t lo, int64_t hi, const char *name)
{
    err e = {0};
    qtensor v;
    CHECK_OK(qtensor_slice(q, axis, lo, hi, &v, &e));
    CHECK_OK(qtensor_check(&v, name, &e));
    float *whole = xcalloc((size_t)q->K, 4), *part = xcalloc((size_t)v.K, 4);
    int64_t row0 = axis == 'N' ? lo : axis == 'E' ? lo * q->N : 0, col0 = axis == 'K' ? lo : 0;
    assert_int_equal(v.E * v.N * v.K, (axis == 'E' ? hi - lo : q->E) *
                                          (axis == 'N' ? hi - lo : q->N) *
                                          (axis == 'K' ? hi - lo : q->K));
    for (int64_t r = 0; r < v.E * v.N; r++) {
        qtensor_decode_row(q, row0 + r, whole);
        qtensor_decode_row(&v, r, part);
        if (memcmp(part, whole + col0, 4 * (size_t)v.K))
            fail_msg("%s: row %lld of slice %c %lld..%lld differs", name, (long long)r, axis,
                     (long long)lo, (long long)hi);
    }
    free(whole);
    free(part);
    qtensor_free(&v);
}

static void slices(void **state)
{
    (void)state;
    for (int i = 0; i < N_CASES; i++) {
        qtensor q;
        make(&q, cases[i].scheme, cases[i].scale, 1, 64, 256);
        check_slice(&q, 'N', 0, 32, cases[i].scheme);
        check_slice(&q, 'N', 16, 64, cases[i].scheme);
        check_slice(&q, 'N', 32, 48, cases[i].scheme);
        check_slice(&q, 'K', 0, 128, cases[i].scheme);
        check_slice(&q, 'K', 128, 256, cases[i].scheme);
        check_slice(&q, 'K', 64, 192, cases[i].scheme);
        check_slice(&q, 'E', 0, 1, cases[i].scheme);
        qtensor_free(&q);
        make(&q, cases[i].scheme, cases[i].scale, 4, 32, 256);
        check_slice(&q, 'E', 1, 3, cases[i].scheme);
        check_slice(&q, 'E', 3, 4, cases[i].scheme);
        check_slice(&q, 'K', 64, 128, cases[i].scheme);
        qtensor_free(&q);
    }
}

/* Cuts that fall into bytes, in groups of odd sizes, with a short last group, with act-order. */
static void odd_slices(void **state)
{
    (void)state;
    static const char *const schemes[] = {"w:int2,channel", "w:int3,channel", "w:int4,channel",
                                          "w:int5,channel,asym", "w:int6,tensor"};
    static const char *const grouped[] = {"w:int3,g12,asym", "w:int4,g5", "w:int2,g7", "w:int8,g3"};
    qtensor q;
    for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++) {
        make(&q, schemes[i], NUM_F32, 1, 6, 45);
        check_slice(&q, 'K', 0, 9, schemes[i]);
        check_slice(&q, 'K', 9, 18, schemes[i]);
        check_slice(&q, 'K', 7, 45, schemes[i]);
        check_slice(&q, 'N', 1, 4, schemes[i]);
        qtensor_free(&q);
    }
    for (size_t i = 0; i < sizeof grouped / sizeof *grouped; i++) {
        make(&q, grouped[i], NUM_F16, 3, 6, 43);
        int64_t g = q.block_k;
        check_slice(&q, 'K', 0, g, grouped[i]);
        check_slice(&q, 'K', g, 3 * g, grouped[i]);
        check_slice(&q, 'K', 3 * g, 43, grouped[i]);
        qtensor_free(&q);
    }
    int32_t idx[60];
    float pre[60];
    for (int k = 0; k < 60; k++) {
        idx[k] = (k * 7 + 3) % 5;
        pre[k] = 1.0f + (float)k;
    }
    make(&q, "w:int3,g12", NUM_F32, 1, 6, 60);
    q.g_idx = idx;
    q.pre_scale = pre;
    check_slice(&q, 'K', 0, 30, "act-order");
    check_slice(&q, 'K', 30, 60, "act-order");
    check_slice(&q, 'K', 5, 47, "act-order");
    err e = {0};
    qtensor v;
    CHECK_OK(qtensor_slice(&q, 'K', 5, 47, &v, &e));
    assert_true(v.pre_scale[0] == 6.0f && v.pre_scale[41] == 47.0f);
    assert_true(v.scale_cols == q.scale_cols);
    qtensor_free(&v);
    qtensor_free(&q);
}

static void slices_refused(void **state)
{
    (void)state;
    err e = {0};
    qtensor q, v;
    make(&q, "w:int4,g32", NUM_F32, 1, 8, 96);
    CHECK_ERR(qtensor_slice(&q, 'K', 16, 64, &v, &e), ERR_UNSUPPORTED, "covers 32 columns");
    CHECK_ERR(qtensor_slice(&q, 'K', 0, 65, &v, &e), ERR_UNSUPPORTED, "covers 32 columns");
    CHECK_ERR(qtensor_slice(&q, 'K', 0, 97, &v, &e), ERR_VALUE, "outside");
    CHECK_ERR(qtensor_slice(&q, 'N', -1, 3, &v, &e), ERR_VALUE, "outside");
    CHECK_ERR(qtensor_slice(&q, 'N', 3, 3, &v, &e), ERR_VALUE, "outside");
    qtensor_free(&q);
    make(&q, "w:fp8_e4m3,block16x32", NUM_F32, 1, 40, 64);
    CHECK_ERR(qtensor_slice(&q, 'N', 8, 32, &v, &e), ERR_UNSUPPORTED, "covers 16 rows");
    check_slice(&q, 'N', 16, 40, "short last block");
    qtensor_free(&q);
    make(&q, "w:int4,g32", NUM_F32, 2, 8, 96);
    CHECK_ERR(qtensor_slice(&q, 'N', 0, 4, &v, &e), ERR_UNSUPPORTED, "expert");
    qtensor_free(&q);
}

static void damaged(void **state)
{
    (void)state;
    err e = {0};
    qtensor q;
    make(&q, "w:int4,g32", NUM_F32, 1, 8, 64);
    float *s = (float *)(uintptr_t)q.scales, keep = s[5];
    s[5] = NAN;
    CHECK_ERR(qtensor_check(&q, "blk.up_proj", &e), ERR_VALUE, "blk.up_proj: scale [2, 1]");
    s[5] = -INFINITY;
    CHECK_ERR(qtensor_check(&q, "t", &e), ERR_VALUE, "inf");
    s[5] = keep;
    q.scale_cols = 1;
    CHECK_ERR(qtensor_check(&q, "t", &e), ERR_SHAPE, "needs [8, 2]");
    q.scale_cols = 2;
    q.scale_rows = 9;
    CHECK_ERR(qtensor_check(&q, "t", &e), ERR_SHAPE, "scales are [9, 2]");
    q.scale_rows = 8;
    q.row_bytes = 31;
    CHECK_ERR(qtensor_check(&q, "t", &e), ERR_SHAPE, "need 32");
    q.row_bytes = 32;
    q.N = -8;
    CHECK_ERR(qtensor_check(&q, "t", &e), ERR_SHAPE, "impossible shape");
    q.N = 8;
    q.n_global = 1;
    q.global_row[1] = 7;
    q.global[0] = 1;
    CHECK_ERR(qtensor_check(&q, "t", &e), ERR_SHAPE, "rows 0 to 7 of 8");
    q.global_row[1] = 8;
    q.global[0] = NAN;
    CHECK_ERR(qtensor_check(&q, "t", &e), ERR_VALUE, "global scale 0");
    q.n_global = 0;
    q.input_scale = INFINITY;
    CHECK_ERR(qtensor_check(&q, "t", &e), ERR_VALUE, "input scale");
    q.input_scale = 0;
    CHECK_OK(qtensor_check(&q, "t", &e));
    qtensor_free(&q);
    make(&q, "w:mxfp4", NUM_F32, 1, 2, 64);
    ((uint8_t *)(uintptr_t)q.scales)[3] = 255;
    CHECK_ERR(qtensor_check(&q, "t", &e), ERR_VALUE, "scale [1, 1]");
    qtensor_free(&q);
    qspec sp;
    CHECK_OK(qspec_parse("int4", &sp, &e));
    CHECK_ERR(qtensor_alloc(&q, &sp, NUM_F32, 1, 0, 8, &e), ERR_SHAPE, "[1, 0, 8]");
    CHECK_ERR(qtensor_alloc(&q, &sp, NUM_F32, 1 << 30, 1 << 30, 1 << 30, &e), ERR_NOMEM, "memory");
    assert_int_equal(q.n_owned, 0);
}

static void bytes(void **state)
{
    (void)state;
    qbytes b = {0};
    qtensor q;
    make(&q, "w:int4,g32,asym", NUM_BF16, 1, 8, 100);
    qtensor_bytes(&q, &b);
    assert_int_equal(b.codes, 8 * 50);
    assert_int_equal(b.scales, 8 * 4 * 2);
    assert_int_equal(b.zeros, 8 * 4);
    assert_int_equal(b.padding, 0);
    qtensor_free(&q);
    make(&q, "w:int3,channel", NUM_F32, 1, 8, 100); /* 300 bits = 37.5 bytes in rows of 38 */
    qbytes c = {0};
    qtensor_bytes(&q, &c);
    assert_int_equal(c.codes, 300);
    assert_int_equal(c.padding, 4);
    assert_int_equal(c.total, 304 + 32);
    qtensor_free(&q);
    static const uint16_t w[6] = {0};
    qtensor_plain(&q, NUM_BF16, 2, 3, w);
    qtensor_bytes(&q, &b);
    assert_int_equal(b.unquantized, 12);
    assert_int_equal(b.total, b.codes + b.scales + b.zeros + b.unquantized + b.padding);
}

static void plain(void **state)
{
    (void)state;
    err e = {0};
    const float w[6] = {1, 2, 3, 4, 5, 6};
    float row[3];
    qtensor q;
    qtensor_plain(&q, NUM_F32, 2, 3, w);
    CHECK_OK(qtensor_check(&q, "t", &e));
    qtensor_decode_row(&q, 1, row);
    assert_memory_equal(row, w + 3, sizeof row);
    assert_true(qtensor_scale(&q, 1, 2) == 1 && qtensor_zero(&q, 1, 2) == 0);
    check_slice(&q, 'N', 1, 2, "plain");
    check_slice(&q, 'K', 1, 3, "plain");
    qtensor_free(&q);
}

/* bitsandbytes with K % 64 != 0: blocks run over the ends of rows. Every value by hand. */
static void flat_blocks(void **state)
{
    (void)state;
    err e = {0};
    enum { E = 2, N = 5, K = 50, B = 32, NB = (N * K + B - 1) / B };
    uint8_t codes[E * N * K / 2];
    float scales[E * NB], row[K];
    for (size_t i = 0; i < sizeof codes; i++)
        codes[i] = (uint8_t)rnd();
    for (int i = 0; i < E * NB; i++)
        scales[i] = (float)(i + 1);
    qtensor q, v;
    qtensor_plain(&q, NUM_NF4, N, K, codes);
    q.E = E;
    q.table = num_nf4_table;
    q.spec.w = (qaxis){.type = NUM_NF4, .gran = Q_GROUP, .group = B};
    q.scales = scales;
    q.scale_type = NUM_F32;
    q.flat = true;
    q.block_k = B;
    q.scale_rows = 1;
    q.scale_cols = NB;
    CHECK_OK(qtensor_check(&q, "flat", &e));
    check_rows(&q, "flat");
    for (int r = 0; r < E * N; r++) {
        qtensor_decode_row(&q, r, row);
        for (int k = 0; k < K; k++) {
            int at = r % N * K + k, x = r / N * NB + at / B;
            uint8_t byte = codes[(r * K + k) / 2];
            float want = num_nf4_table[k & 1 ? byte >> 4 : byte & 15] * (float)(x + 1);
            if (row[k] != want)
                fail_msg("[%d, %d] is %g, not %g", r, k, (double)row[k], (double)want);
        }
    }
    CHECK_OK(qtensor_slice(&q, 'E', 1, 2, &v, &e));
    float whole[K];
    qtensor_decode_row(&v, 3, row);
    qtensor_decode_row(&q, N + 3, whole);
    assert_memory_equal(row, whole, sizeof row);
    CHECK_ERR(qtensor_slice(&v, 'N', 0, 2, &q, &e), ERR_UNSUPPORTED, "ends of rows");
    CHECK_ERR(qtensor_slice(&v, 'K', 0, 32, &q, &e), ERR_UNSUPPORTED, "ends of rows");
    const int32_t rows[2] = {1, 0};
    CHECK_ERR(qtensor_rows(&v, rows, 2, &q, &e), ERR_UNSUPPORTED, "ends of rows");
    v.scale_cols--;
    CHECK_ERR(qtensor_check(&v, "flat", &e), ERR_SHAPE, "needs [1, 8]");
}

/* Row i of the copy is row rows[i] of the original, for every scheme, in every expert. */
static void gathered(void **state)
{
    (void)state;
    err e = {0};
    enum { N = 32, K = 200 };
    int32_t rows[N];
    for (int i = 0; i < N; i++)
        rows[i] = i < N / 2 ? 2 * i : 2 * (i - N / 2) + 1; /* interleaved pairs put apart */
    float a[K], b[K];
    for (int i = 0; i < N_CASES; i++)
        for (int64_t E = 1; E <= 3; E += 2) {
            qtensor q, g;
            make(&q, cases[i].scheme, cases[i].scale, E, N, K);
            CHECK_OK(qtensor_rows(&q, rows, N, &g, &e));
            CHECK_OK(qtensor_check(&g, cases[i].scheme, &e));
            for (int64_t r = 0; r < E * N; r++) {
                qtensor_decode_row(&g, r, a);
                qtensor_decode_row(&q, r / N * N + rows[r % N], b);
                if (memcmp(a, b, sizeof a)) fail_msg("%s: row %d", cases[i].scheme, (int)r);
            }
            qtensor_free(&q);
            check_rows(&g, cases[i].scheme); /* nothing of q is left in it */
            qtensor_free(&g);
        }
    qtensor q, g;
    make(&q, "w:nvfp4,g16", NUM_F32, 1, N, 32);
    for (int i = 0; i < N; i++)
        rows[i] = i % 2 ? N - 1 - i : i;
    CHECK_ERR(qtensor_rows(&q, rows, N, &g, &e), ERR_UNSUPPORTED, "global");
    rows[3] = N;
    CHECK_ERR(qtensor_rows(&q, rows, N, &g, &e), ERR_VALUE, "row 32 of 32");
    CHECK_ERR(qtensor_rows(&q, rows, 0, &g, &e), ERR_VALUE, "0 rows");
    qtensor_free(&q);
}

static void transposed(void **state)
{
    (void)state;
    err e = {0};
    uint16_t w[2 * 3 * 5];
    for (int i = 0; i < 30; i++)
        w[i] = (uint16_t)(i * 257);
    qtensor q, t;
    qtensor_plain(&q, NUM_BF16, 3, 5, w);
    q.E = 2;
    CHECK_OK(qtensor_transpose(&q, &t, &e));
    assert_true(t.E == 2 && t.N == 5 && t.K == 3 && t.row_bytes == 6);
    for (int x = 0; x < 2; x++)
        for (int n = 0; n < 3; n++)
            for (int k = 0; k < 5; k++)
                assert_memory_equal(t.codes + 2 * ((x * 5 + k) * 3 + n), w + (x * 3 + n) * 5 + k,
                                    2);
    CHECK_OK(qtensor_check(&t, "t", &e));
    qtensor_free(&t);
    make(&q, "w:int8,channel", NUM_F32, 1, 4, 8);
    CHECK_ERR(qtensor_transpose(&q, &t, &e), ERR_UNSUPPORTED, "plain float");
    qtensor_free(&q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_follow_the_formula),
        cmocka_unit_test(int4_by_hand),
        cmocka_unit_test(rows_in_the_stored_type),
        cmocka_unit_test(act_order_and_float_zeros),
        cmocka_unit_test(slices),
        cmocka_unit_test(odd_slices),
        cmocka_unit_test(slices_refused),
        cmocka_unit_test(damaged),
        cmocka_unit_test(bytes),
        cmocka_unit_test(plain),
        cmocka_unit_test(flat_blocks),
        cmocka_unit_test(gathered),
        cmocka_unit_test(transposed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
