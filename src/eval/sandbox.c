/* Programs that a model wrote are run by python3 in a child that can do little harm:
 *
 *   time        RLIMIT_CPU, and a wall clock after which the whole process group is killed
 *   memory      RLIMIT_AS 1 GiB; files 1 MiB each, 32 open; no core dump
 *   network     a network namespace of its own where the kernel permits one, and a seccomp filter
 *               that refuses socket() and io_uring always
 *   processes   the filter refuses fork, vfork, clone of anything but a thread, kill, ptrace, mount
 * …; RLIMIT_NPROC besides files       Landlock: nothing outside the temporary folder may be
 * written, created or removed environment empty but for PATH and HOME; python -I -B
 *
 * Not every kernel grants all of it, so sandbox_open probes from inside and sandbox_limits says
 * what holds. A program passes when it prints, as its last line, a random word that only the line
 * after its last assertion knows: leaving early with status 0 is not passing.
 *
 * Between fork and exec the child makes system calls only: the parent has threads. */
#include "eval/sandbox.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/file.h"
#include "base/log.h"
#include "base/thread.h"

#define OUTPUT_MAX   65536
#define MEMORY_BYTES (1ull << 30)
#define FILE_BYTES   (1ull << 20)

struct sandbox {
    char *python, *dir;
    double seconds;
    int landlock_fd;
    struct sock_fprog filter;
    bool offline;
    char limits[192];
};

/* ---- the filter
 * -------------------------------------------------------------------------------------------- */

static const int refused_calls[] = {
    __NR_socket,
    __NR_fork,
    __NR_vfork,
    __NR_kill,
    __NR_tkill,
    __NR_ptrace,
    __NR_mount,
    __NR_umount2,
    __NR_reboot,
    __NR_setns,
    __NR_unshare,
    __NR_process_vm_writev,
    __NR_bpf,
    __NR_keyctl,
    __NR_init_module,
    __NR_finit_module,
    __NR_delete_module,
    __NR_kexec_load,
    __NR_swapon,
    __NR_swapoff,
    __NR_io_uring_setup,
    __NR_pidfd_send_signal,
    __NR_pivot_root,
    __NR_chroot,
    __NR_perf_event_open,
    __NR_userfaultfd,
    __NR_pidfd_open,
    __NR_settimeofday,
    __NR_clock_settime,
    __NR_sethostname,
    __NR_acct,
    __NR_shmget,
};
enum { N_REFUSED = sizeof refused_calls / sizeof *refused_calls, N_FILTER = 2 * N_REFUSED + 16 };

static void build_filter(struct sock_fprog *out)
{
    struct sock_filter *f = xcalloc(N_FILTER, sizeof *f);
    int n = 0;
    const uint32_t deny = SECCOMP_RET_ERRNO | EPERM;
    f[n++] =
        (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
    f[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0);
    f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    f[n++] =
        (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    f[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1); /* x32 */
    f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, deny);
    for (int i = 0; i < N_REFUSED; i++) {
        f[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)refused_calls[i],
                                              0, 1);
        f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, deny);
    }
    /* clone3 hides its flags in memory; ENOSYS makes libc use clone, whose flags are visible. */
    f[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_clone3, 0, 1);
    f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS);
    f[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_clone, 0, 3);
    f[n++] =
        (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args));
    f[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_THREAD, 1, 0);
    f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, deny);
    f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    *out = (struct sock_fprog){.len = (unsigned short)n, .filter = f};
}

/* ---- Landlock: writes only below the temporary folder
 * ------------------------------------------------------- */

