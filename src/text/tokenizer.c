/* Encoding and decoding with a loaded tokenizer.
 *
 * encode: the text is cut at added tokens that are sought in the raw text; each piece between is
 * normalized and cut at the added tokens that are sought in normalized text; what remains goes
 * through pre-tokenizer and model by itself. Working memory is taken from a pool of the tokenizer,
 * so that one tokenizer serves many threads, each with a word cache of its own.
 *
 * decode: ids without a string vanish; special tokens vanish on demand; the decoder's stages run
 * over the list of strings. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/tok_internal.h"

#define KEEP_BYTES ((size_t)16 << 20) /* memory of one long word that is worth keeping */

struct tok_pool {
    pthread_mutex_t lock;
    tok_work *free;
};

void ids_free(ids *l)
{
    free(l->v);
    *l = (ids){0};
}

void ids_push(ids *l, int32_t id)
{
    if (l->n == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 32;
        l->v = xrealloc(l->v, l->cap * sizeof *l->v);
    }
    l->v[l->n++] = id;
}

/* ---- working memory ---------------------------------------------------------------------------
 */

static tok_work *work_take(const tokenizer *t)
{
    pthread_mutex_lock(&t->pool->lock);
    tok_work *w = t->pool->free;
    if (w) t->pool->free = w->next;
    pthread_mutex_unlock(&t->pool->lock);
    if (w) return w;
    w = xcalloc(1, sizeof *w);
    w->match = tok__match_make();
    w->cache = tok__cache_make();
    return w;
}

static void work_drop(tok_work *w)
{
    buf_free(&w->text);
    buf_free(&w->other);
    free(w->sp.v);
    free(w->sp_other.v);
    free(w->seg.v);
    tok__match_drop(w->match);
    tok__cache_drop(w->cache);
    mem_free(w->model_mem);
    free(w);
}

static void work_give(const tokenizer *t, tok_work *w)
{
    if (w->model_mem_bytes > KEEP_BYTES || w->text.cap > KEEP_BYTES || w->other.cap > KEEP_BYTES) {
        work_drop(w);
        return;
    }
    pthread_mutex_lock(&t->pool->lock);
    w->next = t->pool->free;
    t->pool->free = w;
    pthread_mutex_unlock(&t->pool->lock);
}

int tok__work_memory(tok_work *w, size_t bytes, err *e)
{
    if (w->model_mem_bytes >= bytes) return 0;
    mem_free(w->model_mem);
    w->model_mem = NULL;
    w->model_mem_bytes = 0;
    int rc = mem_alloc(&w->model_mem, bytes, e);
    if (rc == 0) w->model_mem_bytes = bytes;
    return rc;
}

void tokenizer_close(tokenizer *t)
{
    if (!t) return;
    while (t->pool && t->pool->free) {
        tok_work *w = t->pool->free;
        t->pool->free = w->next;
        work_drop(w);
    }
    if (t->pool) pthread_mutex_destroy(&t->pool->lock);
    free(t->pool);
    for (size_t i = 0; i < t->n_added; i++) {
        free(t->added[i].content);
        free(t->added[i].shown);
    }
    free(t->added);
    free(t->added_by_id);
    tok__vocab_drop(&t->added_names);
    tok__trie_drop(t->raw);
    tok__trie_drop(t->normalized);
    tok__stage_close(t->norm);
    tok__stage_close(t->pre);
    tok__stage_close(t->dec);
    tok__stage_close(t->post);
    if (t->model.kind) t->model.kind->drop(&t->model);
    tok__vocab_drop(&t->model.vocab);
    free(t->spm_bos);
    free(t->spm_eos);
    free(t->bos_text);
    free(t->eos_text);
    free(t->where);
    free(t);
}

static int normalize(const tokenizer *t, tok_work *w, err *e)
{
    if (!t->norm) return 0;
    int rc = t->norm->kind->normalize(t->norm, w, e);
    if (rc >= 0 && w->text.len > TOK_MAX_TEXT_BYTES)
        return err_set(e, ERR_LIMIT, "%s: normalizing makes the text longer than %zu bytes",
                       t->where, TOK_MAX_TEXT_BYTES);
    return rc;
}

/* Tables over the added tokens: by id, and the two tries. Normalized tokens are sought in the form
 * that the normalizer gives them. */
