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

/* ---- tuning -------------------------------------------------------------------------------------
 * A GPU's kernels have plans for a shape: tiles, how many blocks share a sum, which kernel from how
 * many rows on. Each that fits is run and timed, what it computes is held against the others. */
typedef struct kern_tune_opts {
    const int64_t *rows; /* numbers of rows of input, rounded up to those of the table */
    int n_rows;          /* 0 = all of the table */
    size_t copy_bytes;   /* copies of a weight take turns until they are as many bytes */
} kern_tune_opts;
typedef struct kern_tuned {                      /* the best of one number of rows */
    char op[12], format[24], plan[32], rule[32]; /* rule: what is taken without a table */
    int64_t N, K, M;
    double us, rule_us; /* medians; 0 = the rule's was not run */
    int tried, wrong;   /* plans; those that computed something else, or did not run */
} kern_tuned;
/* One linear, or E experts alike (desc->expert). What was found is used from then on. A weight
 * whose kernels have no plans finds nothing. ERR_UNSUPPORTED: a device without plans. */
int kern_tune(kern_dev *d, const kern_linear_desc *desc, int E, const kern_tune_opts *o, err *e);
/* What was found so far. */
int kern_tuned_lines(const kern_dev *d, const kern_tuned **out);
/* Puts it into the user's table, whose path is returned. */
int kern_tune_save(kern_dev *d, const char **path, err *e);
/* How many of the linears made have their plans from where; "" where there are none to have. */
void kern_plans_used(const kern_dev *d, char *out, size_t cap);
#endif
