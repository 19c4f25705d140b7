/* Private to kern: a device that is not the CPU, as a table of functions. Each public function of
 * kern.h hands over to the table of its device where it has one (kern_dev.be); signatures and
 * meanings are those of kern.h. Addresses that such a device gives out are handles: they may be
 * moved on by lanes like any pointer and must never be read by the program. */
#ifndef KERN_BACKEND_H
#define KERN_BACKEND_H
#include "kern/kern.h"

struct kern_tune_opts; /* candidates.h */
struct kern_tuned;
struct kern_backend {
    const char *name;
    void (*close)(kern_dev *d);
    bool (*memory)(kern_dev *d, uint64_t *all, uint64_t *left);
    int (*alloc)(kern_dev *d, void **out, size_t n, err *e);
    int (*lanes)(kern_dev *d, float **out, int64_t n, kern_lanes_kind kind, kern_act act, err *e);
    void (*free)(kern_dev *d, void *p);
    int (*host_alloc)(kern_dev *d, void **out, size_t n, err *e);
    void (*host_free)(kern_dev *d, void *p);
    int (*zero)(kern_dev *d, void *p, size_t n, err *e);
    int (*constant)(kern_dev *d, float **p, int64_t n, err *e);
    int (*table)(kern_dev *d, qtensor *t, err *e);
    int (*reserve)(kern_dev *d, int64_t max_rows, int64_t max_k, int64_t max_n, err *e);
    int (*reserve_attention)(kern_dev *d, int64_t max_rows, int H, int v_lanes, err *e);
    bool (*step_begin)(kern_dev *d, int64_t T, uint64_t key);
    int (*step_flush)(kern_dev *d, err *e);
    int (*step_end)(kern_dev *d, err *e);
    void (*fetch)(kern_dev *d, const float *x, int64_t n, float *host);
    int (*reserve_top)(kern_dev *d, int64_t max_rows, int64_t V, err *e);
    void (*top_rows)(kern_dev *d, const float *x, int64_t V, int64_t T, kern_top *out);
    uint64_t (*clipped)(const kern_dev *d);
    int (*profile)(kern_dev *d, bool on, err *e);
    int (*profile_lines)(const kern_dev *d, const kern_op_time **out);
    int (*measure_roof)(kern_dev *d, size_t bytes, kern_roof *out, err *e);

    int (*linear_make)(kern_dev *d, const kern_linear_desc *desc, kern_linear *l, err *e);
    void (*linear_drop)(kern_dev *d, kern_linear *l);
    void (*linear_run)(kern_dev *d, const kern_linear *l, const float *x, int64_t ldx, int64_t M,
                       float *y, int64_t ldy);
    void (*linear_unpack)(const kern_linear *l, float *out);
    bool (*linear_can_embed)(const kern_linear *l);
    void (*linear_embed)(kern_dev *d, const kern_linear *l, const int32_t *ids, int64_t T,
                         float *out);
    int (*candidates)(void); /* candidates.h */
    const char *(*candidate_name)(int i);
    int (*candidate_of)(const kern_linear *l);
    int (*linear_make_as)(kern_dev *d, const kern_linear_desc *desc, int i, kern_linear **out,
                          err *e);
    int (*tune)(kern_dev *d, const kern_linear_desc *desc, int E, const struct kern_tune_opts *o,
                err *e);
    int (*tuned_lines)(const kern_dev *d, const struct kern_tuned **out);
    int (*tune_save)(kern_dev *d, const char **path, err *e);
    void (*plans_used)(const kern_dev *d, char *out, size_t cap);
    int (*experts_make)(kern_dev *d, kern_linear **expert, int E, void **own, err *e);
    void (*experts_drop)(kern_dev *d, void *own);
    void (*experts_run)(kern_dev *d, const void *own, const float *in, int64_t ldin,
                        const int32_t *row, const int32_t *first, int64_t slots, float *y,
                        int64_t ldy);

