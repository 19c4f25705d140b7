/* Tokenizers against ids and texts of the Hugging Face library (tests/fixtures/text), and what the
 * library does not show: streaming, refusals, several threads, length. */
#include "check.h"
#include <pthread.h>
#include "base/file.h"
#include "base/json.h"
#include "base/thread.h"
#include "base/utf8.h"
#include "text/tok_internal.h"

#define FIXTURES "tests/fixtures/text/"
#define MILLET   "models/millet-7m/"

static err e;

static tokenizer *open_text(const char *text, size_t n)
{
    tokenizer *t = NULL;
    CHECK_OK(tokenizer_open(&t, text, n, "", 0, "test", &e));
    return t;
}

static tokenizer *open_file(const char *path, const char *config)
{
    buf b = {0}, c = {0};
    tokenizer *t = NULL;
    CHECK_OK(file_read_all(&b, path, 1u << 26, &e));
    if (config) CHECK_OK(file_read_all(&c, config, 1u << 20, &e));
    CHECK_OK(tokenizer_open(&t, b.data, b.len, c.data ? c.data : "", c.len, path, &e));
    buf_free(&b);
    buf_free(&c);
    return t;
}

/* ---- goldens ---- */

/* The row's ids under `key`, else those of plain encoding. */
static void check_ids(const tokenizer *t, const json *row, const char *key, const char *name,
                      ids *l)
{
    const char *text = json_get(row, "text")->valuestring;
    const json *want = json_get(row, json_get(row, key) ? key : "ids");
    l->n = 0;
    CHECK_OK((strcmp(key, "literal") ? tokenizer_encode : tokenizer_encode_literal)(
        t, text, strlen(text), !strcmp(key, "special"), l, &e));
    size_t i = 0;
    for (const json *c = want->child; c; c = c->next, i++)
        if (i >= l->n || l->v[i] != (int32_t)c->valuedouble)
            fail_msg("%s: '%s': id %zu differs", name, text, i);
    if (i != l->n) fail_msg("%s: '%s': %zu ids instead of %zu", name, text, l->n, i);
}

static void check_text(const char *name, const json *row, const char *what, const buf *got,
                       const char *want)
{
    if (strcmp(got->data, want) != 0)
        fail_msg("%s: '%s': %s '%s' instead of '%s'", name, json_get(row, "text")->valuestring,
                 what, got->data, want);
}

static void check_row(const tokenizer *t, const json *row, const char *name)
{
    ids l = {0};
    buf b = {0};
    const json *decoded = json_get(row, "decoded"), *skipped = json_get(row, "skipped");
    if (!json_get(row, "ids")) { /* the library refuses it, for a character without any token */
        const char *text = json_get(row, "text")->valuestring;
        CHECK_ERR(tokenizer_encode(t, text, strlen(text), false, &l, &e), ERR_VALUE, "unknown");
        ids_free(&l);
        return;
    }
    check_ids(t, row, "special", name, &l);
    check_ids(t, row, "literal", name, &l);
    check_ids(t, row, "ids", name, &l);
    if (decoded) {
        tokenizer_decode(t, l.v, l.n, false, &b);
        check_text(name, row, "decoded", &b, decoded->valuestring);
        buf_clear(&b);
        tokenizer_decode(t, l.v, l.n, true, &b);
        check_text(name, row, "skipped", &b, skipped ? skipped->valuestring : decoded->valuestring);
        buf_clear(&b);
        detok d;
        detok_init(&d, t, false);
        for (size_t i = 0; i < l.n; i++)
            detok_push(&d, l.v[i], &b);
        detok_flush(&d, &b);
        detok_free(&d);
        if (!strstr(decoded->valuestring, "\xEF\xBF\xBD"))
            check_text(name, row, "streamed", &b, decoded->valuestring);
    }
    ids_free(&l);
    buf_free(&b);
}

/* Calls fn for every line of a file of JSON objects; returns how many there were. */
static size_t each_line(const char *path, void (*fn)(const json *line, void *arg), void *arg)
{
    buf b = {0};
    size_t n = 0;
    CHECK_OK(file_read_all(&b, path, 1u << 24, &e));
    for (char *p = b.data, *end; (end = strchr(p, '\n')); p = end + 1, n++) {
        json *j;
        CHECK_OK(json_parse(&j, p, (size_t)(end - p), path, &e));
        fn(j, arg);
        json_drop(j);
    }
    buf_free(&b);
    return n;
}

static void check_real(const json *line, void *arg)
{
    (void)arg;
    const char *path = json_get(line, "path")->valuestring;
    tokenizer *t = open_file(path, NULL);
    for (const json *row = json_get(line, "rows")->child; row; row = row->next)
        check_row(t, row, path);
    tokenizer_close(t);
}

static void real_tokenizers(void **state)
{
    (void)state;
    assert_int_equal(each_line(FIXTURES "real.jsonl", check_real, NULL), 3);
}

/* ---- SentencePiece ---- */

