/* Chat templates against Jinja2's own output: single features (cases.jsonl), real templates
 * (expected.jsonl), the forms of messages that clients send, bounds, and damaged templates. */
#include "check.h"
#include "base/file.h"
#include "text/chat.h"

#define FOLDER "tests/fixtures/chat-templates/"
#define NOW    1721997296 /* 2024-07-26 12:34:56 UTC */

static const char *const names[] = {"HuggingFaceTB-SmolLM3-3B",
                                    "Qwen-Qwen2.5-7B-Instruct",
                                    "Qwen-Qwen3-0.6B",
                                    "Qwen3-Coder",
                                    "ct-chatml",
                                    "ct-zephyr",
                                    "GLM-4.6",
                                    "ibm-granite-granite-4.0"};
#define N_NAMES (sizeof(names) / sizeof(names[0]))

static chat_template *open_text(const char *text)
{
    chat_template *c = NULL;
    err e = {0};
    CHECK_OK(chat_template_open(&c, text, strlen(text), "t.jinja", &e));
    chat_template_fix_clock(c, NOW);
    return c;
}

static chat_template *open_named(const char *name)
{
    buf text = {0};
    err e = {0};
    char *path = xasprintf(FOLDER "%s.jinja", name);
    CHECK_OK(file_read_all(&text, path, 1 << 20, &e));
    chat_template *c = open_text(text.data);
    buf_free(&text);
    free(path);
    return c;
}

/* Calls fn on each line of a file of JSON objects. */
static void each_line(const char *path, void (*fn)(const json *line, void *arg), void *arg)
{
    buf all = {0};
    err e = {0};
    CHECK_OK(file_read_all(&all, path, 1 << 24, &e));
    for (char *p = all.data; *p;) {
        char *end = strchr(p, '\n');
        json *line = NULL;
        CHECK_OK(json_parse(&line, p, (size_t)(end - p), path, &e));
        fn(line, arg);
        json_drop(line);
        p = end + 1;
    }
    buf_free(&all);
}

static void check_case(const char *what, const json *want, int rc, const buf *got, const err *e)
{
    if (!want) {
        if (rc >= 0) fail_msg("%s: should fail, gave '%s'", what, got->data);
        assert_true(e->msg[0] != 0);
    } else if (rc < 0) {
        fail_msg("%s: %s", what, e->msg);
    } else if (strcmp(got->data ? got->data : "", want->valuestring) != 0) {
        fail_msg("%s:\nwant '%s'\ngot  '%s'", what, want->valuestring, got->data);
    }
}

typedef struct state {
    json *context;
    size_t n, errors;
    chat_template *open;
    char name[80];
} state;

static void one_case(const json *line, void *arg)
{
    state *s = arg;
    const json *text = json_get(line, "template");
    if (!text) {
        s->context = cJSON_Duplicate(json_get(line, "context"), 1);
        return;
    }
    chat_template *c = NULL;
    buf out = {0};
    err e = {0};
    int rc = chat_template_open(&c, text->valuestring, strlen(text->valuestring), "t.jinja", &e);
    if (rc >= 0) {
        chat_template_fix_clock(c, NOW);
        rc = chat_render_raw(c, s->context, &out, &e);
    }
    check_case(text->valuestring, json_get(line, "text"), rc, &out, &e);
    s->n++;
    s->errors += rc < 0;
    buf_free(&out);
    chat_template_close(c);
}

static void test_features(void **unused)
{
    (void)unused;
    state s = {0};
    each_line(FOLDER "cases.jsonl", one_case, &s);
    assert_true(s.n > 140 && s.errors > 40);
    json_drop(s.context);
}

static void one_rendering(const json *line, void *arg)
{
    state *s = arg;
    const char *name = json_get(line, "template")->valuestring;
    const char *which = json_get(line, "context")->valuestring;
    if (strcmp(name, s->name) != 0) {
        chat_template_close(s->open);
        s->open = open_named(name);
        snprintf(s->name, sizeof(s->name), "%s", name);
    }
    json *context = cJSON_Duplicate(json_get(json_get(s->context, "contexts"), which), 1);
    const json *special = json_get(s->context, "special_tokens"), *k;
    cJSON_ArrayForEach(k, special) cJSON_AddItemToObject(context, k->string, cJSON_Duplicate(k, 1));
    buf out = {0};
    err e = {0};
    int rc = chat_render_raw(s->open, context, &out, &e);
    char *what = xasprintf("%s, %s", name, which);
    check_case(what, json_get(line, "text"), rc, &out, &e);
    free(what);
    s->n++;
    json_drop(context);
    buf_free(&out);
}

