/* Linears of a GPU. A *layout* says how the weights of a linear lie on the device and is filled
 * once at load; a *row* multiplies from it for some numbers of tokens. Layouts are asked in order,
 * dense rows before packed ones, as many rows at once go to cuBLASLt as they lie then; the first
 * that can hold the weights and has a row for every bucket of M is taken. The last, "panels", holds
 * every weight: shard by shard in the layouts of the CPU, from which the plain kernels run
 * (cuda/plain_linear.cu); a weight that only the CPU's "canonical" layout holds (blocks that cross
 * rows, groups of unequal size) is expanded to f32 first, with the same numbers.
 *
 * A product of more than ACT_ROWS rows of the plain kernels is cut into pieces, for the sake of the
 * room that the treated input takes. */
#include "kern/gpu/linear.h"
#include "kern/gpu/lt.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ACT_ROWS 512

/* ---- panels -------------------------------------------------------------------------------------
 */

typedef struct panels_shard {
    kern_linear *cpu; /* prepared by the CPU; its weights are on the device alone */
    gpu_panels w;
    gpu_act act[KERN_BUCKETS];
    int64_t row0;
    void *mem;
} panels_shard;

typedef struct panels {
    int n;
    panels_shard shard[KERN_MAX_SHARDS];
    float *bias; /* [N] on the device or NULL */
} panels;

static void plain_plan(const kern_linear_desc *d, int shard, int bucket, kern__act_plan *p)
{
    (void)d, (void)shard, (void)bucket;
    p->kind = ACT_F32;
}
static void plain_part(const kern__part *p, int64_t lo, int64_t hi)
{
    kern__row_ref.part(p, lo, hi);
}
#define HELD(layout)                                                                               \
    {                                                                                              \
        "cuda-plain", layout, 0, NULL, plain_plan, plain_part                                      \
    }
static const kern_linear_row held[] = {HELD("w4p16"), HELD("w8p16"), HELD("w16p16"),
                                       HELD("w32p16")};

static int expand(const qtensor *q, qtensor *out, err *e)
{
    void *mem = NULL;
    int rc = mem_alloc(&mem, sizeof(float) * (size_t)(q->N * q->K), e);
    if (rc < 0) return rc;
    for (int64_t n = 0; n < q->N; n++)
        qtensor_decode_row(q, n, (float *)mem + n * q->K);
    qtensor_plain(out, NUM_F32, q->N, q->K, mem);
    out->spec.a = q->spec.a;
    out->pre_scale = q->pre_scale;
    out->input_scale = q->input_scale;
    out->input_zero = q->input_zero;
    out->input_global = q->input_global;
    out->owned[out->n_owned++] = mem;
    return 0;
}

static int prepare_with(gpu_dev *g, const kern_linear_desc *one, kern_linear **out, err *e)
{
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) {
        err why = {0};
        int rc = kern__linear_make_row(g->host, one, &held[i], out, &why);
        if (rc == 0 && !strcmp((*out)->shard[0].layout->name, "canonical")) {
            kern_linear_drop(g->host, *out);
            continue;
        }
        if (rc == 0) return 0;
        if (why.code != ERR_UNSUPPORTED) return err_set(e, why.code, "%s", why.msg);
    }
    return -ERR_UNSUPPORTED;
}

static int prepare(gpu_dev *g, const kern_linear_desc *d, int i, kern_linear **out, err *e)
{
    kern_linear_desc one = *d;
    qtensor wide = {0};
    one.n_shards = 1;
    one.shard[0] = d->shard[i];
    one.bias = NULL;
    one.strict = false;
    int rc = prepare_with(g, &one, out, e);
    if (rc != -ERR_UNSUPPORTED) return rc;
    rc = expand(d->shard[i], &wide, e);
    if (rc < 0) return rc;
    one.shard[0] = &wide;
    rc = prepare_with(g, &one, out, e);
    wide.pre_scale = NULL;
    qtensor_free(&wide);
    return rc == -ERR_UNSUPPORTED ? err_set(e, rc, "%s: no layout holds shard %d", d->name, i) : rc;
}

