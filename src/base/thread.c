/* A team of worker threads.
 *
 * Each call raises `round`; workers that spin see it at once, workers that sleep wait on it as a
 * futex. The caller works as member 0 and waits until `left` is zero. After SPIN_SECONDS without
 * work a worker sleeps, so an idle process uses no CPU. The barrier is a counter and a generation
 * number. Waiting spins, and now and then yields: seldom while every member can have a CPU, after a
 * few tries when there are more members than CPUs, because then spinning delays the one waited for.
 */
#include "base/thread.h"
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { YIELD_AFTER = 1000, YIELD_AFTER_CROWDED = 20, MAX_THREADS = 1024 };
static const double SPIN_SECONDS = 60e-6;

struct team {
    int n;
    int yield_after;
    _Alignas(64) _Atomic uint32_t round;
    _Alignas(64) _Atomic uint32_t sleepers;
    _Alignas(64) _Atomic int left;
    _Alignas(64) _Atomic int arrived;
    _Alignas(64) _Atomic uint32_t generation;
    team_fn *fn;
    void *arg;
    bool stop;
    pthread_t *threads;
};
typedef struct member {
    team *t;
    int index;
} member;

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void futex(void *word, int op, uint32_t value)
{
    syscall(SYS_futex, word, op, value, NULL, NULL, 0);
}

/* One turn of a waiting loop. */
static inline void relax(const team *t, int *turn)
{
    pause_cpu();
    if (++*turn < t->yield_after) return;
    *turn = 0;
    sched_yield();
}

/* Waits until round differs from seen. */
static void wait_round(team *t, uint32_t seen)
{
    double until = clock_seconds() + SPIN_SECONDS;
    for (int i = 1, turn = 0; i % 32 || clock_seconds() < until; i++) {
        if (atomic_load_explicit(&t->round, memory_order_acquire) != seen) return;
        relax(t, &turn);
    }
    atomic_fetch_add(&t->sleepers, 1);
    while (atomic_load(&t->round) == seen)
        futex(&t->round, FUTEX_WAIT_PRIVATE, seen);
    atomic_fetch_sub(&t->sleepers, 1);
}

static void *worker(void *arg)
{
    member m = *(member *)arg;
    free(arg);
    team *t = m.t;
    uint32_t seen = 0;
    for (;;) {
        wait_round(t, seen);
        seen = atomic_load(&t->round);
        if (t->stop) return NULL;
        t->fn(t->arg, m.index, t->n);
        atomic_fetch_sub_explicit(&t->left, 1, memory_order_release);
    }
}

static void start_round(team *t)
{
    atomic_fetch_add(&t->round, 1);
    if (atomic_load(&t->sleepers)) futex(&t->round, FUTEX_WAKE_PRIVATE, MAX_THREADS);
}

int team_open(team **out, int n_threads, err *e)
{
    *out = NULL;
    if (n_threads < 0 || n_threads > MAX_THREADS)
        return err_set(e, ERR_USAGE, "--threads: %d is not between 0 and %d", n_threads,
                       MAX_THREADS);
    team *t = aligned_alloc(64, (sizeof *t + 63) / 64 * 64);
    if (!t) return err_set(e, ERR_NOMEM, "out of memory for a team of threads");
    memset(t, 0, sizeof *t);
    int want = n_threads ? n_threads : thread_cpus();
    t->yield_after = want > thread_cpus() ? YIELD_AFTER_CROWDED : YIELD_AFTER;
    t->threads = xcalloc((size_t)want, sizeof *t->threads);
    for (t->n = 1; t->n < want; t->n++) {
        member *m = xmalloc(sizeof *m);
        *m = (member){t, t->n};
        int rc = pthread_create(&t->threads[t->n], NULL, worker, m);
        if (rc) {
            free(m);
            team_close(t);
            return err_errno(e, rc, "thread %d could not be started", t->n);
        }
    }
    *out = t;
    return 0;
}

void team_close(team *t)
{
    if (!t) return;
    t->stop = true;
    start_round(t);
    for (int i = 1; i < t->n; i++)
        pthread_join(t->threads[i], NULL);
    free(t->threads);
    free(t);
}

int team_size(const team *t)
{
    return t ? t->n : 1;
}

void team_run(team *t, team_fn *fn, void *arg)
{
    if (!t || t->n == 1) {
        fn(arg, 0, 1);
        return;
    }
    t->fn = fn;
    t->arg = arg;
    atomic_store_explicit(&t->left, t->n - 1, memory_order_relaxed);
    start_round(t);
    fn(arg, 0, t->n);
    int turn = 0;
    while (atomic_load_explicit(&t->left, memory_order_acquire))
        relax(t, &turn);
}

void team_barrier(team *t, int index)
{
    (void)index;
    if (!t || t->n == 1) return;
    uint32_t gen = atomic_load_explicit(&t->generation, memory_order_acquire);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) == t->n - 1) {
        atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&t->generation, 1, memory_order_release);
        return;
    }
    int turn = 0;
    while (atomic_load_explicit(&t->generation, memory_order_acquire) == gen)
        relax(t, &turn);
}

/* Reads up to two numbers; returns how many ("max 100000" has none). */
static int read_numbers(const char *path, long long *a, long long *b)
{
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    int n = fscanf(f, "%lld %lld", a, b);
    fclose(f);
    return n;
}

/* CPU quota of cgroup v2 ("200000 100000") or v1, in whole CPUs, at least 1; 0 = none. */
static int cgroup_cpus(void)
{
    long long quota = 0, period = 0, unused;
    if (read_numbers("/sys/fs/cgroup/cpu.max", &quota, &period) != 2) {
        read_numbers("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", &quota, &unused);
        read_numbers("/sys/fs/cgroup/cpu/cpu.cfs_period_us", &period, &unused);
    }
    return quota > 0 && period > 0 ? (int)((quota + period - 1) / period) : 0;
}

int thread_cpus(void)
{
    cpu_set_t set;
    int n = 1;
    if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
    int q = cgroup_cpus();
    if (q && q < n) n = q;
    return n < 1 ? 1 : n;
}

void thread_split(int64_t total, int64_t align, int index, int n, int64_t *lo, int64_t *hi)
{
    int64_t units = (total + align - 1) / align;
    int64_t a = units * index / n * align, b = units * (index + 1) / n * align;
    *lo = a < total ? a : total;
    *hi = b < total ? b : total;
}

double clock_seconds(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}
