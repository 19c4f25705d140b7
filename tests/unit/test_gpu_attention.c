/* The cache, attention and linear attention of a GPU against the twins of the CPU: every type of
 * cache in both orders, with poison wherever nothing is stored. The kernels of the tensor cores
 * have a test of their own (test_gpu_prefill.c). */
#include "gpu_fixture.h"
#include "gpu_pages.h"
#include "kern/cuda/plain_attention.h"
#include "kern/ops.h"

static const char *const type_names[KV_TYPES] = {"bf16", "e4m3", "e5m2", "int8", "fp4", "f32"};
static char what[128];

/* ---- cache --------------------------------------------------------------------------------------
 */
typedef struct cache {
    kern_kv_layer cpu; /* codes in host memory */
    gpu_kv gpu;
    size_t bytes; /* of all pages */
} cache;

static bool has_mma(int type, int D, int v_in_k, int page_tokens)
{
    return type != KV_F32 && D % (type == KV_FP4 ? 32 : 8) == 0 && !v_in_k &&
           page_tokens == KV_PLACE_TOKENS;
}

static cache make_cache(int type, int Hk, int D, int v_in_k, int page_tokens, int pages)
{
    cache c = {0};
    size_t page = kern_kv_page_bytes((kern_kv_type)type, Hk, D, v_in_k, page_tokens);
    size_t stride = (page + 15) / 16 * 16 + 32;
    c.bytes = stride * (size_t)pages;
    c.cpu = (kern_kv_layer){.type = (kern_kv_type)type,
                            .Hk = Hk,
                            .D = D,
                            .page_tokens = page_tokens,
                            .v_in_k = v_in_k,
                            .base = gpu_host(c.bytes),
                            .page_stride = stride};
    c.gpu = (gpu_kv){.type = type,
                     .order = GPU_KV_PLAIN,
                     .Hk = Hk,
                     .D = D,
                     .page_tokens = page_tokens,
                     .v_in_k = v_in_k,
                     .page_stride = stride};
    if (type == KV_FP8_E4M3 || type == KV_FP8_E5M2) {
        float *scale = gpu_host((size_t)(2 * Hk) * sizeof *scale);
        for (int i = 0; i < 2 * Hk; i++)
            scale[i] = (float)(0.02 + 0.05 * gpu_uniform());
        c.cpu.k_scale = scale, c.cpu.v_scale = scale + Hk;
        c.gpu.k_scale = gpu_up_f32(scale, Hk), c.gpu.v_scale = gpu_up_f32(scale + Hk, Hk);
    }
    return c;
}

/* The bytes of the CPU's pages in MMA order. */
static uint8_t *turned(const cache *c, int pages)
{
    uint8_t *to = gpu_host(c->bytes);
    for (int slot = 0; slot < pages * KV_PLACE_TOKENS; slot++)
        gpu_kv_turn(&c->cpu, slot, to + (size_t)(slot / KV_PLACE_TOKENS) * c->cpu.page_stride);
    return to;
}

