/* Model folders: shards and their index, the hub cache, side texts; and the writer: whole or not at
 * all. */
#include "check.h"
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "ckpt/ckpt.h"
#include "base/log.h"

static char dir[64];
static const char config[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"vocab_size\":4,"
    "\"hidden_size\":4,\"intermediate_size\":4,\"num_hidden_layers\":1,\"num_attention_heads\":1}";

static int setup(void **state)
{
    (void)state;
    log_set_level(LOG_ERROR);
    snprintf(dir, sizeof dir, "/tmp/tare-ckpt-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    return file_remove_tree(dir, NULL);
}

static void put(const char *folder, const char *name, const char *text)
{
    err e = {0};
    char *p = file_join(folder, name);
    CHECK_OK(file_write_atomic(p, text, strlen(text), &e));
    free(p);
}

static char *sub(const char *name)
{
    err e = {0};
    char *p = file_join(dir, name);
    CHECK_OK(file_remove_tree(p, &e));
    CHECK_OK(file_mkdirs(p, &e));
    return p;
}

/* n tensors t0 …, each of 4 floats whose value is their number, in shards of `shard` bytes. */
static void write_model(const char *out, int n, uint64_t shard)
{
    err e = {0};
    ckpt_writer *w;
    const int64_t shape[] = {1, 4};
    CHECK_OK(ckpt_writer_open(&w, out, shard, true, &e));
    for (int i = 0; i < n; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        float v[4] = {(float)i, (float)i, (float)i, (float)i};
        CHECK_OK(ckpt_writer_tensor(w, name, NUM_F32, 2, shape, v, &e));
    }
    CHECK_OK(ckpt_writer_finish(w, config, &e));
    CHECK_OK(ckpt_writer_publish(&w, &e));
    assert_null(w);
}

static void one_file(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    char *d = file_join(dir, "one");
    write_model(d, 3, 0);
    CHECK_OK(ckpt_open(&c, d, &e));
    assert_int_equal(ckpt_n_tensors(c), 3);
    const ckpt_tensor *t;
    CHECK_OK(ckpt_need(c, "t2", &t, &e));
    float row[4];
    CHECK_OK(ckpt_load_rows(c, t, 0, 1, row, &e));
    assert_true(row[3] == 2);
    CHECK_ERR(ckpt_load_rows(c, t, 0, 2, row, &e), ERR_SHAPE, "t2");
    CHECK_ERR(ckpt_load_rows(c, t, -1, 0, row, &e), ERR_SHAPE, "t2");
    CHECK_ERR(ckpt_need(c, "t22", &t, &e), ERR_MISSING, "nearest name: 't2'");
    assert_null(t);
    assert_false(ckpt_is_gguf(c));
    assert_string_equal(ckpt_gguf_types(c), "");
    assert_null(ckpt_origin(c));
    ckpt_dontneed(c, ckpt_tensor_at(c, 0));
    ckpt_close(c);
    /* The weight file and config.json name the folder as well. */
    char *f = file_join(d, "model.safetensors");
    CHECK_OK(ckpt_open(&c, f, &e));
    assert_string_equal(ckpt_path(c), d);
    ckpt_close(c);
    free(f);
    free(d);
}

static void shards(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    char *d = file_join(dir, "many");
    write_model(d, 7, 32); /* two tensors a shard */
    CHECK_OK(ckpt_open(&c, d, &e));
    assert_int_equal(ckpt_n_tensors(c), 7);
    for (int i = 0; i < 7; i++) {
        char name[16];
        float row[4];
        snprintf(name, sizeof name, "t%d", i);
        const ckpt_tensor *t;
        CHECK_OK(ckpt_need(c, name, &t, &e));
        CHECK_OK(ckpt_load_rows(c, t, 0, 1, row, &e));
        assert_true(row[0] == (float)i);
    }
    assert_string_equal(file_basename(ckpt_find(c, "t6")->path),
                        "model-00004-of-00004.safetensors");
    ckpt_close(c);
    char **names;
    size_t n;
    CHECK_OK(file_list(d, &names, &n, &e));
    assert_int_equal(n, 6); /* 4 shards, index, config: no spool is left */
    file_list_free(names, n);
    /* A shard is lost. */
    char *lost = file_join(d, "model-00002-of-00004.safetensors");
    unlink(lost);
    CHECK_ERR(ckpt_open(&c, d, &e), ERR_MISSING, "model-00002-of-00004.safetensors");
    assert_null(c);
    free(lost);
    free(d);
}

static void index_and_shards_disagree(void **state)
{
    (void)state;
    static const struct {
        const char *index;
        int code;
        const char *says;
    } rows[] = {
        {"{\"weight_map\":{\"t0\":\"a.safetensors\",\"t1\":\"a.safetensors\"}}", 0, ""},
        {"{\"weight_map\":{\"t0\":\"a.safetensors\"}}", ERR_FORMAT, "'t1' is in"},
        {"{\"weight_map\":{\"t0\":\"a.safetensors\",\"t1\":\"a.safetensors\",\"t2\":"
         "\"a.safetensors\"}}",
         ERR_MISSING, "'t2'"},
        {"{\"weight_map\":{\"t0\":\"a.safetensors\",\"t1\":\"b.safetensors\"}}", ERR_MISSING,
         "b.safetensors"},
        {"{\"weight_map\":{\"t0\":\"../a.safetensors\",\"t1\":\"a.safetensors\"}}", ERR_FORMAT,
         "not a file name"},
        {"{\"weight_map\":{\"t0\":3}}", ERR_FORMAT, "t0"},
        {"{\"weight_map\":{}}", ERR_FORMAT, "empty"},
        {"{\"weight_map\":[]}", ERR_FORMAT, "weight_map"},
        {"{}", ERR_FORMAT, "weight_map"},
        {"{", ERR_FORMAT, "invalid JSON"},
    };
    char *d = file_join(dir, "index");
    write_model(d, 2, 0);
    char *a = file_join(d, "model.safetensors"), *b = file_join(d, "a.safetensors");
    assert_int_equal(rename(a, b), 0);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        err e = {0};
        ckpt *c;
        put(d, "model.safetensors.index.json", rows[i].index);
        int rc = ckpt_open(&c, d, &e);
        if (rc != -rows[i].code || !strstr(e.msg, rows[i].says))
            fail_msg("%s: %d: %s", rows[i].index, rc, e.msg);
        ckpt_close(c);
    }
    free(a);
    free(b);
    free(d);
}

static void same_tensor_in_two_shards(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    char *d = file_join(dir, "twice");
    write_model(d, 1, 0);
    char *a = file_join(d, "model.safetensors"), *b = file_join(d, "b.safetensors");
    CHECK_OK(file_copy_atomic(a, b, &e));
    put(d, "model.safetensors.index.json",
        "{\"weight_map\":{\"t0\":\"model.safetensors\",\"x\":\"b.safetensors\"}}");
    CHECK_ERR(ckpt_open(&c, d, &e), ERR_FORMAT, "'t0'");
    free(a);
    free(b);
    free(d);
}

static void not_a_model(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    char *d = sub("empty");
    CHECK_ERR(ckpt_open(&c, "", &e), ERR_USAGE, "empty");
    CHECK_ERR(ckpt_open(&c, "/nowhere/at all", &e), ERR_NOTFOUND, "/nowhere/at all");
    CHECK_ERR(ckpt_open(&c, d, &e), ERR_MISSING, "config.json");
    put(d, "config.json", config);
    CHECK_ERR(ckpt_open(&c, d, &e), ERR_MISSING, "no .safetensors");
    put(d, "a.safetensors", "");
    CHECK_ERR(ckpt_open(&c, d, &e), ERR_FORMAT, "too short");
    put(d, "b.safetensors", "");
    CHECK_ERR(ckpt_open(&c, d, &e), ERR_MISSING, "index.json");
    put(d, "notes.txt", "");
    char *f = file_join(d, "notes.txt");
    CHECK_ERR(ckpt_open(&c, f, &e), ERR_FORMAT, "neither");
    put(d, "config.json", "{\"a\":");
    CHECK_ERR(ckpt_open(&c, d, &e), ERR_FORMAT, "config.json");
    free(f);
    free(d);
}

/* Python's json writes Infinity and NaN. */
static void python_numbers(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    char *d = file_join(dir, "inf");
    write_model(d, 1, 0);
    buf b = {0};
    buf_puts(&b, config);
    b.data[--b.len] = 0;
    buf_puts(&b, ",\"a\":[Infinity,-Infinity,NaN],\"b\":\"Infinity \\\" NaN\"}");
    put(d, "config.json", b.data);
    CHECK_OK(ckpt_open(&c, d, &e));
    assert_string_equal(json_get(ckpt_cfg(c)->raw, "b")->valuestring, "Infinity \" NaN");
    assert_true(isinf(json_get(ckpt_cfg(c)->raw, "a")->child->valuedouble));
    ckpt_close(c);
    b.data[--b.len] = 0; /* neither is a value of a key that counts */
    buf_puts(&b, ",\"rms_norm_eps\":NaN}");
    put(d, "config.json", b.data);
    CHECK_ERR(ckpt_open(&c, d, &e), ERR_FORMAT, "'rms_norm_eps' is not a finite number");
    buf_free(&b);
    free(d);
}

static void hub_cache(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    char *root = sub("hub"), *snap = file_join(root, "models--org--name/snapshots/abc"),
         *refs = file_join(root, "models--org--name/refs");
    write_model(snap, 1, 0);
    CHECK_OK(file_mkdirs(refs, &e));
    setenv("HF_HUB_CACHE", root, 1);
    CHECK_OK(ckpt_open(&c, "org/name", &e)); /* the only snapshot */
    assert_string_equal(ckpt_path(c), snap);
    ckpt_close(c);
    put(refs, "main", "abc\n");
    CHECK_OK(ckpt_open(&c, "org/name", &e));
    ckpt_close(c);
    put(refs, "main", "gone");
    CHECK_ERR(ckpt_open(&c, "org/name", &e), ERR_NOTFOUND, "hub cache");
    CHECK_ERR(ckpt_open(&c, "org/other", &e), ERR_NOTFOUND, "org/other");
    unsetenv("HF_HUB_CACHE");
    setenv("HF_HOME", dir, 1); /* $HF_HOME/hub is the same folder */
    put(refs, "main", "abc");
    CHECK_OK(ckpt_open(&c, "org/name", &e));
    ckpt_close(c);
    unsetenv("HF_HOME");
    free(refs);
    free(snap);
    free(root);
}

static void templates(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    buf b = {0};
    char *d = file_join(dir, "tmpl");
    write_model(d, 1, 0);
    CHECK_OK(ckpt_open(&c, d, &e));
    CHECK_OK(ckpt_chat_template(c, &b, &e));
    assert_int_equal(b.len, 0);
    put(d, "tokenizer_config.json", "{\"chat_template\":\"plain\"}");
    CHECK_OK(ckpt_chat_template(c, &b, &e));
    assert_string_equal(b.data, "plain");
    buf_clear(&b);
    put(d, "tokenizer_config.json",
        "{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"t\"},"
        "{\"name\":\"default\",\"template\":\"d\"}]}");
    CHECK_OK(ckpt_chat_template(c, &b, &e));
    assert_string_equal(b.data, "d");
    buf_clear(&b);
    put(d, "chat_template.jinja", "file");
    CHECK_OK(ckpt_chat_template(c, &b, &e));
    assert_string_equal(b.data, "file");
    buf_free(&b);
    ckpt_close(c);
    free(d);
}

/* ---- writer ------------------------------------------------------------------------------------
 */

static void abort_leaves_nothing(void **state)
{
    (void)state;
    err e = {0};
    ckpt_writer *w;
    char *out = file_join(dir, "aborted");
    const int64_t shape[] = {4};
    CHECK_OK(ckpt_writer_open(&w, out, 0, false, &e));
    char *tmp = xstrdup(ckpt_writer_dir(w));
    assert_true(file_is_dir(tmp));
    CHECK_OK(ckpt_writer_begin(w, "a", NUM_F32, 1, shape, &e));
    CHECK_OK(ckpt_writer_data(w, "12345678", 8, &e));
    CHECK_ERR(ckpt_writer_begin(w, "b", NUM_F32, 1, shape, &e), ERR_BADSTATE, "'b'");
    CHECK_ERR(ckpt_writer_finish(w, config, &e), ERR_BADSTATE, "incomplete");
    CHECK_ERR(ckpt_writer_data(w, "12345678 ", 9, &e), ERR_BADSTATE, "'a'");
    assert_false(file_exists(out));
    ckpt_writer_abort(&w);
    assert_null(w);
    assert_false(file_exists(tmp));
    assert_false(file_exists(out));
    free(tmp);
    free(out);
}

static void writer_limits(void **state)
{
    (void)state;
    err e = {0};
    ckpt_writer *w;
    char *out = file_join(dir, "limits");
    const int64_t huge[] = {INT64_MAX, 4}, negative[] = {-1}, nine[] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    CHECK_OK(ckpt_writer_open(&w, out, 0, false, &e));
    CHECK_ERR(ckpt_writer_begin(w, "a", NUM_F32, 2, huge, &e), ERR_SHAPE, "'a'");
    CHECK_ERR(ckpt_writer_begin(w, "a", NUM_F32, 1, negative, &e), ERR_SHAPE, "'a'");
    CHECK_ERR(ckpt_writer_begin(w, "a", NUM_F32, 9, nine, &e), ERR_DTYPE, "9 dim");
    CHECK_ERR(ckpt_writer_begin(w, "a", NUM_I4, 1, nine, &e), ERR_DTYPE, "int4");
    CHECK_ERR(ckpt_writer_finish(w, config, &e), ERR_BADSTATE, "no tensor");
    ckpt_writer_abort(&w);
    free(out);
}

static void existing_output(void **state)
{
    (void)state;
    err e = {0};
    ckpt_writer *w;
    ckpt *c;
    char *out = file_join(dir, "there");
    write_model(out, 2, 0);
    CHECK_ERR(ckpt_writer_open(&w, out, 0, false, &e), ERR_EXISTS, "--overwrite");
    assert_null(w);
    write_model(out, 3, 0); /* overwrites */
    CHECK_OK(ckpt_open(&c, out, &e));
    assert_int_equal(ckpt_n_tensors(c), 3);
    ckpt_close(c);
    char *home = sub("home");
    put(home, "precious.txt", "x");
    CHECK_ERR(ckpt_writer_open(&w, home, 0, true, &e), ERR_EXISTS, "not a model folder");
    char *empty = sub("hollow");
    CHECK_OK(ckpt_writer_open(&w, empty, 0, false, &e)); /* an empty folder may be filled */
    ckpt_writer_abort(&w);
    free(empty);
    free(home);
    free(out);
}

/* A writer that is killed leaves only OUT.tmp-<pid>, and the next one removes it. */
static void killed_writer(void **state)
{
    (void)state;
    err e = {0};
    char *out = file_join(dir, "killed");
    pid_t pid = fork();
    if (pid == 0) {
        ckpt_writer *w;
        const int64_t shape[] = {4};
        if (ckpt_writer_open(&w, out, 0, false, &e) == 0 &&
            ckpt_writer_begin(w, "a", NUM_F32, 1, shape, &e) == 0)
            kill(getpid(), SIGKILL);
        _exit(1);
    }
    int status;
    waitpid(pid, &status, 0);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    char *left = xasprintf("%s.tmp-%ld", out, (long)pid), *mine = xasprintf("%s.tmp-1", out);
    assert_true(file_is_dir(left));
    assert_false(file_exists(out));
    CHECK_OK(file_mkdirs(mine, &e)); /* of a process that lives */
    write_model(out, 1, 0);
    assert_false(file_exists(left));
    assert_true(file_is_dir(mine));
    free(mine);
    free(left);
    free(out);
}

/* A full disk, as a limit on the size of files: the error is told, and nothing is left. */
static void full_disk(void **state)
{
    (void)state;
    err e = {0};
    char *out = file_join(dir, "full");
    pid_t pid = fork();
    if (pid == 0) {
        ckpt_writer *w = NULL;
        const int64_t shape[] = {1 << 18};
        float *v = xcalloc(1 << 18, sizeof *v);
        struct rlimit limit = {4096, 4096};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
        int rc = ckpt_writer_open(&w, out, 0, false, &e);
        if (rc == 0) rc = ckpt_writer_tensor(w, "a", NUM_F32, 1, shape, v, &e);
        if (rc == 0) rc = ckpt_writer_finish(w, config, &e);
        ckpt_writer_abort(&w);
        _exit(rc < 0 && e.msg[0] && strstr(e.msg, dir) ? 7 : 1);
    }
    int status;
    waitpid(pid, &status, 0);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 7);
    char *left = xasprintf("%s.tmp-%ld", out, (long)pid);
    assert_false(file_exists(out));
    assert_false(file_exists(left));
    free(left);
    free(out);
}

