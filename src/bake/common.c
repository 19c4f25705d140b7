/* What quantize and convert share: tied embeddings, config.json, side files, plain tensors copied
 * in pieces, disk space. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include "bake/bake_int.h"

#define PIECE ((size_t)1 << 20) /* elements converted at a time */

void bake__note(bake_report *r, const char *fmt, ...)
{
    char text[1200];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    r->notes = xrealloc(r->notes, (size_t)(r->n_notes + 1) * sizeof *r->notes);
    r->notes[r->n_notes++] = xstrdup(text);
}

void bake_report_free(bake_report *r)
{
    for (int i = 0; i < r->n_notes; i++)
        free(r->notes[i]);
    free(r->notes);
    free(r->modules);
    *r = (bake_report){0};
}

const char *bake__dtype_name(num_dtype t)
{
    return t == NUM_F32 ? "float32" : t == NUM_F16 ? "float16" : "bfloat16";
}

/* ---- tied embeddings ----------------------------------------------------------------------------
 */

static int same_tensor(const ckpt *c, const ckpt_tensor *a, const ckpt_tensor *b, bool *same,
                       err *e)
{
    int rc = 0;
    float *x = NULL;
    *same = a->n_dims == 2 && b->n_dims == 2 && a->shape[0] == b->shape[0] &&
            a->shape[1] == b->shape[1];
    if (!*same) return 0;
    if (a->dtype == b->dtype && a->gguf == b->gguf) {
        *same = !memcmp(a->data, b->data, (size_t)a->bytes);
        return 0;
    }
    size_t K = (size_t)a->shape[1];
    TRY(mem_alloc((void **)&x, 2 * K * sizeof *x, e));
    for (int64_t r = 0; *same && r < a->shape[0]; r++) {
        TRY(ckpt_load_rows(c, a, r, r + 1, x, e));
        TRY(ckpt_load_rows(c, b, r, r + 1, x + K, e));
        *same = !memcmp(x, x + K, K * sizeof *x);
    }
    rc = 0;
out:
    mem_free(x);
    return rc;
}

int bake__tie(ckpt *c, bake_tie *out, bake_report *r, err *e)
{
    const ckpt_tensor *emb = ckpt_find(c, "model.embed_tokens.weight"),
                      *head = ckpt_find(c, "lm_head.weight");
    bool tied = ckpt_cfg(c)->tie_embeddings, same = false;
    *out = (bake_tie){0};
    if (!emb) return 0;
    if (!head && !tied)
        return err_set(
            e, ERR_MISSING,
            "%s: tensor 'lm_head.weight' is missing and tie_word_embeddings is false; add the "
            "tensor, or set tie_word_embeddings to true if the embedding is the head",
            ckpt_path(c));
    if (!head || !tied) return 0;
    int rc = same_tensor(c, emb, head, &same, e);
    if (rc < 0) return rc;
    out->drop_head = same;
    out->untie = !same;
    if (same) {
        bake__note(r, "lm_head.weight is a copy of the tied embedding; one copy is kept");
    } else {
        bake__note(r,
                   "tie_word_embeddings is true, but another lm_head.weight is stored; it is used, "
                   "and the output says tie_word_embeddings false");
        log_warn(
            "%s: tie_word_embeddings is true, but lm_head.weight differs from the embedding; the "
            "stored head is used",
            ckpt_path(c));
    }
    return 0;
}

/* ---- config and side files ----------------------------------------------------------------------
 */

static void put(json *o, const char *key, json *value)
{
    if (cJSON_GetObjectItemCaseSensitive(o, key))
        cJSON_ReplaceItemInObjectCaseSensitive(o, key, value);
    else
        cJSON_AddItemToObject(o, key, value);
}

