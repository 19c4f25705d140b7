/* Walking the tree: expressions to values, statements to output.
 *
 * Names live in scopes, linked lists from the inside out; behind the outermost come the context
 * and the built-in functions, by symbol number. Scopes are made by for (a new one each round),
 * with, call, filter, set and generation blocks, and macros; `if` makes none. A macro's scope hangs
 * below the scope in which the macro was written. Only namespaces carry changes outward.
 *
 * break and continue travel upwards as the positive codes FLOW_*; errors as negative codes.
 * What is undefined prints as nothing, is false, is empty to iterate, and fails at anything else.
 */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/jinja_internal.h"

enum { FLOW_BREAK = 1, FLOW_CONTINUE = 2 };

static int exec(jrun *r, const jnode *x);
static int call_row(jrun *r, const j_row *row, const char *kind, jv v, const jcall *c, jv *out);

/* ---- budgets and errors ---- */

static int fail_v(jrun *r, const char *fmt, va_list ap) PRINTF(2, 0);

static int fail_v(jrun *r, const char *fmt, va_list ap)
{
    char text[800];
    int n = vsnprintf(text, sizeof(text), fmt, ap);
    size_t len = n < 0 ? 0 : (size_t)n < sizeof(text) ? (size_t)n : sizeof(text) - 1;
    text[utf8_valid_prefix(text, len)] = 0;
    return err_set(r->e, ERR_VALUE, "%s, line %u: %s", r->t->where, r->line, text);
}

int j_fail(jrun *r, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int rc = fail_v(r, fmt, ap);
    va_end(ap);
    return rc;
}

int j_limit(jrun *r, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int rc = fail_v(r, fmt, ap);
    va_end(ap);
    r->over = true;
    return rc;
}

static int too_many_bytes(jrun *r)
{
    return j_limit(r, "the template makes more values than the limit of %zu bytes", r->max_bytes);
}

int j_step(jrun *r)
{
    if (++r->steps > r->max_steps)
        return j_limit(r, "the template takes more steps than the limit of %llu",
                       (unsigned long long)r->max_steps);
    return r->bytes > r->max_bytes ? too_many_bytes(r) : 0;
}

int j_work(jrun *r, size_t bytes)
{
    r->steps += bytes / 16;
    return j_step(r);
}

void j_slow(jrun *r, size_t bytes)
{
    r->steps += bytes / 2;
}

int j_room(jrun *r, size_t bytes)
{
    bool fits = bytes <= r->max_bytes && r->bytes <= r->max_bytes - bytes;
    return fits ? 0 : too_many_bytes(r);
}

void *j_alloc(jrun *r, size_t bytes)
{
    r->bytes += bytes + 16;
    return arena_alloc(r->a, bytes);
}

static int undefined(jrun *r, jv v)
{
    return j_fail(r, "'%s' is undefined", v.s ? v.s : "value");
}

/* ---- names ---- */

static jv look_up(const jrun *r, const jsym *sym)
{
    for (const jscope *s = r->scope; s; s = s->up)
        for (const jbind *b = s->first; b; b = b->next)
            if (b->sym == sym) return b->v;
    jv v = r->globals[sym->id];
    return v.t == J_UNDEF ? j_undef(sym->name) : v;
}

static void bind(jrun *r, const jsym *sym, jv v)
{
    for (jbind *b = r->scope->first; b; b = b->next) {
        if (b->sym == sym) {
            b->v = v;
            return;
        }
    }
    jbind *b = j_alloc(r, sizeof(*b));
    b->sym = sym;
    b->v = v;
    b->next = r->scope->first;
    r->scope->first = b;
}

static jscope *push_scope(jrun *r, jscope *up)
{
    jscope *s = j_alloc(r, sizeof(*s));
    s->up = up;
    return s;
}

static int assign(jrun *r, const jnode *target, jv v)
{
    int rc = 0;
    if (target->op == JX_NAME) {
        bind(r, target->sym, v);
    } else if (target->op == JX_ATTR) {
        jv ns;
        TRY(j_eval(r, target->a, &ns));
        if (ns.t != J_NS) return j_fail(r, "only a namespace's attributes can be set");
        if (target->sym->name[0] == '_')
            return j_fail(r, "a namespace takes no names that begin with '_'");
        j_dict_set(r, ns.dict, j_str(target->sym->name, target->sym->n), v);
    } else {
        jlist *l;
        if (v.t == J_UNDEF) return undefined(r, v);
        TRY(j_iter(r, v, &l));
        if (l->n != target->n_kids)
            return j_fail(r, "%zu values cannot be assigned to %zu names", l->n, target->n_kids);
        for (size_t i = 0; i < l->n; i++)
            TRY(assign(r, target->kids[i], l->v[i]));
    }
out:
    return rc;
}

/* ---- attributes and items ---- */

static jv method_value(jrun *r, jv v, const j_row *row)
{
    jfunc *f = j_alloc(r, sizeof(*f));
    f->name = row->name;
    f->row = row;
    f->self = v;
    return (jv){.t = J_FUNC, .fn = f};
}

static bool loop_attr(const jloop *l, const char *s, jv *out)
{
    int64_t i = (int64_t)l->index, n = (int64_t)l->items->n;
    if (!strcmp(s, "index"))
        *out = j_int(i + 1);
    else if (!strcmp(s, "index0"))
        *out = j_int(i);
    else if (!strcmp(s, "revindex"))
        *out = j_int(n - i);
    else if (!strcmp(s, "revindex0"))
        *out = j_int(n - i - 1);
    else if (!strcmp(s, "first"))
        *out = j_bool(i == 0);
    else if (!strcmp(s, "last"))
        *out = j_bool(i + 1 == n);
    else if (!strcmp(s, "length"))
        *out = j_int(n);
    else if (!strcmp(s, "depth"))
        *out = j_int(l->depth0 + 1);
    else if (!strcmp(s, "depth0"))
        *out = j_int(l->depth0);
    else if (!strcmp(s, "previtem"))
        *out = i > 0 ? l->items->v[i - 1] : j_undef("loop.previtem");
    else if (!strcmp(s, "nextitem"))
        *out = i + 1 < n ? l->items->v[i + 1] : j_undef("loop.nextitem");
    else
        return false;
    return true;
}

