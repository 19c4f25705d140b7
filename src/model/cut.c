/* One model over several devices (tensor parallel): which part of it a rank has. Heads and the
 * lanes of feed-forwards are divided; what makes them is cut by rows, what reads them by columns,
 * and sums of the ranks' outputs are whole again. Every rank computes the residual stream, norms
 * and routing for itself. A key/value head whose queries are on several ranks is kept by each.
 *
 * Kept whole, and computed by every rank: gated delta nets, and attention whose norm of q and k
 * runs over all heads. The embedding is whole on each; rows of the head are divided. */
#include <stdio.h>
#include <string.h>
#include "model/arch.h"

static bool has_mix(const arch_model *m, arch_mix mix)
{
    for (int i = 0; i < m->n_layers; i++)
        if (m->layers[i].mix == mix) return true;
    return false;
}

/* Are heads divided at all? */
static bool cuts_heads(const arch_model *m)
{
    return m->qk_norm != ARCH_QK_WHOLE && (has_mix(m, ARCH_ATTENTION) || has_mix(m, ARCH_MLA));
}

static bool heads_fit(const arch_model *m, int n)
{
    if (!cuts_heads(m)) return true;
    if (m->H % n) return false;
    return !has_mix(m, ARCH_ATTENTION) || m->Hk % n == 0 || n % m->Hk == 0;
}

/* The first width that n does not divide; NULL: all fit. */
static const char *width_left_over(const arch_model *m, int n, int64_t *width)
{
    bool moe = false;
    for (int i = 0; i < m->n_layers; i++) {
        moe = moe || m->layers[i].ffn == ARCH_MOE;
        *width = m->layers[i].inter;
        if (m->layers[i].ffn != ARCH_MOE && *width % n) return "the feed-forward";
    }
    *width = m->moe.inter;
    if (moe && *width % n) return "an expert";
    *width = m->moe.shared_inter;
    return moe && *width % n ? "the shared expert" : NULL;
}

void arch_ranks_that_fit(const arch_model *m, int64_t size, int64_t unit, buf *out)
{
    int64_t width;
    bool any = false;
    for (int n = 2; n <= 64; n++) {
        if (!heads_fit(m, n) || width_left_over(m, n, &width)) continue;
        if (size % n || (unit > 1 && size / n % unit)) continue;
        buf_printf(out, "%s%d", any ? ", " : "", n);
        any = true;
    }
    if (!any) buf_puts(out, "none");
}

static int refuse(const arch_model *m, int n, const char *why, err *e)
{
    buf fit = {0};
    arch_ranks_that_fit(m, 0, 1, &fit);
    int rc = err_set(e, ERR_UNSUPPORTED, "%s: --tp %d: %s; numbers of devices that divide it: %s",
                     m->cfg->where, n, why, fit.data);
    buf_free(&fit);
    return rc;
}

int arch_take_share(arch_model *m, int rank, int n, err *e)
{
    char why[200];
    int64_t width;
    m->H_all = m->H;
    m->Hk_all = m->Hk;
    m->rank = rank;
    m->n_ranks = n;
    if (n == 1) return 0;
    if (!heads_fit(m, n)) {
        snprintf(why, sizeof why, "%d attention heads with %d key/value heads are not divisible",
                 m->H, m->Hk);
        return refuse(m, n, why, e);
    }
    const char *what = width_left_over(m, n, &width);
    if (what) {
        snprintf(why, sizeof why, "%lld lanes of %s are not divisible", (long long)width, what);
        return refuse(m, n, why, e);
    }
    m->heads_cut = cuts_heads(m);
    if (m->heads_cut) {
        m->H /= n;
        m->Hk = m->Hk > n ? m->Hk / n : 1;
    }
    for (int i = 0; i < m->n_layers; i++)
        m->layers[i].inter /= n;
    m->moe.inter /= n;
    m->moe.shared_inter /= n;
    return 0;
}

int arch_first_kv_head(const arch_model *m)
{
    return m->heads_cut ? (int)((int64_t)m->rank * m->Hk_all / m->n_ranks) : 0;
}

/* Part `rank` of n equal ones of the `size` rows from `base` on. */
static void add(arch_cut *c, int64_t base, int64_t size, int rank, int n)
{
    int64_t part = size / n, lo = base + rank * part;
    c->rows[c->n++] = (arch_range){lo, lo + part};
}

static void cut_qkv(const arch_model *m, const arch_linear *l, int shard, arch_cut *c)
{
    int64_t D = m->D, q = m->H_all * D, kv = m->Hk_all * D, head = arch_first_kv_head(m),
            part = m->Hk * D;
    bool fused = l->n_shards == 1;
    if (shard == 0) {
        add(c, 0, q, m->rank, m->n_ranks);
        if (m->attn_gate) add(c, q, q, m->rank, m->n_ranks);
    }
    for (int i = 0; i < 2; i++) { /* k, v */
        int64_t lo = head * D + (fused ? q + i * kv : 0);
        if (fused || shard == 1 + i) c->rows[c->n++] = (arch_range){lo, lo + part};
    }
}

/* As even as whole blocks of 128 rows allow; the first rank has the most. */
static arch_range head_rows(const arch_model *m, int64_t N)
{
    int64_t n = m->n_ranks, unit = N >= 128 * n ? 128 : 1, units = (N + unit - 1) / unit;
    arch_range r = {(units * m->rank + n - 1) / n * unit,
                    (units * (m->rank + 1) + n - 1) / n * unit};
    if (r.hi > N) r.hi = N;
    return r;
}

void arch_cut_of(const arch_model *m, const arch_linear *l, int shard, arch_cut *c)
{
    const arch_shard *s = &l->shard[shard];
    bool two = false; /* gate and up in one */
    *c = (arch_cut){.cols = {0, s->K}};
    switch (m->n_ranks > 1 ? l->kind : ARCH_ROUTER) {
    case ARCH_QKV:
        c->by_rows = m->heads_cut;
        if (c->by_rows) cut_qkv(m, l, shard, c);
        break;
    case ARCH_Q_B:
    case ARCH_KV_B:
        c->by_rows = m->heads_cut;
        if (c->by_rows) add(c, 0, s->N, m->rank, m->n_ranks);
        break;
    case ARCH_GATE_UP:
    case ARCH_EXPERT_UP:
    case ARCH_SHARED_UP:
        c->by_rows = true;
        two = l->n_shards == 1 && (l->kind != ARCH_GATE_UP || m->layers[l->layer].ffn == ARCH_GLU);
        add(c, 0, two ? s->N / 2 : s->N, m->rank, m->n_ranks);
        if (two) add(c, s->N / 2, s->N / 2, m->rank, m->n_ranks);
        break;
    case ARCH_O:
    case ARCH_DOWN:
    case ARCH_EXPERT_DOWN:
    case ARCH_SHARED_DOWN:
        c->by_cols = l->kind != ARCH_O || m->heads_cut;
        if (c->by_cols) {
            int64_t part = s->K / m->n_ranks;
            c->cols = (arch_range){m->rank * part, (m->rank + 1) * part};
        }
        break;
    case ARCH_LM_HEAD:
        c->by_rows = true;
        c->rows[c->n++] = head_rows(m, s->N);
        break;
    default:
        break;
    }
    if (!c->n) c->rows[c->n++] = (arch_range){0, s->N};
}
