/* What is predicted against what loading allocates and what the writer puts on disk. */
#include "check.h"
#include <dirent.h>
#include <unistd.h>
#include "bake/bake.h"
#include "base/file.h"
#include "engine/engine.h"
#include "model_fixture.h"
#include "plan/plan.h"

#define MILLET "models/millet-7m"

static plan_in plan_for(const fixture *f, const qspec *scheme, kern_act act)
{
    return (plan_in){.cfg = ckpt_cfg(f->c),
                     .q = f->q,
                     .scheme = scheme,
                     .kv = KV_BF16,
                     .act = act,
                     .features = f->dev->features,
                     .threads = team_size(f->dev->team),
                     .context = 1024,
                     .concurrency = 4,
                     .chunk_tokens = 64,
                     .page_tokens = 16};
}

static double off_by(uint64_t predicted, uint64_t actual)
{
    return fabs((double)predicted - (double)actual) / (double)actual;
}

/* Of what predicts further tokens, and of images: stored, and not used. */
static uint64_t unused_bytes(const ckpt *c)
{
    static const char *const parts[] = {"vision", "visual", "multi_modal", "mm_projector", "mtp"};
    uint64_t n = 0;
    for (size_t i = 0; i < ckpt_n_tensors(c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(c, i);
        bool hit = false;
        for (size_t k = 0; k < sizeof parts / sizeof *parts; k++)
            hit = hit || strstr(t->name, parts[k]);
        n += hit ? t->bytes : 0;
    }
    return n;
}

static uint64_t tensor_bytes(const ckpt *c)
{
    uint64_t n = 0;
    for (size_t i = 0; i < ckpt_n_tensors(c); i++)
        n += ckpt_tensor_at(c, i)->bytes;
    return n;
}

/* Loads `path` (quantizing if preset) and compares every figure. */
static void check_loaded(const char *path, const char *preset, const char *features, kern_act act)
{
    err e = {0};
    fixture f;
    qspec s;
    plan_out p;
    model_bytes mb;
    CHECK_OK(fixture_open(
        &f,
        &(fixture_opts){
            .path = path, .features = features, .quantize = preset, .act = act, .threads = 2},
        &e));
    if (preset) CHECK_OK(qspec_parse(preset, &s, &e));
    plan_in in = plan_for(&f, preset ? &s : NULL, act);
    CHECK_OK(plan_compute(&in, &p, &e));
    assert_string_equal(p.refused, "");
    model_memory(f.m, &mb);
    uint64_t logits = (uint64_t)plan_logit_rows(ckpt_cfg(f.c)->vocab_size, 64, 4) *
                      (uint64_t)ckpt_cfg(f.c)->vocab_size * 4;
    double weights = off_by(p.resident_weights, mb.prepared + mb.other);
    print_message("%-28s %-12s %-8s %-4s resident %8llu, predicted %+.3f %%\n", path,
                  preset ? preset : "-", features, kern_act_name(act),
                  (unsigned long long)(mb.prepared + mb.other), 100 * weights);
    assert_true(weights <= 0.01);
    assert_int_equal(p.workspace, mb.workspace + logits);
    assert_int_equal(p.total, p.resident_weights + p.workspace + p.kv_total);
    if (!preset) assert_int_equal(p.weights.total + unused_bytes(f.c), tensor_bytes(f.c));
    fixture_close(&f);
}

static void loaded_models(void **state)
{
    (void)state;
    static const char *const paths[] = {MILLET, "tests/fixtures/tiny/stories260K",
                                        "tests/fixtures/tiny/tinystories-656k"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        check_loaded(paths[i], NULL, "auto", KERN_ACT_SPEC);
    for (int i = 0; i < qspec_n_presets; i++) {
        check_loaded(MILLET, qspec_presets[i].name, "auto", KERN_ACT_AUTO);
        check_loaded(MILLET, qspec_presets[i].name, "auto", KERN_ACT_SPEC);
        if (i % 4 == 2) check_loaded(MILLET, qspec_presets[i].name, "portable", KERN_ACT_AUTO);
    }
}

static int visible(const struct dirent *d)
{
    return !strchr(d->d_name, '.');
}

/* Every architecture, as it is and quantized while it is loaded. */
static void every_architecture(void **state)
{
    (void)state;
    struct dirent **all;
    int n = scandir("tests/fixtures/arch", &all, visible, alphasort);
    assert_true(n >= 32);
    for (int i = 0; i < n; i++) {
        char path[512];
        snprintf(path, sizeof path, "tests/fixtures/arch/%s", all[i]->d_name);
        check_loaded(path, NULL, "auto", KERN_ACT_SPEC);
        check_loaded(path, "fp8", "auto", KERN_ACT_SPEC);
        check_loaded(path, "w:int4,g32", "auto", KERN_ACT_AUTO);
        free(all[i]);
    }
    free(all);
}

/* Bytes on disk: exactly what the writer writes, and what the written checkpoint is planned as. */
static void written_models(void **state)
{
    (void)state;
    char dir[] = "/tmp/tare_plan_XXXXXX", out[64];
    assert_non_null(mkdtemp(dir));
    for (int i = 0; i < qspec_n_presets; i++) {
        err e = {0};
        bake_report r = {0};
        ckpt *src = NULL, *c = NULL;
        quant_ckpt *sq = NULL, *q = NULL;
        qspec s;
        plan_out before, after;
        snprintf(out, sizeof out, "%s/%s", dir, qspec_presets[i].name);
        CHECK_OK(bake_quantize(
            &(bake_opts){
                .model = MILLET, .out = out, .scheme = qspec_presets[i].name, .algo = "rtn"},
            &r, &e));
        CHECK_OK(ckpt_open(&src, MILLET, &e));
        CHECK_OK(quant_open(&sq, src, &e));
        CHECK_OK(ckpt_open(&c, out, &e));
        CHECK_OK(quant_open(&q, c, &e));
        CHECK_OK(qspec_parse(qspec_presets[i].name, &s, &e));
        plan_in in = {.cfg = ckpt_cfg(src),
                      .q = sq,
                      .scheme = &s,
                      .threads = 1,
                      .context = 1,
                      .concurrency = 1,
                      .chunk_tokens = 64,
                      .page_tokens = 16};
        CHECK_OK(plan_compute(&in, &before, &e));
        in.cfg = ckpt_cfg(c);
        in.q = q;
        in.scheme = NULL;
        CHECK_OK(plan_compute(&in, &after, &e));
        print_message("%-12s on disk %llu, planned %llu, planned again %llu\n",
                      qspec_presets[i].name, (unsigned long long)tensor_bytes(c),
                      (unsigned long long)before.weights.total,
                      (unsigned long long)after.weights.total);
        assert_int_equal(before.weights.total, tensor_bytes(c));
        assert_memory_equal(&before.weights, &after.weights, sizeof before.weights);
        assert_int_equal(before.weights.total,
                         before.weights.codes + before.weights.scales + before.weights.zeros +
                             before.weights.unquantized + before.weights.padding);
        quant_close(q);
        quant_close(sq);
        ckpt_close(c);
        ckpt_close(src);
        bake_report_free(&r);
    }
    err e = {0};
    CHECK_OK(file_remove_tree(dir, &e));
}

/* The engine's own account, and the KV pool to the byte in every format. */
static void engine_account(void **state)
{
    (void)state;
    for (int i = 0; i < kv_n_formats; i++) {
        err e = {0};
        engine *en;
        engine_info info;
        ckpt *c;
        plan_out p;
        CHECK_OK(engine_open(&en,
                             &(engine_opts){.model = MILLET,
                                            .threads = 1,
                                            .kv_cache_dtype = kv_formats[i].name,
                                            .max_running = 3,
                                            .max_model_len = 1000},
                             &e));
        engine_get_info(en, &info);
        engine_close(en, 0);
        assert_true(off_by(info.predicted_bytes, info.actual_bytes) <= 0.01);
        CHECK_OK(ckpt_open(&c, MILLET, &e));
        plan_in in = {.cfg = ckpt_cfg(c),
                      .kv = kv_formats[i].type,
                      .threads = 1,
                      .context = 1000,
                      .concurrency = 3,
                      .chunk_tokens = 512,
                      .page_tokens = 16};
        CHECK_OK(plan_compute(&in, &p, &e));
        assert_int_equal(p.kv_token, info.kv_bytes_per_token);
        assert_int_equal(p.kv_total, info.kv_pool_bytes);
        print_message("kv %-9s %5llu bytes a token, %4llu of them scales\n", kv_formats[i].name,
                      (unsigned long long)p.kv_token, (unsigned long long)p.kv_scales_token);
        /* From the format alone: 8 layers, K and V, 4 heads of 32 lanes. */
        static const double per_lane[KV_TYPES] = {
            [KV_BF16] = 2,    [KV_FP8_E4M3] = 1, [KV_FP8_E5M2] = 1,
            [KV_INT8] = 1.25, [KV_FP4] = 0.5625, [KV_F32] = 4};
        assert_int_equal(p.kv_token, (uint64_t)(8 * 2 * 4 * 32 * per_lane[kv_formats[i].type]));
        ckpt_close(c);
    }
}

static void refusals_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *scheme, *says, *remedy;
    } c[] = {{"w:int4,g128", "model.layers.0.self_attn.q_proj and 34 more: 64 input", ""},
             {"w:int4,g64", "model.layers.0.mlp.down_proj and 4 more: 172 input",
              "--ignore 're:.*down_proj$'"},
             {"mxfp4", "model.layers.0.mlp.down_proj and 4 more: 172 input", "--ignore"},
             {"w:int4,channel", "", ""},
             {"fp8-block", "", ""}};
    err e = {0};
    ckpt *k;
    quant_ckpt *q;
    CHECK_OK(ckpt_open(&k, "tests/fixtures/tiny/stories260K", &e));
    CHECK_OK(quant_open(&q, k, &e));
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        qspec s;
        plan_out p;
        CHECK_OK(qspec_parse(c[i].scheme, &s, &e));
        plan_in in = {.cfg = ckpt_cfg(k),
                      .q = q,
                      .scheme = &s,
                      .threads = 1,
                      .context = 1,
                      .concurrency = 1,
                      .chunk_tokens = 64,
                      .page_tokens = 16};
        CHECK_OK(plan_compute(&in, &p, &e));
        if (*c[i].says) {
            if (!strstr(p.refused, c[i].says) || !strstr(p.refused, c[i].remedy))
                fail_msg("%s: '%s'", c[i].scheme, p.refused);
        } else {
            assert_string_equal(p.refused, "");
        }
    }
    quant_close(q);
    ckpt_close(k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loaded_models),    cmocka_unit_test(every_architecture),
        cmocka_unit_test(written_models),   cmocka_unit_test(engine_account),
        cmocka_unit_test(refusals_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
