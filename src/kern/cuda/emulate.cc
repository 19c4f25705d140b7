/* The machinery behind emulate.h, and the device half of gpu_api for it: memory is the host's,
 * streams are nothing, graphs are refused.
 *
 * A stack belongs to a runner, which starts thread after thread. Where a thread waits, its runner
 * stays with it, and another one goes on with the threads that have not started. Threads that may
 * go on stand in a queue; a thread that waits switches straight to the first of it. When the queue
 * is empty, every thread has started and not all have ended, the block is stuck: its threads wait
 * at different places.
 *
 * Device memory is NaN when it is given out, and has 64 bytes on each side that are looked at when
 * it is freed: a kernel that wrote there ends the process. */
#include "kern/cuda/emulate.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "kern/cuda/api.h"
#include "kern/cuda/plain_attention.h"
#include "kern/cuda/table.h"

#define MAX_THREADS 1024
#define MAX_SMEM    232448 /* of a block of sm_90 */
#define FREE_SMEM   49152  /* without asking */
#define STACK_BYTES 131072
#define GUARD_BYTES 4096
#define EDGE        64
#define EDGE_BYTE   0xa5

typedef enum place { RUNNING, AT_BARRIER, AT_WARP, ENDED } place;

typedef struct fiber {
    void *sp;
    uint3 id;
    place at;
    const char *file;
    int line;
    unsigned mask;
    emu_warp_op *op;
} fiber;

typedef struct warp {
    emu_lane lanes[32];
    int come[32]; /* to operations whose lowest lane this is */
} warp;

typedef struct machine { /* the one device; in the hands of whoever holds `busy` */
    fiber threads[MAX_THREADS];
    warp warps[MAX_THREADS / 32];
    fiber *queue[MAX_THREADS];
    int head, waiting_in_queue;
    fiber *self;
    int n, started, ended, at_barrier;
    int yields; /* since a thread has last done anything else */
    struct {
        int come;
        unsigned phase;
    } named[16];
    bool backwards;
    unsigned launches;
    void (*body)(void *ctx);
    void *ctx, *main_sp;
    const char *kernel;
    void *stacks[MAX_THREADS], *fresh; /* tops of the free ones, of the latest in use */
    int n_stacks, made;
    alignas(1024) unsigned char smem[MAX_SMEM + EDGE];
} machine;

uint3 threadIdx, blockIdx, blockDim, gridDim;
static machine the_machine;
static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;
/* The section of __shared__ arrays, where there is one. */
extern "C" EMU_PRIVATE __attribute__((weak)) unsigned char __start_emu_shared[],
    __stop_emu_shared[];

void emu_die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("emulated GPU: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

/* ---- fibers -------------------------------------------------------------------------------------
 */
/* Saves what the ABI keeps, leaves the stack pointer in *from and goes on at `to`. */
extern "C" EMU_PRIVATE void emu_switch(void **from, void *to);
asm(".text\n"
    ".p2align 4\n"
    ".globl emu_switch\n"
    ".hidden emu_switch\n"
    ".type emu_switch, @function\n"
    "emu_switch:\n"
    "    pushq %rbp\n"
    "    pushq %rbx\n"
    "    pushq %r12\n"
    "    pushq %r13\n"
    "    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n"
    "    popq %r14\n"
    "    popq %r13\n"
    "    popq %r12\n"
    "    popq %rbx\n"
    "    popq %rbp\n"
    "    ret\n"
    ".size emu_switch, . - emu_switch\n");

static void *make_stack(machine *m)
{
    unsigned char *p = (unsigned char *)mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect(p, GUARD_BYTES, PROT_NONE)) emu_die("no memory for a stack");
    /* Tops lie apart in the cache. */
    return p + STACK_BYTES - 64 - (size_t)(m->made++ % 56) * 64;
}

/* The library may be opened and closed often. */
__attribute__((destructor)) static void drop_stacks(void)
{
    machine *m = &the_machine;
    while (m->n_stacks) {
        uintptr_t top = (uintptr_t)m->stacks[--m->n_stacks];
        munmap((void *)((top + 4095) / 4096 * 4096 - STACK_BYTES), STACK_BYTES);
    }
}

static void runner(void);