int tok__added_index(tokenizer *t, err *e)
{
    t->pool = xcalloc(1, sizeof *t->pool);
    pthread_mutex_init(&t->pool->lock, NULL);
    t->n_ids = t->model.vocab.n;
    for (size_t i = 0; i < t->n_added; i++)
        if ((size_t)t->added[i].id >= t->n_ids) t->n_ids = (size_t)t->added[i].id + 1;
    t->added_by_id = xmalloc((t->n_ids + 1) * sizeof *t->added_by_id);
    memset(t->added_by_id, 0xff, (t->n_ids + 1) * sizeof *t->added_by_id);
    t->raw = tok__trie_make();
    t->normalized = tok__trie_make();
    tok_work *w = work_take(t);
    int rc = 0;
    for (size_t i = 0; i < t->n_added && rc >= 0; i++) {
        tok_added *a = &t->added[i];
        t->added_by_id[a->id] = (int32_t)i;
        if (!a->normalized) {
            tok__trie_add(t->raw, a->content, a->len, (int32_t)i);
            continue;
        }
        buf_clear(&w->text);
        buf_add(&w->text, a->content, a->len);
        w->at_start = true;
        rc = normalize(t, w, e);
        if (rc >= 0) tok__trie_add(t->normalized, w->text.data, w->text.len, (int32_t)i);
        a->shown = xstrndup(w->text.data, w->text.len);
        a->shown_len = w->text.len;
    }
    work_give(t, w);
    return rc;
}

/* ---- encode -----------------------------------------------------------------------------------
 */

/* One encoding: where special tokens are not to be found. */
typedef struct job {
    const tokenizer *t;
    tok_work *w;
    bool literal;         /* anywhere */
    const size_t *ranges; /* lo, hi of stretches of the text */
    size_t n_ranges;
    ids *out;
} job;

static bool is_literal(const job *j, size_t lo, size_t hi)
{
    bool in = j->literal;
    for (size_t i = 0; i < j->n_ranges && !in; i++)
        in = lo < j->ranges[2 * i + 1] && hi > j->ranges[2 * i];
    return in;
}

/* The next added token at or after *from: its borders with the spaces that it swallows, but not
 * before `floor`; *from moves behind the match. */
static const tok_added *next_added(const job *j, const tok_trie *trie, const char *s, size_t n,
                                   size_t floor, size_t *from, size_t *lo, size_t *hi)
{
    int32_t at;
    uint32_t cp;
    while (tok__trie_find(trie, s, n, *from, lo, hi, &at)) {
        const tok_added *a = &j->t->added[at];
        *from = *hi;
        if (a->special && is_literal(j, *lo, *hi)) continue;
        if (a->single_word) {
            if (*lo > 0 && (tok__cp_before(s, *lo, &cp), tok__is_word(cp))) continue;
            if (*hi < n && (tok__cp(s + *hi, n - *hi, &cp), tok__is_word(cp))) continue;
        }
        if (a->lstrip && *lo < floor) *lo = floor; /* spaces that the match before has taken */
        while (a->lstrip && *lo > floor) {
            int k = tok__cp_before(s, *lo, &cp);
            if (!tok__is_space(cp)) break;
            *lo -= (size_t)k;
        }
        while (a->rstrip && *hi < n) {
            int k = tok__cp(s + *hi, n - *hi, &cp);
            if (!tok__is_space(cp)) break;
            *hi += (size_t)k;
        }
        return a;
    }
    return NULL;
}

/* Pre-tokenizer and model over normalized text without added tokens. */
static int encode_plain(const job *j, const char *s, size_t n, bool at_start, err *e)
{
    const tokenizer *t = j->t;
    tok_work *w = j->w;
    int rc = 0;
    if (!n) return 0;
    if (s != w->text.data) {
        buf_clear(&w->text);
        buf_add(&w->text, s, n);
    }
    w->at_start = at_start;
    w->sp.n = 0;
    tok__span_push(&w->sp, 0, n);
    if (t->pre) rc = t->pre->kind->split(t->pre, w, e);
    for (size_t i = 0; i < w->sp.n && rc >= 0; i++)
        rc = t->model.kind->encode(&t->model, w, w->text.data + w->sp.v[i].off, w->sp.v[i].len,
                                   j->out, e);
    return rc;
}

