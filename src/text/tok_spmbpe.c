/* BPE as SentencePiece does it: there are no merges, any two neighbours whose concatenation is a
 * piece may be joined, the pair whose piece has the highest score first, leftmost of equals.
 *
 * User-defined pieces are cut out before and never joined; a result that is an unused piece is
 * taken apart again into the pair that made it last. Unknown characters become byte pieces, or one
 * unknown token for a run of them. Pairs lie in a heap; one whose halves have changed since is told
 * by its length. Where no piece has U+2581 behind another character, no pair crosses the place
 * before such a character: the text is cut there and its words are remembered. */
#include <stdlib.h>
#include <string.h>
#include "text/tok_internal.h"

#define CACHED    256 /* bytes of the longest word that is remembered */
#define MAX_DEPTH 100 /* of unused pieces inside unused pieces, as SentencePiece */

typedef struct spmbpe {
    float *score;
    uint8_t *type;
    const tok_lexicon *user; /* the normalizer's; NULL = none */
    int32_t byte_id[256], unk;
    bool byte_fallback, cuts, has_unused;
} spmbpe;

typedef struct symbol {
    uint32_t off, len; /* len 0 = joined to another */
    int32_t prev, next;
    bool frozen;
} symbol;

typedef struct pair {
    float score;
    uint32_t left, right, len;
} pair;

typedef struct merging { /* one word */
    const tok_model *m;
    const spmbpe *b;
    const char *s;
    symbol *v;
    pair *heap;
    size_t n_heap;
    uint32_t
        *left_len; /* of unused pieces, by id: bytes of the left half; NULL = none are unused */
} merging;

static bool before(const pair *a, const pair *b)
{
    return a->score != b->score ? a->score > b->score : a->left < b->left;
}

static void heap_push(merging *g, pair x)
{
    size_t i = g->n_heap++;
    for (; i && before(&x, &g->heap[(i - 1) / 2]); i = (i - 1) / 2)
        g->heap[i] = g->heap[(i - 1) / 2];
    g->heap[i] = x;
}

static pair heap_pop(merging *g)
{
    pair top = g->heap[0], x = g->heap[--g->n_heap];
    size_t i = 0;
    for (size_t c; (c = 2 * i + 1) < g->n_heap; i = c) {
        if (c + 1 < g->n_heap && before(&g->heap[c + 1], &g->heap[c])) c++;
        if (!before(&g->heap[c], &x)) break;
        g->heap[i] = g->heap[c];
    }
    g->heap[i] = x;
    return top;
}

static void offer_pair(merging *g, int32_t left, int32_t right)
{
    if (left < 0 || right < 0) return;
    const symbol *l = &g->v[left], *r = &g->v[right];
    if (l->frozen || r->frozen) return;
    int32_t id = tok__vocab_find(&g->m->vocab, g->s + l->off, l->len + r->len);
    if (id < 0) return;
    int type = g->b->type[id];
    if (type != TOK_PIECE_NORMAL && type != TOK_PIECE_USER && type != TOK_PIECE_UNUSED) return;
    heap_push(g, (pair){g->b->score[id], (uint32_t)left, (uint32_t)right, l->len + r->len});
    if (type == TOK_PIECE_UNUSED) g->left_len[id] = l->len;
}

static size_t cut(merging *g, size_t n)
{
    size_t count = 0;
    for (size_t i = 0; i < n;) {
        int32_t unused;
        uint32_t cp;
        size_t k = g->b->user ? tok__lexicon_longest(g->b->user, g->s + i, n - i, &unused) : 0;
        bool frozen = k > 0;
        if (!k) k = (size_t)tok__cp(g->s + i, n - i, &cp);
        g->v[count] = (symbol){(uint32_t)i, (uint32_t)k, (int32_t)count - 1,
                               i + k < n ? (int32_t)count + 1 : -1, frozen};
        count++;
        i += k;
    }
    return count;
}

static void merge(merging *g)
{
    while (g->n_heap) {
        pair top = heap_pop(g);
        symbol *l = &g->v[top.left], *r = &g->v[top.right];
        if (!l->len || !r->len || l->len + r->len != top.len) continue;
        l->len += r->len;
        l->next = r->next;
        if (r->next >= 0) g->v[r->next].prev = (int32_t)top.left;
        r->len = 0;
        offer_pair(g, l->prev, (int32_t)top.left);
        offer_pair(g, (int32_t)top.left, l->next);
    }
}

static void add_unknown(const spmbpe *b, const char *s, size_t n, bool *after_unk, ids *out)
{
    for (size_t i = 0; b->byte_fallback && i < n; i++)
        ids_push(out, b->byte_id[(unsigned char)s[i]]);
    if (!b->byte_fallback && !*after_unk) ids_push(out, b->unk);
    *after_unk = true;
}

