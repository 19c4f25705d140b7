/* Prepared weight layouts. All but "canonical" interleave 16 rows of W (a panel), so that one
 * 64-byte vector holds 16 rows and a lane is a row; K is padded to a multiple of 32 and N to 16
 * with weights that count for nothing.
 *
 *   w4p16   per 8 k: byte 4r+j = code(r, k+j) | code(r, k+4+j) << 4
 *           int4 stored as q+8, fp4 and nf4 as table indices
 *   w2p16   per 16 k: byte b = A | B << 2, bytes b of w4p16 for k..k+7 (A) and k+8..k+15 (B)
 *           int2 stored as q+2
 *   w3p16   per 32 k: two blocks of w2p16 with the low two bits, then 64 bytes of top bits: those
 *           of bytes b of w4p16 for k+8i..k+8i+7, shifted by i
 *           int3 stored as q+4
 *   w8p16   per 4 k: byte 4r+j = code(r, k+j)
 *           int5..int8 stored as q+128, fp8 as it is
 *   w16p16  per 2 k: u16 2r+j = code(r, k+j)
 *           bf16 or f16; the order of an AMX bf16 tile
 *   w32p16  per k: f32 r
 *
 * Behind the codes: scales [panel][group][16] in their stored type, zeros [panel][group][16] as
 * int8 or f32, alpha [N] f32 (the scale of a row, or its second-level factor). Refused: groups that
 * are no multiple of 8, a group index (act-order) with groups of unequal size, nested experts.
 * "canonical" keeps the qtensor and takes everything.
 *
 * Rows of w4p16 run from w2p16 and w3p16 too ("as"), with the numbers of the same codes in w4p16 to
 * the bit: what differs is how a block becomes nibbles (v_codes of cpu/simd.h). */
#include <string.h>
#include "kern/linear.h"

_Static_assert(sizeof(kern__prep) <= KERN_PREP_BYTES, "grow KERN_PREP_BYTES");

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

void kern__wshape_of(const qtensor *q, kern_wshape *w)
{
    w->w = q->spec.w;
    w->code = q->code;
    w->scale = q->scales || q->scale_cols > 0 ? q->scale_type : NUM_NONE;
    w->zero = q->spec.w.asym || q->zeros ? q->zero_type : NUM_NONE;
    w->N = q->N;
    w->K = q->K;
    w->groups = q->g_idx ? q->scale_cols : 0;
}

static int stored_bits(num_dtype t)
{
    if (t == NUM_F32) return 32;
    if (t == NUM_F16 || t == NUM_BF16) return 16;
    if (t == NUM_F8_E4M3 || t == NUM_F8_E5M2) return 8;
    if (t == NUM_F4_E2M1 || num_infos[t].kind == 'T') return 4;
    if (t >= NUM_I2 && t <= NUM_I4) return num_infos[t].bits;
    if (t >= NUM_I5 && t <= NUM_I8) return 8;
    return 0;
}

/* Scales along K: `group` = K when one scale covers the row. */
static int64_t group_of(const kern_wshape *w)
{
    if (w->w.gran == Q_GROUP && w->w.group > 0 && w->w.group < w->K) return w->w.group;
    if (w->w.gran == Q_BLOCK && w->w.block_k > 0 && w->w.block_k < w->K) return w->w.block_k;
    return w->K;
}

/* Offsets and sizes: the same arithmetic for prediction and preparation. */
static void measure(const kern_wshape *w, kern__prep *p)
{
    memset(p, 0, sizeof *p);
    p->N = w->N;
    p->K = w->K;
    p->Kp = (int64_t)round_up((size_t)w->K, KERN_KPAD);
    p->panels = (w->N + KERN_PANEL - 1) / KERN_PANEL;
    p->code = w->code;
    p->bits = stored_bits(w->code);
    p->group = group_of(w);
    p->groups = (w->K + p->group - 1) / p->group;
    p->scale_type = p->zero_type = NUM_NONE;
    bool grouped = p->groups > 1 || w->zero != NUM_NONE;
    if (grouped && w->scale != NUM_NONE) {
        bool narrow = w->w.gran == Q_GROUP && (w->scale == NUM_BF16 || w->scale == NUM_F16 ||
                                               w->scale == NUM_F8_E4M3 || w->scale == NUM_F8_E8M0);
        p->scale_type = narrow ? w->scale : NUM_F32;
        p->scale_bytes = num_infos[p->scale_type].bits / 8;
        if (w->zero != NUM_NONE) {
            p->zero_type = num_infos[w->zero].kind == 'F' ? NUM_F32 : NUM_I8;
            p->zero_bytes = p->zero_type == NUM_F32 ? 4 : 1;
        }
    }
    size_t panels = (size_t)p->panels, cells = (size_t)p->groups * KERN_PANEL;
    p->codes_off = KERN_PREP_BYTES;
    p->panel_bytes = (size_t)p->Kp * KERN_PANEL * (size_t)p->bits / 8;
    p->scales_off = round_up(p->codes_off + panels * p->panel_bytes, 64);
    p->zeros_off = round_up(p->scales_off + panels * cells * (size_t)p->scale_bytes, 64);
    p->alpha_off = round_up(p->zeros_off + panels * cells * (size_t)p->zero_bytes, 64);
    p->total = p->alpha_off + panels * KERN_PANEL * sizeof(float);
}

