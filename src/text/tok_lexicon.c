/* Strings sought as prefixes of a text: the pieces of a Unigram model, user-defined symbols.
 *
 * A trie in one array, in breadth-first order of the sorted strings, so that the children of a node
 * lie side by side, ordered by their byte; a node has the first child and their number. The
 * children of the root are found by a table. Node 0 is the root and means "none" as a result. Of
 * equal strings the one that was given last counts. */
#include <stdlib.h>
#include <string.h>
#include "text/tok_internal.h"

typedef struct node {
    uint32_t child;
    int32_t value; /* -1 = no string ends here */
    uint16_t n_child;
    uint8_t byte;
} node;

struct tok_lexicon {
    node *v;
    size_t n, cap;
    uint32_t first[256];
};

typedef struct range { /* strings that share the path to a node */
    size_t lo, hi;
    uint32_t depth;
} range;

static int by_text(const void *pa, const void *pb)
{
    const tok_entry *a = pa, *b = pb;
    size_t n = a->len < b->len ? a->len : b->len;
    int c = n ? memcmp(a->s, b->s, n) : 0;
    if (c) return c;
    if (a->len != b->len) return a->len < b->len ? -1 : 1;
    return a->value < b->value ? -1 : a->value > b->value;
}

static void add_node(tok_lexicon *l, range **r, range of, uint8_t byte)
{
    if (l->n == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 256;
        l->v = xrealloc(l->v, l->cap * sizeof *l->v);
        *r = xrealloc(*r, l->cap * sizeof **r);
    }
    (*r)[l->n] = of;
    l->v[l->n++] = (node){.value = -1, .byte = byte};
}

/* Children of node at: one for each byte that its strings have behind the shared path. */
static void add_children(tok_lexicon *l, range **r, size_t at, const tok_entry *list)
{
    range g = (*r)[at];
    size_t i = g.lo;
    for (; i < g.hi && list[i].len == g.depth; i++)
        l->v[at].value = list[i].value;
    uint32_t first = (uint32_t)l->n;
    while (i < g.hi) {
        uint8_t b = (uint8_t)list[i].s[g.depth];
        size_t end = i + 1;
        while (end < g.hi && (uint8_t)list[end].s[g.depth] == b)
            end++;
        add_node(l, r, (range){i, end, g.depth + 1}, b);
        i = end;
    }
    l->v[at].child = first;
    l->v[at].n_child = (uint16_t)(l->n - first);
}

tok_lexicon *tok__lexicon_make(tok_entry *list, size_t n)
{
    tok_lexicon *l = xcalloc(1, sizeof *l);
    range *r = NULL;
    if (n) qsort(list, n, sizeof *list, by_text);
    add_node(l, &r, (range){0, n, 0}, 0);
    for (size_t at = 0; at < l->n; at++)
        add_children(l, &r, at, list);
    for (uint32_t k = 0; k < l->v[0].n_child; k++)
        l->first[l->v[l->v[0].child + k].byte] = l->v[0].child + k;
    free(r);
    return l;
}

void tok__lexicon_drop(tok_lexicon *l)
{
    if (!l) return;
    free(l->v);
    free(l);
}

uint32_t tok__lexicon_step(const tok_lexicon *l, uint32_t at, uint8_t byte)
{
    if (!at) return l->first[byte];
    const node *p = &l->v[at];
    uint32_t lo = p->child, hi = p->child + p->n_child;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (l->v[mid].byte == byte) return mid;
        if (l->v[mid].byte < byte)
            lo = mid + 1;
        else
            hi = mid;
    }
    return 0;
}

int32_t tok__lexicon_value(const tok_lexicon *l, uint32_t at)
{
    return l->v[at].value;
}

size_t tok__lexicon_longest(const tok_lexicon *l, const char *s, size_t n, int32_t *value)
{
    size_t best = 0;
    uint32_t at = 0;
    for (size_t i = 0; i < n && (at = tok__lexicon_step(l, at, (uint8_t)s[i])); i++)
        if (l->v[at].value >= 0) {
            best = i + 1;
            *value = l->v[at].value;
        }
    return best;
}
