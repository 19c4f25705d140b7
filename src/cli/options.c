/* Parser, help, completions and the option reference, all from options.def and commands.def.
 *
 * Order of precedence: command line, then TARE_<NAME> in the environment (dashes as underscores),
 * then the default in the table. Names may be written with underscores; --name=value and --name
 * value are the same; a short flag takes its value as the next word. */
#include "cli/options.h"
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <ctype.h>

typedef enum opt_type { T_FLAG, T_STR, T_INT, T_NUM, T_LIST } opt_type;
typedef enum opt_group {
    G_GENERAL,
    G_MODEL,
    G_RUN,
    G_OUTPUT,
    G_QUANT,
    G_PLAN,
    G_EVAL,
    G_SAMPLE,
    G_SERVE,
    G_DUMP,
    G_BENCH,
    G_TEXT,
    G_COUNT
} opt_group;
static const char *const group_names[G_COUNT] = {"General",   "Model",        "How the model runs",
                                                 "Output",    "Quantization", "Planning",
                                                 "Measuring", "Sampling",     "Server",
                                                 "Dump",      "Benchmark",    "Text"};

typedef struct opt_row {
    const char *name, *aliases;
    char letter;
    opt_type type;
    const char *def;
    unsigned cmds;
    opt_group group;
    const char *meta, *doc;
} opt_row;

