/* From the texts of tokenizer.json (or the bytes of a SentencePiece model) and
 * tokenizer_config.json to a tokenizer: the stages, the model, the added tokens of both files, and
 * the names of BOS and EOS. "truncation" and "padding" are ignored, as transformers overrides them
 * in every call.
 *
 * As transformers does, tokens that only the config lists are added too, its flags win, and the
 * named special tokens (bos, eos, pad, unk …) are special even where tokenizer.json does not say
 * so. An added token that the model's vocabulary has keeps the id it has there. Any other one is
 * numbered as the library does, whatever "id" the file gives it: behind the vocabulary (the number
 * of its entries, holes not counted), or behind the highest added id if that lies there already.
 * With a .model file the numbers of the config count. */
#include <stdlib.h>
#include <string.h>
#include "text/tok_internal.h"

const tok_model_kind *const tok__models[] = {&tok__bpe_kind, &tok__unigram_kind,
                                             &tok__wordpiece_kind, &tok__wordlevel_kind};
const size_t tok__n_models = sizeof tok__models / sizeof *tok__models;

/* Old files name no type: the library takes the first model whose fields are all there. */
static const char *guess_type(const json *j)
{
    if (json_get(j, "merges")) return "BPE";
    if (json_get(j, "continuing_subword_prefix") && json_get(j, "max_input_chars_per_word"))
        return "WordPiece";
    if (cJSON_IsArray(json_get(j, "vocab"))) return "Unigram";
    return json_get(j, "unk_token") ? "WordLevel" : "";
}

static int load_model(tok_model *m, const json *root, const char *where, err *e)
{
    const json *j = json_get(root, "model");
    const char *type = NULL;
    if (!cJSON_IsObject(j))
        return err_set(e, ERR_MISSING, "%s: the object 'model' is missing", where);
    int rc = json_get_str(j, "type", &type, where, e);
    if (rc < 0) return rc;
    if (!type) type = guess_type(j);
    for (size_t i = 0; i < tok__n_models; i++) {
        if (strcmp(tok__models[i]->type, type) != 0) continue;
        m->kind = tok__models[i];
        return m->kind->load(m, j, where, e);
    }
    return err_set(e, ERR_UNSUPPORTED,
                   "%s: model of type '%.40s' is not supported; supported are BPE, Unigram, "
                   "WordPiece, WordLevel",
                   where, type);
}

/* ---- added tokens -----------------------------------------------------------------------------
 */

static int64_t next_id(const tokenizer *t)
{
    const tok_vocab *v = &t->model.vocab;
    int64_t size = (int64_t)(t->model.kind == &tok__unigram_kind ? v->n : v->used);
    return t->top_added >= size ? t->top_added + 1 : size;
}

/* An added token that is there already keeps its id and gets the new flags. */
static int add_token(tokenizer *t, const char *content, int64_t id, const json *flags, err *e)
{
    size_t n = strlen(content);
    if (!n) return 0;
    if (id < 0 || id > UINT32_MAX)
        return err_set(e, ERR_FORMAT, "%s: added token '%.80s' has id %lld, which is no id",
                       t->where, content, (long long)id);
    int32_t old = tok__vocab_find(&t->added_names, content, n);
    int32_t known = tok__vocab_find(&t->model.vocab, content, n);
    id = old >= 0 ? t->added[old].id : known >= 0 ? known : t->is_spm ? id : next_id(t);
    if (id < 0 || id >= TOK_MAX_ID)
        return err_set(e, ERR_FORMAT, "%s: added token '%.80s' has id %lld, which is no id",
                       t->where, content, (long long)id);
    if (old < 0 && known < 0) t->top_added = id;
    tok_added a = {.id = (int32_t)id, .len = n};
    int rc;
    if ((rc = json_get_bool(flags, "special", &a.special, t->where, e)) < 0 ||
        (rc = json_get_bool(flags, "lstrip", &a.lstrip, t->where, e)) < 0 ||
        (rc = json_get_bool(flags, "rstrip", &a.rstrip, t->where, e)) < 0 ||
        (rc = json_get_bool(flags, "single_word", &a.single_word, t->where, e)) < 0)
        return rc;
    a.normalized = !a.special;
    if ((rc = json_get_bool(flags, "normalized", &a.normalized, t->where, e)) < 0) return rc;
    if (t->n_added == t->cap_added) {
        t->cap_added = t->cap_added ? t->cap_added * 2 : 32;
        t->added = xrealloc(t->added, t->cap_added * sizeof *t->added);
    }
    a.content = xstrdup(content);
    if (old >= 0) {
        a.special |= t->added[old].special;
        free(t->added[old].content);
        t->added[old] = a;
        return 0;
    }
    t->added[t->n_added] = a;
    return tok__vocab_add(&t->added_names, content, n, (int64_t)t->n_added++, t->where, e);
}

