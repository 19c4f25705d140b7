/* Files: maps, whole reads, atomic writes, folders, SHA-256.
 *
 * Invariant: a name that this file gives to an output has either its old content or all of the new.
 * An output grows under NAME.tmp-PID-SERIAL in the same folder (rename does not cross file
 * systems), is flushed, renamed, and the folder is flushed. Any failure removes the temporary; only
 * a killed process can leave one, never a broken output. Maps refuse what is not a regular file. */
#include "base/file.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

int file_map_open(file_map *m, const char *path, err *e)
{
    *m = (file_map){0};
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC), rc = 0;
    if (fd < 0) return err_errno(e, errno, "%s", path);
    if (fstat(fd, &st) < 0) {
        rc = err_errno(e, errno, "%s", path);
    } else if (!S_ISREG(st.st_mode)) {
        rc = err_set(e, ERR_FORMAT, "%s: not a regular file", path);
    } else if (st.st_size > 0) {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED)
            rc = err_errno(e, errno, "%s: cannot be mapped", path);
        else
            m->data = p, m->size = (size_t)st.st_size;
    }
    close(fd);
    if (rc == 0) m->path = xstrdup(path);
    return rc;
}

void file_map_close(file_map *m)
{
    if (m->data) munmap((void *)(uintptr_t)m->data, m->size);
    free(m->path);
    *m = (file_map){0};
}

void file_map_dontneed(const file_map *m, size_t off, size_t len)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (!m->data || off >= m->size) return;
    if (len > m->size - off) len = m->size - off;
    size_t lo = (off + page - 1) / page * page, hi = (off + len) / page * page;
    if (hi > lo) madvise((void *)(uintptr_t)(m->data + lo), hi - lo, MADV_DONTNEED);
}

int file_read_all(buf *out, const char *path, size_t max_bytes, err *e)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC), rc = 0;
    if (fd < 0) return err_errno(e, errno, "%s", path);
    struct stat st;
    if (fstat(fd, &st) == 0 && S_ISDIR(st.st_mode)) {
        close(fd);
        return err_set(e, ERR_FORMAT, "%s: is a folder, a file is needed", path);
    }
    size_t start = out->len;
    for (;;) {
        buf_reserve(out, 65536);
        ssize_t n = read(fd, out->data + out->len, out->cap - out->len - 1);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) rc = err_errno(e, errno, "%s: read failed", path);
        if (n <= 0) break;
        out->len += (size_t)n;
        if (out->len - start > max_bytes) {
            rc = err_set(e, ERR_LIMIT, "%s: larger than %zu bytes", path, max_bytes);
            break;
        }
    }
    out->data[out->len] = 0;
    close(fd);
    return rc;
}

/* ---- atomic writes ------------------------------------------------------------------------------
 */

struct file_out {
    int fd;
    uint64_t pos;
    char *path, *tmp;
};

int file_out_open(file_out **out, const char *final_path, err *e)
{
    *out = NULL;
    static _Atomic unsigned serial; /* two writers of one process must not share a temporary */
    char *tmp = xasprintf("%s.tmp-%ld-%u", final_path, (long)getpid(), serial++);
    int fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) {
        int rc = err_errno(e, errno, "%s: cannot be created", final_path);
        free(tmp);
        return rc;
    }
    file_out *f = xcalloc(1, sizeof *f);
    *f = (file_out){fd, 0, xstrdup(final_path), tmp};
    *out = f;
    return 0;
}

int file_out_pwrite(file_out *f, uint64_t off, const void *p, size_t n, err *e)
{
    const char *s = p;
    while (n) {
        ssize_t k = pwrite(f->fd, s, n > 1 << 30 ? 1 << 30 : n, (off_t)off);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return err_errno(e, k < 0 ? errno : EIO, "%s: write failed", f->path);
        s += k;
        off += (uint64_t)k;
        n -= (size_t)k;
    }
    return 0;
}

int file_out_write(file_out *f, const void *p, size_t n, err *e)
{
    int rc = file_out_pwrite(f, f->pos, p, n, e);
    if (rc == 0) f->pos += n;
    return rc;
}

uint64_t file_out_pos(const file_out *f)
{
    return f->pos;
}

