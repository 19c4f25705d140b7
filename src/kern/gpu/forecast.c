/* What linears will take, before they are made: kern/forecast.h. The sums are those of the layouts'
 * own files; a test holds them against what loading takes. */
#include "kern/forecast.h"
#include <string.h>
#include "kern/gpu/linear.h"
#include "kern/gpu/lt.h"
#include "kern/gpu/packed.h"
#include "kern/linear.h"

#define BLOCK      128  /* of scales of the layout dense */
#define GRAPH_NODE 8192 /* bytes of an operator in a graph: an estimate */
#define STAGE      ((uint64_t)256 << 10)

static int64_t up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

/* ---- a tensor without numbers -------------------------------------------------------------------
 */

/* All but the arrays is that of a tensor of s->N rows; these have a few rows. */
static int shadow(const kern_forecast_shard *s, int64_t K, qtensor *q, err *e)
{
    static const int32_t order[1]; /* there is one; nobody reads it */
    const qaxis *w = &s->spec.w, *a = &s->spec.a;
    const bool quantized = qaxis_quantized(w);
    qspec spec = s->spec;
    if (!quantized) spec.w = (qaxis){.type = s->plain};
    const int64_t few = w->gran == Q_BLOCK && w->block_n > 16 ? w->block_n : 16;
    int rc = qtensor_alloc(q, &spec, s->plain, 1, few < s->N ? few : s->N, K, e);
    if (rc < 0) return rc;
    q->N = s->N;
    if (q->scales && w->gran == Q_BLOCK) q->scale_rows = (s->N + q->block_n - 1) / q->block_n;
    if (q->scales && w->gran == Q_TENSOR)
        q->block_n = s->N;
    else if (q->scales && w->gran != Q_BLOCK)
        q->scale_rows = s->N;
    if (w->actorder) q->g_idx = order;
    if (qaxis_quantized(a) && !a->dynamic) q->input_scale = q->input_global = 1;
    return 0;
}

/* ---- bytes of the layouts -----------------------------------------------------------------------
 */

static uint64_t dense_bytes(const qtensor *q)
{
    const uint64_t codes = (uint64_t)(q->N * q->K) * (q->code == NUM_BF16 ? 2 : 1);
    const int64_t rows = (q->N + BLOCK - 1) / BLOCK, cols = (q->K + BLOCK - 1) / BLOCK;
    if (!q->scales) return codes;
    return codes +
           sizeof(float) *
               (uint64_t)(q->spec.w.gran == Q_BLOCK ? rows * cols + rows * up(cols, 4) : q->N);
}

static uint64_t panels_bytes(const qtensor *q)
{
    qtensor wide;
    kern_wshape s;
    kern__wshape_of(q, &s);
    for (int i = 0; i < kern__n_layouts; i++) {
        const kern__layout *l = kern__layouts[i];
        if (strcmp(l->name, "canonical") && !l->refuse(&s))
            return l->bytes(&s) + (q->g_idx ? (uint64_t)q->K * 4 : 0);
    }
    qtensor_plain(&wide, NUM_F32, q->N, q->K, NULL); /* expanded */
    kern__wshape_of(&wide, &s);
    return kern__layout_by_name("w32p16")->bytes(&s);
}

static void add(kern_forecast *f, const char *name, uint64_t bytes)
{
    for (int i = 0; i < KERN_FORECAST_LAYOUTS; i++) {
        if (f->layout[i].name && strcmp(f->layout[i].name, name)) continue;
        f->layout[i].name = name;
        f->layout[i].bytes += bytes;
        return;
    }
}

static void widest(int64_t *k, int64_t K)
{
    if (K > *k) *k = K;
}

static void need_piece(const gpu_dev *g, kern_forecast *f, int64_t N, int64_t K)
{
    const size_t need = gpu__lt_piece_bytes(g, N, K);
    if (need > f->piece) f->piece = need;
}

