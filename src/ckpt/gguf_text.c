/* tokenizer.json, tokenizer_config.json and the chat template made from tokenizer.ggml.*.
 *
 * A GGUF names its pre-tokenizer (tokenizer.ggml.pre) where tokenizer.json spells it out: the table
 * `pre_rows` holds the spelling that the original tokenizer.json of those models has. A name that
 * is not in the table is refused, since guessing would give other ids without a word.
 *
 * Four models are known. "gpt2": byte-level BPE, tokens and merges as they are. "llama":
 * SentencePiece BPE, which has scores in place of merges; merges are made as transformers makes
 * them: every split of a piece into two pieces, in the order of the merged piece's score. "t5":
 * SentencePiece unigram, scores as they are, the character map as Precompiled. "bert": WordPiece,
 * whose tokens begin with U+2581 at the start of a word and with nothing inside it, where
 * tokenizer.json has nothing and "##"; it is uncased if no token has a capital letter of ASCII.
 *
 * Token types: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte. Types 2 to 4
 * become added tokens; [PADn] fillers of type 5 are left out. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include "base/log.h"
#include "base/utf8.h"
#include "ckpt/ckpt_internal.h"

enum { T_NORMAL = 1, T_UNKNOWN, T_CONTROL, T_USER, T_UNUSED, T_BYTE };

typedef struct pre_row {
    const char *names;   /* of tokenizer.ggml.pre, blank separated */
    const char *pattern; /* Split regex; NULL = GPT-2's own, inside ByteLevel */
    bool digits;         /* single digits before GPT-2's pattern */
    bool nfc, ignore_merges, add_bos;
} pre_row;

#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define TAIL         "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define LOWERED      "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER        "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define NOT_WORD     "[^\\r\\n\\p{L}\\p{N}]?"

static const pre_row pre_rows[] = {
    {.names = "gpt-2 gpt2 default phi-2 mpt jais trillion granite-docling gigachat exaone4 a.x-4.0 "
              "mellum"},
    {.names = "olmo", .nfc = true},
    {.names = "smollm starcoder refact command-r codeshell exaone minerva-7b", .digits = true},
    {.names = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
     .pattern = CONTRACTIONS "|" NOT_WORD "\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" TAIL,
     .ignore_merges = true,
     .add_bos = true},
    {.names = "dbrx smaug-bpe",
     .pattern =
         CONTRACTIONS "|" NOT_WORD "\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" TAIL},
    {.names = "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan kormo",
     .pattern = CONTRACTIONS "|" NOT_WORD "\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" TAIL,
     .nfc = true},
    {.names = "qwen35",
     .pattern = CONTRACTIONS "|" NOT_WORD
                             "[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*" TAIL,
     .nfc = true},
    {.names = "gpt-4o llama4 kanana2",
     .pattern =
         NOT_WORD LOWERED "*" LOWER "+" CONTRACTIONS "?|" NOT_WORD LOWERED "+" LOWER
                          "*" CONTRACTIONS "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" TAIL,
     .ignore_merges = true},
    {.names = "tekken",
     .pattern = NOT_WORD LOWERED "*" LOWER "+|" NOT_WORD LOWERED "+" LOWER
                                 "*|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" TAIL,
     .ignore_merges = true,
     .add_bos = true},
};

typedef enum kind { GPT2, LLAMA, T5, BERT } kind;

typedef struct vocab {
    const ckpt *c;
    const gguf_file *g;
    const char *path;
    const gguf_str *tokens;
    const int64_t *types; /* NULL = all normal */
    const double *scores; /* NULL = none */
    const gguf_kv *merges;
    size_t n;
    kind kind;
    bool spm, cased;    /* spm: llama or t5 */
    const pre_row *pre; /* of gpt2 */
    uint32_t *hash;     /* id + 1; 0 = free */
    size_t n_hash;
    err *e;
} vocab;

static bool word_in(const char *words, gguf_str w)
{
    for (const char *p = words; *p;) {
        size_t n = strcspn(p, " ");
        if (n == w.n && !memcmp(p, w.s, n)) return true;
        p += n + (p[n] == ' ');
    }
    return false;
}

static bool is_text(gguf_str s, const char *text)
{
    return s.n == strlen(text) && !memcmp(s.s, text, s.n);
}

