/* The scheme grammar: presets, canonical text, refusals that name the word, and random texts. */
#include "check.h"
#include "num/qspec.h"

static void check_round_trip(const qspec *s)
{
    err e = {0};
    buf text = {0}, again = {0};
    qspec back;
    qspec_format(s, &text);
    int rc = qspec_parse(text.data, &back, &e);
    if (rc < 0) fail_msg("'%s' does not parse: %s", text.data, e.msg);
    if (!qaxis_equal(&s->w, &back.w) || !qaxis_equal(&s->a, &back.a) ||
        !qaxis_equal(&s->kv, &back.kv))
        fail_msg("'%s' is another spec when parsed again", text.data);
    qspec_format(&back, &again);
    assert_string_equal(text.data, again.data);
    buf_free(&text);
    buf_free(&again);
}

static void check_text(const char *in, const char *want)
{
    err e = {0};
    buf b = {0};
    qspec s;
    CHECK_OK(qspec_parse(in, &s, &e));
    qspec_format(&s, &b);
    assert_string_equal(b.data, want);
    check_round_trip(&s);
    buf_free(&b);
}

static void presets(void **state)
{
    (void)state;
    err e = {0};
    assert_int_equal(qspec_n_presets, 12);
    for (int i = 0; i < qspec_n_presets; i++) {
        qspec by_name, by_text;
        CHECK_OK(qspec_parse(qspec_presets[i].name, &by_name, &e));
        CHECK_OK(qspec_parse(qspec_presets[i].spec, &by_text, &e));
        assert_true(qaxis_equal(&by_name.w, &by_text.w) && qaxis_equal(&by_name.a, &by_text.a) &&
                    qaxis_equal(&by_name.kv, &by_text.kv));
        assert_true(qaxis_quantized(&by_name.w));
        assert_false(qaxis_quantized(&by_name.kv));
        check_round_trip(&by_name);
        /* The preset's text is a part of the canonical one: it is written in canonical words. */
        buf b = {0}, want = {0};
        qspec_format(&by_name, &b);
        buf_printf(&want, "%s%s kv:bf16", qspec_presets[i].spec,
                   strstr(qspec_presets[i].spec, "a:") ? "" : " a:bf16");
        assert_string_equal(b.data, want.data);
        buf_free(&b);
        buf_free(&want);
    }
}

static void canonical(void **state)
{
    (void)state;
    check_text("int4", "w:int4,g128 a:bf16 kv:bf16");
    check_text("w:int4", "w:int4,g128 a:bf16 kv:bf16");
    check_text("w:int8", "w:int8,channel a:bf16 kv:bf16");
    check_text("w:fp8,channel a:fp8", "w:fp8_e4m3,channel a:fp8_e4m3,token kv:bf16");
    check_text("kv:fp8", "w:bf16 a:bf16 kv:fp8_e4m3,tensor");
    check_text(" kv:fp8_e5m2,head\ta:half  w:int3,g64,sym ", "w:int3,g64 a:f16 kv:fp8_e5m2,head");
    check_text("fp8 kv:fp8_e4m3", "w:fp8_e4m3,channel a:fp8_e4m3,token kv:fp8_e4m3,tensor");
    check_text("fp8 a:bf16", "w:fp8_e4m3,channel a:bf16 kv:bf16");
    check_text("fp8-block", "w:fp8_e4m3,block128x128 a:fp8_e4m3,group128 kv:bf16");
    check_text("w:int4,actorder,g32,asym", "w:int4,g32,asym,actorder a:bf16 kv:bf16");
    check_text("w:nvfp4 a:nvfp4 kv:fp4", "w:nvfp4,g16 a:nvfp4,g16 kv:fp4,g16");
    check_text("w:mxfp4,g32 a:mxfp8 kv:int8", "w:mxfp4,g32 a:mxfp8,g32 kv:int8,token_head");
    check_text("w:nf4,b64", "w:nf4,b64 a:bf16 kv:bf16");
    check_text("w:bnb_fp4", "w:bnb_fp4,b64 a:bf16 kv:bf16");
    check_text("w:nf4,g128", "w:nf4,b128 a:bf16 kv:bf16");
    check_text("a:int8,tensor,asym w:int8,tensor", "w:int8,tensor a:int8,tensor,asym kv:bf16");
    check_text("a:fp8,tensor,dynamic", "w:bf16 a:fp8_e4m3,tensor,dynamic kv:bf16");
    check_text("w:float32 a:float16 kv:bfloat16", "w:f32 a:f16 kv:bf16");
}

