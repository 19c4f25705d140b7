/* GGUF file: header, key-value pairs, tensor table, data.
 *
 *   "GGUF" version:u32 n_tensors:u64 n_kv:u64
 *   n_kv times       key:string type:u32 value
 *   n_tensors times  name:string n_dims:u32 ne:u64[n_dims] type:u32 offset:u64
 *   padding to general.alignment (32 when absent), then data; offsets count from there
 *
 * A string is a u64 length and bytes; an array is element type, u64 count, elements. Everything is
 * read through a cursor that compares against what is left (`left < n`), never a sum that could
 * wrap. Before gguf_open returns, every tensor is known to lie inside the file, on the alignment,
 * and apart from its neighbours. Refused: versions other than 2 and 3, big-endian files, arrays of
 * arrays, unknown types, and files that are several GGUF joined together. */
#include "ckpt/gguf.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"

enum {
    MAX_NAME = 1024,     /* bytes of a key or a tensor name */
    MAX_ARRAY = 1 << 24, /* elements of an array value */
    MAX_ALIGNMENT = 1 << 24,
};

typedef struct cursor {
    gguf_file *g;
    const uint8_t *p, *end;
    const char *what; /* key or tensor being read, for messages */
    err *e;
} cursor;

static int truncated(const cursor *c)
{
    char name[104] = "the header";
    if (c->what) snprintf(name, sizeof name, "'%.100s'", c->what);
    return err_set(
        c->e, ERR_FORMAT,
        "%s: the file ends inside %s at byte %zu of %zu; it is truncated, fetch it again",
        c->g->map.path, name, (size_t)(c->p - c->g->map.data), c->g->map.size);
}

static int take(cursor *c, void *out, size_t n)
{
    if ((size_t)(c->end - c->p) < n) return truncated(c);
    memcpy(out, c->p, n);
    c->p += n;
    return 0;
}

static int take_u32(cursor *c, uint32_t *v)
{
    return take(c, v, 4);
}

static int take_u64(cursor *c, uint64_t *v)
{
    return take(c, v, 8);
}

static int take_str(cursor *c, gguf_str *s)
{
    uint64_t n = 0;
    int rc = take_u64(c, &n);
    if (rc < 0) return rc;
    if ((size_t)(c->end - c->p) < n) return truncated(c);
    *s = (gguf_str){(const char *)c->p, (size_t)n};
    c->p += n;
    return 0;
}

/* A key or tensor name: 1 to MAX_NAME bytes of UTF-8 without NUL. */
static int take_name(cursor *c, const char *kind, size_t index, char **out)
{
    gguf_str s = {0};
    int rc = take_str(c, &s);
    if (rc < 0) return rc;
    if (s.n == 0 || s.n > MAX_NAME)
        return err_set(c->e, ERR_FORMAT, "%s: %s %zu has a name of %zu bytes; expected 1 to %d",
                       c->g->map.path, kind, index, s.n, MAX_NAME);
    if (utf8_valid_prefix(s.s, s.n) != s.n || memchr(s.s, 0, s.n))
        return err_set(c->e, ERR_FORMAT, "%s: the name of %s %zu is not UTF-8 text", c->g->map.path,
                       kind, index);
    *out = arena_strndup(c->g->mem, s.s, s.n);
    return 0;
}

/* ---- values -------------------------------------------------------------------------------------
 */

static const struct {
    const char *name;
    int bytes; /* 0 = variable */
} vtypes[] = {[GGUF_U8] = {"u8", 1},     [GGUF_I8] = {"i8", 1},     [GGUF_U16] = {"u16", 2},
              [GGUF_I16] = {"i16", 2},   [GGUF_U32] = {"u32", 4},   [GGUF_I32] = {"i32", 4},
              [GGUF_F32] = {"f32", 4},   [GGUF_BOOL] = {"bool", 1}, [GGUF_STR] = {"string", 0},
              [GGUF_ARR] = {"array", 0}, [GGUF_U64] = {"u64", 8},   [GGUF_I64] = {"i64", 8},
              [GGUF_F64] = {"f64", 8}};
