/* Thin names for the instructions that the kernels are made of (sm_90a): bulk copies with
 * mbarriers, matrix products on warps, programmatic dependent launch. No state. */
#ifndef KERN_CUDA_PTX_CUH
#define KERN_CUDA_PTX_CUH
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define PTX static __device__ __forceinline__

PTX uint32_t ptx_smem(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* threadIdx.x, asked for anew: what is computed from it is not kept in registers. */
PTX uint32_t ptx_thread(void)
{
    uint32_t d;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(d));
    return d;
}

/* ---- mbarriers and bulk copies ----------------------------------------------------------------
 */
PTX void ptx_mbar_init(uint32_t bar, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
PTX void ptx_mbar_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* Ordinary accesses of shared memory before, bulk copies or wgmma after. */
PTX void ptx_proxy_fence(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
PTX void ptx_mbar_expect(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
PTX void ptx_mbar_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
PTX void ptx_mbar_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n.reg .pred p;\n"
                 "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra WAIT;\n}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}
/* n bytes (a multiple of 16) of global memory into shared memory; the barrier counts them. Weights
 * are read once: they leave the L2 first. */
PTX void ptx_bulk_load_once(uint32_t to, const void *from, uint32_t n, uint32_t bar)
{
    asm volatile("{\n.reg .b64 p;\n"
                 "createpolicy.fractional.L2::evict_first.b64 p, 1.0;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], p;\n}" ::"r"(to),
                 "l"(from), "r"(n), "r"(bar)
                 : "memory");
}
PTX void ptx_bulk_load(uint32_t to, const void *from, uint32_t n, uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(to),
                 "l"(from), "r"(n), "r"(bar)
                 : "memory");
}
/* The same into every block of the cluster whose bit is set, at the same place; the barrier at
 * `bar` of each counts. */
PTX void ptx_bulk_load_all(uint32_t to, const void *from, uint32_t n, uint32_t bar, uint32_t blocks)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes."
                 "multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(n), "r"(bar), "h"((uint16_t)blocks)
                 : "memory");
}

/* The line goes into the L1. */
PTX void ptx_prefetch(const void *p)
{
    asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
}

/* ---- clusters ----------------------------------------------------------------------------------
 * Addresses are shared-memory addresses of this block; rank says in which block of the cluster. */
PTX void ptx_cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
PTX void ptx_cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
PTX uint32_t ptx_at_rank(uint32_t at, uint32_t rank)
{
    uint32_t r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(rank));
    return r;
}
PTX void ptx_mbar_arrive_at(uint32_t bar, uint32_t rank)
{
    asm volatile(
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(ptx_at_rank(bar, rank))
        : "memory");
}
/* The same where nothing was written that the other block reads: no fence of the whole device. */
PTX void ptx_mbar_leave_at(uint32_t bar, uint32_t rank)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(ptx_at_rank(bar, rank))
                 : "memory");
}
PTX float ptx_get_f32(uint32_t at, uint32_t rank)
{
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];"
                 : "=f"(v)
                 : "r"(ptx_at_rank(at, rank))
                 : "memory");
    return v;
}
PTX float4 ptx_get_f32x4(uint32_t at, uint32_t rank)
{
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(ptx_at_rank(at, rank))
                 : "memory");
    return v;
}
/* Stores v in the block of that rank; its barrier counts the 4 bytes. */
PTX void ptx_send_f32(uint32_t to, uint32_t bar, uint32_t rank, float v)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                     ptx_at_rank(to, rank)),
                 "f"(v), "r"(ptx_at_rank(bar, rank))
                 : "memory");
}

/* ---- programmatic dependent launch ------------------------------------------------------------
 */
PTX void ptx_pdl_wait(void)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
PTX void ptx_pdl_go(void)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* ---- products ----------------------------------------------------------------------------------
 * d[16x8] += a[16x16] b[16x8]; lane l holds rows l/4 and l/4+8, columns (or k) 2(l%4). */
PTX void ptx_mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The same of f16. */
PTX void ptx_mma_f16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* ---- copies a thread asks for, in groups --------------------------------------------------------
 */
PTX void ptx_copy16(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
}
PTX void ptx_copy4(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
PTX void ptx_copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
PTX void ptx_copy_wait_all(void) /* also those of no group */
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}
template <int N> PTX void ptx_copy_wait(void) /* all but the last N groups are there */
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- products of four warps (wgmma) -------------------------------------------------------------
 * d[64 x N] (+)= a[64x16] b[16 x N]; warp w of the four has rows 16w .. +15 of a and d, as in
 * ptx_mma_bf16, eight columns of d after the other; b lies in shared memory, N rows of 128 bytes
 * (64 values of k), whose 16-byte pieces stand at place number ^ row%8, aligned to 1024 bytes. */
