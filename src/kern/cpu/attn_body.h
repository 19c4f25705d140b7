/* Attention with sixteen lanes: included by avx2/attention.c and avx512/attention.c.
 *
 * An item is one sequence, one KV head and a block of query tokens with the query heads of that KV
 * head (its rows: token-major, at most MAX_ROWS; more heads than that are parted), over a range of
 * keys. Keys and values are decoded once per item, 64 tokens at a time, whatever their format; the
 * values of a latent cache are lanes of its decoded keys:
 *
 *   scores    few rows: dot products, lanes along D
 *             many rows: K tile transposed, lanes along tokens
 *   softmax   online: running maximum and sum per row, accumulators rescaled when it grows; scores
 *             are capped before; a sink is a first score without a value
 *   values    acc[row][D] += p[row][t] * V[t][D] in register tiles
 *
 * When there are fewer items than the team could use (decode of a few long sequences), keys are
 * split into ranges whose partial results (maximum, sum, accumulator) are merged after a barrier.
 * Refused: D above 576. */
#include "kern/cpu/simd.h"

#define TILE_T   64
#define MAX_ROWS 48
#define MAX_D    576
#ifdef __AVX512F__
#define SC_ROWS 6
#define SC_VECS 4
#else
#define SC_ROWS 3
#define SC_VECS 2
#endif

typedef struct attn_item {
    int seq, head, tok0, toks; /* query tokens [tok0, tok0+toks) of the sequence */
    int h0, heads;             /* query heads of the KV head */
    int64_t lo, hi;            /* keys, lo at a tile's start */
    int64_t seen; /* first key that the window of tok0 sees: pages before may be gone */
    int split, n_splits;
} attn_item;

typedef struct attn_job {
    kern_dev *d;
    const kern_attn_args *a;
    int G, Dp, Dv, Vp, block, n_items, n_splits; /* Vp: lanes of an accumulator */
    int part, parts;       /* query heads of an item, items of a KV head and block */
    size_t partial_floats; /* of one split of one item */
    int next, next_merge;  /* taken by atomic increments */
} attn_job;

typedef struct attn_tile { /* one thread's buffers */
    float *q, *k, *kt, *v, *s, *acc, *max, *sum;
} attn_tile;

static void place(const attn_job *j, void *mem, attn_tile *t)
{
    size_t dp = (size_t)j->Dp;
    t->q = mem;
    t->k = t->q + MAX_ROWS * dp;
    t->kt = t->k + TILE_T * dp;
    t->v = t->kt + TILE_T * dp;
    t->s = t->v + TILE_T * dp;
    if (j->a->kv->v_in_k) t->v = t->k;
    t->acc = t->s + MAX_ROWS * TILE_T;
    t->max = t->acc + MAX_ROWS * dp;
    t->sum = t->max + MAX_ROWS;
}

/* ---- decoding ---------------------------------------------------------------------------- */

INLINE vf v_fp8_16(const bool e4m3, const uint8_t *p)
{
    __m256i h = _mm256_slli_epi16(
        _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)p)), 8);
    if (e4m3) h = _mm256_and_si256(_mm256_srai_epi16(h, 1), _mm256_set1_epi16((short)0xbf80));
#ifdef __AVX512F__
    return _mm512_cvtph_ps(h);
#else
    return V2(_mm256_cvtph_ps(_mm256_castsi256_si128(h)),
              _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)));
#endif
}

INLINE vi vi_nibbles_16(const uint8_t *p)
{
    __m128i b = _mm_loadl_epi64((const __m128i *)(const void *)p), m = _mm_set1_epi8(15);
    uint8_t out[16];
    _mm_storeu_si128(
        (__m128i *)(void *)out,
        _mm_unpacklo_epi8(_mm_and_si128(b, m), _mm_and_si128(_mm_srli_epi16(b, 4), m)));
    return vi_from_u8(out);
}

