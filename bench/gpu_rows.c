/* Operators of a GPU on rows, in the shapes of a decode step of a model of 8e9 parameters: the time
 * of each in a graph of many, one after the other as in a step (each may start while the one before
 * it ends). Usage: gpu_rows [libtare-cuda.so]; without a GPU it says so. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kern/cuda/api.h"
#include "kern/kern.h"

enum { K = 4096, F = 14336, H = 32, HK = 8, D = 128, V = 128256, TOKENS = 32, LAUNCHES = 200 };
static const int64_t batches[] = {1, 64, 2048};

static const gpu_api *api;
static void *stream;

static void need(const char *what, const char *bad)
{
    if (!bad) return;
    fprintf(stderr, "gpu_rows: %s: %s\n", what, bad);
    exit(1);
}

static void *memory(size_t n)
{
    void *p;
    need("memory", api->alloc(&p, n));
    need("fill", api->zero(p, n, stream));
    return p;
}

/* Lanes that differ, in f32. */
static void *numbers(size_t n)
{
    void *p = memory(n * 4);
    float *v = xmalloc(n * 4);
    uint32_t r = 1;
    for (size_t i = 0; i < n; i++)
        v[i] = (float)((r = r * 1664525u + 1013904223u) >> 8) / 4194304.0f - 2;
    need("upload", api->upload(p, v, n * 4, stream));
    need("sync", api->sync(stream));
    free(v);
    return p;
}

/* `bytes`: that it has to read and write. */
static void time_op(const char *name, gpu_op op, int64_t T, const void *args, double bytes)
{
    void *graph, *from, *to;
    double best = 1e9, s;
    need(name, api->launch[op] ? api->launch[op](args, stream) : "not in this plug-in");
    need("sync", api->sync(stream));
    need("graph", api->graph_begin(stream));
    for (int i = 0; i < LAUNCHES; i++)
        need(name, api->launch[op](args, stream));
    need("graph", api->graph_end(stream, &graph));
    need("event", api->event_open(&from));
    need("event", api->event_open(&to));
    for (int i = 0; i < 5; i++) {
        need("event", api->event_record(from, stream));
        need(name, api->graph_run(graph, stream));
        need("event", api->event_record(to, stream));
        need("sync", api->sync(stream));
        need("event", api->event_seconds(from, to, &s));
        best = s < best ? s : best;
    }
    api->event_close(from);
    api->event_close(to);
    api->graph_close(graph);
    best /= LAUNCHES;
    printf("%-14s T %4lld  %7.2f us  %6.0f GB/s\n", name, (long long)T, best * 1e6,
           bytes / best / 1e9);
}

static void rows(int64_t T)
{
    size_t t = (size_t)T;
    double n = (double)T * K, f = (double)T * F;
    gpu_x x = {numbers(t * K), GPU_F32}, y = {memory(t * K * 2), GPU_BF16},
          out = {memory(t * K * 2), GPU_BF16}, gu = {memory(t * 2 * F * 2), GPU_BF16},
          act = {memory(t * F * 2), GPU_BF16}, none = {NULL, GPU_BF16};
    float *w = numbers(K);
    gpu_codes codes = {
        .code = GPU_E4M3, .p = memory(t * F), .ld = K, .scale = memory(t * 512), .scale_row = 1};
    gpu_norm norm = {x, out, w, NULL, 1e-5f, T, K};
    gpu_add_norm add = {x, y, out, w, 1e-5f, T, K};
    gpu_norm_quant coded = {x, y, out, w, 1e-5f, T, K, codes};
    gpu_glu glu = {KERN_SILU, true, gu, act, 2 * F, F, F, T};
    codes.ld = F;
    gpu_glu_quant glu_coded = {KERN_SILU, gu, none, 2 * F, F, F, T, codes};
    gpu_quant quant = {act, F, T, F, codes};
    time_op("rmsnorm", GPU_OP_rmsnorm, T, &norm, n * (4 + 2));
    time_op("add_rmsnorm", GPU_OP_add_rmsnorm, T, &add, n * (4 + 2 + 4 + 2));
    time_op("norm_quant", GPU_OP_norm_quant, T, &coded, n * (4 + 2 + 4 + 2 + 1));
    coded.y.p = coded.out.p = NULL;
    time_op("norm_quant 1", GPU_OP_norm_quant, T, &coded, n * (4 + 1));
    time_op("quant", GPU_OP_quant, T, &quant, f * (2 + 1));
    time_op("glu", GPU_OP_glu, T, &glu, f * (4 + 2));
    time_op("glu_quant", GPU_OP_glu_quant, T, &glu_coded, f * (4 + 1));
    void *all[] = {x.p, y.p, out.p, gu.p, act.p, w, codes.p, codes.scale};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        api->free(all[i]);
}

