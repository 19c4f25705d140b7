/* GPTQ, AWQ and auto-round: what is refused, with the tensor or key that the message must name, and
 * the odd things that are legal. */
#include "quant_fixture.h"

#define M "model.layers.0.mlp.down_proj"

static uint32_t noise[1024], sevens[256], eights[256];
static uint16_t one16[4096], minus16[4096], nan16[4096], zero16[4096];
static int32_t order[64], beyond[64], before[64];

static void fill(void)
{
    uint64_t s = 3;
    for (int i = 0; i < 1024; i++) {
        s = s * 6364136223846793005u + 1442695040888963407u;
        noise[i] = (uint32_t)(s >> 32);
    }
    for (int i = 0; i < 256; i++) {
        sevens[i] = 0x77777777u;
        eights[i] = 0x88888888u;
    }
    for (int i = 0; i < 4096; i++) {
        one16[i] = 0x3c00;
        minus16[i] = i % 2 ? 0xbc00 : 0x3c00;
        nan16[i] = i == 5 ? 0x7e00 : 0x3c00;
    }
    beyond[63] = 1;
    before[3] = -1;
}

#define GPTQ(more)  ", \"quantization_config\": {\"quant_method\": \"gptq\"" more "}"
#define AWQ(more)   ", \"quantization_config\": {\"quant_method\": \"awq\"" more "}"
#define ROUND(more) ", \"quantization_config\": {\"quant_method\": \"auto-round\"" more "}"
#define G64         ", \"group_size\": 64"

/* K = 64, N = 64: GPTQ, and AWQ gemm. */
#define QW                                                                                         \
    {                                                                                              \
        M ".qweight", NUM_I32, 2, {8, 64}, noise                                                   \
    }
#define QZ                                                                                         \
    {                                                                                              \
        M ".qzeros", NUM_I32, 2, {1, 8}, sevens                                                    \
    }
#define SC                                                                                         \
    {                                                                                              \
        M ".scales", NUM_F16, 2, {1, 64}, one16                                                    \
    }
#define GI                                                                                         \
    {                                                                                              \
        M ".g_idx", NUM_I32, 1, {64}, order                                                        \
    }
/* codes of another module, so that the checkpoint holds some */
#define OTHER                                                                                      \
    {                                                                                              \
        "model.layers.0.mlp.up_proj.qweight", NUM_I32, 2, {8, 64}, noise                           \
    }
#define AW                                                                                         \
    {                                                                                              \
        M ".qweight", NUM_I32, 2, {64, 8}, noise                                                   \
    }
#define AZ                                                                                         \
    {                                                                                              \
        M ".qzeros", NUM_I32, 2, {1, 8}, eights                                                    \
    }
#define PLAIN_W                                                                                    \
    {                                                                                              \
        M ".weight", NUM_BF16, 2, {64, 64}, NULL                                                   \
    }

typedef struct hostile {
    const char *what, *extra;
    int code;
    const char *text;
    fx_tensor t[6];
} hostile;

