/* The device: what runs numbers. A kern_dev is one backend instance ("cpu" now; "cuda" is opened at
 * run time later). Ops take plain device pointers (host pointers on the CPU) and element type f32
 * for activations on the CPU. Every op has an ordered list of rows {name, needs, refuse, run}; the
 * first row that accepts wins; the plain C twin is last and refuses nothing. Row-major everywhere.
 * Shape letters: T rows (tokens) of the step, H heads, Hk KV heads, D head dim, K in, N out. */
#ifndef KERN_KERN_H
#define KERN_KERN_H
#include "base/thread.h"
#include "base/cpu.h"
#include "num/qtensor.h"

/* How the input of a quantized linear is treated (DESIGN idea 11). SPEC: exactly as spec.a of the
 * checkpoint says (16-bit types in f32). AUTO: as SPEC, but 16-bit inputs may become int8 in groups
 * along K (small batches) or bf16 (batches of 9 and more, AMX) where that is the faster kernel.
 * F32, BF16 (input rounded to bf16), INT8 (per group): forced for every linear whatever the
 * checkpoint says. */
typedef enum kern_act {
    KERN_ACT_SPEC,
    KERN_ACT_AUTO,
    KERN_ACT_F32,
    KERN_ACT_BF16,
    KERN_ACT_INT8,
    KERN_ACT_COUNT
} kern_act;
int kern_act_parse(const char *text, kern_act *out, err *e);
const char *kern_act_name(kern_act a);

typedef struct kern_opts {
    const char *device;    /* NULL or "cpu" */
    int threads;           /* 0 = all allowed CPUs */
    uint32_t cpu_features; /* from cpu_parse; 0 = portable only */
} kern_opts;
typedef struct kern_dev {
    const char *name; /* "cpu" */
    uint32_t features;
    team *team;
    void *scratch; /* per-device workspace, grown at load, never in a step */
    size_t scratch_bytes;
} kern_dev;
int kern_open(kern_dev **out, const kern_opts *o, err *e);
void kern_close(kern_dev *d);
int kern_alloc(kern_dev *d, void **out, size_t n, err *e); /* weights, pools: huge pages on CPU */
void kern_free(kern_dev *d, void *p);

/* ---- linear: Y[M,N] = X[M,K] W^T + bias ------------------------------------------------------ */
#define KERN_MAX_SHARDS 4
#define KERN_BUCKETS    4 /* M = 1, 2..8, 9..64, more */
int kern_bucket(int64_t M);

typedef struct kern_linear_desc {
    const char *name;                      /* for reports */
    int n_shards;                          /* rows of shard i follow those of shard i-1 */
    const qtensor *shard[KERN_MAX_SHARDS]; /* same K; each with its own spec */
    const float *bias;                     /* [N] or NULL; copied */
    kern_act act;
    bool strict; /* a reference row for a listed format is an error */
} kern_linear_desc;

typedef struct kern_linear kern_linear; /* prepared; canonical qtensors may be freed after make */
int kern_linear_make(kern_dev *d, const kern_linear_desc *desc, kern_linear **out, err *e);
void kern_linear_drop(kern_dev *d, kern_linear *l);
/* x [M,K] with row stride ldx, y [M,N] with row stride ldy (elements). No allocation. */
void kern_linear_run(kern_dev *d, const kern_linear *l, const float *x, int64_t ldx, int64_t M,
                     float *y, int64_t ldy);
int64_t kern_linear_n(const kern_linear *l);
int64_t kern_linear_k(const kern_linear *l);
size_t kern_linear_bytes(const kern_linear *l); /* prepared bytes, resident */
/* Dequantized weights as the kernel sees them: out [N,K]. */
void kern_linear_unpack(const kern_linear *l, float *out);
/* Report: row and layout chosen for a bucket, what the input becomes ("f32", "fp8_e4m3 per token",
 * "int8 per 32 along K"), and each refusal of the rows before it ("name: reason; name: reason"). */
typedef struct kern_choice {
    const char *row, *layout;
    char act[48];
    char refused[256];
    bool reference;
} kern_choice;
const kern_choice *kern_linear_choice(const kern_linear *l, int bucket);
/* Prepared bytes of an [N,K] weight of this spec, without data: for the planner. */
size_t kern_linear_predict_bytes(uint32_t features, const qspec *s, num_dtype plain, kern_act act,
                                 int64_t N, int64_t K);
/* Scratch that a step of at most T rows needs for the widest K and N; called once at load. */
int kern_reserve(kern_dev *d, int64_t max_rows, int64_t max_k, int64_t max_n, err *e);
size_t kern_reserve_bytes(int64_t max_rows, int64_t max_k, int64_t max_n, int threads);

/* What the prepared bytes of a weight depend on. */
typedef struct kern_wshape {
    qaxis w;
    num_dtype code, scale, zero; /* stored types; NUM_NONE = no scales, no zero points */
    int64_t N, K;
} kern_wshape;

/* Rows of the linear list, for tests, SUPPORT.md and bench. */
struct kern__act_plan; /* what becomes of the input: kern/linear.h */
struct kern__part;     /* one thread's share of a product: kern/linear.h */
typedef struct kern_linear_row {
    const char *name;   /* "avx512vnni-w4a8" */
    const char *layout; /* rows with equal layout text share prepared memory */
    uint32_t needs;     /* CPU_* bits */
    /* NULL = accept. Reads only the shapes and types of the qtensor, never its data. */
    const char *(*refuse)(const kern_linear_desc *d, int shard, int bucket);
    void (*plan)(const kern_linear_desc *d, int shard, int bucket, struct kern__act_plan *out);
    /* Writes columns of panels [lo,hi) (16 rows of W each) for all rows of X. */
    void (*part)(const struct kern__part *p, int64_t panel_lo, int64_t panel_hi);
} kern_linear_row;
extern const kern_linear_row *const kern_linear_rows[];
extern const int kern_n_linear_rows;

