/* Products of prepared weights as operators of the launch table; on the CPU plain_packed.cu and
 * plain_dense.cu stand for them. */
#include <cuda_runtime.h>
#include "kern/cuda/table.h"

extern "C" const char *cuda_small(const void *args, void *stream)
{
    small_call c = *(const small_call *)args;
    c.stream = stream;
    return small_run(&c);
}

extern "C" const char *cuda_wide(const void *args, void *stream)
{
    wide_call c = *(const wide_call *)args;
    c.stream = stream;
    return wide_run(&c);
}

extern "C" const char *cuda_rows(const void *args, void *stream)
{
    rows_call c = *(const rows_call *)args;
    c.stream = stream;
    return rows_run(&c);
}

extern "C" const char *cuda_slim(const void *args, void *stream)
{
    rows_call c = *(const rows_call *)args;
    c.stream = stream;
    return slim_run(&c);
}

extern "C" const char *cuda_lt(const void *args, void *stream)
{
    const gpu_lt *a = (const gpu_lt *)args;
    lt_call c = a->call;
    c.stream = stream;
    return lt_run(a->lt, &c);
}

extern "C" void cuda_packed_api(gpu_api *a)
{
    a->small_entry = small_entry;
    a->wide_choose = wide_choose;
    a->wide_has = wide_has;
    a->wide_work_bytes = wide_work_bytes;
    a->experts_work_bytes = wide_experts_work_bytes;
}

extern "C" void cuda_dense_api(gpu_api *a)
{
    a->rows_prepare = rows_prepare;
    a->rows_refuse = rows_refuse;
    a->rows_choose = rows_choose;
    a->rows_has = rows_has;
    a->slim_choose = slim_choose;
    a->lt_open = lt_open;
    a->lt_close = lt_close;
    a->lt_plan = lt_plan;
}
