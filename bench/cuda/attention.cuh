/* A step of attention on random caches of GPU_KV_MMA order for the benches: sequences of equal
 * lengths (or a little shorter), pages in random order, several caches so that none is found in the
 * L2, and results held against a double-precision softmax over the same codes. */
#ifndef BENCH_CUDA_ATTENTION_CUH
#define BENCH_CUDA_ATTENTION_CUH
#include "kern/cuda/attn.cuh"
#include "kern/cuda/plain_attention.h"
#include "bench.cuh"
#include <cmath>
#include <cstring>

struct attention_case {
    int type, seqs, rows, len, Hk, G, D, window; /* kern_kv_type; new rows a sequence */
    int shared;                                  /* first pages that all sequences have in common */
};

/* Heads of pages of so many words, of which the last have scales. */
static __global__ void fill(uint32_t *w, size_t n, int type, uint32_t head, uint32_t codes)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u ^ (uint32_t)(i >> 32);
        h ^= h >> 16, h *= 0x7feb352d, h ^= h >> 15, h *= 0x846ca68b, h ^= h >> 16;
        /* magnitudes below 1, no NaN */
        if (i % head >=
            codes) /* scale and minimum of int8; powers of two from 1/32 to 1/4 of fp4 */
            w[i] = type == KV_FP4 ? 0x7a7a7a7au + (h & 0x03030303u)
                   : i % 2        ? 0xbf000000u + (h & 0x003fffffu)
                                  : 0x3b800000u + (h & 0x003fffffu);
        else
            w[i] = type == KV_INT8 || type == KV_FP4 ? h
                   : type == KV_FP8_E4M3             ? h & 0xb7b7b7b7u
                   : type == KV_FP8_E5M2             ? h & 0xbbbbbbbbu
                                                     : (h & 0x80ff80ffu) | 0x3e003f00u;
    }
}

struct attention_bench {
    attention_case c;
    gpu_attention a;
    int copies, max_pages, bits, scale; /* of an element; bytes of scales of a token and plane */
    size_t head, pages_each;
    std::vector<int> pages, lens;
    std::vector<__nv_bfloat16> q;
    std::vector<void *> made;
    template <class T> T *up(const std::vector<T> &v)
    {
        T *p;
        CK(cudaMalloc(&p, v.size() * sizeof(T)));
        CK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
        made.push_back(p);
        return p;
    }
    void *empty(size_t n, int with)
    {
        void *p;
        CK(cudaMalloc(&p, n));
        CK(cudaMemset(p, with, n));
        made.push_back(p);
        return p;
    }
    explicit attention_bench(const attention_case &c_, bool rotate);
    ~attention_bench()
    {
        for (void *p : made)
            cudaFree(p);
    }
    /* Page tables of copy i. */
    void use(int i) { a.seqs.pages = d_pages + (size_t)(i % copies) * pages_each; }
    double error(const std::vector<int> &rows_to_look_at);
    double value(const std::vector<uint8_t> &page, int which, int t, int d);
    const int *d_pages;
};

/* rotate: caches enough to leave the L2. */
inline attention_bench::attention_bench(const attention_case &c_, bool rotate) : c(c_)
{
    const int H = c.Hk * c.G, T = c.seqs * c.rows;
    bits = c.type == KV_BF16 ? 16 : c.type == KV_FP4 ? 4 : 8;
    scale = c.type == KV_INT8 ? 8 : c.type == KV_FP4 ? c.D / 16 : 0;
    head = kv_place_head(bits, scale, c.D);
    max_pages = (c.len + KV_PLACE_TOKENS - 1) / KV_PLACE_TOKENS;
    pages_each = (size_t)c.seqs * max_pages;
    const size_t page = head * c.Hk;
    copies = rotate ? std::max(2, (int)(450e6 / ((double)pages_each * page)) + 1) : 1;
    const size_t total = pages_each * copies * page;
    uint8_t *cache = (uint8_t *)empty(total, 0);
    fill<<<2048, 256>>>((uint32_t *)cache, total / 4, c.type, (uint32_t)head / 4,
                        (uint32_t)kv_place_head(bits, 0, c.D) / 4);
    for (int k = 0; k < copies; k++) {
        std::vector<int> order(pages_each);
        for (size_t i = 0; i < pages_each; i++)
            order[i] = (int)(i + k * pages_each);
        for (size_t i = pages_each; i > 1; i--)
            std::swap(order[i - 1], order[rnd() % i]);
        for (int s = 1; s < c.seqs; s++)
            std::copy(order.begin(), order.begin() + c.shared, order.begin() + s * max_pages);
        pages.insert(pages.end(), order.begin(), order.end());
    }
    std::vector<int> row0, n_rows, row_seq;
    for (int s = 0; s < c.seqs; s++) {
        lens.push_back(std::max(c.rows, c.len - s % 5));
        row0.push_back(s * c.rows);
        n_rows.push_back(c.rows);
        row_seq.insert(row_seq.end(), c.rows, s);
    }
    for (int64_t i = 0; i < (int64_t)T * H * c.D; i++)
        q.push_back(__float2bfloat16(4 * uniform()));
    a = {};
    a.kv.type = c.type, a.kv.order = GPU_KV_MMA, a.kv.Hk = c.Hk, a.kv.D = c.D;
    a.kv.page_tokens = KV_PLACE_TOKENS, a.kv.base = cache, a.kv.page_stride = page;
    a.q = {up(q), GPU_BF16};
    a.out = {empty(q.size() * 4, 0xff), GPU_F32}; /* NaN */
    a.ldq = a.ldo = (int64_t)H * c.D;
    a.H = H, a.window = c.window, a.scale = 1 / sqrtf((float)c.D);
    a.seqs.row0 = up(row0), a.seqs.n_rows = up(n_rows), a.seqs.kv_len = up(lens);
    a.seqs.row_seq = up(row_seq), d_pages = up(pages);
    a.seqs.n = c.seqs, a.seqs.max_pages = max_pages, a.seqs.T = T;
    a.seqs.max_rows = c.rows;
    for (a.seqs.max_len = 256; a.seqs.max_len < c.len;) /* as kern_len_bucket */
        a.seqs.max_len *= 2;
    if (c.shared) {
        std::vector<gpu_group> groups(c.seqs / 2);
        for (int s = 0; s < c.seqs; s++) {
            gpu_group &g = groups[s / GPU_GROUP_SEQS];
            g.pages = c.shared, g.seq[g.n++] = s;
        }
        a.seqs.n_groups = (int)groups.size();
        a.seqs.groups = up(groups);
        a.seqs.shared = up(std::vector<int>(c.seqs, c.shared));
    }
    a.work = empty(cuda_attention_work(T, H, c.D), 0);
    use(0);
}

