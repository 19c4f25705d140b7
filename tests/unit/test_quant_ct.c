/* compressed-tensors: checkpoints of llm-compressor by hash, the scale rules against its scales,
 * and layouts that no fixture has, by literal vectors. */
#include "quant_fixture.h"
#include <openssl/evp.h>

typedef struct opened {
    ckpt *c;
    quant_ckpt *q;
} opened;

static opened open_at(const char *dir)
{
    err e = {0};
    opened o;
    CHECK_OK(ckpt_open(&o.c, dir, &e));
    CHECK_OK(quant_open(&o.q, o.c, &e));
    return o;
}

static void close_it(opened *o)
{
    quant_close(o->q);
    ckpt_close(o->c);
}

static void hash_weight(const qtensor *t, num_dtype as, char hex[65])
{
    unsigned char d[32];
    float *row = xmalloc((size_t)t->K * sizeof *row);
    EVP_MD_CTX *m = EVP_MD_CTX_new();
    assert_int_equal(EVP_DigestInit_ex(m, EVP_sha256(), NULL), 1);
    for (int64_t r = 0; r < t->N; r++) {
        qtensor_decode_row_as(t, r, as, row);
        EVP_DigestUpdate(m, row, (size_t)t->K * sizeof *row);
    }
    EVP_DigestFinal_ex(m, d, NULL);
    EVP_MD_CTX_free(m);
    free(row);
    for (int i = 0; i < 32; i++)
        snprintf(hex + 2 * i, 3, "%02x", d[i]);
}

static const struct {
    const char *name, *spec;
    int modules;
} cases[] = {
    {"ct_w3a16", "w:int3,g128 a:bf16 kv:bf16", 7},
    {"ct_w4a16_asym_g128", "w:int4,g128,asym a:bf16 kv:bf16", 7},
    {"ct_mixed_w4_fp8", "w:int4,g128 a:bf16 kv:bf16", 6},
    {"ct_nvfp4", "w:nvfp4,g16 a:nvfp4,g16 kv:bf16", 7},
    {"ct_fp8_kv_head", "w:fp8_e4m3,channel a:fp8_e4m3,token kv:fp8_e4m3,head", 7},
    {"ct_w4a8", "w:int4,g128 a:int8,token kv:bf16", 7},
};

static void test_hashes(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        err e = {0};
        char *dir = xasprintf("tests/fixtures/quant/%s", cases[i].name), hex[65];
        char *gold = file_join(dir, "golden.json");
        json *g;
        buf spec = {0};
        opened o = open_at(dir);
        CHECK_OK(json_parse_file(&g, gold, &e));
        const char *in = json_get(g, "dequantized_in")->valuestring;
        num_dtype as = !strcmp(in, "torch.bfloat16") ? NUM_BF16 : NUM_F32;
        int n = 0;
        for (const json *m = json_get(g, "dequantized_fp32")->child; m; m = m->next, n++) {
            qtensor t;
            assert_true(quant_has(o.q, m->string));
            CHECK_OK(quant_load(o.q, m->string, &t, &e));
            hash_weight(&t, as, hex);
            if (strcmp(hex, json_get(m, "sha256_fp32")->valuestring))
                fail_msg("%s %s: dequantized weight differs", cases[i].name, m->string);
            qtensor_free(&t);
        }
        assert_int_equal(n, cases[i].modules);
        qspec_format(&o.q->groups[0].spec, &spec);
        assert_string_equal(spec.data, cases[i].spec);
        buf_free(&spec);
        json_drop(g);
        close_it(&o);
        free(gold);
        free(dir);
    }
}

/* ---- scale rules --------------------------------------------------------------------------------
 */

static const char *const linears[7] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                       "self_attn.o_proj", "mlp.gate_proj",    "mlp.up_proj",
                                       "mlp.down_proj"};

