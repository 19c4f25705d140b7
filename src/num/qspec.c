/* The scheme grammar, the presets, and their canonical text. */
#include "num/qspec.h"
#include <ctype.h>
#include <stdio.h>
#include <string.h>

const qpreset qspec_presets[] = {
    {"fp8", "w:fp8_e4m3,channel a:fp8_e4m3,token",
     "FP8 weights by channel, activations by token; near-lossless, no calibration"},
    {"fp8-tensor", "w:fp8_e4m3,tensor a:fp8_e4m3,token", "FP8 with one scale a matrix"},
    {"fp8-block", "w:fp8_e4m3,block128x128 a:fp8_e4m3,group128",
     "FP8 in 128x128 blocks, as DeepSeek"},
    {"fp8-w8a16", "w:fp8_e4m3,channel", "FP8 weights only"},
    {"int8", "w:int8,channel a:int8,token", "INT8 weights by channel, activations by token"},
    {"int8-w8a16", "w:int8,channel", "INT8 weights only"},
    {"int4", "w:int4,g128", "4-bit weights in groups of 128"},
    {"int4-asym", "w:int4,g128,asym", "4-bit weights with zero points"},
    {"int3", "w:int3,g128", "3-bit weights in groups of 128; expect a loss"},
    {"int2", "w:int2,g64", "2-bit weights in groups of 64; expect a large loss"},
    {"nvfp4", "w:nvfp4,g16",
     "FP4 with E4M3 scales on 16 values and one global scale, weights only"},
    {"mxfp4", "w:mxfp4,g32", "FP4 with power-of-two scales on 32 values, weights only"},
};
const int qspec_n_presets = sizeof qspec_presets / sizeof *qspec_presets;

bool qaxis_quantized(const qaxis *a)
{
    return a->gran != Q_NONE || (a->type != NUM_BF16 && a->type != NUM_F16 && a->type != NUM_F32);
}

bool qaxis_equal(const qaxis *a, const qaxis *b)
{
    return a->type == b->type && a->gran == b->gran && a->group == b->group &&
           a->block_n == b->block_n && a->block_k == b->block_k && a->asym == b->asym &&
           a->actorder == b->actorder && a->dynamic == b->dynamic && a->scale == b->scale;
}

typedef struct word {
    const char *s;
    size_t n;
} word;

static bool is(word w, const char *text)
{
    return strlen(text) == w.n && !memcmp(w.s, text, w.n);
}

/* Digits after `prefix`: "g128" with "g". */
static bool number_after(word w, const char *prefix, int32_t *out)
{
    size_t k = strlen(prefix);
    if (w.n <= k || w.n > k + 7 || memcmp(w.s, prefix, k)) return false;
    int32_t v = 0;
    for (size_t i = k; i < w.n; i++) {
        if (!isdigit((unsigned char)w.s[i])) return false;
        v = v * 10 + (w.s[i] - '0');
    }
    *out = v;
    return v > 0;
}

static bool block_word(word w, int32_t *bn, int32_t *bk)
{
    if (w.n < 8 || memcmp(w.s, "block", 5)) return false;
    size_t x = 5;
    while (x < w.n && w.s[x] != 'x')
        x++;
    return x + 1 < w.n && number_after((word){w.s + 5, x - 5}, "", bn) &&
           number_after((word){w.s + x + 1, w.n - x - 1}, "", bk);
}

static const char *const allowed[] = {
    "w takes int2 to int8, fp8_e4m3, nvfp4, mxfp4, nf4 or bf16/f16/f32, then tensor, channel, gN, "
    "blockNxK, asym, actorder",
    "a takes bf16, f16, f32, fp8_e4m3, int8, nvfp4 or mxfp4, then token, tensor, groupN, static, "
    "asym",
    "kv takes bf16, fp8_e4m3, fp8_e5m2, int8 or fp4, then tensor, head, token_head, gN"};

static int bad(word w, char axis, err *e)
{
    int i = axis == 'w' ? 0 : axis == 'a' ? 1 : 2;
    return err_set(e, ERR_USAGE, "scheme: unknown word '%.*s' on the %s axis; %s",
                   (int)(w.n > 40 ? 40 : w.n), w.s,
                   i == 0   ? "w"
                   : i == 1 ? "a"
                            : "kv",
                   allowed[i]);
}

