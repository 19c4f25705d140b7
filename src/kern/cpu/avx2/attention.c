/* Attention with avx2 vectors. */
#include "kern/cpu/attn_body.h"

bool kern__attention_avx2(kern_dev *d, const kern_attn_args *a)
{
    return attention(d, a);
}
