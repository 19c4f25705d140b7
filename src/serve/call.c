/* One generation request inside the server: prompts x n choices, each an engine request.
 *
 * The engine thread appends copies of events under call.lock and resumes the connection if it was
 * suspended; the HTTP thread takes the whole list, formats it, and suspends again only while the
 * list is empty, under the same lock: a wake-up cannot be lost. At most SERVE_WINDOW choices of a
 * call are inside the engine at a time; the rest follow as those end, so a large batch neither
 * floods the queue nor is refused for its size.
 *
 * References: one of the connection, one of each choice inside the engine. Once `gone`, events are
 * dropped and the connection is never touched again. */
#include "serve/serve_int.h"
#include "base/thread.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

/* ---- making and freeing -------------------------------------------------------------------------
 */

static void make_id(char *out, size_t cap, const char *prefix)
{
    uint8_t r[16];
    if (getrandom(r, sizeof r, 0) != (ssize_t)sizeof r) memset(r, 0, sizeof r);
    int n = snprintf(out, cap, "%s", prefix);
    for (int i = 0; i < 16 && n + 3 <= (int)cap; i++)
        n += snprintf(out + n, cap - (size_t)n, "%02x", r[i]);
}

static void enlist(struct server *s, call *c)
{
    pthread_mutex_lock(&s->lock);
    c->serial = s->next_serial++;
    c->next = s->calls;
    c->link = &s->calls;
    if (s->calls) s->calls->link = &c->next;
    s->calls = c;
    s->n_calls++;
    pthread_mutex_unlock(&s->lock);
    /* serve_close sets `stopping` before it walks the list: a call it missed sees the flag here. */
    if (atomic_load(&s->stopping)) {
        pthread_mutex_lock(&c->lock);
        c->stopped = true;
        pthread_mutex_unlock(&c->lock);
    }
}

call *serve__call_make(struct server *s, exchange *x, const api_shape *shape, gen_request *r)
{
    call *c = xcalloc(1, sizeof *c);
    c->s = s;
    c->shape = shape;
    c->conn = x->conn;
    c->fd = -1;
    c->refs = 1;
    c->tail = &c->head;
    c->created = (int64_t)time(NULL);
    c->r = *r;
    *r = (gen_request){0};
    make_id(c->id, sizeof c->id, shape->id_prefix);
    pthread_mutex_init(&c->lock, NULL);
    c->n_choices = (int)(c->r.n_prompts * c->r.n);
    c->choices = xcalloc((size_t)c->n_choices, sizeof *c->choices);
    for (int i = 0; i < c->n_choices; i++) {
        c->choices[i].c = c;
        c->choices[i].index = i;
        c->choices[i].prompt = i / (int)c->r.n;
        c->choices[i].stop_id = -1;
    }
    enlist(s, c);
    return c;
}

static void event_free(gen_event *ev)
{
    free(ev->logprobs);
    free(ev->text);
    free(ev->stop_text);
    free(ev->err_msg);
    free(ev);
}

static void events_free(gen_event *ev)
{
    while (ev) {
        gen_event *next = ev->next;
        event_free(ev);
        ev = next;
    }
}

