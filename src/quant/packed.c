/* What GPTQ, AWQ and auto-round files have in common: the tensors of a module, the spec of a group,
 * the grid, and scales that lie with the groups outermost.
 *
 * Refused here: widths other than 2, 3, 4 and 8 bits, groups that are neither -1 nor a positive
 * number, scales that are all zero (a converter that never filled them). Negative scales are legal:
 * auto-round's symmetric ones are, in half of the groups. */
#include "quant/packed.h"
#include <string.h>

const quant_part quant__packed_parts[] = {{".qweight", QUANT_CODES},
                                          {".qzeros", QUANT_ZEROS},
                                          {".scales", QUANT_SCALES},
                                          {".g_idx", QUANT_LAYOUT},
                                          {NULL, QUANT_CODES}};

bool quant__packed_has(const quant_ckpt *q, const char *module)
{
    const ckpt_tensor *t;
    return quant__tensor(q, module, "qweight", false, &t, NULL) == 0 && t;
}

int quant__packed_spec(const quant_ckpt *q, int64_t bits, int64_t group, bool sym,
                       const char *where, qspec *out, err *e)
{
    if (bits != 2 && bits != 3 && bits != 4 && bits != 8)
        return err_set(e, ERR_UNSUPPORTED, "%s: %lld bits; this packing is read at 2, 3, 4 and 8",
                       where, (long long)bits);
    if (group != -1 && (group < 1 || group > 1 << 20))
        return err_set(e, ERR_VALUE,
                       "%s: group_size is %lld; expected -1 (one group a row) or 1 to 1048576",
                       where, (long long)group);
    *out = (qspec){{.type = (num_dtype)(NUM_I2 + (int)bits - 2),
                    .gran = group == -1 ? Q_CHANNEL : Q_GROUP,
                    .group = group == -1 ? 0 : (int32_t)group,
                    .asym = !sym},
                   {.type = NUM_BF16},
                   q->kv};
    return 0;
}

void quant__packed_grid(const quant__job *j, int64_t N, int64_t K)
{
    qspec s = j->g->spec;
    if (s.w.gran == Q_GROUP && s.w.group > K) {
        s.w.gran = Q_CHANNEL;
        s.w.group = 0;
    }
    s.w.actorder = false; /* until an order is found */
    quant__set_grid(j->out, &s, N, K);
}

void quant__flip_mask(int bits, uint8_t flip[8])
{
    memset(flip, 0, 8);
    for (int i = 0; i < 8; i++)
        num_put_bits(flip, (size_t)i, bits, 1u << (bits - 1));
}

int quant__scales_transposed(const quant__job *j, const ckpt_tensor *t, err *e)
{
    qtensor *o = j->out;
    int64_t G = o->scale_cols, N = o->N;
    void *p;
    bool any = false;
    if (t->dtype != NUM_F16 && t->dtype != NUM_BF16 && t->dtype != NUM_F32)
        return quant__wrong_type(t, "F16, BF16 or F32", e);
    size_t one = (size_t)num_infos[t->dtype].bits / 8;
    int rc = quant__own(o, (size_t)N, (size_t)G * one, &p, e);
    if (rc < 0) return rc;
    for (int64_t n = 0; n < N; n++)
        for (int64_t g = 0; g < G; g++) {
            const uint8_t *s = t->data + (size_t)(g * N + n) * one;
            memcpy((uint8_t *)p + (size_t)(n * G + g) * one, s, one);
            float v;
            num_decode_row(t->dtype, s, 1, &v);
            any |= v != 0;
            if (!isfinite(v))
                return err_set(e, ERR_VALUE,
                               "%s: tensor '%s' is %g at [%lld, %lld]; the checkpoint is damaged",
                               t->path, t->name, (double)v, (long long)g, (long long)n);
        }
    if (!any)
        return err_set(e, ERR_VALUE,
                       "%s: tensor '%s' is zero throughout; the scales were never written", t->path,
                       t->name);
    o->scales = p;
    o->scale_type = t->dtype;
    return 0;
}
