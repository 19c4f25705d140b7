/* The operator `top` on rows of logits against its twin on the CPU: the same lanes in the same
 * order to the bit, ties and rows of equal lanes among them; the sum within f64; lanes that are no
 * numbers are told. */
#include "gpu_fixture.h"

typedef enum kind { RANDOM, FEW_VALUES, EQUAL, RISING, FALLING, NOTHING, ZEROS, PEAK, KINDS } kind;

static float lane_of(kind k, int64_t i, int64_t V)
{
    switch (k) {
    case RANDOM:
        return gpu_normal();
    case FEW_VALUES:
        return (float)(int)(gpu_uniform() * 9) - 6;
    case EQUAL:
        return 1.5f;
    case RISING:
        return (float)i * 1e-3f - 20;
    case FALLING:
        return (float)(V - i) * 1e-3f;
    case NOTHING:
        return -INFINITY;
    case ZEROS:
        return i % 3 ? -1.0f : i % 2 ? 0.0f : -0.0f;
    default:
        return i == V / 2 ? 80.0f : i % 7 ? -INFINITY : -50.0f - (float)(i % 5);
    }
}

static const int64_t widths[] = {1, 100, 256, 257, 1000, 4096, 5001, 33000, 128256, 300001};
#define N_WIDTHS ((int)(sizeof widths / sizeof *widths))

/* Runs it on [T, V]; poison around out and work stays. */
static void run_top(const gpu_mat *x, kern_top *got)
{
    size_t out = sizeof(kern_top) * (size_t)x->rows, work = gpu_top_work(x->rows, x->cols);
    uint8_t *d_out = gpu_empty(out + 64), *d_work = gpu_empty(work + 64), after[64], poison[64];
    memset(poison, 0xff, 64);
    gpu_run(GPU_OP_top, &(gpu_top){x->x, x->cols, x->rows, d_out, d_work});
    gpu_read(got, d_out, out);
    gpu_read(after, d_out + out, 64);
    assert_memory_equal(after, poison, 64);
    gpu_read(after, d_work + work, 64);
    assert_memory_equal(after, poison, 64);
}

static void check_rows(const gpu_mat *x, const char *what)
{
    size_t n = sizeof(kern_top) * (size_t)x->rows;
    kern_top *got = gpu_host(n), *want = gpu_host(n);
    run_top(x, got);
    kern_top_rows(gpu.cpu, x->host, x->cols, x->rows, want);
    for (int64_t t = 0; t < x->rows; t++) {
        const kern_top *a = &got[t], *b = &want[t];
        if (a->odd != b->odd || memcmp(&a->odd_value, &b->odd_value, 4))
            fail_msg("%s, %lld lanes, row %lld: odd lane %d (%g), expected %d (%g)", what,
                     (long long)x->cols, (long long)t, a->odd, (double)a->odd_value, b->odd,
                     (double)b->odd_value);
        if (b->odd >= 0) continue;
        for (int i = 0; i < KERN_TOP; i++)
            if (memcmp(&a->value[i], &b->value[i], 4) || a->id[i] != b->id[i])
                fail_msg("%s, %lld lanes, row %lld, number %d: lane %d (%.9g), expected %d (%.9g)",
                         what, (long long)x->cols, (long long)t, i, a->id[i], (double)a->value[i],
                         b->id[i], (double)b->value[i]);
        /* The twin adds V terms one after the other: each sum is rounded. */
        double tol = (double)x->cols * 0x1p-53 + 1e-14 * fabs(b->lse);
        if (a->lse != b->lse && !(fabs(a->lse - b->lse) <= tol))
            fail_msg("%s, %lld lanes: lse %.17g, expected %.17g", what, (long long)x->cols, a->lse,
                     b->lse);
    }
}

static void best(void **state)
{
    (void)state;
    for (int w = 0; w < N_WIDTHS; w++)
        for (int k = 0; k < KINDS; k++) {
            int64_t V = widths[w], T = V > 10000 ? 2 : 3;
            gpu_mat x = gpu_mat_empty(GPU_F32, T, V, V);
            for (int64_t i = 0; i < T * V; i++)
                x.host[i] = lane_of((kind)k, i % V, V);
            gpu_mat_up(&x);
            check_rows(&x, "best lanes");
            gpu_drop_all();
        }
}

/* By another way: sorted whole. */
static const float *sorted;
static int before(const void *a, const void *b)
{
    int32_t i = *(const int32_t *)a, j = *(const int32_t *)b;
    return sorted[i] > sorted[j] ? -1 : sorted[i] < sorted[j] ? 1 : i < j ? -1 : 1;
}
static void against_a_sort(void **state)
{
    (void)state;
    int64_t V = 20000;
    gpu_mat x = gpu_mat_random(GPU_F32, 2, V, V);
    for (int64_t i = 0; i < V; i++)
        x.host[V + i] = (float)(i * 7919 % 1000);
    gpu_mat_up(&x);
    kern_top *got = gpu_host(2 * sizeof *got);
    run_top(&x, got);
    for (int t = 0; t < 2; t++) {
        int32_t *ids = gpu_host((size_t)V * sizeof *ids);
        double sum = 0;
        for (int32_t i = 0; i < V; i++)
            ids[i] = i;
        sorted = x.host + t * V;
        qsort(ids, (size_t)V, sizeof *ids, before);
        for (int i = 0; i < KERN_TOP; i++) {
            assert_int_equal(got[t].id[i], ids[i]);
            assert_true(got[t].value[i] == sorted[ids[i]]);
        }
        for (int64_t i = 0; i < V; i++)
            sum += exp((double)sorted[i] - (double)sorted[ids[0]]);
        assert_true(fabs(got[t].lse - ((double)sorted[ids[0]] + log(sum))) < 1e-12 * got[t].lse);
    }
}

static void no_numbers(void **state)
{
    (void)state;
    for (int w = 2; w < N_WIDTHS - 2; w++) {
        int64_t V = widths[w];
        gpu_mat x = gpu_mat_random(GPU_F32, 5, V, V);
        x.host[0 * V + V - 1] = NAN;
        x.host[1 * V + V / 2] = INFINITY;
        x.host[1 * V + V - 1] = NAN;
        x.host[2 * V] = -NAN;
        x.host[2 * V + 1] = INFINITY;
        for (int64_t i = 0; i < V; i++)
            x.host[3 * V + i] = NAN;
        gpu_mat_up(&x);
        check_rows(&x, "no numbers");
        gpu_drop_all();
    }
}

static void refusals(void **state)
{
    (void)state;
    gpu_top a = {.x = {NULL, GPU_F32}};
    gpu_run(GPU_OP_top, &a);
    a.x.type = GPU_BF16;
    assert_non_null(strstr(gpu.api->launch[GPU_OP_top](&a, gpu.stream), "not f32"));
    a = (gpu_top){.x = {NULL, GPU_F32}, .V = (int64_t)1 << 31, .T = 1};
    assert_non_null(strstr(gpu.api->launch[GPU_OP_top](&a, gpu.stream), "more than 2^30"));
}

static const gpu_op tested[] = {GPU_OP_top};
static const struct CMUnitTest tests[] = {GPU_TEST(best), GPU_TEST(against_a_sort),
                                          GPU_TEST(no_numbers), GPU_TEST(refusals)};
GPU_MAIN(tests, tested)
