/* The peephole of a GPU's step (kern/gpu/fuse.c): a list as one step, where neighbours become one
 * operator, leaves the same bytes in all memory as its operators one by one, and lists that only
 * look alike stay as they are. */
#include "check.h"
#include "kern/gpu/gpu.h"

static const char *device = "emulated";
static kern_dev *dev;
static gpu_dev *g;

/* Memory of the device that exists twice with the same bytes, of which `now` is in use. */
typedef struct twin {
    void *p[2]; /* handles */
    size_t bytes;
} twin;
static twin twins[32];
static int n_twins, now;

static uint32_t rng = 7;
static float uniform(void)
{
    rng = rng * 1664525u + 1013904223u;
    return (float)(rng >> 8) / 8388608.0f - 1.0f;
}

static void write_to(void *handle, const void *from, size_t n)
{
    assert_null(g->api->upload(gpu__raw(g, handle), from, n, g->stream));
    assert_null(g->api->sync(g->stream));
}
static void add_twin(void *a, void *b, size_t bytes)
{
    assert_true(n_twins < 32);
    twins[n_twins++] = (twin){{a, b}, bytes};
}
/* Random lanes: f32, or bf16 (flow). */
static twin *lanes(int64_t n, bool flow)
{
    err e = {0};
    float *p[2];
    size_t bytes = (size_t)n * (flow ? 2 : 4);
    float *v = xmalloc((size_t)n * 4);
    uint16_t *h = xmalloc((size_t)n * 2);
    for (int64_t i = 0; i < n; i++) {
        v[i] = i % 97 == 5 ? 300 * uniform() : uniform();
        h[i] = num_f32_to_bf16(v[i]);
    }
    for (int i = 0; i < 2; i++) {
        CHECK_OK(kern_lanes(dev, &p[i], n, flow ? KERN_FLOW : KERN_STREAM, KERN_ACT_AUTO, &e));
        write_to(p[i], flow ? (void *)h : (void *)v, bytes);
    }
    free(v);
    free(h);
    add_twin(p[0], p[1], bytes);
    return &twins[n_twins - 1];
}
static twin *bytes_of(size_t n)
{
    err e = {0};
    void *p[2], *poison = memset(xmalloc(n), 0xff, n);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(kern_alloc(dev, &p[i], n, &e));
        write_to(p[i], poison, n);
    }
    free(poison);
    add_twin(p[0], p[1], n);
    return &twins[n_twins - 1];
}
static void *raw(const twin *t)
{
    return gpu__raw(g, t->p[now]);
}

static int drop(void **state)
{
    (void)state;
    for (int i = 0; i < 2 * n_twins; i++)
        kern_free(dev, twins[i / 2].p[i % 2]);
    n_twins = 0;
    return 0;
}

/* Runs `list` as one step and its ops one by one; all memory must be the same, and `saved` ops
 * fewer must have run. */
static bool one_by_one;
static void next(void)
{
    err e = {0};
    if (one_by_one) CHECK_OK(kern_step_flush(dev, &e));
}
static void check(void (*list)(const void *c), const void *c, int64_t T, int saved)
{
    err e = {0};
    for (now = 0; now < 2; now++) {
        int64_t before = g->fused;
        one_by_one = now == 1;
        assert_true(kern_step_begin(dev, T, 0));
        list(c);
        CHECK_OK(kern_step_end(dev, &e));
        assert_int_equal(g->fused - before, one_by_one ? 0 : saved);
    }
    now = 0;
    for (int i = 0; i < n_twins; i++) {
        uint8_t *a = xmalloc(twins[i].bytes), *b = xmalloc(twins[i].bytes);
        assert_null(g->api->download(a, gpu__raw(g, twins[i].p[0]), twins[i].bytes, g->stream));
        assert_null(g->api->download(b, gpu__raw(g, twins[i].p[1]), twins[i].bytes, g->stream));
        assert_null(g->api->sync(g->stream));
        assert_memory_equal(a, b, twins[i].bytes);
        free(a);
        free(b);
    }
}
#define PUSH(op, ...) gpu__push(g, GPU_OP_##op, &(__VA_ARGS__), sizeof(__VA_ARGS__))

/* ---- codes --------------------------------------------------------------------------------------
 */
typedef struct rows {
    int64_t T, K;
    bool flow;
    int kind; /* 0 rmsnorm, 1 add_rmsnorm, 2 glu */
    gpu_codes to;
    const twin *x, *y, *w, *out, *codes, *scale;
} rows;

static gpu_codes codes_of(const rows *r)
{
    gpu_codes to = r->to;
    to.p = raw(r->codes);
    to.scale = raw(r->scale);
    return to;
}
static void rows_list(const void *c)
{
    const rows *r = c;
    float *x = r->x->p[now], *out = r->out->p[now];
    if (r->kind == 0) kern_rmsnorm(dev, x, r->w->p[now], 1e-5f, r->T, r->K, out);
    if (r->kind == 1) kern_add_rmsnorm(dev, x, r->y->p[now], r->w->p[now], 1e-5f, r->T, r->K, out);
    if (r->kind == 2) kern_glu_mul(dev, KERN_SILU, x, 2 * r->K, r->K, r->T, out);
    next();
    gpu_quant q = {gpu__x(g, out), r->K, r->T, r->K, codes_of(r)};
    PUSH(quant, q);
    next();
    kern_scale(dev, out, 0.5f, r->T * r->K); /* out is still there */
}

