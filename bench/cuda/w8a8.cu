/* Products of many rows by cuBLASLt (lt.h) on a device: bf16, and W8A8 in e4m3 and int8.
 *   check   every kind against float64: random codes, poisoned output
 *   time    shapes of an 8B model, M = 64, 128, 1024, 2048: CUDA graphs of launches over enough
 * copies of the weight that none is found in the L2, median of replays; with the library's first
 *           choice and with the fastest of its candidates
 * Without an argument both. Exit 1 when a result is wrong. */
#include "kern/cuda/lt.h"
#include "dense.cuh"

static const char *const kinds[LT_KINDS] = {"bf16", "fp8", "fp8 rows", "fp8 blocks", "int8"};

static code code_of(int kind)
{
    return kind == LT_BF16 ? CODE_BF16 : kind == LT_INT8 ? CODE_INT8 : CODE_E4M3;
}
static int64_t up4(int64_t n)
{
    return (n + 3) / 4 * 4;
}

/* ---- check --------------------------------------------------------------------------------------
 */

/* Scales of x as the kind wants them: [1], [M], or [G][Mp] of xs [M][G]. */
static std::vector<float> place_x_scale(int kind, const std::vector<float> &xs, int M, int G)
{
    if (kind != LT_FP8_BLOCK) return xs;
    std::vector<float> out((size_t)(up4(M) * G), 1.0f);
    for (int m = 0; m < M; m++)
        for (int g = 0; g < G; g++)
            out[(size_t)(g * up4(M) + m)] = xs[(size_t)m * G + g];
    return out;
}

/* form: 1 = y in bf16, 2 = bias, which the product adds itself where it can with 4. Sums of fp8 are
 * kept to fewer digits by the tensor cores. */
static int check_one(lt *l, int kind, int N, int K, int M, int form)
{
    const int G = (K + 127) / 128;
    const bool bf16 = form & 1, blocks = kind == LT_FP8_BLOCK,
               rows = kind == LT_FP8_ROWS || kind == LT_INT8;
    const int64_t row = (int64_t)K * (int64_t)code_bytes(code_of(kind)) / 16, Mp = up4(M);
    std::vector<float> w, x;
    uint8_t *few = to_device(make_codes(code_of(kind), (size_t)DISTINCT * K, w)), *dw;
    CK(cudaMalloc(&dw, (size_t)(N * row) * 16));
    repeat_rows<<<1024, 256>>>((uint4 *)few, row, DISTINCT, N, (uint4 *)dw);
    std::vector<uint8_t> xc = make_codes(code_of(kind), (size_t)M * K, x);
    xc.resize((size_t)(Mp * K) * code_bytes(code_of(kind)), 0);
    uint8_t *dx = to_device(xc);
    const std::vector<float> xs = make_floats((size_t)M * (blocks ? G : 1), 0.5f, 3),
                             ws = make_floats((size_t)G, 0.01f, 0.02f),
                             scale = make_floats(DISTINCT, 0.01f, 0.02f);
    std::vector<float> bias = make_floats(DISTINCT, -2, 2), all, wide((size_t)N);
    std::vector<uint16_t> narrow((size_t)N);
    for (float &b : bias)
        b = __bfloat162float(__float2bfloat16(b));
    for (int n = 0; n < N; n++) {
        uint32_t u;
        wide[n] = bias[n % DISTINCT];
        memcpy(&u, &wide[n], 4);
        narrow[n] = (uint16_t)(u >> 16);
    }
    if (blocks) {
        all.assign((size_t)((N + 127) / 128 * up4(G)), 0);
        for (int b = 0; b * 128 < N; b++)
            for (int g = 0; g < G; g++)
                all[(size_t)(b * up4(G) + g)] = ws[g] * block_factor(b * 128);
    } else
        for (int n = 0; n < N; n++)
            all.push_back(scale[n % DISTINCT]);
    float *dxs = to_device(place_x_scale(kind, xs, M, G)), *dws = to_device(all),
          *dbias = to_device(wide);
    uint16_t *dnarrow = to_device(narrow);
    const size_t lane = bf16 ? 2 : 4, bytes = (size_t)(Mp * N) * lane;
    void *dy;
    CK(cudaMalloc(&dy, bytes));
    CK(cudaMemset(dy, 0xff, bytes));
    lt_call c = {};
    c.kind = (lt_kind)kind, c.y_bf16 = bf16, c.M = M, c.N = N, c.K = K, c.w = dw, c.x = dx;
    c.w_scale = dws, c.x_scale = dxs, c.y = dy, c.ldx = K, c.ldy = N;
    if (form & 2) c.bias = dbias;
    if ((form & 6) == 6) c.bias_bf16 = dnarrow;
    const char *why = lt_plan(l, &c, false);
    if (!why) why = lt_run(l, &c);
    cudaError_t rc = cudaDeviceSynchronize();
    if (!why && rc != cudaSuccess) why = cudaGetErrorString(rc);
    int64_t wrong = 1;
    double worst = 0;
    if (!why) {
        std::vector<uint8_t> y(bytes);
        CK(cudaMemcpy(y.data(), dy, bytes, cudaMemcpyDeviceToHost));
        const sums s = multiply(x, w, M, K, blocks ? xs.data() : NULL, blocks ? ws.data() : NULL);
        std::vector<float> one_scale(DISTINCT, scale[0]), one_x((size_t)M, xs[0]);
        const result r = {
            &s,
            M,
            N,
            N,
            bf16,
            blocks,
            rows             ? scale.data()
            : kind == LT_FP8 ? one_scale.data()
                             : NULL,
            form & 2 ? bias.data() : NULL,
            rows             ? xs.data()
            : kind == LT_FP8 ? one_x.data()
                             : NULL,
            (code_of(kind) == CODE_E4M3 ? 6e-4 : 6e-6) + /* sums of fp8 keep some 14 bits */
                (bf16 && (form & 2) ? 0x1p-7 : 0)};
        wrong = count_wrong(r, y, &worst);
    }
    printf("%-10s N %5d K %5d M %4d form %d: %s, worst %.1e of the magnitude\n", kinds[kind], N, K,
           M, form,
           why     ? why
           : wrong ? "WRONG"
                   : "ok",
           worst);
    for (void *q : {(void *)few, (void *)dw, (void *)dx, (void *)dxs, (void *)dws, (void *)dbias,
                    (void *)dnarrow, dy})
        cudaFree(q);
    return wrong != 0;
}

