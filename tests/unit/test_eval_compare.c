/* Comparing a scripted candidate with a scripted baseline: pairs, verdicts, KL, cache, report. */
#include "check.h"
#include "fake_scripted.h"
#include <unistd.h>
#include "base/file.h"
#include "eval/local.h"

static char dir[64] = "/tmp/tare-cmp-XXXXXX";
static char base_dir[96], cand_dir[96], cache[96], task[128], text_file[128];
static engine_opts base, cand;
static const char text[] =
    "It was a bright cold day. The Answer: C was A or B, and the clocks were striking "
    "thirteen; nobody knew why, #### 13 or so.";

static void put(const char *path, const char *s, size_t n)
{
    err e = {0};
    CHECK_OK(file_write_atomic(path, s, n, &e));
}

static int wrong_below, cut_below; /* the candidate's faults, by item number */
static const char *answers(const char *prompt, bool is_cand)
{
    const char *at = strstr(prompt, "n=");
    int i = at ? atoi(at + 2) : 0;
    if (is_cand && i < cut_below)
        return "let me think about that for a very long while, longer than anybody would allow me "
               "to";
    if (is_cand && i < wrong_below) return "#### 1000000";
    return at ? at + 2 : "?";
}

static void items(int n)
{
    buf b = {0};
    for (int i = 0; i < n; i++)
        buf_printf(&b, "{\"question\": \"n=%d.\", \"answer\": \"%d\"}\n", i, i);
    put(task, b.data, b.len);
    buf_free(&b);
}

static int setup(void **state)
{
    (void)state;
    err e = {0};
    memset(&fake, 0, sizeof fake);
    fake.max_len = 4096;
    fake.answer = answers;
    wrong_below = cut_below = 0;
    snprintf(base_dir, sizeof base_dir, "%s/base", dir);
    snprintf(cand_dir, sizeof cand_dir, "%s/cand", dir);
    snprintf(cache, sizeof cache, "%s/cache", dir);
    snprintf(task, sizeof task, "%s/sums.jsonl", dir);
    snprintf(text_file, sizeof text_file, "%s/text.txt", dir);
    char config[128];
    snprintf(config, sizeof config, "%s/config.json", base_dir);
    CHECK_OK(file_mkdirs(base_dir, &e));
    CHECK_OK(file_mkdirs(cand_dir, &e));
    put(config, "{}", 2);
    put(text_file, text, sizeof text - 1);
    if (file_is_dir(cache)) CHECK_OK(file_remove_tree(cache, &e));
    base = (engine_opts){.model = base_dir};
    cand = (engine_opts){.model = cand_dir};
    return 0;
}

static const char *const task_list[] = {task};
static eval_opts opts(bool tasks, bool ppl)
{
    return (eval_opts){.tasks = task_list,
                       .n_tasks = tasks,
                       .perplexity = ppl ? text_file : NULL,
                       .max_tokens = 40,
                       .threshold = 0.5,
                       .window = 24,
                       .stride = 16,
                       .bos = "auto"};
}

static bool says(const compare_result *r, const char *what)
{
    for (int i = 0; i < r->n_reasons; i++)
        if (strstr(r->reasons[i], what)) return true;
    return false;
}

static compare_result run(const eval_opts *o)
{
    err e = {0};
    compare_result r;
    CHECK_OK(compare_run(&base, &cand, o, &r, &e));
    return r;
}

static void test_verdicts(void **state)
{
    (void)state;
    static const struct {
        int n, wrong;
        verdict want;
    } rows[] = {{500, 0, VERDICT_SAFE},
                {5, 0, VERDICT_CONFIRM},
                {500, 9, VERDICT_CONFIRM},
                {500, 20, VERDICT_REJECT}};
    eval_opts o = opts(true, false);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        items(rows[i].n);
        wrong_below = rows[i].wrong;
        compare_result r = run(&o);
        assert_int_equal(r.v, rows[i].want);
        assert_int_equal(r.n_tasks, 1);
        assert_int_equal(r.tasks[0].n, rows[i].n);
        assert_int_equal(r.tasks[0].b, rows[i].wrong);
        assert_int_equal(r.tasks[0].flips, rows[i].wrong);
        assert_true(fabs(r.tasks[0].delta_pp + 100.0 * rows[i].wrong / rows[i].n) < 1e-9);
        assert_true(r.tasks[0].baseline == 1);
        assert_true(r.n_reasons >= 2 && !r.has_ppl);
        assert_true(fabs(r.speed_cand_tpot_ms - 2) < 1e-9 &&
                    fabs(r.speed_base_ttft_ms - 10) < 1e-9);
        compare_free(&r);
    }
}