/* A .model file: special tokens are literal, as SentencePiece never finds them in a text. */
static void check_model_row(const tokenizer *t, const json *row, const char *name)
{
    const char *text = json_get(row, "text")->valuestring;
    const char *decoded = json_get(row, "decoded")->valuestring;
    ids l = {0};
    buf b = {0};
    CHECK_OK(tokenizer_encode_literal(t, text, strlen(text), false, &l, &e));
    size_t i = 0;
    for (const json *c = json_get(row, "ids")->child; c; c = c->next, i++)
        if (i >= l.n || l.v[i] != (int32_t)c->valuedouble)
            fail_msg("%s: '%s': id %zu differs", name, text, i);
    if (i != l.n) fail_msg("%s: '%s': %zu ids instead of %zu", name, text, l.n, i);
    tokenizer_decode(t, l.v, l.n, false, &b);
    check_text(name, row, "decoded", &b, decoded);
    buf_clear(&b);
    detok d;
    detok_init(&d, t, false);
    for (i = 0; i < l.n; i++)
        detok_push(&d, l.v[i], &b);
    detok_flush(&d, &b);
    detok_free(&d);
    check_text(name, row, "streamed", &b, decoded);
    ids_free(&l);
    buf_free(&b);
}

static void check_spm(const json *line, void *arg)
{
    (void)arg;
    const char *path = json_get(line, "path")->valuestring;
    bool model = strstr(path, ".model");
    tokenizer *t = open_file(path, NULL);
    for (const json *row = json_get(line, "rows")->child; row; row = row->next)
        (model ? check_model_row : check_row)(t, row, path);
    tokenizer_close(t);
}

static void sentencepiece_models(void **state)
{
    (void)state;
    assert_int_equal(each_line(FIXTURES "spm.jsonl", check_spm, NULL), 4);
}

/* One vocabulary, two files: the .model applies the longest rule of the character map,
 * tokenizer.json the shortest rule to a whole grapheme cluster, as the library does. */
static void charsmap_by_kind_of_file(void **state)
{
    (void)state;
    static const struct {
        const char *text, *by_model, *by_json;
    } rows[] = {
        {"\xC2\xAA\xCC\x80", "A\xCC\x80", "A"}, /* U+00AA U+0300: the mark is lost */
        {"a\xCC\x80", "C", "b"},                /* the rule for both, the rule for a */
        {"cde", "F", "cde"},                    /* three clusters */
    };
    tokenizer *m = open_file(FIXTURES "spm-unigram.model", NULL);
    tokenizer *j = open_file(FIXTURES "spm-unigram.json", NULL);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const tokenizer *t[2] = {m, j};
        const char *want[2] = {rows[i].by_model, rows[i].by_json};
        for (int k = 0; k < 2; k++) {
            ids a = {0}, b = {0};
            CHECK_OK(tokenizer_encode(t[k], rows[i].text, strlen(rows[i].text), false, &a, &e));
            CHECK_OK(tokenizer_encode(t[1], want[k], strlen(want[k]), false, &b, &e));
            if (a.n != b.n || memcmp(a.v, b.v, a.n * sizeof *a.v) != 0)
                fail_msg("row %zu of file %d: not as '%s'", i, k, want[k]);
            ids_free(&a);
            ids_free(&b);
        }
    }
    tokenizer_close(m);
    tokenizer_close(j);
}

static tokenizer *open_model(const char *config)
{
    buf b = {0};
    tokenizer *t = NULL;
    CHECK_OK(file_read_all(&b, FIXTURES "spm-bpe.model", 1u << 20, &e));
    CHECK_OK(tokenizer_open(&t, b.data, b.len, config, strlen(config), "m", &e));
    buf_free(&b);
    return t;
}

static size_t count_of(const tokenizer *t, const char *text, bool special, const char *name)
{
    ids l = {0};
    size_t n = 0;
    CHECK_OK(tokenizer_encode(t, text, strlen(text), special, &l, &e));
    for (size_t i = 0; i < l.n; i++)
        n += l.v[i] == tokenizer_token_id(t, name);
    ids_free(&l);
    return n;
}

