/* Shared by the files of this room only. */
#ifndef QUANT_QUANT_INT_H
#define QUANT_QUANT_INT_H
#include "quant/quant.h"

/* Format of a config group when the file leaves it out, and what a writer must say for a spec. */
const char *quant__ct_format(const qspec *s);

int quant__plain_detect(quant_ckpt *q, err *e);
int quant__plain_load(const quant_ckpt *q, const char *module, qtensor *out, err *e);

int quant__gptq_detect(quant_ckpt *q, err *e);
int quant__gptq_load(const quant_ckpt *q, const char *module, qtensor *out, err *e);
int quant__awq_detect(quant_ckpt *q, err *e);
int quant__gptq_store(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                      err *e);
int quant__gptq_emit_config(jw *j, const qspec *s, char *const *ignore, int n_ignore, err *e);
int quant__gptq_emit_modules(jw *j, const quant_written *m, int n, const qaxis *kv,
                             char *const *ignore, int n_ignore, err *e);
int quant__awq_store(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                     err *e);
int quant__awq_emit_config(jw *j, const qspec *s, char *const *ignore, int n_ignore, err *e);
void quant__gptq_arith(const quant_ckpt *q, const qtensor *t, quant_arith *out);
void quant__f16_arith(const quant_ckpt *q, const qtensor *t, quant_arith *out);
int quant__awq_load(const quant_ckpt *q, const char *module, qtensor *out, err *e);
int quant__awq_describe(const quant_ckpt *q, const char *module, quant_module *out, err *e);
extern const quant_part quant__autoround_parts[];
int quant__autoround_detect(quant_ckpt *q, err *e);
bool quant__autoround_has(const quant_ckpt *q, const char *module);
void quant__autoround_arith(const quant_ckpt *q, const qtensor *t, quant_arith *out);
int quant__autoround_load(const quant_ckpt *q, const char *module, qtensor *out, err *e);
int quant__autoround_describe(const quant_ckpt *q, const char *module, quant_module *out, err *e);

extern const quant_part quant__ct_parts[];
int quant__ct_detect(quant_ckpt *q, err *e);
void quant__ct_arith(const quant_ckpt *q, const qtensor *t, quant_arith *out);
bool quant__ct_has(const quant_ckpt *q, const char *module);
int quant__ct_load(const quant_ckpt *q, const char *module, qtensor *out, err *e);
int quant__ct_store(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                    err *e);
int quant__ct_emit_config(jw *j, const qspec *s, char *const *ignore, int n_ignore, err *e);
int quant__ct_emit_modules(jw *j, const quant_written *m, int n, const qaxis *kv,
                           char *const *ignore, int n_ignore, err *e);

extern const quant_part quant__bnb_parts[];
int quant__bnb_detect(quant_ckpt *q, err *e);
bool quant__bnb_has(const quant_ckpt *q, const char *module);
int quant__bnb_load(const quant_ckpt *q, const char *module, qtensor *out, err *e);
int quant__bnb_describe(const quant_ckpt *q, const char *module, quant_module *out, err *e);
void quant__bnb_arith(const quant_ckpt *q, const qtensor *t, quant_arith *out);
int quant__bnb_store(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                     err *e);
int quant__bnb_emit_config(jw *j, const qspec *s, char *const *ignore, int n_ignore, err *e);

extern const quant_part quant__mxfp4_parts[];
int quant__mxfp4_detect(quant_ckpt *q, err *e);
bool quant__mxfp4_has(const quant_ckpt *q, const char *module);
int quant__mxfp4_load(const quant_ckpt *q, const char *module, qtensor *out, err *e);
int quant__mxfp4_describe(const quant_ckpt *q, const char *module, quant_module *out, err *e);
int quant__mxfp4_store(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                       err *e);
int quant__mxfp4_emit_config(jw *j, const qspec *s, char *const *ignore, int n_ignore, err *e);

/* Reads opts.kv_scales into q->kv_file. */
int quant__kv_file(quant_ckpt *q, const char *path, err *e);
int quant__warn(quant_ckpt *q, const char *fmt, ...) PRINTF(2, 3);

/* module.suffix; NULL in *out when absent and not needed. */
int quant__tensor(const quant_ckpt *q, const char *module, const char *suffix, bool need,
                  const ckpt_tensor **out, err *e);
