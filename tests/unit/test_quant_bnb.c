/* bitsandbytes and the mxfp4 of gpt-oss: values by hand, blocks that cross rows, what the library
 * itself quantizes, damaged states, and the way out and back. */
#include "quant_fixture.h"

#define M     "model.layers.0.mlp.down_proj"
#define STATE M ".weight.quant_state.bitsandbytes__nf4"
#define NF4_CONFIG                                                                                 \
    ", \"quantization_config\": {\"quant_method\": \"bitsandbytes\", \"load_in_4bit\": true, "     \
    "\"bnb_4bit_quant_type\": \"nf4\"}"
#define FP4_CONFIG                                                                                 \
    ", \"quantization_config\": {\"quant_method\": \"bitsandbytes\", \"load_in_4bit\": true}"
#define INT8_CONFIG                                                                                \
    ", \"quantization_config\": {\"quant_method\": \"bitsandbytes\", \"load_in_8bit\": true, "     \
    "\"llm_int8_threshold\": %s, \"llm_int8_skip_modules\": %s}"

typedef struct opened {
    ckpt *c;
    quant_ckpt *q;
} opened;

static int open_dir(opened *o, const char *dir, err *e)
{
    int rc = ckpt_open(&o->c, dir, e);
    if (rc < 0) return rc;
    rc = quant_open(&o->q, o->c, e);
    if (rc < 0) ckpt_close(o->c);
    return rc;
}

static void close_it(opened *o)
{
    quant_close(o->q);
    ckpt_close(o->c);
}

static int open_with(opened *o, const char *config_tail, const fx_tensor *t, size_t n, err *e)
{
    char *dir = fx_path("one"), *config = fx_config(64, 64, 1, config_tail);
    fx_write(dir, config, t, n);
    int rc = open_dir(o, dir, e);
    free(dir);
    free(config);
    return rc;
}

/* A weight of 4-bit codes that is to be stored. */
typedef struct four {
    int64_t N, K;
    int block;
    uint8_t *bytes;
    float *absmax;
    char *state;
    fx_tensor t[4];
} four;

static four make_four(const char *type, int64_t N, int64_t K, int block, uint64_t seed)
{
    four f = {.N = N, .K = K, .block = block};
    int64_t n = (N * K + 1) / 2, nb = (N * K + block - 1) / block;
    f.bytes = xcalloc((size_t)n, 1);
    f.absmax = xcalloc((size_t)nb, sizeof *f.absmax);
    for (int64_t i = 0; i < n; i++)
        f.bytes[i] = (uint8_t)(127 * fx_noise(&seed) + 128);
    for (int64_t i = 0; i < nb; i++)
        f.absmax[i] = fabsf(fx_noise(&seed));
    f.state = xasprintf("{\"quant_type\": \"%s\", \"blocksize\": %d, \"dtype\": \"bfloat16\", "
                        "\"shape\": [%d, %d]}",
                        type, block, (int)N, (int)K);
    const float *map = strcmp(type, "nf4") ? num_bnb_fp4_table : num_nf4_table;
    f.t[0] = (fx_tensor){M ".weight", NUM_U8, 2, {n, 1}, f.bytes};
    f.t[1] = (fx_tensor){M ".weight.absmax", NUM_F32, 1, {nb}, f.absmax};
    f.t[2] = (fx_tensor){M ".weight.quant_map", NUM_F32, 1, {16}, map};
    f.t[3] = (fx_tensor){strcmp(type, "nf4") ? M ".weight.quant_state.bitsandbytes__fp4" : STATE,
                         NUM_U8,
                         1,
                         {(int64_t)strlen(f.state)},
                         f.state};
    return f;
}

static void drop_four(four *f)
{
    free(f->bytes);
    free(f->absmax);
    free(f->state);
}

static float value_of(const four *f, const float *map, int64_t r, int64_t k)
{
    int64_t i = r * f->K + k;
    return map[i % 2 ? f->bytes[i / 2] & 15 : f->bytes[i / 2] >> 4] * f->absmax[i / f->block];
}

