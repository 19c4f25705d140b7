/* Operators with a state per sequence, the causal convolution and the gated delta rule: against the
 * formulas in double over whole sequences; a sequence in chunks gives the bits of the whole; one
 * that starts ignores what its state held; one thread and three give equal bits. */
#include "kern_fixture.h"

#define N_SEQS 3
static const int lengths[N_SEQS] = {41, 1, 7};
static const int chunks[] = {3, 1, 5, 32}; /* rows a sequence gives to each step */

typedef struct steps { /* the sequences of one step; rows of the step in order of sequences */
    kern_seq seq[N_SEQS];
    int32_t slot[N_SEQS]; /* of its state */
    int at[N_SEQS];       /* tokens of the sequence done before */
    int n, rows;
} steps;

static int32_t no_page;

/* The next chunk of each sequence; whole: all of it. */
static void next_step(steps *s, int done[N_SEQS], int round, bool whole)
{
    memset(s, 0, sizeof *s);
    for (int i = 0; i < N_SEQS; i++) {
        int left = lengths[i] - done[i], n = whole ? left : chunks[(round + i) % 4];
        if (n > left) n = left;
        if (n == 0) continue;
        s->seq[s->n] = (kern_seq){s->rows, n, done[i] + n, &no_page};
        s->slot[s->n] = i;
        s->at[s->n++] = i * 64 + done[i]; /* row of the test's own arrays */
        s->rows += n;
        done[i] += n;
    }
}

static void states_open(float *state[N_SEQS], int64_t n)
{
    state[0] = poisoned(N_SEQS * n); /* what an ended sequence left */
    for (int i = 1; i < N_SEQS; i++)
        state[i] = state[i - 1] + n;
}
static void states_close(float *state[N_SEQS])
{
    free(state[0]);
}

/* Rows of the step between the arrays of the test [N_SEQS*64, n] and those of the step. */
static void gather(const steps *s, const float *all, int64_t n, float *rows)
{
    for (int i = 0; i < s->n; i++)
        memcpy(rows + s->seq[i].row0 * n, all + s->at[i] * n,
               (size_t)(s->seq[i].n_rows * n) * sizeof *rows);
}
static void scatter(const steps *s, const float *rows, int64_t n, float *all)
{
    for (int i = 0; i < s->n; i++)
        memcpy(all + s->at[i] * n, rows + s->seq[i].row0 * n,
               (size_t)(s->seq[i].n_rows * n) * sizeof *rows);
}

/* ---- convolution ------------------------------------------------------------------------- */

static void run_conv(kern_dev *d, const float *in, int64_t C, int W, const float *w, bool whole,
                     float *out, float *state[N_SEQS])
{
    int done[N_SEQS] = {0};
    float *rows = poisoned(N_SEQS * 64 * C);
    steps s;
    for (int round = 0;; round++) {
        next_step(&s, done, round, whole);
        if (s.n == 0) break;
        gather(&s, in, C, rows);
        kern_states st = {state[0], state[1] - state[0], s.slot};
        kern_conv_silu(d, rows, C, C, W, w, s.seq, s.n, &st);
        scatter(&s, rows, C, out);
    }
    free(rows);
}

static void conv_case(const isa *on, int64_t C, int W)
{
    int64_t n = N_SEQS * 64 * C, kept = C * (W - 1);
    float *in = randoms(n), *w = randoms(C * W), *whole = poisoned(n), *parts = poisoned(n),
          *one = poisoned(n), *state[3][N_SEQS];
    for (int i = 0; i < 3; i++)
        states_open(state[i], kept + 1);
    run_conv(on->dev, in, C, W, w, true, whole, state[0]);
    run_conv(on->dev, in, C, W, w, false, parts, state[1]);
    run_conv(on->one, in, C, W, w, false, one, state[2]);
    assert_memory_equal(parts, one, (size_t)n * sizeof *one);
    assert_memory_equal(parts, whole, (size_t)n * sizeof *one);
    for (int s = 0; s < N_SEQS; s++) {
        assert_memory_equal(state[0][s], state[1][s], (size_t)(kept + 1) * sizeof *one);
        for (int t = 0; t < lengths[s]; t++)
            for (int64_t c = 0; c < C; c++) {
                double sum = 0, mag = 0;
                for (int j = 0; j < W; j++) {
                    int from = t - W + 1 + j;
                    double v = from < 0 ? 0 : (double)w[c * W + j] * in[(s * 64 + from) * C + c];
                    sum += v;
                    mag += fabs(v);
                }
                near("conv_silu", on->name, whole[(s * 64 + t) * C + c], sum / (1 + exp(-sum)),
                     1e-6 * mag + 1e-30);
            }
        for (int64_t c = 0; c < C; c++)
            for (int j = 0; j < W - 1; j++) {
                int from = lengths[s] - W + 1 + j;
                near("conv state", on->name, state[0][s][c * (W - 1) + j],
                     from < 0 ? 0 : in[(s * 64 + from) * C + c], 0);
            }
    }
    for (int i = 0; i < 3; i++)
        states_close(state[i]);
    free(in), free(w), free(whole), free(parts), free(one);
}

