/* A step of a GPU: written down, launched, known by name. See gpu.h. */
#include "kern/gpu/gpu.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STAGE_CHUNK ((size_t)256 << 10)
#define MOST_KNOWN  256

void gpu__fail(gpu_dev *g, const char *fmt, ...)
{
    char text[256];
    va_list ap;
    if (g->failed) return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    g->failed = true;
    err_set(&g->failure, ERR_DEVICE, "%s: %s", g->name, text);
}

/* ---- stage --------------------------------------------------------------------------------------
 */

static int new_chunk(gpu_dev *g, gpu_step *s, size_t n, err *e)
{
    gpu_chunk c = {.room = n > STAGE_CHUNK ? n : STAGE_CHUNK};
    void *dev = NULL, *host = NULL;
    int rc = gpu__device_alloc(g, &dev, c.room, e);
    if (rc == 0) rc = gpu__check(g, "pinned memory", g->api->alloc_host(&host, c.room), e);
    if (rc < 0) {
        if (dev) g->api->free(dev);
        return rc;
    }
    c.dev = dev;
    c.host = host;
    s->chunks = xrealloc(s->chunks, sizeof *s->chunks * (size_t)(s->n_chunks + 1));
    s->chunks[s->n_chunks++] = c;
    return 0;
}

/* n bytes of the stage of the step in hand, aligned to 256. */
static bool place(gpu_dev *g, size_t n, unsigned char **host, unsigned char **dev)
{
    gpu_step *s = g->now;
    n = (n + 255) / 256 * 256;
    gpu_chunk *c = NULL;
    for (int i = 0; i < s->n_chunks && !c; i++)
        if (s->chunks[i].room - s->chunks[i].used >= n) c = &s->chunks[i];
    if (!c) {
        err e = {0};
        if (new_chunk(g, s, n, &e) < 0) {
            gpu__fail(g, "%s", e.msg);
            return false;
        }
        c = &s->chunks[s->n_chunks - 1];
    }
    *host = c->host + c->used;
    *dev = c->dev + c->used;
    c->used += n;
    return true;
}

static gpu_input *add_input(gpu_step *s, const gpu_input *in)
{
    if (s->n_inputs == s->cap_inputs) {
        s->cap_inputs = s->cap_inputs ? 2 * s->cap_inputs : 32;
        s->inputs = xrealloc(s->inputs, sizeof *s->inputs * (size_t)s->cap_inputs);
    }
    s->inputs[s->n_inputs] = *in;
    return &s->inputs[s->n_inputs++];
}

typedef struct staged_groups {
    gpu_group *groups;
    int32_t *shared;
    int n, room;
} staged_groups;
static void stage_group(void *arg, const int32_t *seq, int n, int pages)
{
    staged_groups *s = arg;
    if (s->n == s->room) return;
    gpu_group *g = &s->groups[s->n++];
    *g = (gpu_group){pages, n, {0}};
    for (int i = 0; i < n; i++)
        g->seq[i] = seq[i], s->shared[seq[i]] = pages;
}

/* Page tables are wide enough for lengths up to the next power of two; what a sequence does not
 * have is -1. */
static void stage_seqs(const gpu_input *in, int64_t T)
{
    const kern_seq *q = in->host;
    int32_t *at = (int32_t *)(void *)in->stage;
    int32_t *row0 = at, *n_rows = at + in->n, *kv_len = at + 2 * in->n, *pages = at + 3 * in->n,
            *row_seq = pages + in->n * in->max_pages;
    for (int64_t t = 0; t < T; t++)
        row_seq[t] = -1;
    for (int64_t i = 0; i < in->n; i++) {
        int have = in->max_pages ? (q[i].kv_len + in->page_tokens - 1) / in->page_tokens : 0;
        row0[i] = q[i].row0;
        n_rows[i] = q[i].n_rows;
        kv_len[i] = q[i].kv_len;
        for (int p = 0; p < in->max_pages; p++)
            pages[i * in->max_pages + p] = p < have && q[i].pages ? q[i].pages[p] : -1;
        for (int32_t t = q[i].row0; q[i].kv_len > 0 && t < q[i].row0 + q[i].n_rows && t < T; t++)
            row_seq[t] = (int32_t)i;
    }
    if (!in->seqs.n_groups) return;
    staged_groups groups = {(gpu_group *)(void *)(row_seq + T + in->n), row_seq + T, 0,
                            in->seqs.n_groups};
    memset(groups.shared, 0, (size_t)in->n * 4);
    memset(groups.groups, 0, sizeof(gpu_group) * (size_t)groups.room);
    kern_share(q, (int)in->n, in->page_tokens, in->share_pages, GPU_GROUP_SEQS, stage_group,
               &groups);
}

