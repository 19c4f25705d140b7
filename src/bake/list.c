/* Which linears a scheme applies to.
 *
 * A known architecture says so itself; of an unknown one every matrix inside the layers whose name
 * ends as projections do is taken. lm_head, embeddings, norms and routers stay. The user's rules
 * are counted: one that hits nothing is a note, and an error when strict. Linears that stay are
 * listed for the config, for its target is the class "Linear". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "bake/bake_int.h"
#include "model/arch.h"

typedef struct ruleset {
    quant_rule **rules;
    int *hits;
    int n;
} ruleset;

num_dtype bake__dtype_of(const ckpt_tensor *t)
{
    return t->dtype == NUM_F32 || t->dtype == NUM_F16 ? t->dtype : NUM_BF16;
}

static bool ends(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && !strcmp(s + n - m, tail);
}

/* Applies every rule, so that each gets its count. */
static bool ruled_out(ruleset *s, const char *module)
{
    bool hit = false;
    for (int i = 0; i < s->n; i++)
        if (quant_rule_match(s->rules[i], module)) {
            s->hits[i]++;
            hit = true;
        }
    return hit;
}

static void add_ignore(bake_list *l, const char *name)
{
    for (int i = 0; i < l->n_ignore; i++)
        if (!strcmp(l->ignore[i], name)) return;
    l->ignore = xrealloc(l->ignore, (size_t)(l->n_ignore + 1) * sizeof *l->ignore);
    l->ignore[l->n_ignore++] = arena_strdup(l->mem, name);
}

static int add(bake_list *l, const ckpt *c, const char *module, int set, err *e)
{
    const ckpt_tensor *t;
    char name[BAKE_NAME_MAX];
    snprintf(name, sizeof name, "%s.weight", module);
    int rc = ckpt_need(c, name, &t, e);
    if (rc < 0) return rc;
    bool is_float =
        t->dtype == NUM_NONE || t->dtype == NUM_F32 || t->dtype == NUM_F16 || t->dtype == NUM_BF16;
    if (t->n_dims != 2 || !is_float || t->shape[0] < 1 || t->shape[1] < 1)
        return err_set(e, ERR_DTYPE, "%s: tensor '%s' is not a matrix of bf16, f16 or f32", t->path,
                       t->name);
    l->mods = xrealloc(l->mods, (size_t)(l->n + 1) * sizeof *l->mods);
    l->mods[l->n++] = (bake_mod){.name = arena_strdup(l->mem, module),
                                 .t = t,
                                 .N = t->shape[0],
                                 .K = t->shape[1],
                                 .dtype = bake__dtype_of(t),
                                 .set = set};
    return 0;
}

static int from_arch(bake_list *l, ckpt *c, ruleset *rules, err *e)
{
    arch_model *m;
    int rc = arch_open(&m, ckpt_cfg(c), c, e);
    if (rc < 0) return rc;
    int n = arch_linears(m, NULL, 0);
    arch_linear *a = xcalloc((size_t)n, sizeof *a);
    arch_linears(m, a, n);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < a[i].n_shards; k++) {
            const arch_shard *s = &a[i].shard[k];
            bool stacked = s->E > 1 || s->transposed; /* not matrices that the writer stores */
            l->n_stacked += stacked;
            if (ruled_out(rules, s->module) || !arch_quantizable(a[i].kind) || stacked)
                add_ignore(l, s->module);
            else
                TRY(add(l, c, s->module, i, e));
        }
    rc = 0;
out:
    free(a);
    arch_close(m);
    return rc;
}

/* Set number of a module: that of a sibling that is fused with it; files keep siblings close. */
static int set_of(const bake_list *l, const char *module)
{
    static const char *const kin[][3] = {
        {".q_proj", ".k_proj", ".v_proj"}, {".gate_proj", ".up_proj", "\n"}, {".w1", ".w3", "\n"}};
    const char *dot = strrchr(module, '.');
    for (size_t i = 0; dot && i < sizeof kin / sizeof *kin; i++) {
        if (strcmp(dot, kin[i][0]) && strcmp(dot, kin[i][1]) && strcmp(dot, kin[i][2])) continue;
        for (int j = l->n - 1; j >= 0 && j >= l->n - 64; j--)
            for (int k = 0; k < 3; k++)
                if (!strncmp(l->mods[j].name, module, (size_t)(dot - module)) &&
                    !strcmp(l->mods[j].name + (dot - module), kin[i][k]))
                    return l->mods[j].set;
    }
    return l->n;
}

