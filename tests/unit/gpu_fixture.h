/* Shared by the tests of GPU operators: the plug-in, which is the emulated one unless the program's
 * first argument names another (libtare-cuda.so on a machine with a GPU), a portable CPU device for
 * the twins, and matrices that exist twice.
 *
 * A gpu_mat has `host` [rows, ld] in f32 and the same on the device in lanes of its type, with rows
 * of poison before and after, and poison from column `cols` on. Give host to the twin and x to the
 * operator, then gpu_check: cells inside must agree, all others must still be poison. Values of a
 * bf16 matrix are such that the host's are exact; outputs of bf16 are held against the rounding of
 * the twin's result. Poison is a NaN of all ones, which no computation makes. */
#ifndef TESTS_GPU_FIXTURE_H
#define TESTS_GPU_FIXTURE_H
#include <dlfcn.h>
#include <unistd.h>
#include "check.h"
#include "kern/cuda/api.h"
#include "kern/kern.h"

#define GPU_GUARD 64 /* poisoned lanes before and after */

typedef struct gpu_box {
    void *lib, *stream;
    const gpu_api *api;
    gpu_facts facts;
    kern_dev *cpu;
    void *made[4096], *hosts[4096]; /* dropped by gpu_drop_all */
    int n_made, n_hosts;
    long ran[GPU_N_OPS];
    unsigned rng;
} gpu_box;
static gpu_box gpu;

static inline void gpu_ok(const char *what, const char *bad)
{
    if (bad) fail_msg("%s: %s", what, bad);
}

/* ---- numbers ----------------------------------------------------------------------------------
 */
static inline double gpu_uniform(void)
{
    gpu.rng = gpu.rng * 1664525u + 1013904223u;
    return (double)(gpu.rng >> 8) / 16777216.0;
}
/* Normal, times 20 now and then. */
static inline float gpu_normal(void)
{
    double u = gpu_uniform() + 1e-9, v = gpu_uniform(), f = gpu_uniform() < 0.01 ? 20.0 : 1.0;
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v) * f);
}
static inline void *gpu_host(size_t n)
{
    void *p = xmalloc(n ? n : 1);
    assert_true(gpu.n_hosts < 4096);
    gpu.hosts[gpu.n_hosts++] = p;
    return memset(p, 0xff, n);
}
static inline float *gpu_randoms(int64_t n)
{
    float *p = gpu_host((size_t)n * sizeof *p);
    for (int64_t i = 0; i < n; i++)
        p[i] = gpu_normal();
    return p;
}

/* ---- device memory ----------------------------------------------------------------------------
 */
static inline void gpu_sync(void)
{
    gpu_ok("sync", gpu.api->sync(gpu.stream));
}
/* n bytes of device memory, poisoned. */
static inline void *gpu_empty(size_t n)
{
    void *p, *poison = memset(xmalloc(n ? n : 1), 0xff, n);
    gpu_ok("alloc", gpu.api->alloc(&p, n));
    assert_true(gpu.n_made < 4096);
    gpu.made[gpu.n_made++] = p;
    gpu_ok("upload", gpu.api->upload(p, poison, n, gpu.stream));
    gpu_sync();
    free(poison);
    return p;
}
static inline void gpu_write(void *to, const void *from, size_t n)
{
    gpu_ok("upload", gpu.api->upload(to, from, n, gpu.stream));
    gpu_sync();
}
static inline void gpu_read(void *to, const void *from, size_t n)
{
    gpu_ok("download", gpu.api->download(to, from, n, gpu.stream));
    gpu_sync();
}
/* A copy on the device; NULL stays NULL. */
static inline void *gpu_up(const void *from, size_t n)
{
    if (!from) return NULL;
    void *p = gpu_empty(n);
    gpu_write(p, from, n);
    return p;
}
static inline float *gpu_up_f32(const float *v, int64_t n)
{
    return gpu_up(v, (size_t)n * sizeof *v);
}
static inline int32_t *gpu_up_i32(const int32_t *v, int64_t n)
{
    return gpu_up(v, (size_t)n * sizeof *v);
}
static inline void gpu_drop_all(void)
{
    for (int i = 0; i < gpu.n_made; i++)
        gpu.api->free(gpu.made[i]);
    for (int i = 0; i < gpu.n_hosts; i++)
        free(gpu.hosts[i]);
    gpu.n_made = gpu.n_hosts = 0;
}

/* Launches, waits, and fails with what went wrong. */
static inline void gpu_run(gpu_op op, const void *args)
{
    assert_non_null(gpu.api->launch[op]);
    gpu_ok("launch", gpu.api->launch[op](args, gpu.stream));
    gpu_sync();
    gpu.ran[op]++;
}

