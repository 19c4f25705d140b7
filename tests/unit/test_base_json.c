/* JSON: texts that must be refused before the library sees them, typed getters, and a writer whose
 * output the reader takes back unchanged. */
#include "check.h"
#include <unistd.h>
#include "base/json.h"
#include "base/file.h"
#include "base/utf8.h"

static int parse(const char *s, size_t n, json **j, err *e)
{
    /* A copy of exactly n bytes: reading behind it is caught by the sanitizers. */
    char *copy = xmalloc(n);
    memcpy(copy, s, n);
    int rc = json_parse(j, copy, n, "body", e);
    free(copy);
    return rc;
}

static void accepted(void **state)
{
    (void)state;
    err e = {0};
    json *j;
    const char *t = " {\"a\":[1,2.5,-3e2],\"b\":{\"c\":null},\"s\":\"\\ud83e\\udd8a "
                    "\\u00e9\\n\",\"t\":true} \n";
    CHECK_OK(parse(t, strlen(t), &j, &e));
    const char *s = NULL;
    assert_int_equal(json_get_str(j, "s", &s, "body", &e), 1);
    assert_string_equal(s, "\xF0\x9F\xA6\x8A \xC3\xA9\n");
    bool b = false;
    assert_int_equal(json_get_bool(j, "t", &b, "body", &e), 1);
    assert_true(b);
    assert_null(json_get(j, "A"));
    assert_true(json_is_null_or_absent(json_get(j, "b"), "c"));
    json_drop(j);
    CHECK_OK(parse("7", 1, &j, &e));
    json_drop(j);
    CHECK_OK(parse("[]", 2, &j, &e));
    assert_null(json_get(j, "x"));
    json_drop(j);
}

static void exact_numbers(void **state)
{
    (void)state;
    static const char t[] =
        "{\"a\":[1,1.0,9007199254740993,{\"x\\\\\":\"7 \\\" 8\",\"y\":-0.0}],\"b\":0.5,\"c\":1e3,"
        "\"d\":[],\"e\":-123456789012345678901234567890,\"f\":7}";
    err e = {0};
    json *j, *copy;
    char *text = xmalloc(sizeof t - 1);
    memcpy(text, t, sizeof t - 1);
    CHECK_OK(json_parse_exact(&j, text, sizeof t - 1, "body", &e));
    free(text);
    copy = cJSON_Duplicate(j, 1);
    json_drop(j);
    const json *a = json_get(copy, "a")->child;
    assert_null(a->valuestring);
    assert_string_equal(a->next->valuestring, "1.0");
    assert_string_equal(a->next->next->valuestring, "9007199254740993");
    assert_string_equal(json_get(a->next->next->next, "y")->valuestring, "-0.0");
    assert_null(json_get(copy, "b")->valuestring);
    assert_string_equal(json_get(copy, "c")->valuestring, "1e3");
    assert_string_equal(json_get(copy, "e")->valuestring, "-123456789012345678901234567890");
    assert_null(json_get(copy, "f")->valuestring);
    json_drop(copy);
    CHECK_OK(json_parse_exact(&j, "7", 1, "body", &e));
    json_drop(j);
    CHECK_ERR(json_parse_exact(&j, "[7", 2, "body", &e), ERR_FORMAT, "byte");
    assert_null(j);
}

static void refused(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t n; /* 0 = strlen */
        int code;
        const char *says;
    } bad[] = {
        {"", 0, ERR_FORMAT, "empty"},
        {"  \n", 0, ERR_FORMAT, "empty"},
        {"{", 0, ERR_FORMAT, "byte"},
        {"{\"a\":}", 0, ERR_FORMAT, "byte"},
        {"[1,2", 0, ERR_FORMAT, "byte"},
        {"[1] x", 0, ERR_FORMAT, "follows the value at byte 4"},
        {"{}{}", 0, ERR_FORMAT, "follows"},
        {"{\"a\":1}\0", 8, ERR_FORMAT, "NUL at byte 7"},
        {"\"a\0b\"", 5, ERR_FORMAT, "control character 0x00"},
        {"\"\\u0000\"", 0, ERR_FORMAT, "\\u0000"},
        {"\"\xff\"", 0, ERR_FORMAT, "byte 1 is not valid UTF-8"},
        {"\"\xed\xa0\x80\"", 0, ERR_FORMAT, "UTF-8"},
        {"\"\xc0\xaf\"", 0, ERR_FORMAT, "UTF-8"},
        {"\"\xe6\x97", 0, ERR_FORMAT, "UTF-8"},
        {"\"\\ud800\"", 0, ERR_FORMAT, "lone surrogate \\ud800"},
        {"\"\\ud800\\u0041\"", 0, ERR_FORMAT, "lone surrogate"},
        {"\"\\udc00\\ud800\"", 0, ERR_FORMAT, "lone surrogate \\udc00"},
        {"\"\\ud83d\\ud83d\"", 0, ERR_FORMAT, "lone surrogate"},
        {"\"\\u12", 0, ERR_FORMAT, "hexadecimal"},
        {"\"\\u12g4\"", 0, ERR_FORMAT, "hexadecimal"},
        {"\"\\", 0, ERR_FORMAT, "ends inside"},
        {"\"\\x41\"", 0, ERR_FORMAT, "byte"},
        {"\"a\nb\"", 0, ERR_FORMAT, "control character 0x0a"},
        {"nul", 0, ERR_FORMAT, "byte"},
        {"NaN", 0, ERR_FORMAT, "byte"},
        {"'a'", 0, ERR_FORMAT, "byte"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        err e = {0};
        json *j = (json *)1;
        size_t n = bad[i].n ? bad[i].n : strlen(bad[i].text);
        int rc = parse(bad[i].text, n, &j, &e);
        if (rc != -bad[i].code || !strstr(e.msg, bad[i].says))
            fail_msg("case %zu (%s): %d, '%s' lacks '%s'", i, bad[i].text, rc, e.msg, bad[i].says);
        assert_null(j);
        assert_true(!strncmp(e.msg, "body: ", 6));
    }
}

