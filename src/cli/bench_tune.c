/* tare bench --tune: measures the plans of a GPU's kernels for the linears of a shape and puts what
 * it finds into the user's table, from which later runs take it. */
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "cli/bench.h"
#include "kern/candidates.h"
#include "model/arch.h"
#include "model/model.h"
#include "quant/quant.h"

#define COPY_BYTES ((size_t)256 << 20) /* more than caches hold */

typedef struct bench_tuning { /* all the while */
    kern_dev *dev;
    kern_act act;
    qspec spec;
    kern_tune_opts o;
    int ranks;
} bench_tuning;

typedef struct tuned_shape { /* a linear as a device has it */
    arch_linear_kind kind;
    int n_shards, E; /* E 0: no expert */
    int64_t N[3], K;
} tuned_shape;

/* ---- which linears ------------------------------------------------------------------------------
 */

/* Those whose inputs stay in f32, and those that become something else at load, have no plans. */
static bool has_plans(arch_linear_kind k)
{
    return k != ARCH_ROUTER && k != ARCH_SHARED_GATE && k != ARCH_KV_B;
}

static int experts_of(const arch_linear *all, int n, const arch_linear *l)
{
    int E = 0;
    if (l->kind != ARCH_EXPERT_UP && l->kind != ARCH_EXPERT_DOWN) return 0;
    if (l->shard[0].E > 1) return (int)l->shard[0].E;
    for (int i = 0; i < n; i++)
        E += all[i].layer == l->layer && all[i].kind == l->kind;
    return E;
}

static tuned_shape shape_of(const arch_model *part, const arch_linear *l, int E)
{
    tuned_shape s = {.kind = l->kind, .n_shards = l->n_shards, .E = E};
    for (int i = 0; i < l->n_shards; i++) {
        arch_cut c;
        arch_cut_of(part, l, i, &c);
        for (int k = 0; k < c.n; k++)
            s.N[i] += c.rows[k].hi - c.rows[k].lo;
        s.K = c.cols.hi - c.cols.lo;
    }
    return s;
}

/* Tables know the sizes alone. */
static bool alike(const tuned_shape *a, const tuned_shape *b)
{
    bool same = a->n_shards == b->n_shards && a->E == b->E && a->K == b->K &&
                arch_quantizable(a->kind) == arch_quantizable(b->kind);
    for (int i = 0; same && i < a->n_shards; i++)
        same = a->N[i] == b->N[i];
    return same;
}

/* ---- one of them --------------------------------------------------------------------------------
 */

static int tune_shape(bench_tuning *t, const tuned_shape *s, err *e)
{
    static const qspec plain = {{.type = NUM_BF16}, {.type = NUM_BF16}, {.type = NUM_BF16}};
    const kern_tuned *lines;
    const int before = kern_tuned_lines(t->dev, &lines);
    qtensor weight[3] = {0};
    kern_linear_desc d = {.name = arch_kind_names[s->kind],
                          .n_shards = s->n_shards,
                          .act = t->act,
                          .expert = s->E > 0};
    int64_t N = 0;
    int rc = 0;
    for (int i = 0; i < s->n_shards; i++) {
        const qspec *spec = arch_quantizable(s->kind) ? &t->spec : &plain;
        TRY(model_random_tensor(spec, 1, s->N[i], s->K, t->dev->team, &weight[i], e));
        d.shard[i] = &weight[i];
        N += s->N[i];
    }
    TRY(kern_tune(t->dev, &d, s->E, &t->o, e));
    const int found = kern_tuned_lines(t->dev, &lines) - before;
    log_info("%s %lld x %lld: %d plans chosen%s", d.name, (long long)N, (long long)s->K, found,
             found ? "" : ": its kernels have none to choose");
out:
    for (int i = 0; i < s->n_shards; i++)
        qtensor_free(&weight[i]);
    return rc;
}

static int tune_all(bench_tuning *t, const char *name, const char *shape, err *e)
{
    int rc = 0, n = 0, n_seen = 0;
    ckpt *c = NULL;
    arch_model *whole = NULL, *part = NULL;
    arch_linear *all = NULL;
    tuned_shape *seen = NULL;
    TRY(ckpt_open_shape(&c, name, shape, e));
    TRY(arch_open(&whole, ckpt_cfg(c), NULL, e));
    TRY(arch_open(&part, ckpt_cfg(c), NULL, e));
    TRY(arch_take_share(part, 0, t->ranks, e));
    n = arch_linears(whole, NULL, 0);
    all = xcalloc((size_t)n + 1, sizeof *all);
    seen = xcalloc((size_t)n + 1, sizeof *seen);
    arch_linears(whole, all, n);
    for (int i = 0; i < n; i++) {
        bool known = !has_plans(all[i].kind);
        seen[n_seen] = shape_of(part, &all[i], experts_of(all, n, &all[i]));
        for (int j = 0; j < n_seen && !known; j++)
            known = alike(&seen[j], &seen[n_seen]);
        if (!known) TRY(tune_shape(t, &seen[n_seen++], e));
    }
out:
    free(seen);
    free(all);
    arch_close(whole);
    arch_close(part);
    ckpt_close(c);
    return rc;
}

