/* Attention with avx512 vectors. */
#include "kern/cpu/attn_body.h"

bool kern__attention_avx512(kern_dev *d, const kern_attn_args *a)
{
    return attention(d, a);
}