/* Cut answers leave the pairs; different rates are never "safe", and never a reject by themselves.
 */
static void test_truncation(void **state)
{
    (void)state;
    eval_opts o = opts(true, false);
    items(600);
    cut_below = 60;
    compare_result r = run(&o);
    assert_int_equal(r.v, VERDICT_CONFIRM);
    assert_int_equal(r.tasks[0].n, 540);
    assert_int_equal(r.tasks[0].truncated_cand, 60);
    assert_int_equal(r.tasks[0].truncated_base, 0);
    assert_int_equal(r.tasks[0].flips, 0);
    assert_true(says(&r, "cut 0 answers of the baseline and 60 of the candidate"));
    compare_free(&r);
    cut_below = 600;
    r = run(&o);
    assert_int_equal(r.v, VERDICT_CONFIRM);
    assert_int_equal(r.tasks[0].n, 0);
    compare_free(&r);
    cut_below = 3; /* three of 600 are no difference of rates: mentioned, and still safe */
    r = run(&o);
    assert_int_equal(r.v, VERDICT_SAFE);
    assert_true(says(&r, "3 of the candidate"));
    compare_free(&r);
}

static const char *guess(const char *prompt, bool is_cand)
{
    (void)prompt, (void)is_cand;
    return "no idea";
}
static double first_letter(const int32_t *prompt, int64_t pos, bool is_cand)
{
    (void)is_cand;
    return prompt[pos] == 260 ? -0.1 : -3; /* always " A" */
}

static void test_baseline_at_chance(void **state)
{
    (void)state;
    eval_opts o = opts(true, false);
    items(50);
    fake.answer = guess;
    compare_result r = run(&o);
    assert_int_equal(r.v, VERDICT_NOT_COMPARABLE);
    assert_true(says(&r, "solves none"));
    compare_free(&r);
    buf b = {0};
    for (int i = 0; i < 200; i++)
        buf_printf(
            &b,
            "{\"question\": \"q%d\", \"choices\": [\"a\", \"b\", \"c\", \"d\"], \"answer\": %d}\n",
            i, i % 4);
    put(task, b.data, b.len);
    buf_free(&b);
    fake.logprob = first_letter;
    r = run(&o);
    assert_int_equal(r.v, VERDICT_NOT_COMPARABLE);
    assert_true(says(&r, "not above chance"));
    compare_free(&r);
}

/* KL and both perplexities against sums made directly from the definition. */
static void test_kl(void **state)
{
    (void)state;
    ids t = {0};
    eval_opts o = opts(false, true);
    static double kls[512];
    double nll[2] = {0}, sum = 0, max = 0;
    int n = 0, same = 0;
    fake.eps = 0.35;
    fake.slow = true;
    tokenizer_encode(NULL, text, sizeof text - 1, false, &t, NULL);
    int64_t done = 0;
    for (int64_t b = 0; done < (int64_t)t.n; b += 16) {
        int64_t end = b + 24 < (int64_t)t.n ? b + 24 : (int64_t)t.n;
        for (int64_t i = done > b ? done : b + 1; i < end; i++) {
            double kl = 0;
            int top[2] = {0};
            for (int w = 0; w < FAKE_VOCAB; w++) {
                double lp = -fake_nll(false, t.v[i - 1], w), lq = -fake_nll(true, t.v[i - 1], w);
                kl += exp(lp) * (lp - lq);
                for (int k = 0; k < 2; k++)
                    if (fake_logit(k, t.v[i - 1], w) > fake_logit(k, t.v[i - 1], top[k]))
                        top[k] = w;
            }
            nll[0] += fake_nll(false, t.v[i - 1], t.v[i]);
            nll[1] += fake_nll(true, t.v[i - 1], t.v[i]);
            kls[n++] = kl;
            sum += kl;
            max = kl > max ? kl : max;
            same += top[0] == top[1];
        }
        done = end;
    }
    compare_result r = run(&o);
    assert_true(r.has_ppl);
    assert_int_equal(r.kl_tokens, n);
    assert_true(fabs(r.kl_mean - sum / n) < 1e-10);
    assert_true(fabs(r.kl_max - max) < 1e-10);
    assert_true(fabs(r.top1 - (double)same / n) < 1e-12);
    assert_true(same < n && same > 0);
    assert_true(fabs(r.ppl_base.nll - nll[0] / n) < 1e-10);
    assert_true(fabs(r.ppl_cand.nll - nll[1] / n) < 1e-10);
    assert_true(r.kl_p50 <= r.kl_p90 && r.kl_p90 <= r.kl_p99 && r.kl_p99 <= r.kl_max);
    int below = 0;
    for (int i = 0; i < n; i++)
        below += kls[i] <= r.kl_p90;
    assert_true(abs(below - (int)(0.9 * n)) <= 1);
    assert_int_equal(r.v, VERDICT_CONFIRM); /* no task: a text alone proves no answer */
    compare_free(&r);
    err e = {0}; /* the same perplexity as tare eval measures */
    engine *en;
    eval_ppl p;
    CHECK_OK(engine_open(&en, &base, &e));
    CHECK_OK(eval_perplexity(en, text_file, &o, &p, &e));
    assert_true(fabs(p.nll - nll[0] / n) < 1e-6);
    engine_close(en, 0);
    fake.eps = 0; /* against itself: exactly nothing */
    r = run(&o);
    assert_true(r.kl_mean == 0 && r.kl_max == 0 && r.top1 == 1);
    compare_free(&r);
    ids_free(&t);
}

