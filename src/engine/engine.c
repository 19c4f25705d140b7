/* Opening, submitting, closing. Start-up order: checkpoint → dialect → device → plan → model → KV
 * pool → text → engine thread. What is predicted before loading is kept beside what loading took.
 */
#include "engine/engine_internal.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/file.h"
#include "base/log.h"
#include "kern/candidates.h"
#include "plan/plan.h"

const double engine_ttft_bounds[23] = {.001, .005, .01, .02, .04, .06,  .08,     .1,
                                       .25,  .5,   .75, 1,   2.5, 5,    7.5,     10,
                                       20,   40,   80,  160, 640, 2560, INFINITY};
const double engine_itl_bounds[23] = {.01, .025, .05, .075,     .1,       .15,      .2,      .3,
                                      .4,  .5,   .75, 1,        2.5,      5,        7.5,     10,
                                      20,  40,   80,  INFINITY, INFINITY, INFINITY, INFINITY};
const double engine_e2e_bounds[23] = {.3,  .5,  .8,  1,    1.5,  2,        2.5,     5,
                                      10,  15,  20,  30,   40,   50,       60,      120,
                                      240, 480, 960, 1920, 7680, INFINITY, INFINITY};

/* ---- text ---------------------------------------------------------------------------------------
 */

static int open_text(engine *en, err *e)
{
    int rc = 0;
    char *where = ckpt_tokenizer_where(en->c);
    buf js = {0}, cfg = {0}, tmpl = {0};
    TRY(ckpt_tokenizer_json(en->c, &js, e));
    TRY(ckpt_tokenizer_config(en->c, &cfg, e));
    if (js.len)
        TRY(tokenizer_open(&en->tok, js.data, js.len, cfg.data ? cfg.data : "", cfg.len, where, e));
    if (en->o.chat_template)
        TRY(file_read_all(&tmpl, en->o.chat_template, 16 << 20, e));
    else
        TRY(ckpt_chat_template(en->c, &tmpl, e));
    const char *from = en->o.chat_template ? en->o.chat_template : ckpt_path(en->c);
    if (tmpl.len) TRY(chat_template_open(&en->chat, tmpl.data, tmpl.len, from, e));
    buf_clear(&tmpl);
    if (en->chat && !en->o.chat_template)
        TRY(ckpt_chat_template_named(en->c, "tool_use", &tmpl, e));
    if (tmpl.len) TRY(chat_template_add_tools(en->chat, tmpl.data, tmpl.len, from, e));
out:
    free(where);
    buf_free(&js);
    buf_free(&cfg);
    buf_free(&tmpl);
    return rc;
}

static void add_eos(engine *en, int64_t id)
{
    if (id < 0 || id >= en->vocab || engine__is_eos(en, (int32_t)id) ||
        en->n_eos == (int)(sizeof en->eos / sizeof *en->eos))
        return;
    en->eos[en->n_eos++] = (int32_t)id;
}

/* Union of config.json, generation_config.json and the tokenizer's own end token. */
static void collect_eos(engine *en)
{
    const ckpt_config *c = ckpt_cfg(en->c);
    for (int i = 0; i < c->n_eos; i++)
        add_eos(en, c->eos[i]);
    if (en->tok) add_eos(en, tokenizer_eos(en->tok));
}

/* ---- memory -------------------------------------------------------------------------------------
 */

/* "auto" is what --quantization or the checkpoint asks for, else bf16; under activation dtype spec,
 * which computes 16-bit types in f32, f32. */
static int resolve_kv(engine *en, kern_act act, const kv_format **out, err *e)
{
    const char *text = en->o.kv_cache_dtype ? en->o.kv_cache_dtype : "auto";
    if (strcmp(text, "auto")) return kv_format_parse(text, out, e);
    const qaxis *kv = &en->q->kv;
    qspec asked = {.kv = {.type = NUM_BF16}};
    if (en->o.quantization && *en->o.quantization) {
        int rc = qspec_parse(en->o.quantization, &asked, e);
        if (rc < 0) return rc;
        if (qaxis_quantized(&asked.kv)) kv = &asked.kv;
    }
    if (qaxis_quantized(kv)) return kv_format_parse(num_infos[kv->type].name, out, e);
    return kv_format_parse(act == KERN_ACT_SPEC ? "f32" : "bf16", out, e);
}

