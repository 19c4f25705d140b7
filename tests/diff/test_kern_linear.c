/* Every row of the linear list x schemes x shapes, against a product in double of weights decoded
 * by qtensor_decode_row and inputs quantized by the rules written out again here. Outputs are
 * poisoned, inputs have outliers and a zero row, weights random codes. Rows that this CPU cannot
 * run are counted as skipped. */
#include "linear_fixture.h"

static kern_dev *dev;

/* ---- the input rules once more ----------------------------------------------------------- */

static float amax_of(const float *v, int64_t n)
{
    float m = 0;
    for (int64_t i = 0; i < n; i++)
        m = fmaxf(m, fabsf(v[i]));
    return m;
}

static double e2m1(double v)
{
    double a = fabs(v);
    double r = a <= .25    ? 0
               : a < .75   ? .5
               : a <= 1.25 ? 1
               : a < 1.75  ? 1.5
               : a <= 2.5  ? 2
               : a < 3.5   ? 3
               : a <= 5    ? 4
                           : 6;
    return v < 0 ? -r : r;
}

static void want_input(const qaxis *a, const kern__act_plan *p, const float *x, int64_t K,
                       double *out)
{
    for (int64_t k = 0; k < K; k++)
        out[k] = x[k];
    if (p->kind == ACT_I8) {
        int64_t g = p->group;
        for (int64_t k0 = 0; k0 < K; k0 += g) {
            int64_t n = K - k0 < g ? K - k0 : g;
            float s = amax_of(x + k0, n) / p->div;
            for (int64_t k = k0; k < k0 + n && s > 0; k++) {
                float c = rintf(x[k] / s);
                c = c > 127 ? 127 : c < -128 ? -128 : c;
                out[k] = (double)c * s;
            }
        }
        return;
    }
    if (!qaxis_quantized(a) || !qaxis_quantized(&p->a)) return;
    int64_t g = a->gran == Q_GROUP ? a->group : K;
    float all = amax_of(x, K);
    for (int64_t k0 = 0; k0 < K; k0 += g) {
        int64_t n = K - k0 < g ? K - k0 : g;
        float m = amax_of(x + k0, n);
        for (int64_t k = k0; k < k0 + n && m > 0; k++) {
            if (a->scale == QS_MX) {
                double sc = ldexp(1, (int)num_mx_scale(m, 2) - 127);
                out[k] = e2m1(x[k] / sc) * sc;
            } else if (a->scale == QS_NVFP4) {
                float gx = 2688.0f / all,
                      sc = num_decode(NUM_F8_E4M3, num_encode(NUM_F8_E4M3, gx * m / 6));
                if (sc == 0) sc = 0.125f;
                out[k] = e2m1((float)(x[k] / (sc / gx))) * sc / gx;
            } else if (a->type == NUM_F8_E4M3) {
                float sc = m / 448.0f;
                out[k] = (double)num_decode(a->type, num_encode(a->type, x[k] / sc)) * sc;
            } else {
                float sc = m / 127.5f, c = rintf(x[k] / sc);
                out[k] = (double)(c > 127 ? 127 : c < -128 ? -128 : c) * sc;
            }
        }
    }
}

typedef struct stats {
    long cases, skipped;
    double worst;
} stats;

static void compare(const kern_linear *l, const qtensor *q, int64_t M, stats *st)
{
    int64_t N = q->N, K = q->K, ldx = K + 3, ldy = N + 5;
    const struct kern_shard *s = &l->shard[0];
    const kern__act_plan *p = &s->plan[kern_bucket(M)];
    float *x = xmalloc((size_t)(M * ldx) * sizeof *x), *y = xmalloc((size_t)(M * ldy) * sizeof *y);
    float *w = xmalloc((size_t)(N * K) * sizeof *w);
    double *v = xmalloc((size_t)K * sizeof *v);
    for (int64_t i = 0; i < M * ldx; i++)
        x[i] = (float)(normal() * (uniform() < 0.01 ? 20 : 1));
    if (M > 2) memset(x + ldx, 0, (size_t)K * sizeof *x);
    memset(y, 0xff, (size_t)(M * ldy) * sizeof *y);
    for (int64_t n = 0; n < N; n++)
        qtensor_decode_row(q, n, w + n * K);
    kern_linear_run(dev, l, x, ldx, M, y, ldy);
    double tol = p->kind == ACT_BF16 ? (p->terms == 1 && !p->row_scale ? 1.0 / 127 : 4e-5) : 2e-6;
    /* of large batches every seventh row and the last one */
    for (int64_t m = 0; m < M; m = m + 1 < M && m + 7 >= M && M > 9 ? M - 1 : m + (M > 9 ? 7 : 1)) {
        want_input(&q->spec.a, p, x + m * ldx, K, v);
        for (int64_t n = 0; n < N; n++) {
            double sum = 0, mag = 1e-30;
            for (int64_t k = 0; k < K; k++) {
                sum += v[k] * (double)w[n * K + k];
                mag += fabs(v[k] * (double)w[n * K + k]);
            }
            /* zero points are subtracted from a sum: its magnitude counts */
            for (int64_t k = 0; q->zeros && k < K; k++)
                mag +=
                    fabs(v[k]) * (fabs((double)w[n * K + k]) + fabs((double)qtensor_zero(q, n, k)) *
                                                                   (double)qtensor_scale(q, n, k));
            double rel = fabs(y[m * ldy + n] - sum) / mag;
            if (!(rel <= tol))
                fail_msg("%s %lldx%lld M=%lld at (%lld,%lld): got %.9g, expected %.9g, off %.3g of "
                         "the magnitude (allowed %.3g)",
                         s->row[kern_bucket(M)]->name, (long long)N, (long long)K, (long long)M,
                         (long long)m, (long long)n, y[m * ldy + n], sum, rel, tol);
            if (rel > st->worst) st->worst = rel;
        }
        for (int64_t n = N; n < ldy; n++) {
            uint32_t u;
            memcpy(&u, &y[m * ldy + n], 4);
            if (u != 0xffffffffu)
                fail_msg("%s wrote past column %lld", s->row[kern_bucket(M)]->name, (long long)N);
        }
    }
    st->cases++;
    free(x);
    free(y);
    free(w);
    free(v);
}

