/* Programs that a model might write: right, wrong, endless, greedy, nosy. */
#include "check.h"
#include <time.h>
#include <unistd.h>
#include "eval/sandbox.h"

static sandbox *box;

static int open_box(void **state)
{
    (void)state;
    err e = {0};
    if (sandbox_open(&box, 2, &e) < 0) print_message("no sandbox: %s\n", e.msg);
    return 0;
}
static int close_box(void **state)
{
    (void)state;
    sandbox_close(box);
    return 0;
}

static sandbox_result run(const char *program, const char *data)
{
    err e = {0};
    sandbox_result r;
    if (!box) skip();
    CHECK_OK(sandbox_run(box, program, strlen(program), data, &r, &e));
    return r;
}

static void test_pass_and_fail(void **state)
{
    (void)state;
    assert_true(run("assert 1 + 1 == 2", NULL).passed);
    assert_true(
        run("import json; assert json.load(open('tests.json')) == [[2, 8]]", "[[2,8]]").passed);
    sandbox_result r = run("assert 1 + 1 == 3, 'wrong sum'", NULL);
    assert_false(r.passed);
    assert_non_null(strstr(r.detail, "wrong sum"));
    assert_non_null(strstr(run("def f(:\n", NULL).detail, "SyntaxError"));
    assert_false(run("\xff", NULL).passed);
}

static void test_leaving_early_is_not_passing(void **state)
{
    (void)state;
    assert_false(run("import sys; sys.exit(0)", NULL).passed);
    assert_false(run("import os; os._exit(0)", NULL).passed);
    assert_false(run("print('passed')\nraise SystemExit", NULL).passed);
}

static void test_time_limit(void **state)
{
    (void)state;
    time_t before = time(NULL);
    sandbox_result r = run("while True: pass", NULL);
    assert_true(r.timed_out && !r.passed);
    r = run("import time; time.sleep(60)", NULL);
    assert_true(r.timed_out && !r.passed);
    r = run("import os; os.close(1); os.close(2)\nwhile True: pass", NULL); /* pipe closed early */
    assert_true(r.timed_out && !r.passed);
    assert_true(time(NULL) - before < 20);
}

static void test_limits(void **state)
{
    (void)state;
    assert_false(run("x = bytearray(3 << 30)", NULL).passed);
    assert_false(run("open('big', 'wb').write(b'x' * (5 << 20))", NULL).passed);
    assert_false(run("while True: print('x' * 1000)", NULL).passed);
}

static void test_no_network_no_processes(void **state)
{
    (void)state;
    if (!box) skip();
    assert_true(sandbox_offline(box));
    assert_false(run("import socket; socket.socket()", NULL).passed);
    assert_false(run("import os; os.fork()", NULL).passed);
    assert_false(run("import subprocess; subprocess.run(['true'])", NULL).passed);
    assert_false(run("import os; os.kill(os.getppid(), 9)", NULL).passed);
    assert_false(run("import os; os.posix_spawn('/bin/true', ['true'], {})", NULL).passed);
}

static void test_traces(void **state)
{
    (void)state;
    assert_true(run("open('left', 'w').write('x')", NULL).passed);
    assert_false(run("open('left').read()", NULL).passed); /* each program has a fresh folder */
    assert_true(run("import os; assert set(os.environ) <= {'PATH', 'HOME', 'LANG', 'LC_CTYPE', "
                    "'PYTHONIOENCODING'}",
                    NULL)
                    .passed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pass_and_fail),
        cmocka_unit_test(test_leaving_early_is_not_passing),
        cmocka_unit_test(test_time_limit),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_no_network_no_processes),
        cmocka_unit_test(test_traces),
    };
    return cmocka_run_group_tests(tests, open_box, close_box);
}
