/* Linears: which kernel row serves which shard at which batch size, and how a step is split.
 *
 * Selection, at load: for each shard the first row that accepts batch 1 fixes the layout; the
 * larger buckets then take the first accepting row of the same layout, so that weights are held
 * once. Each refusal on the way is kept as text. The plain C twin (kern/ref/linear.c) is last and
 * takes all.
 *
 * A step, without allocation: rows of X in chunks of KERN_MROWS; neighbouring shards whose input is
 * treated alike share one preparation of it; then the panels of those shards are split over the
 * team. Small inputs are prepared by every thread for itself, which is cheaper than a barrier. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kern/backend.h"
#include "kern/ops.h"

#define OWN_PREP_CELLS 8192 /* M*K up to which every thread prepares the input alone */

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

int kern_bucket(int64_t M)
{
    return M <= 1 ? 0 : M <= 8 ? 1 : M <= 64 ? 2 : 3;
}

int64_t kern_linear_n(const kern_linear *l)
{
    return l->N;
}
int64_t kern_linear_k(const kern_linear *l)
{
    return l->K;
}
size_t kern_linear_bytes(const kern_linear *l)
{
    return l->bytes;
}
const kern_choice *kern_linear_choice(const kern_linear *l, int bucket)
{
    return &l->choice[bucket];
}

/* ---- choosing -----------------------------------------------------------------------------------
 */

typedef struct notes {
    char text[256];
    size_t len;
} notes;

static void note(notes *n, const char *row, const char *why)
{
    size_t left = sizeof n->text - n->len;
    int w = snprintf(n->text + n->len, left, "%s%s: %s", n->len ? "; " : "", row, why);
    if (w > 0) n->len += (size_t)w < left ? (size_t)w : left - 1;
}

static const char *lacks(uint32_t needs, uint32_t have)
{
    static const struct {
        uint32_t bit;
        const char *text;
    } names[] = {{CPU_AMX_BF16, "needs amx_bf16"},       {CPU_AMX_INT8, "needs amx_int8"},
                 {CPU_AVX512_VNNI, "needs avx512_vnni"}, {CPU_AVX512_BF16, "needs avx512_bf16"},
                 {CPU_AVX512_VBMI, "needs avx512_vbmi"}, {CPU_AVX512, "needs avx512"},
                 {CPU_AVX_VNNI, "needs avx_vnni"},       {CPU_AVX2, "needs avx2"}};
    uint32_t miss = needs & ~have;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (miss & names[i].bit) return names[i].text;
    return miss ? "needs a feature that this CPU lacks" : NULL;
}

static const char *judge(const kern_linear_row *r, uint32_t features, const kern_linear_desc *d,
                         int shard, int bucket, const char *layout)
{
    kern_wshape w;
    kern__wshape_of(d->shard[shard], &w);
    const char *why = NULL;
    if (r->layout) {
        const kern__layout *l = kern__layout_held(r->layout, &w);
        why = l->refuse(&w);
        if (!why && d->shard[shard]->g_idx && !w.w.actorder) why = "group index without act-order";
        if (!why && d->shard[shard]->flat) why = "blocks cross rows";
        if (!why && d->shard[shard]->E > 1) why = "nested experts";
        if (!why && layout && strcmp(l->name, layout)) why = "weights are held in another layout";
    }
    if (!why) why = lacks(r->needs, features);
    if (!why && r->refuse) why = r->refuse(d, shard, bucket);
    return why;
}

/* First accepting row; text of the refusals before it. Rows of other weight widths are not news. */
static const kern_linear_row *choose(uint32_t features, const kern_linear_desc *d, int shard,
                                     int bucket, const char *layout, notes *n)
{
    kern_wshape w;
    kern__wshape_of(d->shard[shard], &w);
    for (int i = 0; i < kern_n_linear_rows; i++) {
        const kern_linear_row *r = kern_linear_rows[i];
        const char *why = judge(r, features, d, shard, bucket, layout);
        if (!why) return r;
        if (n && strcmp(why, "other code width")) note(n, r->name, why);
    }
    if (n && !n->len) note(n, num_infos[w.code].name, "no layout holds it");
    return &kern__row_ref;
}

