/* The engine on several devices against the engine on one: many requests at once, prefixes shared,
 * hidden states, sizes as planned, and what is refused before anything is loaded. The second kind
 * of device is the emulated GPU unless an argument names another ("cuda:0": that GPU and the next).
 */
#include <math.h>
#include <unistd.h>
#include "check.h"
#include "engine_fixture.h"
#include "plan/plan.h"

enum { N = 4, MORE = 10 };

static const char *gpu_device = "emulated";

static engine *start(const char *model, const char *device, int tp, const char *scheme)
{
    err e = {0};
    engine *en = NULL;
    engine_opts o = {.model = model,
                     .device = device,
                     .threads = 2,
                     .tp = tp,
                     .quantization = scheme,
                     .activation_dtype = "spec",
                     .max_model_len = 256,
                     .max_running = N,
                     .chunk_tokens = 48,
                     .page_tokens = device ? 32 : 16};
    CHECK_OK(engine_open(&en, &o, &e));
    return en;
}

typedef struct crowd {
    int32_t prompt[N][64];
    answer a[N];
} crowd;

static void crowd_run(engine *en, crowd *c, unsigned want)
{
    err e = {0};
    gate g;
    memset(c, 0, sizeof *c);
    gate_shut(en, &g);
    for (int k = 0; k < N; k++) {
        random_ids(c->prompt[k], 64, (int32_t)engine_vocab(en), (uint64_t)k / 2 + 1);
        req_params p = greedy_params(c->prompt[k], 20 + 13 * k, MORE);
        p.want = want;
        p.top_logprobs = want & WANT_LOGPROBS ? 1 : 0;
        CHECK_OK(answer_start(en, &p, &c->a[k], &e));
    }
    gate_open(&g);
    for (int k = 0; k < N; k++) {
        answer_wait(&c->a[k]);
        if (c->a[k].e.code) fail_msg("%s", c->a[k].e.msg);
        assert_int_equal(c->a[k].out.n, MORE);
    }
}

static void crowd_free(crowd *c)
{
    for (int k = 0; k < N; k++)
        answer_free(&c->a[k]);
}

/* Greedy tokens are the same as long as no two logits lie closer than an order of summation tells
 * apart: in these runs always. */
static void same(const char *model, const char *device, int tp, const char *scheme)
{
    static crowd one, some;
    double worst = 0;
    engine *en = start(model, device, 1, scheme);
    crowd_run(en, &one, WANT_TOKENS | WANT_LOGPROBS);
    engine_close(en, 0);
    en = start(model, device, tp, scheme);
    engine_info i;
    engine_get_info(en, &i);
    if (!device) assert_true(i.predicted_bytes == i.actual_bytes);
    crowd_run(en, &some, WANT_TOKENS | WANT_LOGPROBS);
    crowd again;
    crowd_run(en, &again, WANT_TOKENS); /* what is cached gives the same */
    engine_close(en, 0);
    for (int k = 0; k < N; k++) {
        assert_memory_equal(some.a[k].out.v, one.a[k].out.v, sizeof(int32_t) * MORE);
        assert_memory_equal(again.a[k].out.v, one.a[k].out.v, sizeof(int32_t) * MORE);
        for (int t = 0; t < MORE; t++)
            worst =
                fmax(worst, fabs((double)some.a[k].lp[t].logprob - (double)one.a[k].lp[t].logprob));
    }
    print_message("%s %s x%d %s: logprobs %.1e\n", model, i.device, tp, scheme ? scheme : "",
                  worst);
    assert_true(worst <= 1e-4);
    crowd_free(&one);
    crowd_free(&some);
    crowd_free(&again);
}

static void many_requests(void **state)
{
    (void)state;
    alarm(600); /* a rank that waits for ever ends the test */
    same(MILLET, NULL, 2, NULL);
    same(MILLET, NULL, 4, "w:int4,g32");
    same(ARCH "gemma2", NULL, 2, NULL);      /* windows: pages of two groups */
    same(ARCH "qwen3_5_moe", NULL, 2, NULL); /* states */
    same(ARCH "llama", gpu_device, 2, NULL);
    same(ARCH "gemma2", gpu_device, 2, "fp8-w8a16");
}

static void hidden_states(void **state)
{
    (void)state;
    static crowd c;
    const char *const devices[] = {NULL, gpu_device};
    for (int d = 0; d < 2; d++) {
        engine *en = start(ARCH "llama", devices[d], 2, NULL);
        crowd_run(en, &c, WANT_TOKENS | WANT_HIDDEN | WANT_LOGITS);
        engine_close(en, 0);
        for (int k = 0; k < N; k++)
            for (int layer = 0; layer < 3; layer++)
                assert_int_equal(c.a[k].hidden_rows[layer], 20 + 13 * k);
        crowd_free(&c);
    }
}

/* A device's part, and the whole file. */
static void planned(void **state)
{
    (void)state;
    ckpt *c;
    quant_ckpt *q;
    plan_out one, two;
    qspec s;
    err e = {0};
    CHECK_OK(ckpt_open(&c, MILLET, &e));
    CHECK_OK(quant_open(&q, c, &e));
    plan_in in = {.cfg = ckpt_cfg(c),
                  .q = q,
                  .kv = KV_BF16,
                  .threads = 1,
                  .context = 256,
                  .concurrency = 2,
                  .chunk_tokens = 64,
                  .page_tokens = 16};
    CHECK_OK(plan_compute(&in, &one, &e));
    in.ranks = 2;
    CHECK_OK(plan_compute(&in, &two, &e));
    assert_true(two.weights.total == one.weights.total);
    assert_true(two.kv_total * 2 == one.kv_total && two.kv_token * 2 == one.kv_token);
    assert_true(two.resident_weights < one.resident_weights);
    CHECK_OK(qspec_parse("int4", &s, &e));
    in.scheme = &s;
    in.ranks = 4; /* 768 lanes: 192 each, one and a half groups of 128 */
    CHECK_OK(plan_compute(&in, &two, &e));
    assert_string_equal(two.refused,
                        "model.layers.0.self_attn.o_proj: --tp 4 would cut through scales of 128 "
                        "columns; numbers of devices that do not: 2");
    in.ranks = 3;
    CHECK_ERR(plan_compute(&in, &two, &e), ERR_UNSUPPORTED, "numbers of devices that divide it");
    quant_close(q);
    ckpt_close(c);
    engine *en = NULL;
    engine_opts o = {.model = MILLET, .tp = 4, .quantization = "int4"};
    CHECK_ERR(engine_open(&en, &o, &e), ERR_UNSUPPORTED, "would cut through scales");
    o.tp = 3;
    CHECK_ERR(engine_open(&en, &o, &e), ERR_UNSUPPORTED, "are not divisible");
    o.tp = -1;
    CHECK_ERR(engine_open(&en, &o, &e), ERR_USAGE, "-1 devices");
}

int main(int argc, char **argv)
{
    if (argc > 1) gpu_device = argv[1];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_requests),
        cmocka_unit_test(hidden_states),
        cmocka_unit_test(planned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
