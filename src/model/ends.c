/* The two ends of a model: which stored tensor serves as embedding and which as output head. What
 * tie_word_embeddings says and what the file holds disagree in practice:
 *
 *   true,  other head stored   the stored head is used, with a warning
 *   true,  equal head stored   one copy is used and counted
 *   true,  only the head       the embedding is taken from it
 *   false, none stored         refused: weights are missing
 *   absent, none stored        shared */
#include <stdio.h>
#include <string.h>
#include "model/arch.h"
#include "quant/quant.h"

static bool same_bytes(const ckpt_tensor *a, const ckpt_tensor *b)
{
    return a->bytes == b->bytes && a->dtype == b->dtype && a->gguf == b->gguf &&
           !memcmp(a->data, b->data, (size_t)a->bytes);
}

int arch_find_ends(const quant_ckpt *q, arch_ends *out, err *e)
{
    const ckpt *c = q->c;
    const ckpt_config *cfg = ckpt_cfg(q->c);
    const ckpt_tensor *te = ckpt_find(c, "model.embed_tokens.weight"),
                      *th = ckpt_find(c, "lm_head.weight");
    bool stored_head = th || quant_has(q, "lm_head"), tie = cfg->tie_embeddings;
    *out = (arch_ends){.embed = "model.embed_tokens", .head = "lm_head"};
    if (!te && th && tie) {
        out->embed = "lm_head";
        out->shared = true;
        return 0;
    }
    if (!te) return ckpt_need(c, "model.embed_tokens.weight", &te, e);
    if (!stored_head && !tie && cfg->tie_embeddings_present)
        return err_set(e, ERR_MISSING,
                       "%s: tensor 'lm_head.weight' is missing and config.json says "
                       "tie_word_embeddings false; fetch the missing tensor, or set "
                       "tie_word_embeddings to true if the model shares its embedding",
                       ckpt_path(c));
    out->shared = !stored_head || (tie && th && same_bytes(te, th));
    if (out->shared)
        out->head = out->embed;
    else if (tie)
        snprintf(out->warning, sizeof out->warning,
                 "tie_word_embeddings is true, but a different lm_head is stored; the stored one "
                 "is used");
    return 0;
}
