/* What the plug-in libtare-cuda.so offers to the program: device memory, streams, graphs, and one
 * launch function for each operator. Plain C on both sides; the program never links CUDA. Pointers
 * inside argument structures are device addresses unless said otherwise. Every launch is
 * asynchronous on the given stream, allocates nothing, and may be captured into a graph.
 *
 * An operator is a number, an argument structure (plain data, copied freely by the recorder of
 * kern/gpu) and `const char *launch(const void *args, void *stream)`: NULL = launched, else why
 * not. Meanings of the operators are those of kern.h, whose letters are used here too: T rows, H
 * heads, Hk KV heads, D head dim, K in, N out, E experts. Rows that stand for no sequence (a step
 * filled up to the size of a graph) have row_seq -1 and slot -1; they are computed like others and
 * stored nowhere. */
#ifndef KERN_CUDA_API_H
#define KERN_CUDA_API_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kern/cuda/experts.h"
#include "kern/cuda/lt.h"
#include "kern/cuda/rows.h"
#include "kern/cuda/slim.h"
#include "kern/cuda/small.h"
#include "kern/cuda/wide.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Lanes of activations. */
typedef enum gpu_type { GPU_F32, GPU_BF16, GPU_TYPES } gpu_type;
typedef struct gpu_x {
    void *p;
    gpu_type type;
} gpu_x;

/* Sequences of one new row whose first pages are the same (kern_share of kern.h is what makes
 * them): attention over these pages is done once for all. n 0 = none. */
#define GPU_GROUP_SEQS 16
typedef struct gpu_group {
    int32_t pages, n, seq[GPU_GROUP_SEQS];
} gpu_group;

/* Sequences of a step. Values are read on the device, so that a graph can be replayed with others.
 */
typedef struct gpu_seqs {
    const int32_t *row0, *n_rows, *kv_len; /* [n]; kv_len 0 = no sequence here */
    const int32_t *pages;                  /* [n][max_pages]; -1 where a window has passed a page */
    const int32_t *row_seq;                /* [T] sequence of each row, -1 = none */
    int n, max_pages, T;
    int max_rows; /* host: most rows of one sequence */
    int max_len;  /* host: no kv_len is above it */
    int n_groups; /* host: of the groups; 0 = nobody shares pages */
    const gpu_group *groups;
    const int32_t *shared; /* [n] pages of a sequence that its group has; 0 = it is in none */
} gpu_seqs;

/* How the elements of a page lie. PLAIN: as kern.h says. MMA: pages of 32 tokens, head after head,
 * K then V transposed, then scales (kv_place.h); not for f32. */
typedef enum gpu_kv_order { GPU_KV_PLAIN, GPU_KV_MMA } gpu_kv_order;
typedef struct gpu_kv { /* one layer of the cache; see kern_kv_layer */
    int type;           /* kern_kv_type */
    gpu_kv_order order;
    int Hk, D, page_tokens, v_in_k;
    uint8_t *base;
    size_t page_stride;
    const float *k_scale, *v_scale; /* [Hk] or NULL */
} gpu_kv;

/* ---- operators on rows --------------------------------------------------------------------------
 */
typedef struct gpu_norm { /* rmsnorm, layernorm: x [T,K] -> out [T,K]; out may be x */
    gpu_x x, out;
    const float *w, *b; /* b NULL = none */
    float eps;
    int64_t T, K;
} gpu_norm;
typedef struct gpu_add_norm { /* x += y; out = rmsnorm(x) */
    gpu_x x, y, out;
    const float *w;
    float eps;
    int64_t T, K;
} gpu_add_norm;
typedef struct gpu_head_norm { /* in place; w [D], by_head: w [H,D] */
    gpu_x x;
    int64_t ld;
    int H, D;
    const float *w;
    bool by_head;
    float eps;
    int64_t T;
} gpu_head_norm;
typedef struct gpu_gated_norm {
    gpu_x x, gate, out;
    int64_t ldg;
    int H, D;
    const float *w;
    float eps;
    int64_t T;
} gpu_gated_norm;
typedef struct gpu_rope { /* k.p may be NULL */
    gpu_x q, k;
    int64_t ldq, ldk;
    int H, Hk, D, rot_dim;
    bool pairs;
    const float *cosv, *sinv; /* [T, rot_dim/2] */
    int64_t T;
} gpu_rope;
/* cosv[t,i] = cos(inv[i] * pos[t]) * attention, sinv alike: the product in f32, as transformers;
 * rows row0 .. row0+T. */
