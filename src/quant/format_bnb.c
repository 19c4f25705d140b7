/* bitsandbytes: 4-bit table codes with block scales (nf4, fp4), and LLM.int8.
 *
 *   X.weight            U8 [ceil(N*K/2), 1]: element 2i in the HIGH nibble of byte i, row-major
 * over the whole matrix (rows do not begin at bytes when K is odd). Stored under another type
 * (bnb_4bit_quant_storage) it is the same bytes. X.weight.absmax     F32 [ceil(N*K/B)], a
 * multiplier; blocks run over rows. Nested: U8 codes of it, absmax = nested_quant_map[code] *
 * nested_absmax[i/256] + nested_offset X.weight.quant_map  F32 [16]: the value of each code
 *   X.weight.quant_state.bitsandbytes__nf4 (__fp4)   U8, JSON text: blocksize, shape, offset …
 *   X.weight I8 [N,K], X.SCB F32 [N]     w = (q * SCB) * (1/127), in this order
 *
 * A module's own state says what it is; the config is held against it. Codes become canonical (low
 * nibble first, rows on bytes), nested scales F32. Where B divides K the grid is an ordinary one,
 * else the tensor is `flat`. Written: nf4 and fp4 with F32 scales, and LLM.int8 as it was read.
 * Refused: blocks that are no power of two from 32 to 4096, weight_format other than row, states
 * that contradict config or sizes, on writing anything that has zeros, order, or second factors. */
#include <stdio.h>
#include <string.h>
#include "quant/quant_int.h"

#define STATE_NF4  "weight.quant_state.bitsandbytes__nf4"
#define STATE_FP4  "weight.quant_state.bitsandbytes__fp4"
#define SCB_FACTOR (1.0f / 127.0f)

const quant_part quant__bnb_parts[] = {
    {".weight", QUANT_CODES},
    {".weight.absmax", QUANT_SCALES},
    {".weight.nested_absmax", QUANT_SCALES},
    {".weight.nested_quant_map", QUANT_LAYOUT},
    {".weight.quant_map", QUANT_LAYOUT},
    {"." STATE_NF4, QUANT_LAYOUT},
    {"." STATE_FP4, QUANT_LAYOUT},
    {".SCB", QUANT_SCALES},
    {".weight_format", QUANT_LAYOUT},
    {NULL, QUANT_CODES},
};

typedef struct state { /* the JSON of one weight */
    num_dtype code;
    int64_t block, N, K;
    num_dtype dtype; /* of the dequantized weight */
    bool nested;
    int64_t nested_block;
    double offset;
} state;

static const ckpt_tensor *find(const quant_ckpt *q, const char *module, const char *suffix)
{
    const ckpt_tensor *t = NULL;
    return quant__tensor(q, module, suffix, false, &t, NULL) < 0 ? NULL : t;
}

bool quant__bnb_has(const quant_ckpt *q, const char *module)
{
    return find(q, module, STATE_NF4) || find(q, module, STATE_FP4) || find(q, module, "SCB");
}

/* ---- the state of one weight -------------------------------------------------------------------
 */

static bool power_of_two(int64_t v, int64_t lo, int64_t hi)
{
    return v >= lo && v <= hi && (v & (v - 1)) == 0;
}

