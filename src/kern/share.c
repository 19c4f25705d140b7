/* Which sequences of a step share pages: those that found the same prefix in the cache. Page tables
 * are sorted, so that those that begin alike stand together, and neighbours join while that saves
 * pages. */
#include <stdlib.h>
#include "kern/kern.h"
#include "base/mem.h"

typedef struct member {
    const int32_t *pages;
    int32_t n, seq; /* pages that are not the last; index of the sequence */
} member;

static int alike(const member *a, const member *b)
{
    int n = a->n < b->n ? a->n : b->n, i = 0;
    while (i < n && a->pages[i] == b->pages[i] && a->pages[i] >= 0)
        i++;
    return i;
}

static int before(const void *x, const void *y)
{
    const member *a = x, *b = y;
    int n = a->n < b->n ? a->n : b->n;
    for (int i = 0; i < n; i++)
        if (a->pages[i] != b->pages[i]) return a->pages[i] < b->pages[i] ? -1 : 1;
    return a->n != b->n ? (a->n < b->n ? -1 : 1) : (a->seq > b->seq) - (a->seq < b->seq);
}

/* Members that have these pages, `most` at a time; one that is left over is in no group. */
static int tell(const member *m, int n, int pages, int most, kern_share_fn *group, void *arg)
{
    int told = 0;
    for (int i = 0; n - i >= 2; i += most) {
        int32_t seq[64];
        int k = n - i < most ? n - i : most;
        for (int j = 0; j < k; j++)
            seq[j] = m[i + j].seq;
        if (group) group(arg, seq, k, pages);
        told++;
    }
    return told;
}

/* Pages that can be shared, where they are enough; else 0. */
static int candidate(const kern_seq *s, int page_tokens, int least)
{
    int pages = s->kv_len > 0 ? (s->kv_len - 1) / page_tokens : 0;
    return s->n_rows == 1 && s->pages && pages >= least ? pages : 0;
}

int kern_share(const kern_seq *seqs, int n, int page_tokens, int least, int most,
               kern_share_fn *group, void *arg)
{
    int members = 0, groups = 0;
    if (page_tokens < 1 || least < 1 || most < 2 || most > 64) return 0;
    for (int i = 0; i < n; i++)
        members += candidate(&seqs[i], page_tokens, least) > 0;
    if (members < 2) return 0;
    member *m = xmalloc(sizeof *m * (size_t)members);
    members = 0;
    for (int i = 0; i < n; i++) {
        const int pages = candidate(&seqs[i], page_tokens, least);
        if (pages) m[members++] = (member){seqs[i].pages, pages, i};
    }
    qsort(m, (size_t)members, sizeof *m, before);
    for (int first = 0, end; first < members; first = end) {
        int pages = m[first].n;
        for (end = first + 1; end < members; end++) {
            int with = alike(&m[end - 1], &m[end]), k = end - first;
            if (with > pages) with = pages;
            if (with < least || (k > 1 && k * with < (k - 1) * pages)) break;
            pages = with;
        }
        if (end - first > 1) groups += tell(m + first, end - first, pages, most, group, arg);
    }
    free(m);
    return groups;
}
