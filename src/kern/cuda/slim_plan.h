/* What slim.cu and its plain twin share, on the host: the shared memory of a plan, the plan of a
 * shape, which calls are taken. */
#ifndef KERN_CUDA_SLIM_PLAN_H
#define KERN_CUDA_SLIM_PLAN_H
#include <stdio.h>
#include "kern/cuda/rows_plan.h"
#include "kern/cuda/slim.h"

#define SLIM_WARPS 8
#define SLIM_ROWS  16  /* of a tile */
#define SLIM_SLICE 128 /* bytes of every row that a warp has in a step */
#define SLIM_STEP  (SLIM_ROWS * SLIM_SLICE)
#define SLIM_SUMS  2 /* buffers of sums */
/* Shared memory of a block, which has a multiprocessor for itself (alone.cuh). */
#define SLIM_SMEM (227 * 1024)

static inline int slim_how_of(const rows_call *c)
{
    /* Sums of more bytes may not fit 32 bits. */
    const int codes = c->x_codes && (c->w->format == ROWS_E4M3 ||
                                     (c->w->format == ROWS_INT8 && c->w->K < 1 << 17));
    return (codes ? SLIM_CODES : 0) | (c->scales == ROWS_BLOCK ? SLIM_BLOCKS : 0);
}

struct slim_mem { /* bytes from the start of shared memory; the ring is in front */
    uint32_t x, x_scales, parts, far_sums, bars, end;
    uint32_t x_slice; /* of a slice of K */
};

static inline int slim_slices(rows_format f, int K)
{
    return rows_over(K * rows_element(f), SLIM_SLICE);
}

/* slices: of one block. */
static inline slim_mem slim_layout(rows_format f, int how, slim_plan p, int slices, int M)
{
    slim_mem m;
    const bool bytes = f == ROWS_INT8 && how & SLIM_CODES;
    m.x_slice = (uint32_t)((f == ROWS_BF16 || bytes ? 1 : 2) * M * 128);
    m.x = (uint32_t)(p.depth * SLIM_WARPS * SLIM_STEP);
    m.x_scales = m.x + (uint32_t)slices * m.x_slice;
    m.parts = m.x_scales + (uint32_t)(how & SLIM_BLOCKS ? (slices * M * 4 + 15) / 16 * 16 : 0);
    m.far_sums = m.parts + (uint32_t)(SLIM_SUMS * SLIM_WARPS * SLIM_ROWS * M * 4);
    m.bars = m.far_sums + (uint32_t)(SLIM_SUMS * (p.split - 1) * SLIM_ROWS * M * 4);
    m.end = m.bars + 4 * SLIM_SUMS * 8;
    return m;
}

static inline bool slim_fits(rows_format f, int how, slim_plan p, int K, int M, int limit)
{
    const int all = slim_slices(f, K), each = rows_over(all, p.split);
    if (p.split != 1 && p.split != 2 && p.split != 4 && p.split != 8) return false;
    if (p.depth < 2 || p.depth > SLIM_DEPTH || p.depth % 2) return false;
    if ((p.split - 1) * each >= all) return false; /* a block without work */
    return slim_layout(f, how, p, each, M).end <= (uint32_t)limit;
}

/* Steps of the busiest multiprocessor, with a charge for clusters and for little on its way. The
 * chip holds 132 blocks of 1, 66 clusters of 2, 30 of 4, 15 of 8. */
static inline double slim_cost(rows_format f, slim_plan p, int N, int K)
{
    static const int slots[] = {0, 132, 66, 0, 30, 0, 0, 0, 15};
    static const double charge[] = {0, 1.0, 1.08, 0, 1.15, 0, 0, 0, 1.3};
    const int rounds = rows_over(rows_over(N, SLIM_ROWS), slots[p.split]);
    return (double)rounds * rows_over(slim_slices(f, K), p.split) * charge[p.split] *
           (p.depth == 2 ? 1.1 : 1.0);
}

/* Steps of a warp on their way that serve a block best, as measured on an H200 (bench/NOTES.md): of
 * codes less where there is little to do, for filling the ring takes its time. */
static inline int slim_depth(rows_format f, int slices)
{
    return f == ROWS_BF16 || slices > 64 ? SLIM_DEPTH : 4;
}

static inline slim_plan slim_plan_for(rows_format f, int how, int N, int K, int M)
{
    slim_plan best = {0, 0};
    double least = 0;
    for (int split = 1; split <= 8; split *= 2)
        for (int depth = slim_depth(f, rows_over(slim_slices(f, K), split)); depth >= 2;
             depth -= 2) {
            const slim_plan p = {split, depth};
            if (!slim_fits(f, how, p, K, M, SLIM_SMEM)) continue;
            const double c = slim_cost(f, p, N, K);
            if (!best.split || c < least) best = p, least = c;
            break;
        }
    return best;
}

static inline const char *slim_refuse_call(const rows_call *c, slim_plan p)
{
    static thread_local char why[128];
    const int how = slim_how_of(c);
    rows_call like = *c;
    like.plan = rows_plan{1, 1, 1}; /* which there always is */
    const char *bad = rows_refuse_call(&like);
    if (bad) return bad;
    why[0] = 0;
    if (c->M > SLIM_MAX_M)
        snprintf(why, sizeof why, "M = %d, made for 1 to %d", c->M, SLIM_MAX_M);
    else if (!p.split)
        snprintf(why, sizeof why, "x of K = %d, M = %d does not fit shared memory", c->w->K, c->M);
    else if (!slim_fits(c->w->format, how, p, c->w->K, c->M, SLIM_SMEM))
        snprintf(why, sizeof why, "no kernel of %d steps, K = %d cut in %d, M = %d", p.depth,
                 c->w->K, p.split, c->M);
    return *why ? why : NULL;
}
#endif
