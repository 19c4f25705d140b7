/* Linear attention over the sequences of a step: who works on what. A sequence's tokens follow each
 * other, so the team shares channels (convolution) or lanes of value heads (delta rule), which
 * never mix. State of a sequence that starts (kv_len == n_rows) is cleared by the thread that uses
 * it. */
#include <string.h>
#include "kern/backend.h"
#include "kern/ops.h"

#define CONV_LANES  64 /* channels of a work item */
#define DELTA_LANES 64 /* lanes of a value head of a work item */
#define SPLIT_CELLS 16384

static bool starts(const kern_seq *s)
{
    return s->kv_len == s->n_rows;
}

static float *state_of(const kern_states *s, int seq)
{
    return s->base + s->stride * (s->slot ? s->slot[seq] : seq);
}

typedef struct conv_job {
    const kern__ops *ops;
    float *x;
    const float *w;
    int64_t ld, C;
    int W, n_seqs;
    const kern_seq *seqs;
    const kern_states *state;
} conv_job;

static void conv_part(void *arg, int index, int n)
{
    const conv_job *j = arg;
    int64_t blocks = (j->C + CONV_LANES - 1) / CONV_LANES, lo, hi;
    thread_split(blocks * j->n_seqs, 1, index, n, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        const kern_seq *s = &j->seqs[i / blocks];
        int64_t c0 = i % blocks * CONV_LANES, c1 = c0 + CONV_LANES < j->C ? c0 + CONV_LANES : j->C;
        float *state = state_of(j->state, (int)(i / blocks)) + c0 * (j->W - 1);
        if (starts(s)) memset(state, 0, (size_t)((c1 - c0) * (j->W - 1)) * sizeof *state);
        j->ops->conv_silu(j->x + s->row0 * j->ld, j->ld, c0, c1, j->W, j->w, s->n_rows, state);
    }
}

static int64_t rows_of(const kern_seq *seqs, int n_seqs)
{
    int64_t rows = 0;
    for (int i = 0; i < n_seqs; i++)
        rows += seqs[i].n_rows;
    return rows;
}

void kern_conv_silu(kern_dev *d, float *x, int64_t ld, int64_t C, int W, const float *w,
                    const kern_seq *seqs, int n_seqs, const kern_states *state)
{
    KERN__ELSEWHERE(d, conv_silu(d, x, ld, C, W, w, seqs, n_seqs, state))
    conv_job j = {KERN__OPS(d), x, w, ld, C, W, n_seqs, seqs, state};
    if (rows_of(seqs, n_seqs) * C * W < SPLIT_CELLS)
        conv_part(&j, 0, 1);
    else
        team_run(d->team, conv_part, &j);
}

typedef struct delta_job {
    kern_dev *d;
    const kern_delta_args *a;
    int next; /* taken by atomic increments */
} delta_job;

static void delta_part(void *arg, int index, int n)
{
    delta_job *j = arg;
    const kern_delta_args *a = j->a;
    int parts = (a->Dv + DELTA_LANES - 1) / DELTA_LANES, items = a->n_seqs * a->Hv * parts;
    (void)n;
    for (int i; (i = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED)) < items;) {
        int s = i / (a->Hv * parts), h = i / parts % a->Hv, v0 = i % parts * DELTA_LANES;
        int v1 = v0 + DELTA_LANES < a->Dv ? v0 + DELTA_LANES : a->Dv;
        float *state = state_of(a->state, s) + (int64_t)h * a->Dk * a->Dv;
        for (int k = 0; k < a->Dk && starts(&a->seqs[s]); k++)
            memset(state + k * a->Dv + v0, 0, (size_t)(v1 - v0) * sizeof *state);
        KERN__OPS(j->d)->delta(a, &a->seqs[s], h, v0, v1, state, kern__thread_buffer(j->d, index));
    }
}

void kern_gated_delta(kern_dev *d, const kern_delta_args *a)
{
    KERN__ELSEWHERE(d, gated_delta(d, a))
    delta_job j = {d, a, 0};
    if (rows_of(a->seqs, a->n_seqs) * a->Hv * a->Dk * a->Dv < SPLIT_CELLS)
        delta_part(&j, 0, 1);
    else
        team_run(d->team, delta_part, &j);
}