static void test_conv(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{128, 4}, {67, 4}, {5, 4},   {33, 2},
                                        {40, 3},  {16, 1}, {300, 4}, {20, 7}};
    for (int i = 0; i < N_ISAS; i++)
        for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++)
            conv_case(&isas[i], shapes[j][0], (int)shapes[j][1]);
}

/* ---- delta rule -------------------------------------------------------------------------- */

typedef struct delta_shape {
    int Hk, Hv, Dk, Dv;
} delta_shape;

typedef struct delta_in {
    float *q, *k, *v, *g, *beta;
} delta_in;

static void run_delta(kern_dev *d, const delta_shape *h, const delta_in *in, bool whole, float *out,
                      float *state[N_SEQS])
{
    int done[N_SEQS] = {0};
    int64_t nk = h->Hk * h->Dk, nv = h->Hv * h->Dv, R = N_SEQS * 64;
    float *q = poisoned(R * nk), *k = poisoned(R * nk), *v = poisoned(R * nv),
          *g = poisoned(R * h->Hv), *beta = poisoned(R * h->Hv), *o = poisoned(R * nv);
    steps s;
    for (int round = 0;; round++) {
        next_step(&s, done, round, whole);
        if (s.n == 0) break;
        gather(&s, in->q, nk, q);
        gather(&s, in->k, nk, k);
        gather(&s, in->v, nv, v);
        gather(&s, in->g, h->Hv, g);
        gather(&s, in->beta, h->Hv, beta);
        kern_states st = {state[0], state[1] - state[0], s.slot};
        kern_delta_args a = {.q = q,
                             .k = k,
                             .v = v,
                             .ldq = nk,
                             .ldk = nk,
                             .ldv = nv,
                             .g = g,
                             .beta = beta,
                             .Hk = h->Hk,
                             .Hv = h->Hv,
                             .Dk = h->Dk,
                             .Dv = h->Dv,
                             .seqs = s.seq,
                             .n_seqs = s.n,
                             .state = &st,
                             .out = o};
        kern_gated_delta(d, &a);
        scatter(&s, o, nv, out);
    }
    free(q), free(k), free(v), free(g), free(beta), free(o);
}

/* One head of one sequence in double; returns the largest value that a sum may have had. */
static void want_delta(const delta_shape *h, const delta_in *in, int s, int head, double *S,
                       double *out)
{
    int hk = head / (h->Hv / h->Hk), Dk = h->Dk, Dv = h->Dv;
    memset(S, 0, (size_t)(Dk * Dv) * sizeof *S);
    for (int t = 0; t < lengths[s]; t++) {
        int64_t r = s * 64 + t;
        const float *q = in->q + (r * h->Hk + hk) * Dk, *k = in->k + (r * h->Hk + hk) * Dk,
                    *v = in->v + (r * h->Hv + head) * Dv;
        double qq = 1e-6, kk = 1e-6, decay = exp(in->g[r * h->Hv + head]);
        for (int i = 0; i < Dk; i++) {
            qq += (double)q[i] * q[i];
            kk += (double)k[i] * k[i];
        }
        for (int j = 0; j < Dv; j++) {
            double sk = 0, o = 0;
            for (int i = 0; i < Dk; i++) {
                S[i * Dv + j] *= decay;
                sk += S[i * Dv + j] * k[i] / sqrt(kk);
            }
            double d = in->beta[r * h->Hv + head] * (v[j] - sk);
            for (int i = 0; i < Dk; i++) {
                S[i * Dv + j] += k[i] / sqrt(kk) * d;
                o += S[i * Dv + j] * q[i] / sqrt(qq) / sqrt(Dk);
            }
            out[t * Dv + j] = o;
        }
    }
}

