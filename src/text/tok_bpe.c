/* The model BPE: a word is cut into characters, then the adjacent pair of the lowest rank (leftmost
 * of equals) is joined until no pair has a merge.
 *
 * Merges are an open-addressing table from (left id << 32 | right id) to (rank, id of the joined
 * token). Short words are merged by scanning the ranks; longer ones by a heap of (rank, position)
 * over a linked list, whose stale entries are told by their rank.
 *
 * A word of more than WINDOW characters is merged window by window, so that a text without spaces
 * costs time in proportion to its length and a fixed piece of memory. Write E(x) for the tokens of
 * x. Where E(x) has a border, the parts on both sides have been merged without knowing of each
 * other. So if E(XY) = E(X)E(Y) and E(YZ) = E(Y)E(Z), then E(XYZ) = E(X)E(Y)E(Z): the first merge
 * across one of the two borders would be the best of XY, or of YZ, too, whose merges up to then are
 * the same ones. Y is one token, the seam: some way before the end of a window, and again the first
 * of the next window. Where the second window sees another token there, the word is begun again
 * with windows eight times as large, at last with one. The ids are those of one window always.
 *
 * Words are remembered in a cache that belongs to one thread's working memory.
 *
 * Models of the SentencePiece kind get whole texts as one word. Where no merge makes a token that
 * has U+2581 behind another character, no merge can cross the place before such a character, and
 * the word is cut there without changing any id.
 *
 * A character that the vocabulary lacks becomes its byte tokens <0xNN> if the model falls back to
 * bytes and has all of them, else the unknown token, else nothing: as the library does. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "text/tok_internal.h"

#define NO_RANK UINT32_MAX
#define SHORT   96             /* symbols up to which ranks are scanned */
#define WINDOW  4096           /* symbols that are merged at a time */
#define CACHED  256            /* bytes of the longest word that is remembered */
#define BATCH   (TOK_MANY / 2) /* merges that are looked up together */
#define N_CHARS 0x800          /* code points whose ids are tabled */

typedef struct pair_slot {
    uint64_t key; /* left << 32 | right; UINT64_MAX = free */
    uint32_t rank, id;
} pair_slot;

typedef struct bpe {
    pair_slot *pair;
    size_t mask;
    uint64_t *filter; /* a bit for each of 4 (mask + 1) hashes: clear = no such pair. Most pairs of
                       * a text have no merge, and this much stays in the cache */
    int32_t char_id[N_CHARS];
    int32_t byte_id[256]; /* <0xNN>, -1 if not in the vocabulary */
    int32_t unk;          /* -1 = no unknown token */
    bool byte_fallback, fuse_unk, ignore_merges;
    bool cuts;             /* words may be cut before U+2581 */
    char *prefix, *suffix; /* continuing_subword_prefix, end_of_word_suffix; NULL if empty */
    char *lost_unk;        /* unk_token that the vocabulary lacks: an error where it is needed */
} bpe;

typedef struct symbol {
    int32_t id, prev, next;
    uint32_t rank; /* of the pair (this, next); NO_RANK = none; the symbol is dead if id < 0 */
} symbol;

