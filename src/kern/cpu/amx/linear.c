/* Linear rows for larger batches by AMX bf16 tiles. Two panels of W become bf16 in the tile order
 * ([k/2][16 rows][2], which bf16 weights already have), stay in L2, and are multiplied with all
 * rows of X in 32x32 blocks of four accumulator tiles.
 *
 * A value that bf16 cannot hold is a sum of two bf16 terms, hi + lo, which keeps 16 bits of it:
 *
 *   inputs    one term where quantized weights meet a 16-bit input: the rounding that such a
 *             checkpoint gets on every GPU; fp8 and int8 codes per token or tensor are exact in
 *             one term, their scale comes at the end; two terms for all other inputs
 *   weights   one term when codes are exact in bf16 and the scale can wait (channel), or when
 *             the input is rounded by auto; two terms else
 *
 * lo*lo is left out (2^-16 of the product).
 *
 * The tile configuration is loaded at the start of a part and released at its end, so that a
 * sleeping worker carries no tile state. Refused: batches up to 8, spec and f32 (computed in f32
 * proper), int8 by force (VNNI does that). */
#include "kern/cpu/simd.h"

#define TERM_BYTES(Kp) ((size_t)(Kp)*KERN_PANEL * 2)

static const struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} config __attribute__((aligned(64))) = {.palette = 1,
                                         .colsb = {64, 64, 64, 64, 64, 64, 64, 64},
                                         .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* Rows k (a) and k+1 (b) of a panel to one tile row; what rounding lost comes back in *a, *b. */
INLINE void put_pair(vf *a, vf *b, uint8_t *out)
{
    const __m512i one = _mm512_set1_epi32(1), half = _mm512_set1_epi32(0x7fff);
    const __m512i high = _mm512_set1_epi32((int32_t)0xffff0000u);
    __m512i u = _mm512_castps_si512(*a), v = _mm512_castps_si512(*b);
    u = _mm512_add_epi32(u,
                         _mm512_add_epi32(half, _mm512_and_si512(_mm512_srli_epi32(u, 16), one)));
    v = _mm512_add_epi32(v,
                         _mm512_add_epi32(half, _mm512_and_si512(_mm512_srli_epi32(v, 16), one)));
    u = _mm512_and_si512(u, high);
    v = _mm512_and_si512(v, high);
    _mm512_store_si512(out, _mm512_or_si512(_mm512_srli_epi32(u, 16), v));
    *a = _mm512_sub_ps(*a, _mm512_castsi512_ps(u));
    *b = _mm512_sub_ps(*b, _mm512_castsi512_ps(v));
}

INLINE void panel_bf16(const kern__prep *w, int64_t panel, const int f, const int terms,
                       uint8_t *hi, uint8_t *lo)
{
    const int step = FMT_STEP(f);
    const vlut lut = v_lut(w->lut);
    const uint8_t *b = prep_panel(w, panel);
    const vf undo = v_set1(FP8_POST);
    const bool zeros = w->zero_type != NUM_NONE;
    for (int64_t g = 0, k = 0; g < w->groups; g++) {
        int64_t end = g + 1 < w->groups ? (g + 1) * w->group : w->Kp;
        vf s = v_scale(w, panel, g), z = zeros ? v_zeros(w, panel, g) : v_zero();
        for (; k < end;) {
            vf o[8];
            v_block(f, b, k, lut, o);
            if (f == FMT_F32) v_block(f, b, k + 1, lut, o + 1); /* two make a pair */
            UNROLL
            for (int j = 0; j < (step < 2 ? 2 : step); j += 2) {
                for (int i = j; i < j + 2; i++) {
                    if (f == FMT_E4M3) o[i] = v_mul(o[i], undo);
                    o[i] = v_mul(v_sub(o[i], z), s);
                }
                size_t at = (size_t)(k + j) * 32;
                put_pair(&o[j], &o[j + 1], hi + at);
                if (terms > 1) put_pair(&o[j], &o[j + 1], lo + at);
            }
            k += step < 2 ? 2 : step;
        }
    }
}

#define DECODE(f)                                                                                  \
    if (terms > 1)                                                                                 \
        panel_bf16(w, panel, f, 2, hi, lo);                                                        \
    else                                                                                           \
        panel_bf16(w, panel, f, 1, hi, lo)
static void decode(const kern__prep *w, int64_t panel, int terms, uint8_t *hi, uint8_t *lo)
{
    switch (fmt_of(w)) {
    case FMT_W2:
        DECODE(FMT_W2);
        break;
    case FMT_W3:
        DECODE(FMT_W3);
        break;
    case FMT_W4:
        DECODE(FMT_W4);
        break;
    case FMT_I8:
        DECODE(FMT_I8);
        break;
    case FMT_E4M3:
        DECODE(FMT_E4M3);
        break;
    case FMT_E5M2:
        DECODE(FMT_E5M2);
        break;
    case FMT_BF16:
        DECODE(FMT_BF16);
        break;
    case FMT_F16:
        DECODE(FMT_F16);
        break;
    default:
        DECODE(FMT_F32);
    }
}

/* One pass over K: accumulators 0..3 += A (32 x K) * B (K x 32). */
INLINE void pass(const uint16_t *a, size_t lda, const uint8_t *b0, const uint8_t *b1, int64_t Kp,
                 const int two_m, const int two_n)
{
    const uint16_t *a1 = a + 16 * lda;
    for (int64_t k = 0; k < Kp; k += 32) {
        _tile_loadd(4, a + k, lda * 2);
        _tile_loadd(6, b0 + k * 32, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two_n) {
            _tile_loadd(7, b1 + k * 32, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (two_m) {
            _tile_loadd(5, a1 + k, lda * 2);
            _tile_dpbf16ps(2, 5, 6);
            if (two_n) _tile_dpbf16ps(3, 5, 7);
        }
    }
}

typedef struct operands {
    const uint8_t *hi[2], *lo[2]; /* of two panels */
    int w_terms;
} operands;

INLINE void passes(const kern__part *p, const operands *b, int64_t m, const int two_m,
                   const int two_n)
{
    const kern__acts *a = p->a;
    size_t lda = (size_t)a->Kp;
    const uint16_t *hi = a->hi + (size_t)m * lda;
    pass(hi, lda, b->hi[0], b->hi[1], a->Kp, two_m, two_n);
    if (a->lo) pass(a->lo + (size_t)m * lda, lda, b->hi[0], b->hi[1], a->Kp, two_m, two_n);
    if (b->w_terms > 1) pass(hi, lda, b->lo[0], b->lo[1], a->Kp, two_m, two_n);
}

static void put_tile(const kern__part *p, const float *c, int64_t panel, int64_t m, int64_t rows)
{
    const kern__prep *w = p->s->prep;
    vf alpha = v_load(prep_alpha(w, panel));
    int n = rows_left(w, panel);
    float *y = p->y + m * p->ldy + panel * KERN_PANEL;
    for (int64_t r = 0; r < rows; r++) {
        vf c16 = v_mul(v_load(c + 16 * r), alpha);
        if (p->plan->row_scale) c16 = v_mul(c16, v_set1(p->a->scale[m + r]));
        v_store_n(y + r * p->ldy, c16, n);
    }
}

static void block32(const kern__part *p, const operands *b, int64_t panel, int np, int64_t m)
{
    float c[4][256] __attribute__((aligned(64)));
    int64_t rows = p->a->M - m < 32 ? p->a->M - m : 32;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (rows > 16 && np > 1)
        passes(p, b, m, 1, 1);
    else if (rows > 16)
        passes(p, b, m, 1, 0);
    else if (np > 1)
        passes(p, b, m, 0, 1);
    else
        passes(p, b, m, 0, 0);
    _tile_stored(0, c[0], 64);
    _tile_stored(1, c[1], 64);
    _tile_stored(2, c[2], 64);
    _tile_stored(3, c[3], 64);
    int64_t first = rows < 16 ? rows : 16;
    for (int i = 0; i < np; i++) {
        put_tile(p, c[i], panel + i, m, first);
        if (rows > 16) put_tile(p, c[2 + i], panel + i, m + 16, rows - 16);
    }
}

static void part_amx(const kern__part *p, int64_t lo, int64_t hi)
{
    const kern__prep *w = p->s->prep;
    bool as_is = w->code == NUM_BF16;
    int terms = as_is ? 1 : p->plan->w_terms;
    uint8_t *mem = (uint8_t *)(((uintptr_t)p->tmp + 63) & ~(uintptr_t)63);
    _tile_loadconfig(&config);
    for (int64_t panel = lo; panel < hi; panel += 2) {
        int np = hi - panel > 1 ? 2 : 1;
        operands b = {.w_terms = terms};
        for (int i = 0; i < np; i++) {
            uint8_t *t = mem + (size_t)(2 * i) * TERM_BYTES(w->Kp);
            b.hi[i] = as_is ? prep_panel(w, panel + i) : t;
            b.lo[i] = t + TERM_BYTES(w->Kp);
            if (!as_is) decode(w, panel + i, terms, t, t + TERM_BYTES(w->Kp));
        }
        for (int64_t m = 0; m < p->a->M; m += 32)
            block32(p, &b, panel, np, m);
    }
    _tile_release();
}

static const char *refuse_amx(const kern_linear_desc *d, int shard, int bucket)
{
    (void)shard;
    if (d->act == KERN_ACT_SPEC) return "spec computes in f32";
    if (d->act == KERN_ACT_F32) return "input is forced to f32";
    if (d->act == KERN_ACT_INT8) return "input is forced to int8";
    return bucket < 2 ? "batch below 9" : NULL;
}

static bool exact_codes(const qtensor *q)
{
    bool one = q->spec.w.gran != Q_GROUP && q->spec.w.gran != Q_BLOCK;
    char kind = num_infos[q->code].kind;
    return one && !q->spec.w.asym && !q->table &&
           (kind == 'I' || num_infos[q->code].bits == 8 || q->code == NUM_BF16);
}

/* fp8 and int8 codes are exact in bf16, and one scale per row of X can wait. */
static bool exact_input(const qtensor *q)
{
    const qaxis *a = &q->spec.a;
    if (!qaxis_quantized(a) || num_infos[a->type].bits != 8 || q->input_zero != 0.0f) return false;
    return a->scale == QS_FLOAT && (a->gran == Q_TOKEN || a->gran == Q_TENSOR);
}

static void plan_amx(const kern_linear_desc *d, int shard, int bucket, kern__act_plan *p)
{
    (void)bucket;
    const qtensor *q = d->shard[shard];
    bool quantized = num_infos[q->code].bits <= 8;
    p->kind = ACT_BF16;
    p->row_scale = d->act == KERN_ACT_AUTO && exact_input(q);
    bool rounded = quantized && !qaxis_quantized(&q->spec.a);
    p->terms = d->act == KERN_ACT_BF16 || rounded || p->row_scale ? 1 : 2;
    p->w_terms = exact_codes(q) || (d->act == KERN_ACT_AUTO && rounded) ? 1 : 2;
}

#define NEEDS (CPU_AVX512 | CPU_AMX_BF16)
const kern_linear_row kern__rows_amx[] = {
    {"amx-w4", "w4p16", NEEDS, refuse_amx, plan_amx, part_amx},
    {"amx-w8", "w8p16", NEEDS, refuse_amx, plan_amx, part_amx},
    {"amx-w16", "w16p16", NEEDS, refuse_amx, plan_amx, part_amx},
    {"amx-w32", "w32p16", NEEDS, refuse_amx, plan_amx, part_amx},
};