static int state_fields(const json *o, const char *where, state *s, err *e)
{
    int rc = 0;
    const char *type = "", *nested_type = "float32", *dtype = "bfloat16";
    const json *shape = json_get(o, "shape"), *n = shape ? shape->child : NULL;
    TRY(json_get_str(o, "quant_type", &type, where, e));
    TRY(json_get_i64(o, "blocksize", &s->block, where, e));
    TRY(json_get_i64(o, "nested_blocksize", &s->nested_block, where, e));
    s->nested = rc == 1;
    TRY(json_get_f64(o, "nested_offset", &s->offset, where, e));
    TRY(json_get_str(o, "nested_dtype", &nested_type, where, e));
    TRY(json_get_str(o, "dtype", &dtype, where, e));
    rc = 0;
    s->dtype = num_by_name(dtype, strlen(dtype));
    if (strcmp(type, s->code == NUM_NF4 ? "nf4" : "fp4"))
        rc = err_set(e, ERR_FORMAT, "%s: quant_type is '%s', which the tensor's name contradicts",
                     where, type);
    else if (!power_of_two(s->block, 32, 4096))
        rc = err_set(e, ERR_VALUE, "%s: blocksize is %lld; expected a power of two from 32 to 4096",
                     where, (long long)s->block);
    else if (!cJSON_IsArray(shape) || cJSON_GetArraySize(shape) != 2 || !cJSON_IsNumber(n) ||
             !cJSON_IsNumber(n->next) || n->valuedouble < 1 || n->next->valuedouble < 1 ||
             n->valuedouble > 0x1p31 || n->next->valuedouble > 0x1p31)
        rc = err_set(e, ERR_SHAPE, "%s: 'shape' must be two positive numbers", where);
    else if (s->dtype != NUM_BF16 && s->dtype != NUM_F16 && s->dtype != NUM_F32)
        rc = err_set(e, ERR_UNSUPPORTED, "%s: dtype '%s'; expected bfloat16, float16 or float32",
                     where, dtype);
    else if (s->nested && !power_of_two(s->nested_block, 32, 4096))
        rc = err_set(e, ERR_VALUE,
                     "%s: nested_blocksize is %lld; expected a power of two from 32 to 4096", where,
                     (long long)s->nested_block);
    else if (s->nested && strcmp(nested_type, "float32"))
        rc = err_set(e, ERR_UNSUPPORTED, "%s: nested_dtype '%s'; expected float32", where,
                     nested_type);
    if (rc < 0) return rc;
    s->N = (int64_t)n->valuedouble;
    s->K = (int64_t)n->next->valuedouble;
out:
    return rc < 0 ? rc : 0;
}

static int read_state(const quant_ckpt *q, const char *module, state *s, err *e)
{
    const ckpt_tensor *nf4 = find(q, module, STATE_NF4), *fp4 = find(q, module, STATE_FP4),
                      *t = nf4 ? nf4 : fp4;
    json *o = NULL;
    char where[800];
    if (nf4 && fp4)
        return err_set(e, ERR_FORMAT, "%s: module '%s' has a quant_state of nf4 and one of fp4",
                       t->path, module);
    *s = (state){.code = nf4 ? NUM_NF4 : NUM_BNB_FP4, .block = 64};
    snprintf(where, sizeof where, "%.250s: %.500s", t->path, t->name);
    if (t->dtype != NUM_U8) return err_set(e, ERR_DTYPE, "%s: must be U8 (JSON text)", where);
    int rc = json_parse(&o, (const char *)t->data, (size_t)t->bytes, where, e);
    if (rc >= 0) rc = state_fields(o, where, s, e);
    json_drop(o);
    return rc;
}

/* ---- config ------------------------------------------------------------------------------------
 */

typedef struct config {
    bool four, eight, fp16;
    double threshold;
    const char *type, *storage;
} config;

