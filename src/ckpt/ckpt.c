/* A model on disk: where it is, which files belong to it, every tensor by name.
 *
 * Only headers are read; tensor data stays in the map. The index and the shards must agree both
 * ways: a tensor that the index names is in the shard that it names, and no shard holds a tensor
 * that the index does not know (what a crashed writer or a mixed download leaves behind). Folders
 * with several .safetensors files and no index are refused, since nothing says which belong. */
#include "ckpt/ckpt_internal.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* ---- where is it --------------------------------------------------------------------------------
 */

static char *env_path(const char *name, const char *tail)
{
    const char *v = getenv(name);
    return v && *v ? xasprintf("%s%s", v, tail) : NULL;
}

/* "org/name" in the hub cache: models--org--name/snapshots/<refs/main>, or the only snapshot. */
static char *hub_lookup(const char *name)
{
    char *root = env_path("HF_HUB_CACHE", "");
    if (!root) root = env_path("HF_HOME", "/hub");
    if (!root) root = env_path("HOME", "/.cache/huggingface/hub");
    if (!root) return NULL;
    buf dir = {0}, rev = {0};
    char *out = NULL, **names = NULL;
    size_t n = 0;
    buf_printf(&dir, "%s/models--", root);
    for (const char *s = name; *s; s++)
        buf_printf(&dir, *s == '/' ? "--" : "%c", *s);
    char *ref = xasprintf("%s/refs/main", dir.data), *snaps = xasprintf("%s/snapshots", dir.data);
    if (file_exists(ref) && file_read_all(&rev, ref, 256, NULL) == 0) {
        while (rev.len && isspace((unsigned char)rev.data[rev.len - 1]))
            rev.data[--rev.len] = 0;
        out = xasprintf("%s/%s", snaps, rev.data);
    } else if (file_list(snaps, &names, &n, NULL) == 0 && n == 1) {
        out = xasprintf("%s/%s", snaps, names[0]);
    }
    if (out && !file_is_dir(out)) {
        free(out);
        out = NULL;
    }
    file_list_free(names, n);
    free(ref);
    free(snaps);
    free(root);
    buf_free(&dir);
    buf_free(&rev);
    return out;
}

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), k = strlen(tail);
    return n >= k && !strcmp(s + n - k, tail);
}

/* Resolves what the user gave to a directory or a .gguf file. */
static int resolve(const char *given, char **out, err *e)
{
    *out = NULL;
    if (!*given) return err_set(e, ERR_USAGE, "the model path is empty");
    if (file_is_dir(given)) {
        *out = xstrdup(given);
    } else if (file_exists(given)) {
        if (ends_with(given, ".gguf")) {
            *out = xstrdup(given);
        } else if (ends_with(given, ".safetensors") || ends_with(given, "config.json")) {
            const char *slash = strrchr(given, '/');
            *out = slash ? xstrndup(given, (size_t)(slash - given)) : xstrdup(".");
        } else {
            return err_set(e, ERR_FORMAT, "%s: neither a model folder nor a .gguf file", given);
        }
    } else {
        const char *slash = strchr(given, '/');
        if (given[0] != '.' && (!slash || (slash != given && slash[1] && !strchr(slash + 1, '/'))))
            *out = hub_lookup(given);
        if (!*out)
            return err_set(
                e, ERR_NOTFOUND, "%s: no such folder or file%s", given,
                slash && given[0] != '/'
                    ? ", and no snapshot of this name in the hub cache (HF_HUB_CACHE, HF_HOME)"
                    : "");
    }
    return 0;
}

/* ---- tensors ------------------------------------------------------------------------------------
 */

static size_t slot_of(const ckpt *c, const char *name, size_t n)
{
    return (size_t)XXH3_64bits(name, n) & (c->n_hash - 1);
}

