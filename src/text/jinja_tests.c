/* What `x is test` and the global names can be: two registries.
 *
 * One row per test; a native gets the tested value as `self` and answers with any value, whose
 * truth counts. Functions are rows as well: range, namespace, dict, joiner, raise_exception and
 * strftime_now. raise_exception's text becomes the error's text as it stands, since it is written
 * for the one who sent the conversation. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/utf8.h"
#include "text/jinja_internal.h"

#define RANGE_MAX 100000 /* as Jinja's sandbox has it */

static int answer(jv *out, bool b)
{
    *out = j_bool(b);
    return 0;
}

#define TYPE_TEST(name, expr)                                                                      \
    static int name(jrun *r, jv v, const jcall *c, jv *out)                                        \
    {                                                                                              \
        (void)r;                                                                                   \
        (void)v;                                                                                   \
        (void)c;                                                                                   \
        return answer(out, expr);                                                                  \
    }

TYPE_TEST(is_defined, v.t != J_UNDEF)
TYPE_TEST(is_undefined, v.t == J_UNDEF)
TYPE_TEST(is_none, v.t == J_NONE)
TYPE_TEST(is_string, v.t == J_STR)
TYPE_TEST(is_mapping, v.t == J_DICT)
TYPE_TEST(is_number, j_is_num(v) || v.t == J_BIG)
TYPE_TEST(is_integer, v.t == J_INT || v.t == J_BIG)
TYPE_TEST(is_float, v.t == J_FLOAT)
TYPE_TEST(is_boolean, v.t == J_BOOL)
TYPE_TEST(is_true, v.t == J_BOOL && v.b)
TYPE_TEST(is_false, v.t == J_BOOL && !v.b)
TYPE_TEST(is_callable, v.t == J_FUNC || v.t == J_LOOP || v.t == J_UNDEF)
TYPE_TEST(is_escaped, v.t == J_STR && v.safe)
TYPE_TEST(is_sequence, v.t == J_STR || v.t == J_LIST || v.t == J_TUPLE || v.t == J_DICT ||
                           v.t == J_UNDEF || (v.t == J_SEQ && v.list->kind == J_RANGE))
TYPE_TEST(is_iterable, v.t == J_STR || v.t == J_LIST || v.t == J_TUPLE || v.t == J_DICT ||
                           v.t == J_UNDEF || v.t == J_LOOP || v.t == J_GEN || v.t == J_SEQ)
TYPE_TEST(is_sameas, v.t == c->v[0].t && (v.t == J_STR    ? v.s == c->v[0].s && v.n == c->v[0].n
                                          : v.t == J_BOOL ? v.b == c->v[0].b
                                          : v.t == J_NONE ? true
                                                          : v.i == c->v[0].i))

static int parity(jrun *r, jv v, jv by, bool want_zero, jv *out)
{
    jv rest;
    int rc = j_binary(r, JT_MOD, v, by, &rest);
    if (rc < 0) return rc;
    bool same;
    if ((rc = j_equal(r, rest, j_int(want_zero ? 0 : 1), &same)) < 0) return rc;
    return answer(out, same);
}

static int is_odd(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    return parity(r, v, j_int(2), false, out);
}

static int is_even(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    return parity(r, v, j_int(2), true, out);
}

static int is_divisible(jrun *r, jv v, const jcall *c, jv *out)
{
    jv by = j_int(1);
    j_arg(c, 0, "num", &by);
    return parity(r, v, by, true, out);
}

static int is_eq(jrun *r, jv v, const jcall *c, jv *out)
{
    bool same;
    int rc = j_equal(r, v, c->v[0], &same);
    return rc < 0 ? rc : answer(out, same);
}

static int is_ne(jrun *r, jv v, const jcall *c, jv *out)
{
    bool same;
    int rc = j_equal(r, v, c->v[0], &same);
    return rc < 0 ? rc : answer(out, !same);
}

static int is_lt(jrun *r, jv v, const jcall *c, jv *out)
{
    bool less;
    int rc = j_less(r, v, c->v[0], &less);
    return rc < 0 ? rc : answer(out, less);
}

static int is_gt(jrun *r, jv v, const jcall *c, jv *out)
{
    bool less;
    int rc = j_less(r, c->v[0], v, &less);
    return rc < 0 ? rc : answer(out, less);
}

static int is_le(jrun *r, jv v, const jcall *c, jv *out)
{
    bool less;
    int rc = j_less(r, c->v[0], v, &less);
    return rc < 0 ? rc : answer(out, !less);
}

static int is_ge(jrun *r, jv v, const jcall *c, jv *out)
{
    bool less;
    int rc = j_less(r, v, c->v[0], &less);
    return rc < 0 ? rc : answer(out, !less);
}

static int is_in(jrun *r, jv v, const jcall *c, jv *out)
{
    bool found;
    int rc = j_contains(r, c->v[0], v, &found);
    return rc < 0 ? rc : answer(out, found);
}