static void unpack_is_exact(const kern_linear *l, const qtensor *q)
{
    float *u = xmalloc((size_t)(q->N * q->K) * sizeof *u), *w = xmalloc((size_t)q->K * sizeof *w);
    kern_linear_unpack(l, u);
    for (int64_t n = 0; n < q->N; n++) {
        qtensor_decode_row(q, n, w);
        for (int64_t k = 0; k < q->K; k++)
            if (fabsf(u[n * q->K + k] - w[k]) > 1e-6f * fabsf(w[k]))
                fail_msg("unpack (%lld,%lld): %g, expected %g", (long long)n, (long long)k,
                         u[n * q->K + k], w[k]);
    }
    free(u);
    free(w);
}

static void walk(const kern_linear_row *row, kern_act act)
{
    static const int64_t shapes[][2] = {{1, 64},   {15, 33}, {16, 17}, {17, 172},
                                        {33, 576}, {64, 64}, {65, 1},  {80, 1536}};
    static const int64_t batches[] = {1, 2, 3, 8, 9, 17, 64, 65};
    stats st = {0};
    for (int i = 0; i < N_SCHEMES; i++)
        for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++) {
            err e = {0};
            qtensor q;
            kern_linear *l = NULL;
            if (strstr(schemes[i].text, "nvfp4") && shapes[j][1] % 16) continue;
            random_weight(&q, &schemes[i], shapes[j][0], shapes[j][1]);
            kern_linear_desc d = {
                .name = schemes[i].text, .n_shards = 1, .shard = {&q}, .act = act};
            if (kern__linear_make_row(dev, &d, row, &l, &e) < 0) {
                if (e.code != ERR_UNSUPPORTED) fail_msg("%s: %s", schemes[i].text, e.msg);
                st.skipped++;
            } else {
                unpack_is_exact(l, &q);
                for (size_t b = 0; b < sizeof batches / sizeof *batches; b++) {
                    int k = kern_bucket(batches[b]);
                    /* a row with f32 inputs does under auto what it does under spec */
                    if (act == KERN_ACT_AUTO && l->shard[0].plan[k].kind == ACT_F32) continue;
                    if (l->shard[0].row[k] == row) compare(l, &q, batches[b], &st);
                }
                kern_linear_drop(dev, l);
            }
            free_weight(&q);
        }
    print_message("%-18s %-5s %5ld products, %3ld refused, worst %.2g\n", row->name,
                  kern_act_name(act), st.cases, st.skipped, st.worst);
}

static void test_rows(void **state)
{
    (void)state;
    for (int i = 0; i < kern_n_linear_rows; i++) {
        const kern_linear_row *row = kern_linear_rows[i];
        if (row->needs & ~dev->features) {
            print_message("%-18s skipped: the CPU lacks a feature\n", row->name);
            continue;
        }
        walk(row, KERN_ACT_SPEC);
        walk(row, KERN_ACT_AUTO);
    }
}