enum { N_VTYPES = (int)(sizeof vtypes / sizeof *vtypes) };

static int take_vtype(cursor *c, gguf_vtype *out)
{
    uint32_t t = 0;
    int rc = take_u32(c, &t);
    if (rc < 0) return rc;
    if (t >= N_VTYPES)
        return err_set(c->e, ERR_FORMAT, "%s: key '%s' has value type %u; known are 0 to %d",
                       c->g->map.path, c->what, t, N_VTYPES - 1);
    *out = (gguf_vtype)t;
    return 0;
}

static bool is_float(gguf_vtype t)
{
    return t == GGUF_F32 || t == GGUF_F64;
}

/* One fixed-size value at p, which has vtypes[t].bytes bytes. */
static int64_t int_at(gguf_vtype t, const uint8_t *p)
{
    union {
        uint16_t u16;
        int16_t i16;
        uint32_t u32;
        int32_t i32;
        int64_t i64;
    } v = {0};
    if (t == GGUF_I8) return (int8_t)*p;
    if (t == GGUF_U8 || t == GGUF_BOOL) return *p;
    memcpy(&v, p, (size_t)vtypes[t].bytes);
    switch (t) {
    case GGUF_U16:
        return v.u16;
    case GGUF_I16:
        return v.i16;
    case GGUF_U32:
        return v.u32;
    case GGUF_I32:
        return v.i32;
    default:
        return v.i64;
    }
}

static double float_at(gguf_vtype t, const uint8_t *p)
{
    float f;
    double d;
    if (t == GGUF_F32) {
        memcpy(&f, p, 4);
        return (double)f;
    }
    memcpy(&d, p, 8);
    return d;
}

static int take_strings(cursor *c, gguf_kv *kv)
{
    gguf_str *list = arena_alloc(c->g->mem, sizeof *list * (size_t)kv->n + 1);
    for (uint64_t i = 0; i < kv->n; i++) {
        int rc = take_str(c, &list[i]);
        if (rc < 0) return rc;
    }
    kv->arr = list;
    return 0;
}

static int take_numbers(cursor *c, gguf_kv *kv)
{
    size_t bytes = (size_t)vtypes[kv->elem].bytes, n = (size_t)kv->n;
    if (is_float(kv->elem)) {
        double *list = arena_alloc(c->g->mem, sizeof *list * n + 1);
        for (size_t i = 0; i < n; i++)
            list[i] = float_at(kv->elem, c->p + i * bytes);
        kv->arr = list;
    } else {
        int64_t *list = arena_alloc(c->g->mem, sizeof *list * n + 1);
        for (size_t i = 0; i < n; i++)
            list[i] = int_at(kv->elem, c->p + i * bytes);
        kv->arr = list;
    }
    c->p += n * bytes;
    return 0;
}

static int take_array(cursor *c, gguf_kv *kv)
{
    int rc = take_vtype(c, &kv->elem);
    if (rc == 0) rc = take_u64(c, &kv->n);
    if (rc < 0) return rc;
    if (kv->elem == GGUF_ARR)
        return err_set(c->e, ERR_UNSUPPORTED, "%s: key '%s' is an array of arrays", c->g->map.path,
                       kv->key);
    /* The least that an element takes: a string has at least its length. */
    size_t least = vtypes[kv->elem].bytes ? (size_t)vtypes[kv->elem].bytes : 8;
    if (kv->n > (size_t)(c->end - c->p) / least)
        return err_set(c->e, ERR_FORMAT,
                       "%s: key '%s' is an array of %" PRIu64 " %s, more than the %zu bytes that "
                       "are left in the file can hold",
                       c->g->map.path, kv->key, kv->n, vtypes[kv->elem].name,
                       (size_t)(c->end - c->p));
    if (kv->n > MAX_ARRAY)
        return err_set(c->e, ERR_LIMIT,
                       "%s: key '%s' is an array of %" PRIu64 " elements; at most "
                       "%d are read",
                       c->g->map.path, kv->key, kv->n, MAX_ARRAY);
    return kv->elem == GGUF_STR ? take_strings(c, kv) : take_numbers(c, kv);
}

