/* Safetensors: what is written reads back; every kind of damaged file is refused by name. */
#include "check.h"
#include "ckpt/safetensors.h"

static char dir[64];

static int setup(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/tare-st-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    return file_remove_tree(dir, NULL);
}

static char *path_of(const char *name)
{
    return file_join(dir, name);
}

/* header length, header, data bytes; a negative length means the header's own. */
static char *write_st(const char *header, int64_t length, size_t data)
{
    err e = {0};
    buf b = {0};
    uint64_t n = length < 0 ? strlen(header) : (uint64_t)length;
    buf_add(&b, &n, 8);
    buf_puts(&b, header);
    for (size_t i = 0; i < data; i++)
        buf_putc(&b, (char)i);
    char *p = path_of("x.safetensors");
    CHECK_OK(file_write_atomic(p, b.data, b.len, &e));
    buf_free(&b);
    return p;
}

static void round_trip(void **state)
{
    (void)state;
    err e = {0};
    st_writer *w;
    st_file f;
    char *p = path_of("rt.safetensors");
    const int64_t s2[] = {2, 3}, s1[] = {5}, s0[] = {0, 4};
    float a[6] = {1, 2, 3, 4, 5, 6};
    uint8_t b[5] = {9, 8, 7, 6, 5};
    CHECK_OK(st_writer_open(&w, p, &e));
    CHECK_OK(st_writer_declare(w, "a.weight", NUM_F32, 2, s2, &e));
    CHECK_OK(st_writer_declare(w, "b \"quoted\" \xC3\xA4", NUM_U8, 1, s1, &e));
    CHECK_OK(st_writer_declare(w, "empty", NUM_BF16, 2, s0, &e));
    CHECK_OK(st_writer_declare(w, "scalar", NUM_F8_E4M3, 0, s0, &e));
    CHECK_ERR(st_writer_declare(w, "n", NUM_NF4, 1, s1, &e), ERR_DTYPE, "nf4");
    CHECK_OK(st_writer_begin(w, &e));
    CHECK_OK(st_writer_data(w, a, 7, &e));
    CHECK_OK(st_writer_data(w, (char *)a + 7, sizeof a - 7, &e));
    CHECK_OK(st_writer_data(w, b, sizeof b, &e));
    CHECK_OK(st_writer_data(w, "\x38", 1, &e));
    CHECK_ERR(st_writer_data(w, "x", 1, &e), ERR_BADSTATE, "declared");
    assert_false(file_exists(p)); /* not before commit */
    CHECK_OK(st_writer_commit(&w, &e));
    assert_null(w);
    CHECK_OK(st_open(&f, p, &e));
    assert_int_equal(f.n, 4);
    assert_string_equal(f.meta[0], "format");
    assert_string_equal(f.meta[1], "pt");
    assert_string_equal(f.tensors[0].name, "a.weight");
    assert_int_equal(f.tensors[0].n_dims, 2);
    assert_int_equal(f.tensors[0].shape[1], 3);
    assert_memory_equal(f.tensors[0].data, a, sizeof a);
    assert_string_equal(f.tensors[1].name, "b \"quoted\" \xC3\xA4");
    assert_memory_equal(f.tensors[1].data, b, sizeof b);
    bool empty = false, scalar = false;
    for (size_t i = 2; i < 4; i++) {
        empty = empty || (!strcmp(f.tensors[i].name, "empty") && f.tensors[i].bytes == 0);
        scalar = scalar || (!strcmp(f.tensors[i].name, "scalar") && f.tensors[i].data[0] == 0x38 &&
                            f.tensors[i].n_dims == 0);
    }
    assert_true(empty && scalar);
    uint64_t header;
    memcpy(&header, f.map.data, 8);
    assert_int_equal(header % 8, 0);
    st_close(&f);
    free(p);
}

static void missing_data_is_an_error(void **state)
{
    (void)state;
    err e = {0};
    st_writer *w;
    char *p = path_of("half.safetensors");
    const int64_t s[] = {4};
    CHECK_OK(st_writer_open(&w, p, &e));
    CHECK_OK(st_writer_declare(w, "a", NUM_F32, 1, s, &e));
    CHECK_OK(st_writer_begin(w, &e));
    CHECK_OK(st_writer_data(w, "1234", 4, &e));
    CHECK_ERR(st_writer_commit(&w, &e), ERR_BADSTATE, "4 of 16 bytes");
    assert_null(w);
    assert_false(file_exists(p));
    free(p);
}

