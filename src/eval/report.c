/* What a comparison says, as one JSON object and as a table for people. The keys verdict, reasons,
 * tasks[]{name,n,baseline,candidate,delta_pp,ci95_pp,p_value,flips},
 * perplexity{baseline,candidate}, kl{mean,p99}, top1, memory and speed are relied on by others:
 * they are added to, never renamed. */
#include "eval/eval.h"
#include <math.h>
#include <string.h>

static void item_json(const eval_item *x, jw *w)
{
    jw_obj(w);
    jw_kbool(w, "correct", x->correct);
    jw_kbool(w, "truncated", x->truncated);
    jw_kbool(w, "unparsed", x->unparsed);
    jw_kf64(w, "score", x->score);
    jw_kstr(w, "answer", x->answer ? x->answer : "");
    jw_end_obj(w);
}

static void items_json(const compare_task *t, jw *w)
{
    jw_key(w, "items");
    jw_arr(w);
    for (int64_t i = 0; i < t->n_items; i++) {
        jw_obj(w);
        jw_key(w, "baseline");
        item_json(&t->base_items[i], w);
        jw_key(w, "candidate");
        item_json(&t->cand_items[i], w);
        jw_end_obj(w);
    }
    jw_end_arr(w);
}

static void task_json(const compare_task *t, jw *w)
{
    jw_obj(w);
    jw_kstr(w, "name", t->name);
    jw_kstr(w, "type", t->type);
    jw_ki64(w, "n", t->n);
    jw_kf64(w, "baseline", t->baseline);
    jw_kf64(w, "candidate", t->candidate);
    jw_kf64(w, "delta_pp", t->delta_pp);
    jw_key(w, "ci95_pp");
    jw_arr(w);
    jw_f64(w, t->ci95_pp[0]);
    jw_f64(w, t->ci95_pp[1]);
    jw_end_arr(w);
    jw_kf64(w, "p_value", t->p_value);
    jw_ki64(w, "flips", t->flips);
    jw_ki64(w, "right_to_wrong", t->b);
    jw_ki64(w, "wrong_to_right", t->c);
    jw_key(w, "truncated");
    jw_obj(w);
    jw_ki64(w, "baseline", t->truncated_base);
    jw_ki64(w, "candidate", t->truncated_cand);
    jw_end_obj(w);
    jw_kstr(w, "verdict", verdict_name(t->v));
    jw_kstr(w, "reason", t->reason);
    jw_key(w, "items_to_settle"); /* null: no feasible number */
    if (t->items_to_settle < 0)
        jw_null(w);
    else
        jw_i64(w, t->items_to_settle);
    if (t->base_items) items_json(t, w);
    jw_end_obj(w);
}

static void side_json(const engine_info *i, jw *w)
{
    jw_obj(w);
    jw_kstr(w, "model", i->model);
    jw_kstr(w, "architecture", i->architecture);
    jw_kstr(w, "spec", i->spec);
    jw_kstr(w, "activation", i->activation);
    jw_kstr(w, "kv", i->kv_dtype);
    jw_kstr(w, "device", i->device);
    jw_kstr(w, "cpu_features", i->cpu_features);
    jw_ki64(w, "threads", i->threads);
    if (*i->origin)
        jw_kstr(w, "origin", i->origin);
    else
        jw_kstr(w, "origin", NULL);
    jw_end_obj(w);
}

static void memory_json(const engine_info *i, jw *w)
{
    jw_obj(w);
    jw_ki64(w, "weight_bytes", (int64_t)i->weight_bytes);
    jw_ki64(w, "weight_file_bytes", (int64_t)i->weight_file_bytes);
    jw_ki64(w, "kv_bytes_per_token", (int64_t)i->kv_bytes_per_token);
    jw_ki64(w, "kv_pool_bytes", (int64_t)i->kv_pool_bytes);
    jw_ki64(w, "predicted_bytes", (int64_t)i->predicted_bytes);
    jw_ki64(w, "actual_bytes", (int64_t)i->actual_bytes);
    jw_end_obj(w);
}

