/* The tensors of one module: finding them, holding their shapes and types against what is expected,
 * and what they weigh.
 *
 * Each dialect has a table of suffixes that make up a quantized module. From it follow which
 * tensors of a file belong to which module, and the bytes by kind, so that no caller knows
 * suffixes. Tensors are borrowed from the map where their elements lie aligned, and copied else.
 * Every refusal names file, tensor, what is there and what is needed. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "quant/quant_int.h"

int quant__own(qtensor *t, size_t a, size_t b, void **out, err *e)
{
    size_t n;
    if (!mem_mul(a, b, &n) || t->n_owned == QT_MAX_OWNED)
        return err_set(e, ERR_LIMIT, "quantized tensor: %zu x %zu bytes is too large", a, b);
    int rc = mem_alloc_huge(out, n ? n : 1, e);
    if (rc < 0) return rc;
    t->owned[t->n_owned++] = *out;
    return 0;
}

int quant__tensor(const quant_ckpt *q, const char *module, const char *suffix, bool need,
                  const ckpt_tensor **out, err *e)
{
    char tail[64];
    snprintf(tail, sizeof tail, ".%s", suffix);
    return quant__named(q, module, tail, need, out, e);
}

int quant__named(const quant_ckpt *q, const char *module, const char *suffix, bool need,
                 const ckpt_tensor **out, err *e)
{
    char name[QUANT_NAME_MAX];
    int n = snprintf(name, sizeof name, "%s%s", module, suffix);
    *out = NULL;
    if (n < 0 || (size_t)n >= sizeof name)
        return err_set(e, ERR_LIMIT, "module name of %zu bytes is too long", strlen(module));
    if (need) return ckpt_need(q->c, name, out, e);
    *out = ckpt_find(q->c, name);
    return 0;
}

/* ---- shapes and types ---------------------------------------------------------------------------
 */

void quant__shape_text(const ckpt_tensor *t, buf *b)
{
    buf_putc(b, '[');
    for (int i = 0; i < t->n_dims; i++)
        buf_printf(b, "%s%lld", i ? ", " : "", (long long)t->shape[i]);
    buf_putc(b, ']');
}

int quant__wrong_type(const ckpt_tensor *t, const char *want, err *e)
{
    return err_set(e, ERR_DTYPE, "%s: tensor '%s' is %s; expected %s", t->path, t->name,
                   t->dtype == NUM_NONE ? "a gguf block type" : num_infos[t->dtype].name, want);
}

int quant__wrong_shape(const ckpt_tensor *t, err *e, const char *fmt, ...)
{
    buf have = {0};
    char need[300];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(need, sizeof need, fmt, ap);
    va_end(ap);
    quant__shape_text(t, &have);
    int rc =
        err_set(e, ERR_SHAPE, "%s: tensor '%s' has shape %s (%s); %s", t->path, t->name, have.data,
                t->dtype == NUM_NONE ? "GGUF blocks" : num_infos[t->dtype].name, need);
    buf_free(&have);
    return rc;
}

bool quant__has_shape(const ckpt_tensor *t, int64_t a, int64_t b)
{
    if (t->n_dims == 2) return t->shape[0] == a && t->shape[1] == b;
    if (a == 1 && b == 1) {
        for (int i = 0; i < t->n_dims; i++)
            if (t->shape[i] != 1) return false;
        return true;
    }
    return t->n_dims == 1 && b == 1 && t->shape[0] == a;
}

int quant__borrow(qtensor *out, const ckpt_tensor *t, const void **p, err *e)
{
    size_t align = (size_t)num_infos[t->dtype].bits / 8;
    *p = t->data;
    if (align < 2 || (uintptr_t)t->data % align == 0) return 0;
    void *copy;
    int rc = quant__own(out, 1, (size_t)t->bytes, &copy, e);
    if (rc < 0) return rc;
    memcpy(copy, t->data, (size_t)t->bytes);
    *p = copy;
    return 0;
}

void quant__set_grid(qtensor *q, const qspec *spec, int64_t N, int64_t K)
{
    const qaxis *w = &spec->w;
    q->spec = *spec;
    q->code = w->type;
    q->E = 1;
    q->N = N;
    q->K = K;
    q->row_bytes = num_bytes(w->type, (size_t)K);
    q->block_n = w->gran == Q_TENSOR ? N : w->gran == Q_BLOCK ? w->block_n : 1;
    q->block_k = w->gran == Q_GROUP ? w->group : w->gran == Q_BLOCK ? w->block_k : K;
    q->scale_rows = N / q->block_n + (N % q->block_n != 0);
    q->scale_cols = K / q->block_k + (K % q->block_k != 0);
}

