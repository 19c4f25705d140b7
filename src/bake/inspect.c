/* tare inspect: what a checkpoint is, as one JSON object, from headers alone.
 *
 * Bytes by kind add up to the tensors of the files: codes (tight), scales (all levels, static input
 * scales too), zeros, unquantized, padding (bits of packed rows that no code uses, and the small
 * tensors that describe the layout). A checkpoint that tare cannot run is described all the same:
 * "runs" is false and "why_not" says what stands in the way, of the architecture and of the
 * dialect. A config without weight files is described by what it says ("weights" is false, nothing
 * is counted); the modules that an ignore rule catches are then those of the architecture, and an
 * index without shards is counted by names. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "bake/bake_int.h"
#include "ckpt/gguf.h"
#include "model/arch.h"

typedef struct scan {
    ckpt *c;
    quant_ckpt *q; /* NULL when the dialect is not read */
    qbytes bytes;
    uint64_t params;
    err misfit;       /* the first module whose tensors do not fit together */
    arch_model *arch; /* NULL when no recipe runs it */
    err no_arch, no_quant;
} scan;

static bool ends(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && !strcmp(s + n - m, tail);
}

static uint64_t elements(const ckpt_tensor *t)
{
    uint64_t n = 1;
    for (int i = 0; i < t->n_dims; i++)
        n *= (uint64_t)t->shape[i];
    return n;
}

/* The part of a quantized module that this tensor is, or NULL. */
static const quant_part *part_of(const scan *s, const ckpt_tensor *t, char module[QUANT_NAME_MAX])
{
    return s->q ? quant_part_of(s->q, t->name, module) : NULL;
}

/* All tensors of the module are counted here; one whose shapes do not fit is listed with why. */
static void write_module(scan *s, jw *w, const ckpt_tensor *t, const char *module)
{
    quant_module m;
    err e = {0};
    buf b = {0};
    bool known = quant_describe(s->q, module, &m, &e) == 0 &&
                 quant_module_bytes(s->q, module, &s->bytes, &e) == 0;
    if (known) {
        s->params += (uint64_t)(m.E * m.N) * (uint64_t)m.K;
        qspec_format(&m.spec, &b);
    } else {
        s->bytes.codes += t->bytes;
        if (!s->misfit.code) s->misfit = e;
    }
    jw_obj(w);
    jw_kstr(w, "name", module);
    jw_kstr(w, "spec", b.data);
    jw_kstr(w, "format", known ? m.format : NULL);
    jw_key(w, "shape");
    jw_arr(w);
    jw_i64(w, known ? m.E * m.N : 0);
    jw_i64(w, known ? m.K : 0);
    jw_end_arr(w);
    jw_ki64(w, "bytes", (int64_t)t->bytes);
    jw_end_obj(w);
    buf_free(&b);
}

/* gguf blocks hold codes and scales together: both count as codes. */
static void write_block_tensor(scan *s, jw *w, const ckpt_tensor *t)
{
    s->bytes.codes += t->bytes;
    s->params += elements(t);
    jw_obj(w);
    jw_kstr(w, "name", t->name);
    jw_kstr(w, "spec", t->gguf->name);
    jw_ki64(w, "bytes", (int64_t)t->bytes);
    jw_end_obj(w);
}

