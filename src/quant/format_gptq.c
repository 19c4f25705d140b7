/* GPTQ: reading.
 *
 *   qweight  I32 [K*b/32, N]   column n, read downwards, is the LSB-first stream of the codes of
 *                              output n (3 bits: 32 codes in three words, two of them across words)
 *   qzeros   I32 [G, N*b/32]   the same stream along N; v1 holds z - 1, v2 holds z
 *   scales   F16 [G, N]        w[n, k] = scales[g, n] * (q[k, n] - z[g, n]), g = g_idx[k]
 *   g_idx    I32 [K]           k / group without activation order, which is then dropped
 *
 * So a canonical row is a column of words and one XOR a byte. K and N need not fill their words:
 * then g_idx tells K, and the last word of a column is padded.
 *
 * Zero points of v1 are words minus 0x11111111 (4 bits), as the tools that write v1 today take them
 * off: z = 0 borrows from its neighbour, so adding the same to the word gives every z back. 3-bit
 * fields, which cross words, wrap one by one. (CUDA kernels add 1 to each field instead and read a
 * borrowed neighbour one too low; where nothing was borrowed the readings agree.)
 *
 * v1 and v2 differ by one step in every weight, and files are labelled wrongly. Symmetric zero
 * points have one legal value, so there the tensors are held against the label. Of asymmetric ones
 * the weights themselves tell: their mean is near zero in units of a step, and one step away by the
 * wrong label. That is refused with the option that says which it is; 8-bit steps are too small to
 * tell.
 *
 * `dynamic` rules: the first matching key in file order decides, "-:" keeps a module unquantized,
 * fields that a rule lacks come from the top level. */
#include <stdio.h>
#include <string.h>
#include "quant/packed.h"

/* ---- config -------------------------------------------------------------------------------------
 */

typedef struct fields {
    int64_t bits, group;
    bool desc_act, sym;
} fields;

static int read_fields(const json *o, fields *f, const char *where, err *e)
{
    int rc = 0;
    TRY(json_get_i64(o, "bits", &f->bits, where, e));
    TRY(json_get_i64(o, "group_size", &f->group, where, e));
    TRY(json_get_bool(o, "desc_act", &f->desc_act, where, e));
    TRY(json_get_bool(o, "sym", &f->sym, where, e));
    rc = 0;
out:
    return rc;
}

static int add_group(quant_ckpt *q, const fields *f, const char *format, int kind,
                     const char *target, const char *where, err *e)
{
    qspec s;
    int rc = quant__packed_spec(q, f->bits, f->group, f->sym, where, &s, e);
    if (rc < 0) return rc;
    s.w.actorder = f->desc_act && s.w.gran == Q_GROUP;
    return quant__group(q, &s, format, kind, target, e) ? 0 : err_wrap(e, "%s", where);
}

static int read_dynamic(quant_ckpt *q, const fields *top, const char *format, err *e)
{
    const json *d = json_get(q->config, "dynamic");
    char where[400];
    int rc = 0;
    if (!d || cJSON_IsNull(d)) return 0;
    if (!cJSON_IsObject(d))
        return err_set(e, ERR_FORMAT, "%s: 'dynamic' must be an object of regex: overrides",
                       q->where);
    for (const json *r = d->child; r; r = r->next) {
        fields f = *top;
        bool minus = !strncmp(r->string, "-:", 2);
        const char *regex = minus || !strncmp(r->string, "+:", 2) ? r->string + 2 : r->string;
        snprintf(where, sizeof where, "%.250s: dynamic.%.100s", q->where, r->string);
        if (minus) {
            qspec plain = {{.type = NUM_BF16}, {.type = NUM_BF16}, q->kv};
            if (!quant__group(q, &plain, "dense", QUANT_RULE_REGEX, regex, e))
                return err_wrap(e, "%s", where);
            continue;
        }
        if (!cJSON_IsObject(r))
            return err_set(e, ERR_FORMAT, "%s: must be an object of overrides", where);
        TRY(read_fields(r, &f, where, e));
        TRY(add_group(q, &f, format, QUANT_RULE_REGEX, regex, where, e));
    }
    rc = 0;
out:
    return rc;
}

