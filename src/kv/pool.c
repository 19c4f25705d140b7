/* The page pool: one allocation a layer. A layer of full or windowed attention has memory for the
 * pages of its group; a linear-attention layer has a state for each sequence that may run. Each
 * group numbers its own pages, counts references and keeps free pages on a stack. One of the
 * references may be the prefix tree's; n_cached counts the pages whose only reference it is. */
#include "kv/pool_internal.h"
#include <stdlib.h>
#include <string.h>

typedef struct page_space { /* of one group */
    int64_t n_pages, n_free, n_cached;
    int32_t *stack;   /* free pages */
    int32_t *refs;    /* [n_pages] */
    uint8_t *in_tree; /* [n_pages] */
} page_space;

struct kv_pool {
    kern_dev *dev;
    int n_layers, page_tokens, n_states, window;
    uint64_t bytes;
    page_space space[KV_GROUPS];
    kv_layer_shape *shapes; /* [n_layers] */
    kern_kv_layer *layers;  /* [n_layers]; states have none */
    void **memory;          /* [n_layers] */
    float **scales;         /* [2 * n_layers], copies */
    kv_pool *next;          /* that of the next rank */
};

static float *copy_scale(const float *s, int n)
{
    if (!s) return NULL;
    float *out = xmalloc(sizeof *out * (size_t)n);
    memcpy(out, s, sizeof *out * (size_t)n);
    return out;
}

static int open_space(page_space *s, int64_t n_pages, int page_tokens, err *e)
{
    if (n_pages < 1 || n_pages > INT32_MAX / page_tokens)
        return err_set(e, ERR_VALUE, "KV cache: %lld pages of %d tokens cannot be addressed",
                       (long long)n_pages, page_tokens);
    *s = (page_space){.n_pages = n_pages, .n_free = n_pages};
    s->stack = xmalloc(sizeof *s->stack * (size_t)n_pages);
    s->refs = xcalloc((size_t)n_pages, sizeof *s->refs);
    s->in_tree = xcalloc((size_t)n_pages, sizeof *s->in_tree);
    for (int64_t i = 0; i < n_pages; i++)
        s->stack[i] = (int32_t)(n_pages - 1 - i); /* page 0 is taken first */
    return 0;
}

static int layer_memory(kv_pool *p, int i, size_t one, int64_t n, err *e)
{
    size_t total;
    if (!mem_mul(one, (size_t)n, &total))
        return err_set(e, ERR_LIMIT, "KV cache: layer %d, %lld times %zu bytes is too much", i,
                       (long long)n, one);
    int rc = kern_alloc(p->dev, &p->memory[i], total, e);
    if (rc == 0) p->bytes += total;
    return rc;
}

static int open_state(kv_pool *p, int i, err *e)
{
    size_t one;
    if (!mem_mul((size_t)p->shapes[i].state_floats, sizeof(float), &one))
        return err_set(e, ERR_LIMIT, "KV cache: layer %d has a state of %lld numbers", i,
                       (long long)p->shapes[i].state_floats);
    int rc = layer_memory(p, i, one, p->n_states, e);
    return rc == 0 ? kern_zero(p->dev, p->memory[i], one * (size_t)p->n_states, e) : rc;
}

static int open_layer(kv_pool *p, int i, const kv_pool_opts *o, err *e)
{
    const kv_layer_shape *l = &p->shapes[i];
    if (l->state_floats > 0) return open_state(p, i, e);
    size_t page = kern_kv_page_bytes(o->type, l->Hk, l->D, l->v_in_k, o->page_tokens);
    int rc = layer_memory(p, i, page, p->space[kv_pool_group(p, i)].n_pages, e);
    if (rc < 0) return rc;
    p->scales[2 * i] = copy_scale(o->k_scale ? o->k_scale[i] : NULL, l->Hk);
    p->scales[2 * i + 1] = copy_scale(o->v_scale ? o->v_scale[i] : NULL, l->Hk);
    float *ks = p->scales[2 * i], *vs = p->scales[2 * i + 1];
    TRY(kern_constant(p->dev, &ks, l->Hk, e));
    TRY(kern_constant(p->dev, &vs, l->Hk, e));
    p->layers[i] =
        (kern_kv_layer){.type = o->type,
                        .Hk = l->Hk,
                        .D = l->D,
                        .v_in_k = l->v_in_k,
                        .page_tokens = o->page_tokens,
                        .base = p->memory[i],
                        .page_stride = page,
                        .k_scale = ks,
                        .v_scale = vs,
                        .mma = kern_kv_mma(p->dev, o->type, l->D, l->v_in_k, o->page_tokens)};
out:
    return rc;
}

