/* Shared by the tests of kern's operators: one device for each instruction set that this CPU has
 * and for the plain C twin, with three threads and with one; random numbers with outliers; weights.
 */
#ifndef TESTS_KERN_FIXTURE_H
#define TESTS_KERN_FIXTURE_H
#include "check.h"
#include "kern/ops.h"

typedef struct isa {
    const char *name;
    uint32_t features;
    kern_dev *dev, *one;
} isa;
static isa isas[] = {{"portable", 0, NULL, NULL},
                     {"avx2", CPU_AVX2, NULL, NULL},
                     {"avx512", CPU_AVX2 | CPU_AVX512, NULL, NULL},
                     {"all", ~0u, NULL, NULL}};
enum { N_ISAS = sizeof isas / sizeof *isas };

static void isas_open(void)
{
    err e = {0};
    for (int i = 0; i < N_ISAS; i++) {
        kern_opts o = {.threads = 3, .cpu_features = isas[i].features}, one = o;
        one.threads = 1;
        if (kern_open(&isas[i].dev, &o, &e) < 0 || kern_open(&isas[i].one, &one, &e) < 0) {
            fprintf(stderr, "%s\n", e.msg);
            exit(1);
        }
        if (i > 0 && i < N_ISAS - 1 && isas[i].dev->features != isas[i].features)
            printf("%s: skipped where the CPU lacks it (falls to the next table)\n", isas[i].name);
    }
}

static void isas_close(void)
{
    for (int i = 0; i < N_ISAS; i++) {
        kern_close(isas[i].dev);
        kern_close(isas[i].one);
    }
}

static unsigned rng = 99;
static double uniform(void)
{
    rng = rng * 1664525u + 1013904223u;
    return (double)(rng >> 8) / 16777216.0;
}
static float normal(void)
{
    double u = uniform() + 1e-9, v = uniform();
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}
static float *randoms(int64_t n)
{
    float *p = xmalloc((size_t)n * sizeof *p);
    for (int64_t i = 0; i < n; i++)
        p[i] = normal() * (uniform() < 0.01 ? 20.0f : 1.0f);
    return p;
}
static inline float *copy_of(const float *x, int64_t n)
{
    float *p = xmalloc((size_t)n * sizeof *p);
    return memcpy(p, x, (size_t)n * sizeof *p);
}
static inline float *poisoned(int64_t n)
{
    float *p = xmalloc((size_t)n * sizeof *p);
    return memset(p, 0xff, (size_t)n * sizeof *p);
}
static void near(const char *what, const char *where, double got, double want, double tol)
{
    if (!(fabs(got - want) <= tol))
        fail_msg("%s (%s): got %.9g, expected %.9g, allowed %.3g", what, where, got, want, tol);
}

#endif
