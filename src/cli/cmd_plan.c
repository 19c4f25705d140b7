/* tare plan: memory by item for every preset (or the one given), before anything is loaded. An
 * already quantized checkpoint has one row: itself. */
#include "cli/options.h"
#include "plan/plan.h"
#include <stdio.h>
#include <string.h>

typedef struct plan_row {
    const char *name;
    qspec spec;
    plan_out out;
    bool ok;
} plan_row;

typedef struct plan_job {
    ckpt *c;
    quant_ckpt *q;
    plan_in in;
    plan_row *rows;
    int n_rows;
    uint64_t available;
    const char *source;
    kern_dev *gpu; /* NULL: a CPU */
    uint64_t all;  /* memory of the GPU */
    double fraction;
} plan_job;

static int add_row(plan_job *j, const char *name, const char *scheme, err *e)
{
    plan_row *r = &j->rows[j->n_rows];
    *r = (plan_row){.name = name};
    if (scheme) {
        int rc = qspec_parse(scheme, &r->spec, e);
        if (rc < 0) return rc;
        j->in.scheme = &r->spec;
    } else {
        j->in.scheme = NULL;
    }
    int rc = plan_compute(&j->in, &r->out, e);
    if (rc < 0) return rc;
    r->ok = !*r->out.refused;
    j->n_rows++;
    return 0;
}

static int fill_rows(const opts *o, plan_job *j, err *e)
{
    bool quantized = strcmp(j->q->dialect->name, "plain") != 0;
    j->rows = arena_alloc(o->mem, sizeof *j->rows * (size_t)(qspec_n_presets + 2));
    const char *first = quantized               ? "as stored"
                        : ckpt_is_gguf(j->q->c) ? "gguf, run as bf16"
                                                : "unquantized";
    int rc = add_row(j, first, NULL, e);
    if (rc < 0 || quantized) return rc;
    if (o->v[OPT_scheme].given) return add_row(j, o->v[OPT_scheme].s, o->v[OPT_scheme].s, e);
    for (int i = 0; i < qspec_n_presets && rc >= 0; i++)
        rc = add_row(j, qspec_presets[i].name, qspec_presets[i].name, e);
    return rc;
}

/* Of each device. */
static int each_threads(const opt_val *v)
{
    int64_t n = v[OPT_threads].i ? v[OPT_threads].i : thread_cpus(), tp = v[OPT_tp].i;
    return (int)(tp > 1 && n / tp > 0 ? n / tp : tp > 1 ? 1 : n);
}

/* The layouts of a GPU are asked what they take, so it has to be there. */
static int open_gpu(const opts *o, plan_job *j, err *e)
{
    err why = {0};
    uint64_t left;
    kern_opts k = {.device = o->v[OPT_device].s, .threads = (int)o->v[OPT_threads].i};
    if (!strcmp(k.device, "cpu")) return 0;
    int rc = cpu_parse(o->v[OPT_cpu_features].s, &k.cpu_features, e);
    if (rc < 0) return rc;
    rc = kern_open(&j->gpu, &k, &why);
    if (rc < 0) return err_set(e, why.code, "%s; without --device the plan is for a CPU", why.msg);
    j->available = j->gpu->memory_bytes;
    j->source = "the GPU";
    if (!kern_memory(j->gpu, &j->all, &left)) j->all = j->available;
    j->in.dev = j->gpu;
    if (!o->v[OPT_page_size].i && j->gpu->page_tokens) j->in.page_tokens = j->gpu->page_tokens;
    return 0;
}

static int setup(const opts *o, plan_job *j, err *e)
{
    int rc = 0;
    const char *model;
    const kv_format *kv = NULL;
    const opt_val *v = o->v;
    TRY(opts_model(o, &model, e));
    TRY(ckpt_open(&j->c, model, e));
    TRY(quant_open(&j->q, j->c, e));
    const char *kvname =
        !strcmp(v[OPT_kv_cache_dtype].s, "auto") ? "bf16" : v[OPT_kv_cache_dtype].s;
    if (!strcmp(v[OPT_kv_cache_dtype].s, "auto") && qaxis_quantized(&j->q->kv))
        kvname = num_infos[j->q->kv.type].name;
    TRY(kv_format_parse(kvname, &kv, e));
    j->in = (plan_in){.cfg = ckpt_cfg(j->c),
                      .q = j->q,
                      .kv = kv->type,
                      .threads = each_threads(v),
                      .ranks = v[OPT_tp].i > INT16_MAX ? INT16_MAX : (int)v[OPT_tp].i,
                      .context = v[OPT_context].i,
                      .concurrency = v[OPT_concurrency].i,
                      .chunk_tokens = 512,
                      .page_tokens = v[OPT_page_size].i ? (int)v[OPT_page_size].i : 16};
    if (j->in.ranks < 1) {
        rc = err_set(e, ERR_USAGE, "--tp must be at least 1");
        goto out;
    }
    if (j->in.context < 1 || j->in.concurrency < 1) {
        rc = err_set(e, ERR_USAGE, "--context and --concurrency must be at least 1");
        goto out;
    }
    TRY(kern_act_parse(v[OPT_activation_dtype].s, &j->in.act, e));
    TRY(cpu_parse(v[OPT_cpu_features].s, &j->in.features, e));
    j->fraction = v[OPT_mem_fraction].f;
    if (!(j->fraction > 0 && j->fraction <= 1)) {
        rc = err_set(e, ERR_USAGE, "--mem-fraction-static: %g is not between 0 and 1", j->fraction);
        goto out;
    }
    j->available = mem_available_bytes(&j->source) / (unsigned)j->in.ranks;
    TRY(open_gpu(o, j, e));
    TRY(fill_rows(o, j, e));
out:
    return rc;
}

