/* compare: the same questions to a baseline and to a candidate, and a verdict with its reasons.
 *
 * Order of work. Baseline answers come from the cache where nothing has changed; what is missing is
 * asked of the baseline engine, which is then closed again, unless a text asks for KL: that needs
 * both engines at once. Then the candidate answers the same items.
 *
 * Pairs. Items that the token limit cut on either side are no evidence of a loss or of its absence:
 * they leave the pairs and are counted for both sides. If the two sides are cut at different rates
 * (McNemar p < 0.05) the task is at most "confirm".
 *
 * Verdict of a task: stats_verdict on its pairs; not comparable when the baseline is not above
 * chance (one-sided binomial, 5 %). In all: reject if any task is; safe if the pooled pairs of the
 * comparable tasks are; else confirm; not comparable if no task is. Tokenizers that differ make
 * everything not comparable: probabilities of different tokens, and answers to different prompts.
 * Perplexity and KL are reported; alone they prove no verdict but one: logits that are not numbers
 * are a reject. */
#include "eval/local.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/file.h"
#include "base/log.h"
#include "ckpt/ckpt.h"

typedef struct work {
    const engine_opts *base_opts, *cand_opts;
    eval_opts o; /* with the task list that is used */
    engine *base, *cand;
    base_facts facts;
    cache_key facts_key, *task_keys;
    eval_task_result *base_tasks, *cand_tasks;
    bool *have_task, have_facts;
    char **own_tasks; /* found in the model's folder */
    size_t n_own;
    char *own_dir;
    compare_result *r;
} work;

static void reason(compare_result *r, const char *fmt, ...) PRINTF(2, 3);
static void reason(compare_result *r, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    r->reasons = xrealloc(r->reasons, (size_t)(r->n_reasons + 1) * sizeof *r->reasons);
    r->reasons[r->n_reasons++] = xstrdup(text);
}

/* ---- what is asked
 * -------------------------------------------------------------------------------------------- */

/* Without tasks and text: the files of the baseline's own eval folder. */
static int default_tasks(work *w, err *e)
{
    char *dir = NULL;
    const char *model = w->base_opts->model;
    ckpt *c = NULL;
    char **names = NULL;
    size_t n = 0;
    int rc = 0;
    if (w->o.n_tasks || w->o.perplexity) return 0;
    if (file_is_dir(model)) {
        dir = file_join(model, "eval");
    } else if (!file_exists(model)) {
        TRY(ckpt_open(&c, model, e));
        if (file_is_dir(ckpt_path(c))) dir = file_join(ckpt_path(c), "eval");
    }
    if (dir && file_is_dir(dir)) TRY(file_list(dir, &names, &n, e));
    w->own_tasks = xcalloc(n + 1, sizeof *w->own_tasks);
    for (size_t i = 0; i < n; i++) {
        size_t len = strlen(names[i]);
        if (len > 6 && !strcmp(names[i] + len - 6, ".jsonl"))
            w->own_tasks[w->n_own++] = file_join(dir, names[i]);
    }
    if (!w->n_own)
        rc = err_set(
            e, ERR_USAGE,
            "%s has no eval folder with tasks of its own: give --task FILE.jsonl, --tasks DIR "
            "or --perplexity TEXT",
            model);
    w->o.tasks = (const char *const *)w->own_tasks;
    w->o.n_tasks = (int)w->n_own;
out:
    file_list_free(names, n);
    ckpt_close(c);
    free(dir);
    return rc;
}

static int look_in_cache(work *w, err *e)
{
    const char *dir = w->o.cache_dir;
    size_t n = (size_t)w->o.n_tasks + 1;
    w->task_keys = xcalloc(n, sizeof *w->task_keys);
    w->base_tasks = xcalloc(n, sizeof *w->base_tasks);
    w->cand_tasks = xcalloc(n, sizeof *w->cand_tasks);
    w->have_task = xcalloc(n, sizeof *w->have_task);
    if (!dir) return 0;
    int rc = eval__cache_key(w->base_opts, &w->o, NULL, &w->facts_key, e);
    if (rc < 0) return rc;
    w->have_facts = eval__cache_get_facts(dir, &w->facts_key, &w->facts);
    for (int i = 0; i < w->o.n_tasks; i++) {
        rc = eval__cache_key(w->base_opts, &w->o, w->o.tasks[i], &w->task_keys[i], e);
        if (rc < 0) return rc;
        w->have_task[i] = eval__cache_get_task(dir, &w->task_keys[i], &w->base_tasks[i]);
    }
    return 0;
}

