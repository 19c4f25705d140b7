/* KV cache: formats (registry), the page pool, and the radix tree of shared prefixes. */
#ifndef KV_KV_H
#define KV_KV_H
#include "kern/kern.h"

typedef struct kv_format {
    const char *name;    /* "fp8_e4m3"; the --kv-cache-dtype spelling */
    const char *aliases; /* "fp8" space separated */
    kern_kv_type type;
    const char *doc;
} kv_format;
extern const kv_format kv_formats[];
extern const int kv_n_formats;
/* "auto" is resolved by the caller. Unknown: ERR_USAGE listing the names. */
int kv_format_parse(const char *text, const kv_format **out, err *e);

/* Cache groups: layers whose pages have the same life. Each group numbers its own pages, and only
 * its layers have memory for them; a sequence has a page table for each. Pages of KV_WINDOW that
 * the largest window of the group has passed are given back. */
enum { KV_FULL, KV_WINDOW, KV_GROUPS };

/* One entry per layer: shapes may differ between layers. */
typedef struct kv_layer_shape {
    int Hk, D;
    int window;           /* 0 = full */
    int v_in_k;           /* MLA: see kern_kv_layer; 0 = own V plane */
    int64_t state_floats; /* > 0: linear attention, no K and V but this many f32 a sequence */
} kv_layer_shape;
typedef struct kv_sizes { /* exact, without allocating: the planner and the pool use this */
    uint64_t token_bytes; /* codes + per-token scales of all layers, one token */
    uint64_t code_bytes, scale_bytes; /* the two parts of token_bytes */
    uint64_t page_bytes;              /* one page of all layers */
    uint64_t group_bytes[KV_GROUPS];  /* one page of the group's layers; 0 = it has none */
    uint64_t state_bytes;             /* one sequence, all linear-attention layers */
    int window;                       /* largest of the window group */
    int page_tokens;
} kv_sizes;
void kv_sizes_of(kern_kv_type t, const kv_layer_shape *layers, int n_layers, int page_tokens,
                 kv_sizes *out);
/* Most pages that a sequence holds on its way to `tokens` tokens, of which at most `chunk` are
 * computed in one step: all of them; in the window group those that the window - 1 tokens before
 * the chunk and the chunk itself can touch. */
void kv_pages_held(const kv_sizes *s, int64_t tokens, int64_t chunk, int64_t pages[KV_GROUPS]);
/* Pages of both groups within `bytes`: those of `seqs` sequences of `context` tokens, or of
 * `tokens` in all; fewer where the bytes end. Returns the positions (pages) of tokens that all
 * sequences together can have; below those of `context`, no sequence can reach it. 0 = not a page
 * fits. */
typedef struct kv_want {
    int64_t context, seqs, chunk;
    int64_t tokens; /* 0 = seqs x context */
} kv_want;
int64_t kv_pages_fit(const kv_sizes *s, uint64_t bytes, const kv_want *want,
                     int64_t pages[KV_GROUPS]);
/* What a pool takes in which `seqs` sequences of `context` tokens run at once, states included. */
uint64_t kv_bytes_for(const kv_sizes *s, int64_t context, int64_t seqs, int64_t chunk);
/* First position (page of the sequence) that still matters when `computed` tokens are in the cache.
 */
int64_t kv_window_start(int window, int page_tokens, int64_t computed);

typedef struct kv_pool kv_pool;
typedef struct kv_pool_opts {
    kern_kv_type type;
    int n_layers;
    const kv_layer_shape *layers;
    int page_tokens;             /* default 16 */
    int64_t n_pages[KV_GROUPS];  /* not read for a group without layers */
    const float *const *k_scale; /* [n_layers] -> [Hk] or NULL */
    const float *const *v_scale;
    int n_states; /* sequences that may run at once; needed where a layer has state */
} kv_pool_opts;
int kv_pool_open(kv_pool **out, kern_dev *d, const kv_pool_opts *o, err *e);
void kv_pool_close(kv_pool *p);
/* A model on several devices has a pool on each, with pages of the same numbers: p, which accounts
 * for them, and those attached to it in the order of ranks, which it takes over. */
void kv_pool_attach(kv_pool *p, kv_pool *next);
kv_pool *kv_pool_rank(kv_pool *p, int rank);
const kern_kv_layer *kv_pool_layer(const kv_pool *p, int layer); /* not for state layers */
int kv_pool_group(const kv_pool *p, int layer); /* KV_FULL or KV_WINDOW; -1 for state layers */
/* [state_floats] of a linear-attention layer, zero at first; slot 0 .. n_states-1, one for each
 * running sequence. NULL for the other layers. */
float *kv_pool_state(const kv_pool *p, int layer, int slot);
int kv_pool_page_tokens(const kv_pool *p);
int kv_pool_window(const kv_pool *p);               /* largest window of the window group */
uint64_t kv_pool_bytes(const kv_pool *p);           /* pages of both groups and states */
int64_t kv_pool_total(const kv_pool *p, int group); /* 0 = the model has no such layers */
int64_t kv_pool_free_pages(const kv_pool *p, int group);
/* Pages that nobody but the prefix cache holds: eviction can free them all. */
int64_t kv_pool_cached_pages(const kv_pool *p, int group);
/* Reference-counted pages. alloc gives ref 1; -ERR_BUSY when fewer than n are free (none taken). */
int kv_pool_alloc(kv_pool *p, int group, int32_t *pages, int n, err *e);
void kv_pool_ref(kv_pool *p, int group, int32_t page);
void kv_pool_unref(kv_pool *p, int group, int32_t page);

/* Radix tree over token ids at page granularity. Keys may carry a salt. Only whole pages are kept.
 * Page tables come as one array for each group, position i holding tokens [i*page_tokens,
 * (i+1)*page_tokens); the array of a group without layers is not touched. -1 = the window has
 * passed it and it was given back. */
typedef struct kv_radix kv_radix;
int kv_radix_open(kv_radix **out, kv_pool *p, err *e);
void kv_radix_close(kv_radix *r);
/* Longest cached prefix of ids (whole pages, at most max_tokens) that every group can restore: all
 * full pages, and the window pages that the next token's window sees. Pages are referenced for the
 * caller and written to `pages`, -1 where the window has passed; returns tokens matched. */
int64_t kv_radix_match(kv_radix *r, uint64_t salt, const int32_t *ids, int64_t n,
                       int64_t max_tokens, int32_t *const pages[KV_GROUPS]);
/* Gives the tree the whole pages of a finished or running sequence (takes its own references).
 * Where it has a page already, that one stays if somebody holds it, and the duplicate is left with
 * the caller. */
void kv_radix_insert(kv_radix *r, uint64_t salt, const int32_t *ids, int64_t n,
                     int32_t *const pages[KV_GROUPS]);
/* Frees pages of the group that only the tree holds until n are freed; returns freed. Full pages go
 * from the ends of the least recently used leaves, with the window pages beside them; window pages
 * from the beginning of the least recently used node, whose longer prefixes stay restorable. */
int64_t kv_radix_evict(kv_radix *r, int group, int64_t n);
int64_t kv_radix_pages(const kv_radix *r, int group);
int kv_radix_check(const kv_radix *r, err *e); /* invariants, for tests */
void kv_radix_clear(kv_radix *r);
#endif
