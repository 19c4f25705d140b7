/* Loading of stages: one object of tokenizer.json with a "type" becomes one tok_stage by the table
 * of its family. What the table lacks is refused by name together with what there is; nesting is
 * bounded. The helpers here read the fields that several types share. */
#include <stdlib.h>
#include <string.h>
#include "text/tok_internal.h"

void tok__spans_grow(tok_spans *l)
{
    l->cap = l->cap ? l->cap * 2 : 64;
    l->v = xrealloc(l->v, l->cap * sizeof *l->v);
}

static int unknown_type(const char *type, const tok_family *f, const char *where, err *e)
{
    buf b = {0};
    for (size_t i = 0; i < f->n; i++)
        buf_printf(&b, "%s%s", i ? ", " : "", f->kinds[i].type);
    err_set(e, ERR_UNSUPPORTED, "%s: %s of type '%.60s' is not supported; supported are %s", where,
            f->name, type, b.data);
    buf_free(&b);
    return -ERR_UNSUPPORTED;
}

static int load_into(tok_stage *s, const json *j, const tok_family *f, const char *where, err *e)
{
    const char *type = NULL;
    if (!cJSON_IsObject(j))
        return err_set(e, ERR_FORMAT, "%s: a %s must be an object", where, f->name);
    int rc = json_get_str(j, "type", &type, where, e);
    if (rc < 0) return rc;
    if (!type) return err_set(e, ERR_FORMAT, "%s: a %s has no 'type'", where, f->name);
    for (size_t i = 0; i < f->n && !s->kind; i++)
        if (!strcmp(f->kinds[i].type, type)) s->kind = &f->kinds[i];
    if (!s->kind) return unknown_type(type, f, where, e);
    return s->kind->load ? s->kind->load(s, j, where, e) : 0;
}

static void drop_fields(tok_stage *s)
{
    for (size_t i = 0; i < s->n_child; i++)
        drop_fields(&s->child[i]);
    free(s->child);
    tok__regex_close(s->re);
    tok__charsmap_close(s->map);
    tok__lexicon_drop(s->lexicon);
    free(s->text);
    free(s->content);
    ids_free(&s->before);
    ids_free(&s->after);
}

int tok__stage_open(tok_stage **out, const json *j, const tok_family *f, const char *where, err *e)
{
    *out = NULL;
    if (!j || cJSON_IsNull(j)) return 0;
    tok_stage *s = xcalloc(1, sizeof *s);
    int rc = load_into(s, j, f, where, e);
    if (rc < 0) {
        tok__stage_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

void tok__stage_close(tok_stage *s)
{
    if (!s) return;
    drop_fields(s);
    free(s);
}

/* Sequences nest in JSON; json_parse bounds the depth of the text, this the recursion here. */
static int depth_of(const json *j, const char *key)
{
    int deepest = 0;
    for (const json *c = json_get(j, key) ? json_get(j, key)->child : NULL; c; c = c->next) {
        int d = depth_of(c, key);
        if (d > deepest) deepest = d;
    }
    return deepest + 1;
}

int tok__load_children(tok_stage *s, const json *j, const tok_family *f, const char *where, err *e)
{
    const json *list = json_get(j, f->list_key);
    if (!cJSON_IsArray(list))
        return err_set(e, ERR_FORMAT, "%s: a Sequence of type %s needs the array '%s'", where,
                       f->name, f->list_key);
    if (depth_of(j, f->list_key) > TOK_MAX_STAGE_DEPTH)
        return err_set(e, ERR_LIMIT, "%s: '%s' is nested deeper than %d", where, f->list_key,
                       TOK_MAX_STAGE_DEPTH);
    size_t n = 0;
    for (const json *c = list->child; c; c = c->next)
        n++;
    s->child = xcalloc(n + 1, sizeof *s->child);
    for (const json *c = list->child; c; c = c->next) {
        int rc = load_into(&s->child[s->n_child++], c, f, where, e);
        if (rc < 0) return rc;
    }
    return 0;
}

int tok__load_text(char **out, const json *j, const char *key, const char *fallback,
                   const char *where, err *e)
{
    const char *s = fallback;
    int rc = json_get_str(j, key, &s, where, e);
    if (rc < 0) return rc;
    if (!s) return err_set(e, ERR_FORMAT, "%s: a stage lacks its '%s'", where, key);
    *out = xstrdup(s);
    return 0;
}

/* "pattern": {"String": "…"} | {"Regex": "…"} | "…" */
int tok__load_pattern(tok_stage *s, const json *j, const char *where, err *e)
{
    const json *p = json_get(j, "pattern");
    const json *text = cJSON_IsObject(p) ? json_get(p, "String") : p;
    const json *re = json_get(p, "Regex");
    if (cJSON_IsString(re)) {
        s->text = xstrdup(re->valuestring);
        return tok__regex_open(&s->re, s->text, strlen(s->text), where, e);
    }
    if (!cJSON_IsString(text))
        return err_set(e, ERR_FORMAT, "%s: 'pattern' must be {\"String\": …} or {\"Regex\": …}",
                       where);
    s->text = xstrdup(text->valuestring);
    return tok__regex_literal(&s->re, s->text, strlen(s->text), where, e);
}
