/* What rows.cu and its plain twin share, on the host: which shapes and calls the kernel is made
 * for, the shared memory of a plan, the plan of a shape. */
#ifndef KERN_CUDA_ROWS_PLAN_H
#define KERN_CUDA_ROWS_PLAN_H
#include <stdio.h>
#include "kern/cuda/rows.h"

#define ROWS_BOX        32
#define ROWS_CHUNK      128 /* bytes */
#define ROWS_BOX_BYTES  (ROWS_BOX * ROWS_CHUNK)
#define ROWS_PART_ROW   36 /* floats: a token's sums of a warp; banks of tokens 2c lie 8 apart */
#define ROWS_SMEM_LIMIT (227 * 1024)

/* ---- shared memory ------------------------------------------------------------------------------
 */
struct rows_mem { /* bytes from the start of shared memory */
    uint32_t w, x, parts, far_sums, w_full, w_empty, x_full, x_empty, far_full, end;
    uint32_t w_stage, x_slot, x_scales; /* the last: inside a slot */
};

/* x_cols: columns of a stage. */
static inline rows_mem rows_layout(int mt, int x_cols, int block, int groups, int chunks, int split,
                                   int ws, int xs)
{
    rows_mem m;
    const int tokens = mt < 8 ? mt : 8, warps = 2 * chunks * groups;
    m.w_stage = (uint32_t)(chunks * groups * ROWS_BOX_BYTES);
    m.x_scales = (uint32_t)(x_cols / 64 * mt * 128);
    m.x_slot = (m.x_scales + (uint32_t)(block ? chunks * mt * 4 : 0) + 127) / 128 * 128;
    m.w = 0;
    m.x = m.w + (uint32_t)ws * m.w_stage;
    m.parts = m.x + (uint32_t)xs * m.x_slot;
    m.far_sums = m.parts + (uint32_t)(2 * warps * tokens * ROWS_PART_ROW * 4);
    m.w_full = m.far_sums +
               (uint32_t)(2 * (split - 1) * (groups * ROWS_BOX / split) * tokens * 4 + 7) / 8 * 8;
    m.w_empty = m.w_full + (uint32_t)ws * 8;
    m.x_full = m.w_empty + (uint32_t)ws * 8;
    m.x_empty = m.x_full + (uint32_t)xs * 8;
    m.far_full = m.x_empty + (uint32_t)xs * 8;
    m.end = m.far_full + 16;
    return m;
}

/* ---- plans --------------------------------------------------------------------------------------
 */
static inline int rows_over(int n, int by)
{
    return (n + by - 1) / by;
}
static inline int rows_element(rows_format f)
{
    return f == ROWS_BF16 ? 2 : 1;
}
/* Tokens that the kernel for M is made for; most warps that multiply in it. */
static inline int rows_tokens(int M)
{
    return M <= 1 ? 1 : M <= 8 ? 8 : M <= 16 ? 16 : M <= 32 ? 32 : 64;
}
static constexpr int rows_most_warps(int tokens)
{
    return tokens <= 8 ? 16 : tokens <= 32 ? 14 : 10;
}

typedef struct rows_fit { /* what a plan's shared memory holds; ws < 2: it does not fit */
    int ws, xs, resident;
    rows_mem mem;
} rows_fit;

/* x stays where that leaves enough room for the stream of W. */
static inline rows_fit rows_fit_of(rows_format f, rows_plan p, int K, int M)
{
    const int cols = ROWS_CHUNK / rows_element(f) * p.chunks, mt = rows_tokens(M);
    const int each = rows_over(rows_over(K, ROWS_CHUNK / rows_element(f)), p.split),
              stages = rows_over(each, p.chunks);
    rows_mem m = rows_layout(mt, cols, f == ROWS_E4M3, p.groups, p.chunks, p.split, 0, 0);
    const int w = (int)m.w_stage + 16, x = (int)m.x_slot + 16, room = ROWS_SMEM_LIMIT - (int)m.end;
    rows_fit r = {0, 0, 0, m};
    const int64_t kept = (int64_t)stages * x;
    r.resident = kept <= room - (w * 3 > 80 * 1024 ? w * 3 : 80 * 1024);
    r.ws = r.resident ? (room - (int)kept) / w : room / (w + x);
    if (r.ws < 0) r.ws = 0;
    if (r.ws > 16) r.ws = 16;
    r.xs = r.resident ? stages : r.ws;
    r.mem = rows_layout(mt, cols, f == ROWS_E4M3, p.groups, p.chunks, p.split, r.ws, r.xs);
    return r;
}

static inline bool rows_plan_fits(rows_format f, rows_plan p, int K, int M)
{
    if (M < 1 || M > ROWS_MAX_M || p.groups < 1 || p.chunks < 1 || p.groups > 16 || p.chunks > 16)
        return false;
    if (p.split != 1 && p.split != 2 && p.split != 4 && p.split != 8) return false;
    const int all = rows_over(K, ROWS_CHUNK / rows_element(f));
    if ((p.split - 1) * rows_over(all, p.split) >= all) return false; /* a block without work */
    return 2 * p.chunks * p.groups <= rows_most_warps(rows_tokens(M)) &&
           rows_fit_of(f, p, K, M).ws >= 2;
}

