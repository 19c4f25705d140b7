/* The scheme grammar. A scheme is words between white space: at most one preset, first, then axes
 * "w:…", "a:…", "kv:…"; an axis is an element name and details between commas.
 *
 * What an element allows is data: `elements` has one row per name and axis, with the scale
 * granularities it takes, its default and its fixed group. Canonical text is made from the same
 * facts, so that qspec_format and qspec_parse are inverse to each other. Refused, with the word and
 * the list of what would do: unknown names, a granularity that the axis does not have, a detail
 * given twice or without meaning (asym floats, act-order without groups), sizes out of range. */
#include "num/qspec.h"
#include <stdio.h>
#include <string.h>

enum { MAX_GROUP = 1 << 20, MAX_WORD = 128 };

const qpreset qspec_presets[] = {
    {"fp8", "w:fp8_e4m3,channel a:fp8_e4m3,token", "8-bit float weights and activations"},
    {"fp8-tensor", "w:fp8_e4m3,tensor a:fp8_e4m3,token", "as fp8, one weight scale per tensor"},
    {"fp8-block", "w:fp8_e4m3,block128x128 a:fp8_e4m3,group128", "as fp8, scales of 128x128 tiles"},
    {"fp8-w8a16", "w:fp8_e4m3,channel", "8-bit float weights, 16-bit activations"},
    {"int8", "w:int8,channel a:int8,token", "8-bit integer weights and activations"},
    {"int8-w8a16", "w:int8,channel", "8-bit integer weights, 16-bit activations"},
    {"int4", "w:int4,g128", "4-bit integer weights, groups of 128"},
    {"int4-asym", "w:int4,g128,asym", "as int4, with zero points"},
    {"int3", "w:int3,g128", "3-bit integer weights, groups of 128"},
    {"int2", "w:int2,g64", "2-bit integer weights, groups of 64"},
    {"nvfp4", "w:nvfp4,g16", "4-bit float weights, FP8 scales of 16 and a global one"},
    {"mxfp4", "w:mxfp4,g32", "4-bit float weights, power-of-two scales of 32"},
};
const int qspec_n_presets = sizeof qspec_presets / sizeof *qspec_presets;

/* ---- what each axis allows ---------------------------------------------------------------------
 */

#define G(gran) (1u << (gran))
typedef struct element {
    const char *axes, *name;
    num_dtype type;
    uint32_t grans;   /* G(…) allowed */
    qgran gran;       /* default */
    int32_t group;    /* default group */
    bool fixed_group; /* no other group allowed */
    qscale scale;
} element;