/* ---- printing -----------------------------------------------------------------------------------
 */

static void print_text(const bench_tuning *t, const char *name, const char *scheme,
                       const char *path, buf *out)
{
    const kern_tuned *l;
    const int n = kern_tuned_lines(t->dev, &l);
    buf_printf(out,
               "shape %s  %s  %s\nM: most rows of input (experts: how many there are); default: "
               "what is taken without a table\n%-8s %-14s %15s %5s   %-20s %9s   %-20s %9s %6s "
               "%6s %6s\n",
               name, scheme, t->dev->what, "operator", "format", "N x K", "M", "default", "us",
               "chosen", "us", "gain", "tried", "wrong");
    for (int i = 0; i < n; i++, l++) {
        buf_printf(out, "%-8s %-14s %6lld x %-6lld %5lld   %-20s %9.1f   %-20s ", l->op, l->format,
                   (long long)l->N, (long long)l->K, (long long)l->M, l->rule, l->rule_us,
                   strcmp(l->plan, l->rule) ? l->plan : "=");
        if (l->us > 0 && l->rule_us > 0)
            buf_printf(out, "%9.1f %5.1f%%", l->us, 100 * (1 - l->us / l->rule_us));
        else
            buf_printf(out, "%9s %6s", "-", "-");
        buf_printf(out, " %6d %6d\n", l->tried, l->wrong);
    }
    if (path)
        buf_printf(out, "%d plans kept in %s; later runs use them\n", n, path);
    else
        buf_puts(out, "no linear of this shape has plans to choose; nothing was written\n");
}

static void print_json(const bench_tuning *t, const char *name, const char *scheme,
                       const char *path, buf *out)
{
    const kern_tuned *l;
    const int n = kern_tuned_lines(t->dev, &l);
    jw w;
    jw_init(&w, out, 0);
    jw_obj(&w);
    jw_kstr(&w, "shape", name);
    jw_kstr(&w, "scheme", scheme);
    jw_kstr(&w, "device", t->dev->what);
    jw_kstr(&w, "file", path);
    jw_key(&w, "plans");
    jw_arr(&w);
    for (int i = 0; i < n; i++, l++) {
        jw_obj(&w);
        jw_kstr(&w, "operator", l->op);
        jw_kstr(&w, "format", l->format);
        jw_ki64(&w, "N", l->N);
        jw_ki64(&w, "K", l->K);
        jw_ki64(&w, "M", l->M);
        jw_kstr(&w, "default", l->rule);
        jw_kf64(&w, "default_us", l->rule_us);
        jw_kstr(&w, "plan", l->plan);
        jw_kf64(&w, "us", l->us);
        jw_ki64(&w, "tried", l->tried);
        jw_ki64(&w, "wrong", l->wrong);
        jw_end_obj(&w);
    }
    jw_end_arr(&w);
    jw_end_obj(&w);
    buf_putc(out, '\n');
}

int bench_tune(const opts *o, const bench_plan *p, const char *shape, buf *out, err *e)
{
    const opt_val *v = o->v;
    const bool given = v[OPT_bench_batch].given;
    const char *name = v[OPT_bench_shape].s, *path = NULL, *scheme = p->scheme;
    const kern_tuned *lines;
    bench_tuning t = {.spec = {{.type = NUM_BF16}, {.type = NUM_BF16}, {.type = NUM_BF16}},
                      .o = {.rows = p->batch, .n_rows = given ? p->n_batch : 0},
                      .ranks = v[OPT_tp].i > 1 ? (int)v[OPT_tp].i : 1};
    kern_opts ko = {.device = v[OPT_device].s, .threads = (int)v[OPT_threads].i};
    int rc = 0;
    if (v[OPT_tp].i < 1 || v[OPT_tp].i > INT16_MAX)
        return err_set(e, ERR_USAGE, "--tp must be at least 1");
    if (scheme) TRY(qspec_parse(scheme, &t.spec, e));
    TRY(kern_act_parse(v[OPT_activation_dtype].s, &t.act, e));
    TRY(cpu_parse(v[OPT_cpu_features].s, &ko.cpu_features, e));
    TRY(kern_open(&t.dev, &ko, e));
    t.o.copy_bytes = !strcmp(t.dev->name, "emulated") ? 1 : COPY_BYTES;
    TRY(tune_all(&t, name, shape, e));
    if (kern_tuned_lines(t.dev, &lines)) TRY(kern_tune_save(t.dev, &path, e));
    (v[OPT_json].given ? print_json : print_text)(&t, name, scheme ? scheme : "bf16", path, out);
out:
    kern_close(t.dev);
    return rc;
}
