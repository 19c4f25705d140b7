/* Operators of the GPU on rows, for the routing of experts and for codes of rows, against their
 * twins on the CPU; and whether each operator that there is has a test. */
#include "gpu_fixture.h"

#define FOR_TYPES(t) for (int t##_ = 0, t = GPU_F32; t##_ < 2; t = GPU_BF16, t##_++)
#define LEN(a)       ((int)(sizeof(a) / sizeof *(a)))

/* Rows of a matrix get what breaks careless code: an outlier, -0, NaN, infinity, zeros. */
static void spice(gpu_mat *m)
{
    int64_t at = m->cols / 2;
    for (int64_t r = 0; r < m->rows; r++) {
        float *row = m->host + r * m->ld;
        if (r == 0) row[at] = 30000.0f;
        if (r == 1) row[0] = -0.0f;
        if (r == 2) row[m->cols - 1] = NAN;
        if (r == 3) row[at] = -INFINITY;
        for (int64_t c = 0; r == 4 && c < m->cols; c++)
            row[c] = c % 2 ? 0.0f : -0.0f;
    }
    gpu_mat_up(m);
}
static gpu_mat spiced(gpu_type t, int64_t rows, int64_t cols, int64_t ld)
{
    gpu_mat m = gpu_mat_random(t, rows, cols, ld);
    spice(&m);
    return m;
}
/* The host's cells become what lanes of the type hold. */
static void round_host(gpu_mat *m)
{
    for (int64_t r = 0; r < m->rows; r++)
        for (int64_t c = 0; c < m->cols; c++)
            m->host[r * m->ld + c] = gpu_rounded(m->x.type, m->host[r * m->ld + c]);
}
/* What the device has, as f32. */
static float *down(const gpu_mat *m)
{
    int64_t n = m->rows * m->ld;
    float *out = gpu_host((size_t)n * sizeof *out);
    uint16_t *h = gpu_host((size_t)n * 2);
    if (m->x.type == GPU_F32) {
        gpu_read(out, m->x.p, (size_t)n * 4);
        return out;
    }
    gpu_read(h, m->x.p, (size_t)n * 2);
    for (int64_t i = 0; i < n; i++)
        out[i] = num_bf16_to_f32(h[i]);
    return out;
}

/* ---- norms --------------------------------------------------------------------------------------
 */
static const int64_t widths[] = {1, 7, 33, 256, 1000, 4096, 8200, 16400, 17000};

static void rms(void **state)
{
    (void)state;
    for (int k = 0; k < LEN(widths); k++)
        FOR_TYPES(t)
    FOR_TYPES(to)
    {
        int64_t K = widths[k], T = K > 9000 ? 2 : 6;
        gpu_mat x = spiced(t, T, K, K), o = gpu_mat_empty(to, T, K, K);
        float *w = gpu_randoms(K), *dw = gpu_up_f32(w, K);
        kern_rmsnorm(gpu.cpu, x.host, w, 1e-5f, T, K, o.host);
        gpu_run(GPU_OP_rmsnorm, &(gpu_norm){x.x, o.x, dw, NULL, 1e-5f, T, K});
        gpu_check("rmsnorm", &o, 1e-6, 0);
        gpu_check("x", &x, 0, 0);
        if (t != to) continue;
        gpu_run(GPU_OP_rmsnorm, &(gpu_norm){x.x, x.x, dw, NULL, 1e-5f, T, K});
        memcpy(x.host, o.host, (size_t)(T * K) * sizeof(float));
        gpu_check("rmsnorm in place", &x, 1e-6, 0);
        gpu_drop_all();
    }
}

/* x is not at the start of a vector. */
static void rms_odd(void **state)
{
    (void)state;
    FOR_TYPES(t)
    {
        gpu_mat x = gpu_mat_random(t, 1, 4097, 4097), o = gpu_mat_empty(t, 1, 4097, 4097);
        float *w = gpu_randoms(4096);
        gpu_x in = {(char *)x.x.p + gpu_lane_bytes(t), t}, out = {o.x.p, t};
        kern_rmsnorm(gpu.cpu, x.host + 1, w, 1e-6f, 1, 4096, o.host);
        o.cols = 4096;
        gpu_run(GPU_OP_rmsnorm, &(gpu_norm){in, out, gpu_up_f32(w, 4096), NULL, 1e-6f, 1, 4096});
        gpu_check("rmsnorm of odd rows", &o, 1e-6, 0);
    }
}

static void add_rms(void **state)
{
    (void)state;
    for (int k = 0; k < LEN(widths); k++)
        FOR_TYPES(t)
    FOR_TYPES(of)
    {
        int64_t K = widths[k], T = K > 9000 ? 2 : 6;
        gpu_mat x = spiced(t, T, K, K), y = gpu_mat_random(of, T, K, K),
                o = gpu_mat_empty(of, T, K, K);
        float *w = gpu_randoms(K);
        gpu_run(GPU_OP_add_rmsnorm, &(gpu_add_norm){x.x, y.x, o.x, gpu_up_f32(w, K), 1e-5f, T, K});
        kern_add(gpu.cpu, x.host, y.host, T * K);
        round_host(&x);
        kern_rmsnorm(gpu.cpu, x.host, w, 1e-5f, T, K, o.host);
        gpu_check("add_rmsnorm", &o, 1e-6, 0);
        gpu_check("x", &x, 0, 0);
        gpu_check("y", &y, 0, 0);
        gpu_drop_all();
    }
}