typedef struct gpu_rope_fill {
    const float *inv; /* [half] */
    const int32_t *pos;
    double attention;
    int64_t row0, T, half;
    float *cosv, *sinv;
} gpu_rope_fill;
typedef struct gpu_glu { /* gated: x rows hold gate then up; else out = act(x) */
    int act;             /* kern_glu */
    bool gated;
    gpu_x x, out;
    int64_t ld, ldo, F, T;
} gpu_glu;
typedef struct gpu_add { /* x += s*y */
    gpu_x x, y;
    float s;
    int64_t n;
} gpu_add;
typedef struct gpu_scale { /* x *= s; softcap: x = s*tanh(x/s) */
    gpu_x x;
    float s;
    int64_t n;
} gpu_scale;
typedef struct gpu_gate { /* x[t,i] *= sigmoid(g[t,i]); by_row: of g[t*ldg] */
    gpu_x x, g;
    int64_t ldx, ldg, n, T;
    bool by_row;
} gpu_gate;
/* to[r] = from[ids ? ids[r] : r], n lanes of each row; types may differ */
typedef struct gpu_copy {
    gpu_x from, to;
    const int32_t *ids;
    int64_t ldf, ldt, n, rows;
} gpu_copy;
typedef struct gpu_far { /* x[t] *= 1 + beta*log(1 + pos[t]/from), integer division; n lanes */
    gpu_x x;
    int64_t ld, n, T, from;
    const int32_t *pos;
    float beta;
} gpu_far;
/* out[t,h,n] = sum_k x[t,h,k] * w[h][n][k] */
typedef struct gpu_head_matmul {
    const void *w;
    int w_type; /* num_dtype: bf16, f16, f32 */
    gpu_x x, out;
    int64_t ldx, ldh, ldo, ldoh, H, N, K, T;
} gpu_head_matmul;

/* ---- weights ------------------------------------------------------------------------------------
 * A weight in one of the panel layouts of kern/layout.c, as it lies there, in device memory. */
typedef struct gpu_panels {
    const uint8_t *mem; /* offsets below count from here */
    int64_t N, K, Kp, panels, group, groups;
    int code, scale_type, zero_type; /* num_dtype */
    int scale_bytes, zero_bytes, bits, bias;
    size_t codes_off, panel_bytes, scales_off, zeros_off, alpha_off;
    float lut[16];
} gpu_panels;
/* What becomes of the input first: kern__act_plan, the part that is emulated. */
typedef struct gpu_act {
    int a_type, a_gran, a_scale; /* num_dtype, qaxis: gran and scale; a_type NUM_NONE = nothing */
    int64_t a_group;
    bool round_bf16;
    float in_scale, in_zero, in_global;
    const int32_t *perm;    /* [K] or NULL */
    const float *pre_scale; /* [K] or NULL */
    int64_t K, Kp;
} gpu_act;
/* out f32 [M, Kp]: row m is x[ids ? ids[m] : m] treated as the plan says, zero from K on. */
typedef struct gpu_act_run {
    gpu_act plan;
    gpu_x x;
    int64_t ldx, M;
    const int32_t *ids;
    float *out;
} gpu_act_run;
/* y[m, n] = a[m] . W[n] + bias[n], in f32; a is what gpu_act_run made */
typedef struct gpu_product {
    gpu_panels w;
    const float *a; /* [M, w.Kp] */
    const float *bias;
    int64_t M, ldy;
    gpu_x y; /* column 0 of this weight */
} gpu_product;
/* The same for the slots of experts: slot i of expert e, i in [first[e], first[e+1]), reads row i
 * of a. */
typedef struct gpu_experts {
    const gpu_panels *w; /* [E] in device memory */
    const float *a;      /* [slots, Kp] */
    const float *const
        *bias;            /* [E] device addresses in device memory, or NULL; entries may be NULL */
    const int32_t *first; /* [E+1] */
    int E;
    int64_t slots, N, K, Kp, ldy;
    gpu_x y;
} gpu_experts;
/* out[t] = row ids[t] of a panel weight. */
typedef struct gpu_embed {
    gpu_panels w;
    const int32_t *ids;
    int64_t T;
    gpu_x out;
} gpu_embed;

/* ---- experts ------------------------------------------------------------------------------------
 */
typedef struct gpu_route { /* kern_route_args */
    gpu_x logits;
    int E, top_k, kind;
    const float *bias;
    int n_group, topk_group;
    bool group_top2, renorm;
    float jitter, scale;
    int32_t *expert;
    float *weight;
    int64_t T;
} gpu_route;
typedef struct gpu_route_sort {
    const int32_t *expert;
    int64_t T;
    int top_k, E;
    int32_t *row, *first, *slot;
} gpu_route_sort;
typedef struct gpu_combine {
    gpu_x y, out;
    const float *weight;
    const int32_t *slot;
    int top_k;
    int64_t ldy, T, N;
    bool add;
} gpu_combine;