static int element(word w, char axis, qaxis *out, err *e)
{
    if (is(w, "nvfp4") && axis != 'k') {
        *out = (qaxis){.type = NUM_F4_E2M1, .gran = Q_GROUP, .group = 16, .scale = QS_NVFP4};
        return 0;
    }
    if (is(w, "mxfp4") && axis != 'k') {
        *out = (qaxis){.type = NUM_F4_E2M1, .gran = Q_GROUP, .group = 32, .scale = QS_MX};
        return 0;
    }
    if (is(w, "mxfp8") && axis != 'k') {
        *out = (qaxis){.type = NUM_F8_E4M3, .gran = Q_GROUP, .group = 32, .scale = QS_MX};
        return 0;
    }
    num_dtype t = num_by_name(w.s, w.n);
    bool plain = t == NUM_BF16 || t == NUM_F16 || t == NUM_F32;
    bool wide = t >= NUM_I16 || t == NUM_F64 || t == NUM_F8_E8M0;
    if (t == NUM_NONE || wide) return bad(w, axis, e);
    if (axis == 'a' && !plain && t != NUM_F8_E4M3 && t != NUM_I8) return bad(w, axis, e);
    if (axis == 'k' && t != NUM_BF16 && t != NUM_F8_E4M3 && t != NUM_F8_E5M2 && t != NUM_I8 &&
        t != NUM_F4_E2M1)
        return bad(w, axis, e);
    if (axis == 'w' && (t == NUM_F8_E5M2 || t == NUM_F4_E2M1)) return bad(w, axis, e);
    *out = (qaxis){.type = t};
    return 0;
}

/* Granularity that an element type has when none is written. */
static void default_gran(char axis, qaxis *a)
{
    bool plain = a->type == NUM_BF16 || a->type == NUM_F16 || a->type == NUM_F32;
    if (a->gran != Q_NONE || plain) return;
    if (axis == 'a')
        a->gran = Q_TOKEN;
    else if (axis == 'w') {
        a->gran = a->type == NUM_NF4 ? Q_GROUP : Q_CHANNEL;
        if (a->type == NUM_NF4) a->group = 64;
    } else if (a->type == NUM_I8)
        a->gran = Q_TOKEN_HEAD;
    else if (a->type == NUM_F4_E2M1) {
        a->gran = Q_GROUP;
        a->group = 16;
        a->scale = QS_MX;
    } else
        a->gran = Q_TENSOR;
}

static int modifier(word w, char axis, qaxis *a, bool *is_static, err *e)
{
    int32_t n = 0;
    if (is(w, "asym") && axis != 'k')
        a->asym = true;
    else if (is(w, "sym"))
        a->asym = false;
    else if (is(w, "actorder") && axis == 'w')
        a->actorder = true;
    else if (is(w, "tensor"))
        a->gran = Q_TENSOR;
    else if (is(w, "channel") && axis == 'w')
        a->gran = Q_CHANNEL;
    else if (is(w, "token") && axis == 'a')
        a->gran = Q_TOKEN;
    else if (is(w, "static") && axis == 'a')
        *is_static = true;
    else if (is(w, "dynamic") && axis == 'a')
        *is_static = false;
    else if (is(w, "head") && axis == 'k')
        a->gran = Q_HEAD;
    else if (is(w, "token_head") && axis == 'k')
        a->gran = Q_TOKEN_HEAD;
    else if (axis == 'w' && block_word(w, &a->block_n, &a->block_k))
        a->gran = Q_BLOCK;
    else if (number_after(w, "g", &n) || number_after(w, "group", &n) ||
             (axis == 'w' && number_after(w, "b", &n))) {
        if (a->scale == QS_NVFP4 && n != 16)
            return err_set(e, ERR_USAGE, "scheme: nvfp4 has groups of 16, not %d", n);
        if (a->scale == QS_MX && axis != 'k' && n != 32)
            return err_set(e, ERR_USAGE, "scheme: MX formats have groups of 32, not %d", n);
        a->gran = Q_GROUP;
        a->group = n;
    } else
        return bad(w, axis, e);
    return 0;
}

/* What the words together may not say. */
static int check_axis(char axis, qaxis *a, err *e)
{
    bool plain = a->type == NUM_BF16 || a->type == NUM_F16 || a->type == NUM_F32;
    if (plain && (a->gran != Q_NONE || a->asym))
        return err_set(e, ERR_USAGE, "scheme: %s is not quantized, so it takes no granularity",
                       num_infos[a->type].name);
    if (a->asym && num_infos[a->type].kind != 'I')
        return err_set(e, ERR_USAGE, "scheme: asym needs an integer type, not %s",
                       num_infos[a->type].name);
    if (axis == 'k' && a->type == NUM_I8 && a->gran != Q_TOKEN_HEAD)
        return err_set(e, ERR_USAGE,
                       "scheme: kv int8 has one scale a token and head (int8,token_head)");
    if (axis == 'k' && a->type == NUM_F4_E2M1 && (a->gran != Q_GROUP || a->group != 16))
        return err_set(e, ERR_USAGE, "scheme: kv fp4 has blocks of 16 (fp4,g16)");
    if (axis == 'k' && (a->type == NUM_F8_E4M3 || a->type == NUM_F8_E5M2) && a->gran != Q_TENSOR &&
        a->gran != Q_HEAD)
        return err_set(e, ERR_USAGE, "scheme: kv fp8 has one scale a tensor or a head");
    if (axis == 'w' && a->scale == QS_FLOAT && a->gran == Q_BLOCK && a->type != NUM_F8_E4M3 &&
        a->type != NUM_I8)
        return err_set(e, ERR_USAGE, "scheme: blocks are for fp8_e4m3 and int8, not %s",
                       num_infos[a->type].name);
    if (a->gran == Q_GROUP && a->scale == QS_FLOAT && a->group > 65536)
        return err_set(e, ERR_USAGE, "scheme: a group of %d is too large", a->group);
    return 0;
}

