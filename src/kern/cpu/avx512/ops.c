/* AVX-512 versions of the small operators. */
#include "kern/cpu/ops_body.h"

const kern__ops kern__ops_avx512 = {
    .name = "avx512", .needs = CPU_AVX512, .attention = kern__attention_avx512, OPS_TABLE};
