/* Plain kernels for the routing of a mixture of experts, as moe.c and ref/moe.c have it.
 *
 *   route     a warp has a token: scores and choices lie in shared memory, the best that is still
 * in is found by all lanes, the few weights of the chosen are made by lane 0 in their order sort a
 * block has an expert: its warps share the slots in contiguous pieces and count in them (experts
 * before it, itself), then each warp writes its own behind those of the warps before it, in order
 *   combine   a thread has a lane of a token and adds in the order of the choices */
#include <float.h>
#include "kern/cuda/plain_rows.cuh"

static __device__ __forceinline__ int my_lane(void)
{
    return (int)threadIdx.x % 32;
}

/* ---- route --------------------------------------------------------------------------------------
 */
/* Index of the largest that is still in, the lowest of equals; -1 when none is. All lanes get it.
 */
static __device__ int best_of(const float *v, int n)
{
    int best = -1;
    float top = -INFINITY;
    for (int i = my_lane(); i < n; i += 32)
        if (v[i] > -INFINITY && (best < 0 || v[i] > top)) {
            best = i;
            top = v[i];
        }
    for (int by = 16; by; by >>= 1) {
        int other = __shfl_xor_sync(FULL, best, by);
        float its = __shfl_xor_sync(FULL, top, by);
        if (other >= 0 && (best < 0 || its > top || (its == top && other < best))) {
            best = other;
            top = its;
        }
    }
    return best;
}

/* NaN in any is NaN in all. */
static __device__ void softmax_all(gpu_x x, int64_t at, int n, float *out)
{
    float max = -INFINITY, sum = 0;
    for (int i = my_lane(); i < n; i += 32)
        max = max_nan(max, lane(x, at + i));
    max = warp_max(max);
    for (int i = my_lane(); i < n; i += 32)
        sum += out[i] = expf(lane(x, at + i) - max);
    sum = warp_sum(sum);
    for (int i = my_lane(); i < n; i += 32)
        out[i] /= sum;
}

static __device__ __forceinline__ float in_range(float x)
{
    return x > -FLT_MAX ? fminf(x, FLT_MAX) : -FLT_MAX; /* also a NaN */
}

static __device__ float group_score(const float *choice, int n, bool top2)
{
    float a = -INFINITY, b = -INFINITY;
    for (int i = 0; i < n; i++) {
        if (choice[i] > a) {
            b = a;
            a = choice[i];
        } else if (choice[i] > b) {
            b = choice[i];
        }
    }
    return in_range(top2 && n > 1 ? a + b : a);
}

/* Experts outside the best groups leave the choice. */
static __device__ void keep_groups(const gpu_route &a, float *choice, float *group)
{
    int n = a.E / a.n_group;
    for (int g = my_lane(); g < a.n_group; g += 32)
        group[g] = group_score(choice + g * n, n, a.group_top2);
    for (int i = 0; i < a.topk_group; i++) {
        __syncwarp();
        int g = best_of(group, a.n_group);
        __syncwarp();
        if (g >= 0 && my_lane() == 0) group[g] = -INFINITY;
    }
    __syncwarp();
    for (int i = my_lane(); i < a.n_group * n; i += 32)
        if (group[i / n] > -INFINITY) choice[i] = -INFINITY;
}

/* Weight of `best` among what is in and near it. */
static __device__ float share_of_near(const float *x, const float *choice, int E, int best,
                                      float jitter)
{
    float sum = 0;
    for (int i = my_lane(); i < E; i += 32) {
        float apart = (x[best] - x[i]) / fmaxf(fabsf(x[i]), x[best]);
        if (choice[i] > -INFINITY && !(apart > 2 * jitter)) sum += expf(x[i] - x[best]);
    }
    return 1.0f / warp_sum(sum);
}

/* Lane 0. w holds the scores of the chosen, or the shares of the sparse mix. */
static __device__ void weigh(const gpu_route &a, float *w)
{
    float sum = 0;
    if (a.kind == KERN_ROUTE_TOPK_SOFTMAX) {
        float max = w[0], all = 0;
        for (int j = 1; j < a.top_k; j++)
            max = w[j] > max ? w[j] : max;
        for (int j = 0; j < a.top_k; j++)
            all += w[j] = expf(w[j] - max);
        for (int j = 0; j < a.top_k; j++)
            w[j] /= all;
    }
    for (int j = 0; j < a.top_k; j++)
        sum += w[j];
    for (int j = 0; j < a.top_k; j++)
        w[j] = (a.renorm ? w[j] / (sum + 1e-20f) : w[j]) * a.scale;
}

static __device__ void scores(const gpu_route &a, int64_t at, float *score, float *choice)
{
    if (a.kind == KERN_ROUTE_SOFTMAX) softmax_all(a.logits, at, a.E, score);
    for (int e = my_lane(); e < a.E; e += 32) {
        if (a.kind == KERN_ROUTE_SIGMOID)
            score[e] = sigmoid(lane(a.logits, at + e));
        else if (a.kind != KERN_ROUTE_SOFTMAX)
            score[e] = lane(a.logits, at + e);
        choice[e] = in_range(score[e] + (a.bias ? a.bias[e] : 0.0f));
    }
    __syncwarp();
}

