/* GPTQ and AWQ: writing. The mirrors of format_gptq.c and format_awq.c.
 *
 * GPTQ: symmetric weights as v1 (zero points 0x77777777 …), which every reader knows. Asymmetric
 * ones as v2: v1 has no word for zero point 0, which a group may need, and whether one does is
 * known only after the last module, when all are written. g_idx is written always, as the tools do.
 * AWQ: gemm, 4 bits.
 *
 * Scales are F16 in both. A scale that F16 cannot hold exactly is refused in AWQ, and kept as BF16
 * in GPTQ if it is one. Refused by name: widths, grids and zero points that the packing has no
 * place for, and shapes that do not fill its words. */
#include <stdio.h>
#include <string.h>
#include "quant/packed.h"

#define BUFFER ((size_t)1 << 20)

typedef struct sink {
    ckpt_writer *w;
    const char *module, *dialect;
    const qtensor *t;
    num_dtype scale_type;
} sink;

static int put(const sink *s, const char *suffix, num_dtype type, int64_t a, int64_t b,
               const void *data, err *e)
{
    int64_t shape[2] = {a, b};
    return quant__put(s->w, s->module, suffix, type, b ? 2 : 1, shape, data, e);
}

/* ---- what fits ----------------------------------------------------------------------------------
 */

static bool scales_are(const qtensor *t, num_dtype type)
{
    float v[256];
    int64_t n = t->scale_rows * t->scale_cols;
    size_t one = num_bytes(t->scale_type, 1);
    for (int64_t i = 0; i < n; i += 256) {
        int64_t m = n - i < 256 ? n - i : 256;
        num_decode_row(t->scale_type, (const uint8_t *)t->scales + one * (size_t)i, (size_t)m, v);
        for (int64_t j = 0; j < m; j++)
            if (num_round(type, v[j]) != v[j]) return false;
    }
    return true;
}

static bool zeros_fit(const qtensor *t)
{
    int half = 1 << (num_infos[t->code].bits - 1);
    const int8_t *z = t->zeros;
    for (int64_t i = 0; z && i < t->scale_rows * t->scale_cols; i++)
        if (z[i] < -half || z[i] >= half) return false;
    return true;
}

static int check(sink *s, bool gptq, err *e)
{
    const qtensor *t = s->t;
    const qaxis *w = &t->spec.w;
    int bits = num_infos[t->code].bits;
    bool width = num_infos[t->code].kind == 'I' &&
                 (bits == 4 || (gptq && (bits == 2 || bits == 3 || bits == 8)));
    int rc = quant__storable(t, s->module, s->dialect,
                             QUANT_CAN_ZEROS | (gptq ? QUANT_CAN_ORDER : 0), e);
    if (rc < 0) return rc;
    int64_t fill = bits == 3 ? 32 : 32 / bits;
    const char *why = !width ? (gptq ? "codes other than integers of 2, 3, 4 or 8 bits"
                                     : "codes other than integers of 4 bits")
                      : w->scale != QS_FLOAT || (w->gran != Q_GROUP && w->gran != Q_CHANNEL)
                          ? "scales that are not one a group or one a row"
                      : gptq && t->K % fill
                          ? "a number of input columns that does not fill its words"
                      : t->N % fill   ? "a number of output rows that does not fill its words"
                      : !zeros_fit(t) ? "a zero point outside of the range of the codes"
                                      : NULL;
    s->scale_type = NUM_F16;
    if (!why && !scales_are(t, NUM_F16)) {
        s->scale_type = t->scale_type;
        if (!gptq || t->scale_type != NUM_BF16) why = "scales that F16 cannot express";
    }
    if (why)
        return err_set(e, ERR_UNSUPPORTED, "module '%s': %s cannot hold %s", s->module, s->dialect,
                       why);
    return 0;
}

/* ---- scales and order, which both have ----------------------------------------------------------
 */

static int store_scales(const sink *s, err *e)
{
    const qtensor *t = s->t;
    int64_t G = t->scale_cols, N = t->N;
    size_t from = num_bytes(t->scale_type, 1);
    uint16_t *out = NULL;
    int rc = mem_alloc((void **)&out, (size_t)(N * G) * 2, e);
    if (rc < 0) return rc;
    for (int64_t n = 0; n < N; n++)
        for (int64_t g = 0; g < G; g++) {
            float v;
            num_decode_row(t->scale_type, (const uint8_t *)t->scales + from * (size_t)(n * G + g),
                           1, &v);
            out[g * N + n] = s->scale_type == NUM_F16 ? num_f32_to_f16(v) : num_f32_to_bf16(v);
        }
    rc = put(s, ".scales", s->scale_type, G, N, out, e);
    mem_free(out);
    return rc;
}

