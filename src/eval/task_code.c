/* code: the model writes a Python program, which is then run with its tests.
 *
 *   prompt, entry_point, tests      [[argument, expected], …]: entry_point(argument) == expected
 *   prompt, entry_point, test       HumanEval: prompt is the beginning of the program, test defines
 *                                   check(candidate)
 *   text, test_list                 MBPP: a list of assertions, test_setup_code before them
 *
 * Of an answer the first fenced block counts, else all of it. A HumanEval answer that defines the
 * function itself is put after the prompt's imports, one that only continues it after the prompt.
 */
#include "eval/local.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "eval/grade.h"
#include "eval/sandbox.h"

#define RUN_SECONDS 10

static bool detect(const json *item)
{
    return (eval__has(item, "prompt") && eval__has(item, "entry_point")) ||
           (eval__has(item, "text") && eval__has(item, "test_list"));
}

static int check(const task_run *r, const json *item, const char *where, err *e)
{
    const char *s;
    int rc = 0;
    (void)r;
    if (eval__has(item, "test_list")) {
        TRY(eval__need_str(item, "text", &s, where, e));
        const json *list = json_get(item, "test_list");
        bool ok = cJSON_IsArray(list) && list->child;
        for (const json *t = ok ? list->child : NULL; t; t = t->next)
            ok = ok && cJSON_IsString(t);
        return ok ? 0
                  : err_set(e, ERR_FORMAT, "%s: field \"test_list\" must be a list of strings",
                            where);
    }
    TRY(eval__need_str(item, "prompt", &s, where, e));
    TRY(eval__need_str(item, "entry_point", &s, where, e));
    for (const char *p = s; *p; p++)
        if (!strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_", *p))
            return err_set(e, ERR_FORMAT, "%s: field \"entry_point\" is not a Python name", where);
    if (eval__has(item, "test")) return eval__need_str(item, "test", &s, where, e);
    const json *tests = json_get(item, "tests");
    bool ok = cJSON_IsArray(tests) && tests->child;
    for (const json *t = ok ? tests->child : NULL; t; t = t->next)
        ok = ok && cJSON_IsArray(t) && cJSON_GetArraySize(t) == 2;
    if (!ok)
        return err_set(e, ERR_FORMAT,
                       "%s: field \"tests\" must be a list of [argument, expected], or \"test\" a "
                       "program that defines check()",
                       where);
out:
    return rc;
}

static int begin(task_run *r, err *e)
{
    int rc = sandbox_open(&r->box, RUN_SECONDS, e);
    if (rc == 0) snprintf(r->note, sizeof r->note, "python3 with %s", sandbox_limits(r->box));
    return rc;
}

static void messages(const json *item, buf *user, buf *plain)
{
    const json *list = json_get(item, "test_list");
    if (list) {
        buf_printf(user,
                   "You are an expert Python programmer, and here is your task: %s Your code "
                   "should pass these tests:\n\n",
                   json_get(item, "text")->valuestring);
        for (const json *t = list->child; t; t = t->next)
            buf_printf(user, "%s\n", t->valuestring);
        buf_printf(plain, "%s[BEGIN]\n", user->data);
        return;
    }
    const char *prompt = json_get(item, "prompt")->valuestring;
    if (eval__has(item, "test"))
        buf_printf(user,
                   "Write a solution to the following problem and make sure that it passes the "
                   "tests:\n```python\n%s\n```\n",
                   prompt);
    else
        buf_puts(user, prompt);
    buf_printf(plain, eval__has(item, "test") ? "%s" : "%s\n", prompt);
}

static int ask(task_run *r, task_item *it, const char *where, err *e)
{
    static const char *const turn[] = {"\nQuestion:"};
    static const char *const body[] = {"\nclass ", "\ndef ", "\n#", "\nif ", "\nprint("};
    static const char *const mbpp[] = {"[DONE]"};
    context c = {0};
    buf user = {0}, plain = {0};
    int rc;
    (void)where;
    messages(it->j, &user, &plain);
    TRY(eval__context(&r->ask, user.data, plain.data, &c, e));
    shot *s = eval__item_shots(it, 1);
    bool list = eval__has(it->j, "test_list"), human = eval__has(it->j, "test");
    s->stops = list ? mbpp : human && !r->ask.chat ? body : turn;
    s->n_stops = human && !r->ask.chat && !list ? (int)(sizeof body / sizeof *body) : 1;
    s->max_tokens = r->o->max_tokens;
    TRY(eval__context_ids(&r->ask, &c, &s->prompt, e));
    rc = 0;
out:
    eval__context_free(&c);
    buf_free(&user);
    buf_free(&plain);
    return rc;
}

/* HumanEval: the program that answer and prompt make together. */
static void join_prompt(const json *item, const char *code, buf *out)
{
    const char *prompt = json_get(item, "prompt")->valuestring;
    char def[160];
    snprintf(def, sizeof def, "def %.100s(", json_get(item, "entry_point")->valuestring);
    const char *at = strstr(prompt, def);
    if (strstr(code, def)) {
        buf_add(out, prompt, at ? (size_t)(at - prompt) : 0);
        buf_puts(out, "\n");
    } else {
        buf_puts(out, prompt);
    }
    buf_puts(out, code);
}

static void program(const json *item, const char *code, buf *out)
{
    if (eval__has(item, "test_list")) {
        const json *setup = json_get(item, "test_setup_code"); /* may use what the answer defines */
        buf_printf(out, "%s\n", code);
        if (cJSON_IsString(setup)) buf_printf(out, "%s\n", setup->valuestring);
        for (const json *t = json_get(item, "test_list")->child; t; t = t->next)
            buf_printf(out, "%s\n", t->valuestring);
        return;
    }
    const char *entry = json_get(item, "entry_point")->valuestring;
    if (eval__has(item, "test")) {
        join_prompt(item, code, out);
        buf_printf(out, "\n%s\ncheck(%s)\n", json_get(item, "test")->valuestring, entry);
        return;
    }
    buf_printf(out,
               "%s\n\nimport json as _json\n"
               "for _given, _expected in _json.load(open('tests.json', encoding='utf-8')):\n"
               "    _found = %s(_given)\n"
               "    assert _found == _expected, 'wrong result %%r' %% (_found,)\n",
               code, entry);
}

static int grade_item(task_run *r, task_item *it, err *e)
{
    const shot *s = &it->shots[0];
    sandbox_result res;
    buf code = {0}, text = {0};
    int rc;
    char *tests = NULL;
    if (s->reason == FINISH_LENGTH) {
        it->out.truncated = true;
        it->out.answer = xstrdup("");
        return 0;
    }
    buf_puts(&code, "");
    grade_code_block(s->text.data ? s->text.data : "", s->text.len, &code);
    program(it->j, code.data, &text);
    const json *list = json_get(it->j, "tests");
    tests = list ? cJSON_PrintUnformatted(list) : NULL;
    TRY(sandbox_run(r->box, text.data, text.len, tests, &res, e));
    it->out.correct = res.passed;
    it->out.unparsed = code.len == 0;
    it->out.score = res.passed;
    it->out.answer = xstrdup(res.detail);
    rc = 0;
out:
    free(tests);
    buf_free(&code);
    buf_free(&text);
    return rc;
}

const task_type eval__code = {
    "code",    "prompt, entry_point, tests | test; text, test_list", detect, check, begin, ask,
    grade_item};
