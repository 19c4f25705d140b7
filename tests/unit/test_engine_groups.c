/* Cache groups through the served path: models with sliding windows, linear-attention states and
 * latents. Whatever is given back, shared, evicted or preempted, the numbers are those of a cache
 * that keeps every page. */
#include "check.h"
#include "engine/engine_internal.h"
#include "engine_fixture.h"
#include "model_fixture.h"

static const char *const models[] = {"mistral_swa", "gemma2",      "gemma3_text", "gpt_oss",
                                     "qwen3_next",  "deepseek_v3", "llama"};
enum { MODELS = sizeof models / sizeof *models, V = 256 };

static engine *start(const char *name, const engine_opts *more)
{
    err e = {0};
    engine *en = NULL;
    char path[128];
    engine_opts o = *more;
    snprintf(path, sizeof path, ARCH "%s", name);
    o.model = path;
    o.activation_dtype = "spec";
    o.threads = 1;
    CHECK_OK(engine_open(&en, &o, &e));
    return en;
}

/* ---- every page kept ----------------------------------------------------------------------------
 */

enum { PROMPT = 150, MORE = 110 };

/* Prompt in chunks, then greedy tokens one by one, in a pool that keeps everything. */
static void keep_all(const char *name, const int32_t *prompt, int chunk, float *logits,
                     int32_t *greedy)
{
    err e = {0};
    fixture f;
    char path[128];
    int32_t all[PROMPT + MORE];
    float row[V];
    snprintf(path, sizeof path, ARCH "%s", name);
    CHECK_OK(fixture_open(&f,
                          &(fixture_opts){.path = path,
                                          .act = KERN_ACT_SPEC,
                                          .kv = KV_F32,
                                          .max_rows = chunk > 8 ? chunk : 8,
                                          .tokens = PROMPT + MORE},
                          &e));
    memcpy(all, prompt, sizeof *all * PROMPT);
    for (int at = 0, n; at < PROMPT; at += n) {
        n = PROMPT - at < chunk ? PROMPT - at : chunk;
        CHECK_OK(fixture_step(&f, all, at, at + n, PROMPT, logits + at * V, &e));
    }
    greedy[0] = all[PROMPT] = fixture_argmax(logits + (PROMPT - 1) * V, V);
    for (int i = 1; i < MORE; i++) {
        int at = PROMPT + i - 1;
        CHECK_OK(fixture_step(&f, all, at, at + 1, at + 1, row, &e));
        greedy[i] = all[at + 1] = fixture_argmax(row, V);
    }
    fixture_close(&f);
}

/* A pool for one sequence, in which every page that is given back is soon another: bit for bit the
 * same logits, and the same tokens far beyond the window. */
static void kept_or_given_back(void **state)
{
    (void)state;
    static const struct {
        int chunk, page;
        bool cache;
    } c[] = {{1, 4, false}, {9, 4, true}, {9, 16, false}, {64, 8, true}, {200, 16, true}};
    static float want[PROMPT * V];
    int32_t prompt[PROMPT], greedy[MORE];
    for (int m = 0; m < MODELS; m++)
        for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
            random_ids(prompt, PROMPT, V, 77);
            keep_all(models[m], prompt, c[i].chunk, want, greedy);
            engine *en = start(models[m], &(engine_opts){.max_running = 1,
                                                         .chunk_tokens = c[i].chunk,
                                                         .page_tokens = c[i].page,
                                                         .max_model_len = PROMPT + MORE,
                                                         .no_prefix_cache = !c[i].cache});
            for (int round = 0; round < 2; round++) {
                answer a;
                req_params p = greedy_params(prompt, PROMPT, MORE);
                p.want = WANT_TOKENS | WANT_LOGITS;
                ask(en, &p, &a);
                assert_string_equal(a.e.msg, "");
                assert_int_equal(a.n_logits, PROMPT);
                assert_memory_equal(a.logits, want, sizeof want);
                assert_int_equal(a.out.n, MORE);
                assert_memory_equal(a.out.v, greedy, sizeof greedy);
                answer_free(&a);
            }
            assert_idle(en);
            engine_close(en, 1);
        }
}

/* ---- memory -------------------------------------------------------------------------------------
 */