static uint64_t pair_key(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

/* Where the search for a pair begins. */
static size_t pair_hash(uint64_t key)
{
    key *= 0x9E3779B97F4A7C15u;
    return (size_t)(key ^ key >> 29);
}

static size_t pair_home(const bpe *b, uint64_t key)
{
    return pair_hash(key) & b->mask;
}

static uint64_t *filter_word(const bpe *b, size_t hash)
{
    return &b->filter[(hash & (4 * b->mask + 3)) / 64];
}

static pair_slot *pair_find(const bpe *b, int32_t left, int32_t right)
{
    uint64_t key = pair_key(left, right);
    size_t i = pair_home(b, key);
    while (b->pair[i].key != key && b->pair[i].key != UINT64_MAX)
        i = (i + 1) & b->mask;
    return &b->pair[i];
}

static uint32_t pair_rank(const bpe *b, int32_t left, int32_t right, int32_t *id)
{
    size_t hash = pair_hash(pair_key(left, right));
    if (!(*filter_word(b, hash) >> hash % 64 & 1)) return NO_RANK;
    const pair_slot *p = pair_find(b, left, right);
    if (p->key == UINT64_MAX) return NO_RANK;
    *id = (int32_t)p->id;
    return p->rank;
}

/* ---- loading ----------------------------------------------------------------------------------
 */

static int bad_merge(size_t index, const char *why, const char *where, err *e)
{
    return err_set(e, ERR_FORMAT, "%s: merges[%zu] %s; expected \"a b\" or [\"a\", \"b\"]", where,
                   index, why);
}

#define MARK "\xE2\x96\x81"

/* Offset of the first U+2581 that stands behind another character, 0 if there is none. */
size_t tok__inner_mark(const char *s, size_t n)
{
    for (size_t i = 1; i + 3 <= n;) {
        const char *p = memchr(s + i, MARK[0], n - i);
        if (!p || (i = (size_t)(p - s)) + 3 > n) return 0;
        if (!memcmp(p, MARK, 3) && (i < 3 || memcmp(p - 3, MARK, 3) != 0)) return i;
        i++;
    }
    return 0;
}

typedef struct merge {
    const char *half[2];
    size_t len[2], index;
} merge;

/* One entry of merges as its two halves. */
static int merge_halves(const json *c, merge *g, const char *where, err *e)
{
    if (cJSON_IsString(c)) {
        const char *s = c->valuestring, *gap = strchr(s, ' ');
        if (!gap || gap == s || !gap[1] || strchr(gap + 1, ' '))
            return bad_merge(g->index, "is not two tokens with one space between", where, e);
        g->half[0] = s;
        g->len[0] = (size_t)(gap - s);
        g->half[1] = gap + 1;
        g->len[1] = strlen(gap + 1);
        return 0;
    }
    const json *a = cJSON_IsArray(c) ? c->child : NULL, *b = a ? a->next : NULL;
    if (!cJSON_IsString(a) || !cJSON_IsString(b) || b->next)
        return bad_merge(g->index, "is not a pair of strings", where, e);
    g->half[0] = a->valuestring;
    g->len[0] = strlen(g->half[0]);
    g->half[1] = b->valuestring;
    g->len[1] = strlen(g->half[1]);
    return 0;
}

/* Id of the token that a merge makes. Files list merges by the tokens they make: it is mostly the
 * token of the merge before, or the one behind that. */
static int32_t joined_id(const tok_model *m, const merge *g, size_t skip, int32_t before, buf *tmp)
{
    const char *tail = g->half[1] + skip;
    size_t head_len = g->len[0], n = head_len + g->len[1] - skip, len;
    for (int32_t id = before; id <= before + 1; id++) {
        const char *name = tok__vocab_name(&m->vocab, id, &len);
        if (name && len == n && !memcmp(name, g->half[0], head_len) &&
            !memcmp(name + head_len, tail, n - head_len))
            return id;
    }
    buf_clear(tmp);
    buf_add(tmp, g->half[0], head_len);
    buf_add(tmp, tail, n - head_len);
    return tok__vocab_find(&m->vocab, tmp->data, tmp->len);
}

static int add_merge(tok_model *m, bpe *b, const merge *g, const int32_t id[2], int32_t *to,
                     buf *tmp, const char *where, err *e)
{
    size_t skip = b->prefix ? strlen(b->prefix) : 0;
    for (int k = 0; k < 2; k++)
        if (id[k] < 0)
            return err_set(e, ERR_FORMAT,
                           "%s: merges[%zu] joins '%.*s', which is not in the vocabulary", where,
                           g->index, (int)(g->len[k] < 80 ? g->len[k] : 80), g->half[k]);
    if (skip > g->len[1]) skip = g->len[1];
    *to = joined_id(m, g, skip, *to, tmp);
    if (*to < 0)
        return err_set(e, ERR_FORMAT,
                       "%s: merges[%zu] makes '%.80s', which is not in the vocabulary", where,
                       g->index, tmp->data);
    if (b->cuts) {
        size_t len;
        const char *name = tok__vocab_name(&m->vocab, *to, &len);
        b->cuts = !tok__inner_mark(name, len);
    }
    pair_slot *p = pair_find(b, id[0], id[1]);
    p->key = pair_key(id[0], id[1]);
    size_t hash = pair_hash(p->key);
    *filter_word(b, hash) |= (uint64_t)1 << hash % 64;
    p->rank = (uint32_t)g->index;
    p->id = (uint32_t)*to;
    return 0;
}

/* Adds n <= BATCH merges: their lookups are started together, so that cache misses overlap. */
static int add_merges(tok_model *m, bpe *b, const merge *g, size_t n, int32_t *to, buf *tmp,
                      const char *where, err *e)
{
    const char *s[2 * BATCH];
    size_t len[2 * BATCH];
    int32_t id[2 * BATCH];
    int rc = 0;
    for (size_t i = 0; i < 2 * n; i++) {
        s[i] = g[i / 2].half[i % 2];
        len[i] = g[i / 2].len[i % 2];
    }
    tok__vocab_find_many(&m->vocab, s, len, 2 * n, id);
    for (size_t i = 0; i < n; i++)
        __builtin_prefetch(&b->pair[pair_home(b, pair_key(id[2 * i], id[2 * i + 1]))]);
    for (size_t i = 0; i < n && rc >= 0; i++)
        rc = add_merge(m, b, &g[i], id + 2 * i, to, tmp, where, e);
    return rc;
}

static int load_merges(tok_model *m, bpe *b, const json *j, const char *where, err *e)
{
    const json *list = json_get(j, "merges");
    size_t n = 0, slots = 64, i = 0, held = 0;
    int32_t to = -1;
    int rc = 0;
    merge batch[BATCH];
    buf tmp = {0};
    if (!cJSON_IsArray(list))
        return err_set(e, ERR_MISSING,
                       "%s: model BPE needs the array 'merges'; convert the tokenizer again",
                       where);
    for (const json *c = list->child; c; c = c->next)
        n++;
    while (slots < n * 2)
        slots *= 2;
    b->pair = xmalloc(slots * sizeof *b->pair);
    memset(b->pair, 0xff, slots * sizeof *b->pair);
    b->mask = slots - 1;
    b->filter = xcalloc(slots / 16, sizeof *b->filter);
    b->cuts = !b->prefix && !b->suffix && tok__vocab_find(&m->vocab, MARK, 3) >= 0;
    for (const json *c = list->child; c && rc >= 0; c = c->next) {
        merge *g = &batch[held++];
        g->index = i++;
        rc = merge_halves(c, g, where, e);
        if (rc < 0 || (held < BATCH && c->next)) continue;
        rc = add_merges(m, b, batch, held, &to, &tmp, where, e);
        held = 0;
    }
    buf_free(&tmp);
    return rc;
}

static int load_flags(tok_model *m, bpe *b, const json *j, const char *where, err *e)
{
    const char *unk = NULL, *prefix = NULL, *suffix = NULL;
    double dropout = 0;
    int rc;
    TRY(json_get_bool(j, "byte_fallback", &b->byte_fallback, where, e));
    TRY(json_get_bool(j, "fuse_unk", &b->fuse_unk, where, e));
    TRY(json_get_bool(j, "ignore_merges", &b->ignore_merges, where, e));
    TRY(json_get_f64(j, "dropout", &dropout, where, e));
    TRY(json_get_str(j, "unk_token", &unk, where, e));
    TRY(json_get_str(j, "continuing_subword_prefix", &prefix, where, e));
    TRY(json_get_str(j, "end_of_word_suffix", &suffix, where, e));
    if (dropout != 0)
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: BPE dropout %g makes ids random; set 'dropout' to null", where,
                       dropout);
    if (prefix && *prefix) b->prefix = xstrdup(prefix);
    if (suffix && *suffix) b->suffix = xstrdup(suffix);
    b->unk = unk ? tok__vocab_find(&m->vocab, unk, strlen(unk)) : -1;
    if (unk && b->unk < 0) b->lost_unk = xstrdup(unk);
    rc = 0;
out:
    return rc < 0 ? rc : 0;
}

