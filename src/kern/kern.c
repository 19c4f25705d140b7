/* The CPU device: its team, its scratch, and the list of linear rows in order of preference.
 * Scratch has a shared part (prepared inputs of a linear) and one buffer per thread (decoded
 * weights, attention tiles); both grow only while a model is loaded. */
#include <stdlib.h>
#include <string.h>
#include "kern/backend.h"
#include "kern/ops.h"
#include "base/log.h"

#define THREAD_BYTES (1u << 20)   /* enough for attention tiles of any head size that it accepts */
#define SHARED_BYTES (256u << 10) /* per thread, for partial results of split attention */

static const char *const act_names[KERN_ACT_COUNT] = {"spec", "auto", "f32", "bf16", "int8"};

int kern_act_parse(const char *text, kern_act *out, err *e)
{
    for (int i = 0; i < KERN_ACT_COUNT; i++)
        if (!strcmp(text, act_names[i])) {
            *out = (kern_act)i;
            return 0;
        }
    return err_set(e, ERR_USAGE,
                   "unknown activation dtype '%s', expected spec, auto, f32, bf16 or int8", text);
}

const char *kern_act_name(kern_act a)
{
    return (unsigned)a < KERN_ACT_COUNT ? act_names[a] : "?";
}

typedef struct cpu_device {
    kern__dev dev;
    kern__ops ops;
} cpu_device;

int kern_open(kern_dev **out, const kern_opts *o, err *e)
{
    int rc = 0;
    cpu_device *c = NULL;
    if (o->ranks < 0 || o->ranks > 1) return kern__ranks_open(out, o, e);
    if (o->device && *o->device && strcmp(o->device, "cpu")) return kern__gpu_open(out, o, e);
    if (o->threads < 0 || o->threads > 1024)
        return err_set(e, ERR_VALUE, "%d threads, expected 0 to 1024", o->threads);
    c = xcalloc(1, sizeof *c);
    c->dev.pub.name = "cpu";
    c->dev.pub.features = o->cpu_features & cpu_detect();
    kern__ops_resolve(c->dev.pub.features, &c->ops);
    c->dev.ops = &c->ops;
    TRY(team_open(&c->dev.pub.team, o->threads, e));
    TRY(kern__grow(&c->dev.pub, (size_t)team_size(c->dev.pub.team) * SHARED_BYTES, THREAD_BYTES,
                   e));
    *out = &c->dev.pub;
    c = NULL;
out:
    if (c) kern_close(&c->dev.pub);
    return rc;
}

void kern_close(kern_dev *d)
{
    if (!d) return;
    if (d->ranks) {
        kern__ranks_close(d->ranks);
        return;
    }
    KERN__ELSEWHERE(d, close(d))
    kern__dev *k = (kern__dev *)(void *)d;
    if (d->team) team_close(d->team);
    mem_free(d->scratch);
    mem_free(k->thread);
    free(d);
}

int kern_alloc(kern_dev *d, void **out, size_t n, err *e)
{
    return d->be ? d->be->alloc(d, out, n, e) : mem_alloc_huge(out, n, e);
}

void kern_free(kern_dev *d, void *p)
{
    KERN__ELSEWHERE(d, free(d, p))
    mem_free(p);
}

int kern_host_alloc(kern_dev *d, void **out, size_t n, err *e)
{
    return d->be ? d->be->host_alloc(d, out, n, e) : mem_alloc_huge(out, n, e);
}

void kern_host_free(kern_dev *d, void *p)
{
    if (!p) return;
    KERN__ELSEWHERE(d, host_free(d, p))
    mem_free(p);
}

bool kern_kv_mma(const kern_dev *d, kern_kv_type t, int D, int v_in_k, int page_tokens)
{
    return d->be && page_tokens == d->page_tokens && !v_in_k && D % 32 == 0 && t != KV_F32;
}

int kern_reserve_attention(kern_dev *d, int64_t max_rows, int H, int v_lanes, err *e)
{
    return d->be ? d->be->reserve_attention(d, max_rows, H, v_lanes, e) : 0;
}

size_t kern_lane_bytes(const kern_dev *d, kern_lanes_kind kind, kern_act act)
{
    const bool f32 = kind == KERN_STREAM || act == KERN_ACT_SPEC || act == KERN_ACT_F32;
    return f32 || !d || !d->be ? 4 : 2;
}