/* tokenizer.json wins over a .model beside it. */
static void which_tokenizer(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    char *d = sub("tokenizers");
    write_model(d, 1, 1u << 20);
    put(d, "config.json", config);
    static const char *const files[] = {NULL, "spiece.model", "tokenizer.model", "tokenizer.json"};
    for (int i = 0; i < 4; i++) {
        buf b = {0};
        if (i) put(d, files[i], files[i]);
        CHECK_OK(ckpt_open(&c, d, &e));
        char *where = ckpt_tokenizer_where(c);
        CHECK_OK(ckpt_tokenizer_json(c, &b, &e));
        assert_string_equal(i ? b.data : "", i ? files[i] : "");
        assert_string_equal(where + strlen(d) + 1, i ? files[i] : "tokenizer.json");
        free(where);
        buf_free(&b);
        ckpt_close(c);
    }
    free(d);
}

static void side_files(void **state)
{
    (void)state;
    err e = {0};
    ckpt *c;
    ckpt_writer *w;
    static const char *const keep[] = {"generation_config.json", "chat_template.jinja",
                                       "added_tokens.json",      "preprocessor_config.json",
                                       "tokenizer.model",        "LICENSE"},
                             *const drop[] = {"model.safetensors.index.json.bak.bin",
                                              "hf_quant_config.json",
                                              "quantize_config.json",
                                              "recipe.yaml",
                                              "old.gguf",
                                              "pytorch_model.bin"};
    char *src = file_join(dir, "from"), *out = file_join(dir, "to"), *inner;
    write_model(src, 1, 0);
    for (size_t i = 0; i < 6; i++) {
        put(src, keep[i], "{}");
        put(src, drop[i], "{}");
    }
    inner = file_join(src, "sub");
    CHECK_OK(file_mkdirs(inner, &e));
    put(inner, "more.txt", "deep");
    CHECK_OK(ckpt_open(&c, src, &e));
    CHECK_OK(ckpt_writer_open(&w, out, 0, false, &e));
    assert_int_equal(ckpt_writer_side_files(w, c, &e), 7);
    const int64_t shape[] = {4};
    CHECK_OK(ckpt_writer_tensor(w, "a", NUM_F32, 1, shape, "0123456789abcdef", &e));
    CHECK_OK(ckpt_writer_finish(w, "{\"mine\":1}", &e));
    CHECK_OK(ckpt_writer_publish(&w, &e));
    for (size_t i = 0; i < 6; i++) {
        char *a = file_join(out, keep[i]), *b = file_join(out, drop[i]);
        assert_true(file_exists(a));
        assert_false(file_exists(b));
        free(a);
        free(b);
    }
    buf b = {0};
    char *deep = file_join(out, "sub/more.txt"), *cfg = file_join(out, "config.json");
    CHECK_OK(file_read_all(&b, deep, 100, &e));
    assert_string_equal(b.data, "deep");
    buf_clear(&b);
    CHECK_OK(file_read_all(&b, cfg, 100, &e));
    assert_string_equal(b.data, "{\"mine\":1}");
    buf_free(&b);
    ckpt_close(c);
    free(deep);
    free(cfg);
    free(inner);
    free(src);
    free(out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_file),
        cmocka_unit_test(shards),
        cmocka_unit_test(index_and_shards_disagree),
        cmocka_unit_test(same_tensor_in_two_shards),
        cmocka_unit_test(not_a_model),
        cmocka_unit_test(python_numbers),
        cmocka_unit_test(hub_cache),
        cmocka_unit_test(templates),
        cmocka_unit_test(abort_leaves_nothing),
        cmocka_unit_test(writer_limits),
        cmocka_unit_test(existing_output),
        cmocka_unit_test(killed_writer),
        cmocka_unit_test(full_disk),
        cmocka_unit_test(which_tokenizer),
        cmocka_unit_test(side_files),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
