/* The engine against goldens and against itself: whatever the chunks, batch mates, cached prefixes,
 * preemptions and order of arrival, a request gets the same answer. */
#include "check.h"
#include "engine_fixture.h"

static engine *start(const engine_opts *o)
{
    err e = {0};
    engine *en = NULL;
    CHECK_OK(engine_open(&en, o, &e));
    return en;
}

static const char *const cases[] = {
    "llama",       "llama3_rope", "llama_dynamic", "llama_linear_rope", "llama_tied", "llama_yarn",
    "mistral_swa", "qwen2",       "qwen3"};

/* Logits, hidden states and greedy ids of transformers, through the served path. */
static void goldens(void **state)
{
    (void)state;
    static const int64_t chunks[] = {512, 9};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int k = 0; k < 2; k++) {
            err e = {0};
            char path[128], gold[160];
            st_file g = {0};
            const st_tensor *t[4] = {0};
            static const char *const names[] = {"input_ids", "logits", "hidden_first", "greedy"};
            snprintf(path, sizeof path, ARCH "%s", cases[c]);
            snprintf(gold, sizeof gold, "%s/golden.safetensors", path);
            CHECK_OK(st_open(&g, gold, &e));
            for (size_t i = 0; i < g.n; i++)
                for (int j = 0; j < 4; j++)
                    if (!strcmp(g.tensors[i].name, names[j])) t[j] = &g.tensors[i];
            int32_t prompt[64];
            int64_t n = t[0]->shape[0], V = t[1]->shape[1], h = t[2]->shape[1];
            float *want = malloc(sizeof *want * (size_t)(n * V));
            memcpy(prompt, t[0]->data, sizeof *prompt * (size_t)n);
            memcpy(want, t[1]->data, sizeof *want * (size_t)(n * V));
            engine *en = start(&(engine_opts){.model = path,
                                              .activation_dtype = "spec",
                                              .threads = 2,
                                              .chunk_tokens = chunks[k]});
            answer a;
            req_params p = greedy_params(prompt, n, t[3]->shape[0]);
            p.want = WANT_TOKENS | WANT_LOGITS | WANT_HIDDEN;
            ask(en, &p, &a);
            assert_int_equal(a.e.code, 0);
            assert_int_equal(a.n_logits, n);
            assert_int_equal(a.vocab, V);
            double d = max_diff(a.logits, want, n * V);
            memcpy(want, t[2]->data, sizeof *want * (size_t)(n * h));
            double dh = max_diff(a.hidden0, want, n * h);
            print_message("%-18s chunk %3d: logits %.2e hidden %.2e\n", cases[c], (int)chunks[k], d,
                          dh);
            assert_true(d <= 1e-4);
            assert_true(dh <= 1e-4);
            for (int l = 0; l < 3; l++)
                assert_int_equal(a.hidden_rows[l], n);
            assert_int_equal(a.out.n, t[3]->shape[0]);
            assert_memory_equal(a.out.v, t[3]->data, sizeof(int32_t) * a.out.n);
            assert_int_equal(a.reason, FINISH_LENGTH);
            answer_free(&a);
            free(want);
            engine_close(en, 1);
            st_close(&g);
        }
}

enum { N = 8 };

typedef struct crowd {
    int32_t prompt[N][64];
    int64_t len[N];
    answer solo[N], together[N];
    req_params p[N];
} crowd;

static void crowd_make(crowd *c, int32_t vocab, int64_t more)
{
    memset(c, 0, sizeof *c);
    for (int i = 0; i < N; i++) {
        c->len[i] = 5 + 7 * i;
        random_ids(c->prompt[i], 64, vocab, (uint64_t)i / 2 + 1); /* pairs share a prefix */
        c->p[i] = greedy_params(c->prompt[i], c->len[i], more);
        c->p[i].want = WANT_TOKENS | WANT_LOGPROBS;
        c->p[i].top_logprobs = 3;
        if (i % 2) {
            c->p[i].sample.temperature = 0.8;
            c->p[i].sample.has_seed = true;
            c->p[i].sample.seed = 1000 + i;
        }
    }
}

static void crowd_check(crowd *c, double limit)
{
    double worst = 0;
    for (int i = 0; i < N; i++) {
        assert_same_ids(&c->solo[i], &c->together[i]);
        assert_int_equal(c->together[i].n_lp, c->solo[i].n_lp);
        for (int64_t k = 0; k < c->solo[i].n_lp; k++)
            worst = fmax(worst, fabs((double)c->solo[i].lp[k].logprob -
                                     (double)c->together[i].lp[k].logprob));
    }
    print_message("largest difference of a logprob: %.2e\n", worst);
    assert_true(worst <= limit);
}