/* ---- cache and attention ------------------------------------------------------------------------
 */
typedef struct gpu_kv_store {
    gpu_kv kv;
    gpu_x k, v; /* v.p NULL where V is part of K */
    int64_t ldk, ldv, T;
    const int32_t *slot;         /* [T]; negative = not stored */
    unsigned long long *clipped; /* += elements clipped (fp8) */
} gpu_kv_store;
typedef struct gpu_attention {
    gpu_kv kv;
    gpu_x q, out;
    int64_t ldq, ldo;
    int H, window;
    float scale, softcap;
    const float *sinks; /* [H] or NULL */
    gpu_seqs seqs;
    void *work; /* gpu_api.attention_work bytes, zeroed once */
} gpu_attention;

/* ---- linear attention ---------------------------------------------------------------------------
 * State of sequence s: base + slot[s]*stride floats (slot NULL: s); slot -1 = none. */
typedef struct gpu_state {
    float *base;
    int64_t stride;
    const int32_t *slot;
} gpu_state;
typedef struct gpu_conv {
    gpu_x x;
    int64_t ld, C;
    int W;
    const float *w;
    gpu_seqs seqs;
    gpu_state state;
} gpu_conv;
typedef struct gpu_delta {
    gpu_x q, k, v, out;
    int64_t ldq, ldk, ldv;
    const float *g, *beta; /* [T, Hv] */
    int Hk, Hv, Dk, Dv;
    gpu_seqs seqs;
    gpu_state state;
} gpu_delta;
typedef struct gpu_delta_gates {
    gpu_x ba;
    int64_t ld, T;
    int Hv;
    const float *a_log, *dt_bias;
    float *g, *beta;
} gpu_delta_gates;

/* ---- fused: rows become codes -------------------------------------------------------------------
 * Codes of rows and what they are times: lane k of row t is code * scale, by the rules of
 * kern/act.c. e4m3: scale = amax / 448, int8: scale = amax / 127.5; x / scale to nearest even,
 * clipped to 448 or -128..127. Zeros have scale 0 and codes 0. NaN makes the scale of its row or
 * group NaN, also where the scale is given. */
typedef enum gpu_code { GPU_E4M3, GPU_INT8 } gpu_code;
typedef struct gpu_codes {
    gpu_code code;
    bool as_bf16; /* each code as a bf16 number instead of a byte */
    void *p;      /* [T, K], row stride ld elements, rows aligned to 16 bytes */
    int64_t ld;
    int64_t group; /* lanes that share a scale: 0 = the row, else 128 */
    float fixed;   /* > 0: the scale, given by the checkpoint */
    float *scale;  /* of row t, group g: scale[t*scale_row + g*scale_group] */
    int64_t scale_row, scale_group;
} gpu_codes;
typedef struct gpu_quant {
    gpu_x x;
    int64_t ld, T, K;
    gpu_codes to;
} gpu_quant;
/* x += y (y.p NULL: no), out = rmsnorm(x), codes of out, which is rounded to out.type also
 * where out.p is NULL: it is not kept then. */
typedef struct gpu_norm_quant {
    gpu_x x, y, out;
    const float *w;
    float eps;
    int64_t T, K;
    gpu_codes to;
} gpu_norm_quant;
typedef struct gpu_glu_quant { /* out = act(gate) * up, codes of out; out as in gpu_norm_quant */
    int act;                   /* kern_glu */
    gpu_x x, out;              /* x: gate then up, row stride ld; out: row stride ldo */
    int64_t ld, ldo, F, T;
    gpu_codes to;
} gpu_glu_quant;
/* head_rmsnorm of q and k (q_norm, k_norm NULL: none), rope of both, store of k and v: as the three
 * operators one after the other. q_out (may be q) gets q times q_factor; k stays as it is unless
 * keep_k: then it is what was stored. */
typedef struct gpu_rope_store {
    gpu_x q, k, v, q_out;
    int64_t ldq, ldk, ldv, ldo;
    int H, Hk, D, rot_dim;
    bool pairs, norm_by_head, keep_k;
    const float *cosv, *sinv; /* [T, rot_dim/2]; rot_dim 0: NULL */
    const float *q_norm, *k_norm;
    float eps, q_factor;
    gpu_kv kv;
    const int32_t *slot; /* [T]; negative = not stored */
    unsigned long long *clipped;
    int64_t T;
} gpu_rope_store;

