/* choice: `question`, `choices`, `answer` (index from 0, or a letter).
 *
 * by letter: the options stand in the question ("A. …" lines are added unless the question already
 * has them), the likelihood of each letter as the next text decides. The letter follows after a
 * space, except where the context ends in white space, as most chat templates do. by text: the
 * options are not shown; the log-likelihood of each option's text, divided by its bytes, decides.
 * score = the winner's margin over the runner-up (nats, or nats a byte). */
#include "eval/local.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool detect(const json *item)
{
    return eval__has(item, "question") && cJSON_IsArray(json_get(item, "choices"));
}

static bool by_text(const task_run *r)
{
    return r->o->choice_by && !strcmp(r->o->choice_by, "text");
}

static int answer_index(const json *item, int n, int *out, const char *where, err *e)
{
    const json *a = json_get(item, "answer");
    int i = -1;
    if (cJSON_IsNumber(a) && a->valuedouble == floor(a->valuedouble) && a->valuedouble >= 0 &&
        a->valuedouble < n)
        i = (int)a->valuedouble;
    else if (cJSON_IsString(a) && a->valuestring[0] >= 'A' && a->valuestring[0] < 'A' + n &&
             !a->valuestring[1])
        i = a->valuestring[0] - 'A';
    if (i < 0)
        return err_set(
            e, ERR_FORMAT,
            "%s: field \"answer\" must be an index from 0 to %d or a letter from A to %c", where,
            n - 1, 'A' + n - 1);
    *out = i;
    return 0;
}

static int check(const task_run *r, const json *item, const char *where, err *e)
{
    const char *q;
    int right;
    (void)r;
    int rc = eval__need_str(item, "question", &q, where, e);
    if (rc < 0) return rc;
    const json *choices = json_get(item, "choices");
    int n = cJSON_IsArray(choices) ? cJSON_GetArraySize(choices) : 0;
    if (n < 2 || n > TASK_MAX_CHOICES)
        return err_set(e, ERR_FORMAT, "%s: field \"choices\" must be a list of 2 to %d strings",
                       where, TASK_MAX_CHOICES);
    for (const json *c = choices->child; c; c = c->next)
        if (!cJSON_IsString(c) || !*c->valuestring)
            return err_set(e, ERR_FORMAT,
                           "%s: every item of \"choices\" must be a non-empty string", where);
    return answer_index(item, n, &right, where, e);
}

static int begin(task_run *r, err *e)
{
    double sum = 0;
    if (r->o->choice_by && strcmp(r->o->choice_by, "text") && strcmp(r->o->choice_by, "letter"))
        return err_set(e, ERR_USAGE, "--choice-by is letter or text, not '%s'", r->o->choice_by);
    for (int64_t i = 0; i < r->n; i++)
        sum += 1.0 / cJSON_GetArraySize(json_get(r->items[i].j, "choices"));
    r->chance = sum / (double)r->n;
    snprintf(r->note, sizeof r->note, "choice by %s", by_text(r) ? "text, per byte" : "letter");
    return 0;
}

/* Does the question already hold its options as "A. text" or "A) text" lines? */
static bool has_options(const char *q, const json *choices)
{
    char letter = 'A';
    for (const json *c = choices->child; c; c = c->next, letter++) {
        bool found = false;
        size_t n = strlen(c->valuestring);
        for (const char *p = strchr(q, letter); p && !found; p = strchr(p + 1, letter))
            found = (p == q || p[-1] == '\n' || p[-1] == '(' || p[-1] == ' ') &&
                    (p[1] == '.' || p[1] == ')' || p[1] == ':') && p[2] == ' ' &&
                    !strncmp(p + 3, c->valuestring, n);
        if (!found) return false;
    }
    return true;
}

static int choice_context(task_run *r, const task_item *it, const char *q, context *c, err *e)
{
    buf user = {0}, plain = {0};
    const json *choices = json_get(it->j, "choices");
    bool shown = has_options(q, choices);
    buf_puts(&user, q);
    if (!by_text(r) && !shown) {
        char letter = 'A';
        for (const json *x = choices->child; x; x = x->next)
            buf_printf(&user, "\n%c. %s", letter++, x->valuestring);
        buf_puts(&user, "\nAnswer:");
        buf_puts(&plain, user.data);
    } else if (by_text(r)) {
        buf_printf(&plain, "Question: %s\nAnswer:", q);
    } else {
        buf_printf(&plain, "%s\nAnswer:", q);
    }
    int rc = eval__context(&r->ask, user.data, plain.data, c, e);
    buf_free(&user);
    buf_free(&plain);
    return rc;
}

static int ask(task_run *r, task_item *it, const char *where, err *e)
{
    const char *q;
    const char *conts[TASK_MAX_CHOICES];
    context c = {0};
    int rc, k = 0;
    const json *choices = json_get(it->j, "choices");
    TRY(eval__need_str(it->j, "question", &q, where, e));
    TRY(choice_context(r, it, q, &c, e));
    for (const json *x = choices->child; x; x = x->next, k++)
        conts[k] = by_text(r) ? arena_printf(r->mem, "%s%s", eval__label_gap(&c), x->valuestring)
                              : arena_printf(r->mem, "%s%c", eval__label_gap(&c), 'A' + k);
    TRY(eval__options(&r->ask, &c, conts, k, where, it, e));
    rc = 0;
out:
    eval__context_free(&c);
    return rc;
}

static int grade_item(task_run *r, task_item *it, err *e)
{
    double best = -INFINITY, second = -INFINITY;
    int win = -1, right;
    char where[512];
    const json *x = json_get(it->j, "choices")->child;
    snprintf(where, sizeof where, "%s:%lld", r->file, (long long)it->line);
    for (int k = 0; k < it->n_options; k++, x = x->next) {
        double v = eval__option_logprob(it, k);
        if (by_text(r)) v /= (double)strlen(x->valuestring);
        if (!(v > -INFINITY)) continue; /* also NaN: a broken model chooses nothing */
        if (v > best) {
            second = best;
            best = v;
            win = k;
        } else if (v > second) {
            second = v;
        }
    }
    int rc = answer_index(it->j, it->n_options, &right, where, e);
    if (rc < 0) return rc;
    it->out.unparsed = win < 0;
    it->out.correct = win == right;
    it->out.score = win >= 0 && second > -INFINITY ? best - second : 0;
    it->out.answer = win < 0 ? xstrdup("") : xasprintf("%c", 'A' + win);
    return 0;
}

const task_type eval__choice = {"choice",  "question, choices, answer", detect, check, begin, ask,
                                grade_item};