int ckpt__index(ckpt *c, err *e)
{
    c->n_hash = 16;
    while (c->n_hash < 2 * c->n_tensors + 1)
        c->n_hash *= 2;
    c->hash = arena_alloc(c->mem, sizeof *c->hash * c->n_hash);
    for (size_t i = 0; i < c->n_tensors; i++) {
        const char *name = c->tensors[i].name;
        size_t s = slot_of(c, name, strlen(name));
        for (; c->hash[s]; s = (s + 1) & (c->n_hash - 1))
            if (!strcmp(c->tensors[c->hash[s] - 1].name, name))
                return err_set(e, ERR_FORMAT, "tensor '%s' is in %s and in %s", name,
                               c->tensors[c->hash[s] - 1].path, c->tensors[i].path);
        c->hash[s] = (uint32_t)i + 1;
    }
    return 0;
}

const ckpt_tensor *ckpt_find(const ckpt *c, const char *name)
{
    if (!c->n_hash) return NULL;
    for (size_t s = slot_of(c, name, strlen(name)); c->hash[s]; s = (s + 1) & (c->n_hash - 1))
        if (!strcmp(c->tensors[c->hash[s] - 1].name, name)) return &c->tensors[c->hash[s] - 1];
    return NULL;
}

/* Length of the longest common prefix and suffix together: a cheap "looks like". */
static size_t likeness(const char *a, const char *b)
{
    size_t na = strlen(a), nb = strlen(b), p = 0, s = 0;
    while (p < na && p < nb && a[p] == b[p])
        p++;
    while (s < na - p && s < nb - p && a[na - 1 - s] == b[nb - 1 - s])
        s++;
    return p + s;
}

int ckpt_need(const ckpt *c, const char *name, const ckpt_tensor **out, err *e)
{
    *out = ckpt_find(c, name);
    if (*out) return 0;
    const char *near = "";
    size_t best = strlen(name) / 2;
    for (size_t i = 0; i < c->n_tensors; i++) {
        size_t k = likeness(name, c->tensors[i].name);
        if (k > best) best = k, near = c->tensors[i].name;
    }
    return err_set(
        e, ERR_MISSING,
        "%s: tensor '%s' is missing among %zu tensors%s%s%s; the checkpoint is incomplete", c->path,
        name, c->n_tensors, *near ? " (nearest name: '" : "", near, *near ? "')" : "");
}

static void take_file(ckpt *c, const st_file *f)
{
    for (size_t i = 0; i < f->n; i++) {
        const st_tensor *t = &f->tensors[i];
        ckpt_tensor *o = &c->tensors[c->n_tensors++];
        *o = (ckpt_tensor){.name = t->name,
                           .dtype = t->dtype,
                           .n_dims = t->n_dims,
                           .bytes = t->bytes,
                           .data = t->data,
                           .path = t->path};
        memcpy(o->shape, t->shape, sizeof t->shape);
    }
    c->file_bytes += f->map.size;
}

/* ---- shards -------------------------------------------------------------------------------------
 */

static int compare_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Distinct file names of weight_map, sorted; names with a folder in them are refused. */
static int shard_names(ckpt *c, const json *map, const char *where, char ***out, size_t *n, err *e)
{
    size_t total = (size_t)cJSON_GetArraySize(map), k = 0;
    char **names = arena_alloc(c->mem, sizeof *names * (total + 1));
    for (const json *v = map->child; v; v = v->next) {
        if (!cJSON_IsString(v) || strchr(v->valuestring, '/') || !*v->valuestring)
            return err_set(e, ERR_FORMAT, "%s: weight_map['%.100s'] is not a file name", where,
                           v->string);
        names[k++] = v->valuestring;
    }
    if (!k) return err_set(e, ERR_FORMAT, "%s: weight_map is empty", where);
    qsort(names, k, sizeof *names, compare_text);
    *n = 0;
    for (size_t i = 0; i < k; i++)
        if (!*n || strcmp(names[*n - 1], names[i])) names[(*n)++] = names[i];
    *out = names;
    return 0;
}

/* Is tensor i named by the map? Only asked when something is wrong, so a scan will do. */
static bool in_map(const ckpt *c, const json *map, size_t i)
{
    for (const json *v = map->child; v; v = v->next)
        if (!strcmp(v->string, c->tensors[i].name)) return true;
    return false;
}