/* One token of one head to f32; Dp lanes, a multiple of 16. */
INLINE void decode_token(const kern_kv_layer *kv, float s, const uint8_t *c, const uint8_t *sc,
                         int Dp, float *out)
{
    float pair[2];
    switch (kv->type) {
    case KV_F32:
        memcpy(out, c, (size_t)Dp * sizeof *out);
        break;
    case KV_FP8_E4M3:
        for (int i = 0; i < Dp; i += 16)
            v_store(out + i, v_mul(v_fp8_16(true, c + i), v_set1(s * FP8_POST)));
        break;
    case KV_FP8_E5M2:
        for (int i = 0; i < Dp; i += 16)
            v_store(out + i, v_mul(v_fp8_16(false, c + i), v_set1(s)));
        break;
    case KV_INT8:
        memcpy(pair, sc, sizeof pair);
        for (int i = 0; i < Dp; i += 16)
            v_store(out + i, v_fma(v_cvt(vi_from_u8(c + i)), v_set1(pair[0]), v_set1(pair[1])));
        break;
    case KV_FP4: {
        vlut lut = v_lut(num_fp4_table);
        for (int i = 0; i < Dp; i += 16) {
            uint32_t e = sc[i / 16], bits = e << 23;
            float m;
            memcpy(&m, &bits, 4); /* code 0 marks a zero block */
            v_store(out + i, v_mul(v_lookup(lut, vi_nibbles_16(c + i / 2)), v_set1(m)));
        }
        break;
    }
    default:
        for (int i = 0; i < Dp; i += 16)
            v_store(out + i, v_bits(vi_slli(vi_from_u16(c + 2 * i), 16)));
    }
}

/* The same where D is no multiple of 16: the last lanes through a copy, zero beyond D. */
static void decode_ragged(const kern_kv_layer *kv, float s, const uint8_t *c, const uint8_t *sc,
                          int Dp, float *out)
{
    uint8_t tail[64] = {0};
    int whole = kv->D / 16 * 16;
    size_t at = kern_kv_code_bytes(kv->type, whole);
    memcpy(tail, c + at, kern_kv_code_bytes(kv->type, kv->D) - at);
    decode_token(kv, s, c, sc, whole, out);
    decode_token(kv, s, tail, kv->type == KV_FP4 ? sc + whole / 16 : sc, 16, out + whole);
    for (int d = kv->D; d < Dp; d++)
        out[d] = 0;
}

/* Tokens [t0,t0+n) of one head, page by page: addresses are computed once a page. Tokens that the
 * window has passed become zeros. */
static void decode_tile(const kern_kv_layer *kv, int which, const attn_item *it, const kern_seq *q,
                        int64_t t0, int n, int Dp, float *out)
{
    const float *scales = which ? kv->v_scale : kv->k_scale;
    float s = scales ? scales[it->head] : 1.0f;
    size_t cb = kern_kv_code_bytes(kv->type, kv->D), sb = kern_kv_scale_bytes(kv->type, kv->D);
    int passed = it->seen > t0 ? (int)(it->seen - t0) : 0;
    int64_t page = (t0 + passed) / kv->page_tokens;
    int at = (int)(t0 + passed - page * kv->page_tokens);
    memset(out, 0, (size_t)passed * (size_t)Dp * sizeof *out);
    for (int t = passed; t < n; page++, at = 0) {
        int run = kv->page_tokens - at < n - t ? kv->page_tokens - at : n - t;
        int64_t slot = (int64_t)q->pages[page] * kv->page_tokens + at;
        const uint8_t *c = kern__kv_code(kv, which, it->head, slot);
        const uint8_t *sc = kern__kv_scale(kv, which, it->head, slot);
        for (int i = 0; i < run; i++, c += cb, sc += sb) {
            if (kv->D % 16)
                decode_ragged(kv, s, c, sc, Dp, out + (t + i) * Dp);
            else
                decode_token(kv, s, c, sc, Dp, out + (t + i) * Dp);
        }
        t += run;
    }
    if (n < TILE_T) memset(out + n * Dp, 0, (size_t)(TILE_T - n) * (size_t)Dp * sizeof *out);
}

