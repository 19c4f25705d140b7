/* Glue between operators (kern.h): copies of rows, rotary tables, gates of the gated delta rule,
 * and what only a device with a list of its own does something for. A few values a token: plain C.
 */
#include <math.h>
#include <string.h>
#include "kern/backend.h"

static float softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x)); /* as torch, which is linear past 20 */
}

void kern_copy_rows(kern_dev *d, const float *from, int64_t ldf, float *to, int64_t ldt, int64_t n,
                    int64_t rows)
{
    KERN__ELSEWHERE(d, copy_rows(d, from, ldf, NULL, to, ldt, n, rows))
    for (int64_t r = 0; r < rows; r++)
        memcpy(to + r * ldt, from + r * ldf, sizeof *to * (size_t)n);
}

void kern_delta_gates(kern_dev *d, const float *ba, int64_t ld, int Hv, const float *a_log,
                      const float *dt_bias, int64_t T, float *g, float *beta)
{
    KERN__ELSEWHERE(d, delta_gates(d, ba, ld, Hv, a_log, dt_bias, T, g, beta))
    for (int64_t t = 0; t < T; t++)
        for (int h = 0; h < Hv; h++) {
            const float *row = ba + t * ld;
            g[t * Hv + h] = -expf(a_log[h]) * softplus(row[Hv + h] + dt_bias[h]);
            beta[t * Hv + h] = 1.0f / (1.0f + expf(-row[h]));
        }
}

void kern_gather_rows(kern_dev *d, const float *from, const int32_t *ids, int64_t n, int64_t rows,
                      float *to)
{
    KERN__ELSEWHERE(d, copy_rows(d, from, n, ids, to, n, n, rows))
    for (int64_t r = 0; r < rows; r++)
        memcpy(to + r * n, from + ids[r] * n, sizeof *to * (size_t)n);
}

void kern_rope_fill(kern_dev *d, const float *inv, int64_t half, double attention,
                    const int32_t *pos, int64_t row0, int64_t T, float *cosv, float *sinv)
{
    KERN__ELSEWHERE(d, rope_fill(d, inv, half, attention, pos, row0, T, cosv, sinv))
    for (int64_t t = row0; t < row0 + T; t++)
        for (int64_t i = 0; i < half; i++) {
            float angle = inv[i] * (float)pos[t];
            cosv[t * half + i] = (float)(cos((double)angle) * attention);
            sinv[t * half + i] = (float)(sin((double)angle) * attention);
        }
}

void kern_scale_far(kern_dev *d, float *x, int64_t ld, int64_t n, const int32_t *pos, float beta,
                    int64_t from, int64_t T)
{
    KERN__ELSEWHERE(d, scale_far(d, x, ld, n, pos, beta, from, T))
    for (int64_t t = 0; t < T; t++) {
        float steps = (float)(pos[t] / from);
        if (steps > 0) kern_scale(d, x + t * ld, 1.0f + beta * logf(1.0f + steps), n);
    }
}

/* ---- a step ------------------------------------------------------------------------------------
 */

bool kern_step_begin(kern_dev *d, int64_t T, uint64_t key)
{
    return !d->be || d->be->step_begin(d, T, key);
}
int kern_step_flush(kern_dev *d, err *e)
{
    if (d->be) return d->be->step_flush(d, e);
    return kern__ranks_failed(d) ? kern__ranks_error(d, e) : 0;
}
int kern_step_end(kern_dev *d, err *e)
{
    if (d->be) return d->be->step_end(d, e);
    return kern__ranks_failed(d) ? kern__ranks_error(d, e) : 0;
}
void kern_fetch(kern_dev *d, const float *x, int64_t n, float *host)
{
    KERN__ELSEWHERE(d, fetch(d, x, n, host))
    if (x != host) memcpy(host, x, sizeof *x * (size_t)n);
}
uint64_t kern_clipped(const kern_dev *d)
{
    return d->be ? d->be->clipped(d) : 0;
}
int kern_profile(kern_dev *d, bool on, err *e)
{
    if (d->be) return d->be->profile(d, on, e);
    return on ? err_set(e, ERR_UNSUPPORTED,
                        "operators are timed one by one on a GPU only, not on device '%s'; leave "
                        "the profile out",
                        d->name)
              : 0;
}
int kern_profile_lines(const kern_dev *d, const kern_op_time **out)
{
    *out = NULL;
    return d->be ? d->be->profile_lines(d, out) : 0;
}
int kern_measure_roof(kern_dev *d, size_t bytes, kern_roof *out, err *e)
{
    if (d->be) return d->be->measure_roof(d, bytes, out, e);
    *out = (kern_roof){.read_gbs = kern_measure_bandwidth(d, bytes)};
    return 0;
}
int64_t kern_len_bucket(int64_t len)
{
    int64_t n = 256;
    while (n < len)
        n *= 2;
    return n;
}
