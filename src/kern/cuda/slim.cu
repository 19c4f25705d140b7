/* Instances of slim.cuh and launching. */
#include "kern/cuda/alone.cuh"
#include "kern/cuda/slim.cuh"

typedef void slim_fn(const slim_args);
#define OF(W, BLOCK)                                                                               \
    {                                                                                              \
        slim_kernel<W, 2, BLOCK>, slim_kernel<W, 4, BLOCK>, slim_kernel<W, 6, BLOCK>,              \
            slim_kernel<W, 8, BLOCK>, slim_kernel<W, 10, BLOCK>                                    \
    }
/* By slim_how, format and half the depth; NULL = what is refused. */
static slim_fn *const kernels[4][ROWS_FORMATS][SLIM_DEPTH / 2] = {
    {OF(slim_bf16, false), OF(slim_e4m3, false), OF(slim_int8, false)},
    {OF(slim_bf16, false), OF(slim_e4m3_codes, false), OF(slim_int8_codes, false)},
    {{NULL}, OF(slim_e4m3, true), {NULL}},
    {{NULL}, OF(slim_e4m3_codes, true), {NULL}}};

extern "C" slim_plan slim_choose(rows_format f, int how, int N, int K, int M)
{
    return slim_plan_for(f, how, N, K, M);
}

extern "C" int slim_has(rows_format f, int how, slim_plan p, int K, int M)
{
    return M >= 1 && M <= SLIM_MAX_M && slim_fits(f, how, p, K, M, SLIM_SMEM);
}

static slim_args args_of(const rows_call *c, slim_plan p, const slim_mem &mem)
{
    const rows_format f = c->w->format;
    slim_args a;
    a.w = (const uint8_t *)c->w->at;
    a.x = (const uint16_t *)c->x;
    a.scale = c->scale;
    a.bias = c->bias;
    a.row_scale = c->row_scale;
    a.x_scale = c->x_scale;
    a.y = c->y;
    a.row_bytes = c->w->ld * rows_element(f);
    a.ldx = c->ldx, a.ld_x_scale = c->ld_x_scale, a.ldy = c->ldy;
    a.N = c->w->N, a.K = c->w->K, a.M = c->M, a.y_bf16 = c->y_bf16;
    a.k_bytes = c->w->K * rows_element(f);
    a.scale_step = c->scales == ROWS_ROW;
    a.split = p.split;
    a.tiles = rows_over(c->w->N, SLIM_ROWS);
    a.all = slim_slices(f, c->w->K);
    a.each = rows_over(a.all, p.split);
    a.mem = mem;
    return a;
}

extern "C" const char *slim_run_as(const rows_call *c, slim_plan p)
{
    const char *why = slim_refuse_call(c, p);
    if (why) return why;
    const rows_format f = c->w->format;
    const int how = slim_how_of(c);
    const slim_mem mem = slim_layout(f, how, p, rows_over(slim_slices(f, c->w->K), p.split), c->M);
    slim_fn *kernel = kernels[how][f][p.depth / 2 - 1];
    cudaLaunchAttribute at[2];
    cudaLaunchConfig_t cfg = {};
    int most = 0;
    cfg.blockDim = dim3((SLIM_WARPS + 1) * 32);
    cfg.dynamicSmemBytes = mem.end;
    cfg.stream = (cudaStream_t)c->stream;
    cfg.attrs = at;
    cudaError_t rc = alone_take(kernel, p.split, &cfg, &most);
    if (rc != cudaSuccess) return cudaGetErrorString(rc);
    if (most < 1) return "no block of this size fits the device";
    /* The same number of tiles for every block, as far as it goes. */
    slim_args a = args_of(c, p, mem);
    a.step = rows_over(a.tiles, rows_over(a.tiles, most));
    cfg.gridDim = dim3((unsigned)(a.step * p.split));
    if (c->pdl) {
        at[cfg.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        at[cfg.numAttrs].val.programmaticStreamSerializationAllowed = 1;
        cfg.numAttrs++;
    }
    rc = cudaLaunchKernelEx(&cfg, kernel, a);
    return rc == cudaSuccess ? NULL : cudaGetErrorString(rc);
}

extern "C" const char *slim_run(const rows_call *c)
{
    return slim_run_as(c, slim_plan_for(c->w->format, slim_how_of(c), c->w->N, c->w->K, c->M));
}
