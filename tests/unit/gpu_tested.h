/* For tests that reach operators of the GPU through the functions of kern.h: the operators of their
 * list `tested` must have been launched (gpu_fixture.h has the same for operators by themselves).
 */
#ifndef TESTS_GPU_TESTED_H
#define TESTS_GPU_TESTED_H
#include "check.h"
#include "kern/gpu/gpu.h"

static inline void gpu_tested(const kern_dev *d, const gpu_op *tested, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!gpu__of(d)->launched[tested[i]])
            fail_msg("operator %d is listed as tested and was never launched", (int)tested[i]);
}
#define GPU_TESTED(dev, tested) gpu_tested(dev, tested, sizeof(tested) / sizeof *(tested))
#endif
