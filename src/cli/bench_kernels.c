/* tare bench --kernels: every way to multiply by each linear of a shape, alone. A linear is
 * prepared several times, until its copies do not fit into a cache, and the copies take turns; the
 * best of several rounds counts. On a GPU the operators of a linear are timed by clocks of the
 * stream, what makes its input ready included; on the CPU by the wall clock. */
#include <stdlib.h>
#include <string.h>
#include "base/thread.h"
#include "cli/bench.h"
#include "kern/candidates.h"
#include "model/arch.h"
#include "model/model.h"
#include "quant/quant.h"

#define COPIES      16
#define COPY_BYTES  ((size_t)256 << 20)
#define ROUNDS      5
#define TOO_LONG    5.0 /* seconds of a round */
#define CPU_SECONDS 0.2 /* of one measurement */

typedef struct bench_kernel { /* all the while */
    kern_dev *dev;
    kern_act act;
    qspec spec;
    kern_roof roof;
    const int64_t *rows; /* of input */
    int n_rows;
    int64_t max_rows;
    bool json;
    jw w;
    buf *out;
} bench_kernel;

typedef struct linear { /* one of the shape */
    arch_linear l;
    int64_t N, K;
    qtensor t[3];
    kern_linear_desc desc;
    kern_linear *chosen; /* as a model has it */
    float *x, *y;
} linear;

/* ---- one measurement ----------------------------------------------------------------------------
 */

static int round_of(bench_kernel *k, kern_linear *const *l, int n, const linear *at, int64_t M,
                    double *seconds, err *e)
{
    const kern_op_time *t;
    double before = clock_seconds();
    int rc = 0;
    bool gpu = kern_profile(k->dev, true, NULL) == 0;
    kern_step_begin(k->dev, M, 0);
    for (int i = 0; i < n; i++)
        kern_linear_run(k->dev, l[i], at->x, at->K, M, at->y, at->N);
    TRY(kern_step_end(k->dev, e));
    *seconds = clock_seconds() - before;
    if (gpu) *seconds = 0;
    for (int i = kern_profile_lines(k->dev, &t); i > 0; i--)
        *seconds += t[i - 1].seconds;
    *seconds /= n;
out:
    if (gpu) kern_profile(k->dev, false, NULL);
    return rc;
}

static int time_of(bench_kernel *k, kern_linear *const *l, int n, const linear *at, int64_t M,
                   double *best, err *e)
{
    double s = 0, start = clock_seconds();
    int rc = 0;
    *best = 1e30;
    for (int i = 0; i < ROUNDS && (i < 2 || clock_seconds() - start < CPU_SECONDS); i++) {
        TRY(round_of(k, l, n, at, M, &s, e));
        if (i && s < *best) *best = s; /* the first is a warm-up */
    }
out:
    return rc;
}

/* ---- printing -----------------------------------------------------------------------------------
 */

static double matrix_roof(const bench_kernel *k)
{
    if (k->spec.a.type == NUM_F8_E4M3) return k->roof.fp8_tflops;
    if (k->spec.a.type == NUM_I8) return k->roof.int8_tops;
    return k->roof.bf16_tflops;
}

static void say(bench_kernel *k, const linear *at, int way, const kern_linear *l, int64_t M,
                double s)
{
    const kern_choice *c = kern_linear_choice(l, kern_bucket(M));
    bool chosen = kern_candidate_chosen(k->dev, way, at->chosen, M);
    double lane = k->dev->be ? 2 : 4,
           bytes = (double)kern_linear_bytes(l) + (double)M * lane * (double)(at->K + at->N),
           gbs = bytes / s / 1e9, tf = 2.0 * (double)M * (double)at->N * (double)at->K / s / 1e12,
           read = k->roof.read_gbs > 0 ? gbs / k->roof.read_gbs : 0,
           matrix = matrix_roof(k) > 0 ? tf / matrix_roof(k) : 0;
    const char *what = arch_kind_names[at->l.kind];
    if (k->json) {
        jw_obj(&k->w);
        jw_kstr(&k->w, "linear", what);
        jw_ki64(&k->w, "N", at->N);
        jw_ki64(&k->w, "K", at->K);
        jw_ki64(&k->w, "M", M);
        jw_kstr(&k->w, "kernel", kern_candidate_name(k->dev, way));
        jw_kstr(&k->w, "row", c->row);
        jw_kstr(&k->w, "layout", c->layout);
        jw_kstr(&k->w, "activation", c->act);
        jw_kbool(&k->w, "chosen", chosen);
        jw_kf64(&k->w, "us", s * 1e6);
        jw_kf64(&k->w, "gbs", gbs);
        jw_kf64(&k->w, "tflops", tf);
        jw_kf64(&k->w, "read_share", read);
        jw_kf64(&k->w, "matrix_share", matrix);
        jw_end_obj(&k->w);
        return;
    }
    buf_printf(k->out, "%-12s %6lld x %-6lld %5lld %c %-22s %10.1f %9.1f %5.0f%% %9.2f", what,
               (long long)at->N, (long long)at->K, (long long)M, chosen ? '*' : ' ', c->row,
               s * 1e6, gbs, 100 * read, tf);
    if (matrix > 0) buf_printf(k->out, " %5.0f%%", 100 * matrix);
    buf_putc(k->out, '\n');
}

