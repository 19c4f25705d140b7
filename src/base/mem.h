/* Memory by lifetime. xmalloc and friends never return NULL for sizes the process can justify:
 * they abort with a message only when the kernel refuses; code that sizes memory from a file or a
 * request uses mem_alloc, which reports ERR_NOMEM instead. Arenas free everything at once. */
#ifndef BASE_MEM_H
#define BASE_MEM_H
#include <stddef.h>
#include <stdint.h>
#include <stdbool.h>
#include "base/err.h"

void *xmalloc(size_t n);
void *xcalloc(size_t n, size_t size);
void *xrealloc(void *p, size_t n);
char *xstrdup(const char *s);
char *xstrndup(const char *s, size_t n);
char *xasprintf(const char *fmt, ...) PRINTF(1, 2);

/* *out = n bytes, 64-byte aligned, not cleared (test builds may poison). Free with mem_free. */
int mem_alloc(void **out, size_t n, err *e);
/* As mem_alloc but 2 MiB aligned and madvise(HUGEPAGE) when n >= 2 MiB: weights and pools. */
int mem_alloc_huge(void **out, size_t n, err *e);
void mem_free(void *p);
/* a*b and a+b without wrap; false on overflow. */
bool mem_mul(size_t a, size_t b, size_t *out);
bool mem_add(size_t a, size_t b, size_t *out);

uint64_t mem_rss_anon_bytes(void); /* RssAnon of this process now */
uint64_t mem_rss_peak_bytes(void); /* highest RssAnon seen by mem_rss_sample */
void mem_rss_sample(void);         /* call at interesting points (after each layer) */
/* Bytes that may still be allocated: min(MemAvailable, cgroup v1/v2 headroom with reclaimable page
 * cache not counted as used). *source gets a static string that names which one it was. */
uint64_t mem_available_bytes(const char **source);
/* The same with /proc and /sys/fs/cgroup under another folder: for tests. */
uint64_t mem_available_under(const char *root, const char **source);

typedef struct arena arena;
arena *arena_make(void);
void *arena_alloc(arena *a, size_t n); /* 16-byte aligned, zeroed */
char *arena_strdup(arena *a, const char *s);
char *arena_strndup(arena *a, const char *s, size_t n);
char *arena_printf(arena *a, const char *fmt, ...) PRINTF(2, 3);
void arena_drop(arena *a); /* NULL is fine */

/* Growing byte buffer; data is always NUL-terminated after any buf_* call. Zero-init is valid. */
typedef struct buf {
    char *data;
    size_t len, cap;
} buf;
void buf_free(buf *b);
void buf_clear(buf *b);
void buf_reserve(buf *b, size_t extra);
void buf_add(buf *b, const void *p, size_t n);
void buf_puts(buf *b, const char *s);
void buf_putc(buf *b, char c);
void buf_printf(buf *b, const char *fmt, ...) PRINTF(2, 3);
#endif
