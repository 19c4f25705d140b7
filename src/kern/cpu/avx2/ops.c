/* AVX2 versions of the small operators. */
#include "kern/cpu/ops_body.h"

const kern__ops kern__ops_avx2 = {
    .name = "avx2", .needs = CPU_AVX2, .attention = kern__attention_avx2, OPS_TABLE};
