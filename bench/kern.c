/* Kernels alone: for the shapes of a small model, each row that accepts a scheme at M = 1, 4, 64
 * and 512: time, weight bytes per second as a share of the read bandwidth measured in the same run,
 * and Gop/s (2 M N K). Best of several repetitions. Then experts as one product beside the same
 * linears one after the other, and attention with a plain and a latent cache. Usage: kern [-experts
 * | scheme ...] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kern/linear.h"

static const int64_t shapes[][2] = {{576, 576}, {1536, 576}, {576, 1536}, {49152, 576}};
static const int64_t batches[] = {1, 4, 8, 64, 512};
#define COPIES 30 /* matrices walked in turn, so that small ones do not sit in L2 */

static void fill_random(void *p, size_t n)
{
    unsigned r = 1;
    for (size_t i = 0; i < n; i++)
        ((unsigned char *)p)[i] = (unsigned char)((r = r * 1664525u + 1013904223u) >> 24);
}

static int random_tensor(qtensor *q, const qspec *s, int64_t N, int64_t K, void **mem, err *e)
{
    if (qaxis_quantized(&s->w)) {
        num_dtype st = s->w.scale == QS_NVFP4 ? NUM_F8_E4M3
                       : s->w.scale == QS_MX  ? NUM_F8_E8M0
                                              : NUM_BF16;
        int rc = qtensor_alloc(q, s, st, 1, N, K, e);
        if (rc < 0) return rc;
        fill_random((void *)(uintptr_t)q->codes, (size_t)N * q->row_bytes);
        int bits = num_infos[st].bits / 8;
        for (int64_t i = 0; i < q->scale_rows * q->scale_cols; i++) {
            float f = 0.01f;
            num_encode_row(st, &f, 1, (char *)(uintptr_t)q->scales + i * bits);
        }
        return 0;
    }
    size_t n = num_bytes(s->w.type, (size_t)(N * K));
    *mem = xmalloc(n);
    fill_random(*mem, n);
    for (size_t i = 1; i < n; i += 2)
        ((unsigned char *)*mem)[i] = 0x3c; /* small positive numbers */
    qtensor_plain(q, s->w.type, N, K, *mem);
    q->spec = *s;
    return 0;
}

static void one(kern_dev *d, const qspec *s, kern_act act, int64_t N, int64_t K, double roof,
                err *e)
{
    qtensor q;
    void *mem = NULL;
    int copies = N > 4096 ? 1 : COPIES;
    kern_linear *l[COPIES] = {0};
    if (random_tensor(&q, s, N, K, &mem, e) < 0) {
        fprintf(stderr, "%s\n", e->msg);
        return;
    }
    kern_linear_desc desc = {.name = "bench", .n_shards = 1, .shard = {&q}, .act = act};
    for (int i = 0; i < copies; i++)
        if (kern_linear_make(d, &desc, &l[i], e) < 0) goto out;
    for (size_t b = 0; b < sizeof batches / sizeof *batches; b++) {
        int64_t M = batches[b];
        float *x = xcalloc((size_t)(M * K), sizeof *x), *y = xcalloc((size_t)(M * N), sizeof *y);
        for (int64_t i = 0; i < M * K; i++)
            x[i] = (float)(i % 17) * 0.1f - 0.8f;
        double best = 1e9, start = clock_seconds();
        for (int rep = 0; rep < 200 && (rep < 3 || clock_seconds() - start < 0.15); rep++) {
            double t = clock_seconds();
            for (int i = 0; i < copies; i++)
                kern_linear_run(d, l[i], x, K, M, y, N);
            t = (clock_seconds() - t) / copies;
            best = t < best ? t : best;
        }
        const kern_choice *c = kern_linear_choice(l[0], kern_bucket(M));
        double gb = (double)kern_linear_bytes(l[0]) / best / 1e9;
        printf("  %6lldx%-5lld M=%-4lld %9.1f us %6.1f GB/s %5.0f%% %8.1f Gop/s  %-16s %s\n",
               (long long)N, (long long)K, (long long)M, best * 1e6, gb, 100 * gb / roof,
               2.0 * (double)M * (double)N * (double)K / best / 1e9, c->row, c->act);
        free(x);
        free(y);
    }
out:
    for (int i = 0; i < copies; i++)
        kern_linear_drop(d, l[i]);
    qtensor_free(&q);
    free(mem);
}

/* Layers of attention walked in turn, each with its part of the pages. */
typedef struct attn_shape {
    const char *name;
    int Hk, H, D, v_in_k, layers;
} attn_shape;
static const attn_shape small = {"9 heads, 3 KV heads of 64", 3, 9, 64, 0, 30};
static const attn_shape latent_16 = {"16 heads, latent of 512+64", 1, 16, 576, 512, 27};
static const attn_shape latent_128 = {"128 heads, latent of 512+64", 1, 128, 576, 512, 27};

