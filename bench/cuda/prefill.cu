/* Attention of many new tokens, as the operator: some rows of small and ragged shapes are held
 * against a double-precision softmax over the same codes, then prompts of a model of 8 billion
 * weights are timed. Exit 1 when a result is wrong. */
#include "attention.cuh"

static const char *name_of(int type)
{
    return type == KV_BF16 ? "bf16" : "e4m3";
}

static int right(const attention_case &c, cudaStream_t st)
{
    attention_bench s(c, false);
    const char *why = cuda_attention(&s.a, st);
    if (why) {
        printf("%s: %s\n", name_of(c.type), why);
        return 1;
    }
    CK(cudaStreamSynchronize(st));
    const int T = c.seqs * c.rows;
    std::vector<int> look = {0, T / 2, T - 1};
    for (int i = 0; i < 5; i++)
        look.push_back((int)(rnd() % (unsigned)T));
    const double err = s.error(look);
    const int bad = !(err < 4e-3); /* probabilities are rounded to 16 bits */
    printf("%s %d x %4d rows of %5d, heads %dx%d D %3d window %3d: err %.1e%s\n", name_of(c.type),
           c.seqs, c.rows, c.len, c.Hk, c.G, c.D, c.window, err, bad ? " WRONG" : "");
    return bad;
}

static void timed(const attention_case &c, cudaStream_t st)
{
    attention_bench s(c, false);
    const double us = time_graph(st, 2, [&](int) { cuda_attention(&s.a, st); });
    /* Pairs of a query and a key that it sees; two products. */
    const double before = c.len - c.rows, pairs = c.rows * before + c.rows * (c.rows + 1.0) / 2;
    const double tflops = 4.0 * c.seqs * pairs * c.Hk * c.G * c.D / us / 1e6;
    printf("%s %d x %5d rows of %5d, heads %dx%d D %3d: %9.1f us %5.0f TFLOP/s (%2.0f %% of 790)\n",
           name_of(c.type), c.seqs, c.rows, c.len, c.Hk, c.G, c.D, us, tflops, tflops / 7.9);
}

int main(void)
{
    /* seqs, rows, len, Hk, G, D, window */
    static const int small[][7] = {{1, 300, 300, 8, 4, 128, 0}, {3, 77, 500, 2, 4, 128, 0},
                                   {2, 200, 333, 2, 7, 64, 0},  {2, 130, 400, 2, 3, 96, 0},
                                   {2, 130, 400, 2, 2, 256, 0}, {2, 200, 900, 2, 4, 128, 128}};
    static const int large[][6] = {{1, 2048, 2048, 8, 4, 128},
                                   {1, 8192, 8192, 8, 4, 128},
                                   {1, 2048, 16384, 8, 4, 128},
                                   {8, 512, 512, 8, 4, 128},
                                   {1, 4096, 4096, 4, 2, 256}};
    int bad = 0;
    cudaStream_t st;
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, 0) != cudaSuccess) {
        printf("prefill: no CUDA device, nothing measured\n");
        return 0;
    }
    CK(cudaStreamCreate(&st));
    for (int type : {(int)KV_BF16, (int)KV_FP8_E4M3}) {
        for (auto &k : small)
            bad += right({type, k[0], k[1], k[2], k[3], k[4], k[5], k[6]}, st);
        for (auto &k : large)
            timed({type, k[0], k[1], k[2], k[3], k[4], k[5], 0}, st);
    }
    printf("prefill: %d wrong\n", bad);
    return bad != 0;
}
