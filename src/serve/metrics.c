/* /metrics: Prometheus text 0.0.4. Names are vLLM's with the prefix `tare:`, so that its dashboards
 * work after a change of prefix; counters end in _total. Histograms come from the engine as one
 * count per bucket; Prometheus wants each bucket to include those below it. */
#include "serve/serve_int.h"
#include <math.h>
#include <string.h>

static void label_value(buf *b, const char *s)
{
    for (; *s; s++) {
        if (*s == '\\' || *s == '"') buf_putc(b, '\\');
        if (*s == '\n')
            buf_puts(b, "\\n");
        else
            buf_putc(b, *s);
    }
}

typedef struct page {
    buf out;
    buf labels; /* model_name="…",engine="0" */
} page;

static void head(page *p, const char *name, const char *type, const char *help)
{
    buf_printf(&p->out, "# HELP tare:%s %s\n# TYPE tare:%s %s\n", name, help, name, type);
}

static void sample(page *p, const char *name, const char *more, double v)
{
    buf_printf(&p->out, "tare:%s{%s%s%s} %.17g\n", name, p->labels.data, *more ? "," : "", more, v);
}

static void one(page *p, const char *name, const char *type, const char *help, double v)
{
    head(p, name, type, help);
    sample(p, name, "", v);
}

static void histogram(page *p, const char *name, const char *help, const double bounds[23],
                      const uint64_t counts[24], double sum)
{
    char le[48], series[96];
    uint64_t all = counts[23];
    head(p, name, "histogram", help);
    snprintf(series, sizeof series, "%s_bucket", name);
    for (int i = 0; i < 23 && isfinite(bounds[i]); i++) {
        snprintf(le, sizeof le, "le=\"%g\"", bounds[i]);
        sample(p, series, le, (double)counts[i]);
    }
    sample(p, series, "le=\"+Inf\"", (double)all);
    snprintf(series, sizeof series, "%s_sum", name);
    sample(p, series, "", sum);
    snprintf(series, sizeof series, "%s_count", name);
    sample(p, series, "", (double)all);
}

static void engine_metrics(page *p, const engine_stats *t)
{
    double pages = t->kv_pages_total > 0 ? (double)t->kv_pages_total : 1;
    one(p, "num_requests_running", "gauge", "Requests in the running batch.", (double)t->running);
    one(p, "num_requests_waiting", "gauge", "Requests waiting to run.", (double)t->waiting);
    one(p, "kv_cache_usage_perc", "gauge", "Share of KV pages in use, 0 to 1.",
        (double)t->kv_pages_used / pages);
    one(p, "kv_pages_used", "gauge", "KV pages in use.", (double)t->kv_pages_used);
    one(p, "kv_pages", "gauge", "KV pages there are.", (double)t->kv_pages_total);
    one(p, "prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.",
        (double)t->prompt_tokens);
    one(p, "prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.",
        (double)t->cached_tokens);
    one(p, "num_preemptions_total", "counter", "Requests pushed out to make room.",
        (double)t->preemptions);
    one(p, "prompt_tokens_total", "counter", "Prompt tokens.", (double)t->prompt_tokens);
    one(p, "generation_tokens_total", "counter", "Generated tokens.", (double)t->output_tokens);
    one(p, "requests_total", "counter", "Requests taken.", (double)t->requests);
    one(p, "engine_steps_total", "counter", "Steps of the engine loop.", (double)t->steps);
    one(p, "engine_busy_seconds_total", "counter", "Time spent in steps.", t->busy_seconds);
    one(p, "kv_clipped_total", "counter", "KV values clipped to the range of the KV format.",
        (double)t->kv_clipped);
    head(p, "request_success_total", "counter", "Requests ended, by reason.");
    sample(p, "request_success_total", "finished_reason=\"stop\"", (double)t->finished_stop);
    sample(p, "request_success_total", "finished_reason=\"length\"", (double)t->finished_length);
    sample(p, "request_success_total", "finished_reason=\"abort\"", (double)t->cancelled);
    sample(p, "request_success_total", "finished_reason=\"error\"", (double)t->failed);
    histogram(p, "time_to_first_token_seconds", "From arrival to the first token.",
              engine_ttft_bounds, t->ttft, t->ttft_sum);
    histogram(p, "inter_token_latency_seconds", "Between two tokens of a request.",
              engine_itl_bounds, t->itl, t->itl_sum);
    histogram(p, "e2e_request_latency_seconds", "From arrival to the end.", engine_e2e_bounds,
              t->e2e, t->e2e_sum);
}

static void server_metrics(page *p, struct server *s)
{
    char label[32];
    engine_info i;
    engine_get_info(s->en, &i);
    head(p, "http_requests_total", "counter", "HTTP replies, by class of status.");
    for (int k = 2; k < 6; k++) {
        snprintf(label, sizeof label, "code=\"%dxx\"", k);
        sample(p, "http_requests_total", label, (double)atomic_load(&s->http_counts[k]));
    }
    one(p, "requests_refused_total", "counter", "Requests answered 429 because the queue was full.",
        (double)atomic_load(&s->refused_busy));
    one(p, "clients_gone_total", "counter", "Clients that left before their answer was complete.",
        (double)atomic_load(&s->client_gone));
    one(p, "http_generations", "gauge", "Generation requests with a client.",
        (double)serve_running(s));
    one(p, "load_seconds", "gauge", "Time it took to load the model.", i.load_seconds);
    one(p, "weight_bytes", "gauge", "Bytes of weights in memory.", (double)i.weight_bytes);
    one(p, "kv_pool_bytes", "gauge", "Bytes of the KV pool.", (double)i.kv_pool_bytes);
    head(p, "cache_config_info", "gauge", "What runs; always 1.");
    buf info = {0};
    buf_puts(&info, "scheme=\"");
    label_value(&info, i.spec);
    buf_puts(&info, "\",cache_dtype=\"");
    label_value(&info, i.kv_dtype);
    buf_puts(&info, "\"");
    sample(p, "cache_config_info", info.data, 1);
    buf_free(&info);
}

enum MHD_Result serve__metrics(exchange *x)
{
    page p = {0};
    engine_stats st;
    engine_get_stats(x->s->en, &st);
    buf_puts(&p.labels, "model_name=\"");
    label_value(&p.labels, x->s->names[0]);
    buf_puts(&p.labels, "\",engine=\"0\"");
    engine_metrics(&p, &st);
    server_metrics(&p, x->s);
    buf_free(&p.labels);
    return serve__reply(x, 200, "text/plain; version=0.0.4; charset=utf-8", &p.out);
}
