/* Private to kern/gpu: a GPU as the rest of the program sees it. The program never links CUDA: all
 * that touches the device goes through the plug-in's table (kern/cuda/api.h).
 *
 *   memory    each allocation has a range of addresses in which nothing can be read or written (a
 *             handle). A handle of lanes counts four bytes a lane whatever the lanes are on the
 *             device, so that pointer arithmetic of the model holds; of other memory, bytes.
 *   step      ops are written down (gpu_rec), arrays of the program are noted as inputs and copied
 *             to a stage that the device reads; at the end neighbours are fused (fuse.c), all is
 *             launched, once known as a graph. A step with a name is kept and run again from the
 *             arrays' new contents.
 *   errors    the first of a step is kept and comes out of its end. */
#ifndef KERN_GPU_GPU_H
#define KERN_GPU_GPU_H
#include <pthread.h>
#include "kern/backend.h"
#include "kern/gpu/convert.h"
#include "kern/gpu/tuned.h"

typedef struct gpu_block {
    uintptr_t va, end;
    char *dev;
    bool lanes;
    gpu_type type;
} gpu_block;

typedef struct gpu_rec { /* one op */
    gpu_op op;
    size_t at, bytes; /* of its arguments in gpu_step.args */
} gpu_rec;

typedef struct gpu_chunk { /* of a stage */
    unsigned char *host, *dev;
    size_t used, room;
} gpu_chunk;

typedef enum gpu_input_kind { GPU_IN_BYTES, GPU_IN_SEQS } gpu_input_kind;
typedef struct gpu_input {
    gpu_input_kind kind;
    const void *host; /* bytes, or kern_seq [n] */
    int64_t n;
    int page_tokens, max_pages, share_pages; /* SEQS */
    unsigned char *stage, *dev;
    gpu_seqs seqs;
} gpu_input;

typedef struct gpu_output {
    const void *dev;
    void *host;
    size_t bytes;
} gpu_output;

typedef struct gpu_step {
    uint64_t key;
    int64_t T;
    bool sums; /* over several GPUs: these begin it together */
    gpu_rec *ops;
    int n_ops, cap_ops;
    unsigned char *args;
    size_t args_used, args_room;
    gpu_input *inputs;
    int n_inputs, cap_inputs;
    gpu_output *outputs;
    int n_outputs, cap_outputs;
    gpu_chunk *chunks;
    int n_chunks;
    void *graph;
} gpu_step;

typedef struct gpu_dev {
    kern_dev pub;   /* first */
    kern_dev *host; /* prepares weights */
    void *lib;
    const gpu_api *api;
    gpu_facts facts;
    int index;
    char name[32], what[128];
    void *stream;
    gpu_block *blocks; /* by address */
    int n_blocks, cap_blocks;
    struct gpu_pool { /* constants and weights: never freed one by one */
        void **mem;
        int n, cap;
        char *at;
        size_t left;
    } pool;
    float *act_scratch; /* [act_rows][act_k] */
    int64_t act_rows, act_k, experts_k;
    struct gpu_packed_room { /* what products of packed weights need beside these */
        int64_t k;           /* the widest of them */
        void *work;          /* of wide, for so many rows */
        int64_t rows;
        void *x;      /* bf16 [x_rows, k]: inputs that come otherwise */
        float *scale; /* [x_rows] of codes of them */
        int64_t x_rows;
    } packed;
    struct gpu_experts_room { /* of experts in packed weights */
        int64_t k, slots;     /* the widest of them; slots of a step */
        int E;                /* the most of them */
        bool copies;          /* inputs of some are made anew */
        void *work;           /* of wide_experts */
        void *x;              /* bf16 [slots, k] */
        float *scale;         /* [slots] */
    } experts;
    tuned_table tuned;
    struct gpu_trial { /* while plans are measured: zeros = as chosen */
        rows_plan rows;
        wide_plan wide;
        int experts; /* 1 = small, 2 = wide */
    } trial;
    struct kern_tuned *found; /* by kern_tune */
    int n_found;
    const struct gpu_layout *only; /* tests: beside it, only the last layout is asked */
    struct gpu_dense *dense;       /* dense.c; NULL without such linears */
    struct gpu_lt_room *lt;        /* lt.c; NULL where nobody has asked for it */
    void *attention_work;
    struct gpu_top_room { /* gpu__reserve_top */
        void *work, *out;
        int64_t rows, lanes;
    } top;
    void *comm;                  /* of several GPUs that run one model; NULL where it is alone */
    pthread_mutex_t launching;   /* held while a step is launched */
    unsigned long long *clipped; /* on the device */
    unsigned long long *clipped_seen; /* pinned */
    gpu_step step;                    /* the one being written down, if it has no name */
    gpu_step **known;
    int n_known;
    gpu_step *now; /* between begin and end */
    bool replay;
    int64_t fused; /* ops saved by fusing, of all lists */
    int64_t launched[GPU_N_OPS];
    err failure;
    bool failed;
    struct gpu_profile *profile; /* NULL: operators are not timed */
} gpu_dev;

static inline gpu_dev *gpu__of(const kern_dev *d)
{
    return (gpu_dev *)(void *)(uintptr_t)d;
}