static float *load_f32(const opened *o, const char *module, int64_t *N, int64_t *K, float *amax)
{
    err e = {0};
    qtensor t;
    CHECK_OK(quant_load(o->q, module, &t, &e));
    float *w = xmalloc((size_t)(t.N * t.K) * sizeof *w);
    *amax = 0;
    for (int64_t r = 0; r < t.N; r++)
        qtensor_decode_row(&t, r, w + r * t.K);
    for (int64_t i = 0; i < t.N * t.K; i++)
        if (fabsf(w[i]) > *amax) *amax = fabsf(w[i]);
    *N = t.N;
    *K = t.K;
    qtensor_free(&t);
    return w;
}

static float max3(float a, float b, float c)
{
    return fmaxf(a, fmaxf(b, c));
}

/* Scales, zero points and second-level scales bit-equal; the error at most the library's. */
static void test_rtn_against_library(void **state)
{
    (void)state;
    err e = {0};
    team *tm;
    opened src = open_at("tests/fixtures/quant/source");
    float *w[7], amax[7];
    int64_t N[7], K[7];
    CHECK_OK(team_open(&tm, 3, &e));
    for (int m = 0; m < 7; m++) {
        char *name = xasprintf("model.layers.0.%s", linears[m]);
        w[m] = load_f32(&src, name, &N[m], &K[m], &amax[m]);
        free(name);
    }
    float qkv = max3(amax[0], amax[1], amax[2]), gu = fmaxf(amax[4], amax[5]);
    int compared = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *dir = xasprintf("tests/fixtures/quant/%s", cases[i].name);
        opened o = open_at(dir);
        for (int m = 0; m < 7; m++) {
            char *name = xasprintf("model.layers.0.%s", linears[m]);
            qtensor theirs, ours, alone;
            quant_stats st = {m < 3              ? qkv
                              : m == 4 || m == 5 ? gu
                                                 : 0,
                              tm},
                        one = {st.fused_amax, NULL};
            if (quant_has(o.q, name)) {
                CHECK_OK(quant_load(o.q, name, &theirs, &e));
                qspec s = theirs.spec;
                const quant_algo *rtn = quant_algo_by_name("rtn");
                CHECK_OK(rtn->quantize(w[m], N[m], K[m], &s, NUM_BF16, &st, &ours, &e));
                CHECK_OK(rtn->quantize(w[m], N[m], K[m], &s, NUM_BF16, &one, &alone, &e));
                size_t grid = (size_t)(ours.scale_rows * ours.scale_cols);
                assert_int_equal(ours.scale_type, theirs.scale_type);
                assert_memory_equal(ours.scales, theirs.scales,
                                    grid * num_bytes(ours.scale_type, 1));
                if (theirs.zeros) assert_memory_equal(ours.zeros, theirs.zeros, grid);
                if (theirs.n_global) assert_true(ours.global[0] == theirs.global[0]);
                assert_true(quant_snr_db(w[m], &ours) >= quant_snr_db(w[m], &theirs));
                assert_memory_equal(ours.codes, alone.codes, (size_t)N[m] * ours.row_bytes);
                compared++;
                qtensor_free(&ours);
                qtensor_free(&alone);
                qtensor_free(&theirs);
            }
            free(name);
        }
        close_it(&o);
        free(dir);
    }
    assert_int_equal(compared, 41);
    for (int m = 0; m < 7; m++)
        free(w[m]);
    team_close(tm);
    close_it(&src);
}

static qtensor quantize_text(const char *scheme, const float *w, int64_t N, int64_t K)
{
    err e = {0};
    qspec s;
    qtensor t;
    CHECK_OK(qspec_parse(scheme, &s, &e));
    CHECK_OK(quant_algo_by_name("rtn")->quantize(w, N, K, &s, NUM_BF16, NULL, &t, &e));
    return t;
}

