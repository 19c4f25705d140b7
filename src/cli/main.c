/* tare: parse, call one command, report. The only place that turns errors into an exit status. */
#include "cli/options.h"
#include "base/log.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Whether --json was given, also on a command line that could not be parsed. */
static bool wants_json(int argc, char **argv)
{
    const char *env = getenv("TARE_JSON");
    bool found = env && *env && strcmp(env, "0");
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
        found |= !strcmp(argv[i], "--json");
    return found;
}

int main(int argc, char **argv)
{
    err e = {0};
    opts o;
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is an error of write, as a full disk is */
    int rc = opts_parse(&o, argc, argv, &e);
    if (rc == 0 && o.v[OPT_help].given) {
        buf b = {0};
        opts_help(o.cmd == CMDI_help ? NULL : &commands[o.cmd], &b);
        cli_print_text(&o, &b);
        buf_free(&b);
    } else if (rc == 0) {
        if (o.v[OPT_quiet].given) log_set_level(LOG_WARN);
        if (o.v[OPT_verbose].given) log_set_level(LOG_DEBUG);
        rc = commands[o.cmd].run(&o, &e);
        if (fflush(stdout) || ferror(stdout))
            rc = err_set(&e, ERR_IO, "standard output: write failed");
    }
    if (rc < 0) {
        fprintf(stderr, "tare: error: %s\n", e.msg);
        if (wants_json(argc, argv)) {
            buf b = {0};
            jw w;
            jw_init(&w, &b, 0);
            jw_obj(&w);
            jw_key(&w, "error");
            jw_obj(&w);
            jw_kstr(&w, "code", err_name(e.code));
            jw_kstr(&w, "message", e.msg);
            jw_end_obj(&w);
            jw_end_obj(&w);
            buf_putc(&b, '\n');
            cli_print(&b);
            buf_free(&b);
        }
        rc = rc == -ERR_USAGE ? 2 : rc == -ERR_NOTCOMPARABLE ? 12 : 1;
    }
    opts_free(&o);
    return rc;
}
