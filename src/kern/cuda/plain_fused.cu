/* Rows that become codes of a quantized linear, in the pass that makes them. */
#include "kern/cuda/port.cuh"

static const char not_yet[] = "fused: not written yet";
#define NOT_YET(name)                                                                              \
    extern "C" const char *cuda_##name(const void *args_, void *stream)                            \
    {                                                                                              \
        (void)args_, (void)stream;                                                                 \
        return not_yet;                                                                            \
    }
NOT_YET(quant)
NOT_YET(norm_quant)
NOT_YET(glu_quant)
NOT_YET(rope_store)