/* The rename is durable only when the folder has been flushed too. */
static void sync_parent(const char *path)
{
    char *dir = xstrdup(path), *slash = strrchr(dir, '/');
    if (slash) *(slash == dir ? slash + 1 : slash) = 0;
    int fd = open(slash ? dir : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    free(dir);
}

int file_out_commit(file_out **fp, err *e)
{
    file_out *f = *fp;
    int rc = 0;
    if (fsync(f->fd) < 0) rc = err_errno(e, errno, "%s: write failed", f->path);
    if (close(f->fd) < 0 && rc == 0) rc = err_errno(e, errno, "%s: write failed", f->path);
    f->fd = -1;
    if (rc == 0 && rename(f->tmp, f->path) < 0)
        rc = err_errno(e, errno, "%s: rename failed", f->path);
    if (rc < 0) {
        file_out_abort(fp);
        return rc;
    }
    sync_parent(f->path);
    free(f->path);
    free(f->tmp);
    free(f);
    *fp = NULL;
    return 0;
}

void file_out_abort(file_out **fp)
{
    file_out *f = *fp;
    if (!f) return;
    if (f->fd >= 0) close(f->fd);
    unlink(f->tmp);
    free(f->path);
    free(f->tmp);
    free(f);
    *fp = NULL;
}

int file_write_atomic(const char *path, const void *data, size_t n, err *e)
{
    file_out *f = NULL;
    int rc = file_out_open(&f, path, e);
    if (rc == 0) rc = file_out_write(f, data, n, e);
    if (rc == 0) rc = file_out_commit(&f, e);
    file_out_abort(&f);
    return rc;
}

int file_copy_atomic(const char *from, const char *to, err *e)
{
    file_map m;
    file_out *f = NULL;
    int rc = file_map_open(&m, from, e);
    if (rc < 0) return rc;
    rc = file_out_open(&f, to, e);
    if (rc == 0 && m.size) rc = file_out_write(f, m.data, m.size, e);
    if (rc == 0) rc = file_out_commit(&f, e);
    file_out_abort(&f);
    file_map_close(&m);
    return rc;
}

/* ---- names and folders --------------------------------------------------------------------------
 */

bool file_exists(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0;
}

bool file_is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

int file_size(const char *path, uint64_t *out, err *e)
{
    struct stat st;
    if (stat(path, &st) < 0) return err_errno(e, errno, "%s", path);
    *out = (uint64_t)st.st_size;
    return 0;
}

int file_mkdirs(const char *path, err *e)
{
    if (!*path) return err_set(e, ERR_USAGE, "the name of the folder to be made is empty");
    char *p = xstrdup(path);
    int rc = 0;
    for (char *s = p + 1; rc == 0; s++) {
        if (*s && *s != '/') continue;
        char keep = *s;
        *s = 0;
        if (mkdir(p, 0755) < 0 && !file_is_dir(p))
            rc = err_errno(e, errno == EEXIST ? ENOTDIR : errno, "%s: folder cannot be made", p);
        *s = keep;
        if (!keep) break;
    }
    free(p);
    return rc;
}

int file_remove_tree(const char *path, err *e)
{
    struct stat st;
    if (lstat(path, &st) < 0) return errno == ENOENT ? 0 : err_errno(e, errno, "%s", path);
    if (!S_ISDIR(st.st_mode))
        return unlink(path) < 0 ? err_errno(e, errno, "%s: cannot be removed", path) : 0;
    char **names;
    size_t n;
    int rc = file_list(path, &names, &n, e);
    for (size_t i = 0; rc == 0 && i < n; i++) {
        char *child = file_join(path, names[i]);
        rc = file_remove_tree(child, e);
        free(child);
    }
    file_list_free(names, n);
    if (rc == 0 && rmdir(path) < 0) rc = err_errno(e, errno, "%s: cannot be removed", path);
    return rc;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

int file_list(const char *dir, char ***names, size_t *n, err *e)
{
    *names = NULL;
    *n = 0;
    DIR *d = opendir(dir);
    if (!d) return err_errno(e, errno, "%s", dir);
    size_t cap = 0;
    for (struct dirent *de; (de = readdir(d));) {
        if (!strcmp(de->d_name, ".") || !strcmp(de->d_name, "..")) continue;
        if (*n == cap) *names = xrealloc(*names, sizeof **names * (cap = cap ? 2 * cap : 16));
        (*names)[(*n)++] = xstrdup(de->d_name);
    }
    closedir(d);
    if (*n) qsort(*names, *n, sizeof **names, by_name);
    return 0;
}

void file_list_free(char **names, size_t n)
{
    for (size_t i = 0; names && i < n; i++)
        free(names[i]);
    free(names);
}

char *file_join(const char *dir, const char *name)
{
    size_t n = strlen(dir);
    return xasprintf("%s%s%s", dir, n && dir[n - 1] == '/' ? "" : "/", name);
}

const char *file_basename(const char *path)
{
    const char *s = strrchr(path, '/');
    return s ? s + 1 : path;
}

uint64_t file_free_bytes(const char *path)
{
    struct statvfs v;
    if (statvfs(path, &v) < 0) return 0;
    return (uint64_t)v.f_bavail * v.f_frsize;
}

int file_sha256(const char *path, char hex[65], err *e)
{
    file_map m;
    unsigned char md[EVP_MAX_MD_SIZE];
    unsigned int len = 0;
    int rc = file_map_open(&m, path, e);
    if (rc < 0) return rc;
    if (!EVP_Digest(m.data ? m.data : (const void *)"", m.size, md, &len, EVP_sha256(), NULL) ||
        len != 32)
        rc = err_set(e, ERR_FAIL, "%s: SHA-256 failed", path);
    for (unsigned i = 0; rc == 0 && i < 32; i++)
        snprintf(hex + 2 * (size_t)i, 3, "%02x", md[i]);
    file_map_close(&m);
    return rc;
}
