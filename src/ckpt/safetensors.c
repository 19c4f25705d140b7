/* Safetensors, one file.
 *
 *   bytes 0..7      n, little endian: length of the header
 *   bytes 8..8+n    JSON object: name -> {dtype, shape, data_offsets [begin,end)}, and perhaps
 *                   "__metadata__", an object of strings
 *   bytes 8+n..     data; offsets count from here
 *
 * The reader trusts nothing: every number is checked without a sum that could wrap, and tensors
 * must cover the data without overlap or hole, as the reference library demands. The header is not
 * parsed when it is longer than the file or ST_MAX_HEADER. */
#include "ckpt/safetensors.h"
#include <stdlib.h>
#include <string.h>

static int refuse(err *e, int code, const char *path, const char *name, const char *what)
{
    return err_set(e, code, "%s: tensor '%.100s': %s", path, name, what);
}

static int parse_shape(const json *v, st_tensor *t, const char *path, err *e)
{
    if (!cJSON_IsArray(v)) return refuse(e, ERR_FORMAT, path, t->name, "shape is not an array");
    for (const json *d = v->child; d; d = d->next) {
        if (t->n_dims == ST_MAX_DIMS)
            return refuse(e, ERR_LIMIT, path, t->name, "more than 8 dimensions");
        if (!cJSON_IsNumber(d) || !(d->valuedouble >= 0) || d->valuedouble > 9007199254740992.0 ||
            d->valuedouble != (double)(int64_t)d->valuedouble)
            return err_set(
                e, ERR_SHAPE,
                "%s: tensor '%.100s': dimension %d is %g; expected a whole number from 0", path,
                t->name, t->n_dims, d->valuedouble);
        t->shape[t->n_dims++] = (int64_t)d->valuedouble;
    }
    return 0;
}

/* Bytes that dtype and shape demand; false on overflow. */
static bool demanded(const st_tensor *t, uint64_t *out)
{
    size_t n = 1;
    for (int i = 0; i < t->n_dims; i++)
        if (!mem_mul(n, (size_t)t->shape[i], &n)) return false;
    return mem_mul(n, (size_t)num_infos[t->dtype].bits / 8, out);
}

static int parse_offsets(const json *v, uint64_t data_size, uint64_t data_start, st_tensor *t,
                         const char *path, err *e)
{
    double b = -1, f = -1;
    if (cJSON_GetArraySize(v) == 2) {
        b = cJSON_IsNumber(v->child) ? v->child->valuedouble : -1;
        f = cJSON_IsNumber(v->child->next) ? v->child->next->valuedouble : -1;
    }
    if (!(b >= 0) || !(f >= b) || f > 9007199254740992.0 || b != (double)(uint64_t)b ||
        f != (double)(uint64_t)f)
        return refuse(e, ERR_FORMAT, path, t->name,
                      "data_offsets must be two whole numbers, begin <= end");
    if ((uint64_t)f > data_size)
        return err_set(e, ERR_FORMAT,
                       "%s: tensor '%.100s' ends at byte %.0f of %llu data bytes; the file is "
                       "truncated, fetch it again",
                       path, t->name, f, (unsigned long long)data_size);
    uint64_t want = 0;
    if (!demanded(t, &want)) return refuse(e, ERR_SHAPE, path, t->name, "shape is too large");
    t->bytes = (uint64_t)f - (uint64_t)b;
    if (t->bytes != want)
        return err_set(e, ERR_SHAPE,
                       "%s: tensor '%.100s': %llu bytes of data, but %s of this shape needs %llu",
                       path, t->name, (unsigned long long)t->bytes, num_infos[t->dtype].tag,
                       (unsigned long long)want);
    t->offset = data_start + (uint64_t)b;
    return 0;
}

static int parse_entry(st_file *f, const json *v, uint64_t data_start, st_tensor *t, err *e)
{
    const char *path = f->map.path, *tag = NULL;
    *t = (st_tensor){.name = arena_strdup(f->mem, v->string), .path = path};
    if (!cJSON_IsObject(v)) return refuse(e, ERR_FORMAT, path, t->name, "entry is not an object");
    int rc = json_get_str(v, "dtype", &tag, t->name, e);
    if (rc < 0) return err_wrap(e, "%s: tensor", path);
    if (!tag) return refuse(e, ERR_FORMAT, path, t->name, "no dtype");
    t->dtype = num_by_tag(tag, strlen(tag));
    if (t->dtype == NUM_NONE)
        return err_set(e, ERR_DTYPE, "%s: tensor '%.100s': unknown dtype '%.20s'", path, t->name,
                       tag);
    rc = parse_shape(json_get(v, "shape"), t, path, e);
    if (rc == 0)
        rc = parse_offsets(json_get(v, "data_offsets"), f->map.size - data_start, data_start, t,
                           path, e);
    return rc;
}

