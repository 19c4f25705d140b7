/* tare quantize: read, round, write, reopen, verify, publish.
 *
 * One module is resident at a time: its fp32 rows and its codes, nothing else; the source stays in
 * the map and its pages are given back. Everything goes to a temporary folder that is renamed at
 * the very end, so a crash, a full disk or a failed verification leaves no OUT. What can be refused
 * is refused before the first byte is written: a source that is quantized already, groups that do
 * not divide, schemes that need calibration, rules that leave nothing, a disk that is too small. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "bake/bake_int.h"

typedef struct work {
    const bake_opts *o;
    bake_report *r;
    qspec spec;
    const quant_algo *algo;
    const quant_dialect *dialect;
    ckpt *c;
    quant_ckpt *q;
    team *tm;
    bake_list list;
    bake_tie tie;
    float *set_amax; /* by set; NVFP4 only; 0 = not known yet */
    ckpt_writer *w;
    uint64_t *hashes; /* of the tensors that are copied, by source index */
    uint64_t bytes_quantized, bytes_plain;
} work;

/* ---- before any work ----------------------------------------------------------------------------
 */

static bool has_words(const quant_dialect *d, const qspec *s, err *e)
{
    buf text = {0};
    jw j;
    jw_init(&j, &text, 0);
    bool ok = d->emit_config && d->emit_config(&j, s, NULL, 0, e) >= 0;
    buf_free(&text);
    return ok;
}

/* The first dialect that can say the scheme; the first of all, whose refusal is told, if none. */
static const quant_dialect *writer_of(const qspec *s)
{
    for (int i = 0; i < quant_n_dialects; i++)
        if (has_words(quant_dialects[i], s, NULL)) return quant_dialects[i];
    return quant_dialects[0];
}

static int check_scheme(work *k, err *e)
{
    int rc = qspec_parse(k->o->scheme, &k->spec, e);
    const qspec *s = &k->spec;
    buf b = {0};
    if (rc < 0) return rc;
    k->algo = quant_algo_by_name(k->o->algo && *k->o->algo ? k->o->algo : "rtn");
    const char *to = k->o->to && *k->o->to ? k->o->to : NULL;
    k->dialect = to ? quant_dialect_by_name(to) : writer_of(s);
    qspec_format(s, &b);
    snprintf(k->r->scheme, sizeof k->r->scheme, "%s", b.data);
    if (!k->dialect || !k->dialect->store)
        rc = err_set(e, ERR_USAGE, "--to %s: no dialect that is written; see `tare help quantize`",
                     to);
    else if (!k->algo)
        rc = err_set(e, ERR_USAGE, "--algo %s: unknown; this version has rtn", k->o->algo);
    else if (!qaxis_quantized(&s->w))
        rc = err_set(
            e, ERR_USAGE,
            "scheme '%s' leaves the weights unquantized; KV formats alone are chosen when serving "
            "(--kv-cache-dtype)",
            b.data);
    else if (s->w.actorder)
        rc = err_set(e, ERR_UNSUPPORTED,
                     "scheme '%s': actorder needs calibration data; leave it out", b.data);
    else if (s->a.gran != Q_NONE && (!s->a.dynamic || s->a.scale == QS_NVFP4))
        rc = err_set(e, ERR_UNSUPPORTED,
                     "scheme '%s': %s activations need calibration data; use dynamic ones "
                     "(a:fp8_e4m3,token)",
                     b.data, s->a.scale == QS_NVFP4 ? "nvfp4" : "static");
    else if (!has_words(k->dialect, s, e))
        rc = -ERR_UNSUPPORTED;
    if (rc >= 0 && qaxis_quantized(&s->kv))
        bake__note(k->r, "kv_cache_scheme is written without scales: readers use 1.0");
    buf_free(&b);
    return rc;
}