static void test_real_templates(void **unused)
{
    (void)unused;
    state s = {0};
    err e = {0};
    CHECK_OK(json_parse_file(&s.context, FOLDER "contexts.json", &e));
    each_line(FOLDER "expected.jsonl", one_rendering, &s);
    assert_int_equal(s.n, N_NAMES * 11);
    chat_template_close(s.open);
    json_drop(s.context);
}

/* ---- chat_render: forms of messages ---- */

static int render(chat_template *c, const char *messages, const char *extra, buf *out, err *e)
{
    json *m = NULL, *x = NULL;
    err pe = {0};
    buf_clear(out);
    assert_true(json_parse(&m, messages, strlen(messages), "messages", &pe) >= 0);
    if (extra) assert_true(json_parse(&x, extra, strlen(extra), "extra", &pe) >= 0);
    int rc = chat_render(c, m, x, true, "<s>", "</s>", out, e);
    json_drop(m);
    json_drop(x);
    return rc;
}

#define CALL(content)                                                                              \
    "[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\"," content                      \
    "\"tool_calls\":[{\"id\":\"c1\",\"type\":\"function\",\"function\":{\"name\":\"add\","         \
    "\"arguments\":\"{\\\"a\\\": 1}\"}}]},{\"role\":\"tool\",\"content\":\"3\"}]"

static void test_null_content(void **unused)
{
    (void)unused;
    size_t rendered = 0;
    for (size_t i = 0; i < N_NAMES; i++) {
        chat_template *c = open_named(names[i]);
        buf a = {0}, b = {0}, d = {0};
        err e = {0};
        int rc = render(c, CALL("\"content\":null,"), NULL, &a, &e);
        assert_int_equal(rc, render(c, CALL(""), NULL, &b, &e));
        assert_int_equal(rc, render(c, CALL("\"content\":\"\","), NULL, &d, &e));
        rendered += rc >= 0;
        if (rc >= 0) {
            assert_string_equal(a.data, b.data);
            assert_string_equal(a.data, d.data);
            assert_null(strstr(a.data, "None"));
        }
        buf_free(&a);
        buf_free(&b);
        buf_free(&d);
        chat_template_close(c);
    }
    assert_true(rendered >= 5); /* the rest refuse the role tool */
}

static void test_arguments(void **unused)
{
    (void)unused;
    static const struct {
        const char *name, *text;
    } rows[] = {{"Qwen-Qwen2.5-7B-Instruct", "{\"name\": \"add\", \"arguments\": {\"a\": 1}}"},
                {"Qwen-Qwen3-0.6B", "{\"name\": \"add\", \"arguments\": {\"a\": 1}}"},
                {"Qwen3-Coder", "<parameter=a>\n1\n</parameter>"}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        chat_template *c = open_named(rows[i].name);
        buf a = {0};
        err e = {0};
        CHECK_OK(render(c, CALL("\"content\":null,"), NULL, &a, &e));
        if (!strstr(a.data, rows[i].text)) fail_msg("%s: %s", rows[i].name, a.data);
        buf_free(&a);
        chat_template_close(c);
    }
}

#define PRINTS "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
#define LOOPS                                                                                      \
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"                 \
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
#define ONLY_LOOPS                                                                                 \
    "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
#define PARTS                                                                                      \
    "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"Hi\"},"                        \
    "{\"type\":\"text\",\"text\":\" you\"}]}]"

static void expect_render(const char *text, const char *messages, const char *want)
{
    chat_template *c = open_text(text);
    buf out = {0};
    err e = {0};
    CHECK_OK(render(c, messages, NULL, &out, &e));
    assert_string_equal(out.data, want);
    buf_free(&out);
    chat_template_close(c);
}

