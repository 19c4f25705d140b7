/* Scales of the KV cache: where writers put them, and what they mean.
 *
 * A scale multiplies on reading: stored is sat_e4m3(k / k_scale). K is the key after its rotation.
 * Known names, the first that exists counts:
 *
 *   self_attn.k_scale, self_attn.attn.k_scale     compressed-tensors; one value or one a KV head
 *   self_attn.k_proj.k_scale, qkv_proj, qkqkv_proj, mixer.k_proj                       ModelOpt
 *   self_attn.k_cache.scale                                                            HunYuan
 *   self_attn.k_proj.output_scale                                              Quark, old AutoFP8
 *   self_attn.kv_scale                                                          both, deprecated
 *
 * and so for v. A negative value is the "not calibrated" mark: as if absent. One of the pair serves
 * both. A JSON file {"model_type", "kv_cache": {"dtype", "scaling_factor": {RANK: {LAYER: x}}}}
 * that the user names replaces what the checkpoint says, with one factor a layer for K and V; it
 * must name every layer, one rank, and the model's type if any. */
#include <stdlib.h>
#include <string.h>
#include "quant/quant_int.h"

/* %c is k or v. */
static const char *const names[] = {
    "self_attn.%c_scale",          "self_attn.attn.%c_scale",        "self_attn.%c_proj.%c_scale",
    "self_attn.qkv_proj.%c_scale", "self_attn.qkqkv_proj.%c_scale",  "mixer.%c_proj.%c_scale",
    "self_attn.%c_cache.scale",    "self_attn.%c_proj.output_scale", "self_attn.kv_scale",
};

/* The name for k or v, behind "model.layers.N.". */
static void spell(const char *pattern, char which, buf *out)
{
    for (const char *p = pattern; *p; p++) {
        bool mark = p[0] == '%' && p[1] == 'c';
        buf_putc(out, mark ? which : *p);
        p += mark;
    }
}

bool quant_is_kv_scale(const char *tensor)
{
    /* Of the query, and zero points: no engine uses them. */
    static const char *const others[] = {
        ".q_scale", ".k_zero_point",        ".v_zero_point",     ".q_zero_point",
        ".q.scale", ".q_proj.output_scale", ".prob_output_scale"};
    size_t n = strlen(tensor);
    bool hit = false;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        size_t m = strlen(others[i]);
        hit |= n > m && !strcmp(tensor + n - m, others[i]);
    }
    for (size_t i = 0; !hit && i < 2 * sizeof names / sizeof *names; i++) {
        buf b = {0};
        spell(names[i / 2], i % 2 ? 'v' : 'k', &b);
        hit = n > b.len && tensor[n - b.len - 1] == '.' && !strcmp(tensor + n - b.len, b.data);
        buf_free(&b);
    }
    return hit;
}

static const ckpt_tensor *find(const quant_ckpt *q, int layer, char which)
{
    const ckpt_tensor *t = NULL;
    static const char *const at[] = {"model.", "model.language_model.", "language_model.model."};
    size_t n_names = sizeof names / sizeof *names;
    for (size_t i = 0; !t && i < n_names * sizeof at / sizeof *at; i++) {
        buf name = {0};
        buf_printf(&name, "%slayers.%d.", at[i / n_names], layer);
        spell(names[i % n_names], which, &name);
        t = ckpt_find(q->c, name.data);
        buf_free(&name);
    }
    return t;
}

static int read_tensor(const quant_ckpt *q, const ckpt_tensor *t, int heads, const float **out,
                       err *e)
{
    uint64_t n = 1;
    for (int i = 0; i < t->n_dims; i++)
        n = t->shape[i] >= 0 && t->shape[i] <= heads ? n * (uint64_t)t->shape[i] : 0;
    if (t->dtype != NUM_F32 && t->dtype != NUM_BF16 && t->dtype != NUM_F16)
        return err_set(e, ERR_DTYPE, "%s: tensor '%s' is not a float; a KV scale must be", t->path,
                       t->name);
    if (n != 1 && n != (uint64_t)heads)
        return err_set(e, ERR_SHAPE,
                       "%s: KV scale '%s' holds neither one value nor one a KV head (%d)", t->path,
                       t->name, heads);
    float *v = arena_alloc(q->mem, (size_t)heads * sizeof *v);
    num_decode_row(t->dtype, t->data, (size_t)n, v);
    for (int i = 0; i < heads; i++) {
        if (n == 1) v[i] = v[0];
        if (!isfinite(v[i]) || v[i] == 0)
            return err_set(e, ERR_VALUE, "%s: KV scale '%s' is %g; it must be finite and positive",
                           t->path, t->name, (double)v[i]);
    }
    if (v[0] > 0) *out = v;
    return 0;
}

