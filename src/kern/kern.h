/* The device: what runs numbers. A kern_dev is one backend instance: the CPU, or a GPU through the
 * plug-in that kern/gpu opens at run time. Ops take device pointers. On the CPU these are host
 * pointers and activations are f32; on a GPU they are handles (kern_lanes), which count as f32
 * lanes for pointer arithmetic whatever the lanes are there, and which only ops may read. Every op
 * has an ordered list of rows {name, needs, refuse, run}; the first row that accepts wins; the
 * plain C twin is last and refuses nothing. Row-major everywhere. Shape letters: T rows (tokens) of
 * the step, H heads, Hk KV heads, D head dim, K in, N out. */
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
    const char *device; /* NULL or "cpu"; "cuda" or "cuda:N"; "emulated": the plain GPU kernels on
                           the CPU, for tests */
    int threads;        /* 0 = all allowed CPUs */
    int ranks;          /* devices that run one model together; 0 = 1. "cuda:N" stands for that GPU
                           and those after it */
    uint32_t cpu_features; /* from cpu_parse; 0 = portable only */
} kern_opts;
struct kern_backend;
typedef struct kern_dev {
    const char *name; /* "cpu", "cuda:0" */
    const char *what; /* "NVIDIA H200"; NULL on the CPU */
    uint32_t features;
    struct team *team; /* "struct": C++ reads this header too */
    void *scratch;     /* per-device workspace, grown at load, never in a step */
    size_t scratch_bytes;
    const struct kern_backend *be; /* NULL on the CPU */
    uint64_t memory_bytes;         /* free when it was opened; 0 on the CPU: ask the machine */
    int page_tokens;               /* of the KV pages that its fast kernels want; 0 = any */
    int share_pages;               /* kern_share's `least` that pays in attention; 0 = never does */
    struct kern_ranks *ranks;      /* NULL where it is alone */
    int rank;
} kern_dev;
/* Memory of a GPU, all and free now. False on the CPU. */
bool kern_memory(kern_dev *d, uint64_t *all, uint64_t *left);
/* ERR_UNSUPPORTED: no such device, no driver, no plug-in, and which. */
int kern_open(kern_dev **out, const kern_opts *o, err *e);
void kern_close(kern_dev *d); /* rank 0 closes all */
/* Memory of n bytes: weights, pools (huge pages on the CPU). */
int kern_alloc(kern_dev *d, void **out, size_t n, err *e);
void kern_free(kern_dev *d, void *p);
/* n activations. STREAM: the residual stream, logits, and whatever decides (routing): f32
 * everywhere. FLOW: what goes between the ops of a layer: bf16 on a GPU unless `act` computes
 * 16-bit types in f32 (spec, f32). Freed by kern_free. */
typedef enum kern_lanes_kind { KERN_STREAM, KERN_FLOW } kern_lanes_kind;
int kern_lanes(kern_dev *d, float **out, int64_t n, kern_lanes_kind kind, kern_act act, err *e);
size_t kern_lane_bytes(const kern_dev *d, kern_lanes_kind kind, kern_act act); /* d NULL: a CPU */
/* Memory that the program reads and the device writes (kern_fetch): pinned where that counts. */
int kern_host_alloc(kern_dev *d, void **out, size_t n, err *e);
void kern_host_free(kern_dev *d, void *p);
int kern_zero(kern_dev *d, void *p, size_t n, err *e);
/* Makes *p (n floats in host memory, or NULL) readable by ops: on a GPU *p becomes a handle of a
 * copy that lives as long as the device; the CPU leaves it as it is. */
int kern_constant(kern_dev *d, float **p, int64_t n, err *e);
/* The same for a tensor whose rows kern_embed and kern_head_matmul read; it may become a wider
 * type that holds the numbers. */
int kern_table(kern_dev *d, qtensor *t, err *e);

