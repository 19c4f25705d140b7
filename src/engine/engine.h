/* The narrow waist: everything above (serve, eval, cli) sees requests and events, never tensors.
 * engine_open loads a model, plans memory, makes the KV pool and starts the engine thread, which
 * owns the device. Requests are submitted from any thread; events arrive by the request's sink on
 * the engine thread (it must not block; copy what is needed). */
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H
#include "base/json.h"
#include "text/tokenizer.h"
#include "text/chat.h"

typedef struct engine engine;

/* Options that say how a model runs: the same in every command that runs one. Zero = default. */
typedef struct engine_opts {
    const char *model;  /* directory, hub name or .gguf */
    const char *device; /* "cpu" */
    int threads;
    int tp; /* devices that run the model together, `device` and those after it; 0 = 1 */
    const char *cpu_features;     /* "auto" */
    const char *kv_cache_dtype;   /* "auto" */
    const char *activation_dtype; /* "auto" */
    const char *quantization;     /* scheme for unquantized, assertion on quantized */
    const char *gptq_zeros;       /* "v1" or "v2": how GPTQ zero points are stored */
    const char *kv_scales;        /* JSON file with one KV scale a layer */
    bool dequantize;              /* weights expanded as the tool that wrote them does */
    int64_t max_model_len;        /* 0 = config, clamped to what fits */
    int64_t max_running;          /* default 8 */
    int64_t max_queued;           /* default 256 */
    double mem_fraction;          /* of available memory, default 0.8 */
    int64_t max_total_tokens; /* KV pool size in tokens; 0 = as many as max_running x max_model_len,
                                 at most what mem_fraction allows */
    int64_t chunk_tokens;     /* chunked prefill, default 512 */
    int page_tokens;          /* 0 = as the device likes: 16 on a CPU, 32 on a GPU */
    bool no_prefix_cache;
    bool strict;
    const char *chat_template; /* file that overrides */
    /* For measuring speed. Text of a config.json: `model` is its name, the weights are random, and
     * there is no text. The cache is filled with random numbers. */
    const char *shape;
} engine_opts;
int engine_open(engine **out, const engine_opts *o, err *e);
/* Drains running requests up to drain_seconds (new submissions are refused), then stops. */
void engine_close(engine *en, double drain_seconds);

/* What a request wants back. */
enum {
    WANT_TOKENS = 1,          /* generated ids and text */
    WANT_LOGPROBS = 2,        /* of generated tokens, top_logprobs alternatives */
    WANT_PROMPT_LOGPROBS = 4, /* of prompt tokens (prefix cache is bypassed) */
    WANT_LOGITS = 8,          /* full logit rows of the prompt, chunk by chunk */
    WANT_HIDDEN = 16          /* hidden states per layer, chunk by chunk */
};

#define REQ_MAX_STOPS 16
#define REQ_MAX_TOP   20
typedef struct sample_opts {
    double temperature;  /* 0 = greedy */
    double top_p, min_p; /* 1, 0 = off */
    int64_t top_k;       /* <= 0 = off; larger than the vocabulary = off */
    double repetition_penalty, presence_penalty, frequency_penalty; /* 1, 0, 0 = off */
    bool has_seed;
    int64_t seed;
    const int32_t *bias_ids;
    const float *bias;
    int n_bias;
} sample_opts;
void sample_opts_default(sample_opts *s); /* temperature 1, top_p 1 … as in the OpenAI API */

struct engine_event;
typedef void engine_sink(void *arg, const struct engine_event *ev);

typedef struct req_params { /* all pointers are copied by submit */
    const int32_t *prompt;
    int64_t n_prompt;
    int64_t max_tokens; /* generated at most; 0 = prompt only */
    sample_opts sample;
    unsigned want;
    int top_logprobs; /* 0..REQ_MAX_TOP */
    const char *stops[REQ_MAX_STOPS];
    int n_stops;
    const int32_t *stop_ids;
    int n_stop_ids;
    bool ignore_eos, include_stop,
        keep_special; /* keep_special: do not skip special tokens in text */
    bool continues;   /* the text goes on where the prompt's ends: a space in front stays */
    int64_t min_tokens;
    bool assume_cached; /* of a shape: all of the prompt but its last token counts as computed */
    uint64_t cache_salt;
    int choice; /* index of n > 1: seeds derive from (seed, choice) */
    engine_sink *sink;
    void *sink_arg;
} req_params;
void req_params_default(req_params *p);

typedef enum finish_reason {
    FINISH_NONE,
    FINISH_STOP,
    FINISH_LENGTH,
    FINISH_CANCELLED,
    FINISH_ERROR
} finish_reason;

typedef struct token_logprob {
    int32_t id;
    float logprob; /* natural log, full softmax before temperature and filters */
    int n_top;
    int32_t top_id[REQ_MAX_TOP + 1];
    float top_logprob[REQ_MAX_TOP + 1];
    bool none; /* first prompt token: no logprob */
} token_logprob;

