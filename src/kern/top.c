/* The best of a row of logits, on the CPU: the definition that devices are tested against. */
#include <math.h>
#include "kern/backend.h"

int kern_reserve_top(kern_dev *d, int64_t max_rows, int64_t V, err *e)
{
    return d->be ? d->be->reserve_top(d, max_rows, V, e) : 0;
}

static void insert(kern_top *out, int *n, float v, int32_t id)
{
    int k = *n < KERN_TOP ? (*n)++ : KERN_TOP - 1;
    for (; k > 0 && out->value[k - 1] < v; k--) {
        out->value[k] = out->value[k - 1];
        out->id[k] = out->id[k - 1];
    }
    out->value[k] = v == 0 ? 0 : v;
    out->id[k] = id;
}

static void top_row(const float *x, int64_t V, kern_top *out)
{
    int n = 0;
    double sum = 0;
    out->odd = -1;
    out->odd_value = 0;
    for (int64_t i = 0; i < V; i++) {
        if (isnan(x[i]) || x[i] == INFINITY) {
            out->odd = (int32_t)i;
            out->odd_value = x[i];
            return;
        }
        if (n < KERN_TOP || x[i] > out->value[KERN_TOP - 1]) insert(out, &n, x[i], (int32_t)i);
    }
    for (; n < KERN_TOP; n++) {
        out->value[n] = -INFINITY;
        out->id[n] = -1;
    }
    for (int64_t i = 0; i < V && out->value[0] > -INFINITY; i++)
        sum += exp((double)x[i] - (double)out->value[0]);
    out->lse = sum > 0 ? (double)out->value[0] + log(sum) : -(double)INFINITY;
}

void kern_top_rows(kern_dev *d, const float *x, int64_t V, int64_t T, kern_top *out)
{
    KERN__ELSEWHERE(d, top_rows(d, x, V, T, out))
    for (int64_t t = 0; t < T; t++)
        top_row(x + t * V, V, out + t);
}