/* The label, and what other packings call themselves GPTQ. */
static int read_label(const quant_ckpt *q, const char **format, err *e)
{
    const char *old = NULL, *pack = "int32";
    bool marlin = false;
    int rc = 0;
    *format = NULL;
    TRY(json_get_str(q->config, "checkpoint_format", format, q->where, e));
    TRY(json_get_str(q->config, "format", &old, q->where, e));
    TRY(json_get_bool(q->config, "is_marlin_format", &marlin, q->where, e));
    TRY(json_get_str(q->config, "pack_dtype", &pack, q->where, e));
    if (*format && old && strcmp(*format, old))
        rc = err_set(e, ERR_FORMAT, "%s: checkpoint_format is '%s' but format is '%s'", q->where,
                     *format, old);
    if (!*format) *format = old ? old : "gptq";
    if (rc >= 0 && (marlin || (strcmp(*format, "gptq") && strcmp(*format, "gptq_v2"))))
        rc = err_set(e, ERR_UNSUPPORTED,
                     "%s: checkpoint_format '%s' is not read; expected gptq or gptq_v2 (convert "
                     "it with the tool that wrote it)",
                     q->where, marlin ? "marlin" : *format);
    else if (rc >= 0 && strcmp(pack, "int32"))
        rc = err_set(e, ERR_UNSUPPORTED, "%s: pack_dtype '%s' is not read; expected int32",
                     q->where, pack);
out:
    return rc < 0 ? rc : 0;
}

static int read_option(const quant_ckpt *q, quant__gptq *z, err *e)
{
    const char *o = q->opts.gptq_zeros;
    if (!o || !*o) return 0;
    if (strcmp(o, "v1") && strcmp(o, "v2"))
        return err_set(e, ERR_USAGE, "--gptq-zeros %s: expected v1 or v2", o);
    z->v2 = !strcmp(o, "v2");
    z->told = true;
    return 0;
}

int quant__gptq_option(const quant_ckpt *q, bool v2, quant__gptq *z, err *e)
{
    *z = (quant__gptq){.v2 = v2};
    return read_option(q, z, e);
}

/* True when v names (a part of) the module somewhere in its lists. */
static bool named(const json *v, const char *module)
{
    if (cJSON_IsString(v)) return strstr(module, v->valuestring) != NULL;
    for (const json *c = cJSON_IsArray(v) ? v->child : NULL; c; c = c->next)
        if (named(c, module)) return true;
    return false;
}

/* modules_in_block_to_quantize leaves the rest unquantized; the tensors decide all the same. */
static void check_block_list(quant_ckpt *q)
{
    const json *list = json_get(q->config, "modules_in_block_to_quantize");
    char module[QUANT_NAME_MAX], first[QUANT_NAME_MAX] = "";
    int n = 0;
    if (!cJSON_IsArray(list)) return;
    for (size_t i = 0; i < ckpt_n_tensors(q->c); i++) {
        const quant_part *p = quant_part_of(q, ckpt_tensor_at(q->c, i)->name, module);
        if (!p || p->kind != QUANT_CODES || named(list, module) || !strcmp(module, "lm_head"))
            continue;
        if (!n++) memcpy(first, module, sizeof first);
    }
    if (n)
        quant__warn(q,
                    "%s: modules_in_block_to_quantize does not name %s (%d such): it is stored "
                    "quantized and read so",
                    q->where, first, n);
}

int quant__gptq_detect(quant_ckpt *q, err *e)
{
    fields f = {.bits = 4, .group = 128, .sym = true};
    const char *format;
    int rc = 0;
    TRY(read_label(q, &format, e));
    TRY(read_fields(q->config, &f, q->where, e));
    quant__gptq *z = q->own = arena_alloc(q->mem, sizeof *z);
    TRY(quant__gptq_option(q, !strcmp(format, "gptq_v2"), z, e));
    TRY(read_dynamic(q, &f, format, e));
    TRY(add_group(q, &f, format, QUANT_RULE_CLASS, "Linear", q->where, e));
    TRY(quant__sweep(q, e));
    check_block_list(q);
    rc = 1;
out:
    return rc;
}

/* ---- codes --------------------------------------------------------------------------------------
 */

