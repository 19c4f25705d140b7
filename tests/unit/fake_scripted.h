/* An engine that follows a script, for tests of eval: engine.h, tokenizer.h and chat.h in one file,
 * included by one .c of a program only.
 *
 * Tokenizer: longest match over 256 bytes and a few words, so that a word may span any boundary.
 * Model: the logits after token p are known in closed form (fake_logit), and an engine whose model
 * is named "...cand..." adds fake.eps * cos(i) to them. Greedy text comes from fake.answer(prompt
 * text). Each request runs in a thread of its own after a pseudo-random pause, in chunks of 5
 * positions. */
#ifndef TESTS_FAKE_SCRIPTED_H
#define TESTS_FAKE_SCRIPTED_H
#include <pthread.h>
#include <time.h>
#include "base/utf8.h"
#include "engine/engine.h"

static const char *const fake_words[] = {"<s>", "</s>", "Answer", ": C", " A",
                                         " B",  " C",   "#### ",  "wer"};
enum {
    FAKE_BOS = 256,
    FAKE_EOS = 257,
    FAKE_WORDS = 9,
    FAKE_SIZE = 256 + FAKE_WORDS,
    FAKE_VOCAB = 272
};
#define FAKE_THREADS 4096

struct engine {
    bool cand, bos;
    char model[256];
    pthread_t threads[FAKE_THREADS];
    int n_threads;
};
static struct {
    const char *(*answer)(const char *prompt, bool cand);
    double (*logprob)(const int32_t *prompt, int64_t pos, bool cand); /* NULL: from the logits */
    double eps;
    bool chat, adds_bos, no_bos, other_tokenizer, nan_logits, slow;
    int64_t max_len, opens, requests, fail_at;
    uint64_t clipped;
} fake;
static pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- tokenizer ---- */

void ids_free(ids *l)
{
    free(l->v);
    *l = (ids){0};
}
void ids_push(ids *l, int32_t id)
{
    if (l->n == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 16;
        l->v = xrealloc(l->v, l->cap * sizeof *l->v);
    }
    l->v[l->n++] = id;
}
int tokenizer_encode(const tokenizer *t, const char *text, size_t n, bool add_special, ids *out,
                     err *e)
{
    (void)t, (void)e;
    if (add_special && fake.adds_bos) ids_push(out, FAKE_BOS);
    for (size_t i = 0; i < n;) {
        int best = -1;
        for (int w = 0; w < FAKE_WORDS; w++) {
            size_t len = strlen(fake_words[w]);
            if (len <= n - i && !memcmp(text + i, fake_words[w], len) &&
                (best < 0 || len > strlen(fake_words[best])))
                best = w;
        }
        ids_push(out, best < 0 ? (unsigned char)text[i] : 256 + best);
        i += best < 0 ? 1 : strlen(fake_words[best]);
    }
    return 0;
}
void tokenizer_decode(const tokenizer *t, const int32_t *v, size_t n, bool skip_special, buf *out)
{
    buf raw = {0};
    (void)t;
    for (size_t i = 0; i < n; i++)
        if (v[i] < 256)
            buf_putc(&raw, (char)v[i]);
        else if (v[i] < FAKE_SIZE && !(skip_special && v[i] <= FAKE_EOS))
            buf_puts(&raw, fake_words[v[i] - 256]);
    utf8_add_lossy(out, raw.data ? raw.data : "", raw.len);
    buf_free(&raw);
}
const char *tokenizer_token_name(const tokenizer *t, int32_t id)
{
    static char one[2];
    (void)t;
    if (id >= 256) return id < FAKE_SIZE ? fake_words[id - 256] : NULL;
    one[0] = (char)id;
    return id ? one : "NUL";
}
int32_t tokenizer_token_id(const tokenizer *t, const char *name)
{
    (void)t;
    for (int w = 0; w < FAKE_WORDS; w++)
        if (!strcmp(fake_words[w], name)) return 256 + w;
    return -1;
}
int64_t tokenizer_size(const tokenizer *t)
{
    return FAKE_SIZE - (t == (const tokenizer *)(const void *)&fake_words[1] ? 1 : 0);
}
bool tokenizer_is_special(const tokenizer *t, int32_t id)
{
    return (void)t, id == FAKE_BOS || id == FAKE_EOS;
}
int32_t tokenizer_eos(const tokenizer *t)
{
    return (void)t, FAKE_EOS;
}
int32_t tokenizer_bos(const tokenizer *t)
{
    return (void)t, fake.no_bos ? -1 : FAKE_BOS;
}
const char *tokenizer_bos_text(const tokenizer *t)
{
    return (void)t, "<s>";
}
const char *tokenizer_eos_text(const tokenizer *t)
{
    return (void)t, "</s>";
}
bool tokenizer_adds_bos(const tokenizer *t)
{
    return (void)t, fake.adds_bos;
}
const tokenizer *engine_tokenizer(const engine *en)
{
    bool other = fake.other_tokenizer && en->cand;
    return (const tokenizer *)(const void *)&fake_words[other ? 1 : 0];
}

