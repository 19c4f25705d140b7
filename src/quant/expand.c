/* Weights as the tool that wrote them computes with them.
 *
 * The canonical formula, (code - zero) * scale, is exact in fp32 and is what kernels compute. Tools
 * round on the way, each in its own type, and so do the logits that they report. For comparing with
 * one of them a quantized weight can be expanded when it is loaded: to the values of that tool, in
 * the type in which it holds them. Slow and large; the activations stay as the spec says. */
#include "quant/quant_int.h"

static void decode_row(const qtensor *t, int64_t row, const quant_arith *a, float *out)
{
    if (a->once) {
        qtensor_decode_row(t, row, out);
        for (int64_t k = 0; k < t->K; k++)
            out[k] = num_round(a->type, out[k]);
        return;
    }
    if (!a->scale_first) {
        qtensor_decode_row_as(t, row, a->type, out);
        return;
    }
    for (int64_t k = 0; k < t->K; k++) {
        float s = num_round(a->type, qtensor_scale(t, row, k));
        float d = (float)qtensor_code(t, row, k) - qtensor_zero(t, row, k);
        out[k] = num_round(a->type, s * d);
    }
}

int quant__expand(const quant_ckpt *q, qtensor *t, err *e)
{
    quant_arith a = {.type = NUM_F32};
    float *row = NULL;
    void *p;
    qtensor out;
    if (q->dialect->arith) q->dialect->arith(q, t, &a);
    qtensor_plain(&out, a.type, t->N, t->K, NULL);
    out.E = t->E;
    out.spec.a = t->spec.a;
    out.spec.kv = t->spec.kv;
    out.input_scale = t->input_scale;
    out.input_zero = t->input_zero;
    out.input_global = t->input_global;
    int rc = 0;
    if (t->pre_scale)
        return err_set(e, ERR_UNSUPPORTED, "--dequantize: the weight scales its input vector");
    TRY(quant__own(&out, (size_t)(t->E * t->N), out.row_bytes, &p, e));
    TRY(mem_alloc((void **)&row, (size_t)t->K * sizeof *row, e));
    for (int64_t r = 0; r < t->E * t->N; r++) {
        decode_row(t, r, &a, row);
        num_encode_row(a.type, row, (size_t)t->K, (uint8_t *)p + (size_t)r * out.row_bytes);
    }
    out.codes = p;
    qtensor_free(t);
    *t = out;
    rc = 0;
out:
    if (rc < 0) qtensor_free(&out);
    mem_free(row);
    return rc;
}