/* Rows for codes of another width are not worth a line. */
static void say_refused(bench_kernel *k, const linear *at, int way, const char *why)
{
    const char *name = kern_candidate_name(k->dev, way);
    size_t n = strlen(name);
    if (k->json || strstr(why, "other code width")) return;
    if (!strncmp(why, name, n) && why[n] == ':') why += n + 1 + (why[n + 1] == ' ');
    buf_printf(k->out, "%-12s %6lld x %-6lld %5s   %-22s %s\n", arch_kind_names[at->l.kind],
               (long long)at->N, (long long)at->K, "-", name, why);
}

/* ---- one linear ---------------------------------------------------------------------------------
 */

static int way_of(bench_kernel *k, linear *at, int way, err *e)
{
    kern_linear *l[COPIES] = {NULL};
    int n = 0, rc = 0;
    err why = {0};
    rc = kern_linear_make_as(k->dev, &at->desc, way, &l[0], &why);
    if (rc == -ERR_UNSUPPORTED) {
        say_refused(k, at, way, why.msg);
        return 0;
    }
    if (rc < 0) return err_set(e, why.code, "%s", why.msg);
    size_t one = kern_linear_bytes(l[0]);
    for (n = 1; n < COPIES && (size_t)n * one < COPY_BYTES; n++)
        TRY(kern_linear_make_as(k->dev, &at->desc, way, &l[n], e));
    TRY(kern_reserve(k->dev, k->max_rows, at->K, at->N, e));
    double s = 0, per_row = 0;
    for (int i = 0; i < k->n_rows; i++) {
        int64_t M = k->rows[i];
        if (per_row * (double)M * n > TOO_LONG) {
            say_refused(k, at, way, "more rows would take too long");
            break;
        }
        const char *row = kern_linear_choice(l[0], kern_bucket(M))->row;
        /* A row of the CPU's list leaves the numbers of rows that it refuses to the reference. */
        if (!k->dev->be && strcmp(row, kern_candidate_name(k->dev, way))) continue;
        TRY(time_of(k, l, n, at, M, &s, e));
        per_row = s / (double)M;
        say(k, at, way, l[0], M, s);
    }
out:
    for (int i = 0; i < n; i++)
        if (l[i]) kern_linear_drop(k->dev, l[i]);
    return rc;
}

static int lanes_of(bench_kernel *k, linear *at, err *e)
{
    int rc = 0;
    int64_t n = k->max_rows * at->K;
    float *host = xmalloc(sizeof *host * (size_t)n), *from = host;
    uint32_t r = 7;
    for (int64_t i = 0; i < n; i++) {
        r = r * 1664525u + 1013904223u;
        host[i] = (float)(r >> 8) * 0x1p-23f - 1;
    }
    TRY(kern_lanes(k->dev, &at->x, n, KERN_FLOW, k->act, e));
    TRY(kern_lanes(k->dev, &at->y, k->max_rows * at->N, KERN_FLOW, k->act, e));
    TRY(kern_constant(k->dev, &from, n, e));
    kern_step_begin(k->dev, k->max_rows, 0);
    kern_copy_rows(k->dev, from, at->K, at->x, at->K, at->K, k->max_rows);
    TRY(kern_step_end(k->dev, e));
out:
    free(host);
    return rc;
}

static int linear_of(bench_kernel *k, const arch_linear *from, err *e)
{
    static const qspec plain = {{.type = NUM_BF16}, {.type = NUM_BF16}, {.type = NUM_BF16}};
    linear at = {.l = *from, .K = from->shard[0].K};
    int rc = 0, n = kern_candidates(k->dev);
    bool exact = from->kind == ARCH_ROUTER || from->kind == ARCH_SHARED_GATE;
    const qspec *spec = arch_quantizable(from->kind) ? &k->spec : &plain;
    at.desc = (kern_linear_desc){.name = arch_kind_names[from->kind],
                                 .n_shards = from->n_shards,
                                 .act = exact ? KERN_ACT_F32 : k->act};
    for (int i = 0; i < from->n_shards; i++) {
        const arch_shard *s = &from->shard[i];
        TRY(model_random_tensor(spec, 1, s->N, s->K, k->dev->team, &at.t[i], e));
        at.desc.shard[i] = &at.t[i];
        at.N += s->N;
    }
    TRY(kern_linear_make(k->dev, &at.desc, &at.chosen, e));
    TRY(lanes_of(k, &at, e));
    for (int i = 0; i < n; i++)
        TRY(way_of(k, &at, i, e));
out:
    if (at.chosen) kern_linear_drop(k->dev, at.chosen);
    if (at.x) kern_free(k->dev, at.x);
    if (at.y) kern_free(k->dev, at.y);
    for (int i = 0; i < 3; i++)
        qtensor_free(&at.t[i]);
    return rc;
}