static void crowd_free(crowd *c)
{
    for (int i = 0; i < N; i++) {
        answer_free(&c->solo[i]);
        answer_free(&c->together[i]);
    }
}

static void batch_mates_change_nothing(void **state)
{
    (void)state;
    err e = {0};
    static crowd c;
    gate g;
    engine_stats before, after;
    engine *en = start(&(engine_opts){
        .model = ARCH "llama", .activation_dtype = "spec", .threads = 2, .no_prefix_cache = true});
    crowd_make(&c, 256, 24);
    for (int i = 0; i < N; i++)
        ask(en, &c.p[i], &c.solo[i]);
    engine_get_stats(en, &before);
    gate_shut(en, &g);
    for (int i = 0; i < N; i++)
        CHECK_OK(answer_start(en, &c.p[i], &c.together[i], &e));
    gate_open(&g);
    for (int i = 0; i < N; i++)
        answer_wait(&c.together[i]);
    engine_get_stats(en, &after);
    print_message("%d steps alone, %d together\n", (int)before.steps,
                  (int)(after.steps - before.steps));
    assert_true((after.steps - before.steps) * 4 < before.steps);
    crowd_check(&c, 1e-5);
    assert_idle(en);
    crowd_free(&c);
    engine_close(en, 1);
}

/* At the defaults (auto, bf16 cache) larger batches may run in other kernels, and a rounding of the
 * cache may fall the other way: the numbers move a little, the answers of a trained model do not.
 */
static void batch_mates_at_the_defaults(void **state)
{
    (void)state;
    err e = {0};
    static crowd c;
    gate g;
    engine *en = start(&(engine_opts){.model = MILLET, .threads = 2, .no_prefix_cache = true});
    crowd_make(&c, 1007, 24);
    json *j = NULL;
    CHECK_OK(json_parse_file(&j, MILLET "/millet_golden.json", &e));
    const json *it = j->child;
    for (int i = 0; i < N; i++, it = it->next) {
        const char *text = json_get(it, "prompt")->valuestring;
        ids l = {0};
        CHECK_OK(tokenizer_encode(engine_tokenizer(en), text, strlen(text), false, &l, &e));
        c.len[i] = l.n < 64 ? (int64_t)l.n : 64;
        memcpy(c.prompt[i], l.v, sizeof(int32_t) * (size_t)c.len[i]);
        c.p[i].n_prompt = c.len[i];
        ids_free(&l);
    }
    json_drop(j);
    for (int i = 0; i < N; i++)
        ask(en, &c.p[i], &c.solo[i]);
    gate_shut(en, &g);
    for (int i = 0; i < N; i++)
        CHECK_OK(answer_start(en, &c.p[i], &c.together[i], &e));
    gate_open(&g);
    for (int i = 0; i < N; i++)
        answer_wait(&c.together[i]);
    crowd_check(&c, 0.05);
    crowd_free(&c);
    engine_close(en, 1);
}

/* A pool for about two of eight requests: they take turns, and are computed again. */
static void preemption_changes_nothing(void **state)
{
    (void)state;
    err e = {0};
    static crowd c;
    gate g;
    crowd_make(&c, 256, 40);
    engine *wide =
        start(&(engine_opts){.model = ARCH "qwen3", .activation_dtype = "spec", .threads = 1});
    for (int i = 0; i < N; i++)
        ask(wide, &c.p[i], &c.solo[i]);
    engine_close(wide, 1);
    engine_stats s;
    engine *en = start(&(engine_opts){.model = ARCH "qwen3",
                                      .activation_dtype = "spec",
                                      .threads = 1,
                                      .max_total_tokens = 160,
                                      .max_model_len = 128,
                                      .page_tokens = 4});
    gate_shut(en, &g);
    for (int i = 0; i < N; i++)
        CHECK_OK(answer_start(en, &c.p[i], &c.together[i], &e));
    gate_open(&g);
    for (int i = 0; i < N; i++)
        answer_wait(&c.together[i]);
    engine_get_stats(en, &s);
    print_message("%d preemptions\n", (int)s.preemptions);
    assert_true(s.preemptions > 0);
    assert_int_equal(s.requests, N + 1); /* and the gate */
    int64_t prompts = 1;
    for (int i = 0; i < N; i++)
        prompts += c.len[i];
    assert_int_equal(s.prompt_tokens, prompts); /* counted once each */
    crowd_check(&c, 1e-5);
    assert_idle(en);
    crowd_free(&c);
    engine_close(en, 1);
}

