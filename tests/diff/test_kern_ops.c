/* The small operators, the KV store and attention, for each instruction set that this CPU has and
 * for the plain C twin, against the formulas in double written out again here. */
#include "kern_fixture.h"

static void test_norm(void **state)
{
    (void)state;
    static const int64_t sizes[] = {1, 7, 16, 33, 64, 172, 576};
    for (int i = 0; i < N_ISAS; i++)
        for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++) {
            int64_t K = sizes[j], T = 65;
            float *x = randoms(T * K), *y = randoms(T * K), *w = randoms(K), *o = randoms(T * K),
                  *x0 = randoms(T * K);
            memcpy(x0, x, (size_t)(T * K) * sizeof *x);
            kern_add_rmsnorm(isas[i].dev, x, y, w, 1e-5f, T, K, o);
            for (int64_t t = 0; t < T; t++) {
                double ss = 0;
                for (int64_t k = 0; k < K; k++) {
                    float v = x0[t * K + k] + y[t * K + k];
                    near("add", isas[i].name, x[t * K + k], v, 0);
                    ss += (double)v * v;
                }
                double r = 1 / sqrt(ss / (double)K + 1e-5f);
                for (int64_t k = 0; k < K; k++) {
                    double want = (double)x[t * K + k] * r * w[k];
                    near("rmsnorm", isas[i].name, o[t * K + k], want, 1e-6 * fabs(want) + 1e-30);
                }
            }
            kern_rmsnorm(isas[i].dev, x0, w, 1e-5f, T, K, o);
            double ss = 0;
            for (int64_t k = 0; k < K; k++)
                ss += (double)x0[k] * x0[k];
            double want = (double)x0[K - 1] / sqrt(ss / (double)K + 1e-5f) * w[K - 1];
            near("rmsnorm", isas[i].name, o[K - 1], want, 1e-6 * fabs(want) + 1e-30);
            free(x), free(y), free(w), free(o), free(x0);
        }
}

static double act_of(kern_glu a, double x)
{
    switch (a) {
    case KERN_SILU:
        return x / (1 + exp(-x));
    case KERN_GELU_TANH:
        return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    case KERN_GELU:
        return 0.5 * x * (1 + erf(x / sqrt(2)));
    case KERN_RELU2:
        return x > 0 ? x * x : 0;
    case KERN_QUICK_GELU:
        return x / (1 + exp(-1.702 * x));
    case KERN_SWIGLU_OAI:
        x = fmin(x, 7);
        return x / (1 + exp(-1.702 * x));
    default:
        return x > 0 ? x : 0;
    }
}

/* The exponential is tested through silu at 200001 points: relative error of x/(1+e^-x). */
static void test_glu(void **state)
{
    (void)state;
    int64_t F = 200001;
    float *gu = xmalloc((size_t)(2 * F) * sizeof *gu), *o = xmalloc((size_t)F * sizeof *o);
    for (int i = 0; i < N_ISAS; i++)
        for (int a = 0; a < KERN_GLU_COUNT; a++) {
            double worst = 0;
            for (int64_t k = 0; k < F; k++) {
                gu[k] = (float)(-100.0 + 200.0 * (double)k / (double)(F - 1));
                gu[F + k] = k % 3 ? 1.0f : (float)(k % 37) - 18.0f;
            }
            memset(o, 0xff, (size_t)F * sizeof *o);
            kern_glu_mul(isas[i].dev, (kern_glu)a, gu, 2 * F, F, 1, o);
            for (int64_t k = 0; k < F; k++) {
                double u = gu[F + k], f = a == KERN_SWIGLU_OAI ? fmax(fmin(u, 7), -7) + 1 : u;
                double want = act_of((kern_glu)a, gu[k]) * f, err_abs = fabs(o[k] - want);
                /* gelu near its zero is a difference of equal numbers: absolute there */
                double tol = a == KERN_SILU ? 8e-7 * fabs(want) + 1e-36 * fmax(1, fabs(f))
                                            : 1e-6 * fabs(want) + 3e-7 * fmax(1, fabs(f));
                if (!(err_abs <= tol))
                    fail_msg("glu %d (%s) at %g: got %g, expected %g", a, isas[i].name, gu[k], o[k],
                             want);
                if (a == KERN_SILU && want != 0 && err_abs / fabs(want) > worst &&
                    fabs(want) > 1e-30)
                    worst = err_abs / fabs(want);
            }
            float *both = poisoned(2 * F + 6);
            kern_act_apply(isas[i].dev, (kern_glu)a, gu, F, F - 3, 2, both, F + 3);
            for (int64_t k = 0; k < 2 * (F + 3); k++) {
                int64_t t = k / (F + 3), f = k % (F + 3);
                if (f >= F - 3)
                    assert_true(both[k] != both[k]); /* untouched */
                else
                    near("act", isas[i].name, both[k], act_of((kern_glu)a, gu[t * F + f]),
                         1e-6 * fabs(both[k]) + 3e-7);
            }
            free(both);
            if (a == KERN_SILU)
                print_message("silu %-8s worst relative error %.2g\n", isas[i].name, worst);
        }
    free(gu), free(o);
}

