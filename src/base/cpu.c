/* CPU features from CPUID, XCR0 (does the system save the registers?) and, for AMX, the permission
 * call. `features` is in order of need: a row's needs stand above it, so that one pass removes
 * whatever depended on a removed feature. Selecting more than the machine has is refused by name.
 */
#include "base/cpu.h"
#include <cpuid.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct feature {
    const char *name;
    uint32_t bit, needs;
} feature;
static const feature features[] = {
    {"avx2", CPU_AVX2, 0},
    {"avx_vnni", CPU_AVX_VNNI, CPU_AVX2},
    {"avx512", CPU_AVX512, CPU_AVX2},
    {"avx512_vbmi", CPU_AVX512_VBMI, CPU_AVX512},
    {"avx512_vnni", CPU_AVX512_VNNI, CPU_AVX512},
    {"avx512_bf16", CPU_AVX512_BF16, CPU_AVX512},
    {"avx512_fp16", CPU_AVX512_FP16, CPU_AVX512},
    {"amx_int8", CPU_AMX_INT8, CPU_AVX512},
    {"amx_bf16", CPU_AMX_BF16, CPU_AVX512},
};
enum { N_FEATURES = sizeof features / sizeof *features };

static uint64_t xcr0(void)
{
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

/* Tiles may be used only after the kernel has agreed; a virtual machine may show the flag and
 * refuse. */
static bool amx_permitted(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

static uint32_t ask(void)
{
    uint32_t a, b, c, d, f = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    uint32_t c1 = c;
    uint64_t x = xcr0();
    bool ymm = (x & 6) == 6, zmm = (x & 0xE6) == 0xE6, tile = (x >> 17 & 3) == 3;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    uint32_t b7 = b, c7 = c, d7 = d, a71 = 0;
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) a71 = a;
    if (ymm && (b7 & bit_AVX2) && (c1 & bit_FMA) && (c1 & bit_F16C) && (b7 & bit_BMI2))
        f |= CPU_AVX2;
    if (!(f & CPU_AVX2)) return 0;
    if (a71 & 1u << 4) f |= CPU_AVX_VNNI;
    if (!zmm || !(b7 & bit_AVX512F) || !(b7 & bit_AVX512BW) || !(b7 & bit_AVX512DQ) ||
        !(b7 & bit_AVX512VL))
        return f;
    f |= CPU_AVX512;
    if (c7 & bit_AVX512VBMI) f |= CPU_AVX512_VBMI;
    if (c7 & bit_AVX512VNNI) f |= CPU_AVX512_VNNI;
    if (a71 & 1u << 5) f |= CPU_AVX512_BF16;
    if (d7 & 1u << 23) f |= CPU_AVX512_FP16;
    bool amx8 = d7 >> 25 & 1, amx16 = d7 >> 22 & 1, tiles = d7 >> 24 & 1;
    if (tile && tiles && (amx8 || amx16) && amx_permitted())
        f |= (amx8 ? CPU_AMX_INT8 : 0u) | (amx16 ? CPU_AMX_BF16 : 0u);
    return f;
}

uint32_t cpu_detect(void)
{
    static _Atomic uint64_t cached; /* bit 63: asked already */
    uint64_t v = atomic_load(&cached);
    if (!v) {
        v = (uint64_t)1 << 63 | ask();
        atomic_store(&cached, v);
    }
    return (uint32_t)v;
}

/* "avx2" as a level means avx2 and avx_vnni; "avx512" all of avx512; "amx" everything. */
static bool level_mask(const char *w, size_t n, uint32_t *mask)
{
    static const struct {
        const char *name;
        uint32_t mask;
    } levels[] = {{"auto", ~0u},
                  {"portable", 0},
                  {"avx2", CPU_AVX2 | CPU_AVX_VNNI},
                  {"avx512", ~(uint32_t)(CPU_AMX_INT8 | CPU_AMX_BF16)},
                  {"amx", ~0u}};
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++)
        if (strlen(levels[i].name) == n && !memcmp(levels[i].name, w, n)) {
            *mask = levels[i].mask;
            return true;
        }
    return false;
}

static const feature *find(const char *w, size_t n)
{
    for (int i = 0; i < N_FEATURES; i++)
        if (strlen(features[i].name) == n && !memcmp(features[i].name, w, n)) return &features[i];
    return NULL;
}

/* A removed feature takes with it those that need it. */
static uint32_t close_under(uint32_t f)
{
    for (int i = 0; i < N_FEATURES; i++)
        if ((f & features[i].bit) && (f & features[i].needs) != features[i].needs)
            f &= ~features[i].bit;
    return f;
}

int cpu_parse(const char *text, uint32_t *out, err *e)
{
    uint32_t have = cpu_detect(), f = 0, mask;
    if (!*text)
        return err_set(e, ERR_USAGE,
                       "--cpu-features: empty; use auto, portable, avx2, avx512 or amx");
    for (const char *p = text; *p;) {
        size_t n = strcspn(p, ",");
        bool minus = n && *p == '-';
        const char *w = minus ? p + 1 : p;
        size_t k = minus ? n - 1 : n;
        const feature *row = find(w, k);
        if (minus && row)
            f = close_under(f & ~row->bit);
        else if (!minus && p == text && level_mask(w, k, &mask)) {
            f = have & mask;
            if (!strncmp(w, "amx", 3) && !(have & (CPU_AMX_INT8 | CPU_AMX_BF16)))
                return err_set(e, ERR_UNSUPPORTED,
                               "--cpu-features: this machine does not have amx");
            if (!strncmp(w, "avx512", 6) && !(have & CPU_AVX512))
                return err_set(e, ERR_UNSUPPORTED,
                               "--cpu-features: this machine does not have avx512");
            if (!strncmp(w, "avx2", 4) && !(have & CPU_AVX2))
                return err_set(e, ERR_UNSUPPORTED,
                               "--cpu-features: this machine does not have avx2");
        } else if (!minus && row) {
            if (!(have & row->bit))
                return err_set(e, ERR_UNSUPPORTED, "--cpu-features: this machine does not have %s",
                               row->name);
            f |= row->bit | row->needs | (row->needs & CPU_AVX512 ? CPU_AVX2 : 0);
        } else {
            return err_set(e, ERR_USAGE,
                           "--cpu-features: unknown word '%.*s'; use auto, portable, avx2, avx512 "
                           "or amx, then names such as "
                           "-amx_int8, avx512_vnni",
                           (int)n, p);
        }
        p += n;
        if (*p == ',') p++;
    }
    *out = f;
    return 0;
}

void cpu_format(uint32_t f, char *out, int cap)
{
    int n = 0;
    if (cap > 0) out[0] = 0;
    for (int i = 0; i < N_FEATURES && n < cap; i++)
        if (f & features[i].bit)
            n += snprintf(out + n, (size_t)(cap - n), "%s%s", n ? " " : "", features[i].name);
    if (!f && cap > 0) snprintf(out, (size_t)cap, "portable");
}

const char *cpu_model_name(void)
{
    static char name[128];
    if (name[0]) return name;
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "r");
    snprintf(name, sizeof name, "unknown CPU");
    while (f && fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) || !colon) continue;
        colon[strcspn(colon, "\n")] = 0;
        snprintf(name, sizeof name, "%.120s", colon + 2);
        break;
    }
    if (f) fclose(f);
    return name;
}