static void test_parts(void **unused)
{
    (void)unused;
    expect_render(PRINTS, PARTS, "<user>Hi you");
    expect_render(LOOPS "{{ messages[0].content | length if messages[0].content | length == 2 }}",
                  PARTS, "Hi you2");
    expect_render(ONLY_LOOPS, PARTS, "Hi; you;");
    expect_render(ONLY_LOOPS, "[{\"role\":\"user\",\"content\":\"Hi\"}]", "Hi;");
    expect_render(PRINTS, "[{\"role\":\"user\",\"content\":[]}]", "<user>");
    chat_template *c = open_text(PRINTS);
    buf out = {0};
    err e = {0};
    CHECK_ERR(
        render(c, "[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]", NULL, &out, &e),
        ERR_VALUE, "image_url");
    CHECK_ERR(render(c, "[{\"role\":\"user\",\"content\":5}]", NULL, &out, &e), ERR_VALUE,
              "content");
    CHECK_ERR(render(c, "[{\"content\":\"x\"}]", NULL, &out, &e), ERR_VALUE, "role");
    CHECK_ERR(render(c, "[3]", NULL, &out, &e), ERR_VALUE, "messages[0]");
    CHECK_ERR(render(c, "{}", NULL, &out, &e), ERR_VALUE, "messages");
    buf_free(&out);
    chat_template_close(c);
}