bool kern_memory(kern_dev *d, uint64_t *all, uint64_t *left)
{
    return d->be && d->be->memory(d, all, left);
}

int kern_lanes(kern_dev *d, float **out, int64_t n, kern_lanes_kind kind, kern_act act, err *e)
{
    void *p = NULL;
    size_t bytes;
    if (d->be) return d->be->lanes(d, out, n, kind, act, e);
    if (n < 0 || !mem_mul((size_t)n, sizeof(float), &bytes))
        return err_set(e, ERR_LIMIT, "%lld activations are too many", (long long)n);
    int rc = kern_alloc(d, &p, bytes, e);
    *out = p;
    return rc;
}

int kern_zero(kern_dev *d, void *p, size_t n, err *e)
{
    if (d->be) return d->be->zero(d, p, n, e);
    memset(p, 0, n);
    return 0;
}

int kern_constant(kern_dev *d, float **p, int64_t n, err *e)
{
    return d->be && *p ? d->be->constant(d, p, n, e) : 0;
}

int kern_table(kern_dev *d, qtensor *t, err *e)
{
    return d->be && t->codes ? d->be->table(d, t, e) : 0;
}

void *kern__thread_buffer(kern_dev *d, int index)
{
    kern__dev *k = (kern__dev *)(void *)d;
    return k->thread + (size_t)index * k->thread_bytes;
}

int kern__grow(kern_dev *d, size_t shared_bytes, size_t per_thread_bytes, err *e)
{
    int rc = 0;
    kern__dev *k = (kern__dev *)(void *)d;
    void *mem;
    if (shared_bytes > d->scratch_bytes) {
        TRY(mem_alloc_huge(&mem, shared_bytes, e));
        mem_free(d->scratch);
        d->scratch = mem;
        d->scratch_bytes = shared_bytes;
    }
    if (per_thread_bytes > k->thread_bytes) {
        size_t each = (per_thread_bytes + 4095) / 4096 * 4096, total;
        if (!mem_mul(each, (size_t)team_size(d->team), &total))
            return err_set(e, ERR_NOMEM, "scratch of %zu bytes a thread is too large", each);
        TRY(mem_alloc_huge(&mem, total, e));
        mem_free(k->thread);
        k->thread = mem;
        k->thread_bytes = each;
    }
out:
    return rc;
}

/* ---- bandwidth --------------------------------------------------------------------------- */

typedef struct read_job {
    const unsigned char *data;
    size_t bytes;
    uint64_t sink;
} read_job;

/* Four streams per thread, 64-bit sums: enough independent loads to saturate a core without
 * intrinsics. */
static void read_part(void *arg, int index, int n)
{
    read_job *j = arg;
    int64_t lo, hi;
    thread_split((int64_t)(j->bytes / 8), 32, index, n, &lo, &hi);
    typedef uint64_t lanes __attribute__((vector_size(64), aligned(8)));
    size_t each = (size_t)(hi - lo) / 32 * 8;
    const uint64_t *p = (const uint64_t *)(const void *)j->data + lo;
    lanes s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    for (size_t i = 0; i + 8 <= each; i += 8) {
        s0 += *(const lanes *)(const void *)(p + i);
        s1 += *(const lanes *)(const void *)(p + each + i);
        s2 += *(const lanes *)(const void *)(p + 2 * each + i);
        s3 += *(const lanes *)(const void *)(p + 3 * each + i);
    }
    s0 += s1 + s2 + s3;
    __atomic_fetch_add(&j->sink, s0[0] + s0[7], __ATOMIC_RELAXED);
}

double kern_measure_bandwidth(kern_dev *d, size_t bytes)
{
    void *mem;
    double best = 0;
    if (bytes < 65536) bytes = 65536;
    if (mem_alloc_huge(&mem, bytes, NULL) < 0) return 0;
    memset(mem, 1, bytes);
    read_job j = {mem, bytes, 0};
    double start = clock_seconds();
    for (int i = 0; i < 12 && (i < 3 || clock_seconds() - start < 0.5); i++) {
        double t = clock_seconds();
        team_run(d->team, read_part, &j);
        t = clock_seconds() - t;
        if (t > 0 && (double)bytes / t / 1e9 > best) best = (double)bytes / t / 1e9;
    }
    mem_free(mem);
    return best;
}
