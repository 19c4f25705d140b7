/* GPTQ, AWQ and auto-round: checkpoints of GPTQModel, AutoAWQ and auto-round by hash, packings by
 * literal vectors, labels of zero points, act-order through the kernels, and what is refused. */
#include "quant_fixture.h"
#include <openssl/evp.h>
#include "kern/kern.h"

#define M "model.layers.0.mlp.up_proj"

typedef struct opened {
    ckpt *c;
    quant_ckpt *q;
} opened;

static opened open_as(const char *dir, quant_opts o)
{
    err e = {0};
    opened x;
    CHECK_OK(ckpt_open(&x.c, dir, &e));
    CHECK_OK(quant_open_as(&x.q, x.c, &o, &e));
    return x;
}

static void close_it(opened *o)
{
    quant_close(o->q);
    ckpt_close(o->c);
}

/* ---- checkpoints of the tools -------------------------------------------------------------------
 */

static const struct {
    const char *name, *spec;
    int modules;
} cases[] = {
    {"gptq_v2_w4_g64_asym_desc_act", "w:int4,g64,asym,actorder a:bf16 kv:bf16", 7},
    {"gptq_w3_g64", "w:int3,g64 a:bf16 kv:bf16", 7},
    {"gptq_dynamic_rules", "w:int4,g128 a:bf16 kv:bf16", 6},
    {"gptq_moe_w4_g128", "w:int4,g128 a:bf16 kv:bf16", 16},
    {"awq_gemm_g64", "w:int4,g64,asym a:bf16 kv:bf16", 7},
    {"awq_gemv_g128", "w:int4,g128,asym a:bf16 kv:bf16", 7},
    {"awq_gemv_fast_g128", "w:int4,g128,asym a:bf16 kv:bf16", 7},
    {"auto_round_mixed", "w:int4,g128 a:bf16 kv:bf16", 7},
    {"auto_round_w4_g64_asym", "w:int4,g64,asym a:bf16 kv:bf16", 7},
    {"auto_round_mxfp4", "w:mxfp4,g32 a:mxfp4,g32 kv:bf16", 7},
};

/* In the tool's arithmetic; a zero without its sign. */
static void hash_weight(const qtensor *t, char hex[65])
{
    unsigned char d[32];
    float *row = xmalloc((size_t)t->K * sizeof *row);
    EVP_MD_CTX *m = EVP_MD_CTX_new();
    assert_int_equal(EVP_DigestInit_ex(m, EVP_sha256(), NULL), 1);
    for (int64_t r = 0; r < t->N; r++) {
        qtensor_decode_row(t, r, row);
        for (int64_t k = 0; k < t->K; k++)
            row[k] += 0.0f;
        EVP_DigestUpdate(m, row, (size_t)t->K * sizeof *row);
    }
    EVP_DigestFinal_ex(m, d, NULL);
    EVP_MD_CTX_free(m);
    free(row);
    for (int i = 0; i < 32; i++)
        snprintf(hex + 2 * i, 3, "%02x", d[i]);
}

static void check_module(const opened *o, const char *name, const json *m)
{
    err e = {0};
    qtensor t;
    quant_module d;
    char hex[65];
    assert_true(quant_has(o->q, m->string));
    CHECK_OK(quant_load(o->q, m->string, &t, &e));
    CHECK_OK(quant_describe(o->q, m->string, &d, &e));
    assert_int_equal(d.N, t.N);
    assert_int_equal(d.K, t.K);
    hash_weight(&t, hex);
    if (strcmp(hex, json_get(m, "sha256_fp32")->valuestring))
        fail_msg("%s %s: dequantized weight differs", name, m->string);
    qtensor_free(&t);
}

static void test_hashes(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        err e = {0};
        char *dir = xasprintf("tests/fixtures/quant/%s", cases[i].name);
        char *gold = file_join(dir, "golden.json");
        json *g;
        buf spec = {0};
        int n = 0, hits = 0;
        opened o = open_as(dir, (quant_opts){.dequantize = true});
        CHECK_OK(json_parse_file(&g, gold, &e));
        for (const json *m = json_get(g, "dequantized_fp32")->child; m; m = m->next, n++)
            check_module(&o, cases[i].name, m);
        assert_int_equal(n, cases[i].modules);
        for (int k = 0; k < o.q->n_groups; k++)
            if (strcmp(o.q->groups[k].format, "dense")) hits += o.q->groups[k].hits;
        assert_int_equal(hits, n);
        qspec_format(&o.q->groups[o.q->n_groups - 1].spec, &spec);
        assert_string_equal(spec.data, cases[i].spec);
        buf_free(&spec);
        json_drop(g);
        close_it(&o);
        free(gold);
        free(dir);
    }
}

