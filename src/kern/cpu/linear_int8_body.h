/* Linear rows with int8 inputs: included by avx512/linear_int8.c and avx2/linear_int8.c. A byte dot
 * product multiplies unsigned weights u = q + bias with signed inputs c, so
 *
 *   sum q*c = sum u*c - bias * sum c
 *
 * and the second sum is known from the input alone: the accumulator starts at -bias * sum c instead
 * of 0. A zero point is one more such term, with its scale. The input is quantized in groups of 32
 * along K (16 for nvfp4) that never cross a weight group; a: int8 per token or static multiplies
 * whole rows.
 *
 *   fp4 codes become 2*value + 12 (0..24) by a byte shuffle; the factor 1/2 goes into alpha.
 *   AVX2 has no exact byte dot product: vpmaddubsw adds pairs in 16 bits, which hold weights up to
 * 24 but not up to 255, so eight-bit weights go as two nibbles (same result, twice the work).
 *
 * Refused: nf4 (no integers), float zero points, groups that are no multiple of 16. */
#include "kern/cpu/simd.h"

enum { U_W2, U_W3, U_W4, U_FP4, U_W8 };
#define U_BITS(f) ((f) == U_W2 ? 2 : (f) == U_W3 ? 3 : (f) == U_W8 ? 8 : 4)

typedef struct vnni_in {
    const int32_t *start; /* [M][groups]: -bias * sum */
    const float *zsum;    /* [M][groups]: scale * sum, for zero points; or NULL */
    int64_t per_scale;    /* input groups in a weight group */
} vnni_in;

#ifdef __AVX512F__
/* acc += u . c in groups of four; `full`: u may exceed 127. */
INLINE vi v_dot(vi acc, vi u, int32_t c, const bool full)
{
    (void)full;
    return _mm512_dpbusd_epi32(acc, u, _mm512_set1_epi32(c));
}
INLINE vi vi_shuffle(vi table, vi i)
{
    return _mm512_shuffle_epi8(table, i);
}
INLINE vi vi_table(const uint8_t *t)
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)t));
}
#else
INLINE __m256i dot8(__m256i acc, __m256i u, __m256i c, const bool full)
{
    const __m256i nib = _mm256_set1_epi8(15);
    if (!full)
        return _mm256_add_epi32(
            acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, c), _mm256_set1_epi16(1)));
    __m256i lo = _mm256_maddubs_epi16(_mm256_and_si256(u, nib), c);
    __m256i hi = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(u, 4), nib), c);
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(lo, _mm256_set1_epi16(1)));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(hi, _mm256_set1_epi16(16)));
}
INLINE vi v_dot(vi acc, vi u, int32_t c, const bool full)
{
    __m256i x = _mm256_set1_epi32(c);
    return I2(dot8(acc.a, u.a, x, full), dot8(acc.b, u.b, x, full));
}
INLINE vi vi_shuffle(vi t, vi i)
{
    return I2(_mm256_shuffle_epi8(t.a, i.a), _mm256_shuffle_epi8(t.b, i.b));
}
INLINE vi vi_table(const uint8_t *t)
{
    __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)t));
    return I2(v, v);
}
#endif

INLINE void dots(const int f, const vi w, const vi lut, const int8_t *x, int64_t ldx, const int MR,
                 vi *acc)
{
    const vi nib = vi_set1(f == U_W2 ? 0x03030303 : f == U_W3 ? 0x07070707 : 0x0f0f0f0f);
    int32_t c;
    if (f == U_W8) {
        UNROLL
        for (int m = 0; m < MR; m++) {
            memcpy(&c, x + m * ldx, 4);
            acc[m] = v_dot(acc[m], w, c, true);
        }
        return;
    }
    vi lo = vi_and(w, nib), hi = vi_and(vi_srli(w, 4), nib);
    if (f == U_FP4) {
        lo = vi_shuffle(lut, lo);
        hi = vi_shuffle(lut, hi);
    }
    UNROLL
    for (int m = 0; m < MR; m++) {
        memcpy(&c, x + m * ldx, 4);
        acc[m] = v_dot(acc[m], lo, c, false);
    }
    UNROLL
    for (int m = 0; m < MR; m++) {
        memcpy(&c, x + m * ldx + 4, 4);
        acc[m] = v_dot(acc[m], hi, c, false);
    }
}

/* A block of codes along K for NP panels. Narrow codes go by 32, so that shifts are constants. */
INLINE void block_step(const int f, const int MR, const int NP, const uint8_t *const *b, int64_t k,
                       const vi lut, const int8_t *x, int64_t ldx, vi acc[4][8])
{
    const int bits = U_BITS(f);
    UNROLL
    for (int i = 0; i < NP; i++) {
        vi v = bits < 4 ? v_narrow(bits, b[i], k) : vi_load(b[i] + k * bits * 2);
        _mm_prefetch((const char *)b[i] + k * bits * 2 + 1024, _MM_HINT_T0);
        dots(f, v, lut, x + k, ldx, MR, acc[i]);
    }
}

