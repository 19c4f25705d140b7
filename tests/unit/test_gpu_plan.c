/* What is predicted of a GPU's memory against what loading allocates: every architecture, as it is
 * and quantized, several schemes; and what --mem-fraction-static means there. The device is the
 * first argument ("cuda:0"), without one the emulation. */
#include <dirent.h>
#include "check.h"
#include "engine/engine.h"
#include "model_fixture.h"
#include "plan/plan.h"

#define MILLET "models/millet-7m"

static const char *device = "emulated";

static double off_by(uint64_t predicted, uint64_t actual)
{
    return fabs((double)predicted - (double)actual) / (double)actual;
}

/* rows: of a step. */
static void check_loaded(const char *path, const char *preset, kern_act act, int64_t rows)
{
    err e = {0};
    fixture f;
    qspec s;
    plan_out p;
    model_bytes mb;
    const fixture_opts fo = {.path = path,
                             .quantize = preset,
                             .act = act,
                             .threads = 2,
                             .device = device,
                             .max_rows = rows,
                             .page_tokens = 32};
    CHECK_OK(fixture_open(&f, &fo, &e));
    if (preset) CHECK_OK(qspec_parse(preset, &s, &e));
    plan_in in = {.cfg = ckpt_cfg(f.c),
                  .q = f.q,
                  .scheme = preset ? &s : NULL,
                  .kv = KV_BF16,
                  .act = act,
                  .dev = f.dev,
                  .features = f.dev->features,
                  .threads = 2,
                  .context = 1024,
                  .concurrency = 4,
                  .chunk_tokens = rows,
                  .page_tokens = 32};
    CHECK_OK(plan_compute(&in, &p, &e));
    assert_string_equal(p.refused, "");
    model_memory(f.m, &mb);
    assert_int_equal(plan_logit_rows(ckpt_cfg(f.c)->vocab_size, rows, 4), rows);
    const double weights = off_by(p.resident_weights, mb.prepared + mb.other);
    if (weights > 0.01)
        fail_msg("%s, %s, %s: weights take %llu, predicted %llu", path, preset ? preset : "-",
                 kern_act_name(act), (unsigned long long)(mb.prepared + mb.other),
                 (unsigned long long)p.resident_weights);
    if (p.workspace != mb.workspace)
        fail_msg("%s, %s, %s: workspace takes %llu, predicted %llu", path, preset ? preset : "-",
                 kern_act_name(act), (unsigned long long)mb.workspace,
                 (unsigned long long)p.workspace);
    uint64_t layouts = 0;
    for (int i = 0; i < KERN_FORECAST_LAYOUTS; i++)
        layouts += p.gpu.layout[i].bytes;
    assert_true(layouts > 0 && layouts <= p.resident_weights && p.graphs > 0 && p.pinned > 0);
    assert_int_equal(p.total, p.resident_weights + p.workspace + p.kv_total);
    fixture_close(&f);
}

static void schemes(void **state)
{
    (void)state;
    check_loaded(MILLET, NULL, KERN_ACT_AUTO, 64);
    check_loaded(MILLET, NULL, KERN_ACT_SPEC, 600);
    for (int i = 0; i < qspec_n_presets; i++) {
        check_loaded(MILLET, qspec_presets[i].name, KERN_ACT_AUTO, 16);
        if (i % 3 == 1) check_loaded(MILLET, qspec_presets[i].name, KERN_ACT_SPEC, 64);
        if (i % 3 == 2) check_loaded(MILLET, qspec_presets[i].name, KERN_ACT_BF16, 700);
    }
}

static int visible(const struct dirent *d)
{
    return !strchr(d->d_name, '.');
}

static void every_architecture(void **state)
{
    (void)state;
    struct dirent **all;
    int n = scandir("tests/fixtures/arch", &all, visible, alphasort);
    assert_true(n >= 32);
    for (int i = 0; i < n; i++) {
        char path[512];
        snprintf(path, sizeof path, "tests/fixtures/arch/%s", all[i]->d_name);
        check_loaded(path, NULL, KERN_ACT_AUTO, 64);
        check_loaded(path, "fp8", KERN_ACT_AUTO, 64);
        check_loaded(path, "w:int4,g32", KERN_ACT_SPEC, 64);
        free(all[i]);
    }
    free(all);
}

/* Weights and cache have the fraction, the workspace comes on top. */
static void fraction(void **state)
{
    (void)state;
    err e = {0};
    engine *en;
    engine_info i;
    engine_opts o = {.model = MILLET, .device = device, .threads = 2, .max_running = 64};
    CHECK_OK(engine_open(&en, &o, &e));
    engine_get_info(en, &i);
    engine_close(en, 0);
    assert_int_equal(i.predicted_bytes, i.actual_bytes);
    assert_true(i.device_free > 0 && i.workspace_bytes > i.weight_bytes / 4 && i.graph_bytes > 0);
    o.mem_fraction = 1.8 * (double)i.weight_bytes / (double)i.device_free;
    CHECK_OK(engine_open(&en, &o, &e));
    engine_get_info(en, &i);
    engine_close(en, 0);
    const double some = o.mem_fraction * (double)i.device_free,
                 have = (double)(i.weight_bytes + i.kv_pool_bytes);
    const double page = 32.0 * (double)i.kv_bytes_per_token;
    if (have > some || have < some - 2 * page)
        fail_msg("weights and cache take %.0f of %.0f bytes", have, some);
    o.mem_fraction = 0.5 * (double)i.weight_bytes / (double)i.device_free;
    CHECK_ERR(engine_open(&en, &o, &e), ERR_NOMEM, "--mem-fraction-static");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(schemes),
        cmocka_unit_test(every_architecture),
        cmocka_unit_test(fraction),
    };
    if (argc > 1) device = argv[1];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
