/* What choosing a token needs of a row of logits (kern_top): the largest lanes in order, the log of
 * the sum of exponentials, the first lane that is no number. Two kernels:
 *
 *   top_parts    a block has GPU_TOP_CHUNK lanes of a row, a thread 16 of them, a group; leaves the
 *                largest of each group, and maximum and sum of the chunk
 *   top_choose   a block has a row. As many groups as are wanted have lanes from some bound on, so
 *                that all wanted lanes are above it: the bound is found by counting the largest of
 *                the groups in bins, and only groups that reach it are read again. What was found
 *                is ranked.
 *
 * Where too much lies above every bound (many lanes are equal), the last wanted lane is searched
 * bit by bit in the whole row.
 *
 * A lane is a key: the order of floats as integers, then the lower id. -0 is 0. Exponentials and
 * their sums are in f64. */
#include "kern/cuda/plain_rows.cuh"

#define PART_THREADS 256
#define GROUP        (GPU_TOP_CHUNK / PART_THREADS) /* lanes */
#define THREADS      1024
#define FOUND        2048 /* lanes that are ranked at most */
#define GROUPS       1024 /* groups that are read again at most */
#define BINS         THREADS

static __device__ __forceinline__ uint32_t key_of(float v)
{
    uint32_t u = v == 0 ? 0 : __float_as_uint(v);
    return u >> 31 ? ~u : u | 0x80000000u;
}
static __device__ __forceinline__ float of_key(uint32_t k)
{
    return bits_f32(k >> 31 ? k & 0x7fffffffu : ~k);
}
static __device__ __forceinline__ bool no_number(float v)
{
    return v != v || v == INFINITY;
}
/* Lanes of vector j of group g: where the first is. */
static __device__ __forceinline__ int64_t vector_at(int g, int j)
{
    return (int64_t)(g / PART_THREADS) * GPU_TOP_CHUNK + (j * PART_THREADS + g % PART_THREADS) * 4;
}
/* Four lanes of a row from i on; -infinity behind its end. */
static __device__ __forceinline__ void get4(const float *row, int64_t i, int64_t V, bool wide,
                                            float v[4])
{
    if (wide && i + 4 <= V) {
        float4 f = *(const float4 *)(row + i);
        v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
        v[k] = i + k < V ? row[i + k] : -INFINITY;
}

static __device__ __forceinline__ double warp_sum_f64(double v)
{
    for (int i = 16; i; i >>= 1)
        v += __shfl_xor_sync(FULL, v, i);
    return v;
}
static __device__ __forceinline__ int warp_min(int v)
{
    for (int i = 16; i; i >>= 1) {
        int o = __shfl_xor_sync(FULL, v, i);
        v = o < v ? o : v;
    }
    return v;
}

static __global__ void __launch_bounds__(PART_THREADS) top_parts_kernel(const gpu_top a, bool wide)
{
    __shared__ double sums[PART_THREADS / 32];
    __shared__ int odds[PART_THREADS / 32];
    pdl_go();
    pdl_wait();
    const int chunks = (int)gridDim.x, chunk = (int)blockIdx.x,
              g = chunk * PART_THREADS + threadIdx.x;
    const int64_t t = blockIdx.y;
    const float *row = (const float *)a.x.p + t * a.V;
    uint32_t *keys = (uint32_t *)a.work + t * chunks * PART_THREADS;
    gpu_top_part *parts =
        (gpu_top_part *)((uint32_t *)a.work + a.T * chunks * PART_THREADS) + t * chunks;
    float v[GROUP], top = -INFINITY;
    uint32_t key = 0;
    int odd = INT32_MAX;
#pragma unroll
    for (int j = 0; j < GROUP / 4; j++)
        get4(row, vector_at(g, j), a.V, wide, v + 4 * j);
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
        int64_t i = vector_at(g, k / 4) + k % 4;
        if (i >= a.V) continue;
        uint32_t mine = key_of(v[k]);
        key = mine > key ? mine : key;
        if (no_number(v[k]))
            odd = (int)i < odd ? (int)i : odd;
        else
            top = fmaxf(top, v[k]);
    }
    keys[g] = key;
    top = block_max(top);
    double sum = 0;
    if (top > -INFINITY)
#pragma unroll
        for (int k = 0; k < GROUP; k++)
            if (!no_number(v[k])) sum += exp((double)v[k] - (double)top);
    sum = warp_sum_f64(sum);
    odd = warp_min(odd);
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = sum;
        odds[threadIdx.x / 32] = odd;
    }
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < PART_THREADS / 32; w++) {
        sum += sums[w];
        odd = odds[w] < odd ? odds[w] : odd;
    }
    parts[chunk] = gpu_top_part{sum, top, odd};
}

