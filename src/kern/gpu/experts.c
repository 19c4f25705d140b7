/* Experts in the layout "packed": all of a layer in one product (cuda/experts.h), for each part of
 * their rows. The weights stay where the linear of each expert has put them; the kernels find them
 * by arrays of addresses. Few slots an expert go to operator small_experts, more to wide_experts.
 *
 * Inputs that are not multiplied as they come (codes of FP8 or int8, MX) are made anew once, before
 * rows are looked up by slot. */
#include <stdlib.h>
#include <string.h>
#include "kern/gpu/packed.h"

/* Slots of an expert, on average, from which a pass of wide tiles over its weights costs less than
 * several passes of eight slots. */
#define WIDE_FROM 8 /* where the table does not say */

typedef struct expert_part {
    const part *of; /* of the first expert */
    const void *const *w;
    const float *const *col, *const *bias; /* [E] on the device */
    int wide_from;
} expert_part;
typedef struct packed_experts {
    const gpu_experts_way *way; /* first */
    int E, n;
    int64_t K;
    expert_part part[KERN_MAX_SHARDS];
} packed_experts;

/* ---- room ---------------------------------------------------------------------------------------
 */

static int make_room(gpu_dev *g, err *e)
{
    struct gpu_experts_room *r = &g->experts;
    const size_t work = g->api->experts_work_bytes((int)r->k, r->E, r->slots);
    const size_t x = r->copies ? (size_t)(r->slots * r->k) * 2 : 0;
    int rc = 0;
    void *scale = NULL;
    TRY(gpu__keep(g, &r->work, NULL, work, e));
    g->pub.scratch_bytes += work + x;
    if (!r->copies) return 0;
    TRY(gpu__keep(g, &r->x, NULL, x, e));
    TRY(gpu__keep(g, &scale, NULL, sizeof(float) * (size_t)r->slots, e));
    r->scale = scale;
out:
    return rc;
}

int gpu__packed_experts_reserve(gpu_dev *g, int64_t max_slots, err *e)
{
    struct gpu_experts_room *r = &g->experts;
    if (max_slots <= r->slots) return 0;
    r->slots = max_slots;
    return r->E ? make_room(g, e) : 0;
}

static int widen(gpu_dev *g, const packed_experts *x, err *e)
{
    struct gpu_experts_room *r = &g->experts;
    bool copies = false;
    for (int i = 0; i < x->n; i++) {
        copies = copies || x->part[i].of->input != AS_IT_IS;
        if (x->part[i].of->input == VALUES && x->K > g->experts_k) g->experts_k = x->K;
    }
    const int64_t k = gpu__packed_k(x->K);
    if (k <= r->k && x->E <= r->E && (r->copies || !copies)) return 0;
    if (k > r->k) r->k = k;
    if (x->E > r->E) r->E = x->E;
    r->copies = r->copies || copies;
    return r->slots ? make_room(g, e) : 0;
}

/* ---- making -------------------------------------------------------------------------------------
 */

static bool same_codes(const gpu_codes *a, const gpu_codes *b)
{
    return a->code == b->code && a->fixed == b->fixed;
}
static bool same_values(const gpu_act *a, const gpu_act *b)
{
    return a->a_type == b->a_type && a->a_gran == b->a_gran && a->a_scale == b->a_scale &&
           a->a_group == b->a_group && a->in_scale == b->in_scale && a->in_zero == b->in_zero &&
           a->in_global == b->in_global;
}

static int alike(const kern_linear *first, const kern_linear *other, err *e)
{
    const packed *a = ((const gpu_linear *)first->own)->own;
    const packed *b = ((const gpu_linear *)other->own)->own;
    bool shape = a->n == b->n && first->K == other->K && first->N == other->N, input = true;
    for (int i = 0; shape && i < a->n; i++) {
        const part *p = &a->part[i], *q = &b->part[i];
        shape = p->format == q->format && p->N == q->N && p->row0 == q->row0;
        input = input && p->input == q->input && same_codes(&p->codes, &q->codes) &&
                same_values(&p->act, &q->act);
    }
    if (!shape)
        return err_set(e, ERR_UNSUPPORTED, "%s: its shape or format differs from that of %s",
                       other->name, first->name);
    if (!input)
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: the treatment of its input differs from that of %s; "
                       "--activation-dtype bf16 leaves inputs as they are",
                       other->name, first->name);
    return 0;
}

static int addresses(gpu_dev *g, kern_linear **expert, int E, int index, expert_part *out, err *e)
{
    int rc = 0;
    bool any = false;
    void *w = NULL, *col = NULL, *bias = NULL;
    const void **of_w = xcalloc((size_t)E, sizeof *of_w);
    const float **of_col = xcalloc((size_t)E, sizeof *of_col);
    const float **of_bias = xcalloc((size_t)E, sizeof *of_bias);
    for (int i = 0; i < E; i++) {
        const packed *p = ((const gpu_linear *)expert[i]->own)->own;
        const part *q = &p->part[index];
        of_w[i] = q->w;
        of_col[i] = q->col;
        of_bias[i] = p->bias ? p->bias + q->row0 : NULL;
        any = any || p->bias;
        if (any && !p->bias)
            rc = err_set(e, ERR_UNSUPPORTED, "%s: some experts have a bias, it has none",
                         expert[i]->name);
        if (rc < 0) goto out;
    }
    TRY(gpu__keep(g, &w, of_w, sizeof *of_w * (size_t)E, e));
    TRY(gpu__keep(g, &col, of_col, sizeof *of_col * (size_t)E, e));
    if (any) TRY(gpu__keep(g, &bias, of_bias, sizeof *of_bias * (size_t)E, e));
    const packed *first = ((const gpu_linear *)expert[0]->own)->own;
    const part *p = &first->part[index];
    *out = (expert_part){p, w, col, bias,
                         tuned_experts(&g->tuned, p->format, p->N, expert[0]->K, E, WIDE_FROM)};
out:
    free(of_w);
    free(of_col);
    free(of_bias);
    return rc;
}

