/* The tensor-core attention kernels (kern/cuda/prefill.h, decode.h) against the twin: steps of
 * ragged sequences over paged caches of GPU_KV_MMA order, pages in random order, poison wherever
 * nothing was stored, and gone pages where a window has passed. Both read the same rounded cache,
 * so that what differs is the rounding of q (f32 lanes) and of probabilities to 16 bits. */
#include "gpu_fixture.h"
#include "gpu_pages.h"
#include "kern/cuda/decode.h"
#include "kern/cuda/plain_attention.h"
#include "kern/cuda/prefill.h"
#include "kern/cuda/prefill90.h"
#include "kern/ops.h"

#define MAX_SEQS 40
typedef const char *refuse_fn(const gpu_attention *a);
typedef const char *prefill_fn(const gpu_attention *a, int least, void *stream);
typedef const char *decode_fn(const gpu_attention *a, void *stream);
static refuse_fn *prefill_refuses, *prefill90_refuses, *decode_refuses, *shared_refuses;
static prefill_fn *prefill_runs, *prefill90_runs;
static decode_fn *decode_runs;

typedef struct span {
    int rows, len; /* len 0 = no sequence */
} span;
typedef struct attn_case {
    const char *name;
    int H, Hk, D, type;
    gpu_type q, out;
    int window;
    float softcap;
    bool sinks, scales;
    span seqs[MAX_SEQS + 1]; /* ends with rows 0, len 0 twice, or at the end */
    int n;
} attn_case;

/* Which sequences of a step begin with the same pages: those of a group above 0 with so many of the
 * group's first sequence. */
typedef struct sharing {
    int group[MAX_SEQS], pages[MAX_SEQS];
    int groups; /* that shall be found */
} sharing;
static const sharing *shared_by;

/* A step on both sides. */
typedef struct step {
    attn_case c;
    gpu_attention gpu;
    gpu_mat q, out;
    kern_attn_args cpu;
    kern_kv_layer layer;
    kern_seq seqs[MAX_SEQS];
    int n_cpu, T, pages, max_pages;
    size_t work;
    uint8_t *mma; /* what the device's cache holds */
} step;

static float spread(float by)
{
    return (float)(2 * gpu_uniform() - 1) * by;
}
static float *spreads(int64_t n, float by)
{
    float *p = gpu_host((size_t)n * sizeof *p);
    for (int64_t i = 0; i < n; i++)
        p[i] = spread(by);
    return p;
}

/* Stores a sequence through the twin and puts its codes in their places. */
static void fill(step *s, const int32_t *pages, int len)
{
    kern_kv_layer *kv = &s->layer;
    int D = kv->D, n = kv->Hk * D;
    float *k = spreads((int64_t)len * n, 2), *v = spreads((int64_t)len * n, 1);
    int32_t *slot = gpu_host((size_t)len * sizeof *slot);
    for (int t = 0; t < len; t++)
        slot[t] = pages[t / KV_PLACE_TOKENS] * KV_PLACE_TOKENS + t % KV_PLACE_TOKENS;
    kern_kv_store(gpu.cpu, kv, k, n, v, n, slot, len);
    for (int t = 0; t < len; t++)
        gpu_kv_turn(kv, slot[t],
                    s->mma + (size_t)pages[t / KV_PLACE_TOKENS] * s->gpu.kv.page_stride);
}

static void make_cache(step *s)
{
    const attn_case *c = &s->c;
    size_t bytes = kern_kv_page_bytes((kern_kv_type)c->type, c->Hk, c->D, 0, KV_PLACE_TOKENS);
    s->layer = (kern_kv_layer){.type = (kern_kv_type)c->type,
                               .Hk = c->Hk,
                               .D = c->D,
                               .page_tokens = KV_PLACE_TOKENS,
                               .page_stride = bytes};
    s->layer.base = gpu_host(bytes * (size_t)s->pages);
    s->gpu.kv = (gpu_kv){.type = c->type,
                         .order = GPU_KV_MMA,
                         .Hk = c->Hk,
                         .D = c->D,
                         .page_tokens = KV_PLACE_TOKENS,
                         .page_stride = bytes + 64};
    s->mma = gpu_host((bytes + 64) * (size_t)s->pages);
    if (c->scales) {
        float *scale = spreads(2 * c->Hk, 1);
        for (int i = 0; i < 2 * c->Hk; i++)
            scale[i] = 0.03f + 0.02f * fabsf(scale[i]);
        s->layer.k_scale = scale, s->layer.v_scale = scale + c->Hk;
        s->gpu.kv.k_scale = gpu_up_f32(scale, c->Hk);
        s->gpu.kv.v_scale = gpu_up_f32(scale + c->Hk, c->Hk);
    }
}

