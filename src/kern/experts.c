/* Experts: E linears of one shape, of which a step uses some, each on its own slots. */
#include <stdlib.h>
#include <string.h>
#include "kern/ops.h"

struct kern_experts {
    int E;
    kern_linear **expert;
    size_t bytes;
};

void kern_experts_drop(kern_dev *d, kern_experts *x)
{
    if (!x) return;
    for (int e = 0; e < x->E; e++)
        kern_linear_drop(d, x->expert[e]);
    free(x->expert);
    free(x);
}

int kern_experts_make(kern_dev *d, kern_linear **expert, int E, kern_experts **out, err *e)
{
    int rc = 0;
    kern_experts *x = xcalloc(1, sizeof *x);
    x->E = E > 0 ? E : 0;
    x->expert = xcalloc((size_t)x->E + 1, sizeof *x->expert);
    for (int i = 0; i < x->E; i++) {
        x->expert[i] = expert[i];
        x->bytes += kern_linear_bytes(expert[i]);
    }
    if (E < 1) {
        rc = err_set(e, ERR_VALUE, "%d experts, expected at least 1", E);
        goto out;
    }
    for (int i = 1; i < E; i++)
        if (expert[i]->N != expert[0]->N || expert[i]->K != expert[0]->K) {
            rc = err_set(e, ERR_SHAPE, "%s is [%lld,%lld], expected [%lld,%lld] as %s",
                         expert[i]->name, (long long)expert[i]->N, (long long)expert[i]->K,
                         (long long)expert[0]->N, (long long)expert[0]->K, expert[0]->name);
            goto out;
        }
    *out = x;
    x = NULL;
out:
    kern_experts_drop(d, x);
    return rc;
}

size_t kern_experts_bytes(const kern_experts *x)
{
    return x->bytes;
}

const kern_linear *kern_experts_at(const kern_experts *x, int e)
{
    return x->expert[e];
}

void kern_experts_run(kern_dev *d, const kern_experts *x, const float *in, int64_t ldin,
                      const int32_t *row, const int32_t *first, float *y, int64_t ldy)
{
    for (int e = 0; e < x->E; e++) {
        int64_t n = first[e + 1] - first[e];
        if (n == 0) continue;
        kern__linear_run_rows(d, x->expert[e], row ? in : in + first[e] * ldin, ldin,
                              row ? row + first[e] : NULL, n, y + first[e] * ldy, ldy);
    }
}