static size_t panel_layout_bytes(const kern_wshape *w)
{
    kern__prep p;
    measure(w, &p);
    return p.total + 64; /* readers may load one whole vector at the end */
}

static const char other_width[] = "other code width";

static const char *refuse_bits(const kern_wshape *w, int bits)
{
    if (stored_bits(w->code) != bits) return other_width;
    kern__prep p;
    measure(w, &p);
    if (p.groups > 1 && p.group % 8) return "group is no multiple of 8";
    if (p.zero_type == NUM_F32 && bits > 8) return "float zero points";
    return NULL;
}
static const char *refuse_2(const kern_wshape *w)
{
    return refuse_bits(w, 2);
}
static const char *refuse_3(const kern_wshape *w)
{
    return refuse_bits(w, 3);
}
static const char *refuse_4(const kern_wshape *w)
{
    return refuse_bits(w, 4);
}
static const char *refuse_8(const kern_wshape *w)
{
    return refuse_bits(w, 8);
}
static const char *refuse_16(const kern_wshape *w)
{
    return refuse_bits(w, 16);
}
static const char *refuse_32(const kern_wshape *w)
{
    return refuse_bits(w, 32);
}

static int begin(const qtensor *q, const kern_wshape *w, void *dst, err *e)
{
    (void)e;
    kern__prep *p = dst;
    measure(w, p);
    bool integer = num_infos[w->code].kind == 'I';
    p->bias = !integer ? 0 : p->bits > 4 ? 128 : 1 << (p->bits - 1);
    if (p->bits > 4) return 0;
    for (int i = 0; i < 16; i++) {
        if (integer) {
            p->ilut[i] = (int8_t)(i % (1 << p->bits) - p->bias); /* bits above a code may be set */
            p->lut[i] = (float)p->ilut[i];
        } else if (w->code == NUM_F4_E2M1 && !q->table) {
            p->lut[i] = num_fp4_table[i];
            p->ilut[i] = (int8_t)(2 * num_fp4_table[i]);
        } else {
            p->lut[i] = q->table ? q->table[i] : num_decode(w->code, (uint32_t)i);
        }
    }
    p->lut_mul = integer ? 1.0f : w->code == NUM_F4_E2M1 && !q->table ? 2.0f : 0.0f;
    return 0;
}

/* Raw code bits of (row, k); integers become code + bias. */
static uint32_t code_of(const kern__prep *p, const qtensor *q, const uint8_t *row, int64_t k)
{
    int bits = num_infos[q->code].bits;
    uint32_t c;
    if (bits == 8)
        c = row[k];
    else if (bits == 16) {
        uint16_t h;
        memcpy(&h, row + 2 * k, 2);
        return h;
    } else if (bits == 32) {
        memcpy(&c, row + 4 * k, 4);
        return c;
    } else if (bits == 4)
        c = (uint32_t)(row[k >> 1] >> (4 * (k & 1))) & 15u;
    else
        c = num_get_bits(row, (size_t)k, bits);
    if (!p->bias) return c;
    int32_t sign = 1 << (bits - 1);
    int32_t v = ((int32_t)c ^ sign) - sign;
    return (uint32_t)(v + p->bias);
}

/* Byte of the low two bits of (r, j) in w2p16 and w3p16, and that of the top bit in w3p16. */
static size_t low_at(int bits, int64_t j, int r)
{
    return (size_t)(j / 32 * 64 * bits + j / 16 % 2 * 64 + 4 * r + j % 4);
}
static size_t top_at(int64_t j, int r)
{
    return (size_t)(j / 32 * 192 + 128 + 4 * r + j % 4);
}
static int low_shift(int64_t j)
{
    return (int)((j & 4) + j / 8 % 2 * 2);
}
static int top_shift(int64_t j)
{
    return (int)((j & 4) + j / 8 % 4);
}