static step make(const attn_case *c)
{
    step s = {.c = *c};
    int32_t row0[MAX_SEQS], rows[MAX_SEQS], lens[MAX_SEQS], max_rows = 0, max_len = 0;
    for (int i = 0; i < c->n; i++) {
        int pages = (c->seqs[i].len + KV_PLACE_TOKENS - 1) / KV_PLACE_TOKENS;
        row0[i] = s.T + (i == 1); /* a row between that is nobody's */
        rows[i] = c->seqs[i].rows, lens[i] = c->seqs[i].len;
        s.T = row0[i] + rows[i];
        s.pages += pages;
        s.max_pages = pages > s.max_pages ? pages : s.max_pages;
        max_rows = rows[i] > max_rows ? rows[i] : max_rows;
        max_len = lens[i] > max_len ? lens[i] : max_len;
    }
    s.T += 3;
    s.pages += 2;
    make_cache(&s);
    int32_t *free_pages = gpu_host((size_t)s.pages * sizeof *free_pages), next = 0;
    for (int i = 0; i < s.pages; i++) {
        int j = (int)(gpu_uniform() * (i + 1));
        free_pages[i] = free_pages[j], free_pages[j] = i;
    }
    int32_t *table = gpu_host((size_t)(c->n * s.max_pages) * sizeof *table),
            *row_seq = gpu_host((size_t)s.T * sizeof *row_seq); /* -1 */
    for (int i = 0; i < c->n; i++) {
        int32_t *mine = table + (size_t)i * (size_t)s.max_pages;
        int pages = (lens[i] + KV_PLACE_TOKENS - 1) / KV_PLACE_TOKENS;
        memcpy(mine, free_pages + next, (size_t)pages * sizeof *mine);
        next += pages;
        for (int j = 0; shared_by && shared_by->group[i] && j < i; j++)
            if (shared_by->group[j] == shared_by->group[i]) {
                memcpy(mine, table + (size_t)j * (size_t)s.max_pages,
                       (size_t)shared_by->pages[i] * sizeof *mine);
                break;
            }
        fill(&s, mine, lens[i]);
        int seen = lens[i] - rows[i] - c->window + 1; /* the first key of the first row */
        for (int p = 0; c->window && p < pages && (p + 1) * KV_PLACE_TOKENS <= seen; p++)
            mine[p] = -1;
        for (int r = 0; r < rows[i] && lens[i]; r++)
            row_seq[row0[i] + r] = i;
        if (lens[i]) s.seqs[s.n_cpu++] = (kern_seq){row0[i], rows[i], lens[i], mine};
    }
    s.gpu.kv.base = gpu_up(s.mma, s.gpu.kv.page_stride * (size_t)s.pages);
    int64_t ld = (int64_t)c->H * c->D, ldq = ld + 16, ldo = ld + 8;
    s.q = gpu_mat_of(c->q, spreads(s.T * ld, 2), ld, s.T, ld, ldq);
    s.out = gpu_mat_empty(c->out, s.T, ld, ldo);
    const float *sinks = c->sinks ? spreads(c->H, 3) : NULL;
    s.cpu = (kern_attn_args){s.q.host,  ldq,        s.out.host, ldo,  c->H, 0.09f,
                             c->window, c->softcap, sinks,      NULL, NULL, s.n_cpu};
    s.gpu.q = s.q.x, s.gpu.out = s.out.x, s.gpu.ldq = ldq, s.gpu.ldo = ldo, s.gpu.H = c->H;
    s.gpu.window = c->window, s.gpu.scale = 0.09f, s.gpu.softcap = c->softcap;
    s.gpu.sinks = gpu_up_f32(sinks, c->H);
    s.gpu.seqs = (gpu_seqs){gpu_up_i32(row0, c->n),
                            gpu_up_i32(rows, c->n),
                            gpu_up_i32(lens, c->n),
                            gpu_up_i32(table, (int64_t)c->n * s.max_pages),
                            gpu_up_i32(row_seq, s.T),
                            c->n,
                            s.max_pages,
                            s.T,
                            max_rows,
                            (int)kern_len_bucket(max_len),
                            0,
                            NULL,
                            NULL};
    s.work = gpu.api->attention_work(s.T, c->H, c->D);
    assert_true(s.work > ATTENTION_COUNTERS * 4);
    s.gpu.work = gpu_empty(s.work);
    gpu_ok("zero", gpu.api->zero(s.gpu.work, (size_t)ATTENTION_COUNTERS * 4, gpu.stream));
    return s;
}

