/* What surrounds the linear rows: several shards of different formats with one bias, batches longer
 * than a chunk, act-order, input scales, the choice of rows and its report, --strict, and prepared
 * bytes against prediction. Products are checked against double arithmetic on qtensor_decode_row.
 */
#include "check.h"
#include "kern/linear.h"

static kern_dev *dev, *plain_dev;
static unsigned rng = 7;
static double uniform(void)
{
    rng = rng * 1664525u + 1013904223u;
    return (double)(rng >> 8) / 16777216.0;
}

static void weight(qtensor *q, const char *text, int64_t N, int64_t K)
{
    err e = {0};
    qspec s;
    CHECK_OK(qspec_parse(text, &s, &e));
    if (!qaxis_quantized(&s.w)) {
        size_t n = num_bytes(s.w.type, (size_t)(N * K));
        uint8_t *mem = xmalloc(n);
        float *v = xmalloc((size_t)(N * K) * sizeof *v);
        for (int64_t i = 0; i < N * K; i++)
            v[i] = (float)(uniform() - 0.5);
        num_encode_row(s.w.type, v, (size_t)(N * K), mem);
        free(v);
        qtensor_plain(q, s.w.type, N, K, mem);
        q->spec = s;
        return;
    }
    num_dtype st = s.w.scale == QS_NVFP4 ? NUM_F8_E4M3
                   : s.w.scale == QS_MX  ? NUM_F8_E8M0
                                         : NUM_BF16;
    CHECK_OK(qtensor_alloc(q, &s, st, 1, N, K, &e));
    for (size_t i = 0; i < (size_t)N * q->row_bytes; i++)
        ((uint8_t *)(uintptr_t)q->codes)[i] = (uint8_t)((int)(uniform() * 256) & 0x77);
    for (int64_t i = 0; i < q->scale_rows * q->scale_cols; i++) {
        float f = (float)(0.01 + 0.02 * uniform());
        num_encode_row(st, &f, 1, (char *)(uintptr_t)q->scales + i * num_infos[st].bits / 8);
    }
}

static void drop(qtensor *q)
{
    if (!qaxis_quantized(&q->spec.w)) free((void *)(uintptr_t)q->codes);
    qtensor_free(q);
}

/* y against sum (x * pre_scale) w + bias; tol is relative to the sum of magnitudes. */
static void check_product(kern_dev *d, const kern_linear *l, const kern_linear_desc *desc,
                          int64_t M, double tol)
{
    int64_t K = kern_linear_k(l), N = kern_linear_n(l);
    float *x = xmalloc((size_t)(M * K) * sizeof *x), *y = xmalloc((size_t)(M * N) * sizeof *y),
          *w = xmalloc((size_t)K * sizeof *w);
    for (int64_t i = 0; i < M * K; i++)
        x[i] = (float)(uniform() * 4 - 2);
    memset(y, 0xff, (size_t)(M * N) * sizeof *y);
    kern_linear_run(d, l, x, K, M, y, N);
    int64_t col = 0;
    for (int s = 0; s < desc->n_shards; s++)
        for (int64_t n = 0; n < desc->shard[s]->N; n++, col++) {
            qtensor_decode_row(desc->shard[s], n, w);
            for (int64_t m = 0; m<M; m += M> 50 ? 37 : 1) {
                double sum = desc->bias ? desc->bias[col] : 0, mag = fabs(sum) + 1e-30;
                for (int64_t k = 0; k < K; k++) {
                    double v = (double)x[m * K + k] *
                               (desc->shard[s]->pre_scale ? desc->shard[s]->pre_scale[k] : 1) *
                               w[k];
                    sum += v;
                    mag += fabs(v);
                }
                double off = fabs(y[m * N + col] - sum) / mag;
                if (!(off <= tol))
                    fail_msg("%s M=%lld shard %d (%lld,%lld) by %s: got %g, expected %g, off %.3g "
                             "(allowed %.3g)",
                             desc->name, (long long)M, s, (long long)m, (long long)n,
                             l->shard[s].row[kern_bucket(M)]->name, y[m * N + col], sum, off, tol);
            }
        }
    free(x), free(y), free(w);
}

static const int64_t batches[] = {1, 2, 5, 20, 70, 300, 516};

