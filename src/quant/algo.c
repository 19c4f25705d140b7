/* The registry of quantization algorithms, and the measure by which their results are judged. */
#include <string.h>
#include "quant/quant_int.h"

const quant_algo quant_algos[] = {
    {"rtn", "round to nearest; scales by the rules of compressed-tensors", quant__rtn},
};
const int quant_n_algos = sizeof quant_algos / sizeof *quant_algos;

const quant_algo *quant_algo_by_name(const char *name)
{
    for (int i = 0; i < quant_n_algos; i++)
        if (!strcmp(quant_algos[i].name, name)) return &quant_algos[i];
    return NULL;
}

double quant_snr_db(const float *w, const qtensor *q)
{
    double signal = 0, noise = 0;
    float *row = NULL;
    if (mem_alloc((void **)&row, (size_t)q->K * sizeof *row, NULL) < 0) return NAN;
    for (int64_t n = 0; n < q->E * q->N; n++) {
        qtensor_decode_row(q, n, row);
        const float *x = w + n * q->K;
        for (int64_t k = 0; k < q->K; k++) {
            double d = (double)x[k] - (double)row[k];
            signal += (double)x[k] * (double)x[k];
            noise += d * d;
        }
    }
    mem_free(row);
    return noise > 0 ? 10 * log10(signal / noise) : INFINITY;
}
