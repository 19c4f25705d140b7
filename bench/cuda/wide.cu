/* Many rows times a packed weight on the GPU. "check": every format and every plan that there is,
 * odd shapes, 9 to 1300 tokens, f32 and bf16 results with factors and bias, each held against a
 * double-precision product of the same codes (random data with outliers, poisoned output, room
 * around it; of many tokens, a sample), x ordered by the device and by wide_place; exit 1 when a
 * result is wrong. "time": as small.cu does, the ordering of x included; "alone" is without it.
 * Plans of the table, with "plans" all of the shape. Name formats, shapes and numbers of tokens:
 * everything takes minutes. */
#include "kern/cuda/wide.h"
#include "weight.cuh"

static wide_call call_of(const weight &w, const operands &o, void *work, wide_plan plan,
                         cudaStream_t st)
{
    wide_call c = {};
    c.format = w.f, c.w = w.dev, c.x = o.dx, c.work = work, c.y = o.dy, c.col_scale = w.col_scale;
    c.row_scale = o.drow, c.bias = w.bias, c.ldx = w.K, c.ldy = o.ldy;
    c.N = w.N, c.K = w.K, c.M = o.M, c.stream = st, c.pdl = 1, c.plan = plan;
    return c;
}

/* Plans that make sense for so many tokens. */
static std::vector<wide_plan> plans_of(small_format f, int K, int M)
{
    std::vector<wide_plan> all;
    for (int tokens = 16; tokens <= 256; tokens *= 2)
        for (int groups = 1; groups <= 4; groups++)
            for (int split = 1; split <= 8; split *= 2)
                for (int share = 1; share <= 2; share++) {
                    wide_plan p = {tokens, groups, split, share};
                    if (!wide_has(f, p, K) || (tokens >= 32 && M <= tokens / 2)) continue;
                    if (M > 64 && (tokens < 64 || (split > 1 && M > 512))) continue;
                    if (M <= 64 && tokens < M && wide_has(f, {2 * tokens, groups, split, 1}, K))
                        continue;
                    all.push_back(p);
                }
    return all;
}

/* Weights are scaled and rounded. */
static bool is_rounded(small_format f, int tokens)
{
    const int group = small_group(f);
    if (f == SMALL_MXFP4 || f == SMALL_NVFP4 || !group) return false;
    return group < 128 || tokens > 64;
}

static int check(const weight &w, const operands &o, void *work, wide_plan plan, cudaStream_t st)
{
    wide_call c = call_of(w, o, work, plan, st);
    double err[2] = {NAN, NAN};
    const char *why = NULL;
    bool ordered = true;
    for (c.y_bf16 = 0; c.y_bf16 < 2 && !why; c.y_bf16++) {
        poison(o);
        CK(cudaMemset(work, 0xff, wide_work_bytes(w.K, o.M))); /* NaN */
        why = wide_run(&c);
        CK(cudaStreamSynchronize(st));
        if (!why) err[c.y_bf16] = error_of(w, o, c.y_bf16);
    }
    std::vector<__nv_bfloat16> x(wide_work_bytes(w.K, o.M) / 2);
    CK(cudaMemcpy(x.data(), work, x.size() * 2, cudaMemcpyDeviceToHost));
    const int step = o.M > 64 ? 7 : 1;
    for (int m = 0; m < o.M; m += step)
        for (int k = 0; k < w.K; k++)
            ordered &= __bfloat162float(x[wide_place(w.f, plan.tokens, w.K, m, k)]) ==
                       o.x[(size_t)m * w.K + k];
    int bad = !ordered || !(err[0] < (is_rounded(w.f, plan.tokens) ? 4e-3 : 1e-5)) ||
              !(err[1] < (is_rounded(w.f, plan.tokens) ? 6e-3 : 4e-3));
    if (bad)
        printf("%-12s N %6d K %6d M %4d  tokens %3d groups %d split %d share %d  err %.1e %.1e %s "
               "WRONG %s\n",
               names[w.f], w.N, w.K, o.M, plan.tokens, plan.groups, plan.split, plan.share, err[0],
               err[1], ordered ? "" : "order", why ? why : "");
    return bad;
}