static void layer(void **state)
{
    (void)state;
    for (int k = 0; k < LEN(widths); k++)
        FOR_TYPES(t)
        {
            int64_t K = widths[k], T = K > 9000 ? 2 : 6;
            bool bias = k % 2;
            gpu_mat x = spiced(t, T, K, K), o = gpu_mat_empty(t, T, K, K);
            float *w = gpu_randoms(K), *b = bias ? gpu_randoms(K) : NULL;
            kern_layernorm(gpu.cpu, x.host, w, b, 1e-5f, T, K, o.host);
            gpu_run(GPU_OP_layernorm,
                    &(gpu_norm){x.x, o.x, gpu_up_f32(w, K), gpu_up_f32(b, K), 1e-5f, T, K});
            /* What is near the mean is a difference: an absolute share of the largest. */
            gpu_check("layernorm", &o, 2e-6, K == 1 ? 0 : 2e-5);
            gpu_check("x", &x, 0, 0);
        }
}

static void heads(void **state)
{
    (void)state;
    static const int dims[] = {1, 24, 64, 80, 128, 256, 300};
    for (int k = 0; k < LEN(dims); k++)
        FOR_TYPES(t)
    for (int by_head = 0; by_head < 2; by_head++)
        for (int centred = 0; centred < 2; centred++) {
            int D = dims[k], H = 3;
            int64_t T = 6, ld = H * D + 5;
            gpu_mat x = spiced(t, T, H * D, ld);
            float *w = gpu_randoms(H * D);
            gpu_head_norm a = {x.x, ld, H, D, gpu_up_f32(w, H * D), by_head, 1e-6f, T};
            gpu_run(centred ? GPU_OP_head_layernorm : GPU_OP_head_rmsnorm, &a);
            for (int h = 0; h < H; h++) {
                float *at = x.host + h * D, *wh = w + (by_head ? h * D : 0);
                if (centred)
                    kern_head_layernorm(gpu.cpu, at, ld, 1, D, wh, 1e-6f, T);
                else
                    kern_head_rmsnorm(gpu.cpu, at, ld, 1, D, wh, 1e-6f, T);
            }
            gpu_check("norm of heads", &x, 2e-6, centred && D > 1 ? 1e-5 : 0);
            gpu_drop_all();
        }
}

static void gated(void **state)
{
    (void)state;
    FOR_TYPES(t)
    for (int D = 33; D <= 128; D += 95) {
        int H = 5;
        int64_t T = 6, n = H * D, ldg = n + 3;
        gpu_mat x = spiced(t, T, n, n), g = spiced(t, T, n, ldg), o = gpu_mat_empty(t, T, n, n);
        float *w = gpu_randoms(D);
        kern_gated_rmsnorm(gpu.cpu, x.host, g.host, ldg, H, D, w, 1e-6f, T, o.host);
        gpu_gated_norm a = {x.x, g.x, o.x, ldg, H, D, gpu_up_f32(w, D), 1e-6f, T};
        gpu_run(GPU_OP_gated_rmsnorm, &a);
        gpu_check("gated_rmsnorm", &o, 2e-6, 1e-30);
        a.out = a.x;
        gpu_run(GPU_OP_gated_rmsnorm, &a);
        memcpy(x.host, o.host, (size_t)(T * n) * sizeof(float));
        gpu_check("gated_rmsnorm in place", &x, 2e-6, 1e-30);
    }
}

/* ---- rotary positions ---------------------------------------------------------------------------
 */
static void rope(void **state)
{
    (void)state;
    static const struct {
        int H, Hk, D, rot;
    } c[] = {{3, 1, 64, 64}, {4, 2, 80, 20}, {1, 1, 128, 128}, {5, 0, 6, 2}, {0, 2, 16, 8}};
    for (int i = 0; i < LEN(c); i++)
        FOR_TYPES(t)
    for (int pairs = 0; pairs < 2; pairs++) {
        int64_t T = 5, nq = c[i].H * c[i].D, nk = c[i].Hk * c[i].D, half = c[i].rot / 2;
        gpu_mat q = spiced(t, T, nq ? nq : 1, nq + 7), k = spiced(t, T, nk ? nk : 1, nk + 2);
        float *cosv = gpu_randoms(T * half), *sinv = gpu_randoms(T * half);
        gpu_x none = {NULL, GPU_F32};
        gpu_run(GPU_OP_rope, &(gpu_rope){.q = c[i].H ? q.x : none,
                                         .k = c[i].Hk ? k.x : none,
                                         .ldq = q.ld,
                                         .ldk = k.ld,
                                         .H = c[i].H,
                                         .Hk = c[i].Hk,
                                         .D = c[i].D,
                                         .rot_dim = c[i].rot,
                                         .pairs = pairs,
                                         .cosv = gpu_up_f32(cosv, T * half),
                                         .sinv = gpu_up_f32(sinv, T * half),
                                         .T = T});
        (pairs ? kern_rope_pairs : kern_rope)(gpu.cpu, c[i].H ? q.host : NULL, q.ld, c[i].H,
                                              c[i].Hk ? k.host : NULL, k.ld, c[i].Hk, c[i].D,
                                              c[i].rot, cosv, sinv, T);
        gpu_check("q", &q, 0, 0);
        gpu_check("k", &k, 0, 0);
    }
}

