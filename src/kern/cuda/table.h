/* The launch table of the plug-in, built from GPU_OPS: table.cu, for device.cu and emulate.cc. */
#ifndef KERN_CUDA_TABLE_H
#define KERN_CUDA_TABLE_H
#include "kern/cuda/api.h"
#ifdef __cplusplus
extern "C" {
#endif

extern gpu_launch *const cuda_launches[GPU_N_OPS];
/* Put the functions of packed weights (small, wide) and of dense ones (rows, lt) into the table. */
void cuda_packed_api(gpu_api *a);
void cuda_dense_api(gpu_api *a);
/* Clocks and the read of memory. */
void cuda_probe_api(gpu_api *a);
/* Of several devices. */
void cuda_comm_api(gpu_api *a);

#ifdef __cplusplus
}
#endif
#endif