/* Control tokens, BOS and the prefix of a .model, by its config. */
static void models_and_their_config(void **state)
{
    (void)state;
    tokenizer *t = open_model("{}");
    assert_string_equal(tokenizer_bos_text(t), "<s>");
    assert_string_equal(tokenizer_eos_text(t), "</s>");
    assert_true(tokenizer_adds_bos(t));
    assert_int_equal(count_of(t, "a</s>b", false, "</s>"), 1);
    assert_int_equal(count_of(t, "the", true, "<s>"), 1);
    size_t each = count_of(t, "QQ</s>QQ</s>QQ", false, "\xE2\x96\x81");
    tokenizer_close(t);
    t = open_model("{\"legacy\":false,\"add_bos_token\":false}");
    assert_false(tokenizer_adds_bos(t));
    assert_int_equal(count_of(t, "QQ</s>QQ</s>QQ", false, "\xE2\x96\x81") + 2, each);
    tokenizer_close(t);
    buf b = {0};
    CHECK_OK(file_read_all(&b, FIXTURES "spm-bpe.model", 1u << 20, &e));
    static const char shifted[] = "{\"tokenizer_class\":\"CamembertTokenizer\"}";
    CHECK_ERR(tokenizer_open(&t, b.data, b.len, shifted, sizeof shifted - 1, "m", &e),
              ERR_UNSUPPORTED, "Camembert");
    static const struct {
        const char *bytes;
        size_t n;
        int code;
        const char *text;
    } bad[] = {
        {"\n\x7f\n\x01<", 5, ERR_FORMAT, "cut off"},
        {"\n\x02\n\x00", 4, ERR_FORMAT, "0 bytes"},
        {"\n\x05\n\x01<\x18\x02\x12\x02\x18\x04", 11, ERR_UNSUPPORTED, "char"},
        {"\n\x05\n\x01<\x18\x01", 7, ERR_FORMAT, "unknown"},
        {"\n\x05\n\x01<\x18\x02\n\x05\n\x01<\x18\x01", 14, ERR_FORMAT, "twice"},
        {"\n\x05\n\x01<\x18\x02\n\x05\n\x01>\x18\x02", 14, ERR_FORMAT, "both"},
        {"\n\x05\n\x01<\x18\x06", 7, ERR_FORMAT, "<0xNN>"},
        {"\n\x08\n\x01<\x15\x00\x00\x80\x7f", 10, ERR_FORMAT, "finite"},
        {"\n\x05\n\x01<\x18\x02*\x03\x12\x01x", 12, ERR_UNSUPPORTED, "denormalizer"},
        {"\n\x05\n\x01<\x18\x02\x1a\x03\x12\x01x", 12, ERR_FORMAT, "precompiled_charsmap"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK_ERR(tokenizer_open(&t, bad[i].bytes, bad[i].n, "", 0, "m", &e), bad[i].code,
                  bad[i].text);
        assert_null(t);
    }
    buf_free(&b);
}

typedef struct stage_test {
    json *models;
    buf seen; /* the text of all lines, to see which types they use */
} stage_test;

static void check_stage(const json *line, void *arg)
{
    stage_test *s = arg;
    json *j = cJSON_Duplicate(line, 1);
    const char *model = json_get(line, "model")->valuestring;
    cJSON_ReplaceItemInObject(j, "model", cJSON_Duplicate(json_get(s->models, model), 1));
    char *text = cJSON_PrintUnformatted(j);
    tokenizer *t = open_text(text, strlen(text));
    buf_puts(&s->seen, text);
    for (const json *row = json_get(line, "rows")->child; row; row = row->next)
        check_row(t, row, json_get(line, "name")->valuestring);
    tokenizer_close(t);
    cJSON_free(text);
    json_drop(j);
}

static void is_seen(const stage_test *s, const char *family, const char *type)
{
    char want[80];
    snprintf(want, sizeof want, "\"type\":\"%s\"", type);
    if (!strstr(s->seen.data, want)) fail_msg("no golden has a %s of type %s", family, type);
}

/* All the rows of the four tables and all models are used by some golden. */
static void stages(void **state)
{
    (void)state;
    const tok_family *families[] = {&tok__normalizers, &tok__pretokenizers, &tok__decoders,
                                    &tok__postprocessors};
    stage_test s = {0};
    CHECK_OK(json_parse_file(&s.models, FIXTURES "models.json", &e));
    assert_true(each_line(FIXTURES "stages.jsonl", check_stage, &s) > 50);
    for (int f = 0; f < 4; f++)
        for (size_t i = 0; i < families[f]->n; i++)
            is_seen(&s, families[f]->name, families[f]->kinds[i].type);
    for (size_t i = 0; i < tok__n_models; i++)
        is_seen(&s, "model", tok__models[i]->type);
    buf_free(&s.seen);
    json_drop(s.models);
}

/* ---- small tokenizers written here ---- */

#define VOCAB "\"vocab\":{\"a\":0,\"b\":1,\" \":2,\"ab\":3,\"a b\":4,\"a \":5,\"abab\":6}"

static tokenizer *tiny(const char *rest)
{
    char *text = xasprintf("{\"model\":{\"type\":\"BPE\"," VOCAB ",%s}", rest);
    tokenizer *t = open_text(text, strlen(text));
    free(text);
    return t;
}

static void expect(const tokenizer *t, const char *text, bool special, const char *want)
{
    ids l = {0};
    buf b = {0};
    CHECK_OK(tokenizer_encode(t, text, strlen(text), special, &l, &e));
    buf_puts(&b, "");
    for (size_t i = 0; i < l.n; i++)
        buf_printf(&b, "%s%d", i ? " " : "", l.v[i]);
    assert_string_equal(b.data, want);
    ids_free(&l);
    buf_free(&b);
}

static void merges_in_three_forms(void **state)
{
    (void)state;
    tokenizer *t = tiny("\"merges\":[\"a b\",\"ab ab\"]}");
    expect(t, "ababa b", false, "6 0 2 1");
    tokenizer_close(t);
    t = tiny("\"merges\":[[\"a\",\"b\"],[\"ab\",\"ab\"]]}");
    expect(t, "ababa b", false, "6 0 2 1");
    tokenizer_close(t);
    t = tiny("\"merges\":[[\"a\",\" \"],[\"a \",\"b\"]]}"); /* tokens that hold a space */
    expect(t, "a ba b", false, "4 4");
    tokenizer_close(t);
    t = tiny("\"merges\":[],\"ignore_merges\":true}"); /* the whole word is in the vocabulary */
    expect(t, "abab", false, "6");
    expect(t, "abb", false, "0 1 1");
    tokenizer_close(t);
}

static void surrounding_ids(void **state)
{
    (void)state;
    tokenizer *t = tiny("\"merges\":[]},\"post_processor\":{\"type\":\"RobertaProcessing\","
                        "\"cls\":[\"a\",0],\"sep\":[\"b\",1]}");
    expect(t, " ", true, "0 2 1");
    assert_true(tokenizer_adds_bos(t));
    tokenizer_close(t);
    t = tiny("\"merges\":[]},\"post_processor\":{\"type\":\"Sequence\",\"processors\":["
             "{\"type\":\"ByteLevel\"},{\"type\":\"BertProcessing\",\"cls\":[\"a\",0],"
             "\"sep\":[\"b\",1]}]}");
    expect(t, " ", true, "0 2 1");
    expect(t, " ", false, "2");
    tokenizer_close(t);
}

typedef struct refusal {
    const char *json;
    int code;
    const char *text;
} refusal;

#define MODEL(rest) "{\"model\":{\"type\":\"BPE\"," VOCAB "," rest "}"
#define WHOLE(rest) "{\"model\":{\"type\":\"BPE\"," VOCAB ",\"merges\":[]}," rest "}"

static const refusal refusals[] = {
    {"", ERR_FORMAT, "empty"},
    {"[]", ERR_MISSING, "'model'"},
    {"{\"model\":{\"type\":\"Trigram\"}}", ERR_UNSUPPORTED, "Unigram"},
    {"{\"model\":{\"type\":\"Unigram\"}}", ERR_MISSING, "'vocab'"},
    {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}", ERR_MISSING, "0 pieces"},
    {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",1],[\"b\"]]}}", ERR_FORMAT, "vocab[1]"},
    {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[7]}}", ERR_FORMAT, "vocab[0]"},
    {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",1]],\"unk_id\":1}}", ERR_FORMAT, "unk_id"},
    {"{\"model\":{\"type\":\"WordPiece\"}}", ERR_MISSING, "WordPiece"},
    {"{\"model\":{\"type\":\"WordLevel\",\"vocab\":{}}}", ERR_MISSING, "WordLevel"},
    {"{\"model\":{\"type\":\"WordPiece\",\"vocab\":{\"a\":0},\"max_input_chars_per_word\":-1}}",
     ERR_FORMAT, "max_input_chars"},
    {"{\"model\":{\"type\":\"BPE\",\"merges\":[]}}", ERR_MISSING, "'vocab'"},
    {MODEL("\"x\":0}"), ERR_MISSING, "'merges'"},
    {MODEL("\"merges\":[\"a b\",\"ab\"]}"), ERR_FORMAT, "merges[1]"},
    {MODEL("\"merges\":[\"a b c\"]}"), ERR_FORMAT, "merges[0]"},
    {MODEL("\"merges\":[[\"a\",\"b\"],[\"a\"]]}"), ERR_FORMAT, "merges[1]"},
    {MODEL("\"merges\":[[\"a\",\"b\",\"a\"]]}"), ERR_FORMAT, "merges[0]"},
    {MODEL("\"merges\":[7]}"), ERR_FORMAT, "merges[0]"},
    {MODEL("\"merges\":[\"a z\"]}"), ERR_FORMAT, "'z'"},
    {MODEL("\"merges\":[\"b a\"]}"), ERR_FORMAT, "'ba'"},
    {MODEL("\"merges\":[],\"dropout\":0.1}"), ERR_UNSUPPORTED, "dropout"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1},\"merges\":[]}}", ERR_FORMAT, "'a'"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":1.5},\"merges\":[]}}", ERR_FORMAT, "'a'"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":1e300},\"merges\":[]}}", ERR_FORMAT, "'a'"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":4294967296},\"merges\":[]}}", ERR_FORMAT,
     "'a'"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":3,\"b\":3},\"merges\":[]}}", ERR_FORMAT,
     "both"},
    {WHOLE("\"normalizer\":{\"type\":\"Other\"}"), ERR_UNSUPPORTED, "NFC"},
    {WHOLE("\"normalizer\":{\"type\":\"Precompiled\"}"), ERR_FORMAT, "precompiled_charsmap"},
    {WHOLE("\"normalizer\":{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"a*\"}"), ERR_FORMAT,
     "base64"},
    {WHOLE("\"normalizer\":{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"AAQAAAAs\"}"),
     ERR_FORMAT, "trie"},
    {WHOLE("\"pre_tokenizer\":{\"type\":\"Other\"}"), ERR_UNSUPPORTED, "UnicodeScripts"},
    {WHOLE("\"pre_tokenizer\":{\"type\":\"FixedLength\",\"length\":0}"), ERR_FORMAT, "FixedLength"},
    {WHOLE("\"decoder\":{\"type\":\"Other\"}"), ERR_UNSUPPORTED, "CTC"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[]}}", ERR_MISSING, "empty"},
    {WHOLE("\"post_processor\":{\"type\":\"Other\"}"), ERR_UNSUPPORTED, "TemplateProcessing"},
    {WHOLE("\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"}}"), ERR_FORMAT,
     "regular expression"},
    {WHOLE("\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},"
           "\"behavior\":\"Sideways\"}"),
     ERR_UNSUPPORTED, "Sideways"},
    {WHOLE("\"pre_tokenizer\":{\"type\":\"Split\"}"), ERR_FORMAT, "'pattern'"},
    {WHOLE("\"pre_tokenizer\":{\"type\":\"Sequence\"}"), ERR_FORMAT, "'pretokenizers'"},
    {WHOLE("\"pre_tokenizer\":7"), ERR_FORMAT, "object"},
    {WHOLE("\"normalizer\":{}"), ERR_FORMAT, "'type'"},
    {WHOLE("\"decoder\":{\"type\":\"Strip\",\"content\":\"\"}"), ERR_FORMAT, "'content'"},
    {WHOLE("\"added_tokens\":{}"), ERR_FORMAT, "added_tokens"},
    {WHOLE("\"added_tokens\":[{\"id\":1}]"), ERR_FORMAT, "content"},
    {WHOLE("\"added_tokens\":[{\"content\":\"<x>\",\"id\":4294967296}]"), ERR_FORMAT, "<x>"},
    {WHOLE("\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":"
           "{\"id\":\"<s>\"}},{\"Sequence\":{\"id\":\"A\"}}]}"),
     ERR_FORMAT, "<s>"},
    {WHOLE("\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[]}"), ERR_FORMAT,
     "sequence"},
};

