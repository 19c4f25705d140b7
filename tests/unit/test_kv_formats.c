/* KV formats: bytes, exactly; values that come back, against arithmetic in double; head sizes that
 * no block divides (all keys in [5, 6], so that a padding zero that counted would widen every
 * range). */
#include "check.h"
#include "kv/kv.h"
#include "num/num.h"

static const int head_dims[] = {64, 80, 96, 100, 33};

/* Bytes of one head of one token, from the format's definition alone. */
static uint64_t want_code(kern_kv_type t, int D)
{
    uint64_t bits[KV_TYPES] = {[KV_BF16] = 16, [KV_FP8_E4M3] = 8, [KV_FP8_E5M2] = 8,
                               [KV_INT8] = 8,  [KV_FP4] = 4,      [KV_F32] = 32};
    return (bits[t] * (uint64_t)D + 7) / 8;
}

static uint64_t want_scale(kern_kv_type t, int D)
{
    return t == KV_INT8 ? 8 : t == KV_FP4 ? ((uint64_t)D + 15) / 16 : 0;
}

static void bytes_exact(void **state)
{
    (void)state;
    err e = {0};
    kern_dev *dev;
    CHECK_OK(kern_open(&dev, &(kern_opts){.threads = 1}, &e));
    assert_int_equal(kv_n_formats, KV_TYPES);
    for (int f = 0; f < kv_n_formats; f++)
        for (size_t i = 0; i < sizeof head_dims / sizeof *head_dims; i++) {
            kern_kv_type t = kv_formats[f].type;
            int D = head_dims[i];
            kv_layer_shape layers[] = {
                {.Hk = 8, .D = D}, {.Hk = 2, .D = D, .window = 32}, {.Hk = 1, .D = 64}};
            kv_sizes s;
            kv_pool *p;
            kv_sizes_of(t, layers, 3, 16, &s);
            uint64_t code = 2 * (10 * want_code(t, D) + want_code(t, 64)),
                     scale = 2 * (10 * want_scale(t, D) + want_scale(t, 64));
            assert_int_equal(s.code_bytes, code);
            assert_int_equal(s.scale_bytes, scale);
            assert_int_equal(s.token_bytes, code + scale);
            assert_int_equal(s.page_bytes, 16 * (code + scale)); /* nothing is padded */
            CHECK_OK(kv_pool_open(
                &p, dev,
                &(kv_pool_opts){
                    .type = t, .n_layers = 3, .layers = layers, .page_tokens = 16, .n_pages = 5},
                &e));
            assert_int_equal(kv_pool_bytes(p), 5 * s.page_bytes);
            kv_pool_close(p);
        }
    kern_close(dev);
}

/* What a format may do to x at most, given the extremes and amax of its block. */
static double bound(kern_kv_type t, double x, double lo, double hi, double amax)
{
    switch (t) {
    case KV_F32:
        return 0;
    case KV_BF16:
        return fabs(x) / 256;
    case KV_FP8_E4M3:
        return fabs(x) / 16 + 1e-3;
    case KV_FP8_E5M2:
        return fabs(x) / 8 + 1e-5;
    case KV_INT8:
        return (hi - lo) / 510 + 1e-5;
    default:
        return amax <= 0 ? 0 : exp2(ceil(log2(amax / 6))); /* half of the widest step, 4 to 6 */
    }
}

static void store_and_read(kern_dev *dev, kern_kv_type t, int D, float lo, float hi)
{
    enum { Hk = 2, T = 37, PT = 16 };
    err e = {0};
    kv_pool *p;
    kv_layer_shape shape = {.Hk = Hk, .D = D};
    CHECK_OK(kv_pool_open(
        &p, dev,
        &(kv_pool_opts){
            .type = t, .n_layers = 1, .layers = &shape, .page_tokens = PT, .n_pages = 4},
        &e));
    const kern_kv_layer *l = kv_pool_layer(p, 0);
    memset(l->base, 0xA5, 4 * l->page_stride); /* poison: nothing unset may be read */
    int64_t ld = (int64_t)Hk * D;
    float *k = malloc(sizeof *k * (size_t)(T * ld)), *v = malloc(sizeof *v * (size_t)(T * ld)),
          *back = malloc(sizeof *back * (size_t)(T * D));
    int32_t slot[T], pages[] = {2, 0, 3};
    uint64_t rng = 99;
    for (int64_t i = 0; i < T * ld; i++) {
        rng = rng * 6364136223846793005u + 1442695040888963407u;
        k[i] = lo + (hi - lo) * (float)(rng >> 40) / 16777216.0f;
        v[i] = -k[i];
    }
    for (int i = 0; i < T; i++)
        slot[i] = pages[i / PT] * PT + i % PT;
    assert_int_equal(kern_kv_store(dev, l, k, ld, v, ld, slot, T), 0);
    for (int which = 0; which < 2; which++)
        for (int h = 0; h < Hk; h++) {
            kern_kv_read(l, which, h, pages, 0, T, back);
            for (int i = 0; i < T; i++)
                for (int d = 0; d < D; d++) {
                    const float *row = (which ? v : k) + i * ld + h * D;
                    double mn = row[0], mx = row[0], amax = 0;
                    for (int j = 0; j < D; j++) {
                        mn = fmin(mn, (double)row[j]);
                        mx = fmax(mx, (double)row[j]);
                    }
                    for (int j = d / 16 * 16; j < D && j < d / 16 * 16 + 16; j++)
                        amax = fmax(amax, fabs((double)row[j]));
                    double got = back[i * D + d], x = row[d];
                    if (!(fabs(got - x) <= bound(t, x, mn, mx, amax)))
                        fail_msg("type %d D %d token %d lane %d: %g came back as %g", (int)t, D, i,
                                 d, x, got);
                }
        }
    free(k);
    free(v);
    free(back);
    kv_pool_close(p);
}

