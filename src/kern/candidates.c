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

bool kern_candidate_chosen(const kern_dev *d, int i, const kern_linear *l, int64_t M)
{
    if (d->be) return d->be->candidate_of(l) == i;
    return !strcmp(kern_linear_choice(l, kern_bucket(M))->row, kern_linear_rows[i]->name);
}
