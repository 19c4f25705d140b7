/* The second half of a layer: each token on its own. A gated or plain feed-forward, or the experts
 * that a router chooses, with a shared one beside them. Reads m->in. */
#include "model/model_internal.h"

/* Up, activation, down of one dense pair of linears of width f. */
static void dense(model *m, const kern_linear *up, const kern_linear *down, bool gated, int64_t f,
                  int64_t T, float *out)
{
    int64_t h = m->arch->hidden, ld = gated ? 2 * f : f;
    kern_linear_run(m->dev, up, m->in, h, T, m->gu, ld);
    if (gated)
        kern_glu_mul(m->dev, m->arch->act, m->gu, ld, f, T, m->act);
    else
        kern_act_apply(m->dev, m->arch->act, m->gu, ld, f, T, m->act, f);
    kern_linear_run(m->dev, down, m->act, f, T, out, h);
}

static void route(model *m, const model_layer *l, int64_t T)
{
    const arch_moe *x = &m->arch->moe;
    kern_linear_run(m->dev, l->lin[ARCH_ROUTER], m->in, m->arch->hidden, T, m->route_logits, x->E);
    kern_route_args a = {.logits = m->route_logits,
                         .E = x->E,
                         .top_k = x->top_k,
                         .kind = x->route,
                         .bias = l->route_bias,
                         .n_group = x->n_group,
                         .topk_group = x->topk_group,
                         .group_top2 = x->group_top2,
                         .renorm = x->renorm,
                         .jitter = x->jitter,
                         .scale = x->scale,
                         .expert = m->route_expert,
                         .weight = m->route_weight};
    kern_route(m->dev, &a, T);
    kern_route_sort(m->dev, m->route_expert, T, x->top_k, x->E, m->route_row, m->route_first,
                    m->route_slot);
}

static void experts(model *m, const model_layer *l, int64_t T, float *out)
{
    const arch_moe *x = &m->arch->moe;
    int64_t h = m->arch->hidden, f = x->inter, slots = T * x->top_k;
    route(m, l, T);
    kern_experts_run(m->dev, l->e_up, m->in, h, m->route_row, m->route_first, slots, m->gu, 2 * f);
    kern_glu_mul(m->dev, x->act, m->gu, 2 * f, f, slots, m->act);
    kern_experts_run(m->dev, l->e_down, m->act, f, NULL, m->route_first, slots, m->gu, h);
    kern_route_combine(m->dev, m->gu, h, m->route_weight, m->route_slot, x->top_k, T, h, false,
                       out);
    if (!x->shared_inter) return;
    dense(m, l->lin[ARCH_SHARED_UP], l->lin[ARCH_SHARED_DOWN], true, x->shared_inter, T, m->y2);
    if (l->lin[ARCH_SHARED_GATE]) {
        kern_linear_run(m->dev, l->lin[ARCH_SHARED_GATE], m->in, h, T, m->route_logits, 1);
        kern_row_sigmoid(m->dev, m->y2, h, m->route_logits, 1, h, T);
    }
    kern_add(m->dev, out, m->y2, T * h);
}

void model__ffn(model *m, int layer, int64_t T, float *out)
{
    const model_layer *l = &m->layers[layer];
    const arch_layer *a = &m->arch->layers[layer];
    if (a->ffn == ARCH_MOE)
        experts(m, l, T, out);
    else
        dense(m, l->lin[ARCH_GATE_UP], l->lin[ARCH_DOWN], a->ffn == ARCH_GLU, a->inter, T, out);
    kern_all_reduce(m->dev, out, T * m->arch->hidden);
}
