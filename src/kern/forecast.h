/* What a GPU will take for the linears of a model that is not loaded yet. Its layouts are asked as
 * at load, by shapes and types alone: one that finds out from the numbers that it does not hold
 * them, which is rare, is not foreseen. */
#ifndef KERN_FORECAST_H
#define KERN_FORECAST_H
#include "kern/kern.h"

#define KERN_FORECAST_LAYOUTS 3

typedef struct kern_forecast {
    struct {
        const char *name; /* NULL = no more */
        uint64_t bytes;
    } layout[KERN_FORECAST_LAYOUTS];
    int64_t dense_k, packed_k;          /* the widest inputs; 0 = no such linear */
    int64_t experts_k, plain_experts_k; /* the same of experts, packed and not */
    int E;
    bool copies;  /* inputs of experts are made anew */
    size_t piece; /* of a weight that cuBLASLt takes in pieces */
} kern_forecast;

typedef struct kern_forecast_shard {
    qspec spec;
    num_dtype plain; /* type of weights that are not quantized */
    int64_t N;
} kern_forecast_shard;

/* A linear [N,K] of n shards; E experts alike, 0 = none. layout: which one takes it. */
int kern_forecast_linear(kern_dev *d, kern_forecast *f, const kern_forecast_shard *s, int n,
                         int64_t K, kern_act act, int E, const char **layout, err *e);
/* Room for steps of so many rows (slots of experts) and inputs of up to K lanes, of kern_reserve.
 */
uint64_t kern_forecast_room(kern_dev *d, const kern_forecast *f, int64_t rows, int64_t K);
/* The same of kern_reserve_attention and kern_reserve_top. */
uint64_t kern_forecast_attention(kern_dev *d, int64_t rows, int H, int v_lanes);
uint64_t kern_forecast_top(int64_t rows, int64_t V);
/* An estimate of what a step of so many operators takes as a graph, with its staged arrays. */
uint64_t kern_forecast_graph(int64_t ops);
#endif