static int check(lt *l)
{
    static const int sizes[][2] = {{256, 512}, {304, 400}, {6144, 4096}};
    int bad = 0;
    for (int kind = 0; kind < LT_KINDS; kind++)
        for (auto &s : sizes)
            for (int M : {65, 130, 1000})
                for (int form : {0, 1, 3, 7}) {
                    if (s[1] > 512 && (M != 130 || form > 1)) continue;
                    bad += check_one(l, kind, s[0], s[1], M, form);
                }
    printf("w8a8: %d wrong or refused\n", bad);
    return bad;
}

/* ---- time ---------------------------------------------------------------------------------------
 */
static void time_shape(lt *l, int kind, int shape, cudaStream_t st)
{
    const int N = shapes_8b[shape][0], K = shapes_8b[shape][1], G = (K + 127) / 128, most = 2048;
    const size_t size = code_bytes(code_of(kind)), bytes = (size_t)N * K * size;
    const int copies = copies_of(bytes);
    uint8_t *w, *x, *y;
    CK(cudaMalloc(&w, bytes * (size_t)copies));
    CK(cudaMalloc(&x, (size_t)most * K * size));
    CK(cudaMalloc(&y, (size_t)most * N * 2));
    fill_noise<<<2048, 256, 0, st>>>((uint4 *)w, bytes * (size_t)copies / 16, 7);
    fill_noise<<<2048, 256, 0, st>>>((uint4 *)x, (size_t)most * K * size / 16, 9);
    float *scale = to_device(make_floats((size_t)(N + most) * (size_t)(G + 4), 0.01f, 0.02f));
    for (int M : {64, 128, 1024, 2048}) {
        double us[2] = {0, 0};
        const char *why = NULL;
        lt_call c = {};
        c.kind = (lt_kind)kind, c.y_bf16 = true, c.M = M, c.N = N, c.K = K, c.w = w, c.x = x;
        c.w_scale = c.x_scale = scale, c.y = y, c.ldx = K, c.ldy = N, c.stream = st;
        for (int tried = 0; tried < 2 && !why; tried++) {
            why = lt_plan(l, &c, tried);
            if (why) break;
            us[tried] = time_graph(st, 8, [&](int i) {
                c.w = w + bytes * (size_t)(i % copies);
                if (const char *bad = lt_run(l, &c)) why = bad;
            });
        }
        const double ops = 2.0 * M * N * K;
        printf("%-10s %-8s M %4d %8.1f us %5.0f TFLOP/s  tried out %8.1f us %5.0f TFLOP/s %s\n",
               kinds[kind], shape_names[shape], M, us[0], ops / us[0] / 1e6, us[1],
               ops / us[1] / 1e6, why ? why : "");
    }
    cudaFree(w), cudaFree(x), cudaFree(y), cudaFree(scale);
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    int bad = 0;
    lt *l;
    cudaStream_t st;
    cudaDeviceProp p;
    if (!open_device("w8a8", &p, &st)) return 0;
    if (const char *why = lt_open(&l, 0)) {
        printf("w8a8: %s\n", why);
        return 1;
    }
    printf("%s, cuBLASLt %d\n", p.name, lt_version(l));
    if (strcmp(what, "time")) bad = check(l);
    if (strcmp(what, "check"))
        for (int kind = 0; kind < LT_KINDS; kind++)
            for (int s = 0; s < 4; s++)
                time_shape(l, kind, s, st);
    lt_close(l);
    return bad != 0;
}
