/* One request's rules: stops, limits, ends of turn, text that is never half a character, logprobs,
 * ids that are not ids, cancels, queues, endings. Mostly on millet-7m, whose greedy texts are
 * known. */
#include "check.h"
#include "derive.h"
#include "engine_fixture.h"

static engine *millet;
static json *golden;

static int open_millet(void **state)
{
    (void)state;
    err e = {0};
    CHECK_OK(engine_open(&millet,
                         &(engine_opts){.model = MILLET, .threads = 2, .max_model_len = 4096}, &e));
    CHECK_OK(json_parse_file(&golden, MILLET "/millet_golden.json", &e));
    return 0;
}

static int close_millet(void **state)
{
    (void)state;
    assert_idle(millet);
    engine_close(millet, 1);
    json_drop(golden);
    return 0;
}

static const json *golden_at(int i)
{
    const json *c = golden->child;
    while (i-- > 0)
        c = c->next;
    return c;
}

static ids encode(const char *text)
{
    err e = {0};
    ids l = {0};
    CHECK_OK(tokenizer_encode(engine_tokenizer(millet), text, strlen(text), false, &l, &e));
    return l;
}

/* Greedy with the rules of the chat: up to the end of the turn. */
static req_params turn(const ids *prompt)
{
    req_params p = greedy_params(prompt->v, (int64_t)prompt->n, 200);
    p.ignore_eos = false;
    return p;
}

static void known_texts(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        const json *c = golden_at(i);
        ids prompt = encode(json_get(c, "prompt")->valuestring);
        answer a;
        req_params p = turn(&prompt);
        const json *want = json_get(c, "greedy_ids"), *id = want->child;
        const char *text = json_get(c, "greedy_text")->valuestring,
                   *end = strstr(text, "<|im_end|>");
        p.max_tokens = cJSON_GetArraySize(want);
        ask(millet, &p, &a);
        assert_int_equal(a.out.n, p.max_tokens);
        for (size_t k = 0; k < a.out.n; k++, id = id->next)
            assert_int_equal(a.out.v[k], id->valueint);
        size_t n = end ? (size_t)(end - text) : strlen(text); /* the golden shows the end token */
        assert_int_equal(a.text.len, n);
        assert_memory_equal(a.text.data, text, n);
        assert_int_equal(a.reason, end ? FINISH_STOP : FINISH_LENGTH);
        assert_int_equal(a.stop_id, end ? 2 : -1);
        assert_int_equal(a.output_tokens, a.out.n);
        assert_int_equal(a.prompt_tokens, prompt.n);
        answer_free(&a);
        ids_free(&prompt);
    }
}

/* What a stop list does to a known text: cut before the first match of any. */
static void check_stops(const char *const *stops, int n, bool include)
{
    const json *c = golden_at(0);
    const char *text = json_get(c, "greedy_text")->valuestring, *cut = NULL, *which = "";
    for (int i = 0; i < n; i++) {
        const char *hit = strstr(text, stops[i]);
        if (hit && (!cut || hit < cut)) cut = hit, which = stops[i];
    }
    size_t want = cut ? (size_t)(cut - text) + (include ? strlen(which) : 0)
                      : strlen(text) - strlen("<|im_end|>");
    ids prompt = encode(json_get(c, "prompt")->valuestring);
    req_params p = turn(&prompt);
    answer a;
    p.n_stops = n;
    p.include_stop = include;
    for (int i = 0; i < n; i++)
        p.stops[i] = stops[i];
    ask(millet, &p, &a);
    assert_int_equal(a.reason, FINISH_STOP);
    assert_string_equal(a.stop_text, which);
    assert_int_equal(a.stop_id, cut ? -1 : 2);
    if (a.text.len != want || memcmp(a.text.data, text, want))
        fail_msg("stop '%s': text '%.*s'", stops[0], (int)a.text.len, a.text.data);
    answer_free(&a);
    ids_free(&prompt);
}

