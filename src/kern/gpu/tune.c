/* Measuring plans (kern/candidates.h): a linear is prepared several times, until its copies do not
 * fit into the cache of the device, and the copies take turns. Every plan of its operator that the
 * kernels have runs for all copies between two clocks of the stream, so that one product may start
 * while the last one ends as in a model, then every row of the layout's list; medians of several
 * rounds count. What comes out is held against what the rule's plan makes, in some rows of
 * the output. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/file.h"
#include "base/log.h"
#include "kern/candidates.h"
#include "kern/gpu/linear.h"

#define COPIES  16
#define ROUNDS  5
#define SAMPLES 16   /* rows of output that are compared */
#define GAIN    0.98 /* of the rule's time, from which another plan goes before it */
#define FAR     1.5 /* a plan whose first round takes so many times the best is not timed further */

typedef struct tuner { /* of one linear */
    gpu_dev *g;
    const kern_tune_opts *o;
    const kern_linear_desc *desc;
    kern_linear *copy[COPIES];
    int n;
    const gpu_linear *l;
    gpu_tuned_key key;
    int64_t N, K, most;
    float *x, *y;       /* handles */
    float *want, *got;  /* [SAMPLES, N] */
    const char *format; /* of the entries that are being made */
} tuner;

/* ---- one run ------------------------------------------------------------------------------------
 */

static int64_t sampled(int64_t M, int i)
{
    return i < SAMPLES / 2 || M <= SAMPLES ? i : M - SAMPLES + i;
}

static int n_sampled(int64_t M)
{
    return M < SAMPLES ? (int)M : SAMPLES;
}

static int clear(tuner *t, int64_t M, err *e)
{
    int rc = 0;
    for (int i = 0; i < n_sampled(M); i++) {
        const gpu_x at = gpu__x(t->g, t->y + sampled(M, i) * t->N);
        const size_t bytes = (size_t)t->N * (at.type == GPU_BF16 ? 2 : 4);
        TRY(gpu__check(t->g, "fill", t->g->api->zero(at.p, bytes, t->g->stream), e));
    }
out:
    return rc;
}

static int take(tuner *t, int64_t M, float *out, err *e)
{
    gpu_dev *g = t->g;
    int rc = 0;
    void *row = xmalloc((size_t)t->N * 4);
    for (int i = 0; i < n_sampled(M); i++) {
        const gpu_x at = gpu__x(g, t->y + sampled(M, i) * t->N);
        const bool half = at.type == GPU_BF16;
        const size_t bytes = (size_t)t->N * (half ? 2 : 4);
        TRY(gpu__check(g, "download", g->api->download(row, at.p, bytes, g->stream), e));
        TRY(gpu__check(g, "download", g->api->sync(g->stream), e));
        num_decode_row(half ? NUM_BF16 : NUM_F32, row, (size_t)t->N, out + i * t->N);
    }
out:
    free(row);
    return rc;
}

/* The order of sums and one rounding of a weight to bf16 apart. */
static bool agrees(const tuner *t, int64_t M)
{
    const int64_t n = n_sampled(M) * t->N;
    double sum = 0, off = 0, worst = 0;
    for (int64_t i = 0; i < n; i++) {
        const double w = t->want[i], d = fabs(t->got[i] - w);
        if (!(d <= 1e30)) return false;
        sum += w * w;
        off += d * d;
        if (d > worst) worst = d;
    }
    const double size = sqrt(sum / (double)n);
    return size > 0 && sqrt(off / (double)n) <= size / 64 && worst <= size / 4;
}

