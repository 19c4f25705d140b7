/* Nemotron 4 and Minitron: layer norms stored without their 1, a feed-forward without gate, half of
 * each head rotated. */
#include "model/arch_families.h"

int arch__nemotron(arch_model *m, err *e)
{
    m->norm = ARCH_LAYER_NORM_ONE;
    return arch__arcee(m, e);
}
