/* Few rows times a weight on the GPU: every format, the shapes of 8B and 70B models, M = 1 to 8.
 * Each result is first held against a double-precision product of the same codes (random data,
 * poisoned output), then timed: a CUDA graph of launches over enough copies of the weight that none
 * is found in the L2, median of replays. GB/s count weights and scales; the roof is a read sweep of
 * the same run. Exit 1 when a result is wrong. */
#include "kern/cuda/small.h"
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

static const char *const names[SMALL_FORMATS] = {"int4", "e4m3", "bf16"};

struct weight { /* codes on the host, their values, packed on the device `copies` times */
    small_format f;
    int N, K, copies;
    size_t bytes;
    std::vector<float> value; /* of the first `rows` rows */
    int rows;
    uint8_t *dev;
};

static float e4m3(uint8_t b)
{
    int e = b >> 3 & 15, m = b & 7;
    float v = e ? ldexpf((float)(8 + m), e - 10) : ldexpf((float)m, -9);
    return b & 128 ? -v : v;
}

/* A block of distinct rows, repeated down N: values are checked on it, bytes are what they are. */
static weight make_weight(small_format f, int N, int K)
{
    weight w = {f, N, K, 0, small_packed_bytes(f, N, K), {}, 256, NULL};
    int G = K / 128;
    std::vector<uint8_t> codes((size_t)w.rows * K * (f == SMALL_BF16 ? 2 : 1));
    std::vector<float> scales((size_t)w.rows * G);
    w.value.resize((size_t)w.rows * K);
    for (int n = 0; n < w.rows; n++) {
        for (int g = 0; g < G; g++) /* powers of two and their halves are bf16 */
            scales[(size_t)n * G + g] =
                f == SMALL_E4M3 && g ? scales[(size_t)n * G]
                                     : ldexpf(1.0f + (float)(rnd() % 2) / 2, -6 + (int)(rnd() % 3));
        for (int k = 0; k < K; k++) {
            size_t i = (size_t)n * K + k;
            float s = scales[(size_t)n * G + k / 128];
            if (f == SMALL_BF16) {
                __nv_bfloat16 b = __float2bfloat16(uniform());
                memcpy(&codes[2 * i], &b, 2);
                w.value[i] = __bfloat162float(b);
                continue;
            }
            uint8_t c = (uint8_t)(f == SMALL_INT4 ? rnd() & 15 : rnd());
            if (f == SMALL_E4M3 && (c & 127) == 127) c ^= 1; /* NaN */
            codes[i] = c;
            w.value[i] = s * (f == SMALL_INT4 ? (float)c - 8 : e4m3(c));
        }
    }
    size_t part = small_packed_bytes(f, w.rows, K);
    std::vector<uint8_t> packed(part);
    small_pack(f, codes.data(), f == SMALL_BF16 ? NULL : scales.data(), w.rows, K, packed.data());
    w.copies = std::max(2, (int)(450e6 / (double)w.bytes) + 1);
    CK(cudaMalloc(&w.dev, w.bytes * w.copies));
    CK(cudaMemcpy(w.dev, packed.data(), part, cudaMemcpyHostToDevice));
    for (size_t at = part; at < w.bytes * w.copies; at += part)
        CK(cudaMemcpy(w.dev + at, w.dev, std::min(part, w.bytes * w.copies - at),
                      cudaMemcpyDeviceToDevice));
    return w;
}