/* Whoever counts in the work memory leaves zeros behind. */
static void check_counters(const step *s)
{
    uint8_t *zeros = gpu_host((size_t)ATTENTION_COUNTERS * 4);
    memset(zeros, 0, (size_t)ATTENTION_COUNTERS * 4);
    gpu_check_bytes(s->c.name, s->gpu.work, zeros, (size_t)ATTENTION_COUNTERS * 4);
}

/* Rows of sequences that have least to most of them agree, those of other sequences are untouched,
 * and rows of no sequence are zero. */
static void check(step *s, int least, int most, const char *why)
{
    const attn_case *c = &s->c;
    enum { NOBODY, OTHER, MINE };
    if (why) fail_msg("%s: %s", c->name, why);
    gpu_sync();
    check_counters(s);
    s->cpu.kv = &s->layer, s->cpu.seqs = s->seqs;
    kern_attention(gpu.cpu, &s->cpu);
    size_t lane = gpu_lane_bytes(c->out);
    int64_t n = s->out.cols, lanes = gpu_mat_lanes(&s->out);
    char *raw = gpu_host((size_t)lanes * lane);
    uint8_t *whose = memset(gpu_host((size_t)s->T), NOBODY, (size_t)s->T);
    for (int i = 0; i < s->n_cpu; i++) {
        int rows = s->seqs[i].n_rows;
        memset(whose + s->seqs[i].row0, rows >= least && rows <= most ? MINE : OTHER, (size_t)rows);
    }
    gpu_read(raw, s->out.mem, (size_t)lanes * lane);
    double d2 = 0, r2 = 0;
    for (int64_t i = 0; i < lanes; i++) {
        int64_t at = i - GPU_GUARD, row = at < 0 ? -1 : at / s->out.ld, col = at % s->out.ld;
        uint32_t u = 0, poison = lane == 4 ? 0xffffffffu : 0xffffu;
        memcpy(&u, raw + (size_t)i * lane, lane);
        bool inside = row >= 0 && row < s->T && col < n;
        if (!inside || whose[row] != MINE) {
            if (u != (inside && whose[row] == NOBODY ? 0 : poison))
                fail_msg("%s: row %d lane %d is %x", c->name, (int)row, (int)col, u);
            continue;
        }
        float got = num_bf16_to_f32((uint16_t)u), want = s->out.host[row * s->out.ld + col];
        if (lane == 4) memcpy(&got, &u, 4);
        double d = (double)got - (double)want;
        if (!(fabs(d) < 0.012))
            fail_msg("%s: row %d head %d lane %d: %g, expected %g", c->name, (int)row,
                     (int)col / c->D, (int)col % c->D, (double)got, (double)want);
        d2 += d * d, r2 += (double)want * (double)want;
    }
    if (r2 > 0) printf("%-28s relative error %.1e\n", c->name, sqrt(d2 / r2));
    if (!(d2 <= 5e-3 * 5e-3 * r2)) fail_msg("%s: relative error %g", c->name, sqrt(d2 / r2));
    gpu_drop_all();
}

