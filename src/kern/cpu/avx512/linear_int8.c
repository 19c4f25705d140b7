/* Linear rows with int8 inputs by AVX-512 VNNI. */
#include "kern/cpu/linear_int8_body.h"

#define NEEDS (CPU_AVX512 | CPU_AVX512_VNNI)
const kern_linear_row kern__rows_vnni[] = {
    {"avx512vnni-w4a8", "w4p16", NEEDS, refuse_int8, plan_int8, part_int8},
    {"avx512vnni-w8a8", "w8p16", NEEDS, refuse_int8, plan_int8, part_int8},
};
