/* The plain C twin of every linear row: decodes each row of W to f32 once per call, whatever the
 * layout, and multiplies it with all rows of X in f32. Input rules are emulated in f32 (act.c).
 * Last in the list; refuses nothing. Eight accumulators per product keep the error at that of a
 * pairwise sum. */
#include "kern/ops.h"

static void plan(const kern_linear_desc *d, int shard, int bucket, kern__act_plan *p)
{
    (void)d, (void)shard, (void)bucket;
    p->kind = ACT_F32;
}

float kern__ref_dot(const float *a, const float *b, int64_t n)
{
    float s[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++)
            s[j] += a[i + j] * b[i + j];
    for (; i < n; i++)
        s[i & 7] += a[i] * b[i];
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

static void part(const kern__part *p, int64_t lo, int64_t hi)
{
    const struct kern_shard *s = p->s;
    float *w = p->tmp;
    int64_t n1 = hi * KERN_PANEL < s->w.N ? hi * KERN_PANEL : s->w.N;
    for (int64_t n = lo * KERN_PANEL; n < n1; n++) {
        s->layout->decode_row(s->prep, n, w);
        for (int64_t m = 0; m < p->a->M; m++)
            p->y[m * p->ldy + n] = kern__ref_dot(p->a->f32 + m * p->a->Kp, w, s->w.K);
    }
}

const kern_linear_row kern__row_ref = {"ref", NULL, 0, NULL, plan, part};