/* To the device, where it stays; the host's copy goes. */
static int settle(gpu_dev *g, panels_shard *s, err *e)
{
    struct kern_shard *h = &s->cpu->shard[0];
    const kern__prep *p = h->prep;
    int rc = 0;
    void *perm = NULL, *pre = NULL;
    TRY(gpu__device_alloc(g, &s->mem, p->total + 64, e));
    TRY(gpu__check(g, "upload", g->api->upload(s->mem, p, p->total, g->stream), e));
    TRY(gpu__check(g, "upload", g->api->sync(g->stream), e));
    gpu__panels_of(p, s->mem, &s->w);
    if (h->perm) TRY(gpu__keep(g, &perm, h->perm, (size_t)s->cpu->K * 4, e));
    if (h->pre_scale) TRY(gpu__keep(g, &pre, h->pre_scale, (size_t)s->cpu->K * 4, e));
    for (int b = 0; b < KERN_BUCKETS; b++) {
        gpu__act_of(&h->plan[b], &s->act[b]);
        s->act[b].perm = perm;
        s->act[b].pre_scale = pre;
    }
    kern_free(g->host, h->prep);
    h->prep = NULL;
out:
    return rc;
}

static const char *panels_refuse(const gpu_dev *g, const kern_linear_desc *d)
{
    (void)g, (void)d;
    return NULL;
}

static void panels_drop(gpu_dev *g, void *own)
{
    panels *p = own;
    for (int i = 0; i < p->n; i++) {
        if (p->shard[i].mem) g->api->free(p->shard[i].mem);
        kern_linear_drop(g->host, p->shard[i].cpu);
    }
    free(p);
}

static int panels_make(gpu_dev *g, const kern_linear_desc *d, gpu_linear *l, err *e)
{
    int rc = 0;
    int64_t row0 = 0;
    void *bias = NULL;
    panels *p = xcalloc(1, sizeof *p);
    l->own = p;
    for (int i = 0; i < d->n_shards; i++) {
        panels_shard *s = &p->shard[i];
        TRY(prepare(g, d, i, &s->cpu, e));
        p->n++;
        l->bytes += s->cpu->bytes;
        s->row0 = row0;
        row0 += d->shard[i]->N;
        TRY(settle(g, s, e));
    }
    if (d->bias) TRY(gpu__keep(g, &bias, d->bias, sizeof(float) * (size_t)row0, e));
    p->bias = bias;
out:
    return rc;
}

static void panels_unpack(gpu_dev *g, const gpu_linear *l, float *out)
{
    const panels *p = l->own;
    for (int i = 0; i < p->n; i++) {
        const panels_shard *s = &p->shard[i];
        struct kern_shard *h = &s->cpu->shard[0];
        h->prep = xmalloc(h->bytes);
        g->api->bind(g->index);
        g->api->download(h->prep, s->mem, s->w.alpha_off + (size_t)s->w.panels * 64, g->stream);
        g->api->sync(g->stream);
        kern_linear_unpack(s->cpu, out + s->row0 * s->cpu->K);
        free(h->prep);
        h->prep = NULL;
    }
}

static bool panels_can_embed(const gpu_linear *l)
{
    const panels *p = l->own;
    return p->n == 1 && kern_linear_can_embed(p->shard[0].cpu);
}

static void panels_embed(gpu_dev *g, const gpu_linear *l, const int32_t *ids, int64_t T, gpu_x out)
{
    const panels *p = l->own;
    gpu_embed a = {p->shard[0].w, gpu__ints(g, ids, T), T, out};
    gpu__push(g, GPU_OP_embed, &a, sizeof a);
}

static bool same_act(const gpu_act *a, const gpu_act *b)
{
    return a->a_type == b->a_type && a->a_gran == b->a_gran && a->a_scale == b->a_scale &&
           a->a_group == b->a_group && a->round_bf16 == b->round_bf16 &&
           a->in_scale == b->in_scale && a->in_zero == b->in_zero && a->in_global == b->in_global &&
           a->perm == b->perm && a->pre_scale == b->pre_scale && a->K == b->K && a->Kp == b->Kp;
}

static void panels_rows(gpu_dev *g, const panels *p, int b, const float *x, int64_t ldx, int64_t M,
                        float *y, int64_t ldy)
{
    const gpu_act *last = NULL;
    for (int i = 0; i < p->n; i++) {
        const panels_shard *s = &p->shard[i];
        gpu_act_run in = {.plan = s->act[b], .x = gpu__x(g, x), .ldx = ldx, .M = M};
        in.out = g->act_scratch;
        if (!last || !same_act(last, &s->act[b])) gpu__push(g, GPU_OP_act_run, &in, sizeof in);
        last = &s->act[b];
        gpu_product a = {.w = s->w,
                         .a = g->act_scratch,
                         .bias = p->bias ? p->bias + s->row0 : NULL,
                         .M = M,
                         .ldy = ldy,
                         .y = gpu__x(g, y + s->row0)};
        gpu__push(g, GPU_OP_product, &a, sizeof a);
    }
}

