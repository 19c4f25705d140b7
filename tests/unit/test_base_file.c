/* Files: an output is there whole or not at all, also on a full disk, at a size limit, and when the
 * process is killed while it writes. */
#include "check.h"
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/file.h"

static char dir[64];

static int setup(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/tare-file-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    err e = {0};
    return file_remove_tree(dir, &e);
}

static size_t count(const char *d)
{
    err e = {0};
    char **names;
    size_t n;
    CHECK_OK(file_list(d, &names, &n, &e));
    file_list_free(names, n);
    return n;
}

static void check_content(const char *path, const char *want)
{
    err e = {0};
    buf b = {0};
    CHECK_OK(file_read_all(&b, path, 1 << 20, &e));
    assert_string_equal(b.data, want);
    buf_free(&b);
}

static void write_and_read(void **state)
{
    (void)state;
    err e = {0};
    char *p = file_join(dir, "a.txt"), *q = file_join(dir, "b.txt");
    CHECK_OK(file_write_atomic(p, "old", 3, &e));
    file_out *f;
    CHECK_OK(file_out_open(&f, p, &e));
    CHECK_OK(file_out_write(f, "????", 4, &e));
    CHECK_OK(file_out_write(f, "tail", 4, &e));
    CHECK_OK(file_out_pwrite(f, 0, "head", 4, &e));
    assert_int_equal(file_out_pos(f), 8);
    check_content(p, "old"); /* not there before the commit */
    CHECK_OK(file_out_commit(&f, &e));
    assert_null(f);
    check_content(p, "headtail");
    CHECK_OK(file_out_open(&f, p, &e));
    CHECK_OK(file_out_write(f, "x", 1, &e));
    file_out_abort(&f);
    file_out_abort(&f); /* NULL is fine */
    check_content(p, "headtail");
    CHECK_OK(file_copy_atomic(p, q, &e));
    check_content(q, "headtail");
    assert_int_equal(count(dir), 2);
    uint64_t size = 0;
    CHECK_OK(file_size(p, &size, &e));
    assert_int_equal(size, 8);
    buf b = {0};
    CHECK_ERR(file_read_all(&b, p, 7, &e), ERR_LIMIT, "larger than 7 bytes");
    buf_free(&b);
    CHECK_OK(file_write_atomic(q, "", 0, &e));
    file_map m;
    CHECK_OK(file_map_open(&m, q, &e));
    assert_int_equal(m.size, 0);
    file_map_close(&m);
    CHECK_OK(file_map_open(&m, p, &e));
    assert_memory_equal(m.data, "headtail", 8);
    file_map_dontneed(&m, 0, 8);
    file_map_dontneed(&m, 1 << 30, SIZE_MAX);
    assert_memory_equal(m.data, "headtail", 8);
    file_map_close(&m);
    free(p);
    free(q);
}

static void errors_name_the_path(void **state)
{
    (void)state;
    err e = {0};
    file_map m;
    buf b = {0};
    file_out *f;
    char hex[65], **names;
    size_t n;
    CHECK_ERR(file_map_open(&m, "/nowhere/x.bin", &e), ERR_NOTFOUND, "/nowhere/x.bin");
    CHECK_ERR(file_map_open(&m, dir, &e), ERR_FORMAT, "not a regular file");
    CHECK_ERR(file_read_all(&b, dir, 10, &e), ERR_FORMAT, "folder");
    CHECK_ERR(file_out_open(&f, "/nowhere/x.bin", &e), ERR_NOTFOUND, "/nowhere/x.bin");
    CHECK_ERR(file_sha256("/nowhere", hex, &e), ERR_NOTFOUND, "/nowhere");
    CHECK_ERR(file_list("/nowhere", &names, &n, &e), ERR_NOTFOUND, "/nowhere");
    CHECK_ERR(file_mkdirs("", &e), ERR_USAGE, "empty");
    char *p = file_join(dir, "plain"), *q = file_join(p, "sub");
    CHECK_OK(file_write_atomic(p, "x", 1, &e));
    assert_true(file_mkdirs(q, &e) < 0 && strstr(e.msg, p));
    assert_false(file_exists(q));
    buf_free(&b);
    free(p);
    free(q);
}

