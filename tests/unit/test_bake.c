/* quantize, convert and inspect on small models: round trips, refusals, ties, crashes, memory. */
#include "quant_fixture.h"
#include "base/log.h"
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

static int quantize(const char *model, const char *out, const char *scheme, bake_report *r, err *e)
{
    bake_opts o = {.model = model, .out = out, .scheme = scheme, .threads = 2};
    bake_report own;
    if (!r) r = &own;
    int rc = bake_quantize(&o, r, e);
    if (r == &own) bake_report_free(r);
    return rc;
}

static int ignoring(const char *model, const char *out, const char *rule, bool strict,
                    bake_report *r, err *e)
{
    bake_opts o = {.model = model,
                   .out = out,
                   .scheme = "fp8",
                   .ignore = &rule,
                   .n_ignore = 1,
                   .strict = strict,
                   .threads = 1};
    return bake_quantize(&o, r, e);
}

static json *config_of(const char *dir)
{
    err e = {0};
    json *j;
    char *p = file_join(dir, "config.json");
    CHECK_OK(json_parse_file(&j, p, &e));
    free(p);
    return j;
}

static bool noted(const bake_report *r, const char *text)
{
    for (int i = 0; i < r->n_notes; i++)
        if (strstr(r->notes[i], text)) return true;
    return false;
}

/* Entries of fx_dir whose name holds ".tmp-". */
static int temporaries(void)
{
    char **names;
    size_t n;
    int count = 0;
    assert_int_equal(file_list(fx_dir, &names, &n, NULL), 0);
    for (size_t i = 0; i < n; i++)
        count += strstr(names[i], ".tmp-") != NULL;
    file_list_free(names, n);
    return count;
}

static const struct {
    const char *scheme;
    double least_db;
} schemes[] = {
    {"fp8", 28},
    {"fp8-tensor", 28},
    {"fp8-block", 28},
    {"fp8-w8a16", 28},
    {"int8", 30},
    {"int8-w8a16", 30},
    {"int4", 10},
    {"int4-asym", 10},
    {"int3", 3},
    {"int2", 0},
    {"nvfp4", 15},
    {"mxfp4", 14},
    {"w:mxfp8,g32", 28},
    {"w:int6,g64,asym", 24},
    {"w:int4,g32 a:int8,token", 12},
    {"w:int8,block128x128", 24},
};

/* Dequantized weights read through the loader equal what convert wrote, to the bit. */
static void compare_plain(const char *quantized, const char *plain)
{
    err e = {0};
    ckpt *a, *b;
    quant_ckpt *q;
    int n = 0;
    CHECK_OK(ckpt_open(&a, quantized, &e));
    CHECK_OK(quant_open(&q, a, &e));
    CHECK_OK(ckpt_open(&b, plain, &e));
    for (size_t i = 0; i < ckpt_n_tensors(b); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(b, i);
        char *module = xstrndup(t->name, strlen(t->name) - strlen(".weight"));
        assert_int_equal(t->dtype, NUM_F32);
        if (quant_has(q, module)) {
            qtensor w;
            CHECK_OK(quant_load(q, module, &w, &e));
            float *row = xmalloc((size_t)w.K * sizeof *row);
            for (int64_t r = 0; r < w.N; r++) {
                qtensor_decode_row(&w, r, row);
                assert_memory_equal(row, t->data + (size_t)(r * w.K) * 4, (size_t)w.K * 4);
            }
            free(row);
            qtensor_free(&w);
            n++;
        }
        free(module);
    }
    assert_int_equal(n, 14);
    quant_close(q);
    ckpt_close(a);
    ckpt_close(b);
}