static void test_broken_candidate(void **state)
{
    (void)state;
    err e = {0};
    compare_result r;
    eval_opts o = opts(false, true);
    fake.nan_logits = true;
    r = run(&o);
    assert_int_equal(r.v, VERDICT_REJECT);
    assert_true(says(&r, "not numbers"));
    compare_free(&r);
    fake.nan_logits = false;
    fake.fail_at = fake.requests + 4; /* one engine gives up in the second window: no hang */
    CHECK_ERR(compare_run(&base, &cand, &o, &r, &e), ERR_FAIL, "scripted");
    fake.fail_at = 0;
    cand.model = "broken";
    CHECK_ERR(compare_run(&base, &cand, &o, &r, &e), ERR_NOTFOUND, "candidate");
    base.model = "broken";
    CHECK_ERR(compare_run(&base, &cand, &o, &r, &e), ERR_NOTFOUND, "baseline");
}

static void test_other_tokenizer(void **state)
{
    (void)state;
    eval_opts o = opts(true, true);
    items(20);
    fake.other_tokenizer = true;
    compare_result r = run(&o);
    assert_int_equal(r.v, VERDICT_NOT_COMPARABLE);
    assert_false(r.has_ppl);
    assert_true(says(&r, "tokenizers differ"));
    compare_free(&r);
}

/* The second comparison asks the baseline nothing; any change asks again. */
static void test_cache(void **state)
{
    (void)state;
    eval_opts o = opts(true, false);
    char config[128];
    snprintf(config, sizeof config, "%s/config.json", base_dir);
    items(30);
    o.cache_dir = cache;
    compare_result r = run(&o), again;
    assert_int_equal(fake.opens, 2);
    assert_false(r.base_cached);
    again = run(&o);
    assert_int_equal(fake.opens, 3); /* the candidate only */
    assert_true(again.base_cached);
    assert_int_equal(again.v, r.v);
    assert_true(again.tasks[0].baseline == r.tasks[0].baseline && again.tasks[0].n == 30);
    assert_true(again.speed_base_tpot_ms == r.speed_base_tpot_ms);
    assert_int_equal(again.base.weight_bytes, 1000);
    assert_string_equal(again.base.model, base_dir);
    compare_free(&again);
    compare_free(&r);
    items(31); /* the items */
    r = run(&o);
    assert_int_equal(fake.opens, 5);
    compare_free(&r);
    put(config, "{ }", 3); /* the model */
    r = run(&o);
    assert_int_equal(fake.opens, 7);
    compare_free(&r);
    o.max_tokens++; /* how it is asked */
    r = run(&o);
    assert_int_equal(fake.opens, 9);
    compare_free(&r);
    base.kv_cache_dtype = "int8"; /* how it runs */
    r = run(&o);
    assert_int_equal(fake.opens, 11);
    compare_free(&r);
    cand.kv_cache_dtype = "fp4"; /* the candidate's options are none of its business */
    r = run(&o);
    assert_int_equal(fake.opens, 12);
    compare_free(&r);
    char **names;
    size_t n;
    err e = {0};
    CHECK_OK(file_list(cache, &names, &n, &e));
    for (size_t i = 0; i < n; i++) { /* spoilt files are as good as none */
        char path[512];
        snprintf(path, sizeof path, "%s/%s", cache, names[i]);
        put(path, "{\"items\": [[1]]}", i % 2 ? 16 : 9);
    }
    file_list_free(names, n);
    r = run(&o);
    assert_int_equal(fake.opens, 14);
    assert_int_equal(r.tasks[0].n, 31);
    compare_free(&r);
}

