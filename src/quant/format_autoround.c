/* auto-round: one method name over the tensors of three others; packing_format says which.
 *
 *   auto_round:auto_gptq       GPTQ tensors, zero points minus one; usually no g_idx
 *   auto_round, :gptqmodel     the same with zero points as they are
 *   auto_round:auto_awq        AWQ gemm
 *   auto_round:llm_compressor  compressed-tensors of mxfp4, mxfp8 and nvfp4, without config_groups:
 *                              the schemes are told by bits, data_type and act_*
 *
 * extra_config overrides single modules, by name or by a regex that may match anywhere; what an
 * entry lacks comes from the top level, 16 bits and more mean unquantized. Symmetric scales are
 * negative in half of the groups. block_name_to_quantize is not needed: the tensors decide.
 * Refused: data types and packings of other backends, by name. */
#include <stdio.h>
#include <string.h>
#include "quant/packed.h"

typedef enum packing { AS_GPTQ, AS_AWQ, AS_CT } packing;
typedef struct own { /* q->own */
    packing p;
    quant__gptq zeros;
} own;

const quant_part quant__autoround_parts[] = {{".qweight", QUANT_CODES},
                                             {".weight_packed", QUANT_CODES},
                                             {".weight", QUANT_CODES},
                                             {".qzeros", QUANT_ZEROS},
                                             {".scales", QUANT_SCALES},
                                             {".g_idx", QUANT_LAYOUT},
                                             {".weight_scale", QUANT_SCALES},
                                             {".weight_global_scale", QUANT_SCALES},
                                             {".input_global_scale", QUANT_SCALES},
                                             {NULL, QUANT_CODES}};

/* ---- config -------------------------------------------------------------------------------------
 */

typedef struct fields {
    int64_t bits, group, act_bits;
    bool sym, act_dynamic;
    const char *type, *act_type;
} fields;

static int read_fields(const json *o, fields *f, const char *where, err *e)
{
    int rc = 0;
    TRY(json_get_i64(o, "bits", &f->bits, where, e));
    TRY(json_get_i64(o, "group_size", &f->group, where, e));
    TRY(json_get_bool(o, "sym", &f->sym, where, e));
    TRY(json_get_str(o, "data_type", &f->type, where, e));
    TRY(json_get_i64(o, "act_bits", &f->act_bits, where, e));
    TRY(json_get_bool(o, "act_dynamic", &f->act_dynamic, where, e));
    TRY(json_get_str(o, "act_data_type", &f->act_type, where, e));
    rc = 0;
out:
    return rc;
}

static int read_packing(const quant_ckpt *q, const fields *f, own *w, err *e)
{
    static const struct {
        const char *name;
        packing p;
        bool v2;
    } known[] = {{"auto_round:auto_gptq", AS_GPTQ, false},
                 {"auto_round:gptq", AS_GPTQ, false},
                 {"auto_round", AS_GPTQ, true},
                 {"auto_round:gptqmodel", AS_GPTQ, true},
                 {"auto_round:auto_awq", AS_AWQ, false},
                 {"auto_round:awq", AS_AWQ, false},
                 {"auto_round:llm_compressor", AS_CT, false}};
    const char *name = f->sym ? "auto_round:auto_gptq" : "auto_round";
    int rc = json_get_str(q->config, "packing_format", &name, q->where, e);
    if (rc < 0) return rc;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name)) {
            w->p = known[i].p;
            return quant__gptq_option(q, known[i].v2, &w->zeros, e);
        }
    return err_set(e, ERR_UNSUPPORTED,
                   "%s: packing_format '%s' is not read; expected auto_round, "
                   "auto_round:auto_gptq, auto_round:auto_awq or auto_round:llm_compressor",
                   q->where, name);
}

/* The compressed-tensors scheme that bits and data types name. */
static const char *float_scheme(const fields *f)
{
    bool mx = !strncmp(f->type, "mx_fp", 5), nv = !strncmp(f->type, "nv_fp", 5);
    bool act = f->act_bits < 16;
    if (mx && f->bits == 4 && f->group == 32)
        return act && f->act_bits == 4 ? "w:mxfp4,g32 a:mxfp4,group32" : act ? NULL : "w:mxfp4,g32";
    if (mx && f->bits == 8 && f->group == 32)
        return act && f->act_bits == 8 ? "w:mxfp8,g32 a:mxfp8,group32" : act ? NULL : "w:mxfp8,g32";
    if (nv && f->bits == 4 && f->group == 16)
        return act && f->act_bits == 4 ? "w:nvfp4,g16 a:nvfp4,g16" : act ? NULL : "w:nvfp4,g16";
    return NULL;
}