INLINE void block(const kern__part *p, const vnni_in *in, int64_t panel, int64_t m0, const int f,
                  const int MR, const int NP)
{
    const kern__prep *w = p->s->prep;
    const kern__acts *a = p->a;
    const int step = f == U_W8 ? 4 : 8;
    const int8_t *x = a->i8 + m0 * a->Kp;
    const int64_t ldx = a->Kp, G = a->groups;
    const float *as = a->scale + m0 * G;
    const int32_t *start = in->start + m0 * G;
    const bool scaled = w->scale_type != NUM_NONE;
    uint8_t table[16];
    for (int i = 0; i < 16; i++)
        table[i] = (uint8_t)(w->ilut[i] + 12);
    const vi lut = vi_table(table);
    const uint8_t *b[4];
    vf tot[4][8], ws[4];
    UNROLL
    for (int i = 0; i < NP; i++) {
        b[i] = prep_panel(w, panel + i);
        ws[i] = v_set1(1.0f);
        UNROLL
        for (int m = 0; m < MR; m++)
            tot[i][m] = v_zero();
    }
    int64_t g = 0, left = 0;
    for (int64_t ag = 0, k = 0; ag < G; ag++) {
        if (scaled && left-- == 0) {
            UNROLL
            for (int i = 0; i < NP; i++)
                ws[i] = v_scale(w, panel + i, g);
            g++;
            left = in->per_scale - 1;
        }
        int64_t end = k + p->plan->group < a->Kp ? k + p->plan->group : a->Kp;
        vi acc[4][8];
        UNROLL
        for (int i = 0; i < NP; i++) {
            UNROLL
            for (int m = 0; m < MR; m++)
                acc[i][m] = vi_set1(start[m * G + ag]);
        }
        for (; f <= U_W3 && !(k & 31) && k + 32 <= end; k += 32) {
            UNROLL
            for (int s = 0; s < 32; s += 8)
                block_step(f, MR, NP, b, (k & ~(int64_t)31) + s, lut, x, ldx, acc);
        }
        for (; k < end; k += step)
            block_step(f, MR, NP, b, k, lut, x, ldx, acc);
        UNROLL
        for (int i = 0; i < NP; i++) {
            UNROLL
            for (int m = 0; m < MR; m++) {
                vf s = v_mul(ws[i], v_set1(as[m * G + ag]));
                tot[i][m] = v_fma(v_cvt(acc[i][m]), s, tot[i][m]);
            }
            if (!in->zsum) continue;
            vf z = v_mul(v_zeros(w, panel + i, g - 1), ws[i]);
            UNROLL
            for (int m = 0; m < MR; m++)
                tot[i][m] = v_fnma(z, v_set1(in->zsum[(m0 + m) * G + ag]), tot[i][m]);
        }
    }
    UNROLL
    for (int i = 0; i < NP; i++) {
        vf alpha = v_load(prep_alpha(w, panel + i));
        if (f == U_FP4) alpha = v_mul(alpha, v_set1(0.5f));
        UNROLL
        for (int m = 0; m < MR; m++)
            v_store_n(p->y + (m0 + m) * p->ldy + (panel + i) * KERN_PANEL, v_mul(tot[i][m], alpha),
                      rows_left(w, panel + i));
    }
}

#ifdef __AVX512F__
#define NP_OF(mr) ((mr) <= 2 ? 4 : (mr) <= 4 ? 2 : 1)
#else
#define NP_OF(mr) ((mr) == 1 ? 2 : 1)
#endif
#define BLOCK(f, mr)                                                                               \
    static void block_##f##_##mr(const kern__part *p, const vnni_in *in, int64_t lo, int64_t hi,   \
                                 int64_t m0)                                                       \
    {                                                                                              \
        for (; lo + NP_OF(mr) <= hi; lo += NP_OF(mr))                                              \
            block(p, in, lo, m0, f, mr, NP_OF(mr));                                                \
        for (; NP_OF(mr) > 1 && lo < hi; lo++)                                                     \
            block(p, in, lo, m0, f, mr, 1);                                                        \
    }
#define BLOCKS(f)                                                                                  \
    BLOCK(f, 1) BLOCK(f, 2) BLOCK(f, 3) BLOCK(f, 4) BLOCK(f, 5) BLOCK(f, 6) BLOCK(f, 7) BLOCK(f, 8)
