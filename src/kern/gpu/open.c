/* Opening a GPU: the plug-in is looked for beside the program and where `make install` puts it, its
 * device is bound, and what every step needs is allocated. "emulated" takes the other build of the
 * plain kernels, which runs on the CPU: for tests, hundreds of times slower. */
#include "kern/gpu/linear.h"
#include "kern/gpu/lt.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/log.h"

/* ---- the plug-in --------------------------------------------------------------------------------
 */

/* Sequences that share a prefix read it from the L2 as long as that holds it, which costs less than
 * attending to it apart and merging (bench/NOTES.md); a model of 8 KV heads of 128 lanes fills 50
 * MB with 12 thousand tokens of a layer. */
#define SHARE_PAGES 512

/* Folders that may hold it, from that of the program: beside it, build/ seen from a test program,
 * lib/tare of an installation. */
static const char *const places[] = {"", "../", "../../", "../lib/tare/"};

static void *open_library(const char *name, char *tried, size_t cap)
{
    char self[4096], path[4352];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n < 0) return NULL;
    self[n] = 0;
    char *slash = strrchr(self, '/');
    if (slash) slash[1] = 0;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        snprintf(path, sizeof path, "%s%s%s", self, places[i], name);
        if (access(path, R_OK)) continue;
        void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (lib) return lib;
        snprintf(tried, cap, "%s", dlerror());
        return NULL;
    }
    snprintf(tried, cap,
             "%s is not beside the program nor in ../lib/tare (it is built by `make cuda` where "
             "nvcc is)",
             name);
    return NULL;
}

static int load_api(gpu_dev *g, const char *device, bool emulated, err *e)
{
    char why[1024] = "";
    const char *name = emulated ? "libtare-emulated.so" : "libtare-cuda.so";
    g->lib = open_library(name, why, sizeof why);
    if (!g->lib) return err_set(e, ERR_UNSUPPORTED, "device '%s': %.900s", device, why);
    const gpu_api *(*get)(int) = NULL;
    *(void **)&get = dlsym(g->lib, "tare_gpu_api");
    g->api = get ? get(GPU_API_VERSION) : NULL;
    if (!g->api)
        return err_set(e, ERR_UNSUPPORTED,
                       "device '%s': %s is of another version than the program; build both from "
                       "the same sources",
                       device, name);
    return 0;
}

/* "cuda", "cuda:3", "emulated". */
static int parse(const char *text, int *index, bool *emulated, err *e)
{
    *index = 0;
    *emulated = !strcmp(text, "emulated");
    if (*emulated || !strcmp(text, "cuda")) return 0;
    char *end = NULL;
    long n = strncmp(text, "cuda:", 5) ? -1 : strtol(text + 5, &end, 10);
    if (n < 0 || n > 255 || !end || end == text + 5 || *end)
        return err_set(e, strncmp(text, "cuda", 4) ? ERR_UNSUPPORTED : ERR_USAGE,
                       "unknown device '%s', expected cpu, cuda or cuda:N", text);
    *index = (int)n;
    return 0;
}

/* ---- the device ---------------------------------------------------------------------------------
 */

static int open_device(gpu_dev *g, const char *device, err *e)
{
    int n = 0, rc = 0;
    const char *why = g->api->count(&n);
    if (why) return err_set(e, ERR_UNSUPPORTED, "device '%s': %s", device, why);
    if (g->index >= n)
        return err_set(e, ERR_UNSUPPORTED, "device '%s': this machine has %d GPU%s", device, n,
                       n == 1 ? "" : "s");
    TRY(gpu__check(g, "bind", g->api->bind(g->index), e));
    TRY(gpu__check(g, "facts", g->api->facts(g->index, &g->facts), e));
    TRY(gpu__check(g, "stream", g->api->stream_open(&g->stream), e));
    void *p = NULL;
    TRY(gpu__check(g, "pinned memory", g->api->alloc_host(&p, sizeof *g->clipped_seen), e));
    g->clipped_seen = p;
    *g->clipped_seen = 0;
    p = NULL;
    TRY(gpu__device_alloc(g, &p, sizeof *g->clipped, e));
    g->clipped = p;
    TRY(gpu__check(g, "fill", g->api->zero(g->clipped, sizeof *g->clipped, g->stream), e));
    TRY(gpu__check(g, "fill", g->api->sync(g->stream), e));
out:
    return rc;
}

