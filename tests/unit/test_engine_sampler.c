/* The sampler alone: what it draws, against probabilities computed here in double (chi-square on a
 * fixed seed range); filters, penalties, bias, bans; what it reports as logprobs. */
#include "check.h"
#include "engine/engine_internal.h"

enum { V = 50, DRAWS = 20000 };

typedef struct bench {
    engine en;
    request r;
    float logits[V];
    int32_t seq[64];
} bench;

static void bench_open(bench *b)
{
    memset(b, 0, sizeof *b);
    b->en.vocab = V;
    b->en.work = calloc(V, sizeof(float));
    b->en.order = calloc(V, sizeof(int32_t));
    sample_opts_default(&b->r.p.sample);
    b->r.ids = b->seq;
    b->r.n_prompt = b->r.n_ids = 3;
    for (int i = 0; i < V; i++)
        b->logits[i] = 3.0f * sinf(1.7f * (float)i) - 0.02f * (float)i;
}

static void bench_close(bench *b)
{
    free(b->en.work);
    free(b->en.order);
    free(b->r.counts);
    free(b->r.seen);
}

static int32_t draw(bench *b, uint64_t seed)
{
    err e = {0};
    int32_t t = -1;
    b->r.seed = seed;
    CHECK_OK(engine__sample(&b->en, &b->r, b->logits, &t, &e));
    assert_in_range(t, 0, V - 1);
    return t;
}

typedef struct item {
    int id;
    double p;
} item;

static int by_p(const void *a, const void *b)
{
    const item *x = a, *y = b;
    return x->p < y->p ? 1 : x->p > y->p ? -1 : x->id - y->id;
}

/* The distribution that the options ask for: temperature, then top-k, top-p of what is left, min-p.
 */
static void want_distribution(const bench *b, double p[V])
{
    const sample_opts *s = &b->r.p.sample;
    item it[V];
    double top = -1e30, sum = 0, kept = 0;
    for (int i = 0; i < V; i++)
        top = fmax(top, (double)b->logits[i]);
    for (int i = 0; i < V; i++) {
        it[i] = (item){i, exp(((double)b->logits[i] - top) / s->temperature)};
        p[i] = 0;
    }
    qsort(it, V, sizeof *it, by_p);
    int n = s->top_k > 0 && s->top_k < V ? (int)s->top_k : V, m = 0;
    for (int i = 0; i < n; i++)
        sum += it[i].p;
    for (; m < n && (m == 0 || kept < s->top_p * sum); m++)
        kept += it[m].p;
    while (m > 1 && it[m - 1].p < s->min_p * it[0].p)
        m--;
    sum = 0;
    for (int i = 0; i < m; i++)
        sum += it[i].p;
    for (int i = 0; i < m; i++)
        p[it[i].id] = it[i].p / sum;
}

static void check_distribution(bench *b, const char *what)
{
    double p[V], chi = 0;
    int64_t count[V] = {0};
    int cells = 0;
    want_distribution(b, p);
    for (int i = 0; i < DRAWS; i++)
        count[draw(b, (uint64_t)i)]++;
    for (int i = 0; i < V; i++) {
        double want = p[i] * DRAWS;
        if (p[i] == 0 && count[i]) fail_msg("%s: token %d was drawn, and must not be", what, i);
        if (want < 5) continue;
        chi += ((double)count[i] - want) * ((double)count[i] - want) / want;
        cells++;
    }
    double df = cells - 1, limit = df + 4 * sqrt(2 * fmax(df, 1)) + 4;
    print_message("%-28s chi2 %.1f of %.1f, %d cells\n", what, chi, limit, cells);
    assert_true(chi <= limit);
}

