/* classify: `text`, `label` (and `p_positive`, which helps to tell which label is the positive
 * one).
 *
 * p(positive) = exp(l1) / (exp(l1) + exp(l2)), l the log-likelihoods of the two label strings as
 * the next text. Correct: (p >= threshold) says what the label says. A candidate's flips across the
 * threshold are its flips of correctness, because there are two classes. Chance is the share of the
 * larger class. */
#include "eval/local.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool detect(const json *item)
{
    return eval__has(item, "text") && eval__has(item, "label");
}

static int check(const task_run *r, const json *item, const char *where, err *e)
{
    const char *s;
    (void)r;
    int rc = eval__need_str(item, "text", &s, where, e);
    if (rc < 0) return rc;
    rc = eval__need_str(item, "label", &s, where, e);
    if (rc == 0 && !*s) return err_set(e, ERR_FORMAT, "%s: field \"label\" is empty", where);
    return rc;
}

static int given_labels(task_run *r, err *e)
{
    const char *comma = strchr(r->o->labels, ',');
    if (!comma || comma == r->o->labels || !comma[1] || strchr(comma + 1, ','))
        return err_set(e, ERR_USAGE, "--labels takes two words, POSITIVE,NEGATIVE, not '%s'",
                       r->o->labels);
    r->labels[0] = arena_strndup(r->mem, r->o->labels, (size_t)(comma - r->o->labels));
    r->labels[1] = arena_strdup(r->mem, comma + 1);
    return 0;
}

static bool sounds_positive(const char *s)
{
    static const char *const words[] = {"positive", "pos", "yes",  "true", "1",
                                        "Positive", "Yes", "True", "spam", "toxic"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!strcmp(s, words[i])) return true;
    return false;
}

/* The two labels of the file; positive is the one that sounds so, else the one with the higher mean
 * p_positive; otherwise the user must say. */
static int found_labels(task_run *r, err *e)
{
    const char *l[2] = {NULL, NULL};
    double sum[2] = {0}, n[2] = {0};
    for (int64_t i = 0; i < r->n + r->n_left_out; i++) {
        const task_item *it = i < r->n ? &r->items[i] : &r->left_out[i - r->n];
        const char *s = json_get(it->j, "label")->valuestring;
        int k = !l[0] || !strcmp(l[0], s) ? 0 : 1;
        if (l[k] && strcmp(l[k], s))
            return err_set(e, ERR_FORMAT,
                           "%s:%lld: a third label '%s' beside '%s' and '%s'; classify takes two "
                           "classes (more: write the items as choices)",
                           r->file, (long long)it->line, s, l[0], l[1]);
        l[k] = s;
        const json *p = json_get(it->j, "p_positive");
        if (cJSON_IsNumber(p)) {
            sum[k] += p->valuedouble;
            n[k]++;
        }
    }
    if (!l[1])
        return err_set(
            e, ERR_FORMAT,
            "%s: every item has the label '%s'; name both with --labels POSITIVE,NEGATIVE", r->file,
            l[0]);
    int pos = sounds_positive(l[0])   ? 0
              : sounds_positive(l[1]) ? 1
              : n[0] > 0 && n[1] > 0 && sum[0] / n[0] != sum[1] / n[1]
                  ? sum[1] / n[1] > sum[0] / n[0]
                  : -1;
    if (pos < 0)
        return err_set(e, ERR_FORMAT,
                       "%s: cannot tell which of '%s' and '%s' is the positive class; say it with "
                       "--labels POSITIVE,NEGATIVE",
                       r->file, l[0], l[1]);
    r->labels[0] = l[pos];
    r->labels[1] = l[1 - pos];
    return 0;
}

static int begin(task_run *r, err *e)
{
    int rc = r->o->labels && *r->o->labels ? given_labels(r, e) : found_labels(r, e);
    if (rc < 0) return rc;
    int64_t pos = 0;
    for (int64_t i = 0; i < r->n; i++) {
        const char *s = json_get(r->items[i].j, "label")->valuestring;
        if (!strcmp(s, r->labels[0]))
            pos++;
        else if (strcmp(s, r->labels[1]))
            return err_set(e, ERR_FORMAT, "%s:%lld: label '%s' is neither '%s' nor '%s'", r->file,
                           (long long)r->items[i].line, s, r->labels[0], r->labels[1]);
    }
    double share = (double)pos / (double)r->n;
    r->chance = share > 0.5 ? share : 1 - share;
    snprintf(r->note, sizeof r->note, "p(%.40s) against %.40s, threshold %.3g", r->labels[0],
             r->labels[1], r->o->threshold);
    return 0;
}

static int ask(task_run *r, task_item *it, const char *where, err *e)
{
    const char *text, *conts[2];
    context c = {0};
    int rc;
    TRY(eval__need_str(it->j, "text", &text, where, e));
    char *plain = arena_printf(r->mem, "%s\nAnswer:", text);
    TRY(eval__context(&r->ask, text, plain, &c, e));
    for (int k = 0; k < 2; k++)
        conts[k] = arena_printf(r->mem, "%s%s", eval__label_gap(&c), r->labels[k]);
    TRY(eval__options(&r->ask, &c, conts, 2, where, it, e));
    rc = 0;
out:
    eval__context_free(&c);
    return rc;
}

static int grade_item(task_run *r, task_item *it, err *e)
{
    (void)e;
    double p = 1 / (1 + exp(eval__option_logprob(it, 1) - eval__option_logprob(it, 0)));
    bool positive = p >= r->o->threshold;
    const char *label = json_get(it->j, "label")->valuestring;
    it->out.unparsed = isnan(p);
    it->out.score = isnan(p) ? 0 : p;
    it->out.correct = !isnan(p) && positive == !strcmp(label, r->labels[0]);
    it->out.answer = xstrdup(isnan(p) ? "" : r->labels[positive ? 0 : 1]);
    return 0;
}

const task_type eval__classify = {"classify", "text, label", detect, check, begin, ask, grade_item};
