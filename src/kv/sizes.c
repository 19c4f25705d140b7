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

/* Pages of each group for n positions in all, when a sequence has `per` positions and holds at most
 * `held` pages: the window group shrinks with n, but one sequence always fits. */
static void share(const kv_sizes *s, int64_t n, int64_t per, const int64_t held[KV_GROUPS],
                  int64_t pages[KV_GROUPS])
{
    int64_t w = n > per ? n * held[KV_WINDOW] / per : held[KV_WINDOW];
    pages[KV_FULL] = s->group_bytes[KV_FULL] ? n : 0;
    pages[KV_WINDOW] = s->group_bytes[KV_WINDOW] ? (w < n ? w : n) : 0;
}

static bool fits(const kv_sizes *s, uint64_t bytes, const int64_t pages[KV_GROUPS])
{
    for (int g = 0; g < KV_GROUPS; g++) {
        if (!pages[g]) continue;
        if ((uint64_t)pages[g] > bytes / s->group_bytes[g]) return false;
        bytes -= (uint64_t)pages[g] * s->group_bytes[g];
    }
    return true;
}

int64_t kv_pages_fit(const kv_sizes *s, uint64_t bytes, const kv_want *want,
                     int64_t pages[KV_GROUPS])
{
    int64_t pt = s->page_tokens, per = (want->context + pt - 1) / pt, held[KV_GROUPS],
            most = INT32_MAX / pt < 1 << 26 ? INT32_MAX / pt : 1 << 26, lo = 0, hi = most;
    kv_pages_held(s, want->context, want->chunk, held);
    if (want->tokens > 0)
        hi = want->tokens < most * pt ? (want->tokens + pt - 1) / pt : most;
    else if (want->seqs < most / per)
        hi = want->seqs * per;
    while (lo < hi) { /* the largest n that fits */
        int64_t mid = lo + (hi - lo + 1) / 2;
        share(s, mid, per, held, pages);
        if (fits(s, bytes, pages))
            lo = mid;
        else
            hi = mid - 1;
    }
    share(s, lo, per, held, pages);
    return lo;
}