static void test_rope(void **state)
{
    (void)state;
    static const int dims[][2] = {{64, 64}, {64, 32}, {80, 80}, {8, 6}, {128, 128}};
    for (int i = 0; i < N_ISAS; i++)
        for (size_t j = 0; j < sizeof dims / sizeof *dims; j++) {
            int D = dims[j][0], rot = dims[j][1], H = 3, Hk = 1, T = 5, half = rot / 2;
            float *q = randoms(T * H * D), *k = randoms(T * Hk * D), *c = randoms(T * half),
                  *s = randoms(T * half);
            float *q0 = xmalloc((size_t)(T * H * D) * sizeof *q0);
            memcpy(q0, q, (size_t)(T * H * D) * sizeof *q0);
            kern_rope(isas[i].dev, q, H * D, H, k, Hk * D, Hk, D, rot, c, s, T);
            for (int t = 0; t < T; t++)
                for (int h = 0; h < H; h++)
                    for (int d = 0; d < D; d++) {
                        const float *x = q0 + (t * H + h) * D;
                        int p = d % half;
                        double want = d >= rot   ? x[d]
                                      : d < half ? (double)x[p] * c[t * half + p] -
                                                       (double)x[p + half] * s[t * half + p]
                                                 : (double)x[p + half] * c[t * half + p] +
                                                       (double)x[p] * s[t * half + p];
                        near("rope", isas[i].name, q[(t * H + h) * D + d], want,
                             2e-4 * 1e-2 + 1e-6 * fabs(want));
                    }
            free(q), free(k), free(c), free(s), free(q0);
        }
}

/* Vector rounding of inputs gives the very codes of the twin. */
static void test_rounding(void **state)
{
    (void)state;
    int64_t n = 100003;
    float *v = randoms(n), *a = xmalloc((size_t)n * sizeof *a), *b = xmalloc((size_t)n * sizeof *b);
    int8_t *c = xmalloc((size_t)n), *d = xmalloc((size_t)n);
    uint16_t *h = xmalloc((size_t)n * 4), *g = xmalloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++)
        v[i] *= (float)exp(-12 * uniform());
    for (int i = 0; i < N_ISAS; i++) {
        const kern__ops *o = KERN__OPS(isas[i].dev), *r = &kern__ops_ref;
        for (int f = 0; f < 2; f++) {
            memcpy(a, v, (size_t)n * sizeof *a);
            memcpy(b, v, (size_t)n * sizeof *b);
            o->round_fp8(a, n, 0.037f, f ? 57344.0f : 448.0f, 0.037f);
            r->round_fp8(b, n, 0.037f, f ? 57344.0f : 448.0f, 0.037f);
            for (int64_t k = 0; k < n; k++)
                near("fp8", isas[i].name, a[k], b[k], 0);
        }
        int32_t s1 = o->quant_i8(v, n, 0.1f, -127, 127, c),
                s2 = r->quant_i8(v, n, 0.1f, -127, 127, d);
        assert_int_equal(s1, s2);
        assert_memory_equal(c, d, (size_t)n);
        o->split_bf16(v, n, h, h + n);
        r->split_bf16(v, n, g, g + n);
        assert_memory_equal(h, g, (size_t)n * 4);
        near("amax", isas[i].name, o->amax(v, n), r->amax(v, n), 0);
    }
    free(v), free(a), free(b), free(c), free(d), free(h), free(g);
}