/* ---- a step ------------------------------------------------------------------------------------
 * Ops between begin and end belong to one step of T rows. The CPU runs each at once. A GPU writes
 * them down, and runs all at the end; arrays in host memory (ids, positions, slots, sequences) are
 * read then. key != 0 names steps that differ only in what these arrays hold, which must lie at the
 * same addresses: once such a step was written down, begin answers false, no op may be issued, and
 * end runs what is known. Errors of ops come out of end. */
bool kern_step_begin(kern_dev *d, int64_t T, uint64_t key);
/* Lengths of sequences as such steps see them: up to a power of two, at least 256. */
int64_t kern_len_bucket(int64_t len);
/* Runs what was written down so far and waits: fetched numbers have arrived. */
int kern_step_flush(kern_dev *d, err *e);
int kern_step_end(kern_dev *d, err *e);
/* n lanes to host memory, there after flush or end. */
void kern_fetch(kern_dev *d, const float *x, int64_t n, float *host);
/* Elements clipped by kern_kv_store on a device that does not return them there. */
uint64_t kern_clipped(const kern_dev *d);

/* ---- several devices --------------------------------------------------------------------------
 * kern_opts.ranks > 1 opens as many devices and returns rank 0, which owns the others. Each is
 * driven by a thread of its own, all issue the same ops, and steps of all are begun and ended
 * together. memory_bytes of rank 0 is what each may take. */
int kern_n_ranks(const kern_dev *d);
kern_dev *kern_rank(kern_dev *d, int i);
/* x := sum of x over all ranks, n lanes: the same bits on each. */
void kern_all_reduce(kern_dev *d, float *x, int64_t n);
/* The step of this rank has failed: the steps of the others fail too, where they would wait for it.
 */
void kern_ranks_fail(kern_dev *d);
/* After a failed step, when no rank is in one: ready for the next. */
int kern_ranks_mend(kern_dev *d, err *e);

/* Times of the operators of steps, summed by operator and shape from when it is turned on until it
 * is turned off; slower steps. bytes and flops: what they must move and compute at least, 0 = not
 * known. ERR_UNSUPPORTED on the CPU. */
typedef struct kern_op_time {
    char op[24], shape[72];
    int64_t calls;
    double seconds, bytes, flops;
} kern_op_time;
int kern_profile(kern_dev *d, bool on, err *e);
int kern_profile_lines(const kern_dev *d, const kern_op_time **out); /* returns how many */

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
    bool expert; /* kern_experts_make takes it */
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
/* Rows ids[0..T) of W as the kernel sees them, out [T,K]: a head that is the embedding too. Not for
 * linears whose columns are permuted or scaled (can_embed false). */
bool kern_linear_can_embed(const kern_linear *l);
void kern_linear_embed(kern_dev *d, const kern_linear *l, const int32_t *ids, int64_t T,
                       float *out);
/* Report: row and layout chosen for a bucket, what the input becomes ("f32", "fp8_e4m3 per token",
 * "int8 per 32 along K"), and each refusal of the rows before it ("name: reason; name: reason"). */
typedef struct kern_choice {
    const char *row, *layout;
    char act[48];
    char plan[96]; /* the entry of a table of measured plans, or "rule"; "" = none to choose */
    char refused[256];
    bool reference;
} kern_choice;
const kern_choice *kern_linear_choice(const kern_linear *l, int bucket);
/* Prepared bytes of an [N,K] weight of this spec, without data: for the planner. */
size_t kern_linear_predict_bytes(uint32_t features, const qspec *s, num_dtype plain, kern_act act,
                                 int64_t N, int64_t K);
/* Scratch that a step of at most max_rows rows (tokens, or slots of experts) needs for the widest K
 * and N; called once at load. Making a linear or experts reserves what these need themselves, so
 * that no step allocates. */
