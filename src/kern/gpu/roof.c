/* What the GPU can do, measured: the best of several reads of a buffer, and of several square
 * products by cuBLASLt on numbers that are not zero (zeros take less power and run faster). */
#include <stdlib.h>
#include <string.h>
#include "kern/gpu/gpu.h"

#define SIDE  8192
#define TIMES 8

typedef struct bench { /* of one device */
    gpu_dev *g;
    void *event[2];
    void *mem[4]; /* freed at the end */
    int n_mem;
    unsigned char *host;
} bench;

static int room(bench *b, void **out, size_t n, err *e)
{
    int rc = gpu__device_alloc(b->g, out, n, e);
    if (rc == 0) b->mem[b->n_mem++] = *out;
    return rc;
}

static void drop_rooms(bench *b)
{
    while (b->n_mem)
        b->g->api->free(b->mem[--b->n_mem]);
}

/* Seconds since the first event, once all is done. */
static int lap(bench *b, double *seconds, err *e)
{
    const gpu_api *api = b->g->api;
    int rc = 0;
    TRY(gpu__check(b->g, "event", api->event_record(b->event[1], b->g->stream), e));
    TRY(gpu__check(b->g, "roof", api->sync(b->g->stream), e));
    TRY(gpu__check(b->g, "event", api->event_seconds(b->event[0], b->event[1], seconds), e));
out:
    return rc;
}

static int start(bench *b, err *e)
{
    return gpu__check(b->g, "event", b->g->api->event_record(b->event[0], b->g->stream), e);
}

static int read_roof(bench *b, size_t bytes, double *gbs, err *e)
{
    gpu_dev *g = b->g;
    void *p = NULL, *sum = NULL;
    double best = 1e30, s = 0;
    int rc = 0, blocks = g->facts.sms * 4;
    TRY(room(b, &p, bytes, e));
    TRY(room(b, &sum, 16, e));
    TRY(gpu__check(g, "fill", g->api->zero(p, bytes, g->stream), e));
    for (int i = 0; i < TIMES; i++) {
        TRY(start(b, e));
        TRY(gpu__check(g, "read", g->api->probe_read(p, bytes, sum, blocks, g->stream), e));
        TRY(lap(b, &s, e));
        if (i && s < best) best = s;
    }
    *gbs = (double)bytes / best / 1e9;
out:
    drop_rooms(b);
    return rc;
}

/* Codes of numbers between 1/2 and 1 in size (int8: any). */
static void numbers(lt_kind kind, unsigned char *to, size_t bytes)
{
    uint32_t r = 1;
    for (size_t i = 0; i < bytes; i += 2) {
        r = r * 1664525u + 1013904223u;
        uint16_t v = (uint16_t)(r >> 16);
        if (kind == LT_BF16) v = (uint16_t)((v & 0x807f) | 0x3f00);
        if (kind == LT_FP8 || kind == LT_FP8_ROWS) v = (uint16_t)((v & 0x8787) | 0x3030);
        memcpy(to + i, &v, 2);
    }
}

/* 0 where cuBLASLt is not there or has no such product. */
static int matrix_roof(bench *b, lt *l, lt_kind kind, double *tflops, err *e)
{
    gpu_dev *g = b->g;
    size_t bytes = (size_t)SIDE * SIDE * (kind == LT_BF16 ? 2 : 1);
    double best = 1e30, s = 0;
    int rc = 0;
    void *w = NULL, *x = NULL, *y = NULL, *scale = NULL;
    float *ones = xmalloc(sizeof *ones * SIDE);
    for (int i = 0; i < SIDE; i++)
        ones[i] = 1;
    numbers(kind, b->host, bytes);
    TRY(room(b, &w, bytes, e));
    TRY(room(b, &x, bytes, e));
    TRY(room(b, &y, (size_t)SIDE * SIDE * 2, e));
    TRY(room(b, &scale, sizeof *ones * SIDE, e));
    TRY(gpu__check(g, "upload", g->api->upload(w, b->host, bytes, g->stream), e));
    TRY(gpu__check(g, "upload", g->api->upload(x, b->host, bytes, g->stream), e));
    TRY(gpu__check(g, "upload", g->api->upload(scale, ones, sizeof *ones * SIDE, g->stream), e));
    TRY(gpu__check(g, "upload", g->api->sync(g->stream), e));
    gpu_lt a = {.lt = l,
                .call = {.kind = kind,
                         .y_bf16 = true,
                         .fast = true,
                         .M = SIDE,
                         .N = SIDE,
                         .K = SIDE,
                         .w = w,
                         .x = x,
                         .w_scale = kind == LT_BF16 ? NULL : scale,
                         .x_scale = kind == LT_BF16 ? NULL : scale,
                         .y = y,
                         .ldx = SIDE,
                         .ldy = SIDE}};
    if (g->api->lt_plan(l, &a.call, true)) goto out;
    for (int i = 0; i < TIMES; i++) {
        TRY(start(b, e));
        TRY(gpu__check(g, "lt", g->api->launch[GPU_OP_lt](&a, g->stream), e));
        TRY(lap(b, &s, e));
        if (i && s < best) best = s;
    }
    *tflops = 2.0 * SIDE * SIDE * SIDE / best / 1e12;
out:
    free(ones);
    drop_rooms(b);
    return rc;
}

int gpu__measure_roof(kern_dev *d, size_t bytes, kern_roof *out, err *e)
{
    gpu_dev *g = gpu__of(d);
    bench b = {.g = g};
    lt *l = NULL;
    int rc = 0;
    *out = (kern_roof){0};
    TRY(gpu__check(g, "bind", g->api->bind(g->index), e));
    for (int i = 0; i < 2; i++)
        TRY(gpu__check(g, "event", g->api->event_open(&b.event[i]), e));
    if (g->facts.emulated) bytes = 1 << 16;
    TRY(read_roof(&b, bytes / 16 * 16, &out->read_gbs, e));
    if (g->facts.emulated || g->api->lt_open(&l, 0)) goto out;
    b.host = xmalloc((size_t)SIDE * SIDE * 2);
    TRY(matrix_roof(&b, l, LT_BF16, &out->bf16_tflops, e));
    TRY(matrix_roof(&b, l, LT_FP8, &out->fp8_tflops, e));
    TRY(matrix_roof(&b, l, LT_INT8, &out->int8_tops, e));
out:
    g->api->lt_close(l);
    for (int i = 0; i < 2; i++)
        if (b.event[i]) g->api->event_close(b.event[i]);
    free(b.host);
    return rc;
}
