/* Rotary position tables as transformers computes them (modeling_rope_utils.py, version 5): inverse
 * frequencies in double, rounded to f32; the angle is the f32 product with the position.
 *
 *   linear    inv / factor
 *   dynamic   base' = base * ((f*L/M) - (f-1))^(d/(d-2)) once the sequence is longer than M
 *   llama3    long wavelengths divided by factor, short kept, smooth between
 *   yarn      ramp between interpolated and original over the correction range; cos and sin times
 *             the attention factor
 *   longrope  factors for each lane, short or long by the length of the sequence
 *
 * dynamic and longrope read the length of the whole sequence: when it grows past a border, keys in
 * the cache were rotated by another table and must be computed again (model_rope_key). */
#include "model/model_internal.h"
#include <math.h>

static double llama3_freq(const rope_config *r, double inv)
{
    double wave = 2 * M_PI / inv, old = (double)r->original_max_position;
    if (wave < old / r->high_freq_factor) return inv;
    if (wave > old / r->low_freq_factor) return inv / r->factor;
    double smooth = (old / wave - r->low_freq_factor) / (r->high_freq_factor - r->low_freq_factor);
    return (1 - smooth) * inv / r->factor + smooth * inv;
}

static double yarn_dim(const rope_config *r, double turns, double dim)
{
    return dim * log((double)r->original_max_position / (turns * 2 * M_PI)) / (2 * log(r->theta));
}

static double yarn_freq(const rope_config *r, double inv, int64_t i, double dim, double factor)
{
    double low = yarn_dim(r, r->beta_fast, dim), high = yarn_dim(r, r->beta_slow, dim);
    if (r->truncate) low = floor(low), high = ceil(high);
    if (low < 0) low = 0;
    if (high > dim - 1) high = dim - 1;
    if (low == high) high += 0.001;
    double ramp = ((double)i - low) / (high - low);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return inv / factor * ramp + inv * (1 - ramp);
}

static double yarn_mscale(double factor, double m)
{
    return factor <= 1 ? 1.0 : 0.1 * m * log(factor) + 1.0;
}

/* Factor by which a longer context was made: as given, or from the two lengths. */
static double stretch(const rope_config *r, int64_t max_position)
{
    if (r->factor != 1.0) return r->factor;
    return (double)max_position / (double)r->original_max_position;
}

double model__rope_attention(const rope_config *r, int64_t max_position)
{
    if (r->attention_factor > 0) return r->attention_factor;
    double f = stretch(r, max_position);
    if (r->kind == ROPE_YARN) {
        if (r->mscale != 0 && r->mscale_all_dim != 0)
            return yarn_mscale(f, r->mscale) / yarn_mscale(f, r->mscale_all_dim);
        return yarn_mscale(f, 1.0);
    }
    if (r->kind == ROPE_LONGROPE)
        return f <= 1 ? 1.0 : sqrt(1 + log(f) / log((double)r->original_max_position));
    return 1.0;
}

void model__rope_inv(const rope_config *r, int64_t rot, int64_t max_position, int64_t seq_len,
                     float *inv)
{
    double dim = (double)rot, theta = r->theta;
    if (r->kind == ROPE_DYNAMIC && seq_len > max_position) {
        double grow = r->factor * (double)seq_len / (double)max_position - (r->factor - 1);
        theta *= pow(grow, dim / (dim - 2));
    }
    const double *lanes = r->kind != ROPE_LONGROPE             ? NULL
                          : seq_len > r->original_max_position ? r->long_factor
                                                               : r->short_factor;
    for (int64_t i = 0; i < rot / 2; i++) {
        double v = 1.0 / pow(theta, 2.0 * (double)i / dim);
        if (r->kind == ROPE_LINEAR)
            v /= r->factor;
        else if (r->kind == ROPE_LLAMA3)
            v = llama3_freq(r, v);
        else if (r->kind == ROPE_YARN)
            v = yarn_freq(r, v, i, dim, stretch(r, max_position));
        else if (lanes)
            v /= lanes[i];
        inv[i] = (float)v;
    }
}

void model__rope_fill(const float *inv, int64_t half, double attention, int64_t pos, float *cosv,
                      float *sinv)
{
    for (int64_t i = 0; i < half; i++) {
        float angle = inv[i] * (float)pos;
        cosv[i] = (float)(cos((double)angle) * attention);
        sinv[i] = (float)(sin((double)angle) * attention);
    }
}

int64_t model_rope_key(const model *m, int64_t seq_len)
{
    const rope_config *r = &m->arch->rope[0];
    if (r->kind == ROPE_DYNAMIC) return seq_len > m->cfg->max_position ? seq_len : 0;
    if (r->kind == ROPE_LONGROPE) return seq_len > r->original_max_position;
    return 0;
}

void model_rope_row(const ckpt_config *c, int64_t pos, int64_t seq_len, float *cosv, float *sinv)
{
    int64_t rot = (int64_t)((double)c->head_dim * c->rope.partial_rotary_factor), half = rot / 2;
    float *inv = xmalloc(sizeof *inv * (size_t)half);
    model__rope_inv(&c->rope, rot, c->max_position, seq_len, inv);
    model__rope_fill(inv, half, model__rope_attention(&c->rope, c->max_position), pos, cosv, sinv);
    mem_free(inv);
}