static int check_all(const wanted &a, cudaStream_t st)
{
    int bad = 0, n = 0;
    for (auto &s : std::vector<std::pair<int, int>>{{1040, 768}, {2064, 896}, {8208, 512}})
        for (small_format f : a.formats) {
            weight w = make_weight(f, s.first, s.second, 0);
            for (int M :
                 s.first > 4096 ? std::vector<int>{1300} : std::vector<int>{9, 33, 64, 203}) {
                operands o = make_operands(w, M, true);
                void *work;
                CK(cudaMalloc(&work, wide_work_bytes(w.K, M)));
                for (wide_plan &p : plans_of(f, s.second, M))
                    bad += check(w, o, work, p, st), n++;
                wide_plan none = {48, 1, 1, 1};
                wide_call c = call_of(w, o, work, none, st);
                if (!wide_run(&c)) printf("a plan that is not there was run\n"), bad++;
                cudaFree(work);
                drop_operands(o);
            }
            drop_weight(w);
        }
    printf("wide: %d products, %d wrong\n", n, bad);
    return bad;
}

static double time_of(const weight &w, wide_call c, cudaStream_t st)
{
    return time_graph(st, w.N * (double)w.K * c.M > 1e11 ? 8 : 24, [&](int i) {
        c.w = w.dev + (size_t)(i % w.copies) * w.bytes;
        wide_run(&c);
    });
}

static void time_one(const weight &w, const operands &o, void *work, wide_plan plan, double roof,
                     cudaStream_t st)
{
    wide_call c = call_of(w, o, work, plan, st);
    c.row_scale = c.bias = NULL, c.y_bf16 = 1;
    const char *why = wide_run(&c);
    CK(cudaStreamSynchronize(st));
    if (why) {
        printf("%-12s refused: %s\n", names[w.f], why);
        return;
    }
    double us = time_of(w, c, st);
    c.x = NULL;
    double alone = time_of(w, c, st), flop = 2.0 * o.M * w.N * w.K;
    wide_plan chosen = wide_choose(w.f, w.N, w.K, o.M);
    printf(
        "%-12s N %6d K %6d M %4d  tokens %3d groups %d split %d share %d%s %8.2f us  alone %8.2f "
        "us %5.2f TB/s %3.0f %% %6.1f TFLOP/s\n",
        names[w.f], w.N, w.K, o.M, plan.tokens, plan.groups, plan.split, plan.share,
        memcmp(&chosen, &plan, sizeof plan) ? " " : "*", us, alone, w.bytes / us / 1e6,
        100 * w.bytes / us / 1e6 / roof, flop / us / 1e6);
}

int main(int argc, char **argv)
{
    wanted a = read_arguments(argc, argv);
    cudaStream_t st;
    cudaDeviceProp p;
    if (!open_device("wide", &p, &st)) return 0;
    int bad = a.check ? check_all(a, st) : 0;
    if (!a.time) return bad != 0;
    double roof = measure_roof(st);
    printf("%s, %d SMs, read roof %.2f TB/s; * = the plan of the table\n", p.name,
           p.multiProcessorCount, roof);
    if (a.shapes.empty()) a.shapes = {{28672, 4096}, {6144, 4096}, {4096, 4096}, {4096, 14336}};
    if (a.tokens.empty()) a.tokens = {16, 64, 128, 2048};
    for (auto &s : a.shapes)
        for (small_format f : a.formats) {
            weight w = make_weight(f, s.first, s.second, 450e6);
            for (int M : a.tokens) {
                operands o = make_operands(w, M, false);
                void *work;
                CK(cudaMalloc(&work, wide_work_bytes(w.K, M)));
                for (wide_plan &plan :
                     a.plans ? plans_of(f, s.second, M)
                             : std::vector<wide_plan>{wide_choose(f, s.first, s.second, M)})
                    time_one(w, o, work, plan, roof, st);
                cudaFree(work);
                drop_operands(o);
            }
            drop_weight(w);
        }
    return bad != 0;
}