typedef enum event_kind { EV_PROMPT, EV_TOKEN, EV_LOGITS, EV_HIDDEN, EV_DONE } event_kind;
typedef struct engine_event {
    event_kind kind;
    uint64_t id;
    /* EV_PROMPT: logprobs of prompt positions [pos, pos+n) (chunk by chunk)
       EV_TOKEN: n = 1, one generated token: its text piece may be empty (held back)
       EV_LOGITS: rows for prompt positions [pos, pos+n): logits [n, vocab]
       EV_HIDDEN: layer (-1 = embedding), rows [pos,pos+n): hidden [n, width]
       EV_DONE: reason, rest of the text, counts */
    int64_t pos, n;
    const token_logprob *logprobs; /* [n] or NULL */
    int32_t token;
    const char *text;
    size_t text_len; /* new text, complete UTF-8 */
    const float *logits;
    const float *hidden;
    int64_t vocab, width;
    int layer;
    finish_reason reason;
    int32_t stop_id;       /* stop token id, or -1 */
    const char *stop_text; /* stop string that matched, or NULL */
    int64_t prompt_tokens, cached_tokens, output_tokens;
    double queue_s, ttft_s, total_s; /* since submit */
    const err *error;                /* FINISH_ERROR */
} engine_event;

/* Validates (ids inside the vocabulary, lengths: ERR_TOOLONG says max, prompt and requested) and
 * queues. ERR_BUSY when max_queued are waiting. */
int engine_submit(engine *en, const req_params *p, uint64_t *id, err *e);
void engine_cancel(engine *en, uint64_t id); /* unknown or finished ids are ignored */

/* Blocking convenience on top of submit: collects everything. */
typedef struct gen_result {
    ids out;
    buf text;
    token_logprob *logprobs;
    size_t n_logprobs;
    token_logprob *prompt_logprobs;
    size_t n_prompt_logprobs;
    finish_reason reason;
    int64_t prompt_tokens, cached_tokens, output_tokens;
    double ttft_s, total_s;
} gen_result;
int engine_generate(engine *en, const req_params *p, gen_result *out, err *e);
void gen_result_free(gen_result *r);

const tokenizer *engine_tokenizer(const engine *en); /* NULL when the model has none */
const chat_template *engine_chat(const engine *en);  /* NULL when none */
/* Renders messages with the model's template and encodes (no extra BOS where the template wrote
 * it). */
int engine_chat_ids(const engine *en, const json *messages, const json *extra,
                    bool generation_prompt, ids *out, err *e);
const int32_t *engine_eos(const engine *en, int *n); /* every id that ends a turn */
int64_t engine_vocab(const engine *en);
int64_t engine_max_len(const engine *en);

typedef struct engine_info {
    char model[256]; /* path as given */
    char architecture[64];
    char spec[128];      /* canonical W/A/KV text of what runs */
    char activation[64]; /* how activations ran: "int8 per 32 along K (auto)" … */
    char kv_dtype[24];
    char device[64];
    char origin[256];      /* where the checkpoint came from, "" if not recorded */
    uint64_t weight_bytes; /* resident: linears as prepared, embeddings, norms, tables */
    uint64_t linear_bytes; /* the linears alone: what decoding one token reads */
    uint64_t weight_file_bytes, kv_bytes_per_token, kv_pool_bytes, workspace_bytes;
    uint64_t predicted_bytes, actual_bytes; /* weights and workspace */
    uint64_t predicted_weights;
    /* Of a GPU, else 0: free before anything was loaded, what the start has taken of it, and an
     * estimate of what graphs may come to take. */
    uint64_t device_free, device_taken, graph_bytes;
    int64_t kv_tokens, max_len, max_running, vocab, chunk;
    bool experts, windows; /* has the model layers of such? */
    double load_seconds;
    int threads;
    bool prefix_cache; /* off by option, or because the model's layers keep states */
    char cpu_features[128];
    char plans[256]; /* where those of a GPU's linears come from; "" = there are none to choose */
} engine_info;
void engine_get_info(const engine *en, engine_info *out);
/* Kernel report lines, human-readable; xmalloc. */
char *engine_report(const engine *en);

/* Operators timed one by one from on to off, where the device can (a GPU); slower steps. Only while
 * no request runs. lines: what was timed so far, most time first; xmalloc, returns how many. */
typedef struct engine_op_time {
    char op[24], shape[72];
    int64_t calls;
    double seconds, bytes, flops; /* bytes, flops: 0 = not known */
} engine_op_time;
int engine_profile(engine *en, bool on, err *e);
int engine_profile_lines(engine *en, engine_op_time **out);

typedef struct engine_stats { /* counters since start, and gauges */
    uint64_t prompt_tokens, cached_tokens, output_tokens, requests, finished_stop, finished_length,
        cancelled, failed, preemptions, steps, kv_clipped;
    int64_t running, waiting, kv_pages_used, kv_pages_total;
    double busy_seconds, forward_seconds; /* of steps; of it the model's part */
    uint64_t forwards;
    /* histograms: cumulative counts against engine_hist_bounds */
    uint64_t ttft[24], itl[24], e2e[24];
    double ttft_sum, itl_sum, e2e_sum;
} engine_stats;
void engine_get_stats(engine *en, engine_stats *out);
extern const double engine_ttft_bounds[23], engine_itl_bounds[23],
    engine_e2e_bounds[23]; /* last bucket +Inf; unused = INFINITY */
#endif
