/* Files: read-only maps, whole reads, and writes that are atomic (temporary name in the same
 * folder, fsync, rename, fsync of the folder), so that a crash or a full disk never leaves half an
 * output under its final name. All errors name the path. */
#ifndef BASE_FILE_H
#define BASE_FILE_H
#include "base/mem.h"

typedef struct file_map {
    const uint8_t *data;
    size_t size;
    char *path;
} file_map;
int file_map_open(file_map *m, const char *path, err *e);
void file_map_close(file_map *m);
void file_map_dontneed(const file_map *m, size_t off,
                       size_t len); /* madvise: drop resident pages */

int file_read_all(buf *out, const char *path, size_t max_bytes, err *e);
int file_write_atomic(const char *path, const void *data, size_t n, err *e);
int file_copy_atomic(const char *from, const char *to, err *e);

typedef struct file_out file_out; /* sequential atomic writer with pwrite for headers */
int file_out_open(file_out **out, const char *final_path, err *e);
int file_out_write(file_out *f, const void *p, size_t n, err *e);
int file_out_pwrite(file_out *f, uint64_t off, const void *p, size_t n, err *e);
uint64_t file_out_pos(const file_out *f);
int file_out_commit(file_out **f, err *e); /* fsync + rename; frees */
void file_out_abort(file_out **f);         /* unlink the temporary; frees; NULL is fine */

bool file_exists(const char *path);
bool file_is_dir(const char *path);
int file_size(const char *path, uint64_t *out, err *e);
int file_mkdirs(const char *path, err *e);
int file_remove_tree(const char *path, err *e);
/* Names in a folder (no "." and ".."), sorted bytewise; each xmalloc'ed, array xmalloc'ed. */
int file_list(const char *dir, char ***names, size_t *n, err *e);
void file_list_free(char **names, size_t n);
char *file_join(const char *dir, const char *name); /* xmalloc */
const char *file_basename(const char *path);
uint64_t file_free_bytes(const char *path);              /* of the file system; 0 if unknown */
int file_sha256(const char *path, char hex[65], err *e); /* OpenSSL */
#endif
