/* Several GPUs that run one model: the sum over them is an op like any other, and so part of the
 * graphs. No GPU launches a step before all have written theirs down: what a step needs is
 * allocated by then, and an allocation would wait for sums of others that wait for this one. */
#include "kern/gpu/gpu.h"
#include <stdlib.h>
#include <time.h>

#define PATIENCE_SECONDS 2

static void drop_graphs(gpu_dev *g)
{
    for (int i = 0; i < g->n_known; i++) {
        if (g->known[i]->graph) g->api->graph_close(g->known[i]->graph);
        g->known[i]->graph = NULL;
    }
}

int gpu__join(kern_dev *const *d, int n, err *e)
{
    gpu_dev *first = gpu__of(d[0]);
    void **comm = xcalloc((size_t)n, sizeof *comm);
    int *device = xcalloc((size_t)n, sizeof *device);
    for (int i = 0; i < n; i++) {
        gpu_dev *g = gpu__of(d[i]);
        if (g->comm) drop_graphs(g); /* they name sums that were broken off */
        comm[i] = g->comm;
        device[i] = g->index;
    }
    const char *why = first->api->comms_open(comm, device, n);
    for (int i = 0; i < n; i++)
        gpu__of(d[i])->comm = comm[i];
    free(comm);
    free(device);
    return why ? err_set(e, ERR_DEVICE, "%d GPUs for one model: %s", n, why) : 0;
}

/* Called by the rank that failed, for each. A launch in hand ends first, unless it is stuck; an
 * emulated one waits for the others, and only this ends it. */
void gpu__leave(kern_dev *d)
{
    gpu_dev *g = gpu__of(d);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += PATIENCE_SECONDS;
    bool mine = !g->facts.emulated && pthread_mutex_timedlock(&g->launching, &until) == 0;
    g->api->bind(g->index);
    g->api->comm_abort(g->comm);
    if (mine) pthread_mutex_unlock(&g->launching);
}

void gpu__all_reduce(kern_dev *d, float *x, int64_t n)
{
    gpu_dev *g = gpu__of(d);
    gpu_all_reduce a = {.comm = g->comm, .x = gpu__x(g, x), .n = n};
    gpu__push(g, GPU_OP_all_reduce, &a, sizeof a);
    if (g->now) g->now->sums = true;
}
