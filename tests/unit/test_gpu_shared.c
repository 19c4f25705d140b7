/* Decode steps of a device whose sequences share pages, as a server has them: by name, replayed
 * with other lengths, other groups and none, against the CPU. The device is the first argument
 * ("cuda:0"), without one the emulation. */
#include "check.h"
#include "kern/gpu/gpu.h"
#include "kern/kern.h"

enum { N = 6, H = 8, HK = 2, D = 64, TOKENS = 32, PAGES = 120, MAX = 20, LEAST = 8, LD = HK * D };

static const char *device = "emulated";

typedef struct side {
    kern_dev *dev;
    kern_kv_layer kv;
    float *q, *out, *seen;
} side;

static double uniform(void)
{
    static unsigned rng = 12345;
    rng = rng * 1664525u + 1013904223u;
    return (double)(rng >> 8) / 8388608.0 - 1;
}
static float *numbers(kern_dev *d, float *v, int64_t n)
{
    err e = {0};
    CHECK_OK(kern_constant(d, &v, n, &e));
    return v;
}

/* A pool of pages, all of them full. */
static side open_side(const char *where, kern_kv_type type, float *k, float *v, float *q)
{
    err e = {0};
    side s = {0};
    const kern_opts o = {.device = where, .threads = 1};
    CHECK_OK(kern_open(&s.dev, &o, &e));
    if (s.dev->share_pages) s.dev->share_pages = LEAST;
    CHECK_OK(kern_reserve_attention(s.dev, PAGES * TOKENS, H, D, &e));
    size_t page = kern_kv_page_bytes(type, HK, D, 0, TOKENS);
    void *base = NULL;
    CHECK_OK(kern_alloc(s.dev, &base, page * PAGES, &e));
    s.kv = (kern_kv_layer){.type = type,
                           .Hk = HK,
                           .D = D,
                           .page_tokens = TOKENS,
                           .base = base,
                           .page_stride = page,
                           .mma = kern_kv_mma(s.dev, type, D, 0, TOKENS)};
    static int32_t slot[PAGES * TOKENS];
    for (int i = 0; i < PAGES * TOKENS; i++)
        slot[i] = i;
    float *dk = numbers(s.dev, k, PAGES * TOKENS * LD),
          *dv = numbers(s.dev, v, PAGES * TOKENS * LD);
    kern_step_begin(s.dev, PAGES * TOKENS, 0);
    kern_kv_store(s.dev, &s.kv, dk, LD, dv, LD, slot, PAGES * TOKENS);
    CHECK_OK(kern_step_end(s.dev, &e));
    s.q = numbers(s.dev, q, N * H * D);
    CHECK_OK(kern_lanes(s.dev, &s.out, N * H * D, KERN_STREAM, KERN_ACT_F32, &e));
    s.seen = xmalloc(sizeof(float) * N * H * D);
    return s;
}

static void close_side(side *s)
{
    kern_free(s->dev, s->out);
    kern_free(s->dev, s->kv.base);
    kern_close(s->dev);
    free(s->seen);
}

static void step(side *s, const kern_seq *seqs, uint64_t key)
{
    err e = {0};
    const kern_attn_args a = {.q = s->q,
                              .ldq = H * D,
                              .out = s->out,
                              .ldo = H * D,
                              .H = H,
                              .scale = 0.125f,
                              .kv = &s->kv,
                              .seqs = seqs,
                              .n_seqs = N};
    if (kern_step_begin(s->dev, N, key)) {
        kern_attention(s->dev, &a);
        kern_fetch(s->dev, s->out, N * H * D, s->seen);
    }
    CHECK_OK(kern_step_end(s->dev, &e));
}

static void shared(void **state)
{
    (void)state;
    static const kern_kv_type types[] = {KV_BF16, KV_FP8_E4M3, KV_INT8, KV_FP4};
    /* lengths, and whose first pages a sequence has */
    static const struct {
        int len[N], of[N], pages[N], groups;
    } rounds[] = {
        {{300, 500, 640, 33, 1, 400}, {0, 1, 2, 3, 4, 5}, {0}, 0},
        {{300, 500, 640, 33, 300, 400}, {0, 0, 2, 3, 2, 0}, {0, 8, 0, 0, 9, 9}, 2},
        {{310, 510, 639, 600, 400, 420}, {0, 0, 0, 0, 0, 0}, {0, 9, 9, 9, 9, 9}, 1},
        {{640, 510, 60, 600, 2, 640}, {0, 1, 2, 3, 4, 0}, {0, 0, 0, 0, 0, 19}, 1},
    };
    static float k[PAGES * TOKENS * LD], v[PAGES * TOKENS * LD], q[N * H * D];
    for (int i = 0; i < PAGES * TOKENS * LD; i++)
        k[i] = (float)(2 * uniform()), v[i] = (float)(2 * uniform());
    for (int i = 0; i < N * H * D; i++)
        q[i] = (float)(2 * uniform());
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        side cpu = open_side(NULL, types[t], k, v, q), gpu = open_side(device, types[t], k, v, q);
        static int32_t table[N][MAX];
        static kern_seq seqs[N]; /* arrays of a name stay where they are */
        for (int r = 0; r < 4; r++) {
            for (int i = 0; i < N; i++) {
                for (int p = 0; p < MAX; p++)
                    table[i][p] = p < rounds[r].pages[i] ? table[rounds[r].of[i]][p]
                                                         : (p * N + i + r) % PAGES;
                seqs[i] = (kern_seq){i, 1, rounds[r].len[i], table[i]};
            }
            int groups = kern_share(seqs, N, TOKENS, LEAST, GPU_GROUP_SEQS, NULL, NULL);
            assert_int_equal(groups, rounds[r].groups);
            step(&cpu, seqs, 0);
            step(&gpu, seqs, groups ? 2 : 1);
            gpu_dev *g = gpu__of(gpu.dev);
            assert_int_equal(g->n_known, r ? 2 : 1);
            assert_int_equal(g->known[r > 0]->inputs[0].seqs.n_groups, r ? N / 2 : 0);
            double d2 = 0, s2 = 0;
            for (int i = 0; i < N * H * D; i++) {
                double d = (double)gpu.seen[i] - (double)cpu.out[i];
                d2 += d * d, s2 += (double)cpu.out[i] * (double)cpu.out[i];
            }
            print_message("type %d round %d: %.1e\n", (int)types[t], r, sqrt(d2 / s2));
            assert_true(sqrt(d2 / s2) < 5e-3);
        }
        close_side(&cpu);
        close_side(&gpu);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1) device = argv[1];
    const struct CMUnitTest tests[] = {cmocka_unit_test(shared)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
