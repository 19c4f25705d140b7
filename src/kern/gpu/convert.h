/* Prepared linears of the CPU described to device code: the layouts of kern/layout.c lie in device
 * memory byte for byte as they lie here, so that a weight is prepared once and copied. */
#ifndef KERN_GPU_CONVERT_H
#define KERN_GPU_CONVERT_H
#include "kern/cuda/api.h"
#include "kern/linear.h"

/* prep: memory of a panel layout (not "canonical"), whose head is read here. device_mem: where the
 * same bytes (kern__prep.total of them, and 64 after the end that no one reads) lie on the device,
 * aligned to 64. */
void gpu__panels_of(const void *prep, const void *device_mem, gpu_panels *out);
/* What is emulated of the input's treatment; how the CPU multiplies it is left out. perm and
 * pre_scale are NULL: who copies those of the plan to the device puts their addresses in. */
void gpu__act_of(const kern__act_plan *p, gpu_act *out);
#endif