static void deep_nesting(void **state)
{
    (void)state;
    err e = {0};
    json *j;
    for (int kind = 0; kind < 3; kind++) {
        buf b = {0};
        for (int i = 0; i < 100000; i++)
            buf_puts(&b, kind == 0 ? "[" : kind == 1 ? "{\"a\":" : "[{\"b\":");
        CHECK_ERR(parse(b.data, b.len, &j, &e), ERR_LIMIT, "nested deeper than 200");
        buf_free(&b);
    }
    buf b = {0};
    for (int i = 0; i < JSON_MAX_DEPTH; i++)
        buf_putc(&b, '[');
    for (int i = 0; i < JSON_MAX_DEPTH; i++)
        buf_putc(&b, ']');
    CHECK_OK(parse(b.data, b.len, &j, &e));
    json_drop(j);
    buf_clear(&b); /* brackets in strings are not nesting */
    buf_putc(&b, '"');
    for (int i = 0; i < 1000; i++)
        buf_puts(&b, "[{");
    buf_putc(&b, '"');
    CHECK_OK(parse(b.data, b.len, &j, &e));
    json_drop(j);
    buf_free(&b);
}

static void getters(void **state)
{
    (void)state;
    err e = {0};
    json *j;
    const char *t =
        "{\"i\":42,\"neg\":-9007199254740992,\"f\":1.5,\"big\":1e300,\"inf\":1e999,\"s\":\"x\","
        "\"n\":null,\"b\":false,\"a\":[],\"o\":{},\"huge\":1e19}";
    CHECK_OK(parse(t, strlen(t), &j, &e));
    int64_t i = 7;
    double f = 7;
    bool b = true;
    const char *s = "keep";
    assert_int_equal(json_get_i64(j, "i", &i, "cfg", &e), 1);
    assert_int_equal(i, 42);
    assert_int_equal(json_get_i64(j, "neg", &i, "cfg", &e), 1);
    assert_true(i == -9007199254740992);
    i = 7;
    assert_int_equal(json_get_i64(j, "absent", &i, "cfg", &e), 0);
    assert_int_equal(json_get_i64(j, "n", &i, "cfg", &e), 0);
    assert_int_equal(i, 7);
    CHECK_ERR(json_get_i64(j, "f", &i, "cfg", &e), ERR_FORMAT,
              "cfg: 'f' must be an integer, found 1.5");
    CHECK_ERR(json_get_i64(j, "big", &i, "cfg", &e), ERR_FORMAT, "too large");
    CHECK_ERR(json_get_i64(j, "huge", &i, "cfg", &e), ERR_FORMAT, "too large");
    CHECK_ERR(json_get_i64(j, "s", &i, "cfg", &e), ERR_FORMAT, "found a string");
    CHECK_ERR(json_get_i64(j, "b", &i, "cfg", &e), ERR_FORMAT, "found a boolean");
    CHECK_ERR(json_get_f64(j, "inf", &f, "cfg", &e), ERR_FORMAT, "finite");
    CHECK_ERR(json_get_f64(j, "a", &f, "cfg", &e), ERR_FORMAT, "found an array");
    CHECK_ERR(json_get_bool(j, "i", &b, "cfg", &e), ERR_FORMAT, "found a number");
    CHECK_ERR(json_get_str(j, "o", &s, "cfg", &e), ERR_FORMAT, "found an object");
    assert_true(i == 7 && f == 7 && b && !strcmp(s, "keep"));
    assert_int_equal(json_get_f64(j, "f", &f, "cfg", &e), 1);
    assert_true(f == 1.5);
    json_drop(j);
}