static int parse_config(const json *o, const char *where, config *c, err *e)
{
    int rc = 0;
    static const char *const stores[] = {"uint8", "int8", "float16", "bfloat16", "float32"};
    *c = (config){.threshold = 6, .type = "fp4", .storage = "uint8"};
    TRY(json_get_bool(o, "_load_in_4bit", &c->four, where, e));
    TRY(json_get_bool(o, "load_in_4bit", &c->four, where, e));
    TRY(json_get_bool(o, "_load_in_8bit", &c->eight, where, e));
    TRY(json_get_bool(o, "load_in_8bit", &c->eight, where, e));
    TRY(json_get_bool(o, "llm_int8_has_fp16_weight", &c->fp16, where, e));
    TRY(json_get_f64(o, "llm_int8_threshold", &c->threshold, where, e));
    TRY(json_get_str(o, "bnb_4bit_quant_type", &c->type, where, e));
    TRY(json_get_str(o, "bnb_4bit_quant_storage", &c->storage, where, e));
    rc = 0;
    bool known = false;
    for (size_t i = 0; i < sizeof stores / sizeof *stores; i++)
        known |= !strcmp(c->storage, stores[i]);
    if (c->four == c->eight)
        rc = err_set(e, ERR_FORMAT, "%s: %s of load_in_4bit and load_in_8bit is true; expected one",
                     where, c->four ? "each" : "neither");
    else if (c->four && strcmp(c->type, "nf4") && strcmp(c->type, "fp4"))
        rc = err_set(e, ERR_UNSUPPORTED, "%s: bnb_4bit_quant_type '%s'; expected nf4 or fp4", where,
                     c->type);
    else if (!known)
        rc = err_set(e, ERR_UNSUPPORTED,
                     "%s: bnb_4bit_quant_storage '%s'; expected uint8, int8, float16, bfloat16 or "
                     "float32",
                     where, c->storage);
    else if (c->eight && c->fp16)
        rc = err_set(e, ERR_UNSUPPORTED,
                     "%s: llm_int8_has_fp16_weight is true: such weights are not stored as int8",
                     where);
out:
    return rc < 0 ? rc : 0;
}

static int one_group(quant_ckpt *q, const config *c, err *e)
{
    qspec spec;
    const char *type = c->eight ? "int8" : c->type;
    int rc = qspec_parse(c->eight               ? "w:int8,channel"
                         : !strcmp(type, "nf4") ? "w:nf4,b64"
                                                : "w:bnb_fp4,b64",
                         &spec, e);
    if (rc >= 0 && !quant__group(q, &spec, type, QUANT_RULE_CLASS, "Linear", e)) rc = -ERR_FORMAT;
    return rc;
}

/* A weight of codes without its state, a state that the config does not speak of. */
static int check_module(quant_ckpt *q, const ckpt_tensor *t, const char *module, err *e)
{
    quant_group *g = q->groups;
    bool coded = t->dtype == NUM_U8 || t->dtype == NUM_I8;
    if (!quant__bnb_has(q, module))
        return !coded ? 0
                      : err_set(e, ERR_MISSING,
                                "%s: tensor '%s' holds codes, but neither '%s." STATE_NF4
                                "' (or __fp4) nor '%s.SCB' is there to say what they mean",
                                t->path, t->name, module, module);
    const char *kind = find(q, module, "SCB") ? "int8" : find(q, module, STATE_NF4) ? "nf4" : "fp4";
    if (strcmp(kind, g->format))
        return err_set(e, ERR_FORMAT,
                       "%s: '%s' is stored as %s, but the config says %s; config and tensors are "
                       "of different runs",
                       t->path, t->name, kind, g->format);
    state s = {0};
    int rc = strcmp(kind, "int8") ? read_state(q, module, &s, e) : 0;
    if (rc >= 0 && s.block && !g->hits++) {
        g->spec.w.group = (int32_t)s.block;
        q->own = arena_alloc(q->mem, sizeof(num_dtype));
        *(num_dtype *)q->own = s.dtype;
    }
    return rc < 0 ? rc : 0;
}

