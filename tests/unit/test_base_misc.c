/* Errors, memory, CPU features. */
#include "check.h"
#include <errno.h>
#include <unistd.h>
#include "base/cpu.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/utf8.h"

static void error_table(void **state)
{
    (void)state;
    for (int i = 1; i < ERR_COUNT; i++) {
        assert_true(*err_name(i) && *err_text(i));
        assert_true(err_http(i) >= 400 && err_http(i) < 600);
        for (int k = 1; k < i; k++)
            assert_string_not_equal(err_name(i), err_name(k));
    }
    assert_string_equal(err_name(ERR_FORMAT), "FORMAT");
    assert_int_equal(err_http(ERR_NOTFOUND), 404);
    assert_int_equal(err_http(12345), 500); /* an unknown code is a failure, not a crash */
    assert_int_equal(err_http(-1), 500);
}

static void error_messages(void **state)
{
    (void)state;
    err e = {0};
    assert_int_equal(err_set(&e, ERR_SHAPE, "t%d is [%d]", 1, 2), -ERR_SHAPE);
    assert_int_equal(err_wrap(&e, "file.safetensors"), -ERR_SHAPE);
    assert_string_equal(e.msg, "file.safetensors: t1 is [2]");
    assert_int_equal(err_set(&e, ERR_FAIL, "again: %s", e.msg),
                     -ERR_FAIL); /* its own text as input */
    assert_string_equal(e.msg, "again: file.safetensors: t1 is [2]");
    assert_int_equal(err_set(NULL, ERR_IO, "x"), -ERR_IO);
    assert_int_equal(err_errno(&e, ENOSPC, "/out/m.bin"), -ERR_IO);
    assert_non_null(strstr(e.msg, "/out/m.bin: no space left"));
    assert_int_equal(err_errno(&e, ENOENT, "/in"), -ERR_NOTFOUND);
    assert_int_equal(err_errno(&e, ENOMEM, "map"), -ERR_NOMEM);
    assert_int_equal(err_errno(&e, EEXIST, "x"), -ERR_EXISTS);
    err_clear(&e);
    assert_true(e.code == 0 && e.msg[0] == 0);
    /* Long and broken text stays valid UTF-8 inside the buffer. */
    char text[3000];
    for (size_t i = 0; i < sizeof text - 1; i++)
        text[i] = "\xE6\x97\xA5"[i % 3];
    text[sizeof text - 1] = 0;
    for (int shift = 0; shift < 3; shift++) {
        err_set(&e, ERR_FAIL, "%.*s%s\xff", shift, "ab", text);
        assert_int_equal(utf8_valid_prefix(e.msg, strlen(e.msg)), strlen(e.msg));
        assert_true(strlen(e.msg) > 900 && strlen(e.msg) < sizeof e.msg);
        err_wrap(&e, "%s", text);
        assert_int_equal(utf8_valid_prefix(e.msg, strlen(e.msg)), strlen(e.msg));
    }
}

static void sizes_do_not_wrap(void **state)
{
    (void)state;
    err e = {0};
    size_t n;
    void *p;
    assert_true(mem_mul(SIZE_MAX / 2, 2, &n));
    assert_false(mem_mul(SIZE_MAX / 2 + 1, 2, &n));
    assert_true(mem_add(SIZE_MAX - 1, 1, &n));
    assert_false(mem_add(SIZE_MAX, 1, &n));
    CHECK_ERR(mem_alloc(&p, SIZE_MAX - 8, &e), ERR_NOMEM, "bytes could not be allocated");
    assert_null(p);
    CHECK_ERR(mem_alloc(&p, (size_t)1 << 62, &e), ERR_NOMEM, "allocated");
    CHECK_OK(mem_alloc(&p, 0, &e));
    mem_free(p);
    CHECK_OK(mem_alloc(&p, 1000, &e));
    assert_int_equal((uintptr_t)p % 64, 0);
    mem_free(p);
    CHECK_OK(mem_alloc_huge(&p, (size_t)5 << 20, &e));
    assert_int_equal((uintptr_t)p % (2 << 20), 0);
    mem_free(p);
}