/* Bytes by kind are those of the file. */
static void test_bytes(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        err e = {0};
        char *dir = xasprintf("tests/fixtures/quant/%s", cases[i].name), module[QUANT_NAME_MAX];
        opened o = open_as(dir, (quant_opts){0});
        qbytes b = {0};
        uint64_t parts = 0;
        for (size_t k = 0; k < ckpt_n_tensors(o.c); k++) {
            const ckpt_tensor *t = ckpt_tensor_at(o.c, k);
            const quant_part *p = quant_part_of(o.q, t->name, module);
            if (!p) continue;
            parts += t->bytes;
            if (p->kind == QUANT_CODES) CHECK_OK(quant_module_bytes(o.q, module, &b, &e));
        }
        assert_int_equal(b.total, parts);
        assert_int_equal(b.total, b.codes + b.scales + b.zeros + b.padding);
        assert_true(b.codes > 0 && b.scales > 0);
        assert_int_equal(b.unquantized, 0);
        close_it(&o);
        free(dir);
    }
}

/* inspect: every byte of the files has one kind, and the parameters are those of the model. */
static void test_inspect(void **state)
{
    (void)state;
    static const char *const kinds[] = {"codes", "scales", "zeros", "unquantized", "padding"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        err e = {0};
        char *dir = xasprintf("tests/fixtures/quant/%s", cases[i].name);
        buf b = {0};
        jw w;
        json *j;
        double sum = 0, all = 0;
        ckpt *c;
        jw_init(&w, &b, 0);
        CHECK_OK(bake_inspect(dir, &w, &e));
        CHECK_OK(json_parse(&j, b.data, b.len, "inspect", &e));
        CHECK_OK(ckpt_open(&c, dir, &e));
        for (size_t k = 0; k < ckpt_n_tensors(c); k++)
            all += (double)ckpt_tensor_at(c, k)->bytes;
        for (size_t k = 0; k < 5; k++)
            sum += json_get(json_get(j, "bytes"), kinds[k])->valuedouble;
        assert_true(sum == all);
        assert_int_equal(cJSON_GetArraySize(json_get(j, "modules")), cases[i].modules);
        if (cases[i].modules <= 7) assert_int_equal(json_get(j, "params")->valuedouble, 623360);
        ckpt_close(c);
        json_drop(j);
        buf_free(&b);
        free(dir);
    }
}

/* ---- packings by literal vectors ----------------------------------------------------------------
 */

static const uint16_t ones16[64] = {0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00,
                                    0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00,
                                    0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00,
                                    0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00, 0x3c00};

#define CONFIG(method, more) ", \"quantization_config\": {\"quant_method\": \"" method "\"" more "}"

static opened write_and_open(const char *name, const char *quant, const fx_tensor *t, size_t n,
                             quant_opts o)
{
    char *dir = fx_path(name), *config = fx_config(64, 64, 1, quant);
    fx_write(dir, config, t, n);
    opened x = open_as(dir, o);
    free(config);
    free(dir);
    return x;
}

/* u of (n, k) is code + 2^(b-1). */
static void check_codes(const qtensor *t, int64_t n, const int *u, int count)
{
    int half = 1 << (num_infos[t->code].bits - 1);
    for (int k = 0; k < count; k++)
        assert_int_equal(qtensor_code(t, n, k) + half, u[k]);
}

