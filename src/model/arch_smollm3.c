/* SmolLM3: the Llama block; every fourth layer (or as no_rope_layers says) has no rotary positions.
 */
#include "model/arch_families.h"

int arch__smollm3(arch_model *m, err *e)
{
    int every = 4, i = 0;
    int rc = arch_int(m, "no_rope_layer_interval", &every, 1 << 16, e);
    if (rc < 0) return rc;
    for (i = 0; i < m->n_layers; i++)
        m->layers[i].rope = every && (i + 1) % every == 0 ? -1 : 0;
    const json *list = json_get(m->cfg->text, "no_rope_layers"); /* 1 = the layer has them */
    if (cJSON_IsArray(list)) {
        if (cJSON_GetArraySize(list) != m->n_layers)
            return err_set(e, ERR_SHAPE, "%s: 'no_rope_layers' has %d entries for %d layers",
                           m->cfg->where, cJSON_GetArraySize(list), m->n_layers);
        i = 0;
        for (const json *v = list->child; v; v = v->next)
            m->layers[i++].rope = cJSON_IsNumber(v) && v->valuedouble == 0 ? -1 : 0;
    }
    return arch__llama(m, e);
}
