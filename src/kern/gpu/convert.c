/* What device code needs of kern__prep and kern__act_plan. The structures of kern/cuda/api.h have
 * the same letters; types of numbers are passed on as their numbers, which device code takes from
 * the same list (num/dtypes.def). */
#include <string.h>
#include "kern/gpu/convert.h"

void gpu__panels_of(const void *prep, const void *device_mem, gpu_panels *out)
{
    const kern__prep *p = prep;
    *out = (gpu_panels){
        .mem = device_mem,
        .N = p->N,
        .K = p->K,
        .Kp = p->Kp,
        .panels = p->panels,
        .group = p->group,
        .groups = p->groups,
        .code = p->code,
        .scale_type = p->scale_type,
        .zero_type = p->zero_type,
        .scale_bytes = p->scale_bytes,
        .zero_bytes = p->zero_bytes,
        .bits = p->bits,
        .bias = p->bias,
        .codes_off = p->codes_off,
        .panel_bytes = p->panel_bytes,
        .scales_off = p->scales_off,
        .zeros_off = p->zeros_off,
        .alpha_off = p->alpha_off,
    };
    memcpy(out->lut, p->lut, sizeof out->lut);
}

void gpu__act_of(const kern__act_plan *p, gpu_act *out)
{
    bool nothing = !qaxis_quantized(&p->a);
    *out = (gpu_act){
        .a_type = nothing ? NUM_NONE : p->a.type,
        .a_gran = p->a.gran,
        .a_scale = p->a.scale,
        .a_group = p->a.gran == Q_GROUP ? p->a.group : 0,
        .round_bf16 = p->round_bf16,
        .in_scale = p->in_scale,
        .in_zero = p->in_zero,
        .in_global = p->in_global,
        .K = p->K,
        .Kp = p->Kp,
    };
}
