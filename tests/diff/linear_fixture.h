/* Weights for tests of linears: every scheme that a checkpoint may bring, with random codes,
 * scales, zero points and global factors. */
#ifndef TESTS_LINEAR_FIXTURE_H
#define TESTS_LINEAR_FIXTURE_H
#include "check.h"
#include "kern/linear.h"

static unsigned rng = 12345;
static double uniform(void)
{
    rng = rng * 1664525u + 1013904223u;
    return (double)(rng >> 8) / 16777216.0;
}
static double normal(void)
{
    double u = uniform() + 1e-9, v = uniform();
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

typedef struct scheme {
    const char *text;
    num_dtype scale;
} scheme;
static const scheme schemes[] = {
    {"w:bf16 a:bf16", NUM_NONE},
    {"w:f16 a:f16", NUM_NONE},
    {"w:f32 a:f32", NUM_NONE},
    {"w:int4,g32 a:bf16", NUM_BF16},
    {"w:int4,g64 a:bf16", NUM_F16},
    {"w:int4,g128,asym a:bf16", NUM_BF16},
    {"w:int4,g32,asym a:bf16", NUM_F32},
    {"w:int4,channel a:bf16", NUM_BF16},
    {"w:int4,channel a:int8,token", NUM_F32},
    {"w:int2,g64 a:bf16", NUM_BF16},
    {"w:int2,channel a:int8,token", NUM_F32},
    {"w:int2,g32,asym a:bf16", NUM_F16},
    {"w:int3,g128 a:bf16", NUM_BF16},
    {"w:int3,channel a:bf16", NUM_BF16},
    {"w:int3,g64,asym a:bf16", NUM_F32},
    {"w:int5,g128 a:bf16", NUM_BF16},
    {"w:int8,channel a:bf16", NUM_BF16},
    {"w:int8,g32 a:bf16", NUM_BF16},
    {"w:int8,channel,asym a:bf16", NUM_BF16},
    {"w:int8,channel a:int8,token", NUM_BF16},
    {"w:fp8_e4m3,channel a:bf16", NUM_BF16},
    {"w:fp8_e4m3,channel a:fp8_e4m3,token", NUM_BF16},
    {"w:fp8_e4m3,tensor a:fp8_e4m3,token", NUM_F32},
    {"w:fp8_e4m3,block128x128 a:fp8_e4m3,group128", NUM_F32},
    {"w:mxfp8,g32 a:bf16", NUM_F8_E8M0},
    {"w:nvfp4,g16 a:bf16", NUM_F8_E4M3},
    {"w:nvfp4,g16 a:nvfp4,g16", NUM_F8_E4M3},
    {"w:mxfp4,g32 a:bf16", NUM_F8_E8M0},
    {"w:mxfp4,g32 a:mxfp4,g32", NUM_F8_E8M0},
    {"w:nf4,g64 a:bf16", NUM_F32},
    {"w:bnb_fp4,g64 a:bf16", NUM_F32},
};
enum { N_SCHEMES = sizeof schemes / sizeof *schemes };

static void put_scale(num_dtype t, void *base, int64_t i, double v)
{
    uint32_t c = t == NUM_F8_E8M0 ? (uint32_t)(120 + (int)(uniform() * 6)) : 0;
    float f = (float)v;
    if (t == NUM_F8_E8M0)
        ((uint8_t *)base)[i] = (uint8_t)c;
    else
        num_encode_row(t, &f, 1, (char *)base + (size_t)i * (size_t)num_infos[t].bits / 8);
}

static void random_weight(qtensor *q, const scheme *s, int64_t N, int64_t K)
{
    err e = {0};
    qspec spec;
    CHECK_OK(qspec_parse(s->text, &spec, &e));
    if (!qaxis_quantized(&spec.w)) {
        float *row = xmalloc((size_t)K * sizeof *row);
        size_t rb = num_bytes(spec.w.type, (size_t)K);
        char *mem = xmalloc((size_t)N * rb);
        for (int64_t n = 0; n < N; n++) {
            for (int64_t k = 0; k < K; k++)
                row[k] = (float)(normal() * 0.02);
            num_encode_row(spec.w.type, row, (size_t)K, mem + (size_t)n * rb);
        }
        free(row);
        qtensor_plain(q, spec.w.type, N, K, mem);
        q->spec = spec;
        return;
    }
    CHECK_OK(qtensor_alloc(q, &spec, s->scale, 1, N, K, &e));
    int bits = num_infos[q->code].bits;
    for (int64_t n = 0; n < N; n++) {
        uint8_t *row = (uint8_t *)(uintptr_t)q->codes + (size_t)n * q->row_bytes;
        for (int64_t k = 0; k < K; k++) {
            uint32_t c = (uint32_t)(uniform() * (double)(1u << bits));
            if (q->code == NUM_F8_E4M3) c = num_encode(q->code, (float)(normal() * 60));
            if (q->code == NUM_F8_E5M2) c = num_encode(q->code, (float)(normal() * 60));
            num_put_bits(row, (size_t)k, bits, c);
        }
    }
    for (int64_t i = 0; i < q->scale_rows * q->scale_cols; i++)
        put_scale(q->scale_type, (void *)(uintptr_t)q->scales, i, 0.001 + 0.01 * uniform());
    if (q->zeros)
        for (int64_t i = 0; i < q->scale_rows * q->scale_cols; i++) {
            int range = 1 << (bits - 1);
            float z = (float)((int)(uniform() * 2 * range) - range);
            num_encode_row(q->zero_type, &z, 1,
                           (char *)(uintptr_t)q->zeros +
                               (size_t)i * (size_t)num_infos[q->zero_type].bits / 8);
        }
    if (s->scale == NUM_F8_E4M3) {
        q->n_global = 1;
        q->global_row[0] = 0;
        q->global_row[1] = N;
        q->global[0] = 0.37f;
    }
}

static void free_weight(qtensor *q)
{
    if (!qaxis_quantized(&q->spec.w)) free((void *)(uintptr_t)q->codes);
    qtensor_free(q);
}
#endif