static void rope_fill(void **state)
{
    (void)state;
    for (int64_t half = 1; half < 70; half += 31) {
        const int32_t pos[] = {0, 1, 8191, 131071, 1000003, 17, 5};
        int64_t rows = LEN(pos), row0 = 2, T = 4;
        float *inv = gpu_host((size_t)half * sizeof *inv);
        for (int64_t i = 0; i < half; i++)
            inv[i] = (float)pow(10000.0, -(double)i / (double)half);
        gpu_mat c = gpu_mat_empty(GPU_F32, rows, half, half),
                s = gpu_mat_empty(GPU_F32, rows, half, half);
        gpu_run(GPU_OP_rope_fill, &(gpu_rope_fill){.inv = gpu_up_f32(inv, half),
                                                   .pos = gpu_up_i32(pos, rows),
                                                   .attention = 1.25,
                                                   .row0 = row0,
                                                   .T = T,
                                                   .half = half,
                                                   .cosv = c.x.p,
                                                   .sinv = s.x.p});
        kern_rope_fill(gpu.cpu, inv, half, 1.25, pos, row0, T, c.host, s.host);
        for (int i = 0; i < 2; i++) { /* the rows row0.. alone */
            gpu_mat *m = i ? &s : &c, part = *m;
            part.rows = T;
            part.host += row0 * half;
            part.mem += row0 * half * 4;
            uint32_t *raw = gpu_host((size_t)rows * (size_t)half * 4);
            gpu_read(raw, m->x.p, (size_t)(rows * half) * 4);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t j = 0; j < half; j++) {
                    float got, want = m->host[r * half + j];
                    memcpy(&got, raw + r * half + j, 4);
                    if (r < row0 || r >= row0 + T)
                        assert_int_equal(raw[r * half + j], 0xffffffffu);
                    else if (!(fabs((double)got - (double)want) <= 1.3e-7))
                        fail_msg("rope_fill [%lld,%lld]: got %.9g, expected %.9g", (long long)r,
                                 (long long)j, (double)got, (double)want);
                }
        }
    }
}

/* ---- lane by lane -------------------------------------------------------------------------------
 */
static void glu(void **state)
{
    (void)state;
    static const int64_t widths_[] = {1, 40, 101, 2056};
    for (int k = 0; k < LEN(widths_); k++)
        for (int act = 0; act < KERN_GLU_COUNT; act++)
            FOR_TYPES(t)
    for (int with = 0; with < 2; with++) {
        int64_t F = widths_[k], T = 5, ld = (with ? 2 * F : F) + (k == 1 ? 8 : 0),
                ldo = with ? F : F + 16;
        if (act == KERN_SWIGLU_OAI && !with) continue;
        gpu_mat x = spiced(t, T, with ? 2 * F : F, ld), o = gpu_mat_empty(t, T, F, ldo);
        gpu_run(GPU_OP_glu, &(gpu_glu){act, with, x.x, o.x, ld, ldo, F, T});
        if (with)
            kern_glu_mul(gpu.cpu, (kern_glu)act, x.host, ld, F, T, o.host);
        else
            kern_act_apply(gpu.cpu, (kern_glu)act, x.host, ld, F, T, o.host, ldo);
        gpu_check("glu", &o, 2e-6, act == KERN_GELU || act == KERN_GELU_TANH ? 1e-6 : 0);
        gpu_check("x", &x, 0, 0);
        gpu_drop_all();
    }
    assert_non_null(
        gpu.api->launch[GPU_OP_glu](&(gpu_glu){.act = KERN_GLU_COUNT, .F = 1, .T = 1}, gpu.stream));
}

static void sums(void **state)
{
    (void)state;
    for (int64_t n = 1; n < 20000; n = 9 * n + 8)
        FOR_TYPES(t)
    FOR_TYPES(u)
    for (int s = 0; s < 2; s++) {
        gpu_mat x = spiced(t, 1, n, n), y = gpu_mat_random(u, 1, n, n);
        if (n > 5) y.host[n - 1] = NAN;
        gpu_mat_up(&y);
        gpu_run(GPU_OP_add, &(gpu_add){x.x, y.x, s ? 1.0f : -0.37f, n});
        if (s)
            kern_add(gpu.cpu, x.host, y.host, n);
        else
            kern_add_scaled(gpu.cpu, x.host, y.host, -0.37f, n);
        gpu_check("add", &x, 0, 0);
        gpu_check("y", &y, 0, 0);
    }
}

static void factors(void **state)
{
    (void)state;
    FOR_TYPES(t)
    {
        int64_t T = 5, n = 77;
        gpu_mat x = spiced(t, T, n, n), y = spiced(t, T, n, n);
        gpu_run(GPU_OP_scale, &(gpu_scale){x.x, 0.3f, T * n});
        kern_scale(gpu.cpu, x.host, 0.3f, T * n);
        gpu_check("scale", &x, 0, 0);
        gpu_run(GPU_OP_softcap, &(gpu_scale){y.x, 30.0f, T * n});
        kern_softcap(gpu.cpu, y.host, 30.0f, T * n);
        gpu_check("softcap", &y, 1e-6, 1e-7);
        for (int by_row = 0; by_row < 2; by_row++) {
            gpu_mat v = spiced(t, T, n, n + 3), g = spiced(t, T, by_row ? 1 : n, n + 1);
            gpu_run(GPU_OP_gate, &(gpu_gate){v.x, g.x, v.ld, g.ld, n, T, by_row});
            (by_row ? kern_row_sigmoid : kern_sigmoid_mul)(gpu.cpu, v.host, v.ld, g.host, g.ld, n,
                                                           T);
            gpu_check("gate", &v, 5e-7, 0);
        }
        const int32_t pos[] = {0, 99, 100, 250, 100000};
        gpu_mat f = spiced(t, T, n, n + 2);
        gpu_run(GPU_OP_far, &(gpu_far){f.x, f.ld, n, T, 100, gpu_up_i32(pos, T), 0.7f});
        kern_scale_far(gpu.cpu, f.host, f.ld, n, pos, 0.7f, 100, T);
        gpu_check("far", &f, 5e-7, 0);
        assert_non_null(
            gpu.api->launch[GPU_OP_far](&(gpu_far){f.x, f.ld, n, T, 0, NULL, 1}, gpu.stream));
    }
}