/* ---- KV ---------------------------------------------------------------------------------- */

static const char *const kv_names[KV_TYPES] = {"bf16", "fp8_e4m3", "fp8_e5m2",
                                               "int8", "fp4",      "f32"};

typedef struct cache {
    kern_kv_layer kv;
    void *mem;
    float ks[8], vs[8];
    int32_t pages[64];
} cache;

static void cache_open(cache *c, kern_kv_type t, int Hk, int D, int v_in_k, int page_tokens,
                       int n_pages)
{
    err e = {0};
    memset(c, 0, sizeof *c);
    c->kv =
        (kern_kv_layer){.type = t, .Hk = Hk, .D = D, .v_in_k = v_in_k, .page_tokens = page_tokens};
    c->kv.page_stride = kern_kv_page_bytes(t, Hk, D, v_in_k, page_tokens) + 3 * 64;
    CHECK_OK(mem_alloc(&c->mem, c->kv.page_stride * (size_t)n_pages, &e));
    memset(c->mem, 0xff, c->kv.page_stride * (size_t)n_pages);
    c->kv.base = c->mem;
    for (int i = 0; i < 8; i++) {
        c->ks[i] = 0.02f + 0.01f * (float)i;
        c->vs[i] = 0.05f + 0.02f * (float)i;
    }
    c->kv.k_scale = c->ks;
    c->kv.v_scale = c->vs;
    for (int i = 0; i < n_pages; i++)
        c->pages[i] = (i * 7 + 3) % n_pages; /* n_pages not a multiple of 7 */
}

static double half_step(kern_kv_type t, const float *x, int D, int i, double scale)
{
    double a = fabs((double)x[i]) / scale, amax = 0, lo = x[0], hi = x[0];
    if (t == KV_F32) return 0;
    if (t == KV_BF16) return ldexp(a * scale, -8);
    if (t == KV_FP8_E4M3) return scale * fmax(a / 16, 1.0 / 1024);
    if (t == KV_FP8_E5M2) return scale * fmax(a / 8, ldexp(1, -17));
    if (t == KV_INT8) {
        for (int k = 0; k < D; k++) {
            lo = fmin(lo, (double)x[k]);
            hi = fmax(hi, (double)x[k]);
        }
        return (hi - lo) / 255 * 0.5001 + 1e-6 * fmax(fabs(lo), fabs(hi));
    }
    for (int k = i / 16 * 16; k < D && k < i / 16 * 16 + 16; k++)
        amax = fmax(amax, fabs((double)x[k]));
    return amax / 6 * 2; /* spacing 2 at the top, scale at most doubled by the ceiling */
}

