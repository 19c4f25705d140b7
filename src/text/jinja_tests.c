/* Tests ("x is …"): a const table of name, parameters and function. */
#include <string.h>
#include "text/jinja.h"

#define KIND_TEST(fn, condition)                                                                   \
    static int fn(jrt *r, const jbound *b, jv *out)                                                \
    {                                                                                              \
        (void)r;                                                                                   \
        jv v = b->in;                                                                              \
        *out = jv_bool(condition);                                                                 \
        return 0;                                                                                  \
    }

KIND_TEST(t_defined, v.kind != JV_UNDEF)
KIND_TEST(t_undefined, v.kind == JV_UNDEF)
KIND_TEST(t_none, v.kind == JV_NONE)
KIND_TEST(t_string, v.kind == JV_STR)
KIND_TEST(t_mapping, v.kind == JV_DICT)
KIND_TEST(t_number, jv_is_num(v))
KIND_TEST(t_integer, v.kind == JV_INT)
KIND_TEST(t_float, v.kind == JV_FLOAT)
KIND_TEST(t_boolean, v.kind == JV_BOOL)
KIND_TEST(t_true, v.kind == JV_BOOL && v.b)
KIND_TEST(t_false, v.kind == JV_BOOL && !v.b)
KIND_TEST(t_callable, v.kind == JV_FUNC || v.kind == JV_METHOD || v.kind == JV_MACRO)
KIND_TEST(t_escaped, v.kind == JV_STR && v.sub == JS_SAFE)
KIND_TEST(t_iterable, v.kind == JV_STR || v.kind == JV_LIST || v.kind == JV_DICT ||
                          v.kind == JV_UNDEF || v.kind == JV_LOOP)
/* has a length and takes subscripts: an undefined value has both */
KIND_TEST(t_sequence, v.kind == JV_STR || v.kind == JV_DICT || v.kind == JV_UNDEF ||
                          (v.kind == JV_LIST && v.sub != JL_GEN && v.sub != JL_VIEW))

static int t_eq(jrt *r, const jbound *b, jv *out)
{
    (void)r;
    *out = jv_bool(jv_equal(b->in, b->a[0]));
    return 0;
}

static int t_ne(jrt *r, const jbound *b, jv *out)
{
    (void)r;
    *out = jv_bool(!jv_equal(b->in, b->a[0]));
    return 0;
}

static int order(jrt *r, const jbound *b, const char *op, jv *out)
{
    int c = 0, rc = jv_compare(r, b->in, b->a[0], op, &c);
    bool yes = op[0] == '<' ? c < 0 : c > 0;
    *out = jv_bool(yes || (op[1] && c == 0));
    return rc;
}

static int t_lt(jrt *r, const jbound *b, jv *out)
{
    return order(r, b, "<", out);
}

static int t_le(jrt *r, const jbound *b, jv *out)
{
    return order(r, b, "<=", out);
}

static int t_gt(jrt *r, const jbound *b, jv *out)
{
    return order(r, b, ">", out);
}

static int t_ge(jrt *r, const jbound *b, jv *out)
{
    return order(r, b, ">=", out);
}

static int t_in(jrt *r, const jbound *b, jv *out)
{
    bool yes = false;
    int rc = jv_contains(r, b->a[0], b->in, &yes);
    *out = jv_bool(yes);
    return rc;
}

static int t_sameas(jrt *r, const jbound *b, jv *out)
{
    (void)r;
    jv x = b->in, y = b->a[0];
    *out = jv_bool(x.kind == y.kind && (x.kind == JV_LIST || x.kind == JV_DICT ? x.l == y.l
                                                                                : jv_equal(x, y)));
    return 0;
}

static int modulo(jrt *r, jv v, int64_t m, int64_t want, jv *out)
{
    jv rest;
    int rc = jj_binary(r, '%', v, jv_int(m), &rest);
    *out = jv_bool(rc == 0 && jv_is_num(rest) && jv_num(rest) == (double)want);
    return rc;
}

static int t_odd(jrt *r, const jbound *b, jv *out)
{
    return modulo(r, b->in, 2, 1, out);
}