int bake__config(ckpt *c, const char *quant, num_dtype dtype, const bake_tie *tie,
                 const char *origin, buf *out, err *e)
{
    json *o = cJSON_Duplicate(ckpt_cfg(c)->raw, true);
    if (!o) return err_set(e, ERR_NOMEM, "%s: config cannot be copied", ckpt_path(c));
    cJSON_DeleteItemFromObjectCaseSensitive(o, "quantization_config");
    cJSON_DeleteItemFromObjectCaseSensitive(o, "compression_config");
    if (tie->untie) put(o, "tie_word_embeddings", cJSON_CreateFalse());
    if (dtype != NUM_NONE) {
        const char *name = bake__dtype_name(dtype);
        put(o, "dtype", cJSON_CreateString(name));
        put(o, "torch_dtype", cJSON_CreateString(name));
    }
    if (origin && *origin) put(o, "tare_origin", cJSON_Parse(origin));
    if (quant) put(o, "quantization_config", cJSON_CreateRaw(quant)); /* 6.0 stays 6.0 */
    char *text = cJSON_Print(o);
    if (text) {
        buf_puts(out, text);
        buf_putc(out, '\n');
    }
    cJSON_free(text);
    json_drop(o);
    return text ? 0 : err_set(e, ERR_NOMEM, "%s: config cannot be written", ckpt_path(c));
}

void bake__origin(ckpt *c, buf *out)
{
    if (!ckpt_is_gguf(c)) return;
    jw w;
    jw_init(&w, out, 0);
    jw_obj(&w);
    jw_kstr(&w, "gguf_types", ckpt_gguf_types(c));
    jw_kstr(&w, "file", file_basename(ckpt_path(c)));
    jw_end_obj(&w);
}

int bake__side_files(ckpt_writer *w, ckpt *c, bake_report *r, err *e)
{
    int n = ckpt_writer_side_files(w, c, e);
    if (n > 0 && ckpt_is_gguf(c))
        bake__note(r, "tokenizer, chat template and generation config were made from the gguf");
    else if (n > 0)
        bake__note(r, "%d side files copied", n);
    return n < 0 ? n : 0;
}

/* ---- plain tensors ------------------------------------------------------------------------------
 */

int bake__finite(const float *v, size_t n, const ckpt_tensor *t, err *e)
{
    /* x * 0 is 0 for every finite x, and NaN for the rest: one sum tells, without branches. */
    float sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += v[i] * 0.0f;
    for (size_t i = 0; sum != 0 && i < n; i++)
        if (!isfinite(v[i]))
            return err_set(e, ERR_VALUE,
                           "%s: tensor '%s' holds %s; the source is damaged and is not quantized",
                           t->path, t->name, isnan(v[i]) ? "NaN" : "an infinite value");
    return 0;
}

uint64_t bake__tensor_hash(const ckpt_tensor *t)
{
    return XXH3_64bits(t->data, (size_t)t->bytes);
}

int bake__read_back(const ckpt *c, const char *name, uint64_t hash, err *e)
{
    const ckpt_tensor *t;
    int rc = ckpt_need(c, name, &t, e);
    if (rc < 0) return rc;
    if (bake__tensor_hash(t) != hash)
        return err_set(e, ERR_IO, "%s: tensor '%s' read back differs from what was written",
                       t->path, t->name);
    ckpt_dontneed(c, t);
    return 0;
}

static bool is_float(const ckpt_tensor *t)
{
    return t->dtype == NUM_NONE || t->dtype == NUM_F32 || t->dtype == NUM_F16 ||
           t->dtype == NUM_BF16;
}

/* Values that were finite and no longer are: f16 ends at 65504. */
static int check_range(num_dtype to, const float *v, size_t n, const ckpt_tensor *t, err *e)
{
    for (size_t i = 0; to == NUM_F16 && i < n; i++)
        if (fabsf(v[i]) >= 65520.0f)
            return err_set(e, ERR_VALUE,
                           "%s: tensor '%s' holds %g, which f16 cannot; use --dtype bf16", t->path,
                           t->name, (double)v[i]);
    return 0;
}