static double median(std::vector<float> v)
{
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

static double time_graph(const weight &w, small_call c, int pdl, cudaStream_t st)
{
    const int runs = 24;
    cudaGraph_t g;
    cudaGraphExec_t ge;
    cudaEvent_t e0, e1;
    std::vector<float> us;
    c.pdl = pdl;
    CK(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < runs; i++) {
        c.w = w.dev + (size_t)(i % w.copies) * w.bytes;
        small_run(&c);
    }
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

static int check(const weight &w, const std::vector<float> &x, const std::vector<float> &y, int M,
                 double *err)
{
    double d = 0, s = 0;
    for (int m = 0; m < M; m++)
        for (int n = 0; n < w.N; n++) {
            double sum = 0;
            if (n < w.rows)
                for (int k = 0; k < w.K; k++)
                    sum += (double)w.value[(size_t)n * w.K + k] * x[(size_t)m * w.K + k];
            else /* the rows repeat: equal work, equal bits */
                sum = y[(size_t)m * w.N + n % w.rows];
            double v = y[(size_t)m * w.N + n];
            d += (v - sum) * (v - sum);
            s += sum * sum;
        }
    *err = sqrt(d / s);
    return !(*err < 1e-5);
}

static int one(const weight &w, int M, double roof, cudaStream_t st)
{
    std::vector<float> x((size_t)M * w.K), y((size_t)M * w.N);
    std::vector<__nv_bfloat16> xb(x.size());
    __nv_bfloat16 *dx;
    float *dy;
    double err;
    for (size_t i = 0; i < x.size(); i++) {
        xb[i] = __float2bfloat16(rnd() % 512 ? uniform() : 60 * uniform()); /* some outliers */
        x[i] = __bfloat162float(xb[i]);
    }
    CK(cudaMalloc(&dx, xb.size() * 2));
    CK(cudaMalloc(&dy, y.size() * 4));
    CK(cudaMemcpy(dx, xb.data(), xb.size() * 2, cudaMemcpyHostToDevice));
    CK(cudaMemset(dy, 0xff, y.size() * 4)); /* NaN */
    small_call c = {w.f, w.dev, dx, dy, w.K, w.N, w.N, w.K, M, st, 0};
    const char *why = small_run(&c);
    if (why) {
        printf("%-5s N %6d K %6d M %d  refused: %s\n", names[w.f], w.N, w.K, M, why);
        cudaFree(dx), cudaFree(dy);
        return 0;
    }
    CK(cudaStreamSynchronize(st));
    CK(cudaMemcpy(y.data(), dy, y.size() * 4, cudaMemcpyDeviceToHost));
    int bad = check(w, x, y, M, &err);
    double us = time_graph(w, c, 0, st), pdl = time_graph(w, c, 1, st);
    printf("%-5s N %6d K %6d M %d %8.2f us %5.2f TB/s %3.0f %%  pdl %8.2f us %5.2f TB/s %3.0f %%  "
           "err %.1e%s  (%s)\n",
           names[w.f], w.N, w.K, M, us, w.bytes / us / 1e6, 100 * w.bytes / us / 1e6 / roof, pdl,
           w.bytes / pdl / 1e6, 100 * w.bytes / pdl / 1e6 / roof, err, bad ? " WRONG" : "",
           small_entry(w.f, w.K, M));
    cudaFree(dx), cudaFree(dy);
    return bad;
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

static double measure_roof(cudaStream_t st)
{
    const size_t bytes = (size_t)2 << 30;
    uint4 *p;
    cudaEvent_t e0, e1;
    std::vector<float> ms;
    CK(cudaMalloc(&p, bytes));
    CK(cudaMemset(p, 0x5a, bytes));
    CK(cudaEventCreate(&e0));
    CK(cudaEventCreate(&e1));
    for (int i = 0; i < 12; i++) {
        float t;
        CK(cudaEventRecord(e0, st));
        sweep<<<528, 1024, 0, st>>>(p, bytes / 16, p);
        CK(cudaEventRecord(e1, st));
        CK(cudaEventSynchronize(e1));
        CK(cudaEventElapsedTime(&t, e0, e1));
        if (i >= 3) ms.push_back(t);
    }
    cudaFree(p);
    return (double)bytes / median(ms) / 1e9;
}

int main(void)
{
    static const int shapes[][2] = {{6144, 4096},  {4096, 4096}, {28672, 4096}, {4096, 14336},
                                    {10240, 8192}, {8192, 8192}, {57344, 8192}, {8192, 28672},
                                    {2048, 2048},  {1536, 768}};
    int bad = 0, n = 0;
    cudaStream_t st;
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, 0) != cudaSuccess) {
        printf("small: no CUDA device, nothing measured\n");
        return 0;
    }
    CK(cudaStreamCreate(&st));
    double roof = measure_roof(st);
    printf("%s, %d SMs, read roof %.2f TB/s\n", p.name, p.multiProcessorCount, roof);
    for (auto &s : shapes)
        for (int f = 0; f < SMALL_FORMATS; f++) {
            weight w = make_weight((small_format)f, s[0], s[1]);
            for (int M : {1, 2, 5, 8}) {
                bad += one(w, M, roof, st);
                n++;
            }
            cudaFree(w.dev);
        }
    printf("small: %d products, %d wrong\n", n, bad);
    return bad != 0;
}