/* ---- lists of rules -----------------------------------------------------------------------------
 */

static int add_rule(quant_ckpt *q, int kind, const char *text, char **name, quant_rule **rule,
                    err *e)
{
    int rc = kind < 0 ? quant_rule_make(rule, text, e)
                      : quant_rule_make_as(rule, (quant_rule_kind)kind, text, e);
    if (rc >= 0) *name = arena_strdup(q->mem, text);
    return rc;
}

int quant__strings(quant_ckpt *q, const json *v, const char *where, int kind, char ***out, int *n,
                   quant_rule ***rules, err *e)
{
    if (!v || cJSON_IsNull(v)) return 0;
    if (!cJSON_IsArray(v)) return err_set(e, ERR_FORMAT, "%s: must be a list of strings", where);
    size_t count = (size_t)cJSON_GetArraySize(v);
    *out = arena_alloc(q->mem, (count + 1) * sizeof **out);
    *rules = arena_alloc(q->mem, (count + 1) * sizeof **rules);
    for (const json *s = v->child; s; s = s->next) {
        if (!cJSON_IsString(s))
            return err_set(e, ERR_FORMAT, "%s: must be a list of strings", where);
        int rc = add_rule(q, kind, s->valuestring, &(*out)[*n], &(*rules)[*n], e);
        if (rc < 0) return err_wrap(e, "%s", where);
        ++*n;
    }
    return 0;
}

int quant__ignore(quant_ckpt *q, const json *v, const char *where, int kind, err *e)
{
    int rc = quant__strings(q, v, where, kind, &q->ignore, &q->n_ignore, &q->ignore_rules, e);
    q->ignore_hits = arena_alloc(q->mem, (size_t)(q->n_ignore + 1) * sizeof *q->ignore_hits);
    return rc;
}

quant_group *quant__group(quant_ckpt *q, const qspec *spec, const char *format, int kind,
                          const char *target, err *e)
{
    quant_group *all = arena_alloc(q->mem, (size_t)(q->n_groups + 1) * sizeof *all);
    if (q->n_groups) memcpy(all, q->groups, (size_t)q->n_groups * sizeof *all);
    quant_group *g = &all[q->n_groups];
    g->spec = *spec;
    snprintf(g->format, sizeof g->format, "%s", format);
    g->targets = arena_alloc(q->mem, sizeof *g->targets);
    g->rules = arena_alloc(q->mem, sizeof *g->rules);
    if (add_rule(q, kind, target, g->targets, g->rules, e) < 0) return NULL;
    g->n_targets = 1;
    q->groups = all;
    q->n_groups++;
    return g;
}

/* ---- config against tensors ---------------------------------------------------------------------
 */

void quant__count_ignore(quant_ckpt *q, const char *module)
{
    for (int i = 0; i < q->n_ignore; i++)
        if (quant_rule_kind_of(q->ignore_rules[i]) != QUANT_RULE_CLASS &&
            quant_rule_match(q->ignore_rules[i], module))
            q->ignore_hits[i]++;
}

static int sweep_module(quant_ckpt *q, const ckpt_tensor *t, const char *module, bool quantized,
                        err *e)
{
    quant_group *g = (quant_group *)quant_group_of(q, module);
    quant__count_ignore(q, module);
    if (!quantized) {
        if (g && !strcmp(g->format, "dense")) g->hits++;
        return 0;
    }
    if (quant_ignored(q, module) || (g && !strcmp(g->format, "dense")))
        return err_set(e, ERR_FORMAT,
                       "%s: '%s' is quantized, but %s says that module '%s' is not; config and "
                       "tensors are of different runs",
                       t->path, t->name, q->where, module);
    if (!g)
        return err_set(e, ERR_FORMAT, "%s: '%s' is quantized, but nothing in %s describes '%s'",
                       t->path, t->name, q->where, module);
    const ckpt_tensor *twin = NULL;
    if (strcmp(t->name + strlen(module), ".weight") &&
        (quant__tensor(q, module, "weight", false, &twin, NULL) < 0 || twin))
        return err_set(
            e, ERR_FORMAT,
            "%s: module '%s' has a plain weight beside '%s'; which one counts is not told", t->path,
            module, t->name);
    g->hits++;
    return 0;
}

