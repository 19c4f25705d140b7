/* Checkpoint dialects and quantization algorithms.
 * A dialect recognises a checkpoint, says the spec of each module, loads a module into a qtensor,
 * and stores a qtensor as tensors + config. "Module" is the checkpoint path of a linear without
 * ".weight", e.g. "model.layers.0.self_attn.q_proj". An algorithm turns fp32 rows and statistics
 * into a qtensor and never sees a model. */
#ifndef QUANT_QUANT_H
#define QUANT_QUANT_H
#include "base/thread.h"
#include "ckpt/ckpt.h"
#include "num/qtensor.h"

typedef struct quant_dialect quant_dialect;
typedef struct quant_rule quant_rule;

typedef struct quant_group { /* one config group */
    qspec spec;              /* w and a */
    char format[40];         /* "pack-quantized" … */
    char **targets;
    int n_targets;
    quant_rule **rules; /* [n_targets] compiled targets */
    int hits;           /* quantized modules that fall to this group */
} quant_group;

/* What the user says about a checkpoint that its files do not. */
typedef struct quant_opts {
    const char *gptq_zeros; /* "v1" or "v2": how GPTQ zero points are stored; NULL = by the label */
    bool dequantize; /* expand weights at load, in the arithmetic of the tool that wrote them */
    const char *kv_scales; /* JSON file with one KV scale a layer; NULL = the checkpoint's */
} quant_opts;

typedef struct quant_ckpt { /* an opened checkpoint with its quantization understood */
    ckpt *c;
    const quant_dialect *dialect; /* "plain" when unquantized */
    quant_opts opts;
    const json *config; /* the quantization object: of config.json, else of a side file; or NULL */
    const char *where;  /* file and key of it, for messages */
    json *side;         /* the side file that was parsed for it, owned; else NULL */
    void *own;          /* what the dialect keeps between detect and load, in mem */
    quant_group *groups;
    int n_groups;
    char **ignore;
    int n_ignore;
    quant_rule **ignore_rules; /* [n_ignore] compiled */
    int *ignore_hits;          /* modules caught by each rule */
    qaxis kv;                  /* kv_cache_scheme; bf16 when none */
    float *kv_file;            /* [n_layers] of opts.kv_scales, or NULL */
    char **warnings;
    int n_warnings; /* where config and tensors disagree harmlessly */
    arena *mem;
} quant_ckpt;

/* A tensor of a quantized module, told by what follows the module's name. */
typedef enum quant_part_kind {
    QUANT_CODES,
    QUANT_SCALES,
    QUANT_ZEROS,
    QUANT_LAYOUT
} quant_part_kind;
typedef struct quant_part {
    const char *suffix; /* with its separator: ".qweight", "_blocks" */
    quant_part_kind kind;
} quant_part;

typedef struct quant_arith { /* how a tool dequantizes: every step rounded to `type` */
    num_dtype type;          /* NUM_F32 unless the dialect says otherwise */
    bool scale_first;        /* the stored scale is rounded to it as well */
    bool once;               /* only the fp32 product is */
} quant_arith;

typedef struct quant_module { /* what headers alone say of a quantized module */
    qspec spec;
    const char *format; /* layout name within the dialect: "pack-quantized", "gemm" … */
    int64_t E, N, K;
} quant_module;

typedef struct quant_written { /* a module of an output */
    const char *module;
    qspec spec;
} quant_written;

struct quant_dialect {
    const char *name;    /* "compressed-tensors" */
    const char *methods; /* quant_method values, space separated */
    /* 1 = mine (fills q), 0 = not mine, <0 error */
    int (*detect)(quant_ckpt *q, err *e);
    /* Does the checkpoint hold quantized tensors of this module? */
    bool (*has)(const quant_ckpt *q, const char *module);
    int (*load)(const quant_ckpt *q, const char *module, qtensor *out, err *e);
    const quant_part *parts; /* up to a NULL suffix; the codes come first */
    /* Shape and spec from headers; NULL = weight [.., N, K] or weight_packed with weight_shape. */
    int (*describe)(const quant_ckpt *q, const char *module, quant_module *out, err *e);
    void (*arith)(const quant_ckpt *q, const qtensor *t, quant_arith *out); /* NULL = f32 */
    /* Writes the tensors of one module. */
    int (*store)(ckpt_writer *w, const char *module, const qtensor *t, num_dtype model_dtype,
                 err *e);
    /* Writes the value of quantization_config into j. */
    int (*emit_config)(jw *j, const qspec *s, char *const *ignore, int n_ignore, err *e);
    /* The same for modules of several schemes; NULL = one scheme for all. */
    int (*emit_modules)(jw *j, const quant_written *m, int n, const qaxis *kv, char *const *ignore,
                        int n_ignore, err *e);
    bool plain_transposed;   /* unquantized, its stacks of experts are [E, K, N] */
    bool f16_scales;         /* its float scales are F16 whatever the model's type */
    const char *side_config; /* file that repeats the config, for old readers; or NULL */
};
extern const quant_dialect *const quant_dialects[];
extern const int quant_n_dialects;

