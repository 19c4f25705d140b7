/* Products by cuBLASLt: the library's handle, the algorithms, the room for pieces. See lt.h. */
#include "kern/gpu/lt.h"
#include <stdio.h>
#include <stdlib.h>

#define PIECE_BYTES ((size_t)64 << 20) /* of a weight in bf16; about what the L2 holds */

struct gpu_lt_room { /* of a device */
    lt *lt;
    bool asked;
    char why[256]; /* there is no lt */
    struct planned {
        lt_kind kind;
        int64_t N, K;
        bool bias;
    } * planned;
    int n_planned;
    void *piece;
    size_t piece_bytes, piece_need;
};

static struct gpu_lt_room *room_of(gpu_dev *g)
{
    if (!g->lt) g->lt = xcalloc(1, sizeof *g->lt);
    return g->lt;
}

static const char *opened(gpu_dev *g)
{
    struct gpu_lt_room *r = room_of(g);
    if (!r->asked) {
        const char *why = g->api->lt_open ? g->api->lt_open(&r->lt, 0) : "not in the plug-in";
        r->asked = true;
        if (why) snprintf(r->why, sizeof r->why, "%s", why);
    }
    return r->lt ? NULL : r->why;
}

const char *gpu__lt_plan(gpu_dev *g, const lt_call *call, bool bias)
{
    static const int64_t sizes[] = {64, 128, 256, 512, 1024, 2048, LT_MOST_ROWS};
    static const float some = 0;
    const char *why = opened(g);
    struct gpu_lt_room *r = g->lt;
    lt_call c = *call;
    for (int i = 0; i < r->n_planned && !why; i++) {
        const struct planned *p = &r->planned[i];
        if (p->kind == c.kind && p->N == c.N && p->K == c.K && p->bias == bias) return NULL;
    }
    for (int form = 0; form < (bias ? 3 : 2) && !why; form++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !why; i++) {
            c.y_bf16 = form > 0;
            c.bias_bf16 = form == 2 ? &some : NULL;
            c.M = sizes[i];
            why = g->api->lt_plan(r->lt, &c, false);
        }
    if (why) return why;
    r->planned = xrealloc(r->planned, sizeof *r->planned * (size_t)(r->n_planned + 1));
    r->planned[r->n_planned++] = (struct planned){c.kind, c.N, c.K, bias};
    return NULL;
}

int gpu__lt_bias(gpu_dev *g, const float *bias, int64_t N, void **out, err *e)
{
    int rc = 0;
    bool exact = true;
    uint16_t *h = xmalloc((size_t)N * sizeof *h);
    for (int64_t n = 0; n < N; n++) {
        h[n] = num_f32_to_bf16(bias[n]);
        exact = exact && num_bf16_to_f32(h[n]) == bias[n];
    }
    *out = NULL;
    if (exact) rc = gpu__keep(g, out, h, (size_t)N * sizeof *h, e);
    free(h);
    return rc;
}

void gpu__lt_push(gpu_dev *g, const lt_call *c)
{
    gpu_lt a = {g->lt->lt, *c};
    gpu__push(g, GPU_OP_lt, &a, sizeof a);
}

/* ---- pieces -------------------------------------------------------------------------------------
 */

/* All of about one size, so that none leaves most of the device without work; small ones in tests.
 */
int64_t gpu__lt_piece_rows(const gpu_dev *g, int64_t N, int64_t K)
{
    const int64_t bytes = (int64_t)(g->facts.emulated ? PIECE_BYTES >> 10 : PIECE_BYTES);
    const int64_t step = g->facts.emulated ? 16 : 256, most = bytes / 2 / K;
    const int64_t pieces = most < step ? (N + step - 1) / step : (N + most - 1) / most;
    const int64_t rows = ((N + pieces - 1) / pieces + step - 1) / step * step;
    return rows < N ? rows : N;
}

size_t gpu__lt_piece_bytes(const gpu_dev *g, int64_t N, int64_t K)
{
    return (size_t)(gpu__lt_piece_rows(g, N, K) * K) * 2;
}

const char *gpu__lt_plan_pieces(gpu_dev *g, int64_t N, int64_t K, bool bias)
{
    const int64_t rows = gpu__lt_piece_rows(g, N, K), rest = N % rows;
    lt_call c = {.kind = LT_BF16, .N = rows, .K = K, .ldx = K, .ldy = N};
    const char *why = gpu__lt_plan(g, &c, bias);
    c.N = rest;
    return why || !rest ? why : gpu__lt_plan(g, &c, bias);
}

void gpu__lt_need_pieces(gpu_dev *g, int64_t N, int64_t K)
{
    const size_t need = gpu__lt_piece_bytes(g, N, K);
    if (need > room_of(g)->piece_need) g->lt->piece_need = need;
}

int gpu__lt_reserve(gpu_dev *g, err *e)
{
    struct gpu_lt_room *r = g->lt;
    if (!r || r->piece_need <= r->piece_bytes) return 0;
    int rc = gpu__keep(g, &r->piece, NULL, r->piece_need, e);
    if (rc < 0) return rc;
    r->piece_bytes = r->piece_need;
    g->pub.scratch_bytes += r->piece_need;
    return 0;
}

void *gpu__lt_piece(const gpu_dev *g)
{
    return g->lt && g->lt->piece_bytes >= g->lt->piece_need ? g->lt->piece : NULL;
}

void gpu__lt_close(gpu_dev *g)
{
    if (!g->lt) return;
    if (g->lt->lt) g->api->lt_close(g->lt->lt);
    free(g->lt->planned);
    free(g->lt);
    g->lt = NULL;
}
