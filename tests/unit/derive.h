/* A model folder made from another: every file linked, some replaced, tensors patched. */
#ifndef TESTS_DERIVE_H
#define TESTS_DERIVE_H
#include <unistd.h>
#include "base/file.h"
#include "ckpt/safetensors.h"

/* dir: a template for mkdtemp, "/tmp/tare_x_XXXXXX". */
static inline void derive(char *dir, const char *src)
{
    err e = {0};
    char **names, cwd[512];
    size_t n;
    assert_non_null(mkdtemp(dir));
    assert_non_null(getcwd(cwd, sizeof cwd));
    CHECK_OK(file_list(src, &names, &n, &e));
    for (size_t i = 0; i < n; i++) {
        char *from = xasprintf("%s/%s/%s", cwd, src, names[i]), *to = file_join(dir, names[i]);
        assert_int_equal(symlink(from, to), 0);
        free(from);
        free(to);
    }
    file_list_free(names, n);
}

static inline void derive_file(const char *dir, const char *name, const char *text)
{
    err e = {0};
    char *path = file_join(dir, name);
    unlink(path);
    CHECK_OK(file_write_atomic(path, text, strlen(text), &e));
    free(path);
}

/* Replaces the first occurrence of `from` in a file by `to`. */
static inline void derive_edit(const char *dir, const char *name, const char *from, const char *to)
{
    err e = {0};
    buf b = {0}, out = {0};
    char *path = file_join(dir, name);
    CHECK_OK(file_read_all(&b, path, 1 << 26, &e));
    char *at = strstr(b.data, from);
    if (!at) fail_msg("%s has no '%s'", name, from);
    buf_add(&out, b.data, (size_t)(at - b.data));
    buf_puts(&out, to);
    buf_puts(&out, at + strlen(from));
    derive_file(dir, name, out.data);
    buf_free(&b);
    buf_free(&out);
    free(path);
}

typedef void derive_fn(const char *name, uint8_t *data, uint64_t bytes, void *arg);
/* Rewrites model.safetensors: fn may change the data of each tensor in place; a tensor called
 * `drop` is left out; one called `add` is a copy of `add_from`, changed by fn too. */
static inline void derive_tensors(const char *dir, derive_fn *fn, void *arg, const char *drop,
                                  const char *add, const char *add_from)
{
    err e = {0};
    st_file f = {0};
    st_writer *w;
    char *path = file_join(dir, "model.safetensors"), *fresh = file_join(dir, "fresh");
    CHECK_OK(st_open(&f, path, &e));
    CHECK_OK(st_writer_open(&w, fresh, &e));
    for (int pass = 0; pass < 2; pass++) {
        if (pass) CHECK_OK(st_writer_begin(w, &e));
        for (size_t i = 0; i < f.n; i++)
            for (int copy = 0; copy < 2; copy++) {
                const st_tensor *t = &f.tensors[i];
                const char *name = copy ? add : t->name;
                if ((copy && (!add || strcmp(t->name, add_from))) ||
                    (!copy && drop && !strcmp(t->name, drop)))
                    continue;
                if (!pass) {
                    CHECK_OK(st_writer_declare(w, name, t->dtype, t->n_dims, t->shape, &e));
                    continue;
                }
                uint8_t *data = xmalloc(t->bytes);
                memcpy(data, t->data, t->bytes);
                if (fn) fn(name, data, t->bytes, arg);
                CHECK_OK(st_writer_data(w, data, t->bytes, &e));
                free(data);
            }
    }
    CHECK_OK(st_writer_commit(&w, &e));
    st_close(&f);
    unlink(path);
    assert_int_equal(rename(fresh, path), 0);
    free(path);
    free(fresh);
}

static inline void derive_remove(const char *dir)
{
    err e = {0};
    CHECK_OK(file_remove_tree(dir, &e));
}
#endif