static void what_is_left(void **state)
{
    (void)state;
    err e = {0};
    const char *from = NULL;
    uint64_t left = mem_available_bytes(&from);
    assert_true(left > 1 << 20 && left < (uint64_t)1 << 50);
    assert_true(from && *from);
    uint64_t before = mem_rss_anon_bytes();
    void *p;
    CHECK_OK(mem_alloc(&p, (size_t)64 << 20, &e));
    memset(p, 1, (size_t)64 << 20);
    mem_rss_sample();
    uint64_t during = mem_rss_anon_bytes();
    assert_true(during >= before + ((uint64_t)60 << 20));
    mem_free(p);
    assert_true(mem_rss_peak_bytes() + (1 << 20) >=
                during); /* the counters of the kernel lag a little */
    print_message("%.1f GB left by %s\n", (double)left / 1e9, from);
}

static void put(const char *root, const char *name, const char *text)
{
    err e = {0};
    char *path = xasprintf("%s/%s", root, name), *slash = strrchr(path, '/');
    *slash = 0;
    CHECK_OK(file_mkdirs(path, &e));
    *slash = '/';
    CHECK_OK(file_write_atomic(path, text, strlen(text), &e));
    free(path);
}

/* The smaller of the machine and the cgroup, page cache not counted as used, v1 and v2, limits of
 * parents, the words for "unlimited". Numbers in MB. */
static void limits_and_their_sources(void **state)
{
    (void)state;
#define MB      "000000"
#define V2      "sys/fs/cgroup/a/b/"
#define V1      "sys/fs/cgroup/memory/box/"
#define NO_V1   "9223372036854771712\n"
#define STAT(p) "anon 1\n" p "inactive_file 100" MB "\n" p "active_file 200" MB "\nfile 999" MB "\n"
    static const struct {
        const char *files[12]; /* name, text, ... */
        uint64_t mb;
        const char *says;
    } c[] = {
        {{"proc/self/cgroup", "0::/\n"}, 4000, "MemAvailable"},
        {{"proc/self/cgroup", "0::/a/b\n", V2 "memory.max", "600" MB "\n", V2 "memory.current",
          "350" MB "\n"},
         250,
         "cgroup v2"},
        {{"proc/self/cgroup", "0::/a/b\n", V2 "memory.max", "600" MB "\n", V2 "memory.current",
          "350" MB "\n", V2 "memory.stat", STAT("")},
         550,
         "cgroup v2"}, /* the checkpoint was read: its pages can go */
        {{"proc/self/cgroup", "0::/a/b\n", V2 "memory.max", "max\n", V2 "memory.current",
          "350" MB "\n"},
         4000,
         "MemAvailable"},
        {{"proc/self/cgroup", "0::/a/b\n", V2 "memory.max", "max\n", "sys/fs/cgroup/a/memory.max",
          "500" MB "\n", "sys/fs/cgroup/a/memory.current", "100" MB "\n"},
         400,
         "cgroup v2"}, /* the parent's limit holds too */
        {{"proc/self/cgroup", "0::/docker/of/the/host\n", "sys/fs/cgroup/memory.max", "700" MB "\n",
          "sys/fs/cgroup/memory.current", "100" MB "\n"},
         600,
         "cgroup v2"}, /* a container that sees its own group as the root */
        {{"proc/self/cgroup", "0::/a/b\n", V2 "memory.max", "100" MB "\n", V2 "memory.current",
          "350" MB "\n"},
         0,
         "cgroup v2"},
        {{"proc/self/cgroup", "5:cpu:/\n4:memory:/box\n", V1 "memory.limit_in_bytes", "900" MB "\n",
          V1 "memory.usage_in_bytes", "650" MB "\n", V1 "memory.stat", STAT("total_")},
         550,
         "cgroup v1"},
        {{"proc/self/cgroup", "4:memory:/box\n", V1 "memory.limit_in_bytes", NO_V1,
          V1 "memory.usage_in_bytes", "650" MB "\n"},
         4000,
         "MemAvailable"},
        {{"proc/self/cgroup", "0::/\n", "sys/fs/cgroup/memory.max", "90000" MB "\n",
          "sys/fs/cgroup/memory.current", "1" MB "\n"},
         4000,
         "MemAvailable"}, /* a limit above what the machine has */
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        err e = {0};
        char root[] = "/tmp/tare_limits_XXXXXX";
        const char *from;
        assert_non_null(mkdtemp(root));
        put(root, "proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 3906250 kB\n");
        for (int k = 0; k < 12 && c[i].files[k]; k += 2)
            put(root, c[i].files[k], c[i].files[k + 1]);
        uint64_t left = mem_available_under(root, &from);
        if (left != c[i].mb * 1000000 || !strstr(from, c[i].says))
            fail_msg("case %d: %llu bytes by %s", (int)i, (unsigned long long)left, from);
        CHECK_OK(file_remove_tree(root, &e));
    }
}

