/* Private to kern/gpu: plans that were measured, by device and shape. A table is text, one entry a
 * line:
 *
 *   SM SMS OPERATOR FORMAT N K M PLAN US DEVICE
 *   90 132 wide int4-128 28672 4096 16 16/4/1/1 26.3 NVIDIA H200
 *
 * SM, SMS (compute capability, multiprocessors) and DEVICE say which GPU it is for. US is the
 * median time in microseconds, "-" = not measured. M is the most rows that the entry is for, one of
 * tuned_rows (experts: how many there are).
 *
 *   OPERATOR   PLAN
 *   rows       groups/chunks/split of operator rows
 *   wide       tokens/groups/split/share of operator wide
 *   dense      the row of that layout's list that multiplies fastest ("cuda-rows", "cuda-lt")
 *   packed     the same of layout packed
 *   experts    slots of an expert, on average, from which wide_experts is faster than small_experts
 *
 * The table of the H200 is part of the program (tuned_h200.inc); one that `tare bench --tune` wrote
 * lies in the user's cache folder and goes before it. Entries of other devices are passed over. The
 * first line of a file is TUNED_HEAD with the version, which changes where plans that were measured
 * mean something else or kernels have become others. A file with a fault is not used at all. */
#ifndef KERN_GPU_TUNED_H
#define KERN_GPU_TUNED_H
#include "kern/cuda/api.h"
#include "kern/kern.h"

#define TUNED_HEAD      "tare tuned plans "
#define TUNED_VERSION   "2"
#define TUNED_MOST_FILE ((size_t)2 << 20)
#define TUNED_ROWS      11
extern const int tuned_rows[TUNED_ROWS]; /* 1, 8, 16, 32, ... 4096 */
/* Index of the entry for M rows: the first that has as many, else the last. */
int tuned_at(int64_t M);

typedef enum tuned_op {
    TUNED_OP_rows,
    TUNED_OP_wide,
    TUNED_OP_dense,
    TUNED_OP_packed,
    TUNED_OP_experts,
    TUNED_OPS
} tuned_op;
extern const char *const tuned_op_names[TUNED_OPS];

typedef struct tuned_entry {
    int sm, sms;
    tuned_op op;
    char format[24];
    int64_t N, K, M;
    char plan[32];
    double us; /* 0 = not measured */
    char device[96];
    const char *file; /* lent; NULL = part of the program */
    int line;
    bool refused; /* warned of */
} tuned_entry;

typedef struct tuned_table {
    tuned_entry *v;
    int n, cap;
    char *file;                       /* of the user; NULL = there is none */
    int by_user, by_shipped, by_rule; /* linears, by the entries that they use */
} tuned_table;

/* One line; NULL or why not. */
const char *tuned_parse(const char *line, tuned_entry *out);
/* Adds the entries of a text. Each line that is none, or that says again what another has said, is
 * warned of, by file and line; returns how many were. Then nothing is added, nor from a text of
 * another kind or version. */
int tuned_read(tuned_table *t, const char *text, size_t n, const char *file);
/* Adds or replaces. */
void tuned_put(tuned_table *t, const tuned_entry *e);
/* The text of all. */
void tuned_write(const tuned_table *t, buf *out);
void tuned_free(tuned_table *t);
/* $XDG_CACHE_HOME/tare/tuned, else ~/.cache/tare/tuned; xmalloc, NULL = no such folder is known. */
char *tuned_path(void);

/* What the device has: shipped entries, then those of the user. */
void tuned_open(tuned_table *t, const gpu_facts *f);
/* The last such entry, NULL = none. */
tuned_entry *tuned_find(const tuned_table *t, tuned_op op, const char *format, int64_t N, int64_t K,
                        int64_t M);

/* Plans of a weight for all numbers of rows; zeros where the table has none: the rule then. An
 * entry that the kernels do not have is warned of once and left out. */
void tuned_plans_of_rows(tuned_table *t, const gpu_api *api, rows_format f, bool blocks, int64_t N,
                         int64_t K, rows_plan out[TUNED_ROWS]);
void tuned_plans_of_wide(tuned_table *t, const gpu_api *api, small_format f, int64_t N, int64_t K,
                         wide_plan out[TUNED_ROWS]);
int tuned_experts(tuned_table *t, small_format f, int64_t N, int64_t K, int E, int rule);
void tuned_refuse(tuned_entry *e, const char *why);

const char *tuned_format_of_rows(rows_format f, bool blocks);
const char *tuned_format_of_packed(small_format f);
void tuned_rows_text(rows_plan p, char out[32]);
void tuned_wide_text(wide_plan p, char out[32]);
/* Counts a linear by its entries, of two operators (the second may be TUNED_OPS). */
void tuned_count(tuned_table *t, tuned_op a, const char *format_a, tuned_op b, const char *format_b,
                 int64_t N, int64_t K);
/* "60 by the table shipped for NVIDIA H200, 5 by /home/u/.cache/tare/tuned, 2 by the default
 * rules";
 * "" where no linear has plans. */
void tuned_counted(const tuned_table *t, const char *device, char *out, size_t cap);
/* "shipped: 28672x4096 M 16: 16/4/1/1" of a bucket of M, entries of two operators (the second
 * may be TUNED_OPS); "rule" without one. */
void tuned_text(const tuned_table *t, tuned_op a, const char *format_a, tuned_op b,
                const char *format_b, int64_t N, int64_t K, int bucket, char *out, size_t cap);
#endif