static void write_modules(scan *s, jw *w)
{
    char module[QUANT_NAME_MAX];
    jw_key(w, "modules");
    jw_arr(w);
    for (size_t i = 0; i < ckpt_n_tensors(s->c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(s->c, i);
        const quant_part *p = part_of(s, t, module);
        if (t->gguf && t->dtype == NUM_NONE)
            write_block_tensor(s, w, t);
        else if (p && p->kind == QUANT_CODES)
            write_module(s, w, t, module);
    }
    jw_end_arr(w);
}

static void write_unquantized(scan *s, jw *w)
{
    char module[QUANT_NAME_MAX];
    jw_key(w, "unquantized");
    jw_arr(w);
    for (size_t i = 0; i < ckpt_n_tensors(s->c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(s->c, i);
        const char *n = t->name;
        if ((t->gguf && t->dtype == NUM_NONE) || part_of(s, t, module)) continue;
        if (ends(n, "_scale") || ends(n, "_scale_inv") || ends(n, "_scale_2") ||
            ends(n, ".scale") || ends(n, ".scales")) {
            s->bytes.scales += t->bytes;
        } else if (ends(n, "zero_point") || ends(n, ".qzeros")) {
            s->bytes.zeros += t->bytes;
        } else if (ends(n, ".weight_shape") || ends(n, "g_idx")) {
            s->bytes.padding += t->bytes;
        } else if (!s->q && (ends(n, ".qweight") || ends(n, ".weight_packed") ||
                             t->dtype == NUM_U8 || t->dtype == NUM_I8 || t->dtype == NUM_F8_E4M3)) {
            s->bytes.codes += t->bytes; /* of a dialect that is not read */
        } else {
            s->bytes.unquantized += t->bytes;
            s->params += elements(t);
            jw_str(w, n);
        }
    }
    jw_end_arr(w);
}

static void write_bytes(scan *s, jw *w)
{
    qbytes *b = &s->bytes;
    b->total = b->codes + b->scales + b->zeros + b->unquantized + b->padding;
    jw_key(w, "bytes");
    jw_obj(w);
    jw_ki64(w, "codes", (int64_t)b->codes);
    jw_ki64(w, "scales", (int64_t)b->scales);
    jw_ki64(w, "zeros", (int64_t)b->zeros);
    jw_ki64(w, "unquantized", (int64_t)b->unquantized);
    jw_ki64(w, "padding", (int64_t)b->padding);
    jw_ki64(w, "total", (int64_t)b->total);
    jw_end_obj(w);
}

/* One axis in words; "mixed" where groups differ. */
static void write_axis(const scan *s, jw *w, const char *key, int which)
{
    buf b = {0};
    const ckpt_config *cfg = ckpt_cfg(s->c);
    bool same = true;
    const qspec *y = NULL;
    for (int i = 0; s->q && i < s->q->n_groups; i++) {
        const qspec *x = &s->q->groups[i].spec;
        bool idle = !s->q->groups[i].hits && ckpt_has_weights(s->c);
        if (idle || !strcmp(s->q->groups[i].format, "dense")) continue;
        if (y) {
            same &= which == 0 ? qaxis_equal(&x->w, &y->w) : qaxis_equal(&x->a, &y->a);
            continue;
        }
        y = x;
        qaxis_format(which == 0 ? &x->w : &x->a, &b);
        if (which == 1 && x->a.gran != Q_NONE && !x->a.dynamic) buf_puts(&b, ",static");
    }
    if (which == 2 && s->q) {
        buf_clear(&b);
        qaxis_format(&s->q->kv, &b);
    } else if (!s->q) {
        buf_puts(&b, "unknown");
    } else if (which == 0 && ckpt_is_gguf(s->c)) {
        buf_puts(&b, ckpt_gguf_types(s->c));
    } else if (!y) {
        buf_puts(&b, which == 0 && cfg->dtype != NUM_NONE ? num_infos[cfg->dtype].name : "bf16");
    }
    jw_kstr(w, key, same || which == 2 ? b.data : "mixed");
    buf_free(&b);
}

/* Without tensors to count, the linears of the architecture are held against the rules. */
static void count_rules(scan *s)
{
    const arch_model *m = s->arch;
    if (ckpt_has_weights(s->c) || !s->q || !m) return;
    int n = arch_linears(m, NULL, 0);
    arch_linear *all = xcalloc((size_t)n, sizeof *all);
    arch_linears(m, all, n);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < all[i].n_shards; k++)
            for (int r = 0; r < s->q->n_ignore; r++)
                s->q->ignore_hits[r] +=
                    quant_rule_kind_of(s->q->ignore_rules[r]) != QUANT_RULE_CLASS &&
                    quant_rule_match(s->q->ignore_rules[r], all[i].shard[k].module);
    free(all);
}

static void write_rules(const scan *s, jw *w)
{
    bool counted = ckpt_has_weights(s->c);
    jw_key(w, "groups");
    jw_arr(w);
    for (int i = 0; s->q && i < s->q->n_groups; i++) {
        const quant_group *g = &s->q->groups[i];
        buf b = {0};
        qspec_format(&g->spec, &b);
        jw_obj(w);
        jw_kstr(w, "spec", b.data);
        jw_kstr(w, "format", g->format);
        jw_key(w, "targets");
        jw_arr(w);
        for (int t = 0; t < g->n_targets; t++)
            jw_str(w, g->targets[t]);
        jw_end_arr(w);
        jw_key(w, "modules");
        if (counted)
            jw_i64(w, g->hits);
        else
            jw_null(w);
        jw_end_obj(w);
        buf_free(&b);
    }
    jw_end_arr(w);
    jw_key(w, "ignore");
    jw_arr(w);
    for (int i = 0; s->q && i < s->q->n_ignore; i++) {
        jw_obj(w);
        jw_kstr(w, "rule", s->q->ignore[i]);
        jw_key(w, "modules");
        if (counted || s->arch)
            jw_i64(w, s->q->ignore_hits[i]);
        else
            jw_null(w);
        jw_end_obj(w);
    }
    jw_end_arr(w);
}

/* What stands in the way of running it, of the architecture and of the dialect. */
static void write_runs(const scan *s, jw *w)
{
    const ckpt_config *cfg = ckpt_cfg(s->c);
    const arch_row *row = NULL;
    buf why = {0}, parts = {0};
    if (!s->arch) arch_find(cfg, &row, NULL);
    if (!s->arch && !row) {
        arch_obstacles(cfg, &parts);
        buf_printf(&why, "architecture '%s' is not run: %s", cfg->architecture,
                   parts.len ? parts.data : "there is no recipe for it");
    } else if (!s->arch) {
        buf_puts(&why, s->no_arch.msg);
    }
    if (!s->q) buf_printf(&why, "%s%s", why.len ? "; " : "", s->no_quant.msg);
    jw_kbool(w, "runs", !why.len);
    jw_kstr(w, "why_not", why.len ? why.data : NULL);
    buf_free(&why);
    buf_free(&parts);
}

/* Parts of the model that are not run though the rest is: what is around the language model in a
 * wrapper, and layers beyond its own that predict further tokens. */
static void warn_beside(const scan *s, jw *w)
{
    static const char *const keys[] = {"num_nextn_predict_layers", "mtp_num_hidden_layers"};
    const ckpt_config *cfg = ckpt_cfg(s->c);
    char text[160];
    if (s->arch && cfg->text != cfg->raw)
        jw_str(w, "the language model inside the wrapper is what runs; images and sound are not "
                  "taken");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        int64_t n = 0;
        json_get_i64(cfg->text, keys[i], &n, cfg->where, NULL);
        snprintf(text, sizeof text, "%s: %lld: what predicts further tokens is not run", keys[i],
                 (long long)n);
        if (n > 0) jw_str(w, text);
    }
}

