/* tare convert, and its --to plain: any dialect, or a gguf, back into unquantized safetensors.
 *
 * Weights are dequantized in fp32 and rounded once to the wanted type. The tensors that only the
 * quantized form needs (scales, zero points, orders, KV scales) and quantization_config go; where
 * the numbers came from is kept in tare_origin, for a plain checkpoint made from a quantized one is
 * not the original. The output is reopened and hashed before it is published. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include "bake/bake_int.h"

#define PIECE ((int64_t)1 << 20)

typedef struct work {
    const convert_opts *o;
    bake_report *r;
    num_dtype to;
    const quant_dialect *dialect; /* NULL = plain */
    ckpt *c;
    quant_ckpt *q;
    bake_tie tie;
    ckpt_writer *w;
    uint64_t *hashes;
    char **names; /* of the tensors written, parallel to hashes */
    size_t n;
    int dropped_kv;
} work;

static int unknown_dialect(const char *to, err *e)
{
    buf names = {0};
    for (int i = 0; i < quant_n_dialects; i++)
        if (quant_dialects[i]->store) buf_printf(&names, ", %s", quant_dialects[i]->name);
    int rc = err_set(e, ERR_USAGE,
                     "--to %s: is not a dialect that is written; written are plain%s; to quantize "
                     "an unquantized model, use `tare quantize`",
                     to, names.data);
    buf_free(&names);
    return rc;
}

static int check_options(work *k, err *e)
{
    const char *to = k->o->to && *k->o->to ? k->o->to : "plain",
               *d = k->o->dtype && *k->o->dtype ? k->o->dtype : "bf16";
    if (strcmp(to, "plain")) {
        k->dialect = quant_dialect_by_name(to);
        return k->dialect && k->dialect->store ? 0 : unknown_dialect(to, e);
    }
    k->to = num_by_name(d, strlen(d));
    if (k->to != NUM_F32 && k->to != NUM_F16 && k->to != NUM_BF16)
        return err_set(e, ERR_USAGE, "--dtype %s: expected f32, bf16 or f16", d);
    return 0;
}

static int begin(work *k, const char *name, uint64_t **hash, err *e)
{
    (void)e;
    k->names[k->n] = xstrdup(name);
    *hash = &k->hashes[k->n++];
    return 0;
}

static int check_f16(const work *k, const float *v, size_t n, const char *name, err *e)
{
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(v[i]))
            return err_set(e, ERR_VALUE,
                           "%s: module '%s' dequantizes to a value that is not finite",
                           ckpt_path(k->c), name);
        if (k->to == NUM_F16 && fabsf(v[i]) >= 65520.0f)
            return err_set(e, ERR_VALUE,
                           "%s: module '%s' holds %g, which f16 cannot; use --dtype bf16",
                           ckpt_path(k->c), name, (double)v[i]);
    }
    return 0;
}

static int put(work *k, XXH3_state_t *h, const float *v, size_t n, uint8_t *out, err *e)
{
    num_encode_row(k->to, v, n, out);
    XXH3_64bits_update(h, out, num_bytes(k->to, n));
    return ckpt_writer_data(k->w, out, num_bytes(k->to, n), e);
}

/* Each expert with its rows as columns. */
static int write_transposed(work *k, const qtensor *t, const char *name, uint64_t *hash, err *e)
{
    int rc = 0;
    float *v = NULL;
    uint8_t *out = NULL;
    size_t n = (size_t)(t->N * t->K);
    XXH3_state_t *h = XXH3_createState();
    if (!h) return err_set(e, ERR_NOMEM, "out of memory");
    XXH3_64bits_reset(h);
    TRY(mem_alloc((void **)&v, (n + (size_t)t->K) * sizeof *v, e));
    TRY(mem_alloc((void **)&out, num_bytes(k->to, n), e));
    for (int64_t x = 0; x < t->E; x++) {
        for (int64_t r = 0; r < t->N; r++) {
            qtensor_decode_row(t, x * t->N + r, v + n);
            for (int64_t c = 0; c < t->K; c++)
                v[c * t->N + r] = v[n + (size_t)c];
        }
        TRY(check_f16(k, v, n, name, e));
        TRY(put(k, h, v, n, out, e));
    }
    *hash = XXH3_64bits_digest(h);
out:
    XXH3_freeState(h);
    mem_free(v);
    mem_free(out);
    return rc;
}