/* Into a panel of zeros. */
static void put_narrow(uint8_t *panel, int bits, int64_t j, int r, uint32_t c)
{
    uint8_t *low = panel + low_at(bits, j, r);
    *low = (uint8_t)(*low | (c & 3) << low_shift(j));
    if (bits < 3) return;
    uint8_t *top = panel + top_at(j, r);
    *top = (uint8_t)(*top | c >> 2 << top_shift(j));
}

static int get_narrow(const uint8_t *panel, int bits, int64_t j, int r)
{
    int c = panel[low_at(bits, j, r)] >> low_shift(j) & 3;
    return bits < 3 ? c : c | (panel[top_at(j, r)] >> top_shift(j) & 1) << 2;
}

static void put_row(const kern__prep *p, const qtensor *q, const int32_t *perm, uint8_t *panel,
                    int r, int64_t n)
{
    const uint8_t *row = q->codes + (size_t)n * q->row_bytes;
    for (int64_t j = 0; j < p->Kp; j++) {
        uint32_t c = j < p->K ? code_of(p, q, row, perm ? perm[j] : j) : (uint32_t)p->bias;
        switch (p->bits) {
        case 2:
        case 3:
            put_narrow(panel, p->bits, j, r, c);
            break;
        case 4: {
            uint8_t *b = panel + (j / 8) * 64 + 4 * r + j % 4;
            *b = (uint8_t)(j & 4 ? *b | c << 4 : c);
            break;
        }
        case 8:
            panel[(j / 4) * 64 + 4 * r + j % 4] = (uint8_t)c;
            break;
        case 16: {
            uint16_t h = (uint16_t)c;
            memcpy(panel + (j / 2) * 64 + 4 * r + 2 * (j % 2), &h, 2);
            break;
        }
        default:
            memcpy(panel + j * 64 + 4 * r, &c, 4);
        }
    }
}

static void *cell(const kern__prep *p, size_t off, int bytes, int64_t n, int64_t g)
{
    return (char *)p + off +
           ((size_t)((n / KERN_PANEL) * p->groups + g) * KERN_PANEL + (size_t)(n % KERN_PANEL)) *
               (size_t)bytes;
}

static float global_of(const qtensor *q, int64_t n)
{
    for (int i = 0; i < q->n_global; i++)
        if (n >= q->global_row[i] && n < q->global_row[i + 1]) return q->global[i];
    return 1.0f;
}

static void put_scales(kern__prep *p, const qtensor *q, const int32_t *perm, int64_t n)
{
    float *alpha = (float *)(void *)((char *)p + p->alpha_off);
    if (p->scale_type == NUM_NONE) {
        alpha[n] = q->scales ? qtensor_scale(q, n, 0) : 1.0f;
        return;
    }
    alpha[n] = global_of(q, n);
    int64_t srow = q->block_n > 0 ? n / q->block_n : 0;
    for (int64_t g = 0; g < p->groups; g++) {
        int64_t k = perm ? perm[g * p->group] : g * p->group;
        int64_t scol = q->g_idx ? q->g_idx[k] : q->block_k > 0 ? k / q->block_k : 0;
        size_t i = (size_t)(srow * q->scale_cols + scol);
        void *dst = cell(p, p->scales_off, p->scale_bytes, n, g);
        size_t sb = (size_t)num_infos[q->scale_type].bits / 8;
        if (p->scale_type == q->scale_type) {
            memcpy(dst, (const char *)q->scales + i * sb, sb);
        } else {
            float s;
            num_decode_row(q->scale_type, (const char *)q->scales + i * sb, 1, &s);
            memcpy(dst, &s, 4);
        }
        if (p->zero_type == NUM_NONE) continue;
        float z = q->zeros ? qtensor_zero(q, n, k) : 0.0f;
        int8_t zi = (int8_t)z;
        if (p->zero_type == NUM_F32)
            memcpy(cell(p, p->zeros_off, 4, n, g), &z, 4);
        else
            memcpy(cell(p, p->zeros_off, 1, n, g), &zi, 1);
    }
}

