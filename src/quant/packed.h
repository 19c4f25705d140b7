/* The packings that GPTQ, AWQ and auto-round files share. Private to this room.
 *
 * All of them hold unsigned codes u and zero points z, w = scale * (u - z). The canonical tensor
 * holds signed ones: code = u - 2^(b-1), zero = z - 2^(b-1), which leaves w as it is. */
#ifndef QUANT_PACKED_H
#define QUANT_PACKED_H
#include "quant/quant_int.h"

typedef struct quant__job { /* one module on its way into a qtensor */
    const quant_ckpt *q;
    const char *module;
    const quant_group *g;
    qtensor *out;
} quant__job;

typedef struct quant__gptq { /* how GPTQ zero points are stored */
    bool v2;                 /* as they are; else minus one */
    bool told;               /* by the user: not held against the tensors */
} quant__gptq;

extern const quant_part quant__packed_parts[];
bool quant__packed_has(const quant_ckpt *q, const char *module);
/* spec.w and spec.kv of a group: integers of `bits`, group -1 = a whole row. */
int quant__packed_spec(const quant_ckpt *q, int64_t bits, int64_t group, bool sym,
                       const char *where, qspec *out, err *e);
/* Sets shape and grid; a group larger than K becomes one scale a row. */
void quant__packed_grid(const quant__job *j, int64_t N, int64_t K);
/* Bits of the flip that turns unsigned fields into two's complement, byte i of a row: [i % bits].
 */
void quant__flip_mask(int bits, uint8_t flip[8]);
/* Scales [G, N] of the file to the canonical [N, G]. */
int quant__scales_transposed(const quant__job *j, const ckpt_tensor *t, err *e);

/* v2 = what the label says; --gptq-zeros overrides it. */
int quant__gptq_option(const quant_ckpt *q, bool v2, quant__gptq *z, err *e);
int quant__gptq_load_as(const quant__job *j, const quant__gptq *z, err *e);
int quant__gptq_describe_as(const quant_ckpt *q, const char *module, quant_module *out, err *e);
int quant__awq_load_gemm(const quant__job *j, err *e);
int quant__awq_describe_gemm(const quant_ckpt *q, const char *module, quant_module *out, err *e);
#endif
