/* generate: `question`, `answer` (`… #### n`, or the plain answer). Greedy, stopped at the end of
 * the turn or where a next question begins. An answer that the token limit cut is never parsed:
 * what stands in unfinished reasoning is not an answer. */
#include "eval/local.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "eval/grade.h"

static bool detect(const json *item)
{
    return eval__has(item, "question") && eval__has(item, "answer");
}

/* The reference as text: a string or a number. */
static int reference(const json *item, char *digits, size_t cap, const char **out,
                     const char *where, err *e)
{
    const json *a = json_get(item, "answer");
    if (cJSON_IsString(a)) {
        *out = a->valuestring;
        return 0;
    }
    if (cJSON_IsNumber(a)) {
        double v = a->valuedouble;
        if (v > -9e15 && v < 9e15 && v == (double)(int64_t)v)
            snprintf(digits, cap, "%lld", (long long)v);
        else
            snprintf(digits, cap, "%.15g", v);
        *out = digits;
        return 0;
    }
    return err_set(e, ERR_FORMAT, "%s: field \"answer\" must be a string or a number", where);
}

static int check(const task_run *r, const json *item, const char *where, err *e)
{
    const char *s;
    char digits[64];
    (void)r;
    int rc = eval__need_str(item, "question", &s, where, e);
    return rc < 0 ? rc : reference(item, digits, sizeof digits, &s, where, e);
}

static int ask(task_run *r, task_item *it, const char *where, err *e)
{
    static const char *const stops[] = {"\nQuestion:", "\nQ:", "Question:"};
    const char *q;
    context c = {0};
    int rc;
    TRY(eval__need_str(it->j, "question", &q, where, e));
    char *plain = arena_printf(r->mem, "Question: %s\nAnswer:", q);
    TRY(eval__context(&r->ask, q, plain, &c, e));
    shot *s = eval__item_shots(it, 1);
    s->stops = stops;
    s->n_stops = sizeof stops / sizeof *stops;
    s->max_tokens = r->o->max_tokens;
    TRY(eval__context_ids(&r->ask, &c, &s->prompt, e));
    rc = 0;
out:
    eval__context_free(&c);
    return rc;
}

static int grade_item(task_run *r, task_item *it, err *e)
{
    char digits[64], where[512];
    const char *ref;
    grade g;
    const shot *s = &it->shots[0];
    snprintf(where, sizeof where, "%s:%lld", r->file, (long long)it->line);
    int rc = reference(it->j, digits, sizeof digits, &ref, where, e);
    if (rc < 0) return rc;
    if (s->reason == FINISH_LENGTH) {
        it->out.truncated = true;
        it->out.answer = xstrdup("");
        return 0;
    }
    grade_generate(s->text.data ? s->text.data : "", s->text.len, ref, &g);
    it->out.correct = g.correct;
    it->out.unparsed = g.unparsed;
    it->out.score = g.correct;
    it->out.answer = xstrdup(g.answer);
    return 0;
}

const task_type eval__generate = {"generate", "question, answer", detect, check, NULL,
                                  ask,        grade_item};
