/* Sums over the devices that run one model together: the operator all_reduce.
 *
 * On GPUs they are NCCL's, which is opened when several are asked for and never linked: the few
 * calls that are used are declared here as its documentation has them. Multicast (NVLS) and
 * connections made late, in the middle of a captured step, are turned off unless the environment
 * says otherwise. In the emulated plug-in the threads of the devices meet, and each sums its share
 * of the lanes in the order of ranks, in f32.
 *
 * A handle stays the same when its device is made ready again after an abort: steps that were
 * written down go on to name it. */
#include "kern/cuda/port.cuh"
#include "kern/cuda/table.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_RANKS 64

namespace
{
const char peer_failed[] = "another GPU of the group has failed";
} // namespace

#ifndef TARE_EMULATED
#include <dlfcn.h>

namespace
{
typedef struct ncclComm *nccl_comm;
typedef int nccl_result; /* 0 = success */
enum { NCCL_SUM = 0, NCCL_F32 = 7, NCCL_BF16 = 9 };

struct {
    void *library;
    const char *(*GetErrorString)(nccl_result);
    const char *(*GetLastError)(nccl_comm);
    nccl_result (*CommInitAll)(nccl_comm *, int, const int *);
    nccl_result (*CommDestroy)(nccl_comm);
    nccl_result (*CommAbort)(nccl_comm);
    nccl_result (*GroupStart)(void);
    nccl_result (*GroupEnd)(void);
    nccl_result (*AllReduce)(const void *, void *, size_t, int, int, nccl_comm, cudaStream_t);
} nccl;

struct comm {
    nccl_comm nccl; /* NULL after an abort */
    int device;
};

const char *say(const char *what, nccl_result rc)
{
    static thread_local char why[512];
    snprintf(why, sizeof why, "NCCL: %s: %s (%s)", what, nccl.GetErrorString(rc),
             nccl.GetLastError(NULL));
    return why;
}

const char *load(void)
{
    static thread_local char why[256];
    if (nccl.library) return NULL;
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    setenv("NCCL_RUNTIME_CONNECT", "0", 0);
    void *lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!lib)
        return "libnccl.so.2 cannot be loaded, which sums over several GPUs: install NCCL 2 "
               "(package libnccl2), or put its folder into LD_LIBRARY_PATH";
#define FIND(name)                                                                                 \
    *(void **)&nccl.name = dlsym(lib, "nccl" #name);                                               \
    if (!nccl.name) {                                                                              \
        snprintf(why, sizeof why,                                                                  \
                 "libnccl.so.2 has no nccl%s: it is too old, 2.18 or newer is "                    \
                 "needed",                                                                         \
                 #name);                                                                           \
        return why;                                                                                \
    }
    FIND(GetErrorString)
    FIND(GetLastError)
    FIND(CommInitAll)
    FIND(CommDestroy)
    FIND(CommAbort)
    FIND(GroupStart)
    FIND(GroupEnd)
    FIND(AllReduce)
#undef FIND
    nccl.library = lib; /* stays: it cannot be unloaded */
    return NULL;
}

/* One sum of n lanes over all, so that nothing is set up later, in a step. */
const char *try_out(comm *const *c, int n, int64_t lanes, int type)
{
    cudaStream_t s[MAX_RANKS] = {};
    void *mem[MAX_RANKS] = {};
    const char *bad = NULL;
    for (int i = 0; i < n && !bad; i++) {
        bad = cuda_error(cudaSetDevice(c[i]->device));
        if (!bad) bad = cuda_error(cudaMalloc(&mem[i], (size_t)lanes * 4));
        if (!bad) bad = cuda_error(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking));
        if (!bad) bad = cuda_error(cudaMemsetAsync(mem[i], 0, (size_t)lanes * 4, s[i]));
    }
    if (!bad) {
        nccl_result rc = nccl.GroupStart(), last;
        for (int i = 0; i < n && !rc; i++)
            rc = nccl.AllReduce(mem[i], mem[i], (size_t)lanes, type, NCCL_SUM, c[i]->nccl, s[i]);
        last = nccl.GroupEnd();
        if (!rc) rc = last;
        if (rc) bad = say("a first sum", rc);
    }
    for (int i = 0; i < n; i++) {
        const char *left = cuda_error(cudaSetDevice(c[i]->device));
        if (!left && s[i]) left = cuda_error(cudaStreamSynchronize(s[i]));
        if (!bad) bad = left;
        if (s[i]) cudaStreamDestroy(s[i]);
        if (mem[i]) cudaFree(mem[i]);
    }
    return bad;
}

void comm_abort(void *handle)
{
    comm *c = (comm *)handle;
    nccl_comm gone = c->nccl;
    c->nccl = NULL;
    if (gone) nccl.CommAbort(gone);
}

void comm_close(void *handle)
{
    comm *c = (comm *)handle;
    if (c && c->nccl) nccl.CommDestroy(c->nccl);
    free(c);
}

const char *comms_open(void **handle, const int *device, int n)
{
    nccl_comm made[MAX_RANKS];
    comm *c[MAX_RANKS];
    if (n > MAX_RANKS) return "more GPUs than can run one model";
    const char *bad = load();
    if (bad) return bad;
    nccl_result rc = nccl.CommInitAll(made, n, device);
    if (rc) return say("CommInitAll", rc);
    for (int i = 0; i < n; i++) {
        if (!handle[i]) handle[i] = calloc(1, sizeof(comm));
        if (!handle[i]) return "out of memory";
        c[i] = (comm *)handle[i];
        c[i]->nccl = made[i];
        c[i]->device = device[i];
    }
    for (int type = NCCL_F32; !bad && type <= NCCL_BF16; type += NCCL_BF16 - NCCL_F32) {
        bad = try_out(c, n, 1024, type);
        if (!bad) bad = try_out(c, n, (int64_t)4 << 20, type);
    }
    return bad;
}

} // namespace