static void fill(const qtensor *q, const int32_t *perm, void *dst, int64_t lo, int64_t hi)
{
    kern__prep *p = dst;
    float *alpha = (float *)(void *)((char *)p + p->alpha_off);
    size_t cells = (size_t)p->groups * KERN_PANEL;
    for (int64_t i = lo; i < hi; i++) {
        uint8_t *panel = (uint8_t *)dst + p->codes_off + (size_t)i * p->panel_bytes;
        bool last = (i + 1) * KERN_PANEL > p->N;
        if (last || p->bits < 4) memset(panel, 0, p->panel_bytes);
        if (last) {
            memset((char *)dst + p->scales_off + (size_t)i * cells * (size_t)p->scale_bytes, 0,
                   cells * (size_t)p->scale_bytes);
            memset((char *)dst + p->zeros_off + (size_t)i * cells * (size_t)p->zero_bytes, 0,
                   cells * (size_t)p->zero_bytes);
        }
        for (int r = 0; r < KERN_PANEL; r++) {
            int64_t n = i * KERN_PANEL + r;
            alpha[n] = 0.0f;
            if (n >= p->N) continue;
            put_row(p, q, perm, panel, r, n);
            put_scales(p, q, perm, n);
        }
    }
}

/* ---- back to f32 -------------------------------------------------------------------------------
 */

static float stored_value(const kern__prep *p, const uint8_t *panel, int r, int64_t j)
{
    switch (p->bits) {
    case 2:
    case 3:
        return p->lut[get_narrow(panel, p->bits, j, r)];
    case 4: {
        int b = panel[(j / 8) * 64 + 4 * r + j % 4];
        return p->lut[j & 4 ? b >> 4 : b & 15];
    }
    case 8: {
        uint8_t b = panel[(j / 4) * 64 + 4 * r + j % 4];
        return p->bias ? (float)(b - p->bias) : num_decode(p->code, b);
    }
    case 16: {
        uint16_t h;
        memcpy(&h, panel + (j / 2) * 64 + 4 * r + 2 * (j % 2), 2);
        return p->code == NUM_BF16 ? num_bf16_to_f32(h) : num_f16_to_f32(h);
    }
    default: {
        float f;
        memcpy(&f, panel + j * 64 + 4 * r, 4);
        return f;
    }
    }
}

static void decode_row(const void *prep, int64_t n, float *out)
{
    const kern__prep *p = prep;
    const uint8_t *panel =
        (const uint8_t *)prep + p->codes_off + (size_t)(n / KERN_PANEL) * p->panel_bytes;
    float alpha = ((const float *)(const void *)((const char *)prep + p->alpha_off))[n];
    int r = (int)(n % KERN_PANEL);
    for (int64_t g = 0; g < p->groups; g++) {
        float s = 1.0f, z = 0.0f;
        if (p->scale_type != NUM_NONE)
            num_decode_row(p->scale_type, cell(p, p->scales_off, p->scale_bytes, n, g), 1, &s);
        if (p->zero_type == NUM_F32)
            memcpy(&z, cell(p, p->zeros_off, 4, n, g), 4);
        else if (p->zero_type == NUM_I8)
            z = (float)*(int8_t *)cell(p, p->zeros_off, 1, n, g);
        int64_t end = (g + 1) * p->group < p->K ? (g + 1) * p->group : p->K;
        for (int64_t j = g * p->group; j < end; j++)
            out[j] = (stored_value(p, panel, r, j) - z) * (s * alpha);
    }
}

/* ---- canonical: the qtensor itself, deep-copied ------------------------------------------ */

static size_t zeros_bytes(const kern_wshape *w, size_t cells)
{
    return w->zero == NUM_NONE ? 0 : cells * (size_t)num_infos[w->zero].bits / 8;
}

static void canonical_sizes(const kern_wshape *w, size_t part[5])
{
    size_t n = (size_t)w->N, k = (size_t)w->K;
    size_t rows = w->w.gran == Q_BLOCK && w->w.block_n > 0
                      ? (n + (size_t)w->w.block_n - 1) / (size_t)w->w.block_n
                  : w->w.gran == Q_TENSOR ? 1
                                          : n;
    size_t group = (size_t)group_of(w), cols = k ? (k + group - 1) / group : 0;
    if (w->groups > (int64_t)cols) cols = (size_t)w->groups;
    size_t cells = rows * cols;
    part[0] = round_up(sizeof(qtensor), 64);
    part[1] = round_up(n * num_bytes(w->code, k), 64);
    part[2] = w->scale == NUM_NONE ? 0 : round_up(cells * (size_t)num_infos[w->scale].bits / 8, 64);
    part[3] = round_up(zeros_bytes(w, cells), 64);
    part[4] = (w->w.actorder ? round_up(k * 4, 64) : 0) + 256 * sizeof(float);
}

