/* Linears of the GPU against those of the CPU. Weights of every scheme and shape are prepared in
 * each panel layout that takes them, as the CPU does, and copied; treated inputs are the twin's to
 * the bit, products are kern_linear_run's of the reference row, embedded rows those of decode_row
 * to the bit. One difference: NaN stays NaN where the twin rounds it to an E2M1, which has none. */
#include "../diff/linear_fixture.h"
#include "gpu_fixture.h"
#include "kern/gpu/convert.h"
#include "kern/ops.h"

#define REL 2e-6 /* of the sum of magnitudes */

/* ---- weights ----------------------------------------------------------------------------------
 */
typedef struct held { /* a weight in a panel layout, here and on the device */
    const kern__layout *layout;
    void *prep;
    gpu_panels w;
} held;
static long held_by[16]; /* per layout */

/* False when the layout does not take it. */
static bool hold(const kern__layout *layout, const qtensor *q, const int32_t *perm, held *out)
{
    err e = {0};
    kern_wshape s;
    kern__wshape_of(q, &s);
    if (layout->refuse(&s)) return false;
    size_t n = layout->bytes(&s);
    out->layout = layout;
    out->prep = gpu_host(n);
    CHECK_OK(layout->begin(q, &s, out->prep, &e));
    const kern__prep *p = out->prep;
    layout->fill(q, perm, out->prep, 0, p->panels);
    gpu__panels_of(p, gpu_up(p, p->total), &out->w);
    return true;
}

/* The one panel layout that takes it. */
static held hold_any(const qtensor *q, const int32_t *perm)
{
    held h = {0}, one;
    for (int i = 0; i < kern__n_layouts; i++)
        if (strcmp(kern__layouts[i]->name, "canonical") && hold(kern__layouts[i], q, perm, &one)) {
            assert_null(h.layout);
            h = one;
            held_by[i]++;
        }
    if (!h.layout) fail_msg("no panel layout takes %s", num_infos[q->code].name);
    return h;
}

static kern_linear *reference(const qtensor *q, const float *bias, kern_act act)
{
    err e = {0};
    kern_linear *l = NULL;
    kern_linear_desc d = {
        .name = "reference", .n_shards = 1, .shard = {q}, .bias = bias, .act = act};
    CHECK_OK(kern__linear_make_row(gpu.cpu, &d, &kern__row_ref, &l, &e));
    return l;
}

/* ---- comparing --------------------------------------------------------------------------------
 */

/* Lanes of rows [0, rows) as they are on the device; NULL where rows is 0. */
static float *fetch(const gpu_mat *m)
{
    size_t lane = gpu_lane_bytes(m->x.type), n = (size_t)(m->rows * m->ld);
    uint8_t *raw = gpu_host(n * lane);
    float *out = gpu_host(n * sizeof *out);
    gpu_read(raw, m->x.p, n * lane);
    num_decode_row(lane == 4 ? NUM_F32 : NUM_BF16, raw, n, out);
    return out;
}

static void same_bits(const char *what, float got, float want, int64_t r, int64_t c)
{
    if (isnan(got) && isnan(want)) return;
    if (memcmp(&got, &want, 4))
        fail_msg("%s [%lld,%lld]: got %.9g (%a), expected %.9g (%a)", what, (long long)r,
                 (long long)c, (double)got, (double)got, (double)want, (double)want);
}

/* All cells of m are those of m->host to the bit, NaN counting as one. */
static void check_bits(const char *what, const gpu_mat *m)
{
    float *got = fetch(m);
    for (int64_t r = 0; r < m->rows; r++)
        for (int64_t c = 0; c < m->cols; c++)
            same_bits(what, got[r * m->ld + c], gpu_rounded(m->x.type, m->host[r * m->ld + c]), r,
                      c);
    gpu_check(what, m, 0, 0); /* what lies around */
}

/* Rows [r0, r1) against host, allowed REL of what their terms add up to: rows of a times W. Host
 * gets what was found, for gpu_check of what lies around. */
