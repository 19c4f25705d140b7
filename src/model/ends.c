/* The two ends of a model: which stored tensor serves as embedding and which as output head. What
 * tie_word_embeddings says and what the file holds disagree in practice:
 *
 *   true,  other head stored   the stored head is used, with a warning
 *   true,  equal head stored   one copy is used and counted
 *   true,  only the head       the embedding is taken from it
 *   false, none stored         refused: weights are missing
 *   absent, none stored        shared
 *
 * A config without weights is believed. */
#include <stdio.h>
#include <string.h>
#include "model/arch.h"
#include "quant/quant.h"

static bool same_bytes(const ckpt_tensor *a, const ckpt_tensor *b)
{
    return a->bytes == b->bytes && a->dtype == b->dtype && a->gguf == b->gguf &&
           !memcmp(a->data, b->data, (size_t)a->bytes);
}

static const ckpt_tensor *weight_of(const ckpt *c, const char *module)
{
    char name[160];
    snprintf(name, sizeof name, "%s.weight", module);
    return ckpt_find(c, name);
}

int arch_find_ends(const arch_model *m, const quant_ckpt *q, arch_ends *out, err *e)
{
    const ckpt *c = q->c;
    const ckpt_config *cfg = m->cfg;
    const ckpt_tensor *te = weight_of(c, m->name.embed), *th = weight_of(c, m->name.head);
    bool stored_head = th || quant_has(q, m->name.head), tie = cfg->tie_embeddings;
    char name[160];
    *out = (arch_ends){.embed = m->name.embed, .head = m->name.head};
    if (!ckpt_has_weights(c)) { /* a shape: nothing but its word */
        if (tie) out->head = out->embed;
        out->shared = tie;
        return 0;
    }
    if (!te && th && tie) {
        out->embed = m->name.head;
        out->shared = true;
        return 0;
    }
    snprintf(name, sizeof name, "%s.weight", m->name.embed);
    if (!te && !quant_has(q, m->name.embed)) return ckpt_need(c, name, &te, e);
    if (!stored_head && !tie && cfg->tie_embeddings_present)
        return err_set(e, ERR_MISSING,
                       "%s: tensor '%s.weight' is missing and config.json says "
                       "tie_word_embeddings false; fetch the missing tensor, or set "
                       "tie_word_embeddings to true if the model shares its embedding",
                       ckpt_path(c), m->name.head);
    out->shared = !stored_head || (tie && te && th && same_bytes(te, th));
    if (out->shared)
        out->head = out->embed;
    else if (tie)
        snprintf(out->warning, sizeof out->warning,
                 "tie_word_embeddings is true, but a different lm_head is stored; the stored one "
                 "is used");
    return 0;
}