static void panels_run(gpu_dev *g, const gpu_linear *l, int bucket, const float *x, int64_t ldx,
                       int64_t M, float *y, int64_t ldy)
{
    for (int64_t m = 0; m < M; m += ACT_ROWS)
        panels_rows(g, l->own, bucket, x + m * ldx, ldx, M - m < ACT_ROWS ? M - m : ACT_ROWS,
                    y + m * ldy, ldy);
}

static void panels_choice(const gpu_linear *l, int bucket, kern_choice *out)
{
    const panels *p = l->own;
    const kern_choice *c = kern_linear_choice(p->shard[0].cpu, bucket);
    out->layout = c->layout;
    snprintf(out->act, sizeof out->act, "%s", c->act);
}

static const char *panels_bucket(const gpu_dev *g, const kern_linear_desc *d, int bucket)
{
    (void)g, (void)d, (void)bucket;
    return NULL;
}

static const gpu_linear_row panels_row = {"cuda-plain", panels_bucket, panels_run};
static const gpu_linear_row *const panels_rows_list[] = {&panels_row, NULL};
static const gpu_layout layout_panels = {.name = "panels",
                                         .rows = panels_rows_list,
                                         .refuse = panels_refuse,
                                         .make = panels_make,
                                         .drop = panels_drop,
                                         .unpack = panels_unpack,
                                         .can_embed = panels_can_embed,
                                         .embed = panels_embed,
                                         .choice = panels_choice};

const gpu_layout *const gpu_layouts[] = {&gpu__layout_dense, &gpu__layout_packed, &layout_panels};
const int gpu_n_layouts = sizeof gpu_layouts / sizeof *gpu_layouts;
enum { MOST_LAYOUTS = sizeof gpu_layouts / sizeof *gpu_layouts };

/* ---- choosing -----------------------------------------------------------------------------------
 */

static void note(char *text, size_t cap, const char *who, const char *why)
{
    size_t n = strlen(text);
    snprintf(text + n, cap - n, "%s%s: %s", n ? "; " : "", who, why);
}

/* A row for every bucket; why not otherwise. */
static bool rows_for(const gpu_dev *g, const gpu_layout *y, const kern_linear_desc *d,
                     gpu_linear *l, kern_choice choice[KERN_BUCKETS])
{
    for (int b = 0; b < KERN_BUCKETS; b++) {
        l->row[b] = NULL;
        for (int i = 0; y->rows[i] && !l->row[b]; i++) {
            const char *why = y->rows[i]->refuse(g, d, b);
            if (!why)
                l->row[b] = y->rows[i];
            else
                note(choice[b].refused, sizeof choice[b].refused, y->rows[i]->name, why);
        }
        if (!l->row[b]) return false;
    }
    return true;
}

static void note_all(kern_choice choice[KERN_BUCKETS], const char *who, const char *why)
{
    for (int b = 0; b < KERN_BUCKETS; b++)
        note(choice[b].refused, sizeof choice[b].refused, who, why);
}

/* The layouts in the order in which they are asked for this weight: late ones behind the others,
 * the last one last. */
static void in_order(const gpu_dev *g, const kern_linear_desc *d, const gpu_layout *out[])
{
    const gpu_layout *late[MOST_LAYOUTS];
    int n = 0, n_late = 0;
    for (int i = 0; i < gpu_n_layouts - 1; i++) {
        const gpu_layout *y = gpu_layouts[i];
        if (y->late && !y->refuse(g, d) && y->late(g, d))
            late[n_late++] = y;
        else
            out[n++] = y;
    }
    for (int i = 0; i < n_late; i++)
        out[n++] = late[i];
    out[n] = gpu_layouts[gpu_n_layouts - 1];
}

/* The first layout that takes it. One may find out only from the numbers that it does not hold
 * them: then the next is asked. */
