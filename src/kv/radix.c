/* Shared prefixes. A tree whose edges hold whole pages: a node owns k positions (pages of the
 * sequence) and the k * page_tokens ids that they hold; children of a node differ in their first
 * position. The root of each salt is a child of the one true root.
 *
 * A position has a page of each group that the model has. Full pages are always there. A window
 * page may be gone (-1): it was given back before the position came to the tree, or evicted. So a
 * prefix of m positions can be restored when the window pages that its next token sees are there,
 * whatever lies before them. The last position of a leaf holds at least one page.
 *
 * The tree keeps one reference on each of its pages; those that only the tree holds (count 1) may
 * be evicted, from the least recently used nodes. */
#include "kv/pool_internal.h"
#include <stdlib.h>
#include <string.h>

typedef struct node {
    struct node *parent, *child, *next; /* child list is unordered */
    uint64_t salt;                      /* of a salt root; else 0 */
    uint64_t used;                      /* clock of the last match or insert */
    int32_t *ids;
    int32_t *pages[KV_GROUPS]; /* [n_pos]; NULL for a group that the model lacks */
    int n_pos, n_held[KV_GROUPS];
} node;

struct kv_radix {
    kv_pool *pool;
    node root;
    uint64_t clock;
    int64_t n_pages[KV_GROUPS];
    bool has[KV_GROUPS];
    int pt; /* tokens in a page */
};

int kv_radix_open(kv_radix **out, kv_pool *p, err *e)
{
    (void)e;
    kv_radix *r = xcalloc(1, sizeof *r);
    r->pool = p;
    r->pt = kv_pool_page_tokens(p);
    for (int g = 0; g < KV_GROUPS; g++)
        r->has[g] = kv_pool_total(p, g) > 0;
    *out = r;
    return 0;
}

static void take_page(kv_radix *r, node *n, int g, int at, int32_t page)
{
    n->pages[g][at] = page;
    if (page < 0) return;
    kv__tree_ref(r->pool, g, page);
    n->n_held[g]++;
    r->n_pages[g]++;
}

static void give_page(kv_radix *r, node *n, int g, int at)
{
    if (!r->has[g] || n->pages[g][at] < 0) return;
    kv__tree_unref(r->pool, g, n->pages[g][at]);
    n->pages[g][at] = -1;
    n->n_held[g]--;
    r->n_pages[g]--;
}

static void free_node(node *n)
{
    free(n->ids);
    for (int g = 0; g < KV_GROUPS; g++)
        free(n->pages[g]);
    free(n);
}

static void drop_children(kv_radix *r, node *n)
{
    for (node *c = n->child; c;) {
        node *next = c->next;
        drop_children(r, c);
        for (int i = 0; i < c->n_pos; i++)
            for (int g = 0; g < KV_GROUPS; g++)
                give_page(r, c, g, i);
        free_node(c);
        c = next;
    }
    n->child = NULL;
}

void kv_radix_clear(kv_radix *r)
{
    drop_children(r, &r->root);
}

void kv_radix_close(kv_radix *r)
{
    if (!r) return;
    kv_radix_clear(r);
    free(r);
}

static node *new_child(node *parent, uint64_t used)
{
    node *x = xcalloc(1, sizeof *x);
    *x = (node){.parent = parent, .next = parent->child, .used = used};
    parent->child = x;
    return x;
}

static node *salt_root(kv_radix *r, uint64_t salt, bool make)
{
    for (node *c = r->root.child; c; c = c->next)
        if (c->salt == salt) return c;
    if (!make) return NULL;
    node *n = new_child(&r->root, 0);
    n->salt = salt;
    return n;
}