static int of_linear(kern_dev *d, kern_forecast *f, const kern_linear_desc *desc, int E,
                     const char **layout, err *e)
{
    gpu_dev *g = gpu__of(d);
    const int64_t K = desc->shard[0]->K;
    const uint64_t times = E ? (uint64_t)E : 1;
    uint64_t bytes = 0;
    int rc = gpu__check(g, "bind", g->api->bind(g->index), e);
    if (rc < 0) return rc;
    const gpu_layout *y = gpu__layout_for(g, desc);
    if (y == &gpu__layout_packed) {
        bytes = gpu__packed_forecast(g, desc, f);
        if (E) {
            widest(&f->experts_k, gpu__packed_k(K));
            if (E > f->E) f->E = E;
        } else {
            widest(&f->packed_k, K);
        }
    }
    for (int i = 0; i < desc->n_shards && y != &gpu__layout_packed; i++) {
        const qtensor *q = desc->shard[i];
        const bool is_dense = y == &gpu__layout_dense;
        bytes += is_dense ? dense_bytes(q) : panels_bytes(q);
        if (is_dense && q->code != NUM_BF16 && !qaxis_quantized(&q->spec.a))
            need_piece(g, f, q->N, K);
    }
    if (y == &gpu__layout_dense) widest(&f->dense_k, K);
    if (y != &gpu__layout_dense && y != &gpu__layout_packed && E)
        widest(&f->plain_experts_k, up(K, 32));
    add(f, y->name, bytes * times);
    *layout = y->name;
    return 0;
}

/* ---- room of steps ------------------------------------------------------------------------------
 */

uint64_t kern_forecast_room(kern_dev *d, const kern_forecast *f, int64_t rows, int64_t K)
{
    const gpu_dev *g = gpu__of(d);
    const gpu_api *api = g->api;
    const int64_t few = rows < 512 ? rows : 512;
    const int64_t plain = few * up(K, 32), of_experts = rows * f->plain_experts_k;
    uint64_t n = (uint64_t)(plain > of_experts ? plain : of_experts) * sizeof(float);
    if (f->dense_k) {
        const int64_t most = rows < ROWS_MAX_M     ? ROWS_MAX_M
                             : rows < LT_MOST_ROWS ? up(rows, 4)
                                                   : LT_MOST_ROWS,
                      k = up(K, BLOCK);
        n += (uint64_t)(k * (most + 2 * ROWS_MAX_M)) +
             sizeof(float) * (uint64_t)(most * (k / BLOCK));
    }
    if (f->packed_k) {
        const int64_t most = rows < 4096 ? rows : 4096;
        n += api->wide_work_bytes((int)f->packed_k, (int)most) + (uint64_t)(few * f->packed_k) * 2;
    }
    if (f->E) {
        n += api->experts_work_bytes((int)f->experts_k, f->E, rows);
        if (f->copies) n += (uint64_t)(rows * f->experts_k) * 2;
    }
    return n + f->piece;
}

/* ---- the door -----------------------------------------------------------------------------------
 */

int kern_forecast_linear(kern_dev *d, kern_forecast *f, const kern_forecast_shard *s, int n,
                         int64_t K, kern_act act, int E, const char **layout, err *e)
{
    qtensor q[KERN_MAX_SHARDS] = {0};
    kern_linear_desc desc = {.name = "", .act = act, .expert = E > 0, .n_shards = n};
    int rc = 0;
    for (int i = 0; i < n; i++) {
        TRY(shadow(&s[i], K, &q[i], e));
        desc.shard[i] = &q[i];
    }
    TRY(of_linear(d, f, &desc, E, layout, e));
out:
    for (int i = 0; i < n; i++) {
        q[i].g_idx = NULL;
        qtensor_free(&q[i]);
    }
    return rc;
}

uint64_t kern_forecast_attention(kern_dev *d, int64_t rows, int H, int v_lanes)
{
    return gpu__of(d)->api->attention_work((int)rows, H, v_lanes);
}

uint64_t kern_forecast_top(int64_t rows, int64_t V)
{
    return gpu_top_work(rows, V) + sizeof(kern_top) * (uint64_t)rows;
}

uint64_t kern_forecast_graph(int64_t ops)
{
    return STAGE + (uint64_t)ops * GRAPH_NODE;
}