/* A stack pointer that emu_switch goes on at the start of runner with. */
static void *fresh(machine *m)
{
    void **top = (void **)(m->n_stacks ? m->stacks[--m->n_stacks] : make_stack(m));
    m->fresh = top;
    memset(top - 8, 0, 8 * sizeof *top);
    top[-2] = (void *)runner; /* and top[-1]: where it would return to */
    return top - 8;
}

static fiber *next_ready(machine *m)
{
    if (!m->waiting_in_queue) return NULL;
    fiber *f = m->queue[m->head];
    m->head = (m->head + 1) % MAX_THREADS;
    m->waiting_in_queue--;
    return f;
}

static void make_ready(machine *m, fiber *f)
{
    f->at = RUNNING;
    m->queue[(m->head + m->waiting_in_queue++) % MAX_THREADS] = f;
}

[[noreturn]] static void stuck(const machine *m)
{
    int seen = 0, ended = 0;
    char text[1024];
    size_t used = 0;
    for (int i = 0; i < m->n; i++)
        ended += m->threads[i].at == ENDED;
    text[0] = 0;
    for (int i = 0; i < m->n && seen < 4; i++) { /* the first of each place */
        const fiber *f = &m->threads[i];
        int count = 0, first = 1;
        for (int j = 0; j < m->n; j++)
            if (m->threads[j].at == f->at && m->threads[j].file == f->file &&
                m->threads[j].line == f->line && m->threads[j].mask == f->mask) {
                count++;
                first &= j >= i;
            }
        if (f->at == ENDED || !first) continue;
        seen++;
        used +=
            (size_t)snprintf(text + used, sizeof text - used, "; %d wait at %s:%d (%s %08x)", count,
                             f->file, f->line, f->at == AT_BARRIER ? "block" : "warp", f->mask);
        if (used >= sizeof text) break;
    }
    emu_die("%s: block (%u,%u,%u) of %d threads is stuck: %d have ended%s", m->kernel, blockIdx.x,
            blockIdx.y, blockIdx.z, m->n, ended, text);
}

static void suspend(machine *m, fiber *self)
{
    fiber *next = next_ready(m);
    if (next)
        emu_switch(&self->sp, next->sp);
    else if (m->started < m->n)
        emu_switch(&self->sp, fresh(m));
    else
        stuck(m);
    m->self = self;
    threadIdx = self->id;
}

static void start_one(machine *m)
{
    int i = m->started++;
    if (m->backwards) i = m->n - 1 - i;
    fiber *f = &m->threads[i];
    f->at = RUNNING;
    m->self = f;
    threadIdx = f->id;
    m->body(m->ctx);
    m->self->at = ENDED;
    m->ended++;
}

static void runner(void)
{
    machine *m = &the_machine;
    void *unused, *stack = m->fresh;
    while (m->started < m->n)
        start_one(m);
    m->stacks[m->n_stacks++] = stack; /* nobody takes it before the switch below */
    fiber *next = next_ready(m);
    if (!next && m->ended < m->n) stuck(m);
    emu_switch(&unused, next ? next->sp : m->main_sp);
    __builtin_unreachable();
}

static void run_block(machine *m)
{
    m->started = m->ended = m->at_barrier = m->yields = 0;
    memset(m->named, 0, sizeof m->named);
    emu_switch(&m->main_sp, fresh(m));
}

/* ---- barriers -----------------------------------------------------------------------------------
 */
void emu_sync_block(const char *file, int line)
{
    machine *m = &the_machine;
    fiber *self = m->self;
    self->at = AT_BARRIER;
    self->file = file;
    self->line = line;
    self->mask = 0;
    if (++m->at_barrier < m->n) {
        suspend(m, self);
        return;
    }
    m->at_barrier = 0;
    for (int i = 0; i < m->n; i++)
        if (m->threads[i].line != line || m->threads[i].file != file) stuck(m);
    for (int i = 0; i < m->n; i++)
        if (&m->threads[i] != self) make_ready(m, &m->threads[i]);
    self->at = RUNNING;
}

void emu_yield(void)
{
    machine *m = &the_machine;
    fiber *self = m->self;
    if (m->yields++ > 100 * MAX_THREADS) emu_die("%s: every thread waits for another", m->kernel);
    make_ready(m, self);
    emu_switch(&self->sp, m->started < m->n ? fresh(m) : next_ready(m)->sp);
    m->self = self;
    threadIdx = self->id;
}