/* Prompt logits under preemption: every row once, in order. */
static void preempted_rows_are_reported_once(void **state)
{
    (void)state;
    err e = {0};
    int32_t prompt[3][40];
    answer a[3], solo[3];
    gate g;
    engine *en = start(&(engine_opts){.model = ARCH "llama",
                                      .threads = 1,
                                      .activation_dtype = "f32",
                                      .max_total_tokens = 120,
                                      .max_model_len = 120,
                                      .page_tokens = 4,
                                      .chunk_tokens = 8});
    for (int round = 0; round < 2; round++) {
        if (round) gate_shut(en, &g);
        for (int i = 0; i < 3; i++) {
            random_ids(prompt[i], 40, 256, (uint64_t)i + 50);
            req_params p = greedy_params(prompt[i], 40, 60);
            p.want = WANT_TOKENS | WANT_LOGITS | WANT_PROMPT_LOGPROBS | WANT_HIDDEN;
            if (round) {
                CHECK_OK(answer_start(en, &p, &a[i], &e));
            } else {
                ask(en, &p, &solo[i]);
            }
        }
    }
    gate_open(&g);
    for (int i = 0; i < 3; i++) {
        answer_wait(&a[i]);
        assert_string_equal(a[i].e.msg, "");
        assert_int_equal(a[i].n_logits, 40);
        assert_int_equal(a[i].n_plp, 40);
        assert_int_equal(a[i].hidden_rows[1], 40);
        assert_true(max_diff(a[i].logits, solo[i].logits, 40 * 256) <= 1e-4);
        assert_same_ids(&a[i], &solo[i]);
        answer_free(&a[i]);
        answer_free(&solo[i]);
    }
    engine_stats st;
    engine_get_stats(en, &st);
    assert_true(st.preemptions > 0);
    engine_close(en, 1);
}

/* The same prompt cold and from the prefix cache: same logprobs; the numbers that were cached. */
static void prefix_cache_changes_nothing(void **state)
{
    (void)state;
    int32_t prompt[100];
    random_ids(prompt, 100, 256, 3);
    engine *en = start(&(engine_opts){.model = ARCH "llama", .threads = 1, .chunk_tokens = 32});
    req_params p = greedy_params(prompt, 100, 16);
    p.want = WANT_TOKENS | WANT_LOGPROBS;
    p.top_logprobs = 5;
    answer cold, warm, shorter, other, longer;
    ask(en, &p, &cold);
    ask(en, &p, &warm);
    assert_int_equal(cold.cached, 0);
    assert_int_equal(warm.cached, 96); /* whole pages before the last token */
    assert_same_ids(&cold, &warm);
    double worst = 0;
    for (int64_t i = 0; i < cold.n_lp; i++)
        for (int k = 0; k < 5; k++)
            worst = fmax(
                worst, fabs((double)cold.lp[i].top_logprob[k] - (double)warm.lp[i].top_logprob[k]));
    print_message("cached against cold: %.2e\n", worst);
    assert_true(worst <= 1e-5);
    p.n_prompt = 96; /* the last token is always computed */
    ask(en, &p, &shorter);
    assert_int_equal(shorter.cached, 80);
    p.n_prompt = 100;
    p.cache_salt = 77;
    ask(en, &p, &other);
    assert_int_equal(other.cached, 0);
    assert_same_ids(&cold, &other);
    /* What was generated is cached too: the next turn of a conversation. */
    int32_t turn[120];
    memcpy(turn, prompt, sizeof prompt);
    memcpy(turn + 100, cold.out.v, sizeof(int32_t) * 16);
    req_params q = greedy_params(turn, 116, 4);
    ask(en, &q, &longer);
    assert_int_equal(longer.cached, 112);
    answer *all[] = {&cold, &warm, &shorter, &other, &longer};
    for (int i = 0; i < 5; i++)
        answer_free(all[i]);
    assert_idle(en);
    engine_close(en, 1);
}

