/* Mixture of experts: routing against the rules written out again in double, slots and sums against
 * their definition, grouped experts against each expert's own linear, bit for bit, in every scheme,
 * with experts that get no row, one, a few, many and more than a chunk. */
#include "kern_fixture.h"

/* ---- routing ----------------------------------------------------------------------------- */

typedef struct route_case {
    int E, top_k;
    kern_route_kind kind;
    bool bias;
    int n_group, topk_group;
    bool top2, renorm;
    float scale;
} route_case;
static const route_case routes[] = {
    {8, 2, KERN_ROUTE_SOFTMAX, false, 0, 0, false, true, 1},
    {60, 4, KERN_ROUTE_SOFTMAX, false, 0, 0, false, false, 1},
    {128, 8, KERN_ROUTE_SOFTMAX, false, 0, 0, false, true, 1},
    {160, 6, KERN_ROUTE_SOFTMAX, false, 8, 3, false, false, 16},    /* deepseek v2 */
    {256, 8, KERN_ROUTE_SIGMOID, true, 8, 4, true, true, 2.5f},     /* deepseek v3 */
    {128, 8, KERN_ROUTE_SIGMOID, true, 1, 1, true, true, 1},        /* glm4 */
    {32, 4, KERN_ROUTE_TOPK_SOFTMAX, false, 0, 0, false, false, 1}, /* gpt-oss */
    {12, 12, KERN_ROUTE_TOPK_SOFTMAX, false, 0, 0, false, true, 1}, /* all */
    {6, 2, KERN_ROUTE_SIGMOID, true, 6, 2, true, false, 1},         /* groups of one */
    {1, 1, KERN_ROUTE_SOFTMAX, false, 0, 0, false, true, 1},
    {16, 2, KERN_ROUTE_SPARSE_MIX, false, 0, 0, false, false, 1}, /* phi 3.5 */
};
#define JITTER 0.3f

static bool group_in(const route_case *c, const double *choice, int group)
{
    int n = c->E / c->n_group, better = 0;
    double mine = 0;
    for (int pass = 0; pass < 2; pass++) /* first mine, then the others */
        for (int g = 0; g < c->n_group; g++) {
            if ((pass == 0) != (g == group)) continue;
            double a = -INFINITY, b = -INFINITY;
            for (int i = g * n; i < (g + 1) * n; i++) {
                b = fmax(b, fmin(a, choice[i]));
                a = fmax(a, choice[i]);
            }
            double score = c->top2 && n > 1 ? a + b : a;
            if (pass == 0)
                mine = score;
            else
                better += score > mine || (score == mine && g < group);
        }
    return better < c->topk_group;
}

/* Weight of choice j: its share of those that are left when it is made and lie near it. */
static double mixed(const route_case *c, const float *x, const int32_t *expert, int j)
{
    double best = x[expert[j]], sum = 0;
    for (int e = 0; e < c->E; e++) {
        bool taken = false;
        for (int k = 0; k < j; k++)
            taken = taken || expert[k] == e;
        double apart = (best - x[e]) / fmax(fabs(x[e]), best);
        if (!taken && !(apart > 2.0 * (double)JITTER)) sum += exp(x[e] - best);
    }
    return 1 / sum;
}

/* Expert j is the (rank)th choice when so many eligible ones are better or equal and lower. */
static void want_route(const route_case *c, const float *x, const float *bias, int32_t *expert,
                       double *weight)
{
    double score[256], choice[256], max = -INFINITY, sum = 0, total = 0;
    bool in[256];
    for (int e = 0; e < c->E; e++)
        max = fmax(max, (double)x[e]);
    for (int e = 0; e < c->E; e++)
        sum += exp(x[e] - max);
    for (int e = 0; e < c->E; e++) {
        score[e] = c->kind == KERN_ROUTE_SOFTMAX   ? exp(x[e] - max) / sum
                   : c->kind == KERN_ROUTE_SIGMOID ? 1 / (1 + exp(-x[e]))
                                                   : x[e];
        choice[e] = score[e] + (bias ? (double)bias[e] : 0);
    }
    for (int e = 0; e < c->E; e++)
        in[e] = c->n_group <= 1 || group_in(c, choice, e / (c->E / c->n_group));
    for (int e = 0; e < c->E; e++) {
        int rank = 0;
        for (int f = 0; f < c->E && in[e]; f++)
            rank += in[f] && (choice[f] > choice[e] || (choice[f] == choice[e] && f < e));
        if (in[e] && rank < c->top_k) expert[rank] = e;
    }
    for (int j = 0; j < c->top_k; j++) {
        weight[j] = score[expert[j]];
        if (c->kind == KERN_ROUTE_TOPK_SOFTMAX) weight[j] = exp(weight[j] - score[expert[0]]);
        if (c->kind == KERN_ROUTE_SPARSE_MIX) weight[j] = mixed(c, x, expert, j);
        total += weight[j];
    }
    for (int j = 0; j < c->top_k; j++) {
        if (c->kind == KERN_ROUTE_TOPK_SOFTMAX || c->renorm) weight[j] /= total;
        weight[j] *= c->scale;
    }
}