/* The table's command column is written without the CMD_ prefix for the two sets. */
#define ALL      CMD_ALL
#define RUNS     CMD_RUNS
#define HASMODEL CMD_HASMODEL
static const opt_row rows[OPT_COUNT] = {
#define OPT(id, name, aliases, letter, type, def, cmds, group, meta, doc)                          \
    {name, aliases, letter, T_##type, def, cmds, G_##group, meta, doc},
#include "cli/options.def"
#undef OPT
};
#undef ALL
#undef RUNS
#undef HASMODEL

const command commands[CMDI_COUNT] = {
#define CMD(id, name, args, doc) {name, args, doc, cmd_##id, CMD_##id},
#include "cli/commands.def"
#undef CMD
};

/* Equal up to '-' versus '_'. */
static bool same_name(const char *a, size_t na, const char *b, size_t nb)
{
    if (na != nb) return false;
    for (size_t i = 0; i < na; i++) {
        char x = a[i] == '_' ? '-' : a[i], y = b[i] == '_' ? '-' : b[i];
        if (x != y) return false;
    }
    return true;
}

static bool in_list(const char *list, const char *word, size_t n)
{
    while (*list) {
        size_t k = strcspn(list, " ");
        if (same_name(list, k, word, n)) return true;
        list += k;
        while (*list == ' ')
            list++;
    }
    return false;
}

static int find_opt(const char *name, size_t n, unsigned cmd)
{
    for (int i = 0; i < OPT_COUNT; i++) {
        if (!(rows[i].cmds & cmd)) continue;
        if (same_name(rows[i].name, strlen(rows[i].name), name, n) ||
            in_list(rows[i].aliases, name, n))
            return i;
    }
    return -1;
}

static int set_value(opts *o, opt_val *v, int id, const char *text, const char *spelled, err *e)
{
    const opt_row *r = &rows[id];
    char *end = NULL;
    errno = 0;
    if (r->type == T_INT) {
        v->i = strtoll(text, &end, 10);
        if (!*text || *end || errno)
            return err_set(e, ERR_USAGE, "%s: '%s' is not a whole number", spelled, text);
    } else if (r->type == T_NUM) {
        v->f = strtod(text, &end);
        if (!*text || *end || errno || !(v->f == v->f))
            return err_set(e, ERR_USAGE, "%s: '%s' is not a number", spelled, text);
    } else if (r->type == T_LIST) {
        const char **grown = arena_alloc(o->mem, sizeof *grown * (size_t)(v->n_list + 1));
        if (v->n_list) memcpy(grown, v->list, sizeof *grown * (size_t)v->n_list);
        grown[v->n_list++] = text;
        v->list = grown;
    }
    v->s = text;
    v->given = true;
    return 0;
}

static int set_defaults(opts *o, opt_val *v, bool with_env, err *e)
{
    int rc = 0;
    for (int i = 0; i < OPT_COUNT; i++) {
        const opt_row *r = &rows[i];
        v[i] = (opt_val){.s = r->def};
        if (r->type == T_INT && *r->def) v[i].i = strtoll(r->def, NULL, 10);
        if (r->type == T_NUM && *r->def) v[i].f = strtod(r->def, NULL);
        if (!with_env) continue;
        char name[80];
        snprintf(name, sizeof name, "TARE_%s", r->name);
        for (char *p = name; *p; p++)
            *p = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
        const char *env = getenv(name);
        if (!env || !*env || !(r->cmds & commands[o->cmd].bit)) continue;
        if (r->type == T_FLAG) {
            v[i].given = strcmp(env, "0") != 0;
            continue;
        }
        TRY(set_value(o, &v[i], i, env, name, e));
    }
out:
    return rc;
}

static int unknown_option(const opts *o, const char *word, err *e)
{
    const char *name = word + 2;
    size_t n = strcspn(name, "=");
    for (int c = 0; c < CMDI_COUNT; c++)
        if (find_opt(name, n, commands[c].bit) >= 0)
            return err_set(
                e, ERR_USAGE, "'%.*s' belongs to `tare %s`, not to `tare %s`; see `tare help %s`",
                (int)(n + 2), word, commands[c].name, commands[o->cmd].name, commands[o->cmd].name);
    return err_set(e, ERR_USAGE, "unknown option '%s'; `tare help %s` lists the options", word,
                   commands[o->cmd].name);
}

/* One "--name[=value]" word; *i is advanced past a value taken from the next word. */
static int parse_long(opts *o, int argc, char **argv, int *i, err *e)
{
    const char *word = argv[*i], *name = word + 2;
    size_t n = strcspn(name, "=");
    unsigned bit = commands[o->cmd].bit;
    opt_val *set = o->v;
    int id = find_opt(name, n, bit);
    if (id < 0 && o->cmd == CMDI_compare && n > 5 && same_name(name, 5, "base-", 5)) {
        id = find_opt(name + 5, n - 5, bit);
        if (id >= 0 && rows[id].group == G_RUN)
            set = o->base;
        else
            id = -1;
    }
    if (id < 0) return unknown_option(o, word, e);
    if (rows[id].type == T_FLAG) {
        if (name[n] == '=') return err_set(e, ERR_USAGE, "'--%.*s' takes no value", (int)n, name);
        set[id].given = true;
        return 0;
    }
    const char *value = NULL;
    if (name[n] == '=')
        value = name + n + 1;
    else if (*i + 1 < argc)
        value = argv[++*i];
    if (!value) return err_set(e, ERR_USAGE, "'%s' needs a value %s", word, rows[id].meta);
    char *spelled = arena_strndup(o->mem, word, n + 2);
    return set_value(o, &set[id], id, value, spelled, e);
}

static int parse_short(opts *o, int argc, char **argv, int *i, err *e)
{
    const char *word = argv[*i];
    for (int id = 0; id < OPT_COUNT; id++) {
        if (rows[id].letter != word[1] || !(rows[id].cmds & commands[o->cmd].bit)) continue;
        if (rows[id].type == T_FLAG) {
            if (word[2]) break;
            o->v[id].given = true;
            return 0;
        }
        const char *value = word[2] ? word + 2 : *i + 1 < argc ? argv[++*i] : NULL;
        if (!value) return err_set(e, ERR_USAGE, "'%s' needs a value %s", word, rows[id].meta);
        return set_value(o, &o->v[id], id, value, word, e);
    }
    return err_set(e, ERR_USAGE, "unknown option '%s'; `tare help %s` lists the options", word,
                   commands[o->cmd].name);
}

static int parse_command(opts *o, const char *word, err *e)
{
    if (!strcmp(word, "--help") || !strcmp(word, "-h")) word = "help";
    if (!strcmp(word, "--version") || !strcmp(word, "-V")) word = "version";
    for (int c = 0; c < CMDI_COUNT; c++)
        if (!strcmp(commands[c].name, word)) {
            o->cmd = (cmd_id)c;
            return 0;
        }
    buf names = {0};
    for (int c = 0; c < CMDI_COUNT; c++)
        buf_printf(&names, "%s%s", c ? ", " : "", commands[c].name);
    int rc = err_set(e, ERR_USAGE, "unknown command '%s'; the commands are %s", word, names.data);
    buf_free(&names);
    return rc;
}

/* A word too many is a mistake that would otherwise pass unseen (`tare run MODEL Hello`). */
static int check_count(const opts *o, err *e)
{
    int most = o->cmd == CMDI_report    ? INT_MAX
               : o->cmd == CMDI_version ? 0
               : o->cmd == CMDI_compare || o->cmd == CMDI_tokenize || o->cmd == CMDI_detokenize ? 2
                                                                                                : 1;
    bool model = commands[o->cmd].bit & CMD_HASMODEL && o->v[OPT_model].given;
    if (model && o->cmd != CMDI_compare) most--;
    if (o->n_args <= most) return 0;
    return err_set(e, ERR_USAGE, "'%s' is one argument too many: `tare %s %s`", o->args[most],
                   commands[o->cmd].name, commands[o->cmd].args);
}

int opts_parse(opts *o, int argc, char **argv, err *e)
{
    int rc = 0;
    *o = (opts){.mem = arena_make()};
    if (argc < 2) return err_set(e, ERR_USAGE, "no command given; `tare help` lists them");
    TRY(parse_command(o, argv[1], e));
    TRY(set_defaults(o, o->v, true, e));
    TRY(set_defaults(o, o->base, false, e));
    o->args = arena_alloc(o->mem, sizeof *o->args * (size_t)argc);
    bool only_args = false;
    for (int i = 2; i < argc; i++) {
        const char *w = argv[i];
        if (only_args || w[0] != '-' || !w[1])
            o->args[o->n_args++] = w;
        else if (!strcmp(w, "--"))
            only_args = true;
        else if (w[1] == '-')
            TRY(parse_long(o, argc, argv, &i, e));
        else
            TRY(parse_short(o, argc, argv, &i, e));
    }
    TRY(check_count(o, e));
out:
    return rc;
}

void opts_free(opts *o)
{
    arena_drop(o->mem);
    o->mem = NULL;
}

static void help_option(const opt_row *r, buf *out)
{
    char head[96];
    int n = r->letter ? snprintf(head, sizeof head, "  -%c, --%s", r->letter, r->name)
                      : snprintf(head, sizeof head, "      --%s", r->name);
    if (*r->meta) snprintf(head + n, sizeof head - (size_t)n, " %s", r->meta);
    buf_printf(out, "%-38s %s", head, r->doc);
    if (*r->def && strcmp(r->def, "0")) buf_printf(out, " [%s]", r->def);
    if (*r->aliases) buf_printf(out, " (also --%s)", r->aliases);
    buf_putc(out, '\n');
}

void opts_help(const command *c, buf *out)
{
    if (!c) {
        buf_puts(
            out,
            "tare quantizes a language model, proves that it still does its job, and serves it.\n\n"
            "usage: tare COMMAND [ARGUMENTS] [OPTIONS]\n\n");
        for (int i = 0; i < CMDI_COUNT; i++)
            buf_printf(out, "  %-12s %s\n", commands[i].name, commands[i].doc);
        buf_puts(out, "\n`tare help COMMAND` lists its options. Results go to standard output, "
                      "messages to standard "
                      "error.\nExit status: 0 ok or safe, 1 failure, 2 usage, 10 confirm, 11 "
                      "reject, 12 not comparable.\n");
        return;
    }
    buf_printf(out, "usage: tare %s %s [OPTIONS]\n%s\n", c->name, c->args, c->doc);
    for (int g = 0; g < G_COUNT; g++) {
        bool head = false;
        for (int i = 0; i < OPT_COUNT; i++) {
            if ((int)rows[i].group != g || !(rows[i].cmds & c->bit)) continue;
            if (!head) buf_printf(out, "\n%s:\n", group_names[g]);
            head = true;
            help_option(&rows[i], out);
        }
    }
    if (c->bit == CMD_compare)
        buf_puts(out, "\nOptions of \"How the model runs\" apply to the candidate; --base-NAME "
                      "sets them for the baseline.\n");
}

void opts_markdown(buf *out)
{
    buf_puts(
        out,
        "# Options\n\nMade from src/cli/options.def and src/cli/commands.def by `make docs`. Every "
        "option can "
        "also be set by an environment\nvariable, `TARE_` and its name in capitals with "
        "underscores; the command "
        "line wins.\n\n## Commands\n\n| command | arguments | what it does |\n|---|---|---|\n");
    for (int i = 0; i < CMDI_COUNT; i++)
        buf_printf(out, "| `%s` | `%s` | %s |\n", commands[i].name, commands[i].args,
                   commands[i].doc);
    for (int g = 0; g < G_COUNT; g++) {
        const char *note = g == G_RUN ? "In `compare` these apply to the candidate; `--base-NAME` "
                                        "sets them for the baseline.\n\n"
                                      : "";
        buf_printf(out,
                   "\n## %s\n\n%s| option | aliases | default | commands | meaning "
                   "|\n|---|---|---|---|---|\n",
                   group_names[g], note);
        for (int i = 0; i < OPT_COUNT; i++) {
            const opt_row *r = &rows[i];
            if ((int)r->group != g) continue;
            buf_printf(out, "| `--%s%s%s` | %s%s%s | %s | ", r->name, *r->meta ? " " : "", r->meta,
                       *r->aliases ? "`--" : "", r->aliases, *r->aliases ? "`" : "",
                       *r->def ? r->def : "–");
            if (r->cmds == CMD_ALL) buf_puts(out, "all");
            for (int c = 0, n = 0; r->cmds != CMD_ALL && c < CMDI_COUNT; c++)
                if (r->cmds & commands[c].bit)
                    buf_printf(out, "%s%s", n++ ? " " : "", commands[c].name);
            buf_printf(out, " | %s |\n", r->doc);
        }
    }
}

static void complete_bash(buf *out)
{
    buf_puts(out, "_tare() {\n  local cur=${COMP_WORDS[COMP_CWORD]} words\n"
                  "  if [ \"$COMP_CWORD\" = 1 ]; then words=\"");
    for (int c = 0; c < CMDI_COUNT; c++)
        buf_printf(out, "%s%s", c ? " " : "", commands[c].name);
    buf_puts(out, "\"\n  else case ${COMP_WORDS[1]} in\n");
    for (int c = 0; c < CMDI_COUNT; c++) {
        buf_printf(out, "    %s) words=\"", commands[c].name);
        for (int i = 0, n = 0; i < OPT_COUNT; i++)
            if (rows[i].cmds & commands[c].bit)
                buf_printf(out, "%s--%s", n++ ? " " : "", rows[i].name);
        buf_puts(out, "\";;\n");
    }
    buf_puts(
        out,
        "  esac; fi\n  case $cur in -*) COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"));;\n"
        "  *) if [ \"$COMP_CWORD\" = 1 ]; then COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"));\n"
        "     else COMPREPLY=($(compgen -f -- \"$cur\")); fi;; esac\n}\ncomplete -o filenames -F "
        "_tare tare\n");
}

static void complete_fish(buf *out)
{
    for (int c = 0; c < CMDI_COUNT; c++)
        buf_printf(out, "complete -c tare -n __fish_use_subcommand -a %s -d '%s'\n",
                   commands[c].name, commands[c].doc);
    for (int i = 0; i < OPT_COUNT; i++) {
        buf_printf(out, "complete -c tare -n '__fish_seen_subcommand_from");
        for (int c = 0; c < CMDI_COUNT; c++)
            if (rows[i].cmds & commands[c].bit) buf_printf(out, " %s", commands[c].name);
        buf_printf(out, "' -l %s%s\n", rows[i].name, rows[i].type == T_FLAG ? "" : " -r");
    }
}

void opts_completions(const char *shell, buf *out)
{
    if (!strcmp(shell, "fish")) {
        complete_fish(out);
        return;
    }
    if (!strcmp(shell, "zsh"))
        buf_puts(out, "#compdef tare\nautoload -U +X bashcompinit && bashcompinit\n");
    complete_bash(out);
}
