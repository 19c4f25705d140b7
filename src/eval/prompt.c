/* How a question is put to a model, and where context ends and continuation begins.
 *
 * With a chat template the question is one user message and the answer opens the assistant's turn;
 * without one (or with --raw-prompt) it is plain text. BOS of a plain prompt: --bos, where auto is
 * what the tokenizer itself adds; of a chat prompt: what the template wrote, never a second one.
 *
 * Boundary of a scored continuation, the same for every model and equal to what lm-eval does where
 * lm-eval has an answer:
 *   1. all = encode(context + continuation), c = encode(context). If c is a true prefix of all, the
 *      rest is the continuation.
 *   2. Else white space at the end of the context belongs to the continuation ("x: " + "C" is
 *      "x:" + " C"); c = encode of the shorter context, the continuation is all[len(c)..].
 *   3. If nothing would be left (one token spans the boundary: "Ans" + "wer"), the continuation is
 *      encoded alone. So there is always at least one token of it, and no context token is summed.
 * An empty context is BOS, or EOS where there is no BOS. A context that does not fit loses tokens
 * at its beginning; the continuation never does. */
#include "eval/local.h"
#include <stdlib.h>
#include <string.h>

int eval__bos(const tokenizer *t, const char *mode, bool *bos, err *e)
{
    if (!mode || !*mode || !strcmp(mode, "auto")) {
        *bos = tokenizer_adds_bos(t);
    } else if (!strcmp(mode, "no")) {
        *bos = false;
    } else if (!strcmp(mode, "yes")) {
        *bos = true;
        if (tokenizer_bos(t) < 0)
            return err_set(e, ERR_VALUE,
                           "--bos yes: this tokenizer has no BOS token; use --bos auto or no");
    } else {
        return err_set(e, ERR_USAGE, "--bos is auto, yes or no, not '%s'", mode);
    }
    return 0;
}

int eval__asker_init(asker *a, engine *en, const eval_opts *o, err *e)
{
    static const char *const turn_ends[] = {"<|im_end|>",      "<|im_start|>",  "<|endoftext|>",
                                            "<|eot_id|>",      "<end_of_turn>", "<start_of_turn>",
                                            "<|end_of_text|>", "<|end|>",       "<|user|>"};
    *a = (asker){.en = en, .tok = engine_tokenizer(en), .max_len = engine_max_len(en)};
    if (!a->tok)
        return err_set(e, ERR_MISSING,
                       "the model has no tokenizer.json: text tasks and perplexity need one");
    a->chat = engine_chat(en) && !o->raw_prompt;
    for (size_t i = 0; i < sizeof turn_ends / sizeof *turn_ends; i++) {
        int32_t id = tokenizer_token_id(a->tok, turn_ends[i]);
        if (id >= 0 && tokenizer_is_special(a->tok, id)) a->stop_ids[a->n_stop_ids++] = id;
    }
    return eval__bos(a->tok, o->bos, &a->bos, e);
}

void eval__context_free(context *c)
{
    buf_free(&c->text);
    ids_free(&c->front);
}

static bool ends_with(const ids *l, const ids *tail)
{
    return l->n >= tail->n && !memcmp(l->v + (l->n - tail->n), tail->v, tail->n * sizeof *tail->v);
}

/* The template's text, and the ids that engine_chat_ids puts before it. */
static int chat_context(const asker *a, const char *user, context *out, err *e)
{
    int rc = 0;
    ids with = {0}, plain = {0};
    cJSON *msgs = cJSON_CreateArray(), *m = cJSON_CreateObject();
    cJSON_AddStringToObject(m, "role", "user");
    cJSON_AddStringToObject(m, "content", user);
    cJSON_AddItemToArray(msgs, m);
    TRY(chat_render(engine_chat(a->en), msgs, NULL, true, tokenizer_bos_text(a->tok),
                    tokenizer_eos_text(a->tok), &out->text, e));
    TRY(engine_chat_ids(a->en, msgs, NULL, true, &with, e));
    TRY(tokenizer_encode(a->tok, out->text.data, out->text.len, false, &plain, e));
    if (ends_with(&with, &plain))
        for (size_t i = 0; i < with.n - plain.n; i++)
            ids_push(&out->front, with.v[i]);
    rc = 0;
out:
    cJSON_Delete(msgs);
    ids_free(&with);
    ids_free(&plain);
    return rc;
}

int eval__context(const asker *a, const char *user, const char *plain, context *out, err *e)
{
    *out = (context){0};
    buf_puts(&out->text, "");
    int rc = 0;
    if (a->chat) {
        rc = chat_context(a, user, out, e);
    } else {
        buf_puts(&out->text, plain);
        if (a->bos) ids_push(&out->front, tokenizer_bos(a->tok));
    }
    if (rc < 0) eval__context_free(out);
    return rc;
}