static void test_route(void **state)
{
    (void)state;
    enum { T = 150 };
    for (int i = 0; i < N_ISAS; i++)
        for (size_t j = 0; j < sizeof routes / sizeof *routes; j++) {
            const route_case *c = &routes[j];
            float *x = randoms(T * c->E), *bias = randoms(c->E);
            for (int n = 0; n < T * c->E; n++) /* multiples of 1/2: many ties */
                x[n] = rintf(fmaxf(fminf(x[n], 3), -3) * (n % 3 ? 2 : 64)) / (n % 3 ? 2 : 64);
            for (int e = 0; e < c->E; e++)
                bias[e] = rintf(bias[e]) * 0.25f;
            float *weight = poisoned(T * c->top_k);
            int32_t *expert = xcalloc((size_t)(T * c->top_k), sizeof *expert), want[256];
            double w[256];
            kern_route_args a = {.logits = x,
                                 .E = c->E,
                                 .top_k = c->top_k,
                                 .kind = c->kind,
                                 .bias = c->bias ? bias : NULL,
                                 .n_group = c->n_group,
                                 .topk_group = c->topk_group,
                                 .group_top2 = c->top2,
                                 .jitter = JITTER,
                                 .renorm = c->renorm,
                                 .scale = c->scale,
                                 .expert = expert,
                                 .weight = weight};
            kern_route(isas[i].dev, &a, T);
            for (int t = 0; t < T; t++) {
                want_route(c, x + t * c->E, a.bias, want, w);
                for (int k = 0; k < c->top_k; k++) {
                    if (expert[t * c->top_k + k] != want[k])
                        fail_msg("route %zu (%s) token %d choice %d: got %d, expected %d", j,
                                 isas[i].name, t, k, expert[t * c->top_k + k], want[k]);
                    near("route weight", isas[i].name, weight[t * c->top_k + k], w[k],
                         2e-6 * fabs(w[k]));
                }
            }
            free(x), free(bias), free(weight), free(expert);
        }
}

/* Whatever the logits are, top_k different experts that exist. */
static void test_route_hostile(void **state)
{
    (void)state;
    static const float values[] = {NAN, INFINITY, -INFINITY, 1e38f, -1e38f, 0};
    for (size_t j = 0; j < sizeof routes / sizeof *routes; j++)
        for (int round = 0; round < 40; round++) {
            const route_case *c = &routes[j];
            float x[256], weight[256];
            int32_t expert[256];
            for (int e = 0; e < c->E; e++)
                x[e] = round < 6 ? values[round] : values[(int)(uniform() * 6)];
            kern_route_args a = {.logits = x,
                                 .E = c->E,
                                 .top_k = c->top_k,
                                 .kind = c->kind,
                                 .n_group = c->n_group,
                                 .topk_group = c->topk_group,
                                 .group_top2 = c->top2,
                                 .scale = 1,
                                 .expert = expert,
                                 .weight = weight};
            kern_route(isas[0].dev, &a, 1);
            bool seen[256] = {false};
            for (int k = 0; k < c->top_k; k++) {
                assert_in_range(expert[k], 0, c->E - 1);
                assert_false(seen[expert[k]]);
                seen[expert[k]] = true;
            }
        }
}

static void test_sort(void **state)
{
    (void)state;
    enum { T = 37, K = 3, E = 9 };
    int32_t expert[T * K], row[T * K], first[E + 1], slot[T * K];
    kern_dev *d = isas[0].dev;
    for (int t = 0; t < T; t++)
        for (int j = 0; j < K; j++)
            expert[t * K + j] = (t * 5 + j * 3) % 8 + (t % 4 == 0 && j == 1); /* expert 8: few */
    kern_route_sort(d, expert, T, K, E, row, first, slot);
    assert_int_equal(first[0], 0);
    assert_int_equal(first[E], T * K);
    bool used[T * K] = {false};
    for (int i = 0; i < T * K; i++) {
        int s = slot[i];
        assert_in_range(s, first[expert[i]], first[expert[i] + 1] - 1);
        assert_int_equal(row[s], i / K);
        assert_false(used[s]);
        used[s] = true;
    }
    for (int e = 0; e < E; e++)
        for (int s = first[e] + 1; s < first[e + 1]; s++)
            assert_true(row[s - 1] < row[s]);
    kern_route_sort(d, expert, 0, K, E, row, first, slot);
    for (int e = 0; e <= E; e++)
        assert_int_equal(first[e], 0);
}