static void stop_strings(void **state)
{
    (void)state;
    static const char *const lists[][3] = {{"= 100"},
                                           {"100 + 8"},
                                           {"08 = 2"},
                                           {"25"},
                                           {". "},
                                           {"\n####"},
                                           {"####"},
                                           {"nowhere"},
                                           {"100. 100 - "},
                                           {"457 - 194 = 263. 263 + 331", "593"},
                                           {"zzz", "4", "5 *"},
                                           {"<|im_end|>"}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        int n = 0;
        while (n < 3 && lists[i][n])
            n++;
        if (strcmp(lists[i][0], "<|im_end|>")) { /* never in the text: special tokens have none */
            check_stops(lists[i], n, false);
            check_stops(lists[i], n, true);
        }
    }
}

/* Handed out piece by piece, nothing that was sent is ever taken back, and no piece holds the start
 * of a stop string that came true. */
typedef struct pieces {
    buf all;
    const char *stop;
    bool leaked, done;
} pieces;

static void piece_sink(void *arg, const engine_event *ev)
{
    pieces *p = arg;
    if (ev->kind != EV_TOKEN && ev->kind != EV_DONE) return;
    buf_add(&p->all, ev->text, ev->text_len);
    if (p->all.len && p->all.data[p->all.len - 1] == '=') p->leaked = true; /* "= 208" begins so */
    if (ev->kind == EV_DONE) __atomic_store_n(&p->done, true, __ATOMIC_RELEASE);
}

static void held_back(void **state)
{
    (void)state;
    err e = {0};
    uint64_t id;
    ids prompt = encode(json_get(golden_at(0), "prompt")->valuestring);
    pieces got = {0};
    req_params p = turn(&prompt);
    p.stops[0] = "= 208";
    p.n_stops = 1;
    p.sink = piece_sink;
    p.sink_arg = &got;
    CHECK_OK(engine_submit(millet, &p, &id, &e));
    while (!__atomic_load_n(&got.done, __ATOMIC_ACQUIRE))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    assert_false(got.leaked);
    assert_string_equal(got.all.data, "25 * 4 = 100. 100 + 8 = 108. 100 + 108 ");
    buf_free(&got.all);
    ids_free(&prompt);
}

/* ---- forced tokens ------------------------------------------------------------------------------
 */

static void force(req_params *p, const int32_t *id, const float *bias)
{
    p->sample.bias_ids = id;
    p->sample.bias = bias;
    p->sample.n_bias = 1;
}

static int32_t byte_token(uint8_t byte)
{
    for (int32_t i = 0; i < 1007; i++) {
        buf b = {0};
        tokenizer_token_bytes(engine_tokenizer(millet), i, &b);
        bool hit = b.len == 1 && (uint8_t)b.data[0] == byte;
        buf_free(&b);
        if (hit) return i;
    }
    return -1;
}

static void half_characters(void **state)
{
    (void)state;
    ids prompt = encode("x");
    float bias = 100;
    int32_t id = byte_token(0xF0);
    if (id < 0) id = byte_token(0xE4);
    assert_true(id >= 0);
    for (int n = 1; n <= 3; n++) {
        req_params p = greedy_params(prompt.v, (int64_t)prompt.n, n);
        answer a;
        force(&p, &id, &bias);
        ask(millet, &p, &a);
        assert_int_equal(a.reason, FINISH_LENGTH);
        assert_int_equal(a.output_tokens, n);
        for (int k = 0; k < n; k++)
            assert_memory_equal(a.text.data + 3 * k, "\xEF\xBF\xBD", 3); /* U+FFFD each */
        assert_int_equal(a.text.len, 3 * n);
        answer_free(&a);
    }
    ids_free(&prompt);
}

/* A row of the model that the tokenizer has no string for. */
static void padded_vocabulary(void **state)
{
    (void)state;
    ids prompt = encode("a b");
    float bias = 100;
    int32_t id = 1500;
    req_params p = greedy_params(prompt.v, (int64_t)prompt.n, 4);
    answer a;
    force(&p, &id, &bias);
    p.want = WANT_TOKENS | WANT_LOGPROBS;
    p.top_logprobs = 20;
    p.stops[0] = "x";
    p.n_stops = 1;
    ask(millet, &p, &a);
    assert_int_equal(a.out.n, 4);
    assert_int_equal(a.out.v[3], 1500);
    assert_int_equal(a.text.len, 0);
    assert_int_equal(a.reason, FINISH_LENGTH);
    for (int64_t i = 0; i < a.n_lp; i++)
        assert_true(isfinite(a.lp[i].logprob));
    answer_free(&a);
    ids_free(&prompt);
}

