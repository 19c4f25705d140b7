/* Shared by the files of this room only. */
#ifndef QUANT_QUANT_INT_H
#define QUANT_QUANT_INT_H
#include "quant/quant.h"

#define QUANT_NAME_MAX 512

/* Format of a config group when the file leaves it out, and what a writer must say for a spec. */
const char *quant__ct_format(const qspec *s);

int quant__plain_detect(quant_ckpt *q, err *e);
int quant__plain_load(const quant_ckpt *q, const char *module, qtensor *out, err *e);

int quant__ct_detect(quant_ckpt *q, err *e);
bool quant__ct_has(const quant_ckpt *q, const char *module);
int quant__ct_load(const quant_ckpt *q, const char *module, qtensor *out, err *e);
int quant__ct_store(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                    err *e);
int quant__ct_emit_config(jw *j, const qspec *s, char *const *ignore, int n_ignore, err *e);

/* module.suffix; NULL in *out when absent and not needed. */
int quant__tensor(const quant_ckpt *q, const char *module, const char *suffix, bool need,
                  const ckpt_tensor **out, err *e);
int quant__warn(quant_ckpt *q, const char *fmt, ...) PRINTF(2, 3);
/* n bytes that qtensor_free releases. */
int quant__own(qtensor *t, size_t a, size_t b, void **out, err *e);

int quant__rtn(const float *w, int64_t N, int64_t K, const qspec *s, num_dtype model_dtype,
               const quant_stats *st, qtensor *out, err *e);
#endif
