/* From every dialect to every other: what is accepted comes back with the codes, scales, zero
 * points and dequantized weights that it had, to the bit; what is not is refused with module and
 * reason, and leaves nothing. Walks tests/fixtures/quant, or the folder given as argument, and the
 * registry. */
#include "quant_fixture.h"
#include <dirent.h>

static int n_args;
static char **args;

typedef struct opened {
    ckpt *c;
    quant_ckpt *q;
} opened;

static bool try_open(opened *o, const char *dir, err *e)
{
    if (ckpt_open(&o->c, dir, e) < 0) return false;
    if (quant_open(&o->q, o->c, e) >= 0) return true;
    ckpt_close(o->c);
    return false;
}

static void close_it(opened *o)
{
    quant_close(o->q);
    ckpt_close(o->c);
}

/* Element by element, through the public readers: independent of the digest that convert uses. */
static void same_weight(const char *what, const char *module, const qtensor *a, const qtensor *b)
{
    if (a->E != b->E || a->N != b->N || a->K != b->K || a->code != b->code)
        fail_msg("%s %s: another shape or type", what, module);
    float *x = xmalloc((size_t)a->K * 4), *y = xmalloc((size_t)a->K * 4);
    for (int64_t r = 0; r < a->E * a->N; r++) {
        for (int64_t k = 0; k < a->K; k++)
            if (qtensor_code(a, r, k) != qtensor_code(b, r, k) ||
                qtensor_scale(a, r, k) != qtensor_scale(b, r, k) ||
                qtensor_zero(a, r, k) != qtensor_zero(b, r, k))
                fail_msg("%s %s [%d, %d]: %d %g %g became %d %g %g", what, module, (int)r, (int)k,
                         qtensor_code(a, r, k), (double)qtensor_scale(a, r, k),
                         (double)qtensor_zero(a, r, k), qtensor_code(b, r, k),
                         (double)qtensor_scale(b, r, k), (double)qtensor_zero(b, r, k));
        qtensor_decode_row(a, r, x);
        qtensor_decode_row(b, r, y);
        for (int64_t k = 0; k < a->K; k++)
            if (x[k] != y[k])
                fail_msg("%s %s [%d, %d] decodes to another value", what, module, (int)r, (int)k);
    }
    if (a->input_scale != b->input_scale || a->input_zero != b->input_zero ||
        a->input_global != b->input_global || !qaxis_equal(&a->spec.a, &b->spec.a))
        fail_msg("%s %s: the input is quantized otherwise", what, module);
    free(x);
    free(y);
}