static void heads(int64_t T)
{
    int64_t ld = (H + 2 * HK) * D;
    size_t page = (size_t)HK * 2 * TOKENS * D * 2, lane = 2;
    char *qkv = memory((size_t)(T * ld) * lane);
    int32_t *slot = xmalloc(sizeof *slot * (size_t)T);
    for (int64_t i = 0; i < T; i++)
        slot[i] = (int32_t)(i * TOKENS + 5);
    void *d_slot = memory(sizeof *slot * (size_t)T);
    need("upload", api->upload(d_slot, slot, sizeof *slot * (size_t)T, stream));
    need("sync", api->sync(stream));
    free(slot);
    float *table = numbers((size_t)T * D / 2);
    gpu_x q = {qkv, GPU_BF16}, k = {qkv + H * D * lane, GPU_BF16},
          v = {qkv + (H + HK) * D * lane, GPU_BF16};
    gpu_rope_store a = {.q = q,
                        .k = k,
                        .v = v,
                        .q_out = q,
                        .ldq = ld,
                        .ldk = ld,
                        .ldv = ld,
                        .ldo = ld,
                        .H = H,
                        .Hk = HK,
                        .D = D,
                        .rot_dim = D,
                        .keep_k = true,
                        .cosv = table,
                        .sinv = table,
                        .q_factor = 1,
                        .kv = {.type = KV_BF16,
                               .order = GPU_KV_MMA,
                               .Hk = HK,
                               .D = D,
                               .page_tokens = TOKENS,
                               .base = memory(page * (size_t)T),
                               .page_stride = page},
                        .slot = d_slot,
                        .T = T};
    double lanes_bytes = (double)T * D * ((H + HK) * 4 + 2 * HK * 2 + HK * 2);
    time_op("rope_store", GPU_OP_rope_store, T, &a, lanes_bytes);
    a.q_norm = a.k_norm = numbers(D);
    time_op("with norms", GPU_OP_rope_store, T, &a, lanes_bytes);
    void *all[] = {qkv, d_slot, table, a.kv.base, (void *)(uintptr_t)a.q_norm};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        api->free(all[i]);
}

static void choosing(int64_t T)
{
    gpu_top a = {.x = {numbers((size_t)(T * V)), GPU_F32},
                 .V = V,
                 .T = T,
                 .out = memory(sizeof(kern_top) * (size_t)T),
                 .work = memory(gpu_top_work(T, V))};
    time_op("top", GPU_OP_top, T, &a, (double)T * V * 4);
    api->free(a.x.p);
    api->free(a.out);
    api->free(a.work);
}

int main(int argc, char **argv)
{
    const gpu_api *(*entry)(int version) = NULL;
    int n = 0;
    void *lib = dlopen(argc > 1 ? argv[1] : "libtare-cuda.so", RTLD_NOW | RTLD_LOCAL);
    if (lib) *(void **)&entry = dlsym(lib, "tare_gpu_api");
    api = entry ? entry(GPU_API_VERSION) : NULL;
    if (!api || api->count(&n) || n < 1) {
        printf("no GPU, or no plug-in (its path is the argument)\n");
        return 0;
    }
    need("bind", api->bind(0));
    need("stream", api->stream_open(&stream));
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        rows(batches[i]);
        heads(batches[i]);
        if (batches[i] <= 64) choosing(batches[i]); /* as many as are sampled in a step */
    }
    api->stream_close(stream);
    return 0;
}