/* ---- matrices ---------------------------------------------------------------------------------
 */
typedef struct gpu_mat {
    gpu_x x; /* row 0 on the device */
    float *host;
    int64_t rows, cols, ld;
    char *mem;
} gpu_mat;

static inline size_t gpu_lane_bytes(gpu_type t)
{
    return t == GPU_F32 ? 4 : 2;
}
static inline float gpu_rounded(gpu_type t, float v)
{
    return t == GPU_F32 ? v : num_bf16_to_f32(num_f32_to_bf16(v));
}
static inline int64_t gpu_mat_lanes(const gpu_mat *m)
{
    return m->rows * m->ld + 2 * GPU_GUARD;
}
/* All poison: an output. */
static inline gpu_mat gpu_mat_empty(gpu_type t, int64_t rows, int64_t cols, int64_t ld)
{
    gpu_mat m = {.rows = rows, .cols = cols, .ld = ld};
    m.mem = gpu_empty((size_t)gpu_mat_lanes(&m) * gpu_lane_bytes(t));
    m.x.p = m.mem + GPU_GUARD * gpu_lane_bytes(t);
    m.x.type = t;
    m.host = gpu_host((size_t)(rows * ld) * sizeof(float));
    return m;
}
/* The cells of host go to the device, and host gets what they are there. */
static inline void gpu_mat_up(gpu_mat *m)
{
    size_t lane = gpu_lane_bytes(m->x.type), n = (size_t)(m->rows * m->ld) * lane;
    char *raw = memset(xmalloc(n ? n : 1), 0xff, n);
    for (int64_t r = 0; r < m->rows; r++)
        for (int64_t c = 0; c < m->cols; c++) {
            float *v = m->host + r * m->ld + c;
            uint16_t h = num_f32_to_bf16(*v);
            memcpy(raw + (size_t)(r * m->ld + c) * lane, lane == 4 ? (void *)v : (void *)&h, lane);
            *v = gpu_rounded(m->x.type, *v);
        }
    gpu_write(m->x.p, raw, n);
    free(raw);
}
static inline gpu_mat gpu_mat_of(gpu_type t, const float *v, int64_t ldv, int64_t rows,
                                 int64_t cols, int64_t ld)
{
    gpu_mat m = gpu_mat_empty(t, rows, cols, ld);
    for (int64_t r = 0; r < rows; r++)
        memcpy(m.host + r * ld, v + r * ldv, (size_t)cols * sizeof *v);
    gpu_mat_up(&m);
    return m;
}
static inline gpu_mat gpu_mat_random(gpu_type t, int64_t rows, int64_t cols, int64_t ld)
{
    gpu_mat m = gpu_mat_empty(t, rows, cols, ld);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            m.host[r * ld + c] = gpu_normal();
    gpu_mat_up(&m);
    return m;
}

/* Is `got`, a lane of type t, what `want` within tol is when it is stored there? */
static inline bool gpu_agrees(gpu_type t, float got, float want, double tol)
{
    if (isnan(want) || isnan(got)) return isnan(want) && isnan(got);
    if (got == gpu_rounded(t, want)) return true;
    double lo = (double)want - tol, hi = (double)want + tol;
    return (double)got >= (double)gpu_rounded(t, (float)lo) - (t == GPU_F32 ? 1e-45 : 0) &&
           (double)got <= (double)gpu_rounded(t, (float)hi) + (t == GPU_F32 ? 1e-45 : 0);
}

