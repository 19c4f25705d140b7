/* Shared prefixes. A tree whose edges hold whole pages: a node owns k pages and the k * page_tokens
 * ids that they hold; children of a node differ in their first page. The root of each salt is a
 * child of the one true root. The tree keeps one reference on each of its pages; a page that only
 * the tree holds (count 1) in a leaf may be evicted, least recently used leaf first. */
#include "kv/pool_internal.h"
#include <stdlib.h>
#include <string.h>

typedef struct node {
    struct node *parent, *child, *next; /* child list is unordered */
    uint64_t salt;                      /* of a salt root; else 0 */
    uint64_t used;                      /* clock of the last match or insert */
    int32_t *ids, *pages;
    int n_pages;
} node;

struct kv_radix {
    kv_pool *pool;
    node root;
    uint64_t clock;
    int64_t n_pages;
    int pt; /* tokens in a page */
};

int kv_radix_open(kv_radix **out, kv_pool *p, err *e)
{
    (void)e;
    kv_radix *r = xcalloc(1, sizeof *r);
    r->pool = p;
    r->pt = kv_pool_page_tokens(p);
    *out = r;
    return 0;
}

static void drop_node(kv_radix *r, node *n)
{
    for (node *c = n->child; c;) {
        node *next = c->next;
        drop_node(r, c);
        c = next;
    }
    for (int i = 0; i < n->n_pages; i++)
        kv__tree_unref(r->pool, n->pages[i]);
    r->n_pages -= n->n_pages;
    free(n->ids);
    free(n->pages);
    if (n != &r->root) free(n);
}

void kv_radix_clear(kv_radix *r)
{
    drop_node(r, &r->root);
    r->root = (node){0};
}

void kv_radix_close(kv_radix *r)
{
    if (!r) return;
    kv_radix_clear(r);
    free(r);
}

static node *salt_root(kv_radix *r, uint64_t salt, bool make)
{
    for (node *c = r->root.child; c; c = c->next)
        if (c->salt == salt) return c;
    if (!make) return NULL;
    node *n = xcalloc(1, sizeof *n);
    n->salt = salt;
    n->parent = &r->root;
    n->next = r->root.child;
    r->root.child = n;
    return n;
}

/* Whole pages of node that equal ids (at most limit pages). */
static int common_pages(const kv_radix *r, const node *n, const int32_t *ids, int64_t limit)
{
    int k = 0;
    size_t bytes = sizeof *ids * (size_t)r->pt;
    while (k < n->n_pages && k < limit &&
           !memcmp(n->ids + (size_t)k * (size_t)r->pt, ids + (size_t)k * (size_t)r->pt, bytes))
        k++;
    return k;
}

static node *child_for(const kv_radix *r, const node *n, const int32_t *ids)
{
    for (node *c = n->child; c; c = c->next)
        if (!memcmp(c->ids, ids, sizeof *ids * (size_t)r->pt)) return c;
    return NULL;
}

int64_t kv_radix_match(kv_radix *r, uint64_t salt, const int32_t *ids, int64_t n,
                       int64_t max_tokens, int32_t *pages)
{
    int64_t left = (n < max_tokens ? n : max_tokens) / r->pt, done = 0;
    node *at = salt_root(r, salt, false);
    r->clock++;
    while (at && left > 0) {
        node *c = child_for(r, at, ids + done * r->pt);
        if (!c) break;
        int k = common_pages(r, c, ids + done * r->pt, left);
        c->used = r->clock;
        for (int i = 0; i < k; i++) {
            pages[done + i] = c->pages[i];
            kv_pool_ref(r->pool, c->pages[i]);
        }
        done += k;
        left -= k;
        if (k < c->n_pages) break;
        at = c;
    }
    return done * r->pt;
}

/* A node with copies of ids and pages; the tree takes its reference on each page. */
static node *make_node(kv_radix *r, node *parent, const int32_t *ids, const int32_t *pages, int n)
{
    node *x = xcalloc(1, sizeof *x);
    size_t tokens = (size_t)n * (size_t)r->pt;
    x->ids = xmalloc(sizeof *ids * tokens);
    x->pages = xmalloc(sizeof *pages * (size_t)n);
    memcpy(x->ids, ids, sizeof *ids * tokens);
    memcpy(x->pages, pages, sizeof *pages * (size_t)n);
    x->n_pages = n;
    x->used = r->clock;
    x->parent = parent;
    x->next = parent->child;
    parent->child = x;
    for (int i = 0; i < n; i++)
        kv__tree_ref(r->pool, pages[i]);
    r->n_pages += n;
    return x;
}