/* Prompt logprobs are the same whatever the order and the company. */
static void prompt_logprobs_in_any_order(void **state)
{
    (void)state;
    static const int order[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                    {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    err e = {0};
    int32_t prompt[3][33];
    answer first[3];
    engine *en = start(&(engine_opts){
        .model = ARCH "llama3_rope", .activation_dtype = "spec", .threads = 2, .chunk_tokens = 24});
    req_params p[3];
    for (int i = 0; i < 3; i++) {
        random_ids(prompt[i], 20, 256, 5);
        random_ids(prompt[i] + 20, 13, 256, (uint64_t)i + 6);
        p[i] = greedy_params(prompt[i], 33, 1);
        p[i].want = WANT_TOKENS | WANT_LOGPROBS | WANT_PROMPT_LOGPROBS;
        p[i].top_logprobs = 1;
        ask(en, &p[i], &first[i]);
        assert_int_equal(first[i].n_plp, 33);
        assert_true(first[i].plp[0].none);
        for (int k = 1; k < 33; k++) {
            assert_int_equal(first[i].plp[k].id, prompt[i][k]);
            assert_true(first[i].plp[k].logprob < 0 && isfinite(first[i].plp[k].logprob));
        }
    }
    for (int o = 0; o < 6; o++)
        for (int together = 0; together < 2; together++) {
            answer a[3];
            gate g;
            if (together) gate_shut(en, &g);
            for (int k = 0; k < 3; k++) {
                int i = order[o][k];
                CHECK_OK(answer_start(en, &p[i], &a[i], &e));
                if (!together) answer_wait(&a[i]);
            }
            if (together) gate_open(&g);
            for (int i = 0; i < 3; i++) {
                answer_wait(&a[i]);
                assert_int_equal(a[i].n_plp, 33);
                for (int k = 1; k < 33; k++)
                    assert_true(fabs((double)a[i].plp[k].logprob -
                                     (double)first[i].plp[k].logprob) <= 1e-5);
                answer_free(&a[i]);
            }
        }
    /* The numbers themselves: log-softmax of the logits that the same engine reports. */
    req_params lg = greedy_params(prompt[1], 33, 0);
    lg.want = WANT_LOGITS;
    answer raw;
    ask(en, &lg, &raw);
    assert_int_equal(raw.reason, FINISH_LENGTH);
    assert_int_equal(raw.out.n, 0);
    for (int k = 1; k < 33; k++) {
        const float *row = raw.logits + (k - 1) * 256;
        double sum = 0;
        for (int v = 0; v < 256; v++)
            sum += exp((double)row[v]);
        double want = (double)row[prompt[1][k]] - log(sum);
        assert_true(fabs(want - (double)first[1].plp[k].logprob) <= 1e-5);
    }
    answer_free(&raw);
    for (int i = 0; i < 3; i++)
        answer_free(&first[i]);
    engine_close(en, 1);
}

/* A seeded request beside seeded and unseeded company; two choices differ and repeat. */
static void seeds_do_not_mind_company(void **state)
{
    (void)state;
    err e = {0};
    int32_t prompt[8][30];
    engine *en = start(
        &(engine_opts){.model = ARCH "mistral_swa", .activation_dtype = "spec", .threads = 2});
    for (int i = 0; i < 8; i++)
        random_ids(prompt[i], 30, 256, (uint64_t)i + 21);
    static const int64_t seeds[] = {42, 9007199254740993, 9007199254740992, -1};
    answer solo[4];
    for (int s = 0; s < 4; s++) {
        req_params p = greedy_params(prompt[0], 30, 30);
        p.sample.temperature = 0.8;
        p.sample.has_seed = true;
        p.sample.seed = seeds[s];
        ask(en, &p, &solo[s]);
        for (int company = 1; company < 8; company += 3) {
            answer a, b[8];
            gate g;
            gate_shut(en, &g);
            CHECK_OK(answer_start(en, &p, &a, &e));
            for (int i = 1; i <= company; i++) {
                req_params q = greedy_params(prompt[i], 30 - i, 20 + i);
                q.sample.temperature = 1.1;
                q.sample.has_seed = i % 2;
                q.sample.seed = 42;
                CHECK_OK(answer_start(en, &q, &b[i], &e));
            }
            gate_open(&g);
            answer_wait(&a);
            assert_same_ids(&solo[s], &a);
            for (int i = 1; i <= company; i++) {
                answer_wait(&b[i]);
                answer_free(&b[i]);
            }
            answer_free(&a);
        }
        answer two[2], again;
        for (int c = 0; c < 2; c++) {
            p.choice = c;
            CHECK_OK(answer_start(en, &p, &two[c], &e));
        }
        for (int c = 0; c < 2; c++)
            answer_wait(&two[c]);
        assert_same_ids(&solo[s], &two[0]);
        assert_memory_not_equal(two[0].out.v, two[1].out.v, sizeof(int32_t) * 30);
        ask(en, &p, &again);
        assert_same_ids(&two[1], &again);
        answer_free(&two[0]);
        answer_free(&two[1]);
        answer_free(&again);
    }
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < a; b++) /* 2^53 and 2^53 + 1 are two seeds */
            assert_memory_not_equal(solo[a].out.v, solo[b].out.v, sizeof(int32_t) * 30);
    for (int s = 0; s < 4; s++)
        answer_free(&solo[s]);
    engine_close(en, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(goldens),
        cmocka_unit_test(batch_mates_change_nothing),
        cmocka_unit_test(batch_mates_at_the_defaults),
        cmocka_unit_test(preemption_changes_nothing),
        cmocka_unit_test(preempted_rows_are_reported_once),
        cmocka_unit_test(prefix_cache_changes_nothing),
        cmocka_unit_test(prompt_logprobs_in_any_order),
        cmocka_unit_test(seeds_do_not_mind_company),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
