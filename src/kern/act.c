/* What becomes of the input of a linear. One rule per `a:` axis, as the checkpoint libraries apply
 * it (the values a model was measured with):
 *
 *   fp8     s = amax/448 (e5m2: 57344) of the token or group, static: s = input_scale;
 *           value = fp8(x/s) * s
 *   int     s = amax/((2^b-1)/2), static: s = input_scale; codes -2^(b-1)..2^(b-1)-1
 *   nvfp4   s = E4M3(g*amax16/6), 0 -> 0.125; value = E2M1(x*g/s) * s/g;
 *           g = 1/input_global, or 2688/amax of the row where the checkpoint gives none
 *   mx      blocks of 32, power-of-two scale by num_mx_scale
 *   16-bit  and f32: nothing, computed in f32
 *
 * Then the values become what the kernel multiplies: f32, int8 with scales along K, or one or two
 * bf16 terms. A dynamic per-tensor scale is taken per token, so that a row never depends on its
 * neighbours in the batch. Columns beyond K are zero. */
#include <string.h>
#include "kern/ops.h"

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

size_t kern__acts_bytes(int64_t M, int64_t K)
{
    size_t kp = round_up((size_t)K, KERN_KPAD), m = (size_t)M;
    return m * kp * 4 + m * (kp / 16 + 1) * 8 +
           1024; /* f32, or hi+lo, or codes; scales and sums of 16 */
}

void kern__acts_place(const kern__act_plan *p, int64_t M, void *mem, kern__acts *out)
{
    size_t cells = (size_t)(M * p->Kp);
    char *at = mem;
    memset(out, 0, sizeof *out);
    out->M = M;
    out->Kp = p->Kp;
    if (p->kind == ACT_F32) {
        out->f32 = (float *)(void *)at;
    } else if (p->kind == ACT_BF16) {
        out->hi = (uint16_t *)(void *)at;
        if (p->terms > 1) out->lo = out->hi + round_up(cells, 32);
        out->scale = (float *)(void *)(out->hi + (size_t)p->terms * round_up(cells, 32));
    } else {
        out->groups = (p->Kp + p->group - 1) / p->group;
        out->i8 = (int8_t *)at;
        at += round_up(cells, 64);
        out->scale = (float *)(void *)at;
        out->sum = (int32_t *)(void *)(out->scale + round_up((size_t)(M * out->groups), 16));
    }
}

static void emulate_fp8(const kern__act_plan *p, const kern__ops *ops, float *v, int64_t K,
                        int64_t group)
{
    float max = p->a.type == NUM_F8_E4M3 ? 448.0f : 57344.0f;
    for (int64_t k = 0; k < K; k += group) {
        int64_t n = K - k < group ? K - k : group;
        float s = p->in_scale > 0 ? p->in_scale : ops->amax(v + k, n) / max;
        if (s > 0) ops->round_fp8(v + k, n, s, max, s);
    }
}

static void emulate_int(const kern__act_plan *p, const kern__ops *ops, float *v, int64_t K,
                        int64_t group)
{
    int bits = num_infos[p->a.type].bits;
    float half = (float)((1 << bits) - 1) / 2, lo = (float)-(1 << (bits - 1)),
          hi = (float)((1 << (bits - 1)) - 1);
    for (int64_t k = 0; k < K; k += group) {
        int64_t n = K - k < group ? K - k : group;
        float s = p->in_scale > 0 ? p->in_scale : ops->amax(v + k, n) / half;
        if (!(s > 0)) continue;
        if (p->in_zero == 0) {
            ops->round_int(v + k, n, s, lo, hi, s);
            continue;
        }
        for (int64_t i = k; i < k + n; i++) {
            float q = nearbyintf(v[i] / s) + p->in_zero;
            q = q < lo ? lo : q > hi ? hi : q;
            v[i] = (q - p->in_zero) * s;
        }
    }
}

static void emulate_nvfp4(const kern__act_plan *p, const kern__ops *ops, float *v, int64_t K)
{
    float all = ops->amax(v, K);
    float g = p->in_global > 0 ? 1.0f / p->in_global : all > 0 ? 2688.0f / all : 1.0f;
    for (int64_t k = 0; k < K; k += 16) {
        int64_t n = K - k < 16 ? K - k : 16;
        float s = num_round(NUM_F8_E4M3, g * ops->amax(v + k, n) / 6.0f);
        if (!(s > 0)) s = 0.125f;
        for (int64_t i = k; i < k + n; i++)
            v[i] = num_round(NUM_F4_E2M1, v[i] / (s / g)) * s / g;
    }
}

