/* Random numbers in every page of the KV pool, for measuring decoding on a shape without computing
 * prompts first. They are stored by the operator that stores K and V in a step, so that every
 * format and order of a page holds what it would hold otherwise. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "engine/engine_internal.h"

#define FILL_ROWS 256

static int fill_layer(engine *en, kern_dev *dev, int layer, float *rows, const int32_t *slots,
                      int32_t *slot, err *e)
{
    const kern_kv_layer *kv = kv_pool_layer(kv_pool_rank(en->pool, dev->rank), layer);
    int64_t pages = kv_pool_total(en->pool, kv_pool_group(en->pool, layer)),
            n = pages * en->page_tokens;
    int rc = 0;
    for (int64_t at = 0; at < n && rc >= 0; at += FILL_ROWS) {
        int64_t T = n - at < FILL_ROWS ? n - at : FILL_ROWS;
        for (int64_t i = 0; i < T; i++)
            slot[i] = slots[i] + (int32_t)at;
        kern_step_begin(dev, T, 0);
        int64_t ld = (int64_t)kv->Hk * kv->D;
        kern_kv_store(dev, kv, rows, ld, kv->v_in_k ? NULL : rows + ld, ld, slot, T);
        rc = kern_step_end(dev, e);
    }
    return rc;
}

static int fill_device(engine *en, kern_dev *dev, err *e)
{
    const kv_layer_shape *shapes;
    int n = model_kv_shapes(en->m, &shapes), rc = 0;
    int64_t width = 0;
    int32_t slots[FILL_ROWS], slot[FILL_ROWS];
    for (int i = 0; i < n; i++)
        if (!shapes[i].state_floats && (int64_t)shapes[i].Hk * shapes[i].D > width)
            width = (int64_t)shapes[i].Hk * shapes[i].D;
    if (!width) return 0;
    for (int i = 0; i < FILL_ROWS; i++)
        slots[i] = i;
    /* Row t of K, and row t + 1 of it as V: uniform numbers of variance 1. */
    int64_t count = (FILL_ROWS + 1) * width;
    float *host = xmalloc(sizeof *host * (size_t)count), *rows = host;
    uint32_t state = 1;
    for (int64_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        host[i] = ((float)(state >> 8) * 0x1p-24f - 0.5f) * 3.4641f;
    }
    TRY(kern_constant(dev, &rows, count, e));
    for (int i = 0; i < n; i++)
        if (!shapes[i].state_floats) TRY(fill_layer(en, dev, i, rows, slots, slot, e));
out:
    free(host);
    return rc;
}

int engine__fill_cache(engine *en, err *e)
{
    int rc = 0;
    for (int i = 0; i < kern_n_ranks(en->dev); i++)
        TRY(fill_device(en, kern_rank(en->dev, i), e));
out:
    return rc;
}

/* ---- times of operators -------------------------------------------------------------------------
 */

int engine_profile(engine *en, bool on, err *e)
{
    return kern_profile(en->dev, on, e);
}

static int by_time(const void *a, const void *b)
{
    double x = ((const engine_op_time *)a)->seconds, y = ((const engine_op_time *)b)->seconds;
    return x < y ? 1 : -(x > y);
}

int engine_profile_lines(engine *en, engine_op_time **out)
{
    const kern_op_time *from;
    int n = kern_profile_lines(en->dev, &from);
    engine_op_time *t = xcalloc((size_t)n + 1, sizeof *t);
    for (int i = 0; i < n; i++) {
        t[i] = (engine_op_time){.calls = from[i].calls,
                                .seconds = from[i].seconds,
                                .bytes = from[i].bytes,
                                .flops = from[i].flops};
        memcpy(t[i].op, from[i].op, sizeof t[i].op);
        memcpy(t[i].shape, from[i].shape, sizeof t[i].shape);
    }
    qsort(t, (size_t)n, sizeof *t, by_time);
    *out = t;
    return n;
}