static void fields(void **state)
{
    (void)state;
    err e = {0};
    qspec s;
    CHECK_OK(qspec_parse("nvfp4", &s, &e));
    assert_true(s.w.type == NUM_F4_E2M1 && s.w.gran == Q_GROUP && s.w.group == 16 &&
                s.w.scale == QS_NVFP4);
    CHECK_OK(qspec_parse("mxfp4", &s, &e));
    assert_true(s.w.type == NUM_F4_E2M1 && s.w.gran == Q_GROUP && s.w.group == 32 &&
                s.w.scale == QS_MX);
    CHECK_OK(qspec_parse("w:fp8_e4m3,block64x32 a:fp8_e4m3,token", &s, &e));
    assert_true(s.w.gran == Q_BLOCK && s.w.block_n == 64 && s.w.block_k == 32 && s.w.group == 0);
    assert_true(s.a.gran == Q_TOKEN && s.a.dynamic && !s.w.dynamic);
    CHECK_OK(qspec_parse("a:fp8_e4m3,tensor", &s, &e));
    assert_true(s.a.gran == Q_TENSOR && !s.a.dynamic && s.w.type == NUM_BF16);
    CHECK_OK(qspec_parse("w:int8,channel", &s, &e));
    assert_true(s.w.group == 0 && s.w.gran == Q_CHANNEL && !s.w.asym);
    qaxis a;
    CHECK_OK(qspec_parse_axis("fp8_e4m3,head", 'k', &a, &e));
    assert_true(a.gran == Q_HEAD && qaxis_quantized(&a));
    CHECK_OK(qspec_parse_axis("bf16", 'k', &a, &e));
    assert_false(qaxis_quantized(&a));
}