static void run(gpu_dev *g, const void *own, const float *in, int64_t ldin, const int32_t *row,
                const int32_t *first, int64_t slots, float *y, int64_t ldy);
static const gpu_experts_way way = {run};

int gpu__packed_experts_make(gpu_dev *g, kern_linear **expert, int E, void **own, err *e)
{
    int rc = 0;
    packed_experts *x = xcalloc(1, sizeof *x);
    x->way = &way;
    x->E = E;
    x->n = ((const packed *)((const gpu_linear *)expert[0]->own)->own)->n;
    x->K = expert[0]->K;
    for (int i = 0; i < E; i++)
        TRY(alike(expert[0], expert[i], e));
    for (int i = 0; i < x->n; i++)
        TRY(addresses(g, expert, E, i, &x->part[i], e));
    TRY(widen(g, x, e));
    *own = x;
    x = NULL;
out:
    free(x);
    return rc;
}

/* ---- running ------------------------------------------------------------------------------------
 */

typedef struct input {
    const void *x;
    int64_t ldx;
    const float *row_scale;
} input;

/* Rows as the kernels take them. */
static bool take_input(gpu_dev *g, const packed_experts *o, const part *p, gpu_x x, int64_t ldx,
                       int64_t rows, input *out)
{
    const struct gpu_experts_room *r = &g->experts;
    *out = (input){x.p, ldx, NULL};
    if (p->input == AS_IT_IS && gpu__packed_fits(x, ldx)) return true;
    if (!r->x || rows > r->slots) {
        gpu__fail(g,
                  "experts of packed weights: %lld rows that are not bf16 in 16-byte steps, with "
                  "room for %lld",
                  (long long)rows, (long long)(r->x ? r->slots : 0));
        return false;
    }
    if (p->input == VALUES) {
        gpu_act_run a = {.plan = p->act, .x = x, .ldx = ldx, .M = rows, .out = g->act_scratch};
        gpu__push(g, GPU_OP_act_run, &a, sizeof a);
        x = (gpu_x){g->act_scratch, GPU_F32};
        ldx = p->act.Kp;
    }
    *out = (input){r->x, o->K, NULL};
    if (p->input == CODES) {
        gpu_quant a = {.x = x, .ld = ldx, .T = rows, .K = o->K, .to = p->codes};
        a.to.as_bf16 = true;
        a.to.p = r->x;
        a.to.ld = o->K;
        a.to.scale = r->scale;
        a.to.scale_row = 1;
        gpu__push(g, GPU_OP_quant, &a, sizeof a);
        out->row_scale = r->scale;
        return true;
    }
    gpu_copy copy = {
        .from = x, .to = {r->x, GPU_BF16}, .ldf = ldx, .ldt = o->K, .n = o->K, .rows = rows};
    gpu__push(g, GPU_OP_copy, &copy, sizeof copy);
    return true;
}

static void run(gpu_dev *g, const void *own, const float *in, int64_t ldin, const int32_t *row,
                const int32_t *first, int64_t slots, float *y, int64_t ldy)
{
    const packed_experts *o = own;
    const struct gpu_experts_room *r = &g->experts;
    if (!slots) return;
    if (!r->work || slots > r->slots) {
        gpu__fail(g, "experts with %lld slots, reserved for %lld", (long long)slots,
                  (long long)(r->work ? r->slots : 0));
        return;
    }
    input x = {0};
    for (int i = 0; i < o->n; i++) {
        const expert_part *p = &o->part[i];
        const gpu_x to = gpu__x(g, y + p->of->row0);
        /* Rows that slots choose among are those of the step. */
        if (!take_input(g, o, p->of, gpu__x(g, in), ldin, row ? g->now->T : slots, &x)) return;
        experts_call c = {.format = p->of->format,
                          .w = p->w,
                          .col_scale = p->col,
                          .bias = p->bias,
                          .x = x.x,
                          .ids = gpu__raw(g, row),
                          .first = gpu__raw(g, first),
                          .row_scale = x.row_scale,
                          .y = to.p,
                          .y_bf16 = to.type == GPU_BF16,
                          .ldx = x.ldx,
                          .ldy = ldy,
                          .slots = slots,
                          .N = (int)p->of->N,
                          .K = (int)gpu__packed_k(o->K),
                          .x_k = (int)o->K,
                          .E = o->E,
                          .work = r->work,
                          .pdl = gpu__packed_early(g)};
        const bool many = g->trial.experts ? g->trial.experts == 2
                                           : slots >= (int64_t)p->wide_from * o->E,
                   wide = many && ldy % 4 == 0 && (uintptr_t)to.p % 16 == 0 &&
                          g->api->launch[GPU_OP_wide_experts];
        gpu__push(g, wide ? GPU_OP_wide_experts : GPU_OP_small_experts, &c, sizeof c);
    }
}