static int predict(engine *en, const kv_format *kv, kern_act act, err *e)
{
    qspec scheme;
    plan_in in = {.cfg = ckpt_cfg(en->c),
                  .q = en->q,
                  .kv = kv->type,
                  .act = act,
                  .dev = en->dev,
                  .features = en->dev->features,
                  .threads = team_size(en->dev->team),
                  .ranks = kern_n_ranks(en->dev),
                  .context = 1,
                  .concurrency = en->max_running,
                  .chunk_tokens = en->chunk,
                  .page_tokens = en->page_tokens};
    plan_out out;
    in.context = en->max_len;
    if (en->o.quantization && *en->o.quantization && !strcmp(en->q->dialect->name, "plain")) {
        int rc = qspec_parse(en->o.quantization, &scheme, e);
        if (rc < 0) return rc;
        in.scheme = &scheme;
    }
    int rc = plan_compute(&in, &out, e);
    if (rc < 0) return rc;
    if (*out.refused) return err_set(e, ERR_UNSUPPORTED, "%s", out.refused);
    en->info.predicted_bytes = out.resident_weights + out.workspace;
    en->info.predicted_weights = out.resident_weights;
    en->info.graph_bytes = out.graphs;
    return 0;
}

static int too_small(const engine *en, uint64_t budget, uint64_t fixed, uint64_t page,
                     const char *source, err *e)
{
    return err_set(
        e, ERR_NOMEM,
        "not enough memory for %s: weights and workspace take %.0f MB, a KV page %.2f MB, and %.0f "
        "MB are allowed (%.2f of what is available "
        "by %s); raise --mem-fraction-static, quantize further, or lower --max-model-len",
        en->o.model, (double)fixed / 1e6, (double)page / 1e6, (double)budget / 1e6,
        en->o.mem_fraction, source);
}

/* Of a GPU they lie in memory of the machine. */
static uint64_t logits_bytes(const engine *en)
{
    return en->dev->be ? 0
                       : (uint64_t)plan_logit_rows(en->vocab, en->chunk, en->max_running) *
                             (uint64_t)en->vocab * sizeof(float);
}

/* What weights, workspace and pool may take together. On a GPU the fraction is that of weights and
 * pool, and what else there is must hold the workspace and graphs. */
static uint64_t budget_of(const engine *en, uint64_t available, uint64_t workspace)
{
    const uint64_t some = (uint64_t)((double)available * en->o.mem_fraction);
    const uint64_t graphs = en->info.graph_bytes,
                   most = available > graphs ? available - graphs : 0;
    if (!en->dev->be) return some;
    return some + workspace < most ? some + workspace : most;
}

