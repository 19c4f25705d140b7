/* /v1/chat/completions: one prompt rendered from messages; n choices. In a stream each choice opens
 * with a role delta that leaves together with its first token, never before: clients take the first
 * chunk as the time of the first token. Then content deltas, one for each token, and an empty delta
 * with the finish reason. */
#include "serve/serve_int.h"

static void chunk_open(const call *c, const gen_choice *ch, jw *w, buf *line)
{
    jw_init(w, line, 0);
    serve__envelope_write(c, w);
    jw_key(w, "choices");
    jw_arr(w);
    jw_obj(w);
    jw_ki64(w, "index", ch->index);
    jw_key(w, "delta");
    jw_obj(w);
}

/* reason NULL = not the last chunk of this choice. */
static void chunk_close(call *c, const gen_choice *ch, jw *w, buf *line, const gen_event *ev,
                        bool ended)
{
    jw_end_obj(w);
    jw_key(w, "logprobs");
    if (ev && ev->n_logprobs && c->r.logprobs >= 0)
        serve__logprobs_chat(c, w, ev->logprobs, ev->n_logprobs);
    else
        jw_null(w);
    jw_kstr(w, "finish_reason", ended ? serve__finish_name(ch->reason) : NULL);
    if (ended) serve__stop_reason_write(c, ch, w);
    jw_end_obj(w);
    jw_end_arr(w);
    serve__usage_chunk_write(c, w);
    jw_end_obj(w);
    serve__sse_event(&c->out, line);
    buf_free(line);
}

static void chat_event(call *c, gen_choice *ch, const gen_event *ev)
{
    buf line = {0};
    jw w;
    bool ended = ev->kind == EV_DONE;
    if (!ch->opened) {
        chunk_open(c, ch, &w, &line);
        jw_kstr(&w, "role", "assistant");
        jw_kstr(&w, "content", "");
        chunk_close(c, ch, &w, &line, NULL, false);
        ch->opened = true;
    }
    if (!ended || ev->text_len) {
        chunk_open(c, ch, &w, &line);
        jw_key(&w, "content");
        jw_strn(&w, ev->text ? ev->text : "", ev->text_len);
        chunk_close(c, ch, &w, &line, ev, false);
    }
    if (ended) {
        chunk_open(c, ch, &w, &line);
        chunk_close(c, ch, &w, &line, NULL, true);
    }
}

static void chat_choice(call *c, gen_choice *ch, jw *w)
{
    jw_obj(w);
    jw_ki64(w, "index", ch->index);
    jw_key(w, "message");
    jw_obj(w);
    jw_kstr(w, "role", "assistant");
    jw_key(w, "content");
    jw_strn(w, ch->text.data ? ch->text.data : "", ch->text.len);
    jw_kstr(w, "refusal", NULL);
    jw_end_obj(w);
    jw_key(w, "logprobs");
    if (c->r.logprobs >= 0)
        serve__logprobs_chat(c, w, ch->lps, ch->n_lps);
    else
        jw_null(w);
    jw_kstr(w, "finish_reason", serve__finish_name(ch->reason));
    serve__stop_reason_write(c, ch, w);
    if (c->r.return_token_ids) {
        jw_key(w, "token_ids");
        jw_arr(w);
        for (size_t i = 0; i < ch->tokens.n; i++)
            jw_i64(w, ch->tokens.v[i]);
        jw_end_arr(w);
    }
    jw_end_obj(w);
}

static void chat_whole(call *c, buf *out)
{
    jw w;
    jw_init(&w, out, 0);
    serve__envelope_write(c, &w);
    jw_key(&w, "choices");
    jw_arr(&w);
    for (int i = 0; i < c->n_choices; i++)
        chat_choice(c, &c->choices[i], &w);
    jw_end_arr(&w);
    jw_key(&w, "usage");
    serve__usage_write(c, &w);
    jw_end_obj(&w);
}

const api_shape serve__chat_shape = {"chatcmpl-", "chat.completion", chat_event, chat_whole};

enum MHD_Result serve__chat(exchange *x)
{
    return serve__call_run(x, &serve__chat_shape, serve__parse_chat);
}
