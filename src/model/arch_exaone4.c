/* EXAONE 4: the norms of OLMo 2, with q and k normed head by head. Where the model has windows, its
 * full layers have no rotary positions. */
#include <string.h>
#include "model/arch_families.h"

int arch__exaone4(arch_model *m, err *e)
{
    int every = 4;
    int rc = arch__olmo2(m, e);
    if (rc < 0) return rc;
    m->qk_norm = ARCH_QK_HEAD;
    const json *pattern = json_get(m->cfg->text, "sliding_window_pattern");
    if (cJSON_IsString(pattern)) /* "LLLG" */
        every = (int)strlen(pattern->valuestring);
    else
        rc = arch_int(m, "sliding_window_pattern", &every, 1 << 16, e);
    if (rc < 0) return rc;
    if (!m->cfg->sliding_window) return 0;
    arch__windows(m, every > 0 ? every : 4);
    for (int i = 0; i < m->n_layers; i++)
        m->layers[i].rope = m->layers[i].window ? 0 : -1;
    return 0;
}