/* ---- the JSON file ------------------------------------------------------------------------------
 */

static int check_head(const quant_ckpt *q, const json *root, const char *path, err *e)
{
    const char *type = NULL, *dtype = NULL;
    const json *kv = json_get(root, "kv_cache");
    int rc = json_get_str(root, "model_type", &type, path, e);
    if (rc >= 0) rc = json_get_str(kv, "dtype", &dtype, path, e);
    if (rc < 0) return rc;
    const char *own = ckpt_cfg(q->c)->model_type;
    if (!json_get(root, "model_type") || (type && *own && strcmp(type, own)))
        return err_set(e, ERR_FORMAT, "%s: 'model_type' is %s; the model is '%s'", path,
                       type ? type : "missing", own);
    if (!dtype || strcmp(dtype, "float8_e4m3fn"))
        return err_set(e, ERR_FORMAT, "%s: kv_cache.dtype is %s; expected 'float8_e4m3fn'", path,
                       dtype ? dtype : "missing");
    return 0;
}

/* The one rank's object of layers. */
static const json *only_rank(const json *root)
{
    const json *ranks = json_get(json_get(root, "kv_cache"), "scaling_factor");
    const json *r = cJSON_IsObject(ranks) ? ranks->child : NULL;
    return r && !r->next && cJSON_IsObject(r) && !strcmp(r->string, "0") ? r : NULL;
}

static int read_layers(float *v, int64_t n, const json *layers, const char *path, err *e)
{
    int64_t seen = 0;
    for (const json *x = layers->child; x; x = x->next) {
        char *end;
        long long i = strtoll(x->string, &end, 10);
        if (*end || end == x->string || i < 0 || i >= n || v[i] != 0)
            return err_set(e, ERR_VALUE,
                           "%s: layer '%.40s'; the model has layers 0 to %lld, each once", path,
                           x->string, (long long)n - 1);
        if (!cJSON_IsNumber(x) || !(x->valuedouble > 0) || !((float)x->valuedouble > 0) ||
            !isfinite((float)x->valuedouble))
            return err_set(e, ERR_VALUE,
                           "%s: the factor of layer %lld must be a positive finite number", path,
                           i);
        v[i] = (float)x->valuedouble;
        seen++;
    }
    if (seen != n)
        return err_set(e, ERR_MISSING, "%s: factors of %lld layers; the model has %lld", path,
                       (long long)seen, (long long)n);
    return 0;
}

int quant__kv_file(quant_ckpt *q, const char *path, err *e)
{
    int rc = 0;
    json *root = NULL;
    int64_t n = ckpt_cfg(q->c)->n_layers;
    TRY(json_parse_file(&root, path, e));
    TRY(check_head(q, root, path, e));
    const json *layers = only_rank(root);
    if (!layers || n < 1) {
        rc = err_set(e, ERR_FORMAT,
                     "%s: kv_cache.scaling_factor must hold one rank, \"0\", with the factors of "
                     "%lld layers",
                     path, (long long)n);
        goto out;
    }
    q->kv_file = arena_alloc(q->mem, (size_t)n * sizeof *q->kv_file);
    memset(q->kv_file, 0, (size_t)n * sizeof *q->kv_file);
    rc = read_layers(q->kv_file, n, layers, path, e);
out:
    json_drop(root);
    return rc < 0 ? rc : 0;
}

int quant_kv_scales(const quant_ckpt *q, int layer, int n_kv_heads, const float **k,
                    const float **v, err *e)
{
    int rc = 0;
    *k = *v = NULL;
    if (n_kv_heads < 1) return err_set(e, ERR_VALUE, "KV scales: %d heads", n_kv_heads);
    if (q->kv_file && layer >= 0 && layer < ckpt_cfg(q->c)->n_layers) {
        float *one = arena_alloc(q->mem, (size_t)n_kv_heads * sizeof *one);
        for (int i = 0; i < n_kv_heads; i++)
            one[i] = q->kv_file[layer];
        *k = *v = one;
        return 0;
    }
    const ckpt_tensor *tk = find(q, layer, 'k'), *tv = find(q, layer, 'v');
    if (tk) TRY(read_tensor(q, tk, n_kv_heads, k, e));
    if (tv) TRY(read_tensor(q, tv, n_kv_heads, v, e));
    if (!*k) *k = *v;
    if (!*v) *v = *k;
    rc = 0;
out:
    return rc;
}