static void test_shards(void **state)
{
    (void)state;
    qtensor q[4];
    weight(&q[0], "w:int4,g32", 40, 96);
    weight(&q[1], "w:int8,channel", 17, 96);
    weight(&q[2], "w:bf16", 33, 96);
    weight(&q[3], "w:fp8_e4m3,channel", 16, 96);
    float bias[106];
    for (int i = 0; i < 106; i++)
        bias[i] = (float)i - 50;
    for (int act = KERN_ACT_SPEC; act <= KERN_ACT_F32; act++)
        for (int b = 0; b < 2; b++) {
            err e = {0};
            kern_linear *l = NULL;
            kern_linear_desc d = {.name = "shards",
                                  .n_shards = 4,
                                  .shard = {&q[0], &q[1], &q[2], &q[3]},
                                  .bias = b ? bias : NULL,
                                  .act = (kern_act)act};
            CHECK_OK(kern_linear_make(dev, &d, &l, &e));
            assert_int_equal(kern_linear_n(l), 106);
            for (size_t i = 0; i < sizeof batches / sizeof *batches; i++)
                check_product(dev, l, &d, batches[i], act == KERN_ACT_AUTO ? 1.0 / 100 : 2e-6);
            kern_linear_drop(dev, l);
        }
    for (int i = 0; i < 4; i++)
        drop(&q[i]);
}

static void unpack_equals(const kern_linear *l, const qtensor *q)
{
    float *u = xmalloc((size_t)(q->N * q->K) * sizeof *u), *w = xmalloc((size_t)q->K * sizeof *w);
    kern_linear_unpack(l, u);
    for (int64_t n = 0; n < q->N; n++) {
        qtensor_decode_row(q, n, w);
        for (int64_t k = 0; k < q->K; k++)
            if (fabsf(u[n * q->K + k] - w[k]) > 1e-6f * fabsf(w[k]))
                fail_msg("unpacked (%lld,%lld) differs", (long long)n, (long long)k);
    }
    free(u), free(w);
}

static void actorder(const char *scheme, const char *layout)
{
    enum { K = 160 };
    qtensor q;
    int32_t idx[K];
    float pre[K];
    weight(&q, scheme, 50, K);
    for (int k = 0; k < K; k++)
        idx[k] = (k * 37 % K) / 32;
    for (int k = 0; k < K; k++)
        pre[k] = (float)(0.5 + uniform());
    q.g_idx = idx;
    q.pre_scale = pre;
    for (int act = KERN_ACT_SPEC; act <= KERN_ACT_AUTO; act++) {
        err e = {0};
        kern_linear *l = NULL;
        kern_linear_desc d = {
            .name = "actorder", .n_shards = 1, .shard = {&q}, .act = (kern_act)act};
        CHECK_OK(kern_linear_make(dev, &d, &l, &e));
        if (dev->features & CPU_AVX2) assert_string_equal(kern_linear_choice(l, 0)->layout, layout);
        unpack_equals(l, &q);
        for (size_t i = 0; i < 5; i++)
            check_product(dev, l, &d, batches[i], act == KERN_ACT_AUTO ? 1.0 / 100 : 2e-6);
        kern_linear_drop(dev, l);
    }
    idx[3] = idx[4]; /* groups of unequal size: only the twin, and strict says so */
    idx[5] = idx[4];
    err e = {0};
    kern_linear *l = NULL;
    kern_linear_desc d = {.name = "uneven", .n_shards = 1, .shard = {&q}, .act = KERN_ACT_SPEC};
    CHECK_OK(kern_linear_make(dev, &d, &l, &e));
    assert_string_equal(kern_linear_choice(l, 0)->row, "ref");
    assert_true(kern_linear_choice(l, 0)->reference);
    if (dev->features)
        assert_non_null(
            strstr(kern_linear_choice(l, 0)->refused, "groups of g_idx differ in size"));
    unpack_equals(l, &q);
    check_product(dev, l, &d, 3, 2e-6);
    kern_linear_drop(dev, l);
    d.strict = true;
    if (dev->features) CHECK_ERR(kern_linear_make(dev, &d, &l, &e), ERR_UNSUPPORTED, "strict");
    q.g_idx = NULL;
    q.pre_scale = NULL;
    drop(&q);
}

