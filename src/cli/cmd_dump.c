/* tare dump: logits.I [T, V] and, with --layers, hidden.I.L [T, hidden] of given token ids, fp32,
 * as safetensors. Numerics default to spec here, so that two engines can be compared layer by
 * layer. Rows are collected by request; the file is written at the end, whole or not at all. */
#include "cli/options.h"
#include "base/file.h"
#include "base/log.h"
#include "ckpt/safetensors.h"
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct dump_seq {
    ids in;
    int64_t vocab, width, rows;
    float *logits;
    float **hidden; /* by layer + 1 */
    int n_hidden;
    bool done;
    err e;
    pthread_mutex_t *lock;
    pthread_cond_t *ready;
} dump_seq;

static void keep_rows(float **dst, const float *src, int64_t total, int64_t pos, int64_t n,
                      int64_t width)
{
    if (!*dst) *dst = xcalloc((size_t)(total * width), sizeof **dst);
    memcpy(*dst + pos * width, src, sizeof **dst * (size_t)(n * width));
}

static void dump_sink(void *arg, const engine_event *ev)
{
    dump_seq *s = arg;
    if (ev->kind == EV_LOGITS) {
        s->vocab = ev->vocab;
        keep_rows(&s->logits, ev->logits, (int64_t)s->in.n, ev->pos, ev->n, ev->vocab);
        s->rows += ev->n;
    } else if (ev->kind == EV_HIDDEN) {
        int k = ev->layer + 1;
        if (k >= s->n_hidden) {
            s->hidden = xrealloc(s->hidden, sizeof *s->hidden * (size_t)(k + 1));
            while (s->n_hidden <= k)
                s->hidden[s->n_hidden++] = NULL;
        }
        s->width = ev->width;
        keep_rows(&s->hidden[k], ev->hidden, (int64_t)s->in.n, ev->pos, ev->n, ev->width);
    } else if (ev->kind == EV_DONE) {
        pthread_mutex_lock(s->lock);
        if (ev->error) s->e = *ev->error;
        s->done = true;
        pthread_cond_signal(s->ready);
        pthread_mutex_unlock(s->lock);
    }
}

static int read_ids(const char *file, dump_seq **out, int *n, err *e)
{
    int rc = 0;
    json *root = NULL;
    dump_seq *seqs = NULL;
    int count = 0;
    TRY(json_parse_file(&root, file, e));
    if (!cJSON_IsArray(root) || !root->child) {
        rc = err_set(e, ERR_FORMAT, "%s: expected a JSON list of lists of token ids", file);
        goto out;
    }
    /* A bare list of ids is one sequence. */
    bool bare = cJSON_IsNumber(root->child);
    count = bare ? 1 : cJSON_GetArraySize(root);
    seqs = xcalloc((size_t)count, sizeof *seqs);
    const json *list = bare ? root : root->child;
    for (int i = 0; i < count; i++, list = list->next) {
        for (const json *v = list->child; v; v = v->next) {
            if (!cJSON_IsNumber(v) || v->valuedouble != (double)(int32_t)v->valuedouble) {
                rc = err_set(e, ERR_FORMAT, "%s: list %d holds something that is not a token id",
                             file, i);
                goto out;
            }
            ids_push(&seqs[i].in, (int32_t)v->valuedouble);
        }
        if (!seqs[i].in.n) {
            rc = err_set(e, ERR_FORMAT, "%s: list %d is empty or not a list", file, i);
            goto out;
        }
    }
    *out = seqs;
    *n = count;
    seqs = NULL;
out:
    for (int i = 0; seqs && i < count; i++)
        ids_free(&seqs[i].in);
    free(seqs);
    json_drop(root);
    return rc;
}

static int run_one(engine *en, dump_seq *s, bool layers, err *e)
{
    req_params p;
    uint64_t id;
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t ready = PTHREAD_COND_INITIALIZER;
    s->lock = &lock;
    s->ready = &ready;
    req_params_default(&p);
    p.prompt = s->in.v;
    p.n_prompt = (int64_t)s->in.n;
    p.max_tokens = 0;
    p.want = WANT_LOGITS | (layers ? WANT_HIDDEN : 0);
    p.sink = dump_sink;
    p.sink_arg = s;
    int rc = engine_submit(en, &p, &id, e);
    if (rc < 0) return rc;
    pthread_mutex_lock(&lock);
    while (!s->done)
        pthread_cond_wait(&ready, &lock);
    pthread_mutex_unlock(&lock);
    if (s->e.code) {
        if (e) *e = s->e;
        return -s->e.code;
    }
    if (s->rows != (int64_t)s->in.n)
        return err_set(e, ERR_FAIL, "dump: %lld logit rows came back for %zu ids",
                       (long long)s->rows, s->in.n);
    return 0;
}