static int is_case(jrun *r, jv v, int how, jv *out)
{
    jv s;
    int rc = j_to_str(r, v, &s);
    if (rc < 0) return rc;
    j_slow(r, s.n);
    return answer(out, j_cased_as(s, how));
}

static int is_lower(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    return is_case(r, v, J_LOWER, out);
}

static int is_upper(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    return is_case(r, v, J_UPPER, out);
}

static int is_filter(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    if (!j_hashable(v)) return j_fail(r, "%s is no name", j_type_name(v));
    return answer(out, v.t == J_STR && j_find_filter(v.s, v.n));
}

static int is_test(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    if (!j_hashable(v)) return j_fail(r, "%s is no name", j_type_name(v));
    return answer(out, v.t == J_STR && j_find_test(v.s, v.n));
}

static const j_row tests[] = {{"defined", is_defined, 0, 0, NULL},
                              {"undefined", is_undefined, 0, 0, NULL},
                              {"none", is_none, 0, 0, NULL},
                              {"string", is_string, 0, 0, NULL},
                              {"mapping", is_mapping, 0, 0, NULL},
                              {"number", is_number, 0, 0, NULL},
                              {"integer", is_integer, 0, 0, NULL},
                              {"float", is_float, 0, 0, NULL},
                              {"boolean", is_boolean, 0, 0, NULL},
                              {"true", is_true, 0, 0, NULL},
                              {"false", is_false, 0, 0, NULL},
                              {"callable", is_callable, 0, 0, NULL},
                              {"escaped", is_escaped, 0, 0, NULL},
                              {"sequence", is_sequence, 0, 0, NULL},
                              {"iterable", is_iterable, 0, 0, NULL},
                              {"sameas", is_sameas, 1, 1, "other"},
                              {"odd", is_odd, 0, 0, NULL},
                              {"even", is_even, 0, 0, NULL},
                              {"divisibleby", is_divisible, 1, 1, "num"},
                              {"eq", is_eq, 1, 1, NULL},
                              {"equalto", is_eq, 1, 1, NULL},
                              {"==", is_eq, 1, 1, NULL},
                              {"ne", is_ne, 1, 1, NULL},
                              {"!=", is_ne, 1, 1, NULL},
                              {"lt", is_lt, 1, 1, NULL},
                              {"lessthan", is_lt, 1, 1, NULL},
                              {"<", is_lt, 1, 1, NULL},
                              {"gt", is_gt, 1, 1, NULL},
                              {"greaterthan", is_gt, 1, 1, NULL},
                              {">", is_gt, 1, 1, NULL},
                              {"le", is_le, 1, 1, NULL},
                              {"<=", is_le, 1, 1, NULL},
                              {"ge", is_ge, 1, 1, NULL},
                              {">=", is_ge, 1, 1, NULL},
                              {"in", is_in, 1, 1, "seq"},
                              {"lower", is_lower, 0, 0, NULL},
                              {"upper", is_upper, 0, 0, NULL},
                              {"filter", is_filter, 0, 0, NULL},
                              {"test", is_test, 0, 0, NULL}};

const j_row *j_find_test(const char *name, size_t n)
{
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++)
        if (strlen(tests[i].name) == n && !memcmp(tests[i].name, name, n)) return &tests[i];
    return NULL;
}

/* ---- functions ---- */

static int fn_raise(jrun *r, jv self, const jcall *c, jv *out)
{
    jv text = j_strz("the chat template refused the conversation");
    (void)self;
    (void)out;
    if (j_arg(c, 0, "message", &text)) {
        int rc = j_to_str(r, text, &text);
        if (rc < 0) return rc;
    }
    if (text.n == 0) text = j_strz("the chat template refused the conversation");
    size_t n = text.n < 900 ? text.n : 900;
    return err_set(r->e, ERR_VALUE, "%.*s", (int)utf8_valid_prefix(text.s, n), text.s);
}

static int fn_range(jrun *r, jv self, const jcall *c, jv *out)
{
    int64_t a[3] = {0, 0, 1};
    int rc = 0;
    (void)self;
    for (size_t i = 0; i < c->n; i++)
        TRY(j_arg_int(r, c, i, "range", &a[c->n == 1 ? 1 : i]));
    if (a[2] == 0) return j_fail(r, "range's step must not be zero");
    double count = ((double)a[1] - (double)a[0]) / (double)a[2];
    if (count > RANGE_MAX)
        return j_limit(r, "a range of more numbers than the limit of %d", RANGE_MAX);
    *out = j_range(r, a[0], a[1], a[2]);
    rc = 0;
out:
    return rc;
}