static int same_models(const char *what, const char *from, const char *to)
{
    err e = {0};
    opened a, b;
    char module[QUANT_NAME_MAX];
    int n = 0;
    if (!try_open(&a, from, &e) || !try_open(&b, to, &e)) fail_msg("%s: %s", what, e.msg);
    for (size_t i = 0; i < ckpt_n_tensors(a.c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(a.c, i), *u;
        const quant_part *p = quant_part_of(a.q, t->name, module);
        if (p && p->kind == QUANT_CODES) {
            qtensor x, y;
            CHECK_OK(quant_load(a.q, module, &x, &e));
            if (quant_load(b.q, module, &y, &e) < 0) fail_msg("%s: %s", what, e.msg);
            same_weight(what, module, &x, &y);
            qtensor_free(&x);
            qtensor_free(&y);
            n++;
        } else if (!p && !strstr(t->name, "_scale")) {
            u = ckpt_find(b.c, t->name);
            if (!u || u->bytes != t->bytes || memcmp(u->data, t->data, (size_t)t->bytes) != 0)
                fail_msg("%s: tensor %s was changed", what, t->name);
        }
    }
    assert_true(qaxis_equal(&a.q->kv, &b.q->kv));
    close_it(&a);
    close_it(&b);
    return n;
}

static const char *dialect_of(const char *dir)
{
    err e = {0};
    opened o;
    if (!try_open(&o, dir, &e)) {
        print_message("%s\n", e.msg);
        return NULL;
    }
    const char *name = o.q->dialect->name;
    close_it(&o);
    return strcmp(name, "plain") ? name : NULL;
}

/* Does the refusal leave nothing, and say which module or tensor and why? */
static void check_refusal(const char *what, const err *e, const char *out)
{
    if (e->code != ERR_UNSUPPORTED) fail_msg("%s: %d: %s", what, e->code, e->msg);
    if (!strstr(e->msg, "model.layers.") && !strstr(e->msg, "kv") && !strstr(e->msg, "KV"))
        fail_msg("%s: refused without naming a module: %s", what, e->msg);
    assert_false(file_exists(out));
}

static void one_pair(const char *name, const char *dir, const char *from, const quant_dialect *to)
{
    err e = {0};
    bake_report r;
    char *there = fx_path("there"), *back = fx_path("back");
    char *what = xasprintf("%s -> %s", name, to->name);
    file_remove_tree(there, NULL);
    file_remove_tree(back, NULL);
    int rc = bake_convert(&(convert_opts){.in = dir, .out = there, .to = to->name}, &r, &e);
    bake_report_free(&r);
    if (rc < 0) {
        check_refusal(what, &e, there);
        print_message("%-60s %s\n", what, e.msg);
    } else {
        same_models(what, dir, there);
        const quant_dialect *home = quant_dialect_by_name(from);
        if (home->store) {
            CHECK_OK(bake_convert(&(convert_opts){.in = there, .out = back, .to = from}, &r, &e));
            bake_report_free(&r);
            same_models(what, dir, back);
        }
        print_message("%-60s ok%s\n", what, home->store ? ", and back" : "");
    }
    free(there);
    free(back);
    free(what);
}

static void test_all_pairs(void **state)
{
    (void)state;
    const char *root = n_args > 1 ? args[1] : "tests/fixtures/quant";
    DIR *d = opendir(root);
    int cases = 0;
    assert_non_null(d);
    for (struct dirent *f; (f = readdir(d)) != NULL;) {
        if (f->d_name[0] == '.' || f->d_name[0] == '_') continue;
        char *dir = file_join(root, f->d_name);
        const char *from = file_is_dir(dir) ? dialect_of(dir) : NULL;
        for (int i = 0; from && i < quant_n_dialects; i++)
            if (quant_dialects[i]->store) one_pair(f->d_name, dir, from, quant_dialects[i]);
        cases += from != NULL;
        free(dir);
    }
    closedir(d);
    assert_true(cases >= 10);
}

/* Two groups of different bits are one config group each, by name. */
static void test_mixed_stays_mixed(void **state)
{
    (void)state;
    err e = {0};
    bake_report r;
    opened o;
    char *out = fx_path("mixed");
    CHECK_OK(bake_convert(&(convert_opts){.in = "tests/fixtures/quant/ct_mixed_w4_fp8",
                                          .out = out,
                                          .to = "compressed-tensors"},
                          &r, &e));
    bake_report_free(&r);
    assert_true(try_open(&o, out, &e));
    assert_int_equal(o.q->n_groups, 2);
    assert_string_equal(o.q->groups[0].format, "pack-quantized");
    close_it(&o);
    free(out);
}

/* An index as the source's writer left it: it names the tensors of the source. */
static void write_index(const char *dir)
{
    err e = {0};
    opened o;
    buf b = {0};
    assert_true(try_open(&o, "tests/fixtures/quant/bnb_fp4", &e));
    buf_puts(&b, "{\"metadata\": {}, \"weight_map\": {");
    for (size_t i = 0; i < ckpt_n_tensors(o.c); i++)
        buf_printf(&b, "%s\"%s\": \"model.safetensors\"", i ? ", " : "",
                   ckpt_tensor_at(o.c, i)->name);
    buf_puts(&b, "}}");
    char *path = file_join(dir, "model.safetensors.index.json");
    CHECK_OK(file_write_atomic(path, b.data, b.len, &e));
    free(path);
    buf_free(&b);
    close_it(&o);
}

/* Files beside the weights come along byte by byte; indexes and configs of quantizers do not. */
static void test_side_files(void **state)
{
    (void)state;
    err e = {0};
    bake_report r;
    static const struct {
        const char *name;
        bool comes;
    } files[] = {{"generation_config.json", true},
                 {"chat_template.jinja", true},
                 {"added_tokens.json", true},
                 {"preprocessor_config.json", true},
                 {"tokenizer.model", true},
                 {"LICENSE", true},
                 {"sub/notes.txt", true},
                 {"model.safetensors.index.json", false},
                 {"hf_quant_config.json", false},
                 {"quantization_config.json", false},
                 {"recipe.yaml", false}};
    char *in = fx_path("sides"), *out = fx_path("sides_out"), *sub = file_join(in, "sub");
    assert_int_equal(file_mkdirs(sub, &e), 0);
    static const char *const copied[] = {"config.json", "model.safetensors"};
    for (int i = 0; i < 2; i++) {
        buf b = {0};
        char *from = file_join("tests/fixtures/quant/bnb_fp4", copied[i]),
             *to = file_join(in, copied[i]);
        CHECK_OK(file_read_all(&b, from, 1 << 24, &e));
        CHECK_OK(file_write_atomic(to, b.data, b.len, &e));
        buf_free(&b);
        free(from);
        free(to);
    }
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char *p = file_join(in, files[i].name);
        const char *text = "{\"a\":  1}\n\x01\xff tail";
        CHECK_OK(file_write_atomic(p, text, strlen(text), &e));
        free(p);
    }
    char *gen = file_join(in, "generation_config.json");
    CHECK_OK(file_write_atomic(gen, "{ \"eos_token_id\":2 }", 20, &e));
    free(gen);
    write_index(in);
    CHECK_OK(bake_convert(&(convert_opts){.in = in, .out = out, .to = "bitsandbytes"}, &r, &e));
    bake_report_free(&r);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char *a = file_join(in, files[i].name), *b = file_join(out, files[i].name);
        buf x = {0}, y = {0};
        if (file_exists(b) != files[i].comes) fail_msg("%s: %d", files[i].name, file_exists(b));
        if (files[i].comes) {
            CHECK_OK(file_read_all(&x, a, 1 << 20, &e));
            CHECK_OK(file_read_all(&y, b, 1 << 20, &e));
            assert_int_equal(x.len, y.len);
            assert_memory_equal(x.data, y.data, x.len);
        }
        buf_free(&x);
        buf_free(&y);
        free(a);
        free(b);
    }
    free(in);
    free(out);
    free(sub);
}