static int landlock_ruleset(const char *dir)
{
    const uint64_t writes = LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_REMOVE_DIR |
                            LANDLOCK_ACCESS_FS_REMOVE_FILE | LANDLOCK_ACCESS_FS_MAKE_CHAR |
                            LANDLOCK_ACCESS_FS_MAKE_DIR | LANDLOCK_ACCESS_FS_MAKE_REG |
                            LANDLOCK_ACCESS_FS_MAKE_SOCK | LANDLOCK_ACCESS_FS_MAKE_FIFO |
                            LANDLOCK_ACCESS_FS_MAKE_BLOCK | LANDLOCK_ACCESS_FS_MAKE_SYM;
    struct landlock_ruleset_attr attr = {.handled_access_fs = writes};
    int fd = (int)syscall(SYS_landlock_create_ruleset, &attr, sizeof attr, 0);
    if (fd < 0) return -1;
    struct landlock_path_beneath_attr below = {.allowed_access = writes};
    below.parent_fd = open(dir, O_PATH | O_CLOEXEC);
    if (below.parent_fd < 0 ||
        syscall(SYS_landlock_add_rule, fd, LANDLOCK_RULE_PATH_BENEATH, &below, 0) < 0) {
        if (below.parent_fd >= 0) close(below.parent_fd);
        close(fd);
        return -1;
    }
    close(below.parent_fd);
    return fd;
}

/* ---- the child
 * ------------------------------------------------------------------------------------------------
 */

static void limit(int which, rlim_t value)
{
    struct rlimit r = {value, value};
    setrlimit((__rlimit_resource_t)which, &r);
}

static void child(const sandbox *s, int in, int out, char *const argv[], char *const envp[])
{
    setpgid(0, 0);
    if (chdir(s->dir) < 0) _exit(126);
    dup2(in, 0);
    dup2(out, 1);
    dup2(out, 2);
    int landlock = s->landlock_fd;
    if (landlock >= 0 && landlock != 3) {
        dup2(landlock, 3);
        landlock = 3;
    }
    syscall(SYS_close_range, landlock >= 0 ? 4u : 3u, ~0u, 0u);
    limit(RLIMIT_CPU, (rlim_t)(s->seconds + 1));
    limit(RLIMIT_AS, MEMORY_BYTES);
    limit(RLIMIT_FSIZE, FILE_BYTES);
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_NOFILE, 32);
    if (unshare(CLONE_NEWNET) < 0) unshare(CLONE_NEWUSER | CLONE_NEWNET);
    limit(RLIMIT_NPROC, 1);
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (landlock >= 0) {
        syscall(SYS_landlock_restrict_self, landlock, 0);
        close(landlock);
    }
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &s->filter, 0, 0);
    execve(argv[0], argv, envp);
    _exit(127);
}

/* ---- the parent
 * ------------------------------------------------------------------------------------------------
 */

static int make_pipe(int fd[2], err *e)
{
    return pipe2(fd, O_CLOEXEC) == 0 ? 0 : err_errno(e, errno, "cannot make a pipe for python3");
}

/* Keeps the last OUTPUT_MAX bytes. Returns false when the time is up before the pipe closes. */
static bool collect(int fd, double deadline, buf *out)
{
    char chunk[4096];
    for (;;) {
        double left = deadline - clock_seconds();
        struct pollfd p = {.fd = fd, .events = POLLIN};
        int ready = left > 0 ? poll(&p, 1, (int)(left * 1000) + 1) : 0;
        if (ready < 0 && errno == EINTR) continue;
        if (ready <= 0) return false;
        ssize_t n = read(fd, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return true;
        buf_add(out, chunk, (size_t)n);
        if (out->len > 2 * OUTPUT_MAX) {
            memmove(out->data, out->data + (out->len - OUTPUT_MAX), OUTPUT_MAX + 1);
            out->len = OUTPUT_MAX;
        }
    }
}

static int reap(pid_t pid, double deadline, bool *late)
{
    int status = 0;
    for (;;) {
        pid_t got = waitpid(pid, &status, WNOHANG);
        if (got == pid) return status;
        if (got < 0 && errno != EINTR) return -1;
        if (clock_seconds() > deadline) break;
        poll(NULL, 0, 2);
    }
    *late = true;
    kill(-pid, SIGKILL);
    kill(pid, SIGKILL);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return status;
}

static void last_line(const buf *out, char *to, size_t cap)
{
    size_t end = out->len;
    while (end && (out->data[end - 1] == '\n' || out->data[end - 1] == '\r'))
        end--;
    size_t begin = end;
    while (begin && out->data[begin - 1] != '\n')
        begin--;
    size_t n = end - begin < cap - 1 ? end - begin : cap - 1;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)out->data[begin + i];
        to[i] = c >= 32 && c < 127 ? (char)c : '?';
    }
    to[n] = 0;
}