/* Pool: what the options ask for, at most what the budget leaves. */
static int open_pool(engine *en, const kv_format *kv, uint64_t available, const char *source,
                     err *e)
{
    const kv_layer_shape *shapes;
    model_bytes mb;
    int n = model_kv_shapes(en->m, &shapes);
    int64_t pt = en->page_tokens;
    kv_sizes_of(kv->type, shapes, n, en->page_tokens, &en->kv);
    model_memory(en->m, &mb);
    uint64_t fixed = mb.prepared + mb.other + mb.workspace + logits_bytes(en) +
                     en->kv.state_bytes * (uint64_t)en->max_running,
             budget = budget_of(en, available, mb.workspace);
    kv_want want = {.context = en->max_len,
                    .seqs = en->max_running,
                    .chunk = en->chunk,
                    .tokens = en->o.max_total_tokens};
    int64_t pages[KV_GROUPS],
        fit = kv_pages_fit(&en->kv, budget > fixed ? budget - fixed : 0, &want, pages) * pt;
    if (fit < 16 || fixed >= budget)
        return too_small(en, budget, fixed, en->kv.page_bytes, source, e);
    if (fit < en->max_len) {
        if (en->o.max_model_len > 0)
            return err_set(e, ERR_NOMEM,
                           "--max-model-len %lld does not fit: the KV cache holds %lld tokens "
                           "within %.0f MB (%.2f of what is available by %s)",
                           (long long)en->o.max_model_len, (long long)fit, (double)budget / 1e6,
                           en->o.mem_fraction, source);
        log_warn(
            "context is limited to %lld tokens: that is what the KV cache holds in %.0f MB (by %s)",
            (long long)fit, (double)budget / 1e6, source);
        en->max_len = fit;
    }
    kv_pool_opts po = {.type = kv->type,
                       .page_tokens = en->page_tokens,
                       .n_pages = {pages[KV_FULL], pages[KV_WINDOW]},
                       .n_states = en->max_running};
    int rc = model_pool_open(en->m, &en->pool, &po, e);
    if (rc < 0) return rc;
    if (kv->type == KV_FP8_E4M3 && !model_k_scales(en->m)[0])
        log_info("KV cache fp8_e4m3 with scale 1.0: the checkpoint has no k_scale/v_scale; values "
                 "above 448 are clipped and counted");
    en->info.kv_bytes_per_token = en->kv.token_bytes;
    en->info.kv_pool_bytes = kv_pool_bytes(en->pool);
    en->info.kv_tokens = fit;
    if (en->kv.state_bytes && en->prefix_cache) {
        log_info("%s: linear-attention layers keep one state of a sequence, which holds no earlier "
                 "prefix: prompts share nothing, the prefix cache is off",
                 en->o.model);
        en->prefix_cache = false;
    }
    return kv_radix_open(&en->radix, en->pool, e);
}

static void *zeroed(size_t n, size_t size)
{
    return xcalloc(n ? n : 1, size);
}

static int open_buffers(engine *en, err *e)
{
    void *p = NULL;
    size_t row = sizeof(float) * (size_t)en->vocab;
    en->max_logit_rows = plan_logit_rows(en->vocab, en->chunk, en->max_running);
    int rc = kern_host_alloc(en->dev, &p, row * (size_t)en->max_logit_rows, e);
    if (rc < 0) return rc;
    en->logits = p;
    if (en->dev->be) {
        rc = kern_host_alloc(en->dev, &p, sizeof(kern_top) * (size_t)en->max_logit_rows, e);
        if (rc < 0) return rc;
        en->tops = p;
    }
    size_t T = (size_t)en->chunk;
    en->ids = zeroed(T, sizeof *en->ids);
    en->pos = zeroed(T, sizeof *en->pos);
    en->logit_rows = zeroed(T, sizeof *en->logit_rows);
    en->lp = zeroed(T, sizeof *en->lp);
    for (int g = 0; g < KV_GROUPS; g++) {
        en->slot[g] = zeroed(T, sizeof *en->slot[g]);
        en->seqs[g] = zeroed((size_t)en->max_running, sizeof *en->seqs[g]);
    }
    en->rope_len = zeroed((size_t)en->max_running, sizeof *en->rope_len);
    en->state = zeroed((size_t)en->max_running, sizeof *en->state);
    en->free_states = zeroed((size_t)en->max_running, sizeof *en->free_states);
    for (int i = en->max_running; i > 0; i--)
        en->free_states[en->n_free_states++] = i - 1;
    en->step = zeroed((size_t)en->max_running, sizeof *en->step);
    en->running = zeroed((size_t)en->max_running, sizeof *en->running);
    en->work = zeroed((size_t)en->vocab, sizeof *en->work);
    en->order = zeroed((size_t)en->vocab, sizeof *en->order);
    return 0;
}

/* ---- open ---------------------------------------------------------------------------------------
 */

