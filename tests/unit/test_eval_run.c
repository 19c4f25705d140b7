/* Task files, prompts, boundaries and perplexity against an engine that follows a script. */
#include "check.h"
#include "fake_scripted.h"
#include <unistd.h>
#include "base/file.h"
#include "eval/local.h"

static char dir[64] = "/tmp/tare-eval-XXXXXX";
static engine *en;
static const engine_opts model = {.model = "base"};

static int setup(void **state)
{
    (void)state;
    err e = {0};
    memset(&fake, 0, sizeof fake);
    fake.max_len = 4096;
    return engine_open(&en, &model, &e);
}
static int teardown(void **state)
{
    (void)state;
    engine_close(en, 0);
    return 0;
}

static const char *file(const char *name, const void *text, size_t n)
{
    static char path[2][160];
    static int turn;
    char *p = path[turn++ % 2];
    err e = {0};
    snprintf(p, sizeof path[0], "%s/%s", dir, name);
    CHECK_OK(file_write_atomic(p, text, n, &e));
    return p;
}
static const char *lines(const char *text)
{
    return file("task.jsonl", text, strlen(text));
}
static eval_opts opts(void)
{
    return (eval_opts){.max_tokens = 64, .threshold = 0.5, .bos = "auto", .choice_by = "letter"};
}

/* ---- hostile files: each message begins with file:line and says what is wrong ---- */

static void test_hostile_files(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int code;
        const char *says[2];
    } rows[] = {
        {"", ERR_FORMAT, {"task.jsonl", "empty"}},
        {"\n\n  \n", ERR_FORMAT, {"task.jsonl", "empty"}},
        {"{\"question\": \"a\", \"answer\": \"1\"}\n{\"question\": \"a\", \n",
         ERR_FORMAT,
         {"task.jsonl:2", "JSON"}},
        {"\n\n{\"question\": \"a\"\n", ERR_FORMAT, {"task.jsonl:3", "JSON"}},
        {"[1, 2]\n", ERR_FORMAT, {"task.jsonl:1", "object"}},
        {"{\"question\": \"\xff\", \"answer\": \"1\"}\n", ERR_FORMAT, {"task.jsonl:1", "UTF-8"}},
        {"{\"foo\": 1, \"bar\": 2}\n", ERR_FORMAT, {"task.jsonl:1", "foo, bar"}},
        {"{}\n", ERR_FORMAT, {"task.jsonl:1", "no task type"}},
        {"{\"question\": \"a\", \"answer\": \"1\"}\n{\"question\": \"b\"}\n",
         ERR_FORMAT,
         {"task.jsonl:2", "answer"}},
        {"{\"question\": \"a\", \"answer\": [1]}\n", ERR_FORMAT, {"task.jsonl:1", "answer"}},
        {"{\"question\": 7, \"answer\": \"1\"}\n", ERR_FORMAT, {"task.jsonl:1", "question"}},
        {"{\"question\": \"a\", \"choices\": [], \"answer\": 0}\n",
         ERR_FORMAT,
         {"task.jsonl:1", "choices"}},
        {"{\"question\": \"a\", \"choices\": [\"x\", \"\"], \"answer\": 0}\n",
         ERR_FORMAT,
         {"task.jsonl:1", "choices"}},
        {"{\"question\": \"a\", \"choices\": [\"x\", \"y\"], \"answer\": 2}\n",
         ERR_FORMAT,
         {"task.jsonl:1", "0 to 1"}},
        {"{\"question\": \"a\", \"choices\": [\"x\", \"y\"], \"answer\": -1}\n",
         ERR_FORMAT,
         {"task.jsonl:1", "answer"}},
        {"{\"question\": \"a\", \"choices\": [\"x\", \"y\"], \"answer\": \"C\"}\n",
         ERR_FORMAT,
         {"task.jsonl:1", "A to B"}},
        {"{\"question\": \"a\", \"choices\": [\"x\", \"y\"], \"answer\": 0.5}\n",
         ERR_FORMAT,
         {"task.jsonl:1", "answer"}},
        {"{\"text\": \"a\", \"label\": \"yes\"}\n{\"text\": \"a\", \"label\": \"no\"}\n{\"text\": "
         "\"a\", \"label\": \"x\"}\n",
         ERR_FORMAT,
         {"task.jsonl:3", "third label"}},
        {"{\"text\": \"a\", \"label\": \"u\"}\n{\"text\": \"a\", \"label\": \"v\"}\n",
         ERR_FORMAT,
         {"task.jsonl", "--labels"}},
        {"{\"text\": \"a\", \"label\": \"yes\"}\n", ERR_FORMAT, {"task.jsonl", "--labels"}},
        {"{\"text\": \"a\", \"label\": \"\"}\n", ERR_FORMAT, {"task.jsonl:1", "label"}},
        {"{\"prompt\": \"a\", \"entry_point\": \"f\"}\n", ERR_FORMAT, {"task.jsonl:1", "tests"}},
        {"{\"prompt\": \"a\", \"entry_point\": \"f; import os\", \"tests\": [[1, 2]]}\n",
         ERR_FORMAT,
         {"task.jsonl:1", "entry_point"}},
        {"{\"prompt\": \"a\", \"entry_point\": \"f\", \"tests\": [[1]]}\n",
         ERR_FORMAT,
         {"task.jsonl:1", "tests"}},
        {"{\"text\": \"a\", \"test_list\": \"x\"}\n", ERR_FORMAT, {"task.jsonl:1", "test_list"}},
    };
    eval_opts o = opts();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        err e = {0};
        eval_task_result r;
        int rc = eval_task_run(en, lines(rows[i].text), &o, &r, &e);
        if (rc != -rows[i].code || !strstr(e.msg, rows[i].says[0]) ||
            !strstr(e.msg, rows[i].says[1]))
            fail_msg("%s: %d: %s", rows[i].text, rc, e.msg);
    }
    err e = {0};
    eval_task_result r;
    CHECK_ERR(eval_task_run(en, "/nonexistent/x.jsonl", &o, &r, &e), ERR_NOTFOUND, "x.jsonl");
    CHECK_ERR(eval_task_run(en, dir, &o, &r, &e), ERR_FORMAT, "folder");
    o.task_type = "essay";
    CHECK_ERR(eval_task_run(en, lines("{\"a\":1}"), &o, &r, &e), ERR_USAGE, "essay");
    o.task_type = "choice";
    CHECK_ERR(eval_task_run(en, lines("{\"question\":\"a\",\"answer\":\"b\"}"), &o, &r, &e),
              ERR_FORMAT, "choices");
}