static bool looks_linear(const char *module)
{
    static const char *const tails[] = {
        "_proj",          ".w1",           ".w2",   ".w3",    ".fc1",
        ".fc2",           ".c_attn",       ".c_fc", ".dense", ".query_key_value",
        ".dense_h_to_4h", ".dense_4h_to_h"};
    if (!strstr(module, "layers.") && !strstr(module, ".h.")) return false;
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++)
        if (ends(module, tails[i])) return true;
    return false;
}

static int from_names(bake_list *l, const ckpt *c, ruleset *rules, err *e)
{
    for (size_t i = 0; i < ckpt_n_tensors(c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(c, i);
        char m[BAKE_NAME_MAX];
        size_t n = strlen(t->name);
        if (t->n_dims != 2 || !ends(t->name, ".weight") || n >= sizeof m) continue;
        memcpy(m, t->name, n - 7);
        m[n - 7] = 0;
        if (strstr(m, "embed") || ends(m, "wte") || ends(m, "wpe")) continue;
        if (ruled_out(rules, m) || !looks_linear(m)) {
            add_ignore(l, m);
        } else {
            int rc = add(l, c, m, set_of(l, m), e);
            if (rc < 0) return rc;
        }
    }
    return 0;
}

static int judge_rules(const ruleset *s, const bake_opts *o, bake_report *r, err *e)
{
    for (int i = 0; i < s->n; i++) {
        if (!s->hits[i] && o->strict)
            return err_set(e, ERR_USAGE,
                           "--ignore '%s' matches no module; correct it or leave out --strict",
                           o->ignore[i]);
        if (!s->hits[i]) log_warn("--ignore '%s' matches no module", o->ignore[i]);
        bake__note(r, "--ignore '%s' caught %d module%s%s", o->ignore[i], s->hits[i],
                   s->hits[i] == 1 ? "" : "s", s->hits[i] ? "" : ": is it spelled right?");
    }
    return 0;
}

/* Experts in one tensor: compressed-tensors stores matrices only. */
static void note_stacks(const ckpt *c, bake_report *r)
{
    int n = 0;
    for (size_t i = 0; i < ckpt_n_tensors(c); i++)
        n += ckpt_tensor_at(c, i)->n_dims == 3;
    if (n) bake__note(r, "%d tensors of three dimensions (stacked experts) stay unquantized", n);
}

/* Parts of a fused linear that were left out while others are quantized. */
static void note_split_sets(const bake_list *l, bake_report *r)
{
    for (int i = 0; i < l->n_ignore; i++)
        for (int j = 0; j < l->n; j++) {
            const char *a = l->ignore[i], *b = l->mods[j].name, *d = strrchr(a, '.');
            bool kin = d && strrchr(b, '.') - b == d - a && !strncmp(a, b, (size_t)(d - a));
            bool qkv = kin && strchr("qkv", d[1]) && !strcmp(d + 2, "_proj") &&
                       strchr("qkv", b[d - a + 1]) && !strcmp(b + (d - a) + 2, "_proj");
            if (!qkv) continue;
            bake__note(r,
                       "%s stays unquantized while %s does not: engines that fuse q, k and v "
                       "refuse such a checkpoint",
                       a, b);
            return;
        }
}

int bake__list(bake_list *l, ckpt *c, const bake_opts *o, bake_report *r, err *e)
{
    int rc = 0;
    const arch_row *row;
    size_t n = (size_t)o->n_ignore + 1;
    ruleset s = {xcalloc(n, sizeof *s.rules), xcalloc(n, sizeof *s.hits), o->n_ignore};
    *l = (bake_list){.mem = arena_make()};
    for (int i = 0; i < s.n; i++)
        if ((rc = quant_rule_make(&s.rules[i], o->ignore[i], e)) < 0) {
            err_wrap(e, "--ignore '%s'", o->ignore[i]);
            goto out;
        }
    err why = {0};
    if (arch_find(ckpt_cfg(c), &row, &why) == 0) {
        TRY(from_arch(l, c, &s, e));
    } else {
        bake__note(r, "tare cannot run this model (%s); linears were found by their names",
                   why.msg);
        TRY(from_names(l, c, &s, e));
    }
    add_ignore(l, "lm_head");
    TRY(judge_rules(&s, o, r, e));
    if (!l->n) {
        rc = err_set(e, ERR_USAGE, "%s: nothing to quantize: %s", ckpt_path(c),
                     l->n_stacked
                         ? "its linears are stored [in, out] or as stacks, which no dialect here "
                           "takes; quantize while loading (--quantization)"
                     : s.n ? "the --ignore rules take every linear; leave some --ignore out"
                           : "no linear was found");
        goto out;
    }
    note_split_sets(l, r);
    note_stacks(c, r);
    l->first = ckpt_tensor_at(c, 0);
    l->by_tensor = arena_alloc(l->mem, ckpt_n_tensors(c) * sizeof *l->by_tensor);
    for (int i = 0; i < l->n; i++)
        l->by_tensor[l->mods[i].t - l->first] = i + 1;
    rc = 0;
out:
    for (int i = 0; i < s.n; i++)
        quant_rule_drop(s.rules[i]);
    free(s.rules);
    free(s.hits);
    return rc;
}

void bake__list_drop(bake_list *l)
{
    free(l->mods);
    free(l->ignore);
    arena_drop(l->mem);
    *l = (bake_list){0};
}

bake_mod *bake__find(const bake_list *l, const ckpt_tensor *t)
{
    int i = l->by_tensor[t - l->first];
    return i ? &l->mods[i - 1] : NULL;
}

/* ---- groups -------------------------------------------------------------------------------------
 */

/* "model.layers.*.mlp.down_proj": the layer number as a star. */
static void collapse(const char *name, char out[BAKE_NAME_MAX])
{
    size_t k = 0;
    for (const char *p = name; *p && k + 1 < BAKE_NAME_MAX; p++) {
        bool digits = p > name && p[-1] == '.' && *p >= '0' && *p <= '9';
        if (digits) {
            while (p[1] >= '0' && p[1] <= '9')
                p++;
        }
        out[k++] = digits ? '*' : *p;
    }
    out[k] = 0;
}

/* Largest usual group that divides every K; 0 = none. */
static int common_group(const bake_list *l, int below)
{
    for (int g = 1024; g >= 16; g /= 2) {
        bool ok = g < below;
        for (int i = 0; ok && i < l->n; i++)
            ok = l->mods[i].K % g == 0;
        if (ok) return g;
    }
    return 0;
}

/* What would do: a smaller group, channel scales, or leaving modules out while others remain. */
static void remedy(const bake_list *l, const qspec *s, int bad, const char *kinds, buf *b)
{
    int g = s->w.scale == QS_FLOAT ? common_group(l, s->w.group) : 0;
    if (g)
        buf_printf(b, "use a group of %d (g%d)", g, g);
    else
        buf_puts(b, s->w.scale == QS_FLOAT ? "use ',channel'" : "use int4 or fp8");
    if (bad < l->n) buf_printf(b, ", or leave them out with --ignore 're:.*(%s)$'", kinds);
}

int bake__check_groups(const bake_list *l, const qspec *s, err *e)
{
    buf names = {0}, kinds = {0}, way = {0};
    int rc = 0, bad = 0;
    char a[BAKE_NAME_MAX], b[BAKE_NAME_MAX];
    if (s->w.gran != Q_GROUP) return 0;
    for (int i = 0; i < l->n; i++) {
        if (l->mods[i].K % s->w.group == 0) continue;
        bad++;
        collapse(l->mods[i].name, a);
        int count = 0, first = -1;
        for (int j = 0; j < l->n; j++) {
            collapse(l->mods[j].name, b);
            if (l->mods[j].K % s->w.group == 0 || strcmp(a, b)) continue;
            if (first < 0) first = j;
            count++;
        }
        if (first != i) continue;
        const char *last = strrchr(l->mods[i].name, '.');
        last = last ? last + 1 : l->mods[i].name;
        if (!kinds.data || !strstr(kinds.data, last))
            buf_printf(&kinds, "%s%s", kinds.len ? "|" : "", last);
        buf_printf(&names, "%s%s (K=%lld, %d of them)", names.len ? ", " : "", a,
                   (long long)l->mods[i].K, count);
    }
    if (bad) {
        remedy(l, s, bad, kinds.data, &way);
        rc = err_set(e, ERR_SHAPE, "groups of %d do not divide the inputs of %d modules: %s; %s",
                     s->w.group, bad, names.data, way.data);
    }
    buf_free(&names);
    buf_free(&kinds);
    buf_free(&way);
    return rc;
}
