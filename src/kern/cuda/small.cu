/* Instances of small.cuh, the table that says which one a shape uses, and packing. The table was
 * measured on an H200 (bench/NOTES.md); a long K is cut over a cluster of two, or of four where
 * there are tiles enough for the thirty such clusters that the chip holds at once. */
#include "kern/cuda/small.h"
#include "kern/cuda/small.cuh"
#include <stdio.h>
#include <string.h>

typedef struct entry {
    small_format format;
    int units; /* K/128, 0 = any */
    int max_m;
    int threads, split, shared_x;
    size_t fixed_smem;
    void (*kernel)(const small_args);
    const char *text;
} entry;

#define ROW(F, W, UNITS, M, WARPS, STAGES, UPW, UW, SPLIT)                                         \
    {                                                                                              \
        F, UNITS, M, (WARPS + 2) * 32, SPLIT, UW == 0,                                             \
            small_shape<W, small_cfg<WARPS, STAGES, UPW, UW, SPLIT>, M>::smem(0),                  \
            small_kernel<W, small_cfg<WARPS, STAGES, UPW, UW, SPLIT>, M>,                          \
            #WARPS " warps, " #STAGES " stages of " #UPW ", " #UW " kept, cluster of " #SPLIT      \
    }

/* First fit. M instances: sums of the tokens that are there are all that is moved. */
#define BOTH(F, W, UNITS, ...) ROW(F, W, UNITS, 1, __VA_ARGS__), ROW(F, W, UNITS, 8, __VA_ARGS__)
static const entry entries[] = {
    BOTH(SMALL_INT4, w_int4, 32, 16, 4, 2, 2, 1),   ROW(SMALL_INT4, w_int4, 64, 1, 8, 5, 4, 8, 1),
    ROW(SMALL_INT4, w_int4, 64, 8, 16, 4, 2, 2, 2), BOTH(SMALL_INT4, w_int4, 112, 14, 3, 2, 4, 2),
    BOTH(SMALL_INT4, w_int4, 224, 14, 4, 2, 4, 4),  BOTH(SMALL_INT4, w_int4, 0, 16, 4, 1, 0, 1),
    BOTH(SMALL_E4M3, w_e4m3, 32, 8, 10, 1, 4, 1),   BOTH(SMALL_E4M3, w_e4m3, 64, 8, 10, 1, 8, 1),
    BOTH(SMALL_E4M3, w_e4m3, 112, 14, 5, 1, 4, 2),  BOTH(SMALL_E4M3, w_e4m3, 224, 14, 5, 1, 4, 4),
    BOTH(SMALL_E4M3, w_e4m3, 0, 16, 4, 1, 0, 1),    BOTH(SMALL_BF16, w_bf16, 32, 8, 5, 1, 4, 1),
    BOTH(SMALL_BF16, w_bf16, 64, 8, 5, 1, 4, 2),    BOTH(SMALL_BF16, w_bf16, 112, 14, 3, 1, 4, 2),
    BOTH(SMALL_BF16, w_bf16, 224, 14, 3, 1, 4, 4),  BOTH(SMALL_BF16, w_bf16, 0, 8, 3, 1, 0, 1),
};

static const int smem_limit = 227 * 1024;

static size_t smem_of(const entry *e, int K)
{
    size_t x = e->shared_x ? (size_t)e->max_m * (size_t)(K / e->split + 8) * 2 : 0;
    return e->fixed_smem + x;
}

static const entry *find(small_format f, int K, int M)
{
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        const entry *e = &entries[i];
        if (e->format == f && (!e->units || e->units * SMALL_UNIT_K == K) && M <= e->max_m &&
            smem_of(e, K) <= (size_t)smem_limit)
            return e;
    }
    return NULL;
}

extern "C" const char *small_entry(small_format f, int K, int M)
{
    const entry *e = find(f, K, M);
    return e ? e->text : "none";
}

static const int unit_bytes[SMALL_FORMATS] = {w_int4::unit_bytes, w_e4m3::unit_bytes,
                                              w_bf16::unit_bytes};

extern "C" size_t small_packed_bytes(small_format f, int64_t N, int64_t K)
{
    return (size_t)(N / SMALL_ROWS) * (size_t)(K / SMALL_UNIT_K) * (size_t)unit_bytes[f];
}

/* ---- packing ------------------------------------------------------------------------------------
 */

/* Lane l = 4r + c of a block has columns 16c .. 16c+15 of rows r and r+8. */
static void pack_lane_int4(const uint8_t *row0, const uint8_t *row8, uint8_t *out)
{
    const uint8_t *rows[2] = {row0, row8};
    for (int h = 0; h < 2; h++)
        for (int j = 0; j < 2; j++) {
            uint32_t w = 0;
            for (int i = 0; i < 8; i++)
                w |= (uint32_t)(rows[h][8 * j + i] & 15) << (4 * (i % 2 * 4 + i / 2));
            memcpy(out + h * 8 + j * 4, &w, 4);
        }
}

/* Bytes 0 and 2 of word s are a pair of the first half, 1 and 3 of the second. */
static void pack_lane_e4m3(const uint8_t *row, uint8_t *out)
{
    for (int i = 0; i < 16; i++)
        out[i % 8 / 2 * 4 + i / 8 + i % 2 * 2] = row[i];
}