/* Whole positions of node that equal ids (at most limit). */
static int common(const kv_radix *r, const node *n, const int32_t *ids, int64_t limit)
{
    int k = 0;
    size_t bytes = sizeof *ids * (size_t)r->pt;
    while (k < n->n_pos && k < limit &&
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

/* Where a prefix of m positions begins to need window pages. */
static int64_t window_start(const kv_radix *r, int64_t m)
{
    return r->has[KV_WINDOW] ? kv_window_start(kv_pool_window(r->pool), r->pt, m * r->pt) : m;
}

/* Longest of the first n positions that can be restored. */
static int64_t restorable(const kv_radix *r, const int32_t *window, int64_t n)
{
    if (!r->has[KV_WINDOW]) return n;
    int64_t best = 0, run = 0; /* window pages [run, i] are all there */
    for (int64_t i = 0; i < n; i++) {
        if (window[i] < 0) run = i + 1;
        if (run <= window_start(r, i + 1)) best = i + 1;
    }
    return best;
}

int64_t kv_radix_match(kv_radix *r, uint64_t salt, const int32_t *ids, int64_t n,
                       int64_t max_tokens, int32_t *const pages[KV_GROUPS])
{
    int64_t left = (n < max_tokens ? n : max_tokens) / r->pt, done = 0;
    node *at = salt_root(r, salt, false);
    r->clock++;
    while (at && left > 0) {
        node *c = child_for(r, at, ids + done * r->pt);
        if (!c) break;
        int k = common(r, c, ids + done * r->pt, left);
        c->used = r->clock;
        for (int g = 0; g < KV_GROUPS; g++)
            if (r->has[g]) memcpy(pages[g] + done, c->pages[g], sizeof(int32_t) * (size_t)k);
        done += k;
        left -= k;
        if (k < c->n_pos) break;
        at = c;
    }
    int64_t m = restorable(r, pages[KV_WINDOW], done), first = window_start(r, m);
    for (int64_t i = 0; i < m; i++) {
        if (r->has[KV_FULL]) kv_pool_ref(r->pool, KV_FULL, pages[KV_FULL][i]);
        if (!r->has[KV_WINDOW]) continue;
        if (i < first)
            pages[KV_WINDOW][i] = -1;
        else
            kv_pool_ref(r->pool, KV_WINDOW, pages[KV_WINDOW][i]);
    }
    return m * r->pt;
}

/* ---- growing ------------------------------------------------------------------------------------
 */

static void resize(const kv_radix *r, node *n, int n_pos)
{
    n->ids = xrealloc(n->ids, sizeof *n->ids * (size_t)n_pos * (size_t)r->pt);
    for (int g = 0; g < KV_GROUPS; g++)
        if (r->has[g]) n->pages[g] = xrealloc(n->pages[g], sizeof(int32_t) * (size_t)n_pos);
    n->n_pos = n_pos;
}

/* Positions [from, from + n) of a sequence behind a node: a leaf grows, others get one more child.
 */
static void append(kv_radix *r, node *at, const int32_t *ids, int32_t *const pages[KV_GROUPS],
                   int64_t from, int n)
{
    if (at->child || !at->n_pos) at = new_child(at, r->clock);
    int first = at->n_pos;
    resize(r, at, first + n);
    memcpy(at->ids + (size_t)first * (size_t)r->pt, ids + from * r->pt,
           sizeof *ids * (size_t)n * (size_t)r->pt);
    for (int g = 0; g < KV_GROUPS; g++)
        for (int i = 0; r->has[g] && i < n; i++)
            take_page(r, at, g, first + i, pages[g][from + i]);
}

/* Cuts node after k positions: it keeps the first k, a new child gets the rest and the old
 * children.
 */
static void split(const kv_radix *r, node *n, int k)
{
    node *old = n->child, *tail;
    size_t head = (size_t)k * (size_t)r->pt, rest = (size_t)(n->n_pos - k) * (size_t)r->pt;
    n->child = NULL;
    tail = new_child(n, n->used);
    tail->child = old;
    for (node *c = old; c; c = c->next)
        c->parent = tail;
    resize(r, tail, n->n_pos - k);
    memcpy(tail->ids, n->ids + head, sizeof *n->ids * rest);
    for (int g = 0; g < KV_GROUPS; g++) {
        for (int i = k; r->has[g] && i < n->n_pos; i++) {
            tail->pages[g][i - k] = n->pages[g][i];
            tail->n_held[g] += n->pages[g][i] >= 0;
        }
        n->n_held[g] -= tail->n_held[g];
    }
    n->n_pos = k;
}

/* Positions up to the last one that holds a page. */
static int64_t held_positions(const kv_radix *r, int64_t n, int32_t *const pages[KV_GROUPS])
{
    while (n > 0 && !(r->has[KV_FULL] && pages[KV_FULL][n - 1] >= 0) &&
           !(r->has[KV_WINDOW] && pages[KV_WINDOW][n - 1] >= 0))
        n--;
    return n;
}

static bool alone(const kv_radix *r, const node *n, int g, int at)
{
    return n->pages[g][at] >= 0 && kv__refs(r->pool, g, n->pages[g][at]) == 1;
}

/* The first k positions of a node, met again by a sequence: its window pages fill what the tree had
 * lost; its full pages take the place of those that nobody else holds. So a sequence holds every
 * page of the tree above its own last one, or someone else does, and eviction from the ends of
 * leaves is never stopped by a page above which only the tree holds others. */
static void renew(kv_radix *r, node *n, int32_t *const pages[KV_GROUPS], int64_t from, int k)
{
    for (int i = 0; r->has[KV_WINDOW] && i < k; i++)
        if (n->pages[KV_WINDOW][i] < 0) take_page(r, n, KV_WINDOW, i, pages[KV_WINDOW][from + i]);
    for (int i = 0; r->has[KV_FULL] && i < k; i++)
        if (alone(r, n, KV_FULL, i)) {
            give_page(r, n, KV_FULL, i);
            take_page(r, n, KV_FULL, i, pages[KV_FULL][from + i]);
        }
}

void kv_radix_insert(kv_radix *r, uint64_t salt, const int32_t *ids, int64_t n,
                     int32_t *const pages[KV_GROUPS])
{
    int64_t left = held_positions(r, n / r->pt, pages), done = 0;
    if (!left) return;
    node *at = salt_root(r, salt, true);
    r->clock++;
    while (left > 0) {
        node *c = child_for(r, at, ids + done * r->pt);
        if (!c) {
            append(r, at, ids, pages, done, (int)left);
            return;
        }
        int k = common(r, c, ids + done * r->pt, left);
        c->used = r->clock;
        renew(r, c, pages, done, k);
        if (k < c->n_pos) split(r, c, k);
        done += k;
        left -= k;
        at = c;
    }
}

/* ---- eviction -----------------------------------------------------------------------------------
 */

/* Can this node give a page of the group? */
static bool can_give(const kv_radix *r, const node *n, int g)
{
    if (g == KV_FULL) return !n->child && n->n_pos && alone(r, n, g, n->n_pos - 1);
    for (int i = 0; n->n_held[g] && i < n->n_pos; i++)
        if (alone(r, n, g, i)) return true;
    return false;
}

/* Least recently used node that can; of equals the one nearest to the root. */
static node *oldest(const kv_radix *r, node *n, int g)
{
    node *best = can_give(r, n, g) ? n : NULL;
    for (node *c = n->child; c; c = c->next) {
        node *x = oldest(r, c, g);
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

/* Positions at the end of a leaf that hold nothing go; so does a node without positions, and a
 * salt's root that is left bare. */
static void prune(kv_radix *r, node *n)
{
    while (n != &r->root && !n->child) {
        n->n_pos = (int)held_positions(r, n->n_pos, n->pages);
        if (n->n_pos) return;
        node *up = n->parent;
        unlink_node(n);
        free_node(n);
        n = up;
    }
}

int64_t kv_radix_evict(kv_radix *r, int group, int64_t want)
{
    int64_t before = r->n_pages[group];
    while (before - r->n_pages[group] < want) {
        node *n = oldest(r, &r->root, group);
        if (!n) break;
        int64_t left = want - (before - r->n_pages[group]);
        if (group == KV_FULL) {
            for (int i = n->n_pos - 1; i >= 0 && left > 0 && alone(r, n, group, i); i--, left--) {
                give_page(r, n, KV_FULL, i);
                give_page(r, n, KV_WINDOW, i);
            }
        } else {
            for (int i = 0; i < n->n_pos && left > 0; i++)
                if (alone(r, n, group, i)) {
                    give_page(r, n, group, i);
                    left--;
                }
        }
        prune(r, n);
    }
    return before - r->n_pages[group];
}

int64_t kv_radix_pages(const kv_radix *r, int group)
{
    return r->n_pages[group];
}

/* ---- invariants ---------------------------------------------------------------------------------
 */

typedef struct tally {
    int64_t pages[KV_GROUPS], alone[KV_GROUPS];
} tally;

static int check_pages(const kv_radix *r, const node *n, tally *t, err *e)
{
    for (int g = 0; g < KV_GROUPS; g++) {
        int held = 0;
        for (int i = 0; r->has[g] && i < n->n_pos; i++) {
            int32_t page = n->pages[g][i];
            if (page < 0 && g == KV_FULL)
                return err_set(e, ERR_BADSTATE, "radix tree: a position without its full page");
            if (page < 0) continue;
            held++;
            if (kv__refs(r->pool, g, page) < 1)
                return err_set(e, ERR_BADSTATE, "radix tree: page %d is free but in the tree",
                               page);
            t->alone[g] += kv__refs(r->pool, g, page) == 1;
        }
        if (held != n->n_held[g])
            return err_set(e, ERR_BADSTATE, "radix tree: a node holds %d pages, %d counted", held,
                           n->n_held[g]);
        t->pages[g] += held;
    }
    return 0;
}

static int check_node(const kv_radix *r, const node *n, int depth, tally *t, err *e)
{
    int rc = check_pages(r, n, t, e);
    if (rc < 0) return rc;
    if (depth > 1 && !n->n_pos)
        return err_set(e, ERR_BADSTATE, "radix tree: an empty node at depth %d", depth);
    if (depth > 0 && !n->child && held_positions(r, n->n_pos, n->pages) != n->n_pos)
        return err_set(e, ERR_BADSTATE, "radix tree: a leaf ends in positions without pages");
    for (const node *c = n->child; c; c = c->next) {
        if (c->parent != n)
            return err_set(e, ERR_BADSTATE, "radix tree: a child does not know its parent");
        for (const node *d = c->next; depth > 0 && d; d = d->next)
            if (!memcmp(c->ids, d->ids, sizeof *c->ids * (size_t)r->pt))
                return err_set(e, ERR_BADSTATE,
                               "radix tree: two children begin with the same page");
        if ((rc = check_node(r, c, depth + 1, t, e)) < 0) return rc;
    }
    return 0;
}

int kv_radix_check(const kv_radix *r, err *e)
{
    tally t = {0};
    int rc = check_node(r, &r->root, 0, &t, e);
    for (int g = 0; g < KV_GROUPS && rc == 0; g++) {
        if (t.pages[g] != r->n_pages[g])
            rc = err_set(e, ERR_BADSTATE, "radix tree: %lld pages found, %lld counted",
                         (long long)t.pages[g], (long long)r->n_pages[g]);
        if (rc == 0 && t.alone[g] != kv_pool_cached_pages(r->pool, g))
            rc = err_set(e, ERR_BADSTATE, "radix tree: %lld pages are its alone, %lld counted",
                         (long long)t.alone[g], (long long)kv_pool_cached_pages(r->pool, g));
    }
    return rc;
}