int kv_pool_open(kv_pool **out, kern_dev *d, const kv_pool_opts *o, err *e)
{
    int rc = 0;
    size_t n = (size_t)o->n_layers;
    bool states = false;
    kv_sizes sz;
    *out = NULL;
    if (o->page_tokens < 1 || o->page_tokens > 4096)
        return err_set(e, ERR_VALUE, "KV cache: %d tokens a page; 1 to 4096 can be",
                       o->page_tokens);
    kv_sizes_of(o->type, o->layers, o->n_layers, o->page_tokens, &sz);
    states = sz.state_bytes > 0;
    if (states && o->n_states < 1)
        return err_set(e, ERR_VALUE, "KV cache: %d states for layers of linear attention",
                       o->n_states);
    kv_pool *p = xcalloc(1, sizeof *p);
    *p = (kv_pool){.dev = d,
                   .n_layers = o->n_layers,
                   .page_tokens = o->page_tokens,
                   .n_states = states ? o->n_states : 0,
                   .window = sz.window};
    p->shapes = xcalloc(n, sizeof *p->shapes);
    p->layers = xcalloc(n, sizeof *p->layers);
    p->memory = xcalloc(n, sizeof *p->memory);
    p->scales = xcalloc(2 * n, sizeof *p->scales);
    memcpy(p->shapes, o->layers, sizeof *p->shapes * n);
    for (int g = 0; g < KV_GROUPS; g++)
        if (sz.group_bytes[g]) TRY(open_space(&p->space[g], o->n_pages[g], o->page_tokens, e));
    for (int i = 0; i < o->n_layers; i++)
        TRY(open_layer(p, i, o, e));
    *out = p;
    p = NULL;
out:
    kv_pool_close(p);
    return rc;
}

void kv_pool_close(kv_pool *p)
{
    if (!p) return;
    kv_pool_close(p->next);
    for (int i = 0; i < p->n_layers; i++) {
        if (p->memory[i]) kern_free(p->dev, p->memory[i]);
        free(p->scales[2 * i]);
        free(p->scales[2 * i + 1]);
    }
    for (int g = 0; g < KV_GROUPS; g++) {
        free(p->space[g].stack);
        free(p->space[g].refs);
        free(p->space[g].in_tree);
    }
    free(p->shapes);
    free(p->layers);
    free(p->memory);
    free(p->scales);
    free(p);
}

void kv_pool_attach(kv_pool *p, kv_pool *next)
{
    while (p->next)
        p = p->next;
    p->next = next;
}

kv_pool *kv_pool_rank(kv_pool *p, int rank)
{
    while (rank-- > 0)
        p = p->next;
    return p;
}

const kern_kv_layer *kv_pool_layer(const kv_pool *p, int layer)
{
    return &p->layers[layer];
}
int kv_pool_group(const kv_pool *p, int layer)
{
    const kv_layer_shape *l = &p->shapes[layer];
    return l->state_floats > 0 ? -1 : l->window > 0 ? KV_WINDOW : KV_FULL;
}
float *kv_pool_state(const kv_pool *p, int layer, int slot)
{
    int64_t n = p->shapes[layer].state_floats;
    return n > 0 ? (float *)p->memory[layer] + n * slot : NULL;
}
int kv_pool_page_tokens(const kv_pool *p)
{
    return p->page_tokens;
}
int kv_pool_window(const kv_pool *p)
{
    return p->window;
}
int64_t kv_pool_total(const kv_pool *p, int group)
{
    return p->space[group].n_pages;
}
int64_t kv_pool_free_pages(const kv_pool *p, int group)
{
    return p->space[group].n_free;
}
int64_t kv_pool_cached_pages(const kv_pool *p, int group)
{
    return p->space[group].n_cached;
}
uint64_t kv_pool_bytes(const kv_pool *p)
{
    return p->bytes;
}

int kv_pool_alloc(kv_pool *p, int group, int32_t *pages, int n, err *e)
{
    page_space *s = &p->space[group];
    if (n > s->n_free)
        return err_set(e, ERR_BUSY, "KV cache: %d pages wanted, %lld free", n,
                       (long long)s->n_free);
    for (int i = 0; i < n; i++) {
        pages[i] = s->stack[--s->n_free];
        s->refs[pages[i]] = 1;
    }
    return 0;
}

void kv_pool_ref(kv_pool *p, int group, int32_t page)
{
    page_space *s = &p->space[group];
    if (s->refs[page]++ == 1 && s->in_tree[page]) s->n_cached--;
}

void kv_pool_unref(kv_pool *p, int group, int32_t page)
{
    page_space *s = &p->space[group];
    int32_t left = --s->refs[page];
    if (left == 0) s->stack[s->n_free++] = page;
    if (left == 1 && s->in_tree[page]) s->n_cached++;
}

void kv__tree_ref(kv_pool *p, int group, int32_t page)
{
    kv_pool_ref(p, group, page);
    p->space[group].in_tree[page] = 1;
}

void kv__tree_unref(kv_pool *p, int group, int32_t page)
{
    page_space *s = &p->space[group];
    if (s->refs[page] == 1) s->n_cached--;
    s->in_tree[page] = 0;
    kv_pool_unref(p, group, page);
}

int32_t kv__refs(const kv_pool *p, int group, int32_t page)
{
    return p->space[group].refs[page];
}
