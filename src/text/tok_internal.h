/* Private to text/tok_*.c: the stages of a tokenizer and the memory that one encoding works in.
 *
 * encode:  text -> added tokens found -> normalizer -> added tokens found -> pre-tokenizer
 *          -> model (BPE) -> post-processor
 * decode:  ids -> token strings -> decoder -> text
 *
 * A stage is one object of tokenizer.json with a "type". Each family (normalizers, pre-tokenizers,
 * decoders, post-processors) is a const table of stage_kind rows; a new type is one more row. */
#ifndef TEXT_TOK_INTERNAL_H
#define TEXT_TOK_INTERNAL_H
#include "base/json.h"
#include "text/tokenizer.h"

/* Texts above this are refused, so that 32-bit offsets hold after the widest rewriting (x3). */
#define TOK_MAX_TEXT_BYTES ((size_t)1 << 29)
/* Ids above this are refused: a table by id must not be sized by one wild number. */
#define TOK_MAX_ID          ((int64_t)1 << 24)
#define TOK_MAX_STAGE_DEPTH 16

/* ---- vocabulary: string <-> id ------------------------------------------------------------- */
typedef struct tok_vocab {
    buf blob;      /* every string, NUL after each */
    uint32_t *off; /* by id; UINT32_MAX = id not used */
    uint32_t *len;
    size_t n, cap;  /* highest id + 1 */
    uint64_t *slot; /* open addressing: hash high half << 32 | id + 1; 0 = free */
    size_t mask, used;
} tok_vocab;
void tok__vocab_reserve(tok_vocab *v, size_t strings);
/* A string that is there already gets the new id; an id that is there already is an error. */
int tok__vocab_add(tok_vocab *v, const char *s, size_t n, int64_t id, const char *where, err *e);
/* As tok__vocab_add, but the old id of a string that is there already keeps its name. */
int tok__vocab_add_last(tok_vocab *v, const char *s, size_t n, int64_t id, const char *where,
                        err *e);
/* Ids of <0x00> ... <0xFF>, -1 where there is none. */
void tok__byte_ids(const tok_vocab *v, int32_t id[256]);
/* The object "vocab" of a model: string to id. */
int tok__vocab_load(tok_vocab *out, const json *j, const char *model, const char *where, err *e);
int32_t tok__vocab_find(const tok_vocab *v, const char *s, size_t n);
/* n <= TOK_MANY strings at once, id[i] = -1 where there is none; v is not empty. Faster than one by
 * one: the cache misses overlap. */
#define TOK_MANY 32
void tok__vocab_find_many(const tok_vocab *v, const char *const *s, const size_t *len, size_t n,
                          int32_t *id);
const char *tok__vocab_name(const tok_vocab *v, int32_t id, size_t *n); /* NULL if none */
void tok__vocab_drop(tok_vocab *v);
uint64_t tok__hash(const void *p, size_t n);

/* ---- strings sought as prefixes -------------------------------------------------------------- */
typedef struct tok_entry {
    const char *s;
    size_t len;
    int32_t value;
} tok_entry;
typedef struct tok_lexicon tok_lexicon;
tok_lexicon *tok__lexicon_make(tok_entry *list, size_t n); /* sorts the list; keeps no pointer */
void tok__lexicon_drop(tok_lexicon *l);
/* Node behind `byte` from node at (0 = root), 0 if no string goes on so. */
uint32_t tok__lexicon_step(const tok_lexicon *l, uint32_t at, uint8_t byte);
int32_t tok__lexicon_value(const tok_lexicon *l, uint32_t at); /* -1 = no string ends here */
/* Bytes of the longest string that s[0, n) begins with, 0 if none. */
size_t tok__lexicon_longest(const tok_lexicon *l, const char *s, size_t n, int32_t *value);