static double mb(uint64_t n)
{
    return (double)n / 1e6;
}

/* On a GPU weights and cache have their share, and the rest must hold what steps need. */
static bool fits(const plan_job *j, const plan_row *r)
{
    const plan_out *p = &r->out;
    if (!r->ok) return false;
    if (!j->gpu) return p->total <= j->available;
    return (double)(p->resident_weights + p->kv_total) <= (double)j->available * j->fraction &&
           p->total + p->graphs <= j->available;
}

/* KV cache of the asked context and concurrency in every format. */
static void kv_table(const plan_job *j, buf *b)
{
    plan_in in = j->in;
    in.scheme = NULL;
    buf_printf(b, "\nKV cache for %lld tokens x %lld conversations\n  %-10s %14s %14s %14s\n",
               (long long)in.context, (long long)in.concurrency, "format", "bytes/token",
               "of it scales", "total MB");
    for (int i = 0; i < kv_n_formats; i++) {
        plan_out p;
        err e = {0};
        in.kv = kv_formats[i].type;
        if (plan_compute(&in, &p, &e) < 0) continue;
        buf_printf(b, "  %-10s %14llu %14llu %14.2f\n", kv_formats[i].name,
                   (unsigned long long)p.kv_token, (unsigned long long)p.kv_scales_token,
                   mb(p.kv_total));
    }
}

static void gpu_head(const plan_job *j, buf *b)
{
    buf_printf(
        b,
        "%s: %.0f MB, of which the CUDA context and other programs hold %.0f\nweights and KV "
        "may take %.2f of what is free (--mem-fraction-static), %.0f MB; workspace and graphs "
        "come on top\n",
        j->gpu->what, mb(j->all), mb(j->all - j->available), j->fraction,
        mb(j->available) * j->fraction);
}

/* Weights by layout, and what comes on top. */
static void gpu_table(const plan_job *j, buf *b)
{
    buf_printf(b, "\non the GPU\n%-20s %10s %10s %10s %10s | %12s %12s\n", "scheme (MB)", "dense",
               "packed", "panels", "other", "graphs, est.", "host, pinned");
    for (int i = 0; i < j->n_rows; i++) {
        static const char *const names[] = {"dense", "packed", "panels"};
        const plan_out *p = &j->rows[i].out;
        uint64_t of[3] = {0}, other = p->resident_weights;
        if (!j->rows[i].ok) continue;
        for (int k = 0; k < KERN_FORECAST_LAYOUTS && p->gpu.layout[k].name; k++)
            for (int n = 0; n < 3; n++)
                if (!strcmp(p->gpu.layout[k].name, names[n])) of[n] = p->gpu.layout[k].bytes;
        buf_printf(b, "%-20s %10.2f %10.2f %10.2f %10.2f | %12.2f %12.2f\n", j->rows[i].name,
                   mb(of[0]), mb(of[1]), mb(of[2]), mb(other - of[0] - of[1] - of[2]),
                   mb(p->graphs), mb(p->pinned));
    }
}

static void print_text(const plan_job *j, buf *b)
{
    buf_printf(b, "%s\navailable memory %.0f MB (%s)\n", ckpt_path(j->c), mb(j->available),
               j->source);
    if (j->gpu) gpu_head(j, b);
    if (j->in.ranks > 1)
        buf_printf(b, "on each of %d devices; what lies on disk is the whole\n", j->in.ranks);
    buf_putc(b, '\n');
    buf_printf(b, "%-20s %9s %8s %7s %9s %8s | %9s %9s %9s %9s  %s\n", "scheme (MB)", "codes",
               "scales", "zeros", "unquant.", "padding", "resident", "KV", "workspace", "total",
               "fits");
    for (int i = 0; i < j->n_rows; i++) {
        const plan_row *r = &j->rows[i];
        if (!r->ok) {
            buf_printf(b, "%-20s refused: %s\n", r->name, r->out.refused);
            continue;
        }
        const plan_out *p = &r->out;
        buf_printf(b, "%-20s %9.2f %8.2f %7.2f %9.2f %8.2f | %9.2f %9.2f %9.2f %9.2f  %s\n",
                   r->name, mb(p->weights.codes), mb(p->weights.scales), mb(p->weights.zeros),
                   mb(p->weights.unquantized), mb(p->weights.padding), mb(p->resident_weights),
                   mb(p->kv_total), mb(p->workspace), mb(p->total), fits(j, r) ? "yes" : "NO");
    }
    if (j->gpu) gpu_table(j, b);
    kv_table(j, b);
}

