/* Attention over a paged cache, for every type, order and option (kern_attention): the kernel that
 * takes what no tuned one does.
 *
 * A block of four warps has some rows of a step that follow each other, one KV head and some of its
 * query heads: R queries at most. It goes through the keys that these see in tiles of 32:
 *
 *   scores   K of 128 lanes at a time to shared memory; lane = key, a warp has R/4 queries
 *   softmax  online, in f32; a query that sees no key of the tile stays as it is, so that an
 *            infinite maximum is never subtracted from itself for lack of keys
 *   values   V of 128 lanes at a time to shared memory; thread = lane of V, sums of all queries in
 *            registers
 *
 * A key that one query of the block sees and another does not is left out of the other's sums, not
 * multiplied by 0: NaN in it is seen by those who see the key. Rows of several sequences in a block
 * are worked on one sequence after the other.
 *
 * Where there are too few blocks to fill a chip, the keys are parted: each part leaves sums,
 * maximum and total in `work`, and a second kernel merges them in their order. How many parts is
 * decided from what the host knows: a graph may be replayed with other lengths. */
#include "kern/cuda/plain_attention.h"
#include "kern/cuda/plain_kv.cuh"

#define FILL      264 /* blocks that fill a chip */
#define PART_KEYS 128 /* fewest keys worth a part */
#define MAX_LANES 1024
#define Q_FLOATS  7168 /* queries of a block in shared memory */
#define UNSEEN    (-1.0f)

/* How the work is divided. */
struct attention_shape {
    int G;           /* query heads of a KV head */
    int heads, sets; /* of them in a block; blocks that share a KV head */
    int rows, parts; /* rows of the step in a block; parts of the keys */
    int Dq;          /* lanes of a query in shared memory: D up to a multiple of 4 */
    float *part;     /* [T, H, parts][2 + Dv]: maximum, total (UNSEEN: no keys), sums */
};

/* Position of a row in its sequence; -1 = it has none. */
static __device__ int row_position(const gpu_seqs &s, int64_t t)
{
    int seq = s.row_seq[t];
    if (seq < 0 || seq >= s.n) return -1;
    int i = (int)(t - s.row0[seq]), n = s.n_rows[seq], len = s.kv_len[seq];
    return i < 0 || i >= n || len < n ? -1 : len - n + i;
}
static __device__ __forceinline__ int first_key(int window, int position)
{
    return window > 0 && position >= window ? position - window + 1 : 0;
}
/* Scores of far outliers may differ by infinity: the larger one has all the weight then. */
static __device__ __forceinline__ float weight_of(float x, float max)
{
    return expf(x - max);
}

/* Rows of a block that follow each other in one sequence. */
struct attention_run {
    int64_t row; /* of the step */
    int seq, position, n, hk, h0, heads, queries;
};
/* Softmax of the queries of a warp, the same in every lane; [R/4] used. */
struct softmax {
    float max, total;
    bool any;
};

template <int R> struct attention_smem {
    alignas(16) float tile[KV_TILE * KV_LD];
    gpu_kv kv;
    alignas(16) float p[KV_TILE * R];
    float shrink[R], max[R], total[R];
};

template <int R>
static __device__ __forceinline__ void
take_scores(const gpu_attention &a, const attention_shape &sh, const attention_run &run,
            const kv_keys &keys, int t0, attention_smem<R> &m, const float *q, float score[R / 4])
{
    const int warp = (int)threadIdx.x / 32, key = (int)threadIdx.x % 32;
    for (int i = 0; i < R / 4; i++)
        score[i] = 0;
    for (int d0 = 0; d0 < a.kv.D; d0 += KV_SPAN) {
        __syncthreads();
        kv_tile(m.kv, 0, run.hk, keys, t0, d0, a.kv.D, m.tile);
        __syncthreads();
        const int n = sh.Dq - d0 < KV_SPAN ? sh.Dq - d0 : KV_SPAN;
        const float *k = m.tile + key * KV_LD, *at = q + warp * (R / 4) * sh.Dq + d0;
#pragma unroll 2
        for (int d = 0; d < n; d += 4) {
            float4 x = *(const float4 *)(k + d);
#pragma unroll
            for (int i = 0; i < R / 4; i++) {
                float4 y = *(const float4 *)(at + i * sh.Dq + d);
                score[i] += x.x * y.x;
                score[i] += x.y * y.y;
                score[i] += x.z * y.z;
                score[i] += x.w * y.w;
            }
        }
    }
}

