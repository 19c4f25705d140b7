/* Tables of measured plans: reading good, broken, huge and doubled entries, other versions, other
 * devices; measuring, keeping and using plans of rows, packed weights and experts, where each
 * result stays the one without a table. The device is the first argument ("cuda:0"), without one
 * the emulation. The user's cache folder is one of the test's own. */
#include <sys/stat.h>
#include <unistd.h>
#include "base/file.h"
#include "check.h"
#include "kern/candidates.h"
#include "kern/gpu/gpu.h"
#include "model/model.h"

#define HEAD "tare tuned plans 2\n"

static const char *device = "emulated";
static char folder[] = "/tmp/tuned-XXXXXX", table[256];

/* What is said on standard error while fn runs; static. */
static const char *said(void (*fn)(void *), void *arg)
{
    static char text[16384];
    char path[300];
    snprintf(path, sizeof path, "%s/said", folder);
    fflush(stderr);
    const int kept = dup(2);
    FILE *f = fopen(path, "w+");
    assert_non_null(f);
    dup2(fileno(f), 2);
    fn(arg);
    fflush(stderr);
    dup2(kept, 2);
    close(kept);
    rewind(f);
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
    return text;
}

static void has(const char *text, const char *word)
{
    if (!strstr(text, word)) fail_msg("'%s' is not in: %s", word, text);
}

static void put_table(const char *text, size_t n)
{
    err e = {0};
    char dir[256];
    snprintf(dir, sizeof dir, "%s/tare", folder);
    CHECK_OK(file_mkdirs(dir, &e));
    CHECK_OK(file_write_atomic(table, text, n, &e));
}

/* ---- reading ------------------------------------------------------------------------------------
 */

static void test_good(void **state)
{
    (void)state;
    static const char text[] = HEAD "# a remark\n\n"
                                    "90 132 rows bf16 4096 4096 8 1/4/2 7.25 NVIDIA H200\n"
                                    "90 132 dense e4m3-a8 4096 4096 8 cuda-rows - NVIDIA H200\n"
                                    "90 132 wide int4-128 4096 4096 16 16/3/4/1 9.9 NVIDIA H200\n"
                                    "90 114 experts mxfp4 768 2048 128 16 1e1 NVIDIA H100 PCIe\n";
    tuned_table t = {0}, again = {0};
    buf out = {0};
    /* 1e1 is no such number */
    assert_int_equal(tuned_read(&t, text, sizeof text - 1, "t"), 1);
    assert_int_equal(t.n, 0);
    const char *last = strstr(text, "90 114");
    assert_int_equal(tuned_read(&t, text, (size_t)(last - text), "t"), 0);
    assert_int_equal(t.n, 3);
    const tuned_entry *e = tuned_find(&t, TUNED_OP_wide, "int4-128", 4096, 4096, 16);
    assert_non_null(e);
    assert_string_equal(e->plan, "16/3/4/1");
    assert_int_equal(e->line, 6);
    assert_int_equal(e->sms, 132);
    assert_null(tuned_find(&t, TUNED_OP_wide, "int4-128", 4096, 4096, 32));
    assert_null(tuned_find(&t, TUNED_OP_wide, "int4-64", 4096, 4096, 16));
    tuned_entry other = *e;
    snprintf(other.plan, sizeof other.plan, "16/1/1/1");
    tuned_put(&t, &other);
    assert_int_equal(t.n, 3);
    assert_string_equal(tuned_find(&t, TUNED_OP_wide, "int4-128", 4096, 4096, 16)->plan,
                        "16/1/1/1");
    other.sms = 78; /* another device */
    tuned_put(&t, &other);
    assert_int_equal(t.n, 4);
    tuned_write(&t, &out);
    assert_int_equal(tuned_read(&again, out.data, out.len, "t"), 0);
    assert_int_equal(again.n, 4);
    buf_free(&out);
    tuned_write(&again, &out);
    has(out.data, "90 132 rows bf16 4096 4096 8 1/4/2 7.250 NVIDIA H200\n");
    has(out.data, "90 132 dense e4m3-a8 4096 4096 8 cuda-rows - NVIDIA H200\n");
    buf_free(&out);
    tuned_free(&t);
    tuned_free(&again);
}

