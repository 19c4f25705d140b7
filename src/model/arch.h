/* Pure shapes: what a model of this config consists of, without weights or devices. plan, bake and
 * inspect read only this header. A family is one file with a function that fills an arch_model (the
 * names of its tensors and what differs from the Llama block) and one row in arch.c; everything
 * else, loading, the step, memory, what is quantized, follows from the filled structure. */
#ifndef MODEL_ARCH_H
#define MODEL_ARCH_H
#include "ckpt/ckpt.h"
#include "kern/kern.h"
#include "kv/kv.h"

/* ---- linears -----------------------------------------------------------------------------------
 */
typedef enum arch_linear_kind {
    ARCH_QKV,
    ARCH_O,
    ARCH_GATE_UP, /* without a gate: the up projection alone */
    ARCH_DOWN,
    ARCH_Q_A, /* MLA: down to q_lora, up to heads; down to kv_lora + rope, up to heads */
    ARCH_Q_B,
    ARCH_KV_A,
    ARCH_KV_B,
    ARCH_DELTA_IN, /* linear attention: q, k, v, z; b, a; output */
    ARCH_DELTA_BA,
    ARCH_DELTA_OUT,
    ARCH_ROUTER,
    ARCH_EXPERT_UP, /* gate and up of one expert, or of all in one tensor */
    ARCH_EXPERT_DOWN,
    ARCH_SHARED_UP,
    ARCH_SHARED_DOWN,
    ARCH_SHARED_GATE,
    ARCH_LM_HEAD,
    ARCH_LINEAR_KINDS
} arch_linear_kind;
extern const char *const arch_kind_names[ARCH_LINEAR_KINDS]; /* "q/k/v", for reports */
/* Does `quantize` take linears of this kind? Routers, gates and the head stay as they are. */
bool arch_quantizable(arch_linear_kind k);

#define ARCH_PARTS 4
typedef struct arch_shard { /* one stored linear */
    char module[128];       /* "model.layers.3.self_attn.q_proj" */
    char bias_name[128];    /* tensor; "" = none may be there */
    int64_t N, K;
    int64_t E;       /* experts in this one tensor; 1 otherwise */
    bool bias;       /* announced by the config: must be there */
    bool transposed; /* where it is stored plain: [K, N] */
    /* Rows are stored as groups of part[0] + … + part[n_parts-1] rows; they are used as all rows of
     * part 0 of every group, then all of part 1, … (n_parts 0: as stored). */
    int n_parts;
    int64_t part[ARCH_PARTS];
} arch_shard;

typedef struct arch_linear { /* one fused linear = list of shards */
    arch_linear_kind kind;
    int layer;  /* -1 outside layers */
    int expert; /* -1 = no expert, or all experts (E > 1) */
    int n_shards;
    arch_shard shard[3];
} arch_linear;
/* rows[i] = stored row of row i in use; false: as stored. */
bool arch_shard_rows(const arch_shard *s, int32_t *rows);

/* ---- a model -----------------------------------------------------------------------------------
 */
typedef enum arch_mix { ARCH_ATTENTION, ARCH_MLA, ARCH_DELTA } arch_mix;
typedef enum arch_ffn { ARCH_GLU, ARCH_MLP, ARCH_MOE } arch_ffn; /* gated, plain, experts */
typedef enum arch_norm_kind {
    ARCH_RMS,
    ARCH_RMS_ONE,       /* RMS norm whose stored weight lacks 1 */
    ARCH_LAYER_NORM,    /* with a bias where one is stored; and from here on */
    ARCH_LAYER_NORM_ONE /* whose stored weight lacks 1 */
} arch_norm_kind;
typedef enum arch_qk_norm {
    ARCH_QK_NONE,
    ARCH_QK_HEAD,      /* RMS, one weight [D] for all heads */
    ARCH_QK_WHOLE,     /* RMS over all heads together, weight [H*D] */
    ARCH_QK_HEAD_LAYER /* layer norm of each head, weight [H, D] */
} arch_qk_norm;

