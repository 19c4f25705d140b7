/* Steps by name. A device that writes a step down (kern_step_begin) can run it again when only the
 * contents of its arrays differ: one new token for each of B sequences, the usual step of a server.
 * B is rounded up to one of few sizes with rows of no sequence (token 0, slot -1, cache length 0,
 * state -1), lengths are rounded up to a power of two, steps whose sequences share pages have names
 * of their own, and the arrays are copied to where they lie every time. Steps with prompts in them,
 * taps, or rotary tables that depend on the length have no name. */
#include "model/model_internal.h"
#include <stdlib.h>
#include <string.h>

#define LARGEST 256

static int64_t rounded(int64_t n)
{
    if (n <= 4) return n == 3 ? 4 : n;
    int64_t to = n <= 64 ? 8 : 32;
    return (n + to - 1) / to * to;
}

static bool each_one_row(const batch *b)
{
    if (b->T != b->n_seqs || b->n_logits != b->T || b->T > LARGEST) return false;
    for (int i = 0; i < b->n_seqs; i++)
        if (b->seqs[0][i].n_rows != 1 || b->seqs[0][i].row0 != i || b->logit_rows[i] != i)
            return false;
    return true;
}

static void room(model *m, int64_t n)
{
    model_pad *p = &m->pad;
    if (p->room >= n) return;
    size_t bytes = (size_t)n * sizeof(int32_t);
    p->room = n;
    int32_t **arrays[] = {&p->ids,   &p->pos,      &p->slot[0],   &p->slot[1],
                          &p->state, &p->rope_len, &p->logit_rows};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        *arrays[i] = xrealloc(*arrays[i], bytes);
    for (int g = 0; g < KV_GROUPS; g++)
        p->seqs[g] = xrealloc(p->seqs[g], (size_t)n * sizeof(kern_seq));
}

void model__pad_free(model_pad *p)
{
    free(p->ids);
    free(p->pos);
    free(p->state);
    free(p->rope_len);
    free(p->logit_rows);
    for (int g = 0; g < KV_GROUPS; g++) {
        free(p->slot[g]);
        free(p->seqs[g]);
    }
}

static void fill(model_pad *p, const batch *b, int64_t T)
{
    size_t n = (size_t)b->T * sizeof(int32_t);
    memcpy(p->ids, b->ids, n);
    memcpy(p->pos, b->pos, n);
    for (int g = 0; g < KV_GROUPS; g++) {
        if (b->slot[g]) memcpy(p->slot[g], b->slot[g], n);
        if (b->seqs[g]) memcpy(p->seqs[g], b->seqs[g], (size_t)b->T * sizeof(kern_seq));
    }
    if (b->state) memcpy(p->state, b->state, n);
    for (int64_t i = 0; i < T; i++)
        p->logit_rows[i] = (int32_t)i;
    for (int64_t i = b->T; i < T; i++) {
        p->ids[i] = p->pos[i] = 0;
        p->state[i] = p->slot[0][i] = p->slot[1][i] = -1;
        for (int g = 0; g < KV_GROUPS; g++)
            p->seqs[g][i] = (kern_seq){.row0 = (int32_t)i, .n_rows = 1};
    }
}

uint64_t model__bucket(model *m, const batch *b, batch *out)
{
    *out = *b;
    if (!m->dev->be || m->tap || m->rope_by_length || !each_one_row(b)) return 0;
    int64_t T = rounded(b->T), len = 0;
    if (T > m->opts.max_rows || T > m->opts.max_logit_rows) T = b->T;
    for (int i = 0; i < b->n_seqs; i++)
        len = b->seqs[0][i].kv_len > len ? b->seqs[0][i].kv_len : len;
    if (!m->pad.room)
        room(m, m->opts.max_rows < LARGEST ? m->opts.max_rows : LARGEST); /* addresses stay */
    fill(&m->pad, b, T);
    out->T = out->n_logits = T;
    out->n_seqs = (int)T;
    out->ids = m->pad.ids;
    out->pos = m->pad.pos;
    out->state = b->state ? m->pad.state : NULL;
    out->logit_rows = m->pad.logit_rows;
    for (int g = 0; g < KV_GROUPS; g++) {
        out->slot[g] = m->pad.slot[g];
        out->seqs[g] = m->pad.seqs[g];
    }
    const kern_dev *d = m->dev;
    bool share =
        kern_share(b->seqs[0], b->n_seqs, d->page_tokens, d->share_pages, 2, NULL, NULL) > 0;
    return (uint64_t)(b->tops != NULL) << 63 | (uint64_t)share << 62 | (uint64_t)T << 32 |
           (uint64_t)kern_len_bucket(len);
}
