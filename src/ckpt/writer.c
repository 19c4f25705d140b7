/* Writer of a model directory.
 *
 * Everything goes to OUT.tmp-<pid>, a folder beside OUT, and is renamed to OUT by publish, so OUT
 * is there whole or not at all. Temporary folders of processes that no longer live are removed at
 * open. A shard's header must come before its data, but sizes are known only as tensors arrive:
 * data is spooled to shard-N.data, one for each shard, and copied behind the header at finish,
 * where the number of shards, which is part of their names, is known. A spool is removed once its
 * shard is written, so the folder needs one shard more than the output's size. */
#include "ckpt/ckpt_internal.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct entry {
    char *name;
    num_dtype type;
    int n_dims;
    int64_t shape[ST_MAX_DIMS];
    uint64_t bytes;
    int shard;
} entry;

struct ckpt_writer {
    char *dir, *tmp;
    arena *mem;
    bool overwrite;
    uint64_t max_shard, shard_bytes, total;
    entry *entries;
    size_t n, cap;
    int n_shards;
    file_out *spool;
    uint64_t pending; /* bytes still missing of the tensor begun */
};

/* OUT.tmp-<pid> folders whose process is gone. */
static void sweep(const char *dir)
{
    char *parent = xstrdup(dir), *slash = strrchr(parent, '/');
    const char *base = file_basename(dir);
    char **names = NULL;
    size_t n = 0, k = strlen(base);
    if (slash) *slash = 0;
    const char *where = !slash ? "." : *parent ? parent : "/";
    if (file_list(where, &names, &n, NULL) == 0)
        for (size_t i = 0; i < n; i++) {
            if (strncmp(names[i], base, k) || strncmp(names[i] + k, ".tmp-", 5)) continue;
            char *end = NULL;
            long pid = strtol(names[i] + k + 5, &end, 10);
            if (pid <= 0 || (*end && strcmp(end, ".old")) ||
                (kill((pid_t)pid, 0) == 0 || errno != ESRCH))
                continue;
            char *path = file_join(where, names[i]);
            file_remove_tree(path, NULL);
            free(path);
        }
    file_list_free(names, n);
    free(parent);
}

static bool empty_dir(const char *path)
{
    char **names = NULL;
    size_t n = 1;
    bool ok = file_is_dir(path) && file_list(path, &names, &n, NULL) == 0 && n == 0;
    file_list_free(names, n);
    return ok;
}

int ckpt_writer_open(ckpt_writer **out, const char *dir, uint64_t max_shard_bytes, bool overwrite,
                     err *e)
{
    *out = NULL;
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/')
        n--;
    if (!n) return err_set(e, ERR_USAGE, "the output folder's name is empty");
    char *d = xstrndup(dir, n);
    int rc = 0;
    if (file_exists(d) && !empty_dir(d) && !overwrite)
        rc = err_set(e, ERR_EXISTS, "%s: exists already; give another folder or --overwrite", d);
    else if (overwrite && file_exists(d) && !empty_dir(d)) {
        /* Only something that looks like a model may be replaced. */
        char *cfg = file_join(d, "config.json");
        if (!file_exists(cfg))
            rc = err_set(
                e, ERR_EXISTS,
                "%s: is not a model folder (no config.json), so --overwrite does not replace it",
                d);
        free(cfg);
    }
    if (rc < 0) {
        free(d);
        return rc;
    }
    sweep(d);
    char *tmp = xasprintf("%s.tmp-%ld", d, (long)getpid());
    file_remove_tree(tmp, NULL);
    rc = file_mkdirs(tmp, e);
    if (rc < 0) {
        free(d);
        free(tmp);
        return rc;
    }
    ckpt_writer *w = xcalloc(1, sizeof *w);
    *w = (ckpt_writer){.dir = d,
                       .tmp = tmp,
                       .mem = arena_make(),
                       .overwrite = overwrite,
                       .max_shard = max_shard_bytes ? max_shard_bytes : 5000000000u};
    *out = w;
    return 0;
}

const char *ckpt_writer_dir(const ckpt_writer *w)
{
    return w->tmp;
}

static char *spool_path(const ckpt_writer *w, int shard)
{
    return xasprintf("%s/shard-%d.data", w->tmp, shard);
}

static int begin_shard(ckpt_writer *w, err *e)
{
    char *p = spool_path(w, w->n_shards);
    int rc = file_out_open(&w->spool, p, e);
    free(p);
    if (rc == 0) w->n_shards++, w->shard_bytes = 0;
    return rc;
}

static int end_shard(ckpt_writer *w, err *e)
{
    return w->spool ? file_out_commit(&w->spool, e) : 0;
}