typedef struct arch_layer {
    arch_mix mix;
    arch_ffn ffn;
    int window;    /* 0 = full attention */
    int rope;      /* rotary table, -1 = none */
    int64_t inter; /* of a dense feed-forward */
} arch_layer;

typedef struct arch_moe {
    int E, top_k;
    int64_t inter, shared_inter; /* shared_inter 0 = no shared expert */
    kern_route_kind route;
    int n_group, topk_group;
    bool group_top2, renorm;
    float scale, jitter;
    kern_glu act;
    bool fused;            /* gate and up of all experts in one tensor, down in another */
    bool fused_transposed; /* these, stored plain, are [E, K, N] */
    bool interleaved;      /* their gate and up rows alternate */
    bool bias;             /* experts have biases */
} arch_moe;

/* Tensor names; those of a layer follow its prefix. NULL = the model has none. */
typedef struct arch_names {
    const char *embed, *pos, *final_norm, *head; /* whole */
    const char *layer;                           /* "model.layers.%d." */
    const char *norm1, *post_mix, *norm2, *post_ffn;
    const char *qkv, *q, *k, *v, *o, *q_norm, *k_norm, *sinks;
    const char *q_a, *q_a_norm, *q_b, *kv_a, *kv_a_norm, *kv_b;
    const char *delta_in, *delta_ba, *delta_out, *conv, *a_log, *dt_bias, *delta_norm;
    const char *delta_z, *delta_a; /* where they are stored apart: _in is q, k, v and _ba is b */
    const char *gate_up, *gate, *up, *down;
    const char *router, *route_bias, *experts, *e_gate, *e_up, *e_down; /* "mlp.experts." */
    const char *e_gate_up;                                              /* fused */
    const char *shared, *shared_gate;                                   /* "mlp.shared_expert." */
} arch_names;

typedef struct arch_row arch_row;
typedef struct arch_model {
    const arch_row *row;
    const ckpt_config *cfg;
    arch_names name;
    const char *prefix; /* of the tensors, inside a wrapper for images or sound; else NULL */
    int n_layers;
    arch_layer *layers;
    int64_t hidden, vocab;
    int H, Hk, D; /* D: of q and k as attention sees them */
    arch_norm_kind norm;
    float eps;
    arch_qk_norm qk_norm;
    bool qk_norm_late; /* after the rotation */
    bool qkv_bias, o_bias, mlp_bias, head_bias;
    bool qkv_by_head;       /* fused q/k/v: queries of a K/V head, K, V, and so on (gpt-neox) */
    bool attn_gate;         /* q_proj holds an output gate for each head (qwen3-next) */
    bool linear_transposed; /* plain linears of layers are stored [K, N] (gpt2) */
    bool rope_pairs;        /* neighbouring lanes are rotated together */
    int64_t rot;            /* lanes rotated */
    rope_config rope[2];    /* of full and of windowed layers where they differ */
    int n_ropes;
    float attn_scale, attn_softcap, logit_softcap, logit_scale, embed_scale, residual_scale;
    /* Queries at position p times 1 + far_beta * log(1 + floor(p / far_from)); 0 = as they are. */
    float far_beta;
    int64_t far_from;
    bool parallel; /* attention and feed-forward read the same stream */
    kern_glu act;
    struct {
        int64_t q_lora, kv_lora, nope, rope, v; /* q_lora 0 = q is one linear */
    } mla;
    struct {
        int Hk, Hv, Dk, Dv, conv;
    } delta;
    arch_moe moe;
    /* A share of a model that several devices run: H, Hk and the widths of feed-forwards are those
     * of one rank; these are the whole. n_ranks 0 = not divided. */
    int rank, n_ranks, H_all, Hk_all;
    bool heads_cut;
    arena *mem;
} arch_model;

struct arch_row {
    const char *name;     /* "qwen2" */
    const char *hf_names; /* "Qwen2ForCausalLM", space separated */
    const char *doc;
    /* Fills what differs from the Llama block, which is already there; refuses by key what cannot
     * be run. */
    int (*describe)(arch_model *m, err *e);
};
extern const arch_row arch_rows[];
extern const int arch_n_rows;

/* What in this config stands in the way of running it: parts of a model that no recipe here has,
 * in words; or parts beside the language model. "" = nothing that is known. */
