/* A model directory: everything on disk that a model is. Opens a Hugging Face directory, a hub
 * cache name ("org/name" resolved in $HF_HUB_CACHE, $HF_HOME/hub, ~/.cache/huggingface/hub through
 * refs/main), a single .safetensors inside a directory with config.json, or a .gguf file. Nothing
 * is read but headers; tensor data stays mapped.
 *
 * A GGUF opens as if it were a Hugging Face directory: tensors carry HF names (model.layers.N.…),
 * config is filled from its metadata, q/k rows of llama are permuted back by ckpt_load_rows, and
 * tokenizer.json text is synthesized from tokenizer.ggml.* (ckpt_tokenizer_json). */
#ifndef CKPT_CKPT_H
#define CKPT_CKPT_H
#include "ckpt/config.h"
#include "ckpt/safetensors.h"

typedef struct ckpt ckpt;
typedef struct gguf_type gguf_type;

typedef struct ckpt_tensor {
    const char *name;      /* HF name */
    num_dtype dtype;       /* safetensors type, or NUM_F32/F16/BF16 for plain gguf types;
                              NUM_NONE for block-quantized gguf types: use ckpt_load_rows */
    const gguf_type *gguf; /* NULL unless block-quantized gguf */
    int n_dims;
    int64_t shape[ST_MAX_DIMS]; /* outermost first, HF order */
    uint64_t bytes;
    const uint8_t *data; /* mapped, maybe unaligned */
    const char *path;
    int permute_heads; /* gguf llama q/k: rows of each head interleaved; 0 = none */
} ckpt_tensor;

int ckpt_open(ckpt **out, const char *path_or_name, err *e);
/* The same for reading the config alone: where no weight file is, ckpt_has_weights is false and
 * there are no tensors, though there may be an index of their names. Takes ANY_config.json too, as
 * a config without weights, with ANY_hf_quant_config.json beside it. */
int ckpt_open_config(ckpt **out, const char *path_or_name, err *e);
/* A shape: the text of a config.json and no files at all. name stands for the path in messages. */
int ckpt_open_shape(ckpt **out, const char *name, const char *config, err *e);
bool ckpt_has_weights(const ckpt *c);
const json *ckpt_index(const ckpt *c); /* weight_map: tensor name → file; or NULL */
void ckpt_close(ckpt *c);              /* NULL is fine */
const char *ckpt_path(const ckpt *c);  /* resolved directory or file */
bool ckpt_is_gguf(const ckpt *c);
const char *ckpt_gguf_types(const ckpt *c); /* "Q4_1 169, F32 61"; "" when not gguf */
ckpt_config *ckpt_cfg(ckpt *c);
size_t ckpt_n_tensors(const ckpt *c);
const ckpt_tensor *ckpt_tensor_at(const ckpt *c, size_t i);
const ckpt_tensor *ckpt_find(const ckpt *c, const char *name); /* NULL if absent; hashed */
/* ERR_MISSING names tensor, file(s) searched and near names. */
int ckpt_need(const ckpt *c, const char *name, const ckpt_tensor **out, err *e);
/* A tensor as rows of its last dimension; one row where it has one dimension or none. */
void ckpt_rows_of(const ckpt_tensor *t, int64_t *rows, int64_t *cols);
/* Rows [r0,r1) of a tensor (ckpt_rows_of) decoded to fp32, gguf blocks and permutation undone.
 * Plain float and gguf types only. NaN/Inf is not checked here. */
int ckpt_load_rows(const ckpt *c, const ckpt_tensor *t, int64_t r0, int64_t r1, float *out, err *e);
/* Tells the kernel that this tensor's pages may be dropped. */
void ckpt_dontneed(const ckpt *c, const ckpt_tensor *t);
/* File in the directory, or NULL (xmalloc): "tokenizer.json", "chat_template.jinja" … */
char *ckpt_side_file(const ckpt *c, const char *name);
/* tokenizer.json text, or where there is none the bytes of a SentencePiece model, and
 * tokenizer_config.json text (from the directory or made from the gguf);
 * chat template text; *out empty when there is none. */
int ckpt_tokenizer_json(const ckpt *c, buf *out, err *e);
char *ckpt_tokenizer_where(const ckpt *c); /* the file that holds it, for messages; xmalloc */
int ckpt_tokenizer_config(const ckpt *c, buf *out, err *e);
int ckpt_chat_template(const ckpt *c, buf *out, err *e);
/* A model may have several templates, by name; requests with tools use "tool_use" if it is there.
 * As in transformers: chat_template.jinja and additional_chat_templates/NAME.jinja win over
 * tokenizer_config.json (a text, {name: text}, or a list of {name, template}), and that over
 * chat_template.json. Where no template is the default, one that refuses every request stands in.
 */
int ckpt_chat_template_named(const ckpt *c, const char *name, buf *out, err *e);
uint64_t ckpt_file_bytes(const ckpt *c); /* sum of weight files */
/* What tare recorded about where this checkpoint came from (tare_origin in config.json: e.g.
 * {"gguf_types": "Q4_1 …", "file": …}); NULL when nothing is recorded. */
const char *ckpt_origin(const ckpt *c);
void ckpt_origin_words(const ckpt *c, buf *out); /* the same for people; "" when unknown */

/* Writer of a model directory. Everything goes to OUT.tmp-<pid> and is renamed to OUT at commit,
 * so OUT exists whole or not at all. Shards are closed at max_shard_bytes (5e9 default, 0). */
typedef struct ckpt_writer ckpt_writer;
int ckpt_writer_open(ckpt_writer **out, const char *dir, uint64_t max_shard_bytes, bool overwrite,
                     err *e);
/* One tensor; data is copied to the shard file at once. */
int ckpt_writer_tensor(ckpt_writer *w, const char *name, num_dtype t, int n_dims,
                       const int64_t *shape, const void *data, err *e);
/* The same for data that is produced in pieces: begin, any number of data calls, end. */
int ckpt_writer_begin(ckpt_writer *w, const char *name, num_dtype t, int n_dims,
                      const int64_t *shape, err *e);
int ckpt_writer_data(ckpt_writer *w, const void *p, size_t n, err *e);
int ckpt_writer_file(ckpt_writer *w, const char *name, const void *data, size_t n, err *e);
/* Copies every side file and subfolder of src except weights, indexes, config.json, and
 * quantization files of other tools; for a GGUF, writes the tokenizer.json, tokenizer_config.json,
 * generation_config.json and chat_template.jinja made from it. Returns how many. */
int ckpt_writer_side_files(ckpt_writer *w, const ckpt *src, err *e);
const char *ckpt_writer_dir(const ckpt_writer *w); /* the temporary directory */
/* Writes model.safetensors or shards + model.safetensors.index.json, config (text), fsyncs. Leaves
 * the temporary directory in place so that it can be verified; publish renames it. */
int ckpt_writer_finish(ckpt_writer *w, const char *config_json, err *e);
int ckpt_writer_publish(ckpt_writer **w, err *e);
void ckpt_writer_abort(ckpt_writer **w); /* removes the temporary directory */
#endif