static void test_actorder(void **state)
{
    (void)state;
    actorder("w:int4,g32,actorder", "w4p16");
    actorder("w:int3,g32,actorder", "w3p16");
    actorder("w:int2,g32,actorder", "w2p16");
}

static const char *const schemes[] = {"w:bf16",
                                      "w:f16",
                                      "w:f32",
                                      "w:int4,g32",
                                      "w:int4,g128,asym",
                                      "w:int4,channel",
                                      "w:int8,channel a:int8,token",
                                      "w:int8,channel,asym",
                                      "w:int2,g64",
                                      "w:int3,g128",
                                      "w:int2,channel",
                                      "w:int3,g32,asym",
                                      "w:int6,g32",
                                      "w:fp8_e4m3,channel a:fp8_e4m3,token",
                                      "w:fp8_e4m3,tensor",
                                      "w:fp8_e4m3,block128x128 a:fp8_e4m3,group128",
                                      "w:nvfp4,g16",
                                      "w:mxfp4,g32"};

static void test_predict(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{1, 64}, {65, 576}, {33, 80}, {48, 1536}, {129, 272}};
    for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++)
        for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++)
            for (int f = 0; f < 2; f++) {
                err e = {0};
                qtensor q;
                kern_linear *l = NULL;
                kern_dev *d = f ? dev : plain_dev;
                weight(&q, schemes[i], shapes[j][0], shapes[j][1]);
                kern_linear_desc desc = {
                    .name = schemes[i], .n_shards = 1, .shard = {&q}, .act = KERN_ACT_AUTO};
                CHECK_OK(kern_linear_make(d, &desc, &l, &e));
                num_dtype plain = qaxis_quantized(&q.spec.w) ? NUM_BF16 : q.code;
                size_t want =
                    kern_linear_predict_bytes(d->features, &q.spec, plain, KERN_ACT_AUTO, q.N, q.K);
                if (want != kern_linear_bytes(l))
                    fail_msg("%s %lldx%lld: %zu bytes predicted, %zu held", schemes[i],
                             (long long)q.N, (long long)q.K, want, kern_linear_bytes(l));
                kern_linear_drop(d, l);
                drop(&q);
            }
}

/* What checkpoints bring besides codes and scales goes through a fast row where a layout holds it,
 * else through the twin, and the report says why. */
typedef struct oddity {
    const char *name, *scheme, *row, *refused; /* row of an AVX-512 machine */
    int64_t N, K;
} oddity;

static void odd_tensor(const oddity *o, qtensor *q, float *table, float *pre, int32_t *idx,
                       float *zeros)
{
    weight(q, o->scheme, o->N, o->K);
    for (int i = 0; i < 16; i++)
        table[i] = (float)(i * i - 40) / 100;
    for (int64_t k = 0; k < o->K; k++) {
        pre[k] = (float)(0.5 + uniform());
        idx[k] = (int32_t)(k / 32);
    }
    if (!strcmp(o->name, "own table")) q->table = table;
    if (!strcmp(o->name, "input scales")) q->pre_scale = pre;
    if (!strcmp(o->name, "index without act-order")) q->g_idx = idx;
    if (!strcmp(o->name, "ranges of global factors")) {
        static const int64_t rows[] = {0, 5, 37, 50};
        q->n_global = 3;
        memcpy(q->global_row, rows, sizeof rows);
        for (int i = 0; i < 3; i++)
            q->global[i] = 0.5f + (float)i;
    }
    if (!strcmp(o->name, "crossing blocks")) {
        q->flat = true;
        q->scale_rows = 1;
        q->scale_cols = (o->N * o->K + 63) / 64;
        q->block_n = o->N;
        q->block_k = 64;
    }
    if (!strcmp(o->name, "float zeros")) {
        q->zero_type = NUM_F32;
        q->zeros = zeros;
        for (int64_t i = 0; i < q->scale_rows * q->scale_cols; i++)
            zeros[i] = (float)(uniform() * 15 - 7);
        return;
    }
    for (int64_t i = 0; q->zeros && i < q->scale_rows * q->scale_cols; i++) {
        float z = (float)(int)(uniform() * 15) - 7;
        num_encode_row(q->zero_type, &z, 1,
                       (char *)(uintptr_t)q->zeros + i * num_infos[q->zero_type].bits / 8);
    }
}

