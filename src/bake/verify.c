/* Rows of one module by all workers: loading, digests; and the verification of what was written.
 *
 * The digest of a quantized module is the sum over its rows of XXH3(dequantized row, seed = row):
 * independent of how rows fall to workers, and of padding bits that no reader looks at. A module
 * has been written correctly when the ordinary loader gives back the digest that the quantizer had.
 * The SNR comes from the same pass, against rows streamed from the source. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include "bake/bake_int.h"

/* ---- loading ------------------------------------------------------------------------------------
 */

typedef struct load_job {
    const ckpt *c;
    const bake_mod *m;
    float *w;
    err *errs;
} load_job;

static void load_rows(void *arg, int index, int n)
{
    load_job *j = arg;
    int64_t r0, r1, K = j->m->K;
    thread_split(j->m->N, 1, index, n, &r0, &r1);
    if (r0 >= r1) return;
    float *w = j->w + r0 * K;
    if (ckpt_load_rows(j->c, j->m->t, r0, r1, w, &j->errs[index]) >= 0)
        bake__finite(w, (size_t)((r1 - r0) * K), j->m->t, &j->errs[index]);
}

/* The first worker's error becomes the caller's. */
static int gather(err *errs, int n, err *e)
{
    int rc = 0;
    for (int i = 0; i < n && rc == 0; i++)
        if (errs[i].code) rc = err_set(e, errs[i].code, "%s", errs[i].msg);
    free(errs);
    return rc;
}

int bake__load(team *tm, const ckpt *c, const bake_mod *m, float *w, err *e)
{
    int n = team_size(tm);
    load_job j = {c, m, w, xcalloc((size_t)n, sizeof(err))};
    team_run(tm, load_rows, &j);
    return gather(j.errs, n, e);
}

/* ---- digest -------------------------------------------------------------------------------------
 */

typedef struct part {
    uint64_t hash;
    double signal, noise;
} part;
typedef struct digest_job {
    const qtensor *q;
    const ckpt *c;
    const ckpt_tensor *src;
    part *parts;
    float *tmp; /* [workers][2][K] */
    err *errs;
} digest_job;

static void digest_rows(void *arg, int index, int n)
{
    digest_job *j = arg;
    const qtensor *q = j->q;
    int64_t r0, r1, K = q->K;
    float *a = j->tmp + 2 * index * K, *b = a + K;
    part p = {0};
    thread_split(q->E * q->N, 1, index, n, &r0, &r1);
    for (int64_t r = r0; r < r1; r++) {
        qtensor_decode_row(q, r, a);
        p.hash += XXH3_64bits_withSeed(a, (size_t)K * sizeof *a, (uint64_t)r);
        if (!j->src) continue;
        if (ckpt_load_rows(j->c, j->src, r, r + 1, b, &j->errs[index]) < 0) return;
        for (int64_t k = 0; k < K; k++) {
            double x = (double)b[k], d = x - (double)a[k];
            p.signal += x * x;
            p.noise += d * d;
        }
    }
    j->parts[index] = p;
}

int bake__digest(team *tm, const qtensor *q, const ckpt *c, const ckpt_tensor *src, uint64_t *hash,
                 double *snr_db, err *e)
{
    int n = team_size(tm), rc = 0;
    digest_job j = {.q = q, .c = c, .src = src};
    double signal = 0, noise = 0;
    TRY(mem_alloc((void **)&j.tmp, 2 * (size_t)n * (size_t)q->K * sizeof(float), e));
    j.parts = xcalloc((size_t)n, sizeof *j.parts);
    j.errs = xcalloc((size_t)n, sizeof *j.errs);
    team_run(tm, digest_rows, &j);
    *hash = 0;
    for (int i = 0; i < n; i++) {
        *hash += j.parts[i].hash;
        signal += j.parts[i].signal;
        noise += j.parts[i].noise;
    }
    if (snr_db) *snr_db = noise > 0 ? 10 * log10(signal / noise) : INFINITY;
    rc = gather(j.errs, n, e);
out:
    mem_free(j.tmp);
    free(j.parts);
    return rc;
}

