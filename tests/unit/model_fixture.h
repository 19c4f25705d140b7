/* A loaded model, its device and a page pool, and a run of ids through it, for tests below the
 * engine. Page p of the pool is page p of the only sequence. */
#ifndef TESTS_MODEL_FIXTURE_H
#define TESTS_MODEL_FIXTURE_H
#include "ckpt/safetensors.h"
#include "model/model.h"

typedef struct fixture {
    ckpt *c;
    quant_ckpt *q;
    kern_dev *dev;
    model *m;
    kv_pool *pool;
    int32_t pages[1024];
    int n_pages, page_tokens;
} fixture;

typedef struct fixture_opts {
    const char *path, *features, *quantize;
    kern_act act;
    kern_kv_type kv;
    int threads;
    const char *device; /* NULL = the CPU */
    int ranks;          /* devices that run it together; 0 = 1 */
    int page_tokens;    /* 0 = 16 */
    int64_t max_rows, tokens;
    void (*opened)(kern_dev *d); /* before the model is */
} fixture_opts;

static inline void fixture_close(fixture *f)
{
    if (f->pool) kv_pool_close(f->pool);
    model_close(f->m);
    if (f->q) quant_close(f->q);
    if (f->dev) kern_close(f->dev);
    ckpt_close(f->c);
}

static inline int fixture_open(fixture *f, const fixture_opts *o, err *e)
{
    int rc = 0;
    kern_opts ko = {.device = o->device, .threads = o->threads ? o->threads : 1, .ranks = o->ranks};
    *f = (fixture){.page_tokens = o->page_tokens ? o->page_tokens : 16};
    TRY(cpu_parse(o->features ? o->features : "auto", &ko.cpu_features, e));
    TRY(ckpt_open(&f->c, o->path, e));
    TRY(quant_open(&f->q, f->c, e));
    TRY(kern_open(&f->dev, &ko, e));
    if (o->opened) o->opened(f->dev);
    model_opts mo = {
        .act = o->act, .quantize = o->quantize, .max_rows = o->max_rows ? o->max_rows : 64};
    TRY(model_open(&f->m, f->q, f->dev, &mo, e));
    f->n_pages = (int)((o->tokens ? o->tokens : 512) + f->page_tokens - 1) / f->page_tokens;
    kv_pool_opts po = {.type = o->kv,
                       .page_tokens = f->page_tokens,
                       .n_pages = {f->n_pages, f->n_pages},
                       .n_states = 1};
    TRY(model_pool_open(f->m, &f->pool, &po, e));
    for (int i = 0; i < f->n_pages && i < 1024; i++)
        f->pages[i] = i;
out:
    if (rc < 0) {
        fixture_close(f);
        *f = (fixture){0};
    }
    return rc;
}

/* Rows [from, to) of a sequence `seq` of len ids as one step; their logits go to out [to - from,
 * vocab].
 */
static inline int fixture_step(fixture *f, const int32_t *seq, int64_t from, int64_t to,
                               int64_t len, float *out, err *e)
{
    int32_t pos[1024], rows[1024], whole = (int32_t)len;
    int64_t T = to - from;
    for (int64_t i = 0; i < T; i++) {
        pos[i] = (int32_t)(from + i);
        rows[i] = (int32_t)i;
    }
    kern_seq s = {0, (int32_t)T, (int32_t)to, f->pages};
    batch b = {.T = T,
               .ids = seq + from,
               .pos = pos,
               .slot = {pos, pos}, /* page i is page i: slot and position are the same */
               .seqs = {&s, &s},
               .n_seqs = 1,
               .rope_len = &whole,
               .logit_rows = rows,
               .n_logits = out ? T : 0};
    return model_forward(f->m, f->pool, &b, out, e);
}

static inline const st_tensor *fixture_tensor(const st_file *f, const char *name)
{
    for (size_t i = 0; i < f->n; i++)
        if (!strcmp(f->tensors[i].name, name)) return &f->tensors[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

static inline int32_t fixture_argmax(const float *x, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return (int32_t)best;
}
#endif