static int encode_piece(const job *j, const char *s, size_t n, bool at_start, err *e)
{
    const tokenizer *t = j->t;
    tok_work *w = j->w;
    if (!n) return 0;
    buf_clear(&w->text);
    buf_add(&w->text, s, n);
    w->at_start = at_start;
    int rc = normalize(t, w, e);
    if (rc < 0) return rc;
    if (tok__trie_empty(t->normalized))
        return encode_plain(j, w->text.data, w->text.len, at_start, e);
    buf whole = w->text; /* encode_plain rewrites w->text */
    w->text = (buf){0};
    size_t floor = 0, from = 0, lo, hi;
    const tok_added *a;
    while (rc >= 0 &&
           (a = next_added(j, t->normalized, whole.data, whole.len, floor, &from, &lo, &hi))) {
        if (lo > floor) rc = encode_plain(j, whole.data + floor, lo - floor, at_start && !floor, e);
        if (lo < hi) ids_push(j->out, a->id);
        floor = hi;
    }
    if (rc >= 0 && floor < whole.len)
        rc = encode_plain(j, whole.data + floor, whole.len - floor, at_start && !floor, e);
    buf_free(&whole);
    return rc;
}

static int encode_text(const job *j, const char *s, size_t n, err *e)
{
    size_t floor = 0, from = 0, lo, hi;
    const tok_added *a;
    int rc = 0;
    while (rc >= 0 && (a = next_added(j, j->t->raw, s, n, floor, &from, &lo, &hi))) {
        if (lo > floor) rc = encode_piece(j, s + floor, lo - floor, !floor, e);
        if (lo < hi) ids_push(j->out, a->id);
        floor = hi;
    }
    if (rc >= 0 && floor < n) rc = encode_piece(j, s + floor, n - floor, !floor, e);
    return rc;
}

static int encode(job *j, const char *text, size_t n, bool add_special, err *e)
{
    const tokenizer *t = j->t;
    ids *out = j->out;
    if (n > TOK_MAX_TEXT_BYTES)
        return err_set(e, ERR_LIMIT, "text of %zu bytes is longer than the limit of %zu", n,
                       TOK_MAX_TEXT_BYTES);
    size_t ok = n ? utf8_valid_prefix(text, n) : 0;
    if (ok != n)
        return err_set(e, ERR_VALUE, "text to tokenize is not valid UTF-8 at byte %zu", ok);
    const tok_stage *p = add_special ? t->post : NULL;
    size_t mark = out->n;
    if (add_special && t->force_bos) ids_push(out, t->bos);
    for (size_t i = 0; p && i < p->before.n; i++)
        ids_push(out, p->before.v[i]);
    j->w = work_take(t);
    int rc = encode_text(j, text, n, e);
    work_give(t, j->w);
    if (rc < 0) {
        out->n = mark;
        return rc;
    }
    for (size_t i = 0; p && i < p->after.n; i++)
        ids_push(out, p->after.v[i]);
    if (add_special && t->force_eos) ids_push(out, t->eos);
    return 0;
}

int tokenizer_encode(const tokenizer *t, const char *text, size_t n, bool add_special, ids *out,
                     err *e)
{
    return encode(&(job){.t = t, .out = out}, text, n, add_special, e);
}

int tokenizer_encode_literal(const tokenizer *t, const char *text, size_t n, bool add_special,
                             ids *out, err *e)
{
    return encode(&(job){.t = t, .out = out, .literal = true}, text, n, add_special, e);
}

int tokenizer_encode_around(const tokenizer *t, const char *text, size_t n, const size_t *ranges,
                            size_t n_ranges, ids *out, err *e)
{
    for (size_t i = 0; i < t->n_added; i++)
        if (t->added[i].special && t->added[i].normalized)
            return err_set(e, ERR_UNSUPPORTED,
                           "%s: the special token '%.60s' is sought in normalized text, so that "
                           "where it comes from cannot be told",
                           t->where, t->added[i].content);
    return encode(&(job){.t = t, .out = out, .ranges = ranges, .n_ranges = n_ranges}, text, n,
                  false, e);
}

bool tokenizer_find_special(const tokenizer *t, const char *text, size_t n, size_t from, size_t *lo,
                            size_t *hi)
{
    int32_t at;
    for (; tok__trie_find(t->raw, text, n, from, lo, hi, &at); from = *hi)
        if (t->added[at].special) return true;
    return false;
}

/* ---- names ------------------------------------------------------------------------------------
 */