/* kt[d][TILE_T] = k[t][d] in 4x4 blocks. */
static void transpose(const float *k, int Dp, float *kt)
{
    for (int t = 0; t < TILE_T; t += 4)
        for (int d = 0; d < Dp; d += 4) {
            __m128 a = _mm_loadu_ps(k + t * Dp + d), b = _mm_loadu_ps(k + (t + 1) * Dp + d);
            __m128 c = _mm_loadu_ps(k + (t + 2) * Dp + d), e = _mm_loadu_ps(k + (t + 3) * Dp + d);
            _MM_TRANSPOSE4_PS(a, b, c, e);
            _mm_storeu_ps(kt + d * TILE_T + t, a);
            _mm_storeu_ps(kt + (d + 1) * TILE_T + t, b);
            _mm_storeu_ps(kt + (d + 2) * TILE_T + t, c);
            _mm_storeu_ps(kt + (d + 3) * TILE_T + t, e);
        }
}

/* ---- scores and values ------------------------------------------------------------------- */

INLINE void score_tile(const float *q, const float *kt, float *s, int Dp, const int R)
{
    for (int c = 0; c < TILE_T; c += 16 * SC_VECS) {
        vf acc[SC_ROWS][SC_VECS];
        UNROLL
        for (int r = 0; r < R; r++) {
            UNROLL
            for (int i = 0; i < SC_VECS; i++)
                acc[r][i] = v_zero();
        }
        for (int d = 0; d < Dp; d++) {
            vf b[SC_VECS];
            UNROLL
            for (int i = 0; i < SC_VECS; i++)
                b[i] = v_load(kt + d * TILE_T + c + 16 * i);
            UNROLL
            for (int r = 0; r < R; r++) {
                vf a = v_set1(q[r * Dp + d]);
                UNROLL
                for (int i = 0; i < SC_VECS; i++)
                    acc[r][i] = v_fma(a, b[i], acc[r][i]);
            }
        }
        UNROLL
        for (int r = 0; r < R; r++) {
            UNROLL
            for (int i = 0; i < SC_VECS; i++)
                v_store(s + r * TILE_T + c + 16 * i, acc[r][i]);
        }
    }
}

static void scores_many(const attn_tile *t, int rows, int Dp)
{
    int r = 0;
    for (; r + SC_ROWS <= rows; r += SC_ROWS)
        score_tile(t->q + r * Dp, t->kt, t->s + r * TILE_T, Dp, SC_ROWS);
    for (; r < rows; r++)
        score_tile(t->q + r * Dp, t->kt, t->s + r * TILE_T, Dp, 1);
}

#ifdef __AVX512F__
/* Sixteen sums of sixteen lanes each, in order. */
INLINE vf sums_16(vf *a)
{
    UNROLL
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                             _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    UNROLL
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
        a[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    UNROLL
    for (int i = 0; i < 2; i++)
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x88),
                         _mm512_shuffle_f32x4(a[0], a[1], 0xdd));
}
#else
INLINE vf sums_16(vf *a)
{
    float s[16];
    for (int i = 0; i < 16; i++)
        s[i] = v_sum(a[i]);
    return v_load(s);
}
#endif

static void scores_few(const attn_tile *t, int rows, int n, int Dp)
{
    for (int i = 0; i < n; i += 16) /* tokens past n are zero rows of the tile */
        for (int r = 0; r < rows; r++) {
            const float *q = t->q + r * Dp, *k = t->k + i * Dp;
            vf a[16];
            UNROLL
            for (int j = 0; j < 16; j++)
                a[j] = v_mul(v_load(q), v_load(k + j * Dp));
            for (int d = 16; d < Dp; d += 16) {
                vf b = v_load(q + d);
                UNROLL
                for (int j = 0; j < 16; j++)
                    a[j] = v_fma(b, v_load(k + j * Dp + d), a[j]);
            }
            v_store(t->s + r * TILE_T + i, sums_16(a));
        }
}

INLINE void value_tile(const float *p, const float *v, float *acc, int n, int Dp, int Vp,
                       const int R, const int V)
{
    vf o[SC_ROWS][SC_VECS];
    UNROLL
    for (int r = 0; r < R; r++) {
        UNROLL
        for (int i = 0; i < V; i++)
            o[r][i] = v_load(acc + r * Vp + 16 * i);
    }
    for (int t = 0; t < n; t++) {
        vf b[SC_VECS];
        UNROLL
        for (int i = 0; i < V; i++)
            b[i] = v_load(v + t * Dp + 16 * i);
        UNROLL
        for (int r = 0; r < R; r++) {
            vf a = v_set1(p[r * TILE_T + t]);
            UNROLL
            for (int i = 0; i < V; i++)
                o[r][i] = v_fma(a, b[i], o[r][i]);
        }
    }
    UNROLL
    for (int r = 0; r < R; r++) {
        UNROLL
        for (int i = 0; i < V; i++)
            v_store(acc + r * Vp + 16 * i, o[r][i]);
    }
}

