/* Linear rows with f32 inputs in AVX2 (with FMA and F16C). */
#include "kern/cpu/linear_f32_body.h"

const kern_linear_row kern__rows_avx2[] = {
    {"avx2-w4", "w4p16", CPU_AVX2, NULL, plan_f32, part_f32},
    {"avx2-w8", "w8p16", CPU_AVX2, NULL, plan_f32, part_f32},
    {"avx2-w16", "w16p16", CPU_AVX2, NULL, plan_f32, part_f32},
    {"avx2-w32", "w32p16", CPU_AVX2, NULL, plan_f32, part_f32},
};