void arch_obstacles(const ckpt_config *c, buf *out);
/* ERR_UNSUPPORTED lists the supported names. */
int arch_find(const ckpt_config *c, const arch_row **out, err *e);
/* files decides what the config leaves open (experts in one tensor or in many); NULL = usual form.
 */
int arch_open(arch_model **out, const ckpt_config *c, const ckpt *files, err *e);
void arch_close(arch_model *m);
/* How many stored tensors lie beside a wrapped language model, unused: its images and sound. */
int64_t arch_beside(const arch_model *m, const ckpt *files);
/* How many stored tensors belong to layers behind the last one, those for more tokens at a time
 * (num_nextn_predict_layers) apart: the config and the files are of different models. */
int64_t arch_behind(const arch_model *m, const ckpt *files);

/* All linears in order of use, the head last. Returns count; out may be NULL to count. */
int arch_linears(const arch_model *m, arch_linear *out, int cap);
/* ---- several devices (cut.c) ------------------------------------------------------------------
 * Makes of m what rank `rank` of n has of it. What cannot be divided by n is refused with the
 * numbers that can. */
int arch_take_share(arch_model *m, int rank, int n, err *e);
int arch_first_kv_head(const arch_model *m); /* of this rank, counted over all */
typedef struct arch_range {
    int64_t lo, hi;
} arch_range;
typedef struct arch_cut { /* of a stored linear, rows in the order of use */
    int n;
    arch_range rows[ARCH_PARTS], cols;
    bool by_rows, by_cols; /* neither: it is whole on every rank */
} arch_cut;
/* m: a rank's share; l: a linear of the whole model. */
void arch_cut_of(const arch_model *m, const arch_linear *l, int shard, arch_cut *out);
/* Numbers of devices that divide the whole model m, and `size` at multiples of `unit`. */
void arch_ranks_that_fit(const arch_model *m, int64_t size, int64_t unit, buf *out);

/* All other tensors (embedding, norms, …): whole name, rows (1 for a vector), columns. */
typedef void arch_tensor_fn(void *arg, const char *name, int64_t rows, int64_t cols);
void arch_plain_tensors(const arch_model *m, arch_tensor_fn *fn, void *arg);
void arch_kv_shapes(const arch_model *m, kv_layer_shape *out); /* [n_layers] */

/* Widest rows that a step needs, in f32 lanes: what loading allocates for each row of a step. */
typedef struct arch_widths {
    int64_t in, out;      /* widest input and output of a linear, head included */
    int64_t mix, attn;    /* q/k/v row; output of the heads */
    int64_t latent;       /* MLA: absorbed queries and their outputs */
    int64_t gate_up, act; /* feed-forward, rows of a token's experts together */
    int64_t slots;        /* experts a token */
    int64_t row, fixed;   /* all buffers of a step: lanes a row of it, and once */
    int64_t flow;         /* of those of a row, what goes between the ops of a layer */
} arch_widths;
void arch_widths_of(const arch_model *m, arch_widths *out);

/* Which stored tensors are embedding and head, whatever tie_word_embeddings claims (ends.c). */
typedef struct arch_ends {
    const char *embed, *head; /* modules: "model.embed_tokens", "lm_head" */
    bool shared;              /* one tensor serves as both */
    char warning[160];        /* "" = config and tensors agree */
} arch_ends;
struct quant_ckpt;
int arch_find_ends(const arch_model *m, const struct quant_ckpt *q, arch_ends *out, err *e);

/* ---- for the families' files -------------------------------------------------------------------
 * Keys of config.json (of its text_config where there is one). Absent: *out stays. */
int arch_i64(const arch_model *m, const char *key, int64_t *out, err *e);
int arch_int(const arch_model *m, const char *key, int *out, int max, err *e); /* 0 .. max */
int arch_f32(const arch_model *m, const char *key, float *out, err *e);
int arch_bool(const arch_model *m, const char *key, bool *out, err *e);
bool arch_has(const arch_model *m, const char *key);
int arch_act_of(const char *name, kern_glu *out, err *e);
#endif