static void test_default_tasks(void **state)
{
    (void)state;
    err e = {0};
    compare_result r;
    eval_opts o = opts(false, false);
    char path[160];
    CHECK_ERR(compare_run(&base, &cand, &o, &r, &e), ERR_USAGE, "--task");
    snprintf(path, sizeof path, "%s/eval", base_dir);
    CHECK_OK(file_mkdirs(path, &e));
    snprintf(path, sizeof path, "%s/eval/own.jsonl", base_dir);
    static const char own[] = "{\"question\": \"n=1\", \"answer\": \"1\"}\n";
    put(path, own, sizeof own - 1);
    r = run(&o);
    assert_int_equal(r.n_tasks, 1);
    assert_string_equal(r.tasks[0].name, "own");
    compare_free(&r);
    snprintf(path, sizeof path, "%s/eval", base_dir);
    CHECK_OK(file_remove_tree(path, &e));
}

static void test_report(void **state)
{
    (void)state;
    eval_opts o = opts(true, true);
    buf b = {0};
    jw w;
    json *j;
    err e = {0};
    items(40);
    wrong_below = 2;
    fake.eps = 0.1;
    fake.clipped = 17;
    o.items = true;
    compare_result r = run(&o);
    jw_init(&w, &b, 0);
    compare_json(&r, &w);
    CHECK_OK(json_parse(&j, b.data, b.len, "report", &e));
    static const char *const keys[] = {"verdict", "reasons", "tasks",  "perplexity",
                                       "kl",      "top1",    "memory", "speed"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        assert_non_null(json_get(j, keys[i]));
    const json *t = json_get(j, "tasks")->child;
    static const char *const task_keys[] = {"name",     "n",       "baseline", "candidate",
                                            "delta_pp", "ci95_pp", "p_value",  "flips"};
    for (size_t i = 0; i < sizeof task_keys / sizeof *task_keys; i++)
        assert_non_null(json_get(t, task_keys[i]));
    assert_string_equal(json_get(j, "verdict")->valuestring, "confirm");
    assert_int_equal(cJSON_GetArraySize(json_get(t, "ci95_pp")), 2);
    assert_int_equal(json_get(t, "flips")->valueint, 2);
    assert_int_equal(cJSON_GetArraySize(json_get(t, "items")), 40);
    assert_int_equal(json_get(j, "kv_clipped")->valueint, 17);
    assert_true(says(&r, "17 key or value entries"));
    json_drop(j);
    b.len = 0;
    compare_print(&r, &b);
    assert_non_null(strstr(b.data, "sums"));
    assert_non_null(strstr(b.data, "verdict: confirm"));
    assert_non_null(strstr(b.data, "top-1 agreement"));
    compare_free(&r);
    /* Without a text the three keys are there and null. */
    o.perplexity = NULL;
    r = run(&o);
    b.len = 0;
    jw_init(&w, &b, 0);
    compare_json(&r, &w);
    CHECK_OK(json_parse(&j, b.data, b.len, "report", &e));
    for (size_t i = 3; i < 6; i++)
        assert_true(cJSON_IsNull(cJSON_GetObjectItem(j, keys[i])));
    json_drop(j);
    compare_free(&r);
    buf_free(&b);
}

static int make_dir(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}
static int drop_dir(void **state)
{
    (void)state;
    return file_remove_tree(dir, NULL);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup(f, setup)
    const struct CMUnitTest tests[] = {
        T(test_verdicts), T(test_truncation),       T(test_baseline_at_chance),
        T(test_kl),       T(test_broken_candidate), T(test_other_tokenizer),
        T(test_cache),    T(test_default_tasks),    T(test_report),
    };
    return cmocka_run_group_tests(tests, make_dir, drop_dir);
}
