/* tare eval and tare compare. */
#include "cli/options.h"
#include "base/file.h"
#include <stdio.h>
#include <string.h>

static void items_json(const eval_task_result *t, jw *w)
{
    jw_key(w, "items");
    jw_arr(w);
    for (int64_t i = 0; i < t->n; i++) {
        jw_obj(w);
        jw_kbool(w, "correct", t->items[i].correct);
        jw_kbool(w, "truncated", t->items[i].truncated);
        jw_kbool(w, "unparsed", t->items[i].unparsed);
        jw_kf64(w, "score", t->items[i].score);
        jw_kstr(w, "answer", t->items[i].answer);
        jw_end_obj(w);
    }
    jw_end_arr(w);
}

static void task_json(const eval_task_result *t, bool items, jw *w)
{
    jw_obj(w);
    jw_kstr(w, "task", t->name);
    jw_kstr(w, "type", t->type);
    jw_ki64(w, "n", t->n);
    jw_kf64(w, "accuracy", t->accuracy);
    jw_ki64(w, "correct", t->n_correct);
    jw_ki64(w, "truncated", t->n_truncated);
    jw_ki64(w, "unparsed", t->n_unparsed);
    if (items) items_json(t, w);
    jw_end_obj(w);
}

static void ppl_json(const char *file, const eval_ppl *p, jw *w)
{
    jw_obj(w);
    jw_kstr(w, "task", file);
    jw_kstr(w, "type", "perplexity");
    jw_ki64(w, "n", p->n_tokens);
    jw_kf64(w, "perplexity", p->perplexity);
    jw_kf64(w, "nll", p->nll);
    jw_ki64(w, "window", p->window);
    jw_ki64(w, "stride", p->stride);
    jw_kbool(w, "bos", p->bos);
    jw_ki64(w, "windows", p->n_windows);
    jw_key(w, "first_ids");
    jw_arr(w);
    for (int i = 0; i < 8 && i < p->n_tokens; i++)
        jw_i64(w, p->first_ids[i]);
    jw_end_arr(w);
    jw_end_obj(w);
}

typedef struct eval_all {
    eval_task_result *tasks;
    int n_tasks;
    eval_ppl ppl;
    engine_info info;
    uint64_t kv_clipped;
} eval_all;

static void eval_text(const opts *o, const eval_opts *ev, const eval_all *all, buf *b)
{
    buf_printf(b, "model %s  %s  KV %s  activations %s\n", all->info.model, all->info.spec,
               all->info.kv_dtype, all->info.activation);
    if (*all->info.origin) buf_printf(b, "origin %s\n", all->info.origin);
    (void)o;
    if (all->kv_clipped)
        buf_printf(b, "%llu keys or values were clipped at the end of %s's range\n",
                   (unsigned long long)all->kv_clipped, all->info.kv_dtype);
    for (int i = 0; i < all->n_tasks; i++) {
        const eval_task_result *t = &all->tasks[i];
        buf_printf(b, "%-32s %-9s n %5lld  accuracy %6.2f %%  truncated %lld  unparsed %lld\n",
                   t->name, t->type, (long long)t->n, 100 * t->accuracy, (long long)t->n_truncated,
                   (long long)t->n_unparsed);
    }
    if (ev->perplexity)
        buf_printf(b,
                   "%-32s perplexity %.4f  (%lld tokens, %lld windows of %lld, stride %lld, BOS "
                   "%s, first ids %d %d %d)\n",
                   file_basename(ev->perplexity), all->ppl.perplexity, (long long)all->ppl.n_tokens,
                   (long long)all->ppl.n_windows, (long long)all->ppl.window,
                   (long long)all->ppl.stride, all->ppl.bos ? "yes" : "no", all->ppl.first_ids[0],
                   all->ppl.first_ids[1], all->ppl.first_ids[2]);
}