static void stage(const gpu_input *in, int64_t T)
{
    if (in->kind == GPU_IN_SEQS)
        stage_seqs(in, T);
    else
        memcpy(in->stage, in->host, (size_t)in->n * 4);
}

const void *gpu__input(gpu_dev *g, const void *host, int64_t n)
{
    gpu_step *s = g->now;
    if (!host || !s) return NULL;
    for (int i = 0; i < s->n_inputs; i++)
        if (s->inputs[i].kind == GPU_IN_BYTES && s->inputs[i].host == host && s->inputs[i].n >= n)
            return s->inputs[i].dev;
    gpu_input in = {.kind = GPU_IN_BYTES, .host = host, .n = n};
    if (!place(g, (size_t)n * 4, &in.stage, &in.dev)) return NULL;
    stage(add_input(s, &in), s->T);
    return in.dev;
}

const int32_t *gpu__ints(gpu_dev *g, const int32_t *p, int64_t n)
{
    return p && gpu__find(g, p) ? gpu__raw(g, p) : gpu__input(g, p, n);
}

static void measure(gpu_seqs *q, const kern_seq *seqs, int n, int page_tokens)
{
    int64_t len = 0;
    for (int i = 0; i < n; i++) {
        len = seqs[i].kv_len > len ? seqs[i].kv_len : len;
        q->max_rows = seqs[i].n_rows > q->max_rows ? seqs[i].n_rows : q->max_rows;
    }
    q->n = n;
    q->max_len = (int)kern_len_bucket(len);
    q->max_pages = page_tokens ? (q->max_len + page_tokens - 1) / page_tokens : 0;
}

gpu_seqs gpu__seqs(gpu_dev *g, const kern_seq *seqs, int n, int page_tokens)
{
    gpu_step *s = g->now;
    gpu_seqs none = {0};
    for (int i = 0; s && i < s->n_inputs; i++)
        if (s->inputs[i].kind == GPU_IN_SEQS && s->inputs[i].host == seqs &&
            s->inputs[i].page_tokens == page_tokens)
            return s->inputs[i].seqs;
    if (!s) return none;
    const int least = g->pub.share_pages;
    gpu_input in = {.kind = GPU_IN_SEQS,
                    .host = seqs,
                    .n = n,
                    .page_tokens = page_tokens,
                    .share_pages = least};
    measure(&in.seqs, seqs, n, page_tokens);
    /* In a graph there may be other groups the next time. */
    if (kern_share(seqs, n, page_tokens, least, GPU_GROUP_SEQS, NULL, NULL))
        in.seqs.n_groups = n / 2;
    in.max_pages = in.seqs.max_pages;
    size_t ints = (size_t)n * (size_t)(3 + in.max_pages) + (size_t)s->T;
    if (in.seqs.n_groups) ints += (size_t)n + sizeof(gpu_group) / 4 * (size_t)in.seqs.n_groups;
    if (!place(g, ints * 4, &in.stage, &in.dev)) return none;
    const int32_t *at = (const int32_t *)(const void *)in.dev;
    in.seqs.row0 = at;
    in.seqs.n_rows = at + n;
    in.seqs.kv_len = at + 2 * n;
    in.seqs.pages = at + 3 * n;
    in.seqs.row_seq = in.seqs.pages + (int64_t)n * in.max_pages;
    in.seqs.T = (int)s->T;
    in.seqs.shared = in.seqs.row_seq + s->T;
    in.seqs.groups = (const gpu_group *)(const void *)(in.seqs.shared + n);
    stage(add_input(s, &in), s->T);
    return in.seqs;
}