static int check_opts(engine *en, err *e)
{
    engine_opts *o = &en->o;
    if (o->max_running == 0) o->max_running = 8;
    if (o->max_queued == 0) o->max_queued = 256;
    if (o->chunk_tokens == 0) o->chunk_tokens = 512;
    if (o->mem_fraction == 0) o->mem_fraction = 0.8;
    if (o->max_running < 1 || o->max_running > 4096)
        return err_set(e, ERR_USAGE, "--max-running-requests: %lld is not between 1 and 4096",
                       (long long)o->max_running);
    if (o->max_queued < 1)
        return err_set(e, ERR_USAGE, "--max-queued-requests: %lld is below 1",
                       (long long)o->max_queued);
    if (o->chunk_tokens < 1 || o->chunk_tokens > 65536)
        return err_set(e, ERR_USAGE, "--chunked-prefill-size: %lld is not between 1 and 65536",
                       (long long)o->chunk_tokens);
    if (o->page_tokens < 0 || o->page_tokens > 1024)
        return err_set(e, ERR_USAGE, "--page-size: %d is not between 0 and 1024", o->page_tokens);
    if (!(o->mem_fraction > 0 && o->mem_fraction <= 1))
        return err_set(e, ERR_USAGE, "--mem-fraction-static: %g is not between 0 and 1",
                       o->mem_fraction);
    if (o->max_model_len < 0 || o->max_total_tokens < 0)
        return err_set(e, ERR_USAGE, "--max-model-len and --max-total-tokens must not be negative");
    en->max_running = (int)o->max_running;
    en->chunk = o->chunk_tokens > o->max_running ? o->chunk_tokens : o->max_running;
    en->prefix_cache = !o->no_prefix_cache && !o->shape;
    return 0;
}

static void describe(engine *en, const kv_format *kv, kern_act act)
{
    engine_info *i = &en->info;
    buf spec = {0};
    model_bytes mb;
    qspec s = model_spec(en->m);
    const model_report_line *lines;
    int n = model_report(en->m, &lines);
    s.kv = (qaxis){.type = NUM_BF16};
    qspec_parse_axis(kv->name, 'k', &s.kv, NULL);
    qspec_format(&s, &spec);
    model_memory(en->m, &mb);
    snprintf(i->model, sizeof i->model, "%s", en->o.model);
    snprintf(i->architecture, sizeof i->architecture, "%s", ckpt_cfg(en->c)->architecture);
    snprintf(i->spec, sizeof i->spec, "%s", spec.data);
    snprintf(i->activation, sizeof i->activation, "%.47s (%s)", n ? lines[0].choice[0].act : "f32",
             kern_act_name(act));
    snprintf(i->kv_dtype, sizeof i->kv_dtype, "%s", kv->name);
    int at = 0, ranks = kern_n_ranks(en->dev);
    if (ranks > 1) at = snprintf(i->device, sizeof i->device, "%d x ", ranks);
    snprintf(i->device + at, sizeof i->device - (size_t)at, "%s: %.50s", en->dev->name,
             en->dev->what ? en->dev->what : cpu_model_name());
    buf origin = {0};
    ckpt_origin_words(en->c, &origin);
    snprintf(i->origin, sizeof i->origin, "%s", origin.data ? origin.data : "");
    buf_free(&origin);
    i->weight_bytes = mb.prepared + mb.other;
    i->linear_bytes = mb.prepared;
    i->weight_file_bytes = mb.file.total;
    i->workspace_bytes = mb.workspace + logits_bytes(en);
    i->actual_bytes = i->weight_bytes + i->workspace_bytes;
    i->max_len = en->max_len;
    i->chunk = en->chunk;
    i->windows = kv_pool_total(en->pool, KV_WINDOW) > 0;
    for (int k = 0; k < n; k++)
        i->experts = i->experts || strstr(lines[k].what, "expert");
    i->prefix_cache = en->prefix_cache;
    i->max_running = en->max_running;
    i->vocab = en->vocab;
    i->threads = team_size(en->dev->team) * ranks;
    cpu_format(en->dev->features, i->cpu_features, sizeof i->cpu_features);
    kern_plans_used(en->dev, i->plans, sizeof i->plans);
    buf_free(&spec);
}