template <int R>
static __device__ __forceinline__ void
take_softmax(const gpu_attention &a, const attention_run &run, int t0, attention_smem<R> &m,
             float score[R / 4], softmax st[R / 4])
{
    const int warp = (int)threadIdx.x / 32, lane_ = (int)threadIdx.x % 32, key = t0 + lane_;
#pragma unroll
    for (int i = 0; i < R / 4; i++) {
        const int r = warp * (R / 4) + i, position = run.position + r / run.heads;
        const bool seen =
            r < run.queries && key <= position && key >= first_key(a.window, position);
        float p = UNSEEN, shrink = 1;
        if (__any_sync(0xffffffffu, seen)) {
            float x = score[i] * a.scale;
            if (a.softcap > 0) x = a.softcap * tanhf(x / a.softcap);
            float max = max_nan(st[i].max, warp_max(seen ? x : -INFINITY));
            shrink = weight_of(st[i].max, max);
            if (seen) p = weight_of(x, max);
            st[i].total = st[i].total * shrink + warp_sum(seen ? p : 0.0f);
            st[i].max = max;
            st[i].any = true;
        }
        m.p[lane_ * R + r] = p;
        if (lane_ == 0) m.shrink[r] = shrink;
    }
}

/* whole: every query sees every key of the tile. */
template <int R>
static __device__ __forceinline__ void add_values(const attention_smem<R> &m, bool whole,
                                                  float acc[R])
{
    const float *v = m.tile + threadIdx.x;
#pragma unroll
    for (int r = 0; r < R; r++)
        acc[r] *= m.shrink[r];
#pragma unroll 2
    for (int key = 0; key < KV_TILE; key++) {
        const float x = v[key * KV_LD];
        const float4 *p = (const float4 *)(m.p + key * R);
#pragma unroll
        for (int i = 0; i < R / 4; i++) {
            const float4 w = p[i];
            if (whole || !(w.x < 0)) acc[4 * i] += w.x * x;
            if (whole || !(w.y < 0)) acc[4 * i + 1] += w.y * x;
            if (whole || !(w.z < 0)) acc[4 * i + 2] += w.z * x;
            if (whole || !(w.w < 0)) acc[4 * i + 3] += w.w * x;
        }
    }
}

template <int R, int SPANS>
static __device__ __forceinline__ void put_run(const gpu_attention &a, const attention_shape &sh,
                                               const attention_run &run, const attention_smem<R> &m,
                                               float acc[SPANS][R])
{
    const int Dv = kv_v_lanes(a.kv);
    int row = 0, nth = 0; /* of query r */
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (r >= run.queries) break;
        const int h = run.h0 + nth;
        const int64_t t = run.row + row, out = t * a.ldo + (int64_t)h * Dv;
        float *part = sh.part + ((t * a.H + h) * sh.parts + blockIdx.z) * (Dv + 2);
        const float total = m.total[r];
#pragma unroll
        for (int j = 0; j < SPANS; j++) {
            const int d = j * KV_SPAN + (int)threadIdx.x;
            if (d >= Dv) break;
            if (sh.parts == 1)
                put_lane(a.out, out + d, acc[j][r] / total);
            else
                part[2 + d] = acc[j][r];
        }
        if (sh.parts > 1 && threadIdx.x < 2) part[threadIdx.x] = threadIdx.x ? total : m.max[r];
        if (++nth == run.heads) nth = 0, row++;
    }
}

