/* What this machine can execute, asked of the machine and never of the build. */
#ifndef BASE_CPU_H
#define BASE_CPU_H
#include <stdint.h>
#include "base/err.h"
enum {
    CPU_AVX2 = 1 << 0,   /* with FMA and F16C */
    CPU_AVX512 = 1 << 1, /* F BW DQ VL */
    CPU_AVX512_VBMI = 1 << 2,
    CPU_AVX512_VNNI = 1 << 3,
    CPU_AVX512_BF16 = 1 << 4,
    CPU_AVX512_FP16 = 1 << 5,
    CPU_AVX_VNNI = 1 << 6,
    CPU_AMX_INT8 = 1 << 7, /* tile permission asked for and granted */
    CPU_AMX_BF16 = 1 << 8
};
/* CPUID and XCR0, and arch_prctl(XTILEDATA) for AMX; the answer is cached. */
uint32_t cpu_detect(void);
/* Text for --cpu-features: "auto", "portable", "avx2", "avx512", "amx" (each includes those below
 * it), or a comma list of bits with "-name" to remove one, e.g. "auto,-amx_int8". A feature that
 * the machine lacks is an error naming it. */
int cpu_parse(const char *text, uint32_t *out, err *e);
/* "avx2 avx512 avx512_vnni …" into out, NUL-terminated. */
void cpu_format(uint32_t features, char *out, int cap);
const char *cpu_model_name(void); /* from /proc/cpuinfo, static */
#endif