static void store_case(int type, gpu_kv_order order, int D, int v_in_k, int page_tokens, gpu_type t)
{
    enum { Hk = 3, PAGES = 4, T = 41 };
    cache c = make_cache(type, Hk, D, v_in_k, page_tokens, PAGES);
    snprintf(what, sizeof what, "store %s, %s order, D %d, V in K %d, pages of %d",
             type_names[type], order ? "MMA" : "plain", D, v_in_k, page_tokens);
    gpu_mat k = gpu_mat_random(t, T, Hk * D, Hk * D + 5), v = gpu_mat_random(t, T, Hk * D, Hk * D);
    for (int d = 0; d < D; d++) /* a head of equal lanes, and one of zeros */
        k.host[d] = 1.5f, v.host[d] = 0.0f;
    gpu_mat_up(&k);
    gpu_mat_up(&v);
    int32_t slot[T], n = PAGES * page_tokens;
    uint64_t clipped = 0;
    for (int i = 0; i < T; i++) {
        slot[i] = i % 7 == 3 ? -1 : (i * 5 + 2) % n;
        for (int j = 0; j < i; j++)
            if (slot[j] == slot[i]) slot[i] = -1;
        if (slot[i] < 0) continue;
        clipped += kern_kv_store(gpu.cpu, &c.cpu, k.host + i * k.ld, k.ld,
                                 v_in_k ? NULL : v.host + i * v.ld, v.ld, &slot[i], 1);
    }
    c.gpu.order = order;
    c.gpu.base = gpu_empty(c.bytes);
    unsigned long long zero = 5, seen = 0, *count = gpu_up(&zero, sizeof zero);
    gpu_kv_store a = {
        c.gpu, k.x, v_in_k ? (gpu_x){NULL, t} : v.x, k.ld, v.ld, T, gpu_up_i32(slot, T), count};
    gpu_run(GPU_OP_kv_store, &a);
    gpu_check_bytes(what, c.gpu.base, order ? turned(&c, PAGES) : c.cpu.base, c.bytes);
    gpu_read(&seen, count, sizeof seen);
    if (seen != clipped + 5)
        fail_msg("%s: %llu clipped, expected %llu", what, seen - 5, (unsigned long long)clipped);
    gpu_drop_all();
}

static void store(void **state)
{
    (void)state;
    static const int dims[][3] = {{64, 0, 32},  {80, 0, 16}, {128, 0, 32}, {20, 0, 7},
                                  {48, 40, 16}, {96, 0, 32}, {256, 0, 32}};
    for (int type = 0; type < KV_TYPES; type++)
        for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
            const int *d = dims[i];
            for (gpu_type t = 0; t < GPU_TYPES; t++) {
                store_case(type, GPU_KV_PLAIN, d[0], d[1], d[2], t);
                if (has_mma(type, d[0], d[1], d[2]))
                    store_case(type, GPU_KV_MMA, d[0], d[1], d[2], t);
            }
        }
}

/* ---- attention ----------------------------------------------------------------------------------
 */
typedef struct attn_case {
    int H, Hk, D, v_in_k, page_tokens, window;
    float softcap;
    bool sinks;
    int rows[4], lens[4]; /* of four sequences; len 0 = none */
} attn_case;