#define W_FLOAT G(Q_TENSOR) | G(Q_CHANNEL) | G(Q_GROUP) | G(Q_BLOCK)
#define W_INT   G(Q_TENSOR) | G(Q_CHANNEL) | G(Q_GROUP)
#define A_ANY   G(Q_TENSOR) | G(Q_TOKEN) | G(Q_GROUP)
static const element elements[] = {
    {"wak", "bf16", NUM_BF16, G(Q_NONE), Q_NONE, 0, false, QS_FLOAT},
    {"wak", "f16", NUM_F16, G(Q_NONE), Q_NONE, 0, false, QS_FLOAT},
    {"wak", "f32", NUM_F32, G(Q_NONE), Q_NONE, 0, false, QS_FLOAT},
    {"w", "fp8_e4m3", NUM_F8_E4M3, W_FLOAT, Q_CHANNEL, 128, false, QS_FLOAT},
    {"w", "int8", NUM_I8, W_INT | G(Q_BLOCK), Q_CHANNEL, 128, false, QS_FLOAT},
    {"w", "int7", NUM_I7, W_INT, Q_GROUP, 128, false, QS_FLOAT},
    {"w", "int6", NUM_I6, W_INT, Q_GROUP, 128, false, QS_FLOAT},
    {"w", "int5", NUM_I5, W_INT, Q_GROUP, 128, false, QS_FLOAT},
    {"w", "int4", NUM_I4, W_INT, Q_GROUP, 128, false, QS_FLOAT},
    {"w", "int3", NUM_I3, W_INT, Q_GROUP, 128, false, QS_FLOAT},
    {"w", "int2", NUM_I2, W_INT, Q_GROUP, 64, false, QS_FLOAT},
    {"w", "nf4", NUM_NF4, G(Q_GROUP), Q_GROUP, 64, false, QS_FLOAT},
    {"w", "bnb_fp4", NUM_BNB_FP4, G(Q_GROUP), Q_GROUP, 64, false, QS_FLOAT},
    {"wa", "nvfp4", NUM_F4_E2M1, G(Q_GROUP), Q_GROUP, 16, true, QS_NVFP4},
    {"wa", "mxfp4", NUM_F4_E2M1, G(Q_GROUP), Q_GROUP, 32, true, QS_MX},
    {"wa", "mxfp8", NUM_F8_E4M3, G(Q_GROUP), Q_GROUP, 32, true, QS_MX},
    {"a", "fp8_e4m3", NUM_F8_E4M3, A_ANY, Q_TOKEN, 128, false, QS_FLOAT},
    {"a", "int8", NUM_I8, A_ANY, Q_TOKEN, 128, false, QS_FLOAT},
    {"k", "fp8_e4m3", NUM_F8_E4M3, G(Q_TENSOR) | G(Q_HEAD), Q_TENSOR, 0, false, QS_FLOAT},
    {"k", "fp8_e5m2", NUM_F8_E5M2, G(Q_TENSOR) | G(Q_HEAD), Q_TENSOR, 0, false, QS_FLOAT},
    {"k", "int8", NUM_I8, G(Q_TOKEN_HEAD), Q_TOKEN_HEAD, 0, false, QS_FLOAT},
    {"k", "fp4", NUM_F4_E2M1, G(Q_GROUP), Q_GROUP, 16, true, QS_MX},
};
enum { N_ELEMENTS = sizeof elements / sizeof *elements };

static const struct {
    const char *word;
    qgran gran;
} gran_words[] = {{"tensor", Q_TENSOR},
                  {"channel", Q_CHANNEL},
                  {"token", Q_TOKEN},
                  {"head", Q_HEAD},
                  {"token_head", Q_TOKEN_HEAD}};
enum { N_GRAN_WORDS = sizeof gran_words / sizeof *gran_words };

static const char *axis_name(char axis)
{
    return axis == 'k' ? "kv" : axis == 'a' ? "a" : "w";
}

static bool is(const char *word, const char *s, size_t n)
{
    return strlen(word) == n && !memcmp(word, s, n);
}

/* By its own name first ("mxfp8" is also an fp8_e4m3), then by the aliases of the element type. */
static const element *find_element(char axis, const char *s, size_t n)
{
    for (int i = 0; i < N_ELEMENTS; i++)
        if (strchr(elements[i].axes, axis) && is(elements[i].name, s, n)) return &elements[i];
    num_dtype t = num_by_name(s, n);
    for (int i = 0; t != NUM_NONE && i < N_ELEMENTS; i++)
        if (strchr(elements[i].axes, axis) && elements[i].type == t &&
            is(elements[i].name, num_infos[t].name, strlen(num_infos[t].name)))
            return &elements[i];
    return NULL;
}

static int unknown_element(char axis, const char *s, size_t n, err *e)
{
    buf list = {0};
    for (int i = 0; i < N_ELEMENTS; i++)
        if (strchr(elements[i].axes, axis))
            buf_printf(&list, "%s%s", list.len ? ", " : "", elements[i].name);
    int rc = err_set(e, ERR_USAGE, "%s: unknown element type '%.*s'; use one of %s",
                     axis_name(axis), (int)(n > 40 ? 40 : n), s, list.data);
    buf_free(&list);
    return rc;
}

