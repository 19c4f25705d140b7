/* Products of few rows with a weight in row-major order (rows.h, slim.h) on a device.
 *   check   every format, kind of scale, number of rows and plan against float64: random codes,
 *           poisoned output, rows, columns and K that end inside of a tile
 *   time    shapes of an 8B model, rows at M = 1, 8, 16, 64, slim at M = 1, 2, 4, 8: CUDA graphs of
 *           launches over enough copies of the weight that none is found in the L2, median of
 *           replays; GB/s count the weight, the roof is a read sweep of the same run. Lines with *
 *           are of the plan that is chosen
 *   slim    that alone, with either or both
 * Without an argument all. Exit 1 when a result is wrong. */
#include "kern/cuda/rows.h"
#include "kern/cuda/slim.h"
#include "dense.cuh"
#include <string>

static const char *const formats[] = {"bf16", "e4m3", "int8", "e4m3 blocks"};

struct kind { /* a format, or 3: block scales */
    int id;
    rows_format f() const { return id == 3 ? ROWS_E4M3 : (rows_format)id; }
    bool blocks() const { return id == 3; }
    int how(bool codes) const
    {
        return (codes && id ? SLIM_CODES : 0) | (blocks() ? SLIM_BLOCKS : 0);
    }
    code c() const { return id == 0 ? CODE_BF16 : id == 2 ? CODE_INT8 : CODE_E4M3; }
    int most() const { return id == 3 ? ROWS_MAX_BLOCK_M : ROWS_MAX_M; }
};

/* ---- check --------------------------------------------------------------------------------------
 */
struct problem {
    kind k;
    int N, K, G;
    std::vector<float> w, x, scale, bias, row_scale, xs, ws;
    uint8_t *dw, *dx;
    float *dscale, *dbias, *drow, *dxs;
    rows_weight map;
};

/* n numbers as bf16: any, or such as codes of the weight's type stand for. */
static uint8_t *make_x(kind k, size_t n, std::vector<float> &value)
{
    if (k.id == 0) return to_device(make_codes(CODE_BF16, n, value));
    std::vector<__nv_bfloat16> x(n);
    make_codes(k.c(), n, value);
    for (size_t i = 0; i < n; i++)
        x[i] = __float2bfloat16(value[i]);
    return (uint8_t *)to_device(x);
}

static problem make_problem(kind k, int N, int K)
{
    problem p = {};
    p.k = k, p.N = N, p.K = K, p.G = (K + 127) / 128;
    const int64_t row = (int64_t)K * (int64_t)code_bytes(k.c()) / 16;
    uint8_t *few = to_device(make_codes(k.c(), (size_t)DISTINCT * K, p.w));
    CK(cudaMalloc(&p.dw, (size_t)(N * row) * 16));
    repeat_rows<<<1024, 256>>>((uint4 *)few, row, DISTINCT, N, (uint4 *)p.dw);
    CK(cudaDeviceSynchronize());
    cudaFree(few);
    p.dx = make_x(k, (size_t)ROWS_MAX_M * K, p.x);
    p.scale = make_floats(DISTINCT, 0.01f, 0.02f);
    p.bias = make_floats(DISTINCT, -2, 2);
    p.row_scale = make_floats(ROWS_MAX_M, 0.5f, 3);
    p.xs = make_floats((size_t)ROWS_MAX_M * p.G, 0.5f, 3);
    p.ws = make_floats((size_t)p.G, 0.01f, 0.02f);
    std::vector<float> all((size_t)N), bias((size_t)N);
    for (int n = 0; n < N; n++)
        all[n] = p.scale[n % DISTINCT], bias[n] = p.bias[n % DISTINCT];
    if (k.blocks()) {
        all.assign((size_t)((N + 127) / 128) * p.G, 0);
        for (size_t i = 0; i < all.size(); i++)
            all[i] = p.ws[i % p.G] * block_factor((int64_t)(i / p.G) * 128);
    }
    p.dscale = to_device(all), p.dbias = to_device(bias), p.drow = to_device(p.row_scale);
    p.dxs = to_device(p.xs);
    const char *why = rows_prepare(&p.map, k.f(), p.dw, K, N, K);
    if (why) printf("rows_prepare: %s\n", why), exit(1);
    return p;
}