static void attend(const attn_case *c, int type, gpu_kv_order order, gpu_type t)
{
    enum { N = 4 };
    const int tokens = c->page_tokens, Dv = c->v_in_k ? c->v_in_k : c->D;
    int32_t row0[N], T = 0, max_rows = 0, max_len = 0, pages = 0, max_pages = 0, n = 0;
    for (int i = 0; i < N; i++) {
        int p = (c->lens[i] + tokens - 1) / tokens;
        row0[i] = T, T += c->rows[i], pages += p;
        max_pages = p > max_pages ? p : max_pages;
        max_rows = c->rows[i] > max_rows ? c->rows[i] : max_rows;
        max_len = c->lens[i] > max_len ? c->lens[i] : max_len;
    }
    T += 2; /* nobody's */
    snprintf(what, sizeof what,
             "%s, %s order, heads %d/%d, D %d, V in K %d, pages of %d, window %d", type_names[type],
             order ? "MMA" : "plain", c->H, c->Hk, c->D, c->v_in_k, tokens, c->window);
    cache kv = make_cache(type, c->Hk, c->D, c->v_in_k, tokens, pages);
    int32_t *table = gpu_host((size_t)(N * max_pages) * 4), *row_seq = gpu_host((size_t)T * 4);
    kern_seq seqs[N];
    for (int i = 0, next = pages; i < N; i++) {
        int32_t *mine = table + i * max_pages;
        for (int p = 0; p < (c->lens[i] + tokens - 1) / tokens; p++)
            mine[p] = --next;
        int64_t ld = (int64_t)c->Hk * c->D;
        float *k = gpu_randoms(c->lens[i] * ld), *v = gpu_randoms(c->lens[i] * ld);
        int32_t *slot = gpu_host((size_t)c->lens[i] * 4 + 4);
        for (int s = 0; s < c->lens[i]; s++)
            slot[s] = mine[s / tokens] * tokens + s % tokens;
        kern_kv_store(gpu.cpu, &kv.cpu, k, ld, c->v_in_k ? NULL : v, ld, slot, c->lens[i]);
        int seen = c->lens[i] - c->rows[i] - c->window + 1;
        for (int p = 0; c->window && (p + 1) * tokens <= seen; p++)
            mine[p] = -1; /* the window has passed it */
        for (int r = 0; r < c->rows[i] && c->lens[i]; r++)
            row_seq[row0[i] + r] = i;
        if (c->lens[i]) seqs[n++] = (kern_seq){row0[i], c->rows[i], c->lens[i], mine};
    }
    int64_t ldq = (int64_t)c->H * c->D + 8, ldo = (int64_t)c->H * Dv + 8;
    gpu_mat q = gpu_mat_random(t, T, (int64_t)c->H * c->D, ldq);
    gpu_mat out = gpu_mat_empty(t, T, (int64_t)c->H * Dv, ldo);
    float *sinks = c->sinks ? gpu_randoms(c->H) : NULL;
    memset(out.host, 0, (size_t)(T * ldo) * sizeof(float)); /* rows of nobody */
    kern_attn_args cpu = {q.host,    ldq,        out.host, ldo,     c->H, 0.05f,
                          c->window, c->softcap, sinks,    &kv.cpu, seqs, n};
    kern_attention(gpu.cpu, &cpu);
    kv.gpu.order = order;
    kv.gpu.base = gpu_up(order ? turned(&kv, pages) : kv.cpu.base, kv.bytes);
    size_t work = gpu.api->attention_work(T, c->H, Dv);
    gpu_attention a = {.kv = kv.gpu,
                       .q = q.x,
                       .out = out.x,
                       .ldq = ldq,
                       .ldo = ldo,
                       .H = c->H,
                       .window = c->window,
                       .scale = 0.05f,
                       .softcap = c->softcap,
                       .sinks = gpu_up_f32(sinks, c->H),
                       .work = gpu_empty(work)};
    gpu_ok("zero", gpu.api->zero(a.work, (size_t)ATTENTION_COUNTERS * 4, gpu.stream));
    a.seqs = (gpu_seqs){gpu_up_i32(row0, N),
                        gpu_up_i32(c->rows, N),
                        gpu_up_i32(c->lens, N),
                        gpu_up_i32(table, (int64_t)N * max_pages),
                        gpu_up_i32(row_seq, T),
                        N,
                        max_pages,
                        T,
                        max_rows,
                        (int)kern_len_bucket(max_len),
                        0,
                        NULL,
                        NULL};
    gpu_run(GPU_OP_attention, &a);
    gpu_check(what, &out, 2e-4, 2e-4);
    gpu_drop_all();
}