static void check_sums(const char *what, gpu_mat *m, const float *got, int64_t r0, int64_t r1,
                       const held *h, const gpu_mat *a)
{
    float *w = gpu_host((size_t)h->w.K * sizeof *w);
    for (int64_t n = 0; n < m->cols; n++) {
        h->layout->decode_row(h->prep, n, w);
        for (int64_t r = r0; r < r1; r++) {
            float *want = &m->host[r * m->ld + n], found = got[r * m->ld + n];
            double mag = fabs((double)*want);
            for (int64_t k = 0; k < h->w.K; k++)
                mag += fabs((double)a->host[r * a->ld + k] * (double)w[k]);
            if (!gpu_agrees(m->x.type, found, *want, REL * mag))
                fail_msg("%s [%lld,%lld]: got %.9g, expected %.9g, off %.3g of the magnitude", what,
                         (long long)r, (long long)n, (double)found, (double)*want,
                         fabs((double)found - (double)*want) / mag);
            *want = found;
        }
    }
}

/* ---- inputs -----------------------------------------------------------------------------------
 */

/* The twin's treatment of rows x[ids ? ids[m] : m] into m->host. */
static void want_acts(const kern__act_plan *p, const float *x, int64_t ldx, const int32_t *ids,
                      gpu_mat *m)
{
    kern__acts a = {.M = m->rows, .Kp = p->Kp, .f32 = m->host};
    float *tmp = gpu_host((size_t)p->Kp * sizeof *tmp);
    for (int64_t r = 0; r < m->rows; r++) {
        const float *row = x + (ids ? ids[r] : r) * ldx;
        kern__act_row(p, &kern__ops_ref, row, r, &a, tmp);
        for (int64_t k = 0; k < p->K; k++)
            if (isnan(row[p->perm ? p->perm[k] : k])) m->host[r * m->ld + k] = NAN;
    }
}

/* Runs a plan on M rows and holds it against the twin; returns the result. */
static gpu_mat treat(const char *what, const kern__act_plan *p, const gpu_mat *x, int64_t M,
                     const int32_t *ids)
{
    gpu_mat a = gpu_mat_empty(GPU_F32, M, p->Kp, p->Kp);
    gpu_act_run run = {.x = x->x, .ldx = x->ld, .M = M, .out = a.x.p};
    gpu__act_of(p, &run.plan);
    run.plan.perm = gpu_up_i32(p->perm, p->K);
    run.plan.pre_scale = gpu_up_f32(p->pre_scale, p->K);
    run.ids = gpu_up_i32(ids, M);
    gpu_run(GPU_OP_act_run, &run);
    want_acts(p, x->host, x->ld, ids, &a);
    check_bits(what, &a);
    return a;
}

typedef struct input {
    const char *a;  /* as after "a:" */
    num_dtype type; /* or NUM_NONE = that of a */
    float scale, zero, global;
    bool round_bf16;
} input;
static const input inputs[] = {
    {"f32", NUM_NONE, 0, 0, 0, false},
    {"bf16", NUM_NONE, 0, 0, 0, true},
    {"fp8_e4m3,token", NUM_NONE, 0, 0, 0, false},
    {"fp8_e4m3,token", NUM_NONE, 0, 0, 0, true},
    {"fp8_e4m3,token", NUM_F8_E5M2, 0, 0, 0, false},
    {"fp8_e4m3,tensor", NUM_NONE, 1, 0, 0, false},
    {"fp8_e4m3,tensor", NUM_F8_E5M2, 1, 0, 0, false},
    {"fp8_e4m3,tensor", NUM_NONE, 0.013f, 0, 0, false},
    {"fp8_e4m3,group128", NUM_NONE, 0, 0, 0, false},
    {"fp8_e4m3,group20", NUM_F8_E5M2, 0, 0, 0, false},
    {"int8,token", NUM_NONE, 0, 0, 0, false},
    {"int8,token", NUM_I4, 0, 0, 0, false},
    {"int8,token", NUM_I2, 0, 0, 0, false},
    {"int8,tensor", NUM_NONE, 0.05f, 0, 0, false},
    {"int8,tensor", NUM_NONE, 0.05f, -17, 0, false},
    {"int8,tensor", NUM_I5, 0.4f, 3, 0, false},
    {"int8,group32", NUM_NONE, 0, 0, 0, true},
    {"nvfp4,g16", NUM_NONE, 0, 0, 0, false},
    {"nvfp4,g16", NUM_NONE, 0, 0, 0.002f, false},
    {"mxfp4,g32", NUM_NONE, 0, 0, 0, false},
    {"mxfp8,g32", NUM_NONE, 0, 0, 0, false},
    {"mxfp8,g32", NUM_F8_E5M2, 0, 0, 0, false},
};
enum { N_INPUTS = sizeof inputs / sizeof *inputs };

