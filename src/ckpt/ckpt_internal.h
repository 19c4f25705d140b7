/* Private to ckpt: the opened checkpoint, filled by the directory loader or by the GGUF mapper. */
#ifndef CKPT_INTERNAL_H
#define CKPT_INTERNAL_H
#include "ckpt/ckpt.h"
#include "ckpt/gguf.h"

struct ckpt {
    char *path;   /* directory, or the .gguf file */
    char *prefix; /* of its files' names: "" but for a config opened by a name of its own */
    arena *mem;
    json *config_json, *gen_json, *index_json;
    ckpt_config cfg;
    bool cfg_ok;
    st_file *files;
    size_t n_files;
    ckpt_tensor *tensors;
    size_t n_tensors;
    uint32_t *hash; /* open addressing: index + 1 into tensors; 0 = free */
    size_t n_hash;  /* power of two */
    bool is_gguf;
    gguf_file gguf;
    char *gguf_text; /* "Q4_1 169, F32 61" */
    char *origin;
    uint64_t file_bytes;
};

int ckpt__index(ckpt *c, err *e); /* builds the hash; duplicate names are an error */
int ckpt__open_gguf(ckpt *c, const char *path, err *e);
int ckpt__gguf_tokenizer(const ckpt *c, buf *out, err *e);
int ckpt__gguf_tokenizer_config(const ckpt *c, buf *out, err *e);
int ckpt__gguf_template(const ckpt *c, buf *out, err *e);
int ckpt__gguf_generation_config(const ckpt *c, buf *out, err *e);
#endif