/* ---- choosing -----------------------------------------------------------------------------------
 */
struct top_shared {
    int counts[2][THREADS / 32]; /* in turns: one barrier a count */
    int n_groups, n_found;
    int pick, at_pick, above_pick; /* the bin of the wanted group; groups from it on, behind it */
    uint32_t least[THREADS / 32], most[THREADS / 32];
    int bins[BINS];
    int group[GROUPS];
    int rank[FOUND];
    unsigned long long found[FOUND];
};
/* Sum over the block. */
static __device__ __forceinline__ int block_count(top_shared *s, int n, int *turn)
{
    int *all = s->counts[ *turn ^= 1], sum = 0;
    for (int i = 16; i; i >>= 1)
        n += __shfl_xor_sync(FULL, n, i);
    if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = n;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++)
        sum += all[i];
    return sum;
}

/* The least and the largest of the block. */
static __device__ __forceinline__ void block_range(top_shared *s, uint32_t *lo, uint32_t *hi)
{
    for (int i = 16; i; i >>= 1) {
        uint32_t l = __shfl_xor_sync(FULL, *lo, i), h = __shfl_xor_sync(FULL, *hi, i);
        *lo = l < *lo ? l : *lo;
        *hi = h > *hi ? h : *hi;
    }
    if (threadIdx.x % 32 == 0) {
        s->least[threadIdx.x / 32] = *lo;
        s->most[threadIdx.x / 32] = *hi;
    }
    __syncthreads();
    for (int w = 0; w < THREADS / 32; w++) {
        *lo = s->least[w] < *lo ? s->least[w] : *lo;
        *hi = s->most[w] > *hi ? s->most[w] : *hi;
    }
}

static __device__ __forceinline__ void keep(top_shared *s, uint32_t key, int64_t id)
{
    int at = atomicAdd(&s->n_found, 1);
    if (at < FOUND) s->found[at] = (unsigned long long)key << 32 | (uint32_t) ~(uint32_t)id;
}

/* A bound that as many groups as are wanted reach, and few more; 0 where there are not as many. The
 * keys from lo to hi, the smallest and the largest at first, are counted in BINS bins; then so are
 * those of the bin that the wanted group is in. */
static __device__ uint32_t bound_of(top_shared *s, const uint32_t *keys, int groups, int want,
                                    uint32_t lo, uint32_t hi)
{
    const int bin = (int)threadIdx.x, warp = bin / 32, me = bin % 32;
    int at_lo = groups, above = 0; /* groups from lo on; behind hi */
    if (at_lo <= want + want / 4) return 0;
    while (at_lo > want + want / 4 && lo < hi) {
        int shift = 0;
        while ((hi - lo) >> shift >= BINS)
            shift++;
        s->bins[bin] = 0;
        __syncthreads();
        for (int g = bin; g < groups; g += THREADS) {
            uint32_t k = keys[g];
            if (k >= lo && k <= hi && (k - lo) >> shift) atomicAdd(&s->bins[(k - lo) >> shift], 1);
        }
        __syncthreads();
        int mine = s->bins[bin], from = mine; /* those in the bin; those from it on */
        for (int by = 1; by < 32; by *= 2) {
            int o = __shfl_down_sync(FULL, from, by);
            from += me + by < 32 ? o : 0;
        }
        if (me == 0) s->counts[0][warp] = from;
        __syncthreads();
        from += above;
        for (int w = warp + 1; w < THREADS / 32; w++)
            from += s->counts[0][w];
        if (bin == 0) { /* many may be equal here (-infinity): not counted */
            mine += at_lo - from;
            from = at_lo;
        }
        if (from >= want && from - mine < want) {
            s->pick = bin;
            s->at_pick = from;
            s->above_pick = from - mine;
        }
        __syncthreads();
        uint32_t last = ((uint32_t)1 << shift) - 1;
        lo += (uint32_t)s->pick << shift;
        hi = hi - lo > last ? lo + last : hi;
        at_lo = s->at_pick;
        above = s->above_pick;
        __syncthreads(); /* all have read them */
    }
    return lo;
}