static void speed_json(double load, double ttft, double tpot, jw *w)
{
    jw_obj(w);
    jw_kf64(w, "load_seconds", load);
    jw_kf64(w, "ttft_ms", ttft);
    jw_kf64(w, "tpot_ms", tpot);
    jw_end_obj(w);
}

static void ppl_json(const compare_result *r, jw *w)
{
    jw_key(w, "perplexity");
    jw_obj(w);
    jw_kf64(w, "baseline", r->ppl_base.perplexity);
    jw_kf64(w, "candidate", r->ppl_cand.perplexity);
    jw_ki64(w, "tokens", r->ppl_base.n_tokens);
    jw_ki64(w, "windows", r->ppl_base.n_windows);
    jw_ki64(w, "window", r->ppl_base.window);
    jw_ki64(w, "stride", r->ppl_base.stride);
    jw_kbool(w, "bos", r->ppl_base.bos);
    jw_key(w, "first_ids");
    jw_arr(w);
    for (int i = 0; i < 8 && i <= r->ppl_base.n_tokens; i++)
        jw_i64(w, r->ppl_base.first_ids[i]);
    jw_end_arr(w);
    jw_end_obj(w);
    jw_key(w, "kl");
    jw_obj(w);
    jw_kf64(w, "mean", r->kl_mean);
    jw_kf64(w, "p50", r->kl_p50);
    jw_kf64(w, "p90", r->kl_p90);
    jw_kf64(w, "p99", r->kl_p99);
    jw_kf64(w, "max", r->kl_max);
    jw_ki64(w, "tokens", r->kl_tokens);
    jw_end_obj(w);
    jw_kf64(w, "top1", r->top1);
}

void compare_json(const compare_result *r, jw *w)
{
    jw_obj(w);
    jw_kstr(w, "verdict", verdict_name(r->v));
    jw_ki64(w, "exit_code", (int64_t)r->v);
    jw_key(w, "reasons");
    jw_arr(w);
    for (int i = 0; i < r->n_reasons; i++)
        jw_str(w, r->reasons[i]);
    jw_end_arr(w);
    jw_key(w, "tasks");
    jw_arr(w);
    for (int i = 0; i < r->n_tasks; i++)
        task_json(&r->tasks[i], w);
    jw_end_arr(w);
    jw_key(w, "pooled");
    jw_obj(w);
    jw_ki64(w, "n", r->pooled_n);
    jw_key(w, "ci95_pp");
    jw_arr(w);
    jw_f64(w, r->pooled_ci95_pp[0]);
    jw_f64(w, r->pooled_ci95_pp[1]);
    jw_end_arr(w);
    jw_end_obj(w);
    if (r->has_ppl) {
        ppl_json(r, w);
    } else { /* no text was given: the keys stand all the same */
        jw_key(w, "perplexity");
        jw_null(w);
        jw_key(w, "kl");
        jw_null(w);
        jw_key(w, "top1");
        jw_null(w);
    }
    jw_key(w, "baseline");
    side_json(&r->base, w);
    jw_key(w, "candidate");
    side_json(&r->cand, w);
    jw_kbool(w, "baseline_cached", r->base_cached);
    jw_ki64(w, "kv_clipped", (int64_t)r->kv_clipped);
    jw_key(w, "memory");
    jw_obj(w);
    jw_key(w, "baseline");
    memory_json(&r->base, w);
    jw_key(w, "candidate");
    memory_json(&r->cand, w);
    jw_end_obj(w);
    jw_key(w, "speed");
    jw_obj(w);
    jw_key(w, "baseline");
    speed_json(r->base.load_seconds, r->speed_base_ttft_ms, r->speed_base_tpot_ms, w);
    jw_key(w, "candidate");
    speed_json(r->cand.load_seconds, r->speed_cand_ttft_ms, r->speed_cand_tpot_ms, w);
    jw_end_obj(w);
    jw_end_obj(w);
}