static void values(const attn_tile *t, int rows, int n, int Dp, int Vp)
{
    int d = 0;
    for (; d + 16 * SC_VECS <= Vp; d += 16 * SC_VECS) {
        int r = 0;
        for (; r + SC_ROWS <= rows; r += SC_ROWS)
            value_tile(t->s + r * TILE_T, t->v + d, t->acc + r * Vp + d, n, Dp, Vp, SC_ROWS,
                       SC_VECS);
        for (; r + 3 <= rows; r += 3)
            value_tile(t->s + r * TILE_T, t->v + d, t->acc + r * Vp + d, n, Dp, Vp, 3, SC_VECS);
        for (; r < rows; r++)
            value_tile(t->s + r * TILE_T, t->v + d, t->acc + r * Vp + d, n, Dp, Vp, 1, SC_VECS);
    }
    for (; d < Vp; d += 16)
        for (int r = 0; r < rows; r++)
            value_tile(t->s + r * TILE_T, t->v + d, t->acc + r * Vp + d, n, Dp, Vp, 1, 1);
}

/* Masks a row of scores to keys [lo,hi), turns it into probabilities, rescales its accumulator. */
static void softmax_row(const attn_tile *t, int r, int lo, int hi, int Vp)
{
    float *s = t->s + r * TILE_T;
    for (int i = 0; i < lo; i++)
        s[i] = -INFINITY;
    for (int i = hi; i < TILE_T; i++)
        s[i] = -INFINITY;
    vf m = v_load(s);
    for (int i = 16; i < TILE_T; i += 16)
        m = v_max(v_load(s + i), m);
    float top = v_hmax(m);
    if (!(top > -INFINITY)) { /* no key is seen, or only scores that are no numbers */
        for (int i = lo; i < hi; i++)
            if (isnan(s[i])) t->sum[r] = NAN;
        memset(s, 0, TILE_T * sizeof *s);
        return;
    }
    if (top > t->max[r]) {
        float c = t->max[r] > -INFINITY ? expf(t->max[r] - top) : 0.0f;
        for (int d = 0; d < Vp; d += 16)
            v_store(t->acc + r * Vp + d, v_mul(v_load(t->acc + r * Vp + d), v_set1(c)));
        t->sum[r] *= c;
        t->max[r] = top;
    }
    vf sum = v_zero(), base = v_set1(t->max[r]);
    for (int i = 0; i < TILE_T; i += 16) {
        vf p = v_exp(v_sub(v_load(s + i), base));
        v_store(s + i, p);
        sum = v_add(sum, p);
    }
    t->sum[r] += v_sum(sum);
}

/* ---- items ------------------------------------------------------------------------------- */

static bool item_at(const attn_job *j, int index, attn_item *it)
{
    const kern_attn_args *a = j->a;
    it->split = index % j->n_splits;
    it->n_splits = j->n_splits;
    index /= j->n_splits;
    for (int s = 0; s < a->n_seqs; s++) {
        const kern_seq *q = &a->seqs[s];
        int blocks = (q->n_rows + j->block - 1) / j->block, wide = a->kv->Hk * j->parts;
        int n = blocks * wide;
        if (index >= n) {
            index -= n;
            continue;
        }
        it->seq = s;
        it->head = index % wide / j->parts;
        it->h0 = index % j->parts * j->part;
        it->heads = j->G - it->h0 < j->part ? j->G - it->h0 : j->part;
        it->tok0 = (blocks - 1 - index / wide) * j->block; /* longest first */
        it->toks = q->n_rows - it->tok0 < j->block ? q->n_rows - it->tok0 : j->block;
        int64_t first = (int64_t)q->kv_len - q->n_rows + it->tok0, last = first + it->toks;
        it->seen = a->window > 0 && first - a->window + 1 > 0 ? first - a->window + 1 : 0;
        int64_t lo = it->seen / TILE_T * TILE_T;
        int64_t tiles = (last - lo + TILE_T - 1) / TILE_T;
        int64_t t0 = tiles * it->split / it->n_splits, t1 = tiles * (it->split + 1) / it->n_splits;
        it->lo = lo + t0 * TILE_T;
        it->hi = lo + t1 * TILE_T < last ? lo + t1 * TILE_T : last;
        return true;
    }
    return false;
}