static void test_long_line(void **state)
{
    (void)state;
    err e = {0};
    eval_opts o = opts();
    eval_task_result r;
    buf b = {0};
    buf_puts(&b, "{\"question\": \"short\", \"answer\": \"1\"}\n{\"question\": \"");
    for (int i = 0; i < 2 << 20; i++)
        buf_putc(&b, 'x');
    buf_puts(&b, "\", \"answer\": \"1\"}\n");
    const char *path = file("long.jsonl", b.data, b.len);
    CHECK_ERR(eval_task_run(en, path, &o, &r, &e), ERR_TOOLONG, "long.jsonl:2");
    buf_free(&b);
}

/* ---- the registry: each row is the first to know its example, takes it, and refuses an empty item
 * ---- */

static void test_registry(void **state)
{
    (void)state;
    static const struct {
        const char *name, *item;
    } examples[] = {
        {"generate", "{\"question\": \"q\", \"answer\": \"1\"}"},
        {"choice", "{\"question\": \"q\", \"choices\": [\"a\", \"b\"], \"answer\": 1}"},
        {"code", "{\"prompt\": \"p\", \"entry_point\": \"f\", \"tests\": [[1, 2]]}"},
        {"code", "{\"prompt\": \"p\", \"entry_point\": \"f\", \"test\": \"def check(f): pass\"}"},
        {"code", "{\"text\": \"p\", \"test_list\": [\"assert True\"]}"},
        {"classify", "{\"text\": \"t\", \"label\": \"yes\", \"p_positive\": 0.5}"},
    };
    err e = {0};
    task_run r = {0};
    json *none;
    CHECK_OK(json_parse(&none, "{}", 2, "none", &e));
    for (int i = 0; i < eval__n_tasks; i++) {
        const task_type *t = eval__tasks[i];
        int seen = 0;
        assert_true(*t->name && *t->fields && t->ask && t->grade);
        assert_false(t->detect(none));
        CHECK_ERR(t->check(&r, none, "x.jsonl:7", &e), ERR_FORMAT, "x.jsonl:7");
        for (size_t k = 0; k < sizeof examples / sizeof *examples; k++) {
            json *j;
            int first = 0;
            CHECK_OK(json_parse(&j, examples[k].item, strlen(examples[k].item), "example", &e));
            while (first < eval__n_tasks && !eval__tasks[first]->detect(j))
                first++;
            if (!strcmp(examples[k].name, t->name)) {
                assert_int_equal(first, i);
                CHECK_OK(t->check(&r, j, "x.jsonl:1", &e));
                seen++;
            }
            json_drop(j);
        }
        if (!seen) fail_msg("no example of task type %s", t->name);
    }
    json_drop(none);
}