static void test_refusals(void **state)
{
    (void)state;
    err e = {0};
    bake_report r;
    char *src = fx_path("plain"), *out = fx_path("none");
    fx_llama(src, 64, 96, 1, "");
    CHECK_ERR(bake_convert(&(convert_opts){.in = src, .out = out, .to = "bitsandbytes"}, &r, &e),
              ERR_USAGE, "tare quantize");
    bake_report_free(&r);
    CHECK_ERR(bake_convert(&(convert_opts){.in = src, .out = out, .to = "magic"}, &r, &e),
              ERR_USAGE, "written are plain, compressed-tensors");
    bake_report_free(&r);
    CHECK_ERR(bake_convert(&(convert_opts){.in = "tests/fixtures/quant/bnb_int8",
                                           .out = out,
                                           .to = "compressed-tensors"},
                           &r, &e),
              ERR_UNSUPPORTED, "second factor");
    bake_report_free(&r);
    CHECK_ERR(bake_convert(&(convert_opts){.in = "tests/fixtures/quant/ct_w4a16_asym_g128",
                                           .out = out,
                                           .to = "bitsandbytes"},
                           &r, &e),
              ERR_UNSUPPORTED, "zero points");
    bake_report_free(&r);
    assert_false(file_exists(out));
    free(src);
    free(out);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_pairs),
        cmocka_unit_test(test_mixed_stays_mixed),
        cmocka_unit_test(test_side_files),
        cmocka_unit_test(test_refusals),
    };
    n_args = argc;
    args = argv;
    return cmocka_run_group_tests(tests, fx_setup, fx_teardown);
}