/* End tokens of config.json, generation_config.json and the tokenizer all end a turn. */
static void every_eos(void **state)
{
    (void)state;
    err e = {0};
    engine *en;
    int n;
    char dir[] = "/tmp/tare_req_XXXXXX", name[128];
    derive(dir, MILLET);
    derive_edit(dir, "config.json", "\"eos_token_id\": 2", "\"eos_token_id\": 0");
    derive_edit(dir, "generation_config.json", "\"eos_token_id\": 2", "\"eos_token_id\": [0, 7]");
    snprintf(name, sizeof name, "\"eos_token\": \"%s\"",
             tokenizer_token_name(engine_tokenizer(millet), 9));
    derive_edit(dir, "tokenizer_config.json", "\"eos_token\": \"<|im_end|>\"", name);
    CHECK_OK(
        engine_open(&en, &(engine_opts){.model = dir, .threads = 1, .max_model_len = 256}, &e));
    const int32_t *eos = engine_eos(en, &n);
    assert_int_equal(n, 3);
    for (int i = 0; i < n; i++) { /* id 0 is an id */
        int32_t prompt[] = {40, 41, 42}, want[] = {0, 7, 9};
        float bias = 200;
        assert_int_equal(eos[i], want[i]);
        req_params p = greedy_params(prompt, 3, 5);
        answer a;
        p.ignore_eos = false;
        force(&p, &want[i], &bias);
        ask(en, &p, &a);
        assert_int_equal(a.reason, FINISH_STOP);
        assert_int_equal(a.stop_id, want[i]);
        assert_int_equal(a.output_tokens, 1);
        assert_int_equal(a.text.len, 0);
        answer_free(&a);
        p.min_tokens = 3; /* banned for three tokens, then it comes */
        ask(en, &p, &a);
        assert_int_equal(a.output_tokens, 4);
        assert_int_equal(a.out.v[3], want[i]);
        answer_free(&a);
        p.min_tokens = 0;
        p.ignore_eos = true;
        ask(en, &p, &a);
        assert_int_equal(a.reason, FINISH_LENGTH);
        assert_int_equal(a.output_tokens, 5);
        answer_free(&a);
        int32_t stop = 100;
        p.stop_ids = &stop;
        p.n_stop_ids = 1;
        force(&p, &stop, &bias);
        ask(en, &p, &a);
        assert_int_equal(a.stop_id, 100);
        assert_int_equal(a.output_tokens, 1);
        answer_free(&a);
    }
    engine_close(en, 1);
    derive_remove(dir);
}

/* min_tokens holds stop strings off as well. */
static void min_tokens_and_stops(void **state)
{
    (void)state;
    ids prompt = encode(json_get(golden_at(0), "prompt")->valuestring);
    req_params p = turn(&prompt);
    answer a;
    p.stops[0] = "25";
    p.n_stops = 1;
    p.min_tokens = 10;
    ask(millet, &p, &a);
    assert_true(a.output_tokens > 10);
    answer_free(&a);
    ids_free(&prompt);
}

static void logprobs_of_tokens(void **state)
{
    (void)state;
    ids prompt = encode(json_get(golden_at(1), "prompt")->valuestring);
    req_params p = turn(&prompt);
    answer a, b;
    p.want = WANT_TOKENS | WANT_LOGPROBS;
    p.top_logprobs = 5;
    ask(millet, &p, &a);
    assert_int_equal(a.n_lp, a.out.n);
    for (int64_t i = 0; i < a.n_lp; i++) {
        assert_int_equal(a.lp[i].id, a.out.v[i]);
        assert_int_equal(a.lp[i].n_top, 5);
        assert_int_equal(a.lp[i].top_id[0], a.lp[i].id); /* greedy: it is the best */
        assert_memory_equal(&a.lp[i].top_logprob[0], &a.lp[i].logprob, sizeof(float));
    }
    /* Temperature and filters choose; they do not change what is reported. */
    p.sample.temperature = 0.01;
    p.sample.top_k = 3;
    p.sample.has_seed = true;
    ask(millet, &p, &b);
    assert_same_ids(&a, &b);
    for (int64_t i = 0; i < a.n_lp; i++)
        assert_true(fabs((double)a.lp[i].logprob - (double)b.lp[i].logprob) < 1e-4);
    answer_free(&a);
    answer_free(&b);
    ids_free(&prompt);
}

