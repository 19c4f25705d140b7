/* The command line: one table of options (options.def), one of commands (commands.def). */
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H
#include "base/mem.h"
#include "engine/engine.h"
#include "eval/eval.h"

typedef enum cmd_id {
#define CMD(id, name, args, doc) CMDI_##id,
#include "cli/commands.def"
#undef CMD
    CMDI_COUNT
} cmd_id;
enum {
#define CMD(id, name, args, doc) CMD_##id = 1 << CMDI_##id,
#include "cli/commands.def"
#undef CMD
    CMD_ALL = (1 << CMDI_COUNT) - 1,
    CMD_RUNS = CMD_compare | CMD_eval | CMD_serve | CMD_run | CMD_bench | CMD_dump,
    CMD_HASMODEL = CMD_RUNS | CMD_inspect | CMD_plan | CMD_quantize | CMD_convert | CMD_tokenize |
                   CMD_detokenize
};

typedef enum opt_id {
#define OPT(id, name, aliases, letter, type, def, cmds, group, meta, doc) OPT_##id,
#include "cli/options.def"
#undef OPT
    OPT_COUNT
} opt_id;

typedef struct opt_val {
    const char *s; /* text as given, or the default ("" = not given and no default) */
    int64_t i;
    double f;
    bool given;
    const char **list; /* LIST */
    int n_list;
} opt_val;

typedef struct opts {
    cmd_id cmd;
    opt_val v[OPT_COUNT];
    opt_val base[OPT_COUNT]; /* compare: --base-NAME, falls back to the default, not to v */
    const char **args;       /* positional arguments after the command */
    int n_args;
    arena *mem;
} opts;

typedef int cmd_fn(const opts *o, err *e); /* exit status >= 0, or -ERR_* */
typedef struct command {
    const char *name, *args, *doc;
    cmd_fn *run;
    unsigned bit;
} command;
extern const command commands[CMDI_COUNT];
#define CMD(id, name, args, doc) cmd_fn cmd_##id;
#include "cli/commands.def"
#undef CMD

/* Parses argv[1..]. ERR_USAGE names the word and what is allowed. */
int opts_parse(opts *o, int argc, char **argv, err *e);
void opts_free(opts *o);
void opts_help(const command *c, buf *out); /* c NULL = overview */
void opts_completions(const char *shell, buf *out);
void opts_markdown(buf *out); /* docs/OPTIONS.md */

/* Shared by the commands. */
int opts_model(const opts *o, const char **model, err *e); /* --model or the first argument */
void opts_engine(const opts *o, const opt_val *v, const char *model, engine_opts *out);
int opts_eval(const opts *o, eval_opts *out, err *e); /* lists allocated in o->mem */
void cli_print(const buf *b);                         /* whole buffer to stdout */
/* Text for people; with --json an object with that text. */
void cli_print_text(const opts *o, const buf *b);
#endif
