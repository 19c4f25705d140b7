/* Weights of whole codes with scales beside them: writing one module by its scheme.
 *
 * The mirror of scaled_load.c: codes in the type of the scheme, scales as F32 (E4M3 for nvfp4, U8
 * for MX), the second factor and the input scale as F32 scalars, pre_quant_scale in the model's
 * type where that is exact. A stack of experts is called as its module. A value that the stored
 * type would change is refused, and so is an activation scale that the scheme needs and the module
 * lacks. */
#include <stdio.h>
#include <string.h>
#include "quant/scaled.h"

typedef struct sink {
    ckpt_writer *w;
    const char *module, *dialect;
    const quant__scheme *s;
    const qtensor *t;
    num_dtype model_dtype;
} sink;

/* "weight_scale" behind the module: ".weight_scale", of a stack "_scale". */
static const char *suffix(const sink *k, const char *name, char out[64])
{
    const char *tail = k->t->E > 1 && !strncmp(name, "weight_", 7) ? name + 7 : name;
    snprintf(out, 64, "%s%s", k->t->E > 1 ? "_" : ".", tail);
    return out;
}

static int scalar(const sink *k, const char *name, float v, err *e)
{
    char tail[64];
    return quant__put(k->w, k->module, suffix(k, name, tail), NUM_F32, 0, NULL, &v, e);
}

/* Two rows of nibbles to one row of bytes. */
static void row_pair(const qtensor *t, int64_t row, uint8_t *dst, size_t bytes)
{
    const uint8_t *lo = t->codes + (size_t)(2 * row) * t->row_bytes, *hi = lo + t->row_bytes;
    for (size_t k = 0; k < bytes; k++) {
        int shift = k % 2 ? 4 : 0;
        dst[k] = (uint8_t)((lo[k / 2] >> shift & 15) | (hi[k / 2] >> shift & 15) << 4);
    }
}

static int store_codes(const sink *k, err *e)
{
    const qtensor *t = k->t;
    bool pairs = k->s->flags & SCHEME_ROW_PAIRS, fp4 = t->code == NUM_F4_E2M1;
    int64_t shape[3] = {t->E, pairs ? t->N / 2 : t->N, fp4 ? t->K / 2 : t->K};
    num_dtype type = pairs || fp4 ? NUM_U8 : t->code;
    int first = t->E > 1 ? 0 : 1;
    int rc =
        quant__begin(k->w, k->module, t->E > 1 ? "" : ".weight", type, 3 - first, shape + first, e);
    return rc < 0 ? rc
                  : quant__put_rows(k->w, t, shape[0] * shape[1],
                                    pairs ? row_pair : quant__row_copy, (size_t)shape[2], e);
}

/* The grid as floats, in the shape that the scheme's readers expect. */
static int store_scales(const sink *k, err *e)
{
    const qtensor *t = k->t;
    const qaxis *w = &t->spec.w;
    char tail[64];
    size_t n = (size_t)(t->E * t->scale_rows * t->scale_cols);
    int64_t shape[5] = {t->E, t->scale_rows, t->scale_cols, 1, 1};
    int first = t->E > 1 ? 0 : 1, dims = 3 - first;
    if (w->gran == Q_CHANNEL) dims--; /* [N] */
    if (w->gran == Q_TENSOR) dims -= 2;
    if (w->gran == Q_BLOCK && !strcmp(k->s->name, "FP8_PB_WO")) {
        dims += 2; /* [rows, 1, columns, 1] */
        shape[2] = 1;
        shape[3] = t->scale_cols;
    }
    suffix(k, k->s->scale, tail);
    if (w->scale != QS_FLOAT)
        return quant__put(k->w, k->module, tail, w->scale == QS_MX ? NUM_U8 : NUM_F8_E4M3, dims,
                          shape + first, t->scales, e);
    float *v = NULL;
    int rc = mem_alloc((void **)&v, n * sizeof *v, e);
    if (rc < 0) return rc;
    num_decode_row(t->scale_type, t->scales, n, v);
    rc = quant__put(k->w, k->module, tail, NUM_F32, dims, shape + first, v, e);
    mem_free(v);
    return rc;
}

static int store_pre_scale(const sink *k, err *e)
{
    const qtensor *t = k->t;
    num_dtype type = k->model_dtype;
    uint8_t *b = NULL;
    for (int64_t i = 0; i < t->K; i++)
        if (num_round(type, t->pre_scale[i]) != t->pre_scale[i]) type = NUM_F32;
    int rc = mem_alloc((void **)&b, num_bytes(type, (size_t)t->K), e);
    if (rc < 0) return rc;
    num_encode_row(type, t->pre_scale, (size_t)t->K, b);
    rc = quant__put(k->w, k->module, ".pre_quant_scale", type, 1, &t->K, b, e);
    mem_free(b);
    return rc;
}