static const kern__layout *layout_for(const kern_linear_row *r, const qtensor *q)
{
    kern_wshape w;
    kern__wshape_of(q, &w);
    return kern__layout_held(r->layout ? r->layout : "canonical", &w);
}

static void base_plan(const kern_linear_desc *d, int shard, const struct kern_shard *s, int bucket,
                      const kern_linear_row *r, kern__act_plan *p)
{
    const qtensor *q = d->shard[shard];
    memset(p, 0, sizeof *p);
    p->a = q->spec.a;
    p->K = q->K;
    p->Kp = (int64_t)round_up((size_t)q->K, KERN_KPAD);
    p->in_scale = q->input_scale;
    p->in_zero = q->input_zero;
    p->in_global = q->input_global;
    if (p->a.gran == Q_TOKEN || (p->a.gran == Q_GROUP && p->a.scale == QS_FLOAT && p->a.dynamic))
        p->in_scale = 0;
    if (d->act == KERN_ACT_F32 || d->act == KERN_ACT_BF16 || d->act == KERN_ACT_INT8) {
        p->a = (qaxis){.type = NUM_F32};
        p->in_scale = p->in_zero = p->in_global = 0;
    }
    p->round_bf16 = d->act == KERN_ACT_BF16;
    if (d->act == KERN_ACT_INT8) /* the twin's idea of it; integer kernels say their own */
        p->a = (qaxis){.type = NUM_I8, .gran = Q_GROUP, .group = 32, .dynamic = true};
    if (r->plan) r->plan(d, shard, bucket, p);
    p->perm = s->perm;
    p->pre_scale = s->pre_scale;
}

static void act_text(const kern__act_plan *p, char *out, size_t cap)
{
    if (p->kind == ACT_I8) {
        if (p->fixed_scale > 0)
            snprintf(out, cap, "int8 static");
        else if (p->group >= p->K)
            snprintf(out, cap, "int8 per token");
        else
            snprintf(out, cap, "int8 per %lld along K", (long long)p->group);
        return;
    }
    buf b = {0};
    if (qaxis_quantized(&p->a))
        qaxis_format(&p->a, &b);
    else
        buf_puts(&b, p->round_bf16 || (p->kind == ACT_BF16 && p->terms == 1) ? "bf16" : "f32");
    if (p->kind == ACT_BF16 && p->terms > 1) buf_puts(&b, " as two bf16 terms");
    snprintf(out, cap, "%s", b.data);
    buf_free(&b);
}

/* ---- making -------------------------------------------------------------------------------------
 */

typedef struct fill_job {
    const qtensor *q;
    struct kern_shard *s;
    int64_t panels;
} fill_job;

static void fill_part(void *arg, int index, int n)
{
    fill_job *j = arg;
    int64_t lo, hi;
    thread_split(j->panels, 1, index, n, &lo, &hi);
    j->s->layout->fill(j->q, j->s->perm, j->s->prep, lo, hi);
}

int kern__sort_columns(const qtensor *q, int32_t **out, const char *name, err *e)
{
    int rc = 0;
    int64_t groups = q->scale_cols, group = q->spec.w.group;
    void *mem = NULL, *count_mem = NULL;
    if (groups < 1 || group < 1)
        return err_set(e, ERR_SHAPE, "%s: group index without groups", name);
    TRY(mem_alloc(&mem, (size_t)q->K * sizeof(int32_t), e));
    TRY(mem_alloc(&count_mem, (size_t)groups * sizeof(int64_t), e));
    int64_t *next = count_mem;
    for (int64_t g = 0; g < groups; g++)
        next[g] = g * group;
    for (int64_t k = 0; k < q->K; k++) {
        int32_t g = q->g_idx[k];
        int64_t end = g >= 0 && g < groups ? (g + 1) * group : 0;
        if (end > q->K) end = q->K;
        if (end == 0 || next[g] >= end) {
            rc = err_set(e, ERR_UNSUPPORTED, "%s: group %d of g_idx has more than %lld columns",
                         name, (int)g, (long long)group);
            goto out;
        }
        ((int32_t *)mem)[next[g]++] = (int32_t)k;
    }
    *out = mem;
    mem = NULL;
out:
    mem_free(mem);
    mem_free(count_mem);
    return rc;
}