static int round_of(tuner *t, const gpu_linear_row *row, int64_t M, double *us, err *e)
{
    const kern_op_time *line;
    gpu_dev *g = t->g;
    int rc = 0;
    *us = 0;
    TRY(gpu__profile_whole(g, e));
    kern_step_begin(&g->pub, M, 0);
    for (int i = 0; i < t->n; i++)
        row->run(g, t->copy[i]->own, kern_bucket(M), t->x, t->K, M, t->y, t->N);
    TRY(kern_step_end(&g->pub, e));
    for (int i = gpu__profile_lines(&g->pub, &line); i > 0; i--)
        *us += line[i - 1].seconds * 1e6 / t->n;
out:
    gpu__profile(&g->pub, false, NULL);
    return rc;
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* best: of the plans before; 0 = none. */
static int time_of(tuner *t, const gpu_linear_row *row, int64_t M, double best, double *us, err *e)
{
    double v[ROUNDS];
    int rc = 0, n = 0;
    TRY(round_of(t, row, M, us, e)); /* warms up */
    while (n < ROUNDS) {
        TRY(round_of(t, row, M, &v[n++], e));
        if (best > 0 && v[0] > FAR * best) break;
    }
    qsort(v, (size_t)n, sizeof *v, by_size);
    *us = v[n / 2];
out:
    return rc;
}

/* ---- what was found -----------------------------------------------------------------------------
 */

static void keep(tuner *t, tuned_op op, const kern_tuned *best)
{
    gpu_dev *g = t->g;
    tuned_entry entry = {.sm = g->facts.sm,
                         .sms = g->facts.sms,
                         .op = op,
                         .N = t->N,
                         .K = t->K,
                         .M = best->M,
                         .file = g->tuned.file};
    kern_tuned line = *best;
    if (!*best->plan) return;
    snprintf(entry.format, sizeof entry.format, "%s", t->format);
    snprintf(entry.plan, sizeof entry.plan, "%s", best->plan);
    snprintf(entry.device, sizeof entry.device, "%s", g->facts.name);
    entry.us = best->us > 0.001 ? best->us : 0.001;
    tuned_put(&g->tuned, &entry);
    snprintf(line.op, sizeof line.op, "%s", tuned_op_names[op]);
    snprintf(line.format, sizeof line.format, "%s", t->format);
    line.N = t->N;
    line.K = t->K;
    g->found = xrealloc(g->found, sizeof *g->found * (size_t)(g->n_found + 1));
    g->found[g->n_found++] = line;
}

/* One more plan: the trial of the device is set. The first is the rule's, which must run. */
static int try_plan(tuner *t, const gpu_linear_row *row, const char *plan, kern_tuned *best, err *e)
{
    err why = {0};
    double us = 0;
    int rc = 0;
    const bool first = best->tried == 0;
    best->tried++;
    TRY(clear(t, best->M, e));
    rc = time_of(t, row, best->M, best->us, &us, &why);
    if (rc < 0 && first) return err_set(e, why.code, "%s", why.msg);
    if (rc == 0) TRY(take(t, best->M, first ? t->want : t->got, e));
    if (rc < 0 || (!first && !agrees(t, best->M))) {
        log_warn("%s %lldx%lld, M %lld, plan %s: %s", t->format, (long long)t->N, (long long)t->K,
                 (long long)best->M, plan,
                 rc < 0 ? why.msg : "another result than the rule's plan");
        best->wrong++;
        return 0;
    }
    if (first) best->rule_us = us;
    if (!first && (us >= best->us || us > GAIN * best->rule_us)) return 0;
    best->us = us;
    snprintf(best->plan, sizeof best->plan, "%s", plan);
out:
    return rc;
}

/* ---- plans of an operator -----------------------------------------------------------------------
 */

static int tune_rows(tuner *t, const gpu_linear_row *row, kern_tuned *best, err *e)
{
    gpu_dev *g = t->g;
    int rc = 0;
    const bool blocks = !strcmp(t->format, tuned_format_of_rows(ROWS_E4M3, true));
    rows_format f = blocks ? ROWS_E4M3 : ROWS_BF16;
    while (!blocks && strcmp(t->format, tuned_format_of_rows(f, false)))
        f = (rows_format)(f + 1);
    const int64_t M = best->M;
    if (M > (blocks ? ROWS_MAX_BLOCK_M : ROWS_MAX_M)) return 0;
    const rows_plan rule = g->api->rows_choose(f, (int)t->N, (int)t->K, (int)M);
    if (!rule.groups) return 0;
    tuned_rows_text(rule, best->rule);
    g->trial.rows = rule;
    TRY(try_plan(t, row, best->rule, best, e));
    for (int split = 1; split <= 8; split *= 2)
        for (int groups = 1; groups <= 16; groups++)
            for (int chunks = 1; chunks <= 16; chunks *= 2) {
                const rows_plan p = {groups, chunks, split};
                char text[32];
                tuned_rows_text(p, text);
                if (!strcmp(text, best->rule) || !g->api->rows_has(f, p, (int)t->K, (int)M))
                    continue;
                g->trial.rows = p;
                TRY(try_plan(t, row, text, best, e));
            }
out:
    g->trial.rows = (rows_plan){0, 0, 0};
    return rc;
}

static int tune_wide(tuner *t, const gpu_linear_row *row, kern_tuned *best, err *e)
{
    gpu_dev *g = t->g;
    int rc = 0;
    small_format f = SMALL_INT4_128;
    while (strcmp(t->format, tuned_format_of_packed(f)))
        f = (small_format)(f + 1);
    const int M = (int)best->M;
    const wide_plan rule = g->api->wide_choose(f, (int)t->N, (int)t->K, M);
    if (!rule.tokens) return 0;
    tuned_wide_text(rule, best->rule);
    g->trial.wide = rule;
    TRY(try_plan(t, row, best->rule, best, e));
    for (int tokens = 16; tokens <= 256; tokens *= 2)
        for (int groups = 1; groups <= 4; groups++)
            for (int way = 0; way < 5; way++) { /* K cut in 1, 2, 4, 8, or x shared by two */
                const wide_plan p = {tokens, groups, way < 4 ? 1 << way : 1, way < 4 ? 1 : 2};
                char text[32];
                tuned_wide_text(p, text);
                if (tokens > 2 * M || tokens * 16 < M) continue; /* far too large, too small */
                if (!strcmp(text, best->rule) || !g->api->wide_has(f, p, (int)t->K)) continue;
                g->trial.wide = p;
                TRY(try_plan(t, row, text, best, e));
            }
out:
    g->trial.wide = (wide_plan){0, 0, 0, 0};
    return rc;
}

/* The plan found goes before that of the linear, whose copies were made before it was known. */
static void use(tuner *t, const kern_tuned *plan)
{
    int v[4] = {0, 0, 0, 0};
    sscanf(plan->plan, "%d/%d/%d/%d", &v[0], &v[1], &v[2], &v[3]);
    if (t->key.plan == TUNED_OP_rows) t->g->trial.rows = (rows_plan){v[0], v[1], v[2]};
    if (t->key.plan == TUNED_OP_wide) t->g->trial.wide = (wide_plan){v[0], v[1], v[2], v[3]};
}

/* Which row of the layout's list. */
static int tune_row(tuner *t, int64_t M, const kern_tuned *plan, err *e)
{
    const gpu_linear_row *const *rows = t->l->layout->rows;
    const int bucket = kern_bucket(M);
    kern_tuned best = {.M = M};
    int rc = 0;
    t->format = t->key.row_format;
    if (*plan->plan) use(t, plan);
    snprintf(best.rule, sizeof best.rule, "%s", t->l->row[bucket]->name);
    TRY(try_plan(t, t->l->row[bucket], best.rule, &best, e));
    for (int i = 0; rows[i]; i++) {
        bool seen = rows[i]->run == t->l->row[bucket]->run;
        for (int k = 0; k < i; k++)
            seen = seen || rows[k]->run == rows[i]->run;
        if (seen || rows[i]->refuse(t->g, t->desc, bucket)) continue;
        TRY(try_plan(t, rows[i], rows[i]->name, &best, e));
    }
    if (best.tried > 1) keep(t, t->key.row, &best);
out:
    t->g->trial = (struct gpu_trial){0};
    return rc;
}

static const gpu_linear_row *row_of(const tuner *t, int64_t M)
{
    const gpu_linear_row *const *rows = t->l->layout->rows;
    const char *name = t->key.plan == TUNED_OP_rows ? "cuda-rows" : "cuda-wide";
    for (int i = 0; rows[i]; i++)
        if (!strcmp(rows[i]->name, name) && !rows[i]->refuse(t->g, t->desc, kern_bucket(M)))
            return rows[i];
    return NULL;
}

static int tune_for(tuner *t, int64_t M, err *e)
{
    const gpu_linear_row *row = row_of(t, M);
    kern_tuned best = {.M = M};
    int rc = 0;
    t->format = t->key.plan_format;
    if (row) {
        TRY((t->key.plan == TUNED_OP_rows ? tune_rows : tune_wide)(t, row, &best, e));
        keep(t, t->key.plan, &best);
    }
    TRY(tune_row(t, M, &best, e));
out:
    return rc;
}

/* ---- one linear ---------------------------------------------------------------------------------
 */

static bool wanted(const kern_tune_opts *o, int index)
{
    for (int i = 0; i < o->n_rows; i++)
        if (tuned_at(o->rows[i]) == index) return true;
    return !o->n_rows;
}

/* Numbers of -1 to 1. */
static int fill(gpu_dev *g, float *x, int64_t n, err *e)
{
    const gpu_x at = gpu__x(g, x);
    const size_t size = at.type == GPU_BF16 ? 2 : 4;
    uint8_t *host = xmalloc((size_t)n * size);
    uint32_t r = 7;
    for (int64_t i = 0; i < n; i++) {
        r = r * 1664525u + 1013904223u;
        const float v = (float)(r >> 8) * 0x1p-23f - 1;
        const uint16_t half = num_f32_to_bf16(v);
        memcpy(host + (size_t)i * size, size == 2 ? (const void *)&half : &v, size);
    }
    int rc = gpu__check(g, "upload", g->api->upload(at.p, host, (size_t)n * size, g->stream), e);
    if (rc == 0) rc = gpu__check(g, "upload", g->api->sync(g->stream), e);
    free(host);
    return rc;
}

static int lanes(tuner *t, int64_t rows, err *e)
{
    kern_dev *d = &t->g->pub;
    int rc = 0;
    TRY(kern_lanes(d, &t->x, rows * t->K, KERN_FLOW, t->desc->act, e));
    TRY(kern_lanes(d, &t->y, rows * t->N, KERN_FLOW, t->desc->act, e));
    TRY(fill(t->g, t->x, rows * t->K, e));
    t->want = xmalloc(sizeof *t->want * (size_t)(SAMPLES * t->N));
    t->got = xmalloc(sizeof *t->got * (size_t)(SAMPLES * t->N));
out:
    return rc;
}

static void drop(tuner *t)
{
    kern_dev *d = &t->g->pub;
    t->g->trial = (struct gpu_trial){0};
    for (int i = 0; i < COPIES; i++)
        if (t->copy[i]) kern_linear_drop(d, t->copy[i]);
    if (t->x) gpu__free(d, t->x);
    if (t->y) gpu__free(d, t->y);
    free(t->want);
    free(t->got);
}

static int tune_linear(tuner *t, err *e)
{
    kern_dev *d = &t->g->pub;
    int rc = 0;
    TRY(kern_linear_make(d, t->desc, &t->copy[t->n++], e));
    t->l = t->copy[0]->own;
    t->N = t->l->N;
    t->K = t->l->K;
    if (!t->l->layout->tuned || !t->l->layout->tuned(t->l, &t->key)) goto out;
    const size_t one = kern_linear_bytes(t->copy[0]);
    while (t->n < COPIES && (size_t)t->n * one < t->o->copy_bytes)
        TRY(kern_linear_make(d, t->desc, &t->copy[t->n++], e));
    for (int i = 0; i < TUNED_ROWS; i++)
        if (wanted(t->o, i)) t->most = tuned_rows[i];
    TRY(kern_reserve(d, t->most, t->K, t->N, e));
    TRY(lanes(t, t->most, e));
    for (int i = 0; i < TUNED_ROWS; i++)
        if (wanted(t->o, i)) TRY(tune_for(t, tuned_rows[i], e));
out:
    return rc;
}

/* ---- experts ------------------------------------------------------------------------------------
 * From how many slots of an expert the wide kernel wins, all experts having as many. */

typedef struct tuned_set {
    kern_linear **v;
    int E;
    void *own;
    int32_t *first; /* handle [E+1] */
} tuned_set;

static int slots_of(tuner *t, const tuned_set *s, int each, err *e)
{
    int rc = 0;
    int32_t *host = xmalloc(sizeof *host * (size_t)(s->E + 1));
    for (int i = 0; i <= s->E; i++)
        host[i] = i * each;
    TRY(gpu__check(t->g, "upload",
                   t->g->api->upload(gpu__raw(t->g, s->first), host,
                                     sizeof *host * (size_t)(s->E + 1), t->g->stream),
                   e));
    TRY(gpu__check(t->g, "upload", t->g->api->sync(t->g->stream), e));
out:
    free(host);
    return rc;
}

static int experts_time(tuner *t, const tuned_set *s, int64_t slots, double *us, err *e)
{
    kern_dev *d = &t->g->pub;
    const kern_op_time *line;
    double v[ROUNDS];
    int rc = 0;
    for (int i = -1; i < ROUNDS; i++) {
        double sum = 0;
        TRY(gpu__profile_whole(t->g, e));
        kern_step_begin(d, slots, 0);
        gpu__experts_run(d, s->own, t->x, t->K, NULL, s->first, slots, t->y, t->N);
        TRY(kern_step_end(d, e));
        for (int k = gpu__profile_lines(d, &line); k > 0; k--)
            sum += line[k - 1].seconds * 1e6;
        if (i >= 0) v[i] = sum;
    }
    qsort(v, ROUNDS, sizeof *v, by_size);
    *us = v[ROUNDS / 2];
out:
    gpu__profile(d, false, NULL);
    return rc;
}

static int experts_each(tuner *t, const tuned_set *s, int each, kern_tuned *best, err *e)
{
    const int64_t slots = (int64_t)each * s->E;
    double us[2];
    int rc = 0;
    TRY(slots_of(t, s, each, e));
    for (int way = 1; way <= 2; way++) {
        t->g->trial.experts = way;
        TRY(clear(t, slots, e));
        TRY(experts_time(t, s, slots, &us[way - 1], e));
        TRY(take(t, slots, way == 1 ? t->want : t->got, e));
        best->tried++;
    }
    if (!agrees(t, slots)) {
        log_warn("experts %s %lldx%lld, %d slots each: the two kernels have different results",
                 t->format, (long long)t->N, (long long)t->K, each);
        best->wrong++;
    } else if (us[1] >= us[0]) { /* the wide one must win from here on */
        best->plan[0] = 0;
    } else if (!*best->plan) {
        snprintf(best->plan, sizeof best->plan, "%d", each);
        best->us = us[1];
        best->rule_us = us[0];
    }
out:
    return rc;
}

static int tune_experts(tuner *t, int E, err *e)
{
    kern_dev *d = &t->g->pub;
    tuned_set s = {.E = E, .v = xcalloc((size_t)E, sizeof *s.v)};
    kern_tuned best = {.M = E, .rule = "8"};
    const int most = t->g->facts.emulated ? 4 : 64;
    void *p = NULL;
    int rc = 0;
    for (int i = 0; i < E; i++)
        TRY(kern_linear_make(d, t->desc, &s.v[i], e));
    t->l = s.v[0]->own;
    t->N = t->l->N;
    t->K = t->l->K;
    if (t->l->layout != &gpu__layout_packed || !t->g->api->launch[GPU_OP_wide_experts]) goto out;
    t->format = gpu__packed_format(t->l);
    TRY(gpu__experts_make(d, s.v, E, &s.own, e));
    TRY(gpu__alloc(d, &p, sizeof *s.first * (size_t)(E + 1), e));
    s.first = p;
    TRY(kern_reserve(d, (int64_t)most * E, t->K, t->N, e));
    TRY(lanes(t, (int64_t)most * E, e));
    for (int each = 1; each <= most; each *= 2)
        TRY(experts_each(t, &s, each, &best, e));
    if (!*best.plan) { /* it never did */
        snprintf(best.plan, sizeof best.plan, "%d", 2 * most);
        best.us = 0;
    }
    if (!best.wrong) keep(t, TUNED_OP_experts, &best);
out:
    t->g->trial.experts = 0;
    if (s.own) gpu__experts_drop(d, s.own);
    if (s.first) gpu__free(d, s.first);
    for (int i = 0; i < E; i++)
        if (s.v[i]) kern_linear_drop(d, s.v[i]);
    free(s.v);
    return rc;
}

/* ---- the door -----------------------------------------------------------------------------------
 */

int gpu__tune(kern_dev *d, const kern_linear_desc *desc, int E, const kern_tune_opts *o, err *e)
{
    tuner t = {.g = gpu__of(d), .o = o, .desc = desc};
    int rc = gpu__check(t.g, "bind", t.g->api->bind(t.g->index), e);
    if (rc == 0) rc = desc->expert ? tune_experts(&t, E, e) : tune_linear(&t, e);
    drop(&t);
    return rc;
}

void gpu__plans_used(const kern_dev *d, char *out, size_t cap)
{
    const gpu_dev *g = gpu__of(d);
    tuned_counted(&g->tuned, g->facts.name, out, cap);
}

int gpu__tuned_lines(const kern_dev *d, const kern_tuned **out)
{
    *out = gpu__of(d)->found;
    return gpu__of(d)->n_found;
}

/* What is there. A file with faults is put aside, as its other lines may be worth something to
 * who can mend it. */
static int read_saved(const char *file, tuned_table *all, err *e)
{
    buf text = {0};
    err why = {0};
    char *aside = NULL;
    int rc = 0;
    if (!file_exists(file)) return 0;
    rc = file_read_all(&text, file, TUNED_MOST_FILE, &why);
    if (rc == 0 && tuned_read(all, text.data ? text.data : "", text.len, file) == 0) goto out;
    aside = xasprintf("%s.old", file);
    rc = rename(file, aside) ? err_errno(e, errno, "%s to %s", file, aside) : 0;
    if (rc == 0) log_warn("%s: put aside as %s%s%s", file, aside, *why.msg ? ": " : "", why.msg);
out:
    free(aside);
    buf_free(&text);
    return rc;
}

static void put_found(gpu_dev *g, tuned_table *all)
{
    for (int i = 0; i < g->n_found; i++) {
        const kern_tuned *f = &g->found[i];
        for (int op = 0; op < TUNED_OPS; op++) {
            const tuned_entry *one =
                strcmp(f->op, tuned_op_names[op])
                    ? NULL
                    : tuned_find(&g->tuned, (tuned_op)op, f->format, f->N, f->K, f->M);
            if (one) tuned_put(all, one);
        }
    }
}

/* What others have put there meanwhile stays, and so do entries of other devices. */
int gpu__tune_save(kern_dev *d, const char **path, err *e)
{
    gpu_dev *g = gpu__of(d);
    tuned_table all = {0};
    buf text = {0};
    char *folder = NULL;
    int rc = 0;
    *path = g->tuned.file;
    if (!g->tuned.file)
        return err_set(e, ERR_USAGE,
                       "the plans found are kept nowhere: neither XDG_CACHE_HOME nor HOME is an "
                       "absolute path");
    folder = xstrdup(g->tuned.file);
    *strrchr(folder, '/') = 0;
    TRY(file_mkdirs(folder, e));
    TRY(read_saved(g->tuned.file, &all, e));
    put_found(g, &all);
    tuned_write(&all, &text);
    if (text.len > TUNED_MOST_FILE) {
        rc = err_set(e, ERR_LIMIT, "%s would be larger than %zu bytes; remove it and measure anew",
                     g->tuned.file, TUNED_MOST_FILE);
        goto out;
    }
    TRY(file_write_atomic(g->tuned.file, text.data, text.len, e));
out:
    tuned_free(&all);
    buf_free(&text);
    free(folder);
    return rc;
}