/* ---- all of them --------------------------------------------------------------------------------
 */

static bool alike(const arch_linear *a, const arch_linear *b)
{
    bool same = a->n_shards == b->n_shards && a->kind == b->kind;
    for (int i = 0; same && i < a->n_shards; i++)
        same = a->shard[i].N == b->shard[i].N && a->shard[i].K == b->shard[i].K;
    return same;
}

static int all_of(bench_kernel *k, const char *name, const char *shape, err *e)
{
    int rc = 0, n = 0;
    ckpt *c = NULL;
    arch_model *a = NULL;
    arch_linear *all = NULL;
    TRY(ckpt_open_shape(&c, name, shape, e));
    TRY(arch_open(&a, ckpt_cfg(c), NULL, e));
    n = arch_linears(a, NULL, 0);
    all = xcalloc((size_t)n, sizeof *all);
    arch_linears(a, all, n);
    for (int i = 0; i < n; i++) {
        bool seen = false;
        for (int j = 0; j < i && !seen; j++)
            seen = alike(&all[i], &all[j]);
        if (!seen) TRY(linear_of(k, &all[i], e));
    }
out:
    free(all);
    arch_close(a);
    ckpt_close(c);
    return rc;
}

static void head(bench_kernel *k, const char *name, const char *scheme)
{
    const char *what = k->dev->what ? k->dev->what : cpu_model_name();
    if (k->json) {
        jw_init(&k->w, k->out, 0);
        jw_obj(&k->w);
        jw_kstr(&k->w, "shape", name);
        jw_kstr(&k->w, "scheme", scheme);
        jw_kbool(&k->w, "random_weights", true);
        jw_kstr(&k->w, "device", what);
        jw_kf64(&k->w, "read_gbs", k->roof.read_gbs);
        jw_kf64(&k->w, "matrix_tflops", matrix_roof(k));
        jw_key(&k->w, "kernels");
        jw_arr(&k->w);
        return;
    }
    buf_printf(k->out,
               "shape %s  %s  %s\nrandom weights: speed only; * = what a model takes; roof: reads "
               "%.1f GB/s",
               name, scheme, what, k->roof.read_gbs);
    if (matrix_roof(k) > 0) buf_printf(k->out, ", matrices %.0f TFLOP/s", matrix_roof(k));
    buf_printf(k->out, "\n%-12s %15s %5s   %-22s %10s %9s %6s %9s\n", "linear", "N x K", "M",
               "kernel", "us", "GB/s", "roof", "TFLOP/s");
}

int bench_kernels(const opts *o, const bench_plan *p, const char *shape, buf *out, err *e)
{
    static const int64_t usual[] = {1, 8, 16, 64, 512, 2048};
    const char *name = o->v[OPT_bench_shape].s;
    bool given = o->v[OPT_bench_batch].given;
    bench_kernel k = {.rows = given ? p->batch : usual,
                      .n_rows = given ? p->n_batch : (int)(sizeof usual / sizeof *usual),
                      .json = o->v[OPT_json].given,
                      .out = out,
                      .spec = {{.type = NUM_BF16}, {.type = NUM_BF16}, {.type = NUM_BF16}}};
    kern_opts ko = {.device = o->v[OPT_device].s, .threads = (int)o->v[OPT_threads].i};
    int rc = 0;
    for (int i = 0; i < k.n_rows; i++)
        k.max_rows = k.rows[i] > k.max_rows ? k.rows[i] : k.max_rows;
    if (p->scheme) TRY(qspec_parse(p->scheme, &k.spec, e));
    TRY(kern_act_parse(o->v[OPT_activation_dtype].s, &k.act, e));
    TRY(cpu_parse(o->v[OPT_cpu_features].s, &ko.cpu_features, e));
    TRY(kern_open(&k.dev, &ko, e));
    TRY(kern_measure_roof(k.dev, k.dev->be ? (size_t)2 << 30 : COPY_BYTES, &k.roof, e));
    head(&k, name, p->scheme ? p->scheme : "bf16");
    TRY(all_of(&k, name, shape, e));
    if (k.json) {
        jw_end_arr(&k.w);
        jw_end_obj(&k.w);
        buf_putc(out, '\n');
    }
out:
    kern_close(k.dev);
    return rc;
}