static int make_shard(kern_dev *d, const kern_linear_desc *desc, int i, struct kern_shard *s,
                      notes *n, err *e)
{
    int rc = 0;
    const qtensor *q = desc->shard[i];
    kern__wshape_of(q, &s->w);
    s->spec = q->spec;
    err ignored = {0};
    if (q->g_idx && strcmp(s->layout->name, "canonical") &&
        kern__sort_columns(q, &s->perm, desc->name, &ignored) < 0) {
        s->layout = kern__layout_by_name("canonical"); /* the twin indexes groups as they are */
        for (int b = 0; b < KERN_BUCKETS; b++) {
            if (s->row[b] != &kern__row_ref)
                note(&n[b], s->row[b]->name, "groups of g_idx differ in size");
            s->row[b] = &kern__row_ref;
        }
    }
    s->bytes = s->layout->bytes(&s->w);
    TRY(kern_alloc(d, &s->prep, s->bytes, e));
    TRY(s->layout->begin(q, &s->w, s->prep, e));
    fill_job job = {q, s, (q->N + KERN_PANEL - 1) / KERN_PANEL};
    team_run(d->team, fill_part, &job);
    if (s->perm) s->bytes += (size_t)q->K * 4;
    if (q->pre_scale) {
        void *mem;
        TRY(mem_alloc(&mem, (size_t)q->K * sizeof(float), e));
        s->pre_scale = memcpy(mem, q->pre_scale, (size_t)q->K * sizeof(float));
        s->bytes += (size_t)q->K * 4;
    }
    for (int b = 0; b < KERN_BUCKETS; b++)
        base_plan(desc, i, s, b, s->row[b], &s->plan[b]);
out:
    return rc;
}

static void add_choice(kern_linear *l, const struct kern_shard *s, int shard, int b, const notes *n)
{
    kern_choice *c = &l->choice[b];
    bool ref = s->row[b] == &kern__row_ref;
    c->reference = c->reference || ref;
    if (shard == 0) {
        c->row = s->row[b]->name;
        c->layout = s->layout->name;
        act_text(&s->plan[b], c->act, sizeof c->act);
        memcpy(c->refused, n->text, sizeof c->refused);
    } else if (strcmp(c->row, s->row[b]->name)) {
        size_t len = strlen(c->refused);
        snprintf(c->refused + len, sizeof c->refused - len, "%sshard %d runs %s", len ? "; " : "",
                 shard, s->row[b]->name);
    }
}

static int check_desc(const kern_linear_desc *d, err *e)
{
    if (d->n_shards < 1 || d->n_shards > KERN_MAX_SHARDS)
        return err_set(e, ERR_VALUE, "%s: %d shards, expected 1 to %d", d->name, d->n_shards,
                       KERN_MAX_SHARDS);
    for (int i = 0; i < d->n_shards; i++) {
        const qtensor *q = d->shard[i];
        if (q->N < 1 || q->K < 1 || q->K != d->shard[0]->K || q->E > 1)
            return err_set(e, ERR_SHAPE,
                           "%s: shard %d is [%lld,%lld] of %lld experts, expected one matrix "
                           "with K = %lld",
                           d->name, i, (long long)q->N, (long long)q->K, (long long)q->E,
                           (long long)d->shard[0]->K);
    }
    return 0;
}