/* Runs python with these arguments; fills out and the status. */
static int spawn(sandbox *s, const char *script, buf *out, int *status, bool *late, err *e)
{
    int fd[2] = {-1, -1}, rc = 0;
    char home[512];
    char *argv[] = {s->python, "-I", "-B", (char *)script, NULL};
    snprintf(home, sizeof home, "HOME=%s", s->dir);
    char *envp[] = {"PATH=/usr/bin:/bin", home, "LANG=C.UTF-8", "PYTHONIOENCODING=utf-8", NULL};
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0) return err_errno(e, errno, "/dev/null: cannot open");
    TRY(make_pipe(fd, e));
    double deadline = clock_seconds() + s->seconds;
    pid_t pid = fork();
    if (pid == 0) child(s, null, fd[1], argv, envp);
    if (pid < 0) {
        rc = err_errno(e, errno, "cannot start python3");
        goto out;
    }
    setpgid(pid, pid);
    close(fd[1]);
    fd[1] = -1;
    *late = !collect(fd[0], deadline, out);
    if (*late) {
        kill(-pid, SIGKILL);
        kill(pid, SIGKILL);
    }
    bool also_late = false;
    *status = reap(pid, *late ? deadline + 5 : deadline, &also_late);
    *late = *late || also_late;
    rc = 0;
out:
    if (fd[0] >= 0) close(fd[0]);
    if (fd[1] >= 0) close(fd[1]);
    close(null);
    return rc;
}

static int write_file(const sandbox *s, const char *name, const char *data, size_t n, err *e)
{
    char *path = file_join(s->dir, name);
    int rc = 0;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) {
        rc = err_errno(e, errno, "%s: cannot write", path);
    } else {
        while (n && rc == 0) {
            ssize_t k = write(fd, data, n);
            if (k < 0 && errno == EINTR) continue;
            if (k < 0) {
                rc = err_errno(e, errno, "%s: cannot write", path);
                break;
            }
            data += k;
            n -= (size_t)k;
        }
        close(fd);
    }
    free(path);
    return rc;
}

/* A fresh folder for each program: what one leaves behind the next must not see. */
static int fresh_dir(sandbox *s, err *e)
{
    const char *base = getenv("TMPDIR");
    if (s->dir) {
        err ignored = {0};
        file_remove_tree(s->dir, &ignored);
        free(s->dir);
        s->dir = NULL;
    }
    if (s->landlock_fd >= 0) close(s->landlock_fd);
    s->landlock_fd = -1;
    char *name = xasprintf("%s/tare-code-XXXXXX", base && *base == '/' ? base : "/tmp");
    if (!mkdtemp(name)) {
        int rc = err_errno(e, errno, "%s: cannot make a temporary folder", name);
        free(name);
        return rc;
    }
    s->dir = name;
    s->landlock_fd = landlock_ruleset(s->dir);
    return 0;
}

int sandbox_run(sandbox *s, const char *program, size_t n, const char *data, sandbox_result *r,
                err *e)
{
    int rc = 0, status = 0;
    bool late = false;
    uint64_t word[2];
    char mark[48];
    buf text = {0}, out = {0};
    *r = (sandbox_result){0};
    if (getrandom(word, sizeof word, 0) != (ssize_t)sizeof word) word[0] = (uint64_t)(uintptr_t)s;
    snprintf(mark, sizeof mark, "done-%016llx%016llx", (unsigned long long)word[0],
             (unsigned long long)word[1]);
    TRY(fresh_dir(s, e));
    buf_add(&text, program, n);
    buf_printf(&text, "\nprint('\\n%s')\n", mark);
    TRY(write_file(s, "main.py", text.data, text.len, e));
    if (data) TRY(write_file(s, "tests.json", data, strlen(data), e));
    TRY(spawn(s, "main.py", &out, &status, &late, e));
    r->timed_out = late || (WIFSIGNALED(status) && WTERMSIG(status) == SIGXCPU);
    last_line(&out, r->detail, sizeof r->detail);
    r->passed =
        !r->timed_out && WIFEXITED(status) && WEXITSTATUS(status) == 0 && !strcmp(r->detail, mark);
    if (r->passed)
        snprintf(r->detail, sizeof r->detail, "passed");
    else if (r->timed_out)
        snprintf(r->detail, sizeof r->detail, "time limit of %.0f s", s->seconds);
    else if (WIFSIGNALED(status))
        snprintf(r->detail, sizeof r->detail, "killed by signal %d", WTERMSIG(status));
    else if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        snprintf(r->detail, sizeof r->detail, "ended before its last line");
    else if (!*r->detail)
        snprintf(r->detail, sizeof r->detail, "exit status %d", WEXITSTATUS(status));
    rc = 0;
out:
    buf_free(&text);
    buf_free(&out);
    return rc;
}