/* Every name of the index must be in the file that the index says, and no file may hold more. */
static int check_index(const ckpt *c, const json *map, const char *where, err *e)
{
    for (const json *v = map->child; v; v = v->next) {
        const ckpt_tensor *t = ckpt_find(c, v->string);
        if (!t)
            return err_set(e, ERR_MISSING, "%s: tensor '%.200s' should be in %s, but is not there",
                           where, v->string, v->valuestring);
        if (strcmp(file_basename(t->path), v->valuestring))
            return err_set(e, ERR_FORMAT, "%s: tensor '%.200s' should be in %s, but is in %s",
                           where, v->string, v->valuestring, file_basename(t->path));
    }
    /* All names of the map are distinct tensors now, so a count tells whether there are others. */
    size_t named = (size_t)cJSON_GetArraySize(map);
    for (size_t i = 0; named < c->n_tensors && i < c->n_tensors; i++)
        if (!in_map(c, map, i))
            return err_set(e, ERR_FORMAT,
                           "%s: tensor '%.200s' is in %s but not in the index; the shards are not "
                           "of one write, fetch the checkpoint again",
                           where, c->tensors[i].name, c->tensors[i].path);
    return 0;
}

static int open_files(ckpt *c, char *const *names, size_t n, err *e)
{
    size_t total = 0;
    c->files = arena_alloc(c->mem, sizeof *c->files * (n + 1));
    for (size_t i = 0; i < n; i++) {
        char *path = file_join(c->path, names[i]);
        int rc = file_exists(path)
                     ? st_open(&c->files[c->n_files], path, e)
                     : err_set(e, ERR_MISSING,
                               "%s: named by model.safetensors.index.json, but not there; fetch "
                               "the missing shard",
                               path);
        free(path);
        if (rc < 0) return rc;
        total += c->files[c->n_files++].n;
    }
    c->tensors = arena_alloc(c->mem, sizeof *c->tensors * (total + 1));
    for (size_t i = 0; i < n; i++)
        take_file(c, &c->files[i]);
    return ckpt__index(c, e);
}

/* Names of all .safetensors in the folder when there is no index. */
static int loose_files(ckpt *c, err *e)
{
    char **names = NULL, *weights[1] = {NULL};
    size_t n = 0, k = 0;
    int rc = file_list(c->path, &names, &n, e);
    for (size_t i = 0; rc == 0 && i < n; i++)
        if (ends_with(names[i], ".safetensors")) {
            if (!strcmp(names[i], "model.safetensors")) weights[0] = names[i];
            if (k++ == 0 && !weights[0]) weights[0] = names[i];
        }
    if (rc == 0 && !k)
        rc = err_set(e, ERR_MISSING,
                     "%s: no .safetensors file and no model.safetensors.index.json here", c->path);
    else if (rc == 0 && k > 1 && strcmp(weights[0], "model.safetensors"))
        rc = err_set(e, ERR_MISSING,
                     "%s: %zu .safetensors files but no model.safetensors.index.json that says "
                     "what is in which",
                     c->path, k);
    else if (rc == 0)
        rc = open_files(c, weights, 1, e);
    file_list_free(names, n);
    return rc;
}

static int read_index(ckpt *c, const char *index, char ***names, size_t *n, err *e)
{
    int rc = json_parse_file(&c->index_json, index, e);
    if (rc < 0) return rc;
    const json *map = json_get(c->index_json, "weight_map");
    if (!cJSON_IsObject(map)) return err_set(e, ERR_FORMAT, "%s: no weight_map object", index);
    return shard_names(c, map, index, names, n, e);
}

static int open_weights(ckpt *c, err *e)
{
    int rc = 0;
    char *index = file_join(c->path, "model.safetensors.index.json"), **names = NULL;
    size_t n = 0;
    if (!file_exists(index)) {
        rc = loose_files(c, e);
        goto out;
    }
    TRY(read_index(c, index, &names, &n, e));
    TRY(open_files(c, names, n, e));
    TRY(check_index(c, json_get(c->index_json, "weight_map"), index, e));
out:
    free(index);
    return rc;
}