/* ---- generate ---- */

static const char *sums(const char *prompt, bool cand)
{
    static const struct {
        const char *q, *a;
    } known[] = {{"two", "1 + 1 = 2.\n#### 2"},
                 {"cash", "$29.00."},
                 {"lost", "I do not know"},
                 {"wrong", "#### 8"},
                 {"long", "so we add and add and add and add and add 7 and add again"}};
    (void)cand;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strstr(prompt, known[i].q)) return known[i].a;
    return "#### 0";
}

static void test_generate(void **state)
{
    (void)state;
    err e = {0};
    eval_opts o = opts();
    eval_task_result r;
    o.max_tokens = 30;
    fake.answer = sums;
    const char *f = lines("\xEF\xBB\xBF{\"question\": \"two\", \"answer\": \"#### 2\"}\r\n"
                          "{\"question\": \"cash\", \"answer\": 29}\n\n"
                          "{\"question\": \"lost\", \"answer\": \"5\"}\n"
                          "{\"question\": \"wrong\", \"answer\": \"9\"}\n"
                          "{\"question\": \"long\", \"answer\": \"7\"}");
    CHECK_OK(eval_task_run(en, f, &o, &r, &e));
    assert_string_equal(r.type, "generate");
    assert_string_equal(r.name, "task");
    assert_int_equal(r.n, 5);
    assert_int_equal(r.n_correct, 2);
    assert_int_equal(r.n_unparsed, 1);
    assert_int_equal(r.n_truncated, 1);
    assert_true(r.items[2].unparsed && !r.items[2].correct);
    assert_true(r.items[4].truncated && !r.items[4].correct && !r.items[4].unparsed);
    assert_string_equal(r.items[4].answer,
                        ""); /* a 7 stands in the cut text; it is not looked at */
    assert_string_equal(r.items[1].answer, "29");
    assert_string_equal(r.first_prompt, "Question: two\nAnswer:");
    eval_task_free(&r);
    fake.chat = true;
    CHECK_OK(eval_task_run(en, f, &o, &r, &e));
    assert_string_equal(r.first_prompt, "<s>U:two\nA:\n");
    assert_int_equal(r.n_correct, 2);
    eval_task_free(&r);
}

/* Results do not depend on the order in which requests land; --limit is an even spread. */
static const char *echo(const char *prompt, bool cand)
{
    const char *at = strstr(prompt, "n=");
    (void)cand;
    return at ? at + 2 : "";
}
static void test_many_in_any_order(void **state)
{
    (void)state;
    err e = {0};
    eval_opts o = opts();
    eval_task_result r;
    buf b = {0};
    fake.answer = echo;
    fake.slow = true;
    for (int i = 0; i < 300; i++)
        buf_printf(&b, "{\"question\": \"n=%d.\", \"answer\": \"%d\"}\n", i, i % 3 ? i : i + 1);
    const char *f = file("many.jsonl", b.data, b.len);
    CHECK_OK(eval_task_run(en, f, &o, &r, &e));
    assert_int_equal(r.n, 300);
    for (int i = 0; i < 300; i++)
        assert_true(r.items[i].correct == (i % 3 != 0) && atoi(r.items[i].answer) == i);
    eval_task_free(&r);
    o.limit = 7;
    CHECK_OK(eval_task_run(en, f, &o, &r, &e));
    assert_int_equal(r.n, 7);
    for (int i = 0; i < 7; i++)
        assert_int_equal(atoi(r.items[i].answer), i * 300 / 7);
    eval_task_free(&r);
    o.limit = 1000;
    CHECK_OK(eval_task_run(en, f, &o, &r, &e));
    assert_int_equal(r.n, 300);
    eval_task_free(&r);
    fake.fail_at =
        fake.requests + 20; /* a failure in the middle ends the run, with file and line */
    CHECK_ERR(eval_task_run(en, f, &o, &r, &e), ERR_FAIL, "many.jsonl:20");
    buf_free(&b);
}