static void malformed_files(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        tokenizer *t = NULL;
        const refusal *r = &refusals[i];
        CHECK_ERR(tokenizer_open(&t, r->json, strlen(r->json), "", 0, "f.json", &e), r->code,
                  r->text);
        assert_null(t);
        assert_non_null(strstr(e.msg, "f.json"));
    }
    buf deep = {0};
    buf_puts(&deep,
             "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]},\"normalizer\":");
    for (int i = 0; i < 40; i++)
        buf_puts(&deep, "{\"type\":\"Sequence\",\"normalizers\":[");
    for (int i = 0; i < 40; i++)
        buf_puts(&deep, "]}");
    buf_puts(&deep, "}");
    tokenizer *t;
    CHECK_ERR(tokenizer_open(&t, deep.data, deep.len, "", 0, "f.json", &e), ERR_LIMIT, "nested");
    buf_free(&deep);
}

static void texts_that_are_no_text(void **state)
{
    (void)state;
    tokenizer *t = open_file(MILLET "tokenizer.json", NULL);
    ids l = {0};
    ids_push(&l, 5);
    CHECK_ERR(tokenizer_encode(t, "ab\xff", 3, true, &l, &e), ERR_VALUE, "byte 2");
    CHECK_ERR(tokenizer_encode(t, "\xed\xa0\x80", 3, true, &l, &e), ERR_VALUE, "byte 0");
    assert_int_equal(l.n, 1); /* what was there stays */
    CHECK_OK(tokenizer_encode(t, "", 0, true, &l, &e));
    CHECK_OK(tokenizer_encode(t, "\0", 1, true, &l, &e)); /* NUL is a character */
    assert_int_equal(l.n, 2);
    ids_free(&l);
    tokenizer_close(t);
}

