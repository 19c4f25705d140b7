/* Plain twins of rows and lt, for the emulated plug-in. */
#ifdef TARE_EMULATED
#include "kern/cuda/port.cuh"
#include "kern/cuda/table.h"

extern "C" void cuda_dense_api(gpu_api *a)
{
    (void)a;
}
#endif
