/* The models that look whole words up: WordPiece cuts a word into the longest pieces of the
 * vocabulary from the left, those behind the first under a prefix ("##"); WordLevel takes the word
 * or nothing. What has no cut is one unknown token; a model without that token refuses the text, as
 * the library does. Words of more than max_input_chars_per_word characters are unknown. */
#include <stdlib.h>
#include <string.h>
#include "text/tok_internal.h"

#define MAX_WORD_CHARS 1000000 /* of max_input_chars_per_word */

typedef struct words {
    int32_t unk; /* -1 = none */
    char *unk_name;
    tok_lexicon *pieces;
    uint32_t inside; /* node behind the prefix of pieces inside a word, 0 = there are none */
    bool no_prefix;  /* it is empty: pieces are the same everywhere */
    int64_t max_chars;
} words;

static int load_common(tok_model *m, words *v, const json *j, const char *unk, const char *type,
                       const char *where, err *e)
{
    int rc = tok__vocab_load(&m->vocab, j, type, where, e);
    if (rc >= 0) rc = tok__load_text(&v->unk_name, j, "unk_token", unk, where, e);
    if (rc < 0) return rc;
    v->unk = tok__vocab_find(&m->vocab, v->unk_name, strlen(v->unk_name));
    return 0;
}

static void make_lexicon(const tok_model *m, words *v, const char *prefix)
{
    tok_entry *list = xcalloc(m->vocab.n + 1, sizeof *list);
    size_t n = 0;
    for (size_t i = 0; i < m->vocab.n; i++) {
        tok_entry *t = &list[n];
        t->s = tok__vocab_name(&m->vocab, (int32_t)i, &t->len);
        t->value = (int32_t)i;
        if (t->s) n++;
    }
    v->pieces = tok__lexicon_make(list, n);
    free(list);
    v->no_prefix = !*prefix;
    for (const char *p = prefix; *p; p++)
        if (!(v->inside = tok__lexicon_step(v->pieces, v->inside, (uint8_t)*p))) break;
}

static int load_wordpiece(tok_model *m, const json *j, const char *where, err *e)
{
    words *v = m->state = xcalloc(1, sizeof *v);
    v->max_chars = 100;
    char *prefix = NULL;
    int rc = load_common(m, v, j, "[UNK]", "WordPiece", where, e);
    if (rc >= 0) rc = json_get_i64(j, "max_input_chars_per_word", &v->max_chars, where, e);
    if (rc >= 0) rc = tok__load_text(&prefix, j, "continuing_subword_prefix", "##", where, e);
    if (rc >= 0) make_lexicon(m, v, prefix);
    free(prefix);
    if (rc >= 0 && (v->max_chars < 0 || v->max_chars > MAX_WORD_CHARS))
        return err_set(e, ERR_FORMAT, "%s: max_input_chars_per_word is %lld; expected 0 to %d",
                       where, (long long)v->max_chars, MAX_WORD_CHARS);
    return rc < 0 ? rc : 0;
}

static int load_wordlevel(tok_model *m, const json *j, const char *where, err *e)
{
    words *v = m->state = xcalloc(1, sizeof *v);
    return load_common(m, v, j, "<unk>", "WordLevel", where, e);
}

static void words_drop(tok_model *m)
{
    words *v = m->state;
    if (!v) return;
    free(v->unk_name);
    tok__lexicon_drop(v->pieces);
    free(v);
}

static int add_unknown(const words *v, ids *out, err *e)
{
    if (v->unk < 0)
        return err_set(e, ERR_VALUE,
                       "tokenizer: a word is not in the vocabulary, and neither is the unknown "
                       "token '%.60s'",
                       v->unk_name);
    ids_push(out, v->unk);
    return 0;
}

static bool too_many_chars(const char *s, size_t n, int64_t most)
{
    int64_t chars = 0;
    for (size_t i = 0; i < n; i++)
        chars += ((unsigned char)s[i] & 0xC0) != 0x80;
    return chars > most;
}

/* Bytes of the longest piece that s[0, n) begins with, 0 if none. */
static size_t longest_piece(const words *v, const char *s, size_t n, bool inside, int32_t *id)
{
    size_t best = 0;
    uint32_t at = inside ? v->inside : 0;
    if (inside && !at && !v->no_prefix) return 0;
    for (size_t i = 0; i < n && (at = tok__lexicon_step(v->pieces, at, (uint8_t)s[i])); i++) {
        int32_t value = tok__lexicon_value(v->pieces, at);
        if (value < 0) continue;
        best = i + 1;
        *id = value;
    }
    return best;
}

static int encode_wordpiece(const tok_model *m, tok_work *w, const char *s, size_t n, ids *out,
                            err *e)
{
    const words *v = m->state;
    size_t mark = out->n;
    (void)w;
    if (too_many_chars(s, n, v->max_chars)) return add_unknown(v, out, e);
    size_t at = 0;
    for (size_t k; at < n; at += k) {
        int32_t id = -1;
        k = longest_piece(v, s + at, n - at, at > 0, &id);
        if (!k) break;
        ids_push(out, id);
    }
    if (at == n) return 0;
    out->n = mark;
    return add_unknown(v, out, e);
}

static int encode_wordlevel(const tok_model *m, tok_work *w, const char *s, size_t n, ids *out,
                            err *e)
{
    (void)w;
    int32_t id = tok__vocab_find(&m->vocab, s, n);
    if (id < 0) return add_unknown(m->state, out, e);
    ids_push(out, id);
    return 0;
}

const tok_model_kind tok__wordpiece_kind = {"WordPiece", load_wordpiece, encode_wordpiece,
                                            words_drop};
const tok_model_kind tok__wordlevel_kind = {"WordLevel", load_wordlevel, encode_wordlevel,
                                            words_drop};
