/* Tables of measured plans: reading, writing, looking up. See tuned.h for the format. */
#include "kern/gpu/tuned.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "base/file.h"
#include "base/log.h"

#define HEAD      TUNED_HEAD TUNED_VERSION
#define MOST_LINE 400
#define WARNINGS  8 /* of one file, one by one */
#define MOST_SIZE (1 << 30)

const int tuned_rows[TUNED_ROWS] = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
const char *const tuned_op_names[TUNED_OPS] = {"rows", "wide", "dense", "packed", "experts"};

static const char *const rows_names[] = {"bf16", "e4m3", "int8", "e4m3-blocks"};
static const char *const packed_names[SMALL_FORMATS] = {
    [SMALL_INT4_128] = "int4-128", [SMALL_INT4_128_ZERO] = "int4-128-zeros",
    [SMALL_INT4_64] = "int4-64",   [SMALL_INT4_64_ZERO] = "int4-64-zeros",
    [SMALL_INT4_32] = "int4-32",   [SMALL_INT4_32_ZERO] = "int4-32-zeros",
    [SMALL_E4M3] = "e4m3",         [SMALL_E4M3_BLOCK] = "e4m3-blocks",
    [SMALL_INT8] = "int8",         [SMALL_INT8_GROUP] = "int8-128",
    [SMALL_BF16] = "bf16",         [SMALL_MXFP4] = "mxfp4",
    [SMALL_NVFP4] = "nvfp4",
};

static const char *const shipped[] = {
#include "kern/gpu/tuned_h200.inc"
};

int tuned_at(int64_t M)
{
    for (int i = 0; i < TUNED_ROWS; i++)
        if (M <= tuned_rows[i]) return i;
    return TUNED_ROWS - 1;
}

const char *tuned_format_of_rows(rows_format f, bool blocks)
{
    return rows_names[blocks ? 3 : f];
}
const char *tuned_format_of_packed(small_format f)
{
    return packed_names[f];
}
void tuned_rows_text(rows_plan p, char out[32])
{
    snprintf(out, 32, "%d/%d/%d", p.groups, p.chunks, p.split);
}
void tuned_wide_text(wide_plan p, char out[32])
{
    snprintf(out, 32, "%d/%d/%d/%d", p.tokens, p.groups, p.split, p.share ? p.share : 1);
}

/* ---- a line -------------------------------------------------------------------------------------
 */

/* The next word of the line; NULL: none, or longer than cap. */
static const char *word(const char **at, char *out, size_t cap)
{
    const char *p = *at + strspn(*at, " ");
    size_t n = strcspn(p, " ");
    *at = p + n;
    if (!n || n >= cap) return NULL;
    memcpy(out, p, n);
    out[n] = 0;
    return out;
}

static bool whole_number(const char **at, int64_t lo, int64_t hi, int64_t *out)
{
    char text[24];
    const char *w = word(at, text, 12);
    if (!w || strspn(w, "0123456789") != strlen(w)) return false;
    *out = strtoll(w, NULL, 10);
    return *out >= lo && *out <= hi;
}

static bool known(const char *const *names, int n, const char *name)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(names[i], name)) return true;
    return false;
}

static bool format_known(tuned_op op, const char *format)
{
    char bare[24];
    size_t n = strlen(format);
    if (op == TUNED_OP_rows) return known(rows_names, 4, format);
    if (op != TUNED_OP_dense) return known(packed_names, SMALL_FORMATS, format);
    snprintf(bare, sizeof bare, "%s", format);
    if (n > 3 && !strcmp(bare + n - 3, "-a8")) bare[n - 3] = 0;
    return known(rows_names, 4, bare);
}

/* n numbers of 1 to 4096 with strokes between them. */
static bool numbers(const char *text, int n, int *out)
{
    for (int i = 0; i < n; i++) {
        char *end;
        if (*text < '0' || *text > '9') return false;
        long v = strtol(text, &end, 10);
        if (v < 1 || v > 4096 || *end != (i + 1 < n ? '/' : 0)) return false;
        out[i] = (int)v;
        text = end + 1;
    }
    return true;
}