int quant__sweep(quant_ckpt *q, err *e)
{
    char module[QUANT_NAME_MAX];
    int rc = 0, found = 0;
    for (size_t i = 0; rc >= 0 && i < ckpt_n_tensors(q->c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(q->c, i);
        const quant_part *p = quant_part_of(q, t->name, module);
        size_t n = strlen(t->name);
        if (p) {
            if (p->kind != QUANT_CODES) continue;
            found++;
            rc = sweep_module(q, t, module, true, e);
        } else if (t->n_dims == 2 && n > 7 && n < QUANT_NAME_MAX &&
                   !strcmp(t->name + n - 7, ".weight")) {
            memcpy(module, t->name, n - 7);
            module[n - 7] = 0;
            rc = sweep_module(q, t, module, false, e);
        }
    }
    if (rc >= 0 && !found && ckpt_has_weights(q->c))
        rc = err_set(e, ERR_FORMAT,
                     "%s: names %s, but %s holds no tensor of that kind (no '%s'); config and "
                     "weights do not belong together",
                     q->where, q->dialect->name, ckpt_path(q->c), q->dialect->parts[0].suffix);
    return rc < 0 ? rc : 0;
}

static const ckpt_tensor *part(const quant_ckpt *q, const char *module, const char *suffix)
{
    char name[2 * QUANT_NAME_MAX];
    int n = snprintf(name, sizeof name, "%s%s", module, suffix);
    return n > 0 && (size_t)n < sizeof name ? ckpt_find(q->c, name) : NULL;
}

/* The longest suffix of the dialect's tensors that this name ends in. */
static const quant_part *suffix_of(const quant_ckpt *q, const char *tensor,
                                   char module[QUANT_NAME_MAX])
{
    const quant_part *best = NULL;
    size_t n = strlen(tensor), cut = 0;
    for (const quant_part *p = q->dialect->parts; p && p->suffix; p++) {
        size_t m = strlen(p->suffix);
        bool longer = m > cut || (!m && !best); /* "": the tensor is called as its module */
        if (m < n && longer && n - m < QUANT_NAME_MAX && !strcmp(tensor + n - m, p->suffix)) {
            best = p;
            cut = m;
        }
    }
    if (!best) return NULL;
    memcpy(module, tensor, n - cut);
    module[n - cut] = 0;
    return best;
}

/* Scales and the like of the input may stand beside a plain weight; those of the weight may not. */
static bool of_input(const char *suffix)
{
    static const char *const list[] = {"input", "output", "activation", "pre_quant"};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        if (!strncmp(suffix + 1, list[i], strlen(list[i]))) return true;
    return false;
}

static int no_codes(const quant_ckpt *q, const ckpt_tensor *t, const char *module, err *e)
{
    buf names = {0};
    for (const quant_part *p = q->dialect->parts; p->suffix; p++)
        if (p->kind == QUANT_CODES && *p->suffix)
            buf_printf(&names, "%s'%s'", names.len ? " or " : "", p->suffix);
    int rc = err_set(e, ERR_MISSING,
                     "%s: '%s' is there, but module '%s' has no codes (no %s); the checkpoint is "
                     "incomplete, fetch it again",
                     t->path, t->name, module, names.data);
    buf_free(&names);
    return rc;
}

static bool holds_codes(const quant_ckpt *q, const char *module)
{
    for (const quant_part *p = q->dialect->parts; p->suffix; p++)
        if (p->kind == QUANT_CODES && part(q, module, p->suffix)) return quant_has(q, module);
    return false;
}

int quant__strays(const quant_ckpt *q, err *e)
{
    char module[QUANT_NAME_MAX];
    for (size_t i = 0; i < ckpt_n_tensors(q->c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(q->c, i);
        const quant_part *p = suffix_of(q, t->name, module);
        if (!p || p->kind == QUANT_CODES || quant_is_kv_scale(t->name) || holds_codes(q, module))
            continue;
        bool dotted = *p->suffix == '.';
        const ckpt_tensor *w = part(q, module, dotted ? ".weight" : "");
        if (w && of_input(p->suffix)) continue;
        if (w)
            return err_set(e, ERR_FORMAT,
                           "%s: '%s' belongs to a quantized weight, but '%s' is plain %s; the "
                           "tensors are of different runs, fetch the checkpoint again",
                           t->path, t->name, w->name, num_infos[w->dtype].name);
        if (dotted || *q->dialect->parts[0].suffix == '_') return no_codes(q, t, module, e);
    }
    return 0;
}

/* ---- what a module is and weighs ----------------------------------------------------------------
 */

const quant_part *quant_part_of(const quant_ckpt *q, const char *tensor,
                                char module[QUANT_NAME_MAX])
{
    const quant_part *p = suffix_of(q, tensor, module);
    return p && quant_has(q, module) ? p : NULL;
}

/* weight [E.., N, K], weight_packed [N, bytes or words] with the shape that weight_shape says. */
int quant__describe_plain(const quant_ckpt *q, const char *module, quant_module *out, err *e)
{
    const ckpt_tensor *t = part(q, module, ".weight_packed"), *s = part(q, module, ".weight_shape");
    int64_t v[2] = {0};
    int rc = 0;
    bool packed = t != NULL;
    if (!t) rc = quant__tensor(q, module, "weight", true, &t, e);
    if (rc < 0) return rc;
    if (t->n_dims < 2)
        return quant__wrong_shape(t, e, "a linear of this dialect has at least 2 dimensions");
    out->N = t->shape[t->n_dims - 2];
    out->K = t->shape[t->n_dims - 1] * (packed && t->dtype == NUM_U8 ? 2 : 1);
    for (int i = 0; i < t->n_dims - 2; i++)
        out->E *= t->shape[i];
    if (s && s->dtype == NUM_I64 && s->bytes == 16) memcpy(v, s->data, 16);
    if (s && s->dtype == NUM_I32 && s->bytes == 8) {
        int32_t w[2];
        memcpy(w, s->data, 8);
        v[1] = w[1];
    }
    if (v[1] > 0 && v[1] <= t->shape[t->n_dims - 1] * 32) out->K = v[1];
    return 0;
}

int quant_describe(const quant_ckpt *q, const char *module, quant_module *out, err *e)
{
    if (!quant_has(q, module))
        return err_set(e, ERR_MISSING, "%s: module '%s' is not quantized", ckpt_path(q->c), module);
    const quant_group *g = quant_group_of(q, module);
    *out = (quant_module){.format = g ? g->format : "", .E = 1};
    out->spec = g ? g->spec : (qspec){{.type = NUM_BF16}, {.type = NUM_BF16}, q->kv};
    return q->dialect->describe ? q->dialect->describe(q, module, out, e)
                                : quant__describe_plain(q, module, out, e);
}

int quant_module_bytes(const quant_ckpt *q, const char *module, qbytes *add, err *e)
{
    quant_module m;
    int rc = quant_describe(q, module, &m, e);
    if (rc < 0) return rc;
    uint64_t tight = (uint64_t)(m.E * m.N) * (uint64_t)m.K;
    tight = (tight * (uint64_t)num_infos[m.spec.w.type].bits + 7) / 8;
    for (const quant_part *p = q->dialect->parts; p && p->suffix; p++) {
        const ckpt_tensor *t = part(q, module, p->suffix);
        if (!t) continue;
        uint64_t codes = t->bytes < tight ? t->bytes : tight;
        if (p->kind == QUANT_CODES) {
            add->codes += codes;
            add->padding += t->bytes - codes;
        } else {
            *(p->kind == QUANT_SCALES  ? &add->scales
              : p->kind == QUANT_ZEROS ? &add->zeros
                                       : &add->padding) += t->bytes;
        }
        add->total += t->bytes;
    }
    return 0;
}

void quant_release(const quant_ckpt *q, const char *module)
{
    static const quant_part plain[] = {
        {".weight", QUANT_CODES}, {"", QUANT_CODES}, {NULL, QUANT_CODES}};
    const quant_part *const tables[] = {q->dialect->parts, plain};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        for (const quant_part *p = tables[i]; p && p->suffix; p++) {
            const ckpt_tensor *t = part(q, module, p->suffix);
            if (t) ckpt_dontneed(q->c, t);
        }
}