/* Row r of an item: token r / heads, query head h0 + r % heads of the KV head. */
static int64_t row_token(const attn_job *j, const attn_item *it, int r)
{
    return j->a->seqs[it->seq].row0 + it->tok0 + r / it->heads;
}
static int row_head(const attn_job *j, const attn_item *it, int r)
{
    return it->head * j->G + it->h0 + r % it->heads;
}

/* The first range of keys starts with the sink: a score that has no value. */
static void start_rows(const attn_job *j, const attn_item *it, const attn_tile *t, int rows)
{
    const kern_attn_args *a = j->a;
    int Dp = j->Dp, D = a->kv->D;
    bool sink = a->sinks && it->split == 0;
    for (int r = 0; r < rows; r++) {
        const float *src = a->q + row_token(j, it, r) * a->ldq + row_head(j, it, r) * D;
        for (int d = 0; d < Dp; d++)
            t->q[r * Dp + d] = d < D ? src[d] * a->scale : 0.0f;
        t->max[r] = sink ? a->sinks[row_head(j, it, r)] : -INFINITY;
        t->sum[r] = sink ? 1.0f : 0.0f;
    }
    memset(t->acc, 0, (size_t)rows * (size_t)j->Vp * sizeof(float));
}

static void cap_scores(float *s, int n, float cap)
{
    for (int i = 0; i < n; i += 16)
        v_store(s + i, v_mul(v_tanh(v_div(v_load(s + i), v_set1(cap))), v_set1(cap)));
}

static void run_item(const attn_job *j, const attn_item *it, const attn_tile *t)
{
    const kern_attn_args *a = j->a;
    const kern_seq *q = &a->seqs[it->seq];
    int Dp = j->Dp, rows = it->toks * it->heads;
    int64_t first = (int64_t)q->kv_len - q->n_rows + it->tok0;
    start_rows(j, it, t, rows);
    for (int64_t t0 = it->lo; t0 < it->hi; t0 += TILE_T) {
        int n = it->hi - t0 < TILE_T ? (int)(it->hi - t0) : TILE_T;
        decode_tile(a->kv, 0, it, q, t0, n, Dp, t->k);
        if (!a->kv->v_in_k) decode_tile(a->kv, 1, it, q, t0, n, Dp, t->v);
        if (rows > 5) {
            transpose(t->k, Dp, t->kt);
            scores_many(t, rows, Dp);
        } else {
            scores_few(t, rows, n, Dp);
        }
        for (int r = 0; r < rows; r++) {
            int64_t pos = first + r / it->heads, lo = a->window > 0 ? pos - a->window + 1 - t0 : 0,
                    hi = pos + 1 - t0;
            lo = lo < 0 ? 0 : lo > n ? n : lo;
            hi = hi < lo ? lo : hi > n ? n : hi;
            if (a->softcap > 0) cap_scores(t->s + r * TILE_T, n, a->softcap);
            softmax_row(t, r, (int)lo, (int)hi, j->Vp);
        }
        values(t, rows, n, Dp, j->Vp);
    }
}

static float *out_row(const attn_job *j, const attn_item *it, int r)
{
    return j->a->out + row_token(j, it, r) * j->a->ldo + row_head(j, it, r) * j->Dv;
}

static void finish_item(const attn_job *j, const attn_item *it, const attn_tile *t, int index)
{
    int Vp = j->Vp, rows = it->toks * it->heads;
    if (it->n_splits > 1) {
        float *p = (float *)j->d->scratch + (size_t)index * j->partial_floats;
        memcpy(p, t->max, (size_t)rows * sizeof *p);
        memcpy(p + rows, t->sum, (size_t)rows * sizeof *p);
        memcpy(p + 2 * rows, t->acc, (size_t)rows * (size_t)Vp * sizeof *p);
        return;
    }
    for (int r = 0; r < rows; r++) {
        float *out = out_row(j, it, r), inv = t->sum[r] != 0 ? 1.0f / t->sum[r] : 0.0f;
        for (int d = 0; d < j->Dv; d++)
            out[d] = t->acc[r * Vp + d] * inv;
    }
}

