/* Private to model: the loaded model and what its files share. */
#ifndef MODEL_INTERNAL_H
#define MODEL_INTERNAL_H
#include "model/model.h"

typedef struct model_vec { /* a norm; w NULL = none */
    float *w, *b;
} model_vec;

typedef struct model_vec_slot { /* where a small tensor hangs, and its numbers */
    float **at;
    int64_t n;
} model_vec_slot;

/* A step filled up to the size of a known one (bucket.c); arrays at addresses that stay. */
typedef struct model_pad {
    int32_t *ids, *pos, *slot[KV_GROUPS], *state, *rope_len, *logit_rows;
    kern_seq *seqs[KV_GROUPS];
    int64_t room; /* rows */
} model_pad;

typedef struct model_layer {
    model_vec norm1, post_mix, norm2, post_ffn;
    float *q_norm, *k_norm, *sinks;
    kern_linear *lin[ARCH_LINEAR_KINDS]; /* by kind; experts lie in e_up and e_down */
    kern_experts *e_up, *e_down;
    float *route_bias;
    float *q_a_norm, *kv_a_norm; /* MLA; its kv_b as two sets of matrices, one for each head: */
    qtensor k_up, v_up;          /* [H, kv_lora, nope], [H, v, kv_lora] */
    float *conv, *a_log, *dt_bias, *delta_norm;
} model_layer;

/* A stored linear, whole, while its model is loaded. */
typedef struct model_loaded {
    qtensor t[KERN_MAX_SHARDS];
    float *bias;
    qbytes file; /* what it takes there */
} model_loaded;

struct model_share; /* ranks.c */
struct model {
    const ckpt_config *cfg;
    arch_model *arch;          /* what this device has of the model: its share, or all */
    arch_model *whole;         /* as it is stored; arch where it is not divided */
    model **ranks;             /* of rank 0: all of them; NULL where there is one device */
    int n_ranks;               /* 0 = one device */
    team *owners;              /* a thread for each rank */
    struct model_share *share; /* while several are loaded */
    quant_ckpt *q;
    kern_dev *dev;
    model_opts opts;
    arena *mem;
    int n_layers;
    model_layer *layers;
    qtensor embed, pos; /* embed: codes NULL = the head's rows; pos: learned positions or none */
    model_vec final_norm;
    kern_linear *lm_head;
    int64_t head_row0; /* several ranks: its first row in the whole head, */
    float *zeros;      /* and a row of logits [vocab] */
    kv_layer_shape *kv_shapes;
    const float **k_scales, **v_scales;
    /* one step's activations, [max_rows, …]; logit_x holds gathered rows. `in` is what the halves
     * of a layer read: h, or x where the layer has no norm before them. */
    float *x, *h, *y, *y2, *qkv, *attn, *latent, *gu, *act, *logit_x;
    float *logits;   /* [max_logit_rows, vocab] on a device whose memory is not the program's */
    float *tap_host; /* [max_rows, hidden] there, made when a tap is first set */
    model_vec_slot *slots; /* small tensors of the layer in hand, still in host memory */
    int n_slots, cap_slots;
    model_pad pad;
    const float *in;
    float *cosv[2], *sinv[2], *inv;
    int64_t rot_half;
    bool rope_by_length;
    float *route_logits, *route_weight; /* [max_rows, E], [max_rows, top_k] */
    int32_t *route_expert, *route_row, *route_slot, *route_first;
    float *gates; /* [max_rows, 4*Hv]: b, a, decay, strength */
    model_tap_fn *tap;
    void *tap_arg;
    uint64_t kv_clipped;
    model_bytes bytes;
    model_report_line *report;
    int n_report;
    qspec spec;
    bool spec_known; /* of a linear other than the head */
    qspec online;    /* of opts.quantize */
    struct model_random *random;
    bool has_online;
};

/* rope.c: tables of one rope_config; rot lanes, max_position as trained. */
double model__rope_attention(const rope_config *r, int64_t max_position);
void model__rope_inv(const rope_config *r, int64_t rot, int64_t max_position, int64_t seq_len,
                     float *inv);
void model__rope_fill(const float *inv, int64_t half, double attention, int64_t pos, float *cosv,
                      float *sinv);
/* bucket.c: the step as a device that knows steps by name wants it: out is b, or b filled up with
 * rows of no sequence. Returns its name, 0 = none. */
uint64_t model__bucket(model *m, const batch *b, batch *out);
void model__pad_free(model_pad *p);
/* random.c: what model_opts.random puts in the place of stored tensors. Shards are lent until
 * model__random_drop, which leaves the embedding and positions unless `all` go. */
int model__random_shard(model *m, const arch_shard *s, qtensor *out, err *e);
int model__random_quantize(model *m, qtensor *t, err *e);
void model__random_vector(const model *m, const char *name, int64_t n, float *out);
void model__random_drop(model *m, bool all);
/* model.c: a model with nothing in it; what lies in it, from its checkpoint; a step of one device.
 */
model *model__make(quant_ckpt *q, kern_dev *d, const model_opts *o);
int model__fill(model *m, err *e);
int model__step(model *m, kv_pool *kv, const batch *b, float *logits, err *e);
/* ranks.c: several devices, m that of rank 0 */
int model__open_ranks(model *m, err *e);
void model__close_ranks(model *m);
int model__step_ranks(model *m, kv_pool *kv, const batch *b, float *logits, err *e);
void model__tap_ranks(model *m, bool on);
uint64_t model__clipped_ranks(const model *m);
/* A whole linear that all ranks cut their parts from. give: true, it was the last. */
int model__share_take(model *m, const arch_linear *l, model_loaded **out, err *e);
bool model__share_give(model *m, model_loaded *s);
/* Held while the checkpoint's own memory is changed. */
void model__share_lock(model *m);
void model__share_unlock(model *m);
/* load.c */
int model__load(model *m, err *e);
void model__unload(model *m);
int model__load_whole(model *m, const arch_linear *l, model_loaded *s, err *e);
void model__loaded_drop(model_loaded *s);
/* Adds a line of the load report, or raises the count of an equal one. */
void model__report_add(model *m, const char *what, const qspec *s, const kern_linear *l);
/* mix.c, ffn.c: m->in -> m->y, what the layer adds to the stream (before a norm after it). */
void model__norm(model *m, const float *x, const model_vec *w, int64_t T, float *out);
void model__mix(model *m, int layer, kv_pool *kv, const batch *b);
void model__ffn(model *m, int layer, int64_t T, float *out);
#endif
