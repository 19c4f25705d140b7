/* tare bench: TTFT, TPOT and tokens a second of the served path, medians of several runs, and the
 * share of the memory bandwidth that decoding reaches (bytes of weights read a token / TPOT /
 * measured read bandwidth of a buffer of that size on the same threads). */
#include "cli/options.h"
#include "kern/kern.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct bench_run {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    int left;
    double ttft, total;
    int64_t out;
    err e;
} bench_run;

static void bench_sink(void *arg, const engine_event *ev)
{
    bench_run *r = arg;
    if (ev->kind != EV_DONE) return;
    pthread_mutex_lock(&r->lock);
    r->ttft += ev->ttft_s;
    if (ev->total_s > r->total) r->total = ev->total_s;
    r->out += ev->output_tokens;
    if (ev->error) r->e = *ev->error;
    if (--r->left == 0) pthread_cond_signal(&r->cond);
    pthread_mutex_unlock(&r->lock);
}

static int one_run(const opts *o, engine *en, int64_t n_prompt, int run, bench_run *r, err *e)
{
    int batch = (int)o->v[OPT_bench_batch].i, sent = 0, rc = 0;
    int32_t *ids_ = xmalloc(sizeof *ids_ * (size_t)n_prompt);
    *r = (bench_run){.left = batch};
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->cond, NULL);
    for (; sent < batch; sent++) {
        req_params p;
        uint64_t id;
        /* Different ids in every run, so that no prefix is found in the cache. */
        for (int64_t i = 0; i < n_prompt; i++)
            ids_[i] = (int32_t)((uint64_t)(i * 7919 + run * 104729 + sent * 15485863 + 11) %
                                (uint64_t)engine_vocab(en));
        req_params_default(&p);
        p.prompt = ids_;
        p.n_prompt = n_prompt;
        p.max_tokens = o->v[OPT_bench_output].i;
        p.sample.temperature = 0;
        p.ignore_eos = true;
        p.want = WANT_TOKENS;
        p.sink = bench_sink;
        p.sink_arg = r;
        rc = engine_submit(en, &p, &id, e);
        if (rc < 0) break;
    }
    pthread_mutex_lock(&r->lock);
    r->left -= batch - sent;
    while (r->left > 0)
        pthread_cond_wait(&r->cond, &r->lock);
    pthread_mutex_unlock(&r->lock);
    free(ids_);
    if (rc >= 0 && r->e.code) {
        *e = r->e;
        rc = -r->e.code;
    }
    return rc;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

typedef struct bench_result {
    double ttft_ms, tpot_ms, prefill, decode, bandwidth, read_gbs;
} bench_result;

static int measure(const opts *o, engine *en, bench_result *out, err *e)
{
    int rc = 0, n = (int)o->v[OPT_bench_repeat].i, batch = (int)o->v[OPT_bench_batch].i;
    double ttft[64], tpot[64];
    int64_t n_prompt = o->v[OPT_bench_prompt].i, n_out = o->v[OPT_bench_output].i;
    if (n < 1 || n > 64 || batch < 1 || n_prompt < 1 || n_out < 2)
        return err_set(
            e, ERR_USAGE,
            "--repeat 1 to 64, --batch and --prompt-tokens from 1, --output-tokens from 2");
    bench_run r;
    TRY(one_run(o, en, n_prompt, 1000, &r, e)); /* warm-up */
    for (int i = 0; i < n; i++) {
        TRY(one_run(o, en, n_prompt, i, &r, e));
        ttft[i] = r.ttft / batch;
        tpot[i] = (r.total - ttft[i]) / (double)(n_out - 1);
    }
    out->ttft_ms = median(ttft, n) * 1e3;
    out->tpot_ms = median(tpot, n) * 1e3;
    out->prefill = (double)(n_prompt * batch) / (out->ttft_ms / 1e3);
    out->decode = (double)batch / (out->tpot_ms / 1e3);
out:
    return rc;
}

static int roof(const opts *o, const engine_info *info, bench_result *r, err *e)
{
    kern_dev *d = NULL;
    kern_opts k = {.threads = (int)o->v[OPT_threads].i};
    int rc = 0;
    TRY(cpu_parse(o->v[OPT_cpu_features].s, &k.cpu_features, e));
    TRY(kern_open(&d, &k, e));
    r->bandwidth = kern_measure_bandwidth(d, (size_t)info->linear_bytes);
    r->read_gbs = (double)info->linear_bytes / (r->tpot_ms / 1e3) / 1e9;
out:
    kern_close(d);
    return rc;
}

static void print(const opts *o, const engine_info *info, const bench_result *r)
{
    buf b = {0};
    double share = r->bandwidth > 0 ? r->read_gbs / r->bandwidth : 0;
    if (o->v[OPT_json].given) {
        jw w;
        jw_init(&w, &b, 0);
        jw_obj(&w);
        jw_kstr(&w, "model", info->model);
        jw_kstr(&w, "spec", info->spec);
        jw_kstr(&w, "activation", info->activation);
        jw_kstr(&w, "kv", info->kv_dtype);
        jw_ki64(&w, "threads", info->threads);
        jw_ki64(&w, "prompt_tokens", o->v[OPT_bench_prompt].i);
        jw_ki64(&w, "output_tokens", o->v[OPT_bench_output].i);
        jw_ki64(&w, "batch", o->v[OPT_bench_batch].i);
        jw_kf64(&w, "ttft_ms", r->ttft_ms);
        jw_kf64(&w, "tpot_ms", r->tpot_ms);
        jw_kf64(&w, "prefill_tokens_per_s", r->prefill);
        jw_kf64(&w, "tokens_per_s", r->decode);
        jw_key(&w, "roof");
        jw_obj(&w);
        jw_kf64(&w, "bandwidth_gbs", r->bandwidth);
        jw_kf64(&w, "read_gbs", r->read_gbs);
        jw_kf64(&w, "share", share);
        jw_end_obj(&w);
        jw_end_obj(&w);
        buf_putc(&b, '\n');
    } else {
        buf_printf(&b, "%s  %s  KV %s  activations %s  %d threads  %s\n", info->model, info->spec,
                   info->kv_dtype, info->activation, info->threads, info->cpu_features);
        buf_printf(&b, "TTFT %.1f ms (%.0f prompt tokens/s)  TPOT %.3f ms (%.1f tokens/s)\n",
                   r->ttft_ms, r->prefill, r->tpot_ms, r->decode);
        buf_printf(
            &b, "weights read %.1f GB/s of %.1f GB/s measured for %.0f MB: %.0f %% of the roof\n",
            r->read_gbs, r->bandwidth, (double)info->linear_bytes / 1e6, 100 * share);
    }
    cli_print(&b);
    buf_free(&b);
}

int cmd_bench(const opts *o, err *e)
{
    int rc = 0;
    engine *en = NULL;
    engine_opts eo;
    engine_info info;
    bench_result r = {0};
    const char *model;
    TRY(opts_model(o, &model, e));
    opts_engine(o, o->v, model, &eo);
    eo.max_running = o->v[OPT_bench_batch].i;
    if (!eo.max_model_len)
        eo.max_model_len = o->v[OPT_bench_prompt].i + o->v[OPT_bench_output].i + 16;
    TRY(engine_open(&en, &eo, e));
    TRY(measure(o, en, &r, e));
    engine_get_info(en, &info);
    engine_close(en, 0);
    en = NULL;
    TRY(roof(o, &info, &r, e));
    print(o, &info, &r);
    rc = 0;
out:
    engine_close(en, 0);
    return rc;
}