static void test_rtn_vectors(void **state)
{
    (void)state;
    const float w4[8] = {.9375f, -.9375f, .0625f, .1875f, -.3125f, .4375f, .25f, -.5f};
    const int q4[8] = {7, -8, 0, 2, -2, 4, 2, -4};
    qtensor t = quantize_text("w:int4,g8", w4, 1, 8);
    assert_true(qtensor_scale(&t, 0, 0) == 0.125f);
    for (int i = 0; i < 8; i++)
        assert_int_equal(qtensor_code(&t, 0, i), q4[i]);
    qtensor_free(&t);

    const float fp4[16] = {.05f, -.1f,   .2f,  -.3f,   .4f, -.55f, .7f,  -.85f,
                           1,    -1.25f, 1.5f, -1.75f, 2,   -2.4f, 2.7f, -3};
    const uint8_t b4[8] = {0x80, 0x91, 0xa2, 0xb3, 0xc4, 0xe5, 0xe6, 0xf7};
    err e = {0};
    qspec s;
    quant_stats st = {.fused_amax = 6};
    CHECK_OK(qspec_parse("w:nvfp4,g16", &s, &e));
    CHECK_OK(quant_algo_by_name("rtn")->quantize(fp4, 1, 16, &s, NUM_F32, &st, &t, &e));
    assert_int_equal(((const uint8_t *)t.scales)[0], 0x76);
    assert_memory_equal(t.codes, b4, 8);
    qtensor_free(&t);

    float mx[32];
    const float v[32] = {0,    .1f,  .2f,  .3f,  .4f,  .5f,  .6f,  .7f,  .8f,  .9f, 1,
                         1.1f, 1.2f, 1.3f, 1.4f, 1.5f, 1.6f, 1.7f, 1.8f, 1.9f, 2,   2.1f,
                         2.2f, 2.3f, 2.4f, 2.5f, 2.6f, 2.7f, 2.8f, 2.9f, 3,    3.4f};
    const uint8_t bm[16] = {0x00, 0x19, 0x2a, 0x3a, 0x4b, 0x4c, 0x5c, 0x5d,
                            0x5d, 0x6e, 0x6e, 0x6e, 0x6e, 0x7f, 0x7f, 0x7f};
    for (int i = 0; i < 32; i++)
        mx[i] = i % 2 == 0 && i ? -v[i] : v[i];
    mx[30] = -3;
    t = quantize_text("mxfp4", mx, 1, 32);
    assert_int_equal(((const uint8_t *)t.scales)[0], 0x7e);
    for (int i = 0; i < 16; i++) /* magnitudes: the vector's signs alternate the other way */
        assert_int_equal(t.codes[i] & 0x77, bm[i] & 0x77);
    qtensor_free(&t);

    const float zero[16] = {0};
    t = quantize_text("w:int4,g16", zero, 1, 16);
    assert_true(qtensor_scale(&t, 0, 0) == 0x1p-7f);
    qtensor_free(&t);
    t = quantize_text("nvfp4", zero, 1, 16);
    assert_int_equal(((const uint8_t *)t.scales)[0], 0x20);
    qtensor_free(&t);
    t = quantize_text("int8", zero, 1, 16);
    assert_true(qtensor_scale(&t, 0, 0) == 0x1p-7f);
    qtensor_free(&t);

    /* Ragged blocks: rows 128 and on have a scale of their own. */
    float *big = xcalloc(130 * 130, sizeof *big);
    big[0] = 448;
    big[129 * 130 + 129] = 4.48f;
    t = quantize_text("fp8-block", big, 130, 130);
    assert_int_equal(t.scale_rows * t.scale_cols, 4);
    assert_true(qtensor_scale(&t, 127, 127) == 1.0f);
    assert_true(qtensor_scale(&t, 129, 129) == num_round(NUM_BF16, 4.48f / 448));
    qtensor_free(&t);
    free(big);
}

/* ---- layouts without a fixture ------------------------------------------------------------------
 */

#define GROUP(weights, acts)                                                                       \
    ", \"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"ignore\": "           \
    "[\"lm_head\"], \"config_groups\": {\"group_0\": {\"targets\": [\"Linear\"], "                 \
    "\"weights\": " weights ", \"input_activations\": " acts "}}}"
#define M "model.layers.0.mlp.down_proj"

