/* Few rows times a weight on the GPU: every format, the shapes of 8B and 70B models, M = 1 to 8.
 * Each result is first held against a double-precision product of the same codes (random data,
 * poisoned output), then timed: a CUDA graph of launches over enough copies of the weight that none
 * is found in the L2, median of replays. GB/s count weights and scales; the roof is a read sweep of
 * the same run. Exit 1 when a result is wrong. */
#include "kern/cuda/small.h"
#include "bench.cuh"
#include <cmath>
#include <cstring>

static const char *const names[SMALL_FORMATS] = {"int4", "e4m3", "bf16"};

struct weight { /* codes on the host, their values, packed on the device `copies` times */
    small_format f;
    int N, K, copies;
    size_t bytes;
    std::vector<float> value; /* of the first `rows` rows */
    int rows;
    uint8_t *dev;
};

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
            w.value[i] = s * (f == SMALL_INT4 ? (float)c - 8 : e4m3_value(c));
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

static double time_product(const weight &w, small_call c, int pdl, cudaStream_t st)
{
    c.pdl = pdl;
    return time_graph(st, 24, [&](int i) {
        c.w = w.dev + (size_t)(i % w.copies) * w.bytes;
        small_run(&c);
    });
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
    double us = time_product(w, c, 0, st), pdl = time_product(w, c, 1, st);
    printf("%-5s N %6d K %6d M %d %8.2f us %5.2f TB/s %3.0f %%  pdl %8.2f us %5.2f TB/s %3.0f %%  "
           "err %.1e%s  (%s)\n",
           names[w.f], w.N, w.K, M, us, w.bytes / us / 1e6, 100 * w.bytes / us / 1e6 / roof, pdl,
           w.bytes / pdl / 1e6, 100 * w.bytes / pdl / 1e6 / roof, err, bad ? " WRONG" : "",
           small_entry(w.f, w.K, M));
    cudaFree(dx), cudaFree(dy);
    return bad;
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
