/* An engine without a model, for tests of the server: it implements the functions of engine.h,
 * tokenizer.h and chat.h that the serve room calls, so a test program that includes this file links
 * without those rooms. Included by one .c of a program only.
 *
 * Tokens are bytes (0..255), <s> = 256, </s> = 257; the vocabulary is padded to 300. Token j of a
 * reply to a prompt is 'a' + (sum of prompt + seed + 7 * choice + j) mod 26, unless logit_bias
 * forces one. The logprob of a generated token is -(j + 1) / 8, that of prompt token i with id t is
 * -(t % 8) / 4: exact floats, so tests can compare. One thread runs all requests in turn. */
#ifndef TESTS_FAKE_ENGINE_H
#define TESTS_FAKE_ENGINE_H
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include "base/utf8.h"
#include "engine/engine.h"
#include "text/literal.h"

#define FAKE_BOS   256
#define FAKE_EOS   257
#define FAKE_VOCAB 300
#define FAKE_LEN   256

typedef struct fake_req {
    struct fake_req *next;
    uint64_t id;
    req_params p;
    int32_t *prompt, *stop_ids, forced;
    char *stops[REQ_MAX_STOPS];
    int64_t made, sum;
    bool started;
    atomic_bool cancelled;
    buf text; /* all text made, emitted up to `sent` */
    size_t sent;
} fake_req;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t more;
    pthread_t thread;
    fake_req *head;
    uint64_t next_id, cancels, done;
    int64_t max_running, max_queued, running, waiting;
    int step_us;
    int fail_after; /* tokens until every request fails; 0 = never */
    bool quit, no_chat;
} fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .more = PTHREAD_COND_INITIALIZER, .next_id = 1};

/* ---- ids, tokenizer
 * ------------------------------------------------------------------------------ */

static int fake_object;

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

const tokenizer *engine_tokenizer(const engine *en)
{
    (void)en;
    return (const tokenizer *)(const void *)&fake_object;
}

int tokenizer_encode(const tokenizer *t, const char *text, size_t n, bool add_special, ids *out,
                     err *e)
{
    (void)t, (void)e;
    if (add_special) ids_push(out, FAKE_BOS);
    for (size_t i = 0; i < n; i++)
        ids_push(out, (unsigned char)text[i]);
    return 0;
}

int tokenizer_encode_literal(const tokenizer *t, const char *text, size_t n, bool add_special,
                             ids *out, err *e)
{
    return tokenizer_encode(t, text, n, add_special, out, e);
}

int literal_parse(const char *text, bool *literal, err *e)
{
    *literal = !strcmp(text, "literal");
    if (*literal || !strcmp(text, "honour")) return 0;
    return err_set(e, ERR_USAGE, "'%s' is neither honour nor literal", text);
}

void tokenizer_token_bytes(const tokenizer *t, int32_t id, buf *out)
{
    (void)t;
    if (id < 256)
        buf_putc(out, (char)id);
    else if (id <= FAKE_EOS)
        buf_puts(out, id == FAKE_BOS ? "<s>" : "</s>");
}

void tokenizer_decode(const tokenizer *t, const int32_t *v, size_t n, bool skip_special, buf *out)
{
    buf raw = {0};
    for (size_t i = 0; i < n; i++)
        if (v[i] < 256 || !skip_special) tokenizer_token_bytes(t, v[i], &raw);
    utf8_add_lossy(out, raw.data ? raw.data : "", raw.len);
    buf_free(&raw);
}

const char *tokenizer_token_name(const tokenizer *t, int32_t id)
{
    (void)t;
    return id == FAKE_BOS ? "<s>" : id == FAKE_EOS ? "</s>" : id == 'a' ? "a" : NULL;
}

int64_t tokenizer_size(const tokenizer *t)
{
    return (void)t, 258;
}
bool tokenizer_is_special(const tokenizer *t, int32_t id)
{
    return (void)t, id >= 256;
}
int32_t tokenizer_eos(const tokenizer *t)
{
    return (void)t, FAKE_EOS;
}
int32_t tokenizer_bos(const tokenizer *t)
{
    return (void)t, FAKE_BOS;
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
    return (void)t, true;
}

void detok_init(detok *d, const tokenizer *t, bool skip_special)
{
    *d = (detok){.t = t, .skip_special = skip_special};
}

void detok_push(detok *d, int32_t id, buf *out)
{
    if (id >= 256 && d->skip_special) return;
    tokenizer_token_bytes(d->t, id, &d->pending);
    size_t n = utf8_complete_prefix(d->pending.data, d->pending.len);
    utf8_add_lossy(out, d->pending.data, n);
    memmove(d->pending.data, d->pending.data + n, d->pending.len - n);
    d->pending.len -= n;
}

