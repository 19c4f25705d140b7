/* Many strings sought at once: the added tokens. A byte trie, nodes in one array, the children of a
 * node linked as siblings; a table over the first byte lets plain text pass at one look a byte. The
 * match is the leftmost, and of those at one place the longest. The cost is bounded by text length
 * times the longest token. */
#include <stdlib.h>
#include <string.h>
#include "text/tok_internal.h"

typedef struct node {
    uint32_t child, sibling; /* 0 = none */
    int32_t value;           /* -1 = no string ends here */
    uint8_t byte;
} node;

struct tok_trie {
    node *v;
    size_t n, cap;
    uint32_t first[256]; /* node of the first byte, 0 = no string begins so */
};

static uint32_t new_node(tok_trie *t, uint8_t byte)
{
    if (t->n == t->cap) {
        t->cap = t->cap ? t->cap * 2 : 64;
        t->v = xrealloc(t->v, t->cap * sizeof *t->v);
    }
    t->v[t->n] = (node){.value = -1, .byte = byte};
    return (uint32_t)t->n++;
}

tok_trie *tok__trie_make(void)
{
    tok_trie *t = xcalloc(1, sizeof *t);
    new_node(t, 0); /* index 0 means none */
    return t;
}

void tok__trie_drop(tok_trie *t)
{
    if (!t) return;
    free(t->v);
    free(t);
}

static uint32_t child_of(const tok_trie *t, uint32_t at, uint8_t byte)
{
    uint32_t c = t->v[at].child;
    while (c && t->v[c].byte != byte)
        c = t->v[c].sibling;
    return c;
}

void tok__trie_add(tok_trie *t, const char *s, size_t n, int32_t value)
{
    if (!n) return;
    uint8_t b = (uint8_t)s[0];
    if (!t->first[b]) t->first[b] = new_node(t, b);
    uint32_t at = t->first[b];
    for (size_t i = 1; i < n; i++) {
        uint32_t c = child_of(t, at, (uint8_t)s[i]);
        if (!c) {
            c = new_node(t, (uint8_t)s[i]);
            t->v[c].sibling = t->v[at].child;
            t->v[at].child = c;
        }
        at = c;
    }
    t->v[at].value = value;
}

bool tok__trie_empty(const tok_trie *t)
{
    return t->n == 1;
}

bool tok__trie_find(const tok_trie *t, const char *s, size_t n, size_t from, size_t *lo, size_t *hi,
                    int32_t *value)
{
    if (tok__trie_empty(t)) return false;
    for (size_t i = from; i < n; i++) {
        uint32_t at = t->first[(uint8_t)s[i]];
        if (!at) continue;
        size_t end = 0, j = i + 1;
        int32_t best = -1;
        for (;; j++) {
            if (t->v[at].value >= 0) {
                best = t->v[at].value;
                end = j;
            }
            if (j == n || !(at = child_of(t, at, (uint8_t)s[j]))) break;
        }
        if (best < 0) continue;
        *lo = i;
        *hi = end;
        *value = best;
        return true;
    }
    return false;
}