static void delta_case(const isa *on, const delta_shape *h)
{
    int64_t R = N_SEQS * 64, nk = h->Hk * h->Dk, nv = h->Hv * h->Dv, cells = h->Hv * h->Dk * h->Dv;
    delta_in in = {randoms(R * nk), randoms(R * nk), randoms(R * nv), randoms(R * h->Hv),
                   randoms(R * h->Hv)};
    for (int64_t i = 0; i < R * h->Hv; i++) {
        in.g[i] = i % 11 == 3 ? -80.0f : -fabsf(in.g[i]);
        in.beta[i] = 1 / (1 + expf(-in.beta[i]));
    }
    float *whole = poisoned(R * nv), *parts = poisoned(R * nv), *one = poisoned(R * nv),
          *state[3][N_SEQS];
    for (int i = 0; i < 3; i++)
        states_open(state[i], cells + 1);
    run_delta(on->dev, h, &in, true, whole, state[0]);
    run_delta(on->dev, h, &in, false, parts, state[1]);
    run_delta(on->one, h, &in, false, one, state[2]);
    assert_memory_equal(parts, one, (size_t)(R * nv) * sizeof *one);
    assert_memory_equal(parts, whole, (size_t)(R * nv) * sizeof *one);
    double *S = xmalloc((size_t)(h->Dk * h->Dv) * sizeof *S),
           *out = xmalloc((size_t)(64 * h->Dv) * sizeof *out);
    for (int s = 0; s < N_SEQS; s++) {
        assert_memory_equal(state[0][s], state[1][s], (size_t)(cells + 1) * sizeof *one);
        for (int head = 0; head < h->Hv; head++) {
            want_delta(h, &in, s, head, S, out);
            double top = 0, top_s = 0;
            for (int i = 0; i < lengths[s] * h->Dv; i++)
                top = fmax(top, fabs(out[i]));
            for (int i = 0; i < h->Dk * h->Dv; i++)
                top_s = fmax(top_s, fabs(S[i]));
            for (int i = 0; i < lengths[s] * h->Dv; i++)
                near("delta", on->name,
                     whole[((s * 64 + i / h->Dv) * h->Hv + head) * h->Dv + i % h->Dv], out[i],
                     1e-5 * top);
            for (int i = 0; i < h->Dk * h->Dv; i++)
                near("delta state", on->name, state[0][s][head * h->Dk * h->Dv + i], S[i],
                     1e-5 * top_s);
        }
    }
    for (int i = 0; i < 3; i++)
        states_close(state[i]);
    free(in.q), free(in.k), free(in.v), free(in.g), free(in.beta);
    free(whole), free(parts), free(one), free(S), free(out);
}

static void test_delta(void **state)
{
    (void)state;
    static const delta_shape shapes[] = {{2, 4, 128, 128}, {1, 1, 16, 16}, {2, 2, 7, 9},
                                         {1, 3, 20, 70},   {4, 8, 32, 64}, {1, 2, 64, 130}};
    for (int i = 0; i < N_ISAS; i++)
        for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++)
            delta_case(&isas[i], &shapes[j]);
}

static void test_delta_gates(void **state)
{
    (void)state;
    enum { T = 23, H = 5, LD = 2 * H + 3 };
    float *ba = randoms(T * LD), *log_a = randoms(H), *bias = randoms(H), g[T * H], beta[T * H];
    ba[H] = 90; /* softplus is the number itself, then nothing */
    ba[LD + H + 1] = -200;
    for (int h = 0; h < H; h++)
        log_a[h] *= 0.2f;
    kern_delta_gates(isas[0].dev, ba, LD, H, log_a, bias, T, g, beta);
    for (int t = 0; t < T; t++)
        for (int h = 0; h < H; h++) {
            double a = (double)ba[t * LD + H + h] + bias[h], b = ba[t * LD + h];
            double want = -exp(log_a[h]) * (a > 30 ? a : log1p(exp(a)));
            near("decay", "ref", g[t * H + h], want, 1e-6 * fabs(want) + 1e-30);
            near("beta", "ref", beta[t * H + h], 1 / (1 + exp(-b)), 1e-6);
        }
    free(ba), free(log_a), free(bias);
}

int main(void)
{
    isas_open();
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_conv), cmocka_unit_test(test_delta),
                                       cmocka_unit_test(test_delta_gates)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    isas_close();
    return rc;
}
