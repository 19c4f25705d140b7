/* Runs one task file against one engine: read, ask, grade, count.
 *
 * Requests go out in item order, as many at once as the engine batches, and come back in any order;
 * each item is graded alone once all its requests have landed, so the result does not depend on the
 * order. The first failure ends the run: the error names file and line. */
#include "eval/local.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/file.h"
#include "base/log.h"
#include "eval/sandbox.h"

static void place(const task_run *r, int64_t item, char *to, size_t cap)
{
    snprintf(to, cap, "%s:%lld", r->file, (long long)r->items[item].line);
}

/* An answer may not be longer than the context leaves room for. */
static int fit_answer(const task_run *r, shot *s, const char *where, err *e)
{
    int64_t room = r->ask.max_len - (int64_t)s->prompt.n;
    if (s->score) return 0;
    if (room < 1)
        return err_set(e, ERR_TOOLONG,
                       "%s: the prompt has %lld tokens and the model takes %lld with the answer; "
                       "drop the item or raise --max-model-len",
                       where, (long long)s->prompt.n, (long long)r->ask.max_len);
    if (s->max_tokens <= 0) s->max_tokens = 512;
    if (s->max_tokens > room) s->max_tokens = room;
    s->stop_ids = r->ask.stop_ids;
    s->n_stop_ids = r->ask.n_stop_ids;
    return 0;
}

static int ask_item(task_run *r, const task_type *t, int64_t i, err *e)
{
    char where[512];
    place(r, i, where, sizeof where);
    int rc = t->ask(r, &r->items[i], where, e);
    for (int k = 0; rc == 0 && k < r->items[i].n_shots; k++) {
        shot *s = &r->items[i].shots[k];
        s->owner = i;
        rc = fit_answer(r, s, where, e);
        if (rc == 0 && !s->prompt.n)
            rc = err_set(e, ERR_FORMAT, "%s: the prompt has no tokens (it is empty)", where);
    }
    return rc;
}

static int take_landed(task_run *r, const task_type *t, shot *s, err *e)
{
    char where[512];
    task_item *it = &r->items[s->owner];
    place(r, s->owner, where, sizeof where);
    if (s->error.code) return err_set(e, s->error.code, "%s: %s", where, s->error.msg);
    ids_free(&s->prompt);
    if (--it->n_left > 0) return 0;
    int rc = t->grade(r, it, e);
    for (int k = 0; k < it->n_shots; k++)
        buf_free(&it->shots[k].text);
    return rc;
}

static int fly(task_run *r, const task_type *t, err *e)
{
    air a;
    progress p;
    int rc = 0;
    int64_t item = 0, graded = 0;
    int part = 0;
    eval__air_init(&a, r->ask.en);
    progress_start(&p, file_basename(r->file), (uint64_t)r->n);
    while (item < r->n || a.flying > 0) {
        int sent = 0;
        if (item < r->n) {
            if (!r->items[item].n_shots) TRY(ask_item(r, t, item, e));
            rc = sent = eval__air_submit(&a, &r->items[item].shots[part], e);
            if (rc < 0) {
                err_wrap(e, "%s:%lld", r->file, (long long)r->items[item].line);
                goto out;
            }
        }
        if (sent) {
            if (++part == r->items[item].n_shots) {
                part = 0;
                item++;
            }
            continue;
        }
        shot *s = eval__air_wait(&a);
        if (!s) {
            rc = err_set(e, ERR_BUSY, "%s: the engine accepts no request", r->file);
            goto out;
        }
        int64_t owner = s->owner;
        TRY(take_landed(r, t, s, e));
        if (!r->items[owner].n_left) progress_step(&p, (uint64_t)++graded, NULL);
    }
    rc = 0;
out:
    eval__air_free(&a);
    progress_end(&p);
    return rc;
}

static void keep_first_prompt(const task_run *r, eval_task_result *out)
{
    buf text = {0};
    const shot *s = r->n && r->items[0].n_shots ? &r->items[0].shots[0] : NULL;
    ids all = {0};
    for (size_t i = 0; s && i < s->prompt.n; i++)
        ids_push(&all, s->prompt.v[i]);
    if (s && s->alts.n) ids_push(&all, s->alts.v[0]); /* as it is scored: with the first option */
    tokenizer_decode(r->ask.tok, all.v, all.n, false, &text);
    ids_free(&all);
    size_t n = text.len < sizeof out->first_prompt - 1 ? text.len : sizeof out->first_prompt - 1;
    while (n && n < text.len && ((unsigned char)text.data[n] & 0xC0) == 0x80)
        n--;
    if (n) memcpy(out->first_prompt, text.data, n);
    out->first_prompt[n] = 0;
    buf_free(&text);
}

static void count(task_run *r, const task_type *t, eval_task_result *out)
{
    snprintf(out->type, sizeof out->type, "%s", t->name);
    snprintf(out->note, sizeof out->note, "%s", r->note);
    out->n = r->n;
    out->chance = r->chance;
    out->items = xcalloc((size_t)r->n, sizeof *out->items);
    for (int64_t i = 0; i < r->n; i++) {
        eval_item *x = &out->items[i];
        *x = r->items[i].out;
        r->items[i].out.answer = NULL; /* handed over */
        out->n_correct += x->correct;
        out->n_truncated += x->truncated;
        out->n_unparsed += x->unparsed;
        int d = (int)(x->score * 10);
        if (t == &eval__classify && !x->unparsed) out->score_deciles[d < 0 ? 0 : d > 9 ? 9 : d]++;
    }
    out->accuracy = (double)out->n_correct / (double)out->n;
}

int eval_task_run(engine *en, const char *file, const eval_opts *o, eval_task_result *out, err *e)
{
    int rc;
    const task_type *type;
    task_run r = {.file = file, .o = o, .mem = arena_make()};
    *out = (eval_task_result){0};
    TRY(eval__asker_init(&r.ask, en, o, e));
    TRY(eval__load_items(&r, &type, e));
    if (type->begin) TRY(type->begin(&r, e));
    TRY(ask_item(&r, type, 0, e));
    keep_first_prompt(&r, out);
    TRY(fly(&r, type, e));
    snprintf(out->name, sizeof out->name, "%s", file_basename(file));
    char *dot = strrchr(out->name, '.');
    if (dot && !strcmp(dot, ".jsonl")) *dot = 0;
    count(&r, type, out);
    rc = 0;
out:
    sandbox_close(r.box);
    eval__free_items(&r);
    arena_drop(r.mem);
    return rc;
}

void eval_task_free(eval_task_result *r)
{
    for (int64_t i = 0; r->items && i < r->n; i++)
        free(r->items[i].answer);
    free(r->items);
    *r = (eval_task_result){0};
}
