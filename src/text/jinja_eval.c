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

/* ---- budgets and errors ---- */

int j_fail(jrun *r, const char *fmt, ...)
{
    char text[800];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    size_t len = n < 0 ? 0 : (size_t)n < sizeof(text) ? (size_t)n : sizeof(text) - 1;
    text[utf8_valid_prefix(text, len)] = 0;
    return err_set(r->e, ERR_VALUE, "%s, line %u: %s", r->t->where, r->line, text);
}

int j_step(jrun *r)
{
    if (++r->steps > r->max_steps)
        return j_fail(r, "the template takes more than %llu steps",
                      (unsigned long long)r->max_steps);
    if (r->bytes > J_MAX_BYTES)
        return j_fail(r, "the template makes more than %zu bytes of values", J_MAX_BYTES);
    return 0;
}

int j_room(jrun *r, size_t bytes)
{
    if (bytes > J_MAX_BYTES || r->bytes > J_MAX_BYTES - bytes)
        return j_fail(r, "the template makes more than %zu bytes of values", J_MAX_BYTES);
    return 0;
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

static jv method_value(jrun *r, jv v, const j_row *row, bool blocked)
{
    jfunc *f = j_alloc(r, sizeof(*f));
    f->name = row->name;
    f->native = row->fn;
    f->self = v;
    f->blocked = blocked;
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

/* Attributes that Python objects have by themselves: methods, loop fields. */
static bool own_attr(jrun *r, jv v, const char *name, size_t n, jv *out)
{
    bool blocked = false;
    if (v.t == J_LOOP && loop_attr(v.loop, name, out)) return true;
    const j_row *row = j_find_method(v, name, n, &blocked);
    if (row) *out = method_value(r, v, row, blocked);
    return row != NULL;
}

int j_attr(jrun *r, jv v, const char *name, size_t n, jv *out)
{
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
    if ((v.t == J_LIST || v.t == J_TUPLE || v.t == J_STR) && (key.t == J_INT || key.t == J_BOOL)) {
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

static double floor_mod(double a, double b)
{
    double m = fmod(a, b);
    if (m != 0 && (m < 0) != (b < 0)) m += b;
    return m;
}

static int int_power(jrun *r, int64_t a, int64_t b, jv *out)
{
    int64_t v = 1;
    if (b < 0) {
        *out = j_float(pow((double)a, (double)b));
        return a == 0 ? j_fail(r, "division by zero") : 0;
    }
    if (a == 0 || a == 1 || a == -1) {
        *out = j_int(b == 0 ? 1 : a == -1 && b % 2 == 0 ? 1 : a);
        return 0;
    }
    for (; b > 0; b--)
        if (__builtin_mul_overflow(v, a, &v)) return j_fail(r, "an integer larger than 64 bits");
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
        *out = j_float((double)a / (double)b);
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
    if (over) return j_fail(r, "an integer larger than 64 bits");
    *out = j_int(v);
    return 0;
}

static int float_binary(jrun *r, uint8_t op, double a, double b, jv *out)
{
    if ((op == JT_DIV || op == JT_FLOORDIV || op == JT_MOD) && b == 0)
        return j_fail(r, "division by zero");
    double v = op == JT_ADD        ? a + b
               : op == JT_SUB      ? a - b
               : op == JT_MUL      ? a * b
               : op == JT_DIV      ? a / b
               : op == JT_FLOORDIV ? floor(a / b)
               : op == JT_MOD      ? floor_mod(a, b)
                                   : pow(a, b);
    *out = j_float(v);
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

static int add_sequences(jrun *r, jv a, jv b, jv *out)
{
    int rc;
    if (a.t == J_STR) {
        bool safe = a.safe || b.safe;
        if (safe && !a.safe && (rc = j_escape(r, a, &a)) < 0) return rc;
        if (safe && !b.safe && (rc = j_escape(r, b, &b)) < 0) return rc;
        if ((rc = j_room(r, a.n + b.n)) < 0) return rc;
        char *p = j_alloc(r, a.n + b.n + 1);
        if (a.n) memcpy(p, a.s, a.n);
        if (b.n) memcpy(p + a.n, b.s, b.n);
        *out = j_str(p, a.n + b.n);
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

int j_binary(jrun *r, uint8_t op, jv a, jv b, jv *out)
{
    bool seq_a = a.t == J_STR || a.t == J_LIST || a.t == J_TUPLE;
    bool seq_b = b.t == J_STR || b.t == J_LIST || b.t == J_TUPLE;
    if (j_is_num(a) && j_is_num(b)) {
        if (a.t == J_FLOAT || b.t == J_FLOAT)
            return float_binary(r, op, as_float(a), as_float(b), out);
        return int_binary(r, op, as_int(a), as_int(b), out);
    }
    if (op == JT_ADD && seq_a && a.t == b.t) return add_sequences(r, a, b, out);
    if (op == JT_MUL && seq_a && (b.t == J_INT || b.t == J_BOOL))
        return repeat(r, a, as_int(b), out);
    if (op == JT_MUL && seq_b && (a.t == J_INT || a.t == J_BOOL))
        return repeat(r, b, as_int(a), out);
    if (op == JT_MOD && a.t == J_STR) {
        jcall c = {.n = 1, .v = &b};
        return j_filter(r, "format", 6, a, &c, out);
    }
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

static int add_kw(jrun *r, actual *x, jv name, jv v)
{
    for (size_t i = 0; i < x->n_kw; i++)
        if (j_is_str(name, x->names[i].s) && x->names[i].n == name.n)
            return j_fail(r, "argument '%s' is given twice", x->names[i].s);
    if (x->n_kw == J_MAX_ARGS) return j_fail(r, "too many arguments");
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
        if (l->n > J_MAX_ARGS - x->n) return j_fail(r, "too many arguments");
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
            return j_fail(r, "too many arguments");
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

static bool kw_known(const jnode *m, jv name)
{
    for (size_t i = 0; i < m->args.n; i++)
        if (m->args.names[i]->n == name.n && j_is_str(name, m->args.names[i]->name)) return true;
    return false;
}

/* What a macro gets beyond its parameters: varargs, kwargs, caller; an error unless it uses them
 * (a name that the template nowhere mentions has no symbol). */
static int bind_rest(jrun *r, const jfunc *f, const jcall *c)
{
    const jnode *m = f->macro;
    const jsym *varargs = j_sym_find(r->t, "varargs", 7), *kwargs = j_sym_find(r->t, "kwargs", 6);
    const jsym *caller = j_sym_find(r->t, "caller", 6);
    jv rest = j_list(r, 0), named = j_dict(r);
    for (size_t i = m->args.n; i < c->n; i++)
        j_push(r, rest.list, c->v[i]);
    for (size_t i = 0; i < c->n_kw; i++) {
        if (kw_known(m, c->kw_names[i])) continue;
        if (caller && j_is_str(c->kw_names[i], "caller"))
            bind(r, caller, c->kw[i]);
        else
            j_dict_set(r, named.dict, c->kw_names[i], c->kw[i]);
    }
    if (rest.list->n && !varargs)
        return j_fail(r, "macro '%s' takes not more than %zu arguments", m->sym->name, m->args.n);
    if (named.dict->n && !kwargs)
        return j_fail(r, "macro '%s' has no parameter '%.*s'", m->sym->name,
                      (int)named.dict->keys[0].n, named.dict->keys[0].s);
    rest.t = J_TUPLE;
    if (varargs) bind(r, varargs, rest);
    if (kwargs) bind(r, kwargs, named);
    return 0;
}

static int call_macro(jrun *r, const jfunc *f, const jcall *c, jv *out)
{
    const jnode *m = f->macro;
    int rc = 0;
    jscope *before = r->scope;
    r->scope = push_scope(r, f->scope);
    TRY(bind_rest(r, f, c));
    for (size_t i = 0; i < m->args.n; i++) {
        jv v = j_undef(m->args.names[i]->name);
        if (i < c->n && c->n_kw) {
            jv twice;
            jcall kw = {.n_kw = c->n_kw, .kw_names = c->kw_names, .kw = c->kw};
            if (j_arg(&kw, 0, m->args.names[i]->name, &twice))
                TRY(j_fail(r, "argument '%s' is given twice", m->args.names[i]->name));
        }
        if (!j_arg(c, i, m->args.names[i]->name, &v) && m->args.v[i])
            TRY(j_eval(r, m->args.v[i], &v));
        bind(r, m->args.names[i], v);
    }
    TRY(capture(r, m->d, out));
out:
    r->scope = before;
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

int j_call(jrun *r, jv f, const jcall *c, jv *out)
{
    int rc = 0;
    if (f.t == J_UNDEF) return undefined(r, f);
    if (f.t != J_FUNC && f.t != J_LOOP)
        return j_fail(r, "a value of type %s cannot be called", j_type_name(f));
    if (++r->depth > J_MAX_DEPTH) {
        rc = j_fail(r, "calls nested too deep");
    } else if (f.t == J_LOOP) {
        rc = call_loop(r, f.loop, c, out);
    } else if (f.fn->macro) {
        rc = call_macro(r, f.fn, c, out);
    } else if (f.fn->blocked) {
        rc = j_fail(r, "'%s' would change a value; a template may only read them", f.fn->name);
    } else {
        rc = f.fn->native(r, f.fn->self, c, out);
    }
    r->depth--;
    return rc;
}

static int call_row(jrun *r, const j_row *row, const char *kind, jv v, const jcall *c, jv *out)
{
    size_t n = c->n + c->n_kw;
    if (n < row->min || n > row->max)
        return j_fail(r, "%s '%s' got %zu arguments, takes %d to %d", kind, row->name, n, row->min,
                      row->max);
    return row->fn(r, v, c, out);
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

static int eval_concat(jrun *r, const jnode *x, jv *out)
{
    int rc = 0;
    buf b = {0};
    for (size_t i = 0; i < x->n_kids; i++) {
        jv v;
        TRY(j_eval(r, x->kids[i], &v));
        TRY(j_print(r, &b, v));
    }
    *out = j_copy(r, b.data, b.len);
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
        rc = j_fail(r, "expressions nested too deep");
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
    }
    r->scope = before;
    rc = 0;
    if (l->items->n == 0 && x->n_kids) TRY(exec_inner(r, x->kids[0], push_scope(r, before)));
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
    if (c.n_kw >= J_MAX_ARGS) return j_fail(r, "too many arguments");
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

static int exec_value(jrun *r, const jnode *x)
{
    int rc = 0;
    jv v;
    switch (x->op) {
    case JS_PRINT:
        TRY(j_eval(r, x->a, &v));
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
    if (++r->depth > J_MAX_DEPTH) rc = j_fail(r, "blocks nested too deep");
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
        if (sym) r->globals[sym->id] = method_value(r, j_none(), g, false);
    }
    for (const json *k = context ? context->child : NULL; k; k = k->next) {
        const jsym *sym = k->string ? j_sym_find(r->t, k->string, strlen(k->string)) : NULL;
        if (sym) r->globals[sym->id] = j_from_json(r, k, 0);
    }
}

int jinja_render(const jtmpl *t, const json *context, uint64_t max_steps, buf *out, err *e)
{
    buf text = {0};
    jrun r = {.t = t, .a = arena_make(), .e = e, .out = &text, .line = 1, .max_steps = max_steps};
    r.globals = j_alloc(&r, (t->n_syms + 1) * sizeof(jv));
    r.scope = r.root = push_scope(&r, NULL);
    bind_globals(&r, context);
    int rc = exec(&r, t->body);
    if (rc >= 0) buf_add(out, text.data ? text.data : "", text.len);
    buf_free(&text);
    arena_drop(r.a);
    return rc < 0 ? rc : 0;
}
