/* What makes tokenizing fast gives the same ids: long words against the plain definition of BPE,
 * windows that disagree, time in proportion to length, the short cut for ASCII in the classes.
 *
 * The definition, spelt out below: join the adjacent pair of the lowest rank, the leftmost of
 * equals, until no pair has a merge. */
#include "check.h"
#include <ctype.h>
#include <time.h>
#include "base/file.h"
#include "base/json.h"
#include "text/tok_internal.h"

#define TOKENS 512

static err e;
static uint32_t seed;

static uint32_t pick(uint32_t n)
{
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) % n;
}

/* ---- a model made here, and the plain definition ---- */

typedef struct model {
    size_t n, n_letters;
    char *name[TOKENS];
    int32_t left[TOKENS], right[TOKENS]; /* of merge i */
    size_t n_merges;
    int32_t rank[TOKENS][TOKENS], to[TOKENS][TOKENS]; /* rank -1 = no merge */
} model;

static int32_t token_of(const model *m, const char *name)
{
    for (size_t i = 0; i < m->n; i++)
        if (!strcmp(m->name[i], name)) return (int32_t)i;
    return -1;
}

static void add_merge(model *m, int32_t left, int32_t right)
{
    char *name = xasprintf("%s%s", m->name[left], m->name[right]);
    int32_t to = token_of(m, name);
    if (to < 0) {
        to = (int32_t)m->n;
        m->name[m->n++] = name;
    } else {
        free(name);
    }
    m->rank[left][right] = (int32_t)m->n_merges;
    m->to[left][right] = to;
    m->left[m->n_merges] = left;
    m->right[m->n_merges++] = right;
}

static model *random_model(size_t letters, size_t merges)
{
    model *m = xcalloc(1, sizeof *m);
    memset(m->rank, 0xff, sizeof m->rank);
    for (m->n_letters = letters; m->n < letters; m->n++)
        m->name[m->n] = xasprintf("%c", (int)('a' + m->n));
    while (m->n_merges < merges) {
        int32_t a = (int32_t)pick((uint32_t)m->n), b = (int32_t)pick((uint32_t)m->n);
        if (m->rank[a][b] < 0 && strlen(m->name[a]) + strlen(m->name[b]) < 12) add_merge(m, a, b);
    }
    return m;
}

static void drop_model(model *m)
{
    for (size_t i = 0; i < m->n; i++)
        free(m->name[i]);
    free(m);
}

static tokenizer *open_buf(const buf *b)
{
    tokenizer *t = NULL;
    CHECK_OK(tokenizer_open(&t, b->data, b->len, "", 0, "test", &e));
    return t;
}

static tokenizer *open_model(const model *m)
{
    buf b = {0};
    buf_puts(&b, "{\"model\":{\"type\":\"BPE\",\"vocab\":{");
    for (size_t i = 0; i < m->n; i++)
        buf_printf(&b, "%s\"%s\":%zu", i ? "," : "", m->name[i], i);
    buf_puts(&b, "},\"merges\":[");
    for (size_t i = 0; i < m->n_merges; i++)
        buf_printf(&b, "%s\"%s %s\"", i ? "," : "", m->name[m->left[i]], m->name[m->right[i]]);
    buf_puts(&b, "]}}");
    tokenizer *t = open_buf(&b);
    buf_free(&b);
    return t;
}

static size_t merge_plainly(const model *m, int32_t *v, size_t n)
{
    for (;;) {
        size_t best = n;
        int32_t low = INT32_MAX;
        for (size_t i = 0; i + 1 < n; i++) {
            int32_t r = m->rank[v[i]][v[i + 1]];
            if (r < 0 || r >= low) continue;
            low = r;
            best = i;
        }
        if (best == n) return n;
        v[best] = m->to[v[best]][v[best + 1]];
        memmove(v + best + 1, v + best + 2, (n - best - 2) * sizeof *v);
        n--;
    }
}

