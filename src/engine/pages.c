/* What requests hold of the KV pool. Every request has a page table for each cache group; position
 * i holds tokens [i * page_tokens, (i+1) * page_tokens). Pages of the window group that no layer's
 * window sees any more are given back as the request goes on, to the prefix cache where there is
 * one; positions before `gone` hold -1 from then on. A model with linear-attention layers also
 * gives each running request a state slot; a state is that of the last computed token and of no
 * earlier one, so prefixes are not shared there.
 *
 * The scheduler decides who gets pages and who gives way; nothing here preempts. */
#include "engine/engine_internal.h"

static int64_t positions(const engine *en, int64_t tokens)
{
    return (tokens + en->page_tokens - 1) / en->page_tokens;
}

static bool has(const engine *en, int group)
{
    return kv_pool_total(en->pool, group) > 0;
}

static int first_held(const request *r, int group)
{
    return group == KV_WINDOW ? r->gone : 0;
}

void engine__pages_release(engine *en, request *r)
{
    for (int g = 0; g < KV_GROUPS; g++)
        for (int i = first_held(r, g); has(en, g) && i < r->n_pages; i++)
            kv_pool_unref(en->pool, g, r->pages[g][i]);
    r->n_pages = r->gone = 0;
}

/* Sequences whose rotary table depends on their length share nothing: other lengths, other keys. */
static bool shareable(const engine *en, const request *r)
{
    return en->prefix_cache && r->computed > 0 && !r->rope_key;
}

void engine__pages_share(engine *en, const request *r)
{
    if (shareable(en, r))
        kv_radix_insert(en->radix, r->p.cache_salt, r->ids, r->computed, r->pages);
}

bool engine__whole_prompt(const request *r)
{
    return r->p.want & (WANT_LOGITS | WANT_PROMPT_LOGPROBS | WANT_HIDDEN);
}

void engine__pages_share_early(engine *en, const request *r)
{
    /* One that takes nothing from the cache would double what is there and keep it from eviction.
     */
    if (!engine__whole_prompt(r)) engine__pages_share(en, r);
}

void engine__pages_match(engine *en, request *r)
{
    /* The last token is always computed: its logits are needed. */
    r->computed =
        kv_radix_match(en->radix, r->p.cache_salt, r->ids, r->n_ids, r->n_ids - 1, r->pages);
    r->n_pages = (int)(r->computed / en->page_tokens);
    if (has(en, KV_WINDOW))
        r->gone = (int)kv_window_start(en->kv.window, en->page_tokens, r->computed);
}

void engine__pages_pass(engine *en, request *r)
{
    if (!has(en, KV_WINDOW)) return;
    int to = (int)kv_window_start(en->kv.window, en->page_tokens, r->computed);
    if (to <= r->gone) return;
    engine__pages_share_early(en, r); /* kept as long as there is room */
    for (; r->gone < to; r->gone++) {
        kv_pool_unref(en->pool, KV_WINDOW, r->pages[KV_WINDOW][r->gone]);
        r->pages[KV_WINDOW][r->gone] = -1;
    }
}

int64_t engine__pages_take(engine *en, request *r, int64_t tokens)
{
    int64_t need = positions(en, tokens) - r->n_pages, lack = 0;
    if (need <= 0) return 0;
    for (int g = 0; g < KV_GROUPS; g++) {
        int64_t more = need - kv_pool_free_pages(en->pool, g);
        if (!has(en, g) || more <= 0) continue;
        lack += more - kv_radix_evict(en->radix, g, more);
    }
    if (lack > 0) return lack;
    for (int g = 0; g < KV_GROUPS; g++)
        if (has(en, g)) kv_pool_alloc(en->pool, g, r->pages[g] + r->n_pages, (int)need, NULL);
    r->n_pages += (int)need;
    return 0;
}

bool engine__pages_assume(engine *en, request *r)
{
    int64_t tokens = r->n_prompt - 1, n = positions(en, tokens), from[KV_GROUPS] = {0};
    if (has(en, KV_WINDOW))
        from[KV_WINDOW] = kv_window_start(en->kv.window, en->page_tokens, tokens);
    for (int g = 0; g < KV_GROUPS; g++)
        if (has(en, g) && kv_pool_free_pages(en->pool, g) < n - from[g]) return false;
    for (int g = 0; g < KV_GROUPS; g++) {
        if (!has(en, g)) continue;
        for (int64_t i = 0; i < from[g]; i++)
            r->pages[g][i] = -1;
        kv_pool_alloc(en->pool, g, r->pages[g] + from[g], (int)(n - from[g]), NULL);
    }
    r->n_pages = (int)n;
    r->gone = (int)from[KV_WINDOW];
    r->computed = tokens;
    return true;
}

/* Pages that r has yet to take to hold `tokens` tokens. */
static int64_t yet_to_take(const engine *en, const request *r, int group, int64_t tokens)
{
    int64_t most[KV_GROUPS], rest = tokens - r->computed;
    if (!has(en, group)) return 0;
    kv_pages_held(&en->kv, tokens, rest < en->chunk ? rest : en->chunk, most);
    int64_t n = most[group] - (r->n_pages - first_held(r, group));
    return n > 0 ? n : 0;
}

/* A page for what r generates meanwhile, unless its last token lies in those that it has. */
static int64_t grows(const engine *en, const request *r, int group)
{
    int64_t room = en->max_len - r->n_prompt,
            end = r->n_prompt + (r->p.max_tokens < room ? r->p.max_tokens : room);
    return yet_to_take(en, r, group, end) > yet_to_take(en, r, group, r->n_ids);
}

bool engine__pages_room(const engine *en, const request *newcomer)
{
    for (int g = 0; g < KV_GROUPS; g++) {
        if (!has(en, g)) continue;
        int64_t need = yet_to_take(en, newcomer, g, newcomer->n_ids + 1);
        for (int i = 0; i < en->n_running; i++)
            need += yet_to_take(en, en->running[i], g, en->running[i]->n_ids) +
                    grows(en, en->running[i], g);
        if (need > kv_pool_free_pages(en->pool, g) + kv_pool_cached_pages(en->pool, g))
            return false;
    }
    return true;
}
