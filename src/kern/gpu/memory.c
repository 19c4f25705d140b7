/* Memory of a GPU: handles, constants, tables. A handle is a range of addresses reserved without
 * access, so that a slip of the program faults at once instead of reading numbers of another
 * memory. */
#include "kern/gpu/gpu.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define POOL_CHUNK ((size_t)32 << 20)
#define ALIGN      256u

int gpu__check(gpu_dev *g, const char *what, const char *why, err *e)
{
    if (!why) return 0;
    return err_set(e, ERR_DEVICE, "%s: %s: %s", g->name, what, why);
}

int gpu__device_alloc(gpu_dev *g, void **out, size_t n, err *e)
{
    int rc = gpu__check(g, "bind", g->api->bind(g->index), e);
    if (rc < 0) return rc;
    const char *why = g->api->alloc(out, n ? n : 1);
    if (!why) return 0;
    return err_set(e, ERR_NOMEM, "%s: %.1f MB of device memory: %s", g->name, (double)n / 1e6, why);
}

/* ---- handles ------------------------------------------------------------------------------------
 */

const gpu_block *gpu__find(const gpu_dev *g, const void *p)
{
    uintptr_t a = (uintptr_t)p;
    int lo = 0, hi = g->n_blocks;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (g->blocks[mid].end <= a)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < g->n_blocks && g->blocks[lo].va <= a ? &g->blocks[lo] : NULL;
}

static void insert(gpu_dev *g, const gpu_block *b)
{
    if (g->n_blocks == g->cap_blocks) {
        g->cap_blocks = g->cap_blocks ? 2 * g->cap_blocks : 64;
        g->blocks = xrealloc(g->blocks, sizeof *g->blocks * (size_t)g->cap_blocks);
    }
    int i = g->n_blocks++;
    for (; i > 0 && g->blocks[i - 1].va > b->va; i--)
        g->blocks[i] = g->blocks[i - 1];
    g->blocks[i] = *b;
}

/* `bytes` of the device behind `span` bytes of handle; span is a byte longer, so that the end of a
 * range is not the beginning of the next. */