static kern__act_plan plan_of(const input *in, int64_t K)
{
    err e = {0};
    kern__act_plan p = {.kind = ACT_F32,
                        .K = K,
                        .Kp = (K + KERN_KPAD - 1) / KERN_KPAD * KERN_KPAD,
                        .in_scale = in->scale,
                        .in_zero = in->zero,
                        .in_global = in->global,
                        .round_bf16 = in->round_bf16};
    CHECK_OK(qspec_parse_axis(in->a, 'a', &p.a, &e));
    if (in->type != NUM_NONE) p.a.type = in->type;
    return p;
}

/* Rules x lengths x types of lane, with rows gathered, columns in another order and scaled, a row
 * of zeros, a row with NaN and a row with infinity. */
static void test_inputs(void **state)
{
    (void)state;
    static const int64_t lengths[] = {1, 17, 33, 64, 576, 4129};
    static const int32_t rows[] = {4, 1, 1, 0, 2, 3, 5};
    enum { M = 6, GATHERED = 7 };
    for (int i = 0; i < N_INPUTS; i++)
        for (size_t j = 0; j < sizeof lengths / sizeof *lengths; j++)
            for (int form = 0; form < 4; form++) {
                int64_t K = lengths[j];
                kern__act_plan p = plan_of(&inputs[i], K);
                float *v = gpu_randoms(M * K), *pre = gpu_randoms(K);
                int32_t *perm = gpu_host((size_t)K * sizeof *perm);
                for (int64_t k = 0; k < K; k++)
                    perm[k] = (int32_t)(K - 1 - k);
                memset(v + K, 0, (size_t)K * sizeof *v);
                v[2 * K + K / 2] = NAN;
                v[3 * K + K / 3] = INFINITY;
                gpu_mat x = gpu_mat_of(form & 1 ? GPU_BF16 : GPU_F32, v, K, M, K, K + 3);
                if (form & 1) p.perm = perm;
                if (form & 2) p.pre_scale = pre;
                treat(inputs[i].a, &p, &x, form & 2 ? GATHERED : M, form & 2 ? rows : NULL);
                gpu_drop_all();
            }
}

/* Magnitudes of every exponent, with mantissas at, below and above each middle of two codes, both
 * signs, infinities and NaN, through every rule. */
static void test_rounding(void **state)
{
    (void)state;
    enum { K = 8192, M = 64 };
    static const uint32_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xbfff, 0xc000, 0xfffe};
    for (int i = 0; i < N_INPUTS; i++) {
        kern__act_plan p = plan_of(&inputs[i], K);
        gpu_mat x = gpu_mat_empty(GPU_F32, M, K, K);
        for (uint32_t n = 0; n < (uint32_t)M * K; n++) {
            uint32_t u = n / 8 << 16 | low[n % 8];
            memcpy(&x.host[n], &u, 4);
        }
        gpu_mat_up(&x);
        treat(inputs[i].a, &p, &x, M, NULL);
        gpu_drop_all();
    }
}

/* ---- products ---------------------------------------------------------------------------------
 */

/* A linear with what its weight needs on the device. */
typedef struct pair {
    kern_linear *l;
    held h;
    const int32_t *perm; /* order of columns in the held weight, or NULL */
    float *bias;
} pair;