BLOCKS(U_W2)
BLOCKS(U_W3)
BLOCKS(U_W4)
BLOCKS(U_FP4)
BLOCKS(U_W8)
typedef void block_fn(const kern__part *p, const vnni_in *in, int64_t lo, int64_t hi, int64_t m0);
#define BLOCK_ROW(f)                                                                               \
    {                                                                                              \
        block_##f##_1, block_##f##_2, block_##f##_3, block_##f##_4, block_##f##_5, block_##f##_6,  \
            block_##f##_7, block_##f##_8                                                           \
    }
static block_fn *const block_fns[5][8] = {BLOCK_ROW(U_W2), BLOCK_ROW(U_W3), BLOCK_ROW(U_W4),
                                          BLOCK_ROW(U_FP4), BLOCK_ROW(U_W8)};

static void part_int8(const kern__part *p, int64_t lo, int64_t hi)
{
    const kern__prep *w = p->s->prep;
    const kern__acts *a = p->a;
    int f = w->bits == 8   ? U_W8
            : !w->bias     ? U_FP4
            : w->bits == 4 ? U_W4
            : w->bits == 3 ? U_W3
                           : U_W2;
    int32_t bias = f == U_FP4 ? 12 : w->bias;
    int64_t cells = a->M * a->groups;
    int32_t *start = p->tmp;
    float *zsum = (float *)(void *)(start + cells);
    for (int64_t i = 0; i < cells; i++)
        start[i] = -bias * a->sum[i];
    bool zeros = w->zero_type != NUM_NONE;
    for (int64_t i = 0; i < cells && zeros; i++)
        zsum[i] = a->scale[i] * (float)a->sum[i];
    vnni_in in = {start, zeros ? zsum : NULL,
                  w->groups > 1 ? w->group / p->plan->group : INT64_MAX};
    /* a few panels at a time, so that their codes stay in L1 while all rows of X pass */
    int64_t stride = a->M <= 8 ? hi - lo : 4;
    for (; lo < hi; lo += stride) {
        int64_t end = lo + stride < hi ? lo + stride : hi;
        for (int64_t m = 0; m < a->M; m += 8) {
            int64_t left = a->M - m < 8 ? a->M - m : 8;
            block_fns[f][left - 1](p, &in, lo, end, m);
        }
    }
}

static int64_t input_group(const qtensor *q)
{
    int64_t g = q->spec.w.gran == Q_GROUP   ? q->spec.w.group
                : q->spec.w.gran == Q_BLOCK ? q->spec.w.block_k
                                            : 0;
    if (g <= 0 || g >= q->K) return 32;
    return g % 32 == 0 ? 32 : g % 16 == 0 ? 16 : 0;
}

static bool one_scale_per_row(const qtensor *q)
{
    return q->spec.w.gran == Q_CHANNEL || q->spec.w.gran == Q_TENSOR;
}

static const char *refuse_int8(const kern_linear_desc *d, int shard, int bucket)
{
    (void)bucket;
    const qtensor *q = d->shard[shard];
    const qaxis *a = &q->spec.a;
    if (num_infos[q->code].kind != 'I' && q->code != NUM_F4_E2M1) return "weights are not integers";
    if (q->table) return "weights are a table";
    if (num_infos[q->code].kind != 'I' && num_infos[q->code].kind != 'F')
        return "weights are not integers";
    if (q->spec.w.asym && num_infos[q->zero_type].kind == 'F') return "float zero points";
    if (!input_group(q)) return "group is no multiple of 16";
    if (d->act == KERN_ACT_INT8) return NULL;
    if (d->act == KERN_ACT_F32 || d->act == KERN_ACT_BF16) return "input is forced to a float type";
    bool int8_in = a->type == NUM_I8 && qaxis_quantized(a);
    if (int8_in && (a->gran == Q_TOKEN || a->gran == Q_TENSOR))
        return !one_scale_per_row(q)   ? "int8 input per token with grouped weights"
               : q->input_zero != 0.0f ? "input has a zero point"
                                       : NULL;
    if (qaxis_quantized(a)) return "input type of the checkpoint is not int8";
    return d->act == KERN_ACT_AUTO ? NULL : "spec keeps 16-bit inputs in f32";
}

static void plan_int8(const kern_linear_desc *d, int shard, int bucket, kern__act_plan *p)
{
    (void)bucket;
    const qtensor *q = d->shard[shard];
    const qaxis *a = &q->spec.a;
    p->kind = ACT_I8;
    p->div = 127.0f;
    p->group = input_group(q);
    if (d->act != KERN_ACT_INT8 && a->type == NUM_I8 && qaxis_quantized(a)) {
        p->div = 127.5f;
        p->group = p->Kp;
        if (a->gran == Q_TENSOR) p->fixed_scale = p->in_scale;
    }
    p->a = (qaxis){.type = NUM_F32}; /* the integers are the rule itself */
}