static void write_warnings(const scan *s, jw *w)
{
    const ckpt_config *cfg = ckpt_cfg(s->c);
    jw_key(w, "warnings");
    jw_arr(w);
    for (int i = 0; i < cfg->n_warnings; i++)
        jw_str(w, cfg->warnings[i]);
    if (!ckpt_has_weights(s->c))
        jw_str(w, "no weight files here: this is what the config says, not what tensors show");
    if (s->no_quant.code) jw_str(w, s->no_quant.msg);
    for (int i = 0; s->q && i < s->q->n_warnings; i++)
        jw_str(w, s->q->warnings[i]);
    if (s->misfit.code) jw_str(w, s->misfit.msg);
    if (s->no_arch.code) jw_str(w, s->no_arch.msg);
    warn_beside(s, w);
    const ckpt_tensor *head = ckpt_find(s->c, "lm_head.weight");
    if (cfg->tie_embeddings && head)
        jw_str(w, "tie_word_embeddings is true and lm_head.weight is stored as well");
    if (!cfg->tie_embeddings && !head && ckpt_find(s->c, "model.embed_tokens.weight"))
        jw_str(w, "tie_word_embeddings is false, but lm_head.weight is not stored");
    jw_end_arr(w);
}

static const char *format_name(const scan *s)
{
    const char *m = NULL;
    if (ckpt_is_gguf(s->c)) return "gguf";
    if (s->q) return s->q->dialect->name;
    const json *quant = ckpt_cfg(s->c)->quant;
    if (quant) json_get_str(quant, "quant_method", &m, "", NULL);
    if (!m && json_get(quant, "bits") && json_get(quant, "group_size")) return "mlx";
    return m ? m : "unknown";
}