/* Heads that no kernel of the tensor cores takes, so that f32 is compared with f32. */
static void attention(void **state)
{
    (void)state;
    static const attn_case cases[] = {
        {4, 2, 80, 0, 16, 0, 0, false, {3, 1, 0, 9}, {3, 40, 0, 33}},
        {6, 2, 112, 0, 32, 9, 0, false, {5, 1, 1, 2}, {70, 1, 0, 33}},
        {8, 1, 72, 0, 32, 0, 30.0f, true, {1, 1, 1, 1}, {300, 1, 0, 65}},
        {3, 3, 20, 0, 7, 16, 0, true, {4, 1, 0, 1}, {50, 30, 0, 2}},
        {16, 1, 576, 512, 16, 0, 0, false, {2, 1, 0, 1}, {20, 45, 0, 1}},
        {2, 2, 48, 0, 32, 1, 5.0f, false, {20, 1, 1, 1}, {33, 64, 0, 7}},
    };
    for (int type = 0; type < KV_TYPES; type++)
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            const attn_case *c = &cases[i];
            gpu_type t = (type + (int)i) % 2 ? GPU_BF16 : GPU_F32;
            attend(c, type, GPU_KV_PLAIN, t);
            if (has_mma(type, c->D, c->v_in_k, c->page_tokens)) attend(c, type, GPU_KV_MMA, t);
        }
    static const int plain[] = {64, 96, 128, 256}; /* the tuned heads in plain order */
    for (int i = 0; i < 4; i++) {
        attn_case c = {8, 2, plain[i], 0, 32, 40, 0, true, {3, 1, 0, 9}, {3, 140, 0, 33}};
        attend(&c, i % 2 ? KV_BF16 : KV_INT8, GPU_KV_PLAIN, GPU_BF16);
        attend(&c, KV_INT8, GPU_KV_MMA, GPU_F32); /* rows that no tuned kernel takes */
        attend(&c, KV_FP4, GPU_KV_MMA, GPU_F32);
    }
}

/* ---- linear attention ---------------------------------------------------------------------------
 */
enum { SEQS = 5, ROWS = 12 };
/* A new prompt, one that goes on, single tokens old and new, and a row of nobody at the end. */
static const int32_t s_row0[SEQS] = {0, 4, 9, 10, 11}, s_rows[SEQS] = {4, 5, 1, 1, 1},
                     s_len[SEQS] = {4, 9, 7, 1, 0}, s_slot[SEQS] = {3, 0, 5, 2, -1};
static const kern_seq s_seqs[SEQS - 1] = {{0, 4, 4, 0}, {4, 5, 9, 0}, {9, 1, 7, 0}, {10, 1, 1, 0}};

static gpu_seqs state_seqs(void)
{
    int32_t row_seq[ROWS] = {0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 3, -1};
    return (gpu_seqs){gpu_up_i32(s_row0, SEQS),
                      gpu_up_i32(s_rows, SEQS),
                      gpu_up_i32(s_len, SEQS),
                      NULL,
                      gpu_up_i32(row_seq, ROWS),
                      SEQS,
                      0,
                      ROWS,
                      5,
                      256,
                      0,
                      NULL,
                      NULL};
}
/* Six states of n floats, a stride apart. */
static gpu_mat states(int64_t n)
{
    return gpu_mat_random(GPU_F32, 6, n, n + 3);
}

static void conv(void **state)
{
    (void)state;
    static const int shapes[][2] = {{200, 4}, {1, 1}, {130, 2}, {65, 3}, {70, 9}, {5, 64}};
    for (size_t i = 0; i < 6; i++)
        for (gpu_type t = 0; t < GPU_TYPES; t++) {
            int C = shapes[i][0], W = shapes[i][1];
            snprintf(what, sizeof what, "convolution of %d channels, %d inputs", C, W);
            gpu_mat x = gpu_mat_random(t, ROWS, C, C + 7), s = states((int64_t)C * (W - 1));
            float *w = gpu_randoms((int64_t)C * W);
            gpu_conv a = {x.x,
                          x.ld,
                          C,
                          W,
                          gpu_up_f32(w, (int64_t)C * W),
                          state_seqs(),
                          {s.x.p, s.ld, gpu_up_i32(s_slot, SEQS)}};
            kern_states cpu = {s.host, s.ld, s_slot};
            kern_conv_silu(gpu.cpu, x.host, x.ld, C, W, w, s_seqs, SEQS - 1, &cpu);
            gpu_run(GPU_OP_conv_silu, &a);
            gpu_check(what, &x, 1e-5, 1e-4);
            gpu_check(what, &s, 0, 0);
            gpu_drop_all();
        }
}

