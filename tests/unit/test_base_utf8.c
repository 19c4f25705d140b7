/* UTF-8 against Python's decoder (tests/fixtures/base/utf8.bin) and against all code points. */
#include "check.h"
#include "base/file.h"
#include "base/utf8.h"

static void lossy_as_python(void **state)
{
    (void)state;
    err e = {0};
    buf b = {0};
    CHECK_OK(file_read_all(&b, "tests/fixtures/base/utf8.bin", 1 << 20, &e));
    size_t at = 0;
    int n_cases = 0;
    while (at < b.len) {
        size_t n = (uint8_t)b.data[at++];
        char *s = xmalloc(n); /* exact size for the sanitizers */
        memcpy(s, b.data + at, n);
        at += n;
        size_t m = (size_t)(uint8_t)b.data[at] | (size_t)(uint8_t)b.data[at + 1] << 8;
        const char *want = b.data + at + 2;
        at += 2 + m;
        assert_true(at <= b.len);
        buf got = {0};
        utf8_add_lossy(&got, s, n);
        if (got.len != m || memcmp(got.data ? got.data : "", want, m))
            fail_msg("case %d: '%s', Python has '%.*s'", n_cases, got.data, (int)m, want);
        bool valid = n == m && !memcmp(s, want, n);
        assert_true((utf8_valid_prefix(s, n) == n) == valid);
        assert_true(utf8_valid_prefix(want, m) == m);
        /* Held-back bytes: the complete prefix and later bytes never invent a replacement. */
        size_t keep = utf8_complete_prefix(s, n);
        assert_true(keep <= n && n - keep <= 3);
        if (valid) assert_true(keep == n);
        buf_free(&got);
        free(s);
        n_cases++;
    }
    print_message("%d strings\n", n_cases);
    assert_true(n_cases > 4000);
    buf_free(&b);
}

static void all_code_points(void **state)
{
    (void)state;
    for (uint32_t cp = 0; cp <= 0x110010; cp++) {
        char s[4];
        uint32_t back = 0;
        int n = utf8_encode(cp, s);
        bool real = cp <= 0x10FFFF && (cp < 0xD800 || cp > 0xDFFF);
        assert_int_equal(utf8_decode(s, (size_t)n, &back), n);
        assert_int_equal(back, real ? cp : 0xFFFD);
        for (int k = 0; k < n; k++)
            assert_int_equal(utf8_decode(s, (size_t)k, &back), 0);
        for (size_t k = 1; real && k < (size_t)n; k++) /* a cut sequence is held back whole */
            assert_int_equal(utf8_complete_prefix(s, k), 0);
    }
}

/* Feeding a text byte by byte: what complete_prefix lets through is the text, in whole characters.
 */
static void streaming(void **state)
{
    (void)state;
    const char *text = "a\xC3\xA9\xE6\x97\xA5\xF0\x9F\xA6\x8A"
                       "b\xF4\x8F\xBF\xBF";
    size_t n = strlen(text), start = 0;
    buf out = {0};
    for (size_t i = 1; i <= n; i++) {
        size_t k = utf8_complete_prefix(text + start, i - start);
        assert_int_equal(utf8_valid_prefix(text + start, k), k);
        buf_add(&out, text + start, k);
        start += k;
    }
    assert_string_equal(out.data, text);
    buf_free(&out);
    assert_int_equal(utf8_complete_prefix("a\xFF", 2), 2); /* never valid: not held back */
    assert_int_equal(utf8_complete_prefix("a\x80", 2), 2);
    assert_int_equal(utf8_complete_prefix("", 0), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lossy_as_python),
        cmocka_unit_test(all_code_points),
        cmocka_unit_test(streaming),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