/* Python writes Infinity and NaN, which JSON does not have. Both become 1e999, which reads as
 * infinity: the getters refuse it for a key that counts, and no others are looked at. */
static void plain_numbers(buf *b)
{
    static const char *const words[] = {"Infinity", "NaN"};
    buf out = {0};
    bool in = false;
    for (size_t i = 0; i < b->len;) {
        char ch = b->data[i];
        size_t n = 0;
        for (size_t k = 0; !in && !n && k < sizeof words / sizeof *words; k++) {
            size_t m = strlen(words[k]);
            if (b->len - i >= m && !memcmp(b->data + i, words[k], m)) n = m;
        }
        if (n) {
            buf_puts(&out, "1e999");
            i += n;
            continue;
        }
        if (in && ch == '\\' && i + 1 < b->len)
            buf_putc(&out, b->data[i++]);
        else if (ch == '"')
            in = !in;
        buf_putc(&out, b->data[i++]);
    }
    buf_free(b);
    *b = out;
}

static int read_config(json **out, const char *path, err *e)
{
    buf b = {0};
    int rc = file_read_all(&b, path, (size_t)64 << 20, e);
    if (rc == 0) {
        plain_numbers(&b);
        rc = json_parse(out, b.data, b.len, path, e);
    }
    buf_free(&b);
    return rc;
}

/* A file of this checkpoint; xmalloc. */
static char *path_of(const ckpt *c, const char *name)
{
    return xasprintf("%s/%s%s", c->path, c->prefix ? c->prefix : "", name);
}

static int open_config(ckpt *c, err *e)
{
    int rc = 0;
    char *cfg = path_of(c, "config.json"), *gen = path_of(c, "generation_config.json");
    if (!file_exists(cfg)) {
        rc = err_set(e, ERR_MISSING,
                     "%s: no config.json here; a model folder or a .gguf file is needed", c->path);
        goto out;
    }
    TRY(read_config(&c->config_json, cfg, e));
    if (file_exists(gen)) TRY(read_config(&c->gen_json, gen, e));
    TRY(config_parse(&c->cfg, c->config_json, c->gen_json, cfg, e));
    c->cfg_ok = true;
    const json *origin = json_get(c->config_json, "tare_origin");
    if (origin) {
        char *text = cJSON_IsString(origin) ? NULL : cJSON_PrintUnformatted(origin);
        c->origin = arena_strdup(c->mem, text                     ? text
                                         : cJSON_IsString(origin) ? origin->valuestring
                                                                  : "");
        cJSON_free(text);
    }
out:
    free(cfg);
    free(gen);
    return rc;
}

/* ---- public -------------------------------------------------------------------------------------
 */

int ckpt_open(ckpt **out, const char *path_or_name, err *e)
{
    int rc = 0;
    ckpt *c = xcalloc(1, sizeof *c);
    c->mem = arena_make();
    *out = NULL;
    TRY(resolve(path_or_name, &c->path, e));
    if (!file_is_dir(c->path)) {
        c->is_gguf = true;
        TRY(ckpt__open_gguf(c, c->path, e));
        c->cfg_ok = true;
    } else {
        TRY(open_config(c, e));
        TRY(open_weights(c, e));
    }
    *out = c;
    c = NULL;
out:
    ckpt_close(c);
    return rc;
}

/* Are there weights in the folder, whole or in part? */
static bool any_weights(const ckpt *c)
{
    char **names = NULL;
    size_t n = 0;
    bool found = false;
    if (file_list(c->path, &names, &n, NULL) < 0) return false;
    for (size_t i = 0; i < n; i++)
        found = found || ends_with(names[i], ".safetensors");
    file_list_free(names, n);
    return found;
}

/* ANY_config.json is a config without weights. */
static void take_prefix(ckpt *c, const char *given)
{
    const char *name = file_basename(given);
    size_t n = strlen(name), tail = strlen("config.json");
    if (file_is_dir(given) || !ends_with(name, "_config.json") ||
        !strcmp(name, "generation_config.json") || ends_with(name, "quant_config.json"))
        return;
    c->prefix = xstrndup(name, n - tail);
}