static void fill_tables(const tok_model *m, bpe *b)
{
    for (uint32_t c = 0; c < N_CHARS; c++) {
        char u[2] = {(char)c, 0};
        if (c >= 0x80) {
            u[0] = (char)(0xC0 | c >> 6);
            u[1] = (char)(0x80 | (c & 0x3F));
        }
        b->char_id[c] = tok__vocab_find(&m->vocab, u, c < 0x80 ? 1 : 2);
    }
    for (int i = 0; i < 256; i++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", i);
        b->byte_id[i] = tok__vocab_find(&m->vocab, name, 6);
        if (b->unk < 0 && !(b->byte_fallback && b->byte_id[i] >= 0)) b->cuts = false;
    }
}

static int bpe_load(tok_model *m, const json *j, const char *where, err *e)
{
    bpe *b = m->state = xcalloc(1, sizeof *b);
    int rc = tok__vocab_load(&m->vocab, j, "BPE", where, e);
    if (rc >= 0) rc = load_flags(m, b, j, where, e);
    if (rc >= 0) rc = load_merges(m, b, j, where, e);
    if (rc >= 0) fill_tables(m, b);
    return rc;
}

static void bpe_drop(tok_model *m)
{
    bpe *b = m->state;
    if (!b) return;
    free(b->pair);
    free(b->filter);
    free(b->prefix);
    free(b->suffix);
    free(b->lost_unk);
    free(b);
}