/* ---- vocabulary ---------------------------------------------------------------------------------
 */

static size_t slot_of(const vocab *v, const char *s, size_t n)
{
    size_t i = (size_t)XXH3_64bits(s, n) & (v->n_hash - 1);
    for (; v->hash[i]; i = (i + 1) & (v->n_hash - 1)) {
        const gguf_str *t = &v->tokens[v->hash[i] - 1];
        if (t->n == n && !memcmp(t->s, s, n)) break;
    }
    return i;
}

static int64_t id_of(const vocab *v, const char *s, size_t n)
{
    return (int64_t)v->hash[slot_of(v, s, n)] - 1;
}

/* Text to id; a text that is there twice keeps the first id. */
static int build_hash(vocab *v)
{
    v->n_hash = 16;
    while (v->n_hash < 2 * v->n + 1)
        v->n_hash *= 2;
    v->hash = xcalloc(v->n_hash, sizeof *v->hash);
    for (size_t i = 0; i < v->n; i++) {
        gguf_str t = v->tokens[i];
        if (utf8_valid_prefix(t.s, t.n) != t.n || memchr(t.s, 0, t.n))
            return err_set(v->e, ERR_FORMAT,
                           "%s: token %zu of tokenizer.ggml.tokens is not UTF-8 text", v->path, i);
        size_t slot = slot_of(v, t.s, t.n);
        if (!v->hash[slot]) v->hash[slot] = (uint32_t)i + 1;
    }
    return 0;
}

static int64_t type_of(const vocab *v, size_t i)
{
    return v->types ? v->types[i] : T_NORMAL;
}

static bool is_added(const vocab *v, size_t i)
{
    int64_t t = type_of(v, i);
    return t == T_UNKNOWN || t == T_CONTROL || t == T_USER;
}

/* Fillers that a converter added so that the vocabulary has as many tokens as the embedding. */
static bool is_filler(const vocab *v, size_t i)
{
    gguf_str t = v->tokens[i];
    return type_of(v, i) == T_UNUSED && t.n > 5 && !memcmp(t.s, "[PAD", 4);
}

static int read_lists(vocab *v)
{
    const gguf_kv *tokens = NULL, *types = NULL, *scores = NULL;
    int rc = 0;
    TRY(gguf_get_arr(v->g, "tokenizer.ggml.tokens", GGUF_STR, &tokens, v->e));
    TRY(gguf_get_arr(v->g, "tokenizer.ggml.token_type", GGUF_I64, &types, v->e));
    TRY(gguf_get_arr(v->g, "tokenizer.ggml.scores", GGUF_F64, &scores, v->e));
    TRY(gguf_get_arr(v->g, "tokenizer.ggml.merges", GGUF_STR, &v->merges, v->e));
    rc = 0;
    if (!tokens || !tokens->n)
        rc = err_set(v->e, ERR_MISSING, "%s: key 'tokenizer.ggml.tokens' is missing or empty",
                     v->path);
    else if ((types && types->n != tokens->n) || (scores && scores->n != tokens->n))
        rc = err_set(v->e, ERR_SHAPE,
                     "%s: %" PRIu64 " tokens, but %" PRIu64 " types and %" PRIu64 " scores",
                     v->path, tokens->n, types ? types->n : 0, scores ? scores->n : 0);
    if (rc < 0) goto out;
    v->tokens = tokens->arr;
    v->n = (size_t)tokens->n;
    v->types = types ? types->arr : NULL;
    v->scores = scores ? scores->arr : NULL;
out:
    return rc < 0 ? rc : 0;
}

static int find_pre(vocab *v)
{
    gguf_str pre = {"default", 7};
    int rc = gguf_get_str(v->g, "tokenizer.ggml.pre", &pre, v->e);
    if (rc < 0) return rc;
    if (!rc || is_text(pre, "default"))
        log_warn("%s: the pre-tokenizer is not named; GPT-2's is taken", v->path);
    buf known = {0};
    for (size_t i = 0; i < sizeof pre_rows / sizeof *pre_rows; i++) {
        if (word_in(pre_rows[i].names, pre)) {
            v->pre = &pre_rows[i];
            buf_free(&known);
            return 0;
        }
        buf_printf(&known, "%s%s", i ? " " : "", pre_rows[i].names);
    }
    rc = err_set(v->e, ERR_UNSUPPORTED,
                 "%s: pre-tokenizer '%.*s' (tokenizer.ggml.pre) is not known; known are: %s. Put "
                 "the model's own tokenizer.json beside converted weights instead",
                 v->path, (int)(pre.n > 60 ? 60 : pre.n), pre.s, known.data);
    buf_free(&known);
    return rc;
}

