/* The radix tree against a naive model: a list of every page-aligned prefix that was ever given to
 * it, whose pages are found by comparing ids. Random inserts, matches, evictions, holds. */
#include "check.h"
#include "kv/kv.h"

enum { PT = 4, PAGES = 96, MAX_IDS = 40, HELD = 12 };

typedef struct world {
    kern_dev *dev;
    kv_pool *pool;
    kv_radix *tree;
    uint64_t rng;
} world;

static uint32_t next(world *w, uint32_t below)
{
    w->rng = w->rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(w->rng >> 33) % below;
}

static void world_open(world *w, uint64_t seed)
{
    err e = {0};
    static const kv_layer_shape shape = {.Hk = 1, .D = 16};
    *w = (world){.rng = seed};
    CHECK_OK(kern_open(&w->dev, &(kern_opts){.threads = 1}, &e));
    CHECK_OK(kv_pool_open(
        &w->pool, w->dev,
        &(kv_pool_opts){
            .type = KV_BF16, .n_layers = 1, .layers = &shape, .page_tokens = PT, .n_pages = PAGES},
        &e));
    CHECK_OK(kv_radix_open(&w->tree, w->pool, &e));
}

static void world_close(world *w)
{
    kv_radix_close(w->tree);
    assert_int_equal(kv_pool_free_pages(w->pool), PAGES); /* no reference was lost or kept */
    kv_pool_close(w->pool);
    kern_close(w->dev);
}

/* What the page was filled with, kept outside the tree: the truth about it. */
static struct {
    uint64_t salt;
    int n;
    int32_t ids[MAX_IDS];
} truth[PAGES];

typedef struct held {
    uint64_t salt;
    int n, n_pages;
    int32_t ids[MAX_IDS], pages[MAX_IDS / PT];
} held;

/* As a request does: match, compute the rest into fresh pages, give the whole pages to the tree. */
static void play(world *w, held *h)
{
    err e = {0};
    h->salt = next(w, 2);
    h->n = 1 + (int)next(w, MAX_IDS);
    for (int i = 0; i < h->n; i++)
        h->ids[i] = (int32_t)next(w, i < 12 ? 2 : 3); /* few values: many shared prefixes */
    int64_t hit = kv_radix_match(w->tree, h->salt, h->ids, h->n, h->n - 1, h->pages);
    assert_int_equal(hit % PT, 0);
    assert_true(hit < h->n);
    for (int p = 0; p < hit / PT; p++) { /* each page holds exactly this prefix */
        int page = h->pages[p];
        assert_int_equal(truth[page].salt, h->salt);
        assert_int_equal(truth[page].n, (p + 1) * PT);
        assert_memory_equal(truth[page].ids, h->ids, sizeof(int32_t) * (size_t)((p + 1) * PT));
    }
    int need = (h->n + PT - 1) / PT - (int)(hit / PT);
    h->n_pages = (int)(hit / PT);
    if (kv_pool_free_pages(w->pool) < need)
        kv_radix_evict(w->tree, need - kv_pool_free_pages(w->pool));
    if (kv_pool_alloc(w->pool, h->pages + h->n_pages, need, &e) < 0) return; /* all is held */
    for (int p = h->n_pages; p < h->n_pages + need; p++) {
        int page = h->pages[p], n = (p + 1) * PT < h->n ? (p + 1) * PT : h->n;
        truth[page].salt = h->salt;
        truth[page].n = n;
        memcpy(truth[page].ids, h->ids, sizeof(int32_t) * (size_t)n);
    }
    h->n_pages += need;
    kv_radix_insert(w->tree, h->salt, h->ids, h->n, h->pages);
    /* Now the whole of it is in the tree. */
    int32_t again[MAX_IDS / PT];
    int64_t now = kv_radix_match(w->tree, h->salt, h->ids, h->n, h->n, again);
    assert_int_equal(now, h->n / PT * PT);
    for (int p = 0; p < now / PT; p++)
        kv_pool_unref(w->pool, again[p]);
}

static void drop(world *w, held *h)
{
    for (int p = 0; p < h->n_pages; p++)
        kv_pool_unref(w->pool, h->pages[p]);
    h->n_pages = 0;
}