static int copy_converted(ckpt_writer *w, const ckpt *c, const ckpt_tensor *t, num_dtype to,
                          XXH3_state_t *h, err *e)
{
    int rc = 0;
    int64_t rows, K;
    float *v = NULL;
    uint8_t *out = NULL;
    ckpt_rows_of(t, &rows, &K);
    int64_t step = K < (int64_t)PIECE ? (int64_t)PIECE / K : 1;
    if (step > rows) step = rows;
    TRY(mem_alloc((void **)&v, (size_t)(step * K) * sizeof *v, e));
    TRY(mem_alloc((void **)&out, num_bytes(to, (size_t)(step * K)), e));
    for (int64_t r = 0; r < rows; r += step) {
        int64_t end = r + step < rows ? r + step : rows;
        size_t n = (size_t)((end - r) * K);
        TRY(ckpt_load_rows(c, t, r, end, v, e));
        TRY(bake__finite(v, n, t, e));
        TRY(check_range(to, v, n, t, e));
        num_encode_row(to, v, n, out);
        XXH3_64bits_update(h, out, num_bytes(to, n));
        TRY(ckpt_writer_data(w, out, num_bytes(to, n), e));
    }
    rc = 0;
out:
    mem_free(v);
    mem_free(out);
    return rc;
}

/* The bytes as they are. Float ones are looked through for NaN on the way. */
static int copy_raw(ckpt_writer *w, const ckpt_tensor *t, XXH3_state_t *h, err *e)
{
    int rc = 0;
    float *v = NULL;
    size_t step = PIECE * 4;
    if (is_float(t)) TRY(mem_alloc((void **)&v, step * sizeof *v / 2, e));
    for (size_t at = 0; at < t->bytes; at += step) {
        size_t n = (size_t)t->bytes - at < step ? (size_t)t->bytes - at : step;
        size_t size = (size_t)num_infos[t->dtype].bits / 8;
        if (v) {
            num_decode_row(t->dtype, t->data + at, n / size, v);
            TRY(bake__finite(v, n / size, t, e));
        }
        XXH3_64bits_update(h, t->data + at, n);
        TRY(ckpt_writer_data(w, t->data + at, n, e));
    }
    rc = 0;
out:
    mem_free(v);
    return rc;
}

int bake__copy(ckpt_writer *w, const ckpt *c, const ckpt_tensor *t, num_dtype to, uint64_t *hash,
               err *e)
{
    num_dtype own = t->dtype == NUM_NONE ? NUM_BF16 : t->dtype;
    bool raw = t->dtype != NUM_NONE && !t->permute_heads &&
               (!is_float(t) || to == NUM_NONE || to == t->dtype);
    if (to == NUM_NONE || !is_float(t)) to = own;
    XXH3_state_t *h = XXH3_createState();
    if (!h) return err_set(e, ERR_NOMEM, "out of memory");
    XXH3_64bits_reset(h);
    int rc = ckpt_writer_begin(w, t->name, raw ? t->dtype : to, t->n_dims, t->shape, e);
    if (rc >= 0) rc = raw ? copy_raw(w, t, h, e) : copy_converted(w, c, t, to, h, e);
    *hash = XXH3_64bits_digest(h);
    XXH3_freeState(h);
    ckpt_dontneed(c, t);
    return rc < 0 ? rc : 0;
}

/* ---- disk ---------------------------------------------------------------------------------------
 */

int bake__disk(const char *out, uint64_t bytes, uint64_t max_shard, err *e)
{
    char *dir = xstrdup(out);
    while (!file_is_dir(dir)) { /* the nearest folder that is there already */
        char *slash = strrchr(dir, '/');
        if (slash && slash > dir) {
            *slash = 0;
        } else {
            free(dir);
            dir = xstrdup(slash ? "/" : ".");
        }
    }
    uint64_t shard = max_shard ? max_shard : 5000000000u, have = file_free_bytes(dir);
    uint64_t need = bytes + (bytes < shard ? bytes : shard) + ((uint64_t)1 << 20);
    int rc = 0;
    if (have && have < need)
        rc = err_set(
            e, ERR_IO,
            "%s: %.1f MB are free, but writing and verifying the output needs %.1f MB; make room, "
            "choose another folder, or smaller shards",
            dir, (double)have / 1e6, (double)need / 1e6);
    free(dir);
    return rc;
}

int bake__not_same(const char *in, const char *out, err *e)
{
    char *a = realpath(in, NULL), *b = realpath(out, NULL);
    int rc =
        a && b && !strcmp(a, b)
            ? err_set(e, ERR_USAGE, "%s: source and output are the same folder; give another", out)
            : 0;
    free(a);
    free(b);
    return rc;
}
