/* Tokenizers from tokenizer.json (BPE, Unigram, WordPiece, WordLevel), with exact ids and text of
 * the Hugging Face `tokenizers` library, and from SentencePiece .model files. Added tokens are
 * found in the text first. */
#ifndef TEXT_TOKENIZER_H
#define TEXT_TOKENIZER_H
#include "base/mem.h"

typedef struct tokenizer tokenizer;
/* json: text of tokenizer.json, or the bytes of a SentencePiece model; config: text of
 * tokenizer_config.json ("" if none): eos/bos/pad names, add_bos_token. where names the file in
 * errors. */
int tokenizer_open(tokenizer **out, const char *json, size_t n, const char *config, size_t config_n,
                   const char *where, err *e);
void tokenizer_close(tokenizer *t);

typedef struct ids { /* growing list of token ids */
    int32_t *v;
    size_t n, cap;
} ids;
void ids_free(ids *l);
void ids_push(ids *l, int32_t id);

/* text must be valid UTF-8. add_special: run the post-processor (BOS and so on). */
int tokenizer_encode(const tokenizer *t, const char *text, size_t n, bool add_special, ids *out,
                     err *e);
/* The same with special tokens that stand in the text taken as plain text, as the library does with
 * encode_special_tokens. Added tokens that are not special are still found. */
int tokenizer_encode_literal(const tokenizer *t, const char *text, size_t n, bool add_special,
                             ids *out, err *e);
/* No post-processor; special tokens are plain text where they touch one of the stretches lo, hi. */
int tokenizer_encode_around(const tokenizer *t, const char *text, size_t n, const size_t *ranges,
                            size_t n_ranges, ids *out, err *e);
/* The next special token written in text[from, n) that an encoding would find there. */
bool tokenizer_find_special(const tokenizer *t, const char *text, size_t n, size_t from, size_t *lo,
                            size_t *hi);
/* Whole decode; skip_special drops special tokens. Bytes that are not UTF-8 become U+FFFD. Ids
 * outside the vocabulary (padded rows of the model) decode to nothing. */
void tokenizer_decode(const tokenizer *t, const int32_t *v, size_t n, bool skip_special, buf *out);
/* Raw bytes of one token as it appears inside text (byte-level undone); may be partial UTF-8. */
void tokenizer_token_bytes(const tokenizer *t, int32_t id, buf *out);
const char *tokenizer_token_name(const tokenizer *t, int32_t id); /* vocabulary string or NULL */
int32_t tokenizer_token_id(const tokenizer *t, const char *name); /* -1 if none */
int64_t tokenizer_size(const tokenizer *t);                       /* highest id + 1 */
bool tokenizer_is_special(const tokenizer *t, int32_t id);
int32_t tokenizer_eos(const tokenizer *t); /* -1 if none */
int32_t tokenizer_bos(const tokenizer *t);
const char *tokenizer_bos_text(const tokenizer *t); /* "" if none */
const char *tokenizer_eos_text(const tokenizer *t);
bool tokenizer_adds_bos(const tokenizer *t); /* encode(add_special) begins with BOS */

/* Incremental detokenizing: never emits half a character, and all that is emitted, the flush
 * included, is the text of the whole decode. (Except: byte tokens that turn out not to be UTF-8
 * become one U+FFFD for each broken sequence; characters in front of it are out already.) */
typedef struct detok {
    const tokenizer *t;
    bool skip_special;
    buf pending; /* bytes not yet emitted */
    bool first;  /* no text yet: SentencePiece-type decoders drop the space in front; clear it after
                  * detok_init where the tokens continue a text */
    ids seen;    /* tokens that decoders may still look at */
    int32_t held; /* token whose text depends on whether another follows, -1 = none */
} detok;
void detok_init(detok *d, const tokenizer *t, bool skip_special);
void detok_push(detok *d, int32_t id, buf *out); /* appends complete text */
void detok_flush(detok *d, buf *out);            /* rest, invalid tail as U+FFFD */
void detok_free(detok *d);
#endif