/* ---- regular expressions (PCRE2, JIT) ------------------------------------------------------ */
typedef struct tok_regex tok_regex;
typedef struct tok_match tok_match; /* what one thread needs to match */
int tok__regex_open(tok_regex **out, const char *pattern, size_t n, const char *where, err *e);
int tok__regex_literal(tok_regex **out, const char *text, size_t n, const char *where, err *e);
bool tok__regex_is_literal(const tok_regex *r); /* its pattern is plain text */
void tok__regex_close(tok_regex *r);
tok_match *tok__match_make(void);
void tok__match_drop(tok_match *m);
/* First match in s[from, n): 1 and its borders, 0 none, negative error. s is valid UTF-8. */
int tok__regex_next(const tok_regex *r, tok_match *m, const char *s, size_t n, size_t from,
                    size_t *lo, size_t *hi, err *e);

/* ---- character classes as Rust has them ---------------------------------------------------- */
bool tok__is_space(uint32_t cp);   /* White_Space */
bool tok__is_word(uint32_t cp);    /* \w of the regex crate */
bool tok__is_numeric(uint32_t cp); /* Nd Nl No */
bool tok__is_punct(uint32_t cp);   /* ASCII punctuation or P* */
/* Decodes at s (valid UTF-8): never 0 bytes for n > 0. */
int tok__cp(const char *s, size_t n, uint32_t *cp);
int tok__cp_before(const char *s, size_t n, uint32_t *cp); /* the last one of s[0, n) */

typedef enum tok_class { /* tables of the library's own Unicode versions: tok_unicode.def */
                         TOK_WORD, /* \\w of its regular expressions */
                         TOK_NUMERIC,
                         TOK_PUNCT,
                         TOK_OTHER,      /* control, format, private: what BertNormalizer drops */
                         TOK_NONSPACING, /* what BertNormalizer strips as accents */
                         TOK_COMBINING,  /* what StripAccents drops */
                         TOK_CLASSES
} tok_class;
bool tok__is(tok_class c, uint32_t cp);
/* Lower case; 1 or 2 code points in to[]. */
int tok__lower(uint32_t cp, uint32_t to[2]);
/* Number of the script as pre-tokenizer UnicodeScripts has it. */
int tok__script(uint32_t cp);
/* The library's tables of decompositions and combining classes do not know it yet. */
bool tok__is_foreign(uint32_t cp);
/* General category (utf8proc's number) as the library's regular expressions have it. */
int tok__category(uint32_t cp);
/* *out = text with characters that PCRE2's older Unicode puts into another category replaced by one
 * of the right category and of as many bytes; false (and nothing written) if it has none. */
bool tok__stand_in(const char *s, size_t n, buf *out);
/* Bytes of the grapheme cluster at s. */
size_t tok__grapheme(const char *s, size_t n);

/* ---- precompiled character maps --------------------------------------------------------------
 */
typedef struct tok_charsmap tok_charsmap;
int tok__charsmap_open(tok_charsmap **out, const void *blob, size_t n, const char *where, err *e);
int tok__charsmap_base64(tok_charsmap **out, const char *text, const char *where, err *e);
void tok__charsmap_close(tok_charsmap *m);
/* Bytes that the longest (or the shortest) rule at s takes, 0 = no rule; what it writes. */
size_t tok__charsmap_find(const tok_charsmap *m, const char *s, size_t n, bool longest,
                          const char **to, size_t *n_to);
void tok__charsmap_graphemes(const tok_charsmap *m, const char *s, size_t n, buf *out);

/* ---- working memory ------------------------------------------------------------------------ */
typedef struct tok_span {
    uint32_t off, len;
} tok_span;

typedef struct tok_spans {
    tok_span *v;
    size_t n, cap;
} tok_spans;
void tok__spans_grow(tok_spans *l);
static inline void tok__span_push(tok_spans *l, size_t off, size_t len)
{
    if (l->n == l->cap) tok__spans_grow(l);
    l->v[l->n++] = (tok_span){(uint32_t)off, (uint32_t)len};
}

typedef struct tok_cache tok_cache; /* word -> ids, of one model */

