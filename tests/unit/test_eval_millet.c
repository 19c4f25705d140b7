/* The embedded model through eval and compare: the served path from task file to verdict.
 *
 * Reference: transformers (fp32 and bf16 alike) answers the same items right, and with a budget of
 * 120 tokens gets exactly items 43, 66, 72 and 84 of the first 100 word problems wrong: their
 * answers are longer than that. Here such answers must come back as truncated, not as wrong. */
#include "check.h"
#include "eval/eval.h"

#define DIR "models/millet-7m/eval/"
static const engine_opts model = {.model = "models/millet-7m"};

static eval_opts opts(int64_t limit)
{
    return (eval_opts){.limit = limit, .max_tokens = 512, .threshold = 0.5, .bos = "auto"};
}

static eval_task_result run(engine *en, const char *file, const eval_opts *o)
{
    err e = {0};
    eval_task_result r;
    CHECK_OK(eval_task_run(en, file, o, &r, &e));
    return r;
}

static void test_tasks(void **state)
{
    (void)state;
    err e = {0};
    engine *en;
    CHECK_OK(engine_open(&en, &model, &e));
    eval_opts o = opts(25);
    eval_task_result r = run(en, DIR "word_problems_zh.jsonl", &o);
    assert_int_equal(r.n_correct, 25);
    eval_task_free(&r);
    r = run(en, DIR "multiple_choice.jsonl", &o);
    assert_int_equal(r.n_correct, 25);
    assert_non_null(
        strstr(r.first_prompt, "<|im_start|>assistant\nA")); /* no space before the label */
    eval_task_free(&r);
    o.limit = 60; /* p(positive) follows the probability by which the labels were drawn */
    r = run(en, DIR "review_classification.jsonl", &o);
    int64_t spread = 0;
    for (int i = 0; i < 10; i++)
        spread += r.score_deciles[i];
    assert_int_equal(spread, 60);
    assert_true(r.score_deciles[0] > 5 && r.score_deciles[9] > 5);
    assert_true(r.accuracy > 0.7 && r.accuracy < 0.95);
    eval_task_free(&r);
    engine_close(en, 0);
}

static void test_truncated(void **state)
{
    (void)state;
    static const int cut[] = {43, 66, 72, 84};
    err e = {0};
    engine *en;
    FILE *in = fopen(DIR "word_problems.jsonl", "r"), *out;
    char line[4096], path[] = "/tmp/tare-first100-XXXXXX";
    int fd = mkstemp(path);
    assert_true(in && fd >= 0);
    out = fdopen(fd, "w");
    for (int i = 0; i < 100 && fgets(line, sizeof line, in); i++)
        fputs(line, out);
    fclose(in);
    fclose(out);
    CHECK_OK(engine_open(&en, &model, &e));
    eval_opts o = opts(0);
    o.max_tokens = 120;
    eval_task_result r = run(en, path, &o);
    remove(path);
    assert_int_equal(r.n_truncated, 4);
    assert_int_equal(r.n_correct, 96);
    for (int i = 0; i < 4; i++)
        assert_true(r.items[cut[i]].truncated);
    eval_task_free(&r);
    engine_close(en, 0);
}

static void test_compare(void **state)
{
    (void)state;
    static const char *const files[] = {DIR "word_problems_zh.jsonl"};
    err e = {0};
    compare_result r;
    eval_ppl p;
    engine *en;
    engine_opts fp8 = model;
    eval_opts o = opts(20);
    o.tasks = files;
    o.n_tasks = 1;
    o.perplexity = "models/texts/wizard_of_oz.txt";
    o.ppl_tokens = 400;
    o.window = 160;
    o.stride = 120;
    CHECK_OK(compare_run(&model, &model, &o, &r, &e)); /* against itself: exactly nothing */
    assert_true(r.kl_mean == 0 && r.kl_max == 0 && r.top1 == 1);
    assert_int_equal(r.kl_tokens, 399);
    assert_int_equal(r.tasks[0].flips, 0);
    assert_int_equal(r.v, VERDICT_CONFIRM); /* 20 items without a flip prove little */
    double nll = r.ppl_base.nll;
    compare_free(&r);
    fp8.kv_cache_dtype = "fp8_e4m3";
    CHECK_OK(compare_run(&model, &fp8, &o, &r, &e));
    assert_true(r.kl_mean > 1e-5 && r.kl_mean < 0.1);
    assert_true(r.top1 > 0.8 && r.top1 <= 1);
    assert_true(r.cand.kv_bytes_per_token * 2 == r.base.kv_bytes_per_token);
    compare_free(&r);
    CHECK_OK(engine_open(&en, &model, &e)); /* the two ways to perplexity agree */
    CHECK_OK(eval_perplexity(en, o.perplexity, &o, &p, &e));
    assert_true(fabs(p.nll - nll) < 1e-5);
    engine_close(en, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tasks),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_compare),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
