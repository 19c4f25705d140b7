/* Dialects of one shape: a weight of whole codes, and beside it tensors of scales. fp8 and its
 * kin, ModelOpt, Quark and the INT8 families differ only in names, in what a scale covers and in
 * what the config says; each has a table of schemes, and loading, describing and finding modules is
 * written once (scaled_load.c). A group's `format` is the name of its scheme. Private to this room.
 */
#ifndef QUANT_SCALED_H
#define QUANT_SCALED_H
#include "quant/quant_int.h"

enum {
    SCHEME_ROW_PAIRS = 1,   /* int4: byte [i, k] holds rows 2i (low) and 2i+1 of column k */
    SCHEME_FP8_FRAME = 2,   /* int4 weights are rounded to fp8 by `global` (W4A8_AWQ) */
    SCHEME_PRE_SCALE = 4,   /* pre_quant_scale [K] may multiply the input */
    SCHEME_FREE_GROUP = 8,  /* the group size follows from the columns of the scales */
    SCHEME_FREE_BLOCK = 16, /* the config gives the block size; activations in groups of bk */
    SCHEME_READ_ONLY = 32,  /* another scheme of the table is written for its spec */
    SCHEME_WRITE_PRE = 64,  /* readers of the scheme know pre_quant_scale */
};
typedef struct quant__scheme {
    const char *name;   /* quant_algo, or the dialect's own word */
    const char *spec;   /* w and a; sizes that the config gives replace its own */
    const char *scale;  /* suffix of the scales: "weight_scale" */
    const char *global; /* suffix of the second-level multiplier, or NULL */
    const char *input;  /* suffix of the static input scale, or NULL */
    unsigned flags;
} quant__scheme;

typedef struct quant__scaled { /* q->own of these dialects */
    const quant__scheme *schemes;
    int n;
    bool fnuz;      /* F8_E4M3 bytes are E4M3FNUZ, whatever their tag says */
    bool u8_scales; /* block scales of type U8 are E8M0 */
} quant__scaled;

/* Rows of the registry. */
extern const quant_dialect quant__fp8, quant__fbgemm_fp8, quant__w8a8_fp8, quant__mxfp8,
    quant__modelopt, quant__w8a8_int8, quant__blockwise_int8, quant__quark;

extern const quant_part quant__scaled_parts[];
const quant__scheme *quant__scheme_named(const quant__scheme *list, int n, const char *name);
bool quant__scaled_has(const quant_ckpt *q, const char *module);
int quant__scaled_load(const quant_ckpt *q, const char *module, qtensor *out, err *e);
int quant__scaled_describe(const quant_ckpt *q, const char *module, quant_module *out, err *e);

/* The functions that all of them share. */
#define SCALED_DIALECT                                                                             \
    .has = quant__scaled_has, .load = quant__scaled_load, .parts = quant__scaled_parts,            \
    .describe = quant__scaled_describe

/* Sets q->own; has, load and describe work from then on. */
quant__scaled *quant__scaled_init(quant_ckpt *q, const quant__scheme *list, int n);
/* The list of excluded modules: "re:" + regex, a glob where there is * ? or [, else `plain`. */
int quant__excludes(quant_ckpt *q, const json *v, const char *where, quant_rule_kind plain, err *e);
/* One group for every linear. */
int quant__scaled_group(quant_ckpt *q, const quant__scheme *s, const qspec *spec, err *e);
/* weight_block_size of the config: 1 and both sizes, 0 when there is none. */
int quant__block_size(const quant_ckpt *q, int32_t *bn, int32_t *bk, err *e);
/* Last step of detect: tensors of another method, then config against tensors. */
int quant__scaled_finish(quant_ckpt *q, err *e);
/* "FP8", {"num_bits": 8, "type": "float"} or null: the KV axis; what is not run gives a warning. */
int quant__kv_word(quant_ckpt *q, const json *v, err *e);
/* The scheme that holds these axes, or NULL; and the refusal that says what the dialect holds. */
const quant__scheme *quant__scheme_for(const quant__scheme *list, int n, const qspec *s);
int quant__no_scheme(const char *dialect, const char *module, const qspec *s, const char *holds,
                     err *e);
int quant__scaled_store(ckpt_writer *w, const char *module, const char *dialect,
                        const quant__scheme *s, const qtensor *t, num_dtype model_dtype, err *e);
#endif