static int write_rows(work *k, const qtensor *t, const char *name, uint64_t *hash, err *e)
{
    int rc = 0;
    float *v = NULL;
    uint8_t *out = NULL;
    int64_t rows = t->E * t->N, step = t->K < PIECE ? PIECE / t->K : 1;
    size_t row = num_bytes(k->to, (size_t)t->K);
    XXH3_state_t *h = XXH3_createState();
    if (!h) return err_set(e, ERR_NOMEM, "out of memory");
    XXH3_64bits_reset(h);
    TRY(mem_alloc((void **)&v, (size_t)t->K * sizeof *v, e));
    TRY(mem_alloc((void **)&out, (size_t)step * row, e));
    for (int64_t r = 0; r < rows; r += step) {
        int64_t end = r + step < rows ? r + step : rows;
        for (int64_t i = r; i < end; i++) {
            qtensor_decode_row(t, i, v);
            for (int64_t c = 0; t->pre_scale && c < t->K; c++)
                v[c] *= t->pre_scale[c]; /* (x * p) W^T = x (W * p)^T */
            TRY(check_f16(k, v, (size_t)t->K, name, e));
            num_encode_row(k->to, v, (size_t)t->K, out + (size_t)(i - r) * row);
        }
        XXH3_64bits_update(h, out, (size_t)(end - r) * row);
        TRY(ckpt_writer_data(k->w, out, (size_t)(end - r) * row, e));
    }
    *hash = XXH3_64bits_digest(h);
    rc = 0;
out:
    XXH3_freeState(h);
    mem_free(v);
    mem_free(out);
    return rc;
}

/* Stacks of experts are called as their tensor; everything else gets ".weight". */
static int dequantize(work *k, const char *module, const quant_part *codes, err *e)
{
    int rc = 0;
    qtensor t = {0};
    uint64_t *hash;
    char name[BAKE_NAME_MAX + 8];
    snprintf(name, sizeof name, "%s%s", module, *codes->suffix == '.' ? ".weight" : "");
    TRY(quant_load(k->q, module, &t, e));
    bool turn = k->q->dialect->plain_transposed;
    int64_t shape[3] = {t.E, turn ? t.K : t.N, turn ? t.N : t.K};
    TRY(begin(k, name, &hash, e));
    TRY(ckpt_writer_begin(k->w, name, k->to, t.E > 1 ? 3 : 2, t.E > 1 ? shape : shape + 1, e));
    TRY(turn ? write_transposed(k, &t, module, hash, e) : write_rows(k, &t, module, hash, e));
out:
    mem_rss_sample();
    qtensor_free(&t);
    return rc < 0 ? rc : 0;
}

static int write_tensor(work *k, const ckpt_tensor *t, err *e)
{
    char module[BAKE_NAME_MAX];
    uint64_t *hash;
    if (k->tie.drop_head && !strcmp(t->name, "lm_head.weight")) return 0;
    const quant_part *p = quant_part_of(k->q, t->name, module);
    if (p && p->kind != QUANT_CODES) return 0;
    if (p) {
        int rc = dequantize(k, module, p, e);
        ckpt_dontneed(k->c, t);
        return rc;
    }
    if (strcmp(k->q->dialect->name, "plain") && quant_is_kv_scale(t->name)) {
        k->dropped_kv++;
        return 0;
    }
    int rc = begin(k, t->name, &hash, e);
    return rc < 0 ? rc : bake__copy(k->w, k->c, t, k->to, hash, e);
}

static void origin_text(work *k, buf *out)
{
    bake__origin(k->c, out);
    if (out->len || ckpt_origin(k->c) || !k->q->n_groups) return;
    buf spec = {0};
    jw w;
    qspec_format(&k->q->groups[0].spec, &spec);
    jw_init(&w, out, 0);
    jw_obj(&w);
    jw_kstr(&w, "dequantized_from", k->q->n_groups > 1 ? "several schemes" : spec.data);
    jw_kstr(&w, "format", k->q->dialect->name);
    jw_end_obj(&w);
    buf_free(&spec);
}