/* The details that this element takes on this axis, for messages. */
static void list_details(const element *el, char axis, buf *out)
{
    for (int i = 0; i < N_GRAN_WORDS; i++)
        if (el->grans & G(gran_words[i].gran)) buf_printf(out, ", %s", gran_words[i].word);
    if (el->grans & G(Q_GROUP)) {
        if (el->fixed_group)
            buf_printf(out, ", g%d", el->group);
        else
            buf_printf(out, ", %s%d (or another size)", axis == 'a' ? "group" : "g", el->group);
    }
    if (el->grans & G(Q_BLOCK)) buf_puts(out, ", block128x128 (or another size)");
    bool integer = num_infos[el->type].kind == 'I';
    if (integer && axis != 'k') buf_puts(out, ", asym");
    if (integer && axis == 'w') buf_puts(out, ", actorder");
    if (axis == 'a' && el->gran == Q_TOKEN) buf_puts(out, ", dynamic, static");
}

static int unknown_detail(const element *el, char axis, const char *s, size_t n, err *e)
{
    buf list = {0};
    list_details(el, axis, &list);
    int rc = err_set(e, ERR_USAGE, "%s:%s: unknown or unsuitable detail '%.*s'; %s%s",
                     axis_name(axis), el->name, (int)(n > 40 ? 40 : n), s,
                     list.len ? "use " : "it takes none", list.len ? list.data + 2 : "");
    buf_free(&list);
    return rc;
}

/* ---- one axis ----------------------------------------------------------------------------------
 */

/* Decimal number of at most MAX_GROUP at s[*i]; moves *i. 0 = none or out of range. */
static int32_t number(const char *s, size_t n, size_t *i)
{
    int32_t v = 0;
    if (*i < n && s[*i] == '0') return 0;
    for (; *i < n && s[*i] >= '0' && s[*i] <= '9'; ++*i) {
        v = v * 10 + (s[*i] - '0');
        if (v > MAX_GROUP) return 0;
    }
    return v;
}

/* "g128", "group128", "b64" (the block word of bitsandbytes, for its types only). 0 = not such a
 * word. */
static int32_t group_word(const element *el, const char *s, size_t n)
{
    size_t i = n > 5 && !memcmp(s, "group", 5)                                              ? 5
               : n > 1 && (s[0] == 'g' || (s[0] == 'b' && num_infos[el->type].kind == 'T')) ? 1
                                                                                            : 0;
    if (!i) return 0;
    int32_t v = number(s, n, &i);
    return i == n ? v : 0;
}

static bool block_word(const char *s, size_t n, int32_t *bn, int32_t *bk)
{
    size_t i = 5;
    if (n < 8 || memcmp(s, "block", 5)) return false;
    *bn = number(s, n, &i);
    if (!*bn || i >= n || s[i++] != 'x') return false;
    *bk = number(s, n, &i);
    return *bk && i == n;
}

/* What the details of one axis have said so far, so that nothing is said twice. */
typedef struct seen {
    bool gran, sym, order, dynamic;
} seen;

static bool gran_detail(const element *el, qaxis *a, const char *s, size_t n)
{
    int32_t g = group_word(el, s, n), bn, bk;
    if (g) {
        a->gran = Q_GROUP;
        a->group = g;
        return (el->grans & G(Q_GROUP)) && (!el->fixed_group || g == el->group);
    }
    if (block_word(s, n, &bn, &bk)) {
        a->gran = Q_BLOCK;
        a->block_n = bn;
        a->block_k = bk;
        return el->grans & G(Q_BLOCK);
    }
    for (int i = 0; i < N_GRAN_WORDS; i++)
        if (is(gran_words[i].word, s, n)) {
            a->gran = gran_words[i].gran;
            return el->grans & G(a->gran);
        }
    return false;
}

static bool flag_detail(const element *el, char axis, qaxis *a, seen *h, const char *s, size_t n)
{
    bool integer = num_infos[el->type].kind == 'I';
    bool sym = is("sym", s, n), asym = is("asym", s, n);
    if ((sym || asym) && integer && axis != 'k' && !h->sym) {
        a->asym = asym;
        return h->sym = true;
    }
    if (is("actorder", s, n) && integer && axis == 'w' && !h->order)
        return a->actorder = h->order = true;
    bool dynamic = is("dynamic", s, n), fixed = is("static", s, n);
    if ((dynamic || fixed) && axis == 'a' && el->gran == Q_TOKEN && !h->dynamic) {
        a->dynamic = dynamic;
        return h->dynamic = true;
    }
    return false;
}