static void check_length(const model *m, const tokenizer *t, size_t n)
{
    char *text = xmalloc(n);
    int32_t *want = xmalloc(n * sizeof *want);
    ids got = {0};
    for (size_t i = 0; i < n; i++) {
        want[i] = (int32_t)pick((uint32_t)m->n_letters);
        text[i] = m->name[want[i]][0];
    }
    size_t k = merge_plainly(m, want, n);
    CHECK_OK(tokenizer_encode(t, text, n, false, &got, &e));
    assert_int_equal(got.n, k);
    assert_memory_equal(got.v, want, k * sizeof *want);
    ids_free(&got);
    free(want);
    free(text);
}

/* Lengths about the borders between the ways of merging: 96 symbols, windows of 4096. */
static void as_defined(void **state)
{
    (void)state;
    static const size_t lengths[] = {1, 2, 3, 7, 95, 96, 97, 98, 300, 4095, 4096, 4097, 7000, 9000};
    for (size_t letters = 1; letters <= 8; letters += letters < 3 ? 1 : 5) {
        seed = (uint32_t)letters;
        model *m = random_model(letters, letters < 2 ? 30 : 300);
        tokenizer *t = open_model(m);
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
            check_length(m, t, lengths[i]);
        tokenizer_close(t);
        drop_model(m);
    }
}

/* ---- windows that disagree ---- */

#define LETTERS 150
#define CHAIN   20000 /* characters; every pair of neighbours occurs once */

static void put_letter(buf *b, size_t i)
{
    buf_printf(b, "%c%c", (int)(0xC4 + i / 64), (int)(0x80 + i % 64)); /* U+0100 and on */
}

/* A walk over the letters that uses no pair twice: from each one to the next not yet used. */
static void walk(size_t *at)
{
    static size_t used[LETTERS];
    memset(used, 0, sizeof used);
    at[0] = 0;
    for (size_t i = 1; i < CHAIN; i++) {
        size_t from = at[i - 1];
        assert_true(used[from] < LETTERS);
        at[i] = (from + 1 + used[from]++) % LETTERS;
    }
}

/* The merge of each pair has a lower rank than that of the pair before: pairs join from the right
 * end, and which ones do is told by the far end only. No window that ends earlier can know. */
static void far_end_decides(void **state)
{
    (void)state;
    static size_t at[CHAIN];
    buf b = {0}, text = {0};
    walk(at);
    buf_puts(&b, "{\"model\":{\"type\":\"BPE\",\"vocab\":{");
    for (size_t i = 0; i < LETTERS; i++) {
        buf_puts(&b, i ? ",\"" : "\"");
        put_letter(&b, i);
        buf_printf(&b, "\":%zu", i);
    }
    for (size_t i = 0; i + 1 < CHAIN; i++) {
        buf_puts(&b, ",\"");
        put_letter(&b, at[i]);
        put_letter(&b, at[i + 1]);
        buf_printf(&b, "\":%zu", LETTERS + i);
    }
    buf_puts(&b, "},\"merges\":[");
    for (size_t i = CHAIN - 1; i-- > 0;) {
        buf_puts(&b, "\"");
        put_letter(&b, at[i]);
        buf_puts(&b, " ");
        put_letter(&b, at[i + 1]);
        buf_puts(&b, i ? "\"," : "\"]}}");
    }
    tokenizer *t = open_buf(&b);
    for (size_t i = 0; i < CHAIN; i++)
        put_letter(&text, at[i]);
    for (size_t n = CHAIN - 1; n <= CHAIN; n++) {
        ids got = {0};
        CHECK_OK(tokenizer_encode(t, text.data, 2 * n, false, &got, &e));
        assert_int_equal(got.n, (n + 1) / 2);
        for (size_t k = 0; k < got.n; k++) {
            size_t pair = n % 2 ? 2 * k - 1 : 2 * k;
            assert_int_equal(got.v[k], n % 2 && !k ? at[0] : LETTERS + pair);
        }
        ids_free(&got);
    }
    tokenizer_close(t);
    buf_free(&b);
    buf_free(&text);
}

/* ---- time ---- */

static const char *const patterns[] = {
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+"
    "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{N}{1,3}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?"
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
};