static void call_free(call *c)
{
    events_free(c->head);
    for (int i = 0; i < c->n_choices; i++) {
        gen_choice *ch = &c->choices[i];
        buf_free(&ch->text);
        ids_free(&ch->tokens);
        free(ch->lps);
        free(ch->plps);
        free(ch->stop_text);
        if (ch->offsets_on) detok_free(&ch->offsets);
    }
    free(c->choices);
    serve__gen_request_free(&c->r);
    buf_free(&c->out);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

void serve__call_unref(call *c)
{
    pthread_mutex_lock(&c->lock);
    bool last = --c->refs == 0;
    pthread_mutex_unlock(&c->lock);
    if (last) call_free(c);
}

/* ---- the engine's side --------------------------------------------------------------------------
 */

static gen_event *event_copy(const engine_event *ev)
{
    gen_event *g = xcalloc(1, sizeof *g);
    g->kind = ev->kind;
    g->token = ev->token;
    g->stop_id = ev->stop_id;
    g->reason = ev->reason;
    g->prompt_tokens = ev->prompt_tokens;
    g->cached_tokens = ev->cached_tokens;
    g->output_tokens = ev->output_tokens;
    if (ev->logprobs && ev->n > 0 && ev->kind != EV_DONE) {
        g->n_logprobs = (size_t)ev->n;
        g->logprobs = xmalloc(g->n_logprobs * sizeof *g->logprobs);
        memcpy(g->logprobs, ev->logprobs, g->n_logprobs * sizeof *g->logprobs);
    }
    if (ev->text && ev->text_len) {
        g->text = xstrndup(ev->text, ev->text_len);
        g->text_len = ev->text_len;
    }
    if (ev->stop_text) g->stop_text = xstrdup(ev->stop_text);
    if (ev->error) {
        g->err_code = ev->error->code;
        g->err_msg = xstrdup(ev->error->msg);
    }
    return g;
}

static void wake(call *c) /* c->lock is held */
{
    if (!c->suspended) return;
    c->suspended = false;
    MHD_resume_connection(c->conn);
}

static void on_engine(void *arg, const engine_event *ev)
{
    gen_choice *ch = arg;
    call *c = ch->c;
    if (ev->kind == EV_LOGITS || ev->kind == EV_HIDDEN) return;
    gen_event *g = event_copy(ev);
    bool done = ev->kind == EV_DONE, last = false;
    g->choice = ch->index;
    pthread_mutex_lock(&c->lock);
    if (!c->gone) {
        *c->tail = g;
        c->tail = &g->next;
        g = NULL;
        wake(c);
    }
    if (done) {
        ch->finished = true;
        c->n_inside--;
        last = --c->refs == 0;
    }
    pthread_mutex_unlock(&c->lock);
    if (g) event_free(g);
    if (last) call_free(c);
}

/* ---- the HTTP thread's side ---------------------------------------------------------------------
 */

static int submit_one(call *c, gen_choice *ch, err *e)
{
    const gen_prompt *pr = &c->r.prompts[ch->prompt];
    req_params p = c->r.p;
    uint64_t id = 0;
    p.prompt = pr->ids.v;
    p.n_prompt = (int64_t)pr->ids.n;
    p.max_tokens = c->r.max_tokens >= 0 ? c->r.max_tokens : c->s->max_len - (int64_t)pr->ids.n;
    p.choice = ch->index % (int)c->r.n;
    p.sink = on_engine;
    p.sink_arg = ch;
    pthread_mutex_lock(&c->lock);
    c->refs++;
    c->n_inside++;
    pthread_mutex_unlock(&c->lock);
    int rc = engine_submit(c->s->en, &p, &id, e);
    pthread_mutex_lock(&c->lock);
    if (rc < 0) {
        c->refs--;
        c->n_inside--;
    } else {
        ch->id = id;
        ch->submitted = true;
    }
    bool left = c->gone || c->stopped;
    pthread_mutex_unlock(&c->lock);
    if (rc >= 0 && left) engine_cancel(c->s->en, id);
    return rc;
}

static int inside(call *c)
{
    pthread_mutex_lock(&c->lock);
    int n = c->n_inside;
    pthread_mutex_unlock(&c->lock);
    return n;
}

int serve__call_pump(call *c)
{
    for (int before; c->n_submitted < c->n_choices && (before = inside(c)) < SERVE_WINDOW;) {
        err e = {0};
        int rc = submit_one(c, &c->choices[c->n_submitted], &e);
        if (rc < 0) {
            /* The queue is full but some of ours run: the next end of one of them tries again. If
             * the last of them ended just now, there is room now. */
            if (e.code == ERR_BUSY && inside(c) > 0) return 0;
            if (e.code == ERR_BUSY && before > 0) continue;
            return serve__fault_err(&c->f, "", &e);
        }
        c->n_submitted++;
    }
    return 0;
}

static void keep(token_logprob **list, size_t *n, size_t *cap, const gen_event *ev)
{
    if (!ev->n_logprobs) return;
    if (*n + ev->n_logprobs > *cap) {
        *cap = (*n + ev->n_logprobs) * 2;
        *list = xrealloc(*list, *cap * sizeof **list);
    }
    memcpy(*list + *n, ev->logprobs, ev->n_logprobs * sizeof **list);
    *n += ev->n_logprobs;
}

static void take_end(call *c, gen_choice *ch, gen_event *ev)
{
    ch->done = true;
    c->n_done++;
    ch->reason = ev->reason;
    ch->stop_id = ev->stop_id;
    ch->stop_text = ev->stop_text;
    ev->stop_text = NULL;
    ch->cached_tokens = ev->cached_tokens;
    ch->output_tokens = ev->output_tokens;
    if (c->f.status) return;
    if (ev->reason == FINISH_ERROR) {
        err e = {.code = ev->err_code ? ev->err_code : ERR_FAIL};
        snprintf(e.msg, sizeof e.msg, "%s", ev->err_msg ? ev->err_msg : "the engine failed");
        serve__fault_err(&c->f, "", &e);
    } else if (ev->reason == FINISH_CANCELLED) {
        serve__fault_set(&c->f, 503, "", "The server stopped before the request was done.");
    }
}

static void take_event(call *c, gen_event *ev)
{
    gen_choice *ch = &c->choices[ev->choice];
    if (ev->kind == EV_PROMPT) {
        keep(&ch->plps, &ch->n_plps, &ch->cap_plps, ev);
        return;
    }
    if (ev->kind == EV_TOKEN) {
        ch->output_tokens++;
        if (c->r.return_token_ids) ids_push(&ch->tokens, ev->token);
        if (!c->r.stream) keep(&ch->lps, &ch->n_lps, &ch->cap_lps, ev);
    } else {
        take_end(c, ch, ev);
        if (c->f.status) return;
    }
    if (c->r.stream)
        c->shape->on_event(c, ch, ev);
    else
        buf_add(&ch->text, ev->text ? ev->text : "", ev->text_len);
}

static void close_stream(call *c)
{
    if (c->f.status) {
        serve__sse_fault(&c->out, &c->f);
    } else if (c->r.include_usage) {
        buf line = {0};
        jw w;
        jw_init(&w, &line, 0);
        serve__envelope_write(c, &w);
        jw_key(&w, "choices");
        jw_arr(&w);
        jw_end_arr(&w);
        jw_key(&w, "usage");
        serve__usage_write(c, &w);
        jw_end_obj(&w);
        serve__sse_event(&c->out, &line);
        buf_free(&line);
    }
    serve__sse_done(&c->out);
    c->closed = true;
}

bool serve__call_drain(call *c)
{
    if (c->closed) return true;
    pthread_mutex_lock(&c->lock);
    gen_event *list = c->head;
    c->head = NULL;
    c->tail = &c->head;
    bool stopped = c->stopped;
    pthread_mutex_unlock(&c->lock);
    for (gen_event *ev = list; ev && !c->f.status; ev = ev->next)
        take_event(c, ev);
    events_free(list);
    if (!c->f.status && c->n_done < c->n_choices) {
        if (stopped)
            serve__fault_set(&c->f, 503, "", "The server stopped before the request was done.");
        else
            serve__call_pump(c);
    }
    bool all = c->f.status || c->n_done == c->n_choices;
    if (all && c->r.stream) close_stream(c);
    return all;
}

bool serve__call_suspend(call *c)
{
    pthread_mutex_lock(&c->lock);
    bool wait = !c->head && !c->gone && !c->stopped;
    if (wait) {
        c->suspended = true;
        MHD_suspend_connection(c->conn);
    }
    pthread_mutex_unlock(&c->lock);
    return wait;
}

bool serve__call_is_gone(call *c)
{
    pthread_mutex_lock(&c->lock);
    bool gone = c->gone;
    pthread_mutex_unlock(&c->lock);
    return gone;
}

static void cancel_all(call *c)
{
    for (int i = 0; i < c->n_choices; i++) {
        gen_choice *ch = &c->choices[i];
        pthread_mutex_lock(&c->lock);
        bool runs = ch->submitted && !ch->finished;
        uint64_t id = ch->id;
        pthread_mutex_unlock(&c->lock);
        if (runs) engine_cancel(c->s->en, id);
    }
}

void serve__call_abandon(call *c, bool stopped)
{
    pthread_mutex_lock(&c->lock);
    if (stopped)
        c->stopped = true;
    else
        c->gone = true;
    wake(c);
    pthread_mutex_unlock(&c->lock);
    if (!stopped) atomic_fetch_add(&c->s->client_gone, 1);
    cancel_all(c);
}

void serve__call_detach(call *c)
{
    struct server *s = c->s;
    pthread_mutex_lock(&s->lock);
    *c->link = c->next;
    if (c->next) c->next->link = c->link;
    s->n_calls--;
    pthread_mutex_unlock(&s->lock);
    serve__watch_remove(s, c);
    pthread_mutex_lock(&c->lock);
    c->gone = true;
    pthread_mutex_unlock(&c->lock);
    cancel_all(c);
    serve__call_unref(c);
}

static enum MHD_Result begin(exchange *x, const api_shape *shape, request_parser *parse)
{
    gen_request r = {0};
    fault f = {0};
    if (parse(x->s, &x->body, &r, &f) < 0) {
        serve__gen_request_free(&r);
        return serve__reply_fault(x, &f);
    }
    serve__body_release(x);
    call *c = x->call = serve__call_make(x->s, x, shape, &r);
    if (serve__call_pump(c) < 0) {
        cancel_all(c);
        return serve__reply_fault(x, &c->f);
    }
    serve__watch_add(x->s, c);
    return c->r.stream ? serve__reply_stream(x, c) : MHD_YES;
}

enum MHD_Result serve__call_run(exchange *x, const api_shape *shape, request_parser *parse)
{
    bool fresh = !x->call;
    if (fresh) {
        enum MHD_Result ok = begin(x, shape, parse);
        if (!x->call || x->call->f.status || x->call->r.stream) return ok;
    }
    call *c = x->call;
    for (;;) {
        if (serve__call_is_gone(c)) return MHD_NO;
        if (serve__call_drain(c)) break;
        if (serve__call_suspend(c)) return MHD_YES;
    }
    if (c->f.status) {
        cancel_all(c);
        return serve__reply_fault(x, &c->f);
    }
    buf out = {0};
    c->shape->whole(c, &out);
    return serve__reply_json(x, 200, &out);
}
