/* Dialects of a weight with scales beside it: faults that users of other engines reported, what is
 * refused and how, scales of the cache under every name, stored and loaded again. */
#include "quant_fixture.h"

enum { MAX = 16 };
typedef struct model {
    fx_tensor t[MAX];
    size_t n;
    const char *quant; /* quantization_config, or NULL */
    const char *side;  /* hf_quant_config.json, or NULL */
    int hidden, ffn, layers;
} model;

static void add(model *m, const char *name, num_dtype type, int dims, int64_t a, int64_t b,
                int64_t c, const void *data)
{
    assert_true(m->n < MAX);
    m->t[m->n++] = (fx_tensor){name, type, dims, {a, b, c}, data};
}

static void add_scalar(model *m, const char *name, const float *v)
{
    add(m, name, NUM_F32, 0, 0, 0, 0, v);
}

typedef struct opened {
    ckpt *c;
    quant_ckpt *q;
    err e;
} opened;

/* Writes and opens; q stays NULL and e is set where it is refused. */
static opened open_model(const model *m)
{
    opened o = {0};
    err e = {0};
    char *dir = fx_path("m");
    char *extra = m->quant ? xasprintf(", \"quantization_config\": %s", m->quant) : xstrdup("");
    char *config = fx_config(m->hidden ? m->hidden : 64, m->ffn ? m->ffn : 64,
                             m->layers ? m->layers : 1, extra);
    fx_write(dir, config, m->t, m->n);
    if (m->side) {
        char *path = file_join(dir, "hf_quant_config.json");
        CHECK_OK(file_write_atomic(path, m->side, strlen(m->side), &e));
        free(path);
    }
    CHECK_OK(ckpt_open(&o.c, dir, &e));
    if (quant_open(&o.q, o.c, &o.e) < 0) o.q = NULL;
    free(config);
    free(extra);
    free(dir);
    return o;
}

static void close_model(opened *o)
{
    quant_close(o->q);
    ckpt_close(o->c);
}

static void check_says(const err *e, const char *const *words)
{
    for (; *words; words++)
        if (!strstr(e->msg, *words)) fail_msg("'%s' lacks '%s'", e->msg, *words);
}
#define SAYS(e, ...) check_says(e, (const char *const[]){__VA_ARGS__, NULL})

static void refused_at_open(const model *m, const char *const *words)
{
    opened o = open_model(m);
    if (o.q) fail_msg("was not refused");
    check_says(&o.e, words);
    close_model(&o);
}

static void refused_at_load(const model *m, const char *module, const char *const *words)
{
    opened o = open_model(m);
    qtensor t;
    if (!o.q) fail_msg("%s", o.e.msg);
    assert_true(quant_load(o.q, module, &t, &o.e) < 0);
    check_says(&o.e, words);
    close_model(&o);
}
#define REFUSED_OPEN(m, ...) refused_at_open(m, (const char *const[]){__VA_ARGS__, NULL})
#define REFUSED_LOAD(m, module, ...)                                                               \
    refused_at_load(m, module, (const char *const[]){__VA_ARGS__, NULL})

static qtensor load(opened *o, const char *module)
{
    qtensor t;
    if (!o->q) fail_msg("%s", o->e.msg);
    err e = {0};
    CHECK_OK(quant_load(o->q, module, &t, &e));
    return t;
}

static float at(const qtensor *t, int64_t row, int64_t k)
{
    float *v = xmalloc((size_t)t->K * sizeof *v);
    qtensor_decode_row(t, row, v);
    float x = v[k];
    free(v);
    return x;
}

static uint8_t *filled(size_t n, int byte)
{
    return memset(xmalloc(n), byte, n);
}

#define BLOCK                                                                                      \
    "{\"quant_method\": \"fp8\", \"activation_scheme\": \"dynamic\", \"weight_block_size\": "      \
    "[128, 128]}"
#define X "model.layers.0.mlp.gate_proj"

/* ---- block sizes --------------------------------------------------------------------------------
 */

