/* GGUF: every block type against what the Python package gguf decodes (tests/fixtures/gguf), the
 * mapping to Hugging Face names, config and tokenizer, and damaged files of every kind. */
#include "check.h"
#include <openssl/evp.h>
#include <unistd.h>
#include "base/log.h"
#include "ckpt/ckpt.h"
#include "ckpt/gguf.h"

#define FIXTURE "tests/fixtures/gguf/tiny.gguf"

static char dir[64];

static int setup(void **state)
{
    (void)state;
    log_set_level(LOG_ERROR);
    snprintf(dir, sizeof dir, "/tmp/tare-gguf-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    return file_remove_tree(dir, NULL);
}

/* ---- the reference -----------------------------------------------------------------------------
 */

static void sha256_of(const void *p, size_t n, char hex[65])
{
    unsigned char md[EVP_MAX_MD_SIZE];
    unsigned len = 0;
    assert_int_equal(EVP_Digest(p, n, md, &len, EVP_sha256(), NULL), 1);
    for (unsigned i = 0; i < 32; i++)
        snprintf(hex + 2 * (size_t)i, 3, "%02x", md[i]);
}

/* Also in pieces of three rows: what a row decodes to does not depend on its neighbours. */
static void decoded_as_the_reference_does(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    buf b = {0};
    CHECK_OK(ckpt_open(&c, FIXTURE, &e));
    CHECK_OK(file_read_all(&b, "tests/fixtures/gguf/expected.txt", 1 << 20, &e));
    size_t lines = 0;
    for (char *s = b.data, *end; *s; s = end + 1, lines++) {
        end = strchr(s, '\n');
        char name[128], want[65], got[65];
        long long rows, cols;
        assert_int_equal(sscanf(s, "%127s %lld %lld %64s", name, &rows, &cols, want), 4);
        const ckpt_tensor *t;
        CHECK_OK(ckpt_need(c, name, &t, &e));
        assert_int_equal(t->n_dims == 2 ? t->shape[0] : 1, rows);
        assert_int_equal(t->shape[t->n_dims - 1], cols);
        assert_true((t->dtype == NUM_NONE) == (t->gguf != NULL));
        float *out = xmalloc((size_t)(rows * cols) * sizeof *out);
        for (int64_t r = 0; r < rows; r += 3)
            CHECK_OK(ckpt_load_rows(c, t, r, r + 3 < rows ? r + 3 : rows, out + r * cols, &e));
        sha256_of(out, (size_t)(rows * cols) * sizeof *out, got);
        if (strcmp(got, want)) fail_msg("%s (%s) differs", name, t->gguf ? t->gguf->name : "plain");
        free(out);
    }
    assert_int_equal(lines, ckpt_n_tensors(c));
    /* Every row of the type table is in the fixture. */
    for (int i = 0; i < gguf_n_types; i++) {
        char word[16];
        snprintf(word, sizeof word, "%s ", gguf_types[i].name);
        assert_non_null(strstr(ckpt_gguf_types(c), word));
        assert_ptr_equal(gguf_type_by_id(gguf_types[i].id), &gguf_types[i]);
    }
    buf_free(&b);
    ckpt_close(c);
}

static void config_of_the_fixture(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    CHECK_OK(ckpt_open(&c, FIXTURE, &e));
    const ckpt_config *f = ckpt_cfg(c);
    assert_string_equal(f->architecture, "LlamaForCausalLM");
    assert_int_equal(f->vocab_size, 40);
    assert_int_equal(f->hidden_size, 256);
    assert_int_equal(f->n_layers, 2);
    assert_int_equal(f->n_heads, 2);
    assert_int_equal(f->n_kv_heads, 1);
    assert_int_equal(f->head_dim, 16);
    assert_int_equal(f->max_position, 128);
    assert_true(f->rms_norm_eps == 1e-5); /* the decimal, not the fp32 value */
    assert_true(f->tie_embeddings);
    assert_int_equal(f->n_eos, 2); /* eos 0 and eot 7 */
    assert_int_equal(f->eos[0], 0);
    assert_int_equal(f->eos[1], 7);
    assert_int_equal(f->bos[0], 1);
    assert_true(ckpt_is_gguf(c));
    assert_int_equal(ckpt_find(c, "model.layers.1.self_attn.q_proj.weight")->permute_heads, 2);
    assert_int_equal(ckpt_find(c, "model.layers.1.self_attn.k_proj.weight")->permute_heads, 1);
    assert_int_equal(ckpt_find(c, "model.layers.1.self_attn.v_proj.weight")->permute_heads, 0);
    assert_null(ckpt_side_file(c, "tokenizer.json"));
    ckpt_close(c);
}

static void tokenizer_of_the_fixture(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    buf b = {0};
    json *j;
    CHECK_OK(ckpt_open(&c, FIXTURE, &e));
    CHECK_OK(ckpt_tokenizer_json(c, &b, &e));
    CHECK_OK(json_parse(&j, b.data, b.len, "tokenizer.json", &e));
    const json *model = json_get(j, "model"), *vocab = json_get(model, "vocab");
    assert_int_equal(cJSON_GetArraySize(vocab), 40);
    assert_int_equal(json_get(vocab, "hello")->valueint, 34);
    assert_int_equal(cJSON_GetArraySize(json_get(model, "merges")), 7);
    assert_string_equal(json_get(model, "merges")->child->valuestring, "h e");
    const json *added = json_get(j, "added_tokens");
    assert_int_equal(cJSON_GetArraySize(added), 4);
    assert_string_equal(json_get(added->child, "content")->valuestring, "<eos>");
    const json *pre = json_get(json_get(j, "pre_tokenizer"), "pretokenizers");
    assert_string_equal(json_get(pre->child, "type")->valuestring, "Digits");
    assert_string_equal(json_get(json_get(j, "post_processor"), "type")->valuestring,
                        "TemplateProcessing");
    json_drop(j);
    buf_clear(&b);
    CHECK_OK(ckpt_tokenizer_config(c, &b, &e));
    CHECK_OK(json_parse(&j, b.data, b.len, "tokenizer_config.json", &e));
    assert_string_equal(json_get(j, "eos_token")->valuestring, "<eos>");
    assert_true(cJSON_IsTrue(json_get(j, "add_bos_token")));
    json_drop(j);
    buf_clear(&b);
    CHECK_OK(ckpt_chat_template(c, &b, &e));
    assert_non_null(strstr(b.data, "<end>"));
    buf_free(&b);
    ckpt_close(c);
}

/* What a converter needs beside the weights. */
static void side_files_are_made(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c, *back;
    ckpt_writer *w;
    char *out = file_join(dir, "converted"), *text;
    const int64_t shape[] = {4};
    buf b = {0};
    CHECK_OK(ckpt_open(&c, FIXTURE, &e));
    CHECK_OK(ckpt_writer_open(&w, out, 0, false, &e));
    assert_int_equal(ckpt_writer_side_files(w, c, &e), 4);
    CHECK_OK(ckpt_writer_tensor(w, "a", NUM_F32, 1, shape, "0123456789abcdef", &e));
    text = cJSON_PrintUnformatted(ckpt_cfg(c)->raw);
    CHECK_OK(ckpt_writer_finish(w, text, &e));
    CHECK_OK(ckpt_writer_publish(&w, &e));
    cJSON_free(text);
    CHECK_OK(ckpt_open(&back, out, &e));
    assert_int_equal(ckpt_cfg(back)->n_eos, 2);
    assert_int_equal(ckpt_cfg(back)->eos[1], 7);
    assert_true(ckpt_cfg(back)->rope.theta == ckpt_cfg(c)->rope.theta);
    char *gen = ckpt_side_file(back, "generation_config.json");
    CHECK_OK(file_read_all(&b, gen, 1000, &e));
    assert_non_null(strstr(b.data, "eos_token_id"));
    buf_clear(&b);
    CHECK_OK(ckpt_chat_template(back, &b, &e));
    assert_non_null(strstr(b.data, "<end>"));
    buf_free(&b);
    free(gen);
    ckpt_close(back);
    ckpt_close(c);
    free(out);
}

/* ---- files made by hand ------------------------------------------------------------------------
 */

static void u32(buf *b, uint32_t v)
{
    buf_add(b, &v, 4);
}
static void u64(buf *b, uint64_t v)
{
    buf_add(b, &v, 8);
}
static void str(buf *b, const char *s)
{
    u64(b, strlen(s));
    buf_puts(b, s);
}
static void head(buf *b, uint64_t tensors, uint64_t kvs)
{
    buf_puts(b, "GGUF");
    u32(b, 3);
    u64(b, tensors);
    u64(b, kvs);
}
static void kv_u32(buf *b, const char *key, uint32_t v)
{
    str(b, key);
    u32(b, GGUF_U32);
    u32(b, v);
}
static void kv_str(buf *b, const char *key, const char *v)
{
    str(b, key);
    u32(b, GGUF_STR);
    str(b, v);
}
static void tensor(buf *b, const char *name, uint64_t ne0, uint64_t ne1, uint32_t type, uint64_t at)
{
    str(b, name);
    u32(b, 2);
    u64(b, ne0);
    u64(b, ne1);
    u32(b, type);
    u64(b, at);
}
static void data(buf *b, size_t n)
{
    while (b->len % 32)
        buf_putc(b, 0);
    for (size_t i = 0; i < n; i++)
        buf_putc(b, 1);
}

static void no_key(buf *b)
{
    head(b, 0, 1);
    u64(b, 0);
    u32(b, GGUF_U32);
    u32(b, 1);
}
static void long_key(buf *b)
{
    head(b, 0, 1);
    u64(b, UINT64_MAX - 7);
    data(b, 64);
}
static void bad_utf8_key(buf *b)
{
    head(b, 0, 1);
    kv_u32(b, "a\xFF", 1);
}
static void key_twice(buf *b)
{
    head(b, 0, 2);
    kv_u32(b, "a", 1);
    kv_u32(b, "a", 2);
}
static void value_type_13(buf *b)
{
    head(b, 0, 1);
    str(b, "a");
    u32(b, 13);
    u64(b, 0);
}
static void bool_2(buf *b)
{
    head(b, 0, 1);
    str(b, "a");
    u32(b, GGUF_BOOL);
    buf_putc(b, 2);
    data(b, 8);
}
static void array(buf *b, uint32_t elem, uint64_t n, size_t bytes)
{
    head(b, 0, 1);
    str(b, "list");
    u32(b, GGUF_ARR);
    u32(b, elem);
    u64(b, n);
    data(b, bytes);
}
static void huge_array(buf *b)
{
    array(b, GGUF_U32, UINT64_C(1) << 62, 64);
}
static void huge_string_array(buf *b)
{
    array(b, GGUF_STR, UINT64_C(1) << 61, 64);
}
static void huge_byte_array(buf *b)
{
    array(b, GGUF_U8, 1 << 20, 64);
}
static void nested_array(buf *b)
{
    array(b, GGUF_ARR, 1, 64);
}
static void string_in_array_too_long(buf *b)
{
    array(b, GGUF_STR, 4, 40); /* lengths of 0x0101… */
}
static void counts_too_large(buf *b)
{
    head(b, UINT64_MAX, UINT64_MAX);
}
static void many_keys(buf *b)
{
    head(b, 0, 1000000);
    data(b, 100);
}
static void alignment_i32(buf *b)
{
    head(b, 0, 1);
    str(b, "general.alignment");
    u32(b, GGUF_I32);
    u32(b, 32);
}
static void alignment_0(buf *b)
{
    head(b, 0, 1);
    kv_u32(b, "general.alignment", 0);
}
static void alignment_24(buf *b)
{
    head(b, 0, 1);
    kv_u32(b, "general.alignment", 24);
}
static void alignment_2g(buf *b)
{
    head(b, 0, 1);
    kv_u32(b, "general.alignment", 1u << 31);
}
static void one_tensor(buf *b, uint64_t ne0, uint64_t ne1, uint32_t type, uint64_t at, size_t bytes)
{
    head(b, 1, 0);
    tensor(b, "w", ne0, ne1, type, at);
    data(b, bytes);
}
static void zero_dim(buf *b)
{
    one_tensor(b, 4, 0, 0, 0, 16);
}
static void negative_dim(buf *b)
{
    one_tensor(b, 4, UINT64_MAX, 0, 0, 16);
}
static void overflowing_dims(buf *b)
{
    one_tensor(b, UINT64_C(1) << 40, UINT64_C(1) << 40, 0, 0, 16);
}
static void overflowing_bytes(buf *b)
{
    one_tensor(b, UINT64_C(1) << 31, UINT64_C(1) << 31, 0, 0, 16);
}
static void five_dims(buf *b)
{
    head(b, 1, 0);
    str(b, "w");
    u32(b, 5);
    data(b, 64);
}
static void no_dims(buf *b)
{
    head(b, 1, 0);
    str(b, "w");
    u32(b, 0);
    data(b, 64);
}
static void type_156(buf *b)
{
    one_tensor(b, 32, 1, 156, 0, 64);
}
static void type_39(buf *b)
{
    one_tensor(b, 32, 1, 39, 0, 64);
}
static void part_of_a_block(buf *b)
{
    one_tensor(b, 33, 1, 8, 0, 64);
}
static void offset_wraps(buf *b)
{
    one_tensor(b, 4, 4, 0, UINT64_MAX - 63, 64);
}
static void offset_off_alignment(buf *b)
{
    one_tensor(b, 4, 1, 0, 8, 64);
}
static void offset_beyond(buf *b)
{
    one_tensor(b, 4, 1, 0, 4096, 64);
}
static void cut_data(buf *b)
{
    one_tensor(b, 4, 4, 0, 0, 63);
}
static void overlapping(buf *b)
{
    head(b, 2, 0);
    tensor(b, "w", 64, 1, 8, 0); /* Q8_0: 68 bytes, the next begins at 64 */
    tensor(b, "v", 32, 1, 8, 64);
    data(b, 128);
}
static void tensor_twice(buf *b)
{
    head(b, 2, 0);
    tensor(b, "w", 4, 1, 0, 0);
    tensor(b, "w", 4, 1, 0, 32);
    data(b, 64);
}
static void joined(buf *b)
{
    one_tensor(b, 4, 2, 0, 0, 32);
    one_tensor(b, 4, 2, 0, 0, 32);
}
static void version_1(buf *b)
{
    buf_puts(b, "GGUF");
    u32(b, 1);
    data(b, 32);
}
static void big_endian(buf *b)
{
    buf_puts(b, "GGUF");
    u32(b, 3u << 24);
    data(b, 32);
}
static void other_magic(buf *b)
{
    buf_puts(b, "GGML");
    data(b, 32);
}
static void nothing(buf *b)
{
    (void)b;
}

static const struct {
    const char *what;
    void (*make)(buf *);
    int code;
    const char *says;
} hostile[] = {
    {"empty file", nothing, ERR_FORMAT, "truncated"},
    {"GGML", other_magic, ERR_FORMAT, "not a GGUF"},
    {"version 1", version_1, ERR_UNSUPPORTED, "version 1"},
    {"big endian", big_endian, ERR_UNSUPPORTED, "big-endian"},
    {"counts of 2^64-1", counts_too_large, ERR_FORMAT, "18446744073709551615"},
    {"a million keys", many_keys, ERR_FORMAT, "1000000 keys"},
    {"key length 0", no_key, ERR_FORMAT, "key 0 has a name of 0 bytes"},
    {"key length 2^64-8", long_key, ERR_FORMAT, "truncated"},
    {"key not UTF-8", bad_utf8_key, ERR_FORMAT, "not UTF-8"},
    {"key twice", key_twice, ERR_FORMAT, "'a' is in the file twice"},
    {"value type 13", value_type_13, ERR_FORMAT, "value type 13"},
    {"bool 2", bool_2, ERR_FORMAT, "bool of value 2"},
    {"array of 2^62", huge_array, ERR_FORMAT, "'list' is an array of 4611686018427387904"},
    {"array of 2^61 strings", huge_string_array, ERR_FORMAT, "'list'"},
    {"array of 2^20 bytes", huge_byte_array, ERR_FORMAT, "'list'"},
    {"array of arrays", nested_array, ERR_UNSUPPORTED, "array of arrays"},
    {"long string in an array", string_in_array_too_long, ERR_FORMAT, "'list'"},
    {"alignment i32", alignment_i32, ERR_FORMAT, "'general.alignment' must be u32, found i32"},
    {"alignment 0", alignment_0, ERR_VALUE, "'general.alignment' is 0"},
    {"alignment 24", alignment_24, ERR_VALUE, "'general.alignment' is 24"},
    {"alignment 2^31", alignment_2g, ERR_VALUE, "'general.alignment' is 2147483648"},
    {"ne[1] = 0", zero_dim, ERR_SHAPE, "'w': dimension 1 is 0"},
    {"ne[1] = -1", negative_dim, ERR_SHAPE, "'w': dimension 1 is -1"},
    {"2^80 elements", overflowing_dims, ERR_SHAPE, "'w'"},
    {"2^64 bytes", overflowing_bytes, ERR_SHAPE, "'w' is too large"},
    {"5 dimensions", five_dims, ERR_SHAPE, "5 dimensions"},
    {"0 dimensions", no_dims, ERR_SHAPE, "0 dimensions"},
    {"type 156", type_156, ERR_UNSUPPORTED, "type id 156 (unknown)"},
    {"type 39", type_39, ERR_UNSUPPORTED, "type id 39 (MXFP4)"},
    {"row of 33 in Q8_0", part_of_a_block, ERR_SHAPE, "rows of 33"},
    {"offset 2^64-64", offset_wraps, ERR_FORMAT, "offset 18446744073709551552"},
    {"offset 8", offset_off_alignment, ERR_FORMAT, "not a multiple of the alignment"},
    {"offset beyond the file", offset_beyond, ERR_FORMAT, "truncated"},
    {"last byte gone", cut_data, ERR_FORMAT, "'w': 64 bytes at offset 0"},
    {"gap shorter than the type", overlapping, ERR_FORMAT, "'v' begins at byte"},
    {"tensor twice", tensor_twice, ERR_FORMAT, "'w' is in the file twice"},
    {"two files joined", joined, ERR_FORMAT, "second GGUF"},
};

static void hostile_files(void **state)
{
    (void)state;
    char *p = file_join(dir, "hostile.gguf");
    for (size_t i = 0; i < sizeof hostile / sizeof *hostile; i++) {
        err e = {0};
        buf b = {0};
        gguf_file g;
        ckpt *c;
        hostile[i].make(&b);
        CHECK_OK(file_write_atomic(p, b.data ? b.data : "", b.len, &e));
        int rc = gguf_open(&g, p, &e);
        if (rc != -hostile[i].code || !strstr(e.msg, hostile[i].says) || !strstr(e.msg, p))
            fail_msg("%s: %d: %s", hostile[i].what, rc, e.msg);
        assert_true(!g.mem && !g.map.data);
        assert_int_equal(ckpt_open(&c, p, &e), -hostile[i].code);
        assert_null(c);
        buf_free(&b);
    }
    free(p);
}

/* ---- split models ------------------------------------------------------------------------------
 */

enum { PARTS = 3 };

/* Where the tensor table of the fixture begins: at the length of its first name. */
static size_t table_at(const gguf_file *g)
{
    buf name = {0};
    str(&name, g->tensors[0].name);
    for (size_t i = 24; i + name.len < g->map.size; i++)
        if (!memcmp(g->map.data + i, name.data, name.len)) {
            buf_free(&name);
            return i;
        }
    fail_msg("no tensor table");
    return 0;
}

/* The fixture's tensors n0 to n1 as part `no`; the first part has all the other keys. */
static void make_part(const gguf_file *g, int no, size_t n0, size_t n1, buf *b)
{
    size_t n_kv = no ? 0 : g->n_kv;
    uint64_t at = 0;
    head(b, n1 - n0, n_kv + 3);
    if (!no) buf_add(b, g->map.data + 24, table_at(g) - 24);
    kv_u32(b, "split.no", (uint32_t)no);
    kv_u32(b, "split.count", PARTS);
    kv_u32(b, "split.tensors.count", (uint32_t)g->n_tensors);
    for (size_t i = n0; i < n1; i++) {
        const gguf_tensor *t = &g->tensors[i];
        str(b, t->name);
        u32(b, (uint32_t)t->n_dims);
        for (int d = 0; d < t->n_dims; d++)
            u64(b, (uint64_t)t->ne[d]);
        u32(b, t->type->id);
        u64(b, at);
        at += (t->bytes + 31) / 32 * 32;
    }
    while (b->len % 32)
        buf_putc(b, 0);
    for (size_t i = n0; i < n1; i++) {
        buf_add(b, g->map.data + g->tensors[i].offset, (size_t)g->tensors[i].bytes);
        while (b->len % 32)
            buf_putc(b, 0);
    }
}

static char *part_path(int no)
{
    char name[64];
    snprintf(name, sizeof name, "m-%05d-of-%05d.gguf", no + 1, PARTS);
    return file_join(dir, name);
}

static void write_parts(buf *all)
{
    err e = {0};
    gguf_file g;
    CHECK_OK(gguf_open(&g, FIXTURE, &e));
    for (int i = 0; i < PARTS; i++) {
        buf b = {0};
        char *p = part_path(i);
        make_part(&g, i, g.n_tensors * (size_t)i / PARTS, g.n_tensors * (size_t)(i + 1) / PARTS,
                  &b);
        CHECK_OK(file_write_atomic(p, b.data, b.len, &e));
        if (all) buf_add(all, b.data, b.len);
        buf_free(&b);
        free(p);
    }
    gguf_close(&g);
}

static void same_checkpoint(const char *path)
{
    err e = {0};
    ckpt *a, *b;
    CHECK_OK(ckpt_open(&a, FIXTURE, &e));
    CHECK_OK(ckpt_open(&b, path, &e));
    assert_int_equal(ckpt_n_tensors(a), ckpt_n_tensors(b));
    assert_string_equal(ckpt_gguf_types(a), ckpt_gguf_types(b));
    for (size_t i = 0; i < ckpt_n_tensors(a); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(a, i), *u = ckpt_find(b, t->name);
        assert_non_null(u);
        assert_int_equal(t->bytes, u->bytes);
        assert_memory_equal(t->data, u->data, t->bytes);
        ckpt_dontneed(b, u);
        assert_memory_equal(t->data, u->data, t->bytes);
    }
    buf x = {0}, y = {0};
    CHECK_OK(ckpt_tokenizer_json(a, &x, &e));
    CHECK_OK(ckpt_tokenizer_json(b, &y, &e));
    assert_string_equal(x.data, y.data);
    char *first = part_path(0);
    assert_string_equal(ckpt_path(b), first);
    free(first);
    buf_free(&x);
    buf_free(&y);
    ckpt_close(a);
    ckpt_close(b);
}

static void check_part(const char *path, int code, const char *says)
{
    err e = {0};
    ckpt *c;
    if (ckpt_open(&c, path, &e) != -code || !strstr(e.msg, says))
        fail_msg("%s: %d %s, wanted %s", path, e.code, e.msg, says);
    assert_null(c);
}

static void split_models(void **state)
{
    (void)state;
    err e = {0};
    buf all = {0}, odd = {0};
    write_parts(&all);
    char *p[PARTS], *joined_path = file_join(dir, "joined.gguf"), *other = file_join(dir, "x.gguf");
    for (int i = 0; i < PARTS; i++)
        p[i] = part_path(i);
    for (int i = 0; i < PARTS; i++)
        same_checkpoint(p[i]); /* whichever part is given */
    CHECK_OK(file_write_atomic(joined_path, all.data, all.len, &e));
    check_part(joined_path, ERR_FORMAT, "joined byte by byte");
    assert_int_equal(rename(p[1], other), 0);
    check_part(p[2], ERR_MISSING, "m-00002-of-00003.gguf");
    check_part(p[0], ERR_MISSING, "part 2 of 3");
    check_part(other, ERR_FORMAT, "NAME-00002-of-00003.gguf");
    CHECK_OK(file_copy_atomic(p[2], p[1], &e)); /* a part under another's name */
    check_part(p[0], ERR_FORMAT, "part 3 of 3");
    gguf_file g;
    CHECK_OK(gguf_open(&g, FIXTURE, &e));
    make_part(&g, 1, 0, 2, &odd); /* tensors of part 1 once more */
    gguf_close(&g);
    CHECK_OK(file_write_atomic(p[1], odd.data, odd.len, &e));
    check_part(p[0], ERR_FORMAT, "split.tensors.count");
    buf_clear(&odd);
    write_parts(NULL);
    CHECK_OK(file_read_all(&odd, p[1], 1 << 24, &e));
    CHECK_OK(file_write_atomic(p[1], odd.data, odd.len - 4096, &e));
    check_part(p[0], ERR_FORMAT, "truncated");
    unlink(p[1]);
    unlink(p[2]);
    check_part(p[0], ERR_MISSING, "part 2 of 3");
    buf_free(&all);
    buf_free(&odd);
    for (int i = 0; i < PARTS; i++)
        free(p[i]);
    free(joined_path);
    free(other);
}

/* Well-formed files that are no model, or one that cannot be run. */
static void bad_models(void **state)
{
    (void)state;
    static const char *const needed[] = {"llama.block_count", "llama.embedding_length",
                                         "llama.attention.head_count"};
    char *p = file_join(dir, "model.gguf");
    for (size_t n = 0; n <= 3; n++) {
        err e = {0};
        ckpt *c;
        buf b = {0};
        head(&b, 0, n ? n : 1);
        kv_str(&b, n ? "general.architecture" : "general.name", n ? "llama" : "x");
        for (size_t i = 1; i < n; i++)
            kv_u32(&b, needed[i - 1], 64);
        CHECK_OK(file_write_atomic(p, b.data, b.len, &e));
        CHECK_ERR(ckpt_open(&c, p, &e), ERR_MISSING, n ? needed[n - 1] : "general.architecture");
        buf_free(&b);
    }
    free(p);
}

/* ---- the fixture, damaged ----------------------------------------------------------------------
 */

static void use_everything(const char *p)
{
    err e = {0};
    ckpt *c;
    buf b = {0};
    if (ckpt_open(&c, p, &e) < 0) {
        assert_null(c);
        assert_non_null(strstr(e.msg, p));
        return;
    }
    for (size_t i = 0; i < ckpt_n_tensors(c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(c, i);
        int64_t rows = t->n_dims == 2 ? t->shape[0] : 1, cols = t->shape[t->n_dims - 1];
        if (t->n_dims > 2 || cols > 1 << 16) continue;
        float *out = xmalloc((size_t)cols * sizeof *out);
        (void)ckpt_load_rows(c, t, rows - 1, rows, out, &e);
        free(out);
    }
    (void)ckpt_tokenizer_json(c, &b, &e);
    (void)ckpt_tokenizer_config(c, &b, &e);
    (void)ckpt_chat_template(c, &b, &e);
    buf_free(&b);
    ckpt_close(c);
}

static void truncated_fixture(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    buf b = {0};
    char *p = file_join(dir, "cut.gguf");
    CHECK_OK(file_read_all(&b, FIXTURE, 1 << 20, &e));
    CHECK_OK(file_write_atomic(p, b.data, b.len - 4096, &e));
    CHECK_ERR(ckpt_open(&c, p, &e), ERR_FORMAT, "truncated");
    for (size_t n = 0; n < b.len; n += n < 3000 ? 7 : 997) {
        CHECK_OK(file_write_atomic(p, b.data, n, &e));
        assert_true(ckpt_open(&c, p, &e) < 0);
    }
    buf_free(&b);
    free(p);
}

/* Flipped bytes in the header: refused or read, never a crash (the sanitizers watch). */
static void flipped_bytes(void **state)
{
    (void)state;
    err e = {0};
    buf b = {0};
    char *p = file_join(dir, "flip.gguf");
    CHECK_OK(file_read_all(&b, FIXTURE, 1 << 20, &e));
    uint32_t x = 12345;
    for (int i = 0; i < 1500; i++) {
        size_t at[3];
        char was[3];
        for (int k = 0; k < 3; k++) {
            x = x * 1664525 + 1013904223;
            at[k] = (x >> 8) % 3600;
            was[k] = b.data[at[k]];
            b.data[at[k]] = (char)(i % 2 ? x >> 24 : (x >> 24 & 1 ? 0xFF : 0));
        }
        FILE *f = fopen(p, "wb"); /* no fsync: many files */
        assert_non_null(f);
        assert_int_equal(fwrite(b.data, 1, b.len, f), b.len);
        fclose(f);
        use_everything(p);
        for (int k = 2; k >= 0; k--)
            b.data[at[k]] = was[k];
    }
    buf_free(&b);
    free(p);
}

/* ---- names, rope, architectures ----------------------------------------------------------------
 */

typedef struct model {
    const char *arch;
    int biases;         /* q bias of 4 F32, values 0 1 2 3 */
    const float *freqs; /* rope_freqs.weight, 2 values */
    const char *pre, *tokenizer;
    bool ends; /* two end tokens, one of them id 0 */
} model;

static void key(buf *b, const model *m, const char *tail, uint32_t v)
{
    char name[64];
    snprintf(name, sizeof name, "%s.%s", m->arch, tail);
    kv_u32(b, name, v);
}

static void small_model(const model *m, const char *p)
{
    err e = {0};
    buf b = {0};
    head(&b, (uint64_t)(1 + !!m->biases + !!m->freqs),
         (m->tokenizer ? 11u : 7u) + (m->ends ? 2u : 0u));
    if (m->ends) {
        kv_u32(&b, "tokenizer.ggml.eos_token_id", 0);
        kv_u32(&b, "tokenizer.ggml.eot_token_id", 7);
    }
    kv_str(&b, "general.architecture", m->arch);
    key(&b, m, "block_count", 1);
    key(&b, m, "embedding_length", 4);
    key(&b, m, "feed_forward_length", 4);
    key(&b, m, "context_length", 16);
    key(&b, m, "attention.head_count", 1);
    char eps[64];
    snprintf(eps, sizeof eps, "%s.attention.layer_norm_rms_epsilon", m->arch);
    str(&b, eps);
    u32(&b, GGUF_F32);
    buf_add(&b, &(float){1e-6f}, 4);
    if (m->tokenizer) {
        kv_str(&b, "tokenizer.ggml.model", m->tokenizer);
        kv_str(&b, "tokenizer.ggml.pre", m->pre);
        static const char *const arrays[] = {"tokenizer.ggml.tokens", "tokenizer.ggml.merges"};
        for (int i = 0; i < 2; i++) {
            str(&b, arrays[i]);
            u32(&b, GGUF_ARR);
            u32(&b, GGUF_STR);
            u64(&b, 1);
            str(&b, i ? "a b" : "ab");
        }
    }
    tensor(&b, "token_embd.weight", 4, 2, 0, 0);
    if (m->biases) {
        str(&b, "blk.0.attn_q.bias");
        u32(&b, 1);
        u64(&b, 4);
        u32(&b, 0);
        u64(&b, 32);
    }
    if (m->freqs) {
        str(&b, "rope_freqs.weight");
        u32(&b, 1);
        u64(&b, 2);
        u32(&b, 0);
        u64(&b, 64);
    }
    data(&b, 32);
    for (int i = 0; i < 8; i++)
        buf_add(&b, &(float){i < 4 ? (float)i : 0}, 4);
    buf_add(&b, m->freqs ? m->freqs : (const float[]){1, 1}, 8);
    CHECK_OK(file_write_atomic(p, b.data, b.len, &e));
    buf_free(&b);
}

static void architectures(void **state)
{
    (void)state;
    static const struct {
        const char *arch, *hf;
    } rows[] = {{"llama", "LlamaForCausalLM"},
                {"qwen2", "Qwen2ForCausalLM"},
                {"qwen3", "Qwen3ForCausalLM"},
                {"novel", ""}};
    char *p = file_join(dir, "arch.gguf");
    for (size_t i = 0; i < 4; i++) {
        err e = {0};
        ckpt *c;
        float v[4];
        const ckpt_tensor *t;
        small_model(&(model){.arch = rows[i].arch, .biases = 1}, p);
        CHECK_OK(ckpt_open(&c, p, &e));
        assert_string_equal(ckpt_cfg(c)->architecture, rows[i].hf);
        assert_int_equal(ckpt_cfg(c)->vocab_size, 2);
        CHECK_OK(ckpt_need(c, "model.layers.0.self_attn.q_proj.bias", &t, &e));
        CHECK_OK(ckpt_load_rows(c, t, 0, 1, v, &e));
        /* One head of 4: stored as rows 0 2 1 3 of the HF tensor, in llama only. */
        assert_true(v[0] == 0 && v[3] == 3);
        assert_true(i == 0 ? v[1] == 2 && v[2] == 1 : v[1] == 1 && v[2] == 2);
        ckpt_close(c);
    }
    free(p);
}

/* Every end token of the file ends a turn, id 0 too. */
static void end_tokens(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    char *p = file_join(dir, "ends.gguf");
    small_model(&(model){.arch = "llama", .ends = true}, p);
    CHECK_OK(ckpt_open(&c, p, &e));
    assert_int_equal(ckpt_cfg(c)->n_eos, 2);
    assert_int_equal(ckpt_cfg(c)->eos[0], 0);
    assert_int_equal(ckpt_cfg(c)->eos[1], 7);
    ckpt_close(c);
    free(p);
}

static void rope_factors(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    char *p = file_join(dir, "rope.gguf");
    /* theta 10000, 4 rotary dimensions: wavelengths 6.28 and 628; both short, both unscaled. */
    small_model(&(model){.arch = "llama", .freqs = (const float[]){1, 1}}, p);
    CHECK_OK(ckpt_open(&c, p, &e));
    assert_int_equal(ckpt_cfg(c)->rope.kind, ROPE_DEFAULT);
    assert_int_equal(ckpt_n_tensors(c), 1); /* the factors are config, not a weight */
    ckpt_close(c);
    small_model(&(model){.arch = "llama", .freqs = (const float[]){1, 3}}, p);
    CHECK_ERR(ckpt_open(&c, p, &e), ERR_UNSUPPORTED, "rope_freqs.weight");
    free(p);
}

static void unknown_tokenizers(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    buf b = {0};
    char *p = file_join(dir, "tok.gguf");
    small_model(&(model){.arch = "llama", .tokenizer = "gpt2", .pre = "martian"}, p);
    CHECK_OK(ckpt_open(&c, p, &e)); /* weights can be read all the same */
    CHECK_ERR(ckpt_tokenizer_json(c, &b, &e), ERR_UNSUPPORTED, "'martian'");
    assert_int_equal(b.len, 0);
    ckpt_close(c);
    small_model(&(model){.arch = "llama", .tokenizer = "rwkv", .pre = "gpt-2"}, p);
    CHECK_OK(ckpt_open(&c, p, &e));
    CHECK_ERR(ckpt_tokenizer_json(c, &b, &e), ERR_UNSUPPORTED, "'rwkv'");
    ckpt_close(c);
    small_model(&(model){.arch = "llama"}, p);
    CHECK_OK(ckpt_open(&c, p, &e));
    CHECK_ERR(ckpt_tokenizer_json(c, &b, &e), ERR_UNSUPPORTED, "tokenizer.ggml.model");
    CHECK_OK(ckpt_chat_template(c, &b, &e));
    assert_int_equal(b.len, 0);
    ckpt_close(c);
    buf_free(&b);
    free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decoded_as_the_reference_does),
        cmocka_unit_test(config_of_the_fixture),
        cmocka_unit_test(tokenizer_of_the_fixture),
        cmocka_unit_test(side_files_are_made),
        cmocka_unit_test(hostile_files),
        cmocka_unit_test(split_models),
        cmocka_unit_test(bad_models),
        cmocka_unit_test(truncated_fixture),
        cmocka_unit_test(flipped_bytes),
        cmocka_unit_test(architectures),
        cmocka_unit_test(end_tokens),
        cmocka_unit_test(rope_factors),
        cmocka_unit_test(unknown_tokenizers),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
