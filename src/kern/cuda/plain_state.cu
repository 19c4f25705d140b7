/* Linear attention (kern_conv_silu, kern_gated_delta, kern_delta_gates) with states that live from
 * step to step: sequence s has state slot[s], read on the device; slot -1 or kv_len 0 = there is
 * nothing to do. A sequence that starts (kv_len == n_rows) has a state of zeros whatever lies
 * there.
 *
 * Tokens of a sequence follow each other. The convolution has a thread for each channel, with the
 * last inputs in registers. The delta rule has a block of eight warps for 32 lanes of a value head:
 * lane = column of S [Dk, 32], which lies in shared memory while the tokens pass, and warp w has
 * the rows w, w + 8, ...; the products with k and q are added up over the warps in their order. */
#include "kern/cuda/plain_kv.cuh"

#define CONV_CHANNELS 128
#define NARROW        3 /* inputs kept in registers */
#define WIDE          63
#define DELTA_COLS    32
#define DELTA_WARPS   8
#define DELTA_SMEM    49152

/* State of a sequence, NULL where there is nothing to do. */
static __device__ float *state_of(const gpu_state &s, const gpu_seqs &seqs, int seq)
{
    int64_t slot = s.slot ? s.slot[seq] : seq;
    return slot < 0 || seqs.kv_len[seq] < 1 ? NULL : s.base + slot * s.stride;
}
static __device__ bool starts(const gpu_seqs &seqs, int seq)
{
    return seqs.kv_len[seq] == seqs.n_rows[seq];
}

/* ---- convolution --------------------------------------------------------------------------------
 */

/* KEEP: most inputs that a width needs; past[KEEP - 1] is the newest of them. */
template <int KEEP> static __global__ void conv_kernel(gpu_conv a)
{
    const int64_t c = (int64_t)blockIdx.x * CONV_CHANNELS + threadIdx.x;
    const int seq = (int)blockIdx.y, skip = KEEP - (a.W - 1);
    float *state = state_of(a.state, a.seqs, seq);
    if (c >= a.C || !state) return;
    const bool fresh = starts(a.seqs, seq);
    const int rows = a.seqs.n_rows[seq];
    const float *w = a.w + c * a.W, last = w[a.W - 1];
    float past[KEEP], weight[KEEP];
    state += c * (a.W - 1);
#pragma unroll
    for (int j = 0; j < KEEP; j++) {
        weight[j] = j < skip ? 0.0f : w[j - skip];
        past[j] = j < skip || fresh ? 0.0f : state[j - skip];
    }
    int64_t at = a.seqs.row0[seq] * a.ld + c;
    for (int t = 0; t < rows; t++, at += a.ld) {
        const float in = lane(a.x, at);
        float sum = 0;
#pragma unroll
        for (int j = 0; j < KEEP; j++)
            if (j >= skip) sum += weight[j] * past[j];
        sum += last * in;
#pragma unroll
        for (int j = 0; j + 1 < KEEP; j++)
            past[j] = past[j + 1];
        past[KEEP - 1] = in;
        put_lane(a.x, at, sum / (1.0f + expf(-sum)));
    }
#pragma unroll
    for (int j = 0; j < KEEP; j++)
        if (j >= skip) state[j - skip] = past[j];
}

extern "C" const char *cuda_conv_silu(const void *args_, void *stream)
{
    const gpu_conv *a = (const gpu_conv *)args_;
    if (a->W < 1 || a->W > WIDE + 1) return "conv_silu: made for 1 to 64 inputs";
    if (a->seqs.n < 1 || a->C < 1) return NULL;
    if (a->seqs.n > 65535) return "conv_silu: more sequences than a grid holds";
    const dim3 grid((unsigned)((a->C + CONV_CHANNELS - 1) / CONV_CHANNELS), (unsigned)a->seqs.n);
    if (a->W - 1 <= NARROW)
        return LAUNCH(conv_kernel<NARROW>, grid, dim3(CONV_CHANNELS), 0, stream, *a);
    return LAUNCH(conv_kernel<WIDE>, grid, dim3(CONV_CHANNELS), 0, stream, *a);
}

/* ---- delta rule ---------------------------------------------------------------------------------
 */

/* One step of a column: S *= decay and S.k; then S += k d and S.q. Rows warp, warp + 8, ... */
static __device__ __forceinline__ float decay_and_ask(float *S, int64_t ld, int Dk, int warp,
                                                      const float *k, float decay, float scale)
{
    float sum = 0;
    for (int i = warp; i < Dk; i += DELTA_WARPS) {
        float s = S[i * ld] * decay;
        S[i * ld] = s;
        sum += s * (k[i] * scale);
    }
    return sum;
}
static __device__ __forceinline__ float write_and_ask(float *S, int64_t ld, int Dk, int warp,
                                                      const float *k, const float *q, float d,
                                                      float k_scale, float q_scale)
{
    float sum = 0;
    for (int i = warp; i < Dk; i += DELTA_WARPS) {
        float s = S[i * ld] + k[i] * k_scale * d;
        S[i * ld] = s;
        sum += s * (q[i] * q_scale);
    }
    return sum;
}
static __device__ __forceinline__ float over_warps(const float part[DELTA_WARPS][DELTA_COLS],
                                                   int col)
{
    float sum = 0;
    for (int i = 0; i < DELTA_WARPS; i++)
        sum += part[i][col];
    return sum;
}

