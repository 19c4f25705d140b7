/* The thread team under stress: every member runs every round once, barriers separate phases, more
 * members than CPUs still finish, and an idle team uses no CPU time. */
#include "check.h"
#include <stdatomic.h>
#include <sys/resource.h>
#include <unistd.h>
#include "base/thread.h"

enum { MOST = 16 };

typedef struct job {
    team *t;
    int phases;
    _Atomic int bad;
    struct {
        _Alignas(64) int value;
    } slot[MOST];
} job;

static void count_member(void *arg, int index, int n)
{
    job *j = arg;
    if (index < 0 || index >= n || n != team_size(j->t)) j->bad++;
    j->slot[index].value++;
}

static void phases(void *arg, int index, int n)
{
    job *j = arg;
    for (int p = 1; p <= j->phases; p++) {
        j->slot[index].value = p; /* plain memory: the barrier must order it */
        team_barrier(j->t, index);
        for (int i = 0; i < n; i++)
            if (j->slot[i].value != p) j->bad++;
        team_barrier(j->t, index);
    }
}

static void rounds(void **state)
{
    (void)state;
    static const int sizes[] = {1, 2, 3, 8, MOST};
    err e = {0};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        job j = {0};
        CHECK_OK(team_open(&j.t, sizes[s], &e));
        assert_int_equal(team_size(j.t), sizes[s]);
        int n_rounds = sizes[s] > 3 ? 500 : 3000;
        for (int i = 0; i < n_rounds; i++) {
            team_run(j.t, count_member, &j);
            if (i % 100 == 99) usleep(300); /* let them fall asleep now and then */
        }
        for (int i = 0; i < sizes[s]; i++)
            assert_int_equal(j.slot[i].value, n_rounds);
        assert_int_equal(j.bad, 0);
        team_close(j.t);
    }
}

static void barriers(void **state)
{
    (void)state;
    static const int sizes[] = {1, 2, 3, 8};
    err e = {0};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        job j = {.phases = sizes[s] > 3 ? 200 : 2000};
        CHECK_OK(team_open(&j.t, sizes[s], &e));
        for (int i = 0; i < 3; i++)
            team_run(j.t, phases, &j);
        assert_int_equal(j.bad, 0);
        team_close(j.t);
    }
}

static double cpu_seconds(void)
{
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return (double)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) +
           1e-6 * (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec);
}

static void idle_costs_nothing(void **state)
{
    (void)state;
    err e = {0};
    job j = {0};
    CHECK_OK(team_open(&j.t, 8, &e));
    team_run(j.t, count_member, &j);
    usleep(50000);
    double before = cpu_seconds();
    usleep(300000);
    double used = cpu_seconds() - before;
    if (used > 0.05) fail_msg("an idle team used %.3f s of CPU in 0.3 s", used);
    team_run(j.t, count_member, &j); /* and it wakes up */
    for (int i = 0; i < 8; i++)
        assert_int_equal(j.slot[i].value, 2);
    team_close(j.t);
}

static void open_and_close(void **state)
{
    (void)state;
    err e = {0};
    for (int i = 0; i < 200; i++) {
        team *t;
        CHECK_OK(team_open(&t, i % 5, &e));
        if (i % 3 == 0) {
            job j = {.t = t};
            team_run(t, count_member, &j);
        }
        team_close(t);
    }
    team *t = (team *)1;
    CHECK_ERR(team_open(&t, -1, &e), ERR_USAGE, "-1");
    CHECK_ERR(team_open(&t, 100000, &e), ERR_USAGE, "100000");
    assert_null(t);
    team_close(NULL);
    assert_true(thread_cpus() >= 1);
    job j = {0};
    team_run(NULL, count_member, &j); /* no team: the caller alone */
    assert_int_equal(j.slot[0].value, 1);
}

static void splits(void **state)
{
    (void)state;
    for (int64_t total = 0; total < 300; total += 7)
        for (int64_t align = 1; align <= 64; align *= 4)
            for (int n = 1; n <= 9; n++) {
                int64_t at = 0, widest = 0, narrowest = INT64_MAX;
                for (int i = 0; i < n; i++) {
                    int64_t lo, hi;
                    thread_split(total, align, i, n, &lo, &hi);
                    assert_true(lo == at && hi >= lo && hi <= total);
                    if (hi != total) assert_true(hi % align == 0);
                    if (hi - lo > widest) widest = hi - lo;
                    if (hi - lo < narrowest) narrowest = hi - lo;
                    at = hi;
                }
                assert_int_equal(at, total);
                assert_true(widest - narrowest < 2 * align);
            }
}

static void the_clock_moves(void **state)
{
    (void)state;
    double a = clock_seconds();
    usleep(20000);
    double d = clock_seconds() - a;
    assert_true(d >= 0.02 && d < 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rounds),
        cmocka_unit_test(barriers),
        cmocka_unit_test(idle_costs_nothing),
        cmocka_unit_test(open_and_close),
        cmocka_unit_test(splits),
        cmocka_unit_test(the_clock_moves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
