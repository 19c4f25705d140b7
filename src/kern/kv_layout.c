/* Addresses and sizes of the KV page layout (kern.h) and its decoding to f32, which is also what
 * the attention twin, dumps and the disk copy read. Heads and tokens are never padded: any D works.
 */
#include <string.h>
#include "kern/ops.h"

size_t kern_kv_code_bytes(kern_kv_type t, int D)
{
    if (t == KV_F32) return 4 * (size_t)D;
    return t == KV_BF16 ? 2 * (size_t)D : t == KV_FP4 ? ((size_t)D + 1) / 2 : (size_t)D;
}

size_t kern_kv_scale_bytes(kern_kv_type t, int D)
{
    return t == KV_INT8 ? 2 * sizeof(float) : t == KV_FP4 ? ((size_t)D + 15) / 16 : 0;
}

static size_t plane_bytes(kern_kv_type t, int Hk, int D, int page_tokens)
{
    return (size_t)Hk * (size_t)page_tokens *
           (kern_kv_code_bytes(t, D) + kern_kv_scale_bytes(t, D));
}

size_t kern_kv_page_bytes(kern_kv_type t, int Hk, int D, int v_in_k, int page_tokens)
{
    return (v_in_k ? 1 : 2) * plane_bytes(t, Hk, D, page_tokens);
}

static uint8_t *plane(const kern_kv_layer *kv, int which, int64_t slot)
{
    return kv->base + (size_t)(slot / kv->page_tokens) * kv->page_stride +
           (which ? plane_bytes(kv->type, kv->Hk, kv->D, kv->page_tokens) : 0);
}

uint8_t *kern__kv_code(const kern_kv_layer *kv, int which, int head, int64_t slot)
{
    size_t token = (size_t)head * (size_t)kv->page_tokens + (size_t)(slot % kv->page_tokens);
    return plane(kv, which, slot) + token * kern_kv_code_bytes(kv->type, kv->D);
}

uint8_t *kern__kv_scale(const kern_kv_layer *kv, int which, int head, int64_t slot)
{
    size_t token = (size_t)head * (size_t)kv->page_tokens + (size_t)(slot % kv->page_tokens);
    size_t codes = (size_t)kv->Hk * (size_t)kv->page_tokens * kern_kv_code_bytes(kv->type, kv->D);
    return plane(kv, which, slot) + codes + token * kern_kv_scale_bytes(kv->type, kv->D);
}

int kern__v_lanes(const kern_kv_layer *kv)
{
    return kv->v_in_k ? kv->v_in_k : kv->D;
}

void kern__kv_decode(const kern_kv_layer *kv, int which, int head, int64_t slot, float *out)
{
    int D = which ? kern__v_lanes(kv) : kv->D;
    if (kv->v_in_k) which = 0; /* the values are lanes of the keys */
    const uint8_t *code = kern__kv_code(kv, which, head, slot),
                  *scale = kern__kv_scale(kv, which, head, slot);
    const float *scales = which ? kv->v_scale : kv->k_scale;
    float pair[2], s = scales ? scales[head] : 1.0f;
    switch (kv->type) {
    case KV_FP8_E4M3:
    case KV_FP8_E5M2: {
        num_dtype t = kv->type == KV_FP8_E4M3 ? NUM_F8_E4M3 : NUM_F8_E5M2;
        for (int i = 0; i < D; i++)
            out[i] = num_decode(t, code[i]) * s;
        break;
    }
    case KV_F32:
        memcpy(out, code, sizeof(float) * (size_t)D);
        break;
    case KV_INT8:
        memcpy(pair, scale, sizeof pair);
        for (int i = 0; i < D; i++)
            out[i] = (float)code[i] * pair[0] + pair[1];
        break;
    case KV_FP4:
        for (int i = 0; i < D; i++) {
            uint8_t e = scale[i / 16];
            float v = num_fp4_table[(code[i / 2] >> (4 * (i & 1))) & 15];
            out[i] = e ? v * num_decode(NUM_F8_E8M0, e) : v * 0.0f;
        }
        break;
    default:
        for (int i = 0; i < D; i++) {
            uint16_t h;
            memcpy(&h, code + 2 * i, 2);
            out[i] = num_bf16_to_f32(h);
        }
    }
}

void kern_kv_read(const kern_kv_layer *kv, int which, int head, const int32_t *pages, int64_t tok0,
                  int64_t n, float *out)
{
    for (int64_t t = 0; t < n; t++) {
        int64_t tok = tok0 + t;
        int64_t slot =
            (int64_t)pages[tok / kv->page_tokens] * kv->page_tokens + tok % kv->page_tokens;
        kern__kv_decode(kv, which, head, slot, out + t * (which ? kern__v_lanes(kv) : kv->D));
    }
}
