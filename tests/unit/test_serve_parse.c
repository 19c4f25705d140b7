/* Request parsing against a fake engine: each fault names its field; good requests give exact
 * parameters. No socket traffic. */
#include "check.h"
#include "fake_engine.h"
#include "serve/serve_int.h"

static server *srv;
static engine *en;

static int setup(void **state)
{
    (void)state;
    err e = {0};
    static const char *const names[] = {"a", "b"};
    serve_opts o = {.host = "127.0.0.1", .names = names, .n_names = 2};
    en = fake_open(4, 4, 0);
    return serve_open(&srv, en, &o, &e);
}

static int teardown(void **state)
{
    (void)state;
    serve_close(srv);
    fake_close();
    return 0;
}

static int parse(bool chat, const char *text, gen_request *r, fault *f)
{
    buf b = {0};
    *r = (gen_request){0};
    *f = (fault){0};
    buf_puts(&b, text);
    int rc = chat ? serve__parse_chat(srv, &b, r, f) : serve__parse_completion(srv, &b, r, f);
    buf_free(&b);
    return rc;
}

typedef struct bad_case {
    bool chat;
    const char *body;
    int status;
    const char *param, *text;
} bad_case;

#define MSG "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
static const bad_case bad[] = {
    {false, "", 400, "", "no body"},
    {false, "[1]", 400, "", "JSON object"},
    {false, "{\"prompt\":\"x\"", 400, "", "JSON"},
    {false, "{\"prompt\":\"x\xff\"}", 400, "", "UTF-8"},
    {false, "{\"prompt\":\"\\ud800\"}", 400, "", "surrogate"},
    {false, "{}", 400, "prompt", "missing"},
    {false, "{\"prompt\":[]}", 400, "prompt", "empty"},
    {false, "{\"prompt\":[-1]}", 400, "prompt", "-1"},
    {false, "{\"prompt\":[300]}", 400, "prompt", "0 to 299"},
    {false, "{\"prompt\":[4294967301]}", 400, "prompt", "4294967301"},
    {false, "{\"prompt\":[1.5]}", 400, "prompt", "1.5"},
    {false, "{\"prompt\":[1e999]}", 400, "prompt", "inf"},
    {false, "{\"prompt\":[[1],[]]}", 400, "prompt", "entry 1"},
    {false, "{\"prompt\":[1,\"x\"]}", 400, "prompt", "integer"},
    {false, "{\"prompt\":{}}", 400, "prompt", "string"},
    {false, "{\"prompt\":\"x\",\"model\":\"c\"}", 404, "model", "'a', 'b'"},
    {false, "{\"prompt\":\"x\",\"model\":7}", 400, "model", "string"},
    {false, "{\"prompt\":\"x\",\"max_tokens\":-1}", 400, "max_tokens", "-1"},
    {false, "{\"prompt\":\"x\",\"max_tokens\":300}", 400, "max_tokens", "256 tokens, but 302"},
    {false, "{\"prompt\":\"x\",\"max_tokens\":\"3\"}", 400, "max_tokens", "integer"},
    {false, "{\"prompt\":\"x\",\"n\":0}", 400, "n", "between 1"},
    {false, "{\"prompt\":\"x\",\"n\":1000}", 400, "n", "between 1"},
    {false, "{\"prompt\":\"x\",\"best_of\":3}", 400, "best_of", "equals"},
    {false, "{\"prompt\":\"x\",\"suffix\":\"y\"}", 400, "suffix", "not supported"},
    {false, "{\"prompt\":\"x\",\"logprobs\":21}", 400, "logprobs", "between 0 and 20"},
    {false, "{\"prompt\":\"x\",\"logprobs\":true}", 400, "logprobs", "integer"},
    {false, "{\"prompt\":\"x\",\"temperature\":-1}", 400, "temperature", "between"},
    {false, "{\"prompt\":\"x\",\"top_p\":2}", 400, "top_p", "between"},
    {false, "{\"prompt\":\"x\",\"top_k\":-2}", 400, "top_k", "between"},
    {false, "{\"prompt\":\"x\",\"seed\":1.5}", 400, "seed", "integer"},
    {false, "{\"prompt\":\"x\",\"seed\":9223372036854775808}", 400, "seed", "between"},
    {false, "{\"prompt\":\"x\",\"logit_bias\":{\"300\":1}}", 400, "logit_bias", "300"},
    {false, "{\"prompt\":\"x\",\"logit_bias\":{\"x\":1}}", 400, "logit_bias", "'x'"},
    {false, "{\"prompt\":\"x\",\"logit_bias\":{\"\":1}}", 400, "logit_bias", "''"},
    {false, "{\"prompt\":\"x\",\"logit_bias\":{\"1\":101}}", 400, "logit_bias", "100"},
    {false, "{\"prompt\":\"x\",\"logit_bias\":[1]}", 400, "logit_bias", "object"},
    {false, "{\"prompt\":\"x\",\"stop\":[\"a\",\"\"]}", 400, "stop", "empty"},
    {false, "{\"prompt\":\"x\",\"stop\":7}", 400, "stop", "string"},
    {false, "{\"prompt\":\"x\",\"stop_token_ids\":[999999]}", 400, "stop_token_ids", "999999"},
    {false, "{\"prompt\":\"x\",\"stream_options\":{}}", 400, "stream_options", "stream"},
    {false, "{\"prompt\":\"x\",\"prompt_logprobs\":1}", 400, "prompt_logprobs", "not supported"},
    {false, "{\"prompt\":\"x\",\"min_tokens\":20,\"max_tokens\":3}", 400, "min_tokens", "larger"},
    {true, "{}", 400, "messages", "list"},
    {true, "{\"messages\":[]}", 400, "messages", "empty"},
    {true, "{\"messages\":[7]}", 400, "messages[0]", "object"},
    {true, "{\"messages\":[{\"role\":\"alien\",\"content\":\"\"}]}", 400, "messages[0]", "alien"},
    {true, "{\"messages\":[{\"role\":\"user\"}]}", 400, "messages[0]", "missing"},
    {true, "{\"messages\":[{\"role\":\"developer\"}]}", 400, "messages[0]", "missing"},
    {true, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}", 400,
     "messages[0]", "image_url"},
    {true, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}", 400,
     "messages[0]", "content[0].text"},
    {true, "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{}}]}]}", 400,
     "messages[0]", "with a name"},
    {true, "{\"messages\":[{\"role\":\"tool\",\"content\":\"x\"}]}", 400, "messages",
     "tools are not for this model"},
    {true, "{" MSG ",\"top_logprobs\":2}", 400, "top_logprobs", "logprobs"},
    {true, "{" MSG ",\"logprobs\":true,\"top_logprobs\":21}", 400, "top_logprobs", "20"},
    {true, "{" MSG ",\"logprobs\":5}", 400, "logprobs", "true or false"},
    {true, "{" MSG ",\"max_completion_tokens\":-1}", 400, "max_completion_tokens", "-1"},
    {true, "{" MSG ",\"response_format\":{\"type\":\"json_object\"}}", 400, "response_format",
     "json_object"},
    {true, "{" MSG ",\"tool_choice\":\"required\"}", 400, "tool_choice", "required"},
    {true, "{" MSG ",\"chat_template_kwargs\":{\"messages\":1}}", 400, "chat_template_kwargs",
     "messages"},
    {true, "{" MSG ",\"add_generation_prompt\":true,\"continue_final_message\":true}", 400,
     "continue_final_message", "exclude"},
};

