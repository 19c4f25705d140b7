/* Packed weights as rows of bf16 (operator unpack), and many tokens times such rows by cuBLASLt
 * against the same product by `wide`. "check": every format, odd shapes, each number as it is
 * rounded; exit 1 when a number is wrong. "time": a CUDA graph of launches over enough copies of
 * the weight that none is found in the L2, median of replays; pieces of a weight are unpacked into
 * the same 64 MiB, one after the other, and each is multiplied before the next. GB/s count what is
 * read and written. Name formats, shapes and numbers of tokens. */
#include "kern/cuda/api.h"
#include "weight.cuh"

#define PIECE_BYTES ((size_t)64 << 20)

static uint16_t bits_of(float v)
{
    const __nv_bfloat16 h = __float2bfloat16(v);
    uint16_t b;
    memcpy(&b, &h, 2);
    return b;
}

static int check(const weight &w, cudaStream_t st)
{
    const size_t n = (size_t)w.N * w.K, guard = 256;
    uint16_t *dev;
    CK(cudaMalloc(&dev, (n + 2 * guard) * 2));
    CK(cudaMemset(dev, 0xff, (n + 2 * guard) * 2));
    const gpu_unpack a = {w.f, w.dev, w.col_scale, w.N, w.K, dev + guard};
    const char *why = cuda_unpack(&a, st);
    CK(cudaStreamSynchronize(st));
    std::vector<uint16_t> got(n + 2 * guard);
    CK(cudaMemcpy(got.data(), dev, got.size() * 2, cudaMemcpyDeviceToHost));
    cudaFree(dev);
    int64_t wrong = why ? 1 : 0;
    for (size_t i = 0; i < got.size(); i++) {
        const bool inside = i >= guard && i < n + guard;
        const size_t row = inside ? (i - guard) / w.K % w.rows : 0, k = (i - guard) % w.K;
        const float v = inside ? w.value[row * w.K + k] * w.by[row] : 0;
        /* The factors may have been multiplied in another order. */
        wrong += inside ? got[i] != bits_of(v) && got[i] != bits_of(v * (1 + 0x1p-22f)) &&
                              got[i] != bits_of(v * (1 - 0x1p-22f))
                        : got[i] != 0xffff;
    }
    if (wrong)
        printf("%-12s N %6d K %6d  WRONG: %lld numbers %s\n", names[w.f], w.N, w.K,
               (long long)wrong, why ? why : "");
    return wrong != 0;
}

/* As kern/gpu/lt.c cuts. */
static int piece_rows(int N, int K)
{
    const int most = (int)(PIECE_BYTES / 2 / K), pieces = (N + most - 1) / most;
    const int rows = ((N + pieces - 1) / pieces + 255) / 256 * 256;
    return rows < N ? rows : N;
}

static const char *multiply(lt *l, const weight &w, const operands &o, int copy, void *piece,
                            cudaStream_t st)
{
    const int step = piece_rows(w.N, w.K);
    for (int n = 0; n < w.N; n += step) {
        const int rows = std::min(step, w.N - n);
        const gpu_unpack u = {w.f,
                              w.dev + copy * w.bytes + small_packed_bytes(w.f, n, w.K),
                              w.col_scale + n,
                              rows,
                              w.K,
                              piece};
        lt_call c = {};
        c.kind = LT_BF16, c.y_bf16 = true, c.M = o.M, c.N = rows, c.K = w.K, c.w = piece;
        c.x = o.dx, c.y = (uint16_t *)o.dy + n, c.ldx = w.K, c.ldy = w.N, c.stream = st;
        const char *why = cuda_unpack(&u, st);
        if (!why) why = lt_run(l, &c);
        if (why) return why;
    }
    return NULL;
}

static const char *plan(lt *l, const weight &w, int M)
{
    const int step = piece_rows(w.N, w.K);
    const char *why = NULL;
    for (int rows : {step, w.N % step}) {
        lt_call c = {};
        c.kind = LT_BF16, c.y_bf16 = true, c.M = M, c.N = rows, c.K = w.K;
        c.ldx = w.K, c.ldy = w.N;
        if (rows && !why) why = lt_plan(l, &c, false);
    }
    return why;
}