static qtensor load_one(const char *extra, const fx_tensor *t, size_t n, opened *o)
{
    err e = {0};
    char *dir = fx_path("one"), *config = fx_config(64, 64, 1, extra);
    qtensor q;
    fx_write(dir, config, t, n);
    *o = open_at(dir);
    CHECK_OK(quant_load(o->q, M, &q, &e));
    free(dir);
    free(config);
    return q;
}

static void test_old_three_bit_layout(void **state)
{
    (void)state;
    const uint32_t dense[3] = {0x88fac688, 0xc688fac6, 0xfac688fa};
    uint32_t old[4] = {0};
    const int64_t shape[2] = {1, 32};
    const uint16_t one = num_f32_to_bf16(1);
    opened o;
    for (uint32_t i = 0; i < 32; i++)
        old[i / 10] |= i % 8 << i % 10 * 3;
    assert_int_equal(old[0], 0x08fac688);
    for (int variant = 0; variant < 2; variant++) {
        fx_tensor t[] = {{M ".weight_packed",
                          NUM_I32,
                          2,
                          {1, variant ? 4 : 3},
                          variant ? (const void *)old : dense},
                         {M ".weight_scale", NUM_BF16, 2, {1, 1}, &one},
                         {M ".weight_shape", NUM_I64, 1, {2}, shape}};
        qtensor q = load_one(
            GROUP("{\"num_bits\": 3, \"strategy\": \"group\", \"group_size\": 32}", "null"), t, 3,
            &o);
        for (int i = 0; i < 32; i++)
            assert_int_equal(qtensor_code(&q, 0, i), i % 8 - 4);
        qtensor_free(&q);
        close_it(&o);
    }
}

/* Random codes of every width in both layouts, zero points too; sizes for which both take as many
 * words follow the version. */
static void test_layouts_by_width_and_version(void **state)
{
    (void)state;
    static const int sizes[] = {20, 32, 64, 96, 40};
    uint64_t seed = 5;
    for (int bits = 2; bits <= 8; bits++)
        for (int k = 0; k < 5; k++)
            for (int old = 0; old < 2; old++) {
                enum { N = 20 };
                const int K = sizes[k], per = 32 / bits;
                const int64_t wd = (K * bits + 31) / 32, wo = (K + per - 1) / per,
                              zd = (N * bits + 31) / 32, zo = (N + per - 1) / per;
                const int64_t W = old ? wo : wd, Z = old ? zo : zd, shape[2] = {N, K};
                uint32_t *words = xcalloc((size_t)(N * W), 4), *zeros = xcalloc((size_t)Z, 4);
                uint8_t code[N][96], zero[N];
                uint16_t scale[N];
                for (int r = 0; r < N; r++) {
                    uint8_t *row = (uint8_t *)(words + r * W);
                    scale[r] = num_f32_to_bf16(1);
                    for (int i = 0; i < K; i++) {
                        code[r][i] =
                            (uint8_t)((uint64_t)(fx_noise(&seed) * 1e6f + 1e6f) % (1u << bits));
                        if (old)
                            words[r * W + i / per] |= (uint32_t)code[r][i] << i % per * bits;
                        else
                            num_put_bits(row, (size_t)i, bits, code[r][i]);
                    }
                    zero[r] = (uint8_t)((unsigned)r % (1u << bits));
                    if (old)
                        zeros[r / per] |= (uint32_t)zero[r] << r % per * bits;
                    else
                        num_put_bits((uint8_t *)zeros, (size_t)r, bits, zero[r]);
                }
                fx_tensor t[] = {{M ".weight_packed", NUM_I32, 2, {N, W}, words},
                                 {M ".weight_scale", NUM_BF16, 2, {N, 1}, scale},
                                 {M ".weight_zero_point", NUM_I32, 2, {Z, 1}, zeros},
                                 {M ".weight_shape", NUM_I64, 1, {2}, shape}};
                char *group = xasprintf(
                    ", \"quantization_config\": {\"quant_method\": \"compressed-tensors\", "
                    "\"version\": \"%s\", \"config_groups\": {\"group_0\": {\"targets\": "
                    "[\"Linear\"], \"weights\": {\"num_bits\": %d, \"strategy\": \"channel\", "
                    "\"symmetric\": false}}}}",
                    old ? "0.12.2" : "0.18.0", bits);
                opened o;
                qtensor q = load_one(group, t, 4, &o);
                for (int r = 0; r < N; r++)
                    for (int i = 0; i < K; i++)
                        if (qtensor_code(&q, r, i) != code[r][i] - (1 << (bits - 1)) ||
                            qtensor_zero(&q, r, i) != (float)(zero[r] - (1 << (bits - 1))))
                            fail_msg("%d bits, K %d, %s: [%d, %d]", bits, K, old ? "old" : "dense",
                                     r, i);
                qtensor_free(&q);
                close_it(&o);
                free(group);
                free(words);
                free(zeros);
            }
}