static const hostile list[] = {
    {"5 bits", GPTQ(", \"bits\": 5" G64), ERR_UNSUPPORTED, "2, 3, 4 and 8", {QW, QZ, SC}},
    {"bits of text", GPTQ(", \"group_size\": \"all\""), ERR_FORMAT, "group_size", {QW, QZ, SC}},
    {"group 0", GPTQ(", \"group_size\": 0"), ERR_VALUE, "group_size is 0", {QW, QZ, SC}},
    {"group -2", GPTQ(", \"group_size\": -2"), ERR_VALUE, "group_size is -2", {QW, QZ, SC}},
    {"huge group", GPTQ(", \"group_size\": 1073741824"), ERR_VALUE, "1073741824", {QW, QZ, SC}},
    {"marlin",
     GPTQ(", \"checkpoint_format\": \"marlin\""),
     ERR_UNSUPPORTED,
     "marlin",
     {QW, QZ, SC}},
    {"marlin by flag",
     GPTQ(", \"is_marlin_format\": true"),
     ERR_UNSUPPORTED,
     "marlin",
     {QW, QZ, SC}},
    {"planar", GPTQ(", \"format\": \"gptq_p\""), ERR_UNSUPPORTED, "gptq_p", {QW, QZ, SC}},
    {"two labels",
     GPTQ(", \"checkpoint_format\": \"gptq\", \"format\": \"gptq_v2\""),
     ERR_FORMAT,
     "gptq_v2",
     {QW, QZ, SC}},
    {"int64 words", GPTQ(", \"pack_dtype\": \"int64\""), ERR_UNSUPPORTED, "int64", {QW, QZ, SC}},
    {"dynamic list", GPTQ(", \"dynamic\": []"), ERR_FORMAT, "dynamic", {QW, QZ, SC}},
    {"dynamic regex", GPTQ(", \"dynamic\": {\"+:(\": {}}"), ERR_USAGE, "dynamic.+:(", {QW, QZ, SC}},
    {"dynamic bits",
     GPTQ(", \"dynamic\": {\".*\": {\"bits\": \"4\"}}"),
     ERR_FORMAT,
     "bits",
     {QW, QZ, SC}},
    {"no zero points", GPTQ(G64), ERR_MISSING, M ".qzeros", {QW, SC}},
    {"no scales", GPTQ(G64), ERR_MISSING, M ".scales", {QW, QZ}},
    {"no order", GPTQ(G64 ", \"desc_act\": true"), ERR_MISSING, M ".g_idx", {QW, QZ, SC}},
    {"codes of F16",
     GPTQ(G64),
     ERR_DTYPE,
     M ".qweight",
     {{M ".qweight", NUM_F16, 2, {8, 64}, NULL}, QZ, SC}},
    {"codes in a line",
     GPTQ(G64),
     ERR_SHAPE,
     M ".qweight",
     {{M ".qweight", NUM_I32, 1, {512}, noise}, QZ, SC}},
    {"3 bits, 8 rows", GPTQ(", \"bits\": 3" G64), ERR_SHAPE, "multiples of 3 rows", {QW, QZ, SC}},
    {"scales of two groups",
     GPTQ(G64),
     ERR_SHAPE,
     "needs [1, 64]",
     {QW, QZ, {M ".scales", NUM_F16, 2, {2, 64}, one16}}},
    {"another group size", GPTQ(", \"group_size\": 32"), ERR_SHAPE, "needs [2, 64]", {QW, QZ, SC}},
    {"zero points of another width",
     GPTQ(G64),
     ERR_SHAPE,
     M ".qzeros",
     {QW, {M ".qzeros", NUM_I32, 2, {1, 16}, sevens}, SC}},
    {"integer scales",
     GPTQ(G64),
     ERR_DTYPE,
     M ".scales",
     {QW, QZ, {M ".scales", NUM_I32, 2, {1, 64}, noise}}},
    {"NaN", GPTQ(G64), ERR_VALUE, M ".scales", {QW, QZ, {M ".scales", NUM_F16, 2, {1, 64}, nan16}}},
    {"all scales 0",
     GPTQ(G64),
     ERR_VALUE,
     "zero throughout",
     {QW, QZ, {M ".scales", NUM_F16, 2, {1, 64}, zero16}}},
    {"g_idx too large",
     GPTQ(G64),
     ERR_VALUE,
     "names group 1 at column 63",
     {QW, QZ, SC, {M ".g_idx", NUM_I32, 1, {64}, beyond}}},
    {"g_idx negative",
     GPTQ(G64),
     ERR_VALUE,
     "names group -1 at column 3",
     {QW, QZ, SC, {M ".g_idx", NUM_I32, 1, {64}, before}}},
    {"g_idx too short",
     GPTQ(G64),
     ERR_SHAPE,
     M ".g_idx",
     {QW, QZ, SC, {M ".g_idx", NUM_I32, 1, {32}, order}}},
    {"symmetric, stored 8", GPTQ(G64), ERR_FORMAT, "--gptq-zeros v2", {QW, AZ, SC}},
    {"plain beside packed", GPTQ(G64), ERR_FORMAT, "plain weight beside", {QW, QZ, SC, PLAIN_W}},
    {"kept by a rule",
     GPTQ(G64 ", \"dynamic\": {\"-:.*down_proj\": {}}"),
     ERR_FORMAT,
     "different runs",
     {QW, QZ, SC}},
    {"nothing quantized", GPTQ(G64), ERR_FORMAT, "do not belong together", {PLAIN_W}},
    {"tensors of compressed-tensors",
     GPTQ(G64),
     ERR_FORMAT,
     "do not belong together",
     {{M ".weight_packed", NUM_I32, 2, {64, 8}, noise},
      {M ".weight_scale", NUM_F16, 2, {64, 1}, one16}}},
    {"tensors of AWQ", GPTQ(G64), ERR_SHAPE, "AWQ", {AW, AZ, SC}},
    {"no config", "", ERR_FORMAT, "no quantization_config", {QW, QZ, SC}},

    {"AWQ marlin", AWQ(", \"version\": \"marlin\""), ERR_UNSUPPORTED, "marlin", {AW, AZ, SC}},
    {"AWQ of 3 bits", AWQ(", \"bits\": 3"), ERR_UNSUPPORTED, "3 bits", {AW, AZ, SC}},
    {"AWQ gemv of 8 bits",
     AWQ(", \"bits\": 8, \"version\": \"gemv\""),
     ERR_UNSUPPORTED,
     "8 bits",
     {AW, AZ, SC}},
    {"AWQ with activation scales",
     AWQ(G64),
     ERR_UNSUPPORTED,
     "act.scales",
     {AW, AZ, SC, {"model.layers.0.mlp.act.scales", NUM_F16, 1, {64}, one16}}},
    {"AWQ in its own list",
     AWQ(G64 ", \"modules_to_not_convert\": [\"mlp\"]"),
     ERR_FORMAT,
     "different runs",
     {AW, AZ, SC}},
    {"AWQ list of numbers",
     AWQ(G64 ", \"modules_to_not_convert\": [1]"),
     ERR_FORMAT,
     "strings",
     {AW, AZ, SC}},
    {"AWQ without zero points",
     AWQ(G64 ", \"zero_point\": false"),
     ERR_MISSING,
     M ".qzeros",
     {AW, SC}},
    {"tensors of GPTQ", AWQ(G64), ERR_SHAPE, "GPTQ", {QW, QZ, SC}},
    {"gemv under gemm",
     AWQ(G64),
     ERR_SHAPE,
     "version gemv",
     {{M ".qweight", NUM_I32, 2, {64, 8}, noise},
      {M ".qzeros", NUM_I32, 2, {64, 2}, eights},
      {M ".scales", NUM_F16, 2, {64, 16}, one16}}},
    {"gemm under gemv_fast",
     AWQ(G64 ", \"version\": \"gemv_fast\""),
     ERR_DTYPE,
     "I16",
     {AW, AZ, SC}},
    {"fast of 32 columns",
     AWQ(G64 ", \"version\": \"gemv_fast\""),
     ERR_SHAPE,
     "64 input columns",
     {{M ".qweight", NUM_I16, 2, {16, 32}, noise}, AZ, SC}},
    {"fast with NaN",
     AWQ(G64 ", \"version\": \"gemv_fast\""),
     ERR_VALUE,
     M ".qzeros",
     {{M ".qweight", NUM_I16, 2, {4, 64}, noise},
      {M ".scales", NUM_F16, 2, {16, 16}, one16},
      {M ".qzeros", NUM_F16, 2, {16, 16}, nan16}}},

    {"unknown packing",
     ROUND(", \"packing_format\": \"auto_round:tritonv2\""),
     ERR_UNSUPPORTED,
     "tritonv2",
     {QW, QZ, SC}},
    {"unknown type", ROUND(", \"data_type\": \"fp8\""), ERR_UNSUPPORTED, "fp8", {QW, QZ, SC}},
    {"int with activations", ROUND(", \"act_bits\": 8"), ERR_UNSUPPORTED, "8 bits", {QW, QZ, SC}},
    {"extra list", ROUND(", \"extra_config\": [1]"), ERR_FORMAT, "extra_config", {QW, QZ, SC}},
    {"extra regex",
     ROUND(", \"extra_config\": {\"(\": {}}"),
     ERR_USAGE,
     "extra_config.(",
     {QW, QZ, SC}},
    {"kept by extra_config",
     ROUND(G64 ", \"extra_config\": {\"" M "\": {\"bits\": 16}}"),
     ERR_FORMAT,
     "different runs",
     {QW, QZ, SC}},
    {"auto-round with a wrong label",
     ROUND(G64 ", \"packing_format\": \"auto_round\""),
     ERR_FORMAT,
     "--gptq-zeros v1",
     {QW, QZ, SC}},
    {"no codes", GPTQ(G64), ERR_MISSING, M "' has no codes (no '.qweight')", {OTHER, QZ, SC}},
    {"no codes, AWQ", AWQ(G64), ERR_MISSING, "has no codes", {OTHER, AZ, SC}},
    {"no codes, auto-round", ROUND(G64), ERR_MISSING, "has no codes", {OTHER, QZ, SC}},
};