/* Device against host: |difference| <= rel*|host| + abs before rounding; poison elsewhere. */
static inline void gpu_check(const char *what, const gpu_mat *m, double rel, double abs_)
{
    size_t lane = gpu_lane_bytes(m->x.type);
    int64_t n = gpu_mat_lanes(m);
    char *raw = xmalloc((size_t)n * lane);
    gpu_read(raw, m->mem, (size_t)n * lane);
    for (int64_t i = 0; i < n; i++) {
        int64_t at = i - GPU_GUARD, r = at < 0 ? -1 : m->ld ? at / m->ld : 0;
        int64_t c = at < 0 ? 0 : m->ld ? at % m->ld : 0;
        uint32_t u = 0;
        memcpy(&u, raw + (size_t)i * lane, lane);
        if (at < 0 || r >= m->rows || c >= m->cols) {
            if (u != (lane == 4 ? 0xffffffffu : 0xffffu))
                fail_msg("%s [%lld,%lld] of %s lanes: %#x written outside", what, (long long)r,
                         (long long)c, lane == 4 ? "f32" : "bf16", u);
            continue;
        }
        float got = num_bf16_to_f32((uint16_t)u), want = m->host[r * m->ld + c];
        if (lane == 4) memcpy(&got, &u, 4);
        if (u == (lane == 4 ? 0xffffffffu : 0xffffu))
            fail_msg("%s [%lld,%lld]: not written", what, (long long)r, (long long)c);
        if (!gpu_agrees(m->x.type, got, want, rel * fabs((double)want) + abs_))
            fail_msg("%s [%lld,%lld] of %s lanes: got %.9g, expected %.9g", what, (long long)r,
                     (long long)c, lane == 4 ? "f32" : "bf16", (double)got, (double)want);
    }
    free(raw);
}
/* n bytes on the device are these bytes. */
static inline void gpu_check_bytes(const char *what, const void *dev, const void *want, size_t n)
{
    uint8_t *got = xmalloc(n ? n : 1);
    gpu_read(got, dev, n);
    for (size_t i = 0; i < n; i++)
        if (got[i] != ((const uint8_t *)want)[i])
            fail_msg("%s: byte %zu of %zu is %#x, expected %#x", what, i, n, got[i],
                     ((const uint8_t *)want)[i]);
    free(got);
}

/* ---- programs ---------------------------------------------------------------------------------
 */
/* The plug-in of an argument: a path, or a device ("cuda:0"), whose plug-in lies where the program
 * looks for it (kern/gpu/open.c). */
static inline const char *gpu_plugin(int argc, char **argv)
{
    static char path[4400];
    if (argc < 2) return GPU_PLUGIN;
    if (strncmp(argv[1], "cuda", 4)) return argv[1];
    snprintf(path, sizeof path, "%.4096s", argv[0]);
    for (int up = 0; up < 3; up++) { /* beside the program, one and two folders up */
        char *slash = strrchr(path, '/');
        if (!slash) break;
        snprintf(slash, sizeof path - (size_t)(slash - path), "/libtare-cuda.so");
        if (!access(path, R_OK)) return path;
        *slash = 0;
    }
    return "libtare-cuda.so";
}

static inline void gpu_begin(int argc, char **argv)
{
    const char *path = gpu_plugin(argc, argv);
    const gpu_api *(*entry)(int version) = NULL;
    kern_opts o = {.threads = 2, .cpu_features = 0};
    err e = {0};
    gpu.rng = 99;
    gpu.lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (gpu.lib) *(void **)&entry = dlsym(gpu.lib, "tare_gpu_api");
    gpu.api = entry ? entry(GPU_API_VERSION) : NULL;
    const char *bad = !gpu.lib   ? dlerror()
                      : !gpu.api ? "it is not a plug-in of this version"
                                 : gpu.api->facts(0, &gpu.facts);
    if (!bad) bad = gpu.api->bind(0);
    if (!bad) bad = gpu.api->stream_open(&gpu.stream);
    if (!bad && kern_open(&gpu.cpu, &o, &e) < 0) bad = e.msg;
    if (bad) {
        fprintf(stderr, "%s: %s\n", path, bad);
        exit(1);
    }
    printf("%s: %s, sm %d\n", path, gpu.facts.name, gpu.facts.sm);
}
/* Each test ends with this: cmocka_unit_test_teardown(test, gpu_end_test). */
static inline int gpu_end_test(void **state)
{
    (void)state;
    gpu_drop_all();
    return 0;
}
/* rc, or 1 where an operator of the list never ran. */
static inline int gpu_end(int rc, const gpu_op *tested, int n)
{
    for (int i = 0; i < n && !rc; i++)
        if (!gpu.ran[tested[i]]) {
            fprintf(stderr, "operator %d is listed as tested and never ran\n", tested[i]);
            rc = 1;
        }
    kern_close(gpu.cpu);
    gpu.api->stream_close(gpu.stream);
    dlclose(gpu.lib);
    return rc;
}
#define GPU_TEST(f) cmocka_unit_test_teardown(f, gpu_end_test)
/* int main of a test program. `tested`: the operators that this program tests, as GPU_OP_name; each
 * operator must be in the list of some test_gpu_*.c (test_gpu_rows.c looks). */
#define GPU_MAIN(tests, tested)                                                                    \
    int main(int argc, char **argv)                                                                \
    {                                                                                              \
        gpu_begin(argc, argv);                                                                     \
        int gpu_rc = cmocka_run_group_tests(tests, NULL, NULL);                                    \
        return gpu_end(gpu_rc, tested, (int)(sizeof(tested) / sizeof *(tested)));                  \
    }
#endif