/* Rows of 32-bit words [rows, cols] to [cols, rows], in tiles that stay in the cache. */
static void transpose_words(const uint8_t *src, int64_t rows, int64_t cols, uint8_t *dst)
{
    enum { TILE = 32 };
    for (int64_t r0 = 0; r0 < rows; r0 += TILE)
        for (int64_t c0 = 0; c0 < cols; c0 += TILE) {
            int64_t r1 = r0 + TILE < rows ? r0 + TILE : rows,
                    c1 = c0 + TILE < cols ? c0 + TILE : cols;
            for (int64_t c = c0; c < c1; c++)
                for (int64_t r = r0; r < r1; r++)
                    memcpy(dst + 4 * (size_t)(c * rows + r), src + 4 * (size_t)(r * cols + c), 4);
        }
}

static int64_t words_of(int64_t n, int bits)
{
    return bits == 3 ? (n + 31) / 32 * 3 : (n * bits + 31) / 32;
}

/* K as g_idx has it, where that many codes take these rows; else all that the rows hold. */
static int64_t columns_of(const quant_ckpt *q, const char *module, int64_t rows, int bits)
{
    const ckpt_tensor *g;
    if (quant__tensor(q, module, "g_idx", false, &g, NULL) == 0 && g && g->n_dims == 1 &&
        g->shape[0] > 0 && g->shape[0] <= rows * 32 && words_of(g->shape[0], bits) == rows)
        return g->shape[0];
    return rows * 32 / bits;
}

static int shape_of(const quant_ckpt *q, const char *module, const qspec *s,
                    const ckpt_tensor **out, int64_t *N, int64_t *K, err *e)
{
    const ckpt_tensor *t;
    int bits = num_infos[s->w.type].bits;
    int rc = quant__tensor(q, module, "qweight", true, &t, e);
    if (rc < 0) return rc;
    if (t->dtype != NUM_I32) return quant__wrong_type(t, "I32", e);
    if (t->n_dims != 2 || t->shape[0] < 1 || t->shape[1] < 1)
        return quant__wrong_shape(t, e, "expected [K * %d / 32, N]", bits);
    if (bits == 3 && t->shape[0] % 3)
        return quant__wrong_shape(t, e, "3-bit codes fill multiples of 3 rows");
    *out = t;
    *N = t->shape[1];
    *K = columns_of(q, module, t->shape[0], bits);
    return 0;
}

int quant__gptq_describe_as(const quant_ckpt *q, const char *module, quant_module *out, err *e)
{
    const ckpt_tensor *t;
    return shape_of(q, module, &out->spec, &t, &out->N, &out->K, e);
}

static int load_codes(const quant__job *j, err *e)
{
    const ckpt_tensor *t;
    int64_t N = 0, K = 0;
    void *p;
    int rc = shape_of(j->q, j->module, &j->g->spec, &t, &N, &K, e);
    if (rc < 0) return rc;
    quant__packed_grid(j, N, K);
    qtensor *o = j->out;
    o->row_bytes = (size_t)t->shape[0] * 4;
    rc = quant__own(o, (size_t)N, o->row_bytes, &p, e);
    if (rc < 0) return rc;
    transpose_words(t->data, t->shape[0], N, p);
    uint8_t flip[8], *b = p;
    int bits = num_infos[o->code].bits;
    quant__flip_mask(bits, flip);
    for (int64_t n = 0; n < N; n++)
        for (size_t i = 0, f = 0; i < o->row_bytes; i++, f = f + 1 == (size_t)bits ? 0 : f + 1)
            b[(size_t)n * o->row_bytes + i] ^= flip[f];
    o->codes = p;
    return 0;
}

/* ---- order and scales ---------------------------------------------------------------------------
 */

static int load_order(const quant__job *j, err *e)
{
    const ckpt_tensor *t;
    qtensor *o = j->out;
    bool need = j->g->spec.w.actorder, natural = true;
    const void *p;
    int rc = quant__tensor(j->q, j->module, "g_idx", need, &t, e);
    if (rc < 0 || !t) return rc;
    if (t->dtype != NUM_I32) return quant__wrong_type(t, "I32", e);
    if (t->n_dims != 1 || t->shape[0] != o->K)
        return quant__wrong_shape(t, e, "the weight has %lld input columns", (long long)o->K);
    rc = quant__borrow(o, t, &p, e);
    if (rc < 0) return rc;
    const int32_t *g = p;
    for (int64_t k = 0; k < o->K; k++) {
        if (g[k] < 0 || g[k] >= o->scale_cols)
            return err_set(e, ERR_VALUE,
                           "%s: tensor '%s' names group %d at column %lld; there are %lld", t->path,
                           t->name, g[k], (long long)k, (long long)o->scale_cols);
        natural &= g[k] == k / o->block_k;
    }
    if (!natural) {
        o->g_idx = g;
        o->spec.w.actorder = true;
    }
    return 0;
}

