/* Plain C twins of the small operators and the KV store: the definition that faster
 * versions are tested against. f32 throughout; sums of squares in double. */
#include <string.h>
#include "kern/ops.h"

static void rmsnorm(const float *x, const float *w, float eps, int64_t K, float *out)
{
    double ss = 0;
    for (int64_t i = 0; i < K; i++)
        ss += (double)x[i] * x[i];
    float r = (float)(1.0 / sqrt(ss / (double)K + (double)eps));
    for (int64_t i = 0; i < K; i++)
        out[i] = x[i] * r * w[i];
}

static void add(float *x, const float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] += y[i];
}

static void layernorm(const float *x, const float *w, const float *b, float eps, int64_t K,
                      float *out)
{
    double sum = 0, ss = 0;
    for (int64_t i = 0; i < K; i++)
        sum += x[i];
    float mean = (float)(sum / (double)K);
    for (int64_t i = 0; i < K; i++)
        ss += (double)(x[i] - mean) * (x[i] - mean);
    float r = (float)(1.0 / sqrt(ss / (double)K + (double)eps));
    for (int64_t i = 0; i < K; i++)
        out[i] = (x[i] - mean) * r * w[i] + (b ? b[i] : 0.0f);
}

static void gated_rmsnorm(const float *x, const float *gate, const float *w, float eps, int64_t K,
                          float *out)
{
    rmsnorm(x, w, eps, K, out);
    for (int64_t i = 0; i < K; i++)
        out[i] *= gate[i] / (1.0f + expf(-gate[i]));
}

static void add_scaled(float *x, const float *y, float s, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] += s * y[i];
}

static void scale(float *x, float s, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] *= s;
}

static void softcap(float *x, float cap, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = cap * tanhf(x[i] / cap);
}

static void sigmoid_mul(float *x, const float *g, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] /= 1.0f + expf(-g[i]);
}

static void rope_pairs(float *x, int rot_dim, const float *cosv, const float *sinv)
{
    for (int i = 0; i < rot_dim / 2; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cosv[i] - b * sinv[i];
        x[2 * i + 1] = b * cosv[i] + a * sinv[i];
    }
}

static void head_rows(const qtensor *w, int64_t row0, int64_t rows, const float *x, int64_t ldx,
                      int64_t T, float *out, int64_t ldo, float *tmp)
{
    for (int64_t n = 0; n < rows; n++) {
        qtensor_decode_row(w, row0 + n, tmp);
        for (int64_t t = 0; t < T; t++)
            out[t * ldo + n] = kern__ref_dot(x + t * ldx, tmp, w->K);
    }
}

static void rope(float *x, int rot_dim, const float *cosv, const float *sinv)
{
    int half = rot_dim / 2;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosv[i] - b * sinv[i];
        x[i + half] = b * cosv[i] + a * sinv[i];
    }
}

static float activate(kern_glu a, float x)
{
    switch (a) {
    case KERN_SILU:
        return x / (1.0f + expf(-x));
    case KERN_GELU_TANH:
        return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case KERN_GELU:
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case KERN_RELU:
        return x < 0 ? 0 : x;
    case KERN_RELU2:
        return x < 0 ? 0 : x * x;
    case KERN_QUICK_GELU:
        return x / (1.0f + expf(-1.702f * x));
    case KERN_SWIGLU_OAI:
        x = x > 7.0f ? 7.0f : x;
        return x / (1.0f + expf(-1.702f * x));
    case KERN_GLU_COUNT:
        break;
    }
    return x;
}

static void act(kern_glu a, const float *x, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = activate(a, x[i]);
}

static float clamp7(float x) /* keeps NaN */
{
    return x < -7.0f ? -7.0f : x > 7.0f ? 7.0f : x;
}

static void glu(kern_glu a, const float *g, const float *u, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = activate(a, g[i]) * (a == KERN_SWIGLU_OAI ? clamp7(u[i]) + 1.0f : u[i]);
}

static void round_fp8(float *v, int64_t n, float scale, float max, float mul)
{
    num_dtype t = max == 448.0f ? NUM_F8_E4M3 : NUM_F8_E5M2;
    for (int64_t i = 0; i < n; i++)
        v[i] = num_round(t, v[i] / scale) * mul;
}

static void round_int(float *v, int64_t n, float scale, float lo, float hi, float mul)
{
    for (int64_t i = 0; i < n; i++) {
        float q = nearbyintf(v[i] / scale);
        v[i] = (q < lo ? lo : q > hi ? hi : q) * mul;
    }
}

static float amax(const float *v, int64_t n)
{
    float m = 0;
    for (int64_t i = 0; i < n; i++)
        m = fabsf(v[i]) > m ? fabsf(v[i]) : m;
    return m;
}

static int32_t quant_i8(const float *v, int64_t n, float scale, int lo, int hi, int8_t *codes)
{
    int32_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        float q = nearbyintf(v[i] / scale);
        int c = q < (float)lo ? lo : q > (float)hi ? hi : q == q ? (int)q : 0;
        codes[i] = (int8_t)c;
        sum += c;
    }
    return sum;
}