/* A decode step (one row) at a depth, or a prompt. */
static void attention(kern_dev *d, const attn_shape *s, kern_kv_type t, const char *name, int depth,
                      int rows, double roof)
{
    enum { PT = 16 };
    int pages = (depth + PT - 1) / PT, Dv = s->v_in_k ? s->v_in_k : s->D;
    size_t layer = kern_kv_page_bytes(t, s->Hk, s->D, s->v_in_k, PT);
    kern_kv_layer kv = {.type = t, .Hk = s->Hk, .D = s->D, .page_tokens = PT, .v_in_k = s->v_in_k};
    kv.page_stride = layer * (size_t)s->layers;
    void *mem;
    if (kern_alloc(d, &mem, kv.page_stride * (size_t)pages, NULL) < 0) return;
    memset(mem, 0x11, kv.page_stride * (size_t)pages);
    int32_t *table = xmalloc((size_t)pages * sizeof *table);
    for (int i = 0; i < pages; i++)
        table[i] = i;
    float *q = xcalloc((size_t)(rows * s->H * s->D), sizeof *q),
          *o = xcalloc((size_t)(rows * s->H * Dv), sizeof *o);
    for (int i = 0; i < rows * s->H * s->D; i++)
        q[i] = (float)(i % 13) * 0.1f;
    kern_seq seq = {0, rows, depth, table};
    kern_attn_args a = {.q = q,
                        .ldq = s->H * s->D,
                        .out = o,
                        .ldo = s->H * Dv,
                        .H = s->H,
                        .scale = 0.125f,
                        .kv = &kv,
                        .seqs = &seq,
                        .n_seqs = 1};
    double best = 1e9, start = clock_seconds();
    for (int rep = 0; rep < 100 && (rep < 3 || clock_seconds() - start < 0.3); rep++)
        for (int l = 0; l < s->layers; l++) {
            kv.base = (uint8_t *)mem + layer * (size_t)l;
            double took = clock_seconds();
            kern_attention(d, &a);
            took = clock_seconds() - took;
            best = took < best ? took : best;
        }
    double gb = (double)layer * pages / best / 1e9;
    printf("  attention %s, %-8s depth %5d rows %4d %9.1f us %6.1f GB/s %4.0f%% %8.1f Gop/s\n",
           s->name, name, depth, rows, best * 1e6, gb, 100 * gb / roof,
           2.0 * s->H * (s->D + Dv) * rows * (depth - rows / 2.0) / best / 1e9);
    kern_free(d, mem);
    free(table);
    free(q);
    free(o);
}

/* ---- experts ----------------------------------------------------------------------------- */

#define EXPERTS 128
#define TOP_K   8

/* Choices that differ from call to call, so that no cache holds the experts of the next one. */
static int64_t route_random(kern_dev *d, int64_t T, int32_t *row, int32_t *first, unsigned *rng)
{
    int32_t *expert = xmalloc((size_t)(T * TOP_K) * 2 * sizeof *expert), *slot = expert + T * TOP_K;
    int64_t used = 0;
    for (int64_t t = 0; t < T; t++)
        for (int j = 0; j < TOP_K; j++) {
            bool again = true;
            while (again) {
                *rng = *rng * 1664525u + 1013904223u;
                expert[t * TOP_K + j] = (int32_t)((*rng >> 8) % EXPERTS);
                again = false;
                for (int i = 0; i < j; i++)
                    again = again || expert[t * TOP_K + i] == expert[t * TOP_K + j];
            }
        }
    kern_route_sort(d, expert, T, TOP_K, EXPERTS, row, first, slot);
    for (int e = 0; e < EXPERTS; e++)
        used += first[e + 1] > first[e];
    free(expert);
    return used;
}

static void run_separate(kern_dev *d, const kern_experts *x, const float *in, int64_t K,
                         const int32_t *row, const int32_t *first, float *y, int64_t N)
{
    for (int e = 0; e < EXPERTS; e++)
        if (first[e + 1] > first[e])
            kern__linear_run_rows(d, kern_experts_at(x, e), in, K, row + first[e],
                                  first[e + 1] - first[e], y + first[e] * N, N);
}

static void time_experts(kern_dev *d, const kern_experts *x, int64_t T, double roof)
{
    int64_t N = kern_linear_n(kern_experts_at(x, 0)), K = kern_linear_k(kern_experts_at(x, 0));
    float *in = xcalloc((size_t)(T * K), sizeof *in),
          *y = xcalloc((size_t)(T * TOP_K * N), sizeof *y);
    int32_t *row = xmalloc((size_t)(T * TOP_K) * sizeof *row), first[EXPERTS + 1];
    double best[2] = {1e9, 1e9}, gbs = 0, start = clock_seconds();
    unsigned rng = 1;
    for (int64_t i = 0; i < T * K; i++)
        in[i] = (float)(i % 17) * 0.1f - 0.8f;
    for (int rep = 0; rep < 4000 && (rep < 5 || clock_seconds() - start < 1.0); rep++)
        for (int way = 0; way < 2; way++) {
            int64_t used = route_random(d, T, row, first, &rng);
            double t = clock_seconds();
            if (way == 0)
                kern_experts_run(d, x, in, K, row, first, T * TOP_K, y, N);
            else
                run_separate(d, x, in, K, row, first, y, N);
            t = clock_seconds() - t;
            best[way] = t < best[way] ? t : best[way];
            double rate = (double)used * (double)kern_linear_bytes(kern_experts_at(x, 0)) / t / 1e9;
            if (way == 0) gbs = rate > gbs ? rate : gbs;
        }
    printf("  %5lldx%-5lld T=%-4lld grouped %9.1f us, one by one %9.1f us, ratio %.2f  %5.1f GB/s "
           "%4.0f%% %8.1f Gop/s  %s\n",
           (long long)N, (long long)K, (long long)T, best[0] * 1e6, best[1] * 1e6,
           best[1] / best[0], gbs, 100 * gbs / roof,
           2.0 * (double)(T * TOP_K * N * K) / best[0] / 1e9,
           kern_linear_choice(kern_experts_at(x, 0), kern_bucket(T * TOP_K / EXPERTS))->row);
    free(in), free(y), free(row);
}