static void test_round_trips(void **state)
{
    (void)state;
    char *model = fx_path("src"), *out = fx_path("q"), *plain = fx_path("p");
    fx_llama(model, 128, 384, 2, "");
    for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++) {
        err e = {0};
        bake_report r, c;
        bake_opts o = {.model = model,
                       .out = out,
                       .scheme = schemes[i].scheme,
                       .overwrite = true,
                       .threads = 2};
        convert_opts v = {
            .in = out, .out = plain, .to = "plain", .dtype = "f32", .overwrite = true};
        CHECK_OK(bake_quantize(&o, &r, &e));
        assert_int_equal(r.n_modules, 14);
        if (!(r.snr_min_db >= schemes[i].least_db))
            fail_msg("%s: %g dB", schemes[i].scheme, r.snr_min_db);
        assert_true(r.bytes_out < r.bytes_in && r.snr_median_db >= r.snr_min_db);
        CHECK_OK(bake_convert(&v, &c, &e));
        compare_plain(out, plain);
        json *j = config_of(plain);
        assert_null(json_get(j, "quantization_config"));
        assert_string_equal(json_get(j, "dtype")->valuestring, "float32");
        assert_string_equal(json_get(j, "keep_me")->valuestring, "as it is");
        assert_non_null(json_get(json_get(j, "tare_origin"), "dequantized_from"));
        json_drop(j);
        ckpt *again = NULL;
        buf words = {0};
        CHECK_OK(ckpt_open(&again, plain, &e));
        ckpt_origin_words(again, &words);
        assert_memory_equal(words.data, "dequantized_from ", 17);
        assert_null(strchr(words.data, '{'));
        buf_free(&words);
        ckpt_close(again);
        j = config_of(out);
        assert_string_equal(json_get(j, "dtype")->valuestring, "bfloat16");
        assert_string_equal(
            json_get(json_get(json_get(j, "quantization_config"), "ignore"), "x") ? "" : "lm_head",
            json_get(json_get(j, "quantization_config"), "ignore")->child->valuestring);
        json_drop(j);
        bake_report_free(&r);
        bake_report_free(&c);
    }
    assert_int_equal(temporaries(), 0);
    free(model);
    free(out);
    free(plain);
}

/* An unquantized model converted to f32 and back to bf16 is itself. */
static void test_plain_and_back(void **state)
{
    (void)state;
    err e = {0};
    char *model = fx_path("src"), *a = fx_path("f32"), *b = fx_path("bf16");
    bake_report r;
    ckpt *x, *y;
    CHECK_OK(bake_convert(&(convert_opts){.in = model, .out = a, .dtype = "f32"}, &r, &e));
    bake_report_free(&r);
    CHECK_OK(bake_convert(&(convert_opts){.in = a, .out = b}, &r, &e));
    bake_report_free(&r);
    CHECK_OK(ckpt_open(&x, model, &e));
    CHECK_OK(ckpt_open(&y, b, &e));
    assert_int_equal(ckpt_n_tensors(x), ckpt_n_tensors(y));
    for (size_t i = 0; i < ckpt_n_tensors(x); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(x, i), *u = ckpt_find(y, t->name);
        assert_non_null(u);
        assert_memory_equal(t->data, u->data, t->bytes);
    }
    ckpt_close(x);
    ckpt_close(y);
    CHECK_ERR(bake_convert(&(convert_opts){.in = model, .out = b, .to = "magic"}, &r, &e),
              ERR_USAGE, "plain");
    bake_report_free(&r);
    CHECK_ERR(bake_convert(&(convert_opts){.in = model, .out = b, .dtype = "int4"}, &r, &e),
              ERR_USAGE, "bf16");
    bake_report_free(&r);
    free(model);
    free(a);
    free(b);
}

static void test_groups_that_do_not_divide(void **state)
{
    (void)state;
    err e = {0};
    char *model = fx_path("ragged"), *out = fx_path("none");
    fx_llama(model, 96, 200, 2, "");
    CHECK_ERR(quantize(model, out, "w:int4,g128", NULL, &e), ERR_SHAPE,
              "model.layers.*.mlp.down_proj (K=200, 2 of them)");
    assert_non_null(strstr(e.msg, "self_attn.q_proj"));
    assert_non_null(strstr(e.msg, "channel"));
    CHECK_ERR(quantize(model, out, "w:int4,g64", NULL, &e), ERR_SHAPE, "channel");
    CHECK_ERR(quantize(model, out, "w:int4,g512", NULL, &e), ERR_SHAPE, "mlp.up_proj");
    CHECK_ERR(quantize(model, out, "w:int4,g32", NULL, &e), ERR_SHAPE,
              "--ignore 're:.*(down_proj)$'");
    assert_null(strstr(e.msg, "up_proj"));
    CHECK_ERR(quantize(model, out, "nvfp4", NULL, &e), ERR_SHAPE, "down_proj");
    assert_false(file_exists(out));
    assert_int_equal(temporaries(), 0);
    CHECK_OK(quantize(model, out, "fp8-block", NULL, &e)); /* blocks may be ragged */
    file_remove_tree(out, NULL);
    CHECK_OK(quantize(model, out, "w:int4,channel", NULL, &e));
    file_remove_tree(out, NULL);
    CHECK_OK(quantize(model, out, "w:int3,g8", NULL, &e));
    file_remove_tree(out, NULL);
    free(model);
    free(out);
}