static void copies(void **state)
{
    (void)state;
    static const int64_t n_[] = {1, 40, 33, 2048};
    const int32_t ids[] = {4, 0, 0, 2, 1, 3, 4};
    for (int k = 0; k < LEN(n_); k++)
        FOR_TYPES(t)
    FOR_TYPES(u)
    for (int by_id = 0; by_id < 2; by_id++) {
        int64_t n = n_[k], rows = by_id ? LEN(ids) : 5;
        gpu_mat from = spiced(t, 5, n, n + (k == 2 ? 3 : 8)),
                to = gpu_mat_empty(u, rows, n, n + 16);
        gpu_run(GPU_OP_copy, &(gpu_copy){from.x, to.x, by_id ? gpu_up_i32(ids, rows) : NULL,
                                         from.ld, to.ld, n, rows});
        for (int64_t r = 0; r < rows; r++)
            memcpy(to.host + r * to.ld, from.host + (by_id ? ids[r] : r) * from.ld,
                   (size_t)n * sizeof(float));
        gpu_check("copy", &to, 0, 0);
    }
}

/* ---- routing ------------------------------------------------------------------------------------
 */
typedef struct route_case {
    int E, k;
    kern_route_kind kind;
    int groups, of;
    bool top2, renorm, bias;
} route_case;
static const route_case routes[] = {
    {8, 2, KERN_ROUTE_SOFTMAX, 0, 0, false, true, false},
    {60, 4, KERN_ROUTE_SOFTMAX, 0, 0, false, false, false},
    {256, 8, KERN_ROUTE_SIGMOID, 8, 4, true, true, true},
    {160, 6, KERN_ROUTE_SOFTMAX, 8, 3, false, false, false},
    {64, 6, KERN_ROUTE_SIGMOID, 1, 1, false, true, true},
    {32, 4, KERN_ROUTE_TOPK_SOFTMAX, 0, 0, false, false, false},
    {16, 2, KERN_ROUTE_SPARSE_MIX, 0, 0, false, false, false},
    {5, 5, KERN_ROUTE_TOPK_SOFTMAX, 0, 0, false, true, true},
    {1, 1, KERN_ROUTE_SOFTMAX, 0, 0, false, false, false},
};

static void route(void **state)
{
    (void)state;
    err e = {0};
    CHECK_OK(kern_reserve(gpu.cpu, 64, 1024, 64, &e));
    for (int i = 0; i < LEN(routes); i++) {
        const route_case *c = &routes[i];
        int64_t T = 9, n = T * c->k;
        gpu_mat x = spiced(GPU_F32, T, c->E, c->E);
        for (int e_ = 0; e_ < c->E; e_++) { /* ties; all NaN; one infinity */
            x.host[5 * c->E + e_] = (float)(e_ / 3 % 4);
            x.host[6 * c->E + e_] = NAN;
        }
        x.host[7 * c->E] = INFINITY;
        gpu_mat_up(&x);
        float *bias = c->bias ? gpu_randoms(c->E) : NULL;
        gpu_mat w = gpu_mat_empty(GPU_F32, T, c->k, c->k);
        int32_t *expert = gpu_host((size_t)n * 4), *d_expert = gpu_empty((size_t)n * 4);
        kern_route_args a = {x.host,
                             c->E,
                             c->k,
                             c->kind,
                             bias,
                             c->groups,
                             c->of,
                             c->top2,
                             .jitter = 0.1f,
                             .renorm = c->renorm,
                             .scale = 1.7f,
                             .expert = expert,
                             .weight = w.host};
        kern_route(gpu.cpu, &a, T);
        gpu_run(GPU_OP_route, &(gpu_route){.logits = x.x,
                                           .E = c->E,
                                           .top_k = c->k,
                                           .kind = (int)c->kind,
                                           .bias = gpu_up_f32(bias, c->E),
                                           .n_group = c->groups,
                                           .topk_group = c->of,
                                           .group_top2 = c->top2,
                                           .renorm = c->renorm,
                                           .jitter = 0.1f,
                                           .scale = 1.7f,
                                           .expert = d_expert,
                                           .weight = w.x.p,
                                           .T = T});
        gpu_check_bytes("experts", d_expert, expert, (size_t)n * 4);
        gpu_check("weights", &w, 2e-6, 1e-37);
    }
}

static void sorting(void **state)
{
    (void)state;
    static const int shapes[][3] = {{1, 1, 1}, {1, 8, 64}, {7, 3, 5}, {300, 4, 16}, {0, 2, 4}};
    for (int i = 0; i < LEN(shapes); i++) {
        int64_t T = shapes[i][0];
        int k = shapes[i][1], E = shapes[i][2];
        size_t n = (size_t)(T * k);
        int32_t *expert = gpu_host(n * 4), *row = gpu_host(n * 4), *slot = gpu_host(n * 4),
                *first = gpu_host((size_t)(E + 1) * 4);
        for (size_t j = 0; j < n; j++)
            expert[j] = (int32_t)(gpu_uniform() * 0.8 * E);
        gpu_route_sort a = {
            gpu_up(expert, n * 4), T, k, E, gpu_empty(n * 4 + 4), gpu_empty((size_t)(E + 1) * 4),
            gpu_empty(n * 4 + 4)};
        gpu_run(GPU_OP_route_sort, &a);
        kern_route_sort(gpu.cpu, expert, T, k, E, row, first, slot);
        gpu_check_bytes("row", a.row, row, n * 4);
        gpu_check_bytes("first", a.first, first, (size_t)(E + 1) * 4);
        gpu_check_bytes("slot", a.slot, slot, n * 4);
    }
}