/* What Python's own objects have beside methods: macros, cyclers, groups, ranges, numbers. */
static bool field_attr(jv v, const char *s, jv *out)
{
    const jlist *l = v.t == J_TUPLE || v.t == J_SEQ ? v.list : NULL;
    bool number = j_is_num(v);
    if (l && l->kind == J_GROUP && (!strcmp(s, "grouper") || !strcmp(s, "list")))
        *out = l->v[s[0] == 'l'];
    else if (l && l->kind == J_RANGE && (!strcmp(s, "start") || !strcmp(s, "stop")))
        *out = j_int(l->range[s[2] == 'o']);
    else if (l && l->kind == J_RANGE && !strcmp(s, "step"))
        *out = j_int(l->range[2]);
    else if (v.t == J_CYCLER && !strcmp(s, "current"))
        *out = v.list->v[v.list->at];
    else if (v.t == J_CYCLER && !strcmp(s, "pos"))
        *out = j_int((int64_t)v.list->at);
    else if (v.t == J_FUNC && v.fn->macro && !strcmp(s, "name"))
        *out = j_strz(v.fn->name);
    else if (number && (!strcmp(s, "real") || (v.t != J_FLOAT && !strcmp(s, "numerator"))))
        *out = v.t == J_BOOL ? j_int(v.b) : v;
    else if (number && !strcmp(s, "imag"))
        *out = v.t == J_FLOAT ? j_float(0) : j_int(0);
    else if (number && v.t != J_FLOAT && !strcmp(s, "denominator"))
        *out = j_int(1);
    else
        return false;
    return true;
}

/* Attributes that Python objects have by themselves: methods, loop fields. A method that would
 * change its object hides a key of its name, and is undefined to the template. */
static bool own_attr(jrun *r, jv v, const char *name, size_t n, jv *out)
{
    bool blocked = false;
    if (v.t == J_LOOP && loop_attr(v.loop, name, out)) return true;
    if (field_attr(v, name, out)) return true;
    const j_row *row = j_find_method(v, name, n, &blocked);
    if (blocked)
        *out = j_undef(name);
    else if (row)
        *out = method_value(r, v, row);
    return row != NULL;
}

/* What every Python object has and the sandbox hides: undefined, also before a key of that name. */
static bool hidden(const char *name)
{
    static const char *const names[] = {
        "__class__",   "__doc__",     "__init__",         "__new__", "__eq__",
        "__ne__",      "__lt__",      "__le__",           "__gt__",  "__ge__",
        "__str__",     "__repr__",    "__hash__",         "__dir__", "__format__",
        "__reduce__",  "__sizeof__",  "__getattribute__", "__len__", "__iter__",
        "__setattr__", "__delattr__", "__subclasshook__"};
    for (size_t i = 0; name[0] == '_' && i < sizeof(names) / sizeof(names[0]); i++)
        if (!strcmp(name, names[i])) return true;
    return false;
}

int j_attr(jrun *r, jv v, const char *name, size_t n, jv *out)
{
    *out = j_undef(name);
    if (hidden(name)) return 0;
    if (v.t == J_UNDEF) return undefined(r, v);
    if (own_attr(r, v, name, n, out)) return 0;
    if ((v.t == J_DICT || v.t == J_NS) && j_dict_gets(v.dict, name, n, out)) return 0;
    *out = j_undef(name);
    return 0;
}

int j_item(jrun *r, jv v, jv key, jv *out)
{
    if (v.t == J_UNDEF) return undefined(r, v);
    if ((v.t == J_DICT || v.t == J_NS) && j_dict_get(v.dict, key, out)) return 0;
    bool indexed = v.t == J_LIST || v.t == J_TUPLE || v.t == J_STR ||
                   (v.t == J_SEQ && v.list->kind == J_RANGE);
    if (indexed && j_is_int(key)) {
        int64_t n, i = key.t == J_INT ? key.i : key.b;
        int rc = j_length(r, v, &n);
        if (rc < 0) return rc;
        if (i < 0 && i >= -n) i += n;
        *out = j_undef(NULL);
        if (i < 0 || i >= n) return 0;
        if (v.t != J_STR) {
            *out = v.list->v[i];
        } else {
            size_t at = j_char_at(v, (size_t)i);
            *out = j_str(v.s + at, j_char_at(j_str(v.s + at, v.n - at), 1));
            out->safe = v.safe;
            return j_work(r, v.n);
        }
        return 0;
    }
    if (key.t == J_STR) {
        jv name = j_copy(r, key.s, key.n);
        if (own_attr(r, v, name.s, name.n, out)) return 0;
        *out = j_undef(name.s);
        return 0;
    }
    *out = j_undef(NULL);
    return 0;
}

/* ---- operators ---- */

static int64_t as_int(jv v)
{
    return v.t == J_BOOL ? v.b : v.i;
}

static double as_float(jv v)
{
    return v.t == J_FLOAT ? v.f : (double)as_int(v);
}

/* Python's divmod for floats: the remainder has the sign of b, the quotient is made from it. */
static double floor_mod(double a, double b, double *quotient)
{
    double m = fmod(a, b), q = (a - m) / b;
    if (m != 0 && (m < 0) != (b < 0)) {
        m += b;
        q -= 1;
    }
    if (m == 0) m = copysign(0, b);
    *quotient = q == 0 ? copysign(0, a / b) : floor(q) + (q - floor(q) > 0.5);
    return m;
}

static int too_large(jrun *r)
{
    return j_limit(r, "an integer above the limit of 64 bits");
}

static int int_power(jrun *r, int64_t a, int64_t b, jv *out)
{
    int64_t v = 1;
    if (b < 0) {
        if (a == 0) return j_fail(r, "division by zero");
        *out = j_float(pow((double)a, (double)b));
        return 0;
    }
    if (a == 0 || a == 1 || a == -1) {
        *out = j_int(b == 0 ? 1 : a == -1 && b % 2 == 0 ? 1 : a);
        return 0;
    }
    for (; b > 0; b--)
        if (__builtin_mul_overflow(v, a, &v)) return too_large(r);
    *out = j_int(v);
    return 0;
}