static int find_kind(vocab *v, gguf_str model)
{
    static const char *const names[] = {
        [GPT2] = "gpt2", [LLAMA] = "llama", [T5] = "t5", [BERT] = "bert"};
    for (int i = GPT2; i <= BERT; i++) {
        if (!is_text(model, names[i])) continue;
        v->kind = (kind)i;
        v->spm = i == LLAMA || i == T5;
        return 0;
    }
    return err_set(v->e, ERR_UNSUPPORTED,
                   "%s: tokenizer model '%.*s' (tokenizer.ggml.model) is not known; known are "
                   "gpt2, llama, t5, bert",
                   v->path, (int)(model.n > 60 ? 60 : model.n), model.s ? model.s : "");
}

static bool has_capitals(const vocab *v)
{
    for (size_t i = 0; i < v->n; i++)
        for (size_t k = 0; type_of(v, i) == T_NORMAL && k < v->tokens[i].n; k++)
            if (v->tokens[i].s[k] >= 'A' && v->tokens[i].s[k] <= 'Z') return true;
    return false;
}

static int vocab_open(vocab *v, const ckpt *c, err *e)
{
    gguf_str model = {0};
    int rc = 0;
    *v = (vocab){.c = c, .g = &c->gguf, .path = c->path, .e = e};
    TRY(gguf_get_str(v->g, "tokenizer.ggml.model", &model, e));
    TRY(find_kind(v, model));
    TRY(read_lists(v));
    if (v->kind == GPT2) TRY(find_pre(v));
    if (v->kind == GPT2 && !v->merges) {
        rc = err_set(e, ERR_MISSING, "%s: key 'tokenizer.ggml.merges' is missing", v->path);
        goto out;
    }
    if (v->spm && !v->scores && (v->kind == T5 || !v->merges)) {
        rc = err_set(e, ERR_MISSING, "%s: key 'tokenizer.ggml.scores' is missing", v->path);
        goto out;
    }
    rc = build_hash(v);
    v->cased = v->kind == BERT && has_capitals(v);
out:
    return rc < 0 ? rc : 0;
}

static void vocab_close(vocab *v)
{
    free(v->hash);
}

/* ---- pieces of tokenizer.json -------------------------------------------------------------------
 */

static int bool_key(const vocab *v, const char *key, bool *out)
{
    int64_t x = *out;
    int rc = gguf_get_i64(v->g, key, &x, v->e);
    *out = x != 0;
    return rc;
}

static void key_token(jw *w, gguf_str s)
{
    char small[256], *text = s.n < sizeof small ? small : xmalloc(s.n + 1);
    memcpy(text, s.s, s.n);
    text[s.n] = 0;
    jw_key(w, text);
    if (text != small) free(text);
}

static void write_added(const vocab *v, jw *w)
{
    jw_key(w, "added_tokens");
    jw_arr(w);
    for (size_t i = 0; i < v->n; i++) {
        if (!is_added(v, i) || !v->tokens[i].n) continue;
        jw_obj(w);
        jw_ki64(w, "id", (int64_t)i);
        jw_key(w, "content");
        jw_strn(w, v->tokens[i].s, v->tokens[i].n);
        jw_kbool(w, "single_word", false);
        jw_kbool(w, "lstrip", false);
        jw_kbool(w, "rstrip", false);
        jw_kbool(w, "normalized", false);
        jw_kbool(w, "special", type_of(v, i) != T_USER);
        jw_end_obj(w);
    }
    jw_end_arr(w);
}

static void write_replace(jw *w, const char *from, const char *to)
{
    jw_obj(w);
    jw_kstr(w, "type", "Replace");
    jw_key(w, "pattern");
    jw_obj(w);
    jw_kstr(w, "String", from);
    jw_end_obj(w);
    jw_kstr(w, "content", to);
    jw_end_obj(w);
}