static void stress(void **state)
{
    (void)state;
    err e = {0};
    for (uint64_t seed = 1; seed <= 20; seed++) {
        world w;
        held h[HELD] = {0};
        world_open(&w, seed);
        for (int step = 0; step < 2000; step++) {
            held *x = &h[next(&w, HELD)];
            if (x->n_pages)
                drop(&w, x);
            else
                play(&w, x);
            if (next(&w, 50) == 0) {
                int64_t before = kv_radix_pages(w.tree), n = 1 + next(&w, 20),
                        freed = kv_radix_evict(w.tree, n);
                assert_true(freed >= 0 && freed <= n);
                assert_int_equal(kv_radix_pages(w.tree), before - freed);
            }
            CHECK_OK(kv_radix_check(w.tree, &e));
        }
        for (int i = 0; i < HELD; i++)
            drop(&w, &h[i]);
        assert_int_equal(kv_pool_free_pages(w.pool) + kv_radix_pages(w.tree), PAGES);
        int64_t in_tree = kv_radix_pages(w.tree);
        assert_int_equal(kv_radix_evict(w.tree, PAGES), in_tree); /* nobody holds them: all go */
        assert_int_equal(kv_pool_free_pages(w.pool), PAGES);
        world_close(&w);
    }
}

/* Fresh pages for ids, given to the tree, then released by their maker. */
static void plant(world *w, uint64_t salt, const int32_t *ids, int n)
{
    err e = {0};
    int32_t pages[MAX_IDS / PT];
    int need = n / PT;
    CHECK_OK(kv_pool_alloc(w->pool, pages, need, &e));
    kv_radix_insert(w->tree, salt, ids, n, pages);
    for (int i = 0; i < need; i++)
        kv_pool_unref(w->pool, pages[i]);
}

static int64_t hit(world *w, uint64_t salt, const int32_t *ids, int n)
{
    int32_t pages[MAX_IDS / PT];
    int64_t got = kv_radix_match(w->tree, salt, ids, n, n, pages);
    for (int i = 0; i < got / PT; i++)
        kv_pool_unref(w->pool, pages[i]);
    return got;
}

static void least_recent_goes_first(void **state)
{
    (void)state;
    world w;
    int32_t a[] = {1, 1, 1, 1, 2, 2, 2, 2}, b[] = {1, 1, 1, 1, 3, 3, 3, 3}, c[] = {9, 9, 9, 9};
    world_open(&w, 1);
    plant(&w, 0, a, 8);
    plant(&w, 0, b, 8);
    plant(&w, 0, c, 4);
    assert_int_equal(kv_radix_pages(w.tree), 4); /* the first page of a and b is one page */
    assert_int_equal(kv_pool_free_pages(w.pool), PAGES - 4);
    hit(&w, 0, a, 8);
    hit(&w, 0, c, 4);
    assert_int_equal(kv_radix_evict(w.tree, 1), 1);
    assert_int_equal(hit(&w, 0, b, 8), 4); /* b lost its own page, not the shared one */
    assert_int_equal(hit(&w, 0, a, 8), 8);
    assert_int_equal(hit(&w, 0, c, 4), 4);
    world_close(&w);
}

static void held_pages_stay(void **state)
{
    (void)state;
    world w;
    int32_t a[] = {1, 1, 1, 1, 2, 2, 2, 2}, pages[2];
    world_open(&w, 1);
    plant(&w, 0, a, 8);
    assert_int_equal(kv_radix_match(w.tree, 0, a, 8, 8, pages), 8);
    assert_int_equal(kv_radix_evict(w.tree, 10), 0);
    kv_pool_unref(w.pool, pages[1]);
    assert_int_equal(kv_radix_evict(w.tree, 10), 1);
    assert_int_equal(hit(&w, 0, a, 8), 4);
    kv_pool_unref(w.pool, pages[0]);
    world_close(&w);
}

static void salts_and_limits(void **state)
{
    (void)state;
    err e = {0};
    world w;
    int32_t a[] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, pages[PAGES + 1];
    world_open(&w, 1);
    plant(&w, 7, a, 9);
    assert_int_equal(hit(&w, 0, a, 9), 0); /* another salt shares nothing */
    assert_int_equal(hit(&w, 7, a, 9), 8); /* whole pages only */
    assert_int_equal(kv_radix_match(w.tree, 7, a, 9, 7, pages), 4);
    kv_pool_unref(w.pool, pages[0]);
    CHECK_ERR(kv_pool_alloc(w.pool, pages, PAGES, &e), ERR_BUSY, "free");
    assert_int_equal(kv_pool_free_pages(w.pool), PAGES - 2); /* none was taken */
    kv_radix_clear(w.tree);
    CHECK_OK(kv_pool_alloc(w.pool, pages, PAGES, &e));
    for (int i = 0; i < PAGES; i++)
        kv_pool_unref(w.pool, pages[i]);
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stress),
        cmocka_unit_test(least_recent_goes_first),
        cmocka_unit_test(held_pages_stay),
        cmocka_unit_test(salts_and_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