static void combine(void **state)
{
    (void)state;
    FOR_TYPES(t)
    for (int add = 0; add < 2; add++)
        for (int64_t N = 1; N < 400; N = 13 * N + 20) {
            int64_t T = 5;
            int k = 3;
            gpu_mat y = spiced(t, T * k, N, N + 5), out = gpu_mat_random(t, T, N, N);
            float *w = gpu_randoms(T * k);
            int32_t *slot = gpu_host((size_t)(T * k) * 4);
            for (int i = 0; i < T * k; i++)
                slot[i] = (int32_t)((i * 7) % (T * k));
            gpu_run(GPU_OP_combine, &(gpu_combine){y.x, out.x, gpu_up_f32(w, T * k),
                                                   gpu_up_i32(slot, T * k), k, y.ld, T, N, add});
            kern_route_combine(gpu.cpu, y.host, y.ld, w, slot, k, T, N, add, out.host);
            gpu_check("combine", &out, 2e-6, 2e-5);
        }
}

/* ---- codes --------------------------------------------------------------------------------------
 */
typedef struct codes_case {
    gpu_code code;
    bool as_bf16;
    int64_t group;
    float fixed;
    bool turned; /* scales of a group lie side by side */
} codes_case;
static const codes_case codes_cases[] = {
    {GPU_E4M3, false, 0, 0, false},      {GPU_E4M3, false, 128, 0, false},
    {GPU_E4M3, true, 0, 0, false},       {GPU_E4M3, false, 128, 0, true},
    {GPU_INT8, false, 0, 0, false},      {GPU_INT8, true, 0, 0, false},
    {GPU_INT8, false, 128, 0, false},    {GPU_E4M3, false, 0, 0.05f, false},
    {GPU_INT8, false, 0, 0.013f, false},
};

typedef struct codes {
    gpu_codes to;
    int64_t T, K, groups;
    size_t bytes, scales;
} codes;

static codes codes_of(const codes_case *c, int64_t T, int64_t K)
{
    codes o = {.T = T, .K = K, .groups = c->group ? (K + 127) / 128 : 1};
    int64_t ld = (K + 15) / 16 * 16 + 16;
    o.bytes = (size_t)(T * ld) * (c->as_bf16 ? 2 : 1);
    o.scales = (size_t)(T * o.groups) * 4;
    o.to = (gpu_codes){.code = c->code,
                       .as_bf16 = c->as_bf16,
                       .p = gpu_empty(o.bytes),
                       .ld = ld,
                       .group = c->group,
                       .fixed = c->fixed,
                       .scale = gpu_empty(o.scales),
                       .scale_row = c->turned ? 1 : o.groups,
                       .scale_group = c->turned ? T : 1};
    return o;
}

/* Both are the code of a NaN: its sign means nothing, and devices differ in it. */
static bool same_nan(const gpu_codes *c, const uint8_t *got, const uint8_t *want, size_t i)
{
    if (c->code != GPU_E4M3) return false;
    if (!c->as_bf16) return (got[i] & 0x7f) == 0x7f && (want[i] & 0x7f) == 0x7f;
    uint16_t a, b;
    memcpy(&a, got + i / 2 * 2, 2);
    memcpy(&b, want + i / 2 * 2, 2);
    return (a & 0x7fff) > 0x7f80 && (b & 0x7fff) > 0x7f80;
}

/* By the rules of api.h, lane by lane, of the f32 values v [T][ldv]. */
static void check_codes(const char *what, const codes *o, const float *v, int64_t ldv)
{
    uint8_t *got = gpu_host(o->bytes), *want = gpu_host(o->bytes);
    float *scale = gpu_host(o->scales);
    const gpu_codes *c = &o->to;
    gpu_read(got, c->p, o->bytes);
    gpu_read(scale, c->scale, o->scales);
    for (int64_t t = 0; t < o->T; t++)
        for (int64_t g = 0; g < o->groups; g++) {
            int64_t lo = g * 128, hi = c->group && lo + 128 < o->K ? lo + 128 : o->K;
            float top = 0;
            for (int64_t i = lo; i < hi; i++)
                top = isnan(top) || isnan(v[t * ldv + i]) ? NAN : fmaxf(top, fabsf(v[t * ldv + i]));
            float s = isnan(top)            ? NAN
                      : c->fixed > 0        ? c->fixed
                      : c->code == GPU_E4M3 ? top / 448.0f
                                            : top / 127.5f;
            float is = scale[t * c->scale_row + g * c->scale_group], by = s > 0 ? s : 1.0f;
            if (isnan(s) != isnan(is) || (!isnan(s) && s != is))
                fail_msg("%s: scale [%lld,%lld] is %.9g, expected %.9g", what, (long long)t,
                         (long long)g, (double)is, (double)s);
            for (int64_t i = lo; i < hi; i++) {
                float q = v[t * ldv + i] / by;
                if (c->code == GPU_E4M3) {
                    uint8_t code = (uint8_t)num_encode(NUM_F8_E4M3, q);
                    uint16_t h = num_f32_to_bf16(num_decode(NUM_F8_E4M3, code));
                    if (c->as_bf16)
                        memcpy(want + 2 * (t * c->ld + i), &h, 2);
                    else
                        want[t * c->ld + i] = code;
                } else {
                    q = nearbyintf(q);
                    q = q < -128 ? -128 : q > 127 ? 127 : q == q ? q : 0;
                    uint16_t h = num_f32_to_bf16(q);
                    if (c->as_bf16)
                        memcpy(want + 2 * (t * c->ld + i), &h, 2);
                    else
                        want[t * c->ld + i] = (uint8_t)(int8_t)q;
                }
            }
        }
    for (size_t i = 0; i < o->bytes; i++)
        if (got[i] != want[i] && !same_nan(c, got, want, i))
            fail_msg("%s: byte %zu (row %zu, lane %zu) is %#x, expected %#x", what, i,
                     i / (o->bytes / (size_t)o->T), i % (o->bytes / (size_t)o->T), got[i], want[i]);
}