void emu_named(int which, int threads, bool wait)
{
    machine *m = &the_machine;
    if (which < 1 || which > 15) emu_die("%s: named barrier %d", m->kernel, which);
    const unsigned phase = m->named[which].phase;
    m->yields = 0;
    if (++m->named[which].come > threads) emu_die("%s: barrier %d overrun", m->kernel, which);
    if (m->named[which].come == threads) m->named[which].come = 0, m->named[which].phase++;
    while (wait && m->named[which].phase == phase)
        emu_yield();
}

int emu_lane_id(void)
{
    return (int)(the_machine.self - the_machine.threads) % 32;
}

void emu_warp(unsigned mask, emu_warp_op *op, const void *in, void *out, int64_t arg,
              const char *file, int line)
{
    machine *m = &the_machine;
    fiber *self = m->self;
    int index = (int)(self - m->threads), me = index % 32;
    fiber *all = self - me;
    warp *w = &m->warps[index / 32];
    if (!(mask >> me & 1)) emu_die("%s:%d: mask %08x lacks lane %d itself", file, line, mask, me);
    w->lanes[me] = emu_lane{in, out, arg};
    m->yields = 0;
    self->at = AT_WARP;
    self->file = file;
    self->line = line;
    self->mask = mask;
    self->op = op;
    int *come = &w->come[__builtin_ctz(mask)];
    if (++*come < (mask == ~0u ? 32 : __builtin_popcount(mask))) {
        suspend(m, self);
        return;
    }
    *come = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && (all[i].mask != mask || all[i].op != op || all[i].line != line ||
                              all[i].file != file || all[i].at != AT_WARP))
            stuck(m);
    if (op) op(w->lanes, mask);
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && i != me) make_ready(m, &all[i]);
    self->at = RUNNING;
}

/* ---- launches -----------------------------------------------------------------------------------
 */
void *emu_smem(void)
{
    return the_machine.smem;
}

/* Of the calling thread: what its next launch may use. */
static __thread const void *allowed_kernel;
static __thread size_t allowed_bytes;

void emu_allow_smem(const void *kernel, size_t bytes)
{
    if (bytes > MAX_SMEM) emu_die("%zu bytes of shared memory asked for", bytes);
    allowed_kernel = kernel;
    allowed_bytes = bytes;
}

static void check_shape(const char *name, const void *kernel, dim3 g, dim3 b, size_t smem)
{
    uint64_t n = (uint64_t)b.x * b.y * b.z;
    if (!g.x || !g.y || !g.z || g.x > INT32_MAX || g.y > 65535 || g.z > 65535)
        emu_die("%s: a grid of (%u,%u,%u)", name, g.x, g.y, g.z);
    if (!n || n > MAX_THREADS || b.x > 1024 || b.y > 1024 || b.z > 64)
        emu_die("%s: a block of (%u,%u,%u)", name, b.x, b.y, b.z);
    if (smem > FREE_SMEM && !(allowed_kernel == kernel && smem <= allowed_bytes))
        emu_die("%s: %zu bytes of shared memory without ALLOW_SMEM", name, smem);
}

const char *emu_launch(const char *name, const void *kernel, dim3 grid, dim3 block, size_t smem,
                       void (*body)(void *ctx), void *ctx)
{
    machine *m = &the_machine;
    check_shape(name, kernel, grid, block, smem);
    pthread_mutex_lock(&busy);
    m->kernel = name;
    m->body = body;
    m->ctx = ctx;
    m->n = (int)(block.x * block.y * block.z);
    m->backwards = m->launches++ & 1;
    for (unsigned i = 0; i < (unsigned)m->n; i++)
        m->threads[i].id = uint3{i % block.x, i / block.x % block.y, i / block.x / block.y};
    blockDim = uint3{block.x, block.y, block.z};
    gridDim = uint3{grid.x, grid.y, grid.z};
    memset(m->smem + smem, EDGE_BYTE, EDGE);
    if (__start_emu_shared)
        memset(__start_emu_shared, 0xff, (size_t)(__stop_emu_shared - __start_emu_shared));
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
                memset(m->smem, 0xff, smem);
                run_block(m);
                m->backwards = !m->backwards;
                for (int i = 0; i < EDGE; i++)
                    if (m->smem[smem + (size_t)i] != EDGE_BYTE)
                        emu_die("%s: wrote past its %zu bytes of shared memory", name, smem);
            }
    pthread_mutex_unlock(&busy);
    return NULL;
}

