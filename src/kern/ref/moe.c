/* Plain C twin of routing: one token's scores, the choice among them, the weights of the chosen.
 *
 *   scores   softmax of all, or sigmoid of each, or the logits themselves (softmax later)
 *   choice   scores + bias; with groups of E/n_group neighbours, only the experts of the best
 *            topk_group groups; a group counts as the sum of its two best, or as its best
 *            (sparse mix: the share of each among those near it when it is chosen)
 *   weights  the scores (never the bias) of the chosen, or the softmax of their logits; divided by
 *            their sum when renormalized; times the scale
 *
 * Equal choices go to the lower index, in groups as in experts. A NaN and an infinite logit are
 * chosen last and first, and are still chosen, so that any logits give top_k different experts:
 * -inf in `choice` and `group` means taken or out, nothing else. */
#include <float.h>
#include "kern/ops.h"

/* Index of the largest that is still in, -1 when none is. */
static int best_of(const float *v, int n)
{
    int best = -1;
    for (int i = 0; i < n; i++)
        if (v[i] > -INFINITY && (best < 0 || v[i] > v[best])) best = i;
    return best;
}

static void softmax(const float *x, int n, float *out)
{
    float max = x[0], sum = 0;
    for (int i = 1; i < n; i++)
        max = x[i] > max ? x[i] : max;
    for (int i = 0; i < n; i++)
        sum += out[i] = expf(x[i] - max);
    for (int i = 0; i < n; i++)
        out[i] /= sum;
}

static float in_range(float x)
{
    return x > -FLT_MAX ? fminf(x, FLT_MAX) : -FLT_MAX; /* also a NaN */
}

static float group_score(const float *choice, int n, bool top2)
{
    float a = -INFINITY, b = -INFINITY;
    for (int i = 0; i < n; i++) {
        if (choice[i] > a) {
            b = a;
            a = choice[i];
        } else if (choice[i] > b) {
            b = choice[i];
        }
    }
    return in_range(top2 && n > 1 ? a + b : a);
}

/* Experts outside the best groups leave the choice. */
static void keep_groups(const kern_route_args *a, float *choice, float *group)
{
    int n = a->E / a->n_group;
    for (int g = 0; g < a->n_group; g++)
        group[g] = group_score(choice + g * n, n, a->group_top2);
    for (int i = 0; i < a->topk_group; i++) {
        int g = best_of(group, a->n_group);
        if (g >= 0) group[g] = -INFINITY;
    }
    for (int g = 0; g < a->n_group; g++)
        for (int i = g * n; i < (g + 1) * n && group[g] > -INFINITY; i++)
            choice[i] = -INFINITY;
}

/* Weight of `best` among what is in and near it. */
static float share_of_near(const float *x, const float *choice, int E, int best, float jitter)
{
    float sum = 0;
    for (int i = 0; i < E; i++) {
        float apart = (x[best] - x[i]) / fmaxf(fabsf(x[i]), x[best]);
        if (choice[i] > -INFINITY && !(apart > 2 * jitter)) sum += expf(x[i] - x[best]);
    }
    return 1.0f / sum;
}

static void weigh(const kern_route_args *a, const float *score, const int32_t *expert, float *w)
{
    float sum = 0;
    for (int j = 0; j < a->top_k; j++)
        w[j] = a->kind == KERN_ROUTE_SPARSE_MIX ? w[j] : score[expert[j]];
    if (a->kind == KERN_ROUTE_TOPK_SOFTMAX) softmax(w, a->top_k, w);
    for (int j = 0; j < a->top_k; j++)
        sum += w[j];
    for (int j = 0; j < a->top_k; j++)
        w[j] = (a->renorm ? w[j] / (sum + 1e-20f) : w[j]) * a->scale;
}

void kern__ref_route(const kern_route_args *a, int64_t t, float *tmp)
{
    const float *x = a->logits + t * a->E;
    float *score = tmp, *choice = tmp + a->E;
    int32_t *expert = a->expert + t * a->top_k;
    float *weight = a->weight + t * a->top_k;
    if (a->kind == KERN_ROUTE_SOFTMAX) softmax(x, a->E, score);
    for (int e = 0; e < a->E; e++) {
        if (a->kind == KERN_ROUTE_SIGMOID) score[e] = 1.0f / (1.0f + expf(-x[e]));
        if (a->kind == KERN_ROUTE_TOPK_SOFTMAX || a->kind == KERN_ROUTE_SPARSE_MIX) score[e] = x[e];
        choice[e] = in_range(score[e] + (a->bias ? a->bias[e] : 0.0f));
    }
    if (a->n_group > 1) keep_groups(a, choice, choice + a->E);
    for (int j = 0; j < a->top_k; j++) {
        int e = best_of(choice, a->E);
        expert[j] = e < 0 ? 0 : e; /* only with fewer experts in than top_k */
        if (a->kind == KERN_ROUTE_SPARSE_MIX)
            weight[j] = e < 0 ? 0 : share_of_near(x, choice, a->E, e, a->jitter);
        if (e >= 0) choice[e] = -INFINITY;
    }
    weigh(a, score, expert, weight);
}