/* ---- writing down -------------------------------------------------------------------------------
 */

static void clear(gpu_step *s)
{
    s->n_ops = s->n_inputs = s->n_outputs = 0;
    s->args_used = 0;
    s->sums = false;
    for (int i = 0; i < s->n_chunks; i++)
        s->chunks[i].used = 0;
}

void gpu__step_free(gpu_dev *g, gpu_step *s)
{
    if (s->graph) g->api->graph_close(s->graph);
    for (int i = 0; i < s->n_chunks; i++) {
        g->api->free(s->chunks[i].dev);
        g->api->free_host(s->chunks[i].host);
    }
    free(s->chunks);
    free(s->ops);
    free(s->args);
    free(s->inputs);
    free(s->outputs);
}

bool gpu__step_begin(kern_dev *d, int64_t T, uint64_t key)
{
    gpu_dev *g = gpu__of(d);
    g->failed = g->replay = false;
    g->failure = (err){0};
    for (int i = 0; key && i < g->n_known; i++)
        if (g->known[i]->key == key) {
            g->now = g->known[i];
            g->replay = true;
            return false;
        }
    g->now = &g->step;
    if (key && g->n_known < MOST_KNOWN) {
        g->known = xrealloc(g->known, sizeof *g->known * (size_t)(g->n_known + 1));
        g->now = g->known[g->n_known++] = xcalloc(1, sizeof *g->now);
        g->now->key = key;
    }
    clear(g->now);
    g->now->T = T;
    return true;
}

size_t gpu__place_args(gpu_step *s, size_t bytes)
{
    size_t at = (s->args_used + 15) / 16 * 16;
    if (at + bytes > s->args_room) {
        s->args_room = 2 * (at + bytes) + 4096;
        s->args = xrealloc(s->args, s->args_room);
    }
    s->args_used = at + bytes;
    return at;
}

void gpu__push(gpu_dev *g, gpu_op op, const void *args, size_t bytes)
{
    gpu_step *s = g->now;
    if (!s) {
        gpu__fail(g, "an op outside of a step");
        return;
    }
    size_t at = gpu__place_args(s, bytes);
    memcpy(s->args + at, args, bytes);
    if (s->n_ops == s->cap_ops) {
        s->cap_ops = s->cap_ops ? 2 * s->cap_ops : 256;
        s->ops = xrealloc(s->ops, sizeof *s->ops * (size_t)s->cap_ops);
    }
    s->ops[s->n_ops++] = (gpu_rec){op, at, bytes};
}

void gpu__output(gpu_dev *g, const void *dev, size_t bytes, void *host)
{
    gpu_step *s = g->now;
    if (g->failed || !s) return;
    if (s->n_outputs == s->cap_outputs) {
        s->cap_outputs = s->cap_outputs ? 2 * s->cap_outputs : 4;
        s->outputs = xrealloc(s->outputs, sizeof *s->outputs * (size_t)s->cap_outputs);
    }
    s->outputs[s->n_outputs++] = (gpu_output){dev, host, bytes};
}

void gpu__fetch(kern_dev *d, const float *x, int64_t n, float *host)
{
    gpu_dev *g = gpu__of(d);
    gpu_x from = gpu__x(g, x);
    if (from.type != GPU_F32) gpu__fail(g, "fetch of lanes that are not f32");
    gpu__output(g, from.p, (size_t)n * sizeof(float), host);
}

/* ---- running ------------------------------------------------------------------------------------
 */

static const char *const op_names[GPU_N_OPS] = {
#define NAME(name, args) #name,
    GPU_OPS(NAME)
#undef NAME
};

static int launch_ops(gpu_dev *g, const gpu_step *s, err *e)
{
    for (int i = 0; i < s->n_ops; i++) {
        const gpu_rec *r = &s->ops[i];
        const char *why = g->api->launch[r->op](s->args + r->at, g->stream);
        if (why) return err_set(e, ERR_DEVICE, "%s: %s: %s", g->name, op_names[r->op], why);
        g->launched[r->op]++;
    }
    return 0;
}