static int store_order(const sink *s, err *e)
{
    const qtensor *t = s->t;
    int32_t *g = NULL;
    int rc = mem_alloc((void **)&g, (size_t)t->K * sizeof *g, e);
    if (rc < 0) return rc;
    for (int64_t k = 0; k < t->K; k++)
        g[k] = t->g_idx ? t->g_idx[k] : (int32_t)(k / t->block_k);
    rc = put(s, ".g_idx", NUM_I32, t->K, 0, g, e);
    mem_free(g);
    return rc;
}

/* ---- GPTQ ---------------------------------------------------------------------------------------
 */

/* Columns of words: word r of every output, one line of the tensor after the other. */
static int gptq_codes(const sink *s, err *e)
{
    const qtensor *t = s->t;
    int bits = num_infos[t->code].bits;
    int64_t R = t->K * bits / 32, step = (int64_t)(BUFFER / ((size_t)t->N * 4)),
            shape[2] = {R, t->N};
    uint8_t flip[8], *b = NULL;
    int rc = 0;
    if (step < 1) step = 1;
    quant__flip_mask(bits, flip);
    TRY(quant__begin(s->w, s->module, ".qweight", NUM_I32, 2, shape, e));
    TRY(mem_alloc((void **)&b, (size_t)(step * t->N) * 4, e));
    for (int64_t r = 0; r < R; r += step) {
        int64_t end = r + step < R ? r + step : R;
        for (int64_t n = 0; n < t->N; n++)
            for (int64_t i = r; i < end; i++) {
                uint8_t *d = b + (size_t)((i - r) * t->N + n) * 4;
                const uint8_t *c = t->codes + (size_t)n * t->row_bytes + (size_t)i * 4;
                for (size_t k = 0; k < 4; k++)
                    d[k] = c[k] ^ flip[((size_t)i * 4 + k) % (size_t)bits];
            }
        TRY(ckpt_writer_data(s->w, b, (size_t)((end - r) * t->N) * 4, e));
    }
out:
    mem_free(b);
    return rc < 0 ? rc : 0;
}

/* v1 where there are none of its own (2^(b-1) - 1), else v2. */
static int gptq_zeros(const sink *s, err *e)
{
    const qtensor *t = s->t;
    int bits = num_infos[t->code].bits, half = 1 << (bits - 1);
    int64_t G = t->scale_cols, words = t->N * bits / 32;
    uint8_t *out = NULL;
    int rc = mem_alloc((void **)&out, (size_t)(G * words) * 4, e);
    if (rc < 0) return rc;
    memset(out, 0, (size_t)(G * words) * 4);
    for (int64_t g = 0; g < G; g++)
        for (int64_t n = 0; n < t->N; n++) {
            int z = t->zeros ? ((const int8_t *)t->zeros)[n * G + g] + half : half - 1;
            num_put_bits(out + (size_t)(g * words) * 4, (size_t)n, bits, (uint32_t)z);
        }
    rc = put(s, ".qzeros", NUM_I32, G, words, out, e);
    mem_free(out);
    return rc;
}

int quant__gptq_store(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                      err *e)
{
    int rc = 0;
    (void)model_dtype;
    sink s = {.w = w, .module = module, .dialect = "gptq", .t = t};
    TRY(check(&s, true, e));
    TRY(gptq_codes(&s, e));
    TRY(gptq_zeros(&s, e));
    TRY(store_scales(&s, e));
    TRY(store_order(&s, e));
out:
    return rc;
}

/* Before any work: what a scheme asks for that the dialect has no words for. */
static int emit_check(const qspec *s, const char *dialect, bool gptq, err *e)
{
    buf text = {0};
    const qaxis *w = &s->w;
    int bits = num_infos[w->type].bits;
    bool width = num_infos[w->type].kind == 'I' &&
                 (bits == 4 || (gptq && (bits == 2 || bits == 3 || bits == 8)));
    const char *why = !width ? (gptq ? "weights other than integers of 2, 3, 4 or 8 bits"
                                     : "weights other than integers of 4 bits")
                      : w->scale != QS_FLOAT || (w->gran != Q_GROUP && w->gran != Q_CHANNEL)
                          ? "scales that are not one a group or one a row"
                      : w->actorder && !gptq ? "an order of columns"
                      : s->a.gran != Q_NONE  ? "quantized activations"
                      : qaxis_quantized(&s->kv)
                          ? "a quantized KV cache (choose it when serving: --kv-cache-dtype)"
                          : NULL;
    if (!why) return 0;
    qspec_format(s, &text);
    int rc =
        err_set(e, ERR_UNSUPPORTED, "scheme '%s': %s has no words for %s", text.data, dialect, why);
    buf_free(&text);
    return rc;
}

