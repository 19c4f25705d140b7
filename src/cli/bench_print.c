/* What `tare bench` prints: text, or one JSON object. A number that was not measured is absent in
 * the text and null in JSON. */
#include <string.h>
#include "cli/bench.h"

#define TOP_OPS 24 /* lines of the text */

static double share(double have, double roof)
{
    return roof > 0 ? have / roof : 0;
}

static void number(jw *w, const char *key, double v, bool known)
{
    jw_key(w, key);
    if (known)
        jw_f64(w, v);
    else
        jw_null(w);
}

/* ---- JSON ---------------------------------------------------------------------------------------
 */

static void json_ops(jw *w, const char *key, const bench_ops *ops, const kern_roof *roof)
{
    double steps = ops->steps > 0 ? (double)ops->steps : 1;
    jw_key(w, key);
    if (!ops->v) {
        jw_null(w);
        return;
    }
    jw_arr(w);
    for (int i = 0; i < ops->n; i++) {
        const engine_op_time *t = &ops->v[i];
        bool timed = t->seconds > 0, moved = timed && t->bytes > 0;
        double gbs = moved ? t->bytes / t->seconds / 1e9 : 0;
        jw_obj(w);
        jw_kstr(w, "op", t->op);
        jw_kstr(w, "shape", t->shape);
        jw_kf64(w, "calls_per_step", (double)t->calls / steps);
        jw_kf64(w, "us", t->seconds / (double)t->calls * 1e6);
        jw_kf64(w, "us_per_step", t->seconds / steps * 1e6);
        number(w, "gbs", gbs, moved);
        number(w, "share", share(gbs, roof->read_gbs), moved && roof->read_gbs > 0);
        number(w, "tflops", timed ? t->flops / t->seconds / 1e12 : 0, timed && t->flops > 0);
        jw_end_obj(w);
    }
    jw_end_arr(w);
}

static void json_row(jw *w, const bench_row *row, const kern_roof *roof)
{
    jw_obj(w);
    jw_ki64(w, "batch", row->batch);
    jw_ki64(w, "prompt_tokens", row->context);
    number(w, "ttft_ms", row->ttft_ms, row->prefilled);
    number(w, "ttft_last_ms", row->first_all_ms, row->prefilled);
    number(w, "prefill_tokens_per_s", row->prefill, row->prefilled);
    number(w, "tpot_ms", row->tpot_ms, row->tpot_ms > 0);
    number(w, "forward_ms", row->forward_ms, row->forward_ms > 0);
    jw_kf64(w, "tokens_per_s", row->decode);
    number(w, "weights_gbs", row->weights_gbs, row->weights_gbs > 0);
    number(w, "read_gbs", row->step_gbs, row->step_gbs > 0);
    number(w, "share", share(row->step_gbs, roof->read_gbs),
           row->step_gbs > 0 && roof->read_gbs > 0);
    json_ops(w, "operators", &row->ops[0], roof);
    json_ops(w, "prompt_operators", &row->ops[1], roof);
    jw_end_obj(w);
}

static void json_head(jw *w, const opts *o, const bench_plan *p, const bench_report *r)
{
    const engine_info *i = &r->info;
    jw_kstr(w, "model", r->shape ? NULL : i->model);
    jw_kstr(w, "shape", r->shape ? i->model : NULL);
    jw_kbool(w, "random_weights", r->shape);
    if (r->shape) jw_kstr(w, "note", "random weights: speed only");
    jw_kstr(w, "architecture", i->architecture);
    jw_kstr(w, "spec", i->spec);
    jw_kstr(w, "activation", i->activation);
    jw_kstr(w, "kv", i->kv_dtype);
    jw_kstr(w, "device", i->device);
    jw_ki64(w, "threads", i->threads);
    jw_ki64(w, "output_tokens", p->output);
    jw_ki64(w, "chunk_tokens", i->chunk);
    jw_ki64(w, "repeat", o->v[OPT_bench_repeat].i);
    jw_kf64(w, "load_seconds", i->load_seconds);
    jw_kstr(w, "plans", *i->plans ? i->plans : NULL);
    jw_key(w, "memory");
    jw_obj(w);
    jw_ki64(w, "predicted_bytes", (int64_t)i->predicted_bytes);
    jw_ki64(w, "actual_bytes", (int64_t)i->actual_bytes);
    jw_ki64(w, "weight_bytes", (int64_t)i->weight_bytes);
    jw_ki64(w, "linear_bytes", (int64_t)i->linear_bytes);
    jw_ki64(w, "workspace_bytes", (int64_t)i->workspace_bytes);
    jw_ki64(w, "kv_pool_bytes", (int64_t)i->kv_pool_bytes);
    jw_ki64(w, "kv_bytes_per_token", (int64_t)i->kv_bytes_per_token);
    jw_ki64(w, "predicted_weight_bytes", (int64_t)i->predicted_weights);
    jw_ki64(w, "device_free_bytes", (int64_t)i->device_free);
    jw_ki64(w, "device_taken_bytes", (int64_t)i->device_taken);
    jw_end_obj(w);
    jw_key(w, "roof");
    jw_obj(w);
    number(w, "read_gbs", r->roof.read_gbs, r->roof.read_gbs > 0);
    number(w, "bf16_tflops", r->roof.bf16_tflops, r->roof.bf16_tflops > 0);
    number(w, "fp8_tflops", r->roof.fp8_tflops, r->roof.fp8_tflops > 0);
    number(w, "int8_tops", r->roof.int8_tops, r->roof.int8_tops > 0);
    jw_end_obj(w);
}

/* ---- text ---------------------------------------------------------------------------------------
 */