static void test_faults_name_their_field(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        gen_request r;
        fault f;
        int rc = parse(bad[i].chat, bad[i].body, &r, &f);
        serve__gen_request_free(&r);
        if (rc == 0 || f.status != bad[i].status || strcmp(f.param, bad[i].param) ||
            !strstr(f.msg, bad[i].text))
            fail_msg("%s: rc %d, status %d, param '%s', '%s'", bad[i].body, rc, f.status, f.param,
                     f.msg);
    }
}

static void test_overlong_has_the_code(void **state)
{
    (void)state;
    gen_request r;
    fault f;
    assert_int_equal(parse(false, "{\"prompt\":\"x\",\"max_tokens\":1000}", &r, &f), -1);
    assert_string_equal(f.code, "context_length_exceeded");
    serve__gen_request_free(&r);
    buf b = {0};
    buf_puts(&b, "{\"prompt\":\"");
    for (int i = 0; i < 10000; i++)
        buf_puts(&b, "hello ");
    buf_puts(&b, "\"}");
    assert_int_equal(parse(false, b.data, &r, &f), -1);
    assert_string_equal(f.code, "context_length_exceeded");
    serve__gen_request_free(&r);
    buf_free(&b);
}

static void test_seeds_are_exact(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int64_t want;
    } cases[] = {{"9007199254740993", 9007199254740993},
                 {"-1", -1},
                 {"9223372036854775807", INT64_MAX},
                 {"-9223372036854775808", INT64_MIN},
                 {"0", 0},
                 {"1e3", 1000},
                 {"42 ", 42}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        gen_request r;
        fault f;
        char *body = xasprintf("{\"x\":{\"seed\":5,\"y\":\"}\\\"\"} , \"prompt\":\"seed\" ,\n"
                               "\"seed\" : %s }",
                               cases[i].text);
        assert_int_equal(parse(false, body, &r, &f), 0);
        assert_true(r.p.sample.has_seed);
        assert_true(r.p.sample.seed == cases[i].want);
        serve__gen_request_free(&r);
        free(body);
    }
    gen_request r;
    fault f;
    assert_int_equal(parse(false, "{\"prompt\":\"x\",\"seed\":null}", &r, &f), 0);
    assert_false(r.p.sample.has_seed);
    serve__gen_request_free(&r);
}