static void test_kv_store(void **state)
{
    (void)state;
    static const int dims[] = {64, 80, 20, 7, 128, 96, 100, 160, 256, 512};
    for (int i = 0; i < N_ISAS; i++)
        for (int t = 0; t < KV_TYPES; t++)
            for (size_t j = 0; j < sizeof dims / sizeof *dims; j++) {
                int D = dims[j], Hk = 3, T = 37, pt = 16;
                cache c;
                cache_open(&c, (kern_kv_type)t, Hk, D, 0, pt, 5);
                int64_t ld = Hk * D + 2;
                float *k = randoms(T * ld), *v = randoms(T * ld),
                      *out = xmalloc((size_t)(T * D) * sizeof *out);
                for (int d = 0; d < D; d++)
                    k[3 * ld + d] = 0; /* an all-zero token */
                if (t == KV_FP8_E4M3) {
                    for (int64_t n = 0; n < T * ld; n++)
                        k[n] = fminf(fmaxf(k[n], -8), 8), v[n] = fminf(fmaxf(v[n], -8), 8);
                    k[5] = 1e6f; /* two clipped elements, one of each sign */
                    v[ld + 7 + 2 * D - 1] = -1e6f;
                }
                int32_t slot[64];
                for (int n = 0; n < T; n++)
                    slot[n] = c.pages[n / pt] * pt + n % pt;
                uint64_t clipped = kern_kv_store(isas[i].dev, &c.kv, k, ld, v, ld, slot, T);
                assert_int_equal(clipped, t == KV_FP8_E4M3 ? 2 : 0);
                for (int which = 0; which < 2; which++)
                    for (int h = 0; h < Hk; h++) {
                        kern_kv_read(&c.kv, which, h, c.pages, 0, T, out);
                        double s = t == KV_FP8_E4M3 || t == KV_FP8_E5M2
                                       ? (which ? c.vs[h] : c.ks[h])
                                       : 1.0;
                        for (int n = 0; n < T; n++)
                            for (int d = 0; d < D; d++) {
                                const float *x = (which ? v : k) + n * ld + h * D;
                                double want = x[d];
                                if (fabs(want) > 1e5) want = want > 0 ? 448 * s : -448 * s;
                                double tol =
                                    fabs((double)x[d]) > 1e5
                                        ? 1e-4
                                        : half_step((kern_kv_type)t, x, D, d, s) * 1.0001 + 1e-30;
                                near(kv_names[t], isas[i].name, out[n * D + d], want, tol);
                            }
                    }
                mem_free(c.mem);
                free(k), free(v), free(out);
            }
}

/* Head sizes that are no multiple of a block: lanes that do not exist count in no minimum and no
 * maximum. With all keys in [5,6] one zero would make the steps of int8 six times as wide. */
static void test_kv_padding(void **state)
{
    (void)state;
    static const int dims[] = {80, 96, 100, 7, 40, 576};
    for (int i = 0; i < N_ISAS; i++)
        for (size_t j = 0; j < sizeof dims / sizeof *dims; j++) {
            int D = dims[j], T = 9;
            float *k = xmalloc((size_t)(T * D) * sizeof *k), *back = poisoned(T * D);
            int32_t slot[9];
            for (int n = 0; n < T * D; n++)
                k[n] = (float)(5 + uniform());
            cache c;
            for (int t = 0; t < KV_TYPES; t++) {
                cache_open(&c, (kern_kv_type)t, 1, D, 0, 4, 3);
                for (int n = 0; n < T; n++)
                    slot[n] = c.pages[n / 4] * 4 + n % 4;
                c.kv.k_scale = c.kv.v_scale = NULL;
                kern_kv_store(isas[i].dev, &c.kv, k, D, k, D, slot, T);
                kern_kv_read(&c.kv, 1, 0, c.pages, 0, T, back);
                double tol = t == KV_INT8       ? 0.5001 / 255
                             : t == KV_FP8_E4M3 ? 0.25
                             : t == KV_FP8_E5M2 ? 0.5
                             : t == KV_FP4      ? 1.0 /* 6 steps by 2 below the top */
                             : t == KV_BF16     ? 0.016
                                                : 0;
                for (int n = 0; n < T * D; n++)
                    near(kv_names[t], isas[i].name, back[n], k[n], tol + 1e-6);
                mem_free(c.mem);
            }
            free(k), free(back);
        }
}

