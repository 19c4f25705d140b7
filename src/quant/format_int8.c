/* INT8 families of their own quant_method.
 *
 *   w8a8_int8        weight I8 [N,K], weight_scale [N,1]; activations per token
 *   blockwise_int8   weight I8 [N,K], weight_scale_inv [ceil(N/bn), ceil(K/bk)]; activations in
 *                    groups of bk along K; activation_scheme dynamic
 *
 * The block size comes from weight_block_size alone. */
#include <stdio.h>
#include <string.h>
#include "quant/scaled.h"

static const quant__scheme schemes[] = {
    {"channel", "w:int8,channel a:int8,token", "weight_scale", NULL, NULL, 0},
    {"block", "w:int8,block128x128 a:int8,group128", "weight_scale_inv", NULL, NULL, 0},
};

static int finish(quant_ckpt *q, const quant__scheme *s, const char *spec, err *e)
{
    qspec x;
    int rc = 0;
    quant__scaled_init(q, schemes, (int)(sizeof schemes / sizeof *schemes));
    TRY(qspec_parse(spec, &x, e));
    TRY(quant__scaled_group(q, s, &x, e));
    TRY(quant__excludes(q, json_get(q->config, "modules_to_not_convert"), q->where,
                        QUANT_RULE_COMPONENT, e));
    rc = quant__scaled_finish(q, e);
out:
    return rc;
}

static int w8a8_detect(quant_ckpt *q, err *e)
{
    return finish(q, &schemes[0], schemes[0].spec, e);
}

static int blockwise_detect(quant_ckpt *q, err *e)
{
    int rc = 0;
    int32_t bn, bk;
    const char *act = "dynamic";
    char text[120];
    TRY(json_get_str(q->config, "activation_scheme", &act, q->where, e));
    if (strcmp(act, "dynamic"))
        return err_set(e, ERR_UNSUPPORTED, "%s: activation_scheme '%s'; expected dynamic", q->where,
                       act);
    TRY(quant__block_size(q, &bn, &bk, e));
    if (!bn)
        return err_set(e, ERR_MISSING,
                       "%s: 'weight_block_size' is missing; blockwise_int8 needs [rows, columns]",
                       q->where);
    snprintf(text, sizeof text, "w:int8,block%dx%d a:int8,group%d", (int)bn, (int)bk, (int)bk);
    rc = finish(q, &schemes[1], text, e);
out:
    return rc;
}

const quant_dialect quant__w8a8_int8 = {
    .name = "w8a8_int8", .methods = "w8a8_int8", .detect = w8a8_detect, SCALED_DIALECT};
const quant_dialect quant__blockwise_int8 = {.name = "blockwise_int8",
                                             .methods = "blockwise_int8",
                                             .detect = blockwise_detect,
                                             SCALED_DIALECT};