/* What the pool takes, reckoned by hand: f32, so 4 bytes a lane. */
static void bytes_by_hand(void **state)
{
    (void)state;
    enum { LEN = 512, RUN = 3, CHUNK = 20, PT = 4 };
    /* window 8 and a chunk of 20 see 27 tokens, which touch at most 8 pages of 4 */
    const uint64_t full = RUN * LEN, window = RUN * 8 * PT;
    static const struct {
        const char *model;
        uint64_t full_lanes, window_lanes, state_floats; /* of all layers, K and V */
    } c[] = {{"mistral_swa", 0, 2 * 2 * 2 * 16, 0},
             {"gemma3_text", 2 * 2 * 16, 6 * 2 * 2 * 16, 0},
             {"deepseek_v3", 3 * (32 + 8), 0, 0},
             /* 1 of 4 layers is attention; a state: 3 inputs of q, k and v, and S */
             {"qwen3_next", 2 * 2 * 16, 0, 3 * (3 * (2 * 2 * 16 + 4 * 16) + 4 * 16 * 16)}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        engine_info info;
        engine *en = start(c[i].model, &(engine_opts){.max_running = RUN,
                                                      .chunk_tokens = CHUNK,
                                                      .page_tokens = PT,
                                                      .max_model_len = LEN});
        engine_get_info(en, &info);
        uint64_t states = 4 * RUN * c[i].state_floats;
        print_message("%-12s %7llu bytes, %6llu of them states; %llu a token\n", c[i].model,
                      (unsigned long long)info.kv_pool_bytes, (unsigned long long)states,
                      (unsigned long long)info.kv_bytes_per_token);
        assert_int_equal(info.kv_pool_bytes,
                         4 * (full * c[i].full_lanes + window * c[i].window_lanes) + states);
        assert_int_equal(info.kv_bytes_per_token, 4 * (c[i].full_lanes + c[i].window_lanes));
        assert_int_equal(info.prefix_cache, !states);
        engine_close(en, 1);
    }
}

/* ---- prefixes -----------------------------------------------------------------------------------
 */

static int64_t cached_of(engine *en, const int32_t *prompt, int64_t n, int64_t more, answer *keep)
{
    answer a;
    req_params p = greedy_params(prompt, n, more);
    ask(en, &p, &a);
    int64_t cached = a.cached;
    if (keep)
        *keep = a;
    else
        answer_free(&a);
    return cached;
}

/* A shared beginning, another end; the next turn of a conversation. Cold engines tell the answers.
 */
static void shared_prompts(void **state)
{
    (void)state;
    static const char *const shared[] = {"mistral_swa", "gemma3_text", "gpt_oss", "llama"};
    for (size_t m = 0; m < 4; m++)
        for (int scarce = 0; scarce < 2; scarce++) {
            int32_t a[140], b[120], turn[300];
            answer first, second, third, cold;
            random_ids(a, 140, V, 1);
            random_ids(b, 120, V, 2);
            memcpy(b, a, sizeof *a * 100);
            engine_opts o = {.page_tokens = 4, .chunk_tokens = 9, .max_model_len = 300};
            if (scarce) o.max_running = 1;
            engine *en = start(shared[m], &o);
            assert_int_equal(cached_of(en, a, 140, 60, &first), 0);
            memcpy(turn, a, sizeof a);
            memcpy(turn + 140, first.out.v, sizeof(int32_t) * 60);
            random_ids(turn + 200, 20, V, 3);
            /* The last generated token was not computed; the whole pages before it were. */
            assert_int_equal(cached_of(en, turn, 220, 5, &third), 196);
            int64_t hit = cached_of(en, b, 120, 10, &second);
            if (!scarce || !strcmp(shared[m], "llama"))
                assert_int_equal(hit, 100);
            else
                assert_true(hit >= 0 && hit <= 100); /* window pages in the middle may be gone */
            print_message("%-12s %-6s: %3d of 100 shared tokens found\n", shared[m],
                          scarce ? "scarce" : "wide", (int)hit);
            o.no_prefix_cache = true;
            engine *plain = start(shared[m], &o);
            assert_int_equal(cached_of(plain, b, 120, 10, &cold), 0);
            assert_same_ids(&second, &cold);
            answer_free(&cold);
            assert_int_equal(cached_of(plain, turn, 220, 5, &cold), 0);
            assert_same_ids(&third, &cold);
            answer *all[] = {&first, &second, &third, &cold};
            for (int i = 0; i < 4; i++)
                answer_free(all[i]);
            assert_idle(en);
            engine_close(en, 1);
            engine_close(plain, 1);
        }
}

/* Layers with a state share nothing, and say so. */
static void states_share_nothing(void **state)
{
    (void)state;
    int32_t prompt[90];
    answer a, b;
    random_ids(prompt, 90, V, 4);
    engine *en = start("qwen3_next", &(engine_opts){.page_tokens = 4, .chunk_tokens = 16});
    engine_info info;
    engine_get_info(en, &info);
    assert_false(info.prefix_cache);
    assert_int_equal(cached_of(en, prompt, 90, 20, &a), 0);
    assert_int_equal(cached_of(en, prompt, 90, 20, &b), 0);
    assert_same_ids(&a, &b);
    answer_free(&a);
    answer_free(&b);
    engine_close(en, 1);
}