/* The last block is ragged: scales lie 128 rows apart all the same, and do not cross experts. */
static void test_ragged_blocks(void **state)
{
    (void)state;
    uint8_t *ones = filled(2 * 1000 * 256, 0x38);
    float s[2][8][2];
    for (int i = 0; i < 32; i++)
        (&s[0][0][0])[i] = (float)(i / 16 * 100 + i % 16 / 2 + 1);
    model m = {.quant = BLOCK};
    add(&m, X ".weight", NUM_F8_E4M3, 2, 1000, 256, 0, ones);
    add(&m, X ".weight_scale_inv", NUM_F32, 2, 8, 2, 0, s);
    opened o = open_model(&m);
    qtensor t = load(&o, X);
    for (int64_t r = 0; r < 1000; r++)
        assert_true(at(&t, r, r % 256) == (float)(r / 128 + 1));
    qtensor_free(&t);
    close_model(&o);
    model x = {.quant = BLOCK};
#define STACK "model.layers.0.mlp.experts.gate_up_proj"
    add(&x, STACK, NUM_F8_E4M3, 3, 2, 1000, 256, ones);
    add(&x, STACK "_scale_inv", NUM_F32, 3, 2, 8, 2, s);
    o = open_model(&x);
    assert_true(quant_has(o.q, STACK));
    t = load(&o, STACK);
    assert_int_equal(t.E, 2);
    for (int64_t r = 0; r < 2000; r++)
        assert_true(at(&t, r, 3) == (float)(r / 1000 * 100 + r % 1000 / 128 + 1));
    qtensor_free(&t);
    close_model(&o);
    free(ones);
}

static void test_grid_refused(void **state)
{
    (void)state;
    uint8_t *ones = filled(1000 * 256, 0x38);
    float s[32];
    for (int i = 0; i < 32; i++)
        s[i] = 1;
    const int64_t grids[][2] = {{7, 2}, {9, 2}, {8, 3}, {16, 1}, {2, 8}};
    for (size_t i = 0; i < 5; i++) {
        model m = {.quant = BLOCK};
        add(&m, X ".weight", NUM_F8_E4M3, 2, 1000, 256, 0, ones);
        add(&m, X ".weight_scale_inv", NUM_F32, 2, grids[i][0], grids[i][1], 0, s);
        REFUSED_LOAD(&m, X, X ".weight_scale_inv", "[1000, 256]", "[8, 2]", "block128x128");
    }
    free(ones);
}

/* ---- fused on disk ------------------------------------------------------------------------------
 */

#define NV  "{\"quant_method\": \"modelopt\", \"quant_algo\": \"NVFP4\", \"ignore\": [\"lm_head\"]}"
#define QKV "model.layers.0.self_attn.qkv_proj"

/* hidden 64, 2 heads and 1 KV head of 32: q 64 rows, k 32, v 32. */
static model fused_model(const float *global, int parts, const float *input)
{
    static uint8_t codes[128 * 32], scales[128 * 4];
    for (size_t i = 0; i < sizeof codes; i++)
        codes[i] = (uint8_t)(i * 37 + i / 32);
    memset(scales, 0x38, sizeof scales);
    model m = {.quant = NV};
    add(&m, QKV ".weight", NUM_U8, 2, 128, 32, 0, codes);
    add(&m, QKV ".weight_scale", NUM_F8_E4M3, 2, 128, 4, 0, scales);
    add(&m, QKV ".weight_scale_2", NUM_F32, parts ? 1 : 0, parts, 0, 0, global);
    if (input) add_scalar(&m, QKV ".input_scale", input);
    return m;
}

/* One scalar holds for all rows; one a part holds for the rows of that part. */
static void test_fused_scales(void **state)
{
    (void)state;
    const float one = .5f, three[3] = {.5f, 2, 8}, in = .25f;
    model m = fused_model(&one, 0, &in);
    opened o = open_model(&m);
    qtensor t = load(&o, QKV);
    assert_int_equal(t.n_global, 1);
    assert_int_equal(t.global_row[1], 128);
    assert_true(t.input_global == in);
    for (int64_t r = 0; r < 128; r++)
        assert_true(qtensor_scale(&t, r, 17) == .5f);
    qtensor_free(&t);
    close_model(&o);
    m = fused_model(three, 3, &in);
    o = open_model(&m);
    t = load(&o, QKV);
    for (int64_t r = 0; r < 128; r++)
        assert_true(qtensor_scale(&t, r, 63) == three[r < 64 ? 0 : r < 96 ? 1 : 2]);
    qtensor_free(&t);
    close_model(&o);
    m = fused_model(three, 2, &in);
    REFUSED_LOAD(&m, QKV, QKV ".weight_scale_2", "[2]", "one value");
}