/* Shared: score [E], choice [E], group [n_group]. */
static __global__ void __launch_bounds__(32) route_kernel(const gpu_route a)
{
    SMEM(float, score);
    float *choice = score + a.E;
    for (int64_t t = blockIdx.x; t < a.T; t += gridDim.x) {
        int32_t *expert = a.expert + t * a.top_k;
        float *weight = a.weight + t * a.top_k;
        scores(a, t * a.E, score, choice);
        if (a.n_group > 1) keep_groups(a, choice, choice + a.E);
        for (int j = 0; j < a.top_k; j++) {
            __syncwarp();
            int e = best_of(choice, a.E);
            float w = e < 0 ? 0 : score[e];
            if (a.kind == KERN_ROUTE_SPARSE_MIX && e >= 0)
                w = share_of_near(score, choice, a.E, e, a.jitter);
            __syncwarp();
            if (my_lane() == 0) {
                expert[j] = e < 0 ? 0 : e; /* only with fewer experts in than top_k */
                weight[j] = e < 0 && a.kind != KERN_ROUTE_SPARSE_MIX ? score[0] : w;
                if (e >= 0) choice[e] = -INFINITY;
            }
        }
        if (my_lane() == 0) weigh(a, weight);
        __syncwarp();
    }
}
extern "C" const char *cuda_route(const void *args_, void *stream)
{
    const gpu_route *a = (const gpu_route *)args_;
    size_t smem = (2 * (size_t)a->E + (size_t)(a->n_group > 1 ? a->n_group : 0)) * sizeof(float);
    if (!a->T || !a->top_k) return NULL;
    if (a->kind < KERN_ROUTE_SOFTMAX || a->kind > KERN_ROUTE_SPARSE_MIX)
        return "route: no such kind";
    if (smem > 49152) return "route: the scores of so many experts do not fit in shared memory";
    return LAUNCH(route_kernel, blocks_for(a->T, 1), 32, smem, stream, *a);
}

/* ---- sort ---------------------------------------------------------------------------------------
 */
static __device__ __forceinline__ int warp_count(int v)
{
    for (int i = 16; i; i >>= 1)
        v += __shfl_xor_sync(FULL, v, i);
    return v;
}

static __global__ void __launch_bounds__(1024) route_sort_kernel(const gpu_route_sort a, int64_t n)
{
    __shared__ int before[32], own[32]; /* of the slots of each warp */
    int e = (int)blockIdx.x, warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    int64_t piece = ((n + warps - 1) / warps + 31) / 32 * 32, lo = warp * piece;
    int64_t hi = lo + piece < n ? lo + piece : n;
    int less = 0, same = 0;
    for (int64_t i = lo + my_lane(); i < hi; i += 32) {
        less += a.expert[i] < e;
        same += a.expert[i] == e;
    }
    less = warp_count(less);
    same = warp_count(same);
    if (my_lane() == 0) {
        before[warp] = less;
        own[warp] = same;
    }
    __syncthreads();
    int first = 0, at = 0, all = 0;
    for (int w = 0; w < warps; w++) {
        first += before[w];
        at += w < warp ? own[w] : 0;
        all += own[w];
    }
    if (threadIdx.x == 0) {
        a.first[e] = first;
        if (e == a.E - 1) a.first[a.E] = first + all;
    }
    at += first;
    for (int64_t i0 = lo; i0 < hi; i0 += 32) {
        int64_t i = i0 + my_lane();
        bool mine = i < hi && a.expert[i] == e;
        unsigned who = __ballot_sync(FULL, mine);
        if (mine) {
            int s = at + __popc(who & ((1u << my_lane()) - 1));
            a.slot[i] = s;
            a.row[s] = (int32_t)(i / a.top_k);
        }
        at += __popc(who);
    }
}
/* T 0 too: then every expert has no slots, and `first` says so. */
extern "C" const char *cuda_route_sort(const void *args_, void *stream)
{
    const gpu_route_sort *a = (const gpu_route_sort *)args_;
    int64_t n = a->T * a->top_k, threads = (n + 31) / 32 * 32;
    if (!a->E) return NULL;
    if (n > INT32_MAX) return "route_sort: more than 2^31 slots";
    threads = threads < 32 ? 32 : threads > 1024 ? 1024 : threads;
    return LAUNCH(route_sort_kernel, (unsigned)a->E, (unsigned)threads, 0, stream, *a, n);
}

/* ---- combine ------------------------------------------------------------------------------------
 */
static __global__ void __launch_bounds__(ROW_THREADS, 1) combine_kernel(const gpu_combine a)
{
    FOR_LANES(t, i, a.N, a.T)
    {
        float sum = a.add ? lane(a.out, t * a.N + i) : 0.0f;
        for (int64_t j = t * a.top_k; j < (t + 1) * a.top_k; j++)
            sum += a.weight[j] * lane(a.y, a.slot[j] * a.ldy + i);
        put_lane(a.out, t * a.N + i, sum);
    }
}
extern "C" const char *cuda_combine(const void *args_, void *stream)
{
    const gpu_combine *a = (const gpu_combine *)args_;
    if (!a->T || !a->N) return NULL;
    return LAUNCH(combine_kernel, grid_for(a->N, a->T), ROW_THREADS, 0, stream, *a);
}