static void test_gptq_words(void **state)
{
    (void)state;
    err e = {0};
    qtensor t;
    /* Column 0 holds 0..7, column 1 holds 15..8; zero points of eight columns, v1 and v2. */
    const uint32_t q[8] = {0x76543210u, 0x89abcdefu}, v1[1] = {0x4b82e067u}, v2[1] = {0x5c93f178u};
    const int want[8] = {8, 7, 1, 15, 3, 9, 12, 5}, up[8] = {0, 1, 2, 3, 4, 5, 6, 7},
              down[8] = {15, 14, 13, 12, 11, 10, 9, 8};
    for (int v = 1; v <= 2; v++) {
        fx_tensor f[] = {{M ".qweight", NUM_I32, 2, {1, 8}, q},
                         {M ".qzeros", NUM_I32, 2, {1, 1}, v == 1 ? v1 : v2},
                         {M ".scales", NUM_F16, 2, {1, 8}, ones16}};
        opened o = write_and_open(
            "words",
            v == 1 ? CONFIG("gptq", ", \"bits\": 4, \"group_size\": 8, \"sym\": false")
                   : CONFIG("gptq", ", \"bits\": 4, \"group_size\": 8, \"sym\": "
                                    "false, \"checkpoint_format\": \"gptq_v2\""),
            f, 3, (quant_opts){0});
        CHECK_OK(quant_load(o.q, M, &t, &e));
        check_codes(&t, 0, up, 8);
        check_codes(&t, 1, down, 8);
        for (int n = 0; n < 8; n++)
            assert_int_equal(qtensor_zero(&t, n, 0) + 8, want[n]);
        qtensor_free(&t);
        close_it(&o);
    }
}

/* 3 bits: 32 codes in three words, 10 and 21 across two of them; 2 and 8 bits. */
static void test_gptq_widths(void **state)
{
    (void)state;
    static const struct {
        int bits;
        uint32_t words[3], zero_words[3];
        int n_words, K, mod;
    } w[] = {
        {3,
         {0x88fac688u, 0xc688fac6u, 0xfac688fau},
         {0xdb6db6dbu, 0xb6db6db6u, 0x6db6db6du},
         3,
         32,
         8},
        {2, {0xe4e4e4e4u}, {0x55555555u, 0x55555555u}, 1, 16, 4},
        {8, {0x03020100u}, {0x7f7f7f7fu, 0x7f7f7f7fu, 0x7f7f7f7fu}, 1, 4, 256},
    };
    for (size_t i = 0; i < 3; i++) {
        err e = {0};
        qtensor t;
        int64_t N = 32;
        uint32_t q[96], z[8];
        int u[32];
        for (int r = 0; r < w[i].n_words; r++)
            for (int n = 0; n < N; n++)
                q[r * N + n] = w[i].words[r];
        for (int r = 0; r < 8; r++)
            z[r] = w[i].zero_words[r % (w[i].bits == 3 ? 3 : 1)];
        for (int k = 0; k < w[i].K; k++)
            u[k] = k % w[i].mod;
        char *quant = xasprintf(CONFIG("gptq", ", \"bits\": %d, \"group_size\": -1"), w[i].bits);
        fx_tensor f[] = {{M ".qweight", NUM_I32, 2, {w[i].n_words, N}, q},
                         {M ".qzeros", NUM_I32, 2, {1, N * w[i].bits / 32}, z},
                         {M ".scales", NUM_F16, 2, {1, N}, ones16}};
        opened o = write_and_open("widths", quant, f, 3, (quant_opts){0});
        CHECK_OK(quant_load(o.q, M, &t, &e));
        assert_int_equal(t.K, w[i].K);
        assert_int_equal(t.spec.w.gran, Q_CHANNEL); /* group -1: one scale a row */
        assert_null(t.zeros);                       /* symmetric */
        check_codes(&t, 0, u, w[i].K);
        check_codes(&t, 31, u, w[i].K);
        qtensor_free(&t);
        close_it(&o);
        free(quant);
    }
}