#define FP8_STATIC "{\"quant_method\": \"fp8\", \"activation_scheme\": \"static\"}"
#define GU         "model.layers.0.mlp.gate_up_proj"

static void test_fused_fp8(void **state)
{
    (void)state;
    uint8_t *ones = filled(128 * 64, 0x38);
    const float two[2] = {3, 5}, in = .5f, differ[2] = {.5f, .25f};
    model m = {.quant = FP8_STATIC};
    add(&m, GU ".weight", NUM_F8_E4M3, 2, 128, 64, 0, ones);
    add(&m, GU ".weight_scale", NUM_F32, 1, 2, 0, 0, two);
    add_scalar(&m, GU ".input_scale", &in);
    opened o = open_model(&m);
    qtensor t = load(&o, GU);
    for (int64_t r = 0; r < 128; r++)
        assert_true(at(&t, r, 5) == (r < 64 ? 3.0f : 5.0f));
    assert_true(t.input_scale == .5f);
    qtensor_free(&t);
    close_model(&o);
    m.t[2] = (fx_tensor){GU ".input_scale", NUM_F32, 1, {2}, differ};
    REFUSED_LOAD(&m, GU, GU ".input_scale", "2 values that differ");
    free(ones);
}

/* ---- second-level scales ------------------------------------------------------------------------
 */

/* The same experts from both writers: one divides, the other multiplies; each expert has its own.
 * A stray recipe says nothing. */
static void test_same_bits_from_both_writers(void **state)
{
    (void)state;
    static const char *const names[2] = {"model.layers.0.mlp.experts.0.up_proj",
                                         "model.layers.0.mlp.experts.1.up_proj"};
    uint8_t codes[2][32 * 16], scales[2][32 * 2];
    const float divide[2] = {448, 1792}, multiply[2] = {1 / 448.0f, 1 / 1792.0f};
    for (size_t i = 0; i < sizeof codes; i++)
        (&codes[0][0])[i] = (uint8_t)(i * 29 + i / 7);
    for (size_t i = 0; i < sizeof scales; i++)
        (&scales[0][0])[i] = (uint8_t)(0x30 + i % 40);
    model ct = {.quant =
                    "{\"quant_method\": \"compressed-tensors\", \"format\": "
                    "\"nvfp4-pack-quantized\", \"config_groups\": {\"NVFP4A16\": [\"Linear\"]}}"};
    model mo = {.quant = "{\"quant_method\": \"modelopt\", \"quant_algo\": \"W4A16_NVFP4\"}"};
    char *n[2][6];
    for (int i = 0; i < 2; i++) {
        static const char *const tails[6] = {".weight_packed",       ".weight_scale",
                                             ".weight_global_scale", ".weight",
                                             ".weight_scale",        ".weight_scale_2"};
        for (int k = 0; k < 6; k++)
            n[i][k] = xasprintf("%s%s", names[i], tails[k]);
        add(&ct, n[i][0], NUM_U8, 2, 32, 16, 0, codes[i]);
        add(&ct, n[i][1], NUM_F8_E4M3, 2, 32, 2, 0, scales[i]);
        add(&ct, n[i][2], NUM_F32, 1, 1, 0, 0, &divide[i]);
        add(&mo, n[i][3], NUM_U8, 2, 32, 16, 0, codes[i]);
        add(&mo, n[i][4], NUM_F8_E4M3, 2, 32, 2, 0, scales[i]);
        add_scalar(&mo, n[i][5], &multiply[i]);
    }
    float row[2][2][32][32];
    for (int k = 0; k < 2; k++) {
        opened o = open_model(k ? &mo : &ct);
        if (k) {
            err e = {0};
            char *recipe = fx_path("m/recipe.yaml"), *dir = fx_path("m");
            CHECK_OK(file_write_atomic(recipe, "scheme: W4A16\n", 14, &e));
            close_model(&o);
            CHECK_OK(ckpt_open(&o.c, dir, &e));
            CHECK_OK(quant_open(&o.q, o.c, &e));
            free(dir);
            free(recipe);
        }
        for (int i = 0; i < 2; i++) {
            qtensor t = load(&o, names[i]);
            for (int64_t r = 0; r < 32; r++)
                qtensor_decode_row(&t, r, row[k][i][r]);
            qtensor_free(&t);
        }
        close_model(&o);
    }
    assert_memory_equal(row[0], row[1], sizeof row[0]);
    assert_true(row[1][0][3][5] != row[1][1][3][5]);
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 6; k++)
            free(n[i][k]);
}