/* 8 of 128 experts: gate and up, down, of a model with 3e9 active weights. */
static void experts(kern_dev *d, const char *text, double roof, err *e)
{
    static const int64_t sizes[][2] = {{1536, 2048}, {2048, 768}},
                         tokens[] = {1, 2, 4, 16, 128, 512};
    qspec s;
    if (qspec_parse(text, &s, e) < 0) return;
    printf("experts, 8 of 128, %s\n", text);
    for (int i = 0; i < 2; i++) {
        qtensor q;
        void *mem = NULL;
        kern_linear *l[EXPERTS] = {0};
        kern_experts *x = NULL;
        int made = 0;
        if (random_tensor(&q, &s, sizes[i][0], sizes[i][1], &mem, e) < 0) return;
        kern_linear_desc desc = {
            .name = "bench", .n_shards = 1, .shard = {&q}, .act = KERN_ACT_AUTO};
        while (made < EXPERTS && kern_linear_make(d, &desc, &l[made], e) == 0)
            made++;
        if (made == EXPERTS && kern_experts_make(d, l, EXPERTS, &x, e) == 0)
            for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
                time_experts(d, x, tokens[t], roof);
        for (int n = 0; n < made && made < EXPERTS; n++)
            kern_linear_drop(d, l[n]);
        kern_experts_drop(d, x);
        qtensor_free(&q);
        free(mem);
    }
}

int main(int argc, char **argv)
{
    static const char *const defaults[] = {
        "w:int4,g32 a:bf16",           "w:int8,channel a:bf16",
        "w:int8,channel a:int8,token", "w:fp8_e4m3,channel a:fp8_e4m3,token",
        "w:nvfp4,g16 a:bf16",          "w:bf16 a:bf16"};
    err e = {0};
    kern_dev *d;
    kern_opts o = {.cpu_features = cpu_detect()};
    const char *act_text = getenv("KERN_ACT");
    kern_act act = KERN_ACT_AUTO;
    if (act_text) kern_act_parse(act_text, &act, NULL);
    if (kern_open(&d, &o, &e) < 0) {
        fprintf(stderr, "%s\n", e.msg);
        return 1;
    }
    int n = argc > 1 ? argc - 1 : (int)(sizeof defaults / sizeof *defaults);
    double l3 = kern_measure_bandwidth(d, 70u << 20), dram = kern_measure_bandwidth(d, 700u << 20);
    printf("%s, %d threads; read 70 MB %.1f GB/s, 700 MB %.1f GB/s; share is of the 70 MB rate, of "
           "experts of the other\n",
           cpu_model_name(), team_size(d->team), l3, dram);
    static const char *const expert_schemes[] = {"w:int4,g32 a:bf16", "w:mxfp4,g32 a:bf16",
                                                 "w:fp8_e4m3,block128x128 a:fp8_e4m3,group128",
                                                 "w:bf16 a:bf16"};
    bool only = argc == 2 && !strcmp(argv[1], "-experts");
    for (int i = 0; i < 4 && (argc == 1 || only); i++)
        experts(d, expert_schemes[i], dram, &e);
    if (only) n = 0;
    static const char *const kv_names[] = {"bf16", "fp8_e4m3", "fp8_e5m2", "int8", "fp4"};
    for (int t = 0; t < 5 && !only; t++) {
        attention(d, &small, (kern_kv_type)t, kv_names[t], 2048, 1, l3);
        attention(d, &small, (kern_kv_type)t, kv_names[t], 512, 512, l3);
        attention(d, &latent_16, (kern_kv_type)t, kv_names[t], 4096, 1, l3);
        attention(d, &latent_128, (kern_kv_type)t, kv_names[t], 4096, 1, l3);
        attention(d, &latent_16, (kern_kv_type)t, kv_names[t], 512, 512, l3);
    }
    for (int i = 0; i < n; i++) {
        qspec s;
        const char *text = argc > 1 ? argv[i + 1] : defaults[i];
        if (qspec_parse(text, &s, &e) < 0) {
            fprintf(stderr, "%s\n", e.msg);
            return 2;
        }
        printf("%s\n", text);
        for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++)
            one(d, &s, act, shapes[j][0], shapes[j][1], l3, &e);
    }
    kern_close(d);
    return 0;
}