static void time_unpack(const weight &w, void *piece, double roof, cudaStream_t st)
{
    const int step = piece_rows(w.N, w.K);
    const double us = time_graph(st, 12, [&](int i) {
        for (int n = 0; n < w.N; n += step) {
            const gpu_unpack a = {w.f,
                                  w.dev + (i % w.copies) * w.bytes +
                                      small_packed_bytes(w.f, n, w.K),
                                  w.col_scale + n,
                                  std::min(step, w.N - n),
                                  w.K,
                                  piece};
            cuda_unpack(&a, st);
        }
    });
    const double bytes = (double)w.bytes + 2.0 * w.N * w.K;
    printf("%-12s N %6d K %6d  unpack %8.2f us %6.2f TB/s %3.0f %% in %d pieces\n", names[w.f], w.N,
           w.K, us, bytes / us / 1e6, 100 * bytes / us / 1e6 / roof, (w.N + step - 1) / step);
}

static void time_products(lt *l, const weight &w, int M, void *piece, cudaStream_t st)
{
    operands o = make_operands(w, M, false);
    const double flops = 2.0 * M * w.N * w.K;
    void *work;
    CK(cudaMalloc(&work, wide_work_bytes(w.K, M)));
    wide_call c = {};
    c.format = w.f, c.x = o.dx, c.work = work, c.y = o.dy, c.y_bf16 = 1, c.pdl = 1;
    c.col_scale = w.col_scale, c.ldx = w.K, c.ldy = w.N, c.N = w.N, c.K = w.K, c.M = M;
    c.stream = st;
    const char *why = plan(l, w, M), *bad = NULL;
    const double wide = time_graph(st, 6, [&](int i) {
        c.w = w.dev + (i % w.copies) * w.bytes;
        if (const char *b = wide_run(&c)) bad = b;
    });
    double both = 0;
    if (!why)
        both = time_graph(st, 6, [&](int i) {
            if (const char *b = multiply(l, w, o, i % w.copies, piece, st)) why = b;
        });
    printf("%-12s N %6d K %6d M %4d  wide %8.1f us %4.0f TFLOP/s  unpack and lt %8.1f us %4.0f "
           "TFLOP/s%s%s%s%s\n",
           names[w.f], w.N, w.K, M, wide, flops / wide / 1e6, both, both ? flops / both / 1e6 : 0,
           bad ? "  wide: " : "", bad ? bad : "", why ? "  lt: " : "", why ? why : "");
    cudaFree(work);
    drop_operands(o);
}

int main(int argc, char **argv)
{
    wanted a = read_arguments(argc, argv);
    int bad = 0, n = 0;
    cudaStream_t st;
    cudaDeviceProp p;
    if (!open_device("unpack", &p, &st)) return 0;
    if (a.check)
        for (auto &s : std::vector<std::pair<int, int>>{{16, 128}, {272, 896}, {1552, 768}})
            for (small_format f : a.formats) {
                weight w = make_weight(f, s.first, s.second, 0);
                bad += check(w, st), n++;
                drop_weight(w);
            }
    if (a.check) printf("unpack: %d weights, %d wrong\n", n, bad);
    if (!a.time) return bad != 0;
    lt *l = NULL;
    void *piece;
    if (const char *why = lt_open(&l, 0)) printf("no products by cuBLASLt: %s\n", why);
    const double roof = measure_roof(st);
    printf("%s, %d SMs, read roof %.2f TB/s\n", p.name, p.multiProcessorCount, roof);
    CK(cudaMalloc(&piece, PIECE_BYTES + ((size_t)16 << 20)));
    if (a.shapes.empty()) a.shapes = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}};
    if (a.tokens.empty()) a.tokens = {1024, 2048, 4096};
    for (auto &s : a.shapes)
        for (small_format f : a.formats) {
            weight w = make_weight(f, s.first, s.second, 300e6);
            time_unpack(w, piece, roof, st);
            for (int M : a.tokens)
                if (l) time_products(l, w, M, piece, st);
            drop_weight(w);
        }
    lt_close(l);
    return bad != 0;
}
