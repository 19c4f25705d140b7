/* The operators that only some architectures use: layer norms, gated norms, rotary on pairs, gates,
 * soft caps, matrices of heads. Each table of each instruction set against the formula in double,
 * with odd sizes, strides, outliers and poisoned outputs; one thread and three give equal bits. */
#include "kern_fixture.h"

static const int64_t sizes[] = {1, 7, 16, 33, 64, 172, 576};
enum { N_SIZES = sizeof sizes / sizeof *sizes };

static void same_bits(const char *what, const char *where, const float *a, const float *b,
                      int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(a + i, b + i, sizeof *a))
            fail_msg("%s (%s): element %lld is %.9g with three threads, %.9g with one", what, where,
                     (long long)i, a[i], b[i]);
}

/* y against layer norm of x in double; the bound counts the rounding of the mean. */
static void check_layernorm(const char *where, const float *x, const float *w, const float *b,
                            int64_t K, const float *y)
{
    double sum = 0, ss = 0, sq = 0;
    for (int64_t k = 0; k < K; k++)
        sum += x[k];
    for (int64_t k = 0; k < K; k++) {
        ss += (x[k] - sum / (double)K) * (x[k] - sum / (double)K);
        sq += (double)x[k] * x[k];
    }
    double mean = sum / (double)K, r = 1 / sqrt(ss / (double)K + 1e-5f);
    for (int64_t k = 0; k < K; k++) {
        double want = (x[k] - mean) * r * w[k] + (b ? b[k] : 0);
        near("layernorm", where, y[k], want,
             2e-6 * (fabs(want) + sqrt(sq / (double)K) * r * fabs(w[k])) +
                 2e-7 * (b ? fabs(b[k]) : 0));
    }
}

static void test_layernorm(void **state)
{
    (void)state;
    for (int i = 0; i < N_ISAS; i++)
        for (int j = 0; j < N_SIZES; j++) {
            int64_t K = sizes[j], T = 131;
            float *x = randoms(T * K), *w = randoms(K), *b = randoms(K), *o = poisoned(T * K),
                  *p = poisoned(T * K);
            for (int64_t n = 0; n < 3 * K; n++)
                x[n] += n < K ? 50.0f : 0; /* a mean far from zero */
            memset(x + K, 0, (size_t)K * sizeof *x);
            for (int bias = 0; bias < 2; bias++) {
                kern_layernorm(isas[i].dev, x, w, bias ? b : NULL, 1e-5f, T, K, o);
                kern_layernorm(isas[i].one, x, w, bias ? b : NULL, 1e-5f, T, K, p);
                same_bits("layernorm", isas[i].name, o, p, T * K);
                for (int64_t t = 0; t < T; t++)
                    check_layernorm(isas[i].name, x + t * K, w, bias ? b : NULL, K, o + t * K);
            }
            free(x), free(w), free(b), free(o), free(p);
        }
}