static void test_ignore(void **state)
{
    (void)state;
    err e = {0};
    bake_report r;
    char *model = fx_path("src"), *out = fx_path("ignored");
    CHECK_ERR(ignoring(model, out, "re:.*", false, &r, &e), ERR_USAGE, "nothing to quantize");
    bake_report_free(&r);
    CHECK_ERR(ignoring(model, out, "re:model\\.layer\\..*", true, &r, &e), ERR_USAGE,
              "matches no module");
    bake_report_free(&r);
    CHECK_OK(ignoring(model, out, "re:.*down_proj$", false, &r, &e));
    assert_int_equal(r.n_modules, 12);
    assert_true(noted(&r, "caught 2 modules"));
    bake_report_free(&r);
    json *j = config_of(out);
    assert_int_equal(cJSON_GetArraySize(json_get(json_get(j, "quantization_config"), "ignore")), 3);
    json_drop(j);
    file_remove_tree(out, NULL);
    log_set_level(LOG_ERROR);
    CHECK_OK(ignoring(model, out, "re:model\\.layer\\..*", false, &r, &e));
    log_set_level(LOG_WARN);
    assert_true(noted(&r, "caught 0 modules"));
    bake_report_free(&r);
    free(model);
    free(out);
}

static void test_refusals(void **state)
{
    (void)state;
    err e = {0};
    char *model = fx_path("src"), *q = fx_path("ignored"), *out = fx_path("none");
    CHECK_ERR(quantize(q, out, "int4", NULL, &e), ERR_BADSTATE, "--to plain");
    assert_non_null(strstr(e.msg, "fp8_e4m3,channel"));
    CHECK_ERR(quantize(model, model, "int4", NULL, &e), ERR_USAGE, "same folder");
    CHECK_ERR(quantize(model, q, "int4", NULL, &e), ERR_EXISTS, "--overwrite");
    CHECK_ERR(quantize(model, out, "w:int4,g64,actorder", NULL, &e), ERR_UNSUPPORTED,
              "calibration");
    CHECK_ERR(quantize(model, out, "fp8 a:fp8_e4m3,tensor,static", NULL, &e), ERR_UNSUPPORTED,
              "calibration");
    CHECK_ERR(quantize(model, out, "w:bf16", NULL, &e), ERR_USAGE, "unquantized");
    CHECK_ERR(quantize(model, out, "fp8 kv:int8", NULL, &e), ERR_UNSUPPORTED, "KV cache");
    CHECK_ERR(quantize(model, out, "w:nf4 a:int8", NULL, &e), ERR_UNSUPPORTED, "these weights");
    assert_false(file_exists(out));
    free(model);
    free(q);
    free(out);
}

/* One bad value, in a linear and in a norm. */
static void test_nan_in_source(void **state)
{
    (void)state;
    static const char *const where[] = {"model.layers.0.mlp.up_proj.weight", "model.norm.weight"};
    for (int i = 0; i < 2; i++) {
        err e = {0};
        ckpt *c;
        const ckpt_tensor *t;
        char *model = fx_path("nan"), *out = fx_path("none"),
             *file = file_join(model, "model.safetensors");
        fx_llama(model, 64, 64, 1, "");
        CHECK_OK(ckpt_open(&c, model, &e));
        CHECK_OK(ckpt_need(c, where[i], &t, &e));
        buf all = {0};
        CHECK_OK(file_read_all(&all, file, 1 << 24, &e));
        size_t at = all.len - (size_t)t->bytes;
        while (memcmp(all.data + at, t->data, t->bytes))
            at--;
        ckpt_close(c);
        const uint16_t bad = i ? 0x7f80 : 0x7fc0;
        memcpy(all.data + at + 6, &bad, 2);
        CHECK_OK(file_write_atomic(file, all.data, all.len, &e));
        CHECK_ERR(quantize(model, out, "fp8", NULL, &e), ERR_VALUE, where[i]);
        assert_false(file_exists(out));
        assert_int_equal(temporaries(), 0);
        buf_free(&all);
        free(model);
        free(out);
        free(file);
    }
}

/* ---- tied embeddings ----------------------------------------------------------------------------
 */