static void merge_item(const attn_job *j, int index)
{
    attn_item it;
    if (!item_at(j, index * j->n_splits, &it)) return;
    int Dv = j->Dv, rows = it.toks * it.heads;
    const float *base =
        (const float *)j->d->scratch + (size_t)index * (size_t)j->n_splits * j->partial_floats;
    for (int r = 0; r < rows; r++) {
        float max = -INFINITY, sum = 0, *out = out_row(j, &it, r);
        for (int s = 0; s < j->n_splits; s++) {
            float m = base[(size_t)s * j->partial_floats + (size_t)r];
            max = m > max ? m : max;
        }
        for (int d = 0; d < Dv; d++)
            out[d] = 0;
        for (int s = 0; s < j->n_splits; s++) {
            const float *p = base + (size_t)s * j->partial_floats;
            float w = p[r] > -INFINITY ? expf(p[r] - max) : 0.0f;
            sum += w * p[rows + r];
            for (int d = 0; d < Dv; d++)
                out[d] += w * p[2 * rows + r * j->Vp + d];
        }
        for (int d = 0; d < Dv && sum != 0; d++)
            out[d] /= sum;
    }
}

static void attn_part(void *arg, int index, int n)
{
    attn_job *j = arg;
    attn_tile t;
    attn_item it;
    (void)n;
    place(j, kern__thread_buffer(j->d, index), &t);
    for (int i;
         (i = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED)) < j->n_items * j->n_splits;) {
        if (!item_at(j, i, &it)) break;
        run_item(j, &it, &t);
        finish_item(j, &it, &t, i);
    }
    if (j->n_splits == 1) return;
    team_barrier(j->d->team, index);
    for (int i; (i = __atomic_fetch_add(&j->next_merge, 1, __ATOMIC_RELAXED)) < j->n_items;)
        merge_item(j, i);
}

static bool attention(kern_dev *d, const kern_attn_args *a)
{
    attn_job j = {.d = d,
                  .a = a,
                  .G = a->H / a->kv->Hk,
                  .Dp = (a->kv->D + 15) / 16 * 16,
                  .Dv = kern__v_lanes(a->kv),
                  .n_splits = 1};
    if (j.Dp > MAX_D || j.G < 1) return false;
    j.Vp = (j.Dv + 15) / 16 * 16;
    j.part = j.G < MAX_ROWS ? j.G : MAX_ROWS;
    j.parts = (j.G + j.part - 1) / j.part;
    j.block = MAX_ROWS / j.part;
    int64_t longest = 0;
    int most = 0;
    for (int s = 0; s < a->n_seqs; s++) {
        int rows = a->seqs[s].n_rows;
        j.n_items += (rows + j.block - 1) / j.block * a->kv->Hk * j.parts;
        longest = a->seqs[s].kv_len > longest ? a->seqs[s].kv_len : longest;
        most = rows > most ? rows : most;
    }
    if (a->window > 0 && longest > a->window + most) longest = a->window + most;
    int threads = team_size(d->team), block_rows = (most < j.block ? most : j.block) * j.part;
    j.partial_floats = (size_t)block_rows * (size_t)(j.Vp + 2);
    if (threads > 1 && j.n_items < 4 * threads && most <= j.block && longest >= 4 * TILE_T) {
        int want = (4 * threads + j.n_items - 1) / j.n_items, room = (int)(longest / (2 * TILE_T));
        j.n_splits = want < room ? want : room;
        while (j.n_splits > 1 &&
               (size_t)j.n_items * (size_t)j.n_splits * j.partial_floats * sizeof(float) >
                   d->scratch_bytes)
            j.n_splits--;
    }
    bool small = (int64_t)j.n_items * longest * block_rows * j.Dp < 20000;
    if (small) j.n_splits = 1; /* on the calling thread alone: no barrier */
    if (small)
        attn_part(&j, 0, 1);
    else
        team_run(d->team, attn_part, &j);
    return true;
}
