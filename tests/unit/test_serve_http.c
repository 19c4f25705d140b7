/* The server over a real loopback socket with a fake engine: shapes of replies and streams, faults
 * that come as HTTP statuses, clients that leave, full queues, drain. */
#include "check.h"
#include "fake_engine.h"
#include "http_client.h"
#include "base/thread.h"
#include "serve/serve_int.h"

static server *srv;
static engine *en;
static int port;

static void start(int64_t max_running, int64_t max_queued, int step_us, const char *key)
{
    err e = {0};
    serve_opts o = {.host = "127.0.0.1", .api_key = key, .max_body_bytes = 1 << 20};
    en = fake_open(max_running, max_queued, step_us);
    CHECK_OK(serve_open(&srv, en, &o, &e));
    port = serve_port(srv);
    assert_true(port > 0);
}

static void stop(void)
{
    serve_close(srv);
    fake_close();
    srv = NULL;
}

static void pause_ms(int ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&t, NULL);
}

static json *body_json(const reply *r)
{
    err e = {0};
    json *j = NULL;
    if (json_parse(&j, r->body.data, r->body.len, "reply", &e) < 0)
        fail_msg("%s: %s", e.msg, r->body.data);
    return j;
}

/* at(j, "choices.0.text") */
static const json *at(const json *j, const char *path)
{
    char key[64];
    while (j && *path) {
        size_t n = strcspn(path, ".");
        snprintf(key, sizeof key, "%.*s", (int)n, path);
        j = cJSON_IsArray(j) ? cJSON_GetArrayItem(j, (int)strtol(key, NULL, 10)) : json_get(j, key);
        path += n + (path[n] == '.');
    }
    return j;
}

static const char *str_at(const json *j, const char *path)
{
    const json *v = at(j, path);
    return v && cJSON_IsString(v) ? v->valuestring : "(none)";
}

static double num_at(const json *j, const char *path)
{
    const json *v = at(j, path);
    return v && cJSON_IsNumber(v) ? v->valuedouble : NAN;
}

static reply post(const char *path, const char *body)
{
    return http(port, "POST", path, "", body);
}

static json *post_json(const char *path, const char *body, int status)
{
    reply r = post(path, body);
    if (r.status != status) fail_msg("%s %s: %d %s", path, body, r.status, r.body.data);
    json *j = body_json(&r);
    reply_free(&r);
    return j;
}

/* Events of a stream, without "data: "; the last must be [DONE] (checked, not returned). */
typedef struct events {
    json *v[256];
    int n;
} events;

static events stream_of(const char *path, const char *body)
{
    events ev = {.n = 0};
    reply r = post(path, body);
    assert_int_equal(r.status, 200);
    assert_non_null(strcasestr(r.head.data, "content-type: text/event-stream"));
    char *p = r.body.data;
    bool done = false;
    while (*p) {
        char *end = strstr(p, "\n\n");
        assert_non_null(end);
        assert_false(done);
        assert_memory_equal(p, "data: ", 6);
        *end = 0;
        assert_null(strchr(p, '\n'));
        if (!strcmp(p, "data: [DONE]")) {
            done = true;
        } else {
            err e = {0};
            assert_true(ev.n < 256);
            CHECK_OK(json_parse(&ev.v[ev.n++], p + 6, strlen(p + 6), "event", &e));
        }
        p = end + 2;
    }
    assert_true(done);
    reply_free(&r);
    return ev;
}

static void events_drop(events *ev)
{
    for (int i = 0; i < ev->n; i++)
        json_drop(ev->v[i]);
}

#define MSG "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"

/* ---- completions
 * --------------------------------------------------------------------------------- */