/* ---- excluded modules ---------------------------------------------------------------------------
 */

#define L(i, n) "model.layers." #i ".mlp.up_proj" n

/* A glob covers the whole name: "model.layers.1*" is also layers 10 and 11, and not layer 2; each
 * rule says what it caught; what is quantized under a rule is refused. */
static void test_globs(void **state)
{
    (void)state;
    uint8_t *ones = filled(64 * 64, 0x38);
    const float one = 1;
    model m = {.layers = 12,
               .quant = "{\"quant_method\": \"modelopt\", \"quant_algo\": \"FP8\", \"ignore\": "
                        "[\"lm_head\", \"mtp*\", \"model.layers.1*\"]}"};
    add(&m, L(1, ".weight"), NUM_BF16, 2, 64, 64, 0, NULL);
    add(&m, L(10, ".weight"), NUM_BF16, 2, 64, 64, 0, NULL);
    add(&m, L(11, ".weight"), NUM_BF16, 2, 64, 64, 0, NULL);
    add(&m, L(2, ".weight"), NUM_F8_E4M3, 2, 64, 64, 0, ones);
    add_scalar(&m, L(2, ".weight_scale"), &one);
    add_scalar(&m, L(2, ".input_scale"), &one);
    add(&m, "lm_head.weight", NUM_BF16, 2, 32, 64, 0, NULL);
    opened o = open_model(&m);
    if (!o.q) fail_msg("%s", o.e.msg);
    assert_int_equal(o.q->ignore_hits[0], 1);
    assert_int_equal(o.q->ignore_hits[1], 0);
    assert_int_equal(o.q->ignore_hits[2], 3);
    assert_true(quant_ignored(o.q, "mtp.layers.0.mlp.up_proj"));
    assert_false(quant_ignored(o.q, L(2, "")));
    assert_int_equal(o.q->groups[0].hits, 1);
    close_model(&o);
    m.quant = "{\"quant_method\": \"modelopt\", \"quant_algo\": \"FP8\", \"ignore\": "
              "[\"model.layers.2*\"]}";
    REFUSED_OPEN(&m, L(2, ".weight"), "different runs");
    /* A parent's name is no substring: its children stay quantized under ModelOpt. */
    m.quant = "{\"quant_method\": \"modelopt\", \"quant_algo\": \"FP8\", \"ignore\": "
              "[\"model.layers.2.mlp\"]}";
    o = open_model(&m);
    assert_non_null(o.q);
    close_model(&o);
    /* fp8 lists name components: the gate of a router is not a gate_proj. */
    m.quant = "{\"quant_method\": \"fp8\", \"activation_scheme\": \"static\", "
              "\"modules_to_not_convert\": [\"gate\", \"up\", \"lm_head\"]}";
    o = open_model(&m);
    assert_non_null(o.q);
    close_model(&o);
    m.quant = "{\"quant_method\": \"fp8\", \"activation_scheme\": \"static\", "
              "\"modules_to_not_convert\": [\"mlp\"]}";
    REFUSED_OPEN(&m, L(2, ".weight"), "different runs");
    free(ones);
}

/* ---- inputs -------------------------------------------------------------------------------------
 */

