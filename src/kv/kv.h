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

/* Cache groups: layers whose pages have the same life. A sequence has a page table for each group;
 * pages of KV_WINDOW that the window has passed are given back. */
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
    uint64_t page_bytes;              /* one page, all layers */
} kv_sizes;
void kv_sizes_of(kern_kv_type t, const kv_layer_shape *layers, int n_layers, int page_tokens,
                 kv_sizes *out);

typedef struct kv_pool kv_pool;
typedef struct kv_pool_opts {
    kern_kv_type type;
    int n_layers;
    const kv_layer_shape *layers;
    int page_tokens; /* default 16 */
    int64_t n_pages;
    const float *const *k_scale; /* [n_layers] -> [Hk] or NULL */
    const float *const *v_scale;
    int n_states; /* sequences that may run at once; needed where a layer has state */
} kv_pool_opts;
int kv_pool_open(kv_pool **out, kern_dev *d, const kv_pool_opts *o, err *e);
void kv_pool_close(kv_pool *p);
const kern_kv_layer *kv_pool_layer(const kv_pool *p, int layer); /* not for state layers */
int kv_pool_group(const kv_pool *p, int layer);                  /* KV_FULL or KV_WINDOW */
/* [state_floats] of a linear-attention layer; slot 0 .. n_states-1, one for each running sequence.
 */
float *kv_pool_state(const kv_pool *p, int layer, int slot);
int kv_pool_page_tokens(const kv_pool *p);
int64_t kv_pool_total(const kv_pool *p);
int64_t kv_pool_free_pages(const kv_pool *p);
/* Pages that nobody but the prefix cache holds: eviction can free them all. */
int64_t kv_pool_cached_pages(const kv_pool *p);
uint64_t kv_pool_bytes(const kv_pool *p);
/* Reference-counted pages. alloc gives ref 1; -ERR_BUSY when fewer than n are free (none taken). */
int kv_pool_alloc(kv_pool *p, int32_t *pages, int n, err *e);
void kv_pool_ref(kv_pool *p, int32_t page);
void kv_pool_unref(kv_pool *p, int32_t page);

/* Radix tree over token ids at page granularity. Keys may carry a salt. Only whole pages are kept.
 */
typedef struct kv_radix kv_radix;
int kv_radix_open(kv_radix **out, kv_pool *p, err *e);
void kv_radix_close(kv_radix *r);
/* Longest cached prefix of ids (whole pages, at most max_tokens); pages are referenced for the
 * caller and written to `pages`; returns tokens matched. */
int64_t kv_radix_match(kv_radix *r, uint64_t salt, const int32_t *ids, int64_t n,
                       int64_t max_tokens, int32_t *pages);
/* Gives the tree the whole pages of a finished or running sequence (takes its own references;
 * duplicates are left with the caller). */
void kv_radix_insert(kv_radix *r, uint64_t salt, const int32_t *ids, int64_t n,
                     const int32_t *pages);
/* Drops least recently used leaves that only the tree holds until n pages are free; returns freed.
 */
int64_t kv_radix_evict(kv_radix *r, int64_t n);
int64_t kv_radix_pages(const kv_radix *r);
int kv_radix_check(const kv_radix *r, err *e); /* invariants, for tests */
void kv_radix_clear(kv_radix *r);
#endif