static void distributions(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        double t, top_p, min_p;
        int64_t k;
    } c[] = {{"temperature 1", 1, 1, 0, 0},
             {"temperature 0.7", 0.7, 1, 0, 0},
             {"temperature 2", 2, 1, 0, -1},
             {"top-k 5", 1, 1, 0, 5},
             {"top-k 1", 1, 1, 0, 1},
             {"top-k above the vocabulary", 1, 1, 0, 9999999},
             {"top-p 0.9", 1, 0.9, 0, 0},
             {"top-p 0.3", 1, 0.3, 0, 0},
             {"top-p 1e-9", 1, 1e-9, 0, 0},
             {"min-p 0.1", 1, 1, 0.1, 0},
             {"top-k 10, top-p 0.8", 1, 0.8, 0, 10},
             {"all of them", 1.3, 0.95, 0.02, 20}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        bench b;
        bench_open(&b);
        b.r.p.sample.temperature = c[i].t;
        b.r.p.sample.top_p = c[i].top_p;
        b.r.p.sample.min_p = c[i].min_p;
        b.r.p.sample.top_k = c[i].k;
        check_distribution(&b, c[i].what);
        bench_close(&b);
    }
}

static int best_of(const float *x)
{
    int m = 0;
    for (int i = 1; i < V; i++)
        if (x[i] > x[m]) m = i;
    return m;
}

/* A draw is a function of seed, choice and position, each of which matters. */
static void draws_repeat(void **state)
{
    (void)state;
    bench b;
    bench_open(&b);
    int by_seed = 0, by_choice = 0, by_pos = 0;
    for (uint64_t s = 0; s < 200; s++) {
        int32_t a = draw(&b, s);
        assert_int_equal(draw(&b, s), a);
        by_seed += draw(&b, s + 1) != a;
        b.r.p.choice = 1;
        by_choice += draw(&b, s) != a;
        b.r.p.choice = 0;
        b.r.n_ids++;
        by_pos += draw(&b, s) != a;
        b.r.n_ids--;
    }
    assert_true(by_seed > 100 && by_choice > 100 && by_pos > 100);
    /* 64 bits of the seed count. */
    int differ = 0;
    for (int i = 0; i < 64; i++)
        differ += engine__uniform(1ull << i, 0, 0) != engine__uniform(0, 0, 0);
    assert_int_equal(differ, 64);
    bench_close(&b);
}

static void greedy_and_bias(void **state)
{
    (void)state;
    bench b;
    bench_open(&b);
    b.r.p.sample.temperature = 0;
    assert_int_equal(draw(&b, 1), best_of(b.logits));
    int32_t which[] = {7, 8};
    float bias[] = {100, -100};
    b.r.p.sample.bias_ids = which;
    b.r.p.sample.bias = bias;
    b.r.p.sample.n_bias = 2;
    assert_int_equal(draw(&b, 1), 7);
    b.r.p.sample.temperature = 1;
    for (uint64_t s = 0; s < 500; s++)
        assert_int_equal(draw(&b, s), 7);
    bias[0] = 0;
    for (uint64_t s = 0; s < 2000; s++)
        assert_int_not_equal(draw(&b, s), 8);
    /* Equal logits: the lowest id. */
    b.r.p.sample.n_bias = 0;
    b.r.p.sample.temperature = 0;
    for (int i = 0; i < V; i++)
        b.logits[i] = 1;
    assert_int_equal(draw(&b, 1), 0);
    bench_close(&b);
}

static void penalties(void **state)
{
    (void)state;
    bench b;
    bench_open(&b);
    b.r.p.sample.temperature = 0;
    for (int i = 0; i < V; i++)
        b.logits[i] = -5;
    b.logits[1] = 2.0f;
    b.logits[2] = 1.2f;
    b.logits[3] = -1.0f;
    b.r.seen = calloc(V, 1);
    b.r.seen[1] = 1;
    b.r.p.sample.repetition_penalty = 1.6; /* 2.0 / 1.6 = 1.25 */
    assert_int_equal(draw(&b, 1), 1);
    b.r.p.sample.repetition_penalty = 1.7; /* 1.18 */
    assert_int_equal(draw(&b, 1), 2);
    b.logits[1] = b.logits[2] = -5;
    b.logits[4] = -1.4f;
    b.r.seen[3] = 1;
    b.r.p.sample.repetition_penalty = 1.5; /* a negative logit is multiplied: -1.5 */
    assert_int_equal(draw(&b, 1), 4);
    free(b.r.seen);
    b.r.seen = NULL;
    b.r.p.sample.repetition_penalty = 1;
    b.logits[1] = 2.0f;
    b.logits[2] = 1.2f;
    b.r.counts = calloc(V, sizeof *b.r.counts);
    b.r.counts[1] = 3;
    b.r.p.sample.frequency_penalty = 0.25; /* 2 - 0.75 */
    assert_int_equal(draw(&b, 1), 1);
    b.r.p.sample.presence_penalty = 0.1; /* 2 - 0.75 - 0.1 */
    assert_int_equal(draw(&b, 1), 2);
    b.r.counts[1] = 0; /* not in the output: no penalty at all */
    assert_int_equal(draw(&b, 1), 1);
    bench_close(&b);
}