static int parse_axis(const char *s, size_t n, char axis, qaxis *out, err *e)
{
    bool is_static = false;
    size_t at = 0;
    for (int i = 0; at <= n; i++) {
        size_t k = at;
        while (k < n && s[k] != ',')
            k++;
        word w = {s + at, k - at};
        int rc = i == 0 ? element(w, axis, out, e) : modifier(w, axis, out, &is_static, e);
        if (rc < 0) return rc;
        at = k + 1;
        if (k >= n) break;
    }
    default_gran(axis, out);
    if (axis == 'a' && out->gran != Q_NONE) out->dynamic = !is_static;
    return check_axis(axis, out, e);
}

int qspec_parse_axis(const char *text, char axis, qaxis *out, err *e)
{
    return parse_axis(text, strlen(text), axis, out, e);
}

static const qpreset *preset(const char *s, size_t n)
{
    for (int i = 0; i < qspec_n_presets; i++)
        if (strlen(qspec_presets[i].name) == n && !memcmp(qspec_presets[i].name, s, n))
            return &qspec_presets[i];
    return NULL;
}

static int unknown(const char *s, size_t n, err *e)
{
    buf names = {0};
    for (int i = 0; i < qspec_n_presets; i++)
        buf_printf(&names, "%s%s", i ? ", " : "", qspec_presets[i].name);
    int rc = err_set(e, ERR_USAGE,
                     "scheme: '%.*s' is neither a preset (%s) nor an axis such as w:int4,g128",
                     (int)(n > 60 ? 60 : n), s, names.data);
    buf_free(&names);
    return rc;
}

int qspec_parse(const char *text, qspec *out, err *e)
{
    qspec q = {.w = {.type = NUM_BF16}, .a = {.type = NUM_BF16}, .kv = {.type = NUM_BF16}};
    bool any = false, seen_w = false, seen_a = false, seen_kv = false;
    for (const char *p = text; *p;) {
        size_t n = strcspn(p, " \t");
        int rc = 0;
        if (!n) {
            p++;
            continue;
        }
        const qpreset *pre = any ? NULL : preset(p, n);
        bool *seen = NULL;
        if (pre)
            rc = qspec_parse(pre->spec, &q, e);
        else if (n > 2 && !memcmp(p, "w:", 2))
            rc = parse_axis(p + 2, n - 2, 'w', &q.w, e), seen = &seen_w;
        else if (n > 2 && !memcmp(p, "a:", 2))
            rc = parse_axis(p + 2, n - 2, 'a', &q.a, e), seen = &seen_a;
        else if (n > 3 && !memcmp(p, "kv:", 3))
            rc = parse_axis(p + 3, n - 3, 'k', &q.kv, e), seen = &seen_kv;
        else
            rc = unknown(p, n, e);
        if (rc < 0) return rc;
        if (seen && *seen) return err_set(e, ERR_USAGE, "scheme: '%s' names one axis twice", text);
        if (seen) *seen = true;
        any = true;
        p += n;
    }
    if (!any)
        return err_set(
            e, ERR_USAGE,
            "scheme: empty text; give a preset such as fp8 or an axis such as w:int4,g128");
    *out = q;
    return 0;
}

void qaxis_format(const qaxis *a, buf *out)
{
    bool kv_fp4 = a->type == NUM_F4_E2M1 && a->scale == QS_MX && a->group == 16;
    if (a->type == NUM_F4_E2M1 && !kv_fp4)
        buf_puts(out, a->scale == QS_NVFP4 ? "nvfp4" : "mxfp4");
    else if (a->type == NUM_F8_E4M3 && a->scale == QS_MX)
        buf_puts(out, "mxfp8");
    else
        buf_puts(out, num_infos[a->type].name);
    static const char *const names[] = {"", ",tensor", ",channel", "",
                                        "", ",token",  ",head",    ",token_head"};
    if (a->gran == Q_GROUP)
        buf_printf(out, ",g%d", a->group);
    else if (a->gran == Q_BLOCK)
        buf_printf(out, ",block%dx%d", a->block_n, a->block_k);
    else
        buf_puts(out, names[a->gran]);
    if (a->asym) buf_puts(out, ",asym");
    if (a->actorder) buf_puts(out, ",actorder");
}

void qspec_format(const qspec *s, buf *out)
{
    buf_puts(out, "w:");
    qaxis_format(&s->w, out);
    buf_puts(out, " a:");
    qaxis_format(&s->a, out);
    if (s->a.gran != Q_NONE && !s->a.dynamic) buf_puts(out, ",static");
    buf_puts(out, " kv:");
    qaxis_format(&s->kv, out);
}
