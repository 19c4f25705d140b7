/* The page pool: one allocation a layer, pages counted by reference, free pages on a stack. One of
 * the references may be the prefix tree's; n_cached counts the pages whose only reference it is. */
#include "kv/pool_internal.h"
#include <stdlib.h>
#include <string.h>

struct kv_pool {
    kern_dev *dev;
    int n_layers, page_tokens;
    int64_t n_pages, n_free, n_cached;
    uint64_t bytes;
    kern_kv_layer *layers;
    uint8_t **memory; /* [n_layers] */
    int32_t *stack;   /* free pages */
    int32_t *refs;    /* [n_pages] */
    uint8_t *in_tree; /* [n_pages] */
    float **scales;   /* [2 * n_layers], copies */
};

static float *copy_scale(const float *s, int n)
{
    if (!s) return NULL;
    float *out = xmalloc(sizeof *out * (size_t)n);
    memcpy(out, s, sizeof *out * (size_t)n);
    return out;
}

int kv_pool_open(kv_pool **out, kern_dev *d, const kv_pool_opts *o, err *e)
{
    int rc = 0;
    *out = NULL;
    if (o->n_pages < 1 || o->n_pages > INT32_MAX || o->page_tokens < 1 || o->page_tokens > 4096 ||
        o->n_pages > INT32_MAX / o->page_tokens)
        return err_set(e, ERR_VALUE, "KV cache: %lld pages of %d tokens cannot be addressed",
                       (long long)o->n_pages, o->page_tokens);
    kv_pool *p = xcalloc(1, sizeof *p);
    *p = (kv_pool){
        .dev = d, .n_layers = o->n_layers, .page_tokens = o->page_tokens, .n_pages = o->n_pages};
    p->layers = xcalloc((size_t)o->n_layers, sizeof *p->layers);
    p->memory = xcalloc((size_t)o->n_layers, sizeof *p->memory);
    p->scales = xcalloc(2 * (size_t)o->n_layers, sizeof *p->scales);
    p->stack = xmalloc(sizeof *p->stack * (size_t)o->n_pages);
    p->refs = xcalloc((size_t)o->n_pages, sizeof *p->refs);
    p->in_tree = xcalloc((size_t)o->n_pages, sizeof *p->in_tree);
    for (int i = 0; i < o->n_layers; i++) {
        size_t page = kern_kv_page_bytes(o->type, o->layers[i].Hk, o->layers[i].D,
                                         o->layers[i].v_in_k, o->page_tokens),
               total;
        void *mem = NULL;
        if (!mem_mul(page, (size_t)o->n_pages, &total)) {
            rc = err_set(e, ERR_LIMIT, "KV cache: %lld pages of %zu bytes is too much",
                         (long long)o->n_pages, page);
            goto out;
        }
        TRY(kern_alloc(d, &mem, total, e));
        p->memory[i] = mem;
        p->bytes += total;
        p->scales[2 * i] = copy_scale(o->k_scale ? o->k_scale[i] : NULL, o->layers[i].Hk);
        p->scales[2 * i + 1] = copy_scale(o->v_scale ? o->v_scale[i] : NULL, o->layers[i].Hk);
        p->layers[i] = (kern_kv_layer){.type = o->type,
                                       .Hk = o->layers[i].Hk,
                                       .D = o->layers[i].D,
                                       .v_in_k = o->layers[i].v_in_k,
                                       .page_tokens = o->page_tokens,
                                       .base = mem,
                                       .page_stride = page,
                                       .k_scale = p->scales[2 * i],
                                       .v_scale = p->scales[2 * i + 1]};
    }
    for (int64_t i = 0; i < o->n_pages; i++)
        p->stack[i] = (int32_t)(o->n_pages - 1 - i); /* page 0 is taken first */
    p->n_free = o->n_pages;
    *out = p;
    p = NULL;
out:
    kv_pool_close(p);
    return rc;
}

void kv_pool_close(kv_pool *p)
{
    if (!p) return;
    for (int i = 0; i < p->n_layers; i++) {
        if (p->memory[i]) kern_free(p->dev, p->memory[i]);
        free(p->scales[2 * i]);
        free(p->scales[2 * i + 1]);
    }
    free(p->layers);
    free(p->memory);
    free(p->scales);
    free(p->stack);
    free(p->refs);
    free(p->in_tree);
    free(p);
}

const kern_kv_layer *kv_pool_layer(const kv_pool *p, int layer)
{
    return &p->layers[layer];
}
int kv_pool_group(const kv_pool *p, int layer)
{
    (void)p, (void)layer;
    return KV_FULL;
}
float *kv_pool_state(const kv_pool *p, int layer, int slot)
{
    (void)p, (void)layer, (void)slot;
    return NULL;
}
int kv_pool_page_tokens(const kv_pool *p)
{
    return p->page_tokens;
}
int64_t kv_pool_total(const kv_pool *p)
{
    return p->n_pages;
}
int64_t kv_pool_free_pages(const kv_pool *p)
{
    return p->n_free;
}
uint64_t kv_pool_bytes(const kv_pool *p)
{
    return p->bytes;
}

int kv_pool_alloc(kv_pool *p, int32_t *pages, int n, err *e)
{
    if (n > p->n_free)
        return err_set(e, ERR_BUSY, "KV cache: %d pages wanted, %lld free", n,
                       (long long)p->n_free);
    for (int i = 0; i < n; i++) {
        pages[i] = p->stack[--p->n_free];
        p->refs[pages[i]] = 1;
    }
    return 0;
}

void kv_pool_ref(kv_pool *p, int32_t page)
{
    if (p->refs[page]++ == 1 && p->in_tree[page]) p->n_cached--;
}

void kv_pool_unref(kv_pool *p, int32_t page)
{
    int32_t left = --p->refs[page];
    if (left == 0) p->stack[p->n_free++] = page;
    if (left == 1 && p->in_tree[page]) p->n_cached++;
}

void kv__tree_ref(kv_pool *p, int32_t page)
{
    kv_pool_ref(p, page);
    p->in_tree[page] = 1;
}

void kv__tree_unref(kv_pool *p, int32_t page)
{
    if (p->refs[page] == 1) p->n_cached--;
    p->in_tree[page] = 0;
    kv_pool_unref(p, page);
}

int64_t kv_pool_cached_pages(const kv_pool *p)
{
    return p->n_cached;
}

int32_t kv__refs(const kv_pool *p, int32_t page)
{
    return p->refs[page];
}