/* forced = NULL: the lists decide. */
static int make(kern_dev *d, const kern_linear_desc *desc, const kern_linear_row *forced,
                kern_linear **out, err *e)
{
    int rc = 0;
    kern_linear *l = xcalloc(1, sizeof *l);
    TRY(check_desc(desc, e));
    l->name = xstrdup(desc->name ? desc->name : "linear");
    l->n_shards = desc->n_shards;
    l->K = desc->shard[0]->K;
    l->Kp = (int64_t)round_up((size_t)l->K, KERN_KPAD);
    for (int i = 0; i < l->n_shards; i++) {
        struct kern_shard *s = &l->shard[i];
        notes n[KERN_BUCKETS] = {{{0}, 0}};
        for (int b = 0; b < KERN_BUCKETS; b++) {
            s->row[b] = forced ? forced
                               : choose(d->features, desc, i, b, b ? s->layout->name : NULL, &n[b]);
            const char *why = forced ? judge(forced, d->features, desc, i, b, NULL) : NULL;
            if (why) {
                if (forced->layout == NULL || !strcmp(why, "other code width") ||
                    lacks(forced->needs, d->features) || b == KERN_BUCKETS - 1) {
                    rc = err_set(e, ERR_UNSUPPORTED, "%s: %s", forced->name, why);
                    goto out;
                }
                s->row[b] = &kern__row_ref; /* a row for other batch sizes */
            }
            if (b == 0) s->layout = layout_for(forced ? forced : s->row[b], desc->shard[i]);
        }
        s->row0 = l->N;
        l->N += desc->shard[i]->N;
        TRY(make_shard(d, desc, i, s, n, e));
        l->bytes += s->bytes;
        for (int b = 0; b < KERN_BUCKETS; b++)
            add_choice(l, s, i, b, &n[b]);
    }
    for (int b = 0; b < KERN_BUCKETS && desc->strict; b++)
        if (l->choice[b].reference && d->features) {
            rc = err_set(e, ERR_UNSUPPORTED,
                         "%s: only the reference kernel takes it at batch bucket %d (%s); "
                         "drop --strict to run it anyway",
                         l->name, b, l->choice[b].refused);
            goto out;
        }
    if (desc->bias) {
        void *mem;
        TRY(mem_alloc(&mem, (size_t)l->N * sizeof(float), e));
        l->bias = memcpy(mem, desc->bias, (size_t)l->N * sizeof(float));
        l->bytes += (size_t)l->N * sizeof(float);
    }
    TRY(kern__grow(d, kern__acts_bytes(KERN_MROWS, l->Kp), kern__part_bytes(l->Kp), e));
    *out = l;
    l = NULL;
out:
    kern_linear_drop(d, l);
    return rc;
}

/* On another device: its table fills in the rest. */
static int make_elsewhere(kern_dev *d, const kern_linear_desc *desc, kern_linear **out, err *e)
{
    int rc = check_desc(desc, e);
    if (rc < 0) return rc;
    kern_linear *l = xcalloc(1, sizeof *l);
    l->be = d->be;
    l->name = xstrdup(desc->name ? desc->name : "linear");
    l->K = desc->shard[0]->K;
    for (int i = 0; i < desc->n_shards; i++)
        l->N += desc->shard[i]->N;
    rc = d->be->linear_make(d, desc, l, e);
    if (rc < 0)
        kern_linear_drop(d, l);
    else
        *out = l;
    return rc;
}

int kern_linear_make(kern_dev *d, const kern_linear_desc *desc, kern_linear **out, err *e)
{
    return d->be ? make_elsewhere(d, desc, out, e) : make(d, desc, NULL, out, e);
}

int kern__linear_make_row(kern_dev *d, const kern_linear_desc *desc, const kern_linear_row *row,
                          kern_linear **out, err *e)
{
    return make(d, desc, row, out, e);
}

void kern_linear_drop(kern_dev *d, kern_linear *l)
{
    if (!l) return;
    if (l->be) l->be->linear_drop(d, l);
    for (int i = 0; i < l->n_shards; i++) {
        kern_free(d, l->shard[i].prep);
        mem_free(l->shard[i].perm);
        mem_free(l->shard[i].pre_scale);
    }
    mem_free(l->bias);
    free(l->name);
    free(l);
}

