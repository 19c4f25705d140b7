/* Private to `tare bench`. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H
#include "cli/options.h"
#include "kern/kern.h"

#define BENCH_LIST   16 /* batches, contexts */
#define BENCH_REPEAT 64

/* Shapes of published models: what their config.json says of sizes and kinds. */
typedef struct bench_shape {
    const char *name, *config;
} bench_shape;
extern const bench_shape bench_shapes[];
extern const int bench_n_shapes;
/* Text of the config of a known name, or of a file NAME.json; xmalloc. */
int bench_shape_text(const char *name, char **out, err *e);

typedef struct bench_ops { /* operators of profiled steps; v NULL = not profiled */
    engine_op_time *v;
    int n;
    int64_t steps;
} bench_ops;

typedef struct bench_row { /* one batch and context */
    int64_t batch, context;
    bool prefilled;
    double ttft_ms, first_all_ms, prefill; /* mean of the batch; the last one's; tokens/s */
    double tpot_ms, forward_ms, decode;    /* a step; of it the model; tokens/s */
    double weights_gbs, step_gbs;          /* weights / step; with K and V; 0 = not told */
    bench_ops ops[2];                      /* of decoding, of prompts */
} bench_row;

typedef struct bench_plan {
    int64_t batch[BENCH_LIST], context[BENCH_LIST], output;
    int n_batch, n_context, repeat;
    bool prefill, profile;
    const char *scheme; /* of a shape, as given; NULL = bf16 */
} bench_plan;

typedef struct bench_report {
    engine_info info;
    bool shape;
    kern_roof roof;
    bench_row *rows;
    int n_rows;
} bench_report;

int bench_plan_of(const opts *o, bench_plan *out, err *e);
/* Measures one row. */
int bench_measure(engine *en, const bench_plan *p, bool shape, bench_row *row, err *e);
/* --kernels: measures and prints. */
int bench_kernels(const opts *o, const bench_plan *p, const char *shape, buf *out, err *e);
/* --tune: measures, keeps what it finds, and prints. */
int bench_tune(const opts *o, const bench_plan *p, const char *shape, buf *out, err *e);
void bench_print(const opts *o, const bench_plan *p, const bench_report *r, buf *out);
#endif