static void values_come_back(void **state)
{
    (void)state;
    err e = {0};
    for (int wide = 0; wide < 2; wide++) {
        kern_dev *dev;
        kern_opts o = {.threads = 2};
        CHECK_OK(cpu_parse(wide ? "auto" : "portable", &o.cpu_features, &e));
        CHECK_OK(kern_open(&dev, &o, &e));
        for (int f = 0; f < kv_n_formats; f++)
            for (size_t i = 0; i < sizeof head_dims / sizeof *head_dims; i++) {
                store_and_read(dev, kv_formats[f].type, head_dims[i], 5, 6);
                store_and_read(dev, kv_formats[f].type, head_dims[i], -3, 3);
                store_and_read(dev, kv_formats[f].type, head_dims[i], 0, 0);
            }
        kern_close(dev);
    }
}

static void overflow_is_counted(void **state)
{
    (void)state;
    err e = {0};
    kern_dev *dev;
    CHECK_OK(kern_open(&dev, &(kern_opts){.threads = 1}, &e));
    for (int f = 0; f < kv_n_formats; f++) {
        kern_kv_type t = kv_formats[f].type;
        kv_pool *p;
        kv_layer_shape shape = {.Hk = 1, .D = 32};
        float k[32], v[32], back[32];
        int32_t slot = 3, page = 0;
        for (int i = 0; i < 32; i++)
            k[i] = v[i] = 1;
        k[4] = 600;
        k[20] = -600;
        CHECK_OK(kv_pool_open(
            &p, dev,
            &(kv_pool_opts){
                .type = t, .n_layers = 1, .layers = &shape, .page_tokens = 16, .n_pages = 1},
            &e));
        uint64_t clipped = kern_kv_store(dev, kv_pool_layer(p, 0), k, 32, v, 32, &slot, 1);
        assert_int_equal(clipped, t == KV_FP8_E4M3 ? 2 : 0);
        kern_kv_read(kv_pool_layer(p, 0), 0, 0, &page, 3, 1, back);
        for (int i = 0; i < 32; i++)
            assert_true(isfinite(back[i]));
        if (t == KV_FP8_E4M3) {
            assert_float_equal(back[4], 448, 0);
            assert_float_equal(back[20], -448, 0);
        }
        kv_pool_close(p);
    }
    kern_close(dev);
}

/* With a scale, the range is scale x 448 and a value comes back times the scale. */
static void static_scales(void **state)
{
    (void)state;
    err e = {0};
    kern_dev *dev;
    kv_pool *p;
    kv_layer_shape shape = {.Hk = 2, .D = 16};
    float ks[2] = {2, 0.5f}, k[32], v[32], back[16];
    const float *k_scale[1] = {ks}, *v_scale[1] = {NULL};
    int32_t slot = 0, page = 0;
    CHECK_OK(kern_open(&dev, &(kern_opts){.threads = 1}, &e));
    CHECK_OK(kv_pool_open(&p, dev,
                          &(kv_pool_opts){.type = KV_FP8_E4M3,
                                          .n_layers = 1,
                                          .layers = &shape,
                                          .page_tokens = 16,
                                          .n_pages = 1,
                                          .k_scale = k_scale,
                                          .v_scale = v_scale},
                          &e));
    for (int i = 0; i < 32; i++)
        k[i] = v[i] = 300;
    /* Head 0 holds 150, head 1 would hold 600, which is clipped. */
    assert_int_equal(kern_kv_store(dev, kv_pool_layer(p, 0), k, 32, v, 32, &slot, 1), 16);
    kern_kv_read(kv_pool_layer(p, 0), 0, 0, &page, 0, 1, back);
    assert_float_equal(back[0], 2 * num_round(NUM_F8_E4M3, 150), 0);
    kern_kv_read(kv_pool_layer(p, 0), 0, 1, &page, 0, 1, back);
    assert_float_equal(back[0], 224, 0); /* 448 times 0.5 */
    kern_kv_read(kv_pool_layer(p, 0), 1, 1, &page, 0, 1, back);
    assert_float_equal(back[0], num_round(NUM_F8_E4M3, 300), 0);
    kv_pool_close(p);
    kern_close(dev);
}

static void names(void **state)
{
    (void)state;
    err e = {0};
    const kv_format *f;
    for (int i = 0; i < kv_n_formats; i++) {
        CHECK_OK(kv_format_parse(kv_formats[i].name, &f, &e));
        assert_ptr_equal(f, &kv_formats[i]);
    }
    CHECK_OK(kv_format_parse("fp8", &f, &e));
    assert_int_equal(f->type, KV_FP8_E4M3);
    CHECK_ERR(kv_format_parse("fp9", &f, &e), ERR_USAGE, "fp8_e5m2");
    CHECK_ERR(kv_format_parse("", &f, &e), ERR_USAGE, "bf16");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_exact),
        cmocka_unit_test(values_come_back),
        cmocka_unit_test(overflow_is_counted),
        cmocka_unit_test(static_scales),
        cmocka_unit_test(names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