static void test_oddities(void **state)
{
    (void)state;
    static const oddity odd[] = {
        {"own table", "w:nf4,g64", "avx512-w4", NULL, 50, 128},
        {"table of its type", "w:bnb_fp4,g64", "avx512-w4", NULL, 50, 128},
        {"input scales", "w:int4,g32", "avx512-w4", NULL, 50, 96},
        {"ranges of global factors", "w:nvfp4,g16", "avx512-w4", NULL, 50, 96},
        {"zeros", "w:int4,g32,asym", "avx512-w4", NULL, 50, 96},
        {"zeros", "w:int8,channel,asym", "avx512-w8", NULL, 50, 96},
        {"float zeros", "w:int4,g32,asym", "avx512-w4", NULL, 50, 96},
        {"float zeros", "w:int3,g32,asym", "avx512-w4", NULL, 50, 96},
        {"float zeros", "w:int2,g32,asym", "avx512-w4", NULL, 50, 96},
        {"input scales", "w:int3,g32", "avx512-w4", NULL, 50, 96},
        {"crossing blocks", "w:nf4,b64", "ref", "blocks cross rows", 50, 40},
        {"index without act-order", "w:int4,g32", "ref", "group index without act-order", 50, 96},
        {"short group", "w:int4,g36", "ref", "group is no multiple of 8", 50, 90},
        {"short group", "w:int3,g36", "ref", "group is no multiple of 8", 50, 90},
    };
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        const oddity *o = &odd[i];
        err e = {0};
        qtensor q;
        float table[16], pre[128], zeros[50 * 4];
        int32_t idx[128];
        kern_linear *l = NULL;
        odd_tensor(o, &q, table, pre, idx, zeros);
        CHECK_OK(qtensor_check(&q, o->name, &e));
        kern_linear_desc d = {.name = o->name, .n_shards = 1, .shard = {&q}, .act = KERN_ACT_F32};
        CHECK_OK(kern_linear_make(dev, &d, &l, &e));
        for (int b = 0; b < KERN_BUCKETS && (dev->features & CPU_AVX512); b++) {
            const kern_choice *c = kern_linear_choice(l, b);
            if (!(dev->features & CPU_AMX_BF16)) assert_string_equal(c->row, o->row);
            assert_int_equal(c->reference, o->refused != NULL);
            if (o->refused && !strstr(c->refused, o->refused))
                fail_msg("%s: refused '%s', expected '%s'", o->name, c->refused, o->refused);
        }
        unpack_equals(l, &q);
        for (size_t b = 0; b < 5; b++)
            check_product(dev, l, &d, batches[b], 1e-5);
        kern_linear_drop(dev, l);
        q.pre_scale = NULL;
        q.g_idx = NULL;
        q.table = NULL;
        drop(&q);
    }
}

static void expect_choice(const char *scheme, kern_act act, int bucket, uint32_t needs,
                          const char *row, const char *input)
{
    err e = {0};
    qtensor q;
    kern_linear *l = NULL;
    if (needs & ~dev->features) return;
    weight(&q, scheme, 32, 256);
    kern_linear_desc d = {.name = scheme, .n_shards = 1, .shard = {&q}, .act = act};
    CHECK_OK(kern_linear_make(dev, &d, &l, &e));
    const kern_choice *c = kern_linear_choice(l, bucket);
    if (strcmp(c->row, row) || strcmp(c->act, input))
        fail_msg("%s at bucket %d: %s with %s input, expected %s with %s", scheme, bucket, c->row,
                 c->act, row, input);
    kern_linear_drop(dev, l);
    drop(&q);
}

