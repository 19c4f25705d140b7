/* The engine on a GPU against the engine on the CPU: the same requests, many at once with steps
 * filled up to a bucket, pages shared by prefixes, and every scheme at load. The device is the
 * first argument ("cuda:0"), without one the emulation of the plain kernels. */
#include "check.h"
#include "engine_fixture.h"
#include "num/qspec.h"

enum { N = 5, MORE = 6 };

static const char *device = "emulated";

static engine *start(engine_opts o, const char *where)
{
    err e = {0};
    engine *en = NULL;
    o.device = where;
    o.threads = 2;
    o.strict = false;
    CHECK_OK(engine_open(&en, &o, &e));
    return en;
}

typedef struct crowd {
    int32_t prompt[N][64];
    answer a[N];
} crowd;

static void crowd_submit(engine *en, crowd *c)
{
    err e = {0};
    gate g;
    engine_info i;
    engine_get_info(en, &i);
    memset(c, 0, sizeof *c);
    gate_shut(en, &g);
    for (int k = 0; k < N; k++) {
        int64_t len = 3 + 14 * k;
        random_ids(c->prompt[k], 64, (int32_t)i.vocab,
                   (uint64_t)k / 2 + 1); /* pairs share a prefix */
        req_params p = greedy_params(c->prompt[k], len < 60 ? len : 60, MORE);
        p.want = WANT_TOKENS | WANT_LOGPROBS | WANT_PROMPT_LOGPROBS;
        p.top_logprobs = 1;
        CHECK_OK(answer_start(en, &p, &c->a[k], &e));
    }
    gate_open(&g);
}

static void crowd_wait(crowd *c)
{
    for (int k = 0; k < N; k++) {
        answer_wait(&c->a[k]);
        assert_int_equal(c->a[k].e.code, 0);
        assert_int_equal(c->a[k].out.n, MORE);
    }
}

static void crowd_run(engine *en, crowd *c)
{
    crowd_submit(en, c);
    crowd_wait(c);
}

/* What both say as long as they say the same; worst: of the logprobs up to there. */
static size_t agreement(const answer *a, const answer *b, double *worst)
{
    for (size_t i = 0; i < a->out.n; i++) {
        if (a->out.v[i] != b->out.v[i]) return i;
        *worst = fmax(*worst, fabs((double)a->lp[i].logprob - (double)b->lp[i].logprob));
    }
    return a->out.n;
}

/* Root of the mean square of what differs in the logprobs of the prompts. */
static double apart(const crowd *a, const crowd *b)
{
    double sum = 0;
    int64_t n = 0;
    for (int k = 0; k < N; k++) {
        assert_int_equal(a->a[k].n_plp, b->a[k].n_plp);
        for (int64_t i = 1; i < a->a[k].n_plp; i++, n++) { /* the first token has none */
            double d = (double)a->a[k].plp[i].logprob - (double)b->a[k].plp[i].logprob;
            sum += d * d;
        }
    }
    return sqrt(sum / (double)n);
}

/* What numbers of fewer bits change, on the CPU. */
static double loss_of(engine_opts o, const crowd *low)
{
    static crowd full;
    o.quantization = NULL;
    o.kv_cache_dtype = "f32";
    engine *en = start(o, NULL);
    crowd_run(en, &full);
    engine_close(en, 1);
    double loss = apart(&full, low);
    for (int k = 0; k < N; k++)
        answer_free(&full.a[k]);
    return loss;
}

/* Prompts and generated tokens. codes: inputs or keys become codes on the way. A sum in another
 * order turns the rounding of one, which moves others in the layers behind it until the two runs
 * round independently: the root of two times the loss if all did so at once. */
static void both(const char *what, engine_opts o, double limit, bool codes)
{
    static crowd cpu, gpu;
    double worst = 0;
    size_t same = 0;
    engine *en = start(o, NULL);
    crowd_run(en, &cpu);
    engine_close(en, 1);
    en = start(o, device);
    crowd_run(en, &gpu);
    assert_idle(en);
    engine_close(en, 1);
    for (int k = 0; k < N; k++)
        same += agreement(&cpu.a[k], &gpu.a[k], &worst);
    double d = apart(&cpu, &gpu);
    if (codes) limit = loss_of(o, &cpu);
    print_message("%-16s %3d of %d tokens equal, prompts %.2e, allowed %.2e\n", what, (int)same,
                  N * MORE, d, limit);
    assert_true(d <= limit);
    if (!codes) assert_int_equal(same, N * MORE);
    if (!codes) assert_true(worst <= limit * 10);
    for (int k = 0; k < N; k++) {
        answer_free(&cpu.a[k]);
        answer_free(&gpu.a[k]);
    }
}

static void architectures(void **state)
{
    (void)state;
    static const char *const cases[] = {"llama",       "gemma3_text", "mistral_swa", "gpt_oss",
                                        "deepseek_v3", "qwen3_next",  "mixtral",     "falcon"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[128];
        snprintf(path, sizeof path, ARCH "%s", cases[i]);
        both(cases[i],
             (engine_opts){.model = path,
                           .activation_dtype = "spec",
                           .max_running = 5,
                           .chunk_tokens = 24,
                           .page_tokens = 32},
             2e-4, false);
    }
}

static void schemes(void **state)
{
    (void)state;
    for (int i = 0; i < qspec_n_presets; i++) {
        bool codes = strstr(qspec_presets[i].spec, "a:") != NULL;
        both(qspec_presets[i].name,
             (engine_opts){.model = MILLET,
                           .activation_dtype = "spec",
                           .quantization = qspec_presets[i].name,
                           .max_model_len = 128,
                           .max_running = 8},
             2e-3, codes);
    }
}

static void caches(void **state)
{
    (void)state;
    static const char *const kv[] = {"bf16", "fp8_e4m3", "int8", "fp4", "f32"};
    for (size_t i = 0; i < sizeof kv / sizeof *kv; i++)
        both(kv[i],
             (engine_opts){.model = MILLET,
                           .activation_dtype = "spec",
                           .kv_cache_dtype = kv[i],
                           .max_model_len = 128,
                           .max_running = 8},
             1e-4, strcmp(kv[i], "f32") != 0);
}

/* Two engines in one process, on one device, at the same time. */
static void two_at_once(void **state)
{
    (void)state;
    static crowd alone, a, b;
    double worst = 0;
    engine_opts o = {.model = ARCH "qwen3", .activation_dtype = "spec", .max_running = 5};
    engine *one = start(o, device), *two = start(o, device);
    crowd_run(one, &alone);
    crowd_submit(one, &a);
    crowd_submit(two, &b);
    crowd_wait(&a);
    crowd_wait(&b);
    for (int k = 0; k < N; k++) {
        assert_int_equal(agreement(&alone.a[k], &a.a[k], &worst), MORE);
        assert_int_equal(agreement(&alone.a[k], &b.a[k], &worst), MORE);
        answer_free(&alone.a[k]);
        answer_free(&a.a[k]);
        answer_free(&b.a[k]);
    }
    assert_true(worst <= 1e-5);
    engine_close(one, 1);
    engine_close(two, 1);
}

int main(int argc, char **argv)
{
    if (argc > 1) device = argv[1];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(architectures),
        cmocka_unit_test(schemes),
        cmocka_unit_test(caches),
        cmocka_unit_test(two_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