/* ---- symbols of a word ------------------------------------------------------------------------
 */

typedef struct symbols {
    ids *out;
    bool pending_unk, lost;
} symbols;

static void add_unknown(const bpe *b, symbols *y, const char *p, size_t k)
{
    bool all = b->byte_fallback;
    for (size_t i = 0; i < k && all; i++)
        all = b->byte_id[(unsigned char)p[i]] >= 0;
    if (all) {
        for (size_t i = 0; i < k; i++)
            ids_push(y->out, b->byte_id[(unsigned char)p[i]]);
    } else if (b->lost_unk) {
        y->lost = true;
    } else if (b->unk >= 0) {
        if (y->pending_unk && !b->fuse_unk) ids_push(y->out, b->unk);
        y->pending_unk = true;
    }
}

/* Character [i, i+k) of a word with the affixes that some models write into their vocabulary. */
static int32_t affixed(const tok_model *m, const bpe *b, const char *s, size_t n, size_t i,
                       size_t k, buf *tmp)
{
    buf_clear(tmp);
    if (i > 0 && b->prefix) buf_puts(tmp, b->prefix);
    buf_add(tmp, s + i, k);
    if (i + k == n && b->suffix) buf_puts(tmp, b->suffix);
    return tok__vocab_find(&m->vocab, tmp->data, tmp->len);
}

/* Appends the ids of the characters of a word; false: the unknown token is needed but lost. */
static bool cut(const tok_model *m, const bpe *b, const char *s, size_t n, ids *out)
{
    buf tmp = {0};
    symbols y = {.out = out};
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        size_t k = (size_t)tok__cp(s + i, n - i, &cp);
        int32_t id = b->prefix || b->suffix ? affixed(m, b, s, n, i, k, &tmp)
                     : cp < N_CHARS         ? b->char_id[cp]
                                            : tok__vocab_find(&m->vocab, s + i, k);
        if (id < 0) {
            if (tmp.len)
                add_unknown(b, &y, tmp.data, tmp.len);
            else
                add_unknown(b, &y, s + i, k);
        } else {
            if (y.pending_unk) ids_push(out, b->unk);
            y.pending_unk = false;
            ids_push(out, id);
        }
        i += k;
    }
    if (y.pending_unk) ids_push(out, b->unk);
    buf_free(&tmp);
    return !y.lost;
}