static void test_head_layernorm(void **state)
{
    (void)state;
    for (int i = 0; i < N_ISAS; i++)
        for (int j = 0; j < N_SIZES - 1; j++) {
            int D = (int)sizes[j], H = 5, T = 27;
            int64_t ld = H * D + 3;
            float *x = randoms(T * ld), *w = randoms(H * D), *o = copy_of(x, T * ld),
                  *p = copy_of(x, T * ld);
            kern_head_layernorm(isas[i].dev, o, ld, H, D, w, 1e-5f, T);
            kern_head_layernorm(isas[i].one, p, ld, H, D, w, 1e-5f, T);
            same_bits("head_layernorm", isas[i].name, o, p, T * ld);
            for (int t = 0; t < T; t++) {
                for (int h = 0; h < H; h++)
                    check_layernorm(isas[i].name, x + t * ld + h * D, w + h * D, NULL, D,
                                    o + t * ld + h * D);
                assert_memory_equal(o + t * ld + H * D, x + t * ld + H * D, 3 * sizeof *o);
            }
            free(x), free(w), free(o), free(p);
        }
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static void test_gated_rmsnorm(void **state)
{
    (void)state;
    for (int i = 0; i < N_ISAS; i++)
        for (int j = 0; j < N_SIZES; j++) {
            int D = (int)sizes[j], H = 3, T = 19;
            int64_t ldg = H * D + 5;
            float *x = randoms(T * H * D), *g = randoms(T * ldg), *w = randoms(D),
                  *o = poisoned(T * H * D), *p = poisoned(T * H * D);
            kern_gated_rmsnorm(isas[i].dev, x, g, ldg, H, D, w, 1e-6f, T, o);
            kern_gated_rmsnorm(isas[i].one, x, g, ldg, H, D, w, 1e-6f, T, p);
            same_bits("gated_rmsnorm", isas[i].name, o, p, T * H * D);
            for (int r = 0; r < T * H; r++) {
                const float *gate = g + r / H * ldg + r % H * D;
                double ss = 0;
                for (int d = 0; d < D; d++)
                    ss += (double)x[r * D + d] * x[r * D + d];
                for (int d = 0; d < D; d++) {
                    double want =
                        x[r * D + d] / sqrt(ss / D + 1e-6f) * w[d] * gate[d] * sigmoid(gate[d]);
                    near("gated_rmsnorm", isas[i].name, o[r * D + d], want,
                         2e-6 * fabs(want) + 1e-30);
                }
            }
            free(x), free(g), free(w), free(o), free(p);
        }
}

static void test_rope_pairs(void **state)
{
    (void)state;
    static const int dims[][2] = {{64, 64}, {64, 32}, {80, 80}, {8, 6}, {128, 128}, {40, 10}};
    for (int i = 0; i < N_ISAS; i++)
        for (size_t j = 0; j < sizeof dims / sizeof *dims; j++) {
            int D = dims[j][0], rot = dims[j][1], H = 3, T = 65, half = rot / 2;
            int64_t ld = H * D + 4;
            float *q = randoms(T * ld), *k = randoms(T * D), *c = randoms(T * half),
                  *s = randoms(T * half), *q1 = copy_of(q, T * ld), *k1 = copy_of(k, T * D),
                  *q0 = copy_of(q, T * ld), *k0 = copy_of(k, T * D);
            kern_rope_pairs(isas[i].dev, q, ld, H, k, D, 1, D, rot, c, s, T);
            kern_rope_pairs(isas[i].one, q1, ld, H, NULL, 0, 1, D, rot, c, s, T);
            kern_rope_pairs(isas[i].one, k1, D, 1, NULL, 0, 1, D, rot, c, s, T);
            same_bits("rope_pairs q", isas[i].name, q, q1, T * ld);
            same_bits("rope_pairs k", isas[i].name, k, k1, T * D);
            for (int t = 0; t < T; t++)
                for (int h = 0; h <= H; h++)
                    for (int d = 0; d < D; d++) {
                        const float *x = h < H ? q0 + t * ld + h * D : k0 + t * D;
                        const float *y = h < H ? q + t * ld + h * D : k + t * D;
                        double a = x[d / 2 * 2], b = x[d / 2 * 2 + 1];
                        double cs = d < rot ? c[t * half + d / 2] : 1,
                               sn = d < rot ? s[t * half + d / 2] : 0;
                        double want = d >= rot ? x[d] : d % 2 ? b * cs + a * sn : a * cs - b * sn;
                        double mag = fabs(a * cs) + fabs(b * sn) + fabs(b * cs) + fabs(a * sn);
                        near("rope_pairs", isas[i].name, y[d], want, d < rot ? 2e-7 * mag : 0);
                    }
            free(q), free(k), free(c), free(s), free(q0), free(k0), free(q1), free(k1);
        }
}

/* Operators on n numbers; n above the size from which the team helps. */
static void test_flat(void **state)
{
    (void)state;
    static const int64_t ns[] = {1, 15, 16, 17, 1000, 40001};
    for (int i = 0; i < N_ISAS; i++)
        for (size_t j = 0; j < sizeof ns / sizeof *ns; j++) {
            int64_t n = ns[j];
            float *x = randoms(n), *y = randoms(n), *a = copy_of(x, n), *b = copy_of(x, n);
            kern_add_scaled(isas[i].dev, a, y, 0.37f, n);
            kern_add_scaled(isas[i].one, b, y, 0.37f, n);
            same_bits("add_scaled", isas[i].name, a, b, n);
            for (int64_t k = 0; k < n; k++)
                near("add_scaled", isas[i].name, a[k], x[k] + 0.37f * (double)y[k],
                     2e-7 * (fabs(x[k]) + fabs(y[k])));
            memcpy(a, x, (size_t)n * sizeof *a);
            kern_scale(isas[i].dev, a, 0.13f, n);
            for (int64_t k = 0; k < n; k++)
                near("scale", isas[i].name, a[k], x[k] * 0.13f, 0);
            for (int64_t k = 0; k < n; k++)
                x[k] *= k % 5 ? 10.0f : 1e-4f;
            memcpy(a, x, (size_t)n * sizeof *a);
            memcpy(b, x, (size_t)n * sizeof *b);
            kern_softcap(isas[i].dev, a, 30, n);
            kern_softcap(isas[i].one, b, 30, n);
            same_bits("softcap", isas[i].name, a, b, n);
            for (int64_t k = 0; k < n; k++)
                near("softcap", isas[i].name, a[k], 30 * tanh(x[k] / 30.0),
                     5e-7 * fabs(x[k]) + 1e-12);
            free(x), free(y), free(a), free(b);
        }
}

static void test_gates(void **state)
{
    (void)state;
    for (int i = 0; i < N_ISAS; i++)
        for (int j = 0; j < N_SIZES; j++) {
            int64_t n = sizes[j], T = 45, ldx = n + 3, ldg = n + 1;
            float *x = randoms(T * ldx), *g = randoms(T * ldg), *a = copy_of(x, T * ldx),
                  *b = copy_of(x, T * ldx);
            kern_sigmoid_mul(isas[i].dev, a, ldx, g, ldg, n, T);
            kern_sigmoid_mul(isas[i].one, b, ldx, g, ldg, n, T);
            same_bits("sigmoid_mul", isas[i].name, a, b, T * ldx);
            memcpy(b, x, (size_t)(T * ldx) * sizeof *b);
            kern_row_sigmoid(isas[i].dev, b, ldx, g + n, ldg, n, T);
            for (int64_t t = 0; t < T; t++)
                for (int64_t k = 0; k < ldx; k++) {
                    double v = x[t * ldx + k], s = k < n ? v * sigmoid(g[t * ldg + k]) : v,
                           r = k < n ? v * sigmoid(g[t * ldg + n]) : v;
                    near("sigmoid_mul", isas[i].name, a[t * ldx + k], s, 1e-6 * fabs(s));
                    near("row_sigmoid", isas[i].name, b[t * ldx + k], r, 1e-6 * fabs(r));
                }
            free(x), free(g), free(a), free(b);
        }
}

static void head_case(const isa *on, num_dtype type, int H, int64_t N, int64_t K, int64_t T)
{
    size_t row = num_bytes(type, (size_t)K);
    float *w = randoms(H * N * K);
    uint8_t *codes = xmalloc((size_t)(H * N) * row);
    for (int64_t n = 0; n < H * N; n++)
        num_encode_row(type, w + n * K, (size_t)K, codes + (size_t)n * row);
    qtensor q;
    qtensor_plain(&q, type, N, K, codes);
    q.E = H;
    int64_t ldh = K + 2, ldx = H * ldh + 1, ldoh = N + 3, ldo = H * ldoh + 5;
    float *x = randoms(T * ldx), *o = poisoned(T * ldo), *p = poisoned(T * ldo);
    kern_head_matmul(on->dev, &q, x, ldx, ldh, T, o, ldo, ldoh);
    kern_head_matmul(on->one, &q, x, ldx, ldh, T, p, ldo, ldoh);
    same_bits("head_matmul", on->name, o, p, T * ldo);
    for (int h = 0; h < H; h++)
        for (int64_t n = 0; n < N; n++) {
            qtensor_decode_row(&q, h * N + n, w);
            for (int64_t t = 0; t < T; t++) {
                double sum = 0, mag = 1e-30;
                for (int64_t k = 0; k < K; k++) {
                    sum += (double)x[t * ldx + h * ldh + k] * w[k];
                    mag += fabs((double)x[t * ldx + h * ldh + k] * w[k]);
                }
                near("head_matmul", on->name, o[t * ldo + h * ldoh + n], sum, 1e-6 * mag);
            }
        }
    for (int64_t t = 0; t < T; t++)
        for (int64_t c = 0; c < ldo; c++)
            if (c >= H * ldoh || c % ldoh >= N) assert_true(o[t * ldo + c] != o[t * ldo + c]);
    free(w), free(codes), free(x), free(o), free(p);
}

static void test_head_matmul(void **state)
{
    (void)state;
    static const num_dtype types[] = {NUM_BF16, NUM_F16, NUM_F32};
    static const int64_t shapes[][4] = {{16, 128, 512, 3}, {16, 512, 128, 1}, {3, 17, 33, 9},
                                        {1, 1, 1, 1},      {5, 32, 24, 70},   {2, 40, 7, 2}};
    for (int i = 0; i < N_ISAS; i++)
        for (int t = 0; t < 3; t++)
            for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++)
                head_case(&isas[i], types[t], (int)shapes[j][0], shapes[j][1], shapes[j][2],
                          shapes[j][3]);
}

int main(void)
{
    isas_open();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layernorm),     cmocka_unit_test(test_head_layernorm),
        cmocka_unit_test(test_gated_rmsnorm), cmocka_unit_test(test_rope_pairs),
        cmocka_unit_test(test_flat),          cmocka_unit_test(test_gates),
        cmocka_unit_test(test_head_matmul)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    isas_close();
    return rc;
}