typedef struct tok_work {
    struct tok_work *next;  /* free list of the tokenizer */
    buf text, other;        /* text of the piece in hand; the one being written */
    tok_spans sp, sp_other; /* its words */
    tok_spans seg;          /* matches of one word, `len` with the top bit for "is a match" */
    bool at_start;          /* the piece begins where the whole text begins */
    tok_match *match;
    tok_cache *cache;
    void *model_mem; /* symbols and heap of long words */
    size_t model_mem_bytes;
    ids out;
} tok_work;
int tok__work_memory(tok_work *w, size_t bytes, err *e); /* model_mem holds at least bytes */

/* ---- stages -------------------------------------------------------------------------------- */
typedef struct tok_strings { /* list of byte strings for decoders */
    buf bytes;
    tok_spans sp;
    bool raw_bytes; /* streaming: byte tokens stay bytes */
} tok_strings;

typedef struct tok_stage tok_stage;
typedef struct tok_family tok_family;
typedef struct tok_stage_kind {
    const char *type;
    int (*load)(tok_stage *s, const json *j, const char *where, err *e); /* may be NULL */
    /* the one of its family; post-processors need none: load fills before and after */
    int (*normalize)(const tok_stage *s, tok_work *w, err *e); /* rewrites w->text */
    int (*split)(const tok_stage *s, tok_work *w, err *e);     /* rewrites w->sp and w->text */
    void (*decode)(const tok_stage *s, tok_strings *l);        /* rewrites the list */
    int neighbours;                                            /* of decoders: TOK_COMPARES … */
} tok_stage_kind;
/* A decoder for which the token before counts, or whether a token follows. */
enum { TOK_COMPARES = 1, TOK_LOOKS_AHEAD };

struct tok_family {
    const char *name;     /* "pre-tokenizer", for messages */
    const char *list_key; /* "pretokenizers": children of Sequence */
    const tok_stage_kind *kinds;
    size_t n;
};
extern const tok_family tok__normalizers, tok__pretokenizers, tok__decoders, tok__postprocessors;

enum { TOK_ISOLATED, TOK_REMOVED, TOK_MERGED_PREVIOUS, TOK_MERGED_NEXT, TOK_CONTIGUOUS };

struct tok_stage {
    const tok_stage_kind *kind;
    tok_stage *child; /* of Sequence */
    size_t n_child;
    tok_regex *re;
    char *text, *content; /* pattern or replaced character; what it becomes */
    int behavior;         /* TOK_ISOLATED … */
    bool invert, prefix_space, use_regex, individual, left, right, split;
    bool clean, chinese, accents, lower; /* BertNormalizer; clean also: decoders that tidy */
    tok_charsmap *map;
    tok_lexicon *lexicon; /* user-defined pieces */
    size_t length;        /* FixedLength */
    int prepend;          /* Metaspace: 0 never, 1 first, 2 always */
    int64_t start, stop;  /* decoder Strip */
    ids before, after;    /* TemplateProcessing: ids around the sequence */
};
/* j null or absent: *out = NULL. */
int tok__stage_open(tok_stage **out, const json *j, const tok_family *f, const char *where, err *e);
void tok__stage_close(tok_stage *s);
int tok__load_children(tok_stage *s, const json *j, const tok_family *f, const char *where, err *e);
/* A required or defaulted string of a stage; *out is a copy. */
int tok__load_text(char **out, const json *j, const char *key, const char *fallback,
                   const char *where, err *e);
int tok__load_pattern(tok_stage *s, const json *j, const char *where, err *e);

void tok__bytelevel_init(void);
extern char tok__byte_char[256][2]; /* UTF-8 of the character that stands for a byte … */
extern uint8_t tok__byte_char_len[256];
/* … and back; -1 if cp stands for no byte */
int tok__char_byte(uint32_t cp);
extern const char tok__gpt2_pattern[];

/* ---- model --------------------------------------------------------------------------------- */
typedef struct tok_model tok_model;
typedef struct tok_model_kind {
    const char *type;
    int (*load)(tok_model *m, const json *j, const char *where, err *e);
    int (*encode)(const tok_model *m, tok_work *w, const char *s, size_t n, ids *out, err *e);
    void (*drop)(tok_model *m);
} tok_model_kind;
struct tok_model {
    const tok_model_kind *kind;
    tok_vocab vocab;
    void *state;
};
extern const tok_model_kind tok__bpe_kind, tok__unigram_kind, tok__wordpiece_kind,
    tok__wordlevel_kind;
