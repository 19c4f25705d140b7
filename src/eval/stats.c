/* Paired statistics of two models on the same items: pure functions of three counts.
 *
 * n pairs, of which b went from right to wrong and c from wrong to right; the rest agree. The loss
 * is lambda = (b - c) / n, the reported difference is candidate - baseline = -lambda.
 *
 * McNemar, exact and two-sided: under "no change" b is binomial(b + c, 1/2), so
 *     p = min(1, 2 * sum_{i <= min(b,c)} C(b+c, i) / 2^(b+c)),
 * summed in logarithms. No approximation is used at any size.
 *
 * Interval: the score interval of Tango (Statistics in Medicine 17, 1998), the set of lambda with
 *     |b - c - n lambda| <= z sqrt(n (2 q(lambda) + lambda (1 - lambda))),
 * where q is the restricted maximum-likelihood estimate of P(wrong -> right):
 *     q = (sqrt(B^2 - 4 A C) - B) / (2 A),  A = 2n,
 *     B = -b - c + (2n - b + c) lambda,     C = -c lambda (1 - lambda).
 * It stays honest at zero flips: b = c = 0 gives +- z^2 / (n + z^2), which is 43 pp at n = 5.
 *
 * The counts are doubles inside, so that "how many items would settle it" can scale them. */
#include "eval/eval.h"
#include <math.h>
#include <stdio.h>

#define Z95       1.959963984540054
#define SAFE_PP   1.0
#define REJECT_PP 3.0
#define ITEMS_CAP 100000000.0

/* ln of sum_{i=0}^{k} C(n,i) p^i (1-p)^(n-i), largest term first out of the sum. */
static double log_binomial_cdf(double n, double k, double p)
{
    double top = -INFINITY, sum = 0, lp = log(p), lq = log1p(-p);
    for (double i = 0; i <= k; i++) {
        double t = lgamma(n + 1) - lgamma(i + 1) - lgamma(n - i + 1) + i * lp + (n - i) * lq;
        if (t > top) {
            sum = sum * exp(top - t) + 1;
            top = t;
        } else {
            sum += exp(t - top);
        }
    }
    return top + log(sum);
}

double stats_mcnemar_p(int64_t b, int64_t c)
{
    int64_t n = b + c, k = b < c ? b : c;
    if (n <= 0 || b == c) return 1;
    double p = 2 * exp(log_binomial_cdf((double)n, (double)k, 0.5));
    return p < 1 ? p : 1;
}

double stats_binomial_above_p(int64_t n, int64_t k, double p)
{
    if (k <= 0) return 1;
    if (p <= 0) return 0;
    if (p >= 1) return 1;
    /* P(X >= k) = P(n - X <= n - k), and n - X is binomial(n, 1 - p). */
    return exp(log_binomial_cdf((double)n, (double)(n - k), 1 - p));
}

/* Tango's score statistic of the loss lambda. */
static double tango_score(double n, double b, double c, double lambda)
{
    double qa = 2 * n, qb = -b - c + (2 * n - b + c) * lambda, qc = -c * lambda * (1 - lambda);
    double disc = qb * qb - 4 * qa * qc;
    double q = (sqrt(disc > 0 ? disc : 0) - qb) / (2 * qa);
    double var = n * (2 * q + lambda * (1 - lambda));
    double d = b - c - n * lambda;
    if (var <= 0) return d == 0 ? 0 : copysign(INFINITY, d);
    return d / sqrt(var);
}

/* The lambda between `near` (inside the interval) and `far` where |score| reaches z. */
static double tango_edge(double n, double b, double c, double near, double far)
{
    if (fabs(tango_score(n, b, c, far)) <= Z95) return far;
    for (int i = 0; i < 200; i++) {
        double mid = 0.5 * (near + far);
        if (fabs(tango_score(n, b, c, mid)) <= Z95)
            near = mid;
        else
            far = mid;
    }
    return 0.5 * (near + far);
}

