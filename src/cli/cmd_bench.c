/* tare bench: TTFT, TPOT and tokens a second of the served path, medians of several runs, for each
 * batch and context; and the share of the machine's read bandwidth that decoding reaches. Of a
 * model, or of a shape with random weights (--shape), where only the speed means something. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "cli/bench.h"

static int list_of(const char *option, const char *text, int64_t *out, int *n, err *e)
{
    const char *p = text;
    *n = 0;
    for (;;) {
        char *end = NULL;
        errno = 0;
        long long v = strtoll(p, &end, 10);
        if (end == p || errno || v < 1 || v > 100000000 || (*end && *end != ','))
            return err_set(e, ERR_USAGE, "%s: '%s' is not a list of whole numbers from 1", option,
                           text);
        if (*n == BENCH_LIST)
            return err_set(e, ERR_USAGE, "%s: more than %d numbers", option, BENCH_LIST);
        out[(*n)++] = v;
        if (!*end) return 0;
        p = end + 1;
    }
}

/* bf16 and w4a16 are not presets of the grammar: no quantization, and another name of int4. */
static int scheme_of(const opts *o, const char **out, err *e)
{
    qspec s;
    const opt_val *given = &o->v[OPT_scheme];
    *out = NULL;
    if (!given->given || !strcmp(given->s, "bf16")) return 0;
    *out = !strcmp(given->s, "w4a16") ? "int4" : given->s;
    int rc = qspec_parse(*out, &s, e);
    return rc < 0 ? rc : 0;
}

int bench_plan_of(const opts *o, bench_plan *p, err *e)
{
    const opt_val *v = o->v;
    int rc = 0;
    *p = (bench_plan){.output = v[OPT_bench_output].i,
                      .repeat = (int)v[OPT_bench_repeat].i,
                      .prefill = !v[OPT_bench_no_prefill].given,
                      .profile = v[OPT_bench_profile].given};
    TRY(list_of("--batch", v[OPT_bench_batch].s, p->batch, &p->n_batch, e));
    TRY(list_of("--prompt-tokens", v[OPT_bench_prompt].s, p->context, &p->n_context, e));
    if (v[OPT_bench_repeat].i < 1 || v[OPT_bench_repeat].i > BENCH_REPEAT || p->output < 2)
        return err_set(e, ERR_USAGE, "--repeat is 1 to %d, --output-tokens from 2", BENCH_REPEAT);
    bool shape = v[OPT_bench_shape].given;
    if (!shape && v[OPT_bench_kernels].given)
        return err_set(e, ERR_USAGE, "--kernels goes with --shape, which names the linears");
    if (!shape && v[OPT_bench_tune].given)
        return err_set(e, ERR_USAGE,
                       "--tune goes with --shape, which names the linears; for a model, give its "
                       "config.json and --scheme");
    if (v[OPT_bench_tune].given && (v[OPT_bench_kernels].given || p->profile))
        return err_set(e, ERR_USAGE, "--tune, --kernels and --profile: give one of them");
    if (!shape && (v[OPT_scheme].given || v[OPT_bench_no_prefill].given))
        return err_set(e, ERR_USAGE, "--scheme and --no-prefill go with --shape; a model is %s",
                       v[OPT_scheme].given ? "quantized at load by --quantization"
                                           : "measured with its prompts");
    if (shape && (o->n_args || v[OPT_model].given))
        return err_set(e, ERR_USAGE, "a model and --shape %s: give one of them",
                       v[OPT_bench_shape].s);
    if (shape && v[OPT_quantization].given)
        return err_set(e, ERR_USAGE, "--shape: name the scheme by --scheme, not --quantization");
    if (shape) TRY(scheme_of(o, &p->scheme, e));
out:
    return rc;
}

static int64_t largest(const int64_t *v, int n)
{
    int64_t m = 0;
    for (int i = 0; i < n; i++)
        m = v[i] > m ? v[i] : m;
    return m;
}