/* Experts that saw no calibration token. */
static void test_input_scales(void **state)
{
    (void)state;
#define D "model.layers.0.mlp.experts.2.down_proj"
    uint8_t *ones = filled(64 * 64, 0x38);
    const float one = 1, none = 0, nan = NAN, minus = -1;
    model m = {.quant = "{\"quant_method\": \"modelopt\", \"quant_algo\": \"FP8\"}"};
    add(&m, D ".weight", NUM_F8_E4M3, 2, 64, 64, 0, ones);
    add_scalar(&m, D ".weight_scale", &one);
    REFUSED_LOAD(&m, D, D ".input_scale");
    const float *const bad[] = {&none, &nan, &minus};
    for (int i = 0; i < 3; i++) {
        model x = m;
        add_scalar(&x, D ".input_scale", bad[i]);
        REFUSED_LOAD(&x, D, D ".input_scale", "finite and positive");
        x.quant = "{\"quant_method\": \"fp8\", \"activation_scheme\": \"dynamic\"}";
        opened o = open_model(&x); /* not needed: not looked at */
        qtensor t = load(&o, D);
        assert_true(t.input_scale == 0);
        qtensor_free(&t);
        close_model(&o);
    }
    const float two = 2;
    model n = fused_model(&two, 0, NULL);
    REFUSED_LOAD(&n, QKV, QKV ".input_scale");
    n.quant = "{\"quant_method\": \"modelopt\", \"quant_algo\": \"W4A16_NVFP4\"}";
    opened o = open_model(&n);
    qtensor t = load(&o, QKV);
    qtensor_free(&t);
    close_model(&o);
    free(ones);
}

/* ---- what is refused ----------------------------------------------------------------------------
 */

static void test_codes_refused(void **state)
{
    (void)state;
    uint8_t *ones = filled(130 * 67, 0x38);
    const float one = 1, zero = 0, inf = INFINITY;
    model m = {.quant = "{\"quant_method\": \"fp8\", \"activation_scheme\": \"dynamic\"}"};
    add(&m, X ".weight", NUM_F8_E4M3, 2, 130, 67, 0, ones);
    add_scalar(&m, X ".weight_scale", &one);
    for (size_t i = 0; i < 130 * 67; i += 977) { /* everywhere in the words of the scan */
        ones[i] = i % 2 ? 0x7F : 0xFF;
        char *where = xasprintf("row %zu, column %zu", i / 67, i % 67);
        REFUSED_LOAD(&m, X, X ".weight", where, i % 2 ? "0x7f" : "0xff");
        free(where);
        ones[i] = 0xFE;
    }
    opened o = open_model(&m);
    qtensor t = load(&o, X);
    qtensor_free(&t);
    close_model(&o);
    m.t[1].data = &zero;
    REFUSED_LOAD(&m, X, X ".weight_scale", "finite and positive");
    m.t[1].data = &inf;
    REFUSED_LOAD(&m, X, X ".weight_scale", "finite and positive");
    m.t[1] = (fx_tensor){X ".weight_scale", NUM_F32, 1, {3}, ones};
    REFUSED_LOAD(&m, X, X ".weight_scale", "[3]");
    m.t[0].type = NUM_F8_E5M2;
    REFUSED_LOAD(&m, X, X ".weight", "F8_E5M2");
    m.t[0].type = NUM_I8;
    REFUSED_LOAD(&m, X, X ".weight", "int8", "F8_E4M3");
    m.n = 1;
    m.t[0].type = NUM_F8_E4M3;
    REFUSED_LOAD(&m, X, X ".weight_scale");
    free(ones);
}