static int int_binary(jrun *r, uint8_t op, int64_t a, int64_t b, jv *out)
{
    int64_t v = 0;
    bool over = false;
    if ((op == JT_DIV || op == JT_FLOORDIV || op == JT_MOD) && b == 0)
        return j_fail(r, "division by zero");
    switch (op) {
    case JT_ADD:
        over = __builtin_add_overflow(a, b, &v);
        break;
    case JT_SUB:
        over = __builtin_sub_overflow(a, b, &v);
        break;
    case JT_MUL:
        over = __builtin_mul_overflow(a, b, &v);
        break;
    case JT_DIV:
        *out = j_float((double)((long double)a / (long double)b));
        return 0;
    case JT_FLOORDIV:
        over = a == INT64_MIN && b == -1;
        if (!over) v = a / b - (a % b != 0 && (a < 0) != (b < 0));
        break;
    case JT_MOD:
        v = b == -1 ? 0 : a % b;
        if (v != 0 && (v < 0) != (b < 0)) v += b;
        break;
    default:
        return int_power(r, a, b, out);
    }
    if (over) return too_large(r);
    *out = j_int(v);
    return 0;
}

static int float_power(jrun *r, double a, double b, jv *out)
{
    if (a == 0 && b < 0) return j_fail(r, "division by zero");
    if (a < 0 && isfinite(a) && isfinite(b) && b != floor(b))
        return j_fail(r, "complex numbers are not supported");
    *out = j_float(pow(a, b));
    if (isinf(out->f) && isfinite(a) && isfinite(b)) return j_fail(r, "a result out of range");
    return 0;
}

static int float_binary(jrun *r, uint8_t op, double a, double b, jv *out)
{
    double quotient = 0, rest = 0;
    bool divides = op == JT_DIV || op == JT_FLOORDIV || op == JT_MOD;
    if (divides && b == 0) return j_fail(r, "division by zero");
    if (op == JT_POW) return float_power(r, a, b, out);
    if (op == JT_FLOORDIV || op == JT_MOD) rest = floor_mod(a, b, &quotient);
    *out = j_float(op == JT_ADD        ? a + b
                   : op == JT_SUB      ? a - b
                   : op == JT_MUL      ? a * b
                   : op == JT_DIV      ? a / b
                   : op == JT_FLOORDIV ? quotient
                                       : rest);
    return 0;
}

/* s * n and list * n */
static int repeat(jrun *r, jv v, int64_t times, jv *out)
{
    size_t unit = v.t == J_STR ? v.n : v.list->n * sizeof(jv), total;
    if (times < 0) times = 0;
    if (!mem_mul(unit, (size_t)times, &total)) total = SIZE_MAX;
    int rc = j_room(r, total);
    if (rc < 0) return rc;
    if (unit == 0) times = 0;
    if (v.t == J_STR) {
        char *p = j_alloc(r, total + 1);
        for (int64_t i = 0; i < times; i++)
            memcpy(p + (size_t)i * v.n, v.s, v.n);
        *out = j_str(p, total);
        out->safe = v.safe;
        return 0;
    }
    jv l = j_list(r, total / sizeof(jv));
    for (int64_t i = 0; i < times; i++)
        for (size_t k = 0; k < v.list->n; k++)
            j_push(r, l.list, v.list->v[k]);
    l.t = v.t;
    *out = l;
    return 0;
}

/* a + b. Templates build long texts piece by piece, so a long sum gets room behind it: while it is
 * the last that was put there (tails[].n), more goes into that room, and a, whose bytes stay, is
 * not copied again. The room doubles, so that a text of n bytes costs n and not n * n. */
static int append(jrun *r, jv a, jv b, jv *out)
{
    size_t n = a.n + b.n;
    int rc = j_work(r, b.n);
    if (rc < 0) return rc;
    for (int i = 0; i < 4; i++) {
        if (a.n == 0 || r->tails[i].p != a.s || r->tails[i].n != a.n || n >= r->tails[i].cap)
            continue;
        if (b.n) memcpy(r->tails[i].p + a.n, b.s, b.n);
        r->tails[i].n = n;
        *out = j_str(a.s, n);
        return 0;
    }
    size_t cap = n < 512 ? n + 1 : n * 2;
    if ((rc = j_room(r, cap)) < 0) return rc;
    char *p = j_alloc(r, cap);
    if (a.n) memcpy(p, a.s, a.n);
    if (b.n) memcpy(p + a.n, b.s, b.n);
    if (n >= 512) {
        unsigned i = r->next_tail++ % 4;
        r->tails[i].p = p;
        r->tails[i].n = n;
        r->tails[i].cap = cap;
    }
    *out = j_str(p, n);
    return 0;
}

static int add_sequences(jrun *r, jv a, jv b, jv *out)
{
    int rc;
    if (a.t == J_STR) {
        bool safe = a.safe || b.safe;
        if (safe && (rc = j_escape(r, a, &a)) < 0) return rc;
        if (safe && (rc = j_escape(r, b, &b)) < 0) return rc;
        if ((rc = append(r, a, b, out)) < 0) return rc;
        out->safe = safe;
        return 0;
    }
    if ((rc = j_room(r, (a.list->n + b.list->n) * sizeof(jv))) < 0) return rc;
    jv l = j_list(r, a.list->n + b.list->n);
    for (size_t i = 0; i < a.list->n; i++)
        j_push(r, l.list, a.list->v[i]);
    for (size_t i = 0; i < b.list->n; i++)
        j_push(r, l.list, b.list->v[i]);
    l.t = a.t;
    *out = l;
    return 0;
}

