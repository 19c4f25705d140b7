/* The baseline's answers on disk, so that comparing a second candidate asks the baseline nothing.
 *
 * One JSON file for a task file and one for speed and memory, named by the SHA-256 of everything
 * the answers depend on: this program, the CPU, the model's files (content up to 64 MiB, else size
 * and time of change), the options that say how it runs and how it is asked, and the bytes of the
 * task file. Any change of these is another name; nothing is ever updated in place. A file that
 * cannot be read back is as good as none. Failing to write is a warning: the comparison does not
 * need it. */
#include "eval/local.h"
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "base/cpu.h"
#include "base/file.h"
#include "base/log.h"
#include "ckpt/ckpt.h"

#define CACHE_FORMAT "tare-eval-cache 1"
#define CONTENT_MAX  (64u << 20)

static void sha_hex(const void *p, size_t n, char hex[65])
{
    unsigned char d[32];
    unsigned len = 0;
    EVP_Digest(p, n, d, &len, EVP_sha256(), NULL);
    for (int i = 0; i < 32; i++)
        snprintf(hex + 2 * i, 3, "%02x", d[i]);
}

/* "name sha256" or "name size mtime": what identifies a file. */
static int add_file(buf *b, const char *path, err *e)
{
    struct stat st;
    char hex[65];
    if (stat(path, &st) != 0) return err_set(e, ERR_NOTFOUND, "%s: cannot be read", path);
    buf_printf(b, "%s ", file_basename(path));
    if (st.st_size <= CONTENT_MAX) {
        int rc = file_sha256(path, hex, e);
        if (rc < 0) return rc;
        buf_printf(b, "%s\n", hex);
    } else {
        buf_printf(b, "%lld %lld.%09ld\n", (long long)st.st_size, (long long)st.st_mtim.tv_sec,
                   st.st_mtim.tv_nsec);
    }
    return 0;
}

static int add_model(buf *b, const char *model, err *e)
{
    char **names = NULL, *dir = NULL;
    size_t n = 0;
    ckpt *c = NULL;
    int rc = 0;
    if (file_is_dir(model)) {
        dir = xstrdup(model);
    } else if (!file_exists(model)) {
        TRY(ckpt_open(&c, model, e));
        dir = xstrdup(ckpt_path(c));
    }
    if (!dir || !file_is_dir(dir)) {
        rc = add_file(b, dir ? dir : model, e);
        goto out;
    }
    TRY(file_list(dir, &names, &n, e));
    for (size_t i = 0; i < n; i++) {
        char *path = file_join(dir, names[i]);
        rc = file_is_dir(path) ? 0 : add_file(b, path, e);
        free(path);
        if (rc < 0) goto out;
    }
    rc = 0;
out:
    file_list_free(names, n);
    ckpt_close(c);
    free(dir);
    return rc;
}

static const char *text(const char *s)
{
    return s ? s : "";
}

