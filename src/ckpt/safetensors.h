/* Safetensors, one file: 8-byte little-endian header length, JSON header, data.
 * Read: the file is mapped; every entry is checked before it is returned: header length <= file,
 * known dtype tag, shape without overflow, begin <= end <= data size, end - begin equal to the size
 * that shape and dtype demand, no overlap and no holes between tensors, names unique and UTF-8. */
#ifndef CKPT_SAFETENSORS_H
#define CKPT_SAFETENSORS_H
#include "base/file.h"
#include "base/json.h"
#include "num/num.h"

#define ST_MAX_DIMS   8
#define ST_MAX_HEADER (100u << 20)

typedef struct st_tensor {
    const char *name;
    num_dtype dtype;
    int n_dims;
    int64_t shape[ST_MAX_DIMS];
    uint64_t offset; /* in the file */
    uint64_t bytes;
    const uint8_t *data; /* in the map: may be unaligned, read with memcpy or unaligned loads */
    const char *path;    /* file it lies in */
} st_tensor;

typedef struct st_file {
    file_map map;
    arena *mem;
    st_tensor *tensors; /* sorted by offset */
    size_t n;
    char **meta; /* __metadata__: key, value, key, value … NULL */
} st_file;
int st_open(st_file *f, const char *path, err *e);
void st_close(st_file *f);

/* Writer: tensors are declared first (sizes known), then data is streamed in the same order. */
typedef struct st_writer st_writer;
int st_writer_open(st_writer **out, const char *path, err *e);
int st_writer_declare(st_writer *w, const char *name, num_dtype t, int n_dims, const int64_t *shape,
                      err *e);
int st_writer_begin(st_writer *w, err *e);                         /* writes the header */
int st_writer_data(st_writer *w, const void *p, size_t n, err *e); /* any split; total checked */
int st_writer_commit(st_writer **w, err *e);                       /* error if data is missing */
void st_writer_abort(st_writer **w);
#endif