extern const tok_model_kind *const tok__models[];
extern const size_t tok__n_models;

/* ---- SentencePiece models ----------------------------------------------------------------------
 */
enum {
    TOK_PIECE_NORMAL = 1,
    TOK_PIECE_UNKNOWN,
    TOK_PIECE_CONTROL,
    TOK_PIECE_USER,
    TOK_PIECE_UNUSED,
    TOK_PIECE_BYTE
};
typedef struct tok_piece {
    const char *s; /* in the file */
    size_t len;
    float score;
    int type;
} tok_piece;
typedef struct tok_pieces {
    tok_piece *v;
    size_t n;
    int32_t unk; /* -1 = none */
    bool byte_fallback;
    tok_lexicon *user; /* user-defined pieces, NULL = none; owned by the normalizer */
} tok_pieces;
/* Fills the stages, model and control tokens of t from a .model file. */
int tok__spm_load(tokenizer *t, const void *bytes, size_t n, err *e);
/* Offset of the first U+2581 that stands behind another character, 0 if there is none. */
size_t tok__inner_mark(const char *s, size_t n);
/* "<0x41>" -> 0x41, else -1 */
int tok__byte_token(const char *p, size_t n);
/* The vocabulary of m is filled already. */
void tok__unigram_from_pieces(tok_model *m, const tok_pieces *p);
void tok__spmbpe_from_pieces(tok_model *m, const tok_pieces *p);
tok_cache *tok__cache_make(void);
void tok__cache_drop(tok_cache *c);
/* Ids of a word seen before (count in *n), or NULL. */
const int32_t *tok__cache_get(const tok_cache *c, const char *s, size_t len, uint64_t hash,
                              size_t *n);
void tok__cache_put(tok_cache *c, const char *s, size_t len, uint64_t hash, const int32_t *v,
                    size_t n);

/* ---- added tokens -------------------------------------------------------------------------- */
typedef struct tok_added {
    char *content, *shown; /* shown: what decoders see; NULL = content */
    size_t len, shown_len;
    int32_t id;
    bool special, normalized, lstrip, rstrip, single_word;
} tok_added;
typedef struct tok_trie tok_trie;
tok_trie *tok__trie_make(void);
void tok__trie_drop(tok_trie *t);
void tok__trie_add(tok_trie *t, const char *s, size_t n, int32_t value);
bool tok__trie_empty(const tok_trie *t);
/* Leftmost, then longest; false if none at or after from. */
bool tok__trie_find(const tok_trie *t, const char *s, size_t n, size_t from, size_t *lo, size_t *hi,
                    int32_t *value);

struct tokenizer {
    char *where;
    tok_model model;
    tok_stage *norm, *pre, *dec, *post;
    tok_added *added;
    size_t n_added, cap_added;
    int64_t top_added;    /* id of the last that is not in the vocabulary, -1 = none */
    int32_t *added_by_id; /* index into added, -1 = none; n_ids entries */
    size_t n_ids;
    tok_vocab added_names; /* content -> index in added */
    tok_trie *raw, *normalized;
    int32_t bos, eos;
    char *bos_text, *eos_text;
    bool force_bos, force_eos;
    bool is_spm, spm_bpe;    /* from a .model file, of type BPE */
    char *spm_bos, *spm_eos; /* its names for them */
    struct tok_pool *pool;
};
const tok_added *tok__added(const tokenizer *t, int32_t id);
/* String of a token as the vocabulary has it, NULL if the id has none. */
const char *tok__name(const tokenizer *t, int32_t id, size_t *n);
/* encode without the post-processor's ids; w is a work of this tokenizer */
int tok__config_load(tokenizer *t, const json *config, err *e);
int tok__added_load(tokenizer *t, const json *root, const json *config, err *e);
int tok__added_index(tokenizer *t, err *e);
/* A token of the vocabulary becomes an added, special one. */
int tok__added_special(tokenizer *t, const char *name, err *e);
#endif