int quant__bnb_detect(quant_ckpt *q, err *e)
{
    config c;
    char module[QUANT_NAME_MAX];
    int rc = 0;
    TRY(parse_config(q->config, q->where, &c, e));
    TRY(one_group(q, &c, e));
    TRY(quant__ignore(q, json_get(q->config, "llm_int8_skip_modules"), q->where,
                      QUANT_RULE_COMPONENT, e));
    for (size_t i = 0; i < ckpt_n_tensors(q->c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(q->c, i);
        size_t n = strlen(t->name);
        if (n <= 7 || n - 7 >= sizeof module || strcmp(t->name + n - 7, ".weight")) continue;
        memcpy(module, t->name, n - 7);
        module[n - 7] = 0;
        TRY(check_module(q, t, module, e));
    }
    q->groups[0].hits = 0; /* the sweep counts them */
    TRY(quant__sweep(q, e));
    if (c.eight && c.threshold > 0)
        quant__warn(q,
                    "llm_int8_threshold %g: the int8 weights are multiplied with unquantized "
                    "inputs; the library's int8 inputs with outlier columns apart are not emulated",
                    c.threshold);
    rc = 1;
out:
    return rc;
}

/* ---- loading -----------------------------------------------------------------------------------
 */

/* A vector of n elements of a type, any shape. */
static int vector(const quant_ckpt *q, const char *module, const char *suffix, num_dtype type,
                  int64_t n, const ckpt_tensor **out, err *e)
{
    char want[64];
    int rc = quant__tensor(q, module, suffix, true, out, e);
    if (rc < 0) return rc;
    snprintf(want, sizeof want, "%s of %lld elements", num_infos[type].tag, (long long)n);
    if ((*out)->dtype != type || (*out)->bytes != (uint64_t)n * num_bytes(type, 1))
        return quant__wrong_shape(*out, e, "it must be %s", want);
    return 0;
}

/* High nibble first over the whole matrix, to canonical rows. */
static void unpack_codes(const uint8_t *src, qtensor *o, uint8_t *dst)
{
    for (int64_t r = 0; r < o->N; r++) {
        uint8_t *row = dst + (size_t)r * o->row_bytes;
        int64_t at = r * o->K, k = 0;
        for (; at % 2 == 0 && k + 1 < o->K; k += 2) {
            uint8_t b = src[(at + k) / 2];
            row[k / 2] = (uint8_t)(b << 4 | b >> 4);
        }
        for (; k < o->K; k++)
            num_put_bits(row, (size_t)k, 4,
                         (uint32_t)src[(at + k) / 2] >> ((at + k) % 2 ? 0 : 4) & 15);
    }
}

static int load_codes(const quant_ckpt *q, const char *module, const state *s, qtensor *o, err *e)
{
    const ckpt_tensor *t;
    void *p;
    int rc = quant__tensor(q, module, "weight", true, &t, e);
    if (rc < 0) return rc;
    uint64_t need = ((uint64_t)s->N * (uint64_t)s->K + 1) / 2;
    size_t unit = t->dtype == NUM_NONE ? 0 : num_bytes(t->dtype, 1);
    if (!unit || unit > 4 || t->bytes < need || t->bytes - need >= unit)
        return err_set(e, ERR_SHAPE,
                       "%s: tensor '%s' has %llu bytes; [%lld, %lld] 4-bit codes need %llu",
                       t->path, t->name, (unsigned long long)t->bytes, (long long)s->N,
                       (long long)s->K, (unsigned long long)need);
    qtensor_plain(o, s->code, s->N, s->K, NULL);
    o->spec = q->groups[0].spec;
    o->spec.w.group = (int32_t)s->block;
    rc = quant__own(o, (size_t)s->N, o->row_bytes, &p, e);
    if (rc < 0) return rc;
    memset(p, 0, (size_t)s->N * o->row_bytes);
    unpack_codes(t->data, o, p);
    o->codes = p;
    return 0;
}

static int load_map(const quant_ckpt *q, const char *module, qtensor *o, err *e)
{
    const ckpt_tensor *t;
    const float *known = o->code == NUM_NF4 ? num_nf4_table : num_bnb_fp4_table;
    void *p;
    int rc = vector(q, module, "weight.quant_map", NUM_F32, 16, &t, e);
    if (rc < 0) return rc;
    o->table = known;
    if (!memcmp(t->data, known, 64)) return 0;
    rc = quant__own(o, 16, sizeof(float), &p, e);
    if (rc < 0) return rc;
    memcpy(p, t->data, 64);
    o->table = p;
    for (int i = 0; i < 16; i++)
        if (!isfinite(o->table[i]))
            return err_set(e, ERR_VALUE, "%s: tensor '%s' [%d] is %g", t->path, t->name, i,
                           (double)o->table[i]);
    return 0;
}

/* Codes of scales to scales, in the library's order of roundings. */
static int nested_scales(const quant_ckpt *q, const char *module, const state *s, int64_t n,
                         float *out, err *e)
{
    const ckpt_tensor *codes, *map, *top;
    float table[256];
    int rc = 0;
    TRY(vector(q, module, "weight.absmax", NUM_U8, n, &codes, e));
    TRY(vector(q, module, "weight.nested_quant_map", NUM_F32, 256, &map, e));
    TRY(vector(q, module, "weight.nested_absmax", NUM_F32,
               n / s->nested_block + (n % s->nested_block != 0), &top, e));
    memcpy(table, map->data, sizeof table);
    for (int64_t i = 0; i < n; i++) {
        float a;
        memcpy(&a, top->data + 4 * (i / s->nested_block), 4);
        out[i] = table[codes->data[i]] * a;
        out[i] += (float)s->offset;
    }
out:
    return rc < 0 ? rc : 0;
}

static int load_scales(const quant_ckpt *q, const char *module, const state *s, qtensor *o, err *e)
{
    const ckpt_tensor *t;
    int64_t n = s->N * s->K / s->block + (s->N * s->K % s->block != 0);
    void *p;
    int rc = quant__own(o, (size_t)n, sizeof(float), &p, e);
    if (rc < 0) return rc;
    if (s->nested) {
        rc = nested_scales(q, module, s, n, p, e);
    } else {
        rc = vector(q, module, "weight.absmax", NUM_F32, n, &t, e);
        if (rc >= 0) memcpy(p, t->data, (size_t)n * sizeof(float));
    }
    if (rc < 0) return rc;
    o->scales = p;
    o->scale_type = NUM_F32;
    o->block_k = s->block;
    o->flat = s->K % s->block != 0;
    o->block_n = o->flat ? s->N : 1;
    o->scale_rows = o->flat ? 1 : s->N;
    o->scale_cols = o->flat ? n : s->K / s->block;
    return 0;
}

static int load_int8(const quant_ckpt *q, const char *module, qtensor *o, err *e)
{
    const ckpt_tensor *t, *scb, *fmt = find(q, module, "weight_format");
    void *p;
    int rc = quant__tensor(q, module, "weight", true, &t, e);
    if (rc < 0) return rc;
    if (t->dtype != NUM_I8 || t->n_dims != 2 || t->shape[0] < 1 || t->shape[1] < 1)
        return quant__wrong_shape(t, e, "it must be I8 [N, K]");
    if (fmt && (fmt->dtype != NUM_U8 || fmt->bytes != 1))
        return quant__wrong_shape(fmt, e, "it must be one U8");
    if (fmt && fmt->data[0])
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: '%s' is %d: the weight is laid out for one GPU; save it again in row "
                       "order",
                       fmt->path, fmt->name, fmt->data[0]);
    qtensor_plain(o, NUM_I8, t->shape[0], t->shape[1], t->data);
    o->spec = q->groups[0].spec;
    rc = vector(q, module, "SCB", NUM_F32, o->N, &scb, e);
    if (rc >= 0) rc = quant__own(o, (size_t)o->N, sizeof(float), &p, e);
    if (rc < 0) return rc;
    memcpy(p, scb->data, (size_t)o->N * sizeof(float));
    o->scales = p;
    o->scale_type = NUM_F32;
    o->block_n = 1;
    o->scale_rows = o->N;
    o->scale_cols = 1;
    o->n_global = 1;
    o->global_row[1] = o->N;
    o->global[0] = SCB_FACTOR;
    return 0;
}