static void test_choices(void **state)
{
    (void)state;
    uint32_t vnni = CPU_AVX512 | CPU_AVX512_VNNI, amx = CPU_AVX512 | CPU_AMX_BF16;
    expect_choice("w:int4,g32", KERN_ACT_AUTO, 0, vnni, "avx512vnni-w4a8", "int8 per 32 along K");
    expect_choice("w:int4,g32", KERN_ACT_AUTO, 3, amx, "amx-w4", "bf16");
    expect_choice("w:int4,g32", KERN_ACT_SPEC, 0, CPU_AVX512, "avx512-w4", "f32");
    expect_choice("w:int4,g32", KERN_ACT_F32, 3, CPU_AVX512, "avx512-w4", "f32");
    expect_choice("w:int4,g32", KERN_ACT_BF16, 0, CPU_AVX512, "avx512-w4", "bf16");
    expect_choice("w:int4,g32", KERN_ACT_INT8, 3, vnni, "avx512vnni-w4a8", "int8 per 32 along K");
    expect_choice("w:nvfp4,g16", KERN_ACT_AUTO, 1, vnni, "avx512vnni-w4a8", "int8 per 16 along K");
    expect_choice("w:int8,channel a:int8,token", KERN_ACT_SPEC, 0, vnni, "avx512vnni-w8a8",
                  "int8 per token");
    expect_choice("w:fp8_e4m3,channel a:fp8_e4m3,token", KERN_ACT_AUTO, 0, CPU_AVX512, "avx512-w8",
                  "fp8_e4m3,token");
    expect_choice("w:bf16", KERN_ACT_AUTO, 0, CPU_AVX512, "avx512-w16", "f32");
    expect_choice("w:bf16", KERN_ACT_AUTO, 3, amx, "amx-w16", "f32 as two bf16 terms");
    err e = {0};
    qtensor q;
    kern_linear *l = NULL;
    weight(&q, "w:int4,g32", 32, 256);
    kern_linear_desc d = {.name = "portable", .n_shards = 1, .shard = {&q}, .act = KERN_ACT_AUTO};
    CHECK_OK(kern_linear_make(plain_dev, &d, &l, &e));
    assert_string_equal(kern_linear_choice(l, 0)->row, "ref");
    assert_non_null(strstr(kern_linear_choice(l, 0)->refused, "needs avx2"));
    kern_linear_drop(plain_dev, l);
    d.n_shards = 0;
    CHECK_ERR(kern_linear_make(dev, &d, &l, &e), ERR_VALUE, "0 shards");
    drop(&q);
}

/* Every list ends with the plain C twin, which needs nothing. */
static void test_lists(void **state)
{
    (void)state;
    const kern_linear_row *last = kern_linear_rows[kern_n_linear_rows - 1];
    assert_string_equal(last->name, "ref");
    assert_int_equal(last->needs, 0);
    for (int i = 0; i < kern_n_op_rows; i++) {
        const kern_op_row *twin = NULL;
        for (int j = 0; j < kern_n_op_rows; j++)
            if (!strcmp(kern_op_rows[j].op, kern_op_rows[i].op)) twin = &kern_op_rows[j];
        assert_string_equal(twin->name, "ref");
        assert_int_equal(twin->needs, 0);
    }
}

static void test_parse(void **state)
{
    (void)state;
    err e = {0};
    kern_act a;
    for (int i = 0; i < KERN_ACT_COUNT; i++) {
        CHECK_OK(kern_act_parse(kern_act_name((kern_act)i), &a, &e));
        assert_int_equal(a, i);
    }
    CHECK_ERR(kern_act_parse("fp16", &a, &e), ERR_USAGE, "fp16");
    kern_dev *d = NULL;
    kern_opts o = {.device = "tpu"};
    CHECK_ERR(kern_open(&d, &o, &e), ERR_UNSUPPORTED, "tpu");
    o = (kern_opts){.threads = -1};
    CHECK_ERR(kern_open(&d, &o, &e), ERR_VALUE, "-1 threads");
    assert_null(d);
    assert_true(kern_measure_bandwidth(plain_dev, 1 << 20) > 0);
}

int main(void)
{
    err e = {0};
    kern_opts o = {.threads = 3, .cpu_features = cpu_detect()}, p = {.threads = 2};
    if (kern_open(&dev, &o, &e) < 0 || kern_open(&plain_dev, &p, &e) < 0) {
        fprintf(stderr, "%s\n", e.msg);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shards),  cmocka_unit_test(test_actorder),
        cmocka_unit_test(test_predict), cmocka_unit_test(test_oddities),
        cmocka_unit_test(test_choices), cmocka_unit_test(test_lists),
        cmocka_unit_test(test_parse)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    kern_close(dev);
    kern_close(plain_dev);
    return rc;
}
