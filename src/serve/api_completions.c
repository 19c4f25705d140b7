/* /v1/completions: choices are numbered prompt * n + i; text, logprobs as four parallel arrays.
 * With echo a choice begins with its prompt: text, and logprobs of the prompt's tokens (the first
 * one null). In a stream the prompt travels with the first event of its choice. */
#include "serve/serve_int.h"

static void write_tail(const call *c, const gen_choice *ch, jw *w, bool ended)
{
    jw_kstr(w, "finish_reason", ended ? serve__finish_name(ch->reason) : NULL);
    if (ended)
        serve__stop_reason_write(c, ch, w);
    else
        jw_kstr(w, "stop_reason", NULL);
}

static void write_ids(jw *w, const char *key, const int32_t *v, size_t n)
{
    jw_key(w, key);
    jw_arr(w);
    for (size_t i = 0; i < n; i++)
        jw_i64(w, v[i]);
    jw_end_arr(w);
}

static void completion_event(call *c, gen_choice *ch, const gen_event *ev)
{
    buf line = {0}, text = {0};
    jw w;
    bool ended = ev->kind == EV_DONE, echo = c->r.echo && !ch->opened;
    const gen_prompt *pr = &c->r.prompts[ch->prompt];
    bool opening = !ch->opened;
    ch->opened = true;
    if (echo) buf_add(&text, pr->text.data ? pr->text.data : "", pr->text.len);
    buf_add(&text, ev->text ? ev->text : "", ev->text_len);
    jw_init(&w, &line, 0);
    serve__envelope_write(c, &w);
    jw_key(&w, "choices");
    jw_arr(&w);
    jw_obj(&w);
    jw_ki64(&w, "index", ch->index);
    jw_key(&w, "text");
    jw_strn(&w, text.data ? text.data : "", text.len);
    jw_key(&w, "logprobs");
    if (c->r.logprobs >= 0 && (ev->n_logprobs || echo))
        serve__logprobs_completion(c, ch, &w, echo, ev->logprobs, ev->n_logprobs);
    else
        jw_null(&w);
    write_tail(c, ch, &w, ended);
    if (c->r.return_token_ids) {
        if (opening) write_ids(&w, "prompt_token_ids", pr->ids.v, pr->ids.n);
        write_ids(&w, "token_ids", &ev->token, ended ? 0 : 1);
    }
    jw_end_obj(&w);
    jw_end_arr(&w);
    serve__usage_chunk_write(c, &w);
    jw_end_obj(&w);
    serve__sse_event(&c->out, &line);
    buf_free(&line);
    buf_free(&text);
}

static void completion_choice(call *c, gen_choice *ch, jw *w)
{
    const gen_prompt *pr = &c->r.prompts[ch->prompt];
    buf text = {0};
    if (c->r.echo) buf_add(&text, pr->text.data ? pr->text.data : "", pr->text.len);
    buf_add(&text, ch->text.data ? ch->text.data : "", ch->text.len);
    jw_obj(w);
    jw_ki64(w, "index", ch->index);
    jw_key(w, "text");
    jw_strn(w, text.data ? text.data : "", text.len);
    jw_key(w, "logprobs");
    if (c->r.logprobs >= 0)
        serve__logprobs_completion(c, ch, w, c->r.echo, ch->lps, ch->n_lps);
    else
        jw_null(w);
    write_tail(c, ch, w, true);
    if (c->r.return_token_ids) {
        write_ids(w, "prompt_token_ids", pr->ids.v, pr->ids.n);
        write_ids(w, "token_ids", ch->tokens.v, ch->tokens.n);
    }
    jw_end_obj(w);
    buf_free(&text);
}

static void completion_whole(call *c, buf *out)
{
    jw w;
    jw_init(&w, out, 0);
    serve__envelope_write(c, &w);
    jw_key(&w, "choices");
    jw_arr(&w);
    for (int i = 0; i < c->n_choices; i++)
        completion_choice(c, &c->choices[i], &w);
    jw_end_arr(&w);
    jw_key(&w, "usage");
    serve__usage_write(c, &w);
    jw_end_obj(&w);
}

const api_shape serve__completion_shape = {"cmpl-", "text_completion", completion_event,
                                           completion_whole};

enum MHD_Result serve__completions(exchange *x)
{
    return serve__call_run(x, &serve__completion_shape, serve__parse_completion);
}