void detok_free(detok *d)
{
    buf_free(&d->pending);
}

/* ---- chat: "role:content\n" for the roles it knows
 * ------------------------------------------------ */

const chat_template *engine_chat(const engine *en)
{
    (void)en;
    return fake.no_chat ? NULL : (const chat_template *)(const void *)&fake_object;
}

int chat_render(const chat_template *t, const json *messages, const json *extra,
                bool add_generation_prompt, const char *bos, const char *eos, buf *out, err *e)
{
    (void)t, (void)eos;
    buf_puts(out, bos);
    for (const json *m = messages->child; m; m = m->next) {
        const json *role = json_get(m, "role"), *text = json_get(m, "content");
        if (!strcmp(role->valuestring, "tool"))
            return err_set(e, ERR_VALUE, "chat template: tools are not for this model");
        buf_printf(out, "%s:", role->valuestring);
        if (cJSON_IsString(text)) buf_puts(out, text->valuestring);
        for (const json *p = cJSON_IsArray(text) ? text->child : NULL; p; p = p->next)
            buf_printf(out, "[%s]", json_get(p, "text")->valuestring);
        buf_putc(out, '\n');
    }
    const json *tools = json_get(extra, "tools");
    if (tools) buf_printf(out, "tools=%d\n", cJSON_GetArraySize(tools));
    const json *mode = json_get(extra, "mode");
    if (mode) buf_printf(out, "mode=%s\n", mode->valuestring);
    if (add_generation_prompt) buf_puts(out, "assistant:");
    return 0;
}

int chat_render_continued(const chat_template *t, const json *messages, const json *extra,
                          const char *bos, const char *eos, buf *out, err *e)
{
    int rc = chat_render(t, messages, extra, false, bos, eos, out, e);
    const json *last = messages->child;
    while (last->next)
        last = last->next;
    const json *text = json_get(last, "content");
    if (rc < 0) return rc;
    if (!cJSON_IsString(text) || !text->valuestring[0])
        return err_set(e, ERR_VALUE, "'continue_final_message' needs text in the last message");
    out->data[--out->len] = 0; /* the line end behind the last message */
    return 0;
}

const char *chat_template_text(const chat_template *t)
{
    (void)t;
    return "the template";
}

const char *chat_template_tools_text(const chat_template *t)
{
    (void)t;
    return NULL;
}

int engine_chat_ids(const engine *en, const json *messages, const json *extra,
                    bool generation_prompt, ids *out, err *e)
{
    buf b = {0};
    int rc = chat_render(engine_chat(en), messages, extra, generation_prompt, "", "", &b, e);
    if (rc == 0) {
        ids_push(out, FAKE_BOS);
        rc = tokenizer_encode(NULL, b.data, b.len, false, out, e);
    }
    buf_free(&b);
    return rc;
}

int literal_chat_ids(const chat_template *c, const tokenizer *t, const json *messages,
                     const json *extra, bool add_generation_prompt, bool continued, ids *out,
                     err *e)
{
    (void)c, (void)t, (void)continued;
    return engine_chat_ids(NULL, messages, extra, add_generation_prompt, out, e);
}

/* ---- requests
 * ------------------------------------------------------------------------------------- */

int64_t engine_vocab(const engine *en)
{
    return (void)en, FAKE_VOCAB;
}
int64_t engine_max_len(const engine *en)
{
    return (void)en, FAKE_LEN;
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
    (void)en;
    fake_req *r = xcalloc(1, sizeof *r);
    r->p = *p;
    r->forced = -1;
    r->prompt = xmalloc((size_t)p->n_prompt * sizeof *r->prompt + 1);
    memcpy(r->prompt, p->prompt, (size_t)p->n_prompt * sizeof *r->prompt);
    for (int64_t i = 0; i < p->n_prompt; i++)
        r->sum += p->prompt[i];
    r->stop_ids = xcalloc((size_t)p->n_stop_ids + 1, sizeof *r->stop_ids);
    for (int i = 0; i < p->n_stop_ids; i++)
        r->stop_ids[i] = p->stop_ids[i];
    for (int i = 0; i < p->n_stops; i++)
        r->stops[i] = xstrdup(p->stops[i]);
    for (int i = 0; i < p->sample.n_bias; i++)
        if (p->sample.bias[i] >= 100) r->forced = p->sample.bias_ids[i];
    pthread_mutex_lock(&fake.lock);
    bool full = fake.running >= fake.max_running && fake.waiting >= fake.max_queued;
    if (!full) {
        fake_req **at = &fake.head;
        while (*at)
            at = &(*at)->next;
        *at = r;
        *id = r->id = fake.next_id++;
        fake.waiting++;
        pthread_cond_signal(&fake.more);
    }
    pthread_mutex_unlock(&fake.lock);
    if (!full) return 0;
    free(r->prompt);
    free(r->stop_ids);
    for (int i = 0; i < p->n_stops; i++)
        free(r->stops[i]);
    free(r);
    return err_set(e, ERR_BUSY, "the request queue is full");
}

