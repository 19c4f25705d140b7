/* Few rows times a weight on the GPU. "check": every format, odd shapes, 1 to 8 tokens, f32 and
 * bf16 results with and without factors and bias, each held against a double-precision product of
 * the same codes (random data, poisoned output, room around it); exit 1 when a result is wrong.
 * "time": a CUDA graph of launches over enough copies of the weight that none is found in the L2,
 * median of replays; shapes of 8B models unless some are named. TB/s count weights and scales; the
 * roof is a read sweep of the same run. Name formats and shapes: everything takes minutes. */
#include "weight.cuh"

static small_call call_of(const weight &w, const operands &o, cudaStream_t st)
{
    small_call c = {};
    c.format = w.f, c.w = w.dev, c.x = o.dx, c.y = o.dy, c.col_scale = w.col_scale;
    c.ldx = w.K, c.ldy = o.ldy, c.N = w.N, c.K = w.K, c.M = o.M, c.stream = st;
    c.row_scale = o.drow, c.bias = w.bias;
    return c;
}

static int check(const weight &w, int M, cudaStream_t st)
{
    operands o = make_operands(w, M, true);
    small_call c = call_of(w, o, st);
    int bad = 0;
    double err[2] = {};
    const char *why = NULL;
    for (c.y_bf16 = 0; c.y_bf16 < 2 && !why; c.y_bf16++) {
        poison(o);
        why = small_run(&c);
        CK(cudaStreamSynchronize(st));
        err[c.y_bf16] = why ? NAN : error_of(w, o, c.y_bf16);
    }
    bad = !(err[0] < 1e-5) || !(err[1] < 4e-3);
    if (bad || why)
        printf("%-12s N %6d K %6d M %d  err %.1e %.1e%s %s\n", names[w.f], w.N, w.K, M, err[0],
               err[1], bad ? " WRONG" : "", why ? why : small_entry(w.f, w.N, w.K, M));
    drop_operands(o);
    return bad;
}

static double time_product(const weight &w, small_call c, int pdl, cudaStream_t st)
{
    c.pdl = pdl;
    return time_graph(st, 24, [&](int i) {
        c.w = w.dev + (size_t)(i % w.copies) * w.bytes;
        small_run(&c);
    });
}

/* Every division that fits. */
static void time_plans(const weight &w, int M, double roof, cudaStream_t st)
{
    operands o = make_operands(w, M, false);
    small_call c = call_of(w, o, st);
    c.row_scale = c.bias = NULL, c.y_bf16 = 1;
    for (c.split = 1; c.split <= 8; c.split *= 2)
        for (c.stages = 2; c.stages <= 8; c.stages++) {
            if (small_run(&c)) continue;
            const double us = time_product(w, c, 1, st);
            printf("%-12s N %6d K %6d M %d split %d stages %d  pdl %8.2f us %3.0f %%\n", names[w.f],
                   w.N, w.K, M, c.split, c.stages, us, 100 * w.bytes / us / 1e6 / roof);
        }
    drop_operands(o);
}

static void time_one(const weight &w, int M, double roof, cudaStream_t st)
{
    operands o = make_operands(w, M, false);
    small_call c = call_of(w, o, st);
    c.row_scale = c.bias = NULL, c.y_bf16 = 1;
    const char *why = small_run(&c);
    if (why)
        printf("%-12s N %6d K %6d M %d  refused: %s\n", names[w.f], w.N, w.K, M, why);
    else {
        double us = time_product(w, c, 0, st), pdl = time_product(w, c, 1, st);
        printf("%-12s N %6d K %6d M %d %8.2f us %3.0f %%  pdl %8.2f us %5.2f TB/s %3.0f %%  (%s)\n",
               names[w.f], w.N, w.K, M, us, 100 * w.bytes / us / 1e6 / roof, pdl,
               w.bytes / pdl / 1e6, 100 * w.bytes / pdl / 1e6 / roof,
               small_entry(w.f, w.N, w.K, M));
    }
    drop_operands(o);
}

int main(int argc, char **argv)
{
    wanted a = read_arguments(argc, argv);
    int bad = 0, n = 0;
    cudaStream_t st;
    cudaDeviceProp p;
    if (!open_device("small", &p, &st)) return 0;
    if (a.check)
        for (auto &s : std::vector<std::pair<int, int>>{
                 {1552, 768}, {2064, 4096}, {272, 8192}, {272, 14336}, {272, 28672}, {528, 896}})
            for (small_format f : a.formats) {
                weight w = make_weight(f, s.first, s.second, 0);
                for (int M : {1, 3, 8})
                    bad += check(w, M, st), n++;
                drop_weight(w);
            }
    if (a.check) printf("small: %d products, %d wrong\n", n, bad);
    if (!a.time) return bad != 0;
    double roof = measure_roof(st);
    printf("%s, %d SMs, read roof %.2f TB/s\n", p.name, p.multiProcessorCount, roof);
    if (a.shapes.empty()) a.shapes = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}};
    if (a.tokens.empty()) a.tokens = {1, 8};
    for (auto &s : a.shapes)
        for (small_format f : a.formats) {
            weight w = make_weight(f, s.first, s.second, 450e6);
            for (int M : a.tokens)
                time_one(w, M, roof, st);
            for (int M : a.tokens)
                if (a.plans) time_plans(w, M, roof, st);
            drop_weight(w);
        }
    return bad != 0;
}