static int load_json_added(tokenizer *t, const json *root, err *e)
{
    const json *list = json_get(root, "added_tokens");
    if (!list || cJSON_IsNull(list)) return 0;
    if (!cJSON_IsArray(list))
        return err_set(e, ERR_FORMAT, "%s: 'added_tokens' must be an array", t->where);
    for (const json *c = list->child; c; c = c->next) {
        const char *content = NULL;
        int64_t id = -1;
        int rc = json_get_str(c, "content", &content, t->where, e);
        if (rc >= 0) rc = json_get_i64(c, "id", &id, t->where, e);
        if (rc < 0) return rc;
        if (!content)
            return err_set(e, ERR_FORMAT, "%s: an added token has no 'content'", t->where);
        rc = add_token(t, content, id, c, e);
        if (rc < 0) return rc;
    }
    return 0;
}

typedef struct numbered { /* a row of "added_tokens_decoder": {"id": {"content": …}} */
    int64_t id;
    const json *row;
} numbered;

static int by_id(const void *pa, const void *pb)
{
    const numbered *a = pa, *b = pb;
    return a->id < b->id ? -1 : a->id > b->id;
}

static int load_config_added(tokenizer *t, const json *config, err *e)
{
    const json *list = json_get(config, "added_tokens_decoder");
    size_t n = 0;
    int rc = 0;
    if (!cJSON_IsObject(list) || !list->child) return 0;
    numbered *v = xcalloc((size_t)cJSON_GetArraySize(list), sizeof *v);
    for (const json *c = list->child; c; c = c->next) {
        char *end = NULL;
        long long id = strtoll(c->string, &end, 10);
        if (cJSON_IsString(json_get(c, "content")) && end != c->string && !*end)
            v[n++] = (numbered){id, c};
    }
    if (n) qsort(v, n, sizeof *v, by_id);
    for (size_t i = 0; i < n && rc >= 0; i++)
        rc = add_token(t, json_get(v[i].row, "content")->valuestring, v[i].id, v[i].row, e);
    free(v);
    return rc;
}

/* Value of "bos_token" and its like: a string or an object with "content". */
static const char *token_name(const json *config, const char *key)
{
    const json *v = json_get(config, key);
    if (cJSON_IsObject(v)) v = json_get(v, "content");
    return cJSON_IsString(v) ? v->valuestring : NULL;
}

static int add_special(tokenizer *t, const char *name, const json *flags, err *e)
{
    size_t n = strlen(name);
    int rc = add_token(t, name, 0, flags, e);
    int32_t at = rc < 0 ? -1 : tok__vocab_find(&t->added_names, name, n);
    if (at < 0) return rc;
    t->added[at].special = true;
    if (!cJSON_IsBool(json_get(flags, "normalized"))) t->added[at].normalized = false;
    return 0;
}

int tok__added_special(tokenizer *t, const char *name, err *e)
{
    return add_special(t, name, NULL, e);
}

static const char *const named_specials[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                             "pad_token", "cls_token", "mask_token"};

/* A special token that the config names by a string or an object with "content". It is added if no
 * added token has that content; else `named` ones become special and others stay as they are. */
static int load_special(tokenizer *t, const json *v, bool named, err *e)
{
    const json *c = cJSON_IsObject(v) ? json_get(v, "content") : v;
    if (!cJSON_IsString(c) || !*c->valuestring) return 0;
    const char *s = c->valuestring;
    int32_t at = tok__vocab_find(&t->added_names, s, strlen(s));
    if (at >= 0) {
        t->added[at].special |= named;
        return 0;
    }
    if (t->is_spm && tok__vocab_find(&t->model.vocab, s, strlen(s)) < 0) return 0;
    return add_special(t, s, cJSON_IsObject(v) ? v : NULL, e);
}

/* "extra_special_tokens" as an object names tokens, as a list it replaces the older key. */
static int load_specials(tokenizer *t, const json *config, err *e)
{
    const json *extra = json_get(config, "extra_special_tokens");
    const json *more = cJSON_IsArray(extra) ? extra : json_get(config, "additional_special_tokens");
    int rc = 0;
    for (size_t i = 0; i < sizeof named_specials / sizeof *named_specials && rc >= 0; i++)
        rc = load_special(t, json_get(config, named_specials[i]), true, e);
    for (const json *c = cJSON_IsObject(extra) ? extra->child : NULL; c && rc >= 0; c = c->next)
        rc = load_special(t, c, true, e);
    for (const json *c = cJSON_IsArray(more) ? more->child : NULL; c && rc >= 0; c = c->next)
        rc = load_special(t, c, false, e);
    return rc;
}

int tok__added_load(tokenizer *t, const json *root, const json *config, err *e)
{
    int rc = load_json_added(t, root, e);
    if (rc >= 0) rc = load_config_added(t, config, e);
    if (rc >= 0) rc = load_specials(t, config, e);
    return rc;
}

/* ---- SentencePiece models ----------------------------------------------------------------------
 */

/* Classes of transformers whose ids are not the piece numbers of their .model file. */
static int check_class(const tokenizer *t, const char *class, err *e)
{
    static const char *const shifted[] = {"XLMRoberta", "XLMProphetNet", "Camembert", "MBart",
                                          "Barthez",    "BartPho",       "XGLM",      "Nllb",
                                          "M2M100",     "PLBart",        "Pegasus",   "Ernie"};
    for (size_t i = 0; class && i < sizeof shifted / sizeof *shifted; i++)
        if (!strncmp(class, shifted[i], strlen(shifted[i])))
            return err_set(e, ERR_UNSUPPORTED,
                           "%s: a %.60s gives other ids than its .model file; put the model's "
                           "tokenizer.json beside it",
                           t->where, class);
    return 0;
}