/* The context that the model was made for: some rotary variants stretch what the config calls the
 * maximum, others (llama3, longrope) state the stretched length themselves. */
static int64_t native_len(const ckpt_config *c)
{
    double n = (double)c->max_position, f = c->rope.factor;
    if (c->rope.kind == ROPE_LINEAR || c->rope.kind == ROPE_DYNAMIC)
        n *= f;
    else if (c->rope.kind == ROPE_YARN)
        n = fmax(n, (double)c->rope.original_max_position * f);
    return n < (double)(INT32_MAX / 2) ? (int64_t)n : INT32_MAX / 2;
}

static bool is_scheme(const char *name)
{
    for (int i = 0; i < qspec_n_presets; i++)
        if (!strcmp(qspec_presets[i].name, name)) return true;
    return false;
}

/* --quantization compressed-tensors, as other engines spell it: asserts how the checkpoint is
 * written and says nothing about the scheme. "fp8" is both, and a scheme for plain weights. */
static int dialect_assertion(engine *en, err *e)
{
    const char *want = en->o.quantization, *have = en->q->dialect->name;
    const quant_dialect *d = NULL;
    for (int i = 0; want && i < quant_n_dialects; i++)
        if (!strcmp(want, quant_dialects[i]->name)) d = quant_dialects[i];
    if (!d || (!strcmp(have, "plain") && is_scheme(want))) return 0;
    if (d != en->q->dialect)
        return err_set(e, ERR_USAGE,
                       "--quantization %s: %s is %s; leave the option out, or name a scheme such "
                       "as fp8 or w:int4,g128",
                       want, en->o.model, strcmp(have, "plain") ? have : "not quantized");
    free((void *)(uintptr_t)want);
    en->o.quantization = NULL;
    return 0;
}

/* A machine without such a device says so, and the CPU runs the model; --strict makes it an error.
 */
static int open_device(engine *en, const kern_opts *o, err *e)
{
    err why = {0};
    kern_opts cpu = *o;
    int rc = kern_open(&en->dev, o, &why);
    if (rc == -ERR_UNSUPPORTED && !en->o.strict && o->device && !strncmp(o->device, "cuda", 4)) {
        log_warn("%s; the model runs on the CPU", why.msg);
        cpu.device = NULL;
        cpu.ranks = 1;
        rc = kern_open(&en->dev, &cpu, e);
    } else if (rc < 0) {
        return err_set(e, why.code, "%s", why.msg);
    }
    if (rc < 0) return rc;
    en->page_tokens = en->o.page_tokens      ? en->o.page_tokens
                      : en->dev->page_tokens ? en->dev->page_tokens
                                             : 16;
    if (en->dev->page_tokens && en->page_tokens != en->dev->page_tokens)
        log_warn(
            "--page-size %d: fast attention of this device needs pages of %d; plain kernels run",
            en->page_tokens, en->dev->page_tokens);
    return 0;
}

static void tell_memory(engine *en)
{
    engine_info *i = &en->info;
    uint64_t all, left;
    if (!kern_memory(en->dev, &all, &left)) return;
    i->device_free = en->dev->memory_bytes;
    i->device_taken = i->device_free > left ? i->device_free - left : 0;
    log_info(
        "memory of %s: weights %.1f MB (%.1f predicted), workspace %.1f (%.1f), KV %.1f, in all "
        "%.1f (%.1f); taken on the card since it was opened %.1f of %.1f MB, %.1f were taken "
        "before; graphs of steps come later, at most about %.0f MB",
        en->dev->name, (double)i->weight_bytes / 1e6, (double)i->predicted_weights / 1e6,
        (double)i->workspace_bytes / 1e6, (double)(i->predicted_bytes - i->predicted_weights) / 1e6,
        (double)i->kv_pool_bytes / 1e6, (double)(i->actual_bytes + i->kv_pool_bytes) / 1e6,
        (double)(i->predicted_bytes + i->kv_pool_bytes) / 1e6, (double)i->device_taken / 1e6,
        (double)i->device_free / 1e6, (double)(all - i->device_free) / 1e6,
        (double)i->graph_bytes / 1e6);
}

