/* Decode attention on the GPU: BF16 and E4M3 caches, batches and contexts from short to long. Some
 * heads of each result are held against a double-precision softmax over the same codes (random
 * data, pages in random order, poisoned output); then graph replays over enough caches that none is
 * found in the L2. Exit 1 when a result is wrong. */
#include "kern/cuda/decode.h"
#include "bench.cuh"
#include <cmath>
#include <cstring>

static const char *const names[DECODE_KVS] = {"bf16", "e4m3"};

__global__ void fill(uint32_t *w, size_t n, int kv)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u ^ (uint32_t)(i >> 32);
        h ^= h >> 16, h *= 0x7feb352d, h ^= h >> 15, h *= 0x846ca68b, h ^= h >> 16;
        /* magnitudes below 1, no NaN */
        w[i] = kv == DECODE_E4M3 ? h & 0xb7b7b7b7u : (h & 0x80ff80ffu) | 0x3e003f00u;
    }
}

struct setup {
    decode_kv kv;
    int B, len, Hk, G, D, copies, max_pages;
    size_t head, page, pages_each;
    uint8_t *cache;
    std::vector<int> pages, lens;
    std::vector<__nv_bfloat16> q; /* as the kernel gets it */
    int *d_pages, *d_lens;
    __nv_bfloat16 *d_q;
    float *d_out;
    void *work;
};

static bool make(setup &s)
{
    s.head = decode_head_bytes(s.kv, s.D);
    s.page = s.head * s.Hk;
    s.max_pages = (s.len + DECODE_PAGE_TOKENS - 1) / DECODE_PAGE_TOKENS;
    s.pages_each = (size_t)s.B * s.max_pages;
    s.copies = std::max(2, (int)(450e6 / ((double)s.pages_each * s.page)) + 1);
    size_t total = s.pages_each * s.copies * s.page;
    if (total > (size_t)60e9) return false;
    CK(cudaMalloc(&s.cache, total));
    fill<<<2048, 256>>>((uint32_t *)s.cache, total / 4, s.kv);
    for (int c = 0; c < s.copies; c++) {
        std::vector<int> order(s.pages_each);
        for (size_t i = 0; i < s.pages_each; i++)
            order[i] = (int)(i + c * s.pages_each);
        for (size_t i = s.pages_each; i > 1; i--)
            std::swap(order[i - 1], order[rnd() % i]);
        s.pages.insert(s.pages.end(), order.begin(), order.end());
    }
    for (int b = 0; b < s.B; b++)
        s.lens.push_back(std::max(1, s.len - b % 5));
    float scale = decode_q_scale(s.kv, 1 / sqrtf((float)s.D), 1);
    for (int i = 0; i < s.B * s.Hk * s.G * s.D; i++)
        s.q.push_back(__float2bfloat16(4 * uniform() * scale));
    size_t work = decode_work_bytes(s.B, s.Hk, s.G, s.D);
    CK(cudaMalloc(&s.d_pages, s.pages.size() * 4));
    CK(cudaMalloc(&s.d_lens, s.lens.size() * 4));
    CK(cudaMalloc(&s.d_q, s.q.size() * 2));
    CK(cudaMalloc(&s.d_out, s.q.size() * 4));
    CK(cudaMalloc(&s.work, work));
    CK(cudaMemset(s.work, 0, work));
    CK(cudaMemset(s.d_out, 0xff, s.q.size() * 4)); /* NaN */
    CK(cudaMemcpy(s.d_pages, s.pages.data(), s.pages.size() * 4, cudaMemcpyHostToDevice));
    CK(cudaMemcpy(s.d_lens, s.lens.data(), s.lens.size() * 4, cudaMemcpyHostToDevice));
    CK(cudaMemcpy(s.d_q, s.q.data(), s.q.size() * 2, cudaMemcpyHostToDevice));
    return true;
}

static void drop(setup &s)
{
    void *all[] = {s.cache, s.d_pages, s.d_lens, s.d_q, s.d_out, s.work};
    for (void *p : all)
        cudaFree(p);
}

static float element(const setup &s, const std::vector<uint8_t> &page, int which, int t, int d)
{
    size_t i = decode_place(s.kv, s.D, which, t, d);
    __nv_bfloat16 b;
    if (s.kv == DECODE_E4M3) return e4m3_value(page[i]);
    memcpy(&b, &page[2 * i], 2);
    return __bfloat162float(b);
}

