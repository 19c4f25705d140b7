/* Further instructions (sm_90a), beside ptx.cuh: copies of boxes of a matrix by its tensor map,
 * copies of a thread that arrive at an mbarrier, plain shared-memory accesses by address. */
#ifndef KERN_CUDA_PTX_MAP_CUH
#define KERN_CUDA_PTX_MAP_CUH
#include "kern/cuda/ptx.cuh"

/* What is read once leaves the L2 first. */
PTX uint64_t ptx_policy_once(void)
{
    uint64_t p;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    return p;
}
PTX void ptx_map_prefetch(const void *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/* The box at column x, row y; what lies outside of the matrix is zero and counts as bytes too. */
PTX void ptx_map_load(uint32_t to, const void *map, int x, int y, uint32_t bar, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
                 "L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(bar), "l"(policy)
                 : "memory");
}
/* n of 16 (of 4) bytes are read, the rest is zero. */
PTX void ptx_copy16_zero(uint32_t to, const void *from, uint32_t n)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n)
                 : "memory");
}
PTX void ptx_copy4_zero(uint32_t to, const void *from, uint32_t n)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(n)
                 : "memory");
}
/* One of the arrivals that the barrier was made for, once this thread's copies are there. */
PTX void ptx_copy_arrive(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
/* All of the `threads` that name barrier 1 to 15, whole warps. */
PTX void ptx_bar_sync(int which, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}
PTX float ptx_lds_f32(uint32_t at)
{
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}
/* Nothing that needs v is computed before what comes in front of this. */
PTX void ptx_keep(uint4 &v)
{
    asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
}
#endif
