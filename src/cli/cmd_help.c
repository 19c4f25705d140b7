/* tare help and tare completions: everything that is printed from the option table. */
#include "cli/options.h"
#include "base/version.h"
#include <string.h>

int cmd_help(const opts *o, err *e)
{
    buf b = {0};
    const command *c = NULL;
    for (int i = 0; o->n_args && i < CMDI_COUNT; i++)
        if (!strcmp(commands[i].name, o->args[0])) c = &commands[i];
    if (o->n_args && !c)
        return err_set(e, ERR_USAGE, "no command '%s'; `tare help` lists them", o->args[0]);
    opts_help(c, &b);
    cli_print_text(o, &b);
    buf_free(&b);
    return 0;
}

int cmd_version(const opts *o, err *e)
{
    buf b = {0};
    (void)e;
    if (o->v[OPT_json].given)
        buf_puts(&b, "{\"version\":\"" TARE_VERSION "\"}\n");
    else
        buf_puts(&b, "tare " TARE_VERSION "\n");
    cli_print(&b);
    buf_free(&b);
    return 0;
}

int cmd_completions(const opts *o, err *e)
{
    buf b = {0};
    const char *shell = o->n_args ? o->args[0] : "";
    if (!strcmp(shell, "markdown"))
        opts_markdown(&b);
    else if (!strcmp(shell, "bash") || !strcmp(shell, "zsh") || !strcmp(shell, "fish"))
        opts_completions(shell, &b);
    else
        return err_set(
            e, ERR_USAGE,
            "`tare completions` takes bash, zsh or fish (or markdown: the option reference)");
    cli_print_text(o, &b);
    buf_free(&b);
    return 0;
}