/* A latent cache has one plane: its values are lanes of its keys, and nothing lies behind them. */
static void test_kv_latent(void **state)
{
    (void)state;
    static const int dims[][2] = {{576, 512}, {40, 32}, {37, 32}};
    for (int i = 0; i < N_ISAS; i++)
        for (int t = 0; t < KV_TYPES; t++)
            for (size_t j = 0; j < sizeof dims / sizeof *dims; j++) {
                int D = dims[j][0], V = dims[j][1], T = 21, pt = 8;
                cache c;
                cache_open(&c, (kern_kv_type)t, 1, D, V, pt, 3);
                assert_int_equal(2 * kern_kv_page_bytes((kern_kv_type)t, 1, D, V, pt),
                                 kern_kv_page_bytes((kern_kv_type)t, 1, D, 0, pt));
                float *k = randoms(T * D), *all = poisoned(T * D), *v = poisoned(T * V);
                int32_t slot[21];
                for (int n = 0; n < T; n++)
                    slot[n] = c.pages[n / pt] * pt + n % pt;
                kern_kv_store(isas[i].dev, &c.kv, k, D, NULL, 0, slot, T);
                kern_kv_read(&c.kv, 0, 0, c.pages, 0, T, all);
                kern_kv_read(&c.kv, 1, 0, c.pages, 0, T, v);
                for (int n = 0; n < T; n++) {
                    assert_memory_equal(v + n * V, all + n * D, (size_t)V * sizeof *v);
                    for (int d = 0; d < D; d++)
                        near(kv_names[t], isas[i].name, all[n * D + d], k[n * D + d],
                             half_step((kern_kv_type)t, k + n * D, D, d,
                                       t == KV_INT8 ? 1 : c.ks[0]) *
                                     1.0001 +
                                 (t == KV_FP8_E4M3 ? fmax(0, fabs((double)k[n * D + d]) - 8.96)
                                                   : 0));
                }
                for (int p = 0; p < 3; p++)
                    for (size_t b = kern_kv_page_bytes((kern_kv_type)t, 1, D, V, pt);
                         b < c.kv.page_stride; b++)
                        assert_int_equal(c.kv.base[(size_t)p * c.kv.page_stride + b], 0xff);
                mem_free(c.mem);
                free(k), free(all), free(v);
            }
}

/* ---- attention --------------------------------------------------------------------------- */

typedef struct attn_case {
    int Hk, G, D, window, page_tokens;
    int kv_len[3], n_rows[3];
    int v_in_k;
    float softcap;
    bool sinks;
} attn_case;
static const attn_case cases[] = {
    {3, 3, 64, 0, 16, .kv_len = {1, 70, 33}, .n_rows = {1, 1, 33}},
    {1, 1, 64, 0, 16, .kv_len = {200, 0, 0}, .n_rows = {200, 0, 0}},
    {3, 3, 64, 0, 16, .kv_len = {700, 0, 0}, .n_rows = {1, 0, 0}},
    {2, 4, 80, 0, 16, .kv_len = {300, 5, 17}, .n_rows = {2, 5, 1}},
    {1, 2, 20, 0, 8, .kv_len = {60, 130, 0}, .n_rows = {60, 2, 0}},
    {2, 1, 7, 0, 16, .kv_len = {40, 1, 0}, .n_rows = {9, 1, 0}},
    {2, 3, 64, 40, 16, .kv_len = {200, 33, 0}, .n_rows = {100, 1, 0}},
    {1, 8, 128, 100, 16, .kv_len = {600, 0, 0}, .n_rows = {1, 0, 0}},
    {1, 60, 16, 0, 16, .kv_len = {50, 0, 0}, .n_rows = {3, 0, 0}},
    /* head dims that are no power of two, and the largest */
    {2, 2, 96, 0, 16, .kv_len = {70, 9, 0}, .n_rows = {3, 9, 0}},
    {1, 3, 100, 0, 16, .kv_len = {70, 9, 0}, .n_rows = {1, 9, 0}},
    {1, 2, 160, 0, 16, .kv_len = {90, 0, 0}, .n_rows = {2, 0, 0}},
    {1, 2, 256, 0, 16, .kv_len = {70, 0, 0}, .n_rows = {1, 0, 0}},
    {1, 2, 512, 0, 16, .kv_len = {70, 0, 0}, .n_rows = {9, 0, 0}},
    /* latent caches: values are lanes of the keys */
    {1, 16, 576, 0, 16, .kv_len = {140, 5, 0}, .n_rows = {1, 5, 0}, .v_in_k = 512},
    {1, 4, 40, 0, 16, .kv_len = {70, 300, 0}, .n_rows = {70, 1, 0}, .v_in_k = 32},
    {1, 4, 36, 0, 16, .kv_len = {70, 30, 0}, .n_rows = {20, 1, 0}, .v_in_k = 25},
    {1, 128, 48, 0, 16, .kv_len = {90, 7, 0}, .n_rows = {1, 7, 0}, .v_in_k = 32},
    {1, 100, 24, 0, 16, .kv_len = {600, 0, 0}, .n_rows = {1, 0, 0}, .v_in_k = 16},
    /* soft caps and sinks, with and without a window */
    {2, 3, 64, 0, 16, .kv_len = {70, 700, 0}, .n_rows = {70, 1, 0}, .softcap = 5},
    {2, 3, 64, 40, 16, .kv_len = {200, 33, 0}, .n_rows = {100, 1, 0}, .softcap = 20},
    {2, 4, 64, 0, 16, .kv_len = {1, 70, 300}, .n_rows = {1, 70, 1}, .sinks = true},
    {2, 4, 64, 33, 16, .kv_len = {200, 33, 700}, .n_rows = {100, 1, 1}, .sinks = true},
    {1, 3, 20, 9, 8, .kv_len = {60, 130, 0}, .n_rows = {60, 2, 0}, .sinks = true, .softcap = 3},
    {1, 16, 72, 0, 16, .kv_len = {900, 5, 0}, .n_rows = {1, 5, 0}, .v_in_k = 64, .sinks = true},
};