static void add_piece(const merging *g, size_t off, size_t len, int depth, bool *after_unk,
                      ids *out)
{
    int32_t id = tok__vocab_find(&g->m->vocab, g->s + off, len);
    int type = id < 0 ? TOK_PIECE_UNKNOWN : g->b->type[id];
    uint32_t left = type == TOK_PIECE_UNUSED ? g->left_len[id] : 0;
    if (type == TOK_PIECE_UNUSED && depth <= MAX_DEPTH && left) {
        add_piece(g, off, left, depth + 1, after_unk, out);
        add_piece(g, off + left, len - left, depth + 1, after_unk, out);
    } else if (type == TOK_PIECE_NORMAL || type == TOK_PIECE_USER ||
               (type == TOK_PIECE_UNUSED && depth > MAX_DEPTH)) {
        ids_push(out, id);
        *after_unk = false;
    } else {
        add_unknown(g->b, g->s + off, len, after_unk, out);
    }
}

static int encode_word(const tok_model *m, tok_work *w, const char *s, size_t n, bool *after_unk,
                       ids *out, err *e)
{
    const spmbpe *b = m->state;
    size_t unused = b->has_unused ? m->vocab.n : 0;
    /* n - 1 pairs at first, and each join, of which there are n - 1, offers two */
    int rc =
        tok__work_memory(w, n * (sizeof(symbol) + 3 * sizeof(pair)) + unused * sizeof(uint32_t), e);
    if (rc < 0) return rc;
    merging g = {.m = m, .b = b, .s = s, .v = w->model_mem};
    g.heap = (pair *)(void *)(g.v + n);
    g.left_len = (uint32_t *)(void *)(g.heap + 3 * n);
    memset(g.left_len, 0, unused * sizeof *g.left_len);
    size_t count = cut(&g, n);
    for (size_t i = 0; i + 1 < count; i++)
        offer_pair(&g, (int32_t)i, (int32_t)i + 1);
    merge(&g);
    for (int32_t i = 0; i >= 0; i = g.v[i].next)
        add_piece(&g, g.v[i].off, g.v[i].len, 0, after_unk, out);
    return 0;
}

/* Words with unknown characters are not remembered: what they become depends on the word before. */
static int encode_cached(const tok_model *m, tok_work *w, const char *s, size_t n, bool *after_unk,
                         ids *out, err *e)
{
    const spmbpe *b = m->state;
    size_t known, at = out->n;
    if (n > CACHED) return encode_word(m, w, s, n, after_unk, out, e);
    uint64_t h = tok__hash(s, n);
    const int32_t *v = tok__cache_get(w->cache, s, n, h, &known);
    if (v) {
        for (size_t i = 0; i < known; i++)
            ids_push(out, v[i]);
        *after_unk = false;
        return 0;
    }
    int rc = encode_word(m, w, s, n, after_unk, out, e);
    bool plain = rc == 0 && out->n > at;
    for (size_t i = at; i < out->n && plain; i++)
        plain = b->type[out->v[i]] == TOK_PIECE_NORMAL;
    if (plain && !*after_unk) tok__cache_put(w->cache, s, n, h, out->v + at, out->n - at);
    return rc;
}

static int spmbpe_encode(const tok_model *m, tok_work *w, const char *s, size_t n, ids *out, err *e)
{
    const spmbpe *b = m->state;
    bool after_unk = false;
    int rc = 0;
    for (size_t k; rc == 0 && b->cuts && (k = tok__inner_mark(s, n)); s += k, n -= k)
        rc = encode_cached(m, w, s, k, &after_unk, out, e);
    return rc < 0 || !n ? rc : encode_cached(m, w, s, n, &after_unk, out, e);
}

static void spmbpe_drop(tok_model *m)
{
    spmbpe *b = m->state;
    if (!b) return;
    free(b->score);
    free(b->type);
    free(b);
}

static const tok_model_kind kind = {"SentencePiece BPE", NULL, spmbpe_encode, spmbpe_drop};

void tok__spmbpe_from_pieces(tok_model *m, const tok_pieces *p)
{
    spmbpe *b = m->state = xcalloc(1, sizeof *b);
    m->kind = &kind;
    b->score = xcalloc(p->n + 1, sizeof *b->score);
    b->type = xcalloc(p->n + 1, 1);
    b->user = p->user;
    b->unk = p->unk;
    b->byte_fallback = p->byte_fallback;
    b->cuts = true;
    for (size_t i = 0; i < p->n; i++) {
        b->score[i] = p->v[i].score;
        b->type[i] = (uint8_t)p->v[i].type;
        b->has_unused = b->has_unused || p->v[i].type == TOK_PIECE_UNUSED;
        if (tok__inner_mark(p->v[i].s, p->v[i].len)) b->cuts = false;
    }
    tok__byte_ids(&m->vocab, b->byte_id);
}