static int choose(gpu_dev *g, const kern_linear_desc *d, gpu_linear *l,
                  kern_choice choice[KERN_BUCKETS], err *e)
{
    const gpu_layout *order[MOST_LAYOUTS];
    in_order(g, d, order);
    for (int i = 0; i < gpu_n_layouts; i++) {
        const gpu_layout *y = order[i];
        if (g->only && y != g->only && i < gpu_n_layouts - 1) continue;
        const char *why = y->refuse(g, d);
        if (why) note_all(choice, y->name, why);
        if (why || !rows_for(g, y, d, l, choice)) continue;
        err found = {0};
        int rc = y->make(g, d, l, &found);
        l->layout = y;
        if (rc == 0) return 0;
        if (rc != -ERR_UNSUPPORTED) return err_set(e, found.code, "%s", found.msg);
        if (l->own) y->drop(g, l->own);
        l->own = NULL;
        l->bytes = 0;
        note_all(choice, y->name, found.msg);
    }
    return err_set(e, ERR_UNSUPPORTED, "%s: no layout holds it: %s", d->name ? d->name : "linear",
                   choice[0].refused);
}

const gpu_layout *gpu__layout_for(gpu_dev *g, const kern_linear_desc *d)
{
    gpu_linear l = {0};
    kern_choice choice[KERN_BUCKETS] = {0};
    const gpu_layout *order[MOST_LAYOUTS];
    in_order(g, d, order);
    for (int i = 0; i < gpu_n_layouts - 1; i++) {
        const gpu_layout *y = order[i];
        if (!y->refuse(g, d) && rows_for(g, y, d, &l, choice)) return y;
    }
    return gpu_layouts[gpu_n_layouts - 1];
}

static const gpu_linear_row *row_named(const gpu_layout *y, const char *name)
{
    for (int i = 0; y->rows[i]; i++)
        if (!strcmp(y->rows[i]->name, name)) return y->rows[i];
    return NULL;
}

/* Rows that the table names go before those of the list's order. */
static void take_tuned(gpu_dev *g, const kern_linear_desc *d, gpu_linear *l)
{
    gpu_tuned_key key;
    if (!l->layout->tuned || !l->layout->tuned(l, &key)) return;
    for (int i = 0; i < TUNED_ROWS; i++) {
        tuned_entry *e;
        while ((e = tuned_find(&g->tuned, key.row, key.row_format, l->N, l->K, tuned_rows[i]))) {
            const gpu_linear_row *r = row_named(l->layout, e->plan);
            const char *why = "the layout has no such row";
            if (r) why = r->refuse(g, d, kern_bucket(tuned_rows[i]));
            if (!why) l->tuned[i] = r;
            if (!why) break;
            tuned_refuse(e, why);
        }
    }
}

static void count_plans(gpu_dev *g, const gpu_linear *l)
{
    gpu_tuned_key key;
    if (l->layout->tuned && l->layout->tuned(l, &key))
        tuned_count(&g->tuned, key.row, key.row_format, key.plan, key.plan_format, l->N, l->K);
}

static void tell_plan(const gpu_dev *g, const gpu_linear *l, int bucket, kern_choice *c)
{
    gpu_tuned_key key;
    if (!l->layout->tuned || !l->layout->tuned(l, &key)) return;
    char text[sizeof c->plan];
    tuned_text(&g->tuned, key.row, key.row_format, key.plan, key.plan_format, l->N, l->K, bucket,
               text, sizeof text);
    if (!*c->plan || strcmp(text, "rule")) memcpy(c->plan, text, sizeof text);
}

int gpu__linear_make(kern_dev *d, const kern_linear_desc *desc, kern_linear *pub, err *e)
{
    gpu_dev *g = gpu__of(d);
    int rc = 0;
    gpu_linear *l = xcalloc(1, sizeof *l);
    pub->own = l;
    l->dev = g;
    l->N = pub->N;
    l->K = pub->K;
    TRY(gpu__check(g, "bind", g->api->bind(g->index), e));
    TRY(choose(g, desc, l, pub->choice, e));
    take_tuned(g, desc, l);
    count_plans(g, l);
    for (int b = 0; b < KERN_BUCKETS; b++) {
        kern_choice *c = &pub->choice[b];
        c->row = l->row[b]->name;
        c->layout = l->layout->name;
        c->reference = l->row[b] == &panels_row;
        l->layout->choice(l, b, c);
        tell_plan(g, l, b, c);
        if (c->reference && desc->strict) {
            rc = err_set(e, ERR_UNSUPPORTED,
                         "%s: only the plain kernel takes it at batch bucket %d (%s); drop "
                         "--strict to run it anyway",
                         pub->name, b, c->refused);
            goto out;
        }
    }
    pub->bytes = l->bytes + (desc->bias ? sizeof(float) * (size_t)pub->N : 0);
out:
    return rc;
}