static int spec_of(const quant_ckpt *q, const fields *f, const char *where, qspec *s,
                   const char **format, err *e)
{
    const own *w = q->own;
    bool is_int = !strcmp(f->type, "int") || !strncmp(f->type, "int_", 4);
    int rc = 0;
    if (f->bits >= 16) {
        *s = (qspec){{.type = NUM_BF16}, {.type = NUM_BF16}, q->kv};
        *format = "dense";
        return 0;
    }
    if (w->p != AS_CT && is_int && f->act_bits >= 16) {
        *format = w->p == AS_AWQ ? "gemm" : w->zeros.v2 ? "gptq_v2" : "gptq";
        return quant__packed_spec(q, f->bits, f->group, f->sym, where, s, e);
    }
    const char *scheme = w->p == AS_CT ? float_scheme(f) : NULL;
    if (!scheme)
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: data_type '%s' of %lld bits, groups of %lld, activations of %lld bits, "
                       "in this packing_format is not read; expected int without activations, or "
                       "mx_fp / nv_fp under auto_round:llm_compressor",
                       where, f->type, (long long)f->bits, (long long)f->group,
                       (long long)f->act_bits);
    rc = qspec_parse(scheme, s, e);
    s->kv = q->kv;
    *format = quant__ct_format(s);
    return rc;
}

static int add_group(quant_ckpt *q, const fields *f, int kind, const char *target,
                     const char *where, err *e)
{
    qspec s;
    const char *format = "";
    int rc = spec_of(q, f, where, &s, &format, e);
    if (rc < 0) return rc;
    return quant__group(q, &s, format, kind, target, e) ? 0 : err_wrap(e, "%s", where);
}

static int read_extra(quant_ckpt *q, const fields *top, err *e)
{
    const json *x = json_get(q->config, "extra_config");
    char where[400];
    int rc = 0;
    if (!x || cJSON_IsNull(x)) return 0;
    if (!cJSON_IsObject(x))
        return err_set(e, ERR_FORMAT, "%s: 'extra_config' must be an object of module: overrides",
                       q->where);
    for (const json *r = x->child; r && rc >= 0; r = r->next) {
        fields f = *top;
        bool regex = strpbrk(r->string, "*+?^$()[]{}|\\") != NULL;
        snprintf(where, sizeof where, "%.250s: extra_config.%.100s", q->where, r->string);
        if (!cJSON_IsObject(r))
            return err_set(e, ERR_FORMAT, "%s: must be an object of overrides", where);
        TRY(read_fields(r, &f, where, e));
        buf name = {0};
        buf_printf(&name, regex ? ".*?(?:%s)" : "%s", r->string);
        rc = add_group(q, &f, regex ? QUANT_RULE_REGEX : QUANT_RULE_NAME, name.data, where, e);
        buf_free(&name);
    }
out:
    return rc < 0 ? rc : 0;
}

int quant__autoround_detect(quant_ckpt *q, err *e)
{
    fields f = {
        .bits = 4, .group = 128, .act_bits = 16, .sym = true, .type = "int", .act_type = "int"};
    int rc = 0;
    own *w = q->own = arena_alloc(q->mem, sizeof *w);
    TRY(read_fields(q->config, &f, q->where, e));
    TRY(read_packing(q, &f, w, e));
    TRY(read_extra(q, &f, e));
    TRY(add_group(q, &f, QUANT_RULE_CLASS, "Linear", q->where, e));
    TRY(quant__sweep(q, e));
    rc = 1;
out:
    return rc;
}

/* ---- modules ------------------------------------------------------------------------------------
 */

bool quant__autoround_has(const quant_ckpt *q, const char *module)
{
    return quant__packed_has(q, module) || quant__ct_has(q, module);
}

int quant__autoround_describe(const quant_ckpt *q, const char *module, quant_module *out, err *e)
{
    const own *w = q->own;
    if (w->p == AS_CT) return quant__describe_plain(q, module, out, e);
    return w->p == AS_AWQ ? quant__awq_describe_gemm(q, module, out, e)
                          : quant__gptq_describe_as(q, module, out, e);
}

int quant__autoround_load(const quant_ckpt *q, const char *module, qtensor *out, err *e)
{
    const own *w = q->own;
    quant__job j = {q, module, quant_group_of(q, module), out};
    if (w->p == AS_CT) return quant__ct_load(q, module, out, e);
    return w->p == AS_AWQ ? quant__awq_load_gemm(&j, e) : quant__gptq_load_as(&j, &w->zeros, e);
}

void quant__autoround_arith(const quant_ckpt *q, const qtensor *t, quant_arith *out)
{
    if (((const own *)q->own)->p != AS_CT) quant__f16_arith(q, t, out);
}