/* ---- choosing tokens ----------------------------------------------------------------------------
 */
#define GPU_TOP_CHUNK 4096    /* lanes of a block */
typedef struct gpu_top_part { /* of a chunk: sum of exp(x - top) */
    double sum;
    float top;
    int32_t odd; /* first lane that is no number */
} gpu_top_part;
typedef struct gpu_top { /* kern_top of each of T rows of V lanes, f32 */
    gpu_x x;
    int64_t V, T;
    void *out;  /* kern_top [T] */
    void *work; /* gpu_top_work bytes */
} gpu_top;
static inline int64_t gpu_top_chunks(int64_t V)
{
    return (V + GPU_TOP_CHUNK - 1) / GPU_TOP_CHUNK;
}
static inline size_t gpu_top_work(int64_t T, int64_t V)
{
    return (size_t)(T * gpu_top_chunks(V)) * (256 * sizeof(uint32_t) + sizeof(gpu_top_part));
}

/* ---- products of prepared weights
 * ----------------------------------------------------------------- The calls of small.h, wide.h,
 * experts.h, rows.h and lt.h; `stream` in them is not looked at. */
typedef struct gpu_lt {
    lt *lt;
    lt_call call;
} gpu_lt;
/* out[n,k] = bf16(code * scale): rows row0 .. row0+N of a weight of 8-bit codes in row-major order,
 * scales as in rows_call. */
typedef struct gpu_widen {
    const void *w; /* row row0, [N,K], aligned to 16 bytes, K a multiple of 16 */
    rows_format format;
    rows_scales scales;
    const float *scale; /* of the whole weight */
    int64_t row0, N, K;
    void *out;
} gpu_widen;

/* out[n,k] = bf16(code * (scale * col_scale[n])): packed weights as rows. Both products are of f32,
 * as where the host unpacks them; then each weight is rounded to bf16, once. */
typedef struct gpu_unpack {
    small_format format;
    const void *w;          /* packed, N rows: a multiple of 16 */
    const float *col_scale; /* [N] of small_pack; NULL = 1 */
    int64_t N, K;           /* K in whole units of 128 */
    void *out;              /* row stride K, aligned to 16 bytes */
} gpu_unpack;

/* ---- several devices --------------------------------------------------------------------------
 */
typedef struct gpu_all_reduce { /* x := its sum over all devices of the group, n lanes */
    void *comm;                 /* of this device: gpu_api.comms_open */
    gpu_x x;
    int64_t n;
} gpu_all_reduce;

/* ---- the table ----------------------------------------------------------------------------------
 */
#define GPU_OPS(X)                                                                                 \
    X(rmsnorm, gpu_norm)                                                                           \
    X(layernorm, gpu_norm)                                                                         \
    X(add_rmsnorm, gpu_add_norm)                                                                   \
    X(head_rmsnorm, gpu_head_norm)                                                                 \
    X(head_layernorm, gpu_head_norm)                                                               \
    X(gated_rmsnorm, gpu_gated_norm)                                                               \
    X(rope, gpu_rope)                                                                              \
    X(rope_fill, gpu_rope_fill)                                                                    \
    X(glu, gpu_glu)                                                                                \
    X(add, gpu_add)                                                                                \
    X(scale, gpu_scale)                                                                            \
    X(softcap, gpu_scale)                                                                          \
    X(gate, gpu_gate)                                                                              \
    X(copy, gpu_copy)                                                                              \
    X(far, gpu_far)                                                                                \
    X(head_matmul, gpu_head_matmul)                                                                \
    X(act_run, gpu_act_run)                                                                        \
    X(product, gpu_product)                                                                        \
    X(experts, gpu_experts)                                                                        \
    X(embed, gpu_embed)                                                                            \
    X(route, gpu_route)                                                                            \
    X(route_sort, gpu_route_sort)                                                                  \
    X(combine, gpu_combine)                                                                        \
    X(kv_store, gpu_kv_store)                                                                      \
    X(attention, gpu_attention)                                                                    \
    X(conv_silu, gpu_conv)                                                                         \
    X(gated_delta, gpu_delta)                                                                      \
    X(delta_gates, gpu_delta_gates)                                                                \
    X(quant, gpu_quant)                                                                            \
    X(norm_quant, gpu_norm_quant)                                                                  \
    X(glu_quant, gpu_glu_quant)                                                                    \
    X(rope_store, gpu_rope_store)                                                                  \
    X(top, gpu_top)                                                                                \
    X(widen, gpu_widen)                                                                            \
    X(unpack, gpu_unpack)                                                                          \
    X(small, small_call)                                                                           \
    X(wide, wide_call)                                                                             \
    X(small_experts, experts_call)                                                                 \
    X(wide_experts, experts_call)                                                                  \
    X(rows, rows_call)                                                                             \
    X(slim, rows_call)                                                                             \
    X(lt, gpu_lt)                                                                                  \
    X(all_reduce, gpu_all_reduce)