static void test_completion(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    json *j = post_json("/v1/completions", "{\"prompt\":[1,2],\"max_tokens\":3}", 200);
    assert_memory_equal(str_at(j, "id"), "cmpl-", 5);
    assert_string_equal(str_at(j, "object"), "text_completion");
    assert_string_equal(str_at(j, "model"), "models/fake");
    assert_string_equal(str_at(j, "choices.0.text"), "def");
    assert_string_equal(str_at(j, "choices.0.finish_reason"), "length");
    assert_true(cJSON_IsNull(at(j, "choices.0.logprobs")));
    assert_true(num_at(j, "usage.prompt_tokens") == 2);
    assert_true(num_at(j, "usage.completion_tokens") == 3);
    assert_true(num_at(j, "usage.total_tokens") == 5);
    assert_true(num_at(j, "usage.prompt_tokens_details.cached_tokens") == 2);
    json_drop(j);
    stop();
}

static void test_batch_and_n(void **state)
{
    (void)state;
    start(4, 4, 0, NULL); /* fewer places than choices: the rest must follow by itself */
    json *j = post_json("/v1/completions",
                        "{\"prompt\":[[0],[1],[2],[3],[4],[5],[6],[7],[8],[9]],\"n\":5,"
                        "\"max_tokens\":2,\"seed\":0}",
                        200);
    assert_int_equal(cJSON_GetArraySize(at(j, "choices")), 50);
    int i = 0;
    for (const json *c = at(j, "choices")->child; c; c = c->next, i++) {
        char want[3] = {(char)('a' + (i / 5 + 7 * (i % 5)) % 26),
                        (char)('a' + (i / 5 + 7 * (i % 5) + 1) % 26), 0};
        assert_true(num_at(c, "index") == i);
        assert_string_equal(str_at(c, "text"), want);
    }
    assert_true(num_at(j, "usage.prompt_tokens") == 10);
    assert_true(num_at(j, "usage.completion_tokens") == 100);
    json_drop(j);
    stop();
}

