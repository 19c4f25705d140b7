/* Storing keys and values into pages (plain_store.cuh), negative slots skipped. */
#include "kern/cuda/plain_store.cuh"

#define STORE_WARPS 4

static __global__ void store_kernel(gpu_kv_store a, int64_t items, int planes)
{
    int64_t item = (int64_t)blockIdx.x * STORE_WARPS + threadIdx.x / 32;
    if (item >= items) return;
    int which = (int)(item % planes), head = (int)(item / planes % a.kv.Hk);
    int64_t t = item / planes / a.kv.Hk;
    int slot = a.slot[t], lane_ = (int)threadIdx.x % 32;
    if (slot < 0) return;
    store_row r = {which ? a.v : a.k, t * (which ? a.ldv : a.ldk) + (int64_t)head * a.kv.D, a.kv.D};
    float clipped = warp_sum((float)store_token(a.kv, which, head, slot, r, lane_));
    if (clipped > 0 && lane_ == 0 && a.clipped) atomicAdd(a.clipped, (unsigned long long)clipped);
}

extern "C" const char *cuda_kv_store(const void *args_, void *stream)
{
    const gpu_kv_store *a = (const gpu_kv_store *)args_;
    const char *why = kv_refuse(a->kv);
    int planes = a->v.p && !a->kv.v_in_k ? 2 : 1;
    int64_t items = a->T * a->kv.Hk * planes, blocks = (items + STORE_WARPS - 1) / STORE_WARPS;
    if (why) return why;
    if (a->T < 1) return NULL;
    if (blocks > INT32_MAX) return "kv_store: more rows and heads than a grid holds";
    return LAUNCH(store_kernel, dim3((unsigned)blocks), dim3(STORE_WARPS * 32), 0, stream, *a,
                  items, planes);
}