void engine_cancel(engine *en, uint64_t id)
{
    (void)en;
    pthread_mutex_lock(&fake.lock);
    for (fake_req *r = fake.head; r; r = r->next)
        if (r->id == id && !r->cancelled) {
            r->cancelled = true;
            fake.cancels++;
        }
    pthread_mutex_unlock(&fake.lock);
}

static void fake_logprobs(const fake_req *r, token_logprob *lp, int32_t id, float value)
{
    *lp = (token_logprob){.id = id, .logprob = value, .n_top = r->p.top_logprobs};
    for (int i = 0; i < lp->n_top; i++) {
        lp->top_id[i] = i ? (id + i) % 256 : id;
        lp->top_logprob[i] = value - (float)i;
    }
}

static void fake_send(const fake_req *r, engine_event *ev)
{
    ev->id = r->id;
    ev->prompt_tokens = r->p.n_prompt;
    ev->output_tokens = r->made;
    r->p.sink(r->p.sink_arg, ev);
}

static void fake_prompt(fake_req *r)
{
    if (!(r->p.want & WANT_PROMPT_LOGPROBS)) return;
    for (int64_t pos = 0; pos < r->p.n_prompt; pos += 3) { /* in chunks of three */
        token_logprob lp[3];
        int64_t n = r->p.n_prompt - pos < 3 ? r->p.n_prompt - pos : 3;
        for (int64_t i = 0; i < n; i++) {
            int32_t id = r->prompt[pos + i];
            fake_logprobs(r, &lp[i], id, -(float)(id % 8) / 4.0f);
            lp[i].none = pos + i == 0;
        }
        engine_event ev = {.kind = EV_PROMPT, .pos = pos, .n = n, .logprobs = lp, .stop_id = -1};
        fake_send(r, &ev);
    }
}

static void fake_end(fake_req *r, finish_reason why, int32_t stop_id, const char *stop_text)
{
    err e = {.code = ERR_FAIL, .msg = "logits are not finite"};
    buf rest = {0};
    utf8_add_lossy(&rest, r->text.data ? r->text.data + r->sent : "", r->text.len - r->sent);
    engine_event ev = {.kind = EV_DONE,
                       .reason = why,
                       .stop_id = stop_id,
                       .stop_text = stop_text,
                       .text = rest.data,
                       .text_len = rest.len,
                       .cached_tokens = 2,
                       .error = why == FINISH_ERROR ? &e : NULL};
    fake_send(r, &ev);
    buf_free(&rest);
}

/* One token; true when the request ended. Text is held back while it may become a stop string. */
static bool fake_step(fake_req *r)
{
    if (r->cancelled) return fake_end(r, FINISH_CANCELLED, -1, NULL), true;
    if (!r->started) fake_prompt(r);
    r->started = true;
    if (r->made >= r->p.max_tokens) return fake_end(r, FINISH_LENGTH, -1, NULL), true;
    int64_t j = r->made++;
    int32_t id =
        r->forced >= 0
            ? r->forced
            : (int32_t)('a' + ((r->sum + r->p.sample.seed % 26 + 26 + 7 * r->p.choice + j) % 26));
    token_logprob lp;
    fake_logprobs(r, &lp, id, -(float)(j + 1) / 8.0f);
    bool eos = id == FAKE_EOS && !r->p.ignore_eos, by_id = false;
    for (int i = 0; i < r->p.n_stop_ids; i++)
        by_id = by_id || r->stop_ids[i] == id;
    if (id < 256) buf_putc(&r->text, (char)id);
    const char *hit = NULL;
    size_t hold = 0;
    for (int i = 0; i < r->p.n_stops && r->text.data; i++) {
        size_t n = strlen(r->stops[i]);
        char *at = strstr(r->text.data + r->sent, r->stops[i]);
        if (at && !hit) {
            hit = r->stops[i];
            r->text.len = (size_t)(at - r->text.data);
        }
        hold = n - 1 > hold ? n - 1 : hold;
    }
    size_t upto = r->text.len > r->sent + hold ? r->text.len - hold : r->sent;
    upto = r->sent + utf8_complete_prefix(r->text.data + r->sent, upto - r->sent);
    engine_event ev = {.kind = EV_TOKEN,
                       .n = 1,
                       .token = id,
                       .stop_id = -1,
                       .logprobs = r->p.want & WANT_LOGPROBS ? &lp : NULL,
                       .text = r->text.data ? r->text.data + r->sent : NULL,
                       .text_len = upto - r->sent};
    buf piece = {0};
    utf8_add_lossy(&piece, ev.text ? ev.text : "", ev.text_len);
    ev.text = piece.data;
    ev.text_len = piece.len;
    fake_send(r, &ev);
    buf_free(&piece);
    r->sent = upto;
    if (fake.fail_after && r->made >= fake.fail_after)
        return fake_end(r, FINISH_ERROR, -1, NULL), true;
    if (hit) return fake_end(r, FINISH_STOP, -1, hit), true;
    if (eos || by_id) return fake_end(r, FINISH_STOP, id, NULL), true;
    return false;
}

