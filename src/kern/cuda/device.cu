/* The device half of gpu_api with the CUDA runtime, and the symbol of the plug-in. Streams do not
 * wait for the default stream; a capture takes what its own thread launches, so that other threads
 * may load weights meanwhile. An error that a launch or a kernel left behind is reported by the
 * next sync; after an error of a kernel CUDA repeats it for ever: the device is of no more use to
 * this process. */
#include <cuda_runtime.h>
#include <stdio.h>
#include <string.h>
#include "kern/cuda/api.h"
#include "kern/cuda/plain_attention.h"
#include "kern/cuda/table.h"

static const char *why(cudaError_t rc)
{
    if (rc == cudaSuccess) return NULL;
    (void)cudaGetLastError(); /* said once */
    return cudaGetErrorString(rc);
}

static const char *dev_count(int *n)
{
    *n = 0;
    return why(cudaGetDeviceCount(n));
}

static const char *dev_bind(int device)
{
    return why(cudaSetDevice(device));
}

static const char *dev_facts(int device, gpu_facts *out)
{
    cudaDeviceProp p;
    int driver = 0;
    size_t free_bytes = 0, total = 0;
    memset(out, 0, sizeof *out);
    cudaError_t rc = cudaGetDeviceProperties(&p, device);
    if (rc == cudaSuccess) rc = cudaDriverGetVersion(&driver);
    if (rc == cudaSuccess) rc = cudaSetDevice(device);
    /* A multiprocessor set to less shared memory has to be empty before it takes a block that wants
     * more: the product behind a small kernel could not start beside it. */
    if (rc == cudaSuccess) rc = cudaDeviceSetCacheConfig(cudaFuncCachePreferShared);
    if (rc == cudaSuccess) rc = cudaMemGetInfo(&free_bytes, &total);
    if (rc != cudaSuccess) return why(rc);
    snprintf(out->name, sizeof out->name, "%.63s", p.name);
    snprintf(out->driver, sizeof out->driver, "CUDA %d.%d", driver / 1000, driver % 1000 / 10);
    out->sm = p.major * 10 + p.minor;
    out->sms = p.multiProcessorCount;
    out->total_bytes = total;
    out->free_bytes = free_bytes;
    return NULL;
}

static const char *dev_alloc(void **out, size_t n)
{
    *out = NULL;
    return why(cudaMalloc(out, n ? n : 1));
}

static void dev_free(void *p)
{
    (void)why(cudaFree(p));
}

static const char *dev_alloc_host(void **out, size_t n)
{
    *out = NULL;
    return why(cudaMallocHost(out, n ? n : 1));
}

static void dev_free_host(void *p)
{
    if (p) (void)why(cudaFreeHost(p));
}

static const char *dev_stream_open(void **out)
{
    cudaStream_t s = NULL;
    const char *bad = why(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    *out = s;
    return bad;
}

static void dev_stream_close(void *s)
{
    if (s) (void)why(cudaStreamDestroy((cudaStream_t)s));
}

static const char *dev_sync(void *s)
{
    cudaError_t rc = cudaStreamSynchronize((cudaStream_t)s), left = cudaGetLastError();
    return why(rc != cudaSuccess ? rc : left);
}

static const char *dev_upload(void *to, const void *from, size_t n, void *s)
{
    return n ? why(cudaMemcpyAsync(to, from, n, cudaMemcpyHostToDevice, (cudaStream_t)s)) : NULL;
}

static const char *dev_download(void *to, const void *from, size_t n, void *s)
{
    return n ? why(cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToHost, (cudaStream_t)s)) : NULL;
}

static const char *dev_zero(void *p, size_t n, void *s)
{
    return n ? why(cudaMemsetAsync(p, 0, n, (cudaStream_t)s)) : NULL;
}

static const char *dev_graph_begin(void *s)
{
    return why(cudaStreamBeginCapture((cudaStream_t)s, cudaStreamCaptureModeThreadLocal));
}

static const char *dev_graph_end(void *s, void **graph)
{
    cudaGraph_t g = NULL;
    cudaGraphExec_t run = NULL;
    *graph = NULL;
    const char *bad = why(cudaStreamEndCapture((cudaStream_t)s, &g));
    if (!bad) bad = why(cudaGraphInstantiate(&run, g, 0));
    if (g) (void)why(cudaGraphDestroy(g));
    *graph = run;
    return bad;
}

static const char *dev_graph_run(void *graph, void *s)
{
    return why(cudaGraphLaunch((cudaGraphExec_t)graph, (cudaStream_t)s));
}

static void dev_graph_close(void *graph)
{
    if (graph) (void)why(cudaGraphExecDestroy((cudaGraphExec_t)graph));
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
    a.alloc_host = dev_alloc_host;
    a.free_host = dev_free_host;
    a.stream_open = dev_stream_open;
    a.stream_close = dev_stream_close;
    a.sync = dev_sync;
    a.upload = dev_upload;
    a.download = dev_download;
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