/* A safe format escapes what goes into it, numbers excepted. */
static int percent(jrun *r, jv a, jv b, jv *out)
{
    int rc = 0;
    if (a.safe && b.t == J_TUPLE) {
        jv l = j_list(r, b.list->n);
        for (size_t i = 0; i < b.list->n; i++) {
            jv x = b.list->v[i];
            if (!j_is_num(x)) TRY(j_escape(r, x, &x));
            j_push(r, l.list, x);
        }
        l.t = J_TUPLE;
        b = l;
    } else if (a.safe && !j_is_num(b) && b.t != J_DICT) {
        TRY(j_escape(r, b, &b));
    }
    TRY(j_percent(r, a, b, out));
    out->safe = a.safe;
out:
    return rc;
}

int j_binary(jrun *r, uint8_t op, jv a, jv b, jv *out)
{
    bool seq_a = a.t == J_STR || a.t == J_LIST || a.t == J_TUPLE;
    bool seq_b = b.t == J_STR || b.t == J_LIST || b.t == J_TUPLE;
    if (j_is_num(a) && j_is_num(b)) {
        if (a.t == J_FLOAT || b.t == J_FLOAT)
            return float_binary(r, op, as_float(a), as_float(b), out);
        return int_binary(r, op, as_int(a), as_int(b), out);
    }
    if (op == JT_MUL && ((seq_a && b.t == J_BIG) || (seq_b && a.t == J_BIG))) return too_large(r);
    if (op == JT_ADD && seq_a && a.t == b.t) return add_sequences(r, a, b, out);
    if (op == JT_MUL && seq_a && (b.t == J_INT || b.t == J_BOOL))
        return repeat(r, a, as_int(b), out);
    if (op == JT_MUL && seq_b && (a.t == J_INT || a.t == J_BOOL))
        return repeat(r, b, as_int(a), out);
    if (op == JT_MOD && a.t == J_STR) return percent(r, a, b, out);
    if ((a.t == J_BIG && (j_is_num(b) || b.t == J_BIG)) || (b.t == J_BIG && j_is_num(a)))
        return too_large(r);
    if (a.t == J_UNDEF) return undefined(r, a);
    if (b.t == J_UNDEF) return undefined(r, b);
    return j_fail(r, "%s and %s do not go together here", j_type_name(a), j_type_name(b));
}

static int compare_one(jrun *r, uint8_t op, jv a, jv b, bool *out)
{
    int rc;
    bool v = false;
    switch (op) {
    case JT_EQ:
    case JT_NE:
        rc = j_equal(r, a, b, &v);
        *out = v == (op == JT_EQ);
        return rc;
    case JT_IN:
    case JT_NOT_IN:
        rc = j_contains(r, b, a, &v);
        *out = v == (op == JT_IN);
        return rc;
    default:
        if ((j_is_num(a) && a.t == J_FLOAT && isnan(a.f)) ||
            (j_is_num(b) && b.t == J_FLOAT && isnan(b.f))) {
            *out = false;
            return 0;
        }
        rc = op == JT_LT || op == JT_GE ? j_less(r, a, b, &v) : j_less(r, b, a, &v);
        *out = v == (op == JT_LT || op == JT_GT);
        return rc;
    }
}

static int compare(jrun *r, const jnode *x, jv *out)
{
    int rc = 0;
    jv a, b;
    bool holds = true;
    TRY(j_eval(r, x->a, &a));
    for (size_t i = 0; i < x->n_kids && holds; i++) {
        TRY(j_eval(r, x->kids[i], &b));
        TRY(compare_one(r, x->ops[i], a, b, &holds));
        a = b;
    }
    *out = j_bool(holds);
out:
    return rc;
}

/* ---- calls ---- */

typedef struct actual {
    jv *v, *names, *kw;
    size_t n, n_kw;
} actual;

static int too_many_args(jrun *r)
{
    return j_limit(r, "a call with more arguments than the limit of %d", J_MAX_ARGS);
}

static int add_kw(jrun *r, actual *x, jv name, jv v)
{
    for (size_t i = 0; i < x->n_kw; i++)
        if (j_is_str(name, x->names[i].s) && x->names[i].n == name.n)
            return j_fail(r, "argument '%s' is given twice", x->names[i].s);
    if (x->n_kw == J_MAX_ARGS) return too_many_args(r);
    x->names[x->n_kw] = name;
    x->kw[x->n_kw++] = v;
    return 0;
}

static int spread(jrun *r, actual *x, jv v, int stars)
{
    int rc = 0;
    if (stars == 1) {
        jlist *l;
        TRY(j_iter(r, v, &l));
        if (l->n > J_MAX_ARGS - x->n) return too_many_args(r);
        for (size_t i = 0; i < l->n; i++)
            x->v[x->n++] = l->v[i];
        return 0;
    }
    if (v.t != J_DICT) return j_fail(r, "'**' needs a dictionary");
    for (size_t i = 0; i < v.dict->n; i++) {
        if (v.dict->keys[i].t != J_STR) return j_fail(r, "names of arguments must be strings");
        TRY(add_kw(r, x, j_copy(r, v.dict->keys[i].s, v.dict->keys[i].n), v.dict->vals[i]));
    }
out:
    return rc;
}

static int arguments(jrun *r, const jargs *args, jcall *c)
{
    int rc = 0;
    actual x = {0};
    memset(c, 0, sizeof(*c));
    if (args->n == 0) return 0;
    bool stars = false;
    for (size_t i = 0; i < args->n; i++)
        stars = stars || args->star[i];
    size_t cap = stars ? J_MAX_ARGS : args->n;
    x.v = j_alloc(r, cap * 3 * sizeof(jv));
    x.names = x.v + cap;
    x.kw = x.names + cap;
    for (size_t i = 0; i < args->n; i++) {
        jv v;
        TRY(j_eval(r, args->v[i], &v));
        if (args->star[i])
            TRY(spread(r, &x, v, args->star[i]));
        else if (args->names[i])
            TRY(add_kw(r, &x, j_str(args->names[i]->name, args->names[i]->n), v));
        else if (x.n == J_MAX_ARGS)
            return too_many_args(r);
        else
            x.v[x.n++] = v;
    }
    *c = (jcall){.n = x.n, .n_kw = x.n_kw, .v = x.v, .kw_names = x.names, .kw = x.kw};
out:
    return rc;
}

