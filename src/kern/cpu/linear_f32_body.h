/* Linear rows with f32 inputs, for any panel layout: included by avx2/linear.c and
 * avx512/linear.c.
 *
 * Up to 8 rows of X ("direct"): codes are decoded in registers, each decoded vector of 16 weight
 * rows is multiplied with all rows of X, and group scales are applied to the sum of a group:
 *
 *   tot[m] += scale[g] * (sum_k code * x[m][k] - zero[g] * sum_k x[m][k])
 *
 * Several panels are walked at once, so that there are enough independent chains and read streams.
 *
 * More rows ("panels"): a panel is decoded once with scales into f32 [Kp][16] that stays in L2,
 * then multiplied by register tiles. An fp8 NaN code reads as 480 (E4M3): loaders refuse NaN. */
#include "kern/cpu/simd.h"

/* xs[m*groups+g] = sum of x over group g, for zero points. */
INLINE void group_sums(const kern__prep *w, const kern__acts *a, float *xs)
{
    for (int64_t m = 0; m < a->M; m++)
        for (int64_t g = 0; g < w->groups; g++) {
            int64_t end = (g + 1) * w->group < w->K ? (g + 1) * w->group : w->K;
            float s = 0;
            for (int64_t k = g * w->group; k < end; k++)
                s += a->f32[m * a->Kp + k];
            xs[m * w->groups + g] = s;
        }
}

/* A block of codes along K for NP panels. Narrow codes go by 32, so that shifts are constants. */
INLINE void direct_step(const int f, const int MR, const int NP, const uint8_t *const *b, int64_t k,
                        const vlut lut, const float *x, int64_t ldx, vf acc[4][8])
{
    const int step = FMT_STEP(f);
    UNROLL
    for (int i = 0; i < NP; i++) {
        vf o[8];
        v_block(f, b[i], k, lut, o);
        _mm_prefetch((const char *)b[i] + k * FMT_BITS(f) * 2 + 1024, _MM_HINT_T0);
        UNROLL
        for (int j = 0; j < step; j++) {
            UNROLL
            for (int m = 0; m < MR; m++)
                acc[i][m] = v_fma(o[j], v_set1(x[m * ldx + k + j]), acc[i][m]);
        }
    }
}

INLINE void direct(const kern__part *p, int64_t panel, const int f, const int MR, const int NP,
                   const float *xs)
{
    const kern__prep *w = p->s->prep;
    const vlut lut = v_lut(w->lut);
    const bool scaled = w->scale_type != NUM_NONE;
    const float *x = p->a->f32;
    const int64_t ldx = p->a->Kp;
    const uint8_t *b[4];
    vf tot[4][8], acc[4][8];
    UNROLL
    for (int i = 0; i < NP; i++) {
        b[i] = prep_panel(w, panel + i);
        UNROLL
        for (int m = 0; m < MR; m++)
            tot[i][m] = v_zero();
    }
    for (int64_t g = 0, k = 0; g < w->groups; g++) {
        int64_t end = g + 1 < w->groups ? (g + 1) * w->group : w->Kp;
        UNROLL
        for (int i = 0; i < NP; i++) {
            UNROLL
            for (int m = 0; m < MR; m++)
                acc[i][m] = v_zero();
        }
        for (; f < FMT_W4 && !(k & 31) && k + 32 <= end; k += 32) {
            UNROLL
            for (int s = 0; s < 32; s += 8)
                direct_step(f, MR, NP, b, (k & ~(int64_t)31) + s, lut, x, ldx, acc);
        }
        for (; k < end; k += FMT_STEP(f))
            direct_step(f, MR, NP, b, k, lut, x, ldx, acc);
        UNROLL
        for (int i = 0; i < NP; i++) {
            if (!scaled) {
                UNROLL
                for (int m = 0; m < MR; m++)
                    tot[i][m] = acc[i][m];
                continue;
            }
            vf s = v_scale(w, panel + i, g);
            if (xs) {
                vf z = v_zeros(w, panel + i, g);
                UNROLL
                for (int m = 0; m < MR; m++)
                    acc[i][m] = v_fnma(z, v_set1(xs[m * w->groups + g]), acc[i][m]);
            }
            UNROLL
            for (int m = 0; m < MR; m++)
                tot[i][m] = v_fma(acc[i][m], s, tot[i][m]);
        }
    }
    UNROLL
    for (int i = 0; i < NP; i++) {
        vf alpha = v_load(prep_alpha(w, panel + i));
        if (f == FMT_E4M3) alpha = v_mul(alpha, v_set1(FP8_POST));
        UNROLL
        for (int m = 0; m < MR; m++)
            v_store_n(p->y + m * p->ldy + (panel + i) * KERN_PANEL, v_mul(tot[i][m], alpha),
                      rows_left(w, panel + i));
    }
}

