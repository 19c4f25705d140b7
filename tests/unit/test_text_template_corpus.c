/* What the fuzzer of chat templates found worth keeping runs through its own target again. */
#include "check.h"
#include "base/file.h"
#include "../fuzz/fuzz_template.c"

static void test_corpus(void **unused)
{
    static const char dir[] = "tests/fuzz/corpus/fuzz_template";
    char **names = NULL;
    size_t n = 0;
    err e = {0};
    (void)unused;
    CHECK_OK(file_list(dir, &names, &n, &e));
    for (size_t i = 0; i < n; i++) {
        buf b = {0};
        char *path = file_join(dir, names[i]);
        CHECK_OK(file_read_all(&b, path, 1 << 20, &e));
        uint8_t *copy = xmalloc(b.len ? b.len : 1); /* exactly its bytes, for the sanitizers */
        if (b.len) memcpy(copy, b.data, b.len);
        assert_int_equal(LLVMFuzzerTestOneInput(copy, b.len), 0);
        free(copy);
        free(path);
        buf_free(&b);
    }
    assert_true(n > 150);
    file_list_free(names, n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_corpus)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
