/* Shared between the files of eval and by nobody else: requests in the air, prompts, task types,
 * windows of a text, the baseline cache. */
#ifndef EVAL_LOCAL_H
#define EVAL_LOCAL_H
#include <pthread.h>
#include "eval/eval.h"

/* ---- air.c: several requests in flight, results independent of their order ---------------------
 */
typedef struct shot {
    ids prompt;
    bool score; /* sum the log-likelihood of prompt positions >= n_context */
    int64_t n_context;
    ids alts; /* instead: the log-likelihood of each of these as the next token */
    double *alt_logprob;
    int64_t max_tokens; /* of a generated answer (score: 0) */
    const char *const *stops;
    int n_stops;
    const int32_t *stop_ids;
    int n_stop_ids;
    int64_t owner, part; /* for the caller */
    /* filled in */
    double logprob;
    int64_t n_scored;
    buf text;
    finish_reason reason;
    err error;
    int64_t next_pos;
    struct air *air;
    struct shot *next;
} shot;
typedef struct air {
    engine *en;
    pthread_mutex_t lock;
    pthread_cond_t landed;
    shot *head, *tail;
    int64_t flying, most;
} air;
void eval__air_init(air *a, engine *en);
void eval__air_free(air *a); /* cancels and waits for what still flies */
/* 1 = submitted, 0 = no room now (wait for one to land), < 0 = refused. */
int eval__air_submit(air *a, shot *s, err *e);
shot *eval__air_wait(air *a); /* NULL when nothing flies */
void eval__shot_free(shot *s);

struct task_item;

/* ---- prompt.c: how a question is put, and where context ends ------------------------------------
 */
typedef struct asker {
    engine *en;
    const tokenizer *tok;
    bool chat; /* through the model's template */
    bool bos;  /* plain prompts begin with BOS */
    int64_t max_len;
    int32_t stop_ids[16];
    int n_stop_ids;
} asker;
int eval__asker_init(asker *a, engine *en, const eval_opts *o, err *e);
int eval__bos(const tokenizer *t, const char *mode, bool *bos, err *e);
/* A context as text, with the ids that stand before it (BOS of a plain prompt or of the template).
 */
typedef struct context {
    buf text;
    ids front;
} context;
int eval__context(const asker *a, const char *user, const char *plain, context *out, err *e);
void eval__context_free(context *c);
int eval__context_ids(const asker *a, const context *c, ids *out, err *e);
/* Context + continuation as ids; out->n_context tokens are context. where: "file:line". */
int eval__pair(const asker *a, const context *c, const char *continuation, const char *where,
               shot *out, err *e);
/* Shots of one item for n continuations of one context: n scored pairs, or, where every
 * continuation is one token after the same context, a single pass whose last row scores them all.
 */
int eval__options(const asker *a, const context *c, const char *const *continuations, int n,
                  const char *where, struct task_item *it, err *e);
double eval__option_logprob(const struct task_item *it, int k);
/* " " or "": a label follows the context after a space unless the context ends in white space. */
const char *eval__label_gap(const context *c);

/* ---- tasks.c: the registry
 * ------------------------------------------------------------------------ */
#define TASK_MAX_CHOICES 26
typedef struct task_item {
    json *j;
    int64_t line;
    shot *shots;
    int n_shots, n_left, n_options;
    eval_item out;
} task_item;
typedef struct task_run {
    const char *file;
    const eval_opts *o;
    asker ask;
    task_item *items;
    task_item *left_out; /* what --limit left out: classify finds its labels in the whole file */
    int64_t n_left_out;
    int64_t n;
    arena *mem;
    const char *labels[2]; /* classify: positive, negative */
    double chance;
    struct sandbox *box; /* code */
    char note[256];
} task_run;
typedef struct task_type {
    const char *name, *fields;
    bool (*detect)(const json *item);
    int (*check)(const task_run *r, const json *item, const char *where, err *e);
    int (*begin)(task_run *r, err *e); /* after reading; may be NULL */
    int (*ask)(task_run *r, task_item *it, const char *where, err *e);
    int (*grade)(task_run *r, task_item *it, err *e);
} task_type;
extern const task_type *const eval__tasks[];
extern const int eval__n_tasks;
extern const task_type eval__generate, eval__choice, eval__code, eval__classify;
/* Reads, checks and (with --limit) thins the items of a file. */
int eval__load_items(task_run *r, const task_type **type, err *e);
void eval__free_items(task_run *r);
shot *eval__item_shots(task_item *it, int n);
bool eval__has(const json *item, const char *key);
int eval__need_str(const json *item, const char *key, const char **out, const char *where, err *e);

/* ---- perplexity.c: windows
 * -------------------------------------------------------------------------- */
typedef struct ppl_text {
    ids text;
    int64_t window, stride; /* window: prompt tokens, BOS included; stride: text tokens */
    bool bos;
    int32_t bos_id;
} ppl_text;
typedef struct ppl_window {
    int64_t begin, end; /* text tokens */
    int64_t from;       /* first prompt position that is scored */
} ppl_window;
int eval__ppl_open(ppl_text *t, const tokenizer *tok, int64_t max_len, const char *file,
                   const eval_opts *o, err *e);
void eval__ppl_free(ppl_text *t);
bool eval__ppl_next(const ppl_text *t, ppl_window *w); /* *w zeroed before the first call */
void eval__ppl_prompt(const ppl_text *t, const ppl_window *w, ids *out);
void eval__ppl_head(const ppl_text *t, eval_ppl *r); /* window, stride, bos, first ids */

/* ---- kl.c
 * ------------------------------------------------------------------------------------------------
 */
int eval__kl(engine *base, engine *cand, const char *file, const eval_opts *o, compare_result *r,
             err *e);

/* ---- speed.c ---- */
int eval__speed(engine *en, double *ttft_ms, double *tpot_ms, err *e);

/* ---- cache.c: the baseline's answers on disk
 * --------------------------------------------------------------- */
typedef struct cache_key {
    char hex[65];
} cache_key;
/* Everything that the answers of `file` (NULL: speed and memory) depend on. */
int eval__cache_key(const engine_opts *eo, const eval_opts *o, const char *file, cache_key *k,
                    err *e);
bool eval__cache_get_task(const char *dir, const cache_key *k, eval_task_result *r);
void eval__cache_put_task(const char *dir, const cache_key *k, const eval_task_result *r);
typedef struct base_facts {
    engine_info info;
    double ttft_ms, tpot_ms;
    char tokenizer[65]; /* fingerprint */
} base_facts;
bool eval__cache_get_facts(const char *dir, const cache_key *k, base_facts *f);
void eval__cache_put_facts(const char *dir, const cache_key *k, const base_facts *f);
void eval__tokenizer_print(const tokenizer *t,
                           char hex[65]); /* fingerprint of vocabulary and behaviour */
#endif
