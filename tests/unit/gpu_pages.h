/* Pages of GPU_KV_MMA order for tests, from those that the twin has written. */
#ifndef TESTS_GPU_PAGES_H
#define TESTS_GPU_PAGES_H
#include <string.h>
#include "kern/cuda/kv_place.h"
#include "kern/ops.h"

/* Codes and scales of a token to their places; `to` is where its page starts. */
static inline void gpu_kv_turn(const kern_kv_layer *kv, int slot, uint8_t *to)
{
    const int D = kv->D, t = slot % KV_PLACE_TOKENS;
    const int bits = (int)(kern_kv_code_bytes(kv->type, D) * 8 / (size_t)D);
    const size_t bytes = (size_t)bits / 8, scale = kern_kv_scale_bytes(kv->type, D);
    for (int h = 0; h < kv->Hk; h++, to += kv_place_head(bits, (int)scale, D))
        for (int which = 0; which < 2; which++) {
            const uint8_t *code = kern__kv_code(kv, which, h, slot),
                          *scales = kern__kv_scale(kv, which, h, slot);
            for (int d = 0; d < D; d++) {
                if (bits == 4) {
                    size_t at = kv_fp4_place(D, which, t, d);
                    int shift = (int)(at % 2) * 4, v = code[d / 2] >> (4 * (d % 2)) & 15;
                    to[at / 2] = (uint8_t)((to[at / 2] & ~(15 << shift)) | v << shift);
                } else {
                    memcpy(to + kv_place((int)bytes, D, which, t, d) * bytes,
                           code + (size_t)d * bytes, bytes);
                }
            }
            for (size_t i = 0; i < scale; i++) /* int8: all of them follow the first */
                to[bits == 4 ? kv_place_scale(bits, D, which, t, (int)i)
                             : kv_place_scale(bits, D, which, t, 0) + i] = scales[i];
        }
}
#endif