/* open.c */
void gpu__close(kern_dev *d);
int gpu__reserve_attention(kern_dev *d, int64_t max_rows, int H, int v_lanes, err *e);
int gpu__host_alloc(kern_dev *d, void **out, size_t n, err *e);
void gpu__host_free(kern_dev *d, void *p);
/* memory.c */
void gpu__forget_handles(gpu_dev *g);
extern const struct kern_backend gpu__backend;
bool gpu__memory(kern_dev *d, uint64_t *all, uint64_t *left);
int gpu__alloc(kern_dev *d, void **out, size_t n, err *e);
int gpu__lanes(kern_dev *d, float **out, int64_t n, kern_lanes_kind kind, kern_act act, err *e);
void gpu__free(kern_dev *d, void *p);
int gpu__zero(kern_dev *d, void *p, size_t n, err *e);
int gpu__constant(kern_dev *d, float **p, int64_t n, err *e);
int gpu__table(kern_dev *d, qtensor *t, err *e);
/* Device memory that lives as long as the device, 256-byte aligned; from: what it holds, or NULL.
 */
int gpu__keep(gpu_dev *g, void **out, const void *from, size_t n, err *e);
/* Device memory for itself. */
int gpu__device_alloc(gpu_dev *g, void **out, size_t n, err *e);
/* Turns the plug-in's words into an error. */
int gpu__check(gpu_dev *g, const char *what, const char *why, err *e);
/* What a handle stands for. Fails the step where p is none. x NULL: a NULL lane pointer. */
gpu_x gpu__x(gpu_dev *g, const float *p);
void *gpu__raw(gpu_dev *g, const void *p);
const gpu_block *gpu__find(const gpu_dev *g, const void *p);

/* ops.c */
int gpu__reserve_top(kern_dev *d, int64_t max_rows, int64_t V, err *e);

/* step.c */
bool gpu__step_begin(kern_dev *d, int64_t T, uint64_t key);
int gpu__step_flush(kern_dev *d, err *e);
int gpu__step_end(kern_dev *d, err *e);
void gpu__fetch(kern_dev *d, const float *x, int64_t n, float *host);
/* Bytes of the device that the program gets at the end. */
void gpu__output(gpu_dev *g, const void *dev, size_t bytes, void *host);
uint64_t gpu__clipped(const kern_dev *d);
void gpu__push(gpu_dev *g, gpu_op op, const void *args, size_t bytes);
/* Device address of an array of the program, n elements of 4 bytes; NULL stays NULL. */
const void *gpu__input(gpu_dev *g, const void *host, int64_t n);
/* The same of int32, or of a handle to such. */
const int32_t *gpu__ints(gpu_dev *g, const int32_t *p, int64_t n);
/* page_tokens 0: without page tables. */
gpu_seqs gpu__seqs(gpu_dev *g, const kern_seq *seqs, int n, int page_tokens);
void gpu__fail(gpu_dev *g, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void gpu__step_free(gpu_dev *g, gpu_step *s);
/* ranks.c */
int gpu__join(kern_dev *const *d, int n, err *e);
void gpu__leave(kern_dev *d);
void gpu__all_reduce(kern_dev *d, float *x, int64_t n);

/* profile.c: launches the operators of a step between clocks; reads these after the sync. */
int gpu__profile(kern_dev *d, bool on, err *e);
int gpu__profile_lines(const kern_dev *d, const kern_op_time **out);
/* Times steps instead, in one line. */
int gpu__profile_whole(gpu_dev *g, err *e);
int gpu__profile_launch(gpu_dev *g, const gpu_step *s, err *e);
int gpu__profile_read(gpu_dev *g, const gpu_step *s, err *e);
/* candidates.c */
int gpu__candidates(void);
const char *gpu__candidate_name(int i);
int gpu__candidate_of(const kern_linear *l);
int gpu__linear_make_as(kern_dev *d, const kern_linear_desc *desc, int i, kern_linear **out,
                        err *e);
/* tune.c */
struct kern_tune_opts;
struct kern_tuned;
int gpu__tune(kern_dev *d, const kern_linear_desc *desc, int E, const struct kern_tune_opts *o,
              err *e);
int gpu__tuned_lines(const kern_dev *d, const struct kern_tuned **out);
int gpu__tune_save(kern_dev *d, const char **path, err *e);
void gpu__plans_used(const kern_dev *d, char *out, size_t cap);
/* roof.c */
int gpu__measure_roof(kern_dev *d, size_t bytes, kern_roof *out, err *e);
/* Room in s->args, which may move: where it is from there. */
size_t gpu__place_args(gpu_step *s, size_t bytes);
/* fuse.c: neighbours of the list become one. */
void gpu__fuse(gpu_dev *g, gpu_step *s);

/* linear.c */
int gpu__linear_make(kern_dev *d, const kern_linear_desc *desc, kern_linear *l, err *e);
void gpu__linear_drop(kern_dev *d, kern_linear *l);
void gpu__linear_run(kern_dev *d, const kern_linear *l, const float *x, int64_t ldx, int64_t M,
                     float *y, int64_t ldy);
void gpu__linear_unpack(const kern_linear *l, float *out);
bool gpu__linear_can_embed(const kern_linear *l);
void gpu__linear_embed(kern_dev *d, const kern_linear *l, const int32_t *ids, int64_t T,
                       float *out);
int gpu__reserve(kern_dev *d, int64_t max_rows, int64_t max_k, int64_t max_n, err *e);
int gpu__experts_make(kern_dev *d, kern_linear **expert, int E, void **own, err *e);
void gpu__experts_drop(kern_dev *d, void *own);
void gpu__experts_run(kern_dev *d, const void *own, const float *in, int64_t ldin,
                      const int32_t *row, const int32_t *first, int64_t slots, float *y,
                      int64_t ldy);
#endif