template <int R, int SPANS>
static __device__ void attend(const gpu_attention &a, const attention_shape &sh,
                              const attention_run &run, attention_smem<R> &m, float *q)
{
    const int warp = (int)threadIdx.x / 32, last = run.position + run.n - 1, Dv = kv_v_lanes(a.kv);
    const kv_keys keys = {a.seqs.pages + (int64_t)run.seq * a.seqs.max_pages,
                          first_key(a.window, run.position), last + 1};
    const int first = keys.lo / KV_TILE, tiles = (keys.hi + KV_TILE - 1) / KV_TILE - first;
    const int each = (tiles + sh.parts - 1) / sh.parts, from = first + (int)blockIdx.z * each;
    const int end = from + each < first + tiles ? from + each : first + tiles;
    float acc[SPANS][R], score[R / 4];
    softmax st[R / 4];
    __syncthreads(); /* m.kv is there; another run is no longer read */
    for (int i = (int)threadIdx.x; i < run.queries * sh.Dq; i += KV_SPAN) {
        const int r = i / sh.Dq, d = i % sh.Dq, h = run.h0 + r % run.heads;
        const int64_t row = run.row + r / run.heads;
        q[i] = d < a.kv.D ? lane(a.q, row * a.ldq + (int64_t)h * a.kv.D + d) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < R / 4; i++) {
        const int r = warp * (R / 4) + i;
        const bool sink = a.sinks && r < run.queries;
        st[i].max = sink ? a.sinks[run.h0 + r % run.heads] : -INFINITY;
        st[i].any = sink && blockIdx.z == 0; /* the sink counts once */
        st[i].total = st[i].any ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < SPANS; j++)
        for (int r = 0; r < R; r++)
            acc[j][r] = 0;
    for (int tile = from; tile < end; tile++) {
        const int t0 = tile * KV_TILE;
        const bool whole =
            run.queries == R && t0 >= first_key(a.window, last) && t0 + KV_TILE - 1 <= run.position;
        take_scores<R>(a, sh, run, keys, t0, m, q, score);
        take_softmax<R>(a, run, t0, m, score, st);
#pragma unroll
        for (int j = 0; j < SPANS; j++) {
            if (j * KV_SPAN >= Dv) continue;
            __syncthreads();
            kv_tile(m.kv, 1, run.hk, keys, t0, j * KV_SPAN, Dv, m.tile);
            __syncthreads();
            add_values<R>(m, whole, acc[j]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < R / 4; i++)
        if (threadIdx.x % 32 == 0) {
            m.max[warp * (R / 4) + i] = st[i].max;
            m.total[warp * (R / 4) + i] = st[i].any ? st[i].total : UNSEEN;
        }
    __syncthreads();
    put_run<R, SPANS>(a, sh, run, m, acc);
}

static __device__ void put_zeros(const gpu_attention &a, const attention_run &run)
{
    const int Dv = kv_v_lanes(a.kv), n = run.heads * Dv;
    for (int i = (int)threadIdx.x; i < run.n * n; i += KV_SPAN)
        put_lane(a.out, (run.row + i / n) * a.ldo + (int64_t)run.h0 * Dv + i % n, 0.0f);
}

template <int R, int SPANS>
static __global__ void __launch_bounds__(KV_SPAN, 2)
    attention_kernel(gpu_attention a, attention_shape sh)
{
    __shared__ __align__(16) attention_smem<R> m;
    SMEM(float, q); /* [R][Dq] */
    if (threadIdx.x == 0) m.kv = a.kv;
    const int64_t t0 = (int64_t)blockIdx.x * sh.rows;
    const int64_t end = t0 + sh.rows < a.seqs.T ? t0 + sh.rows : a.seqs.T;
    attention_run run;
    run.hk = (int)blockIdx.y / sh.sets;
    const int set = (int)blockIdx.y % sh.sets * sh.heads;
    run.h0 = run.hk * sh.G + set;
    run.heads = sh.G - set < sh.heads ? sh.G - set : sh.heads;
    for (run.row = t0; run.row < end; run.row += run.n) {
        run.seq = a.seqs.row_seq[run.row];
        run.position = row_position(a.seqs, run.row);
        for (run.n = 1; run.row + run.n < end; run.n++) {
            const int64_t t = run.row + run.n;
            const int position = row_position(a.seqs, t);
            if (run.position < 0 ? position >= 0
                                 : position != run.position + run.n || a.seqs.row_seq[t] != run.seq)
                break;
        }
        run.queries = run.n * run.heads;
        if (run.position >= 0)
            attend<R, SPANS>(a, sh, run, m, q);
        else if (blockIdx.z == 0)
            put_zeros(a, run);
    }
}

/* A block merges the parts of one row and head. */
static __global__ void __launch_bounds__(KV_SPAN) merge_kernel(gpu_attention a, attention_shape sh)
{
    const int Dv = kv_v_lanes(a.kv);
    const int64_t t = blockIdx.x / (unsigned)a.H;
    const int h = (int)(blockIdx.x % (unsigned)a.H);
    const float *part = sh.part + (t * a.H + h) * sh.parts * (Dv + 2);
    if (row_position(a.seqs, t) < 0) return;
    float max = -INFINITY, total = 0;
    for (int i = 0; i < sh.parts; i++) {
        const float *p = part + (int64_t)i * (Dv + 2);
        if (p[1] != UNSEEN) max = max_nan(max, p[0]);
    }
    for (int i = 0; i < sh.parts; i++) {
        const float *p = part + (int64_t)i * (Dv + 2);
        if (p[1] != UNSEEN) total += p[1] * weight_of(p[0], max);
    }
    for (int d = (int)threadIdx.x; d < Dv; d += KV_SPAN) {
        float sum = 0;
        for (int i = 0; i < sh.parts; i++) {
            const float *p = part + (int64_t)i * (Dv + 2);
            if (p[1] != UNSEEN) sum += p[2 + d] * weight_of(p[0], max);
        }
        put_lane(a.out, t * a.ldo + (int64_t)h * Dv + d, sum / total);
    }
}

/* ---- the host -----------------------------------------------------------------------------------
 */

typedef void attention_fn(gpu_attention, attention_shape);
#define SPANS_OF(R) attention_kernel<R, 1>, attention_kernel<R, 2>, attention_kernel<R, 4>
static attention_fn *const kernels[3][4] = {
    {SPANS_OF(4), attention_kernel<4, 8>},
    {SPANS_OF(8), attention_kernel<8, 8>},
    {SPANS_OF(16), NULL}, /* wider ones do not have so many queries in shared memory */
};

extern "C" size_t cuda_attention_work(int rows, int H, int Dv)
{
    int64_t most = (int64_t)rows * H * ATTENTION_PARTS;
    int64_t shared = (int64_t)rows * H * ATTENTION_SHARED_RUNS;
    if (most > ATTENTION_PART_ROWS) most = ATTENTION_PART_ROWS;
    most += shared > ATTENTION_SHARED_ROWS ? ATTENTION_SHARED_ROWS : shared;
    return ATTENTION_COUNTERS * sizeof(unsigned) + (size_t)most * ((size_t)Dv + 2) * sizeof(float);
}

static int at_most(int64_t x, int64_t limit)
{
    return (int)(x < limit ? x : limit);
}
static int64_t over(int64_t x, int64_t by)
{
    return (x + by - 1) / by;
}

/* Queries of a block, 4, 8 or 16: as many as share keys, and as shared memory holds. */
static int shape_of(const gpu_attention *a, attention_shape *s)
{
    int rows = a->seqs.max_rows > 1 ? a->seqs.max_rows : 1, R = 4;
    s->G = a->H / a->kv.Hk;
    s->Dq = (a->kv.D + 3) / 4 * 4;
    while (R < 16 && R < (int64_t)s->G * rows && 2 * R * s->Dq <= Q_FLOATS)
        R *= 2;
    s->sets = (int)over(s->G, R);
    s->heads = (int)over(s->G, s->sets);
    s->rows = at_most(R / s->heads, rows);
    int64_t blocks = over(a->seqs.T, s->rows) * a->kv.Hk * s->sets, keys = a->seqs.max_len;
    if (a->window > 0) keys = at_most(keys, (int64_t)a->window + s->rows);
    int64_t parts = at_most(over(FILL, blocks), over(keys, PART_KEYS));
    parts = at_most(parts, ATTENTION_PART_ROWS / ((int64_t)a->seqs.T * a->H));
    s->parts = parts < 1 || !a->work ? 1 : at_most(parts, ATTENTION_PARTS);
    s->part = a->work ? (float *)((unsigned *)a->work + ATTENTION_COUNTERS) : NULL;
    return R;
}

extern "C" const char *plain_attention(const void *args_, void *stream)
{
    const gpu_attention *a = (const gpu_attention *)args_;
    const char *why = kv_refuse(a->kv);
    attention_shape s;
    if (why) return why;
    if (a->H < 1 || a->H % a->kv.Hk) return "attention: query heads are no multiple of KV heads";
    if (a->kv.D > MAX_LANES) return "attention: heads of more than 1024 lanes";
    if (a->seqs.T < 1) return NULL;
    int R = shape_of(a, &s), spans = (kv_v_lanes(a->kv) + KV_SPAN - 1) / KV_SPAN;
    int64_t sets = (int64_t)a->kv.Hk * s.sets;
    attention_fn *kernel = kernels[R / 8][spans > 4 ? 3 : spans > 2 ? 2 : spans - 1];
    if (sets > 65535) return "attention: more KV heads than a grid holds";
    why = LAUNCH(kernel, dim3((unsigned)over(a->seqs.T, s.rows), (unsigned)sets, (unsigned)s.parts),
                 dim3(KV_SPAN), (size_t)(R * s.Dq) * sizeof(float), stream, *a, s);
    if (why || s.parts == 1) return why;
    return LAUNCH(merge_kernel, dim3((unsigned)a->seqs.T * (unsigned)a->H), dim3(KV_SPAN), 0,
                  stream, *a, s);
}
