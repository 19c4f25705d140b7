/* AWQ: reading.
 *
 *   gemm       qweight I32 [K, N*b/32], packed along N and interleaved: nibble i of word c holds
 *              column 8c + order[i], order 0 2 4 6 1 3 5 7 (8 bits: 0 2 1 3); qzeros I32 [G,
 * N*b/32] alike; scales F16 [G, N]; w = scale * (q - z), nothing subtracted from z gemv qweight I32
 * [N, K/8], a plain stream along K; qzeros I32 [N, W], a plain stream along the groups; scales F16
 * [N, 8W], columns from G on are padding gemv_fast  qweight I16 [N/4, K]: four rows share a line of
 * 4K nibbles, in blocks of 64 columns; scales and qzeros F16 [8W, N], rows from G on are padding;
 * qzeros = -(scale * z)
 *
 * The last keeps products instead of zero points. Where rounding -scale * z to F16 gives the stored
 * value back for a whole z, that z is what the quantizer meant and is used; else the zero points
 * stay fractions, -qzeros/scale. "exllama" and "ipex" are gemm files whose config names the kernel.
 *
 * modules_to_not_convert holds substrings of module names. A quantized module that an entry takes
 * by whole dotted components contradicts the list and is refused; one that it takes only within a
 * component ("mlp.gate" in mlp.gate_proj) is a warning: readers differ there, the tensors do not.
 *
 * Refused: version marlin, per-channel activation scales ("….act.scales"), which would have to be
 * applied to the input of a layer. */
#include <stdio.h>
#include <string.h>
#include "quant/packed.h"

typedef enum layout { GEMM, GEMV, FAST } layout;
static const struct {
    const char *name;
    layout l;
} versions[] = {{"gemm", GEMM},    {"gemv", GEMV},    {"gemv_fast", FAST},
                {"llm-awq", FAST}, {"exllama", GEMM}, {"ipex", GEMM}};

typedef struct awq { /* q->own */
    layout l;
} awq;

/* ---- config -------------------------------------------------------------------------------------
 */

static int read_version(const quant_ckpt *q, awq *a, const char **format, err *e)
{
    const char *v = "gemm";
    char low[32];
    int rc = json_get_str(q->config, "version", &v, q->where, e);
    if (rc < 0) return rc;
    size_t n = strlen(v);
    for (size_t i = 0; i <= n && i < sizeof low; i++)
        low[i] = (char)(v[i] >= 'A' && v[i] <= 'Z' ? v[i] + 32 : v[i]);
    for (size_t i = 0; n < sizeof low && i < sizeof versions / sizeof *versions; i++)
        if (!strcmp(low, versions[i].name)) {
            a->l = versions[i].l;
            *format = versions[i].name;
            return 0;
        }
    return err_set(e, ERR_UNSUPPORTED,
                   "%s: AWQ version '%s' is not read; expected gemm, gemv or gemv_fast", q->where,
                   v);
}

/* "bits" or "w_bit": the tool's own file and the config have their own spellings. */
static int either(const quant_ckpt *q, const char *a, const char *b, int64_t *out, err *e)
{
    int rc = json_get_i64(q->config, a, out, q->where, e);
    return rc ? rc : json_get_i64(q->config, b, out, q->where, e);
}

