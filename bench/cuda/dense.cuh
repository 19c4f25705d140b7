/* What the benches of weights in row-major order share: random codes with their values, weights
 * whose few distinct rows repeat down N, products in float64, and what a result may be off by. */
#ifndef BENCH_CUDA_DENSE_CUH
#define BENCH_CUDA_DENSE_CUH
#include <cmath>
#include <cstring>
#include "bench.cuh"

#define DISTINCT 61 /* rows; no multiple of any tile */

enum code { CODE_BF16, CODE_E4M3, CODE_INT8 };

static inline size_t code_bytes(code c)
{
    return c == CODE_BF16 ? 2 : 1;
}

/* n random codes and what they stand for; now and then far larger ones. */
static std::vector<uint8_t> make_codes(code c, size_t n, std::vector<float> &value)
{
    std::vector<uint8_t> out(n * code_bytes(c));
    value.resize(n);
    for (size_t i = 0; i < n; i++) {
        uint8_t b = (uint8_t)rnd();
        if (c == CODE_BF16) {
            const __nv_bfloat16 h = __float2bfloat16(uniform() * (rnd() % 64 ? 1.0f : 20.0f));
            memcpy(&out[2 * i], &h, 2);
            value[i] = __bfloat162float(h);
            continue;
        }
        if (c == CODE_E4M3 && (b & 127) == 127) b ^= 1;
        out[i] = b;
        value[i] = c == CODE_E4M3 ? e4m3_value(b) : (float)(int8_t)b;
    }
    return out;
}

static std::vector<float> make_floats(size_t n, float lo, float hi)
{
    std::vector<float> v(n);
    for (float &f : v)
        f = lo + (hi - lo) * (0.5f + 0.5f * uniform());
    return v;
}

template <class T> static T *to_device(const std::vector<T> &v)
{
    T *p;
    CK(cudaMalloc(&p, v.size() * sizeof(T) + 64));
    CK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

/* Row n of `to` is row n % rows of `from`; row: in pieces of 16 bytes. */
static __global__ void repeat_rows(const uint4 *from, int64_t row, int rows, int64_t N, uint4 *to)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < N * row;
         i += (int64_t)gridDim.x * blockDim.x)
        to[i] = from[i / row % rows * row + i % row];
}

/* Noise, for weights that are only timed. */
static __global__ void fill_noise(uint4 *p, size_t n, uint32_t salt)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u + salt;
        uint32_t v[4];
        for (uint32_t &w : v) {
            h ^= h << 13, h ^= h >> 17, h ^= h << 5;
            w = h & 0x3f3f3f3fu; /* finite in every type */
        }
        p[i] = make_uint4(v[0], v[1], v[2], v[3]);
    }
}

/* Sums of x[m][k] w[r][k] (times xs[m][k/128] ws[k/128] where these are given) and of their
 * magnitudes, [M][DISTINCT]. */
struct sums {
    std::vector<double> sum, mag;
};
static sums multiply(const std::vector<float> &x, const std::vector<float> &w, int M, int K,
                     const float *xs, const float *ws)
{
    const int G = (K + 127) / 128;
    sums s = {std::vector<double>((size_t)M * DISTINCT), std::vector<double>((size_t)M * DISTINCT)};
    for (int m = 0; m < M; m++)
        for (int r = 0; r < DISTINCT; r++) {
            double sum = 0, mag = 0;
            for (int g = 0; g < G; g++) {
                double part = 0, size = 0, by = 1;
                for (int k = g * 128; k < K && k < g * 128 + 128; k++) {
                    const double t = (double)x[(size_t)m * K + k] * w[(size_t)r * K + k];
                    part += t, size += fabs(t);
                }
                if (xs) by *= xs[(size_t)m * G + g];
                if (ws) by *= ws[g];
                sum += part * by, mag += size * fabs(by);
            }
            s.sum[(size_t)m * DISTINCT + r] = sum;
            s.mag[(size_t)m * DISTINCT + r] = mag;
        }
    return s;
}

/* Row blocks of a block-scaled weight differ by this. */
static inline float block_factor(int64_t n)
{
    static const float f[3] = {1, 2, 0.5f};
    return f[n / 128 % 3];
}

struct result { /* y on the host: [M][ldy] of bf16 or f32, and what is expected of it */
    const sums *s;
    int M, N;
    int64_t ldy;
    bool bf16, blocks;
    const float *scale, *bias, *row_scale; /* [DISTINCT], [DISTINCT], [M]; or NULL */
    double tol;                            /* of the sum of magnitudes */
};

static float y_at(const std::vector<uint8_t> &y, bool bf16, size_t i)
{
    uint32_t u = 0;
    float f;
    if (bf16) {
        uint16_t h;
        memcpy(&h, &y[2 * i], 2);
        u = (uint32_t)h << 16;
    } else
        memcpy(&u, &y[4 * i], 4);
    memcpy(&f, &u, 4);
    return f;
}

/* Cells that are wrong; those between N and ldy must still be poison (all ones). */
static int64_t count_wrong(const result &r, const std::vector<uint8_t> &y, double *worst)
{
    int64_t wrong = 0;
    for (int m = 0; m < r.M; m++)
        for (int64_t n = 0; n < r.ldy; n++) {
            const float got = y_at(y, r.bf16, (size_t)(m * r.ldy + n));
            if (n >= r.N) {
                wrong += !std::isnan(got);
                continue;
            }
            const size_t at = (size_t)m * DISTINCT + (size_t)(n % DISTINCT);
            double by = r.blocks ? block_factor(n) : 1;
            if (r.scale) by *= r.scale[n % DISTINCT];
            if (r.row_scale) by *= r.row_scale[m];
            const double bias = r.bias ? r.bias[n % DISTINCT] : 0, want = r.s->sum[at] * by + bias,
                         mag = r.s->mag[at] * fabs(by) + fabs(bias),
                         off = fabs((double)got - want) - (r.bf16 ? 0x1p-8 * fabs(want) : 0);
            if (!(off <= r.tol * mag)) wrong++;
            if (off / mag > *worst) *worst = off / mag;
        }
    return wrong;
}

static const int shapes_8b[][2] = {
    {6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {128256, 4096}};
static const char *const shape_names[] = {"qkv", "o", "gate_up", "down", "lm_head"};

/* Copies of a weight, so that none is found in the L2. */
static int copies_of(size_t bytes)
{
    const size_t all = (size_t)400 << 20;
    return bytes >= all ? 2 : (int)((all + bytes - 1) / bytes);
}
#endif