/* Lanes above the bound, from the groups that reach it. False: too many. */
static __device__ bool gather(top_shared *s, const uint32_t *keys, int groups, uint32_t bound,
                              const float *row, int64_t V, bool wide)
{
    for (int g = (int)threadIdx.x; g < groups; g += THREADS)
        if (keys[g] >= bound) {
            int at = atomicAdd(&s->n_groups, 1);
            if (at < GROUPS) s->group[at] = g;
        }
    __syncthreads();
    int n = s->n_groups;
    if (n > GROUPS) return false;
    for (int k = (int)threadIdx.x; k < n * (GROUP / 4); k += THREADS) {
        int64_t i = vector_at(s->group[k / (GROUP / 4)], k % (GROUP / 4));
        float v[4];
        get4(row, i, V, wide, v);
        for (int j = 0; j < 4; j++)
            if (i + j < V && key_of(v[j]) >= bound) keep(s, key_of(v[j]), i + j);
    }
    __syncthreads();
    return s->n_found <= FOUND;
}

/* The wanted lanes themselves, whatever the row is like: the key of the last of them bit by bit. */
static __device__ void gather_exact(top_shared *s, const float *row, int64_t V, int want, int *turn)
{
    unsigned long long last = 0;
    for (int bit = 63; bit >= 0; bit--) {
        unsigned long long with = last | 1ull << bit;
        int n = 0;
        for (int64_t i = threadIdx.x; i < V; i += THREADS)
            n += ((unsigned long long)key_of(row[i]) << 32 | (uint32_t) ~(uint32_t)i) >= with;
        if (block_count(s, n, turn) >= want) last = with;
    }
    if (threadIdx.x == 0) s->n_found = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < V; i += THREADS) {
        uint32_t key = key_of(row[i]);
        if (((unsigned long long)key << 32 | (uint32_t) ~(uint32_t)i) >= last) keep(s, key, i);
    }
    __syncthreads();
}

/* Each lane found is put where as many are above it as there are. Several threads share a lane. */
static __device__ void put_in_order(top_shared *s, int want, kern_top *out)
{
    const int n = s->n_found, step = (n + 31) / 32 * 32;
    const int shares = step < THREADS ? THREADS / step : 1, me = (int)threadIdx.x;
    for (int c = me; c < n; c += THREADS)
        s->rank[c] = 0;
    __syncthreads();
    for (int c = shares > 1 ? me % step : me; c < n && me / step < shares; c += THREADS) {
        unsigned long long mine = s->found[c];
        int above = 0;
        for (int j = shares > 1 ? me / step : 0; j < n; j += shares)
            above += s->found[j] > mine;
        atomicAdd(&s->rank[c], above);
        if (shares > 1) break;
    }
    __syncthreads();
    for (int c = me; c < n; c += THREADS)
        if (s->rank[c] < want) {
            out->value[s->rank[c]] = of_key((uint32_t)(s->found[c] >> 32));
            out->id[s->rank[c]] = (int32_t) ~(uint32_t)s->found[c];
        }
    for (int i = want + me; i < KERN_TOP; i += THREADS) {
        out->value[i] = -INFINITY;
        out->id[i] = -1;
    }
}