static void drop_problem(problem &p)
{
    for (void *q : {(void *)p.dw, (void *)p.dx, (void *)p.dscale, (void *)p.dbias, (void *)p.drow,
                    (void *)p.dxs})
        cudaFree(q);
}

static int n_checked;

/* form: 1 = y in bf16, 2 = bias, 4 = scales of the rows of x (blocks: of its groups), 8 = no
 * scales of W where it can be, 16 = slim is told that x is codes. */
static int check_one(const problem &p, const sums &s, int M, rows_plan plan, int form, int pdl,
                     slim_plan slim = {0, 0})
{
    const bool bf16 = form & 1, scaled = p.k.blocks() || !(form & 8);
    const int64_t ldy = p.N + 5;
    const size_t bytes = (size_t)(M * ldy) * (bf16 ? 2 : 4);
    std::vector<uint8_t> y(bytes);
    void *dy;
    CK(cudaMalloc(&dy, bytes));
    CK(cudaMemset(dy, 0xff, bytes));
    rows_call c = {};
    c.w = &p.map;
    c.scales = p.k.blocks() ? ROWS_BLOCK : scaled ? ROWS_ROW : ROWS_UNSCALED;
    c.scale = scaled ? p.dscale : NULL;
    c.bias = form & 2 ? p.dbias : NULL;
    c.x = p.dx;
    if (form & 4) {
        if (p.k.blocks())
            c.x_scale = p.dxs, c.ld_x_scale = p.G;
        else
            c.row_scale = p.drow;
    }
    c.y = dy, c.y_bf16 = bf16, c.ldx = p.K, c.ldy = ldy, c.M = M, c.plan = plan, c.pdl = pdl;
    c.x_codes = form & 16;
    const char *why = slim.split ? slim_run_as(&c, slim) : rows_run(&c);
    cudaError_t rc = why ? cudaSuccess : cudaDeviceSynchronize();
    if (rc != cudaSuccess) why = cudaGetErrorString(rc);
    int64_t wrong = 1;
    double worst = 0;
    if (!why) {
        CK(cudaMemcpy(y.data(), dy, bytes, cudaMemcpyDeviceToHost));
        const result r = {&s,
                          M,
                          p.N,
                          ldy,
                          bf16,
                          p.k.blocks(),
                          scaled && !p.k.blocks() ? p.scale.data() : NULL,
                          form & 2 ? p.bias.data() : NULL,
                          form & 4 && !p.k.blocks() ? p.row_scale.data() : NULL,
                          2e-6};
        wrong = count_wrong(r, y, &worst);
    }
    n_checked++;
    if (wrong)
        printf(
            "WRONG %s %-11s N %6d K %5d M %2d groups %d chunks %d split %d depth %d form %d: %s, "
            "%lld cells, worst %.1e\n",
            slim.split ? "slim" : "rows", formats[p.k.id], p.N, p.K, M, plan.groups, plan.chunks,
            slim.split ? slim.split : plan.split, slim.depth, form, why ? why : "sums",
            (long long)wrong, worst);
    if (rc != cudaSuccess) exit(1); /* nothing runs after such an error */
    cudaFree(dy);
    return wrong != 0;
}

/* Every plan that there is. */
static int check_slim(const problem &p, const sums &plain, const sums &scaled)
{
    int bad = 0;
    for (int M : {1, 2, 3, 4, 5, 7, 8})
        for (int form : {0, 3, 4, 7, 8, 15, 20, 23})
            for (int split = 1; split <= 8; split *= 2)
                for (int depth = 2; depth <= SLIM_DEPTH; depth += 2)
                    if (slim_has(p.k.f(), p.k.how(form & 16), {split, depth}, p.K, M))
                        bad += check_one(p, form & 4 ? scaled : plain, M, {0, 0, 0}, form, form & 1,
                                         {split, depth});
    return bad;
}

