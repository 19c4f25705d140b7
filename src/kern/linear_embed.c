/* Rows of a prepared linear as vectors: an output head that serves as the embedding table too is
 * resident once. Every layout decodes a row, so any will do. */
#include "kern/backend.h"
#include "kern/linear.h"

typedef struct rows_job {
    const kern_linear *l;
    const int32_t *ids;
    int64_t T;
    float *out;
} rows_job;

static void rows_part(void *arg, int index, int n)
{
    const rows_job *j = arg;
    int64_t lo, hi;
    thread_split(j->T, 1, index, n, &lo, &hi);
    for (int64_t t = lo; t < hi; t++) {
        int i = 0;
        while (i + 1 < j->l->n_shards && j->ids[t] >= j->l->shard[i + 1].row0)
            i++;
        const struct kern_shard *s = &j->l->shard[i];
        s->layout->decode_row(s->prep, j->ids[t] - s->row0, j->out + t * j->l->K);
    }
}

bool kern_linear_can_embed(const kern_linear *l)
{
    if (l->be) return l->be->linear_can_embed(l);
    for (int i = 0; i < l->n_shards; i++)
        if (l->shard[i].perm || l->shard[i].pre_scale) return false;
    return true;
}

void kern_linear_embed(kern_dev *d, const kern_linear *l, const int32_t *ids, int64_t T, float *out)
{
    KERN__ELSEWHERE(d, linear_embed(d, l, ids, T, out))
    rows_job j = {l, ids, T, out};
    team_run(d->team, rows_part, &j);
}
