/* A team of worker threads for data-parallel kernels. team_run calls fn(arg, index, n) on every
 * member (the caller is index 0) and returns when all have returned. Workers spin briefly between
 * calls, then sleep on a futex, so that an idle server costs nothing. team_barrier may be called
 * inside fn by all members. One team is driven by one thread at a time (the engine thread). */
#ifndef BASE_THREAD_H
#define BASE_THREAD_H
#include "base/mem.h"

typedef struct team team;
int team_open(team **out, int n_threads, err *e); /* 0 = number of CPUs this process may use */
void team_close(team *t);
int team_size(const team *t);
typedef void team_fn(void *arg, int index, int n);
void team_run(team *t, team_fn *fn, void *arg);
void team_barrier(team *t, int index);
int thread_cpus(void); /* sched_getaffinity and cgroup quota */
/* Splits [0,total) into n near-equal parts whose borders are multiples of `align`. */
void thread_split(int64_t total, int64_t align, int index, int n, int64_t *lo, int64_t *hi);
double clock_seconds(void); /* monotonic */
#endif