/* "re:X" as X, a name as ^name$ with its dots escaped. */
static void name_regex(const char *rule, buf *b)
{
    if (!strncmp(rule, "re:", 3)) {
        buf_puts(b, rule + 3);
        return;
    }
    buf_putc(b, '^');
    for (const char *p = rule; *p; p++) {
        if (strchr("\\.^$|()[]{}*+?", *p)) buf_putc(b, '\\');
        buf_putc(b, *p);
    }
    buf_putc(b, '$');
}

static int64_t group_of(const qaxis *w)
{
    return w->gran == Q_GROUP ? w->group : -1;
}

static void gptq_rule(jw *j, const char *module, const qaxis *w)
{
    buf key = {0};
    buf_puts(&key, w ? "+:" : "-:");
    name_regex(module, &key);
    jw_key(j, key.data);
    buf_free(&key);
    jw_obj(j);
    if (w) {
        jw_ki64(j, "bits", num_infos[w->type].bits);
        jw_ki64(j, "group_size", group_of(w));
        jw_kbool(j, "desc_act", w->actorder);
        jw_kbool(j, "sym", !w->asym);
    }
    jw_end_obj(j);
}

static bool like(const qaxis *a, const qaxis *b)
{
    return a->type == b->type && group_of(a) == group_of(b) && a->asym == b->asym;
}

static void gptq_dynamic(jw *j, const qaxis *top, const quant_written *m, int n,
                         char *const *ignore, int n_ignore)
{
    int rules = 0;
    for (int i = 0; i < n; i++)
        rules += !like(&m[i].spec.w, top);
    for (int i = 0; i < n_ignore; i++)
        rules += strcmp(ignore[i], "lm_head") != 0;
    if (!rules) return;
    jw_key(j, "dynamic");
    jw_obj(j);
    for (int i = 0; i < n_ignore; i++)
        if (strcmp(ignore[i], "lm_head")) gptq_rule(j, ignore[i], NULL);
    for (int i = 0; i < n; i++)
        if (!like(&m[i].spec.w, top)) gptq_rule(j, m[i].module, &m[i].spec.w);
    jw_end_obj(j);
}

static bool head_is_quantized(const quant_written *m, int n)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(m[i].module, "lm_head")) return true;
    return false;
}

/* The scheme that most modules have stands at the top; the others are dynamic rules. */
static const qaxis *commonest(const quant_written *m, int n)
{
    int best = 0, at = 0;
    for (int i = 0; i < n; i++) {
        int same = 0;
        for (int k = i; k < n; k++)
            same += like(&m[k].spec.w, &m[i].spec.w);
        if (same > best) best = same, at = i;
        if (2 * best >= n) break;
    }
    return &m[at].spec.w;
}

int quant__gptq_emit_modules(jw *j, const quant_written *m, int n, const qaxis *kv,
                             char *const *ignore, int n_ignore, err *e)
{
    bool order = false;
    const qaxis *top = commonest(m, n);
    for (int i = 0; i < n; i++) {
        qspec s = m[i].spec;
        s.kv = *kv;
        int rc = emit_check(&s, "gptq", true, e);
        if (rc < 0) return rc;
        order |= s.w.actorder;
        if (s.w.asym != top->asym)
            return err_set(e, ERR_UNSUPPORTED,
                           "module '%s': symmetric and asymmetric weights need zero points of two "
                           "formats; a GPTQ checkpoint has one",
                           m[i].module);
    }
    jw_obj(j);
    jw_ki64(j, "bits", num_infos[top->type].bits);
    jw_kstr(j, "checkpoint_format", top->asym ? "gptq_v2" : "gptq");
    jw_kbool(j, "desc_act", order);
    gptq_dynamic(j, top, m, n, ignore, n_ignore);
    jw_kstr(j, "format", top->asym ? "gptq_v2" : "gptq");
    jw_ki64(j, "group_size", group_of(top));
    jw_kbool(j, "lm_head", head_is_quantized(m, n));
    jw_kstr(j, "pack_dtype", "int32");
    jw_kstr(j, "quant_method", "gptq");
    jw_kbool(j, "sym", !top->asym);
    jw_end_obj(j);
    return 0;
}

