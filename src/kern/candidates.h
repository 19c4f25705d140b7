/* The ways to multiply by a weight, for measuring each: rows of the CPU's list, layouts of a GPU's.
 */
#ifndef KERN_CANDIDATES_H
#define KERN_CANDIDATES_H
#include "kern/kern.h"

int kern_candidates(const kern_dev *d);
const char *kern_candidate_name(const kern_dev *d, int i);
/* kern_linear_make by way i alone; ERR_UNSUPPORTED: why it refuses this weight. */
int kern_linear_make_as(kern_dev *d, const kern_linear_desc *desc, int i, kern_linear **out,
                        err *e);
/* Would kern_linear_make take way i for M rows? l: what it made. */
bool kern_candidate_chosen(const kern_dev *d, int i, const kern_linear *l, int64_t M);
#endif