static void tied_model(const char *dir, bool tie, int head /* 0 none, 1 same, 2 other */)
{
    int64_t h = 32;
    uint16_t *w = fx_bf16((size_t)(32 * 64), 7), *other = fx_bf16(32 * 32, 9);
    fx_tensor t[] = {{"model.embed_tokens.weight", NUM_BF16, 2, {32, h}, w},
                     {"model.layers.0.self_attn.q_proj.weight", NUM_BF16, 2, {32, h}, w},
                     {"model.layers.0.self_attn.k_proj.weight", NUM_BF16, 2, {16, h}, w},
                     {"model.layers.0.self_attn.v_proj.weight", NUM_BF16, 2, {16, h}, w},
                     {"model.layers.0.self_attn.o_proj.weight", NUM_BF16, 2, {32, h}, w},
                     {"model.layers.0.mlp.gate_proj.weight", NUM_BF16, 2, {64, h}, w},
                     {"model.layers.0.mlp.up_proj.weight", NUM_BF16, 2, {64, h}, w},
                     {"model.layers.0.mlp.down_proj.weight", NUM_BF16, 2, {h, 64}, w},
                     {"lm_head.weight", NUM_BF16, 2, {32, h}, head == 1 ? w : other}};
    char *c = fx_config(32, 64, 1, ""), *at = strstr(c, "\"tie_word_embeddings\": false");
    if (tie) memcpy(at, "\"tie_word_embeddings\": true ", strlen("\"tie_word_embeddings\": true "));
    fx_write(dir, c, t, head ? 9 : 8);
    free(c);
    free(w);
    free(other);
}

static void test_tied_embeddings(void **state)
{
    (void)state;
    err e = {0};
    bake_report r;
    ckpt *c;
    char *model = fx_path("tie"), *out = fx_path("tied");
    json *j;
    log_set_level(LOG_ERROR);
    tied_model(model, true, 2);
    CHECK_OK(quantize(model, out, "fp8", &r, &e));
    assert_true(noted(&r, "tie_word_embeddings"));
    bake_report_free(&r);
    j = config_of(out);
    assert_true(cJSON_IsFalse(json_get(j, "tie_word_embeddings")));
    json_drop(j);
    CHECK_OK(ckpt_open(&c, out, &e));
    assert_non_null(ckpt_find(c, "lm_head.weight"));
    ckpt_close(c);
    file_remove_tree(out, NULL);

    tied_model(model, false, 0);
    CHECK_ERR(quantize(model, out, "fp8", NULL, &e), ERR_MISSING, "lm_head.weight");
    assert_non_null(strstr(e.msg, "tie_word_embeddings to true"));

    tied_model(model, true, 1);
    CHECK_OK(quantize(model, out, "fp8", NULL, &e));
    j = config_of(out);
    assert_true(cJSON_IsTrue(json_get(j, "tie_word_embeddings")));
    json_drop(j);
    CHECK_OK(ckpt_open(&c, out, &e));
    assert_null(ckpt_find(c, "lm_head.weight"));
    ckpt_close(c);
    log_set_level(LOG_WARN);
    free(model);
    free(out);
}

/* An architecture that tare does not know: linears by name, the router stays, and is listed. */
static void test_unknown_architecture(void **state)
{
    (void)state;
    err e = {0};
    bake_report r;
    uint16_t *w = fx_bf16(64 * 64, 5);
    fx_tensor t[] = {{"model.embed_tokens.weight", NUM_BF16, 2, {64, 64}, w},
                     {"model.layers.0.mlp.gate.weight", NUM_BF16, 2, {4, 64}, w},
                     {"model.layers.0.mlp.experts.0.gate_proj.weight", NUM_BF16, 2, {64, 64}, w},
                     {"model.layers.0.mlp.experts.0.up_proj.weight", NUM_BF16, 2, {64, 64}, w},
                     {"lm_head.weight", NUM_BF16, 2, {64, 64}, w}};
    char *model = fx_path("odd"), *out = fx_path("oddq"), *c = fx_config(64, 64, 1, "");
    memcpy(strstr(c, "LlamaForCausalLM"), "MagicForCausalLM", 16);
    fx_write(model, c, t, 5);
    CHECK_OK(quantize(model, out, "nvfp4", &r, &e));
    assert_int_equal(r.n_modules, 2);
    assert_true(noted(&r, "MagicForCausalLM"));
    bake_report_free(&r);
    json *j = config_of(out);
    const json *ignore = json_get(json_get(j, "quantization_config"), "ignore");
    assert_int_equal(cJSON_GetArraySize(ignore), 2);
    assert_string_equal(ignore->child->valuestring, "model.layers.0.mlp.gate");
    json_drop(j);
    free(w);
    free(c);
    free(model);
    free(out);
}

