/* tare convert --to DIALECT: the codes, scales and zero points of a quantized checkpoint under the
 * names and in the packing of another dialect, without changing one of them.
 *
 * Each module is loaded into a qtensor, stored by the other dialect, and dropped: one is resident
 * at a time. A dialect's store refuses what it cannot hold (zero points, an order of columns, a
 * second factor, activation scales …) and names the module and what would be lost; then nothing is
 * written. What was written is opened again through the ordinary loader, and every code, scale,
 * zero point, index and dequantized value must be what it was, or nothing is kept. Unquantized
 * tensors are copied byte by byte; KV scales get the names of the other dialect, or are refused. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include "bake/bake_int.h"

typedef struct module {
    char *name;
    qspec spec;
    uint64_t hash;
} module;

typedef struct work {
    const convert_opts *o;
    bake_report *r;
    const quant_dialect *to;
    ckpt *c;
    quant_ckpt *q;
    ckpt_writer *w;
    num_dtype model_dtype;
    module *mods;
    int n_mods;
    char **ignore;
    int n_ignore;
    uint64_t *hashes; /* of the copied tensors, by source index; 0 = not copied */
    char **names;     /* under which they were written */
} work;

/* ---- digest of everything that must not change -------------------------------------------------
 */

/* Values, not storage: an F16 scale and the same in F32 are equal. */
static void add_grid(XXH3_state_t *h, num_dtype t, const void *grid, int64_t n)
{
    float v[256];
    for (int64_t i = 0; i < n; i += 256) {
        int64_t m = n - i < 256 ? n - i : 256;
        memset(v, 0, sizeof v);
        if (grid)
            num_decode_row(t, (const uint8_t *)grid + num_bytes(t, 1) * (size_t)i, (size_t)m, v);
        for (int64_t j = 0; j < m; j++)
            v[j] += 0.0f;
        XXH3_64bits_update(h, v, (size_t)m * sizeof *v);
    }
}

/* Columns to groups as they are used: a trivial index is no index. */
static void add_order(XXH3_state_t *h, const qtensor *t)
{
    for (int64_t k = 0; k < t->K; k++) {
        int64_t g = t->g_idx ? t->g_idx[k] : k / t->block_k;
        XXH3_64bits_update(h, &g, sizeof g);
    }
}

static void add_codes(XXH3_state_t *h, const qtensor *t)
{
    size_t bits = (size_t)num_infos[t->code].bits * (size_t)t->K;
    for (int64_t r = 0; r < t->E * t->N; r++) {
        XXH3_64bits_update(h, t->codes + (size_t)r * t->row_bytes, bits / 8);
        for (int64_t k = bits % 8 ? t->K - 8 : t->K; k < t->K; k++) { /* not the padding */
            int32_t c = k < 0 ? 0 : qtensor_code(t, r, k);
            XXH3_64bits_update(h, &c, sizeof c);
        }
    }
}

static int digest(const qtensor *t, uint64_t *out, err *e)
{
    int64_t cells = t->E * t->scale_rows * t->scale_cols;
    const int64_t dims[] = {t->E, t->N, t->K, t->code, t->scale_rows, t->scale_cols, t->flat};
    const float act[] = {t->input_scale, t->input_zero, t->input_global};
    XXH3_state_t *h = XXH3_createState();
    if (!h) return err_set(e, ERR_NOMEM, "out of memory");
    XXH3_64bits_reset(h);
    XXH3_64bits_update(h, dims, sizeof dims);
    XXH3_64bits_update(h, act, sizeof act);
    XXH3_64bits_update(h, t->global, (size_t)t->n_global * sizeof *t->global);
    add_codes(h, t);
    add_grid(h, t->scale_type, t->scales, cells);
    add_grid(h, t->zero_type, t->zeros, cells);
    if (!t->flat) add_order(h, t);
    if (t->table) add_grid(h, NUM_F32, t->table, 1 << num_infos[t->code].bits);
    if (t->pre_scale) add_grid(h, NUM_F32, t->pre_scale, t->K);
    *out = XXH3_64bits_digest(h);
    XXH3_freeState(h);
    return 0;
}

/* ---- what is there ------------------------------------------------------------------------------
 */

static bool ends(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && !strcmp(s + n - m, tail);
}

/* A linear that stays as it is: the config of the output has to say so. */
static bool plain_linear(const ckpt_tensor *t)
{
    return t->n_dims == 2 && ends(t->name, ".weight") && !strstr(t->name, "embed") &&
           !ends(t->name, "wte.weight") && !ends(t->name, "wpe.weight");
}

