/* Every architecture in every dialect that is written: quantized, loaded again, and its logits held
 * against those of quantizing while loading. What came out is the table of docs/SUPPORT.md
 * (tests/fixtures/support/architectures.tsv): a cell there that does not show here fails, and the
 * reverse. With --write the table is made anew.
 *
 * GPTQ and AWQ keep F16 scales where quantizing while loading takes those of the model's type, so
 * theirs are converted from what compressed-tensors holds: conversion changes no number. Each cell
 * that is not a refusal also runs as its own weights in plain f32 do, to 1e-4. */
#include <dirent.h>
#include <math.h>
#include "check.h"
#include "bake/bake.h"
#include "model_fixture.h"

#define ROOT  "tests/fixtures/arch/"
#define TABLE "tests/fixtures/support/architectures.tsv"

static bool rewrite;
static char tmp[] = "/tmp/tare_support_XXXXXX";

/* A scheme that the dialect has words for; a writable dialect without a row here fails the test. */
static const struct {
    const char *dialect, *scheme;
} fitting[] = {
    {"compressed-tensors", "w:int4,g32"}, {"gptq", "w:int4,g32"},   {"awq", "w:int4,g32,asym"},
    {"bitsandbytes", "w:nf4,b32"},        {"mxfp4", "w:mxfp4,g32"}, {"fp8", "fp8-tensor"},
    {"modelopt", "w:nvfp4,g16"}};

static const char *scheme_of(const char *dialect)
{
    for (size_t i = 0; i < sizeof fitting / sizeof *fitting; i++)
        if (!strcmp(fitting[i].dialect, dialect)) return fitting[i].scheme;
    fail_msg("no scheme for %s, which is written", dialect);
    return NULL;
}

/* Logits of 40 fixed ids; returns how many numbers, or what went wrong. */
static int64_t logits(const char *path, const char *quantize, kern_act act, float **out, err *e)
{
    fixture f;
    int32_t ids[40];
    int rc = fixture_open(
        &f, &(fixture_opts){.path = path, .quantize = quantize, .act = act, .kv = KV_F32}, e);
    if (rc < 0) return rc;
    int64_t V = model_vocab(f.m);
    for (int i = 0; i < 40; i++)
        ids[i] = (int32_t)((i * 37 + 11) % V);
    *out = xmalloc(sizeof **out * (size_t)(40 * V));
    rc = fixture_step(&f, ids, 0, 40, 40, *out, e);
    fixture_close(&f);
    return rc < 0 ? rc : 40 * V;
}

static double difference(const float *a, const float *b, int64_t n)
{
    double d = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        d += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        s += (double)b[i] * (double)b[i];
    }
    return sqrt(d / s);
}

static int quantize(const char *in, const char *out, const char *scheme, const char *to, err *e)
{
    bake_report r = {0};
    bake_opts o = {
        .model = in, .out = out, .scheme = scheme, .algo = "rtn", .to = to, .overwrite = true};
    int rc = bake_quantize(&o, &r, e);
    bake_report_free(&r);
    return rc;
}

static int write_as(const char *in, const char *out, const quant_dialect *d, err *e)
{
    const char *scheme = scheme_of(d->name);
    if (!d->f16_scales) return quantize(in, out, scheme, d->name, e);
    char *first = file_join(tmp, "first");
    bake_report r = {0};
    int rc = quantize(in, first, scheme, "compressed-tensors", e);
    if (rc >= 0) {
        convert_opts o = {.in = first, .out = out, .to = d->name, .overwrite = true};
        rc = bake_convert(&o, &r, e);
        bake_report_free(&r);
    }
    free(first);
    return rc;
}

/* The reason without module, paths and tabs, which a table cannot hold. */
static void reason(const char *msg, buf *out)
{
    const char *m = strstr(msg, "module '"), *n = strstr(msg, "nothing to quantize");
    const char *after = m ? strstr(m, "): ") : NULL;
    m = after ? after + 3 : n ? n : msg;
    for (; *m; m++)
        buf_putc(out, *m == '\t' || *m == '\n' ? ' ' : *m);
}

/* Linears that quantizing while loading takes and the written checkpoint keeps plain. */
static int kept_plain(const char *dir, char first[128])
{
    ckpt *c;
    quant_ckpt *q;
    arch_model *m;
    err e = {0};
    CHECK_OK(ckpt_open(&c, dir, &e));
    CHECK_OK(quant_open(&q, c, &e));
    CHECK_OK(arch_open(&m, ckpt_cfg(c), c, &e));
    int n = arch_linears(m, NULL, 0), kept = 0;
    arch_linear *all = xcalloc((size_t)n, sizeof *all);
    arch_linears(m, all, n);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < all[i].n_shards; k++)
            if (arch_quantizable(all[i].kind) && !quant_has(q, all[i].shard[k].module) && !kept++)
                memcpy(first, all[i].shard[k].module, 128);
    free(all);
    arch_close(m);
    quant_close(q);
    ckpt_close(c);
    return kept;
}