/* Rows of all kinds: whole blocks, blocks that cross rows, an odd number of columns. */
static void test_blocks(void **state)
{
    (void)state;
    static const struct {
        int64_t N, K;
        int block;
        bool flat;
    } sizes[] = {{4, 128, 64, false},    {6, 96, 64, true},   {5, 50, 32, true},
                 {3, 37, 64, true},      {7, 31, 32, true},   {1, 1, 64, true},
                 {2, 4096, 4096, false}, {64, 64, 4096, true}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int fp4 = 0; fp4 < 2; fp4++) {
            err e = {0};
            opened o;
            qtensor t;
            four f = make_four(fp4 ? "fp4" : "nf4", sizes[s].N, sizes[s].K, sizes[s].block, s + 7);
            CHECK_OK(open_with(&o, fp4 ? FP4_CONFIG : NF4_CONFIG, f.t, 4, &e));
            CHECK_OK(quant_load(o.q, M, &t, &e));
            assert_int_equal(t.flat, sizes[s].flat);
            assert_int_equal(t.spec.w.group, f.block);
            float *row = xmalloc((size_t)t.K * sizeof *row);
            for (int64_t r = 0; r < t.N; r++) {
                qtensor_decode_row(&t, r, row);
                for (int64_t k = 0; k < t.K; k++) {
                    float want = value_of(&f, fp4 ? num_bnb_fp4_table : num_nf4_table, r, k);
                    if (row[k] != want)
                        fail_msg("%dx%d [%d, %d]: %g, not %g", (int)t.N, (int)t.K, (int)r, (int)k,
                                 (double)row[k], (double)want);
                }
            }
            /* Out and back: the same bytes. */
            char *dir = fx_path("one"), *out = fx_path("again");
            bake_report rep;
            CHECK_OK(bake_convert(
                &(convert_opts){.in = dir, .out = out, .to = "bitsandbytes", .overwrite = true},
                &rep, &e));
            bake_report_free(&rep);
            opened b;
            CHECK_OK(open_dir(&b, out, &e));
            for (int i = 0; i < 4; i++) {
                const ckpt_tensor *u = ckpt_find(b.c, f.t[i].name),
                                  *v = ckpt_find(o.c, f.t[i].name);
                assert_int_equal(u->bytes, v->bytes);
                if (i || sizes[s].N * sizes[s].K % 2 == 0)
                    assert_memory_equal(u->data, v->data, v->bytes);
            }
            close_it(&b);
            free(row);
            free(dir);
            free(out);
            qtensor_free(&t);
            close_it(&o);
            drop_four(&f);
        }
}

/* The vectors of the library: a ramp of 64, and nested scales. */
static void test_vectors(void **state)
{
    (void)state;
    static const uint8_t ramp[32] = {0x00, 0x00, 0x01, 0x11, 0x11, 0x11, 0x12, 0x22,
                                     0x22, 0x33, 0x34, 0x44, 0x45, 0x55, 0x66, 0x67,
                                     0x78, 0x88, 0x99, 0xaa, 0xab, 0xbb, 0xcc, 0xcc,
                                     0xdd, 0xdd, 0xee, 0xee, 0xee, 0xef, 0xff, 0xff};
    err e = {0};
    opened o;
    qtensor t, q;
    qspec s;
    float w[64], row[64];
    four f = make_four("nf4", 1, 64, 64, 1);
    memcpy(f.bytes, ramp, sizeof ramp);
    f.absmax[0] = 1.96875f;
    CHECK_OK(open_with(&o, NF4_CONFIG, f.t, 4, &e));
    CHECK_OK(quant_load(o.q, M, &t, &e));
    qtensor_decode_row(&t, 0, row);
    assert_float_equal(row[30], -.17925476f, 1e-8f);
    assert_true(row[31] == 0 && row[32] == 0);
    assert_float_equal(row[33], .15667371f, 1e-8f);
    for (int i = 0; i < 64; i++)
        w[i] = ((float)i - 31.5f) / 16;
    CHECK_OK(qspec_parse("w:nf4,b64", &s, &e));
    CHECK_OK(quant_algo_by_name("rtn")->quantize(w, 1, 64, &s, NUM_BF16, NULL, &q, &e));
    assert_memory_equal(q.codes, t.codes, 32);
    assert_true(qtensor_scale(&q, 0, 0) == 1.96875f);
    qtensor_free(&q);
    qtensor_free(&t);
    close_it(&o);
    drop_four(&f);
}