/* The templates of the two models that the tool is shown with. */
static void test_chatml(void **unused)
{
    (void)unused;
    static const char messages[] = "[{\"role\":\"user\",\"content\":\"Hi\"}]";
    expect_render("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
                  "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if "
                  "add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
                  messages, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    expect_render(
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' "
        "%}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
        "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}",
        messages, "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n");
}

static void test_developer(void **unused)
{
    (void)unused;
    static const char messages[] = "[{\"role\":\"developer\",\"content\":\"x\"}]";
    expect_render(PRINTS, messages, "<system>x");
    expect_render("{# knows developer #}" PRINTS, messages, "<developer>x");
}

static void test_raise(void **unused)
{
    (void)unused;
    chat_template *c = open_text("{{ raise_exception('roles must alternate') }}");
    buf out = {0};
    err e = {0};
    int rc = render(c, "[]", NULL, &out, &e);
    assert_int_equal(rc, -ERR_VALUE);
    assert_string_equal(e.msg, "roles must alternate");
    assert_int_equal(out.len, 0);
    chat_template_close(c);
    CHECK_ERR(chat_template_open(&c, "a\n{% if %}", 10, "t.jinja", &e), ERR_FORMAT,
              "t.jinja, line 2");
    buf_free(&out);
}

static void test_extra(void **unused)
{
    (void)unused;
    chat_template *c = open_text("{{ bos_token }}{{ eos_token }}{{ tools }}{{ flag }}{{ "
                                 "add_generation_prompt }}");
    buf out = {0};
    err e = {0};
    CHECK_OK(render(c, "[]", NULL, &out, &e));
    assert_string_equal(out.data, "<s></s>NoneTrue");
    CHECK_OK(render(c, "[]", "{\"tools\":[1],\"flag\":false}", &out, &e));
    assert_string_equal(out.data, "<s></s>[1]FalseTrue");
    buf_free(&out);
    chat_template_close(c);
}

static void test_tools_template(void **unused)
{
    (void)unused;
    chat_template *c = open_text("plain");
    buf out = {0};
    err e = {0};
    assert_null(chat_template_tools_text(c));
    CHECK_OK(chat_template_add_tools(c, "{{ tools }}", 11, "t", &e));
    assert_string_equal(chat_template_text(c), "plain");
    assert_string_equal(chat_template_tools_text(c), "{{ tools }}");
    CHECK_OK(render(c, "[]", NULL, &out, &e));
    assert_string_equal(out.data, "plain");
    CHECK_OK(render(c, "[]", "{\"tools\":null}", &out, &e));
    assert_string_equal(out.data, "plain");
    CHECK_OK(render(c, "[]", "{\"tools\":[1]}", &out, &e));
    assert_string_equal(out.data, "[1]");
    CHECK_ERR(chat_template_add_tools(c, "{% if %}", 8, "second", &e), ERR_FORMAT, "second");
    buf_free(&out);
    chat_template_close(c);
}

static void test_nulls_and_reasoning(void **unused)
{
    (void)unused;
    expect_render("{{ messages[0].keys() | list }}",
                  "[{\"role\":\"user\",\"content\":\"x\",\"name\":null,\"tool_calls\":null}]",
                  "['role', 'content']");
    expect_render("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}",
                  "[{\"role\":\"assistant\",\"content\":\"x\",\"reasoning\":\"r\"}]", "rr");
    expect_render(
        "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}",
        "[{\"role\":\"assistant\",\"content\":\"x\",\"thinking\":\"t\",\"reasoning\":\"r\"}]",
        "tt");
}

static int continued(const char *text, const char *messages, buf *out, err *e)
{
    chat_template *c = open_text(text);
    json *m = NULL;
    assert_true(json_parse(&m, messages, strlen(messages), "messages", e) >= 0);
    buf_clear(out);
    int rc = chat_render_continued(c, m, NULL, "<s>", "</s>", out, e);
    json_drop(m);
    chat_template_close(c);
    return rc;
}

static void test_continued(void **unused)
{
    (void)unused;
    static const char one[] = "[{\"role\":\"assistant\",\"content\":\"ab \"}]";
    buf out = {0};
    err e = {0};
    CHECK_OK(continued(PRINTS "tail", one, &out, &e));
    assert_string_equal(out.data, "<assistant>ab ");
    CHECK_OK(continued("{{ messages[0].content | trim }}!", one, &out, &e));
    assert_string_equal(out.data, "ab");
    CHECK_OK(continued(LOOPS "x", PARTS, &out, &e));
    assert_string_equal(out.data, "Hi you");
    CHECK_ERR(continued("no text", one, &out, &e), ERR_VALUE, "repeat");
    assert_int_equal(out.len, 0);
    CHECK_ERR(continued("{{ messages[0].content | upper }}", one, &out, &e), ERR_VALUE, "repeat");
    CHECK_ERR(continued(PRINTS, "[{\"role\":\"user\",\"content\":\" \"}]", &out, &e), ERR_VALUE,
              "needs text");
    CHECK_ERR(continued(PRINTS, "[]", &out, &e), ERR_VALUE, "needs text");
    buf_free(&out);
}

static void test_broken_arguments(void **unused)
{
    (void)unused;
    chat_template *c = open_named("Qwen3-Coder");
    buf out = {0};
    err e = {0};
    static const char *const bad[] = {"{\\\"a\\\":", "[1]", "3"};
    for (size_t i = 0; i < 3; i++) {
        char *text =
            xasprintf("[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"content\":"
                      "\"\",\"tool_calls\":[{\"type\":\"function\",\"function\":{\"name\":\"f\","
                      "\"arguments\":\"%s\"}}]}]",
                      bad[i]);
        CHECK_ERR(render(c, text, NULL, &out, &e), ERR_VALUE, "messages[1].tool_calls[0]");
        free(text);
    }
    buf_free(&out);
    chat_template_close(c);
}

/* ---- bounds ---- */

static void test_bounds(void **unused)
{
    (void)unused;
    static const char *const rows[] = {
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000000 }}", "{{ [0] * 1000000000000 }}",
        "{% set ns = namespace(s='0123456789') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s "
        "%}"
        "{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% "
        "endfor "
        "%}{{ ns.l }}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{% set x = 'a' * 100000 %}{{ x | replace('a', x) }}",
        "{{ ('\\n' * 9999999) | indent(999) }}", "{{ 'x' | center(9999999999) }}",
        "{{ 'x'.ljust(9999999999) }}", "{{ '%999999d' % 3 }}", "{{ 9223372036854775807 + 1 }}",
        "{% macro m(x) %}{{ m([x]) }}{% endmacro %}{{ m(1) }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        /* what takes characters apart costs steps, not only the bytes that it makes */
        "{% set s = 'ab ' * 300000 %}{% for i in range(80) %}{% set y = s.title() %}{% endfor %}",
        "{% set s = 'ab ' * 300000 %}{% for i in range(80) %}{% set y = s|tojson %}{% endfor %}",
        "{% set s = 'ab ' * 300000 %}{% for i in range(80) %}{% set y = s|urlencode %}{% endfor %}",
        "{% set s = 'ab' * 300000 %}{% for i in range(80) %}{% set y = s.islower() %}{% endfor %}",
        "{% set s = 'ab' * 300000 %}{% for i in range(80) %}{% set y = s|wordcount %}{% endfor %}",
        "{% for i in range(900) %}{% set y = '%.99999f' % 1.5 %}{% endfor %}",
        "{% for i in range(40000) %}{% set y = 1e300|round(300) %}{% endfor %}"};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        chat_template *c = open_text(rows[i]);
        buf out = {0};
        err e = {0};
        int rc = render(c, "[]", NULL, &out, &e);
        if (rc != -ERR_VALUE) fail_msg("%s: %d", rows[i], rc);
        if (!strstr(e.msg, "line 1") || !strstr(e.msg, "limit")) fail_msg("%s: %s", rows[i], e.msg);
        buf_free(&out);
        chat_template_close(c);
    }
}