int quant__bnb_load(const quant_ckpt *q, const char *module, qtensor *out, err *e)
{
    state s;
    int rc = 0;
    if (find(q, module, "SCB")) return load_int8(q, module, out, e);
    TRY(read_state(q, module, &s, e));
    TRY(load_codes(q, module, &s, out, e));
    TRY(load_map(q, module, out, e));
    TRY(load_scales(q, module, &s, out, e));
out:
    return rc;
}

/* The type that the states name; int8 is expanded in fp32. */
void quant__bnb_arith(const quant_ckpt *q, const qtensor *t, quant_arith *out)
{
    const num_dtype *dtype = q->own;
    if (t->code == NUM_I8 || !dtype) return;
    out->type = *dtype;
    out->once = true;
}

int quant__bnb_describe(const quant_ckpt *q, const char *module, quant_module *out, err *e)
{
    const ckpt_tensor *t = find(q, module, "weight");
    state s;
    *out = (quant_module){.spec = q->groups[0].spec, .format = q->groups[0].format, .E = 1};
    if (find(q, module, "SCB")) {
        if (!t || t->n_dims != 2)
            return err_set(e, ERR_SHAPE, "%s: module '%s' has no weight of 2 dimensions",
                           ckpt_path(q->c), module);
        out->N = t->shape[0];
        out->K = t->shape[1];
        return 0;
    }
    int rc = read_state(q, module, &s, e);
    if (rc < 0) return rc;
    out->spec.w.group = (int32_t)s.block;
    out->N = s.N;
    out->K = s.K;
    return 0;
}