/* ---- configuration ---- */

static void names_from_the_config(void **state)
{
    (void)state;
    tokenizer *t = open_file(MILLET "tokenizer.json", MILLET "tokenizer_config.json");
    assert_string_equal(tokenizer_bos_text(t), "<|endoftext|>");
    assert_string_equal(tokenizer_eos_text(t), "<|im_end|>");
    assert_int_equal(tokenizer_bos(t), 0);
    assert_int_equal(tokenizer_eos(t), tokenizer_token_id(t, "<|im_end|>"));
    assert_false(tokenizer_adds_bos(t));
    assert_true(tokenizer_is_special(t, tokenizer_eos(t)));
    assert_false(tokenizer_is_special(t, 100));
    assert_false(tokenizer_is_special(t, -1));
    assert_int_equal(tokenizer_size(t), 1007);
    assert_null(tokenizer_token_name(t, 1500));
    assert_null(tokenizer_token_name(t, -1));
    assert_int_equal(tokenizer_token_id(t, "no such token"), -1);
    tokenizer_close(t);
    t = open_file(MILLET "tokenizer.json", NULL);
    assert_int_equal(tokenizer_bos(t), -1);
    assert_string_equal(tokenizer_eos_text(t), "");
    tokenizer_close(t);
}

static tokenizer *with_config(const char *path, const char *config)
{
    buf b = {0};
    tokenizer *t = NULL;
    CHECK_OK(file_read_all(&b, path, 1u << 26, &e));
    CHECK_OK(tokenizer_open(&t, b.data, b.len, config, strlen(config), path, &e));
    buf_free(&b);
    return t;
}

