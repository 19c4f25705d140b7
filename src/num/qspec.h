/* The grammar that names what is quantized and how: three axes, W (weights), A (activations),
 * KV (cache). A scheme is "w:<axis> a:<axis> kv:<axis>", parts in any order, commas inside an axis:
 *
 *   w:int4,g128[,asym][,actorder]   a:bf16            kv:bf16
 *   w:fp8_e4m3,channel              a:fp8_e4m3,token  kv:fp8_e4m3,tensor
 *   w:fp8_e4m3,block128x128         a:fp8_e4m3,group128
 *   w:nfp4,g16 …                    nvfp4 and mxfp4 are element+scale pairs: fp4 with e4m3 or e8m0
 *
 * Presets are names for such texts (qspec_presets). An axis that is not named is 16-bit
 * (NUM_BF16, no quantization). Parsing names the offending word and lists what is allowed. */
#ifndef NUM_QSPEC_H
#define NUM_QSPEC_H
#include "num/num.h"

typedef enum qgran {              /* what one scale covers */
                     Q_NONE,      /* element type is a plain float: no scale */
                     Q_TENSOR,    /* all of W */
                     Q_CHANNEL,   /* one output row of W */
                     Q_GROUP,     /* `group` neighbours along K of one row */
                     Q_BLOCK,     /* block_n x block_k tile of W */
                     Q_TOKEN,     /* A: one token row, dynamic */
                     Q_HEAD,      /* KV: one head, static scale */
                     Q_TOKEN_HEAD /* KV: one head of one token, computed when stored */
} qgran;

typedef enum qscale { QS_FLOAT, QS_NVFP4, QS_MX } qscale; /* float scale; e4m3 + global; e8m0 */

typedef struct qaxis {
    num_dtype type; /* element type; NUM_BF16/F16/F32 = not quantized */
    qgran gran;
    int32_t group;            /* Q_GROUP: elements along K (A: "group128"; W: g128) */
    int32_t block_n, block_k; /* Q_BLOCK */
    bool asym;
    bool actorder;
    bool dynamic; /* A: scale computed from the input (default for token/group) */
    qscale scale;
} qaxis;

typedef struct qspec {
    qaxis w, a, kv;
} qspec;

typedef struct qpreset {
    const char *name, *spec, *doc;
} qpreset;
extern const qpreset qspec_presets[];
extern const int qspec_n_presets;

/* Accepts a preset name, a scheme text, or a preset followed by overriding axes
 * ("fp8 kv:fp8_e4m3"). */
int qspec_parse(const char *text, qspec *out, err *e);
int qspec_parse_axis(const char *text, char axis /* 'w' 'a' 'k' */, qaxis *out, err *e);
/* Canonical text, e.g. "w:int4,g128 a:bf16 kv:bf16"; always parses back to the same spec. */
void qspec_format(const qspec *s, buf *out);
void qaxis_format(const qaxis *a, buf *out);
bool qaxis_quantized(const qaxis *a);
bool qaxis_equal(const qaxis *a, const qaxis *b);
#endif