static int open_block(gpu_dev *g, void **out, size_t bytes, size_t span, bool lanes, gpu_type type,
                      err *e)
{
    gpu_block b = {.lanes = lanes, .type = type};
    void *dev = NULL;
    int rc = gpu__device_alloc(g, &dev, bytes, e);
    if (rc < 0) return rc;
    void *va = mmap(NULL, span + 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (va == MAP_FAILED) {
        g->api->free(dev);
        return err_set(e, ERR_NOMEM, "%s: no address range of %zu bytes", g->name, span);
    }
    b.va = (uintptr_t)va;
    b.end = b.va + span + 1;
    b.dev = dev;
    insert(g, &b);
    *out = va;
    return 0;
}

bool gpu__memory(kern_dev *d, uint64_t *all, uint64_t *left)
{
    gpu_facts now;
    gpu_dev *g = gpu__of(d);
    if (g->api->facts(g->index, &now)) return false;
    *all = now.total_bytes;
    *left = now.free_bytes;
    return true;
}

int gpu__alloc(kern_dev *d, void **out, size_t n, err *e)
{
    return open_block(gpu__of(d), out, n, n, false, GPU_F32, e);
}

int gpu__lanes(kern_dev *d, float **out, int64_t n, kern_lanes_kind kind, kern_act act, err *e)
{
    const size_t lane = kern_lane_bytes(d, kind, act);
    const bool f32 = lane == 4;
    void *p = NULL;
    int rc = open_block(gpu__of(d), &p, (size_t)n * lane, (size_t)n * 4, true,
                        f32 ? GPU_F32 : GPU_BF16, e);
    *out = p;
    return rc;
}

void gpu__free(kern_dev *d, void *p)
{
    gpu_dev *g = gpu__of(d);
    const gpu_block *b = p ? gpu__find(g, p) : NULL;
    if (!b) return;
    g->api->bind(g->index);
    g->api->free(b->dev);
    munmap((void *)b->va, b->end - b->va);
    ptrdiff_t i = b - g->blocks;
    memmove(g->blocks + i, g->blocks + i + 1, sizeof *b * (size_t)(g->n_blocks - (int)i - 1));
    g->n_blocks--;
}

/* What the owner has not freed, constants among it. */
void gpu__forget_handles(gpu_dev *g)
{
    for (int i = 0; i < g->n_blocks; i++)
        munmap((void *)g->blocks[i].va, g->blocks[i].end - g->blocks[i].va);
    g->n_blocks = 0;
}

int gpu__zero(kern_dev *d, void *p, size_t n, err *e)
{
    gpu_dev *g = gpu__of(d);
    const gpu_block *b = gpu__find(g, p);
    if (!b) return err_set(e, ERR_VALUE, "%s: zero of what is no device memory", g->name);
    char *at = b->dev + ((uintptr_t)p - b->va);
    int rc = gpu__check(g, "bind", g->api->bind(g->index), e);
    if (rc == 0) rc = gpu__check(g, "fill", g->api->zero(at, n, g->stream), e);
    return rc < 0 ? rc : gpu__check(g, "fill", g->api->sync(g->stream), e);
}

void *gpu__raw(gpu_dev *g, const void *p)
{
    if (!p) return NULL;
    const gpu_block *b = gpu__find(g, p);
    if (!b) {
        gpu__fail(g, "an address of the program where one of the device is needed");
        return NULL;
    }
    size_t at = (uintptr_t)p - b->va;
    if (b->lanes && b->type == GPU_BF16) at /= 2;
    return b->dev + at;
}

gpu_x gpu__x(gpu_dev *g, const float *p)
{
    const gpu_block *b = p ? gpu__find(g, p) : NULL;
    return (gpu_x){gpu__raw(g, p), b && b->lanes ? b->type : GPU_F32};
}

/* ---- what stays ---------------------------------------------------------------------------------
 */

static int new_chunk(gpu_dev *g, size_t n, void **out, err *e)
{
    struct gpu_pool *p = &g->pool;
    int rc = gpu__device_alloc(g, out, n, e);
    if (rc < 0) return rc;
    if (p->n == p->cap) {
        p->cap = p->cap ? 2 * p->cap : 64;
        p->mem = xrealloc(p->mem, sizeof *p->mem * (size_t)p->cap);
    }
    p->mem[p->n++] = *out;
    return 0;
}

int gpu__keep(gpu_dev *g, void **out, const void *from, size_t n, err *e)
{
    struct gpu_pool *p = &g->pool;
    size_t need = (n + 64 + ALIGN - 1) / ALIGN * ALIGN; /* readers may pass the end by a vector */
    int rc;
    if (need > POOL_CHUNK / 4) {
        if ((rc = new_chunk(g, need, out, e)) < 0) return rc;
    } else {
        if (need > p->left) {
            void *mem = NULL;
            if ((rc = new_chunk(g, POOL_CHUNK, &mem, e)) < 0) return rc;
            p->at = mem;
            p->left = POOL_CHUNK;
        }
        *out = p->at;
        p->at += need;
        p->left -= need;
    }
    if (!from) return 0;
    rc = gpu__check(g, "bind", g->api->bind(g->index), e);
    if (rc == 0) rc = gpu__check(g, "upload", g->api->upload(*out, from, n, g->stream), e);
    return rc < 0 ? rc : gpu__check(g, "upload", g->api->sync(g->stream), e);
}

int gpu__constant(kern_dev *d, float **p, int64_t n, err *e)
{
    gpu_dev *g = gpu__of(d);
    void *dev = NULL;
    size_t bytes = sizeof(float) * (size_t)n;
    int rc = gpu__keep(g, &dev, *p, bytes, e);
    if (rc < 0) return rc;
    gpu_block b = {.dev = dev, .lanes = true, .type = GPU_F32};
    void *va = mmap(NULL, bytes + 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (va == MAP_FAILED)
        return err_set(e, ERR_NOMEM, "%s: no address range of %zu bytes", g->name, bytes);
    b.va = (uintptr_t)va;
    b.end = b.va + bytes + 1;
    insert(g, &b);
    *p = va;
    return 0;
}

/* Rows as bf16 where they are, else as f32. */
int gpu__table(kern_dev *d, qtensor *t, err *e)
{
    gpu_dev *g = gpu__of(d);
    int rc = 0;
    int64_t rows = t->E * t->N;
    bool plain = !t->scales && (t->code == NUM_BF16 || t->code == NUM_F32);
    size_t row = num_bytes(plain ? t->code : NUM_F32, (size_t)t->K), all;
    void *va = NULL, *host = NULL;
    if (!mem_mul(row, (size_t)rows, &all))
        return err_set(e, ERR_LIMIT, "%s: a table of %lld rows is too large", g->name,
                       (long long)rows);
    TRY(open_block(g, &va, all, all, false, GPU_F32, e));
    TRY(mem_alloc(&host, all, e));
    for (int64_t i = 0; i < rows; i++)
        if (plain)
            memcpy((char *)host + (size_t)i * row, t->codes + (size_t)i * t->row_bytes, row);
        else
            qtensor_decode_row(t, i, (float *)(void *)((char *)host + (size_t)i * row));
    TRY(gpu__check(g, "upload", g->api->upload(gpu__find(g, va)->dev, host, all, g->stream), e));
    TRY(gpu__check(g, "upload", g->api->sync(g->stream), e));
    qtensor made = {.E = t->E, .N = t->N, .K = t->K, .row_bytes = row};
    made.code = plain ? t->code : NUM_F32;
    made.spec = (qspec){{.type = made.code}, t->spec.a, t->spec.kv};
    made.codes = va;
    qtensor_free(t);
    *t = made;
    va = NULL;
out:
    if (va) gpu__free(d, va);
    mem_free(host);
    return rc;
}