/* ---- chat: "U:content\nA:\n", BOS put before it by the engine ---- */

const chat_template *engine_chat(const engine *en)
{
    (void)en;
    return fake.chat ? (const chat_template *)(const void *)&fake : NULL;
}
int chat_render(const chat_template *t, const json *messages, const json *extra, bool gen,
                const char *bos, const char *eos, buf *out, err *e)
{
    (void)t, (void)extra, (void)bos, (void)eos, (void)e;
    for (const json *m = messages->child; m; m = m->next)
        buf_printf(out, "U:%s\n", json_get(m, "content")->valuestring);
    if (gen) buf_puts(out, "A:\n");
    return 0;
}
int engine_chat_ids(const engine *en, const json *messages, const json *extra, bool gen, ids *out,
                    err *e)
{
    buf b = {0};
    int rc = chat_render(engine_chat(en), messages, extra, gen, "", "", &b, e);
    ids_push(out, FAKE_BOS);
    if (rc == 0) rc = tokenizer_encode(engine_tokenizer(en), b.data, b.len, false, out, e);
    buf_free(&b);
    return rc;
}

/* ---- the model ---- */

static float fake_logit(bool cand, int32_t prev, int64_t i)
{
    double x = 3 * sin(0.37 * (prev + 1) * (double)(i + 1));
    if (cand && fake.nan_logits) return NAN;
    return (float)(x + (cand ? fake.eps * cos((double)i) : 0));
}
static double fake_nll(bool cand, int32_t prev, int32_t next)
{
    double sum = 0;
    for (int64_t i = 0; i < FAKE_VOCAB; i++)
        sum += exp((double)fake_logit(cand, prev, i));
    return log(sum) - (double)fake_logit(cand, prev, next);
}

typedef struct fake_job {
    engine *en;
    req_params p;
    int32_t *prompt;
    uint64_t id;
} fake_job;

/* The scripted log-probability of token `next` after the first `at` tokens of the prompt. */
static double fake_next(const fake_job *j, int64_t at, int32_t next)
{
    int32_t *p = xmalloc((size_t)(at + 1) * sizeof *p);
    memcpy(p, j->prompt, (size_t)at * sizeof *p);
    p[at] = next;
    double v = fake.logprob(p, at, j->en->cand);
    free(p);
    return v;
}

static void fake_prompt_events(const fake_job *j)
{
    token_logprob lp[5];
    float *rows = xcalloc(5 * FAKE_VOCAB, sizeof *rows);
    for (int64_t pos = 0; pos < j->p.n_prompt; pos += 5) {
        int64_t n = j->p.n_prompt - pos < 5 ? j->p.n_prompt - pos : 5;
        engine_event ev = {.id = j->id, .pos = pos, .n = n, .vocab = FAKE_VOCAB};
        for (int64_t t = pos; t < pos + n; t++) {
            double v = t == 0         ? 0
                       : fake.logprob ? fake.logprob(j->prompt, t, j->en->cand)
                                      : -fake_nll(j->en->cand, j->prompt[t - 1], j->prompt[t]);
            lp[t - pos] = (token_logprob){.id = j->prompt[t], .logprob = (float)v, .none = t == 0};
            for (int64_t i = 0; i < FAKE_VOCAB; i++)
                rows[(t - pos) * FAKE_VOCAB + i] = fake.logprob
                                                       ? (float)fake_next(j, t + 1, (int32_t)i)
                                                       : fake_logit(j->en->cand, j->prompt[t], i);
        }
        ev.kind = EV_PROMPT;
        ev.logprobs = lp;
        if (j->p.want & WANT_PROMPT_LOGPROBS) j->p.sink(j->p.sink_arg, &ev);
        if (pos == 0 && j->p.want & WANT_PROMPT_LOGPROBS) j->p.sink(j->p.sink_arg, &ev); /* again */
        ev.kind = EV_LOGITS;
        ev.logprobs = NULL;
        ev.logits = rows;
        if (j->p.want & WANT_LOGITS) j->p.sink(j->p.sink_arg, &ev);
    }
    free(rows);
}

