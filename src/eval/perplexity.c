/* Perplexity of a text, as the transformers documentation measures fixed-length models.
 *
 * The text is tokenized once, as a whole. Window i covers text tokens [i*stride, i*stride + cap),
 * cut at the end of the text; the last window is the one that reaches the end. With stride = window
 * the windows are independent; with a smaller stride they overlap and each scores only the tokens
 * that no earlier window scored, so every token is scored at most once.
 *
 * BOS: with --bos yes (or auto and a tokenizer that adds it) every window begins with one BOS,
 * which counts towards the window's length (cap = window - 1) and is context for its first token.
 * Without BOS the first token of the text, and of each window that does not overlap, has no context
 * and is not scored.
 *
 *     nll = -(1/n) sum ln p(token | window so far)     perplexity = exp(nll)
 *
 * summed in double in the order of the text, whatever order the windows were computed in. */
#include "eval/local.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/file.h"
#include "base/log.h"
#include "base/utf8.h"

void eval__ppl_free(ppl_text *t)
{
    ids_free(&t->text);
}

static int64_t window_cap(const ppl_text *t)
{
    return t->window - (t->bos ? 1 : 0);
}

static int check_sizes(ppl_text *t, int64_t max_len, const eval_opts *o, err *e)
{
    t->window = o->window > 0 ? o->window : 2048;
    t->stride = o->stride > 0 ? o->stride : t->window;
    if (t->window > max_len) {
        log_warn("perplexity: window %lld is longer than the model takes; %lld is used",
                 (long long)t->window, (long long)max_len);
        t->window = max_len;
    }
    if (t->window < 2 + (t->bos ? 1 : 0))
        return err_set(e, ERR_VALUE, "--window %lld is too short to score anything",
                       (long long)t->window);
    if (t->stride > window_cap(t)) t->stride = window_cap(t);
    return 0;
}

int eval__ppl_open(ppl_text *t, const tokenizer *tok, int64_t max_len, const char *file,
                   const eval_opts *o, err *e)
{
    int rc;
    buf text = {0};
    *t = (ppl_text){0};
    if (!tok)
        return err_set(e, ERR_MISSING,
                       "the model has no tokenizer.json: perplexity of a text needs one");
    TRY(eval__bos(tok, o->bos, &t->bos, e));
    t->bos_id = t->bos ? tokenizer_bos(tok) : -1;
    TRY(check_sizes(t, max_len, o, e));
    TRY(file_read_all(&text, file, (size_t)1 << 32, e));
    size_t ok = utf8_valid_prefix(text.data, text.len);
    if (ok != text.len) {
        bool gz = text.len > 2 && !memcmp(text.data, "\x1f\x8b", 2);
        rc = err_set(e, ERR_FORMAT, "%s: byte %zu is not UTF-8 text%s", file, ok,
                     gz ? " (a gzip file: unpack it first)" : "");
        goto out;
    }
    TRY(tokenizer_encode(tok, text.data, text.len, false, &t->text, e));
    if (o->ppl_tokens > 0 && (int64_t)t->text.n > o->ppl_tokens) t->text.n = (size_t)o->ppl_tokens;
    if ((int64_t)t->text.n + (t->bos ? 1 : 0) < 2) {
        rc = err_set(e, ERR_FORMAT, "%s: %zu tokens of text: nothing to score", file, t->text.n);
        goto out;
    }
    rc = 0;
out:
    buf_free(&text);
    if (rc < 0) eval__ppl_free(t);
    return rc;
}

bool eval__ppl_next(const ppl_text *t, ppl_window *w)
{
    int64_t n = (int64_t)t->text.n, done = w->end;
    if (done >= n) return false;
    w->begin = done ? w->begin + t->stride : 0;
    w->end = w->begin + window_cap(t) < n ? w->begin + window_cap(t) : n;
    /* First text token to score, as a position of the prompt. Position 0 has no context. */
    int64_t first = (done > w->begin ? done : w->begin) - w->begin + (t->bos ? 1 : 0);
    w->from = first > 1 ? first : 1;
    return true;
}

void eval__ppl_prompt(const ppl_text *t, const ppl_window *w, ids *out)
{
    if (t->bos) ids_push(out, t->bos_id);
    for (int64_t i = w->begin; i < w->end; i++)
        ids_push(out, t->text.v[i]);
}

void eval__ppl_head(const ppl_text *t, eval_ppl *r)
{
    ids p = {0};
    ppl_window w = {0};
    r->window = t->window;
    r->stride = t->stride;
    r->bos = t->bos;
    if (eval__ppl_next(t, &w)) eval__ppl_prompt(t, &w, &p);
    for (size_t i = 0; i < 8 && i < p.n; i++)
        r->first_ids[i] = p.v[i];
    ids_free(&p);
}

static int make_shots(const ppl_text *t, shot **out, int64_t *n)
{
    int64_t cap = 0;
    ppl_window w = {0};
    while (eval__ppl_next(t, &w)) {
        if (w.end - w.begin + (t->bos ? 1 : 0) <= w.from) continue; /* a last window of one token */
        if (*n == cap) {
            cap = cap ? 2 * cap : 64;
            *out = xrealloc(*out, (size_t)cap * sizeof **out);
        }
        shot *s = &(*out)[(*n)++];
        *s = (shot){.score = true, .n_context = w.from};
        eval__ppl_prompt(t, &w, &s->prompt);
    }
    return 0;
}

int eval_perplexity(engine *en, const char *file, const eval_opts *o, eval_ppl *r, err *e)
{
    int rc;
    ppl_text t = {0};
    shot *shots = NULL, *s;
    int64_t n = 0, next = 0, landed = 0;
    air a;
    progress p;
    *r = (eval_ppl){0};
    eval__air_init(&a, en);
    progress_start(&p, "perplexity", 0);
    TRY(eval__ppl_open(&t, engine_tokenizer(en), engine_max_len(en), file, o, e));
    eval__ppl_head(&t, r);
    make_shots(&t, &shots, &n);
    p.total = (uint64_t)n;
    while (landed < n) {
        int sent = 0;
        if (next < n) TRY(sent = eval__air_submit(&a, &shots[next], e));
        next += sent;
        if (sent) continue;
        if (!(s = eval__air_wait(&a))) {
            rc = err_set(e, ERR_BUSY, "%s: the engine accepts no request", file);
            goto out;
        }
        if (s->error.code) {
            rc = err_set(e, s->error.code, "%s: window %lld: %s", file, (long long)(s - shots),
                         s->error.msg);
            goto out;
        }
        ids_free(&s->prompt);
        progress_step(&p, (uint64_t)++landed, NULL);
    }
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum -= shots[i].logprob;
        r->n_tokens += shots[i].n_scored;
    }
    r->n_windows = n;
    r->nll = r->n_tokens ? sum / (double)r->n_tokens : 0;
    r->perplexity = exp(r->nll);
    rc = 0;
out:
    eval__air_free(&a);
    progress_end(&p);
    for (int64_t i = 0; i < n; i++)
        eval__shot_free(&shots[i]);
    free(shots);
    eval__ppl_free(&t);
    return rc;
}