static bool plan_known(tuned_op op, const char *plan)
{
    int v[4];
    if (op == TUNED_OP_rows) return numbers(plan, 3, v);
    if (op == TUNED_OP_wide) return numbers(plan, 4, v);
    if (op == TUNED_OP_experts) return numbers(plan, 1, v);
    return plan[strspn(plan, "abcdefghijklmnopqrstuvwxyz0123456789-")] == 0;
}

static bool rows_known(tuned_op op, int64_t M)
{
    return op == TUNED_OP_experts ||
           (M <= tuned_rows[TUNED_ROWS - 1] && tuned_rows[tuned_at(M)] == M);
}

static bool time_of(const char *text, double *out)
{
    char *end;
    *out = 0;
    if (!strcmp(text, "-")) return true;
    if (strspn(text, "0123456789.") != strlen(text)) return false;
    *out = strtod(text, &end);
    return !*end && *out > 0 && *out < 1e9;
}

const char *tuned_parse(const char *line, tuned_entry *out)
{
    char text[24];
    int64_t sm, sms;
    tuned_entry e = {.op = TUNED_OPS};
    for (const char *p = line; *p; p++)
        if (*p < ' ' || *p > '~') return "a character that is not printable ASCII";
    if (!whole_number(&line, 1, 999, &sm))
        return "the first word is no compute capability such as 90";
    if (!whole_number(&line, 1, 9999, &sms))
        return "the second word is no number of multiprocessors such as 132";
    e.sm = (int)sm;
    e.sms = (int)sms;
    if (!word(&line, text, sizeof text)) return "no operator";
    for (int i = 0; i < TUNED_OPS; i++)
        if (!strcmp(text, tuned_op_names[i])) e.op = (tuned_op)i;
    if (e.op == TUNED_OPS) return "the operator is none of rows, wide, dense, packed, experts";
    if (!word(&line, e.format, sizeof e.format) || !format_known(e.op, e.format))
        return "the operator has no such format";
    if (!whole_number(&line, 1, MOST_SIZE, &e.N) || !whole_number(&line, 1, MOST_SIZE, &e.K))
        return "N and K are not whole numbers of 1 to 2^30";
    if (!whole_number(&line, 1, 4096, &e.M) || !rows_known(e.op, e.M))
        return "M is none of 1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096";
    if (!word(&line, e.plan, sizeof e.plan) || !plan_known(e.op, e.plan))
        return "the plan is not one of the operator";
    if (!word(&line, text, sizeof text) || !time_of(text, &e.us))
        return "the time is neither - nor microseconds";
    line += strspn(line, " ");
    if (!*line || strlen(line) >= sizeof e.device)
        return "no name of a device at the end, or too long a one";
    snprintf(e.device, sizeof e.device, "%s", line);
    *out = e;
    return NULL;
}

/* ---- a table ------------------------------------------------------------------------------------
 */

static void add(tuned_table *t, const tuned_entry *e)
{
    if (t->n == t->cap) {
        t->cap = t->cap ? 2 * t->cap : 64;
        t->v = xrealloc(t->v, sizeof *t->v * (size_t)t->cap);
    }
    t->v[t->n++] = *e;
}

static int by_key(const void *x, const void *y)
{
    const tuned_entry *a = *(const tuned_entry *const *)x, *b = *(const tuned_entry *const *)y;
    const int64_t of_a[] = {a->sm, a->sms, a->op, a->N, a->K, a->M},
                  of_b[] = {b->sm, b->sms, b->op, b->N, b->K, b->M};
    for (size_t i = 0; i < sizeof of_a / sizeof *of_a; i++)
        if (of_a[i] != of_b[i]) return of_a[i] < of_b[i] ? -1 : 1;
    const int c = strcmp(a->format, b->format);
    return c ? c : strcmp(a->device, b->device);
}

