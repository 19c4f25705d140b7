/* The fuzzer's corpus, replayed: what it found once stays mended. */
#include "check.h"
#include <dirent.h>
#include "../fuzz/fuzz_tokenizer.c"
#include "base/file.h"

static void replay(void **state)
{
    (void)state;
    static const char dir[] = "tests/fuzz/corpus/fuzz_tokenizer";
    err e = {0};
    size_t n = 0;
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *f; (f = readdir(d));) {
        if (f->d_name[0] == '.') continue;
        buf b = {0};
        char *path = file_join(dir, f->d_name);
        CHECK_OK(file_read_all(&b, path, 1u << 20, &e));
        LLVMFuzzerTestOneInput((const uint8_t *)b.data, b.len);
        buf_free(&b);
        free(path);
        n++;
    }
    closedir(d);
    assert_true(n >= 25);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(replay)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
