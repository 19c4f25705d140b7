/* Checkpoints that lie: each is refused with a message that names the tensor or key. */
#include "quant_fixture.h"

#define M "model.layers.0.mlp.down_proj"
#define CONFIG(groups, rest)                                                                       \
    ", \"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"config_groups\": "    \
    "{\"group_0\": " groups "}" rest "}"
#define INT4                                                                                       \
    "{\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 4, \"strategy\": \"group\", "         \
    "\"group_size\": 32}}"
#define INT4A                                                                                      \
    "{\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 4, \"strategy\": \"group\", "         \
    "\"group_size\": 32, "                                                                         \
    "\"symmetric\": false}}"
#define INT8                                                                                       \
    "{\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 8, \"strategy\": \"channel\"}}"
#define FP8                                                                                        \
    "{\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 8, \"type\": \"float\", "             \
    "\"strategy\": \"channel\"}}"
#define STATIC                                                                                     \
    "{\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 8, \"type\": \"float\", "             \
    "\"strategy\": \"channel\"}, "                                                                 \
    "\"input_activations\": {\"num_bits\": 8, \"type\": \"float\", \"strategy\": \"tensor\"}}"
#define NVFP4                                                                                      \
    "{\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 4, \"type\": \"float\", "             \
    "\"strategy\": \"tensor_group\", "                                                             \
    "\"group_size\": 16}}"
#define MXFP4                                                                                      \
    "{\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 4, \"type\": \"float\", "             \
    "\"strategy\": \"group\", "                                                                    \
    "\"group_size\": 32, \"scale_dtype\": \"torch.uint8\"}}"

static uint16_t ones[64];
static const uint16_t nan_scale[8] = {0x3f80, 0x3f80, 0x7fc0, 0x3f80,
                                      0x3f80, 0x3f80, 0x3f80, 0x3f80};
static const int64_t shape_ok[2] = {4, 64}, shape_huge[2] = {4, INT64_MAX}, shape_neg[2] = {-4, 64},
                     shape_rows[2] = {5, 64};
static const int8_t nine[256] = {1, 2, 9};
static const int32_t g_bad[64] = {0, 1, 2};
static const float zero_f = 0, nan_f = NAN, one_f = 1;
static const uint8_t e8m0_nan[8] = {127, 255, 127, 127, 127, 127, 127, 127};

#define PACKED                                                                                     \
    {                                                                                              \
        M ".weight_packed", NUM_I32, 2, {4, 8}, NULL                                               \
    }
#define SHAPE                                                                                      \
    {                                                                                              \
        M ".weight_shape", NUM_I64, 1, {2}, shape_ok                                               \
    }
#define SCALE                                                                                      \
    {                                                                                              \
        M ".weight_scale", NUM_BF16, 2, {4, 2}, ones                                               \
    }

typedef struct hostile {
    const char *what, *extra;
    int code;
    const char *text; /* in the message */
    fx_tensor t[5];
} hostile;