#define T(dtype, shape, offsets)                                                                   \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static const struct {
    const char *what, *header;
    int64_t length;
    size_t data;
    int code;
    const char *text;
} hostile[] = {
    {"no header", "", 0, 0, ERR_FORMAT, "empty"},
    {"header of 2 GB", "{}", INT64_C(1) << 31, 0, ERR_FORMAT, "2147483648"},
    {"header length that wraps", "{}", INT64_MAX, 0, ERR_FORMAT, "9223372036854775807"},
    {"header longer than the file", "{}", 3, 0, ERR_FORMAT, "3 bytes"},
    {"not JSON", "{\"a\":", -1, 0, ERR_FORMAT, "invalid JSON"},
    {"an array", "[]", -1, 0, ERR_FORMAT, "not a JSON object"},
    {"entry is a number", "{\"a\":1}", -1, 0, ERR_FORMAT, "'a'"},
    {"no dtype", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4, ERR_FORMAT, "no dtype"},
    {"dtype is a number", "{\"a\":{\"dtype\":3,\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4,
     ERR_FORMAT, "dtype"},
    {"unknown dtype", "{\"a\":" T("F31", "[1]", "[0,4]") "}", -1, 4, ERR_DTYPE, "F31"},
    {"no shape", "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", -1, 4, ERR_FORMAT, "shape"},
    {"negative shape", "{\"a\":" T("F32", "[-1]", "[0,4]") "}", -1, 4, ERR_SHAPE, "-1"},
    {"fraction", "{\"a\":" T("F32", "[1.5]", "[0,4]") "}", -1, 4, ERR_SHAPE, "1.5"},
    {"text in shape", "{\"a\":" T("F32", "[\"1\"]", "[0,4]") "}", -1, 4, ERR_SHAPE, "'a'"},
    {"shape that overflows", "{\"a\":" T("F32", "[4294967296,4294967296,4]", "[0,4]") "}", -1, 4,
     ERR_SHAPE, "too large"},
    {"shape beyond 2^53", "{\"a\":" T("F32", "[1e300]", "[0,4]") "}", -1, 4, ERR_SHAPE, "1e+300"},
    {"9 dimensions", "{\"a\":" T("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]") "}", -1, 1, ERR_LIMIT,
     "8 dim"},
    {"wrong size", "{\"a\":" T("F32", "[2]", "[0,4]") "}", -1, 4, ERR_SHAPE, "needs 8"},
    {"begin after end", "{\"a\":" T("F32", "[1]", "[4,0]") "}", -1, 4, ERR_FORMAT, "begin <= end"},
    {"one offset", "{\"a\":" T("F32", "[1]", "[0]") "}", -1, 4, ERR_FORMAT, "data_offsets"},
    {"negative offset", "{\"a\":" T("F32", "[1]", "[-4,0]") "}", -1, 4, ERR_FORMAT, "data_offsets"},
    {"offset near 2^64",
     "{\"a\":" T("U8", "[1]", "[18446744073709551615,18446744073709551616]") "}", -1, 4, ERR_FORMAT,
     "data_offsets"},
    {"truncated data", "{\"a\":" T("F32", "[2]", "[0,8]") "}", -1, 7, ERR_FORMAT, "truncated"},
    {"data left over", "{\"a\":" T("F32", "[1]", "[0,4]") "}", -1, 5, ERR_FORMAT, "1 bytes follow"},
    {"overlap", "{\"a\":" T("U8", "[4]", "[0,4]") ",\"b\":" T("U8", "[4]", "[3,7]") "}", -1, 7,
     ERR_FORMAT, "'b': overlaps"},
    {"same place", "{\"a\":" T("U8", "[4]", "[0,4]") ",\"b\":" T("U8", "[4]", "[0,4]") "}", -1, 4,
     ERR_FORMAT, "overlaps"},
    {"hole", "{\"a\":" T("U8", "[4]", "[0,4]") ",\"b\":" T("U8", "[4]", "[5,9]") "}", -1, 9,
     ERR_FORMAT, "'b': unused"},
    {"hole at the start", "{\"a\":" T("U8", "[4]", "[1,5]") "}", -1, 5, ERR_FORMAT, "unused"},
    {"twice", "{\"a\":" T("U8", "[1]", "[0,1]") ",\"a\":" T("U8", "[1]", "[1,2]") "}", -1, 2,
     ERR_FORMAT, "twice"},
    {"name not UTF-8", "{\"\xC3\x28\":" T("U8", "[1]", "[0,1]") "}", -1, 1, ERR_FORMAT, "UTF-8"},
    {"name with NUL", "{\"a\\u0000b\":" T("U8", "[1]", "[0,1]") "}", -1, 1, ERR_FORMAT, "u0000"},
    {"metadata of numbers", "{\"__metadata__\":{\"a\":1}}", -1, 0, ERR_FORMAT, "__metadata__"},
};

static void hostile_files(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof hostile / sizeof *hostile; i++) {
        err e = {0};
        st_file f;
        char *p = write_st(hostile[i].header, hostile[i].length, hostile[i].data);
        int rc = st_open(&f, p, &e);
        if (rc != -hostile[i].code || !strstr(e.msg, hostile[i].text) || !strstr(e.msg, p))
            fail_msg("%s: %d: %s", hostile[i].what, rc, e.msg);
        assert_null(f.mem); /* nothing half open */
        free(p);
    }
}

static void short_files(void **state)
{
    (void)state;
    for (size_t n = 0; n < 8; n++) {
        err e = {0};
        st_file f;
        char *p = path_of("short.safetensors");
        CHECK_OK(file_write_atomic(p, "\2\0\0\0\0\0\0\0", n, &e));
        CHECK_ERR(st_open(&f, p, &e), ERR_FORMAT, "too short");
        free(p);
    }
}

/* A valid file cut at any length is refused, and never read beyond. */
static void every_truncation(void **state)
{
    (void)state;
    err e = {0};
    char *p = write_st(
        "{\"a\":" T("F32", "[2,2]", "[0,16]") ",\"b\":" T("F16", "[3]", "[16,22]") "}", -1, 22);
    buf b = {0};
    st_file f;
    CHECK_OK(st_open(&f, p, &e));
    st_close(&f);
    CHECK_OK(file_read_all(&b, p, 1 << 20, &e));
    for (size_t n = 0; n < b.len; n++) {
        CHECK_OK(file_write_atomic(p, b.data, n, &e));
        assert_true(st_open(&f, p, &e) < 0);
    }
    buf_free(&b);
    free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),       cmocka_unit_test(missing_data_is_an_error),
        cmocka_unit_test(hostile_files),    cmocka_unit_test(short_files),
        cmocka_unit_test(every_truncation),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
