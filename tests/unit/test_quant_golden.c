/* Checkpoints written by other tools, read and held against the SHA-256 of each module's weight as
 * the tool itself dequantizes it. Walks tests/fixtures/quant, or the folders given as arguments. */
#include "quant_fixture.h"
#include <dirent.h>
#include <openssl/evp.h>

static int n_args;
static char **args;

/* fp32 bytes of the whole weight, in the tool's rounding and orientation. */
static float *golden_weight(const qtensor *t, num_dtype as, bool transposed)
{
    float *w = xmalloc((size_t)(t->E * t->N * t->K) * sizeof *w), *row = xmalloc((size_t)t->K * 4);
    for (int64_t r = 0; r < t->E * t->N; r++) {
        qtensor_decode_row(t, r, row);
        for (int64_t k = 0; k < t->K; k++) {
            int64_t x = r / t->N, n = r % t->N;
            w[transposed ? (x * t->K + k) * t->N + n : r * t->K + k] =
                as == NUM_F32 ? row[k] : num_round(as, row[k]);
        }
    }
    free(row);
    return w;
}

static void sha256_hex(const void *p, size_t n, char hex[65])
{
    unsigned char d[32];
    assert_int_equal(EVP_Digest(p, n, d, NULL, EVP_sha256(), NULL), 1);
    for (int i = 0; i < 32; i++)
        snprintf(hex + 2 * i, 3, "%02x", d[i]);
}

/* Experts that the tool stacks when it loads them: gate rows, then up rows; or down rows. */
static float *stacked_weight(const quant_ckpt *q, const char *module, num_dtype as, size_t *n)
{
    err e = {0};
    const char *dot = strrchr(module, '.'), *fused = ".gate_up_proj";
    const char *const parts[2] = {strcmp(dot, fused) ? "down_proj" : "gate_proj",
                                  strcmp(dot, fused) ? NULL : "up_proj"};
    float *w = NULL;
    *n = 0;
    for (int x = 0;; x++)
        for (int i = 0; i < 2; i++) {
            if (!parts[i]) continue;
            char *name = xasprintf("%.*s.%d.%s", (int)(dot - module), module, x, parts[i]);
            bool there = quant_has(q, name);
            qtensor t;
            if (there) CHECK_OK(quant_load(q, name, &t, &e));
            free(name);
            if (!there) return w;
            float *p = golden_weight(&t, as, false);
            size_t m = (size_t)(t.N * t.K);
            w = xrealloc(w, (*n + m) * sizeof *w);
            memcpy(w + *n, p, m * sizeof *w);
            *n += m;
            free(p);
            qtensor_free(&t);
        }
}

static bool check_module(const quant_ckpt *q, const json *m, num_dtype as)
{
    err e = {0};
    char hex[65];
    qtensor t = {0};
    size_t n;
    float *w;
    if (quant_has(q, m->string)) {
        CHECK_OK(quant_load(q, m->string, &t, &e));
        w = golden_weight(&t, as, cJSON_GetArraySize(json_get(m, "shape")) == 3);
        n = (size_t)(t.E * t.N * t.K);
    } else {
        w = stacked_weight(q, m->string, as, &n);
        if (!w) fail_msg("module '%s' is not quantized here", m->string);
    }
    sha256_hex(w, n * sizeof *w, hex);
    bool same = !strcmp(hex, json_get(m, "sha256_fp32")->valuestring);
    for (size_t i = 0; !same && i < n; i++)
        w[i] += 0.0f; /* tools differ in the sign of a decoded 0 */
    if (!same) sha256_hex(w, n * sizeof *w, hex);
    same = same || !strcmp(hex, json_get(m, "sha256_fp32")->valuestring);
    free(w);
    qtensor_free(&t);
    return same;
}

/* Modules with equal hashes of n that have one; -1 = no golden values here. */
static int check_case(const char *dir, int *n)
{
    err e = {0};
    json *g;
    ckpt *c;
    quant_ckpt *q;
    int same = 0;
    *n = 0;
    char *gold = file_join(dir, "golden.json");
    bool there = file_exists(gold);
    if (there) CHECK_OK(json_parse_file(&g, gold, &e));
    free(gold);
    if (!there) return -1;
    const json *in = json_get(g, "dequantized_in"), *all = json_get(g, "dequantized_fp32");
    num_dtype as = !in || !cJSON_IsString(in)            ? NUM_F32
                   : strstr(in->valuestring, "bfloat16") ? NUM_BF16
                   : strstr(in->valuestring, "float16")  ? NUM_F16
                                                         : NUM_F32;
    if (ckpt_open(&c, dir, &e) < 0) fail_msg("%s: %s", dir, e.msg);
    const quant_opts as_the_tool = {.dequantize = true};
    if (quant_open_as(&q, c, &as_the_tool, &e) < 0) fail_msg("%s: %s", dir, e.msg);
    for (const json *m = all ? all->child : NULL; m; m = m->next) {
        if (!json_get(m, "sha256_fp32")) continue;
        ++*n;
        bool ok = check_module(q, m, as);
        if (!ok) print_message("%s: %s differs\n", dir, m->string);
        same += ok;
    }
    quant_close(q);
    ckpt_close(c);
    json_drop(g);
    return same;
}

static void test_hashes(void **state)
{
    (void)state;
    int cases = 0, bad = 0;
    const char *root = n_args > 1 ? args[1] : "tests/fixtures/quant";
    DIR *d = opendir(root);
    assert_non_null(d);
    for (struct dirent *f; (f = readdir(d)) != NULL;) {
        int n;
        if (f->d_name[0] == '.' || f->d_name[0] == '_') continue;
        char *dir = file_join(root, f->d_name);
        int same = file_is_dir(dir) ? check_case(dir, &n) : -1;
        if (same >= 0) {
            cases++;
            bad += same != n;
            print_message("%-40s %2d of %2d equal\n", f->d_name, same, n);
        }
        free(dir);
    }
    closedir(d);
    assert_true(cases >= 6);
    assert_int_equal(bad, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_hashes)};
    n_args = argc;
    args = argv;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
