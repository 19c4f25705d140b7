/* The model Unigram: of all ways to cut a word into pieces of the vocabulary, the one whose scores
 * (log probabilities) have the highest sum.
 *
 * Best path by position: best[i] is the highest sum of any path that ends at byte i; from every
 * position that begins a character all pieces that begin there are followed. A character that is no
 * piece by itself may be passed as unknown, at the lowest score of the vocabulary minus 10. The
 * first of equal paths is kept, and neighbouring unknown characters become one token, as the
 * library does; with byte_fallback they become the tokens <0xNN> of their bytes if all are there.
 *
 * A SentencePiece model is the same with sums in 32-bit floats, brought back to zero when they pass
 * 100000; its user-defined pieces score (bytes - 1) / 10, its unused pieces are not sought. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "text/tok_internal.h"

#define UNK_PENALTY     10.0
#define RESET           100000.0f
#define MAX_PIECE_BYTES 8000 /* bounds the cost of a position; SentencePiece's limit */

typedef struct unigram {
    tok_lexicon *pieces;
    double *score; /* by id */
    size_t n;
    double unk_score;
    int32_t unk;          /* -1 = none */
    int32_t byte_id[256]; /* <0xNN>, -1 if not in the vocabulary */
    bool byte_fallback;
    bool single; /* sums in float, as SentencePiece */
} unigram;

typedef struct step {
    double sum;
    int32_t from, id; /* from -1 = not reached */
} step;

static int bad_entry(size_t i, const char *why, const char *where, err *e)
{
    return err_set(e, ERR_FORMAT, "%s: vocab[%zu] of model Unigram %s; expected [\"piece\", score]",
                   where, i, why);
}

static int load_entry(tok_model *m, unigram *u, const json *c, size_t i, tok_entry *list,
                      const char *where, err *e)
{
    const json *name = cJSON_IsArray(c) ? c->child : NULL, *score = name ? name->next : NULL;
    if (!cJSON_IsString(name)) return bad_entry(i, "has no piece", where, e);
    if (!cJSON_IsNumber(score) || !isfinite(score->valuedouble))
        return bad_entry(i, "has no finite score", where, e);
    u->score[i] = score->valuedouble;
    const char *s = name->valuestring;
    size_t n = strlen(s);
    if (n > MAX_PIECE_BYTES) return bad_entry(i, "is longer than any piece can be", where, e);
    list[i] = (tok_entry){s, n, (int32_t)i};
    return tok__vocab_add_last(&m->vocab, s, n, (int64_t)i, where, e);
}

static int load_vocab(tok_model *m, unigram *u, const json *j, const char *where, err *e)
{
    const json *v = json_get(j, "vocab");
    size_t n = 0, i = 0;
    int rc = 0;
    if (!cJSON_IsArray(v))
        return err_set(e, ERR_MISSING, "%s: model Unigram needs the array 'vocab'", where);
    for (const json *c = v->child; c; c = c->next)
        n++;
    if (!n || n > (size_t)TOK_MAX_ID)
        return err_set(e, n ? ERR_LIMIT : ERR_MISSING,
                       "%s: 'vocab' of model Unigram has %zu pieces; expected 1 to %lld", where, n,
                       (long long)TOK_MAX_ID);
    tok__vocab_reserve(&m->vocab, n + 1);
    tok_entry *list = xcalloc(n, sizeof *list);
    u->score = xcalloc(n, sizeof *u->score);
    u->n = n;
    for (const json *c = v->child; c && rc >= 0; c = c->next, i++)
        rc = load_entry(m, u, c, i, list, where, e);
    if (rc >= 0) u->pieces = tok__lexicon_make(list, n);
    free(list);
    return rc;
}

static void finish(const tok_model *m, unigram *u)
{
    double low = INFINITY;
    for (size_t i = 0; i < u->n; i++)
        if (u->score[i] < low) low = u->score[i];
    u->unk_score = low - UNK_PENALTY;
    tok__byte_ids(&m->vocab, u->byte_id);
}

static int unigram_load(tok_model *m, const json *j, const char *where, err *e)
{
    unigram *u = m->state = xcalloc(1, sizeof *u);
    int64_t unk = -1;
    int rc = load_vocab(m, u, j, where, e);
    if (rc >= 0) rc = json_get_i64(j, "unk_id", &unk, where, e);
    if (rc > 0 && (unk < 0 || (uint64_t)unk >= u->n))
        return err_set(e, ERR_FORMAT, "%s: unk_id %lld lies outside the vocabulary of %zu pieces",
                       where, (long long)unk, u->n);
    if (rc >= 0) rc = json_get_bool(j, "byte_fallback", &u->byte_fallback, where, e);
    u->unk = (int32_t)unk;
    if (rc >= 0) finish(m, u);
    return rc;
}

static void unigram_drop(tok_model *m)
{
    unigram *u = m->state;
    if (!u) return;
    tok__lexicon_drop(u->pieces);
    free(u->score);
    free(u);
}

/* ---- best path --------------------------------------------------------------------------------
 */