/* The last such entry is the one that counts. */
void tuned_put(tuned_table *t, const tuned_entry *e)
{
    for (int i = t->n - 1; i >= 0; i--) {
        const tuned_entry *at = &t->v[i];
        if (by_key(&at, &e) == 0) {
            t->v[i] = *e;
            return;
        }
    }
    add(t, e);
}

static void say_bad(const char *file, int line, const char *why, int *bad)
{
    if ((*bad)++ < WARNINGS) log_warn("%s:%d: %s", file, line, why);
}

static int by_key_and_line(const void *x, const void *y)
{
    const int c = by_key(x, y), a = (*(const tuned_entry *const *)x)->line,
              b = (*(const tuned_entry *const *)y)->line;
    return c ? c : a < b ? -1 : a > b;
}

/* Entries from `from` on that say again what another has said. */
static void find_doubles(const tuned_table *t, int from, const char *file, int *bad)
{
    const int n = t->n - from;
    const tuned_entry **order = xmalloc(sizeof *order * (size_t)(n + 1));
    for (int i = 0; i < n; i++)
        order[i] = &t->v[from + i];
    qsort(order, (size_t)n, sizeof *order, by_key_and_line);
    for (int i = 1; i < n; i++) {
        char why[64];
        if (by_key(&order[i - 1], &order[i])) continue;
        snprintf(why, sizeof why, "a second entry for what line %d is for", order[i - 1]->line);
        say_bad(file, order[i]->line, why, bad);
    }
    free(order);
}

static const char *bad_head(const char *line)
{
    if (!strcmp(line, HEAD)) return NULL;
    if (!strncmp(line, TUNED_HEAD, sizeof TUNED_HEAD - 1))
        return "of another version: the first line is not '" HEAD "'";
    return "not a file of plans: the first line is not '" HEAD "'";
}

static void read_lines(tuned_table *t, const char *text, size_t n, const char *file, int *bad)
{
    const char *end = text + n;
    int line = 0;
    for (const char *at = text; at < end;) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        const size_t len = (size_t)((stop ? stop : end) - at);
        char copy[MOST_LINE + 1];
        tuned_entry e;
        line++;
        const char *why = len > MOST_LINE      ? "a line of more than 400 bytes"
                          : memchr(at, 0, len) ? "a zero byte"
                          : stop == NULL       ? "the line has no end: the file was cut off"
                                               : NULL;
        memcpy(copy, at, why ? 0 : len);
        copy[why ? 0 : len] = 0;
        at = stop ? stop + 1 : end;
        if (line == 1 && bad_head(copy)) {
            say_bad(file, 1, bad_head(copy), bad);
            return;
        }
        if (!why && (line == 1 || !*copy || *copy == '#')) continue;
        if (!why) why = tuned_parse(copy, &e);
        if (why) {
            say_bad(file, line, why, bad);
            continue;
        }
        e.file = file;
        e.line = line;
        add(t, &e);
    }
    if (!line) say_bad(file, 1, "an empty file", bad);
}

int tuned_read(tuned_table *t, const char *text, size_t n, const char *file)
{
    const int from = t->n;
    int bad = 0;
    read_lines(t, text, n, file, &bad);
    find_doubles(t, from, file, &bad);
    if (!bad) return 0;
    if (bad > WARNINGS) log_warn("%s: %d more lines like that", file, bad - WARNINGS);
    log_warn("%s: none of its plans is used; remove it, or have `tare bench --tune` put it aside "
             "and write a new one",
             file);
    t->n = from;
    return bad;
}

