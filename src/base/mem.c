/* Allocation, arenas, growing buffers, and what the process and the machine have left.
 *
 * Two kinds of request: small ones that the program owes itself (x…, arena, buf: abort when the
 * system refuses, there is nothing sensible left to do) and sizes that came from a file or a client
 * (mem_alloc: an error value). What is left is the smallest of MemAvailable and, for every cgroup
 * from this process up to the root,
 *
 *     limit - (usage - inactive page cache)
 *
 * because the cache of a file just read counts as usage but is given back on demand. An arena is a
 * list of blocks; the first one has the free room. */
#include "base/mem.h"
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void *check(void *p, size_t n)
{
    if (p || !n) return p;
    static const char msg[] = "tare: out of memory\n";
    if (write(2, msg, sizeof msg - 1) < 0) {
    }
    abort();
}

void *xmalloc(size_t n)
{
    return check(malloc(n ? n : 1), 1);
}
void *xcalloc(size_t n, size_t size)
{
    return check(calloc(n ? n : 1, size ? size : 1), 1);
}
void *xrealloc(void *p, size_t n)
{
    return check(realloc(p, n ? n : 1), 1);
}
char *xstrdup(const char *s)
{
    return xstrndup(s, strlen(s));
}

char *xstrndup(const char *s, size_t n)
{
    char *p = xmalloc(n + 1);
    memcpy(p, s, n);
    p[n] = 0;
    return p;
}

char *xasprintf(const char *fmt, ...)
{
    char *out = NULL;
    va_list ap;
    va_start(ap, fmt);
    int n = vasprintf(&out, fmt, ap);
    va_end(ap);
    return check(n < 0 ? NULL : out, 1);
}

static int aligned(void **out, size_t n, size_t align, err *e)
{
    void *p = NULL;
    size_t room;
    if (!mem_add(n, align, &room) || posix_memalign(&p, align, n ? n : 1) != 0) {
        *out = NULL;
        return err_set(e, ERR_NOMEM, "out of memory: %zu bytes could not be allocated", n);
    }
    *out = p;
    return 0;
}

int mem_alloc(void **out, size_t n, err *e)
{
    return aligned(out, n, 64, e);
}

int mem_alloc_huge(void **out, size_t n, err *e)
{
    const size_t huge = (size_t)2 << 20;
    if (n < huge) return mem_alloc(out, n, e);
    int rc = aligned(out, n, huge, e);
    if (rc == 0) madvise(*out, n / huge * huge, MADV_HUGEPAGE);
    return rc;
}

void mem_free(void *p)
{
    free(p);
}
bool mem_mul(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}
bool mem_add(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

/* ---- what is used and what is left -------------------------------------------------------------
 */

static _Atomic uint64_t rss_peak;

/* "Key:   123 kB" of a /proc file, in bytes; UINT64_MAX when absent. */
static uint64_t proc_kb(const char *path, const char *key)
{
    FILE *f = fopen(path, "r");
    if (!f) return UINT64_MAX;
    char line[256];
    size_t n = strlen(key);
    uint64_t out = UINT64_MAX;
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, key, n)) {
            out = strtoull(line + n, NULL, 10) * 1024;
            break;
        }
    fclose(f);
    return out;
}

uint64_t mem_rss_anon_bytes(void)
{
    uint64_t v = proc_kb("/proc/self/status", "RssAnon:");
    return v == UINT64_MAX ? 0 : v;
}

void mem_rss_sample(void)
{
    uint64_t now = mem_rss_anon_bytes(), old = atomic_load(&rss_peak);
    while (now > old && !atomic_compare_exchange_weak(&rss_peak, &old, now)) {
    }
}

uint64_t mem_rss_peak_bytes(void)
{
    mem_rss_sample();
    return atomic_load(&rss_peak);
}