static void test_awq_words(void **state)
{
    (void)state;
    err e = {0};
    qtensor t;
    /* [15,0,8,7,1,14,9,2], 0..7, 1..8 and again, in one line a column each. */
    const uint32_t q[4] = {0x2e70918fu, 0x75316420u, 0x86427531u, 0x75316420u},
                   z[1] = {0x75316420u};
    const int line[3][8] = {
        {15, 0, 8, 7, 1, 14, 9, 2}, {0, 1, 2, 3, 4, 5, 6, 7}, {1, 2, 3, 4, 5, 6, 7, 8}};
    fx_tensor f[] = {{M ".qweight", NUM_I32, 2, {4, 1}, q},
                     {M ".qzeros", NUM_I32, 2, {1, 1}, z},
                     {M ".scales", NUM_F16, 2, {1, 8}, ones16}};
    opened o = write_and_open("awq", CONFIG("awq", ", \"w_bit\": 4, \"q_group_size\": -1"), f, 3,
                              (quant_opts){0});
    CHECK_OK(quant_load(o.q, M, &t, &e));
    for (int n = 0; n < 8; n++) {
        for (int k = 0; k < 3; k++)
            assert_int_equal(qtensor_code(&t, n, k) + 8, line[k][n]);
        assert_int_equal(qtensor_zero(&t, n, 0) + 8, n); /* nothing subtracted */
    }
    assert_int_equal(t.spec.w.gran, Q_CHANNEL);
    qtensor_free(&t);
    close_it(&o);

    /* 8 bits: order 0 2 1 3. */
    const uint32_t q8[4] = {0x03010200u, 0x03010200u, 0, 0}, z8[2] = {0x83818280u, 0x83818280u};
    fx_tensor g[] = {{M ".qweight", NUM_I32, 2, {2, 2}, q8},
                     {M ".qzeros", NUM_I32, 2, {1, 2}, z8},
                     {M ".scales", NUM_F16, 2, {1, 8}, ones16}};
    o = write_and_open("awq8", CONFIG("awq", ", \"bits\": 8, \"group_size\": 128"), g, 3,
                       (quant_opts){0});
    CHECK_OK(quant_load(o.q, M, &t, &e));
    for (int n = 0; n < 4; n++) {
        assert_int_equal(qtensor_code(&t, n, 0) + 128, n);
        assert_int_equal(qtensor_zero(&t, n, 0), n);
    }
    qtensor_free(&t);
    close_it(&o);
}

/* Products that are no whole multiple of the scale stay fractions. */
static void test_fast_fractions(void **state)
{
    (void)state;
    err e = {0};
    qtensor t;
    uint16_t s[8 * 4], z[8 * 4];
    for (int i = 0; i < 32; i++) {
        s[i] = 0x3c00;              /* 1 */
        z[i] = i ? 0xc000 : 0xc100; /* -2, and -2.5 */
    }
    fx_tensor f[] = {{M ".qweight", NUM_I16, 2, {1, 64}, NULL},
                     {M ".qzeros", NUM_F16, 2, {8, 4}, z},
                     {M ".scales", NUM_F16, 2, {8, 4}, s}};
    opened o = write_and_open(
        "fast", CONFIG("awq", ", \"bits\": 4, \"group_size\": 128, \"version\": \"gemv_fast\""), f,
        3, (quant_opts){0});
    CHECK_OK(quant_load(o.q, M, &t, &e));
    float row[64];
    qtensor_decode_row(&t, 0, row);
    assert_true(row[0] == -2.5f && row[63] == -2.5f);
    qtensor_decode_row(&t, 1, row);
    assert_true(row[0] == -2.0f);
    qtensor_free(&t);
    close_it(&o);
}

/* ---- labels of zero points ----------------------------------------------------------------------
 */

/* A 64 x 64 weight of noise, packed as GPTQ with the zero points of the given format. */
typedef struct made {
    uint32_t q[8 * 64], z[64 / 8];
    uint16_t s[64];
    int32_t g[64];
} made;

static void make_weight(made *m, bool sym, int minus)
{
    uint64_t seed = 7;
    memset(m, 0, sizeof *m);
    for (int n = 0; n < 64; n++) {
        int zero = sym ? 8 : 5 + n % 6;
        m->s[n] = 0x2e66;
        m->z[n / 8] |= (uint32_t)(zero - minus) << (4 * (n % 8));
        for (int k = 0; k < 64; k++) {
            int u = zero + (int)lrintf(fx_noise(&seed) * 6);
            u = u < 0 ? 0 : u > 15 ? 15 : u;
            m->q[k / 8 * 64 + n] |= (uint32_t)u << (4 * (k % 8));
        }
    }
    for (int k = 0; k < 64; k++)
        m->g[k] = k / 64;
}

static int load_made(const made *m, const char *config, quant_opts o, const int32_t *g, qtensor *t,
                     err *e)
{
    fx_tensor f[] = {{M ".qweight", NUM_I32, 2, {8, 64}, m->q},
                     {M ".qzeros", NUM_I32, 2, {1, 8}, m->z},
                     {M ".scales", NUM_F16, 2, {1, 64}, m->s},
                     {M ".g_idx", NUM_I32, 1, {64}, g ? g : m->g}};
    opened x = write_and_open("made", config, f, 4, o);
    int rc = quant_load(x.q, M, t, e);
    close_it(&x);
    return rc;
}