static int take_kv(cursor *c, size_t index, gguf_kv *kv)
{
    int rc = 0;
    c->what = NULL;
    TRY(take_name(c, "key", index, &kv->key));
    c->what = kv->key;
    TRY(take_vtype(c, &kv->type));
    if (kv->type == GGUF_ARR) {
        rc = take_array(c, kv);
    } else if (kv->type == GGUF_STR) {
        rc = take_str(c, &kv->s);
    } else {
        uint8_t raw[8] = {0};
        TRY(take(c, raw, (size_t)vtypes[kv->type].bytes));
        if (is_float(kv->type))
            kv->f = float_at(kv->type, raw);
        else
            kv->i = int_at(kv->type, raw);
        if (kv->type == GGUF_BOOL && kv->i > 1)
            rc = err_set(c->e, ERR_FORMAT, "%s: key '%s' is a bool of value %d; expected 0 or 1",
                         c->g->map.path, kv->key, (int)kv->i);
    }
out:
    return rc;
}

/* ---- look-up ------------------------------------------------------------------------------------
 */

const gguf_kv *gguf_find(const gguf_file *g, const char *key)
{
    for (size_t i = 0; i < g->n_kv; i++)
        if (!strcmp(g->kv[i].key, key)) return &g->kv[i];
    return NULL;
}

static int wrong_type(const gguf_file *g, const gguf_kv *kv, const char *want, err *e)
{
    return err_set(e, ERR_FORMAT, "%s: key '%s' must be %s, found %s", g->map.path, kv->key, want,
                   vtypes[kv->type].name);
}

int gguf_get_i64(const gguf_file *g, const char *key, int64_t *out, err *e)
{
    const gguf_kv *kv = gguf_find(g, key);
    if (!kv) return 0;
    if (kv->type == GGUF_STR || kv->type == GGUF_ARR || is_float(kv->type))
        return wrong_type(g, kv, "an integer", e);
    if (kv->type == GGUF_U64 && kv->i < 0)
        return err_set(e, ERR_VALUE, "%s: key '%s' is %" PRIu64 ", which is too large", g->map.path,
                       key, (uint64_t)kv->i);
    *out = kv->i;
    return 1;
}

int gguf_get_f64(const gguf_file *g, const char *key, double *out, err *e)
{
    const gguf_kv *kv = gguf_find(g, key);
    if (!kv) return 0;
    if (kv->type == GGUF_STR || kv->type == GGUF_ARR || kv->type == GGUF_BOOL)
        return wrong_type(g, kv, "a number", e);
    double v = is_float(kv->type) ? kv->f : (double)kv->i;
    if (!isfinite(v))
        return err_set(e, ERR_VALUE, "%s: key '%s' is not a finite number", g->map.path, key);
    *out = v;
    return 1;
}

int gguf_get_str(const gguf_file *g, const char *key, gguf_str *out, err *e)
{
    const gguf_kv *kv = gguf_find(g, key);
    if (!kv) return 0;
    if (kv->type != GGUF_STR) return wrong_type(g, kv, "a string", e);
    *out = kv->s;
    return 1;
}

int gguf_get_arr(const gguf_file *g, const char *key, gguf_vtype elem, const gguf_kv **out, err *e)
{
    const gguf_kv *kv = gguf_find(g, key);
    if (!kv) return 0;
    bool same =
        kv->type == GGUF_ARR &&
        (kv->elem == elem || (elem == GGUF_I64 && kv->elem != GGUF_STR && !is_float(kv->elem)) ||
         (elem == GGUF_F64 && is_float(kv->elem)));
    if (!same)
        return wrong_type(g, kv,
                          elem == GGUF_STR   ? "an array of strings"
                          : elem == GGUF_I64 ? "an array of integers"
                                             : "an array of floats",
                          e);
    *out = kv;
    return 1;
}

