/* Attention as an operator: which kernel takes a step, by what the host knows. Lengths, rows and
 * pages lie on the device and may be others when a graph is replayed, so every choice holds for all
 * of them:
 *
 *   decode   steps of at most one row a sequence
 *   prefill90, prefill  steps with more rows; where there are several sequences, those of one row
 *            are left to decode, which parts their keys among many blocks (each kernel looks at
 *            n_rows and leaves alone what is not its own)
 *   plain    what these refuse: other types and orders of the cache, other heads */
#include "kern/cuda/decode.h"
#include "kern/cuda/plain_attention.h"
#include "kern/cuda/prefill.h"
#include "kern/cuda/prefill90.h"

extern "C" const char *cuda_attention(const void *args, void *stream)
{
    const gpu_attention *a = (const gpu_attention *)args;
    const bool one = a->seqs.max_rows <= 1, decodes = a->seqs.n > 0 && !decode_refuse(a);
    if (one && decodes) return decode_run(a, stream);
    if (one || prefill_refuse(a)) return plain_attention(args, stream);
    const bool both = decodes && a->seqs.n > 1;
    const int least = both ? 2 : 1;
    const char *why =
        prefill90_refuse(a) ? prefill_run(a, least, stream) : prefill90_run(a, least, stream);
    return why || !both ? why : decode_run(a, stream);
}