static void codes(void **state)
{
    (void)state;
    static const int64_t widths[] = {64, 4096, 1001, 9000};
    for (int i = 0; i < 4 * 3 * 2 * 4; i++) {
        int64_t K = widths[i % 4], T = 3;
        rows r = {.T = T, .K = K, .kind = i / 4 % 3, .flow = i / 12 % 2};
        int how = i / 24;
        r.to = (gpu_codes){.code = how & 1 ? GPU_INT8 : GPU_E4M3,
                           .as_bf16 = how == 3,
                           .ld = (K + 15) / 16 * 16,
                           .group = how & 2 ? 128 : 0,
                           .scale_row = (K + 127) / 128,
                           .scale_group = 1};
        r.x = lanes(T * 2 * K, r.kind == 2 && r.flow);
        r.y = lanes(T * K, r.flow);
        r.w = lanes(K, false);
        r.out = lanes(T * K, r.flow);
        r.codes = bytes_of((size_t)(T * r.to.ld) * 2);
        r.scale = bytes_of((size_t)(T * r.to.scale_row) * 4);
        check(rows_list, &r, T, 1);
        drop(NULL);
    }
}

/* ---- keys to the cache --------------------------------------------------------------------------
 */
typedef struct heads {
    int H, Hk, D, rot;
    bool norm, pairs;
    kern_kv_layer kv;
    const twin *qkv, *wq, *wk, *table, *pages;
    const int32_t *slot;
    int64_t T;
} heads;

static void heads_list(const void *c)
{
    const heads *h = c;
    int64_t nq = (int64_t)h->H * h->D, nk = (int64_t)h->Hk * h->D, ld = nq + 2 * nk;
    float *q = h->qkv->p[now], *k = q + nq, *table = h->table->p[now];
    kern_kv_layer kv = h->kv;
    kv.base = h->pages->p[now];
    if (h->norm) {
        kern_head_rmsnorm(dev, q, ld, h->H, h->D, h->wq->p[now], 1e-6f, h->T);
        next();
        kern_head_rmsnorm(dev, k, ld, h->Hk, h->D, h->wk->p[now], 1e-6f, h->T);
        next();
    }
    (h->pairs ? kern_rope_pairs : kern_rope)(dev, q, ld, h->H, k, ld, h->Hk, h->D, h->rot, table,
                                             table, h->T);
    next();
    kern_kv_store(dev, &kv, k, ld, k + nk, ld, h->slot, h->T);
    next();
    kern_scale(dev, q, 0.5f, h->T * ld); /* k is still there */
}

static void to_cache(void **state)
{
    (void)state;
    static const int32_t slot[] = {3, 40, -1, 33, 0};
    static const kern_kv_type types[] = {KV_BF16, KV_FP8_E4M3, KV_INT8, KV_FP4, KV_F32};
    for (int i = 0; i < 20; i++) {
        heads h = {.H = 4, .Hk = 2, .D = 64, .rot = i % 3 ? 64 : 16, .T = 5, .slot = slot};
        h.norm = i % 2;
        h.pairs = i % 3 == 1;
        h.kv = (kern_kv_layer){.type = types[i % 5], .Hk = 2, .D = 64, .page_tokens = 32};
        h.kv.mma = i % 5 < 2 && i % 2;
        h.kv.page_stride = (kern_kv_page_bytes(h.kv.type, 2, 64, 0, 32) + 255) / 256 * 256;
        h.qkv = lanes(5 * 8 * 64, i % 4 < 2);
        h.wq = lanes(64, false);
        h.wk = lanes(64, false);
        h.table = lanes(5 * 32, false);
        h.pages = bytes_of(2 * h.kv.page_stride);
        check(heads_list, &h, 5, h.norm ? 3 : 1);
        drop(NULL);
    }
}

/* ---- what stays ---------------------------------------------------------------------------------
 */
static const gpu_x X = {(void *)0x10000, GPU_BF16}, Y = {(void *)0x20000, GPU_BF16},
                   X32 = {(void *)0x10000, GPU_F32};
static const gpu_codes TO = {.ld = 64};