void tuned_write(const tuned_table *t, buf *out)
{
    buf_puts(out, HEAD "\n# sm sms operator format N K M plan us device\n");
    for (int i = 0; i < t->n; i++) {
        const tuned_entry *e = &t->v[i];
        buf_printf(out, "%d %d %s %s %lld %lld %lld %s ", e->sm, e->sms, tuned_op_names[e->op],
                   e->format, (long long)e->N, (long long)e->K, (long long)e->M, e->plan);
        if (e->us > 0)
            buf_printf(out, "%.3f %s\n", e->us, e->device);
        else
            buf_printf(out, "- %s\n", e->device);
    }
}

void tuned_free(tuned_table *t)
{
    free(t->v);
    free(t->file);
    *t = (tuned_table){0};
}

char *tuned_path(void)
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (cache && *cache == '/') return file_join(cache, "tare/tuned");
    return home && *home == '/' ? file_join(home, ".cache/tare/tuned") : NULL;
}

/* ---- looking up ---------------------------------------------------------------------------------
 */

/* Those of other devices go. */
static void keep_own(tuned_table *t, const gpu_facts *f)
{
    int n = 0;
    for (int i = 0; i < t->n; i++)
        if (t->v[i].sm == f->sm && t->v[i].sms == f->sms && !strcmp(t->v[i].device, f->name))
            t->v[n++] = t->v[i];
    t->n = n;
}

void tuned_open(tuned_table *t, const gpu_facts *f)
{
    buf text = {0};
    err why = {0};
    *t = (tuned_table){0};
    for (size_t i = 0; i < sizeof shipped / sizeof *shipped; i++) {
        tuned_entry e;
        if (tuned_parse(shipped[i], &e)) continue;
        e.line = (int)i + 1;
        add(t, &e);
    }
    t->file = tuned_path();
    struct stat st;
    if (t->file && stat(t->file, &st) == 0) {
        if (!S_ISREG(st.st_mode))
            log_warn("tuned plans are not used: %s is no file; remove it", t->file);
        else if (file_read_all(&text, t->file, TUNED_MOST_FILE, &why) < 0)
            log_warn("tuned plans are not used: %s; remove it, or have `tare bench --tune` put it "
                     "aside and write a new one",
                     why.msg);
        else
            tuned_read(t, text.data ? text.data : "", text.len, t->file);
    }
    buf_free(&text);
    keep_own(t, f);
}

tuned_entry *tuned_find(const tuned_table *t, tuned_op op, const char *format, int64_t N, int64_t K,
                        int64_t M)
{
    for (int i = t->n - 1; i >= 0; i--) {
        tuned_entry *e = &t->v[i];
        if (e->op == op && e->N == N && e->K == K && e->M == M && !e->refused &&
            !strcmp(e->format, format))
            return e;
    }
    return NULL;
}

void tuned_refuse(tuned_entry *e, const char *why)
{
    log_warn("%s:%d: not used: %s %s %lldx%lld, M %lld, plan %s: %s; `tare bench --tune` measures "
             "the shape anew",
             e->file ? e->file : "shipped plans", e->line, tuned_op_names[e->op], e->format,
             (long long)e->N, (long long)e->K, (long long)e->M, e->plan, why);
    e->refused = true;
}

void tuned_plans_of_rows(tuned_table *t, const gpu_api *api, rows_format f, bool blocks, int64_t N,
                         int64_t K, rows_plan out[TUNED_ROWS])
{
    const char *format = tuned_format_of_rows(f, blocks);
    memset(out, 0, sizeof *out * TUNED_ROWS);
    for (int i = 0; i < TUNED_ROWS; i++) {
        tuned_entry *e;
        while ((e = tuned_find(t, TUNED_OP_rows, format, N, K, tuned_rows[i]))) {
            int v[3] = {0};
            numbers(e->plan, 3, v);
            const rows_plan p = {v[0], v[1], v[2]};
            if (api->rows_has && api->rows_has(f, p, (int)K, tuned_rows[i])) {
                out[i] = p;
                break;
            }
            tuned_refuse(e, "no such kernel for this shape");
        }
    }
}