/* Adds squares of difference and of the truth for the G queries of one head. */
static void check_head(const setup &s, const std::vector<float> &out, int b, int h, double *d2,
                       double *s2)
{
    std::vector<uint8_t> page(s.head);
    const float up = decode_q_scale(s.kv, 1, 1) / 1.4426950408889634f; /* what the codes lack */
    std::vector<std::vector<float>> K, V;
    for (int t = 0; t < s.lens[b]; t++) {
        if (t % DECODE_PAGE_TOKENS == 0)
            CK(cudaMemcpy(page.data(),
                          s.cache +
                              (size_t)s.pages[(size_t)b * s.max_pages + t / DECODE_PAGE_TOKENS] *
                                  s.page +
                              (size_t)h * s.head,
                          s.head, cudaMemcpyDeviceToHost));
        std::vector<float> k(s.D), v(s.D);
        for (int d = 0; d < s.D; d++) {
            k[d] = element(s, page, 0, t % DECODE_PAGE_TOKENS, d);
            v[d] = element(s, page, 1, t % DECODE_PAGE_TOKENS, d);
        }
        K.push_back(k), V.push_back(v);
    }
    for (int g = 0; g < s.G; g++) {
        size_t at = (((size_t)b * s.Hk + h) * s.G + g) * s.D;
        std::vector<double> sc(K.size()), o(s.D, 0.0);
        double m = -1e300, sum = 0;
        for (size_t t = 0; t < K.size(); t++) {
            for (int d = 0; d < s.D; d++)
                sc[t] += (double)__bfloat162float(s.q[at + d]) / up * K[t][d];
            m = std::max(m, sc[t]);
        }
        for (size_t t = 0; t < K.size(); t++) {
            double p = exp2(sc[t] - m);
            sum += p;
            for (int d = 0; d < s.D; d++)
                o[d] += p * V[t][d];
        }
        for (int d = 0; d < s.D; d++) {
            double want = o[d] / sum, got = out[at + d];
            *d2 += (want - got) * (want - got);
            *s2 += want * want;
        }
    }
}

static int one(decode_kv kv, int B, int len, int Hk, int G, int D, double roof, cudaStream_t st)
{
    setup s = {kv, B, len, Hk, G, D};
    if (!make(s)) return 0;
    decode_call c = {kv,
                     s.cache,
                     (int64_t)s.page,
                     (int64_t)s.head,
                     s.d_q,
                     s.d_out,
                     s.d_pages,
                     s.d_lens,
                     s.work,
                     B,
                     Hk,
                     G,
                     D,
                     s.max_pages,
                     len,
                     1,
                     st,
                     0};
    const char *why = decode_run(&c);
    if (why) {
        printf("%s B %d len %d: %s\n", names[kv], B, len, why);
        return 1;
    }
    std::vector<float> out(s.q.size());
    CK(cudaStreamSynchronize(st));
    CK(cudaMemcpy(out.data(), s.d_out, out.size() * 4, cudaMemcpyDeviceToHost));
    double d2 = 0, s2 = 0, us[2];
    check_head(s, out, 0, 0, &d2, &s2);
    check_head(s, out, B - 1, Hk - 1, &d2, &s2);
    check_head(s, out, B / 2, Hk / 2, &d2, &s2);
    for (c.pdl = 0; c.pdl < 2; c.pdl++)
        us[c.pdl] = time_graph(st, 16, [&](int i) {
            c.pages = s.d_pages + (size_t)(i % s.copies) * s.pages_each;
            decode_run(&c);
        });
    double bytes = 2.0 * B * len * Hk * D * (kv == DECODE_BF16 ? 2 : 1), err = sqrt(d2 / s2);
    int bad = !(err < 4e-3); /* probabilities are rounded to bf16 */
    printf("%s B %3d len %6d heads %2dx%d D %3d %8.2f us %5.2f TB/s %3.0f %%  pdl %8.2f us  "
           "err %.1e%s\n",
           names[kv], B, len, Hk, G, D, us[0], bytes / us[0] / 1e6,
           100 * bytes / us[0] / 1e6 / roof, us[1], err, bad ? " WRONG" : "");
    drop(s);
    return bad;
}

int main(void)
{
    static const int cases[][5] = {
        {1, 1, 8, 4, 128},     {1, 128, 8, 4, 128},   {1, 2048, 8, 4, 128},   {1, 8192, 8, 4, 128},
        {1, 4096, 8, 4, 128},  {1, 32768, 8, 4, 128}, {2, 2048, 8, 4, 128},   {2, 8192, 8, 4, 128},
        {4, 2048, 8, 4, 128},  {4, 8192, 8, 4, 128},  {8, 2048, 8, 4, 128},   {8, 8192, 8, 4, 128},
        {16, 2048, 8, 4, 128}, {64, 2048, 8, 4, 128}, {16, 32768, 8, 4, 128}, {8, 8192, 8, 8, 128},
        {3, 517, 4, 7, 64},    {16, 2048, 8, 4, 64},  {1, 20000, 1, 1, 64}};
    int bad = 0, n = 0;
    cudaStream_t st;
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, 0) != cudaSuccess) {
        printf("decode: no CUDA device, nothing measured\n");
        return 0;
    }
    CK(cudaStreamCreate(&st));
    double roof = measure_roof(st);
    printf("%s, read roof %.2f TB/s\n", p.name, roof);
    for (auto &c : cases)
        for (int kv = 0; kv < DECODE_KVS; kv++, n++)
            bad += one((decode_kv)kv, c[0], c[1], c[2], c[3], c[4], roof, st);
    printf("decode: %d cases, %d wrong\n", n, bad);
    return bad != 0;
}