PTX uint64_t ptx_wg_operand(uint32_t at)
{
    return (uint64_t)1 << 62 | (uint64_t)64 << 32 | (uint64_t)1 << 16 | (at & 0x3ffff) >> 4;
}
PTX void ptx_wg_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
PTX void ptx_wg_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> PTX void ptx_wg_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
#define PTX_N8  "%0, %1, %2, %3, %4, %5, %6, %7"
#define PTX_N16 PTX_N8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PTX_N32                                                                                    \
    PTX_N16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PTX_N64                                                                                    \
    PTX_N32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "   \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PTX_N128                                                                                   \
    PTX_N64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "   \
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "     \
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "     \
            "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, "       \
            "%123, %124, %125, %126, %127"
#define PTX_F4(d, i)   "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PTX_F8(d, i)   PTX_F4(d, i), PTX_F4(d, i + 4)
#define PTX_F16(d, i)  PTX_F8(d, i), PTX_F8(d, i + 8)
#define PTX_F32(d, i)  PTX_F16(d, i), PTX_F16(d, i + 16)
#define PTX_F64(d, i)  PTX_F32(d, i), PTX_F32(d, i + 32)
#define PTX_F128(d, i) PTX_F64(d, i), PTX_F64(d, i + 64)
#define PTX_WGMMA(N, NAMES, OPERANDS, A0, A1, A2, A3, B, ADD)                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, {" A0      \
                 ", " A1 ", " A2 ", " A3 "}, " B ", p, 1, 1, 0;\n}"                                \
                 : OPERANDS                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
template <int N> PTX void ptx_wgmma(float (&d)[N / 2], const uint32_t a[4], uint64_t b, int add)
{
    if constexpr (N == 16)
        PTX_WGMMA(16, PTX_N8, PTX_F8(d, 0), "%8", "%9", "%10", "%11", "%12", "%13");
    if constexpr (N == 32)
        PTX_WGMMA(32, PTX_N16, PTX_F16(d, 0), "%16", "%17", "%18", "%19", "%20", "%21");
    if constexpr (N == 64)
        PTX_WGMMA(64, PTX_N32, PTX_F32(d, 0), "%32", "%33", "%34", "%35", "%36", "%37");
    if constexpr (N == 128)
        PTX_WGMMA(128, PTX_N64, PTX_F64(d, 0), "%64", "%65", "%66", "%67", "%68", "%69");
    if constexpr (N == 256)
        PTX_WGMMA(256, PTX_N128, PTX_F128(d, 0), "%128", "%129", "%130", "%131", "%132", "%133");
}

PTX uint4 ptx_lds128(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at));
    return v;
}
PTX void ptx_sts128(uint32_t at, uint4 v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}
PTX void ptx_sts_f32(uint32_t at, float v)
{
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}
PTX float4 ptx_lds_f32x4(uint32_t at)
{
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}
PTX uint2 ptx_lds64(uint32_t at)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
PTX uint32_t ptx_lds16(uint32_t at)
{
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}
PTX uint32_t ptx_lds32(uint32_t at)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
PTX uint32_t ptx_lds8(uint32_t at)
{
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
/* (a & b) | c in one instruction */
PTX uint32_t ptx_and_or(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
PTX uint32_t ptx_sub_f16x2(uint32_t a, uint32_t b)
{
    uint32_t d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
PTX uint32_t ptx_sub_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t d;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
PTX uint32_t ptx_mul_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
PTX uint32_t ptx_pack_bf16(float lo, float hi)
{
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}
PTX uint32_t ptx_pack_f16(float lo, float hi)
{
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}
PTX uint32_t ptx_e4m3_f16(uint32_t two) /* the codes in the low half; exact, NaN stays NaN */
{
    uint32_t d;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"((uint16_t)two));
    return d;
}
PTX float ptx_exp2(float x)
{
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
PTX float ptx_rcp(float x)
{
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
/* An 8x8 matrix of 16-bit values, two of row l/4 a lane, transposed across the warp. */
PTX uint32_t ptx_transpose(uint32_t a)
{
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}
PTX float ptx_f16_f32(uint32_t bits) /* of the lower half */
{
    return __half2float(__ushort_as_half((uint16_t)bits));
}
PTX float ptx_bf16_f32(uint32_t bits)
{
    return __uint_as_float(bits << 16);
}
#endif