static void offer(const unigram *u, step *to, size_t from, int32_t id, double score, double sum)
{
    sum = u->single ? (double)(float)(score + sum) : score + sum;
    if (to->from >= 0 && !(sum > to->sum)) return;
    *to = (step){.sum = sum, .from = (int32_t)from, .id = id};
}

/* Keeps float sums near zero: nothing but differences matters. */
static void rebase(step *v, size_t at, size_t frontier)
{
    double by = v[at].sum;
    for (size_t i = at; i <= frontier; i++)
        if (i == at || v[i].from >= 0) v[i].sum = (double)(float)(v[i].sum - by);
}

static void find_path(const unigram *u, const char *s, size_t n, step *v)
{
    size_t frontier = 0;
    for (size_t i = 0; i <= n; i++)
        v[i] = (step){.from = -1, .id = -1};
    for (size_t i = 0; i < n;) {
        uint32_t cp, at = 0;
        size_t k = (size_t)tok__cp(s + i, n - i, &cp);
        if (u->single && fabs(v[i].sum) > (double)RESET) rebase(v, i, frontier);
        bool alone = false;
        for (size_t j = i; j < n && (at = tok__lexicon_step(u->pieces, at, (uint8_t)s[j])); j++) {
            int32_t id = tok__lexicon_value(u->pieces, at);
            if (id < 0) continue;
            size_t len = j + 1 - i;
            if (j + 1 > frontier) frontier = j + 1;
            offer(u, &v[j + 1], i, id, u->score[id], v[i].sum);
            alone = alone || len == k;
        }
        if (!alone) {
            if (i + k > frontier) frontier = i + k;
            offer(u, &v[i + k], i, u->unk, u->unk_score, v[i].sum);
        }
        i += k;
    }
}

/* A run of unknown characters: one token, or those of its bytes. */
static void add_unknown(const tok_model *m, const char *s, size_t n, ids *out)
{
    const unigram *u = m->state;
    int32_t whole = u->single ? -1 : tok__vocab_find(&m->vocab, s, n);
    if (whole >= 0) {
        ids_push(out, whole);
        return;
    }
    bool all = u->byte_fallback;
    for (size_t i = 0; i < n && all; i++)
        all = u->byte_id[(unsigned char)s[i]] >= 0;
    if (!all) ids_push(out, u->unk);
    for (size_t i = 0; i < n && all; i++)
        ids_push(out, u->byte_id[(unsigned char)s[i]]);
}

/* Turns the way back from the end into steps from the front: v[i].from becomes the end of the piece
 * that begins at i. */
static void turn_path(step *v, size_t n)
{
    int32_t end = (int32_t)n, id = v[n].id;
    for (int32_t at = v[n].from; end > 0;) {
        int32_t from = v[at].from, next_id = v[at].id;
        v[at].from = end;
        v[at].id = id;
        end = at;
        at = from;
        id = next_id;
    }
}

static int unigram_encode(const tok_model *m, tok_work *w, const char *s, size_t n, ids *out,
                          err *e)
{
    const unigram *u = m->state;
    if (!n) return 0;
    int rc = tok__work_memory(w, (n + 1) * sizeof(step), e);
    if (rc < 0) return rc;
    step *v = w->model_mem;
    find_path(u, s, n, v);
    turn_path(v, n);
    for (size_t i = 0; i < n;) {
        size_t end = (size_t)v[i].from;
        if (v[i].id < 0)
            return err_set(e, ERR_VALUE,
                           "tokenizer: byte %zu of a word is no piece of the vocabulary, and the "
                           "model names no unknown token (unk_id)",
                           i);
        if (v[i].id != u->unk) {
            ids_push(out, v[i].id);
        } else {
            while (end < n && v[end].id == u->unk)
                end = (size_t)v[end].from;
            add_unknown(m, s + i, end - i, out);
        }
        i = end;
    }
    return 0;
}

const tok_model_kind tok__unigram_kind = {"Unigram", unigram_load, unigram_encode, unigram_drop};

void tok__unigram_from_pieces(tok_model *m, const tok_pieces *p)
{
    unigram *u = m->state = xcalloc(1, sizeof *u);
    m->kind = &tok__unigram_kind;
    u->score = xcalloc(p->n + 1, sizeof *u->score);
    u->n = p->n;
    u->single = true;
    u->unk = p->unk;
    u->byte_fallback = p->byte_fallback;
    float low = INFINITY;
    size_t n = 0;
    tok_entry *list = xcalloc(p->n + 1, sizeof *list);
    for (size_t i = 0; i < p->n; i++) {
        const tok_piece *q = &p->v[i];
        if (q->type == TOK_PIECE_NORMAL && q->score < low) low = q->score;
        u->score[i] = q->type == TOK_PIECE_USER ? (double)(float)(0.1 * (double)(q->len - 1))
                                                : (double)q->score;
        if (q->type == TOK_PIECE_NORMAL || q->type == TOK_PIECE_USER)
            list[n++] = (tok_entry){q->s, q->len, (int32_t)i};
    }
    u->unk_score = (double)(low - (float)UNK_PENALTY);
    u->pieces = tok__lexicon_make(list, n);
    tok__byte_ids(&m->vocab, u->byte_id);
    free(list);
}