/* The largest number of panels at a time that registers allow, then one by one. */
#ifdef __AVX512F__
#define NP_OF(mr) ((mr) == 1 ? 4 : (mr) <= 3 ? 2 : 1)
#else
#define NP_OF(mr) ((mr) == 1 ? 2 : 1)
#endif
#define DIRECT(f, mr)                                                                              \
    static void direct_##f##_##mr(const kern__part *p, int64_t lo, int64_t hi, const float *xs)    \
    {                                                                                              \
        for (; lo + NP_OF(mr) <= hi; lo += NP_OF(mr))                                              \
            direct(p, lo, f, mr, NP_OF(mr), xs);                                                   \
        for (; NP_OF(mr) > 1 && lo < hi; lo++)                                                     \
            direct(p, lo, f, mr, 1, xs);                                                           \
    }
#define DIRECTS(f)                                                                                 \
    DIRECT(f, 1)                                                                                   \
    DIRECT(f, 2) DIRECT(f, 3) DIRECT(f, 4) DIRECT(f, 5) DIRECT(f, 6) DIRECT(f, 7) DIRECT(f, 8)
DIRECTS(FMT_W2)
DIRECTS(FMT_W3)
DIRECTS(FMT_W4)
DIRECTS(FMT_I8)
DIRECTS(FMT_E4M3)
DIRECTS(FMT_E5M2)
DIRECTS(FMT_BF16)
DIRECTS(FMT_F16)
DIRECTS(FMT_F32)
typedef void direct_fn(const kern__part *p, int64_t lo, int64_t hi, const float *xs);
#define DIRECT_ROW(f)                                                                              \
    {                                                                                              \
        direct_##f##_1, direct_##f##_2, direct_##f##_3, direct_##f##_4, direct_##f##_5,            \
            direct_##f##_6, direct_##f##_7, direct_##f##_8                                         \
    }
static direct_fn *const direct_fns[9][8] = {
    DIRECT_ROW(FMT_W2),   DIRECT_ROW(FMT_W3),   DIRECT_ROW(FMT_W4),
    DIRECT_ROW(FMT_I8),   DIRECT_ROW(FMT_E4M3), DIRECT_ROW(FMT_E5M2),
    DIRECT_ROW(FMT_BF16), DIRECT_ROW(FMT_F16),  DIRECT_ROW(FMT_F32)};

/* ---- panels ------------------------------------------------------------------------------ */

/* out[k][16] = dequantized weights of one panel without alpha. */
INLINE void panel_f32(const kern__prep *w, int64_t panel, const int f, float *out)
{
    const int step = FMT_STEP(f);
    const vlut lut = v_lut(w->lut);
    const uint8_t *b = prep_panel(w, panel);
    const vf undo = v_set1(FP8_POST);
    for (int64_t g = 0, k = 0; g < w->groups; g++) {
        int64_t end = g + 1 < w->groups ? (g + 1) * w->group : w->Kp;
        vf s = v_scale(w, panel, g), z = v_zero();
        if (w->zero_type != NUM_NONE) z = v_zeros(w, panel, g);
        for (; k < end; k += step) {
            vf o[8];
            v_block(f, b, k, lut, o);
            UNROLL
            for (int j = 0; j < step; j++) {
                if (f == FMT_E4M3) o[j] = v_mul(o[j], undo);
                v_store(out + (k + j) * KERN_PANEL, v_mul(v_sub(o[j], z), s));
            }
        }
    }
}

#ifdef __AVX512F__
#define TILE_M 12
#define TILE_P 2
#else
#define TILE_M 6
#define TILE_P 1
#endif