static void split_bf16(const float *v, int64_t n, uint16_t *hi, uint16_t *lo)
{
    for (int64_t i = 0; i < n; i++) {
        hi[i] = num_f32_to_bf16(v[i]);
        if (lo) lo[i] = num_f32_to_bf16(v[i] - num_bf16_to_f32(hi[i]));
    }
}

/* ---- KV cache -----------------------------------------------------------------------------------
 */

static uint64_t put_fp8(const kern_kv_layer *kv, int which, int head, const float *x, uint8_t *code)
{
    num_dtype t = kv->type == KV_FP8_E4M3 ? NUM_F8_E4M3 : NUM_F8_E5M2;
    const float *scales = which ? kv->v_scale : kv->k_scale;
    float s = scales ? scales[head] : 1.0f, max = (float)num_infos[t].max;
    uint64_t clipped = 0;
    for (int i = 0; i < kv->D; i++) {
        float v = x[i] / s;
        clipped += fabsf(v) > max;
        code[i] = (uint8_t)num_encode(t, v);
    }
    return clipped;
}

static void put_int8(const kern_kv_layer *kv, const float *x, uint8_t *code, uint8_t *scale)
{
    float lo = x[0], hi = x[0], pair[2];
    for (int i = 1; i < kv->D; i++) {
        lo = x[i] < lo ? x[i] : lo;
        hi = x[i] > hi ? x[i] : hi;
    }
    pair[0] = (hi - lo) / 255.0f;
    pair[1] = lo;
    for (int i = 0; i < kv->D; i++) {
        float q = pair[0] > 0 ? nearbyintf((x[i] - lo) / pair[0]) : 0.0f;
        code[i] = (uint8_t)(q < 0 ? 0 : q > 255 ? 255 : q);
    }
    memcpy(scale, pair, sizeof pair);
}

/* E8M0 code of 2^ceil(log2(amax/6)). */
static uint8_t fp4_scale(float amax_)
{
    int ex;
    if (!(amax_ > 0)) return 0;
    float m = frexpf(amax_ / 6.0f, &ex);
    int c = 127 + (m == 0.5f ? ex - 1 : ex);
    return (uint8_t)(c < 1 ? 1 : c > 254 ? 254 : c);
}

static void put_fp4(const kern_kv_layer *kv, const float *x, uint8_t *code, uint8_t *scale)
{
    memset(code, 0, ((size_t)kv->D + 1) / 2);
    for (int b = 0; b * 16 < kv->D; b++) {
        int n = kv->D - b * 16 < 16 ? kv->D - b * 16 : 16;
        scale[b] = fp4_scale(amax(x + b * 16, n));
        float s = scale[b] ? num_decode(NUM_F8_E8M0, scale[b]) : 1.0f;
        for (int i = b * 16; i < b * 16 + n; i++)
            code[i / 2] |= (uint8_t)(num_encode(NUM_F4_E2M1, x[i] / s) << (4 * (i & 1)));
    }
}

static uint64_t kv_put(const kern_kv_layer *kv, int which, int head, int32_t slot, const float *x)
{
    uint8_t *code = kern__kv_code(kv, which, head, slot),
            *scale = kern__kv_scale(kv, which, head, slot);
    switch (kv->type) {
    case KV_FP8_E4M3:
    case KV_FP8_E5M2:
        return put_fp8(kv, which, head, x, code);
    case KV_F32:
        memcpy(code, x, sizeof(float) * (size_t)kv->D);
        return 0;
    case KV_INT8:
        put_int8(kv, x, code, scale);
        return 0;
    case KV_FP4:
        put_fp4(kv, x, code, scale);
        return 0;
    default:
        for (int i = 0; i < kv->D; i++) {
            uint16_t h = num_f32_to_bf16(x[i]);
            memcpy(code + 2 * i, &h, 2);
        }
        return 0;
    }
}

const kern__ops kern__ops_ref = {.name = "ref",
                                 .rmsnorm = rmsnorm,
                                 .layernorm = layernorm,
                                 .gated_rmsnorm = gated_rmsnorm,
                                 .add = add,
                                 .add_scaled = add_scaled,
                                 .scale = scale,
                                 .softcap = softcap,
                                 .sigmoid_mul = sigmoid_mul,
                                 .rope = rope,
                                 .rope_pairs = rope_pairs,
                                 .act = act,
                                 .glu = glu,
                                 .head_rows = head_rows,
                                 .conv_silu = kern__ref_conv_silu,
                                 .delta = kern__ref_delta,
                                 .route = kern__ref_route,
                                 .attention = kern__ref_attention,
                                 .round_fp8 = round_fp8,
                                 .round_int = round_int,
                                 .amax = amax,
                                 .quant_i8 = quant_i8,
                                 .split_bf16 = split_bf16,
                                 .kv_put = kv_put};