const tok_added *tok__added(const tokenizer *t, int32_t id)
{
    if (id < 0 || (size_t)id >= t->n_ids || t->added_by_id[id] < 0) return NULL;
    return &t->added[t->added_by_id[id]];
}

const char *tok__name(const tokenizer *t, int32_t id, size_t *n)
{
    const tok_added *a = tok__added(t, id);
    if (!a) return tok__vocab_name(&t->model.vocab, id, n);
    if (n) *n = a->len;
    return a->content;
}

const char *tokenizer_token_name(const tokenizer *t, int32_t id)
{
    return tok__name(t, id, NULL);
}

int32_t tokenizer_token_id(const tokenizer *t, const char *name)
{
    int32_t at = tok__vocab_find(&t->added_names, name, strlen(name));
    return at >= 0 ? t->added[at].id : tok__vocab_find(&t->model.vocab, name, strlen(name));
}

int64_t tokenizer_size(const tokenizer *t)
{
    return (int64_t)t->n_ids;
}

bool tokenizer_is_special(const tokenizer *t, int32_t id)
{
    const tok_added *a = tok__added(t, id);
    return a && a->special;
}

int32_t tokenizer_eos(const tokenizer *t)
{
    return t->eos;
}

int32_t tokenizer_bos(const tokenizer *t)
{
    return t->bos;
}

const char *tokenizer_bos_text(const tokenizer *t)
{
    return t->bos_text;
}

const char *tokenizer_eos_text(const tokenizer *t)
{
    return t->eos_text;
}

bool tokenizer_adds_bos(const tokenizer *t)
{
    if (t->force_bos) return true;
    if (!t->post || !t->post->before.n) return false;
    return t->bos < 0 || t->post->before.v[0] == t->bos;
}

/* ---- decode -----------------------------------------------------------------------------------
 *
 * A token in the middle of a text is decoded with a word in front that shields it from the rules
 * for the first token, with the token before where a decoder compares neighbours, and with a word
 * behind where it treats the last one otherwise. */

#define SHIELD "x"

/* String that decoders see: of an added token that is sought in normalized text its normalized
 * form, as in the library. */
static const char *shown_name(const tokenizer *t, int32_t id, size_t *n)
{
    const tok_added *a = tok__added(t, id);
    if (!a || !a->shown) return tok__name(t, id, n);
    *n = a->shown_len;
    return a->shown;
}

/* What skip_special leaves out: as in the library, told by the string that decoders see. */
static bool is_hidden(const tokenizer *t, int32_t id)
{
    size_t n;
    if (!tokenizer_is_special(t, id)) return false;
    const char *s = shown_name(t, id, &n);
    int32_t at = tok__vocab_find(&t->added_names, s, n);
    return at >= 0 && t->added[at].special;
}

static void add_string(tok_strings *l, const char *s, size_t n)
{
    tok__span_push(&l->sp, l->bytes.len, n);
    buf_add(&l->bytes, s, n);
}

/* Decodes the list, appends the bytes and empties the list. */
static void decode_list(const tokenizer *t, tok_strings *l, buf *out)
{
    buf_puts(out, "");
    if (t->dec) t->dec->kind->decode(t->dec, l);
    for (size_t i = 0; i < l->sp.n; i++) {
        if (!t->dec && i) buf_putc(out, ' '); /* no decoder: tokens with spaces between */
        buf_add(out, l->bytes.data + l->sp.v[i].off, l->sp.v[i].len);
    }
    buf_free(&l->bytes);
    free(l->sp.v);
    *l = (tok_strings){0};
}

void tokenizer_decode(const tokenizer *t, const int32_t *v, size_t n, bool skip_special, buf *out)
{
    tok_strings l = {0};
    buf text = {0};
    buf_puts(&l.bytes, "");
    buf_puts(out, "");
    for (size_t i = 0; i < n; i++) {
        size_t len;
        const char *s = shown_name(t, v[i], &len);
        if (s && !(skip_special && is_hidden(t, v[i]))) add_string(&l, s, len);
    }
    decode_list(t, &l, &text);
    if (text.len) utf8_add_lossy(out, text.data, text.len);
    buf_free(&text);
}

static bool any_stage(const tok_stage *s, bool (*is)(const tok_stage *s))
{
    bool yes = s && is(s);
    for (size_t i = 0; s && i < s->n_child && !yes; i++)
        yes = any_stage(&s->child[i], is);
    return yes;
}

