/* tare inspect: bake_inspect makes the JSON object; the table is printed from that same object. */
#include "cli/options.h"
#include "bake/bake.h"
#include <stdio.h>
#include <string.h>

static const char *text_of(const json *o, const char *key)
{
    const json *v = json_get(o, key);
    return cJSON_IsString(v) ? v->valuestring : "–";
}

static void print_bytes(const json *root, buf *out)
{
    static const char *const keys[] = {"codes",       "scales",  "zeros",
                                       "unquantized", "padding", "total"};
    const json *b = json_get(root, "bytes");
    buf_puts(out, "bytes\n");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const json *v = json_get(b, keys[i]);
        double n = cJSON_IsNumber(v) ? v->valuedouble : 0;
        buf_printf(out, "  %-12s %16.0f  %10.2f MB\n", keys[i], n, n / 1e6);
    }
}

/* Modules with equal spec are one line: the usual model has three or four. */
static void print_modules(const json *root, buf *out)
{
    const json *mods = json_get(root, "modules");
    int n = cJSON_GetArraySize(mods);
    buf_printf(out, "quantized modules: %d\n", n);
    const json *m = mods ? mods->child : NULL;
    while (m) {
        const json *first = m;
        int count = 0;
        for (; m && !strcmp(text_of(m, "spec"), text_of(first, "spec")); m = m->next)
            count++;
        buf_printf(out, "  %4d x %-36s from %s\n", count, text_of(first, "spec"),
                   text_of(first, "name"));
    }
    const json *u = json_get(root, "unquantized");
    int k = 0;
    buf_printf(out, "unquantized tensors: %d\n", cJSON_GetArraySize(u));
    for (const json *x = u ? u->child : NULL; x && k < 6; x = x->next, k++)
        buf_printf(out, "  %s\n", cJSON_IsString(x) ? x->valuestring : text_of(x, "name"));
    if (k == 6) buf_puts(out, "  …\n");
}

/* Which modules the config keeps unquantized. */
static void print_ignored(const json *root, buf *out)
{
    const json *list = json_get(root, "ignore");
    int n = cJSON_GetArraySize(list), k = 0;
    if (n) buf_printf(out, "rules that keep modules unquantized: %d\n", n);
    for (const json *x = list ? list->child : NULL; x && k < 6; x = x->next, k++)
        buf_printf(out, "  %s\n", text_of(x, "rule"));
    if (k < n) buf_puts(out, "  …\n");
}

static void print_human(const json *root, buf *out)
{
    static const char *const keys[] = {
        "model", "architecture", "text_architecture", "format", "w", "a", "kv", "origin"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!json_is_null_or_absent(root, keys[i]))
            buf_printf(out, "%-14s %s\n", keys[i], text_of(root, keys[i]));
    bool runs = cJSON_IsTrue(json_get(root, "runs"));
    buf_printf(out, "%-14s %s%s\n", "runs",
               runs ? "yes" : "no: ", runs ? "" : text_of(root, "why_not"));
    const json *p = json_get(root, "params");
    if (cJSON_IsNumber(p)) buf_printf(out, "%-14s %.0f\n", "parameters", p->valuedouble);
    if (cJSON_IsTrue(json_get(root, "weights"))) {
        print_modules(root, out);
        print_bytes(root, out);
    }
    print_ignored(root, out);
    const json *w = json_get(root, "warnings");
    for (const json *x = w ? w->child : NULL; x; x = x->next)
        if (cJSON_IsString(x)) buf_printf(out, "warning: %s\n", x->valuestring);
}

int cmd_inspect(const opts *o, err *e)
{
    int rc = 0;
    const char *model;
    buf text = {0}, out = {0};
    json *root = NULL;
    jw w;
    TRY(opts_model(o, &model, e));
    jw_init(&w, &text, 0);
    TRY(bake_inspect(model, &w, e));
    if (o->v[OPT_json].given) {
        buf_putc(&text, '\n');
        cli_print(&text);
    } else {
        TRY(json_parse(&root, text.data, text.len, "inspect", e));
        print_human(root, &out);
        cli_print(&out);
    }
    rc = 0;
out:
    json_drop(root);
    buf_free(&text);
    buf_free(&out);
    return rc;
}