static void emulate_mx(const kern__act_plan *p, const kern__ops *ops, float *v, int64_t K)
{
    int off = p->a.type == NUM_F4_E2M1 ? 2 : 8;
    for (int64_t k = 0; k < K; k += 32) {
        int64_t n = K - k < 32 ? K - k : 32;
        float amax = ops->amax(v + k, n);
        if (!(amax > 0)) continue;
        float s = num_decode(NUM_F8_E8M0, num_mx_scale(amax, off));
        for (int64_t i = k; i < k + n; i++)
            v[i] = num_round(p->a.type, v[i] / s) * s;
    }
}

static void emulate(const kern__act_plan *p, const kern__ops *ops, float *v, int64_t K)
{
    if (p->round_bf16)
        for (int64_t k = 0; k < K; k++)
            v[k] = num_bf16_to_f32(num_f32_to_bf16(v[k]));
    if (!qaxis_quantized(&p->a)) return;
    int64_t group = p->a.gran == Q_GROUP && p->a.group > 0 ? p->a.group : K;
    if (group < 1) return;
    if (p->a.scale == QS_MX)
        emulate_mx(p, ops, v, K);
    else if (p->a.type == NUM_F4_E2M1)
        emulate_nvfp4(p, ops, v, K);
    else if (num_infos[p->a.type].kind == 'I')
        emulate_int(p, ops, v, K, group);
    else
        emulate_fp8(p, ops, v, K, group);
}

void kern__act_emulate(const kern__act_plan *p, float *v, int64_t K)
{
    emulate(p, &kern__ops_ref, v, K);
}

static void to_int8(const kern__act_plan *p, const kern__ops *ops, const float *v, int64_t m,
                    const kern__acts *a)
{
    int lo = p->div > 127.2f ? -128 : -127;
    for (int64_t g = 0, k = 0; k < p->Kp; g++, k += p->group) {
        int64_t n = p->Kp - k < p->group ? p->Kp - k : p->group;
        float s = p->fixed_scale > 0 ? p->fixed_scale : ops->amax(v + k, n) / p->div;
        int64_t i = m * a->groups + g;
        a->scale[i] = s;
        a->sum[i] = ops->quant_i8(v + k, n, s > 0 ? s : 1.0f, p->fixed_scale > 0 ? -128 : lo, 127,
                                  a->i8 + m * a->Kp + k);
    }
}

/* Codes instead of values: what they are multiplied with goes to a->scale[m]. */
static void to_codes(const kern__act_plan *p, const kern__ops *ops, float *v, int64_t m,
                     const kern__acts *a)
{
    bool integer = num_infos[p->a.type].kind == 'I';
    int bits = num_infos[p->a.type].bits;
    float max = p->a.type == NUM_F8_E4M3 ? 448.0f : 57344.0f;
    float half = integer ? (float)((1 << bits) - 1) / 2 : max;
    float s = p->in_scale > 0 ? p->in_scale : ops->amax(v, p->K) / half;
    a->scale[m] = s;
    if (!(s > 0)) s = 1.0f;
    if (integer)
        ops->round_int(v, p->K, s, (float)-(1 << (bits - 1)), (float)((1 << (bits - 1)) - 1), 1.0f);
    else
        ops->round_fp8(v, p->K, s, max, 1.0f);
}

void kern__act_row(const kern__act_plan *p, const kern__ops *ops, const float *x, int64_t m,
                   const kern__acts *a, float *tmp)
{
    float *v = p->kind == ACT_F32 ? a->f32 + m * p->Kp : tmp;
    if (p->perm) {
        for (int64_t k = 0; k < p->K; k++)
            v[k] = x[p->perm[k]] * (p->pre_scale ? p->pre_scale[p->perm[k]] : 1.0f);
    } else if (p->pre_scale) {
        for (int64_t k = 0; k < p->K; k++)
            v[k] = x[k] * p->pre_scale[k];
    } else {
        memcpy(v, x, (size_t)p->K * sizeof *v);
    }
    memset(v + p->K, 0, (size_t)(p->Kp - p->K) * sizeof *v);
    if (p->row_scale)
        to_codes(p, ops, v, m, a);
    else
        emulate(p, ops, v, p->K);
    if (p->kind == ACT_I8)
        to_int8(p, ops, v, m, a);
    else if (p->kind == ACT_BF16)
        ops->split_bf16(v, p->Kp, a->hi + m * p->Kp, a->lo ? a->lo + m * p->Kp : NULL);
}

bool kern__act_equal(const kern__act_plan *a, const kern__act_plan *b)
{
    return a->kind == b->kind && qaxis_equal(&a->a, &b->a) && a->round_bf16 == b->round_bf16 &&
           a->group == b->group && a->div == b->div && a->fixed_scale == b->fixed_scale &&
           a->terms == b->terms && a->row_scale == b->row_scale && a->in_scale == b->in_scale &&
           a->in_zero == b->in_zero && a->in_global == b->in_global && a->perm == b->perm &&
           a->pre_scale == b->pre_scale && a->K == b->K && a->Kp == b->Kp;
}
