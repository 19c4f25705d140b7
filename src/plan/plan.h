/* Pure arithmetic: what a model needs in memory under a scheme, before anything is loaded. */
#ifndef PLAN_PLAN_H
#define PLAN_PLAN_H
#include "ckpt/ckpt.h"
#include "kern/forecast.h"
#include "kv/kv.h"
#include "model/arch.h"
#include "quant/quant.h"

typedef struct plan_in {
    const ckpt_config *cfg;
    const quant_ckpt *q; /* exact bytes of what is stored; NULL = by config only */
    const qspec *scheme; /* NULL = as stored */
    kern_kv_type kv;
    kern_act act;
    kern_dev *dev; /* a GPU, whose layouts are asked; NULL, or a CPU: one of such features */
    uint32_t features;
    int threads;
    int ranks; /* devices that run it together; 0 = 1. All but `weights` is then that of the first,
                  which has the most */
    int64_t context, concurrency, chunk_tokens;
    int page_tokens;
} plan_in;
typedef struct plan_out {
    qbytes weights;                     /* bytes on disk by kind */
    uint64_t resident_weights;          /* prepared for this machine + embeddings, norms */
    uint64_t kv_token, kv_scales_token; /* a token in all layers; of it scales */
    uint64_t kv_total;  /* pages of context x concurrency, window layers as far as they keep them */
    uint64_t kv_states; /* of it states of linear-attention layers */
    uint64_t workspace;
    uint64_t total;
    kern_forecast gpu; /* of a GPU: its linears by layout */
    uint64_t graphs;   /* of a GPU, not in total: estimate of all that may come to be */
    uint64_t pinned;   /* of a GPU, not in total: memory of the machine */
    char refused[256]; /* why the scheme cannot be used for this model; "" = can */
} plan_out;
/* Rows of the logits buffer of an engine: as many as a step may report, within PLAN_LOGIT_BYTES. */
#define PLAN_LOGIT_BYTES ((int64_t)64 << 20)
int64_t plan_logit_rows(int64_t vocab, int64_t chunk_tokens, int64_t concurrency);
int plan_compute(const plan_in *in, plan_out *out, err *e);
#endif
