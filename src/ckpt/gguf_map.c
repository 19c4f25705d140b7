/* A GGUF seen as a Hugging Face checkpoint: names, shapes, config.json.
 *
 * Tensors of a block, blk.N.<name>.<weight|bias>, become model.layers.N.<HF name>.<…>; shapes turn
 * round (ggml counts from the innermost dimension). Converters interleave the rows of llama's q and
 * k: of the D rows of a head, HF's row half*D/2 + i is stored as row 2*i + half. ckpt_load_rows
 * undoes that where permute_heads is set.
 *
 * config.json is written as text from <arch>.* and parsed like any other, so that everything above
 * sees one kind of checkpoint. Llama 3's frequency factors are not in the keys but in a tensor
 * (rope_freqs.weight); they are recognised by recomputing them, and refused when they follow
 * another rule. Architectures that are not in the table open for inspection only: their tensors
 * keep GGUF names where the table has none. */
#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "ckpt/ckpt_internal.h"

typedef struct arch_row {
    const char *gguf, *model_type, *architecture;
    bool permute; /* q and k rows are stored interleaved */
} arch_row;

static const arch_row arch_rows[] = {
    {"llama", "llama", "LlamaForCausalLM", true},
    {"qwen2", "qwen2", "Qwen2ForCausalLM", false},
    {"qwen3", "qwen3", "Qwen3ForCausalLM", false},
};

typedef struct mapping {
    ckpt *c;
    const gguf_file *g;
    char arch[32];
    const arch_row *row; /* NULL = not in the table */
    int64_t heads, kv_heads, layers, hidden, head_dim;
    char key[96];
    err *e;
} mapping;

/* ---- keys ---------------------------------------------------------------------------------------
 */

/* "<arch>.<tail>", in a buffer that the next call reuses. */
static const char *key_of(mapping *m, const char *tail)
{
    snprintf(m->key, sizeof m->key, "%s.%s", m->arch, tail);
    return m->key;
}

static int missing(mapping *m, const char *tail)
{
    return err_set(m->e, ERR_MISSING, "%s: key '%s' is missing; the file was not converted fully",
                   m->g->map.path, key_of(m, tail));
}

/* An integer, or a list of one for each layer that must then be all the same (the largest is taken
 * for architectures that are not run). */
static int int_key(mapping *m, const char *tail, bool needed, int64_t *out)
{
    const gguf_kv *kv = gguf_find(m->g, key_of(m, tail));
    if (kv && kv->type == GGUF_ARR) {
        int rc = gguf_get_arr(m->g, m->key, GGUF_I64, &kv, m->e);
        if (rc < 0) return rc;
        const int64_t *v = kv->arr;
        for (uint64_t i = 0; i < kv->n; i++) {
            if (m->row && v[i] != v[0])
                return err_set(m->e, ERR_UNSUPPORTED,
                               "%s: key '%s' differs between layers (%" PRId64 ", %" PRId64
                               "), which %s does not do here",
                               m->g->map.path, m->key, v[0], v[i], m->arch);
            if (i == 0 || v[i] > *out) *out = v[i];
        }
        return kv->n ? 1 : missing(m, tail);
    }
    int rc = gguf_get_i64(m->g, m->key, out, m->e);
    return rc == 0 && needed ? missing(m, tail) : rc;
}

static int float_key(mapping *m, const char *tail, bool needed, double *out)
{
    int rc = gguf_get_f64(m->g, key_of(m, tail), out, m->e);
    return rc == 0 && needed ? missing(m, tail) : rc;
}

/* The shortest decimal that is this fp32 value: 1e-05, not 9.99999975e-06. */
static double tidy(double v)
{
    char s[32];
    for (int p = 1; p <= 9; p++) {
        snprintf(s, sizeof s, "%.*g", p, v);
        if (strtof(s, NULL) == (float)v) return strtod(s, NULL);
    }
    return v;
}

static const gguf_tensor *find_tensor(const gguf_file *g, const char *name)
{
    for (size_t i = 0; i < g->n_tensors; i++)
        if (!strcmp(g->tensors[i].name, name)) return &g->tensors[i];
    return NULL;
}

/* ---- rope ---------------------------------------------------------------------------------------
 */

