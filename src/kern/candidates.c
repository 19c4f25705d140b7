/* See candidates.h. */
#include "kern/candidates.h"
#include <string.h>
#include "kern/backend.h"
#include "kern/linear.h"

int kern_candidates(const kern_dev *d)
{
    return d->be ? d->be->candidates() : kern_n_linear_rows;
}

const char *kern_candidate_name(const kern_dev *d, int i)
{
    return d->be ? d->be->candidate_name(i) : kern_linear_rows[i]->name;
}

int kern_linear_make_as(kern_dev *d, const kern_linear_desc *desc, int i, kern_linear **out, err *e)
{
    if (d->be) return d->be->linear_make_as(d, desc, i, out, e);
    return kern__linear_make_row(d, desc, kern_linear_rows[i], out, e);
}

int kern_tune(kern_dev *d, const kern_linear_desc *desc, int E, const kern_tune_opts *o, err *e)
{
    if (!d->be)
        return err_set(e, ERR_UNSUPPORTED,
                       "the kernels of a CPU have no plans to measure; --device cuda names a GPU");
    return d->be->tune(d, desc, E, o, e);
}

int kern_tuned_lines(const kern_dev *d, const kern_tuned **out)
{
    *out = NULL;
    return d->be ? d->be->tuned_lines(d, out) : 0;
}

int kern_tune_save(kern_dev *d, const char **path, err *e)
{
    *path = NULL;
    return d->be ? d->be->tune_save(d, path, e)
                 : err_set(e, ERR_UNSUPPORTED, "the kernels of a CPU have no plans to keep");
}

void kern_plans_used(const kern_dev *d, char *out, size_t cap)
{
    *out = 0;
    if (d->be) d->be->plans_used(d, out, cap);
}

bool kern_candidate_chosen(const kern_dev *d, int i, const kern_linear *l, int64_t M)
{
    if (d->be) return d->be->candidate_of(l) == i;
    return !strcmp(kern_linear_choice(l, kern_bucket(M))->row, kern_linear_rows[i]->name);
}
