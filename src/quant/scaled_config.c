/* Weights of whole codes with scales beside them: what their configs have in common.
 *
 * Lists of excluded modules are read as the engines agree on: whole names or whole dotted
 * components, globs over the whole name, "re:" expressions; never a bare substring, which would
 * take a parent's children. The tensors decide what is quantized, and a quantized module under an
 * exclusion is an error (quant__sweep). So are tensors that only another method writes. */
#include <string.h>
#include "quant/scaled.h"

quant__scaled *quant__scaled_init(quant_ckpt *q, const quant__scheme *list, int n)
{
    quant__scaled *own = arena_alloc(q->mem, sizeof *own);
    *own = (quant__scaled){.schemes = list, .n = n};
    q->own = own;
    return own;
}

int quant__excludes(quant_ckpt *q, const json *v, const char *where, quant_rule_kind plain, err *e)
{
    if (!v || cJSON_IsNull(v)) return 0;
    if (!cJSON_IsArray(v)) return err_set(e, ERR_FORMAT, "%s: must be a list of strings", where);
    size_t n = (size_t)cJSON_GetArraySize(v) + 1;
    q->ignore = arena_alloc(q->mem, n * sizeof *q->ignore);
    q->ignore_rules = arena_alloc(q->mem, n * sizeof *q->ignore_rules);
    q->ignore_hits = arena_alloc(q->mem, n * sizeof *q->ignore_hits);
    for (const json *s = v->child; s; s = s->next) {
        if (!cJSON_IsString(s))
            return err_set(e, ERR_FORMAT, "%s: must be a list of strings", where);
        const char *text = s->valuestring;
        bool regex = !strncmp(text, "re:", 3);
        quant_rule_kind kind = regex                          ? QUANT_RULE_REGEX
                               : strpbrk(text, "*?[") != NULL ? QUANT_RULE_GLOB
                                                              : plain;
        int rc = quant_rule_make_as(&q->ignore_rules[q->n_ignore], kind, text + (regex ? 3 : 0), e);
        if (rc < 0) return err_wrap(e, "%s", where);
        q->ignore[q->n_ignore++] = arena_strdup(q->mem, text);
    }
    return 0;
}

int quant__block_size(const quant_ckpt *q, int32_t *bn, int32_t *bk, err *e)
{
    const json *v = json_get(q->config, "weight_block_size");
    *bn = *bk = 0;
    if (!v || cJSON_IsNull(v)) return 0;
    const json *n = cJSON_IsArray(v) ? v->child : NULL, *k = n ? n->next : NULL;
    bool two = k && !k->next && cJSON_IsNumber(n) && cJSON_IsNumber(k);
    if (!two || !(n->valuedouble >= 1 && n->valuedouble <= 1 << 20) ||
        !(k->valuedouble >= 1 && k->valuedouble <= 1 << 20))
        return err_set(e, ERR_FORMAT,
                       "%s: 'weight_block_size' must be [rows, columns], both positive", q->where);
    *bn = (int32_t)n->valuedouble;
    *bk = (int32_t)k->valuedouble;
    return 1;
}

int quant__scaled_group(quant_ckpt *q, const quant__scheme *s, const qspec *spec, err *e)
{
    return quant__group(q, spec, s->name, QUANT_RULE_CLASS, "Linear", e) ? 0 : -ERR_FORMAT;
}

/* Tensors that these dialects never write, and who does. */
static const struct {
    const char *tail, *method;
} foreign[] = {
    {".qweight", "gptq or awq"},        {".weight_packed", "compressed-tensors"},
    {".weight.absmax", "bitsandbytes"}, {".SCB", "bitsandbytes"},
    {"_proj_blocks", "mxfp4"},
};

static int check_foreign(const quant_ckpt *q, err *e)
{
    for (size_t i = 0; i < ckpt_n_tensors(q->c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(q->c, i);
        size_t n = strlen(t->name);
        for (size_t k = 0; k < sizeof foreign / sizeof *foreign; k++) {
            size_t m = strlen(foreign[k].tail);
            if (n > m && !strcmp(t->name + n - m, foreign[k].tail))
                return err_set(e, ERR_FORMAT,
                               "%s: tensor '%s' is of %s, but %s names %s; restore the config that "
                               "was written with these weights",
                               t->path, t->name, foreign[k].method, q->where, q->dialect->name);
        }
    }
    return 0;
}

int quant__scaled_finish(quant_ckpt *q, err *e)
{
    int rc = check_foreign(q, e);
    if (rc >= 0) rc = quant__sweep(q, e);
    for (int i = 0; rc >= 0 && i < q->n_groups; i++) {
        q->groups[i].spec.kv = q->kv;
        if (!q->groups[i].hits && strcmp(q->groups[i].format, "dense") && ckpt_has_weights(q->c))
            quant__warn(q, "%s: nothing quantized falls to %s (%s%s)", q->where,
                        q->groups[i].format, q->groups[i].targets[0],
                        q->groups[i].n_targets > 1 ? " and more" : "");
    }
    return rc < 0 ? rc : 1;
}

int quant__kv_word(quant_ckpt *q, const json *v, err *e)
{
    if (!v || cJSON_IsNull(v)) return 0;
    const char *word = cJSON_IsString(v) ? v->valuestring : NULL, *type = "float";
    int64_t bits = 8;
    int rc = 0;
    if (cJSON_IsObject(v)) {
        TRY(json_get_str(v, "type", &type, q->where, e));
        TRY(json_get_i64(v, "num_bits", &bits, q->where, e));
        word = bits == 8 && !strcmp(type, "float") ? "FP8" : "other";
    }
    if (!word)
        return err_set(e, ERR_FORMAT, "%s: the KV scheme must be a word or an object", q->where);
    if (!strcasecmp(word, "FP8") || !strcasecmp(word, "fp8_e4m3"))
        q->kv = (qaxis){.type = NUM_F8_E4M3, .gran = Q_TENSOR};
    else if (*word && strcasecmp(word, "none") && strcasecmp(word, "auto"))
        quant__warn(q,
                    "%s: a KV cache of %s is not available; it runs as bf16 unless "
                    "--kv-cache-dtype says otherwise",
                    q->where, cJSON_IsString(v) ? word : "this scheme");
    rc = 0;
out:
    return rc;
}
