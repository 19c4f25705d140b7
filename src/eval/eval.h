/* Measuring a model, and judging a candidate against its baseline, on the served path. */
#ifndef EVAL_EVAL_H
#define EVAL_EVAL_H
#include "engine/engine.h"

typedef struct eval_opts {
    const char *const *tasks;
    int n_tasks;            /* JSONL files */
    const char *task_type;  /* NULL = found from the fields */
    const char *perplexity; /* text file or NULL */
    int64_t window, stride; /* 2048, 2048 */
    const char *bos;        /* "auto" "yes" "no" */
    int64_t limit;          /* items per task, 0 = all: the first `limit` of an even spread */
    int64_t ppl_tokens;     /* tokens of the text, 0 = all */
    int64_t max_tokens;     /* generate/code: budget an answer, default 512 */
    const char *choice_by;  /* "letter" | "text" */
    bool items;             /* keep per-item records */
    const char *cache_dir;  /* baseline answers cached here; NULL = off */
    const char *labels;     /* classify: "positive,negative" default: found from data */
    double threshold;       /* classify: 0.5 */
    bool raw_prompt;        /* no chat template even if there is one */
} eval_opts;

typedef struct eval_item {
    bool correct, truncated, unparsed;
    double score; /* p(positive), loglikelihood margin … */
    char *answer; /* what was parsed */
} eval_item;
typedef struct eval_task_result {
    char name[128], type[16];
    int64_t n, n_correct, n_truncated, n_unparsed;
    double accuracy, chance; /* chance level, 0 when none */
    eval_item *items;
    char first_prompt[256];    /* what was asked, start */
    char note[256];            /* how it was asked and graded; limits of the sandbox */
    int64_t score_deciles[10]; /* classify: items with p(positive) in [0,.1) … [.9,1] */
} eval_task_result;
typedef struct eval_ppl {
    double perplexity, nll; /* per token */
    int64_t n_tokens, n_windows;
    int64_t window, stride;
    bool bos;
    int32_t first_ids[8];
} eval_ppl;

int eval_task_run(engine *en, const char *file, const eval_opts *o, eval_task_result *r, err *e);
void eval_task_free(eval_task_result *r);
int eval_perplexity(engine *en, const char *file, const eval_opts *o, eval_ppl *r, err *e);

typedef enum verdict {
    VERDICT_SAFE = 0,
    VERDICT_CONFIRM = 10,
    VERDICT_REJECT = 11,
    VERDICT_NOT_COMPARABLE = 12
} verdict;
const char *verdict_name(verdict v);

typedef struct compare_task {
    char name[128];
    int64_t n, flips, b, c; /* b right→wrong, c wrong→right */
    double baseline, candidate, delta_pp, ci95_pp[2], p_value;
    int64_t truncated_base, truncated_cand;
    int64_t items_to_settle; /* 0 = settled; -1 = no feasible number */
    verdict v;
    char reason[256];
    char type[16];
    double flip_rate;                   /* (b + c) / n */
    eval_item *base_items, *cand_items; /* [n_items], NULL unless eval_opts.items */
    int64_t n_items;
} compare_task;
typedef struct compare_result {
    verdict v;
    char **reasons;
    int n_reasons;
    compare_task *tasks;
    int n_tasks;
    bool has_ppl;
    eval_ppl ppl_base, ppl_cand;
    double kl_mean, kl_p50, kl_p90, kl_p99, kl_max, top1; /* over kl_tokens positions */
    int64_t kl_tokens;
    engine_info base, cand;
    double speed_base_ttft_ms, speed_base_tpot_ms, speed_cand_ttft_ms, speed_cand_tpot_ms;
    uint64_t kv_clipped;
    double pooled_ci95_pp[2]; /* all comparable items together */
    int64_t pooled_n;
    bool base_cached; /* every baseline answer came from the cache */
} compare_result;
/* Paired statistics on the same items: pure functions. */
double stats_mcnemar_p(int64_t b, int64_t c);
/* 95 % interval of the difference in pp (candidate - baseline) for n pairs: score-based (Tango). */
void stats_paired_ci(int64_t n, int64_t b, int64_t c, double out_pp[2]);
/* P(X >= k) for X binomial(n, p): is a baseline above chance? */
double stats_binomial_above_p(int64_t n, int64_t k, double p);
verdict stats_verdict(int64_t n, int64_t b, int64_t c, char reason[256], int64_t *items_to_settle);
int compare_run(const engine_opts *base, const engine_opts *cand, const eval_opts *o,
                compare_result *r, err *e);
void compare_json(const compare_result *r, jw *w);
void compare_print(const compare_result *r, buf *out); /* human table */
void compare_free(compare_result *r);
#endif
