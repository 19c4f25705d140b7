/* Many rows times a packed weight on the GPU: the shapes of 8B models, M = 9 to 4096, every plan
 * that there is for the shape. Each result is held against a double-precision product of the same
 * codes (random data with outliers, poisoned output; of many tokens, a sample), in f32 and in bf16,
 * then timed as small.cu does, the ordering of x included; "alone" is without it. Exit 1 when a
 * result is wrong. Arguments: shapes to leave out the rest, "small" = M up to 128 only, "big" =
 * above. */
#include "kern/cuda/wide.h"
#include "weight.cuh"

struct operands {
    int M;
    std::vector<float> x;
    std::vector<int> looked_at;
    std::vector<double> want; /* [looked_at][rows of w] */
    __nv_bfloat16 *dx;
    void *dy, *work;
};

static operands make_operands(const weight &w, int M)
{
    operands o;
    o.M = M;
    std::vector<__nv_bfloat16> x = make_x((size_t)M * w.K, o.x);
    for (int m = 0; m<M; m += M> 64 && m > 8 && m < M - 9 ? (M + 15) / 16 : 1)
        o.looked_at.push_back(m);
    for (int m : o.looked_at)
        for (int n = 0; n < w.rows; n++) {
            double sum = 0;
            for (int k = 0; k < w.K; k++)
                sum += (double)w.value[(size_t)n * w.K + k] * o.x[(size_t)m * w.K + k];
            o.want.push_back(sum);
        }
    CK(cudaMalloc(&o.dx, x.size() * 2));
    CK(cudaMalloc(&o.dy, (size_t)M * w.N * 4));
    CK(cudaMalloc(&o.work, wide_work_bytes(w.K, M)));
    CK(cudaMemset(o.work, 0xff, wide_work_bytes(w.K, M))); /* NaN */
    CK(cudaMemcpy(o.dx, x.data(), x.size() * 2, cudaMemcpyHostToDevice));
    return o;
}

/* Relative error of the tokens that are looked at; the rows of w repeat, so must the results. */
static double error_of(const weight &w, const operands &o, int y_bf16)
{
    const size_t width = y_bf16 ? 2 : 4;
    std::vector<uint8_t> y(w.N * width);
    double d = 0, s = 0;
    auto got = [&](int n) {
        uint32_t bits = 0;
        float f;
        memcpy((uint8_t *)&bits + 4 - width, &y[n * width], width);
        memcpy(&f, &bits, 4);
        return (double)f;
    };
    for (size_t i = 0; i < o.looked_at.size(); i++) {
        CK(cudaMemcpy(y.data(), (uint8_t *)o.dy + (size_t)o.looked_at[i] * w.N * width, w.N * width,
                      cudaMemcpyDeviceToHost));
        for (int n = 0; n < w.N; n++) {
            double want = n < w.rows ? o.want[i * (size_t)w.rows + n] : got(n % w.rows);
            d += (got(n) - want) * (got(n) - want);
            s += want * want;
        }
    }
    return sqrt(d / s);
}

static int check(const weight &w, const operands &o, wide_call c, double err[2])
{
    for (c.y_bf16 = 0; c.y_bf16 < 2; c.y_bf16++) {
        CK(cudaMemset(o.dy, 0xff, (size_t)o.M * w.N * 4)); /* NaN */
        const char *why = wide_run(&c);
        if (why) {
            printf("  refused: %s\n", why);
            return 1;
        }
        CK(cudaStreamSynchronize((cudaStream_t)c.stream));
        err[c.y_bf16] = error_of(w, o, c.y_bf16);
    }
    /* 128 tokens: weights are rounded to bf16 */
    return !(err[0] < (c.plan.tokens == 128 && w.f == SMALL_INT4 ? 3e-3 : 1e-5)) ||
           !(err[1] < 4e-3);
}

static double time_of(const weight &w, wide_call c, cudaStream_t st)
{
    return time_graph(st, 24, [&](int i) {
        c.w = w.dev + (size_t)(i % w.copies) * w.bytes;
        wide_run(&c);
    });
}

static int one(const weight &w, const operands &o, wide_plan plan, double roof, cudaStream_t st)
{
    wide_call c = {w.f, w.dev, o.dx, o.work, o.dy, 0, w.K, w.N, w.N, w.K, o.M, st, 1, plan};
    double err[2];
    int bad = check(w, o, c, err);
    c.y_bf16 = 1;
    double us = time_of(w, c, st);
    c.x = NULL;
    double alone = time_of(w, c, st), flop = 2.0 * o.M * w.N * w.K;
    wide_plan chosen = wide_choose(w.f, w.N, w.K, o.M);
    printf("%-5s N %6d K %6d M %4d  tokens %3d groups %d split %d%s %8.2f us  alone %8.2f us %5.2f "
           "TB/s %3.0f %% %6.1f TFLOP/s  err %.1e %.1e%s\n",
           names[w.f], w.N, w.K, o.M, plan.tokens, plan.groups, plan.split,
           memcmp(&chosen, &plan, sizeof plan) ? " " : "*", us, alone, w.bytes / us / 1e6,
           100 * w.bytes / us / 1e6 / roof, flop / us / 1e6, err[0], err[1], bad ? " WRONG" : "");
    return bad;
}

int main(int argc, char **argv)
{
    static const int shapes[][2] = {
        {28672, 4096}, {6144, 4096}, {4096, 4096}, {4096, 14336}, {2064, 768}};
    static const int counts[] = {9, 16, 32, 64, 100, 128, 512, 2048};
    const char *which = argc > 1 ? argv[1] : "";
    int bad = 0, n = 0;
    cudaStream_t st;
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, 0) != cudaSuccess) {
        printf("wide: no CUDA device, nothing measured\n");
        return 0;
    }
    CK(cudaStreamCreate(&st));
    double roof = measure_roof(st);
    printf("%s, %d SMs, read roof %.2f TB/s; * = the plan of the table\n", p.name,
           p.multiProcessorCount, roof);
    for (auto &s : shapes)
        for (int f = 0; f < SMALL_FORMATS; f++) {
            if (!strcmp(which, "tiny") && s[1] != 768) continue;
            weight w = make_weight((small_format)f, s[0], s[1]);
            for (int M : counts) {
                if (!strcmp(which, "small") ? M > 128 : !strcmp(which, "big") && M < 128) continue;
                operands o = make_operands(w, M);
                for (int tokens = 16; tokens <= 128; tokens *= 2)
                    for (int groups = 2; groups <= 4; groups++)
                        for (int split = 1; split <= 4; split *= 2) {
                            wide_plan plan = {tokens, groups, split};
                            if (!wide_has((small_format)f, plan, s[1])) continue;
                            if (tokens >= 32 && M <= tokens / 2) continue;
                            if (M <= 64 && tokens < M &&
                                wide_has((small_format)f, {2 * tokens, groups, split}, s[1]))
                                continue;
                            if (M > 64 && (tokens < 64 || split > 1)) continue;
                            bad += one(w, o, plan, roof, st);
                            n++;
                        }
                cudaFree(o.dx), cudaFree(o.dy), cudaFree(o.work);
            }
            cudaFree(w.dev);
        }
    printf("wide: %d products, %d wrong\n", n, bad);
    return bad != 0;
}