/* ---- merging ----------------------------------------------------------------------------------
 */

/* Merges v[0, n) in place, n <= SHORT; returns how many ids are left. */
static size_t merge_short(const bpe *b, int32_t *v, size_t n)
{
    uint32_t rank[SHORT];
    int32_t to[SHORT];
    for (size_t i = 0; i + 1 < n; i++)
        rank[i] = pair_rank(b, v[i], v[i + 1], &to[i]);
    while (n > 1) {
        size_t best = 0, tail;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == NO_RANK) break;
        v[best] = to[best];
        tail = n - best - 2; /* symbols behind the pair */
        memmove(v + best + 1, v + best + 2, tail * sizeof *v);
        if (tail) {
            memmove(rank + best + 1, rank + best + 2, (tail - 1) * sizeof *rank);
            memmove(to + best + 1, to + best + 2, (tail - 1) * sizeof *to);
            rank[best] = pair_rank(b, v[best], v[best + 1], &to[best]);
        }
        if (best) rank[best - 1] = pair_rank(b, v[best - 1], v[best], &to[best - 1]);
        n--;
    }
    return n;
}

/* Heap of rank << 32 | position, smallest first. */
static void sift_down(uint64_t *h, size_t n, size_t i)
{
    uint64_t x = h[i];
    for (size_t c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && h[c + 1] < h[c]) c++;
        if (h[c] >= x) break;
        h[i] = h[c];
    }
    h[i] = x;
}