static int act_scales(const quant_ckpt *q, err *e)
{
    for (size_t i = 0; i < ckpt_n_tensors(q->c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(q->c, i);
        size_t n = strlen(t->name);
        if (n > 11 && !strcmp(t->name + n - 11, ".act.scales"))
            return err_set(e, ERR_UNSUPPORTED,
                           "%s: tensor '%s' scales the output of an activation function, which "
                           "this version does not apply; without it the answers would be wrong",
                           t->path, t->name);
    }
    return 0;
}

/* The list as component rules, which are held against the tensors; the rest of it is counted. */
static int check_list(quant_ckpt *q, err *e)
{
    const json *list = json_get(q->config, "modules_to_not_convert");
    char where[320], module[QUANT_NAME_MAX];
    snprintf(where, sizeof where, "%.250s: modules_to_not_convert", q->where);
    int rc = quant__ignore(q, list, where, QUANT_RULE_COMPONENT, e);
    for (int i = 0; rc >= 0 && i < q->n_ignore; i++) {
        const char *first = NULL;
        int n = 0;
        for (size_t k = 0; k < ckpt_n_tensors(q->c); k++) {
            const ckpt_tensor *t = ckpt_tensor_at(q->c, k);
            const quant_part *p = quant_part_of(q, t->name, module);
            if (!p || p->kind != QUANT_CODES || !strstr(module, q->ignore[i])) continue;
            first = first ? first : t->name;
            n++;
        }
        if (n)
            quant__warn(q,
                        "%s: '%s' is part of the name of %d quantized tensors, such as %s; they "
                        "are read as quantized",
                        where, q->ignore[i], n, first);
    }
    return rc;
}

int quant__awq_detect(quant_ckpt *q, err *e)
{
    int64_t bits = 4, group = 128;
    bool zero_point = true;
    const char *format = "";
    qspec s;
    int rc = 0;
    awq *a = q->own = arena_alloc(q->mem, sizeof *a);
    TRY(read_version(q, a, &format, e));
    TRY(either(q, "bits", "w_bit", &bits, e));
    TRY(either(q, "group_size", "q_group_size", &group, e));
    TRY(json_get_bool(q->config, "zero_point", &zero_point, q->where, e));
    if (bits != 4 && (bits != 8 || a->l != GEMM)) {
        rc = err_set(e, ERR_UNSUPPORTED,
                     "%s: AWQ of %lld bits in version %s is not read; expected 4%s", q->where,
                     (long long)bits, format, a->l == GEMM ? " or 8" : "");
        goto out;
    }
    TRY(quant__packed_spec(q, bits, group, !zero_point, q->where, &s, e));
    if (!quant__group(q, &s, format, QUANT_RULE_CLASS, "Linear", e)) return ERR_NOMEM;
    TRY(act_scales(q, e));
    TRY(check_list(q, e));
    TRY(quant__sweep(q, e));
    rc = 1;
out:
    return rc;
}

/* ---- shapes -------------------------------------------------------------------------------------
 */

static int shape_of(const quant_ckpt *q, const char *module, const qspec *s, layout l,
                    const ckpt_tensor **out, int64_t *N, int64_t *K, err *e)
{
    const ckpt_tensor *t;
    int bits = num_infos[s->w.type].bits, per = 32 / bits;
    int rc = quant__tensor(q, module, "qweight", true, &t, e);
    if (rc < 0) return rc;
    if (t->dtype != (l == FAST ? NUM_I16 : NUM_I32))
        return quant__wrong_type(t, l == FAST ? "I16, as gemv_fast has it" : "I32", e);
    if (t->n_dims != 2 || t->shape[0] < 1 || t->shape[1] < 1)
        return quant__wrong_shape(t, e, "expected 2 dimensions");
    *out = t;
    *N = l == GEMM ? t->shape[1] * per : l == GEMV ? t->shape[0] : t->shape[0] * 4;
    *K = l == GEMM ? t->shape[0] : l == GEMV ? t->shape[1] * per : t->shape[1];
    if (l == FAST && *K % 64)
        return quant__wrong_shape(t, e, "gemv_fast packs blocks of 64 input columns");
    return 0;
}

static int describe(const quant_ckpt *q, const char *module, layout l, quant_module *out, err *e)
{
    const ckpt_tensor *t;
    return shape_of(q, module, &out->spec, l, &t, &out->N, &out->K, e);
}

int quant__awq_describe_gemm(const quant_ckpt *q, const char *module, quant_module *out, err *e)
{
    return describe(q, module, GEMM, out, e);
}

int quant__awq_describe(const quant_ckpt *q, const char *module, quant_module *out, err *e)
{
    return describe(q, module, ((const awq *)q->own)->l, out, e);
}

/* A tensor of [a, b], where other layouts explain another shape. */
static int want_shape(const quant__job *j, const ckpt_tensor *t, int64_t a, int64_t b, err *e)
{
    const qtensor *o = j->out;
    const ckpt_tensor *w;
    if (t->n_dims == 2 && t->shape[0] == a && t->shape[1] == b) return 0;
    bool codes = quant__tensor(j->q, j->module, "qweight", false, &w, NULL) == 0 && w &&
                 w->n_dims == 2 && t->n_dims == 2 && w != t;
    const char *hint = codes && t->shape[0] == w->shape[0]   ? "; these are tensors of version gemv"
                       : codes && t->shape[1] == w->shape[1] ? "; these are tensors of GPTQ"
                                                             : "";
    return quant__wrong_shape(t, e, "%s of [%lld, %lld] (groups of %lld) needs [%lld, %lld]%s",
                              j->g->format, (long long)o->N, (long long)o->K, (long long)o->block_k,
                              (long long)a, (long long)b, hint);
}

static int begin(const quant__job *j, layout l, const ckpt_tensor **t, uint8_t **codes, err *e)
{
    int64_t N = 0, K = 0;
    void *p;
    int rc = shape_of(j->q, j->module, &j->g->spec, l, t, &N, &K, e);
    if (rc < 0) return rc;
    quant__packed_grid(j, N, K);
    rc = quant__own(j->out, (size_t)N, j->out->row_bytes, &p, e);
    if (rc < 0) return rc;
    memset(p, 0, (size_t)N * j->out->row_bytes);
    j->out->codes = *codes = p;
    return 0;
}

static int find(const quant__job *j, const char *suffix, int64_t a, int64_t b, num_dtype type,
                const ckpt_tensor **t, err *e)
{
    int rc = quant__tensor(j->q, j->module, suffix, true, t, e);
    if (rc < 0) return rc;
    rc = want_shape(j, *t, a, b, e);
    if (rc >= 0 && type != NUM_NONE && (*t)->dtype != type)
        rc = quant__wrong_type(*t, num_infos[type].tag, e);
    return rc;
}

/* Zero points without one that is not 0: a symmetric weight, whatever zero_point says. */
static int put_zeros(const quant__job *j, int8_t **out, err *e)
{
    void *p;
    qtensor *o = j->out;
    int rc = quant__own(o, (size_t)o->N, (size_t)o->scale_cols, &p, e);
    if (rc < 0) return rc;
    *out = p;
    o->zeros = p;
    o->zero_type = NUM_I8;
    return 0;
}

static void drop_if_symmetric(const quant__job *j, const int8_t *z)
{
    qtensor *o = j->out;
    if (o->spec.w.asym) return;
    for (int64_t i = 0; i < o->N * o->scale_cols; i++)
        if (z[i]) {
            o->spec.w.asym = true;
            return;
        }
    o->zeros = NULL;
    o->zero_type = NUM_NONE;
}

/* ---- gemm ---------------------------------------------------------------------------------------
 */

static const uint8_t order4[8] = {0, 2, 4, 6, 1, 3, 5, 7}, order8[4] = {0, 2, 1, 3};

static uint32_t word_at(const ckpt_tensor *t, int64_t i)
{
    uint32_t w;
    memcpy(&w, t->data + 4 * (size_t)i, 4);
    return w;
}

/* Two lines of words to one byte in each of eight rows. */
static void unpack4(const ckpt_tensor *t, int64_t K, size_t row_bytes, uint8_t *dst)
{
    enum { TILE = 64 };
    int64_t C = t->shape[1];
    for (int64_t k0 = 0; k0 < K; k0 += TILE)
        for (int64_t c = 0; c < C; c++)
            for (int64_t k = k0; k < k0 + TILE && k < K; k += 2) {
                uint32_t lo = word_at(t, k * C + c) ^ 0x88888888u,
                         hi = k + 1 < K ? word_at(t, (k + 1) * C + c) ^ 0x88888888u : 0;
                for (int i = 0; i < 8; i++)
                    dst[(size_t)(8 * c + order4[i]) * row_bytes + (size_t)k / 2] =
                        (uint8_t)((lo >> (4 * i) & 15) | (hi >> (4 * i) & 15) << 4);
            }
}

static void unpack8(const ckpt_tensor *t, int64_t K, size_t row_bytes, uint8_t *dst)
{
    int64_t C = t->shape[1];
    for (int64_t k = 0; k < K; k++)
        for (int64_t c = 0; c < C; c++) {
            uint32_t w = word_at(t, k * C + c) ^ 0x80808080u;
            for (int i = 0; i < 4; i++)
                dst[(size_t)(4 * c + order8[i]) * row_bytes + (size_t)k] = (uint8_t)(w >> (8 * i));
        }
}

static int zeros_gemm(const quant__job *j, err *e)
{
    const ckpt_tensor *t;
    qtensor *o = j->out;
    int bits = num_infos[o->code].bits, per = 32 / bits, half = 1 << (bits - 1);
    int64_t G = o->scale_cols, C = o->N / per;
    int8_t *z;
    int rc = find(j, "qzeros", G, C, NUM_I32, &t, e);
    if (rc < 0) return rc;
    rc = put_zeros(j, &z, e);
    if (rc < 0) return rc;
    const uint8_t *order = bits == 4 ? order4 : order8;
    for (int64_t g = 0; g < G; g++)
        for (int64_t c = 0; c < C; c++) {
            uint32_t w = word_at(t, g * C + c);
            for (int i = 0; i < per; i++)
                z[(per * c + order[i]) * G + g] =
                    (int8_t)((int)(w >> (bits * i) & ((1u << bits) - 1)) - half);
        }
    drop_if_symmetric(j, z);
    return 0;
}

int quant__awq_load_gemm(const quant__job *j, err *e)
{
    const ckpt_tensor *t, *s;
    uint8_t *codes;
    qtensor *o = j->out;
    int rc = begin(j, GEMM, &t, &codes, e);
    if (rc < 0) return rc;
    rc = find(j, "scales", o->scale_cols, o->N, NUM_NONE, &s, e);
    if (rc < 0) return rc;
    rc = quant__scales_transposed(j, s, e);
    if (rc < 0) return rc;
    if (num_infos[o->code].bits == 4)
        unpack4(t, o->K, o->row_bytes, codes);
    else
        unpack8(t, o->K, o->row_bytes, codes);
    return zeros_gemm(j, e);
}

/* ---- gemv ---------------------------------------------------------------------------------------
 */

/* Words of zero points a row: whole kernels' worth of groups, fewer for small groups. */
static int64_t zero_words(const quant__job *j)
{
    int64_t group = j->g->spec.w.gran == Q_GROUP ? j->g->spec.w.group : j->out->K;
    int64_t pad = group >= 128 ? 1 : group >= 64 ? 2 : 4, words = (j->out->scale_cols + 7) / 8;
    return (words + pad - 1) / pad * pad;
}

static int load_gemv(const quant__job *j, err *e)
{
    const ckpt_tensor *t, *s, *zp;
    uint8_t *codes;
    qtensor *o = j->out;
    int8_t *z;
    int rc = 0;
    void *p;
    TRY(begin(j, GEMV, &t, &codes, e));
    int64_t G = o->scale_cols, W = zero_words(j);
    for (size_t i = 0; i < (size_t)o->N * o->row_bytes; i++)
        codes[i] = t->data[i] ^ 0x88;
    TRY(find(j, "scales", o->N, 8 * W, NUM_F16, &s, e));
    TRY(find(j, "qzeros", o->N, W, NUM_I32, &zp, e));
    TRY(quant__own(o, (size_t)o->N, (size_t)G * 2, &p, e));
    TRY(put_zeros(j, &z, e));
    for (int64_t n = 0; n < o->N; n++) {
        memcpy((uint8_t *)p + (size_t)(n * G) * 2, s->data + (size_t)(n * 8 * W) * 2,
               (size_t)G * 2);
        for (int64_t g = 0; g < G; g++)
            z[n * G + g] =
                (int8_t)((int)num_get_bits(zp->data + (size_t)(n * W) * 4, (size_t)g, 4) - 8);
    }
    o->scales = p;
    o->scale_type = NUM_F16;
    drop_if_symmetric(j, z);
    rc = 0;
out:
    return rc;
}

/* ---- gemv_fast ----------------------------------------------------------------------------------
 */

static void unpack_fast(const ckpt_tensor *t, const qtensor *o, uint8_t *dst)
{
    for (int64_t r = 0; r < o->N / 4; r++)
        for (int64_t c = 0; c < o->K / 64; c++) {
            const uint8_t *src = t->data + (size_t)(r * o->K + 64 * c) * 2;
            for (int p = 0; p < 256; p++) {
                int i = p % 32, k = 32 * (p % 64 / 32) + 8 * (i % 4) + 2 * (i / 8) + i / 4 % 2;
                uint32_t u = num_get_bits(src, (size_t)p, 4) ^ 8;
                num_put_bits(dst + (size_t)(4 * r + p / 64) * o->row_bytes, (size_t)(64 * c + k), 4,
                             u);
            }
        }
}

/* Zero point of one group from -(scale * z): whole where it gives the stored value back. */
static float fast_zero(float scale, float product, bool *whole)
{
    if (scale == 0) {
        *whole &= product == 0;
        return 0;
    }
    float z = -product / scale, r = nearbyintf(z);
    bool same = r >= 0 && r <= 15 && num_round(NUM_F16, -(scale * r)) == product;
    *whole &= same;
    return (same ? r : z) - 8;
}

static int fast_scales(const quant__job *j, err *e)
{
    const ckpt_tensor *s, *zp;
    qtensor *o = j->out;
    int64_t G = o->scale_cols, W = zero_words(j);
    void *ps, *pf;
    int8_t *z;
    bool whole = true;
    int rc = 0;
    TRY(find(j, "scales", 8 * W, o->N, NUM_F16, &s, e));
    TRY(find(j, "qzeros", 8 * W, o->N, NUM_F16, &zp, e));
    TRY(quant__own(o, (size_t)o->N, (size_t)G * 2, &ps, e));
    TRY(quant__own(o, (size_t)o->N, (size_t)G * sizeof(float), &pf, e));
    TRY(put_zeros(j, &z, e));
    float *f = pf;
    for (int64_t n = 0; n < o->N; n++)
        for (int64_t g = 0; g < G; g++) {
            float scale, product;
            num_decode_row(NUM_F16, s->data + (size_t)(g * o->N + n) * 2, 1, &scale);
            num_decode_row(NUM_F16, zp->data + (size_t)(g * o->N + n) * 2, 1, &product);
            if (!isfinite(scale) || !isfinite(product)) {
                const ckpt_tensor *bad = isfinite(scale) ? zp : s;
                rc = err_set(e, ERR_VALUE, "%s: tensor '%s' is not finite at [%lld, %lld]",
                             bad->path, bad->name, (long long)g, (long long)n);
                goto out;
            }
            memcpy((uint8_t *)ps + (size_t)(n * G + g) * 2, s->data + (size_t)(g * o->N + n) * 2,
                   2);
            f[n * G + g] = fast_zero(scale, product, &whole);
        }
    for (int64_t i = 0; whole && i < o->N * G; i++)
        z[i] = (int8_t)f[i];
    o->scales = ps;
    o->scale_type = NUM_F16;
    if (!whole) {
        o->zeros = pf;
        o->zero_type = NUM_F32;
        o->spec.w.asym = true;
    } else {
        drop_if_symmetric(j, z);
    }
    rc = 0;
out:
    return rc;
}

static int load_fast(const quant__job *j, err *e)
{
    const ckpt_tensor *t;
    uint8_t *codes;
    int rc = begin(j, FAST, &t, &codes, e);
    if (rc < 0) return rc;
    unpack_fast(t, j->out, codes);
    return fast_scales(j, e);
}

int quant__awq_load(const quant_ckpt *q, const char *module, qtensor *out, err *e)
{
    quant__job j = {q, module, quant_group_of(q, module), out};
    layout l = ((const awq *)q->own)->l;
    return l == GEMM   ? quant__awq_load_gemm(&j, e)
           : l == GEMV ? load_gemv(&j, e)
                       : load_fast(&j, e);
}

void quant__f16_arith(const quant_ckpt *q, const qtensor *t, quant_arith *out)
{
    (void)q, (void)t;
    out->type = NUM_F16;
}