/* The language model's own class, where a wrapper holds it. */
static const char *text_architecture(const ckpt_config *cfg)
{
    const char *type = NULL;
    if (cfg->text == cfg->raw) return NULL;
    const json *names = json_get(cfg->text, "architectures");
    if (cJSON_IsArray(names) && cJSON_IsString(names->child)) return names->child->valuestring;
    json_get_str(cfg->text, "model_type", &type, cfg->where, NULL);
    return type;
}

/* Tensors of an index that the dialect adds to a model's own. */
static int64_t index_parts(const scan *s, const json *map)
{
    int64_t n = 0;
    for (const json *v = map->child; s->q && v; v = v->next)
        for (const quant_part *p = s->q->dialect->parts; p && p->suffix; p++)
            if (*p->suffix && strcmp(p->suffix, ".weight") != 0 && ends(v->string, p->suffix)) {
                n++;
                break;
            }
    return n;
}

/* An index without its shards names tensors; their shapes and types are not known. */
static void write_index(const scan *s, jw *w)
{
    const json *map = ckpt_index(s->c);
    if (ckpt_has_weights(s->c) || !map) return;
    jw_key(w, "index");
    jw_obj(w);
    jw_ki64(w, "tensors", cJSON_GetArraySize(map));
    jw_ki64(w, "of_the_dialect", index_parts(s, map));
    jw_end_obj(w);
}

static void write_head(scan *s, jw *w)
{
    const ckpt_config *cfg = ckpt_cfg(s->c);
    jw_kstr(w, "model", ckpt_path(s->c));
    jw_kstr(w, "architecture", cfg->architecture);
    jw_kstr(w, "text_architecture", text_architecture(cfg));
    jw_kstr(w, "format", format_name(s));
    write_axis(s, w, "w", 0);
    write_axis(s, w, "a", 1);
    write_axis(s, w, "kv", 2);
    write_runs(s, w);
    jw_kbool(w, "weights", ckpt_has_weights(s->c));
    write_index(s, w);
}

int bake_inspect(const char *model, jw *w, err *e)
{
    scan s = {0};
    int rc = ckpt_open_config(&s.c, model, e);
    if (rc < 0) return rc;
    if (quant_open(&s.q, s.c, &s.no_quant) < 0) s.q = NULL;
    const ckpt_config *cfg = ckpt_cfg(s.c);
    if (arch_open(&s.arch, cfg, ckpt_has_weights(s.c) ? s.c : NULL, &s.no_arch) < 0) s.arch = NULL;
    count_rules(&s);
    jw_obj(w);
    write_head(&s, w);
    write_modules(&s, w);
    write_unquantized(&s, w);
    write_bytes(&s, w);
    jw_key(w, "params");
    if (s.q && ckpt_has_weights(s.c))
        jw_i64(w, (int64_t)s.params);
    else
        jw_null(w); /* packed words of a dialect that is not read cannot be counted */
    jw_kbool(w, "tied", cfg->tie_embeddings);
    write_rules(&s, w);
    buf origin = {0};
    ckpt_origin_words(s.c, &origin);
    jw_kstr(w, "origin", origin.data);
    buf_free(&origin);
    write_warnings(&s, w);
    jw_end_obj(w);
    arch_close(s.arch);
    quant_close(s.q);
    ckpt_close(s.c);
    return 0;
}
