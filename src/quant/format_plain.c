/* Unquantized checkpoints, Hugging Face directories and gguf alike.
 *
 * F32, F16 and BF16 tensors are borrowed from the map (copied only where the file leaves them
 * unaligned or where gguf interleaves the rows of q and k). Block types of gguf are decoded to
 * owned bf16: the block codes are not a dialect that kernels read. A config without quantization
 * object over quantized tensors is refused: codes read as weights would load cleanly and say
 * nonsense. */
#include <string.h>
#include "quant/quant_int.h"

static bool ends(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && !strcmp(s + n - m, tail);
}

static bool is_float(num_dtype t)
{
    return t == NUM_F32 || t == NUM_F16 || t == NUM_BF16;
}

int quant__plain_detect(quant_ckpt *q, err *e)
{
    static const char *const marks[] = {
        ".weight_packed",    ".qweight",        ".weight_scale",
        ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale",
        ".weight.absmax",    "_blocks",         ".SCB"};
    if (ckpt_is_gguf(q->c)) return 1;
    for (size_t i = 0; i < ckpt_n_tensors(q->c); i++) {
        const ckpt_tensor *t = ckpt_tensor_at(q->c, i);
        bool odd = ends(t->name, ".weight") && !is_float(t->dtype) && t->dtype != NUM_F64;
        for (size_t j = 0; j < sizeof marks / sizeof *marks; j++)
            odd |= ends(t->name, marks[j]);
        if (odd)
            return err_set(
                e, ERR_FORMAT,
                "%s: tensor '%s' belongs to a quantized model, but config.json has no "
                "quantization_config; restore the config that was written with these weights",
                t->path, t->name);
    }
    return 1;
}

/* gguf blocks become bf16; interleaved float rows keep their type. */
static int decode_owned(const quant_ckpt *q, const ckpt_tensor *t, int64_t N, int64_t K,
                        qtensor *out, err *e)
{
    int rc = 0;
    num_dtype to = t->dtype == NUM_NONE ? NUM_BF16 : t->dtype;
    size_t row = num_bytes(to, (size_t)K);
    void *p;
    float *tmp = NULL;
    TRY(quant__own(out, (size_t)N, row, &p, e));
    int64_t step = K >= 65536 ? 1 : 65536 / K;
    TRY(mem_alloc((void **)&tmp, (size_t)(step * K) * sizeof *tmp, e));
    for (int64_t r = 0; r < N; r += step) {
        int64_t end = r + step < N ? r + step : N;
        TRY(ckpt_load_rows(q->c, t, r, end, tmp, e));
        for (int64_t i = r; i < end; i++)
            num_encode_row(to, tmp + (i - r) * K, (size_t)K, (uint8_t *)p + (size_t)i * row);
    }
    out->codes = p;
    out->code = out->spec.w.type = to;
    out->row_bytes = row;
    rc = 0;
out:
    mem_free(tmp);
    return rc;
}

int quant__plain_load(const quant_ckpt *q, const char *module, qtensor *out, err *e)
{
    const ckpt_tensor *t;
    int rc = quant__named(q, module, "", false, &t, e); /* stacked experts have no ".weight" */
    if (rc >= 0 && !t) rc = quant__tensor(q, module, "weight", true, &t, e);
    if (rc < 0) return rc;
    if (t->n_dims != 2 && t->n_dims != 3)
        return err_set(e, ERR_SHAPE, "%s: tensor '%s' has %d dimensions; a linear has 2", t->path,
                       t->name, t->n_dims);
    int64_t E = t->n_dims == 3 ? t->shape[0] : 1;
    int64_t N = t->shape[t->n_dims - 2], K = t->shape[t->n_dims - 1];
    if (E < 1 || N < 1 || K < 1)
        return err_set(e, ERR_SHAPE, "%s: tensor '%s' is empty", t->path, t->name);
    if (t->dtype != NUM_NONE && !is_float(t->dtype))
        return err_set(e, ERR_DTYPE,
                       "%s: tensor '%s' is %s, and no scale says what its codes mean; expected "
                       "bf16, f16 or f32",
                       t->path, t->name, num_infos[t->dtype].name);
    qtensor_plain(out, t->dtype == NUM_NONE ? NUM_BF16 : t->dtype, N, K, t->data);
    out->E = E;
    out->spec.kv = q->kv;
    if (t->dtype == NUM_NONE || t->permute_heads) return decode_owned(q, t, E * N, K, out, e);
    size_t align = (size_t)num_infos[t->dtype].bits / 8;
    if ((uintptr_t)t->data % align) {
        void *p;
        rc = quant__own(out, (size_t)(E * N), out->row_bytes, &p, e);
        if (rc < 0) return rc;
        memcpy(p, t->data, (size_t)(E * N) * out->row_bytes);
        out->codes = p;
    }
    return 0;
}
