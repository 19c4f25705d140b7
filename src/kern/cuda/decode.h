/* Attention of one new token a sequence over a paged cache on the GPU (decode.cuh), as a C call.
 * Pointers are device pointers. */
#ifndef KERN_CUDA_DECODE_H
#define KERN_CUDA_DECODE_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef enum decode_kv { DECODE_BF16, DECODE_E4M3, DECODE_KVS } decode_kv;
#define DECODE_PAGE_TOKENS 32

/* Bytes of one head in one page: K [32][D], then V transposed [D][32]. */
size_t decode_head_bytes(decode_kv kv, int D);
/* Where an element stands in them, in elements: token t of the page, lane d; which 0 = K, 1 = V. */
size_t decode_place(decode_kv kv, int D, int which, int t, int d);

typedef struct decode_call {
    decode_kv kv;
    const void *cache;               /* page p, head h at p*page_stride + h*head_bytes */
    int64_t page_stride, head_bytes; /* bytes */
    const void *q;                   /* bf16 [B, Hk*G, D], already times decode_q_scale */
    float *out;                      /* [B, Hk*G, D] */
    const int32_t *pages;            /* [B, max_pages] */
    const int32_t *lens;             /* [B], at least 1 */
    void *work;                      /* decode_work_bytes, zeroed once by the owner */
    int B, Hk, G, D, max_pages;
    int max_len;   /* of the batch, on the host: decides how many runs */
    float v_scale; /* of fp8 codes; 1 */
    void *stream;
    int pdl;
} decode_call;
/* What q is multiplied by before it is rounded to bf16: softmax scale * log2(e) * k_scale, and what
 * the codes lack. */
float decode_q_scale(decode_kv kv, float softmax_scale, float k_scale);
size_t decode_work_bytes(int B, int Hk, int G, int D);
/* NULL = launched; else why not. */
const char *decode_run(const decode_call *c);

#ifdef __cplusplus
}
#endif
#endif