static void quant(void **state)
{
    (void)state;
    static const int64_t widths_[] = {1, 33, 128, 1000, 4096, 8208, 16640};
    for (int i = 0; i < LEN(codes_cases); i++)
        for (int k = 0; k < LEN(widths_); k++)
            FOR_TYPES(t)
            {
                int64_t K = widths_[k], T = K > 9000 ? 3 : 6, ld = K + (k % 2 ? 8 : 0);
                gpu_mat x = spiced(t, T, K, ld);
                codes o = codes_of(&codes_cases[i], T, K);
                gpu_run(GPU_OP_quant, &(gpu_quant){x.x, ld, T, K, o.to});
                check_codes("quant", &o, x.host, ld);
                gpu_check("x", &x, 0, 0);
                gpu_drop_all();
            }
    gpu_quant bad = {.T = 1, .K = 1, .to = {.group = 64}};
    assert_non_null(strstr(gpu.api->launch[GPU_OP_quant](&bad, gpu.stream), "other than 128"));
    bad.to = (gpu_codes){.p = (void *)8, .ld = 16};
    assert_non_null(strstr(gpu.api->launch[GPU_OP_quant](&bad, gpu.stream), "not aligned"));
}

/* What is stored is that of the operator without codes, to the byte; the codes are those of it. */
static void norm_quant(void **state)
{
    (void)state;
    static const int64_t widths_[] = {33, 1024, 4096, 8200, 16640};
    for (int i = 0; i < LEN(codes_cases); i++)
        for (int k = 0; k < LEN(widths_); k++)
            FOR_TYPES(t)
    for (int add = 0; add < 2; add++) {
        int64_t K = widths_[k], T = K > 9000 ? 3 : 6;
        gpu_mat x = spiced(GPU_F32, T, K, K), again = x, y = gpu_mat_random(t, T, K, K),
                o = gpu_mat_empty(t, T, K, K), o2 = gpu_mat_empty(t, T, K, K);
        gpu_x none = {NULL, t};
        again = gpu_mat_of(GPU_F32, x.host, K, T, K, K);
        float *w = gpu_up_f32(gpu_randoms(K), K);
        codes c = codes_of(&codes_cases[i], T, K), c2 = codes_of(&codes_cases[i], T, K);
        if (add)
            gpu_run(GPU_OP_add_rmsnorm, &(gpu_add_norm){x.x, y.x, o.x, w, 1e-5f, T, K});
        else
            gpu_run(GPU_OP_rmsnorm, &(gpu_norm){x.x, o.x, w, NULL, 1e-5f, T, K});
        gpu_norm_quant a = {again.x, add ? y.x : none, o2.x, w, 1e-5f, T, K, c.to};
        gpu_run(GPU_OP_norm_quant, &a);
        o2.host = down(&o);
        x.host = down(&x);
        gpu_check("out of norm_quant", &o2, 0, 0);
        again.host = x.host;
        gpu_check("x of norm_quant", &again, 0, 0);
        check_codes("norm_quant", &c, o2.host, K);
        a.out.p = NULL;
        a.y.p = NULL;
        a.to = c2.to;
        gpu_run(GPU_OP_norm_quant, &a);
        check_codes("norm_quant, out not kept", &c2, o2.host, K);
        gpu_drop_all();
    }
}

static void glu_quant(void **state)
{
    (void)state;
    static const int64_t widths_[] = {40, 101, 1024, 8200, 16640};
    for (int i = 0; i < LEN(codes_cases); i++)
        for (int k = 0; k < LEN(widths_); k++)
            FOR_TYPES(t)
            {
                int64_t F = widths_[k], T = F > 9000 ? 3 : 6, ld = 2 * F;
                int act = i % KERN_GLU_COUNT;
                gpu_mat x = spiced(t, T, 2 * F, ld), o = gpu_mat_empty(t, T, F, F),
                        o2 = gpu_mat_empty(t, T, F, F + 8);
                codes c = codes_of(&codes_cases[i], T, F), c2 = codes_of(&codes_cases[i], T, F);
                gpu_run(GPU_OP_glu, &(gpu_glu){act, true, x.x, o.x, ld, F, F, T});
                gpu_glu_quant a = {act, x.x, o2.x, ld, o2.ld, F, T, c.to};
                gpu_run(GPU_OP_glu_quant, &a);
                float *want = down(&o);
                for (int64_t r = 0; r < T; r++)
                    memcpy(o2.host + r * o2.ld, want + r * F, (size_t)F * sizeof(float));
                gpu_check("out of glu_quant", &o2, 0, 0);
                check_codes("glu_quant", &c, want, F);
                a.out.p = NULL;
                a.to = c2.to;
                gpu_run(GPU_OP_glu_quant, &a);
                check_codes("glu_quant, out not kept", &c2, want, F);
                gpu_drop_all();
            }
}