/* ---- KV cache layout (pages are allocated by kv) ------------------------------------------------
 * One layer of one page: K plane then V plane; each plane: codes [Hk][page_tokens][code_bytes],
 * then per-token scales [Hk][page_tokens][scale_bytes]. bf16      code 2D bytes, no scale f32 code
 * 4D bytes, no scale: nothing rounded, for comparing engines fp8_*     code D bytes; static
 * multiplier per head k_scale/v_scale: stored sat(x/scale) int8      code D bytes u8; scale f32 and
 * minimum f32 per (token, head): x = code*scale + min, scale = (max-min)/255 over the D lanes only
 *   fp4       E2M1, ceil(D/2) bytes, low nibble first; E8M0 per block of 16 (last block short):
 *             127 + ceil(log2(amax/6)); zero block -> code 0 scale */
typedef enum kern_kv_type {
    KV_BF16,
    KV_FP8_E4M3,
    KV_FP8_E5M2,
    KV_INT8,
    KV_FP4,
    KV_F32,
    KV_TYPES
} kern_kv_type;
size_t kern_kv_code_bytes(kern_kv_type t, int D);
size_t kern_kv_scale_bytes(kern_kv_type t, int D);
size_t kern_kv_page_bytes(kern_kv_type t, int Hk, int D, int page_tokens); /* one layer, K and V */

typedef struct kern_kv_layer { /* one layer's view of the pool */
    kern_kv_type type;
    int Hk, D, page_tokens;
    uint8_t *base; /* page p at base + p*page_stride */
    size_t page_stride;
    const float *k_scale, *v_scale; /* [Hk] or NULL = 1.0 (fp8 only) */
} kern_kv_layer;

typedef struct kern_seq { /* one sequence of the step */
    int32_t row0, n_rows; /* its rows in q (new tokens) */
    int32_t kv_len;       /* tokens in cache after the store of this step */
    const int32_t *pages; /* page table, ceil(kv_len/page_tokens) entries */
} kern_seq;

/* k,v [T, Hk*D] with row strides; slot[t] = page*page_tokens + offset. Returns how many elements
 * were clipped to the largest finite value (fp8), summed over K and V. */
uint64_t kern_kv_store(kern_dev *d, const kern_kv_layer *kv, const float *k, int64_t ldk,
                       const float *v, int64_t ldv, const int32_t *slot, int64_t T);
/* Decode n tokens of one head to f32 [n, D]: tests, dump, disk. which 0 = K, 1 = V. */
void kern_kv_read(const kern_kv_layer *kv, int which, int head, const int32_t *pages, int64_t tok0,
                  int64_t n, float *out);

typedef struct kern_attn_args {
    const float *q; /* [T, H*D], row stride ldq */
    int64_t ldq;
    float *out; /* [T, H*D], row stride ldo */
    int64_t ldo;
    int H;
    float scale; /* softmax scale, usually 1/sqrt(D) */
    int window;  /* 0 = full; else a key at distance >= window is not seen */
    const kern_kv_layer *kv;
    const kern_seq *seqs;
    int n_seqs;
} kern_attn_args;
/* Causal: row i of a sequence sits at position kv_len - n_rows + i. Softmax in f32. */
void kern_attention(kern_dev *d, const kern_attn_args *a);

/* ---- small ops ---------------------------------------------------------------------------------
 */
void kern_rmsnorm(kern_dev *d, const float *x, const float *w, float eps, int64_t T, int64_t K,
                  float *out);
/* x += y, then out = rmsnorm(x): one pass. */
void kern_add_rmsnorm(kern_dev *d, float *x, const float *y, const float *w, float eps, int64_t T,
                      int64_t K, float *out);
void kern_add(kern_dev *d, float *x, const float *y, int64_t n);
/* per-head norm of q or k in place: x rows of H heads x D, stride ld (qwen3) */
void kern_head_rmsnorm(kern_dev *d, float *x, int64_t ld, int H, int D, const float *w, float eps,
                       int64_t T);
/* Half-split (NeoX) rotary in place on q [T,H*D] and k [T,Hk*D]; first rot_dim lanes of each head.
 * cos/sin [T, rot_dim/2] computed by model for the positions of this step. */
void kern_rope(kern_dev *d, float *q, int64_t ldq, int H, float *k, int64_t ldk, int Hk, int D,
               int rot_dim, const float *cosv, const float *sinv, int64_t T);
/* out[T,F] = act(g[T,F]) * u[T,F]; gu rows hold gate then up: ld >= 2F. act: silu, gelu_tanh, gelu,
 * relu */
typedef enum kern_glu { KERN_SILU, KERN_GELU_TANH, KERN_GELU, KERN_RELU } kern_glu;
void kern_glu_mul(kern_dev *d, kern_glu act, const float *gu, int64_t ld, int64_t F, int64_t T,
                  float *out);
/* Row gather: out[t] = dequantized row ids[t] of table; ids are checked by the engine. */
void kern_embed(kern_dev *d, const qtensor *table, const int32_t *ids, int64_t T, float *out);

/* Row of an op list, for tests and reports. */
typedef struct kern_op_row {
    const char *op, *name; /* "attention", "avx512-f32" */
    uint32_t needs;
} kern_op_row;
extern const kern_op_row kern_op_rows[];
extern const int kern_n_op_rows;

/* Machine limits, measured: read bandwidth of `bytes` on the whole team, GB/s. */
double kern_measure_bandwidth(kern_dev *d, size_t bytes);
#endif
