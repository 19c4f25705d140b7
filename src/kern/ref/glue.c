/* Glue between operators (kern.h): copies of strided rows, and the gates of the gated delta rule. A
 * few values a token: plain C. */
#include <math.h>
#include <string.h>
#include "kern/kern.h"

static float softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x)); /* as torch, which is linear past 20 */
}

void kern_copy_rows(kern_dev *d, const float *from, int64_t ldf, float *to, int64_t ldt, int64_t n,
                    int64_t rows)
{
    (void)d;
    for (int64_t r = 0; r < rows; r++)
        memcpy(to + r * ldt, from + r * ldf, sizeof *to * (size_t)n);
}

void kern_delta_gates(kern_dev *d, const float *ba, int64_t ld, int Hv, const float *a_log,
                      const float *dt_bias, int64_t T, float *g, float *beta)
{
    (void)d;
    for (int64_t t = 0; t < T; t++)
        for (int h = 0; h < Hv; h++) {
            const float *row = ba + t * ld;
            g[t * Hv + h] = -expf(a_log[h]) * softplus(row[Hv + h] + dt_bias[h]);
            beta[t * Hv + h] = 1.0f / (1.0f + expf(-row[h]));
        }
}