/* ---- the device ---------------------------------------------------------------------------------
 */
typedef struct chunk { /* in front of the memory given out */
    size_t n;
    unsigned char edge[EDGE];
} chunk;
#define CHUNK 256 /* bytes before the memory: keeps its alignment */
static_assert(sizeof(chunk) <= CHUNK, "a chunk's head fits");

static const char *dev_alloc(void **out, size_t n)
{
    size_t whole = (CHUNK + n + EDGE + 255) / 256 * 256;
    unsigned char *p = (unsigned char *)aligned_alloc(256, whole);
    *out = NULL;
    if (!p) return "emulated: out of memory";
    chunk *c = (chunk *)(p + CHUNK - sizeof(chunk));
    c->n = n;
    memset(c->edge, EDGE_BYTE, EDGE);
    memset(p + CHUNK, 0xff, n);
    memset(p + CHUNK + n, EDGE_BYTE, EDGE);
    *out = p + CHUNK;
    return NULL;
}

static void dev_free(void *q)
{
    if (!q) return;
    unsigned char *p = (unsigned char *)q;
    const chunk *c = (const chunk *)(p - sizeof(chunk));
    for (int i = 0; i < EDGE; i++)
        if (c->edge[i] != EDGE_BYTE || p[c->n + (size_t)i] != EDGE_BYTE)
            emu_die("device memory of %zu bytes was written outside", c->n);
    free(p - CHUNK);
}

static const char *dev_count(int *n)
{
    *n = 1;
    return NULL;
}

static const char *dev_bind(int device)
{
    return device ? "emulated: there is one device" : NULL;
}

static const char *dev_facts(int device, gpu_facts *out)
{
    memset(out, 0, sizeof *out);
    if (device) return dev_bind(device);
    snprintf(out->name, sizeof out->name, "emulated");
    snprintf(out->driver, sizeof out->driver, "none");
    out->sm = 90;
    out->sms = 4;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    out->total_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * page;
    out->free_bytes = (uint64_t)sysconf(_SC_AVPHYS_PAGES) * page;
    out->emulated = true;
    return NULL;
}

static const char *dev_stream_open(void **out)
{
    *out = malloc(1);
    return *out ? NULL : "emulated: out of memory";
}

static const char *dev_sync(void *s)
{
    (void)s;
    return NULL;
}

static const char *dev_copy(void *to, const void *from, size_t n, void *s)
{
    (void)s;
    if (n) memcpy(to, from, n);
    return NULL;
}

static const char *dev_zero(void *p, size_t n, void *s)
{
    (void)s;
    if (n) memset(p, 0, n);
    return NULL;
}

static const char no_graphs[] = "emulated: no graphs";
static const char *dev_graph_begin(void *s)
{
    (void)s;
    return no_graphs;
}
static const char *dev_graph_end(void *s, void **graph)
{
    (void)s;
    *graph = NULL;
    return no_graphs;
}
static const char *dev_graph_run(void *graph, void *s)
{
    (void)graph;
    (void)s;
    return no_graphs;
}
static void dev_graph_close(void *graph)
{
    (void)graph;
}

static gpu_api make_api(void)
{
    gpu_api a = {};
    a.version = GPU_API_VERSION;
    a.count = dev_count;
    a.facts = dev_facts;
    a.bind = dev_bind;
    a.alloc = dev_alloc;
    a.free = dev_free;
    a.alloc_host = dev_alloc;
    a.free_host = dev_free;
    a.stream_open = dev_stream_open;
    a.stream_close = free;
    a.sync = dev_sync;
    a.upload = dev_copy;
    a.download = dev_copy;
    a.zero = dev_zero;
    a.graph_begin = dev_graph_begin;
    a.graph_end = dev_graph_end;
    a.graph_run = dev_graph_run;
    a.graph_close = dev_graph_close;
    a.attention_work = cuda_attention_work;
    a.launch = cuda_launches;
    cuda_packed_api(&a);
    cuda_dense_api(&a);
    cuda_probe_api(&a);
    cuda_comm_api(&a);
    return a;
}
static const gpu_api api = make_api();

extern "C" __attribute__((visibility("default"))) const gpu_api *tare_gpu_api(int version)
{
    return version == GPU_API_VERSION ? &api : NULL;
}