static int refuse(const sink *k, const char *why, err *e)
{
    return err_set(e, ERR_UNSUPPORTED, "module '%s': %s (%s) cannot hold it: %s", k->module,
                   k->dialect, k->s->name, why);
}

static int check(const sink *k, err *e)
{
    const qtensor *t = k->t;
    const qaxis *a = &t->spec.a;
    unsigned can = QUANT_CAN_ACT | (k->s->global ? QUANT_CAN_GLOBAL : 0u) |
                   (k->s->flags & SCHEME_WRITE_PRE ? QUANT_CAN_PRE : 0u);
    if (k->s->flags == 0 || k->s->flags == SCHEME_FREE_BLOCK) can |= QUANT_CAN_EXPERTS;
    int rc = quant__storable(t, k->module, k->dialect, can, e);
    if (rc < 0) return rc;
    bool fixed = k->s->input && a->gran == Q_TENSOR && !a->dynamic;
    if (fixed && !(t->input_scale > 0)) return refuse(k, "the static input scale is missing", e);
    if (k->s->input && a->scale == QS_NVFP4 && !(t->input_global > 0))
        return refuse(k, "the second-level scale of the input is missing", e);
    if (k->s->global && t->n_global != 1) return refuse(k, "it has no second-level scale", e);
    if (t->code == NUM_F8_E4M3FNUZ) return refuse(k, "its codes are E4M3FNUZ", e);
    if ((k->s->flags & SCHEME_ROW_PAIRS) && t->N % 2) return refuse(k, "its rows are odd", e);
    if ((k->s->flags & SCHEME_FREE_GROUP) && t->K % t->block_k)
        return refuse(k, "its last group is short", e);
    return 0;
}

int quant__scaled_store(ckpt_writer *w, const char *module, const char *dialect,
                        const quant__scheme *s, const qtensor *t, num_dtype model_dtype, err *e)
{
    int rc = 0;
    const sink k = {w, module, dialect, s, t, model_dtype};
    TRY(check(&k, e));
    TRY(store_codes(&k, e));
    TRY(store_scales(&k, e));
    if (s->global) TRY(scalar(&k, s->global, t->global[0], e));
    if (t->pre_scale) TRY(store_pre_scale(&k, e));
    if (s->input && qaxis_quantized(&t->spec.a))
        TRY(scalar(&k, s->input, t->spec.a.scale == QS_NVFP4 ? t->input_global : t->input_scale,
                   e));
    rc = 0;
out:
    return rc < 0 ? rc : 0;
}

/* Equal but for sizes that the scheme leaves to the config. */
static bool same_axis(const qaxis *a, const qaxis *b, bool free_sizes)
{
    qaxis x = *a;
    if (free_sizes && x.gran == b->gran) {
        x.group = b->group;
        x.block_n = b->block_n;
        x.block_k = b->block_k;
    }
    return qaxis_equal(&x, b);
}

const quant__scheme *quant__scheme_for(const quant__scheme *list, int n, const qspec *s)
{
    for (int i = 0; i < n; i++) {
        qspec own;
        err ignored = {0};
        const quant__scheme *x = &list[i];
        if ((x->flags & SCHEME_READ_ONLY) || qspec_parse(x->spec, &own, &ignored) < 0) continue;
        bool sizes = x->flags & (SCHEME_FREE_GROUP | SCHEME_FREE_BLOCK);
        bool block = x->flags & SCHEME_FREE_BLOCK;
        if (same_axis(&s->w, &own.w, sizes) && same_axis(&s->a, &own.a, block) &&
            (!block || s->a.group == s->w.block_k))
            return x;
    }
    return NULL;
}

int quant__no_scheme(const char *dialect, const char *module, const qspec *s, const char *holds,
                     err *e)
{
    buf b = {0};
    qaxis_format(&s->w, &b);
    buf_puts(&b, " a:");
    qaxis_format(&s->a, &b);
    int rc = err_set(e, ERR_UNSUPPORTED, "%s%s%sw:%s: %s cannot hold this scheme; it holds %s",
                     module ? "module '" : "", module ? module : "", module ? "': " : "", b.data,
                     dialect, holds);
    buf_free(&b);
    return rc;
}