/* The engine is opened for the largest batch and context. */
static int open_engine(const opts *o, const bench_plan *p, const char *shape, engine **en, err *e)
{
    engine_opts eo;
    const char *model = o->v[OPT_bench_shape].s;
    int rc = 0;
    if (!shape) TRY(opts_model(o, &model, e));
    opts_engine(o, o->v, model, &eo);
    int64_t batch = largest(p->batch, p->n_batch), context = largest(p->context, p->n_context);
    eo.max_running = batch;
    if (eo.max_queued < batch) eo.max_queued = batch;
    if (shape) {
        eo.shape = shape;
        eo.quantization = p->scheme;
    }
    int64_t more = shape ? 0 : (batch * context + eo.chunk_tokens - 1) / eo.chunk_tokens + batch;
    if (!eo.max_model_len) eo.max_model_len = context + p->output + more + 16;
    TRY(engine_open(en, &eo, e));
out:
    return rc;
}

static int roof(const opts *o, bench_report *r, err *e)
{
    kern_dev *d = NULL;
    bool cpu = !strncmp(r->info.device, "cpu", 3);
    kern_opts k = {.device = cpu ? NULL : o->v[OPT_device].s, .threads = (int)o->v[OPT_threads].i};
    int rc = 0;
    TRY(cpu_parse(o->v[OPT_cpu_features].s, &k.cpu_features, e));
    TRY(kern_open(&d, &k, e));
    TRY(kern_measure_roof(d, cpu ? (size_t)r->info.linear_bytes : (size_t)2 << 30, &r->roof, e));
out:
    kern_close(d);
    return rc;
}

static int measure(engine *en, const bench_plan *p, bench_report *r, err *e)
{
    int rc = 0;
    r->rows = xcalloc((size_t)(p->n_batch * p->n_context), sizeof *r->rows);
    for (int c = 0; c < p->n_context; c++)
        for (int b = 0; b < p->n_batch; b++) {
            bench_row *row = &r->rows[r->n_rows++];
            row->batch = p->batch[b];
            row->context = p->context[c];
            TRY(bench_measure(en, p, r->shape, row, e));
            log_info("batch %lld, context %lld: TTFT of the last %.1f ms, TPOT %.3f ms",
                     (long long)row->batch, (long long)row->context, row->first_all_ms,
                     row->tpot_ms);
        }
out:
    return rc;
}

int cmd_bench(const opts *o, err *e)
{
    int rc = 0;
    engine *en = NULL;
    char *shape = NULL;
    bench_plan p;
    bench_report r = {0};
    buf b = {0};
    TRY(bench_plan_of(o, &p, e));
    if (o->v[OPT_bench_shape].given) TRY(bench_shape_text(o->v[OPT_bench_shape].s, &shape, e));
    r.shape = shape != NULL;
    if (o->v[OPT_bench_kernels].given) {
        TRY(bench_kernels(o, &p, shape, &b, e));
        cli_print(&b);
        goto out;
    }
    if (o->v[OPT_bench_tune].given) {
        TRY(bench_tune(o, &p, shape, &b, e));
        cli_print(&b);
        goto out;
    }
    TRY(open_engine(o, &p, shape, &en, e));
    TRY(measure(en, &p, &r, e));
    engine_get_info(en, &r.info);
    engine_close(en, 0);
    en = NULL;
    err why = {0};
    if (roof(o, &r, &why) < 0) {
        log_warn("the machine's roof was not measured: %s", why.msg);
        r.roof = (kern_roof){0};
    }
    bench_print(o, &p, &r, &b);
    cli_print(&b);
    rc = 0;
out:
    engine_close(en, 0);
    for (int i = 0; i < r.n_rows; i++)
        for (int k = 0; k < 2; k++)
            free(r.rows[i].ops[k].v);
    free(r.rows);
    free(shape);
    buf_free(&b);
    return rc;
}