/* ---- storms -------------------------------------------------------------------------------------
 */

enum { CROWD = 12, ROUNDS = 4 };

/* Requests that share beginnings, in a pool for about two of them, some cancelled on the way. Those
 * that end give their solo answer; nothing leaks; the tree is sound. */
static void storms(void **state)
{
    (void)state;
    static const char *const storm[] = {"mistral_swa", "gemma3_text", "gpt_oss", "qwen3_next",
                                        "deepseek_v3"};
    for (size_t m = 0; m < 5; m++) {
        err e = {0};
        static int32_t prompt[CROWD][100];
        static answer solo[CROWD];
        req_params p[CROWD];
        uint64_t rng = m + 1, preempted = 0;
        double worst = 0;
        int ended = 0;
        engine *wide = start(storm[m], &(engine_opts){.no_prefix_cache = true});
        for (int i = 0; i < CROWD; i++) {
            random_ids(prompt[i], 100, V, (uint64_t)i + 40);
            random_ids(prompt[i], 50, V, (uint64_t)i / 4 + 1);
            p[i] = greedy_params(prompt[i], 3 + 8 * i, 8 + 13 * (i % 5));
            p[i].want = WANT_TOKENS | WANT_LOGPROBS | (i % 5 == 3 ? WANT_PROMPT_LOGPROBS : 0);
            p[i].sample.temperature = i % 2;
            p[i].sample.has_seed = true;
            p[i].sample.seed = i;
            ask(wide, &p[i], &solo[i]);
        }
        engine_close(wide, 1);
        engine *en = start(storm[m], &(engine_opts){.max_running = 5,
                                                    .max_model_len = 150,
                                                    .max_total_tokens = 180,
                                                    .page_tokens = 4,
                                                    .chunk_tokens = 24});
        for (int round = 0; round < ROUNDS; round++) {
            static answer a[CROWD];
            gate g;
            gate_shut(en, &g);
            for (int i = 0; i < CROWD; i++)
                CHECK_OK(answer_start(en, &p[(i + round) % CROWD], &a[i], &e));
            gate_open(&g);
            for (int i = 0; i < CROWD; i++) {
                rng = rng * 6364136223846793005u + 1442695040888963407u;
                if (rng >> 62 || round == ROUNDS - 1) continue; /* a quarter is cancelled */
                answer_wait_tokens(&a[i], (size_t)(rng >> 40) % 8);
                engine_cancel(en, a[i].id);
            }
            for (int i = 0; i < CROWD; i++) {
                const answer *want = &solo[(i + round) % CROWD];
                answer_wait(&a[i]);
                assert_string_equal(a[i].e.msg, "");
                if (a[i].reason == FINISH_CANCELLED) {
                    assert_memory_equal(a[i].out.v, want->out.v, sizeof(int32_t) * a[i].out.n);
                } else {
                    assert_same_ids(&a[i], want);
                    ended++;
                    for (int64_t k = 0; k < want->n_lp; k++)
                        worst = fmax(
                            worst, fabs((double)a[i].lp[k].logprob - (double)want->lp[k].logprob));
                }
                answer_free(&a[i]);
            }
            assert_idle(en);
            CHECK_OK(kv_radix_check(en->radix, &e)); /* the engine thread sleeps */
            for (int g2 = 0; g2 < KV_GROUPS; g2++)
                assert_int_equal(kv_pool_free_pages(en->pool, g2) + kv_radix_pages(en->radix, g2),
                                 kv_pool_total(en->pool, g2));
            assert_int_equal(en->n_free_states, 5);
        }
        engine_stats s;
        engine_get_stats(en, &s);
        preempted = s.preemptions;
        print_message("%-12s %2d ended, %3d preemptions, %4d tokens cached, worst %.2e\n", storm[m],
                      ended, (int)preempted, (int)s.cached_tokens, worst);
        /* Behind a window a sequence stops growing: whoever was admitted is not preempted. */
        assert_int_equal(preempted > 0, kv_pool_total(en->pool, KV_FULL) > 0);
        assert_true(ended >= CROWD);
        assert_true(worst <= 2e-5);
        assert_int_equal(s.cached_tokens > 0, strcmp(storm[m], "qwen3_next") != 0);
        for (int i = 0; i < CROWD; i++)
            answer_free(&solo[i]);
        engine_close(en, 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kept_or_given_back),
        cmocka_unit_test(bytes_by_hand),
        cmocka_unit_test(shared_prompts),
        cmocka_unit_test(states_share_nothing),
        cmocka_unit_test(storms),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