static int parse_meta(st_file *f, const json *v, err *e)
{
    int n = cJSON_GetArraySize(v), i = 0;
    f->meta = arena_alloc(f->mem, sizeof *f->meta * (2 * (size_t)n + 1));
    for (const json *m = v->child; m; m = m->next) {
        if (!cJSON_IsString(m))
            return err_set(e, ERR_FORMAT, "%s: __metadata__ must map strings to strings",
                           f->map.path);
        f->meta[i++] = arena_strdup(f->mem, m->string);
        f->meta[i++] = arena_strdup(f->mem, m->valuestring);
    }
    return 0;
}

static int by_offset(const void *pa, const void *pb)
{
    const st_tensor *a = pa, *b = pb;
    if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
    return a->bytes < b->bytes ? -1 : a->bytes > b->bytes; /* empty tensors first */
}

static int by_name(const void *pa, const void *pb)
{
    return strcmp(*(const char *const *)pa, *(const char *const *)pb);
}

static int check_unique(const st_file *f, err *e)
{
    const char **names = xmalloc(sizeof *names * (f->n + 1));
    int rc = 0;
    for (size_t i = 0; i < f->n; i++)
        names[i] = f->tensors[i].name;
    qsort(names, f->n, sizeof *names, by_name);
    for (size_t i = 1; rc == 0 && i < f->n; i++)
        if (!strcmp(names[i - 1], names[i]))
            rc = refuse(e, ERR_FORMAT, f->map.path, names[i], "is in the header twice");
    free(names);
    return rc;
}

static int check_cover(const st_file *f, uint64_t data_start, err *e)
{
    uint64_t at = data_start;
    for (size_t i = 0; i < f->n; i++) {
        const st_tensor *t = &f->tensors[i];
        if (t->offset < at)
            return refuse(e, ERR_FORMAT, f->map.path, t->name, "overlaps the tensor before it");
        if (t->offset > at)
            return refuse(e, ERR_FORMAT, f->map.path, t->name,
                          "unused bytes lie before it; the offsets are damaged");
        at += t->bytes;
    }
    if (at != f->map.size)
        return err_set(e, ERR_FORMAT, "%s: %llu bytes follow the last tensor", f->map.path,
                       (unsigned long long)(f->map.size - at));
    return 0;
}

static int parse_header(st_file *f, const json *root, uint64_t data_start, err *e)
{
    int rc = 0;
    if (!cJSON_IsObject(root))
        return err_set(e, ERR_FORMAT, "%s: the header is not a JSON object", f->map.path);
    f->tensors = arena_alloc(f->mem, sizeof *f->tensors * (size_t)(cJSON_GetArraySize(root) + 1));
    for (const json *v = root->child; v; v = v->next) {
        if (!strcmp(v->string, "__metadata__"))
            TRY(parse_meta(f, v, e));
        else
            TRY(parse_entry(f, v, data_start, &f->tensors[f->n++], e));
    }
    TRY(check_unique(f, e));
    qsort(f->tensors, f->n, sizeof *f->tensors, by_offset);
    TRY(check_cover(f, data_start, e));
    for (size_t i = 0; i < f->n; i++)
        f->tensors[i].data = f->map.data + f->tensors[i].offset;
out:
    return rc;
}

int st_open(st_file *f, const char *path, err *e)
{
    int rc = 0;
    json *root = NULL;
    uint64_t n = 0;
    *f = (st_file){.mem = arena_make()};
    TRY(file_map_open(&f->map, path, e));
    if (f->map.size < 8) {
        rc = err_set(e, ERR_FORMAT, "%s: %zu bytes is too short for a safetensors file", path,
                     f->map.size);
        goto out;
    }
    memcpy(&n, f->map.data, 8);
    if (n > f->map.size - 8 || n > ST_MAX_HEADER) {
        rc = err_set(e, ERR_FORMAT,
                     "%s: header of %llu bytes in a file of %zu bytes (at most %u allowed); not a "
                     "safetensors file, or truncated",
                     path, (unsigned long long)n, f->map.size, ST_MAX_HEADER);
        goto out;
    }
    TRY(json_parse(&root, (const char *)f->map.data + 8, (size_t)n, path, e));
    TRY(parse_header(f, root, 8 + n, e));
out:
    json_drop(root);
    if (rc < 0) st_close(f);
    return rc;
}

