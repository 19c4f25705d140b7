/* Number grading, answer parts, code blocks. */
#include "check.h"
#include "eval/grade.h"

typedef struct row {
    const char *text, *reference;
    bool correct, unparsed;
} row;

static void run(const row *rows, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        grade g;
        grade_generate(rows[i].text, strlen(rows[i].text), rows[i].reference, &g);
        if (g.correct != rows[i].correct || g.unparsed != rows[i].unparsed)
            fail_msg("'%s' against '%s': correct %d unparsed %d answer '%s'", rows[i].text,
                     rows[i].reference, g.correct, g.unparsed, g.answer);
    }
}

static void test_numbers(void **state)
{
    (void)state;
    static const row rows[] = {
        {"$29.00.", "29", true, false},
        {"She pays $29.00.", "29", true, false},
        {"72, in total, so yes", "72", true, false},
        {"\\$70,000", "70000", true, false},
        {"**-5**", "-5", true, false},
        {"**-5**",
         "\xE2\x88\x92"
         "5",
         true, false},
        {"the change is \xE2\x88\x92"
         "5 degrees",
         "-5", true, false},
        {"-$5", "-5", true, false},
        {"$-5", "-5", true, false},
        {"#### 29 dollars", "29", true, false},
        {"#### 29 dollars, 30 cents", "29", true, false},
        {"none", "29", false, true},
        {"", "29", false, true},
        {",", "29", false, true},
        {"a, b, and c.", "29", false, true},
        {".", "0", false, true},
        {"$", "0", false, true},
        {"1,234", "1234", true, false},
        {"1,234", "1", false, false},
        {"1,234", "234", false, false},
        {"1,234,567.50", "1234567.5", true, false},
        {"12,34", "34", true, false}, /* no group of three: two numbers */
        {"1,2345", "2345", true, false},
        {"0.5", "0.5", true, false},
        {".5", "0.5", true, false},
        {"0.50", "0.5", true, false},
        {"1/2 is 0.5.", "0.5", true, false},
        {"00029", "29", true, false},
        {"-0", "0", true, false},
        {"10-5", "5", true, false}, /* not minus five */
        {"10-5", "-5", false, false},
        {"(-5)", "-5", true, false},
        {"29", "29.0", true, false},
        {"29.5", "29", false, false},
        {"#### 1,201", "2 + 3 = 5.\n#### 1201", true, false},
        {"25 * 4 = 100.\n#### 100\nQuestion", "#### 100", true, false},
        {"#### 5\n#### 6", "5", true, false}, /* the first mark counts */
        {"#### 5\n#### 6", "6", false, false},
        {"7 apples\n####", "7", false, true}, /* a mark without a number is no answer */
        {"123456789012345678901234567890", "123456789012345678901234567891", false, false},
        {"\xE7\xAD\x94\xE6\xA1\x88\xE6\x98\xAF-5\xE3\x80\x82", "-5", true, false},
        {"14 + 27 = 41\xE3\x80\x82\n#### 41", "14 + 27 = 41\xE3\x80\x82\n#### 41", true, false},
    };
    run(rows, sizeof rows / sizeof *rows);
}

static void test_words(void **state)
{
    (void)state;
    static const row rows[] = {
        {" Paris ", "Paris", true, false},
        {"Paris.", "Paris", true, false},
        {"paris", "Paris", false, false},
        {"", "Paris", false, true},
        {"I think\n#### Paris", "Paris", true, false},
        {"12:30", "12:30", true, false}, /* two numbers are no number */
        {"3 apples", "3 apples", true, false},
    };
    run(rows, sizeof rows / sizeof *rows);
}

static void test_code_block(void **state)
{
    (void)state;
    static const struct {
        const char *text, *want;
    } rows[] = {
        {"def f(x):\n    return x", "def f(x):\n    return x"},
        {"Sure:\n```python\ndef f(x):\n    return x\n```\nDone.", "def f(x):\n    return x\n"},
        {"```\nx = 1\n", "x = 1\n"},
        {"```", ""},
        {"```python", ""},
        {"x = 1\n[DONE]\nmore", "x = 1\n"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        buf b = {0};
        buf_puts(&b, "");
        grade_code_block(rows[i].text, strlen(rows[i].text), &b);
        assert_string_equal(b.data, rows[i].want);
        buf_free(&b);
    }
}

/* Whatever the bytes, nothing outside them is read (run under ASan) and a number is canonical. */
static void test_any_bytes(void **state)
{
    (void)state;
    static const char alphabet[] = "0123456789,.-$#\\* \nax\xE2\x88\x92\xC2";
    uint32_t seed = 1;
    for (int round = 0; round < 20000; round++) {
        char *s = malloc(24);
        size_t n = 0;
        for (; n < 24; n++) {
            seed = seed * 1664525u + 1013904223u;
            if ((seed >> 16) % 25 == 0) break;
            s[n] = alphabet[(seed >> 8) % (sizeof alphabet - 1)];
        }
        char *exact = malloc(n ? n : 1);
        memcpy(exact, s, n);
        grade g;
        grade_generate(exact, n, "29", &g);
        assert_false(g.correct && g.unparsed);
        if (!g.unparsed) assert_true(strspn(g.answer, "0123456789.-") == strlen(g.answer));
        free(exact);
        free(s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_code_block),
        cmocka_unit_test(test_any_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