/* ---- choice and classify ---- */

/* The last token of the prompt is likelier the closer it is to the one that fake_right names. */
static char fake_right = 'C';
static double letter_logprob(const int32_t *prompt, int64_t pos, bool cand)
{
    (void)cand;
    int32_t t = prompt[pos];
    char c = t >= 260 && t <= 262 ? (char)('A' + t - 260) : t < 256 ? (char)t : 0;
    return c == fake_right ? -0.25 : -2.5;
}

static void test_choice(void **state)
{
    (void)state;
    err e = {0};
    eval_opts o = opts();
    eval_task_result r;
    fake.logprob = letter_logprob;
    /* options already in the question: not shown twice; MMLU's letter answers; a missing list added
     */
    const char *inside =
        "{\"question\": \"What is 2 * 4?\\nA. 7\\nB. 6\\nC. 8\\nAnswer with the letter.\", "
        "\"choices\": [\"7\", \"6\", \"8\"], \"answer\": 2}\n";
    CHECK_OK(eval_task_run(en, lines(inside), &o, &r, &e));
    assert_string_equal(r.first_prompt,
                        "What is 2 * 4?\nA. 7\nB. 6\nC. 8\nAnswer with the letter.\nAnswer: A");
    assert_string_equal(r.items[0].answer, "C");
    assert_true(r.items[0].correct);
    assert_true(fabs(r.items[0].score - 2.25) < 1e-6); /* margin over the runner-up */
    assert_true(fabs(r.chance - 1.0 / 3) < 1e-12);
    eval_task_free(&r);
    CHECK_OK(eval_task_run(
        en,
        lines("{\"subject\": \"s\", \"question\": \"Which?\", \"choices\": [\"p\", \"q\", "
              "\"r\", \"s\"], \"answer\": \"B\"}\n"),
        &o, &r, &e));
    assert_string_equal(r.first_prompt, "Which?\nA. p\nB. q\nC. r\nD. s\nAnswer: A");
    assert_false(r.items[0].correct);
    eval_task_free(&r);
    /* under a template that ends in a newline the label opens the turn, without a space */
    fake.chat = true;
    CHECK_OK(eval_task_run(en, lines(inside), &o, &r, &e));
    assert_string_equal(r.first_prompt,
                        "<s>U:What is 2 * 4?\nA. 7\nB. 6\nC. 8\nAnswer with the letter.\nA:\nA");
    assert_true(r.items[0].correct);
    eval_task_free(&r);
    fake_right = 0; /* all alike: the first of equals wins */
    CHECK_OK(eval_task_run(en, lines(inside), &o, &r, &e));
    assert_string_equal(r.items[0].answer, "A");
    eval_task_free(&r);
    fake_right = 'C';
}

/* One pass over the context scores all letters: the same numbers as a pair each, one request. */
static void test_single_pass(void **state)
{
    (void)state;
    err e = {0};
    eval_opts o = opts();
    asker a;
    context c;
    air sky;
    task_item one = {0}, many = {0};
    static const char *const letters[] = {" A", " B", " C"}, *const words[] = {" A", " Bx", " yes"};
    CHECK_OK(eval__asker_init(&a, en, &o, &e));
    CHECK_OK(eval__context(&a, "", "Which? Q:", &c, &e));
    CHECK_OK(eval__options(&a, &c, letters, 3, "f:1", &one, &e));
    CHECK_OK(eval__options(&a, &c, words, 3, "f:1", &many, &e));
    assert_int_equal(one.n_shots, 1);
    assert_int_equal(many.n_shots, 3);
    eval__air_init(&sky, en);
    assert_int_equal(eval__air_submit(&sky, &one.shots[0], &e), 1);
    for (int k = 0; k < 3; k++)
        assert_int_equal(eval__air_submit(&sky, &many.shots[k], &e), 1);
    for (int k = 0; k < 4; k++)
        assert_int_equal(eval__air_wait(&sky)->error.code, 0);
    for (int k = 0; k < 3; k++)
        assert_true(fabs(eval__option_logprob(&one, k) + fake_nll(false, ':', 260 + k)) < 1e-9);
    assert_true(fabs(eval__option_logprob(&many, 0) + fake_nll(false, ':', 260)) < 1e-6);
    double yes = fake_nll(false, ':', ' ') + fake_nll(false, ' ', 'y') + fake_nll(false, 'y', 'e') +
                 fake_nll(false, 'e', 's');
    assert_true(fabs(eval__option_logprob(&many, 2) + yes) < 1e-5);
    eval__air_free(&sky);
    eval__shot_free(&one.shots[0]);
    for (int k = 0; k < 3; k++)
        eval__shot_free(&many.shots[k]);
    free(one.shots);
    free(many.shots);
    eval__context_free(&c);
}

