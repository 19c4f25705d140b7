/* Experts: E linears of one shape, of which a step uses some, each on its own slots, as one
 * product.
 *
 * A piece is one expert and some of its slots; it runs by the rows that this expert chose for the
 * bucket of all its slots, so that the numbers are those of kern_linear_run. Pieces are taken in
 * waves of as many slots as the scratch has room for, and in a wave
 *
 *   tokens    (first wave only) inputs of tokens prepared once, where all experts treat them alike
 *             and more slots than tokens want them
 *   slots     inputs of a piece laid side by side: copied from those of the tokens, or prepared
 *   panels    (piece, some panels of its weight) is an item; the team takes items as it gets free
 *
 * with a barrier between. A piece of one slot looks at the token's input in place. Few cells are
 * prepared by every thread for itself, without a barrier: decode of one token waits only at its
 * end.
 *
 * Scratch: KERN_MROWS tokens and slots together, that of a linear and a little for each piece,
 * grown when the experts are made. Steps of more than half as many tokens prepare each slot.
 * Experts whose shards treat their input differently, or are cut differently, run one after the
 * other. */
#include <stdlib.h>
#include <string.h>
#include "kern/backend.h"
#include "kern/ops.h"

struct kern_experts {
    void *own; /* of a device with a table of its own */
    int E;
    kern_linear **expert;
    size_t bytes;
    bool grouped;
    int64_t Kp, panels;      /* of one expert, over its shards */
    int alike[KERN_BUCKETS]; /* first bucket with the same input in all experts; -1: inputs differ
                              */
};

typedef struct piece {
    int expert, bucket;
    int32_t slot0, slots, at; /* at: its first row in the wave's buffer */
    bool token;               /* input from the tokens' */
} piece;

typedef struct experts_job {
    kern_dev *d;
    const kern_experts *x;
    const float *in;
    int64_t ldin;
    const int32_t *row, *first;
    float *y;
    int64_t ldy, tokens;
    const kern__act_plan *token_plan; /* NULL: every slot for itself */
    int token_alike;
    bool alone;   /* every thread prepares its own */
    int32_t room; /* slots of a wave */
    int next;     /* item of the wave, taken by atomic increments */
} experts_job;

/* ---- making -----------------------------------------------------------------------------------*/

static int64_t panels_of(const kern_linear *l)
{
    int64_t panels = 0;
    for (int i = 0; i < l->n_shards; i++)
        panels += (l->shard[i].w.N + KERN_PANEL - 1) / KERN_PANEL;
    return panels;
}

static size_t row_bytes(int64_t Kp)
{
    return ((size_t)Kp * 4 + ((size_t)Kp / 16 + 1) * 8 + 256 + 63) / 64 * 64;
}

static bool one_input(const kern_linear *l)
{
    for (int b = 0; b < KERN_BUCKETS; b++)
        for (int i = 1; i < l->n_shards; i++)
            if (!kern__act_equal(&l->shard[0].plan[b], &l->shard[i].plan[b])) return false;
    return true;
}

/* The first bucket at which every expert does to its input what expert 0 does at bucket b. */
static int alike(const kern_experts *x, int b)
{
    const kern__act_plan *p = &x->expert[0]->shard[0].plan[b];
    for (int e = 1; e < x->E; e++)
        if (!kern__act_equal(p, &x->expert[e]->shard[0].plan[b])) return -1;
    for (int c = 0; c < b; c++)
        if (x->alike[c] == c && kern__act_equal(p, &x->expert[0]->shard[0].plan[c])) return c;
    return b;
}

static int check_shapes(kern_linear **expert, int E, err *e)
{
    if (E < 1) return err_set(e, ERR_VALUE, "%d experts, expected at least 1", E);
    for (int i = 1; i < E; i++)
        if (expert[i]->N != expert[0]->N || expert[i]->K != expert[0]->K)
            return err_set(e, ERR_SHAPE, "%s is [%lld,%lld], expected [%lld,%lld] as %s",
                           expert[i]->name, (long long)expert[i]->N, (long long)expert[i]->K,
                           (long long)expert[0]->N, (long long)expert[0]->K, expert[0]->name);
    return 0;
}

int kern_experts_make(kern_dev *d, kern_linear **expert, int E, kern_experts **out, err *e)
{
    int rc = 0;
    kern_experts *x = xcalloc(1, sizeof *x);
    x->E = E > 0 ? E : 0;
    x->expert = xcalloc((size_t)x->E + 1, sizeof *x->expert);
    for (int i = 0; i < x->E; i++) {
        x->expert[i] = expert[i];
        x->bytes += kern_linear_bytes(expert[i]);
    }
    TRY(check_shapes(expert, E, e));
    if (d->be) {
        TRY(d->be->experts_make(d, x->expert, E, &x->own, e));
        *out = x;
        return 0;
    }
    x->Kp = expert[0]->Kp;
    x->panels = panels_of(expert[0]);
    x->grouped = true;
    for (int i = 0; i < E; i++)
        x->grouped = x->grouped && one_input(expert[i]) && panels_of(expert[i]) == x->panels;
    for (int b = 0; b < KERN_BUCKETS; b++)
        x->alike[b] = alike(x, b);
    TRY(kern__grow(d, KERN_MROWS * row_bytes(x->Kp), kern__part_bytes(x->Kp), e));
    *out = x;
    x = NULL;
out:
    kern_experts_drop(d, x);
    return rc;
}