static int load_scales(const quant__job *j, err *e)
{
    const ckpt_tensor *t;
    const qtensor *o = j->out;
    int bits = num_infos[o->code].bits;
    int rc = quant__tensor(j->q, j->module, "scales", true, &t, e);
    if (rc < 0) return rc;
    if (t->n_dims != 2 || t->shape[0] != o->scale_cols || t->shape[1] != o->N)
        return quant__wrong_shape(
            t, e, "a weight of [%lld, %lld] (%d bits, groups of %lld) needs [%lld, %lld]%s",
            (long long)o->N, (long long)o->K, bits, (long long)o->block_k, (long long)o->scale_cols,
            (long long)o->N,
            t->n_dims == 2 && t->shape[1] == o->N * 32 / bits
                ? "; these are tensors of AWQ, not of GPTQ"
                : "");
    return quant__scales_transposed(j, t, e);
}

/* ---- zero points --------------------------------------------------------------------------------
 */

/* Zero points minus 2^(b-1), [N, G], of a tensor of the shape that load_zeros has checked. */
static int read_zeros(const quant__job *j, const ckpt_tensor *t, bool v2, int8_t *out, err *e)
{
    const qtensor *o = j->out;
    int bits = num_infos[o->code].bits, half = 1 << (bits - 1), mask = 2 * half - 1;
    uint32_t one = 0xffffffffu / (uint32_t)mask, w; /* 1 in every field */
    int64_t G = o->scale_cols, words = t->shape[1];
    uint8_t *row = NULL;
    int rc = mem_alloc((void **)&row, (size_t)words * 4, e);
    if (rc < 0) return rc;
    for (int64_t g = 0; g < G; g++) {
        for (int64_t i = 0; i < words; i++) {
            memcpy(&w, t->data + 4 * (size_t)(g * words + i), 4);
            if (!v2 && bits != 3) w += one;
            memcpy(row + 4 * i, &w, 4);
        }
        for (int64_t n = 0; n < o->N; n++) {
            int z = (int)num_get_bits(row, (size_t)n, bits);
            if (!v2 && bits == 3) z = (z + 1) & mask;
            out[n * G + g] = (int8_t)(z - half);
        }
    }
    mem_free(row);
    return 0;
}

static int wrong_label(const quant__job *j, const ckpt_tensor *t, bool v2, const char *how, err *e)
{
    return err_set(
        e, ERR_FORMAT,
        "%s: tensor '%s': %s says %s zero points (stored %s), but the tensors are of %s: "
        "%s. Say --gptq-zeros %s if they are, or --gptq-zeros %s to trust the label",
        t->path, t->name, j->q->where, v2 ? "v2" : "v1", v2 ? "as they are" : "minus one",
        v2 ? "v1" : "v2", how, v2 ? "v1" : "v2", v2 ? "v2" : "v1");
}

static bool all_zero(const int8_t *z, int64_t n, int64_t *at)
{
    for (*at = 0; *at < n; ++*at)
        if (z[*at]) return false;
    return true;
}

/* Symmetric files have one zero point, 2^(b-1): 0 here. `other` is read by the other label. */
static int check_symmetric(const quant__job *j, const ckpt_tensor *t, const quant__gptq *z,
                           const int8_t *mine, const int8_t *other, err *e)
{
    int64_t G = j->out->scale_cols, n = j->out->N * G, at, ignored;
    int half = 1 << (num_infos[j->out->code].bits - 1);
    if (all_zero(mine, n, &at)) return 0;
    if (!z->told && all_zero(other, n, &ignored))
        return wrong_label(j, t, z->v2, "every one is the symmetric one of that format", e);
    return err_set(e, ERR_FORMAT,
                   "%s: tensor '%s' holds the zero point %d (output %lld, group %lld), but %s says "
                   "symmetric, which is %d; if the weights are asymmetric, correct 'sym'",
                   t->path, t->name, mine[at] + half, (long long)(at / G), (long long)(at % G),
                   j->q->where, half);
}