static void bos_by_config(void **state)
{
    (void)state;
    tokenizer *t =
        with_config(MILLET "tokenizer.json", /* the file has no template: the flags do nothing */
                    "{\"bos_token\":{\"content\":\"<|endoftext|>\"},\"add_bos_token\":true,"
                    "\"eos_token\":\"<|im_end|>\",\"add_eos_token\":true}");
    assert_false(tokenizer_adds_bos(t));
    expect(t, "", true, "");
    tokenizer_close(t);
    t = with_config(FIXTURES "stories260K.json", "{\"bos_token\":\"<s>\",\"add_bos_token\":false,"
                                                 "\"tokenizer_class\":\"LlamaTokenizer\"}");
    assert_true(tokenizer_adds_bos(t));
    expect(t, "", true, "1");      /* the template counts, once */
    expect(t, "<s>", true, "1 1"); /* written in the text: honoured, as the library does */
    tokenizer_close(t);
    static const char bare[] = "{\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[]}}";
    CHECK_ERR(tokenizer_open(&t, bare, sizeof bare - 1, "{", 1, "f.json", &e), ERR_FORMAT,
              "tokenizer_config.json");
}

static tokenizer *open_both(const char *text, const char *config)
{
    tokenizer *t = NULL;
    CHECK_OK(tokenizer_open(&t, text, strlen(text), config, strlen(config), "f.json", &e));
    return t;
}

/* Ids of added tokens: the library numbers them itself, and so do the tokens of the config. */
static void numbers_of_added_tokens(void **state)
{
    (void)state;
#define HOLES      "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"c\":5},\"merges\":[]}"
#define ROW(s, id) "{\"content\":\"" s "\",\"special\":true,\"id\":" id "}"
    static const char rows[] = "{" HOLES ",\"added_tokens\":[" ROW("<x>", "9") "," ROW(
        "", "3") "," ROW("b", "8") "," ROW("<y>", "2") "]}";
    tokenizer *t = open_both(rows, "");
    expect(t, "a<x>b<y>", false, "0 3 1 4"); /* three entries, however high the ids */
    tokenizer_close(t);
    t = open_both(rows, "{\"pad_token\":\"<p>\",\"extra_special_tokens\":{\"image\":\"<i>\"},"
                        "\"additional_special_tokens\":[\"<q>\",\"a\"],\"added_tokens_decoder\":{"
                        "\"50\":{\"content\":\"<z>\"},\"40\":{\"content\":\"<x>\",\"lstrip\":true},"
                        "\"30\":{\"content\":\"<w>\",\"rstrip\":true}}}");
    expect(t, "c <x><w> <z><p><i><q>a", false, "5 3 5 6 7 8 9 0");
    assert_true(tokenizer_is_special(t, 3));
    assert_false(tokenizer_is_special(t, 6));
    assert_true(tokenizer_is_special(t, 7));
    tokenizer_close(t);
}

static void spaces_that_two_tokens_take(void **state)
{
    (void)state;
    tokenizer *t =
        open_both("{" HOLES ",\"added_tokens\":[{\"id\":3,\"content\":\" \",\"lstrip\":true,"
                  "\"rstrip\":true}]}",
                  "");
    expect(t, "a   b", false, "0 3 1"); /* the second and third match have nothing left */
    tokenizer_close(t);
}

static void unknown_token_without_an_entry(void **state)
{
    (void)state;
    ids l = {0};
    tokenizer *t = open_both("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],"
                             "\"unk_token\":\"<unk>\"}}",
                             "");
    expect(t, "aa", false, "0 0");
    CHECK_ERR(tokenizer_encode(t, "ab", 2, false, &l, &e), ERR_VALUE, "'<unk>'");
    tokenizer_close(t);
    ids_free(&l);
}

/* What Oniguruma reads in a pattern and PCRE2 does not: "ab" stays whole where nothing cuts it. */
static void patterns_of_the_other_library(void **state)
{
    (void)state;
    static const struct {
        const char *pattern, *text, *want;
    } row[] = {
        {"[a-c&&[^b]]+", "abab", "0 1 0 1"},   {"[^a-c&&[^b]]+", "abab", "0 1 0 1"},
        {"[b[xy]]+", "abab", "0 1 0 1"},       {"[x&&[ab]]", "abab", "3 3"},
        {"\\\\u0061", "abab", "0 1 0 1"},      {"[\\\\u0061x]", "abab", "0 1 0 1"},
        {"(?m:a.*)", "b\nabab", "1 4 3 3"},    {"a(?m:.)a", "a\nab", "0 4 0 1"},
        {"\\\\v", "ab\nab", "3 4 3"},          {"b{,1}", "abab", "0 1 0 1"},
        {"[[:alpha:]&&a]", "abab", "0 1 0 1"}, {"[&a]", "abab", "0 1 0 1"},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        char *file = xasprintf(
            "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"ab\":3,\"\\n\":4},"
            "\"merges\":[\"a b\"]},\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Isolated\","
            "\"invert\":false,\"pattern\":{\"Regex\":\"%s\"}}}",
            row[i].pattern);
        tokenizer *t = open_both(file, "");
        expect(t, row[i].text, false, row[i].want);
        tokenizer_close(t);
        free(file);
    }
}