static void test_combine(void **state)
{
    (void)state;
    enum { K = 4 };
    static const int sizes[][2] = {{1, 7}, {3, 64}, {70, 100}, {33, 577}};
    for (int i = 0; i < N_ISAS; i++)
        for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++) {
            int T = sizes[j][0], N = sizes[j][1];
            int64_t ldy = N + 3;
            float *y = randoms(T * K * ldy), *w = randoms(T * K), *o = randoms(T * N),
                  *o0 = copy_of(o, T * N), *set = poisoned(T * N), *one = copy_of(o, T * N);
            int32_t *slot = xmalloc((size_t)(T * K) * sizeof *slot);
            for (int n = 0; n < T * K; n++)
                slot[n] = (n * 7 + 3) % (T * K) + 0;
            for (int n = 0; n < T * K && (T * K) % 7 == 0; n++)
                slot[n] = T * K - 1 - n; /* 7 would not be a permutation */
            kern_route_combine(isas[i].dev, y, ldy, w, slot, K, T, N, true, o);
            kern_route_combine(isas[i].one, y, ldy, w, slot, K, T, N, true, one);
            kern_route_combine(isas[i].dev, y, ldy, w, slot, K, T, N, false, set);
            assert_memory_equal(o, one, (size_t)(T * N) * sizeof *o);
            for (int t = 0; t < T; t++)
                for (int n = 0; n < N; n++) {
                    double sum = 0, mag = fabs(o0[t * N + n]);
                    for (int k = 0; k < K; k++) {
                        double v = (double)w[t * K + k] * y[slot[t * K + k] * ldy + n];
                        sum += v;
                        mag += fabs(v);
                    }
                    near("combine", isas[i].name, set[t * N + n], sum, 4e-7 * mag);
                    near("combine+", isas[i].name, o[t * N + n], o0[t * N + n] + sum, 4e-7 * mag);
                }
            free(y), free(w), free(o), free(o0), free(set), free(one), free(slot);
        }
}

/* ---- experts ----------------------------------------------------------------------------- */

typedef struct expert_case {
    const char *text, *second; /* second shard's scheme, or NULL */
    int64_t N, K;
    kern_act act;
    bool bias, own_scale, own_input; /* pre_scale, static input scale: of each expert */
    bool actorder;
} expert_case;
static const expert_case expert_cases[] = {
    {"w:f32 a:f32", NULL, 40, 64, KERN_ACT_SPEC, true, false, false, false},
    {"w:bf16 a:bf16", NULL, 96, 128, KERN_ACT_AUTO, false, false, false, false},
    {"w:bf16 a:bf16", "w:bf16 a:bf16", 33, 72, KERN_ACT_AUTO, true, false, false, false},
    {"w:int4,g32 a:bf16", "w:int4,g32 a:bf16", 64, 256, KERN_ACT_AUTO, false, false, false, false},
    {"w:int4,g32 a:bf16", NULL, 64, 256, KERN_ACT_SPEC, true, true, false, false},
    {"w:int4,g128,asym a:bf16", NULL, 48, 256, KERN_ACT_AUTO, false, false, false, false},
    {"w:int3,g32 a:bf16", NULL, 64, 256, KERN_ACT_AUTO, false, false, false, false},
    {"w:int2,g64,asym a:bf16", "w:int2,g64 a:bf16", 96, 256, KERN_ACT_SPEC, true, false, false,
     false},
    {"w:int4,g32,actorder a:bf16", NULL, 48, 128, KERN_ACT_AUTO, false, false, false, true},
    {"w:int8,channel a:int8,token", "w:int8,channel a:int8,token", 48, 160, KERN_ACT_AUTO, true,
     false, false, false},
    {"w:int8,channel a:int8,tensor", NULL, 48, 160, KERN_ACT_AUTO, false, false, true, false},
    {"w:fp8_e4m3,channel a:fp8_e4m3,token", NULL, 48, 160, KERN_ACT_SPEC, false, false, false,
     false},
    {"w:fp8_e4m3,tensor a:fp8_e4m3,tensor", NULL, 48, 160, KERN_ACT_SPEC, false, false, true,
     false},
    {"w:fp8_e4m3,block128x128 a:fp8_e4m3,group128", NULL, 160, 256, KERN_ACT_SPEC, false, false,
     false, false},
    {"w:nvfp4,g16 a:nvfp4,g16", NULL, 48, 160, KERN_ACT_SPEC, false, false, false, false},
    {"w:nvfp4,g16 a:bf16", NULL, 48, 160, KERN_ACT_AUTO, false, false, false, false},
    {"w:mxfp4,g32 a:bf16", "w:mxfp4,g32 a:bf16", 48, 160, KERN_ACT_AUTO, true, false, false, false},
    {"w:nf4,g64 a:bf16", NULL, 48, 128, KERN_ACT_AUTO, false, false, false, false},
    {"w:int4,g32 a:bf16", "w:fp8_e4m3,channel a:fp8_e4m3,token", 32, 128, KERN_ACT_AUTO, true,
     false, false, false}, /* shards that treat their input differently */
};