/* M rows by the device and by the twin; row `bad` has a NaN when it is not negative. */
static void product(const pair *p, int64_t M, gpu_type xt, gpu_type yt, const int32_t *ids,
                    int64_t rows, int64_t bad)
{
    int64_t N = p->h.w.N, K = p->h.w.K;
    kern__act_plan plan = p->l->shard[0].plan[kern_bucket(M)];
    plan.perm = p->perm;
    gpu_mat x = gpu_mat_random(xt, rows, K, K + 3);
    if (rows > 2) memset(x.host + x.ld, 0, (size_t)K * sizeof(float));
    if (bad >= 0) x.host[bad * x.ld + K / 2] = NAN;
    gpu_mat_up(&x);
    gpu_mat a = treat("input", &plan, &x, M, ids), y = gpu_mat_empty(yt, M, N, N + 5);
    gpu_product run = {
        .w = p->h.w, .a = a.x.p, .bias = gpu_up_f32(p->bias, N), .M = M, .ldy = y.ld, .y = y.x};
    gpu_run(GPU_OP_product, &run);
    kern__linear_run_rows(gpu.cpu, p->l, x.host, x.ld, ids, M, y.host, y.ld);
    for (int64_t m = 0; m < M && bad >= 0; m++)
        for (int64_t n = 0; n < N; n++)
            if ((ids ? ids[m] : m) == bad) y.host[m * y.ld + n] = NAN;
    check_sums(p->h.layout->name, &y, fetch(&y), 0, M, &p->h, &a);
    gpu_check(p->h.layout->name, &y, 0, 0);
}

static void drop_pair(pair *p)
{
    kern_linear_drop(gpu.cpu, p->l);
    gpu_drop_all();
}

static pair make_pair(const qtensor *q, bool bias, kern_act act)
{
    pair p = {.bias = bias ? gpu_randoms(q->N) : NULL};
    p.l = reference(q, p.bias, act);
    p.h = hold_any(q, NULL);
    return p;
}

static const int64_t shapes[][2] = {{1, 64},   {15, 33}, {16, 17}, {17, 172},
                                    {33, 576}, {64, 64}, {65, 1},  {80, 1536}};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

/* NVFP4 has whole blocks alone. */
static bool fits(const scheme *s, int64_t K)
{
    return !strstr(s->text, "nvfp4") || K % 16 == 0;
}

static void test_products(void **state)
{
    (void)state;
    static const int64_t batches[] = {1, 2, 3, 8, 9, 16, 17, 65};
    for (int i = 0; i < N_SCHEMES; i++)
        for (int j = 0; j < N_SHAPES; j++) {
            qtensor q;
            if (!fits(&schemes[i], shapes[j][1])) continue;
            random_weight(&q, &schemes[i], shapes[j][0], shapes[j][1]);
            for (int b = 0; b < 8; b++) {
                pair p = make_pair(&q, (i + j + b) % 3 == 0, KERN_ACT_SPEC);
                product(&p, batches[b], (b + i) % 2 ? GPU_BF16 : GPU_F32,
                        (b + j) % 2 ? GPU_BF16 : GPU_F32, NULL, batches[b], -1);
                drop_pair(&p);
            }
            free_weight(&q);
        }
    for (int i = 0; i < kern__n_layouts; i++)
        if (strcmp(kern__layouts[i]->name, "canonical") && !held_by[i])
            fail_msg("no weight was held as %s", kern__layouts[i]->name);
}

/* A NaN reaches its row and no other; rows by index. */
static void test_nan(void **state)
{
    (void)state;
    static const int32_t ids[] = {2, 0, 2, 1, 3};
    for (int i = 0; i < N_SCHEMES; i++)
        for (int b = 0; b < 3; b++) {
            static const int64_t batches[] = {3, 5, 20};
            qtensor q;
            random_weight(&q, &schemes[i], 33, 96);
            pair p = make_pair(&q, false, KERN_ACT_SPEC);
            product(&p, batches[b], b ? GPU_F32 : GPU_BF16, GPU_F32, b == 1 ? ids : NULL,
                    b == 1 ? 4 : batches[b], 2);
            drop_pair(&p);
            free_weight(&q);
        }
}

static void test_forced_inputs(void **state)
{
    (void)state;
    for (int act = KERN_ACT_F32; act <= KERN_ACT_INT8; act++)
        for (int i = 0; i < N_SCHEMES; i += 3) {
            qtensor q;
            random_weight(&q, &schemes[i], 33, 96);
            pair p = make_pair(&q, true, (kern_act)act);
            product(&p, 5, GPU_F32, GPU_F32, NULL, 5, -1);
            drop_pair(&p);
            free_weight(&q);
        }
}

