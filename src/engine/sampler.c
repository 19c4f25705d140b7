/* Choosing the next token.
 *
 * Order: repetition penalty (prompt and output), presence and frequency penalties (output), logit
 * bias, the ban of end tokens below min_tokens; greedy if temperature is 0; else logits /
 * temperature, top-k, top-p, min-p, one draw. The draw is a function of (seed, choice, position)
 * alone, so that batch mates cannot change a seeded request. Reported logprobs come from the raw
 * logits, in one formula, so that the chosen token and its entry among the alternatives print the
 * same decimal. */
#include <float.h>
#include <math.h>
#include <string.h>
#include "engine/engine_internal.h"

void sample_opts_default(sample_opts *s)
{
    *s = (sample_opts){.temperature = 1, .top_p = 1, .repetition_penalty = 1};
}

static uint64_t mix(uint64_t x)
{
    /* splitmix64 (Steele, Lea, Flood 2014) */
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

double engine__uniform(uint64_t seed, uint64_t choice, uint64_t position)
{
    uint64_t v = mix(mix(mix(seed) ^ choice) ^ position);
    return (double)(v >> 11) * 0x1p-53;
}

static int not_finite(int64_t id, float logit, err *e)
{
    return err_set(e, ERR_VALUE,
                   "the model's logits are not finite (token %lld is %g): the checkpoint or its "
                   "quantization is broken",
                   (long long)id, (double)logit);
}

double engine__lse(const float *logits, int64_t n, err *e, int *rc)
{
    float top = -FLT_MAX;
    *rc = 0;
    for (int64_t i = 0; i < n; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY) {
            *rc = not_finite(i, logits[i], e);
            return 0;
        }
        if (logits[i] > top) top = logits[i];
    }
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += exp((double)logits[i] - (double)top);
    return (double)top + log(sum);
}

void engine__logprob(const float *logits, int64_t V, double lse, int32_t id, int n_top,
                     token_logprob *out)
{
    *out = (token_logprob){.id = id, .logprob = (float)((double)logits[id] - lse)};
    if (n_top > REQ_MAX_TOP) n_top = REQ_MAX_TOP;
    float worst = -INFINITY;
    for (int64_t i = 0; n_top > 0 && i < V; i++) {
        if (out->n_top == n_top && logits[i] <= worst) continue;
        int k = out->n_top < n_top ? out->n_top++ : n_top - 1;
        for (; k > 0 && logits[out->top_id[k - 1]] < logits[i]; k--)
            out->top_id[k] = out->top_id[k - 1];
        out->top_id[k] = (int32_t)i;
        worst = logits[out->top_id[out->n_top - 1]];
    }
    for (int k = 0; k < out->n_top; k++)
        out->top_logprob[k] = (float)((double)logits[out->top_id[k]] - lse);
}

/* logits -> en->work with penalties, bias and bans. */
static void adjust(engine *en, const request *r, const float *logits)
{
    const sample_opts *s = &r->p.sample;
    float *w = en->work;
    memcpy(w, logits, sizeof *w * (size_t)en->vocab);
    float rep = (float)s->repetition_penalty;
    if (r->seen && rep != 1.0f)
        for (int64_t i = 0; i < en->vocab; i++)
            if (r->seen[i]) w[i] = w[i] > 0 ? w[i] / rep : w[i] * rep;
    if (r->counts)
        for (int64_t i = 0; i < en->vocab; i++)
            if (r->counts[i])
                w[i] -=
                    (float)s->frequency_penalty * (float)r->counts[i] + (float)s->presence_penalty;
    for (int i = 0; i < s->n_bias; i++)
        w[s->bias_ids[i]] += s->bias[i];
    if (r->n_ids - r->n_prompt < r->p.min_tokens) {
        for (int i = 0; i < en->n_eos; i++)
            w[en->eos[i]] = -INFINITY;
        for (int i = 0; i < r->p.n_stop_ids; i++)
            if (r->p.stop_ids[i] < en->vocab) w[r->p.stop_ids[i]] = -INFINITY;
    }
}

static int32_t argmax(const float *w, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (w[i] > w[best]) best = i;
    return (int32_t)best;
}

/* Max-heap of ids by weight; ties go to the lower id, so that results do not depend on the heap's
 * history. */
static bool above(const float *w, int32_t a, int32_t b)
{
    return w[a] > w[b] || (w[a] == w[b] && a < b);
}

static void sift(const float *w, int32_t *heap, int64_t n, int64_t i)
{
    for (;;) {
        int64_t c = 2 * i + 1;
        if (c >= n) return;
        if (c + 1 < n && above(w, heap[c + 1], heap[c])) c++;
        if (!above(w, heap[c], heap[i])) return;
        int32_t t = heap[c];
        heap[c] = heap[i];
        heap[i] = t;
        i = c;
    }
}

/* The n best ids in order at the end of the heap array is not needed: they are popped one by one
 * into out. */
static int32_t pop(const float *w, int32_t *heap, int64_t *n)
{
    int32_t top = heap[0];
    heap[0] = heap[--*n];
    sift(w, heap, *n, 0);
    return top;
}