/* ---- what is refused ----------------------------------------------------------------------------
 */

static void bad_requests(void **state)
{
    (void)state;
    err e = {0};
    uint64_t id;
    int32_t good[] = {5, 6, 7}, bad[] = {5, -1, 7}, high[] = {5, 2048}, stop = 999999, b_id = 99999;
    float bias = 5, nan_bias = NAN;
    req_params p = greedy_params(bad, 3, 4);
    CHECK_ERR(engine_submit(millet, &p, &id, &e), ERR_VALUE, "-1");
    p = greedy_params(high, 2, 4);
    CHECK_ERR(engine_submit(millet, &p, &id, &e), ERR_VALUE, "2048");
    p = greedy_params(good, 0, 4);
    CHECK_ERR(engine_submit(millet, &p, &id, &e), ERR_VALUE, "prompt");
    p = greedy_params(good, 3, -1);
    CHECK_ERR(engine_submit(millet, &p, &id, &e), ERR_VALUE, "max_tokens");
    p = greedy_params(good, 3, 4096);
    CHECK_ERR(engine_submit(millet, &p, &id, &e), ERR_TOOLONG, "4096");
    assert_non_null(strstr(e.msg, "3 in the prompt"));
    p = greedy_params(good, 3, INT64_MAX);
    CHECK_ERR(engine_submit(millet, &p, &id, &e), ERR_TOOLONG, "maximum context length");
    p = greedy_params(good, 3, 4);
    p.stop_ids = &stop;
    p.n_stop_ids = 1;
    CHECK_ERR(engine_submit(millet, &p, &id, &e), ERR_VALUE, "stop_token_ids");
    p = greedy_params(good, 3, 4);
    force(&p, &b_id, &bias);
    CHECK_ERR(engine_submit(millet, &p, &id, &e), ERR_VALUE, "logit_bias");
    force(&p, good, &nan_bias);
    CHECK_ERR(engine_submit(millet, &p, &id, &e), ERR_VALUE, "logit_bias");
    p = greedy_params(good, 3, 4);
    p.top_logprobs = 21;
    CHECK_ERR(engine_submit(millet, &p, &id, &e), ERR_VALUE, "top_logprobs");
    static const double wrong[] = {-0.1, NAN, INFINITY};
    for (int i = 0; i < 3; i++) {
        p = greedy_params(good, 3, 4);
        p.sample.temperature = wrong[i];
        CHECK_ERR(engine_submit(millet, &p, &id, &e), ERR_VALUE, "temperature");
        p = greedy_params(good, 3, 4);
        p.sample.top_p = wrong[i];
        CHECK_ERR(engine_submit(millet, &p, &id, &e), ERR_VALUE, "top_p");
        p = greedy_params(good, 3, 4);
        p.sample.repetition_penalty = wrong[i];
        CHECK_ERR(engine_submit(millet, &p, &id, &e), ERR_VALUE, "repetition_penalty");
    }
    /* After all this: a normal one, with a top-k beyond the vocabulary. */
    answer a, b;
    p = greedy_params(good, 3, 8);
    ask(millet, &p, &a);
    p.sample.top_k = 9999999;
    ask(millet, &p, &b);
    assert_same_ids(&a, &b);
    answer_free(&a);
    answer_free(&b);
}

/* ---- cancel, queue, close -----------------------------------------------------------------------
 */

