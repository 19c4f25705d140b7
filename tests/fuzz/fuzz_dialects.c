/* Any quantization object over any tensors: refused with a message, or every row of every module
 * decodes.
 *
 *   input     JSON of quantization_config, newline, then records of one tensor each
 *   record    suffix (index into the parts of all dialects), type, number of dimensions, that many
 *             sizes of one byte, fill: 0 zeros, 255 noise, 254 the bytes that follow, else that
 *             byte repeated */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "quant/quant.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MODULE "model.layers.0.mlp.down_proj"

/* The committed inputs count on these places; suffixes of newer dialects follow. */
static const char *suffixes[128] = {".weight",
                                    ".weight_packed",
                                    ".weight_scale",
                                    ".weight_global_scale",
                                    ".weight_zero_point",
                                    ".weight_shape",
                                    ".weight_g_idx",
                                    ".input_scale",
                                    ".input_global_scale",
                                    ".input_zero_point",
                                    ".output_scale",
                                    ".qweight",
                                    ".qzeros",
                                    ".scales",
                                    ".g_idx",
                                    ".weight.absmax",
                                    ".weight.nested_absmax",
                                    ".weight.nested_quant_map",
                                    ".weight.quant_map",
                                    ".weight.quant_state.bitsandbytes__nf4",
                                    ".weight.quant_state.bitsandbytes__fp4",
                                    ".SCB",
                                    ".weight_format",
                                    "_blocks",
                                    "_scales",
                                    "",
                                    ".weight_scale_inv",
                                    ".weight_scale_2",
                                    ".activation_scale",
                                    ".pre_quant_scale",
                                    "_scale_inv",
                                    "_scale",
                                    "_scale_2",
                                    "_input_scale"};
static int n_suffixes;

static void collect(void)
{
    while (suffixes[n_suffixes])
        n_suffixes++;
    for (int d = 0; d < quant_n_dialects; d++)
        for (const quant_part *p = quant_dialects[d]->parts; p && p->suffix; p++) {
            bool have = n_suffixes == 128;
            for (int i = 0; i < n_suffixes; i++)
                have |= !strcmp(suffixes[i], p->suffix);
            if (!have) suffixes[n_suffixes++] = p->suffix;
        }
}

typedef struct image {
    buf head, body;
    bool used[128];
} image;

/* One record; returns the bytes that it took, 0 at the end. */
static size_t record(image *m, const uint8_t *p, size_t n)
{
    static const num_dtype types[] = {NUM_I32,     NUM_F16,     NUM_BF16, NUM_F32,
                                      NUM_U8,      NUM_I8,      NUM_I16,  NUM_F8_E4M3,
                                      NUM_F8_E8M0, NUM_F8_E5M2, NUM_I64};
    if (n < 4) return 0;
    int which = p[0] % n_suffixes, dims = p[2] % 5;
    num_dtype t = types[p[1] % (sizeof types / sizeof *types)];
    if (n < 4 + (size_t)dims) return 0;
    size_t count = 1;
    for (int i = 0; i < dims; i++)
        count *= p[3 + i];
    size_t bytes = count * (size_t)num_infos[t].bits / 8, from = m->body.len;
    uint8_t fill = p[3 + dims];
    size_t head = 4 + (size_t)dims, took = fill == 254 && bytes <= n - head ? head + bytes : head;
    if (bytes > 1 << 16 || m->used[which]) return took;
    m->used[which] = true;
    uint32_t noise = 12345;
    for (size_t i = 0; i < bytes; i++) {
        noise = noise * 1664525 + 1013904223;
        buf_putc(&m->body, (char)(took > head ? p[head + i] : fill == 255 ? noise >> 24 : fill));
    }
    buf_printf(&m->head, "%s\"" MODULE "%s\":{\"dtype\":\"%s\",\"shape\":[",
               m->head.len > 1 ? "," : "", suffixes[which], num_infos[t].tag);
    for (int i = 0; i < dims; i++)
        buf_printf(&m->head, "%s%d", i ? "," : "", p[3 + i]);
    buf_printf(&m->head, "],\"data_offsets\":[%zu,%zu]}", from, m->body.len);
    return took;
}

/* Without the flush of file_write_atomic, which would cost most of the time. */
static void put_file(const char *dir, const char *name, const buf *b)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(b->data, 1, b->len, f) != b->len || fclose(f)) abort();
}

static void write_model(const char *dir, const uint8_t *config, size_t n, const uint8_t *rest,
                        size_t left)
{
    image m = {0};
    buf json_text = {0}, file = {0};
    buf_puts(&json_text,
             "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"vocab_size\":32,"
             "\"hidden_size\":64,\"intermediate_size\":64,\"num_hidden_layers\":1,"
             "\"num_attention_heads\":2,\"quantization_config\":");
    buf_add(&json_text, config, n);
    buf_putc(&json_text, '}');
    buf_putc(&m.head, '{');
    for (size_t took; (took = record(&m, rest, left)) > 0; left -= took)
        rest += took;
    buf_putc(&m.head, '}');
    while (m.head.len % 8)
        buf_putc(&m.head, ' ');
    uint64_t head = m.head.len;
    buf_add(&file, &head, 8);
    buf_add(&file, m.head.data, m.head.len);
    buf_add(&file, m.body.data ? m.body.data : "", m.body.len);
    put_file(dir, "config.json", &json_text);
    put_file(dir, "model.safetensors", &file);
    buf_free(&m.head);
    buf_free(&m.body);
    buf_free(&json_text);
    buf_free(&file);
}

static void read_module(const quant_ckpt *q)
{
    err e = {0};
    quant_module d;
    qbytes b = {0};
    qtensor t;
    if (quant_has(q, MODULE)) {
        if (quant_describe(q, MODULE, &d, &e) < 0 && !e.msg[0]) abort();
        quant_module_bytes(q, MODULE, &b, NULL);
    }
    err_clear(&e);
    if (quant_load(q, MODULE, &t, &e) < 0) {
        if (!e.msg[0]) abort();
        return;
    }
    float *row = xmalloc((size_t)t.K * sizeof *row), sum = 0;
    for (int64_t r = 0; r < t.E * t.N; r++) {
        qtensor_decode_row(&t, r, row);
        sum += row[t.K - 1];
    }
    if (sum == 12345.678f) abort(); /* the rows are read */
    free(row);
    qtensor_free(&t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char dir[64];
    err e = {0};
    ckpt *c = NULL;
    quant_ckpt *q = NULL;
    const uint8_t *nl = memchr(data, '\n', size);
    if (!*dir) {
        strcpy(dir, "/tmp/tare_fuzz_XXXXXX");
        if (!mkdtemp(dir)) abort();
        collect();
    }
    if (!nl || size > 1 << 14) return 0;
    write_model(dir, data, (size_t)(nl - data), nl + 1, size - (size_t)(nl - data) - 1);
    if (ckpt_open(&c, dir, &e) == 0 && quant_open(&q, c, &e) == 0)
        read_module(q);
    else if (!e.msg[0])
        abort();
    quant_close(q);
    ckpt_close(c);
    return 0;
}