void tuned_plans_of_wide(tuned_table *t, const gpu_api *api, small_format f, int64_t N, int64_t K,
                         wide_plan out[TUNED_ROWS])
{
    memset(out, 0, sizeof *out * TUNED_ROWS);
    for (int i = 0; i < TUNED_ROWS; i++) {
        tuned_entry *e;
        while ((e = tuned_find(t, TUNED_OP_wide, packed_names[f], N, K, tuned_rows[i]))) {
            int v[4] = {0};
            numbers(e->plan, 4, v);
            const wide_plan p = {v[0], v[1], v[2], v[3]};
            if (api->wide_has && api->wide_has(f, p, (int)K)) {
                out[i] = p;
                break;
            }
            tuned_refuse(e, "no such kernel for this shape");
        }
    }
}

int tuned_experts(tuned_table *t, small_format f, int64_t N, int64_t K, int E, int rule)
{
    const tuned_entry *e = tuned_find(t, TUNED_OP_experts, packed_names[f], N, K, E);
    int v = rule;
    if (e) numbers(e->plan, 1, &v);
    ++*(!e ? &t->by_rule : e->file ? &t->by_user : &t->by_shipped);
    return v;
}

/* ---- telling ------------------------------------------------------------------------------------
 */

void tuned_count(tuned_table *t, tuned_op a, const char *format_a, tuned_op b, const char *format_b,
                 int64_t N, int64_t K)
{
    bool user = false, shipped_one = false;
    for (int i = 0; i < 2 * TUNED_ROWS; i++) {
        const tuned_op op = i % 2 ? b : a;
        const tuned_entry *e =
            op < TUNED_OPS ? tuned_find(t, op, i % 2 ? format_b : format_a, N, K, tuned_rows[i / 2])
                           : NULL;
        user = user || (e && e->file);
        shipped_one = shipped_one || (e && !e->file);
    }
    ++*(user ? &t->by_user : shipped_one ? &t->by_shipped : &t->by_rule);
}

void tuned_counted(const tuned_table *t, const char *device, char *out, size_t cap)
{
    size_t n = 0;
    *out = 0;
    if (t->by_user) snprintf(out, cap, "%d by %s", t->by_user, t->file);
    n = strlen(out);
    if (t->by_shipped)
        snprintf(out + n, cap - n, "%s%d by the table shipped for %s", n ? ", " : "", t->by_shipped,
                 device);
    n = strlen(out);
    if (t->by_rule)
        snprintf(out + n, cap - n, "%s%d by the default rules", n ? ", " : "", t->by_rule);
}

static void tell(char *out, size_t cap, const tuned_entry *e, bool first)
{
    const size_t n = strlen(out);
    const char *doubt = e->us > 0 ? "" : " (not measured)";
    if (first)
        snprintf(out, cap, "%s: %lldx%lld M %lld: %s%s", e->file ? "measured here" : "shipped",
                 (long long)e->N, (long long)e->K, (long long)e->M, e->plan, doubt);
    else
        snprintf(out + n, cap - n, ", M %lld: %s%s", (long long)e->M, e->plan, doubt);
}

void tuned_text(const tuned_table *t, tuned_op a, const char *format_a, tuned_op b,
                const char *format_b, int64_t N, int64_t K, int bucket, char *out, size_t cap)
{
    bool any = false;
    snprintf(out, cap, "rule");
    for (int i = 0; i < TUNED_ROWS; i++) {
        const tuned_entry *e[2] = {NULL, NULL};
        if (kern_bucket(tuned_rows[i]) != bucket) continue;
        e[0] = tuned_find(t, a, format_a, N, K, tuned_rows[i]);
        if (b < TUNED_OPS) e[1] = tuned_find(t, b, format_b, N, K, tuned_rows[i]);
        for (int k = 0; k < 2; k++) {
            if (e[k]) tell(out, cap, e[k], !any);
            any = any || e[k];
        }
    }
}
