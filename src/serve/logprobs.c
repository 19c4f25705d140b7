/* Log-probabilities in the two shapes of the OpenAI API.
 *
 * One float has one decimal text here ("%.9g", which reads back to the same float), so a token's
 * own entry and its entry among the alternatives are equal as text: evaluation harnesses decide
 * "was this the greedy token" by comparing them. JSON has no -inf: the floor is -9999.0.
 *
 * text_offset counts characters (code points) of the choice's text. It is found by decoding along:
 * the offset of a token is how many whole characters the tokens before it made, so the tokens of
 * one split character share an offset. */
#include "serve/serve_int.h"
#include "base/utf8.h"
#include <math.h>
#include <string.h>

#define LOGPROB_FLOOR (-9999.0)
#define MAX_ENTRIES   (REQ_MAX_TOP + 2)

void serve__jw_logprob(jw *w, float lp)
{
    char text[32];
    if (!(lp > (float)LOGPROB_FLOOR)) {
        jw_raw(w, "-9999.0");
        return;
    }
    snprintf(text, sizeof text, "%.9g", (double)lp);
    jw_raw(w, text);
}

void serve__token_text(const call *c, int32_t id, buf *out)
{
    const tokenizer *t = engine_tokenizer(c->s->en);
    if (!t || c->r.token_ids_as_text) {
        buf_printf(out, "token_id:%d", id);
        return;
    }
    buf raw = {0};
    tokenizer_token_bytes(t, id, &raw);
    utf8_add_lossy(out, raw.data ? raw.data : "", raw.len);
    buf_free(&raw);
}

static void write_token(const call *c, jw *w, int32_t id)
{
    buf b = {0};
    serve__token_text(c, id, &b);
    jw_strn(w, b.data ? b.data : "", b.len);
    buf_free(&b);
}

/* ---- alternatives, best first
 * -------------------------------------------------------------------- */

typedef struct entry {
    int32_t id;
    float lp;
} entry;

/* The k best of lp's list; with_chosen: and the chosen token if it is not among them. */
static int entries(const token_logprob *lp, int64_t k, bool with_chosen, entry out[MAX_ENTRIES])
{
    int n = 0;
    for (int i = 0; i < lp->n_top && i <= REQ_MAX_TOP; i++) {
        int j = n++;
        for (; j > 0 && out[j - 1].lp < lp->top_logprob[i]; j--)
            out[j] = out[j - 1];
        out[j] = (entry){lp->top_id[i], lp->top_logprob[i]};
    }
    if (n > k) n = (int)k;
    if (!with_chosen) return n;
    for (int i = 0; i < n; i++)
        if (out[i].id == lp->id) return n;
    out[n++] = (entry){lp->id, lp->logprob};
    return n;
}

/* {text: logprob}; equal texts (different ids) collapse to the largest, which comes first unless
 * the chosen token was appended. */
static void write_top_dict(const call *c, jw *w, const token_logprob *lp)
{
    entry list[MAX_ENTRIES];
    buf text[MAX_ENTRIES] = {{0}};
    int n = entries(lp, c->r.logprobs, true, list);
    jw_obj(w);
    for (int i = 0; i < n; i++) {
        float best = list[i].lp;
        bool seen = false;
        serve__token_text(c, list[i].id, &text[i]);
        if (!text[i].data) buf_puts(&text[i], "");
        for (int j = 0; j < i && !seen; j++)
            seen = !strcmp(text[j].data, text[i].data);
        if (seen) continue;
        jw_key(w, text[i].data);
        serve__jw_logprob(w, best);
    }
    jw_end_obj(w);
    for (int i = 0; i < n; i++)
        buf_free(&text[i]);
}

/* ---- completions
 * --------------------------------------------------------------------------------- */

static int64_t count_chars(const char *s, size_t n)
{
    int64_t chars = 0;
    for (size_t i = 0; i < n; i++)
        chars += ((unsigned char)s[i] & 0xC0) != 0x80;
    return chars;
}

static int64_t offset_step(call *c, gen_choice *ch, int32_t id, bool textless)
{
    int64_t at = ch->chars;
    const tokenizer *t = engine_tokenizer(c->s->en);
    if (!t || textless) return at;
    if (!ch->offsets_on) {
        detok_init(&ch->offsets, t, false);
        ch->offsets.first = !c->r.p.continues || c->r.echo;
    }
    ch->offsets_on = true;
    buf b = {0};
    detok_push(&ch->offsets, id, &b);
    ch->chars += count_chars(b.data ? b.data : "", b.len);
    buf_free(&b);
    return at;
}

