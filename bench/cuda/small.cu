/* Few rows times a weight on the GPU: every format, the shapes of 8B and 70B models, M = 1 to 8.
 * Each result is first held against a double-precision product of the same codes (random data,
 * poisoned output), then timed: a CUDA graph of launches over enough copies of the weight that none
 * is found in the L2, median of replays. GB/s count weights and scales; the roof is a read sweep of
 * the same run. Exit 1 when a result is wrong. Argument: "tiny" = the smallest shape, for the
 * sanitizers. */
#include "weight.cuh"

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
    std::vector<float> x, y((size_t)M * w.N);
    std::vector<__nv_bfloat16> xb = make_x((size_t)M * w.K, x);
    __nv_bfloat16 *dx;
    float *dy;
    double err;
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

int main(int argc, char **argv)
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
            if (argc > 1 && !strcmp(argv[1], "tiny") && s[1] != 768) continue;
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