static const hostile list[] = {
    {"NaN scale",
     CONFIG(INT4, ""),
     ERR_VALUE,
     "scale [",
     {PACKED, SHAPE, {M ".weight_scale", NUM_BF16, 2, {4, 2}, nan_scale}}},
    {"missing scale", CONFIG(INT4, ""), ERR_MISSING, M ".weight_scale", {PACKED, SHAPE}},
    {"missing shape", CONFIG(INT4, ""), ERR_MISSING, "weight_shape", {PACKED, SCALE}},
    {"group that lies",
     CONFIG(INT4, ""),
     ERR_SHAPE,
     "weight_scale",
     {PACKED, SHAPE, {M ".weight_scale", NUM_BF16, 2, {4, 1}, ones}}},
    {"scale transposed",
     CONFIG(INT4, ""),
     ERR_SHAPE,
     "[2, 4]",
     {PACKED, SHAPE, {M ".weight_scale", NUM_BF16, 2, {2, 4}, ones}}},
    {"integer scale",
     CONFIG(INT4, ""),
     ERR_DTYPE,
     "weight_scale",
     {PACKED, SHAPE, {M ".weight_scale", NUM_I32, 2, {4, 2}, NULL}}},
    {"columns that lie",
     CONFIG(INT4, ""),
     ERR_SHAPE,
     "weight_packed",
     {{M ".weight_packed", NUM_I32, 2, {4, 7}, NULL}, SHAPE, SCALE}},
    {"huge weight_shape",
     CONFIG(INT4, ""),
     ERR_SHAPE,
     "weight_shape",
     {PACKED, {M ".weight_shape", NUM_I64, 1, {2}, shape_huge}, SCALE}},
    {"negative weight_shape",
     CONFIG(INT4, ""),
     ERR_SHAPE,
     "weight_shape",
     {PACKED, {M ".weight_shape", NUM_I64, 1, {2}, shape_neg}, SCALE}},
    {"rows that lie",
     CONFIG(INT4, ""),
     ERR_SHAPE,
     "weight_shape",
     {PACKED, {M ".weight_shape", NUM_I64, 1, {2}, shape_rows}, SCALE}},
    {"weight_shape of three",
     CONFIG(INT4, ""),
     ERR_SHAPE,
     "two numbers",
     {PACKED, {M ".weight_shape", NUM_I64, 1, {3}, NULL}, SCALE}},
    {"packed in 1-D",
     CONFIG(INT4, ""),
     ERR_SHAPE,
     "2 dimensions",
     {{M ".weight_packed", NUM_I32, 1, {32}, NULL}, SHAPE, SCALE}},
    {"missing zero points",
     CONFIG(INT4A, ""),
     ERR_MISSING,
     "weight_zero_point",
     {PACKED, SHAPE, SCALE}},
    {"zero points not packed along rows",
     CONFIG(INT4A, ""),
     ERR_SHAPE,
     "weight_zero_point",
     {PACKED, SHAPE, SCALE, {M ".weight_zero_point", NUM_I32, 2, {4, 1}, NULL}}},
    {"zero points in a symmetric scheme",
     CONFIG(INT4, ""),
     ERR_FORMAT,
     "symmetric",
     {PACKED, SHAPE, SCALE, {M ".weight_zero_point", NUM_I32, 2, {1, 2}, NULL}}},
    {"g_idx out of range",
     CONFIG(INT4, ""),
     ERR_VALUE,
     "g_idx",
     {PACKED, SHAPE, SCALE, {M ".weight_g_idx", NUM_I32, 1, {64}, g_bad}}},
    {"g_idx too short",
     CONFIG(INT4, ""),
     ERR_SHAPE,
     "weight_g_idx",
     {PACKED, SHAPE, SCALE, {M ".weight_g_idx", NUM_I32, 1, {63}, NULL}}},
    {"int4 code 9 in a byte",
     CONFIG(INT4, ""),
     ERR_VALUE,
     "code 9",
     {{M ".weight", NUM_I8, 2, {4, 64}, nine}, SCALE}},
    {"fp8 stored, int8 said",
     CONFIG(INT8, ""),
     ERR_DTYPE,
     "I8",
     {{M ".weight", NUM_F8_E4M3, 2, {4, 64}, NULL},
      {M ".weight_scale", NUM_BF16, 2, {4, 1}, ones}}},
    {"int8 stored, fp8 said",
     CONFIG(FP8, ""),
     ERR_DTYPE,
     "F8_E4M3",
     {{M ".weight", NUM_I8, 2, {4, 64}, NULL}, {M ".weight_scale", NUM_BF16, 2, {4, 1}, ones}}},
    {"packed int4 stored, fp8 said",
     CONFIG(FP8, ""),
     ERR_DTYPE,
     "weight_packed",
     {PACKED, SHAPE, SCALE}},
    {"static activations without scale",
     CONFIG(STATIC, ""),
     ERR_MISSING,
     "input_scale",
     {{M ".weight", NUM_F8_E4M3, 2, {4, 64}, NULL},
      {M ".weight_scale", NUM_BF16, 2, {4, 1}, ones}}},
    {"static scale of zero",
     CONFIG(STATIC, ""),
     ERR_VALUE,
     "input_scale",
     {{M ".weight", NUM_F8_E4M3, 2, {4, 64}, NULL},
      {M ".weight_scale", NUM_BF16, 2, {4, 1}, ones},
      {M ".input_scale", NUM_F32, 1, {1}, &zero_f}}},
    {"nvfp4 without its factor",
     CONFIG(NVFP4, ""),
     ERR_MISSING,
     "weight_global_scale",
     {{M ".weight_packed", NUM_U8, 2, {4, 32}, NULL},
      {M ".weight_scale", NUM_F8_E4M3, 2, {4, 4}, NULL}}},
    {"nvfp4 factor 0",
     CONFIG(NVFP4, ""),
     ERR_VALUE,
     "weight_global_scale",
     {{M ".weight_packed", NUM_U8, 2, {4, 32}, NULL},
      {M ".weight_scale", NUM_F8_E4M3, 2, {4, 4}, NULL},
      {M ".weight_global_scale", NUM_F32, 1, {1}, &zero_f}}},
    {"nvfp4 factor NaN",
     CONFIG(NVFP4, ""),
     ERR_VALUE,
     "weight_global_scale",
     {{M ".weight_packed", NUM_U8, 2, {4, 32}, NULL},
      {M ".weight_scale", NUM_F8_E4M3, 2, {4, 4}, NULL},
      {M ".weight_global_scale", NUM_F32, 1, {1}, &nan_f}}},
    {"nvfp4 factor twice",
     CONFIG(NVFP4, ""),
     ERR_SHAPE,
     "weight_global_scale",
     {{M ".weight_packed", NUM_U8, 2, {4, 32}, NULL},
      {M ".weight_scale", NUM_F8_E4M3, 2, {4, 4}, NULL},
      {M ".weight_global_scale", NUM_F32, 1, {2}, NULL}}},
    {"mxfp4 with NaN exponent",
     CONFIG(MXFP4, ""),
     ERR_VALUE,
     "scale [",
     {{M ".weight_packed", NUM_U8, 2, {4, 32}, NULL},
      {M ".weight_scale", NUM_U8, 2, {4, 2}, e8m0_nan}}},
    {"mxfp4 with float scales",
     CONFIG(MXFP4, ""),
     ERR_DTYPE,
     "weight_scale",
     {{M ".weight_packed", NUM_U8, 2, {4, 32}, NULL}, SCALE}},
    {"ignored module with packed tensors",
     CONFIG(INT4, ", \"ignore\": [\"" M "\"]"),
     ERR_FORMAT,
     "ignore",
     {PACKED, SHAPE, SCALE}},
    {"module that no group targets",
     CONFIG("{\"targets\": [\"re:.*up_proj\"], \"weights\": {\"num_bits\": 4, \"group_size\": 32}}",
            ""),
     ERR_FORMAT,
     "no config group targets",
     {PACKED, SHAPE, SCALE}},
    {"plain beside packed",
     CONFIG(INT4, ""),
     ERR_FORMAT,
     "weight_packed",
     {PACKED, SHAPE, SCALE, {M ".weight", NUM_BF16, 2, {4, 64}, NULL}}},
    {"group that matches nothing",
     CONFIG(INT4, ""),
     ERR_FORMAT,
     "matches no quantized module",
     {{M ".weight", NUM_BF16, 2, {4, 64}, NULL}}},
    {"unknown method",
     ", \"quantization_config\": {\"quant_method\": \"magic\"}",
     ERR_UNSUPPORTED,
     "magic",
     {{M ".weight", NUM_BF16, 2, {4, 64}, NULL}}},
    {"aqlm",
     ", \"quantization_config\": {\"quant_method\": \"aqlm\", \"bits\": 4}",
     ERR_UNSUPPORTED,
     "aqlm",
     {{M ".codes", NUM_I32, 2, {8, 4}, NULL}}},
    {"no method at all",
     ", \"quantization_config\": {\"bits\": 4}",
     ERR_FORMAT,
     "quant_method",
     {{M ".weight", NUM_BF16, 2, {4, 64}, NULL}}},
    {"method of another type",
     ", \"quantization_config\": {\"quant_method\": 4}",
     ERR_FORMAT,
     "quant_method",
     {{M ".weight", NUM_BF16, 2, {4, 64}, NULL}}},
    {"quantized tensors, no config",
     "",
     ERR_FORMAT,
     "no quantization_config",
     {PACKED, SHAPE, SCALE}},
    {"fp8 codes, no config",
     "",
     ERR_FORMAT,
     "no quantization_config",
     {{M ".weight", NUM_F8_E4M3, 2, {4, 64}, NULL}}},
    {"rotations",
     CONFIG(INT4, ", \"transform_config\": {\"config_groups\": {}}"),
     ERR_UNSUPPORTED,
     "transform_config",
     {PACKED, SHAPE, SCALE}},
    {"sparsity",
     CONFIG(INT4, ", \"sparsity_config\": {\"format\": \"sparse-24-bitmask\"}"),
     ERR_UNSUPPORTED,
     "sparsity",
     {PACKED, SHAPE, SCALE}},
    {"retired format",
     CONFIG(INT4, ", \"format\": \"marlin-24\""),
     ERR_UNSUPPORTED,
     "marlin-24",
     {PACKED, SHAPE, SCALE}},
    {"group 0",
     CONFIG("{\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 4, \"group_size\": 0}}", ""),
     ERR_VALUE,
     "group_size",
     {PACKED, SHAPE, SCALE}},
    {"group -5",
     CONFIG("{\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 4, \"group_size\": -5}}", ""),
     ERR_VALUE,
     "group_size",
     {PACKED, SHAPE, SCALE}},
    {"1 bit",
     CONFIG("{\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 1}}", ""),
     ERR_UNSUPPORTED,
     "1-bit int",
     {PACKED, SHAPE, SCALE}},
    {"a million bits",
     CONFIG("{\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 1e6}}", ""),
     ERR_UNSUPPORTED,
     "bit",
     {PACKED, SHAPE, SCALE}},
    {"unknown strategy",
     CONFIG("{\"targets\": [\"Linear\"], \"weights\": {\"strategy\": \"magic\"}}", ""),
     ERR_UNSUPPORTED,
     "magic",
     {PACKED, SHAPE, SCALE}},
    {"block 0",
     CONFIG("{\"targets\": [\"Linear\"], \"weights\": {\"strategy\": \"block\", "
            "\"block_structure\": [0, 1]}}",
            ""),
     ERR_FORMAT,
     "block_structure",
     {PACKED, SHAPE, SCALE}},
    {"broken target",
     CONFIG("{\"targets\": [\"re:(\"], \"weights\": {\"num_bits\": 4}}", ""),
     ERR_USAGE,
     "re:(",
     {PACKED, SHAPE, SCALE}},
    {"targets of numbers",
     CONFIG("{\"targets\": [3], \"weights\": {\"num_bits\": 4}}", ""),
     ERR_FORMAT,
     "strings",
     {PACKED, SHAPE, SCALE}},
    {"a list of groups",
     ", \"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"config_groups\": "
     "[1]}",
     ERR_FORMAT,
     "config_groups",
     {PACKED, SHAPE, SCALE}},
    {"kv of 4 bits",
     CONFIG(INT4, ", \"kv_cache_scheme\": {\"num_bits\": 4, \"type\": \"int\"}"),
     ERR_UNSUPPORTED,
     "KV cache",
     {PACKED, SHAPE, SCALE}},
    {"kv with zero points",
     CONFIG(INT4, ", \"kv_cache_scheme\": {\"type\": \"float\", \"symmetric\": false}"),
     ERR_UNSUPPORTED,
     "symmetric",
     {PACKED, SHAPE, SCALE}},
    {"no codes",
     CONFIG(INT4, ""),
     ERR_MISSING,
     M "' has no codes",
     {SHAPE, SCALE, {"model.layers.0.mlp.up_proj.weight_packed", NUM_I32, 2, {4, 8}, NULL}}},
    {"scale of a plain weight",
     CONFIG(INT4, ""),
     ERR_FORMAT,
     "is plain bf16",
     {SCALE,
      {M ".weight", NUM_BF16, 2, {4, 64}, NULL},
      {"model.layers.0.mlp.up_proj.weight_packed", NUM_I32, 2, {4, 8}, NULL}}},
    {"bitsandbytes without codes",
     ", \"quantization_config\": {\"quant_method\": \"bitsandbytes\", \"load_in_8bit\": true}",
     ERR_MISSING,
     M "' has no codes",
     {{M ".SCB", NUM_F32, 1, {4}, NULL},
      {"model.layers.0.mlp.up_proj.weight", NUM_I8, 2, {4, 64}, NULL},
      {"model.layers.0.mlp.up_proj.SCB", NUM_F32, 1, {4}, NULL}}},
    {"bitsandbytes scales of another type",
     ", \"quantization_config\": {\"quant_method\": \"bitsandbytes\", \"load_in_8bit\": true}",
     ERR_SHAPE,
     M ".SCB' has shape [4] (int32)",
     {{M ".weight", NUM_I8, 2, {4, 64}, NULL}, {M ".SCB", NUM_I32, 1, {4}, NULL}}},
};

