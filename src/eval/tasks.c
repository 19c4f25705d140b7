/* The registry of task types, and reading a task file into items.
 *
 * A row says by which fields a type is known, what it asks and how it grades; the files task_*.c
 * hold one row each. The order is the order of detection: the first row whose fields the first item
 * has decides for the whole file, and every later item must fit. --limit N keeps N items evenly
 * spread over the file (item floor(i * n / N)), so that both models of a comparison see the same
 * ones. */
#include "eval/local.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/file.h"
#include "eval/jsonl.h"

const task_type *const eval__tasks[] = {&eval__choice, &eval__code, &eval__classify,
                                        &eval__generate};
const int eval__n_tasks = sizeof eval__tasks / sizeof *eval__tasks;

bool eval__has(const json *item, const char *key)
{
    return !json_is_null_or_absent(item, key);
}

int eval__need_str(const json *item, const char *key, const char **out, const char *where, err *e)
{
    *out = NULL;
    int rc = json_get_str(item, key, out, where, e);
    if (rc == 0)
        return err_set(e, ERR_FORMAT, "%s: field \"%s\" (a string) is missing", where, key);
    return rc < 0 ? rc : 0;
}

shot *eval__item_shots(task_item *it, int n)
{
    it->shots = xcalloc((size_t)n, sizeof *it->shots);
    it->n_shots = it->n_left = n;
    return it->shots;
}

static void names_of(const json *item, char *to, size_t cap)
{
    size_t k = 0;
    to[0] = 0;
    for (const json *c = item->child; c && k + 48 < cap; c = c->next)
        k += (size_t)snprintf(to + k, cap - k, "%s%.32s", k ? ", " : "", c->string);
}

static int find_type(const task_run *r, const json *item, const char *where, const task_type **out,
                     err *e)
{
    char found[256];
    for (int i = 0; i < eval__n_tasks; i++) {
        const task_type *t = eval__tasks[i];
        if (r->o->task_type ? !strcmp(t->name, r->o->task_type) : t->detect(item)) {
            *out = t;
            return 0;
        }
    }
    if (r->o->task_type)
        return err_set(e, ERR_USAGE,
                       "--task-type '%s' is not one of generate, choice, code, classify",
                       r->o->task_type);
    names_of(item, found, sizeof found);
    return err_set(e, ERR_FORMAT,
                   "%s: no task type has these fields (%s); expected question + answer (generate), "
                   "with choices (choice), entry_point or test_list (code), or text + label "
                   "(classify); --task-type says it outright",
                   where, found);
}

static void add_item(task_run *r, int64_t *cap, json *j, int64_t line)
{
    if (r->n == *cap) {
        *cap = *cap ? 2 * *cap : 256;
        r->items = xrealloc(r->items, (size_t)*cap * sizeof *r->items);
    }
    r->items[r->n++] = (task_item){.j = j, .line = line};
}

static void thin(task_run *r, int64_t limit)
{
    if (limit <= 0 || limit >= r->n) return;
    int64_t n = r->n, next = 0;
    r->left_out = xcalloc((size_t)(n - limit), sizeof *r->left_out);
    for (int64_t i = 0; i < n; i++) {
        if (next < limit && i == next * n / limit)
            r->items[next++] = r->items[i];
        else
            r->left_out[r->n_left_out++] = r->items[i];
    }
    r->n = limit;
}

int eval__load_items(task_run *r, const task_type **type, err *e)
{
    jsonl in;
    json *j = NULL;
    int64_t cap = 0;
    int rc, got;
    *type = NULL;
    TRY(jsonl_open(&in, r->file, e));
    while ((got = jsonl_next(&in, &j, e)) == 1) {
        char where[512];
        snprintf(where, sizeof where, "%s:%lld", r->file, (long long)in.line);
        add_item(r, &cap, j, in.line);
        if (!*type) TRY(find_type(r, j, where, type, e));
        TRY((*type)->check(r, j, where, e));
    }
    TRY(got);
    if (!r->n) {
        rc = err_set(e, ERR_FORMAT, "%s: the task file is empty (no JSON line in it)", r->file);
        goto out;
    }
    thin(r, r->o->limit);
    rc = 0;
out:
    jsonl_close(&in);
    return rc;
}

void eval__free_items(task_run *r)
{
    for (int64_t i = 0; i < r->n; i++) {
        task_item *it = &r->items[i];
        for (int k = 0; k < it->n_shots; k++)
            eval__shot_free(&it->shots[k]);
        free(it->shots);
        free(it->out.answer);
        json_drop(it->j);
    }
    free(r->items);
    for (int64_t i = 0; i < r->n_left_out; i++)
        json_drop(r->left_out[i].j);
    free(r->left_out);
    r->left_out = NULL;
    r->n_left_out = 0;
    r->items = NULL;
    r->n = 0;
}