/* clang-format off */
static const attn_case many_rows[] = {
    {"bf16 ragged", 4, 2, 64, KV_BF16, GPU_BF16, GPU_BF16, 0, 0, false, false,
     {{1, 1}, {5, 5}, {33, 33}, {64, 64}, {0, 0}, {130, 130}, {31, 31}, {65, 65}}, 8},
    {"bf16 128 chunked", 8, 2, 128, KV_BF16, GPU_BF16, GPU_F32, 0, 0, false, false,
     {{7, 100}, {40, 129}, {1, 64}, {1, 97}, {3, 3}}, 5},
    {"bf16 128 f32 q", 3, 3, 128, KV_BF16, GPU_F32, GPU_F32, 0, 0, false, false, {{70, 75}, {150, 150}}, 2},
    {"bf16 window", 4, 2, 128, KV_BF16, GPU_BF16, GPU_F32, 40, 0, false, false,
     {{100, 100}, {9, 200}, {1, 161}, {70, 300}}, 4},
    {"bf16 window of one", 2, 1, 64, KV_BF16, GPU_BF16, GPU_F32, 1, 0, false, false, {{70, 100}}, 1},
    {"bf16 sinks, softcap", 8, 1, 64, KV_BF16, GPU_BF16, GPU_F32, 0, 1.5f, true, false, {{20, 20}, {5, 70}}, 2},
    {"bf16 sinks", 8, 1, 64, KV_BF16, GPU_BF16, GPU_BF16, 33, 0, true, false, {{20, 20}, {5, 70}}, 2},
    {"bf16 96", 7, 1, 96, KV_BF16, GPU_BF16, GPU_F32, 0, 0, false, false, {{30, 66}}, 1},
    {"bf16 256", 4, 2, 256, KV_BF16, GPU_BF16, GPU_F32, 50, 0, false, false, {{80, 100}}, 1},
    {"fp8 64", 4, 2, 64, KV_FP8_E4M3, GPU_BF16, GPU_BF16, 0, 0, false, true, {{66, 66}, {2, 40}}, 2},
    {"fp8 96", 2, 1, 96, KV_FP8_E4M3, GPU_F32, GPU_F32, 0, 0, false, false, {{66, 66}, {2, 40}}, 2},
    {"fp8 128", 8, 2, 128, KV_FP8_E4M3, GPU_BF16, GPU_F32, 0, 0, false, true, {{50, 131}, {1, 1}, {0, 0}, {90, 90}}, 4},
    {"fp8 128 window, sinks", 4, 2, 128, KV_FP8_E4M3, GPU_F32, GPU_F32, 64, 0, true, true, {{50, 200}}, 1},
    {"fp8 256 softcap", 2, 1, 256, KV_FP8_E4M3, GPU_BF16, GPU_F32, 0, 2, false, true, {{70, 70}}, 1},
    {"forty sequences", 2, 2, 64, KV_BF16, GPU_BF16, GPU_F32, 0, 0, false, false,
     {{1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3},
      {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3},
      {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {1, 3}, {140, 140}, {1, 3}, {1, 3}, {0, 0}, {2, 66}, {1, 3}}, 40},
};
/* clang-format on */

/* clang-format off */
static const attn_case one_row[] = {
    {"one bf16", 8, 2, 128, KV_BF16, GPU_BF16, GPU_BF16, 0, 0, false, false, {{1, 1}, {0, 0}, {1, 32}, {1, 33}, {1, 700}}, 5},
    {"one bf16 64, many runs", 8, 2, 64, KV_BF16, GPU_F32, GPU_F32, 0, 0, false, false, {{1, 2300}}, 1},
    {"one bf16 64, runs", 4, 2, 64, KV_BF16, GPU_BF16, GPU_F32, 0, 0, false, false, {{1, 900}, {1, 1}, {1, 300}}, 3},
    {"one bf16 96", 6, 2, 96, KV_BF16, GPU_BF16, GPU_F32, 0, 0, false, false, {{1, 600}, {1, 31}}, 2},
    {"one bf16 256", 6, 1, 256, KV_BF16, GPU_BF16, GPU_F32, 0, 0, false, false, {{1, 300}, {1, 65}}, 2},
    {"one bf16 window", 8, 2, 128, KV_BF16, GPU_BF16, GPU_BF16, 77, 0, false, false, {{1, 20}, {1, 77}, {1, 78}, {1, 500}, {1, 96}}, 5},
    {"one bf16 window of one", 2, 1, 64, KV_BF16, GPU_BF16, GPU_F32, 1, 0, false, false, {{1, 100}, {1, 1}}, 2},
    {"one bf16 long window, sinks", 8, 1, 64, KV_BF16, GPU_BF16, GPU_F32, 600, 0, true, false, {{1, 900}, {1, 3}, {1, 640}}, 3},
    {"one bf16 sinks, softcap", 8, 1, 64, KV_BF16, GPU_BF16, GPU_F32, 0, 1.5f, true, false, {{1, 20}, {1, 570}}, 2},
    {"one bf16, 12 a head", 24, 2, 64, KV_BF16, GPU_BF16, GPU_F32, 0, 0, true, false, {{1, 520}, {1, 40}}, 2},
    {"one bf16, 9 a head", 9, 1, 64, KV_BF16, GPU_BF16, GPU_F32, 0, 0, false, false, {{1, 1100}}, 1},
    {"one fp8", 8, 2, 128, KV_FP8_E4M3, GPU_BF16, GPU_BF16, 0, 0, false, true, {{1, 500}, {1, 1}, {0, 0}, {1, 90}}, 4},
    {"one fp8 64", 7, 1, 64, KV_FP8_E4M3, GPU_F32, GPU_F32, 0, 0, true, true, {{1, 1000}, {1, 1}}, 2},
    {"one fp8 96", 2, 1, 96, KV_FP8_E4M3, GPU_F32, GPU_F32, 100, 0, false, false, {{1, 366}, {1, 40}}, 2},
    {"one fp8 256 softcap", 2, 1, 256, KV_FP8_E4M3, GPU_BF16, GPU_F32, 0, 2, false, true, {{1, 170}}, 1},
    {"one e5m2", 8, 2, 128, KV_FP8_E5M2, GPU_BF16, GPU_BF16, 0, 0, false, true, {{1, 500}, {1, 1}, {0, 0}, {1, 90}}, 4},
    {"one e5m2 64, sinks", 7, 1, 64, KV_FP8_E5M2, GPU_F32, GPU_F32, 0, 0, true, false, {{1, 300}, {1, 33}}, 2},
    {"one int8", 8, 2, 128, KV_INT8, GPU_BF16, GPU_BF16, 0, 0, false, false, {{1, 500}, {1, 1}, {0, 0}, {1, 90}, {1, 64}}, 5},
    {"one int8 64, many runs", 7, 1, 64, KV_INT8, GPU_F32, GPU_F32, 0, 0, true, false, {{1, 2300}, {1, 31}}, 2},
    {"one int8 96 window", 2, 1, 96, KV_INT8, GPU_F32, GPU_F32, 100, 0, false, false, {{1, 366}, {1, 40}}, 2},
    {"one int8 256 softcap", 12, 1, 256, KV_INT8, GPU_BF16, GPU_F32, 0, 2, false, false, {{1, 170}}, 1},
    {"one fp4", 8, 2, 128, KV_FP4, GPU_BF16, GPU_BF16, 0, 0, false, false, {{1, 500}, {1, 1}, {0, 0}, {1, 90}, {1, 64}}, 5},
    {"one fp4 64, many runs", 7, 1, 64, KV_FP4, GPU_F32, GPU_F32, 0, 0, true, false, {{1, 2300}, {1, 31}}, 2},
    {"one fp4 96 window", 2, 1, 96, KV_FP4, GPU_F32, GPU_F32, 100, 0, false, false, {{1, 366}, {1, 40}}, 2},
    {"one fp4 256 softcap", 12, 1, 256, KV_FP4, GPU_BF16, GPU_F32, 0, 2, false, false, {{1, 170}}, 1},
};
/* For tiles of 128 rows and 128 keys: more of either, ends at many places of a page. */
static const attn_case many_tiles[] = {
    {"tiles bf16", 8, 2, 128, KV_BF16, GPU_BF16, GPU_BF16, 0, 0, false, false, {{150, 150}, {40, 700}, {0, 0}, {33, 65}, {2, 513}}, 5},
    {"tiles bf16, one head a group", 2, 2, 128, KV_BF16, GPU_F32, GPU_F32, 0, 0, false, false, {{300, 300}, {130, 257}, {5, 128}}, 3},
    {"tiles bf16, seven a group", 7, 1, 128, KV_BF16, GPU_BF16, GPU_F32, 0, 0, true, false, {{90, 411}, {31, 31}}, 2},
    {"tiles bf16 64", 6, 2, 64, KV_BF16, GPU_BF16, GPU_F32, 0, 0, false, false, {{140, 398}, {64, 64}, {3, 290}}, 3},
    {"tiles fp8", 8, 2, 128, KV_FP8_E4M3, GPU_BF16, GPU_BF16, 0, 0, false, true, {{150, 150}, {40, 700}, {0, 0}, {33, 65}, {2, 513}}, 5},
    {"tiles fp8, two a group", 2, 1, 128, KV_FP8_E4M3, GPU_F32, GPU_F32, 0, 0, true, false, {{200, 200}, {130, 257}, {5, 128}}, 3},
    {"tiles fp8 64", 6, 2, 64, KV_FP8_E4M3, GPU_BF16, GPU_F32, 0, 0, false, true, {{140, 398}, {64, 64}, {3, 290}}, 3},
};
static const attn_case mixed_rows[] = {
    {"mixed bf16", 8, 2, 128, KV_BF16, GPU_BF16, GPU_BF16, 0, 0, false, false, {{1, 700}, {5, 5}, {0, 0}, {1, 33}, {40, 129}, {2, 2}}, 6},
    {"mixed fp8, window", 6, 2, 64, KV_FP8_E4M3, GPU_F32, GPU_F32, 50, 0, true, true, {{70, 200}, {1, 33}, {1, 300}}, 3},
    {"mixed, no kernel for D", 4, 2, 32, KV_BF16, GPU_BF16, GPU_F32, 0, 0, false, false, {{7, 70}, {1, 33}, {1, 90}}, 3},
    {"mixed int8", 4, 2, 64, KV_INT8, GPU_BF16, GPU_F32, 0, 0, false, false, {{7, 70}, {1, 33}, {1, 90}}, 3},
    {"mixed fp4", 4, 2, 64, KV_FP4, GPU_BF16, GPU_F32, 0, 0, false, false, {{7, 70}, {1, 33}, {1, 90}}, 3},
    {"mixed, no kernel for type", 4, 2, 64, KV_FP8_E5M2, GPU_BF16, GPU_F32, 0, 0, false, true, {{7, 70}, {1, 33}, {1, 90}}, 3},
};
/* clang-format on */
#define N_OF(cases) (sizeof(cases) / sizeof *(cases))

static void prefill(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_OF(many_rows); i++) {
        step s = make(&many_rows[i]);
        const char *no = prefill_refuses(&s.gpu);
        if (no) fail_msg("%s: refused: %s", many_rows[i].name, no);
        check(&s, 1, 1 << 30, prefill_runs(&s.gpu, 1, gpu.stream));
    }
    for (size_t i = 0; i < 2; i++) {
        step s = make(&mixed_rows[i]);
        check(&s, 2, 1 << 30, prefill_runs(&s.gpu, 2, gpu.stream));
    }
}

