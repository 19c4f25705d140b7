/* Falcon: layer norms, a feed-forward without gate, q/k/v in one linear stored group by group: the
 * queries of a K/V head, its key, its value (one group where multi_query says so). The halves run
 * side by side, from two norms in the newer form. Positions by alibi are refused. */
#include "model/arch_families.h"

int arch__falcon(arch_model *m, err *e)
{
    bool newer = false, one_kv = true, parallel = true, bias = false;
    int norms = 0, rc = 0;
    TRY(arch_bool(m, "new_decoder_architecture", &newer, e));
    TRY(arch_bool(m, "multi_query", &one_kv, e));
    TRY(arch_bool(m, "parallel_attn", &parallel, e));
    TRY(arch__must(m, "alibi", false, e));
    TRY(arch_bool(m, "bias", &bias, e));
    TRY(arch_int(m, "num_ln_in_parallel_attn", &norms, 2, e));
    if (newer) TRY(arch__must(m, "parallel_attn", true, e));
    m->Hk = newer || !one_kv ? m->H : 1;
    if (newer) TRY(arch_int(m, "num_kv_heads", &m->Hk, 1 << 16, e));
    m->norm = ARCH_LAYER_NORM;
    m->parallel = parallel;
    m->qkv_by_head = true;
    m->qkv_bias = m->o_bias = m->mlp_bias = bias;
    if (newer && !arch_has(m, "num_ln_in_parallel_attn")) norms = 2;
    if (parallel) m->name.norm2 = norms == 2 ? "ln_mlp" : NULL;
    if (parallel && norms == 2) m->name.norm1 = "ln_attn";
    m->name.embed = "transformer.word_embeddings";
    m->name.final_norm = "transformer.ln_f";
    m->name.layer = "transformer.h.%d.";
    m->name.qkv = "self_attention.query_key_value";
    m->name.o = "self_attention.dense";
    m->name.up = "mlp.dense_h_to_4h";
    m->name.down = "mlp.dense_4h_to_h";
    rc = arch__arcee(m, e);
out:
    return rc;
}