static void test_deep_source(void **unused)
{
    (void)unused;
    static const char *const open[] = {"{{ (", "{{ [", "{{ -", "{% if a %}", "{{ not ", "{{ a.b"};
    static const char *const more[] = {"(", "[", "-", "{% if a %}", "not ", ".b"};
    for (size_t i = 0; i < 6; i++) {
        buf text = {0}, out = {0};
        err e = {0};
        chat_template *c = NULL;
        buf_puts(&text, open[i]);
        for (int k = 0; k < 20000; k++)
            buf_puts(&text, more[i]);
        if (i == 5) buf_puts(&text, " }}");
        int rc = chat_template_open(&c, text.data, text.len, "deep", &e);
        if (rc >= 0) rc = render(c, "[]", NULL, &out, &e);
        assert_true(rc < 0);
        assert_true(strlen(e.msg) > 10 && strlen(e.msg) < 400);
        chat_template_close(c);
        buf_free(&text);
        buf_free(&out);
    }
    chat_template *c = NULL;
    err e = {0};
    CHECK_ERR(chat_template_open(&c, "a\0b", 3, "nul", &e), ERR_FORMAT, "UTF-8");
    CHECK_ERR(chat_template_open(&c, "a\xff", 2, "bad", &e), ERR_FORMAT, "UTF-8");
}

/* ---- damaged templates: any outcome but a crash or an error without a message ---- */

static uint64_t seed = 88172645463325252u;

static size_t pick(size_t n)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return n ? (size_t)(seed >> 20) % n : 0;
}

static void damage(buf *text)
{
    static const char *const bits[] = {"{{",          "}}",
                                       "{%",          "%}",
                                       "-",           "|",
                                       "is",          "not",
                                       "(",           ")",
                                       "[",           "]",
                                       "{",           "}",
                                       "*",           "**",
                                       "loop",        "99999",
                                       "'x'",         "messages",
                                       "tojson",      "| list",
                                       "[0]",         ":",
                                       "::-1",        "{% endfor %}",
                                       "{% endif %}", "| map('list')",
                                       ".items()",    "'%s' % 3",
                                       "{#",          "{% raw %}"};
    for (size_t k = 1 + pick(3); k > 0; k--) {
        size_t at = pick(text->len + 1), cut = pick(2) ? pick(30) : 0;
        if (cut > text->len - at) cut = text->len - at;
        buf out = {0};
        buf_add(&out, text->data, at);
        buf_puts(&out, bits[pick(sizeof(bits) / sizeof(bits[0]))]);
        buf_add(&out, text->data + at + cut, text->len - at - cut);
        buf_free(text);
        *text = out;
    }
}

static void test_damaged(void **unused)
{
    (void)unused;
    json *all = NULL;
    err e = {0};
    size_t opened = 0, rendered = 0;
    CHECK_OK(json_parse_file(&all, FOLDER "contexts.json", &e));
    const json *contexts = json_get(all, "contexts");
    for (size_t i = 0; i < 4000; i++) {
        buf text = {0}, out = {0};
        chat_template *c = NULL;
        char *path = xasprintf(FOLDER "%s.jinja", names[i % N_NAMES]);
        err_clear(&e);
        CHECK_OK(file_read_all(&text, path, 1 << 20, &e));
        damage(&text);
        int rc = chat_template_open(&c, text.data, text.len, "damaged", &e);
        opened += rc >= 0;
        if (rc >= 0) rc = chat_render_raw(c, cJSON_GetArrayItem(contexts, (int)pick(11)), &out, &e);
        rendered += rc >= 0;
        assert_true(rc >= 0 || e.msg[0]);
        chat_template_close(c);
        buf_free(&text);
        buf_free(&out);
        free(path);
    }
    assert_true(opened > 200 && rendered > 100 && rendered < opened);
    json_drop(all);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_features),
                                       cmocka_unit_test(test_real_templates),
                                       cmocka_unit_test(test_null_content),
                                       cmocka_unit_test(test_arguments),
                                       cmocka_unit_test(test_parts),
                                       cmocka_unit_test(test_chatml),
                                       cmocka_unit_test(test_developer),
                                       cmocka_unit_test(test_raise),
                                       cmocka_unit_test(test_extra),
                                       cmocka_unit_test(test_tools_template),
                                       cmocka_unit_test(test_nulls_and_reasoning),
                                       cmocka_unit_test(test_continued),
                                       cmocka_unit_test(test_broken_arguments),
                                       cmocka_unit_test(test_bounds),
                                       cmocka_unit_test(test_deep_source),
                                       cmocka_unit_test(test_damaged)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