static double attend(const attn_case *c, const cache *kc, const kern_seq *q, const float *qv,
                     const float *sinks, int row, int h, double *out)
{
    int D = c->D, Dv = c->v_in_k ? c->v_in_k : D, hk = h / c->G, pos = q->kv_len - q->n_rows + row;
    int lo = c->window && pos - c->window + 1 > 0 ? pos - c->window + 1 : 0;
    float *k = xmalloc((size_t)D * sizeof *k);
    double *s = xmalloc((size_t)(pos + 1) * sizeof *s), max = -INFINITY, sum = 0, amax = 0;
    for (int t = lo; t <= pos; t++) {
        kern_kv_read(&kc->kv, 0, hk, q->pages, t, 1, k);
        s[t] = 0;
        for (int d = 0; d < D; d++)
            s[t] += (double)qv[d] * k[d];
        s[t] /= sqrt(D);
        if (c->softcap > 0) s[t] = c->softcap * tanh(s[t] / c->softcap);
        max = s[t] > max ? s[t] : max;
    }
    if (sinks) {
        max = fmax(max, (double)sinks[h]);
        sum = exp(sinks[h] - max);
    }
    for (int d = 0; d < Dv; d++)
        out[d] = 0;
    for (int t = lo; t <= pos; t++) {
        double p = exp(s[t] - max);
        sum += p;
        kern_kv_read(&kc->kv, c->v_in_k ? 0 : 1, hk, q->pages, t, 1, k);
        for (int d = 0; d < Dv; d++) {
            out[d] += p * k[d];
            amax = fmax(amax, fabs((double)k[d]));
        }
    }
    for (int d = 0; d < Dv; d++)
        out[d] /= sum;
    free(k), free(s);
    return amax;
}

static void fail_attention(const isa *on, const attn_case *c, kern_kv_type type, int s, int r,
                           int h, int d, double got, double want)
{
    fail_msg(
        "attention %s %s Hk=%d G=%d D=%d window=%d v_in_k=%d softcap=%g sinks=%d: seq %d row %d "
        "head %d lane %d: got %g, expected %g",
        on->name, kv_names[type], c->Hk, c->G, c->D, c->window, c->v_in_k, c->softcap, c->sinks, s,
        r, h, d, got, want);
}