typedef struct read_job {
    const char *text;
    size_t n;
    tuned_table t;
    int rc;
} read_job;

static void read_it(void *arg)
{
    read_job *j = arg;
    j->rc = tuned_read(&j->t, j->text, j->n, "/cache/tuned");
}

#define LINE "90 132 rows bf16 4096 4096 8 1/4/2 7.25 NVIDIA H200\n"

static void test_broken(void **state)
{
    (void)state;
    static const struct {
        const char *text, *where, *why;
    } bad[] = {
        {"", ":1:", "empty"},
        {"\n" LINE, ":1:", "not a file of plans"},
        {"{\"plans\":[]}\n", ":1:", "not a file of plans"},
        {"tare tuned plans 1\n" LINE, ":1:", "another version"},
        {"tare tuned plans 3\n" LINE, ":1:", "another version"},
        {"tare tuned plans 2x\n" LINE, ":1:", "another version"},
        {HEAD LINE "90 132 rows bf16 4096 4096 16 1/4/2 7.25 NVIDIA H2", ":3:", "cut off"},
        {HEAD LINE "x\n", ":3:", "compute capability"},
        {HEAD "-90 132 rows bf16 4096 4096 8 1/4/2 7.25 G\n", ":2:", "compute capability"},
        {HEAD "90 rows bf16 4096 4096 8 1/4/2 7.25 G\n", ":2:", "multiprocessors"},
        {HEAD "90 132\n", ":2:", "no operator"},
        {HEAD "90 132 slim bf16 4096 4096 8 1/4/2 7.25 G\n", ":2:", "operator"},
        {HEAD "90 132 rows int4-128 4096 4096 8 1/4/2 7.25 G\n", ":2:", "format"},
        {HEAD "90 132 rows bf16 0 4096 8 1/4/2 7.25 G\n", ":2:", "N and K"},
        {HEAD "90 132 rows bf16 99999999999999999999 4096 8 1/4/2 7 G\n", ":2:", "N and K"},
        {HEAD "90 132 rows bf16 4096 4096 9 1/4/2 7.25 G\n", ":2:", "M is none of"},
        {HEAD "90 132 rows bf16 4096 4096 8 1/4 7.25 G\n", ":2:", "plan"},
        {HEAD "90 132 rows bf16 4096 4096 8 1/4/2/1 7.25 G\n", ":2:", "plan"},
        {HEAD "90 132 rows bf16 4096 4096 8 1/0/2 7.25 G\n", ":2:", "plan"},
        {HEAD "90 132 rows bf16 4096 4096 8 1/4/99999 7.25 G\n", ":2:", "plan"},
        {HEAD "90 132 dense bf16 4096 4096 8 %s%n 7.25 G\n", ":2:", "plan"},
        {HEAD "90 132 rows bf16 4096 4096 8 1/4/2 nan G\n", ":2:", "microseconds"},
        {HEAD "90 132 rows bf16 4096 4096 8 1/4/2 -1 G\n", ":2:", "microseconds"},
        {HEAD "90 132 rows bf16 4096 4096 8 1/4/2 7.25\n", ":2:", "name of a device"},
        {HEAD "90 132 rows bf16 4096 4096 8 1/4/2 7.25 \x1b[2J\n", ":2:", "printable"},
        {HEAD "90 132 rows bf16 4096 4096 8 1/4/2 7.25 G\r\n", ":2:", "printable"},
        {HEAD LINE "\n" LINE, ":4:", "line 2"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        read_job j = {.text = bad[i].text, .n = strlen(bad[i].text)};
        const char *text = said(read_it, &j);
        char where[64];
        snprintf(where, sizeof where, "/cache/tuned%s", bad[i].where);
        if (j.rc < 1 || j.t.n) fail_msg("case %zu: %d faults, %d entries", i, j.rc, j.t.n);
        has(text, where);
        has(text, bad[i].why);
        has(text, "tare bench --tune");
        tuned_free(&j.t);
    }
    static const char zero[] = HEAD "90 132 rows bf16\0 4096 4096 8 1/4/2 7.25 G\n";
    read_job j = {.text = zero, .n = sizeof zero - 1};
    has(said(read_it, &j), "a zero byte");
    assert_int_equal(j.t.n, 0);
    tuned_free(&j.t);
}

static void open_it(void *arg)
{
    const gpu_facts f = {.name = "NVIDIA H200", .sm = 90, .sms = 132};
    tuned_open(arg, &f);
}

static void test_huge(void **state)
{
    (void)state;
    buf b = {0};
    tuned_table t = {0};
    read_job j = {0};
    buf_puts(&b, HEAD);
    for (int i = 1; i <= 30000; i++)
        buf_printf(&b, "90 132 rows bf16 %d 4096 8 1/4/2 7.25 NVIDIA H200\n", i);
    assert_int_equal(tuned_read(&t, b.data, b.len, "t"), 0);
    assert_int_equal(t.n, 30000);
    assert_non_null(tuned_find(&t, TUNED_OP_rows, "bf16", 30000, 4096, 8));
    tuned_free(&t);
    while (b.len <= TUNED_MOST_FILE)
        buf_puts(&b, "# more\n");
    put_table(b.data, b.len);
    const char *text = said(open_it, &t);
    has(text, table);
    has(text, "larger than");
    has(text, "tare bench --tune");
    assert_null(tuned_find(&t, TUNED_OP_rows, "bf16", 30000, 4096, 8));
    tuned_free(&t);
    buf_free(&b);
    buf_puts(&b, HEAD);
    for (int i = 0; i < 1000; i++) /* one line */
        buf_puts(&b, "90 132 rows bf16 4096 4096 8 ");
    buf_puts(&b, "\n");
    for (int i = 0; i < 1000; i++)
        buf_puts(&b, "x\n");
    j.text = b.data;
    j.n = b.len;
    text = said(read_it, &j);
    has(text, "/cache/tuned:2: a line of more than 400 bytes");
    has(text, "993 more lines");
    assert_int_equal(j.rc, 1001);
    assert_int_equal(j.t.n, 0);
    tuned_free(&j.t);
    buf_free(&b);
    unlink(table);
    assert_int_equal(mkdir(table, 0700), 0);
    has(said(open_it, &t), "is no file");
    tuned_free(&t);
    rmdir(table);
}

/* Entries of the program are for its device alone, those of the user go before them. */
static void test_open(void **state)
{
    (void)state;
    static const char text[] = HEAD "90 132 wide int4-128 4096 4096 16 32/2/2/1 9 NVIDIA H200\n"
                                    "90 132 wide int4-128 4096 4096 32 32/2/2/1 9 NVIDIA GH200\n";
    gpu_facts f = {.name = "NVIDIA H200", .sm = 90, .sms = 132};
    tuned_table t;
    unlink(table);
    tuned_open(&t, &f);
    const int shipped = t.n;
    assert_true(shipped >= 30);
    for (int i = 0; i < t.n; i++) { /* nothing is there twice, nothing that was not measured */
        assert_ptr_equal(tuned_find(&t, t.v[i].op, t.v[i].format, t.v[i].N, t.v[i].K, t.v[i].M),
                         &t.v[i]);
        assert_true(t.v[i].us > 0);
    }
    tuned_free(&t);
    put_table(text, sizeof text - 1);
    tuned_open(&t, &f);
    assert_int_equal(t.n, shipped + 1);
    const tuned_entry *e = tuned_find(&t, TUNED_OP_wide, "int4-128", 4096, 4096, 16);
    assert_string_equal(e->plan, "32/2/2/1");
    assert_string_equal(e->file, table);
    e = tuned_find(&t, TUNED_OP_wide, "int4-128", 4096, 4096, 32);
    assert_non_null(e);
    assert_null(e->file);
    tuned_free(&t);
    f.sms = 66; /* half of one */
    tuned_open(&t, &f);
    assert_int_equal(t.n, 0);
    tuned_free(&t);
    unlink(table);
}

/* ---- measuring ----------------------------------------------------------------------------------
 */

enum { E = 4, N = 192, K = 256, ROWS = 16 };

typedef struct weight {
    qspec spec;
    qtensor q;
    float *x, *y; /* lanes */
    float out[ROWS * N];
} weight;

static void product(kern_dev *dev, weight *w, char plan[96])
{
    err e = {0};
    kern_linear *l = NULL;
    kern_linear_desc d = {.name = "l", .n_shards = 1, .shard = {&w->q}, .act = KERN_ACT_AUTO};
    float host[ROWS * K], *at = host;
    for (int i = 0; i < ROWS * K; i++)
        host[i] = (float)(i % 17 - 8) / 8;
    CHECK_OK(kern_linear_make(dev, &d, &l, &e));
    snprintf(plan, 96, "%s", kern_linear_choice(l, kern_bucket(ROWS))->plan);
    CHECK_OK(kern_reserve(dev, ROWS, K, N, &e));
    CHECK_OK(kern_constant(dev, &at, ROWS * K, &e));
    CHECK_OK(kern_lanes(dev, &w->x, ROWS * K, KERN_FLOW, KERN_ACT_AUTO, &e));
    CHECK_OK(kern_lanes(dev, &w->y, ROWS * N, KERN_STREAM, KERN_ACT_AUTO, &e));
    kern_step_begin(dev, ROWS, 0);
    kern_copy_rows(dev, at, K, w->x, K, K, ROWS);
    kern_linear_run(dev, l, w->x, K, ROWS, w->y, N);
    kern_fetch(dev, w->y, ROWS * N, w->out);
    CHECK_OK(kern_step_end(dev, &e));
    kern_linear_drop(dev, l);
    kern_free(dev, w->x);
    kern_free(dev, w->y);
}

static kern_dev *open_device(void)
{
    err e = {0};
    kern_dev *dev = NULL;
    kern_opts o = {.device = device, .threads = 2};
    CHECK_OK(kern_open(&dev, &o, &e));
    return dev;
}

static void same(const weight *a, const weight *b)
{
    double size = 0, off = 0;
    for (int i = 0; i < ROWS * N; i++) {
        size += (double)a->out[i] * a->out[i];
        off += ((double)a->out[i] - b->out[i]) * ((double)a->out[i] - b->out[i]);
    }
    assert_true(size > 0 && off <= size * 0x1p-14);
}

static void open_and_close(void *arg)
{
    (void)arg;
    kern_close(open_device());
}

static void test_tune(void **state)
{
    (void)state;
    static const int64_t rows[] = {1, 16};
    static const char *const schemes[] = {NULL, "int4", "fp8"};
    static weight before[3], after[3];
    const kern_tune_opts o = {.rows = rows, .n_rows = 2, .copy_bytes = 1};
    const kern_tuned *line;
    const char *path = NULL;
    char plan[96], used[256];
    err e = {0};
    unlink(table);
    kern_dev *dev = open_device();
    for (int i = 0; i < 3; i++) {
        weight *w = &before[i];
        w->spec = (qspec){{.type = NUM_BF16}, {.type = NUM_BF16}, {.type = NUM_BF16}};
        if (schemes[i]) CHECK_OK(qspec_parse(schemes[i], &w->spec, &e));
        CHECK_OK(model_random_tensor(&w->spec, 1, N, K, dev->team, &w->q, &e));
        product(dev, w, plan);
        has(plan, "rule");
    }
    kern_plans_used(dev, used, sizeof used);
    assert_string_equal(used, "3 by the default rules");
    for (int i = 0; i < 3; i++) {
        kern_linear_desc d = {.name = "l", .n_shards = 1, .shard = {&before[i].q}};
        d.act = KERN_ACT_AUTO;
        CHECK_OK(kern_tune(dev, &d, 0, &o, &e));
        d.expert = true;
        if (i == 1) CHECK_OK(kern_tune(dev, &d, E, &o, &e));
    }
    const int n = kern_tuned_lines(dev, &line);
    bool seen[TUNED_OPS] = {false};
    assert_true(n >= 5);
    for (int i = 0; i < n; i++) {
        assert_true(line[i].tried > 1 && line[i].wrong == 0 && *line[i].plan && *line[i].rule);
        assert_true(line[i].us <= line[i].rule_us);
        for (int op = 0; op < TUNED_OPS; op++)
            seen[op] = seen[op] || !strcmp(line[i].op, tuned_op_names[op]);
    }
    assert_true(seen[TUNED_OP_rows] && seen[TUNED_OP_wide] && seen[TUNED_OP_dense] &&
                seen[TUNED_OP_experts]);
    static const char broken[] = "tare tuned plans 1\n";
    put_table(broken, sizeof broken - 1);
    CHECK_OK(kern_tune_save(dev, &path, &e));
    assert_string_equal(path, table);
    kern_close(dev);
    char aside[300];
    snprintf(aside, sizeof aside, "%s.old", table);
    assert_true(file_exists(aside));

    dev = open_device();
    for (int i = 0; i < 3; i++) {
        after[i].q = before[i].q;
        product(dev, &after[i], plan);
        has(plan, "measured here");
        same(&before[i], &after[i]);
        qtensor_free(&before[i].q);
    }
    kern_plans_used(dev, used, sizeof used);
    has(used, "3 by /");
    has(used, table);
    CHECK_OK(kern_tune_save(dev, &path, &e)); /* finds nothing, keeps what is there */
    kern_close(dev);
    assert_string_equal(said(open_and_close, NULL), "");
    buf text = {0};
    CHECK_OK(file_read_all(&text, table, 1 << 20, &e));
    int lines = 0;
    for (size_t i = 0; i < text.len; i++)
        lines += text.data[i] == '\n';
    assert_int_equal(lines, n + 2);
    buf_free(&text);
}

/* Plans that no kernel has are passed over, in words. */
static void make_linear(void *arg)
{
    err e = {0};
    char plan[96];
    kern_dev *dev = open_device();
    weight w = {.q = *(qtensor *)arg};
    product(dev, &w, plan);
    has(plan, "rule");
    kern_close(dev);
    (void)e;
}

static void test_no_such_plan(void **state)
{
    (void)state;
    err e = {0};
    char text[512];
    qtensor q;
    qspec spec = {{.type = NUM_BF16}, {.type = NUM_BF16}, {.type = NUM_BF16}};
    kern_dev *dev = open_device();
    const gpu_facts *f = &gpu__of(dev)->facts;
    CHECK_OK(model_random_tensor(&spec, 1, N, K, dev->team, &q, &e));
    snprintf(text, sizeof text,
             HEAD "%d %d rows bf16 192 256 16 16/4096/8 1 %s\n%d %d dense bf16 192 256 16 "
                  "cuda-none 1 %s\n",
             f->sm, f->sms, f->name, f->sm, f->sms, f->name);
    kern_close(dev);
    put_table(text, strlen(text));
    const char *what = said(make_linear, &q);
    has(what, "tuned:2: not used");
    has(what, "no such kernel");
    has(what, "tuned:3: not used");
    has(what, "no such row");
    qtensor_free(&q);
}

static int remove_all(void **state)
{
    err e = {0};
    (void)state;
    file_remove_tree(folder, &e);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good), cmocka_unit_test(test_broken),
        cmocka_unit_test(test_huge), cmocka_unit_test(test_open),
        cmocka_unit_test(test_tune), cmocka_unit_test(test_no_such_plan),
    };
    if (argc > 1) device = argv[1];
    if (!mkdtemp(folder)) return 1;
    setenv("XDG_CACHE_HOME", folder, 1);
    snprintf(table, sizeof table, "%s/tare/tuned", folder);
    return cmocka_run_group_tests(tests, NULL, remove_all);
}