/* The 8-bit map of the library: for i in 0..6, the means of 2^i steps from .1 to 1 times 10^(i-6),
 * of both signs, with 0 and 1. */
static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

static void test_nested(void **state)
{
    (void)state;
    err e = {0};
    opened o;
    qtensor t;
    float map[256];
    size_t n = 0;
    for (int i = 0; i < 7; i++)
        for (int k = 0, m = 1 << i; k < m; k++) {
            double mean = .1 + .9 * (2 * k + 1) / (2 * m);
            map[n++] = (float)(mean * pow(10, i - 6));
            map[n] = -map[n - 1];
            n++;
        }
    map[n++] = 0;
    map[n++] = 1;
    assert_int_equal(n, 256);
    qsort(map, 256, sizeof *map, by_value);
    const uint8_t codes[4] = {176, 41, 25, 255};
    const float top = .53125f, want[4] = {.50020999f, .24753420f, .12800294f, 1};
    four f = make_four("nf4", 4, 64, 64, 3);
    free(f.state);
    f.state = xstrdup("{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"bfloat16\", "
                      "\"shape\": [4, 64], \"nested_blocksize\": 256, \"nested_dtype\": "
                      "\"float32\", \"nested_offset\": 0.46875}");
    fx_tensor tensors[] = {f.t[0],
                           {M ".weight.absmax", NUM_U8, 1, {4}, codes},
                           f.t[2],
                           {STATE, NUM_U8, 1, {(int64_t)strlen(f.state)}, f.state},
                           {M ".weight.nested_absmax", NUM_F32, 1, {1}, &top},
                           {M ".weight.nested_quant_map", NUM_F32, 1, {256}, map}};
    CHECK_OK(open_with(&o, NF4_CONFIG, tensors, 6, &e));
    CHECK_OK(quant_load(o.q, M, &t, &e));
    for (int r = 0; r < 4; r++)
        assert_float_equal(qtensor_scale(&t, r, 0), want[r], 1e-7f);
    qtensor_free(&t);
    close_it(&o);
    drop_four(&f);
}

/* What the library made of the same weights: every code, and every scale that it keeps in fp32. */
static void test_quantizes_as_the_library(void **state)
{
    (void)state;
    static const struct {
        const char *dir, *scheme;
        bool nf4; /* its scales are nested: not in fp32 */
    } cases[] = {{"tests/fixtures/quant/bnb_fp4", "w:bnb_fp4,b64", false},
                 {"tests/fixtures/quant/bnb_nf4_double", "w:nf4,b64", true}};
    err e = {0};
    opened src;
    CHECK_OK(open_dir(&src, "tests/fixtures/quant/source", &e));
    for (size_t i = 0; i < 2; i++) {
        opened o;
        char module[QUANT_NAME_MAX];
        int n = 0;
        CHECK_OK(open_dir(&o, cases[i].dir, &e));
        for (size_t k = 0; k < ckpt_n_tensors(o.c); k++) {
            const quant_part *p = quant_part_of(o.q, ckpt_tensor_at(o.c, k)->name, module);
            qtensor w, theirs, ours;
            qspec s;
            if (!p || p->kind != QUANT_CODES) continue;
            CHECK_OK(quant_load(src.q, module, &w, &e));
            CHECK_OK(quant_load(o.q, module, &theirs, &e));
            float *v = xmalloc((size_t)(w.N * w.K) * sizeof *v);
            for (int64_t r = 0; r < w.N; r++)
                qtensor_decode_row(&w, r, v + r * w.K);
            CHECK_OK(qspec_parse(cases[i].scheme, &s, &e));
            CHECK_OK(
                quant_algo_by_name("rtn")->quantize(v, w.N, w.K, &s, NUM_BF16, NULL, &ours, &e));
            for (int64_t at = 0; at < w.N * w.K; at++) {
                int64_t row = at / w.K, c = at % w.K;
                int32_t a = qtensor_code(&ours, row, c), b = qtensor_code(&theirs, row, c);
                /* The borders of fp4 have six digits on one device of the library, all on another.
                 */
                float x = v[at] / qtensor_scale(&ours, row, c),
                      tie = fabsf(x - ours.table[a]) - fabsf(x - ours.table[b]);
                bool zeros = !cases[i].nf4 && !(a % 8) && !(b % 8); /* of either sign */
                if (a != b && !zeros && fabsf(tie) > 2e-6f)
                    fail_msg("%s %s [%d, %d]: code %d, the library's %d", cases[i].dir, module,
                             (int)row, (int)c, a, b);
            }
            if (!cases[i].nf4)
                assert_memory_equal(ours.scales, theirs.scales,
                                    (size_t)(ours.scale_rows * ours.scale_cols) * sizeof(float));
            n++;
            free(v);
            qtensor_free(&w);
            qtensor_free(&ours);
            qtensor_free(&theirs);
        }
        assert_int_equal(n, 7);
        close_it(&o);
    }
    close_it(&src);
}