static void ends_are_banned_below_min_tokens(void **state)
{
    (void)state;
    bench b;
    int32_t stop = 9;
    bench_open(&b);
    b.r.p.sample.temperature = 0;
    b.logits[5] = 90;
    b.logits[9] = 80;
    b.logits[11] = 70;
    b.en.eos[0] = 5;
    b.en.n_eos = 1;
    b.r.p.stop_ids = &stop;
    b.r.p.n_stop_ids = 1;
    b.r.p.min_tokens = 2;
    assert_int_equal(draw(&b, 1), 11);
    b.r.n_ids++;
    assert_int_equal(draw(&b, 1), 11);
    b.r.n_ids++;
    assert_int_equal(draw(&b, 1), 5);
    bench_close(&b);
}

static void not_finite_is_an_error(void **state)
{
    (void)state;
    float bad[] = {NAN, INFINITY};
    for (int i = 0; i < 2; i++) {
        err e = {0};
        bench b;
        int32_t t;
        bench_open(&b);
        b.logits[17] = bad[i];
        CHECK_ERR(engine__sample(&b.en, &b.r, b.logits, &t, &e), ERR_VALUE, "not finite");
        bench_close(&b);
    }
}

static void logprobs(void **state)
{
    (void)state;
    err e = {0};
    bench b;
    int rc;
    bench_open(&b);
    double lse = engine__lse(b.logits, V, &e, &rc), sum = 0, direct = 0;
    assert_int_equal(rc, 0);
    for (int i = 0; i < V; i++)
        sum += exp((double)b.logits[i]);
    assert_true(fabs(lse - log(sum)) < 1e-12);
    for (int id = 0; id < V; id++) {
        token_logprob lp;
        engine__logprob(b.logits, V, lse, id, 20, &lp);
        direct += exp((double)lp.logprob);
        assert_int_equal(lp.n_top, 20);
        for (int k = 0; k < 20; k++) {
            if (k) assert_true(lp.top_logprob[k] <= lp.top_logprob[k - 1]);
            for (int j = 0; j < k; j++)
                assert_int_not_equal(lp.top_id[j], lp.top_id[k]);
            if (lp.top_id[k] == id)
                assert_memory_equal(&lp.top_logprob[k], &lp.logprob, sizeof(float));
        }
        assert_int_equal(lp.top_id[0], best_of(b.logits));
    }
    assert_true(fabs(direct - 1) < 1e-5);
    token_logprob none;
    engine__logprob(b.logits, V, lse, 3, 0, &none);
    assert_int_equal(none.n_top, 0);
    bench_close(&b);
}