int ckpt_open_config(ckpt **out, const char *path_or_name, err *e)
{
    int rc = 0;
    ckpt *c = xcalloc(1, sizeof *c);
    c->mem = arena_make();
    *out = NULL;
    TRY(resolve(path_or_name, &c->path, e));
    take_prefix(c, path_or_name);
    if (!c->prefix && (!file_is_dir(c->path) || any_weights(c))) {
        ckpt_close(c);
        return ckpt_open(out, path_or_name, e);
    }
    TRY(open_config(c, e));
    char *index = ckpt_side_file(c, "model.safetensors.index.json"), **names;
    size_t n;
    if (index) rc = read_index(c, index, &names, &n, e);
    free(index);
    if (rc < 0) goto out;
    *out = c;
    c = NULL;
    rc = 0;
out:
    ckpt_close(c);
    return rc;
}

int ckpt_open_shape(ckpt **out, const char *name, const char *config, err *e)
{
    int rc = 0;
    ckpt *c = xcalloc(1, sizeof *c);
    c->mem = arena_make();
    c->path = xasprintf("shape %s", name);
    *out = NULL;
    TRY(json_parse(&c->config_json, config, strlen(config), c->path, e));
    TRY(config_parse(&c->cfg, c->config_json, NULL, c->path, e));
    c->cfg_ok = true;
    *out = c;
    c = NULL;
out:
    ckpt_close(c);
    return rc;
}

bool ckpt_has_weights(const ckpt *c)
{
    return c->is_gguf || c->n_files;
}

const json *ckpt_index(const ckpt *c)
{
    const json *map = json_get(c->index_json, "weight_map");
    return cJSON_IsObject(map) ? map : NULL;
}

void ckpt_close(ckpt *c)
{
    if (!c) return;
    for (size_t i = 0; i < c->n_files; i++)
        st_close(&c->files[i]);
    if (c->cfg_ok) config_free(&c->cfg);
    if (c->is_gguf) gguf_close(&c->gguf);
    json_drop(c->config_json);
    json_drop(c->gen_json);
    json_drop(c->index_json);
    arena_drop(c->mem);
    free(c->prefix);
    free(c->path);
    free(c);
}

const char *ckpt_path(const ckpt *c)
{
    return c->path;
}
bool ckpt_is_gguf(const ckpt *c)
{
    return c->is_gguf;
}
const char *ckpt_gguf_types(const ckpt *c)
{
    return c->gguf_text ? c->gguf_text : "";
}
ckpt_config *ckpt_cfg(ckpt *c)
{
    return &c->cfg;
}
size_t ckpt_n_tensors(const ckpt *c)
{
    return c->n_tensors;
}
const ckpt_tensor *ckpt_tensor_at(const ckpt *c, size_t i)
{
    return &c->tensors[i];
}
uint64_t ckpt_file_bytes(const ckpt *c)
{
    return c->file_bytes;
}
const char *ckpt_origin(const ckpt *c)
{
    return c->origin;
}

void ckpt_origin_words(const ckpt *c, buf *out)
{
    json *j = NULL;
    if (ckpt_is_gguf(c)) {
        buf_printf(out, "GGUF %s", ckpt_gguf_types(c));
        return;
    }
    if (!c->origin) return;
    if (json_parse(&j, c->origin, strlen(c->origin), "origin", NULL) < 0 || !cJSON_IsObject(j)) {
        buf_puts(out, c->origin);
        json_drop(j);
        return;
    }
    const json *types = json_get(j, "gguf_types"), *file = json_get(j, "file");
    if (cJSON_IsString(types) && cJSON_IsString(file)) {
        buf_printf(out, "GGUF %s (%s)", types->valuestring, file->valuestring);
    } else {
        for (const json *x = j->child; x; x = x->next)
            if (cJSON_IsString(x))
                buf_printf(out, "%s%s %s", out->len ? ", " : "", x->string, x->valuestring);
    }
    json_drop(j);
}

/* Row of the file that holds row r of the HF tensor: llama's q and k are stored with the two halves
 * of each head interleaved, row h*D + 2*i + half in the file is row h*D + half*D/2 + i of the HF
 * tensor. */