/* ---- opening
 * ----------------------------------------------------------------------------------------------------
 */

/* The interpreter itself: python3 on PATH may be a wrapper script that needs fork to start it. */
static char *find_python(void)
{
    char line[1024];
    char *found = NULL;
    FILE *p = popen("python3 -I -c 'import sys; print(sys.executable)' 2>/dev/null", "r");
    if (!p) return NULL;
    if (fgets(line, sizeof line, p)) {
        line[strcspn(line, "\n")] = 0;
        if (line[0] == '/' && access(line, X_OK) == 0) found = xstrdup(line);
    }
    if (pclose(p) != 0) {
        free(found);
        found = NULL;
    }
    return found;
}

static int probe(sandbox *s, err *e)
{
    static const char text[] =
        "import os\nr = []\n"
        "try:\n    import socket\n    s = socket.create_server(('127.0.0.1', 0))\n"
        "    c = socket.create_connection(s.getsockname(), 1)\n    r.append('network')\n"
        "except Exception:\n    pass\n"
        "try:\n    p = os.fork()\n    if p == 0: os._exit(0)\n    r.append('fork')\n"
        "except Exception:\n    pass\n"
        "try:\n    f = '../tare-probe-' + os.path.basename(os.getcwd())\n    open(f, 'w').close()\n"
        "    os.remove(f)\n    r.append('files')\nexcept Exception:\n    pass\n"
        "open('probe.txt', 'w').write(' '.join(r) + '.')\n";
    sandbox_result r;
    buf got = {0};
    int rc = sandbox_run(s, text, sizeof text - 1, NULL, &r, e);
    if (rc < 0) return rc;
    if (!r.passed)
        return err_set(e, ERR_NOTCOMPARABLE, "%s does not run a program here: %s", s->python,
                       r.detail);
    char *path = file_join(s->dir, "probe.txt");
    rc = file_read_all(&got, path, 4096, e);
    free(path);
    if (rc < 0) return rc;
    bool net = strstr(got.data, "network") != NULL, forks = strstr(got.data, "fork") != NULL;
    bool files = strstr(got.data, "files") != NULL;
    buf_free(&got);
    s->offline = !net;
    snprintf(s->limits, sizeof s->limits,
             "%.0f s, 1 GiB; network %s, new processes %s, files outside its folder %s", s->seconds,
             net ? "NOT blocked by this kernel" : "blocked", forks ? "NOT blocked" : "blocked",
             files ? "writable" : "read-only");
    if (net || forks)
        log_warn("code tasks: this kernel enforces less than asked for (%s)", s->limits);
    return 0;
}

int sandbox_open(sandbox **out, double seconds, err *e)
{
    sandbox *s = xcalloc(1, sizeof *s);
    s->seconds = seconds;
    s->landlock_fd = -1;
    s->python = find_python();
    build_filter(&s->filter);
    int rc = s->python ? probe(s, e)
                       : err_set(e, ERR_NOTCOMPARABLE,
                                 "code tasks are graded by running them, and no python3 was found "
                                 "on PATH: install python3, or leave the code tasks out");
    if (rc < 0)
        sandbox_close(s);
    else
        *out = s;
    return rc;
}

void sandbox_close(sandbox *s)
{
    if (!s) return;
    if (s->dir) {
        err ignored = {0};
        file_remove_tree(s->dir, &ignored);
        free(s->dir);
    }
    if (s->landlock_fd >= 0) close(s->landlock_fd);
    free(s->filter.filter);
    free(s->python);
    free(s);
}

const char *sandbox_limits(const sandbox *s)
{
    return s->limits;
}
bool sandbox_offline(const sandbox *s)
{
    return s->offline;
}