int ckpt_writer_begin(ckpt_writer *w, const char *name, num_dtype t, int n_dims,
                      const int64_t *shape, err *e)
{
    size_t bytes = (size_t)num_infos[t].bits / 8;
    if (w->pending)
        return err_set(e, ERR_BADSTATE,
                       "%s: tensor '%s' begun before the one before it was complete", w->dir, name);
    if (!*num_infos[t].tag || n_dims < 0 || n_dims > ST_MAX_DIMS)
        return err_set(e, ERR_DTYPE, "%s: tensor '%s': %s in %d dimensions cannot be written",
                       w->dir, name, num_infos[t].name, n_dims);
    for (int i = 0; i < n_dims; i++)
        if (shape[i] < 0 || !mem_mul(bytes, (size_t)shape[i], &bytes))
            return err_set(e, ERR_SHAPE, "%s: tensor '%s': shape is too large", w->dir, name);
    int rc = 0;
    if (w->spool && w->shard_bytes && w->shard_bytes + bytes > w->max_shard) rc = end_shard(w, e);
    if (rc == 0 && !w->spool) rc = begin_shard(w, e);
    if (rc < 0) return rc;
    if (w->n == w->cap)
        w->entries = xrealloc(w->entries, sizeof *w->entries * (w->cap = w->cap ? 2 * w->cap : 64));
    entry *x = &w->entries[w->n++];
    *x = (entry){.name = arena_strdup(w->mem, name),
                 .type = t,
                 .n_dims = n_dims,
                 .bytes = bytes,
                 .shard = w->n_shards - 1};
    if (n_dims) memcpy(x->shape, shape, sizeof *shape * (size_t)n_dims);
    w->shard_bytes += bytes;
    w->total += bytes;
    w->pending = bytes;
    return 0;
}

int ckpt_writer_data(ckpt_writer *w, const void *p, size_t n, err *e)
{
    if (n > w->pending)
        return err_set(e, ERR_BADSTATE, "%s: more data than tensor '%s' has", w->dir,
                       w->n ? w->entries[w->n - 1].name : "?");
    w->pending -= n;
    return file_out_write(w->spool, p, n, e);
}

int ckpt_writer_tensor(ckpt_writer *w, const char *name, num_dtype t, int n_dims,
                       const int64_t *shape, const void *data, err *e)
{
    int rc = ckpt_writer_begin(w, name, t, n_dims, shape, e);
    return rc < 0 ? rc : ckpt_writer_data(w, data, (size_t)w->pending, e);
}

int ckpt_writer_file(ckpt_writer *w, const char *name, const void *data, size_t n, err *e)
{
    char *p = file_join(w->tmp, name);
    int rc = file_write_atomic(p, data, n, e);
    free(p);
    return rc;
}

/* ---- side files ---------------------------------------------------------------------------------
 */

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), k = strlen(tail);
    return n >= k && !strcmp(s + n - k, tail);
}

/* Weights in any form, indexes, the config (rewritten), and what other quantizers leave behind. */
static bool is_side_file(const char *name)
{
    static const char *const no[] = {"config.json",
                                     "hf_quant_config.json",
                                     "quantize_config.json",
                                     "quant_config.json",
                                     "quant_model_description.json",
                                     "recipe.yaml",
                                     "quantization_config.json"};
    static const char *const tails[] = {".safetensors", ".safetensors.index.json",
                                        ".bin",         ".bin.index.json",
                                        ".pt",          ".pth",
                                        ".ckpt",        ".gguf",
                                        ".h5",          ".msgpack",
                                        ".onnx",        ".data"};
    for (size_t i = 0; i < sizeof no / sizeof *no; i++)
        if (!strcmp(name, no[i])) return false;
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++)
        if (ends_with(name, tails[i])) return false;
    return strcmp(name, ".git") && !strstr(name, ".tmp-");
}

static int copy_tree(const char *from, const char *to, int *count, err *e)
{
    char **names = NULL;
    size_t n = 0;
    int rc = file_list(from, &names, &n, e);
    for (size_t i = 0; rc == 0 && i < n; i++) {
        if (!is_side_file(names[i])) continue;
        char *a = file_join(from, names[i]), *b = file_join(to, names[i]);
        if (file_is_dir(a)) {
            rc = file_mkdirs(b, e);
            if (rc == 0) rc = copy_tree(a, b, count, e);
            if (rc == 0) rmdir(b); /* a folder that held only weights stays away */
        } else {
            rc = file_copy_atomic(a, b, e);
            if (rc == 0) ++*count;
        }
        free(a);
        free(b);
    }
    file_list_free(names, n);
    return rc;
}

/* What a folder would hold beside the weights, made from a GGUF. */
static int gguf_side_files(ckpt_writer *w, const ckpt *src, err *e)
{
    static const struct {
        const char *name;
        int (*make)(const ckpt *, buf *, err *);
    } files[] = {{"tokenizer.json", ckpt_tokenizer_json},
                 {"tokenizer_config.json", ckpt_tokenizer_config},
                 {"generation_config.json", ckpt__gguf_generation_config},
                 {"chat_template.jinja", ckpt_chat_template}};
    int n = 0, rc = 0;
    buf b = {0};
    for (size_t i = 0; rc >= 0 && i < sizeof files / sizeof *files; i++) {
        buf_clear(&b);
        rc = files[i].make(src, &b, e);
        if (rc >= 0 && b.len) {
            rc = ckpt_writer_file(w, files[i].name, b.data, b.len, e);
            n++;
        }
    }
    buf_free(&b);
    return rc < 0 ? rc : n;
}