static void write_type(jw *w, const char *type)
{
    jw_obj(w);
    jw_kstr(w, "type", type);
    jw_end_obj(w);
}

#define SPACE_MARK "\xE2\x96\x81" /* U+2581, SentencePiece's space */

static void write_regex_replace(jw *w, const char *pattern, const char *to)
{
    jw_obj(w);
    jw_kstr(w, "type", "Replace");
    jw_key(w, "pattern");
    jw_obj(w);
    jw_kstr(w, "Regex", pattern);
    jw_end_obj(w);
    jw_kstr(w, "content", to);
    jw_end_obj(w);
}

static void write_base64(jw *w, const int64_t *v, size_t n)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    buf b = {0};
    buf_puts(&b, "");
    for (size_t i = 0; i < n; i += 3) {
        uint32_t x = 0;
        for (size_t k = i; k < i + 3; k++)
            x = x << 8 | (k < n ? (uint32_t)v[k] & 0xFF : 0);
        for (size_t k = 0; k < 4; k++)
            buf_putc(&b, i + k > n ? '=' : digits[x >> (18 - 6 * k) & 63]);
    }
    jw_strn(w, b.data, b.len);
    buf_free(&b);
}

/* The character map, then, as SentencePiece has it, no spaces at the ends and no more than one
 * between words. */
static int write_t5_normalizer(const vocab *v, jw *w)
{
    const gguf_kv *map = NULL;
    bool trim = true;
    int rc = gguf_get_arr(v->g, "tokenizer.ggml.precompiled_charsmap", GGUF_I64, &map, v->e);
    if (rc >= 0) rc = bool_key(v, "tokenizer.ggml.remove_extra_whitespaces", &trim);
    if (rc < 0) return rc;
    jw_obj(w);
    jw_kstr(w, "type", "Sequence");
    jw_key(w, "normalizers");
    jw_arr(w);
    if (map && map->n) {
        jw_obj(w);
        jw_kstr(w, "type", "Precompiled");
        jw_key(w, "precompiled_charsmap");
        write_base64(w, map->arr, (size_t)map->n);
        jw_end_obj(w);
    }
    if (trim) {
        write_regex_replace(w, "\\A +| +\\z", "");
        write_regex_replace(w, " {2,}", " ");
    }
    jw_end_arr(w);
    jw_end_obj(w);
    return 0;
}

static int write_normalizer(const vocab *v, jw *w, bool prefix)
{
    jw_key(w, "normalizer");
    if (v->kind == BERT) {
        jw_obj(w);
        jw_kstr(w, "type", "BertNormalizer");
        jw_kbool(w, "clean_text", true);
        jw_kbool(w, "handle_chinese_chars", true);
        jw_kstr(w, "strip_accents", NULL);
        jw_kbool(w, "lowercase", !v->cased);
        jw_end_obj(w);
        return 0;
    }
    if (v->kind == T5) return write_t5_normalizer(v, w);
    if (!v->spm) {
        if (v->pre->nfc)
            write_type(w, "NFC");
        else
            jw_null(w);
        return 0;
    }
    jw_obj(w);
    jw_kstr(w, "type", "Sequence");
    jw_key(w, "normalizers");
    jw_arr(w);
    if (prefix) {
        jw_obj(w);
        jw_kstr(w, "type", "Prepend");
        jw_kstr(w, "prepend", SPACE_MARK);
        jw_end_obj(w);
    }
    write_replace(w, " ", SPACE_MARK);
    jw_end_arr(w);
    jw_end_obj(w);
    return 0;
}

static void write_byte_level(jw *w, bool trim, bool regex)
{
    jw_obj(w);
    jw_kstr(w, "type", "ByteLevel");
    jw_kbool(w, "add_prefix_space", false);
    jw_kbool(w, "trim_offsets", trim);
    jw_kbool(w, "use_regex", regex);
    jw_end_obj(w);
}

static void write_split(jw *w, const char *pattern)
{
    jw_obj(w);
    jw_kstr(w, "type", "Split");
    jw_key(w, "pattern");
    jw_obj(w);
    jw_kstr(w, "Regex", pattern);
    jw_end_obj(w);
    jw_kstr(w, "behavior", "Isolated");
    jw_kbool(w, "invert", false);
    jw_end_obj(w);
}