void kern_experts_drop(kern_dev *d, kern_experts *x)
{
    if (!x) return;
    if (x->own) d->be->experts_drop(d, x->own);
    for (int e = 0; e < x->E; e++)
        kern_linear_drop(d, x->expert[e]);
    free(x->expert);
    free(x);
}

size_t kern_experts_bytes(const kern_experts *x)
{
    return x->bytes;
}

const kern_linear *kern_experts_at(const kern_experts *x, int e)
{
    return x->expert[e];
}

/* ---- waves ------------------------------------------------------------------------------------*/

/* Pieces of the next wave: from slot `from` of expert *e on. Returns how many; moves both. */
static int next_wave(const experts_job *j, int *e, int32_t *from, piece *p)
{
    int n = 0;
    int32_t used = 0;
    for (; *e < j->x->E; (*e)++, *from = 0) {
        int32_t all = j->first[*e + 1] - j->first[*e];
        while (*from < all) {
            int32_t take = all - *from < j->room ? all - *from : j->room;
            if (used + take > j->room) return n;
            int b = kern_bucket(all);
            bool token = j->token_plan && j->x->alike[b] == j->token_alike;
            p[n++] = (piece){*e, b, j->first[*e] + *from, take, used, token};
            used += take;
            *from += take;
        }
    }
    return n;
}

static const kern__act_plan *plan_of(const experts_job *j, const piece *p)
{
    return &j->x->expert[p->expert]->shard[0].plan[p->bucket];
}

static void copy_row(const kern__act_plan *p, const kern__acts *from, int64_t t,
                     const kern__acts *to, int64_t m)
{
    size_t k = (size_t)p->Kp, g = (size_t)from->groups;
    if (p->kind == ACT_F32) {
        memcpy(to->f32 + (size_t)m * k, from->f32 + (size_t)t * k, k * sizeof(float));
    } else if (p->kind == ACT_I8) {
        memcpy(to->i8 + (size_t)m * k, from->i8 + (size_t)t * k, k);
        memcpy(to->scale + (size_t)m * g, from->scale + (size_t)t * g, g * sizeof(float));
        memcpy(to->sum + (size_t)m * g, from->sum + (size_t)t * g, g * sizeof(int32_t));
    } else {
        memcpy(to->hi + (size_t)m * k, from->hi + (size_t)t * k, k * 2);
        if (to->lo) memcpy(to->lo + (size_t)m * k, from->lo + (size_t)t * k, k * 2);
        if (p->row_scale) to->scale[m] = from->scale[t];
    }
}

/* One token's input where it lies. */
static kern__acts view_row(const kern__act_plan *p, const kern__acts *a, int64_t t)
{
    kern__acts v = *a;
    v.M = 1;
    if (v.f32) v.f32 += t * p->Kp;
    if (v.i8) v.i8 += t * p->Kp;
    if (v.hi) v.hi += t * p->Kp;
    if (v.lo) v.lo += t * p->Kp;
    if (v.scale) v.scale += p->kind == ACT_I8 ? t * v.groups : t;
    if (v.sum) v.sum += t * v.groups;
    return v;
}

typedef struct experts_thread {
    int index, n;
    unsigned char *slots; /* prepared inputs of the wave's slots */
    kern__acts tokens;
    float *row; /* [Kp] */
    void *tmp;  /* for the linear rows */
} experts_thread;

static void place_piece(const experts_job *j, const experts_thread *t, const piece *p,
                        kern__acts *a)
{
    kern__acts_place(plan_of(j, p), p->slots, t->slots + (size_t)p->at * row_bytes(j->x->Kp), a);
}

static void prepare_tokens(const experts_job *j, const experts_thread *t)
{
    int64_t lo = 0, hi = j->tokens;
    if (!j->alone) thread_split(j->tokens, 1, t->index, t->n, &lo, &hi);
    for (int64_t m = lo; m < hi; m++)
        kern__act_row(j->token_plan, KERN__OPS(j->d), j->in + m * j->ldin, m, &t->tokens, t->row);
}

static void prepare_slots(const experts_job *j, const experts_thread *t, const piece *p, int n)
{
    int64_t lo = 0, hi = p[n - 1].at + p[n - 1].slots;
    if (!j->alone) thread_split(hi, 1, t->index, t->n, &lo, &hi);
    for (int i = 0; i < n; i++, p++) {
        if (p->at + p->slots <= lo || p->at >= hi || (p->token && p->slots == 1)) continue;
        kern__acts a;
        place_piece(j, t, p, &a);
        int64_t m0 = lo > p->at ? lo - p->at : 0,
                m1 = hi - p->at < p->slots ? hi - p->at : p->slots;
        for (int64_t m = m0; m < m1; m++) {
            int64_t r = j->row ? j->row[p->slot0 + m] : p->slot0 + m;
            if (p->token)
                copy_row(j->token_plan, &t->tokens, r, &a, m);
            else
                kern__act_row(plan_of(j, p), KERN__OPS(j->d), j->in + r * j->ldin, m, &a, t->row);
        }
    }
}