/* tare quantize --scheme nf4 writes what this dialect reads; a block of zeros decodes to zeros. */
static void test_quantize_nf4(void **state)
{
    (void)state;
    err e = {0};
    bake_report r;
    opened o;
    qtensor t;
    char *src = fx_path("llama"), *out = fx_path("nf4");
    fx_llama(src, 64, 128, 1, "");
    CHECK_OK(bake_quantize(&(bake_opts){.model = src, .out = out, .scheme = "w:nf4,b64"}, &r, &e));
    bake_report_free(&r);
    CHECK_OK(open_dir(&o, out, &e));
    assert_string_equal(o.q->dialect->name, "bitsandbytes");
    CHECK_OK(quant_load(o.q, M, &t, &e));
    assert_int_equal(t.spec.w.type, NUM_NF4);
    assert_true(ckpt_find(o.c, STATE) && !quant_has(o.q, "lm_head"));
    qtensor_free(&t);
    close_it(&o);
    float zeros[64] = {0}, row[64];
    qspec s;
    CHECK_OK(qspec_parse("w:nf4,b64", &s, &e));
    CHECK_OK(quant_algo_by_name("rtn")->quantize(zeros, 1, 64, &s, NUM_BF16, NULL, &t, &e));
    qtensor_decode_row(&t, 0, row);
    assert_memory_equal(row, zeros, sizeof row);
    qtensor_free(&t);
    free(src);
    free(out);
}

/* The bytes under another type are the same bytes. */
static void test_storage_types(void **state)
{
    (void)state;
    static const num_dtype types[] = {NUM_U8, NUM_I8, NUM_F16, NUM_BF16, NUM_F32};
    four f = make_four("nf4", 4, 96, 64, 9);
    for (int i = 0; i < 5; i++) {
        err e = {0};
        opened o;
        qtensor t;
        float row[96];
        f.t[0].type = types[i];
        f.t[0].shape[0] = 4 * 96 / 2 / (int64_t)num_bytes(types[i], 1);
        CHECK_OK(open_with(&o, NF4_CONFIG, f.t, 4, &e));
        CHECK_OK(quant_load(o.q, M, &t, &e));
        qtensor_decode_row(&t, 3, row);
        for (int k = 0; k < 96; k++)
            assert_true(row[k] == value_of(&f, num_nf4_table, 3, k));
        qtensor_free(&t);
        close_it(&o);
    }
    drop_four(&f);
}