static int64_t stored_row(const ckpt_tensor *t, int64_t r)
{
    if (!t->permute_heads) return r;
    int64_t D = t->shape[0] / t->permute_heads, h = r / D, in = r % D;
    return h * D + in % (D / 2) * 2 + in / (D / 2);
}

static void decode(const ckpt_tensor *t, const uint8_t *src, size_t n, float *out)
{
    if (t->gguf)
        t->gguf->decode(src, n, out);
    else
        num_decode_row(t->dtype, src, n, out);
}

void ckpt_rows_of(const ckpt_tensor *t, int64_t *rows, int64_t *cols)
{
    *rows = 1;
    for (int i = 0; i + 1 < t->n_dims; i++)
        *rows *= t->shape[i];
    *cols = t->n_dims ? t->shape[t->n_dims - 1] : 1;
}

int ckpt_load_rows(const ckpt *c, const ckpt_tensor *t, int64_t r0, int64_t r1, float *out, err *e)
{
    int64_t rows, K;
    ckpt_rows_of(t, &rows, &K);
    if (r0 < 0 || r1 > rows || r0 > r1)
        return err_set(e, ERR_SHAPE, "%s: tensor '%s': rows %lld to %lld of %lld", c->path, t->name,
                       (long long)r0, (long long)r1, (long long)rows);
    bool plain = !t->gguf && (t->dtype == NUM_F32 || t->dtype == NUM_F16 || t->dtype == NUM_BF16 ||
                              t->dtype == NUM_F64);
    if (!t->gguf && !plain)
        return err_set(e, ERR_DTYPE, "%s: tensor '%s' is %s, a plain float tensor is needed",
                       c->path, t->name,
                       t->dtype == NUM_NONE ? "of unknown type" : num_infos[t->dtype].name);
    size_t stride = t->gguf ? (size_t)(K / t->gguf->block) * (size_t)t->gguf->bytes
                            : num_bytes(t->dtype, (size_t)K);
    if (t->n_dims == 1 && t->permute_heads) {
        if (r0 == r1) return 0;
        float *tmp = NULL;
        int rc = mem_alloc((void **)&tmp, (size_t)K * sizeof *tmp, e);
        if (rc < 0) return rc;
        decode(t, t->data, (size_t)K, tmp);
        for (int64_t i = 0; i < K; i++)
            out[i] = tmp[stored_row(t, i)];
        mem_free(tmp);
        return 0;
    }
    for (int64_t r = r0; r < r1; r++) {
        const uint8_t *src = t->data + (size_t)stored_row(t, r) * stride;
        float *dst = out + (size_t)(r - r0) * (size_t)K;
        decode(t, src, (size_t)K, dst);
    }
    return 0;
}

void ckpt_dontneed(const ckpt *c, const ckpt_tensor *t)
{
    const file_map *m = c->is_gguf && c->gguf.map.path == t->path ? &c->gguf.map : NULL;
    for (int i = 0; !m && i < c->gguf.n_more; i++)
        if (c->gguf.more[i].map.path == t->path) m = &c->gguf.more[i].map;
    for (size_t i = 0; !m && i < c->n_files; i++)
        if (c->files[i].map.path == t->path) m = &c->files[i].map;
    if (m && t->data) file_map_dontneed(m, (size_t)(t->data - m->data), (size_t)t->bytes);
}

char *ckpt_side_file(const ckpt *c, const char *name)
{
    if (c->is_gguf) return NULL;
    char *p = path_of(c, name);
    if (file_exists(p)) return p;
    free(p);
    return NULL;
}

static int side_text(const ckpt *c, const char *name, buf *out, err *e)
{
    char *p = ckpt_side_file(c, name);
    int rc = p ? file_read_all(out, p, (size_t)256 << 20, e) : 0;
    free(p);
    return rc;
}