/* A number in a one-line file; "max" and unreadable = UINT64_MAX. */
static uint64_t read_number(const char *path)
{
    FILE *f = fopen(path, "r");
    if (!f) return UINT64_MAX;
    char line[64] = "";
    if (!fgets(line, sizeof line, f)) line[0] = 0;
    fclose(f);
    return line[0] >= '0' && line[0] <= '9' ? strtoull(line, NULL, 10) : UINT64_MAX;
}

/* Page cache of a cgroup, which the kernel takes back before it refuses memory: the two file lists
 * of memory.stat, by the prefix of their keys. */
static uint64_t page_cache(const char *path, const char *prefix)
{
    static const char *const lists[] = {"inactive_file", "active_file"};
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    char line[256], key[64];
    uint64_t out = 0;
    while (fgets(line, sizeof line, f))
        for (int i = 0; i < 2; i++) {
            int n = snprintf(key, sizeof key, "%s%s ", prefix, lists[i]);
            if (!strncmp(line, key, (size_t)n)) out += strtoull(line + n, NULL, 10);
        }
    fclose(f);
    return out;
}

/* This process's cgroup path for a controller ("" = the unified hierarchy), from /proc/self/cgroup.
 */
static bool cgroup_path(const char *root, const char *controller, char *out, size_t cap)
{
    char file[PATH_MAX];
    snprintf(file, sizeof file, "%s/proc/self/cgroup", root);
    FILE *f = fopen(file, "r");
    if (!f) return false;
    char line[PATH_MAX];
    bool found = false;
    while (!found && fgets(line, sizeof line, f)) {
        char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
        if (!path) continue;
        *path++ = 0;
        names++;
        path[strcspn(path, "\n")] = 0;
        if (strcmp(names, controller)) continue;
        snprintf(out, cap, "%s", path);
        found = true;
    }
    fclose(f);
    return found;
}

typedef struct cgroup_kind { /* of hierarchies */
    const char *controller, *folder, *limit, *usage, *cache, *says;
} cgroup_kind;
static const cgroup_kind cgroup_kinds[] = {{"", "/sys/fs/cgroup", "memory.max", "memory.current",
                                            "", "cgroup v2 memory.max less memory.current"},
                                           {"memory", "/sys/fs/cgroup/memory",
                                            "memory.limit_in_bytes", "memory.usage_in_bytes",
                                            "total_", "cgroup v1 memory limit less usage"}};

/* Headroom of one cgroup folder and its parents: limit - (usage - reclaimable page cache). */
static uint64_t headroom(const char *root, const cgroup_kind *k)
{
    uint64_t best = UINT64_MAX;
    char path[PATH_MAX], file[2 * PATH_MAX + 96];
    if (!cgroup_path(root, k->controller, path, sizeof path)) return best;
    for (;;) {
        snprintf(file, sizeof file, "%s%s%s/%s", root, k->folder, path, k->limit);
        uint64_t max = read_number(file);
        /* cgroup v1 writes PAGE_COUNTER_MAX for "unlimited". */
        if (max < (uint64_t)1 << 60) {
            snprintf(file, sizeof file, "%s%s%s/%s", root, k->folder, path, k->usage);
            uint64_t used = read_number(file);
            snprintf(file, sizeof file, "%s%s%s/memory.stat", root, k->folder, path);
            uint64_t soft = page_cache(file, k->cache);
            if (used == UINT64_MAX) used = 0;
            used -= soft < used ? soft : used;
            uint64_t left = max > used ? max - used : 0;
            if (left < best) best = left;
        }
        char *slash = strrchr(path, '/');
        if (!slash) break;
        *slash = 0;
    }
    return best;
}

uint64_t mem_available_under(const char *root, const char **source)
{
    char file[PATH_MAX];
    snprintf(file, sizeof file, "%s/proc/meminfo", root);
    uint64_t best = proc_kb(file, "MemAvailable:");
    const char *from = "MemAvailable of /proc/meminfo";
    if (best == UINT64_MAX) {
        best = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
        from = "physical memory";
    }
    for (size_t i = 0; i < sizeof cgroup_kinds / sizeof *cgroup_kinds; i++) {
        uint64_t v = headroom(root, &cgroup_kinds[i]);
        if (v < best) best = v, from = cgroup_kinds[i].says;
    }
    if (source) *source = from;
    return best;
}