/* Columns sorted by group, as a weight with act-order is held. */
static void test_actorder(void **state)
{
    (void)state;
    enum { K = 160, G = 32 };
    static const char *const texts[] = {"w:int4,g32,actorder", "w:int3,g32,actorder",
                                        "w:int2,g32,actorder", "w:int4,g32,actorder,asym",
                                        "w:int8,g32,actorder a:int8,token"};
    int32_t idx[K], perm[K];
    float pre[K];
    int n = 0;
    for (int k = 0; k < K; k++) {
        idx[k] = k * 37 % K / G;
        pre[k] = (float)(0.5 + gpu_uniform());
    }
    for (int g = 0; g < K / G; g++)
        for (int k = 0; k < K; k++)
            if (idx[k] == g) perm[n++] = k;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        for (int64_t M = 1; M < 100; M = M * 5 + 3) {
            qtensor q;
            random_weight(&q, &(scheme){texts[i], NUM_BF16}, 50, K);
            q.g_idx = idx;
            q.pre_scale = M > 1 ? pre : NULL;
            pair p = {.l = reference(&q, NULL, KERN_ACT_SPEC), .perm = perm};
            p.h = hold_any(&q, perm);
            product(&p, M, GPU_F32, GPU_F32, NULL, M, -1);
            drop_pair(&p);
            q.g_idx = NULL;
            q.pre_scale = NULL;
            free_weight(&q);
        }
}

/* What few checkpoints bring: own tables, float zero points, factors of ranges of rows, and inputs
 * with scales of their own. */
static void test_oddities(void **state)
{
    (void)state;
    static const scheme odd[] = {{"w:nf4,g64 a:bf16", NUM_F32},
                                 {"w:bnb_fp4,g32 a:bf16", NUM_F16},
                                 {"w:int4,g32,asym a:bf16", NUM_F16},
                                 {"w:int3,g32,asym a:bf16", NUM_F16},
                                 {"w:int8,g32,asym a:bf16", NUM_BF16},
                                 {"w:nvfp4,g16 a:nvfp4,g16", NUM_F8_E4M3},
                                 {"w:fp8_e4m3,channel a:fp8_e4m3,token", NUM_F32},
                                 {"w:fp8_e4m3,tensor a:fp8_e4m3,tensor", NUM_F32},
                                 {"w:int8,channel a:int8,tensor", NUM_F32}};
    float table[16], zeros[50 * 3];
    for (int i = 0; i < 16; i++)
        table[i] = (float)(i * i - 40) / 100;
    for (int i = 0; i < 50 * 3; i++)
        zeros[i] = (float)(gpu_uniform() * 15 - 7);
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        for (int64_t M = 1; M < 40; M = M * 5 + 3) {
            qtensor q;
            random_weight(&q, &odd[i], 50, 96);
            if (i == 0) q.table = table;
            if (i == 6) q.code = q.spec.w.type = q.spec.a.type = NUM_F8_E5M2;
            if (q.zeros) {
                q.zeros = zeros;
                q.zero_type = NUM_F32;
            }
            if (strstr(odd[i].text, "nvfp4")) {
                static const int64_t rows[] = {0, 5, 37, 50};
                q.n_global = 3;
                memcpy(q.global_row, rows, sizeof rows);
                for (int g = 0; g < 3; g++)
                    q.global[g] = 0.5f + (float)g;
                q.input_global = 0.003f;
            }
            if (strstr(odd[i].text, "a:int8,tensor")) q.input_zero = 9;
            if (strstr(odd[i].text, "tensor")) q.input_scale = 0.04f;
            pair p = make_pair(&q, true, KERN_ACT_SPEC);
            product(&p, M, GPU_F32, GPU_BF16, NULL, M, -1);
            drop_pair(&p);
            q.table = NULL;
            free_weight(&q);
        }
}

/* ---- experts ----------------------------------------------------------------------------------
 */

/* Experts of one [N, K], each of its own scheme, and some slots that no expert owns. */
typedef struct crowd {
    int E;
    int64_t N, K;
    held *h;
    gpu_panels *w;
    float **bias, **dev_bias;
    int32_t *first;
} crowd;

