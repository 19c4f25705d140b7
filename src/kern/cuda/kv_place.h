/* Where an element of a cache stands in a page of GPU_KV_MMA order, for host and device: bf16, fp8,
 * int8 and fp4. A page of 32 tokens holds head after head; a head holds the codes of K, those of V
 * transposed, then the scales of K and of V (int8 and fp4): K and V are the 16-row operand of the
 * tensor cores as they lie, and a head of a page is one copy.
 *
 *   K  the eight lanes number d/8 of token t stand at number d/8 ^ turn(t) of its row, so that the
 *      rows that a warp reads together lie in different banks. A row of D = 64 fp8 lanes is half of
 *      all banks wide and needs a turn for every second row only. The turn is 0 where it would
 *      leave the row (D not a multiple of 64)
 *   V  token t stands at 8(t%8/2) + 4(t/16) + 2(t/8%2) + t%2: what a lane of a warp multiplies lies
 *      side by side
 *   scales  int8: scale and minimum, token after token. fp4: of K D/16 bytes a token; of V 32 bytes
 *      a block of 16 lanes, tokens in V's order
 *
 * fp4 (D a multiple of 32) has words of eight codes, what a lane of a warp multiplies: of K lanes
 * 4c .. +3 of two blocks of 16, of V the eight tokens at 8c; as many words of a lane of the warp as
 * a load holds lie side by side. Code e of a word is nibble e/2 + 4(e%2), so that a pair becomes
 * the halves of a register. */
#ifndef KERN_CUDA_KV_PLACE_H
#define KERN_CUDA_KV_PLACE_H
#include <stddef.h>
#ifdef __CUDACC__
#define KV_PLACE static __host__ __device__ __forceinline__
#else
#define KV_PLACE static inline
#endif
#define KV_PLACE_TOKENS 32

/* bytes: of an element, 1 or 2. Depends on t % 8 alone. */
KV_PLACE int kv_turn(int bytes, int D, int t)
{
    if (D % 64) return 0;
    return 4 * (bytes == 2 ? t & 1 : D % 128 ? t >> 1 & 1 : t & 3);
}

/* Place of token t among those of a row of V. */
KV_PLACE int kv_place_token(int t)
{
    return 8 * (t % 8 / 2) + 4 * (t / 16) + 2 * (t / 8 % 2) + t % 2;
}

/* Elements from the start of the head to lane d of token t of the page; which 0 = K, 1 = V. */
KV_PLACE size_t kv_place(int bytes, int D, int which, int t, int d)
{
    if (!which) return (size_t)(t * D + ((d / 8) ^ kv_turn(bytes, D, t)) * 8 + d % 8);
    return (size_t)(KV_PLACE_TOKENS * D + d * KV_PLACE_TOKENS + kv_place_token(t));
}

/* fp4: words of K that lie side by side for a lane of a warp. */
KV_PLACE int kv_fp4_words(int D)
{
    return D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 1;
}
/* Word i of lane c of those that read token t of K: of 32 lanes of the head from 32 i on. */
KV_PLACE int kv_fp4_k(int D, int t, int i, int c)
{
    int n = kv_fp4_words(D), turn = D % 256 ? 0 : t & 1; /* rows as wide as all banks */
    return t * (D / 8) + ((i / n) ^ turn) * 4 * n + c * n + i % n;
}
/* Word of eight tokens from place 8c of row d of V; two blocks of 16 rows are one load. */
KV_PLACE int kv_fp4_v(int D, int d, int c)
{
    return 4 * D + d / 32 * 128 + (d % 8 * 4 + c) * 4 + d / 16 % 2 * 2 + d / 8 % 2;
}

/* Code of lane d of token t in nibbles from the start of the head, as kv_place. */
KV_PLACE size_t kv_fp4_place(int D, int which, int t, int d)
{
    int at = kv_place_token(t), e = which ? at % 8 : d / 16 % 2 * 4 + d % 4;
    int word = which ? kv_fp4_v(D, d, at / 8) : kv_fp4_k(D, t, d / 32, d % 16 / 4);
    return (size_t)word * 8 + (size_t)(e / 2 + 4 * (e % 2));
}

/* Bytes of a head of a page: codes of so many bits, so many bytes of scales a token and plane. */
KV_PLACE size_t kv_place_head(int bits, int scale_bytes, int D)
{
    return (size_t)(2 * KV_PLACE_TOKENS) * (size_t)(D * bits / 8 + scale_bytes);
}
/* Bytes from the start of the head to the scales of token t: of fp4 to that of lanes 16 b .. +15.
 */
KV_PLACE size_t kv_place_scale(int bits, int D, int which, int t, int b)
{
    size_t codes = (size_t)(2 * KV_PLACE_TOKENS) * (size_t)(D * bits / 8);
    if (bits == 8) return codes + (size_t)((which * KV_PLACE_TOKENS + t) * 8);
    if (!which) return codes + (size_t)(t * (D / 16) + b);
    return codes + (size_t)(KV_PLACE_TOKENS * (D / 16 + b) + kv_place_token(t));
}
#endif