/* ---- keys to the cache --------------------------------------------------------------------------
 */
typedef struct store_case {
    int type;
    gpu_kv_order order;
    int H, Hk, D, rot, page;
    bool norm, by_head, pairs, latent;
} store_case;
static const store_case stores[] = {
    {KV_BF16, GPU_KV_MMA, 4, 2, 128, 128, 32, true, false, false, false},
    {KV_FP8_E4M3, GPU_KV_MMA, 4, 1, 64, 32, 32, true, true, true, false},
    {KV_BF16, GPU_KV_PLAIN, 2, 2, 80, 20, 16, false, false, false, false},
    {KV_INT8, GPU_KV_PLAIN, 2, 1, 33, 10, 5, true, false, true, false},
    {KV_FP4, GPU_KV_PLAIN, 3, 3, 48, 48, 8, true, false, false, false},
    {KV_FP8_E5M2, GPU_KV_PLAIN, 1, 1, 128, 0, 64, true, false, false, false},
    {KV_F32, GPU_KV_PLAIN, 2, 1, 72, 8, 4, false, false, true, true},
};

/* As head_rmsnorm, rope and kv_store one after the other, to the byte. */
static void rope_store(void **state)
{
    (void)state;
    for (int i = 0; i < LEN(stores); i++)
        FOR_TYPES(t)
    for (int keep = 0; keep < 2; keep++) {
        const store_case *c = &stores[i];
        int64_t T = 5, nq = c->H * c->D, nk = c->Hk * c->D, ld = nq + 2 * nk + 8, half = c->rot / 2;
        int v_in_k = c->latent ? c->D / 2 : 0;
        size_t page =
            (kern_kv_page_bytes((kern_kv_type)c->type, c->Hk, c->D, v_in_k, c->page) + 255) / 256 *
            256;
        gpu_mat x = gpu_mat_random(t, T, ld, ld), two = gpu_mat_of(t, x.host, ld, T, ld, ld);
        float *table = gpu_up_f32(gpu_randoms(T * half), T * half),
              *wq = gpu_up_f32(gpu_randoms(nq), nq), *wk = gpu_up_f32(gpu_randoms(nk), nk),
              *ks = gpu_host((size_t)c->Hk * 4);
        for (int h = 0; h < c->Hk; h++)
            ks[h] = 0.01f * (float)(h + 1);
        int32_t slot[] = {0, c->page + 1, -1, 2 * c->page - 1, 2};
        unsigned long long *clipped[2] = {gpu_empty(8), gpu_empty(8)}, zero = 0, n[2];
        gpu_kv kv = {
            c->type, c->order, c->Hk, c->D, c->page, v_in_k, NULL, page, gpu_up_f32(ks, c->Hk),
            NULL};
        uint8_t *pages[2] = {gpu_empty(2 * page), gpu_empty(2 * page)}, *got[2];
        int32_t *d_slot = gpu_up_i32(slot, T);
        size_t lane = gpu_lane_bytes(t);
        for (int j = 0; j < 2; j++)
            gpu_write(clipped[j], &zero, 8);
        char *at = x.x.p, *at2 = two.x.p;
        gpu_x q = {at, t}, k = {at + (size_t)nq * lane, t},
              v = {c->latent ? NULL : at + (size_t)(nq + nk) * lane, t}, q2 = {at2, t},
              k2 = {at2 + (size_t)nq * lane, t},
              v2 = {c->latent ? NULL : at2 + (size_t)(nq + nk) * lane, t};
        if (c->norm) {
            gpu_run(GPU_OP_head_rmsnorm,
                    &(gpu_head_norm){q, ld, c->H, c->D, wq, c->by_head, 1e-6f, T});
            gpu_run(GPU_OP_head_rmsnorm,
                    &(gpu_head_norm){k, ld, c->Hk, c->D, wk, c->by_head, 1e-6f, T});
        }
        gpu_run(GPU_OP_rope,
                &(gpu_rope){q, k, ld, ld, c->H, c->Hk, c->D, c->rot, c->pairs, table, table, T});
        kv.base = pages[0];
        gpu_run(GPU_OP_kv_store, &(gpu_kv_store){kv, k, v, ld, ld, T, d_slot, clipped[0]});
        kv.base = pages[1];
        gpu_run(GPU_OP_rope_store, &(gpu_rope_store){.q = q2,
                                                     .k = k2,
                                                     .v = v2,
                                                     .q_out = q2,
                                                     .ldq = ld,
                                                     .ldk = ld,
                                                     .ldv = ld,
                                                     .ldo = ld,
                                                     .H = c->H,
                                                     .Hk = c->Hk,
                                                     .D = c->D,
                                                     .rot_dim = c->rot,
                                                     .pairs = c->pairs,
                                                     .norm_by_head = c->by_head,
                                                     .keep_k = keep,
                                                     .cosv = table,
                                                     .sinv = table,
                                                     .q_norm = c->norm ? wq : NULL,
                                                     .k_norm = c->norm ? wk : NULL,
                                                     .eps = 1e-6f,
                                                     .q_factor = 1,
                                                     .kv = kv,
                                                     .slot = d_slot,
                                                     .clipped = clipped[1],
                                                     .T = T});
        for (int j = 0; j < 2; j++) {
            got[j] = gpu_host(2 * page);
            gpu_read(got[j], pages[j], 2 * page);
            gpu_read(&n[j], clipped[j], 8);
        }
        assert_memory_equal(got[0], got[1], 2 * page);
        assert_int_equal(n[0], n[1]);
        float *want = down(&x);
        for (int64_t r = 0; r < T; r++) /* k stays as it was, or is what was stored */
            for (int64_t l = 0; l < ld; l++)
                if (keep || l < nq || l >= nq + nk) two.host[r * ld + l] = want[r * ld + l];
        gpu_check("rows of rope_store", &two, 0, 0);
        gpu_drop_all();
    }
    gpu_rope_store bad = {.Hk = 2,
                          .D = 8,
                          .H = 1,
                          .T = 1,
                          .kv = {KV_BF16, GPU_KV_PLAIN, 1, 8, 4, 0, NULL, 64, NULL, NULL}};
    assert_non_null(
        strstr(gpu.api->launch[GPU_OP_rope_store](&bad, gpu.stream), "not the cache's"));
}

