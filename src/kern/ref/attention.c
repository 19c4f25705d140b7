/* Plain C twin of attention: one query row of one head at a time, online softmax over tiles of
 * decoded keys and values.
 *
 *   score = scale * q.k; softcap: score = cap * tanh(score / cap); a sink is one more score whose
 *   value is zero: the running maximum starts at it and the running sum at 1
 *
 * A latent cache (v_in_k) has its values in the first lanes of its keys. */
#include <string.h>
#include "kern/ops.h"

#define REF_TILE 32 /* keys decoded at a time */

typedef struct attn_job {
    kern_dev *d;
    const kern_attn_args *a;
} attn_job;

/* One query row of one head, online softmax over tiles of decoded keys and values. */
typedef struct attn_row {
    const float *q;
    float *out, max, sum;
    int64_t lo, hi; /* keys seen: [lo,hi) */
} attn_row;

static void row_tile(const kern_attn_args *a, attn_row *r, const float *k, const float *v,
                     int64_t t0, int n)
{
    int D = a->kv->D, Dv = kern__v_lanes(a->kv);
    for (int t = 0; t < n; t++) {
        if (t0 + t < r->lo || t0 + t >= r->hi) continue;
        float s = 0;
        for (int i = 0; i < D; i++)
            s += r->q[i] * k[t * D + i];
        s *= a->scale;
        if (a->softcap > 0) s = a->softcap * tanhf(s / a->softcap);
        if (s > r->max) {
            float c = expf(r->max - s);
            r->sum *= c;
            for (int i = 0; i < Dv; i++)
                r->out[i] *= c;
            r->max = s;
        }
        float p = expf(s - r->max);
        r->sum += p;
        for (int i = 0; i < Dv; i++)
            r->out[i] += p * v[t * Dv + i];
    }
}

static void attend(const attn_job *j, const kern_seq *q, int hk, int row, float *buffer)
{
    const kern_attn_args *a = j->a;
    const kern_kv_layer *kv = a->kv;
    int D = kv->D, Dv = kern__v_lanes(kv), G = a->H / kv->Hk;
    int64_t pos = (int64_t)q->kv_len - q->n_rows + row;
    int64_t lo = a->window > 0 && pos - a->window + 1 > 0 ? pos - a->window + 1 : 0;
    float *k = buffer, *v = buffer + (size_t)REF_TILE * (size_t)D;
    for (int g = 0; g < G; g++) {
        int64_t at = q->row0 + row;
        attn_row r = {a->q + at * a->ldq + (hk * G + g) * D,
                      a->out + at * a->ldo + (hk * G + g) * Dv,
                      a->sinks ? a->sinks[hk * G + g] : -INFINITY,
                      a->sinks ? 1.0f : 0.0f,
                      lo,
                      pos + 1};
        memset(r.out, 0, (size_t)Dv * sizeof(float));
        for (int64_t t = lo; t <= pos; t += REF_TILE) {
            int n = pos + 1 - t < REF_TILE ? (int)(pos + 1 - t) : REF_TILE;
            kern_kv_read(kv, 0, hk, q->pages, t, n, k);
            kern_kv_read(kv, 1, hk, q->pages, t, n, v);
            row_tile(a, &r, k, v, t, n);
        }
        for (int i = 0; i < Dv && r.sum > 0; i++)
            r.out[i] /= r.sum;
    }
}

static void attn_part(void *arg, int index, int n)
{
    attn_job *j = arg;
    float *buffer = kern__thread_buffer(j->d, index);
    int64_t item = 0;
    for (int s = 0; s < j->a->n_seqs; s++)
        for (int row = 0; row < j->a->seqs[s].n_rows; row++)
            for (int hk = 0; hk < j->a->kv->Hk; hk++)
                if (item++ % n == index) attend(j, &j->a->seqs[s], hk, row, buffer);
}

bool kern__ref_attention(kern_dev *d, const kern_attn_args *a)
{
    attn_job j = {d, a};
    team_run(d->team, attn_part, &j);
    return true;
}
