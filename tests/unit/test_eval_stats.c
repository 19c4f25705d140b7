/* Paired statistics against values computed with exact fractions and 40 digits
 * (tests/golden/make_stats_golden.py), and the verdict rules on their borders. */
#include "check.h"
#include "eval/eval.h"

static void close_to(double got, double want, double rel, const char *line)
{
    double scale = fabs(want) > 1e-300 ? fabs(want) : 1e-300;
    if (fabs(got - want) > rel * scale && fabs(got - want) > 1e-12)
        fail_msg("%s: got %.17g, wanted %.17g", line, got, want);
}

static void test_golden(void **state)
{
    (void)state;
    char line[256];
    int rows = 0;
    FILE *f = fopen("tests/fixtures/eval/stats_golden.txt", "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        long long a, b, c;
        double x, y, ci[2];
        long long num, den;
        if (sscanf(line, "m %lld %lld %lf", &a, &b, &x) == 3) {
            close_to(stats_mcnemar_p(a, b), x, 1e-9, line);
            close_to(stats_mcnemar_p(b, a), x, 1e-9, line);
        } else if (sscanf(line, "i %lld %lld %lld %lf %lf", &a, &b, &c, &x, &y) == 5) {
            stats_paired_ci(a, b, c, ci);
            close_to(ci[0], x, 1e-9, line);
            close_to(ci[1], y, 1e-9, line);
            stats_paired_ci(a, c, b, ci); /* exchanging the models mirrors the interval */
            close_to(ci[0], -y, 1e-9, line);
            close_to(ci[1], -x, 1e-9, line);
        } else if (sscanf(line, "t %lld %lld %lld %lld %lf", &a, &b, &num, &den, &x) == 5) {
            close_to(stats_binomial_above_p(a, b, (double)num / (double)den), x, 1e-9, line);
        } else {
            fail_msg("unknown line: %s", line);
        }
        rows++;
    }
    fclose(f);
    assert_true(rows > 35);
}

static void test_verdict_rules(void **state)
{
    (void)state;
    static const struct {
        int64_t n, b, c;
        verdict want;
    } rows[] = {
        {5, 0, 0, VERDICT_CONFIRM},   /* zero flips on five items prove nothing */
        {380, 0, 0, VERDICT_CONFIRM}, /* z^2 / (n + z^2) is just above 1 % */
        {381, 0, 0, VERDICT_SAFE},         {500, 0, 0, VERDICT_SAFE},
        {500, 0, 40, VERDICT_SAFE},    /* better is safe */
        {500, 12, 6, VERDICT_CONFIRM}, /* 1.2 pp down, not decided */
        {500, 25, 10, VERDICT_REJECT}, /* 3 pp and p = 0.017 */
        {500, 15, 0, VERDICT_REJECT},  /* exactly 3 pp, p < 0.05 */
        {500, 14, 0, VERDICT_CONFIRM}, /* 2.8 pp */
        {100, 4, 1, VERDICT_CONFIRM},  /* 3 pp but p = 0.375 */
        {250, 250, 0, VERDICT_REJECT},     {14042, 300, 250, VERDICT_SAFE}, /* upper end 0.685 pp */
        {0, 0, 0, VERDICT_NOT_COMPARABLE},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char reason[256] = "";
        int64_t more = -7;
        verdict v = stats_verdict(rows[i].n, rows[i].b, rows[i].c, reason, &more);
        if (v != rows[i].want)
            fail_msg("n %lld b %lld c %lld: %s (%s)", (long long)rows[i].n, (long long)rows[i].b,
                     (long long)rows[i].c, verdict_name(v), reason);
        assert_true(*reason);
        if (v == VERDICT_CONFIRM)
            assert_true(more == -1 || more > rows[i].n);
        else
            assert_int_equal(more, 0);
    }
}

/* The number that would settle it does settle it, and one tenth less does not. */
static void test_items_to_settle(void **state)
{
    (void)state;
    char reason[256];
    int64_t more, again;
    assert_int_equal(stats_verdict(5, 0, 0, reason, &more), VERDICT_CONFIRM);
    assert_int_equal(more, 381);
    assert_int_equal(stats_verdict(164, 3, 3, reason, &more), VERDICT_CONFIRM);
    int64_t flips = more * 3 / 164;
    assert_int_equal(stats_verdict(more + 60, flips, flips, reason, &again), VERDICT_SAFE);
    assert_int_equal(stats_verdict(more * 9 / 10, flips * 9 / 10, flips * 9 / 10, reason, &again),
                     VERDICT_CONFIRM);
    assert_int_equal(stats_verdict(100, 3, 0, reason, &more), VERDICT_CONFIRM);
    assert_true(more > 100 && more < 400); /* a true loss of 3 pp: p < 0.05 comes soon */
    assert_int_equal(stats_verdict(1000, 10, 0, reason, &more), VERDICT_CONFIRM);
    assert_int_equal(more, -1); /* exactly on the limit of 1 pp */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_verdict_rules),
        cmocka_unit_test(test_items_to_settle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
