/* Weights of no checkpoint, for measuring speed on a shape: normal numbers of variance 1/K, so that
 * activations stay finite in any depth. No more than RANDOM_ROWS rows are drawn (and quantized, by
 * the algorithm that also quantizes checkpoints); a weight repeats them. Weights of one shape are
 * made once and lent to all linears of it: each linear prepares its own copy, so that a step reads
 * as many bytes as with real weights.
 *
 * Norms are 1, biases and everything else that is a vector 0, a depthwise convolution 1/4. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "model/model_internal.h"

#define RANDOM_ROWS 256

struct model_random {
    struct model_random *next;
    bool quantized;
    qtensor t;
};

static double uniform(uint64_t *state) /* splitmix64 (Steele et al. 2014), in (0, 1) */
{
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return ((double)((z ^ (z >> 31)) >> 12) + 0.5) * 0x1p-52;
}

static void draw(int64_t K, float *out)
{
    uint64_t state = (uint64_t)K;
    float scale = 1 / sqrtf((float)K);
    for (int64_t i = 0; i < RANDOM_ROWS * K; i++) {
        double u = uniform(&state), v = uniform(&state);
        out[i] = (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v)) * scale;
    }
}

/* Rows of `from`, which has RANDOM_ROWS, over and over in each of the E experts of `to`. */
static void repeat(const void *from, void *to, int64_t E, int64_t rows, int64_t from_rows,
                   size_t row_bytes)
{
    for (int64_t x = 0; x < E; x++)
        for (int64_t r = 0; r < rows; r += from_rows) {
            int64_t n = rows - r < from_rows ? rows - r : from_rows;
            memcpy((char *)to + (size_t)(x * rows + r) * row_bytes, from, (size_t)n * row_bytes);
        }
}

/* A tensor [E, N, K] like `from`, which is [RANDOM_ROWS, K]. */
static int widen(const qtensor *from, int64_t E, int64_t N, qtensor *to, err *e)
{
    int rc = qtensor_alloc(to, &from->spec, from->scale_type, E, N, from->K, e);
    if (rc < 0) return rc;
    repeat(from->codes, (void *)(uintptr_t)to->codes, E, N, from->N, to->row_bytes);
    if (from->flat || to->flat || to->scale_cols != from->scale_cols) {
        rc = err_set(e, ERR_UNSUPPORTED,
                     "random weights: blocks that cross rows of %lld columns cannot be repeated; "
                     "choose a scheme whose groups divide the columns",
                     (long long)from->K);
        qtensor_free(to);
        return rc;
    }
    if (to->scales)
        repeat(from->scales, (void *)(uintptr_t)to->scales, E, to->scale_rows, from->scale_rows,
               (size_t)to->scale_cols * num_bytes(to->scale_type, 1));
    if (to->zeros)
        repeat(from->zeros, (void *)(uintptr_t)to->zeros, E, to->scale_rows, from->scale_rows,
               (size_t)to->scale_cols * num_bytes(to->zero_type, 1));
    if (from->n_global) {
        to->n_global = 1;
        to->global[0] = from->global[0];
        to->global_row[1] = N;
    }
    return 0;
}

static struct model_random *find(const model *m, bool quantized, int64_t E, int64_t N, int64_t K)
{
    for (struct model_random *r = m->random; r; r = r->next)
        if (r->quantized == quantized && r->t.E == E && r->t.N == N && r->t.K == K) return r;
    return NULL;
}

/* What is lent: freeing it frees nothing. */
static void lend(const qtensor *t, qtensor *out)
{
    *out = *t;
    out->n_owned = 0;
}

int model_random_tensor(const qspec *spec, int64_t E, int64_t N, int64_t K, team *workers,
                        qtensor *out, err *e)
{
    int rc = 0;
    qtensor few = {0};
    float *rows = xmalloc(sizeof *rows * (size_t)(RANDOM_ROWS * K));
    draw(K, rows);
    if (qaxis_quantized(&spec->w)) {
        quant_stats st = {.workers = workers};
        TRY(quant_algo_by_name("rtn")->quantize(rows, RANDOM_ROWS, K, spec, NUM_BF16, &st, &few,
                                                e));
    } else {
        TRY(qtensor_alloc(&few, spec, NUM_NONE, 1, RANDOM_ROWS, K, e));
        num_encode_row(spec->w.type, rows, (size_t)(RANDOM_ROWS * K),
                       (uint8_t *)(uintptr_t)few.codes);
    }
    rc = widen(&few, E, N, out, e);
out:
    qtensor_free(&few);
    free(rows);
    return rc;
}

static int lent(model *m, bool quantized, int64_t E, int64_t N, int64_t K, qtensor *out, err *e)
{
    static const qspec plain = {{.type = NUM_BF16}, {.type = NUM_BF16}, {.type = NUM_BF16}};
    struct model_random *r = find(m, quantized, E, N, K);
    if (!r) {
        qtensor t;
        int rc = model_random_tensor(quantized ? &m->online : &plain, E, N, K, m->dev->team, &t, e);
        if (rc < 0) return rc;
        r = xcalloc(1, sizeof *r);
        *r = (struct model_random){m->random, quantized, t};
        m->random = r;
    }
    lend(&r->t, out);
    return 0;
}

int model__random_shard(model *m, const arch_shard *s, qtensor *out, err *e)
{
    return lent(m, false, s->E, s->N, s->K, out, e);
}

int model__random_quantize(model *m, qtensor *t, err *e)
{
    return lent(m, true, t->E, t->N, t->K, t, e);
}

void model__random_vector(const model *m, const char *name, int64_t n, float *out)
{
    bool norm = strstr(name, "norm") || strstr(name, "ln_") || strstr(name, "layernorm");
    bool bias = strlen(name) > 5 && !strcmp(name + strlen(name) - 5, ".bias");
    bool lacks = m->arch->norm == ARCH_RMS_ONE || m->arch->norm == ARCH_LAYER_NORM_ONE;
    float v = bias ? 0 : norm ? (lacks ? 0.0f : 1.0f) : strstr(name, "conv") ? 0.25f : 0;
    for (int64_t i = 0; i < n; i++)
        out[i] = v;
}

static bool in_use(const model *m, const uint8_t *codes)
{
    return codes == m->embed.codes || codes == m->pos.codes;
}

void model__random_drop(model *m, bool all)
{
    struct model_random **at = &m->random;
    while (*at) {
        struct model_random *r = *at;
        if (!all && in_use(m, r->t.codes)) {
            at = &r->next;
            continue;
        }
        *at = r->next;
        qtensor_free(&r->t);
        free(r);
    }
}