void gpu__linear_drop(kern_dev *d, kern_linear *pub)
{
    gpu_linear *l = pub->own;
    if (!l) return;
    gpu__of(d)->api->bind(gpu__of(d)->index);
    if (l->own) l->layout->drop(gpu__of(d), l->own);
    free(l);
    pub->own = NULL;
}

void gpu__linear_run(kern_dev *d, const kern_linear *pub, const float *x, int64_t ldx, int64_t M,
                     float *y, int64_t ldy)
{
    const gpu_linear *l = pub->own;
    const int b = kern_bucket(M);
    const gpu_linear_row *tuned = l->tuned[tuned_at(M)];
    if (M > 0) (tuned ? tuned : l->row[b])->run(gpu__of(d), l, b, x, ldx, M, y, ldy);
}

void gpu__linear_unpack(const kern_linear *pub, float *out)
{
    const gpu_linear *l = pub->own;
    l->layout->unpack(l->dev, l, out);
}

bool gpu__linear_can_embed(const kern_linear *pub)
{
    const gpu_linear *l = pub->own;
    return l->layout->can_embed && l->layout->can_embed(l);
}

void gpu__linear_embed(kern_dev *d, const kern_linear *pub, const int32_t *ids, int64_t T,
                       float *out)
{
    const gpu_linear *l = pub->own;
    l->layout->embed(gpu__of(d), l, ids, T, gpu__x(gpu__of(d), out));
}

/* ---- experts ------------------------------------------------------------------------------------
 * Of panels: for each shard one launch over all experts, each on its slots. */

typedef struct plain_shard {
    int64_t N, Kp, row0;
    gpu_act act;
    gpu_panels *w;      /* [E] on the device */
    const float **bias; /* [E] or NULL */
} plain_shard;
typedef struct plain_experts {
    const gpu_experts_way *way; /* first */
    int E, n;
    int64_t K;
    plain_shard shard[KERN_MAX_SHARDS];
} plain_experts;

/* Expert i is like expert 0 but for its numbers. */
static int alike(const kern_linear *first, const kern_linear *other, err *e)
{
    const gpu_linear *l0 = first->own, *l = other->own;
    if (l0->layout != l->layout)
        return err_set(
            e, ERR_UNSUPPORTED,
            "%s: its weights lie as %s, those of %s as %s (%s); --activation-dtype f32 lays "
            "all experts alike",
            other->name, l->layout->name, first->name, l0->layout->name,
            l->layout == &layout_panels ? other->choice[0].refused : first->choice[0].refused);
    if (l->layout != &layout_panels) return 0;
    const panels *p0 = l0->own, *p = l->own;
    bool same = p->n == p0->n && l->K == l0->K && l->N == l0->N;
    for (int i = 0; same && i < p->n; i++)
        same = p->shard[i].row0 == p0->shard[i].row0 && p->shard[i].w.Kp == p0->shard[i].w.Kp &&
               same_act(&p->shard[i].act[0], &p0->shard[i].act[0]);
    if (same) return 0;
    return err_set(e, ERR_UNSUPPORTED,
                   "%s: its shape or the treatment of its input differs from that of %s; "
                   "--activation-dtype bf16 leaves inputs as they are",
                   other->name, first->name);
}

static int settle_experts(gpu_dev *g, kern_linear **expert, int E, int shard, plain_shard *out,
                          err *e)
{
    int rc = 0;
    const panels *p0 = ((const gpu_linear *)expert[0]->own)->own;
    gpu_panels *w = xcalloc((size_t)E, sizeof *w);
    const float **bias = xcalloc((size_t)E, sizeof *bias);
    void *dev_w = NULL, *dev_bias = NULL;
    bool any = false;
    for (int i = 0; i < E; i++) {
        const panels *p = ((const gpu_linear *)expert[i]->own)->own;
        w[i] = p->shard[shard].w;
        bias[i] = p->bias ? p->bias + p->shard[shard].row0 : NULL;
        any = any || p->bias;
    }
    TRY(gpu__keep(g, &dev_w, w, sizeof *w * (size_t)E, e));
    if (any) TRY(gpu__keep(g, &dev_bias, bias, sizeof *bias * (size_t)E, e));
    *out = (plain_shard){.N = w[0].N,
                         .Kp = w[0].Kp,
                         .row0 = p0->shard[shard].row0,
                         .act = p0->shard[shard].act[0],
                         .w = dev_w,
                         .bias = dev_bias};
out:
    free(w);
    free(bias);
    return rc;
}

