/* What several commands share: which model, engine options, evaluation options, output. */
#include "cli/options.h"
#include "base/file.h"
#include <stdio.h>
#include <string.h>

int opts_model(const opts *o, const char **model, err *e)
{
    if (o->v[OPT_model].given)
        *model = o->v[OPT_model].s;
    else if (o->n_args > 0)
        *model = o->args[0];
    else
        return err_set(e, ERR_USAGE, "no model given: `tare %s %s`", commands[o->cmd].name,
                       commands[o->cmd].args);
    return 0;
}

static const char *text_or_null(const opt_val *v)
{
    return v->s && *v->s ? v->s : NULL;
}

void opts_engine(const opts *o, const opt_val *v, const char *model, engine_opts *out)
{
    (void)o;
    *out = (engine_opts){
        .model = model,
        .device = text_or_null(&v[OPT_device]),
        .threads = (int)v[OPT_threads].i,
        .tp = v[OPT_tp].i < INT16_MIN   ? INT16_MIN
              : v[OPT_tp].i > INT32_MAX ? INT32_MAX
                                        : (int)v[OPT_tp].i,
        .cpu_features = text_or_null(&v[OPT_cpu_features]),
        .kv_cache_dtype = text_or_null(&v[OPT_kv_cache_dtype]),
        .activation_dtype = text_or_null(&v[OPT_activation_dtype]),
        .quantization = text_or_null(&v[OPT_quantization]),
        .gptq_zeros = text_or_null(&v[OPT_gptq_zeros]),
        .kv_scales = text_or_null(&v[OPT_quantization_param_path]),
        .dequantize = v[OPT_dequantize].given,
        .max_model_len = v[OPT_max_model_len].i,
        .max_running = v[OPT_max_running].i,
        .max_queued = v[OPT_max_queued].i,
        .mem_fraction = v[OPT_mem_fraction].f,
        .max_total_tokens = v[OPT_max_total_tokens].i,
        .chunk_tokens = v[OPT_chunk].i,
        .page_tokens = (int)v[OPT_page_size].i,
        .no_prefix_cache = v[OPT_no_prefix_cache].given,
        .strict = v[OPT_strict].given,
        .chat_template = text_or_null(&v[OPT_chat_template]),
    };
}

/* --task FILE … followed by every .jsonl of --tasks DIR. */
static int task_list(const opts *o, eval_opts *out, err *e)
{
    char **names = NULL;
    size_t n = 0;
    int rc = 0;
    const opt_val *t = &o->v[OPT_task];
    const char *dir = text_or_null(&o->v[OPT_tasks]);
    if (dir) TRY(file_list(dir, &names, &n, e));
    const char **all = arena_alloc(o->mem, sizeof *all * ((size_t)t->n_list + n + 1));
    int k = 0;
    for (int i = 0; i < t->n_list; i++)
        all[k++] = t->list[i];
    for (size_t i = 0; i < n; i++) {
        size_t len = strlen(names[i]);
        if (len > 6 && !strcmp(names[i] + len - 6, ".jsonl"))
            all[k++] = arena_printf(o->mem, "%s/%s", dir, names[i]);
    }
    if (dir && k == t->n_list)
        rc = err_set(e, ERR_MISSING, "%s: no .jsonl file in this folder", dir);
    out->tasks = all;
    out->n_tasks = k;
out:
    file_list_free(names, n);
    return rc;
}

int opts_eval(const opts *o, eval_opts *out, err *e)
{
    const opt_val *v = o->v;
    if (v[OPT_window].i < 2) return err_set(e, ERR_USAGE, "--window must be at least 2");
    if (v[OPT_stride].i < 1) return err_set(e, ERR_USAGE, "--stride must be at least 1");
    *out = (eval_opts){
        .task_type = text_or_null(&v[OPT_task_type]),
        .perplexity = text_or_null(&v[OPT_perplexity]),
        .window = v[OPT_window].i,
        .stride = v[OPT_stride].i,
        .bos = v[OPT_bos].s,
        .limit = v[OPT_limit].i,
        .ppl_tokens = v[OPT_ppl_tokens].i,
        .max_tokens = v[OPT_max_tokens].i,
        .choice_by = v[OPT_choice_by].s,
        .items = v[OPT_items].given,
        .cache_dir = text_or_null(&v[OPT_cache]),
        .labels = text_or_null(&v[OPT_labels]),
        .threshold = v[OPT_threshold].f,
        .raw_prompt = v[OPT_raw_prompt].given,
    };
    return task_list(o, out, e);
}

void cli_print(const buf *b)
{
    if (b->len) fwrite(b->data, 1, b->len, stdout);
    fflush(stdout);
}

void cli_print_text(const opts *o, const buf *b)
{
    if (!o->v[OPT_json].given) {
        cli_print(b);
        return;
    }
    buf out = {0};
    jw w;
    jw_init(&w, &out, 0);
    jw_obj(&w);
    jw_key(&w, "text");
    jw_strn(&w, b->data ? b->data : "", b->len);
    jw_end_obj(&w);
    buf_putc(&out, '\n');
    cli_print(&out);
    buf_free(&out);
}