bool j_arg(const jcall *c, size_t pos, const char *name, jv *out)
{
    if (pos < c->n) {
        *out = c->v[pos];
        return true;
    }
    for (size_t i = 0; i < c->n_kw; i++) {
        if (j_is_str(c->kw_names[i], name)) {
            *out = c->kw[i];
            return true;
        }
    }
    return false;
}

int j_arg_int(jrun *r, const jcall *c, size_t pos, const char *name, int64_t *out)
{
    jv v;
    if (!j_arg(c, pos, name, &v)) return 0;
    if (v.t != J_INT && v.t != J_BOOL)
        return j_fail(r, "argument '%s' must be an integer, found %s", name, j_type_name(v));
    *out = as_int(v);
    return 1;
}

/* Runs statements into a string of its own. */
static int capture(jrun *r, const jnode *x, jv *out)
{
    buf text = {0}, *before = r->out;
    r->out = &text;
    int rc = exec(r, x);
    r->out = before;
    if (rc < 0)
        buf_free(&text);
    else
        *out = j_take(r, &text);
    return rc;
}

/* Takes the named argument of a macro's parameter out of the rest. */
static bool take_kw(jdict *rest, const jsym *name, jv *out)
{
    for (size_t i = 0; i < rest->n; i++) {
        if (rest->keys[i].n != name->n || memcmp(rest->keys[i].s, name->name, name->n) != 0)
            continue;
        *out = rest->vals[i];
        for (rest->n--; i < rest->n; i++) {
            rest->keys[i] = rest->keys[i + 1];
            rest->vals[i] = rest->vals[i + 1];
        }
        return true;
    }
    return false;
}

/* What a macro gets beyond its parameters, an error unless its body names it: caller, the other
 * named arguments as kwargs, the other positional ones as varargs. */
static int bind_rest(jrun *r, const jnode *m, const jcall *c, jdict *named)
{
    const jsym *caller = j_sym_find(r->t, "caller", 6), *kwargs = j_sym_find(r->t, "kwargs", 6);
    const jsym *varargs = j_sym_find(r->t, "varargs", 7);
    if (m->bin & J_USES_CALLER) {
        jv v = j_undef("caller");
        take_kw(named, caller, &v);
        bind(r, caller, v);
    }
    if (m->bin & J_USES_KWARGS)
        bind(r, kwargs, (jv){.t = J_DICT, .dict = named});
    else if (named->n)
        return j_fail(r, "macro '%s' takes no argument '%.*s'", m->sym->name, (int)named->keys[0].n,
                      named->keys[0].s);
    if (m->bin & J_USES_VARARGS) {
        jv rest = j_list(r, 0);
        for (size_t i = m->args.n; i < c->n; i++)
            j_push(r, rest.list, c->v[i]);
        rest.t = J_TUPLE;
        bind(r, varargs, rest);
    } else if (c->n > m->args.n) {
        return j_fail(r, "macro '%s' takes not more than %zu arguments", m->sym->name, m->args.n);
    }
    return 0;
}

static int call_macro(jrun *r, const jfunc *f, const jcall *c, jv *out)
{
    const jnode *m = f->macro;
    int rc = 0;
    jscope *before = r->scope;
    bool given[J_MAX_ARGS] = {0}, autoescape = r->autoescape;
    jv named = j_dict(r), v;
    for (size_t i = 0; i < c->n_kw; i++)
        j_dict_set(r, named.dict, c->kw_names[i], c->kw[i]);
    r->scope = push_scope(r, f->scope);
    r->autoescape = f->autoescape;
    for (size_t i = 0; i < m->args.n; i++) {
        v = i < c->n ? c->v[i] : j_undef(m->args.names[i]->name);
        given[i] = i < c->n || take_kw(named.dict, m->args.names[i], &v);
        bind(r, m->args.names[i], v);
    }
    TRY(bind_rest(r, m, c, named.dict));
    for (size_t i = 0; i < m->args.n; i++) {
        if (given[i] || !m->args.v[i]) continue;
        TRY(j_eval(r, m->args.v[i], &v));
        bind(r, m->args.names[i], v);
    }
    TRY(capture(r, m->d, out));
    out->safe = autoescape;
out:
    r->scope = before;
    r->autoescape = autoescape;
    return rc;
}

static int run_loop(jrun *r, const jnode *x, jv items, int64_t depth0);

static int call_loop(jrun *r, const jloop *l, const jcall *c, jv *out)
{
    int rc = 0;
    buf text = {0}, *before = r->out;
    jscope *scope = r->scope;
    if (!l->node->flag) return j_fail(r, "a loop can call itself only when it is recursive");
    if (c->n != 1) return j_fail(r, "loop() takes one argument");
    r->out = &text;
    r->scope = l->scope;
    rc = run_loop(r, l->node, c->v[0], l->depth0 + 1);
    r->out = before;
    r->scope = scope;
    if (rc < 0)
        buf_free(&text);
    else
        *out = j_take(r, &text);
    return rc;
}

/* What a method of a safe string gives is safe. */
static void keep_safe(jv *v)
{
    if (v->t == J_STR) v->safe = true;
    for (size_t i = 0; (v->t == J_LIST || v->t == J_TUPLE) && i < v->list->n; i++)
        if (v->list->v[i].t == J_STR) v->list->v[i].safe = true;
}

int j_call(jrun *r, jv f, const jcall *c, jv *out)
{
    int rc = 0;
    if (f.t == J_UNDEF) return undefined(r, f);
    if (f.t != J_FUNC && f.t != J_LOOP)
        return j_fail(r, "a value of type %s cannot be called", j_type_name(f));
    if (++r->depth > J_MAX_DEPTH) {
        rc = j_limit(r, "calls nested deeper than the limit of %d", J_MAX_DEPTH);
    } else if (f.t == J_LOOP) {
        rc = call_loop(r, f.loop, c, out);
    } else if (f.fn->macro) {
        rc = call_macro(r, f.fn, c, out);
    } else {
        rc = call_row(r, f.fn->row, "function", f.fn->self, c, out);
        if (rc >= 0 && f.fn->self.t == J_STR && f.fn->self.safe) keep_safe(out);
    }
    r->depth--;
    return rc;
}