static int open_source(work *k, err *e)
{
    int rc = 0;
    TRY(bake__not_same(k->o->model, k->o->out, e));
    TRY(ckpt_open(&k->c, k->o->model, e));
    TRY(quant_open(&k->q, k->c, e));
    if (strcmp(k->q->dialect->name, "plain")) {
        buf b = {0};
        if (k->q->n_groups) qaxis_format(&k->q->groups[0].spec.w, &b);
        rc = err_set(
            e, ERR_BADSTATE,
            "%s: is quantized already (%s, %s); quantizing it again would add up the errors. Start "
            "from the original, or make it plain first: tare convert %s -o PLAIN --to plain",
            ckpt_path(k->c), k->q->dialect->name, b.data ? b.data : "no groups", k->o->model);
        buf_free(&b);
        goto out;
    }
    if (ckpt_is_gguf(k->c) && strpbrk(ckpt_gguf_types(k->c), "Q"))
        bake__note(k->r, "the source is a gguf that is quantized itself (%s)",
                   ckpt_gguf_types(k->c));
    rc = 0;
out:
    return rc;
}

static uint64_t ceil_div(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}

/* Bytes that a module will take; a bound for the disk check. */
static uint64_t module_bytes(const qspec *s, const bake_mod *m)
{
    uint64_t N = (uint64_t)m->N, K = (uint64_t)m->K, bits = (uint64_t)num_infos[s->w.type].bits;
    uint64_t bk = s->w.gran == Q_GROUP ? (uint64_t)s->w.group : K;
    if (s->a.gran != Q_NONE && num_infos[s->w.type].kind == 'I') bits = 8;
    return N * ceil_div(K * bits, 32) * 4 + N * ceil_div(K, bk) * 8 + 64;
}

static int check_disk(work *k, err *e)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < ckpt_n_tensors(k->c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(k->c, i);
        const bake_mod *m = bake__find(&k->list, t);
        uint64_t n = 2;
        for (int d = 0; d < t->n_dims; d++)
            n *= (uint64_t)t->shape[d];
        bytes += m ? module_bytes(&k->spec, m) : t->dtype == NUM_NONE ? n : t->bytes;
    }
    return bake__disk(k->o->out, bytes, k->o->max_shard_bytes, e);
}

/* ---- one module ---------------------------------------------------------------------------------
 */

static int amax_of(work *k, const bake_mod *m, float *w, float *amax, err *e)
{
    int rc = bake__load(k->tm, k->c, m, w, e);
    for (int64_t i = 0; rc >= 0 && i < m->N * m->K; i++) {
        float a = fabsf(w[i]);
        if (a > *amax) *amax = a;
    }
    return rc;
}

/* Largest weight of all modules that share the second-level scale with m. */
static int fused_amax(work *k, const bake_mod *m, float *out, err *e)
{
    float *amax = &k->set_amax[m->set];
    int rc = 0;
    if (*amax == 0)
        for (int i = 0; i < k->list.n; i++) {
            const bake_mod *x = &k->list.mods[i];
            float *w = NULL;
            if (x->set != m->set) continue;
            TRY(mem_alloc_huge((void **)&w, (size_t)(x->N * x->K) * sizeof *w, e));
            rc = amax_of(k, x, w, amax, e);
            mem_free(w);
            if (rc < 0) goto out;
        }
    *out = *amax;
    rc = 0;
out:
    return rc;
}

static int quantize_module(work *k, bake_mod *m, err *e)
{
    int rc = 0;
    float *w = NULL;
    qtensor t = {0};
    quant_stats st = {.workers = k->tm};
    if (k->spec.w.scale == QS_NVFP4) TRY(fused_amax(k, m, &st.fused_amax, e));
    TRY(mem_alloc_huge((void **)&w, (size_t)(m->N * m->K) * sizeof *w, e));
    TRY(bake__load(k->tm, k->c, m, w, e));
    TRY(k->algo->quantize(w, m->N, m->K, &k->spec, k->dialect->f16_scales ? NUM_F16 : m->dtype, &st,
                          &t, e));
    mem_rss_sample();
    mem_free(w);
    w = NULL;
    TRY(bake__digest(k->tm, &t, NULL, NULL, &m->hash, NULL, e));
    TRY(k->dialect->store(k->w, m->name, &t, m->dtype, e));
    qbytes b = {0};
    qtensor_bytes(&t, &b);
    m->bytes = b.total;
    mem_rss_sample();
    ckpt_dontneed(k->c, m->t);
out:
    mem_free(w);
    qtensor_free(&t);
    return rc < 0 ? rc : 0;
}