static void test_int8(void **state)
{
    (void)state;
    err e = {0};
    opened o;
    qtensor t;
    float row[4];
    const int8_t w[4] = {50, -127, 30, 1};
    const float scb[2] = {1.26953125f, 1};
    uint8_t fmt = 0;
    fx_tensor tensors[] = {{M ".weight", NUM_I8, 2, {1, 4}, w},
                           {M ".SCB", NUM_F32, 1, {1}, scb},
                           {M ".weight_format", NUM_U8, 0, {0}, &fmt}};
    char *tail = xasprintf(INT8_CONFIG, "6.0", "[\"lm_head\"]");
    CHECK_OK(open_with(&o, tail, tensors, 3, &e));
    CHECK_OK(quant_load(o.q, M, &t, &e));
    qtensor_decode_row(&t, 0, row);
    for (int k = 0; k < 4; k++) {
        volatile float p = (float)w[k] * scb[0]; /* two roundings, in this order */
        assert_true(row[k] == p * (1.0f / 127.0f));
    }
    assert_int_equal(o.q->n_warnings, 1);
    assert_non_null(strstr(o.q->warnings[0], "llm_int8_threshold 6"));
    qtensor_free(&t);
    close_it(&o);
    free(tail);
    tail = xasprintf(INT8_CONFIG, "0.0", "null");
    CHECK_OK(open_with(&o, tail, tensors, 3, &e));
    assert_int_equal(o.q->n_warnings, 0);
    close_it(&o);
    fmt = 2;
    CHECK_OK(open_with(&o, tail, tensors, 3, &e));
    CHECK_ERR(quant_load(o.q, M, &t, &e), ERR_UNSUPPORTED, "row");
    close_it(&o);
    tensors[1].shape[0] = 2;
    CHECK_OK(open_with(&o, tail, tensors, 2, &e));
    CHECK_ERR(quant_load(o.q, M, &t, &e), ERR_SHAPE, "SCB");
    close_it(&o);
    tensors[1].shape[0] = 1;
    free(tail);
    tail = xasprintf(INT8_CONFIG, "6.0", "[\"mlp\"]");
    CHECK_ERR(open_with(&o, tail, tensors, 2, &e), ERR_FORMAT, "different runs");
    CHECK_ERR(open_with(&o, NF4_CONFIG, tensors, 2, &e), ERR_FORMAT, "stored as int8");
    CHECK_ERR(open_with(&o, tail, tensors, 1, &e), ERR_MISSING, M ".SCB");
    free(tail);
}