/* Llama 3's factor of frequency i for a scaling `factor` over an original context of 8192. */
static double llama3_factor(int64_t i, int64_t dims, double theta, double factor)
{
    static const double low = 1, high = 4, original = 8192, pi = 3.14159265358979323846;
    double wavelength = 2 * pi * pow(theta, 2.0 * (double)i / (double)dims);
    if (wavelength < original / high) return 1;
    if (wavelength > original / low) return factor;
    double smooth = (original / wavelength - low) / (high - low);
    return 1 / ((1 - smooth) / factor + smooth);
}

/* Writes rope_scaling for rope_freqs.weight. */
static int freqs_to_llama3(mapping *m, const gguf_tensor *t, double theta, jw *w)
{
    int64_t n = t->ne[0];
    double factor = 1;
    if (t->n_dims != 1 || t->type->plain != NUM_F32 || n != m->head_dim / 2)
        return err_set(m->e, ERR_SHAPE,
                       "%s: tensor 'rope_freqs.weight' must hold %" PRId64 " F32 values",
                       m->g->map.path, m->head_dim / 2);
    float *f = arena_alloc(m->c->mem, sizeof *f * (size_t)n);
    memcpy(f, t->map->data + t->offset, sizeof *f * (size_t)n);
    for (int64_t i = 0; i < n; i++)
        if ((double)f[i] > factor) factor = tidy((double)f[i]);
    for (int64_t i = 0; i < n; i++) {
        double want = llama3_factor(i, 2 * n, theta, factor);
        if (!(fabs((double)f[i] - want) <= 1e-3 * want))
            return err_set(m->e, ERR_UNSUPPORTED,
                           "%s: tensor 'rope_freqs.weight': factor %" PRId64 " is %g, Llama 3's "
                           "rule gives %g; other rules are not known",
                           m->g->map.path, i, (double)f[i], want);
    }
    if (factor == 1) return 0;
    jw_key(w, "rope_scaling");
    jw_obj(w);
    jw_kstr(w, "rope_type", "llama3");
    jw_kf64(w, "factor", factor);
    jw_kf64(w, "low_freq_factor", 1);
    jw_kf64(w, "high_freq_factor", 4);
    jw_ki64(w, "original_max_position_embeddings", 8192);
    jw_end_obj(w);
    return 0;
}

static int write_rope(mapping *m, jw *w)
{
    int rc = 0;
    double theta = 10000, factor = 0;
    int64_t dims = m->head_dim, original = 0;
    gguf_str type = {0};
    TRY(float_key(m, "rope.freq_base", false, &theta));
    TRY(int_key(m, "rope.dimension_count", false, &dims));
    TRY(gguf_get_str(m->g, key_of(m, "rope.scaling.type"), &type, m->e));
    TRY(float_key(m, "rope.scale_linear", false, &factor));
    TRY(float_key(m, "rope.scaling.factor", false, &factor));
    TRY(int_key(m, "rope.scaling.original_context_length", false, &original));
    jw_kf64(w, "rope_theta", tidy(theta));
    if (dims > 0 && dims < m->head_dim)
        jw_kf64(w, "partial_rotary_factor", (double)dims / (double)m->head_dim);
    const gguf_tensor *freqs = find_tensor(m->g, "rope_freqs.weight");
    rc = 0;
    if (freqs) {
        rc = m->row ? freqs_to_llama3(m, freqs, theta, w) : 0;
    } else if (factor > 0 && factor != 1 && !(type.n == 4 && !memcmp(type.s, "none", 4))) {
        bool yarn = type.n == 4 && !memcmp(type.s, "yarn", 4);
        if (!yarn && type.n && !(type.n == 6 && !memcmp(type.s, "linear", 6)))
            return err_set(
                m->e, ERR_UNSUPPORTED, "%s: key '%s' is '%.*s'; known are none, linear and yarn",
                m->g->map.path, key_of(m, "rope.scaling.type"), (int)(type.n % 64), type.s);
        jw_key(w, "rope_scaling");
        jw_obj(w);
        jw_kstr(w, "rope_type", yarn ? "yarn" : "linear");
        jw_kf64(w, "factor", tidy(factor));
        if (original) jw_ki64(w, "original_max_position_embeddings", original);
        jw_end_obj(w);
    }
out:
    return rc < 0 ? rc : 0;
}

/* ---- config.json --------------------------------------------------------------------------------
 */