static void plain_run(gpu_dev *g, const void *own, const float *in, int64_t ldin,
                      const int32_t *row, const int32_t *first, int64_t slots, float *y,
                      int64_t ldy)
{
    const plain_experts *x = own;
    for (int i = 0; i < x->n; i++) {
        const plain_shard *s = &x->shard[i];
        gpu_act_run act = {.plan = s->act,
                           .x = gpu__x(g, in),
                           .ldx = ldin,
                           .M = slots,
                           .ids = gpu__raw(g, row),
                           .out = g->act_scratch};
        if (!i || !same_act(&s->act, &x->shard[i - 1].act))
            gpu__push(g, GPU_OP_act_run, &act, sizeof act);
        gpu_experts a = {.w = s->w,
                         .a = g->act_scratch,
                         .bias = s->bias,
                         .first = gpu__raw(g, first),
                         .E = x->E,
                         .slots = slots,
                         .N = s->N,
                         .K = x->K,
                         .Kp = s->Kp,
                         .ldy = ldy,
                         .y = gpu__x(g, y + s->row0)};
        gpu__push(g, GPU_OP_experts, &a, sizeof a);
    }
}

static const gpu_experts_way plain_way = {plain_run};

int gpu__experts_make(kern_dev *d, kern_linear **expert, int E, void **own, err *e)
{
    gpu_dev *g = gpu__of(d);
    int rc = 0;
    plain_experts *x = NULL;
    for (int i = 0; i < E; i++)
        TRY(alike(expert[0], expert[i], e));
    const gpu_linear *l0 = expert[0]->own;
    if (l0->layout == &gpu__layout_packed) return gpu__packed_experts_make(g, expert, E, own, e);
    x = xcalloc(1, sizeof *x);
    x->way = &plain_way;
    x->E = E;
    x->n = ((const panels *)l0->own)->n;
    x->K = l0->K;
    for (int i = 0; i < x->n; i++) {
        TRY(settle_experts(g, expert, E, i, &x->shard[i], e));
        if (x->shard[i].Kp > g->experts_k) g->experts_k = x->shard[i].Kp;
    }
    *own = x;
    x = NULL;
out:
    free(x);
    return rc;
}

void gpu__experts_drop(kern_dev *d, void *own)
{
    (void)d;
    free(own);
}

void gpu__experts_run(kern_dev *d, const void *own, const float *in, int64_t ldin,
                      const int32_t *row, const int32_t *first, int64_t slots, float *y,
                      int64_t ldy)
{
    const gpu_experts_way *const *way = own;
    (*way)->run(gpu__of(d), own, in, ldin, row, first, slots, y, ldy);
}

/* Room for the treated input of a product: ACT_ROWS rows, of experts all slots of a step. */
int gpu__reserve(kern_dev *d, int64_t max_rows, int64_t max_k, int64_t max_n, err *e)
{
    gpu_dev *g = gpu__of(d);
    int64_t rows = max_rows < ACT_ROWS ? max_rows : ACT_ROWS, k = (max_k + 31) / 32 * 32;
    size_t need = (size_t)(rows * k), experts = (size_t)(max_rows * g->experts_k);
    void *mem = NULL;
    (void)max_n;
    if (experts > need) need = experts;
    int rc = gpu__keep(g, &mem, NULL, need * sizeof(float), e);
    if (rc < 0) return rc;
    g->act_scratch = mem;
    g->pub.scratch_bytes += need * sizeof(float);
    rc = gpu__dense_reserve(g, max_rows, max_k, e);
    if (rc >= 0) rc = gpu__lt_reserve(g, e);
    if (rc >= 0) rc = gpu__packed_experts_reserve(g, max_rows, e);
    return rc < 0 ? rc : gpu__packed_reserve(g, max_rows, e);
}
