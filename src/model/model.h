/* A loaded model on a device and one step of it. */
#ifndef MODEL_MODEL_H
#define MODEL_MODEL_H
#include "kern/kern.h"
#include "kv/kv.h"
#include "model/arch.h"
#include "quant/quant.h"

typedef struct batch {               /* the only thing that crosses from engine to model */
    int64_t T;                       /* rows = new tokens of all sequences */
    const int32_t *ids, *pos;        /* [T] */
    const int32_t *slot[KV_GROUPS];  /* [T] page*page_tokens + offset, in each group's pages */
    const kern_seq *seqs[KV_GROUPS]; /* [n_seqs], equal but for the page tables */
    int n_seqs;
    const int32_t *state;    /* [n_seqs] state slot of each sequence; NULL = the model has none */
    const int32_t *rope_len; /* [n_seqs] tokens of the whole sequence, for rotary tables that depend
                                on it; NULL = kv_len (a sequence that is not cut into chunks) */
    const int32_t *logit_rows;
    int64_t n_logits; /* rows whose logits are wanted */
    kern_top *tops;   /* [n_logits, rounded up to a named step], kern_host_alloc: not NULL = the
                         best of these rows are wanted in place of all their logits */
} batch;

typedef struct model_opts {
    kern_act act;
    const char *quantize; /* scheme to apply at load to an unquantized checkpoint; NULL */
    bool strict;
    bool random;            /* the checkpoint is a shape without weights: make some (random.c) */
    int64_t max_rows;       /* largest T of a step */
    int64_t max_logit_rows; /* largest n_logits; 0 = max_rows */
} model_opts;

typedef struct model model;
/* Called after embedding (layer -1) and after each layer with x [T, hidden]; NULL = off. */
typedef void model_tap_fn(void *arg, int layer, const float *x, int64_t T, int64_t hidden);

/* On several devices where d is the first of several (kern_opts.ranks); sizes and shapes are then
 * those of one of them, the first, which has the most. */
int model_open(model **out, quant_ckpt *q, kern_dev *d, const model_opts *o, err *e);
void model_close(model *m);
const ckpt_config *model_cfg(const model *m);
int model_kv_shapes(const model *m, const kv_layer_shape **out); /* returns n_layers */
const float *const *model_k_scales(const model *m);              /* [n_layers] -> [Hk] or NULL */
const float *const *model_v_scales(const model *m);
/* A pool for this model on its device, or on each of its devices; layers and scales of o are not
 * read. */
int model_pool_open(model *m, kv_pool **out, const kv_pool_opts *o, err *e);
/* One step: stores K/V into the pool, writes logits [n_logits, vocab] f32, or tops. No allocation.
 */
int model_forward(model *m, kv_pool *kv, const batch *b, float *logits, err *e);
void model_set_tap(model *m, model_tap_fn *fn, void *arg);
int64_t model_vocab(const model *m);       /* rows of lm_head */
uint64_t model_kv_clipped(const model *m); /* elements clipped by the fp8 KV store so far */
typedef struct model_bytes {
    qbytes file;       /* canonical bytes by kind */
    uint64_t prepared; /* resident linear bytes */
    uint64_t other;    /* embeddings, norms, tables */
    uint64_t workspace;
} model_bytes;
void model_memory(const model *m, model_bytes *out);
/* Load report: one line per distinct (kind, spec, choice): for doctor, serve's log, manifests. */
typedef struct model_report_line {
    char what[64]; /* "q/k/v x30" */
    char spec[96];
    kern_choice choice[KERN_BUCKETS];
} model_report_line;
int model_report(const model *m, const model_report_line **out); /* returns n */
qspec model_spec(const model *m); /* the dominating w and a; kv as stored in the ckpt */
/* Names the rotary table that a sequence of seq_len tokens uses: 0 for all lengths in most models;
 * else keys stored under one table must not be read under another (dynamic, longrope). */
int64_t model_rope_key(const model *m, int64_t seq_len);
/* A weight [E, N, K] as model_opts.random makes it: by round to nearest if the spec quantizes. */
int model_random_tensor(const qspec *spec, int64_t E, int64_t N, int64_t K, team *workers,
                        qtensor *out, err *e);
/* RoPE tables: cos/sin [rot_dim/2] for a position; exported for tests. seq_len for
 * dynamic/longrope. */
void model_rope_row(const ckpt_config *c, int64_t pos, int64_t seq_len, float *cosv, float *sinv);
#endif