/* held: S lies in shared memory; else (heads too long for it) it stays where it is. */
static __global__ void __launch_bounds__(DELTA_WARPS * 32, 4) delta_kernel(gpu_delta a, bool held)
{
    __shared__ float asked[DELTA_WARPS][DELTA_COLS], answer[DELTA_WARPS][DELTA_COLS];
    __shared__ float squares[2][DELTA_WARPS];
    SMEM(float, k); /* k [Dk], q [Dk], S [Dk][32] */
    const int warp = (int)threadIdx.x / 32, col = (int)threadIdx.x % 32, Dk = a.Dk;
    const int h = (int)blockIdx.y, seq = (int)blockIdx.z, hk = h / (a.Hv / a.Hk);
    const int64_t j = (int64_t)blockIdx.x * DELTA_COLS + col;
    const bool mine = j < a.Dv;
    float *state = state_of(a.state, a.seqs, seq), *q = k + Dk;
    if (!state) return;
    const bool fresh = starts(a.seqs, seq);
    state += (int64_t)h * Dk * a.Dv + j;
    float *S = held ? q + Dk + col : state;
    const int64_t ld = held ? DELTA_COLS : a.Dv;
    for (int i = warp; i < Dk; i += DELTA_WARPS)
        if (held || (fresh && mine)) S[i * ld] = fresh || !mine ? 0.0f : state[(int64_t)i * a.Dv];
    const int64_t row0 = a.seqs.row0[seq], end = row0 + a.seqs.n_rows[seq];
    for (int64_t t = row0; t < end; t++) {
        float qq = 0, kk = 0;
        for (int i = (int)threadIdx.x; i < Dk; i += DELTA_WARPS * 32) {
            q[i] = lane(a.q, t * a.ldq + (int64_t)hk * Dk + i);
            k[i] = lane(a.k, t * a.ldk + (int64_t)hk * Dk + i);
            qq += q[i] * q[i], kk += k[i] * k[i];
        }
        qq = warp_sum(qq), kk = warp_sum(kk);
        if (col == 0) squares[0][warp] = qq, squares[1][warp] = kk;
        __syncthreads();
        qq = kk = 0;
        for (int i = 0; i < DELTA_WARPS; i++)
            qq += squares[0][i], kk += squares[1][i];
        const float q_scale = 1.0f / sqrtf(qq + 1e-6f) / sqrtf((float)Dk),
                    k_scale = 1.0f / sqrtf(kk + 1e-6f);
        const float decay = expf(a.g[t * a.Hv + h]), beta = a.beta[t * a.Hv + h];
        asked[warp][col] = held || mine ? decay_and_ask(S, ld, Dk, warp, k, decay, k_scale) : 0.0f;
        __syncthreads();
        if (held || mine) {
            const float v = mine ? lane(a.v, t * a.ldv + (int64_t)h * a.Dv + j) : 0.0f;
            const float d = beta * (v - over_warps(asked, col));
            answer[warp][col] = write_and_ask(S, ld, Dk, warp, k, q, d, k_scale, q_scale);
        }
        __syncthreads();
        if (warp == 0 && mine) put_lane(a.out, (t * a.Hv + h) * a.Dv + j, over_warps(answer, col));
    }
    for (int i = warp; held && mine && i < Dk; i += DELTA_WARPS)
        state[(int64_t)i * a.Dv] = S[i * ld];
}

extern "C" const char *cuda_gated_delta(const void *args_, void *stream)
{
    const gpu_delta *a = (const gpu_delta *)args_;
    if (a->Hk < 1 || a->Hv % a->Hk || a->Dk < 1 || a->Dv < 1)
        return "gated_delta: value heads are no multiple of key heads, or heads have no lanes";
    if (a->seqs.n < 1 || a->Hv < 1) return NULL;
    if (a->seqs.n > 65535 || a->Hv > 65535) return "gated_delta: more heads than a grid holds";
    const size_t vectors = 2 * (size_t)a->Dk * sizeof(float), S = vectors / 2 * DELTA_COLS;
    const bool held = vectors + S + 4096 <= DELTA_SMEM;
    if (vectors + 4096 > DELTA_SMEM) return "gated_delta: keys of more than 5632 lanes";
    const dim3 grid((unsigned)((a->Dv + DELTA_COLS - 1) / DELTA_COLS), (unsigned)a->Hv,
                    (unsigned)a->seqs.n);
    return LAUNCH(delta_kernel, grid, dim3(DELTA_WARPS * 32), vectors + (held ? S : 0), stream, *a,
                  held);
}

/* ---- gates --------------------------------------------------------------------------------------
 */

static __global__ void gates_kernel(gpu_delta_gates a)
{
    const int64_t i = (int64_t)blockIdx.x * 128 + threadIdx.x, t = i / a.Hv;
    const int h = (int)(i % a.Hv);
    if (t >= a.T) return;
    const float b = lane(a.ba, t * a.ld + h), x = lane(a.ba, t * a.ld + a.Hv + h) + a.dt_bias[h];
    a.g[i] = -expf(a.a_log[h]) * (x > 20.0f ? x : log1pf(expf(x))); /* softplus, linear past 20 */
    a.beta[i] = 1.0f / (1.0f + expf(-b));
}

extern "C" const char *cuda_delta_gates(const void *args_, void *stream)
{
    const gpu_delta_gates *a = (const gpu_delta_gates *)args_;
    const int64_t blocks = (a->T * a->Hv + 127) / 128;
    if (blocks < 1) return NULL;
    if (blocks > INT32_MAX) return "delta_gates: more rows than a grid holds";
    return LAUNCH(gates_kernel, dim3((unsigned)blocks), dim3(128), 0, stream, *a);
}
