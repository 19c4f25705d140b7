/* Private to kern: a linear as it is run. A qtensor is prepared once into a *layout* (layout.c),
 * its input is turned into *acts* once per step for all shards that agree (act.c), and a *row* of
 * the kernel list multiplies a range of 16-row panels. Every layout can decode one weight row to
 * f32, so the plain C twin runs from any of them and the canonical copy can be freed.
 *
 *   Y[m][n] = alpha[n] * sum_g scale[g][n] * sum_{k in g} (code[n][k] - zero[g][n]) * act[m][k]  +
 * bias[n]
 */
#ifndef KERN_LINEAR_H
#define KERN_LINEAR_H
#include "kern/kern.h"

#define KERN_PANEL 16  /* rows of W interleaved in every panel layout */
#define KERN_KPAD  32  /* K of a panel is padded to this with codes that contribute nothing */
#define KERN_MROWS 512 /* rows of X handled at a time: bounds the scratch */

/* Private part of the device. `thread` buffers are grown at load only. */
typedef struct kern__dev {
    kern_dev pub;                /* first */
    const struct kern__ops *ops; /* array of pointers is resolved at open */
    unsigned char *thread;       /* team_size buffers of thread_bytes each */
    size_t thread_bytes;
} kern__dev;
void *kern__thread_buffer(kern_dev *d, int index);
int kern__grow(kern_dev *d, size_t shared_bytes, size_t per_thread_bytes, err *e);

/* ---- layouts -----------------------------------------------------------------------------------
 */
typedef struct kern__prep { /* head of prepared memory of the panel layouts; 64-byte aligned */
    int64_t N, K, Kp, panels;
    int64_t group, groups;       /* weights per scale along K; number of groups (1 = one per row) */
    num_dtype code, scale_type;  /* scale_type NUM_NONE: no per-group scales, alpha only */
    num_dtype zero_type;         /* NUM_NONE, NUM_I8, NUM_F32 */
    int scale_bytes, zero_bytes; /* of one scale, one zero */
    int bits;                    /* of a stored code: 2, 3, 4, 8, 16, 32 */
    int bias;                    /* stored unsigned code = code + bias (integers), else 0 */
    size_t codes_off, panel_bytes, scales_off, zeros_off, alpha_off, total;
    float lut[16];   /* value of each nibble for the layouts of at most 4 bits */
    int8_t ilut[16]; /* the same times lut_mul as integers, when they are */
    float lut_mul;   /* 0 = the table is not integral */
} kern__prep;
#define KERN_PREP_BYTES 320

typedef struct kern__layout {
    const char *name;
    const char
        *as; /* the layout whose rows run from it: its own name, or w4p16 for narrower ones */
    /* NULL = can hold this weight. */
    const char *(*refuse)(const kern_wshape *w);
    size_t (*bytes)(const kern_wshape *w);
    /* `perm` [K] or NULL: column order in which the prepared weight is stored. */
    int (*begin)(const qtensor *q, const kern_wshape *w, void *dst, err *e);
    void (*fill)(const qtensor *q, const int32_t *perm, void *dst, int64_t panel_lo,
                 int64_t panel_hi);
    void (*decode_row)(const void *prep, int64_t n, float *out); /* [K], stored column order */
} kern__layout;
extern const kern__layout *const kern__layouts[];
extern const int kern__n_layouts;
const kern__layout *kern__layout_by_name(const char *name);
/* The layout for codes of this width whose rows are those of `as`; it may refuse the weight for
 * another reason. None: `as` itself. */
const kern__layout *kern__layout_held(const char *as, const kern_wshape *w);
void kern__wshape_of(const qtensor *q, kern_wshape *w);

/* ---- activations -------------------------------------------------------------------------------
 */
typedef enum kern__act_kind { ACT_F32, ACT_I8, ACT_BF16 } kern__act_kind;
typedef struct kern__act_plan {
    kern__act_kind kind;
    qaxis a;           /* emulated first; a 16-bit or f32 type = nothing to emulate */
    bool round_bf16;   /* input rounded to bf16 (forced, or the faster choice of auto) */
    int64_t group;     /* ACT_I8: codes per scale along K, a divisor of Kp or Kp itself */
    float div;         /* ACT_I8: scale = amax/div: 127 (auto), 127.5 (spec) */
    float fixed_scale; /* ACT_I8 static per tensor; 0 = dynamic */
    int terms;         /* ACT_BF16: 1 = rounded, 2 = hi + lo */
    bool row_scale;    /* ACT_BF16: codes in one exact term, times acts.scale[m] */
    int w_terms;       /* ACT_BF16: same for the weights */
    float in_scale, in_zero, in_global;
    const int32_t *perm;
    const float *pre_scale;
    int64_t K, Kp;
} kern__act_plan;