static bool compares(const tok_stage *s)
{
    return s->kind->neighbours == TOK_COMPARES;
}

static bool looks_ahead(const tok_stage *s)
{
    return s->kind->neighbours == TOK_LOOKS_AHEAD || s->stop > 0;
}

/* Raw bytes of the strings of v, between shields. */
static void decode_raw(const tokenizer *t, const int32_t *v, size_t n, bool front, bool behind,
                       buf *out)
{
    tok_strings l = {.raw_bytes = true};
    buf_puts(&l.bytes, "");
    if (front) add_string(&l, SHIELD, 1);
    for (size_t i = 0; i < n; i++) {
        size_t len;
        const char *s = shown_name(t, v[i], &len);
        if (s) add_string(&l, s, len);
    }
    if (behind) add_string(&l, SHIELD, 1);
    decode_list(t, &l, out);
}

/* Bytes that `id` adds behind `before` (-1: any token) inside a text. last: nothing follows. */
static void inner_bytes(const tokenizer *t, int32_t before, int32_t id, bool last, buf *out)
{
    buf with = {0}, without = {0};
    bool pair = before >= 0 && any_stage(t->dec, compares);
    bool behind = !last && any_stage(t->dec, looks_ahead);
    const int32_t v[2] = {before, id};
    decode_raw(t, pair ? v : v + 1, pair ? 2 : 1, true, behind, &with);
    decode_raw(t, v, pair ? 1 : 0, true, behind, &without);
    size_t tail = behind ? 1 : 0, skip = without.len - tail;
    if (with.len > skip + tail) buf_add(out, with.data + skip, with.len - tail - skip);
    buf_free(&with);
    buf_free(&without);
}

void tokenizer_token_bytes(const tokenizer *t, int32_t id, buf *out)
{
    buf_puts(out, "");
    inner_bytes(t, -1, id, false, out);
}

/* ---- incremental ------------------------------------------------------------------------------
 */

#define FRONT_TOKENS 256 /* tokens without any text that are remembered at the front of a text */

void detok_init(detok *d, const tokenizer *t, bool skip_special)
{
    *d = (detok){.t = t, .skip_special = skip_special, .first = true, .held = -1};
}

/* Takes a token into the text. Until there is text, all tokens are decoded together. */
static void take(detok *d, int32_t id, bool last)
{
    if (!d->first) {
        inner_bytes(d->t, d->seen.n ? d->seen.v[d->seen.n - 1] : -1, id, last, &d->pending);
        d->seen.n = 0;
        ids_push(&d->seen, id);
        return;
    }
    if (d->seen.n == FRONT_TOKENS)
        memmove(d->seen.v, d->seen.v + 1, --d->seen.n * sizeof *d->seen.v);
    ids_push(&d->seen, id);
    bool behind = !last && any_stage(d->t->dec, looks_ahead);
    decode_raw(d->t, d->seen.v, d->seen.n, false, behind, &d->pending);
    if (behind && d->pending.len) d->pending.data[--d->pending.len] = 0;
    if (d->pending.len) d->first = false;
}

void detok_push(detok *d, int32_t id, buf *out)
{
    buf_puts(out, "");
    if (!tok__name(d->t, id, NULL)) return;
    if (d->skip_special && is_hidden(d->t, id)) return;
    if (any_stage(d->t->dec, looks_ahead)) { /* one token late */
        int32_t held = d->held;
        d->held = id;
        if (held < 0) return;
        id = held;
    }
    take(d, id, false);
    size_t n = d->pending.len ? utf8_complete_prefix(d->pending.data, d->pending.len) : 0;
    if (!n) return;
    utf8_add_lossy(out, d->pending.data, n);
    memmove(d->pending.data, d->pending.data + n, d->pending.len - n);
    d->pending.len -= n;
    d->pending.data[d->pending.len] = 0;
}

void detok_flush(detok *d, buf *out)
{
    buf_puts(out, "");
    if (d->held >= 0) take(d, d->held, true);
    d->held = -1;
    if (d->pending.len) utf8_add_lossy(out, d->pending.data, d->pending.len);
    buf_clear(&d->pending);
}

void detok_free(detok *d)
{
    ids_free(&d->seen);
    buf_free(&d->pending);
}