/* Mean of code - zero point over rows spread over the weight; false when they are few. */
static bool mean_steps(const qtensor *o, const int8_t *z, double *out)
{
    enum { ROWS = 64, ENOUGH = 2048 };
    int64_t step = o->N > ROWS ? o->N / ROWS : 1, n = 0;
    double sum = 0;
    for (int64_t r = 0; r < o->N; r += step) {
        int64_t row = 0;
        for (int64_t k = 0; k < o->K; k++)
            row += qtensor_code(o, r, k) -
                   z[r * o->scale_cols + (o->g_idx ? o->g_idx[k] : k / o->block_k)];
        sum += (double)row;
        n += o->K;
    }
    *out = sum / (double)n;
    return n >= ENOUGH;
}

/* By the right label the mean weight is about 0 steps, by the wrong one about 1. */
static int check_asymmetric(const quant__job *j, const ckpt_tensor *t, const quant__gptq *z,
                            const int8_t *mine, const int8_t *other, err *e)
{
    double m, o;
    char how[100];
    if (z->told || num_infos[j->out->code].bits == 8 || !mean_steps(j->out, mine, &m)) return 0;
    mean_steps(j->out, other, &o);
    if (fabs(m) < 0.75 || fabs(m) > 1.25 || fabs(o) > 0.25) return 0;
    snprintf(how, sizeof how, "by the label the mean weight is %+.2f steps, else %+.2f", m, o);
    return wrong_label(j, t, z->v2, how, e);
}

static int load_zeros(const quant__job *j, const quant__gptq *z, err *e)
{
    const ckpt_tensor *t;
    qtensor *o = j->out;
    int bits = num_infos[o->code].bits;
    int64_t G = o->scale_cols, words = words_of(o->N, bits);
    int8_t *other = NULL;
    void *mine;
    int rc = 0;
    TRY(quant__tensor(j->q, j->module, "qzeros", true, &t, e));
    if (t->dtype != NUM_I32) return quant__wrong_type(t, "I32", e);
    if (t->n_dims != 2 || t->shape[0] != G || t->shape[1] != words)
        return quant__wrong_shape(
            t, e, "%lld groups of %lld zero points of %d bits need [%lld, %lld]", (long long)G,
            (long long)o->N, bits, (long long)G, (long long)words);
    TRY(quant__own(o, (size_t)o->N, (size_t)G, &mine, e));
    TRY(mem_alloc((void **)&other, (size_t)(o->N * G), e));
    TRY(read_zeros(j, t, z->v2, mine, e));
    TRY(read_zeros(j, t, !z->v2, other, e));
    if (j->g->spec.w.asym) {
        TRY(check_asymmetric(j, t, z, mine, other, e));
        o->zeros = mine;
        o->zero_type = NUM_I8;
    } else {
        TRY(check_symmetric(j, t, z, mine, other, e));
    }
    rc = 0;
out:
    mem_free(other);
    return rc;
}

int quant__gptq_load_as(const quant__job *j, const quant__gptq *z, err *e)
{
    int rc = 0;
    TRY(load_codes(j, e));
    TRY(load_order(j, e));
    TRY(load_scales(j, e));
    TRY(load_zeros(j, z, e));
out:
    return rc;
}

int quant__gptq_load(const quant_ckpt *q, const char *module, qtensor *out, err *e)
{
    quant__job j = {q, module, quant_group_of(q, module), out};
    return quant__gptq_load_as(&j, q->own, e);
}

/* The library computes in the model's type, to which it also rounds the F16 scale. */
void quant__gptq_arith(const quant_ckpt *q, const qtensor *t, quant_arith *out)
{
    (void)t;
    const ckpt_tensor *any = ckpt_find(q->c, "model.norm.weight");
    for (size_t i = 0; !any && i < ckpt_n_tensors(q->c); i++) {
        const ckpt_tensor *c = ckpt_tensor_at(q->c, i);
        size_t n = strlen(c->name);
        if (n > 12 && !strcmp(c->name + n - 12, ".norm.weight")) any = c;
    }
    out->type = any && any->dtype == NUM_F16 ? NUM_F16 : NUM_BF16;
    out->scale_first = true;
}