typedef struct kern__acts { /* prepared inputs of M rows */
    int64_t M, Kp, groups;
    float *f32;        /* ACT_F32: [M][Kp] */
    int8_t *i8;        /* ACT_I8: [M][Kp] */
    float *scale;      /* [M][groups] */
    int32_t *sum;      /* [M][groups] sum of codes */
    uint16_t *hi, *lo; /* ACT_BF16: [M][Kp] each */
} kern__acts;
size_t kern__acts_bytes(int64_t M, int64_t K);
void kern__acts_place(const kern__act_plan *p, int64_t M, void *mem, kern__acts *out);
/* One row of X into row m; tmp [Kp] floats. */
void kern__act_row(const kern__act_plan *p, const struct kern__ops *ops, const float *x, int64_t m,
                   const kern__acts *a, float *tmp);
/* The values that a row is multiplied as, in f32 (codes times scales): the definition of each rule.
 */
void kern__act_emulate(const kern__act_plan *p, float *v, int64_t K);
bool kern__act_equal(const kern__act_plan *a, const kern__act_plan *b);

/* ---- prepared linears --------------------------------------------------------------------------
 */
struct kern_shard {
    const kern__layout *layout;
    void *prep;
    size_t bytes;
    kern_wshape w;
    qspec spec;
    int64_t row0;  /* first output column */
    int32_t *perm; /* act-order: stored column j is canonical column perm[j] */
    float *pre_scale;
    const kern_linear_row *row[KERN_BUCKETS];
    kern__act_plan plan[KERN_BUCKETS];
};
struct kern_linear {
    const struct kern_backend *be; /* NULL: what follows is the CPU's; else `own` is */
    void *own;
    char *name;
    int n_shards;
    struct kern_shard shard[KERN_MAX_SHARDS];
    float *bias;
    int64_t N, K, Kp;
    size_t bytes;
    kern_choice choice[KERN_BUCKETS];
};
/* As kern_linear_make with one row forced in every bucket; ERR_UNSUPPORTED with the reason if the
 * row refuses: tests and bench walk the table with it. */
int kern__linear_make_row(kern_dev *d, const kern_linear_desc *desc, const kern_linear_row *row,
                          kern_linear **out, err *e);

/* Columns sorted by group (act-order), stable; refuses groups of unequal size. */
int kern__sort_columns(const qtensor *q, int32_t **out, const char *name, err *e);

/* kern_linear_run on rows row[0..M) of x (NULL: the first M). */
void kern__linear_run_rows(kern_dev *d, const kern_linear *l, const float *x, int64_t ldx,
                           const int32_t *row, int64_t M, float *y, int64_t ldy);

/* What a row works on: one shard, prepared inputs, panels [lo,hi). */
typedef struct kern__part {
    const struct kern_shard *s;
    const kern__act_plan *plan;
    const kern__acts *a;
    float *y; /* column 0 of this shard */
    int64_t ldy;
    void *tmp; /* the last part of this thread's buffer */
} kern__part;
/* A thread's buffer in a product: inputs that it prepares for itself (kern__own_bytes), one row of
 * input, what a row of the list needs. */
size_t kern__part_bytes(int64_t Kp);
size_t kern__own_bytes(int64_t Kp);
/* Panels [lo,hi), counted over shards [s0,s1), of prepared inputs; bias included. */
void kern__linear_panels(const kern_linear *l, int bucket, int s0, int s1, const kern__acts *a,
                         float *y, int64_t ldy, int64_t lo, int64_t hi, void *tmp);
bool kern__plan_spec_only(const kern_linear_desc *d, int shard);

/* Rows, by file. */
extern const kern_linear_row kern__row_ref;
extern const kern_linear_row kern__rows_avx2[], kern__rows_avx512[];
extern const kern_linear_row kern__rows_vnni[], kern__rows_amx[], kern__rows_avx2_int8[];
#endif
