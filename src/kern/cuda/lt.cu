/* cuBLASLt behind lt.h. In its column-major words W is A, transposed, x is B and y is D, so that
 * scales of rows of W are those of A. Sums of INT8 (int32) and of few FP8_ROWS (f32) are written
 * into the work memory, as many rows at a time as fit, and scaled from there: the library scales
 * int8 products into int8 only, and its FP8 products that scale rows take more than twice as long
 * as those that do not where a short and deep weight meets few rows (bench/NOTES.md).
 *
 * A plan keeps the descriptors of its product; a run puts addresses, M and strides into them, which
 * allocates nothing. */
#include "kern/cuda/lt_rules.h"
#include "kern/cuda/port.cuh"
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LT_CALLS(X)                                                                                \
    X(Create)                                                                                      \
    X(Destroy)                                                                                     \
    X(GetVersion)                                                                                  \
    X(GetStatusString)                                                                             \
    X(Matmul)                                                                                      \
    X(MatmulDescCreate)                                                                            \
    X(MatmulDescDestroy)                                                                           \
    X(MatmulDescSetAttribute)                                                                      \
    X(MatrixLayoutCreate)                                                                          \
    X(MatrixLayoutDestroy)                                                                         \
    X(MatrixLayoutSetAttribute)                                                                    \
    X(MatmulPreferenceCreate)                                                                      \
    X(MatmulPreferenceDestroy)                                                                     \
    X(MatmulPreferenceSetAttribute)                                                                \
    X(MatmulAlgoGetHeuristic)

#define LT_MEMBER(name) decltype(&cublasLt##name) name;
struct lt_calls {
    LT_CALLS(LT_MEMBER)
};
#undef LT_MEMBER

#define LT_CANDIDATES 8
#define LT_SAID       256

typedef struct plan {
    lt_call shape; /* kind, y_bf16, fast, M, N, K; bias_bf16: whether the product adds it */
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
} plan;

struct lt {
    void *library;
    lt_calls f;
    cublasLtHandle_t handle;
    void *work;
    size_t work_bytes;
    plan **plans;
    int n_plans, room;
    char why[LT_SAID]; /* of the last refusal */
};

static const char *say(lt *l, const char *what, const lt_call *c, const char *cause)
{
    static const char *const names[LT_KINDS] = {"bf16", "fp8", "fp8 by rows", "fp8 by blocks",
                                                "int8"};
    snprintf(l->why, sizeof l->why, "cuBLASLt %d: %s %s of %lld x %lld x %lld: %s", lt_version(l),
             names[c->kind], what, (long long)c->M, (long long)c->N, (long long)c->K, cause);
    return l->why;
}

/* ---- the library --------------------------------------------------------------------------------
 */