/* Is the name one of the comma-separated ones? *at = its place. */
static bool in_params(const char *params, jv name, size_t *at)
{
    *at = 0;
    for (const char *p = params; *p; p++) {
        size_t n = strcspn(p, ",");
        if (n == name.n && !memcmp(p, name.s, n)) return true;
        (*at)++;
        p += n;
        if (!*p) break;
    }
    return false;
}

int j_check_args(jrun *r, const j_row *row, const char *kind, const jcall *c)
{
    size_t n = c->n + c->n_kw, at;
    if (n < row->min || n > row->max)
        return j_fail(r, "%s '%s' got %zu arguments, takes %d to %d", kind, row->name, n, row->min,
                      row->max);
    if (row->params && row->params[0] == '*') return 0;
    for (size_t i = 0; i < c->n_kw; i++) {
        if (!row->params || !in_params(row->params, c->kw_names[i], &at))
            return j_fail(r, "%s '%s' has no parameter '%.*s'", kind, row->name,
                          (int)c->kw_names[i].n, c->kw_names[i].s);
        if (at < c->n)
            return j_fail(r, "argument '%.*s' of '%s' is given twice", (int)c->kw_names[i].n,
                          c->kw_names[i].s, row->name);
    }
    return 0;
}

static int call_row(jrun *r, const j_row *row, const char *kind, jv v, const jcall *c, jv *out)
{
    int rc = j_check_args(r, row, kind, c);
    if (rc >= 0 && v.t == J_STR) rc = j_work(r, v.n);
    return rc < 0 ? rc : row->fn(r, v, c, out);
}

int j_filter(jrun *r, const char *name, size_t n, jv v, const jcall *c, jv *out)
{
    const j_row *row = j_find_filter(name, n);
    if (!row) return j_fail(r, "there is no filter '%.*s'", (int)(n < 60 ? n : 60), name);
    return call_row(r, row, "filter", v, c, out);
}

int j_test(jrun *r, const char *name, size_t n, jv v, const jcall *c, bool *out)
{
    const j_row *row = j_find_test(name, n);
    jv holds;
    if (!row) return j_fail(r, "there is no test '%.*s'", (int)(n < 60 ? n : 60), name);
    int rc = call_row(r, row, "test", v, c, &holds);
    if (rc >= 0) *out = j_truth(holds);
    return rc;
}

static int eval_filter(jrun *r, const jnode *x, jv *out)
{
    int rc = 0;
    jv v = r->input;
    jcall c;
    if (x->a) TRY(j_eval(r, x->a, &v));
    if (!x->row) return j_fail(r, "there is no filter '%s'", x->sym->name);
    TRY(arguments(r, &x->args, &c));
    r->line = x->line;
    TRY(call_row(r, x->row, "filter", v, &c, out));
out:
    return rc;
}

static int eval_test(jrun *r, const jnode *x, jv *out)
{
    int rc = 0;
    jv v;
    jcall c;
    TRY(j_eval(r, x->a, &v));
    if (!x->row) return j_fail(r, "there is no test '%s'", x->sym->name);
    TRY(arguments(r, &x->args, &c));
    TRY(call_row(r, x->row, "test", v, &c, out));
    *out = j_bool(j_truth(*out) != x->flag);
out:
    return rc;
}

/* ---- expressions ---- */

static int eval_items(jrun *r, const jnode *x, jv *out)
{
    int rc = 0;
    jv v = j_list(r, x->n_kids), item;
    for (size_t i = 0; i < x->n_kids; i++) {
        TRY(j_eval(r, x->kids[i], &item));
        j_push(r, v.list, item);
    }
    v.t = x->op == JX_LIST ? J_LIST : J_TUPLE;
    *out = v;
out:
    return rc;
}

static int eval_dict(jrun *r, const jnode *x, jv *out)
{
    int rc = 0;
    jv v = j_dict(r), key, item;
    for (size_t i = 0; i + 1 < x->n_kids; i += 2) {
        TRY(j_eval(r, x->kids[i], &key));
        TRY(j_eval(r, x->kids[i + 1], &item));
        if (!j_hashable(key)) return j_fail(r, "%s cannot be a key", j_type_name(key));
        j_dict_set(r, v.dict, key, item);
    }
    *out = v;
out:
    return rc;
}

static int eval_slice(jrun *r, const jnode *x, jv *out)
{
    int rc = 0;
    jv v, part[3] = {j_none(), j_none(), j_none()};
    const jnode *nodes[3] = {x->b, x->c, x->d};
    TRY(j_eval(r, x->a, &v));
    for (int i = 0; i < 3; i++)
        if (nodes[i]) TRY(j_eval(r, nodes[i], &part[i]));
    TRY(j_slice(r, v, part[0], part[1], part[2], out));
out:
    return rc;
}

/* A ~ b ~ ...: a long string in front is continued, the rest is put together first. */
static int eval_concat(jrun *r, const jnode *x, jv *out)
{
    int rc = 0;
    buf b = {0};
    jv first = j_strz(""), v;
    for (size_t i = 0; i < x->n_kids; i++) {
        TRY(j_eval(r, x->kids[i], &v));
        if (r->autoescape) TRY(j_escape(r, v, &v));
        if (i == 0 && v.t == J_STR)
            first = v;
        else
            TRY(j_print(r, &b, v));
    }
    TRY(append(r, first, j_str(b.data, b.len), out));
    out->safe = r->autoescape;
out:
    buf_free(&b);
    return rc;
}

static int eval_sign(jrun *r, const jnode *x, jv *out)
{
    jv v;
    int rc = j_eval(r, x->a, &v);
    if (rc < 0) return rc;
    if (v.t == J_UNDEF) return undefined(r, v);
    if (v.t == J_BIG) return x->op == JX_POS ? (*out = v, 0) : too_large(r);
    if (!j_is_num(v)) return j_fail(r, "a sign before a value of type %s", j_type_name(v));
    if (v.t == J_FLOAT)
        *out = j_float(x->op == JX_NEG ? -v.f : v.f);
    else
        return int_binary(r, x->op == JX_NEG ? JT_SUB : JT_ADD, 0, as_int(v), out);
    return 0;
}