/* ---- writing -----------------------------------------------------------------------------------
 */

/* The whole matrix as one stream, high nibble first: chunk `row` of `bytes` bytes. */
static void stream_codes(const qtensor *t, int64_t chunk, uint8_t *dst, size_t bytes)
{
    int64_t at = chunk * 2 * (int64_t)bytes, end = t->N * t->K;
    for (size_t i = 0; i < bytes; i++, at += 2) {
        uint32_t lo = at + 1 < end
                          ? num_get_bits(t->codes + (size_t)((at + 1) / t->K) * t->row_bytes,
                                         (size_t)((at + 1) % t->K), 4)
                          : 0;
        dst[i] = (uint8_t)(num_get_bits(t->codes + (size_t)(at / t->K) * t->row_bytes,
                                        (size_t)(at % t->K), 4)
                               << 4 |
                           lo);
    }
}

static int put_codes(ckpt_writer *w, const char *module, const qtensor *t, err *e)
{
    int64_t bytes = (t->N * t->K + 1) / 2, shape[2] = {bytes, 1}, step = 1;
    while (step < 4096 && bytes % (2 * step) == 0)
        step *= 2;
    int rc = quant__begin(w, module, ".weight", NUM_U8, 2, shape, e);
    return rc < 0 ? rc : quant__put_rows(w, t, bytes / step, stream_codes, (size_t)step, e);
}

static void state_text(const qtensor *t, num_dtype model_dtype, buf *b)
{
    buf_printf(b, "{\"quant_type\": \"%s\", \"blocksize\": %lld, \"dtype\": \"%s\", ",
               t->code == NUM_NF4 ? "nf4" : "fp4", (long long)t->block_k,
               model_dtype == NUM_F16   ? "float16"
               : model_dtype == NUM_F32 ? "float32"
                                        : "bfloat16");
    buf_printf(b, "\"shape\": [%lld, %lld]}", (long long)t->N, (long long)t->K);
}

static int store_int8(ckpt_writer *w, const char *module, const qtensor *t, err *e)
{
    int rc = 0;
    const int64_t shape[2] = {t->N, t->K};
    const uint8_t row_order = 0;
    if (t->code != NUM_I8 || t->spec.w.gran != Q_CHANNEL || t->scale_type != NUM_F32 ||
        t->n_global != 1 || t->global[0] != SCB_FACTOR)
        return err_set(e, ERR_UNSUPPORTED,
                       "module '%s': bitsandbytes holds nf4, fp4, and int8 with row scales of "
                       "amax times 1/127 in F32; these codes and scales would be changed",
                       module);
    TRY(quant__begin(w, module, ".weight", NUM_I8, 2, shape, e));
    TRY(quant__put_rows(w, t, t->N, quant__row_copy, (size_t)t->K, e));
    TRY(quant__put(w, module, ".SCB", NUM_F32, 1, shape, t->scales, e));
    TRY(quant__put(w, module, ".weight_format", NUM_U8, 0, shape, &row_order, e));
out:
    return rc;
}