static void cancels(void **state)
{
    (void)state;
    err e = {0};
    engine *en;
    int32_t prompt[] = {40, 41, 42};
    answer a, b, c, rush[8];
    CHECK_OK(engine_open(
        &en, &(engine_opts){.model = MILLET, .threads = 1, .max_running = 1, .max_model_len = 4096},
        &e));
    req_params p = greedy_params(prompt, 3, 4000);
    CHECK_OK(answer_start(en, &p, &a, &e));
    answer_wait_tokens(&a, 3);
    p.max_tokens = 10;
    CHECK_OK(answer_start(en, &p, &b, &e));
    CHECK_OK(answer_start(en, &p, &c, &e));
    engine_cancel(en, b.id);
    answer_wait(&b);
    assert_int_equal(b.reason, FINISH_CANCELLED);
    assert_int_equal(b.out.n, 0);
    assert_int_equal(a.done, 0); /* the running one is unharmed */
    engine_cancel(en, 123456789);
    engine_cancel(en, a.id);
    engine_cancel(en, a.id);
    answer_wait(&a);
    assert_int_equal(a.reason, FINISH_CANCELLED);
    assert_true(a.out.n >= 3 && a.out.n < 4000);
    answer_wait(&c);
    assert_int_equal(c.reason, FINISH_LENGTH);
    assert_int_equal(c.out.n, 10);
    engine_cancel(en, c.id); /* finished: ignored */
    p.max_tokens = 3000;
    for (int i = 0; i < 8; i++)
        CHECK_OK(answer_start(en, &p, &rush[i], &e));
    for (int i = 0; i < 8; i++)
        engine_cancel(en, rush[i].id);
    for (int i = 0; i < 8; i++) {
        answer_wait(&rush[i]);
        assert_int_equal(rush[i].reason, FINISH_CANCELLED);
        assert_int_equal(rush[i].done, 1);
        answer_free(&rush[i]);
    }
    assert_idle(en);
    engine_stats s;
    engine_get_stats(en, &s);
    assert_int_equal(s.cancelled, 10);
    assert_int_equal(s.finished_length, 1);
    answer_free(&a);
    answer_free(&b);
    answer_free(&c);
    engine_close(en, 0);
}

static void full_queue_and_close(void **state)
{
    (void)state;
    err e = {0};
    engine *en;
    gate g;
    int32_t prompt[] = {40, 41, 42};
    answer a[4];
    uint64_t id;
    CHECK_OK(engine_open(
        &en, &(engine_opts){.model = ARCH "llama", .threads = 1, .max_running = 1, .max_queued = 3},
        &e));
    req_params p = greedy_params(prompt, 3, 20);
    gate_shut(en, &g);
    for (int i = 0; i < 3; i++)
        CHECK_OK(answer_start(en, &p, &a[i], &e));
    p.sink = NULL;
    int rc = 0, more = 0;
    while ((rc = engine_submit(en, &p, &id, &e)) == 0)
        more++;
    assert_int_equal(rc, -ERR_BUSY);
    assert_true(more <= 1); /* the slot of the one at the gate */
    gate_open(&g);
    engine_close(en, 20); /* drains */
    for (int i = 0; i < 3; i++) {
        assert_int_equal(a[i].done, 1);
        assert_int_equal(a[i].reason, FINISH_LENGTH);
        assert_int_equal(a[i].out.n, 20);
        answer_free(&a[i]);
    }
    /* Without time to drain: every request is told. */
    CHECK_OK(engine_open(
        &en, &(engine_opts){.model = MILLET, .threads = 1, .max_running = 2, .max_model_len = 4096},
        &e));
    p = greedy_params(prompt, 3, 4000);
    for (int i = 0; i < 4; i++)
        CHECK_OK(answer_start(en, &p, &a[i], &e));
    answer_wait_tokens(&a[0], 1);
    engine_close(en, 0);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(a[i].done, 1);
        assert_int_equal(a[i].reason, FINISH_CANCELLED);
        answer_free(&a[i]);
    }
}

static void prompt_only(void **state)
{
    (void)state;
    int32_t prompt[40];
    answer a;
    random_ids(prompt, 40, 1007, 8);
    req_params p = greedy_params(prompt, 40, 0);
    p.want = WANT_PROMPT_LOGPROBS;
    ask(millet, &p, &a);
    assert_int_equal(a.reason, FINISH_LENGTH);
    assert_int_equal(a.n_plp, 40);
    assert_int_equal(a.output_tokens, 0);
    answer_free(&a);
}