static int encode(const asker *a, const ids *front, const char *s, size_t n, ids *out, err *e)
{
    for (size_t i = 0; i < front->n; i++)
        ids_push(out, front->v[i]);
    return n ? tokenizer_encode(a->tok, s, n, false, out, e) : 0;
}

int eval__context_ids(const asker *a, const context *c, ids *out, err *e)
{
    return encode(a, &c->front, c->text.data, c->text.len, out, e);
}

static bool white(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

const char *eval__label_gap(const context *c)
{
    return c->text.len && white(c->text.data[c->text.len - 1]) ? "" : " ";
}

/* Steps 1 to 3 of the rule above: *all and how many of its tokens are context. */
static int boundary(const asker *a, const context *c, const char *cont, ids *all,
                    int64_t *n_context, err *e)
{
    int rc = 0;
    ids ctx = {0}, none = {0};
    buf join = {0};
    size_t keep = c->text.len;
    buf_add(&join, c->text.data, c->text.len);
    buf_puts(&join, cont);
    TRY(encode(a, &c->front, join.data, join.len, all, e));
    TRY(encode(a, &c->front, c->text.data, keep, &ctx, e));
    bool clean = ctx.n < all->n && (!ctx.n || !memcmp(ctx.v, all->v, ctx.n * sizeof *ctx.v));
    if (!clean) {
        while (keep && white(c->text.data[keep - 1]))
            keep--;
        ctx.n = 0;
        TRY(encode(a, &c->front, c->text.data, keep, &ctx, e));
    }
    if (ctx.n >= all->n) {
        all->n = 0;
        for (size_t i = 0; i < ctx.n; i++)
            ids_push(all, ctx.v[i]);
        TRY(encode(a, &none, join.data + keep, join.len - keep, all, e));
    }
    *n_context = (int64_t)ctx.n;
    rc = 0;
out:
    ids_free(&ctx);
    ids_free(&none);
    buf_free(&join);
    return rc;
}

int eval__pair(const asker *a, const context *c, const char *continuation, const char *where,
               shot *out, err *e)
{
    int rc;
    ids all = {0};
    TRY(boundary(a, c, continuation, &all, &out->n_context, e));
    if ((int64_t)all.n <= out->n_context) {
        rc = err_set(e, ERR_FORMAT, "%s: the continuation has no tokens (it is empty)", where);
        goto out;
    }
    if (out->n_context == 0) {
        int32_t first = tokenizer_bos(a->tok);
        if (first < 0) first = tokenizer_eos(a->tok);
        if (first < 0) {
            rc = err_set(
                e, ERR_VALUE,
                "%s: empty context, and the tokenizer has neither BOS nor EOS to stand for it",
                where);
            goto out;
        }
        ids_push(&out->prompt, first);
        out->n_context = 1;
    }
    int64_t lost = (int64_t)(out->prompt.n + all.n) - a->max_len;
    if (lost >= out->n_context) {
        rc = err_set(e, ERR_TOOLONG,
                     "%s: the continuation alone has %lld tokens; the model takes %lld", where,
                     (long long)((int64_t)all.n - out->n_context), (long long)a->max_len);
        goto out;
    }
    int64_t skip = lost > 0 ? lost : 0; /* an artificial first token never overflows: n_context 1 */
    out->n_context -= skip;
    for (size_t i = (size_t)skip; i < all.n; i++)
        ids_push(&out->prompt, all.v[i]);
    out->score = true;
    rc = 0;
out:
    ids_free(&all);
    return rc;
}

/* Is each shot the first one's context plus one token? */
static bool one_token_each(const shot *s, int n)
{
    for (int k = 0; k < n; k++) {
        if (s[k].n_context != s[0].n_context || (int64_t)s[k].prompt.n != s[k].n_context + 1)
            return false;
        if (memcmp(s[k].prompt.v, s[0].prompt.v, (size_t)s[0].n_context * sizeof *s[0].prompt.v))
            return false;
    }
    return true;
}

int eval__options(const asker *a, const context *c, const char *const *continuations, int n,
                  const char *where, task_item *it, err *e)
{
    shot *s = eval__item_shots(it, n);
    it->n_options = n;
    for (int k = 0; k < n; k++) {
        int rc = eval__pair(a, c, continuations[k], where, &s[k], e);
        if (rc < 0) return rc;
    }
    if (!one_token_each(s, n)) return 0;
    for (int k = 0; k < n; k++)
        ids_push(&s[0].alts, s[k].prompt.v[s[k].n_context]);
    s[0].alt_logprob = xcalloc((size_t)n, sizeof *s[0].alt_logprob);
    s[0].prompt.n--;
    s[0].n_context = (int64_t)s[0].prompt.n - 1;
    for (int k = 1; k < n; k++)
        eval__shot_free(&s[k]);
    it->n_shots = it->n_left = 1;
    return 0;
}

double eval__option_logprob(const task_item *it, int k)
{
    return it->n_shots == 1 ? it->shots[0].alt_logprob[k] : it->shots[k].logprob;
}