static void *fake_run(void *arg)
{
    fake_job *j = arg;
    buf text = {0};
    ids made = {0};
    err failed = {.code = ERR_FAIL, .msg = "scripted failure"};
    struct timespec t = {0, fake.slow ? (long)(j->id * 7919 % 13) * 300000L : 0};
    nanosleep(&t, NULL);
    engine_event done = {
        .kind = EV_DONE, .id = j->id, .reason = FINISH_LENGTH, .ttft_s = 0.01, .total_s = 0.1};
    fake_prompt_events(j);
    if (fake.fail_at && (int64_t)j->id == fake.fail_at) {
        done.reason = FINISH_ERROR;
        done.error = &failed;
    } else if (j->p.max_tokens > 0 && fake.answer && !j->p.ignore_eos) {
        tokenizer_decode(NULL, j->prompt, (size_t)j->p.n_prompt, false, &text);
        const char *a = fake.answer(text.data, j->en->cand);
        tokenizer_encode(NULL, a, strlen(a), false, &made, NULL);
        done.reason = (int64_t)made.n <= j->p.max_tokens ? FINISH_STOP : FINISH_LENGTH;
        if ((int64_t)made.n > j->p.max_tokens) made.n = (size_t)j->p.max_tokens;
        text.len = 0;
        tokenizer_decode(NULL, made.v, made.n, true, &text);
        engine_event first = {
            .kind = EV_TOKEN, .id = j->id, .n = 1, .text = text.data, .text_len = text.len / 2};
        j->p.sink(j->p.sink_arg, &first); /* half as a token, the rest at the end */
        done.text = text.data + text.len / 2;
        done.text_len = text.len - text.len / 2;
        done.output_tokens = (int64_t)made.n;
    }
    j->p.sink(j->p.sink_arg, &done);
    buf_free(&text);
    ids_free(&made);
    free(j->prompt);
    free(j);
    return NULL;
}

int engine_open(engine **out, const engine_opts *o, err *e)
{
    if (strstr(o->model, "broken")) return err_set(e, ERR_NOTFOUND, "%s: no such model", o->model);
    *out = xcalloc(1, sizeof **out);
    (*out)->cand = strstr(o->model, "cand") != NULL;
    snprintf((*out)->model, sizeof(*out)->model, "%s", o->model);
    fake.opens++;
    return 0;
}
void engine_close(engine *en, double drain)
{
    (void)drain;
    if (!en) return;
    for (int i = 0; i < en->n_threads; i++)
        pthread_join(en->threads[i], NULL);
    free(en);
}
int64_t engine_vocab(const engine *en)
{
    return (void)en, FAKE_VOCAB;
}
int64_t engine_max_len(const engine *en)
{
    return (void)en, fake.max_len;
}
void sample_opts_default(sample_opts *s)
{
    *s = (sample_opts){.temperature = 1, .top_p = 1, .repetition_penalty = 1};
}
void req_params_default(req_params *p)
{
    *p = (req_params){.max_tokens = 16, .want = WANT_TOKENS};
    sample_opts_default(&p->sample);
}
int engine_submit(engine *en, const req_params *p, uint64_t *id, err *e)
{
    if (p->n_prompt + p->max_tokens > fake.max_len)
        return err_set(e, ERR_TOOLONG, "%d tokens", (int)(p->n_prompt + p->max_tokens));
    if (en->n_threads == FAKE_THREADS) return err_set(e, ERR_LIMIT, "fake: too many requests");
    fake_job *j = xcalloc(1, sizeof *j);
    j->en = en;
    j->p = *p;
    j->prompt = xmalloc((size_t)p->n_prompt * sizeof *j->prompt);
    memcpy(j->prompt, p->prompt, (size_t)p->n_prompt * sizeof *j->prompt);
    pthread_mutex_lock(&fake_lock);
    *id = j->id = (uint64_t)++fake.requests;
    pthread_mutex_unlock(&fake_lock);
    pthread_create(&en->threads[en->n_threads++], NULL, fake_run, j);
    return 0;
}
void engine_cancel(engine *en, uint64_t id)
{
    (void)en, (void)id;
}
int engine_generate(engine *en, const req_params *p, gen_result *out, err *e)
{
    (void)en, (void)e;
    *out = (gen_result){.output_tokens = p->max_tokens,
                        .ttft_s = 0.01,
                        .total_s = 0.01 + 0.002 * (double)(p->max_tokens - 1)};
    return 0;
}
void gen_result_free(gen_result *r)
{
    *r = (gen_result){0};
}
void engine_get_info(const engine *en, engine_info *out)
{
    *out = (engine_info){
        .vocab = FAKE_VOCAB, .max_len = fake.max_len, .max_running = 4, .weight_bytes = 1000};
    snprintf(out->model, sizeof out->model, "%s", en->model);
    snprintf(out->spec, sizeof out->spec, "w:f32 a:f32 kv:f32");
    snprintf(out->kv_dtype, sizeof out->kv_dtype, "fp8_e4m3");
}
void engine_get_stats(engine *en, engine_stats *out)
{
    *out = (engine_stats){.kv_clipped = en->cand ? fake.clipped : 0};
}
#endif