static void write_metaspace(jw *w, bool prefix)
{
    jw_obj(w);
    jw_kstr(w, "type", "Metaspace");
    jw_kstr(w, "replacement", SPACE_MARK);
    jw_kstr(w, "prepend_scheme", prefix ? "always" : "never");
    jw_kbool(w, "split", true);
    jw_end_obj(w);
}

static void write_pre(const vocab *v, jw *w, bool prefix)
{
    jw_key(w, "pre_tokenizer");
    if (v->kind == T5) {
        write_metaspace(w, prefix);
        return;
    }
    if (v->kind == BERT) {
        write_type(w, "BertPreTokenizer");
        return;
    }
    if (v->spm) {
        jw_null(w);
        return;
    }
    if (!v->pre->digits && !v->pre->pattern) {
        write_byte_level(w, true, true);
        return;
    }
    jw_obj(w);
    jw_kstr(w, "type", "Sequence");
    jw_key(w, "pretokenizers");
    jw_arr(w);
    if (v->pre->digits) {
        jw_obj(w);
        jw_kstr(w, "type", "Digits");
        jw_kbool(w, "individual_digits", true);
        jw_end_obj(w);
    } else {
        write_split(w, v->pre->pattern);
    }
    write_byte_level(w, true, !v->pre->pattern);
    jw_end_arr(w);
    jw_end_obj(w);
}

static void write_sequence(jw *w, const char *id, int type_id)
{
    jw_obj(w);
    jw_key(w, "Sequence");
    jw_obj(w);
    jw_kstr(w, "id", id);
    jw_ki64(w, "type_id", type_id);
    jw_end_obj(w);
    jw_end_obj(w);
}

static void write_special(const vocab *v, jw *w, int64_t id, int type_id)
{
    gguf_str t = v->tokens[id];
    jw_obj(w);
    jw_key(w, "SpecialToken");
    jw_obj(w);
    jw_key(w, "id");
    jw_strn(w, t.s, t.n);
    jw_ki64(w, "type_id", type_id);
    jw_end_obj(w);
    jw_end_obj(w);
}

/* Template [bos] A [eos] and [bos] A [eos] [bos] B [eos]; -1 = no such token. */
static void write_template(const vocab *v, jw *w, int64_t bos, int64_t eos)
{
    static const char *const names[] = {"single", "pair"}, *const parts[] = {"A", "B"};
    jw_obj(w);
    jw_kstr(w, "type", "TemplateProcessing");
    for (int pair = 0; pair < 2; pair++) {
        jw_key(w, names[pair]);
        jw_arr(w);
        for (int i = 0; i <= pair; i++) {
            if (bos >= 0) write_special(v, w, bos, i);
            write_sequence(w, parts[i], i);
            if (eos >= 0) write_special(v, w, eos, i);
        }
        jw_end_arr(w);
    }
    jw_key(w, "special_tokens");
    jw_obj(w);
    for (int i = 0; i < 2; i++) {
        int64_t id = i ? eos : bos;
        if (id < 0 || (i && eos == bos)) continue;
        gguf_str t = v->tokens[id];
        key_token(w, t);
        jw_obj(w);
        jw_key(w, "id");
        jw_strn(w, t.s, t.n);
        jw_key(w, "ids");
        jw_arr(w);
        jw_i64(w, id);
        jw_end_arr(w);
        jw_key(w, "tokens");
        jw_arr(w);
        jw_strn(w, t.s, t.n);
        jw_end_arr(w);
        jw_end_obj(w);
    }
    jw_end_obj(w);
    jw_end_obj(w);
}

/* A token id of the file, -1 when absent or outside the vocabulary. */
static int token_id(const vocab *v, const char *key, int64_t *out)
{
    *out = -1;
    int rc = gguf_get_i64(v->g, key, out, v->e);
    if (rc > 0 && (*out < 0 || (uint64_t)*out >= v->n)) *out = -1;
    return rc;
}

typedef struct specials {
    bool add_bos, add_eos, space_prefix;
    int64_t bos, eos, unk, pad;
} specials;