static bool generated_textless(const call *c, int32_t id)
{
    const tokenizer *t = engine_tokenizer(c->s->en);
    return t && !c->r.p.keep_special && tokenizer_is_special(t, id);
}

/* Prompt positions [0, n_prompt) come first, then the n generated tokens. */
typedef struct span {
    const gen_prompt *pr;
    size_t n_prompt, n;
    const token_logprob *plps, *lps;
} span;

static const token_logprob *span_at(const span *s, size_t i)
{
    return i < s->n_prompt ? &s->plps[i] : &s->lps[i - s->n_prompt];
}

static int32_t span_id(const span *s, size_t i)
{
    return i < s->n_prompt ? s->pr->ids.v[i] : s->lps[i - s->n_prompt].id;
}

static void write_offsets(call *c, gen_choice *ch, jw *w, const span *s)
{
    jw_key(w, "text_offset");
    jw_arr(w);
    for (size_t i = 0; i < s->n_prompt + s->n; i++) {
        int32_t id = span_id(s, i);
        bool textless = i < s->n_prompt ? (int64_t)i < s->pr->n_lead : generated_textless(c, id);
        jw_i64(w, offset_step(c, ch, id, textless));
    }
    jw_end_arr(w);
}

void serve__logprobs_completion(call *c, gen_choice *ch, jw *w, bool with_prompt,
                                const token_logprob *lps, size_t n)
{
    span s = {.pr = &c->r.prompts[ch->prompt], .n = n, .lps = lps, .plps = ch->plps};
    if (with_prompt) s.n_prompt = ch->n_plps < s.pr->ids.n ? ch->n_plps : s.pr->ids.n;
    size_t all = s.n_prompt + n;
    jw_obj(w);
    jw_key(w, "tokens");
    jw_arr(w);
    for (size_t i = 0; i < all; i++)
        write_token(c, w, span_id(&s, i));
    jw_end_arr(w);
    jw_key(w, "token_logprobs");
    jw_arr(w);
    for (size_t i = 0; i < all; i++) {
        const token_logprob *lp = span_at(&s, i);
        if (lp->none)
            jw_null(w);
        else
            serve__jw_logprob(w, lp->logprob);
    }
    jw_end_arr(w);
    jw_key(w, "top_logprobs");
    jw_arr(w);
    for (size_t i = 0; i < all; i++) {
        const token_logprob *lp = span_at(&s, i);
        if (lp->none)
            jw_null(w);
        else
            write_top_dict(c, w, lp);
    }
    jw_end_arr(w);
    write_offsets(c, ch, w, &s);
    jw_end_obj(w);
}

/* ---- chat
 * ---------------------------------------------------------------------------------------- */

static void write_chat_entry(const call *c, jw *w, int32_t id, float lp)
{
    const tokenizer *t = engine_tokenizer(c->s->en);
    buf raw = {0};
    if (t) tokenizer_token_bytes(t, id, &raw);
    jw_key(w, "token");
    write_token(c, w, id);
    jw_key(w, "logprob");
    serve__jw_logprob(w, lp);
    jw_key(w, "bytes");
    jw_arr(w);
    for (size_t i = 0; i < raw.len; i++)
        jw_i64(w, (unsigned char)raw.data[i]);
    jw_end_arr(w);
    buf_free(&raw);
}

void serve__logprobs_chat(const call *c, jw *w, const token_logprob *lps, size_t n)
{
    jw_obj(w);
    jw_key(w, "content");
    jw_arr(w);
    for (size_t i = 0; i < n; i++) {
        entry list[MAX_ENTRIES];
        int k = entries(&lps[i], c->r.logprobs, false, list);
        jw_obj(w);
        write_chat_entry(c, w, lps[i].id, lps[i].logprob);
        jw_key(w, "top_logprobs");
        jw_arr(w);
        for (int j = 0; j < k; j++) {
            jw_obj(w);
            write_chat_entry(c, w, list[j].id, list[j].lp);
            jw_end_obj(w);
        }
        jw_end_arr(w);
        jw_end_obj(w);
    }
    jw_end_arr(w);
    jw_key(w, "refusal");
    jw_null(w);
    jw_end_obj(w);
}