static crowd gather(const char *const *texts, int n, const int *counts, int E, int64_t N, int64_t K)
{
    crowd c = {.E = E, .N = N, .K = K};
    c.h = gpu_host((size_t)E * sizeof *c.h);
    c.w = gpu_host((size_t)E * sizeof *c.w);
    c.bias = gpu_host((size_t)E * sizeof *c.bias);
    c.dev_bias = gpu_host((size_t)E * sizeof *c.dev_bias);
    c.first = gpu_host(((size_t)E + 1) * sizeof *c.first);
    c.first[0] = 0;
    for (int e = 0; e < E; e++) {
        qtensor q;
        random_weight(&q, &(scheme){texts[e % n], NUM_BF16}, N, K);
        c.h[e] = hold_any(&q, NULL);
        c.w[e] = c.h[e].w;
        c.bias[e] = e % 3 ? gpu_randoms(N) : NULL;
        c.dev_bias[e] = gpu_up_f32(c.bias[e], N);
        c.first[e + 1] = c.first[e] + counts[e];
        free_weight(&q);
    }
    return c;
}

/* What expert e makes of its slots, as the reference row sums. */
static void want_expert(const crowd *c, int e, bool biased, const gpu_mat *a, gpu_mat *y)
{
    float *w = gpu_host((size_t)c->K * sizeof *w);
    for (int64_t n = 0; n < c->N; n++) {
        c->h[e].layout->decode_row(c->h[e].prep, n, w);
        for (int64_t m = c->first[e]; m < c->first[e + 1]; m++)
            y->host[m * y->ld + n] = kern__ref_dot(a->host + m * a->ld, w, c->K) +
                                     (biased && c->bias[e] ? c->bias[e][n] : 0.0f);
    }
}

static void experts(const crowd *c, gpu_type yt, bool biased)
{
    int64_t slots = c->first[c->E], Kp = c->w[0].Kp;
    gpu_mat a = gpu_mat_random(GPU_F32, slots, Kp, Kp),
            y = gpu_mat_empty(yt, slots, c->N, c->N + 1);
    for (int64_t i = 0; i < slots; i++)
        memset(a.host + i * Kp + c->K, 0, (size_t)(Kp - c->K) * sizeof(float));
    gpu_mat_up(&a);
    gpu_experts run = {.w = gpu_up(c->w, (size_t)c->E * sizeof *c->w),
                       .a = a.x.p,
                       .first = gpu_up_i32(c->first, c->E + 1),
                       .E = c->E,
                       .slots = slots + 3,
                       .N = c->N,
                       .K = c->K,
                       .Kp = Kp,
                       .ldy = y.ld,
                       .y = y.x};
    if (biased) run.bias = gpu_up(c->dev_bias, (size_t)c->E * sizeof *c->dev_bias);
    gpu_run(GPU_OP_experts, &run);
    float *got = fetch(&y);
    for (int e = 0; e < c->E; e++) {
        want_expert(c, e, biased, &a, &y);
        check_sums("experts", &y, got, c->first[e], c->first[e + 1], &c->h[e], &a);
    }
    gpu_check("experts", &y, 0, 0);
    gpu_drop_all();
}

/* Few slots and many; experts without any, with one, and with most of them. */
static void test_experts(void **state)
{
    (void)state;
    enum { E = 6 };
    static const int counts[][E] = {
        {3, 0, 1, 20, 0, 70}, {0, 0, 0, 0, 0, 1}, {1, 1, 0, 0, 8, 9}, {3, 0, 1, 130, 0, 70}};
    static const int64_t sizes[][2] = {{40, 64}, {17, 33}, {1, 96}, {130, 160}};
    static const char *const texts[] = {"w:bf16",
                                        "w:int4,g32,asym a:bf16",
                                        "w:fp8_e4m3,channel a:bf16",
                                        "w:int3,g32 a:bf16",
                                        "w:int2,channel a:bf16",
                                        "w:mxfp4,g32 a:bf16",
                                        "w:f32 a:bf16"};
    int even[40];
    for (int e = 0; e < 40; e++)
        even[e] = e % 5 == 2;
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int one = (i + j) % 7; /* all experts alike, and all different */
            for (int mixed = 0; mixed < 2; mixed++) {
                crowd c = gather(texts + (mixed ? 0 : one), mixed ? 7 : 1, counts[i], E,
                                 sizes[j][0], sizes[j][1]);
                experts(&c, (i + j + mixed) % 2 ? GPU_BF16 : GPU_F32, mixed || j % 2);
            }
        }
    crowd c = gather(texts, 7, even, 40, 48, 96);
    experts(&c, GPU_F32, true);
}