static void run_items(experts_job *j, const experts_thread *t, const piece *p, int n)
{
    int64_t panels = j->x->panels, block = panels * n / (8 * t->n) / 4 * 4;
    block = block < 4 ? 4 : block > 64 ? 64 : block;
    int each = (int)((panels + block - 1) / block);
    for (int i; (i = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED)) < n * each;) {
        const piece *q = &p[i / each];
        int64_t lo = i % each * block, hi = lo + block < panels ? lo + block : panels;
        kern__acts a;
        if (q->token && q->slots == 1)
            a = view_row(j->token_plan, &t->tokens, j->row[q->slot0]);
        else
            place_piece(j, t, q, &a);
        const kern_linear *l = j->x->expert[q->expert];
        kern__linear_panels(l, q->bucket, 0, l->n_shards, &a, j->y + q->slot0 * j->ldy, j->ldy, lo,
                            hi, t->tmp);
    }
}

static void experts_part(void *arg, int index, int n)
{
    experts_job *j = arg;
    int64_t Kp = j->x->Kp;
    unsigned char *own = kern__thread_buffer(j->d, index);
    unsigned char *tokens = j->alone ? own : j->d->scratch;
    experts_thread t = {.index = index, .n = n};
    t.row = (float *)(void *)(own + kern__own_bytes(Kp));
    t.tmp = t.row + Kp;
    t.slots = tokens + (j->token_plan ? (size_t)j->tokens * row_bytes(Kp) : 0);
    if (j->token_plan) {
        kern__acts_place(j->token_plan, j->tokens, tokens, &t.tokens);
        prepare_tokens(j, &t);
        if (!j->alone) team_barrier(j->d->team, index);
    }
    piece p[KERN_MROWS];
    int e = 0;
    int32_t from = 0;
    for (int pieces, wave = 0; (pieces = next_wave(j, &e, &from, p)) > 0; wave++) {
        if (wave > 0) {
            team_barrier(j->d->team, index); /* the last wave's inputs and items are done with */
            if (index == 0) j->next = 0;
        }
        prepare_slots(j, &t, p, pieces);
        if (!j->alone) team_barrier(j->d->team, index);
        run_items(j, &t, p, pieces);
    }
}

/* Which inputs are prepared by token: those of the way that most slots share, when that saves. */
static void choose_tokens(experts_job *j)
{
    const kern_experts *x = j->x;
    int64_t slots[KERN_BUCKETS] = {0}, tokens = 0;
    int best = 0;
    for (int32_t i = 0; j->row && i < j->first[x->E]; i++)
        tokens = j->row[i] >= tokens ? j->row[i] + 1 : tokens;
    for (int e = 0; e < x->E; e++) {
        int32_t n = j->first[e + 1] - j->first[e];
        if (n > 0 && x->alike[kern_bucket(n)] >= 0) slots[x->alike[kern_bucket(n)]] += n;
    }
    for (int b = 1; b < KERN_BUCKETS; b++)
        best = slots[b] > slots[best] ? b : best;
    if (!j->row || tokens > KERN_MROWS / 2 || slots[best] <= tokens) return;
    j->tokens = tokens;
    j->token_plan = &x->expert[0]->shard[0].plan[best];
    j->token_alike = best;
    j->room -= (int32_t)tokens;
}

static void run_apart(kern_dev *d, const kern_experts *x, const float *in, int64_t ldin,
                      const int32_t *row, const int32_t *first, float *y, int64_t ldy)
{
    for (int e = 0; e < x->E; e++) {
        int64_t n = first[e + 1] - first[e];
        if (n == 0) continue;
        kern__linear_run_rows(d, x->expert[e], row ? in : in + first[e] * ldin, ldin,
                              row ? row + first[e] : NULL, n, y + first[e] * ldy, ldy);
    }
}

void kern_experts_run(kern_dev *d, const kern_experts *x, const float *in, int64_t ldin,
                      const int32_t *row, const int32_t *first, int64_t slots, float *y,
                      int64_t ldy)
{
    KERN__ELSEWHERE(d, experts_run(d, x->own, in, ldin, row, first, slots, y, ldy))
    experts_job j = {
        .d = d, .x = x, .in = in, .ldin = ldin, .row = row, .first = first, .y = y, .ldy = ldy};
    j.room = KERN_MROWS - KERN_PANEL; /* tiles of 32 rows read past the last piece */
    if (!x->grouped) {
        run_apart(d, x, in, ldin, row, first, y, ldy);
        return;
    }
    choose_tokens(&j);
    size_t rows = (size_t)(slots + (j.token_plan ? j.tokens : 0));
    j.alone = rows * row_bytes(x->Kp) <= kern__own_bytes(x->Kp);
    team_run(d->team, experts_part, &j);
}