static int read_specials(const vocab *v, specials *s)
{
    int64_t cls = -1, sep = -1;
    int rc = 0;
    *s = (specials){.add_bos = v->kind == LLAMA || v->kind == BERT || (v->pre && v->pre->add_bos),
                    .add_eos = v->kind == T5 || v->kind == BERT,
                    .space_prefix = v->spm};
    TRY(bool_key(v, "tokenizer.ggml.add_bos_token", &s->add_bos));
    TRY(bool_key(v, "tokenizer.ggml.add_eos_token", &s->add_eos));
    TRY(bool_key(v, "tokenizer.ggml.add_space_prefix", &s->space_prefix));
    TRY(token_id(v, "tokenizer.ggml.bos_token_id", &s->bos));
    TRY(token_id(v, "tokenizer.ggml.eos_token_id", &s->eos));
    TRY(token_id(v, "tokenizer.ggml.unknown_token_id", &s->unk));
    TRY(token_id(v, "tokenizer.ggml.padding_token_id", &s->pad));
    if (v->spm && s->unk < 0) s->unk = id_of(v, "<unk>", 5);
    if (v->kind == BERT) {
        TRY(token_id(v, "tokenizer.ggml.cls_token_id", &cls));
        TRY(token_id(v, "tokenizer.ggml.seperator_token_id", &sep)); /* spelt so there */
        if (cls >= 0) s->bos = cls;
        if (sep >= 0) s->eos = sep;
        if (s->unk < 0) s->unk = id_of(v, "[UNK]", 5);
    }
    rc = 0;
out:
    return rc;
}

static void write_post(const vocab *v, jw *w, const specials *s)
{
    int64_t bos = s->add_bos ? s->bos : -1, eos = s->add_eos ? s->eos : -1;
    jw_key(w, "post_processor");
    if (bos >= 0 || eos >= 0)
        write_template(v, w, bos, eos);
    else if (v->kind != GPT2)
        jw_null(w);
    else
        write_byte_level(w, false, true);
}

static void write_decoder(const vocab *v, jw *w, bool prefix)
{
    jw_key(w, "decoder");
    if (v->kind == BERT) {
        jw_obj(w);
        jw_kstr(w, "type", "WordPiece");
        jw_kstr(w, "prefix", "##");
        jw_kbool(w, "cleanup", true);
        jw_end_obj(w);
        return;
    }
    if (v->kind == T5) {
        jw_obj(w);
        jw_kstr(w, "type", "Sequence");
        jw_key(w, "decoders");
        jw_arr(w);
        write_type(w, "ByteFallback");
        write_metaspace(w, prefix);
        jw_end_arr(w);
        jw_end_obj(w);
        return;
    }
    if (!v->spm) {
        write_byte_level(w, true, true);
        return;
    }
    jw_obj(w);
    jw_kstr(w, "type", "Sequence");
    jw_key(w, "decoders");
    jw_arr(w);
    write_replace(w, SPACE_MARK, " ");
    write_type(w, "ByteFallback");
    write_type(w, "Fuse");
    if (prefix) {
        jw_obj(w);
        jw_kstr(w, "type", "Strip");
        jw_kstr(w, "content", " ");
        jw_ki64(w, "start", 1);
        jw_ki64(w, "stop", 0);
        jw_end_obj(w);
    }
    jw_end_arr(w);
    jw_end_obj(w);
}

/* ---- merges -------------------------------------------------------------------------------------
 */

/* As they are in the file: "left right". */
static int write_merges(const vocab *v, jw *w)
{
    const gguf_str *m = v->merges->arr;
    for (uint64_t i = 0; i < v->merges->n; i++) {
        const char *space = m[i].n > 2 ? memchr(m[i].s + 1, ' ', m[i].n - 2) : NULL;
        if (!space || utf8_valid_prefix(m[i].s, m[i].n) != m[i].n)
            return err_set(v->e, ERR_FORMAT,
                           "%s: merge %" PRIu64
                           " of tokenizer.ggml.merges is not two tokens with a "
                           "space between",
                           v->path, i);
        jw_strn(w, m[i].s, m[i].n);
    }
    return 0;
}

typedef struct split {
    uint32_t piece, left; /* id of the whole, bytes of the left part */
    double score, left_score, right_score;
    size_t order;
} split;

/* Higher score of the whole first; among equals, higher scores of left and right part, as
 * transformers orders them; the order of the vocabulary settles the rest. */