extern "C" const char *cuda_all_reduce(const void *args, void *stream)
{
    const gpu_all_reduce *a = (const gpu_all_reduce *)args;
    nccl_comm to = ((const comm *)a->comm)->nccl;
    if (!to) return peer_failed;
    nccl_result rc =
        nccl.AllReduce(a->x.p, a->x.p, (size_t)a->n, a->x.type == GPU_F32 ? NCCL_F32 : NCCL_BF16,
                       NCCL_SUM, to, (cudaStream_t)stream);
    return rc ? say("AllReduce", rc) : NULL;
}

#else

namespace
{
struct group {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int n, here, handles;
    unsigned turn;
    bool failed;
    gpu_x part[MAX_RANKS];
};

struct comm {
    group *g;
    int rank;
};

const char *comms_open(void **handle, const int *device, int n)
{
    (void)device;
    if (n > MAX_RANKS) return "more GPUs than can run one model";
    group *g = handle[0] ? ((comm *)handle[0])->g : (group *)calloc(1, sizeof *g);
    if (!g) return "out of memory";
    if (handle[0]) {
        g->failed = false;
        g->here = 0;
        return NULL;
    }
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->wake, NULL);
    g->n = g->handles = n;
    for (int i = 0; i < n; i++) {
        comm *c = (comm *)calloc(1, sizeof *c);
        if (!c) return "out of memory";
        *c = comm{g, i};
        handle[i] = c;
    }
    return NULL;
}

void comm_abort(void *handle)
{
    group *g = ((comm *)handle)->g;
    pthread_mutex_lock(&g->lock);
    g->failed = true;
    pthread_cond_broadcast(&g->wake);
    pthread_mutex_unlock(&g->lock);
}

void comm_close(void *handle)
{
    comm *c = (comm *)handle;
    if (!c) return;
    if (--c->g->handles == 0) {
        pthread_cond_destroy(&c->g->wake);
        pthread_mutex_destroy(&c->g->lock);
        free(c->g);
    }
    free(c);
}

/* Waits for all ranks; false: one has failed. */
bool meet(group *g)
{
    pthread_mutex_lock(&g->lock);
    unsigned turn = g->turn;
    if (++g->here == g->n) {
        g->here = 0;
        g->turn++;
        pthread_cond_broadcast(&g->wake);
    }
    while (g->turn == turn && !g->failed)
        pthread_cond_wait(&g->wake, &g->lock);
    bool all = g->turn != turn;
    pthread_mutex_unlock(&g->lock);
    return all;
}

} // namespace

extern "C" const char *cuda_all_reduce(const void *args, void *stream)
{
    const gpu_all_reduce *a = (const gpu_all_reduce *)args;
    const comm *c = (const comm *)a->comm;
    group *g = c->g;
    (void)stream;
    g->part[c->rank] = a->x;
    if (!meet(g)) return peer_failed;
    int64_t lo = a->n * c->rank / g->n, hi = a->n * (c->rank + 1) / g->n;
    for (int64_t i = lo; i < hi; i++) {
        float sum = lane(g->part[0], i);
        for (int r = 1; r < g->n; r++)
            sum += lane(g->part[r], i);
        for (int r = 0; r < g->n; r++)
            put_lane(g->part[r], i, sum);
    }
    return meet(g) ? NULL : peer_failed;
}
#endif

extern "C" void cuda_comm_api(gpu_api *a)
{
    a->comms_open = comms_open;
    a->comm_abort = comm_abort;
    a->comm_close = comm_close;
}