/* Numbers that are none are written as they are, and said. */
static void warn_not_finite(const dump_seq *seqs, int n)
{
    int64_t bad = 0;
    for (int i = 0; i < n; i++)
        for (int64_t k = 0; k < (int64_t)seqs[i].in.n * seqs[i].vocab; k++)
            bad += !isfinite(seqs[i].logits[k]);
    if (bad)
        log_warn("%lld logits are not finite: weights, scales or factors of this checkpoint are "
                 "out of range",
                 (long long)bad);
}

static int write_file(const char *path, dump_seq *seqs, int n, err *e)
{
    int rc = 0;
    st_writer *w = NULL;
    char name[64];
    TRY(st_writer_open(&w, path, e));
    for (int pass = 0; pass < 2; pass++) {
        if (pass) TRY(st_writer_begin(w, e));
        for (int i = 0; i < n; i++) {
            int64_t T = (int64_t)seqs[i].in.n, shape[2] = {T, seqs[i].vocab};
            snprintf(name, sizeof name, "logits.%d", i);
            if (!pass)
                TRY(st_writer_declare(w, name, NUM_F32, 2, shape, e));
            else
                TRY(st_writer_data(w, seqs[i].logits, sizeof(float) * (size_t)(T * shape[1]), e));
            shape[1] = seqs[i].width;
            for (int l = 0; l < seqs[i].n_hidden; l++) {
                if (!seqs[i].hidden[l]) continue;
                snprintf(name, sizeof name, "hidden.%d.%d", i, l);
                if (!pass)
                    TRY(st_writer_declare(w, name, NUM_F32, 2, shape, e));
                else
                    TRY(st_writer_data(w, seqs[i].hidden[l], sizeof(float) * (size_t)(T * shape[1]),
                                       e));
            }
        }
    }
    TRY(st_writer_commit(&w, e));
out:
    st_writer_abort(&w);
    return rc;
}

int cmd_dump(const opts *o, err *e)
{
    int rc = 0, n = 0;
    engine *en = NULL;
    engine_opts eo;
    dump_seq *seqs = NULL;
    const char *model;
    TRY(opts_model(o, &model, e));
    if (!o->v[OPT_tokens].given || !o->v[OPT_out].given) {
        rc = err_set(e, ERR_USAGE,
                     "`tare dump MODEL --tokens IDS.json -o OUT.safetensors` needs both options");
        goto out;
    }
    TRY(read_ids(o->v[OPT_tokens].s, &seqs, &n, e));
    opts_engine(o, o->v, model, &eo);
    if (!o->v[OPT_activation_dtype].given) eo.activation_dtype = "spec";
    eo.max_running = 1;
    TRY(engine_open(&en, &eo, e));
    for (int i = 0; i < n; i++) {
        rc = run_one(en, &seqs[i], o->v[OPT_layers].given, e);
        if (rc < 0) {
            err_wrap(e, "%s: list %d", o->v[OPT_tokens].s, (int)i);
            goto out;
        }
    }
    warn_not_finite(seqs, n);
    TRY(write_file(o->v[OPT_out].s, seqs, n, e));
    if (o->v[OPT_json].given) {
        buf b = {0};
        jw w;
        jw_init(&w, &b, 0);
        jw_obj(&w);
        jw_kstr(&w, "out", o->v[OPT_out].s);
        jw_ki64(&w, "sequences", n);
        jw_end_obj(&w);
        buf_putc(&b, '\n');
        cli_print(&b);
        buf_free(&b);
    } else
        printf("%s: %d sequences, numerics %s\n", o->v[OPT_out].s, n, eo.activation_dtype);
    rc = 0;
out:
    for (int i = 0; seqs && i < n; i++) {
        ids_free(&seqs[i].in);
        free(seqs[i].logits);
        for (int l = 0; l < seqs[i].n_hidden; l++)
            free(seqs[i].hidden[l]);
        free(seqs[i].hidden);
    }
    free(seqs);
    engine_close(en, 0);
    return rc;
}