static void test_refused(void **state)
{
    (void)state;
    char *dir = fx_path("hostile");
    for (size_t i = 0; i < 64; i++)
        ones[i] = 0x3f80;
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        err e = {0};
        const hostile *h = &list[i];
        ckpt *c = NULL;
        quant_ckpt *q = NULL;
        qtensor t = {0};
        size_t n = 0;
        char *config = fx_config(64, 64, 1, h->extra);
        while (n < 5 && h->t[n].name)
            n++;
        fx_write(dir, config, h->t, n);
        int rc = ckpt_open(&c, dir, &e);
        if (rc >= 0) rc = quant_open(&q, c, &e);
        if (rc >= 0) rc = quant_load(q, M, &t, &e);
        if (rc != -h->code || !strstr(e.msg, h->text))
            fail_msg("%s: rc %d, wanted %d with '%s': %s", h->what, rc, -h->code, h->text, e.msg);
        qtensor_free(&t);
        quant_close(q);
        ckpt_close(c);
        free(config);
    }
    free(dir);
}

/* The same files untouched load: the list above fails for the reason that it names. */
static void test_accepted(void **state)
{
    (void)state;
    const fx_tensor good[] = {PACKED, SHAPE, SCALE, {M ".input_scale", NUM_F32, 1, {1}, &one_f}};
    err e = {0};
    ckpt *c;
    quant_ckpt *q;
    qtensor t;
    char *dir = fx_path("good"), *config = fx_config(64, 64, 1, CONFIG(INT4, ""));
    fx_write(dir, config, good, 4);
    CHECK_OK(ckpt_open(&c, dir, &e));
    CHECK_OK(quant_open(&q, c, &e));
    CHECK_OK(quant_load(q, M, &t, &e));
    assert_int_equal(t.N, 4);
    assert_int_equal(t.K, 64);
    assert_int_equal(qtensor_code(&t, 3, 63), -8);
    qtensor_free(&t);
    CHECK_ERR(quant_load(q, "model.layers.0.mlp.up_proj", &t, &e), ERR_MISSING, "up_proj.weight");
    quant_close(q);
    ckpt_close(c);
    free(config);
    free(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_accepted),
    };
    return cmocka_run_group_tests(tests, fx_setup, fx_teardown);
}