static void test_completion_defaults_and_shapes(void **state)
{
    (void)state;
    gen_request r;
    fault f;
    assert_int_equal(parse(false,
                           "{\"prompt\":\"xy\",\"max_tokens\":null,\"stop\":null,"
                           "\"unknown\":{\"deep\":[1,2]},\"user\":\"u\",\"model\":\"\"}",
                           &r, &f),
                     0);
    assert_int_equal(r.max_tokens, 16);
    assert_int_equal(r.n, 1);
    assert_int_equal(r.logprobs, -1);
    assert_string_equal(r.model, "a");
    assert_int_equal(r.prompts[0].ids.n, 3);
    assert_int_equal(r.prompts[0].ids.v[0], FAKE_BOS);
    serve__gen_request_free(&r);

    assert_int_equal(parse(false,
                           "{\"prompt\":[\"x\",\"yz\"],\"n\":2,\"echo\":true,\"logprobs\":0,"
                           "\"max_tokens\":0,\"model\":\"b\",\"add_special_tokens\":false}",
                           &r, &f),
                     0);
    assert_int_equal(r.n_prompts, 2);
    assert_int_equal(r.max_tokens, 0);
    assert_int_equal(r.p.want, WANT_TOKENS | WANT_LOGPROBS | WANT_PROMPT_LOGPROBS);
    assert_int_equal(r.prompts[1].ids.n, 2);
    assert_string_equal(r.prompts[1].text.data, "yz");
    assert_string_equal(r.model, "b");
    serve__gen_request_free(&r);

    assert_int_equal(parse(false,
                           "{\"prompt\":[[104,105],[299]],\"stop\":[\"a\",\"bc\"],"
                           "\"stop_token_ids\":[0,299],\"logit_bias\":{\"0\":-100,\"7\":2.5},"
                           "\"top_k\":9999999,\"min_p\":0.25,\"ignore_eos\":true,"
                           "\"skip_special_tokens\":false,\"min_tokens\":2}",
                           &r, &f),
                     0);
    assert_int_equal(r.n_prompts, 2);
    assert_int_equal(r.prompts[1].ids.v[0], 299);
    assert_int_equal(r.p.n_stops, 2);
    assert_string_equal(r.p.stops[1], "bc");
    assert_int_equal(r.p.n_stop_ids, 2);
    assert_int_equal(r.p.stop_ids[1], 299);
    assert_int_equal(r.p.sample.n_bias, 2);
    assert_int_equal(r.p.sample.bias_ids[1], 7);
    assert_true(r.p.sample.bias[1] == 2.5f);
    assert_true(r.p.sample.top_k == 9999999);
    assert_true(r.p.sample.min_p == 0.25);
    assert_true(r.p.ignore_eos && r.p.keep_special && r.p.min_tokens == 2);
    serve__gen_request_free(&r);
}

static void chat_text(const char *body, buf *out)
{
    gen_request r;
    fault f;
    buf_clear(out);
    if (parse(true, body, &r, &f) < 0) fail_msg("%s: %s", body, f.msg);
    tokenizer_decode(NULL, r.prompts[0].ids.v, r.prompts[0].ids.n, true, out);
    serve__gen_request_free(&r);
}