/* Each changes one thing of a good weight. */
static void test_damaged(void **state)
{
    (void)state;
    static const struct {
        const char *what, *state;
        int tensor; /* whose type, count or presence changes; -1 = none */
        num_dtype type;
        int64_t count; /* 0 = left out */
        int code;
        const char *says;
    } cases[] = {
        {"no JSON", "{\"quant_type\": ", -1, 0, 0, ERR_FORMAT, STATE},
        {"no object", "[1]", -1, 0, 0, ERR_FORMAT, STATE},
        {"another type", "{\"quant_type\": \"fp4\", \"blocksize\": 64, \"shape\": [4, 64]}", -1, 0,
         0, ERR_FORMAT, "'fp4'"},
        {"block 48", "{\"quant_type\": \"nf4\", \"blocksize\": 48, \"shape\": [4, 64]}", -1, 0, 0,
         ERR_VALUE, "48"},
        {"block 0", "{\"quant_type\": \"nf4\", \"blocksize\": 0, \"shape\": [4, 64]}", -1, 0, 0,
         ERR_VALUE, "blocksize is 0"},
        {"block 2^40",
         "{\"quant_type\": \"nf4\", \"blocksize\": 1099511627776, \"shape\": [4, 64]}", -1, 0, 0,
         ERR_VALUE, "blocksize"},
        {"shape of 3", "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": [4, 8, 8]}", -1, 0,
         0, ERR_SHAPE, "two positive"},
        {"negative", "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": [-4, -64]}", -1, 0, 0,
         ERR_SHAPE, "two positive"},
        {"huge", "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": [1e300, 64]}", -1, 0, 0,
         ERR_SHAPE, "two positive"},
        {"more than is there",
         "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": "
         "[2000000000, 2000000000]}",
         -1, 0, 0, ERR_SHAPE, "4-bit codes need"},
        {"dtype int8",
         "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"int8\", "
         "\"shape\": [4, 64]}",
         -1, 0, 0, ERR_UNSUPPORTED, "int8"},
        {"nested without tensors",
         "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": [4, 64], "
         "\"nested_blocksize\": 256, \"nested_offset\": 0.1}",
         -1, 0, 0, ERR_SHAPE, "absmax"},
        {"nested block 0",
         "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": [4, 64], "
         "\"nested_blocksize\": 0}",
         -1, 0, 0, ERR_VALUE, "nested_blocksize"},
        {"nested in bf16",
         "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": [4, 64], "
         "\"nested_blocksize\": 256, \"nested_dtype\": \"bfloat16\"}",
         -1, 0, 0, ERR_UNSUPPORTED, "nested_dtype"},
        {"short codes", NULL, 0, NUM_U8, 127, ERR_SHAPE, "127 bytes"},
        {"long codes", NULL, 0, NUM_U8, 129, ERR_SHAPE, "129 bytes"},
        {"codes in i64", NULL, 0, NUM_I64, 16, ERR_SHAPE, "need 128"},
        {"short absmax", NULL, 1, NUM_F32, 3, ERR_SHAPE, "absmax"},
        {"absmax in f16", NULL, 1, NUM_F16, 4, ERR_SHAPE, "absmax"},
        {"no absmax", NULL, 1, NUM_F32, 0, ERR_MISSING, "absmax"},
        {"map of 15", NULL, 2, NUM_F32, 15, ERR_SHAPE, "quant_map"},
        {"no map", NULL, 2, NUM_F32, 0, ERR_MISSING, "quant_map"},
        {"no state", NULL, 3, NUM_U8, 0, ERR_MISSING, STATE},
        {"state in f32", NULL, 3, NUM_F32, 8, ERR_DTYPE, "JSON text"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        err e = {0};
        opened o;
        four f = make_four("nf4", 4, 64, 64, 11);
        fx_tensor t[4];
        size_t n = 0;
        uint8_t junk[128];
        memset(junk, 0x3d, sizeof junk);
        if (cases[i].state) {
            f.t[3].data = cases[i].state;
            f.t[3].shape[0] = (int64_t)strlen(cases[i].state);
        }
        for (int k = 0; k < 4; k++) {
            if (k == cases[i].tensor && !cases[i].count) continue;
            t[n] = f.t[k];
            if (k == cases[i].tensor) {
                t[n].type = cases[i].type;
                t[n].n_dims = 1;
                t[n].shape[0] = cases[i].count;
                t[n].data = k ? junk : NULL;
            }
            n++;
        }
        int rc = open_with(&o, NF4_CONFIG, t, n, &e);
        if (rc >= 0) {
            qtensor q;
            rc = quant_load(o.q, M, &q, &e);
            close_it(&o);
        }
        if (rc != -cases[i].code || !strstr(e.msg, cases[i].says))
            fail_msg("%s: %d: %s", cases[i].what, rc, e.msg);
        drop_four(&f);
    }
    err e = {0};
    opened o;
    qtensor q;
    four f = make_four("nf4", 4, 64, 64, 11);
    f.absmax[2] = NAN;
    CHECK_OK(open_with(&o, NF4_CONFIG, f.t, 4, &e));
    CHECK_ERR(quant_load(o.q, M, &q, &e), ERR_VALUE, "scale [2, 0]");
    close_it(&o);
    CHECK_ERR(open_with(&o, FP4_CONFIG, f.t, 4, &e), ERR_FORMAT, "stored as nf4");
    CHECK_ERR(open_with(&o, ", \"quantization_config\": {\"quant_method\": \"bitsandbytes\"}", f.t,
                        4, &e),
              ERR_FORMAT, "neither");
    CHECK_ERR(open_with(&o, "", f.t, 4, &e), ERR_FORMAT, "quantization_config");
    drop_four(&f);
}

/* ---- mxfp4 of gpt-oss ---------------------------------------------------------------------------
 */

#define X       "model.layers.0.mlp.experts.gate_up_proj"
#define MX_TAIL ", \"quantization_config\": {\"quant_method\": \"mxfp4\"}"

