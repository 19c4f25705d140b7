/* Linear rows with f32 inputs in AVX-512. */
#include "kern/cpu/linear_f32_body.h"

const kern_linear_row kern__rows_avx512[] = {
    {"avx512-w4", "w4p16", CPU_AVX512, NULL, plan_f32, part_f32},
    {"avx512-w8", "w8p16", CPU_AVX512, NULL, plan_f32, part_f32},
    {"avx512-w16", "w16p16", CPU_AVX512, NULL, plan_f32, part_f32},
    {"avx512-w32", "w32p16", CPU_AVX512, NULL, plan_f32, part_f32},
};