static void text_op(const engine_op_time *t, double steps, double all, const kern_roof *roof,
                    buf *b)
{
    double gbs = t->seconds > 0 ? t->bytes / t->seconds / 1e9 : 0;
    buf_printf(b, "  %-14s %-44s %9.1f %9.2f %9.1f %5.1f%%", t->op, t->shape,
               (double)t->calls / steps, t->seconds / (double)t->calls * 1e6,
               t->seconds / steps * 1e6, 100 * t->seconds / all);
    if (gbs > 0)
        buf_printf(b, " %8.1f %5.1f%%", gbs, 100 * share(gbs, roof->read_gbs));
    else
        buf_printf(b, " %8s %6s", "-", "-");
    if (t->flops > 0 && t->seconds > 0) buf_printf(b, " %8.2f", t->flops / t->seconds / 1e12);
    buf_putc(b, '\n');
}

static void text_ops(const bench_row *row, const char *what, const bench_ops *ops,
                     const kern_roof *roof, buf *b)
{
    double steps = ops->steps > 0 ? (double)ops->steps : 1, all = 0, rest = 0;
    if (!ops->v) return;
    for (int i = 0; i < ops->n; i++)
        all += ops->v[i].seconds;
    buf_printf(b,
               "\n%s, batch %lld, context %lld: operators one by one, without graphs, %.0f steps\n",
               what, (long long)row->batch, (long long)row->context, steps);
    buf_printf(b, "  %-14s %-44s %9s %9s %9s %6s %8s %6s %8s\n", "operator", "shape", "calls/step",
               "us", "us/step", "time", "GB/s", "roof", "TFLOP/s");
    for (int i = 0; i < ops->n; i++)
        if (i < TOP_OPS)
            text_op(&ops->v[i], steps, all > 0 ? all : 1, roof, b);
        else
            rest += ops->v[i].seconds;
    if (rest > 0) buf_printf(b, "  %-14s %.1f us/step\n", "others", rest / steps * 1e6);
    buf_printf(b, "  %-14s %.1f us/step\n", "all", all / steps * 1e6);
}

static void text_row(const bench_row *row, const kern_roof *roof, buf *b)
{
    buf_printf(b, "batch %lld  context %lld  ", (long long)row->batch, (long long)row->context);
    if (row->prefilled)
        buf_printf(b, "TTFT %.1f ms, the last %.1f ms (%.0f prompt tokens/s)  ", row->ttft_ms,
                   row->first_all_ms, row->prefill);
    if (row->tpot_ms > 0)
        buf_printf(b, "TPOT %.3f ms", row->tpot_ms);
    else
        buf_printf(b, "TPOT not measured: no step had the whole batch (--output-tokens)");
    if (row->forward_ms > 0) buf_printf(b, ", the model %.3f", row->forward_ms);
    buf_printf(b, " (%.1f tokens/s)", row->decode);
    if (row->step_gbs > 0 && roof->read_gbs > 0)
        buf_printf(b, "  weights and KV %.1f GB/s: %.0f %% of the roof", row->step_gbs,
                   100 * share(row->step_gbs, roof->read_gbs));
    buf_putc(b, '\n');
}

static void text_head(const bench_plan *p, const bench_report *r, buf *b)
{
    const engine_info *i = &r->info;
    const kern_roof *roof = &r->roof;
    buf_printf(b, "%s%s  %s  KV %s  activations %s  %s  %d threads  %s\n", r->shape ? "shape " : "",
               i->model, i->spec, i->kv_dtype, i->activation, i->device, i->threads,
               i->cpu_features);
    if (r->shape)
        buf_printf(b,
                   "random weights: speed only; decoding starts from a cache of random "
                   "numbers%s\n",
                   p->prefill ? "" : ", no prompts were computed");
    buf_printf(b,
               "loaded in %.1f s; weights and workspace %.1f MB (%.1f MB predicted), KV pool %.1f "
               "MB; steps of at most %lld tokens\n",
               i->load_seconds, (double)i->actual_bytes / 1e6, (double)i->predicted_bytes / 1e6,
               (double)i->kv_pool_bytes / 1e6, (long long)i->chunk);
    if (*i->plans) buf_printf(b, "plans of linears: %s\n", i->plans);
    if (roof->read_gbs <= 0) return;
    buf_printf(b, "roof: reads %.1f GB/s", roof->read_gbs);
    if (roof->bf16_tflops > 0) buf_printf(b, ", bf16 %.0f TFLOP/s", roof->bf16_tflops);
    if (roof->fp8_tflops > 0) buf_printf(b, ", fp8 %.0f TFLOP/s", roof->fp8_tflops);
    if (roof->int8_tops > 0) buf_printf(b, ", int8 %.0f TOP/s", roof->int8_tops);
    buf_puts(b, ", measured now\n");
}

void bench_print(const opts *o, const bench_plan *p, const bench_report *r, buf *out)
{
    jw w;
    if (!o->v[OPT_json].given) {
        text_head(p, r, out);
        for (int i = 0; i < r->n_rows; i++)
            text_row(&r->rows[i], &r->roof, out);
        for (int i = 0; i < r->n_rows; i++) {
            text_ops(&r->rows[i], r->shape ? "decoding" : "prompts and decoding",
                     &r->rows[i].ops[0], &r->roof, out);
            text_ops(&r->rows[i], "prompts", &r->rows[i].ops[1], &r->roof, out);
        }
        return;
    }
    jw_init(&w, out, 0);
    jw_obj(&w);
    json_head(&w, o, p, r);
    jw_key(&w, "runs");
    jw_arr(&w);
    for (int i = 0; i < r->n_rows; i++)
        json_row(&w, &r->rows[i], &r->roof);
    jw_end_arr(&w);
    jw_end_obj(&w);
    buf_putc(out, '\n');
}