/* Where the config is silent: BOS before texts of BPE models, EOS behind those of T5. */
static int spm_config(tokenizer *t, const json *config, bool *add_bos, bool *add_eos, err *e)
{
    const char *class = token_name(config, "tokenizer_class");
    bool legacy = true;
    int rc = check_class(t, class, e);
    if (rc >= 0) rc = json_get_bool(config, "legacy", &legacy, t->where, e);
    if (rc < 0) return rc;
    t->norm->individual = !legacy; /* a prefix only where the text begins */
    *add_bos = class ? !strncmp(class, "Llama", 5) || !strncmp(class, "CodeLlama", 9) ||
                           !strncmp(class, "Gemma", 5) || !strncmp(class, "Mistral", 7)
                     : t->spm_bpe;
    *add_eos = class && (!strncmp(class, "T5", 2) || !strncmp(class, "MT5", 3));
    return 0;
}

/* JSON text begins with what JSON values begin with, a model with the key of its first piece. */
static bool is_model_file(const char *s, size_t n)
{
    size_t i = 0;
    while (i < n && memchr(" \t\r\n", s[i], 4))
        i++;
    return n > 2 && s[0] == '\n' && (i == n || !memchr("{[\"-0123456789tfn", s[i], 17));
}

/* ---- BOS and EOS ------------------------------------------------------------------------------
 */

int tok__config_load(tokenizer *t, const json *config, err *e)
{
    bool add_bos = false, add_eos = false;
    const char *bos = token_name(config, "bos_token"), *eos = token_name(config, "eos_token");
    int rc = t->is_spm ? spm_config(t, config, &add_bos, &add_eos, e) : 0;
    if (rc < 0) return rc;
    if (t->is_spm && !bos && tokenizer_token_id(t, t->spm_bos) >= 0) bos = t->spm_bos;
    if (t->is_spm && !eos && tokenizer_token_id(t, t->spm_eos) >= 0) eos = t->spm_eos;
    t->bos_text = xstrdup(bos ? bos : "");
    t->eos_text = xstrdup(eos ? eos : "");
    t->bos = bos ? tokenizer_token_id(t, bos) : -1;
    t->eos = eos ? tokenizer_token_id(t, eos) : -1;
    if (t->is_spm) { /* beside a tokenizer.json, whose post-processor decides, they count nothing */
        rc = json_get_bool(config, "add_bos_token", &add_bos, t->where, e);
        if (rc >= 0) rc = json_get_bool(config, "add_eos_token", &add_eos, t->where, e);
        if (rc < 0) return rc;
        t->force_bos = add_bos && t->bos >= 0;
        t->force_eos = add_eos && t->eos >= 0;
    }
    const tok_stage *p = t->post;
    /* No bos_token is named anywhere, but the post-processor puts a token first: it is the BOS. */
    if (t->bos < 0 && p && p->before.n) t->bos = p->before.v[0];
    return 0;
}

/* ---- whole ------------------------------------------------------------------------------------
 */

static int load_stages(tokenizer *t, const json *root, err *e)
{
    int rc =
        tok__stage_open(&t->norm, json_get(root, "normalizer"), &tok__normalizers, t->where, e);
    if (rc >= 0)
        rc = tok__stage_open(&t->pre, json_get(root, "pre_tokenizer"), &tok__pretokenizers,
                             t->where, e);
    if (rc >= 0)
        rc = tok__stage_open(&t->dec, json_get(root, "decoder"), &tok__decoders, t->where, e);
    if (rc >= 0)
        rc = tok__stage_open(&t->post, json_get(root, "post_processor"), &tok__postprocessors,
                             t->where, e);
    return rc;
}

int tokenizer_open(tokenizer **out, const char *text, size_t n, const char *config, size_t config_n,
                   const char *where, err *e)
{
    json *root = NULL, *conf = NULL;
    *out = NULL;
    tokenizer *t = xcalloc(1, sizeof *t);
    t->where = xstrdup(where);
    t->bos = t->eos = -1;
    t->top_added = -1;
    tok__bytelevel_init();
    int rc;
    if (config_n) TRY(json_parse(&conf, config, config_n, "tokenizer_config.json", e));
    if (is_model_file(text, n)) {
        TRY(tok__spm_load(t, text, n, e));
    } else {
        TRY(json_parse(&root, text, n, where, e));
        TRY(load_model(&t->model, root, where, e));
        TRY(load_stages(t, root, e));
    }
    TRY(tok__added_load(t, root, conf, e));
    TRY(tok__added_index(t, e));
    TRY(tok__config_load(t, conf, e));
    *out = t;
    t = NULL;
    rc = 0;
out:
    tokenizer_close(t);
    json_drop(root);
    json_drop(conf);
    return rc < 0 ? rc : 0;
}