static int t_even(jrt *r, const jbound *b, jv *out)
{
    return modulo(r, b->in, 2, 0, out);
}

static int t_divisibleby(jrt *r, const jbound *b, jv *out)
{
    if (b->a[0].kind != JV_INT) return jj_fail(r, "divisibleby needs an integer");
    return modulo(r, b->in, b->a[0].i, 0, out);
}

/* str.islower and str.isupper: some letter has a case, and none has the other */
static int has_case(jrt *r, jv in, bool upper, jv *out)
{
    jv s;
    buf same = {0}, other = {0};
    int rc = jv_to_str(r, in, &s);
    if (rc < 0) return rc;
    buf_puts(&same, "");
    buf_puts(&other, "");
    (upper ? js_upper : js_lower)(s.s, s.n, &same);
    (upper ? js_lower : js_upper)(s.s, s.n, &other);
    bool yes = same.len == s.n && !memcmp(same.data, s.s, s.n) &&
               !(other.len == s.n && !memcmp(other.data, s.s, s.n));
    buf_free(&same);
    buf_free(&other);
    *out = jv_bool(yes);
    return 0;
}

static int t_lower(jrt *r, const jbound *b, jv *out)
{
    return has_case(r, b->in, false, out);
}

static int t_upper(jrt *r, const jbound *b, jv *out)
{
    return has_case(r, b->in, true, out);
}

static int named(jrt *r, jv in, const jj_row *(*find)(const char *), jv *out)
{
    if (in.kind != JV_STR) return jj_fail(r, "a name must be a string");
    jv name = jv_strn(r, in.s, in.n);
    *out = jv_bool(find(name.s) != NULL);
    return 0;
}

static int t_filter(jrt *r, const jbound *b, jv *out)
{
    return named(r, b->in, jj_filter_find, out);
}

static int t_test(jrt *r, const jbound *b, jv *out)
{
    return named(r, b->in, jj_test_find, out);
}

static const jj_row tests[] = {
    {"!=", "other", 1, t_ne, 0},
    {"<", "other", 1, t_lt, 0},
    {"<=", "other", 1, t_le, 0},
    {"==", "other", 1, t_eq, 0},
    {">", "other", 1, t_gt, 0},
    {">=", "other", 1, t_ge, 0},
    {"boolean", "", 0, t_boolean, 0},
    {"callable", "", 0, t_callable, 0},
    {"defined", "", 0, t_defined, 0},
    {"divisibleby", "num", 1, t_divisibleby, 0},
    {"eq", "other", 1, t_eq, 0},
    {"equalto", "other", 1, t_eq, 0},
    {"escaped", "", 0, t_escaped, 0},
    {"even", "", 0, t_even, 0},
    {"false", "", 0, t_false, 0},
    {"filter", "", 0, t_filter, 0},
    {"float", "", 0, t_float, 0},
    {"ge", "other", 1, t_ge, 0},
    {"greaterthan", "other", 1, t_gt, 0},
    {"gt", "other", 1, t_gt, 0},
    {"in", "seq", 1, t_in, 0},
    {"integer", "", 0, t_integer, 0},
    {"iterable", "", 0, t_iterable, 0},
    {"le", "other", 1, t_le, 0},
    {"lessthan", "other", 1, t_lt, 0},
    {"lower", "", 0, t_lower, 0},
    {"lt", "other", 1, t_lt, 0},
    {"mapping", "", 0, t_mapping, 0},
    {"ne", "other", 1, t_ne, 0},
    {"none", "", 0, t_none, 0},
    {"number", "", 0, t_number, 0},
    {"odd", "", 0, t_odd, 0},
    {"sameas", "other", 1, t_sameas, 0},
    {"sequence", "", 0, t_sequence, 0},
    {"string", "", 0, t_string, 0},
    {"test", "", 0, t_test, 0},
    {"true", "", 0, t_true, 0},
    {"undefined", "", 0, t_undefined, 0},
    {"upper", "", 0, t_upper, 0},
};

const jj_row *jj_test_find(const char *name)
{
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        if (!strcmp(tests[i].name, name)) return &tests[i];
    return NULL;
}