/* The same on wgmma, where it is made for them. */
static void prefill90_of(const attn_case *c, size_t n, int least, size_t want)
{
    size_t taken = 0;
    for (size_t i = 0; i < n; i++) {
        step s = make(&c[i]);
        const char *no = prefill90_refuses(&s.gpu);
        if (no)
            gpu_drop_all();
        else
            check(&s, least, 1 << 30, prefill90_runs(&s.gpu, least, gpu.stream)), taken++;
    }
    assert_int_equal(taken, want);
}
static void prefill90(void **state)
{
    (void)state;
    prefill90_of(many_tiles, N_OF(many_tiles), 1, N_OF(many_tiles));
    prefill90_of(many_rows, N_OF(many_rows), 1, 6);
    prefill90_of(mixed_rows, 1, 2, 1);
}
static int below(int n)
{
    int i = (int)(gpu_uniform() * n);
    return i < n ? i : n - 1;
}
/* Lengths that nobody thought of. */
static void prefill90_random(void **state)
{
    (void)state;
    for (int i = 0; i < 24; i++) {
        static const int groups[] = {1, 2, 3, 4, 5, 8};
        attn_case c = {.name = "random", .Hk = 1 + below(2), .D = below(3) ? 64 : 128};
        c.H = c.Hk * groups[below(6)];
        c.type = below(2) ? KV_BF16 : KV_FP8_E4M3;
        c.q = below(2) ? GPU_BF16 : GPU_F32, c.out = below(2) ? GPU_BF16 : GPU_F32;
        c.sinks = !below(3), c.scales = c.type == KV_FP8_E4M3 && below(2);
        c.n = 1 + below(4);
        for (int k = 0; k < c.n; k++) {
            int len = below(5) ? 1 + below(below(3) ? 150 : 500) : 0;
            c.seqs[k] = (span){len ? 1 + below(len < 140 ? len : 140) : 0, len};
        }
        prefill90_of(&c, 1, 1 + below(2), 1);
    }
}