static int survey(work *k, err *e)
{
    size_t n = ckpt_n_tensors(k->c);
    char module_name[QUANT_NAME_MAX];
    k->mods = xcalloc(n + 1, sizeof *k->mods);
    k->ignore = xcalloc(n + 2, sizeof *k->ignore);
    k->model_dtype = NUM_BF16;
    bool typed = false, head = false;
    for (size_t i = 0; i < n; i++) {
        const ckpt_tensor *t = ckpt_tensor_at(k->c, i);
        const quant_part *p = quant_part_of(k->q, t->name, module_name);
        if (p && p->kind == QUANT_CODES) {
            quant_module m;
            int rc = quant_describe(k->q, module_name, &m, e);
            if (rc < 0) return rc;
            head |= !strcmp(module_name, "lm_head");
            k->mods[k->n_mods++] = (module){.name = xstrdup(module_name), .spec = m.spec};
        } else if (!p && plain_linear(t)) {
            head |= !strcmp(t->name, "lm_head.weight");
            k->ignore[k->n_ignore++] = xstrndup(t->name, strlen(t->name) - 7);
        }
        bool norm = t->n_dims == 1 && ends(t->name, "norm.weight");
        if (!typed && norm) k->model_dtype = bake__dtype_of(t);
        typed |= norm;
    }
    if (!head) k->ignore[k->n_ignore++] = xstrdup("lm_head");
    return 0;
}

/* ---- KV scales ----------------------------------------------------------------------------------
 */

static const struct {
    const char *dialect, *name; /* behind "self_attn." */
} kv_names[] = {{"compressed-tensors", "%c_scale"}, {"modelopt", "%c_proj.%c_scale"}};

/* The name of a KV scale in the output; false = not a KV scale. NULL in *out = no place for it. */
static bool kv_name(const work *k, const char *name, char **out)
{
    const char *dot = strrchr(name, '.'), *at = strstr(name, "self_attn.");
    *out = NULL;
    if (!dot || (strcmp(dot, ".k_scale") && strcmp(dot, ".v_scale"))) {
        bool other = dot && (!strcmp(dot, ".kv_scale") || !strcmp(dot, ".q_scale") ||
                             !strcmp(dot, ".output_scale"));
        if (other && k->to == k->q->dialect) *out = xstrdup(name);
        return other;
    }
    if (k->to == k->q->dialect) {
        *out = xstrdup(name);
        return true;
    }
    for (size_t i = 0; at && i < sizeof kv_names / sizeof *kv_names; i++) {
        if (strcmp(kv_names[i].dialect, k->to->name)) continue;
        buf b = {0};
        buf_add(&b, name, (size_t)(at - name));
        buf_puts(&b, "self_attn.");
        for (const char *p = kv_names[i].name; *p; p++) {
            bool mark = p[0] == '%' && p[1] == 'c';
            buf_putc(&b, mark ? dot[1] : *p);
            p += mark;
        }
        *out = b.data;
        break;
    }
    return true;
}

/* ---- writing ------------------------------------------------------------------------------------
 */

static int write_module(work *k, module *m, err *e)
{
    int rc = 0;
    qtensor t = {0};
    TRY(quant_load(k->q, m->name, &t, e));
    m->spec = t.spec;
    TRY(digest(&t, &m->hash, e));
    TRY(k->to->store(k->w, m->name, &t, k->model_dtype, e));
    mem_rss_sample();
out:
    qtensor_free(&t);
    return rc < 0 ? rc : 0;
}

static int copy_tensor(work *k, size_t i, const ckpt_tensor *t, err *e)
{
    char *kv;
    if (!kv_name(k, t->name, &kv)) {
        k->names[i] = xstrdup(t->name);
        return bake__copy(k->w, k->c, t, NUM_NONE, &k->hashes[i], e);
    }
    if (!kv)
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: '%s' is a scale of the KV cache, for which %s has no place; it would "
                       "be lost",
                       t->path, t->name, k->to->name);
    k->names[i] = kv;
    ckpt_tensor renamed = *t;
    renamed.name = kv;
    return bake__copy(k->w, k->c, &renamed, NUM_NONE, &k->hashes[i], e);
}

/* Tensors in the order of the source; a module is written where its codes stand, and its pages are
 * given back when the last of its tensors has gone by. */
static int write_tensors(work *k, err *e)
{
    int rc = 0, at = 0;
    progress p;
    uint64_t done = 0;
    char name[QUANT_NAME_MAX];
    size_t n = ckpt_n_tensors(k->c);
    k->hashes = xcalloc(n + 1, sizeof *k->hashes);
    k->names = xcalloc(n + 1, sizeof *k->names);
    progress_start(&p, "convert", ckpt_file_bytes(k->c));
    for (size_t i = 0; i < n && rc >= 0; i++) {
        const ckpt_tensor *t = ckpt_tensor_at(k->c, i);
        const quant_part *part = quant_part_of(k->q, t->name, name);
        if (!part)
            rc = copy_tensor(k, i, t, e);
        else if (part->kind == QUANT_CODES)
            rc = write_module(k, &k->mods[at++], e);
        ckpt_dontneed(k->c, t);
        progress_step(&p, done += t->bytes, t->name);
    }
    progress_end(&p);
    return rc;
}