static void heap_push(uint64_t *h, size_t *n, uint64_t x)
{
    size_t i = (*n)++;
    while (i && h[(i - 1) / 2] > x) {
        h[i] = h[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    h[i] = x;
}

/* Looks the pair at i up anew; pushes it if it has a merge. */
static void renew_pair(const bpe *b, symbol *v, int32_t i, uint64_t *h, size_t *n_heap)
{
    int32_t unused;
    symbol *s = &v[i];
    s->rank = s->next < 0 ? NO_RANK : pair_rank(b, s->id, v[s->next].id, &unused);
    if (s->rank != NO_RANK) heap_push(h, n_heap, (uint64_t)s->rank << 32 | (uint32_t)i);
}

/* Merges c[0, n) into the list that begins at v[0]; a token lies at the index of its first symbol.
 * Every merge removes a symbol and pushes at most two entries: h holds 3n. */
static void merge_window(const bpe *b, const int32_t *c, size_t n, symbol *v, uint64_t *h)
{
    size_t n_heap = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t unused;
        v[i].id = c[i];
        v[i].prev = (int32_t)i - 1;
        v[i].next = i + 1 < n ? (int32_t)i + 1 : -1;
        v[i].rank = i + 1 < n ? pair_rank(b, c[i], c[i + 1], &unused) : NO_RANK;
        if (v[i].rank != NO_RANK) h[n_heap++] = (uint64_t)v[i].rank << 32 | i;
    }
    for (size_t i = n_heap / 2; i-- > 0;)
        sift_down(h, n_heap, i);
    while (n_heap) {
        uint64_t top = h[0];
        h[0] = h[--n_heap];
        if (n_heap) sift_down(h, n_heap, 0);
        int32_t i = (int32_t)(uint32_t)top, id = 0;
        symbol *s = &v[i];
        if (s->id < 0 || s->rank != (uint32_t)(top >> 32)) continue;
        symbol *r = &v[s->next];
        if (pair_rank(b, s->id, r->id, &id) == NO_RANK) continue;
        s->id = id;
        s->next = r->next;
        r->id = -1;
        if (r->next >= 0) v[r->next].prev = i;
        renew_pair(b, v, i, h, &n_heap);
        if (s->prev >= 0) renew_pair(b, v, s->prev, h, &n_heap);
    }
}

/* Where the token at i ends; i < 0: nowhere. */
static size_t token_end(const symbol *v, int32_t i, size_t n)
{
    if (i < 0) return SIZE_MAX;
    return v[i].next < 0 ? n : (size_t)v[i].next;
}

/* Merges c[0, *n) in place, `size` symbols at a time, as the head of this file tells. mem holds
 * window_bytes(size). false: two windows disagree about the token at their seam; c is spoilt. */
static bool merge_windows(const bpe *b, int32_t *c, size_t *n, void *mem, size_t size)
{
    symbol *v = mem;
    uint64_t *h = (uint64_t *)(void *)(v + size);
    int32_t seam = -1; /* the token that the window has to begin with, and its length */
    size_t seam_len = 0, out = 0;
    for (size_t from = 0;;) {
        size_t k = *n - from < size ? *n - from : size, safe = k - k / 8;
        bool last = from + k == *n;
        int32_t i = 0;
        merge_window(b, c + from, k, v, h);
        if (seam >= 0 && (v[0].id != seam || token_end(v, 0, k) != seam_len)) return false;
        for (; i >= 0 && (last || token_end(v, v[i].next, k) <= safe); i = v[i].next)
            c[out++] = v[i].id;
        if (last) break;
        if (!i) return false; /* the first token takes all of it */
        seam = v[i].id;
        seam_len = token_end(v, i, k) - (size_t)i;
        from += (size_t)i;
    }
    *n = out;
    return true;
}

static size_t window_bytes(size_t n)
{
    return n * (sizeof(symbol) + 3 * sizeof(uint64_t));
}

static int encode_word(const tok_model *m, tok_work *w, const char *s, size_t n, ids *out, err *e)
{
    const bpe *b = m->state;
    size_t at = out->n;
    for (size_t size = WINDOW;; size *= 8) {
        if (!cut(m, b, s, n, out))
            return err_set(
                e, ERR_VALUE,
                "'%.*s' has a character without a token, and unk_token '%.60s' is not in "
                "the vocabulary",
                n > 40 ? 40 : (int)n, s, b->lost_unk);
        size_t k = out->n - at;
        if (k <= SHORT) {
            if (k) out->n = at + merge_short(b, out->v + at, k);
            return 0;
        }
        out->n = at;
        if (size > k) size = k;
        int rc = tok__work_memory(w, window_bytes(size), e);
        if (rc < 0) return rc;
        if (merge_windows(b, out->v + at, &k, w->model_mem, size)) {
            out->n += k;
            return 0;
        }
    }
}

static int encode_cached(const tok_model *m, tok_work *w, const char *s, size_t n, ids *out, err *e)
{
    size_t known, at = out->n;
    if (n > CACHED) return encode_word(m, w, s, n, out, e);
    uint64_t h = tok__hash(s, n);
    const int32_t *v = tok__cache_get(w->cache, s, n, h, &known);
    if (v) {
        for (size_t i = 0; i < known; i++)
            ids_push(out, v[i]);
        return 0;
    }
    int rc = encode_word(m, w, s, n, out, e);
    if (rc == 0) tok__cache_put(w->cache, s, n, h, out->v + at, out->n - at);
    return rc;
}

static int bpe_encode(const tok_model *m, tok_work *w, const char *s, size_t n, ids *out, err *e)
{
    const bpe *b = m->state;
    int rc = 0;
    if (b->ignore_merges) {
        int32_t id = tok__vocab_find(&m->vocab, s, n);
        if (id >= 0) {
            ids_push(out, id);
            return 0;
        }
    }
    for (size_t k; rc == 0 && b->cuts && (k = tok__inner_mark(s, n)); s += k, n -= k)
        rc = encode_cached(m, w, s, k, out, e);
    return rc < 0 ? rc : encode_cached(m, w, s, n, out, e);
}

const tok_model_kind tok__bpe_kind = {"BPE", bpe_load, bpe_encode, bpe_drop};