static int by_score(const void *pa, const void *pb)
{
    const split *a = pa, *b = pb;
    if (a->score != b->score) return a->score > b->score ? -1 : 1;
    if (a->piece != b->piece) return a->piece < b->piece ? -1 : 1;
    if (a->left_score != b->left_score) return a->left_score > b->left_score ? -1 : 1;
    if (a->right_score != b->right_score) return a->right_score > b->right_score ? -1 : 1;
    return a->order < b->order ? -1 : a->order > b->order;
}

/* Merges made from scores. */
static int write_score_merges(const vocab *v, jw *w)
{
    split *list = NULL;
    size_t n = 0, cap = 0;
    for (size_t i = 0; i < v->n; i++) {
        gguf_str t = v->tokens[i];
        if (type_of(v, i) != T_NORMAL || t.n > 512) continue;
        for (size_t k = 1; k < t.n; k++) {
            if (((unsigned char)t.s[k] & 0xC0) == 0x80) continue; /* inside a character */
            int64_t l = id_of(v, t.s, k), r = id_of(v, t.s + k, t.n - k);
            if (l < 0 || r < 0) continue;
            if (n == cap) list = xrealloc(list, sizeof *list * (cap = cap ? 2 * cap : 1024));
            list[n] =
                (split){(uint32_t)i, (uint32_t)k, v->scores[i], v->scores[l], v->scores[r], n};
            n++;
        }
    }
    if (n) qsort(list, n, sizeof *list, by_score);
    buf b = {0};
    for (size_t i = 0; i < n; i++) {
        gguf_str t = v->tokens[list[i].piece];
        buf_clear(&b);
        buf_add(&b, t.s, list[i].left);
        buf_putc(&b, ' ');
        buf_add(&b, t.s + list[i].left, t.n - list[i].left);
        jw_strn(w, b.data, b.len);
    }
    buf_free(&b);
    free(list);
    return 0;
}

static void write_unigram(const vocab *v, jw *w, const specials *s)
{
    bool bytes = false;
    jw_kstr(w, "type", "Unigram");
    if (s->unk >= 0)
        jw_ki64(w, "unk_id", s->unk);
    else
        jw_kstr(w, "unk_id", NULL);
    jw_key(w, "vocab");
    jw_arr(w);
    for (size_t i = 0; i < v->n; i++) {
        jw_arr(w);
        jw_strn(w, v->tokens[i].s, v->tokens[i].n);
        jw_f64(w, v->scores[i]);
        jw_end_arr(w);
        bytes = bytes || type_of(v, i) == T_BYTE;
    }
    jw_end_arr(w);
    jw_kbool(w, "byte_fallback", bytes);
}

static void write_wordpiece(const vocab *v, jw *w, const specials *s)
{
    size_t mark = strlen(SPACE_MARK);
    buf b = {0};
    jw_kstr(w, "type", "WordPiece");
    jw_key(w, "unk_token");
    if (s->unk >= 0)
        jw_strn(w, v->tokens[s->unk].s, v->tokens[s->unk].n);
    else
        jw_str(w, "[UNK]");
    jw_kstr(w, "continuing_subword_prefix", "##");
    jw_ki64(w, "max_input_chars_per_word", 100);
    jw_key(w, "vocab");
    jw_obj(w);
    for (size_t i = 0; i < v->n; i++) {
        gguf_str t = v->tokens[i];
        if (!t.n || id_of(v, t.s, t.n) != (int64_t)i) continue;
        bool begins = t.n > mark && !memcmp(t.s, SPACE_MARK, mark);
        buf_clear(&b);
        buf_puts(&b, begins || is_added(v, i) ? "" : "##");
        buf_add(&b, begins ? t.s + mark : t.s, begins ? t.n - mark : t.n);
        jw_key(w, b.data);
        jw_i64(w, (int64_t)i);
    }
    jw_end_obj(w);
    buf_free(&b);
}