/* ---- verification -------------------------------------------------------------------------------
 */

static int verify_module(const quant_ckpt *q, ckpt *src, const bake_mod *m, team *tm,
                         bake_module *row, err *e)
{
    int rc = 0;
    uint64_t hash;
    qtensor t = {0};
    buf b = {0};
    TRY(quant_load(q, m->name, &t, e));
    if (!quant_has(q, m->name) || t.N != m->N || t.K != m->K) {
        rc = err_set(e, ERR_SHAPE, "%s: read back as [%lld, %lld], written as [%lld, %lld]",
                     m->name, (long long)t.N, (long long)t.K, (long long)m->N, (long long)m->K);
        goto out;
    }
    TRY(bake__digest(tm, &t, src, m->t, &hash, &row->snr_db, e));
    if (hash != m->hash) {
        rc = err_set(e, ERR_IO, "%s: what was read back is not what was written", m->name);
        goto out;
    }
    qaxis_format(&t.spec.w, &b);
    snprintf(row->name, sizeof row->name, "%s", m->name);
    snprintf(row->spec, sizeof row->spec, "%s", b.data);
    row->bytes = m->bytes;
    mem_rss_sample();
    ckpt_dontneed(src, m->t);
out:
    qtensor_free(&t);
    buf_free(&b);
    return rc < 0 ? rc : 0;
}

static int verify_plain(const ckpt *c, const ckpt *src, const bake_list *l, const uint64_t *hashes,
                        err *e)
{
    for (size_t i = 0; i < ckpt_n_tensors(src); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(src, i);
        if (!hashes[i] || bake__find(l, t)) continue;
        int rc = bake__read_back(c, t->name, hashes[i], e);
        if (rc < 0) return rc;
    }
    return 0;
}

static int compare_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void summarize(bake_report *r)
{
    double *v = xcalloc((size_t)r->n_modules + 1, sizeof *v);
    int n = r->n_modules;
    r->snr_min_db = INFINITY;
    for (int i = 0; i < n; i++) {
        v[i] = r->modules[i].snr_db;
        if (v[i] < r->snr_min_db || !i) {
            r->snr_min_db = v[i];
            snprintf(r->snr_min_module, sizeof r->snr_min_module, "%s", r->modules[i].name);
        }
    }
    qsort(v, (size_t)n, sizeof *v, compare_double);
    r->snr_median_db = n ? n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2 : 0;
    free(v);
}

int bake__verify(const char *dir, ckpt *src, const bake_list *l, const uint64_t *hashes,
                 const qspec *s, team *tm, bake_report *r, err *e)
{
    int rc = 0;
    ckpt *c = NULL;
    quant_ckpt *q = NULL;
    progress p;
    bool counts = false;
    progress_start(&p, "verify", (uint64_t)l->n);
    TRY(ckpt_open(&c, dir, e));
    TRY(quant_open(&q, c, e));
    for (int i = 0; i < q->n_groups; i++) {
        qaxis w = q->groups[i].spec.w;
        w.asym = w.asym && s->w.asym; /* awq has zero points always, symmetric ones too */
        counts |= qaxis_equal(&w, &s->w) && q->groups[i].hits == l->n;
    }
    if (!counts) {
        rc = err_set(e, ERR_FORMAT, "%s: the config read back describes another scheme", dir);
        goto out;
    }
    r->modules = xcalloc((size_t)l->n, sizeof *r->modules);
    for (int i = 0; i < l->n; i++) {
        TRY(verify_module(q, src, &l->mods[i], tm, &r->modules[r->n_modules++], e));
        progress_step(&p, (uint64_t)i + 1, l->mods[i].name);
    }
    TRY(verify_plain(c, src, l, hashes, e));
    r->bytes_out = ckpt_file_bytes(c);
    summarize(r);
out:
    progress_end(&p);
    quant_close(q);
    ckpt_close(c);
    return rc < 0 ? err_wrap(e, "verification of the output failed, nothing was kept") : 0;
}
