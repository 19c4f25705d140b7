/* tare quantize and tare convert: both print what was written and how far it is from the source. */
#include "cli/options.h"
#include "bake/bake.h"
#include <stdio.h>
#include <string.h>

/* JSON has no infinity: a module stored without loss is null in snr_db. */
static void report_json(const bake_report *r, jw *w)
{
    jw_obj(w);
    jw_kstr(w, "out", r->out);
    jw_kstr(w, "scheme", r->scheme);
    jw_kf64(w, "seconds", r->seconds);
    jw_ki64(w, "peak_rss_bytes", (int64_t)r->peak_rss_bytes);
    jw_key(w, "snr_db");
    jw_obj(w);
    jw_kf64(w, "min", r->snr_min_db);
    jw_kf64(w, "median", r->snr_median_db);
    jw_kstr(w, "min_module", r->snr_min_module);
    jw_end_obj(w);
    jw_ki64(w, "bytes_in", (int64_t)r->bytes_in);
    jw_ki64(w, "bytes_out", (int64_t)r->bytes_out);
    jw_key(w, "modules");
    jw_arr(w);
    for (int i = 0; i < r->n_modules; i++) {
        jw_obj(w);
        jw_kstr(w, "name", r->modules[i].name);
        jw_kstr(w, "spec", r->modules[i].spec);
        jw_kf64(w, "snr_db", r->modules[i].snr_db);
        jw_ki64(w, "bytes", (int64_t)r->modules[i].bytes);
        jw_end_obj(w);
    }
    jw_end_arr(w);
    jw_key(w, "notes");
    jw_arr(w);
    for (int i = 0; i < r->n_notes; i++)
        jw_str(w, r->notes[i]);
    jw_end_arr(w);
    jw_end_obj(w);
}

/* The worst modules first matter; a whole table of hundreds of rows is left to --json. */
static void report_text(const bake_report *r, buf *out)
{
    for (int i = 0; i < r->n_notes; i++)
        buf_printf(out, "note: %s\n", r->notes[i]);
    if (r->n_modules) {
        buf_printf(
            out, "verified after reopening: %d modules, SNR median %.2f dB, lowest %.2f dB (%s)\n",
            r->n_modules, r->snr_median_db, r->snr_min_db, r->snr_min_module);
        int shown = r->n_modules < 8 ? r->n_modules : 8;
        for (int i = 0; i < shown; i++)
            buf_printf(out, "  %-48s %-28s %7.2f dB %12llu bytes\n", r->modules[i].name,
                       r->modules[i].spec, r->modules[i].snr_db,
                       (unsigned long long)r->modules[i].bytes);
        if (shown < r->n_modules)
            buf_printf(out, "  … %d more (all of them with --json)\n", r->n_modules - shown);
    }
    buf_printf(out, "%s: %s, %.2f MB from %.2f MB, %.1f s, peak anonymous memory %.0f MB\n", r->out,
               r->scheme, (double)r->bytes_out / 1e6, (double)r->bytes_in / 1e6, r->seconds,
               (double)r->peak_rss_bytes / 1e6);
}

static void print_report(const opts *o, const bake_report *r)
{
    buf b = {0};
    if (o->v[OPT_json].given) {
        jw w;
        jw_init(&w, &b, 0);
        report_json(r, &w);
        buf_putc(&b, '\n');
    } else {
        report_text(r, &b);
    }
    cli_print(&b);
    buf_free(&b);
}

static int need_out(const opts *o, err *e)
{
    if (o->v[OPT_out].given && *o->v[OPT_out].s) return 0;
    return err_set(e, ERR_USAGE, "no output folder given: `tare %s %s`", commands[o->cmd].name,
                   commands[o->cmd].args);
}

int cmd_quantize(const opts *o, err *e)
{
    int rc = 0;
    bake_report r = {0};
    bake_opts b = {.out = o->v[OPT_out].s,
                   .scheme = o->v[OPT_scheme].s,
                   .algo = o->v[OPT_algo].s,
                   .to = o->v[OPT_to].s,
                   .ignore = o->v[OPT_ignore].list,
                   .n_ignore = o->v[OPT_ignore].n_list,
                   .overwrite = o->v[OPT_overwrite].given,
                   .strict = o->v[OPT_strict].given,
                   .max_shard_bytes = (uint64_t)o->v[OPT_shard_bytes].i,
                   .threads = (int)o->v[OPT_threads].i};
    TRY(opts_model(o, &b.model, e));
    TRY(need_out(o, e));
    if (!o->v[OPT_scheme].given) {
        rc = err_set(
            e, ERR_USAGE,
            "no scheme given: --scheme fp8, int8, w:int4,g128 …; `tare plan` compares them");
        goto out;
    }
    TRY(bake_quantize(&b, &r, e));
    print_report(o, &r);
    rc = 0;
out:
    bake_report_free(&r);
    return rc;
}

int cmd_convert(const opts *o, err *e)
{
    int rc = 0;
    bake_report r = {0};
    convert_opts c = {.out = o->v[OPT_out].s,
                      .to = o->v[OPT_to].s,
                      .dtype = o->v[OPT_dtype].s,
                      .gptq_zeros = o->v[OPT_gptq_zeros].s,
                      .overwrite = o->v[OPT_overwrite].given,
                      .max_shard_bytes = (uint64_t)o->v[OPT_shard_bytes].i};
    TRY(opts_model(o, &c.in, e));
    TRY(need_out(o, e));
    TRY(bake_convert(&c, &r, e));
    print_report(o, &r);
    rc = 0;
out:
    bake_report_free(&r);
    return rc;
}
