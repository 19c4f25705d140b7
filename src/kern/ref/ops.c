/* Plain C twins of the small operators, the KV store and attention: the definition that faster
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

static void rope(float *x, int rot_dim, const float *cosv, const float *sinv)
{
    int half = rot_dim / 2;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosv[i] - b * sinv[i];
        x[i + half] = b * cosv[i] + a * sinv[i];
    }
}

static float activate(kern_glu act, float x)
{
    switch (act) {
    case KERN_SILU:
        return x / (1.0f + expf(-x));
    case KERN_GELU_TANH:
        return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case KERN_GELU:
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case KERN_RELU:
        return x > 0 ? x : 0;
    case KERN_RELU2:
        return x > 0 ? x * x : 0;
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

static void glu(kern_glu act, const float *g, const float *u, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = activate(act, g[i]) *
                 (act == KERN_SWIGLU_OAI ? fminf(fmaxf(u[i], -7.0f), 7.0f) + 1.0f : u[i]);
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

/* ---- attention ----------------------------------------------------------------------------------
 */

#define REF_TILE 32 /* keys decoded at a time */

typedef struct attn_job {
    kern_dev *d;
    const kern_attn_args *a;
} attn_job;

/* One query row of one head, online softmax over tiles of decoded keys and values. */
typedef struct attn_row {
    const float *q;
    float *out, max, sum;
    int64_t lo, hi; /* keys seen: [lo,hi) */
} attn_row;

static void row_tile(attn_row *r, const float *k, const float *v, int64_t t0, int n, int D,
                     float scale)
{
    for (int t = 0; t < n; t++) {
        if (t0 + t < r->lo || t0 + t >= r->hi) continue;
        float s = 0;
        for (int i = 0; i < D; i++)
            s += r->q[i] * k[t * D + i];
        s *= scale;
        if (s > r->max) {
            float c = expf(r->max - s);
            r->sum *= c;
            for (int i = 0; i < D; i++)
                r->out[i] *= c;
            r->max = s;
        }
        float p = expf(s - r->max);
        r->sum += p;
        for (int i = 0; i < D; i++)
            r->out[i] += p * v[t * D + i];
    }
}

static void attend(const attn_job *j, const kern_seq *q, int hk, int row, float *buffer)
{
    const kern_attn_args *a = j->a;
    const kern_kv_layer *kv = a->kv;
    int D = kv->D, G = a->H / kv->Hk;
    int64_t pos = (int64_t)q->kv_len - q->n_rows + row;
    int64_t lo = a->window > 0 && pos - a->window + 1 > 0 ? pos - a->window + 1 : 0;
    float *k = buffer, *v = buffer + (size_t)REF_TILE * (size_t)D;
    for (int g = 0; g < G; g++) {
        int64_t at = q->row0 + row;
        attn_row r = {a->q + at * a->ldq + (hk * G + g) * D,
                      a->out + at * a->ldo + (hk * G + g) * D,
                      -INFINITY,
                      0,
                      lo,
                      pos + 1};
        memset(r.out, 0, (size_t)D * sizeof(float));
        for (int64_t t = lo; t <= pos; t += REF_TILE) {
            int n = pos + 1 - t < REF_TILE ? (int)(pos + 1 - t) : REF_TILE;
            kern_kv_read(kv, 0, hk, q->pages, t, n, k);
            kern_kv_read(kv, 1, hk, q->pages, t, n, v);
            row_tile(&r, k, v, t, n, D, a->scale);
        }
        for (int i = 0; i < D && r.sum > 0; i++)
            r.out[i] /= r.sum;
    }
}

static void attn_part(void *arg, int index, int n)
{
    attn_job *j = arg;
    float *buffer = kern__thread_buffer(j->d, index);
    int64_t item = 0;
    for (int s = 0; s < j->a->n_seqs; s++)
        for (int row = 0; row < j->a->seqs[s].n_rows; row++)
            for (int hk = 0; hk < j->a->kv->Hk; hk++)
                if (item++ % n == index) attend(j, &j->a->seqs[s], hk, row, buffer);
}

static bool attention(kern_dev *d, const kern_attn_args *a)
{
    attn_job j = {d, a};
    team_run(d->team, attn_part, &j);
    return true;
}

const kern__ops kern__ops_ref = {.name = "ref",
                                 .rmsnorm = rmsnorm,
                                 .add = add,
                                 .rope = rope,
                                 .glu = glu,
                                 .attention = attention,
                                 .round_fp8 = round_fp8,
                                 .round_int = round_int,
                                 .amax = amax,
                                 .quant_i8 = quant_i8,
                                 .split_bf16 = split_bf16,
                                 .kv_put = kv_put};