/* Bytes that the busiest multiprocessor takes in, x from the L2 counted half; with a charge for
 * clusters and for rows read in pieces of 128 bytes. The chip holds 132 blocks of 1, 66 clusters of
 * 2, 30 of 4, 15 of 8. */
static inline double rows_cost(rows_format f, rows_plan p, int N, int K, int M)
{
    static const int slots[] = {0, 132, 66, 0, 30, 0, 0, 0, 15};
    static const double charge[] = {0, 1.0, 1.1, 0, 1.2, 0, 0, 0, 1.4};
    const int tiles = rows_over(N, p.groups * ROWS_BOX), rounds = rows_over(tiles, slots[p.split]);
    const int each = rows_over(rows_over(K, ROWS_CHUNK / rows_element(f)), p.split);
    const double w = (double)rounds * p.groups * ROWS_BOX * each * ROWS_CHUNK;
    const double x = (double)M * each * (ROWS_CHUNK / rows_element(f)) * 2;
    return (w + 0.5 * x * (rows_fit_of(f, p, K, M).resident ? 1 : rounds)) * charge[p.split] *
           (p.chunks > 1 ? 1.0 : 1.03);
}

static inline rows_plan rows_plan_for(rows_format f, int N, int K, int M)
{
    rows_plan best = {0, 0, 0};
    double least = 0;
    for (int split = 1; split <= 8; split *= 2)
        for (int groups = 1; groups <= 7; groups++)
            for (int chunks = 4; chunks >= 1; chunks /= 2) {
                const rows_plan p = {groups, chunks, split};
                if (!rows_plan_fits(f, p, K, M)) continue;
                const double c = rows_cost(f, p, N, K, M);
                if (best.groups == 0 || c < least) best = p, least = c;
                break; /* longer pieces of a row are better */
            }
    return best;
}

static inline rows_plan rows_plan_of(const rows_call *c)
{
    return c->plan.groups ? c->plan : rows_plan_for(c->w->format, c->w->N, c->w->K, c->M);
}

/* ---- what is taken ------------------------------------------------------------------------------
 */
static inline const char *rows_refuse_weight(rows_format f, const void *w, int64_t ldw, int64_t N,
                                             int64_t K)
{
    static thread_local char why[128];
    why[0] = 0;
    if (f < 0 || f >= ROWS_FORMATS)
        snprintf(why, sizeof why, "no weight format %d", (int)f);
    else if (N < 1 || K < 1 || N > 1 << 30 || K > 1 << 24)
        snprintf(why, sizeof why, "a weight of %lld x %lld", (long long)N, (long long)K);
    else if (K * rows_element(f) % 16)
        snprintf(why, sizeof why, "K = %lld is not a multiple of %d", (long long)K,
                 16 / rows_element(f));
    else if (ldw < K || ldw * rows_element(f) % 16 || (uintptr_t)w % 16)
        snprintf(why, sizeof why, "rows of the weight are not aligned to 16 bytes");
    return *why ? why : NULL;
}

static inline const char *rows_refuse_call(const rows_call *c)
{
    static thread_local char why[128];
    why[0] = 0;
    if (c->M < 1 || c->M > ROWS_MAX_M)
        snprintf(why, sizeof why, "M = %d, made for 1 to %d", c->M, ROWS_MAX_M);
    else if (c->ldx % 8 || (uintptr_t)c->x % 16)
        snprintf(why, sizeof why, "x is not aligned to 16 bytes");
    else if (c->scales == ROWS_BLOCK && c->w->format != ROWS_E4M3)
        snprintf(why, sizeof why, "block scales are made for e4m3");
    else if (c->scales == ROWS_BLOCK && c->M > ROWS_MAX_BLOCK_M)
        snprintf(why, sizeof why, "M = %d, made for 1 to %d with block scales", c->M,
                 ROWS_MAX_BLOCK_M);
    else if ((c->scales == ROWS_UNSCALED) != !c->scale)
        snprintf(why, sizeof why, "%s", c->scale ? "scales of no kind" : "no scales");
    else if (c->x_scale && c->scales != ROWS_BLOCK)
        snprintf(why, sizeof why, "x has scales of 128 columns, the weight has none");
    else if (!rows_plan_fits(c->w->format, rows_plan_of(c), c->w->K, c->M)) {
        const rows_plan p = rows_plan_of(c);
        snprintf(why, sizeof why, "no kernel of %d groups, %d chunks, K = %d cut in %d, M = %d",
                 p.groups, p.chunks, c->w->K, p.split, c->M);
    }
    return *why ? why : NULL;
}
#endif
