/* Shared by the files of this room only. */
#ifndef BAKE_BAKE_INT_H
#define BAKE_BAKE_INT_H
#include "base/log.h"
#include "base/thread.h"
#include "bake/bake.h"
#include "quant/quant.h"

#define BAKE_NAME_MAX 512

typedef struct bake_mod { /* one linear that is to be quantized */
    char *name;
    const ckpt_tensor *t; /* its weight in the source */
    int64_t N, K;
    num_dtype dtype; /* type of the model here: of the scales */
    int set;         /* fused with the other modules of this number (q, k, v) */
    uint64_t hash;   /* of the dequantized rows, as quantized */
    uint64_t bytes;  /* written */
} bake_mod;

typedef struct bake_list {
    bake_mod *mods;
    int n;
    char **ignore; /* for the config: linears that stay as they are */
    int n_ignore;
    const ckpt_tensor *first; /* tensor 0 of the source: by_tensor is indexed from it */
    int *by_tensor;           /* module + 1 of a source tensor, 0 = none */
    arena *mem;
    int n_stacked; /* linears that are no stored matrix [out, in] */
} bake_list;

/* Which linears are there; rules of the user taken out. Notes go to r. */
int bake__list(bake_list *l, ckpt *c, const bake_opts *o, bake_report *r, err *e);
/* Group sizes against K, before any work; names every module and the way out. */
int bake__check_groups(const bake_list *l, const qspec *s, err *e);
void bake__list_drop(bake_list *l);
/* Module of a tensor of the source, or NULL. */
bake_mod *bake__find(const bake_list *l, const ckpt_tensor *t);

void bake__note(bake_report *r, const char *fmt, ...) PRINTF(2, 3);
const char *bake__dtype_name(num_dtype t); /* "bfloat16", as config.json says it */
num_dtype bake__dtype_of(const ckpt_tensor *t);

/* Contradictions between tie_word_embeddings and the tensors. */
typedef struct bake_tie {
    bool drop_head; /* lm_head.weight is a copy of the embedding */
    bool untie;     /* config must say false: a different head is stored */
} bake_tie;
int bake__tie(ckpt *c, bake_tie *out, bake_report *r, err *e);

/* config.json of the source, edited. quant = text of quantization_config or NULL (removed);
 * dtype NUM_NONE keeps what it says; origin = JSON text for tare_origin or NULL to keep. */
int bake__config(ckpt *c, const char *quant, num_dtype dtype, const bake_tie *tie,
                 const char *origin, buf *out, err *e);
/* tokenizer and generation files of a gguf, or the side files of a directory. */
int bake__side_files(ckpt_writer *w, ckpt *c, bake_report *r, err *e);
/* {"gguf_types": …, "file": …} for a gguf; empty when there is nothing to say. */
void bake__origin(ckpt *c, buf *out);

/* convert to another dialect: codes, scales and zero points as they are. */
int bake__recode(const convert_opts *o, const quant_dialect *to, bake_report *r, err *e);

/* A tensor that is not quantized, in pieces, refused if it is not finite; type `to` or its own when
 * NUM_NONE. hash = of the bytes written. */
int bake__copy(ckpt_writer *w, const ckpt *c, const ckpt_tensor *t, num_dtype to, uint64_t *hash,
               err *e);
/* A temporary copy and one shard twice must fit beside out. */
int bake__disk(const char *out, uint64_t bytes, uint64_t max_shard, err *e);
int bake__not_same(const char *in, const char *out, err *e);
int bake__finite(const float *v, size_t n, const ckpt_tensor *t, err *e);
uint64_t bake__tensor_hash(const ckpt_tensor *t);
/* Holds a tensor of the output against the hash of what was written, and lets its pages go. */
int bake__read_back(const ckpt *c, const char *name, uint64_t hash, err *e);

/* fp32 rows of a source weight, by all workers. */
int bake__load(team *tm, const ckpt *c, const bake_mod *m, float *w, err *e);
/* Order-independent hash of the dequantized rows; with src also the SNR against it. */
int bake__digest(team *tm, const qtensor *q, const ckpt *c, const ckpt_tensor *src, uint64_t *hash,
                 double *snr_db, err *e);
/* Reopens dir through the ordinary loader and holds every tensor against what was written. */
int bake__verify(const char *dir, ckpt *src, const bake_list *l, const uint64_t *hashes,
                 const qspec *s, team *tm, bake_report *r, err *e);
#endif
