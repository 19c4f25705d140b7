/* Attention of many new tokens: some rows of small and ragged shapes, as the operator computes
 * them, are held against a double-precision softmax over the same codes; then prompts of a model of
 * 8 billion weights are timed and compared. Exit 1 when a result is wrong. */
#include "attention.cuh"
#include "kern/cuda/prefill.h"
#include "kern/cuda/prefill90.h"

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

/* One kernel alone: us, and its output. */
template <class F>
static double alone(attention_bench &s, cudaStream_t st, F run, std::vector<float> &out)
{
    s.a.out.type = GPU_F32;
    CK(cudaMemset(s.a.out.p, 0xff, out.size() * 4));
    const char *why = run();
    if (why) {
        printf("%s\n", why);
        exit(1);
    }
    CK(cudaStreamSynchronize(st));
    CK(cudaMemcpy(out.data(), s.a.out.p, out.size() * 4, cudaMemcpyDeviceToHost));
    s.a.out.type = GPU_BF16;
    return time_graph(st, 4, [&](int) { run(); });
}

/* Prompts: wgmma (prefill90) beside mma (prefill), which are held against each other. */
static int timed(const attention_case &c, cudaStream_t st)
{
    attention_bench s(c, false);
    std::vector<float> now((size_t)s.a.seqs.T * s.a.ldo), was(now.size());
    const char *no = prefill90_refuse(&s.a);
    const double old_us = alone(
        s, st, [&] { return prefill_run(&s.a, 1, st); }, was);
    /* Pairs of a query and a key that it sees; two products. Lengths differ a little. */
    double pairs = 0;
    for (int len : s.lens)
        pairs += c.rows * (double)(len - c.rows) + c.rows * (c.rows + 1.0) / 2;
    const double flop = 4.0 * pairs * c.Hk * c.G * c.D / 1e6;
    printf("%s %d x %5d rows of %5d, heads %dx%d D %3d: prefill %8.1f us %4.0f TFLOP/s, ",
           name_of(c.type), c.seqs, c.rows, c.len, c.Hk, c.G, c.D, old_us, flop / old_us);
    if (no) {
        printf("prefill90: %s\n", no);
        return 0;
    }
    const double us = alone(
        s, st, [&] { return prefill90_run(&s.a, 1, st); }, now);
    double worst = 0, d2 = 0, s2 = 0;
    bool nan = false;
    for (size_t i = 0; i < now.size(); i++) {
        const double d = fabs((double)now[i] - was[i]);
        nan |= !(d < 1e30);
        worst = std::max(worst, d);
        d2 += d * d, s2 += (double)was[i] * was[i];
    }
    const double err = sqrt(d2 / s2);
    const bool bad = nan || !(err < 4e-3);
    printf("prefill90 %8.1f us %4.0f TFLOP/s (%2.0f %% of 790); they differ by %.1e at most, "
           "relative %.1e%s\n",
           us, flop / us, flop / us / 7.9, worst, err, bad ? " WRONG" : "");
    return bad;
}

int main(void)
{
    /* seqs, rows, len, Hk, G, D, window */
    static const int small[][7] = {
        {1, 300, 300, 8, 4, 128, 0}, {3, 77, 500, 2, 4, 128, 0},  {2, 200, 333, 2, 7, 64, 0},
        {2, 130, 400, 2, 3, 96, 0},  {2, 130, 400, 2, 2, 256, 0}, {2, 200, 900, 2, 4, 128, 128},
        {5, 61, 700, 3, 1, 128, 0},  {7, 300, 1025, 4, 8, 64, 0}, {1, 2048, 2048, 8, 4, 128, 0}};
    static const int large[][6] = {{1, 2048, 2048, 8, 4, 128},  {1, 8192, 8192, 8, 4, 128},
                                   {1, 2048, 18432, 8, 4, 128}, {4, 512, 512, 8, 4, 128},
                                   {8, 512, 2048, 8, 4, 128},   {1, 4096, 4096, 8, 4, 64},
                                   {1, 4096, 4096, 4, 2, 256}};
    int bad = 0;
    cudaStream_t st;
    cudaDeviceProp p;
    if (!open_device("prefill", &p, &st)) return 0;
    for (int type : {(int)KV_BF16, (int)KV_FP8_E4M3}) {
        for (auto &k : small)
            bad += right({type, k[0], k[1], k[2], k[3], k[4], k[5], k[6], 0}, st);
        for (auto &k : large)
            bad += timed({type, k[0], k[1], k[2], k[3], k[4], k[5], 0, 0}, st);
    }
    printf("prefill: %d wrong\n", bad);
    return bad != 0;
}