static void arenas(void **state)
{
    (void)state;
    arena *a = arena_make();
    uint64_t r = 3;
    unsigned char *blocks[500];
    size_t sizes[500];
    for (int i = 0; i < 500; i++) {
        r = r * 6364136223846793005u + 1442695040888963407u;
        sizes[i] = (r >> 33) % (i % 50 == 49 ? 300000 : 900);
        blocks[i] = arena_alloc(a, sizes[i]);
        assert_int_equal((uintptr_t)blocks[i] % 16, 0);
        for (size_t k = 0; k < sizes[i]; k++)
            assert_int_equal(blocks[i][k], 0);
        memset(blocks[i], i & 255, sizes[i]);
    }
    for (int i = 0; i < 500; i++) /* nobody wrote into a neighbour */
        for (size_t k = 0; k < sizes[i]; k++)
            assert_int_equal(blocks[i][k], i & 255);
    assert_string_equal(arena_strdup(a, "abc"), "abc");
    assert_string_equal(arena_strndup(a, "abcdef", 3), "abc");
    assert_string_equal(arena_printf(a, "%d-%s", 7, "x"), "7-x");
    arena_drop(a);
    arena_drop(NULL);
}

static void buffers(void **state)
{
    (void)state;
    buf b = {0};
    buf_clear(&b);
    buf_add(&b, NULL, 0);
    assert_string_equal(b.data, "");
    for (int i = 0; i < 1000; i++)
        buf_printf(&b, "%d,", i);
    buf_putc(&b, '!');
    buf_puts(&b, "end");
    assert_int_equal(b.len, 10 * 2 + 90 * 3 + 900 * 4 + 4);
    assert_int_equal(b.data[b.len], 0);
    assert_true(!strncmp(b.data, "0,1,2,", 6) && !strcmp(b.data + b.len - 5, ",!end"));
    buf_clear(&b);
    assert_string_equal(b.data, "");
    buf_free(&b);
    assert_null(b.data);
    char *s = xasprintf("%s/%d", "a", 5), *t = xstrndup(s, 1);
    assert_string_equal(s, "a/5");
    assert_string_equal(t, "a");
    free(s);
    free(t);
}

/* ---- CPU features, against what the kernel lists ------------------------------------------------
 */

static bool kernel_flag(const char *name)
{
    static char line[8192];
    FILE *f = fopen("/proc/cpuinfo", "r");
    if (!f) return false;
    bool found = false;
    char word[40];
    snprintf(word, sizeof word, " %s ", name);
    while (fgets(line, sizeof line, f)) {
        if (strncmp(line, "flags", 5)) continue;
        line[strcspn(line, "\n")] = ' ';
        found = strstr(line, word);
        break;
    }
    fclose(f);
    return found;
}

