/* The command line: every command and option of the tables is reachable, documented and parsed;
 * mistakes are named. */
#include "check.h"
#include "cli/options.h"

static int parse(opts *o, err *e, int n, ...)
{
    char *argv[24] = {"tare"};
    va_list ap;
    va_start(ap, n);
    for (int i = 0; i < n; i++)
        argv[i + 1] = va_arg(ap, char *);
    va_end(ap);
    return opts_parse(o, n + 1, argv, e);
}

static void every_command_has_help(void **state)
{
    (void)state;
    for (int i = 0; i < CMDI_COUNT; i++) {
        buf b = {0};
        opts o;
        err e = {0};
        assert_non_null(commands[i].run);
        opts_help(&commands[i], &b);
        assert_non_null(strstr(b.data, commands[i].doc));
        assert_non_null(strstr(b.data, "--help"));
        buf_free(&b);
        CHECK_OK(parse(&o, &e, 1, commands[i].name));
        assert_int_equal(o.cmd, i);
        opts_free(&o);
    }
}

static void the_version_is_asked_in_three_ways(void **state)
{
    (void)state;
    static char *const words[] = {"version", "--version", "-V"};
    for (int i = 0; i < 3; i++) {
        opts o;
        err e = {0};
        CHECK_OK(parse(&o, &e, 1, words[i]));
        assert_int_equal(o.cmd, CMDI_version);
        opts_free(&o);
    }
}

static void completions_name_every_command(void **state)
{
    (void)state;
    static const char *const shells[] = {"bash", "zsh", "fish"};
    for (int s = 0; s < 3; s++) {
        buf b = {0};
        opts_completions(shells[s], &b);
        for (int i = 0; i < CMDI_COUNT; i++)
            assert_non_null(strstr(b.data, commands[i].name));
        assert_non_null(strstr(b.data, "kv-cache-dtype"));
        buf_free(&b);
    }
}

static void values_aliases_and_defaults(void **state)
{
    (void)state;
    opts o;
    err e = {0};
    CHECK_OK(parse(&o, &e, 8, "serve", "M", "--max_num_seqs=3", "--context-length", "77",
                   "--gpu-memory-utilization", "0.5", "--strict"));
    assert_int_equal(o.v[OPT_max_running].i, 3);
    assert_int_equal(o.v[OPT_max_model_len].i, 77);
    assert_true(o.v[OPT_mem_fraction].f == 0.5);
    assert_true(o.v[OPT_strict].given);
    assert_int_equal(o.v[OPT_port].i, 8000);
    assert_string_equal(o.args[0], "M");
    opts_free(&o);
    CHECK_OK(parse(&o, &e, 7, "quantize", "M", "-o", "X", "--ignore", "a", "--ignore=re:b"));
    assert_int_equal(o.v[OPT_ignore].n_list, 2);
    assert_string_equal(o.v[OPT_ignore].list[1], "re:b");
    opts_free(&o);
}

static void baseline_options_are_apart(void **state)
{
    (void)state;
    opts o;
    err e = {0};
    CHECK_OK(parse(&o, &e, 7, "compare", "A", "B", "--kv-cache-dtype", "fp8",
                   "--base-kv-cache-dtype", "int8"));
    assert_string_equal(o.v[OPT_kv_cache_dtype].s, "fp8");
    assert_string_equal(o.base[OPT_kv_cache_dtype].s, "int8");
    opts_free(&o);
    CHECK_OK(parse(&o, &e, 5, "compare", "A", "B", "--kv-cache-dtype", "fp8"));
    assert_string_equal(o.base[OPT_kv_cache_dtype].s, "auto");
    opts_free(&o);
    assert_int_equal(parse(&o, &e, 4, "compare", "A", "B", "--base-limit=3"), -ERR_USAGE);
    opts_free(&o);
}

static void environment_is_read_after_the_line(void **state)
{
    (void)state;
    opts o;
    err e = {0};
    setenv("TARE_PORT", "9001", 1);
    setenv("TARE_KV_CACHE_DTYPE", "int8", 1);
    CHECK_OK(parse(&o, &e, 3, "serve", "--kv-cache-dtype", "fp4"));
    assert_int_equal(o.v[OPT_port].i, 9001);
    assert_string_equal(o.v[OPT_kv_cache_dtype].s, "fp4");
    opts_free(&o);
    unsetenv("TARE_PORT");
    unsetenv("TARE_KV_CACHE_DTYPE");
}

static void mistakes_are_named(void **state)
{
    (void)state;
    static const struct {
        char *a, *b, *c;
        const char *text;
    } rows[] = {
        {"serv", "", "", "unknown command 'serv'"},
        {"serve", "--prot", "1", "unknown option '--prot'"},
        {"serve", "--port", "x1", "'x1' is not a whole number"},
        {"serve", "--mem-fraction-static", "nan", "is not a number"},
        {"inspect", "--port", "1", "belongs to `tare serve`"},
        {"serve", "--strict=1", "", "takes no value"},
        {"serve", "M", "--port", "needs a value"},
        {"run", "M", "Hello", "'Hello' is one argument too many"},
        {"inspect", "--model=M", "N", "'N' is one argument too many"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        opts o;
        err e = {0};
        CHECK_ERR(parse(&o, &e,
                        *rows[i].c   ? 3
                        : *rows[i].b ? 2
                                     : 1,
                        rows[i].a, rows[i].b, rows[i].c),
                  ERR_USAGE, rows[i].text);
        opts_free(&o);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_command_has_help),
        cmocka_unit_test(the_version_is_asked_in_three_ways),
        cmocka_unit_test(completions_name_every_command),
        cmocka_unit_test(values_aliases_and_defaults),
        cmocka_unit_test(baseline_options_are_apart),
        cmocka_unit_test(environment_is_read_after_the_line),
        cmocka_unit_test(mistakes_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
