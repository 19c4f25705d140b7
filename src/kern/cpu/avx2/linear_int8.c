/* Linear rows with int8 inputs by AVX2. */
#include "kern/cpu/linear_int8_body.h"

const kern_linear_row kern__rows_avx2_int8[] = {
    {"avx2-w4a8", "w4p16", CPU_AVX2, refuse_int8, plan_int8, part_int8},
    {"avx2-w8a8", "w8p16", CPU_AVX2, refuse_int8, plan_int8, part_int8},
};