/* The type that the unquantized weights have. */
static const char *dtype_text(const gguf_file *g)
{
    bool f16 = false, other = false;
    for (size_t i = 0; i < g->n_tensors; i++) {
        const gguf_tensor *t = &g->tensors[i];
        if (t->n_dims < 2 || t->type->plain == NUM_F32) continue;
        f16 = f16 || t->type->plain == NUM_F16;
        other = other || t->type->plain != NUM_F16;
    }
    return other ? "bfloat16" : f16 ? "float16" : "float32";
}

/* Token ids in `keys` that the file has, each once; one id plain, more as a list. */
static int write_ids(mapping *m, jw *w, const char *name, const char *const *keys, int n)
{
    int64_t ids[4];
    int k = 0;
    for (int i = 0; i < n && k < 4; i++) {
        int64_t id = 0;
        bool have = false;
        int rc = gguf_get_i64(m->g, keys[i], &id, m->e);
        if (rc < 0) return rc;
        for (int j = 0; j < k; j++)
            have = have || ids[j] == id;
        if (rc && !have && id >= 0 && id != UINT32_MAX) ids[k++] = id;
    }
    if (!k) return 0;
    jw_key(w, name);
    if (k > 1) jw_arr(w);
    for (int i = 0; i < k; i++)
        jw_i64(w, ids[i]);
    if (k > 1) jw_end_arr(w);
    return 0;
}

static int write_token_ids(mapping *m, jw *w)
{
    static const char *const bos[] = {"tokenizer.ggml.bos_token_id"},
                             *const eos[] = {"tokenizer.ggml.eos_token_id",
                                             "tokenizer.ggml.eot_token_id",
                                             "tokenizer.ggml.eom_token_id"};
    int rc = write_ids(m, w, "bos_token_id", bos, 1);
    return rc < 0 ? rc : write_ids(m, w, "eos_token_id", eos, 3);
}

static int read_shapes(mapping *m)
{
    int rc = 0;
    int64_t value_dim = 0;
    TRY(int_key(m, "block_count", true, &m->layers));
    TRY(int_key(m, "embedding_length", true, &m->hidden));
    TRY(int_key(m, "attention.head_count", true, &m->heads));
    m->kv_heads = m->heads;
    TRY(int_key(m, "attention.head_count_kv", false, &m->kv_heads));
    if (m->heads < 1 || m->kv_heads < 1 || m->heads > 1 << 16 || m->kv_heads > 1 << 16) {
        rc = err_set(m->e, ERR_VALUE,
                     "%s: %" PRId64 " heads and %" PRId64 " key/value heads; expected 1 to 65536",
                     m->g->map.path, m->heads, m->kv_heads);
        goto out;
    }
    m->head_dim = m->hidden / m->heads;
    TRY(int_key(m, "attention.key_length", false, &m->head_dim));
    value_dim = m->head_dim;
    TRY(int_key(m, "attention.value_length", false, &value_dim));
    if (m->row && value_dim != m->head_dim)
        rc = err_set(m->e, ERR_UNSUPPORTED,
                     "%s: keys of %" PRId64 " and values of %" PRId64 " elements a head; %s needs "
                     "them equal",
                     m->g->map.path, m->head_dim, value_dim, m->arch);
out:
    return rc < 0 ? rc : 0;
}