/* ---- asking
 * ------------------------------------------------------------------------------------------------------
 */

static int measure_facts(engine *en, base_facts *f, err *e)
{
    int rc = eval__speed(en, &f->ttft_ms, &f->tpot_ms, e);
    engine_get_info(en, &f->info);
    eval__tokenizer_print(engine_tokenizer(en), f->tokenizer);
    return rc;
}

static int run_base(work *w, err *e)
{
    int rc = 0;
    bool all = w->have_facts && !w->o.perplexity;
    for (int i = 0; i < w->o.n_tasks; i++)
        all = all && w->have_task[i];
    w->r->base_cached = w->have_facts;
    for (int i = 0; i < w->o.n_tasks; i++)
        w->r->base_cached = w->r->base_cached && w->have_task[i];
    if (all) return 0;
    TRY(engine_open(&w->base, w->base_opts, e));
    if (!w->have_facts) {
        TRY(measure_facts(w->base, &w->facts, e));
        eval__cache_put_facts(w->o.cache_dir, &w->facts_key, &w->facts);
    }
    for (int i = 0; i < w->o.n_tasks; i++) {
        if (w->have_task[i]) continue;
        TRY(eval_task_run(w->base, w->o.tasks[i], &w->o, &w->base_tasks[i], e));
        eval__cache_put_task(w->o.cache_dir, &w->task_keys[i], &w->base_tasks[i]);
    }
    if (!w->o.perplexity) {
        engine_close(w->base, 0);
        w->base = NULL;
    }
    rc = 0;
out:
    return rc < 0 ? err_wrap(e, "baseline") : 0;
}

static int run_cand(work *w, bool *same_tokenizer, err *e)
{
    int rc;
    base_facts f = {0};
    engine_stats st = {0};
    TRY(engine_open(&w->cand, w->cand_opts, e));
    TRY(measure_facts(w->cand, &f, e));
    *same_tokenizer = !strcmp(f.tokenizer, w->facts.tokenizer);
    for (int i = 0; i < w->o.n_tasks; i++)
        TRY(eval_task_run(w->cand, w->o.tasks[i], &w->o, &w->cand_tasks[i], e));
    if (w->o.perplexity && *same_tokenizer)
        TRY(eval__kl(w->base, w->cand, w->o.perplexity, &w->o, w->r, e));
    engine_get_stats(w->cand, &st);
    w->r->kv_clipped = st.kv_clipped;
    w->r->cand = f.info;
    w->r->speed_cand_ttft_ms = f.ttft_ms;
    w->r->speed_cand_tpot_ms = f.tpot_ms;
    rc = 0;
out:
    return rc < 0 ? err_wrap(e, "candidate") : 0;
}

/* ---- pairing and judging
 * ----------------------------------------------------------------------------------------- */

typedef struct pairs {
    int64_t n, right_base, right_cand, cut_base_only, cut_cand_only;
} pairs;

static pairs pair_up(const eval_task_result *a, const eval_task_result *z, compare_task *t)
{
    pairs p = {0};
    for (int64_t i = 0; i < a->n; i++) {
        const eval_item *x = &a->items[i], *y = &z->items[i];
        p.cut_base_only += x->truncated && !y->truncated;
        p.cut_cand_only += y->truncated && !x->truncated;
        if (x->truncated || y->truncated) continue;
        p.n++;
        p.right_base += x->correct;
        p.right_cand += y->correct;
        t->b += x->correct && !y->correct;
        t->c += y->correct && !x->correct;
    }
    return p;
}

static void keep_items(eval_task_result *r, eval_item **to)
{
    *to = r->items;
    r->items = NULL;
}