/* Numbers of absurd length must give a number or an error, never more. */
static void long_numbers(void **state)
{
    (void)state;
    for (size_t n = 1; n < 5000; n = n * 3 + 1) {
        char *t = xmalloc(n + 2);
        memset(t, '9', n);
        err e = {0};
        json *j;
        int rc = parse(t, n, &j, &e);
        assert_true(rc == 0 || rc == -ERR_FORMAT);
        json_drop(j);
        memcpy(t, "0.", n < 2 ? n : 2);
        json_drop(parse(t, n, &j, &e) == 0 ? j : NULL);
        free(t);
    }
}

/* Every cut and every changed byte of a valid text. */
static void mutations(void **state)
{
    (void)state;
    const char *t = "{\"messages\":[{\"role\":\"user\",\"content\":\"h\\u00e9\\n\xE6\x97\xA5\"}],"
                    "\"n\":-1.5e-3}";
    size_t n = strlen(t);
    uint64_t r = 5;
    char copy[128];
    for (size_t cut = 0; cut < n; cut++) {
        err e = {0};
        json *j;
        assert_true(parse(t, cut, &j, &e) < 0);
    }
    for (int i = 0; i < 100000; i++) {
        memcpy(copy, t, n);
        for (int k = 0; k < 2; k++) {
            r = r * 6364136223846793005u + 1442695040888963407u;
            copy[(r >> 40) % n] = (char)(r >> 30);
        }
        err e = {0};
        json *j;
        if (parse(copy, n, &j, &e) == 0) json_drop(j);
    }
}

static void writer(void **state)
{
    (void)state;
    for (int indent = 0; indent <= 2; indent += 2) {
        err e = {0};
        buf b = {0};
        jw w;
        jw_init(&w, &b, indent);
        jw_obj(&w);
        jw_kstr(&w, "text", "q\" \\ \n\t\x01\x7f \xE6\x97\xA5 \xff end");
        jw_kstr(&w, "none", NULL);
        jw_ki64(&w, "i", INT64_MIN);
        jw_kf64(&w, "inf", INFINITY);
        jw_kbool(&w, "b", true);
        jw_key(&w, "arr");
        jw_arr(&w);
        jw_f64(&w, 0.1);
        jw_arr(&w);
        jw_end_arr(&w);
        jw_obj(&w);
        jw_end_obj(&w);
        jw_raw(&w, "[1]");
        jw_null(&w);
        jw_strn(&w, "abc", 2);
        jw_end_arr(&w);
        jw_end_obj(&w);
        if (!indent)
            assert_string_equal(b.data, "{\"text\":\"q\\\" \\\\ \\n\\t\\u0001\\u007f \xE6\x97\xA5 "
                                        "\xEF\xBF\xBD end\",\"none\":null,"
                                        "\"i\":-9223372036854775808,\"inf\":null,\"b\":true,"
                                        "\"arr\":[0.1,[],{},[1],null,\"ab\"]}");
        json *j;
        CHECK_OK(parse(b.data, b.len, &j, &e));
        const char *s = NULL;
        assert_int_equal(json_get_str(j, "text", &s, "t", &e), 1);
        assert_string_equal(s, "q\" \\ \n\t\x01\x7f \xE6\x97\xA5 \xEF\xBF\xBD end");
        json_drop(j);
        buf_free(&b);
    }
}

static void doubles_come_back(void **state)
{
    (void)state;
    uint64_t r = 11;
    for (int i = 0; i < 20000; i++) {
        r = r * 6364136223846793005u + 1442695040888963407u;
        uint64_t bits = r ^ r >> 29;
        double v;
        memcpy(&v, &bits, 8);
        if (!isfinite(v)) continue;
        err e = {0};
        buf b = {0};
        jw w;
        json *j;
        double back = 0;
        jw_init(&w, &b, 0);
        jw_obj(&w);
        jw_kf64(&w, "v", v);
        jw_end_obj(&w);
        CHECK_OK(parse(b.data, b.len, &j, &e));
        assert_int_equal(json_get_f64(j, "v", &back, "t", &e), 1);
        assert_true(back == v);
        json_drop(j);
        buf_free(&b);
    }
}

static void files(void **state)
{
    (void)state;
    err e = {0};
    json *j;
    char path[] = "/tmp/tare-json-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "{\"a\": tru}", 10), 10);
    close(fd);
    assert_true(json_parse_file(&j, path, &e) == -ERR_FORMAT && strstr(e.msg, path));
    unlink(path);
    assert_true(json_parse_file(&j, path, &e) == -ERR_NOTFOUND && strstr(e.msg, path));
    assert_null(j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepted),          cmocka_unit_test(exact_numbers),
        cmocka_unit_test(refused),           cmocka_unit_test(deep_nesting),
        cmocka_unit_test(getters),           cmocka_unit_test(long_numbers),
        cmocka_unit_test(mutations),         cmocka_unit_test(writer),
        cmocka_unit_test(doubles_come_back), cmocka_unit_test(files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