static void test_labels(void **state)
{
    (void)state;
    static const char *const configs[2][2] = {
        {CONFIG("gptq", ", \"bits\": 4, \"group_size\": 64, \"sym\": false"),
         CONFIG("gptq", ", \"bits\": 4, \"group_size\": 64, \"sym\": false, \"checkpoint_format\": "
                        "\"gptq_v2\"")},
        {CONFIG("gptq", ", \"bits\": 4, \"group_size\": 64, \"sym\": true"),
         CONFIG("gptq", ", \"bits\": 4, \"group_size\": 64, \"sym\": true, \"checkpoint_format\": "
                        "\"gptq_v2\"")}};
    static const char *const names[2] = {"v1", "v2"};
    for (int sym = 0; sym < 2; sym++)
        for (int is = 0; is < 2; is++)
            for (int label = 0; label < 2; label++) {
                made m;
                qtensor t;
                err e = {0};
                make_weight(&m, sym, is ? 0 : 1);
                const char *config = configs[sym][label];
                if (is == label) {
                    CHECK_OK(load_made(&m, config, (quant_opts){0}, NULL, &t, &e));
                    assert_int_equal((int)qtensor_zero(&t, 1, 0), sym ? 0 : -2);
                    qtensor_free(&t);
                    continue;
                }
                char *say = xasprintf("--gptq-zeros %s if they are", names[is]);
                CHECK_ERR(load_made(&m, config, (quant_opts){0}, NULL, &t, &e), ERR_FORMAT, say);
                err_clear(&e);
                CHECK_OK(
                    load_made(&m, config, (quant_opts){.gptq_zeros = names[is]}, NULL, &t, &e));
                assert_int_equal((int)qtensor_zero(&t, 1, 0), sym ? 0 : -2);
                qtensor_free(&t);
                free(say);
            }
    made m;
    qtensor t;
    err e = {0};
    make_weight(&m, false, 1);
    CHECK_ERR(load_made(&m, configs[1][0], (quant_opts){0}, NULL, &t, &e), ERR_FORMAT, "symmetric");
    err_clear(&e);
    CHECK_OK(load_made(&m, configs[0][0], (quant_opts){.gptq_zeros = "v2"}, NULL, &t, &e));
    assert_int_equal((int)qtensor_zero(&t, 1, 0), -3); /* told so: not held against the weights */
    qtensor_free(&t);
}

/* The words of v1 are those of v2 minus 0x11111111: a zero point of 0 borrows from its neighbour.
 */
static void test_borrowed_zeros(void **state)
{
    (void)state;
    made m;
    qtensor t;
    err e = {0};
    const char *v1 = CONFIG("gptq", ", \"bits\": 4, \"group_size\": 64, \"sym\": false");
    const int want[8] = {0, 8, 0, 0, 15, 1, 7, 0};
    make_weight(&m, false, 1);
    m.z[0] = 0;
    for (int i = 0; i < 8; i++)
        m.z[0] |= (uint32_t)want[i] << (4 * i);
    m.z[0] -= 0x11111111u;
    CHECK_OK(load_made(&m, v1, (quant_opts){.gptq_zeros = "v1"}, NULL, &t, &e));
    for (int i = 0; i < 8; i++)
        assert_int_equal((int)qtensor_zero(&t, i, 0) + 8, want[i]);
    qtensor_free(&t);
}

/* 44 inputs and 12 outputs, which fill no words: g_idx tells K, the rest of the words is padding.
 */
static void test_ragged(void **state)
{
    (void)state;
    err e = {0};
    uint32_t q[6 * 12], z[2 * 2];
    int32_t g[44];
    qtensor t;
    quant_module d;
    qbytes b = {0};
    for (int i = 0; i < 72; i++)
        q[i] = 0x76543210u;
    for (int i = 0; i < 4; i++)
        z[i] = 0x77777777u;
    for (int k = 0; k < 44; k++)
        g[k] = k / 32;
    fx_tensor f[] = {{M ".qweight", NUM_I32, 2, {6, 12}, q},
                     {M ".qzeros", NUM_I32, 2, {2, 2}, z},
                     {M ".scales", NUM_F16, 2, {2, 12}, ones16},
                     {M ".g_idx", NUM_I32, 1, {44}, g}};
    opened o = write_and_open("ragged", CONFIG("gptq", ", \"bits\": 4, \"group_size\": 32"), f, 4,
                              (quant_opts){0});
    CHECK_OK(quant_load(o.q, M, &t, &e));
    CHECK_OK(quant_describe(o.q, M, &d, &e));
    CHECK_OK(quant_module_bytes(o.q, M, &b, &e));
    assert_int_equal(t.K, 44);
    assert_int_equal(d.K, 44);
    assert_int_equal(b.codes, 44 * 12 / 2);
    assert_int_equal(b.padding, 4 * 12 / 2 + 44 * 4);
    float row[44];
    qtensor_decode_row(&t, 11, row);
    assert_true(row[43] == -5.0f && row[40] == -8.0f);
    qtensor_free(&t);
    close_it(&o);
}