static int eval_call(jrun *r, const jnode *x, jv *out)
{
    int rc = 0;
    jv f;
    jcall c;
    TRY(j_eval(r, x->a, &f));
    TRY(arguments(r, &x->args, &c));
    r->line = x->line;
    TRY(j_call(r, f, &c, out));
out:
    return rc;
}

static int eval_logic(jrun *r, const jnode *x, jv *out)
{
    int rc = j_eval(r, x->a, out);
    if (rc < 0) return rc;
    if (x->op == JX_NOT) {
        *out = j_bool(!j_truth(*out));
        return 0;
    }
    return j_truth(*out) == (x->op == JX_AND) ? j_eval(r, x->b, out) : 0;
}

static int eval_cond(jrun *r, const jnode *x, jv *out)
{
    jv v;
    int rc = j_eval(r, x->a, &v);
    if (rc < 0) return rc;
    if (j_truth(v)) return j_eval(r, x->b, out);
    *out = j_undef(NULL);
    return x->c ? j_eval(r, x->c, out) : 0;
}

static int eval_pair(jrun *r, const jnode *x, jv *out)
{
    int rc = 0;
    jv a, b;
    TRY(j_eval(r, x->a, &a));
    TRY(j_eval(r, x->b, &b));
    r->line = x->line;
    TRY(x->op == JX_ITEM ? j_item(r, a, b, out) : j_binary(r, x->bin, a, b, out));
out:
    return rc;
}

static int eval_any(jrun *r, const jnode *x, jv *out)
{
    jv v;
    int rc;
    switch (x->op) {
    case JX_CONST:
        *out = x->val;
        return 0;
    case JX_NAME:
        *out = look_up(r, x->sym);
        return 0;
    case JX_ATTR:
        rc = j_eval(r, x->a, &v);
        r->line = x->line;
        return rc < 0 ? rc : j_attr(r, v, x->sym->name, x->sym->n, out);
    case JX_ITEM:
    case JX_BIN:
        return eval_pair(r, x, out);
    case JX_LIST:
    case JX_TUPLE:
        return eval_items(r, x, out);
    case JX_DICT:
        return eval_dict(r, x, out);
    case JX_SLICE:
        return eval_slice(r, x, out);
    case JX_CALL:
        return eval_call(r, x, out);
    case JX_FILTER:
        return eval_filter(r, x, out);
    case JX_TEST:
        return eval_test(r, x, out);
    case JX_NOT:
    case JX_AND:
    case JX_OR:
        return eval_logic(r, x, out);
    case JX_NEG:
    case JX_POS:
        return eval_sign(r, x, out);
    case JX_COND:
        return eval_cond(r, x, out);
    case JX_CONCAT:
        return eval_concat(r, x, out);
    default:
        return compare(r, x, out);
    }
}

int j_eval(jrun *r, const jnode *x, jv *out)
{
    int rc = j_step(r);
    if (rc < 0) return rc;
    r->line = x->line;
    if (++r->depth > J_MAX_DEPTH)
        rc = j_limit(r, "expressions nested deeper than the limit of %d", J_MAX_DEPTH);
    else
        rc = eval_any(r, x, out);
    r->depth--;
    return rc;
}

/* ---- statements ---- */

static int exec_inner(jrun *r, const jnode *x, jscope *scope)
{
    jscope *before = r->scope;
    r->scope = scope;
    int rc = exec(r, x);
    r->scope = before;
    return rc;
}

/* The items that the loop's own `if` lets through. */
static int loop_items(jrun *r, const jnode *x, jv from, jlist **out)
{
    int rc = j_iter(r, from, out);
    if (rc < 0 || !x->c) return rc;
    jlist *all = *out;
    jv kept = j_list(r, 0), holds;
    jscope *before = r->scope;
    for (size_t i = 0; i < all->n; i++) {
        r->scope = push_scope(r, before);
        TRY(assign(r, x->a, all->v[i]));
        TRY(j_eval(r, x->c, &holds));
        if (j_truth(holds)) j_push(r, kept.list, all->v[i]);
    }
    *out = kept.list;
out:
    r->scope = before;
    return rc;
}

static int run_loop(jrun *r, const jnode *x, jv from, int64_t depth0)
{
    int rc = 0;
    jscope *before = r->scope;
    const jsym *loop_name = j_sym_find(r->t, "loop", 4);
    bool complete = false;
    jloop *l = j_alloc(r, sizeof(*l));
    TRY(loop_items(r, x, from, &l->items));
    l->depth0 = depth0;
    l->node = x;
    l->scope = before;
    for (l->index = 0; l->index < l->items->n; l->index++) {
        TRY(j_step(r));
        r->scope = push_scope(r, before);
        if (loop_name) bind(r, loop_name, (jv){.t = J_LOOP, .loop = l});
        TRY(assign(r, x->a, l->items->v[l->index]));
        TRY(exec(r, x->d));
        if (rc == FLOW_BREAK) break;
        complete = complete || rc == 0;
    }
    r->scope = before;
    rc = 0;
    if (!complete && x->n_kids) /* as Jinja: also when every round ended early */
        TRY(exec_inner(r, x->kids[0], push_scope(r, before)));
out:
    r->scope = before;
    return rc;
}

static int exec_if(jrun *r, const jnode *x)
{
    for (; x && x->op == JS_IF; x = x->c) {
        jv v;
        int rc = j_eval(r, x->a, &v);
        if (rc < 0) return rc;
        if (j_truth(v)) return exec(r, x->b);
    }
    return x ? exec(r, x) : 0;
}

static jv macro_value(jrun *r, const jnode *m)
{
    jfunc *f = j_alloc(r, sizeof(*f));
    f->name = m->sym->name;
    f->macro = m;
    f->scope = r->scope;
    f->autoescape = r->autoescape;
    return (jv){.t = J_FUNC, .fn = f};
}