/* naive-quantized is float-quantized or int-quantized under an older name. */
static void test_naive(void **state)
{
    (void)state;
    const uint8_t w[4] = {0x38, 0xb8, 0x40, 0x7e};
    const float scale = 0.5f, want[2][4] = {{.5f, -.5f, 1, 224}, {28, -36, 32, 63}};
    for (int i = 0; i < 2; i++) {
        fx_tensor t[] = {{M ".weight", i ? NUM_I8 : NUM_F8_E4M3, 2, {1, 4}, w},
                         {M ".weight_scale", NUM_F32, 1, {1}, &scale}};
        char *group = xasprintf(
            ", \"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"format\": "
            "\"naive-quantized\", \"config_groups\": {\"group_0\": {\"targets\": [\"Linear\"], "
            "\"weights\": {\"num_bits\": 8, \"type\": \"%s\", \"strategy\": \"tensor\"}}}}",
            i ? "int" : "float");
        opened o;
        qtensor q = load_one(group, t, 2, &o);
        float row[4];
        qtensor_decode_row(&q, 0, row);
        assert_memory_equal(row, want[i], sizeof row);
        qtensor_free(&q);
        close_it(&o);
        free(group);
    }
}

/* Nibbles, zero points along the rows, and columns that belong to groups out of order. */
static void test_int4_words_zeros_and_g_idx(void **state)
{
    (void)state;
    uint32_t packed[8][2], zeros[2] = {0x76543210, 0xfedcba98};
    const int64_t shape[2] = {8, 16};
    int32_t g_idx[16];
    uint16_t scale[16];
    opened o;
    for (int r = 0; r < 8; r++) {
        packed[r][0] = 0x76543210;
        packed[r][1] = 0xfedcba98;
        scale[2 * r] = num_f32_to_bf16(1);
        scale[2 * r + 1] = num_f32_to_bf16(4);
    }
    for (int k = 0; k < 16; k++)
        g_idx[k] = k % 2;
    fx_tensor t[] = {{M ".weight_packed", NUM_I32, 2, {8, 2}, packed},
                     {M ".weight_scale", NUM_BF16, 2, {8, 2}, scale},
                     {M ".weight_shape", NUM_I64, 1, {2}, shape},
                     {M ".weight_zero_point", NUM_I32, 2, {1, 2}, zeros},
                     {M ".weight_g_idx", NUM_I32, 1, {16}, g_idx}};
    qtensor q = load_one(GROUP("{\"num_bits\": 4, \"strategy\": \"group\", \"group_size\": 8, "
                               "\"symmetric\": false, \"actorder\": \"group\"}",
                               "null"),
                         t, 5, &o);
    float row[16];
    for (int r = 0; r < 8; r++) {
        qtensor_decode_row(&q, r, row);
        for (int k = 0; k < 16; k++) {
            assert_int_equal(qtensor_code(&q, r, k), k - 8);
            float want = k % 2 ? ((float)k - 8 - (float)r) * 4 : (float)k - 8 - ((float)r - 8);
            assert_true(row[k] == want);
        }
    }
    qtensor_free(&q);
    close_it(&o);
}

