/* Routing of a mixture of experts: the choice for each token, the slots sorted by expert, and the
 * weighted sum of what the experts gave back.
 *
 *   slot      choice j of token t lies in slot[t*top_k + j]; slots of one expert are neighbours, in
 *             the order of their tokens, so that an expert is one matrix product over its slots
 *   combine   in the order of the choices of each token: a sum never depends on the other tokens */
#include <string.h>
#include "kern/backend.h"
#include "kern/ops.h"

#define SPLIT_CELLS 16384

typedef struct route_job {
    kern_dev *d;
    const kern_route_args *a;
    int64_t T;
} route_job;

static void route_part(void *arg, int index, int n)
{
    const route_job *j = arg;
    int64_t lo, hi;
    thread_split(j->T, 1, index, n, &lo, &hi);
    for (int64_t t = lo; t < hi; t++)
        KERN__OPS(j->d)->route(j->a, t, kern__thread_buffer(j->d, index));
}

void kern_route(kern_dev *d, const kern_route_args *a, int64_t T)
{
    KERN__ELSEWHERE(d, route(d, a, T))
    route_job j = {d, a, T};
    if (T < 2 || T * a->E < SPLIT_CELLS / 4)
        route_part(&j, 0, 1);
    else
        team_run(d->team, route_part, &j);
}

void kern_route_sort(kern_dev *d, const int32_t *expert, int64_t T, int top_k, int E, int32_t *row,
                     int32_t *first, int32_t *slot)
{
    KERN__ELSEWHERE(d, route_sort(d, expert, T, top_k, E, row, first, slot))
    int64_t n = T * top_k;
    memset(first, 0, ((size_t)E + 1) * sizeof *first);
    for (int64_t i = 0; i < n; i++)
        first[expert[i] + 1]++;
    for (int e = 0; e < E; e++)
        first[e + 1] += first[e];
    for (int64_t i = 0; i < n; i++) { /* first[e] walks to the start of e+1 */
        int32_t s = first[expert[i]]++;
        slot[i] = s;
        row[s] = (int32_t)(i / top_k);
    }
    for (int e = E; e > 0; e--)
        first[e] = first[e - 1];
    first[0] = 0;
}

typedef struct combine_job {
    const kern__ops *ops;
    const float *y, *weight;
    const int32_t *slot;
    int64_t ldy, T, N;
    int top_k;
    bool add;
    float *out;
} combine_job;

static void combine_part(void *arg, int index, int n)
{
    const combine_job *j = arg;
    int64_t lo, hi;
    thread_split(j->T, 1, index, n, &lo, &hi);
    for (int64_t t = lo; t < hi; t++) {
        float *out = j->out + t * j->N;
        if (!j->add) memset(out, 0, (size_t)j->N * sizeof *out);
        for (int64_t i = t * j->top_k; i < (t + 1) * j->top_k; i++)
            j->ops->add_scaled(out, j->y + j->slot[i] * j->ldy, j->weight[i], j->N);
    }
}

void kern_route_combine(kern_dev *d, const float *y, int64_t ldy, const float *weight,
                        const int32_t *slot, int top_k, int64_t T, int64_t N, bool add, float *out)
{
    KERN__ELSEWHERE(d, route_combine(d, y, ldy, weight, slot, top_k, T, N, add, out))
    combine_job j = {KERN__OPS(d), y, weight, slot, ldy, T, N, top_k, add, out};
    if (T < 2 || T * top_k * N < SPLIT_CELLS)
        combine_part(&j, 0, 1);
    else
        team_run(d->team, combine_part, &j);
}