static void test_echo_logprobs(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    json *j = post_json("/v1/completions",
                        "{\"prompt\":[97,195,169,98],\"max_tokens\":1,\"logprobs\":1,\"echo\":true,"
                        "\"temperature\":0}",
                        200);
    const json *lp = at(j, "choices.0.logprobs");
    static const char *const arrays[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    for (int i = 0; i < 4; i++)
        assert_int_equal(cJSON_GetArraySize(at(lp, arrays[i])), 5);
    assert_true(cJSON_IsNull(at(lp, "token_logprobs.0")));
    assert_true(cJSON_IsNull(at(lp, "top_logprobs.0")));
    assert_true(num_at(lp, "token_logprobs.1") == -0.75);
    assert_true(num_at(lp, "token_logprobs.2") == -0.25);
    assert_true(num_at(lp, "token_logprobs.4") == -0.125);
    assert_string_equal(str_at(lp, "tokens.0"), "a");
    /* the two tokens of one character share its offset */
    static const int offsets[] = {0, 1, 1, 2, 3};
    for (int i = 0; i < 5; i++)
        assert_int_equal(at(lp, "text_offset")->type, cJSON_Array);
    for (int i = 0; i < 5; i++)
        assert_int_equal(cJSON_GetArrayItem(at(lp, "text_offset"), i)->valueint, offsets[i]);
    assert_memory_equal(str_at(j, "choices.0.text"),
                        "a\xc3\xa9"
                        "b",
                        4);
    assert_string_equal(at(lp, "top_logprobs.4")->child->string, str_at(lp, "tokens.4"));
    json_drop(j);

    j = post_json("/v1/completions",
                  "{\"prompt\":\"hi\",\"max_tokens\":0,\"logprobs\":2,\"echo\":true}", 200);
    assert_string_equal(str_at(j, "choices.0.text"), "hi");
    assert_string_equal(str_at(j, "choices.0.finish_reason"), "length");
    assert_int_equal(cJSON_GetArraySize(at(j, "choices.0.logprobs.tokens")), 3);
    assert_true(num_at(j, "choices.0.logprobs.text_offset.1") == 0); /* <s> has no text here */
    assert_int_equal(cJSON_GetArraySize(at(j, "choices.0.logprobs.top_logprobs.1")), 2);
    assert_true(num_at(j, "usage.completion_tokens") == 0);
    json_drop(j);
    stop();
}

static void test_completion_stream_adds_up(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    events ev = stream_of("/v1/completions",
                          "{\"prompt\":\"hey\",\"max_tokens\":6,\"logprobs\":2,\"echo\":true,"
                          "\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
    json *j = post_json("/v1/completions",
                        "{\"prompt\":\"hey\",\"max_tokens\":6,\"logprobs\":2,\"echo\":true}", 200);
    static const char *const arrays[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    json *sum = cJSON_CreateObject();
    buf text = {0};
    for (int a = 0; a < 4; a++)
        cJSON_AddItemToObject(sum, arrays[a], cJSON_CreateArray());
    for (int i = 0; i < ev.n - 1; i++) {
        buf_puts(&text, str_at(ev.v[i], "choices.0.text"));
        assert_true(cJSON_IsNull(at(ev.v[i], "usage")));
        const json *lp = at(ev.v[i], "choices.0.logprobs");
        if (!cJSON_IsObject(lp)) continue;
        for (int a = 0; a < 4; a++)
            for (const json *v = at(lp, arrays[a])->child; v; v = v->next)
                cJSON_AddItemToArray(cJSON_GetObjectItem(sum, arrays[a]), cJSON_Duplicate(v, 1));
    }
    assert_string_equal(text.data, str_at(j, "choices.0.text"));
    assert_true(cJSON_Compare(sum, at(j, "choices.0.logprobs"), 1));
    assert_int_equal(cJSON_GetArraySize(at(ev.v[ev.n - 1], "choices")), 0);
    assert_true(cJSON_Compare(at(ev.v[ev.n - 1], "usage"), at(j, "usage"), 1));
    assert_string_equal(str_at(ev.v[ev.n - 2], "choices.0.finish_reason"), "length");
    buf_free(&text);
    json_drop(sum);
    json_drop(j);
    events_drop(&ev);
    stop();
}

static void test_stream_finishes_each_index_once(void **state)
{
    (void)state;
    start(8, 16, 0, NULL);
    events ev = stream_of("/v1/completions", "{\"prompt\":[[0],[1]],\"n\":3,\"max_tokens\":4,"
                                             "\"stop\":[\"hi\"],\"stream\":true}");
    int finished[6] = {0};
    char text[6][32] = {{0}};
    for (int i = 0; i < ev.n; i++) {
        int k = (int)num_at(ev.v[i], "choices.0.index");
        assert_in_range(k, 0, 5);
        assert_null(at(ev.v[i], "usage"));
        assert_int_equal(cJSON_GetArraySize(at(ev.v[i], "choices")), 1);
        assert_int_equal(finished[k], 0);
        size_t n = strlen(text[k]);
        snprintf(text[k] + n, sizeof text[k] - n, "%s", str_at(ev.v[i], "choices.0.text"));
        const char *why = str_at(ev.v[i], "choices.0.finish_reason");
        if (strcmp(why, "(none)") == 0) continue;
        finished[k]++;
        assert_string_equal(why, k == 1 ? "stop" : "length");
        if (k == 1) assert_string_equal(str_at(ev.v[i], "choices.0.stop_reason"), "hi");
    }
    for (int k = 0; k < 6; k++)
        assert_int_equal(finished[k], 1);
    assert_string_equal(text[0], "abcd");
    assert_string_equal(text[1], "");
    assert_string_equal(text[4], "ijkl");
    events_drop(&ev);
    stop();
}

static void test_split_character(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    json *j = post_json("/v1/completions",
                        "{\"prompt\":\"x\",\"max_tokens\":2,\"logprobs\":0,"
                        "\"logit_bias\":{\"240\":100}}",
                        200);
    assert_string_equal(str_at(j, "choices.0.text"), "\xef\xbf\xbd\xef\xbf\xbd");
    assert_int_equal(cJSON_GetArraySize(at(j, "choices.0.logprobs.tokens")), 2);
    json_drop(j);
    j = post_json("/v1/completions",
                  "{\"prompt\":\"x\",\"max_tokens\":2,\"logprobs\":1,"
                  "\"stop\":[\"x\"],\"logit_bias\":{\"290\":100}}",
                  200);
    assert_string_equal(str_at(j, "choices.0.text"), ""); /* an id without a string */
    assert_true(num_at(j, "usage.completion_tokens") == 2);
    json_drop(j);
    j = post_json("/v1/completions",
                  "{\"prompt\":\"x\",\"max_tokens\":9,"
                  "\"logit_bias\":{\"257\":100}}",
                  200);
    assert_string_equal(str_at(j, "choices.0.text"), "");
    assert_string_equal(str_at(j, "choices.0.finish_reason"), "stop");
    assert_true(cJSON_IsNull(at(j, "choices.0.stop_reason")));
    json_drop(j);
    stop();
}

/* ---- chat
 * ---------------------------------------------------------------------------------------- */

static void test_chat(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    json *j = post_json("/v1/chat/completions",
                        "{" MSG ",\"max_completion_tokens\":3,\"max_tokens\":50,\"logprobs\":true,"
                        "\"top_logprobs\":2}",
                        200);
    assert_memory_equal(str_at(j, "id"), "chatcmpl-", 9);
    assert_string_equal(str_at(j, "object"), "chat.completion");
    assert_string_equal(str_at(j, "choices.0.message.role"), "assistant");
    assert_int_equal(strlen(str_at(j, "choices.0.message.content")), 3);
    assert_string_equal(str_at(j, "choices.0.finish_reason"), "length");
    const json *c = at(j, "choices.0.logprobs.content");
    assert_int_equal(cJSON_GetArraySize(c), 3);
    assert_true(num_at(c, "2.logprob") == -0.375);
    assert_int_equal(cJSON_GetArraySize(at(c, "0.top_logprobs")), 2);
    assert_true(num_at(c, "0.bytes.0") == (unsigned char)str_at(c, "0.token")[0]);
    json_drop(j);
    j = post_json("/v1/chat/completions", "{" MSG ",\"max_tokens\":1,\"logprobs\":true}", 200);
    assert_int_equal(cJSON_GetArraySize(at(j, "choices.0.logprobs.content.0.top_logprobs")), 0);
    json_drop(j);
    stop();
}

static void test_chat_stream(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    events ev = stream_of("/v1/chat/completions",
                          "{" MSG ",\"max_tokens\":3,\"n\":2,\"logprobs\":true,\"stream\":true,"
                          "\"stream_options\":{\"continuous_usage_stats\":true,"
                          "\"include_usage\":true}}");
    int roles[2] = {0}, ends[2] = {0}, lps[2] = {0};
    for (int i = 0; i < ev.n - 1; i++) {
        assert_string_equal(str_at(ev.v[i], "object"), "chat.completion.chunk");
        assert_true(num_at(ev.v[i], "usage.prompt_tokens") > 0);
        int k = (int)num_at(ev.v[i], "choices.0.index");
        assert_in_range(k, 0, 1);
        const json *delta = at(ev.v[i], "choices.0.delta");
        if (at(delta, "role")) {
            roles[k]++;
            /* the role leaves together with the first token */
            assert_string_equal(str_at(ev.v[i + 1], "choices.0.delta.role"), "(none)");
            assert_true(num_at(ev.v[i + 1], "choices.0.index") == k);
        }
        if (cJSON_IsObject(at(ev.v[i], "choices.0.logprobs")))
            lps[k] += cJSON_GetArraySize(at(ev.v[i], "choices.0.logprobs.content"));
        if (cJSON_IsString(at(ev.v[i], "choices.0.finish_reason"))) {
            ends[k]++;
            assert_int_equal(cJSON_GetArraySize(delta), 0);
        }
    }
    for (int k = 0; k < 2; k++)
        assert_true(roles[k] == 1 && ends[k] == 1 && lps[k] == 3);
    assert_true(num_at(ev.v[ev.n - 1], "usage.completion_tokens") == 6);
    events_drop(&ev);
    stop();
}

/* ---- faults
 * -------------------------------------------------------------------------------------- */

static void check_fault(reply r, int status, const char *param, const char *text)
{
    json *j = body_json(&r);
    if (r.status != status || !strstr(str_at(j, "error.message"), text) ||
        strcmp(str_at(j, "error.param"), param))
        fail_msg("%d %s", r.status, r.body.data);
    assert_true(r.body.len < 4096);
    assert_true(cJSON_IsString(at(j, "error.type")));
    assert_non_null(at(j, "error.code"));
    json_drop(j);
    reply_free(&r);
}

static void test_http_faults(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    check_fault(post("/v1/completions", "{\"prompt\":[999]}"), 400, "prompt", "999");
    check_fault(post("/v1/completions", "{\"model\":\"\xff\"}"), 400, "(none)", "UTF-8");
    check_fault(http(port, "GET", "/v1/nothing", "", NULL), 404, "(none)", "no such path");
    check_fault(http(port, "GET", "/v1/completions", "", NULL), 405, "(none)", "POST");
    check_fault(http(port, "GET", "/v1/models/x/y", "", NULL), 404, "model", "'models/fake'");
    /* larger than allowed, said beforehand or only while it is sent */
    size_t n = 3 << 20;
    char *big = xmalloc(n + 1);
    memset(big, '[', n);
    big[n] = 0;
    check_fault(post("/v1/completions", big), 413, "(none)", "1048576");
    big[1 << 19] = 0;
    check_fault(post("/v1/completions", big), 400, "(none)", "nested");
    reply r = {0};
    int fd = client_open(port);
    client_request(fd, "POST", "/v1/completions", "Transfer-Encoding: chunked\r\n", NULL, 0);
    for (int i = 0; i < 4; i++) {
        client_send(fd, "80000\r\n", 7);
        client_send(fd, big, 1 << 19);
        client_send(fd, big, 0);
        client_send(fd, "\r\n", 2);
    }
    client_send(fd, "0\r\n\r\n", 5);
    client_read(fd, &r);
    close(fd);
    check_fault(r, 413, "(none)", "1048576");
    free(big);
    /* alive */
    r = http(port, "GET", "/health", "", NULL);
    assert_int_equal(r.status, 200);
    reply_free(&r);
    stop();
}

static void test_wrong_content_length(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    reply r = {0};
    int fd = client_open(port);
    client_request(fd, "POST", "/v1/completions", "", "{\"prompt\":\"x\"}", 5);
    client_read(fd, &r);
    close(fd);
    assert_int_equal(r.status, 400);
    reply_free(&r);
    /* more announced than sent, then gone */
    fd = client_open(port);
    static const char text[] =
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{}";
    client_send(fd, text, sizeof text - 1);
    close(fd);
    r = http(port, "GET", "/ping", "", NULL);
    assert_int_equal(r.status, 200);
    reply_free(&r);
    stop();
}

static void test_api_key(void **state)
{
    (void)state;
    start(4, 16, 0, "sekrit");
    static const char *const keys[] = {
        "", "Authorization: Bearer sekri\r\n", "Authorization: Bearer sekritt\r\n",
        "Authorization: Basic sekrit\r\n", "Authorization: Bearer \r\n"};
    for (int i = 0; i < serve__n_routes; i++) {
        const route *t = &serve__routes[i];
        if (t->open) continue;
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
            reply r =
                http(port, t->method, t->path, keys[k], !strcmp(t->method, "POST") ? "{}" : NULL);
            assert_int_equal(r.status, 401);
            reply_free(&r);
        }
    }
    reply r = http(port, "GET", "/v1/models", "Authorization: bearer sekrit\r\n", NULL);
    assert_int_equal(r.status, 200);
    reply_free(&r);
    r = http(port, "GET", "/health", "", NULL);
    assert_int_equal(r.status, 200);
    reply_free(&r);
    stop();
}

static void test_request_ids(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    reply r = http(port, "GET", "/v1/models", "X-Request-Id: r1_retry\r\n", NULL);
    assert_non_null(strcasestr(r.head.data, "x-request-id: r1_retry\r\n"));
    reply_free(&r);
    r = http(port, "GET", "/health", "X-Request-Id: a b\r\n", NULL);
    assert_non_null(strcasestr(r.head.data, "x-request-id: req-"));
    reply_free(&r);
    stop();
}

static void test_engine_failure(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    fake.fail_after = 2;
    reply r = post("/v1/completions", "{\"prompt\":\"x\"}");
    assert_non_null(strcasestr(r.head.data, "x-should-retry: false"));
    check_fault(r, 500, "(none)", "not finite");
    events ev = stream_of("/v1/chat/completions", "{" MSG ",\"stream\":true}");
    assert_string_equal(str_at(ev.v[ev.n - 1], "error.message"), "logits are not finite");
    events_drop(&ev);
    stop();
}

/* ---- clients that leave, full queues, drain
 * -------------------------------------------------------- */

static int64_t inside_engine(void)
{
    engine_stats st;
    engine_get_stats(en, &st);
    return st.running + st.waiting;
}

static bool settles(int64_t want)
{
    for (int i = 0; i < 400; i++) {
        if (inside_engine() == want) return true;
        pause_ms(10);
    }
    return false;
}

static int send_only(const char *body)
{
    int fd = client_open(port);
    client_request(fd, "POST", "/v1/completions", "", body, strlen(body));
    return fd;
}

static void test_gone_clients_are_cancelled(void **state)
{
    (void)state;
    start(1, 16, 20000, NULL);
    int a = send_only("{\"prompt\":\"x\",\"max_tokens\":20,\"stream\":true}");
    assert_true(settles(1));
    int b = send_only("{\"prompt\":\"x\",\"max_tokens\":200}");
    int c = send_only("{\"prompt\":\"x\",\"max_tokens\":200,\"stream\":true,\"n\":3}");
    assert_true(settles(5));
    close(b); /* queued, not streamed */
    assert_true(settles(4));
    close(c); /* queued, streamed: three choices */
    assert_true(settles(1));
    reply r = {0};
    client_read(a, &r); /* unharmed */
    close(a);
    assert_non_null(strstr(r.body.data, "\"finish_reason\":\"length\""));
    assert_non_null(strstr(r.body.data, "data: [DONE]\n\n"));
    reply_free(&r);
    int d = send_only("{\"prompt\":\"x\",\"max_tokens\":200,\"stream\":true}");
    assert_true(settles(1));
    pause_ms(60);
    close(d); /* in the middle of its stream */
    assert_true(settles(0));
    assert_int_equal(serve_running(srv), 0);
    stop();
}

static void test_connect_and_close(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    for (int i = 0; i < 100; i++) {
        int fd = client_open(port);
        if (i % 2) client_send(fd, "POST /v1/comp", 13);
        close(fd);
    }
    for (int i = 0; i < 20; i++)
        close(send_only("{\"prompt\":\"x\",\"max_tokens\":200,\"n\":2}"));
    assert_true(settles(0));
    json *j = post_json("/v1/completions", "{\"prompt\":\"x\",\"max_tokens\":1}", 200);
    json_drop(j);
    stop();
}

static void test_full_queue_is_429(void **state)
{
    (void)state;
    start(1, 1, 20000, NULL);
    int a = send_only("{\"prompt\":\"x\",\"max_tokens\":250}");
    assert_true(settles(1));
    int b = send_only("{\"prompt\":\"x\",\"max_tokens\":250}");
    assert_true(settles(2));
    reply r = post("/v1/completions", "{\"prompt\":\"x\"}");
    assert_non_null(strcasestr(r.head.data, "retry-after: "));
    check_fault(r, 429, "(none)", "full");
    close(a);
    close(b);
    assert_true(settles(0));
    stop();
}

static void test_drain_and_close(void **state)
{
    (void)state;
    start(4, 16, 10000, NULL);
    int a = send_only("{\"prompt\":\"x\",\"max_tokens\":20}");
    assert_true(settles(1));
    serve_drain(srv);
    check_fault(post("/v1/completions", "{\"prompt\":\"x\"}"), 503, "(none)", "shutting down");
    reply r = http(port, "GET", "/health", "", NULL);
    assert_int_equal(r.status, 503);
    reply_free(&r);
    r = (reply){0};
    client_read(a, &r); /* what runs may end */
    close(a);
    assert_int_equal(r.status, 200);
    reply_free(&r);
    stop();

    start(4, 16, 10000, NULL);
    int b = send_only("{\"prompt\":\"x\",\"max_tokens\":200}");
    int c = send_only("{\"prompt\":\"x\",\"max_tokens\":200,\"stream\":true}");
    assert_true(settles(2));
    double t0 = clock_seconds();
    stop(); /* at once: both are told */
    assert_true(clock_seconds() - t0 < 2);
    r = (reply){0};
    client_read(b, &r);
    check_fault(r, 503, "(none)", "stopped");
    r = (reply){0};
    client_read(c, &r);
    assert_non_null(strstr(r.body.data, "\"error\""));
    assert_non_null(strstr(r.body.data, "data: [DONE]\n\n"));
    reply_free(&r);
    close(b);
    close(c);
}

static void test_taken_port(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    err e = {0};
    char text[32];
    server *second = NULL;
    serve_opts o = {.host = "127.0.0.1", .port = port};
    snprintf(text, sizeof text, "port %d", port);
    CHECK_ERR(serve_open(&second, en, &o, &e), ERR_IO, text);
    o.host = "no.such.host.invalid";
    CHECK_ERR(serve_open(&second, en, &o, &e), ERR_IO, "no.such.host.invalid");
    stop();
}

/* Bytes that are no HTTP, or HTTP cut and changed at random places: the server stays up. */
static void test_garbage_bytes(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    static const char good[] =
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: q\r\nContent-Length: 31\r\n"
        "Connection: close\r\n\r\n{\"prompt\":\"x\",\"max_tokens\":   2}";
    uint64_t x = 88172645463325252ull;
    for (int i = 0; i < 150; i++) {
        char req[sizeof good];
        memcpy(req, good, sizeof good);
        for (int k = 0; k < i % 5; k++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            req[x % (sizeof good - 1)] = (char)(x >> 32);
        }
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        size_t n = i % 3 ? sizeof good - 1 : (size_t)(x % sizeof good);
        int fd = client_open(port);
        client_send(fd, req, n);
        shutdown(fd, SHUT_WR);
        reply r = {0};
        client_read(fd, &r);
        close(fd);
        reply_free(&r);
    }
    assert_true(settles(0));
    json *j = post_json("/v1/completions", "{\"prompt\":\"x\",\"max_tokens\":1}", 200);
    json_drop(j);
    stop();
}

/* ---- the small routes
 * ------------------------------------------------------------------------------ */

static void test_small_routes(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    reply r = http(port, "GET", "/v1/models", "", NULL);
    json *j = body_json(&r);
    assert_string_equal(str_at(j, "data.0.id"), "models/fake");
    assert_true(num_at(j, "data.0.max_model_len") == FAKE_LEN);
    json_drop(j);
    reply_free(&r);
    r = http(port, "GET", "/v1/models/models/fake", "", NULL);
    assert_int_equal(r.status, 200);
    reply_free(&r);
    j = post_json("/tokenize", "{\"prompt\":\"ab\",\"return_token_strs\":true}", 200);
    assert_true(num_at(j, "count") == 3 && num_at(j, "tokens.1") == 97);
    assert_string_equal(str_at(j, "token_strs.1"), "a");
    json_drop(j);
    j = post_json("/tokenize", "{" MSG ",\"add_generation_prompt\":false}", 200);
    assert_true(num_at(j, "count") == 9);
    json_drop(j);
    j = post_json("/detokenize", "{\"tokens\":[97,290,98]}", 200);
    assert_string_equal(str_at(j, "prompt"), "ab");
    json_drop(j);
    check_fault(post("/detokenize", "{\"tokens\":[300]}"), 400, "tokens", "300");
    r = http(port, "GET", "/tokenizer_info", "", NULL);
    j = body_json(&r);
    assert_string_equal(str_at(j, "eos_token"), "</s>");
    json_drop(j);
    reply_free(&r);
    static const char *const more[] = {"/version", "/server_info", "/", "/ping"};
    for (int i = 0; i < 4; i++) {
        r = http(port, "GET", more[i], "", NULL);
        assert_int_equal(r.status, 200);
        reply_free(&r);
    }
    stop();
}

static void test_metrics(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    reply r = http(port, "GET", "/metrics", "", NULL);
    assert_non_null(strcasestr(r.head.data, "text/plain; version=0.0.4"));
    static const char *const lines[] = {
        "# TYPE tare:num_requests_running gauge\n",
        "tare:num_requests_running{model_name=\"models/fake\",engine=\"0\"} 0\n",
        "tare:time_to_first_token_seconds_bucket{model_name=\"models/"
        "fake\",engine=\"0\",le=\"0.1\"} 2\n",
        "tare:time_to_first_token_seconds_bucket{model_name=\"models/fake\",engine=\"0\",le=\"1\"} "
        "3\n",
        "le=\"+Inf\"} 3\n",
        "tare:time_to_first_token_seconds_count{",
        "tare:kv_cache_usage_perc{",
        "tare:http_requests_total{",
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        if (!strstr(r.body.data, lines[i])) fail_msg("lacks %s", lines[i]);
    reply_free(&r);
    stop();
}

static void test_keep_alive(void **state)
{
    (void)state;
    start(4, 16, 0, NULL);
    int fd = client_open(port);
    static const char body[] = "{\"prompt\":\"x\",\"max_tokens\":2,\"stream\":true}";
    char req[256];
    int n = snprintf(req, sizeof req,
                     "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                     "Content-Length: %zu\r\n\r\n%s",
                     sizeof body - 1, body);
    client_send(fd, req, (size_t)n);
    pause_ms(50);
    client_send(fd, req, (size_t)n);
    client_request(fd, "GET", "/health", "", NULL, 0); /* closes */
    buf all = {0};
    char tmp[4096];
    ssize_t k;
    while ((k = recv(fd, tmp, sizeof tmp, 0)) > 0)
        buf_add(&all, tmp, (size_t)k);
    close(fd);
    int replies = 0, ends = 0;
    for (const char *q = all.data; (q = strstr(q, "HTTP/1.1 200 ")); q++)
        replies++;
    for (const char *q = all.data; (q = strstr(q, "data: [DONE]")); q++)
        ends++;
    assert_int_equal(replies, 3);
    assert_int_equal(ends, 2);
    buf_free(&all);
    stop();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_completion),
        cmocka_unit_test(test_batch_and_n),
        cmocka_unit_test(test_echo_logprobs),
        cmocka_unit_test(test_completion_stream_adds_up),
        cmocka_unit_test(test_stream_finishes_each_index_once),
        cmocka_unit_test(test_split_character),
        cmocka_unit_test(test_chat),
        cmocka_unit_test(test_chat_stream),
        cmocka_unit_test(test_http_faults),
        cmocka_unit_test(test_wrong_content_length),
        cmocka_unit_test(test_api_key),
        cmocka_unit_test(test_request_ids),
        cmocka_unit_test(test_engine_failure),
        cmocka_unit_test(test_gone_clients_are_cancelled),
        cmocka_unit_test(test_connect_and_close),
        cmocka_unit_test(test_full_queue_is_429),
        cmocka_unit_test(test_drain_and_close),
        cmocka_unit_test(test_taken_port),
        cmocka_unit_test(test_garbage_bytes),
        cmocka_unit_test(test_small_routes),
        cmocka_unit_test(test_metrics),
        cmocka_unit_test(test_keep_alive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