#define E_CASES 9
static const int counts[E_CASES] = {3, 0, 1, 20, 1, 70, 8, 0, 9};
static const int long_counts[E_CASES] = {0, 600, 0, 0, 1, 0, 0, 0, 1200};

static void random_tensor(const char *text, int64_t N, int64_t K, qtensor *q)
{
    err e = {0};
    qspec s;
    CHECK_OK(qspec_parse(text, &s, &e));
    if (!qaxis_quantized(&s.w)) {
        float *v = randoms(N * K);
        uint8_t *mem = xmalloc(num_bytes(s.w.type, (size_t)(N * K)));
        num_encode_row(s.w.type, v, (size_t)(N * K), mem);
        free(v);
        qtensor_plain(q, s.w.type, N, K, mem);
        q->spec = s;
        return;
    }
    CHECK_OK(qtensor_alloc(q, &s, NUM_BF16, 1, N, K, &e));
    for (size_t i = 0; i < (size_t)N * q->row_bytes; i++)
        ((uint8_t *)(uintptr_t)q->codes)[i] = (uint8_t)((int)(uniform() * 256) & 0x77);
    int bits = num_infos[q->scale_type].bits;
    for (int64_t i = 0; i < q->scale_rows * q->scale_cols; i++) {
        float f = (float)(0.01 + 0.02 * uniform()), z = (float)(int)(uniform() * 8);
        num_encode_row(q->scale_type, &f, 1, (char *)(uintptr_t)q->scales + i * bits / 8);
        if (q->zeros)
            num_encode_row(q->zero_type, &z, 1,
                           (char *)(uintptr_t)q->zeros + i * num_infos[q->zero_type].bits / 8);
    }
}

static void drop(qtensor *q)
{
    if (!qaxis_quantized(&q->spec.w)) free((void *)(uintptr_t)q->codes);
    qtensor_free(q);
}

static kern_linear *expert_linear(kern_dev *d, const expert_case *c)
{
    err e = {0};
    qtensor q[2];
    kern_linear *l = NULL;
    int n = c->second ? 2 : 1;
    memset(q, 0, sizeof q);
    float *bias = randoms(n * c->N), *pre = randoms(c->K);
    int32_t *g = xmalloc((size_t)c->K * sizeof *g);
    for (int i = 0; i < n; i++) {
        random_tensor(i ? c->second : c->text, c->N, c->K, &q[i]);
        if (c->own_scale) q[i].pre_scale = pre;
        if (c->own_input) q[i].input_scale = (float)(0.01 + 0.05 * uniform());
        int shift = (int)(uniform() * 7);
        for (int64_t k = 0; k < c->K && c->actorder; k++)
            g[k] = (int32_t)((k * 5 + shift) % c->K / q[i].spec.w.group);
        if (c->actorder) q[i].g_idx = g;
    }
    kern_linear_desc desc = {.name = c->text,
                             .n_shards = n,
                             .shard = {&q[0], &q[1]},
                             .bias = c->bias ? bias : NULL,
                             .act = c->act};
    CHECK_OK(kern_linear_make(d, &desc, &l, &e));
    for (int i = 0; i < n; i++) {
        q[i].pre_scale = NULL;
        q[i].g_idx = NULL;
        drop(&q[i]);
    }
    free(bias), free(pre), free(g);
    return l;
}

/* Slots of the experts on rows of so many tokens taken in an order without system; 0 tokens: each
 * slot on its own row. Nothing is allocated by a run. */