void st_close(st_file *f)
{
    file_map_close(&f->map);
    arena_drop(f->mem);
    *f = (st_file){0};
}

/* ---- writer -------------------------------------------------------------------------------------
 */

struct st_writer {
    file_out *out;
    buf header;
    jw w;
    char *path;
    uint64_t declared, written;
    bool begun;
};

int st_writer_open(st_writer **out, const char *path, err *e)
{
    st_writer *w = xcalloc(1, sizeof *w);
    int rc = file_out_open(&w->out, path, e);
    if (rc < 0) {
        free(w);
        *out = NULL;
        return rc;
    }
    w->path = xstrdup(path);
    jw_init(&w->w, &w->header, 0);
    jw_obj(&w->w);
    jw_key(&w->w, "__metadata__");
    jw_obj(&w->w);
    jw_kstr(&w->w, "format", "pt");
    jw_end_obj(&w->w);
    *out = w;
    return 0;
}

int st_writer_declare(st_writer *w, const char *name, num_dtype t, int n_dims, const int64_t *shape,
                      err *e)
{
    st_tensor tmp = {.name = name, .dtype = t, .n_dims = n_dims};
    uint64_t bytes;
    if (n_dims < 0 || n_dims > ST_MAX_DIMS)
        return refuse(e, ERR_LIMIT, w->path, name, "more than 8 dimensions");
    for (int i = 0; i < n_dims; i++)
        if (shape[i] < 0) return refuse(e, ERR_SHAPE, w->path, name, "a dimension is negative");
    if (!*num_infos[t].tag)
        return err_set(e, ERR_DTYPE, "%s: tensor '%s': %s has no safetensors type", w->path, name,
                       num_infos[t].name);
    memcpy(tmp.shape, shape, sizeof *shape * (size_t)n_dims);
    if (!demanded(&tmp, &bytes)) return refuse(e, ERR_SHAPE, w->path, name, "shape is too large");
    jw_key(&w->w, name);
    jw_obj(&w->w);
    jw_kstr(&w->w, "dtype", num_infos[t].tag);
    jw_key(&w->w, "shape");
    jw_arr(&w->w);
    for (int i = 0; i < n_dims; i++)
        jw_i64(&w->w, shape[i]);
    jw_end_arr(&w->w);
    jw_key(&w->w, "data_offsets");
    jw_arr(&w->w);
    jw_i64(&w->w, (int64_t)w->declared);
    jw_i64(&w->w, (int64_t)(w->declared + bytes));
    jw_end_arr(&w->w);
    jw_end_obj(&w->w);
    w->declared += bytes;
    return 0;
}

int st_writer_begin(st_writer *w, err *e)
{
    jw_end_obj(&w->w);
    while (w->header.len % 8)
        buf_putc(&w->header, ' '); /* data begins on 8 bytes, as the reference writer does */
    uint64_t n = w->header.len;
    int rc = file_out_write(w->out, &n, 8, e);
    if (rc == 0) rc = file_out_write(w->out, w->header.data, w->header.len, e);
    w->begun = true;
    return rc;
}

int st_writer_data(st_writer *w, const void *p, size_t n, err *e)
{
    if (!w->begun || n > w->declared - w->written)
        return err_set(e, ERR_BADSTATE, "%s: more data than was declared", w->path);
    w->written += n;
    return file_out_write(w->out, p, n, e);
}

int st_writer_commit(st_writer **wp, err *e)
{
    st_writer *w = *wp;
    int rc = 0;
    if (!w->begun) rc = st_writer_begin(w, e);
    if (rc == 0 && w->written != w->declared)
        rc = err_set(e, ERR_BADSTATE, "%s: %llu of %llu bytes were written", w->path,
                     (unsigned long long)w->written, (unsigned long long)w->declared);
    if (rc == 0) rc = file_out_commit(&w->out, e);
    st_writer_abort(wp);
    return rc;
}

void st_writer_abort(st_writer **wp)
{
    st_writer *w = *wp;
    if (!w) return;
    file_out_abort(&w->out);
    buf_free(&w->header);
    free(w->path);
    free(w);
    *wp = NULL;
}