static void json_gpu(jw *w, const plan_out *p)
{
    jw_key(w, "layouts");
    jw_obj(w);
    for (int i = 0; i < KERN_FORECAST_LAYOUTS && p->gpu.layout[i].name; i++)
        jw_ki64(w, p->gpu.layout[i].name, (int64_t)p->gpu.layout[i].bytes);
    jw_end_obj(w);
    jw_ki64(w, "graphs_estimate", (int64_t)p->graphs);
    jw_ki64(w, "host_pinned", (int64_t)p->pinned);
}

static void print_json(const plan_job *j, buf *b)
{
    jw w;
    jw_init(&w, b, 0);
    jw_obj(&w);
    jw_kstr(&w, "model", ckpt_path(j->c));
    jw_ki64(&w, "available_bytes", (int64_t)j->available);
    jw_kstr(&w, "available_source", j->source);
    if (j->gpu) {
        jw_kstr(&w, "device", j->gpu->what);
        jw_ki64(&w, "device_bytes", (int64_t)j->all);
        jw_ki64(&w, "static_bytes", (int64_t)((double)j->available * j->fraction));
    }
    jw_ki64(&w, "context", j->in.context);
    jw_ki64(&w, "concurrency", j->in.concurrency);
    jw_ki64(&w, "tp", j->in.ranks);
    jw_key(&w, "schemes");
    jw_arr(&w);
    for (int i = 0; i < j->n_rows; i++) {
        const plan_row *r = &j->rows[i];
        const plan_out *p = &r->out;
        jw_obj(&w);
        jw_kstr(&w, "name", r->name);
        jw_kstr(&w, "refused", r->ok ? NULL : p->refused);
        jw_ki64(&w, "codes", (int64_t)p->weights.codes);
        jw_ki64(&w, "scales", (int64_t)p->weights.scales);
        jw_ki64(&w, "zeros", (int64_t)p->weights.zeros);
        jw_ki64(&w, "unquantized", (int64_t)p->weights.unquantized);
        jw_ki64(&w, "padding", (int64_t)p->weights.padding);
        jw_ki64(&w, "weights_total", (int64_t)p->weights.total);
        jw_ki64(&w, "resident_weights", (int64_t)p->resident_weights);
        jw_ki64(&w, "kv_bytes_per_token", (int64_t)p->kv_token);
        jw_ki64(&w, "kv_scale_bytes_per_token", (int64_t)p->kv_scales_token);
        jw_ki64(&w, "kv_total", (int64_t)p->kv_total);
        jw_ki64(&w, "kv_states", (int64_t)p->kv_states);
        jw_ki64(&w, "workspace", (int64_t)p->workspace);
        jw_ki64(&w, "total", (int64_t)p->total);
        if (j->gpu) json_gpu(&w, p);
        jw_kbool(&w, "fits", fits(j, r));
        jw_end_obj(&w);
    }
    jw_end_arr(&w);
    jw_key(&w, "kv");
    jw_obj(&w);
    for (int i = 0; i < kv_n_formats; i++) {
        plan_in in = j->in;
        plan_out p;
        err e = {0};
        in.scheme = NULL;
        in.kv = kv_formats[i].type;
        if (plan_compute(&in, &p, &e) < 0) continue;
        jw_key(&w, kv_formats[i].name);
        jw_obj(&w);
        jw_ki64(&w, "bytes_per_token", (int64_t)p.kv_token);
        jw_ki64(&w, "scale_bytes_per_token", (int64_t)p.kv_scales_token);
        jw_ki64(&w, "total", (int64_t)p.kv_total);
        jw_end_obj(&w);
    }
    jw_end_obj(&w);
    jw_end_obj(&w);
    buf_putc(b, '\n');
}

int cmd_plan(const opts *o, err *e)
{
    int rc = 0;
    plan_job j = {0};
    buf b = {0};
    TRY(setup(o, &j, e));
    if (o->v[OPT_json].given)
        print_json(&j, &b);
    else
        print_text(&j, &b);
    cli_print(&b);
    rc = 0;
out:
    kern_close(j.gpu);
    quant_close(j.q);
    ckpt_close(j.c);
    buf_free(&b);
    return rc;
}