static int32_t draw(engine *en, const request *r, const float *w)
{
    const sample_opts *s = &r->p.sample;
    int64_t V = en->vocab, n = V, k = s->top_k > 0 && s->top_k < V ? s->top_k : V;
    int32_t *heap = en->order;
    float top = w[argmax(w, V)];
    double inv = 1.0 / s->temperature, total = 0;
    for (int64_t i = 0; i < V; i++)
        total += exp(((double)w[i] - (double)top) * inv);
    bool filter = k < V || s->top_p < 1.0 || s->min_p > 0;
    double u = engine__uniform(r->seed, (uint64_t)r->p.choice, (uint64_t)(r->n_ids - r->n_prompt)),
           at = 0;
    if (!filter) {
        for (int64_t i = 0; i < V; i++)
            if ((at += exp(((double)w[i] - (double)top) * inv)) > u * total) return (int32_t)i;
        return argmax(w, V);
    }
    for (int64_t i = 0; i < V; i++)
        heap[i] = (int32_t)i;
    for (int64_t i = V / 2; i-- > 0;)
        sift(w, heap, V, i);
    /* top-p is a share of what top-k left, as transformers and vLLM apply them in turn; the kept
     * mass of top-k must therefore be known first: candidates are popped to the front of a list at
     * the array's end. */
    double kept = 0;
    int64_t m = 0;
    while (m < k && n > 0) {
        double p = exp(((double)w[heap[0]] - (double)top) * inv);
        if (m && (p < s->min_p || p <= 0 || (k == V && kept >= s->top_p * total))) break;
        int32_t id = pop(w, heap, &n);
        heap[n] = id; /* freed slot: list grows downwards from the end */
        kept += p;
        m++;
    }
    double want = k < V ? s->top_p * kept : s->top_p * total, cut = 0;
    int64_t use = 0;
    for (; use < m && (use == 0 || cut < want); use++)
        cut += exp(((double)w[heap[V - 1 - use]] - (double)top) * inv);
    for (int64_t i = 0; i < use; i++)
        if ((at += exp(((double)w[heap[V - 1 - i]] - (double)top) * inv)) > u * cut)
            return heap[V - 1 - i];
    return heap[V - 1];
}

/* Nothing changes logits before the choice. */
static bool is_plain(const request *r)
{
    return !r->seen && !r->counts && !r->p.sample.n_bias && r->p.min_tokens <= 0;
}

int engine__sample(engine *en, request *r, const float *logits, int32_t *token, err *e)
{
    int rc = 0;
    for (int64_t i = 0; i < en->vocab; i++)
        if (isnan(logits[i]) || logits[i] == INFINITY) {
            engine__lse(logits, en->vocab, e, &rc);
            return rc;
        }
    const sample_opts *s = &r->p.sample;
    bool plain = is_plain(r);
    if (!plain) adjust(en, r, logits);
    const float *w = plain ? logits : en->work;
    *token = s->temperature <= 0 ? argmax(w, en->vocab) : draw(en, r, w);
    return rc;
}

/* ---- from the best lanes of a row ---------------------------------------------------------------
 */

bool engine__best_suffices(const engine *en, const request *r)
{
    const sample_opts *s = &r->p.sample;
    bool few = s->top_k > 0 && s->top_k <= KERN_TOP && s->top_k < en->vocab;
    return is_plain(r) && (s->temperature <= 0 || few);
}

/* `draw` of a row where top_k filters: the same sums in the same order. */
static int32_t draw_best(const request *r, const kern_top *t)
{
    const sample_opts *s = &r->p.sample;
    double inv = 1.0 / s->temperature, p[KERN_TOP], kept = 0, cut = 0, at = 0;
    double u = engine__uniform(r->seed, (uint64_t)r->p.choice, (uint64_t)(r->n_ids - r->n_prompt));
    int m = 0, use = 0;
    for (; m < s->top_k; m++) {
        p[m] = exp(((double)t->value[m] - (double)t->value[0]) * inv);
        if (m && (p[m] < s->min_p || p[m] <= 0)) break;
        kept += p[m];
    }
    for (; use < m && (use == 0 || cut < s->top_p * kept); use++)
        cut += p[use];
    for (int i = 0; i < use; i++)
        if ((at += p[i]) > u * cut) return t->id[i];
    return t->id[0];
}

int engine__sample_best(const request *r, const kern_top *t, int32_t *token, err *e)
{
    if (t->odd >= 0) return not_finite(t->odd, t->odd_value, e);
    *token = r->p.sample.temperature <= 0 ? t->id[0] : draw_best(r, t);
    return 0;
}

void engine__logprob_best(const kern_top *t, int32_t id, int n_top, token_logprob *out)
{
    int at = 0;
    while (at < KERN_TOP - 1 && t->id[at] != id)
        at++;
    *out = (token_logprob){.id = id, .logprob = (float)((double)t->value[at] - t->lse)};
    if (n_top > REQ_MAX_TOP) n_top = REQ_MAX_TOP;
    for (int k = 0; k < n_top && t->id[k] >= 0; k++) {
        out->top_id[k] = t->id[k];
        out->top_logprob[k] = (float)((double)t->value[k] - t->lse);
        out->n_top++;
    }
}