int kern__gpu_open(kern_dev **out, const kern_opts *o, err *e)
{
    int rc = 0;
    bool emulated;
    kern_opts host = *o;
    gpu_dev *g = xcalloc(1, sizeof *g);
    host.device = NULL;
    pthread_mutex_init(&g->launching, NULL);
    g->pub.be = &gpu__backend;
    snprintf(g->name, sizeof g->name, "%.31s", o->device);
    TRY(parse(o->device, &g->index, &emulated, e));
    TRY(load_api(g, o->device, emulated, e));
    TRY(kern_open(&g->host, &host, e));
    TRY(open_device(g, o->device, e));
    tuned_open(&g->tuned, &g->facts);
    snprintf(g->what, sizeof g->what, "%s (sm_%d, driver %s)", g->facts.name, g->facts.sm,
             g->facts.driver);
    g->pub.name = g->name;
    g->pub.what = g->what;
    g->pub.features = g->host->features;
    g->pub.team = g->host->team;
    g->pub.memory_bytes = g->facts.free_bytes;
    g->pub.page_tokens = 32;
    g->pub.share_pages = g->facts.emulated ? 8 : SHARE_PAGES;
    *out = &g->pub;
    g = NULL;
out:
    if (g) gpu__close(&g->pub);
    return rc;
}

void gpu__close(kern_dev *d)
{
    gpu_dev *g = gpu__of(d);
    if (g->api) {
        g->api->bind(g->index);
        if (g->profile) gpu__profile(d, false, NULL);
        for (int i = 0; i < g->n_known; i++) {
            gpu__step_free(g, g->known[i]);
            free(g->known[i]);
        }
        gpu__step_free(g, &g->step);
        gpu__dense_close(g);
        gpu__lt_close(g);
        for (int i = 0; i < g->pool.n; i++)
            g->api->free(g->pool.mem[i]);
        if (g->clipped) g->api->free(g->clipped);
        if (g->clipped_seen) g->api->free_host(g->clipped_seen);
        if (g->comm) g->api->comm_close(g->comm);
        if (g->stream) g->api->stream_close(g->stream);
    }
    pthread_mutex_destroy(&g->launching);
    gpu__forget_handles(g);
    free(g->known);
    free(g->pool.mem);
    free(g->blocks);
    tuned_free(&g->tuned);
    free(g->found);
    if (g->host) kern_close(g->host);
    if (g->lib) dlclose(g->lib);
    free(g);
}

int gpu__reserve_attention(kern_dev *d, int64_t max_rows, int H, int v_lanes, err *e)
{
    gpu_dev *g = gpu__of(d);
    size_t n = g->api->attention_work((int)max_rows, H, v_lanes);
    int rc = 0;
    TRY(gpu__keep(g, &g->attention_work, NULL, n, e));
    TRY(gpu__check(g, "fill", g->api->zero(g->attention_work, n, g->stream), e));
    TRY(gpu__check(g, "fill", g->api->sync(g->stream), e));
    g->pub.scratch_bytes += n;
out:
    return rc;
}

int gpu__host_alloc(kern_dev *d, void **out, size_t n, err *e)
{
    gpu_dev *g = gpu__of(d);
    int rc = gpu__check(g, "bind", g->api->bind(g->index), e);
    return rc < 0 ? rc : gpu__check(g, "pinned memory", g->api->alloc_host(out, n), e);
}

void gpu__host_free(kern_dev *d, void *p)
{
    gpu__of(d)->api->free_host(p);
}