static const char *canonical_refuse(const kern_wshape *w)
{
    (void)w;
    return NULL;
}

static size_t canonical_bytes(const kern_wshape *w)
{
    size_t part[5];
    canonical_sizes(w, part);
    return part[0] + part[1] + part[2] + part[3] + part[4];
}

static int canonical_begin(const qtensor *q, const kern_wshape *w, void *dst, err *e)
{
    size_t part[5], cells = (size_t)(q->scale_rows * q->scale_cols);
    canonical_sizes(w, part);
    size_t scale_bytes = q->scales ? cells * (size_t)num_infos[q->scale_type].bits / 8 : 0;
    size_t zero_bytes = q->zeros ? cells * (size_t)num_infos[q->zero_type].bits / 8 : 0;
    size_t idx_bytes = q->g_idx ? (size_t)q->K * 4 : 0;
    size_t tab_bytes = q->table ? (num_infos[q->code].bits == 8 ? 256u : 16u) * sizeof(float) : 0;
    if (scale_bytes > part[2] || zero_bytes > part[3] || idx_bytes + tab_bytes > part[4] ||
        q->row_bytes != num_bytes(q->code, (size_t)q->K))
        return err_set(e, ERR_SHAPE,
                       "a [%lld,%lld] weight has a scale grid %lld x %lld that its scheme does "
                       "not explain",
                       (long long)q->N, (long long)q->K, (long long)q->scale_rows,
                       (long long)q->scale_cols);
    qtensor *c = dst;
    *c = *q;
    memset(c->owned, 0, sizeof c->owned);
    c->n_owned = 0;
    c->pre_scale = NULL; /* applied to the input */
    char *at = (char *)dst + part[0];
    memcpy(at, q->codes, (size_t)q->N * q->row_bytes);
    c->codes = (uint8_t *)at;
    at += part[1];
    if (q->scales) c->scales = memcpy(at, q->scales, scale_bytes);
    at += part[2];
    if (q->zeros) c->zeros = memcpy(at, q->zeros, zero_bytes);
    at += part[3];
    if (q->table) c->table = memcpy(at, q->table, tab_bytes);
    if (q->g_idx) c->g_idx = memcpy(at + tab_bytes, q->g_idx, idx_bytes);
    return 0;
}

static void canonical_fill(const qtensor *q, const int32_t *perm, void *dst, int64_t lo, int64_t hi)
{
    (void)q, (void)perm, (void)dst, (void)lo, (void)hi;
}

static void canonical_row(const void *prep, int64_t n, float *out)
{
    qtensor_decode_row(prep, n, out);
}

#define PANELS(bits, text, as)                                                                     \
    static const kern__layout layout_##bits = {text,  as,   refuse_##bits, panel_layout_bytes,     \
                                               begin, fill, decode_row}
PANELS(2, "w2p16", "w4p16");
PANELS(3, "w3p16", "w4p16");
PANELS(4, "w4p16", "w4p16");
PANELS(8, "w8p16", "w8p16");
PANELS(16, "w16p16", "w16p16");
PANELS(32, "w32p16", "w32p16");
static const kern__layout layout_canonical = {"canonical",     "canonical",     canonical_refuse,
                                              canonical_bytes, canonical_begin, canonical_fill,
                                              canonical_row};
const kern__layout *const kern__layouts[] = {&layout_2,  &layout_3,  &layout_4,        &layout_8,
                                             &layout_16, &layout_32, &layout_canonical};
const int kern__n_layouts = (int)(sizeof kern__layouts / sizeof *kern__layouts);

const kern__layout *kern__layout_by_name(const char *name)
{
    for (int i = 0; i < kern__n_layouts; i++)
        if (!strcmp(kern__layouts[i]->name, name)) return kern__layouts[i];
    return NULL;
}

const kern__layout *kern__layout_held(const char *as, const kern_wshape *w)
{
    for (int i = 0; i < kern__n_layouts; i++) {
        const kern__layout *l = kern__layouts[i];
        if (!strcmp(l->as, as) && l->refuse(w) != other_width) return l;
    }
    return kern__layout_by_name(as);
}
