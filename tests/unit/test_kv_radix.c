/* The radix tree against a naive model: a list of every position (page of a prefix) that was given
 * to it, found by comparing ids. Random sequences grow in chunks, share prefixes, give back what
 * their window has passed, are held, dropped and evicted; with full pages, window pages, and both.
 */
#include "check.h"
#include "kv/pool_internal.h"

enum { PT = 4, PAGES = 96, MAX_IDS = 40, MAX_POS = MAX_IDS / PT, HELD = 12 };

typedef struct kind {
    const char *name;
    int n_layers;
    kv_layer_shape layers[3];
    int64_t pages[KV_GROUPS];
} kind;
static const kind kinds[] = {
    {"full", 1, {{.Hk = 1, .D = 16}}, {PAGES}},
    {"window 6", 1, {{.Hk = 1, .D = 16, .window = 6}}, {0, 40}},
    {"full and windows 3, 9",
     3,
     {{.Hk = 1, .D = 16}, {.Hk = 1, .D = 16, .window = 9}, {.Hk = 1, .D = 16, .window = 3}},
     {PAGES, 44}},
    {"full and window 1", 2, {{.Hk = 1, .D = 16}, {.Hk = 1, .D = 8, .window = 1}}, {PAGES, 30}},
    {"window 1", 1, {{.Hk = 1, .D = 8, .window = 1}}, {0, 24}},
    {"full and a window that never passes",
     2,
     {{.Hk = 1, .D = 16}, {.Hk = 1, .D = 16, .window = 64}},
     {PAGES, PAGES}},
    {"scarce", 2, {{.Hk = 1, .D = 16}, {.Hk = 1, .D = 16, .window = 8}}, {20, 14}},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* A position of the tree, as the model believes it to be. Pages are -1 where there are none. */
typedef struct entry {
    uint64_t salt;
    int n; /* tokens of the prefix that ends with it */
    int32_t ids[MAX_IDS], page[KV_GROUPS];
} entry;

typedef struct world {
    const kind *k;
    kern_dev *dev;
    kv_pool *pool;
    kv_radix *tree;
    uint64_t rng;
    entry list[4096];
    int n_list;
    entry truth[KV_GROUPS][PAGES]; /* what each page was filled with */
    bool only_tree[PAGES];         /* full pages before an insert */
} world;

typedef struct held { /* a sequence */
    uint64_t salt;
    int n, computed, n_pos, gone;
    int32_t ids[MAX_IDS], full[MAX_POS], window[MAX_POS];
} held;

static uint32_t next(world *w, uint32_t below)
{
    w->rng = w->rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(w->rng >> 33) % below;
}

static bool has(const world *w, int g)
{
    return w->k->pages[g] > 0;
}

static world *world_open(const kind *k, uint64_t seed)
{
    err e = {0};
    world *w = calloc(1, sizeof *w);
    kv_pool_opts o = {
        .type = KV_BF16, .n_layers = k->n_layers, .layers = k->layers, .page_tokens = PT};
    memcpy(o.n_pages, k->pages, sizeof o.n_pages);
    w->rng = seed;
    w->k = k;
    CHECK_OK(kern_open(&w->dev, &(kern_opts){.threads = 1}, &e));
    CHECK_OK(kv_pool_open(&w->pool, w->dev, &o, &e));
    CHECK_OK(kv_radix_open(&w->tree, w->pool, &e));
    return w;
}

static void world_close(world *w)
{
    kv_radix_close(w->tree);
    for (int g = 0; g < KV_GROUPS; g++) /* no reference was lost or kept */
        assert_int_equal(kv_pool_free_pages(w->pool, g), w->k->pages[g]);
    kv_pool_close(w->pool);
    kern_close(w->dev);
    free(w);
}

/* ---- the model ----------------------------------------------------------------------------------
 */

static entry *find(world *w, uint64_t salt, const int32_t *ids, int n)
{
    for (int i = 0; i < w->n_list; i++)
        if (w->list[i].salt == salt && w->list[i].n == n &&
            !memcmp(w->list[i].ids, ids, sizeof *ids * (size_t)n))
            return &w->list[i];
    return NULL;
}

/* Does the tree know these ids, with or without pages for them? */
static bool path(world *w, uint64_t salt, const int32_t *ids, int n)
{
    for (int i = 0; i < w->n_list; i++)
        if (w->list[i].salt == salt && w->list[i].n >= n &&
            !memcmp(w->list[i].ids, ids, sizeof *ids * (size_t)n))
            return true;
    return false;
}

static int window_start(const world *w, int computed)
{
    int first = computed - kv_pool_window(w->pool) + 1;
    return first > 0 ? first / PT : 0;
}

static int model_match(world *w, uint64_t salt, const int32_t *ids, int max)
{
    for (int m = max / PT; m > 0; m--) {
        bool ok = path(w, salt, ids, m * PT);
        for (int i = window_start(w, m * PT); has(w, KV_WINDOW) && ok && i < m; i++) {
            const entry *x = find(w, salt, ids, (i + 1) * PT);
            ok = x && x->page[KV_WINDOW] >= 0;
        }
        if (ok) return m * PT;
    }
    return 0;
}

static void model_insert(world *w, const held *h, int n)
{
    const int32_t *pages[KV_GROUPS] = {h->full, h->window};
    for (int p = 0; p < n / PT; p++) {
        entry *x = find(w, h->salt, h->ids, (p + 1) * PT);
        bool any = false;
        for (int g = 0; g < KV_GROUPS; g++)
            any = any || (has(w, g) && pages[g][p] >= 0);
        if (!x && !any) continue;
        if (!x) {
            x = &w->list[w->n_list++];
            *x = (entry){.salt = h->salt, .n = (p + 1) * PT, .page = {-1, -1}};
            memcpy(x->ids, h->ids, sizeof(int32_t) * (size_t)x->n);
        }
        for (int g = 0; g < KV_GROUPS; g++)
            if (has(w, g) && x->page[g] < 0) x->page[g] = pages[g][p];
        /* A full page that nobody else holds gives way. */
        if (has(w, KV_FULL) && w->only_tree[x->page[KV_FULL]]) x->page[KV_FULL] = h->full[p];
    }
}

/* Takes what was evicted from the model; of full pages only ends of prefixes may go. */
static void model_evicted(world *w, int group, const uint8_t *was_free)
{
    for (int i = w->n_list - 1; i >= 0; i--) {
        entry *x = &w->list[i];
        for (int g = 0; g < KV_GROUPS; g++) {
            int32_t page = x->page[g];
            /* A position whose full page went has lost its window page too, held or not. */
            if (page < 0 || (g == group && (was_free[page] || kv__refs(w->pool, g, page))))
                continue;
            if (g == group) x->page[g] = -1;
        }
        if (group == KV_FULL && x->page[KV_FULL] < 0) x->page[KV_WINDOW] = -1;
        if (x->page[KV_FULL] < 0 && x->page[KV_WINDOW] < 0) *x = w->list[--w->n_list];
    }
    for (int i = 0; has(w, KV_FULL) && i < w->n_list; i++)
        for (int n = PT; n < w->list[i].n; n += PT)
            assert_non_null(find(w, w->list[i].salt, w->list[i].ids, n));
}

static int64_t model_alone(const world *w, int g)
{
    int64_t n = 0;
    for (int i = 0; i < w->n_list; i++)
        n += w->list[i].page[g] >= 0 && kv__refs(w->pool, g, w->list[i].page[g]) == 1;
    return n;
}

static int64_t model_pages(const world *w, int g)
{
    int64_t n = 0;
    for (int i = 0; i < w->n_list; i++)
        n += w->list[i].page[g] >= 0;
    return n;
}

static void check(world *w)
{
    err e = {0};
    CHECK_OK(kv_radix_check(w->tree, &e));
    for (int g = 0; g < KV_GROUPS; g++) {
        assert_int_equal(kv_radix_pages(w->tree, g), model_pages(w, g));
        assert_int_equal(kv_pool_cached_pages(w->pool, g), model_alone(w, g));
    }
}

/* ---- what is done to both -----------------------------------------------------------------------
 */

static int64_t evict(world *w, int g, int64_t n)
{
    uint8_t was_free[PAGES];
    int64_t can = kv_pool_cached_pages(w->pool, g), in_tree = kv_radix_pages(w->tree, g);
    for (int p = 0; p < w->k->pages[g]; p++)
        was_free[p] = kv__refs(w->pool, g, p) == 0;
    int64_t freed = kv_radix_evict(w->tree, g, n);
    assert_int_equal(kv_radix_pages(w->tree, g), in_tree - freed);
    if (g == KV_WINDOW)
        assert_int_equal(freed, can < n ? can : n); /* whatever nobody else holds can go */
    else
        assert_true(freed >= 0 && freed <= n);
    model_evicted(w, g, was_free);
    check(w);
    return freed;
}

static void drop(world *w, held *h)
{
    for (int p = 0; p < h->n_pos; p++) {
        if (has(w, KV_FULL)) kv_pool_unref(w->pool, KV_FULL, h->full[p]);
        if (has(w, KV_WINDOW) && h->window[p] >= 0) kv_pool_unref(w->pool, KV_WINDOW, h->window[p]);
    }
    *h = (held){0};
}

static void give_to_tree(world *w, held *h)
{
    int32_t *pages[KV_GROUPS] = {h->full, h->window};
    for (int p = 0; p < w->k->pages[KV_FULL]; p++)
        w->only_tree[p] = kv__refs(w->pool, KV_FULL, p) == 1;
    for (int p = 0; has(w, KV_FULL) && p < h->n_pos; p++)
        w->only_tree[h->full[p]] = false;
    kv_radix_insert(w->tree, h->salt, h->ids, h->computed, pages);
    model_insert(w, h, h->computed);
    check(w);
}

static void assert_holds(const world *w, int g, int page, const held *h, int n)
{
    const entry *t = &w->truth[g][page];
    assert_true(kv__refs(w->pool, g, page) > 0);
    assert_int_equal(t->salt, h->salt);
    assert_int_equal(t->n, n);
    assert_memory_equal(t->ids, h->ids, sizeof(int32_t) * (size_t)n);
}

/* Every page that the sequence can see holds exactly its prefix. */
static void assert_sound(const world *w, const held *h)
{
    for (int p = 0; p < h->computed / PT; p++) {
        if (has(w, KV_FULL)) assert_holds(w, KV_FULL, h->full[p], h, (p + 1) * PT);
        if (!has(w, KV_WINDOW)) continue;
        assert_int_equal(h->window[p] < 0, p < h->gone);
        if (p >= h->gone) assert_holds(w, KV_WINDOW, h->window[p], h, (p + 1) * PT);
    }
    assert_true(h->gone <= window_start(w, h->computed));
}

/* Pages for `tokens` tokens in both groups; false: too much is held. */
static bool grow(world *w, held *h, int tokens)
{
    err e = {0};
    int32_t *pages[KV_GROUPS] = {h->full, h->window};
    int need = (tokens + PT - 1) / PT - h->n_pos;
    if (need <= 0) return true;
    for (int g = 0; g < KV_GROUPS; g++) {
        int64_t lack = need - kv_pool_free_pages(w->pool, g);
        if (has(w, g) && lack > 0 && evict(w, g, lack) < lack) return false;
    }
    for (int g = 0; g < KV_GROUPS; g++)
        if (has(w, g)) CHECK_OK(kv_pool_alloc(w->pool, g, pages[g] + h->n_pos, need, &e));
    h->n_pos += need;
    return true;
}

static void fill(world *w, const held *h, int from, int to)
{
    const int32_t *pages[KV_GROUPS] = {h->full, h->window};
    for (int t = from; t < to; t++)
        for (int g = 0; g < KV_GROUPS; g++) {
            if (!has(w, g)) continue;
            entry *x = &w->truth[g][pages[g][t / PT]];
            x->salt = h->salt;
            x->n = t + 1;
            memcpy(x->ids, h->ids, sizeof(int32_t) * (size_t)(t + 1));
        }
}

static void give_back(world *w, held *h)
{
    int to = window_start(w, h->computed);
    if (!has(w, KV_WINDOW) || to <= h->gone) return;
    if (next(w, 4)) give_to_tree(w, h); /* else they are lost, as without a prefix cache */
    for (; h->gone < to; h->gone++) {
        kv_pool_unref(w->pool, KV_WINDOW, h->window[h->gone]);
        h->window[h->gone] = -1;
    }
}

/* As a request does: match, compute the rest in chunks, give pages back, leave all to the tree. */
static void play(world *w, held *h)
{
    int32_t *pages[KV_GROUPS] = {h->full, h->window};
    h->salt = next(w, 2);
    h->n = 1 + (int)next(w, MAX_IDS);
    for (int i = 0; i < h->n; i++)
        h->ids[i] = (int32_t)next(w, i < 12 ? 2 : 3); /* few values: many shared prefixes */
    int want = model_match(w, h->salt, h->ids, h->n - 1);
    h->computed = (int)kv_radix_match(w->tree, h->salt, h->ids, h->n, h->n - 1, pages);
    assert_int_equal(h->computed, want);
    h->n_pos = h->computed / PT;
    h->gone = has(w, KV_WINDOW) ? window_start(w, h->computed) : 0;
    assert_sound(w, h);
    while (h->computed < h->n) {
        int chunk = 1 + (int)next(w, 12),
            to = h->n - h->computed < chunk ? h->n : h->computed + chunk;
        if (!grow(w, h, to)) break; /* stays with what it has */
        fill(w, h, h->computed, to);
        h->computed = to;
        give_back(w, h);
        assert_sound(w, h);
    }
    give_to_tree(w, h);
}

static void stress(void **state)
{
    (void)state;
    for (int k = 0; k < KINDS; k++) {
        int64_t cached = 0, asked = 0;
        for (uint64_t seed = 1; seed <= 6; seed++) {
            held h[HELD] = {0};
            world *w = world_open(&kinds[k], seed);
            for (int step = 0; step < 1500; step++) {
                held *x = &h[next(w, HELD)];
                if (x->n) {
                    drop(w, x);
                } else {
                    play(w, x);
                    asked += x->n;
                    cached += model_match(w, x->salt, x->ids, x->n);
                }
                if (next(w, 30) == 0)
                    for (int g = 0; g < KV_GROUPS; g++)
                        if (has(w, g)) evict(w, g, 1 + next(w, 10));
                check(w);
            }
            for (int i = 0; i < HELD; i++)
                drop(w, &h[i]);
            for (int g = 0; g < KV_GROUPS; g++) {
                int64_t in_tree = kv_radix_pages(w->tree, g);
                assert_int_equal(kv_pool_free_pages(w->pool, g) + in_tree, w->k->pages[g]);
                if (!has(w, g)) continue;
                assert_int_equal(evict(w, g, PAGES), in_tree); /* nobody holds them: all go */
                assert_int_equal(kv_pool_free_pages(w->pool, g), w->k->pages[g]);
            }
            assert_int_equal(w->n_list, 0);
            world_close(w);
        }
        print_message("%-36s %.2f of the tokens could be matched again\n", kinds[k].name,
                      (double)cached / (double)asked);
    }
}

/* ---- by hand ------------------------------------------------------------------------------------
 */

/* Fresh pages for ids, given to the tree, then released by their maker. `gone`: window pages that
 * it had already given back. */
static void plant(world *w, uint64_t salt, const int32_t *ids, int n, int gone)
{
    held h = {.salt = salt, .n = n, .computed = n};
    int32_t *pages[KV_GROUPS] = {h.full, h.window};
    memcpy(h.ids, ids, sizeof *ids * (size_t)n);
    assert_true(grow(w, &h, n / PT * PT));
    for (int p = 0; has(w, KV_WINDOW) && p < gone; p++) {
        kv_pool_unref(w->pool, KV_WINDOW, h.window[p]);
        h.window[p] = -1;
    }
    kv_radix_insert(w->tree, salt, ids, n, pages);
    drop(w, &h);
}

static int64_t hit(world *w, uint64_t salt, const int32_t *ids, int n)
{
    held h = {0};
    int32_t *pages[KV_GROUPS] = {h.full, h.window};
    int64_t got = kv_radix_match(w->tree, salt, ids, n, n, pages);
    h.n_pos = (int)(got / PT);
    drop(w, &h);
    return got;
}

static void least_recent_goes_first(void **state)
{
    (void)state;
    int32_t a[] = {1, 1, 1, 1, 2, 2, 2, 2}, b[] = {1, 1, 1, 1, 3, 3, 3, 3}, c[] = {9, 9, 9, 9};
    world *w = world_open(&kinds[0], 1);
    plant(w, 0, a, 8, 0);
    plant(w, 0, b, 8, 0);
    plant(w, 0, c, 4, 0);
    assert_int_equal(kv_radix_pages(w->tree, 0), 4); /* the first page of a and b is one page */
    assert_int_equal(kv_pool_free_pages(w->pool, 0), PAGES - 4);
    hit(w, 0, a, 8);
    hit(w, 0, c, 4);
    assert_int_equal(kv_radix_evict(w->tree, 0, 1), 1);
    assert_int_equal(hit(w, 0, b, 8), 4); /* b lost its own page, not the shared one */
    assert_int_equal(hit(w, 0, a, 8), 8);
    assert_int_equal(hit(w, 0, c, 4), 4);
    world_close(w);
}

static void held_pages_stay(void **state)
{
    (void)state;
    int32_t a[] = {1, 1, 1, 1, 2, 2, 2, 2}, page[2], *pages[KV_GROUPS] = {page, NULL};
    world *w = world_open(&kinds[0], 1);
    plant(w, 0, a, 8, 0);
    assert_int_equal(kv_radix_match(w->tree, 0, a, 8, 8, pages), 8);
    assert_int_equal(kv_radix_evict(w->tree, 0, 10), 0);
    kv_pool_unref(w->pool, 0, page[1]);
    assert_int_equal(kv_radix_evict(w->tree, 0, 10), 1);
    assert_int_equal(hit(w, 0, a, 8), 4);
    kv_pool_unref(w->pool, 0, page[0]);
    world_close(w);
}

static void salts_and_limits(void **state)
{
    (void)state;
    err e = {0};
    int32_t a[] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, page[PAGES + 1], *pages[KV_GROUPS] = {page, NULL};
    world *w = world_open(&kinds[0], 1);
    plant(w, 7, a, 9, 0);
    assert_int_equal(hit(w, 0, a, 9), 0); /* another salt shares nothing */
    assert_int_equal(hit(w, 7, a, 9), 8); /* whole pages only */
    assert_int_equal(kv_radix_match(w->tree, 7, a, 9, 7, pages), 4);
    kv_pool_unref(w->pool, 0, page[0]);
    CHECK_ERR(kv_pool_alloc(w->pool, 0, page, PAGES, &e), ERR_BUSY, "free");
    assert_int_equal(kv_pool_free_pages(w->pool, 0), PAGES - 2); /* none was taken */
    kv_radix_clear(w->tree);
    CHECK_OK(kv_pool_alloc(w->pool, 0, page, PAGES, &e));
    for (int i = 0; i < PAGES; i++)
        kv_pool_unref(w->pool, 0, page[i]);
    world_close(w);
}

/* Full pages of the whole, window pages of the end: what can be restored, and what eviction leaves.
 */
static void windows_by_hand(void **state)
{
    (void)state;
    int32_t a[20];
    for (int i = 0; i < 20; i++)
        a[i] = i;
    world *w = world_open(&kinds[2], 1); /* the larger window is 9: two or three pages of 4 */
    plant(w, 0, a, 20, 3);
    assert_int_equal(kv_radix_pages(w->tree, KV_FULL), 5);
    assert_int_equal(kv_radix_pages(w->tree, KV_WINDOW), 2);
    assert_int_equal(hit(w, 0, a, 20), 20);
    assert_int_equal(hit(w, 0, a, 19),
                     0);   /* position 16 would see tokens 8 to 11, which are gone */
    plant(w, 0, a, 12, 0); /* a shorter one brings them back */
    assert_int_equal(kv_radix_pages(w->tree, KV_FULL), 5);
    assert_int_equal(kv_radix_pages(w->tree, KV_WINDOW), 5);
    assert_int_equal(hit(w, 0, a, 19), 16);
    assert_int_equal(hit(w, 0, a, 7), 4);
    assert_int_equal(hit(w, 0, a, 20), 20);
    assert_int_equal(kv_radix_evict(w->tree, KV_WINDOW, 2), 2); /* from the beginning */
    assert_int_equal(hit(w, 0, a, 15), 0);
    assert_int_equal(hit(w, 0, a, 20), 20);
    assert_int_equal(kv_radix_evict(w->tree, KV_FULL, 1), 1); /* takes the window page along */
    assert_int_equal(kv_radix_pages(w->tree, KV_WINDOW), 2);
    assert_int_equal(hit(w, 0, a, 20), 16);
    world_close(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stress),          cmocka_unit_test(least_recent_goes_first),
        cmocka_unit_test(held_pages_stay), cmocka_unit_test(salts_and_limits),
        cmocka_unit_test(windows_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
