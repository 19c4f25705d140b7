/* Private to engine: a request's life, the engine, and what its files share. All fields of a
 * request but `cancel` belong to the engine thread once it has been taken from the inbox. */
#ifndef ENGINE_INTERNAL_H
#define ENGINE_INTERNAL_H
#include <pthread.h>
#include "engine/engine.h"
#include "model/model.h"

typedef struct request {
    struct request *next; /* inbox or waiting queue */
    uint64_t id;
    req_params p; /* arrays are this request's own copies */
    int32_t *ids; /* prompt, then what was generated */
    int64_t n_ids, cap_ids, n_prompt;
    int64_t computed;          /* tokens whose K and V are in the cache */
    int64_t prompt_seen;       /* prompt rows whose logits have been reported */
    int64_t rope_key;          /* rotary table of what is in the cache: model_rope_key */
    int32_t *pages[KV_GROUPS]; /* page tables (pages.c) */
    int n_pages, cap_pages;    /* positions that have pages; room for positions */
    int gone;                  /* window pages before this position were given back */
    int32_t state;             /* slot of its linear-attention state while it runs */
    int64_t cached;            /* prompt tokens found in the prefix cache */
    uint64_t seed;
    int32_t *counts; /* [vocab] occurrences in the output, when a penalty asks for it */
    uint8_t *seen;   /* [vocab] occurs in prompt or output (repetition penalty) */
    detok d;
    buf text;    /* generated text so far */
    size_t sent; /* of it already handed out */
    bool started, inserted;
    bool cancel;
    double t_submit, t_start, t_first, t_last;
    /* this step */
    int32_t row0, n_rows;
    int64_t logit0, n_logits; /* its rows in the logits buffer */
} request;

struct engine {
    ckpt *c;
    quant_ckpt *q;
    kern_dev *dev;
    model *m;
    kv_pool *pool;
    kv_radix *radix;
    tokenizer *tok;
    chat_template *chat;
    engine_opts o;
    engine_info info;
    int32_t eos[64];
    int n_eos;
    int64_t vocab, max_len, chunk, max_logit_rows;
    int max_running, page_tokens;
    kv_sizes kv;
    bool prefix_cache;

    pthread_t thread;
    bool thread_up;
    pthread_mutex_t lock; /* guards inbox, n_queued, stop, stats */
    pthread_cond_t wake;
    request *inbox, *inbox_last;
    int64_t n_queued;  /* inbox and waiting */
    uint64_t *cancels; /* ids to cancel, taken by the engine thread */
    size_t n_cancels, cap_cancels;
    bool refuse, stop;
    double drain_until;
    uint64_t next_id;
    engine_stats stats;

    /* engine thread only */
    request *waiting, *waiting_last;
    request **running;
    int n_running;
    float *logits;
    kern_top *tops; /* [max_logit_rows] on a device whose memory is not the program's, else NULL */
    bool by_tops;   /* this step's rows are in tops, not in logits */
    int32_t *ids, *pos, *slot[KV_GROUPS], *logit_rows;
    kern_seq *seqs[KV_GROUPS];
    int32_t *rope_len, *state;           /* [max_running] of the step */
    int32_t *free_states, n_free_states; /* state slots that no running request has */
    float *work;                         /* [vocab] sampler scratch */
    int32_t *order;                      /* [vocab] */
    token_logprob *lp;                   /* [chunk] */
    request **step;                      /* requests of this step */
    int n_step;
};

/* sampler.c */
int engine__sample(engine *en, request *r, const float *logits, int32_t *token, err *e);
/* Is the best of a row all that sampling r looks at? Then these give the token and the logprobs
 * that the others give. */
bool engine__best_suffices(const engine *en, const request *r);
int engine__sample_best(const request *r, const kern_top *t, int32_t *token, err *e);
void engine__logprob_best(const kern_top *t, int32_t id, int n_top, token_logprob *out);
double engine__lse(const float *logits, int64_t n, err *e, int *rc);
void engine__logprob(const float *logits, int64_t V, double lse, int32_t id, int n_top,
                     token_logprob *out);
double engine__uniform(uint64_t seed, uint64_t choice, uint64_t position);
/* request.c */
request *engine__request_make(engine *en, const req_params *p);
void engine__request_free(request *r);
void engine__emit_prompt(engine *en, request *r, const float *logits);
/* Takes a sampled token into the request: text, stop rules, events. Returns true when it ended. */
bool engine__take_token(engine *en, request *r, int32_t token, const token_logprob *lp);
void engine__finish(engine *en, request *r, finish_reason why, int32_t stop_id,
                    const char *stop_text, const err *e);
bool engine__is_eos(const engine *en, int32_t id);
/* pages.c */
void engine__pages_release(engine *en, request *r);
/* Gives the prefix cache what is computed, if it may be shared: before the pages are released; and
 * early, while the request goes on. */
void engine__pages_share(engine *en, const request *r);
void engine__pages_share_early(engine *en, const request *r);
/* Does it compute its whole prompt, whatever is cached? */
bool engine__whole_prompt(const request *r);
/* Pages of the longest cached prefix; sets computed. */
void engine__pages_match(engine *en, request *r);
/* Gives back the window pages that what comes next does not see. */
void engine__pages_pass(engine *en, request *r);
/* Pages for the first `tokens` tokens; 0, or how many were lacking after eviction (none taken). */
int64_t engine__pages_take(engine *en, request *r, int64_t tokens);
/* Is there room for one more beside the running ones: what these have yet to take for the tokens
 * that they have, and a page to grow into for each whose last token lies beyond these? */
bool engine__pages_room(const engine *en, const request *newcomer);
/* The same of a request whose prompt counts as computed but for its last token. */
bool engine__pages_assume(engine *en, request *r);
/* measure.c: random K and V in all pages of the pool. */
int engine__fill_cache(engine *en, err *e);
/* sched.c */
void *engine__loop(void *arg);
#endif