static double flat_logprob(const int32_t *prompt, int64_t pos, bool cand)
{
    (void)prompt, (void)pos, (void)cand;
    return -1;
}
static double nan_logprob(const int32_t *prompt, int64_t pos, bool cand)
{
    (void)prompt, (void)pos, (void)cand;
    return NAN;
}

/* Per byte: " " + choice has one token a byte at -1 each, so the longest choice has (n+1)/n least.
 */
static void test_choice_by_text(void **state)
{
    (void)state;
    err e = {0};
    eval_opts o = opts();
    eval_task_result r;
    o.choice_by = "text";
    fake.logprob = flat_logprob;
    const char *f =
        "{\"question\": \"q\", \"choices\": [\"no\", \"maybe so\", \"yes\"], \"answer\": 1}\n";
    CHECK_OK(eval_task_run(en, lines(f), &o, &r, &e));
    assert_true(r.items[0].correct);
    assert_true(fabs(r.items[0].score - (4.0 / 3 - 9.0 / 8)) < 1e-6);
    assert_string_equal(r.first_prompt, "Question: q\nAnswer: no");
    eval_task_free(&r);
    fake.logprob = nan_logprob; /* a broken model chooses nothing */
    CHECK_OK(eval_task_run(en, lines(f), &o, &r, &e));
    assert_true(r.items[0].unparsed && !r.items[0].correct);
    eval_task_free(&r);
    o.choice_by = "vibes";
    CHECK_ERR(eval_task_run(en, lines(f), &o, &r, &e), ERR_USAGE, "vibes");
}

static double tone_logprob(const int32_t *prompt, int64_t pos, bool cand)
{
    double good = 0;
    (void)cand;
    for (int64_t i = 0; i < pos; i++)
        good += prompt[i] == '+' ? 0.5 : prompt[i] == '-' ? -0.5 : 0;
    return prompt[pos] == 'p' ? -1 + good : prompt[pos] == 'n' ? -1 - good : -0.125;
}
static void test_classify(void **state)
{
    (void)state;
    err e = {0};
    eval_opts o = opts();
    eval_task_result r;
    fake.logprob = tone_logprob;
    const char *f =
        "{\"text\": \"--\", \"label\": \"neg\"}\n{\"text\": \"++\", \"label\": \"pos\"}\n"
        "{\"text\": \"+\", \"label\": \"neg\"}\n";
    CHECK_OK(eval_task_run(en, lines(f), &o, &r, &e));
    /* lengths of "pos" and "neg" are equal, so p = sigmoid(2 * good) */
    assert_true(fabs(r.items[0].score - 1 / (1 + exp(2.0))) < 1e-6);
    assert_true(fabs(r.items[1].score - 1 / (1 + exp(-2.0))) < 1e-6);
    assert_int_equal(r.n_correct, 2);
    assert_string_equal(r.items[2].answer, "pos");
    assert_true(fabs(r.chance - 2.0 / 3) < 1e-12);
    assert_int_equal(r.score_deciles[1], 1);
    assert_int_equal(r.score_deciles[8], 1);
    assert_int_equal(r.score_deciles[7], 1);
    eval_task_free(&r);
    o.threshold = 0.8;
    CHECK_OK(eval_task_run(en, lines(f), &o, &r, &e));
    assert_int_equal(r.n_correct, 3);
    eval_task_free(&r);
    o.labels = "neg,pos";
    o.threshold = 0.5;
    CHECK_OK(eval_task_run(en, lines(f), &o, &r, &e));
    assert_true(r.items[0].score > 0.5);
    assert_int_equal(r.n_correct, 2);
    eval_task_free(&r);
    o.labels = NULL;
    o.limit = 1; /* both labels are known though one item is asked */
    CHECK_OK(eval_task_run(en, lines(f), &o, &r, &e));
    assert_int_equal(r.n, 1);
    assert_string_equal(r.items[0].answer, "neg");
    eval_task_free(&r);
    o.labels = "pos";
    CHECK_ERR(eval_task_run(en, lines(f), &o, &r, &e), ERR_USAGE, "--labels");
}

