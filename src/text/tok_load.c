/* From the texts of tokenizer.json and tokenizer_config.json to a tokenizer: the stages, the model,
 * the added tokens of both files, and the names of BOS and EOS.
 *
 * As transformers does, tokens that only the config lists are added too, and the named special
 * tokens (bos, eos, pad, unk …) are special even where tokenizer.json does not say so. An added
 * token that the model's vocabulary has keeps the id it has there. */
#include <stdlib.h>
#include <string.h>
#include "text/tok_internal.h"

static const tok_model_kind *const models[] = {&tok__bpe_kind};

static int load_model(tok_model *m, const json *root, const char *where, err *e)
{
    const json *j = json_get(root, "model");
    const char *type = NULL;
    if (!cJSON_IsObject(j))
        return err_set(e, ERR_MISSING, "%s: the object 'model' is missing", where);
    int rc = json_get_str(j, "type", &type, where, e);
    if (rc < 0) return rc;
    if (!type) type = json_get(j, "merges") ? "BPE" : "";
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        if (strcmp(models[i]->type, type) != 0) continue;
        m->kind = models[i];
        return m->kind->load(m, j, where, e);
    }
    return err_set(e, ERR_UNSUPPORTED,
                   "%s: model of type '%.40s' is not supported; supported is BPE", where, type);
}

/* ---- added tokens -----------------------------------------------------------------------------
 */

static int add_token(tokenizer *t, const char *content, int64_t id, const json *flags, err *e)
{
    size_t n = strlen(content);
    if (!n) return 0;
    int32_t known = tok__vocab_find(&t->model.vocab, content, n);
    if (known >= 0) id = known;
    if (id < 0 || id >= TOK_MAX_ID)
        return err_set(e, ERR_FORMAT, "%s: added token '%.80s' has id %lld, which is no id",
                       t->where, content, (long long)id);
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
    int32_t old = tok__vocab_find(&t->added_names, content, n);
    if (old >= 0) {
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

/* "added_tokens_decoder": {"id": {"content": …}} */
static int load_config_added(tokenizer *t, const json *config, err *e)
{
    const json *list = json_get(config, "added_tokens_decoder");
    for (const json *c = cJSON_IsObject(list) ? list->child : NULL; c; c = c->next) {
        const json *content = json_get(c, "content");
        char *end = NULL;
        long long id = strtoll(c->string, &end, 10);
        if (!cJSON_IsString(content) || end == c->string || *end) continue;
        const char *s = content->valuestring;
        if (tok__vocab_find(&t->added_names, s, strlen(s)) >= 0) continue;
        int rc = add_token(t, s, id, c, e);
        if (rc < 0) return rc;
    }
    return 0;
}

/* Value of "bos_token" and its like: a string or an object with "content". */
static const char *token_name(const json *config, const char *key)
{
    const json *v = json_get(config, key);
    if (cJSON_IsObject(v)) v = json_get(v, "content");
    return cJSON_IsString(v) ? v->valuestring : NULL;
}

static const char *const named_specials[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                             "pad_token", "cls_token", "mask_token"};

static int load_named_specials(tokenizer *t, const json *config, err *e)
{
    for (size_t i = 0; i < sizeof named_specials / sizeof *named_specials; i++) {
        const char *s = token_name(config, named_specials[i]);
        if (!s || !*s) continue;
        int32_t at = tok__vocab_find(&t->added_names, s, strlen(s));
        if (at >= 0) {
            t->added[at].special = true;
            continue;
        }
        int32_t id = tok__vocab_find(&t->model.vocab, s, strlen(s));
        if (id < 0) continue;
        int rc = add_token(t, s, id, NULL, e);
        if (rc < 0) return rc;
        at = tok__vocab_find(&t->added_names, s, strlen(s));
        t->added[at].special = true;
        t->added[at].normalized = false;
    }
    return 0;
}

int tok__added_load(tokenizer *t, const json *root, const json *config, err *e)
{
    int rc = load_json_added(t, root, e);
    if (rc >= 0) rc = load_config_added(t, config, e);
    if (rc >= 0) rc = load_named_specials(t, config, e);
    return rc;
}

/* ---- BOS and EOS ------------------------------------------------------------------------------
 */

/* Classes of transformers that rebuild the post-processor from add_bos_token. */
static bool rebuilds_template(const json *config)
{
    const char *c = token_name(config, "tokenizer_class");
    return c && (!strncmp(c, "Llama", 5) || !strncmp(c, "CodeLlama", 9) || !strncmp(c, "Gemma", 5));
}

int tok__config_load(tokenizer *t, const json *config, err *e)
{
    bool add_bos = false, add_eos = false;
    const char *bos = token_name(config, "bos_token"), *eos = token_name(config, "eos_token");
    t->bos_text = xstrdup(bos ? bos : "");
    t->eos_text = xstrdup(eos ? eos : "");
    t->bos = bos ? tokenizer_token_id(t, bos) : -1;
    t->eos = eos ? tokenizer_token_id(t, eos) : -1;
    int has = json_get_bool(config, "add_bos_token", &add_bos, t->where, e);
    if (has < 0) return has;
    int rc = json_get_bool(config, "add_eos_token", &add_eos, t->where, e);
    if (rc < 0) return rc;
    const tok_stage *p = t->post;
    t->force_bos = add_bos && t->bos >= 0 && !(p && p->before.n);
    t->force_eos = add_eos && t->eos >= 0 && !(p && p->after.n);
    t->drop_bos = has && !add_bos && rebuilds_template(config) && p && p->before.n == 1 &&
                  p->before.v[0] == t->bos;
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
    tok__bytelevel_init();
    int rc;
    TRY(json_parse(&root, text, n, where, e));
    if (config_n) TRY(json_parse(&conf, config, config_n, "tokenizer_config.json", e));
    TRY(load_model(&t->model, root, where, e));
    TRY(load_stages(t, root, e));
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