static void test_mxfp4(void **state)
{
    (void)state;
    err e = {0};
    opened o;
    qtensor t;
    uint8_t blocks[2 * 4 * 2 * 16], scales[2 * 4 * 2];
    for (size_t i = 0; i < sizeof blocks; i++)
        blocks[i] = (uint8_t)(i * 37 + 11);
    for (size_t i = 0; i < sizeof scales; i++)
        scales[i] = (uint8_t)(120 + i);
    fx_tensor b = {X "_blocks", NUM_U8, 3, {2 * 4, 2, 16}, blocks};
    fx_tensor s = {X "_scales", NUM_U8, 3, {2, 4, 2}, scales}, both[] = {b, s};
    CHECK_OK(open_with(&o, MX_TAIL, both, 2, &e));
    CHECK_ERR(quant_load(o.q, X, &t, &e), ERR_SHAPE, "columns / 32, 16");
    close_it(&o);
    CHECK_ERR(open_with(&o, MX_TAIL, both + 1, 1, &e), ERR_FORMAT, "_blocks");
    CHECK_OK(open_dir(&o, "tests/fixtures/quant/gpt_oss_mxfp4", &e));
    CHECK_OK(quant_load(o.q, X, &t, &e));
    assert_true(t.E == 4 && t.N == 256 && t.K == 128);
    const ckpt_tensor *codes = ckpt_find(o.c, X "_blocks"), *grid = ckpt_find(o.c, X "_scales");
    for (int r = 0; r < 4 * 256; r += 101) {
        float all[128];
        qtensor_decode_row(&t, r, all);
        for (int k = 0; k < 128; k++) {
            uint8_t byte = codes->data[(r * 128 + k) / 2];
            float want = ldexpf(num_fp4_table[k % 2 ? byte >> 4 : byte & 15],
                                grid->data[r * 4 + k / 32] - 127);
            assert_true(all[k] == want);
        }
    }
    int32_t rows[256]; /* gate rows, then up rows */
    for (int i = 0; i < 256; i++)
        rows[i] = i < 128 ? 2 * i : 2 * (i - 128) + 1;
    qtensor g;
    CHECK_OK(qtensor_rows(&t, rows, 256, &g, &e));
    float x[128], y[128];
    qtensor_decode_row(&g, 256 + 130, x);
    qtensor_decode_row(&t, 256 + 5, y);
    assert_memory_equal(x, y, sizeof x);
    qtensor_free(&g);
    qtensor_free(&t);
    close_it(&o);
}

/* Plain, its experts are turned: [E, in, out], as unquantized checkpoints of that model have them.
 */
static void test_mxfp4_plain(void **state)
{
    (void)state;
    err e = {0};
    bake_report r;
    opened a, b;
    qtensor q, p, t;
    char *out = fx_path("oss");
    CHECK_OK(bake_convert(
        &(convert_opts){.in = "tests/fixtures/quant/gpt_oss_mxfp4", .out = out, .dtype = "f32"}, &r,
        &e));
    bake_report_free(&r);
    CHECK_OK(open_dir(&a, "tests/fixtures/quant/gpt_oss_mxfp4", &e));
    CHECK_OK(open_dir(&b, out, &e));
    CHECK_OK(quant_load(a.q, X, &q, &e));
    CHECK_OK(quant_load(b.q, X, &p, &e));
    assert_true(p.E == 4 && p.N == 128 && p.K == 256);
    CHECK_OK(qtensor_transpose(&p, &t, &e));
    float x[128], y[128];
    for (int i = 0; i < 4 * 256; i++) {
        qtensor_decode_row(&q, i, x);
        qtensor_decode_row(&t, i, y);
        assert_memory_equal(x, y, sizeof x);
    }
    qtensor_free(&q);
    qtensor_free(&p);
    qtensor_free(&t);
    close_it(&a);
    close_it(&b);
    free(out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_blocks),       cmocka_unit_test(test_vectors),
        cmocka_unit_test(test_nested),       cmocka_unit_test(test_quantizes_as_the_library),
        cmocka_unit_test(test_quantize_nf4), cmocka_unit_test(test_storage_types),
        cmocka_unit_test(test_int8),         cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_mxfp4),        cmocka_unit_test(test_mxfp4_plain),
    };
    return cmocka_run_group_tests(tests, fx_setup, fx_teardown);
}