static void run_case(const isa *on, const attn_case *c, kern_kv_type type, double *worst)
{
    cache kc;
    kern_seq seqs[3];
    int n_seqs = 0, pages = 0, T = 0, D = c->D, H = c->Hk * c->G, Dv = c->v_in_k ? c->v_in_k : D;
    cache_open(&kc, type, c->Hk, D, c->v_in_k, c->page_tokens, 64);
    for (int s = 0; s < 3 && c->kv_len[s]; s++) {
        int n = c->kv_len[s];
        float *k = randoms((int64_t)n * c->Hk * D), *v = randoms((int64_t)n * c->Hk * D);
        int32_t *slot = xmalloc((size_t)n * sizeof *slot);
        for (int t = 0; t < n; t++)
            slot[t] = kc.pages[pages + t / c->page_tokens] * c->page_tokens + t % c->page_tokens;
        kern_kv_store(on->dev, &kc.kv, k, c->Hk * D, c->v_in_k ? NULL : v, c->Hk * D, slot, n);
        seqs[n_seqs++] = (kern_seq){T, c->n_rows[s], n, kc.pages + pages};
        T += c->n_rows[s];
        /* Pages that the window has passed are given back: their entries lead nowhere. */
        int first = n - c->n_rows[s];
        for (int p = 0; c->window && (p + 1) * c->page_tokens <= first - c->window + 1; p++)
            kc.pages[pages + p] = -(1 << 28);
        pages += (n + c->page_tokens - 1) / c->page_tokens;
        free(k), free(v), free(slot);
    }
    int64_t ldq = H * D + 5, ldo = H * Dv + 1;
    float *q = randoms(T * ldq), *o = poisoned(T * ldo), *sinks = randoms(H);
    double *want = xmalloc((size_t)D * sizeof *want);
    kern_attn_args a = {.q = q,
                        .ldq = ldq,
                        .out = o,
                        .ldo = ldo,
                        .H = H,
                        .scale = (float)(1 / sqrt(D)),
                        .window = c->window,
                        .softcap = c->softcap,
                        .sinks = c->sinks ? sinks : NULL,
                        .kv = &kc.kv,
                        .seqs = seqs,
                        .n_seqs = n_seqs};
    kern_attention(on->dev, &a);
    for (int s = 0; s < n_seqs; s++)
        for (int r = 0; r<seqs[s].n_rows; r += seqs[s].n_rows> 40 ? 7 : 1)
            for (int h = 0; h < H; h++) {
                int64_t t = seqs[s].row0 + r;
                double mag = attend(c, &kc, &seqs[s], q + t * ldq + h * D, a.sinks, r, h, want);
                for (int d = 0; d < Dv; d++) {
                    double got = o[t * ldo + h * Dv + d], off = fabs(got - want[d]) / mag;
                    if (!(off <= 2e-5)) fail_attention(on, c, type, s, r, h, d, got, want[d]);
                    *worst = off > *worst ? off : *worst;
                }
            }
    float last = o[T * ldo - 1]; /* the column after the last head */
    assert_true(last != last);
    free(sinks);
    free(q), free(o), free(want);
    mem_free(kc.mem);
}

static void test_attention(void **state)
{
    (void)state;
    for (int i = 0; i < N_ISAS - 1; i++)
        for (int t = 0; t < KV_TYPES; t++) {
            double worst = 0;
            for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
                run_case(&isas[i], &cases[c], (kern_kv_type)t, &worst);
            print_message("attention %-8s %-8s worst %.2g of the largest value\n", isas[i].name,
                          kv_names[t], worst);
        }
}

static void test_embed(void **state)
{
    (void)state;
    float table[40 * 33], out[3 * 33];
    int32_t ids[] = {39, 0, 7};
    for (int i = 0; i < 40 * 33; i++)
        table[i] = normal();
    qtensor q;
    qtensor_plain(&q, NUM_F32, 40, 33, table);
    kern_embed(isas[0].dev, &q, ids, 3, out);
    for (int t = 0; t < 3; t++)
        assert_memory_equal(out + t * 33, table + ids[t] * 33, 33 * sizeof *out);
}

int main(void)
{
    isas_open();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norm),      cmocka_unit_test(test_glu),
        cmocka_unit_test(test_rope),      cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_kv_store),  cmocka_unit_test(test_kv_padding),
        cmocka_unit_test(test_kv_latent), cmocka_unit_test(test_attention),
        cmocka_unit_test(test_embed)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    isas_close();
    return rc;
}