static int check_shape(kind k, int N, int K, bool all_plans, bool slim)
{
    static const int batches[] = {1, 2, 7, 8, 9, 16, 17, 32, 33, 64};
    int bad = 0;
    problem p = make_problem(k, N, K);
    const sums plain = multiply(p.x, p.w, ROWS_MAX_M, K, NULL, k.blocks() ? p.ws.data() : NULL);
    const sums scaled =
        k.blocks() ? multiply(p.x, p.w, ROWS_MAX_M, K, p.xs.data(), p.ws.data()) : plain;
    bad += check_slim(p, plain, scaled);
    for (int M : batches) {
        if (M > k.most() || slim) continue;
        for (int form : {0, 3, 4, 7, 8, 15})
            bad += check_one(p, form & 4 ? scaled : plain, M, rows_choose(k.f(), N, K, M), form,
                             form & 1);
        for (int groups = 1; groups <= 7 && all_plans; groups++)
            for (int chunks = 1; chunks <= 4; chunks *= 2)
                for (int split = 1; split <= 8; split *= 2) {
                    const rows_plan plan = {groups, chunks, split};
                    if (rows_has(k.f(), plan, K, M)) bad += check_one(p, scaled, M, plan, 6, 0);
                }
    }
    drop_problem(p);
    return bad;
}

static int check(bool slim)
{
    int bad = 0;
    for (int id = 0; id < 4; id++) {
        const kind k = {id};
        bad += check_shape(k, 1, 16, true, slim);
        bad += check_shape(k, 33, 208, true, slim);
        bad += check_shape(k, 300, 1040, true, slim);
        bad += check_shape(k, 1000, 4096, true, slim);
        bad += check_shape(k, 4096, 14336, false, slim);
        bad += check_shape(k, 6144, 4096, false, slim);
    }
    printf("rows: %d products, %d wrong\n", n_checked, bad);
    return bad;
}

/* ---- time ---------------------------------------------------------------------------------------
 */
static void time_slim(kind k, int shape, rows_call c, const std::vector<rows_weight> &map,
                      double roof, cudaStream_t st)
{
    const int N = shapes_8b[shape][0], K = shapes_8b[shape][1];
    const double bytes = (double)N * K * code_bytes(k.c());
    for (int M : {1, 2, 4, 8}) {
        const slim_plan own = slim_choose(k.f(), k.how(true), N, K, M);
        for (int split = 1; split <= 4; split *= 2)
            for (int depth = 2; depth <= SLIM_DEPTH; depth += 2) {
                const bool chosen = own.split == split && own.depth == depth;
                if (!slim_has(k.f(), k.how(true), {split, depth}, K, M)) continue;
                if (!chosen && split > own.split && split > 1) continue;
                const char *why = NULL;
                double us[2];
                c.M = M;
                for (int pdl = 0; pdl < 2; pdl++)
                    us[pdl] = time_graph(st, 16, [&](int i) {
                        c.w = &map[(size_t)i % map.size()];
                        c.pdl = pdl;
                        if (const char *bad = slim_run_as(&c, {split, depth})) why = bad;
                    });
                printf("slim %-11s %-8s M %2d %8.2f us %3.0f %%  pdl %8.2f us %5.2f TB/s %3.0f %%  "
                       "split %d depth %d%s%s%s\n",
                       formats[k.id], shape_names[shape], M, us[0],
                       100 * bytes / us[0] / 1e6 / roof, us[1], bytes / us[1] / 1e6,
                       100 * bytes / us[1] / 1e6 / roof, split, depth, chosen ? " *" : "",
                       why ? "  " : "", why ? why : "");
            }
    }
}