static void check_experts(const isa *on, const expert_case *c, const kern_experts *x,
                          const kern_experts *x1, const int *count, int tokens)
{
    int64_t N = kern_linear_n(kern_experts_at(x, 0)), K = c->K, S = 0, ldin = K + 3, ldy = N + 2;
    int32_t first[E_CASES + 1] = {0};
    for (int e = 0; e < E_CASES; e++)
        first[e + 1] = first[e] + count[e];
    S = first[E_CASES];
    float *in = randoms((tokens ? tokens : S) * ldin), *y = poisoned(S * ldy),
          *y1 = poisoned(S * ldy), *mine = poisoned(S * K), *want = poisoned(S * N);
    memset(in + ldin, 0, (size_t)K * sizeof *in);
    int32_t *row = xmalloc((size_t)S * sizeof *row);
    for (int64_t i = 0; i < S; i++)
        row[i] = tokens ? (int32_t)((i * 31 + 7) % tokens) : (int32_t)i;
    size_t scratch = on->dev->scratch_bytes;
    kern_experts_run(on->dev, x, in, ldin, tokens ? row : NULL, first, S, y, ldy);
    kern_experts_run(on->one, x1, in, ldin, tokens ? row : NULL, first, S, y1, ldy);
    assert_memory_equal(y, y1, (size_t)(S * ldy) * sizeof *y);
    assert_int_equal(scratch, on->dev->scratch_bytes);
    for (int64_t i = 0; i < S; i++)
        memcpy(mine + i * K, in + row[i] * ldin, (size_t)K * sizeof *in);
    for (int e = 0; e < E_CASES; e++) {
        const kern_linear *l = kern_experts_at(x, e);
        kern_linear_run(on->dev, l, mine + first[e] * K, K, count[e], want + first[e] * N, N);
        for (int64_t i = first[e]; i < first[e + 1]; i++) {
            for (int64_t n = 0; n < N; n++)
                if (memcmp(&y[i * ldy + n], &want[i * N + n], sizeof *y))
                    fail_msg(
                        "experts %s (%s) expert %d of %d rows by %s, slot %lld column %lld: got "
                        "%.9g, the linear alone gives %.9g",
                        c->text, on->name, e, count[e],
                        kern_linear_choice(l, kern_bucket(count[e]))->row, (long long)i,
                        (long long)n, y[i * ldy + n], want[i * N + n]);
            for (int64_t n = N; n < ldy; n++)
                assert_true(y[i * ldy + n] != y[i * ldy + n]);
        }
    }
    free(in), free(y), free(y1), free(mine), free(want), free(row);
}

static void test_experts(void **state)
{
    (void)state;
    err e = {0};
    for (int i = 0; i < N_ISAS; i++)
        for (size_t j = 0; j < sizeof expert_cases / sizeof *expert_cases; j++) {
            const expert_case *c = &expert_cases[j];
            kern_linear *l[E_CASES], *l1[E_CASES];
            kern_experts *x = NULL, *x1 = NULL;
            size_t bytes = 0;
            for (int n = 0; n < E_CASES; n++) {
                unsigned seed = rng;
                l[n] = expert_linear(isas[i].dev, c);
                rng = seed;
                l1[n] = expert_linear(isas[i].one, c);
                bytes += kern_linear_bytes(l[n]);
            }
            CHECK_OK(kern_experts_make(isas[i].dev, l, E_CASES, &x, &e));
            CHECK_OK(kern_experts_make(isas[i].one, l1, E_CASES, &x1, &e));
            assert_int_equal(kern_experts_bytes(x), bytes);
            check_experts(&isas[i], c, x, x1, counts, 83);
            check_experts(&isas[i], c, x, x1, counts, 0);
            if (j < 4 && i != 1) check_experts(&isas[i], c, x, x1, long_counts, j % 2 ? 83 : 300);
            kern_experts_drop(isas[i].dev, x);
            kern_experts_drop(isas[i].one, x1);
        }
}

static void test_experts_refused(void **state)
{
    (void)state;
    err e = {0};
    static const expert_case other = {"w:bf16 a:bf16", NULL,  96,    64,   KERN_ACT_AUTO,
                                      false,           false, false, false};
    kern_linear *l[2] = {expert_linear(isas[0].dev, &expert_cases[1]),
                         expert_linear(isas[0].dev, &other)};
    kern_experts *x = NULL;
    CHECK_ERR(kern_experts_make(isas[0].dev, l, 2, &x, &e), ERR_SHAPE,
              "[96,64], expected [96,128]");
    CHECK_ERR(kern_experts_make(isas[0].dev, l, 0, &x, &e), ERR_VALUE, "0 experts");
    assert_null(x);
}

int main(void)
{
    isas_open();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_route),   cmocka_unit_test(test_route_hostile),
        cmocka_unit_test(test_sort),    cmocka_unit_test(test_combine),
        cmocka_unit_test(test_experts), cmocka_unit_test(test_experts_refused)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    isas_close();
    return rc;
}