/* Cuts node after k pages: it keeps the first k, a new child gets the rest and the old children. */
static void split(kv_radix *r, node *n, int k)
{
    node *tail = xcalloc(1, sizeof *tail);
    size_t head = (size_t)k * (size_t)r->pt, rest = (size_t)(n->n_pages - k) * (size_t)r->pt;
    *tail = (node){.parent = n, .child = n->child, .used = n->used, .n_pages = n->n_pages - k};
    tail->ids = xmalloc(sizeof *n->ids * rest);
    tail->pages = xmalloc(sizeof *n->pages * (size_t)tail->n_pages);
    memcpy(tail->ids, n->ids + head, sizeof *n->ids * rest);
    memcpy(tail->pages, n->pages + k, sizeof *n->pages * (size_t)tail->n_pages);
    for (node *c = tail->child; c; c = c->next)
        c->parent = tail;
    n->child = tail;
    n->n_pages = k;
}

void kv_radix_insert(kv_radix *r, uint64_t salt, const int32_t *ids, int64_t n,
                     const int32_t *pages)
{
    int64_t left = n / r->pt, done = 0;
    if (!left) return;
    node *at = salt_root(r, salt, true);
    r->clock++;
    while (left > 0) {
        node *c = child_for(r, at, ids + done * r->pt);
        if (!c) {
            make_node(r, at, ids + done * r->pt, pages + done, (int)left);
            return;
        }
        int k = common_pages(r, c, ids + done * r->pt, left);
        c->used = r->clock;
        if (k < c->n_pages) split(r, c, k);
        done += k;
        left -= k;
        at = c;
    }
}

/* Least recently used leaf whose last page only the tree holds. */
static node *oldest_leaf(const kv_radix *r, node *n)
{
    if (!n->child) {
        if (!n->n_pages || kv__refs(r->pool, n->pages[n->n_pages - 1]) != 1) return NULL;
        return n;
    }
    node *best = NULL;
    for (node *c = n->child; c; c = c->next) {
        node *x = oldest_leaf(r, c);
        if (x && (!best || x->used < best->used)) best = x;
    }
    return best;
}

static void unlink_node(node *n)
{
    node **p = &n->parent->child;
    while (*p != n)
        p = &(*p)->next;
    *p = n->next;
}

int64_t kv_radix_evict(kv_radix *r, int64_t want)
{
    int64_t freed = 0;
    while (freed < want) {
        node *n = oldest_leaf(r, &r->root);
        if (!n) break;
        while (freed < want && n->n_pages && kv__refs(r->pool, n->pages[n->n_pages - 1]) == 1) {
            kv__tree_unref(r->pool, n->pages[--n->n_pages]);
            r->n_pages--;
            freed++;
        }
        while (n != &r->root && !n->n_pages &&
               !n->child) { /* and a salt's root that is left bare */
            node *up = n->parent;
            unlink_node(n);
            free(n->ids);
            free(n->pages);
            free(n);
            n = up;
        }
    }
    return freed;
}

int64_t kv_radix_pages(const kv_radix *r)
{
    return r->n_pages;
}

static int check_node(const kv_radix *r, const node *n, int depth, int64_t *pages, int64_t *alone,
                      err *e)
{
    *pages += n->n_pages;
    for (int i = 0; i < n->n_pages; i++)
        *alone += kv__refs(r->pool, n->pages[i]) == 1;
    for (int i = 0; i < n->n_pages; i++)
        if (kv__refs(r->pool, n->pages[i]) < 1)
            return err_set(e, ERR_BADSTATE, "radix tree: page %d is free but in the tree",
                           n->pages[i]);
    if (depth > 1 && !n->n_pages)
        return err_set(e, ERR_BADSTATE, "radix tree: an empty node at depth %d", depth);
    for (const node *c = n->child; c; c = c->next) {
        if (c->parent != n)
            return err_set(e, ERR_BADSTATE, "radix tree: a child does not know its parent");
        for (const node *d = c->next; depth > 0 && d; d = d->next)
            if (!memcmp(c->ids, d->ids, sizeof *c->ids * (size_t)r->pt))
                return err_set(e, ERR_BADSTATE,
                               "radix tree: two children begin with the same page");
        int rc = check_node(r, c, depth + 1, pages, alone, e);
        if (rc < 0) return rc;
    }
    return 0;
}

int kv_radix_check(const kv_radix *r, err *e)
{
    int64_t pages = 0, alone = 0;
    int rc = check_node(r, &r->root, 0, &pages, &alone, e);
    if (rc == 0 && pages != r->n_pages)
        rc = err_set(e, ERR_BADSTATE, "radix tree: %lld pages found, %lld counted",
                     (long long)pages, (long long)r->n_pages);
    if (rc == 0 && alone != kv_pool_cached_pages(r->pool))
        rc = err_set(e, ERR_BADSTATE, "radix tree: %lld pages are its alone, %lld counted",
                     (long long)alone, (long long)kv_pool_cached_pages(r->pool));
    return rc;
}