static void time_shape(kind k, int shape, bool slim, double roof, cudaStream_t st)
{
    const int N = shapes_8b[shape][0], K = shapes_8b[shape][1], G = (K + 127) / 128;
    const size_t bytes = (size_t)N * K * code_bytes(k.c());
    const int copies = copies_of(bytes);
    std::vector<rows_weight> map((size_t)copies);
    std::vector<float> ones;
    uint8_t *w, *x;
    void *y;
    float *scale, *xs;
    CK(cudaMalloc(&w, bytes * (size_t)copies));
    fill_noise<<<2048, 256, 0, st>>>((uint4 *)w, bytes * (size_t)copies / 16, 7);
    for (int i = 0; i < copies; i++)
        if (const char *why = rows_prepare(&map[i], k.f(), w + bytes * (size_t)i, K, N, K))
            printf("rows_prepare: %s\n", why), exit(1);
    x = make_x(k, (size_t)ROWS_MAX_M * K, ones);
    scale = to_device(make_floats((size_t)N + (size_t)(N / 128 + 1) * G, 0.01f, 0.02f));
    xs = to_device(make_floats((size_t)ROWS_MAX_M * G, 0.5f, 3));
    CK(cudaMalloc(&y, (size_t)ROWS_MAX_M * N * 2));
    rows_call c = {};
    c.scales = k.id == 0 ? ROWS_UNSCALED : k.blocks() ? ROWS_BLOCK : ROWS_ROW;
    c.scale = k.id == 0 ? NULL : scale;
    if (k.blocks())
        c.x_scale = xs, c.ld_x_scale = G;
    else if (k.id)
        c.row_scale = xs;
    c.x = x, c.y = y, c.y_bf16 = 1, c.ldx = K, c.ldy = N, c.stream = st;
    c.x_codes = k.id != 0;
    time_slim(k, shape, c, map, roof, st);
    for (int M : {1, 8, 16, 32, 64}) {
        if (M > k.most() || (M == 32 && !k.blocks()) || slim) continue;
        double us[2];
        c.M = M;
        c.plan = rows_choose(k.f(), N, K, M);
        const char *why = NULL;
        for (int pdl = 0; pdl < 2; pdl++)
            us[pdl] = time_graph(st, 16, [&](int i) {
                c.w = &map[(size_t)(i % copies)];
                c.pdl = pdl;
                if (const char *bad = rows_run(&c)) why = bad;
            });
        printf("%-11s %-8s M %2d %8.2f us %5.2f TB/s %3.0f %%  pdl %8.2f us %5.2f TB/s %3.0f %%  "
               "groups %d chunks %d split %d%s%s\n",
               formats[k.id], shape_names[shape], M, us[0], bytes / us[0] / 1e6,
               100 * bytes / us[0] / 1e6 / roof, us[1], bytes / us[1] / 1e6,
               100 * bytes / us[1] / 1e6 / roof, c.plan.groups, c.plan.chunks, c.plan.split,
               why ? "  " : "", why ? why : "");
    }
    cudaFree(w), cudaFree(x), cudaFree(y), cudaFree(scale), cudaFree(xs);
}

int main(int argc, char **argv)
{
    bool wanted[3] = {}; /* check, time, slim */
    int bad = 0;
    for (int i = 1; i < argc; i++) {
        const std::string a = argv[i];
        const int n = a == "check" ? 0 : a == "time" ? 1 : a == "slim" ? 2 : -1;
        if (n < 0) {
            fprintf(stderr, "rows: what is \"%s\"? Known: check, time, slim\n", argv[i]);
            return 2;
        }
        wanted[n] = true;
    }
    if (!wanted[0] && !wanted[1]) wanted[0] = wanted[1] = true;
    cudaStream_t st;
    cudaDeviceProp p;
    if (!open_device("rows", &p, &st)) return 0;
    if (wanted[0]) bad = check(wanted[2]);
    if (!wanted[1]) return bad != 0;
    const double roof = measure_roof(st);
    printf("%s, %d SMs, read roof %.2f TB/s\n", p.name, p.multiProcessorCount, roof);
    for (int id = 0; id < 4; id++)
        for (int s = 0; s < 5; s++)
            time_shape({id}, s, wanted[2], roof, st);
    return bad != 0;
}
