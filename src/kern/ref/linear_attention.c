/* Plain C twins of linear attention: the causal convolution and the gated delta rule, token by
 * token, state in place. The caller has cleared the state of a sequence that starts. */
#include <string.h>
#include "kern/ops.h"

/* state[c][0..W-1) holds the last W-1 inputs of the channel, oldest first. */
void kern__ref_conv_silu(float *x, int64_t ld, int64_t c0, int64_t c1, int W, const float *w,
                         int64_t rows, float *state)
{
    for (int64_t c = c0; c < c1; c++) {
        const float *wc = w + c * W;
        float *past = state + (c - c0) * (W - 1);
        for (int64_t t = 0; t < rows; t++) {
            float in = x[t * ld + c], sum = 0;
            for (int j = 0; j < W - 1; j++)
                sum += wc[j] * past[j];
            sum += wc[W - 1] * in;
            if (W > 1) {
                memmove(past, past + 1, (size_t)(W - 2) * sizeof *past);
                past[W - 2] = in;
            }
            x[t * ld + c] = sum / (1.0f + expf(-sum));
        }
    }
}

static void normalize(const float *x, int n, float scale, float *out)
{
    double ss = 0;
    for (int i = 0; i < n; i++)
        ss += (double)x[i] * x[i];
    float r = (float)(1.0 / sqrt(ss + 1e-6)) * scale;
    for (int i = 0; i < n; i++)
        out[i] = x[i] * r;
}

void kern__ref_delta(const kern_delta_args *a, const kern_seq *s, int h, int v0, int v1,
                     float *state, float *tmp)
{
    int hk = h / (a->Hv / a->Hk), Dk = a->Dk, Dv = a->Dv;
    float *q = tmp, *k = q + Dk, *d = k + Dk;
    for (int64_t t = s->row0; t < s->row0 + s->n_rows; t++) {
        const float *v = a->v + t * a->ldv + (int64_t)h * Dv;
        float *out = a->out + (t * a->Hv + h) * Dv;
        float decay = expf(a->g[t * a->Hv + h]), beta = a->beta[t * a->Hv + h];
        normalize(a->q + t * a->ldq + (int64_t)hk * Dk, Dk, 1.0f / sqrtf((float)Dk), q);
        normalize(a->k + t * a->ldk + (int64_t)hk * Dk, Dk, 1.0f, k);
        for (int j = v0; j < v1; j++)
            out[j] = d[j] = 0;
        for (int i = 0; i < Dk; i++)
            for (int j = v0; j < v1; j++) {
                state[i * Dv + j] *= decay;
                d[j] += state[i * Dv + j] * k[i];
            }
        for (int j = v0; j < v1; j++)
            d[j] = beta * (v[j] - d[j]);
        for (int i = 0; i < Dk; i++)
            for (int j = v0; j < v1; j++) {
                state[i * Dv + j] += k[i] * d[j];
                out[j] += state[i * Dv + j] * q[i];
            }
    }
}