/* The same where the suffix brings its separator: "_blocks", or "" for the module's own name. */
int quant__named(const quant_ckpt *q, const char *module, const char *suffix, bool need,
                 const ckpt_tensor **out, err *e);
/* n bytes that qtensor_free releases. */
int quant__own(qtensor *t, size_t a, size_t b, void **out, err *e);
/* The tensor's elements: borrowed, or a copy that `out` owns where the map leaves them unaligned.
 */
int quant__borrow(qtensor *out, const ckpt_tensor *t, const void **p, err *e);
/* Sets spec, shape and scale grid of one matrix. */
void quant__set_grid(qtensor *q, const qspec *spec, int64_t N, int64_t K);
/* [a,b]; [a] does for b = 1, and any shape of one element for a = b = 1. */
bool quant__has_shape(const ckpt_tensor *t, int64_t a, int64_t b);
void quant__shape_text(const ckpt_tensor *t, buf *b);
int quant__wrong_type(const ckpt_tensor *t, const char *want, err *e);
/* An E4M3 tensor of two dimensions or more without NaN: fast kernels read that code as a number. */
int quant__e4m3_finite(const ckpt_tensor *t, err *e);
int quant__wrong_shape(const ckpt_tensor *t, err *e, const char *need, ...) PRINTF(3, 4);

/* A JSON list of strings as compiled rules; kind < 0 = the notation of compressed-tensors. */
int quant__strings(quant_ckpt *q, const json *v, const char *where, int kind, char ***out, int *n,
                   quant_rule ***rules, err *e);
/* The same into q->ignore; call it once. */
int quant__ignore(quant_ckpt *q, const json *v, const char *where, int kind, err *e);
void quant__count_ignore(quant_ckpt *q, const char *module);
/* Appends a group of one target. format "dense": its modules are unquantized. NULL on error.
 * Earlier pointers to groups become stale. */
quant_group *quant__group(quant_ckpt *q, const qspec *spec, const char *format, int kind,
                          const char *target, err *e);
/* The weight as a plain one, in the arithmetic of its dialect. */
int quant__expand(const quant_ckpt *q, qtensor *t, err *e);
/* describe for weight [.., N, K], and for weight_packed with weight_shape. */
int quant__describe_plain(const quant_ckpt *q, const char *module, quant_module *out, err *e);
/* Holds config against tensors, for dialects with `parts`: counts what each group and each ignore
 * rule caught; a quantized module that the config holds for unquantized or does not describe, and a
 * checkpoint without any quantized tensor, are errors. */
int quant__sweep(quant_ckpt *q, err *e);
/* Tensors that only a quantized weight has, without the codes: a checkpoint that is torn. */
int quant__strays(const quant_ckpt *q, err *e);

/* module + suffix (with its separator) as a tensor of the output: begun, or whole. */
int quant__begin(ckpt_writer *w, const char *module, const char *suffix, num_dtype type, int n_dims,
                 const int64_t *shape, err *e);
int quant__put(ckpt_writer *w, const char *module, const char *suffix, num_dtype type, int n_dims,
               const int64_t *shape, const void *data, err *e);
/* The data of a tensor that was begun: n rows of `bytes`, each made by fn. */
typedef void quant__row_fn(const qtensor *t, int64_t row, uint8_t *dst, size_t bytes);
int quant__put_rows(ckpt_writer *w, const qtensor *t, int64_t n, quant__row_fn *fn, size_t bytes,
                    err *e);
quant__row_fn quant__row_copy;  /* canonical bytes as they are */
quant__row_fn quant__row_bytes; /* one code a byte */
/* ERR_UNSUPPORTED names module, dialect and what it would lose; `can` says what it holds. */
enum {
    QUANT_CAN_ZEROS = 1,
    QUANT_CAN_ORDER = 2,
    QUANT_CAN_PRE = 4,
    QUANT_CAN_GLOBAL = 8,
    QUANT_CAN_TABLE = 16,
    QUANT_CAN_FLAT = 32,
    QUANT_CAN_EXPERTS = 64,
    QUANT_CAN_ACT = 128,
    QUANT_CAN_PLAIN = 256
};
bool quant__ordered(
    const qtensor *t); /* columns belong to groups in another order than their own */
int quant__storable(const qtensor *t, const char *module, const char *dialect, unsigned can,
                    err *e);

int quant__rtn(const float *w, int64_t N, int64_t K, const qspec *s, num_dtype model_dtype,
               const quant_stats *st, qtensor *out, err *e);
#endif
