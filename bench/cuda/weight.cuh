/* Random packed weights for the benches of products: codes and scales of every format, their
 * values, and copies enough on the device that none is found in the L2. */
#ifndef BENCH_CUDA_WEIGHT_CUH
#define BENCH_CUDA_WEIGHT_CUH
#include "kern/cuda/small.h"
#include "bench.cuh"
#include <cmath>
#include <cstring>
#include <cuda_fp16.h>
#include <string>

static const char *const names[SMALL_FORMATS] = {
    "int4",       "int4_zero", "int4_64",    "int4_64_zero", "int4_32", "int4_32_zero", "e4m3",
    "e4m3_block", "int8",      "int8_group", "bf16",         "mxfp4",   "nvfp4"};

struct weight { /* packed on the device `copies` times */
    small_format f;
    int N, K, copies;
    size_t bytes;
    int rows;                   /* distinct rows; they repeat down N */
    std::vector<float> value;   /* [rows][K], factor of the row left out */
    std::vector<float> by, add; /* [rows]: the factor, the bias */
    uint8_t *dev;
    float *col_scale, *bias; /* [N] on the device */
};

/* Codes are a byte each (two in bf16); every value is exact in f32. */
static float make_code(small_format f, float scale, int zero, uint8_t *to)
{
    static const float e2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    if (f == SMALL_BF16) {
        __nv_bfloat16 b = __float2bfloat16(uniform());
        memcpy(to, &b, 2);
        return __bfloat162float(b);
    }
    const bool byte =
        f == SMALL_E4M3 || f == SMALL_E4M3_BLOCK || f == SMALL_INT8 || f == SMALL_INT8_GROUP;
    uint8_t c = (uint8_t)(byte ? rnd() : rnd() & 15);
    if ((f == SMALL_E4M3 || f == SMALL_E4M3_BLOCK) && (c & 127) == 127) c ^= 1; /* NaN */
    *to = c;
    if (f == SMALL_E4M3 || f == SMALL_E4M3_BLOCK) return scale * e4m3_value(c);
    if (byte) return scale * (float)(int8_t)c;
    if (f == SMALL_MXFP4 || f == SMALL_NVFP4) return scale * (c & 8 ? -e2m1[c & 7] : e2m1[c & 7]);
    return scale * (float)(c - zero);
}

/* As the packing keeps it: no rounding there. */
static float make_scale(small_format f)
{
    const float m = 0.75f + 0.25f * uniform();
    if (f == SMALL_MXFP4) return ldexpf(1, (int)(rnd() % 6) - 5);
    if (f == SMALL_NVFP4) return ldexpf((float)(8 + rnd() % 8), (int)(rnd() % 5) - 9);
    if (f == SMALL_E4M3_BLOCK) return m / 16;
    return __half2float(__float2half(m / 16));
}

