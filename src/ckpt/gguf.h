/* GGUF: read only, versions 2 and 3, little endian. Block types F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1
 * Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K. All sizes are checked without overflowing sums before use. */
#ifndef CKPT_GGUF_H
#define CKPT_GGUF_H
#include "base/file.h"
#include "num/num.h"

struct gguf_type {
    uint32_t id;
    const char *name;
    int block;       /* elements */
    int bytes;       /* per block */
    num_dtype plain; /* NUM_F32/F16/BF16, else NUM_NONE */
    void (*decode)(const uint8_t *blocks, size_t n_elements, float *out);
};
typedef struct gguf_type gguf_type;
extern const gguf_type gguf_types[];
extern const int gguf_n_types;
const gguf_type *gguf_type_by_id(uint32_t id);

typedef enum gguf_vtype {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STR,
    GGUF_ARR,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64
} gguf_vtype;
typedef struct gguf_str {
    const char *s;
    size_t n;
} gguf_str;
typedef struct gguf_kv {
    char *key;
    gguf_vtype type, elem; /* elem for arrays */
    uint64_t n;            /* array length */
    int64_t i;
    double f;
    gguf_str s;
    void *arr; /* int64_t[n], double[n] or gguf_str[n] by elem */
} gguf_kv;
typedef struct gguf_tensor {
    char *name;
    const gguf_type *type;
    int n_dims;
    int64_t ne[4];          /* ggml order: innermost first */
    uint64_t offset, bytes; /* in the file */
    const file_map *map;    /* of that file */
} gguf_tensor;
typedef struct gguf_file {
    file_map map;
    arena *mem;
    uint32_t version;
    uint64_t alignment, data_offset;
    gguf_kv *kv;
    size_t n_kv;
    gguf_tensor *tensors;
    size_t n_tensors;
    struct gguf_file *more; /* the other parts of a split model; the first has all tensors */
    int n_more;
} gguf_file;
int gguf_open(gguf_file *g, const char *path, err *e); /* one file; it must not move afterwards */
/* Any part of a split model opens the whole. */
int gguf_open_split(gguf_file *g, const char *path, err *e);
void gguf_close(gguf_file *g);
const gguf_kv *gguf_find(const gguf_file *g, const char *key);
/* As json_get_*: absent returns 0, present 1, wrong type is an error. */
int gguf_get_i64(const gguf_file *g, const char *key, int64_t *out, err *e);
int gguf_get_f64(const gguf_file *g, const char *key, double *out, err *e);
int gguf_get_str(const gguf_file *g, const char *key, gguf_str *out, err *e);
/* elem: GGUF_STR, GGUF_I64 (any integers) or GGUF_F64 (any floats). */
int gguf_get_arr(const gguf_file *g, const char *key, gguf_vtype elem, const gguf_kv **out, err *e);
#endif