int ckpt_writer_side_files(ckpt_writer *w, const ckpt *src, err *e)
{
    int n = 0;
    if (ckpt_is_gguf(src)) return gguf_side_files(w, src, e);
    int rc = copy_tree(ckpt_path(src), w->tmp, &n, e);
    return rc < 0 ? rc : n;
}

/* ---- finish -------------------------------------------------------------------------------------
 */

static char *shard_name(const ckpt_writer *w, int shard)
{
    return w->n_shards == 1 ? xstrdup("model.safetensors")
                            : xasprintf("model-%05d-of-%05d.safetensors", shard + 1, w->n_shards);
}

/* Header and spooled data of one shard into its final file. */
static int write_shard(ckpt_writer *w, int shard, err *e)
{
    int rc = 0;
    st_writer *s = NULL;
    file_map m = {0};
    char *name = shard_name(w, shard), *path = file_join(w->tmp, name),
         *spool = spool_path(w, shard);
    TRY(st_writer_open(&s, path, e));
    for (size_t i = 0; i < w->n; i++)
        if (w->entries[i].shard == shard)
            TRY(st_writer_declare(s, w->entries[i].name, w->entries[i].type, w->entries[i].n_dims,
                                  w->entries[i].shape, e));
    TRY(st_writer_begin(s, e));
    TRY(file_map_open(&m, spool, e));
    for (size_t at = 0; at < m.size; at += (size_t)64 << 20) {
        size_t n = m.size - at < (size_t)64 << 20 ? m.size - at : (size_t)64 << 20;
        TRY(st_writer_data(s, m.data + at, n, e));
        file_map_dontneed(&m, at, n);
    }
    TRY(st_writer_commit(&s, e));
    unlink(spool);
out:
    file_map_close(&m);
    st_writer_abort(&s);
    free(name);
    free(path);
    free(spool);
    return rc;
}

static int write_index(ckpt_writer *w, err *e)
{
    buf b = {0};
    jw j;
    jw_init(&j, &b, 2);
    jw_obj(&j);
    jw_key(&j, "metadata");
    jw_obj(&j);
    jw_ki64(&j, "total_size", (int64_t)w->total);
    jw_end_obj(&j);
    jw_key(&j, "weight_map");
    jw_obj(&j);
    for (size_t i = 0; i < w->n; i++) {
        char *name = shard_name(w, w->entries[i].shard);
        jw_kstr(&j, w->entries[i].name, name);
        free(name);
    }
    jw_end_obj(&j);
    jw_end_obj(&j);
    buf_putc(&b, '\n');
    int rc = ckpt_writer_file(w, "model.safetensors.index.json", b.data, b.len, e);
    buf_free(&b);
    return rc;
}

int ckpt_writer_finish(ckpt_writer *w, const char *config_json, err *e)
{
    int rc = 0;
    if (w->pending) return err_set(e, ERR_BADSTATE, "%s: the last tensor is incomplete", w->dir);
    if (!w->n) return err_set(e, ERR_BADSTATE, "%s: no tensor was written", w->dir);
    TRY(end_shard(w, e));
    for (int s = 0; s < w->n_shards; s++)
        TRY(write_shard(w, s, e));
    if (w->n_shards > 1) TRY(write_index(w, e));
    TRY(ckpt_writer_file(w, "config.json", config_json, strlen(config_json), e));
out:
    return rc;
}

static void sync_dir(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    fsync(fd);
    close(fd);
}

static void sync_parent(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *parent = slash ? xstrndup(path, (size_t)(slash - path) + 1) : xstrdup(".");
    sync_dir(parent);
    free(parent);
}

static void drop(ckpt_writer *w)
{
    arena_drop(w->mem);
    free(w->entries);
    free(w->dir);
    free(w->tmp);
    free(w);
}

int ckpt_writer_publish(ckpt_writer **wp, err *e)
{
    ckpt_writer *w = *wp;
    int rc = 0;
    char *old = NULL;
    sync_dir(w->tmp);
    if (w->overwrite && file_exists(w->dir)) {
        old = xasprintf("%s.old", w->tmp);
        if (rename(w->dir, old) < 0) rc = err_errno(e, errno, "%s: cannot be moved away", w->dir);
    }
    if (rc == 0 && rename(w->tmp, w->dir) < 0) {
        rc = err_errno(e, errno, "%s: cannot be put in place", w->dir);
        if (old && rename(old, w->dir) < 0)
            rc = err_set(e, ERR_IO, "%s: could be neither replaced nor restored; the old one is %s",
                         w->dir, old);
    }
    if (rc == 0) sync_parent(w->dir);
    if (rc == 0 && old) file_remove_tree(old, NULL);
    free(old);
    if (rc < 0) {
        ckpt_writer_abort(wp);
        return rc;
    }
    drop(w);
    *wp = NULL;
    return 0;
}

void ckpt_writer_abort(ckpt_writer **wp)
{
    ckpt_writer *w = *wp;
    if (!w) return;
    file_out_abort(&w->spool);
    file_remove_tree(w->tmp, NULL);
    drop(w);
    *wp = NULL;
}