static void features_as_the_kernel_says(void **state)
{
    (void)state;
    uint32_t f = cpu_detect();
    bool avx2 =
        kernel_flag("avx2") && kernel_flag("fma") && kernel_flag("f16c") && kernel_flag("bmi2");
    bool avx512 = avx2 && kernel_flag("avx512f") && kernel_flag("avx512bw") &&
                  kernel_flag("avx512dq") && kernel_flag("avx512vl");
    assert_int_equal(!!(f & CPU_AVX2), avx2);
    assert_int_equal(!!(f & CPU_AVX512), avx512);
    assert_int_equal(!!(f & CPU_AVX_VNNI), avx2 && kernel_flag("avx_vnni"));
    assert_int_equal(!!(f & CPU_AVX512_VNNI), avx512 && kernel_flag("avx512_vnni"));
    assert_int_equal(!!(f & CPU_AVX512_VBMI), avx512 && kernel_flag("avx512vbmi"));
    assert_int_equal(!!(f & CPU_AVX512_BF16), avx512 && kernel_flag("avx512_bf16"));
    assert_int_equal(!!(f & CPU_AVX512_FP16), avx512 && kernel_flag("avx512_fp16"));
    if (f & CPU_AMX_INT8) assert_true(kernel_flag("amx_int8"));
    if (f & CPU_AMX_BF16) assert_true(kernel_flag("amx_bf16"));
    char text[256], tiny[4];
    cpu_format(f, text, sizeof text);
    print_message("%s: %s\n", cpu_model_name(), text);
    cpu_format(f, tiny, sizeof tiny);
    assert_true(strlen(tiny) < sizeof tiny);
    cpu_format(0, text, sizeof text);
    assert_string_equal(text, "portable");
}

static void feature_words(void **state)
{
    (void)state;
    err e = {0};
    uint32_t f = 99, all = cpu_detect();
    CHECK_OK(cpu_parse("auto", &f, &e));
    assert_int_equal(f, all);
    CHECK_OK(cpu_parse("portable", &f, &e));
    assert_int_equal(f, 0);
    CHECK_OK(cpu_parse("auto,-avx2", &f, &e)); /* everything needs avx2 */
    assert_int_equal(f, 0);
    CHECK_OK(cpu_parse("auto,-avx512", &f, &e));
    assert_int_equal(f, all & (CPU_AVX2 | CPU_AVX_VNNI));
    CHECK_OK(cpu_parse("auto,-amx_int8,-avx512_vnni", &f, &e));
    assert_int_equal(f, all & ~(uint32_t)(CPU_AMX_INT8 | CPU_AVX512_VNNI));
    if (all & CPU_AVX2) {
        CHECK_OK(cpu_parse("avx2", &f, &e));
        assert_int_equal(f, all & (CPU_AVX2 | CPU_AVX_VNNI));
    } else {
        CHECK_ERR(cpu_parse("avx2", &f, &e), ERR_UNSUPPORTED, "avx2");
    }
    if (!(all & (CPU_AMX_INT8 | CPU_AMX_BF16)))
        CHECK_ERR(cpu_parse("amx", &f, &e), ERR_UNSUPPORTED, "does not have amx");
    CHECK_ERR(cpu_parse("", &f, &e), ERR_USAGE, "empty");
    CHECK_ERR(cpu_parse("auto,-nothing", &f, &e), ERR_USAGE, "-nothing");
    CHECK_ERR(cpu_parse("sse9", &f, &e), ERR_USAGE, "sse9");
    CHECK_ERR(cpu_parse("auto,,avx2", &f, &e), ERR_USAGE, "unknown word ''");
}

static void progress_is_silent_when_quiet(void **state)
{
    (void)state;
    progress p;
    int old = log_level();
    log_set_level(LOG_ERROR);
    progress_start(&p, "work", 0); /* a total of 0 must not divide */
    p.last_s -= 100;
    progress_step(&p, 5, NULL);
    assert_false(p.shown);
    progress_end(&p);
    log_set_level(old);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(error_table),
        cmocka_unit_test(error_messages),
        cmocka_unit_test(sizes_do_not_wrap),
        cmocka_unit_test(what_is_left),
        cmocka_unit_test(limits_and_their_sources),
        cmocka_unit_test(arenas),
        cmocka_unit_test(buffers),
        cmocka_unit_test(features_as_the_kernel_says),
        cmocka_unit_test(feature_words),
        cmocka_unit_test(progress_is_silent_when_quiet),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