static void decode(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_OF(one_row) + 2; i++) {
        const attn_case *c = i < N_OF(one_row) ? &one_row[i] : &mixed_rows[i - N_OF(one_row)];
        step s = make(c);
        const char *no = decode_refuses(&s.gpu);
        if (no) fail_msg("%s: refused: %s", c->name, no);
        check(&s, 1, 1, decode_runs(&s.gpu, gpu.stream));
    }
}

#define SHARED_LEAST 8 /* pages */

typedef struct found {
    gpu_group groups[MAX_SEQS];
    int32_t shared[MAX_SEQS];
    int n;
} found;
static void find_group(void *arg, const int32_t *seq, int n, int pages)
{
    found *f = arg;
    gpu_group *g = &f->groups[f->n++];
    g->pages = pages, g->n = n;
    for (int i = 0; i < n; i++)
        g->seq[i] = seq[i], f->shared[seq[i]] = pages;
}

/* clang-format off */
static const struct {
    attn_case c;
    sharing by;
} shared_rows[] = {
    {{"shared bf16", 8, 2, 128, KV_BF16, GPU_BF16, GPU_BF16, 0, 0, false, false,
      {{1, 700}, {1, 600}, {0, 0}, {1, 545}, {1, 33}, {1, 576}}, 6},
     {{1, 1, 0, 1, 0, 1}, {0, 17, 0, 17, 0, 17}, 1}},
    {{"shared bf16, two groups", 6, 2, 64, KV_BF16, GPU_F32, GPU_F32, 0, 0, true, false,
      {{1, 300}, {1, 500}, {1, 400}, {1, 800}, {1, 801}, {1, 290}}, 6},
     {{1, 2, 1, 2, 2, 0}, {0, 0, 9, 15, 12, 0}, 2}},
    {{"shared by nobody", 4, 2, 64, KV_BF16, GPU_BF16, GPU_F32, 0, 0, false, false, {{1, 300}, {1, 500}}, 2}, {{0}, {0}, 0}},
    {{"shared, wide groups", 2, 1, 64, KV_FP8_E4M3, GPU_BF16, GPU_F32, 0, 1.5f, false, true,
      {{1, 300}, {1, 310}, {1, 320}, {1, 330}, {1, 257}, {1, 400}, {1, 300}, {1, 310}, {1, 320}, {1, 330}, {1, 340}, {1, 400},
       {1, 300}, {1, 310}, {1, 320}, {1, 330}, {1, 340}, {1, 400}, {1, 300}}, 19},
     {{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8}, 2}},
    {{"shared, eight a head", 8, 1, 128, KV_INT8, GPU_BF16, GPU_F32, 0, 0, true, false,
      {{1, 300}, {1, 310}, {1, 320}, {1, 330}, {1, 340}, {1, 400}, {1, 300}, {1, 310}, {1, 320}, {1, 330}}, 10},
     {{1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {0, 9, 9, 9, 9, 9, 9, 9, 9, 9}, 1}},
    {{"shared, eleven a head", 11, 1, 96, KV_FP4, GPU_F32, GPU_F32, 0, 0, false, false, {{1, 700}, {1, 610}, {1, 620}}, 3},
     {{1, 1, 1}, {0, 19, 19}, 1}},
    {{"shared int8 96, one a head", 3, 3, 96, KV_INT8, GPU_F32, GPU_F32, 0, 0, false, false, {{1, 700}, {1, 610}, {1, 620}}, 3},
     {{1, 1, 1}, {0, 19, 19}, 1}},
    {{"shared fp4 256", 5, 1, 256, KV_FP4, GPU_BF16, GPU_F32, 0, 2, false, false, {{1, 290}, {1, 300}, {1, 310}}, 3},
     {{1, 1, 1}, {0, 9, 9}, 1}},
    {{"shared e5m2, wide window", 4, 1, 64, KV_FP8_E5M2, GPU_BF16, GPU_F32, 4096, 0, false, true, {{1, 290}, {1, 300}, {1, 310}}, 3},
     {{1, 1, 1}, {0, 9, 9}, 1}},
    {{"shared, narrow window", 4, 1, 64, KV_BF16, GPU_BF16, GPU_F32, 280, 0, false, false, {{1, 290}, {1, 300}, {1, 310}}, 3},
     {{1, 1, 1}, {0, 9, 9}, 1}},
    {{"shared, rows of a prompt", 4, 2, 64, KV_BF16, GPU_BF16, GPU_F32, 0, 0, false, false, {{1, 290}, {1, 300}, {5, 310}, {1, 310}}, 4},
     {{1, 1, 1, 1}, {0, 9, 9, 9}, 1}},
};
/* clang-format on */

/* Pages of several sequences, as a step that is replayed has them: with room for other groups. */
static void shared(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_OF(shared_rows); i++)
        for (int operator= 0; operator<2; operator++) {
            const attn_case *c = &shared_rows[i].c;
            found f = {0};
            kern_seq seqs[MAX_SEQS] = {0};
            shared_by = &shared_rows[i].by;
            step s = make(c);
            shared_by = NULL;
            for (int k = 0, n = 0; k < c->n; k++)
                if (c->seqs[k].len) seqs[k] = s.seqs[n++];
            int n = kern_share(seqs, c->n, KV_PLACE_TOKENS, SHARED_LEAST, GPU_GROUP_SEQS,
                               find_group, &f);
            assert_int_equal(n, f.n);
            assert_int_equal(n, shared_rows[i].by.groups);
            s.gpu.seqs.n_groups = n ? n + 2 : 0;
            s.gpu.seqs.groups = gpu_up(f.groups, sizeof f.groups);
            s.gpu.seqs.shared = gpu_up_i32(f.shared, c->n);
            bool narrow = c->window && c->window < s.gpu.seqs.max_len;
            assert_int_equal(!shared_refuses(&s.gpu), n && !narrow);
            if (!operator) {
                check(&s, 1, 1, decode_runs(&s.gpu, gpu.stream));
                continue;
            }
            gpu_run(GPU_OP_attention, &s.gpu);
            check(&s, 1, 1 << 30, NULL);
        }
}