static void fake_unlink(fake_req *r) /* lock is held */
{
    fake_req **at = &fake.head;
    while (*at != r)
        at = &(*at)->next;
    *at = r->next;
    free(r->prompt);
    free(r->stop_ids);
    for (int i = 0; i < r->p.n_stops; i++)
        free(r->stops[i]);
    buf_free(&r->text);
    free(r);
    fake.done++;
}

static void *fake_run(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&fake.lock);
    while (!fake.quit) {
        if (!fake.head) {
            pthread_cond_wait(&fake.more, &fake.lock);
            continue;
        }
        int64_t k = 0;
        for (fake_req *r = fake.head, *next; r; r = next) {
            bool runs = r->started || k < fake.max_running;
            k += runs;
            if (runs || r->cancelled) {
                if (!r->started) {
                    fake.waiting--;
                    fake.running++;
                }
                pthread_mutex_unlock(&fake.lock);
                bool ended = fake_step(r);
                pthread_mutex_lock(&fake.lock);
                next = r->next;
                if (ended) {
                    fake.running--;
                    fake_unlink(r);
                }
            } else {
                next = r->next;
            }
        }
        if (fake.step_us) {
            struct timespec t = {0, fake.step_us * 1000L};
            pthread_mutex_unlock(&fake.lock);
            nanosleep(&t, NULL);
            pthread_mutex_lock(&fake.lock);
        }
    }
    pthread_mutex_unlock(&fake.lock);
    return NULL;
}

static engine *fake_open(int64_t max_running, int64_t max_queued, int step_us)
{
    fake.max_running = max_running;
    fake.max_queued = max_queued;
    fake.step_us = step_us;
    fake.quit = fake.no_chat = false;
    fake.fail_after = 0;
    pthread_create(&fake.thread, NULL, fake_run, NULL);
    return (engine *)(void *)&fake_object;
}

/* Waits until nothing runs (all events delivered), then ends the thread. */
static void fake_close(void)
{
    pthread_mutex_lock(&fake.lock);
    for (fake_req *r = fake.head; r; r = r->next)
        r->cancelled = true;
    while (fake.head) {
        struct timespec t = {0, 1000 * 1000};
        pthread_mutex_unlock(&fake.lock);
        nanosleep(&t, NULL);
        pthread_mutex_lock(&fake.lock);
    }
    fake.quit = true;
    pthread_cond_signal(&fake.more);
    pthread_mutex_unlock(&fake.lock);
    pthread_join(fake.thread, NULL);
}

/* ---- what it tells of itself
 * ---------------------------------------------------------------------- */

const double engine_ttft_bounds[23] = {0.1, 1, INFINITY}, engine_itl_bounds[23] = {0.1, INFINITY},
             engine_e2e_bounds[23] = {1, INFINITY};

void engine_get_info(const engine *en, engine_info *out)
{
    (void)en;
    *out = (engine_info){.vocab = FAKE_VOCAB, .max_len = FAKE_LEN};
    snprintf(out->model, sizeof out->model, "models/fake");
    snprintf(out->spec, sizeof out->spec, "w:f32 a:f32 kv:f32");
    snprintf(out->architecture, sizeof out->architecture, "fake");
}

void engine_get_stats(engine *en, engine_stats *out)
{
    (void)en;
    pthread_mutex_lock(&fake.lock);
    *out = (engine_stats){.running = fake.running,
                          .waiting = fake.waiting,
                          .kv_pages_total = 10,
                          .kv_pages_used = fake.running,
                          .requests = fake.next_id - 1,
                          .cancelled = fake.cancels};
    for (int i = 0; i < 24; i++)
        out->ttft[i] = i ? 3 : 2;
    pthread_mutex_unlock(&fake.lock);
}
#endif