/* tokenizer.json wins over a SentencePiece model: it may hold what was changed since. */
static const char *tokenizer_name(const ckpt *c)
{
    static const char *const names[] = {"tokenizer.json", "tokenizer.model", "spiece.model",
                                        "sentencepiece.bpe.model"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *p = ckpt_side_file(c, names[i]);
        free(p);
        if (p) return names[i];
    }
    return names[0];
}

int ckpt_tokenizer_json(const ckpt *c, buf *out, err *e)
{
    return c->is_gguf ? ckpt__gguf_tokenizer(c, out, e) : side_text(c, tokenizer_name(c), out, e);
}

char *ckpt_tokenizer_where(const ckpt *c)
{
    return c->is_gguf ? xstrdup(ckpt_path(c)) : file_join(ckpt_path(c), tokenizer_name(c));
}

int ckpt_tokenizer_config(const ckpt *c, buf *out, err *e)
{
    return c->is_gguf ? ckpt__gguf_tokenizer_config(c, out, e)
                      : side_text(c, "tokenizer_config.json", out, e);
}

/* ---- chat templates ---- */

/* A template among named ones; *any says that there are some, under whatever names. */
static void pick_named(const json *t, const char *name, bool *any, buf *out)
{
    bool list = cJSON_IsArray(t);
    if (cJSON_IsString(t)) {
        *any = true;
        if (!strcmp(name, "default")) buf_puts(out, t->valuestring);
    }
    for (const json *v = list || cJSON_IsObject(t) ? t->child : NULL; v; v = v->next) {
        const json *key = list ? json_get(v, "name") : NULL,
                   *text = list ? json_get(v, "template") : v;
        const char *is = list ? (cJSON_IsString(key) ? key->valuestring : "") : v->string;
        if (!cJSON_IsString(text)) continue;
        *any = true;
        if (!strcmp(is, name)) {
            buf_clear(out);
            buf_puts(out, text->valuestring);
        }
    }
}

static int from_json(const ckpt *c, const char *file, const char *name, bool *any, buf *out, err *e)
{
    char *p = ckpt_side_file(c, file);
    json *j = NULL;
    int rc = p ? json_parse_file(&j, p, e) : 0;
    free(p);
    if (rc >= 0) pick_named(json_get(j, "chat_template"), name, any, out);
    json_drop(j);
    return rc;
}

/* chat_template.jinja is "default", additional_chat_templates/NAME.jinja are the others. */
static int from_files(const ckpt *c, const char *name, bool *any, buf *out, err *e)
{
    char *dir = file_join(ckpt_path(c), "additional_chat_templates"), **names = NULL;
    char *wanted = xasprintf("additional_chat_templates/%s.jinja", name);
    size_t n = 0;
    int rc = side_text(c, "chat_template.jinja", out, e);
    bool is_default = !strcmp(name, "default");
    *any = out->len > 0;
    if (!is_default) buf_clear(out);
    if (rc >= 0 && file_is_dir(dir)) rc = file_list(dir, &names, &n, e);
    for (size_t i = 0; i < n; i++) {
        size_t k = strlen(names[i]);
        *any = *any || (k > 6 && !strcmp(names[i] + k - 6, ".jinja"));
    }
    if (rc >= 0 && *any && !out->len) rc = side_text(c, wanted, out, e);
    file_list_free(names, n);
    free(dir);
    free(wanted);
    return rc;
}

int ckpt_chat_template_named(const ckpt *c, const char *name, buf *out, err *e)
{
    bool any = false;
    bool is_default = !strcmp(name, "default");
    if (c->is_gguf) return is_default ? ckpt__gguf_template(c, out, e) : 0;
    int rc = from_files(c, name, &any, out, e);
    if (rc >= 0 && !any) rc = from_json(c, "tokenizer_config.json", name, &any, out, e);
    if (rc >= 0 && !any) rc = from_json(c, "chat_template.json", name, &any, out, e);
    if (rc >= 0 && any && is_default && !out->len)
        buf_puts(out, "{{ raise_exception('this model has several chat templates and none is named "
                      "default; choose one with --chat-template FILE') }}");
    return rc;
}

int ckpt_chat_template(const ckpt *c, buf *out, err *e)
{
    return ckpt_chat_template_named(c, "default", out, e);
}