static void test_configs_refused(void **state)
{
    (void)state;
    static const struct {
        const char *quant, *words[4];
    } cases[] = {
        {"{\"quant_method\": \"modelopt\", \"quant_algo\": \"FP3\"}", {"FP3", "NVFP4"}},
        {"{\"quant_method\": \"modelopt\", \"quant_algo\": \"NVFP4_SVD\"}",
         {"NVFP4_SVD", "low-rank"}},
        {"{\"quant_method\": \"modelopt\"}", {"quant_algo"}},
        {"{\"quant_method\": \"modelopt\", \"quant_algo\": \"NVFP4\", \"group_size\": 32}",
         {"group_size", "32", "16"}},
        {"{\"quant_method\": \"modelopt\", \"quant_algo\": \"MIXED_PRECISION\"}",
         {"quantized_layers"}},
        {"{\"quant_method\": \"modelopt\", \"quant_algo\": \"MIXED_PRECISION\", "
         "\"quantized_layers\": {\"a\": {\"quant_algo\": \"X\"}}}",
         {"'X'"}},
        {"{\"quant_method\": \"fp8\", \"activation_scheme\": \"odd\"}", {"odd"}},
        {"{\"quant_method\": \"fp8\", \"fmt\": \"e5m2\"}", {"e5m2"}},
        {"{\"quant_method\": \"fp8\", \"weight_block_size\": [128]}", {"weight_block_size"}},
        {"{\"quant_method\": \"fp8\", \"weight_block_size\": [0, 128]}", {"weight_block_size"}},
        {"{\"quant_method\": \"fp8\", \"weight_block_size\": [128, 128], \"activation_scheme\": "
         "\"static\"}",
         {"static", "dynamic"}},
        {"{\"quant_method\": \"fp8\", \"moe_quant_algo\": \"FP3\"}", {"FP3"}},
        {"{\"quant_method\": \"fp8\", \"modules_to_not_convert\": [5]}",
         {"modules_to_not_convert"}},
        {"{\"quant_method\": \"blockwise_int8\"}", {"weight_block_size"}},
        {"{\"quant_method\": \"quark\"}", {"global_quant_config"}},
        {"{\"quant_method\": \"quark\", \"global_quant_config\": {\"weight\": {\"dtype\": "
         "\"int4\"}}}",
         {"int4", "fp8_e4m3"}},
        /* Of another method than its tensors. */
        {"{\"quant_method\": \"w8a8_int8\"}", {"fp8_e4m3", "I8"}},
        {"{\"quant_method\": \"gptq\", \"bits\": 4}", {"gptq"}},
        {"{\"quant_method\": \"compressed-tensors\", \"config_groups\": {\"W4A16\": [\"Linear\"]}}",
         {"fp8_e4m3"}},
        {NULL, {X ".weight", "quantization_config"}},
    };
    uint8_t *ones = filled(64 * 64, 0x38);
    const float one = 1;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        model m = {.quant = cases[i].quant};
        qtensor t;
        add(&m, X ".weight", NUM_F8_E4M3, 2, 64, 64, 0, ones);
        add_scalar(&m, X ".weight_scale", &one);
        opened o = open_model(&m);
        if (o.q && quant_load(o.q, X, &t, &o.e) >= 0) fail_msg("%s was read", m.quant);
        check_says(&o.e, cases[i].words);
        close_model(&o);
    }
    static const char *const foreign[] = {".qweight", ".weight_packed", ".weight.absmax", ".SCB"};
    for (size_t i = 0; i < 4; i++) {
        model m = {.quant = "{\"quant_method\": \"fp8\", \"activation_scheme\": \"dynamic\"}"};
        char *name = xasprintf("model.layers.0.mlp.up_proj%s", foreign[i]);
        add(&m, X ".weight", NUM_F8_E4M3, 2, 64, 64, 0, ones);
        add_scalar(&m, X ".weight_scale", &one);
        add(&m, name, NUM_I32, 2, 4, 4, 0, NULL);
        REFUSED_OPEN(&m, name, "names fp8");
        free(name);
    }
    free(ones);
}

/* ---- the cache ----------------------------------------------------------------------------------
 */

static void test_kv_names(void **state)
{
    (void)state;
    static const struct {
        const char *k, *v; /* behind "model.layers.0." */
    } names[] = {{"self_attn.k_scale", "self_attn.v_scale"},
                 {"self_attn.attn.k_scale", "self_attn.attn.v_scale"},
                 {"self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"},
                 {"self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"},
                 {"self_attn.qkqkv_proj.k_scale", "self_attn.qkqkv_proj.v_scale"},
                 {"mixer.k_proj.k_scale", "mixer.v_proj.v_scale"},
                 {"self_attn.k_cache.scale", "self_attn.v_cache.scale"},
                 {"self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"},
                 {"self_attn.kv_scale", NULL}};
    uint8_t *ones = filled(64 * 64, 0x38);
    const float ks = .25f, vs = .5f, minus = -1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *k = xasprintf("model.layers.0.%s", names[i].k);
        char *v = names[i].v ? xasprintf("model.layers.0.%s", names[i].v) : NULL;
        const float *gk, *gv;
        for (int absent = 0; absent < 3; absent++) { /* both, none calibrated, k alone */
            model m = {.quant = "{\"quant_method\": \"modelopt\", \"quant_algo\": "
                                "\"FP8_PER_CHANNEL_PER_TOKEN\", \"kv_cache_scheme\": \"FP8\"}"};
            add(&m, X ".weight", NUM_F8_E4M3, 2, 64, 64, 0, ones);
            add(&m, X ".weight_scale", NUM_F32, 1, 64, 0, 0, NULL);
            add_scalar(&m, k, absent == 1 ? &minus : &ks);
            if (v && absent < 2) add_scalar(&m, v, absent == 1 ? &minus : &vs);
            opened o = open_model(&m);
            if (!o.q) fail_msg("%s", o.e.msg);
            assert_int_equal(o.q->kv.type, NUM_F8_E4M3);
            assert_true(quant_is_kv_scale(k));
            assert_true(!v || quant_is_kv_scale(v));
            err e = {0};
            CHECK_OK(quant_kv_scales(o.q, 0, 2, &gk, &gv, &e));
            if (absent == 1) {
                assert_null(gk);
            } else {
                assert_true(gk[0] == ks && gk[1] == ks);
                assert_true(gv[1] == (v && !absent ? vs : ks));
            }
            close_model(&o);
        }
        free(k);
        free(v);
    }
    assert_false(quant_is_kv_scale("model.layers.0.self_attn.k_proj.weight_scale"));
    assert_false(quant_is_kv_scale("model.layers.0.mlp.up_proj.output_scale"));
    free(ones);
}