/* ---- checks -------------------------------------------------------------------------------------
 */

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Sorts `names` (n of them) and refuses the first that is there twice. */
static int check_unique(const gguf_file *g, const char **names, size_t n, const char *kind, err *e)
{
    qsort(names, n, sizeof *names, by_text);
    for (size_t i = 1; i < n; i++)
        if (!strcmp(names[i - 1], names[i]))
            return err_set(e, ERR_FORMAT, "%s: %s '%.100s' is in the file twice", g->map.path, kind,
                           names[i]);
    return 0;
}

static int read_alignment(gguf_file *g, err *e)
{
    const gguf_kv *kv = gguf_find(g, "general.alignment");
    g->alignment = 32;
    if (!kv) return 0;
    if (kv->type != GGUF_U32) return wrong_type(g, kv, "u32", e);
    if (kv->i <= 0 || kv->i > MAX_ALIGNMENT || (kv->i & (kv->i - 1)))
        return err_set(e, ERR_VALUE,
                       "%s: key 'general.alignment' is %" PRId64 "; expected a power of two",
                       g->map.path, kv->i);
    g->alignment = (uint64_t)kv->i;
    return 0;
}

static const char *foreign_type(uint32_t id)
{
    static const struct {
        uint32_t id;
        const char *name;
    } list[] = {{9, "Q8_1"},   {15, "Q8_K"},   {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"},
                {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"},   {22, "IQ2_S"},  {23, "IQ4_XS"},
                {24, "I8"},    {25, "I16"},    {26, "I32"},     {27, "I64"},    {28, "F64"},
                {29, "IQ1_M"}, {34, "TQ1_0"},  {35, "TQ2_0"},   {39, "MXFP4"},  {40, "NVFP4"}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        if (list[i].id == id) return list[i].name;
    return "unknown";
}

/* Dimensions and type of one tensor; sets bytes. */
static int check_tensor(const gguf_file *g, gguf_tensor *t, uint32_t type_id, err *e)
{
    size_t n = 1;
    for (int d = 0; d < t->n_dims; d++)
        if (t->ne[d] < 1 || !mem_mul(n, (size_t)t->ne[d], &n))
            return err_set(e, ERR_SHAPE,
                           "%s: tensor '%s': dimension %d is %" PRId64 "; expected 1 or more, and "
                           "a product that fits into 64 bits",
                           g->map.path, t->name, d, t->ne[d]);
    t->type = gguf_type_by_id(type_id);
    if (!t->type)
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: tensor '%s' has type id %u (%s); read are F32, F16, BF16, Q4_0, Q4_1, "
                       "Q5_0, Q5_1, Q8_0, Q2_K to Q6_K",
                       g->map.path, t->name, type_id, foreign_type(type_id));
    if (t->ne[0] % t->type->block)
        return err_set(e, ERR_SHAPE,
                       "%s: tensor '%s': rows of %" PRId64
                       " elements are not whole %s blocks of %d",
                       g->map.path, t->name, t->ne[0], t->type->name, t->type->block);
    size_t bytes;
    if (!mem_mul(n / (size_t)t->type->block, (size_t)t->type->bytes, &bytes))
        return err_set(e, ERR_SHAPE, "%s: tensor '%s' is too large", g->map.path, t->name);
    t->bytes = bytes;
    return 0;
}

static int take_tensor(cursor *c, size_t index, gguf_tensor *t)
{
    int rc = 0;
    uint32_t n_dims = 0, type_id = 0;
    c->what = NULL;
    TRY(take_name(c, "tensor", index, &t->name));
    c->what = t->name;
    TRY(take_u32(c, &n_dims));
    if (n_dims < 1 || n_dims > 4) {
        rc = err_set(c->e, ERR_SHAPE, "%s: tensor '%s' has %u dimensions; expected 1 to 4",
                     c->g->map.path, t->name, n_dims);
        goto out;
    }
    t->n_dims = (int)n_dims;
    for (int d = 0; d < 4; d++)
        t->ne[d] = 1;
    for (int d = 0; d < t->n_dims; d++)
        TRY(take(c, &t->ne[d], 8));
    TRY(take_u32(c, &type_id));
    TRY(take_u64(c, &t->offset));
    TRY(check_tensor(c->g, t, type_id, c->e));
out:
    return rc;
}

static int by_offset(const void *pa, const void *pb)
{
    const gguf_tensor *a = *(const gguf_tensor *const *)pa, *b = *(const gguf_tensor *const *)pb;
    return a->offset < b->offset ? -1 : a->offset > b->offset;
}

/* Offsets become file offsets. `left` is compared, nothing is added before it is known to fit. */
static int place_tensors(gguf_file *g, err *e)
{
    uint64_t room = g->map.size - g->data_offset;
    for (size_t i = 0; i < g->n_tensors; i++) {
        gguf_tensor *t = &g->tensors[i];
        if (t->offset % g->alignment)
            return err_set(e, ERR_FORMAT,
                           "%s: tensor '%s': offset %" PRIu64 " is not a multiple of the alignment "
                           "%" PRIu64,
                           g->map.path, t->name, t->offset, g->alignment);
        if (t->offset > room || t->bytes > room - t->offset)
            return err_set(e, ERR_FORMAT,
                           "%s: tensor '%s': %" PRIu64 " bytes at offset %" PRIu64 " of the data, "
                           "which has %" PRIu64
                           " bytes (file %zu); the file is truncated, fetch it "
                           "again",
                           g->map.path, t->name, t->bytes, t->offset, room, g->map.size);
        t->offset += g->data_offset;
        t->map = &g->map;
    }
    return 0;
}

/* No overlaps; after the last tensor nothing but padding, and no second file. */
static int check_layout(const gguf_file *g, err *e)
{
    int rc = 0;
    uint64_t end = g->data_offset;
    gguf_tensor **order = xmalloc(sizeof *order * (g->n_tensors + 1));
    for (size_t i = 0; i < g->n_tensors; i++)
        order[i] = &g->tensors[i];
    qsort(order, g->n_tensors, sizeof *order, by_offset);
    for (size_t i = 0; rc == 0 && i < g->n_tensors; i++) {
        const gguf_tensor *t = order[i];
        if (t->offset < end)
            rc = err_set(e, ERR_FORMAT,
                         "%s: tensor '%s' begins at byte %" PRIu64 ", inside '%s', which as %s "
                         "needs %" PRIu64 " bytes to byte %" PRIu64,
                         g->map.path, t->name, t->offset, order[i - 1]->name,
                         order[i - 1]->type->name, order[i - 1]->bytes, end);
        end = t->offset + t->bytes;
    }
    free(order);
    for (int aligned = 0; rc == 0 && aligned < 2; aligned++) {
        uint64_t at = aligned ? (end + g->alignment - 1) / g->alignment * g->alignment : end;
        if (at <= g->map.size && g->map.size - at >= 4 && !memcmp(g->map.data + at, "GGUF", 4))
            rc = err_set(e, ERR_FORMAT,
                         "%s: a second GGUF begins at byte %" PRIu64 "; parts of a split model "
                         "were joined byte by byte; use the parts as they are (any of them opens "
                         "the whole model), or merge them with llama-gguf-split --merge",
                         g->map.path, at);
    }
    return rc;
}

/* ---- open ---------------------------------------------------------------------------------------
 */

static int take_head(cursor *c, uint64_t *n_tensors, uint64_t *n_kv)
{
    char magic[4] = "";
    gguf_file *g = c->g;
    int rc = 0;
    TRY(take(c, magic, 4));
    if (memcmp(magic, "GGUF", 4)) {
        rc = err_set(c->e, ERR_FORMAT, "%s: not a GGUF file (it begins with %02x %02x %02x %02x)",
                     g->map.path, (unsigned)magic[0] & 255, (unsigned)magic[1] & 255,
                     (unsigned)magic[2] & 255, (unsigned)magic[3] & 255);
        goto out;
    }
    TRY(take_u32(c, &g->version));
    if (g->version != 2 && g->version != 3) {
        rc = err_set(c->e, ERR_UNSUPPORTED, "%s: GGUF version %u; read are 2 and 3%s", g->map.path,
                     g->version,
                     (g->version & 0xFFFF) == 0 && g->version ? " (this one is big-endian)" : "");
        goto out;
    }
    TRY(take_u64(c, n_tensors));
    TRY(take_u64(c, n_kv));
    /* The shortest entry takes 13 and 33 bytes: counts beyond that are damage, not work. */
    size_t left = (size_t)(c->end - c->p);
    if (*n_kv > left / 13 || *n_tensors > left / 33)
        rc = err_set(c->e, ERR_FORMAT,
                     "%s: %" PRIu64 " tensors and %" PRIu64 " keys are announced, but the file has "
                     "%zu bytes",
                     g->map.path, *n_tensors, *n_kv, g->map.size);
out:
    return rc;
}

static int take_kvs(cursor *c, size_t n)
{
    gguf_file *g = c->g;
    int rc = 0;
    const char **names = NULL;
    g->kv = arena_alloc(g->mem, sizeof *g->kv * n + 1);
    for (size_t i = 0; i < n; i++) {
        TRY(take_kv(c, i, &g->kv[i]));
        g->n_kv++;
    }
    names = xmalloc(sizeof *names * (n + 1));
    for (size_t i = 0; i < n; i++)
        names[i] = g->kv[i].key;
    TRY(check_unique(g, names, n, "key", c->e));
out:
    free(names);
    return rc;
}

static int take_tensors(cursor *c, size_t n)
{
    gguf_file *g = c->g;
    int rc = 0;
    const char **names = NULL;
    g->tensors = arena_alloc(g->mem, sizeof *g->tensors * n + 1);
    for (size_t i = 0; i < n; i++) {
        TRY(take_tensor(c, i, &g->tensors[i]));
        g->n_tensors++;
    }
    names = xmalloc(sizeof *names * (n + 1));
    for (size_t i = 0; i < n; i++)
        names[i] = g->tensors[i].name;
    TRY(check_unique(g, names, n, "tensor", c->e));
out:
    free(names);
    return rc;
}

int gguf_open(gguf_file *g, const char *path, err *e)
{
    int rc = 0;
    uint64_t n_tensors = 0, n_kv = 0;
    *g = (gguf_file){.mem = arena_make()};
    TRY(file_map_open(&g->map, path, e));
    cursor c = {.g = g, .p = g->map.data, .end = g->map.data + g->map.size, .e = e};
    TRY(take_head(&c, &n_tensors, &n_kv));
    TRY(take_kvs(&c, (size_t)n_kv));
    TRY(read_alignment(g, e));
    TRY(take_tensors(&c, (size_t)n_tensors));
    uint64_t pos = (uint64_t)(c.p - g->map.data),
             pad = (g->alignment - pos % g->alignment) % g->alignment;
    g->data_offset = pad > g->map.size - pos ? g->map.size : pos + pad;
    TRY(place_tensors(g, e));
    TRY(check_layout(g, e));
out:
    if (rc < 0) gguf_close(g);
    return rc;
}

void gguf_close(gguf_file *g)
{
    for (int i = 0; i < g->n_more; i++)
        gguf_close(&g->more[i]);
    free(g->more);
    file_map_close(&g->map);
    arena_drop(g->mem);
    *g = (gguf_file){0};
}