/* ---- for people
 * ------------------------------------------------------------------------------------------------
 */

static void side_text(const char *who, const engine_info *i, buf *out)
{
    buf_printf(out, "%-10s %s\n           %s; KV %s; activations %s\n", who, i->model, i->spec,
               i->kv_dtype, i->activation);
    if (*i->origin) buf_printf(out, "           origin: %s\n", i->origin);
}

static void task_text(const compare_task *t, buf *out)
{
    buf_printf(out, "%-26.26s %6lld %8.2f %9.2f %+8.2f  [%+7.2f, %+6.2f] %8.2g %6lld  %s\n",
               t->name, (long long)t->n, 100 * t->baseline, 100 * t->candidate, t->delta_pp,
               t->ci95_pp[0], t->ci95_pp[1], t->p_value, (long long)t->flips, verdict_name(t->v));
    if (t->truncated_base || t->truncated_cand)
        buf_printf(out, "%-26s cut by the token limit: %lld baseline, %lld candidate\n", "",
                   (long long)t->truncated_base, (long long)t->truncated_cand);
}

static void row(buf *out, const char *what, int decimals, double base, double cand,
                const char *unit)
{
    buf_printf(out, "%-26s %14.*f %14.*f %-6s", what, decimals, base, decimals, cand, unit);
    if (base > 0 && isfinite(cand)) buf_printf(out, " x %.3f", cand / base);
    buf_putc(out, '\n');
}

void compare_print(const compare_result *r, buf *out)
{
    side_text("baseline", &r->base, out);
    side_text("candidate", &r->cand, out);
    if (r->n_tasks) {
        buf_printf(out, "\n%-26s %6s %8s %9s %8s  %17s %8s %6s  %s\n", "task", "n", "baseline",
                   "candidate", "delta pp", "95 % interval", "p", "flips", "verdict");
        for (int i = 0; i < r->n_tasks; i++)
            task_text(&r->tasks[i], out);
    }
    buf_printf(out, "\n%-26s %14s %14s\n", "", "baseline", "candidate");
    row(out, "weights", 2, (double)r->base.weight_bytes / 1e6, (double)r->cand.weight_bytes / 1e6,
        "MB");
    row(out, "KV a token", 0, (double)r->base.kv_bytes_per_token,
        (double)r->cand.kv_bytes_per_token, "bytes");
    row(out, "load", 2, r->base.load_seconds, r->cand.load_seconds, "s");
    row(out, "TTFT, 128 tokens", 1, r->speed_base_ttft_ms, r->speed_cand_ttft_ms, "ms");
    row(out, "TPOT", 2, r->speed_base_tpot_ms, r->speed_cand_tpot_ms, "ms");
    if (r->has_ppl) {
        row(out, "perplexity", 4, r->ppl_base.perplexity, r->ppl_cand.perplexity, "");
        buf_printf(out, "%-26s mean %.3g, median %.3g, p99 %.3g, max %.3g over %lld tokens\n",
                   "KL divergence", r->kl_mean, r->kl_p50, r->kl_p99, r->kl_max,
                   (long long)r->kl_tokens);
        buf_printf(out, "%-26s %.3f %%\n", "top-1 agreement", 100 * r->top1);
        buf_printf(out, "%-26s %lld windows of %lld, stride %lld, BOS %s, first ids %d %d %d\n",
                   "text", (long long)r->ppl_base.n_windows, (long long)r->ppl_base.window,
                   (long long)r->ppl_base.stride, r->ppl_base.bos ? "yes" : "no",
                   r->ppl_base.first_ids[0], r->ppl_base.first_ids[1], r->ppl_base.first_ids[2]);
    }
    if (r->base_cached)
        buf_puts(out, "the baseline's answers, speed and memory are from the cache\n");
    buf_printf(out, "\nverdict: %s\n", verdict_name(r->v));
    for (int i = 0; i < r->n_reasons; i++)
        buf_printf(out, "  %s\n", r->reasons[i]);
}