/* ---- streaming ---- */

static void streaming_never_splits_a_character(void **state)
{
    (void)state;
    static const char text[] =
        "a \xF0\x9F\x99\x82 b \xE4\xB8\xAD\xE6\x96\x87 \xC3\xA9 \xF0\x9F\x91\x8D\xF0\x9F\x8F\xBD";
    const char *files[] = {MILLET "tokenizer.json", FIXTURES "stories260K.json"};
    for (int f = 0; f < 2; f++) {
        tokenizer *t = open_file(files[f], NULL);
        ids l = {0};
        buf all = {0};
        detok d;
        CHECK_OK(tokenizer_encode(t, text, sizeof text - 1, false, &l, &e));
        detok_init(&d, t, true);
        for (size_t i = 0; i < l.n; i++) {
            detok_push(&d, l.v[i], &all);
            assert_int_equal(utf8_valid_prefix(all.data, all.len), all.len);
            assert_memory_equal(all.data, text, all.len);
            detok_push(&d, 1500, &all); /* a padded row of the model: no text */
            detok_push(&d, -1, &all);
        }
        detok_flush(&d, &all);
        assert_string_equal(all.data, text);
        detok_free(&d);
        ids_free(&l);
        buf_free(&all);
        tokenizer_close(t);
    }
}

static void streaming_an_unfinished_character(void **state)
{
    (void)state;
    tokenizer *t = open_file(FIXTURES "stories260K.json", NULL);
    int32_t lead = tokenizer_token_id(t, "<0xF0>"), next = tokenizer_token_id(t, "<0x9F>");
    buf out = {0};
    detok d;
    detok_init(&d, t, true);
    detok_push(&d, lead, &out);
    detok_push(&d, next, &out);
    assert_int_equal(out.len, 0); /* held back */
    detok_push(&d, tokenizer_token_id(t, "a"), &out);
    assert_string_equal(out.data, "\xEF\xBF\xBD"
                                  "a"); /* one mark for the broken sequence */
    detok_push(&d, lead, &out);
    detok_flush(&d, &out);
    assert_string_equal(out.data, "\xEF\xBF\xBD"
                                  "a\xEF\xBF\xBD");
    detok_free(&d);
    buf_clear(&out);
    tokenizer_token_bytes(t, lead, &out);
    assert_int_equal(out.len, 1);
    assert_int_equal((unsigned char)out.data[0], 0xF0);
    buf_free(&out);
    tokenizer_close(t);
}

static void bytes_of_tokens_make_the_text(void **state)
{
    (void)state;
    static const char text[] = "Once upon\n a time, \xE4\xB8\xAD 12  x";
    tokenizer *t = open_file(MILLET "tokenizer.json", NULL);
    ids l = {0};
    buf out = {0};
    CHECK_OK(tokenizer_encode(t, text, sizeof text - 1, false, &l, &e));
    for (size_t i = 0; i < l.n; i++)
        tokenizer_token_bytes(t, l.v[i], &out);
    assert_string_equal(out.data, text);
    out.len = 0;
    tokenizer_token_bytes(t, 1500, &out);
    assert_int_equal(out.len, 0);
    tokenizer_decode(t, (const int32_t[]){1500, -7, 1 << 30, 2}, 4, true, &out);
    assert_int_equal(out.len, 0);
    ids_free(&l);
    buf_free(&out);
    tokenizer_close(t);
}

/* ---- length and threads ---- */

static double encode_seconds(const tokenizer *t, size_t n)
{
    char *text = xmalloc(n);
    uint32_t x = 1;
    for (size_t i = 0; i < n; i++) {
        x = x * 1664525u + 1013904223u;
        text[i] = (char)('a' + (x >> 24) % 26);
    }
    ids l = {0};
    double t0 = clock_seconds();
    CHECK_OK(tokenizer_encode(t, text, n, false, &l, &e));
    double s = clock_seconds() - t0;
    assert_true(l.n > n / 8);
    ids_free(&l);
    free(text);
    return s;
}

/* 16 times the text without a space: a quadratic merge would take 256 times as long. */
static void long_words(void **state)
{
    (void)state;
    tokenizer *t = open_file(FIXTURES "stories260K.json", NULL);
    double a = encode_seconds(t, 50000), b = encode_seconds(t, 800000);
    if (b > 100 * a + 0.2) fail_msg("50 kB take %.3f s, 800 kB %.3f s", a, b);
    tokenizer_close(t);
}

typedef struct worker {
    const tokenizer *t;
    const char *text;
    size_t n;
    ids out;
} worker;

static void *encode_many(void *arg)
{
    worker *w = arg;
    for (int i = 0; i < 20; i++) {
        w->out.n = 0;
        if (tokenizer_encode(w->t, w->text, w->n, true, &w->out, NULL) < 0) return w;
    }
    return NULL;
}