static void loss_interval(double n, double b, double c, double *lo, double *hi)
{
    double d = (b - c) / n;
    *lo = tango_edge(n, b, c, d, -1);
    *hi = tango_edge(n, b, c, d, 1);
}

void stats_paired_ci(int64_t n, int64_t b, int64_t c, double out_pp[2])
{
    double lo, hi;
    out_pp[0] = -100;
    out_pp[1] = 100;
    if (n <= 0) return;
    loss_interval((double)n, (double)b, (double)c, &lo, &hi);
    out_pp[0] = hi > 0 ? -100 * hi : 100 * fabs(hi);
    out_pp[1] = lo < 0 ? 100 * fabs(lo) : -100 * lo;
}

/* Would n items with these (fractional) flips be decided? The middle verdict also settles: an
 * interval that lies between the two limits says that the loss is moderate. */
static bool settled(double n, double b, double c)
{
    double lo, hi, loss = 100 * (b - c) / n;
    loss_interval(n, b, c, &lo, &hi);
    if (100 * hi < SAFE_PP || 100 * lo >= REJECT_PP) return true;
    if (loss >= REJECT_PP && stats_mcnemar_p((int64_t)llround(b), (int64_t)llround(c)) < 0.05)
        return true;
    return 100 * lo >= SAFE_PP && 100 * hi < REJECT_PP;
}

/* Smallest n at which the same flip rates settle it; -1 when no feasible number does. */
static int64_t items_needed(double n, double b, double c)
{
    double lo = n, hi = n;
    while (!settled(hi, b * hi / n, c * hi / n)) {
        lo = hi;
        hi *= 2;
        if (hi > ITEMS_CAP) return -1;
    }
    while (hi - lo > 1) {
        double mid = floor(0.5 * (lo + hi));
        if (settled(mid, b * mid / n, c * mid / n))
            hi = mid;
        else
            lo = mid;
    }
    return (int64_t)ceil(hi);
}

verdict stats_verdict(int64_t n, int64_t b, int64_t c, char reason[256], int64_t *items_to_settle)
{
    char more[96];
    double ci[2];
    *items_to_settle = 0;
    if (n <= 0) {
        snprintf(reason, 256, "no pair of answers to compare");
        return VERDICT_NOT_COMPARABLE;
    }
    stats_paired_ci(n, b, c, ci);
    double loss = 100 * (double)(b - c) / (double)n, lower = -ci[1], upper = -ci[0];
    double p = stats_mcnemar_p(b, c);
    if (upper < SAFE_PP) {
        snprintf(reason, 256, "the loss is below %.2f pp with 95 %% confidence (limit 1 pp)",
                 upper > 0 ? upper : 0.0);
        return VERDICT_SAFE;
    }
    if (lower >= REJECT_PP) {
        snprintf(reason, 256, "the loss is at least %.2f pp with 95 %% confidence (limit 3 pp)",
                 lower);
        return VERDICT_REJECT;
    }
    if (loss >= REJECT_PP && p < 0.05) {
        snprintf(reason, 256, "a loss of %.2f pp (limit 3 pp), McNemar p = %.2g", loss, p);
        return VERDICT_REJECT;
    }
    *items_to_settle = items_needed((double)n, (double)b, (double)c);
    if (*items_to_settle > 0)
        snprintf(more, sizeof more, "about %lld items would settle it",
                 (long long)*items_to_settle);
    else
        snprintf(more, sizeof more, "it sits on a limit: no feasible number of items settles it");
    snprintf(reason, 256, "the loss lies between %.2f and %.2f pp on %lld items; %s", lower, upper,
             (long long)n, more);
    return VERDICT_CONFIRM;
}

const char *verdict_name(verdict v)
{
    switch (v) {
    case VERDICT_SAFE:
        return "safe";
    case VERDICT_CONFIRM:
        return "confirm";
    case VERDICT_REJECT:
        return "reject";
    case VERDICT_NOT_COMPARABLE:
        return "not comparable";
    }
    return "not comparable";
}