/* ---- code ---- */

static const char *coder(const char *prompt, bool cand)
{
    (void)cand;
    if (strstr(prompt, "double")) return "def double(x):\n    return 2 * x";
    if (strstr(prompt, "cheat")) return "def cheat(x):\n    import os; os._exit(0)";
    if (strstr(prompt, "human")) return "```python\ndef human(x):\n    return List\n```";
    if (strstr(prompt, "body")) return "    return x + 1\n";
    if (strstr(prompt, "list")) return "Here:\n```\ndef f(x):\n    return x\n```";
    return "no idea";
}
static void test_code(void **state)
{
    (void)state;
    err e = {0};
    eval_opts o = opts();
    eval_task_result r;
    fake.answer = coder;
    fake.chat = true;
    int rc = eval_task_run(
        en,
        lines(
            "{\"prompt\": \"Write double(x)\", \"entry_point\": \"double\", \"tests\": [[2, 4], "
            "[\"ab\", \"abab\"]]}\n"
            "{\"prompt\": \"Write double(x)\", \"entry_point\": \"double\", \"tests\": [[2, 5]]}\n"
            "{\"prompt\": \"Write cheat(x)\", \"entry_point\": \"cheat\", \"tests\": [[2, 4]]}\n"
            "{\"prompt\": \"from typing import List\\n\\ndef human(x):\\n    pass\\n\", "
            "\"entry_point\": \"human\", "
            "\"test\": \"def check(f):\\n    assert f(1) is List\\n\"}\n"
            "{\"prompt\": \"def body(x):\\n\", \"entry_point\": \"body\", \"test\": \"def "
            "check(f):\\n    assert f(1) "
            "== 2\\n\"}\n"
            "{\"text\": \"list things\", \"test_list\": [\"assert f(3) == 3\"], "
            "\"test_setup_code\": \"\"}\n"
            "{\"text\": \"other things\", \"test_list\": [\"assert f(3) == 3\"]}\n"),
        &o, &r, &e);
    if (rc == -ERR_NOTCOMPARABLE) skip(); /* no python3 here: the message says so */
    CHECK_OK(rc);
    static const bool want[] = {true, false, false, true, true, true, false};
    for (int i = 0; i < 7; i++)
        if (r.items[i].correct != want[i]) fail_msg("item %d: %s", i, r.items[i].answer);
    assert_non_null(strstr(r.items[1].answer, "wrong result 4"));
    assert_non_null(strstr(r.note, "network blocked"));
    eval_task_free(&r);
}

static void test_no_python(void **state)
{
    (void)state;
    err e = {0};
    eval_opts o = opts();
    eval_task_result r;
    char *path = xstrdup(getenv("PATH") ? getenv("PATH") : "");
    setenv("PATH", dir, 1);
    int rc = eval_task_run(
        en, lines("{\"prompt\": \"a\", \"entry_point\": \"f\", \"tests\": [[1, 2]]}\n"), &o, &r,
        &e);
    setenv("PATH", path, 1);
    free(path);
    assert_int_equal(rc, -ERR_NOTCOMPARABLE);
    assert_non_null(strstr(e.msg, "python3"));
}

/* ---- where context ends ---- */

