/* Sums over several devices: a thread for each launches the operator. Emulated: two, three and four
 * devices; on a machine with GPUs: all of them. */
#include <pthread.h>
#include "gpu_fixture.h"

#define MOST 8

typedef struct rank {
    gpu_all_reduce args;
    int device;
    const char *why;
    void *stream;
} rank;

static int group_size(int emulated)
{
    int n = 0;
    if (gpu.facts.emulated) return emulated;
    gpu_ok("count", gpu.api->count(&n));
    return n < MOST ? n : MOST;
}

static void *launch(void *arg)
{
    rank *r = arg;
    r->why = gpu.api->bind(r->device);
    if (!r->why) r->why = gpu.api->launch[GPU_OP_all_reduce](&r->args, r->stream);
    if (!r->why) r->why = gpu.api->sync(r->stream);
    return NULL;
}

static void open_group(rank *r, int n)
{
    void *comm[MOST] = {0};
    int device[MOST] = {0};
    for (int i = 0; i < n; i++)
        device[i] = r[i].device = gpu.facts.emulated ? 0 : i;
    gpu_ok("comms_open", gpu.api->comms_open(comm, device, n));
    for (int i = 0; i < n; i++) {
        gpu_ok("bind", gpu.api->bind(device[i]));
        gpu_ok("stream", gpu.api->stream_open(&r[i].stream));
        r[i].args.comm = comm[i];
    }
}

static void close_group(rank *r, int n)
{
    for (int i = 0; i < n; i++) {
        gpu_ok("bind", gpu.api->bind(r[i].device));
        gpu.api->comm_close(r[i].args.comm);
        gpu.api->stream_close(r[i].stream);
    }
    gpu_ok("bind", gpu.api->bind(0));
}

static void run_all(rank *r, int n)
{
    pthread_t t[MOST];
    for (int i = 0; i < n; i++)
        assert_int_equal(pthread_create(&t[i], NULL, launch, &r[i]), 0);
    for (int i = 0; i < n; i++)
        pthread_join(t[i], NULL);
    gpu.ran[GPU_OP_all_reduce]++;
}

/* Against sums in double; the results of all devices are the same bits. bf16 is rounded once a
 * device at most. */
static void check_sum(rank *r, int n, gpu_type t, int64_t lanes)
{
    gpu_mat m[MOST];
    double *want = calloc((size_t)lanes, sizeof *want), *size = calloc((size_t)lanes, sizeof *size);
    for (int i = 0; i < n; i++) {
        gpu_ok("bind", gpu.api->bind(r[i].device));
        m[i] = gpu_mat_random(t, 1, lanes, lanes);
        r[i].args.x = m[i].x;
        r[i].args.n = lanes;
        for (int64_t k = 0; k < lanes; k++) {
            want[k] += (double)m[i].host[k];
            size[k] += fabs((double)m[i].host[k]);
        }
    }
    run_all(r, n);
    for (int i = 0; i < n; i++)
        if (r[i].why) fail_msg("rank %d: %s", i, r[i].why);
    size_t bytes = (size_t)gpu_mat_lanes(&m[0]) * gpu_lane_bytes(t);
    unsigned char *first = malloc(bytes), *raw = malloc(bytes);
    gpu_ok("bind", gpu.api->bind(0));
    gpu_read(first, m[0].mem, bytes);
    for (int i = 1; i < n; i++) {
        gpu_ok("bind", gpu.api->bind(r[i].device));
        gpu.api->download(raw, m[i].mem, bytes, r[i].stream);
        gpu_ok("sync", gpu.api->sync(r[i].stream));
        assert_memory_equal(raw, first, bytes);
    }
    double step = (t == GPU_F32 ? 6e-8 : 3.91e-3) * n;
    for (int64_t i = 0; i < gpu_mat_lanes(&m[0]); i++) {
        uint32_t u = 0;
        memcpy(&u, first + (size_t)i * gpu_lane_bytes(t), gpu_lane_bytes(t));
        int64_t k = i - GPU_GUARD;
        if (k < 0 || k >= lanes) {
            assert_int_equal(u, t == GPU_F32 ? 0xffffffffu : 0xffffu);
            continue;
        }
        float got = num_bf16_to_f32((uint16_t)u);
        if (t == GPU_F32) memcpy(&got, &u, 4);
        if (!(fabs((double)got - want[k]) <= step * size[k]))
            fail_msg("%d ranks, lane %lld: %.9g, expected %.9g", n, (long long)k, (double)got,
                     want[k]);
    }
    free(first);
    free(raw);
    free(want);
    free(size);
}

static void sums(void **state)
{
    (void)state;
    static const int64_t lanes[] = {1, 2, 3, 64, 1023, 40001};
    for (int k = 2; k <= 4; k++) {
        int n = group_size(k);
        rank r[MOST];
        memset(r, 0, sizeof r);
        open_group(r, n);
        for (size_t i = 0; i < sizeof lanes / sizeof *lanes; i++) {
            check_sum(r, n, GPU_F32, lanes[i]);
            check_sum(r, n, GPU_BF16, lanes[i]);
        }
        close_group(r, n);
        if (!gpu.facts.emulated) break;
    }
}

static void *abort_soon(void *arg)
{
    rank *r = arg;
    struct timespec t = {0, 200000000};
    nanosleep(&t, NULL);
    for (int i = 0; i < 2; i++)
        gpu.api->comm_abort(r[i].args.comm);
    return NULL;
}

/* A device that does not come is not waited for once the group is given up, and the same handles
 * serve again after comms_open. */
static void a_missing_rank(void **state)
{
    (void)state;
    int n = group_size(2);
    rank r[MOST];
    memset(r, 0, sizeof r);
    if (n < 2) skip();
    n = 2;
    open_group(r, n);
    check_sum(r, n, GPU_F32, 100);
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, abort_soon, r), 0);
    launch(&r[0]); /* alone */
    pthread_join(t, NULL);
    if (gpu.facts.emulated) assert_non_null(r[0].why);
    r[1].why = gpu.api->launch[GPU_OP_all_reduce](&r[1].args, r[1].stream);
    assert_non_null(r[1].why);
    void *comm[2] = {r[0].args.comm, r[1].args.comm};
    int device[2] = {r[0].device, r[1].device};
    gpu_ok("comms_open", gpu.api->comms_open(comm, device, n));
    assert_ptr_equal(comm[0], r[0].args.comm);
    check_sum(r, n, GPU_F32, 100);
    close_group(r, n);
}

static const gpu_op tested[] = {GPU_OP_all_reduce};
static const struct CMUnitTest tests[] = {GPU_TEST(sums), GPU_TEST(a_missing_rank)};
GPU_MAIN(tests, tested)