typedef enum gpu_op {
#define GPU_ENUM(name, args) GPU_OP_##name,
    GPU_OPS(GPU_ENUM)
#undef GPU_ENUM
        GPU_N_OPS
} gpu_op;
typedef const char *gpu_launch(const void *args, void *stream);
#define GPU_DECLARE(name, args) const char *cuda_##name(const void *args_, void *stream);
GPU_OPS(GPU_DECLARE)
#undef GPU_DECLARE

typedef struct gpu_facts {
    char name[64], driver[32];
    int sm; /* 90 = 9.0 */
    int sms;
    uint64_t total_bytes, free_bytes;
    bool emulated; /* plain kernels on the CPU, for tests */
} gpu_facts;

/* Device functions return NULL or why not. */
typedef struct gpu_api {
    int version;
    const char *(*count)(int *n);
    const char *(*facts)(int device, gpu_facts *out);
    const char *(*bind)(int device); /* of the calling thread */
    const char *(*alloc)(void **out, size_t n);
    void (*free)(void *p);
    const char *(*alloc_host)(void **out, size_t n); /* pinned */
    void (*free_host)(void *p);
    const char *(*stream_open)(void **out);
    void (*stream_close)(void *s);
    const char *(*sync)(void *s); /* waits; reports what went wrong since */
    const char *(*upload)(void *to, const void *from, size_t n, void *s);
    const char *(*download)(void *to, const void *from, size_t n, void *s);
    const char *(*zero)(void *p, size_t n, void *s);
    /* What is launched between begin and end becomes a graph. */
    const char *(*graph_begin)(void *s);
    const char *(*graph_end)(void *s, void **graph);
    const char *(*graph_run)(void *graph, void *s);
    void (*graph_close)(void *graph);
    /* Clocks of a stream; seconds between two of them, after a sync. */
    const char *(*event_open)(void **out);
    void (*event_close)(void *event);
    const char *(*event_record)(void *event, void *s);
    const char *(*event_seconds)(void *from, void *to, double *out);
    const char *(*stall)(double seconds, void *s); /* the stream waits */
    /* Reads it all, for the bandwidth; out: 4 bytes. */
    const char *(*probe_read)(const void *p, size_t bytes, void *out, int blocks, void *s);
    /* Bytes that gpu_attention.work needs for steps of at most so many rows. */
    size_t (*attention_work)(int rows, int H, int Dv);
    /* Of small.h, wide.h, rows.h, lt.h. */
    const char *(*small_entry)(small_format f, int N, int K, int M);
    wide_plan (*wide_choose)(small_format f, int N, int K, int M);
    int (*wide_has)(small_format f, wide_plan p, int K);
    size_t (*wide_work_bytes)(int K, int M);
    size_t (*experts_work_bytes)(int K, int E, int64_t slots);
    const char *(*rows_prepare)(rows_weight *out, rows_format f, const void *w, int64_t ldw,
                                int64_t N, int64_t K);
    const char *(*rows_refuse)(const rows_call *c);
    rows_plan (*rows_choose)(rows_format f, int N, int K, int M);
    int (*rows_has)(rows_format f, rows_plan p, int K, int M);
    slim_plan (*slim_choose)(rows_format f, int how, int N, int K, int M);
    const char *(*lt_open)(lt **out, size_t work_bytes);
    void (*lt_close)(lt *l);
    const char *(*lt_plan)(lt *l, const lt_call *c, bool try_out);
    /* Devices that run one model together; each op all_reduce is launched on all of them, by a
     * thread for each. comm[i] NULL: made; else it is made ready again after an abort. */
    const char *(*comms_open)(void **comm, const int *device, int n);
    void (*comm_abort)(void *comm); /* from any thread: sums that wait for others end, failed */
    void (*comm_close)(void *comm);
    gpu_launch *const *launch; /* [GPU_N_OPS] */
} gpu_api;
/* Program and plug-in come from the same sources, or do not work together. */
#define GPU_API_VERSION (1 << 16 | (int)sizeof(gpu_api))
/* The one symbol of the plug-in. NULL: other version. */
const gpu_api *tare_gpu_api(int version);

#ifdef __cplusplus
}
#endif
#endif