    void (*kv_store)(kern_dev *d, const kern_kv_layer *kv, const float *k, int64_t ldk,
                     const float *v, int64_t ldv, const int32_t *slot, int64_t T);
    void (*attention)(kern_dev *d, const kern_attn_args *a);
    void (*rmsnorm)(kern_dev *d, const float *x, const float *w, float eps, int64_t T, int64_t K,
                    float *out);
    void (*add_rmsnorm)(kern_dev *d, float *x, const float *y, const float *w, float eps, int64_t T,
                        int64_t K, float *out);
    void (*add_scaled)(kern_dev *d, float *x, const float *y, float s, int64_t n);
    void (*head_rmsnorm)(kern_dev *d, float *x, int64_t ld, int H, int D, const float *w, float eps,
                         int64_t T);
    void (*rope)(kern_dev *d, float *q, int64_t ldq, int H, float *k, int64_t ldk, int Hk, int D,
                 int rot_dim, const float *cosv, const float *sinv, int64_t T, bool pairs);
    void (*rope_fill)(kern_dev *d, const float *inv, int64_t half, double attention,
                      const int32_t *pos, int64_t row0, int64_t T, float *cosv, float *sinv);
    void (*glu)(kern_dev *d, kern_glu act, bool gated, const float *x, int64_t ld, int64_t F,
                int64_t T, float *out, int64_t ldo);
    void (*layernorm)(kern_dev *d, const float *x, const float *w, const float *b, float eps,
                      int64_t T, int64_t K, float *out);
    void (*head_layernorm)(kern_dev *d, float *x, int64_t ld, int H, int D, const float *w,
                           float eps, int64_t T);
    void (*copy_rows)(kern_dev *d, const float *from, int64_t ldf, const int32_t *ids, float *to,
                      int64_t ldt, int64_t n, int64_t rows);
    void (*scale)(kern_dev *d, float *x, float s, int64_t n);
    void (*softcap)(kern_dev *d, float *x, float cap, int64_t n);
    void (*gate)(kern_dev *d, float *x, int64_t ldx, const float *g, int64_t ldg, int64_t n,
                 int64_t T, bool by_row);
    void (*scale_far)(kern_dev *d, float *x, int64_t ld, int64_t n, const int32_t *pos, float beta,
                      int64_t from, int64_t T);
    void (*gated_rmsnorm)(kern_dev *d, const float *x, const float *gate, int64_t ldg, int H, int D,
                          const float *w, float eps, int64_t T, float *out);
    void (*head_matmul)(kern_dev *d, const qtensor *w, const float *x, int64_t ldx, int64_t ldh,
                        int64_t T, float *out, int64_t ldo, int64_t ldoh);
    void (*route)(kern_dev *d, const kern_route_args *a, int64_t T);
    void (*route_sort)(kern_dev *d, const int32_t *expert, int64_t T, int top_k, int E,
                       int32_t *row, int32_t *first, int32_t *slot);
    void (*route_combine)(kern_dev *d, const float *y, int64_t ldy, const float *weight,
                          const int32_t *slot, int top_k, int64_t T, int64_t N, bool add,
                          float *out);
    void (*conv_silu)(kern_dev *d, float *x, int64_t ld, int64_t C, int W, const float *w,
                      const kern_seq *seqs, int n_seqs, const kern_states *state);
    void (*gated_delta)(kern_dev *d, const kern_delta_args *a);
    void (*delta_gates)(kern_dev *d, const float *ba, int64_t ld, int Hv, const float *a_log,
                        const float *dt_bias, int64_t T, float *g, float *beta);
    void (*embed)(kern_dev *d, const qtensor *table, const int32_t *ids, int64_t T, float *out);

    /* Devices 0 .. n-1 run one model from here on; again after a failure. */
    int (*join)(kern_dev *const *d, int n, err *e);
    /* From any thread: sums of this device that wait for others end, failed. */
    void (*leave)(kern_dev *d);
    void (*all_reduce)(kern_dev *d, float *x, int64_t n);
};

/* ranks.c */
int kern__ranks_open(kern_dev **out, const kern_opts *o, err *e);
void kern__ranks_close(struct kern_ranks *r);
/* Waits for all ranks; false: one has failed. */
bool kern__ranks_meet(kern_dev *d);
bool kern__ranks_failed(const kern_dev *d);
int kern__ranks_error(const kern_dev *d, err *e);

/* kern/gpu: "cuda", "cuda:N", "emulated". */
int kern__gpu_open(kern_dev **out, const kern_opts *o, err *e);

/* The call goes to the device's table where it has one. */
#define KERN__ELSEWHERE(d, call)                                                                   \
    if ((d)->be) {                                                                                 \
        (d)->be->call;                                                                             \
        return;                                                                                    \
    }
#endif