/* ---- order of columns ---------------------------------------------------------------------------
 */

/* The kernels sort the columns by group; the product is that of the decoded rows. */
static void test_act_order_runs(void **state)
{
    (void)state;
    err e = {0};
    static const char *const models[] = {"gptq_v2_w4_g64_asym_desc_act", "gptq_w3_g64"};
    kern_dev *dev;
    kern_opts ko = {.device = "cpu", .threads = 1, .cpu_features = cpu_detect()};
    CHECK_OK(kern_open(&dev, &ko, &e));
    for (size_t i = 0; i < 2; i++) {
        char *dir = xasprintf("tests/fixtures/quant/%s", models[i]);
        opened o = open_as(dir, (quant_opts){0});
        qtensor t;
        kern_linear *l;
        CHECK_OK(quant_load(o.q, "model.layers.0.mlp.down_proj", &t, &e));
        assert_int_equal(t.g_idx != NULL, i == 0);
        assert_int_equal(t.spec.w.actorder, i == 0);
        const qtensor *shards[] = {&t};
        kern_linear_desc d = {
            .name = "down", .n_shards = 1, .shard = {shards[0]}, .act = KERN_ACT_F32};
        CHECK_OK(kern_linear_make(dev, &d, &l, &e));
        assert_false(kern_linear_choice(l, 0)->reference && cpu_detect());
        float *w = xmalloc((size_t)(t.N * t.K) * sizeof *w),
              *row = xmalloc((size_t)t.K * sizeof *row);
        kern_linear_unpack(l, w);
        for (int64_t n = 0; n < t.N; n++) {
            qtensor_decode_row(&t, n, row);
            for (int64_t k = 0; k < t.K; k++)
                assert_float_equal(w[n * t.K + k], row[k], 1e-6f);
        }
        free(w);
        free(row);
        kern_linear_drop(dev, l);
        qtensor_free(&t);
        close_it(&o);
        free(dir);
    }
    kern_close(dev);
}

/* ---- rules --------------------------------------------------------------------------------------
 */

static bool hits(quant_rule_kind kind, const char *rule, const char *module)
{
    err e = {0};
    quant_rule *r;
    CHECK_OK(quant_rule_make_as(&r, kind, rule, &e));
    bool hit = quant_rule_match(r, module);
    quant_rule_drop(r);
    return hit;
}

static void test_rule_kinds(void **state)
{
    (void)state;
    const char *up = "model.layers.1.mlp.up_proj", *mtp = "mtp.layers.0.mlp.up_proj";
    assert_true(hits(QUANT_RULE_GLOB, "model.layers.1*", up));
    assert_true(hits(QUANT_RULE_GLOB, "model.layers.1*", "model.layers.11.mlp.up_proj"));
    assert_false(hits(QUANT_RULE_GLOB, "model.layers.1*", "model.layers.2.mlp.up_proj"));
    assert_false(hits(QUANT_RULE_GLOB, "layers.1*", up)); /* the whole name */
    assert_true(hits(QUANT_RULE_GLOB, "mtp*", mtp));
    assert_true(hits(QUANT_RULE_GLOB, "*.[0-1].mlp.*", up));
    assert_false(hits(QUANT_RULE_GLOB, "*.[!0-1].mlp.*", up));
    assert_true(hits(QUANT_RULE_GLOB, "*layers.?.mlp.up_pro[j]", up));
    assert_true(hits(QUANT_RULE_GLOB, "a[b", "a[b")); /* never closed: a letter */
    assert_true(hits(QUANT_RULE_SUBSTRING, "mlp.up", up));
    assert_true(hits(QUANT_RULE_COMPONENT, "mlp", up));
    assert_true(hits(QUANT_RULE_COMPONENT, "layers.1", up));
    assert_false(hits(QUANT_RULE_COMPONENT, "layers.1", "model.layers.11.mlp.up_proj"));
    assert_false(hits(QUANT_RULE_COMPONENT, "mlp.gate", "model.layers.1.mlp.gate_proj"));
    assert_true(hits(QUANT_RULE_COMPONENT, "mlp.gate", "model.layers.1.mlp.gate"));
}