/* Ragged fp8 blocks: rows 0 to 127 are 1, …, rows 896 to 999 are 8. */
static void test_ragged_blocks(void **state)
{
    (void)state;
    uint8_t *codes = xmalloc(1000 * 256);
    float scale[8][2], row[256];
    opened o;
    memset(codes, 0x38, 1000 * 256);
    for (int r = 0; r < 8; r++)
        scale[r][0] = scale[r][1] = (float)(r + 1);
    fx_tensor t[] = {{M ".weight", NUM_F8_E4M3, 2, {1000, 256}, codes},
                     {M ".weight_scale", NUM_F32, 2, {8, 2}, scale}};
    qtensor q = load_one(GROUP("{\"num_bits\": 8, \"type\": \"float\", \"strategy\": \"block\", "
                               "\"block_structure\": [128, 128]}",
                               "null"),
                         t, 2, &o);
    for (int r = 0; r < 1000; r++) {
        qtensor_decode_row(&q, r, row);
        assert_true(row[0] == (float)(r / 128 + 1) && row[255] == row[0]);
    }
    qtensor_free(&q);
    close_it(&o);
    free(codes);
}

/* Each expert divides by its own second-level scale; a stray recipe file changes nothing. */
static void test_nvfp4_per_expert(void **state)
{
    (void)state;
    err e = {0};
    const uint8_t codes[8] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe}, local = 0x7e;
    const float g[2] = {448, 1792};
    char *dir = fx_path("experts");
    char *config = fx_config(64, 64, 1,
                             GROUP("{\"num_bits\": 4, \"type\": \"float\", \"strategy\": "
                                   "\"tensor_group\", \"group_size\": 16}",
                                   "null"));
    fx_tensor t[] = {
        {"model.layers.0.mlp.experts.0.up_proj.weight_packed", NUM_U8, 2, {1, 8}, codes},
        {"model.layers.0.mlp.experts.0.up_proj.weight_scale", NUM_F8_E4M3, 2, {1, 1}, &local},
        {"model.layers.0.mlp.experts.0.up_proj.weight_global_scale", NUM_F32, 1, {1}, &g[0]},
        {"model.layers.0.mlp.experts.1.up_proj.weight_packed", NUM_U8, 2, {1, 8}, codes},
        {"model.layers.0.mlp.experts.1.up_proj.weight_scale", NUM_F8_E4M3, 2, {1, 1}, &local},
        {"model.layers.0.mlp.experts.1.up_proj.weight_global_scale", NUM_F32, 1, {1}, &g[1]}};
    fx_write(dir, config, t, 6);
    char *stray = file_join(dir, "recipe.yaml");
    CHECK_OK(file_write_atomic(stray, "quant_algo: NVFP4\n", 18, &e));
    opened o = open_at(dir);
    for (int x = 0; x < 2; x++) {
        char *name = xasprintf("model.layers.0.mlp.experts.%d.up_proj", x);
        qtensor q;
        float row[16];
        CHECK_OK(quant_load(o.q, name, &q, &e));
        qtensor_decode_row(&q, 0, row);
        for (int k = 0; k < 16; k++)
            assert_float_equal(row[k], num_fp4_table[k] * 448 / g[x], 1e-6f);
        qtensor_free(&q);
        free(name);
    }
    close_it(&o);
    free(stray);
    free(config);
    free(dir);
}

/* ---- rules, lists, KV scales --------------------------------------------------------------------
 */

static bool matches(const char *rule, const char *module)
{
    err e = {0};
    quant_rule *r;
    CHECK_OK(quant_rule_make(&r, rule, &e));
    bool hit = quant_rule_match(r, module);
    quant_rule_drop(r);
    return hit;
}