static int write_config(mapping *m, buf *out)
{
    int rc = 0;
    int64_t ffn = 0, context = 0, vocab = 0, window = 0, experts = 0;
    double eps = 1e-5;
    jw w;
    TRY(read_shapes(m));
    TRY(int_key(m, "feed_forward_length", m->row != NULL, &ffn));
    TRY(int_key(m, "context_length", m->row != NULL, &context));
    TRY(int_key(m, "vocab_size", false, &vocab));
    TRY(int_key(m, "attention.sliding_window", false, &window));
    TRY(int_key(m, "expert_count", false, &experts));
    TRY(float_key(m, "attention.layer_norm_rms_epsilon", m->row != NULL, &eps));
    const gguf_tensor *embed = find_tensor(m->g, "token_embd.weight");
    if (embed && embed->n_dims == 2) vocab = embed->ne[1]; /* padding rows count, as in HF */
    const gguf_kv *tokens = NULL;
    if (vocab == 0 && gguf_get_arr(m->g, "tokenizer.ggml.tokens", GGUF_STR, &tokens, NULL) > 0)
        vocab = (int64_t)tokens->n;
    bool moe = experts > 0 && m->row && m->row->permute; /* Mixtral is filed under llama */
    jw_init(&w, out, 2);
    jw_obj(&w);
    if (m->row) {
        jw_key(&w, "architectures");
        jw_arr(&w);
        jw_str(&w, moe ? "MixtralForCausalLM" : m->row->architecture);
        jw_end_arr(&w);
    }
    jw_kstr(&w, "model_type", moe ? "mixtral" : m->row ? m->row->model_type : m->arch);
    jw_ki64(&w, "vocab_size", vocab);
    jw_ki64(&w, "hidden_size", m->hidden);
    jw_ki64(&w, "intermediate_size", ffn);
    jw_ki64(&w, "num_hidden_layers", m->layers);
    jw_ki64(&w, "num_attention_heads", m->heads);
    jw_ki64(&w, "num_key_value_heads", m->kv_heads);
    jw_ki64(&w, "head_dim", m->head_dim);
    if (context > 0) jw_ki64(&w, "max_position_embeddings", context);
    jw_kf64(&w, "rms_norm_eps", tidy(eps));
    jw_kstr(&w, "hidden_act", "silu");
    jw_kbool(&w, "tie_word_embeddings", !find_tensor(m->g, "output.weight"));
    jw_kbool(&w, "attention_bias", find_tensor(m->g, "blk.0.attn_q.bias") != NULL);
    jw_kbool(&w, "mlp_bias", find_tensor(m->g, "blk.0.ffn_gate.bias") != NULL);
    if (window > 0) jw_ki64(&w, "sliding_window", window);
    if (experts > 0) jw_ki64(&w, "num_local_experts", experts);
    jw_kstr(&w, "torch_dtype", dtype_text(m->g));
    TRY(write_token_ids(m, &w));
    TRY(write_rope(m, &w));
    jw_end_obj(&w);
    buf_putc(out, '\n');
out:
    return rc < 0 ? rc : 0;
}

/* ---- tensors ------------------------------------------------------------------------------------
 */

