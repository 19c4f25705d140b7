/* Server-sent events, and the parts that every reply shares. Each event is exactly
 * "data: " + one line of JSON + "\n\n"; the last one is "data: [DONE]\n\n": clients compare whole
 * lines. A fault after the first byte is an event with an `error` object, then [DONE]. */
#include "serve/serve_int.h"
#include <string.h>

void serve__sse_event(buf *out, const buf *one_line)
{
    buf_reserve(out, one_line->len + 8);
    buf_puts(out, "data: ");
    buf_add(out, one_line->data, one_line->len);
    buf_puts(out, "\n\n");
}

void serve__sse_fault(buf *out, const fault *f)
{
    buf line = {0};
    serve__fault_write(f, &line);
    serve__sse_event(out, &line);
    buf_free(&line);
}

void serve__sse_done(buf *out)
{
    buf_puts(out, "data: [DONE]\n\n");
}

const char *serve__finish_name(finish_reason r)
{
    switch (r) {
    case FINISH_LENGTH:
        return "length";
    case FINISH_STOP:
        return "stop";
    case FINISH_NONE:
    case FINISH_CANCELLED:
    case FINISH_ERROR:
        break;
    }
    return "stop";
}

/* vLLM's field: the string that matched, the id when it was one of stop_token_ids, null at an
 * ordinary end of turn. */
void serve__stop_reason_write(const call *c, const gen_choice *ch, jw *w)
{
    jw_key(w, "stop_reason");
    if (ch->stop_text) {
        jw_str(w, ch->stop_text);
        return;
    }
    for (int i = 0; i < c->r.p.n_stop_ids; i++)
        if (ch->reason == FINISH_STOP && c->r.stop_ids[i] == ch->stop_id) {
            jw_i64(w, ch->stop_id);
            return;
        }
    jw_null(w);
}

void serve__envelope_write(const call *c, jw *w)
{
    jw_obj(w);
    jw_kstr(w, "id", c->id);
    jw_kstr(w, "object", c->r.stream && c->r.chat ? "chat.completion.chunk" : c->shape->object);
    jw_ki64(w, "created", c->created);
    jw_kstr(w, "model", c->r.model);
    jw_kstr(w, "system_fingerprint", c->s->fingerprint);
}

/* Prompt tokens count once for each prompt, however many choices share it. */
void serve__usage_write(const call *c, jw *w)
{
    int64_t in = 0, out = 0, cached = 0;
    for (int64_t i = 0; i < c->r.n_prompts; i++)
        in += (int64_t)c->r.prompts[i].ids.n;
    for (int i = 0; i < c->n_choices; i++) {
        out += c->choices[i].output_tokens;
        if (i % (int)c->r.n == 0) cached += c->choices[i].cached_tokens;
    }
    jw_obj(w);
    jw_ki64(w, "prompt_tokens", in);
    jw_ki64(w, "completion_tokens", out);
    jw_ki64(w, "total_tokens", in + out);
    jw_key(w, "prompt_tokens_details");
    jw_obj(w);
    jw_ki64(w, "cached_tokens", cached);
    jw_end_obj(w);
    jw_end_obj(w);
}

void serve__usage_chunk_write(const call *c, jw *w)
{
    if (c->r.continuous_usage) {
        jw_key(w, "usage");
        serve__usage_write(c, w);
    } else if (c->r.include_usage) {
        jw_key(w, "usage");
        jw_null(w);
    }
}