const quant_dialect *quant_dialect_by_name(const char *name); /* or one of its methods; NULL */
/* quantization_config of these modules: in one scheme by emit_config, in several by emit_modules;
 * ERR_UNSUPPORTED names two modules whose schemes differ where the dialect has only one. */
int quant_emit(const quant_dialect *d, jw *j, const quant_written *m, int n, const qaxis *kv,
               char *const *ignore, int n_ignore, err *e);

/* Detects the dialect. An unquantized config with quantized tensors inside, an unknown
 * quant_method, packed tensors under an ignored module, a config group that matches nothing: errors
 * that say so. */
int quant_open(quant_ckpt **out, ckpt *c, err *e);
int quant_open_as(quant_ckpt **out, ckpt *c, const quant_opts *o, err *e);
void quant_close(quant_ckpt *q);
/* Is this module stored quantized? The tensors decide, not the lists. */
bool quant_has(const quant_ckpt *q, const char *module);
/* Any linear, quantized or plain (gguf blocks are decoded to bf16, rows unpermuted). ERR_MISSING if
 * neither. The qtensor borrows from the map where it can. Checked with qtensor_check. */
int quant_load(const quant_ckpt *q, const char *module, qtensor *out, err *e);
/* Shape and spec of a quantized module from headers alone; ERR_MISSING if it is not quantized. */
int quant_describe(const quant_ckpt *q, const char *module, quant_module *out, err *e);
/* Adds the bytes of the module's tensors in the file, by kind: bits of packed rows that no code
 * uses and tensors that only describe the layout count as padding. */
int quant_module_bytes(const quant_ckpt *q, const char *module, qbytes *add, err *e);
/* The module's pages in the map may be dropped: what was made of it holds no pointer into it. */
void quant_release(const quant_ckpt *q, const char *module);
/* The part that this tensor is of a quantized module, whose name goes to `module`; or NULL. */
#define QUANT_NAME_MAX 512
const quant_part *quant_part_of(const quant_ckpt *q, const char *tensor,
                                char module[QUANT_NAME_MAX]);
/* KV scales of layer i under any of the known names, or of opts.kv_scales: *k,*v are [n_kv_heads]
 * arrays in q->mem, or NULL. */
int quant_kv_scales(const quant_ckpt *q, int layer, int n_kv_heads, const float **k,
                    const float **v, err *e);
/* Does this tensor hold a scale or zero point of the cache (of k, v, q or the probabilities)? */
bool quant_is_kv_scale(const char *tensor);

/* The config group that a module falls to (exact names before regexes before class names), or NULL;
 * whether an ignore rule holds it unquantized. */
const quant_group *quant_group_of(const quant_ckpt *q, const char *module);
bool quant_ignored(const quant_ckpt *q, const char *module);

/* Rules, matched against unfused module names. The kinds stand in the order in which groups are
 * looked up. */
typedef enum quant_rule_kind {
    QUANT_RULE_NAME,      /* the whole name */
    QUANT_RULE_REGEX,     /* anchored at the start only, as Python's re.match */
    QUANT_RULE_GLOB,      /* the whole name, as Python's fnmatch: * ? [a-c] [!a] */
    QUANT_RULE_COMPONENT, /* whole dotted components: "mlp.gate" takes x.mlp.gate, not mlp.gate_proj
                           */
    QUANT_RULE_SUBSTRING, /* anywhere in the name */
    QUANT_RULE_CLASS      /* class name such as "Linear": any module */
} quant_rule_kind;
/* compressed-tensors' own notation: a name, "re:" and a regex, or a class name. */
int quant_rule_make(quant_rule **out, const char *text, err *e);
int quant_rule_make_as(quant_rule **out, quant_rule_kind kind, const char *text, err *e);
quant_rule_kind quant_rule_kind_of(const quant_rule *r);
bool quant_rule_match(const quant_rule *r, const char *module);
void quant_rule_drop(quant_rule *r);

/* Algorithms. Weight rows come as fp32 [N,K]; fused_amax > 0 is the amax of the fused set (NVFP4
 * global scale). Codes are nearest for the stored scale (division in fp32). */
typedef struct quant_stats {
    float fused_amax; /* 0 = this module alone */
    team *workers;    /* rows are shared out among them; NULL = this thread */
} quant_stats;
typedef struct quant_algo {
    const char *name; /* "rtn" */
    const char *doc;
    int (*quantize)(const float *w, int64_t N, int64_t K, const qspec *s, num_dtype model_dtype,
                    const quant_stats *st, qtensor *out, err *e);
} quant_algo;
extern const quant_algo quant_algos[];
extern const int quant_n_algos;
const quant_algo *quant_algo_by_name(const char *name);
/* SNR in dB of candidate against the original rows: 10 log10(sum w^2 / sum (w-q)^2); +inf if equal.
 */
double quant_snr_db(const float *w, const qtensor *q);
#endif