/* The same values in int4: codes widened, scales and zero points as they are. */
static void widened(const qtensor *q, const char *text, qtensor *out)
{
    err e = {0};
    qspec spec;
    CHECK_OK(qspec_parse(text, &spec, &e));
    CHECK_OK(qtensor_alloc(out, &spec, q->scale_type, 1, q->N, q->K, &e));
    int bits = num_infos[q->code].bits;
    for (int64_t n = 0; n < q->N; n++)
        for (int64_t k = 0; k < q->K; k++) {
            uint32_t c = num_get_bits(q->codes + (size_t)n * q->row_bytes, (size_t)k, bits);
            uint32_t sign = c >> (bits - 1) ? 15u << bits : 0;
            num_put_bits((uint8_t *)(uintptr_t)out->codes + (size_t)n * out->row_bytes, (size_t)k,
                         4, (c | sign) & 15);
        }
    size_t cells = (size_t)(q->scale_rows * q->scale_cols);
    assert_int_equal(out->scale_rows * out->scale_cols, cells);
    assert_int_equal(out->zero_type, q->zero_type);
    memcpy((void *)(uintptr_t)out->scales, q->scales, cells * num_bytes(q->scale_type, 1));
    if (q->zeros)
        memcpy((void *)(uintptr_t)out->zeros, q->zeros, cells * num_bytes(q->zero_type, 1));
}

static long same_numbers(const kern_linear_row *row, const qtensor *q, const qtensor *wide,
                         kern_act act)
{
    static const int64_t batches[] = {1, 2, 3, 5, 8, 9, 33, 65, 300};
    long compared = 0;
    err e = {0};
    kern_linear *l[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++) {
        kern_linear_desc d = {.name = "narrow", .n_shards = 1, .shard = {i ? wide : q}, .act = act};
        int rc = kern__linear_make_row(dev, &d, row, &l[i], &e);
        if (rc < 0 && e.code != ERR_UNSUPPORTED) fail_msg("%s: %s", row->name, e.msg);
    }
    assert_int_equal(l[0] == NULL, l[1] == NULL);
    if (l[0]) assert_string_equal(l[0]->shard[0].layout->as, l[1]->shard[0].layout->name);
    if (l[0]) assert_true(l[0]->bytes < l[1]->bytes);
    for (size_t b = 0; b < sizeof batches / sizeof *batches && l[0]; b++) {
        int64_t M = batches[b], N = q->N, K = q->K;
        if (l[0]->shard[0].row[kern_bucket(M)] != row) continue;
        float *x = xmalloc((size_t)(M * K) * sizeof *x), *y[2];
        for (int64_t i = 0; i < M * K; i++)
            x[i] = (float)normal();
        for (int i = 0; i < 2; i++) {
            y[i] = xmalloc((size_t)(M * N) * sizeof *y[i]);
            memset(y[i], i ? 0xff : 0xfe, (size_t)(M * N) * sizeof *y[i]);
            kern_linear_run(dev, l[i], x, K, M, y[i], N);
        }
        if (memcmp(y[0], y[1], (size_t)(M * N) * sizeof *x))
            fail_msg("%s of %s M=%lld: other numbers than from int4", row->name,
                     num_infos[q->code].name, (long long)M);
        compared++;
        free(x), free(y[0]), free(y[1]);
    }
    kern_linear_drop(dev, l[0]);
    kern_linear_drop(dev, l[1]);
    return compared;
}

/* Codes of two and three bits are held as such, and give the numbers of the same codes in four. */
static void test_narrow(void **state)
{
    (void)state;
    static const char *const forms[] = {"g64 a:bf16", "g32,asym a:bf16", "channel a:int8,token"};
    for (int i = 0; i < kern_n_linear_rows; i++) {
        const kern_linear_row *row = kern_linear_rows[i];
        if (!row->layout || strcmp(row->layout, "w4p16") || row->needs & ~dev->features) continue;
        long compared = 0;
        for (int bits = 2; bits <= 3; bits++)
            for (size_t f = 0; f < sizeof forms / sizeof *forms; f++)
                for (int64_t N = 1; N < 300; N = N * 3 + 14) {
                    char text[2][64];
                    qtensor q, wide;
                    snprintf(text[0], 64, "w:int%d,%s", bits, forms[f]);
                    snprintf(text[1], 64, "w:int4,%s", forms[f]);
                    random_weight(&q, &(scheme){text[0], NUM_BF16}, N, N == 17 ? 172 : 448);
                    widened(&q, text[1], &wide);
                    compared += same_numbers(row, &q, &wide, KERN_ACT_SPEC);
                    compared += same_numbers(row, &q, &wide, KERN_ACT_AUTO);
                    free_weight(&q);
                    free_weight(&wide);
                }
        print_message("%-18s narrow %5ld products equal\n", row->name, compared);
        assert_true(compared > 0);
    }
}

int main(void)
{
    err e = {0};
    kern_opts o = {.threads = 3, .cpu_features = cpu_detect()};
    if (kern_open(&dev, &o, &e) < 0) {
        fprintf(stderr, "%s\n", e.msg);
        return 1;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rows), cmocka_unit_test(test_narrow)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    kern_close(dev);
    return rc;
}