/* ---- rows and heads ---------------------------------------------------------------------------
 */

static void embed(const held *h, const int32_t *ids, int64_t T, gpu_type t)
{
    gpu_mat out = gpu_mat_empty(t, T, h->w.K, h->w.K);
    gpu_embed run = {.w = h->w, .ids = gpu_up_i32(ids, T), .T = T, .out = out.x};
    gpu_run(GPU_OP_embed, &run);
    for (int64_t i = 0; i < T; i++)
        h->layout->decode_row(h->prep, ids[i], out.host + i * out.ld);
    check_bits(h->layout->name, &out);
}

static void test_embed(void **state)
{
    (void)state;
    for (int i = 0; i < N_SCHEMES; i++)
        for (int j = 0; j < N_SHAPES; j++) {
            int32_t ids[9];
            qtensor q;
            if (!fits(&schemes[i], shapes[j][1])) continue;
            random_weight(&q, &schemes[i], shapes[j][0], shapes[j][1]);
            held h = hold_any(&q, NULL);
            for (int t = 0; t < 9; t++)
                ids[t] = (int32_t)(t == 0 ? q.N - 1 : t * 7 % q.N);
            embed(&h, ids, 9, GPU_F32);
            embed(&h, ids, 1, GPU_BF16);
            gpu_drop_all();
            free_weight(&q);
        }
}

/* Every code of every type that values and scales come in. */
static void test_codes(void **state)
{
    (void)state;
    static const num_dtype scales[] = {NUM_BF16, NUM_F16, NUM_F8_E4M3, NUM_F8_E8M0};
    static const char *const values[] = {"w:fp8_e4m3,channel", "w:fp8_e4m3,channel", "w:bf16",
                                         "w:f16", "w:int8,channel"};
    static const int32_t ids[] = {0};
    for (int i = 0; i < 9; i++) {
        qtensor q;
        const scheme s = {i < 4 ? "w:int4,g8" : values[i - 4], i < 4 ? scales[i] : NUM_F32};
        num_dtype t = i < 4 ? s.scale : NUM_NONE;
        bool wide = i < 2 || i == 6 || i == 7;
        int64_t codes = wide ? 65536 : 256, K = i < 4 ? 8 * codes : codes;
        random_weight(&q, &s, 1, K);
        uint8_t *at = (uint8_t *)(uintptr_t)(i < 4 ? q.scales : q.codes);
        for (int64_t c = 0; c < codes; c++)
            num_put_bits(at, (size_t)c, wide ? 16 : 8, (uint32_t)c);
        if (i == 5) q.code = q.spec.w.type = NUM_F8_E5M2;
        held h = hold_any(&q, NULL);
        assert_true(i >= 4 || h.w.scale_type == (int)t);
        embed(&h, ids, 1, GPU_F32);
        gpu_drop_all();
        free_weight(&q);
    }
}

