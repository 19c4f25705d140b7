/* KV formats (registry). The bytes themselves are laid out by kern (kern.h). */
#include "kv/kv.h"
#include <string.h>

const kv_format kv_formats[] = {
    {"bf16", "bfloat16 16", KV_BF16, "bfloat16, no scale"},
    {"fp8_e4m3", "fp8", KV_FP8_E4M3,
     "E4M3, one static scale a head or tensor; values above 448 x scale are clipped and counted"},
    {"fp8_e5m2", "", KV_FP8_E5M2, "E5M2, wide range and 2 mantissa bits, scale 1"},
    {"int8", "int8_per_token_head", KV_INT8, "8 bits, scale and minimum of each token and head"},
    {"fp4", "fp4_mx_block16 fp4_e2m1", KV_FP4, "E2M1 with a power-of-two scale on 16 values"},
    {"f32", "float32", KV_F32, "nothing rounded: for comparing with other engines"},
};
const int kv_n_formats = sizeof kv_formats / sizeof *kv_formats;

static bool listed(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *p = list; *p;) {
        size_t k = strcspn(p, " ");
        if (k == n && !memcmp(p, name, n)) return true;
        p += k;
        while (*p == ' ')
            p++;
    }
    return false;
}

int kv_format_parse(const char *text, const kv_format **out, err *e)
{
    buf names = {0};
    for (int i = 0; i < kv_n_formats; i++)
        if (!strcmp(kv_formats[i].name, text) || listed(kv_formats[i].aliases, text)) {
            *out = &kv_formats[i];
            return 0;
        }
    for (int i = 0; i < kv_n_formats; i++)
        buf_printf(&names, ", %s", kv_formats[i].name);
    int rc =
        err_set(e, ERR_USAGE, "--kv-cache-dtype: '%.40s' is not one of auto%s", text, names.data);
    buf_free(&names);
    return rc;
}
