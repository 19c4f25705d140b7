/* Private to model: the loaded model and what its files share. */
#ifndef MODEL_INTERNAL_H
#define MODEL_INTERNAL_H
#include "model/model.h"

typedef struct model_layer {
    float *norm1, *norm2, *q_norm,
        *k_norm; /* [hidden], [hidden], [D], [D]; the last two may be NULL */
    kern_linear *qkv, *o, *gate_up, *down;
} model_layer;

struct model {
    const ckpt_config *cfg;
    quant_ckpt *q;
    kern_dev *dev;
    model_opts opts;
    arena *mem;
    int n_layers;
    model_layer *layers;
    qtensor embed;
    float *final_norm;
    kern_linear *lm_head;
    kv_layer_shape *kv_shapes;
    const float **k_scales, **v_scales;
    kern_glu glu;
    /* one step's activations, [max_rows, …]; logit_x holds gathered rows */
    float *x, *h, *qkv, *attn, *y, *gu, *act, *cosv, *sinv, *inv, *logit_x;
    int64_t rot_half;
    double rope_attention;
    bool rope_by_length;
    model_tap_fn *tap;
    void *tap_arg;
    uint64_t kv_clipped;
    model_bytes bytes;
    model_report_line *report;
    int n_report;
    qspec spec;
    qspec online; /* of opts.quantize */
    bool has_online;
};

int64_t model__rot_dim(const ckpt_config *c);
double model__rope_attention(const ckpt_config *c);
void model__rope_inv(const ckpt_config *c, int64_t seq_len, float *inv);
void model__rope_fill(const float *inv, int64_t half, double attention, int64_t pos, float *cosv,
                      float *sinv);
/* Adds a line of the load report, or raises the count of an equal one. */
void model__report_add(model *m, const char *what, const qspec *s, const kern_linear *l);
#endif