static void pack_unit(small_format f, const uint8_t *codes, int64_t ld, uint8_t *out)
{
    for (int b = 0; b < 2; b++)
        for (int l = 0; l < 32; l++) {
            int64_t at = (int64_t)(l / 4) * ld, col = b * 64 + l % 4 * 16;
            const uint8_t *r0 = codes + at + col, *r8 = r0 + 8 * ld;
            if (f == SMALL_INT4) pack_lane_int4(r0, r8, out + b * 512 + l * 16);
            if (f == SMALL_E4M3) {
                pack_lane_e4m3(r0, out + b * 1024 + l * 16);
                pack_lane_e4m3(r8, out + b * 1024 + 512 + l * 16);
            }
            if (f == SMALL_BF16) /* a[s][i]: row r or r+8 (i % 2), half of the columns (i / 2) */
                for (int i = 0; i < 4; i++)
                    memcpy(out + b * 2048 + i * 512 + l * 16,
                           codes + 2 * (at + i % 2 * 8 * ld + col + i / 2 * 8), 16);
        }
}

extern "C" void small_pack(small_format f, const void *codes, const float *scales, int64_t N,
                           int64_t K, uint8_t *out)
{
    const int width = f == SMALL_BF16 ? 2 : 1;
    for (int64_t t = 0; t < N / SMALL_ROWS; t++)
        for (int64_t u = 0; u < K / SMALL_UNIT_K; u++, out += unit_bytes[f]) {
            pack_unit(f, (const uint8_t *)codes + width * (t * SMALL_ROWS * K + u * SMALL_UNIT_K),
                      K, out);
            for (int r = 0; scales && r < SMALL_ROWS; r++) {
                float s = scales[(t * SMALL_ROWS + r) * (K / SMALL_UNIT_K) + u];
                __nv_bfloat16 b =
                    __float2bfloat16(f == SMALL_E4M3 ? s * 1.329227995784916e36f /* 2^120 */ : s);
                memcpy(out + unit_bytes[f] - 2 * SMALL_ROWS + 2 * r, &b, 2);
            }
        }
}

/* ---- launching ----------------------------------------------------------------------------------
 */

static const char *refuse(const small_call *c)
{
    static thread_local char why[128];
    why[0] = 0;
    if (c->M < 1 || c->M > SMALL_MAX_M)
        snprintf(why, sizeof why, "M = %d, made for 1 to %d", c->M, SMALL_MAX_M);
    else if (c->N < SMALL_ROWS || c->N % SMALL_ROWS)
        snprintf(why, sizeof why, "N = %d is not a multiple of %d", c->N, SMALL_ROWS);
    else if (c->K < SMALL_UNIT_K || c->K % SMALL_UNIT_K)
        snprintf(why, sizeof why, "K = %d is not a multiple of %d", c->K, SMALL_UNIT_K);
    else if (c->ldx % 8 || (uintptr_t)c->x % 16)
        snprintf(why, sizeof why, "x is not aligned to 16 bytes");
    else if (!find(c->format, c->K, c->M))
        snprintf(why, sizeof why, "K = %d does not fit shared memory", c->K);
    return *why ? why : NULL;
}

extern "C" const char *small_run(const small_call *c)
{
    const char *why = refuse(c);
    if (why) return why;
    const entry *e = find(c->format, c->K, c->M);
    const size_t smem = smem_of(e, c->K);
    int device = 0, sms = 0, most = 0;
    cudaError_t rc = cudaGetDevice(&device);
    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (rc == cudaSuccess)
        rc =
            cudaFuncSetAttribute(e->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (rc != cudaSuccess) return cudaGetErrorString(rc);

    cudaLaunchAttribute at[2];
    cudaLaunchConfig_t cfg = {};
    cfg.blockDim = dim3((unsigned)e->threads);
    cfg.dynamicSmemBytes = smem;
    cfg.stream = (cudaStream_t)c->stream;
    cfg.attrs = at;
    most = sms;
    if (e->split > 1) {
        at[cfg.numAttrs].id = cudaLaunchAttributeClusterDimension;
        at[cfg.numAttrs].val.clusterDim.x = (unsigned)e->split;
        at[cfg.numAttrs].val.clusterDim.y = at[cfg.numAttrs].val.clusterDim.z = 1;
        cfg.numAttrs++;
        cfg.gridDim = dim3((unsigned)(sms / e->split * e->split));
        rc = cudaOccupancyMaxActiveClusters(&most, e->kernel, &cfg);
        if (rc != cudaSuccess) return cudaGetErrorString(rc);
    }
    if (most < 1) return "no block of this size fits the device";
    int tiles = c->N / SMALL_ROWS, each = (tiles + most - 1) / most;
    cfg.gridDim = dim3((unsigned)((tiles + each - 1) / each * e->split));
    if (c->pdl) {
        at[cfg.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        at[cfg.numAttrs].val.programmaticStreamSerializationAllowed = 1;
        cfg.numAttrs++;
    }
    small_args a = {
        (const uint8_t *)c->w, (const __nv_bfloat16 *)c->x, c->y, c->ldx, c->ldy, c->N, c->K, c->M};
    rc = cudaLaunchKernelEx(&cfg, e->kernel, a);
    return rc == cudaSuccess ? NULL : cudaGetErrorString(rc);
}
