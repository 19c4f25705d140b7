/* Random packed weights for the benches of products: codes and scales of every format, their values
 * in f32, and copies enough on the device that none is found in the L2. */
#ifndef BENCH_CUDA_WEIGHT_CUH
#define BENCH_CUDA_WEIGHT_CUH
#include "kern/cuda/small.h"
#include "bench.cuh"
#include <cmath>
#include <cstring>

static const char *const names[SMALL_FORMATS] = {"int4", "e4m3", "bf16"};

struct weight { /* codes on the host, their values, packed on the device `copies` times */
    small_format f;
    int N, K, copies;
    size_t bytes;
    std::vector<float> value; /* of the first `rows` rows */
    int rows;
    uint8_t *dev;
};

/* A block of distinct rows, repeated down N: values are checked on it, bytes are what they are. */
static weight make_weight(small_format f, int N, int K)
{
    weight w = {f, N, K, 0, small_packed_bytes(f, N, K), {}, 256, NULL};
    int G = K / 128;
    std::vector<uint8_t> codes((size_t)w.rows * K * (f == SMALL_BF16 ? 2 : 1));
    std::vector<float> scales((size_t)w.rows * G);
    w.value.resize((size_t)w.rows * K);
    for (int n = 0; n < w.rows; n++) {
        for (int g = 0; g < G; g++) /* as small_pack rounds them */
            scales[(size_t)n * G + g] =
                f == SMALL_E4M3 && g
                    ? scales[(size_t)n * G]
                    : __bfloat162float(__float2bfloat16(0.03f + 0.02f * uniform()));
        for (int k = 0; k < K; k++) {
            size_t i = (size_t)n * K + k;
            float s = scales[(size_t)n * G + k / 128];
            if (f == SMALL_BF16) {
                __nv_bfloat16 b = __float2bfloat16(uniform());
                memcpy(&codes[2 * i], &b, 2);
                w.value[i] = __bfloat162float(b);
                continue;
            }
            uint8_t c = (uint8_t)(f == SMALL_INT4 ? rnd() & 15 : rnd());
            if (f == SMALL_E4M3 && (c & 127) == 127) c ^= 1; /* NaN */
            codes[i] = c;
            w.value[i] = s * (f == SMALL_INT4 ? (float)c - 8 : e4m3_value(c));
        }
    }
    size_t part = small_packed_bytes(f, w.rows, K);
    std::vector<uint8_t> packed(part);
    small_pack(f, codes.data(), f == SMALL_BF16 ? NULL : scales.data(), w.rows, K, packed.data());
    w.copies = std::max(2, (int)(450e6 / (double)w.bytes) + 1);
    CK(cudaMalloc(&w.dev, w.bytes * w.copies));
    CK(cudaMemcpy(w.dev, packed.data(), part, cudaMemcpyHostToDevice));
    for (size_t at = part; at < w.bytes * w.copies; at += part)
        CK(cudaMemcpy(w.dev + at, w.dev, std::min(part, w.bytes * w.copies - at),
                      cudaMemcpyDeviceToDevice));
    return w;
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
#endif