static void pair(const char *ctx, const char *cont, const int32_t *want, size_t n,
                 int64_t n_context)
{
    err e = {0};
    asker a;
    context c;
    shot s = {0};
    eval_opts o = opts();
    CHECK_OK(eval__asker_init(&a, en, &o, &e));
    CHECK_OK(eval__context(&a, ctx, ctx, &c, &e));
    CHECK_OK(eval__pair(&a, &c, cont, "f:1", &s, &e));
    if (s.prompt.n != n || memcmp(s.prompt.v, want, n * sizeof *want) || s.n_context != n_context) {
        for (size_t i = 0; i < s.prompt.n; i++)
            print_message("%d ", s.prompt.v[i]);
        fail_msg("'%s' + '%s': %zu tokens, context %lld", ctx, cont, s.prompt.n,
                 (long long)s.n_context);
    }
    assert_true(s.score && s.n_context >= 1 && s.n_context < (int64_t)s.prompt.n);
    eval__shot_free(&s);
    eval__context_free(&c);
}

static void test_boundary(void **state)
{
    (void)state;
    enum { ANSWER = 258, COLON_C, SP_A, SP_B, SP_C, MARK, WER };
#define IDS(...) (const int32_t[]){__VA_ARGS__}, sizeof((const int32_t[]){__VA_ARGS__}) / 4
    pair("Q:", " A", IDS('Q', ':', SP_A), 2);       /* clean */
    pair("Ans", "wer", IDS('A', 'n', 's', WER), 3); /* "Answer" would leave nothing */
    pair("x: ", "C", IDS('x', ':', SP_C), 2);       /* ": C" spans it: the space goes along */
#undef IDS
}

static void test_truncated_context(void **state)
{
    (void)state;
    err e = {0};
    asker a;
    context c;
    shot s = {0};
    eval_opts o = opts();
    fake.max_len = 8;
    CHECK_OK(eval__asker_init(&a, en, &o, &e));
    CHECK_OK(
        eval__context(&a, "", "abcdefgh", &c, &e)); /* one token too long with the continuation */
    CHECK_OK(eval__pair(&a, &c, " A", "f:1", &s, &e));
    assert_int_equal(s.prompt.n, 8);
    assert_int_equal(s.prompt.v[0], 'b');
    assert_int_equal(s.n_context, 7);
    assert_int_equal(s.prompt.v[7], 260);
    eval__shot_free(&s);
    s = (shot){0};
    CHECK_ERR(eval__pair(&a, &c, "12345678", "f:9", &s, &e), ERR_TOOLONG, "f:9");
    eval__shot_free(&s);
    s = (shot){0};
    CHECK_ERR(eval__pair(&a, &c, "", "f:9", &s, &e), ERR_FORMAT, "no tokens");
    eval__shot_free(&s);
    eval__context_free(&c);
    CHECK_OK(eval__context(&a, "", "", &c, &e)); /* empty context: BOS stands for it */
    s = (shot){0};
    CHECK_OK(eval__pair(&a, &c, "A", "f:1", &s, &e));
    assert_int_equal(s.prompt.v[0], FAKE_BOS);
    assert_int_equal(s.n_context, 1);
    eval__shot_free(&s);
    fake.no_bos = true; /* or EOS where there is no BOS */
    s = (shot){0};
    CHECK_OK(eval__pair(&a, &c, "A", "f:1", &s, &e));
    assert_int_equal(s.prompt.v[0], FAKE_EOS);
    eval__shot_free(&s);
    eval__context_free(&c);
    o.bos = "yes";
    CHECK_ERR(eval__asker_init(&a, en, &o, &e), ERR_VALUE, "--bos");
    o.bos = "maybe";
    CHECK_ERR(eval__asker_init(&a, en, &o, &e), ERR_USAGE, "maybe");
}

/* ---- perplexity ---- */

/* The definition, directly: windows of `cap` tokens each `stride`, BOS before each if asked. */
static double direct(const char *text, int64_t window, int64_t stride, bool bos, int64_t *n_out)
{
    ids t = {0};
    double sum = 0;
    int64_t n = 0, done = 0;
    tokenizer_encode(NULL, text, strlen(text), false, &t, NULL);
    int64_t len = (int64_t)t.n, cap = window - (bos ? 1 : 0);
    if (stride > cap) stride = cap;
    for (int64_t b = 0; done < len; b += stride) {
        int64_t end = b + cap < len ? b + cap : len;
        for (int64_t i = done; i < end; i++) {
            if (i == b && !bos) continue;
            sum += fake_nll(false, i == b ? FAKE_BOS : t.v[i - 1], t.v[i]);
            n++;
        }
        done = end;
    }
    ids_free(&t);
    *n_out = n;
    return sum / (double)n;
}