/* Warp 0: what the parts of the row come to. */
static __device__ void put_sums(const gpu_top_part *parts, int chunks, const float *row,
                                kern_top *out)
{
    float top = -INFINITY;
    double sum = 0;
    int odd = INT32_MAX, me = (int)threadIdx.x;
    for (int c = me; c < chunks; c += 32) {
        top = fmaxf(top, parts[c].top);
        odd = parts[c].odd < odd ? parts[c].odd : odd;
    }
    top = warp_max(top);
    odd = warp_min(odd);
    for (int c = me; c < chunks; c += 32)
        if (parts[c].top > -INFINITY) sum += parts[c].sum * exp((double)parts[c].top - (double)top);
    sum = warp_sum_f64(sum);
    if (me) return;
    out->lse = sum > 0 ? (double)top + log(sum) : -INFINITY;
    out->odd = odd == INT32_MAX ? -1 : odd;
    out->odd_value = odd == INT32_MAX ? 0 : row[odd];
}

/* Shared: top_shared, and the largest of the groups where they fit. */
static __global__ void __launch_bounds__(THREADS, 1)
    top_choose_kernel(const gpu_top a, int chunks, bool fit, bool wide)
{
    pdl_go();
    pdl_wait();
    SMEM(top_shared, s);
    uint32_t *copy = (uint32_t *)(s + 1);
    const int64_t t = blockIdx.x;
    const int groups = chunks * PART_THREADS, want = a.V < KERN_TOP ? (int)a.V : KERN_TOP;
    const float *row = (const float *)a.x.p + t * a.V;
    const uint32_t *from = (const uint32_t *)a.work + t * groups;
    const gpu_top_part *parts =
        (const gpu_top_part *)((const uint32_t *)a.work + a.T * groups) + t * chunks;
    kern_top *out = (kern_top *)a.out + t;
    int turn = 0;
    uint32_t lo = 0xffffffffu, hi = 0;
    for (int g = (int)threadIdx.x; g < groups; g += THREADS) {
        uint32_t k = from[g];
        lo = k < lo ? k : lo;
        hi = k > hi ? k : hi;
        if (fit) copy[g] = k;
    }
    const uint32_t *keys = fit ? copy : from;
    if (threadIdx.x == 0) s->n_groups = s->n_found = 0;
    block_range(s, &lo, &hi);
    uint32_t bound = bound_of(s, keys, groups, want, lo, hi);
    __syncthreads();
    if (!gather(s, keys, groups, bound, row, a.V, wide)) gather_exact(s, row, a.V, want, &turn);
    put_in_order(s, want, out);
    if (threadIdx.x < 32) put_sums(parts, chunks, row, out);
}

extern "C" const char *cuda_top(const void *args_, void *stream)
{
    const gpu_top *a = (const gpu_top *)args_;
    int64_t chunks = gpu_top_chunks(a->V);
    size_t smem = sizeof(top_shared) + (size_t)chunks * PART_THREADS * sizeof(uint32_t);
    bool fit = smem <= 96 * 1024;
    bool wide = !((uintptr_t)a->x.p & 15) && a->V % 4 == 0;
    if (a->x.type != GPU_F32) return "top: lanes that are not f32";
    if (!a->T || !a->V) return NULL;
    if (a->T > 65535) return "top: more than 65535 rows";
    if (a->V > INT32_MAX / 2) return "top: rows of more than 2^30 lanes";
    if (!fit) smem = sizeof(top_shared);
    const char *why = LAUNCH_EARLY(top_parts_kernel, dim3((unsigned)chunks, (unsigned)a->T),
                                   PART_THREADS, 0, stream, *a, wide);
    if (!why && smem > 48 * 1024) why = ALLOW_SMEM(top_choose_kernel, smem);
    if (why) return why;
    return LAUNCH_EARLY(top_choose_kernel, (unsigned)a->T, THREADS, smem, stream, *a, (int)chunks,
                        fit, wide);
}