static void judge_chance(compare_task *t, const pairs *p, double chance)
{
    if (!p->n || stats_binomial_above_p(p->n, p->right_base, chance) < 0.05) return;
    t->v = VERDICT_NOT_COMPARABLE;
    t->items_to_settle = 0;
    if (p->right_base == 0)
        snprintf(t->reason, sizeof t->reason,
                 "the baseline solves none of the items: no loss can show");
    else
        snprintf(t->reason, sizeof t->reason,
                 "the baseline (%.1f %%) is not above chance (%.1f %%) on %lld items beyond doubt: "
                 "no loss can show",
                 100 * t->baseline, 100 * chance, (long long)t->n);
}

static void judge_truncation(compare_task *t, const pairs *p)
{
    if (stats_mcnemar_p(p->cut_base_only, p->cut_cand_only) >= 0.05) return;
    if (t->v == VERDICT_REJECT) return;
    if (t->v == VERDICT_NOT_COMPARABLE && p->n) return;
    t->v = VERDICT_CONFIRM;
    t->items_to_settle = 0; /* a longer budget settles it, not more items */
    snprintf(t->reason, sizeof t->reason,
             "the token limit cut %lld answers of the baseline and %lld of the candidate: raise "
             "--max-tokens to compare them",
             (long long)t->truncated_base, (long long)t->truncated_cand);
}

static int compare_one(work *w, int i, compare_task *t, err *e)
{
    eval_task_result *a = &w->base_tasks[i], *z = &w->cand_tasks[i];
    if (a->n != z->n)
        return err_set(e, ERR_BADSTATE,
                       "%s: %lld baseline items and %lld candidate items: the file "
                       "changed while it was used",
                       w->o.tasks[i], (long long)a->n, (long long)z->n);
    memcpy(t->name, z->name, sizeof t->name);
    memcpy(t->type, z->type, sizeof t->type);
    t->truncated_base = a->n_truncated;
    t->truncated_cand = z->n_truncated;
    pairs p = pair_up(a, z, t);
    t->n = p.n;
    if (p.n) {
        t->baseline = (double)p.right_base / (double)p.n;
        t->candidate = (double)p.right_cand / (double)p.n;
        t->delta_pp = 100 * (double)(t->c - t->b) / (double)p.n;
        t->flip_rate = (double)(t->b + t->c) / (double)p.n;
    }
    t->flips = t->b + t->c;
    t->p_value = stats_mcnemar_p(t->b, t->c);
    stats_paired_ci(p.n, t->b, t->c, t->ci95_pp);
    t->v = stats_verdict(p.n, t->b, t->c, t->reason, &t->items_to_settle);
    judge_chance(t, &p, z->chance);
    judge_truncation(t, &p);
    if (w->o.items) {
        t->n_items = a->n;
        keep_items(a, &t->base_items);
        keep_items(z, &t->cand_items);
    }
    return 0;
}

static verdict judge_tasks(compare_result *r)
{
    char why[256];
    int64_t n = 0, b = 0, c = 0, more = 0;
    int rejected = 0, comparable = 0;
    for (int i = 0; i < r->n_tasks; i++) {
        const compare_task *t = &r->tasks[i];
        if (t->v == VERDICT_NOT_COMPARABLE) continue;
        comparable++;
        rejected += t->v == VERDICT_REJECT;
        n += t->n;
        b += t->b;
        c += t->c;
    }
    r->pooled_n = n;
    stats_paired_ci(n, b, c, r->pooled_ci95_pp);
    if (!comparable) {
        reason(r, "no task is comparable");
        return VERDICT_NOT_COMPARABLE;
    }
    verdict pooled = stats_verdict(n, b, c, why, &more);
    if (rejected) {
        reason(r, "%d of %d comparable tasks rejected", rejected, comparable);
        return VERDICT_REJECT;
    }
    if (pooled == VERDICT_NOT_COMPARABLE) pooled = VERDICT_CONFIRM;
    reason(r, "all %lld items together: %s", (long long)n, why);
    if (pooled == VERDICT_REJECT) return VERDICT_CONFIRM;
    for (int i = 0; i < r->n_tasks;
         i++) { /* answers that were cut prove nothing, also in the pool */
        const compare_task *t = &r->tasks[i];
        if (pooled == VERDICT_SAFE && t->v == VERDICT_CONFIRM && !t->items_to_settle &&
            t->truncated_base != t->truncated_cand)
            pooled = VERDICT_CONFIRM;
    }
    return pooled;
}