static int load(engine *en, err *e)
{
    int rc = 0;
    double t0 = clock_seconds();
    const char *source;
    uint64_t available = mem_available_bytes(&source);
    const kv_format *kv = NULL;
    kern_act act;
    kern_opts ko = {.device = en->o.device, .threads = en->o.threads, .ranks = en->o.tp};
    TRY(check_opts(en, e));
    TRY(kern_act_parse(en->o.activation_dtype ? en->o.activation_dtype : "auto", &act, e));
    TRY(cpu_parse(en->o.cpu_features ? en->o.cpu_features : "auto", &ko.cpu_features, e));
    if (en->o.shape)
        TRY(ckpt_open_shape(&en->c, en->o.model, en->o.shape, e));
    else
        TRY(ckpt_open(&en->c, en->o.model, e));
    quant_opts qo = {.gptq_zeros = en->o.gptq_zeros,
                     .dequantize = en->o.dequantize,
                     .kv_scales = en->o.kv_scales};
    TRY(quant_open_as(&en->q, en->c, &qo, e));
    if (en->o.shape && ckpt_cfg(en->c)->quant)
        return err_set(
            e, ERR_USAGE,
            "%s: has a quantization of its own, but a shape has no weights; take the key "
            "out and name the scheme",
            ckpt_cfg(en->c)->quant_where);
    TRY(dialect_assertion(en, e));
    TRY(resolve_kv(en, act, &kv, e));
    const ckpt_config *cfg = ckpt_cfg(en->c);
    for (int i = 0; i < cfg->n_warnings; i++)
        log_warn("%s", cfg->warnings[i]);
    for (int i = 0; i < en->q->n_warnings; i++)
        log_warn("%s", en->q->warnings[i]);
    en->max_len = native_len(cfg);
    if (en->o.max_model_len > 0) {
        if (en->o.max_model_len > en->max_len)
            log_warn("--max-model-len %lld is more than the model was made for (%lld): answers may "
                     "be poor",
                     (long long)en->o.max_model_len, (long long)en->max_len);
        en->max_len = en->o.max_model_len;
    }
    const arch_row *arch;
    TRY(arch_find(cfg, &arch, e));
    TRY(open_device(en, &ko, e));
    if (en->dev->memory_bytes) {
        available = en->dev->memory_bytes;
        source = kern_n_ranks(en->dev) > 1 ? "each GPU" : "the GPU";
    } else if (kern_n_ranks(en->dev) > 1) {
        available /= (unsigned)kern_n_ranks(en->dev); /* all share the machine's */
        log_warn(
            "--tp %d on the CPU only divides its threads, which is slower than one model on all "
            "of them; it is there for tests",
            kern_n_ranks(en->dev));
    }
    if (kern_n_ranks(en->dev) > 1)
        log_info("%d devices run the model together; sizes below are those of one",
                 kern_n_ranks(en->dev));
    TRY(predict(en, kv, act, e));
    model_opts mo = {.act = act,
                     .quantize = en->o.quantization,
                     .strict = en->o.strict,
                     .random = en->o.shape != NULL,
                     .max_rows = en->chunk,
                     .max_logit_rows =
                         plan_logit_rows(cfg->vocab_size, en->chunk, en->max_running)};
    TRY(model_open(&en->m, en->q, en->dev, &mo, e));
    en->vocab = model_vocab(en->m);
    TRY(open_pool(en, kv, available, source, e));
    TRY(open_buffers(en, e));
    if (en->o.shape)
        TRY(engine__fill_cache(en, e));
    else
        TRY(open_text(en, e));
    collect_eos(en);
    describe(en, kv, act);
    en->info.load_seconds = clock_seconds() - t0;
    log_info("%s: %s, %s, weights %.1f MB resident (%.1f MB predicted with workspace, %.1f MB "
             "actual), KV %lld tokens in %.1f MB, activations %s, %.2f s",
             en->o.model, en->info.architecture, en->info.spec, (double)en->info.weight_bytes / 1e6,
             (double)en->info.predicted_bytes / 1e6, (double)en->info.actual_bytes / 1e6,
             (long long)en->info.kv_tokens, (double)en->info.kv_pool_bytes / 1e6,
             en->info.activation, en->info.load_seconds);
    tell_memory(en);
    if (*en->info.plans) log_info("plans of linears on the GPU: %s", en->info.plans);
out:
    return rc;
}