static void folders(void **state)
{
    (void)state;
    err e = {0};
    char *deep = file_join(dir, "x/y//z/");
    CHECK_OK(file_mkdirs(deep, &e));
    CHECK_OK(file_mkdirs(deep, &e));
    assert_true(file_is_dir(deep));
    char *top = file_join(dir, "x"), *link = file_join(deep, "link"),
         *kept = file_join(dir, "kept");
    CHECK_OK(file_write_atomic(kept, "k", 1, &e));
    assert_int_equal(symlink(dir, link), 0); /* must be removed, not followed */
    CHECK_OK(file_remove_tree(top, &e));
    assert_false(file_exists(top));
    check_content(kept, "k");
    CHECK_OK(file_remove_tree(top, &e)); /* nothing there: done */
    for (int i = 0; i < 40; i++) {
        char name[8];
        snprintf(name, sizeof name, "%c%d", 'z' - i % 26, i);
        char *p = file_join(dir, name);
        CHECK_OK(file_write_atomic(p, "", 0, &e));
        free(p);
    }
    char **names;
    size_t n;
    CHECK_OK(file_list(dir, &names, &n, &e));
    assert_int_equal(n, 41);
    for (size_t i = 1; i < n; i++)
        assert_true(strcmp(names[i - 1], names[i]) < 0);
    file_list_free(names, n);
    assert_string_equal(file_basename("/a/b.c"), "b.c");
    assert_string_equal(file_basename("b.c"), "b.c");
    assert_true(file_free_bytes(dir) > 0);
    free(deep);
    free(top);
    free(link);
    free(kept);
}

static void sha256_vectors(void **state)
{
    (void)state;
    err e = {0};
    char hex[65], *p = file_join(dir, "h");
    CHECK_OK(file_write_atomic(p, "abc", 3, &e)); /* FIPS 180-2 */
    CHECK_OK(file_sha256(p, hex, &e));
    assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK_OK(file_write_atomic(p, "", 0, &e));
    CHECK_OK(file_sha256(p, hex, &e));
    assert_string_equal(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    free(p);
}

/* Writes 1 MiB over `path`; the old content must stay and no temporary may be left. */
static void check_failed_write(const char *path, const char *d, const char *says)
{
    err e = {0};
    static char data[1 << 20];
    int rc = file_write_atomic(path, data, sizeof data, &e);
    if (rc != -ERR_IO || !strstr(e.msg, says) || !strstr(e.msg, path))
        fail_msg("rc %d, message '%s' lacks '%s'", rc, e.msg, says);
    check_content(path, "old");
    assert_int_equal(count(d), 1);
}

static void size_limit(void **state)
{
    (void)state;
    err e = {0};
    char *p = file_join(dir, "f");
    CHECK_OK(file_write_atomic(p, "old", 3, &e));
    struct rlimit old, low;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    low = old;
    low.rlim_cur = 100000;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    check_failed_write(p, dir, "too large");
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, handler);
    free(p);
}

/* In a child with a mount namespace of its own: 1 = checked, 2 = no permission to mount. */
static int full_disk_child(void)
{
    if (unshare(CLONE_NEWNS) < 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0) return 2;
    mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL);
    if (mount("tmpfs", dir, "tmpfs", 0, "size=256k") < 0) return 2;
    err e = {0};
    char *p = file_join(dir, "f");
    static char data[1 << 20];
    if (file_write_atomic(p, "old", 3, &e) < 0) return 3;
    if (file_write_atomic(p, data, sizeof data, &e) != -ERR_IO) return 4;
    if (!strstr(e.msg, "no space left") || !strstr(e.msg, "free some") || !strstr(e.msg, p))
        return 5;
    char **names;
    size_t n;
    if (file_list(dir, &names, &n, &e) < 0 || n != 1) return 6;
    file_list_free(names, n);
    buf b = {0};
    if (file_read_all(&b, p, 100, &e) < 0 || strcmp(b.data, "old")) return 7;
    buf_free(&b);
    free(p);
    return 1;
}

static void full_disk(void **state)
{
    (void)state;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) _exit(full_disk_child());
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 2) skip();
    assert_int_equal(WEXITSTATUS(status), 1);
}

static void killed_while_writing(void **state)
{
    (void)state;
    err e = {0};
    char *p = file_join(dir, "f");
    CHECK_OK(file_write_atomic(p, "old", 3, &e));
    for (int i = 0; i < 5; i++) {
        int started[2];
        assert_int_equal(pipe(started), 0);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            static char data[65536];
            file_out *f;
            err e2;
            if (file_out_open(&f, p, &e2) < 0) _exit(1);
            for (int k = 0; k < 1000000; k++) {
                if (file_out_pwrite(f, (uint64_t)(k % 16) * sizeof data, data, sizeof data, &e2) <
                    0)
                    _exit(1);
                if (k == 3 + i && write(started[1], "x", 1) != 1) _exit(1);
            }
            _exit(2);
        }
        char c;
        assert_int_equal(read(started[0], &c, 1), 1);
        kill(pid, SIGKILL);
        int status;
        waitpid(pid, &status, 0);
        assert_true(WIFSIGNALED(status));
        check_content(p, "old");
        close(started[0]);
        close(started[1]);
    }
    free(p);
}

#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(write_and_read), T(errors_name_the_path), T(folders), T(sha256_vectors), T(size_limit),
        T(full_disk),      T(killed_while_writing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