void kern_linear_unpack(const kern_linear *l, float *out)
{
    KERN__ELSEWHERE(l, linear_unpack(l, out))
    float *row = xmalloc((size_t)l->Kp * sizeof *row);
    for (int i = 0; i < l->n_shards; i++) {
        const struct kern_shard *s = &l->shard[i];
        for (int64_t n = 0; n < s->w.N; n++) {
            float *dst = out + (s->row0 + n) * l->K;
            s->layout->decode_row(s->prep, n, s->perm ? row : dst);
            for (int64_t k = 0; s->perm && k < l->K; k++)
                dst[s->perm[k]] = row[k];
        }
    }
    free(row);
}

/* ---- running ------------------------------------------------------------------------------------
 */

size_t kern__own_bytes(int64_t Kp)
{
    return round_up(kern__acts_bytes(1, OWN_PREP_CELLS) + kern__acts_bytes(1, Kp) + 4096, 64);
}

size_t kern__part_bytes(int64_t Kp)
{
    return kern__own_bytes(Kp) + (size_t)Kp * 4 + 4 * (size_t)Kp * KERN_PANEL * 4 + 65536;
}

int kern_reserve(kern_dev *d, int64_t max_rows, int64_t max_k, int64_t max_n, err *e)
{
    if (d->be) return d->be->reserve(d, max_rows, max_k, max_n, e);
    int64_t m = max_rows < KERN_MROWS ? max_rows : KERN_MROWS;
    return kern__grow(d, kern__acts_bytes(m, max_k),
                      kern__part_bytes((int64_t)round_up((size_t)max_k, KERN_KPAD)), e);
}

typedef struct run_job {
    kern_dev *d;
    const kern_linear *l;
    const float *x;
    int64_t ldx, M;
    const int32_t *row; /* row m of the input is x[row[m]], or NULL */
    float *y;
    int64_t ldy;
    int bucket;
} run_job;

static void add_bias(const kern_linear *l, int64_t n0, int64_t n1, int64_t M, float *y, int64_t ldy)
{
    if (!l->bias) return;
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = n0; n < n1; n++)
            y[m * ldy + n] += l->bias[n];
}

void kern__linear_panels(const kern_linear *l, int bucket, int s0, int s1, const kern__acts *a,
                         float *y, int64_t ldy, int64_t lo, int64_t hi, void *tmp)
{
    int64_t at = 0;
    for (int i = s0; i < s1; i++) {
        const struct kern_shard *s = &l->shard[i];
        int64_t panels = (s->w.N + KERN_PANEL - 1) / KERN_PANEL;
        int64_t p0 = lo > at ? lo - at : 0, p1 = hi - at < panels ? hi - at : panels;
        at += panels;
        if (p0 >= p1) continue;
        kern__part part = {s, &s->plan[bucket], a, y + s->row0, ldy, tmp};
        s->row[bucket]->part(&part, p0, p1);
        int64_t n1 = p1 * KERN_PANEL < s->w.N ? p1 * KERN_PANEL : s->w.N;
        add_bias(l, s->row0 + p0 * KERN_PANEL, s->row0 + n1, a->M, y, ldy);
    }
}

/* This thread's share of the panels of shards [s0,s1), which have equal inputs. */
static void run_panels(const run_job *j, int s0, int s1, const kern__acts *a, void *tmp, int index,
                       int n)
{
    int64_t total = 0, lo, hi;
    for (int i = s0; i < s1; i++)
        total += (j->l->shard[i].w.N + KERN_PANEL - 1) / KERN_PANEL;
    thread_split(total, 2, index, n, &lo, &hi);
    kern__linear_panels(j->l, j->bucket, s0, s1, a, j->y, j->ldy, lo, hi, tmp);
}