/* ---- all of them --------------------------------------------------------------------------------
 */

static int write_tensors(work *k, err *e)
{
    int rc = 0;
    progress p;
    uint64_t done = 0;
    progress_start(&p, "quantize", ckpt_file_bytes(k->c));
    for (size_t i = 0; i < ckpt_n_tensors(k->c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(k->c, i);
        bake_mod *m = bake__find(&k->list, t);
        if (m)
            rc = quantize_module(k, m, e);
        else if (!k->tie.drop_head || strcmp(t->name, "lm_head.weight"))
            rc = bake__copy(k->w, k->c, t, NUM_NONE, &k->hashes[i], e);
        if (rc < 0) break;
        progress_step(&p, done += t->bytes, m ? m->name : t->name);
    }
    progress_end(&p);
    return rc;
}

static int write_config(work *k, err *e)
{
    int rc = 0;
    buf quant = {0}, cfg = {0}, origin = {0};
    jw j;
    jw_init(&j, &quant, 0);
    TRY(k->dialect->emit_config(&j, &k->spec, k->list.ignore, k->list.n_ignore, e));
    if (k->dialect->side_config)
        TRY(ckpt_writer_file(k->w, k->dialect->side_config, quant.data, quant.len, e));
    bake__origin(k->c, &origin);
    TRY(bake__config(k->c, quant.data, NUM_NONE, &k->tie, origin.data, &cfg, e));
    TRY(ckpt_writer_finish(k->w, cfg.data, e));
out:
    buf_free(&quant);
    buf_free(&cfg);
    buf_free(&origin);
    return rc;
}

static int prepare(work *k, err *e)
{
    int rc = 0;
    TRY(check_scheme(k, e));
    TRY(open_source(k, e));
    TRY(bake__list(&k->list, k->c, k->o, k->r, e));
    TRY(bake__check_groups(&k->list, &k->spec, e));
    TRY(bake__tie(k->c, &k->tie, k->r, e));
    TRY(check_disk(k, e));
    TRY(team_open(&k->tm, k->o->threads, e));
    int sets = 0;
    for (int i = 0; i < k->list.n; i++)
        if (k->list.mods[i].set >= sets) sets = k->list.mods[i].set + 1;
    k->set_amax = xcalloc((size_t)sets + 1, sizeof *k->set_amax);
    k->hashes = xcalloc(ckpt_n_tensors(k->c) + 1, sizeof *k->hashes);
    rc = ckpt_writer_open(&k->w, k->o->out, k->o->max_shard_bytes, k->o->overwrite, e);
out:
    return rc;
}

int bake_quantize(const bake_opts *o, bake_report *r, err *e)
{
    int rc = 0;
    *r = (bake_report){0};
    work k = {.o = o, .r = r};
    double start = clock_seconds();
    snprintf(r->out, sizeof r->out, "%s", o->out);
    TRY(prepare(&k, e));
    TRY(write_tensors(&k, e));
    TRY(bake__side_files(k.w, k.c, r, e));
    TRY(write_config(&k, e));
    TRY(bake__verify(ckpt_writer_dir(k.w), k.c, &k.list, k.hashes, &k.spec, k.tm, r, e));
    TRY(ckpt_writer_publish(&k.w, e));
    r->bytes_in = ckpt_file_bytes(k.c);
    r->peak_rss_bytes = mem_rss_peak_bytes();
    r->seconds = clock_seconds() - start;
    rc = 0;
out:
    ckpt_writer_abort(&k.w);
    if (k.tm) team_close(k.tm);
    bake__list_drop(&k.list);
    free(k.set_amax);
    free(k.hashes);
    quant_close(k.q);
    ckpt_close(k.c);
    return rc;
}
