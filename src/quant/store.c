/* What the writers of all dialects share: tensors named after a module, whole or row by row.
 *
 * Rows go through a buffer of bounded size, so that storing a module needs no second copy of it.
 * Every dialect's store refuses what it cannot hold before its first tensor; quant__storable holds
 * the reasons that most of them share. */
#include <stdio.h>
#include <string.h>
#include "quant/quant_int.h"

#define ROW_BUFFER ((size_t)1 << 20)

int quant__begin(ckpt_writer *w, const char *module, const char *suffix, num_dtype type, int n_dims,
                 const int64_t *shape, err *e)
{
    char name[QUANT_NAME_MAX];
    int n = snprintf(name, sizeof name, "%s%s", module, suffix);
    if (n < 0 || (size_t)n >= sizeof name)
        return err_set(e, ERR_LIMIT, "module name of %zu bytes is too long", strlen(module));
    return ckpt_writer_begin(w, name, type, n_dims, shape, e);
}

int quant__put(ckpt_writer *w, const char *module, const char *suffix, num_dtype type, int n_dims,
               const int64_t *shape, const void *data, err *e)
{
    size_t n = num_bytes(type, 1);
    int rc = quant__begin(w, module, suffix, type, n_dims, shape, e);
    for (int i = 0; i < n_dims; i++)
        n *= (size_t)shape[i];
    return rc < 0 ? rc : ckpt_writer_data(w, data, n, e);
}

int quant__put_rows(ckpt_writer *w, const qtensor *t, int64_t n, quant__row_fn *fn, size_t bytes,
                    err *e)
{
    size_t step = ROW_BUFFER / bytes ? ROW_BUFFER / bytes : 1;
    uint8_t *b = NULL;
    int rc = mem_alloc((void **)&b, step * bytes, e);
    for (int64_t r = 0; rc >= 0 && r < n; r += (int64_t)step) {
        int64_t end = r + (int64_t)step < n ? r + (int64_t)step : n;
        for (int64_t i = r; i < end; i++)
            fn(t, i, b + (size_t)(i - r) * bytes, bytes);
        rc = ckpt_writer_data(w, b, (size_t)(end - r) * bytes, e);
    }
    mem_free(b);
    return rc;
}

void quant__row_copy(const qtensor *t, int64_t row, uint8_t *dst, size_t bytes)
{
    memcpy(dst, t->codes + (size_t)row * t->row_bytes, bytes);
}

void quant__row_bytes(const qtensor *t, int64_t row, uint8_t *dst, size_t bytes)
{
    (void)bytes;
    for (int64_t k = 0; k < t->K; k++)
        dst[k] = (uint8_t)qtensor_code(t, row, k);
}

bool quant__ordered(const qtensor *t)
{
    for (int64_t k = 0; t->g_idx && k < t->K; k++)
        if (t->g_idx[k] != k / t->block_k) return true;
    return false;
}

int quant__storable(const qtensor *t, const char *module, const char *dialect, unsigned can, err *e)
{
    const char *why = !t->scales && !(can & QUANT_CAN_PLAIN)     ? "a weight without scales"
                      : t->E != 1 && !(can & QUANT_CAN_EXPERTS)  ? "experts in one tensor"
                      : t->flat && !(can & QUANT_CAN_FLAT)       ? "blocks that cross rows"
                      : t->table && !(can & QUANT_CAN_TABLE)     ? "codes that index a table"
                      : t->zeros && !(can & QUANT_CAN_ZEROS)     ? "zero points"
                      : t->zeros && t->zero_type != NUM_I8       ? "float zero points"
                      : t->g_idx && !(can & QUANT_CAN_ORDER)     ? "an order of columns (g_idx)"
                      : t->pre_scale && !(can & QUANT_CAN_PRE)   ? "a vector that scales the input"
                      : t->n_global && !(can & QUANT_CAN_GLOBAL) ? "a second factor of the scales"
                      : t->n_global > 1                          ? "several global scales"
                      : t->spec.a.gran != Q_NONE && !(can & QUANT_CAN_ACT) ? "quantized activations"
                                                                           : NULL;
    if (why)
        return err_set(e, ERR_UNSUPPORTED, "module '%s': %s cannot hold %s, which would be lost",
                       module, dialect, why);
    return 0;
}

const quant_dialect *quant_dialect_by_name(const char *name)
{
    for (int i = 0; i < quant_n_dialects; i++) {
        const quant_dialect *d = quant_dialects[i];
        size_t n = strlen(name);
        const char *p = strstr(d->methods, name);
        bool word = p && n && (p == d->methods || p[-1] == ' ') && (!p[n] || p[n] == ' ');
        if (word || !strcmp(d->name, name)) return d;
    }
    return NULL;
}

int quant_emit(const quant_dialect *d, jw *j, const quant_written *m, int n, const qaxis *kv,
               char *const *ignore, int n_ignore, err *e)
{
    for (int i = 1; i < n; i++) {
        if (qaxis_equal(&m[i].spec.w, &m[0].spec.w) && qaxis_equal(&m[i].spec.a, &m[0].spec.a))
            continue;
        if (d->emit_modules) return d->emit_modules(j, m, n, kv, ignore, n_ignore, e);
        buf a = {0}, b = {0};
        qspec_format(&m[0].spec, &a);
        qspec_format(&m[i].spec, &b);
        int rc = err_set(e, ERR_UNSUPPORTED,
                         "modules '%s' (%s) and '%s' (%s) have different schemes; %s is written "
                         "with one for all",
                         m[0].module, a.data, m[i].module, b.data, d->name);
        buf_free(&a);
        buf_free(&b);
        return rc;
    }
    qspec s = m[0].spec;
    s.kv = *kv;
    return d->emit_config(j, &s, ignore, n_ignore, e);
}