/* Everything of the source arrives, but no index and no quantization file of another tool. */
static void test_side_files(void **state)
{
    (void)state;
    static const char *const keep[] = {"generation_config.json",
                                       "chat_template.jinja",
                                       "added_tokens.json",
                                       "preprocessor_config.json",
                                       "tokenizer.model",
                                       "LICENSE",
                                       "sub/a.txt"};
    static const char *const stale[] = {"hf_quant_config.json", "quantize_config.json",
                                        "recipe.yaml"};
    err e = {0};
    char *model = fx_path("side"), *out = fx_path("sideq"), *sub = file_join(model, "sub");
    fx_llama(model, 64, 64, 1, "");
    CHECK_OK(file_mkdirs(sub, &e));
    for (size_t i = 0; i < 7; i++) {
        char *p = file_join(model, keep[i]);
        CHECK_OK(file_write_atomic(p, "{}", 2, &e));
        free(p);
    }
    for (size_t i = 1; i < 3; i++) {
        char *p = file_join(model, stale[i]);
        CHECK_OK(file_write_atomic(p, "{}", 2, &e));
        free(p);
    }
    CHECK_OK(quantize(model, out, "fp8", NULL, &e));
    for (size_t i = 0; i < 7; i++) {
        char *p = file_join(out, keep[i]);
        uint64_t n = 0;
        CHECK_OK(file_size(p, &n, &e));
        assert_int_equal(n, 2);
        free(p);
    }
    for (size_t i = 0; i < 3; i++) {
        char *p = file_join(out, stale[i]);
        assert_false(file_exists(p));
        free(p);
    }
    free(model);
    free(out);
    free(sub);
}

static void test_shards(void **state)
{
    (void)state;
    err e = {0};
    bake_report r;
    ckpt *c;
    char *model = fx_path("src"), *out = fx_path("sharded"), *index = NULL;
    bake_opts o = {
        .model = model, .out = out, .scheme = "int8", .max_shard_bytes = 100000, .threads = 1};
    CHECK_OK(bake_quantize(&o, &r, &e));
    index = file_join(out, "model.safetensors.index.json");
    assert_true(file_exists(index));
    CHECK_OK(ckpt_open(&c, out, &e));
    assert_true(ckpt_n_tensors(c) > 20);
    ckpt_close(c);
    bake_report_free(&r);
    free(index);
    free(model);
    free(out);
}

/* ---- crashes ------------------------------------------------------------------------------------
 */

/* A write that fails midway: the limit on file size stands for a full disk. */
static void test_write_fails(void **state)
{
    (void)state;
    char *model = fx_path("src"), *out = fx_path("full");
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        err e = {0};
        struct rlimit lim = {40000, 40000};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &lim);
        int rc = quantize(model, out, "fp8", NULL, &e);
        _exit(rc == -ERR_IO && e.msg[0] ? 0 : 1);
    }
    int status;
    waitpid(pid, &status, 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_false(file_exists(out));
    assert_int_equal(temporaries(), 0);
    free(model);
    free(out);
}

/* Killed while it writes: no OUT; the next run clears the remains and gives the same bytes. */
static void test_killed(void **state)
{
    (void)state;
    err e = {0};
    char *model = fx_path("big"), *out = fx_path("killed"), *whole = fx_path("whole");
    char a[65], b[65];
    fx_llama(model, 512, 1024, 12, "");
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        quantize(model, out, "int4", NULL, &e);
        _exit(0);
    }
    for (int i = 0; i < 2000 && !temporaries(); i++)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    nanosleep(&(struct timespec){0, 20000000}, NULL);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    assert_false(file_exists(out));
    assert_int_equal(temporaries(), 1);
    CHECK_OK(quantize(model, out, "int4", NULL, &e));
    assert_int_equal(temporaries(), 0);
    CHECK_OK(quantize(model, whole, "int4", NULL, &e));
    char *p = file_join(out, "model.safetensors"), *q = file_join(whole, "model.safetensors");
    CHECK_OK(file_sha256(p, a, &e));
    CHECK_OK(file_sha256(q, b, &e));
    assert_string_equal(a, b);
    free(p);
    free(q);
    free(model);
    free(out);
    free(whole);
}