static int load(const char *extra, const fx_tensor *t, quant_opts o, qtensor *out, char **warning,
                err *e)
{
    ckpt *c = NULL;
    quant_ckpt *q = NULL;
    size_t n = 0;
    char *dir = fx_path("packed"), *config = fx_config(64, 64, 1, extra);
    while (n < 6 && t[n].name)
        n++;
    fx_write(dir, config, t, n);
    int rc = ckpt_open(&c, dir, e);
    if (rc >= 0) rc = quant_open_as(&q, c, &o, e);
    if (rc >= 0) rc = quant_load(q, M, out, e);
    if (warning && q && q->n_warnings) *warning = xstrdup(q->warnings[0]);
    quant_close(q);
    ckpt_close(c);
    free(config);
    free(dir);
    return rc;
}

static void test_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        err e = {0};
        const hostile *h = &list[i];
        qtensor t = {0};
        int rc = load(h->extra, h->t, (quant_opts){0}, &t, NULL, &e);
        if (rc != -h->code || !strstr(e.msg, h->text))
            fail_msg("%s: rc %d, wanted %d with '%s': %s", h->what, rc, -h->code, h->text, e.msg);
        qtensor_free(&t);
    }
    err e = {0};
    qtensor t;
    const fx_tensor good[6] = {QW, QZ, SC, GI};
    CHECK_ERR(load(GPTQ(G64), good, (quant_opts){.gptq_zeros = "v3"}, &t, NULL, &e), ERR_USAGE,
              "v3");
}

