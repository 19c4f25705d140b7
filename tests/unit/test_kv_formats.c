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
            kv_layer_shape layers[] = {{.Hk = 8, .D = D},
                                       {.Hk = 2, .D = D, .window = 32},
                                       {.Hk = 1, .D = 64},
                                       {.Hk = 1, .D = 2 * D, .v_in_k = D},
                                       {.state_floats = 1000}};
            kv_sizes s;
            kv_pool *p;
            kv_sizes_of(t, layers, 5, 16, &s);
            /* K and V of 8 full and 2 windowed heads, one head of its own size; K alone (MLA) */
            uint64_t full_code = 16 * want_code(t, D) + 2 * want_code(t, 64) + want_code(t, 2 * D),
                     full_scale =
                         16 * want_scale(t, D) + 2 * want_scale(t, 64) + want_scale(t, 2 * D),
                     window_code = 4 * want_code(t, D), window_scale = 4 * want_scale(t, D);
            assert_int_equal(s.code_bytes, full_code + window_code);
            assert_int_equal(s.scale_bytes, full_scale + window_scale);
            assert_int_equal(s.token_bytes, s.code_bytes + s.scale_bytes);
            assert_int_equal(s.group_bytes[KV_FULL],
                             16 * (full_code + full_scale)); /* no padding */
            assert_int_equal(s.group_bytes[KV_WINDOW], 16 * (window_code + window_scale));
            assert_int_equal(s.page_bytes, 16 * s.token_bytes);
            assert_int_equal(s.state_bytes, 4 * 1000);
            CHECK_OK(kv_pool_open(&p, dev,
                                  &(kv_pool_opts){.type = t,
                                                  .n_layers = 5,
                                                  .layers = layers,
                                                  .page_tokens = 16,
                                                  .n_pages = {5, 3},
                                                  .n_states = 2},
                                  &e));
            assert_int_equal(kv_pool_bytes(p), 5 * s.group_bytes[KV_FULL] +
                                                   3 * s.group_bytes[KV_WINDOW] +
                                                   2 * s.state_bytes);
            kv_pool_close(p);
        }
    kern_close(dev);
}

/* Pages of a group are numbered from 0 in each; every page and state of every layer is its own
 * memory. */
