/* Prints one line for each module that golden.json of a quantized checkpoint lists: its name, shape
 * and the SHA-256 of the dequantized weight, widened to little-endian fp32, in the arithmetic of
 * the tool that wrote it: f32, bf16, f16  every step rounded to that type gptq            the scale
 * is rounded to bf16 first, the product to bf16 A + behind it adds +0 to every value: for tools
 * that decode a zero without its sign. */
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "quant/quant.h"

static void decode(const qtensor *t, int64_t row, const char *mode, float *out)
{
    num_dtype as = !strncmp(mode, "bf16", 4)  ? NUM_BF16
                   : !strncmp(mode, "f16", 3) ? NUM_F16
                                              : NUM_F32;
    qtensor_decode_row_as(t, row, as, out);
    for (int64_t k = 0; k < t->K && strchr(mode, '+'); k++)
        out[k] += 0.0f;
}

static int print_module(const quant_ckpt *q, const char *module, const char *mode, err *e)
{
    qtensor t;
    unsigned char d[32];
    int rc = quant_load(q, module, &t, e);
    if (rc < 0) return rc;
    float *row = xmalloc((size_t)t.K * sizeof *row);
    EVP_MD_CTX *m = EVP_MD_CTX_new();
    EVP_DigestInit_ex(m, EVP_sha256(), NULL);
    for (int64_t r = 0; r < t.E * t.N; r++) {
        decode(&t, r, mode, row);
        EVP_DigestUpdate(m, row, (size_t)t.K * sizeof *row);
    }
    EVP_DigestFinal_ex(m, d, NULL);
    EVP_MD_CTX_free(m);
    printf("%s %lld %lld ", module, (long long)(t.E * t.N), (long long)t.K);
    for (int i = 0; i < 32; i++)
        printf("%02x", d[i]);
    printf("\n");
    free(row);
    qtensor_free(&t);
    return 0;
}

int main(int argc, char **argv)
{
    err e = {0};
    ckpt *c = NULL;
    quant_ckpt *q = NULL;
    json *g = NULL;
    char path[4096];
    if (argc != 3) {
        fprintf(stderr, "quant_lines DIR tool|f32|bf16|f16[+]\n");
        return 2;
    }
    snprintf(path, sizeof path, "%s/golden.json", argv[1]);
    int rc = json_parse_file(&g, path, &e);
    if (rc >= 0) rc = ckpt_open(&c, argv[1], &e);
    quant_opts o = {.dequantize = !strncmp(argv[2], "tool", 4)};
    if (rc >= 0) rc = quant_open_as(&q, c, &o, &e);
    const json *all = rc >= 0 ? json_get(g, "dequantized_fp32") : NULL;
    for (const json *m = all ? all->child : NULL; m && rc >= 0; m = m->next)
        rc = print_module(q, m->string, argv[2], &e);
    if (rc < 0) fprintf(stderr, "%s\n", e.msg);
    quant_close(q);
    ckpt_close(c);
    json_drop(g);
    return rc < 0;
}
