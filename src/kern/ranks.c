/* Devices that run one model together. Rank 0 owns the others. A meeting of all ranks ends when the
 * last has come or one has failed; who waits spins for a moment, because ranks are close behind one
 * another, then sleeps. On the CPU a sum is two meetings with work between: each rank sums its
 * share of the lanes, in the order of ranks, into the buffers of all. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kern/backend.h"

#define MAX_RANKS    64
#define SPIN_SECONDS 50e-6

struct kern_ranks {
    int n;
    kern_dev *dev[MAX_RANKS];
    float *part[MAX_RANKS];
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int here;
    _Atomic unsigned turn;
    _Atomic bool failed;
};

int kern_n_ranks(const kern_dev *d)
{
    return d->ranks ? d->ranks->n : 1;
}

kern_dev *kern_rank(kern_dev *d, int i)
{
    return d->ranks ? d->ranks->dev[i] : d;
}

static bool over(struct kern_ranks *r, unsigned turn)
{
    return atomic_load(&r->turn) != turn || atomic_load(&r->failed);
}

bool kern__ranks_meet(kern_dev *d)
{
    struct kern_ranks *r = d->ranks;
    if (!r) return true;
    pthread_mutex_lock(&r->lock);
    unsigned turn = atomic_load(&r->turn);
    if (++r->here == r->n) {
        r->here = 0;
        atomic_fetch_add(&r->turn, 1);
        pthread_cond_broadcast(&r->wake);
    }
    pthread_mutex_unlock(&r->lock);
    double until = clock_seconds() + SPIN_SECONDS;
    while (!over(r, turn) && clock_seconds() < until) {
    }
    pthread_mutex_lock(&r->lock);
    while (!over(r, turn))
        pthread_cond_wait(&r->wake, &r->lock);
    pthread_mutex_unlock(&r->lock);
    return !atomic_load(&r->failed);
}

bool kern__ranks_failed(const kern_dev *d)
{
    return d->ranks && atomic_load(&d->ranks->failed);
}

int kern__ranks_error(const kern_dev *d, err *e)
{
    return err_set(e, ERR_DEVICE, "%s: another of the %d devices that run this model has failed",
                   d->name, kern_n_ranks(d));
}

void kern_ranks_fail(kern_dev *d)
{
    struct kern_ranks *r = d->ranks;
    if (!r) return;
    pthread_mutex_lock(&r->lock);
    bool first = !atomic_exchange(&r->failed, true);
    pthread_cond_broadcast(&r->wake);
    pthread_mutex_unlock(&r->lock);
    for (int i = 0; first && d->be && i < r->n; i++)
        d->be->leave(r->dev[i]);
}

int kern_ranks_mend(kern_dev *d, err *e)
{
    struct kern_ranks *r = d->ranks;
    if (!kern__ranks_failed(d)) return 0;
    int rc = d->be ? d->be->join(r->dev, r->n, e) : 0;
    if (rc < 0) return rc;
    r->here = 0;
    atomic_store(&r->failed, false);
    return 0;
}

void kern_all_reduce(kern_dev *d, float *x, int64_t n)
{
    struct kern_ranks *r = d->ranks;
    int me = d->rank;
    if (!r) return;
    KERN__ELSEWHERE(d, all_reduce(d, x, n))
    r->part[me] = x;
    if (!kern__ranks_meet(d)) return;
    int64_t lo = n * me / r->n, hi = n * (me + 1) / r->n;
    for (int64_t i = lo; i < hi; i++) {
        float sum = r->part[0][i];
        for (int k = 1; k < r->n; k++)
            sum += r->part[k][i];
        for (int k = 0; k < r->n; k++)
            r->part[k][i] = sum;
    }
    kern__ranks_meet(d);
}

/* ---- opening and closing ------------------------------------------------------------------------
 */

/* "cuda:2" stands for GPU 2 and those after it; a GPU's plug-in says how many there are. */
static int name_of(const char *device, int rank, char out[32], err *e)
{
    long first = 0;
    char *end = NULL;
    *out = 0;
    if (!device || !*device || !strcmp(device, "cpu") || !strcmp(device, "emulated")) {
        snprintf(out, 32, "%s", device ? device : "");
        return 0;
    }
    if (!strncmp(device, "cuda:", 5)) first = strtol(device + 5, &end, 10);
    if ((end ? end == device + 5 || *end || first < 0 || first > 255 : strcmp(device, "cuda") != 0))
        return err_set(e, ERR_USAGE, "unknown device '%s', expected cpu, cuda or cuda:N", device);
    snprintf(out, 32, "cuda:%ld", first + rank);
    return 0;
}

/* Memory that all share is divided among them. */
static void share_memory(struct kern_ranks *r, bool one_machine)
{
    uint64_t least = r->dev[0]->memory_bytes;
    for (int i = 1; i < r->n; i++)
        least = r->dev[i]->memory_bytes < least ? r->dev[i]->memory_bytes : least;
    r->dev[0]->memory_bytes = one_machine ? least / (unsigned)r->n : least;
}

/* A device that lacks beside others that are there is no reason to run elsewhere, but an error. */
static int open_one(kern_dev **out, const kern_opts *o, int rank, int n, err *e)
{
    err why = {0};
    int rc = kern_open(out, o, &why);
    if (rc == 0) return 0;
    if (!rank) return err_set(e, why.code, "%s", why.msg);
    return err_set(e, ERR_DEVICE, "%d devices were asked for to run one model, %d could be had: %s",
                   n, rank, why.msg);
}

int kern__ranks_open(kern_dev **out, const kern_opts *o, err *e)
{
    int rc = 0, threads = o->threads ? o->threads : thread_cpus();
    struct kern_ranks *r = NULL;
    if (o->ranks > MAX_RANKS || o->ranks < 0)
        return err_set(e, ERR_USAGE, "--tp: %d devices for one model; 1 to %d can be", o->ranks,
                       MAX_RANKS);
    /* A kernel that is loaded when it is first launched may wait for its GPU, on which a sum may
     * wait for another GPU, whose thread waits to load a kernel. */
    if (o->device && !strncmp(o->device, "cuda", 4)) setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    r = xcalloc(1, sizeof *r);
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->wake, NULL);
    for (; r->n < o->ranks; r->n++) {
        char name[32];
        kern_opts one = *o;
        one.ranks = 1;
        one.threads = threads / o->ranks > 1 ? threads / o->ranks : 1;
        one.device = name;
        TRY(name_of(o->device, r->n, name, e));
        TRY(open_one(&r->dev[r->n], &one, r->n, o->ranks, e));
    }
    for (int i = 0; i < r->n; i++) {
        r->dev[i]->ranks = r;
        r->dev[i]->rank = i;
    }
    share_memory(r, o->device && !strcmp(o->device, "emulated"));
    if (r->dev[0]->be) TRY(r->dev[0]->be->join(r->dev, r->n, e));
    *out = r->dev[0];
    return 0;
out:
    kern__ranks_close(r);
    return rc;
}

void kern__ranks_close(struct kern_ranks *r)
{
    for (int i = r->n; i-- > 0;) {
        r->dev[i]->ranks = NULL;
        kern_close(r->dev[i]);
    }
    pthread_cond_destroy(&r->wake);
    pthread_mutex_destroy(&r->lock);
    free(r);
}