/* ---- nothing to do, and everything tested -------------------------------------------------------
 */
static void nothing(void **state)
{
    (void)state;
    gpu_mat x = gpu_mat_empty(GPU_F32, 0, 8, 8);
    union {
        gpu_norm norm;
        gpu_add_norm add_norm;
        gpu_head_norm head;
        gpu_gated_norm gated;
        gpu_rope rope;
        gpu_rope_fill fill;
        gpu_glu glu;
        gpu_add add;
        gpu_scale scale;
        gpu_gate gate;
        gpu_copy copy;
        gpu_far far_;
        gpu_route route;
        gpu_combine combine;
    } none;
    static const gpu_op ops[] = {GPU_OP_rmsnorm,      GPU_OP_layernorm,      GPU_OP_add_rmsnorm,
                                 GPU_OP_head_rmsnorm, GPU_OP_head_layernorm, GPU_OP_gated_rmsnorm,
                                 GPU_OP_rope,         GPU_OP_rope_fill,      GPU_OP_glu,
                                 GPU_OP_add,          GPU_OP_scale,          GPU_OP_softcap,
                                 GPU_OP_gate,         GPU_OP_copy,           GPU_OP_far,
                                 GPU_OP_route,        GPU_OP_combine};
    memset(&none, 0, sizeof none);
    for (int i = 0; i < LEN(ops); i++)
        gpu_run(ops[i], &none);
    gpu_check("no rows", &x, 0, 0);
}

static const char *const op_names[GPU_N_OPS] = {
#define NAME(name, args) "GPU_OP_" #name,
    GPU_OPS(NAME)
#undef NAME
};

/* The lists `tested` of all test_gpu_*.c, one text. A program fails where an operator of its list
 * never ran. */
static char *all_lists(void)
{
    char *all = gpu_host(1 << 16);
    FILE *ls = popen("cat tests/unit/test_gpu_*.c | sed -n '/gpu_op tested\\[\\]/,/;/p'", "r");
    assert_non_null(ls);
    size_t n = fread(all, 1, (1 << 16) - 1, ls);
    all[n] = 0;
    pclose(ls);
    return all;
}

static void every_operator_is_tested(void **state)
{
    (void)state;
    char *lists = all_lists(), missing[1024] = "";
    for (int i = 0; i < GPU_N_OPS; i++) {
        size_t n = strlen(op_names[i]);
        char *at = strstr(lists, op_names[i]);
        while (at && strchr("abcdefghijklmnopqrstuvwxyz0123456789_", at[n]) && at[n])
            at = strstr(at + n, op_names[i]);
        if (at) continue;
        strncat(missing, " ", sizeof missing - strlen(missing) - 1);
        strncat(missing, op_names[i] + 7, sizeof missing - strlen(missing) - 1);
    }
    if (*missing) fail_msg("operators in no list `tested` of tests/unit/test_gpu_*.c:%s", missing);
}

static const gpu_op tested[] = {GPU_OP_rmsnorm,      GPU_OP_layernorm,      GPU_OP_add_rmsnorm,
                                GPU_OP_head_rmsnorm, GPU_OP_head_layernorm, GPU_OP_gated_rmsnorm,
                                GPU_OP_rope,         GPU_OP_rope_fill,      GPU_OP_glu,
                                GPU_OP_add,          GPU_OP_scale,          GPU_OP_softcap,
                                GPU_OP_gate,         GPU_OP_copy,           GPU_OP_far,
                                GPU_OP_route,        GPU_OP_route_sort,     GPU_OP_combine,
                                GPU_OP_quant,        GPU_OP_norm_quant,     GPU_OP_glu_quant,
                                GPU_OP_rope_store};
static const struct CMUnitTest tests[] = {
    GPU_TEST(rms),        GPU_TEST(rms_odd),    GPU_TEST(add_rms),
    GPU_TEST(layer),      GPU_TEST(heads),      GPU_TEST(gated),
    GPU_TEST(rope),       GPU_TEST(rope_fill),  GPU_TEST(glu),
    GPU_TEST(sums),       GPU_TEST(factors),    GPU_TEST(copies),
    GPU_TEST(route),      GPU_TEST(sorting),    GPU_TEST(combine),
    GPU_TEST(quant),      GPU_TEST(norm_quant), GPU_TEST(glu_quant),
    GPU_TEST(rope_store), GPU_TEST(nothing),    GPU_TEST(every_operator_is_tested),
};
GPU_MAIN(tests, tested)
