/* Words seen before and their ids. A fixed table, two places for a word; keys and ids lie in two
 * growing buffers. When a buffer is full everything is forgotten, which bounds the memory. */
#include <stdlib.h>
#include <string.h>
#include "text/tok_internal.h"

#define SLOTS   (1u << 15)
#define KEY_MAX (2u << 20) /* bytes */
#define ID_MAX  (1u << 19) /* ids */

typedef struct slot {
    uint64_t hash; /* 0 = free */
    uint32_t key, id;
    uint16_t key_len, n;
} slot;

struct tok_cache {
    slot v[SLOTS];
    char *key;
    int32_t *id;
    size_t n_key, n_id;
};

tok_cache *tok__cache_make(void)
{
    tok_cache *c = xcalloc(1, sizeof *c);
    c->key = xmalloc(KEY_MAX);
    c->id = xmalloc(ID_MAX * sizeof *c->id);
    return c;
}

void tok__cache_drop(tok_cache *c)
{
    if (!c) return;
    free(c->key);
    free(c->id);
    free(c);
}

const int32_t *tok__cache_get(const tok_cache *c, const char *s, size_t len, uint64_t hash,
                              size_t *n)
{
    for (size_t k = 0; k < 2; k++) {
        const slot *p = &c->v[(hash & (SLOTS - 1)) ^ k];
        if (p->hash != hash || !p->hash || p->key_len != len ||
            memcmp(c->key + p->key, s, len) != 0)
            continue;
        *n = p->n;
        return c->id + p->id;
    }
    return NULL;
}

void tok__cache_put(tok_cache *c, const char *s, size_t len, uint64_t hash, const int32_t *v,
                    size_t n)
{
    if (!hash || len > UINT16_MAX || n > UINT16_MAX) return;
    if (c->n_key + len > KEY_MAX || c->n_id + n > ID_MAX) {
        memset(c->v, 0, sizeof c->v);
        c->n_key = c->n_id = 0;
    }
    slot *p = &c->v[hash & (SLOTS - 1)];
    if (p->hash) {
        slot *q = &c->v[(hash & (SLOTS - 1)) ^ 1];
        if (!q->hash || hash >> 40 & 1) p = q;
    }
    *p = (slot){hash, (uint32_t)c->n_key, (uint32_t)c->n_id, (uint16_t)len, (uint16_t)n};
    memcpy(c->key + c->n_key, s, len);
    if (n) memcpy(c->id + c->n_id, v, n * sizeof *v);
    c->n_key += len;
    c->n_id += n;
}