static void task_reasons(compare_result *r)
{
    for (int i = 0; i < r->n_tasks; i++) {
        const compare_task *t = &r->tasks[i];
        reason(r, "%s: %s: %s", t->name, verdict_name(t->v), t->reason);
        if (t->truncated_base != t->truncated_cand && t->v != VERDICT_CONFIRM)
            reason(
                r,
                "%s: answers cut by the token limit: %lld of the baseline, %lld of the candidate",
                t->name, (long long)t->truncated_base, (long long)t->truncated_cand);
    }
}

static void judge(work *w, bool same_tokenizer)
{
    compare_result *r = w->r;
    if (r->n_tasks) {
        r->v = judge_tasks(r);
    } else {
        r->v = VERDICT_CONFIRM;
        if (same_tokenizer)
            reason(r,
                   "perplexity and KL alone do not show which answers change: add tasks (--task)");
    }
    task_reasons(r);
    if (r->has_ppl && (!isfinite(r->ppl_cand.nll) || isnan(r->kl_mean)) &&
        isfinite(r->ppl_base.nll)) {
        r->v = VERDICT_REJECT;
        reason(r, "the candidate's logits are not numbers at some positions of the text");
    }
    if (!same_tokenizer) {
        r->v = VERDICT_NOT_COMPARABLE;
        reason(r,
               "the tokenizers differ: perplexity, KL and likelihoods of different tokens are not "
               "comparable");
    }
    if (r->base.max_len != r->cand.max_len)
        reason(r,
               "note: context lengths differ (%lld and %lld tokens); long prompts may be cut "
               "differently",
               (long long)r->base.max_len, (long long)r->cand.max_len);
    if (r->kv_clipped)
        reason(r, "note: %llu key or value entries were beyond the range of %s and saturated",
               (unsigned long long)r->kv_clipped, r->cand.kv_dtype);
}

int compare_run(const engine_opts *base, const engine_opts *cand, const eval_opts *o,
                compare_result *r, err *e)
{
    int rc;
    bool same = true;
    work w = {.base_opts = base, .cand_opts = cand, .o = *o, .r = r};
    *r = (compare_result){0};
    TRY(default_tasks(&w, e));
    TRY(look_in_cache(&w, e));
    TRY(run_base(&w, e));
    TRY(run_cand(&w, &same, e));
    r->base = w.facts.info;
    r->speed_base_ttft_ms = w.facts.ttft_ms;
    r->speed_base_tpot_ms = w.facts.tpot_ms;
    r->tasks = xcalloc((size_t)w.o.n_tasks + 1, sizeof *r->tasks);
    for (; r->n_tasks < w.o.n_tasks; r->n_tasks++)
        TRY(compare_one(&w, r->n_tasks, &r->tasks[r->n_tasks], e));
    judge(&w, same);
    rc = 0;
out:
    engine_close(w.base, 0);
    engine_close(w.cand, 0);
    for (int i = 0; w.base_tasks && i < w.o.n_tasks; i++) {
        eval_task_free(&w.base_tasks[i]);
        eval_task_free(&w.cand_tasks[i]);
    }
    for (size_t i = 0; i < w.n_own; i++)
        free(w.own_tasks[i]);
    free(w.own_tasks);
    free(w.task_keys);
    free(w.base_tasks);
    free(w.cand_tasks);
    free(w.have_task);
    if (rc < 0) compare_free(r);
    return rc;
}

static void free_items(eval_item *items, int64_t n)
{
    for (int64_t i = 0; items && i < n; i++)
        free(items[i].answer);
    free(items);
}

void compare_free(compare_result *r)
{
    for (int i = 0; i < r->n_reasons; i++)
        free(r->reasons[i]);
    for (int i = 0; i < r->n_tasks; i++) {
        free_items(r->tasks[i].base_items, r->tasks[i].n_items);
        free_items(r->tasks[i].cand_items, r->tasks[i].n_items);
    }
    free(r->reasons);
    free(r->tasks);
    *r = (compare_result){0};
}