static void run_part(void *arg, int index, int n)
{
    const run_job *j = arg;
    const kern_linear *l = j->l;
    char *own = kern__thread_buffer(j->d, index);
    bool alone = n == 1 || j->M * l->Kp <= OWN_PREP_CELLS || j->M == 1;
    bool shared_dirty = false;
    for (int s0 = 0, s1; s0 < l->n_shards; s0 = s1) {
        const kern__act_plan *p = &l->shard[s0].plan[j->bucket];
        for (s1 = s0 + 1; s1 < l->n_shards && kern__act_equal(p, &l->shard[s1].plan[j->bucket]);)
            s1++;
        kern__acts a;
        bool in_own = j->M * p->Kp <= OWN_PREP_CELLS || j->M == 1;
        kern__acts_place(p, j->M, in_own ? (void *)own : j->d->scratch, &a);
        float *row = (float *)(void *)(own + kern__own_bytes(l->Kp));
        int64_t lo = 0, hi = j->M;
        if (!alone) {
            if (shared_dirty)
                team_barrier(j->d->team, index); /* others may still read the last inputs */
            thread_split(j->M, 1, index, n, &lo, &hi);
        }
        for (int64_t m = lo; m < hi; m++)
            kern__act_row(p, KERN__OPS(j->d), j->x + (j->row ? j->row[m] : m) * j->ldx, m, &a, row);
        if (!alone) team_barrier(j->d->team, index);
        shared_dirty = true;
        run_panels(j, s0, s1, &a, row + l->Kp, index, n);
    }
}

void kern__linear_run_rows(kern_dev *d, const kern_linear *l, const float *x, int64_t ldx,
                           const int32_t *row, int64_t M, float *y, int64_t ldy)
{
    int bucket = kern_bucket(M);
    for (int64_t m = 0; m < M; m += KERN_MROWS) {
        int64_t rows = M - m < KERN_MROWS ? M - m : KERN_MROWS;
        run_job j = {.d = d, .l = l, .ldx = ldx, .M = rows, .ldy = ldy, .bucket = bucket};
        j.x = row ? x : x + m * ldx;
        j.row = row ? row + m : NULL;
        j.y = y + m * ldy;
        team_run(d->team, run_part, &j);
    }
}

void kern_linear_run(kern_dev *d, const kern_linear *l, const float *x, int64_t ldx, int64_t M,
                     float *y, int64_t ldy)
{
    KERN__ELSEWHERE(d, linear_run(d, l, x, ldx, M, y, ldy))
    kern__linear_run_rows(d, l, x, ldx, NULL, M, y, ldy);
}

/* ---- prediction ---------------------------------------------------------------------------------
 */

size_t kern_linear_predict_bytes(uint32_t features, const qspec *s, num_dtype plain, kern_act act,
                                 int64_t N, int64_t K)
{
    qtensor q;
    memset(&q, 0, sizeof q);
    q.spec = *s;
    bool quantized = qaxis_quantized(&s->w);
    q.code = quantized ? s->w.type : plain;
    if (!quantized) q.spec.w = (qaxis){.type = plain};
    q.E = 1;
    q.N = N;
    q.K = K;
    q.scale_type = s->w.scale == QS_NVFP4 ? NUM_F8_E4M3 : s->w.scale == QS_MX ? NUM_F8_E8M0 : plain;
    if (q.scale_type == NUM_NONE) q.scale_type = NUM_F32;
    q.scale_cols = quantized ? 1 : 0;
    q.zero_type = NUM_I8;
    kern_linear_desc d = {.name = "", .n_shards = 1, .shard = {&q}, .act = act};
    const kern_linear_row *r = choose(features, &d, 0, 0, NULL, NULL);
    kern_wshape w;
    kern__wshape_of(&q, &w);
    return layout_for(r, &q)->bytes(&w) + (s->w.actorder ? (size_t)K * 4 : 0);
}

size_t kern_reserve_bytes(int64_t max_rows, int64_t max_k, int64_t max_n, int threads)
{
    (void)max_n;
    int64_t m = max_rows < KERN_MROWS ? max_rows : KERN_MROWS;
    return kern__acts_bytes(m, max_k) +
           (size_t)threads * kern__part_bytes((int64_t)round_up((size_t)max_k, KERN_KPAD));
}