static int write_model(const vocab *v, jw *w, const specials *s)
{
    jw_key(w, "model");
    jw_obj(w);
    if (v->kind == T5 || v->kind == BERT) {
        (v->kind == T5 ? write_unigram : write_wordpiece)(v, w, s);
        jw_end_obj(w);
        return 0;
    }
    jw_kstr(w, "type", "BPE");
    jw_key(w, "dropout");
    jw_null(w);
    jw_key(w, "unk_token");
    if (v->spm && s->unk >= 0)
        jw_strn(w, v->tokens[s->unk].s, v->tokens[s->unk].n);
    else
        jw_null(w);
    jw_kstr(w, "continuing_subword_prefix", NULL);
    jw_kstr(w, "end_of_word_suffix", NULL);
    jw_kbool(w, "fuse_unk", v->spm);
    jw_kbool(w, "byte_fallback", v->spm);
    jw_kbool(w, "ignore_merges", !v->spm && v->pre->ignore_merges);
    jw_key(w, "vocab");
    jw_obj(w);
    for (size_t i = 0; i < v->n; i++) {
        gguf_str t = v->tokens[i];
        if (is_filler(v, i) || !t.n || id_of(v, t.s, t.n) != (int64_t)i) continue;
        key_token(w, t);
        jw_i64(w, (int64_t)i);
    }
    jw_end_obj(w);
    jw_key(w, "merges");
    jw_arr(w);
    int rc = v->merges ? write_merges(v, w) : write_score_merges(v, w);
    jw_end_arr(w);
    jw_end_obj(w);
    return rc;
}

/* ---- public -------------------------------------------------------------------------------------
 */

int ckpt__gguf_tokenizer(const ckpt *c, buf *out, err *e)
{
    vocab v;
    specials s;
    jw w;
    int rc = 0;
    TRY(vocab_open(&v, c, e));
    TRY(read_specials(&v, &s));
    jw_init(&w, out, 0);
    jw_obj(&w);
    jw_kstr(&w, "version", "1.0");
    jw_kstr(&w, "truncation", NULL);
    jw_kstr(&w, "padding", NULL);
    write_added(&v, &w);
    TRY(write_normalizer(&v, &w, s.space_prefix));
    write_pre(&v, &w, s.space_prefix);
    write_post(&v, &w, &s);
    write_decoder(&v, &w, s.space_prefix);
    TRY(write_model(&v, &w, &s));
    jw_end_obj(&w);
    buf_putc(out, '\n');
out:
    vocab_close(&v);
    if (rc < 0) buf_clear(out);
    return rc < 0 ? rc : 0;
}

int ckpt__gguf_tokenizer_config(const ckpt *c, buf *out, err *e)
{
    vocab v;
    specials s;
    jw w;
    buf text = {0};
    int rc = 0;
    TRY(vocab_open(&v, c, e));
    TRY(read_specials(&v, &s));
    jw_init(&w, out, 2);
    jw_obj(&w);
    jw_kbool(&w, "add_bos_token", s.add_bos);
    jw_kbool(&w, "add_eos_token", s.add_eos);
    const struct {
        const char *key;
        int64_t id;
    } named[] = {
        {"bos_token", s.bos}, {"eos_token", s.eos}, {"unk_token", s.unk}, {"pad_token", s.pad}};
    for (size_t i = 0; i < sizeof named / sizeof *named; i++) {
        if (named[i].id < 0) continue;
        jw_key(&w, named[i].key);
        jw_strn(&w, v.tokens[named[i].id].s, v.tokens[named[i].id].n);
    }
    jw_kbool(&w, "clean_up_tokenization_spaces", false);
    jw_ki64(&w, "model_max_length", c->cfg.max_position);
    jw_kstr(&w, "tokenizer_class", "PreTrainedTokenizerFast");
    TRY(ckpt__gguf_template(c, &text, e));
    if (text.len) {
        jw_key(&w, "chat_template");
        jw_strn(&w, text.data, text.len);
    }
    jw_end_obj(&w);
    buf_putc(out, '\n');
out:
    buf_free(&text);
    vocab_close(&v);
    return rc < 0 ? rc : 0;
}

int ckpt__gguf_template(const ckpt *c, buf *out, err *e)
{
    gguf_str s = {0};
    int rc = gguf_get_str(&c->gguf, "tokenizer.chat_template", &s, e);
    if (rc <= 0) return rc;
    if (utf8_valid_prefix(s.s, s.n) != s.n)
        return err_set(e, ERR_FORMAT, "%s: key 'tokenizer.chat_template' is not UTF-8 text",
                       c->path);
    buf_add(out, s.s, s.n);
    return 0;
}