static void eval_json(const opts *o, const eval_opts *ev, const eval_all *all, buf *b)
{
    jw w;
    jw_init(&w, b, 0);
    int n = all->n_tasks + (ev->perplexity ? 1 : 0);
    jw_obj(&w);
    jw_kstr(&w, "model", all->info.model);
    jw_kstr(&w, "spec", all->info.spec);
    jw_kstr(&w, "kv", all->info.kv_dtype);
    jw_kstr(&w, "activation", all->info.activation);
    jw_kstr(&w, "origin", all->info.origin);
    jw_ki64(&w, "kv_clipped", (int64_t)all->kv_clipped);
    jw_key(&w, "results");
    jw_arr(&w);
    for (int i = 0; i < all->n_tasks; i++)
        task_json(&all->tasks[i], o->v[OPT_items].given, &w);
    if (ev->perplexity) ppl_json(ev->perplexity, &all->ppl, &w);
    jw_end_arr(&w);
    /* One task: its keys also at the top, so that `jq .accuracy` works. */
    if (n == 1 && all->n_tasks) {
        const eval_task_result *t = &all->tasks[0];
        jw_kstr(&w, "task", t->name);
        jw_ki64(&w, "n", t->n);
        jw_kf64(&w, "accuracy", t->accuracy);
        jw_ki64(&w, "truncated", t->n_truncated);
        if (o->v[OPT_items].given) items_json(t, &w);
    } else if (n == 1) {
        jw_kstr(&w, "task", ev->perplexity);
        jw_ki64(&w, "n", all->ppl.n_tokens);
        jw_kf64(&w, "perplexity", all->ppl.perplexity);
    }
    jw_end_obj(&w);
    buf_putc(b, '\n');
}

int cmd_eval(const opts *o, err *e)
{
    int rc = 0;
    engine *en = NULL;
    engine_opts eo;
    eval_opts ev;
    eval_all all = {0};
    engine_stats st = {0};
    const char *model;
    buf b = {0};
    TRY(opts_model(o, &model, e));
    TRY(opts_eval(o, &ev, e));
    if (!ev.n_tasks && !ev.perplexity) {
        rc =
            err_set(e, ERR_USAGE,
                    "nothing to measure: give --task FILE.jsonl, --tasks DIR or --perplexity TEXT");
        goto out;
    }
    opts_engine(o, o->v, model, &eo);
    TRY(engine_open(&en, &eo, e));
    all.tasks = arena_alloc(o->mem, sizeof *all.tasks * (size_t)(ev.n_tasks + 1));
    for (int i = 0; i < ev.n_tasks; i++) {
        TRY(eval_task_run(en, ev.tasks[i], &ev, &all.tasks[i], e));
        all.n_tasks++;
    }
    if (ev.perplexity) TRY(eval_perplexity(en, ev.perplexity, &ev, &all.ppl, e));
    engine_get_info(en, &all.info);
    engine_get_stats(en, &st);
    all.kv_clipped = st.kv_clipped;
    if (o->v[OPT_json].given)
        eval_json(o, &ev, &all, &b);
    else
        eval_text(o, &ev, &all, &b);
    cli_print(&b);
    rc = 0;
out:
    for (int i = 0; i < all.n_tasks; i++)
        eval_task_free(&all.tasks[i]);
    engine_close(en, 0);
    buf_free(&b);
    return rc;
}

int cmd_compare(const opts *o, err *e)
{
    int rc = 0;
    engine_opts base, cand;
    eval_opts ev;
    compare_result r = {0};
    buf b = {0}, js = {0};
    if (o->n_args != 2)
        return err_set(e, ERR_USAGE,
                       "two models are compared: `tare compare BASE CANDIDATE`; %d given",
                       o->n_args);
    TRY(opts_eval(o, &ev, e));
    opts_engine(o, o->base, o->args[0], &base);
    opts_engine(o, o->v, o->args[1], &cand);
    /* Threads and features are the machine's: one setting serves both unless --base-… says more. */
    if (!o->base[OPT_threads].given) base.threads = cand.threads;
    if (!o->base[OPT_cpu_features].given) base.cpu_features = cand.cpu_features;
    TRY(compare_run(&base, &cand, &ev, &r, e));
    jw w;
    jw_init(&w, &js, 0);
    compare_json(&r, &w);
    buf_putc(&js, '\n');
    if (o->v[OPT_report].given) TRY(file_write_atomic(o->v[OPT_report].s, js.data, js.len, e));
    if (!o->v[OPT_json].given) compare_print(&r, &b);
    cli_print(o->v[OPT_json].given ? &js : &b);
    rc = (int)r.v;
out:
    compare_free(&r);
    buf_free(&b);
    buf_free(&js);
    return rc;
}