static void test_kv_file(void **state)
{
    (void)state;
    static const struct {
        const char *text, *why;
    } cases[] = {
        {"{\"model_type\": \"llama\", \"kv_cache\": {\"dtype\": \"float8_e4m3fn\", "
         "\"scaling_factor\": {\"0\": {\"0\": 0.25, \"1\": 0.125}}}}",
         NULL},
        {"{\"model_type\": null, \"kv_cache\": {\"dtype\": \"float8_e4m3fn\", "
         "\"scaling_factor\": {\"0\": {\"0\": 0.25, \"1\": 0.125}}}}",
         NULL},
        {"{\"model_type\": \"opt\", \"kv_cache\": {}}", "model_type"},
        {"{\"kv_cache\": {}}", "model_type"},
        {"{\"model_type\": null, \"kv_cache\": {\"dtype\": \"int8\"}}", "float8_e4m3fn"},
        {"{\"model_type\": null, \"kv_cache\": {\"dtype\": \"float8_e4m3fn\", "
         "\"scaling_factor\": {\"0\": {\"0\": 1, \"1\": 1}, \"1\": {}}}}",
         "one rank"},
        {"{\"model_type\": null, \"kv_cache\": {\"dtype\": \"float8_e4m3fn\", "
         "\"scaling_factor\": {\"0\": {\"0\": 1}}}}",
         "1 layers"},
        {"{\"model_type\": null, \"kv_cache\": {\"dtype\": \"float8_e4m3fn\", "
         "\"scaling_factor\": {\"0\": {\"0\": 1, \"2\": 1}}}}",
         "layer '2'"},
        {"{\"model_type\": null, \"kv_cache\": {\"dtype\": \"float8_e4m3fn\", "
         "\"scaling_factor\": {\"0\": {\"0\": 0, \"1\": 1}}}}",
         "positive"},
        {"{\"model_type\": null, \"kv_cache\": {\"dtype\": \"float8_e4m3fn\", "
         "\"scaling_factor\": {\"0\": {\"0\": 1e-60, \"1\": 1}}}}",
         "positive"},
        {"[", "kv.json"},
    };
    char *dir = fx_path("kv"), *path = fx_path("kv.json");
    fx_llama(dir, 64, 64, 2, "");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        err e = {0};
        ckpt *c;
        quant_ckpt *q;
        const float *k, *v;
        const quant_opts opts = {.kv_scales = path};
        CHECK_OK(file_write_atomic(path, cases[i].text, strlen(cases[i].text), &e));
        CHECK_OK(ckpt_open(&c, dir, &e));
        int rc = quant_open_as(&q, c, &opts, &e);
        if (cases[i].why) {
            assert_true(rc < 0);
            SAYS(&e, cases[i].why, "kv.json");
        } else {
            CHECK_OK(rc);
            CHECK_OK(quant_kv_scales(q, 1, 1, &k, &v, &e));
            assert_true(k[0] == .125f && v[0] == .125f);
            quant_close(q);
        }
        ckpt_close(c);
    }
    free(dir);
    free(path);
}

/* ---- writing ------------------------------------------------------------------------------------
 */