int quant__bnb_store(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                     err *e)
{
    int rc = 0;
    buf text = {0};
    float *scales = NULL;
    const int64_t n = t->scale_rows * t->scale_cols, map = 16;
    bool four = num_infos[t->code].kind == 'T';
    TRY(quant__storable(t, module, "bitsandbytes",
                        QUANT_CAN_TABLE | QUANT_CAN_FLAT | (four ? 0 : QUANT_CAN_GLOBAL), e));
    if (!four) return store_int8(w, module, t, e);
    if (!t->table || !power_of_two(t->block_k, 32, 4096) || (!t->flat && t->K % t->block_k)) {
        rc = err_set(e, ERR_UNSUPPORTED,
                     "module '%s': blocks of %lld in rows of %lld; bitsandbytes has blocks of a "
                     "power of two from 32 to 4096 that run over the ends of rows",
                     module, (long long)t->block_k, (long long)t->K);
        goto out;
    }
    TRY(mem_alloc((void **)&scales, (size_t)n * sizeof *scales, e));
    num_decode_row(t->scale_type, t->scales, (size_t)n, scales);
    state_text(t, model_dtype, &text);
    const int64_t len = (int64_t)text.len;
    TRY(put_codes(w, module, t, e));
    TRY(quant__put(w, module, ".weight.absmax", NUM_F32, 1, &n, scales, e));
    TRY(quant__put(w, module, ".weight.quant_map", NUM_F32, 1, &map, t->table, e));
    TRY(quant__put(w, module, t->code == NUM_NF4 ? "." STATE_NF4 : "." STATE_FP4, NUM_U8, 1, &len,
                   text.data, e));
out:
    buf_free(&text);
    mem_free(scales);
    return rc < 0 ? rc : 0;
}

int quant__bnb_emit_config(jw *j, const qspec *s, char *const *ignore, int n_ignore, err *e)
{
    bool four = num_infos[s->w.type].kind == 'T';
    if (!four && (s->w.type != NUM_I8 || s->w.gran != Q_CHANNEL))
        return err_set(e, ERR_UNSUPPORTED,
                       "bitsandbytes holds w:nf4, w:bnb_fp4 and its own w:int8,channel only");
    if (s->a.gran != Q_NONE || qaxis_quantized(&s->kv))
        return err_set(e, ERR_UNSUPPORTED,
                       "bitsandbytes has no words for quantized activations or KV caches");
    jw_obj(j);
    jw_kbool(j, "_load_in_4bit", four);
    jw_kbool(j, "_load_in_8bit", !four);
    jw_kstr(j, "bnb_4bit_compute_dtype", four ? "bfloat16" : "float32");
    jw_kstr(j, "bnb_4bit_quant_storage", "uint8");
    jw_kstr(j, "bnb_4bit_quant_type", s->w.type == NUM_NF4 ? "nf4" : "fp4");
    jw_kbool(j, "bnb_4bit_use_double_quant", false);
    jw_kbool(j, "llm_int8_enable_fp32_cpu_offload", false);
    jw_kbool(j, "llm_int8_has_fp16_weight", false);
    jw_key(j, "llm_int8_skip_modules");
    jw_arr(j);
    for (int i = 0; i < n_ignore; i++)
        jw_str(j, ignore[i]);
    jw_end_arr(j);
    jw_key(j, "llm_int8_threshold");
    jw_raw(j, "6.0"); /* its reader takes no integer */
    jw_kbool(j, "load_in_4bit", four);
    jw_kbool(j, "load_in_8bit", !four);
    jw_kstr(j, "quant_method", "bitsandbytes");
    jw_end_obj(j);
    return 0;
}
