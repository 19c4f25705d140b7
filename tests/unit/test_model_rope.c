/* Rotary tables of every kind against rows that the transformers library made. */
#include "check.h"
#include "base/json.h"
#include "model/model.h"

static double compare(const json *want, const float *got)
{
    double worst = 0;
    int i = 0;
    for (const json *w = want->child; w; w = w->next, i++)
        worst = fmax(worst, fabs(w->valuedouble - (double)got[i]));
    assert_int_equal(i, 8);
    return worst;
}

static void rows(void **state)
{
    (void)state;
    err e = {0};
    json *all = NULL;
    int n = 0;
    CHECK_OK(json_parse_file(&all, "tests/fixtures/rope/rope.json", &e));
    for (const json *c = json_get(all, "cases")->child; c; c = c->next, n++) {
        ckpt_config cfg = {0};
        double worst = 0;
        CHECK_OK(config_parse(&cfg, json_get(c, "config"), NULL, "rope.json", &e));
        for (const json *r = json_get(c, "rows")->child; r; r = r->next) {
            float cosv[8], sinv[8];
            model_rope_row(&cfg, (int64_t)json_get(r, "pos")->valuedouble,
                           (int64_t)json_get(r, "length")->valuedouble, cosv, sinv);
            worst = fmax(worst, compare(json_get(r, "cos"), cosv));
            worst = fmax(worst, compare(json_get(r, "sin"), sinv));
        }
        print_message("%-28s %.1e\n", json_get(c, "name")->valuestring, worst);
        /* f32 angles: a rounding of inv_freq may be 250 times its own size away. */
        assert_true(worst <= 5e-5);
        config_free(&cfg);
    }
    assert_int_equal(n, 12);
    json_drop(all);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