static int exec_call(jrun *r, const jnode *x)
{
    int rc = 0;
    jv f, v;
    jcall c;
    TRY(j_eval(r, x->a->a, &f));
    TRY(arguments(r, &x->a->args, &c));
    if (f.t != J_FUNC || !f.fn->macro) return j_fail(r, "a call block needs a macro");
    if (c.n_kw >= J_MAX_ARGS) return too_many_args(r);
    jv *names = j_alloc(r, (c.n_kw + 1) * 2 * sizeof(jv)), *kw = names + c.n_kw + 1;
    for (size_t i = 0; i < c.n_kw; i++) {
        names[i] = c.kw_names[i];
        kw[i] = c.kw[i];
    }
    names[c.n_kw] = j_strz("caller");
    kw[c.n_kw] = macro_value(r, x->b);
    jcall with = {.n = c.n, .v = c.v, .n_kw = c.n_kw + 1, .kw_names = names, .kw = kw};
    TRY(j_call(r, f, &with, &v));
    TRY(j_print(r, r->out, v));
out:
    return rc;
}

/* The body of a filter block or block assignment, through its filters. */
static int filtered(jrun *r, const jnode *filters, const jnode *body, jv *out)
{
    jscope *before = r->scope;
    r->scope = push_scope(r, before);
    int rc = capture(r, body, out);
    r->scope = before;
    out->safe = r->autoescape;
    if (rc < 0 || !filters) return rc;
    jv outer = r->input;
    r->input = *out;
    rc = j_eval(r, filters, out);
    r->input = outer;
    return rc;
}

static int exec_with(jrun *r, const jnode *x)
{
    int rc = 0;
    jscope *before = r->scope, *inner = push_scope(r, before);
    for (size_t i = 0; i < x->n_kids; i++) {
        jv v;
        TRY(j_eval(r, x->args.v[i], &v));
        r->scope = inner;
        rc = assign(r, x->kids[i], v);
        r->scope = before;
        TRY(rc);
    }
    TRY(exec_inner(r, x->d, inner));
out:
    return rc;
}

static int exec_autoescape(jrun *r, const jnode *x)
{
    jv v;
    bool before = r->autoescape;
    int rc = j_eval(r, x->a, &v);
    if (rc < 0) return rc;
    r->autoescape = j_truth(v);
    rc = exec_inner(r, x->d, push_scope(r, r->scope));
    r->autoescape = before;
    return rc;
}

static int exec_value(jrun *r, const jnode *x)
{
    int rc = 0;
    jv v;
    switch (x->op) {
    case JS_PRINT:
        TRY(j_eval(r, x->a, &v));
        if (r->autoescape) TRY(j_escape(r, v, &v));
        TRY(j_print(r, r->out, v));
        break;
    case JS_SET:
        TRY(j_eval(r, x->b, &v));
        TRY(assign(r, x->a, v));
        break;
    case JS_SETBLOCK:
        TRY(filtered(r, x->c, x->b, &v));
        TRY(assign(r, x->a, v));
        break;
    case JS_FILTERBLOCK:
        TRY(filtered(r, x->a, x->b, &v));
        if (v.t != J_STR) return j_fail(r, "a filter block that gives %s", j_type_name(v));
        TRY(j_print(r, r->out, v));
        break;
    default:
        TRY(j_eval(r, x->b, &v));
        TRY(run_loop(r, x, v, 0));
    }
out:
    return rc;
}

static int exec_one(jrun *r, const jnode *x)
{
    switch (x->op) {
    case JS_TEXT:
        return j_print(r, r->out, x->val);
    case JS_IF:
        return exec_if(r, x);
    case JS_MACRO:
        bind(r, x->sym, macro_value(r, x));
        return 0;
    case JS_CALLBLOCK:
        return exec_call(r, x);
    case JS_WITH:
        return exec_with(r, x);
    case JS_BLOCK:
        return exec_inner(r, x->d, push_scope(r, r->root));
    case JS_AUTOESCAPE:
        return exec_autoescape(r, x);
    case JS_BREAK:
        return FLOW_BREAK;
    case JS_CONTINUE:
        return FLOW_CONTINUE;
    default:
        return exec_value(r, x);
    }
}

static int exec(jrun *r, const jnode *x)
{
    int rc = 0;
    if (++r->depth > J_MAX_DEPTH)
        rc = j_limit(r, "blocks nested deeper than the limit of %d", J_MAX_DEPTH);
    for (size_t i = 0; rc == 0 && i < x->n_kids; i++) {
        r->line = x->kids[i]->line;
        if ((rc = j_step(r)) >= 0) rc = exec_one(r, x->kids[i]);
    }
    r->depth--;
    return rc;
}

/* ---- a whole render ---- */

static void bind_globals(jrun *r, const json *context)
{
    for (const j_row *g = j_globals; g->name; g++) {
        const jsym *sym = j_sym_find(r->t, g->name, strlen(g->name));
        if (sym) r->globals[sym->id] = method_value(r, j_none(), g);
    }
    for (const json *k = context ? context->child : NULL; k; k = k->next) {
        const jsym *sym = k->string ? j_sym_find(r->t, k->string, strlen(k->string)) : NULL;
        if (sym) r->globals[sym->id] = j_from_json(r, k, 0);
    }
}

int jinja_render(const jtmpl *t, const json *context, uint64_t max_steps, size_t max_bytes,
                 buf *out, err *e)
{
    buf text = {0};
    jrun r = {.t = t,
              .a = arena_make(),
              .e = e,
              .out = &text,
              .line = 1,
              .max_steps = max_steps,
              .max_bytes = max_bytes};
    r.globals = j_alloc(&r, (t->n_syms + 1) * sizeof(jv));
    r.scope = r.root = push_scope(&r, NULL);
    bind_globals(&r, context);
    for (size_t i = 0; i < 256; i++) /* see note_uses in jinja_stmt.c */
        for (const jsym *s = t->buckets[i]; s; s = s->next)
            if (s->use == J_SYM_SET) bind(&r, s, j_undef(s->name));
    int rc = exec(&r, t->body);
    if (rc >= 0) buf_add(out, text.data ? text.data : "", text.len);
    buf_free(&text);
    arena_drop(r.a);
    return rc < 0 ? rc : 0;
}
