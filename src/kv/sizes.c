/* Exact sizes of the KV cache without allocating it: what the planner says is what the pool takes.
 *
 *   a layer's page   (K and V, or K alone) x Hk heads x page_tokens x (code + scale bytes)
 *   a group's page   sum over its layers
 *   a sequence       full group: ceil(tokens / page_tokens) pages; window group: at most the pages
 *                    that window - 1 + chunk tokens touch; states: a fixed size each */
#include "kv/kv.h"

void kv_sizes_of(kern_kv_type t, const kv_layer_shape *layers, int n_layers, int page_tokens,
                 kv_sizes *out)
{
    *out = (kv_sizes){.page_tokens = page_tokens};
    for (int i = 0; i < n_layers; i++) {
        const kv_layer_shape *l = &layers[i];
        if (l->state_floats > 0) {
            out->state_bytes += sizeof(float) * (uint64_t)l->state_floats;
            continue;
        }
        uint64_t heads = (l->v_in_k ? 1 : 2) * (uint64_t)l->Hk;
        out->code_bytes += heads * kern_kv_code_bytes(t, l->D);
        out->scale_bytes += heads * kern_kv_scale_bytes(t, l->D);
        out->group_bytes[l->window > 0 ? KV_WINDOW : KV_FULL] +=
            kern_kv_page_bytes(t, l->Hk, l->D, l->v_in_k, page_tokens);
        out->page_bytes = out->group_bytes[KV_FULL] + out->group_bytes[KV_WINDOW];
        if (l->window > out->window) out->window = l->window;
    }
    out->token_bytes = out->code_bytes + out->scale_bytes;
}

int64_t kv_window_start(int window, int page_tokens, int64_t computed)
{
    int64_t first = computed - window + 1; /* the oldest key that the next token sees */
    return first > 0 ? first / page_tokens : 0;
}

void kv_pages_held(const kv_sizes *s, int64_t tokens, int64_t chunk, int64_t pages[KV_GROUPS])
{
    int64_t pt = s->page_tokens, all = (tokens + pt - 1) / pt;
    int64_t span = s->window - 1 + (chunk < tokens ? chunk : tokens); /* wherever it begins */
    int64_t touched = span > 0 ? (span + pt - 2) / pt + 1 : 0;
    pages[KV_FULL] = s->group_bytes[KV_FULL] ? all : 0;
    pages[KV_WINDOW] = !s->group_bytes[KV_WINDOW] ? 0 : touched < all ? touched : all;
}

uint64_t kv_bytes_for(const kv_sizes *s, int64_t context, int64_t seqs, int64_t chunk)
{
    int64_t held[KV_GROUPS];
    uint64_t one = s->state_bytes;
    kv_pages_held(s, context, chunk, held);
    for (int g = 0; g < KV_GROUPS; g++)
        one += (uint64_t)held[g] * s->group_bytes[g];
    return one * (uint64_t)seqs;
}

/* Pages of each group for n positions in all, of which window layers need at most `held`. */
static void share(const kv_sizes *s, int64_t n, int64_t held, int64_t pages[KV_GROUPS])
{
    pages[KV_FULL] = s->group_bytes[KV_FULL] ? n : 0;
    pages[KV_WINDOW] = !s->group_bytes[KV_WINDOW] ? 0 : held < n ? held : n;
}

/* What is left of bytes; false: they do not suffice. */
static bool left_of(const kv_sizes *s, uint64_t *bytes, const int64_t pages[KV_GROUPS])
{
    for (int g = 0; g < KV_GROUPS; g++) {
        if (!pages[g]) continue;
        if ((uint64_t)pages[g] > *bytes / s->group_bytes[g]) return false;
        *bytes -= (uint64_t)pages[g] * s->group_bytes[g];
    }
    return true;
}

/* Most positions, at most `most`, that fit. */
static int64_t largest(const kv_sizes *s, uint64_t bytes, int64_t most, int64_t held,
                       int64_t pages[KV_GROUPS])
{
    int64_t lo = 0, hi = most;
    while (lo < hi) {
        int64_t mid = lo + (hi - lo + 1) / 2;
        uint64_t left = bytes;
        share(s, mid, held, pages);
        if (left_of(s, &left, pages))
            lo = mid;
        else
            hi = mid - 1;
    }
    share(s, lo, held, pages);
    return lo;
}

/* A sequence never holds more window pages than full ones, so window pages for all that may run, or
 * as many as positions, are never what stops one. Only where that leaves no sequence its whole
 * context are window pages for one enough, and those for others come from what is left. */
int64_t kv_pages_fit(const kv_sizes *s, uint64_t bytes, const kv_want *want,
                     int64_t pages[KV_GROUPS])
{
    int64_t pt = s->page_tokens, per = (want->context + pt - 1) / pt, one[KV_GROUPS],
            most = INT32_MAX / pt < 1 << 26 ? INT32_MAX / pt : 1 << 26, n = most;
    kv_pages_held(s, want->context, want->chunk, one);
    int64_t held = one[KV_WINDOW],
            all = held && want->seqs > most / held ? most : want->seqs * held;
    if (want->tokens > 0)
        n = want->tokens < most * pt ? (want->tokens + pt - 1) / pt : most;
    else if (want->seqs < most / per)
        n = want->seqs * per;
    int64_t need = per < n ? per : n, got = largest(s, bytes, n, all, pages);
    if (got >= need) return got;
    got = largest(s, bytes, need, held, pages);
    if (got && held && left_of(s, &bytes, pages)) {
        int64_t more = (int64_t)(bytes / s->group_bytes[KV_WINDOW]),
                room = (all < got || !s->group_bytes[KV_FULL] ? all : got) - pages[KV_WINDOW];
        if (room > 0) pages[KV_WINDOW] += more < room ? more : room;
    }
    return got;
}