static void test_perplexity(void **state)
{
    (void)state;
    err e = {0};
    eval_opts o = opts();
    eval_ppl p;
    static const char text[] =
        "It was a bright cold day. The Answer: C was A or B, and the clocks were striking "
        "thirteen; nobody knew why, #### 13 or so.";
    const char *f = file("text.txt", text, sizeof text - 1);
    static const struct {
        int64_t window, stride;
    } rows[] = {{2048, 2048}, {16, 16}, {16, 8}, {16, 1}, {7, 7}, {16, 100}, {2, 2}, {3, 2}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int bos = 0; bos < 2; bos++) {
            if (bos && rows[i].window < 3) continue;
            int64_t n;
            o.window = rows[i].window;
            o.stride = rows[i].stride;
            o.bos = bos ? "yes" : "no";
            double want = direct(text, o.window, o.stride, bos, &n);
            CHECK_OK(eval_perplexity(en, f, &o, &p, &e));
            if (fabs(p.nll - want) > 1e-6 || p.n_tokens != n)
                fail_msg("window %lld stride %lld bos %d: %.9f over %lld, wanted %.9f over %lld",
                         (long long)o.window, (long long)o.stride, bos, p.nll,
                         (long long)p.n_tokens, want, (long long)n);
            assert_true(fabs(p.perplexity - exp(p.nll)) < 1e-9);
            assert_true(p.bos == bos && p.first_ids[0] == (bos ? FAKE_BOS : 'I'));
        }
    o.bos = "auto"; /* what the tokenizer does; one BOS in every window */
    fake.adds_bos = true;
    o.window = o.stride = 40;
    CHECK_OK(eval_perplexity(en, f, &o, &p, &e));
    int64_t n;
    assert_true(p.bos && fabs(p.nll - direct(text, 40, 40, true, &n)) < 1e-6);
    assert_int_equal(p.n_windows, 3);
    assert_int_equal(p.first_ids[0], FAKE_BOS);
    assert_true(p.first_ids[1] == 'I'); /* not a second BOS */
    o.ppl_tokens = 10;
    CHECK_OK(eval_perplexity(en, f, &o, &p, &e));
    assert_int_equal(p.n_tokens, 10);
    o.ppl_tokens = 0;
    fake.max_len = 16; /* the window shrinks to what the model takes */
    CHECK_OK(eval_perplexity(en, f, &o, &p, &e));
    assert_int_equal(p.window, 16);
}

static void test_perplexity_hostile(void **state)
{
    (void)state;
    err e = {0};
    eval_opts o = opts();
    eval_ppl p;
    CHECK_ERR(eval_perplexity(en,
                              file("bad.txt",
                                   "ab\xff"
                                   "cd",
                                   5),
                              &o, &p, &e),
              ERR_FORMAT, "byte 2");
    CHECK_ERR(eval_perplexity(en, file("a.gz", "\x1f\x8b\x08\x00", 4), &o, &p, &e), ERR_FORMAT,
              "gzip");
    CHECK_ERR(eval_perplexity(en, file("empty.txt", "", 0), &o, &p, &e), ERR_FORMAT,
              "nothing to score");
    CHECK_ERR(eval_perplexity(en, file("one.txt", "a", 1), &o, &p, &e), ERR_FORMAT,
              "nothing to score");
    CHECK_ERR(eval_perplexity(en, "/nonexistent.txt", &o, &p, &e), ERR_NOTFOUND, "nonexistent");
    o.window = 1;
    CHECK_ERR(eval_perplexity(en, file("t.txt", "abc", 3), &o, &p, &e), ERR_VALUE, "--window");
    o.window = 2;
    fake.fail_at = fake.requests + 1;
    CHECK_ERR(eval_perplexity(en, file("t.txt", "abcdef", 6), &o, &p, &e), ERR_FAIL, "scripted");
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
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_hostile_files),      T(test_long_line),
        T(test_registry),           T(test_generate),
        T(test_many_in_any_order),  T(test_choice),
        T(test_single_pass),        T(test_choice_by_text),
        T(test_classify),           T(test_code),
        T(test_no_python),          T(test_boundary),
        T(test_truncated_context),  T(test_perplexity),
        T(test_perplexity_hostile),
    };
    return cmocka_run_group_tests(tests, make_dir, drop_dir);
}