static const struct {
    const char *gguf, *hf;
} top_names[] = {{"token_embd", "model.embed_tokens"},
                 {"output_norm", "model.norm"},
                 {"output", "lm_head"}},
  block_names[] = {{"attn_norm", "input_layernorm"},    {"attn_q", "self_attn.q_proj"},
                   {"attn_k", "self_attn.k_proj"},      {"attn_v", "self_attn.v_proj"},
                   {"attn_output", "self_attn.o_proj"}, {"attn_q_norm", "self_attn.q_norm"},
                   {"attn_k_norm", "self_attn.k_norm"}, {"ffn_norm", "post_attention_layernorm"},
                   {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
                   {"ffn_down", "mlp.down_proj"}};

/* HF name, or the name as it is when the table does not know it. *base is its block name or "". */
static const char *hf_name(arena *mem, const char *name, const char **base)
{
    const char *dot = strrchr(name, '.');
    *base = "";
    if (!dot) return name;
    unsigned layer = 0;
    int used = 0;
    if (sscanf(name, "blk.%5u.%n", &layer, &used) == 1 && used && name + used < dot) {
        size_t n = (size_t)(dot - name) - (size_t)used;
        for (size_t i = 0; i < sizeof block_names / sizeof *block_names; i++)
            if (strlen(block_names[i].gguf) == n && !memcmp(block_names[i].gguf, name + used, n)) {
                *base = block_names[i].gguf;
                return arena_printf(mem, "model.layers.%u.%s%s", layer, block_names[i].hf, dot);
            }
        return name;
    }
    for (size_t i = 0; i < sizeof top_names / sizeof *top_names; i++)
        if (strlen(top_names[i].gguf) == (size_t)(dot - name) &&
            !memcmp(top_names[i].gguf, name, (size_t)(dot - name)))
            return arena_printf(mem, "%s%s", top_names[i].hf, dot);
    return name;
}

/* Tensors that say what the config says already. */
static bool is_derived(const char *name)
{
    return !strcmp(name, "rope_freqs.weight") || strstr(name, ".attn_rot_embd.");
}

static int map_tensor(mapping *m, const gguf_tensor *t, ckpt_tensor *o)
{
    const char *base;
    *o = (ckpt_tensor){.dtype = t->type->plain,
                       .gguf = t->type->plain == NUM_NONE ? t->type : NULL,
                       .n_dims = t->n_dims,
                       .bytes = t->bytes,
                       .data = t->map->data + t->offset,
                       .path = t->map->path};
    o->name = hf_name(m->c->mem, t->name, &base);
    for (int d = 0; d < t->n_dims; d++)
        o->shape[d] = t->ne[t->n_dims - 1 - d];
    if (!m->row || !m->row->permute) return 0;
    int64_t heads = !strcmp(base, "attn_q") ? m->heads : !strcmp(base, "attn_k") ? m->kv_heads : 0;
    if (heads && o->shape[0] % (2 * heads))
        return err_set(m->e, ERR_SHAPE,
                       "%s: tensor '%s' has %" PRId64 " rows, which do not split into %" PRId64
                       " heads of an even size",
                       m->g->map.path, t->name, o->shape[0], heads);
    o->permute_heads = (int)heads;
    return 0;
}

/* "Q4_1 210, F32 61, Q8_0 1": most frequent first. */
static char *type_summary(const gguf_file *g)
{
    int count[64] = {0};
    buf b = {0};
    for (size_t i = 0; i < g->n_tensors; i++)
        count[g->tensors[i].type - gguf_types]++;
    for (;;) {
        int best = 0;
        for (int i = 1; i < gguf_n_types; i++)
            if (count[i] > count[best]) best = i;
        if (!count[best]) break;
        buf_printf(&b, "%s%s %d", b.len ? ", " : "", gguf_types[best].name, count[best]);
        count[best] = 0;
    }
    buf_puts(&b, ""); /* no tensor at all: an empty text */
    return b.data;
}

/* ---- open ---------------------------------------------------------------------------------------
 */

static int read_arch(mapping *m)
{
    gguf_str s = {0};
    int rc = gguf_get_str(m->g, "general.architecture", &s, m->e);
    if (rc < 0) return rc;
    bool ok = rc > 0 && s.n > 0 && s.n < sizeof m->arch;
    for (size_t i = 0; ok && i < s.n; i++)
        ok = isalnum((unsigned char)s.s[i]) || s.s[i] == '-' || s.s[i] == '_' || s.s[i] == '.';
    if (!ok)
        return err_set(m->e, ERR_MISSING,
                       "%s: key 'general.architecture' is missing or not a name; this is not a "
                       "language model's GGUF",
                       m->g->map.path);
    memcpy(m->arch, s.s, s.n);
    for (size_t i = 0; i < sizeof arch_rows / sizeof *arch_rows; i++)
        if (!strcmp(arch_rows[i].gguf, m->arch)) m->row = &arch_rows[i];
    return 0;
}

int ckpt__open_gguf(ckpt *c, const char *path, err *e)
{
    int rc = 0;
    buf text = {0};
    mapping m = {.c = c, .g = &c->gguf, .e = e};
    TRY(gguf_open_split(&c->gguf, path, e));
    TRY(read_arch(&m));
    TRY(write_config(&m, &text));
    TRY(json_parse(&c->config_json, text.data, text.len, path, e));
    TRY(config_parse(&c->cfg, c->config_json, NULL, path, e));
    c->cfg_ok = true;
    c->tensors = arena_alloc(c->mem, sizeof *c->tensors * (c->gguf.n_tensors + 1));
    for (size_t i = 0; i < c->gguf.n_tensors; i++) {
        if (is_derived(c->gguf.tensors[i].name)) continue;
        TRY(map_tensor(&m, &c->gguf.tensors[i], &c->tensors[c->n_tensors++]));
    }
    TRY(ckpt__index(c, e));
    char *summary = type_summary(&c->gguf);
    c->gguf_text = arena_strdup(c->mem, summary);
    free(summary);
    c->file_bytes = c->gguf.map.size;
    for (int i = 0; i < c->gguf.n_more; i++)
        c->file_bytes += c->gguf.more[i].map.size;
    if (c->gguf.n_more) { /* the same model, whichever part was given */
        free(c->path);
        c->path = xstrdup(c->gguf.map.path);
    }
out:
    buf_free(&text);
    return rc;
}

int ckpt__gguf_generation_config(const ckpt *c, buf *out, err *e)
{
    mapping m = {.g = &c->gguf, .e = e};
    jw w;
    jw_init(&w, out, 2);
    jw_obj(&w);
    int rc = write_token_ids(&m, &w);
    jw_end_obj(&w);
    buf_putc(out, '\n');
    return rc;
}