static int write_config(work *k, err *e)
{
    int rc = 0;
    buf quant = {0}, cfg = {0};
    jw j;
    const bake_tie tie = {0};
    quant_written *m = xcalloc((size_t)k->n_mods + 1, sizeof *m);
    for (int i = 0; i < k->n_mods; i++)
        m[i] = (quant_written){k->mods[i].name, k->mods[i].spec};
    jw_init(&j, &quant, 0);
    TRY(quant_emit(k->to, &j, m, k->n_mods, &k->q->kv, k->ignore, k->n_ignore, e));
    TRY(bake__config(k->c, quant.data, NUM_NONE, &tie, NULL, &cfg, e));
    if (k->to->side_config)
        TRY(ckpt_writer_file(k->w, k->to->side_config, quant.data, quant.len, e));
    TRY(ckpt_writer_finish(k->w, cfg.data, e));
out:
    free(m);
    buf_free(&quant);
    buf_free(&cfg);
    return rc;
}

/* ---- verification -------------------------------------------------------------------------------
 */

static int verify_module(const work *k, const quant_ckpt *q, const module *m, err *e)
{
    int rc = 0;
    uint64_t hash;
    qtensor t = {0};
    if (!quant_has(q, m->name))
        return err_set(e, ERR_IO, "module '%s' is not quantized in the output", m->name);
    TRY(quant_load(q, m->name, &t, e));
    TRY(digest(&t, &hash, e));
    if (!qaxis_equal(&t.spec.a, &m->spec.a))
        rc = err_set(e, ERR_UNSUPPORTED,
                     "module '%s': %s does not say how its activations are quantized; that would "
                     "be lost",
                     m->name, k->to->name);
    else if (hash != m->hash)
        rc = err_set(e, ERR_UNSUPPORTED,
                     "module '%s': %s gives back other codes, scales or zero points than were "
                     "stored; it cannot hold these",
                     m->name, k->to->name);
    mem_rss_sample();
out:
    qtensor_free(&t);
    return rc < 0 ? rc : 0;
}

static int verify(work *k, err *e)
{
    int rc = 0;
    ckpt *c = NULL;
    quant_ckpt *q = NULL;
    TRY(ckpt_open(&c, ckpt_writer_dir(k->w), e));
    TRY(quant_open(&q, c, e));
    for (int i = 0; i < k->n_mods; i++)
        TRY(verify_module(k, q, &k->mods[i], e));
    if (!qaxis_equal(&q->kv, &k->q->kv)) {
        rc = err_set(e, ERR_UNSUPPORTED,
                     "%s: the KV cache is quantized (kv_cache_scheme), which %s does not say; that "
                     "would be lost",
                     ckpt_path(k->c), k->to->name);
        goto out;
    }
    for (size_t i = 0; i < ckpt_n_tensors(k->c); i++)
        if (k->names[i]) TRY(bake__read_back(c, k->names[i], k->hashes[i], e));
    k->r->bytes_out = ckpt_file_bytes(c);
    rc = 0;
out:
    quant_close(q);
    ckpt_close(c);
    return rc < 0 ? err_wrap(e, "the output was not kept") : 0;
}

static int open_source(work *k, err *e)
{
    int rc = 0;
    TRY(bake__not_same(k->o->in, k->o->out, e));
    TRY(ckpt_open(&k->c, k->o->in, e));
    TRY(quant_open_as(&k->q, k->c, &(quant_opts){.gptq_zeros = k->o->gptq_zeros}, e));
    if (!strcmp(k->q->dialect->name, "plain")) {
        rc = err_set(e, ERR_USAGE,
                     "%s: is not quantized in a dialect that convert could rewrite; quantize it "
                     "with `tare quantize`, or convert --to plain",
                     ckpt_path(k->c));
        goto out;
    }
    TRY(survey(k, e));
    rc = bake__disk(k->o->out, ckpt_file_bytes(k->c) * 5 / 4, k->o->max_shard_bytes, e);
out:
    return rc < 0 ? rc : 0;
}

static void drop(work *k)
{
    size_t n = k->c ? ckpt_n_tensors(k->c) : 0;
    for (int i = 0; i < k->n_mods; i++)
        free(k->mods[i].name);
    for (int i = 0; i < k->n_ignore; i++)
        free(k->ignore[i]);
    for (size_t i = 0; i < n && k->names; i++)
        free(k->names[i]);
    free(k->mods);
    free(k->ignore);
    free(k->names);
    free(k->hashes);
    quant_close(k->q);
    ckpt_close(k->c);
}

int bake__recode(const convert_opts *o, const quant_dialect *to, bake_report *r, err *e)
{
    int rc = 0;
    work k = {.o = o, .r = r, .to = to};
    TRY(open_source(&k, e));
    TRY(ckpt_writer_open(&k.w, o->out, o->max_shard_bytes, o->overwrite, e));
    TRY(write_tensors(&k, e));
    TRY(bake__side_files(k.w, k.c, r, e));
    TRY(write_config(&k, e));
    TRY(verify(&k, e));
    TRY(ckpt_writer_publish(&k.w, e));
    snprintf(r->scheme, sizeof r->scheme, "%s", to->name);
    bake__note(r, "%d modules from %s to %s, every code, scale and zero point as it was", k.n_mods,
               k.q->dialect->name, to->name);
    r->bytes_in = ckpt_file_bytes(k.c);
out:
    ckpt_writer_abort(&k.w);
    drop(&k);
    return rc;
}