static int verify(work *k, err *e)
{
    int rc = 0;
    ckpt *c = NULL;
    quant_ckpt *q = NULL;
    TRY(ckpt_open(&c, ckpt_writer_dir(k->w), e));
    TRY(quant_open(&q, c, e));
    for (size_t i = 0; i < k->n; i++)
        TRY(bake__read_back(c, k->names[i], k->hashes[i], e));
    k->r->bytes_out = ckpt_file_bytes(c);
    rc = 0;
out:
    quant_close(q);
    ckpt_close(c);
    return rc;
}

static int check_disk(const work *k, err *e)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < ckpt_n_tensors(k->c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(k->c, i);
        uint64_t n = (uint64_t)num_infos[k->to].bits / 8;
        bool packed = t->dtype == NUM_U8 || t->dtype == NUM_I32;
        for (int d = 0; d < t->n_dims; d++)
            n *= (uint64_t)t->shape[d] *
                 (packed && d == t->n_dims - 1 ? t->dtype == NUM_U8 ? 2 : 8 : 1);
        bytes += n;
    }
    return bake__disk(k->o->out, bytes, k->o->max_shard_bytes, e);
}

static int write_all(work *k, err *e)
{
    int rc = 0;
    progress p;
    uint64_t done = 0;
    size_t n = ckpt_n_tensors(k->c);
    buf cfg = {0}, origin = {0};
    k->hashes = xcalloc(n + 1, sizeof *k->hashes);
    k->names = xcalloc(n + 1, sizeof *k->names);
    progress_start(&p, "convert", ckpt_file_bytes(k->c));
    for (size_t i = 0; i < n && rc >= 0; i++) {
        const ckpt_tensor *t = ckpt_tensor_at(k->c, i);
        rc = write_tensor(k, t, e);
        progress_step(&p, done += t->bytes, t->name);
    }
    progress_end(&p);
    if (rc < 0) goto out;
    TRY(bake__side_files(k->w, k->c, k->r, e));
    origin_text(k, &origin);
    TRY(bake__config(k->c, NULL, k->to, &k->tie, origin.data, &cfg, e));
    TRY(ckpt_writer_finish(k->w, cfg.data, e));
out:
    buf_free(&cfg);
    buf_free(&origin);
    return rc;
}

int bake_convert(const convert_opts *o, bake_report *r, err *e)
{
    int rc = 0;
    *r = (bake_report){0};
    work k = {.o = o, .r = r};
    double start = clock_seconds();
    snprintf(r->out, sizeof r->out, "%s", o->out);
    TRY(check_options(&k, e));
    if (k.dialect) {
        TRY(bake__recode(o, k.dialect, r, e));
        goto done;
    }
    TRY(bake__not_same(o->in, o->out, e));
    TRY(ckpt_open(&k.c, o->in, e));
    TRY(quant_open_as(&k.q, k.c, &(quant_opts){.gptq_zeros = o->gptq_zeros}, e));
    TRY(bake__tie(k.c, &k.tie, r, e));
    TRY(check_disk(&k, e));
    TRY(ckpt_writer_open(&k.w, o->out, o->max_shard_bytes, o->overwrite, e));
    TRY(write_all(&k, e));
    TRY(verify(&k, e));
    TRY(ckpt_writer_publish(&k.w, e));
    snprintf(r->scheme, sizeof r->scheme, "plain %s", num_infos[k.to].name);
    if (k.dropped_kv)
        bake__note(r, "%d KV scales belong to the quantized form and were dropped", k.dropped_kv);
    if (ckpt_is_gguf(k.c)) bake__note(r, "from gguf: %s", ckpt_gguf_types(k.c));
    r->bytes_in = ckpt_file_bytes(k.c);
done:
    mem_rss_sample();
    r->peak_rss_bytes = mem_rss_peak_bytes();
    r->seconds = clock_seconds() - start;
    rc = 0;
out:
    ckpt_writer_abort(&k.w);
    for (size_t i = 0; i < k.n; i++)
        free(k.names[i]);
    free(k.names);
    free(k.hashes);
    quant_close(k.q);
    ckpt_close(k.c);
    return rc;
}