static void several_threads(void **state)
{
    (void)state;
    buf text = {0};
    CHECK_OK(file_read_all(&text, MILLET "sample.txt", 1u << 20, &e));
    if (text.len > 60000) text.len = utf8_complete_prefix(text.data, 60000);
    tokenizer *t = open_file(MILLET "tokenizer.json", NULL);
    worker w[4];
    pthread_t id[4];
    for (int i = 0; i < 4; i++) {
        w[i] = (worker){.t = t, .text = text.data, .n = text.len};
        assert_int_equal(pthread_create(&id[i], NULL, encode_many, &w[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        void *failed;
        pthread_join(id[i], &failed);
        assert_null(failed);
        assert_int_equal(w[i].out.n, w[0].out.n);
        assert_memory_equal(w[i].out.v, w[0].out.v, w[0].out.n * sizeof(int32_t));
    }
    for (int i = 0; i < 4; i++)
        ids_free(&w[i].out);
    tokenizer_close(t);
    buf_free(&text);
}

/* Real texts come back from their ids byte for byte. */
static void round_trip(void **state)
{
    (void)state;
    const char *files[] = {MILLET "tokenizer.json", FIXTURES "stories260K.json"};
    buf text = {0}, back = {0};
    CHECK_OK(file_read_all(&text, MILLET "sample.txt", 1u << 20, &e));
    for (int f = 0; f < 2; f++) {
        tokenizer *t = open_file(files[f], NULL);
        ids l = {0};
        CHECK_OK(tokenizer_encode(t, text.data, text.len, false, &l, &e));
        buf_clear(&back);
        tokenizer_decode(t, l.v, l.n, false, &back);
        assert_int_equal(back.len, text.len);
        assert_memory_equal(back.data, text.data, text.len);
        ids_free(&l);
        tokenizer_close(t);
    }
    buf_free(&text);
    buf_free(&back);
}

/* ---- damaged files ---- */

static uint32_t next_random(uint32_t *x)
{
    *x = *x * 1664525u + 1013904223u;
    return *x >> 8;
}

/* Bytes changed, cut and doubled at random: opens or refuses, and what opens can be used. */
static void damage(const char *path, int rounds)
{
    buf whole = {0}, b = {0};
    uint32_t x = 12345;
    int opened = 0;
    CHECK_OK(file_read_all(&whole, path, 1u << 20, &e));
    for (int round = 0; round < rounds; round++) {
        buf_clear(&b);
        buf_add(&b, whole.data, whole.len);
        for (uint32_t k = 1 + next_random(&x) % 3; k > 0; k--) {
            size_t at = next_random(&x) % b.len, n = next_random(&x) % 40;
            if (at + n > b.len) n = b.len - at;
            switch (next_random(&x) % 4) {
            case 0:
                b.data[at] = (char)next_random(&x);
                break;
            case 1:
                b.data[at] = "0123456789\"{}[],:-e"[next_random(&x) % 19];
                break;
            case 2:
                memmove(b.data + at, b.data + at + n, b.len - at - n);
                b.len -= n;
                break;
            default:
                memmove(b.data + at, b.data + next_random(&x) % (b.len - n + 1), n);
            }
        }
        tokenizer *t = NULL;
        int rc = tokenizer_open(&t, b.data, b.len, "", 0, "damaged", &e);
        assert_true((rc == 0) == (t != NULL));
        if (!t) continue;
        opened++;
        ids l = {0};
        buf out = {0};
        static const char text[] = "Once <s> upon \xC3\xA9\xE4\xB8\xAD <unk> zzz";
        if (tokenizer_encode(t, text, sizeof text - 1, true, &l, &e) == 0)
            tokenizer_decode(t, l.v, l.n, false, &out);
        ids_free(&l);
        buf_free(&out);
        tokenizer_close(t);
    }
    assert_true(opened > 20 && opened < rounds - 20); /* both ends are reached */
    buf_free(&whole);
    buf_free(&b);
}

static void damaged_files(void **state)
{
    (void)state;
    damage(FIXTURES "stories260K.json", 1500);
    damage(FIXTURES "spm-unigram.model", 1500);
    damage(FIXTURES "spm-bpe.model", 1500);
    damage(FIXTURES "spm-unigram.json", 1500);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(real_tokenizers),
        cmocka_unit_test(stages),
        cmocka_unit_test(sentencepiece_models),
        cmocka_unit_test(charsmap_by_kind_of_file),
        cmocka_unit_test(models_and_their_config),
        cmocka_unit_test(merges_in_three_forms),
        cmocka_unit_test(surrounding_ids),
        cmocka_unit_test(malformed_files),
        cmocka_unit_test(texts_that_are_no_text),
        cmocka_unit_test(names_from_the_config),
        cmocka_unit_test(bos_by_config),
        cmocka_unit_test(numbers_of_added_tokens),
        cmocka_unit_test(patterns_of_the_other_library),
        cmocka_unit_test(spaces_that_two_tokens_take),
        cmocka_unit_test(unknown_token_without_an_entry),
        cmocka_unit_test(streaming_never_splits_a_character),
        cmocka_unit_test(streaming_an_unfinished_character),
        cmocka_unit_test(bytes_of_tokens_make_the_text),
        cmocka_unit_test(long_words),
        cmocka_unit_test(several_threads),
        cmocka_unit_test(round_trip),
        cmocka_unit_test(damaged_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
