/* Private to kern/gpu: the lists of a GPU's linears. A layout is one file and one row in
 * gpu_layouts (linear.c), in order of preference. */
#ifndef KERN_GPU_LINEAR_H
#define KERN_GPU_LINEAR_H
#include "kern/forecast.h"
#include "kern/gpu/gpu.h"

typedef struct gpu_linear gpu_linear;
typedef struct gpu_linear_row {
    const char *name; /* "cuda-small-w4" */
    /* NULL = takes this bucket of M. Reads shapes and types only. */
    const char *(*refuse)(const gpu_dev *g, const kern_linear_desc *d, int bucket);
    void (*run)(gpu_dev *g, const gpu_linear *l, int bucket, const float *x, int64_t ldx, int64_t M,
                float *y, int64_t ldy);
} gpu_linear_row;

typedef struct gpu_tuned_key {
    tuned_op row, plan; /* which row of the list; how its operator does it */
    char row_format[24], plan_format[24];
} gpu_tuned_key;

typedef struct gpu_layout {
    const char *name;
    const gpu_linear_row *const *rows; /* in order, NULL ends */
    const char *(*refuse)(const gpu_dev *g, const kern_linear_desc *d);
    /* Whether another that takes the weights goes before it, but for the last. NULL = never. */
    bool (*late)(const gpu_dev *g, const kern_linear_desc *d);
    /* Fills l->own and adds to l->bytes; what was made is dropped also on error. */
    int (*make)(gpu_dev *g, const kern_linear_desc *d, gpu_linear *l, err *e);
    void (*drop)(gpu_dev *g, void *own);
    void (*unpack)(gpu_dev *g, const gpu_linear *l, float *out); /* [N,K] to host memory */
    bool (*can_embed)(const gpu_linear *l);                      /* NULL = never */
    void (*embed)(gpu_dev *g, const gpu_linear *l, const int32_t *ids, int64_t T, gpu_x out);
    /* What tables of plans (tuned.h) call it: its operators and formats there; false = they have
     * no such linear. NULL = never. */
    bool (*tuned)(const gpu_linear *l, gpu_tuned_key *out);
    /* What the input becomes, and a finer name of the layout. */
    void (*choice)(const gpu_linear *l, int bucket, kern_choice *out);
} gpu_layout;
extern const gpu_layout gpu__layout_packed; /* packed.c */
extern const gpu_layout gpu__layout_dense;  /* dense.c */
extern const gpu_layout *const gpu_layouts[];
extern const int gpu_n_layouts;

struct gpu_linear {
    gpu_dev *dev;
    const gpu_layout *layout;
    const gpu_linear_row *row[KERN_BUCKETS];
    const gpu_linear_row *tuned[TUNED_ROWS]; /* go before it; NULL = the table has none */
    void *own;                               /* the layout's */
    int64_t N, K;
    size_t bytes;
};

/* Experts, whose way is the first member of what they keep. */
typedef struct gpu_experts_way {
    void (*run)(gpu_dev *g, const void *own, const float *in, int64_t ldin, const int32_t *row,
                const int32_t *first, int64_t slots, float *y, int64_t ldy);
} gpu_experts_way;
/* packed.c: name of the format of the first part, in tables of plans. */
const char *gpu__packed_format(const gpu_linear *l);
uint64_t gpu__packed_forecast(gpu_dev *g, const kern_linear_desc *d, kern_forecast *f);
/* linear.c: the layout that would be made, by shapes and types. */
const gpu_layout *gpu__layout_for(gpu_dev *g, const kern_linear_desc *d);
/* experts.c: all in the layout packed. */
int gpu__packed_experts_make(gpu_dev *g, kern_linear **expert, int E, void **own, err *e);
/* Room for steps of at most so many slots; experts made later widen it. */
int gpu__packed_experts_reserve(gpu_dev *g, int64_t max_slots, err *e);

/* Room for steps of at most so many rows; packed linears made later widen it. */
int gpu__packed_reserve(gpu_dev *g, int64_t max_rows, err *e);
/* Room for the inputs of dense linears; after the last of them was made. */
int gpu__dense_reserve(gpu_dev *g, int64_t max_rows, int64_t max_k, err *e);
void gpu__dense_close(gpu_dev *g);
#endif