INLINE void tile(const kern__part *p, const float *wp, int64_t panel, int64_t m0, const int MR,
                 const int NP)
{
    const kern__prep *w = p->s->prep;
    const float *x = p->a->f32 + m0 * p->a->Kp;
    const int64_t ldx = p->a->Kp, Kp = w->Kp;
    vf acc[TILE_P][TILE_M];
    UNROLL
    for (int i = 0; i < NP; i++) {
        UNROLL
        for (int m = 0; m < MR; m++)
            acc[i][m] = v_zero();
    }
    for (int64_t k = 0; k < Kp; k++) {
        vf b[TILE_P];
        UNROLL
        for (int i = 0; i < NP; i++)
            b[i] = v_load(wp + (i * Kp + k) * KERN_PANEL);
        UNROLL
        for (int m = 0; m < MR; m++) {
            vf a = v_set1(x[m * ldx + k]);
            UNROLL
            for (int i = 0; i < NP; i++)
                acc[i][m] = v_fma(b[i], a, acc[i][m]);
        }
    }
    UNROLL
    for (int i = 0; i < NP; i++) {
        vf alpha = v_load(prep_alpha(w, panel + i));
        UNROLL
        for (int m = 0; m < MR; m++)
            v_store_n(p->y + (m0 + m) * p->ldy + (panel + i) * KERN_PANEL, v_mul(acc[i][m], alpha),
                      rows_left(w, panel + i));
    }
}

static void tiles(const kern__part *p, const float *wp, int64_t panel, int np)
{
    int64_t m = 0, M = p->a->M;
    for (; m + TILE_M <= M; m += TILE_M) {
        if (np == TILE_P)
            tile(p, wp, panel, m, TILE_M, TILE_P);
        else
            tile(p, wp, panel, m, TILE_M, 1);
    }
    for (; m + 4 <= M; m += 4) {
        if (np == TILE_P)
            tile(p, wp, panel, m, 4, TILE_P);
        else
            tile(p, wp, panel, m, 4, 1);
    }
    for (; m < M; m++) {
        if (np == TILE_P)
            tile(p, wp, panel, m, 1, TILE_P);
        else
            tile(p, wp, panel, m, 1, 1);
    }
}

static void decode_panel(const kern__prep *w, int64_t panel, float *out)
{
    switch (fmt_of(w)) {
    case FMT_W2:
        panel_f32(w, panel, FMT_W2, out);
        break;
    case FMT_W3:
        panel_f32(w, panel, FMT_W3, out);
        break;
    case FMT_W4:
        panel_f32(w, panel, FMT_W4, out);
        break;
    case FMT_I8:
        panel_f32(w, panel, FMT_I8, out);
        break;
    case FMT_E4M3:
        panel_f32(w, panel, FMT_E4M3, out);
        break;
    case FMT_E5M2:
        panel_f32(w, panel, FMT_E5M2, out);
        break;
    case FMT_BF16:
        panel_f32(w, panel, FMT_BF16, out);
        break;
    case FMT_F16:
        panel_f32(w, panel, FMT_F16, out);
        break;
    default:
        panel_f32(w, panel, FMT_F32, out);
    }
}

static void part_f32(const kern__part *p, int64_t lo, int64_t hi)
{
    const kern__prep *w = p->s->prep;
    float *tmp = p->tmp;
    if (p->a->M <= 8) {
        bool zeros = w->zero_type != NUM_NONE;
        if (zeros) group_sums(w, p->a, tmp);
        direct_fns[fmt_of(w)][p->a->M - 1](p, lo, hi, zeros ? tmp : NULL);
        return;
    }
    for (int64_t i = lo; i < hi; i += TILE_P) {
        int np = hi - i < TILE_P ? (int)(hi - i) : TILE_P;
        for (int j = 0; j < np; j++)
            decode_panel(w, i + j, tmp + j * w->Kp * KERN_PANEL);
        tiles(p, tmp, i, np);
    }
}

static void plan_f32(const kern_linear_desc *d, int shard, int bucket, kern__act_plan *p)
{
    (void)d, (void)shard, (void)bucket;
    p->kind = ACT_F32;
}
