/* What the GPU benches share: error checks, random numbers, medians of graph replays, the read roof
 * of the card in the same run. */
#ifndef BENCH_CUDA_BENCH_CUH
#define BENCH_CUDA_BENCH_CUH
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <vector>

#define CK(x)                                                                                      \
    do {                                                                                           \
        cudaError_t rc_ = (x);                                                                     \
        if (rc_ != cudaSuccess) {                                                                  \
            fprintf(stderr, "%s: %s (line %d)\n", #x, cudaGetErrorString(rc_), __LINE__);          \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* The first device and a stream of it; says so where there is none. */
static inline bool open_device(const char *bench, cudaDeviceProp *p, cudaStream_t *st)
{
    if (cudaGetDeviceProperties(p, 0) != cudaSuccess) {
        printf("%s: no CUDA device, nothing measured\n", bench);
        return false;
    }
    CK(cudaStreamCreate(st));
    return true;
}

static uint64_t seed = 88172645463325252ull;
static uint32_t rnd(void)
{
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return (uint32_t)(seed >> 32);
}
static float uniform(void)
{
    return (float)((int)(rnd() % 20001) - 10000) / 10000.0f;
}

static inline float e4m3_value(uint8_t b)
{
    int e = b >> 3 & 15, m = b & 7;
    float v = e ? ldexpf((float)(8 + m), e - 10) : ldexpf((float)m, -9);
    return b & 128 ? -v : v;
}

static double median(std::vector<float> v)
{
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

/* us a launch: launch(i) is captured `runs` times into a graph, replayed ten times. */
template <class F> static double time_graph(cudaStream_t st, int runs, F launch)
{
    cudaGraph_t g;
    cudaGraphExec_t ge;
    cudaEvent_t e0, e1;
    std::vector<float> us;
    CK(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < runs; i++)
        launch(i);
    CK(cudaStreamEndCapture(st, &g));
    CK(cudaGraphInstantiate(&ge, g, 0));
    CK(cudaEventCreate(&e0));
    CK(cudaEventCreate(&e1));
    for (int i = 0; i < 13; i++) {
        float ms;
        CK(cudaEventRecord(e0, st));
        CK(cudaGraphLaunch(ge, st));
        CK(cudaEventRecord(e1, st));
        CK(cudaEventSynchronize(e1));
        CK(cudaEventElapsedTime(&ms, e0, e1));
        if (i >= 3) us.push_back(ms * 1000 / runs);
    }
    cudaGraphExecDestroy(ge);
    cudaGraphDestroy(g);
    cudaEventDestroy(e0);
    cudaEventDestroy(e1);
    return median(us);
}

__global__ void sweep(const uint4 *p, size_t n, uint4 *out)
{
    uint4 s = {0, 0, 0, 0};
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint4 v = __ldcs(p + i);
        s.x ^= v.x, s.y ^= v.y, s.z ^= v.z, s.w ^= v.w;
    }
    if (s.x == 0x12345678 && s.y == s.z) *out = s;
}

/* TB/s of reading. */
static inline double measure_roof(cudaStream_t st)
{
    const size_t bytes = (size_t)2 << 30;
    uint4 *p;
    CK(cudaMalloc(&p, bytes));
    CK(cudaMemset(p, 0x5a, bytes));
    double us = time_graph(st, 1, [&](int) { sweep<<<528, 1024, 0, st>>>(p, bytes / 16, p); });
    cudaFree(p);
    return (double)bytes / us / 1e6;
}
#endif