static void counters(void **state)
{
    (void)state;
    engine_stats before, after;
    int32_t prompt[40];
    answer a;
    random_ids(prompt, 40, 1007, 123);
    assert_idle(millet);
    engine_get_stats(millet, &before);
    req_params p = greedy_params(prompt, 40, 10);
    ask(millet, &p, &a);
    assert_idle(millet);
    engine_get_stats(millet, &after);
    assert_int_equal(after.requests - before.requests, 1);
    assert_int_equal(after.prompt_tokens - before.prompt_tokens, 40);
    assert_int_equal(after.output_tokens - before.output_tokens, 10);
    assert_int_equal(after.finished_length - before.finished_length, 1);
    assert_true(after.steps - before.steps >= 10);
    uint64_t ttft = 0, itl = 0, e2e = 0;
    for (int i = 0; i < 24; i++) {
        ttft = after.ttft[i] - before.ttft[i]; /* cumulative: the last bucket has all */
        itl = after.itl[i] - before.itl[i];
        e2e = after.e2e[i] - before.e2e[i];
    }
    assert_int_equal(ttft, 1);
    assert_int_equal(itl, 9);
    assert_int_equal(e2e, 1);
    assert_true(after.e2e_sum > before.e2e_sum && after.ttft_sum > before.ttft_sum);
    answer_free(&a);
}

static void chat_ids(void **state)
{
    (void)state;
    err e = {0};
    json *m = NULL;
    ids l = {0};
    static const char text[] = "[{\"role\":\"user\",\"content\":\"How are you?\"}]";
    CHECK_OK(json_parse(&m, text, strlen(text), "test", &e));
    CHECK_OK(engine_chat_ids(millet, m, NULL, true, &l, &e));
    ids want = encode("<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n");
    assert_int_equal(l.n, want.n);
    assert_memory_equal(l.v, want.v, sizeof(int32_t) * l.n);
    json_drop(m);
    ids_free(&l);
    ids_free(&want);
}

static void blocking_generate(void **state)
{
    (void)state;
    err e = {0};
    gen_result r;
    ids prompt = encode(json_get(golden_at(2), "prompt")->valuestring);
    req_params p = turn(&prompt);
    p.want = WANT_TOKENS | WANT_LOGPROBS | WANT_PROMPT_LOGPROBS;
    CHECK_OK(engine_generate(millet, &p, &r, &e));
    assert_int_equal(r.out.n, r.n_logprobs);
    assert_int_equal(r.n_prompt_logprobs, prompt.n);
    assert_int_equal(r.reason, FINISH_STOP);
    assert_true(r.ttft_s > 0 && r.total_s >= r.ttft_s);
    gen_result_free(&r);
    p.n_prompt = 0;
    CHECK_ERR(engine_generate(millet, &p, &r, &e), ERR_VALUE, "prompt");
    gen_result_free(&r);
    ids_free(&prompt);
}

/* ---- damage -------------------------------------------------------------------------------------
 */

static void poison_head(const char *name, uint8_t *data, uint64_t bytes, void *arg)
{
    (void)bytes;
    (void)arg;
    if (strcmp(name, "lm_head.weight")) return;
    data[0] = 0xC0;
    data[1] = 0x7F; /* NaN */
}

static void logits_that_are_not_numbers(void **state)
{
    (void)state;
    err e = {0};
    engine *en = NULL;
    char dir[] = "/tmp/tare_req_XXXXXX";
    derive(dir, ARCH "llama");
    derive_tensors(dir, poison_head, NULL, NULL, NULL, NULL);
    if (engine_open(&en, &(engine_opts){.model = dir, .threads = 1}, &e) == 0) {
        int32_t prompt[] = {5, 6, 7};
        answer a;
        req_params p = greedy_params(prompt, 3, 5);
        ask(en, &p, &a);
        assert_int_equal(a.reason, FINISH_ERROR);
        assert_non_null(strstr(a.e.msg, "not finite"));
        answer_free(&a);
        p.want = WANT_TOKENS | WANT_LOGPROBS | WANT_PROMPT_LOGPROBS;
        ask(en, &p, &a);
        assert_int_equal(a.reason, FINISH_ERROR);
        answer_free(&a);
        assert_idle(en);
        engine_close(en, 1);
    } else { /* or the loader found it first */
        assert_non_null(strstr(e.msg, "lm_head"));
    }
    derive_remove(dir);
}

/* Two channels of the key bias above what E4M3 holds: clipped, counted, never NaN. */
static void big_key_bias(const char *name, uint8_t *data, uint64_t bytes, void *arg)
{
    (void)bytes;
    (void)arg;
    if (!strstr(name, "k_proj.bias")) return;
    uint16_t v = 0x4416; /* 600 in bf16 */
    memcpy(data + 2 * 3, &v, 2);
    memcpy(data + 2 * 7, &v, 2);
}