static const char *format_of(const quant_ckpt *q, const char *module)
{
    const quant_group *g = quant_group_of(q, module);
    return g ? g->format : "none";
}

/* The first rule in file order decides; fields that it lacks come from the top. */
static void test_dynamic(void **state)
{
    (void)state;
    made m;
    make_weight(&m, true, 1);
    fx_tensor f[] = {{M ".qweight", NUM_I32, 2, {8, 64}, m.q},
                     {M ".qzeros", NUM_I32, 2, {1, 8}, m.z},
                     {M ".scales", NUM_F16, 2, {1, 64}, m.s},
                     {M ".g_idx", NUM_I32, 1, {64}, m.g}};
    opened o = write_and_open(
        "dynamic",
        CONFIG("gptq",
               ", \"bits\": 4, \"group_size\": 64, \"dynamic\": {\"+:.*\\\\.0\\\\..*down\": "
               "{\"bits\": 8}, \"-:.*down\": {}, \".*gate\": {\"group_size\": 32, \"sym\": "
               "false}}"),
        f, 4, (quant_opts){0});
    const quant_group *g = quant_group_of(o.q, "model.layers.0.mlp.down_proj");
    assert_int_equal(g->spec.w.type, NUM_I8);
    assert_int_equal(g->spec.w.group, 64);
    assert_string_equal(format_of(o.q, "model.layers.1.mlp.down_proj"), "dense");
    g = quant_group_of(o.q, "model.layers.1.mlp.gate_proj");
    assert_int_equal(g->spec.w.group, 32);
    assert_true(g->spec.w.asym && g->spec.w.type == NUM_I4);
    g = quant_group_of(o.q, M);
    assert_true(!g->spec.w.asym && g->spec.w.group == 64 && g->hits == 1);
    close_it(&o);
}

/* The tools' own files count where config.json says nothing, and only beside such tensors. */
static void test_side_files(void **state)
{
    (void)state;
    err e = {0};
    made m;
    make_weight(&m, true, 1);
    fx_tensor f[] = {{M ".qweight", NUM_I32, 2, {8, 64}, m.q},
                     {M ".qzeros", NUM_I32, 2, {1, 8}, m.z},
                     {M ".scales", NUM_F16, 2, {1, 64}, m.s},
                     {M ".g_idx", NUM_I32, 1, {64}, m.g}};
    fx_tensor plain[] = {{M ".weight", NUM_BF16, 2, {8, 8}, NULL}};
    static const char text[] = "{\"bits\": 4, \"group_size\": 64, \"desc_act\": false}";
    for (int i = 0; i < 2; i++) {
        char *dir = fx_path("side"), *config = fx_config(64, 64, 1, ""),
             *side = file_join(dir, "quantize_config.json");
        fx_write(dir, config, i ? plain : f, i ? 1 : 4);
        CHECK_OK(file_write_atomic(side, text, sizeof text - 1, &e));
        opened o = open_as(dir, (quant_opts){0});
        assert_string_equal(o.q->dialect->name, i ? "plain" : "gptq");
        close_it(&o);
        free(config);
        free(side);
        free(dir);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hashes),         cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_inspect),        cmocka_unit_test(test_gptq_words),
        cmocka_unit_test(test_gptq_widths),    cmocka_unit_test(test_awq_words),
        cmocka_unit_test(test_fast_fractions), cmocka_unit_test(test_labels),
        cmocka_unit_test(test_borrowed_zeros), cmocka_unit_test(test_ragged),
        cmocka_unit_test(test_act_order_runs), cmocka_unit_test(test_rule_kinds),
        cmocka_unit_test(test_dynamic),        cmocka_unit_test(test_side_files),
    };
    return cmocka_run_group_tests(tests, fx_setup, fx_teardown);
}