/* dict(pairs or mapping, name=value...) */
static int fn_dict(jrun *r, jv self, const jcall *c, jv *out)
{
    int rc = 0;
    (void)self;
    jv v = j_dict(r);
    if (c->n > 1) return j_fail(r, "dict() takes one value, and names");
    for (size_t i = 0; i < c->n; i++) {
        jv from = c->v[i];
        jlist *pairs;
        if (from.t == J_UNDEF) return j_fail(r, "'%s' is undefined", from.s ? from.s : "value");
        if (from.t == J_DICT || from.t == J_NS) {
            for (size_t k = 0; k < from.dict->n; k++)
                j_dict_set(r, v.dict, from.dict->keys[k], from.dict->vals[k]);
            continue;
        }
        TRY(j_iter(r, from, &pairs));
        for (size_t k = 0; k < pairs->n; k++) {
            jlist *pair;
            TRY(j_iter(r, pairs->v[k], &pair));
            if (pair->n != 2 || !j_hashable(pair->v[0]))
                return j_fail(r, "dict() needs pairs of a key and a value");
            j_dict_set(r, v.dict, pair->v[0], pair->v[1]);
        }
    }
    for (size_t i = 0; i < c->n_kw; i++)
        j_dict_set(r, v.dict, c->kw_names[i], c->kw[i]);
    *out = v;
out:
    return rc;
}

static int fn_namespace(jrun *r, jv self, const jcall *c, jv *out)
{
    int rc = fn_dict(r, self, c, out);
    for (size_t i = 0; rc >= 0 && i < out->dict->n; i++)
        if (out->dict->keys[i].t == J_STR && out->dict->keys[i].n && out->dict->keys[i].s[0] == '_')
            rc = j_fail(r, "a namespace takes no names that begin with '_'");
    out->t = J_NS;
    return rc;
}

/* joiner(sep): the first call gives "", later ones sep. */
static int joiner_call(jrun *r, jv self, const jcall *c, jv *out)
{
    jv used = j_bool(false);
    (void)c;
    j_dict_gets(self.dict, "used", 4, &used);
    *out = j_strz("");
    if (used.b) j_dict_gets(self.dict, "sep", 3, out);
    j_dict_set(r, self.dict, j_strz("used"), j_bool(true));
    return 0;
}

static const j_row joiner_row = {"joiner", joiner_call, 0, 0, NULL};

static int fn_joiner(jrun *r, jv self, const jcall *c, jv *out)
{
    jv sep = j_strz(", "), state = j_dict(r);
    (void)self;
    j_arg(c, 0, "sep", &sep);
    j_dict_set(r, state.dict, j_strz("sep"), sep);
    jfunc *f = j_alloc(r, sizeof(*f));
    f->name = "joiner";
    f->row = &joiner_row;
    f->self = state;
    *out = (jv){.t = J_FUNC, .fn = f};
    return 0;
}

static int fn_cycler(jrun *r, jv self, const jcall *c, jv *out)
{
    (void)self;
    if (c->n == 0) return j_fail(r, "cycler takes values");
    *out = j_list(r, c->n);
    for (size_t i = 0; i < c->n; i++)
        j_push(r, out->list, c->v[i]);
    out->t = J_CYCLER;
    return 0;
}

static int fn_lipsum(jrun *r, jv self, const jcall *c, jv *out)
{
    (void)self;
    (void)c;
    (void)out;
    return j_fail(r, "the function 'lipsum' is not supported");
}

static int fn_strftime(jrun *r, jv self, const jcall *c, jv *out)
{
    char format[128], text[512];
    struct tm tm;
    time_t now = r->t->clock_fixed ? (time_t)r->t->clock : time(NULL);
    (void)self;
    jv f = j_none();
    j_arg(c, 0, "format", &f);
    if (f.t != J_STR) return j_fail(r, "strftime_now takes a format");
    if (f.n >= sizeof(format))
        return j_limit(r, "strftime_now with a format above the limit of %zu bytes",
                       sizeof(format));
    memcpy(format, f.s, f.n);
    format[f.n] = 0;
    if (r->t->clock_fixed)
        gmtime_r(&now, &tm);
    else
        localtime_r(&now, &tm);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    size_t n = strftime(text, sizeof(text), format, &tm);
#pragma GCC diagnostic pop
    *out = j_copy(r, text, n);
    return 0;
}

const j_row j_globals[] = {{"raise_exception", fn_raise, 1, 1, "message"},
                           {"range", fn_range, 1, 3, NULL},
                           {"dict", fn_dict, 0, J_MAX_ARGS, "*"},
                           {"namespace", fn_namespace, 0, J_MAX_ARGS, "*"},
                           {"cycler", fn_cycler, 0, J_MAX_ARGS, NULL},
                           {"lipsum", fn_lipsum, 0, 4, "*"},
                           {"joiner", fn_joiner, 0, 1, "sep"},
                           {"strftime_now", fn_strftime, 1, 1, "format"},
                           {NULL, NULL, 0, 0, NULL}};