/* Anonymous memory follows the largest module, not the model: 40 MB here, 1 MB the largest. A child
 * measures, so that what other tests allocated does not count. */
static void test_memory_is_bounded(void **state)
{
    (void)state;
    char *model = fx_path("big"), *out = fx_path("bounded");
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        err e = {0};
        bake_report r;
        uint64_t before = mem_rss_anon_bytes();
        mem_rss_sample();
        int rc = quantize(model, out, "w:int4,g128,asym", &r, &e);
        uint64_t used = mem_rss_peak_bytes() - before,
                 layer = 2u * (512 * 512 * 3 + 3 * 512 * 1024);
        if (rc < 0 || r.bytes_in < 8 * layer) _exit(1);
        _exit(used < 4 * layer ? 0 : 2);
    }
    int status;
    waitpid(pid, &status, 0);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
#endif
    free(model);
    free(out);
}

/* ---- inspect ------------------------------------------------------------------------------------
 */

static json *inspect(const char *model)
{
    err e = {0};
    buf b = {0};
    jw w;
    json *j;
    jw_init(&w, &b, 0);
    CHECK_OK(bake_inspect(model, &w, &e));
    CHECK_OK(json_parse(&j, b.data, b.len, "inspect", &e));
    buf_free(&b);
    return j;
}

static void test_inspect(void **state)
{
    (void)state;
    err e = {0};
    static const char *const parts[] = {"codes", "scales", "zeros", "unquantized", "padding"};
    static const char *const models[] = {"ct_w3a16", "ct_w4a16_asym_g128", "ct_mixed_w4_fp8",
                                         "ct_nvfp4", "ct_w4a8"};
    for (size_t i = 0; i < 5; i++) {
        char *dir = xasprintf("tests/fixtures/quant/%s", models[i]);
        json *j = inspect(dir);
        ckpt *c;
        double sum = 0, total = 0;
        CHECK_OK(ckpt_open(&c, dir, &e));
        for (size_t k = 0; k < ckpt_n_tensors(c); k++)
            total += (double)ckpt_tensor_at(c, k)->bytes;
        for (size_t k = 0; k < 5; k++)
            sum += json_get(json_get(j, "bytes"), parts[k])->valuedouble;
        assert_true(sum == total && json_get(json_get(j, "bytes"), "total")->valuedouble == total);
        assert_string_equal(json_get(j, "format")->valuestring, "compressed-tensors");
        assert_int_equal(json_get(j, "params")->valuedouble, 623360);
        ckpt_close(c);
        json_drop(j);
        free(dir);
    }
    json *j = inspect("tests/fixtures/quant/ct_mixed_w4_fp8");
    assert_string_equal(json_get(j, "w")->valuestring, "mixed");
    assert_int_equal(cJSON_GetArraySize(json_get(j, "modules")), 6);
    assert_int_equal(json_get(json_get(j, "ignore")->child, "modules")->valuedouble, 1);
    json_drop(j);
    j = inspect("tests/fixtures/quant/ct_w4a16_asym_g128");
    assert_string_equal(json_get(j, "w")->valuestring, "int4,g128,asym");
    assert_true(json_get(json_get(j, "bytes"), "zeros")->valuedouble > 0);
    json_drop(j);

    /* A method that is not read is described and named among the warnings. */
    char *dir = fx_path("aqlm"),
         *c = fx_config(64, 64, 1, ", \"quantization_config\": {\"quant_method\": \"aqlm\"}");
    fx_tensor t[] = {{"model.layers.0.mlp.up_proj.qweight", NUM_I32, 2, {8, 64}, NULL}};
    fx_write(dir, c, t, 1);
    j = inspect(dir);
    assert_string_equal(json_get(j, "format")->valuestring, "aqlm");
    bool said = false;
    for (const json *w = json_get(j, "warnings")->child; w; w = w->next)
        said |= strstr(w->valuestring, "aqlm") != NULL;
    assert_true(said);
    json_drop(j);
    free(c);
    free(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_plain_and_back),
        cmocka_unit_test(test_groups_that_do_not_divide),
        cmocka_unit_test(test_ignore),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_nan_in_source),
        cmocka_unit_test(test_tied_embeddings),
        cmocka_unit_test(test_unknown_architecture),
        cmocka_unit_test(test_side_files),
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_write_fails),
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_memory_is_bounded),
        cmocka_unit_test(test_inspect),
    };
    log_set_level(LOG_WARN);
    return cmocka_run_group_tests(tests, fx_setup, fx_teardown);
}