static void head_matmul(num_dtype type, gpu_type xt, gpu_type ot, int H, int64_t N, int64_t K,
                        int64_t T)
{
    size_t row = num_bytes(type, (size_t)K);
    float *v = gpu_randoms(H * N * K);
    uint8_t *codes = gpu_host((size_t)(H * N) * row);
    for (int64_t n = 0; n < H * N; n++)
        num_encode_row(type, v + n * K, (size_t)K, codes + (size_t)n * row);
    qtensor q;
    qtensor_plain(&q, type, N, K, codes);
    q.E = H;
    /* heads of x and of out lie apart; out is looked at as rows of one head */
    int64_t ldh = K + 2, ldx = H * ldh + 1, ldoh = N + 3;
    gpu_mat x = gpu_mat_random(xt, T, ldx, ldx), out = gpu_mat_empty(ot, T * H, N, ldoh);
    gpu_head_matmul run = {.w = gpu_up(codes, (size_t)(H * N) * row),
                           .w_type = type,
                           .x = x.x,
                           .out = out.x,
                           .ldx = ldx,
                           .ldh = ldh,
                           .ldo = H * ldoh,
                           .ldoh = ldoh,
                           .H = H,
                           .N = N,
                           .K = K,
                           .T = T};
    gpu_run(GPU_OP_head_matmul, &run);
    kern_head_matmul(gpu.cpu, &q, x.host, ldx, ldh, T, out.host, H * ldoh, ldoh);
    /* terms are products of normal numbers: the sum of their magnitudes is about K */
    gpu_check("head_matmul", &out, 1e-6, REL * (double)K);
    gpu_drop_all();
}

static void test_head_matmul(void **state)
{
    (void)state;
    static const num_dtype types[] = {NUM_BF16, NUM_F16, NUM_F32};
    static const int64_t sizes[][4] = {{16, 128, 512, 3}, {16, 512, 128, 1}, {3, 17, 33, 9},
                                       {1, 1, 1, 1},      {5, 32, 24, 70},   {2, 40, 7, 8}};
    for (int t = 0; t < 3; t++)
        for (int j = 0; j < 6; j++)
            for (int lanes = 0; lanes < 4; lanes++)
                head_matmul(types[t], lanes & 1 ? GPU_BF16 : GPU_F32,
                            lanes & 2 ? GPU_BF16 : GPU_F32, (int)sizes[j][0], sizes[j][1],
                            sizes[j][2], sizes[j][3]);
}

/* ---- what is not run --------------------------------------------------------------------------
 */

static void test_nothing(void **state)
{
    (void)state;
    qtensor q;
    random_weight(&q, &schemes[3], 17, 64);
    held h = hold_any(&q, NULL);
    gpu_mat x = gpu_mat_random(GPU_F32, 1, 64, 64), y = gpu_mat_empty(GPU_F32, 0, 17, 17);
    gpu_act_run act = {.plan = {.a_type = NUM_NONE, .K = 64, .Kp = 64}, .x = x.x, .out = y.x.p};
    gpu_product p = {.w = h.w, .a = x.x.p, .ldy = 17, .y = y.x};
    gpu_experts ex = {.a = x.x.p, .E = 4, .N = 17, .K = 64, .Kp = 64, .y = y.x};
    gpu_embed em = {.w = h.w, .out = y.x};
    gpu_head_matmul heads = {.w_type = NUM_F32, .x = x.x, .out = y.x, .H = 1, .N = 1, .K = 1};
    gpu_run(GPU_OP_act_run, &act);
    gpu_run(GPU_OP_product, &p);
    gpu_run(GPU_OP_experts, &ex);
    gpu_run(GPU_OP_embed, &em);
    gpu_run(GPU_OP_head_matmul, &heads);
    gpu_check("no rows", &y, 0, 0);
    heads.T = 1;
    heads.w_type = NUM_I8;
    assert_non_null(strstr(gpu.api->launch[GPU_OP_head_matmul](&heads, gpu.stream), "neither f32"));
    p.M = 1;
    p.a = (const float *)x.x.p + 1;
    assert_non_null(strstr(gpu.api->launch[GPU_OP_product](&p, gpu.stream), "not aligned"));
    free_weight(&q);
}

static const gpu_op tested[] = {GPU_OP_act_run, GPU_OP_product, GPU_OP_experts, GPU_OP_embed,
                                GPU_OP_head_matmul};
static const struct CMUnitTest tests[] = {
    GPU_TEST(test_inputs),   GPU_TEST(test_rounding),    GPU_TEST(test_products),
    GPU_TEST(test_nan),      GPU_TEST(test_actorder),    GPU_TEST(test_forced_inputs),
    GPU_TEST(test_oddities), GPU_TEST(test_experts),     GPU_TEST(test_embed),
    GPU_TEST(test_codes),    GPU_TEST(test_head_matmul), GPU_TEST(test_nothing)};
GPU_MAIN(tests, tested)