static void keys_beyond_fp8(void **state)
{
    (void)state;
    char dir[] = "/tmp/tare_req_XXXXXX";
    static const char *const formats[] = {"bf16", "fp8_e4m3", "fp8_e5m2", "int8", "fp4"};
    derive(dir, ARCH "qwen2");
    derive_tensors(dir, big_key_bias, NULL, NULL, NULL, NULL);
    for (int i = 0; i < 5; i++) {
        err e = {0};
        engine *en;
        engine_stats s;
        int32_t prompt[33];
        answer a;
        random_ids(prompt, 33, 256, 4);
        CHECK_OK(engine_open(
            &en, &(engine_opts){.model = dir, .threads = 1, .kv_cache_dtype = formats[i]}, &e));
        req_params p = greedy_params(prompt, 33, 5);
        p.want = WANT_TOKENS | WANT_LOGPROBS | WANT_LOGITS;
        ask(en, &p, &a);
        assert_int_equal(a.reason, FINISH_LENGTH);
        for (int64_t k = 0; k < a.n_logits * a.vocab; k++)
            assert_true(isfinite(a.logits[k]));
        assert_idle(en);
        engine_get_stats(en, &s);
        print_message("%-9s %d elements clipped\n", formats[i], (int)s.kv_clipped);
        if (strcmp(formats[i], "fp8_e4m3"))
            assert_int_equal(s.kv_clipped, 0);
        else
            assert_true(s.kv_clipped > 33); /* in each of two layers, many of 37 tokens */
        answer_free(&a);
        engine_close(en, 1);
    }
    derive_remove(dir);
}

static void options_refused(void **state)
{
    (void)state;
    static const struct {
        engine_opts o;
        int code;
        const char *says;
    } c[] = {
        {{.model = MILLET, .kv_cache_dtype = "fp9"}, ERR_USAGE, "fp8_e4m3"},
        {{.model = MILLET, .activation_dtype = "fp3"}, ERR_USAGE, "spec"},
        {{.model = MILLET, .cpu_features = "vax"}, ERR_USAGE, "vax"},
        {{.model = MILLET, .device = "abacus"}, ERR_UNSUPPORTED, "abacus"},
        {{.model = MILLET, .page_tokens = -3}, ERR_USAGE, "-3"},
        {{.model = MILLET, .mem_fraction = 1.5}, ERR_USAGE, "1.5"},
        {{.model = MILLET, .quantization = "int11"}, ERR_USAGE, "int11"},
        {{.model = MILLET, .max_model_len = 5000, .max_total_tokens = 1000}, ERR_NOMEM, "5000"},
        {{.model = MILLET, .mem_fraction = 1e-7}, ERR_NOMEM, "weights"},
        {{.model = "tests/fixtures/tiny/stories260K", .quantization = "int4"},
         ERR_UNSUPPORTED,
         "self_attn.q_proj"},
        {{.model = "no/such/folder"}, ERR_NOTFOUND, "no/such/folder"},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        err e = {0};
        engine *en = NULL;
        int rc = engine_open(&en, &c[i].o, &e);
        if (rc != -c[i].code || !strstr(e.msg, c[i].says))
            fail_msg("case %d: %d %s", (int)i, rc, e.msg);
        assert_null(en);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_texts),
        cmocka_unit_test(stop_strings),
        cmocka_unit_test(held_back),
        cmocka_unit_test(half_characters),
        cmocka_unit_test(padded_vocabulary),
        cmocka_unit_test(every_eos),
        cmocka_unit_test(min_tokens_and_stops),
        cmocka_unit_test(logprobs_of_tokens),
        cmocka_unit_test(bad_requests),
        cmocka_unit_test(cancels),
        cmocka_unit_test(full_queue_and_close),
        cmocka_unit_test(prompt_only),
        cmocka_unit_test(counters),
        cmocka_unit_test(chat_ids),
        cmocka_unit_test(blocking_generate),
        cmocka_unit_test(logits_that_are_not_numbers),
        cmocka_unit_test(keys_beyond_fp8),
        cmocka_unit_test(options_refused),
    };
    return cmocka_run_group_tests(tests, open_millet, close_millet);
}