/* The same tensors untouched load: the list above fails for the reasons that it names. */
static void test_accepted(void **state)
{
    (void)state;
    static const struct {
        const char *extra;
        fx_tensor t[6];
        int group;   /* 0 = one scale a row */
        int columns; /* of scales */
    } good[] = {
        {GPTQ(G64), {QW, QZ, SC, GI}, 64, 1},
        {GPTQ(G64), {QW, QZ, SC}, 64, 1},
        {GPTQ(", \"group_size\": -1, \"desc_act\": true"), {QW, QZ, SC, GI}, 0, 1},
        {GPTQ(", \"group_size\": 1024"), {QW, QZ, SC, GI}, 0, 1}, /* more than there are */
        {GPTQ(G64), {QW, QZ, {M ".scales", NUM_F16, 2, {1, 64}, minus16}}, 64, 1},
        {GPTQ(G64), {QW, QZ, {M ".scales", NUM_BF16, 2, {1, 64}, one16}}, 64, 1},
        /* 64 columns in groups of 48: the last one is short. */
        {GPTQ(", \"group_size\": 48"),
         {QW, {M ".qzeros", NUM_I32, 2, {2, 8}, sevens}, {M ".scales", NUM_F16, 2, {2, 64}, one16}},
         48,
         2},
        {AWQ(", \"group_size\": -1"), {AW, AZ, SC}, 0, 1},
        {AWQ(G64 ", \"zero_point\": false"), {AW, AZ, SC}, 64, 1},
        {AWQ(G64 ", \"version\": \"exllama\""), {AW, AZ, SC}, 64, 1},
        {ROUND(G64), {QW, QZ, {M ".scales", NUM_F16, 2, {1, 64}, minus16}}, 64, 1},
        {ROUND(G64 ", \"extra_config\": {\"down_pro.$\": {\"bits\": 4}, \".*\": {\"bits\": 2}}"),
         {QW, QZ, SC},
         64,
         1},
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        err e = {0};
        qtensor t;
        CHECK_OK(load(good[i].extra, good[i].t, (quant_opts){0}, &t, NULL, &e));
        assert_int_equal(t.N, 64);
        assert_int_equal(t.K, 64);
        assert_int_equal(t.spec.w.group, good[i].group);
        assert_int_equal(t.scale_cols, good[i].columns);
        assert_null(t.g_idx); /* the natural order is none */
        float row[64];
        qtensor_decode_row(&t, 63, row);
        for (int k = 0; k < 64; k++)
            assert_true(isfinite(row[k]));
        qtensor_free(&t);
    }
}

/* "mlp.gate" means the router; readers that look for substrings take gate_proj too. */
static void test_substring_warns(void **state)
{
    (void)state;
    err e = {0};
    qtensor t;
    char *said = NULL;
    const fx_tensor ts[6] = {AW, AZ, SC};
    CHECK_OK(load(AWQ(G64 ", \"modules_to_not_convert\": [\"mlp.down\", \"lm_head\"]"), ts,
                  (quant_opts){0}, &t, &said, &e));
    assert_non_null(said);
    assert_non_null(strstr(said, "'mlp.down'"));
    free(said);
    qtensor_free(&t);
}

static int setup(void **state)
{
    fill();
    return fx_setup(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_accepted),
        cmocka_unit_test(test_substring_warns),
    };
    return cmocka_run_group_tests(tests, setup, fx_teardown);
}