static void refusals(void **state)
{
    (void)state;
    static const struct {
        const char *text, *word;
    } bad[] = {
        {"", "empty"},
        {"   ", "empty"},
        {"int5000", "'int5000'"},
        {"int4 fp8", "'fp8'"},
        {"x:int4", "'x:int4'"},
        {"w:", "unknown element type ''"},
        {"w:int9", "'int9'"},
        {"w:fp4", "'fp4'"},
        {"w:int4,", "detail ''"},
        {"w:int4,g0", "'g0'"},
        {"w:int4,g", "'g'"},
        {"w:int4,g128x", "'g128x'"},
        {"w:int4,g-1", "'g-1'"},
        {"w:int4,g99999999999999999999", "'g9999"},
        {"w:int4,token", "'token'"},
        {"w:int4,g128,g64", "second granularity"},
        {"w:int4,channel,actorder", "actorder needs groups"},
        {"w:int4,asym,asym", "'asym'"},
        {"w:fp8_e4m3,asym", "'asym'"},
        {"w:fp8_e4m3,block128", "'block128'"},
        {"w:fp8_e4m3,block0x128", "'block0x128'"},
        {"w:nvfp4,g32", "'g32'"},
        {"w:mxfp4,channel", "'channel'"},
        {"w:bf16,channel", "'channel'"},
        {"w:int4 w:int8", "given twice"},
        {"a:int4", "'int4'"},
        {"a:fp8_e4m3,channel", "'channel'"},
        {"a:fp8_e4m3,token,static", "static scales are per tensor"},
        {"a:int8,actorder", "'actorder'"},
        {"kv:int4", "'int4'"},
        {"kv:int8,tensor", "'tensor'"},
        {"kv:fp8_e4m3,dynamic", "'dynamic'"},
        {"kv:fp4,g32", "'g32'"},
        {"W:int4", "'W:int4'"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        err e = {0};
        qspec s, before;
        memset(&s, 0x5A, sizeof s);
        before = s;
        int rc = qspec_parse(bad[i].text, &s, &e);
        if (rc != -ERR_USAGE) fail_msg("'%s' gives %d (%s)", bad[i].text, rc, e.msg);
        if (!strstr(e.msg, bad[i].word))
            fail_msg("'%s': the message lacks %s: %s", bad[i].text, bad[i].word, e.msg);
        assert_memory_equal(&s, &before, sizeof s); /* no partial result */
    }
    err e = {0};
    qspec s;
    CHECK_ERR(qspec_parse("w:int9", &s, &e), ERR_USAGE, "int8"); /* lists what is allowed */
    CHECK_ERR(qspec_parse("w:int4,foo", &s, &e), ERR_USAGE, "channel");
    CHECK_ERR(qspec_parse("foo", &s, &e), ERR_USAGE, "mxfp4");
    CHECK_ERR(qspec_parse("kv:int8,foo", &s, &e), ERR_USAGE, "token_head");
}

/* Texts put together from pieces of the grammar and noise: nothing crashes, and what parses has a
 * canonical text that is a fixed point. */
static void random_texts(void **state)
{
    (void)state;
    static const char *const pieces[] = {"w:",
                                         "a:",
                                         "kv:",
                                         ",",
                                         " ",
                                         "int4",
                                         "int8",
                                         "fp8_e4m3",
                                         "fp8",
                                         "nvfp4",
                                         "g128",
                                         "g16",
                                         "b64",
                                         "group",
                                         "128",
                                         "block",
                                         "x",
                                         "token",
                                         "tensor",
                                         "head",
                                         "asym",
                                         "actorder",
                                         "nf4",
                                         "mxfp8",
                                         "bf16",
                                         "fp4",
                                         "token_head",
                                         "channel",
                                         "dynamic",
                                         "static",
                                         "sym",
                                         "\xff",
                                         "é",
                                         "0",
                                         "w:int4,g128",
                                         " kv:fp8_e4m3",
                                         " a:fp8_e4m3,token",
                                         "%s%n"};
    uint64_t r = 99;
    int parsed = 0;
    for (int i = 0; i < 200000; i++) {
        char text[400] = "";
        size_t n = 0;
        r = r * 6364136223846793005u + 1442695040888963407u;
        int k = 1 + (int)(r >> 60) % 9;
        for (; k > 0; k--) {
            r = r * 6364136223846793005u + 1442695040888963407u;
            const char *p = pieces[(r >> 33) % (sizeof pieces / sizeof *pieces)];
            n += (size_t)snprintf(text + n, sizeof text - n, "%s", p);
            if ((r >> 20 & 63) == 0) text[n - 1] = (char)(r >> 50 | 1);
        }
        qspec s;
        err e = {0};
        int rc = qspec_parse(text, &s, &e);
        if (rc == 0) {
            check_round_trip(&s);
            parsed++;
        } else {
            assert_true(e.code == ERR_USAGE && e.msg[0]);
        }
    }
    assert_true(parsed > 500);
    print_message("%d of 200000 random texts are schemes\n", parsed);
    char *huge = xcalloc(100001, 1);
    memset(huge, 'w', 100000);
    err e = {0};
    qspec s;
    CHECK_ERR(qspec_parse(huge, &s, &e), ERR_USAGE, "longer than");
    free(huge);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(presets),  cmocka_unit_test(canonical),    cmocka_unit_test(fields),
        cmocka_unit_test(refusals), cmocka_unit_test(random_texts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