/* Lane d of token t in the head of a page. */
inline double attention_bench::value(const std::vector<uint8_t> &page, int which, int t, int d)
{
    const int token = t % KV_PLACE_TOKENS;
    const uint8_t *own = scale ? &page[kv_place_scale(bits, c.D, which, token, d / 16)] : NULL;
    if (c.type == KV_FP4) {
        static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        const size_t at = kv_fp4_place(c.D, which, token, d);
        const int code = page[at / 2] >> (4 * (at % 2)) & 15;
        return ldexp(code & 8 ? -values[code & 7] : values[code], *own - 127);
    }
    const size_t i = kv_place(bits / 8, c.D, which, token, d);
    if (c.type == KV_INT8) {
        float pair[2];
        memcpy(pair, own, sizeof pair);
        return (double)page[i] * pair[0] + pair[1];
    }
    if (c.type == KV_FP8_E4M3) return e4m3_value(page[i]);
    if (c.type == KV_FP8_E5M2) return __half2float(__ushort_as_half((uint16_t)(page[i] << 8)));
    __nv_bfloat16 b;
    memcpy(&b, &page[2 * i], 2);
    return __bfloat162float(b);
}

/* Relative error over all heads of these rows, which have been computed with copy 0. */
inline double attention_bench::error(const std::vector<int> &rows_to_look_at)
{
    double d2 = 0, s2 = 0;
    std::vector<float> out((size_t)a.ldo);
    std::vector<uint8_t> page(head);
    for (int row : rows_to_look_at) {
        const int s = row / c.rows, position = lens[s] - c.rows + row % c.rows;
        const int from = c.window ? std::max(0, position - c.window + 1) : 0;
        CK(cudaMemcpy(out.data(), (float *)a.out.p + row * a.ldo, out.size() * 4,
                      cudaMemcpyDeviceToHost));
        /* Of long sequences the first and the last head. */
        for (int h = 0; h<c.Hk; h += position> 9000 ? std::max(1, c.Hk - 1) : 1) {
            std::vector<double> kv(2 * c.D), top(c.G, -1e300), sum(c.G, 0.0), o(c.G * c.D, 0.0);
            for (int t = from; t <= position; t++) {
                if (t == from || t % KV_PLACE_TOKENS == 0)
                    CK(cudaMemcpy(page.data(),
                                  a.kv.base +
                                      (size_t)pages[(size_t)s * max_pages + t / KV_PLACE_TOKENS] *
                                          a.kv.page_stride +
                                      h * head,
                                  head, cudaMemcpyDeviceToHost));
                auto at = [&](int which, int d) { return value(page, which, t, d); };
                for (int d = 0; d < c.D; d++)
                    kv[d] = at(0, d), kv[c.D + d] = at(1, d);
                for (int g = 0; g < c.G; g++) {
                    const size_t q0 = (size_t)row * a.ldq + (size_t)(h * c.G + g) * c.D;
                    double x = 0;
                    for (int d = 0; d < c.D; d++)
                        x += (double)__bfloat162float(q[q0 + d]) * kv[d];
                    x *= a.scale;
                    const double m = std::max(top[g], x), f = exp(top[g] - m), p = exp(x - m);
                    top[g] = m, sum[g] = sum[g] * f + p;
                    for (int d = 0; d < c.D; d++)
                        o[g * c.D + d] = o[g * c.D + d] * f + p * kv[c.D + d];
                }
            }
            for (int i = 0; i < c.G * c.D; i++) {
                const double want = o[i] / sum[i / c.D];
                const double got = out[(size_t)h * c.G * c.D + i];
                d2 += (want - got) * (want - got);
                s2 += want * want;
            }
        }
    }
    return sqrt(d2 / s2);
}
#endif