uint64_t mem_available_bytes(const char **source)
{
    return mem_available_under("", source);
}

/* ---- arena --------------------------------------------------------------------------------------
 */

typedef struct block {
    struct block *next;
    size_t used, cap;
    _Alignas(16) unsigned char data[];
} block;
struct arena {
    block *head;
};

arena *arena_make(void)
{
    return xcalloc(1, sizeof(arena));
}

void *arena_alloc(arena *a, size_t n)
{
    if (n > SIZE_MAX / 2) check(NULL, 1);
    n = (n + 15) & ~(size_t)15;
    if (!a->head || a->head->cap - a->head->used < n) {
        size_t cap = n > 65536 ? n : 65536;
        block *b = xmalloc(sizeof *b + cap);
        b->used = 0;
        b->cap = cap;
        /* A large block goes behind the current one, which still has room for small things. */
        if (a->head && n > 65536) {
            b->next = a->head->next;
            a->head->next = b;
            b->used = n;
            memset(b->data, 0, n);
            return b->data;
        }
        b->next = a->head;
        a->head = b;
    }
    void *p = a->head->data + a->head->used;
    a->head->used += n;
    memset(p, 0, n);
    return p;
}

char *arena_strndup(arena *a, const char *s, size_t n)
{
    char *p = arena_alloc(a, n + 1);
    memcpy(p, s, n);
    return p;
}

char *arena_strdup(arena *a, const char *s)
{
    return arena_strndup(a, s, strlen(s));
}

char *arena_printf(arena *a, const char *fmt, ...)
{
    va_list ap, ap2;
    va_start(ap, fmt);
    va_copy(ap2, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    char *p = arena_alloc(a, (size_t)(n < 0 ? 0 : n) + 1);
    if (n >= 0) vsnprintf(p, (size_t)n + 1, fmt, ap2);
    va_end(ap2);
    return p;
}

void arena_drop(arena *a)
{
    if (!a) return;
    for (block *b = a->head; b;) {
        block *next = b->next;
        free(b);
        b = next;
    }
    free(a);
}

/* ---- buf ----------------------------------------------------------------------------------------
 */

void buf_free(buf *b)
{
    free(b->data);
    *b = (buf){0};
}

void buf_clear(buf *b)
{
    b->len = 0;
    if (b->data) b->data[0] = 0;
}

void buf_reserve(buf *b, size_t extra)
{
    size_t need;
    if (!mem_add(b->len, extra, &need) || !mem_add(need, 1, &need)) check(NULL, 1);
    if (need <= b->cap) return;
    size_t cap = b->cap ? b->cap : 64;
    while (cap < need)
        cap = cap > SIZE_MAX / 2 ? need : cap * 2;
    b->data = xrealloc(b->data, cap);
    b->data[b->len] = 0; /* also when nothing was there before */
    b->cap = cap;
}

void buf_add(buf *b, const void *p, size_t n)
{
    buf_reserve(b, n);
    if (n) memcpy(b->data + b->len, p, n);
    b->len += n;
    b->data[b->len] = 0;
}

void buf_puts(buf *b, const char *s)
{
    buf_add(b, s, strlen(s));
}
void buf_putc(buf *b, char c)
{
    buf_add(b, &c, 1);
}

void buf_printf(buf *b, const char *fmt, ...)
{
    va_list ap, ap2;
    va_start(ap, fmt);
    va_copy(ap2, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n > 0) {
        buf_reserve(b, (size_t)n);
        vsnprintf(b->data + b->len, (size_t)n + 1, fmt, ap2);
        b->len += (size_t)n;
    }
    va_end(ap2);
}
