/* tare serve. */
#include "cli/options.h"
#include "base/log.h"
#include "serve/serve.h"
#include "text/literal.h"
#include <stdlib.h>

int cmd_serve(const opts *o, err *e)
{
    int rc = 0;
    engine *en = NULL;
    engine_opts eo;
    const char *model;
    TRY(opts_model(o, &model, e));
    if (o->v[OPT_port].i < 0 || o->v[OPT_port].i > 65535) {
        rc = err_set(e, ERR_USAGE, "--port: %lld is not a port (0 to 65535)",
                     (long long)o->v[OPT_port].i);
        goto out;
    }
    serve_opts s = {.host = o->v[OPT_host].s,
                    .port = (int)o->v[OPT_port].i,
                    .names = o->v[OPT_served_name].list,
                    .n_names = o->v[OPT_served_name].n_list,
                    .api_key = o->v[OPT_api_key].given ? o->v[OPT_api_key].s : NULL,
                    .drain_seconds = o->v[OPT_drain].f,
                    .max_body_bytes = o->v[OPT_max_body].i,
                    .json = o->v[OPT_json].given};
    TRY(literal_parse(o->v[OPT_control_tokens].s, &s.literal, e));
    opts_engine(o, o->v, model, &eo);
    TRY(engine_open(&en, &eo, e));
    char *report = engine_report(en);
    log_info("%s", report);
    free(report);
    TRY(serve_run(en, &s, e));
    rc = 0;
out:
    engine_close(en, 0);
    return rc;
}