static void groups_apart(void **state)
{
    (void)state;
    enum { FULL = 3, WINDOW = 2, STATES = 4, N = 20 };
    static const kv_layer_shape layers[] = {{.Hk = 1, .D = 16},
                                            {.Hk = 1, .D = 16, .window = 4},
                                            {.state_floats = N},
                                            {.Hk = 1, .D = 24, .v_in_k = 16},
                                            {.Hk = 2, .D = 8, .window = 9},
                                            {.state_floats = 2 * N}};
    static const int group[] = {KV_FULL, KV_WINDOW, -1, KV_FULL, KV_WINDOW, -1};
    err e = {0};
    kern_dev *dev;
    kv_pool *p;
    kv_pool_opts o = {.type = KV_F32,
                      .n_layers = 6,
                      .layers = layers,
                      .page_tokens = 4,
                      .n_pages = {FULL, WINDOW},
                      .n_states = STATES};
    CHECK_OK(kern_open(&dev, &(kern_opts){.threads = 1}, &e));
    CHECK_OK(kv_pool_open(&p, dev, &o, &e));
    assert_int_equal(kv_pool_window(p), 9);
    for (int l = 0; l < 6; l++) {
        assert_int_equal(kv_pool_group(p, l), group[l]);
        for (int s = 0; s < STATES; s++) {
            float *x = kv_pool_state(p, l, s);
            assert_true((x != NULL) == (group[l] < 0));
            for (int64_t i = 0; x && i < layers[l].state_floats; i++) {
                assert_float_equal(x[i], 0, 0);
                x[i] = (float)(l * STATES + s);
            }
        }
        const kern_kv_layer *k = kv_pool_layer(p, l);
        for (int page = 0; group[l] >= 0 && page < (group[l] ? WINDOW : FULL); page++)
            memset(k->base + (size_t)page * k->page_stride, l * 16 + page, k->page_stride);
    }
    for (int l = 0; l < 6; l++) {
        for (int s = 0; group[l] < 0 && s < STATES; s++)
            for (int64_t i = 0; i < layers[l].state_floats; i++)
                assert_float_equal(kv_pool_state(p, l, s)[i], (float)(l * STATES + s), 0);
        const kern_kv_layer *k = kv_pool_layer(p, l);
        for (int page = 0; group[l] >= 0 && page < (group[l] ? WINDOW : FULL); page++)
            for (size_t i = 0; i < k->page_stride; i++)
                assert_int_equal(k->base[(size_t)page * k->page_stride + i], l * 16 + page);
    }
    int32_t pages[4];
    assert_int_equal(kv_pool_total(p, KV_FULL), FULL);
    CHECK_OK(kv_pool_alloc(p, KV_FULL, pages, FULL, &e));
    assert_int_equal(kv_pool_free_pages(p, KV_WINDOW), WINDOW);
    CHECK_ERR(kv_pool_alloc(p, KV_WINDOW, pages, WINDOW + 1, &e), ERR_BUSY, "2 free");
    kv_pool_close(p);
    o.n_pages[KV_WINDOW] = 0;
    CHECK_ERR(kv_pool_open(&p, dev, &o, &e), ERR_VALUE, "0 pages");
    o.n_pages[KV_WINDOW] = INT32_MAX / 2;
    CHECK_ERR(kv_pool_open(&p, dev, &o, &e), ERR_VALUE, "addressed");
    o.n_pages[KV_WINDOW] = 1;
    o.n_states = 0;
    CHECK_ERR(kv_pool_open(&p, dev, &o, &e), ERR_VALUE, "0 states");
    kern_close(dev);
}

/* Pages held on the way to n tokens, against a walk that takes and gives back page by page. */
static void pages_held(void **state)
{
    (void)state;
    static const int64_t windows[] = {1, 2, 7, 8, 32, 33, 100}, chunks[] = {1, 3, 16, 40, 512};
    for (size_t wi = 0; wi < 7; wi++)
        for (size_t c = 0; c < 5; c++)
            for (int pt = 1; pt <= 17; pt += 4) {
                kv_layer_shape l[] = {{.Hk = 1, .D = 8}, {.Hk = 1, .D = 8}};
                kv_sizes s;
                l[1].window = (int)windows[wi];
                kv_sizes_of(KV_BF16, l, 2, pt, &s);
                for (int64_t n = 1; n < 300; n += 13) {
                    int64_t got[KV_GROUPS], most = 0;
                    kv_pages_held(&s, n, chunks[c], got);
                    /* Chunks of every phase: a first one of f tokens, then whole ones. */
                    for (int64_t f = 1; f <= chunks[c] && f <= n; f++)
                        for (int64_t at = 0, step = f; at < n; at += step, step = chunks[c]) {
                            if (step > n - at) step = n - at;
                            int64_t first = at - windows[wi] + 1 > 0 ? at - windows[wi] + 1 : 0;
                            int64_t held = (at + step - 1) / pt - first / pt + 1;
                            assert_int_equal(kv_window_start(s.window, pt, at), first / pt);
                            most = held > most ? held : most;
                        }
                    assert_int_equal(got[KV_FULL], (n + pt - 1) / pt);
                    if (most > got[KV_WINDOW] || got[KV_WINDOW] > most + 1)
                        fail_msg("window %d chunk %d page %d tokens %d: %d pages held, %d said",
                                 (int)windows[wi], (int)chunks[c], pt, (int)n, (int)most,
                                 (int)got[KV_WINDOW]);
                }
            }
}