/* From the best lanes alone: the same tokens and logprobs as from the whole row. */
static void test_best(void **state)
{
    (void)state;
    enum { W = 1000 };
    static const struct {
        double temperature, top_p, min_p;
        int64_t top_k;
    } opts[] = {{0, 1, 0, 0},      {1, 1, 0, 1},        {1, 1, 0, 40},     {0.7, 0.9, 0, 256},
                {2, 1, 0.02, 256}, {1.3, 0.5, 0.1, 50}, {0.05, 1, 0, 200}, {30, 0.99, 0, 255}};
    err e = {0};
    bench b;
    kern_top t;
    float *logits = calloc(W, sizeof *logits);
    kern_dev cpu = {0};
    bench_open(&b);
    free(b.en.work);
    free(b.en.order);
    b.en.vocab = W;
    b.en.work = calloc(W, sizeof(float));
    b.en.order = calloc(W, sizeof(int32_t));
    for (int kind = 0; kind < 4; kind++) { /* all different, many ties, few finite, none */
        for (int i = 0; i < W; i++) {
            double u = engine__uniform((uint64_t)kind, 0, (uint64_t)i);
            logits[i] = kind == 0   ? (float)(20 * u)
                        : kind == 1 ? (float)(int)(9 * u) - 4
                        : kind == 2 ? (i % 97 ? -INFINITY : (float)u)
                                    : -INFINITY;
        }
        logits[7] = kind == 1 ? -0.0f : logits[7];
        kern_top_rows(&cpu, logits, W, 1, &t);
        for (size_t o = 0; o < sizeof opts / sizeof *opts; o++)
            for (uint64_t seed = 0; seed < 300; seed++) {
                sample_opts *s = &b.r.p.sample;
                int32_t whole, best;
                token_logprob lp, lp_best;
                int rc;
                s->temperature = opts[o].temperature;
                s->top_p = opts[o].top_p;
                s->min_p = opts[o].min_p;
                s->top_k = opts[o].top_k;
                b.r.seed = seed;
                assert_true(engine__best_suffices(&b.en, &b.r));
                CHECK_OK(engine__sample(&b.en, &b.r, logits, &whole, &e));
                CHECK_OK(engine__sample_best(&b.r, &t, &best, &e));
                assert_int_equal(whole, best);
                if (kind == 3) continue;
                double lse = engine__lse(logits, W, &e, &rc);
                int n_top = (int)(seed % 22);
                engine__logprob(logits, W, lse, whole, n_top, &lp);
                engine__logprob_best(&t, best, n_top, &lp_best);
                assert_int_equal(lp.n_top, lp_best.n_top);
                assert_true(lp.logprob == lp_best.logprob && lp.id == lp_best.id);
                for (int k = 0; k < lp.n_top; k++) {
                    assert_int_equal(lp.top_id[k], lp_best.top_id[k]);
                    assert_true(lp.top_logprob[k] == lp_best.top_logprob[k]);
                }
            }
    }
    logits[500] = NAN;
    kern_top_rows(&cpu, logits, W, 1, &t);
    int32_t none;
    CHECK_ERR(engine__sample_best(&b.r, &t, &none, &e), ERR_VALUE, "token 500 is nan");
    free(logits);
    bench_close(&b);
}

/* What needs the whole row. */
static void test_best_does_not_suffice(void **state)
{
    (void)state;
    bench b;
    bench_open(&b);
    sample_opts *s = &b.r.p.sample;
    assert_false(engine__best_suffices(&b.en, &b.r)); /* temperature 1, no top_k */
    s->top_k = 10;
    assert_true(engine__best_suffices(&b.en, &b.r));
    s->top_k = V;
    assert_false(engine__best_suffices(&b.en, &b.r));
    b.en.vocab = 1000;
    s->top_k = KERN_TOP;
    assert_true(engine__best_suffices(&b.en, &b.r));
    s->top_k = KERN_TOP + 1;
    assert_false(engine__best_suffices(&b.en, &b.r));
    s->temperature = 0;
    assert_true(engine__best_suffices(&b.en, &b.r));
    s->n_bias = 1;
    assert_false(engine__best_suffices(&b.en, &b.r));
    s->n_bias = 0;
    b.r.p.min_tokens = 3;
    assert_false(engine__best_suffices(&b.en, &b.r));
    b.r.p.min_tokens = 0;
    b.r.counts = calloc(V, sizeof *b.r.counts);
    assert_false(engine__best_suffices(&b.en, &b.r));
    bench_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_best),
        cmocka_unit_test(test_best_does_not_suffice),
        cmocka_unit_test(distributions),
        cmocka_unit_test(draws_repeat),
        cmocka_unit_test(greedy_and_bias),
        cmocka_unit_test(penalties),
        cmocka_unit_test(ends_are_banned_below_min_tokens),
        cmocka_unit_test(not_finite_is_an_error),
        cmocka_unit_test(logprobs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