static void add_program(buf *b)
{
    struct stat st;
    buf_printf(b, "%s\n", CACHE_FORMAT);
    if (stat("/proc/self/exe", &st) == 0)
        buf_printf(b, "program %lld %lld.%09ld\n", (long long)st.st_size,
                   (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
    buf_printf(b, "cpu %s %x\n", cpu_model_name(), cpu_detect());
}

static int add_engine(buf *b, const engine_opts *o, err *e)
{
    buf_printf(b, "device %s threads %d features %s kv %s act %s quant %s len %lld running %lld\n",
               text(o->device), o->threads, text(o->cpu_features), text(o->kv_cache_dtype),
               text(o->activation_dtype), text(o->quantization), (long long)o->max_model_len,
               (long long)o->max_running);
    buf_printf(b, "zeros %s dequantize %d tp %d\n", text(o->gptq_zeros), o->dequantize, o->tp);
    buf_printf(b, "mem %.6g total %lld chunk %lld page %d prefix %d strict %d\n", o->mem_fraction,
               (long long)o->max_total_tokens, (long long)o->chunk_tokens, o->page_tokens,
               o->no_prefix_cache, o->strict);
    return o->chat_template && *o->chat_template ? add_file(b, o->chat_template, e) : 0;
}

int eval__cache_key(const engine_opts *eo, const eval_opts *o, const char *file, cache_key *k,
                    err *e)
{
    int rc;
    buf b = {0};
    add_program(&b);
    TRY(add_model(&b, eo->model, e));
    TRY(add_engine(&b, eo, e));
    if (file) {
        buf_printf(
            &b,
            "type %s bos %s limit %lld tokens %lld choice %s labels %s threshold %.17g raw %d\n",
            text(o->task_type), text(o->bos), (long long)o->limit, (long long)o->max_tokens,
            text(o->choice_by), text(o->labels), o->threshold, o->raw_prompt);
        TRY(add_file(&b, file, e));
    }
    sha_hex(b.data, b.len, k->hex);
    rc = 0;
out:
    buf_free(&b);
    return rc;
}

static char *path_of(const char *dir, const cache_key *k)
{
    return xasprintf("%s/baseline-%s.json", dir, k->hex);
}

static json *get(const char *dir, const cache_key *k)
{
    json *j = NULL;
    err ignored = {0};
    if (!dir || !*k->hex) return NULL;
    char *path = path_of(dir, k);
    if (file_exists(path) && json_parse_file(&j, path, &ignored) < 0) {
        log_warn("baseline cache: %s", ignored.msg);
        j = NULL;
    }
    free(path);
    return j;
}

static void put(const char *dir, const cache_key *k, const buf *b)
{
    err e = {0};
    if (!dir || !*k->hex) return;
    char *path = path_of(dir, k);
    if (file_mkdirs(dir, &e) < 0 || file_write_atomic(path, b->data, b->len, &e) < 0)
        log_warn("baseline cache: %s", e.msg);
    free(path);
}

/* ---- a task's answers
 * ------------------------------------------------------------------------------------------ */

void eval__cache_put_task(const char *dir, const cache_key *k, const eval_task_result *r)
{
    buf b = {0};
    jw w;
    jw_init(&w, &b, 0);
    jw_obj(&w);
    jw_kstr(&w, "name", r->name);
    jw_kstr(&w, "type", r->type);
    jw_kstr(&w, "note", r->note);
    jw_kstr(&w, "first_prompt", r->first_prompt);
    jw_kf64(&w, "chance", r->chance);
    jw_key(&w, "items");
    jw_arr(&w);
    for (int64_t i = 0; i < r->n; i++) {
        const eval_item *x = &r->items[i];
        jw_arr(&w);
        jw_i64(&w, (x->correct ? 1 : 0) + (x->truncated ? 2 : 0) + (x->unparsed ? 4 : 0));
        jw_f64(&w, x->score);
        jw_str(&w, x->answer ? x->answer : "");
        jw_end_arr(&w);
    }
    jw_end_arr(&w);
    jw_end_obj(&w);
    put(dir, k, &b);
    buf_free(&b);
}

static void copy_str(const json *j, const char *key, char *to, size_t cap)
{
    const json *s = json_get(j, key);
    snprintf(to, cap, "%s", cJSON_IsString(s) ? s->valuestring : "");
}

static bool read_item(const json *a, eval_item *x)
{
    const json *flags = cJSON_IsArray(a) ? a->child : NULL;
    const json *score = flags ? flags->next : NULL, *answer = score ? score->next : NULL;
    if (!cJSON_IsNumber(flags) || !answer || !cJSON_IsString(answer)) return false;
    x->correct = (flags->valueint & 1) != 0;
    x->truncated = (flags->valueint & 2) != 0;
    x->unparsed = (flags->valueint & 4) != 0;
    x->score = cJSON_IsNumber(score) ? score->valuedouble : 0;
    x->answer = xstrdup(answer->valuestring);
    return true;
}

bool eval__cache_get_task(const char *dir, const cache_key *k, eval_task_result *r)
{
    json *j = get(dir, k);
    const json *items = json_get(j, "items"), *chance = json_get(j, "chance");
    bool ok = cJSON_IsArray(items) && items->child;
    *r = (eval_task_result){0};
    if (ok) {
        int64_t n = cJSON_GetArraySize(items);
        copy_str(j, "name", r->name, sizeof r->name);
        copy_str(j, "type", r->type, sizeof r->type);
        copy_str(j, "note", r->note, sizeof r->note);
        copy_str(j, "first_prompt", r->first_prompt, sizeof r->first_prompt);
        r->chance = cJSON_IsNumber(chance) ? chance->valuedouble : 0;
        r->items = xcalloc((size_t)n, sizeof *r->items);
        for (const json *a = items->child; a && ok; a = a->next, r->n++) {
            eval_item *x = &r->items[r->n];
            if (!(ok = read_item(a, x))) break;
            r->n_correct += x->correct;
            r->n_truncated += x->truncated;
            r->n_unparsed += x->unparsed;
            int d = (int)(x->score * 10);
            if (!strcmp(r->type, "classify") && !x->unparsed)
                r->score_deciles[d < 0 ? 0 : d > 9 ? 9 : d]++;
        }
        r->accuracy = r->n ? (double)r->n_correct / (double)r->n : 0;
    }
    if (!ok) eval_task_free(r);
    json_drop(j);
    return ok;
}

/* ---- speed and memory
 * ------------------------------------------------------------------------------------------- */

#define INFO_STRINGS(X)                                                                            \
    X(model) X(architecture) X(spec) X(activation) X(kv_dtype) X(device) X(origin) X(cpu_features)
#define INFO_U64(X)                                                                                \
    X(weight_bytes)                                                                                \
    X(linear_bytes)                                                                                \
    X(weight_file_bytes)                                                                           \
    X(kv_bytes_per_token) X(kv_pool_bytes) X(workspace_bytes) X(predicted_bytes) X(actual_bytes)
#define INFO_I64(X) X(kv_tokens) X(max_len) X(max_running) X(vocab)

void eval__cache_put_facts(const char *dir, const cache_key *k, const base_facts *f)
{
    buf b = {0};
    jw w;
    jw_init(&w, &b, 0);
    jw_obj(&w);
    jw_kstr(&w, "tokenizer", f->tokenizer);
    jw_kf64(&w, "ttft_ms", f->ttft_ms);
    jw_kf64(&w, "tpot_ms", f->tpot_ms);
    jw_kf64(&w, "load_seconds", f->info.load_seconds);
    jw_ki64(&w, "threads", f->info.threads);
#define S(name) jw_kstr(&w, #name, f->info.name);
#define N(name) jw_ki64(&w, #name, (int64_t)f->info.name);
    INFO_STRINGS(S)
    INFO_U64(N)
    INFO_I64(N)
#undef S
#undef N
    jw_end_obj(&w);
    put(dir, k, &b);
    buf_free(&b);
}

bool eval__cache_get_facts(const char *dir, const cache_key *k, base_facts *f)
{
    json *j = get(dir, k);
    int64_t v = 0;
    bool ok = j != NULL;
    *f = (base_facts){0};
    if (ok) {
        copy_str(j, "tokenizer", f->tokenizer, sizeof f->tokenizer);
        ok = strlen(f->tokenizer) == 64 && json_get_f64(j, "ttft_ms", &f->ttft_ms, "", NULL) == 1 &&
             json_get_f64(j, "tpot_ms", &f->tpot_ms, "", NULL) == 1 &&
             json_get_f64(j, "load_seconds", &f->info.load_seconds, "", NULL) == 1 &&
             json_get_i64(j, "threads", &v, "", NULL) == 1;
        f->info.threads = (int)v;
#define S(name) copy_str(j, #name, f->info.name, sizeof f->info.name);
#define U(name)                                                                                    \
    ok = ok && json_get_i64(j, #name, &v, "", NULL) == 1;                                          \
    f->info.name = (uint64_t)v;
#define I(name)                                                                                    \
    ok = ok && json_get_i64(j, #name, &v, "", NULL) == 1;                                          \
    f->info.name = v;
        INFO_STRINGS(S)
        INFO_U64(U)
        INFO_I64(I)
#undef S
#undef U
#undef I
    }
    json_drop(j);
    return ok;
}

void eval__tokenizer_print(const tokenizer *t, char hex[65])
{
    static const char probe[] =
        "The 12 quick-brown foxes,\n\tit's 3.14\u00e9 \u4f60\u597d def f(x): return x  + 1";
    buf b = {0};
    ids l = {0};
    int64_t n = t ? tokenizer_size(t) : 0;
    buf_printf(&b, "%lld\n", (long long)n);
    for (int64_t i = 0; i < n; i++) {
        const char *name = tokenizer_token_name(t, (int32_t)i);
        buf_puts(&b, name ? name : "");
        buf_putc(&b, '\n');
    }
    if (t && tokenizer_encode(t, probe, sizeof probe - 1, true, &l, NULL) == 0)
        buf_add(&b, l.v, l.n * sizeof *l.v);
    sha_hex(b.data, b.len, hex);
    buf_free(&b);
    ids_free(&l);
}