/* What is stored, in plain f32: the kernels on the packed weights must give the same. */
static double off_plain(const char *dir)
{
    char *plain = file_join(tmp, "plain");
    float *a = NULL, *b = NULL;
    err e = {0};
    bake_report r = {0};
    convert_opts o = {.in = dir, .out = plain, .to = "plain", .dtype = "f32", .overwrite = true};
    CHECK_OK(bake_convert(&o, &r, &e));
    bake_report_free(&r);
    int64_t n = logits(dir, NULL, KERN_ACT_F32, &a, &e);
    assert_true(n > 0 && logits(plain, NULL, KERN_ACT_F32, &b, &e) == n);
    double d = difference(a, b, n);
    free(a);
    free(b);
    free(plain);
    return d;
}

static void compare(const char *path, const char *dir, const quant_dialect *d, buf *out)
{
    err e = {0};
    char first[128];
    float *online = NULL, *again = NULL;
    int64_t n = logits(dir, NULL, KERN_ACT_SPEC, &again, &e);
    if (n < 0) fail_msg("%s as %s is written and not loaded: %s", path, d->name, e.msg);
    assert_true(logits(path, scheme_of(d->name), KERN_ACT_SPEC, &online, &e) == n);
    double x = difference(again, online, n), y = off_plain(dir);
    int kept = kept_plain(dir, first);
    if (!(y <= 1e-4)) fail_msg("%s as %s runs %.1e off its own weights", path, d->name, y);
    if (!kept && !(x <= 1e-6)) fail_msg("%s as %s: %.1e off quantizing at load", path, d->name, x);
    if (kept)
        buf_printf(out, "partly: %s and %d more stay plain", first, kept - 1);
    else
        buf_puts(out, "yes");
    free(online);
    free(again);
}

static void cell(const char *path, const quant_dialect *d, buf *out)
{
    err e = {0};
    char *dir = file_join(tmp, "out");
    if (write_as(path, dir, d, &e) < 0)
        reason(e.msg, out);
    else
        compare(path, dir, d, out);
    free(dir);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

/* The first case of each architecture, by name. */
static void find_cases(char (*found)[64])
{
    static char names[64][64];
    size_t n = 0;
    DIR *d = opendir(ROOT);
    assert_non_null(d);
    for (struct dirent *f; (f = readdir(d)) != NULL;)
        if (!strchr(f->d_name, '.') && n < 64) snprintf(names[n++], 64, "%.60s", f->d_name);
    closedir(d);
    qsort(names, n, sizeof names[0], by_name);
    for (size_t i = n; i-- > 0;) {
        ckpt *c;
        const arch_row *row;
        err e = {0};
        char *path = xasprintf(ROOT "%s", names[i]);
        CHECK_OK(ckpt_open(&c, path, &e));
        CHECK_OK(arch_find(ckpt_cfg(c), &row, &e));
        memcpy(found[row - arch_rows], names[i], 64);
        ckpt_close(c);
        free(path);
    }
}

static void make_table(buf *out)
{
    char(*found)[64] = xcalloc((size_t)arch_n_rows, sizeof *found);
    find_cases(found);
    buf_puts(out, "architecture\tcase");
    for (int k = 0; k < quant_n_dialects; k++)
        if (quant_dialects[k]->store) buf_printf(out, "\t%s", quant_dialects[k]->name);
    buf_putc(out, '\n');
    for (int i = 0; i < arch_n_rows; i++) {
        char *path = xasprintf(ROOT "%s", found[i]);
        size_t at = out->len;
        buf_printf(out, "%s\t%s", arch_rows[i].name, found[i]);
        for (int k = 0; k < quant_n_dialects; k++) {
            if (!quant_dialects[k]->store) continue;
            buf_putc(out, '\t');
            cell(path, quant_dialects[k], out);
        }
        print_message("%s\n", out->data + at);
        buf_putc(out, '\n');
        free(path);
    }
    free(found);
}

static void the_table_is_what_happens(void **state)
{
    (void)state;
    err e = {0};
    buf now = {0}, then = {0};
    make_table(&now);
    if (rewrite) CHECK_OK(file_write_atomic(TABLE, now.data, now.len, &e));
    CHECK_OK(file_read_all(&then, TABLE, 1 << 20, &e));
    if (now.len != then.len || memcmp(now.data, then.data, now.len) != 0)
        fail_msg("%s says otherwise; if this is meant: test_support --write, make docs", TABLE);
    buf_free(&now);
    buf_free(&then);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_table_is_what_happens)};
    rewrite = argc > 1 && !strcmp(argv[1], "--write");
    if (!mkdtemp(tmp)) return 1;
    int bad = cmocka_run_group_tests(tests, NULL, NULL);
    file_remove_tree(tmp, NULL);
    return bad;
}