/* Pages within a budget: never above it, one more position would be, one sequence always fits. */
static void pages_fit(void **state)
{
    (void)state;
    static const struct {
        int window, full;
        int64_t context, seqs, chunk, tokens, bytes, positions, pages[KV_GROUPS];
    } c[] = {
        /* a page of the full layer is 512 bytes, of the window layer 256 */
        {0, 1, 1000, 3, 512, 0, 1 << 30, 189, {189, 0}},    /* 63 pages a sequence */
        {0, 1, 1000, 3, 512, 3000, 1 << 30, 188, {188, 0}}, /* or tokens in all */
        {0, 1, 1000, 3, 512, 0, 512 * 5 + 511, 5, {5, 0}},
        {0, 1, 1000, 3, 512, 0, 511, 0, {0, 0}},
        {32, 1, 1000, 4, 32, 0, 1 << 30, 252, {252, 20}}, /* 63 tokens touch 5 pages */
        {32, 0, 1000, 4, 32, 0, 1 << 30, 252, {0, 20}},
        {32, 1, 1000, 4, 32, 0, 512 * 126 + 256 * 10, 121, {121, 20}},
        {32, 1, 1000, 4, 32, 0, 512 * 63 + 256 * 5, 63, {63, 5}}, /* context before company */
        {32, 1, 1000, 4, 32, 0, 512 * 63 + 256 * 5 - 1, 62, {62, 6}},
        {32, 1, 1000, 4, 32, 0, 512 * 63 + 256 * 9 + 255, 63, {63, 9}},
        {32, 0, 1000, 4, 32, 0, 256 * 10, 63, {0, 10}},
        {32, 0, 1000, 4, 32, 0, 256 * 4, 4, {0, 4}},
        {32, 1, 1000, 4, 32, 0, 768 * 3, 3, {3, 3}},
        {32, 1, 1000, 4, 32, 160, 1 << 30, 10, {10, 10}},
        {32, 1, 40, 4, 32, 0, 1 << 30, 12, {12, 12}}, /* shorter than window and chunk */
        {1, 1, 1000, 2, 1, 0, 1 << 30, 126, {126, 2}},
        {32, 0, 1000, INT64_MAX, 32, 0, 256 * 1000, 1000, {0, 1000}},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        kv_layer_shape l[] = {{.Hk = 1, .D = 4, .window = c[i].window}, {.Hk = 1, .D = 8}};
        kv_sizes s;
        kv_want w = {c[i].context, c[i].seqs, c[i].chunk, c[i].tokens};
        int64_t pages[KV_GROUPS];
        kv_sizes_of(KV_BF16, c[i].window ? l : l + 1, c[i].window && c[i].full ? 2 : 1, 16, &s);
        int64_t n = kv_pages_fit(&s, (uint64_t)c[i].bytes, &w, pages);
        if (n != c[i].positions || memcmp(pages, c[i].pages, sizeof pages))
            fail_msg("case %d: %lld positions in %lld and %lld pages", (int)i, (long long)n,
                     (long long)pages[0], (long long)pages[1]);
        if (!c[i].tokens && c[i].bytes == 1 << 30)
            assert_int_equal(kv_bytes_for(&s, c[i].context, c[i].seqs, c[i].chunk),
                             (uint64_t)pages[KV_FULL] * s.group_bytes[KV_FULL] +
                                 (uint64_t)pages[KV_WINDOW] * s.group_bytes[KV_WINDOW]);
    }
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
            .type = t, .n_layers = 1, .layers = &shape, .page_tokens = PT, .n_pages = {4}},
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
                .type = t, .n_layers = 1, .layers = &shape, .page_tokens = 16, .n_pages = {1}},
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
                                          .n_pages = {1},
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
        cmocka_unit_test(bytes_exact),      cmocka_unit_test(groups_apart),
        cmocka_unit_test(pages_held),       cmocka_unit_test(pages_fit),
        cmocka_unit_test(values_come_back), cmocka_unit_test(overflow_is_counted),
        cmocka_unit_test(static_scales),    cmocka_unit_test(names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
