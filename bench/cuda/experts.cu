/* Experts in packed weights on the GPU, few slots or many: a CUDA graph of launches, median of
 * replays, both kernels at every number of tokens. Slots are dealt out at random, to other experts
 * in every launch; TB/s count the weights of the experts that have slots, once. Arguments: shapes
 * NxK (E = 128, 8 a token unless NxKxExK), formats, numbers of tokens. Without: up and down of
 * Qwen3 30B-A3B and of gpt-oss 120B, int4, e4m3 blocks and mxfp4. */
#include "kern/cuda/experts.h"
#include "weight.cuh"

struct shape {
    int N, K, E, top;
};

struct dealt { /* launches after one another have different ones */
    int32_t *first, *ids;
    double active;
};

static dealt deal(int E, int top, int T)
{
    std::vector<std::vector<int>> of((size_t)E);
    std::vector<int> order((size_t)E);
    for (int e = 0; e < E; e++)
        order[e] = e;
    for (int t = 0; t < T; t++)
        for (int j = 0; j < top; j++) {
            std::swap(order[j], order[j + (int)(rnd() % (uint32_t)(E - j))]);
            of[order[j]].push_back(t);
        }
    std::vector<int32_t> first(1, 0), ids;
    dealt d = {};
    for (int e = 0; e < E; e++) {
        ids.insert(ids.end(), of[e].begin(), of[e].end());
        first.push_back((int32_t)ids.size());
        d.active += !of[e].empty();
    }
    d.first = to_device(first), d.ids = to_device(ids);
    return d;
}

static void time_one(const weight &w, const shape &s, int T, double roof, cudaStream_t st)
{
    enum { KINDS = 16 };
    dealt d[KINDS];
    double active = 0;
    const int slots = T * s.top;
    std::vector<float> ignored;
    std::vector<const void *> ws;
    std::vector<const float *> cols;
    for (int e = 0; e < s.E; e++) {
        ws.push_back(w.dev + (size_t)(e % w.copies) * w.bytes);
        cols.push_back(w.col_scale);
    }
    for (auto &one : d)
        one = deal(s.E, s.top, T), active += one.active / KINDS;
    experts_call c = {};
    c.format = w.f, c.N = w.N, c.K = c.x_k = w.K, c.E = s.E, c.slots = slots, c.ldx = w.K,
    c.ldy = w.N;
    c.w = to_device(ws), c.col_scale = to_device(cols);
    c.x = to_device(make_x((size_t)T * w.K, ignored));
    c.y_bf16 = 1, c.stream = st, c.pdl = 1;
    CK(cudaMalloc(&c.y, (size_t)slots * w.N * 2));
    CK(cudaMalloc(&c.work, wide_experts_work_bytes(w.K, s.E, slots)));
    for (int wide = 0; wide < 2; wide++) {
        c.first = d[0].first, c.ids = d[0].ids;
        const char *why = wide ? wide_experts_run(&c) : small_experts_run(&c);
        const double us = why ? 0 : time_graph(st, 32, [&](int i) {
            c.first = d[i % KINDS].first, c.ids = d[i % KINDS].ids;
            wide ? wide_experts_run(&c) : small_experts_run(&c);
        });
        const double bytes = active * (double)w.bytes;
        printf("%-10s N %5d K %5d E %d, %d of them, T %5d  %s %8.2f us %5.2f TB/s %3.0f %% %6.1f "
               "TFLOP/s %s\n",
               names[w.f], w.N, w.K, s.E, s.top, T, wide ? "wide " : "small", us, bytes / us / 1e6,
               100 * bytes / us / 1e6 / roof, 2e-6 * slots * (double)w.N * w.K / us,
               why ? why : "");
    }
    for (auto &one : d)
        cudaFree(one.first), cudaFree(one.ids);
    cudaFree((void *)c.w), cudaFree((void *)c.col_scale), cudaFree((void *)c.x);
    cudaFree(c.y), cudaFree(c.work);
}

int main(int argc, char **argv)
{
    std::vector<shape> shapes;
    std::vector<small_format> formats;
    std::vector<int> tokens;
    cudaStream_t st;
    cudaDeviceProp p;
    for (int i = 1; i < argc; i++) {
        shape s = {0, 0, 128, 8};
        for (int f = 0; f < SMALL_FORMATS; f++)
            if (!strcmp(argv[i], names[f])) formats.push_back((small_format)f);
        if (sscanf(argv[i], "%dx%dx%dx%d", &s.N, &s.K, &s.E, &s.top) >= 2)
            shapes.push_back(s);
        else if (atoi(argv[i]) > 0)
            tokens.push_back(atoi(argv[i]));
    }
    if (!open_device("experts", &p, &st)) return 0;
    if (shapes.empty())
        shapes = {
            {1536, 2048, 128, 8}, {2048, 768, 128, 8}, {5760, 2944, 128, 4}, {2880, 2944, 128, 4}};
    if (formats.empty()) formats = {SMALL_INT4, SMALL_E4M3_BLOCK, SMALL_MXFP4};
    if (tokens.empty()) tokens = {1, 4, 16, 64, 128, 256, 1024, 4096};
    const double roof = measure_roof(st);
    printf("%s, %d SMs, read roof %.2f TB/s\n", p.name, p.multiProcessorCount, roof);
    for (auto &s : shapes)
        for (small_format f : formats) {
            const double one = (double)small_packed_bytes(f, s.N, s.K);
            weight w = make_weight(f, s.N, s.K, (s.E - 0.5) * one);
            for (int T : tokens)
                time_one(w, s, T, roof, st);
            drop_weight(w);
        }
    return 0;
}
