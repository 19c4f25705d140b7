/* Operators of the GPU on rows and for the routing of experts, against their twins on the CPU. */
#include "gpu_fixture.h"

static const gpu_type both[] = {GPU_F32, GPU_BF16};

static void norms(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        gpu_mat x = gpu_mat_random(both[i], 3, 33, 33), o = gpu_mat_empty(both[i], 3, 33, 33);
        float *w = gpu_randoms(33);
        kern_rmsnorm(gpu.cpu, x.host, w, 1e-5f, 3, 33, o.host);
        gpu_run(GPU_OP_rmsnorm, &(gpu_norm){x.x, o.x, gpu_up_f32(w, 33), NULL, 1e-5f, 3, 33});
        gpu_check("rmsnorm", &o, 1e-6, 0);
        gpu_check("x", &x, 0, 0);
    }
}

static const gpu_op tested[] = {GPU_OP_rmsnorm};
static const struct CMUnitTest tests[] = {GPU_TEST(norms)};
GPU_MAIN(tests, tested)