/* Groups: the ones that save most, whatever their order; none of few pages or of the last. */
static void groups(void **state)
{
    (void)state;
    enum { N = 9 };
    int32_t pages[N][40];
    kern_seq seqs[N];
    static const int from[N] = {0, 0, 0, 0, 4, 4, 0, 7, 7},
                     same[N] = {0, 12, 30, 12, 0, 20, 7, 0, 39},
                     lens[N] = {1280, 700, 1000, 1280, 660, 1280, 900, 300, 200};
    for (int i = 0; i < N; i++) {
        for (int p = 0; p < 40; p++)
            pages[i][p] = p < same[i] ? pages[from[i]][p] : 100 * i + p;
        seqs[i] = (kern_seq){i, 1, lens[i], pages[i]};
    }
    found f = {0};
    /* 0 and 2 have thirty, with 1 and 3 twelve: two pairs save more than one group of four. 8 has
     * six of 7 but its last. */
    assert_int_equal(kern_share(seqs, N, 32, SHARED_LEAST, GPU_GROUP_SEQS, find_group, &f), 3);
    static const int32_t want[N] = {30, 12, 30, 12, 20, 20, 0, 0, 0};
    for (int i = 0; i < N; i++)
        assert_int_equal(f.shared[i], want[i]);
    seqs[4].n_rows = 2; /* a prompt */
    memset(&f, 0, sizeof f);
    assert_int_equal(kern_share(seqs, N, 32, SHARED_LEAST, 2, find_group, &f), 2);
    assert_int_equal(f.shared[5], 0);
    assert_int_equal(kern_share(seqs, 1, 32, SHARED_LEAST, GPU_GROUP_SEQS, NULL, NULL), 0);
}