static void test_rules(void **state)
{
    (void)state;
    err e = {0};
    quant_rule *r;
    assert_true(matches("lm_head", "lm_head"));
    assert_false(matches("lm_head", "model.lm_head"));
    assert_false(matches("model.layers.1", "model.layers.1.mlp.up_proj"));
    assert_false(matches("model.layers.1*", "model.layers.1.mlp.up_proj"));
    assert_true(matches("re:.*down_proj$", "model.layers.0.mlp.down_proj"));
    assert_false(matches("re:down_proj", "model.layers.0.mlp.down_proj"));
    assert_true(matches("re:model\\.layers\\.1\\.", "model.layers.1.mlp.up_proj"));
    assert_false(matches("re:model\\.layers\\.1\\.", "model.layers.11.mlp.up_proj"));
    assert_true(matches("re:lm", "lm_head"));
    assert_true(matches("Linear", "anything.at_all"));
    assert_false(matches("Embedding", "anything.at_all"));
    /* Steps are bounded: this one would take 2^40. */
    assert_false(matches("re:(a+)+$", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"));
    CHECK_ERR(quant_rule_make(&r, "re:(", &e), ERR_USAGE, "re:(");
    CHECK_ERR(quant_rule_make(&r, "", &e), ERR_USAGE, "empty");
}

/* The name of a parent does not unquantize its children, and the hits say so. */
static void test_parent_in_ignore(void **state)
{
    (void)state;
    opened o = open_at("tests/fixtures/quant/ct_mixed_w4_fp8");
    assert_int_equal(o.q->n_groups, 2);
    assert_int_equal(o.q->groups[0].hits, 5);
    assert_int_equal(o.q->groups[1].hits, 1);
    assert_string_equal(o.q->ignore[0], "model.layers.0.self_attn.o_proj");
    assert_int_equal(o.q->ignore_hits[0], 1);
    assert_false(quant_has(o.q, "model.layers.0.self_attn.o_proj"));
    close_it(&o);

    const int8_t codes[64] = {1, -1};
    const uint16_t scale[8] = {0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80};
    char *dir = fx_path("parent");
    char *config = fx_config(
        64, 64, 1,
        ", \"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"ignore\": "
        "[\"lm_head\", \"model.layers.0.mlp.experts.0\"], \"config_groups\": {\"INT8\": "
        "[\"Linear\"]}}");
    fx_tensor t[] = {
        {"model.layers.0.mlp.experts.0.up_proj.weight", NUM_I8, 2, {8, 8}, codes},
        {"model.layers.0.mlp.experts.0.up_proj.weight_scale", NUM_BF16, 2, {8, 1}, scale}};
    fx_write(dir, config, t, 2);
    o = open_at(dir);
    assert_int_equal(o.q->ignore_hits[1], 0);
    assert_true(quant_has(o.q, "model.layers.0.mlp.experts.0.up_proj"));
    assert_int_equal(o.q->groups[0].spec.a.type, NUM_I8); /* a preset name as group key */
    close_it(&o);
    free(config);
    free(dir);
}

static void test_kv_scales(void **state)
{
    (void)state;
    err e = {0};
    const float *k, *v;
    opened o = open_at("tests/fixtures/quant/ct_fp8_kv_head");
    const ckpt_tensor *t = ckpt_find(o.c, "model.layers.0.self_attn.k_scale");
    float want[4];
    num_decode_row(t->dtype, t->data, 4, want);
    assert_int_equal(o.q->kv.gran, Q_HEAD);
    CHECK_OK(quant_kv_scales(o.q, 0, 4, &k, &v, &e));
    assert_memory_equal(k, want, sizeof want);
    assert_true(v[0] > 0 && v != k);
    CHECK_OK(quant_kv_scales(o.q, 1, 4, &k, &v, &e));
    assert_null(k);
    CHECK_ERR(quant_kv_scales(o.q, 0, 3, &k, &v, &e), ERR_SHAPE, "k_scale");
    close_it(&o);

    static const char *const names[] = {"self_attn.k_scale",
                                        "self_attn.attn.k_scale",
                                        "self_attn.k_proj.k_scale",
                                        "self_attn.qkv_proj.k_scale",
                                        "mixer.k_proj.k_scale",
                                        "self_attn.k_cache.scale",
                                        "self_attn.k_proj.output_scale",
                                        "self_attn.kv_scale"};
    char *dir = fx_path("kv"), *config = fx_config(64, 64, 1, "");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *name = xasprintf("model.layers.0.%s", names[i]);
        const float half = 0.5f;
        fx_tensor x[] = {{name, NUM_F32, 0, {0}, &half}};
        fx_write(dir, config, x, 1);
        o = open_at(dir);
        CHECK_OK(quant_kv_scales(o.q, 0, 2, &k, &v, &e));
        assert_non_null(k);
        assert_true(k[0] == 0.5f && k[1] == 0.5f && v[1] == 0.5f);
        close_it(&o);
        free(name);
    }
    free(config);
    free(dir);
}

/* ---- registries ---------------------------------------------------------------------------------
 */

/* Every dialect can read; one that writes also says what it wrote; no two share a name or method.
 */
static void test_dialect_rows(void **state)
{
    (void)state;
    for (int i = 0; i < quant_n_dialects; i++) {
        const quant_dialect *d = quant_dialects[i];
        assert_true(*d->name && d->methods && d->detect && d->load);
        assert_int_equal(d->store != NULL, d->emit_config != NULL);
        for (int k = 0; k < i; k++) {
            assert_string_not_equal(d->name, quant_dialects[k]->name);
            assert_string_not_equal(d->methods, quant_dialects[k]->methods);
        }
    }
}

/* Every algorithm does every preset and stays above the noise, compressed-tensors has words for
 * it; the other writers have them or say that they have none.
 */
static void test_algorithm_rows(void **state)
{
    (void)state;
    float *w = xmalloc(64 * 256 * sizeof *w);
    uint64_t seed = 11;
    for (int i = 0; i < 64 * 256; i++)
        w[i] = fx_noise(&seed);
    for (int a = 0; a < quant_n_algos; a++)
        for (int p = 0; p < qspec_n_presets; p++) {
            err e = {0};
            qspec s;
            qtensor t;
            assert_ptr_equal(quant_algo_by_name(quant_algos[a].name), &quant_algos[a]);
            CHECK_OK(qspec_parse(qspec_presets[p].spec, &s, &e));
            CHECK_OK(quant_algos[a].quantize(w, 64, 256, &s, NUM_BF16, NULL, &t, &e));
            CHECK_OK(qtensor_check(&t, qspec_presets[p].name, &e));
            double db = quant_snr_db(w, &t);
            if (!(db > 3.0 * num_infos[s.w.type].bits - 5))
                fail_msg("%s %s: %g dB", quant_algos[a].name, qspec_presets[p].name, db);
            qtensor_free(&t);
            if (!s.a.dynamic && s.a.gran != Q_NONE) continue;
            for (int d = 0; d < quant_n_dialects; d++) {
                if (!quant_dialects[d]->emit_config) continue;
                buf b = {0};
                jw j;
                jw_init(&j, &b, 0);
                int rc = quant_dialects[d]->emit_config(&j, &s, NULL, 0, &e);
                if (rc < 0) assert_int_equal(rc, -ERR_UNSUPPORTED);
                if (!d) assert_true(rc == 0 && strstr(b.data, "config_groups"));
                if (rc == 0) assert_non_null(strstr(b.data, "quant_method"));
                buf_free(&b);
            }
        }
    assert_null(quant_algo_by_name("magic"));
    free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hashes),
        cmocka_unit_test(test_rtn_against_library),
        cmocka_unit_test(test_rtn_vectors),
        cmocka_unit_test(test_old_three_bit_layout),
        cmocka_unit_test(test_layouts_by_width_and_version),
        cmocka_unit_test(test_naive),
        cmocka_unit_test(test_int4_words_zeros_and_g_idx),
        cmocka_unit_test(test_ragged_blocks),
        cmocka_unit_test(test_nvfp4_per_expert),
        cmocka_unit_test(test_rules),
        cmocka_unit_test(test_parent_in_ignore),
        cmocka_unit_test(test_kv_scales),
        cmocka_unit_test(test_dialect_rows),
        cmocka_unit_test(test_algorithm_rows),
    };
    return cmocka_run_group_tests(tests, fx_setup, fx_teardown);
}