int kern_reserve(kern_dev *d, int64_t max_rows, int64_t max_k, int64_t max_n, err *e);
/* The same for attention with H heads whose values have v_lanes; only a GPU needs it. */
int kern_reserve_attention(kern_dev *d, int64_t max_rows, int H, int v_lanes, err *e);
size_t kern_reserve_bytes(int64_t max_rows, int64_t max_k, int64_t max_n, int threads);

/* What the prepared bytes of a weight depend on. */
typedef struct kern_wshape {
    qaxis w;
    num_dtype code, scale, zero; /* stored types; NUM_NONE = no scales, no zero points */
    int64_t N, K;
    int64_t groups; /* along K, where a group index names more than K fills (columns of a larger
                       weight); 0 = as many as K fills */
} kern_wshape;

/* Rows of the linear list, for tests, SUPPORT.md and bench. */
struct kern__act_plan; /* what becomes of the input: kern/linear.h */
struct kern__part;     /* one thread's share of a product: kern/linear.h */
typedef struct kern_linear_row {
    const char *name;   /* "avx512vnni-w4a8" */
    const char *layout; /* rows with equal layout text share prepared memory (w4p16 also stands for
                           its narrower forms) */
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
/* One layer: K plane and V plane, or the K plane alone. */
size_t kern_kv_page_bytes(kern_kv_type t, int Hk, int D, int v_in_k, int page_tokens);

typedef struct kern_kv_layer { /* one layer's view of the pool */
    kern_kv_type type;
    int Hk, D, page_tokens;
    int v_in_k; /* 0 = own V plane of D lanes; else V is the first v_in_k lanes of K and no V plane
                   exists (MLA latent: D = kv_lora_rank + qk_rope_head_dim, Hk = 1) */
    uint8_t *base; /* page p at base + p*page_stride */
    size_t page_stride;
    const float *k_scale, *v_scale; /* [Hk] or NULL = 1.0 (fp8 only) */
    bool mma; /* a GPU's own order of the elements of a page (cuda/kv_place.h) */
} kern_kv_layer;
/* Whether a device keeps such pages in its own order; same bytes a page. */
bool kern_kv_mma(const kern_dev *d, kern_kv_type t, int D, int v_in_k, int page_tokens);

typedef struct kern_seq { /* one sequence of the step */
    int32_t row0, n_rows; /* its rows in q (new tokens) */
    int32_t kv_len;       /* tokens in cache after the store of this step */
    const int32_t *pages; /* page table, ceil(kv_len/page_tokens) entries */
} kern_seq;

/* Sequences of one new row that have the same first pages, `least` or more, none of them the last:
 * groups of 2 to `most` of them. group(arg, seq, n, pages) is told of each; returns how many there
 * are. least 0: none. */
typedef void kern_share_fn(void *arg, const int32_t *seq, int n, int pages);
int kern_share(const kern_seq *seqs, int n, int page_tokens, int least, int most,
               kern_share_fn *group, void *arg);

/* k,v [T, Hk*D] with row strides; slot[t] = page*page_tokens + offset. Returns how many elements
 * were clipped to the largest finite value (fp8), summed over K and V. */
uint64_t kern_kv_store(kern_dev *d, const kern_kv_layer *kv, const float *k, int64_t ldk,
                       const float *v, int64_t ldv, const int32_t *slot, int64_t T);
/* Decode n tokens of one head to f32 [n, D]: tests, dump, disk. which 0 = K, 1 = V ([n, v_in_k]
 * where V is part of K). */
void kern_kv_read(const kern_kv_layer *kv, int which, int head, const int32_t *pages, int64_t tok0,
                  int64_t n, float *out);

typedef struct kern_attn_args {
    const float *q; /* [T, H*D], row stride ldq */
    int64_t ldq;
    float *out; /* [T, H*D] (v_in_k: [T, H*v_in_k]), row stride ldo */
    int64_t ldo;
    int H;
    float scale;        /* softmax scale, usually 1/sqrt(D) */
    int window;         /* 0 = full; else a key at distance >= window is not seen */
    float softcap;      /* 0 = none; else scores become softcap*tanh(score/softcap) */
    const float *sinks; /* [H] or NULL: a logit of each head that takes part in the softmax and
                           contributes no value (gpt-oss) */
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
/* out[T,F] = act(g[T,F]) * u[T,F]; gu rows hold gate then up: ld >= 2F. */
typedef enum kern_glu {
    KERN_SILU,
    KERN_GELU_TANH,
    KERN_GELU,
    KERN_RELU,
    KERN_RELU2,      /* max(x,0)^2 */
    KERN_QUICK_GELU, /* x*sigmoid(1.702x) */
    KERN_SWIGLU_OAI, /* gated only: (clamp(u,-7,7)+1) * g*sigmoid(1.702g), g clamped to at most 7 */
    KERN_GLU_COUNT
} kern_glu;
void kern_glu_mul(kern_dev *d, kern_glu act, const float *gu, int64_t ld, int64_t F, int64_t T,
                  float *out);
/* out[t,f] = act(x[t,f]), rows of F with strides ld, ldo: feed-forwards without a gate. */
void kern_act_apply(kern_dev *d, kern_glu act, const float *x, int64_t ld, int64_t F, int64_t T,
                    float *out, int64_t ldo);
/* ((x - mean) / sqrt(var + eps)) * w + b; b may be NULL. var is the biased one. */
void kern_layernorm(kern_dev *d, const float *x, const float *w, const float *b, float eps,
                    int64_t T, int64_t K, float *out);
/* The same per head and in place, with weights of each head [H, D] (cohere, stablelm). */
void kern_head_layernorm(kern_dev *d, float *x, int64_t ld, int H, int D, const float *w, float eps,
                         int64_t T);
/* Rotary on neighbouring pairs (2i, 2i+1) in place of (i, i + rot_dim/2): GPT-J style (glm, cohere,
 * deepseek). Arguments as kern_rope; k may be NULL. */
void kern_rope_pairs(kern_dev *d, float *q, int64_t ldq, int H, float *k, int64_t ldk, int Hk,
                     int D, int rot_dim, const float *cosv, const float *sinv, int64_t T);
/* Rows row0 .. row0+T of the tables: cos and sin of inv[i] * pos[row], a product in f32, times
 * attention. inv [half] and pos lie in host memory. */
void kern_rope_fill(kern_dev *d, const float *inv, int64_t half, double attention,
                    const int32_t *pos, int64_t row0, int64_t T, float *cosv, float *sinv);
/* x[t] *= 1 + beta * log(1 + floor(pos[t] / from)), n lanes of each row. */
void kern_scale_far(kern_dev *d, float *x, int64_t ld, int64_t n, const int32_t *pos, float beta,
                    int64_t from, int64_t T);
/* to[r] = from[ids[r]], rows of n lanes. */
void kern_gather_rows(kern_dev *d, const float *from, const int32_t *ids, int64_t n, int64_t rows,
                      float *to);
/* n lanes of each row. */
void kern_copy_rows(kern_dev *d, const float *from, int64_t ldf, float *to, int64_t ldt, int64_t n,
                    int64_t rows);
void kern_scale(kern_dev *d, float *x, float s, int64_t n);                      /* x *= s */
void kern_add_scaled(kern_dev *d, float *x, const float *y, float s, int64_t n); /* x += s*y */
void kern_softcap(kern_dev *d, float *x, float cap, int64_t n); /* x = cap*tanh(x/cap) */
/* x[t,i] *= sigmoid(g[t,i]), rows of n with strides (output gate of attention). */
void kern_sigmoid_mul(kern_dev *d, float *x, int64_t ldx, const float *g, int64_t ldg, int64_t n,
                      int64_t T);
/* x[t,:] *= sigmoid(g[t*ldg]), rows of n (gate of a shared expert). */
void kern_row_sigmoid(kern_dev *d, float *x, int64_t ldx, const float *g, int64_t ldg, int64_t n,
                      int64_t T);
/* out[r,:] = rmsnorm(x[r,:]) * w * silu(gate[r,:]), rows r of n lanes (gated delta net). */
void kern_gated_rmsnorm(kern_dev *d, const float *x, const float *gate, int64_t ldg, int H, int D,
                        const float *w, float eps, int64_t T, float *out);
/* out[t,h,n] = sum_k x[t,h,k] * w[h][n][k]; w plain (bf16, f16, f32) with E = H, out rows of H*N
 * with stride ldo, x rows of H blocks of K lanes that lie ldh apart, row stride ldx (MLA: absorbed
 * kv_b_proj). */
void kern_head_matmul(kern_dev *d, const qtensor *w, const float *x, int64_t ldx, int64_t ldh,
                      int64_t T, float *out, int64_t ldo, int64_t ldoh);

/* ---- choosing tokens ----------------------------------------------------------------------------
 * What sampling from the best tokens needs of a row of logits. -0 counts as 0. Where a lane is no
 * number, only odd and odd_value mean something. */
#define KERN_TOP 256
typedef struct kern_top {
    float value[KERN_TOP]; /* the largest lanes, largest first; of equals the lower id first */
    int32_t id[KERN_TOP];  /* -1, with -infinity: the row has no more */
    double lse;            /* log of the sum of exponentials, in f64; -infinity: all lanes are */
    int32_t odd;           /* first lane that is NaN or +infinity; -1 = none */
    float odd_value;
} kern_top;
/* Room for kern_top_rows of so many rows of V lanes. */
int kern_reserve_top(kern_dev *d, int64_t max_rows, int64_t V, err *e);
/* x [T, V], f32 lanes; out [T] in memory of kern_host_alloc: there at the end of the step. */
void kern_top_rows(kern_dev *d, const float *x, int64_t V, int64_t T, kern_top *out);

/* ---- mixture of experts ------------------------------------------------------------------------
 */
typedef enum kern_route_kind {
    KERN_ROUTE_SOFTMAX,      /* softmax over all experts, then the top k */
    KERN_ROUTE_SIGMOID,      /* sigmoid of each, then the top k */
    KERN_ROUTE_TOPK_SOFTMAX, /* top k logits, softmax over these */
    KERN_ROUTE_SPARSE_MIX    /* top k logits, the weight of each by a softmax over those that are
                                not taken yet and lie near it: (x - x_i) / max(|x_i|, x) at most
                                2 * jitter (sparsemixer of Phi 3.5 MoE, arXiv 2409.12136) */
} kern_route_kind;
typedef struct kern_route_args {
    const float *logits; /* [T, E] */
    int E, top_k;
    kern_route_kind kind;
    const float *bias; /* [E] or NULL: added to the scores for the choice, not to the weight */
    int n_group, topk_group; /* 0 or 1 = no groups; else only the best topk_group groups of
                                E/n_group neighbours take part: they hold >= top_k experts */
    bool group_top2; /* a group's score: sum of its two best (deepseek v3), else its best (v2) */
    float jitter;    /* of SPARSE_MIX */
    bool renorm;     /* weights are divided by their sum + 1e-20 */
    float scale;     /* then multiplied by this */
    int32_t *expert; /* out [T, top_k], best first; ties: lower index */
    float *weight;   /* out [T, top_k] */
} kern_route_args;
void kern_route(kern_dev *d, const kern_route_args *a, int64_t T);
/* Slots sorted by expert, tokens of one expert in order: slot i works on token row[i]; expert e
 * owns slots [first[e], first[e+1]); choice j of token t lies in slot[t*top_k+j]. */
void kern_route_sort(kern_dev *d, const int32_t *expert, int64_t T, int top_k, int E, int32_t *row,
                     int32_t *first, int32_t *slot);
typedef struct kern_experts kern_experts;
/* E prepared linears of equal N and K become one grouped product; takes them over (also on error).
 */
int kern_experts_make(kern_dev *d, kern_linear **expert, int E, kern_experts **out, err *e);
void kern_experts_drop(kern_dev *d, kern_experts *x);
size_t kern_experts_bytes(const kern_experts *x);
const kern_linear *kern_experts_at(const kern_experts *x, int e);
/* y[i,:] = W_e x[row ? row[i] : i,:] (+ bias_e) for the slots i of each expert e. Each expert sees
 * only its own rows, in the bucket of their number; experts run side by side on the team, and an
 * input is prepared once a token where all treat it alike. Each number is that of kern_linear_run
 * of the expert. Any number of slots; `slots` = first[E]. */
void kern_experts_run(kern_dev *d, const kern_experts *x, const float *in, int64_t ldin,
                      const int32_t *row, const int32_t *first, int64_t slots, float *y,
                      int64_t ldy);
/* out[t,:] = sum_j weight[t,j] * y[slot[t*top_k+j],:], j in order; adds to out when add. */
void kern_route_combine(kern_dev *d, const float *y, int64_t ldy, const float *weight,
                        const int32_t *slot, int top_k, int64_t T, int64_t N, bool add, float *out);

/* ---- linear attention --------------------------------------------------------------------------
 */
/* One state a sequence: that of sequence s is base + slot[s]*stride (slot NULL: s). slot lies in
 * host memory; a negative one belongs to no sequence. */
typedef struct kern_states {
    float *base;
    int64_t stride;
    const int32_t *slot;
} kern_states;
/* Depthwise causal convolution along the tokens of each sequence, then SiLU, in place on x [T, C]:
 * x[t,c] = silu(sum_{j<W} w[c*W+j] * in[t-W+1+j, c]); inputs before the step come from the
 * state of s [C, W-1], oldest first, which is left holding the last W-1 inputs. kv_len == n_rows:
 * the sequence starts and its state counts as zero. */
void kern_conv_silu(kern_dev *d, float *x, int64_t ld, int64_t C, int W, const float *w,
                    const kern_seq *seqs, int n_seqs, const kern_states *state);
/* Gated delta rule (Yang et al. 2024; Qwen3-Next): per value head h with key head h*Hk/Hv
 *   S *= exp(g); d = beta * (v - S^T k); S += k d^T; out = S^T q
 * with q, k divided by sqrt(sum of squares + 1e-6) and q by sqrt(Dk). S [Hv, Dk, Dv] f32 in
 * its state; zero where the sequence starts. */
typedef struct kern_delta_args {
    const float *q, *k, *v; /* [T, Hk*Dk], [T, Hk*Dk], [T, Hv*Dv] */
    int64_t ldq, ldk, ldv;
    const float *g, *beta; /* [T, Hv]: log decay, write strength */
    int Hk, Hv, Dk, Dv;
    const kern_seq *seqs;
    int n_seqs;
    const kern_states *state;
    float *out; /* [T, Hv*Dv] */
} kern_delta_args;
void kern_gated_delta(kern_dev *d, const kern_delta_args *a);
/* The gates of it from ba rows of b[Hv] then a[Hv]: g = -exp(a_log) * softplus(a + dt_bias),
 * beta = sigmoid(b). */
void kern_delta_gates(kern_dev *d, const float *ba, int64_t ld, int Hv, const float *a_log,
                      const float *dt_bias, int64_t T, float *g, float *beta);

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
/* The same of any device, and products of large matrices in 10^12 operations/s; 0 = not measured:
 * the CPU, or no library for it. */
typedef struct kern_roof {
    double read_gbs, bf16_tflops, fp8_tflops, int8_tops;
} kern_roof;
int kern_measure_roof(kern_dev *d, size_t bytes, kern_roof *out, err *e);
#endif
