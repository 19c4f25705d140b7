/* A model split over several GGUF files, name-00001-of-00003.gguf and so on.
 *
 * Each part is a GGUF of its own with the keys split.no (from 0), split.count and, in the first,
 * split.tensors.count; only the first has the other keys. Whichever part is given, the first is
 * opened and the rest are found beside it by name; their tensors are put together in order.
 * Refused: a name that does not say what the keys say, a part that is missing (by its name), parts
 * of different splits, a tensor that is in two parts, fewer tensors than the first part announces.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "ckpt/gguf.h"

typedef struct split {
    int64_t no, count, tensors; /* tensors -1 = not announced */
} split;

static int read_keys(const gguf_file *g, split *s, err *e)
{
    int rc = 0;
    *s = (split){0, 1, -1};
    TRY(gguf_get_i64(g, "split.no", &s->no, e));
    TRY(gguf_get_i64(g, "split.count", &s->count, e));
    TRY(gguf_get_i64(g, "split.tensors.count", &s->tensors, e));
    if (s->count < 2) s->count = 1;
    if (s->count > 1 && (s->no < 0 || s->no >= s->count))
        rc = err_set(e, ERR_VALUE, "%s: split.no is %" PRId64 " of %" PRId64 " parts", g->map.path,
                     s->no, s->count);
out:
    return rc < 0 ? rc : 0;
}

/* The tail that a part's file name must have. */
static void tail_of(char out[64], int64_t no, int64_t count)
{
    snprintf(out, 64, "-%05" PRId64 "-of-%05" PRId64 ".gguf", no + 1, count);
}

/* Length of the path before the tail; 0 = the name says something else. */
static size_t stem(const char *path, const split *s)
{
    char tail[64];
    tail_of(tail, s->no, s->count);
    size_t n = strlen(path), m = strlen(tail);
    return n > m && !strcmp(path + n - m, tail) ? n - m : 0;
}

static int open_part(gguf_file *g, const char *given, size_t n, int64_t no, int64_t count, err *e)
{
    char tail[64];
    split s;
    tail_of(tail, no, count);
    char *path = xasprintf("%.*s%s", (int)n, given, tail);
    int rc = 0;
    if (!file_exists(path))
        rc = err_set(e, ERR_MISSING,
                     "%s: part %" PRId64 " of %" PRId64 " of this split model is missing; put it "
                     "beside the others",
                     path, no + 1, count);
    else
        rc = gguf_open(g, path, e);
    free(path);
    if (rc < 0) return rc;
    rc = read_keys(g, &s, e);
    if (rc >= 0 && (s.no != no || s.count != count))
        rc = err_set(e, ERR_FORMAT,
                     "%s: says part %" PRId64 " of %" PRId64 " (split.no, split.count), its name "
                     "says part %" PRId64 " of %" PRId64 "; it was renamed, or is of another model",
                     g->map.path, s.no + 1, s.count, no + 1, count);
    if (rc < 0) gguf_close(g);
    return rc;
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const gguf_tensor *const *)a)->name, (*(const gguf_tensor *const *)b)->name);
}

/* All tensors into the first part's table; each keeps its own map. */
static int join(gguf_file *g, int64_t announced, err *e)
{
    size_t n = g->n_tensors, at = 0;
    int rc = 0;
    for (int i = 0; i < g->n_more; i++)
        n += g->more[i].n_tensors;
    if (announced >= 0 && (uint64_t)announced != n)
        return err_set(e, ERR_FORMAT,
                       "%s: the parts hold %zu tensors, split.tensors.count says %" PRId64
                       "; a part is of another model",
                       g->map.path, n, announced);
    gguf_tensor *all = arena_alloc(g->mem, sizeof *all * (n + 1));
    const gguf_tensor **order = xmalloc(sizeof *order * (n + 1));
    for (int i = -1; i < g->n_more; i++) {
        const gguf_file *p = i < 0 ? g : &g->more[i];
        if (p->n_tensors) memcpy(all + at, p->tensors, sizeof *all * p->n_tensors);
        at += p->n_tensors;
    }
    for (size_t i = 0; i < n; i++)
        order[i] = &all[i];
    qsort(order, n, sizeof *order, by_name);
    for (size_t i = 1; rc == 0 && i < n; i++)
        if (!by_name(&order[i - 1], &order[i]))
            rc = err_set(e, ERR_FORMAT, "tensor '%s' is in %s and in %s", order[i]->name,
                         order[i - 1]->map->path, order[i]->map->path);
    free(order);
    g->tensors = all;
    g->n_tensors = n;
    return rc;
}

int gguf_open_split(gguf_file *g, const char *path, err *e)
{
    int rc = 0;
    split s;
    rc = gguf_open(g, path, e);
    if (rc < 0) return rc;
    TRY(read_keys(g, &s, e));
    if (s.count < 2) return 0;
    size_t n = stem(path, &s);
    if (!n) {
        char tail[64];
        tail_of(tail, s.no, s.count);
        rc = err_set(e, ERR_FORMAT,
                     "%s: is part %" PRId64 " of %" PRId64 " of a split model, but is not called "
                     "NAME%s, so that the other parts cannot be found; give all parts their names "
                     "back",
                     path, s.no + 1, s.count, tail);
        goto out;
    }
    gguf_close(g);
    TRY(open_part(g, path, n, 0, s.count, e));
    TRY(read_keys(g, &s, e));
    g->more = xcalloc((size_t)s.count, sizeof *g->more);
    for (int64_t i = 1; i < s.count; i++) {
        TRY(open_part(&g->more[g->n_more], path, n, i, s.count, e));
        g->n_more++;
    }
    TRY(join(g, s.tensors, e));
out:
    if (rc < 0) gguf_close(g);
    return rc < 0 ? rc : 0;
}