static const char *keep(const char *s)
{
    return s ? xstrdup(s) : NULL;
}

int engine_open(engine **out, const engine_opts *o, err *e)
{
    engine *en = xcalloc(1, sizeof *en);
    *out = NULL;
    en->o = *o;
    const char **texts[] = {&en->o.model,          &en->o.device,           &en->o.cpu_features,
                            &en->o.kv_cache_dtype, &en->o.activation_dtype, &en->o.quantization,
                            &en->o.chat_template,  &en->o.gptq_zeros,       &en->o.kv_scales,
                            &en->o.shape};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        *texts[i] = keep(*texts[i]);
    pthread_mutex_init(&en->lock, NULL);
    pthread_cond_init(&en->wake, NULL);
    int rc = load(en, e);
    if (rc == 0) {
        int err_no = pthread_create(&en->thread, NULL, engine__loop, en);
        if (err_no)
            rc = err_errno(e, err_no, "the engine thread could not be started");
        else
            en->thread_up = true;
    }
    if (rc < 0) {
        engine_close(en, 0);
        return rc;
    }
    *out = en;
    return 0;
}

void engine_close(engine *en, double drain_seconds)
{
    if (!en) return;
    if (en->thread_up) {
        pthread_mutex_lock(&en->lock);
        en->refuse = en->stop = true;
        en->drain_until = clock_seconds() + drain_seconds;
        pthread_cond_signal(&en->wake);
        pthread_mutex_unlock(&en->lock);
        pthread_join(en->thread, NULL);
    }
    while (en->inbox) {
        request *r = en->inbox;
        en->inbox = r->next;
        engine__finish(en, r, FINISH_CANCELLED, -1, NULL, NULL);
        engine__request_free(r);
    }
    kv_radix_close(en->radix);
    kv_pool_close(en->pool);
    model_close(en->m);
    if (en->logits) kern_host_free(en->dev, en->logits);
    if (en->tops) kern_host_free(en->dev, en->tops);
    kern_close(en->dev);
    quant_close(en->q);
    ckpt_close(en->c);
    tokenizer_close(en->tok);
    chat_template_close(en->chat);
    void *arrays[] = {en->rope_len, en->state,         en->free_states,     en->ids,
                      en->pos,      en->slot[KV_FULL], en->slot[KV_WINDOW], en->logit_rows,
                      en->lp,       en->seqs[KV_FULL], en->seqs[KV_WINDOW], en->step,
                      en->running,  en->work,          en->order,           en->cancels};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        free(arrays[i]);
    const char *texts[] = {en->o.model,          en->o.device,           en->o.cpu_features,
                           en->o.kv_cache_dtype, en->o.activation_dtype, en->o.quantization,
                           en->o.chat_template,  en->o.gptq_zeros,       en->o.kv_scales,
                           en->o.shape};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        free((void *)(uintptr_t)texts[i]);
    pthread_mutex_destroy(&en->lock);
    pthread_cond_destroy(&en->wake);
    free(en);
}