template <class T> static T *to_device(const std::vector<T> &v)
{
    T *d;
    CK(cudaMalloc(&d, v.size() * sizeof(T)));
    CK(cudaMemcpy(d, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return d;
}

/* bytes: of all copies together, one at least. */
static weight make_weight(small_format f, int N, int K, double bytes)
{
    weight w = {f, N, K, 0, small_packed_bytes(f, N, K), 256, {}, {}, {}, NULL, NULL, NULL};
    const int group = small_group(f), G = group ? K / group : 0;
    const size_t width = f == SMALL_BF16 ? 2 : 1;
    std::vector<uint8_t> codes((size_t)w.rows * K * width), zeros((size_t)w.rows * G);
    std::vector<float> scales((size_t)w.rows * G);
    w.value.resize((size_t)w.rows * K);
    for (int n = 0; n < w.rows; n++) {
        w.by.push_back(0.75f + 0.25f * uniform()), w.add.push_back(uniform());
        for (int g = 0; g < G; g++) {
            const size_t i = (size_t)n * G + g;
            const bool again = f == SMALL_E4M3_BLOCK && n % 16;
            scales[i] = again ? scales[i - G] : make_scale(f);
            zeros[i] = (uint8_t)(small_has_zeros(f) ? rnd() % 16 : 8);
        }
        for (int k = 0; k < K; k++) {
            const size_t i = (size_t)n * K + k, g = G ? (size_t)n * G + k / group : 0;
            w.value[i] = make_code(f, G ? scales[g] : 1, G ? zeros[g] : 8, &codes[i * width]);
        }
    }
    size_t part = small_packed_bytes(f, w.rows, K);
    std::vector<uint8_t> packed(part);
    std::vector<float> by = w.by;
    small_pack(f, codes.data(), G ? scales.data() : NULL, small_has_zeros(f) ? zeros.data() : NULL,
               w.rows, K, packed.data(), by.data());
    w.copies = std::max(1, (int)(bytes / (double)w.bytes) + 1);
    CK(cudaMalloc(&w.dev, w.bytes * w.copies));
    for (size_t at = 0; at < w.bytes; at += part)
        CK(cudaMemcpy(w.dev + at, packed.data(), std::min(part, w.bytes - at),
                      cudaMemcpyHostToDevice));
    for (int c = 1; c < w.copies; c++)
        CK(cudaMemcpy(w.dev + c * w.bytes, w.dev, w.bytes, cudaMemcpyDeviceToDevice));
    std::vector<float> col, bias;
    for (int n = 0; n < N; n++)
        col.push_back(by[n % w.rows]), bias.push_back(w.add[n % w.rows]);
    w.col_scale = to_device(col), w.bias = to_device(bias);
    return w;
}
static void drop_weight(weight &w)
{
    cudaFree(w.dev), cudaFree(w.col_scale), cudaFree(w.bias);
}

/* bf16 values with some outliers; what they are in f32. */
static std::vector<__nv_bfloat16> make_x(size_t n, std::vector<float> &value)
{
    std::vector<__nv_bfloat16> x(n);
    value.resize(n);
    for (size_t i = 0; i < n; i++) {
        x[i] = __float2bfloat16(rnd() % 512 ? uniform() : 60 * uniform());
        value[i] = __bfloat162float(x[i]);
    }
    return x;
}

struct operands { /* of M tokens; y has rows of N + 4, and two more of them */
    int M, ldy;
    std::vector<float> x, row_scale;
    std::vector<int> looked_at; /* tokens */
    std::vector<double> want;   /* [looked_at][rows of w] */
    __nv_bfloat16 *dx;
    float *drow;
    uint8_t *dy;
    size_t y_bytes;
};

static inline operands make_operands(const weight &w, int M, bool check)
{
    operands o = {};
    o.M = M, o.ldy = w.N + 4;
    o.y_bytes = (size_t)(M + 2) * o.ldy * 4;
    o.dx = to_device(make_x((size_t)M * w.K, o.x));
    for (int m = 0; m < M; m++) {
        o.row_scale.push_back(1.5f + uniform());
        if (M <= 64 || m < 8 || m >= M - 9 || m % ((M + 15) / 16) == 0) o.looked_at.push_back(m);
    }
    o.drow = to_device(o.row_scale);
    CK(cudaMalloc(&o.dy, o.y_bytes));
    for (size_t i = 0; check && i < o.looked_at.size(); i++)
        for (int n = 0; n < w.rows; n++) {
            const float *a = &w.value[(size_t)n * w.K], *b = &o.x[(size_t)o.looked_at[i] * w.K];
            double sum = 0;
            for (int k = 0; k < w.K; k++)
                sum += (double)a[k] * b[k];
            o.want.push_back(sum * w.by[n] * o.row_scale[o.looked_at[i]] + w.add[n]);
        }
    return o;
}
static inline void drop_operands(operands &o)
{
    cudaFree(o.dx), cudaFree(o.drow), cudaFree(o.dy);
}
static inline void poison(const operands &o)
{
    CK(cudaMemset(o.dy, 0xff, o.y_bytes)); /* NaN */
}

/* Relative error of the tokens that are looked at. The rows of w repeat, and so must the results,
 * bit by bit; what is not a result must be as it was: else NaN. */
static inline double error_of(const weight &w, const operands &o, int y_bf16)
{
    const size_t width = y_bf16 ? 2 : 4, ld = o.ldy * width;
    std::vector<uint8_t> y(o.y_bytes);
    CK(cudaMemcpy(y.data(), o.dy, y.size(), cudaMemcpyDeviceToHost));
    double d = 0, s = 0;
    for (size_t i = 0; i < o.looked_at.size(); i++) {
        const uint8_t *row = &y[o.looked_at[i] * ld];
        for (int n = 0; n < w.N; n++) {
            uint32_t bits = 0;
            float got;
            memcpy((uint8_t *)&bits + 4 - width, row + n * width, width);
            memcpy(&got, &bits, 4);
            if (n < w.rows) {
                const double want = o.want[i * (size_t)w.rows + n];
                d += (got - want) * (got - want), s += want * want;
            } else if (memcmp(row + n * width, row + n % w.rows * width, width))
                return NAN;
        }
    }
    for (size_t i = w.N * width; i < y.size(); i++) {
        if (i < o.M * ld && i % ld == 0) i += w.N * width;
        if (y[i] != 0xff) return NAN;
    }
    return sqrt(d / s);
}

/* ---- arguments: "check" or "time", then any of: shapes (names below or NxK), formats, numbers of
 * tokens, "plans" ---------------------------------------------------------------------------------
 */
struct wanted {
    bool check, time, plans;
    std::vector<std::pair<int, int>> shapes;
    std::vector<small_format> formats;
    std::vector<int> tokens;
};
static inline wanted read_arguments(int argc, char **argv)
{
    static const struct {
        const char *name;
        int N, K;
    } known[] = {{"gate_up", 28672, 4096},   {"qkv", 6144, 4096},    {"o", 4096, 4096},
                 {"down", 4096, 14336},      {"qkv70", 10240, 8192}, {"o70", 8192, 8192},
                 {"gate_up70", 57344, 8192}, {"down70", 8192, 28672}};
    wanted w = {};
    for (int i = 1; i < argc; i++) {
        const std::string a = argv[i];
        int N, K, used = 0;
        bool is = false;
        for (auto &k : known)
            if (a == k.name) w.shapes.push_back({k.N, k.K}), is = true;
        for (int f = 0; f < SMALL_FORMATS; f++)
            if (a == names[f]) w.formats.push_back((small_format)f), is = true;
        if (a == "check" || a == "time" || a == "plans")
            (a == "check" ? w.check : a == "time" ? w.time : w.plans) = is = true;
        if (!is && sscanf(argv[i], "%dx%d%n", &N, &K, &used) == 2 && !argv[i][used])
            w.shapes.push_back({N, K}), is = true;
        if (!is && sscanf(argv[i], "%d%n", &N, &used) == 1 && !argv[i][used] && N > 0)
            w.tokens.push_back(N), is = true;
        if (!is) {
            fprintf(stderr,
                    "%s: what is \"%s\"? Known: check, time, plans, a number of tokens, NxK",
                    argv[0], argv[i]);
            for (auto &k : known)
                fprintf(stderr, ", %s", k.name);
            for (auto &n : names)
                fprintf(stderr, ", %s", n);
            fprintf(stderr, "\n");
            exit(2);
        }
    }
    if (!w.check && !w.time) w.check = w.time = true;
    if (w.formats.empty())
        for (int f = 0; f < SMALL_FORMATS; f++)
            w.formats.push_back((small_format)f);
    return w;
}
#endif
