/* tare report: the table over several comparisons, read back from what `compare --report` wrote.
 * One row for the baseline of each pair that is met first, then one row for each candidate. */
#include "cli/options.h"
#include "base/file.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Value at a dotted path, NULL if any part is absent. */
static const json *at(const json *root, const char *path)
{
    while (root && *path) {
        char key[64];
        size_t n = strcspn(path, ".");
        snprintf(key, sizeof key, "%.*s", (int)n, path);
        root = json_get(root, key);
        path += n + (path[n] == '.');
    }
    return root;
}

static void cell(buf *b, const json *root, const char *path, int decimals, double unit)
{
    const json *v = at(root, path);
    if (cJSON_IsNumber(v))
        buf_printf(b, " %9.*f |", decimals, v->valuedouble / unit);
    else
        buf_printf(b, " %11s |", "–"); /* the dash takes three bytes and one column */
}

/* Accuracy over all items of all tasks, in percent. */
static void accuracy(buf *b, const json *root, const char *side)
{
    double n = 0, right = 0;
    const json *tasks = json_get(root, "tasks");
    for (const json *t = tasks ? tasks->child : NULL; t; t = t->next) {
        const json *a = json_get(t, side), *k = json_get(t, "n");
        if (!cJSON_IsNumber(a) || !cJSON_IsNumber(k)) continue;
        n += k->valuedouble;
        right += a->valuedouble * k->valuedouble;
    }
    if (n > 0)
        buf_printf(b, " %7.2f %% |", 100 * right / n);
    else
        buf_printf(b, " %11s |", "–");
}

static const char *text_at(const json *root, const char *path)
{
    const json *v = at(root, path);
    return cJSON_IsString(v) ? v->valuestring : "–";
}

static void row(buf *b, const json *root, const char *side, const char *name, bool cand)
{
    char path[96];
    static const struct {
        const char *section, *key;
        int decimals;
    } keys[] = {{"memory", "weight_file_bytes", 2},
                {"memory", "weight_bytes", 2},
                {"memory", "kv_bytes_per_token", 0},
                {"speed", "load_seconds", 2},
                {"speed", "ttft_ms", 1},
                {"speed", "tpot_ms", 2}};
    buf_printf(b, "| %-34.34s |", name);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        snprintf(path, sizeof path, "%s.%s.%s", keys[i].section, side, keys[i].key);
        cell(b, root, path, keys[i].decimals, i < 2 ? 1e6 : 1);
    }
    snprintf(path, sizeof path, "perplexity.%s", side);
    cell(b, root, path, 4, 1);
    cell(b, cand ? root : NULL, "kl.mean", 5, 1);
    cell(b, cand ? root : NULL, "top1", 4, 1);
    accuracy(b, root, side);
    buf_printf(b, " %-14s |\n", cand ? text_at(root, "verdict") : "baseline");
}

/* --json: the comparisons themselves, in one object. */
static int all_json(const opts *o, err *e)
{
    int rc = 0;
    json *root = NULL, *all = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(all, "reports");
    for (int i = 0; i < o->n_args; i++) {
        TRY(json_parse_file(&root, o->args[i], e));
        cJSON_AddItemToArray(list, root);
        root = NULL;
    }
    char *text = cJSON_PrintUnformatted(all);
    buf b = {0};
    buf_printf(&b, "%s\n", text ? text : "{}");
    cli_print(&b);
    buf_free(&b);
    free(text);
    rc = 0;
out:
    json_drop(all);
    return rc;
}

int cmd_report(const opts *o, err *e)
{
    int rc = 0;
    buf b = {0};
    json *root = NULL;
    if (o->n_args && o->v[OPT_json].given) return all_json(o, e);
    if (!o->n_args) return err_set(e, ERR_USAGE, "no file given: `tare report COMPARE.json …`");
    buf_puts(
        &b,
        "| model                              |   file MB | in memory | KV B/token |   load s |   "
        "TTFT ms |   TPOT ms |  perplexity |      KL | top-1 | accuracy | verdict |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|\n");
    char seen[256] = "";
    for (int i = 0; i < o->n_args; i++) {
        TRY(json_parse_file(&root, o->args[i], e));
        const char *base = text_at(root, "baseline.model");
        if (strcmp(base, seen)) row(&b, root, "baseline", base, false);
        snprintf(seen, sizeof seen, "%s", base);
        char name[160];
        snprintf(name, sizeof name, "%s kv:%s", text_at(root, "candidate.model"),
                 text_at(root, "candidate.kv"));
        row(&b, root, "candidate", name, true);
        json_drop(root);
        root = NULL;
    }
    cli_print(&b);
    rc = 0;
out:
    json_drop(root);
    buf_free(&b);
    return rc;
}