static const char *load(lt *l)
{
    static thread_local char why[LT_SAID];
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
    for (const char *name : names) {
        l->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (l->library) break;
    }
    if (!l->library) return "neither libcublasLt.so.13 nor libcublasLt.so.12 can be loaded";
#define LT_FIND(name)                                                                              \
    l->f.name = (decltype(&cublasLt##name))dlsym(l->library, "cublasLt" #name);                    \
    if (!l->f.name) {                                                                              \
        snprintf(why, sizeof why, "libcublasLt has no cublasLt%s", #name);                         \
        return why;                                                                                \
    }
    LT_CALLS(LT_FIND)
#undef LT_FIND
    return NULL;
}

extern "C" const char *lt_open(lt **out, size_t work_bytes)
{
    static thread_local char why[LT_SAID];
    *out = NULL;
    lt *l = (lt *)calloc(1, sizeof *l);
    if (!l) return "out of memory";
    l->work_bytes = work_bytes ? work_bytes : (size_t)64 << 20;
    const char *bad = load(l);
    if (!bad) {
        cublasStatus_t rc = l->f.Create(&l->handle);
        if (rc != CUBLAS_STATUS_SUCCESS) {
            l->handle = NULL;
            snprintf(why, sizeof why, "cublasLtCreate: %s", l->f.GetStatusString(rc));
            bad = why;
        }
    }
    if (!bad) {
        cudaError_t rc = cudaMalloc(&l->work, l->work_bytes);
        if (rc != cudaSuccess) bad = cudaGetErrorString(rc);
    }
    if (bad) {
        lt_close(l);
        return bad;
    }
    *out = l;
    return NULL;
}

static void drop(lt *l, plan *p)
{
    if (p->desc) l->f.MatmulDescDestroy(p->desc);
    if (p->a) l->f.MatrixLayoutDestroy(p->a);
    if (p->b) l->f.MatrixLayoutDestroy(p->b);
    if (p->d) l->f.MatrixLayoutDestroy(p->d);
    free(p);
}

extern "C" void lt_close(lt *l)
{
    if (!l) return;
    for (int i = 0; i < l->n_plans; i++)
        drop(l, l->plans[i]);
    free(l->plans);
    if (l->work) cudaFree(l->work);
    if (l->handle) l->f.Destroy(l->handle);
    if (l->library) dlclose(l->library);
    free(l);
}

extern "C" int lt_version(const lt *l)
{
    return (int)l->f.GetVersion();
}

/* ---- plans --------------------------------------------------------------------------------------
 */

/* FP8 products of so many rows are scaled after the product. */
#define LT_APART_ROWS 128

/* Whether the sums of a planned shape go through the work memory. */
static bool apart(const lt_call *shape)
{
    return shape->kind == LT_INT8 || (shape->kind == LT_FP8_ROWS && shape->M <= LT_APART_ROWS);
}

/* Three quarters of the work memory hold such sums. */
static size_t library_bytes(const lt *l, const lt_call *shape)
{
    return apart(shape) ? l->work_bytes / 4 : l->work_bytes;
}
static void *library_work(const lt *l, const lt_call *shape)
{
    return (uint8_t *)l->work + (l->work_bytes - library_bytes(l, shape));
}

/* Rows of such a product at a time. */
static int64_t chunk_of(const lt *l, const lt_call *shape)
{
    int64_t fit = (int64_t)(l->work_bytes - library_bytes(l, shape)) / (shape->N * 4);
    return fit < 256 ? fit : fit / 256 * 256;
}

static const char *refuse(const lt *l, const lt_call *c)
{
    const char *why = lt_refuse_shape(c);
    if (why) return why;
    if (c->kind == LT_FP8_BLOCK && lt_version(l) < 120900) return "made for 12.9 and later";
    if (c->kind == LT_FP8_ROWS && lt_version(l) < 120900) return "made for 12.9 and later";
    if (apart(c) && chunk_of(l, c) < 1) return "a row of sums does not fit the work memory";
    return NULL;
}

static cublasStatus_t set(lt *l, plan *p, cublasLtMatmulDescAttributes_t what, const void *value,
                          size_t n)
{
    return l->f.MatmulDescSetAttribute(p->desc, what, value, n);
}

/* First failure of a list of calls. */
#define TRY(call)                                                                                  \
    do {                                                                                           \
        cublasStatus_t rc_ = (call);                                                               \
        if (rc_ != CUBLAS_STATUS_SUCCESS) return rc_;                                              \
    } while (0)

static cublasStatus_t describe_scales(lt *l, plan *p)
{
    int32_t a = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, b = a;
    if (p->shape.kind == LT_FP8_ROWS && !apart(&p->shape))
        a = b = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    if (p->shape.kind == LT_FP8_BLOCK) {
        a = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
        b = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    }
    const int8_t fast = p->shape.fast;
    TRY(set(l, p, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast));
    if (a == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) return CUBLAS_STATUS_SUCCESS;
    TRY(set(l, p, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &a, sizeof a));
    TRY(set(l, p, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &b, sizeof b));
    /* Without scales there is no algorithm of these modes; the real ones come with the call. */
    const void *some = l->work;
    TRY(set(l, p, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &some, sizeof some));
    return set(l, p, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &some, sizeof some);
}

static cublasStatus_t describe(lt *l, plan *p)
{
    const lt_call *c = &p->shape;
    const bool int8 = c->kind == LT_INT8, fp8 = c->kind != LT_BF16 && !int8, sums = apart(c);
    const cudaDataType_t in = int8  ? CUDA_R_8I
                              : fp8 ? CUDA_R_8F_E4M3
                                    : CUDA_R_16BF,
                         out = int8                 ? CUDA_R_32I
                               : c->y_bf16 && !sums ? CUDA_R_16BF
                                                    : CUDA_R_32F;
    const cublasOperation_t t = CUBLAS_OP_T;
    TRY(l->f.MatmulDescCreate(&p->desc, int8 ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F,
                              int8 ? CUDA_R_32I : CUDA_R_32F));
    TRY(set(l, p, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof t));
    if (fp8) TRY(describe_scales(l, p));
    if (lt_adds_bias(c) && !sums) {
        const cublasLtEpilogue_t e = CUBLASLT_EPILOGUE_BIAS;
        const int32_t type = CUDA_R_16BF;
        TRY(set(l, p, CUBLASLT_MATMUL_DESC_EPILOGUE, &e, sizeof e));
        TRY(set(l, p, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type));
    }
    TRY(l->f.MatrixLayoutCreate(&p->a, in, (uint64_t)c->K, (uint64_t)c->N, c->K));
    TRY(l->f.MatrixLayoutCreate(&p->b, in, (uint64_t)c->K, (uint64_t)lt_rows_of(c), c->ldx));
    return l->f.MatrixLayoutCreate(&p->d, out, (uint64_t)c->N, (uint64_t)lt_rows_of(c),
                                   sums ? c->N : c->ldy);
}

/* What changes from call to call. */
static cublasStatus_t address(lt *l, plan *p, const lt_call *c)
{
    const uint64_t rows = (uint64_t)lt_rows_of(c);
    const bool sums = apart(&p->shape);
    const int64_t ldd = sums ? c->N : c->ldy;
    TRY(l->f.MatrixLayoutSetAttribute(p->b, CUBLASLT_MATRIX_LAYOUT_COLS, &rows, sizeof rows));
    TRY(l->f.MatrixLayoutSetAttribute(p->b, CUBLASLT_MATRIX_LAYOUT_LD, &c->ldx, sizeof c->ldx));
    TRY(l->f.MatrixLayoutSetAttribute(p->d, CUBLASLT_MATRIX_LAYOUT_COLS, &rows, sizeof rows));
    TRY(l->f.MatrixLayoutSetAttribute(p->d, CUBLASLT_MATRIX_LAYOUT_LD, &ldd, sizeof ldd));
    if (c->kind != LT_BF16 && !sums) {
        TRY(set(l, p, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &c->w_scale, sizeof c->w_scale));
        TRY(set(l, p, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &c->x_scale, sizeof c->x_scale));
    }
    if (lt_adds_bias(&p->shape) && !sums)
        TRY(set(l, p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &c->bias_bf16, sizeof c->bias_bf16));
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t multiply(lt *l, plan *p, const lt_call *c, const cublasLtMatmulAlgo_t *algo,
                               void *d, void *work, size_t work_bytes)
{
    const float one = 1, zero = 0;
    const int32_t ione = 1, izero = 0;
    const bool int8 = c->kind == LT_INT8;
    return l->f.Matmul(l->handle, p->desc, int8 ? (const void *)&ione : &one, c->w, p->a, c->x,
                       p->b, int8 ? (const void *)&izero : &zero, d, p->d, d, p->d, algo, work,
                       work_bytes, (cudaStream_t)c->stream);
}

static cublasStatus_t candidates(lt *l, plan *p, cublasLtMatmulHeuristicResult_t *found, int *n)
{
    cublasLtMatmulPreference_t pref = NULL;
    const size_t work = library_bytes(l, &p->shape);
    const uint32_t align = 16;
    static const cublasLtMatmulPreferenceAttributes_t aligned[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    TRY(l->f.MatmulPreferenceCreate(&pref));
    cublasStatus_t rc = l->f.MatmulPreferenceSetAttribute(
        pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &work, sizeof work);
    for (auto what : aligned)
        if (rc == CUBLAS_STATUS_SUCCESS)
            rc = l->f.MatmulPreferenceSetAttribute(pref, what, &align, sizeof align);
    if (rc == CUBLAS_STATUS_SUCCESS)
        rc = l->f.MatmulAlgoGetHeuristic(l->handle, p->desc, p->a, p->b, p->d, p->d, pref,
                                         LT_CANDIDATES, found, n);
    l->f.MatmulPreferenceDestroy(pref);
    return rc;
}

/* us of a launch, or a negative number where it fails. */
static float time_one(lt *l, plan *p, const lt_call *c, const cublasLtMatmulAlgo_t *algo)
{
    cudaEvent_t e[2] = {NULL, NULL};
    cudaStream_t st = (cudaStream_t)c->stream;
    float ms = -1;
    void *d = apart(&p->shape) ? l->work : c->y;
    bool ok = cudaEventCreate(&e[0]) == cudaSuccess && cudaEventCreate(&e[1]) == cudaSuccess;
    for (int i = 0; ok && i < 4; i++) { /* the first one warms up */
        if (i == 1) ok = cudaEventRecord(e[0], st) == cudaSuccess;
        ok = ok && multiply(l, p, c, algo, d, library_work(l, &p->shape),
                            library_bytes(l, &p->shape)) == CUBLAS_STATUS_SUCCESS;
    }
    ok = ok && cudaEventRecord(e[1], st) == cudaSuccess &&
         cudaEventSynchronize(e[1]) == cudaSuccess &&
         cudaEventElapsedTime(&ms, e[0], e[1]) == cudaSuccess;
    for (cudaEvent_t ev : e)
        if (ev) cudaEventDestroy(ev);
    return ok ? ms * 1000 / 3 : -1;
}

static const char *choose(lt *l, plan *p, const lt_call *c, bool try_out)
{
    cublasLtMatmulHeuristicResult_t found[LT_CANDIDATES] = {};
    int n = 0, best = -1;
    float best_us = 0;
    cublasStatus_t rc = candidates(l, p, found, &n);
    if (rc == CUBLAS_STATUS_SUCCESS && try_out) rc = address(l, p, c);
    if (rc != CUBLAS_STATUS_SUCCESS) return say(l, "product", c, l->f.GetStatusString(rc));
    for (int i = 0; i < n; i++) {
        if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
        float us = try_out ? time_one(l, p, c, &found[i].algo) : (float)i;
        if (us >= 0 && (best < 0 || us < best_us)) best = i, best_us = us;
    }
    if (best < 0) return say(l, "product", c, "no algorithm");
    p->algo = found[best].algo;
    return NULL;
}

static bool alike(const plan *p, const lt_call *c)
{
    return lt_alike(&p->shape, c);
}

static const char *keep(lt *l, plan *p)
{
    for (int i = 0; i < l->n_plans; i++)
        if (alike(l->plans[i], &p->shape) && l->plans[i]->shape.M == p->shape.M) {
            drop(l, l->plans[i]);
            l->plans[i] = p;
            return NULL;
        }
    if (l->n_plans == l->room) {
        int room = l->room ? 2 * l->room : 64;
        plan **more = (plan **)realloc(l->plans, sizeof *more * (size_t)room);
        if (!more) {
            drop(l, p);
            return "out of memory";
        }
        l->plans = more;
        l->room = room;
    }
    l->plans[l->n_plans++] = p;
    return NULL;
}

extern "C" const char *lt_plan(lt *l, const lt_call *call, bool try_out)
{
    lt_call c = *call;
    const char *why = refuse(l, &c);
    if (why) return say(l, "product", &c, why);
    if (apart(&c) && c.M > chunk_of(l, &c)) c.M = chunk_of(l, &c);
    plan *p = (plan *)calloc(1, sizeof *p);
    if (!p) return "out of memory";
    p->shape = c;
    cublasStatus_t rc = describe(l, p);
    why = rc == CUBLAS_STATUS_SUCCESS ? choose(l, p, &c, try_out)
                                      : say(l, "product", &c, l->f.GetStatusString(rc));
    if (why) {
        drop(l, p);
        return why;
    }
    return keep(l, p);
}

static plan *find(const lt *l, const lt_call *c)
{
    plan *best = NULL;
    for (int i = 0; i < l->n_plans; i++) {
        plan *p = l->plans[i];
        if (!alike(p, c)) continue;
        bool fits = p->shape.M >= c->M, best_fits = best && best->shape.M >= c->M;
        if (!best || (fits && (!best_fits || p->shape.M < best->shape.M)) ||
            (!fits && !best_fits && p->shape.M > best->shape.M))
            best = p;
    }
    return best;
}

/* ---- what the library leaves undone -------------------------------------------------------------
 */

static __device__ __forceinline__ float4 lt_sums(int4 v)
{
    return make_float4((float)v.x, (float)v.y, (float)v.z, (float)v.w);
}
static __device__ __forceinline__ float4 lt_sums(float4 v)
{
    return v;
}
/* y = sums * x_scale * w_scale (+ bias); four columns a thread. */
template <class S>
static __global__ void lt_scale_kernel(const S *sums, const float *x_scale, const float *w_scale,
                                       const float *bias, gpu_x y, int64_t ldy, int64_t rows, int N)
{
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    pdl_go();
    pdl_wait();
    if (i >= rows * (N / 4)) return;
    const int64_t m = i / (N / 4);
    const int n = (int)(i % (N / 4)) * 4;
    const float4 s = lt_sums(sums[i]);
    const float4 w = *(const float4 *)(w_scale + n);
    float4 b = {0, 0, 0, 0};
    if (bias) b = *(const float4 *)(bias + n);
    const float by = x_scale[m];
    const float v[4] = {fmaf(s.x * by, w.x, b.x), fmaf(s.y * by, w.y, b.y),
                        fmaf(s.z * by, w.z, b.z), fmaf(s.w * by, w.w, b.w)};
    for (int j = 0; j < 4; j++)
        put_lane(y, m * ldy + n + j, v[j]);
}

static __global__ void lt_bias_kernel(const float *bias, gpu_x y, int64_t ldy, int64_t M, int N)
{
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= M * (N / 2)) return;
    const int64_t at = i / (N / 2) * ldy + i % (N / 2) * 2;
    const int n = (int)(i % (N / 2)) * 2;
    put_lane(y, at, lane(y, at) + bias[n]);
    put_lane(y, at + 1, lane(y, at + 1) + bias[n + 1]);
}

static unsigned blocks_of(int64_t n)
{
    return (unsigned)((n + 255) / 256);
}

static const char *run_apart(lt *l, plan *p, const lt_call *call)
{
    const int64_t chunk = chunk_of(l, &p->shape);
    for (int64_t m = 0; m < call->M; m += chunk) {
        lt_call c = *call;
        c.M = call->M - m < chunk ? call->M - m : chunk;
        c.x = (const uint8_t *)call->x + m * c.ldx;
        cublasStatus_t rc = address(l, p, &c);
        if (rc == CUBLAS_STATUS_SUCCESS)
            rc = multiply(l, p, &c, &p->algo, l->work, library_work(l, &p->shape),
                          library_bytes(l, &p->shape));
        if (rc != CUBLAS_STATUS_SUCCESS) return say(l, "launch", &c, l->f.GetStatusString(rc));
        gpu_x y = {(uint8_t *)c.y + m * c.ldy * (c.y_bf16 ? 2 : 4), c.y_bf16 ? GPU_BF16 : GPU_F32};
        const unsigned blocks = blocks_of(c.M * (c.N / 4));
        const float *by = c.x_scale + m;
        const char *why = c.kind == LT_INT8
                              ? LAUNCH_EARLY(lt_scale_kernel<int4>, blocks, 256, 0, c.stream,
                                             (const int4 *)l->work, by, c.w_scale, c.bias, y, c.ldy,
                                             c.M, (int)c.N)
                              : LAUNCH_EARLY(lt_scale_kernel<float4>, blocks, 256, 0, c.stream,
                                             (const float4 *)l->work, by, c.w_scale, c.bias, y,
                                             c.ldy, c.M, (int)c.N);
        if (why) return why;
    }
    return NULL;
}

extern "C" const char *lt_run(lt *l, const lt_call *c)
{
    const char *why = refuse(l, c);
    plan *p = why ? NULL : find(l, c);
    if (!p) return say(l, "launch", c, why ? why : "not planned");
    if (apart(&p->shape)) return run_apart(l, p, c);
    cublasStatus_t rc = address(l, p, c);
    if (rc == CUBLAS_STATUS_SUCCESS) rc = multiply(l, p, c, &p->algo, c->y, l->work, l->work_bytes);
    if (rc != CUBLAS_STATUS_SUCCESS) return say(l, "launch", c, l->f.GetStatusString(rc));
    if (!c->bias || lt_adds_bias(c)) return NULL;
    gpu_x y = {c->y, c->y_bf16 ? GPU_BF16 : GPU_F32};
    return LAUNCH(lt_bias_kernel, blocks_of(c->M * (c->N / 2)), 256, 0, c->stream, c->bias, y,
                  c->ldy, c->M, (int)c->N);
}