/* The operator, whatever kernels it takes. */
static void chosen(const attn_case *c, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        step s = make(&c[i]);
        gpu_run(GPU_OP_attention, &s.gpu);
        check(&s, 1, 1 << 30, NULL);
    }
}
static void operator_of(void **state)
{
    (void)state;
    chosen(many_rows, N_OF(many_rows));
    chosen(many_tiles, N_OF(many_tiles));
    chosen(one_row, N_OF(one_row));
    chosen(mixed_rows, N_OF(mixed_rows));
}

static void *symbol(const char *name)
{
    void *p = dlsym(gpu.lib, name);
    if (!p) {
        fprintf(stderr, "the plug-in lacks %s\n", name);
        exit(1);
    }
    return p;
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        GPU_TEST(prefill), GPU_TEST(prefill90), GPU_TEST(prefill90_random), GPU_TEST(decode),
        GPU_TEST(shared),  GPU_TEST(groups),    GPU_TEST(operator_of)};
    static const gpu_op tested[] = {GPU_OP_attention};
    gpu_begin(argc, argv);
    *(void **)&prefill_refuses = symbol("prefill_refuse");
    *(void **)&prefill_runs = symbol("prefill_run");
    *(void **)&prefill90_refuses = symbol("prefill90_refuse");
    *(void **)&prefill90_runs = symbol("prefill90_run");
    *(void **)&decode_refuses = symbol("decode_refuse");
    *(void **)&shared_refuses = symbol("decode_shared_refuse");
    *(void **)&decode_runs = symbol("decode_run");
    return gpu_end(cmocka_run_group_tests(tests, NULL, NULL), tested, 1);
}
