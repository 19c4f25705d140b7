/* Layouts of a GPU's linears one by one, for measuring: kern/candidates.h. */
#include "kern/gpu/linear.h"
#include "kern/linear.h"

int gpu__candidates(void)
{
    return gpu_n_layouts;
}

const char *gpu__candidate_name(int i)
{
    return gpu_layouts[i]->name;
}

int gpu__candidate_of(const kern_linear *l)
{
    const gpu_linear *own = l->own;
    for (int i = 0; i < gpu_n_layouts; i++)
        if (gpu_layouts[i] == own->layout) return i;
    return -1;
}

int gpu__linear_make_as(kern_dev *d, const kern_linear_desc *desc, int i, kern_linear **out, err *e)
{
    gpu_dev *g = gpu__of(d);
    g->only = gpu_layouts[i];
    int rc = kern_linear_make(d, desc, out, e);
    g->only = NULL;
    if (rc < 0 || gpu__candidate_of(*out) == i) return rc;
    rc = err_set(e, ERR_UNSUPPORTED, "%s", kern_linear_choice(*out, 0)->refused);
    kern_linear_drop(d, *out);
    *out = NULL;
    return rc;
}
