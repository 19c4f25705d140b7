/* Post-processors: which ids stand before and after the text. Only single sequences are asked for,
 * so that all known types come down to two lists of ids around the body. */
#include <stdlib.h>
#include <string.h>
#include "text/tok_internal.h"

static int add_special(const json *piece, const json *specials, ids *out, const char *where, err *e)
{
    const char *name = NULL;
    int rc = json_get_str(piece, "id", &name, where, e);
    if (rc < 0) return rc;
    const json *list = name ? json_get(json_get(specials, name), "ids") : NULL;
    if (!cJSON_IsArray(list))
        return err_set(e, ERR_FORMAT,
                       "%s: TemplateProcessing uses '%.60s', which has no ids in "
                       "'special_tokens'",
                       where, name ? name : "");
    for (const json *v = list->child; v; v = v->next) {
        if (!cJSON_IsNumber(v) || v->valuedouble < 0 || v->valuedouble >= (double)TOK_MAX_ID ||
            v->valuedouble != (double)(int32_t)v->valuedouble)
            return err_set(e, ERR_FORMAT, "%s: id of special token '%.60s' is not an id", where,
                           name);
        ids_push(out, (int32_t)v->valuedouble);
    }
    return 0;
}

static int load_template(tok_stage *s, const json *j, const char *where, err *e)
{
    const json *single = json_get(j, "single"), *specials = json_get(j, "special_tokens");
    bool seen = false;
    if (!cJSON_IsArray(single))
        return err_set(e, ERR_FORMAT, "%s: TemplateProcessing needs the array 'single'", where);
    for (const json *p = single->child; p; p = p->next) {
        const json *sp = json_get(p, "SpecialToken");
        if (!sp) {
            if (!json_get(p, "Sequence") || seen)
                return err_set(e, ERR_UNSUPPORTED,
                               "%s: 'single' of TemplateProcessing must hold "
                               "special tokens and one sequence",
                               where);
            seen = true;
            continue;
        }
        int rc = add_special(sp, specials, seen ? &s->after : &s->before, where, e);
        if (rc < 0) return rc;
    }
    if (!seen)
        return err_set(e, ERR_FORMAT, "%s: 'single' of TemplateProcessing lacks its sequence",
                       where);
    return 0;
}

/* "cls": ["<s>", 0], "sep": ["</s>", 2] */
static int load_pair(const json *j, const char *key, ids *out, const char *where, err *e)
{
    const json *p = json_get(j, key), *id = cJSON_IsArray(p) && p->child ? p->child->next : NULL;
    if (!cJSON_IsNumber(id) || id->valuedouble < 0 || id->valuedouble >= (double)TOK_MAX_ID)
        return err_set(e, ERR_FORMAT, "%s: '%s' of the post-processor must be [token, id]", where,
                       key);
    ids_push(out, (int32_t)id->valuedouble);
    return 0;
}

static int load_cls_sep(tok_stage *s, const json *j, const char *where, err *e)
{
    int rc = load_pair(j, "cls", &s->before, where, e);
    return rc < 0 ? rc : load_pair(j, "sep", &s->after, where, e);
}

static int load_sequence(tok_stage *s, const json *j, const char *where, err *e)
{
    int rc = tok__load_children(s, j, &tok__postprocessors, where, e);
    if (rc < 0) return rc;
    for (size_t i = 0; i < s->n_child; i++) { /* later ones wrap what earlier ones made */
        ids before = {0};
        for (size_t k = 0; k < s->child[i].before.n; k++)
            ids_push(&before, s->child[i].before.v[k]);
        for (size_t k = 0; k < s->before.n; k++)
            ids_push(&before, s->before.v[k]);
        ids_free(&s->before);
        s->before = before;
        for (size_t k = 0; k < s->child[i].after.n; k++)
            ids_push(&s->after, s->child[i].after.v[k]);
    }
    return 0;
}

static const tok_stage_kind kinds[] = {
    {.type = "TemplateProcessing", .load = load_template},
    {.type = "ByteLevel"},
    {.type = "RobertaProcessing", .load = load_cls_sep},
    {.type = "BertProcessing", .load = load_cls_sep},
    {.type = "Sequence", .load = load_sequence},
};
const tok_family tok__postprocessors = {"post-processor", "processors", kinds,
                                        sizeof kinds / sizeof *kinds};