/* The byte-level model of millet-7m behind another pattern. */
static tokenizer *with_pattern(const char *pattern)
{
    json *j;
    CHECK_OK(json_parse_file(&j, "models/millet-7m/tokenizer.json", &e));
    cJSON *split = cJSON_CreateObject(), *level = cJSON_CreateObject();
    cJSON *sequence = cJSON_CreateObject();
    cJSON_AddStringToObject(split, "type", "Split");
    cJSON_AddStringToObject(cJSON_AddObjectToObject(split, "pattern"), "Regex", pattern);
    cJSON_AddStringToObject(split, "behavior", "Isolated");
    cJSON_AddStringToObject(level, "type", "ByteLevel");
    cJSON_AddBoolToObject(level, "add_prefix_space", false);
    cJSON_AddBoolToObject(level, "use_regex", false);
    cJSON_AddStringToObject(sequence, "type", "Sequence");
    cJSON *list = cJSON_AddArrayToObject(sequence, "pretokenizers");
    cJSON_AddItemToArray(list, split);
    cJSON_AddItemToArray(list, level);
    cJSON_ReplaceItemInObject(j, "pre_tokenizer", sequence);
    buf b = {0};
    char *text = cJSON_PrintUnformatted(j);
    buf_puts(&b, text);
    tokenizer *t = open_buf(&b);
    cJSON_free(text);
    buf_free(&b);
    json_drop(j);
    return t;
}

/* Processor time of this thread: other work on the machine does not count. */
static double encode_seconds(const tokenizer *t, const char *const *units, size_t n_units, size_t n)
{
    buf text = {0};
    ids l = {0};
    struct timespec a, b;
    while (text.len < n)
        buf_puts(&text, units[n_units > 1 ? pick((uint32_t)n_units) : 0]);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
    CHECK_OK(tokenizer_encode(t, text.data, text.len, false, &l, &e));
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
    buf_free(&text);
    ids_free(&l);
    return (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9;
}

/* Eight times the text: in proportion it takes 8 times as long, if quadratic 64 times. */
static void time_grows_with_length(void **state)
{
    (void)state;
    static const char *const units[][8] = {
        {"a", "e", "i", "o", "u", "t", "n", "s"},
        {"A", "E", "I", "O", "U", "T", "N", "S"},
        {"\xE4\xB8\x80", "\xE7\x9A\x84", "\xE4\xBA\xBA", "\xE6\x88\x91", "\xE5\x9C\xA8"},
        {"aA", "Aa", "aB"},
        {"1", "2", "3"},
        {"\xCC\x81", "\xCC\x88"},
        {"!", "?", "'", "<|"},
        {"a"},
        {" "},
        {"\n"},
        {" \n"},
        {"\n          "},
        {"'"},
    };
    for (size_t p = 0; p < sizeof patterns / sizeof *patterns; p++) {
        tokenizer *t = with_pattern(patterns[p]);
        for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
            size_t n = 0;
            while (n < 8 && units[u][n])
                n++;
            double a = encode_seconds(t, units[u], n, 30000);
            double b = encode_seconds(t, units[u], n, 240000);
            if (b > 24 * a + 0.02)
                fail_msg("pattern %zu, text %zu: 30 kB take %.4f s, 240 kB %.4f s", p, u, a, b);
        }
        tokenizer_close(t);
    }
}

/* ---- classes ---- */

/* The bits for ASCII against the C library. */
static void ascii_classes(void **state)
{
    (void)state;
    for (int c = 0; c < 128; c++) {
        bool white = c == 0 || c == '\t' || c == '\n' || c == '\r';
        assert_int_equal(tok__is(TOK_WORD, (uint32_t)c), isalnum(c) || c == '_');
        assert_int_equal(tok__is(TOK_NUMERIC, (uint32_t)c), isdigit(c) != 0);
        assert_int_equal(tok__is(TOK_PUNCT, (uint32_t)c), ispunct(c) != 0);
        assert_int_equal(tok__is(TOK_OTHER, (uint32_t)c), iscntrl(c) && !white);
        assert_false(tok__is(TOK_NONSPACING, (uint32_t)c));
        assert_false(tok__is(TOK_COMBINING, (uint32_t)c));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_defined),
        cmocka_unit_test(far_end_decides),
        cmocka_unit_test(time_grows_with_length),
        cmocka_unit_test(ascii_classes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