int quant__gptq_emit_config(jw *j, const qspec *s, char *const *ignore, int n_ignore, err *e)
{
    const quant_written all = {"", *s};
    return quant__gptq_emit_modules(j, &all, 1, &s->kv, ignore, n_ignore, e);
}

/* ---- AWQ ----------------------------------------------------------------------------------------
 */

static const uint8_t order[8] = {0, 2, 4, 6, 1, 3, 5, 7};

/* Line k of the codes: eight outputs a word, interleaved. */
static void awq_lines(const qtensor *t, int64_t k0, int64_t k1, uint32_t *out)
{
    int64_t C = t->N / 8;
    memset(out, 0, (size_t)((k1 - k0) * C) * 4);
    for (int64_t c = 0; c < C; c++)
        for (int i = 0; i < 8; i++) {
            const uint8_t *row = t->codes + (size_t)(8 * c + order[i]) * t->row_bytes;
            for (int64_t k = k0; k < k1; k++)
                out[(k - k0) * C + c] |= ((uint32_t)(row[k / 2] >> (4 * (k & 1)) & 15) ^ 8u)
                                         << (4 * i);
        }
}

static int awq_codes(const sink *s, err *e)
{
    const qtensor *t = s->t;
    int64_t C = t->N / 8, step = (int64_t)(BUFFER / ((size_t)C * 4)), shape[2] = {t->K, C};
    uint32_t *b = NULL;
    int rc = 0;
    step = step < 1 ? 1 : step > 64 ? 64 : step;
    TRY(quant__begin(s->w, s->module, ".qweight", NUM_I32, 2, shape, e));
    TRY(mem_alloc((void **)&b, (size_t)(step * C) * 4, e));
    for (int64_t k = 0; k < t->K; k += step) {
        int64_t end = k + step < t->K ? k + step : t->K;
        awq_lines(t, k, end, b);
        TRY(ckpt_writer_data(s->w, b, (size_t)((end - k) * C) * 4, e));
    }
out:
    mem_free(b);
    return rc < 0 ? rc : 0;
}

static int awq_zeros(const sink *s, err *e)
{
    const qtensor *t = s->t;
    int64_t G = t->scale_cols, C = t->N / 8;
    uint32_t *out = NULL;
    int rc = mem_alloc((void **)&out, (size_t)(G * C) * 4, e);
    if (rc < 0) return rc;
    memset(out, 0, (size_t)(G * C) * 4);
    for (int64_t g = 0; g < G; g++)
        for (int64_t n = 0; n < t->N; n++) {
            int64_t row = n / 8 * 8 + order[n % 8];
            int z = 8 + (t->zeros ? ((const int8_t *)t->zeros)[row * G + g] : 0);
            out[g * C + n / 8] |= (uint32_t)z << (4 * (n % 8));
        }
    rc = put(s, ".qzeros", NUM_I32, G, C, out, e);
    mem_free(out);
    return rc;
}

int quant__awq_store(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                     err *e)
{
    int rc = 0;
    (void)model_dtype;
    sink s = {.w = w, .module = module, .dialect = "awq", .t = t};
    TRY(check(&s, false, e));
    TRY(awq_codes(&s, e));
    TRY(awq_zeros(&s, e));
    TRY(store_scales(&s, e));
out:
    return rc;
}

int quant__awq_emit_config(jw *j, const qspec *s, char *const *ignore, int n_ignore, err *e)
{
    int rc = emit_check(s, "awq", false, e);
    if (rc < 0) return rc;
    for (int i = 0; i < n_ignore; i++)
        if (!strncmp(ignore[i], "re:", 3))
            return err_set(e, ERR_UNSUPPORTED,
                           "modules_to_not_convert holds names; it cannot say '%s'", ignore[i]);
    jw_obj(j);
    jw_ki64(j, "bits", 4);
    jw_ki64(j, "group_size", group_of(&s->w));
    jw_key(j, "modules_to_not_convert");
    jw_arr(j);
    for (int i = 0; i < n_ignore; i++)
        jw_str(j, ignore[i]);
    jw_end_arr(j);
    jw_kstr(j, "quant_method", "awq");
    jw_kstr(j, "version", "gemm");
    jw_kbool(j, "zero_point", true);
    jw_end_obj(j);
    return 0;
}