static void test_chat_messages(void **state)
{
    (void)state;
    buf t = {0};
    chat_text("{" MSG "}", &t);
    assert_string_equal(t.data, "user:hi\nassistant:");
    chat_text(
        "{\"messages\":[{\"role\":\"developer\",\"content\":[{\"type\":\"text\",\"text\":\"x\"},"
        "{\"type\":\"text\",\"text\":\"y\"}]},{\"role\":\"assistant\",\"content\":null}],"
        "\"tools\":[{}],\"chat_template_kwargs\":{\"mode\":\"m\"},"
        "\"add_generation_prompt\":false}",
        &t);
    assert_string_equal(t.data, "developer:[x][y]\nassistant:\ntools=1\nmode=m\n");
    chat_text("{\"messages\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\","
              "\"content\":\"The q\"}],\"continue_final_message\":true,"
              "\"add_generation_prompt\":false}",
              &t);
    assert_string_equal(t.data, "<s>user:q\nassistant:The q");
    buf_free(&t);
}

static void test_chat_limits(void **state)
{
    (void)state;
    gen_request r;
    fault f;
    assert_int_equal(parse(true, "{" MSG ",\"max_tokens\":50,\"max_completion_tokens\":3}", &r, &f),
                     0);
    assert_int_equal(r.max_tokens, 3);
    serve__gen_request_free(&r);
    assert_int_equal(parse(true, "{" MSG ",\"max_tokens\":null}", &r, &f), 0);
    assert_int_equal(r.max_tokens, -1); /* what is left of the context */
    serve__gen_request_free(&r);
    fake.no_chat = true;
    assert_int_equal(parse(true, "{" MSG "}", &r, &f), -1);
    assert_non_null(strstr(f.msg, "no chat template"));
    fake.no_chat = false;
    serve__gen_request_free(&r);
}

static void test_value_bombs(void **state)
{
    (void)state;
    gen_request r;
    fault f;
    buf b = {0};
    buf_puts(&b, "{\"prompt\":\"x\",\"y\":");
    for (int i = 0; i < 3000; i++)
        buf_putc(&b, '[');
    for (int i = 0; i < 3000; i++)
        buf_putc(&b, ']');
    buf_putc(&b, '}');
    assert_int_equal(parse(false, b.data, &r, &f), -1);
    assert_int_equal(f.status, 400);
    assert_true(strlen(f.msg) < 1000);
    serve__gen_request_free(&r);
    buf_clear(&b);
    buf_puts(&b, "{\"prompt\":[0");
    for (int i = 0; i < SERVE_MAX_VALUES; i++)
        buf_puts(&b, ",0");
    buf_puts(&b, "]}");
    assert_int_equal(parse(false, b.data, &r, &f), -1);
    assert_non_null(strstr(f.msg, "values"));
    serve__gen_request_free(&r);
    buf_free(&b);
}

static void test_raw_number(void **state)
{
    (void)state;
    size_t n = 0;
    const char *t = "{\"a\":\"\\\"seed\\\":3\",\"seed\":-12,\"seed\":5}";
    const char *p = serve__raw_number(t, strlen(t), "seed", &n);
    assert_non_null(p);
    assert_int_equal(n, 3);
    assert_memory_equal(p, "-12", 3);
    assert_null(serve__raw_number("{\"seed\":\"5\"}", 12, "seed", &n));
    assert_null(serve__raw_number("{}", 2, "seed", &n));
    assert_null(serve__raw_number("", 0, "seed", &n));
}

static void test_routes(void **state)
{
    (void)state;
    const char *rest, *allowed;
    for (int i = 0; i < serve__n_routes; i++) {
        const route *r = &serve__routes[i];
        char *path = xasprintf("%s%s", r->path, r->prefix ? "x/y" : "");
        assert_ptr_equal(serve__route_find(r->method, path, &rest, &allowed), r);
        assert_string_equal(rest, r->prefix ? "x/y" : "");
        assert_null(serve__route_find("DELETE", path, &rest, &allowed));
        assert_string_equal(allowed, r->method);
        assert_true(r->run && r->help && r->path[0] == '/');
        assert_true(!(r->open && r->generates));
        free(path);
    }
    assert_null(serve__route_find("GET", "/nothing", &rest, &allowed));
    assert_null(allowed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_faults_name_their_field),
        cmocka_unit_test(test_overlong_has_the_code),
        cmocka_unit_test(test_seeds_are_exact),
        cmocka_unit_test(test_completion_defaults_and_shapes),
        cmocka_unit_test(test_chat_messages),
        cmocka_unit_test(test_chat_limits),
        cmocka_unit_test(test_value_bombs),
        cmocka_unit_test(test_raw_number),
        cmocka_unit_test(test_routes),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