/* Stacked experts under fp8, read back with the same values. */
static void test_store_stack(void **state)
{
    (void)state;
    err e = {0};
    const quant_dialect *d = quant_dialect_by_name("fp8");
    qspec s;
    qtensor t;
    CHECK_OK(qspec_parse("w:fp8_e4m3,block32x64 a:fp8_e4m3,group64", &s, &e));
    CHECK_OK(qtensor_alloc(&t, &s, NUM_BF16, 3, 40, 100, &e));
    uint64_t seed = 5;
    for (int64_t i = 0; i < 3 * 40 * 100; i++)
        ((uint8_t *)(uintptr_t)t.codes)[i] = (uint8_t)num_encode(NUM_F8_E4M3, fx_noise(&seed) * 9);
    for (int64_t i = 0; i < 3 * t.scale_rows * t.scale_cols; i++)
        ((uint16_t *)(uintptr_t)t.scales)[i] = num_f32_to_bf16((float)(i + 1) / 8);
    ckpt_writer *w;
    char *dir = fx_path("stack");
    CHECK_OK(ckpt_writer_open(&w, dir, 0, true, &e));
    CHECK_OK(d->store(w, STACK, &t, NUM_BF16, &e));
    buf quant = {0};
    jw j;
    jw_init(&j, &quant, 0);
    CHECK_OK(d->emit_config(&j, &s, NULL, 0, &e));
    char *extra = xasprintf(", \"quantization_config\": %s", quant.data);
    char *config = fx_config(64, 64, 1, extra);
    CHECK_OK(ckpt_writer_finish(w, config, &e));
    CHECK_OK(ckpt_writer_publish(&w, &e));
    opened o = {0};
    CHECK_OK(ckpt_open(&o.c, dir, &e));
    CHECK_OK(quant_open(&o.q, o.c, &e));
    qtensor back = load(&o, STACK);
    assert_true(back.E == 3 && back.N == 40 && back.K == 100);
    float a[100], b[100];
    for (int64_t r = 0; r < 120; r++) {
        qtensor_decode_row(&t, r, a);
        qtensor_decode_row(&back, r, b);
        assert_memory_equal(a, b, sizeof a);
    }
    qtensor_free(&back);
    close_model(&o);
    qtensor_free(&t);
    buf_free(&quant);
    free(extra);
    free(config);
    free(dir);
}

static void test_store_refuses(void **state)
{
    (void)state;
    static const struct {
        const char *dialect, *spec, *why;
    } cases[] = {
        {"fp8", "w:fp8_e4m3,channel a:fp8_e4m3,token", "channel"},
        {"fp8", "w:fp8_e4m3,block128x128", "block128x128"},
        {"fp8", "w:fp8_e4m3,block128x128 a:fp8_e4m3,group64", "group64"},
        {"fp8", "w:int4,g128", "int4"},
        {"fp8", "w:fp8_e4m3,tensor a:fp8_e4m3,token kv:fp8_e4m3", "KV"},
        {"modelopt", "w:fp8_e4m3,tensor a:fp8_e4m3,tensor kv:fp8_e4m3,head", "one scale a tensor"},
        {"modelopt", "w:int8,channel a:int8,token", "int8"},
        {"modelopt", "w:int4,g128,asym", "asym"},
        {"modelopt", "w:int3,g128", "int3"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        err e = {0};
        qspec s;
        buf b = {0};
        jw j;
        jw_init(&j, &b, 0);
        CHECK_OK(qspec_parse(cases[i].spec, &s, &e));
        assert_true(quant_dialect_by_name(cases[i].dialect)->emit_config(&j, &s, NULL, 0, &e) < 0);
        SAYS(&e, cases[i].why, cases[i].dialect);
        buf_free(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ragged_blocks),
        cmocka_unit_test(test_grid_refused),
        cmocka_unit_test(test_fused_scales),
        cmocka_unit_test(test_fused_fp8),
        cmocka_unit_test(test_same_bits_from_both_writers),
        cmocka_unit_test(test_globs),
        cmocka_unit_test(test_input_scales),
        cmocka_unit_test(test_codes_refused),
        cmocka_unit_test(test_configs_refused),
        cmocka_unit_test(test_kv_names),
        cmocka_unit_test(test_kv_file),
        cmocka_unit_test(test_store_stack),
        cmocka_unit_test(test_store_refuses),
    };
    return cmocka_run_group_tests(tests, fx_setup, fx_teardown);
}