static bool is_flag(const char *s, size_t n)
{
    static const char *const words[] = {"sym", "asym", "actorder", "dynamic", "static"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (is(words[i], s, n)) return true;
    return false;
}

/* What can only be judged when all details are known. */
static int finish_axis(const element *el, char axis, const seen *h, qaxis *a, err *e)
{
    if (a->actorder && a->gran != Q_GROUP)
        return err_set(e, ERR_USAGE, "%s:%s: actorder needs groups, such as g128", axis_name(axis),
                       el->name);
    if (axis != 'a' || !qaxis_quantized(a)) return 0;
    if (!h->dynamic) a->dynamic = a->gran != Q_TENSOR;
    if (!a->dynamic && a->gran != Q_TENSOR)
        return err_set(e, ERR_USAGE, "a:%s: static scales are per tensor: use a:%s,tensor",
                       el->name, el->name);
    return 0;
}

static int parse_axis(const char *s, size_t n, char axis, qaxis *out, err *e)
{
    size_t k = 0;
    while (k < n && s[k] != ',')
        k++;
    const element *el = find_element(axis, s, k);
    if (!el) return unknown_element(axis, s, k, e);
    qaxis a = {.type = el->type, .gran = el->gran, .scale = el->scale};
    if (el->gran == Q_GROUP) a.group = el->group;
    seen h = {0};
    while (k < n) {
        const char *w = s + ++k;
        size_t len = 0;
        while (k < n && s[k] != ',')
            k++, len++;
        if (is_flag(w, len)) {
            if (!flag_detail(el, axis, &a, &h, w, len)) return unknown_detail(el, axis, w, len, e);
            continue;
        }
        if (h.gran)
            return err_set(e, ERR_USAGE, "%s:%s: '%.*s' is a second granularity; give one",
                           axis_name(axis), el->name, (int)(len > 40 ? 40 : len), w);
        a.group = 0;
        if (!gran_detail(el, &a, w, len)) return unknown_detail(el, axis, w, len, e);
        h.gran = true;
    }
    int rc = finish_axis(el, axis, &h, &a, e);
    if (rc == 0) *out = a;
    return rc;
}

int qspec_parse_axis(const char *text, char axis, qaxis *out, err *e)
{
    return parse_axis(text, strlen(text), axis, out, e);
}

/* ---- schemes -----------------------------------------------------------------------------------
 */

static const qpreset *find_preset(const char *s, size_t n)
{
    for (int i = 0; i < qspec_n_presets; i++)
        if (is(qspec_presets[i].name, s, n)) return &qspec_presets[i];
    return NULL;
}

static int unknown_word(const char *s, size_t n, bool first, err *e)
{
    buf list = {0};
    for (int i = 0; i < qspec_n_presets; i++)
        buf_printf(&list, "%s%s", i ? ", " : "", qspec_presets[i].name);
    int rc = err_set(e, ERR_USAGE,
                     first ? "scheme: unknown word '%.*s'; use a preset (%s) or axes such as "
                             "w:int4,g128 a:bf16 kv:bf16"
                           : "scheme: unexpected word '%.*s'; a preset (%s) comes first, then only "
                             "axes w:…, a:…, kv:…",
                     (int)(n > 40 ? 40 : n), s, list.data);
    buf_free(&list);
    return rc;
}

/* One "axis:text" word into *s; *named has one bit per axis that was named. */
static int parse_word(const char *w, size_t n, qspec *s, unsigned *named, bool first, err *e)
{
    static const struct {
        const char *prefix;
        char axis;
    } axes[] = {{"w:", 'w'}, {"a:", 'a'}, {"kv:", 'k'}};
    for (unsigned i = 0; i < 3; i++) {
        size_t p = strlen(axes[i].prefix);
        if (n < p || memcmp(w, axes[i].prefix, p)) continue;
        if (*named & 1u << i)
            return err_set(e, ERR_USAGE, "scheme: axis '%s' is given twice",
                           axis_name(axes[i].axis));
        *named |= 1u << i;
        qaxis *to = i == 0 ? &s->w : i == 1 ? &s->a : &s->kv;
        return parse_axis(w + p, n - p, axes[i].axis, to, e);
    }
    return unknown_word(w, n, first, e);
}

static bool blank(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static int parse_words(const char *text, qspec *s, err *e)
{
    unsigned named = 0;
    bool first = true;
    int rc = 0;
    for (const char *p = text; rc == 0;) {
        while (blank(*p))
            p++;
        if (!*p) break;
        size_t n = 0;
        while (p[n] && !blank(p[n]))
            n++;
        if (n > MAX_WORD)
            return err_set(e, ERR_USAGE, "scheme: the word '%.20s…' is longer than %d bytes", p,
                           MAX_WORD);
        const qpreset *preset = first ? find_preset(p, n) : NULL;
        rc = preset ? parse_words(preset->spec, s, e) : parse_word(p, n, s, &named, first, e);
        first = false;
        p += n;
    }
    if (first)
        return err_set(e, ERR_USAGE,
                       "scheme: empty; use a preset such as int4, or axes such as "
                       "w:int4,g128 a:bf16 kv:bf16");
    return rc;
}

int qspec_parse(const char *text, qspec *out, err *e)
{
    const qaxis plain = {.type = NUM_BF16, .gran = Q_NONE};
    qspec s = {plain, plain, plain};
    int rc = parse_words(text, &s, e);
    if (rc == 0) *out = s;
    return rc;
}

/* ---- canonical text ----------------------------------------------------------------------------
 */

/* MX elements have groups of 32; fp4 with the same scales on groups of 16 is the KV format. */
static const char *element_name(const qaxis *a)
{
    if (a->type < 0 || a->type >= NUM_COUNT) return "none";
    if (a->scale == QS_NVFP4) return "nvfp4";
    if (a->scale == QS_MX && a->group == 32) return a->type == NUM_F4_E2M1 ? "mxfp4" : "mxfp8";
    return num_infos[a->type].name;
}

void qaxis_format(const qaxis *a, buf *out)
{
    buf_puts(out, element_name(a));
    for (int i = 0; i < N_GRAN_WORDS; i++)
        if (gran_words[i].gran == a->gran) buf_printf(out, ",%s", gran_words[i].word);
    bool own_group = a->scale != QS_FLOAT; /* part of the element: "g16" on every axis */
    if (a->gran == Q_GROUP)
        buf_printf(out, ",%s%d",
                   num_infos[a->type].kind == 'T' ? "b"
                   : a->dynamic && !own_group     ? "group"
                                                  : "g",
                   a->group);
    if (a->gran == Q_BLOCK) buf_printf(out, ",block%dx%d", a->block_n, a->block_k);
    if (a->asym) buf_puts(out, ",asym");
    if (a->actorder) buf_puts(out, ",actorder");
    if (a->dynamic && a->gran == Q_TENSOR) buf_puts(out, ",dynamic");
}

void qspec_format(const qspec *s, buf *out)
{
    buf_puts(out, "w:");
    qaxis_format(&s->w, out);
    buf_puts(out, " a:");
    qaxis_format(&s->a, out);
    buf_puts(out, " kv:");
    qaxis_format(&s->kv, out);
}

bool qaxis_quantized(const qaxis *a)
{
    switch (a->type) {
    case NUM_NONE:
    case NUM_F32:
    case NUM_F64:
    case NUM_F16:
    case NUM_BF16:
        return false;
    default:
        return true;
    }
}

bool qaxis_equal(const qaxis *a, const qaxis *b)
{
    return a->type == b->type && a->gran == b->gran && a->group == b->group &&
           a->block_n == b->block_n && a->block_k == b->block_k && a->asym == b->asym &&
           a->actorder == b->actorder && a->dynamic == b->dynamic && a->scale == b->scale;
}