static void push_alike(int i)
{
    gpu_norm n = {.x = Y, .out = X, .T = 4, .K = 64};
    gpu_glu u = {
        .act = KERN_SILU, .gated = true, .x = Y, .out = X, .ld = 128, .ldo = 64, .F = 64, .T = 4};
    gpu_quant q = {X, 64, 4, 64, TO};
    gpu_head_norm hq = {.x = X, .ld = 256, .H = 2, .D = 64, .eps = 1e-6f, .T = 4};
    gpu_head_norm hk = {.x = Y, .ld = 256, .H = 1, .D = 64, .eps = 1e-6f, .T = 4};
    gpu_rope r = {
        .q = X, .k = Y, .ldq = 256, .ldk = 256, .H = 2, .Hk = 1, .D = 64, .rot_dim = 64, .T = 4};
    gpu_kv_store c = {.kv = {.Hk = 1, .D = 64}, .k = Y, .ldk = 256, .T = 4};
    gpu_far far_ = {.x = X, .ld = 256, .n = 64, .T = 4, .from = 1};
    switch (i) {
    case 0: /* of another memory, of other lanes, of fewer rows, of fewer lanes, of other rows */
    case 1:
    case 2:
    case 3:
    case 4:
        q.x = i == 0 ? Y : i == 1 ? X32 : X;
        q.T = i == 2 ? 3 : 4;
        q.K = i == 3 ? 32 : 64;
        q.ld = i == 4 ? 65 : 64;
        PUSH(rmsnorm, n);
        PUSH(quant, q);
        PUSH(glu, u);
        PUSH(quant, q);
        break;
    case 5: /* no gate, then a norm that is not of squares, then something between */
        u.gated = false;
        PUSH(glu, u);
        PUSH(quant, q);
        PUSH(layernorm, n);
        PUSH(quant, q);
        PUSH(rmsnorm, n);
        PUSH(rope, r);
        PUSH(quant, q);
        break;
    case 6: /* keys of another place, stride, shape */
    case 7:
    case 8:
    case 9:
        c.k = i == 6 ? X : Y;
        c.ldk = i == 7 ? 64 : 256;
        c.kv.Hk = i == 8 ? 2 : 1;
        c.T = i == 9 ? 3 : 4;
        PUSH(head_rmsnorm, hq);
        PUSH(head_rmsnorm, hk);
        PUSH(rope, r);
        PUSH(kv_store, c);
        break;
    case 10: /* something between, or the end */
        PUSH(rope, r);
        PUSH(far, far_);
        PUSH(kv_store, c);
        PUSH(head_rmsnorm, hq);
        PUSH(head_rmsnorm, hk);
        PUSH(rope, r);
        break;
    default: /* no keys */
        r.k.p = NULL;
        PUSH(rope, r);
        PUSH(kv_store, c);
        PUSH(rmsnorm, n);
        break;
    }
}

static void stays(void **state)
{
    (void)state;
    err e = {0};
    for (int i = 0; i < 12; i++) {
        int64_t before = g->fused;
        assert_true(kern_step_begin(dev, 4, 0));
        push_alike(i);
        gpu_step *s = g->now;
        int n = s->n_ops;
        size_t used = s->args_used;
        gpu_rec *ops = memcpy(xmalloc(sizeof *ops * (size_t)n), s->ops, sizeof *ops * (size_t)n);
        unsigned char *args = memcpy(xmalloc(used), s->args, used);
        gpu__fuse(g, s);
        assert_int_equal(g->fused, before);
        assert_int_equal(s->n_ops, n);
        for (int k = 0; k < n; k++) {
            assert_int_equal(s->ops[k].op, ops[k].op);
            assert_memory_equal(s->args + s->ops[k].at, args + ops[k].at, ops[k].bytes);
        }
        s->n_ops = 0; /* nothing of it is to run */
        CHECK_OK(kern_step_end(dev, &e));
        free(ops);
        free(args);
    }
}

/* Norms that are not those of the rotary positions: only the latter go into the store. */
static void other_norms(void **state)
{
    (void)state;
    err e = {0};
    gpu_head_norm hq = {.x = X, .ld = 256, .H = 1, .D = 128, .eps = 1e-6f, .T = 4};
    gpu_head_norm hk = {.x = Y, .ld = 256, .H = 1, .D = 64, .eps = 1e-6f, .T = 4};
    gpu_rope r = {
        .q = X, .k = Y, .ldq = 256, .ldk = 256, .H = 2, .Hk = 1, .D = 64, .rot_dim = 64, .T = 4};
    gpu_kv_store c = {.kv = {.Hk = 1, .D = 64}, .k = Y, .ldk = 256, .T = 4};
    assert_true(kern_step_begin(dev, 4, 0));
    PUSH(head_rmsnorm, hq);
    PUSH(head_rmsnorm, hk);
    PUSH(rope, r);
    PUSH(kv_store, c);
    gpu__fuse(g, g->now);
    assert_int_equal(g->now->n_ops, 3);
    assert_int_equal(g->now->ops[2].op, GPU_OP_rope_store);
    assert_null(((gpu_rope_store *)(void *)(g->now->args + g->now->ops[2].at))->q_norm);
    g->now->n_ops = 0;
    CHECK_OK(kern_step_end(dev, &e));
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(codes, drop), cmocka_unit_test_teardown(to_cache, drop),
        cmocka_unit_test(stays), cmocka_unit_test(other_norms)};
    err e = {0};
    if (argc > 1) device = argv[1];
    kern_opts o = {.device = device, .threads = 1};
    if (kern_open(&dev, &o, &e) < 0) {
        fprintf(stderr, "%s\n", e.msg);
        return 1;
    }
    g = gpu__of(dev);
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    kern_close(dev);
    return rc;
}