static void delta(void **state)
{
    (void)state;
    static const int shapes[][4] = {
        {2, 4, 64, 64}, {1, 3, 20, 33}, {2, 2, 128, 128}, {1, 1, 400, 8}};
    for (size_t i = 0; i < 4; i++)
        for (gpu_type t = 0; t < GPU_TYPES; t++) {
            const int *p = shapes[i], Hk = p[0], Hv = p[1], Dk = p[2], Dv = p[3];
            snprintf(what, sizeof what, "delta rule, heads %d/%d of %d/%d lanes", Hv, Hk, Dk, Dv);
            gpu_mat q = gpu_mat_random(t, ROWS, Hk * Dk, Hk * Dk + 3);
            gpu_mat k = gpu_mat_random(t, ROWS, Hk * Dk, Hk * Dk + 5);
            gpu_mat v = gpu_mat_random(t, ROWS, Hv * Dv, Hv * Dv + 1);
            gpu_mat out = gpu_mat_empty(t, ROWS - 1, Hv * Dv, Hv * Dv); /* the last is nobody's */
            gpu_mat s = states((int64_t)Hv * Dk * Dv);
            float *g = gpu_host(ROWS * 4 * sizeof *g), *beta = gpu_host(ROWS * 4 * sizeof *g);
            for (int j = 0; j < ROWS * Hv; j++)
                g[j] = (float)(-2 * gpu_uniform()), beta[j] = (float)gpu_uniform();
            gpu_delta a = {q.x,
                           k.x,
                           v.x,
                           out.x,
                           q.ld,
                           k.ld,
                           v.ld,
                           gpu_up_f32(g, ROWS * Hv),
                           gpu_up_f32(beta, ROWS * Hv),
                           Hk,
                           Hv,
                           Dk,
                           Dv,
                           state_seqs(),
                           {s.x.p, s.ld, gpu_up_i32(s_slot, SEQS)}};
            kern_states st = {s.host, s.ld, s_slot};
            kern_delta_args cpu = {q.host, k.host, v.host, q.ld, k.ld,   v.ld,     g,   beta,
                                   Hk,     Hv,     Dk,     Dv,   s_seqs, SEQS - 1, &st, out.host};
            kern_gated_delta(gpu.cpu, &cpu);
            gpu_run(GPU_OP_gated_delta, &a);
            gpu_check(what, &out, 1e-4, 1e-4);
            gpu_check(what, &s, 1e-4, 1e-4);
            gpu_drop_all();
        }
}

static void gates(void **state)
{
    (void)state;
    for (gpu_type t = 0; t < GPU_TYPES; t++) {
        enum { T = 37, Hv = 6 };
        gpu_mat ba = gpu_mat_random(t, T, 2 * Hv, 2 * Hv + 3);
        gpu_mat g = gpu_mat_empty(GPU_F32, T, Hv, Hv), beta = gpu_mat_empty(GPU_F32, T, Hv, Hv);
        float *a_log = gpu_randoms(Hv), *bias = gpu_randoms(Hv);
        for (int i = 0; i < Hv; i++)
            a_log[i] = a_log[i] > 3 ? 3 : a_log[i];
        gpu_delta_gates a = {ba.x,  ba.ld,   T, Hv, gpu_up_f32(a_log, Hv), gpu_up_f32(bias, Hv),
                             g.x.p, beta.x.p};
        kern_delta_gates(gpu.cpu, ba.host, ba.ld, Hv, a_log, bias, T, g.host, beta.host);
        gpu_run(GPU_OP_delta_gates, &a);
        gpu_check("decay", &g, 1e-5, 1e-7);
        gpu_check("write strength", &beta, 1e-5, 1e-7);
        gpu_drop_all();
    }
}

static const struct CMUnitTest tests[] = {GPU_TEST(store), GPU_TEST(attention), GPU_TEST(conv),
                                          GPU_TEST(delta), GPU_TEST(gates)};
static const gpu_op tested[] = {GPU_OP_kv_store, GPU_OP_attention, GPU_OP_conv_silu,
                                GPU_OP_gated_delta, GPU_OP_delta_gates};
GPU_MAIN(tests, tested)