/* A named step becomes a graph once; where none can be made, its ops are launched every time. */
static int make_graph(gpu_dev *g, gpu_step *s, err *e)
{
    if (!s->key || s->graph || g->facts.emulated) return 0;
    int rc = gpu__check(g, "graph", g->api->graph_begin(g->stream), e);
    if (rc < 0) return rc;
    rc = launch_ops(g, s, e);
    const char *why = g->api->graph_end(g->stream, &s->graph);
    return rc < 0 ? rc : gpu__check(g, "graph", why, e);
}

static int launch(gpu_dev *g, gpu_step *s, err *e)
{
    int rc = 0;
    pthread_mutex_lock(&g->launching);
    if (kern__ranks_failed(&g->pub)) {
        rc = kern__ranks_error(&g->pub, e);
        goto out;
    }
    for (int i = 0; i < s->n_chunks; i++)
        if (s->chunks[i].used)
            TRY(gpu__check(
                g, "upload",
                g->api->upload(s->chunks[i].dev, s->chunks[i].host, s->chunks[i].used, g->stream),
                e));
    if (g->profile)
        TRY(gpu__profile_launch(g, s, e));
    else if (s->graph)
        TRY(gpu__check(g, "graph", g->api->graph_run(s->graph, g->stream), e));
    else
        TRY(launch_ops(g, s, e));
out:
    pthread_mutex_unlock(&g->launching);
    return rc;
}

static int run(gpu_dev *g, gpu_step *s, err *e)
{
    int rc = 0;
    TRY(gpu__check(g, "bind", g->api->bind(g->index), e));
    TRY(make_graph(g, s, e));
    if (s->sums && !kern__ranks_meet(&g->pub)) return kern__ranks_error(&g->pub, e);
    TRY(launch(g, s, e));
    for (int i = 0; i < s->n_outputs; i++)
        TRY(gpu__check(
            g, "download",
            g->api->download(s->outputs[i].host, s->outputs[i].dev, s->outputs[i].bytes, g->stream),
            e));
    TRY(gpu__check(g, "download",
                   g->api->download(g->clipped_seen, g->clipped, sizeof *g->clipped, g->stream),
                   e));
    TRY(gpu__check(g, "step", g->api->sync(g->stream), e));
    if (g->profile) TRY(gpu__profile_read(g, s, e));
    if (kern__ranks_failed(&g->pub)) rc = kern__ranks_error(&g->pub, e);
out:
    return rc;
}

int gpu__step_flush(kern_dev *d, err *e)
{
    gpu_dev *g = gpu__of(d);
    gpu_step *s = g->now;
    if (g->failed) return err_set(e, g->failure.code, "%s", g->failure.msg);
    gpu__fuse(g, s);
    int rc = run(g, s, e);
    /* What is staged stays: later ops of the step read it too. */
    s->n_ops = s->n_outputs = 0;
    s->args_used = 0;
    s->sums = false;
    return rc;
}

/* A named step that failed is forgotten. */
static void forget(gpu_dev *g, gpu_step *s)
{
    for (int i = 0; i < g->n_known; i++)
        if (g->known[i] == s) {
            g->known[i] = g->known[--g->n_known];
            gpu__step_free(g, s);
            free(s);
            return;
        }
}

int gpu__step_end(kern_dev *d, err *e)
{
    gpu_dev *g = gpu__of(d);
    gpu_step *s = g->now;
    int rc = 0;
    if (g->failed) {
        rc = err_set(e, g->failure.code, "%s", g->failure.msg);
    } else {
        if (g->replay)
            for (int i = 0; i < s->n_inputs; i++)
                stage(&s->inputs[i], s->T);
        else
            gpu__fuse(g, s);
        rc = run(g, s, e);
    }
    if (rc < 0 && s->key) forget(g, s);
    g->now = NULL;
    return rc;
}

uint64_t gpu__clipped(const kern_dev *d)
{
    return *gpu__of(d)->clipped_seen;
}
